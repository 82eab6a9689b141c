"""Checks of several ranks with DTensors and models; tests/helpers/distributed_checks.py runs them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import nsa_sel
from nsa_sel import Selection, selection_attention
from nsa_sel.errors import ArgumentError, BackendError
from tests.helpers.calls import assert_refused
from tests.helpers.cases import assert_forward, assert_gradients, make_grads
from tests.helpers.files import ROOT, load
from tests.helpers.ranks import BACKENDS, BLOCK, DEVICE, EQUAL, ROWS, my_turn, problem, ranks

example, several = load("train_nsa_lm"), load("several_ranks")  # here, for all ranks that are forked


# DTensors


# The size that is cut, into no fewer parts than there are ranks, and its dimension: of q; of k and v; of ranges.
CUTS = {"B": (0, 0, 0), "G": (2, 1, 2), "S": (1, None, 1), "h": (3, None, None)}


def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (ranks(),))


def placed(x: Tensor, dim: int | None, on: DeviceMesh) -> DTensor:
    return distribute_tensor(x.detach(), on, [Replicate() if dim is None else Shard(dim)]).requires_grad_(x.requires_grad)


def dtensors_need_no_communication() -> None:
    on = mesh()
    for name, (rows, keys, index) in CUTS.items():
        q, k, v, selection = problem(**{} if name == "S" else {name: ranks()})
        do = make_grads(q, v)[0]
        for backend in BACKENDS:
            o, lse = selection_attention(q, k, v, selection, return_lse=True, backend=backend)
            wanted = o, *torch.autograd.grad(o, (q, k, v), do)
            parts = placed(q, rows, on), placed(k, keys, on), placed(v, keys, on)
            cut = Selection.from_ranges(placed(selection.ranges, index, on), BLOCK)
            do_cut = placed(do, rows, on)
            with CommDebugMode() as traffic:
                got = selection_attention(*parts, cut, backend=backend)
                grads = torch.autograd.grad(got, parts, do_cut)
            assert traffic.get_total_counts() == 0, f"{name}: {traffic.get_comm_counts()}"
            assert nsa_sel.decisions()[-1].forward == backend
            assert got.placements == (Shard(rows),), name
            assert grads[1].placements == ((Partial() if keys is None else Shard(keys)),), name
            full = [x.full_tensor() for x in (got, *grads)]
            if keys is not None and EQUAL[backend]:  # nothing is summed over ranks; how a GPU cuts the sums of dk, dv is not compared
                assert all(map(torch.equal, full[: 1 if DEVICE == "cuda" else 4], wanted)), name
            if my_turn():
                assert_forward((full[0], lse), q, k, v, selection.ranges)
                assert_gradients(tuple(full[1:]), q, k, v, selection.ranges, do)


def dtensors_of_uneven_parts_and_of_two_dimensions() -> None:
    """The last rank has a group and a row less than the others; a mesh of batch entries by groups, and autocast."""
    q, k, v, selection = problem(ROWS - 1, ROWS, G=2 * ranks() - 1)
    flat, deep = mesh(), init_device_mesh(DEVICE, (1, ranks()))
    for on, rows, keys in (
        (flat, [Shard(2)], [Shard(1)]),
        (flat, [Shard(1)], [Replicate()]),
        (deep, [Shard(0), Shard(2)], [Shard(0), Shard(1)]),
    ):
        parts = (distribute_tensor(x.detach(), on, how) for x, how in ((q, rows), (k, keys), (v, keys)))
        cut = Selection.from_ranges(distribute_tensor(selection.ranges, on, rows), BLOCK)
        got, got_lse = selection_attention(*parts, cut, return_lse=True)
        assert got.placements == got_lse.placements == tuple(rows)
        assert_forward((got.full_tensor(), got_lse.full_tensor()), q, k, v, selection.ranges)
    with torch.autocast(DEVICE, dtype=torch.float16):
        half = selection_attention(*(placed(x, dim, flat) for x, dim in ((q, 2), (k, 1), (v, 1))), placed(selection.ranges, 2, flat))
    assert (half.dtype, half.placements) == (torch.float16, (Shard(2),))


def dtensors_are_redistributed_where_needed() -> None:
    """DTensor gathers keys that are sharded along the sequence, and shards a replicated selection."""
    q, k, v, selection = problem(B=ranks())
    on = mesh()
    o = selection_attention(placed(q, 1, on), placed(k, 2, on), placed(v, 2, on), placed(selection.ranges, None, on))
    assert_forward((o.full_tensor(), selection_attention(q, k, v, selection, return_lse=True)[1]), q, k, v, selection.ranges)
    with pytest.raises(ArgumentError, match=r"selection is a Tensor; allowed: a DTensor on the mesh of q"):
        selection_attention(placed(q, 1, on), placed(k, 2, on), placed(v, 2, on), selection)
    with (
        nsa_sel.use_backend("sdpa-packed"),
        pytest.raises(BackendError, match="or calls of DTensors, that need gradients"),
    ):
        selection_attention(placed(q, 0, on), placed(k, 0, on), placed(v, 0, on), placed(selection.ranges, 0, on))


# Models


def the_example_trains_as_one_rank() -> None:
    """A run that goes on in another way after every step has the losses of one that one rank alone made."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        text, how, sizes = ROOT / "docs", {"minutes": 9, "every": 1, "graph": False}, replace(example.TINY, layers=1, batch=ranks())

        def losses(folder: str, steps: int, parallel: Any = None) -> list[float]:
            rows = example.train(Path(folder), sizes, None, torch.device(DEVICE), text, steps=steps, ranks=parallel, **how)
            return [row["loss"] for row in rows]

        alone = losses(f"{own}/alone", len(several.WAYS))
        for steps, way in enumerate(several.WAYS, 1):
            parallel, _ = several.join(way, sizes, torch.device(DEVICE))
            found = losses(f"{shared[0]}/together", steps, parallel)
            dist.barrier()  # the first rank wrote the checkpoint
        assert found == pytest.approx(alone, rel=1e-4 if DEVICE == "cpu" else 1e-3)  # bfloat16 on a GPU
        one, device = replace(sizes, batch=1), torch.device(DEVICE)
        assert_refused(
            (f"--batch is 1; .* multiple of {ranks()}, on {ranks()} ranks", lambda: several.join("data", one, device)),
            ("--parallel is 'pipeline'; allowed: data, context, tensor", lambda: several.join("pipeline", sizes, device)),
        )
        dist.barrier()
