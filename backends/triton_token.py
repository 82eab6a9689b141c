"""triton-token: one program per query row and head, without tensor cores. The simplest Triton backend.

Every head loads K and V again, so it is bound by cache traffic for h >= 2. It wins on tiny shapes and serves as a
cross-check of the other Triton backends, with which it shares the walk over ranges (_triton/rows.py), the merge of
split rows (_triton/combine.py) and dK/dV (_triton/dkdv.py).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton import arguments
from nsa_sel.backends._triton.combine import combine, count_splits, multiprocessors, partials
from nsa_sel.backends._triton.dkdv import key_value_gradients
from nsa_sel.backends._triton.kernel import cached_kernel
from nsa_sel.backends._triton.rows import count_keys, locate_row, positions_of, row_limit, share_of, walk_ranges
from nsa_sel.backends._triton.softmax import LN_2, LOG2_E, LOWEST, reciprocal
from nsa_sel.backends._triton.tiles import key_pointers, load_columns, row_pointers
from nsa_sel.backends.launcher.buffers import outputs
from nsa_sel.backends.launcher.passes import backward_of_any_scale, forward_of_any_scale
from nsa_sel.core.call import Call

SPLIT_KEYS = 32  # fewest keys per program of a split row


@triton.jit
def locate(S, G, program, h: tl.constexpr):
    """Return b, g, s, the row index in [B,S,G] and the head of `program`; b, g and head are int64."""
    b, g, s, row = locate_row(program // h, S, G)
    return b, g, s, row, (program % h).to(tl.int64)


@triton.jit
def load_row(x, stride, b, g, s, head, D: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr):
    """Load the columns [BLOCK_D] of one row and head of x [B,S,G,h,D]; zeros past D."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(row_pointers(x, stride, b, g, s.to(tl.int64), head) + d, mask=d < D, other=0.0).to(dtype)


@triton.jit
def forward_kernel(
    q, k, v, ranges, q_pos, o, lse, strides, sizes, n, splits, scale_log2,
    dims: tl.constexpr, SPLIT: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr, REPEATS: tl.constexpr,
):  # fmt: skip
    """Compute o = softmax(scale * q k^T) v and lse for one row and head.

    Grid: one program per row, head and split of the row's keys. Tiles: k [BLOCK_L, BLOCK_D], v [BLOCK_L, BLOCK_DV],
    through pointers.
    NP: ranges per walk. SPLIT: write float32 partials [rows, splits, ...] with base-2 lse for combine.py.
    REPEATS: see rows.py.
    Masks: key numbers past the last key are loaded as zeros and get logits of -inf.
    """
    S, S_kv, G = sizes
    ACC: tl.constexpr = lse.dtype.element_ty
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    split = tl.program_id(0) % splits
    b, g, s, row, head = locate(S, G, tl.program_id(0) // splits, dims.h)
    limit = row_limit(q_pos, strides.pos, b, s, S, S_kv)
    row_ranges = ranges + row // dims.SHARE * n * 2
    q_row = load_row(q, strides.q, b, g, s, head, dims.Dk, dims.BLOCK_D, ACC)

    low, high = 0, S_kv
    if SPLIT:
        low, high = share_of(split, splits, count_keys(row_ranges, n, limit, NP, REPEATS), BLOCK_L)

    acc = tl.zeros([BLOCK_DV], ACC)
    l = tl.sum(tl.zeros([1], ACC), 0)
    m = tl.max(tl.full([1], LOWEST, ACC), 0)
    base = 0
    for first in range(0, n, NP):
        shift, before, after, keys = walk_ranges(row_ranges, first, n, limit, NP, REPEATS=REPEATS)
        stop = tl.minimum(keys, high - base)
        for w0 in range(tl.maximum(low - base, 0), stop, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)  # [BLOCK_L] key numbers within the walk
            position = positions_of(w, shift, before, after)  # [BLOCK_L]
            k_tile = load_columns(key_pointers(k, strides.k, b, g, position), w < stop, 0, dims.Dk, dims.BLOCK_D)
            v_tile = load_columns(key_pointers(v, strides.v, b, g, position), w < stop, 0, dims.Dv, BLOCK_DV)
            logits = tl.where(w < stop, tl.sum(k_tile.to(ACC) * q_row[None, :], 1), float("-inf"))
            m_new = tl.maximum(m, tl.max(logits, 0))  # scalar, as m, l and alpha; logits and p are [BLOCK_L]
            alpha = tl.exp2((m - m_new) * scale_log2)
            p = tl.exp2((logits - m_new) * scale_log2)
            l = l * alpha + tl.sum(p, 0)
            acc = acc * alpha + tl.sum(p[:, None] * v_tile.to(ACC), 0)
            m = m_new
        base += keys

    seen = l != 0
    total = tl.where(seen, l, 1.0)
    out = (row * dims.h + head) * splits + split
    dv = tl.arange(0, BLOCK_DV)
    tl.store(o + out * dims.Dv + dv, (acc * reciprocal(total)).to(o.dtype.element_ty), mask=dv < dims.Dv)
    lse2 = tl.where(seen, m * scale_log2 + tl.log2(total), float("-inf"))
    tl.store(lse + out, lse2 if SPLIT else lse2 * LN_2)


@triton.jit
def dq_kernel(
    q, k, v, ranges, q_pos, o, lse, do, dlse, dq, delta, strides, stride_do, sizes, n, scale, scale_log2,
    dims: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale * ds k for one row and head; store delta = sum(do * o) - dlse [B,S,G,h] for the dK/dV kernel.

    Grid: one program per row and head. Tiles, loads and masks are those of `forward_kernel`.
    """
    S, S_kv, G = sizes
    ACC: tl.constexpr = delta.dtype.element_ty
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    b, g, s, row, head = locate(S, G, tl.program_id(0), dims.h)
    limit = row_limit(q_pos, strides.pos, b, s, S, S_kv)
    row_ranges = ranges + row // dims.SHARE * n * 2
    q_row = load_row(q, strides.q, b, g, s, head, dims.Dk, BLOCK_D, ACC)
    do_row = load_row(do, stride_do, b, g, s, head, dims.Dv, dims.BLOCK_DV, ACC)
    out = row * dims.h + head
    dv = tl.arange(0, dims.BLOCK_DV)
    delta_row = tl.sum(tl.load(o + out * dims.Dv + dv, mask=dv < dims.Dv, other=0.0).to(ACC) * do_row, 0)
    if dlse is not None:
        delta_row -= tl.load(dlse + out)
    tl.store(delta + out, delta_row)
    lse2 = tl.load(lse + out) * LOG2_E

    acc = tl.zeros([BLOCK_D], ACC)
    for first in range(0, n, NP):
        shift, before, after, keys = walk_ranges(row_ranges, first, n, limit, NP)
        for w0 in range(0, keys, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)
            position = positions_of(w, shift, before, after)
            k_tile = load_columns(key_pointers(k, strides.k, b, g, position), w < keys, 0, dims.Dk, BLOCK_D).to(ACC)
            v_tile = load_columns(key_pointers(v, strides.v, b, g, position), w < keys, 0, dims.Dv, dims.BLOCK_DV)
            p = tl.where(w < keys, tl.exp2(tl.sum(k_tile * q_row[None, :], 1) * scale_log2 - lse2), 0.0)
            dp = tl.sum(v_tile.to(ACC) * do_row[None, :], 1)  # [BLOCK_L], as p
            acc += tl.sum((p * (dp - delta_row))[:, None] * k_tile, 0)
    d = tl.arange(0, BLOCK_D)
    tl.store(dq + out * dims.Dk + d, (acc * scale).to(dq.dtype.element_ty), mask=d < dims.Dk)


@forward_of_any_scale
def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    B, S, G, h, _ = call.q.shape
    o, lse = outputs(call)
    splits = count_splits(call, B * S * G * h, 2 * multiprocessors(call), SPLIT_KEYS)
    heads = arguments.heads(call)
    name = "triton-token/forward" if splits == 1 else "triton-token/decode"
    config = arguments.kernel_config(call, heads, name)
    tiles = {"SPLIT": splits > 1, "BLOCK_L": config.block_l, "NP": arguments.walk_width(call), "REPEATS": call.may_repeat()}
    kernel = cached_kernel(forward_kernel, dims=arguments.dims(heads), **tiles, **arguments.options(config))
    parts = partials(call, o, lse, splits)
    arguments.announced(call, heads, name, config, kernel).launch(
        B * S * G * h * splits,
        (call.q, call.k, call.v, call.listed_ranges(), call.q_pos, *parts),
        (arguments.strides(call), arguments.sizes(call), call.selection.n, splits, call.scale_log2()),
    )
    combine(*parts, o, lse, splits)
    return o, lse


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv: dq per row and head; dk and dv per KV tile, summed in ascending order over the rows that
    select it."""
    heads = arguments.heads(call)
    config = arguments.kernel_config(call, heads, "triton-token/dq")
    dq, delta = arguments.row_gradients(call, lse)
    tiles = {"BLOCK_L": config.block_l, "NP": arguments.walk_width(call)}
    kernel = cached_kernel(dq_kernel, dims=arguments.dims(heads), **tiles, **arguments.options(config))
    arguments.announced(call, heads, "triton-token/dq", config, kernel).launch(
        lse.numel(),
        (call.q, call.k, call.v, call.disjoint_ranges(), call.q_pos, o, lse, do, dlse, dq, delta),
        (arguments.strides(call), do.stride()[:4], arguments.sizes(call), call.selection.n, call.scale, call.scale_log2()),
    )
    dk, dv = key_value_gradients(call, heads, lse, do, delta, "triton-token/dkdv")
    return dq, dk, dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Return how many keys the forward loads: each row's keys, once per head."""
    return selected * call.q.shape[3]
