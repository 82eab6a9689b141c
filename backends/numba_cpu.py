"""numba: compiled CPU loops. Forward and dq run per query row, dk and dv per tile of keys; results do not depend on the
thread count.

Nothing is gathered. The module runs its kernels, which release the GIL, from its own thread pool with torch's thread
count (`torch.set_num_threads`). It does not use Numba's threading layers, because OpenMP spins against torch's threads,
workqueue aborts the process when two threads call it, and the layer is fixed once per process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa_sel import forks
from nsa_sel.backends._numba import kernels
from nsa_sel.backends._numba.kernels import TILE, Problem
from nsa_sel.core.call import Call

_SMALL = 1 << 22  # multiply-adds; with fewer, waking threads costs more than it saves

Operand = tuple[np.ndarray, tuple[int, ...]]  # flat memory, and the strides of all dimensions but the last (1)


class _Tiles(NamedTuple):
    """A selection's ranges, and the query rows that select from each tile of keys (CSR lists), in the order [B,G,tile]."""

    ranges: np.ndarray  # [B*S*G*n*2] int64
    slot: np.ndarray  # [B*G*tiles] int64: the tile's index among the tiles that any row selects from, -1 for others
    at: np.ndarray  # [B*G*tiles + 1] int64: offset of each tile's list in `rows`
    rows: np.ndarray  # int32: query rows, ascending within a tile; empty if only the forward needed the plan


class _Prepared(NamedTuple):
    """Inputs of the kernels that forward and backward share."""

    problem: Problem
    tiles: _Tiles
    q: Operand
    k: Operand
    v: Operand
    limit: np.ndarray  # [B]: one past the last key that any row of the sequence may see
    work: int  # multiply-adds of one product over all rows
    dtype: torch.dtype  # of sums: float64 for float64 inputs, else float32

    def transposed(self, x: Operand, D: int) -> np.ndarray:
        """Return the tiles of k or v that any row selects from, transposed: [slots,D,TILE]."""
        xt = np.empty((int(self.tiles.slot.max()) + 1) * D * TILE, x[0].dtype)
        _parallel(kernels.transpose_tiles, self.tiles.slot.size, xt.size, x, xt, self.limit, D, self.problem)
        return xt


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32 (float64 for float64 inputs).

    16-bit inputs are computed in float32.
    """
    ready = _prepare(call, listed=False)
    kt = ready.transposed(ready.k, call.k.shape[-1])
    shape, dtype = call.q.shape[:-1], ready.dtype
    o = call.q.new_empty(*shape, call.v.shape[-1], dtype=dtype)
    lse = call.q.new_empty(shape, dtype=dtype)
    outputs = o.view(-1).numpy(), lse.view(-1).numpy()
    _parallel(kernels.forward_rows, shape[:3].numel(), 2 * ready.work, ready.q, kt, ready.v, *outputs, ready.problem)
    return o.to(call.q.dtype), lse


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous dq, dk, dv with the shapes and dtypes of q, k, v.

    do [B,S,G,h,Dv] may have any strides. dlse is [B,S,G,h], or None for zeros.
    """
    ready = _prepare(call, listed=True)
    problem, q, work, dtype = ready.problem, ready.q, ready.work, ready.dtype
    dlse = lse.new_zeros(()).expand_as(lse) if dlse is None else dlse
    o_, do_, lse_, dlse_ = (_flat(x, dtype) for x in (o, do, lse.unsqueeze(-1), dlse.unsqueeze(-1)))
    kt, vt = ready.transposed(ready.k, problem.Dk), ready.transposed(ready.v, problem.Dv)
    grads = [x.new_empty(x.shape, dtype=dtype) for x in (call.q, call.k, call.v)]
    dq, dk, dv = (x.view(-1).numpy() for x in grads)
    delta, scale = np.empty(lse.numel(), dq.dtype), dq.dtype.type(call.scale)
    rows = call.q.shape[:3].numel()
    _parallel(kernels.dq_rows, rows, 3 * work, q, ready.k, kt, vt, o_, lse_, do_, dlse_, dq, delta, scale, problem)
    tiles = ready.tiles
    _parallel(kernels.dkdv_tiles, tiles.slot.size, 4 * work, q, kt, vt, tiles.at, tiles.rows, lse_, do_, delta, dk, dv, problem)
    return grads[0].to(call.q.dtype), grads[1].to(call.q.dtype), grads[2].to(call.q.dtype)


def _prepare(call: Call, *, listed: bool) -> _Prepared:
    B, S, G, h, Dk = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    dtype, n = torch.promote_types(call.q.dtype, torch.float32), call.selection.n
    position = call.positions().contiguous().numpy()
    q, k, v = _flat(call.q, dtype), _flat(call.k, dtype), _flat(call.v, dtype)
    share = call.groups_per_selection
    tiles: _Tiles = call.selection.plan(("numba", listed, S_kv, share), functools.partial(_tiles, call, share, listed=listed))
    scale = q[0].dtype.type(call.scale * kernels.LOG2E)
    sizes, repeats = (S, G, h, Dk, Dv, S_kv, n, -(-S_kv // int(TILE))), not listed and call.may_repeat()
    problem = Problem(*sizes, scale, share, tiles.ranges, repeats, position.ravel(), tiles.slot)
    work = B * S * G * h * call.selection.length_bound(S_kv) * max(Dk, Dv)
    return _Prepared(problem, tiles, q, k, v, np.minimum(position.max(1) + 1, S_kv), work, dtype)  # positions may pass the last key


def _tiles(call: Call, share: int, *, listed: bool) -> _Tiles:
    """Return the ranges, as tiles of keys list them; the forward pass, whose rows may name a block twice, needs no lists."""
    B, S, G = call.q.shape[:3]
    tiles, n = -(-call.k.shape[2] // int(TILE)), call.selection.n
    ranges = (call.disjoint_ranges() if listed else call.listed_ranges()).to(torch.int64).view(-1).numpy()
    at, work = np.zeros(B * G * tiles + 1, np.int64), 8 * ranges.size * share
    nothing = np.empty(0, np.int32)
    _parallel(kernels.list_rows, B * G, work, ranges, at[1:], nothing, False, S, G, share, n, tiles)
    slot = np.where(at[1:] > 0, np.cumsum(at[1:] > 0) - 1, -1)
    np.cumsum(at, out=at)
    rows = np.empty(at[-1] if listed else 0, np.int32)
    if listed:
        _parallel(kernels.list_rows, B * G, work, ranges, at[:-1].copy(), rows, True, S, G, share, n, tiles)
    return _Tiles(ranges, slot, at, rows)


def _flat(tensor: Tensor, dtype: torch.dtype) -> Operand:
    """Return the tensor as an operand. Copies only to change the dtype or to make the last stride 1."""
    tensor = tensor.detach().to(dtype)
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        tensor = tensor.contiguous()
    sizes, strides = tensor.shape, tensor.stride()
    extent = sizes[-1]
    for size, stride in zip(sizes[:-1], strides[:-1], strict=True):
        extent += (size - 1) * stride
    return tensor.as_strided((extent,), (1,)).numpy(), strides[:-1]


def _parallel(kernel: Callable[..., None], items: int, work: int, *args: Any) -> None:
    """Run kernel(first, last, *args) over chunks of range(items) on torch's number of threads.

    work: multiply-adds in total. A chunk has at least half of `_SMALL` of them, because starting one takes
    microseconds.
    """
    threads = torch.get_num_threads() if work > _SMALL else 1
    if threads == 1:
        kernel(0, items, *args)
        return
    chunk = -(-items // min(16 * threads, max(threads, 2 * work // max(1, _SMALL))))
    firsts = iter(range(0, items, chunk))

    def run() -> None:
        for first in firsts:
            kernel(first, min(first + chunk, items), *args)

    helpers = [_pool().submit(run) for _ in range(min(threads, -(-items // chunk)) - 1)]
    run()
    for helper in helpers:
        if not helper.cancel():
            helper.result()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "nsa_sel")


forks.in_child(_pool.cache_clear)  # a forked child inherits the pool without its threads
