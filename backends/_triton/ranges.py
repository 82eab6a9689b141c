"""Key ranges of blocks from block indices, and without duplicates.

PyTorch would need about twenty operations, each with the host time of a kernel launch.

This module imports no `Call`: `nsa_sel.core.ranges` uses it to make a `Selection`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.tiles import tile_size
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.launcher.cuda_driver import own_stream, relaxed

ENTRIES = 128  # entries per program: rows of few blocks share one
MOST_SORTED = 1024  # most blocks per row that a program sorts


@triton.jit
def block_ranges_kernel(
    ranges, indices, counts, unique, rows, last, BLOCK: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    """Store the ranges [rows, N, 2] of blocks [rows, N]: [j * BLOCK, (j + 1) * BLOCK), or [0, 0) for j < 0 and past
    counts [rows].

    Grid: one program per R rows.
    indices: the blocks, or None if `ranges` are blocks or empty already.
    unique: if not None, receives the same ranges in ascending order, with [0, 0) for duplicates, and empty ranges last.
    last: the highest block whose end fits the dtype of the ranges.
    """
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    i = tl.arange(0, NP)
    listed = (row < rows)[:, None] & (i < N)[None, :]
    at = row[:, None] * N + i[None, :]
    if indices is None:
        start = tl.maximum(tl.load(ranges + 2 * at, mask=listed, other=0), 0)
        end = tl.load(ranges + 2 * at + 1, mask=listed, other=0)
        block = tl.where(end > start, start // BLOCK, -1).to(start.dtype)
    else:
        block = tl.load(indices + at, mask=listed, other=-1).to(ranges.dtype.element_ty)
        if counts is not None:
            block = tl.where(i[None, :] < tl.load(counts + row, mask=row < rows, other=0)[:, None], block, -1)
        block = tl.minimum(tl.maximum(block, -1), last).to(ranges.dtype.element_ty)
        store_ranges(ranges, tl.maximum(block, 0) * BLOCK, (block + 1) * BLOCK, at, listed)
    if unique is not None:
        store_distinct(unique, block, at, listed, last, BLOCK, NP, R)


@triton.jit
def store_distinct(unique, block, at, listed, last, BLOCK: tl.constexpr, NP: tl.constexpr, R: tl.constexpr):
    """Store the ranges of each row's blocks [R, NP] in ascending order, with [0, 0) for duplicates and for -1."""
    i = tl.arange(0, NP)
    far = last + 1  # sorts after every block
    block = tl.sort(tl.where(block < 0, far, block).to(block.dtype), dim=1)
    before = tl.gather(block, tl.broadcast_to(tl.maximum(i - 1, 0)[None, :], [R, NP]), 1)
    new = (block != far) & ((i == 0)[None, :] | (block != before))
    store_ranges(unique, tl.where(new, block, 0) * BLOCK, tl.where(new, block + 1, 0) * BLOCK, at, listed)


@triton.jit
def store_ranges(ranges, start, end, at, listed):
    """Store ranges [R, NP] at `at`, both bounds of one together."""
    bound = tl.arange(0, 2)
    tl.store(ranges + (2 * at[:, :, None] + bound[None, None, :]), tl.join(start, end), mask=listed[:, :, None])


def block_ranges(
    indices: Tensor, counts: Tensor | None, block_size: int, dtype: torch.dtype, find_unique: bool, captured: bool = False
) -> tuple[Tensor, Tensor | None] | None:
    """Return ranges [B,S,G,n,2] from block indices, and with find_unique the ranges of distinct blocks if n is small
    enough to sort. None in a CUDA graph whose capture would have to load the kernel.

    Args:
        indices: [B,S,G,n], on the current device.
        counts: [B,S,G], or None.
        block_size: keys per block.
        dtype: dtype of the ranges.
        find_unique: whether to compute distinct ranges.
        captured: whether a CUDA graph captures the call.
    """
    sorts = find_unique and indices.shape[3] <= MOST_SORTED
    tensors = indices.contiguous(), None if counts is None else counts.contiguous()
    if captured:
        made = indices.new_empty(0, dtype=dtype)
        if not _is_loaded(indices.shape, made, *tensors, made if sorts else None, block_size):
            return None
    B, S, G, n = indices.shape
    ranges = unwritten(indices, B, S, G, n, 2, dtype=dtype)
    unique = unwritten(indices, B, S, G, n, 2, dtype=dtype) if sorts else None
    _launch(indices.shape, ranges, *tensors, unique, block_size)
    return ranges, unique


def distinct_ranges(ranges: Tensor, block_size: int, captured: bool = False) -> Tensor | None:
    """Return ranges [B,S,G,n,2] of the distinct blocks in `ranges`, whose ranges are blocks or empty; None if n is too
    large to sort, and in a CUDA graph whose capture would have to load the kernel.

    The tensors are on the current device.
    """
    shape = B, S, G, n = ranges.shape[:4]
    if n > MOST_SORTED:
        return None
    unique, ranges = unwritten(ranges, B, S, G, n, 2), ranges.contiguous()
    if captured and not _is_loaded(shape, ranges, None, None, unique, block_size):
        return None
    _launch(shape, ranges, None, None, unique, block_size)
    return unique


def outside_capture(like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return `make()`, run and finished on a stream of its own, while the current stream is captured. The graph does not
    hold its launches."""
    with relaxed():
        side = torch.cuda.ExternalStream(own_stream(like.get_device()), like.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            made = make()
        side.synchronize()
    return made


def _launch(shape: Sequence[int], ranges: Tensor, indices: Tensor | None, counts: Tensor | None, unique: Tensor | None, block: int) -> None:
    kernel, rows, numbers = _kernel_and_numbers(shape, ranges.dtype, block, unique is not None)
    kernel.launch(-(-rows // kernel.constants["R"]), (ranges, indices, counts, unique), numbers)


def _is_loaded(
    shape: Sequence[int], ranges: Tensor, indices: Tensor | None, counts: Tensor | None, unique: Tensor | None, block: int
) -> bool:
    kernel, _, numbers = _kernel_and_numbers(shape, ranges.dtype, block, unique is not None)
    return kernel.loaded((ranges, indices, counts, unique), numbers)


def _kernel_and_numbers(shape: Sequence[int], dtype: torch.dtype, block: int, sorts: bool) -> tuple[Kernel, int, tuple[int, int]]:
    B, S, G, n = shape
    return _block_ranges_kernel(n, block, sorts), B * S * G, (B * S * G, torch.iinfo(dtype).max // block - 1)


@functools.lru_cache(REMEMBERED)
def _block_ranges_kernel(n: int, block: int, sorts: bool) -> Kernel:
    width = tile_size(n, 1)
    warps = max(1, min(8, width // 128 if sorts else width // 256))
    return Kernel(block_ranges_kernel, BLOCK=block, N=n, NP=width, R=max(1, ENTRIES // width), num_warps=warps)
