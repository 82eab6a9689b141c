"""Packed batches: sequences of mixed lengths laid end to end, with their bounds in cu_seqlens."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from nsa_sel.core.bounds import Bounds, CuSeqlens, positions_in_sequences
from nsa_sel.core.packed import packed_attention
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
    """`selection_attention` over sequences of mixed lengths that lie end to end, in one call. Never waits for a GPU.

    Rows are the last positions of their sequence: row s of len_q rows is at len_k - len_q + s; one before the first key sees nothing.
    Sequences may be empty. Rows and keys behind the last sequence are padding: o = 0, lse = -inf, gradients 0.

    Some backends need whole blocks: every sequence then has to begin at a multiple of block_size. That is known of bounds on the CPU and of
    a single sequence, and promised by `block_aligned`. Otherwise k and v can be copied, at every call, to where each sequence begins with a
    block (room for Tk + N * (block_size - 1) keys; dk and dv are copied back).

    Args:
        q: [T,G,h,Dk].
        k: [Tk,G,Dk].
        v: [Tk,G,Dv].
        selection: over rows [T,G,n,2], in positions of each row's own sequence: a `Selection` of T rows, as `Selection.from_blocks` makes
            it of [T,G,n], or ranges. Nothing of another sequence is ever selected.
        cu_seqlens_q: [N+1] int32 or int64 on the CPU or on q's device, or a list: sequence i has the rows
            [cu_seqlens_q[i], cu_seqlens_q[i+1]). Bounds on a GPU are not checked.
        cu_seqlens_k: likewise of keys, by default cu_seqlens_q.
        scale, return_lse, backend: as of `selection_attention`.
        block_aligned: promises that every sequence's first key is a multiple of block_size; only NSA_DEBUG_TRITON=1 checks it on a GPU.
        align: whether to copy k and v so that blocks stay whole, where they are neither known nor promised to be.
            True: copy. False: never; blocks then count as ranges.
            None: on a GPU, copy where the policy's choice for whole blocks prefers them and the rows may select more keys than a copy
            moves; on any device, copy where such a backend is forced. Under torch.compile, copy where `backend` names one that takes
            nothing else.

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
    """Where in its own sequence each row of a packed batch stands, as `Selection.from_scores(..., q_pos=)` takes it. Reads no GPU.

    Args:
        cu_seqlens_q, cu_seqlens_k: as of `selection_attention_varlen`.
        T: rows.
        device: of the result.

    Returns:
        [T] int64; -1, which selects nothing, for rows behind the last sequence and before their first key.
    """
    like = torch.empty(0, device=device)
    bounds_q = Bounds.of("cu_seqlens_q", cu_seqlens_q, T, like)
    bounds_k = bounds_q if cu_seqlens_k is None else Bounds.of("cu_seqlens_k", cu_seqlens_k, None, like)
    cu_q, cu_k = bounds_q.on(like), bounds_k.on(like)
    return positions_in_sequences(cu_q, cu_k, T, cu_k, 0)[1].squeeze(0) - 1
