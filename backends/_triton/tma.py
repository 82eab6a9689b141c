"""TMA descriptors (sm_90 and newer) for tiles of K and V, and for tiles of rows of q and do."""

from __future__ import annotations

import functools

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._common import known
from nsa_sel.backends._driver import bind_context, thread
from nsa_sel.backends._triton.kernel import REMEMBERED
from nsa_sel.backends._triton.tiles import MIN_TILE
from nsa_sel.core.call import Call


@known
def tma_fits(call: Call) -> bool:
    """Return whether TMA can load this call's blocks: sm_90 or newer, whole blocks, 16-byte aligned bases and
    strides."""
    size, k, v = call.selection.block_size, call.k, call.v
    if size is None or size % MIN_TILE:
        return False
    if call.device.kind == "cuda" and (call.device.sm or 0) < 90:
        return False
    (k_batch, k_group, k_key, _), (v_batch, v_group, v_key, _) = k.stride(), v.stride()
    numbers = k_batch | k_group | k_key | v_batch | v_group | v_key
    return (k.data_ptr() | v.data_ptr() | numbers * k.element_size()) % 16 == 0 and k.shape[2] < 2**31


class CheckedDescriptor(TensorDescriptor):  # type: ignore[misc]
    """A TensorDescriptor without Triton's checks, which would repeat those of `tma_fits`."""

    def __post_init__(self) -> None:
        pass


def descriptor(x: Tensor, block_l: int, width: int) -> CheckedDescriptor:
    """Return a descriptor of k or v for tiles of block_l keys of one batch entry and group, `width` columns wide."""
    return _descriptor(x, [1, 1, block_l, width])


def row_descriptor(x: Tensor, tokens: int, width: int) -> CheckedDescriptor:
    """Return a descriptor of x [B,S,G,h,D] for tiles of `tokens` rows with all heads of a (b, g), `width` columns
    wide."""
    return _descriptor(x, [1, tokens, 1, x.shape[3], width])


def _descriptor(x: Tensor, tile: list[int]) -> CheckedDescriptor:
    if x.get_device() not in thread.bound:
        bind_context(x.get_device())  # Triton's launcher encodes the descriptor before it binds a context
    return CheckedDescriptor(x, x.shape, x.stride(), tile)


def aligned(x: Tensor) -> bool:
    """Return whether the base and all strides but the last (which is 1) are multiples of 16 bytes, as TMA requires."""
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and _strides_fit(x.stride(), x.element_size())


@functools.lru_cache(REMEMBERED)
def _strides_fit(strides: tuple[int, ...], size: int) -> bool:
    return not any(n * size % 16 for n in strides[:-1])
