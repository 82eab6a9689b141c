"""Choose blocks: attention to compressed keys (the first branch of NSA's layer), an indexer's queries and keys, MoBA's
mean-pooled keys, InfLLM-v2's softmax over them.

All but `compressed_attention` return a `Selection` without attention output and without gradient. docs/choosing.md
compares them.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from nsa_sel.compression import BlockMean
from nsa_sel.core import choose, run, transforms
from nsa_sel.core.arguments import CuSeqlens, check_flag, check_positive, check_tensors
from nsa_sel.core.call import Pool, Rule
from nsa_sel.core.check import check_choose, check_index, check_pool, check_rule, check_sizes
from nsa_sel.core.packed import check_longest, check_packed_choose, check_packed_index
from nsa_sel.core.request import FEW_TOKENS
from nsa_sel.selection import Selection

Reduction = Literal["max", "sum"]


@overload
def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, compress_block: int = 32, compress_stride: int = 16, block_size: int = 64, n: int = 16,
    first: int = 1, local: int = 2, scale: float | None = None, q_pos: Tensor | None = None, S_kv: int | None = None,
    cu_seqlens: CuSeqlens | None = None, max_seqlen: int | None = None, return_lse: Literal[False] = False, backend: str | None = None,
) -> tuple[Tensor, Selection]: ...  # fmt: skip
@overload
def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, compress_block: int = 32, compress_stride: int = 16, block_size: int = 64, n: int = 16,
    first: int = 1, local: int = 2, scale: float | None = None, q_pos: Tensor | None = None, S_kv: int | None = None,
    cu_seqlens: CuSeqlens | None = None, max_seqlen: int | None = None, return_lse: Literal[True], backend: str | None = None,
) -> tuple[Tensor, Selection, Tensor]: ...  # fmt: skip
def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, compress_block: int = 32, compress_stride: int = 16,
    block_size: int = 64, n: int = 16, first: int = 1, local: int = 2, scale: float | None = None,
    q_pos: Tensor | None = None, S_kv: int | None = None, cu_seqlens: CuSeqlens | None = None,
    max_seqlen: int | None = None, return_lse: bool = False, backend: str | None = None,
) -> Any:  # fmt: skip
    """Attention of every query row to the compressed keys that it sees, and its n best blocks (NSA, arXiv 2502.11089,
    Eq. 7-10).

    Compressed key i stands for the keys [i * compress_stride, i * compress_stride + compress_block). A row sees it once
    it sees the last of these keys. The importance of a block is the sum of the weights p of all h heads of the group:
    every piece of compress_stride keys adds p of the compressed keys that cover it to the block that holds it (Eq. 9
    and 10). The first blocks and the local last visible ones are always chosen, then the most important
    ones; ties go to the lower block. Neither p nor the importance of all rows is ever in memory.

    Differentiable in q, k_cmp and v_cmp; there is no gradient through the choice. Bit-equal from run to run.

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for one query per sequence (decode): G KV groups of h heads. float16, bfloat16,
            float32 or float64; k_cmp and v_cmp likewise, of the same dtype and device.
        k_cmp: [B,G,C,Dk], C = (S_kv - compress_block) // compress_stride + 1, or 0 for shorter sequences.
        v_cmp: [B,G,C,Dv].
        compress_block: keys that a compressed key covers: a multiple of compress_stride, at most block_size.
        compress_stride: keys from one compressed key to the next.
        block_size: keys of a selection block, a multiple of compress_stride.
        n: blocks per row.
        first: blocks at the start of the sequence that are always chosen.
        local: last visible blocks, the current one among them, that are always chosen.
        scale: factor of the logits, by default 1/sqrt(Dk).
        q_pos: [S] or [B,S] int32 or int64, positions of the rows, by default S_kv - S + s.
        S_kv: keys of the sequence, by default S.
        cu_seqlens: for a packed batch (docs/varlen.md): [N+1] int32 or int64 on the CPU or on q's device, or a list;
            sequence i has the rows, which are also its keys, [cu_seqlens[i], cu_seqlens[i+1]). q is then [T,G,h,Dk], k_cmp [C,G,Dk] and
            v_cmp [C,G,Dv]: sequence i has its own compressed keys [cu_cmp[i], cu_cmp[i+1]), cu_cmp =
            `compressed_cu_seqlens(cu_seqlens, ...)`, and C is cu_cmp[N] or more, at most (T - compress_block) //
            compress_stride + 1. Not together with q_pos or S_kv. Bounds on a GPU are not checked.
        max_seqlen: with cu_seqlens: no sequence has more rows. It bounds the search for the best blocks where
            cu_seqlens is on a GPU; a number that is too small there leaves rows beyond it the first blocks alone.
        return_lse: also return the log-sum-exp.
        backend: the name of a backend to force (`nsa-sel doctor`); else `use_backend`, then NSA_SEL_BACKEND, then the
            policy decides.

    Returns:
        (o, selection), or (o, selection, lse): o [B,S,G,h,Dv] ([B,G,h,Dv] for decode) in q's dtype, 0 for rows that see
        no compressed key; the `Selection` of whole blocks, for `selection_attention`; lse [B,S,G,h], the natural
        logarithm, float32 (float64 for float64 inputs), -inf for rows that see no compressed key. Of a packed batch: o
        [T,G,h,Dv], lse [T,G,h], and the `Selection` of [1,T,G,n,2] for `selection_attention_varlen`, in positions of
        each row's own sequence; rows after the last sequence get o = 0, lse = -inf and no block.

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: as `selection_attention`.
    """
    transforms.check_transforms(q, k_cmp, v_cmp, name="compressed_attention")
    check_flag("return_lse", return_lse)
    check_longest(max_seqlen, cu_seqlens)
    rule = Rule(compress_block, compress_stride, block_size, n, first, local)
    traced = transforms.traces(q, k_cmp, v_cmp)
    if traced or cu_seqlens is not None:
        check_tensors(q=q, k_cmp=k_cmp, v_cmp=v_cmp)
    if not traced:
        q, k_cmp, v_cmp = transforms.materialized(q, k_cmp, v_cmp)
    q, k_cmp, v_cmp = transforms.in_autocast_dtype(q, k_cmp, v_cmp)
    needs_grad = transforms.needs_grad(q, k_cmp, v_cmp)
    if cu_seqlens is not None:
        rows, k, v, number, bounds = check_packed_choose(q, k_cmp, v_cmp, rule, scale, q_pos, S_kv, cu_seqlens, max_seqlen)
        o, lse, ranges = choose.attend(rows, k, v, rule, len(q), number, None, needs_grad, backend, bounds)
    elif traced:
        rows, length, number, q_pos = check_choose(q, k_cmp, v_cmp, rule, scale, q_pos, S_kv, fake=True)
        o, lse, ranges = choose.attend(rows, k_cmp, v_cmp, rule, length, number, q_pos, needs_grad, backend)
    else:
        o, lse, ranges = run.attend(choose.checked(q, k_cmp, v_cmp, rule, S_kv, scale, q_pos, needs_grad, backend))
    selection = Selection.from_ranges(ranges, block_size, disjoint=True)
    if q.dim() == 4:
        o, lse = (x.squeeze(1 if cu_seqlens is None else 0) for x in (o, lse))
    return (o, selection, lse) if return_lse else (o, selection)


def choose_blocks(
    q: Tensor, k: Tensor, *, block_size: int = 128, n: int = 16, first: int = 0, local: int = 1,
    reduce: Reduction = "max", heads: Reduction = "sum", softmax: bool = False,
    activation: Literal["relu"] | None = None, tail: bool = False, lse: Tensor | None = None,
    compress_block: int = 1, compress_stride: int = 1, scale: float | None = None, q_pos: Tensor | None = None,
    S_kv: int | None = None, cu_seqlens: CuSeqlens | None = None, max_seqlen: int | None = None, backend: str | None = None,
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
        cu_seqlens, max_seqlen: for a packed batch, as of `compressed_attention`: q is then [T,G,h,Dk], and k [T,G,Dk] or
            [T,1,Dk], one index key per key. Not together with tail, lse, q_pos or S_kv.
        backend: the name of a backend to force (`nsa-sel doctor`); else `use_backend`, then NSA_SEL_BACKEND, then the
            policy decides.

    Returns:
        The `Selection` of whole blocks, with ranges [B,S,G,n,2], for `selection_attention`. Without softmax, a block
        none of whose index keys the row sees is chosen only if forced. With tail, ranges are [B,S,G,n+1,2], and the
        last one is the row's incomplete block, of which causal attention reads the keys up to the row's position, or
        [0, 0). Of a packed batch: ranges [1,T,G,n,2], for `selection_attention_varlen`, in positions of each row's own
        sequence; rows after the last sequence get no block.

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: as `selection_attention`.
    """
    rule = Rule(compress_block, compress_stride, block_size, n, first, local)
    pool = check_pool(rule, reduce, heads, softmax, activation, tail)
    q, k = _plain("choose_blocks", q, k)
    if lse is not None:
        check_tensors(lse=lse)
    check_longest(max_seqlen, cu_seqlens)
    if cu_seqlens is not None:
        index, bounds = check_packed_index(q, k, rule, pool, tail, scale, cu_seqlens, max_seqlen, lse=lse, q_pos=q_pos, S_kv=S_kv)
        return Selection.from_ranges(choose.best_blocks(index, rule, pool, backend, bounds=bounds), block_size, disjoint=True)
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
    means = BlockMean(block_size, block_size)(k.transpose(1, 2)).repeat_interleave(q.shape[-2], 1)
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
        coarse = Rule(4 * compress_block, 4 * compress_stride, 4 * compress_block, n, first, local)
        means = BlockMean(coarse.compress_block, coarse.compress_stride)(k.transpose(1, 2))
        index = check_index(q, means, coarse, pool, None, scale, q_pos, k.shape[2], transforms.traces(q, k))
        lse = choose.best_blocks(index, coarse, None, backend)
    means = BlockMean(compress_block, compress_stride)(k.transpose(1, 2))
    return _choose(q, means, rule, pool, lse, scale, q_pos, k.shape[2], backend)


def chosen_blocks(q: Tensor, k: Tensor, rule: Rule, pool: Pool, q_pos: Tensor | None) -> Tensor:
    """Return block indices [B,S,G,n] int32 of `choose_blocks`, for models whose indexer returns them."""
    q, k = _plain("choose_blocks", q, k)
    index = check_index(q, k, rule, pool, None, None, q_pos, None, transforms.traces(q, k))
    return choose.best_blocks(index, rule, pool, None, indices=True)


def _choose(
    q: Tensor, k: Tensor, rule: Rule, pool: Pool, lse: Tensor | None, scale: float | None, q_pos: Tensor | None, S_kv: int | None,
    backend: str | None, tail: bool = False,
) -> Selection:  # fmt: skip
    """Choose for the tensors that `_plain` returned. tail: add the block of the row's position, if the row does not see
    all of it. Attention to few rows reads block indices."""
    index = check_index(q, k, rule, pool, lse, scale, q_pos, S_kv, transforms.traces(q, k))
    if index.q.shape[1] <= FEW_TOKENS:
        return Selection.from_blocks(choose.best_blocks(index, rule, pool, backend, tail, indices=True), rule.block_size, disjoint=True)
    return Selection.from_ranges(choose.best_blocks(index, rule, pool, backend, tail), rule.block_size, disjoint=True)


def _plain(name: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k as kernels take them: dense, materialized, cast by autocast, without gradient."""
    check_tensors(q=q, k=k)
    transforms.check_transforms(q, k, name=name)
    if not transforms.traces(q, k):
        q, k, _ = transforms.materialized(q, k, k)
    q, k, _ = transforms.in_autocast_dtype(q, k, k)
    return q.detach(), k.detach()
