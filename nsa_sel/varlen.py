"""Packed batches: sequences of mixed lengths, concatenated, with their bounds in cu_seqlens."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from nsa_sel.core.arguments import Bounds, CuSeqlens, compressed_bounds, is_whole, positions_in_sequences
from nsa_sel.core.check import check_compression
from nsa_sel.core.packed import packed_attention
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection


@overload
def selection_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens | None = None, *,
    scale: float | None = None, return_lse: Literal[False] = False, backend: str | None = None, block_aligned: bool = False,
    align: bool | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def selection_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens | None = None, *,
    scale: float | None = None, return_lse: Literal[True], backend: str | None = None, block_aligned: bool = False,
    align: bool | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def selection_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | Tensor,
    cu_seqlens_q: CuSeqlens,
    cu_seqlens_k: CuSeqlens | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    block_aligned: bool = False,
    align: bool | None = None,
) -> Any:
    """`selection_attention` over concatenated sequences of mixed lengths, in one call.

    Rows are the last positions of their sequence: row s of len_q rows is at len_k - len_q + s; a row before the first
    key sees nothing. Sequences may be empty. Rows and keys after the last sequence are padding: o = 0, lse = -inf,
    gradients 0.

    Some backends need whole blocks: every sequence must then begin at a multiple of block_size. Bounds on a CPU are
    checked for that, a single sequence always does, and `block_aligned` promises it. Otherwise k and v can be copied at
    every call so that each sequence begins with a block: Tk + N * (block_size - 1) keys at most. dk and dv are copied
    back. Lengths are never read from a GPU.

    Args:
        q: [T,G,h,Dk].
        k: [Tk,G,Dk].
        v: [Tk,G,Dv].
        selection: over rows [T,G,n,2], or [T,1,n,2] for all groups, in positions of each row's own sequence: a
            `Selection` of T rows, for example from `Selection.from_blocks` of [T,G,n], or ranges. Keys of other
            sequences are never selected.
        cu_seqlens_q: [N+1] int32 or int64 on the CPU or on q's device, or a list: sequence i has the rows
            [cu_seqlens_q[i], cu_seqlens_q[i+1]). Bounds on a GPU are not checked.
        cu_seqlens_k: likewise of keys, by default cu_seqlens_q.
        scale, return_lse, backend: as of `selection_attention`.
        block_aligned: promises that every sequence's first key is a multiple of block_size; only NSA_DEBUG_TRITON=1
            checks it on a GPU.
        align: whether to copy k and v so that blocks stay whole, where sequences are not block-aligned.
            True: copy. False: never; blocks are then treated as ranges.
            None: on a GPU, copy if the backend that the policy picks for whole blocks prefers them, and the rows may
            select more keys than a copy moves; on any device, copy if such a backend is forced. Under torch.compile,
            copy if `backend` names one that accepts only whole blocks.

    Returns:
        o [T,G,h,Dv], or (o, lse) with lse [T,G,h].

    Raises:
        ArgumentError: bad input; align=True for a selection without a block_size.
        BackendError: as `selection_attention`.

    Example:
        >>> cu = [0, 24, 64]  # two sequences, of 24 and 40 rows
        >>> scores = torch.rand(1, 64, 2, 4)  # of 4 blocks of 16 keys, for 2 groups
        >>> chosen = Selection.from_scores(scores, 2, 16, S_kv=64, q_pos=varlen_positions(cu, T=64))
        >>> o = selection_attention_varlen(q, k, v, chosen, cu)
    """
    return packed_attention(
        q, k, v, selection, cu_seqlens_q, cu_seqlens_k, scale=scale, return_lse=return_lse, backend=backend, block_aligned=block_aligned,
        align=align,
    )  # fmt: skip


def varlen_positions(
    cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens | None = None, *, T: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the position of each row of a packed batch in its own sequence, for `Selection.from_scores(..., q_pos=)`.

    Never waits for a GPU.

    Args:
        cu_seqlens_q, cu_seqlens_k: as of `selection_attention_varlen`.
        T: number of rows.
        device: of the result.

    Returns:
        [T] int64; -1, which selects nothing, for rows after the last sequence or before their first key.

    Raises:
        ArgumentError: bad bounds, or a T that is no number of rows.
    """
    if not is_whole(T) or T < 0:
        raise ArgumentError("T", shown(T), "a whole number >= 0, as an int", "pass the number of rows, q.shape[0]")
    like = torch.empty(0, device=device)
    bounds_q = Bounds.of("cu_seqlens_q", cu_seqlens_q, T, like)
    bounds_k = bounds_q if cu_seqlens_k is None else Bounds.of("cu_seqlens_k", cu_seqlens_k, None, like)
    cu_q, cu_k = bounds_q.on(like), bounds_k.on(like)
    return positions_in_sequences(cu_q, cu_k, T, cu_k, 0)[1].squeeze(0) - 1


def compressed_cu_seqlens(
    cu_seqlens: CuSeqlens, compress_block: int = 32, compress_stride: int = 16, *, device: torch.device | str | None = None
) -> Tensor:
    """Return the cumulative numbers of compressed keys per sequence, as `compressed_attention(..., cu_seqlens=)` lays
    them out.

    Blocks of keys lie within one sequence: sequence i of L_i keys has max(0, (L_i - compress_block) // compress_stride
    + 1) compressed keys, and they follow one another in the order of the sequences. Together they are no more than
    those of one sequence of all T keys, (T - compress_block) // compress_stride + 1, so that the host can make room for
    them. Never waits for a GPU.

    Args:
        cu_seqlens: [N+1] int32 or int64, or a list: sequence i has the keys [cu_seqlens[i], cu_seqlens[i+1]).
        compress_block, compress_stride: keys of a compressed key, and from one to the next.
        device: of the result, by default that of cu_seqlens.

    Returns:
        [N+1] int64: sequence i has the compressed keys [result[i], result[i+1]).

    Raises:
        ArgumentError: bad bounds or sizes.
    """
    check_compression(compress_block, compress_stride)
    if device is None:
        device = cu_seqlens.device if isinstance(cu_seqlens, Tensor) else "cpu"
    like = torch.empty(0, device=device)
    return compressed_bounds(Bounds.of("cu_seqlens", cu_seqlens, None, like).on(like), compress_block, compress_stride)
