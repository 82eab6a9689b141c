"""The gated sum of NSA's three branches (Eq. 5), o = sum_c g_c o_c, in one pass over memory; and its gradients in another.

Grid: one program per ROWS of the B * S * G * h rows (a row is one head of one token). Tile: [ROWS, BLOCK_D >= Dv]. Sums are in float32,
in float64 for float64 tensors. Tensors have any strides with a contiguous last dimension, but for what `gate_backward_kernel` writes.
"""

from __future__ import annotations

import functools

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
    """Rows of a branch [ROWS, BLOCK_D] and their gates [ROWS, 1], wide."""
    gate = tl.load(row_starts(gates, stride_gates, at) + c * stride_gates[4], mask=exists, other=0.0)
    return load_columns(row_starts(o, stride, at), exists, 0, D, BLOCK_D).to(WIDE), gate.to(WIDE)[:, None]


@triton.jit
def gate_kernel(
    cmp, slc, win, gates, o, strides, sizes, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """o [rows, D] = sum_c gates[..., c] * branch c; strides: of cmp, slc, win, gates and o."""
    at, _, exists = tile_rows(sizes, ROWS)
    x, g = branch(cmp, strides[0], gates, strides[3], 0, at, exists, D, BLOCK_D, WIDE)
    total = g * x
    x, g = branch(slc, strides[1], gates, strides[3], 1, at, exists, D, BLOCK_D, WIDE)
    total += g * x
    x, g = branch(win, strides[2], gates, strides[3], 2, at, exists, D, BLOCK_D, WIDE)
    store_columns(row_starts(o, strides[4], at), total + g * x, exists, 0, D)


@triton.jit
def store_gradients(x, gate, do, dx, dgate, exists, D: tl.constexpr):
    """dx = gate * do, and dgate = sum_d do * x, of one branch's rows, where dx and dgate say."""
    store_columns(dx, gate * do, exists, 0, D)
    tl.store(dgate, tl.sum(do * x, 1).to(dgate.dtype.element_ty), mask=exists)


@triton.jit
def gate_backward_kernel(
    do, cmp, slc, win, gates, dcmp, dslc, dwin, dgates, strides, sizes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Gradients of the branches [rows, D] and of the gates [rows, 3]; strides: of cmp, slc, win, gates and do."""
    at, number, exists = tile_rows(sizes, ROWS)
    grad = load_columns(row_starts(do, strides[4], at), exists, 0, D, BLOCK_D).to(WIDE)
    x, g = branch(cmp, strides[0], gates, strides[3], 0, at, exists, D, BLOCK_D, WIDE)
    store_gradients(x, g, grad, dcmp + number * D, dgates + number * 3, exists, D)
    x, g = branch(slc, strides[1], gates, strides[3], 1, at, exists, D, BLOCK_D, WIDE)
    store_gradients(x, g, grad, dslc + number * D, dgates + number * 3 + 1, exists, D)
    x, g = branch(win, strides[2], gates, strides[3], 2, at, exists, D, BLOCK_D, WIDE)
    store_gradients(x, g, grad, dwin + number * D, dgates + number * 3 + 2, exists, D)


@triton.jit
def branch_backward_kernel(
    do, o, gates, dx, dgates, strides, sizes, C: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of branch C's output o alone, and of its gates; strides: of do, o, gates, dx and dgates."""
    at, _, exists = tile_rows(sizes, ROWS)
    grad = load_columns(row_starts(do, strides[0], at), exists, 0, D, BLOCK_D).to(WIDE)
    x, g = branch(o, strides[1], gates, strides[2], C, at, exists, D, BLOCK_D, WIDE)
    dgate = row_starts(dgates, strides[4], at) + C * strides[4][4]
    store_gradients(x, g, grad, row_starts(dx, strides[3], at), dgate, exists, D)


def forward(branches: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> Tensor:
    """o [B,S,G,h,Dv], contiguous, in the branches' dtype."""
    o = torch.empty(branches[0].shape, dtype=branches[0].dtype, device=gates.device)
    write_sum(branches, gates, o)
    return o


def write_sum(branches: tuple[Tensor, Tensor, Tensor], gates: Tensor, to: Tensor) -> None:
    """Write o to a tensor of any strides with a contiguous last dimension."""
    tensors = (*map(_unit, branches), gates, to)
    if to.numel():
        _launch(gate_kernel, to, tensors, tuple(x.stride() for x in tensors))


def write_branch_gradient(do: Tensor, o: Tensor, gates: Tensor, c: int, to: Tensor, dgates: Tensor) -> None:
    """Write the gradient of branch c's output o to `to` [B,S,G,h,Dv], and its gates' to dgates[..., c], of any strides."""
    tensors = _unit(do), _unit(o), gates, to, dgates
    if to.numel():
        _launch(branch_backward_kernel, do, tensors, tuple(x.stride() for x in tensors), C=c)


def backward(do: Tensor, branches: tuple[Tensor, Tensor, Tensor], gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the three branches and of the gates [B,S,G,h,3], contiguous, in the dtypes of those."""
    do, read = _unit(do), (*map(_unit, branches), gates)
    dcmp, dslc, dwin, dgates = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in read)
    if do.numel():
        _launch(gate_backward_kernel, do, (do, *read, dcmp, dslc, dwin, dgates), tuple(x.stride() for x in (*read, do)))
    return dcmp, dslc, dwin, dgates


def _unit(x: Tensor) -> Tensor:
    """x with a contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(function: object, o: Tensor, tensors: tuple[Tensor, ...], strides: tuple[tuple[int, ...], ...], **constants: int) -> None:
    _, S, G, h, D = o.shape
    block_d = tile_size(D)
    rows = max(1, (TILE if o.is_cuda else INTERPRETED_TILE) // block_d)
    total = o.numel() // D
    kernel = _kernel(function, D, block_d, rows, o.dtype == torch.float64, **constants)
    kernel.launch(-(-total // rows), tensors, (strides, (total, S, G, h)))


@functools.lru_cache(REMEMBERED)
def _kernel(function: object, D: int, block_d: int, rows: int, double: bool, **constants: int) -> Kernel:
    wide = tl.float64 if double else tl.float32
    return Kernel(function, D=D, BLOCK_D=block_d, ROWS=rows, WIDE=wide, **constants, num_warps=4)
