"""Derive kernel arguments from a call: strides, sizes, head dims, kernel config, and output tensors."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.tiles import MIN_TILE, tile_size
from nsa_sel.backends.launcher.buffers import temporary, unwritten
from nsa_sel.backends.launcher.passes import cached_by_class
from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.core.call import Call
from nsa_sel.errors import warn
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.telemetry import events

WALK, WALK_BLOCKS = 64, 16  # most ranges per walk (for long blocks WALK_BLOCKS): every key searches among them
LONG_BLOCK = 64  # block size from which WALK_BLOCKS ranges give enough keys per walk


def row_gradients(call: Call, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized, contiguous dq [B,S,G,h,Dk] and delta [B,S,G,h]."""
    return unwritten(call.q, *call.q.shape), temporary(call, lse, *lse.shape)


class Strides(NamedTuple):
    """Strides in elements, as kernels take them. The last dimension is contiguous."""

    q: tuple[int, ...]  # b, s, g, h
    k: tuple[int, ...]  # b, g, n
    v: tuple[int, ...]  # b, g, n
    pos: tuple[int, ...]  # (b, s) of q_pos, (b, 0) of lengths, or () for windows, which have neither


@cached_by_class
def strides(call: Call) -> Strides:
    return Strides(call.q.stride()[:4], call.k.stride()[:3], call.v.stride()[:3], position_strides(call))


def position_strides(call: Call) -> tuple[int, ...]:
    """Return the strides of q_pos [B,S] or lengths [B], as `row_limit` takes them."""
    if call.lengths is not None:
        return call.lengths.stride(0), 0
    return (0, 0) if call.q_pos is None else call.q_pos.stride()


@cached_by_class
def sizes(call: Call) -> tuple[int, int, int]:
    """Return S, S_kv and G, as kernels take them."""
    _, S, G, _, _ = call.q.shape
    return S, call.S_kv, G


def plan_sizes(call: Call) -> tuple[int, int, int]:
    """Return `sizes` for the plans of a selection, whose groups are the selection's."""
    return call.q.shape[1], call.S_kv, call.selection.groups


def path(call: Call, kernel: str) -> Literal["dense", "varlen"]:
    """Return which path `kernel` takes.

    - dense: a program walks the one range of its row.
    - varlen: a program walks any number of ranges, a union of rows' blocks, or a list of rows.
      NSA_SEL_TRITON_FORCE_PATH=varlen forces this path for rows of one range, too.
    """
    by_row = kernel.startswith(("triton-token/", "triton-group/")) and not kernel.endswith("/dkdv")
    return "dense" if by_row and call.selection.n == 1 and call.settings.triton_force_path != "varlen" else "varlen"


def walk_width(call: Call) -> int:
    """Return how many ranges a walk concatenates; 1 on the dense path, where no key needs to search for its range."""
    long = (call.selection.block_size or 0) >= LONG_BLOCK
    return min(WALK_BLOCKS if long else WALK, tile_size(call.selection.n, 2 if call.settings.triton_force_path == "varlen" else 1))


class Heads(NamedTuple):
    """Facts of a call's heads that determine kernel constants, besides config and selection. Equal values share a
    `Kernel`."""

    dtype: torch.dtype
    h: int
    Dk: int
    Dv: int
    block_d: int  # NSA_SEL_TRITON_BLOCK_D and _BLOCK_DV, which may widen the tiles that hold Dk and Dv; 0 if unset
    block_dv: int
    share: int = 1


class Dims(NamedTuple):
    """The constexpr parameter `dims` of kernels: h heads of Dk and Dv columns, the widths of the tiles that hold them, and
    how many groups share the ranges of a row (`Call.groups_per_selection`)."""

    h: int
    Dk: int
    Dv: int
    BLOCK_D: int
    BLOCK_REST: int  # width of the second tile of Dk, 0 if one tile holds it
    BLOCK_DV: int
    SHARE: int


@cached_by_class
def heads(call: Call) -> Heads:
    q, settings = call.q, call.settings
    _, _, _, h, Dk = q.shape
    return Heads(q.dtype, h, Dk, call.v.shape[3], settings.block_d or 0, settings.block_dv or 0, call.groups_per_selection)


def heads_of(q: Tensor, v: Tensor) -> Heads:
    """Return the heads of a call whose tiles no flag widens: windows and compressed keys."""
    _, _, _, h, Dk = q.shape
    return Heads(q.dtype, h, Dk, v.shape[3], 0, 0)


def dims_of(q: Tensor, v: Tensor) -> Dims:
    """Return `split_dims(heads_of(q, v))`."""
    return split_dims(heads_of(q, v))


@functools.lru_cache(REMEMBERED)  # warns once
def dims(of: Heads) -> Dims:
    """Return dims with one tile for Dk. Warns if a flag asks for a tile that is too narrow."""
    for flag, tile, dim, columns in (("BLOCK_D", of.block_d, "Dk", of.Dk), ("BLOCK_DV", of.block_dv, "Dv", of.Dv)):
        if 0 < tile < columns:
            runs = f"the kernel runs as without the flag; unset it, or set it to {tile_size(columns)} or more"
            warn(f"NSA_SEL_TRITON_{flag} is {tile}, but Triton kernels hold {dim} = {columns} in one tile, which it can only widen: {runs}")
    return Dims(of.h, of.Dk, of.Dv, max(tile_size(of.Dk), of.block_d), 0, max(tile_size(of.Dv), of.block_dv), of.share)


@functools.lru_cache(REMEMBERED)
def split_dims(of: Heads) -> Dims:
    """Return dims with two tiles for a Dk such as 192 (128 + 64), which one power of two would pad to 256."""
    one = dims(of)
    in_two = tile_columns(of.Dk, of.Dv, of.dtype.itemsize)[0] == 192 and one.BLOCK_D == 256 and of.block_d != 256
    return one._replace(BLOCK_D=128, BLOCK_REST=64) if in_two else one


NARROW = 128  # columns of a key plus its value


@functools.lru_cache(REMEMBERED)
def narrow_suffix(of: Heads) -> str:
    """Return `config_suffix`, or "-narrow" for at most NARROW columns of 16 bits, for kernels with such configs."""
    narrow = tile_size(of.Dk) + tile_size(of.Dv) <= NARROW and of.dtype.itemsize == 2
    return "-narrow" if narrow else config_suffix(of)


@functools.lru_cache(REMEMBERED)
def config_suffix(of: Heads) -> str:
    """Return the suffix of a kernel's name in configs/ for these heads."""
    tiles = split_dims(of)
    return launch_class(tiles.BLOCK_D + tiles.BLOCK_REST + tiles.BLOCK_DV, of.dtype.itemsize)


@cached_by_class
def kernel_config(call: Call, of: Heads, kernel: str, tma: bool | None = None) -> KernelConfig:
    """Return the config of `kernel` for this call, with pointer loads if TMA does not fit.

    tma: whether TMA fits, if the caller knows; None to check.
    """
    config = call.settings.kernel(kernel + config_suffix(of))
    if config.loads == "tma" and not (tma_fits(call) if tma is None else tma):
        config = msgspec.structs.replace(config, loads="pointer")
    return config


@cached_by_class
def tma_fits(call: Call) -> bool:
    """Return whether TMA can load this call's blocks: sm_90 or newer, whole blocks, 16-byte aligned bases and
    strides."""
    size, k, v = call.selection.block_size, call.k, call.v
    if size is None or size % MIN_TILE:
        return False
    if call.device.kind == "cuda" and (call.device.sm or 0) < 90:
        return False
    (k_batch, k_group, k_key, _), (v_batch, v_group, v_key, _) = k.stride(), v.stride()
    numbers = k_batch | k_group | k_key | v_batch | v_group | v_key
    return (k.data_ptr() | v.data_ptr() | numbers * k.element_size()) % 16 == 0 and k.shape[2] < 2**31


def announced(call: Call, of: Heads, name: str, config: KernelConfig, kernel: Kernel) -> Kernel:
    """Emit the event that names the config of `kernel`, which the caller launches next; return `kernel`.

    Args:
        name: the kernel's name in configs/, without the suffix for head dims.
        config: what `kernel_config` returned, possibly changed by the backend.
        kernel: the event shows its constants, because a backend may cut tiles to blocks, and widen rows and warps for
            many heads.
    """
    settings = call.settings
    if settings.traced:
        full, constants = name + config_suffix(of), kernel.constants
        chosen = msgspec.structs.replace(settings.kernel(full), loads=config.loads)
        rows = constants.get("ROWS", constants.get("BLOCK_H", 1))
        stages, warps = constants["num_stages"], constants["num_warps"]
        compiled = msgspec.structs.replace(chosen, block_l=constants["BLOCK_L"], rows=rows, num_warps=warps, num_stages=stages)
        dims = constants["dims"]
        events.emit(
            "sel.triton.kernel", kernel=name,
            config=f"{compiled.config_id(full)}-D{dims.BLOCK_D + dims.BLOCK_REST}-DV{dims.BLOCK_DV}", chosen=chosen.config_id(full),
            source=settings.kernel_source(full), path=path(call, name),
        )  # fmt: skip
    return kernel


def options(config: KernelConfig) -> dict[str, Any]:
    """Return the compiler options of a config."""
    return {"num_warps": config.num_warps, "num_stages": config.num_stages}
