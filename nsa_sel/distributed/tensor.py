"""Tensor parallelism of `NSAttention`: each rank holds the projections of its KV groups, and runs the layer's attention for them."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from nsa_sel.attention_layer import NSAttention
from nsa_sel.compression import BlockMLP
from nsa_sel.errors import ArgumentError


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Split every `NSAttention` of a model by KV groups over the ranks of a mesh.

    `q`, `kv` and `gate` are split by rows, which are ordered by groups first (ColwiseParallel), `out` by columns (RowwiseParallel). Each
    layer takes equal hidden states on all ranks, and returns equal ones. There is one all-reduce forward, and one for dx backward. Every
    rank holds the compression MLP in full and applies it to its own groups; the backward pass adds its gradients over ranks. All parameters
    become DTensors. FSDP2 may follow.

    Args:
        model: changed in place; the names of parameters stay.
        mesh: DeviceMesh of one dimension; its size divides the number of groups.

    Returns:
        model.

    Raises:
        ArgumentError: the model has no `NSAttention`, or one whose groups the ranks do not divide.
    """
    layers = layers_of(model)
    for layer in layers:
        if layer.groups % mesh.size():
            allowed = f"a divisor of groups = {layer.groups}"
            raise ArgumentError(
                "mesh", f"of {mesh.size()} ranks", allowed, "use fewer ranks, and split the batch or the sequence over the rest"
            )
    for layer in layers:
        _split(layer, mesh)
    return model


def layers_of(model: nn.Module) -> list[NSAttention]:
    """Return the NSAttention layers of a model, itself included. Raises ArgumentError if there is none."""
    layers = [module for module in model.modules() if isinstance(module, NSAttention)]
    if not layers:
        raise ArgumentError("model", f"a {type(model).__name__}", "one with NSAttention layers", "pass a model that has them, or a layer")
    return layers


def _split(layer: NSAttention, mesh: Any) -> None:
    from torch.distributed.tensor import distribute_module  # its import takes 0.5 s
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layer.register_forward_pre_hook(functools.partial(_shared_input, mesh))
    by_groups = {name: ColwiseParallel() for name in ("q", "kv", "gate")}
    parallelize_module(layer, mesh, {**by_groups, "out": RowwiseParallel()})
    for compress in (layer.compress_k, layer.compress_v):
        if isinstance(compress, BlockMLP):
            distribute_module(compress, mesh)  # a replica on each rank
            compress.of_rank = _replica


def _shared_input(mesh: Any, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wrap x in one DTensor for `q`, `kv` and `gate`, so that its gradient is added over ranks once instead of three times."""
    from torch.distributed.tensor import DTensor, Replicate

    plain = inputs and isinstance(inputs[0], Tensor) and not isinstance(inputs[0], DTensor)
    return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False), *inputs[1:]) if plain else inputs


def _replica(parameter: Any) -> Tensor:
    """Return the plain tensor of a replicated DTensor. Its gradient is a partial sum, which is added over ranks."""
    from torch.distributed.tensor import Partial, Replicate

    replica: Tensor = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return replica
