"""Sliding windows on Hopper, with the kernels for selected blocks: TMA, wgmma, warp specialization (arithmetic.py).

A tile of keys is one CTA's work, as few rows see it.
"""

from __future__ import annotations

from torch import Tensor

from nsa_sel.backends.cupy_cuda import arithmetic, launch
from nsa_sel.backends.cupy_cuda.arithmetic import BLOCK, Arithmetic
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.core.call import WindowCall
from nsa_sel.core.request import DeviceInfo


def supports(call: WindowCall, device: DeviceInfo, *others: Tensor) -> bool:
    """Return whether the kernels compute this call on `device`. others: further tensors that a backward pass loads
    through TMA."""
    sixteen_bit = call.q.element_size() == 2  # bfloat16, float16
    return sixteen_bit and call.bounds is None and arithmetic.supports(call, device, *others)


def forward(call: WindowCall, device: DeviceInfo) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h] in float32."""
    return arithmetic.forward(call, keys_of(call), device)


def dq(call: WindowCall, device: DeviceInfo, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return dq [B,S,G,h,Dk] and delta [B,S,G,h] for dk and dv. o, lse and dlse are contiguous."""
    return arithmetic.dq(call, keys_of(call), device, o, lse, do, dlse)


def dkdv(call: WindowCall, device: DeviceInfo, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from contiguous lse and delta [B,S,G,h]."""
    k, v = call.k, call.v
    tiles = -(-k.shape[2] // BLOCK)
    lists = k.shape[0] * k.shape[1] * tiles
    dk, dv = unwritten(k, *k.shape), unwritten(v, *v.shape)
    key_to_rows = (0, 0, 0, 0, lists, tiles, 0, 0, 1)  # nothing of it is in memory
    arithmetic.start_dkdv(
        call, keys_of(call), device, lists, lse, do, delta, *key_to_rows, *launch.pointers(None, None, dk, dv)
    )  # fmt: skip
    return dk, dv


def keys_of(call: WindowCall) -> Arithmetic:
    """Return the kernel parameters that describe the window."""
    return Arithmetic({"WINDOW": 1}, 0, min(call.window, call.k.shape[2]))
