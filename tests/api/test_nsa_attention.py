"""`nsa_attention` against a reference written from the paper's equations, and its gated sum against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import nsa_sel
from nsa_sel import gating, nsa_attention
from nsa_sel.backends._triton import gate
from nsa_sel.errors import BackendError
from tests.helpers import layer as nsa_reference
from tests.helpers.calls import each_of, refused
from tests.helpers.layer import by_autograd, check_deltas, check_gate, check_gate_parts, gated

pytestmark = pytest.mark.usefixtures("cheapest_backend")

SMALL: dict[str, Any] = {
    "window": 6, "compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 4, "first": 1, "local": 2
}  # fmt: skip
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


def make(shape: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors that require gradients, and options."""
    B, S, S_kv, G, h, Dk, Dv, changed = SHAPES[shape]
    options = {**SMALL, **changed}
    C = max(0, (S_kv - options["compress_block"]) // options["compress_stride"] + 1)
    sizes = {
        "q": (B, S, G, h, Dk), "k_cmp": (B, G, C, Dk), "v_cmp": (B, G, C, Dv), "k_slc": (B, G, S_kv, Dk), "v_slc": (B, G, S_kv, Dv),
        "k_win": (B, G, S_kv, Dk), "v_win": (B, G, S_kv, Dv), "gates": (B, S, G, h, 3), "q_cmp": (B, S, G, h, Dk),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in sizes.items()}
    made["gates"] = made["gates"].sigmoid()
    return {name: x.to(device, dtype).requires_grad_() for name, x in made.items()}, options


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
    for name, mine, right in zip(tensors, gradients(o, tensors), gradients(wanted, tensors), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"d{name}: {text}")  # type: ignore[misc]


def test_one_q_serves_all_branches() -> None:
    tensors, options = make("two-groups")
    del tensors["q_cmp"]
    o, wanted = nsa_attention(**tensors, **options), nsa_reference.nsa(**tensors, **options)
    torch.testing.assert_close(o, wanted, rtol=1e-10, atol=1e-10)
    for mine, right in zip(gradients(o, tensors), gradients(wanted, tensors), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("branch", range(3))
def test_a_gate_of_zero_switches_its_branch_off(branch: int) -> None:
    tensors, options = make("two-groups")
    others = [name for i, suffix in enumerate(("cmp", "slc", "win")) if i != branch for name in (f"k_{suffix}", f"v_{suffix}")]
    tensors["gates"] = torch.ones_like(tensors["gates"]).index_fill(-1, torch.tensor([branch]), 0.0).requires_grad_()
    found = dict(zip(tensors, gradients(nsa_attention(**tensors, **options), tensors), strict=True))
    own = set(NAMES) - set(others) - {"q", "q_cmp", "gates"}
    assert all(not found[name].any() for name in own)
    assert all(found[name].any() for name in others)


def test_chunked_prefill_gives_the_rows_of_the_whole() -> None:
    tensors, options = make("values-of-another-size", torch.float32)
    whole = nsa_attention(**tensors, **options)
    S, parts = whole.shape[1], []
    for begin, end in ((0, 7), (7, 8), (8, 32), (32, S)):
        C = max(0, (end - 8) // 4 + 1)
        rows = {name: tensors[name][:, begin:end] for name in ("q", "q_cmp", "gates")}
        keys = {name: tensors[name][:, :, : C if name.endswith("cmp") else end] for name in NAMES[1:7]}
        parts.append(nsa_attention(**rows, **keys, **options))
    torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_reruns_and_checkpoints_are_bit_equal() -> None:
    tensors, options = make("two-groups", torch.float32)

    def work(*given: Tensor) -> Tensor:
        return nsa_attention(**dict(zip(NAMES, given, strict=True)), **options)

    results = []
    for o in (work(*tensors.values()), work(*tensors.values()), checkpoint(work, *tensors.values(), use_reentrant=False)):
        results.append((o, *gradients(o, tensors)))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


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


def test_strided_keys_and_bfloat16_autocast() -> None:
    """Keys as [B,S,G,D] caches; under autocast o and decisions are bfloat16's, gates stay as they are."""
    tensors, options = make("chunked-prefill", torch.float32)
    wanted = nsa_attention(**tensors, **options)
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for name, x in tensors.items()}
    torch.testing.assert_close(nsa_attention(**strided, **options), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        o = nsa_attention(**tensors, **options)
    assert o.dtype == torch.bfloat16
    assert {decision.request.dtype for decision in nsa_sel.decisions()[-2:]} == {"bfloat16"}
    found = gradients(o, tensors)
    assert all(dx.dtype == torch.float32 and bool(dx.isfinite().all()) for dx in found)
    torch.testing.assert_close(o.float(), wanted, rtol=0.05, atol=0.05)


def test_a_backend_is_forced_for_the_selected_branch() -> None:
    tensors, options = make("two-groups", torch.float32)
    nsa_attention(**tensors, **options, backend="numba")
    assert [(d.request.kind, d.forward) for d in nsa_sel.decisions()[-2:]] == [("choose", "choose-torch"), ("attend", "numba")]


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
@pytest.mark.usefixtures("no_kernel")
def test_wrong_calls(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    tensors, options = make("two-groups", torch.float32)
    refused(nsa_attention, {**{name: x.detach() for name, x in tensors.items()}, **options}, changes, fragments)


# The gated sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_gate_kernels_match_autograd(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "INTERPRETED_TILE", 1 << 13)  # so that there are two programs, and the last one has rows to spare
    check_gate(dtype, "cpu", 24)
    check_deltas(dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("Dv", [1, 24, 64, 128, 192, 256])
def test_gate_kernels_match_autograd_on_a_gpu(dtype: torch.dtype, Dv: int) -> None:
    check_gate(dtype, "cuda", Dv)


def test_parts_of_the_gated_sum_are_those_of_the_whole() -> None:
    check_gate_parts(torch.float32, "cpu", 24)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "Dv"), [(torch.bfloat16, 128), (torch.float32, 24)])
def test_parts_of_the_gated_sum_are_those_of_the_whole_on_a_gpu(dtype: torch.dtype, Dv: int) -> None:
    check_gate_parts(dtype, "cuda", Dv)


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
    for mine, right in zip(got, by_autograd(branches, gates, torch.ones_like(o))[1:], strict=True):
        torch.testing.assert_close(mine, right.to(mine.dtype))
    with pytest.raises(BackendError, match="nsa_attention has no second derivative"):
        torch.autograd.grad(o.sum(), leaves, create_graph=True)


def test_a_traced_gated_sum_is_one_graph() -> None:
    branches, gates, do = gated(torch.float32)
    leaves = [x.detach().requires_grad_() for x in (*branches, gates)]
    compiled: Callable[..., Tensor] = torch.compile(gating.gated_sum, fullgraph=True, backend="aot_eager")
    o = compiled(*leaves)
    for mine, right in zip((o, *torch.autograd.grad(o, leaves, do)), by_autograd(branches, gates, do), strict=True):
        torch.testing.assert_close(mine, right.to(mine.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer_on_a_gpu_is_the_sum_of_its_branches(dtype: torch.dtype) -> None:
    """Each branch alone, by gates of 1 and 0, then the gated sum in float64; bit-equal from run to run."""
    generator = torch.Generator().manual_seed(0)
    B, S, G, h, D = 2, 700, 2, 4, 64
    sizes = [(B, S, G, h, D), *[(B, G, (S - 32) // 16 + 1, D)] * 2, *[(B, G, S, D)] * 4]
    leaves = [torch.randn(size, generator=generator).to("cuda", dtype).requires_grad_() for size in sizes]
    gates = torch.rand(B, S, G, h, 3, generator=generator).to("cuda", dtype).requires_grad_()
    do = torch.randn(B, S, G, h, D, generator=generator).to("cuda", dtype)
    runs = []
    for _ in range(3):
        o = nsa_attention(*leaves, gates)
        runs.append((o, *torch.autograd.grad(o, (*leaves, gates), do)))
    assert all(all(map(torch.equal, run, runs[0])) for run in runs[1:])
    one = torch.eye(3, device="cuda", dtype=dtype).expand(B, S, G, h, 3, 3)
    alone = [nsa_attention(*leaves, one[..., c, :]).double() for c in range(3)]
    wanted = sum(gates[..., c, None].double() * o for c, o in enumerate(alone))
    torch.testing.assert_close(runs[0][0], wanted.to(dtype))
    dgates = torch.stack([(do.double() * o).sum(-1) for o in alone], -1)
    torch.testing.assert_close(runs[0][-1], dgates.to(dtype))
