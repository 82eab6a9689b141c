"""Selection calls with the signatures of other libraries: a model moves over by changing one import line.

    from nsa_sel.compat import parallel_nsa                  # for fla.ops.nsa (flash-linear-attention)
    from nsa_sel.compat import topk_sparse_attention         # for native_sparse_attention.ops (native-sparse-attention-triton)
    from nsa_sel.compat import FSA_topk_sparse_attention     # for fsa.ops (Flash-Sparse-Attention)

They are differentiable, and choose a backend as `selection_attention` does. They do not copy q, k or v; with cu_seqlens, k and v may be
copied as described in `selection_attention_varlen`. docs/compat.md lists where results differ from the originals' on purpose.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from nsa_sel.core.bounds import CuSeqlens
from nsa_sel.core.entry import selection_attention
from nsa_sel.core.packed import packed_attention
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection


def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: CuSeqlens | tuple[CuSeqlens, CuSeqlens] | None = None,
    *,
    block_aligned: bool = False,
) -> Tensor:
    """The selection branch of flash-linear-attention's `fla.ops.nsa.parallel_nsa`; the other branches are not computed.

    Args:
        q: [B,TQ,HQ,K], the last TQ of T positions; dtypes as of `selection_attention`.
        k: [B,T,H,K].
        v: [B,T,H,V].
        g_cmp: must be None: the gate of the compressed branch.
        g_slc: [B,TQ,HQ] gate that multiplies o.
        g_swa: ignored, as in the original without a window.
        block_indices: [B,TQ,H,S] blocks of block_size keys in any order; negative and future ones select nothing.
        block_counts: [B,TQ,H], how many of a row's first entries count. A number has no effect, as in the original.
        block_size: keys of a block.
        window_size: must be 0: the sliding-window branch.
        scale: factor of the logits, by default 1/sqrt(K).
        cu_seqlens: [N+1] bounds of packed sequences, with B = 1; a tuple is one for queries and one for keys.
        block_aligned: as of `selection_attention_varlen`.

    Returns:
        o [B,TQ,HQ,V].

    Raises:
        ArgumentError: bad input; an argument of another branch, with what computes that branch.
        BackendError: as `selection_attention`.
    """
    if g_cmp is not None:
        raise ArgumentError(
            "g_cmp", "given", "None: this computes only the selection branch",
            "add g_cmp.unsqueeze(-1) times the output of nsa_sel.compressed_attention to what this returns, or call nsa_sel.nsa_attention",
        )  # fmt: skip
    if block_indices is None:
        raise ArgumentError(
            "block_indices", None, "a tensor [B,TQ,H,S]", "select blocks by nsa_sel.compressed_attention, or by Selection.from_scores"
        )
    if window_size != 0:
        raise ArgumentError(
            "window_size", window_size, "0: this computes only the selection branch",
            "add g_swa.unsqueeze(-1) times the output of nsa_sel.sliding_window_attention",
        )  # fmt: skip
    if not isinstance(block_counts, Tensor | int):
        raise ArgumentError("block_counts", shown(block_counts), "a tensor [B,TQ,H], or a number", "leave it out: all entries count")
    grouped = _by_group(q, k, 4, "[B,TQ,HQ,K]", "[B,T,H,K]")
    selection = Selection.from_blocks(block_indices, block_size, block_counts if isinstance(block_counts, Tensor) else None)
    o: Tensor
    if cu_seqlens is None:
        kt, vt = k.transpose(1, 2), v.transpose(1, 2)
        o = selection_attention(grouped, kt, vt, selection, scale=scale, q_pos=None, return_lse=False, backend=None)
    else:
        if q.shape[0] != 1:
            raise ArgumentError("q", f"of {q.shape[0]} batch entries", "1 with cu_seqlens", "pack the sequences into one entry")
        pair = isinstance(cu_seqlens, tuple) and not all(isinstance(bound, int) for bound in cu_seqlens)
        cu_q, cu_k = cast(tuple[CuSeqlens, CuSeqlens | None], cu_seqlens if pair else (cu_seqlens, None))
        o = _packed(grouped[0], k[0], v[0], selection, cu_q, cu_k, scale, block_aligned).unsqueeze(0)
    o = o.flatten(2, 3)
    return o if g_slc is None else o * g_slc.unsqueeze(-1)


def topk_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    topk_idx: Tensor,
    block_size: int,
    cu_seqlens: CuSeqlens,
    softmax_scale: float | None = None,
    *,
    block_aligned: bool = False,
) -> Tensor:
    """`topk_sparse_attention` of native-sparse-attention-triton and Flash-Sparse-Attention, over packed sequences.

    Args:
        q: [T,HQ,D]; dtypes as of `selection_attention`.
        k: [T,H,D].
        v: [T,H,Dv].
        topk_idx: [H,T,topk] blocks of the row's own sequence in any order; -1 is padding, future blocks select nothing.
        block_size: keys of a block.
        cu_seqlens: [N+1] bounds of the sequences.
        softmax_scale: factor of the logits, by default 1/sqrt(D).
        block_aligned: as of `selection_attention_varlen`.

    Returns:
        o [T,HQ,Dv].

    Raises:
        ArgumentError, BackendError: as `selection_attention_varlen`.
    """
    grouped = _by_group(q, k, 3, "[T,HQ,D]", "[T,H,D]")
    shape = topk_idx.shape if isinstance(topk_idx, Tensor) else ()
    if len(shape) != 3 or shape[:2] != (k.shape[1], q.shape[0]):
        value = f"of shape {tuple(shape)}" if isinstance(topk_idx, Tensor) else f"a {type(topk_idx).__name__}"
        raise ArgumentError("topk_idx", value, f"[H={k.shape[1]}, T={q.shape[0]}, topk]", "put groups first, and pad short rows with -1")
    selection = Selection.from_blocks(topk_idx.transpose(0, 1).unsqueeze(0), block_size)
    return _packed(grouped, k, v, selection, cu_seqlens, None, softmax_scale, block_aligned).flatten(1, 2)


FSA_topk_sparse_attention = topk_sparse_attention  # its name in Flash-Sparse-Attention


def _by_group(q: Tensor, k: Tensor, dims: int, q_layout: str, k_layout: str) -> Tensor:
    """A view of q with its heads as [H, HQ / H]; checks the shapes of q and k."""
    for name, x, layout in (("q", q, q_layout), ("k", k, k_layout)):
        if not isinstance(x, torch.Tensor) or x.dim() != dims:
            value = f"of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise ArgumentError(name, value, f"a tensor {layout}", "pass it as to the original")
    HQ, H = q.shape[-2], k.shape[-2]
    if not H or HQ % H:
        raise ArgumentError("q", f"of {HQ} heads", f"a multiple of k's {H} heads", "give every head of k the same number of heads of q")
    return q.view(*q.shape[:-2], H, HQ // H, q.shape[-1])


def _packed(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, cu_q: CuSeqlens, cu_k: CuSeqlens | None, scale: float | None, aligned: bool
) -> Tensor:
    o: Tensor = packed_attention(
        q, k, v, selection, cu_q, cu_k, scale=scale, return_lse=False, backend=None, block_aligned=aligned, align=None
    )
    return o
