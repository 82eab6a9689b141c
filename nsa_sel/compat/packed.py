"""Calls of libraries that pack sequences: native-sparse-attention-triton, Flash-Sparse-Attention, Scalable-Flash-NSA."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_sel import choosing
from nsa_sel.branches import nsa_attention
from nsa_sel.compression import BlockMean
from nsa_sel.core.arguments import CuSeqlens
from nsa_sel.core.packed import packed_attention
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection


def by_group(q: Tensor, k: Tensor, dims: int, q_layout: str, k_layout: str) -> Tensor:
    """Check the shapes of q and k, and return a view of q [..,HQ,D] with its heads split by k's: [..,H,HQ / H,D]."""
    for name, x, layout in (("q", q, q_layout), ("k", k, k_layout)):
        if not isinstance(x, Tensor) or x.dim() != dims:
            raise ArgumentError(name, _kind(x), f"a tensor {layout}", "pass it as to the original")
    HQ, H = q.shape[-2], k.shape[-2]
    if not H or HQ % H:
        raise ArgumentError("q", f"of {HQ} heads", f"a multiple of k's {H} heads", "give every head of k the same number of heads of q")
    return q.view(*q.shape[:-2], H, HQ // H, q.shape[-1])


def by_group_gate(name: str, gate: Tensor, rows: Tensor) -> Tensor:
    """Return a view of a gate [..,HQ] of the rows [..,H,h,D], with its heads as [H, h]."""
    *leading, H, h, _ = rows.shape
    if not isinstance(gate, Tensor) or gate.shape != (*leading, H * h):
        raise ArgumentError(name, _kind(gate), f"a tensor {(*leading, H * h)}", "pass one gate per query and head")
    return gate.reshape(*leading, H, h)


def _kind(x: object) -> str:
    return f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


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
    grouped = by_group(q, k, 3, "[T,HQ,D]", "[T,H,D]")
    shape = topk_idx.shape if isinstance(topk_idx, Tensor) else ()
    if len(shape) != 3 or shape[:2] != (k.shape[1], q.shape[0]):
        layout = f"[H={k.shape[1]}, T={q.shape[0]}, topk]"
        raise ArgumentError("topk_idx", _kind(topk_idx), layout, "put groups first, and pad short rows with -1")
    selection = Selection.from_blocks(topk_idx.transpose(0, 1).unsqueeze(0), block_size)
    o: Tensor = packed_attention(
        grouped, k, v, selection, cu_seqlens, None, scale=softmax_scale, return_lse=False, backend=None, block_aligned=block_aligned,
        align=None,
    )  # fmt: skip
    return o.flatten(1, 2)


FSA_topk_sparse_attention = topk_sparse_attention  # its name in Flash-Sparse-Attention


def compressed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel_size: int,
    kernel_stride: int,
    block_size: int,
    topk: int,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    sm_scale: float | None = None,
    init_blocks: int = 1,
    local_blocks: int = 2,
    parallel_topk_compute: str | bool = "auto",
) -> tuple[Tensor, Tensor]:
    """`compressed_attention` of native-sparse-attention-triton: attention to compressed keys, and the blocks that its
    weights choose.

    Args:
        q: [T,HQ,D], packed sequences; dtypes as of `selection_attention`.
        k: [C,H,D] compressed keys; sequence i has `(length - kernel_size) // kernel_stride + 1` of them, or 0.
        v: [C,H,D].
        kernel_size: keys that a compressed key covers, a multiple of kernel_stride.
        kernel_stride: keys from one compressed key to the next.
        block_size: keys of a selected block.
        topk: blocks per row.
        cu_seqlens_q: [N+1] bounds of the sequences.
        cu_seqlens_k: bounds of their compressed keys, which follow from cu_seqlens_q: not read.
        max_seqlen_q: the longest sequence; bounds the search for blocks. May be None.
        max_seqlen_k: not read.
        sm_scale: factor of the logits, by default 1/sqrt(D).
        init_blocks: first blocks that are always chosen.
        local_blocks: last blocks, the row's own among them, that are always chosen.
        parallel_topk_compute: not read: scores of all rows are never in memory.

    Returns:
        o [T,HQ,D], and topk_idx [H,T,topk] int32, ascending, -1 last: what `topk_sparse_attention` takes. No gradient
        flows through it.

    Raises:
        ArgumentError, BackendError: as `nsa_sel.compressed_attention`.
    """
    grouped = by_group(q, k, 3, "[T,HQ,D]", "[C,H,D]")
    o, selection = choosing.compressed_attention(
        grouped, k, v, compress_block=kernel_size,
        compress_stride=kernel_stride, block_size=block_size, n=topk, first=init_blocks, local=local_blocks, scale=sm_scale,
        cu_seqlens=cu_seqlens_q, max_seqlen=max_seqlen_q,
    )  # fmt: skip
    return o.flatten(1, 2), selection.block_indices[0].transpose(0, 1)


def flash_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    combine_weight: Tensor,
    cu_seqlens: CuSeqlens,
    *,
    kernel_size: int = 32,
    stride: int = 16,
    block_size: int = 64,
    top_n: int = 16,
    num_init_blocks: int = 1,
    num_local_blocks: int = 2,
    window_size: int = 512,
) -> Tensor:
    """The forward pass of Scalable-Flash-Native-Sparse-Attention's `HFNSACore` with mean compression: all three
    branches.

    Args:
        q: [T,HQ,D], packed sequences; dtypes as of `selection_attention`.
        k: [T,H,D].
        v: [T,H,Dv].
        combine_weight: [T,HQ,3]; its sigmoid gates the compressed, the selected and the window branch.
        cu_seqlens: [N+1] bounds of the sequences.
        kernel_size, stride, block_size, top_n, num_init_blocks, num_local_blocks, window_size: fields of `NSAConfig`,
            with its defaults. A row's window has window_size keys before its own, as flash-attn counts.

    Returns:
        o [T,HQ,Dv].

    Raises:
        ArgumentError, BackendError: as `nsa_sel.nsa_attention`.
    """
    rows = by_group(q, k, 3, "[T,HQ,D]", "[T,H,D]")
    gates = torch.stack([by_group_gate("combine_weight", g, rows) for g in combine_weight.unbind(-1)], -1).sigmoid()
    mean = BlockMean(kernel_size, stride)
    return nsa_attention(
        rows, mean(k, cu_seqlens), mean(v, cu_seqlens), k, v, k, v, gates, window=window_size + 1, compress_block=kernel_size,
        compress_stride=stride, block_size=block_size, n=top_n, first=num_init_blocks, local=num_local_blocks, cu_seqlens=cu_seqlens,
    ).flatten(1, 2)  # fmt: skip
