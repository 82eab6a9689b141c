"""Packed batches on every backend that runs here, forward and backward, against the oracle of each sequence alone."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import nsa_sel
from nsa_sel import compat
from nsa_sel.core import attend
from nsa_sel.core import packed as packed_batches
from nsa_sel.core.call import CPU as CPU_DEVICE
from nsa_sel.core.call import Call
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.varlen import selection_attention_varlen, varlen_positions
from tests.contract.lanes import lanes
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.gpus import captured, no_waiting, replayed
from tests.helpers.varlen_cases import (
    Packed,
    attend_varlen,
    bounds,
    check_sequences,
    check_varlen,
    hide_bounds,
    pack,
    tensors,
)

CPU = ("sdpa-packed", "numba")
unseen = pytest.mark.usefixtures("unreadable_bounds")
ON_RANGES = (*CPU, "triton-group")
ON_BLOCKS = ("triton-tile", "triton-block")
BACKENDS = (*ON_RANGES, *ON_BLOCKS)
MIXED = (5, 0, 1, 18, 16, 2)  # shorter than a block of 16, empty, one row, unaligned
ALIGNED = (16, 0, 32, 7)  # all begin at multiples of 16


@pytest.mark.parametrize("backend", CPU)
def test_sequences_of_any_length(backend: str) -> None:
    for block_size in (16, None):
        check_varlen(backend, pack(MIXED, block_size=block_size, G=2, spare=3))
    check_varlen(backend, pack(ALIGNED, G=2, h=3, spare=3))
    assert nsa_sel.decisions()[-1].request.block_size == 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_aligned_sequences_keep_whole_blocks(backend: str) -> None:
    """The last key of most sequences ends a block; the rows of the last outnumber its keys."""
    for packed in (pack((2, 1, 0, 3), (32, 16, 16, 2), n=2), pack((16, 0, 2), n=2, spare=1)):
        check_varlen(backend, packed)
        assert nsa_sel.decisions()[-1].request.block_size == 16


@pytest.mark.parametrize("backend", ON_RANGES)
def test_nan_in_other_sequences_changes_nothing(backend: str) -> None:
    """NaN in all keys and values of every second sequence and of the padding."""
    packed = pack((2, 1, 3, 1), (6, 20, 3, 5), block_size=None, spare=1)
    own = [(rows, keys) for rows, keys in packed.each()][::2]
    k, v = (torch.full_like(x, float("nan")) for x in packed[1:3])
    for _, keys in own:
        k[keys], v[keys] = packed.k[keys], packed.v[keys]
    results = []
    for pair in (packed[1:3], (k, v)):
        inputs = [x.detach().requires_grad_() for x in (packed.q, *pair)]
        o, lse = attend_varlen(backend, packed, *inputs)
        do = torch.zeros_like(o)
        for rows, _ in own:
            do[rows] = 1
        results.append((o.detach(), lse.detach(), *torch.autograd.grad(o, inputs, do)))
    for i, (clean, poisoned) in enumerate(zip(*results, strict=True)):
        for rows, keys in own:
            where = rows if i < 3 else keys
            assert torch.equal(clean[where], poisoned[where])


def test_unaligned_blocks_become_ranges() -> None:
    packed = pack((8, 17), n=2)
    with pytest.raises(BackendError, match=r"block-aligned .*whole blocks"):
        attend_varlen("triton-tile", packed, align=False)
    selection_attention_varlen(*packed[:4], packed.cu_q)
    assert nsa_sel.decisions()[-1].request.block_size is None
    assert nsa_sel.decisions()[-1].request.max_length == 25  # min(2 blocks of 16, 17 rounded up to 32, all keys)


@pytest.mark.parametrize("packed", [pack(ALIGNED), pack((3, 5), (32, 18))], ids=["the same", "more keys"])
def test_all_forms_of_bounds_give_equal_results(packed: Packed) -> None:
    expected = attend_varlen("sdpa-packed", packed)
    for form in (tuple, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)):
        got = attend_varlen("sdpa-packed", packed, cu_seqlens_q=form(packed.cu_q), cu_seqlens_k=form(packed.cu_k))
        assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
        assert nsa_sel.decisions()[-1].request.block_size == 16
    rows = Selection.from_ranges(packed.ranges(), 16)  # [T,G,n,2]
    got = attend_varlen("sdpa-packed", packed._replace(selection=rows))
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
    raw = selection_attention_varlen(*packed[:3], packed.ranges(), packed.cu_q, packed.cu_k)
    torch.testing.assert_close(raw, expected[0], atol=2e-6, rtol=0)


@unseen
def test_bounds_on_a_gpu_align_only_by_promise_or_for_one_sequence() -> None:
    packed = pack((20,))
    selection_attention_varlen(*packed[:4], **tensors(packed))
    assert nsa_sel.decisions()[-1].request.block_size == 16
    for packed in (pack((16, 0, 3), n=2, spare=1), pack((1, 18, 0, 2), (32, 16, 16, 21), n=2)):
        check_varlen("numba", packed, **tensors(packed))
        assert nsa_sel.decisions()[-1].request.block_size is None
        check_varlen("numba", packed, block_aligned=True, **tensors(packed))
        assert nsa_sel.decisions()[-1].request.block_size == 16
        selection_attention_varlen(*packed[:4], **tensors(packed))
        assert nsa_sel.decisions()[-1].request.block_size is None
        selection_attention_varlen(*packed[:4], packed.cu_q, packed.cu_k)  # a list is the host's own
        assert nsa_sel.decisions()[-1].request.block_size == 16


def test_a_broken_promise_of_alignment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack((5, 20))
    with pytest.raises(ArgumentError, match=r"block_aligned is True, but a sequence's first key is 5; allowed: multiples of .*16"):
        selection_attention_varlen(*packed[:4], packed.cu_q, block_aligned=True)
    hide_bounds(monkeypatch)
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    with pytest.raises(ArgumentError, match="not one block of 16"):
        selection_attention_varlen(*packed[:4], **tensors(packed), block_aligned=True)


def test_an_unaligned_block_reaches_two_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, given = pack((5, 40, 40), block_size=16), []
    monkeypatch.setattr(attend, "selection_attention", lambda *args, **options: given.append(args[:4]) or args[0])
    for cu in (packed.cu_q, [0, 85]):
        selection_attention_varlen(*packed[:4], cu)
    for inputs in given:
        assert [x.data_ptr() for x in inputs[:3]] == [x.data_ptr() for x in packed[:3]], "no copies of q, k, v"
    moved = [inputs[3] for inputs in given]
    assert [selection.block_size for selection in moved] == [None, 16]
    assert [selection.length_bound(85) for selection in moved] == [48, 48]
    assert [selection.range_bound(85) for selection in moved] == [16, 16]
    k = packed.k.transpose(0, 1)[None]
    calls = [Call(packed.q[None], k, k, selection, None, 1.0, settings_for(CPU_DEVICE)) for selection in moved]
    assert [call.reach(16) for call in calls] == [2, 1]


def test_debugging_accepts_blocks_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    q, k, v = pack((5, 9))[:3]
    for blocks, cu in (([2, -1, 0], [0, 14]), ([2, -1, 0], [0, 5, 14]), ([0, 0], [0, 5, 14])):
        ranges = Selection(torch.tensor([[4 * j, 4 * (j >= 0) * (j + 1)] for j in blocks]).int().expand(14, 1, 1, -1, 2), 4)
        if len(set(blocks)) == len(blocks):
            selection_attention_varlen(q, k, v, ranges, cu)
        else:
            with pytest.raises(ArgumentError, match="overlapping"):
                selection_attention_varlen(q, k, v, ranges, cu)


@unseen
def test_moved_selections_are_cached_until_an_input_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, made = pack((3, 5), (32, 18)), []
    real = packed_batches.positions_in_sequences
    monkeypatch.setattr(packed_batches, "positions_in_sequences", lambda *args: made.append(1) or real(*args))
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
    assert nsa_sel.decisions()[-1].request.sharing == packed.selection.sharing
    one_row_each = Selection(packed.selection.ranges.transpose(0, 1), 16)
    one_row_each.measure()
    selection_attention_varlen(*packed[:3], one_row_each, packed.cu_q)
    assert nsa_sel.decisions()[-1].request.sharing is None


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
    wanted = nsa_sel.selection_attention(q, k, v, selection)
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


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    changes, message = BAD[name]
    arguments = {
        "q": torch.zeros(8, 2, 2, 16), "k": torch.zeros(8, 2, 16), "v": torch.zeros(8, 2, 16),
        "selection": torch.zeros(8, 2, 1, 2).int(), "cu_seqlens_q": [0, 8],
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=message):
        selection_attention_varlen(**{**arguments, **changes})  # type: ignore[arg-type]


def test_the_reference_notices_swapped_rows() -> None:
    packed = pack((4, 4), block_size=None)
    o, lse = attend_varlen("sdpa-packed", packed)
    zeros = tuple(torch.zeros_like(x) for x in packed[:3])
    with pytest.raises(AssertionError):
        check_sequences(packed, (o.flip(0), lse.flip(0)), zeros, torch.zeros_like(o), torch.zeros_like(lse))
    assert bounds((2, 0, 3)) == [0, 2, 2, 5]


on_gpu = pytest.mark.parametrize("backend", [pytest.param(lane.name, marks=lane.marks()) for lane in lanes("cuda")])
SIZES: dict[str, Any] = {"G": 2, "h": 4, "Dk": 64, "Dv": 128, "device": "cuda"}
MIXED_GPU = (70, 0, 1, 37, 16, 2)
ALIGNED_GPU = (64, 0, 96, 32, 0, 41)
FEW, MANY = (1, 3, 0, 40, 1, 7), (160, 32, 64, 32, 320, 90)  # rows, and the keys before and among them; the fourth has more rows


def on_device(packed: Packed) -> dict[str, Any]:
    """Bounds that only the GPU holds."""
    cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32, device="cuda") for bounds in (packed.cu_q, packed.cu_k))
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": None if packed.cu_q == packed.cu_k else cu_k}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("lengths", [(ALIGNED_GPU, ALIGNED_GPU), (FEW, MANY)], ids=["the same", "more keys"])
def test_aligned_sequences_keep_whole_blocks_gpu(backend: str, lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for h, block_size in ((4, 32), (3, 16)):
        packed = pack(*lengths, block_size=block_size, spare=5, dtype=torch.bfloat16, **{**SIZES, "h": h})
        check_varlen(backend, packed, **{"block_aligned": True, **on_device(packed)} if h == 3 else {})
        assert nsa_sel.decisions()[-1].request.block_size == block_size


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("lengths", [(MIXED_GPU, MIXED_GPU), (FEW, (161, 33, 0, 30, 320, 90))], ids=["the same", "more keys"])
def test_unaligned_sequences_are_copied_to_whole_blocks(backend: str, lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for h, block_size in ((4, 64), (3, 16)):
        packed = pack(*lengths, block_size=block_size, spare=5, dtype=torch.bfloat16, **{**SIZES, "h": h})
        check_varlen(backend, packed, align=True, **on_device(packed) if h == 3 else {})
        assert nsa_sel.decisions()[-1].request.block_size == block_size


@pytest.mark.gpu
def test_keys_are_copied_where_it_pays_unless_forbidden() -> None:
    """1k rows that may select 256 keys each: the decision for whole blocks says whether to copy."""
    packed = pack((500, 7, 517), block_size=64, n=4, G=2, h=16, Dk=128, Dv=128, dtype=torch.bfloat16, device="cuda")
    options = on_device(packed)
    nsa_sel.selection_attention_varlen(*packed[:4], **options, align=True)
    decision = nsa_sel.decisions()[-1]
    for_blocks = packed_batches._prefers_blocks(str(decision.forward), decision.request, decision.device)
    nsa_sel.selection_attention_varlen(*packed[:4], **options)
    assert nsa_sel.decisions()[-1].request.block_size == (64 if for_blocks else None)
    for align, backend in ((False, None), (None, "triton-group")):
        nsa_sel.selection_attention_varlen(*packed[:4], **options, align=align, backend=backend)
        assert nsa_sel.decisions()[-1].request.block_size is None
    with nsa_sel.use_backend("triton-tile"):
        nsa_sel.selection_attention_varlen(*packed[:4], **options)
    assert nsa_sel.decisions()[-1].request.block_size == 64


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
    for one, other, third in zip(expected, found, listed, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.gpu
@on_gpu
def test_a_copy_never_waits_and_is_bit_equal_again(backend: str) -> None:
    packed = pack(MIXED_GPU, block_size=32, spare=5, dtype=torch.bfloat16, **SIZES)
    expected = step(backend, packed, align=True)  # compiles
    options = on_device(packed)
    with no_waiting():
        found = [step(backend, packed._replace(selection=Selection(packed.selection.ranges, 32)), align=True, **options) for _ in range(5)]
    for again in found:
        assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))


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
