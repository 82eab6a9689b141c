"""Check `nsa_attention` against the equations of the paper, plain and with recompute=True in units of a few groups, and its gated sum."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_sel import NSAttention, decisions, gating, nsa_attention, three_branches, use_backend
from nsa_sel.backends._triton import elementwise
from nsa_sel.core.call import device_info
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.settings.config import settings_for
from nsa_sel.three_branches import Inputs
from tests.helpers import layer as nsa_reference
from tests.helpers.calls import assert_refused, counted, each_of, refused
from tests.helpers.layer import SMALL, by_autograd, check_deltas, check_gate, gated, make_layer

pytestmark = pytest.mark.usefixtures("cheapest_backend")

NAMES = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gates", "q_cmp")
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, dict[str, Any]]] = {  # B, S, S_kv, G, h, Dk, Dv, changed options
    "two-groups": (2, 19, 19, 2, 2, 4, 4, {}),
    "values-of-another-size": (1, 43, 43, 1, 3, 6, 4, {"scale": 0.7}),
    "shorter-than-a-compressed-block": (2, 5, 5, 1, 2, 4, 4, {}),
    "chunked-prefill": (1, 7, 41, 1, 2, 4, 6, {}),
    "one-row": (2, 1, 30, 2, 1, 4, 4, {}),
    "window-longer-than-the-text": (1, 13, 17, 1, 1, 4, 4, {"window": 100}),
    "four-strides-in-a-block": (1, 37, 37, 1, 2, 4, 4, {"compress_block": 16, "block_size": 16, "n": 2, "local": 1, "window": 1}),
}


def make(shape: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors that require gradients, and options."""
    B, S, S_kv, G, h, Dk, Dv, changed = SHAPES[shape]
    options = {**SMALL, "first": 1, "local": 2, **changed}
    C = max(0, (S_kv - options["compress_block"]) // options["compress_stride"] + 1)
    sizes = {
        "q": (B, S, G, h, Dk), "k_cmp": (B, G, C, Dk), "v_cmp": (B, G, C, Dv), "k_slc": (B, G, S_kv, Dk), "v_slc": (B, G, S_kv, Dv),
        "k_win": (B, G, S_kv, Dk), "v_win": (B, G, S_kv, Dv), "gates": (B, S, G, h, 3), "q_cmp": (B, S, G, h, Dk),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    made["gates"] = made["gates"].sigmoid()
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}, options


def gradients(o: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o)
    found = torch.autograd.grad(o, list(tensors.values()), weights, allow_unused=True)
    return tuple(torch.zeros_like(x) if dx is None else dx for x, dx in zip(tensors.values(), found, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_results_and_gradients_are_the_papers(shape: str, with_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """with_lse: gates come into the gradients as in bfloat16."""
    monkeypatch.setattr(gating, "WITH_LSE", (torch.float64,) * with_lse)
    tensors, options = make(shape)
    o, wanted = nsa_attention(**tensors, **options), nsa_reference.nsa(**tensors, **options)
    torch.testing.assert_close(o, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradients(o, tensors), gradients(wanted, tensors), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("wanted", [("gates",), ("gates", "v_slc"), ("k_cmp",), ("q_cmp", "k_win"), ("q",)], ids=str)
def test_keys_of_branches_without_gradients_are_not_saved(wanted: tuple[str, ...]) -> None:
    """They may be inference tensors, which cannot be."""
    tensors, options = make("two-groups", torch.float32)
    full = dict(zip(tensors, gradients(nsa_attention(**tensors, **options), tensors), strict=True))
    of = {c: {"q" if c != "cmp" else "q_cmp", f"k_{c}", f"v_{c}"} for c in ("cmp", "slc", "win")}
    needed = {"gates", *(("q", "q_cmp") if wanted != ("gates",) else ())}.union(*(names for names in of.values() if names & set(wanted)))
    with torch.inference_mode():
        frozen = {name: x.detach().clone() for name, x in tensors.items()}
    given = {name: x.detach().requires_grad_(name in wanted) if name in needed else frozen[name] for name, x in tensors.items()}
    o = nsa_attention(**given, **options)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o)
    found = torch.autograd.grad(o, [given[name] for name in wanted], weights)
    assert all(torch.equal(dx, full[name]) for name, dx in zip(wanted, found, strict=True))


def test_a_backend_is_forced_for_the_selected_branch() -> None:
    tensors, options = make("two-groups", torch.float32)
    nsa_attention(**tensors, **options, backend="numba")
    assert [(d.request.kind, d.forward) for d in decisions()[-2:]] == [("choose", "choose-torch"), ("attend", "numba")]


# Bad input


WRONG: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"gates": lambda g: g[..., :2]}, ("gates is of shape (2, 19, 2, 2, 2)", "[B,S,G,h,3] = (2, 19, 2, 2, 3)")),
    ({"gates": lambda g: g.transpose(1, 3)}, ("gates is of shape",)),
    ({"gates": lambda g: g > 0.5}, ("gates is of dtype torch.bool", "a floating dtype")),
    ({"gates": None}, ("gates is a NoneType", "a torch.Tensor")),
    ({"q": lambda q: q[:, 0]}, ("q is of shape (2, 2, 2, 4)", "decode has S = 1", "q.unsqueeze(1)")),
    ({"q_cmp": lambda q: q[..., :2]}, ("q_cmp is torch.float32 of shape", "q's shape (2, 19, 2, 2, 4)")),
    ({"k_cmp": lambda k: k[:, :, :2], "v_cmp": lambda v: v[:, :, :2]}, ("k_cmp is of 2 compressed keys", "allowed: 3")),
    ({"k_slc": lambda k: k[:, :1]}, ("k_slc is of shape", "[B=2, G=2, S_kv, D]")),
    ({"k_cmp": lambda k: k.repeat(1, 2, 1, 1)}, ("k_cmp is of shape",)),
    ({"recompute": 1}, ("recompute is 1; allowed: True or False",)),
    ({"v_slc": lambda v: v.double()}, ("v_slc is of dtype torch.float64", "call v_slc.to(q.dtype)")),
    ({"k_win": lambda k: k[..., :2]}, ("k_win is of head dimension 2", "q's head dimension 4")),
    ({"v_win": lambda v: v[:, :, 1:]}, ("v_win is of 18 positions",)),
    ({"k_win": lambda k: k[:, :, 1:], "v_win": lambda v: v[:, :, 1:]}, ("k_win is of 18 positions", "k_slc's 19")),
    ({"v_cmp": lambda v: v[..., :2]}, ("v_cmp is of head dimension 2", "v_slc's head dimension 4")),
    ({"v_cmp": lambda v: v[0, 0, 0, 0]}, ("v_cmp is a single number", "v_slc's head dimension 4")),
    ({"v_win": lambda v: v[..., :2]}, ("v_win is of head dimension 2", "v_slc's head dimension 4")),
    ({name: lambda x: x[:, :, :18] for name in NAMES[3:7]}, ("q is of S = 19 rows", "at most S_kv = 18")),
    ({"window": 0}, ("window is 0", "a whole number >= 1")),
    ({"window": True}, ("window is True",)),
    ({"n": 2}, ("first + local is 1 + 2", "at most n = 2")),
    ({"compress_block": 6}, ("compress_block is 6", "a multiple of compress_stride = 4")),
    ({"scale": float("nan")}, ("scale is nan",)),
]  # fmt: skip


@each_of(WRONG)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.usefixtures("no_kernel")
def test_wrong_calls(changes: dict[str, Any], fragments: tuple[str, ...], recompute: bool) -> None:
    tensors, options = make("two-groups", torch.float32)
    arguments = {**{name: x.detach() for name, x in tensors.items()}, **options, "recompute": recompute}
    refused(nsa_attention, arguments, changes, fragments)


# The gated sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_gate_kernels_match_autograd(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "INTERPRETED_TILE", 1 << 13)  # makes two programs, the last with rows to spare
    check_gate(dtype, "cpu", 24)
    check_deltas(dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("Dv", [1, 24, 64, 128, 192, 256])
def test_gate_kernels_match_autograd_on_a_gpu(dtype: torch.dtype, Dv: int) -> None:
    check_gate(dtype, "cuda", Dv)


def test_the_gated_sum_goes_through_the_kernels_and_saves_four_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels as on a GPU: gradients of a sum whose do has stride 0; and no second derivative."""
    monkeypatch.setattr(gating, "on_gpu", lambda gates: True)
    branches, gates, _ = gated(torch.float32)
    leaves = [x.detach().requires_grad_() for x in (*branches, gates)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = gating.gated_sum(*leaves)
    assert len(saved) == 4
    assert sum(x.numel() for x in saved) == 3 * o.numel() + gates.numel()
    got = torch.autograd.grad(o.sum(), leaves, retain_graph=True)
    torch.testing.assert_close(got, by_autograd(branches, gates, torch.ones_like(o))[1:], check_dtype=False)
    with pytest.raises(BackendError, match="nsa_attention has no second derivative"):
        torch.autograd.grad(o.sum(), leaves, create_graph=True)


def results(tensors: dict[str, Tensor], recompute: bool = False, **options: Any) -> tuple[Tensor, ...]:
    o = nsa_attention(**tensors, **options, recompute=recompute)
    return o, *gradients(o, tensors)


def assert_equal(mine: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for i, (x, right) in enumerate(zip(mine, wanted, strict=True)):
        assert x.dtype == right.dtype
        assert torch.equal(x, right), ("o", *NAMES)[i]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("own_q", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_bit_equal(shape: str, own_q: bool, dtype: torch.dtype) -> None:
    tensors, options = make(shape, dtype)
    if own_q:
        del tensors["q_cmp"]
    assert_equal(results(tensors, True, **options), results(tensors, **options))


@pytest.mark.parametrize("own_q", [False, True])
def test_units_of_one_group(own_q: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = make("two-groups")
    if own_q:
        del tensors["q_cmp"]
    wanted = results(tensors, **options)
    monkeypatch.setattr(three_branches, "settings_for", lambda device: types.SimpleNamespace(workspace_bytes=1))
    torch.testing.assert_close(results(tensors, True, **options), wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(nsa_attention(**tensors, **options), wanted[0], rtol=1e-12, atol=1e-12)
    assert [(d.request.kind, d.request.B, d.request.G) for d in decisions()[-8:]] == 4 * [("choose", 1, 1), ("attend", 1, 1)]


@pytest.mark.parametrize(
    ("B", "G", "fitting", "sizes"),
    [
        (1, 4, 0, (1, 1)),
        (1, 4, 3, (1, 2)),
        (1, 5, 3, (1, 3)),
        (3, 4, 4, (1, 4)),
        (3, 4, 8, (2, 4)),
        (3, 4, 7, (1, 4)),
        (2, 3, 100, (2, 3)),
    ],
)
def test_units_fit_the_workspace(B: int, G: int, fitting: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are even, and cover every group once."""
    bound = fitting * 3 * 7 * 2 * 6 * 4
    monkeypatch.setattr(three_branches, "settings_for", lambda device: types.SimpleNamespace(workspace_bytes=bound))
    q, v = torch.zeros(B, 7, G, 2, 4), torch.zeros(B, G, 7, 6)
    units = three_branches.units_of(Inputs(q, None, None, None, v, None, None, None, None))
    assert {(b.stop - b.start, g.stop - g.start) for b, g in units} == {sizes}
    times = torch.zeros(B, G)
    for unit in units:
        times[unit] += 1
    assert bool((times == 1).all())


@pytest.mark.parametrize("sizes", [(0, 3, 2), (1, 0, 2)])
def test_no_sequences_and_no_rows(sizes: tuple[int, int, int]) -> None:
    B, S, G = sizes
    tensors, options = make("two-groups", torch.float32)
    rows = {"q", "gates", "q_cmp"}
    cut = {name: x[:B, :S] if name in rows else x[:B, :, : 0 if name.endswith("cmp") else 5] for name, x in tensors.items()}
    leaves = {name: x.detach().requires_grad_() for name, x in cut.items()}
    o = nsa_attention(**leaves, **options, recompute=True)
    assert o.shape == (B, S, G, 2, 4)
    assert not any(x.any() for x in gradients(o, leaves))


def test_inputs_and_blocks_are_all_that_is_saved() -> None:
    tensors, options = make("two-groups", torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        nsa_attention(**tensors, **options, recompute=True)
    *inputs, blocks = saved
    assert [x.data_ptr() for x in inputs] == [x.data_ptr() for x in tensors.values()]
    assert (blocks.dtype, blocks.shape) == (torch.int32, (2, 19, 2, 4))


@pytest.mark.parametrize(
    ("wanted", "calls"),
    [
        (("k_win",), set()),
        (("v_slc", "v_win"), {"sdpa-packed"}),
        (("k_cmp", "q_cmp"), {"choose-torch"}),
        (("gates",), {"sdpa-packed", "choose-torch"}),
        (("q",), {"sdpa-packed"}),
        (("q_cmp", "gates"), {"sdpa-packed", "choose-torch"}),
    ],
)
def test_frozen_inputs_cost_nothing(wanted: tuple[str, ...], calls: set[str]) -> None:
    """The same gradients, and branches that no gradient needs are not computed again."""
    tensors, options = make("values-of-another-size", torch.float32)
    tensors = {name: x.detach().requires_grad_(name in wanted) for name, x in tensors.items()}
    leaves = [tensors[name] for name in wanted]
    plain = torch.autograd.grad(nsa_attention(**tensors, **options).sum(), leaves)
    o = nsa_attention(**tensors, **options, recompute=True)
    with counted() as grown:
        assert_equal(torch.autograd.grad(o.sum(), leaves), plain)
    assert {name[1] for name in grown if name[0] == "calls"} == calls


def test_gradients_twice_checkpoints_and_no_second_derivative() -> None:
    tensors, options = make("two-groups", torch.float32)

    def work(*given: Tensor) -> Tensor:
        return nsa_attention(**dict(zip(NAMES, given, strict=True)), **options, recompute=True)

    plain = results(tensors, **options)
    o, inputs = work(*tensors.values()), list(tensors.values())
    do = torch.ones_like(o)
    first, second = (torch.autograd.grad(o, inputs, do, retain_graph=True) for _ in range(2))
    assert_equal(first, second)
    assert_equal(first, torch.autograd.grad(o, inputs, do.sum().expand_as(do) / do.numel()))  # strides of 0
    checkpointed = checkpoint(work, *inputs, use_reentrant=False)
    assert_equal((checkpointed, *gradients(checkpointed, tensors)), plain)
    batched = torch.ones(2, *o.shape)
    assert_refused(
        ("nsa_attention has no second derivative", lambda: torch.autograd.grad(work(*inputs).sum(), inputs, create_graph=True)),
        ("batched gradients", lambda: torch.autograd.grad(work(*inputs), inputs, batched, is_grads_batched=True)),
        ("nsa_attention is called inside a transform", lambda: torch.func.vmap(lambda q: work(q, *inputs[1:]))(inputs[0][None])),
        error=BackendError,
    )
    o = work(*inputs)
    with torch.no_grad():
        tensors["k_win"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_forced_backends_are_those_of_the_forward_pass() -> None:
    tensors, options = make("two-groups", torch.float32)
    with use_backend("numba"):
        o = nsa_attention(**tensors, **options, recompute=True)
    named = nsa_attention(**tensors, **options, recompute=True, backend="numba")
    for each in (o, named):
        with use_backend("sdpa-packed"), counted() as grown:
            gradients(each, tensors)
        assert grown["calls", "numba"] == 1
    free = nsa_attention(**tensors, **options, recompute=True)
    other = "sdpa-packed" if decisions()[-1].forward == "numba" else "numba"
    with use_backend(other), counted() as grown:
        gradients(free, tensors)
    assert ("calls", other) not in grown


def test_a_compiled_call_is_one_graph_that_saves_its_inputs() -> None:
    tensors, options = make("two-groups", torch.float32)
    del tensors["q_cmp"]
    plain = results(tensors, **options)

    def work(*given: Tensor) -> Tensor:
        return nsa_attention(**dict(zip(tensors, given, strict=True)), **options, recompute=True)

    compiled: Any = torch.compile(work, fullgraph=True, backend="aot_eager")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = compiled(*tensors.values())
    own = {x.data_ptr() for x in tensors.values()}
    assert sum(x.numel() for x in saved if x.data_ptr() not in own and x.is_floating_point()) == 0
    assert_equal((o, *gradients(o, tensors)), plain)


def test_a_layer_recomputes() -> None:
    """`NSAttention` under autocast, checkpointed and not."""
    plain, recomputing = (make_layer("mlp", torch.float32, recompute=recompute).requires_grad_() for recompute in (False, True))
    x = torch.randn(2, 21, 10, requires_grad=True)
    results = []
    for layer, checkpointed in ((plain, False), (recomputing, False), (recomputing, True)):
        with torch.autocast("cpu", torch.bfloat16):
            o = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        results.append((o, *torch.autograd.grad(o.sum(), (x, *layer.parameters()))))
    assert all(all(map(torch.equal, other, results[0])) for other in results[1:])
    with pytest.raises(ArgumentError, match="recompute is None"):
        NSAttention(10, 2, 2, 4, recompute=None)  # type: ignore[arg-type]


def layer_inputs(S: int, G: int, h: int, D: int) -> list[Tensor]:
    """q, keys and values of the three branches, gates: bfloat16, at NSA's sizes, requiring gradients."""
    C = (S - 32) // 16 + 1
    shapes = [(1, S, G, h, D), *[(1, G, C, D)] * 2, *[(1, G, S, D)] * 4]
    tensors = [torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    gates = torch.rand(1, S, G, h, 3, dtype=torch.bfloat16, device="cuda")
    return [x.requires_grad_() for x in (*tensors, gates)]


def beyond_inputs_and_outputs(work: Any) -> int:
    """Bytes of the peak."""
    work()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = work()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in outputs)


def step(inputs: list[Tensor], do: Tensor, recompute: bool) -> tuple[Tensor, ...]:
    o = nsa_attention(*inputs, recompute=recompute)
    return o, *torch.autograd.grad(o, inputs, do)


@pytest.mark.gpu
def test_a_recomputed_step_fits_the_workspace_and_its_kernels_temporaries() -> None:
    """At 32k: two of the four groups at once, where the plain layer holds the three outputs of all, and dq of all, one of which stays."""
    inputs = layer_inputs(32768, 4, 16, 128)
    do, bound = torch.randn_like(inputs[0]), settings_for(device_info(inputs[0].device)).workspace_bytes

    recomputed, plain = (beyond_inputs_and_outputs(lambda way=way: step(inputs, do, way)) for way in (True, False))
    assert recomputed <= 1.5 * bound
    assert plain >= 5 * do.nbytes  # so that this test sees what it is about
    with torch.no_grad():
        assert beyond_inputs_and_outputs(lambda: (nsa_attention(*inputs),)) <= 1.25 * bound


@pytest.mark.gpu
def test_a_recomputed_step_is_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a plain one, where all groups are one unit and so take the same kernels; and from run to run in units of one group."""
    inputs = layer_inputs(2100, 2, 4, 64)
    do = torch.randn_like(inputs[0])

    plain = step(inputs, do, False)
    for _ in range(2):
        assert all(map(torch.equal, step(inputs, do, True), plain))
    monkeypatch.setattr(three_branches, "settings_for", lambda device: types.SimpleNamespace(workspace_bytes=1))
    first, second = step(inputs, do, True), step(inputs, do, True)
    assert all(map(torch.equal, first, second))
    for mine, right in zip(first, plain, strict=True):
        assert float((mine - right).norm() / right.norm()) < 0.01
