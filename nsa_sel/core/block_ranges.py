"""Ranges from block indices: by one kernel on a GPU, by plain PyTorch elsewhere and where operations are traced."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import transforms
from nsa_sel.core.indices import checked_blocks, padded, range_dtype, whole_blocks
from nsa_sel.core.plans import capturing
from nsa_sel.errors import warn

KERNEL = "nsa_sel.backends._triton.block_ranges"  # imported with the first block indices on a GPU
_failed: list[bool] = []  # an entry once the kernel has failed: it is not tried again


def ranges_of_blocks(
    block_indices: Tensor, block_size: int, block_counts: Tensor | None, disjoint: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Ranges [B,S,G,n,2] from the arguments of `Selection.from_blocks`, and those of distinct blocks (`ranges.disjoint`) where a kernel
    has found them."""
    indices, counts = checked_blocks(block_indices, block_size, block_counts)
    plain = transforms.traces(indices) or transforms.transformed() or not on_gpu(indices) or not indices.numel()
    kernel = None if plain or _failed else _kernel()
    if kernel is not None:
        dtype = torch.int64 if indices.dtype == torch.int64 else range_dtype(block_size)
        # Only what a plan may keep: see `Selection.plan` and `disjoint_ranges`.
        find_unique = not (disjoint or indices.shape[-1] < 2 or torch.is_inference_mode_enabled() or capturing(indices))
        elsewhere = indices.is_cuda and indices.get_device() != torch._C._cuda_getDevice()
        try:
            with torch.cuda.device(indices.device) if elsewhere else nullcontext():
                found: tuple[Tensor, Tensor | None] = kernel.block_ranges(indices, counts, block_size, dtype, find_unique)
            return found
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _failed.append(True)
            warn(f"the kernel of block indices failed, PyTorch's operations replace it from now on: {error!r}")
    return whole_blocks(padded(indices, counts), block_size), None


def on_gpu(indices: Tensor) -> bool:
    """Whether the kernel may run."""
    return indices.is_cuda


@functools.cache
def _kernel() -> Any:
    """Its module, None without Triton."""
    return importlib.import_module(KERNEL) if importlib.util.find_spec("triton") is not None else None
