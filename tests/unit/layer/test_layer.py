"""Check `NSAttention` against the equations of the paper: projections, compression, rotary positions, gates, autocast, checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from nsa_sel import NSACache, NSASelection, NSAttention, Selection, attention_layer, block_scores, decisions, rotary, selection_attention
from nsa_sel.backends._triton import elementwise
from nsa_sel.compression import BlockMean, BlockMLP
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.msa_layer import UnitOffsetNorm
from nsa_sel.projection import copy_wide, fits_wide, split_columns
from nsa_sel.rotary import rotate
from tests.helpers import layer as nsa_reference
from tests.helpers.calls import assert_refused, calls_of
from tests.helpers.cases import make_qkv
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.gpus import captured, no_waiting, replayed
from tests.helpers.layer import SMALL, check_rotation, make_layer

pytestmark = pytest.mark.usefixtures("cheapest_backend")


def make(name: str = "mlp", dtype: torch.dtype = torch.float64, **changed: Any) -> NSAttention:
    """A layer all of whose parameters are random, and require gradients."""
    return make_layer(name, dtype, **changed).requires_grad_()


def hidden(layer: NSAttention, S: int, B: int = 2) -> Tensor:
    x = torch.randn(B, S, layer.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(layer.q.weight).requires_grad_()


# The reference


def compressed(module: BlockMLP | BlockMean, x: Tensor, l: int, d: int) -> Tensor:
    """Eq. 7 block by block: [B,G,C,D] of x [B,S,G,D]."""
    blocks = [x[:, i : i + l] for i in range(0, x.shape[1] - l + 1, d)]
    if not blocks:
        return x.new_zeros(x.shape[0], x.shape[2], 0, x.shape[3])
    if isinstance(module, BlockMean):
        return torch.stack([block.mean(1) for block in blocks], 2)
    keys = [(block + module.inside[:, None]).transpose(1, 2).flatten(2) for block in blocks]  # [B,G,l*D], keys in order
    mlp = [torch.nn.functional.gelu(key @ module.first.weight.T + module.first.bias) for key in keys]
    return torch.stack([torch.nn.functional.linear(y, module.second.weight, module.second.bias) for y in mlp], 2)


def turned(x: Tensor, base: float) -> Tensor:
    """Each pair as a complex number of a head, times e^(i angle)."""
    half = x.shape[-1] // 2
    angles = [[position * base ** (-i / half) for i in range(half)] for position in range(x.shape[1])]
    turn = torch.polar(torch.ones(x.shape[1], half, dtype=torch.float64), torch.tensor(angles, dtype=torch.float64))
    pairs = torch.complex(x[..., :half], x[..., half:]) * turn.view(x.shape[1], *[1] * (x.dim() - 3), half)
    return torch.cat((pairs.real, pairs.imag), -1)


def reference(layer: NSAttention, x: Tensor, base: float | None) -> Tensor:
    """The layer in plain PyTorch, from its parameters."""
    B, S, _ = x.shape
    rule = layer.rule
    Dk, Dv = layer.head_dim, layer.value_dim
    q = layer.q(x).view(B, S, layer.groups, layer.heads, Dk)
    kv = layer.kv(x).view(B, S, layer.groups, 3 * (Dk + Dv))
    k_cmp, k_slc, k_win = (kv[..., i * (Dk + Dv) :][..., :Dk] for i in range(3))
    v_cmp, v_slc, v_win = (kv[..., i * (Dk + Dv) + Dk :][..., :Dv] for i in range(3))
    gates = 1 / (1 + torch.exp(-layer.gate(x))).view(B, S, layer.groups, layer.heads, 3)
    l, d = rule.compress_block, rule.compress_stride
    found = (compressed(layer.compress_k, k_cmp, l, d), compressed(layer.compress_v, v_cmp, l, d))
    q_cmp = q
    if base is not None:
        q, k_slc, k_win = turned(q, base), turned(k_slc, base), turned(k_win, base)
    others = (y.transpose(1, 2) for y in (k_slc, v_slc, k_win, v_win))
    o = nsa_reference.nsa(q, *found, *others, gates, q_cmp=q_cmp, window=layer.window, **rule._asdict())
    return layer.out(o.flatten(2))  # type: ignore[no-any-return]


def gradients(o: Tensor, layer: NSAttention, x: Tensor) -> dict[str, Tensor]:
    leaves = {"x": x, **dict(layer.named_parameters())}
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(o)
    found = torch.autograd.grad(o, list(leaves.values()), weights, allow_unused=True)
    return {name: torch.zeros_like(y) if dy is None else dy for (name, y), dy in zip(leaves.items(), found, strict=True)}


@pytest.mark.parametrize(
    ("name", "S", "base"), [("mlp", 21, 1e4), ("mlp", 5, 1e4), ("mean", 19, 1e4), ("no-positions", 15, None), ("mean", 13, 500.0)]
)
def test_results_and_gradients_are_the_papers(name: str, S: int, base: float | None) -> None:
    layer = make(name, **({"rotary": functools.partial(rotate, base=base)} if base == 500 else {}))
    x = hidden(layer, S)
    o, wanted = layer(x), reference(layer, x, base)
    torch.testing.assert_close(o, wanted, rtol=1e-9, atol=1e-9)
    right = gradients(wanted, layer, x)
    torch.testing.assert_close(gradients(o, layer, x), right, rtol=1e-8, atol=1e-8)
    assert all(mine.any() for mine in right.values()) == (S > 5)  # a sequence shorter than a block compresses nothing


@pytest.mark.parametrize(("B", "S"), [(0, 5), (2, 0), (0, 0)])
def test_empty_batches_and_sequences(B: int, S: int) -> None:
    layer = make("mlp", torch.float32)
    x = hidden(layer, S, B)
    o = layer(x)
    assert o.shape == (B, S, layer.width)
    assert not any(dx.any() for dx in gradients(o, layer, x).values())


def test_rotary_positions_are_relative_and_may_be_given() -> None:
    layer = make()
    x, positions = hidden(layer, 12), torch.arange(12)
    o = layer(x)
    assert torch.equal(layer(x, positions), o)
    assert torch.equal(layer(x, positions.int().expand(2, 12)), o)
    torch.testing.assert_close(layer(x, positions + 1000), o)
    assert not torch.allclose(layer(x, 2 * positions), o)
    apart = layer(x, torch.stack((positions, 2 * positions)))
    torch.testing.assert_close(apart, torch.cat((o[:1], layer(x, 2 * positions)[1:])))
    seen = []
    layer.rotary = lambda y, at: seen.append(y.dim()) or rotate(y, at)  # type: ignore[func-returns-value]
    torch.testing.assert_close(layer(x), o)
    assert seen == [5, 4, 4]


@pytest.mark.parametrize("rotary_of", [True, functools.partial(rotate, base=500.0)], ids=["default", "base"])
def test_a_step_casts_once_and_makes_one_table(rotary_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make("mlp", torch.float32, rotary=rotary_of, compression="mean")
    tables, x, seen = calls_of(monkeypatch, rotary, "_cos_and_sin"), hidden(layer, 20), []
    for projection in (layer.q, layer.kv, layer.gate):
        projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        o = layer(x)
    gradients(o, layer, x)
    assert len(tables) == 1
    assert ([y is seen[0] for y in seen], seen[0].dtype) == ([True] * 3, torch.bfloat16)


@pytest.mark.parametrize(("shape", "positions", "named"), [((2, 5, 7), (5,), "x"), ((5, 6), (5,), "x"), ((2, 5, 6), (4,), "positions")])
def test_what_does_not_rotate(shape: tuple[int, ...], positions: tuple[int, ...], named: str) -> None:
    """The kernel would read other angles, or memory beyond them."""
    with pytest.raises(ArgumentError, match=f"{named} is of shape"):
        rotate(torch.zeros(shape), torch.zeros(positions, dtype=torch.int64))


@pytest.mark.parametrize("rotary_of", [True, False])
def test_transforms_are_refused(rotary_of: bool) -> None:
    """Not with what PyTorch says of the layer's autograd functions."""
    layer, words = make("mlp", torch.float32, rotary=rotary_of), "NSAttention is called inside a transform"
    x = hidden(layer, 20).detach()
    assert_refused(
        (words, lambda: torch.func.grad(lambda y: layer(y).sum())(x)),
        (words, lambda: torch.func.jvp(layer, (x,), (x,))),
        (words, lambda: torch.func.vmap(lambda y: layer(y[None]))(x)),
        error=BackendError,
    )


def test_compression_holds_no_unfolded_windows() -> None:
    """Autograd saves less than three copies of x for an MLP over blocks of 4 strides; unfolded windows alone are four."""
    module = BlockMLP(8, 16, 4)
    x = torch.randn(1, 400, 2, 8, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: saved.append(y) or y, lambda y: y):
        module(x)
    held = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in saved}
    for y in module.parameters():
        held.pop(y.untyped_storage().data_ptr(), None)
    assert x.nbytes <= sum(held.values()) < 3 * x.nbytes


class _Adapted(torch.nn.Module):
    """A linear layer with a change of low rank, which shows the layer's own weight, as adapters (LoRA) do."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer, self.weight, self.bias = layer, layer.weight, layer.bias
        self.a, self.b = (torch.nn.Parameter(torch.randn(size, 1, dtype=layer.weight.dtype)) for size in layer.weight.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.b @ self.a.T  # type: ignore[no-any-return]


def test_adapters_and_hooks_of_the_compression_take_part() -> None:
    layer, merged = make(), make()
    for module, own in ((layer.compress_k, merged.compress_k), (layer.compress_v, merged.compress_v)):
        adapted = _Adapted(module.first)
        module.first = adapted  # type: ignore[assignment]
        own.first.weight.data += (adapted.a @ adapted.b.T).detach()
        module.second.register_forward_hook(lambda _, given, found: 2 * found)
        own.second.weight.data *= 2
        if own.second.bias is not None:
            own.second.bias.data *= 2
    x = hidden(layer, 30)
    torch.testing.assert_close(layer(x), merged(x), rtol=1e-9, atol=1e-9)
    layer(x).sum().backward()
    assert all(bool(part.grad.any()) for part in layer.compress_k.first.parameters())  # type: ignore[union-attr]
    with torch.no_grad():
        cache = NSACache.of([layer], 4, 8)
        sequence = cache.open()
        steps = [layer(part, cache=cache.step([sequence], part.shape[1])[0]) for part in x[:1].split([9, 1, 20], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), merged(x[:1]), rtol=1e-9, atol=1e-9)


def test_weights_with_a_bias_of_compressed_keys_load_and_give_the_same() -> None:
    """The bias changed no result, and its gradient was rounding that Adam followed: layers no longer have it."""
    old, new = make(), make()
    torch.nn.init.zeros_(new.q.weight)
    assert "compress_k.second.bias" not in new.state_dict()
    old.compress_k.second.bias = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))  # type: ignore[union-attr]
    new.load_state_dict(old.state_dict())
    x = hidden(new, 30)
    torch.testing.assert_close(new(x), old(x))


@pytest.mark.parametrize("name", ["mlp", "mean"])
def test_autocast_checkpoints_and_reruns(name: str) -> None:
    layer = make(name, torch.float32)
    x = hidden(layer, 30)
    exact = layer(x).detach()
    results = []
    for repeat in (0, 0, 1):
        with torch.autocast("cpu", torch.bfloat16):
            o = checkpoint(layer, x, use_reentrant=False) if repeat else layer(x)
        results.append((o, *gradients(o, layer, x).values()))
    assert all(all(map(torch.equal, other, results[0])) for other in results[1:])
    o, *found = results[0]
    assert o.dtype == torch.bfloat16
    assert all(dx.dtype == torch.float32 and bool(dx.isfinite().all()) for dx in found)
    assert float((o.detach().float() - exact).square().mean().sqrt() / exact.std()) < 0.05
    assert torch.equal(checkpoint(layer, x, use_reentrant=False), exact)


def test_state_dict_and_description() -> None:
    layer = make("no-positions")
    other = NSAttention(6, 2, 1, 2, 4, **{**SMALL, "compress_stride": 2}, bias=True, rotary=False).double()
    x = hidden(layer, 17)
    assert not torch.allclose(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert all(part in repr(layer) for part in ("groups=2", "value_dim=4", "compress_stride=2", "rotary=False", "BlockMLP", "window=6"))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_layer_trains_on_a_gpu(mode: str) -> None:
    """The second mode replays CUDA graphs from the third call on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = NSAttention(64, 2, 4, 16, device="cuda")
    x = torch.randn(2, 300, 64, device="cuda", requires_grad=True)
    o = layer(x)
    wanted = (o.detach(), *gradients(o, layer, x).values())
    compiled, results = torch.compile(layer, fullgraph=True, mode=mode), []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        o = compiled(x)
        results.append([y.detach().clone() for y in (o, *gradients(o, layer, x).values())])
    torch.testing.assert_close(results[0], wanted, rtol=1e-3, atol=1e-4)
    assert all(all(map(torch.equal, other, results[0])) for other in results[1:])


@pytest.mark.gpu
@pytest.mark.parametrize(("repeats", "recompute"), [(False, False), (True, False), (False, True)], ids=["", "checkpoint", "recompute"])
def test_a_cuda_graph_replays_a_step_in_autocast(repeats: bool, recompute: bool) -> None:
    """Replays use new hidden states and parameters. The host never waits for the GPU."""
    torch.manual_seed(0)
    layer = NSAttention(64, 2, 4, 16, device="cuda", recompute=recompute)
    x = torch.randn(2, 700, 64, device="cuda", requires_grad=True)
    do = torch.randn(2, 700, 64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            o = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if repeats else layer(x)
        return o, *torch.autograd.grad(o, (x, *layer.parameters()), do.to(o.dtype))

    graph, outputs = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for y in (x, *layer.parameters()):
                y.mul_(1.1)
        found = replayed(graph, outputs)
        with no_waiting():
            wanted = step()
        assert all(map(torch.equal, found, wanted))


def test_wrong_layers_are_refused() -> None:
    assert_refused(
        ("width is 0.*a whole number >= 1", lambda: NSAttention(0, 1, 1, 4)),
        ("heads is True", lambda: NSAttention(8, 1, True, 4)),
        ("head_dim is 3.*an even number.*rotary=False", lambda: NSAttention(8, 1, 1, 3)),
        (r"rotary is 500000.0; allowed: True, False or a callable.*base=\.\.\.", lambda: NSAttention(8, 1, 1, 4, rotary=5e5)),  # type: ignore[arg-type]
        ("bias is tensor.*True or False", lambda: NSAttention(8, 1, 1, 4, bias=torch.zeros(2))),  # type: ignore[arg-type]
        ("compression is 'max'.*'mlp', 'mean'", lambda: NSAttention(8, 1, 1, 4, compression="max")),  # type: ignore[arg-type]
        ("compress_block is 24.*a multiple of compress_stride = 16", lambda: NSAttention(8, 1, 1, 4, compress_block=24)),
        (r"first \+ local is 1 \+ 2", lambda: NSAttention(8, 1, 1, 4, n=2)),
        ("window is 0", lambda: NSAttention(8, 1, 1, 4, window=0)),
    )


@pytest.mark.parametrize("rotary_of", [True, False])
def test_wrong_input_is_refused(rotary_of: bool) -> None:
    layer, x = make("mlp", torch.float32, rotary=rotary_of), torch.zeros(1, 3, 10)
    assert_refused(
        (r"x is of shape \(3, 10\); allowed: \[B,S,width = 10\]", lambda: layer(x[0])),
        (r"x is of shape \(1, 3, 9\)", lambda: layer(x[..., :9])),
        ("x is a list", lambda: layer([1])),
        ("x is torch.int64 on cpu; allowed: a floating dtype on cpu or cuda", lambda: layer(x.long())),
        ("x is torch.float32 on meta", lambda: layer(x.to("meta"))),
        (r"positions is of shape \(4,\)", lambda: layer(x, torch.zeros(4, dtype=torch.long))),
        ("positions is of dtype torch.float32", lambda: layer(x, torch.zeros(3))),
        ("x is torch.bfloat16; allowed: torch.float32, the dtype of the layer's parameters", lambda: layer(x.bfloat16())),
        ("x is torch.float64; allowed: torch.float32", lambda: layer(x.double())),
    )
    for given, layer in ((x.bfloat16(), make("mlp", torch.float32)), (x, make("mlp", torch.bfloat16))):
        with pytest.raises(ArgumentError, match=r"^x is torch\.\w+; allowed: torch\.\w+, .* or run the model under torch\.autocast"):
            layer(given)
        with torch.autocast("cpu", torch.bfloat16):  # casts what a layer does not take
            assert layer(given).dtype == torch.bfloat16


def make_joined(**options: Any) -> NSAttention:
    return make(**{"value_dim": 6, "n": 3, "local": 1, **options})


def results(layer: NSAttention, **given: Any) -> tuple[Tensor, ...]:
    """o, and the gradients of x and of the parameters that have one."""
    x = hidden(layer, 21, 1 if "cu_seqlens" in given else 2)
    with new_memory_is_nan():
        o = layer(x, **given)
        leaves = [y for y in (x, *layer.parameters()) if y.requires_grad]
        return o.detach(), *torch.autograd.grad(o.square().sum(), leaves)


@contextlib.contextmanager
def joined(times: int) -> Iterator[None]:
    """Assert that the projections are joined `times` times."""
    with mock.patch.object(attention_layer, "project", wraps=attention_layer.project) as project:
        yield
    assert project.call_count == times


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, {}),
        ({"bias": True, "value_dim": 4}, {}),
        ({"rotary": functools.partial(rotate, base=500.0), "compression": "mean"}, {"positions": torch.arange(42).view(2, 21)}),
        ({"value_dim": 4, "compress_block": 12, "block_size": 12}, {"cu_seqlens": [0, 9, 9, 20]}),
    ],
    ids=["default", "bias", "base", "packed"],
)
def test_joined_layers_compute_the_same(options: dict[str, Any], given: dict[str, Any]) -> None:
    layer = make_joined(**options)
    with joined(1):
        found = results(layer, **given)
    with mock.patch.object(attention_layer, "joins", return_value=False), joined(0):
        torch.testing.assert_close(found, results(layer, **given), rtol=1e-10, atol=1e-10)
    assert all(map(torch.equal, found, results(layer, **given)))


def test_frozen_parameters_and_inputs() -> None:
    layer = make_joined()
    everything = dict(zip(["o", "x", *dict(layer.named_parameters())], results(layer), strict=True))
    for name in ("q.weight", "gate.bias", "compress_k.first.weight"):
        layer.get_parameter(name).requires_grad_(False)
        del everything[name]
    with joined(1):
        found = results(layer)
    assert all(map(torch.equal, found, everything.values()))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    assert len(results(layer)) == 2
    with joined(1), torch.no_grad():
        assert torch.equal(layer(hidden(layer, 21)), found[0])


class Adapted(nn.Linear):
    """As adapters and quantized layers are: another class in the layer's place."""


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.q.register_forward_hook(lambda *_: None),
        lambda layer: layer.kv.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.gate.register_full_backward_hook(lambda *_: None),
        lambda layer: weight_norm(layer.q),
        lambda layer: layer.kv.__setattr__("__class__", Adapted),
        lambda layer: layer.gate.__setattr__("forward", functools.partial(nn.Linear.forward, layer.gate)),
        lambda layer: layer.__setattr__("rotary", lambda x, positions: rotate(x, positions)),
    ],
    ids=["hook", "pre-hook", "backward-hook", "parametrization", "adapter", "forward", "rotary"],
)
def test_changed_projections_are_called_one_by_one(change: Callable[[NSAttention], Any]) -> None:
    layer, plain, odd = make_joined(), make_joined(), make_joined(groups=1, heads=1, head_dim=2, value_dim=2)
    change(layer)
    assert (odd.q.out_features + odd.kv.out_features + odd.gate.out_features) % 2  # rows of 7 numbers, which TMA can't read
    with joined(0):
        o, _ = layer(hidden(layer, 21)), odd(hidden(odd, 21))
    torch.testing.assert_close(o, plain(hidden(plain, 21)))


def test_the_module_equals_the_plain_call_for_scores_and_blocks() -> None:
    q, k, v = make_qkv(B=2, S=48, G=2, S_kv=64, requires_grad=True)
    module = NSASelection(n=3, block_size=16, backend="sdpa-packed")
    scores = torch.randn(2, 48, 2, 4)
    selection = Selection.from_scores(scores, 3, 16, S_kv=64)
    wanted = selection_attention(q, k, v, selection, return_lse=True, backend="sdpa-packed")
    for given in ({"scores": scores}, {"block_indices": selection.block_indices}):
        assert all(map(torch.equal, module(q, k, v, **given, return_lse=True), wanted))
    assert decisions()[-1].forward == "sdpa-packed"
    module(q, k, v, scores).sum().backward()
    assert q.grad is not None
    assert list(module.parameters()) == []
    assert "n=3, block_size=16" in repr(module)


def test_positions_and_options_reach_the_call() -> None:
    q, k, v = make_qkv(S=4, S_kv=64)
    q_pos, scores = torch.tensor([3, 20, 40, 63]), torch.randn(1, 4, 1, 4)
    got = NSASelection(2, 16, first=0, local=1, scale=0.5)(q, k, v, scores, q_pos=q_pos)
    selection = Selection.from_scores(scores, 2, 16, 0, 1, q_pos=q_pos)
    assert torch.equal(got, selection_attention(q, k, v, selection, scale=0.5, q_pos=q_pos))


@pytest.mark.parametrize(("block", "length", "stride"), [(64, 32, 16), (16, 16, 16), (32, 32, 8), (16, 32, 16)])
@pytest.mark.parametrize("S_kv", [192, 200])
def test_block_scores_follow_the_paper(block: int, length: int, stride: int, S_kv: int) -> None:
    """Eq. 9 key by key: every key of a compressed one adds p / stride to its block; Eq. 10 sums over heads."""
    compressed = (S_kv - length) // stride + 1
    p = torch.rand(1, 3, 2, 4, compressed, requires_grad=True)
    wanted = torch.zeros(1, 3, 2, -(-S_kv // block))
    for i in range(compressed):
        for key in range(i * stride, i * stride + length):
            wanted[..., key // block] += p[..., i].detach().sum(-1) / stride
    got = block_scores(p, block, length, stride, S_kv)
    torch.testing.assert_close(got, wanted)
    assert not got.requires_grad


def test_bad_arguments_are_refused() -> None:
    (q, k, v), p = make_qkv(S=16), torch.zeros(1, 1, 1, 1, 3)
    assert_refused(
        ("^scores, block_indices is neither given", lambda: NSASelection()(q, k, v)),
        ("^scores, block_indices is both given", lambda: NSASelection()(q, k, v, p, block_indices=p)),
        ("^k is a list", lambda: NSASelection()(q, [k], v, torch.zeros(1, 16, 1, 1))),  # type: ignore[arg-type]
        ("^compress_block is 24; allowed: a multiple of compress_stride = 16", lambda: block_scores(p, 64, 24, 16, 64)),
        ("^block_size is 0; allowed: a whole number", lambda: block_scores(p, 0, 32, 16, 64)),
        (r"^p is of shape \(1, 3\)", lambda: block_scores(p[0, 0, 0], 64, 32, 16, 64)),
        (r"^p is of shape .*9\); allowed: \[B,S,G,h,3\]", lambda: block_scores(torch.zeros(1, 1, 1, 1, 9), 64, 32, 16, 64)),
    )


def test_gradients_of_rotary_positions() -> None:
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda y: rotate(y, torch.tensor([0, 3, 1, 8, 2])), (x,))
    half = x.detach().half()
    assert rotate(half, torch.arange(5)).dtype == torch.float16
    torch.testing.assert_close(rotate(half, torch.arange(5)), rotate(half.double(), torch.arange(5)).half())


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_gradients_of_queries_with_and_without_positions(used: tuple[bool, bool]) -> None:
    """Autograd's sum of both, in float64, from a float32 pass that rounds once."""
    x, positions = torch.randn(2, 5, 3, 4, requires_grad=True), torch.tensor([[0, 3, 1, 8, 2], [700, 9, 4, 4, 4]])
    weights = torch.randn(2, *x.shape)
    kept, rotated = rotary.kept_and_rotated(x, rotary.angles(x, positions))
    assert torch.equal(kept, x)
    assert torch.equal(rotated, rotate(x, positions))
    outputs, given = ([y for y, use in zip(pair, used, strict=True) if use] for pair in ((kept, rotated), weights))
    (mine,) = torch.autograd.grad(outputs, x, given)
    wide = x.detach().double().requires_grad_()
    both = (wide * weights[0] * used[0] + rotate(wide, positions) * weights[1] * used[1]).sum()
    torch.testing.assert_close(mine, torch.autograd.grad(both, wide)[0].float())


@pytest.mark.parametrize("rotary_of", [functools.partial(rotate, torch.zeros(1)), functools.partial(torch.add, alpha=2), torch.add])
def test_only_rotate_and_its_bases_share_a_table(rotary_of: Any) -> None:
    assert rotary.base_of(rotary_of) is None
    assert [rotary.base_of(f) for f in (rotate, functools.partial(rotate), functools.partial(rotate, base=5.0))] == [1e4, 1e4, 5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_rotary_kernel_is_exact(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "INTERPRETED_TILE", 1 << 10)  # several programs, and the last one has rows to spare
    check_rotation(dtype, "cpu", 12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("D", [2, 24, 64, 128, 192, 256])
def test_the_rotary_kernel_is_exact_on_a_gpu(dtype: torch.dtype, D: int) -> None:
    check_rotation(dtype, "cuda", D)


NORMED = [("cpu", torch.float32, 12, 4), ("cpu", torch.float16, 8, 8)] + [
    pytest.param("cuda", dtype, D, rotated, marks=pytest.mark.gpu)
    for dtype in (torch.bfloat16, torch.float16, torch.float32) for D, rotated in ((64, 64), (128, 64), (24, 8), (192, 128))
]  # fmt: skip


@pytest.mark.parametrize(("device", "dtype", "D", "rotated"), NORMED)
def test_norms_with_positions_are_exact(device: str, dtype: torch.dtype, D: int, rotated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients of strided keys, and of queries with positions per sequence, are within rounding, reruns bit-equal."""
    monkeypatch.setattr(elementwise, "INTERPRETED_TILE", 1 << 7)
    norm = UnitOffsetNorm(D, 1e-5).to(device)
    torch.nn.init.normal_(norm.weight)
    make = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    each = torch.randint(0, 1000, (2, 19), generator=torch.Generator().manual_seed(2)).to(device)
    for x, positions in ((make(2, 19, D + 8)[..., 8:], each[0]), (make(2, 3, 2, 19, D).movedim(3, 1), each)):
        x = x.to(device, dtype).requires_grad_()
        do = make(19, *x.shape[2:], 2).movedim(-1, 0).to(x)
        table = rotary.angles_of(positions, rotated, dtype, 1e4)
        runs = []
        for _ in range(2):
            with new_memory_is_nan():
                o = rotary.normed_and_rotated(x, norm.weight, norm.eps, table)
                runs.append((o, *torch.autograd.grad(o, (x, norm.weight), do)))
        assert all(map(torch.equal, *runs))
        wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
        y = torch.nn.functional.rms_norm(wide, (D,), 1 + weight, norm.eps)
        wanted = torch.cat((rotary._plain(y[..., :rotated], None, *(z.double() for z in table), False), y[..., rotated:]), -1)
        exact = wanted, *torch.autograd.grad(wanted, (wide, weight), do.double())
        for got, value in zip(runs[0], exact, strict=True):
            error = 4 * torch.finfo(got.dtype).eps * max(1.0, float(value.detach().abs().max()))
            torch.testing.assert_close(got.double(), value, rtol=0, atol=error)


def test_gradients_of_parts_are_one_tensor() -> None:
    """A part that nothing depends on has zeros there; others come with any strides."""
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert all(map(torch.equal, split_columns(x, [2, 4, 1]), x.split([2, 4, 1], -1)))

    def work(y: Tensor) -> Tensor:
        a, _, b = split_columns(y, [2, 4, 1])
        return a.transpose(0, 2).contiguous().sin().sum() + b.square().sum()

    with new_memory_is_nan():
        assert torch.autograd.gradcheck(work, (x,))
    assert torch.autograd.gradgradcheck(work, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("first", "size", "room"), [(4, 8, 16), (4, 8, 15), (3, 8, 16), (4, 7, 16), (0, 16, 16)])
def test_wide_copies_are_copies(dtype: torch.dtype, first: int, size: int, room: int) -> None:
    """Rows may begin at words or not. Only the requested part is written."""
    source, to = torch.randn(3, 2, 5, room).to(dtype), torch.full((2, 5, 3, room), 7.0, dtype=dtype)
    part, x = to[..., first : first + size], source.permute(1, 2, 0, 3)[..., first : first + size]
    assert fits_wide(x) == (dtype == torch.float64 or (room, first % 4, size) in ((16, 0, 8), (16, 0, 16)))
    copy_wide(part, x)
    assert torch.equal(part, x)
    assert to.ne(7).sum() <= part.numel()
    assert not fits_wide(x.transpose(-1, 0))
