"""Split a call into calls on parts of its rows if a plan of all rows would exceed the workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from nsa_sel.core.call import Call
from nsa_sel.selection import Selection

LEAST_ROWS = 1024  # fewest rows per part, whatever the workspace: fewer would leave a GPU idle


def slices(call: Call, b: slice, g: slice, rows: int) -> Iterator[tuple[Call, tuple[slice, slice, slice]]]:
    """Yield calls on `rows` rows each of these batch entries and groups, and the slices of their rows in [B,S,G]."""
    S, S_kv, whole = call.q.shape[1], call.k.shape[2], call.selection
    ranges, groups = call.union_ranges(), g if call.groups_per_selection == 1 else slice(None)
    for first in range(0, S, rows):
        end = min(S, first + rows)
        at = b, slice(first, end), g
        seen = S_kv if call.q_pos is not None else S_kv - S + end  # keeps default positions
        part, repeats = ranges[b, at[1], groups].contiguous(), whole.unsearched
        selection = Selection(part, whole.block_size, whole.length_bound(S_kv), disjoint=not repeats)
        selection._cut_block = whole._cut_block
        k, v = (x[b, g, :seen] for x in (call.k, call.v))
        q_pos = None if call.q_pos is None else call.q_pos[at[:2]]
        yield replace(call, q=call.q[at], k=k, v=v, selection=selection, q_pos=q_pos, workspace=None, out=(None, None)), at


def by_parts(call: Call, tile_rows: int, tile_bytes: int, start: Callable[..., None], *tensors: Tensor | None) -> None:
    """Run `start(call, *tensors)` in parts whose plans stay within runtime.workspace_bytes.

    Parts are whole tiles, so that results do not change. Calls over caches with lengths have few rows and are never
    split.

    Args:
        call: the call.
        tile_rows: rows per tile of the plan.
        tile_bytes: bytes of the plan per tile of all groups.
        start: launches one pass over the rows of a call.
        tensors: tensors that it reads and writes, [B,S,...] each.
    """
    B, S, G = call.q.shape[:3]
    tiles = -(-S // tile_rows)
    most = max(call.settings.workspace_bytes // tile_bytes, -(-LEAST_ROWS // tile_rows))
    if B * tiles <= most or call.lengths is not None:
        return start(call, *tensors)
    entries, rows = max(1, most // tiles), -(-tiles // -(-tiles // most)) * tile_rows  # parts of about one size
    for b in range(0, B, entries):
        for part, at in slices(call, slice(b, b + entries), slice(G), rows):
            start(part, *(None if x is None else x[at] for x in tensors))
    return None
