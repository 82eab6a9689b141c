"""Checks of the arguments of `compressed_attention`, before any kernel runs."""

from __future__ import annotations

from torch import Tensor

from nsa_sel.core.arguments import check_positive
from nsa_sel.core.check import check_positions, check_scale, check_sizes
from nsa_sel.core.choose_call import Rule
from nsa_sel.core.indices import check_forced
from nsa_sel.errors import ArgumentError, renamed, shown


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
    _, S, _, _, Dk = q.shape
    S_kv = S if S_kv is None else S_kv
    if not isinstance(S_kv, int) or isinstance(S_kv, bool) or not (S if q_pos is None else 0) <= S_kv < 1 << 31:
        least = 0 if q_pos is not None else f"S = {S}"
        raise ArgumentError("S_kv", shown(S_kv), f"a whole number >= {least} and < 2^31", "pass the number of keys of the sequence")
    C = rule.compressed_keys(S_kv)
    if k_cmp.shape[2] != C:
        block, stride = rule.compress_block, rule.compress_stride
        allowed = f"{C} = (S_kv - compress_block) // compress_stride + 1 for S_kv = {S_kv} and blocks of {block} keys every {stride}"
        remedy = "pass S_kv=, the keys of the whole sequence, and the sizes with which it was compressed"
        raise ArgumentError("k_cmp", f"of {k_cmp.shape[2]} compressed keys", allowed, remedy)
    return q, S_kv, check_scale(scale, Dk), None if q_pos is None else check_positions(q_pos, q, S_kv, fake)


def check_rule(rule: Rule) -> None:
    """ArgumentError for sizes and counts that do not fit together."""
    for name in ("compress_block", "compress_stride", "block_size", "n"):
        check_positive(name, getattr(rule, name))
    check_forced(rule.first, rule.local, rule.n)
    stride = rule.compress_stride
    for name in ("compress_block", "block_size"):
        if getattr(rule, name) % stride:
            raise ArgumentError(name, getattr(rule, name), f"a multiple of compress_stride = {stride}", "choose sizes as in NSA's Eq. 9")
    if rule.compress_block > rule.block_size:
        allowed = f"at most block_size = {rule.block_size}"
        raise ArgumentError("compress_block", rule.compress_block, allowed, "compress fewer keys, or select larger blocks")
