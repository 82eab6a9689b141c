"""Tensor maps: how the tensor memory accelerator (sm_90 and newer) addresses k or v, encoded by the driver for bulk copies of tiles.

A kernel takes the 128 bytes in its `Arguments`, which it takes as `const __grid_constant__`, in a field aligned to 64 bytes:
`struct alignas(64) TensorMap { char bytes[128]; }`, packed as "128s" (launch.py).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from nsa_sel.errors import BackendError

BYTES, ALIGNMENT = 128, 64
# Of the driver's enumerations (cuda.h): CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
FLOAT16, BFLOAT16 = 6, 9
SWIZZLE_128_BYTES = 3
NO_PROMOTION, PROMOTE_TO_256_BYTES = 0, 3


def tensor_map(x: Tensor, box_rows: int, box_cols: int, promoted: bool = True) -> bytes:
    """The map of k or v [B,G,S_kv,D] (any outer strides that are multiples of 16 bytes) in tiles of box_rows keys by box_cols columns.

    Tiles are swizzled by 128 bytes, so that box_cols is at most 64; coordinates are (column, key, g, b), and what lies outside reads as
    zeros. promoted: the L2 cache fetches 256 bytes where 128 are asked for, which are a row of two tiles beside each other. Raises
    BackendError where the driver refuses the tensor.
    """
    return _encoded(x.get_device(), x.dtype, x.data_ptr(), tuple(x.shape), tuple(x.stride()), (1, 1, box_rows, box_cols), promoted)


def row_map(x: Tensor, tokens: int) -> bytes:
    """The map of q or o [B,S,G,h,D] in tiles of so many tokens of one group, with all heads, by 64 columns; otherwise as `tensor_map`.
    Coordinates are (column, head, g, s, b), rows of a tile (token, head)."""
    return _encoded(x.get_device(), x.dtype, x.data_ptr(), tuple(x.shape), tuple(x.stride()), (1, tokens, 1, x.shape[3], 64), True)


@functools.cache  # a cache that grows is a new tensor at every step, and finding the library would take longer than all else
def _encode() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled


@functools.lru_cache(maxsize=1024)  # a map says nothing but these
def _encoded(
    device: int, dtype: torch.dtype, address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], promoted: bool
) -> bytes:  # fmt: skip
    from cupy_backends.cuda.api import runtime

    runtime.setDevice(device)  # encoding needs a context, and a new thread has none
    rank, packed = len(shape), -(-shape[-1] // 8) * 8  # the stride of a dimension of one element is never used, but looked at
    sizes, boxes, ones = (ctypes.c_uint64 * rank)(*shape[::-1]), (ctypes.c_uint32 * rank)(*box[::-1]), (ctypes.c_uint32 * rank)(*[1] * rank)
    outer = zip(strides[-2::-1], shape[-2::-1], strict=True)
    steps = (ctypes.c_uint64 * (rank - 1))(*(2 * (step if size > 1 else packed) for step, size in outer))
    memory = ctypes.create_string_buffer(BYTES + ALIGNMENT)
    start = -ctypes.addressof(memory) % ALIGNMENT
    status = _encode()(
        ctypes.c_void_p(ctypes.addressof(memory) + start), BFLOAT16 if dtype == torch.bfloat16 else FLOAT16, ctypes.c_uint32(rank),
        ctypes.c_void_p(address), sizes, steps, boxes, ones, 0, SWIZZLE_128_BYTES,
        PROMOTE_TO_256_BYTES if promoted else NO_PROMOTION, 0,
    )  # fmt: skip
    if status:
        raise BackendError(
            f"the driver refuses (error {status}) a tensor map of {dtype} {shape} with strides {strides} at {address:#x}, in tiles of"
            f" {box}; allowed: 16-byte aligned rows, boxes up to 256, 64 columns. Remedy: call .contiguous() on q, k and v."
        )
    return memory.raw[start : start + BYTES]
