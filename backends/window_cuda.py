"""Sliding-window attention with TMA and wgmma on Hopper (cupy_cuda/arithmetic.py). A tile of keys is one CTA's work, as
few rows see it.

The Triton kernels of window_triton.py compute all other calls: packed batches, few rows, other head dims, float32, and
tensors that TMA cannot load. Triton's dq is faster with Dk = Dv = 64 (docs/kernels.md, "Tried and dropped").
"""

from __future__ import annotations

from torch import Tensor

from nsa_sel.backends import window_triton
from nsa_sel.backends._triton.arguments import NARROW
from nsa_sel.backends.cupy_cuda import arithmetic, launch
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.core.call import WindowCall, device_info
from nsa_sel.core.request import DeviceInfo


def supports(call: WindowCall, device: DeviceInfo, *others: Tensor) -> bool:
    """Return whether the kernels compute this call on `device`. others: further tensors that a backward pass loads
    through TMA."""
    sixteen_bit = call.q.element_size() == 2  # bfloat16, float16
    return sixteen_bit and call.bounds is None and arithmetic.supports(call, device, *others)


def dkdv(call: WindowCall, device: DeviceInfo, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from contiguous lse and delta [B,S,G,h]."""
    k, v = call.k, call.v
    tiles = -(-k.shape[2] // arithmetic.BLOCK)
    lists = k.shape[0] * k.shape[1] * tiles
    dk, dv = unwritten(k, *k.shape), unwritten(v, *v.shape)
    key_to_rows = (0, 0, 0, 0, lists, tiles, 0, 0, 1)  # nothing of it is in memory
    arithmetic.start_dkdv(call, device, lists, lse, do, delta, *key_to_rows, *launch.pointers(None, None, dk, dv))
    return dk, dv


def forward(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return contiguous o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32. See `WindowCall`; scale may have any
    sign."""
    call, device = WindowCall.of(q, k, v, window, scale, bounds), device_info(q.device)
    return arithmetic.forward(call, device) if supports(call, device) else window_triton.forward(q, k, v, window, scale, bounds)


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None, window: int, scale: float,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return contiguous dq, dk, dv in the dtypes of q, k, v, and delta [B,S,G,h].

    o, lse and dlse are contiguous; do has a contiguous last dimension.
    """
    call, device = WindowCall.of(q, k, v, window, scale, bounds), device_info(q.device)
    if not supports(call, device, do):
        return window_triton.backward(q, k, v, o, lse, do, dlse, window, scale, bounds)
    if q.shape[4] + v.shape[3] <= NARROW:
        dq, _, delta = window_triton.dq(call, o, lse, do, dlse)
    else:
        dq, delta = arithmetic.dq(call, device, o, lse, do, dlse)
    return dq if scale >= 0 else dq.neg_(), *dkdv(call, device, lse, do, delta), delta
