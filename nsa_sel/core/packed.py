"""Packed batches: concatenated sequences of mixed lengths, as one call over all rows and keys."""

from __future__ import annotations

import importlib
import itertools
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from nsa_sel.core import attend, registry, shared_keys
from nsa_sel.core.arguments import (
    Bounds,
    CuSeqlens,
    as_positions,
    begin_with_blocks,
    check_tensors,
    positions_in_sequences,
    rounded_up,
    row_positions,
    starts_with_blocks,
)
from nsa_sel.core.call import Pool, Rule, device_info, request_of
from nsa_sel.core.check import Index, as_selection, check_call, check_index, check_rule, check_scale, check_sizes
from nsa_sel.core.decide import decide, select
from nsa_sel.core.request import FEW_TOKENS, DeviceInfo, Request
from nsa_sel.core.shared_keys import ratio
from nsa_sel.core.transforms import check_transforms, in_autocast_dtype, needs_grad, traces, transformed
from nsa_sel.errors import ArgumentError, renamed, shown
from nsa_sel.selection import Selection

_PASSES = 3  # over K and V that a copy makes: write zeros, read, write


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens | None, *,
    scale: float | None, return_lse: bool, backend: str | None, block_aligned: bool, align: bool | None,
) -> Any:  # fmt: skip
    """Run `selection_attention_varlen`, for it and for compat."""
    check_packed_sizes(sharing=True, q=q, k=k, v=v)
    T, G, Tk = q.shape[0], q.shape[1], k.shape[0]
    if T and not Tk:
        raise ArgumentError("k", f"of no keys for {T} rows", "at least one key", "skip the call: there is nothing to attend to")
    if isinstance(selection, Tensor):
        selection = Selection.from_ranges(selection)
    selection = as_selection(selection)
    rows = tuple(selection.ranges.shape[:3])  # [T,1,G] if made from ranges [T,G,n,2]
    if rows not in ((1, T, G), (T, 1, G), (1, T, 1), (T, 1, 1)):
        raise ArgumentError(
            "selection",
            f"over rows {rows}",
            f"[T,G] = {(T, G)}, or [T,1] for all groups, with a dimension of 1 before or between",
            "one set of ranges per query row and group, or per query row",
        )
    if selection.ranges.device != q.device:
        raise ArgumentError("selection", f"on {selection.ranges.device}", f"q's device {q.device}", "call selection.to(q.device)")
    bounds_q = Bounds.of("cu_seqlens_q", cu_seqlens_q, T, q)
    if cu_seqlens_k is None and T != Tk:
        raise ArgumentError("k", f"of {Tk} keys", f"q's {T} rows, without cu_seqlens_k", "pass cu_seqlens_k")
    same = T == Tk and (cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q)
    bounds_k = bounds_q if same or cu_seqlens_k is None else Bounds.of("cu_seqlens_k", cu_seqlens_k, Tk, q)
    bounds_q.check_sequences(bounds_k)
    same = same or (T == Tk and bounds_q.numbers is not None and bounds_q.numbers == bounds_k.numbers)
    if align is not None and not isinstance(align, bool):
        raise ArgumentError("align", shown(align), "True, False or None", "leave it out to copy k and v where it pays")
    if align and selection.block_size is None:
        raise ArgumentError(
            "align",
            "True, but the selection has no block_size",
            "a selection of whole blocks",
            "build it with Selection.from_blocks, or leave out align: ranges need no copy",
        )
    q, k, v = as_batch(q, k, v)
    if not torch.compiler.is_compiling():
        q, k, v = in_autocast_dtype(q, k, v)  # before copying and deciding
    batch = arrange(q, k, v, selection, bounds_q, None if same else bounds_k, scale, needs_grad(q, k, v), backend, block_aligned, align)
    results = attend.selection_attention(
        q, batch.k, batch.v, batch.selection, scale=scale, q_pos=batch.q_pos, return_lse=return_lse, backend=backend
    )  # fmt: skip
    return (results[0].squeeze(0), results[1].squeeze(0)) if return_lse else results.squeeze(0)


KERNELS = "nsa_sel.backends._triton.packed_rows"  # imported with the first packed batch over caches on a GPU
MOST_JOINED = 1 << 18  # keys of a joined sequence: their number bounds the lists that are sorted


def rows_of(cu_seqlens_q: Tensor, cache_seqlens: Tensor, T: int, S_kv: int, unit: int, stored: bool = False) -> Tensor:
    """Return what each of T rows of a packed batch over caches reads, [T+1,4] int32, without waiting for a GPU.

    Its columns are, for row i: how many keys of its request it sees (0 in padding), and that request. Then where the
    request begins in a sequence that joins those of more than FEW_TOKENS rows, at a multiple of `unit` keys; -1 for a
    request of fewer rows, and one that does not fit `joined_keys`. And the i-th row of the latter; their number is in row
    T.

    Args:
        cu_seqlens_q: [R+1] int32, contiguous, the bounds of the requests' rows.
        cache_seqlens: [R], their keys, those of the rows included.
        T, S_kv: rows, and the most keys of a request.
        unit: a multiple of the keys of a page and of a block.
        stored: whether keys are quantized.
    """
    device, room = cu_seqlens_q.device, joined_keys(T, len(cache_seqlens), S_kv, unit, stored)
    if device.type == "cuda":
        rows = torch.empty(T + 1, 4, dtype=torch.int32, device=device)
        with torch.cuda.device(device):
            importlib.import_module(KERNELS).packed_rows(cu_seqlens_q, cache_seqlens, rows, S_kv, unit, room, FEW_TOKENS)
        return rows
    row, ends, lengths = torch.arange(T, device=device), cu_seqlens_q[1:].long(), cache_seqlens.long()
    needed = torch.where(cu_seqlens_q.diff() > FEW_TOKENS, -(lengths.clamp(0, S_kv) // -unit) * unit, 0)
    stop = needed.cumsum(0)
    begin = torch.where((cu_seqlens_q.diff() > FEW_TOKENS) & (stop <= room), stop - needed, -1)
    request = torch.searchsorted(ends, row, right=True)
    padding = request == len(ends)
    request = request.masked_fill(padding, 0)
    keys = (lengths[request] - ends[request] + row + 1).clamp(0, S_kv).masked_fill(padding, 0)
    begin = begin[request].masked_fill(padding, -1)
    rows = torch.zeros(T + 1, 4, dtype=torch.int32, device=device)
    rows[:T, :3] = torch.stack((keys, request, begin), 1)
    listed = row[begin < 0]
    rows[: len(listed), 3], rows[T, 3] = listed.int(), len(listed)
    return rows


def joined_keys(T: int, R: int, S_kv: int, unit: int, stored: bool) -> int:
    """Return how many keys a sequence has that joins requests of more than FEW_TOKENS rows, at most MOST_JOINED; half as
    many if they are quantized, because they are copied."""
    requests = min(R, T // (FEW_TOKENS + 1))
    return min(requests * -(-S_kv // unit), (MOST_JOINED >> stored) // unit) * unit


class Batch(NamedTuple):
    """A packed batch as one sequence."""

    k: Tensor  # [1,G,keys,Dk], as given, or a copy in which sequences begin with blocks
    v: Tensor
    selection: Selection  # [1,T,G,n,2] of the keys of all sequences
    q_pos: Tensor | None  # [1,T]
    where: Tensor | None  # [Tk], the key of a copy that each key is


def arrange(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, bounds_q: Bounds, bounds_k: Bounds | None, scale: float | None, needs: bool,
    backend: str | None, block_aligned: bool = False, align: bool | None = None,
) -> Batch:  # fmt: skip
    """Return a packed batch, q [1,T,G,h,Dk] and k, v [1,G,Tk,D], as one sequence.

    Args:
        selection: over [1,T,G] or [T,1,G], in positions of each row's own sequence.
        bounds_q: of the rows.
        bounds_k: of the keys; None: row s is at key s.
        needs: whether the call needs gradients.
        scale, backend, block_aligned, align: as of `selection_attention_varlen`.
    """
    T, Tk, block = q.shape[1], k.shape[2], selection.block_size
    rows = selection
    if selection.ranges.shape[0] != 1:  # without the statistics of [T,1,G,n,2], which say nothing about adjacent rows
        bound = selection.length_bound(Tk)
        rows = Selection(selection.ranges.transpose(0, 1), selection.block_size, bound, disjoint=selection.disjoint)
    same, bounds_k = bounds_k is None, bounds_q if bounds_k is None else bounds_k
    whole = starts_with_blocks(bounds_k, block, block_aligned)
    room, longest, aligning = Tk, bounds_k.longest(Tk), False
    if block is not None and not whole and align is not False:
        room = rounded_up(Tk + bounds_k.number() * (block - 1), block)
        if torch.compiler.is_compiling():
            aligning = align is True or (backend is not None and _needs_blocks(backend))
        else:
            r = shared_keys.ratio_of(q, k, rows)
            one, of_one = (q, rows) if r == 1 else shared_keys.one_of(q, rows, r)
            check_call(one, k, v, of_one, scale, q.new_empty(T, dtype=torch.int64), fake=True)  # before the copy
            aligning = _aligns(one, k, v, of_one, room, rounded_up(longest, block), needs, backend, align)
        room = room if aligning else Tk
    limit_keys = room  # most keys of a row; a block counts as whole even if its sequence ends within it
    if block is not None and (whole or aligning):
        limit_keys, longest = rounded_up(room, block), rounded_up(longest, block)

    def build() -> tuple[Selection, Tensor | None, Tensor | None]:
        cu_q = bounds_q.on(q)
        cu_k = cu_q if bounds_k is bounds_q else bounds_k.on(q)
        begin, index = begin_with_blocks(cu_k, Tk, block, room) if block and aligning else (cu_k, None)
        first, limit = positions_in_sequences(cu_q, cu_k, T, begin, room)
        moved = rows.shifted(first, limit, limit_keys, whole_blocks=whole or aligning, max_length=longest)
        if same and not aligning:
            return moved, None, None  # row s is at key s, the default
        return moved, (first + limit - 1).clamp(0, room - 1), index

    if torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        moved, q_pos, index = build()  # a replay must follow writes into the bounds
    else:
        facts = Tk, whole, same, selection.exact(), selection.length_bound(Tk)
        moved, q_pos, index = selection.plan(("varlen", q.device, aligning), build, *facts, *bounds_q, *bounds_k)
    if index is not None:
        k, v = (x.new_zeros(*x.shape[:2], room, x.shape[3]).index_copy(2, index, x) for x in (k, v))
    return Batch(k, v, moved, q_pos, index)


def _aligns(
    q: Tensor, k: Tensor, v: Tensor, rows: Selection, room: int, longest: int, needs: bool, backend: str | None, align: bool | None
) -> bool:  # fmt: skip
    """Return True if k and v are copied so that blocks stay whole; BackendError if the call after the copy is refused."""
    if transformed():
        return False  # the call itself raises
    copy_k, copy_v = (torch.empty(*x.shape[:2], room, x.shape[3], dtype=x.dtype, device="meta") for x in (k, v))
    request = request_of(q, copy_k, copy_v, rows, needs)
    request, device = msgspec.structs.replace(request, max_length=min(request.max_length, longest)), device_info(q.device)
    if align is None:
        align = _pays(request, device, backend)
    if align:
        decide(request, device, backend)
    return align


def _pays(request: Request, device: DeviceInfo, backend: str | None) -> bool:
    """Return True if a copy pays off. `request` is that of the call after the copy.

    It does if that call runs on a backend that prefers blocks, and the copy moves no more keys than all rows may
    select, or the backend is forced.
    """
    decision = select(request, device, backend)
    names = [decision.forward, decision.backward]
    if decision.override is not None:
        names = [decision.override.backend]
    elif device.kind == "cpu" or request.S * request.max_length < _PASSES * request.S_kv:
        return False
    backends = registry.backends()
    return any(name in backends and backends[name].prefers_blocks(request, device) for name in names)


def _needs_blocks(name: str) -> bool:
    return name in registry.backends() and registry.backends()[name].limits.block_aligned_only


# As torch.compiler.assume_constant_result does, which would import torch._dynamo and Triton: 2 s.
_needs_blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_packed_sizes(*, sharing: bool = False, **tensors: Tensor) -> None:
    """Raise ArgumentError unless the first tensor is a q [T,G,h,Dk], and the others are keys or values [Tk,G,D] of one
    Tk.

    With `sharing` they may have fewer groups (core/shared_keys.py).
    """
    check_tensors(**tensors)
    (query, q), *rest = tensors.items()
    if q.dim() != 4:
        raise ArgumentError(
            query,
            f"of shape {tuple(q.shape)}",
            "[T,G,h,Dk]",
            f"a q [T,heads,Dk] is passed as {query}.unflatten(1, (G, h)), a q [1,T,G,h,Dk] as {query}.squeeze(0)",
        )
    first, k = rest[0]
    groups = q.shape[1] // ratio(q.shape[1], k.shape[1]) if sharing and k.dim() == 3 else q.shape[1]
    for name, x in rest:
        if x.dim() != 3 or x.shape[1] != groups or x.shape[0] != k.shape[0]:
            keys = "Tk" if name == first else f"Tk={k.shape[0]}"
            raise ArgumentError(name, f"of shape {tuple(x.shape)}", f"[{keys}, G={groups}, D]", "pass one key per position and KV group")


def check_packed_keys(name: str, x: Tensor) -> None:
    """Raise ArgumentError unless x is [T,G,D]."""
    check_tensors(**{name: x})
    if x.dim() != 3:
        raise ArgumentError(name, f"of shape {tuple(x.shape)}", "[T,G,D] with cu_seqlens", f"pass {name}.squeeze(0) of a [1,T,G,D]")


def check_longest(max_seqlen: int | None, cu_seqlens: CuSeqlens | None) -> None:
    """Raise ArgumentError for a max_seqlen that is no length, or that comes without bounds. `Bounds.of` compares it
    with them."""
    if max_seqlen is None:
        return
    if cu_seqlens is None:
        raise ArgumentError("max_seqlen", shown(max_seqlen), "None without cu_seqlens", "pass the bounds of the sequences, too")
    if not isinstance(max_seqlen, int) or isinstance(max_seqlen, bool) or not 0 <= max_seqlen < 1 << 31:
        raise ArgumentError(
            "max_seqlen",
            shown(max_seqlen),
            "a whole number >= 0 and < 2^31, as an int",
            "pass the rows of the longest sequence, or more, as the host knows them",
        )


def checked_hidden(
    name: str, x: Tensor, width: int, cu_seqlens: CuSeqlens | None, max_seqlen: int | None, sliced: bool
) -> tuple[Tensor, Bounds | None]:
    """Return a layer's checked hidden states x [B,S,width], and the bounds of a packed batch, or None. x is 0 in padding:
    NaN there would reach the gradients of the weights.

    name: of the layer's class; sliced: whether ranks hold slices of the sequences.
    """
    check_tensors(x=x)
    check_transforms(x, name=name)
    check_longest(max_seqlen, cu_seqlens)
    if x.dim() != 3 or x.shape[2] != width:
        remedy = f"a batch of one is x.unsqueeze(0); for another width make {name}(width, ...)"
        raise ArgumentError("x", f"of shape {tuple(x.shape)}", f"[B,S,width = {width}]", remedy)
    if not (x.is_cpu or x.is_cuda) or not x.is_floating_point():
        raise ArgumentError("x", f"{x.dtype} on {x.device}", "a floating dtype on cpu or cuda", "move or cast it as the parameters")
    if cu_seqlens is None:
        return x, None
    if len(x) != 1:
        remedy = "pass the tokens of all sequences in a row: x.flatten(0, 1).unsqueeze(0)"
        raise ArgumentError("x", f"of B = {len(x)} with cu_seqlens", "[1,T,width]", remedy)
    if sliced:
        raise ArgumentError("cu_seqlens", "given with context parallelism", "None there", "pass whole sequences, or one GPU's batch")
    bounds = Bounds.of("cu_seqlens", cu_seqlens, x.shape[1], x, max_seqlen)
    return bounds.zero_padding(x[0]).unsqueeze(0), bounds


def hidden_positions(x: Tensor, positions: Tensor | None, bounds: Bounds | None, context: Any) -> Tensor:
    """Return the positions of the rows of a layer's x [B,S,width]: those given, checked, or those in the sequences.

    context: of ranks that hold slices (nsa_sel/distributed/layer.py), or None.
    """
    (B, S), device = x.shape[:2], x.device
    if positions is not None:
        try:
            as_positions(positions, B, S, device)
        except ArgumentError as error:
            raise renamed(error, q_pos="positions") from None
        return positions
    if bounds is not None:
        return row_positions(bounds.on(x), S)[0].clamp(min=0)
    return torch.arange(S, device=device) if context is None else context.positions(S, device)  # type: ignore[no-any-return]


def as_batch(q: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    """Return q [1,T,G,h,Dk] and keys or values [1,G,Tk,D], views of packed ones."""
    return q.unsqueeze(0), *(x.transpose(0, 1).unsqueeze(0) for x in keys)


def check_packed_choose(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rule: Rule, scale: float | None, q_pos: Tensor | None, S_kv: int | None, cu_seqlens: CuSeqlens,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, float, Bounds]:  # fmt: skip
    """Return q [1,T,G,h,Dk], k_cmp and v_cmp [1,G,C,D], the scale, and the bounds. Never reads a GPU or fake tensors.

    Raises:
        ArgumentError: the first bad argument.
    """
    check_rule(rule)
    for name, value in (("q_pos", q_pos), ("S_kv", S_kv)):
        if value is not None:
            raise ArgumentError(
                name,
                "given together with cu_seqlens",
                "one of them",
                "leave it out: with cu_seqlens, rows are all positions of their sequence",
            )
    check_packed_sizes(q=q, k_cmp=k_cmp, v_cmp=v_cmp)
    bounds = Bounds.of("cu_seqlens", cu_seqlens, len(q), q, max_seqlen)
    rows, k, v = as_batch(q, k_cmp, v_cmp)
    try:
        check_sizes(rows, k, v)
    except ArgumentError as error:
        raise renamed(error, k="k_cmp", v="v_cmp") from None
    C, most, least = len(k_cmp), rule.compressed_keys(len(q)), 0
    if bounds.numbers is not None:
        least = sum(rule.compressed_keys(end - begin) for begin, end in itertools.pairwise(bounds.numbers))
    if not least <= C <= most:
        block, stride = rule.compress_block, rule.compress_stride
        raise ArgumentError(
            "k_cmp",
            f"of {C} compressed keys",
            f"{least} to {most} for T = {len(q)} and blocks of {block} keys every {stride}",
            "compress each sequence apart, as nsa_sel.compression does; compressed_cu_seqlens says where each begins",
        )
    return rows, k, v, check_scale(scale, q.shape[3]), bounds


def check_packed_index(
    q: Tensor, k: Tensor, rule: Rule, pool: Pool, tail: bool, scale: float | None, cu_seqlens: CuSeqlens, max_seqlen: int | None,
    **others: Tensor | int | None,
) -> tuple[Index, Bounds]:  # fmt: skip
    """Return the arguments of `choose_blocks` of a packed batch, q [T,G,h,Dk] and k [T,G,Dk] or [T,1,Dk], and the bounds.

    Raises:
        ArgumentError: the first bad argument; any of `others` that is not None.
    """
    check_rule(rule)
    for name, value in {**others, "tail": tail or None}.items():
        if value is not None:
            raise ArgumentError(name, "given together with cu_seqlens", "one of them", "leave it out, or call it for each sequence")
    if rule.compress_block != 1:
        remedy = "pass an index key per key, or call it for each sequence"
        raise ArgumentError("compress_block", rule.compress_block, "1 with cu_seqlens", remedy)
    if k.dim() == 3 and q.dim() == 4 and k.shape[1] == 1:
        k = k.expand(-1, q.shape[1], -1)
    check_packed_sizes(q=q, k=k)
    check_rows_are_keys(q, "k", k)
    bounds = Bounds.of("cu_seqlens", cu_seqlens, len(q), q, max_seqlen)
    rows, keys = as_batch(q, k)
    return check_index(rows, keys, rule, pool, None, scale, None, None, traces(q, k)), bounds


def check_rows_are_keys(q: Tensor, name: str, k: Tensor) -> None:
    """Raise ArgumentError unless packed q and k have as many rows as keys."""
    if len(q) != len(k):
        raise ArgumentError(name, f"of {len(k)} keys", f"q's {len(q)} rows", "with cu_seqlens, pass the keys of all rows and no others")
