"""triton-token: one program per query row and head, products on the ordinary arithmetic units; the plainest of the Triton backends.

Every head loads K and V for itself, so it is bound by cache traffic from h = 2 on; it wins on tiny shapes, and it is the cross-check
of the others, with which it shares the walk over the ranges (steps.py), the join of split rows (combine.py) and dK/dV (dkdv.py).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._buffers import temporary
from nsa_sel.backends._triton import launch
from nsa_sel.backends._triton.dkdv import key_value_gradients
from nsa_sel.backends._triton.start import REMEMBERED, Launch
from nsa_sel.backends._triton.steps import LN_2, LOG2_E, LOWEST, positions_of, reciprocal, row_limit, walk_ranges
from nsa_sel.core.call import Call
from nsa_sel.settings.schema import KernelConfig

SPLIT_KEYS = 32  # the fewest keys worth a program of their own


@triton.jit
def forward_kernel(
    q, k, v, ranges, q_pos, o, lse,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    S, S_kv, G, n, parts, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, SPLIT: tl.constexpr, ACC: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """o and lse of one row and head; with SPLIT, the float32 partials [rows, parts, ...] of one part of the walk, lse in base 2."""
    pid = tl.program_id(0)
    part = pid % parts
    pid = pid // parts
    head = pid % h
    pid = pid // h
    s = pid % S
    b = (pid // S // G).to(tl.int64)
    g = (pid // S % G).to(tl.int64)
    row = (b * S + s) * G + g
    limit = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    row_ranges = ranges + row * n * 2
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_row = tl.load(
        q + b * stride_qb + s.to(tl.int64) * stride_qs + g * stride_qg + head.to(tl.int64) * stride_qh + d, mask=d < Dk, other=0.0
    ).to(ACC)
    k_base = k + b * stride_kb + g * stride_kg
    v_base = v + b * stride_vb + g * stride_vg

    low, high = 0, S_kv
    if SPLIT:  # this program's share of the walk over the row's keys, in whole tiles
        total = 0
        for first in range(0, n, NP):
            _, _, _, keys = walk_ranges(row_ranges, first, n, limit, NP)
            total += keys
        share = tl.cdiv(tl.cdiv(total, BLOCK_L), parts) * BLOCK_L
        low = part * share
        high = low + share

    acc = tl.zeros([BLOCK_DV], ACC)
    l = tl.sum(tl.zeros([1], ACC), 0)
    m = tl.max(tl.full([1], LOWEST, ACC), 0)
    base = 0
    for first in range(0, n, NP):
        shift, before, after, keys = walk_ranges(row_ranges, first, n, limit, NP)
        stop = tl.minimum(keys, high - base)
        for w0 in range(tl.maximum(low - base, 0), stop, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)
            valid = w < stop
            position = positions_of(w, shift, before, after).to(tl.int64)
            k_tile = tl.load(k_base + position[:, None] * stride_kn + d[None, :], mask=valid[:, None] & (d < Dk)[None, :], other=0.0)
            v_tile = tl.load(v_base + position[:, None] * stride_vn + dv[None, :], mask=valid[:, None] & (dv < Dv)[None, :], other=0.0)
            logits = tl.where(valid, tl.sum(k_tile.to(ACC) * q_row[None, :], 1), float("-inf"))
            m_new = tl.maximum(m, tl.max(logits, 0))
            alpha = tl.exp2((m - m_new) * scale_log2)
            p = tl.exp2((logits - m_new) * scale_log2)
            l = l * alpha + tl.sum(p, 0)
            acc = acc * alpha + tl.sum(p[:, None] * v_tile.to(ACC), 0)
            m = m_new
        base += keys

    seen = l != 0
    total = tl.where(seen, l, 1.0)
    out = (row * h + head) * parts + part
    tl.store(o + out * Dv + dv, (acc * reciprocal(total)).to(o.dtype.element_ty), mask=dv < Dv)
    lse2 = tl.where(seen, m * scale_log2 + tl.log2(total), float("-inf"))
    tl.store(lse + out, lse2 if SPLIT else lse2 * LN_2)


@triton.jit
def dq_kernel(
    q, k, v, ranges, q_pos, o, lse, do, dlse, dq, delta,
    stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps,
    stride_dob, stride_dos, stride_dog, stride_doh, S, S_kv, G, n, scale, scale_log2,
    h: tl.constexpr, Dk: tl.constexpr, Dv: tl.constexpr, HAS_POS: tl.constexpr, HAS_DLSE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_L: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """dq of one row and head, and delta = sum(do * o) - dlse [B,S,G,h] for the KV side."""
    pid = tl.program_id(0)
    head = pid % h
    pid = pid // h
    s = pid % S
    b = (pid // S // G).to(tl.int64)
    g = (pid // S % G).to(tl.int64)
    row = (b * S + s) * G + g
    limit = row_limit(q_pos, b, s, S, S_kv, stride_pb, stride_ps, HAS_POS)
    row_ranges = ranges + row * n * 2
    d, dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    head = head.to(tl.int64)
    q_row = tl.load(q + b * stride_qb + s.to(tl.int64) * stride_qs + g * stride_qg + head * stride_qh + d, mask=d < Dk, other=0.0).to(ACC)
    do_row = tl.load(do + b * stride_dob + s.to(tl.int64) * stride_dos + g * stride_dog + head * stride_doh + dv, mask=dv < Dv, other=0.0)
    do_row = do_row.to(ACC)
    out = row * h + head
    delta_row = tl.sum(tl.load(o + out * Dv + dv, mask=dv < Dv, other=0.0).to(ACC) * do_row, 0)
    if HAS_DLSE:
        delta_row -= tl.load(dlse + out)
    tl.store(delta + out, delta_row)
    lse2 = tl.load(lse + out) * LOG2_E
    k_base = k + b * stride_kb + g * stride_kg
    v_base = v + b * stride_vb + g * stride_vg

    acc = tl.zeros([BLOCK_D], ACC)
    for first in range(0, n, NP):
        shift, before, after, keys = walk_ranges(row_ranges, first, n, limit, NP)
        for w0 in range(0, keys, BLOCK_L):
            w = w0 + tl.arange(0, BLOCK_L)
            valid = w < keys
            position = positions_of(w, shift, before, after).to(tl.int64)
            k_tile = tl.load(k_base + position[:, None] * stride_kn + d[None, :], mask=valid[:, None] & (d < Dk)[None, :], other=0.0)
            v_tile = tl.load(v_base + position[:, None] * stride_vn + dv[None, :], mask=valid[:, None] & (dv < Dv)[None, :], other=0.0)
            k_tile = k_tile.to(ACC)
            p = tl.where(valid, tl.exp2(tl.sum(k_tile * q_row[None, :], 1) * scale_log2 - lse2), 0.0)
            dp = tl.sum(v_tile.to(ACC) * do_row[None, :], 1)
            acc += tl.sum((p * (dp - delta_row))[:, None] * k_tile, 0)
    tl.store(dq + out * Dk + d, (acc * scale).to(dq.dtype.element_ty), mask=d < Dk)


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h]."""
    if call.scale < 0:  # the kernel keeps the largest product, which must belong to the largest logit
        return forward(call.with_positive_scale())
    B, S, G, h, _ = call.q.shape
    o, lse = launch.outputs(call)
    parts = launch.split_parts(call, B * S * G * h, 2 * launch.multiprocessors(call), SPLIT_KEYS)
    heads = launch.heads(call)
    config = launch.kernel_config(call, heads, "triton-token/forward" if parts == 1 else "triton-token/decode")
    if parts == 1:
        to_o, to_lse = o, lse
    else:
        to_o = temporary(call, lse, lse.numel(), parts, o.shape[-1])
        to_lse = temporary(call, lse, lse.numel(), parts)
    kernel = _forward_launch(heads, config, launch.walk_width(call), parts > 1)
    kernel.start(
        B * S * G * h * parts,
        (call.q, call.k, call.v, call.selection.disjoint_ranges(), call.q_pos, to_o, to_lse),
        (*launch.strides(call), S, call.k.shape[2], G, call.selection.n, parts, call.scale_log2()),
    )
    if parts > 1:
        launch.combine(to_o, to_lse, o, lse, parts)
    return o, lse


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; dq by rows and heads, dk and dv by KV tiles over the rows that chose them, in ascending row order."""
    if call.scale < 0:
        dq, dk, dv = backward(call.with_positive_scale(), o, lse, do, dlse)
        return -dq, dk, dv
    B, S, G, h, _ = call.q.shape
    heads = launch.heads(call)
    config = launch.kernel_config(call, heads, "triton-token/dq")
    dq, delta = torch.empty_like(call.q, memory_format=torch.contiguous_format), temporary(call, lse, *lse.shape)
    dlse = None if dlse is None else dlse.contiguous()
    _dq_launch(heads, config, launch.walk_width(call), dlse is not None).start(
        B * S * G * h,
        (call.q, call.k, call.v, call.selection.disjoint_ranges(), call.q_pos, o, lse, do, dlse, dq, delta),
        (*launch.strides(call), *do.stride()[:4], S, call.k.shape[2], G, call.selection.n, call.scale, call.scale_log2()),
    )
    dk, dv = key_value_gradients(call, heads, lse, do, delta, launch.kernel_config(call, heads, "triton-token/dkdv"))
    return dq, dk, dv


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Keys that the forward loads: each row's, once a head."""
    return selected * call.q.shape[3]


@functools.lru_cache(REMEMBERED)
def _forward_launch(heads: launch.Heads, config: KernelConfig, walk: int, split: bool) -> Launch:
    return Launch(
        forward_kernel, **launch.facts(heads), SPLIT=split, BLOCK_L=config.block_l, NP=walk,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


@functools.lru_cache(REMEMBERED)
def _dq_launch(heads: launch.Heads, config: KernelConfig, walk: int, has_dlse: bool) -> Launch:
    return Launch(
        dq_kernel, **launch.facts(heads), HAS_DLSE=has_dlse, BLOCK_L=config.block_l, NP=walk,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
