"""Check packed batches on every backend against the oracle of each sequence, and when keys are copied so that sequences begin a block."""

from __future__ import annotations

import contextlib
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import (
    NSAttention,
    Selection,
    compat,
    compressed_attention,
    decisions,
    explain_request,
    nsa_attention,
    selection_attention,
    selection_attention_varlen,
    use_backend,
    varlen_positions,
)
from nsa_sel.backends import choose_triton
from nsa_sel.bench.core.cases import PACKED
from nsa_sel.core import attend
from nsa_sel.core import packed as packed_batches
from nsa_sel.core.arguments import Bounds
from nsa_sel.core.request import Request
from nsa_sel.errors import ArgumentError, BackendError
from tests.contract.lanes import lanes
from tests.helpers.calls import assert_refused, calls_of, last
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.gpus import captured, no_waiting, replayed
from tests.helpers.policy_cases import A100, H200, INTERPRETER
from tests.helpers.policy_cases import CPU as PLAIN_CPU
from tests.helpers.varlen_cases import (
    Packed,
    attend_varlen,
    check_varlen,
    hide_bounds,
    pack,
    tensors,
)

CPU = ("sdpa-packed", "numba")


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_bounds(monkeypatch)


ON_BLOCKS = ("triton-tile", "triton-block")
MIXED = (5, 0, 1, 18, 16, 2)  # shorter than a block of 16, empty, one row, unaligned
ALIGNED = (16, 0, 32, 7)  # all begin at multiples of 16


def test_unaligned_blocks_become_ranges() -> None:
    packed = pack((8, 17), n=2)
    with pytest.raises(BackendError, match=r"block-aligned .*whole blocks"):
        attend_varlen("triton-tile", packed, align=False)
    selection_attention_varlen(*packed[:4], packed.cu_q)
    assert last().request.block_size is None
    assert last().request.max_length == 25  # min(2 blocks of 16, 17 rounded up to 32, all keys)


@pytest.mark.parametrize("packed", [pack(ALIGNED), pack((3, 5), (32, 18))], ids=["the same", "more keys"])
def test_all_forms_of_bounds_give_equal_results(packed: Packed) -> None:
    expected = attend_varlen("sdpa-packed", packed)
    for form in (tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)):
        got = attend_varlen("sdpa-packed", packed, cu_seqlens_q=form(packed.cu_q), cu_seqlens_k=form(packed.cu_k))
        assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
        assert last().request.block_size == 16
    rows = Selection.from_ranges(packed.ranges(), 16)  # [T,G,n,2]
    got = attend_varlen("sdpa-packed", packed._replace(selection=rows))
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
    raw = selection_attention_varlen(*packed[:3], packed.ranges(), packed.cu_q, packed.cu_k)
    torch.testing.assert_close(raw, expected[0], atol=2e-6, rtol=0)


@pytest.mark.usefixtures("unseen")
def test_bounds_on_a_gpu_align_only_by_promise_or_for_one_sequence() -> None:
    packed = pack((20,))
    selection_attention_varlen(*packed[:4], **tensors(packed))
    assert last().request.block_size == 16
    for packed in (pack((16, 0, 3), n=2, spare=1), pack((1, 18, 0, 2), (32, 16, 16, 21), n=2)):
        check_varlen("numba", packed, **tensors(packed))
        assert last().request.block_size is None
        check_varlen("numba", packed, block_aligned=True, **tensors(packed))
        assert last().request.block_size == 16
        selection_attention_varlen(*packed[:4], **tensors(packed))
        assert last().request.block_size is None
        selection_attention_varlen(*packed[:4], packed.cu_q, packed.cu_k)  # a list is the host's own
        assert last().request.block_size == 16


def test_a_broken_promise_of_alignment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack((5, 20))
    with pytest.raises(ArgumentError, match=r"block_aligned is True, but a sequence's first key is 5; allowed: multiples of .*16"):
        selection_attention_varlen(*packed[:4], packed.cu_q, block_aligned=True)
    hide_bounds(monkeypatch)
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    with pytest.raises(ArgumentError, match="not one block of 16"):
        selection_attention_varlen(*packed[:4], **tensors(packed), block_aligned=True)


@pytest.mark.usefixtures("unseen")
def test_moved_selections_are_cached_until_an_input_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, made = pack((3, 5), (32, 18)), calls_of(monkeypatch, packed_batches, "positions_in_sequences")
    cu_q, cu_k = torch.tensor(packed.cu_q), torch.tensor(packed.cu_k)
    for _ in range(2):  # two layers
        selection_attention_varlen(*packed[:4], cu_q, cu_k)
    assert len(made) == 1
    packed.selection.ranges.mul_(1)
    selection_attention_varlen(*packed[:4], cu_q, cu_k)
    assert len(made) == 2
    cu_k[1] = 30
    o = selection_attention_varlen(*packed[:4], cu_q, cu_k)
    assert len(made) == 3
    assert torch.equal(o, selection_attention_varlen(*packed[:4], [0, 3, 8], [0, 30, 50]))
    selection_attention_varlen(*packed[:4], cu_q.clone(), cu_k)
    assert len(made) == 5


def test_measured_sharing_is_used_for_packed_rows() -> None:
    packed = pack(ALIGNED)
    assert packed.selection.measure().sharing
    selection_attention_varlen(*packed[:4], packed.cu_q)
    assert last().request.sharing == packed.selection.sharing
    one_row_each = Selection(packed.selection.ranges.transpose(0, 1), 16)
    one_row_each.measure()
    selection_attention_varlen(*packed[:3], one_row_each, packed.cu_q)
    assert last().request.sharing is None


def test_varlen_positions_restart_in_every_sequence() -> None:
    assert varlen_positions([0, 3, 3, 5], T=7).tolist() == [0, 1, 2, 0, 1, -1, -1]
    assert varlen_positions([0, 1, 5], torch.tensor([0, 5, 7]), T=5).tolist() == [4, -1, -1, 0, 1]
    for T in (7.0, -1, True, "7"):
        with pytest.raises(ArgumentError, match=r"^T is .*; allowed: a whole number >= 0"):
            varlen_positions([0, 0], T=T)  # type: ignore[arg-type]
    scores = torch.randn(1, 7, 1, 2, generator=torch.Generator().manual_seed(0))
    selection = Selection.from_scores(scores, 2, 2, q_pos=varlen_positions([0, 3, 3, 5], T=7), first=1, local=1)
    assert selection.block_indices[0, :, 0].tolist() == [[0, -1], [0, -1], [0, 1], [0, -1], [0, -1], [-1, -1], [-1, -1]]


def test_inference_mode_empty_batches_and_one_sequence_equal_the_plain_call() -> None:
    packed = pack((3, 5), (32, 18))
    expected = selection_attention_varlen(*packed[:4], packed.cu_q, packed.cu_k)
    with torch.inference_mode():
        again = Selection(packed.selection.ranges.clone(), 16)
        assert torch.equal(expected, selection_attention_varlen(*packed[:3], again, packed.cu_q, packed.cu_k))
    empty = pack((0, 0))
    o, lse = selection_attention_varlen(*empty[:4], [0, 0, 0], return_lse=True)
    assert (o.shape, lse.shape) == ((0, 1, 2, 24), (0, 1, 2))
    q, k, v = make_qkv(S=30, G=2, h=2)
    selection = make_blocks(1, 30, 2, 30, 2, 8)
    wanted = selection_attention(q, k, v, selection)
    assert torch.equal(wanted[0], selection_attention_varlen(q[0], k[0].transpose(0, 1), v[0].transpose(0, 1), selection, [0, 30]))


BAD = {
    "q of heads": ({"q": torch.zeros(8, 4, 16)}, r"q is of shape \(8, 4, 16\); allowed: \[T,G,h,Dk\].*unflatten"),
    "q of none": ({"q": None}, "q is a NoneType; allowed: a torch.Tensor"),
    "k of a batch": ({"k": torch.zeros(1, 2, 8, 16)}, r"k is of shape \(1, 2, 8, 16\); allowed: \[Tk, G=2, D\]"),
    "fewer values": ({"v": torch.zeros(7, 2, 16)}, r"v is of shape \(7, 2, 16\); allowed: \[Tk=8, G=2, D\]"),
    "other keys": ({"k": torch.zeros(9, 2, 16), "v": torch.zeros(9, 2, 16)}, "k is of 9 keys; allowed: q's 8 rows, .*pass cu_seqlens_k"),
    "no keys": ({"k": torch.zeros(0, 2, 16), "v": torch.zeros(0, 2, 16)}, "k is of no keys for 8 rows"),
    "rows": ({"selection": torch.zeros(7, 2, 1, 2).int()}, r"selection is over rows \(7, 1, 2\); allowed: \[T,G\] = \(8, 2\)"),
    "elsewhere": ({"selection": torch.zeros(8, 2, 1, 2, device="meta").int()}, "selection is on meta; allowed: q's device cpu"),
    "no selection": ({"selection": [[0, 1]]}, "selection is a list; allowed: a Selection or"),
    "floats": ({"cu_seqlens_q": torch.tensor([0.0, 8.0])}, "cu_seqlens_q is torch.float32 of shape"),
    "a matrix": ({"cu_seqlens_q": torch.tensor([[0, 8]])}, r"cu_seqlens_q is torch.int64 of shape \(1, 2\)"),
    "one bound": ({"cu_seqlens_q": torch.tensor([0])}, "cu_seqlens_q is of 1 entries; allowed: N . 1 of them"),
    "one number": ({"cu_seqlens_q": [0]}, r"cu_seqlens_q is \[0\]; allowed: a tensor"),
    "a number": ({"cu_seqlens_q": 8}, "cu_seqlens_q is a int; allowed"),
    "no zero": ({"cu_seqlens_q": [1, 8]}, "cu_seqlens_q is 1 first; allowed: 0 first"),
    "falling": ({"cu_seqlens_q": [0, 5, 3, 8]}, "cu_seqlens_q is 5, then 3 at 2; allowed: .*never decrease"),
    "too far": ({"cu_seqlens_q": [0, 9]}, "cu_seqlens_q is 9 last; allowed: at most 8, the number of q's rows"),
    "keys too far": ({"cu_seqlens_k": torch.tensor([0, 9])}, "cu_seqlens_k is 9 last; allowed: at most 8, the number of the keys"),
    "other sequences": ({"cu_seqlens_k": [0, 4, 8]}, "cu_seqlens_k is of 2 sequences; allowed: cu_seqlens_q's 1"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_input(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "q": torch.zeros(8, 2, 2, 16), "k": torch.zeros(8, 2, 16), "v": torch.zeros(8, 2, 16),
        "selection": torch.zeros(8, 2, 1, 2).int(), "cu_seqlens_q": [0, 8],
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=message):
        selection_attention_varlen(**{**arguments, **changes})  # type: ignore[arg-type]


on_gpu = pytest.mark.parametrize("backend", [pytest.param(lane.name, marks=lane.marks()) for lane in lanes("cuda")])
SIZES: dict[str, Any] = {"G": 2, "h": 4, "Dk": 64, "Dv": 128, "device": "cuda"}
ALIGNED_GPU = (64, 0, 96, 32, 0, 41)
FEW, MANY = (1, 3, 0, 40, 1, 7), (160, 32, 64, 32, 320, 90)  # rows, and the keys before and among them; the fourth has more rows


def on_device(packed: Packed) -> dict[str, Any]:
    """Bounds that only the GPU holds."""
    cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32, device="cuda") for bounds in (packed.cu_q, packed.cu_k))
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": None if packed.cu_q == packed.cu_k else cu_k}


def step(backend: str, packed: Packed, **options: Any) -> tuple[torch.Tensor, ...]:
    """o, lse and all gradients."""
    inputs = [x.detach().requires_grad_() for x in packed[:3]]
    o, lse = attend_varlen(backend, packed, *inputs, **options)
    return o.detach(), lse.detach(), *torch.autograd.grad(o.sum() + lse.masked_fill(lse.detach() == -torch.inf, 0).sum(), inputs)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("lengths", [(ALIGNED_GPU, ALIGNED_GPU), (FEW, MANY)], ids=["the same", "more keys"])
def test_calls_never_wait_for_the_device(backend: str, lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    packed = pack(*lengths, block_size=32, spare=5, dtype=torch.bfloat16, **SIZES)
    expected = step(backend, packed)  # compiles
    fresh = packed._replace(selection=Selection(packed.selection.ranges, 32))
    options = on_device(packed)
    with no_waiting():
        found = step(backend, fresh, block_aligned=True, **options)
        fresh.selection.forget_plans()
        listed = step(backend, fresh)
    assert all(map(torch.equal, expected * 2, found + listed))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("odd", [0, 7], ids=["whole", "copied"])
def test_a_graph_follows_writes_into_bounds_and_ranges(backend: str, odd: int) -> None:
    first, second = (
        pack(lengths, block_size=32, dtype=torch.bfloat16, seed=seed, **SIZES)
        for seed, lengths in enumerate(((128 - odd, 0, 96, 32 + odd), (64 + odd, 64, 0, 128 - odd)))
    )
    selection = Selection(first.selection.ranges.clone(), 32)
    given = first._replace(selection=selection)
    options: dict[str, Any] = {**on_device(first), "align" if odd else "block_aligned": True}
    graph, outputs = captured(lambda: step(backend, given, **options))
    for packed in (first, second):
        selection.ranges.copy_(packed.selection.ranges)
        options["cu_seqlens_q"].copy_(torch.tensor(packed.cu_q))
        now = Packed(*first[:3], Selection(packed.selection.ranges, 32), packed.cu_q, packed.cu_k)
        assert all(map(torch.equal, replayed(graph, outputs), step(backend, now, align=bool(odd))))


@pytest.mark.gpu
def test_calls_of_other_libraries_do_not_wait_for_the_device() -> None:
    """Forward and backward, bounds on the device, gradients of what they should be."""
    packed = pack(ALIGNED_GPU, block_size=32, dtype=torch.bfloat16, **SIZES)
    blocks = packed.selection.block_indices  # [1,T,G,n]
    cu = torch.tensor(packed.cu_q, dtype=torch.int32, device="cuda")
    expected = step("sdpa-packed", packed)
    calls = (
        lambda q, k, v: compat.topk_sparse_attention(q, k, v, blocks[0].transpose(0, 1), 32, cu, block_aligned=True),
        lambda q, k, v: compat.parallel_nsa(q[None], k[None], v[None], block_indices=blocks, block_size=32, cu_seqlens=cu)[0],
    )
    for call in calls:
        for mode in (contextlib.nullcontext(), no_waiting()):  # the first compiles
            inputs = [packed.q.flatten(1, 2).detach().requires_grad_(), *(x.detach().requires_grad_() for x in packed[1:3])]
            with mode:
                o = call(*inputs)
                gradients = torch.autograd.grad(o.sum(), inputs)
        torch.testing.assert_close(o, expected[0].flatten(1, 2), atol=2e-2, rtol=2e-2)
        assert [x.shape for x in gradients] == [x.shape for x in inputs]
        assert all(bool(x.isfinite().all()) for x in gradients)


# Results


@pytest.mark.parametrize("backend", CPU)
def test_sequences_of_any_length(backend: str) -> None:
    for lengths_k in (MIXED, (1, 3, 17, 20, 0, 33)):
        packed = pack(MIXED, lengths_k, G=2, h=3, spare=3)
        check_varlen(backend, packed, align=True)
        assert last().request.block_size == 16


@pytest.mark.parametrize("backend", ON_BLOCKS)
def test_backends_of_whole_blocks_serve_any_bounds_when_forced(backend: str) -> None:
    check_varlen(backend, pack((5, 0, 1, 18), n=2, spare=3))
    assert last().request.block_size == 16
    packed = pack((1, 2, 0), (20, 1, 17), n=2, G=2, h=3, dtype=torch.float16)  # as many rows as keys, less, and none
    with use_backend(backend):
        selection_attention_varlen(*packed[:4], packed.cu_q, packed.cu_k)
    assert decisions()[-1].forward == backend
    check_varlen(backend, packed._replace(selection=Selection(packed.selection.ranges.long(), 16)))


@pytest.mark.usefixtures("unseen")
def test_bounds_on_a_gpu_can_be_aligned() -> None:
    for packed in (pack(MIXED, n=2, spare=1), pack((1, 18, 0, 2), (33, 16, 5, 1), n=2)):
        check_varlen("numba", packed, align=True, **tensors(packed))
        assert last().request.block_size == 16
    check_varlen("triton-tile", pack((3, 0, 2), n=2, spare=1), **tensors(pack((3, 0, 2), spare=1)))


def test_invalid_bounds_access_no_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU checks what a GPU would not: an index outside a tensor is an error."""
    hide_bounds(monkeypatch)
    packed = pack((5, 9, 2), n=2)
    for wrong in ([0, 12, 3, 16], [-40, -7, 5, 90], [7, 7, 7, 7], [0, 1000, 2000, 3000], [9, 4, 2, -80]):
        o = selection_attention_varlen(*packed[:4], torch.tensor(wrong), align=True, backend="numba")
        assert o.shape == (16, 1, 2, 24)


@pytest.mark.parametrize("lengths", [(20,), (5, 9), (16, 5)], ids=str)
def test_debugging_accepts_blocks_longer_than_their_sequence(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    check_varlen("numba", pack(lengths, n=2), align=True)
    assert last().request.block_size == 16


# When


def test_a_cpu_copies_only_on_request() -> None:
    packed = pack((5, 9), n=2)
    for options, block_size in (({}, None), ({"align": False}, None), ({"align": True}, 16)):
        selection_attention_varlen(*packed[:4], packed.cu_q, **options)
        assert last().request.block_size == block_size
    for backend, found in (("numba", None), ("triton-group", None), ("triton-tile", 16)):
        attend_varlen(backend, packed)
        assert last().request.block_size == found


def test_aligned_sequences_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    monkeypatch.setattr(attend, "selection_attention", lambda *args, **options: given.extend(args[1:3]) or args[0])
    packed = pack((16, 0, 32, 7))
    selection_attention_varlen(*packed[:4], packed.cu_q, align=True)
    hide_bounds(monkeypatch)
    selection_attention_varlen(*packed[:4], **tensors(packed), align=True, block_aligned=True)
    assert [x.data_ptr() for x in given] == [x.data_ptr() for x in packed[1:3]] * 2


def packed_request(**changes: Any) -> Request:
    """32k rows in 12 sequences, after the copy."""
    case = PACKED[-2]
    assert case.case == "packed-odd-32k-h16"
    facts = {name: getattr(case, name) for name in ("B", "S", "G", "h", "Dk", "Dv", "n", "dtype")}
    room = -(-(case.S + 12 * 63) // 64) * 64
    return Request(**{**facts, "block_size": 64, "S_kv": room, "max_length": 1024, **changes})


@pytest.mark.parametrize("needs_grad", [False, True], ids=["forward", "and backward"])
def test_a_gpu_copies_for_a_backend_of_blocks(needs_grad: bool) -> None:
    request = packed_request(needs_grad=needs_grad)
    decision = explain_request(request, H200)
    assert {decision.forward, decision.backward} & set(ON_BLOCKS)
    assert packed_batches._pays(request, H200, None)
    assert packed_batches._pays(packed_request(h=4, needs_grad=needs_grad), H200, None)
    assert not packed_batches._pays(request, H200, "triton-group")
    assert not packed_batches._pays(request, H200, "sdpa-packed")
    assert not packed_batches._pays(request, H200, "a misspelled one")
    with use_backend("triton-group"):
        assert not packed_batches._pays(request, H200, None)
        assert packed_batches._pays(request, H200, "triton-tile")
    assert not packed_batches._pays(packed_request(block_size=2, n=512), H200, None)  # which no backend of blocks takes
    for device in (PLAIN_CPU, INTERPRETER):
        assert not packed_batches._pays(request, device, None)
        assert packed_batches._pays(request, device, "triton-tile")


def test_cupy_cuda_prefers_blocks_only_for_its_tile_kernels() -> None:
    request = packed_request()
    assert packed_batches._pays(request, H200, "cupy-cuda")
    assert not packed_batches._pays(request, A100, "cupy-cuda")
    for changes in ({"block_size": 24}, {"Dk": 80}, {"aligned": False}, {"S": 4}, {"S_kv": 64 * 32768 + 1}):
        assert not packed_batches._pays(packed_request(**changes), H200, "cupy-cuda")


def work(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, cu: Tensor, backend: str | None, align: bool | None) -> Tensor:
    return selection_attention_varlen(q, k, v, Selection(ranges, 16), cu, backend=backend, align=align)


def test_a_compiled_call_copies_too() -> None:
    packed = pack(MIXED, n=2)
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    inputs = [x.detach().requires_grad_() for x in packed[:3]]
    for backend, align, block_size in (("numba", True, 16), ("triton-tile", None, 16), ("numba", None, None)):
        o = compiled(*inputs, packed.selection.ranges, torch.tensor(packed.cu_q), backend, align)
        assert last().request.block_size == block_size
        eager = work(*inputs, packed.selection.ranges, torch.tensor(packed.cu_q), backend, align)
        found, wanted = ((x, *torch.autograd.grad(x.square().sum(), inputs)) for x in (o, eager))
        assert all(map(torch.equal, found, wanted))


# Errors


def test_align_without_blocks_is_refused() -> None:
    packed = pack((5, 9), block_size=None)
    no_blocks = r"align is True, but the selection has no block_size; allowed: .*whole blocks.*from_blocks"
    for align in (None, False):
        selection_attention_varlen(*packed[:4], packed.cu_q, align=align)
    assert_refused(
        (no_blocks, lambda: selection_attention_varlen(*packed[:4], packed.cu_q, align=True)),
        ("align is 'yes'; allowed: True, False or None", lambda: selection_attention_varlen(*packed[:4], packed.cu_q, align="yes")),  # type: ignore[arg-type]
    )


LENGTHS = (5, 0, 1, 14)
BOUNDS = torch.tensor([0, *accumulate(LENGTHS)])
T = int(BOUNDS[-1]) + 20
CHOICE: dict[str, Any] = {"compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 3, "first": 1, "local": 1}
C = (T - 8) // 4 + 1


def random_leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def test_longest_sequences() -> None:
    like = torch.zeros(1)
    longest = [Bounds(None, BOUNDS, most).longest(T) for most in (None, 0, 1, 14, 16, 17, 1 << 20)]
    assert longest == [T, 1, 1, 16, 16, 32, T], "rounded up to powers of two, so that batches share decisions and kernels"
    assert Bounds.of("cu_seqlens", BOUNDS, T, like, 30).longest(T) == 16, "what the host reads is closer"
    assert Bounds.of("cu_seqlens", [0, 0], T, like, 0).longest(T) == 1


def test_the_search_is_as_wide_as_the_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit the same results. Rows beyond a promise that does not hold choose among the first blocks, and no others change."""
    hide_bounds(monkeypatch)
    searched = calls_of(monkeypatch, choose_triton, "top_n")
    inputs = [x.detach() for x in random_leaves((T, 1, 2, 16), (C, 1, 16), (C, 1, 16))]

    def run(**more: Any) -> tuple[Tensor, ...]:
        o, selection, lse = compressed_attention(*inputs, **CHOICE, cu_seqlens=BOUNDS, return_lse=True, backend="choose-triton", **more)
        return o, lse, selection.ranges[0]

    wanted, promised, (o, lse, cut) = run(), run(max_seqlen=14), run(max_seqlen=8)
    assert [scores.shape[-1] for scores, *_ in searched] == [-(-T // 8), 16 // 8, 8 // 8]
    assert all(map(torch.equal, (*promised, o, lse), (*wanted, *wanted[:2])))
    position = torch.cat([torch.arange(length) for length in (*LENGTHS, T - int(BOUNDS[-1]))])
    assert torch.equal(cut[position < 8], wanted[2][position < 8])
    assert int(cut.max()) == 8 < int(wanted[2].max())


def test_the_layer_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through nsa_attention and NSAttention."""
    hide_bounds(monkeypatch)
    seen = calls_of(monkeypatch, Bounds, "longest")
    layer, x = NSAttention(10, 1, 2, 4, window=6, **CHOICE), torch.randn(1, T, 10)
    wanted = layer(x, cu_seqlens=BOUNDS)
    assert {bounds.most for bounds, _ in seen} == {None}
    assert torch.equal(layer(x, cu_seqlens=BOUNDS, max_seqlen=14), wanted)
    assert 14 in [bounds.most for bounds, _ in seen]
    words = "max_seqlen is 3; allowed: None without cu_seqlens"
    assert_refused(
        (words, lambda: layer(x, max_seqlen=3)),
        (words, lambda: nsa_attention(*random_leaves(*[(1, 9, 1, 2, 4)] * 8), max_seqlen=3)),
    )
