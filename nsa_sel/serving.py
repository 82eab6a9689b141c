"""Decoding over a KV cache, contiguous or paged: sequences of different lengths in one call, one new token each or several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nsa_sel.core import entry, run, transforms
from nsa_sel.core.check import check_call, check_flag
from nsa_sel.core.indices import check_dense
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection


def selection_attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    selection: Selection | Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    scale: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """`selection_attention` of the last S_q tokens of each sequence over the keys that its cache holds, their own among them.

    Named as flash-attention's flash_attn_with_kvcache. q: [B,S_q,G,h,Dk], or [B,G,h,Dk] for one new token a sequence. k_cache, v_cache:
    [B,S_max,G,D]; or, with a block table, a pool of pages [pages,page_size,G,D] in vLLM's layout; strides are free, the last dimension
    is contiguous, and the keys of the new tokens are already there. cache_seqlens: [B] int32 or int64, the keys of each sequence: new
    token s of sequence b stands at cache_seqlens[b] - S_q + s, so that the new tokens see each other causally; tokens at positions
    below 0 see nothing (o = 0, lse = -inf). block_table: [B, pages of a sequence] int32; key j of sequence b is key j % page_size of
    page block_table[b, j // page_size]. Entries past a sequence's keys may hold anything. selection: blocks or ranges of positions in
    each sequence, over rows [B,S_q,G]; its block size and the page size need not divide each other.

    Returns o, or (o, lse), as `selection_attention` does. Never waits for a GPU, so that a CUDA graph of it may be replayed after q,
    lengths, tables, selections and caches were written in place. Gradients of q, k_cache and v_cache for caches without pages alone.
    Lengths and page numbers are checked on a CPU; on a GPU a length past the end is cut there, and a page that does not exist is
    undefined behaviour. Under torch.autocast nothing is cast: a cache keeps its dtype. Raises ArgumentError and BackendError.
    """
    if not is_compiling():
        transforms.check_traced("selection_attention_with_kvcache", q, k_cache, v_cache)
    check_flag("return_lse", return_lse)
    q, k_cache, v_cache = transforms.materialized(q, k_cache, v_cache)
    decode = isinstance(q, Tensor) and q.dim() == 4
    if decode:
        q = q.unsqueeze(1)
    S_kv = _check_cache(q, k_cache, v_cache, cache_seqlens, block_table)
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    # Of pages, stand-ins of the shape that a sequence's keys would have: nothing reads them.
    k_whole, v_whole = k, v
    if block_table is not None:
        B, _, G, _, _ = q.shape
        k_whole, v_whole = (x.as_strided((B, G, S_kv, x.shape[3]), (0, 0, 0, x.stride(3))) for x in (k, v))
    try:
        q, _, _, selection, scale, _ = check_call(q, k_whole, v_whole, selection, scale, None)
    except ArgumentError as error:
        raise _of_cache(error) from None
    if transforms.needs_grad(q, k, v):
        if block_table is not None:
            name = next(name for name, x in (("q", q), ("k_cache", k), ("v_cache", v)) if x.requires_grad)
            remedy = "call it under torch.no_grad(), or keep the keys in one piece"
            raise ArgumentError(name, "a tensor that requires gradients", "none over a paged cache", remedy)
        found = _with_gradients(q, k, v, selection, cache_seqlens, scale, backend)
    else:
        found = run.attend(q, k, v, selection, scale, None, backend, cache_seqlens, block_table)
    o, lse = (x.squeeze(1) for x in found) if decode else found
    return (o, lse) if return_lse else o


def _with_gradients(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, lengths: Tensor, scale: float, backend: str | None
) -> tuple[Tensor, Tensor]:
    """o and lse as of a plain call, in which a token below position 0 is one that selects nothing."""
    position = lengths.unsqueeze(1) + torch.arange(-q.shape[1], 0, device=q.device)
    ranges = torch.where(position[:, :, None, None, None] < 0, 0, selection.ranges)
    there = Selection(ranges, selection.block_size, selection.max_length, disjoint=selection.disjoint)
    with torch.autocast(q.device.type, enabled=False):
        o, lse = entry.selection_attention(q, k, v, there, scale=scale, q_pos=position.clamp(min=0), return_lse=True, backend=backend)
    return o, lse


def _check_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None) -> int:
    """How many keys a sequence has room for, of arguments whose shapes fit together; else ArgumentError. Reads nothing on a GPU."""
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens, "block_table": block_table}
    for name, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or name != "block_table"):
            raise ArgumentError(name, f"a {type(x).__name__}", "a torch.Tensor", "wrap it in torch.as_tensor")
        if x is not None:
            check_dense(name, x)
    if q.dim() != 5:
        value, allowed = f"of shape {tuple(q.shape)}", "[B,S_q,G,h,Dk], or [B,G,h,Dk] for one new token"
        raise ArgumentError("q", value, allowed, "split the heads into G groups of h")
    B, S_q, G, _, _ = q.shape
    k_shape = k_cache.shape
    for name, shape in (("k_cache", k_shape), ("v_cache", v_cache.shape)):
        alike = len(shape) == 4 and shape[2] == G and shape[:2] == k_shape[:2]
        if not alike or (shape[0] != B if block_table is None else 0 in shape[:2]):
            allowed = f"[B={B}, S_max, G={G}, D]" if block_table is None else f"[pages, page_size, G={G}, D] of one page or more"
            allowed += "" if name == "k_cache" else f", the first two as k_cache's {tuple(k_shape[:2])}"
            raise ArgumentError(name, f"of shape {tuple(shape)}", allowed, "move the axes; without pages leave block_table out")
    _check_index("cache_seqlens", cache_seqlens, q, "[B]", (B,), (torch.int32, torch.int64))
    if block_table is None:
        S_kv = k_shape[1]
    else:
        _check_index("block_table", block_table, q, "[B, pages of a sequence]", (B, *(block_table.shape[1:2] or (1,))), (torch.int32,))
        S_kv = block_table.shape[1] * k_shape[1]
    if S_q > S_kv:
        raise ArgumentError("q", f"of S_q = {S_q} tokens", f"at most the {S_kv} that the cache has room for", "pass the new tokens alone")
    if q.is_cpu and B:
        _check_numbers(cache_seqlens, block_table, S_kv, *k_shape[:2])
    return S_kv


def _check_index(name: str, x: Tensor, q: Tensor, words: str, shape: tuple[Any, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(x.shape) != shape or x.dtype not in dtypes or x.device != q.device:
        value = f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"
        allowed = f"{words} = {shape} of {' or '.join(map(str, dtypes))} on {q.device}"
        raise ArgumentError(name, value, allowed, "one entry a sequence, moved and cast outside the decoding loop")
    if name == "block_table" and x.stride(1) != 1 and x.shape[1] > 1:
        raise ArgumentError(name, f"of strides {x.stride()}", "a contiguous last dimension", "call block_table.contiguous()")


def _check_numbers(cache_seqlens: Tensor, block_table: Tensor | None, S_kv: int, pages: int, page_size: int) -> None:
    """On a CPU, where looking costs nothing: lengths that fit, and pages that exist."""
    if int(cache_seqlens.min()) < 0 or int(cache_seqlens.max()) > S_kv:
        value = f"from {int(cache_seqlens.min())} to {int(cache_seqlens.max())}"
        raise ArgumentError("cache_seqlens", value, f"lengths in [0, {S_kv}], which the cache has room for", "count each sequence's keys")
    if block_table is not None:
        used = torch.arange(block_table.shape[1], device=block_table.device) * page_size < cache_seqlens.unsqueeze(1)
        wrong = used & ((block_table < 0) | (block_table >= pages))
        if bool(wrong.any()):
            b, i = wrong.nonzero()[0].tolist()
            allowed = f"pages in [0, {pages}) for all keys of cache_seqlens[{b}] = {int(cache_seqlens[b])}"
            raise ArgumentError(f"block_table[{b}, {i}]", int(block_table[b, i]), allowed, "give the sequence a page there, or shorten it")


def _of_cache(error: ArgumentError) -> ArgumentError:
    """The same error under the names that the caller knows."""
    name = {"k": "k_cache", "v": "v_cache"}.get(error.argument, error.argument)
    return ArgumentError(name, error.value, error.allowed, error.remedy.replace(f"{error.argument}.", f"{name}."))
