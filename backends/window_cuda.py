"""Sliding-window attention with TMA and wgmma on Hopper (cupy_cuda/window.py).

The Triton kernels of window_triton.py compute all other calls: packed batches, few rows, other head dims, float32, and
tensors that TMA cannot load. Triton's dq is faster with Dk = Dv = 64 (docs/kernels.md, "Tried and dropped").
"""

from __future__ import annotations

from torch import Tensor

from nsa_sel.backends import window_triton
from nsa_sel.backends._triton.arguments import NARROW
from nsa_sel.backends.cupy_cuda import window as cuda
from nsa_sel.core.call import WindowCall, device_info


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return contiguous o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32. See `WindowCall`; scale may have any
    sign."""
    call, device = WindowCall.of(q, k, v, window, scale, bounds), device_info(q.device)
    return cuda.forward(call, device) if cuda.supports(call, device) else window_triton.forward(q, k, v, window, scale, bounds)


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, window: int, scale: float,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return contiguous dq, dk, dv in the dtypes of q, k, v, and delta [B,S,G,h].

    o, lse and dlse are contiguous; do has a contiguous last dimension.
    """
    call, device = WindowCall.of(q, k, v, window, scale, bounds), device_info(q.device)
    if not cuda.supports(call, device, do):
        return window_triton.backward(q, k, v, o, lse, do, dlse, window, scale, bounds)
    if q.shape[4] + v.shape[3] <= NARROW:
        dq, _, delta = window_triton.dq(call, o, lse, do, dlse)
    else:
        dq, delta = cuda.dq(call, device, o, lse, do, dlse)
    return dq if scale >= 0 else dq.neg_(), *cuda.dkdv(call, device, lse, do, delta), delta
