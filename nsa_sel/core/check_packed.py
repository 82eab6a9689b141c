"""Checks of packed tensors and their bounds, before any kernel runs."""

from __future__ import annotations

from torch import Tensor

from nsa_sel.core.arguments import Bounds, CuSeqlens, check_tensors
from nsa_sel.core.check import check_scale, check_sizes
from nsa_sel.core.check_choose import check_rule
from nsa_sel.core.choose_call import Rule
from nsa_sel.core.shared_keys import ratio
from nsa_sel.errors import ArgumentError, renamed, shown


def check_packed_sizes(*, sharing: bool = False, **tensors: Tensor) -> None:
    """ArgumentError unless the first tensor is a q [T,G,h,Dk], and the others are keys or values [Tk,G,D] of one Tk; with `sharing` they
    may have fewer groups (core/shared_keys.py)."""
    check_tensors(**tensors)
    (query, q), *rest = tensors.items()
    if q.dim() != 4:
        remedy = f"a q [T,heads,Dk] is passed as {query}.unflatten(1, (G, h)), a q [1,T,G,h,Dk] as {query}.squeeze(0)"
        raise ArgumentError(query, f"of shape {tuple(q.shape)}", "[T,G,h,Dk]", remedy)
    first, k = rest[0]
    groups = q.shape[1] // ratio(q.shape[1], k.shape[1]) if sharing and k.dim() == 3 else q.shape[1]
    for name, x in rest:
        if x.dim() != 3 or x.shape[1] != groups or x.shape[0] != k.shape[0]:
            keys = "Tk" if name == first else f"Tk={k.shape[0]}"
            raise ArgumentError(name, f"of shape {tuple(x.shape)}", f"[{keys}, G={groups}, D]", "pass one key per position and KV group")


def check_packed_keys(name: str, x: Tensor) -> None:
    """ArgumentError unless x is [T,G,D]."""
    check_tensors(**{name: x})
    if x.dim() != 3:
        raise ArgumentError(name, f"of shape {tuple(x.shape)}", "[T,G,D] with cu_seqlens", f"pass {name}.squeeze(0) of a [1,T,G,D]")


def check_longest(max_seqlen: int | None, cu_seqlens: CuSeqlens | None) -> None:
    """ArgumentError for a max_seqlen that is no length, or that comes without bounds. `Bounds.of` compares it with them."""
    if max_seqlen is None:
        return
    if cu_seqlens is None:
        raise ArgumentError("max_seqlen", shown(max_seqlen), "None without cu_seqlens", "pass the bounds of the sequences, too")
    if not isinstance(max_seqlen, int) or isinstance(max_seqlen, bool) or not 0 <= max_seqlen < 1 << 31:
        remedy = "pass the rows of the longest sequence, or more, as the host knows them"
        raise ArgumentError("max_seqlen", shown(max_seqlen), "a whole number >= 0 and < 2^31, as an int", remedy)


def as_batch(q: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
    """q [1,T,G,h,Dk] and keys or values [1,G,Tk,D], views of packed ones."""
    return q.unsqueeze(0), *(x.transpose(0, 1).unsqueeze(0) for x in keys)


def check_packed_choose(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, rule: Rule, scale: float | None, q_pos: Tensor | None, S_kv: int | None, cu_seqlens: CuSeqlens,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, float, Bounds]:  # fmt: skip
    """q [1,T,G,h,Dk], k_cmp and v_cmp [1,G,C,D], the scale, and the bounds. Never reads a GPU or fake tensors.

    Raises:
        ArgumentError: the first bad argument.
    """
    check_rule(rule)
    for name, value in (("q_pos", q_pos), ("S_kv", S_kv)):
        if value is not None:
            remedy = "leave it out: with cu_seqlens, rows are all positions of their sequence"
            raise ArgumentError(name, "given together with cu_seqlens", "one of them", remedy)
    check_packed_sizes(q=q, k_cmp=k_cmp, v_cmp=v_cmp)
    bounds = Bounds.of("cu_seqlens", cu_seqlens, len(q), q, max_seqlen)
    rows, k, v = as_batch(q, k_cmp, v_cmp)
    try:
        check_sizes(rows, k, v)
    except ArgumentError as error:
        raise renamed(error, k="k_cmp", v="v_cmp") from None
    _check_compressed(len(k_cmp), len(q), bounds, rule)
    return rows, k, v, check_scale(scale, q.shape[3]), bounds


def _check_compressed(C: int, T: int, bounds: Bounds, rule: Rule) -> None:
    """ArgumentError unless C compressed keys are enough for all sequences, as far as the host knows them, and no more than fit."""
    most, least = rule.compressed_keys(T), 0
    if bounds.numbers is not None:
        least = sum(rule.compressed_keys(end - begin) for begin, end in zip(bounds.numbers, bounds.numbers[1:], strict=False))
    if not least <= C <= most:
        block, stride = rule.compress_block, rule.compress_stride
        allowed = f"{least} to {most} for T = {T} and blocks of {block} keys every {stride}"
        remedy = "compress each sequence apart, as nsa_sel.compression does; compressed_cu_seqlens says where each begins"
        raise ArgumentError("k_cmp", f"of {C} compressed keys", allowed, remedy)


def check_rows_are_keys(q: Tensor, name: str, k: Tensor) -> None:
    """ArgumentError unless packed q and k have as many rows as keys."""
    if len(q) != len(k):
        raise ArgumentError(name, f"of {len(k)} keys", f"q's {len(q)} rows", "with cu_seqlens, pass the keys of all rows and no others")
