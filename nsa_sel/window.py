"""Attention to the last keys before every row: the third branch of NSA's layer."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nsa_sel import window_kernels
from nsa_sel.backends._window import chunks
from nsa_sel.core import transforms
from nsa_sel.core.arguments import check_flag, check_positive, check_tensors
from nsa_sel.core.check import check_scale, check_sizes
from nsa_sel.errors import ArgumentError


@overload
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, scale: float | None = None, return_lse: Literal[False] = False
) -> Tensor: ...
@overload
def sliding_window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, *, scale: float | None = None, return_lse: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, *, scale: float | None = None, return_lse: bool = False) -> Any:
    """Attention of every query row to the last `window` keys, its own among them (NSA, arXiv 2502.11089, Section 3.3.3).

    Row s stands at position t = S_kv - S + s and attends to the keys max(0, t - window + 1) to t. Triton kernels on a GPU, chunks of
    scaled_dot_product_attention elsewhere; neither holds more than a small part of the logits. Differentiable in q, k and v; bit-equal from
    run to run. May be part of a function that torch.compile traces.

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for one query per sequence (decode): G KV groups of h heads. float16, bfloat16, float32 or float64;
            k and v likewise, of the same dtype and device.
        k: [B,G,S_kv,Dk]; at least S keys.
        v: [B,G,S_kv,Dv].
        window: keys that a row attends to.
        scale: factor of the logits, by default 1/sqrt(Dk).
        return_lse: also return the log-sum-exp.

    Returns:
        o [B,S,G,h,Dv] ([B,G,h,Dv] for decode) in q's dtype, or (o, lse): lse [B,S,G,h], the natural logarithm, float32 (float64 for
        float64 inputs).

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: a transform of torch.func, make_fx, FakeTensorMode or torch.jit.trace traces the call.
    """
    if is_compiling():
        transforms.check_transforms(q, k, v, name="sliding_window_attention")
    else:
        transforms.check_traced("sliding_window_attention", q, k, v)
    check_flag("return_lse", return_lse)
    check_positive("window", window)
    check_tensors(q=q, k=k, v=v)
    q, k, v = transforms.in_autocast_dtype(*((q, k, v) if is_compiling() else transforms.materialized(q, k, v)))
    rows, scale = check_sizes(q, k, v), check_scale(scale, q.shape[-1])
    S, S_kv = rows.shape[1], k.shape[2]
    if S > S_kv:
        raise ArgumentError(
            "q", f"of S = {S} rows", f"at most S_kv = {S_kv} rows", "pass the keys and values of every row, its own included"
        )
    o, lse = _attend(rows, k, v, window, scale, return_lse)
    if q.dim() == 4:
        o, lse = o.squeeze(1), None if lse is None else lse.squeeze(1)
    return (o, lse) if return_lse else o


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    if q.numel() == 0:
        return _nothing(q, k, v)
    if window_kernels.takes(q, v):
        if is_compiling():
            return window_kernels.attend(q, k, v, window, scale)
        if not window_kernels.has_failed(q, v):
            try:
                return window_kernels.attend(q, k, v, window, scale)
            except Exception as error:
                window_kernels.note_failure(q, v, error)
    return chunks.attend_seen(q, k, v, window, scale, return_lse)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Empty results that autograd connects with all inputs."""
    o = q[..., :1].expand(*q.shape[:-1], v.shape[-1]) + (k.sum() + v.sum())
    return o, o.sum(-1, dtype=torch.promote_types(q.dtype, torch.float32))
