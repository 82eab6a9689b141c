"""Checks of block indices, scores and positions, and their conversion to ranges of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_sel.core.arguments import as_tensor, check_dense, check_positive
from nsa_sel.errors import ArgumentError, shown

INDEX_DTYPES = (torch.int32, torch.int64)
_WIDE_BLOCK = 1 << 16  # keys: positions of larger blocks are computed in 64 bits


def checked_blocks(block_indices: Tensor, block_size: int, block_counts: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Indices [B,S,G,n], int32 or int64, and counts [B,S,G] from the arguments of `Selection.from_blocks`."""
    indices = as_tensor("block_indices", block_indices)
    if indices.dtype not in INDEX_DTYPES:
        if indices.dtype not in (torch.uint8, torch.int8, torch.int16):
            raise ArgumentError("block_indices", f"of dtype {indices.dtype}", "an integer dtype", "call .int() on it")
        indices = indices.int()
    indices = as_rows(indices, "block_indices", "[B,S,G,n] or [B,G,n]", 4)
    check_positive("block_size", block_size)
    if block_counts is None:
        return indices, None
    counts = as_tensor("block_counts", block_counts)
    if counts.is_floating_point() or counts.is_complex():
        raise ArgumentError("block_counts", f"of dtype {counts.dtype}", "an integer dtype", "call .int() on it")
    counts = counts.unsqueeze(1) if counts.dim() == 2 else counts
    if counts.shape != indices.shape[:-1] or counts.device != indices.device:
        shape = f"of shape {tuple(counts.shape)} on {counts.device}"
        raise ArgumentError("block_counts", shape, f"{tuple(indices.shape[:-1])} on {indices.device}", "one count per row of block_indices")
    return indices, counts


def padded(indices: Tensor, counts: Tensor | None) -> Tensor:
    """Indices with -1 in place of the entries from `counts` on."""
    if counts is None:
        return indices
    return torch.where(torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1), indices, -1)


def whole_blocks(indices: Tensor, block_size: int) -> Tensor:
    """Ranges [...,n,2] of checked block indices [...,n], int32 or int64. Negative indices are padding and become [0, 0)."""
    if block_size > _WIDE_BLOCK:
        indices = indices.long()
    # Few operations: each takes a small call's host as long as a kernel. No product overflows to a valid block.
    block = indices.clamp(-1, torch.iinfo(indices.dtype).max // block_size - 1)
    return torch.stack((block.clamp(min=0), block + 1), dim=-1) * block_size


def range_dtype(block_size: int) -> torch.dtype:
    """The dtype in which `whole_blocks` of int32 indices come."""
    return torch.int64 if block_size > _WIDE_BLOCK else torch.int32


def check_forced(first: int, local: int, n: int) -> None:
    """ArgumentError unless n blocks have room for the first and the local last ones, which are always among them."""
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (first, local))
    if not whole or first < 0 or local < 0 or first + local > n:
        raise ArgumentError(
            "first + local", f"{shown(first)} + {shown(local)}", f"whole numbers >= 0 and together at most n = {n}",
            "raise n: the first and the local last blocks are always among the n; or pass a smaller first= or local=",
        )  # fmt: skip


def as_rows(value: Tensor, argument: str, shapes: str, dims: int) -> Tensor:
    if value.dtype not in INDEX_DTYPES:
        raise ArgumentError(argument, f"of dtype {value.dtype}", "torch.int32 or torch.int64", "call .int() on it")
    if value.dim() == dims - 1:
        value = value.unsqueeze(1)
    if value.dim() != dims:
        raise ArgumentError(argument, f"of shape {tuple(value.shape)}", shapes, "add the missing axes")
    return value


def as_positions(q_pos: Tensor, B: int, S: int, device: torch.device) -> Tensor:
    if not isinstance(q_pos, Tensor):
        raise ArgumentError("q_pos", f"a {type(q_pos).__name__}", "a torch.Tensor [S] or [B,S]", "wrap it in torch.as_tensor")
    check_dense("q_pos", q_pos)
    if q_pos.dtype not in INDEX_DTYPES:
        raise ArgumentError("q_pos", f"of dtype {q_pos.dtype}", "torch.int32 or torch.int64", "call .int() on it")
    if q_pos.shape not in ((S,), (B, S)):
        raise ArgumentError("q_pos", f"of shape {tuple(q_pos.shape)}", f"[S={S}] or [B={B}, S={S}]", "one position per query row")
    if q_pos.device != device:
        raise ArgumentError("q_pos", f"on {q_pos.device}", f"q's device {device}", f"call q_pos.to({device.type!r})")
    return q_pos.expand(B, S)
