"""Dense forward of sdpa-packed, for one range per row (n = 1): tiles of adjacent rows attend to one slice of keys under
a mask.

Nothing is gathered, so a non-finite key would spread to rows that did not select it. On a CPU the caller checks K and V
first. On a GPU the tiles read copies of K and V without such keys, and rows that selected one return NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_sel.backends._sdpa import attend
from nsa_sel.core.call import Call

_ROWS = 64  # query positions per tile on a CPU: small tiles read few keys that their rows did not select
_ROWS_GPU = 1024  # on a GPU: large tiles need few kernel launches
# Largest ratio of loaded to selected keys at which dense tiles beat gathering. At 2.0 they take 24 ms against 36 ms on
# a CPU (S 2048, h 1 and 4, D 64). On an H200 they take 0.03 to 0.59 of the time up to 32, and 0.63 to 1.08 from 72 on
# (bench/results/h200/dense.jsonl).
_WASTE = 2.0
_WASTE_GPU = 32.0


class Tile(NamedTuple):
    """Query rows [s0, s1) of all sequences and groups, and the keys [lo, hi) that contain their ranges."""

    s0: int
    s1: int
    lo: int
    hi: int


def tiles_of(call: Call, start: Tensor, end: Tensor) -> list[Tile] | None:
    """Return the tiles of the dense path, or None if the call does not take it. Ranges start, end [B,S,G,n] are
    clamped."""
    B, S, G, h, Dk = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    forced = call.settings.triton_force_path
    if call.selection.n != 1 or forced == "varlen" or call.scales is not None or start.numel() == 0 or S_kv == 0:
        return None
    on_cpu, itemsize = attend.may_read(call), attend.accumulate(call.q.dtype).itemsize
    if not on_cpu and B * G > attend.STEP_ROWS:
        return None
    # Bytes per (row, key) pair: booleans and the bias; without a fused kernel, also the logits of each head.
    pair_bytes = 4 + itemsize + (0 if attend.has_fused_kernel(call.q, Dk, Dv) else 3 * h * itemsize)
    copied = 0 if on_cpu else (call.k.numel() + call.v.numel()) * call.q.element_size()
    height = min(_ROWS if on_cpu else _ROWS_GPU, (call.settings.workspace_bytes - copied) // (B * G * S_kv * pair_bytes))
    if height <= 0:
        return None
    tiles, selected = _tiles_by_range(call, start, end, height) if on_cpu else _tiles_by_position(call, height)
    tiles = [tile for tile in tiles if tile.hi > tile.lo]
    read = B * G * sum((tile.s1 - tile.s0) * (tile.hi - tile.lo) for tile in tiles)
    if not tiles or (forced != "dense" and read > (_WASTE if on_cpu else _WASTE_GPU) * selected):
        return None
    finite = not on_cpu or attend.all_finite(call, min(tile.lo for tile in tiles), max(tile.hi for tile in tiles))
    return tiles if finite else None


def _tiles_by_range(call: Call, start: Tensor, end: Tensor, height: int) -> tuple[list[Tile], int]:
    """Return tiles of `height` rows with the keys that their ranges span, and the number of keys that all rows
    select."""
    S, S_kv = call.q.shape[1], call.k.shape[2]
    start, end = start.transpose(0, 1).reshape(S, -1), end.transpose(0, 1).reshape(S, -1)
    lo = torch.where(end > start, start, S_kv).amin(1)
    hi = torch.where(end > start, end, 0).amax(1)
    rows = attend.slices(S, height)
    return [Tile(at.start, at.stop, int(lo[at].min()), int(hi[at].max())) for at in rows], int((end - start).sum())


def _tiles_by_position(call: Call, height: int) -> tuple[list[Tile], int]:
    """Return tiles with all keys that their rows may see, and how many keys all rows select (exact if measured, else a
    bound)."""
    (B, S, G), S_kv = call.q.shape[:3], call.k.shape[2]
    moved = call.q_pos is not None
    tiles = [Tile(at.start, at.stop, 0, S_kv if moved else S_kv - S + at.stop) for at in attend.slices(S, height)]
    measured = None if moved else call.selection.total_length(S_kv)
    if measured is not None:
        return tiles, measured * call.groups_per_selection
    most = call.selection.length_bound(S_kv)
    # Rows that see fewer keys than `most`: S_kv - S + 1, S_kv - S + 2, ...
    short = 0 if moved else max(0, min(S, most - (S_kv - S)))
    return tiles, B * G * (short * (S_kv - S) + short * (short + 1) // 2 + (S - short) * most)


def forward(call: Call, tiles: list[Tile], start: Tensor, end: Tensor, o: Tensor, lse: Tensor) -> None:
    """Compute o and lse of all tiles into the given tensors."""
    B, _, G, h, Dk = call.q.shape
    start, end = start.squeeze(3).transpose(1, 2), end.squeeze(3).transpose(1, 2)  # [B,G,S]
    k, v, spoilt = (call.k, call.v, None) if attend.may_read(call) else _without_overflows(call, start, end)
    k, v = k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1)
    for s0, s1, lo, hi in tiles:
        with attend.timed_bucket(call, "forward", hi - lo, B * G * (s1 - s0)):
            key = torch.arange(lo, hi, device=k.device)
            first, last = (x[:, :, s0:s1].reshape(B * G, 1, s1 - s0, 1) for x in (start, end))
            q = call.q[:, s0:s1].permute(0, 2, 3, 1, 4).reshape(B * G, h, s1 - s0, Dk)
            o_tile, lse_tile = attend.attend(q, k[:, :, lo:hi], v[:, :, lo:hi], (key >= first) & (key < last), call.scale)
            filled = last > first
            o_tile, lse_tile = torch.where(filled, o_tile, 0), torch.where(filled, lse_tile.unsqueeze(3), float("-inf"))
            o[:, s0:s1] = o_tile.view(B, G, h, s1 - s0, -1).permute(0, 3, 1, 2, 4)
            lse[:, s0:s1] = lse_tile.view(B, G, h, s1 - s0).permute(0, 3, 1, 2)
    if spoilt is not None:
        o.masked_fill_(spoilt[..., None, None], float("nan"))
        lse.masked_fill_(spoilt[..., None], float("nan"))


def _without_overflows(call: Call, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return copies of k and v that are zero where a key is not finite or may overflow, and which rows [B,S,G] selected
    such a key.

    start, end: the rows' ranges [B,G,S].
    """
    k_finite, v_finite = (torch.linalg.vector_norm(x, float("inf"), dim=-1) < attend.OVERFLOW for x in (call.k, call.v))
    finite = k_finite & v_finite  # False for NaN
    k, v = (torch.where(finite.unsqueeze(3), x, 0) for x in (call.k, call.v))
    before = pad((~finite).cumsum(2), (1, 0))
    last, first = (before.gather(2, x.clamp(max=call.k.shape[2])) for x in (end, start))
    return k, v, (last > first).transpose(1, 2)
