"""Gathering path of sdpa-packed: bucket rows by length and gather each row's keys. Runs any call on any device, without
GPU syncs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_sel.backends._sdpa import attend
from nsa_sel.backends.launcher.buffers import temporary
from nsa_sel.core.call import Call
from nsa_sel.quantize import Scales

_SMALLEST_BUCKET = 16  # keys
_INDEX_BYTES = 48  # per key: its position, its indices in K and V, and the temporaries that compute them
_SORT_NUMBERS = 16  # per key: elements of index_put_'s sort buffers


class Rows(NamedTuple):
    """Rows of one length bucket, and indices of their keys."""

    ids: Tensor  # [r], (b * S + s) * G + g
    keep: Tensor  # [r,L], False for padding, which repeats the row's first key (key 0 if the row has none)
    filled: Tensor  # [r], whether the row selects anything
    position: Tensor  # [r,L]
    tables: list[Tensor]  # K and V as rows [N,D]
    indices: list[Tensor]  # [r,L], each key's row in each table
    buffers: list[Tensor]  # [rows of a step * L,D]; reused: allocating per step costs a CPU as much as the gather

    def gather(self, step: slice) -> list[Tensor]:
        """Return k [r,L,Dk] and v [r,L,Dv] of some of the rows. The next gather overwrites them."""
        gathered = []
        for table, index, buffer in zip(self.tables, self.indices, self.buffers, strict=True):
            at = index[step]
            out = buffer[: at.numel()]
            gathered.append(torch.index_select(table, 0, at.reshape(-1), out=out).view(*at.shape, -1))
        return gathered


def forward(call: Call, start: Tensor, end: Tensor, o: Tensor, lse: Tensor) -> None:
    """Compute o and lse into the given tensors. Ranges start, end [B,S,G,n] are clamped."""
    h, Dk = call.q.shape[3:]
    q, o, lse = call.q.reshape(-1, h, Dk), o.view(-1, h, o.shape[4]), lse.view(-1, h)
    attended = call.q.dtype if call.scales is None else lse.dtype
    for rows, steps in packed(call, start, end, 3 * h, "forward"):
        q_rows, keep = q[rows.ids].unsqueeze(1).to(attended), rows.keep[:, None, None]
        parts = []
        for step in steps:
            k, v = rows.gather(step)
            if call.scales is not None:
                k, v = dequantized(call, call.scales, rows, step, k, v)
            parts.append(attend.attend(q_rows[step], k.unsqueeze(1), v.unsqueeze(1), keep[step], call.scale))
        o_rows, lse_rows = (torch.cat(part).squeeze(1) for part in zip(*parts, strict=True))
        filled = rows.filled.unsqueeze(1)
        o.index_copy_(0, rows.ids, torch.where(filled.unsqueeze(2), o_rows, 0).to(o.dtype))
        lse.index_copy_(0, rows.ids, torch.where(filled, lse_rows, float("-inf")))


def dequantized(call: Call, scales: Scales, rows: Rows, step: slice, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k [r,L,Dk] and v [r,L,Dv] in float32 from the gathered bytes of some of the rows."""
    wide_k, wide_v = (x.view(call.k.dtype).to(torch.float32) for x in (k, v))
    if scales.k is not None and scales.v is not None:
        page = rows.position[step] // scales.page_keys if scales.page_keys else torch.zeros_like(rows.ids[step]).unsqueeze(1)
        group = (rows.ids[step] % call.q.shape[2]).unsqueeze(1)
        wide_k *= scales.k[page, group].unsqueeze(2)
        wide_v *= scales.v[page, group].unsqueeze(2)
    return wide_k, wide_v


def backward(call: Call, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq in q's dtype, dk and dv in the accumulation dtype. Contributions are added by key after a stable
    sort."""
    B, S, G, h, Dk = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    q, do, lse, delta = call.q.reshape(-1, h, Dk), do.reshape(-1, h, Dv), lse.reshape(-1, h, 1), delta.reshape(-1, h, 1)
    dq = torch.zeros_like(q)  # a row's dq is complete in one step
    # Padding adds to spare rows behind the keys, one per key of a row, so that no single row collects all of it.
    keys = B * G * S_kv
    room = keys + _powers(call.selection.length_bound(S_kv))[-1]
    dk, dv = lse.new_zeros(room, Dk), lse.new_zeros(room, Dv)
    for rows, steps in packed(call, *call.clamped_ranges(), 4 * h + 2 * (Dk + Dv) + _SORT_NUMBERS, "backward"):
        pair = rows.ids // (S * G) * G + rows.ids % G
        spare = keys + torch.arange(rows.keep.shape[1], device=q.device)
        index = torch.where(rows.keep, pair.unsqueeze(1) * S_kv + rows.position, spare)
        for step in steps:
            ids, drop = rows.ids[step], ~rows.keep[step].unsqueeze(1)
            q_rows, do_rows = q[ids].to(lse.dtype), do[ids].to(lse.dtype)
            k, v = (x.to(lse.dtype) for x in rows.gather(step))
            p = torch.exp(call.scale * (q_rows @ k.transpose(1, 2)) - lse[ids]).masked_fill_(drop, 0)
            ds = (do_rows @ v.transpose(1, 2)).sub_(delta[ids]).mul_(p).mul_(call.scale)
            dq.index_copy_(0, ids, torch.where(rows.filled[step, None, None], ds @ k, 0).to(dq.dtype))
            # index_put_ sorts; index_add_ would use atomics on a GPU, in no fixed order.
            at = (index[step].reshape(-1),)
            dk.index_put_(at, (ds.transpose(1, 2) @ q_rows).view(-1, Dk), accumulate=True)
            dv.index_put_(at, (p.transpose(1, 2) @ do_rows).view(-1, Dv), accumulate=True)
    return dq.view(call.q.shape), dk[:keys].view(call.k.shape), dv[:keys].view(call.v.shape)


def packed(call: Call, start: Tensor, end: Tensor, per_key: int, direction: str) -> Iterator[tuple[Rows, list[slice]]]:
    """Yield all rows that may select anything, in chunks, each with the steps in which to gather its keys.

    Half of the budget goes to a chunk's indices, half to a step's keys with `per_key` temporary elements per key.
    Indices are small, so computing them per chunk instead of per step saves a CPU many short calls. A bucket's time
    covers all its chunks.
    """
    S, G = call.q.shape[1:3]
    start, end = rows_of(call, start), rows_of(call, end)
    k, v = (call.k, call.v) if call.scales is None else (call.k.view(torch.uint8), call.v.view(torch.uint8))
    (k_table, k_strides), (v_table, v_strides) = _table(k), _table(v)
    wide = attend.accumulate(call.q.dtype)
    copies = k.element_size() + (wide.itemsize if k.dtype != wide else 0)
    key_bytes = (call.k.shape[3] + call.v.shape[3]) * copies + per_key * wide.itemsize
    half = attend.budget(call) // 2
    steps = [(ids, L, min(max(1, half // (L * key_bytes)), attend.STEP_ROWS, len(ids))) for ids, L in buckets(call, start, end)]
    most = max((step * L for _, L, step in steps), default=0)
    buffers = [temporary(call, table, most, table.shape[1]) for table in (k_table, v_table)]
    for ids_of_bucket, L, step in steps:
        with attend.timed_bucket(call, direction, L, len(ids_of_bucket)):
            for chunk in attend.slices(len(ids_of_bucket), max(step, half // (L * _INDEX_BYTES))):
                ids = ids_of_bucket[chunk]
                row = ids // call.groups_per_selection
                position, keep, filled = positions(start[row], end[row], L)
                b, g = (ids // (S * G)).unsqueeze(1), (ids % G).unsqueeze(1)
                index = {strides: position * strides[2] + (b * strides[0] + g * strides[1]) for strides in {k_strides, v_strides}}
                rows = Rows(ids, keep, filled, position, [k_table, v_table], [index[k_strides], index[v_strides]], buffers)
                yield rows, attend.slices(len(ids), step)


def _table(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return x [B,G,S_kv,D] as a table [N,D] of rows, and the table strides of b, g and position.

    Copies only if strides are not multiples of D.
    """
    D = x.shape[3]
    strides = [stride if size > 1 else 0 for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    if any(stride % D for stride in strides):
        x = x.contiguous()
        strides = list(x.stride()[:3])
    steps = (strides[0] // D, strides[1] // D, strides[2] // D)
    rows = 1 + sum((size - 1) * step for size, step in zip(x.shape[:3], steps, strict=True))
    return x.as_strided((rows, D), (D, 1)), steps


def buckets(call: Call, start: Tensor, end: Tensor) -> list[tuple[Tensor, int]]:
    """Return (ids [r], L) per bucket: each row goes to the next power of two, by its length on a CPU, by a static bound
    on a GPU. start, end: from `rows_of`."""
    if not attend.may_read(call):
        return static_buckets(call)
    total = (end - start).sum(1).repeat_interleave(call.groups_per_selection)
    longest = int(total.max())
    powers = _powers(longest)
    level = torch.bucketize(total, total.new_tensor(powers))
    ids = [((level == i) & (total > 0)).nonzero().squeeze(1) for i in range(len(powers))]
    return [(rows, min(L, longest)) for rows, L in zip(ids, powers, strict=True) if len(rows)]


def rows_of(call: Call, x: Tensor) -> Tensor:
    """Return starts or ends [B,S,G,n] as [rows,n] of the selection, whose rows several groups may share."""
    return x[:, :, :: call.groups_per_selection].reshape(-1, call.selection.n)


def static_buckets(call: Call) -> list[tuple[Tensor, int]]:
    """Return `buckets` from static facts: row s selects at most min(length_bound, t + 1) keys, where t follows from s
    (no q_pos)."""
    B, S, G = call.q.shape[:3]
    S_kv = call.k.shape[2]
    bound = call.selection.length_bound(S_kv)
    device = call.q.device
    sequence = torch.arange(B, device=device).unsqueeze(1) * (S * G)
    result = []
    s0 = 0
    for L in _powers(bound):
        s1 = S if L >= bound else s0 if call.q_pos is not None else min(S, max(s0, L - (S_kv - S)))
        if s1 > s0 and bound > 0:  # bound 0: nothing to gather
            ids = (sequence + torch.arange(s0 * G, s1 * G, device=device)).view(-1)
            result.append((ids, min(L, -(-bound // 16) * 16)))
        s0 = s1
    return result


def _powers(longest: int) -> list[int]:
    powers = [_SMALLEST_BUCKET]
    while powers[-1] < longest:
        powers.append(2 * powers[-1])
    return powers


def positions(start: Tensor, end: Tensor, L: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return position [r,L], keep [r,L], filled [r] of `Rows` from clamped ranges start, end [r,n]."""
    # Clamp to L: a row that breaks its promised max_length loses keys, but nothing is written out of bounds.
    reach = (end - start).cumsum(1).clamp_(max=L)
    before = pad(reach[:, :-1], (1, 0))
    total = reach[:, -1:]
    # The keys of a range are its slots in the row plus a shift. One more range, of padding, makes every row L long.
    shift = pad(start - before, (0, 1))
    repeats = torch.cat((reach - before, L - total), 1)
    slot = torch.arange(L, device=start.device)
    position = torch.repeat_interleave(shift.view(-1), repeats.view(-1), output_size=len(start) * L).view(-1, L) + slot
    keep = slot < total
    return torch.where(keep, position, position[:, :1]), keep, total.squeeze(1) > 0
