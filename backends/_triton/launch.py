"""What every Triton launch needs: tensors as kernels read them, output buffers, and the number of parts of a split row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel import observe
from nsa_sel.backends._triton.combine import combine_kernel
from nsa_sel.backends._triton.start import start
from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.call import Call
from nsa_sel.config import KernelConfig

LOG2_E = 1.4426950408889634
_thread = threading.local()
SMS_WHEN_INTERPRETED = 4  # few, so that tests split rows without running many programs
MIN_TILE = 16  # the smallest side of a matrix-unit operand
SPLIT_KEYS = 32  # the fewest keys worth a program of their own
WALK = 64  # ranges that a program lays end to end at once


def tile(width: int, smallest: int = MIN_TILE) -> int:
    """The power of two that holds `width`, at least `smallest`."""
    return max(smallest, 1 << (width - 1).bit_length())


def lse_dtype(q: Tensor) -> torch.dtype:
    """float64 inputs (the interpreter, for gradcheck) keep float64 statistics; all others accumulate in float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def outputs(call: Call) -> tuple[Tensor, Tensor]:
    """Unwritten o [B,S,G,h,Dv] and lse [B,S,G,h], contiguous."""
    q = call.q
    o = torch.empty(*q.shape[:-1], call.v.shape[-1], dtype=q.dtype, device=q.device)
    return o, torch.empty(q.shape[:-1], dtype=lse_dtype(q), device=q.device)


def position_arguments(call: Call) -> tuple[Tensor | None, int, int]:
    """q_pos and its strides, as `row_limit` takes them."""
    if call.q_pos is None:
        return None, 0, 0
    return call.q_pos, call.q_pos.stride(0), call.q_pos.stride(1)


def scale_log2(call: Call) -> float:
    """The factor from products to logits in base 2; never 0, which would turn a masked -inf into NaN."""
    return max(call.scale * LOG2_E, 1e-30)


def with_positive_scale(call: Call) -> Call:
    """The same logits from -q and -scale."""
    return replace(call, q=-call.q, scale=-call.scale)


def split_parts(call: Call, programs: int) -> int:
    """Into how many programs each row is split so that few rows still fill the GPU: 1 when there are rows enough."""
    sms = SMS_WHEN_INTERPRETED if call.device.kind == "cpu" else call.device.sm_count
    chunks = -(-call.selection.length_bound(call.k.shape[2]) // SPLIT_KEYS)
    return max(1, min(64, chunks, 2 * sms // max(1, programs)))


def kernel_config(call: Call, kernel: str) -> KernelConfig:
    """The launch of `kernel` for this call's head dimensions and dtype, with pointers where bulk copies do not fit, and the event
    that names it."""
    known = split_facts(call)
    name = kernel + launch_class(known["BLOCK_D"] + known["BLOCK_REST"] + known["BLOCK_DV"], call.q.element_size())
    config = call.settings.kernel(name)
    if config.loads == "tma" and not bulk_copies_fit(call):
        config = msgspec.structs.replace(config, loads="pointer")
    if call.settings.debug_triton:
        source = call.settings.sources.get(f"kernels.{name}", "base.yaml")
        path = "dense" if call.selection.n == 1 else "varlen"
        observe.emit("sel.triton.kernel", kernel=kernel, config=config.config_id(name), source=source, path=path)
    return config


def remembered(call: Call, key: tuple[object, ...], build: Callable[[], Any]) -> Any:
    """A plan kept in the selection.

    Built anew with positions of its own, which the causal clamp depends on, and inside a CUDA graph: a replay must follow ranges
    that were written since, and what a capture builds holds nothing until it is replayed.
    """
    if call.q_pos is not None or (call.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return build()
    return call.selection.plan((*key, tuple(call.k.shape[:3])), build)


def strides(call: Call) -> tuple[int, ...]:
    """Of q [b, s, g, h], k and v [b, g, n] and q_pos [b, s], in the order in which kernels take them."""
    return (*call.q.stride()[:4], *call.k.stride()[:3], *call.v.stride()[:3], *position_arguments(call)[1:])


def bulk_copies_fit(call: Call) -> bool:
    """Whether this call's blocks can be fetched by bulk copies: sm_90 and newer, whole blocks, 16-byte strides."""
    size = call.selection.block_size
    if size is None or size % MIN_TILE:
        return False
    if call.device.kind == "cuda" and (call.device.sm or 0) < 90:
        return False
    step = 16 // call.k.element_size()
    aligned = all(x.data_ptr() % 16 == 0 and all(stride % step == 0 for stride in x.stride()[:3]) for x in (call.k, call.v))
    return aligned and call.k.shape[2] < 2**31


def descriptor(x: Tensor, block_l: int, width: int) -> TensorDescriptor:
    """k or v as the tensor memory accelerator addresses it: `width` columns of block_l keys of one batch entry and group."""
    if x.is_cuda:
        _bind_context(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, block_l, width])


def _bind_context(x: Tensor) -> None:
    """Make the device's context that of this thread, once: encoding a descriptor needs it and does not see to it.

    Autograd runs backward passes, and what they recompute, on threads of its own; where a kernel that was compiled elsewhere is the
    first that such a thread starts, nothing else has bound the context yet. A fill does, and may stand in a CUDA graph.
    """
    bound: set[int] = _thread.__dict__.setdefault("bound", set())
    if x.get_device() not in bound:
        x.new_zeros(1)
        bound.add(x.get_device())


def walk_width(call: Call) -> int:
    """How many ranges a program lays end to end at once."""
    return min(WALK, tile(call.selection.n, 1))


def tile_widths(call: Call) -> tuple[int, int]:
    """The tiles that hold Dk and Dv; NSA_SEL_TRITON_BLOCK_D and _BLOCK_DV may widen them (a guard refuses narrower ones)."""
    return max(tile(call.q.shape[-1]), call.settings.block_d or 0), max(tile(call.v.shape[-1]), call.settings.block_dv or 0)


def facts(call: Call) -> dict[str, Any]:
    """The compile-time facts that every kernel takes."""
    block_d, block_dv = tile_widths(call)
    return {
        "h": call.q.shape[3], "Dk": call.q.shape[4], "Dv": call.v.shape[3], "HAS_POS": call.q_pos is not None,
        "ACC": tl.float64 if call.q.dtype == torch.float64 else tl.float32, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
    }  # fmt: skip


def split_facts(call: Call) -> dict[str, Any]:
    """`facts` for the kernels that may take Dk in two tiles: 192 as 128 + 64, where a power of two would pad it to 256."""
    known = facts(call)
    in_two = tile_columns(call.q.shape[-1], call.v.shape[-1], call.q.element_size())[0] == 192
    split = in_two and known["BLOCK_D"] == 256 and call.settings.block_d != 256
    return {**known, **({"BLOCK_D": 128, "BLOCK_REST": 64} if split else {"BLOCK_REST": 0})}


def combine(part_o: Tensor, part_lse: Tensor, o: Tensor, lse: Tensor, parts: int) -> None:
    """Join the partials [rows, parts, Dv] and [rows, parts] of split rows into o and lse."""
    block_rows = 4 if lse.numel() >= 4096 else 1
    start(
        combine_kernel, (-(-lse.numel() // block_rows),),
        part_o, part_lse, o, lse, lse.numel(), parts, Dv=o.shape[-1], PARTS=tile(parts, 1), BLOCK_DV=tile(o.shape[-1]),
        BLOCK_ROWS=block_rows, num_warps=1,
    )  # fmt: skip
