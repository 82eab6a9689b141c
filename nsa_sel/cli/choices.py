"""Requests that choose blocks, for `nsa-sel explain --choose`: each way's own sizes (docs/choosing.md) with the options' shape."""

from __future__ import annotations

import enum

import msgspec

from nsa_sel.core.request import Request
from nsa_sel.errors import ArgumentError

Choice = enum.StrEnum("Choice", ["nsa", "minimax", "moba", "infllm"])
LOGITS, WEIGHTS = ("logits", "sum", "max"), ("weights", "sum", "max")


def choice(request: Request, way: str) -> Request:
    """The request by which `way` chooses the blocks that `request` attends to; NSA's has attention, the others have neither v nor gradient.

    Raises:
        ArgumentError: no block size; gradients of a way that has none.
    """
    if request.block_size is None:
        raise ArgumentError("--block-size", 0, "keys of a block", "blocks are chosen: pass their size")
    common = msgspec.structs.replace(request, kind="choose", max_length=request.S_kv, page_size=None, quantized=None)
    if way == "nsa":
        return msgspec.structs.replace(common, compress=(32, 16))
    if request.needs_grad:
        raise ArgumentError("--needs-grad", True, "--no-grad with --choose " + way, "its choice has no gradient")
    if way == "infllm":
        return msgspec.structs.replace(common, compress=(32, 16), pool=WEIGHTS, Dv=0)
    if way == "minimax":
        return msgspec.structs.replace(common, compress=(1, 1), pool=LOGITS, Dv=0, h=1)
    size = request.block_size
    return msgspec.structs.replace(common, compress=(size, size), pool=LOGITS, Dv=0, G=request.G * request.h, h=1)
