"""Attention to compressed keys on Hopper, with the kernels for selected blocks: TMA, wgmma, warp specialization
(arithmetic.py).

A row sees the first compressed keys. Nothing about the blocks is in memory but where the segments of the rows begin.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import arithmetic, sm90
from nsa_sel.backends.cupy_cuda.arithmetic import BLOCK
from nsa_sel.backends.cupy_cuda.key_to_rows import KeyToRows, published, sum_counts, with_parts, write_gradients
from nsa_sel.core.arguments import rounded_up
from nsa_sel.core.call import ChooseCall, Rule
from nsa_sel.core.request import DeviceInfo
from nsa_sel.core.transforms import capturing

CTAS_PER_SM = 2  # of dkdv_groups.cu, each of which takes a segment; one of wide keys, which makes no difference
SHORTEST = 16  # steps of a segment: with fewer, loading the keys and writing a part is most of the work
MOST_MULTIPLE = 16  # of the rows between tiles, and from there on doubles: the choice takes time on the host
STEPS_OF_A_PART = 6  # steps in the time that a CTA needs to begin, and to write a part that is read again
PARTS = 4  # times `call.scratch`: bytes of float32 parts


def supports(call: ChooseCall, device: DeviceInfo, *others: Tensor) -> bool:
    """Return whether the kernels compute this call on `device`. others: further tensors that a backward pass loads
    through TMA."""
    first_keys = call.q_pos is None and call.sequences is None  # rows of a packed batch do not see the first keys
    return first_keys and call.k.shape[2] > 0 and arithmetic.supports(call, device, *others)


def dkdv(call: ChooseCall, device: DeviceInfo, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk [B,G,C,Dk] and dv [B,G,C,Dv] from lse and delta [B,S,G,h]."""
    lengths = rows_of_tiles(call)
    segment = segment_length(call, lengths, device.sm_count)
    pairs = call.k.shape[0] * call.k.shape[1]
    parts = max(1, pairs * sum(x for x in segments_of(lengths, segment) if x > 1))
    ctas = pairs * len(lengths) * -(-call.q.shape[1] // segment)  # segment_of in dkdv_groups.cu; of few tiles, some have nothing to do

    def start(values: tuple[int, ...]) -> None:
        arithmetic.start_dkdv(call, device, ctas, lse, do, delta, *values)

    return write_gradients(call, _lists_of(call, lengths, segment), BLOCK, parts, start)


def rows_of_tiles(call: ChooseCall) -> tuple[int, ...]:
    """Return, per tile of `BLOCK` compressed keys of one (b, g), how many rows see any of them; these are the last
    rows."""
    return _rows_of_tiles(call.rule.of_keys(), call.q.shape[1], call.k.shape[2], call.start)


@functools.lru_cache(maxsize=256)
def _rows_of_tiles(rule: Rule, S: int, C: int, start: int) -> tuple[int, ...]:
    first = (key * rule.compress_stride + rule.compress_block - 1 - start for key in range(0, C, BLOCK))
    return tuple(S - min(max(row, 0), S) for row in first)


def segments_of(lengths: tuple[int, ...], segment: int) -> tuple[int, ...]:
    """Return the number of segments of every tile's rows."""
    return tuple(-(-length // segment) for length in lengths)


def segment_length(call: ChooseCall, lengths: tuple[int, ...], sm_count: int) -> int:
    """Return the rows per segment (whole steps) with the shortest time for evenly loaded multiprocessors, whose partial
    sums fit.

    Candidates are multiples or fractions of the rows between one tile of keys and the next. Segments of several tiles
    then have nearly the same rows, and concurrent CTAs read them from the L2 cache.
    """
    q, k, v = call.q, call.k, call.v
    pairs, tokens = k.shape[0] * k.shape[1], sm90.ROWS // q.shape[3]
    most_parts = PARTS * call.scratch // (pairs * 4 * BLOCK * (k.shape[3] + v.shape[3]))
    between = BLOCK * call.rule.compress_stride  # rows between one tile and the next
    return _segment_length(lengths, pairs, tokens, between, SHORTEST, most_parts, CTAS_PER_SM * sm_count)


@functools.lru_cache(maxsize=256)
def _segment_length(
    lengths: tuple[int, ...], pairs: int, tokens: int, between: int, shortest: int, most_parts: int, at_once: int
) -> int:  # fmt: skip
    """shortest: steps of a segment; most_parts: of one sequence and group; at_once: CTAs that run at the same time."""
    longest = max(lengths)
    fractions = range(1, max(between // (shortest * tokens), 1) + 1)
    candidates = [rounded_up(-(-between // n), tokens) for n in fractions]
    candidates += [rounded_up(n * between, tokens) for n in range(2, MOST_MULTIPLE + 1)]
    while candidates[-1] < longest:
        candidates.append(2 * candidates[-1])

    def fits(segment: int) -> bool:
        return sum(x for x in segments_of(lengths, segment) if x > 1) <= most_parts

    def steps(segment: int) -> tuple[int, int]:
        waves = -(-pairs * sum(segments_of(lengths, segment)) // at_once)
        return waves * (segment // tokens + STEPS_OF_A_PART), -segment

    return min(filter(fits, candidates), key=steps)


def _lists_of(call: ChooseCall, lengths: tuple[int, ...], segment: int) -> KeyToRows:
    """Remembered, but not inside a CUDA graph, which keeps what it makes, and is replayed when others may have been
    forgotten."""
    q, k = call.q, call.k
    build = _build.__wrapped__ if capturing(q) else _build
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    return build(q.device, stream, k.shape[0] * k.shape[1], lengths, segment, call.rule.of_keys(), q.shape[1], call.start)


@functools.lru_cache(maxsize=64)
def _build(
    device: torch.device, stream: int, pairs: int, lengths: tuple[int, ...], segment: int, rule: Rule, S: int, start: int
) -> KeyToRows:  # fmt: skip
    """Build the lists of all tiles on the device and stream, without synchronizing."""
    tiles = len(lengths)
    first = torch.arange(tiles, device=device, dtype=torch.int32) * (BLOCK * rule.compress_stride) + (rule.compress_block - 1 - start)
    counts = torch.cat(((S - first.clamp_(0, S)).repeat(pairs), first.new_zeros(published(pairs * tiles))))
    return KeyToRows(None, *sum_counts(counts, pairs * tiles, tiles, 1, with_parts(segment)), pairs * tiles, tiles, 0, segment)
