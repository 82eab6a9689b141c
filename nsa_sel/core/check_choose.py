"""Checks of the arguments of `compressed_attention` and `choose_blocks`, before any kernel runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.core.arguments import check_forced, check_positive, is_whole
from nsa_sel.core.check import check_positions, check_scale, check_sizes
from nsa_sel.core.choose_call import Pool, Rule
from nsa_sel.errors import ArgumentError, renamed, shown


class Index(NamedTuple):
    """Checked arguments of a choice without attention."""

    q: Tensor  # [B,S,G,h,Dk]
    k: Tensor  # [B,G,C,Dk], index keys; stride 0 where all groups share them
    lse: Tensor | None  # [B,S,G,h]
    S_kv: int
    scale: float
    q_pos: Tensor | None  # [B,S]


def check_choose(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rule: Rule, scale: float | None, q_pos: Tensor | None, S_kv: int | None, fake: bool
) -> tuple[Tensor, int, float, Tensor | None]:
    """q [B,S,G,h,Dk], S_kv, the scale, and q_pos [B,S] or None, of dense tensors. Never reads a GPU or fake tensors.

    Raises:
        ArgumentError: the first bad argument.
    """
    check_rule(rule)
    try:
        q = check_sizes(q, k_cmp, v_cmp)
    except ArgumentError as error:
        raise renamed(error, k="k_cmp", v="v_cmp") from None
    S_kv = _check_length(q.shape[1], "k_cmp", k_cmp, rule, S_kv, q_pos)
    return q, S_kv, check_scale(scale, q.shape[4]), None if q_pos is None else check_positions(q_pos, q, S_kv, fake)


def check_index(
    q: Tensor,
    k: Tensor,
    rule: Rule,
    pool: Pool,
    lse: Tensor | None,
    scale: float | None,
    q_pos: Tensor | None,
    S_kv: int | None,
    fake: bool,
) -> Index:
    """The arguments of `choose_blocks`, of dense tensors. Never reads GPU or fake tensors.

    Raises:
        ArgumentError: the first bad argument.
    """
    check_rule(rule)
    groups = q.shape[-3] if q.dim() in (4, 5) else 1
    if k.dim() == 4 and k.shape[1] == 1 and groups > 1:
        k = k.expand(-1, groups, -1, -1)
    rows = check_sizes(q, k, k)
    if S_kv is None and rule.compress_block == rule.compress_stride == 1:
        S_kv = k.shape[2]
    S_kv = _check_length(rows.shape[1], "k", k, rule, S_kv, q_pos)
    if lse is not None:
        lse = _check_lse(lse, rows, q.dim() == 4, pool)
    q_pos = None if q_pos is None else check_positions(q_pos, rows, S_kv, fake)
    return Index(rows, k, lse, S_kv, check_scale(scale, rows.shape[4]), q_pos)


def _check_lse(lse: Tensor, rows: Tensor, decode: bool, pool: Pool) -> Tensor:
    """lse [B,S,G,h] for the rows q [B,S,G,h,Dk]; else ArgumentError."""
    if not pool.softmax:
        raise ArgumentError("lse", "given", "None without softmax=True", "pass softmax=True, or leave it out")
    given = lse.unsqueeze(1) if decode and lse.dim() == 3 else lse
    if given.shape != rows.shape[:-1] or given.dtype not in (torch.float32, torch.float64) or given.device != rows.device:
        value = f"{lse.dtype} of shape {tuple(lse.shape)} on {lse.device}"
        raise ArgumentError("lse", value, f"float32 {tuple(rows.shape[:-1])} on {rows.device}", "pass that of attention with q's rows")
    return given.detach()


def _check_length(S: int, name: str, k: Tensor, rule: Rule, S_kv: int | None, q_pos: Tensor | None) -> int:
    """S_kv; ArgumentError unless `name`, k [B,G,C,Dk], are the compressed keys of so many keys."""
    S_kv = S if S_kv is None else S_kv
    if not is_whole(S_kv) or not (S if q_pos is None else 0) <= S_kv < 1 << 31:
        least = 0 if q_pos is not None else f"S = {S}"
        raise ArgumentError("S_kv", shown(S_kv), f"a whole number >= {least} and < 2^31", "pass the number of keys of the sequence")
    C = rule.compressed_keys(S_kv)
    if k.shape[2] != C:
        block, stride = rule.compress_block, rule.compress_stride
        allowed = f"{C} = (S_kv - compress_block) // compress_stride + 1 for S_kv = {S_kv} and blocks of {block} keys every {stride}"
        remedy = "pass S_kv=, the keys of the whole sequence, and the sizes with which it was compressed"
        raise ArgumentError(name, f"of {k.shape[2]} compressed keys", allowed, remedy)
    return S_kv


def check_rule(rule: Rule) -> None:
    """ArgumentError for sizes and counts that do not fit together."""
    for name in ("compress_block", "compress_stride", "block_size", "n"):
        check_positive(name, getattr(rule, name))
    check_forced(rule.first, rule.local, rule.n)
    check_compression(rule.compress_block, rule.compress_stride)
    check_multiple("block_size", rule.block_size, rule.compress_stride)
    if rule.compress_block > rule.block_size:
        allowed = f"at most block_size = {rule.block_size}"
        raise ArgumentError("compress_block", rule.compress_block, allowed, "compress fewer keys, or select larger blocks")


def check_compression(compress_block: int, compress_stride: int) -> None:
    """ArgumentError unless blocks are whole numbers of strides."""
    check_positive("compress_stride", compress_stride)
    check_multiple("compress_block", compress_block, compress_stride)


def check_multiple(name: str, size: int, stride: int) -> None:
    """ArgumentError unless a size is a whole number of strides."""
    check_positive(name, size)
    if size % stride:
        raise ArgumentError(name, size, f"a multiple of compress_stride = {stride}", "choose sizes as in NSA's Eq. 9")
