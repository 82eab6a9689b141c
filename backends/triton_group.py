"""triton-group: one program per query row and KV group, which loads K and V once for all h heads of the group.

Forward kernels, all built on the online softmax of _triton/softmax.py:
    ranges  pointer loads over ranges of any length; over blocks of fewer than 16 keys, a kernel of their own
            (_triton/group_ranges.py)
    blocks  whole blocks through TMA (sm_90 and newer), the block that the causal clamp cuts through pointers; all
            blocks through pointers if pages are smaller than a step (_triton/group_blocks.py)
    split   few rows (decode): the `ranges` kernel with each row's keys split over several programs, merged by
            log-sum-exp (_triton/combine.py)
Backward: dQ uses the walks of `ranges` and `blocks`; dK and dV take one program per KV tile (_triton/dkdv.py).
The h heads are the rows of the tensor-core tiles, padded to 16. More than 64 heads take several programs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.combine import combine, count_splits, multiprocessors, partials
from nsa_sel.backends._triton.dkdv import key_value_gradients
from nsa_sel.backends._triton.group_blocks import dq_blocks_kernel, forward_blocks_kernel
from nsa_sel.backends._triton.group_ranges import dq_kernel, dq_small_blocks_kernel, forward_ranges_kernel, forward_small_blocks_kernel
from nsa_sel.backends._triton.kernel import Kernel, cached_kernel
from nsa_sel.backends._triton.tiles import MIN_TILE, kv_descriptors, tile_size
from nsa_sel.backends.launcher.passes import backward_of_any_scale, forward_of_any_scale, outputs
from nsa_sel.core.call import Call
from nsa_sel.core.request import FEW_TOKENS
from nsa_sel.settings.schema import KernelConfig

FULL = 8  # warps per program at which one program fills a multiprocessor


@forward_of_any_scale
def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    B, S, G, _, _ = call.q.shape
    heads = arguments.heads(call)
    programs, sms = B * S * G * _head_tiles(heads.h), multiprocessors(call)
    if programs <= (2 * sms if _small_block(call) else sms):
        config = arguments.kernel_config(call, heads, "triton-group/decode")
        return _forward_ranges(call, heads, "triton-group/decode", config, programs, _count_splits(call, config, programs))
    blocks = "triton-group/decode-blocks" if S <= FEW_TOKENS else "triton-group/forward-blocks"
    if _tma_fits(call, heads, blocks):
        return _forward_blocks(call, heads, blocks, arguments.kernel_config(call, heads, blocks, True), programs)
    if call.block_table is not None and _whole_blocks(call):
        config = arguments.kernel_config(call, heads, "triton-group/decode-pages", False)
        if config.num_stages > 2 and programs > 2 * sms:  # two stages let three programs run on one multiprocessor
            config = msgspec.structs.replace(config, num_stages=2)
        return _forward_blocks(call, heads, "triton-group/decode-pages", config, programs)
    ranges = "triton-group/decode-ranges" if S <= FEW_TOKENS or call.block_table is not None else "triton-group/forward"
    name = "triton-group/decode" if programs <= 2 * sms else ranges
    return _forward_ranges(call, heads, name, arguments.kernel_config(call, heads, name), programs, 1)


def _forward_blocks(call: Call, heads: arguments.Heads, name: str, config: KernelConfig, programs: int) -> tuple[Tensor, Tensor]:
    o, lse = outputs(call)
    n = call.selection.n
    kernel = _blocks(heads, _cache(call), n, _block(call), config)
    k_desc, _, v_desc = kv_descriptors(call.k, call.v, kernel.constants["dims"], kernel.constants["BLOCK_L"], config.loads == "tma")
    arguments.announced(call, heads, name, config, kernel).launch(
        programs,
        (call.q, k_desc, v_desc, call.k, call.v, *_cache_tensors(call), o, lse),
        (arguments.strides(call), _cache_strides(call), arguments.sizes(call), n, call.scale_log2()),
    )
    return o, lse


def _forward_ranges(
    call: Call, heads: arguments.Heads, name: str, config: KernelConfig, programs: int, splits: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    # A walk of one step has nothing to prefetch.
    if config.num_stages > 2 and call.selection.length_bound(call.S_kv) <= splits * config.block_l:
        config = msgspec.structs.replace(config, num_stages=2)
    o, lse = outputs(call)
    parts, n, block = partials(call, o, lse, splits), call.selection.n, _small_block(call)
    if block:
        function, constants = forward_small_blocks_kernel, {"BLOCK": block}
    else:
        walk = arguments.walk_width(call)
        function, constants = forward_ranges_kernel, {"ONE_PAGE": _one_page(call), "ONE_WALK": splits > 1 and n <= walk, "NP": walk}
    kernel = _kernel(function, heads, config, cache=_cache(call), SPLIT=splits > 1, BLOCK_L=config.block_l, **constants)
    arguments.announced(call, heads, name, config, kernel).launch(
        programs * splits,
        (call.q, call.k, call.v, *_cache_tensors(call), *parts),
        (arguments.strides(call), _cache_strides(call), arguments.sizes(call), n, splits, call.scale_log2()),
    )
    combine(*parts, o, lse, splits)
    return o, lse


def _count_splits(call: Call, config: KernelConfig, programs: int) -> int:
    """Return the number of programs per row. A multiprocessor runs one program of FULL warps or more, else two at once;
    over small blocks, where programs wait for addresses, as many as have FULL warps together. Each program walks at
    least 32 keys."""
    together = FULL // config.num_warps if _small_block(call) else 2
    at_once = multiprocessors(call) * (1 if config.num_warps >= FULL else together)
    return count_splits(call, programs, at_once, max(32, config.block_l))


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv: dq per row; dk and dv per KV tile, summed in ascending order over the rows that select it."""
    B, S, G, _, _ = call.q.shape
    n = call.selection.n
    heads = arguments.heads(call)
    dq, delta = arguments.row_gradients(call, lse)
    grid = B * S * G * _head_tiles(heads.h)
    tensors = (call.k, call.v, call.disjoint_ranges(), call.q_pos, o, lse, do, dlse, dq, delta)
    numbers = (arguments.strides(call), do.stride()[:4], arguments.sizes(call), n, call.scale, call.scale_log2())
    if _tma_fits(call, heads, "triton-group/dq-blocks"):
        config = arguments.kernel_config(call, heads, "triton-group/dq-blocks", True)
        kernel = _kernel(dq_blocks_kernel, heads, config, **_block_tiles(n, _block(call), config))
        arguments.announced(call, heads, "triton-group/dq-blocks", config, kernel)
        k_desc, _, v_desc = kv_descriptors(call.k, call.v, kernel.constants["dims"], kernel.constants["BLOCK_L"], True)
        kernel.launch(grid, (call.q, k_desc, v_desc, *tensors), numbers)
    else:
        config = arguments.kernel_config(call, heads, "triton-group/dq")
        block = _small_block(call)
        function, walking = (dq_small_blocks_kernel, {"BLOCK": block}) if block else (dq_kernel, {"NP": arguments.walk_width(call)})
        kernel = _kernel(function, heads, config, BLOCK_L=config.block_l, **walking)
        arguments.announced(call, heads, "triton-group/dq", config, kernel).launch(grid, (call.q, *tensors), numbers)
    dk, dv = key_value_gradients(call, heads, lse, do, delta, "triton-group/dkdv")
    return dq, dk, dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Return how many keys the forward loads: each row's keys, once per tile of up to 64 heads."""
    return selected * _head_tiles(call.q.shape[3])


class Cache(NamedTuple):
    """Layout of a call's key cache, the constexpr parameter `cache` of the forward kernels."""

    LENGTHS: bool  # q_pos holds sequence lengths instead of positions
    PAGE: int  # keys per page; 0 if k and v are not paged
    PAGE_SCALES: bool  # quantized keys have one scale per page and head
    REPEATS: bool  # a row may name a block twice
    PACKED: bool  # a sequence is one row of a packed batch, see `Call.table_rows`


class CacheStrides(NamedTuple):
    """Strides in elements, 0 for absent tensors. Flat, because Triton 3.6 drops values of 1 from nested tuples that
    begin with 1."""

    table: int  # between rows of the block table
    k_page: int  # of k's scales, between pages
    k_group: int
    v_page: int
    v_group: int


_NO_STRIDES = CacheStrides(0, 0, 0, 0, 0)


def _cache(call: Call) -> Cache:
    of_pages = call.scales is not None and call.scales.page_keys > 0
    page = 0 if call.block_table is None else call.k.shape[2]
    return Cache(call.lengths is not None, page, of_pages, call.may_repeat(), call.table_rows is not None)


def _cache_tensors(call: Call) -> tuple[Tensor | None, ...]:
    """Return the tensors that locate a row's keys (ranges, positions or lengths, the block table), and the scales of
    quantized keys and values."""
    scales = (None, None) if call.scales is None else (call.scales.k, call.scales.v)
    return call.listed_ranges(), call.q_pos if call.lengths is None else call.lengths, call.block_table, *scales


def _cache_strides(call: Call) -> CacheStrides:
    if call.block_table is None and call.scales is None:
        return _NO_STRIDES
    k_scale, v_scale = ((0, 0) if x is None else x.stride() for x in _cache_tensors(call)[3:])
    return CacheStrides(0 if call.block_table is None else call.block_table.stride(0), *k_scale, *v_scale)


def _blocks(heads: arguments.Heads, cache: Cache, n: int, block: int, config: KernelConfig) -> Kernel:
    return _kernel(forward_blocks_kernel, heads, config, cache=cache, **_block_tiles(n, block, config))


def _kernel(function: Any, heads: arguments.Heads, config: KernelConfig, **constants: Any) -> Kernel:
    """Return the kernel with the tile of heads, the compiler options and further constants."""
    block_h, dims = _block_h(heads.h), arguments.dims(heads)
    warps = max(config.num_warps, block_h // 16)
    return cached_kernel(function, dims=dims, **constants, BLOCK_H=block_h, num_warps=warps, num_stages=config.num_stages)


def _block_tiles(n: int, block: int, config: KernelConfig) -> dict[str, int]:
    block_l = min(config.block_l, block)
    return {"BLOCK": block, "BLOCK_L": block_l, "TAIL_L": min(32, block_l), "NP": tile_size(n, 1)}


def _block(call: Call) -> int:
    block = call.selection.block_size
    assert block is not None, "the kernels over blocks run for whole blocks alone"
    return block


def _small_block(call: Call) -> int:
    """Return the block size if one step takes several blocks (fewer than MIN_TILE keys), else 0."""
    size = call.selection.block_size
    return size if size is not None and size < MIN_TILE and call.selection.n > 1 else 0


def _whole_blocks(call: Call) -> bool:
    """Return whether `forward_blocks_kernel` takes the selection: power-of-two blocks, n <= 1024 (it loads a row's
    ranges at once)."""
    size = call.selection.block_size
    return size is not None and size >= MIN_TILE and not size & (size - 1) and call.selection.n <= 1024


def _tma_fits(call: Call, heads: arguments.Heads, kernel: str) -> bool:
    """Return whether `kernel` can load whole blocks through TMA, with each step inside one page."""
    config = call.settings.kernel(kernel + arguments.config_suffix(heads))
    if config.loads != "tma" or not _whole_blocks(call):
        return False
    whole = call.block_table is None or call.k.shape[2] % min(config.block_l, _block(call)) == 0
    return whole and arguments.tma_fits(call)


def _one_page(call: Call) -> bool:
    """Return whether each range lies within one page and all keys of the pool have 32-bit indices."""
    size, (pages, _, page, _) = call.selection.block_size, call.k.shape
    return call.block_table is not None and size is not None and page % size == 0 and pages * page < 2**31


def _block_h(h: int) -> int:
    return min(64, tile_size(h))


def _head_tiles(h: int) -> int:
    """Return the programs per row: one for every 64 heads."""
    return -(-h // _block_h(h))
