"""The selection turned round: for every KV tile, the (row, range) pairs that reach into it, in ascending order of rows.

A counting sort (rank.cu, a running sum, place.cu), so that every list has a fixed order. Kernels share the lists by pieces (pieces.cu) of
at most `piece` entries of one list: block 0, which every row chose, is many blocks' work. All sizes are static bounds: building and
using the lists never reads the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch
from nsa_sel.backends.cupy_cuda.compiler import constants
from nsa_sel.core.call import Call
from nsa_sel.errors import BackendError

SHORTEST = 32  # entries a piece: a few steps, else reading the tile and writing its part is most of the work
PIECES_PER_SM = 4
BYTES = 24  # an entry needs: its rank, its place, and its share of the counts and their sums
RANKED = 256  # entries that a block numbers at once
STRETCHES = 4096  # blocks that rank: enough for any GPU, few enough for a small table
TURNED = launch.PROBLEM + "6q"  # Problem and Turned of lists.cuh


class Lists(NamedTuple):
    """List number bg * tiles + j belongs to the keys [j*width, (j+1)*width) of the pair bg = b * G + g of batch entry and group. An entry
    is bg * each + (s * n + range) * reach + step: row s, and the step-th tile of that range."""

    entries: Tensor  # [capacity] int64, list after list; unwritten past the last list's end
    begins: Tensor  # [number + 1] int64: where a list begins among the entries
    pieces: Tensor  # [number + 1] int64: pieces of the lists before
    parts: Tensor  # [number + 1] int64: pieces of the lists before that have several
    number: int  # of lists
    tiles: int  # of one pair
    each: int  # entries of one pair, at most
    capacity: int  # entries, at most
    most_pieces: int


def most_parts(entries: int, piece: int) -> int:
    """A bound on the pieces of lists that have several: such a list is longer than a piece, and has less than twice the pieces that its
    entries fill."""
    return max(1, min(entries, 2 * entries // piece))


def piece_within(call: Call, width: int, reach: int) -> int:
    """Entries a piece: short enough to give every multiprocessor some and for balance, and long enough for their float32 parts to fit the
    workspace beside the lists."""
    B, S, G, h, Dk = call.q.shape
    entries = B * G * S * call.selection.n * reach
    part_bytes = 4 * width * (Dk + call.v.shape[-1])
    longest = max(256, min(1024, 4096 // h))  # longer where a row brings fewer heads: each piece writes its part
    piece = SHORTEST
    while piece < longest and entries > piece * PIECES_PER_SM * call.device.sm_count:
        piece *= 2
    bound = call.settings.workspace_bytes
    budget = max(bound - BYTES * entries, bound // 8)
    while most_parts(entries, piece) * part_bytes > budget and 2 * piece * h < 2**31:
        piece *= 2
    return piece


def lists_of(call: Call, ranges: Tensor, width: int, reach: int, piece: int) -> Lists:
    """The lists for tiles of `width` keys, remembered in the selection, for these keys and positions: the causal clamp depends on both.

    Built anew inside a CUDA graph: a replay must follow ranges that were written since, and what a capture builds holds nothing until
    it is replayed.
    """
    if call.capturing():
        return _build(call, ranges, width, reach, piece)
    key = ("cupy-cuda lists", width, piece, tuple(call.k.shape[:3]))
    lists: Lists = call.selection.plan(key, lambda: _build(call, ranges, width, reach, piece), call.q_pos)
    return lists


def _build(call: Call, ranges: Tensor, width: int, reach: int, piece: int) -> Lists:
    B, S, G, _, _ = call.q.shape
    n, device = call.selection.n, call.q.device
    tiles = -(-call.k.shape[2] // width)
    each, number = S * n * reach, B * G * tiles
    capacity = B * G * each
    bound = max(call.settings.workspace_bytes, 1 << 20)
    if BYTES * capacity > bound or max(each, number) >= 2**31:
        raise BackendError(
            f"the list of rows of every KV tile needs {BYTES * capacity} bytes, because any of the {n} ranges of a row may span"
            f" {reach} tiles; allowed: {call.settings.workspace_bytes} (runtime.workspace_bytes). Remedy: build the Selection from"
            " blocks, pass max_length=, call selection.measure(), or raise runtime.workspace_bytes."
        )
    # Long enough for a table of counts that is no longer than the lists.
    stretch = max(1, RANKED // (n * reach), -(-S * B * G // STRETCHES), -(-tiles // (n * reach)))
    stretches = -(-S // stretch)
    ranks = torch.empty(capacity, dtype=torch.int32, device=device)
    counts = torch.zeros(number * stretches, dtype=torch.int32, device=device)
    entries = torch.empty(capacity, dtype=torch.int64, device=device)
    macros, on = constants(BF16=0, DK=8, DV=8, ALIGNED=1), call.q.get_device()
    turned = (*launch.problem(call, ranges), each, reach, width, tiles, stretch, stretches)
    launch.start("sort_rank.cu", macros, on, B * G * stretches, RANKED, 0, TURNED + "2q", *turned, ranks.data_ptr(), counts.data_ptr())
    ends = counts.cumsum(0)
    launch.start(
        "sort_scatter.cu", macros, on, -(-capacity // 256), 256, 0, TURNED + "4q",
        *turned, ranks.data_ptr(), ends.data_ptr(), entries.data_ptr(), capacity,
    )  # fmt: skip
    before = torch.empty(3, number + 1, dtype=torch.int64, device=device)
    begins, pieces, parts = before
    launch.start(
        "split_lists.cu", macros, on, 1, 512, 0, "7q",
        ends.data_ptr(), begins.data_ptr(), pieces.data_ptr(), parts.data_ptr(), number, stretches, piece,
    )  # fmt: skip
    most_pieces = min(capacity, capacity // piece + number)
    return Lists(entries, begins, pieces, parts, number, tiles, each, capacity, most_pieces)
