"""Launch Hopper's kernels (sm90.py) for calls whose visible keys follow from positions (BY_ARITHMETIC in problem.cuh):
no plan needed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import launch, sm90
from nsa_sel.backends.cupy_cuda.tensor_map import row_map
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.specs import ARITHMETIC_TILES
from nsa_sel.core.call import ChooseCall, WindowCall
from nsa_sel.core.request import DeviceInfo

BLOCK = sm90.KEYS  # keys of a step; a tile masks those of its partial blocks one by one


class Arithmetic(NamedTuple):
    """Kernel parameters of which keys a row sees (problem.cuh)."""

    macros: dict[str, int]
    start: int  # `Problem.start`
    window: int  # `Problem.window`


def keys_of(call: ChooseCall | WindowCall) -> Arithmetic:
    """Return the kernel parameters that describe the window, or the compressed keys."""
    if isinstance(call, WindowCall):
        return Arithmetic({"WINDOW": 1}, 0, min(call.window, call.k.shape[2]))
    return Arithmetic({"COMPRESS_BLOCK": call.rule.compress_block, "COMPRESS_STRIDE": call.rule.compress_stride}, call.start, 0)


def supports(call: ChooseCall | WindowCall, device: DeviceInfo, *others: Tensor) -> bool:
    """Return True if the kernels compute a call of these sizes on `device`. others: do, in a backward pass, which is
    read row by row as q, k and v are."""
    _, S, _, h, Dk = call.q.shape
    return (
        device.sm == ARITHMETIC_TILES.sm
        and ARITHMETIC_TILES.fits(S, call.k.shape[2], h, Dk, call.v.shape[3], BLOCK, bool(others))
        and sm90.mappable(call.q, call.k, call.v, *others)
    )


def forward(call: ChooseCall | WindowCall, device: DeviceInfo) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h] in float32; the scale is positive."""
    q, shape = call.q, sm90.forward_shape(call.q, call.v, device)
    o, lse = unwritten(q, *q.shape[:4], call.v.shape[3]), unwritten(q, *q.shape[:4], dtype=torch.float32)
    _start_tiles("forward_tiles.cu", call, device, shape, *launch.pointers(o, lse), rows=(q,))
    return o, lse


def dq(
    call: ChooseCall | WindowCall, device: DeviceInfo, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dq [B,S,G,h,Dk] and delta [B,S,G,h] for dk and dv. o, lse and dlse are contiguous."""
    q, shape = call.q, sm90.dq_shape(call.q, call.v, device, with_o=True)
    gradient, delta = unwritten(q, *q.shape), unwritten(lse, *lse.shape)
    values = launch.pointers(o, lse, dlse, gradient, delta)
    mixed = {"MIXED_TILES": 1} if isinstance(call, ChooseCall) else {}
    _start_tiles("dq_tiles.cu", call, device, shape, *values, rows=(q, do), more_rows=(o,), **mixed)
    return gradient, delta


def start_dkdv(call: ChooseCall | WindowCall, device: DeviceInfo, ctas: int, lse: Tensor, do: Tensor, delta: Tensor, *values: int) -> None:
    """Launch dkdv_groups.cu. values: its `KeyToRows` and `KeyGradients`."""
    q, h, keys = call.q, call.q.shape[3], keys_of(call)
    shape = sm90.group_shape(q.shape[4], call.v.shape[3], device)
    launch.start(
        "dkdv_groups.cu", launch.macros(call, H=h, STAGES=shape.stages, **keys.macros), q.get_device(), ctas, shape.threads,
        shape.shared,
        *launch.strided(do), *launch.pointers(lse, delta), *values, 0, 0, 0,  # no order, no blocks
        maps=sm90.adjacent_maps(call.k, call.v, q, do), problem=problem(call, keys),
    )  # fmt: skip


def _start_tiles(
    source: str, call: ChooseCall | WindowCall, device: DeviceInfo, shape: sm90.TileShape, *values: int,
    rows: tuple[Tensor, ...], more_rows: tuple[Tensor, ...] = (), **macros: int,
) -> None:  # fmt: skip
    """rows, more_rows: what TMA reads by rows, in the order of `Arguments`, before and after k and v."""
    keys, h = keys_of(call), call.q.shape[3]
    plan = sm90.TilePlan(None, None, None, -(-call.q.shape[1] // shape.tokens), 0)
    macros |= {"H": h, "CONSUMERS": shape.consumers, "STAGES": shape.stages, "Q_STAGES": shape.q_stages, "BLOCK": BLOCK, **keys.macros}
    before, after = ([row_map(x, sm90.ROWS // h) for x in tensors] for tensors in (rows, more_rows))
    maps = (*before, *sm90.key_maps(call), *after)
    sm90.start_persistent(
        source, launch.macros(call, **macros), call, plan, call.k.shape[2], device.sm_count, shape, *values,
        maps=maps, problem=problem(call, keys),
    )  # fmt: skip


def problem(call: ChooseCall | WindowCall, keys: Arithmetic) -> tuple[int | float, ...]:
    """Return the values of `Problem` (problem.cuh), without positions, ranges and block table."""
    q, k = call.q, call.k
    _, S, G, h, _ = q.shape
    return (
        *launch.strided(q), *launch.strided(k), *launch.strided(call.v), 0, 0, 0, 0, 0, 0, 0,
        S, k.shape[2], G, h, 0, 0, 0, keys.start, keys.window, call.scale, call.scale_log2(),
    )  # fmt: skip
