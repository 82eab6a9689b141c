"""Check calls, layer and model of flash-linear-attention on nsa-sel against the plain functions of its wheel (the window is ours)."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import decisions
from nsa_sel.compat import parallel_nsa, patch_fla
from nsa_sel.compression import BlockMean
from nsa_sel.errors import ArgumentError

B, S, G, h, D, BLOCK, N, WINDOW = 2, 150, 2, 3, 16, 16, 4, 24  # the last block is not whole
SCALE = D**-0.5
ROUNDING = 2e-6  # fla computes in float32


@pytest.fixture(autouse=True)
def cheapest_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the selected branch: the one that compiles nothing."""
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")


@functools.cache
def naive() -> Any:
    """fla's plain functions, imported where a test begins: collecting the tests of other files need not wait for it."""
    return pytest.importorskip("fla.ops.nsa.naive", reason="pip install flash-linear-attention")


def inputs() -> list[Tensor]:
    """q [B,S,G*h,D], k and v [B,S,G,D], and three gates [B,S,G*h], as fla keeps them."""
    torch.manual_seed(0)
    gates = [torch.rand(B, S, G * h) for _ in range(3)]
    return [x.requires_grad_() for x in (torch.randn(B, S, G * h, D), torch.randn(B, S, G, D), torch.randn(B, S, G, D), *gates)]


def compressed(x: Tensor) -> Tensor:
    """[B,S/BLOCK,G,D] in fla's layout."""
    return BlockMean(BLOCK, BLOCK)(x).transpose(1, 2)


def near(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention to the last `window` keys, dense and masked."""
    heads = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(heads, 2) for x in (k, v))
    behind = torch.arange(q.shape[1], device=q.device)[:, None] - torch.arange(k.shape[1], device=q.device)
    logits = torch.einsum("bthd,bchd->bhtc", q, k) * q.shape[-1] ** -0.5
    p = logits.masked_fill((behind < 0) | (behind >= window), -math.inf).softmax(-1)
    return torch.einsum("bhtc,bchd->bthd", p, v)


def reference(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor, g_slc: Tensor, g_swa: Tensor | None, *, block_counts: int = N, block_size: int = BLOCK,
    window_size: int = 0, **rest: Any,
) -> Tensor:  # fmt: skip
    """`parallel_nsa` from fla's plain functions. Of its keys of a block that is not whole, no row sees the mean: it is padding here."""
    assert all(value is None for value in rest.values())
    scale = q.shape[-1] ** -0.5
    means = [BlockMean(block_size, block_size)(x).transpose(1, 2) for x in (k, v)]
    k_cmp, v_cmp = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -(-k.shape[1] // block_size) - x.shape[1])) for x in means)
    o = naive().naive_nsa_compression(q, k_cmp, v_cmp, block_size, scale)[0] * g_cmp.unsqueeze(-1)
    blocks = naive().naive_nsa_topk(q, k_cmp, block_counts, block_size, scale)
    o = o + naive().naive_nsa_selection(q, k, v, blocks, block_size, scale) * g_slc.unsqueeze(-1)
    return o if g_swa is None or not window_size else o + near(q, k, v, window_size) * g_swa.unsqueeze(-1)


def assert_same(got: Tensor, wanted: Tensor, given: list[Tensor]) -> None:
    """Values and gradients in all of `given`, in float32."""
    assert torch.allclose(got, wanted, rtol=0, atol=ROUNDING)
    do = torch.randn(got.shape, generator=torch.Generator().manual_seed(2))
    for mine, other in zip(torch.autograd.grad(got, given, do), torch.autograd.grad(wanted, given, do, retain_graph=True), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=ROUNDING * float(other.detach().abs().max().clamp(min=1)) * 4)


@pytest.mark.parametrize("window", [WINDOW, 0])
def test_all_branches_of_parallel_nsa(window: int) -> None:
    given = inputs()
    options: dict[str, Any] = {"block_counts": N, "block_size": BLOCK, "window_size": window}
    used = given if window else given[:5]
    assert_same(parallel_nsa(*given, **options), reference(*given, **options), used)
    assert [str(decision.forward) for decision in list(decisions())[-2:]] == ["choose-torch", "sdpa-packed"]


@pytest.mark.parametrize("window", [WINDOW, 0])
def test_packed_sequences_have_branches_of_their_own(window: int) -> None:
    given = [x.detach()[:1] for x in inputs()[: 6 if window else 5]]
    cu = [0, 37, 37, 38, 140]
    for x in given:
        x[:, 140:] = math.nan  # padding
        x.requires_grad_()
    options: dict[str, Any] = {"block_counts": N, "block_size": BLOCK, "window_size": window}
    gates = () if window else (None,)
    wanted = torch.cat([reference(*(x[:, a:b] for x in given), *gates, **options) for a, b in itertools.pairwise(cu) if a < b], 1)
    wanted = torch.nn.functional.pad(wanted, (0, 0, 0, 0, 0, S - 140))
    for bounds in (torch.tensor(cu), cu):
        assert_same(parallel_nsa(*given, *gates, **options, cu_seqlens=bounds), wanted, given)
    both = torch.tensor(cu)
    assert_same(parallel_nsa(*given, *gates, **options, cu_seqlens=(both, both)), wanted, given)


@pytest.mark.parametrize("window", [WINDOW, 0])
def test_the_last_queries_over_all_keys(window: int) -> None:
    """What a cache gives: fewer queries than keys, of one sequence and of packed ones of several lengths."""
    given = inputs()
    options: dict[str, Any] = {"block_counts": N, "block_size": BLOCK, "window_size": window}
    whole = reference(*given, **options)
    keys = given[1:3]
    q, *gates = (x[:, -3:] for x in (given[0], *given[3:]))
    assert torch.allclose(parallel_nsa(q, *keys, *gates, **options), whole[:, -3:], rtol=0, atol=ROUNDING)
    lengths = [S, 41]
    q, *gates = (torch.cat([x[None, i, n - 1 : n] for i, n in enumerate(lengths)], 1) for x in (given[0], *given[3:]))
    k, v = (torch.cat([x[None, i, :n] for i, n in enumerate(lengths)], 1) for x in keys)
    cu_q, cu_k = torch.tensor([0, 1, 2]), torch.tensor([0, S, S + 41])
    wanted = torch.cat([whole[None, i, n - 1] for i, n in enumerate(lengths)])[None]
    assert torch.allclose(parallel_nsa(q, k, v, *gates, **options, cu_seqlens=(cu_q, cu_k)), wanted, rtol=0, atol=ROUNDING)


def test_blocks_of_the_user_replace_those_that_are_chosen() -> None:
    given = inputs()
    blocks = naive().naive_nsa_topk(given[0], compressed(given[1]), N, BLOCK, SCALE)
    own = (torch.arange(S) // BLOCK).view(1, S, 1, 1).expand(B, S, G, 1)
    options: dict[str, Any] = {"block_size": BLOCK, "window_size": WINDOW}
    selected = parallel_nsa(*given[:3], None, given[4], None, block_indices=own, block_size=BLOCK)
    rest = parallel_nsa(*given[:4], torch.zeros(B, S, G * h), given[5], block_counts=N, **options)
    o = parallel_nsa(*given, block_indices=own, **options)
    assert torch.allclose(o, selected + rest, rtol=0, atol=2 * ROUNDING)
    assert not torch.allclose(o, parallel_nsa(*given, block_indices=blocks, **options), rtol=0, atol=0.01)


# fla's layer and model


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """fla.layers.nsa. Its rotary and norm kernels run in Triton's interpreter, which cannot choose among configs: the first is taken."""
    pytest.importorskip("transformers")
    module = pytest.importorskip("fla.layers.nsa", reason="pip install flash-linear-attention")
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, kwargs: self.configs[:1])
    undo = patch_fla()
    yield module
    undo()


def with_reference(monkeypatch: pytest.MonkeyPatch, layers: Any, work: Callable[[], Any]) -> Any:
    """What `work` returns with fla's plain functions in place of the patch."""
    with monkeypatch.context() as patch:
        patch.setattr(layers, "parallel_nsa", reference)
        return work()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 1, 0, 2)])
def test_patches_undone_in_any_order_put_back_flas_own(order: tuple[int, ...]) -> None:
    modules = [pytest.importorskip(name) for name in ("fla.ops.nsa", "fla.ops.nsa.parallel", "fla.layers.nsa")]
    model = pytest.importorskip("fla.models.nsa.modeling_nsa").NSAModel
    own = [*(module.parallel_nsa for module in modules), model.forward]
    undo = [patch_fla() for _ in range(3)]
    for i in order:
        assert all(module.parallel_nsa is parallel_nsa for module in modules)
        undo[i]()
    assert [*(module.parallel_nsa for module in modules), model.forward] == own


def test_undo_leaves_what_another_library_put_over_the_patch(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    undo, another = patch_fla(), lambda *_: None
    monkeypatch.setattr(layers, "parallel_nsa", another)
    undo()
    assert layers.parallel_nsa is another


def test_flas_layer_runs_on_nsa_sel(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = layers.NativeSparseAttention(
        32, num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, block_counts=3, window_size=12, layer_idx=0
    )
    x = torch.randn(2, 37, 32, requires_grad=True)
    weights = [x, *layer.parameters()]
    got = layer(x)[0]
    ran = list(decisions())[-2:]
    assert [(decision.request.kind, decision.request.n) for decision in ran] == [("choose", 3), ("attend", 3)]
    assert_same(got, with_reference(monkeypatch, layers, lambda: layer(x)[0]), weights)


def flas_model() -> Any:
    from fla.models.nsa import NSAConfig, NSAForCausalLM

    torch.manual_seed(0)
    config = NSAConfig(
        hidden_size=32, num_hidden_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, block_counts=3, window_size=12,
        vocab_size=50, intermediate_size=32, fuse_cross_entropy=False, fuse_norm=False, fuse_swiglu=False, fuse_linear_cross_entropy=False,
    )  # fmt: skip
    return NSAForCausalLM(config)


def test_flas_model_trains_and_generates_on_nsa_sel(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = flas_model()
    tokens = torch.randint(50, (2, 30))
    weights = [x for x in model.parameters() if x.requires_grad]
    assert_same(model(tokens).logits, with_reference(monkeypatch, layers, lambda: model(tokens).logits), weights)

    mask = torch.ones_like(tokens)
    mask[1, :5] = 0  # a shorter prompt, padded on the left
    with torch.no_grad():
        new = model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        for i, first in enumerate((0, 5)):
            known = tokens[i : i + 1, first:]
            for _ in range(4):  # without a cache
                known = torch.cat((known, model(known, use_cache=False).logits[:, -1:].argmax(-1)), 1)
            assert torch.equal(new[i, first:], known[0])


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_flas_model_takes_its_cache_by_either_name(layers: Any, name: str) -> None:
    """transformers 5.24 hands it over as cache=, older ones as past_key_values=."""
    model, tokens = flas_model(), torch.randint(50, (2, 30))
    with torch.no_grad():
        whole, first = model(tokens).logits, model(tokens[:, :25], use_cache=True)
        rest = model(tokens[:, 25:], use_cache=True, **{name: first.past_key_values})
    assert torch.allclose(rest.logits, whole[:, 25:], rtol=0, atol=1e-5)
    assert rest.past_key_values is first.past_key_values
    with pytest.raises(ArgumentError, match="with past_key_values"):
        model(tokens, past_key_values=first.past_key_values, cache=first.past_key_values)


def float_results(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """o and the gradients of x and all weights, in float32."""
    weights = [x, *(weight for weight in layer.parameters() if weight.requires_grad)]
    o = layer(x)[0]
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [found.float() for found in (o, *torch.autograd.grad(o, weights, do))]


@pytest.mark.gpu
def test_flas_layer_in_bfloat16_is_near_its_plain_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("fla.layers.nsa", reason="pip install flash-linear-attention")
    torch.manual_seed(0)
    sizes = {"num_heads": 32, "num_kv_heads": 2, "head_dim": 64, "block_size": 64, "block_counts": 4, "window_size": 100, "layer_idx": 0}
    exact = module.NativeSparseAttention(256, **sizes).cuda()
    layer = copy.deepcopy(exact).bfloat16()
    x = torch.randn(1, 700, 256, device="cuda").bfloat16()
    monkeypatch.setattr(module, "parallel_nsa", reference)
    wanted = float_results(exact, x.float().requires_grad_())
    undo = patch_fla()
    try:
        mine = float_results(layer, x.clone().requires_grad_())
        ran = [str(decision.forward) for decision in list(decisions())[-2:]]
    finally:
        undo()
    assert ran[0] in ("choose-cuda", "choose-triton")
    assert ran[1] not in ("sdpa-packed", "numba")
    # Where two blocks' scores are level up to rounding, rows may choose the other one: few do, and they differ in one block of four.
    rows = (mine[0] - wanted[0]).flatten(0, -2).norm(dim=-1) / wanted[0].flatten(0, -2).norm(dim=-1)
    assert float(rows.quantile(0.9)) < 0.02
    for got, exactly in zip(mine[1:], wanted[1:], strict=True):
        assert (got - exactly).norm() < 0.05 * exactly.norm()
