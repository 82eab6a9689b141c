"""DTensor sharding rules of the ops, and `selection_attention` of DTensors.

Batch entries, KV groups, rows and heads are independent: each may be sharded on any dimension of a mesh, without
communication in the forward pass. Rows and heads share keys, so their dk and dv are partial sums, which DTensor adds
where needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from nsa_sel.core.check import as_selection
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection

Placements = list[Any]  # on one dimension of a mesh: one per tensor, None for other arguments


def arguments(q: Any, k: Any, v: Any, selection: Selection | Tensor, q_pos: Any) -> tuple[Selection, Any]:
    """Return the selection and q_pos for a call of DTensors; o and lse are then sharded as q.

    Raises:
        ArgumentError: a plain tensor, or one on another mesh.
    """
    selection = as_selection(selection)
    for name, x in (("k", k), ("v", v), ("selection", selection.ranges), ("q_pos", q_pos)):
        if x is not None and not (isinstance(x, DTensor) and x.device_mesh == q.device_mesh):
            raise ArgumentError(
                name,
                f"on {x.device_mesh}" if isinstance(x, DTensor) else f"a {type(x).__name__}",
                f"a DTensor on the mesh of q, {q.device_mesh}",
                "distribute_tensor(x, mesh, placements), or DTensor.from_local; of a selection, its ranges: Selection.from_ranges(...)",
            )
    if q_pos is None and q.dim() == 5 and Shard(1) in q.placements:  # a rank's rows do not imply their positions
        position = torch.arange(k.shape[2] - q.shape[1], k.shape[2], device=q.device)
        q_pos = DTensor.from_local(position, q.device_mesh, [Replicate()] * q.device_mesh.ndim, run_check=False)
    return selection, q_pos


def _strategies(ranges: Any, q_pos: Any) -> list[tuple[Any, Any, Any, Any, Any]]:
    """Return the shardings of a call on one dimension of a mesh.

    Each has the placements of q, o and lse; of ranges; of k and v; of q_pos; of dk and dv.
    """
    whole, pos = Replicate(), None if q_pos is None else Replicate()
    batch = pos if q_pos is None or len(q_pos.shape) == 1 else Shard(0)
    strategies: list[Any] = [
        (whole, whole, whole, pos, whole),
        (Shard(0), Shard(0), Shard(0), batch, Shard(0)),  # batch entries
        (Shard(2), whole if ranges.shape[2] == 1 else Shard(2), Shard(1), pos, Shard(1)),  # KV groups
        (Shard(3), whole, whole, pos, Partial()),  # heads of a group
    ]
    if q_pos is not None:
        strategies.append((Shard(1), Shard(1), whole, Shard(len(q_pos.shape) - 1), Partial()))  # rows
    return strategies


def _forward(q: Any, k: Any, v: Any, ranges: Any, q_pos: Any, *static: Any) -> list[tuple[Placements, Placements]]:
    rest = [None] * len(static)
    return [([rows, rows], [rows, keys, keys, index, position, *rest]) for rows, index, keys, position, _ in _strategies(ranges, q_pos)]


def _backward(
    do: Any, dlse: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, ranges: Any, q_pos: Any, *static: Any
) -> list[tuple[Placements, Placements]]:
    rest = [None] * len(static)
    return [
        (
            [rows, sums, sums],
            [None if do is None else rows, None if dlse is None else rows, rows, keys, keys, rows, rows, index, position, *rest],
        )
        for rows, index, keys, position, sums in _strategies(ranges, q_pos)
    ]


for op, rule in ((torch.ops.nsa_sel.selection_forward, _forward), (torch.ops.nsa_sel.selection_backward, _backward)):
    register_sharding(op.default)(rule)
