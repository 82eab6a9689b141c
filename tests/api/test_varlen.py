"""Packed batches on every backend that runs here, forward and backward, against the oracle of each sequence alone."""

from __future__ import annotations

import pytest
import torch

import nsa_sel
from nsa_sel.core import attend
from nsa_sel.core import packed as packed_batches
from nsa_sel.core.call import CPU as CPU_DEVICE
from nsa_sel.core.call import Call
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.varlen import selection_attention_varlen, varlen_positions
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.varlen_cases import (
    Packed,
    assert_unselected_keys_change_nothing,
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


@pytest.mark.parametrize("backend", [*ON_RANGES, "triton-token"])
def test_sequences_of_a_few_rows_match_the_oracle(backend: str) -> None:
    check_varlen(backend, pack((3, 0, 1, 4), block_size=4, n=2, spare=1))
    check_varlen(backend, pack((1, 0, 2), (20, 3, 7), block_size=None, spare=1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_aligned_sequences_keep_whole_blocks(backend: str) -> None:
    """The last key of most sequences ends a block; the rows of the last outnumber its keys."""
    for packed in (pack((2, 1, 0, 3), (32, 16, 16, 2), n=2), pack((16, 0, 2), n=2, spare=1)):
        check_varlen(backend, packed)
        assert nsa_sel.decisions()[-1].request.block_size == 16


@pytest.mark.parametrize("backend", ON_RANGES)
def test_rows_may_be_fewer_or_more_than_keys(backend: str) -> None:
    """Rows are at the last positions; those before the first key see nothing."""
    packed = pack((2, 1, 0, 3, 1), (21, 1, 9, 2, 0), spare=1)
    check_varlen(backend, packed)
    everything = torch.tensor([-3, 2**31 - 1]).int().expand(1, 8, 1, 1, 2)
    check_varlen(backend, packed._replace(selection=Selection(everything)))
    packed = pack((3, 1, 2), (1, 4, 1))  # as many rows as keys, and yet not the same
    check_varlen(backend, packed._replace(selection=Selection(everything[:, :6])))


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_and_int64(backend: str) -> None:
    packed = pack((1, 2), (16, 20), h=3, dtype=torch.float16)
    check_varlen(backend, packed._replace(selection=Selection(packed.selection.ranges.long(), 16)))


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


@pytest.mark.parametrize("backend", ON_BLOCKS)
def test_nan_in_unselected_keys_changes_nothing(backend: str) -> None:
    packed = pack((2, 1, 1), (48, 16, 40), n=2, spare=4)
    assert_unselected_keys_change_nothing(backend, packed, first=48)


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
