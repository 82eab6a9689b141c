"""Attention to the last keys before every row: the third branch of NSA's layer."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor
from torch.compiler import is_compiling

from nsa_sel.core import transforms
from nsa_sel.core.arguments import Bounds, CuSeqlens, check_flag, check_positive, check_tensors
from nsa_sel.core.check import check_scale, check_sizes
from nsa_sel.core.packed import as_batch, check_packed_sizes, check_rows_are_keys
from nsa_sel.core.window import SlidingCall, attend
from nsa_sel.errors import ArgumentError


@overload
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, scale: float | None = None, cu_seqlens: CuSeqlens | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, scale: float | None = None, cu_seqlens: CuSeqlens | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def sliding_window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float | None = None,
    cu_seqlens: CuSeqlens | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of every query row to the last `window` keys, its own among them (NSA, arXiv 2502.11089, Section
    3.3.3).

    Row s stands at position t = S_kv - S + s and attends to the keys max(0, t - window + 1) to t. CUDA kernels on
    Hopper, Triton kernels on other GPUs, chunks of scaled_dot_product_attention elsewhere; none holds more than a small
    part of the logits. Differentiable in q, k and v; bit-equal from run to run. May be part of a function that
    torch.compile traces.

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for one query per sequence (decode): G KV groups of h heads. float16, bfloat16,
            float32 or float64; k and v likewise, of the same dtype and device.
        k: [B,G,S_kv,Dk]; at least S keys.
        v: [B,G,S_kv,Dv].
        window: keys that a row attends to.
        scale: factor of the logits, by default 1/sqrt(Dk).
        cu_seqlens: for a packed batch (docs/varlen.md): [N+1] int32 or int64 on the CPU or on q's device, or a list;
            sequence i has the rows, which are also its keys, [cu_seqlens[i], cu_seqlens[i+1]), and no window reaches
            beyond its beginning. q is then [T,G,h,Dk], k [T,G,Dk], v [T,G,Dv]. Bounds on a GPU are not checked.
        return_lse: also return the log-sum-exp.

    Returns:
        o [B,S,G,h,Dv] ([B,G,h,Dv] for decode) in q's dtype, or (o, lse): lse [B,S,G,h], the natural logarithm, float32
        (float64 for float64 inputs). Of a packed batch: o [T,G,h,Dv], lse [T,G,h]; rows after the last sequence get o =
        0 and lse = -inf.

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: a transform of torch.func, make_fx, FakeTensorMode or torch.jit.trace traces the call.
    """
    plain = transforms.plain(q, k, v)
    if not plain and is_compiling():
        transforms.check_transforms(q, k, v, name="sliding_window_attention")
    elif not plain:
        transforms.check_traced("sliding_window_attention", q, k, v)
    check_flag("return_lse", return_lse)
    check_positive("window", window)
    check_tensors(q=q, k=k, v=v)
    q, k, v = transforms.in_autocast_dtype(*((q, k, v) if is_compiling() else transforms.materialized(q, k, v)))
    if cu_seqlens is not None:
        o, lse = _packed(q, k, v, window, scale, cu_seqlens, return_lse)
        return (o, lse) if return_lse else o
    rows, scale = check_sizes(q, k, v), check_scale(scale, q.shape[-1])
    S, S_kv = rows.shape[1], k.shape[2]
    if S > S_kv:
        raise ArgumentError(
            "q", f"of S = {S} rows", f"at most S_kv = {S_kv} rows", "pass the keys and values of every row, its own included"
        )
    o, lse = attend(SlidingCall(rows, k, v, window, scale), return_lse)
    if q.dim() == 4:
        o, lse = o.squeeze(1), None if lse is None else lse.squeeze(1)
    return (o, lse) if return_lse else o


def _packed(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None, cu_seqlens: CuSeqlens, return_lse: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return o [T,G,h,Dv] and lse [T,G,h] of a packed batch."""
    check_packed_sizes(q=q, k=k, v=v)
    check_rows_are_keys(q, "k", k)
    bounds = Bounds.of("cu_seqlens", cu_seqlens, len(q), q)
    rows, k, v = as_batch(q, k, v)
    check_sizes(rows, k, v)
    o, lse = attend(SlidingCall(rows, k, v, window, check_scale(scale, q.shape[-1]), bounds), return_lse)
    return o.squeeze(0), None if lse is None else lse.squeeze(0)
