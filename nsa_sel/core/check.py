"""Checks of a call's arguments, before any kernel runs. Errors name argument, value, what is allowed, and the remedy."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.core.arguments import as_positions, check_flag, check_forced, check_positive, is_whole
from nsa_sel.core.call import DTYPES, Pool, Rule
from nsa_sel.errors import ArgumentError, renamed, shown
from nsa_sel.selection import Selection

_LARGEST = sys.float_info.max


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | Tensor,
    scale: float | None,
    q_pos: Tensor | None,
    fake: bool = False,
    stored: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Selection, float, Tensor | None]:
    """Check the arguments of `selection_attention`. Never reads a GPU or fake tensors.

    Args:
        q, k, v: dense tensors (`check_tensors`). selection, scale, q_pos: as of `selection_attention`.
        fake: the tensors have no values.
        stored: the dtype of quantized k and v, None for q's.

    Returns:
        q [B,S,G,h,Dk] (S = 1 for decode), k, v, a Selection, the scale, and q_pos [B,S] or None.

    Raises:
        ArgumentError: the first bad argument.
    """
    decode = q.dim() == 4
    q = check_sizes(q, k, v, stored, True)
    B, S, G, _, Dk = q_shape = q.shape
    S_kv, device = k.shape[2], q.device
    if not isinstance(selection, Selection):
        selection = as_selection(selection, None if decode else (B, S, G))
    listed = selection.listed  # block indices or ranges
    of_rows = listed.shape  # compared one by one: torch.compile does not search a tuple for sizes that vary
    if not (of_rows[0] == B and of_rows[1] == S and (of_rows[2] == G or of_rows[2] == 1) and of_rows[3] == selection.n):
        raise _other_rows(selection.ranges, q_shape, k.shape, decode)
    if listed.device != device:
        raise ArgumentError("selection", f"on {listed.device}", f"q's device {device}", "call selection.to(q.device)")
    scale = check_scale(scale, Dk)
    if q_pos is not None:
        return q, k, v, selection, scale, check_positions(q_pos, q, S_kv, fake)
    if S > S_kv:
        raise ArgumentError("q", f"of S = {S} rows", f"at most S_kv = {S_kv} rows without q_pos", "pass q_pos, the rows' positions")
    return q, k, v, selection, scale, None


def check_sizes(q: Tensor, k: Tensor, v: Tensor, stored: torch.dtype | None = None, selects: bool = False) -> Tensor:
    """Return q [B,S,G,h,Dk] of dense tensors q, k, v that fit together in shape, dtype (`stored`: of k and v), device
    and strides; else ArgumentError. selects: the call takes a selection, by which groups of q may share those of k and
    v."""
    decode = q.dim() == 4
    if decode:
        q = q.unsqueeze(1)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 5:
        raise ArgumentError(
            "q", f"of shape {tuple(q_shape)}", "[B,S,G,h,Dk], or [B,G,h,Dk] for decode", "split the heads into G groups of h"
        )
    B, _, G, h, Dk = q_shape
    for name, shape in (("k", k_shape), ("v", v_shape)):
        if len(shape) != 4 or shape[0] != B or shape[1] != G:
            raise _other_layout(name, shape, q_shape, decode, selects)
    S_kv, Dv = k_shape[2], v_shape[3]
    if k_shape[3] != Dk:
        raise ArgumentError("k", f"of head dimension {k_shape[3]}", f"q's head dimension {Dk}", "project q and k to the same size")
    if v_shape[2] != S_kv:
        raise ArgumentError("v", f"of {v_shape[2]} positions", f"k's {S_kv} positions", "pass v for the same keys")
    if not (h and Dk and Dv and G):
        size = next(name for name, size in (("h", h), ("Dk", Dk), ("Dv", Dv), ("G", G)) if not size)
        raise ArgumentError("v" if size == "Dv" else "q", f"of size 0 in {size}", f"{size} >= 1", "drop the empty dimension")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        quantized = stored is not None and name != "q" and tensor.dtype == stored
        if tensor.dtype not in DTYPES and not quantized:
            raise ArgumentError(name, f"of dtype {tensor.dtype}", ", ".join(DTYPES.values()), f"call {name}.to(torch.bfloat16)")
        if tensor.dtype != q.dtype and not quantized:
            raise ArgumentError(name, f"of dtype {tensor.dtype}", f"q's dtype {q.dtype}", f"call {name}.to(q.dtype)")
        if tensor.device != q.device:
            raise ArgumentError(name, f"on {tensor.device}", f"q's device {q.device}", f"call {name}.to(q.device)")
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:  # any stride over a single element
            raise ArgumentError(name, f"of strides {tensor.stride()}", "a contiguous last dimension", f"call {name}.contiguous()")
    if not (q.is_cpu or q.is_cuda):
        raise ArgumentError("q", f"on {q.device}", "cpu or cuda", "move q, k, v there")
    return q


def check_scale(scale: float | None, Dk: int) -> float:
    """Return the scale as a float; ArgumentError unless it is a finite number or None."""
    if scale is None:
        return 1.0 / math.sqrt(Dk)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= _LARGEST:
        raise ArgumentError("scale", shown(scale), "a finite number, or None for 1/sqrt(Dk)", "pass a Python float")
    return float(scale)


def as_selection(selection: Selection | Tensor, rows: tuple[int, int, int] | None = None) -> Selection:
    """Return the argument `selection` as a Selection.

    Args:
        selection: a Selection, or ranges.
        rows: [B,S,G] of q, which helps to recognize block indices that were passed as ranges.

    Raises:
        ArgumentError: anything else.
    """
    if isinstance(selection, Selection):
        return selection
    if not isinstance(selection, Tensor):
        remedy = "make one with Selection.from_ranges, from_blocks or from_scores"
        if isinstance(selection, (list, tuple)):
            remedy = "wrap ranges in torch.tensor; block indices and scores go through Selection.from_blocks and from_scores"
        raise ArgumentError("selection", f"a {type(selection).__name__}", "a Selection or a tensor of ranges [B,S,G,n,2]", remedy)
    if selection.dim() == 4 and (selection.is_floating_point() or tuple(selection.shape[:3]) == rows or selection.shape[3] != 2):
        what, how = ("scores", "from_scores(scores, n, ") if selection.is_floating_point() else ("block indices", "from_blocks(indices, ")
        raise ArgumentError(
            "selection",
            f"a tensor {selection.dtype} of shape {tuple(selection.shape)}, which looks like {what}",
            "a Selection, or ranges [B,S,G,n,2]",
            f"pass Selection.{how}block_size)",
        )
    return Selection.from_ranges(selection)


def _other_rows(ranges: Tensor, q_shape: torch.Size, k_shape: torch.Size, decode: bool) -> ArgumentError:
    """Return the error for ranges of other rows than q's; a q in flash-attn's layout is one cause."""
    B, S, G, h, _ = q_shape
    rows = tuple(ranges.shape[:3])
    value = f"over rows [B,S,G] = {rows}" if rows != (B, S, G) else f"of ranges {tuple(ranges.shape)}"
    remedy = "one set of ranges per query row and group, or per query row for all groups"
    if decode and rows[:2] == (B, G) and rows[2] == k_shape[2]:  # q [B,S,heads,D], k [B,S_kv,G,D]
        remedy = f"of flash-attn's layout pass q.unflatten(2, ({rows[2]}, {h // rows[2]})), k.transpose(1, 2) and v.transpose(1, 2)"
    allowed = f"ranges [B,S,G,n,2] over q's rows {(B, S, G)}" + ("" if G == 1 else f", or {(B, S, 1)} for all groups")
    return ArgumentError("selection", value, allowed, remedy)


def _other_layout(name: str, shape: torch.Size, q_shape: torch.Size, decode: bool, selects: bool) -> ArgumentError:
    """Return the error for a k or v of another B or G than q's, with the change of layout that fits."""
    B, _, G, h, Dk = q_shape
    allowed, remedies = f"[B={B}, G={G}, S_kv, D]", []
    if decode:
        allowed += f", since q of shape {(B, G, h, Dk)} is decode [B,G,h,Dk]"
        remedies.append("a q [B,S,heads,D] is passed as q.unflatten(2, (G, h))")
    if len(shape) == 4 and (shape[0], shape[2]) == (B, G):
        remedies.append(f"a [B,S_kv,G,D] cache is passed as {name}.transpose(1, 2)")
    if not remedies:
        remedies.append(f"pass the keys and values of q's {B} sequences and {G} groups, one of each for all h heads of a group")
    if len(shape) == 4 and shape[1] and G % shape[1] == 0:
        change = f"pass a selection over all {G}" if selects else f"put the heads of q into {shape[1]} groups"
        remedies.append(f"where q has {G // shape[1]} groups for each of k and v, {change}")
    return ArgumentError(name, f"of shape {tuple(shape)}", allowed, "; ".join(remedies))


def check_positions(q_pos: Tensor, q: Tensor, S_kv: int, fake: bool) -> Tensor:
    """Return q_pos [B,S] of rows at positions in [0, S_kv), which is checked on a CPU alone; else ArgumentError."""
    B, S = q.shape[:2]
    positions = as_positions(q_pos, B, S, q.device)
    # On a GPU this would synchronize; positions outside [0, S_kv) are clamped there.
    if not fake and q_pos.is_cpu and q_pos.numel() and (int(q_pos.min()) < 0 or int(q_pos.max()) >= S_kv):
        raise ArgumentError(
            "q_pos", f"from {int(q_pos.min())} to {int(q_pos.max())}", f"positions in [0, S_kv = {S_kv})", "give each row its key position"
        )
    return positions


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
    """Return q [B,S,G,h,Dk], S_kv, the scale, and q_pos [B,S] or None, of dense tensors. Never reads a GPU or fake
    tensors.

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
    stored: torch.dtype | None = None,
) -> Index:
    """Return the arguments of `choose_blocks`, of dense tensors. Never reads GPU or fake tensors.

    stored: the dtype of quantized index keys, None for q's.

    Raises:
        ArgumentError: the first bad argument.
    """
    check_rule(rule)
    groups = q.shape[-3] if q.dim() in (4, 5) else 1
    if k.dim() == 4 and k.shape[1] == 1 and groups > 1:
        k = k.expand(-1, groups, -1, -1)
    rows = check_sizes(q, k, k, stored)
    if S_kv is None and rule.compress_block == rule.compress_stride == 1:
        S_kv = k.shape[2]
    S_kv = _check_length(rows.shape[1], "k", k, rule, S_kv, q_pos)
    if lse is not None:
        if not pool.softmax:
            raise ArgumentError("lse", "given", "None without softmax=True", "pass softmax=True, or leave it out")
        lse = lse.detach().unsqueeze(1) if q.dim() == 4 and lse.dim() == 3 else lse.detach()
        if lse.shape != rows.shape[:-1] or lse.dtype not in (torch.float32, torch.float64) or lse.device != rows.device:
            raise ArgumentError(
                "lse",
                f"{lse.dtype} of shape {tuple(lse.shape)} on {lse.device}",
                f"float32 {tuple(rows.shape[:-1])} on {rows.device}",
                "pass that of attention with q's rows",
            )
    q_pos = None if q_pos is None else check_positions(q_pos, rows, S_kv, fake)
    return Index(rows, k, lse, S_kv, check_scale(scale, rows.shape[4]), q_pos)


def check_index_loss(
    q: Tensor, k: Tensor, lse: Tensor, index_q: Tensor, index_k: Tensor, selection: Selection | Tensor | None, scale: float | None,
    index_scale: float | None, q_pos: Tensor | None, fake: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Selection | None, Tensor | None, float, float]:  # fmt: skip
    """Return the arguments of `indexer_loss`, of dense tensors, in the order of `core.index_loss.Arguments`. Never reads a
    GPU or fake tensors.

    Raises:
        ArgumentError: the first bad argument.
    """
    if q.dim() != 5:
        raise ArgumentError("q", f"of shape {tuple(q.shape)}", "[B,S,G,h,Dk]", "split the heads into G groups of h")
    try:
        if selection is None:
            check_sizes(q, k, k)
            scale = check_scale(scale, q.shape[4])
            q_pos = None if q_pos is None else check_positions(q_pos, q, k.shape[2], fake)
            if q_pos is None and q.shape[1] > k.shape[2]:
                raise ArgumentError("q", f"of S = {q.shape[1]} rows", f"at most S_kv = {k.shape[2]} rows without q_pos", "pass q_pos")
        else:
            q, k, _, selection, scale, q_pos = check_call(q, k, k, selection, scale, q_pos, fake)
    except ArgumentError as error:
        raise renamed(error, v="k") from None
    B, S, G, _, _ = q.shape
    if index_q.shape[:-1] != (B, S, G):
        raise ArgumentError(
            "index_q", f"of shape {tuple(index_q.shape)}", f"[B={B}, S={S}, G={G}, Di]", "pass one index head per KV group"
        )  # fmt: skip
    index_k = index_k.unsqueeze(1) if index_k.dim() == 3 else index_k
    of_all = index_k.expand(-1, G, -1, -1) if index_k.dim() == 4 and index_k.shape[1] == 1 else index_k
    try:
        check_sizes(index_q.unsqueeze(3), of_all, of_all)
        if of_all.shape[2] != k.shape[2]:
            raise ArgumentError("k", f"of {of_all.shape[2]} keys", f"k's {k.shape[2]} keys", "pass one index key per key")
        if index_q.dtype != q.dtype or index_q.device != q.device:
            value = f"{index_q.dtype} on {index_q.device}"
            raise ArgumentError("q", value, f"q's {q.dtype} on {q.device}", "call index_q.to(q) and index_k.to(q)")
    except ArgumentError as error:
        raise renamed(error, q="index_q", k="index_k", v="index_k") from None
    wide = torch.promote_types(q.dtype, torch.float32)
    if lse.shape != q.shape[:-1] or lse.dtype != wide or lse.device != q.device:
        raise ArgumentError(
            "lse", f"{lse.dtype} of shape {tuple(lse.shape)} on {lse.device}", f"{wide} {tuple(q.shape[:-1])} on {q.device}",
            "pass that of attention over the same keys (return_lse=True)",
        )  # fmt: skip
    lse = lse.detach().contiguous()
    return q, k, lse, index_q, index_k, selection, q_pos, scale, check_scale(index_scale, index_q.shape[3])


def _check_length(S: int, name: str, k: Tensor, rule: Rule, S_kv: int | None, q_pos: Tensor | None) -> int:
    """S_kv; ArgumentError unless `name`, k [B,G,C,Dk], are the compressed keys of so many keys."""
    S_kv = S if S_kv is None else S_kv
    if not is_whole(S_kv) or not (S if q_pos is None else 0) <= S_kv < 1 << 31:
        least = 0 if q_pos is not None else f"S = {S}"
        raise ArgumentError("S_kv", shown(S_kv), f"a whole number >= {least} and < 2^31", "pass the number of keys of the sequence")
    C = rule.compressed_keys(S_kv)
    if k.shape[2] != C:
        block, stride = rule.compress_block, rule.compress_stride
        raise ArgumentError(
            name,
            f"of {k.shape[2]} compressed keys",
            f"{C} = (S_kv - compress_block) // compress_stride + 1 for S_kv = {S_kv} and blocks of {block} keys every {stride}",
            "pass S_kv=, the keys of the whole sequence, and the sizes with which it was compressed",
        )
    return S_kv


def check_pool(rule: Rule, reduce: str, heads: str, softmax: bool, activation: str | None, tail: bool) -> Pool:
    """Return the definition of a block's score from the arguments of `choose_blocks`, or raise ArgumentError."""
    check_flag("softmax", softmax)
    check_flag("tail", tail)
    for name, reduction in (("heads", heads), ("reduce", reduce)):
        if reduction not in ("max", "sum"):
            raise ArgumentError(name, shown(reduction), "'max' or 'sum'", "pass one of them")
    if activation not in (None, "relu") or (softmax and activation):
        raise ArgumentError("activation", shown(activation), "'relu' without softmax, or None", "leave it out, or pass softmax=False")
    if tail and not (rule.compress_block == rule.compress_stride == rule.block_size and rule.first == rule.local == 0):
        raise ArgumentError(
            "tail",
            True,
            "False where blocks are forced or an incomplete block has index keys",
            "pass first=0, local=0 and compress_block = compress_stride = block_size, with one index key per complete block",
        )
    return Pool(softmax, heads == "max", reduce == "max", activation == "relu")


def check_rule(rule: Rule) -> None:
    """Raise ArgumentError for sizes and counts that do not fit together."""
    for name in ("n", "block_size"):
        check_positive(name, getattr(rule, name))
    check_forced(rule.first, rule.local, rule.n)
    check_compression(rule.compress_block, rule.compress_stride, rule.block_size)
    if rule.compress_block > rule.block_size:
        raise ArgumentError(
            "compress_block", rule.compress_block, f"at most block_size = {rule.block_size}", "compress fewer keys, or select larger blocks"
        )


def check_compression(compress_block: int, compress_stride: int, block_size: int | None = None) -> None:
    """Raise ArgumentError unless blocks, and blocks of a selection if they are given, are whole numbers of strides."""
    check_positive("compress_stride", compress_stride)
    for name, size in (("compress_block", compress_block), ("block_size", block_size)):
        check_positive(name, size, optional=name == "block_size")
        if size and size % compress_stride:
            raise ArgumentError(name, size, f"a multiple of compress_stride = {compress_stride}", "choose sizes as in NSA's Eq. 9")
