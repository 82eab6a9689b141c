"""The gated sum of NSA's three branches (Eq. 5), o = sum_c g_c o_c, in one pass over memory, and its backward pass in another.

Backward reads do and the branches once, and writes lse - ln g and the gradients of the gates (core/gating.py has the formula).

Grid: one program per ROWS of the B * S * G * h rows (a row is one head of one token). Tile: [ROWS, BLOCK_D >= Dv]. Sums are in float32,
in float64 for float64 tensors. Tensors have any strides with a contiguous last dimension, but for `lse` and what is written in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.tiles import load_columns, store_columns, tile_size

TILE = 4096  # numbers of a tile: 32 per thread
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
    cmp, slc, win, gates, o, strides, sizes, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """o [rows, D] = sum_c gates[..., c] * branch c; strides: of cmp, slc, win, gates and o. o may be one of the branches."""
    at, _, exists = tile_rows(sizes, ROWS)
    x, g = branch(cmp, strides[0], gates, strides[3], 0, at, exists, D, BLOCK_D, WIDE)
    total = g[:, None] * x
    x, g = branch(slc, strides[1], gates, strides[3], 1, at, exists, D, BLOCK_D, WIDE)
    total += g[:, None] * x
    x, g = branch(win, strides[2], gates, strides[3], 2, at, exists, D, BLOCK_D, WIDE)
    store_columns(row_starts(o, strides[4], at), total + g[:, None] * x, exists, 0, D)


@triton.jit
def raised(lse, gate):
    """lse - ln gate: infinity for a gate of 0, NaN for a negative one; -inf, of a row without keys, stays."""
    off = gate == 0
    shifted = tl.where(off, float("inf"), lse - tl.log(tl.where(off, 1.0, gate)))
    return tl.where(lse == float("-inf"), lse, shifted)


@triton.jit
def branch_or_do(do, o, stride, lse, gates, stride_gates, c: tl.constexpr, at, number, exists, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """`branch`, and its lse [ROWS]; placeholders, which nothing reads, where o or lse is None."""
    if o is None:
        return do, do, do
    else:
        x, gate = branch(o, stride, gates, stride_gates, c, at, exists, D, BLOCK_D, do.dtype)
        if lse is None:
            return x, gate, gate
        else:
            return x, gate, tl.load(lse + number, mask=exists, other=0.0)


@triton.jit
def branch_backward(do, branch, lse, to, dgates, stride, c: tl.constexpr, at, number, exists, D: tl.constexpr):
    """dgates[..., c] = sum_d do * x of branch c, unless `to` is None; and to `to`, lse - ln gate, or gate * do where lse is None."""
    x, gate, log_sum = branch
    if to is not None:
        if lse is None:
            store_columns(to + number * D, gate[:, None] * do, exists, 0, D)
        else:
            tl.store(to + number, raised(log_sum, gate), mask=exists)
        tl.store(row_starts(dgates, stride, at) + c * stride[4], tl.sum(do * x, 1).to(dgates.dtype.element_ty), mask=exists)


@triton.jit
def gate_backward_kernel(
    do, cmp, slc, win, gates, dgates, lse_cmp, lse_slc, lse_win, to_cmp, to_slc, to_win, strides, sizes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """`branch_backward` of the branches that are not None; strides: of do, cmp, slc, win, gates and dgates, lse and to are contiguous.

    All loads come first: the compiler moves none of them across a store.
    """
    at, number, exists = tile_rows(sizes, ROWS)
    grad = load_columns(row_starts(do, strides[0], at), exists, 0, D, BLOCK_D).to(WIDE)
    first = branch_or_do(grad, cmp, strides[1], lse_cmp, gates, strides[4], 0, at, number, exists, D, BLOCK_D)
    second = branch_or_do(grad, slc, strides[2], lse_slc, gates, strides[4], 1, at, number, exists, D, BLOCK_D)
    third = branch_or_do(grad, win, strides[3], lse_win, gates, strides[4], 2, at, number, exists, D, BLOCK_D)
    branch_backward(grad, first, lse_cmp, to_cmp, dgates, strides[5], 0, at, number, exists, D)
    branch_backward(grad, second, lse_slc, to_slc, dgates, strides[5], 1, at, number, exists, D)
    branch_backward(grad, third, lse_win, to_win, dgates, strides[5], 2, at, number, exists, D)


def write_sum(branches: Sequence[Tensor], gates: Tensor, to: Tensor) -> None:
    """Write o to a tensor of any strides with a contiguous last dimension."""
    tensors = (*map(_unit, branches), gates, to)
    if to.numel():
        _launch(gate_kernel, to, tensors, tuple(x.stride() for x in tensors))


def backward(
    do: Tensor, branches: Sequence[Tensor | None], gates: Tensor, lse: Sequence[Tensor | None], dgates: Tensor
) -> list[Tensor | None]:
    """Write the gates' gradients; lse - ln gate, or gate * do where lse is None, contiguous, for every branch that is given."""
    do = _unit(do)
    read = [None if o is None else _unit(o) for o in branches]
    log_sums = [None if x is None else x.contiguous() for x in lse]
    to = [None if o is None else _empty(o if x is None else x) for o, x in zip(branches, log_sums, strict=True)]
    if do.numel():
        strides = tuple((do if x is None else x).stride() for x in (do, *read, gates, dgates))
        _launch(gate_backward_kernel, do, (do, *read, gates, dgates, *log_sums, *to), strides)
    return to


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _unit(x: Tensor) -> Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(function: object, o: Tensor, tensors: tuple[Tensor | None, ...], strides: tuple[tuple[int, ...], ...]) -> None:
    _, S, G, h, D = o.shape
    block_d = tile_size(D)
    rows = max(1, (TILE if o.is_cuda else INTERPRETED_TILE) // block_d)
    total = o.numel() // D
    kernel = _kernel(function, D, block_d, rows, o.dtype == torch.float64)
    kernel.launch(-(-total // rows), tensors, (strides, (total, S, G, h)))


@functools.lru_cache(REMEMBERED)
def _kernel(function: object, D: int, block_d: int, rows: int, double: bool) -> Kernel:
    wide = tl.float64 if double else tl.float32
    return Kernel(function, D=D, BLOCK_D=block_d, ROWS=rows, WIDE=wide, num_warps=4)
