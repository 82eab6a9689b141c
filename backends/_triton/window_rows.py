"""Which keys a row sees through a sliding window, and arguments that all window kernels take.

Row s at position t = start + s sees the keys t - window + 1 to t. In a packed batch a row sees only keys of its own
sequence, and padding rows, after the last sequence, see none.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._triton.arguments import Dims, Heads, split_dims
from nsa_sel.backends._triton.tma import aligned, descriptor
from nsa_sel.core.call import WindowCall
from nsa_sel.settings.schema import KernelConfig


class Sizes(NamedTuple):
    """Sizes, as kernels take them."""

    S: int
    S_kv: int
    G: int
    start: int  # position of row 0
    window: int
    tiles: int  # tiles of rows, or of keys


class Strides(NamedTuple):
    """Strides in elements. The last dimension is contiguous."""

    q: tuple[int, ...]  # b, s, g, h
    k: tuple[int, ...]  # b, g, n
    v: tuple[int, ...]  # b, g, n


@triton.jit
def keys_of_rows(bounds, s, sizes):
    """Return the keys [low, high) that each of the rows s sees; low >= high for padding. low never decreases with s."""
    begin = 0
    if bounds is not None:
        begin = tl.load(bounds + s)
    return tl.maximum(sizes.start + s - sizes.window + 1, begin), sizes.start + s + 1


@triton.jit
def rows_of_keys(bounds, key, sizes):
    """Return the rows [low, high) that see each of the keys `key` (which exist if key < S_kv). high may exceed the last
    row."""
    high = key + sizes.window
    if bounds is not None:
        high = tl.minimum(high, tl.load(bounds + sizes.S + key, mask=key < sizes.S_kv, other=0))
    return key - sizes.start, high - sizes.start


def dims_of(call: WindowCall) -> Dims:
    return split_dims(heads_of(call))


def heads_of(call: WindowCall) -> Heads:
    _, _, _, h, Dk = call.q.shape
    return Heads(call.q.dtype, h, Dk, call.v.shape[3], 0, 0)


def strides_of(call: WindowCall) -> Strides:
    return Strides(call.q.stride()[:4], call.k.stride()[:3], call.v.stride()[:3])


def sizes_of(call: WindowCall, tiles: int) -> Sizes:
    S, G, S_kv = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    return Sizes(S, S_kv, G, S_kv - S, min(call.window, S_kv), tiles)


def key_value_descriptors(call: WindowCall, dims: Dims, block_k: int, config: KernelConfig) -> tuple[TensorDescriptor | None, ...]:
    """Return TMA descriptors of k, k's second column tile and v for block_k keys; None for pointer loads."""
    if config.loads != "tma" or not (aligned(call.k) and aligned(call.v)):
        return None, None, None
    rest = descriptor(call.k, block_k, dims.BLOCK_REST) if dims.BLOCK_REST else None
    return descriptor(call.k, block_k, dims.BLOCK_D), rest, descriptor(call.v, block_k, dims.BLOCK_DV)
