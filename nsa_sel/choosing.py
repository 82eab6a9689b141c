"""Ways to choose blocks beside NSA's own: an indexer's queries and keys, MoBA's mean-pooled keys, InfLLM-v2's softmax
over them.

All are `choose_blocks` with other arguments: a `Selection` without attention output and without gradient.
docs/choosing.md compares them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nsa_sel.compression import BlockMean
from nsa_sel.core import choose, transforms
from nsa_sel.core.arguments import check_flag, check_positive, check_tensors
from nsa_sel.core.call import Pool, Rule
from nsa_sel.core.check import check_index, check_rule, check_sizes
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection

Reduction = Literal["max", "sum"]


def choose_blocks(
    q: Tensor, k: Tensor, *, block_size: int = 128, n: int = 16, first: int = 0, local: int = 1,
    reduce: Reduction = "max", heads: Reduction = "sum", softmax: bool = False,
    activation: Literal["relu"] | None = None, tail: bool = False, lse: Tensor | None = None,
    compress_block: int = 1, compress_stride: int = 1, scale: float | None = None, q_pos: Tensor | None = None,
    S_kv: int | None = None, backend: str | None = None,
) -> Selection:  # fmt: skip
    """Choose the n best blocks of every row by the scores of index keys.

    By default as the indexer of MiniMax Sparse Attention (arXiv 2606.13392) does. As Qwen3.8's (QSA) with local=0,
    activation="relu", tail=True, and one index key per complete block: compress_block = compress_stride = block_size.

    Index key i stands for the keys [i * compress_stride, i * compress_stride + compress_block): for one key by default,
    for a block of them if they are pooled. A row at position t sees it once it sees the last of them. Its logit scale
    q.k, or with softmax its weight exp(logit - lse), is reduced over the h heads of a group, then over the index keys
    that touch a block. The first and the local last visible blocks are always chosen, then those of the highest scores;
    ties go to the lower block. No gradient; bit-equal from run to run.

    Neither logits nor the scores of all rows are ever in memory.

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for one query per sequence (decode): index queries. float16, bfloat16, float32 or
            float64; k too.
        k: [B,G,C,Dk], index keys, or [B,1,C,Dk] for all groups; C = (S_kv - compress_block) // compress_stride + 1, or
            0.
        block_size: keys of a selection block, a multiple of compress_stride.
        n: blocks per row, the forced ones among them.
        first: blocks at the start of the sequence that are always chosen.
        local: last visible blocks, the current one among them, that are always chosen.
        reduce: "max" or "sum" over a block; a sum takes an index key once for every compress_stride keys of the block
            that it covers.
        heads: "sum" or "max" over the heads of a group.
        softmax: score weights. "sum" of them is NSA's importance, which ranks as a block's log-sum-exp does.
        activation: "relu" scores max(logit, 0) of each head instead of the logit; not with softmax.
        tail: add the row's incomplete last block, which is not scored and does not count among the n. Needs first =
            local = 0 and compress_block = compress_stride = block_size, so that rows choose among complete blocks only.
        lse: [B,S,G,h] ([B,G,h] for decode) float32, natural logarithm, with softmax; by default of the index keys that
            the row sees. A row with -inf has weights of 0.
        compress_block: keys that an index key covers: a multiple of compress_stride, at most block_size.
        compress_stride: keys from one index key to the next.
        scale: factor of the logits, by default 1/sqrt(Dk). Without softmax a positive one chooses the same blocks
            whatever it is.
        q_pos: [S] or [B,S] int32 or int64, positions of the rows, by default S_kv - S + s.
        S_kv: keys of the sequence; by default C where index keys stand for one key each, else S.
        backend: the name of a backend to force (`nsa-sel doctor`); else `use_backend`, then NSA_SEL_BACKEND, then the
            policy decides.

    Returns:
        The `Selection` of whole blocks, with ranges [B,S,G,n,2], for `selection_attention`. Without softmax, a block
        none of whose index keys the row sees is chosen only if forced. With tail, ranges are [B,S,G,n+1,2], and the
        last one is the row's incomplete block, of which causal attention reads the keys up to the row's position, or
        [0, 0).

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: as `selection_attention`.
    """
    check_flag("softmax", softmax)
    check_flag("tail", tail)
    if activation not in (None, "relu") or (softmax and activation):
        raise ArgumentError("activation", shown(activation), "'relu' without softmax, or None", "leave it out, or pass softmax=False")
    pool = Pool(softmax, _is_max("heads", heads), _is_max("reduce", reduce), activation == "relu")
    rule = Rule(compress_block, compress_stride, block_size, n, first, local)
    if tail and not (compress_block == compress_stride == block_size and first == local == 0):
        remedy = "pass first=0, local=0 and compress_block = compress_stride = block_size, with one index key per complete block"
        raise ArgumentError("tail", True, "False where blocks are forced or an incomplete block has index keys", remedy)
    q, k = _plain("choose_blocks", q, k)
    if lse is not None:
        check_tensors(lse=lse)
    return _choose(q, k, rule, pool, lse, scale, q_pos, S_kv, backend, tail)


def moba_selection(
    q: Tensor,
    k: Tensor,
    *,
    block_size: int = 512,
    n: int = 3,
    q_pos: Tensor | None = None,
    backend: str | None = None,
) -> Selection:
    """Choose the blocks of Mixture of Block Attention (MoBA, arXiv 2502.13189, Eq. 5-6).

    Every head chooses for itself, by the mean of a block's keys.

    A head's score of an earlier block is q . mean(keys of the block), with the queries and keys of attention itself
    (after rotary positions). The current block is always chosen, and counts among the n. Means are computed in float32
    and rounded to k's dtype, and incomplete blocks have none. For decoding keep the means and call `choose_blocks(...,
    compress_block=block_size, compress_stride=block_size)` instead: this computes them all.

    Args:
        q: [B,S,G,h,D], or [B,G,h,D] for one query per sequence.
        k: [B,G,S_kv,D].
        block_size: keys of a block.
        n: blocks per row, the current one among them.
        q_pos, backend: as of `choose_blocks`.

    Returns:
        The `Selection` with one group per head, ranges [B,S,G*h,n,2]: for `selection_attention` with q as
        [B,S,G*h,1,D], and k, v as they are.

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: as `selection_attention`.
    """
    check_positive("block_size", block_size)
    q, k = _plain("moba_selection", q, k)
    check_sizes(q, k, k)
    means = _means(k, block_size, block_size).repeat_interleave(q.shape[-2], 1)
    rule, pool = Rule(block_size, block_size, block_size, n, 0, 1), Pool(softmax=False, block_max=True)
    return _choose(q.flatten(-3, -2).unsqueeze(-2), means, rule, pool, None, 1.0, q_pos, k.shape[2], backend)


def infllm_selection(
    q: Tensor,
    k: Tensor,
    *,
    block_size: int = 64,
    n: int = 96,
    first: int = 1,
    local: int = 33,
    compress_block: int = 32,
    compress_stride: int = 16,
    coarse_lse: bool = True,
    scale: float | None = None,
    q_pos: Tensor | None = None,
    backend: str | None = None,
) -> Selection:
    """Choose the blocks of InfLLM-v2 (arXiv 2509.24663; MiniCPM4, arXiv 2506.07900).

    A block's score is the largest softmax weight of the means of keys that touch it.

    Keys of attention itself (after rotary positions, unless the model leaves them out) are averaged, compress_block of
    them every compress_stride. Their softmax weights are added over the heads of a group; a block's score is the
    largest sum of the means that touch it: of 5 means for the default sizes. The defaults are MiniCPM4's: 96 blocks,
    among them the first, the current one and the 32 before.

    Args:
        q: [B,S,G,h,D], or [B,G,h,D] for one query per sequence.
        k: [B,G,S_kv,D].
        block_size: keys of a block, a multiple of compress_stride.
        n: blocks per row, the forced ones among them.
        first, local: as of `choose_blocks`. The source counts the current block apart: its local_blocks is local - 1.
        compress_block: keys of a mean: a multiple of compress_stride, at most block_size.
        compress_stride: keys from one mean to the next.
        coarse_lse: take the log-sum-exp from means of 4 * compress_block keys every 4 * compress_stride, as the source
            does to save time; False: from the means themselves.
        scale, q_pos, backend: as of `choose_blocks`.

    Returns:
        The `Selection` of whole blocks, with ranges [B,S,G,n,2]. A row that sees no coarse mean has scores of 0, so
        that after the forced blocks the lowest are chosen.

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: as `selection_attention`.
    """
    check_flag("coarse_lse", coarse_lse)
    rule, pool, lse = Rule(compress_block, compress_stride, block_size, n, first, local), Pool(block_max=True), None
    check_rule(rule)
    q, k = _plain("infllm_selection", q, k)
    check_sizes(q, k, k)
    if coarse_lse:
        coarse = rule._replace(compress_block=4 * compress_block, compress_stride=4 * compress_stride, block_size=4 * compress_block)
        means = _means(k, coarse.compress_block, coarse.compress_stride)
        index = check_index(q, means, coarse, pool, None, scale, q_pos, k.shape[2], transforms.traces(q, k))
        lse = choose.log_sum_exp(index, coarse, backend)
    return _choose(q, _means(k, compress_block, compress_stride), rule, pool, lse, scale, q_pos, k.shape[2], backend)


def _choose(
    q: Tensor, k: Tensor, rule: Rule, pool: Pool, lse: Tensor | None, scale: float | None, q_pos: Tensor | None, S_kv: int | None,
    backend: str | None, tail: bool = False,
) -> Selection:  # fmt: skip
    """Choose for the tensors that `_plain` returned. tail: add the block of the row's position, if the row does not see
    all of it."""
    index = check_index(q, k, rule, pool, lse, scale, q_pos, S_kv, transforms.traces(q, k))
    ranges = choose.best_blocks(index, rule, pool, backend)
    if tail:
        B, S, G = ranges.shape[:3]
        q_pos = torch.arange(index.S_kv - S, index.S_kv, device=q.device) if index.q_pos is None else index.q_pos
        begin = (q_pos + 1) // rule.block_size * rule.block_size
        last = torch.stack((begin, begin + rule.block_size), -1).where((begin <= q_pos).unsqueeze(-1), 0)  # attention cuts it at q_pos
        ranges = torch.cat((ranges, last.to(ranges.dtype).unsqueeze(-2).unsqueeze(-3).expand(B, S, G, 1, 2)), 3)
    return Selection.from_ranges(ranges, rule.block_size, disjoint=True)


def _plain(name: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k as kernels take them: dense, materialized, cast by autocast, without gradient."""
    check_tensors(q=q, k=k)
    transforms.check_transforms(q, k, name=name)
    if not transforms.traces(q, k):
        q, k, _ = transforms.materialized(q, k, k)
    q, k, _ = transforms.in_autocast_dtype(q, k, k)
    return q.detach(), k.detach()


def _means(k: Tensor, block: int, stride: int) -> Tensor:
    """Return [B,G,C,D] of k [B,G,S_kv,D]: the mean of `block` keys every `stride`, in k's dtype."""
    mean: Tensor = BlockMean(block, stride)(k.transpose(1, 2))
    return mean


def _is_max(name: str, reduction: str) -> bool:
    """Raise ArgumentError for anything but the two reductions."""
    if reduction not in ("max", "sum"):
        raise ArgumentError(name, shown(reduction), "'max' or 'sum'", "pass one of them")
    return reduction == "max"
