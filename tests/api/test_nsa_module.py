"""`NSAttention` against the paper's equations: projections, compression of unfolded blocks, rotary positions, gates."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_sel import NSACache, NSAttention, attention_layer, nsa_attention, rotary
from nsa_sel.compression import BlockMean, BlockMLP
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.rotary import rotate
from tests.helpers import layer as nsa_reference
from tests.helpers.gpus import captured, no_waiting, replayed

pytestmark = pytest.mark.usefixtures("cheapest_backend")

SMALL: dict[str, Any] = {"window": 6, "compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 4}
SIZES: dict[str, tuple[int, int, int, int, int | None, dict[str, Any]]] = {  # width, G, h, Dk, Dv, options
    "mlp": (10, 2, 2, 4, None, {}),
    "mean": (6, 1, 3, 4, 6, {"compression": "mean", "compress_block": 4}),
    "half-sized-strides": (6, 2, 1, 2, 4, {"compress_stride": 2, "bias": True, "rotary": False}),
    "another-base": (6, 1, 2, 6, 2, {"compression": "mean", "rotary": functools.partial(rotate, base=500.0)}),
}


def make(name: str = "mlp", dtype: torch.dtype = torch.float64, device: str = "cpu") -> NSAttention:
    """A layer all of whose parameters are random."""
    *sizes, changed = SIZES[name]
    torch.manual_seed(0)
    layer = NSAttention(*sizes, **{**SMALL, **changed}, device=device, dtype=dtype)  # type: ignore[arg-type]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


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
    ("name", "S", "base"),
    [("mlp", 21, 1e4), ("mlp", 5, 1e4), ("mean", 19, 1e4), ("half-sized-strides", 15, None), ("another-base", 13, 500.0)],
)
def test_results_and_gradients_are_the_papers(name: str, S: int, base: float | None) -> None:
    layer = make(name)
    x = hidden(layer, S)
    o, wanted = layer(x), reference(layer, x, base)
    torch.testing.assert_close(o, wanted, rtol=1e-9, atol=1e-9)
    right = gradients(wanted, layer, x)
    for parameter, mine in gradients(o, layer, x).items():
        torch.testing.assert_close(mine, right[parameter], rtol=1e-8, atol=1e-8, msg=lambda text, p=parameter: f"d{p}: {text}")  # type: ignore[misc]
    assert all(mine.any() for mine in right.values()) == (S > 5)  # a sequence shorter than a block compresses nothing


@pytest.mark.parametrize(("B", "S"), [(0, 5), (2, 0), (0, 0)])
def test_empty_batches_and_sequences(B: int, S: int) -> None:
    layer = make("mlp", torch.float32)
    x = hidden(layer, S, B)
    o = layer(x)
    assert o.shape == (B, S, layer.width)
    assert not any(dx.any() for dx in gradients(o, layer, x).values())


def test_no_token_sees_a_later_one() -> None:
    layer = make("mlp", torch.float32)
    x = hidden(layer, 40).detach()
    other = torch.cat((x[:, :23], x[:, 23:].flip(1)), 1)
    torch.testing.assert_close(layer(x)[:, :23], layer(other)[:, :23])


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
    custom = make("mlp")
    custom.rotary = lambda y, at: seen.append((y.shape, at.shape)) or rotate(y, at)  # type: ignore[func-returns-value]
    torch.testing.assert_close(custom(x), o)
    assert [len(shape) for shape, _ in seen] == [5, 4, 4]


@pytest.mark.parametrize("rotary_of", [True, functools.partial(rotate, base=500.0)], ids=["default", "base"])
def test_a_step_casts_once_and_makes_one_table(rotary_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = NSAttention(10, 2, 2, 4, rotary=rotary_of, compression="mean", **SMALL)
    tables, make = [], rotary._cos_and_sin
    monkeypatch.setattr(rotary, "_cos_and_sin", lambda *args: tables.append(args) or make(*args))  # type: ignore[func-returns-value]
    x, seen = hidden(layer, 20), []
    for projection in (layer.q, layer.kv, layer.gate):
        projection.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.autocast("cpu", torch.bfloat16):
        o = layer(x)
    gradients(o, layer, x)
    assert len(tables) == 1
    assert len(seen) == 3
    assert all(y is seen[0] for y in seen)
    assert seen[0].dtype == torch.bfloat16


@pytest.mark.parametrize(("shape", "positions", "named"), [((2, 5, 7), (5,), "x"), ((5, 6), (5,), "x"), ((2, 5, 6), (4,), "positions")])
def test_what_does_not_rotate(shape: tuple[int, ...], positions: tuple[int, ...], named: str) -> None:
    """The kernel would read other angles, or memory beyond them."""
    with pytest.raises(ArgumentError, match=f"{named} is of shape"):
        rotate(torch.zeros(shape), torch.zeros(positions, dtype=torch.int64))


@pytest.mark.parametrize("rotary_of", [True, False])
def test_transforms_are_refused(rotary_of: bool) -> None:
    """Not with what PyTorch says of the layer's autograd functions."""
    layer = NSAttention(10, 2, 2, 4, rotary=rotary_of, **SMALL)
    x = hidden(layer, 20).detach()
    for work in (
        torch.func.grad(lambda y: layer(y).sum()),
        lambda y: torch.func.jvp(layer, (y,), (y,)),
        torch.func.vmap(lambda y: layer(y[None])),
    ):
        with pytest.raises(BackendError, match="NSAttention is called inside a transform"):
            work(x)


def test_compression_holds_no_unfolded_windows() -> None:
    """What autograd saves of an MLP over blocks of 4 strides: less than three copies of x, where windows alone are four."""
    module = BlockMLP(8, 16, 4)
    x = torch.randn(1, 400, 2, 8, requires_grad=True)
    saved: dict[int, int] = {}

    def keep(y: Tensor) -> Tensor:
        saved[y.untyped_storage().data_ptr()] = y.untyped_storage().nbytes()
        return y

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda y: y):
        module(x)
    parameters = {y.untyped_storage().data_ptr() for y in module.parameters()}
    held = sum(size for address, size in saved.items() if address not in parameters)
    assert x.nbytes <= held < 3 * x.nbytes


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
        assert isinstance(module, BlockMLP)
        assert isinstance(own, BlockMLP)
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
    old, new = make(), NSAttention(*SIZES["mlp"][:4], **SMALL, dtype=torch.float64)
    assert "compress_k.second.bias" not in new.state_dict()
    old.compress_k.second.bias = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))  # type: ignore[union-attr]
    new.load_state_dict(old.state_dict())
    x = hidden(new, 30)
    torch.testing.assert_close(new(x), old(x))


def test_weights_of_the_compression_may_have_any_strides() -> None:
    module = make().compress_k
    assert isinstance(module, BlockMLP)
    x = torch.randn(1, 30, 2, 4, dtype=torch.float64)
    wanted = module(x)
    module.first.weight = torch.nn.Parameter(module.first.weight.detach().T.contiguous().T)
    torch.testing.assert_close(module(x), wanted)


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
    layer, other = make("half-sized-strides"), NSAttention(6, 2, 1, 2, 4, compress_stride=2, bias=True, rotary=False, **{
        name: size for name, size in SMALL.items() if name != "compress_stride"
    }).double()  # fmt: skip
    x = hidden(layer, 17)
    assert not torch.allclose(other(x), layer(x))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    assert {name.partition(".")[0] for name in layer.state_dict()} == {"q", "kv", "gate", "compress_k", "compress_v", "out"}
    text = repr(layer)
    assert all(part in text for part in ("groups=2", "value_dim=4", "compress_stride=2", "rotary=False", "BlockMLP", "window=6"))
    assert "rotary=True" in repr(make())


def test_parameters_begin_as_those_of_linear_layers() -> None:
    layer = NSAttention(64, 2, 4, 16)
    for module, inputs in ((layer.q, 64), (layer.kv, 64), (layer.gate, 64), (layer.out, 128), (layer.compress_k.first, 512)):
        weight, bound = module.weight.detach(), 1 / math.sqrt(inputs)  # type: ignore[union-attr]
        assert float(weight.abs().max()) <= bound
        assert float(weight.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)


@pytest.mark.thorough  # a packed one is in tests/api/test_layer_varlen.py
def test_a_layer_made_on_the_meta_device_begins_as_any_other() -> None:
    """By `reset_parameters` of each module, as FSDP calls it after `to_empty`."""
    torch.manual_seed(0)
    wanted = NSAttention(6, 2, 1, 4, **SMALL)
    layer = NSAttention(6, 2, 1, 4, **SMALL, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, math.nan)
    torch.manual_seed(0)
    for module in layer.modules():
        if list(module.parameters(recurse=False)):
            module.reset_parameters()  # type: ignore[operator]
    assert all(map(torch.equal, layer.parameters(), wanted.parameters()))


def test_a_compiled_layer_is_one_graph() -> None:
    layer = make("mlp", torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = hidden(layer, 21)
    wanted, o = layer(x), compiled(x)
    torch.testing.assert_close(o, wanted)
    torch.testing.assert_close(gradients(o, layer, x), gradients(wanted, layer, x))


def test_a_compiler_makes_one_table_of_angles() -> None:
    """For all tensors that rotate, and not again in the backward pass."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition  # these imports take seconds
    from torch._dynamo.backends.common import aot_autograd

    tables = []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        tables.append(sum("rotary_table" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted, partition_fn=min_cut_rematerialization_partition)
    work = torch.compile(lambda x, y, at: rotate(x, at).sum() + rotate(y, at).square().sum(), fullgraph=True, backend=backend)
    x, y = (torch.randn(2, 5, h, 6, requires_grad=True) for h in (1, 3))
    found = torch.autograd.grad(work(x, y, torch.arange(5)), (x, y))
    assert tables == [1, 0]
    torch.testing.assert_close(found[1], 2 * y)  # a rotation keeps lengths
    for positions in (torch.arange(5), torch.arange(10).view(2, 5)):
        torch.library.opcheck(rotary._table, (positions, 4, 500.0, torch.float32))


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
    for mine, right in zip(results[0], wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)
    assert all(all(map(torch.equal, other, results[0])) for other in results[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("repeats", [False, True], ids=["", "checkpoint"])
def test_a_cuda_graph_replays_a_step_in_autocast(repeats: bool) -> None:
    """Of new hidden states and parameters. The host never waits for the GPU."""
    torch.manual_seed(0)
    layer = NSAttention(64, 2, 4, 16, device="cuda")
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


def test_tensor_parallel_ranks_take_their_groups() -> None:
    """Projections cut by rows give a rank its groups, whose outputs add up."""
    layer = make("mlp")
    x = hidden(layer, 14)
    total: Any = 0
    for rank in range(2):
        part = make("mlp")
        for linear, source in ((part.q, layer.q), (part.kv, layer.kv), (part.gate, layer.gate)):
            linear.weight.data = source.weight.chunk(2)[rank].detach()
        part.gate.bias.data = layer.gate.bias.chunk(2)[rank].detach()
        part.out.weight.data = layer.out.weight.chunk(2, 1)[rank].detach()
        total = total + part(x)
    torch.testing.assert_close(total, layer(x))


@pytest.mark.parametrize(
    ("arguments", "options", "fragments"),
    [
        ((0, 1, 1, 4), {}, ("width is 0", "a whole number >= 1")),
        ((8, 1, True, 4), {}, ("heads is True",)),
        ((8, 1, 1, 3), {}, ("head_dim is 3", "an even number", "rotary=False")),
        ((8, 1, 1, 4), {"rotary": 5e5}, ("rotary is 500000.0; allowed: True, False or a callable", "base=...")),
        ((8, 1, 1, 4), {"bias": torch.zeros(2)}, ("bias is tensor", "True or False")),
        ((8, 1, 1, 4), {"compression": "max"}, ("compression is 'max'", "'mlp', 'mean'")),
        ((8, 1, 1, 4), {"compress_block": 24}, ("compress_block is 24", "a multiple of compress_stride = 16")),
        ((8, 1, 1, 4), {"n": 2}, ("first + local is 1 + 2",)),
        ((8, 1, 1, 4), {"window": 0}, ("window is 0",)),
    ],
)
def test_wrong_layers(arguments: tuple[Any, ...], options: dict[str, Any], fragments: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as caught:
        NSAttention(*arguments, **options)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


@pytest.mark.parametrize(
    ("x", "positions", "fragment"),
    [
        (torch.zeros(3, 10), None, "x is of shape (3, 10); allowed: [B,S,width = 10]"),
        (torch.zeros(1, 3, 9), None, "x is of shape (1, 3, 9)"),
        ([1], None, "x is a list"),
        (torch.zeros(1, 3, 10, dtype=torch.long), None, "x is torch.int64 on cpu; allowed: a floating dtype on cpu or cuda"),
        (torch.zeros(1, 3, 10, device="meta"), None, "x is torch.float32 on meta"),
        (torch.zeros(1, 3, 10), torch.zeros(4, dtype=torch.long), "positions is of shape (4,)"),
        (torch.zeros(1, 3, 10), torch.zeros(3), "positions is of dtype torch.float32"),
        (torch.zeros(1, 3, 10).bfloat16(), None, "x is torch.bfloat16; allowed: torch.float32, the dtype of the layer's parameters"),
        (torch.zeros(1, 3, 10).double(), None, "x is torch.float64; allowed: torch.float32"),
    ],
)
@pytest.mark.parametrize("rotary", [True, False])
def test_wrong_input(x: Any, positions: Tensor | None, fragment: str, rotary: bool) -> None:
    with pytest.raises(ArgumentError) as caught:
        NSAttention(10, 2, 2, 4, **SMALL, rotary=rotary)(x, positions)
    assert fragment in str(caught.value)


def test_autocast_casts_what_a_layer_does_not_take() -> None:
    x = torch.zeros(1, 3, 10)
    for given, layer in ((x.bfloat16(), make("mlp", torch.float32)), (x, make("mlp", torch.bfloat16))):
        with pytest.raises(ArgumentError, match=r"^x is torch\.\w+; allowed: torch\.\w+, .* or run the model under torch\.autocast"):
            layer(given)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(given).dtype == torch.bfloat16


@pytest.mark.gpu
def test_a_layer_trains_on_a_gpu_as_on_a_cpu() -> None:
    """In float32; the sum of its branches is checked in test_nsa_attention.py."""
    torch.manual_seed(0)
    cpu = NSAttention(64, 2, 4, 16)
    gpu = NSAttention(64, 2, 4, 16, device="cuda")
    gpu.load_state_dict(cpu.state_dict())
    x = torch.randn(2, 300, 64)
    found = []
    for layer in (cpu, gpu):
        leaf = x.to(layer.q.weight.device).requires_grad_()
        o = layer(leaf)
        found.append([y.cpu() for y in (o, *gradients(o, layer, leaf).values())])
    for mine, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)


def test_the_layer_is_nsa_attention_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make("mean", torch.float32)
    found: list[Tensor] = []
    monkeypatch.setattr(
        attention_layer, "nsa_attention", lambda *args, **options: found.append(nsa_attention(*args, **options)) or found[-1]
    )
    o = layer(hidden(layer, 20))
    assert len(found) == 1
    assert torch.equal(layer.out(found[0].flatten(2)), o)
