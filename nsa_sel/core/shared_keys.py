"""Selections of single query heads, or of a few: more groups in the selection than K and V have (MoBA).

q [B,S,Gs,h,Dk] and a selection over [B,S,Gs] meet k [B,G,S_kv,Dk], where Gs = r * G: groups g*r ... g*r + r - 1 of q
read KV group g. They become r * S rows of group g, one group of q after the other: neighbors among the rows are tokens
of one head, which share more blocks than heads of one token do, and tiles of rows load what they share once. So K and V
stay as they are, neither copied nor expanded, and kernels sum dk and dv over all rows in float32, in a fixed order. q,
o and their gradients are rearranged: a copy of each, unless S and G are 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import transforms
from nsa_sel.core.arguments import as_positions
from nsa_sel.core.transforms import capturing
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection

WIDE = torch.float64  # of which as many bytes are copied at a time


def ratio(q_groups: int, k_groups: int) -> int:
    """r, the groups of q that share a KV group; 1 where the groups are the same, or don't fit."""
    return q_groups // k_groups if k_groups and q_groups % k_groups == 0 else 1


def ratio_of(q: Any, k: Any, selection: Any) -> int:
    """`ratio` of q [B,S,Gs,h,Dk] or [B,Gs,h,Dk], k [B,G,S_kv,Dk], and a selection over q's rows; 1 for anything else."""
    if not isinstance(q, Tensor) or not isinstance(k, Tensor):
        return 1
    try:
        if q.shape[-3] == k.shape[1]:  # first: every call comes here
            return 1
    except (IndexError, RuntimeError):  # too few dimensions, nested tensors: checks say so later
        return 1
    ranges = selection.ranges if isinstance(selection, Selection) else selection
    if not isinstance(ranges, Tensor) or k.dim() != 4 or q.dim() not in (4, 5) or q.shape[0] != k.shape[0]:
        return 1
    rows = q.shape[:-2] if q.dim() == 5 else (q.shape[0], 1, q.shape[1])
    same = ranges.shape[:-2] in (rows, q.shape[:-2])
    return ratio(q.shape[-3], k.shape[1]) if same else 1


def one_of(q: Tensor, selection: Selection, r: int) -> tuple[Tensor, Selection]:
    """Return q and the selection with one of every r groups, for checks; ArgumentError for a selection of other rows
    than q's."""
    ranges = selection.ranges
    if ranges.shape[:3] != q.shape[:3]:
        value, rows = f"over rows [B,S,G] = {tuple(ranges.shape[:3])}", tuple(q.shape[:3])
        raise ArgumentError(
            "selection",
            value,
            f"ranges [B,S,G,n,2] over q's rows {rows}",
            f"one set of ranges per query row and group of q, which has {r} groups for each of k",
        )
    return q[:, :, ::r], with_ranges(selection, ranges[:, :, ::r])


def as_rows(x: Tensor, r: int) -> Tensor:
    """Return x [B,S,Gs,...] as [B,r*S,G,...]."""
    return _rearranged(x, r, True)


def from_rows(x: Tensor, r: int) -> Tensor:
    """Return x [B,r*S,G,...] as [B,S,Gs,...]."""
    return _rearranged(x, r, False)


def _rearranged(x: Tensor, r: int, to_rows: bool) -> Tensor:
    if torch.compiler.is_compiling():
        return _moved(x, r, to_rows)
    return _Rearranged.apply(x, r, to_rows)  # type: ignore[no-any-return, no-untyped-call]


class _Rearranged(torch.autograd.Function):
    """`_moved` by eight bytes at a time, where strides allow: PyTorch copies single elements, at half the memory's
    speed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: int, to_rows: bool) -> Tensor:
        ctx.numbers = r, to_rows
        each = WIDE.itemsize // x.element_size()
        x = x.resolve_neg()  # eight bytes hold several numbers, whose signs a view would not change
        wide = x.stride(-1) == 1 and not any(size % each for size in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        return _moved(x.view(WIDE), r, to_rows).view(x.dtype) if wide else _moved(x, r, to_rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        r, to_rows = ctx.numbers
        transforms.check_gradients(gradient)
        return _rearranged(gradient, r, not to_rows), None, None


def _moved(x: Tensor, r: int, to_rows: bool) -> Tensor:
    if to_rows:
        return torch.unflatten(x, 2, (x.shape[2] // r, r)).movedim(3, 1).flatten(1, 2)
    return torch.unflatten(x, 1, (r, x.shape[1] // r)).movedim(1, 3).flatten(2, 3)


def call_of_rows(q: Tensor, selection: Selection, q_pos: Tensor | None, S_kv: int, r: int) -> tuple[Tensor, Selection, Tensor]:
    """Return q [B,r*S,G,h,Dk], its selection and positions [B,r*S], of q [B,S,Gs,h,Dk]; the last two are cached in the
    selection.

    Args:
        q_pos: [S] or [B,S]; None for S_kv - S + s.
        S_kv: keys of a sequence.

    Raises:
        ArgumentError: a selection of other rows; more rows than keys without q_pos.
    """
    B, S = q.shape[:2]
    one_of(q, selection, r)
    if q_pos is None and S > S_kv:
        raise ArgumentError("q", f"of S = {S} rows", f"at most S_kv = {S_kv} rows without q_pos", "pass q_pos, the rows' positions")
    position = None if q_pos is None else as_positions(q_pos, B, S, q.device)

    def build() -> tuple[Selection, Tensor]:
        at = torch.arange(S_kv - S, S_kv, device=q.device).expand(B, S) if position is None else position
        return with_ranges(selection, as_rows(selection.ranges, r)), at.repeat(1, r)

    if torch.compiler.is_compiling() or capturing(q):  # a replay must follow writes into the ranges
        rows, at = build()
    else:
        rows, at = selection.plan(("shared_keys", r), build, position, B, S, S_kv)
    return as_rows(q, r), rows, at


def as_sequences(x: Tensor, r: int) -> Tensor:
    """Return x [B,S,Gs,...] as [B*r,S,G,...]: over pages, where a sequence's keys are a row of the block table, which
    may be repeated."""
    return torch.unflatten(x, 2, (x.shape[2] // r, r)).movedim(3, 1).flatten(0, 1)


def from_sequences(x: Tensor, r: int) -> Tensor:
    """Return x [B*r,S,G,...] as [B,S,Gs,...]."""
    return torch.unflatten(x, 0, (x.shape[0] // r, r)).movedim(1, 3).flatten(2, 3)


def with_ranges(selection: Selection, ranges: Tensor) -> Selection:
    """Return a selection of other ranges with the static facts of this one."""
    return Selection(ranges, selection.block_size, selection.max_length, disjoint=selection.disjoint)
