"""Sliding windows on Hopper, by the kernels of selected blocks (sm90.py): TMA, wgmma, warp-specialized CTAs.

Which keys a tile of rows sees, and which rows a tile of keys, is arithmetic (tile_plan.cuh, dkdv_groups.cu): no plan is in memory. A tile
of keys is one CTA's work, as few rows see it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_sel.backends._buffers import unwritten
from nsa_sel.backends.cupy_cuda import launch, sm90
from nsa_sel.backends.cupy_cuda.compiler import Constants
from nsa_sel.backends.cupy_cuda.tensor_map import row_map
from nsa_sel.backends.specs import WINDOW_TILES
from nsa_sel.core.request import DeviceInfo
from nsa_sel.core.window_call import WindowCall

BLOCK = sm90.KEYS  # keys of a step: a tile's first and last ones are masked


def supports(call: WindowCall, device: DeviceInfo, *others: Tensor) -> bool:
    """Whether the kernels compute this call on `device`; `others` are read row by row as q, k and v are."""
    _, S, _, h, Dk = call.q.shape
    return (
        device.sm == WINDOW_TILES.sm
        and call.q.element_size() == 2  # bfloat16, float16
        and call.bounds is None
        and WINDOW_TILES.fits(S, call.k.shape[2], h, Dk, call.v.shape[3], BLOCK)
        and sm90.mappable(call.q, call.k, call.v, *others)
    )


def forward(call: WindowCall, device: DeviceInfo) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h] in float32."""
    q, shape = call.q, sm90.forward_shape(call.q, call.v, device)
    o, lse = unwritten(q, *q.shape[:4], call.v.shape[3]), unwritten(q, *q.shape[:4], dtype=torch.float32)
    maps = (row_map(q, sm90.ROWS // q.shape[3]), *sm90.key_maps(call))
    _start_tiles("forward_tiles.cu", call, device, shape, maps, *launch.pointers(o, lse))
    return o, lse


def dq(call: WindowCall, device: DeviceInfo, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """dq [B,S,G,h,Dk] and delta [B,S,G,h] for dk and dv; o, lse and dlse contiguous."""
    q, shape = call.q, sm90.dq_shape(call.q, call.v, device, with_o=True)
    gradient, delta = unwritten(q, *q.shape), unwritten(lse, *lse.shape)
    tokens = sm90.ROWS // q.shape[3]
    maps = (row_map(q, tokens), row_map(do, tokens), *sm90.key_maps(call), row_map(o, tokens))
    values = launch.pointers(o, lse, dlse, gradient, delta)
    _start_tiles("dq_tiles.cu", call, device, shape, maps, *values)
    return gradient, delta


def dkdv(call: WindowCall, device: DeviceInfo, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """dk [B,G,S_kv,Dk] and dv [B,G,S_kv,Dv] from lse and delta [B,S,G,h], contiguous."""
    q, k, v = call.q, call.k, call.v
    h, tiles = q.shape[3], -(-k.shape[2] // BLOCK)
    lists = k.shape[0] * k.shape[1] * tiles
    dk, dv = unwritten(k, *k.shape), unwritten(v, *v.shape)
    stages, shared = sm90.group_stages(k.shape[3], v.shape[3], device)
    in_lists = (0, 0, 0, 0, lists, tiles, 0, 0, 0)  # `KeyToRows`, without anything in memory
    maps = (row_map(q, sm90.ROWS // h), row_map(do, sm90.ROWS // h), *sm90.key_maps(call))
    launch.start(
        "dkdv_groups.cu", _macros(call, H=h, STAGES=stages), q.get_device(), lists, 256, shared,
        *launch.strided(do), *launch.pointers(lse, delta), *in_lists, *launch.pointers(None, None, dk, dv),
        maps=maps, problem=_problem(call),
    )  # fmt: skip
    return dk, dv


def _start_tiles(
    source: str, call: WindowCall, device: DeviceInfo, shape: sm90.TileShape, maps: tuple[bytes, ...], *values: int
) -> None:  # fmt: skip
    q = call.q
    plan = sm90.TilePlan(None, None, None, -(-q.shape[1] // shape.tokens), 0)
    macros = _macros(
        call, H=q.shape[3], CONSUMERS=shape.consumers, STAGES=shape.stages, Q_STAGES=shape.q_stages, BLOCK=BLOCK
    )  # fmt: skip
    sm90.start_persistent(source, macros, call, plan, device.sm_count, shape, *values, maps=maps, problem=_problem(call))


def _macros(call: WindowCall, **others: int) -> Constants:
    return launch.macros(call, aligned=True, WINDOW=1, **others)


def _problem(call: WindowCall) -> tuple[Any, ...]:
    """The values of `Problem` (problem.cuh): no positions, no ranges; the window in place of their number."""
    q, k = call.q, call.k
    _, S, G, h, _ = q.shape
    S_kv = k.shape[2]
    return (
        *launch.strided(q), *launch.strided(k), *launch.strided(call.v), 0, 0, 0, 0, 0, 0,
        S, S_kv, G, h, min(call.window, S_kv), call.scale, call.scale_log2(),
    )  # fmt: skip
