"""sdpa-packed: torch's SDPA kernels on dense slices of keys or on gathered keys. The fallback that runs any call on any
device."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nsa_sel.backends._sdpa import attend, dense, gathered, key_tiles
from nsa_sel.core.call import Call
from nsa_sel.telemetry import events


def path(call: Call) -> Literal["dense", "varlen"]:
    """Return which path `forward` takes for this call.

    - dense (_sdpa/dense.py): tiles of adjacent rows attend to one slice of keys under a mask. Taken for n = 1 if the
      slices hold few keys that their rows did not select. A CPU reads the ranges to find out; a GPU uses static facts
      and `Selection.measure(S_kv)`.
    - varlen: everything else. Rows are bucketed by length and their keys gathered (_sdpa/gathered.py). On a CPU, if it
      is cheaper, each tile of keys attends to the rows that selected it instead (_sdpa/key_tiles.py).

    NSA_SEL_TRITON_FORCE_PATH=dense takes the dense path for every n = 1; varlen never takes it. Keys are always
    gathered if masks or copies exceed runtime.workspace_bytes, if K or V are not finite (on a CPU), or if they are
    quantized.
    """
    return "varlen" if dense.tiles_of(call, *call.clamped_ranges()) is None else "dense"


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32 (float64 for float64 inputs). Never
    synchronizes."""
    B, S, G, h, _ = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    o = call.q.new_zeros(B, S, G, h, Dv)
    lse = torch.full((B, S, G, h), float("-inf"), dtype=attend.accumulate(call.q.dtype), device=call.q.device)
    if o.numel() == 0 or S_kv == 0 or call.selection.n == 0:
        return o, lse
    with torch.autocast(call.q.device.type, enabled=False):
        start, end = call.clamped_ranges()
        tiles = dense.tiles_of(call, start, end)
        if call.settings.traced:
            events.emit("sel.path", backend="sdpa-packed", path="varlen" if tiles is None else "dense")
        if tiles is not None:
            dense.forward(call, tiles, start, end, o, lse)
        elif key_tiles.pays(call, start, end):
            key_tiles.forward(call, start, end, o, lse)
        else:
            gathered.forward(call, start, end, o, lse)
    return o, lse


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous dq, dk, dv in the dtypes of q, k, v. p is recomputed from lse.

    With p = exp(scale q k^T - lse) and delta = rowsum(do * o) - dlse: ds = p (do v^T - delta), dq = scale ds k, dk =
    scale ds^T q, dv = p^T do. A CPU processes tiles of keys. A GPU would need the lists of rows on the host for that,
    so it computes each row's contributions to its gathered keys and adds them by key in a fixed order.

    Results are bit-equal from run to run on every device. On a CPU this holds for a fixed thread count, because torch's
    matrix products may sum in another order with another count.
    """
    dtype = attend.accumulate(call.q.dtype)
    if call.q.numel() == 0 or call.k.shape[2] == 0 or call.selection.n == 0:
        return call.q.new_zeros(call.q.shape), call.k.new_zeros(call.k.shape), call.v.new_zeros(call.v.shape)
    with torch.autocast(call.q.device.type, enabled=False):
        delta = _row_products(do, o, dtype, attend.budget(call) // 8)
        if dlse is not None:
            delta -= dlse
        work = key_tiles.backward if attend.may_read(call) else gathered.backward
        dq, dk, dv = work(call, lse, do, delta)
        return dq.to(call.q.dtype), dk.to(call.k.dtype), dv.to(call.v.dtype)


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Return how many keys the forward loads: each tile's keys once, or gathered keys once per row, padded to the
    bucket's length.

    Without `count`, return `selected`, the number of keys that the rows select.
    """
    if not count or call.selection.n == 0:
        return selected
    start, end = call.clamped_ranges()
    tiles = dense.tiles_of(call, start, end)
    if tiles is not None:
        return call.k.shape[0] * call.k.shape[1] * sum(tile.hi - tile.lo for tile in tiles)
    if key_tiles.pays(call, start, end):
        return key_tiles.keys_loaded(call, start, end)
    return sum(len(ids) * L for ids, L in gathered.buckets(call, gathered.rows_of(call, start), gathered.rows_of(call, end)))


def _row_products(do: Tensor, o: Tensor, dtype: torch.dtype, budget: int) -> Tensor:
    """Return rowsum(do * o) [B,S,G,h] in `dtype`, in chunks of rows, because float32 copies of both would exceed the
    gathers."""
    a, b = do.reshape(-1, o.shape[-1]), o.reshape(-1, o.shape[-1])
    step = max(1, budget // (2 * o.shape[-1] * dtype.itemsize))
    sums = [(a[i : i + step].to(dtype) * b[i : i + step]).sum(-1) for i in range(0, len(a), step)]
    return torch.cat(sums).view(o.shape[:-1])
