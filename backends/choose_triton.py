"""choose-triton: attention to compressed keys, importance without storing p, and top n without sorting.

Forward kernels:
    _triton/runs.py            o and lse
    _triton/choose_scores.py   block scores from q, k and lse, as NSA defines them (importance), or for other pools
    _triton/choose_few.py      block scores of a few new tokens, over a cache
    _triton/choose_logits.py   block scores from q and k alone, if each key touches one block and a group has few heads
    _triton/choose_packed.py   both of these for packed rows of requests over caches
    _triton/choose_pages.py    all of these for a few new tokens over compressed keys in pages
    _triton/top_n.py           the best blocks
Scores and top n run on a chunk of rows at a time, so that the scores of all rows are never in memory.
Backward: dq in _triton/runs.py, dk and dv in _triton/choose_dkdv.py. The selection itself has no gradient.
A compressed key must not cover more pieces than a block has (rule.reach <= rule.pieces).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nsa_sel.backends._triton import choose_dkdv, choose_few, choose_logits, choose_packed, choose_pages, runs
from nsa_sel.backends._triton.arguments import heads_of, narrow_suffix
from nsa_sel.backends._triton.choose_rows import bounds_of, sizes_of, strides_of
from nsa_sel.backends._triton.choose_scores import block_scores
from nsa_sel.backends._triton.tiles import MIN_TILE
from nsa_sel.backends._triton.top_n import chooses, top_n
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.core.arguments import range_dtype
from nsa_sel.core.call import NSA_POOL, ChooseCall
from nsa_sel.core.ranges import sorted_blocks
from nsa_sel.settings.schema import KernelConfig

CONFIGS = {  # by kernel and class of head dims (`narrow_suffix`); one that has no config of its own takes the plain one
    "choose/forward": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=64, loads="tma"),
    "choose/forward-narrow": KernelConfig(block_l=64, num_warps=4, num_stages=2, rows=64, loads="tma"),
    "choose/forward-widest": KernelConfig(block_l=32, num_warps=4, num_stages=2, rows=32, loads="tma"),
    "choose/pages": KernelConfig(block_l=64, num_warps=4, num_stages=3),
    "choose/pages-drafts": KernelConfig(block_l=64, num_warps=4, num_stages=2),
    "choose/pages-wide": KernelConfig(block_l=32, num_warps=4, num_stages=2),
    "choose/pages-drafts-wide": KernelConfig(block_l=32, num_warps=4, num_stages=2),
    "choose/pages-widest": KernelConfig(block_l=32, num_warps=4, num_stages=1),
    "choose/pages-drafts-widest": KernelConfig(block_l=32, num_warps=4, num_stages=1),
    "choose/importance": KernelConfig(block_l=64, num_warps=4, num_stages=2, rows=128, loads="tma"),
    "choose/importance-narrow": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=64, loads="tma"),
    "choose/importance-widest": KernelConfig(block_l=32, num_warps=4, num_stages=2, rows=32, loads="tma"),
    "choose/few": KernelConfig(block_l=128, num_warps=4, num_stages=3, loads="tma"),
    "choose/few-widest": KernelConfig(block_l=64, num_warps=4, num_stages=3, loads="tma"),
    "choose/scores": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=128, loads="tma"),
    "choose/scores-widest": KernelConfig(block_l=32, num_warps=4, num_stages=2, rows=32, loads="tma"),
    "choose/logits-long": KernelConfig(block_l=128, num_warps=4, num_stages=3, rows=64, loads="tma"),
    "choose/logits-long-widest": KernelConfig(block_l=32, num_warps=4, num_stages=1, rows=32, loads="tma"),
    "choose/logits": KernelConfig(block_l=64, num_warps=4, num_stages=2, rows=64, loads="tma"),
    "choose/logits-widest": KernelConfig(block_l=32, num_warps=4, num_stages=1, rows=32, loads="tma"),
    "choose/dq": KernelConfig(block_l=64, num_warps=4, num_stages=2, rows=64, loads="tma"),
    "choose/dq-wide": KernelConfig(block_l=32, num_warps=4, num_stages=2, rows=64, loads="tma"),
    "choose/dq-widest": KernelConfig(block_l=32, num_warps=4, num_stages=1, rows=16, loads="tma"),
    "choose/dkdv": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=32, loads="tma"),
    "choose/dkdv-narrow": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=64, loads="tma"),
    "choose/dkdv-wide": KernelConfig(block_l=64, num_warps=8, num_stages=2, rows=32),
    "choose/dkdv-widest": KernelConfig(block_l=32, num_warps=4, num_stages=1, rows=32),
}


def config_of(call: ChooseCall, kernel: str) -> KernelConfig:
    return CONFIGS.get(kernel + narrow_suffix(heads_of(call.q, call.v)), CONFIGS[kernel])


def forward(call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] in q's dtype, lse [B,S,G,h] in float32, and ranges [B,S,G,n,2] of the blocks.

    Ranges are ascending, with [0, 0) for padding.
    """
    o, lse = attention(call)
    return o, lse, best_blocks(call, lse)


def paged(call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
    """Do `forward` over compressed keys in pages; for a few new tokens per sequence, without gathering the keys."""
    if not choose_pages.takes(call):
        return forward(call.gathered())
    call = call if call.scale >= 0 else call.with_positive_scale()
    B, S, G, h, _ = call.q.shape
    o = call.q.new_empty(B, S, G, h, call.v.shape[3])
    lse = call.q.new_empty(B, S, G, h, dtype=torch.float32)
    ranges = call.q.new_empty(B, S, G, call.rule.n, 2, dtype=range_dtype(call.rule.block_size))
    config = config_of(call, "choose/pages" if S * h <= MIN_TILE else "choose/pages-drafts")
    for at in replace(call, scratch=call.settings.workspace_bytes).parts(choose_pages.row_bytes(call)):
        choose_pages.choose(call.part(*at), config, o[at], lse[at], ranges[at])
    return o, lse, ranges


def takes_requests(call: ChooseCall) -> bool:
    """Return whether `best_blocks` takes a call with packed rows."""
    return choose_packed.takes(call) and chooses(call.visible_blocks(), call.rule.n)


def attention(call: ChooseCall) -> tuple[Tensor, Tensor]:
    """Return o and lse only."""
    call = call if call.scale >= 0 else call.with_positive_scale()
    B, S, G, h, _ = call.q.shape
    o = call.q.new_empty(B, S, G, h, call.v.shape[3])
    lse = call.q.new_empty(B, S, G, h, dtype=torch.float32)
    _launch(call, config_of(call, "choose/forward"), (o, lse))
    return o, lse


def _launch(call: ChooseCall, config: KernelConfig, results: tuple[Tensor | None, ...], do: Tensor | None = None) -> None:
    """Do `runs.launch` if there are rows."""
    if call.q.numel():
        sizes = sizes_of(call, runs.tokens_of(call, config))
        runs.launch(call, call.rule.of_keys(), config, (call.q_pos, *bounds_of(call), None), strides_of(call), sizes, results, do)


def log_sum_exp(call: ChooseCall) -> Tensor:
    """Return lse [B,S,G,h] in float32. The attention kernel needs values, so it gets the first columns of k, as few as
    it allows."""
    return attention(call.of(call.q, call.k, call.k[..., :MIN_TILE]))[1]


def best_blocks(call: ChooseCall, lse: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Write the best blocks to `out` and return it, scoring as many rows at once as fit the scratch.

    lse: [B,S,G,h] from any kernel for a pool with softmax, else None.
    out: ranges [B,S,G,n,2], also if it is None, or block indices [B,S,G,n]; n + 1 with call.tail.
    """
    call = call if call.scale >= 0 else call.with_positive_scale()
    call = call if call.requests is not None or choose_few.takes(call) else call.gathered()
    B, S, G = call.q.shape[:3]
    if out is None:
        out = unwritten(call.q, B, S, G, call.rule.n + call.tail, 2, dtype=range_dtype(call.rule.block_size))
    width = -(-call.blocks // 16) * 16  # rows begin at multiples of 16 bytes
    parts = list(call.parts(G * width * 4))
    b, s = (span.stop for span in parts[0]) if parts else (0, 0)  # the first part is the largest
    scratch = unwritten(call.q, b, s, G, width, dtype=torch.float32)
    for at in parts:
        part, part_lse, part_out, scores = call, lse, out, scratch
        if len(parts) > 1:
            part, part_lse, part_out = call.part(*at), None if lse is None else lse[at], out[at]
            scores = scratch[: part.q.shape[0], : part.q.shape[1]]
        visible = part.visible_blocks()
        scores = scores if width == visible else scores[..., :visible]  # top_n is faster with fewer
        positions = None  # positions of the rows; None if a kernel computes them
        if call.sequences is not None or call.lengths is not None:
            positions = unwritten(call.q, *part.q.shape[:2], dtype=torch.int32)
        early = score(part, part_lse, scores, positions)
        best_of(scores, part_out, part, part.q_pos if positions is None else positions, early)
    return out


def score(call: ChooseCall, lse: Tensor | None, scores: Tensor, positions: Tensor | None = None) -> bool:
    """Write the scores of visible blocks to `scores`, and the rows' positions to `positions` unless it is None, by the
    kernel that takes the call (`few_scores`, `block_logits`, `block_scores`).

    Returns whether the next kernel should start early, too (programmatic dependent launch).
    """
    if call.requests is not None:
        assert positions is not None
        few, tiles = config_of(call, "choose/few"), config_of(call, choose_logits.name_of(call))
        return choose_packed.packed_scores(call, scores, few, tiles, positions)
    if choose_few.takes(call):
        return choose_few.few_scores(call, lse, scores, config_of(call, "choose/few"), positions)
    if choose_logits.takes(call):
        choose_logits.block_logits(call, scores, config_of(call, choose_logits.name_of(call)))
    else:
        config = config_of(call, "choose/importance" if call.pool == NSA_POOL else "choose/scores")
        block_scores(call, lse, scores, config, positions)
    return False


def best_of(scores: Tensor, out: Tensor, call: ChooseCall, positions: Tensor | None, early: bool) -> None:
    """Write the best blocks of every row to `out`, by a kernel unless it holds too few candidates."""
    (B, S, _, blocks), (_, _, block_size, n, first, local) = scores.shape, call.rule
    if chooses(blocks, n):
        top_n(scores, out, block_size, first, local, call.start, positions, tail=call.tail, early=early)
    else:
        t = torch.arange(call.start, call.start + S, device=scores.device)[None] if positions is None else positions
        call.store(out, sorted_blocks(scores, n, block_size, first, local, 0, t.expand(B, -1)))


def backward(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous dq, dk, dv in the dtypes of q, k, v. o and lse are contiguous; do has a contiguous last
    dimension."""
    return backward_and_delta(call, o, lse, do, dlse)[:3]


def backward_and_delta(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `backward` and delta [B,S,G,h] with any strides."""
    if call.scale < 0:
        negative, dk, dv, delta = backward_and_delta(call.with_positive_scale(), o, lse, do, dlse)
        return -negative, dk, dv, delta
    gradient, facts = dq(call, o, lse, do, None if dlse is None else dlse.contiguous())
    return gradient, *choose_dkdv.dkdv(call, do, facts, config_of(call, "choose/dkdv")), facts[:, :, 0].transpose(1, 2)


def dq(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dq [B,S,G,h,Dk] and facts [B,G,2,S,h] of the rows (delta, base-2 lse) for dk and dv. The scale is
    positive."""
    B, S, G, h = lse.shape
    gradient, facts = torch.empty_like(call.q, memory_format=torch.contiguous_format), lse.new_empty(B, G, 2, S, h)
    _launch(call, config_of(call, "choose/dq"), (o, lse, do, dlse, gradient, None, facts), do)
    return gradient, facts
