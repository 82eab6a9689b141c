"""Functions of ranges [B,S,G,n,2], half-open [start, end): union, merging, checks, and how much adjacent rows share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.core.request import SHARING_TOKENS
from nsa_sel.errors import ArgumentError

_SORTED_AT_ONCE = 1 << 22  # blocks that `sharing_of_blocks` sorts at a time, to bound its memory
_SAMPLED = 1 << 17  # blocks that `sample_rows` takes: of 16 a row, 128 tiles


def disjoint(ranges: Tensor) -> Tensor:
    """The ranges of every row sorted by start, each without the keys of those before it; empty ones are [0, 0)."""
    start, end = ranges.unbind(-1)
    start = start.clamp(min=0)
    filled = end > start
    start, order = torch.sort(torch.where(filled, start, torch.iinfo(start.dtype).max), dim=-1, stable=True)
    end = torch.where(filled, end, 0).gather(-1, order)
    reach = torch.cummax(end, dim=-1).values
    start = torch.cat((start[..., :1], torch.maximum(start[..., 1:], reach[..., :-1])), dim=-1)
    return torch.where((end > start).unsqueeze(-1), torch.stack((start, end), dim=-1), 0)


def merged(ranges: Tensor) -> Tensor:
    """Sorted, disjoint ranges of the same keys: overlapping and adjacent ranges of a row become one, empty ones come last."""
    start, end = ranges.unbind(-1)
    start = start.clamp(min=0)
    empty = end <= start
    far = torch.iinfo(start.dtype).max
    start, order = torch.sort(torch.where(empty, far, start), dim=-1, stable=True)
    end = torch.where(empty, 0, end).gather(-1, order)
    reach = torch.cummax(end, dim=-1).values
    before = torch.nn.functional.pad(reach[..., :-1], (1, 0), value=-1)
    slot = torch.cumsum((start > before).to(torch.int64), dim=-1) - 1
    merged_start = torch.full_like(start, far).scatter_reduce(-1, slot, start, "amin")
    merged_end = torch.zeros_like(end).scatter_reduce(-1, slot, end, "amax")
    merged_start = torch.where(merged_end > 0, merged_start, 0)
    return torch.stack((merged_start, merged_end), dim=-1)


def check_ranges(ranges: Tensor, block_size: int | None, max_length: int | None, in_order: bool) -> None:
    """ArgumentError for the first row that breaks a promise of its Selection. Reads the device.

    in_order: whether ranges that are not whole blocks must be sorted by start.
    """
    start, end = ranges.unbind(-1)
    start, filled = start.clamp(min=0), end > start.clamp(min=0)
    if block_size is not None:
        bad = filled & ((start % block_size != 0) | (end - start != block_size))
        _refuse(ranges, bad.any(-1), f"has a range that is not one block of {block_size}", "pass block_size=None, or align the ranges")
    if not in_order:
        order = torch.argsort(torch.where(filled, start, torch.iinfo(start.dtype).max), dim=-1)
        start, end, filled = (x.gather(-1, order) for x in (start, end, filled))
    # Empty ranges are skipped: they inherit the largest end before them.
    reach = torch.cummax(torch.where(filled, end, 0), dim=-1).values
    before = torch.nn.functional.pad(reach[..., :-1], (1, 0), value=0)
    if block_size is None:
        _refuse(ranges, (filled & (start < before)).any(-1), "has overlapping or unsorted ranges", "call selection.merge()")
    else:
        far = torch.iinfo(start.dtype).max
        ordered = torch.sort(torch.where(filled, start, far), dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < far)
        _refuse(ranges, twice.any(-1), "has a block twice", "drop the duplicates, or call selection.merge()")
    if max_length is not None:
        longer = torch.where(filled, end - start, 0).sum(-1) > max_length
        _refuse(ranges, longer, f"selects more than max_length = {max_length} keys", "raise max_length, or leave it out")


def _refuse(ranges: Tensor, bad: Tensor, what: str, remedy: str) -> None:
    if bool(bad.any()):
        b, s, g = bad.nonzero()[0].tolist()
        row = ranges[b, s, g].tolist()
        raise ArgumentError(f"selection row (b={b}, s={s}, g={g})", f"{row}, which {what}", "disjoint ranges as Selection promises", remedy)


def distinct_blocks(blocks: Tensor) -> Tensor:
    """Distinct blocks of each size of `SHARING_TOKENS`, summed over tiles: [7] int64, from rows of whole tiles [tiles,64,n] (-1: none).

    One sort by (block, row) serves all sizes: without its last e bits a key names a block and a tile of 2^e rows.
    """
    row = torch.arange(SHARING_TOKENS[-1], device=blocks.device)[:, None]
    keys = torch.where(blocks >= 0, blocks.long() * SHARING_TOKENS[-1] + row, -1).flatten(1).sort(dim=1).values
    keys = torch.nn.functional.pad(keys, (1, 0), value=-1)
    changed = keys[:, 1:] ^ keys[:, :-1]
    return torch.stack([torch.count_nonzero(changed >> tokens.bit_length() - 1) for tokens in SHARING_TOKENS])


def sharing_of(distinct: Tensor, rows: int, tiles_of: int) -> tuple[float, ...]:
    """Mean number of distinct blocks of each tile size over that of one row. Reads the device.

    Args:
        distinct: sums over tiles, of `distinct_blocks`.
        rows: of each stretch of rows that was cut into tiles.
        tiles_of: stretches.
    """
    means = [count / max(1, tiles_of * -(-rows // tokens)) for count, tokens in zip(distinct.tolist(), SHARING_TOKENS, strict=True)]
    return tuple(mean / means[0] if means[0] else 1.0 for mean in means)


def sharing_of_blocks(blocks: Tensor) -> tuple[float, ...]:
    """Mean number of distinct blocks of each tile size over that of one row, from block indices [B,S,G,n] (-1: none)."""
    B, S, G, n = blocks.shape
    most = SHARING_TOKENS[-1]
    rows = torch.nn.functional.pad(blocks.transpose(1, 2).reshape(B * G, S, n), (0, 0, 0, -S % most), value=-1)
    distinct = torch.zeros(len(SHARING_TOKENS), dtype=torch.int64, device=blocks.device)
    for chunk in torch.split(rows.reshape(B * G * -(-S // most), most, n), max(1, _SORTED_AT_ONCE // max(1, most * n))):
        distinct += distinct_blocks(chunk)
    return sharing_of(distinct, S, B * G)


class Sample(NamedTuple):
    """Rows of a selection by their indices [tiles, rows of a tile]: tiles of adjacent rows, evenly spread over sequences and groups."""

    b: Tensor
    s: Tensor
    g: Tensor


def sample_rows(B: int, S: int, G: int, n: int, device: torch.device | str) -> Sample:
    """Tiles of 64 rows (of S rows if there are fewer), as many as have about `_SAMPLED` blocks. Does not read the device."""
    most = SHARING_TOKENS[-1]
    each = max(1, S // most)  # of one sequence and group; rows behind the last whole tile are left out
    total = B * G * each
    count = min(total, max(1, _SAMPLED // (most * n)))
    tile = (2 * torch.arange(count, device=device) + 1) * total // (2 * count)
    group = tile // each
    s = (tile % each)[:, None] * most + torch.arange(min(S, most), device=device)
    return Sample((group // G)[:, None].expand_as(s), s, (group % G)[:, None].expand_as(s))


def sampled_sharing(ranges: Tensor, limit: Tensor, block_size: int) -> tuple[float, ...]:
    """`sharing_of_blocks` of sampled rows, to two digits. Reads the device.

    Args:
        ranges: of the rows, [tiles, rows of a tile, n, 2] in whole blocks of block_size.
        limit: keys that each row sees, [tiles, rows of a tile].
    """
    start, end = ranges.unbind(-1)
    start = start.clamp(min=0)
    blocks = torch.where(end.minimum(limit.to(end.dtype).unsqueeze(-1)) > start, start // block_size, -1)
    tiles, rows = blocks.shape[:2]
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, SHARING_TOKENS[-1] - rows), value=-1)
    return rounded(sharing_of(distinct_blocks(blocks), rows, tiles))


def rounded(sharing: tuple[float, ...]) -> tuple[float, ...]:
    """Two digits after the point, so that similar selections share one cached decision."""
    return tuple(round(ratio, 2) for ratio in sharing)
