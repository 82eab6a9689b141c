"""Packed batches: sequences of mixed lengths laid end to end, their bounds in cu_seqlens, served by one call of `selection_attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from nsa_sel.attention import decide, in_autocast_dtype, select, selection_attention, transformed
from nsa_sel.backends.specs import on_hopper_tiles
from nsa_sel.core import registry
from nsa_sel.core.call import check_call, device_info, request_of
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection, check_dense

Bounds = Tensor | list[int] | tuple[int, ...]  # cu_seqlens as callers give them
_DTYPES = (torch.int32, torch.int64)
_PASSES = 3  # over the keys and values that a copy takes: zeros written, what there is read, and written


def selection_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | Tensor,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    block_aligned: bool = False,
    align: bool | None = None,
) -> Any:
    """`selection_attention` over sequences of mixed lengths that lie end to end; reads no GPU, and copies k and v only as `align` says.

    q: [T,G,h,Dk]; k: [Tk,G,Dk]; v: [Tk,G,Dv]; as there in all else. cu_seqlens_q, cu_seqlens_k: [N+1], int32 or int64, on the CPU or
    on q's device, or as a list of numbers: sequence i has the rows [cu_seqlens_q[i], cu_seqlens_q[i+1]) and the keys
    [cu_seqlens_k[i], cu_seqlens_k[i+1]); without cu_seqlens_k the keys lie as the rows do. Rows stand at the last positions of their
    sequence: the s-th of len_q at len_k - len_q + s; one before the first key sees nothing. Sequences may be empty. Rows and keys
    behind the last sequence are padding: o = 0, lse = -inf, gradients 0. selection: over rows [T,G,n,2], in positions of each row's
    own sequence: a `Selection` of T rows, as `Selection.from_blocks` makes it of [T,G,n], or ranges; nothing of another sequence is
    ever selected.

    Whole blocks stay whole blocks, as some backends need them, where every sequence's first key is a multiple of block_size: seen for
    bounds on the CPU and for a single sequence; block_aligned=True promises it of bounds on a GPU, which only
    NSA_DEBUG_TRITON=1 checks. Where it is neither seen nor promised, k and v may be copied to where each sequence begins with a block, at
    every call: room for Tk + N*(block_size-1) keys, of which the backend's dk and dv are copied back. align=True: they are. False: never;
    blocks then count as ranges. None: on a GPU, where the decision for whole blocks names a backend, forward or backward, that
    takes nothing else or is made for them, and all rows together may select more keys than a copy moves; and on any device where such a
    backend is forced. torch.compile, which decides later, copies for None only where the argument `backend` names one that takes
    nothing else. The selection keeps what is made of it, for the backward pass and for layers that share it; the copy is not kept.

    Returns o [T,G,h,Dv], or (o, lse) with lse [T,G,h]. Raises as `selection_attention` does, and ArgumentError for align=True where the
    selection has no block_size; bounds on a GPU are not checked.
    """
    _check_shapes(q, k, v)
    T, G, Tk = q.shape[0], q.shape[1], k.shape[0]
    if T and not Tk:
        raise ArgumentError("k", f"of no keys for {T} rows", "one key at least", "leave the call out: there is nothing to attend to")
    selection = _of_rows(selection, T, G, q.device)
    bounds_q = _Bounds.of("cu_seqlens_q", cu_seqlens_q, T, q)
    if cu_seqlens_k is None and T != Tk:
        raise ArgumentError("k", f"of {Tk} keys", f"q's {T} rows, without cu_seqlens_k", "pass cu_seqlens_k")
    same = T == Tk and (cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q)
    bounds_k = bounds_q if same or cu_seqlens_k is None else _Bounds.of("cu_seqlens_k", cu_seqlens_k, Tk, q)
    if bounds_k.number != bounds_q.number:
        value = f"of {bounds_k.number} sequences"
        raise ArgumentError("cu_seqlens_k", value, f"cu_seqlens_q's {bounds_q.number} sequences", "pass bounds of the same sequences")
    same = same or (T == Tk and bounds_q.known is not None and bounds_q.known == bounds_k.known)
    block = selection.block_size
    _check_align(align, block)
    whole = _starts_with_blocks(bounds_k, block, block_aligned)
    rows = _in_one_row(selection, Tk)
    q, k, v = q.unsqueeze(0), k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
    room, longest, aligning = Tk, bounds_k.longest(Tk), False
    if block is not None and not whole and align is not False:
        room = _whole_blocks(Tk + bounds_k.number * (block - 1), block)
        if torch.compiler.is_compiling():
            aligning = align is True or (backend is not None and _takes_blocks_alone(backend))
        else:
            q, k, v = in_autocast_dtype(q, k, v)  # first: fewer bytes to copy, and the dtype that is decided on
            check_call(q, k, v, rows, scale, q.new_empty(T, dtype=torch.int64), fake=True)  # before a copy meets what is no input
            aligning = _aligns(q, k, v, rows, room, _whole_blocks(longest, block), backend, align)
        room = room if aligning else Tk
    most = room  # keys of a row; a block that stays whole counts as one where its sequence ends within
    if block is not None and (whole or aligning):
        most, longest = _whole_blocks(room, block), _whole_blocks(longest, block)

    def build() -> tuple[Selection, Tensor | None, Tensor | None]:
        cu_q = bounds_q.on(q)
        cu_k = cu_q if bounds_k is bounds_q else bounds_k.on(q)
        begin, place = _begin_with_blocks(cu_k, Tk, block, room) if block and aligning else (cu_k, None)
        first, limit = _places(cu_q, cu_k, T, begin, room)
        moved = rows.shifted(first, limit, most, whole_blocks=whole or aligning, max_length=longest)
        if same and not aligning:
            return moved, None, None  # row s at key s, as without q_pos
        return moved, (first + limit - 1).clamp(0, room - 1), place

    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        moved, q_pos, place = build()  # what runs again must follow what was written since
    else:
        facts = Tk, whole, same, selection.sharing, selection.length_bound(Tk)
        moved, q_pos, place = selection.plan(("varlen", q.device, aligning), build, *facts, *bounds_q, *bounds_k)
    if place is not None:
        k, v = (x.new_zeros(*x.shape[:2], room, x.shape[3]).index_copy(2, place, x) for x in (k, v))
    found = selection_attention(q, k, v, moved, scale=scale, q_pos=q_pos, return_lse=return_lse, backend=backend)
    return (found[0].squeeze(0), found[1].squeeze(0)) if return_lse else found.squeeze(0)


def varlen_positions(cu_seqlens_q: Bounds, cu_seqlens_k: Bounds | None = None, *, T: int, device: torch.device | str = "cpu") -> Tensor:
    """[T] int64: where in its own sequence each of T rows stands, as `Selection.from_scores(..., q_pos=)` takes it; -1, which selects
    nothing, for rows behind the last sequence and before their first key. Reads no GPU."""
    like = torch.empty(0, device=device)
    bounds_q = _Bounds.of("cu_seqlens_q", cu_seqlens_q, T, like)
    bounds_k = bounds_q if cu_seqlens_k is None else _Bounds.of("cu_seqlens_k", cu_seqlens_k, None, like)
    cu_q, cu_k = bounds_q.on(like), bounds_k.on(like)
    return _places(cu_q, cu_k, T, cu_k, 0)[1].squeeze(0) - 1


class _Bounds(NamedTuple):
    """Checked cu_seqlens: their numbers where the host may look at them, else the tensor."""

    known: tuple[int, ...] | None
    tensor: Tensor | None

    @classmethod
    def of(cls, name: str, bounds: Bounds, total: int | None, like: Tensor) -> _Bounds:
        """Of the argument `name` over `total` rows or keys (None: as many as it says), for tensors on like's device."""
        if isinstance(bounds, Tensor):
            check_dense(name, bounds)
            if bounds.dtype not in _DTYPES or bounds.dim() != 1:
                value = f"{bounds.dtype} of shape {tuple(bounds.shape)}"
                raise ArgumentError(name, value, "torch.int32 or torch.int64 [N+1]", "pass cumulative lengths, from 0 on")
            if bounds.device != like.device and not bounds.is_cpu:
                raise ArgumentError(name, f"on {bounds.device}", f"q's device {like.device} or cpu", f"call {name}.to(q.device)")
            if bounds.numel() < 2:
                raise ArgumentError(name, f"of {bounds.numel()} entries", "N + 1 of them for N >= 1 sequences", "pass [0, T] for one")
            if not _is_free_to_read(bounds):
                return cls(None, bounds)
            numbers = tuple(bounds.tolist())
        elif isinstance(bounds, list | tuple) and len(bounds) > 1 and all(type(bound) is int for bound in bounds):
            numbers = tuple(bounds)
        else:
            value = shown(bounds) if isinstance(bounds, list | tuple) else f"a {type(bounds).__name__}"
            raise ArgumentError(name, value, "a tensor [N+1], or a list of N + 1 ints, N >= 1", "pass cumulative lengths, from 0 on")
        falls = [i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1]]
        if numbers[0] != 0 or falls:
            value = f"{numbers[0]} first" if numbers[0] else f"{numbers[falls[0] - 1]}, then {numbers[falls[0]]} at {falls[0]}"
            raise ArgumentError(name, value, "0 first, and numbers that never fall", "pass cumulative lengths, from 0 on")
        if total is not None and numbers[-1] > total:
            of = "q's rows" if name == "cu_seqlens_q" else "the keys"
            raise ArgumentError(name, f"{numbers[-1]} last", f"at most {total}, the number of {of}", "pass the bounds of this batch")
        return cls(numbers, None)

    @property
    def number(self) -> int:
        """N, of sequences."""
        return (len(self.known) if self.known is not None else self.tensor.numel()) - 1  # type: ignore[union-attr]

    def on(self, like: Tensor) -> Tensor:
        """[N+1] int64 on like's device, without waiting for it."""
        tensor = torch.tensor(self.known, device="cpu") if self.tensor is None else self.tensor
        return tensor.to(like.device, torch.int64, non_blocking=True)

    def longest(self, total: int) -> int:
        """A bound on the keys of a sequence; rounded up to a power of two, so that batches share decisions."""
        if self.known is None:
            return total
        most = max(end - start for start, end in zip(self.known, self.known[1:], strict=False))
        return min(total, 1 << max(0, most - 1).bit_length())


def _is_free_to_read(bounds: Tensor) -> bool:
    """Whether the host may look at the numbers: on a CPU, and not while torch.compile traces."""
    return bounds.is_cpu and not torch.compiler.is_compiling()


def _whole_blocks(keys: int, block: int) -> int:
    """So many keys, rounded up."""
    return -(-keys // block) * block


def _places(cu_q: Tensor, cu_k: Tensor, T: int, begin: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """first, limit [1,T] int64: the first key of each row's sequence, and how many of that sequence's keys the row may see.

    begin [N or N+1]: where the keys of each sequence begin, of `room` places. Padding rows get first = room and limit = 0. Bounds that
    are no bounds give keys that do not exist, which no backend reads.
    """
    row = torch.arange(T, device=cu_q.device)
    after = torch.searchsorted(cu_q, row, right=True)  # the sequence behind the row's own: empty ones are passed over
    padding = after == len(cu_q)
    after = after.clamp(1, len(cu_q) - 1)
    limit = (cu_k[after] - cu_k[after - 1] - (cu_q[after] - row) + 1).clamp(min=0).masked_fill(padding, 0)
    return begin[after - 1].masked_fill(padding, room).unsqueeze(0), limit.unsqueeze(0)


def _begin_with_blocks(cu_k: Tensor, Tk: int, block: int, room: int) -> tuple[Tensor, Tensor]:
    """begin [N+1], place [Tk] int64: where each sequence begins once all begin with blocks, what lies behind the last as one more; and
    where each key goes. Bounds that are no bounds give places within the room too."""
    begin = torch.nn.functional.pad((-(-cu_k.diff() // block) * block).cumsum(0), (1, 0)).clamp(0, room)
    key = torch.arange(Tk, device=cu_k.device)
    own = torch.searchsorted(cu_k, key, right=True).clamp(min=1) - 1
    return begin, (begin[own] + key - cu_k[own]).clamp(0, room - 1)


def _aligns(q: Tensor, k: Tensor, v: Tensor, rows: Selection, room: int, longest: int, backend: str | None, align: bool | None) -> bool:
    """Whether k and v are to be copied, so that whole blocks stay such; BackendError where the call after the copy is refused."""
    if transformed():
        return False  # the call says why it can't be served
    copy_k, copy_v = (torch.empty(*x.shape[:2], room, x.shape[3], dtype=x.dtype, device="meta") for x in (k, v))
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    request = request_of(q, copy_k, copy_v, rows, needs_grad)
    request, device = msgspec.structs.replace(request, max_length=min(request.max_length, longest)), device_info(q.device)
    if align is None:
        align = _pays(request, device, backend)
    if align:
        decide(request, device, backend)
    return align


def _pays(request: Request, device: DeviceInfo, backend: str | None) -> bool:
    """Whether to copy for a call of this request, which is the one after the copy: what runs it is for blocks, and a copy that nobody
    forces moves no more keys than all rows may select, which a backend of ranges reads at most."""
    decision = select(request, device, backend)
    if decision.override is not None:
        return _is_for_blocks(decision.override.backend, request, device)
    if device.kind == "cpu" or request.S * request.max_length < _PASSES * request.S_kv:
        return False
    return any(name is not None and _is_for_blocks(name, request, device) for name in (decision.forward, decision.backward))


def _is_for_blocks(name: str, request: Request, device: DeviceInfo) -> bool:
    """Whether this backend takes whole blocks alone, or is cupy-cuda where its kernels for Hopper take such a call."""
    on_tiles = on_hopper_tiles(request.S, request.S_kv, request.h, request.Dk, request.Dv, request.block_size)
    return _takes_blocks_alone(name) or (name == "cupy-cuda" and device.sm == 90 and request.aligned and on_tiles)


def _takes_blocks_alone(name: str) -> bool:
    return name in registry.backends() and registry.backends()[name].limits.block_aligned_only


# What torch.compiler.assume_constant_result does, which would import torch._dynamo, and Triton with it: 2 s, where nobody compiles.
_takes_blocks_alone._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _starts_with_blocks(bounds: _Bounds, block_size: int | None, promised: bool) -> bool:
    """Whether every sequence that has keys begins at a multiple of block_size, as far as the host sees or was promised."""
    if block_size is None or bounds.known is None:
        return block_size is not None and (promised or bounds.number == 1)
    odd = [start for start, end in zip(bounds.known, bounds.known[1:], strict=False) if end > start and start % block_size]
    if odd and promised:
        raise ArgumentError(
            "block_aligned", f"True, but a sequence's first key is {odd[0]}", f"multiples of block_size = {block_size}",
            "pad sequences to whole blocks, or leave block_aligned out",
        )  # fmt: skip
    return not odd


def _check_align(align: object, block_size: int | None) -> None:
    if align is not None and not isinstance(align, bool):
        raise ArgumentError("align", shown(align), "True, False or None", "leave it out: k and v are copied where it pays")
    if align and block_size is None:
        remedy = "build it with Selection.from_blocks, or leave align out: ranges are served where they lie"
        raise ArgumentError("align", "True, but the selection has no block_size", "a selection of whole blocks", remedy)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(name, f"a {type(x).__name__}", "a torch.Tensor", "wrap it in torch.as_tensor")
        check_dense(name, x)
    if q.dim() != 4:
        raise ArgumentError("q", f"of shape {tuple(q.shape)}", "[T,G,h,Dk]", "a q [T,heads,Dk] is passed as q.unflatten(1, (G, h))")
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[1] != q.shape[1] or x.shape[0] != k.shape[0]:
            keys = "Tk" if name == "k" else f"Tk={k.shape[0]}"
            raise ArgumentError(name, f"of shape {tuple(x.shape)}", f"[{keys}, G={q.shape[1]}, D]", "give each place one a KV group")


def _of_rows(selection: Selection | Tensor, T: int, G: int, device: torch.device) -> Selection:
    """The selection, checked to be over T rows and G groups: [1,T,G,n,2], or [T,1,G,n,2] as [T,G,n,2] is kept."""
    if isinstance(selection, Tensor):
        selection = Selection.from_ranges(selection)
    if not isinstance(selection, Selection):
        remedy = "make one with Selection.from_ranges, from_blocks or from_scores"
        raise ArgumentError("selection", f"a {type(selection).__name__}", "a Selection or a tensor of ranges [T,G,n,2]", remedy)
    shape = selection.ranges.shape
    if shape[:3] not in ((1, T, G), (T, 1, G)):
        raise ArgumentError(
            "selection", f"over rows {tuple(shape[:3])}", f"[T,G] = {(T, G)}, with a dimension of 1 before or between",
            "one set of ranges a row of q and group",
        )  # fmt: skip
    if selection.ranges.device != device:
        raise ArgumentError("selection", f"on {selection.ranges.device}", f"q's device {device}", "call selection.to(q.device)")
    return selection


def _in_one_row(selection: Selection, Tk: int) -> Selection:
    """The selection as [1,T,G,n,2]. As T sequences of one row, what was measured of neighbours says nothing of these rows."""
    if selection.ranges.shape[0] == 1:
        return selection
    bound = selection.length_bound(Tk)
    return Selection(selection.ranges.transpose(0, 1), selection.block_size, bound, disjoint=selection.disjoint)
