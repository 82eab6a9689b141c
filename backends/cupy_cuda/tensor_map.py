"""Tensor maps: how TMA (sm_90 and newer) addresses tiles of a tensor, encoded by the driver.

A kernel takes the 128 bytes as `TensorMap` (hopper.cuh), in its `Arguments`, which are `const __grid_constant__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_sel.backends import _driver
from nsa_sel.errors import BackendError
from nsa_sel.quantize import STORED

# Of the driver's enumerations (cuda.h): CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion.
UINT8, FLOAT16, BFLOAT16 = 0, 6, 9
SWIZZLE_64_BYTES, SWIZZLE_128_BYTES = 2, 3
NO_PROMOTION, PROMOTE_TO_256_BYTES = 0, 3
_TYPES = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, STORED: UINT8}


def tensor_map(x: Tensor, box_rows: int, box_cols: int, promoted: bool = True) -> bytes:
    """The map of k or v [B,G,S_kv,D], in tiles of box_rows keys by box_cols columns. Outer strides are multiples of 16 bytes.

    Tiles are swizzled by the bytes of their columns, 128, or 64 of e4m3. Coordinates are (column, key, g, b); what lies outside reads as
    zeros.
    promoted: the L2 cache fetches 256 bytes for 128, which are a row of two adjacent tiles. Raises BackendError if the driver refuses.
    """
    return _map(x, tuple(x.shape), tuple(x.stride()), (1, 1, box_rows, box_cols), promoted)


def key_group_map(x: Tensor) -> bytes:
    """The map of k or v in tiles of eight keys with all columns, a multiple of 64, in the order (64 columns, key, which 64 columns); else
    as `tensor_map`. Coordinates are (0, key, 0, g, b)."""
    (B, G, S_kv, D), (b, g, n, _) = x.shape, x.stride()
    return _map(x, (B, G, D // 64, S_kv, 64), (b, g, 64, n, 1), (1, 1, D // 64, 8, 64), True)


def row_map(x: Tensor, tokens: int) -> bytes:
    """The map of q or do [B,S,G,h,D], in tiles of `tokens` tokens of one group, with all heads, by 64 columns; else as `tensor_map`.
    Coordinates are (column, head, g, s, b); rows of a tile are (token, head)."""
    return _map(x, tuple(x.shape), tuple(x.stride()), (1, tokens, 1, x.shape[3], 64), True)


def _map(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], promoted: bool) -> bytes:
    address, encode = x.data_ptr(), _encoder(x.get_device(), x.dtype, shape, strides, box, promoted)
    found: bytes = encode(address)
    if _driver.thread.recording is not None:
        _driver.thread.recording.encoders[found] = address, encode
    return found


@functools.lru_cache(maxsize=128)
def _encoder(*facts: Any) -> Callable[[int], bytes]:
    """`_encoded` as a function of the address, which remembers maps."""
    return functools.lru_cache(maxsize=128)(functools.partial(_encoded, *facts))


def _encoded(
    device: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], promoted: bool, address: int
) -> bytes:  # fmt: skip
    from cupy_backends.cuda.api import runtime

    runtime.setDevice(device)  # encoding needs a context, and a new thread has none
    size = dtype.itemsize
    packed = -(-shape[-1] * size // 16) * 16  # the stride of a dimension of one element is never used, but checked
    steps = tuple(size * step if count > 1 else packed for step, count in zip(strides[:-1], shape[:-1], strict=True))
    status, found = _driver.encoded_map(
        _driver.encode(), _TYPES[dtype], address, shape, steps, box,
        SWIZZLE_64_BYTES if box[-1] * size == 64 else SWIZZLE_128_BYTES, PROMOTE_TO_256_BYTES if promoted else NO_PROMOTION,
    )  # fmt: skip
    if status:
        raise BackendError(
            f"the driver refuses (error {status}) a tensor map of {dtype} {shape} with strides {strides} at {address:#x}, in tiles of"
            f" {box}; allowed: 16-byte aligned rows, boxes up to 256, 128 bytes of columns. Remedy: call .contiguous() on q, k and v."
        )
    return found
