"""Shared by the checks of several ranks: the device, its backends, a problem that is equal on all ranks, and slices of it."""

from __future__ import annotations

import itertools
import os
import sys

import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel import Selection
from nsa_sel.distributed import rank_rows
from tests.helpers.cases import make_blocks, make_qkv

BLOCK = 16
DEVICE = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in ("cpu", "cuda") else "cpu"
BACKENDS = ("sdpa-packed", "triton-group", "triton-tile", "triton-block") if DEVICE == "cuda" else ("sdpa-packed", "numba")
ANY_RANGES = BACKENDS[:2]  # those that accept ranges
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# The first EQUAL of o, lse, dq are bit-equal to one device's with gathered keys: packed SDPA's backward pass on a CPU multiplies all
# keys, and on a GPU its rows share buckets.
EQUAL = {"numba": 3, "sdpa-packed": 2 if DEVICE == "cpu" else 0, "triton-group": 3, "triton-tile": 2, "triton-block": 2}
# With fewer rows a rank a GPU's kernels would split them, or use configs for few rows. Slices are whole blocks, on a CPU on up to 4 ranks.
ROWS = 80 * int(os.environ.get("WORLD_SIZE", 2)) if DEVICE == "cuda" else 64
D = 64 if DEVICE == "cuda" else 16


def rank() -> int:
    return dist.get_rank()


def ranks() -> int:
    return dist.get_world_size()


def mine(x: Tensor, dim: int) -> Tensor:
    """Return this rank's slice."""
    return x.detach().chunk(ranks(), dim)[rank()].contiguous().requires_grad_(x.requires_grad)


def both_ends(x: Tensor, dim: int) -> Tensor:
    """Return this rank's slices of both ends."""
    rows = rank_rows(x.shape[dim], both_ends=True, device=x.device)
    return x.detach().index_select(dim, rows).requires_grad_(x.requires_grad)


def all_of(x: Tensor, dim: int) -> Tensor:
    """Gather the slices of all ranks."""
    every = [torch.empty_like(x) for _ in range(ranks())]
    dist.all_gather(every, x.contiguous())
    return torch.cat(every, dim)


_turns = itertools.count()


def my_turn() -> bool:
    """Return True if this rank compares with the oracle. Ranks take turns, because the oracle is slow."""
    return next(_turns) % ranks() == rank()


def problem(
    S: int = ROWS, S_kv: int | None = None, B: int = 2, G: int = 2, h: int = 2, n: int = 3, dtype: torch.dtype = DTYPE
) -> tuple[Tensor, Tensor, Tensor, Selection]:
    q, k, v = make_qkv(B, S, G, h, D, S_kv=S_kv, dtype=dtype, device=DEVICE, requires_grad=True)
    return q, k, v, make_blocks(B, S, G, S_kv or S, n, BLOCK, device=DEVICE)
