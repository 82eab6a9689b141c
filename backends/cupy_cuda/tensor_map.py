"""Encode TMA tensor maps (sm_90 and newer), which describe tiles of a tensor, through the driver.

A kernel takes the 128 bytes as `TensorMap` (hopper.cuh), in its `Arguments`, which are `const __grid_constant__`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.errors import BackendError
from nsa_sel.quantize import STORED

# Values of CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion (cuda.h).
UINT8, FLOAT16, BFLOAT16 = 0, 6, 9
SWIZZLE_64_BYTES, SWIZZLE_128_BYTES = 2, 3
NO_PROMOTION, PROMOTE_TO_256_BYTES = 0, 3
_TYPES = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, STORED: UINT8}


def tensor_map(x: Tensor, box_rows: int, box_cols: int, promoted: bool = True) -> bytes:
    """Return the map of k or v [B,G,S_kv,D] for tiles of box_rows keys by box_cols columns. Outer strides are multiples
    of 16 bytes.

    Tiles are swizzled over the bytes of their columns: 128, or 64 for e4m3. Coordinates are (column, key, g, b);
    out-of-bounds elements
    load as zeros. promoted: the L2 cache fetches 256 bytes for 128, i.e. one row of two adjacent tiles. Raises
    BackendError if the driver fails.
    """
    return _map(x, tuple(x.shape), tuple(x.stride()), (1, 1, box_rows, box_cols), promoted)


def key_group_map(x: Tensor) -> bytes:
    """Return the map of k or v for tiles of eight keys with all columns (a multiple of 64), stored as 64-column panels.

    Otherwise like `tensor_map`. Coordinates are (0, key, 0, g, b).
    """
    (B, G, S_kv, D), (b, g, n, _) = x.shape, x.stride()
    return _map(x, (B, G, D // 64, S_kv, 64), (b, g, 64, n, 1), (1, 1, D // 64, 8, 64), True)


def row_map(x: Tensor, tokens: int) -> bytes:
    """Return the map of q or do [B,S,G,h,D] for tiles of `tokens` tokens of one group with all heads, by 64 columns.

    Otherwise like `tensor_map`. Coordinates are (column, head, g, s, b); rows of a tile are (token, head) pairs.
    """
    return _map(x, tuple(x.shape), tuple(x.stride()), (1, tokens, 1, x.shape[3], 64), True)


def _map(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], promoted: bool) -> bytes:
    address, encode = x.data_ptr(), _encoder(x.get_device(), x.dtype, shape, strides, box, promoted)
    data: bytes = encode(address)
    if cuda_driver.thread.recording is not None:
        cuda_driver.thread.recording.encoders[data] = address, encode
    return data


@functools.lru_cache(maxsize=128)
def _encoder(*facts: Any) -> Callable[[int], bytes]:
    """Return `_encoded` as a function of the address, with a cache of maps."""
    return functools.lru_cache(maxsize=128)(functools.partial(_encoded, *facts))


def _encoded(
    device: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], promoted: bool, address: int
) -> bytes:  # fmt: skip
    from cupy_backends.cuda.api import runtime

    runtime.setDevice(device)  # encoding needs a context, and a new thread has none
    size = dtype.itemsize
    packed = -(-shape[-1] * size // 16) * 16  # stride for dimensions of one element: unused, but the driver checks it
    steps = tuple(size * step if count > 1 else packed for step, count in zip(strides[:-1], shape[:-1], strict=True))
    status, data = cuda_driver.encoded_map(
        cuda_driver.encode(), _TYPES[dtype], address, shape, steps, box,
        SWIZZLE_64_BYTES if box[-1] * size == 64 else SWIZZLE_128_BYTES, PROMOTE_TO_256_BYTES if promoted else NO_PROMOTION,
    )  # fmt: skip
    if status:
        raise BackendError(
            f"the driver refuses (error {status}) a tensor map of {dtype} {shape} with strides {strides} at {address:#x}, in tiles of"
            f" {box}; allowed: 16-byte aligned rows, boxes up to 256, 128 bytes of columns. Remedy: call .contiguous() on q, k and v."
        )
    return data
