"""Attention in which every row sees one run of keys, and its dq: sliding windows, and compressed keys.

A tile holds TQ adjacent tokens with their h heads (walk.py). It walks the keys that any of its rows sees; others are
not read. `rule` decides which run a row sees:
    a Rule    the first keys, up to a limit that follows from the row's position (choose_rows.py). The walk begins with
              whole steps that all rows see, and ends with masked steps of TAIL_K keys.
    None      a sliding window: the keys (t - window, t], in a packed batch only those of the row's own sequence
              (window.py). The walk takes the last keys first, in masked steps of TAIL_K, then whole steps from the
              first key on, with a mask until all windows have begun.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.arguments import Dims, dims_of, options
from nsa_sel.backends._triton.choose_rows import locate_tile, seen_keys
from nsa_sel.backends._triton.kernel import REMEMBERED, Kernel
from nsa_sel.backends._triton.softmax import LN_2, LOG2_E, finish_softmax, row_delta
from nsa_sel.backends._triton.tiles import (
    MIN_TILE,
    aligned,
    kv_descriptors,
    load_split,
    row_pointers,
    store_columns,
    tile_size,
)
from nsa_sel.backends._triton.walk import add_cut_steps, add_whole_steps, empty_dq, empty_sums, load_rows, store_dq
from nsa_sel.backends._triton.window import keys_of_rows
from nsa_sel.core.call import ChooseCall, Rule, WindowCall
from nsa_sel.settings.schema import KernelConfig

TAIL = 32  # compressed keys per masked step


@triton.jit
def run_of_tile(q_pos, bounds, strides, b, s, exists, sizes, rule: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the run of keys that the rows s [ROWS] see, and the limits of its walk:

    - low, high: [ROWS], the keys [low, high) of each row; low is unused with a rule, where it is 0.
    - first, end: the keys [first, end) that any row sees.
    - begun: the first key inside all windows.
    - whole: end of the whole steps of BLOCK_K keys, which all rows see from `begun` on.
    """
    if rule is None:
        low, high = keys_of_rows(bounds, s, sizes)
        first, begun = tl.min(low, 0), tl.max(low, 0)
        whole = first + tl.maximum(tl.min(high, 0) - first, 0) // BLOCK_K * BLOCK_K
        return low, high, first, begun, whole, tl.max(tl.where(low < high, high, 0), 0)
    else:
        high = tl.where(exists, seen_keys(q_pos, strides.pos, b.to(tl.int64), s.to(tl.int64), sizes, rule), 0)
        fewest = tl.min(tl.where(exists, high, sizes.C), 0)
        return high, high, 0, 0, fewest // BLOCK_K * BLOCK_K, tl.max(high, 0)


@triton.jit
def walk_runs(
    sums, q, grad, descs, k, v, strides, b, g, offset, run, c,
    dims: tl.constexpr, rule: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
):  # fmt: skip
    """Add the keys of the tile's rows to the sums."""
    low, high, first, begun, whole, end = run
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    if rule is None:
        sums = add_cut_steps(sums, q, grad, k, v, strides, b64, g64, offset, whole, end, low, high, c, dims, TAIL_K, True)
        sums = add_whole_steps(
            sums, q, grad, descs, k, v, strides, b, g, offset, first, whole, low, high, begun, c, dims, BLOCK_K, True
        )  # fmt: skip
    else:
        sums = add_whole_steps(
            sums, q, grad, descs, k, v, strides, b, g, offset, first, whole, low, high, begun, c, dims, BLOCK_K, False
        )  # fmt: skip
        sums = add_cut_steps(sums, q, grad, k, v, strides, b64, g64, offset, whole, end, low, high, c, dims, TAIL_K, False)
    return sums


@triton.jit
def forward_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, q_pos, cu, cu_cmp, bounds, o, lse, strides, sizes, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale * q k^T) v and lse for one tile's rows and heads.

    Grid: one program per tile of TQ tokens; where h > ROWS, one program per ROWS heads. Late tiles come first.
    Tiles: q [ROWS, BLOCK_D + BLOCK_REST], k [BLOCK_K, BLOCK_D + BLOCK_REST], v [BLOCK_K, BLOCK_DV]; TAIL_K keys per
    masked step.
    TMA: k_desc, k_rest_desc and v_desc load whole steps; None: pointer loads.
    """
    b, g, s, head, out, exists, offset, own = locate_tile(tl.program_id(0), cu, cu_cmp, sizes, dims.h, TQ, ROWS)
    q_rows = row_pointers(q, strides.q, b.to(tl.int64), g.to(tl.int64), s.to(tl.int64), head)  # [ROWS]
    q_tile = load_split(q_rows, exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)  # [ROWS, BLOCK_D], [ROWS, BLOCK_REST]
    run = run_of_tile(q_pos, bounds, strides, b, s, exists, own, rule, BLOCK_K)
    sums = empty_sums(ROWS, dims.BLOCK_DV, lse.dtype.element_ty)
    acc, l, m = walk_runs(
        sums, q_tile, None, (k_desc, k_rest_desc, v_desc), k, v, strides, b, g, offset, run, scale_log2, dims, rule, BLOCK_K, TAIL_K
    )  # fmt: skip
    o_tile, lse2 = finish_softmax(acc, l, m, scale_log2)  # [ROWS, BLOCK_DV], [ROWS]
    store_columns(o + out * dims.Dv, o_tile, exists, 0, dims.Dv)
    tl.store(lse + out, lse2 * LN_2, mask=exists)


@triton.jit
def dq_kernel(
    q, k_desc, k_rest_desc, v_desc, k, v, q_pos, cu, cu_cmp, bounds, o, lse, do, dlse, dq, to_lse2, to_delta,
    strides, stride_do, sizes, scale, scale_log2,
    dims: tl.constexpr, rule: tl.constexpr, TQ: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TAIL_K: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * ds k for one tile's rows and heads.

    Also store the facts of the rows that dk and dv need: delta = sum(do * o) - dlse and base-2 lse. A window has them
    in [B,S,G,h] each; compressed keys in [B,G,2,S,h] of `to_delta`, with the rows and heads of a group adjacent.
    Grid, tiles and TMA are those of `forward_kernel`; do is [ROWS, BLOCK_DV].
    """
    ACC: tl.constexpr = lse.dtype.element_ty
    b, g, s, head, out, exists, offset, own = locate_tile(tl.program_id(0), cu, cu_cmp, sizes, dims.h, TQ, ROWS)
    b64, g64, s64 = b.to(tl.int64), g.to(tl.int64), s.to(tl.int64)
    q_tile, q_rest, do_tile = load_rows(None, None, q, do, strides, stride_do, b64, g64, 0, s64, head, exists, dims, ROWS)
    delta = row_delta(o, do_tile, dlse, out, exists, dims, ACC)  # [ROWS]
    lse2 = tl.load(lse + out, mask=exists, other=0.0) * LOG2_E  # [ROWS]
    if rule is None:
        tl.store(to_delta + out, delta, mask=exists)
        tl.store(to_lse2 + out, lse2, mask=exists)
    else:
        facts = to_delta + ((b64 * sizes.G + g64) * 2 * sizes.S + s64) * dims.h + head
        tl.store(facts, delta, mask=exists)
        tl.store(facts + sizes.S * dims.h, lse2, mask=exists)
    run = run_of_tile(q_pos, bounds, strides, b, s, exists, own, rule, BLOCK_K)
    sums = walk_runs(
        empty_dq(ROWS, dims, ACC), (q_tile, q_rest), (do_tile, lse2, delta), (k_desc, k_rest_desc, v_desc), k, v, strides, b, g, offset,
        run, scale_log2, dims, rule, BLOCK_K, TAIL_K,
    )  # fmt: skip
    if rule is not None:
        has_keys = lse2 != float("-inf")
        store_dq(dq + out * dims.Dk, sums, scale, has_keys, exists, dims)
    else:
        if bounds is not None:  # padding rows see no key
            has_keys = (run[0] < run[1])[:, None]
            sums = tl.where(has_keys, sums[0], 0.0), tl.where(has_keys, sums[1], 0.0)
        store_dq(dq + out * dims.Dk, sums, scale, None, exists, dims)


def tokens_of(call: ChooseCall | WindowCall, config: KernelConfig) -> int:
    """Return the tokens of a tile. More than `rows` heads take several programs."""
    return max(1, config.rows // call.q.shape[3])


def launch(
    call: ChooseCall | WindowCall, rule: Rule | None, config: KernelConfig, given: tuple[Tensor | None, ...], strides: Any, sizes: Any,
    results: tuple[Tensor | None, ...], do: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `forward_kernel`, or `dq_kernel` with `do`.

    Args:
        rule: of the keys (`Rule.of_keys`), or None for a window.
        given: q_pos, cu, cu_cmp and bounds.
        sizes: for tiles of `tokens_of` rows.
        results: o and lse; or o, lse, do, dlse, dq, base-2 lse and delta.
    """
    B, _, G, h, _ = call.q.shape
    kernel = _kernel(forward_kernel if do is None else dq_kernel, dims_of(call.q, call.v), rule, config)
    by_tma = config.loads == "tma" and aligned(call.k) and aligned(call.v)
    descriptors = kv_descriptors(call.k, call.v, kernel.constants["dims"], config.block_l, by_tma)
    of_do = () if do is None else (do.stride()[:4],)
    scales = (call.scale_log2(),) if do is None else (call.scale, call.scale_log2())
    tensors = (call.q, *descriptors, call.k, call.v, *given, *results)
    kernel.launch(B * G * sizes.tiles * -(-h // config.rows), tensors, (strides, *of_do, sizes, *scales))


@functools.lru_cache(REMEMBERED)
def _kernel(function: Any, dims: Dims, rule: Rule | None, config: KernelConfig) -> Kernel:
    tokens = max(1, config.rows // dims.h)
    # Windows of whole steps leave tokens - 1 keys.
    tail = min(tile_size(tokens, MIN_TILE) if rule is None else TAIL, config.block_l)
    return Kernel(function, dims=dims, rule=rule, TQ=tokens, ROWS=config.rows, BLOCK_K=config.block_l, TAIL_K=tail, **options(config))
