"""Check that packed batches give what a call for each sequence gives: the compressed branch, windows, nsa_attention and NSAttention."""

from __future__ import annotations

import contextlib
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import (
    NSAttention,
    compressed_attention,
    compressed_cu_seqlens,
    gating,
    nsa_attention,
    selection_attention_varlen,
    sliding_window_attention,
)
from nsa_sel.compression import BlockMean, BlockMLP
from tests.helpers import layer as nsa_reference
from tests.helpers.calls import assert_refused, each_of, refused
from tests.helpers.gpus import no_waiting
from tests.helpers.layer import make_layer
from tests.helpers.varlen_cases import hide_bounds

pytestmark = pytest.mark.usefixtures("cheapest_backend")

LENGTHS = (5, 0, 1, 27, 8, 18)
SPARE = 3
CU = [0, *accumulate(LENGTHS)]
T = CU[-1] + SPARE
SIZES: dict[str, int] = {"compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 4}
C = (T - 8) // 4 + 1


def rows() -> list[slice]:
    return [slice(*pair) for pair in pairwise(CU)]


def keys() -> list[slice]:
    return [slice(*pair) for pair in pairwise(compressed_cu_seqlens(CU, 8, 4).tolist())]


def random(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def batch(x: Tensor) -> Tensor:
    """Keys [keys,G,D] of one sequence as [1,G,keys,D]."""
    return x.transpose(0, 1).unsqueeze(0)


# The compressed branch


def test_compressed_bounds_are_those_of_each_sequence_alone() -> None:
    for sizes in ((8, 4), (32, 16), (4, 4)):
        bounds = compressed_cu_seqlens(torch.tensor(CU, dtype=torch.int32), *sizes)
        assert bounds.dtype == torch.int64
        assert bounds.diff().tolist() == [len(range(0, length - sizes[0] + 1, sizes[1])) for length in LENGTHS]
    assert_refused(
        ("compress_block is 10; allowed: a multiple of compress_stride = 4", lambda: compressed_cu_seqlens(CU, 10, 4)),
        ("cu_seqlens is 3 first; allowed: 0 first", lambda: compressed_cu_seqlens([3, 4])),
    )


def test_compressed_keys_of_a_packed_batch_are_zeros_after_its_last_sequence() -> None:
    x = torch.randn(T, 2, 16)
    for compress in (BlockMean(8, 4), BlockMLP(16, 8, 4)):
        found = compress(x, CU)
        assert found.shape == (C, 2, 16)
        for of_rows, of_keys in zip(rows(), keys(), strict=True):
            torch.testing.assert_close(batch(found[of_keys]), compress(x[of_rows].unsqueeze(0)))
        assert not found[keys()[-1].stop :].any()


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, "unreadable"], ids=["list", "tuple", "tensor", "gpu"])
def test_compressed_attention_equals_a_call_for_each_sequence(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit; `selection_attention_varlen` takes the blocks."""
    inputs = random((T, 2, 3, 16), (C, 2, 16), (C, 2, 24))
    if form == "unreadable":
        hide_bounds(monkeypatch)
        form = torch.tensor
    o, selection, lse = compressed_attention(*inputs, **SIZES, cu_seqlens=form(CU), return_lse=True)
    do = torch.randn_like(o)
    gradients = torch.autograd.grad(o, inputs, do)
    for of_rows, of_keys in zip(rows(), keys(), strict=True):
        if of_rows.start == of_rows.stop:
            continue
        own = [inputs[0][of_rows][None], *(batch(x[of_keys]) for x in inputs[1:])]
        alone, chosen, own_lse = compressed_attention(*own, **SIZES, return_lse=True)
        found = o[of_rows], lse[of_rows], selection.ranges[0, of_rows], gradients[0][of_rows]
        dq, *grads = torch.autograd.grad(alone, own, do[of_rows][None])
        assert all(map(torch.equal, found, (x[0] for x in (alone, own_lse, chosen.ranges, dq))))
        assert all(map(torch.equal, (batch(x[of_keys]) for x in gradients[1:]), grads))
    assert not o[CU[-1] :].any()
    assert bool((selection.block_indices[0, CU[-1] :] == -1).all())
    k, v = random((T, 2, 16), (T, 2, 8))
    assert selection_attention_varlen(inputs[0], k, v, selection, CU).shape == (T, 2, 3, 8)


WRONG_CHOICES = [
    ({"q": lambda q: q[None]}, ("q is of shape (1, 62, 2, 3, 16)", "[T,G,h,Dk]", "q.squeeze(0)")),
    ({"k_cmp": lambda k: k[None]}, ("k_cmp is of shape", "[Tk, G=2, D]")),
    ({"v_cmp": lambda v: v[1:]}, ("v_cmp is of shape", f"[Tk={C}, G=2, D]")),
    ({"v_cmp": lambda v: v.double()}, ("v_cmp is of dtype torch.float64", "call v_cmp.to(q.dtype)")),
    ({"k_cmp": lambda k: k[:8], "v_cmp": lambda v: v[:8]}, ("k_cmp is of 8 compressed keys", "allowed: 9 to 14", "compressed_cu_seqlens")),
    ({"k_cmp": lambda k: k.repeat(2, 1, 1), "v_cmp": lambda v: v.repeat(2, 1, 1)}, ("k_cmp is of 28 compressed keys", "9 to 14")),
    ({"q_pos": torch.arange(T)}, ("q_pos is given together with cu_seqlens", "leave it out")),
    ({"S_kv": T}, ("S_kv is given together with cu_seqlens",)),
    ({"cu_seqlens": [1, T]}, ("cu_seqlens is 1 first", "0 first", "pass cumulative lengths")),
    ({"cu_seqlens": [0, 9, 5]}, ("cu_seqlens is 9, then 5 at 2", "never decrease")),
    ({"cu_seqlens": [0, T + 1]}, (f"cu_seqlens is {T + 1} last", f"at most {T}, the number of q's rows")),
    ({"cu_seqlens": [0]}, ("cu_seqlens is [0]", "N >= 1")),
    ({"cu_seqlens": torch.tensor([0.0, 1.0])}, ("cu_seqlens is torch.float32", "torch.int32 or torch.int64 [N+1]")),
    ({"cu_seqlens": 5}, ("cu_seqlens is a int",)),
    ({"n": 2}, ("first + local is 1 + 2",)),
    ({"max_seqlen": 26}, ("max_seqlen is 26", "at least 27, the longest sequence of cu_seqlens", "leave it out")),
    ({"max_seqlen": torch.tensor(40)}, ("max_seqlen is ", "a whole number >= 0 and < 2^31, as an int", "as the host knows them")),
    ({"max_seqlen": True}, ("max_seqlen is True", "a whole number >= 0")),
    ({"max_seqlen": -1}, ("max_seqlen is -1", "a whole number >= 0")),
    ({"max_seqlen": 40, "cu_seqlens": None}, ("max_seqlen is 40", "None without cu_seqlens", "pass the bounds")),
]  # fmt: skip


@each_of(WRONG_CHOICES)
def test_wrong_choices(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    q, k, v = random((T, 2, 3, 16), (C, 2, 16), (C, 2, 24))
    refused(compressed_attention, {"q": q, "k_cmp": k, "v_cmp": v, "cu_seqlens": CU, **SIZES}, changes, fragments)


def test_opcheck_of_packed_batches() -> None:
    inputs = random((1, 9, 1, 2, 16), (1, 1, 1, 16), (1, 1, 1, 16))
    arguments = (*inputs, None, torch.tensor([0, 8, 8, 9]), [8, 4, 8, 4, 1, 2], 9, 0.25, None, 8, True)
    torch.library.opcheck(torch.ops.nsa_sel.choose_forward.default, arguments)


# The layer


NAMES = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win", "gates")


def make_nsa(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    G, h, Dk, Dv = 2, 2, 4, 6
    shapes = ((T, G, h, Dk), (C, G, Dk), (C, G, Dv), (T, G, Dk), (T, G, Dv), (T, G, Dk), (T, G, Dv), (T, G, h, 3))
    return dict(zip(NAMES, random(*shapes, dtype=dtype), strict=True))


@pytest.mark.parametrize("with_lse", [False, True])
def test_nsa_attention_is_the_papers_for_each_sequence(with_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients, by the reference from the paper's equations; gates with lse are those of bfloat16, and not negative.

    NaN in padding reaches nothing."""
    monkeypatch.setattr(gating, "WITH_LSE", (torch.float64,) * with_lse)
    tensors = make_nsa()
    if with_lse:
        tensors["gates"] = tensors["gates"].detach().abs().requires_grad_()
    with torch.no_grad():
        for name, x in tensors.items():
            x[keys()[-1].stop if name.endswith("cmp") else CU[-1] :] = torch.nan
    options: dict[str, Any] = {"window": 6, **SIZES, "first": 1, "local": 2}
    o = nsa_attention(**tensors, **options, cu_seqlens=CU)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad(o, list(tensors.values()), do)
    assert not o[CU[-1] :].any()
    wanted = []
    for of_rows, of_keys in zip(rows(), keys(), strict=True):
        if of_rows.stop > of_rows.start:
            own = {name: x[of_keys if name.endswith("cmp") else of_rows] for name, x in tensors.items()}
            own = {name: x[None] if name in ("q", "gates") else batch(x) for name, x in own.items()}
            alone = nsa_reference.nsa(**own, **options)
            torch.testing.assert_close(o[of_rows], alone[0], rtol=1e-10, atol=1e-10)
            wanted.append((alone[0] * do[of_rows]).sum())
    torch.testing.assert_close(got, torch.autograd.grad(sum(wanted), list(tensors.values())), rtol=1e-9, atol=1e-9)
    assert torch.equal(nsa_attention(**tensors, **options, cu_seqlens=torch.tensor(CU)), o)


@pytest.mark.parametrize("whole", [False, True])
def test_bounds_written_after_forward_are_noticed(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not read the bounds of the whole layer or the compressed branch, so the backward pass would use new ones."""
    hide_bounds(monkeypatch)
    tensors, cu = make_nsa(), torch.tensor(CU)
    if whole:
        o = nsa_attention(**tensors, **SIZES, cu_seqlens=cu)
    else:
        o, _ = compressed_attention(tensors["q"], tensors["k_cmp"], tensors["v_cmp"], **SIZES, cu_seqlens=cu)
    cu.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


WRONG_LAYERS = [
    ({"q": lambda q: q[None]}, ("q is of shape", "[T,G,h,Dk]")),
    ({"gates": lambda g: g[..., :2]}, (f"gates is of shape ({T}, 2, 2, 2)", f"[T,G,h,3] = ({T}, 2, 2, 3)")),
    ({"k_win": lambda k: k[1:], "v_win": lambda v: v[1:]}, ("k_win is of 61 positions", "k_slc's 62")),
    ({"k_slc": lambda k: k[1:], "v_slc": lambda v: v[1:]}, ("k_slc is of 61 keys", "q's 62 rows")),
    ({"v_slc": lambda v: v[1:]}, ("v_slc is of shape", "[Tk=62, G=2, D]")),
    ({"k_cmp": lambda k: k[:3], "v_cmp": lambda v: v[:3]}, ("k_cmp is of 3 compressed keys", "9 to 14")),
    ({"cu_seqlens": [0, 99]}, ("cu_seqlens is 99 last",)),
    ({"recompute": True}, ("recompute is True with cu_seqlens", "False there", "torch.utils.checkpoint")),
    ({"max_seqlen": 3}, ("max_seqlen is 3", "at least 27")),
    ({"max_seqlen": 3, "cu_seqlens": None}, ("max_seqlen is 3", "None without cu_seqlens")),
]  # fmt: skip


@each_of(WRONG_LAYERS)
@pytest.mark.usefixtures("no_kernel")
def test_wrong_layers(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    refused(nsa_attention, {**make_nsa(torch.float32), **SIZES, "cu_seqlens": CU}, changes, fragments)


@pytest.mark.parametrize(("compression", "block"), [("mlp", 8), ("mean", 4)])
def test_a_module_gives_what_it_gives_for_each_sequence(compression: Any, block: int) -> None:
    """Results and gradients of x and all parameters; NaN in padding reaches nothing but its own output."""
    layer = make_layer("mlp", compress_block=block, compression=compression).requires_grad_()
    x = torch.randn(1, T, 10, dtype=torch.float64)
    x[:, CU[-1] :] = torch.nan
    inputs = [x.requires_grad_(), *layer.parameters()]
    alone = torch.cat([layer(x[:, own]) for own in rows() if own.stop > own.start], 1)
    o = layer(x, cu_seqlens=CU)
    torch.testing.assert_close(o[:, : CU[-1]], alone)
    assert not o[:, CU[-1] :].any()
    do = torch.randn_like(alone)
    torch.testing.assert_close(torch.autograd.grad(o[:, : CU[-1]], inputs, do), torch.autograd.grad(alone, inputs, do))
    positions = torch.cat([torch.arange(len(range(*own.indices(T)))) for own in (*rows(), slice(CU[-1], T))])
    assert torch.equal(layer(x, positions, torch.tensor(CU)), o)


def test_a_compiled_module_is_one_graph() -> None:
    layer = make_layer("mlp", torch.float32).requires_grad_()
    x, bounds = torch.randn(1, T, 10), torch.tensor(CU)
    x[:, CU[-1] :] = torch.nan
    x.requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outputs = compiled(x, None, bounds), layer(x, cu_seqlens=bounds)
    torch.testing.assert_close(*((o, *torch.autograd.grad(o.sum(), x)) for o in outputs))


def test_wrong_modules() -> None:
    layer, x = make_layer("mlp", torch.float32), torch.zeros(1, T, 10)
    assert_refused(
        (r"x is of B = 2 with cu_seqlens; allowed: \[1,T,width\]", lambda: layer(x.view(2, 31, 10), cu_seqlens=CU)),
        (r"x is of shape \(62, 10\)", lambda: layer(x[0], cu_seqlens=CU)),
        ("cu_seqlens is 63 last", lambda: layer(x, cu_seqlens=[0, T + 1])),
        ("cu_seqlens is a str", lambda: layer(x, cu_seqlens="CU")),
        (r"x is of shape \(1, 62, 2, 6\); allowed: \[T,G,D\] with cu_seqlens", lambda: BlockMean(8, 4)(torch.zeros(1, T, 2, 6), CU)),
    )


# On a GPU


@pytest.mark.gpu
def test_a_layer_on_a_gpu_never_waits_for_bounds() -> None:
    """As on a CPU, where the host knows the bounds; in float32, with all blocks chosen; bit-equal reruns, without synchronization."""
    lengths, T = (300, 0, 1, 31, 200), 540  # at most 5 blocks of 64, of the 16 that are chosen
    torch.manual_seed(0)
    cpu = NSAttention(64, 2, 4, 16, window=100)
    gpu = NSAttention(64, 2, 4, 16, window=100, device="cuda")
    gpu.load_state_dict(cpu.state_dict())
    x, do = torch.randn(2, 1, T, 64).unbind()
    bounds = torch.tensor([0, *accumulate(lengths)])

    def run(layer: NSAttention) -> tuple[Tensor, ...]:
        device = layer.q.weight.device
        leaf = x.to(device).requires_grad_()
        own, weights = (y.to(device) for y in (bounds, do))
        with no_waiting() if device.type == "cuda" else contextlib.nullcontext():
            o = layer(leaf, cu_seqlens=own)
            return o, *torch.autograd.grad(o, (leaf, *layer.parameters()), weights)

    wanted = run(cpu)
    with contextlib.suppress(RuntimeError):  # the first call compiles, and loads kernels
        run(gpu)
    first, again = run(gpu), run(gpu)
    assert all(map(torch.equal, first, again))
    torch.testing.assert_close(first, wanted, rtol=1e-3, atol=1e-4, check_device=False)


def test_a_window_over_nothing_but_padding() -> None:
    inputs = random((9, 1, 2, 16), (9, 1, 16), (9, 1, 16))
    o = sliding_window_attention(*inputs, 4, cu_seqlens=[0, 0, 0])
    assert not any(x.any() for x in (o, *torch.autograd.grad(o.sum(), inputs)))


WRONG_WINDOWS = [
    ({"q": lambda q: q[None]}, ("q is of shape", "[T,G,h,Dk]", "q.squeeze(0)")),
    ({"k": lambda k: k[1:], "v": lambda v: v[1:]}, ("k is of 61 keys", "q's 62 rows")),
    ({"v": lambda v: v[:, :1]}, ("v is of shape", "[Tk=62, G=2, D]")),
    ({"k": lambda k: k.half()}, ("k is of dtype torch.float16", "call k.to(q.dtype)")),
    ({"cu_seqlens": [0, 63]}, ("cu_seqlens is 63 last", "at most 62")),
    ({"window": 0}, ("window is 0",)),
    ({"scale": torch.inf}, ("scale is inf",)),
]  # fmt: skip


@each_of(WRONG_WINDOWS)
def test_wrong_windows(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    q, k, v = random((T, 2, 3, 16), (T, 2, 16), (T, 2, 24))
    refused(sliding_window_attention, {"q": q, "k": k, "v": v, "window": 7, "cu_seqlens": CU}, changes, fragments)
