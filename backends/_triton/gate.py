"""The gated sum of NSA's three branches (Eq. 5), o = sum_c g_c o_c, in one pass over memory, and what its backward pass takes.

Backward, a branch either gets lse - ln g, and its own pass gives the gradient of its gate (nsa_sel/gating.py has the formulas): two small
kernels, of one number per row and branch. Or one pass reads do and the branch, and writes g do and that gradient.

Grid: one program per ROWS of the B * S * G * h rows (a row is one head of one token). Tile: [ROWS, BLOCK_D >= Dv]. Sums are in float32,
in float64 for float64 tensors. Tensors have any strides with a contiguous last dimension, but for `lse` and what is written in its place.
The small kernels have tiles of [ROWS].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.tiles import load_columns, store_columns, tile_size

TILE = 4096  # numbers of a tile: 32 per thread
FEW, FEW_TILE = 1 << 20, 1024  # numbers of all rows up to which tiles are smaller, so that more programs share them
NUMBERS = 256  # of a tile without columns: 2 per thread
INTERPRETED_TILE = 1 << 16  # the interpreter takes its time for every program


@triton.jit
def tile_rows(sizes, ROWS: tl.constexpr):
    """The indices b, s, g, head of this program's rows, their numbers, all int64, and which of them exist."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = number < sizes[0]
    inside = tl.where(exists, number, 0)
    token = inside // sizes[3] // sizes[2]
    return (token // sizes[1], token % sizes[1], inside // sizes[3] % sizes[2], inside % sizes[3]), number, exists


@triton.jit
def row_starts(x, stride, at):
    """Where the rows at indices (b, s, g, head) of x [B,S,G,h,...] begin."""
    return x + at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2] + at[3] * stride[3]


@triton.jit
def branch(o, stride, gates, stride_gates, c: tl.constexpr, at, exists, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Rows of a branch [ROWS, BLOCK_D] and their gates [ROWS], wide."""
    gate = tl.load(row_starts(gates, stride_gates, at) + c * stride_gates[4], mask=exists, other=0.0)
    return load_columns(row_starts(o, stride, at), exists, 0, D, BLOCK_D).to(WIDE), gate.to(WIDE)


@triton.jit
def gate_kernel(
    cmp, slc, win, gates, o, is_token, strides, sizes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """o [rows, D] = sum_c gates[..., c] * branch c; strides: of cmp, slc, win, gates and o. o may be one of the branches. Rows that are no
    token by is_token [B,S], unless that is None, are not read, and give 0."""
    at, _, inside = tile_rows(sizes, ROWS)
    exists = inside
    if is_token is not None:
        exists = inside & (tl.load(is_token + at[0] * sizes[1] + at[1], mask=inside, other=0) != 0)
    x, g = branch(cmp, strides[0], gates, strides[3], 0, at, exists, D, BLOCK_D, WIDE)
    total = g[:, None] * x
    x, g = branch(slc, strides[1], gates, strides[3], 1, at, exists, D, BLOCK_D, WIDE)
    total += g[:, None] * x
    x, g = branch(win, strides[2], gates, strides[3], 2, at, exists, D, BLOCK_D, WIDE)
    store_columns(row_starts(o, strides[4], at), total + g[:, None] * x, inside, 0, D)


@triton.jit
def raised(lse, gate):
    """lse - ln gate: infinity for a gate of 0, NaN for a negative one; -inf, of a row without keys, stays."""
    off = gate == 0
    shifted = tl.where(off, float("inf"), lse - tl.log(tl.where(off, 1.0, gate)))
    return tl.where(lse == float("-inf"), lse, shifted)


@triton.jit
def raise_branch(lse, to, gates, stride, c: tl.constexpr, at, number, exists):
    if lse is not None:
        log_sum = tl.load(lse + number, mask=exists, other=0.0)
        gate = tl.load(row_starts(gates, stride, at) + c * stride[4], mask=exists, other=1.0)
        tl.store(to + number, raised(log_sum, gate.to(log_sum.dtype)), mask=exists)


@triton.jit
def raise_kernel(gates, lse_cmp, lse_slc, lse_win, to_cmp, to_slc, to_win, stride, sizes, ROWS: tl.constexpr):
    """to = lse - ln gate of the branches that are not None; stride: of gates, lse and to are contiguous."""
    at, number, exists = tile_rows(sizes, ROWS)
    raise_branch(lse_cmp, to_cmp, gates, stride, 0, at, number, exists)
    raise_branch(lse_slc, to_slc, gates, stride, 1, at, number, exists)
    raise_branch(lse_win, to_win, gates, stride, 2, at, number, exists)


@triton.jit
def copy_branch(delta, stride_delta, dgates, stride, c: tl.constexpr, at, exists):
    if delta is not None:
        x = tl.load(row_starts(delta, stride_delta, at), mask=exists, other=0.0)
        tl.store(row_starts(dgates, stride, at) + c * stride[4], x.to(dgates.dtype.element_ty), mask=exists)


@triton.jit
def delta_kernel(dgates, cmp, slc, win, strides, sizes, ROWS: tl.constexpr):
    """dgates[..., c] = delta of branch c, of those that are not None; strides: of dgates and the three."""
    at, _, exists = tile_rows(sizes, ROWS)
    copy_branch(cmp, strides[1], dgates, strides[0], 0, at, exists)
    copy_branch(slc, strides[2], dgates, strides[0], 1, at, exists)
    copy_branch(win, strides[3], dgates, strides[0], 2, at, exists)


@triton.jit
def branch_or_do(do, o, stride, gates, stride_gates, c: tl.constexpr, at, exists, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """`branch`; placeholders, which nothing reads, where o is None."""
    if o is None:
        return do, do
    else:
        return branch(o, stride, gates, stride_gates, c, at, exists, D, BLOCK_D, do.dtype)


@triton.jit
def branch_backward(do, branch, o, to, dgates, stride, c: tl.constexpr, at, number, exists, D: tl.constexpr):
    """dgates[..., c] = sum_d do * x of branch c, unless o is None; and to `to`, unless it is None, gate * do."""
    x, gate = branch
    if o is not None:
        if to is not None:
            store_columns(to + number * D, gate[:, None] * do, exists, 0, D)
        tl.store(row_starts(dgates, stride, at) + c * stride[4], tl.sum(do * x, 1).to(dgates.dtype.element_ty), mask=exists)


@triton.jit
def gate_backward_kernel(
    do, cmp, slc, win, gates, dgates, to_cmp, to_slc, to_win, strides, sizes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`branch_backward` of the branches that are not None; strides: of do, cmp, slc, win, gates and dgates, `to` is contiguous.

    All loads come first: the compiler moves none of them across a store.
    """
    at, number, exists = tile_rows(sizes, ROWS)
    grad = load_columns(row_starts(do, strides[0], at), exists, 0, D, BLOCK_D).to(WIDE)
    first = branch_or_do(grad, cmp, strides[1], gates, strides[4], 0, at, exists, D, BLOCK_D)
    second = branch_or_do(grad, slc, strides[2], gates, strides[4], 1, at, exists, D, BLOCK_D)
    third = branch_or_do(grad, win, strides[3], gates, strides[4], 2, at, exists, D, BLOCK_D)
    branch_backward(grad, first, cmp, to_cmp, dgates, strides[5], 0, at, number, exists, D)
    branch_backward(grad, second, slc, to_slc, dgates, strides[5], 1, at, number, exists, D)
    branch_backward(grad, third, win, to_win, dgates, strides[5], 2, at, number, exists, D)


def write_sum(branches: Sequence[Tensor], gates: Tensor, to: Tensor, is_token: Tensor | None = None) -> None:
    """Write o to a tensor of any strides with a contiguous last dimension; 0 to rows that are no token by is_token [B,S], contiguous."""
    tensors = (*map(_unit, branches), gates, to)
    if to.numel():
        _launch(gate_kernel, to, (*tensors, is_token), tuple(x.stride() for x in tensors))


def raise_lse(lse: Sequence[Tensor | None], gates: Tensor) -> list[Tensor | None]:
    """lse - ln gate, contiguous, of every branch whose lse [B,S,G,h] is given."""
    given = [None if x is None else x.contiguous() for x in lse]
    to = [None if x is None else _empty(x) for x in given]
    if gates.numel():
        _launch_rows(raise_kernel, gates, (gates, *given, *to), gates.stride())
    return to


def write_deltas(deltas: Sequence[Tensor | None], dgates: Tensor) -> None:
    """dgates[..., c] = delta [B,S,G,h] of branch c, of those that are given."""
    if dgates.numel():
        strides = tuple((dgates if x is None else x).stride() for x in (dgates, *deltas))
        _launch_rows(delta_kernel, dgates, (dgates, *deltas), strides)


def backward(do: Tensor, branches: Sequence[Tensor | None], gates: Tensor, dgates: Tensor, scales: bool) -> list[Tensor | None]:
    """Write the gates' gradients of every branch that is given, and return gate * do of it, contiguous, if `scales`."""
    do = _unit(do)
    read = [None if o is None else _unit(o) for o in branches]
    to = [_empty(o) if scales and o is not None else None for o in branches]
    if do.numel():
        strides = tuple((do if x is None else x).stride() for x in (do, *read, gates, dgates))
        _launch(gate_backward_kernel, do, (do, *read, gates, dgates, *to), strides)
    return to


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _unit(x: Tensor) -> Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(function: object, o: Tensor, tensors: tuple[Tensor | None, ...], strides: tuple[tuple[int, ...], ...]) -> None:
    _, S, G, h, D = o.shape
    block_d = tile_size(D)
    tile = FEW_TILE if o.numel() <= FEW else TILE
    rows = max(1, (tile if o.is_cuda else INTERPRETED_TILE) // block_d)
    total = o.numel() // D
    kernel = _kernel(function, D, block_d, rows, o.dtype == torch.float64)
    kernel.launch(-(-total // rows), tensors, (strides, (total, S, G, h)))


def _launch_rows(function: object, gates: Tensor, tensors: tuple[Tensor | None, ...], strides: tuple[Any, ...]) -> None:
    _, S, G, h, _ = gates.shape
    total = gates.numel() // 3
    _rows_kernel(function).launch(-(-total // NUMBERS), tensors, (strides, (total, S, G, h)))


@functools.lru_cache(REMEMBERED)
def _rows_kernel(function: object) -> Kernel:
    return Kernel(function, ROWS=NUMBERS, num_warps=4)


@functools.lru_cache(REMEMBERED)
def _kernel(function: object, D: int, block_d: int, rows: int, double: bool) -> Kernel:
    wide = tl.float64 if double else tl.float32
    return Kernel(function, D=D, BLOCK_D=block_d, ROWS=rows, WIDE=wide, num_warps=4)
