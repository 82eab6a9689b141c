"""What every Triton launch needs: tensors as kernels read them, output buffers, and the number of parts of a split row."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._buffers import unwritten
from nsa_sel.backends._triton.combine import combine_kernel
from nsa_sel.backends._triton.start import REMEMBERED, Launch
from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.telemetry import events

SMS_WHEN_INTERPRETED = 4  # few, so that tests split rows without running many programs
MIN_TILE = 16  # the smallest side of a matrix-unit operand
WALK, WALK_BLOCKS = 64, 16  # ranges that a program lays end to end at once: every key looks for its own among them
LONG_BLOCK = 64  # keys of a block of which fewer at once will do


def tile(width: int, smallest: int = MIN_TILE) -> int:
    """The power of two that holds `width`, at least `smallest`."""
    return max(smallest, 1 << (width - 1).bit_length())


def outputs(call: Call) -> tuple[Tensor, Tensor]:
    """Unwritten o [B,S,G,h,Dv] and lse [B,S,G,h], contiguous; float64 inputs (the interpreter, for gradcheck) keep float64 statistics,
    all others accumulate in float32."""
    q = call.q
    B, S, G, h, _ = q.shape  # one by one: PyTorch takes twice as long to read a torch.Size
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return unwritten(q, B, S, G, h, call.v.shape[3]), unwritten(q, B, S, G, h, dtype=lse_dtype)


def multiprocessors(call: Call) -> int:
    """Of the GPU; interpreted, a few."""
    return SMS_WHEN_INTERPRETED if call.device.kind == "cpu" else call.device.sm_count


def split_parts(call: Call, programs: int, at_once: int, least: int) -> int:
    """Into how many programs each row is split so that few rows still fill the GPU, which runs `at_once` of them side by side: 1 when
    there are rows enough. A program walks `least` keys or more, where a row may have them."""
    parts = min(64, at_once // max(1, programs))
    if parts <= 1:
        return 1
    return max(1, min(parts, -(-call.selection.length_bound(call.S_kv) // least)))


def remembered(call: Call, key: tuple[object, ...], build: Callable[[], Any]) -> Any:
    """A plan kept in the selection, for these keys and, where the call has its own, these positions: the causal clamp depends on both.

    Built anew inside a CUDA graph: a replay must follow ranges that were written since, and what a capture builds holds nothing until
    it is replayed.
    """
    if call.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return build()
    return call.selection.plan((*key, call.k.shape[2]), build, call.q_pos)


def strides(call: Call) -> tuple[int, ...]:
    """Of q [b, s, g, h], k and v [b, g, n] and q_pos [b, s], in the order in which kernels take them."""
    return (*call.q.stride()[:4], *call.k.stride()[:3], *call.v.stride()[:3], *position_strides(call))


def position_strides(call: Call) -> tuple[int, ...]:
    """The strides of q_pos [b, s], or of lengths [b], as `row_limit` takes them."""
    if call.lengths is not None:
        return call.lengths.stride(0), 0
    return (0, 0) if call.q_pos is None else call.q_pos.stride()


def bulk_copies_fit(call: Call) -> bool:
    """Whether this call's blocks can be fetched by bulk copies: sm_90 and newer, whole blocks, 16-byte strides."""
    size, k, v = call.selection.block_size, call.k, call.v
    if size is None or size % MIN_TILE:
        return False
    if call.device.kind == "cuda" and (call.device.sm or 0) < 90:
        return False
    (k_batch, k_group, k_key, _), (v_batch, v_group, v_key, _) = k.stride(), v.stride()
    numbers = k_batch | k_group | k_key | v_batch | v_group | v_key
    return (k.data_ptr() | v.data_ptr() | numbers * k.element_size()) % 16 == 0 and k.shape[2] < 2**31


class CheckedDescriptor(TensorDescriptor):  # type: ignore[misc]
    """A descriptor of what `bulk_copies_fit`: Triton's own checks of every descriptor would only repeat that."""

    def __post_init__(self) -> None:
        pass


def descriptor(x: Tensor, block_l: int, width: int) -> CheckedDescriptor:
    """k or v as the tensor memory accelerator addresses it: `width` columns of block_l keys of one batch entry and group."""
    if x.is_cuda and x.get_device() not in _thread.bound:
        _bind_context(x)
    return CheckedDescriptor(x, x.shape, x.stride(), [1, 1, block_l, width])


class _Thread(threading.local):
    """The devices whose context this thread has bound."""

    def __init__(self) -> None:
        self.bound: set[int] = set()


_thread = _Thread()


def _bind_context(x: Tensor) -> None:
    """Make the device's context that of this thread, once: encoding a descriptor needs it and does not see to it.

    Autograd runs backward passes, and what they recompute, on threads of its own; where a kernel that was compiled elsewhere is the
    first that such a thread starts, nothing else has bound the context yet. A fill does, and may stand in a CUDA graph.
    """
    x.new_zeros(1)
    _thread.bound.add(x.get_device())


def path(call: Call, kernel: str) -> Literal["dense", "varlen"]:
    """dense: a program of `kernel` walks the one range, or one block, of its row. varlen: any number of ranges, a union of rows' blocks, or
    a list of rows; NSA_SEL_TRITON_FORCE_PATH=varlen takes the walk for any number for one, too."""
    by_row = kernel.startswith(("triton-token/", "triton-group/")) and not kernel.endswith("/dkdv")
    return "dense" if by_row and call.selection.n == 1 and call.settings.triton_force_path != "varlen" else "varlen"


def walk_width(call: Call) -> int:
    """How many ranges a program lays end to end at once: 1 on the dense path, where no key looks for its range."""
    long = (call.selection.block_size or 0) >= LONG_BLOCK
    return min(WALK_BLOCKS if long else WALK, tile(call.selection.n, 2 if call.settings.triton_force_path == "varlen" else 1))


class Heads(NamedTuple):
    """What a kernel's constants depend on beside its launch and the selection's static facts: calls that share it share a `Launch`."""

    dtype: torch.dtype
    h: int
    Dk: int
    Dv: int
    has_pos: bool
    block_d: int  # NSA_SEL_TRITON_BLOCK_D and _BLOCK_DV may widen the tiles that hold Dk and Dv (a guard refuses narrower ones)
    block_dv: int


def heads(call: Call) -> Heads:
    """Of this call."""
    q, settings = call.q, call.settings
    _, _, _, h, Dk = q.shape
    has_pos = call.q_pos is not None or call.lengths is not None
    return Heads(q.dtype, h, Dk, call.v.shape[3], has_pos, settings.block_d or 0, settings.block_dv or 0)


def tile_widths(of: Heads) -> tuple[int, int]:
    """The tiles that hold Dk and Dv."""
    return max(tile(of.Dk), of.block_d), max(tile(of.Dv), of.block_dv)


def facts(of: Heads) -> dict[str, Any]:
    """The compile-time facts that every kernel takes."""
    block_d, block_dv = tile_widths(of)
    return {
        "h": of.h, "Dk": of.Dk, "Dv": of.Dv, "HAS_POS": of.has_pos,
        "ACC": tl.float64 if of.dtype == torch.float64 else tl.float32, "BLOCK_D": block_d, "BLOCK_DV": block_dv,
    }  # fmt: skip


def split_facts(of: Heads) -> dict[str, Any]:
    """`facts` for the kernels that may take Dk in two tiles: 192 as 128 + 64, where a power of two would pad it to 256."""
    known = facts(of)
    in_two = tile_columns(of.Dk, of.Dv, of.dtype.itemsize)[0] == 192
    split = in_two and known["BLOCK_D"] == 256 and of.block_d != 256
    return {**known, **({"BLOCK_D": 128, "BLOCK_REST": 64} if split else {"BLOCK_REST": 0})}


@functools.lru_cache(REMEMBERED)
def heads_class(of: Heads) -> str:
    """What follows a kernel's name in configs/ for such heads."""
    known = split_facts(of)
    return launch_class(known["BLOCK_D"] + known["BLOCK_REST"] + known["BLOCK_DV"], of.dtype.itemsize)


def kernel_config(call: Call, of: Heads, kernel: str, *, bulk_copies: bool | None = None) -> KernelConfig:
    """The launch of `kernel` for this call and its heads, with pointers where bulk copies do not fit (bulk_copies: whether they do, where
    that is known), and the event that names it."""
    settings = call.settings
    name = kernel + heads_class(of)
    config = settings.kernel(name)
    if config.loads == "tma" and not (bulk_copies_fit(call) if bulk_copies is None else bulk_copies):
        config = msgspec.structs.replace(config, loads="pointer")
    if settings.debug_triton:
        source = settings.sources.get(f"kernels.{name}", "base.yaml")
        events.emit("sel.triton.kernel", kernel=kernel, config=config.config_id(name), source=source, path=path(call, kernel))
    return config


def combine(part_o: Tensor, part_lse: Tensor, o: Tensor, lse: Tensor, parts: int) -> None:
    """Join the partials [rows, parts, Dv] and [rows, parts] of split rows into o and lse."""
    join = _combine_launch(o.shape[-1], tile(parts, 1))
    join.start(lse.numel(), (part_o, part_lse, o, lse), (parts,))


@functools.lru_cache(REMEMBERED)
def _combine_launch(Dv: int, PARTS: int) -> Launch:
    block_dv = tile(Dv)
    num_warps = min(4, max(1, PARTS * block_dv // 1024))  # 32 numbers a thread, where there are so many
    return Launch(combine_kernel, Dv=Dv, PARTS=PARTS, BLOCK_DV=block_dv, num_warps=num_warps)
