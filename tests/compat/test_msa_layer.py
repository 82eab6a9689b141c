"""Check `MSAttention` against transformers' MiniMax-M3 layer, whose weights it loads, and its loss against the formulas."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_sel import MSAttention, NSACache, NSAttention
from nsa_sel.quantize import STORED
from tests.compat.patched import on
from tests.compat.test_minimax_m3 import ONE_LAYER, SIZES, transformers
from tests.helpers.calls import assert_refused
from tests.helpers.layer import poison

S = 70


pytestmark = pytest.mark.usefixtures("packed_sdpa")


def layer(device: str = "cpu", **options: Any) -> MSAttention:
    """Return a layer with random weights and norms: of the tiny model's sizes, on a GPU of sizes that kernels have."""
    torch.manual_seed(0)
    head_dim, block, rotary_dim = (8, 8, 4) if device == "cpu" else (64, 16, 32)
    made = MSAttention(32, 2, 2, head_dim, block_size=block, n=3, rotary_dim=rotary_dim, rotary_base=5e6, **options)
    for name, parameter in made.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3 if "norm" in name else 0.5)
    return made.to(device)


def hidden(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, S, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)


def expected_loss(made: MSAttention, x: Tensor, selected: bool) -> Tensor:
    """Return the mean of KL(P || pi) over rows and groups, by the formulas, with autograd's gradients."""
    q, k, _, index_q, index_k = made.project(x)
    position = torch.arange(S)
    visible = position <= position[:, None]
    if selected:
        blocks = made.indexer.choose(index_q, index_k).block_indices
        chosen = (blocks.unsqueeze(-1) == position // 8).any(3)  # [B,S,G,S]
    else:
        chosen = torch.ones(2, S, 2, S, dtype=torch.bool)
    keeps = chosen & visible[:, None]
    logits = torch.einsum("bsghd,bgtd->bsght", q, k) * 8**-0.5
    p = logits.masked_fill(~keeps.unsqueeze(3), -torch.inf).softmax(-1).mean(3).detach()
    index = torch.einsum("bsgd,btd->bsgt", index_q, index_k) * 8**-0.5
    log_pi = index.masked_fill(~keeps, -torch.inf).log_softmax(-1)
    return torch.where(p > 0, p * (p.clamp(min=1e-300).log() - log_pi), 0.0).sum(-1).mean()


def near(got: Any, wanted: Any, error: float) -> None:
    """Check that tensors differ by at most `error` of their largest value."""
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x.to(y.dtype), y, rtol=0, atol=error * float(y.detach().abs().max()))


def gradients(made: MSAttention) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters() if parameter.grad is not None}


def test_it_loads_a_layer_of_minimax_m3_and_equals_it() -> None:
    rope = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    config = transformers.MiniMaxM3VLTextConfig(**SIZES | ONE_LAYER, rope_parameters=rope, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLTextModel(config).eval()
    theirs, x = model.layers[0].self_attn, hidden()
    made = layer()
    made.load_state_dict(theirs.state_dict())
    position = torch.arange(S)[None]
    with torch.no_grad():
        o = theirs(x, model.rotary_emb(x, position), None, position_ids=position.expand(2, -1))[0]
        torch.testing.assert_close(made(x), o, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_loss_is_that_of_the_formulas_and_teaches_the_indexer_alone(warm_up: bool) -> None:
    made, x = layer(dtype=torch.float64), hidden(torch.float64).requires_grad_()
    made.warm_up = warm_up
    o, loss = made(x, return_loss=True)
    wanted = expected_loss(made, x, not warm_up)
    assert abs(loss.item() - wanted.item()) < 1e-6
    loss.backward()
    got = gradients(made)
    assert x.grad is None or not x.grad.any()
    assert {name.split(".")[0] for name in got} == {"indexer"}
    made.zero_grad()
    wanted.backward()
    for name, gradient in gradients(made).items():
        torch.testing.assert_close(got.get(name, torch.zeros_like(gradient)), gradient, atol=1e-7, rtol=1e-5)


def test_a_weight_adds_the_loss_to_the_backward_pass() -> None:
    made, x, do = layer(loss_weight=0.5), hidden(), torch.randn(2, S, 32, generator=torch.Generator().manual_seed(2))
    made(x).backward(do)
    both = gradients(made)
    made.zero_grad()
    o, loss = made(x, return_loss=True)
    assert made.index_loss is not None
    assert made.index_loss.item() == loss.item()
    torch.autograd.backward((o, loss), (do, torch.tensor(0.5)))
    for name, gradient in gradients(made).items():
        torch.testing.assert_close(both[name], gradient, msg=name)
    made.zero_grad()
    made.eval()(x).backward(do)
    assert not any(name.startswith("indexer") for name in gradients(made))


WAYS: dict[str, tuple[Any, float]] = {  # and the error
    "checkpoint": (lambda made: partial(checkpoint, made, use_reentrant=False), 0.0),
    "compiled": (lambda made: torch.compile(made, fullgraph=True, backend="aot_eager"), 1e-5),
}


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_and_whole_graphs_have_the_same_gradients(way: str) -> None:
    made, x = layer(loss_weight=1.0), hidden()
    results = []
    for call in (made, WAYS[way][0](made)):
        made.zero_grad()
        o = call(x)
        o.sum().backward()
        results.append((o, *gradients(made).values()))
    near(results[1], results[0], WAYS[way][1])


PACKED = [("cpu", False, "max"), ("cpu", False, "sum"), ("cpu", True, "max")]
ON_GPUS = [pytest.param("cuda", warm_up, "max", marks=pytest.mark.gpu) for warm_up in (False, True)]


@pytest.mark.parametrize(("device", "warm_up", "block_score"), PACKED + ON_GPUS)
def test_a_packed_batch_is_its_sequences_alone(device: str, warm_up: bool, block_score: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of 0 and 1, and padding that holds NaN."""
    dtype, error = (torch.float64, 1e-7) if on(device, monkeypatch) == "cpu" else (torch.float32, 1e-3)
    made, cu = layer(device, dtype=dtype, block_score=block_score), [0, 33, 33, 34, 60]
    made.warm_up = warm_up
    x = hidden(dtype)[:1].to(device)
    x[:, 60:] = torch.nan
    sequences = [x[:, begin:end] for begin, end in itertools.pairwise(cu) if end > begin]
    alone = [made(sequence, return_loss=True) for sequence in sequences]
    wanted = torch.cat([o for o, _ in alone], 1), sum(loss * y.shape[1] for (_, loss), y in zip(alone, sequences, strict=True)) / S
    (wanted[0].square().sum() + wanted[1]).backward()
    of_parts = gradients(made)
    for bounds in (cu, torch.tensor(cu, device=device)):
        made.zero_grad()
        o, loss = made(x, cu_seqlens=bounds, return_loss=True)
        near((o[:, :60], loss), wanted, error)
        assert not o[:, 60:].any()
        (o.square().sum() + loss).backward()
        near(gradients(made).values(), of_parts.values(), error)


CACHED = [("cpu", "max", None), ("cpu", "sum", None), ("cpu", "max", STORED)]
CACHED_ON_GPUS = [pytest.param("cuda", "max", kv_dtype, marks=pytest.mark.gpu) for kv_dtype in (None, STORED)]


@pytest.mark.parametrize(("device", "block_score", "kv_dtype"), CACHED + CACHED_ON_GPUS)
@torch.no_grad()
def test_cached_tokens_are_those_of_the_whole_text(device: str, block_score: str, kv_dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole prompt; chunks and single tokens; then sequences of two lengths, one of them forked, whose other rows are NaN."""
    error = 1e-5 if on(device, monkeypatch) == "cpu" else 1e-3
    made, x = layer(device, block_score=block_score), hidden().to(device)
    cache = NSACache.of([made], 40, 16, kv_dtype=kv_dtype)
    whole, (a, b) = made(x, cache=cache.step([cache.open(), cache.open()], S)[0]), (cache.open(), cache.open())
    near([whole], [made(x)], error if kv_dtype is None else 0.2)
    sizes = [40, 9, 1, 1, 19]
    near([made(part, cache=cache.step([a, b], part.shape[1])[0]) for part in x.split(sizes, 1)], whole.split(sizes, 1), error)
    for sequence in (a, b):
        cache.truncate(sequence, 10)
    near([made(x[:, 10:15], cache=cache.step([a, b], 5)[0])], [whole[:, 10:15]], error)
    c, d, rows = cache.open(), cache.open(), torch.full_like(x[:, :29], torch.nan)
    rows[0], rows[1, 17:] = x[0, :29], x[1, :12]
    o = made(rows, cache=cache.step([c, d], [29, 12])[0])
    assert not o[1, :17].any()
    e = cache.fork(c)
    made(torch.zeros_like(x[:1, :2]), cache=cache.step([e], 2)[0])
    poison(cache)
    o = made(torch.stack((x[0, 29:32], x[1, 12:15])), cache=cache.step([c, d], 3)[0])
    near([o], [torch.stack((whole[0, 29:32], whole[1, 12:15]))], error)


def test_autocast_is_within_its_error() -> None:
    made, x = layer(), hidden()
    exact, exact_loss = made(x, return_loss=True)
    with torch.autocast("cpu", torch.bfloat16):
        o, loss = made(x, return_loss=True)
    loss.backward()
    assert o.dtype == torch.bfloat16
    assert float((o - exact).detach().abs().quantile(0.9)) < 0.1 * float(exact.detach().abs().max())
    assert abs(loss.item() - exact_loss.item()) < 0.05 * exact_loss.item()
    assert {name.split(".")[0] for name in gradients(made)} == {"indexer"}


def step_of(made: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a cache's step of S tokens of two sequences, for the layer."""
    cache = NSACache.of([made], 12, 16, dtype=dtype)
    return cache.step([cache.open(), cache.open()], S)[0]


def test_arguments_that_do_not_fit_are_refused() -> None:
    def of_step(step: Any) -> Any:
        return torch.no_grad()(lambda: layer()(hidden(), cache=step))

    assert_refused(
        (r"^rotary_dim is 5; allowed: an even number from 0 to 8", lambda: MSAttention(32, 2, 2, 8, rotary_dim=5)),
        (r"^block_score is 'mean'", lambda: MSAttention(32, 2, 2, 8, block_score="mean")),  # type: ignore[arg-type]
        (r"^x is of shape \(2, 70, 31\)", lambda: layer()(hidden()[..., :31])),
        (r"^positions is", lambda: layer()(hidden(), torch.arange(3))),
        (r"^x is of B = 2 with cu_seqlens", lambda: layer()(hidden(), cu_seqlens=[0, S])),
        (r"^max_seqlen is 9; allowed: None without", lambda: layer()(hidden(), max_seqlen=9)),
        (r"^cache is given with return_loss", lambda: layer()(hidden(), cache=step_of(layer()), return_loss=True)),
        (r"^cache is a dict", lambda: layer()(hidden(), cache={})),
        (r"^x is a tensor that requires gradients, or of a layer that does", lambda: layer()(hidden(), cache=step_of(layer()))),
        (r"^cache is of compress_block = 32; allowed: the layer's compress_block = 1", of_step(step_of(NSAttention(32, 2, 2, 8)))),
        (r"^cache is of torch.float64; allowed: torch.float32, the dtype of the layer's keys", of_step(step_of(layer(), torch.float64))),
        (r"^cache is of 1 groups of index keys of 16 numbers", of_step(step_of(layer(index_dim=16)))),
        (r"^model_layers is 2 layers of 2 kinds", lambda: NSACache.of([layer(), NSAttention(32, 2, 2, 8)], 4, 16)),
        (r"^index_dim is 8; allowed: None with compression or a window", lambda: NSACache(1, 4, 16, 2, 8, index_dim=8, window=64)),
    )
