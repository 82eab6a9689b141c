"""Kernels of one pass over memory for a layer: the gated sum of NSA's branches and its gradients, rotary positions, and
norms per head before them.

    gated sum   o = sum_c g_c o_c (Eq. 5). Backward, a branch either gets lse - ln g, and its own pass gives the
                gradient of its gate (formulas: nsa_sel/gating.py): two small kernels, one number per row and branch.
                Or one pass reads do and the branch, and writes g do and that gradient.
    rotate      (a, b) -> (a cos - b sin, a sin + b cos), or back with -sin, plus another tensor if given
    norm_rotate x / rms(x) (1 + w) of a head, then the same of its first columns; backward, dx and one sum of dw per program

A row is one head of one token. Grid: one program per ROWS rows. Tiles: [ROWS, BLOCK_D >= Dv] for the gated sum, the
halves of a row [ROWS, BLOCK] for positions, [ROWS] for the small kernels. Sums are in float32, in float64 for float64
tensors; positions in the dtype of the angles. Tensors have any strides with a contiguous last dimension, except `lse`
and what is written in its place.
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

TILE = 4096  # elements per tile, 32 per thread
FEW, FEW_TILE = 1 << 20, 1024  # up to FEW elements in total, tiles of FEW_TILE elements give more programs
NUMBERS = 256  # rows per program of the kernels without columns, 2 per thread
INTERPRETED_TILE = 1 << 16  # larger, because the interpreter has a high cost per program


@triton.jit
def tile_rows(sizes, ROWS: tl.constexpr):
    """Return the indices (b, s, g, head) of this program's rows, their numbers (int64), and which of them exist."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = number < sizes[0]
    inside = tl.where(exists, number, 0)
    token = inside // sizes[3] // sizes[2]
    return (token // sizes[1], token % sizes[1], inside // sizes[3] % sizes[2], inside % sizes[3]), number, exists


@triton.jit
def row_starts(x, stride, at):
    """Return pointers to the rows at indices (b, s, g, head) of x [B,S,G,h,...]."""
    return x + at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2] + at[3] * stride[3]


@triton.jit
def branch(o, stride, gates, stride_gates, c: tl.constexpr, at, exists, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Load rows of a branch [ROWS, BLOCK_D] and their gates [ROWS], in the accumulation dtype."""
    gate = tl.load(row_starts(gates, stride_gates, at) + c * stride_gates[4], mask=exists, other=0.0)
    return load_columns(row_starts(o, stride, at), exists, 0, D, BLOCK_D).to(WIDE), gate.to(WIDE)


@triton.jit
def gate_kernel(
    cmp, slc, win, gates, o, is_token, strides, sizes,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store o [rows, D] = sum_c gates[..., c] * branch c.

    strides: of cmp, slc, win, gates and o. o may be one of the branches. is_token: [B,S], or None if all rows are
    tokens; other rows are not read, and get 0.
    """
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
def raise_branch(lse, to, gates, stride, c: tl.constexpr, at, number, exists):
    """Store lse - ln gate: infinity for a gate of 0, NaN for a negative gate; -inf (a row without keys) stays -inf."""
    if lse is not None:
        log_sum = tl.load(lse + number, mask=exists, other=0.0)
        gate = tl.load(row_starts(gates, stride, at) + c * stride[4], mask=exists, other=1.0)
        gate = gate.to(log_sum.dtype)
        off = gate == 0
        shifted = tl.where(off, float("inf"), log_sum - tl.log(tl.where(off, 1.0, gate)))
        tl.store(to + number, tl.where(log_sum == float("-inf"), log_sum, shifted), mask=exists)


@triton.jit
def raise_kernel(gates, lse_cmp, lse_slc, lse_win, to_cmp, to_slc, to_win, stride, sizes, ROWS: tl.constexpr):
    """Store lse - ln gate of the branches that are not None. stride: of gates; lse and to are contiguous."""
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
    """Store dgates[..., c] = delta of branch c, for branches that are not None. strides: of dgates and the three
    deltas."""
    at, _, exists = tile_rows(sizes, ROWS)
    copy_branch(cmp, strides[1], dgates, strides[0], 0, at, exists)
    copy_branch(slc, strides[2], dgates, strides[0], 1, at, exists)
    copy_branch(win, strides[3], dgates, strides[0], 2, at, exists)


@triton.jit
def branch_or_do(do, o, stride, gates, stride_gates, c: tl.constexpr, at, exists, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Do `branch`, or return unused placeholders if o is None."""
    if o is None:
        return do, do
    else:
        return branch(o, stride, gates, stride_gates, c, at, exists, D, BLOCK_D, do.dtype)


@triton.jit
def branch_backward(do, branch, o, to, dgates, stride, c: tl.constexpr, at, number, exists, D: tl.constexpr):
    """Store dgates[..., c] = sum_d do * x of branch c unless o is None, and gate * do to `to` unless it is None."""
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
    """Do `branch_backward` for the branches that are not None. strides: of do, cmp, slc, win, gates, dgates; `to` is
    contiguous.

    All loads come first, because the compiler does not move loads across a store.
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
    """Write o to `to`, of any strides with a contiguous last dimension; write 0 where is_token [B,S] (contiguous) is
    False."""
    tensors = (*map(_unit, branches), gates, to)
    if to.numel():
        _launch(gate_kernel, to, (*tensors, is_token), tuple(x.stride() for x in tensors))


def raise_lse(lse: Sequence[Tensor | None], gates: Tensor) -> list[Tensor | None]:
    """Return contiguous lse - ln gate for every branch whose lse [B,S,G,h] is not None."""
    given = [None if x is None else x.contiguous() for x in lse]
    to = [None if x is None else torch.empty_like(x) for x in given]
    if gates.numel():
        _launch_rows(raise_kernel, gates, (gates, *given, *to), gates.stride())
    return to


def write_deltas(deltas: Sequence[Tensor | None], dgates: Tensor) -> None:
    """Write dgates[..., c] = delta [B,S,G,h] of branch c, for every branch that is not None."""
    if dgates.numel():
        strides = tuple((dgates if x is None else x).stride() for x in (dgates, *deltas))
        _launch_rows(delta_kernel, dgates, (dgates, *deltas), strides)


def backward(do: Tensor, branches: Sequence[Tensor | None], gates: Tensor, dgates: Tensor, scales: bool) -> list[Tensor | None]:
    """Write the gates' gradients of every branch that is not None; if `scales`, return contiguous gate * do of each."""
    do = _unit(do)
    read = [None if o is None else _unit(o) for o in branches]
    to = [torch.empty_like(o, memory_format=torch.contiguous_format) if scales and o is not None else None for o in branches]
    if do.numel():
        strides = tuple((do if x is None else x).stride() for x in (do, *read, gates, dgates))
        _launch(gate_backward_kernel, do, (do, *read, gates, dgates, *to), strides)
    return to


def _unit(x: Tensor) -> Tensor:
    """Return x with a contiguous last dimension, copied if needed."""
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


ROTATE_TILE = 2048  # elements per half tile, 16 per thread
NORM_TILE = 2048  # elements per tile, likewise


@triton.jit
def rows_of(x, stride, b, s, head):
    """Return pointers to the rows (b, s, head) of x [B,S,H,D]."""
    return x + b * stride[0] + s * stride[1] + head * stride[2]


@triton.jit
def head_rows(rows, S, H, ROWS: tl.constexpr):
    """Return the indices b, s and head of this program's rows of [B,S,H,D], and which of them exist."""
    number = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = number < rows
    inside = tl.where(exists, number, 0)
    token = inside // H
    return token // S, token % S, inside % H, exists


@triton.jit
def rotate_kernel(
    x, plus, cos, sin, out, strides, sequence_angles, rows, S, H,
    HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Store `out` = x [B,S,H,2 * HALF] rotated, plus `plus` if it is not None.

    strides: of x, plus and out. cos, sin: [S, HALF] of each sequence, `sequence_angles` elements apart (0: shared).
    """
    b, s, head, exists = head_rows(rows, S, H, ROWS)
    row = rows_of(x, strides[0], b, s, head)
    at = b * sequence_angles + s * HALF
    c, d = load_columns(cos + at, exists, 0, HALF, BLOCK), load_columns(sin + at, exists, 0, HALF, BLOCK)
    if BACK:
        d = -d
    first = load_columns(row, exists, 0, HALF, BLOCK).to(c.dtype)
    second = load_columns(row + HALF, exists, 0, HALF, BLOCK).to(c.dtype)
    first, second = first * c - second * d, first * d + second * c
    if plus is not None:
        more = rows_of(plus, strides[1], b, s, head)
        first += load_columns(more, exists, 0, HALF, BLOCK)
        second += load_columns(more + HALF, exists, 0, HALF, BLOCK)
    to = rows_of(out, strides[2], b, s, head)
    store_columns(to, first, exists, 0, HALF)
    store_columns(to + HALF, second, exists, 0, HALF)


def rotate(x: Tensor, plus: Tensor | None, cos: Tensor, sin: Tensor, back: bool, out: Tensor) -> None:
    """Write x [B,S,H,D] rotated, + plus [B,S,H,D], to out [B,S,H,D]; cos and sin [1 or B,S,D/2], contiguous."""
    B, S, H, D = x.shape
    read = tuple(y if y.stride(-1) == 1 else y.contiguous() for y in (x, x if plus is None else plus))
    if out.numel():
        block = tile_size(D // 2)
        rows = max(1, (ROTATE_TILE if x.is_cuda else INTERPRETED_TILE) // block)
        apart = 0 if len(cos) == 1 else S * D // 2
        strides = tuple(y.stride()[:3] for y in (*read, out))
        tensors = read[0], None if plus is None else read[1], cos, sin, out
        _rotate_kernel(D // 2, block, rows, back).launch(-(-B * S * H // rows), tensors, (strides, apart, B * S * H, S, H))


@functools.lru_cache(REMEMBERED)
def _rotate_kernel(half: int, block: int, rows: int, back: bool) -> Kernel:
    return Kernel(rotate_kernel, HALF=half, BLOCK=block, ROWS=rows, BACK=back, num_warps=4)


@triton.jit
def load_head(row, exists, HALF: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, WIDE: tl.constexpr):
    """Load rows as the two halves that rotate, [ROWS, BLOCK], and the REST columns after them, [ROWS, BLOCK_REST]."""
    first = load_columns(row, exists, 0, HALF, BLOCK).to(WIDE)
    second = load_columns(row + HALF, exists, 0, HALF, BLOCK).to(WIDE)
    rest = load_columns(row + 2 * HALF, exists, 0, REST, BLOCK_REST).to(WIDE) if REST > 0 else first
    return first, second, rest


@triton.jit
def store_head(row, first, second, rest, exists, HALF: tl.constexpr, REST: tl.constexpr):
    """Store what `load_head` loads."""
    store_columns(row, first, exists, 0, HALF)
    store_columns(row + HALF, second, exists, 0, HALF)
    if REST > 0:
        store_columns(row + 2 * HALF, rest, exists, 0, REST)


@triton.jit
def dot_of_rows(a, b, REST: tl.constexpr):
    """Return the sums of products [ROWS] of two tuples that `load_head` loads."""
    total = tl.sum(a[0] * b[0], 1) + tl.sum(a[1] * b[1], 1)
    return total + tl.sum(a[2] * b[2], 1) if REST > 0 else total


@triton.jit
def norm_rotate_kernel(
    x, weight, cos, sin, do, out, part_dw, strides, sequence_angles, rows, S, H, eps,
    HALF: tl.constexpr, REST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store out = y (1 + weight), y = x / rms(x), rounded, for rows x [B,S,H,2 * HALF + REST], the first 2 * HALF columns
    rotated. Or, if do is not None, out = dx, and this program's sum of dw to part_dw [programs, 2 * HALF + REST]:

        dw = sum over rows of g y,  dx = (g (1 + w) - y mean(g (1 + w) y)) / rms(x),  with g = do, rotated back

    strides: of x, out and do; angles as of `rotate_kernel`.
    """
    WIDE: tl.constexpr = cos.dtype.element_ty
    D: tl.constexpr = 2 * HALF + REST
    b, s, head, exists = head_rows(rows, S, H, ROWS)
    y = load_head(rows_of(x, strides[0], b, s, head), exists, HALF, REST, BLOCK, BLOCK_REST, WIDE)
    r = tl.rsqrt(dot_of_rows(y, y, REST) / D + eps)[:, None]
    y = y[0] * r, y[1] * r, y[2] * r
    w = load_head(weight + tl.zeros([1], tl.int32), None, HALF, REST, BLOCK, BLOCK_REST, WIDE)  # [1, BLOCK] twice, [1, BLOCK_REST]
    at = b * sequence_angles + s * HALF
    c, d = load_columns(cos + at, exists, 0, HALF, BLOCK), load_columns(sin + at, exists, 0, HALF, BLOCK)
    to = rows_of(out, strides[1], b, s, head)
    if do is None:
        first, second = (y[0] * (1.0 + w[0])).to(x.dtype.element_ty).to(WIDE), (y[1] * (1.0 + w[1])).to(x.dtype.element_ty).to(WIDE)
        store_head(to, first * c - second * d, first * d + second * c, y[2] * (1.0 + w[2]), exists, HALF, REST)
    else:
        g = load_head(rows_of(do, strides[2], b, s, head), exists, HALF, REST, BLOCK, BLOCK_REST, WIDE)
        g = g[0] * c + g[1] * d, g[1] * c - g[0] * d, g[2]
        to_dw = part_dw + tl.program_id(0).to(tl.int64) * D + tl.zeros([1], tl.int32)
        sums = tl.sum(g[0] * y[0], 0)[None, :], tl.sum(g[1] * y[1], 0)[None, :], tl.sum(g[2] * y[2], 0)[None, :]
        store_head(to_dw, sums[0], sums[1], sums[2], tl.full([1], 1, tl.int1), HALF, REST)
        g = g[0] * (1.0 + w[0]), g[1] * (1.0 + w[1]), g[2] * (1.0 + w[2])
        mean = (dot_of_rows(g, y, REST) / D)[:, None]
        store_head(to, (g[0] - y[0] * mean) * r, (g[1] - y[1] * mean) * r, (g[2] - y[2] * mean) * r, exists, HALF, REST)


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, do: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return x [B,S,H,D] normed and rotated, and None; or, of do [B,S,H,D], dx and dw [D] in the angles' dtype."""
    (B, S, H, D), half = x.shape, cos.shape[2]
    x, do, out = _unit(x), None if do is None else _unit(do), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = max(1, (NORM_TILE if x.is_cuda else INTERPRETED_TILE) // tile_size(D))
    programs = -(-B * S * H // rows)
    dw = None if do is None else cos.new_empty(programs, D)
    if out.numel():
        strides = tuple(y.stride()[:3] for y in (x, out, out if do is None else do))
        numbers = strides, 0 if len(cos) == 1 else S * half, B * S * H, S, H, float(eps)
        _norm_rotate_kernel(half, D - 2 * half, rows).launch(programs, (x, weight.contiguous(), cos, sin, do, out, dw), numbers)
    return out, None if dw is None else dw.sum(0)


@functools.lru_cache(REMEMBERED)
def _norm_rotate_kernel(half: int, rest: int, rows: int) -> Kernel:
    blocks = {"BLOCK": tile_size(half), "BLOCK_REST": tile_size(max(1, rest))}
    return Kernel(norm_rotate_kernel, HALF=half, REST=rest, **blocks, ROWS=rows, num_warps=4)
