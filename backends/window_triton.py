"""Sliding-window attention in Triton: one kernel forward, two backward, no atomics.

Forward and dq (with delta) run the kernels of _triton/runs.py, dk and dv that of _triton/window.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_sel.backends._triton import runs
from nsa_sel.backends._triton.arguments import heads_of, narrow_suffix
from nsa_sel.backends._triton.window import dkdv, sizes_of, strides_of
from nsa_sel.core.call import WindowCall
from nsa_sel.settings.schema import KernelConfig

CONFIGS = {  # by kernel and class of head dims (`narrow_suffix`); one that has no config of its own takes the plain one
    "window/forward": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=64, loads="tma"),
    "window/forward-narrow": KernelConfig(block_l=64, num_warps=4, num_stages=2, rows=64, loads="tma"),
    "window/forward-widest": KernelConfig(block_l=32, num_warps=4, num_stages=2, rows=32, loads="tma"),
    "window/dq": KernelConfig(block_l=64, num_warps=4, num_stages=2, rows=64, loads="tma"),
    "window/dq-narrow": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=64, loads="tma"),
    "window/dq-wide": KernelConfig(block_l=32, num_warps=4, num_stages=2, rows=64, loads="tma"),
    "window/dq-widest": KernelConfig(block_l=32, num_warps=4, num_stages=1, rows=16, loads="tma"),
    "window/dkdv": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=32, loads="tma"),
    "window/dkdv-narrow": KernelConfig(block_l=64, num_warps=4, num_stages=3, rows=64, loads="tma"),
    "window/dkdv-wide": KernelConfig(block_l=64, num_warps=8, num_stages=2, rows=32),
    "window/dkdv-widest": KernelConfig(block_l=32, num_warps=4, num_stages=1, rows=32),
}


def config_of(call: WindowCall, kernel: str) -> KernelConfig:
    return CONFIGS.get(kernel + narrow_suffix(heads_of(call.q, call.v)), CONFIGS[kernel])


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return contiguous o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32. See `WindowCall`; scale may have any
    sign."""
    call = WindowCall.of(q, k, v, window, scale, bounds)
    o = q.new_empty(*q.shape[:-1], v.shape[3])
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    _launch(call, config_of(call, "window/forward"), (o, lse))
    return o, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, window: int, scale: float,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return contiguous dq, dk, dv in the dtypes of q, k, v, and delta [B,S,G,h].

    o, lse and dlse are contiguous; do has a contiguous last dimension.
    """
    call = WindowCall.of(q, k, v, window, scale, bounds)
    gradient, lse2, delta = dq(call, o, lse, do, dlse)
    dk, dv = dkdv(call, do, lse2, delta, config_of(call, "window/dkdv"))
    return gradient if scale >= 0 else gradient.neg_(), dk, dv, delta


def dq(call: WindowCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq [B,S,G,h,Dk], and base-2 lse and delta [B,S,G,h] for dk and dv. The scale is positive."""
    gradient, lse2, delta = torch.empty_like(call.q, memory_format=torch.contiguous_format), torch.empty_like(lse), torch.empty_like(lse)
    _launch(call, config_of(call, "window/dq"), (o, lse, do, dlse, gradient, lse2, delta), do)
    return gradient, lse2, delta


def _launch(call: WindowCall, config: KernelConfig, results: tuple[Tensor | None, ...], do: Tensor | None = None) -> None:
    sizes = sizes_of(call, -(-call.q.shape[1] // runs.tokens_of(call, config)))
    runs.launch(call, None, config, (None, None, None, call.bounds), strides_of(call), sizes, results, do)
