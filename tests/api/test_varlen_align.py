"""Packed batches whose keys are copied so that sequences begin with a block: when that happens, and that results are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.bench.core.cases import packed_cases
from nsa_sel.core import attend
from nsa_sel.core import packed as packed_batches
from nsa_sel.core.request import Request
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.selection import Selection
from nsa_sel.varlen import selection_attention_varlen
from tests.helpers.policy_cases import A100, H200, INTERPRETER
from tests.helpers.policy_cases import CPU as PLAIN_CPU
from tests.helpers.varlen_cases import (
    assert_unselected_keys_change_nothing,
    attend_varlen,
    check_varlen,
    hide_bounds,
    pack,
    tensors,
)

CPU = ("sdpa-packed", "numba")
unseen = pytest.mark.usefixtures("unreadable_bounds")
ON_BLOCKS = ("triton-tile", "triton-block")
MIXED = (5, 0, 1, 18, 16, 2)  # shorter than a block of 16, empty, one, and one that begins with a block after odd ones


def last_request() -> Request:
    return nsa_sel.decisions()[-1].request


# Results


@pytest.mark.parametrize("backend", CPU)
def test_sequences_of_any_length(backend: str) -> None:
    for lengths_k in (MIXED, (1, 3, 17, 20, 0, 33)):
        packed = pack(MIXED, lengths_k, G=2, h=3, spare=3)
        check_varlen(backend, packed, align=True)
        assert last_request().block_size == 16


@pytest.mark.parametrize("backend", ON_BLOCKS)
def test_backends_of_whole_blocks_serve_any_bounds_when_forced(backend: str) -> None:
    check_varlen(backend, pack((5, 0, 1, 18), n=2, spare=3))
    assert last_request().block_size == 16
    packed = pack((1, 2, 0), (20, 1, 17), n=2, G=2, h=3, dtype=torch.float16)  # as many rows as keys, less, and none
    with nsa_sel.use_backend(backend):
        selection_attention_varlen(*packed[:4], packed.cu_q, packed.cu_k)
    assert nsa_sel.decisions()[-1].forward == backend
    check_varlen(backend, packed._replace(selection=Selection(packed.selection.ranges.long(), 16)))


@unseen
def test_bounds_on_a_gpu_can_be_aligned() -> None:
    for packed in (pack(MIXED, n=2, spare=1), pack((1, 18, 0, 2), (33, 16, 5, 1), n=2)):
        check_varlen("numba", packed, align=True, **tensors(packed))
        assert last_request().block_size == 16
    check_varlen("triton-tile", pack((3, 0, 2), n=2, spare=1), **tensors(pack((3, 0, 2), spare=1)))


@pytest.mark.parametrize("backend", ["numba", *ON_BLOCKS])
def test_nan_in_unselected_keys_changes_nothing(backend: str) -> None:
    packed = pack((2, 1, 1), (43, 15, 38), n=2, spare=4)
    assert_unselected_keys_change_nothing(backend, packed, first=43, align=True)


@pytest.mark.parametrize("backend", ON_BLOCKS)
def test_a_selected_nan_spreads_as_in_aligned_sequences(backend: str) -> None:
    """Bit-equal to the plain call with keys that are aligned by hand."""
    everything = torch.tensor([[0, 16], [16, 32]]).int().expand(1, 4, 1, 2, 2)
    packed = pack((2, 1, 1), (21, 7, 18), n=2)._replace(selection=Selection(everything, 16))
    packed.k[20], packed.v[22] = float("nan"), float("nan")  # the last of a sequence, and the second of the next
    first, position = torch.tensor([[0, 0, 32, 48]]), torch.tensor([[19, 20, 6, 17]])  # blocks 0-1, 2 and 3-4
    k, v = (torch.cat([x[:21], x.new_zeros(11, *x.shape[1:]), x[21:28], x.new_zeros(9, *x.shape[1:]), x[28:]]) for x in packed[1:3])
    moved = packed.selection.shifted(first, position + 1, len(k), whole_blocks=True, max_length=32)
    k, v = (x.transpose(0, 1)[None] for x in (k, v))
    wanted = nsa_sel.selection_attention(packed.q[None], k, v, moved, q_pos=first + position, return_lse=True, backend=backend)
    got = attend_varlen(backend, packed, align=True)
    assert bool(got[0].isnan().any())
    for mine, other in zip(got, wanted, strict=True):
        assert torch.equal(mine.nan_to_num(7.0), other[0].nan_to_num(7.0))


def test_the_copy_has_zeros_between_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, given = pack((5, 0, 18), n=2, G=2, spare=2), []
    monkeypatch.setattr(attend, "selection_attention", lambda *args, **options: given.extend(args[1:3]) or args[0])
    selection_attention_varlen(*packed[:4], packed.cu_q, align=True)
    for x, copy in zip(packed[1:3], given, strict=True):
        wanted = x.new_zeros(1, 2, 80, x.shape[-1])  # 25 keys and 3 * 15, in whole blocks
        for start, keys in ((0, slice(0, 5)), (16, slice(5, 23)), (48, slice(23, 25))):
            wanted[0, :, start : start + keys.stop - keys.start] = x[keys].transpose(0, 1)
        assert torch.equal(copy, wanted)


def test_invalid_bounds_access_no_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU checks what a GPU would not: an index outside a tensor is an error."""
    hide_bounds(monkeypatch)
    packed = pack((5, 9, 2), n=2)
    for wrong in ([0, 12, 3, 16], [-40, -7, 5, 90], [7, 7, 7, 7], [0, 1000, 2000, 3000], [9, 4, 2, -80]):
        o = selection_attention_varlen(*packed[:4], torch.tensor(wrong), align=True, backend="numba")
        assert o.shape == (16, 1, 2, 24)


def test_autocast_casts_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, given = pack((5, 9), n=2), []
    call = attend.selection_attention
    monkeypatch.setattr(attend, "selection_attention", lambda *args, **options: given.extend(args[:3]) or call(*args, **options))
    with torch.autocast("cpu", torch.bfloat16):
        o = selection_attention_varlen(*packed[:4], packed.cu_q, align=True)
    assert {x.dtype for x in (o, *given)} == {torch.bfloat16}
    assert last_request().dtype == "bfloat16"


@pytest.mark.parametrize("lengths", [(20,), (5, 9), (16, 5)], ids=str)
def test_debugging_accepts_blocks_longer_than_their_sequence(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    check_varlen("numba", pack(lengths, n=2), align=True)
    assert last_request().block_size == 16


# When


def test_a_cpu_copies_only_on_request() -> None:
    packed = pack((5, 9), n=2)
    for options, block_size in (({}, None), ({"align": False}, None), ({"align": True}, 16)):
        selection_attention_varlen(*packed[:4], packed.cu_q, **options)
        assert last_request().block_size == block_size
    for backend, found in (("numba", None), ("triton-group", None), ("triton-tile", 16)):
        attend_varlen(backend, packed)
        assert last_request().block_size == found


def test_a_backend_forced_by_environment_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_BACKEND", "triton-block")
    packed = pack((5, 2), n=2)
    selection_attention_varlen(*packed[:4], packed.cu_q)
    assert (nsa_sel.decisions()[-1].forward, last_request().block_size) == ("triton-block", 16)
    with pytest.raises(BackendError, match=r"triton-block.*\n.*block-aligned .*whole blocks"):
        selection_attention_varlen(*packed[:4], packed.cu_q, align=False)


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
    case = packed_cases()[-2]
    assert case.case == "packed-odd-32k-h16"
    facts = {name: getattr(case, name) for name in ("B", "S", "G", "h", "Dk", "Dv", "n", "dtype")}
    room = -(-(case.S + 12 * 63) // 64) * 64
    return Request(**{**facts, "block_size": 64, "S_kv": room, "max_length": 1024, **changes})


@pytest.mark.parametrize("needs_grad", [False, True], ids=["forward", "and backward"])
def test_a_gpu_copies_for_a_backend_of_blocks(needs_grad: bool) -> None:
    request = packed_request(needs_grad=needs_grad)
    decision = nsa_sel.explain_request(request, H200)
    assert {decision.forward, decision.backward} & set(ON_BLOCKS)
    assert packed_batches._pays(request, H200, None)
    assert packed_batches._pays(packed_request(h=4, needs_grad=needs_grad), H200, None)
    assert not packed_batches._pays(request, H200, "triton-group")
    assert not packed_batches._pays(request, H200, "sdpa-packed")
    assert not packed_batches._pays(request, H200, "a misspelled one")
    with nsa_sel.use_backend("triton-group"):
        assert not packed_batches._pays(request, H200, None)
        assert packed_batches._pays(request, H200, "triton-tile")
    assert not packed_batches._pays(packed_request(block_size=2, n=512), H200, None)  # which no backend of blocks takes
    for device in (PLAIN_CPU, INTERPRETER):
        assert not packed_batches._pays(request, device, None)
        assert packed_batches._pays(request, device, "triton-tile")


def test_a_few_rows_over_many_keys_copy_nothing() -> None:
    """Twelve rows may select 12k keys; copying a million moves more than any backend would read."""
    few = packed_request(S=12, S_kv=1 << 20)
    assert not packed_batches._pays(few, H200, None)
    assert packed_batches._pays(few, H200, "triton-tile")
    assert not packed_batches._pays(packed_request(S=3 * 1024 - 1, S_kv=1 << 20), H200, None)


def test_cupy_cuda_prefers_blocks_only_for_its_tile_kernels() -> None:
    request = packed_request()
    assert packed_batches._pays(request, H200, "cupy-cuda")
    assert not packed_batches._pays(request, A100, "cupy-cuda")
    for changes in ({"block_size": 24}, {"Dk": 80}, {"aligned": False}, {"S": 4}, {"S_kv": 64 * 32768 + 1}):
        assert not packed_batches._pays(packed_request(**changes), H200, "cupy-cuda")


@pytest.mark.parametrize("one_row_each", [False, True], ids=["one entry of T rows", "T entries of one"])
@pytest.mark.parametrize("grad", [False, True])
def test_the_predicted_decision_is_taken(monkeypatch: pytest.MonkeyPatch, one_row_each: bool, grad: bool) -> None:
    predicted: list[Request] = []
    pays = packed_batches._pays
    monkeypatch.setattr(packed_batches, "_pays", lambda request, *rest: predicted.append(request) or pays(request, *rest))
    packed = pack(MIXED, n=3)  # 48 keys, and sequences of 32 at most
    if one_row_each:
        packed = packed._replace(selection=Selection(packed.selection.ranges.transpose(0, 1), 16))
    packed.selection.measure()
    q = packed.q.requires_grad_(grad)
    for cu in (packed.cu_q, torch.tensor(packed.cu_q)):
        selection_attention_varlen(q, *packed[1:4], cu, backend="triton-tile")
        assert predicted[-1].request_class() == last_request()
        assert (last_request().sharing is None) == one_row_each
        assert last_request().needs_grad == grad


def test_moved_selections_are_cached_and_copies_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, made = pack((3, 5), (33, 18)), []
    real = packed_batches.begin_with_blocks
    monkeypatch.setattr(packed_batches, "begin_with_blocks", lambda *args: made.append(1) or real(*args))
    call = lambda **options: selection_attention_varlen(*packed[:4], packed.cu_q, packed.cu_k, **options)  # noqa: E731
    first = call(align=True)
    call(align=False)
    packed.v.mul_(2)
    torch.testing.assert_close(call(align=True), 2 * first)
    assert len(made) == 1
    packed.selection.ranges.mul_(1)
    call(align=True)
    assert len(made) == 2


def work(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, cu: Tensor, backend: str | None, align: bool | None) -> Tensor:
    return selection_attention_varlen(q, k, v, Selection(ranges, 16), cu, backend=backend, align=align)


def test_a_compiled_call_copies_too() -> None:
    packed = pack(MIXED, n=2)
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    inputs = [x.detach().requires_grad_() for x in packed[:3]]
    for backend, align, block_size in (("numba", True, 16), ("triton-tile", None, 16), ("numba", None, None)):
        o = compiled(*inputs, packed.selection.ranges, torch.tensor(packed.cu_q), backend, align)
        assert last_request().block_size == block_size
        eager = work(*inputs, packed.selection.ranges, torch.tensor(packed.cu_q), backend, align)
        found, wanted = (torch.autograd.grad(x.square().sum(), inputs) for x in (o, eager))
        for mine, other in zip((o, *found), (eager, *wanted), strict=True):
            assert torch.equal(mine, other)


# Errors


def test_align_without_blocks_is_refused() -> None:
    packed = pack((5, 9), block_size=None)
    with pytest.raises(ArgumentError, match=r"align is True, but the selection has no block_size; allowed: .*whole blocks.*from_blocks"):
        selection_attention_varlen(*packed[:4], packed.cu_q, align=True)
    for align in (None, False):
        selection_attention_varlen(*packed[:4], packed.cu_q, align=align)
    with pytest.raises(ArgumentError, match="align is 'yes'; allowed: True, False or None"):
        selection_attention_varlen(*packed[:4], packed.cu_q, align="yes")  # type: ignore[arg-type]


def test_refusals_come_before_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_batches, "begin_with_blocks", lambda *args: pytest.fail("something was made"))
    packed = pack((5, 9), n=2)
    with pytest.raises(ArgumentError, match=r"v is of dtype torch\.float64; allowed: q's dtype"):
        selection_attention_varlen(*packed[:2], packed.v.double(), packed.selection, packed.cu_q, align=True)
    with pytest.raises(ArgumentError, match="k is of head dimension 8; allowed: q's head dimension 16"):
        selection_attention_varlen(packed.q, packed.k[..., :8], *packed[2:4], packed.cu_q, align=True)
    small = pack((5, 9), n=2, block_size=2)
    with pytest.raises(BackendError, match=r"triton-tile.*\n.*block-multiple"):
        selection_attention_varlen(*small[:4], small.cu_q, backend="triton-tile")
