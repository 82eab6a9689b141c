"""Key-tile path of sdpa-packed, on a CPU: each tile of keys attends to all rows that selected any of its keys. Gathers
rows, not keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends._sdpa import attend
from nsa_sel.core.call import Call

# Largest ratio of loaded to selected keys at which this beats gathering: at 1.04 it takes 134 ms against 169 ms, at 1.5
# 192 ms against 162 ms (S 2048, h 1 and 4, D 64).
_WASTE = 1.3
_LEAST_ROWS = 16  # average rows per tile below which gathering is faster

Lists = list[Sequence[Tensor]]  # rows of each tile of keys, ascending, for each (b, g)


class Step(NamedTuple):
    """Rows of one sequence and group that selected all keys [lo, hi) of a tile (keep is None) or some of them."""

    lo: int
    hi: int
    ids: Tensor  # [r], indices s of the rows
    keep: Tensor | None  # [r,hi - lo]


def pays(call: Call, start: Tensor, end: Tensor) -> bool:
    """Return whether this path is cheaper: tiles have enough rows and few keys that these did not select, and all keys
    are finite."""
    if not attend.may_read(call) or call.scales is not None or call.q.shape[1] < _LEAST_ROWS:
        return False
    lists = list(itertools.chain.from_iterable(rows_by_tile(call, start, end)))
    pairs, tiles = sum(map(len, lists)), sum(len(rows) > 0 for rows in lists)
    if pairs < _LEAST_ROWS * tiles or pairs * _width(call) > _WASTE * int((end - start).sum()):
        return False
    return attend.all_finite(call, 0, call.k.shape[2])


def keys_loaded(call: Call, start: Tensor, end: Tensor) -> int:
    """Return the number of keys in all tiles that any row selects from."""
    width, S_kv = _width(call), call.k.shape[2]
    lists = rows_by_tile(call, start, end)
    return sum(min(width, S_kv - tile * width) for tiles in lists for tile, rows in enumerate(tiles) if len(rows))


def forward(call: Call, start: Tensor, end: Tensor, o: Tensor, lse: Tensor) -> None:
    """Compute o and lse into the given tensors: SDPA of each tile of keys with its rows, merged by lse."""
    _, S, _, h, Dk = call.q.shape
    for (b, g), steps in _steps_by_pair(call, start, end, "forward"):
        q = call.q[b, :, g].to(lse.dtype).reshape(S, -1).contiguous()
        k, v = call.k[b, g].to(lse.dtype), call.v[b, g].to(lse.dtype)
        o_sum, lse_sum = lse.new_zeros(S, h, v.shape[1]), lse.new_full((S, h), float("-inf"))
        for lo, hi, ids, keep in steps:
            q_rows = q.index_select(0, ids).view(1, 1, -1, Dk)
            mask = None if keep is None else keep.repeat_interleave(h, 0)[None, None]
            o_part, lse_part = attend.attend(q_rows, k[None, None, lo:hi], v[None, None, lo:hi], mask, call.scale)
            lse_part, before = lse_part.view(-1, h), lse_sum.index_select(0, ids)
            after = torch.logaddexp(before, lse_part)
            o_rows = o_sum.index_select(0, ids).mul_((before - after).exp_().unsqueeze(2))
            o_rows.addcmul_(o_part.view_as(o_rows), (lse_part - after).exp_().unsqueeze(2))
            o_sum.index_copy_(0, ids, o_rows)
            lse_sum.index_copy_(0, ids, after)
        o[b, :, g] = o_sum
        lse[b, :, g] = lse_sum


def backward(call: Call, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the accumulation dtype, computed tile by tile of keys with each tile's rows in a fixed
    order."""
    S, h, Dk = call.q.shape[1], *call.q.shape[3:]
    Dv = call.v.shape[3]
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    for (b, g), steps in _steps_by_pair(call, *call.clamped_ranges(), "backward"):
        q, do_bg, lse_bg, delta_bg = (x[b, :, g].to(lse.dtype).reshape(S, -1).contiguous() for x in (call.q, do, lse, delta))
        k_bg, v_bg = call.k[b, g].to(lse.dtype), call.v[b, g].to(lse.dtype)
        dq_bg = torch.zeros_like(q)
        for lo, hi, ids, keep in steps:
            k, v = k_bg[lo:hi], v_bg[lo:hi]
            q_rows, do_rows = q.index_select(0, ids).view(-1, Dk), do_bg.index_select(0, ids).view(-1, Dv)
            p = torch.addmm(lse_bg[ids].view(-1, 1), q_rows, k.T, beta=-1, alpha=call.scale).exp_()
            ds = torch.addmm(delta_bg[ids].view(-1, 1), do_rows, v.T, beta=-1).mul_(p)
            if keep is not None:
                drop = (~keep).repeat_interleave(h, 0)
                p.masked_fill_(drop, 0)
                ds.masked_fill_(drop, 0)
                # In dq, a key that this row did not select is multiplied by ds = 0, so it must be finite to give 0.
                k = torch.nan_to_num(k, 0, 0, 0)
            dk[b, g, lo:hi].addmm_(ds.T, q_rows, alpha=call.scale)
            dv[b, g, lo:hi].addmm_(p.T, do_rows)
            dq_bg.index_add_(0, ids, (ds @ k).view(-1, h * Dk))
        dq[b, :, g] = dq_bg.mul_(call.scale).view(S, h, Dk)
    return dq, dk, dv


def _steps_by_pair(call: Call, start: Tensor, end: Tensor, direction: str) -> Iterator[tuple[tuple[int, int], Iterator[Step]]]:
    """Yield the steps of each (b, g). Each pair is one timing bucket; a row counts once per tile of keys that it
    selected from."""
    B, G = call.k.shape[:2]
    for (b, g), lists in zip(itertools.product(range(B), range(G)), rows_by_tile(call, start, end), strict=True):
        with attend.timed_bucket(call, direction, _width(call), sum(map(len, lists))):
            yield (b, g), _steps(call, start[b, :, g], end[b, :, g], lists)


def _steps(call: Call, start: Tensor, end: Tensor, lists: Sequence[Tensor]) -> Iterator[Step]:
    """Yield steps tile by tile of keys, with each tile's rows split to fit the budget."""
    h, Dk = call.q.shape[3:]
    S_kv, Dv = call.v.shape[2:]
    width = _width(call)
    size = max(1, attend.budget(call) // (h * (2 * Dk + 2 * Dv + 3 * width) * attend.accumulate(call.q.dtype).itemsize))
    for tile, rows in enumerate(lists):
        lo, hi = tile * width, min((tile + 1) * width, S_kv)
        first, last = (x.index_select(0, rows).clamp_(lo, hi).sub_(lo) for x in (start, end))
        whole = (last - first).sum(1) == hi - lo
        for masked in (False, True):
            chosen = (whole != masked).nonzero().squeeze(1)
            for step in attend.slices(len(chosen), size):
                some = chosen[step]
                yield Step(lo, hi, rows[some], _inside(first[some], last[some], hi - lo) if masked else None)


def _width(call: Call) -> int:
    """Return the keys per tile: one block, so that rows select whole tiles, clamped to sizes that suit matrix
    products."""
    return 64 if call.selection.block_size is None else min(max(call.selection.block_size, 32), 128)


def rows_by_tile(call: Call, start: Tensor, end: Tensor) -> Lists:
    """Return the rows whose ranges start, end [B,S,G,n] touch each tile. Cached in the selection per q_pos."""
    S_kv, width = call.k.shape[2], _width(call)

    def build() -> Lists:
        pairs = zip(start.transpose(1, 2).flatten(0, 1), end.transpose(1, 2).flatten(0, 1), strict=True)
        return [_touching(*pair, S_kv, width) for pair in pairs]

    lists: Lists = call.selection.plan(("sdpa-packed", S_kv, width, call.groups_per_selection), build, call.q_pos)
    return lists


def _touching(start: Tensor, end: Tensor, S_kv: int, width: int) -> Sequence[Tensor]:
    tiles = -(-S_kv // width)
    filled = (end > start).int()
    # +1 in a range's first tile, -1 after its last: the prefix sum counts the ranges that touch a tile.
    count = start.new_zeros(len(start), tiles + 1, dtype=torch.int32)
    count.scatter_add_(1, start.clamp(max=S_kv - 1) // width, filled)
    count.scatter_add_(1, (end.clamp(max=S_kv) - 1).clamp_(min=0) // width + 1, -filled)
    touched = (count.cumsum(1, dtype=torch.int32)[:, :tiles] > 0).T
    return torch.split_with_sizes(touched.nonzero()[:, 1], touched.sum(1).tolist())


def _inside(start: Tensor, end: Tensor, width: int) -> Tensor:
    """Return [r,width] bool: which of `width` keys the ranges start, end [r,n] contain."""
    count = start.new_zeros(len(start), width + 1, dtype=torch.int32)
    one = torch.ones_like(start, dtype=torch.int32)
    count.scatter_add_(1, start, one).scatter_add_(1, end, -one)
    return count[:, :width].cumsum(1, dtype=torch.int32) > 0
