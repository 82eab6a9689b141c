"""Attention to compressed keys, and the blocks that its weights choose: the first branch of NSA's layer."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from nsa_sel.core import choose, run, transforms
from nsa_sel.core.arguments import CuSeqlens, check_flag, check_tensors
from nsa_sel.core.call import Rule
from nsa_sel.core.check import check_choose
from nsa_sel.core.packed import check_longest, check_packed_choose
from nsa_sel.selection import Selection


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
