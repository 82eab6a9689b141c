"""Train train_nsa_lm.py on several ranks under torchrun:

    torchrun --standalone --nproc-per-node 2 examples/train_nsa_lm.py --out runs/sliced --parallel context

data       FSDP2 only: each rank has its own sequences
context    each rank has two slices of every sequence, one from each end (`nsa_sel.distributed.context_parallel`); FSDP2
tensor     each rank has its own KV groups and columns of the MLP, over at most as many ranks as groups; FSDP2 over the
           other ranks

Every rank draws the whole batch of a step and takes its part, so that a run sees the same bytes on any number of ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from nsa_lm import LanguageModel, Sizes
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from nsa_sel.distributed import check_ranks, context_parallel, rank_rows, tensor_parallel
from nsa_sel.errors import ArgumentError

DATA, CONTEXT, TENSOR = WAYS = "data", "context", "tensor"


class Ranks(NamedTuple):
    """The ranks of a job, as a mesh with the dimensions "data" and "tensor". way: the value of --parallel."""

    way: str
    mesh: DeviceMesh
    rank: int

    def spread(self, model: LanguageModel) -> list[dict[str, Any]]:
        """Shard the model in place.

        Return the parameters in optimizer groups, one per mesh, because fused kernels need one mesh.
        """
        data, tensor = self.mesh["data"], self.mesh["tensor"]
        if self.way == CONTEXT:
            context_parallel(model, data, both_ends=True)
        elif tensor.size() > 1:
            tensor_parallel(model, tensor)
            for block in model.blocks:
                parallelize_module(block.mlp, tensor, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for block in model.blocks:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
        return [{"params": group} for group in by_mesh(model.parameters())]

    def part_of(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's inputs and targets of a batch [batch, context + 1]."""
        mesh = self.mesh["data"]
        if self.way == CONTEXT:
            rows = rank_rows(data.shape[1] - 1, mesh, both_ends=True, device=data.device)
            return data[:, rows], data[:, rows + 1]
        own = data.chunk(mesh.size())[mesh.get_local_rank()]
        return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def join(way: str, sizes: Sizes, device: torch.device) -> tuple[Ranks, torch.device]:
    """Join the ranks that torchrun started, each with its own GPU.

    Raises ArgumentError for sizes that ranks do not divide.
    """
    if way not in WAYS:
        raise ArgumentError("--parallel", repr(way), ", ".join(WAYS), "pass one of these")
    if "RANK" not in os.environ:
        raise ArgumentError("--parallel", way, "only under torchrun", "start the program by torchrun --standalone --nproc-per-node RANKS")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    check_ranks()
    ranks = dist.get_world_size()
    by_groups = math.gcd(ranks, sizes.groups) if way == TENSOR else 1
    cut = {DATA: ("batch", sizes.batch, ranks), TENSOR: ("batch", sizes.batch, ranks // by_groups)}
    cut[CONTEXT] = "context", sizes.context, 2 * ranks * sizes.compress_stride
    name, size, parts = cut[way]
    if size % parts:
        raise ArgumentError(
            f"--{name}", size, f"a multiple of {parts}, on {ranks} ranks with --parallel {way}", "pass another or take fewer ranks"
        )
    mesh = init_device_mesh(device.type, (ranks // by_groups, by_groups), mesh_dim_names=("data", "tensor"))
    return Ranks(way, mesh, dist.get_rank()), device


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by mesh: with tensor parallelism they are on several."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def clip(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Clip the norm of all gradients, like `clip_grad_norm_`, for parameters on several meshes."""
    groups = by_mesh(parameters)
    norms = [nn.utils.get_total_norm([x.grad for x in group if x.grad is not None]) for group in groups]
    total = torch.stack([x.full_tensor() if isinstance(x, DTensor) else x for x in norms]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, most, total)


def mean(loss: Tensor) -> float:
    """Return the mean loss of all ranks."""
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def of_first(value: bool) -> bool:
    """Return the first rank's value on all ranks."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def first_before_others(work: Callable[[], Any]) -> Any:
    """Return the result of `work`, which the first rank finishes before the others start."""
    if dist.get_rank():
        dist.barrier()
        return work()
    result = work()
    dist.barrier()
    return result
