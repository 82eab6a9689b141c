"""Decoding over a KV cache, contiguous or paged: attention, and the choice of blocks by cached index keys. Sequences of
different lengths in one call, with one or more new tokens each."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports torch._dynamo at once
from torch.compiler import is_compiling

from nsa_sel.core import attend, choose, run, shared_keys, transforms
from nsa_sel.core.arguments import CuSeqlens, Requests, as_tensor, check_flag, check_tensors
from nsa_sel.core.call import PagedKeys, Pool, Rule
from nsa_sel.core.check import as_selection, check_call, check_index, check_pool, check_rule
from nsa_sel.core.decide import decide_call
from nsa_sel.core.packed import rows_of
from nsa_sel.core.request import FEW_TOKENS
from nsa_sel.core.warm import prepared
from nsa_sel.errors import ArgumentError, renamed, shown
from nsa_sel.quantize import STORED, Scales, scales_of
from nsa_sel.selection import Selection


@overload
def selection_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, selection: Selection | Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None, *,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, scale: float | None = None, return_lse: Literal[False] = False,
    backend: str | None = None, cu_seqlens_q: CuSeqlens | None = None, max_seqlen_q: int | None = None, out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def selection_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, selection: Selection | Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None, *,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, scale: float | None = None, return_lse: Literal[True],
    backend: str | None = None, cu_seqlens_q: CuSeqlens | None = None, max_seqlen_q: int | None = None, out: Tensor | None = None,
    lse_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def selection_attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, selection: Selection | Tensor, cache_seqlens: Tensor,
    block_table: Tensor | None = None, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    scale: float | None = None, return_lse: bool = False, backend: str | None = None, cu_seqlens_q: CuSeqlens | None = None,
    max_seqlen_q: int | None = None, out: Tensor | None = None, lse_out: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attend to the KV cache of each sequence from its last S_q tokens; named after flash-attention's
    flash_attn_with_kvcache.

    New token s of sequence b is at position cache_seqlens[b] - S_q + s; a token below position 0 sees nothing (o = 0, lse =
    -inf). With `cu_seqlens_q` the new tokens of R requests are packed, any number of each: prefill in chunks, decoding and
    drafts in one call. Lengths are never read from a GPU: a CUDA graph may be replayed after its inputs were written in
    place. Gradients are supported without pages and quantization only. torch.autocast casts nothing, and torch.compile breaks
    its graph here.

    Args:
        q: [B,S_q,G,h,Dk], or [B,G,h,Dk] for one new token per sequence; dtypes as of `selection_attention`. With
            cu_seqlens_q [T,G,h,Dk], and R in place of B below.
        k_cache: [B,S_max,G,Dk], or with a block table pages [pages,page_size,G,Dk]; any strides with a contiguous last
            dimension. The new tokens' keys are already in it. q and the selection may have r times its groups.
        v_cache: likewise, with Dv.
        selection: over rows [B,S_q,G], or [B,S_q,1] for all groups, in positions of each row's own sequence: a
            `Selection`, or ranges [B,S_q,G,n,2]. With cu_seqlens_q over [T,G], or [T,1]: of block indices [T,G,n], or
            ranges [T,G,n,2]. Its block size and the page size need not divide each other.
        cache_seqlens: [B] int32 or int64, the keys of each sequence. Checked on a CPU, clamped to the cache on a GPU.
        block_table: [B, pages of a sequence] int32. Key j of sequence b is key j % page_size of page block_table[b, j //
            page_size]. Entries past a sequence's keys may hold anything; others must be pages, which a CPU checks.
        k_scale, v_scale: both or neither, of a cache in float8_e4m3fn beside q in float16, bfloat16 or float32: key = stored *
            k_scale. float32, of one element, [G], or [pages,G] for pages. Those of pages that nobody reads may be anything.
        scale, return_lse, backend: as of `selection_attention`.
        cu_seqlens_q: [R+1] int32 or int64 on q's device or a CPU, or a list: request r has the rows [cu_seqlens_q[r],
            cu_seqlens_q[r+1]), its last tokens, and the r-th length and cache, or row of the block table. Rows from
            cu_seqlens_q[R] on are padding: o = 0, lse = -inf. Not checked on a GPU.
        max_seqlen_q: the most rows of a request, where cu_seqlens_q is on a GPU; by default T. Up to 8, a batch runs as a
            decoding step.
        out, lse_out: get o and lse, of their shapes and dtypes; any strides, of `out` with a contiguous last dimension. Without
            gradients, and not of memory that the call reads. A contiguous `out` saves a copy.

    Returns:
        o [B,S_q,G,h,Dv] ([B,G,h,Dv] or [T,G,h,Dv] for q of 4 dimensions) in q's dtype; `out` if given. With
        return_lse=True (o, lse): lse [B,S_q,G,h] float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: bad input; gradients over a paged or quantized cache.
        BackendError: as `selection_attention`; make_fx or FakeTensorMode traces the call.
    """
    if is_compiling():
        options: Any = {"k_scale": k_scale, "v_scale": v_scale, "scale": scale, "return_lse": return_lse, "backend": backend}
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "out": out, "lse_out": lse_out}
        return _uncompiled(selection_attention_with_kvcache, q, k_cache, v_cache, selection, cache_seqlens, block_table, **options)
    again = None
    if type(selection) is Selection and _plain_numbers(scale, max_seqlen_q, return_lse) and (static := selection.facts_of_listed()):
        again = run.Repeated.of(
            ("attend", static, scale, return_lse, backend, max_seqlen_q), q, k_cache, v_cache, selection.listed, cache_seqlens, block_table,
            cu_seqlens_q, k_scale, v_scale, out, lse_out,
        )  # fmt: skip
        if again is not None and selection._blocks is not None:
            selection.indices  # noqa: B018  # refuses those that were written
        made = None if again is None else again.replay()
        if made is not None:
            return _given_or_made(made, (out, lse_out), return_lse)
    transforms.check_traced("selection_attention_with_kvcache", q, k_cache, v_cache)
    check_flag("return_lse", return_lse)
    packed = packed_requests(q, cu_seqlens_q, max_seqlen_q, cache_seqlens)
    made = _attend(
        again, q, k_cache, v_cache, selection, cache_seqlens, block_table, (k_scale, v_scale), scale, backend, packed, (out, lse_out),
        return_lse,
    )  # fmt: skip
    return _given_or_made(made, (out, lse_out), return_lse)


def _attend(
    again: run.Repeated | None, q: Tensor, k_cache: Tensor, v_cache: Tensor, selection: Selection | Tensor, cache_seqlens: Tensor,
    block_table: Tensor | None, k_v_scales: tuple[Tensor | None, Tensor | None], scale: float | None, backend: str | None,
    requests: Requests | None, outputs: tuple[Tensor | None, Tensor | None], return_lse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Check a call, and return o, and with return_lse lse, unless `outputs` gets them. again: the call, if it can be replayed."""
    flat, packed = isinstance(q, Tensor) and q.dim() == 4, requests is not None
    if flat:
        q = q.unsqueeze(1)
    S_kv = _check_cache(q, k_cache, v_cache, cache_seqlens, block_table, None, requests)
    scales = scales_of(q, k_cache, v_cache, *k_v_scales, block_table is not None)
    q, k_cache, v_cache = transforms.materialized(q, k_cache, v_cache)
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if packed and block_table is None:  # a request's keys are one page
        block_table = torch.arange(len(k), dtype=torch.int32, device=q.device).unsqueeze(1)
    # For pages, check views of the shape that contiguous keys would have; nothing reads them.
    k_checked, v_checked = k, v
    if block_table is not None:
        k_checked, v_checked = (x.as_strided((len(q), x.shape[1], S_kv, x.shape[3]), (0, 0, 0, x.stride(3))) for x in (k, v))
    r = shared_keys.ratio(q.shape[2], k.shape[1])
    selection = as_selection(selection, None if flat else (q.shape[0], q.shape[1], q.shape[2]))
    if packed and selection.listed.shape[:2] == (1, len(q)):
        selection = shared_keys.with_ranges(selection, selection.ranges.transpose(0, 1))
    try:
        checked = (q, selection) if r == 1 else shared_keys.one_of(q, selection, r)
        *_, scale, _ = check_call(checked[0], k_checked, v_checked, checked[1], scale, None, stored=None if scales is None else STORED)
    except ArgumentError as error:
        raise renamed(error, k="k_cache", v="v_cache") from None
    given, differentiable = _check_results(q, v.shape[3], flat, *outputs), transforms.needs_grad(q, k, v)
    if differentiable:
        _check_gradients(q, k, v, "packed" * packed or "paged" * (block_table is not None) or "quantized" * (scales is not None), given)

    def work() -> tuple[Tensor, ...]:
        """Return those of o and lse that are returned and not given: a replay makes all others in one buffer."""
        where = _Keys(cache_seqlens, block_table)
        if requests is not None:
            unit = math.lcm(max(1, k.shape[2]), selection.block_size or 1)
            where = where._replace(
                rows=rows_of(requests.cu, cache_seqlens, len(q), S_kv, unit, scales is not None)[:-1], most_rows=requests.most
            )
        if differentiable:
            results = _with_gradients(q, k, v, selection, cache_seqlens, scale, backend)
        elif r > 1:
            results = _of_shared_keys(q, k, v, selection, scale, backend, where, scales, r)
        else:
            results = where.attend(q, k, v, selection, scale, backend, scales, given)
        written = [x if to is None else _written(x, to) for x, to in zip(results, given, strict=True)]
        returned = zip(written, given, (True, return_lse), strict=True)
        return tuple((x.squeeze(1) if flat else x) for x, to, asked in returned if to is None and asked)

    # Such rows of blocks are read as they are listed, without plans that calls of other layers could share.
    repeats = again is not None and not differentiable and (packed or q.shape[1] <= FEW_TOKENS)
    return again.run(work) if again is not None and repeats else work()


def _plain_numbers(scale: object, most: object, flag: object) -> bool:
    """Return True for arguments of exactly the types of a float, an int and a bool, or None: others may be equal, too."""
    return (scale is None or type(scale) is float) and (most is None or type(most) is int) and type(flag) is bool


def _given_or_made(made: tuple[Tensor, ...], given: tuple[Tensor | None, Tensor | None], return_lse: bool) -> Any:
    """Return o, or o and lse, of which those that are not given were made."""
    for x in given:
        if x is not None:  # autograd, which may have saved it, does not see what kernels write
            torch.autograd.graph.increment_version(x)
    o, lse = given
    o = made[0] if o is None else o
    if not return_lse:
        return o
    return o, made[-1] if lse is None else lse


def choose_blocks_with_kvcache(
    q: Tensor, k_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None = None, *, block_size: int = 128, n: int = 16,
    first: int = 0, local: int = 1, reduce: Literal["max", "sum"] = "max", heads: Literal["max", "sum"] = "sum", softmax: bool = False,
    activation: Literal["relu"] | None = None, tail: bool = False, compress_block: int = 1, compress_stride: int = 1,
    k_scale: Tensor | None = None, scale: float | None = None, cu_seqlens_q: CuSeqlens | None = None, max_seqlen_q: int | None = None,
    out: Tensor | None = None, backend: str | None = None,
) -> Selection:  # fmt: skip
    """Choose blocks for each sequence's last S_q tokens by the index keys of its cache, as `choose_blocks` does, for
    `selection_attention_with_kvcache`.

    New token s of sequence b is at position cache_seqlens[b] - S_q + s; a token below position 0 chooses nothing. With
    cu_seqlens_q the new tokens of R requests are packed: any mix of prefill, with or without a prefix, and decoding in one
    call. Index keys that no token of a sequence sees are not read, or count for nothing, NaN included. Lengths are never read
    from a GPU: a CUDA graph may be replayed after its inputs were written in place. No gradient. torch.autocast casts
    nothing, and torch.compile breaks its graph here.

    Args:
        q: [B,S_q,G,h,Dk], or [B,G,h,Dk] for one new token per sequence, or [T,G,h,Dk] with cu_seqlens_q: index queries.
            float16, bfloat16, float32 or float64.
        k_cache: index keys [B,C_max,G,Dk], or with a block table pages [pages,page_size,G,Dk]; one group of them for all
            groups of q, or one for each; any strides with a contiguous last dimension. Of q's dtype, or of float8_e4m3fn
            beside q in float16, bfloat16 or float32. Each stands for the keys that compress_block and compress_stride say.
        cache_seqlens: [B] int32 or int64, the keys (not index keys) of each sequence. Checked on a CPU, clamped on a GPU.
        block_table: [B, pages of a sequence] int32. Index key i of sequence b is i % page_size of page block_table[b, i //
            page_size]. Entries past a sequence's index keys may hold anything; others must be pages, which a CPU checks.
        block_size, n, first, local, reduce, heads, softmax, activation, tail, compress_block, compress_stride, scale,
            backend: as of `choose_blocks`.
        k_scale: of index keys in float8_e4m3fn: key = stored * k_scale. float32, of one element, [G] of k_cache, or
            [pages,G] for pages; None for 1.
        cu_seqlens_q, max_seqlen_q: as of `selection_attention_with_kvcache`; padding chooses nothing.
        out: [B,S_q,G,n] int32 or int64 ([B,G,n] for q of 4 dimensions; n + 1 with tail), contiguous. Gets the block
            indices, ascending, -1 last; with tail, in the last column the incomplete block or -1. With cu_seqlens_q
            [T,G,n], or more rows, which stay as they are; any strides with a contiguous last dimension.

    Returns:
        The `Selection` of whole blocks over rows [B,S_q,G] ([T,1,G] with cu_seqlens_q); with `out`, of `out`: do not
        write to it while the selection is in use.

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: as `selection_attention`; make_fx or FakeTensorMode traces the call.
    """
    rule = Rule(compress_block, compress_stride, block_size, n, first, local)
    if is_compiling():
        options: Any = {"reduce": reduce, "heads": heads, "softmax": softmax, "activation": activation, "tail": tail, "k_scale": k_scale}
        options |= {"scale": scale, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "out": out, "backend": backend}
        options |= rule.options()
        return _uncompiled(choose_blocks_with_kvcache, q, k_cache, cache_seqlens, block_table, **options)  # type: ignore[no-any-return]
    again = None
    if {*map(type, rule)} == {int} and _plain_numbers(scale, max_seqlen_q, softmax) and type(tail) is bool:
        facts = ("choose", rule, reduce, heads, softmax, activation, tail, scale, backend, max_seqlen_q)
        again = run.Repeated.of(facts, q, k_cache, cache_seqlens, block_table, cu_seqlens_q, k_scale, out)
        made = None if again is None else again.replay()
        if made is not None:
            chosen = made[0] if made else out if cu_seqlens_q is None else out[: len(q)]  # type: ignore[index]
            return Selection.of_chosen(chosen, block_size)  # type: ignore[arg-type]
    transforms.check_traced("choose_blocks_with_kvcache", q, k_cache, k_cache)
    check_rule(rule)
    pool = check_pool(rule, reduce, heads, softmax, activation, tail)
    packed = packed_requests(q, cu_seqlens_q, max_seqlen_q, cache_seqlens)
    chosen = _choose(again, q, k_cache, cache_seqlens, block_table, k_scale, scale, rule, pool, tail, backend, packed, out)
    return Selection.of_chosen(chosen, block_size)


def _choose(
    again: run.Repeated | None, q: Tensor, k_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, k_scale: Tensor | None,
    scale: float | None, rule: Rule, pool: Pool, tail: bool, backend: str | None, requests: Requests | None, out: Tensor | None,
) -> Tensor:  # fmt: skip
    """Check a call, and return the chosen blocks, `out` if it is given. again: the call, if it can be replayed."""
    decode = isinstance(q, Tensor) and q.dim() == 4
    if decode:
        q = q.unsqueeze(1 if requests is None else 0)
    S_kv = _check_cache(q, k_cache, None, cache_seqlens, block_table, rule, requests)
    scales = scales_of(q, k_cache, k_cache, k_scale, k_scale, block_table is not None)
    q, k_cache, _ = transforms.materialized(q, k_cache, k_cache)
    k, pages, cast = k_cache.detach().transpose(1, 2), None, None if scales is None else STORED
    room, rows = k, q.detach()
    if block_table is not None:
        pages = PagedKeys(block_table, 0)
        room = k.as_strided((len(q), k.shape[1], block_table.shape[1] * k.shape[2], k.shape[3]), (0, 0, 0, k.stride(3)))
    elif requests is not None:
        room = k.as_strided((1, *k.shape[1:]), (0, 0, 0, k.stride(3)))
    # Check views of the shape that contiguous keys of a batch would have, and no rows where they are packed.
    try:
        index = check_index(rows if requests is None else rows[:, :0], room, rule, pool, None, scale, None, S_kv, False, cast)
    except ArgumentError as error:
        raise renamed(error, k="k_cache") from None
    if out is not None:
        _check_out(out, q, rule.n + tail, decode, requests is not None)
        out = out.view(*q.shape[:3], rule.n + tail) if requests is None else out[: q.shape[1]].unsqueeze(0)
    index = index._replace(q=rows, k=k.expand(-1, q.shape[2], -1, -1))
    cache = choose.IndexCache(cache_seqlens, pages, scales, requests)

    def work() -> tuple[Tensor, ...]:
        """Return the chosen blocks unless `out` gets them."""
        chosen = choose.untraced_best_blocks(index, rule, pool, backend, tail, True, cache, out)
        return () if out is not None else (chosen if requests is None else chosen.squeeze(0),)

    made = work() if again is None else again.run(work)
    return made[0] if made else out if requests is None else out.squeeze(0)  # type: ignore[union-attr, return-value]


def packed_requests(q: object, cu_seqlens_q: CuSeqlens | None, max_seqlen_q: int | None, cache_seqlens: Tensor) -> Requests | None:
    """Return the requests of packed rows q [T,G,h,Dk], from the arguments of a call over caches; None without
    cu_seqlens_q."""
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise ArgumentError("max_seqlen_q", shown(max_seqlen_q), "None without cu_seqlens_q", "pass cu_seqlens_q, or leave it out")
        return None
    rows = as_tensor("q", q)
    if rows.dim() != 4:
        remedy = "pass the rows of all requests end to end"
        raise ArgumentError("q", f"of shape {tuple(rows.shape)}", "[T,G,h,Dk] with cu_seqlens_q", remedy)
    check_tensors(cache_seqlens=cache_seqlens)
    return Requests.of(rows, cu_seqlens_q, max_seqlen_q, cache_seqlens)


@_disable_dynamo
def _uncompiled(function: Any, *arguments: Any, **options: Any) -> Any:
    """Return the eager call, in a function that torch.compile traces: there is no op for it, and checks and decisions
    are no graph."""
    return function(*arguments, **options)


def _with_gradients(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, lengths: Tensor, scale: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    """Return o and lse by a plain call, in which tokens below position 0 select nothing."""
    position = lengths.unsqueeze(1) + torch.arange(-q.shape[1], 0, device=q.device)
    ranges = torch.where(position[:, :, None, None, None] < 0, 0, selection.ranges)
    selection = Selection(ranges, selection.block_size, selection.max_length, disjoint=selection.disjoint)
    with torch.autocast(q.device.type, enabled=False):
        o, lse = attend.selection_attention(q, k, v, selection, scale=scale, q_pos=position.clamp(min=0), return_lse=True, backend=backend)
    return o, lse


class _Keys(NamedTuple):
    """Hold the lengths and pages of sequences, and for a packed batch its rows (`core.packed.rows_of`)."""

    lengths: Tensor
    block_table: Tensor | None
    rows: Tensor | None = None
    most_rows: int = 1

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, backend: str | None, scales: Scales | None,
        out: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return o and lse without gradients; rows of a packed batch are sequences of one token."""
        lengths, table_rows = (self.lengths, None) if self.rows is None else self.rows.unbind(1)[:2]
        decided = decide_call(
            q, k, v, selection, scale, None, False, backend, lengths, self.block_table, scales, table_rows=table_rows,
            most_rows=self.most_rows, out=out,
        )  # fmt: skip
        o, lse = run.attend(prepared(decided, backend))
        return o, lse

    def repeated(self, r: int) -> _Keys:
        """Return the keys of sequences that are r times as many, each r times."""
        if self.rows is not None:
            return self._replace(rows=self.rows.repeat_interleave(r, 0), most_rows=1)
        table = None if self.block_table is None else self.block_table.repeat_interleave(r, 0)
        return _Keys(self.lengths.repeat_interleave(r), table)


def _of_shared_keys(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, backend: str | None, where: _Keys, scales: Scales | None, r: int
) -> tuple[Tensor, Tensor]:
    """Return o and lse where r groups of q share a KV group: as r rows of a token, or over pages as r sequences of the
    same pages."""
    if where.block_table is None:
        position = where.lengths.unsqueeze(1) + torch.arange(-q.shape[1], 0, device=q.device)
        rows, chosen, at = shared_keys.call_of_rows(q, selection, position, k.shape[2], r)
        o, lse = run.attend(prepared(decide_call(rows, k, v, chosen, scale, at, False, backend, scales=scales), backend))
        return shared_keys.from_rows(o, r), shared_keys.from_rows(lse, r)
    rows, chosen = shared_keys.as_sequences(q, r), shared_keys.with_ranges(selection, shared_keys.as_sequences(selection.ranges, r))
    o, lse = where.repeated(r).attend(rows, k, v, chosen, scale, backend, scales)
    return shared_keys.from_sequences(o, r), shared_keys.from_sequences(lse, r)


def _written(x: Tensor, to: Tensor) -> Tensor:
    """Return `to` with the numbers of x, which a kernel may have written there."""
    return to if to.data_ptr() == x.data_ptr() else to.copy_(x)


def _check_gradients(q: Tensor, k: Tensor, v: Tensor, kind: str, given: tuple[Tensor | None, Tensor | None]) -> None:
    """Raise ArgumentError for gradients where the cache, the batch (`kind`) or given outputs have none."""
    name = next(name for name, x in (("q", q), ("k_cache", k), ("v_cache", v)) if x.requires_grad)
    value = "a tensor that requires gradients"
    if kind:
        other = "a cache of q's dtype" if kind == "quantized" else f"a call that is not {kind}"
        raise ArgumentError(
            name, value, f"none over a {kind} {'batch' if kind == 'packed' else 'cache'}", f"call it under torch.no_grad(), or use {other}"
        )
    if given != (None, None):
        raise ArgumentError(name, value, "none together with out or lse_out", "call it under torch.no_grad(), or leave them out")


def _check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, cache_seqlens: Tensor, block_table: Tensor | None, rule: Rule | None,
    requests: Requests | None,
) -> int:  # fmt: skip
    """Check the shapes of a cache, or with a rule those of a cache of index keys, and return the number of keys that a
    sequence has room for. Reads nothing on a GPU.

    requests: of packed rows, q [1,T,G,h,Dk].
    """
    tensors = {"k_cache": k_cache} if v_cache is None else {"k_cache": k_cache, "v_cache": v_cache}
    check_tensors(q=q, cache_seqlens=cache_seqlens, **tensors)
    if block_table is not None:
        check_tensors(block_table=block_table)
    if q.dim() != 5:
        raise ArgumentError(
            "q", f"of shape {tuple(q.shape)}", "[B,S_q,G,h,Dk], or [B,G,h,Dk] for one new token", "split the heads into G groups of h"
        )
    B, S_q, G, _, _ = q.shape
    if requests is not None:
        B, S_q = requests.number, 0  # rows before a request's first key see nothing
    k_shape = k_cache.shape
    groups = G // shared_keys.ratio(G, k_shape[2]) if len(k_shape) == 4 else G
    if rule is not None and groups > 1:
        groups = G
    for name, x in tensors.items():
        shape = x.shape
        same = len(shape) == 4 and shape[2] == groups and shape[:2] == k_shape[:2]
        if not same or (shape[0] != B if block_table is None else 0 in shape[:2]):
            allowed = f"[B={B}, S_max, G={G}, D]" if block_table is None else f"[pages, page_size, G={G}, D] with at least one page"
            allowed += "" if name == "k_cache" else f", the first two equal to k_cache's {tuple(k_shape[:2])}"
            remedy = "move the axes; without pages leave block_table out"
            if same and block_table is None:
                remedy = "pass these sequences alone; for pages [pages, page_size, G, D] pass block_table=, int32 [B, pages of a sequence]"
            raise ArgumentError(name, f"of shape {tuple(shape)}", allowed, remedy)
    _check_index("cache_seqlens", cache_seqlens, q, "[B]", (B,), (torch.int32, torch.int64))
    room = k_shape[1]
    if block_table is not None:
        _check_index("block_table", block_table, q, "[B, pages of a sequence]", (B, *(block_table.shape[1:2] or (1,))), (torch.int32,))
        room *= block_table.shape[1]
    S_kv = room if rule is None else room * rule.compress_stride + rule.compress_block - 1  # before it needs another index key
    if S_q > S_kv:
        raise ArgumentError("q", f"of S_q = {S_q} tokens", f"at most the {S_kv} that the cache has room for", "pass only the new tokens")
    if q.is_cpu and B:
        _check_lengths(cache_seqlens, S_kv, block_table, k_shape[0], k_shape[1], rule)
    return S_kv


def _check_lengths(
    cache_seqlens: Tensor, S_kv: int, block_table: Tensor | None, pages: int, page_size: int, rule: Rule | None
) -> None:  # fmt: skip
    """Check on a CPU, where reading is free, that lengths fit and pages exist."""
    if int(cache_seqlens.min()) < 0 or int(cache_seqlens.max()) > S_kv:
        raise ArgumentError(
            "cache_seqlens",
            f"from {int(cache_seqlens.min())} to {int(cache_seqlens.max())}",
            f"lengths in [0, {S_kv}], the room of the cache",
            "count each sequence's keys",
        )
    if block_table is None:
        return
    keys = cache_seqlens if rule is None else (cache_seqlens - rule.compress_block) // rule.compress_stride + 1
    used = torch.arange(block_table.shape[1], device=block_table.device) * page_size < keys.unsqueeze(1)
    wrong = used & ((block_table < 0) | (block_table >= pages))
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise ArgumentError(
            f"block_table[{b}, {i}]",
            int(block_table[b, i]),
            f"pages in [0, {pages}) for all keys of cache_seqlens[{b}] = {int(cache_seqlens[b])}",
            "give the sequence this page, or shorten it",
        )


def _check_out(out: Tensor, q: Tensor, n: int, decode: bool, packed: bool) -> None:
    """Check the tensor that gets block indices of q [B,S_q,G,h,Dk]. packed: of q [1,T,G,h,Dk], or of more rows."""
    check_tensors(out=out)
    B, S_q, G = q.shape[:3]
    shape, fits, layout = (B, G, n) if decode else (B, S_q, G, n), out.is_contiguous(), "contiguous "
    if packed:
        shape, layout = (max(S_q, *out.shape[:1]) if out.dim() else S_q, G, n), "a contiguous last dimension, "
        fits = out.dim() > 0 and (out.stride(-1) == 1 or n == 1)
    _check_result("out", out, q, shape, (torch.int32, torch.int64), fits, layout)


def _check_results(
    q: Tensor, Dv: int, flat: bool, out: Tensor | None, lse_out: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the tensors that get o [B,S_q,G,h,Dv] and lse of q [B,S_q,G,h,Dk], as the call has them; None where none is
    given."""
    wide, found = torch.promote_types(q.dtype, torch.float32), []
    given = ("out", out), ("lse_out", lse_out)
    for (name, x), shape, dtype in zip(given, ((*q.shape[:-1], Dv), q.shape[:-1]), (q.dtype, wide), strict=True):
        if x is not None:
            check_tensors(**{name: x})
            wanted = (*shape[:1], *shape[2:]) if flat else tuple(shape)
            fits = x.dim() > 0 and (x.stride(-1) == 1 or x.shape[-1] == 1 or name == "lse_out")
            _check_result(name, x, q, wanted, (dtype,), fits, "" if name == "lse_out" else "a contiguous last dimension, ")
            x = x.unsqueeze(1) if flat else x
        found.append(x)
    return found[0], found[1]


def _check_result(
    name: str, x: Tensor, q: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], fits: bool, layout: str
) -> None:
    """Raise ArgumentError unless x has this shape and one of the dtypes, is on q's device, and its strides are fit: of the
    `layout`."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(name, "a tensor that requires gradients", "none: it has no gradient", f"pass {name}.detach()")
    if tuple(x.shape) != shape or x.dtype not in dtypes or x.device != q.device or not fits:
        raise ArgumentError(
            name,
            f"{x.dtype} of shape {tuple(x.shape)} and strides {x.stride()} on {x.device}",
            f"{layout}{shape} of {' or '.join(map(str, dtypes))} on {q.device}",
            "pass such a tensor, or leave it out",
        )


def _check_index(name: str, x: Tensor, q: Tensor, layout: str, shape: tuple[Any, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(x.shape) != shape or x.dtype not in dtypes or x.device != q.device:
        raise ArgumentError(
            name,
            f"{x.dtype} of shape {tuple(x.shape)} on {x.device}",
            f"{layout} = {shape} of {' or '.join(map(str, dtypes))} on {q.device}",
            "pass one entry per sequence; move and cast it outside the decoding loop",
        )
    if name == "block_table" and x.stride(1) != 1 and x.shape[1] > 1:
        raise ArgumentError(name, f"of strides {x.stride()}", "a contiguous last dimension", "call block_table.contiguous()")
