"""The loss that trains an indexer: how far its distribution over a row's keys is from that of the attention (MiniMax
Sparse Attention, arXiv 2606.13392)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nsa_sel.core import transforms
from nsa_sel.core.arguments import Bounds, CuSeqlens, check_tensors
from nsa_sel.core.check import as_selection, check_index_loss
from nsa_sel.core.index_loss import Arguments, rows_loss
from nsa_sel.core.packed import arrange, as_batch, check_packed_sizes, check_rows_are_keys
from nsa_sel.core.window import packed_bounds
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection


def indexer_loss(
    q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, selection: Selection | Tensor | None = None, *,
    scale: float | None = None, index_scale: float | None = None, q_pos: Tensor | None = None, cu_seqlens: CuSeqlens | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean", backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Return KL(P || pi) of an indexer: pi are its probabilities, P those of the main attention, over the same keys.

    For a row and a group, with the keys j that the row's selection names and that it may see:

        P_j  = mean over the group's h heads of exp(scale q.k_j - lse)        without gradient
        pi_j = softmax over these keys of index_scale index_q.index_k_j
        loss = sum_j P_j (log P_j - log pi_j)

    Differentiable in index_q and index_k alone; the gradient of an index logit is pi_j - P_j, times that of the row's loss.
    No tensor of rows times keys is ever in memory, and results are bit-equal from run to run. With reduction "mean" or
    "sum" the forward pass computes the gradients as well; with "none" the backward pass computes P a second time.

    Args:
        q: [B,S,G,h,Dk], queries of the main attention: G KV groups of h heads. float16, bfloat16, float32 or float64; any
            strides with a contiguous last dimension; k, index_q and index_k likewise, of the same dtype and device.
        k: [B,G,S_kv,Dk].
        lse: [B,S,G,h], float32 (float64 for float64 inputs): the log-sum-exp that attention over the same keys returned
            (`selection_attention(..., return_lse=True)`, or dense attention's without a selection). With that of another
            set of keys P does not sum to 1, and the gradient is not that of the loss.
        index_q: [B,S,G,Di], index queries, one head per group.
        index_k: [B,S_kv,Di], index keys for all groups, or [B,G,S_kv,Di].
        selection: a `Selection`, or its ranges [B,S,G,n,2]; None for all visible keys (warm-up with dense attention).
        scale: factor of the main logits, by default 1/sqrt(Dk).
        index_scale: factor of the index logits, by default 1/sqrt(Di).
        q_pos: [S] or [B,S] int32 or int64, positions of the rows, by default S_kv - S + s.
        cu_seqlens: for a packed batch (docs/varlen.md): [N+1] int32 or int64 on the CPU or on q's device, or a list;
            sequence i has the rows, which are also its keys, [cu_seqlens[i], cu_seqlens[i+1]). q is then [T,G,h,Dk], k
            [T,G,Dk], lse [T,G,h], index_q [T,G,Di], index_k [T,Di] or [T,G,Di], and the selection is over [1,T,G] or [T,1,G],
            in positions of each row's own sequence. Not together with q_pos. Bounds on a GPU are not checked.
        reduction: "mean" over all rows and groups, "sum", or "none".
        backend: the name of a backend to force (`nsa-sel doctor`); else `use_backend`, then NSA_SEL_BACKEND, then the
            policy decides.

    Returns:
        The loss in lse's dtype, a scalar; with reduction "none" [B,S,G], or [T,G] of a packed batch. Rows that see no
        selected key have a loss of 0, and count in the mean.

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: as `selection_attention`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError("reduction", shown(reduction), "'mean', 'sum' or 'none'", "pass one of these")
    transforms.check_transforms(q, k, lse, index_q, index_k, name="indexer_loss")
    check_tensors(q=q, k=k, lse=lse, index_q=index_q, index_k=index_k)
    q, k, lse = q.detach(), k.detach(), lse.detach()
    traced = transforms.traces(q, k, index_q, index_k)
    if not traced:
        q, k, lse, index_q, index_k = (x.resolve_neg() for x in (q, k, lse, index_q, index_k))
    q, k, index_q, index_k = transforms.in_autocast_dtype(q, k, index_q, index_k)
    bounds = None
    if cu_seqlens is not None:
        q, k, lse, index_q, index_k, selection, q_pos, bounds = _as_batch(q, k, lse, index_q, index_k, selection, q_pos, cu_seqlens)
    checked = check_index_loss(q, k, lse, index_q, index_k, selection, scale, index_scale, q_pos, fake=traced)
    rows = rows_loss(Arguments(*checked, bounds), reduction != "none", backend)
    if reduction == "none":
        return rows if cu_seqlens is None else rows.squeeze(0)
    return rows.sum() if reduction == "sum" else rows.sum() / max(1, rows.numel())


def _as_batch(
    q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, selection: Selection | Tensor | None, q_pos: Tensor | None,
    cu_seqlens: CuSeqlens,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Selection | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the arguments of a packed batch as those of one sequence of all rows and keys, and its bounds without a
    selection."""
    if q_pos is not None:
        raise ArgumentError("q_pos", "given together with cu_seqlens", "one of them", "leave it out: rows are all positions")
    check_packed_sizes(q=q, k=k)
    check_rows_are_keys(q, "k", k)
    T, G = q.shape[:2]
    if index_k.dim() not in (2, 3) or len(index_k) != T:
        raise ArgumentError(
            "index_k", f"of shape {tuple(index_k.shape)}", f"[T={T}, Di] or [T={T}, G={G}, Di]", "pass one index key per key"
        )
    bounds = Bounds.of("cu_seqlens", cu_seqlens, T, q)
    index_k = index_k.unsqueeze(1) if index_k.dim() == 2 else index_k
    rows, k, index_k = as_batch(q, k, index_k)
    if selection is None:
        return rows, k, lse.unsqueeze(0), index_q.unsqueeze(0), index_k, None, None, packed_bounds(bounds.on(q), T)
    batch = arrange(rows, k, k, as_selection(selection), bounds, None, None, False, None, align=True)
    if batch.where is not None:  # sequences begin with blocks
        index_k = index_k.new_zeros(*index_k.shape[:2], batch.k.shape[2], index_k.shape[3]).index_copy(2, batch.where, index_k)
    return rows, batch.k, lse.unsqueeze(0), index_q.unsqueeze(0), index_k, batch.selection, batch.q_pos, None
