"""flash-linear-attention's NSA and MoBA on nsa-sel: its calls `parallel_nsa` and `parallel_moba`, and `patch_fla`, which
puts them under fla's own layers and models."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from nsa_sel import forks
from nsa_sel.branches import nsa_attention
from nsa_sel.choosing import compressed_attention, moba_selection
from nsa_sel.compat.packed import by_group, by_group_gate
from nsa_sel.compression import BlockMean
from nsa_sel.core.arguments import Bounds, CuSeqlens, check_positive, is_whole
from nsa_sel.core.attend import selection_attention
from nsa_sel.core.packed import packed_attention
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection
from nsa_sel.window import sliding_window_attention

FIRST, LOCAL = 1, 2  # blocks that fla always selects: the first, and the last two
CALLERS = {
    "parallel_nsa": ("fla.ops.nsa.parallel", "fla.ops.nsa", "fla.layers.nsa"),
    "parallel_moba": ("fla.ops.moba.parallel", "fla.ops.moba", "fla.layers.moba"),
}  # modules that hold each name
LAYERS = {"parallel_nsa": ("fla.layers.nsa", "NativeSparseAttention"), "parallel_moba": ("fla.layers.moba", "MoBA")}  # that make each call
MODELS = {"NSAModel": "fla.models.nsa.modeling_nsa", "MoBAModel": "fla.models.moba.modeling_moba"}

_lock = forks.lock()
_patches: set[object] = set()  # one token per patch that is not undone
_replaced: list[tuple[Any, str, Any, Any]] = []  # (owner, attribute, fla's own value, ours) while a patch is active


def patch_fla() -> Callable[[], None]:
    """Run flash-linear-attention's `NativeSparseAttention` and `MoBA` layers and their models on nsa-sel: all branches,
    backward, and generation.

    Replaces `parallel_nsa` and `parallel_moba` in fla's modules, of this process, and without flash-attn the dense
    calls with which fla's MoBA decodes. Existing layers follow, and keep their weights. fla's models also take their
    cache as `cache=`, the name that transformers 5.24 and newer use in `generate`. MoBA layers with use_flash_moba=True
    stay on FlashMoBA.

    Returns:
        A function that undoes this patch. fla's own functions are back once every patch is undone, in any order.

    Raises:
        ArgumentError: torch sees no GPU, which the kernels that stay fla's need.
        ImportError: flash-linear-attention is not installed, or keeps these calls or its models elsewhere.
    """
    _need_gpu("patch_fla()")
    calls, dense = _our_calls()
    try:
        modules = [(importlib.import_module(module), name) for name, holders in CALLERS.items() for module in holders]
        replaced = [(module, name, getattr(module, name), calls[name]) for module, name in modules]
        moba = importlib.import_module("fla.layers.moba")
        replaced += [(moba, name, None, ours) for name, ours in dense.items() if getattr(moba, name) is None]
        for name, module in MODELS.items():
            model = getattr(importlib.import_module(module), name)
            if "cache" not in inspect.signature(model.forward).parameters:
                replaced.append((model, "forward", model.forward, taking_cache(model.forward)))
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"patch_fla needs flash-linear-attention with parallel_nsa, parallel_moba and their layers and models as in 0.6: {error}."
            ' Remedy: pip install "flash-linear-attention>=0.6".'
        ) from error
    patch = object()
    with _lock:
        if not _patches:
            _replaced[:] = replaced
            for owner, name, _, ours in replaced:
                setattr(owner, name, ours)
        _patches.add(patch)

    def undo() -> None:
        with _lock:
            if patch in _patches:
                _patches.remove(patch)
                if not _patches:
                    for owner, name, own, ours in _replaced:
                        if getattr(owner, name) is ours:  # another library may have replaced it since
                            setattr(owner, name, own)

    return undo


def _our_calls() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what stands for fla's calls, and for those of flash-attn where it is not installed."""
    dense = {"flash_attn_func": _dense_attention, "flash_attn_varlen_func": _dense_attention_varlen}
    return {"parallel_nsa": parallel_nsa, "parallel_moba": parallel_moba}, dense


def _need_gpu(what: str) -> None:
    """Raise ArgumentError where fla's rotary and norm kernels cannot run: Triton's own message there names no remedy."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        allowed = "a GPU: the rotary and norm kernels of fla's layers and models are written in Triton and stay fla's"
        remedy = "on a CPU call nsa_sel.compat.parallel_nsa or parallel_moba, or build the layer with nsa_sel.NSAttention"
        raise ArgumentError(what, "on a machine without a usable GPU", allowed, remedy)


def _is_a(module: Any, holder: str, name: str) -> bool:
    """Return whether a module is of a class of fla, without importing fla."""
    return isinstance(module, getattr(sys.modules.get(holder), name, ()))


def is_layer(module: Any) -> bool:
    """Return whether a module is an attention layer of fla that selects blocks."""
    return any(_is_a(module, *layer) for layer in LAYERS.values())


def rule_of(layer: Any) -> str:
    """Return in words which keys a layer of fla attends to."""
    if _is_a(layer, *LAYERS["parallel_moba"]):
        return f"MoBA: {layer.moba_topk} of the blocks of {layer.moba_chunk_size} keys, by their mean keys; dense over a cache"
    return f"NSA: {layer.block_counts} of the blocks of {layer.block_size} keys, their means, and a window of {layer.window_size} keys"


def forward_on_nsa_sel(layer: Any) -> Callable[..., Any]:
    """Return the forward of a layer of fla with the calls of this module, for one instance: fla's modules stay as they
    are.

    Raises:
        ArgumentError: torch sees no GPU, or the layer's class makes another call than the one that is replaced.
    """
    _need_gpu("patch_model() of fla's layers")
    forward: Any = inspect.unwrap(type(layer).forward)
    call = next(call for call, held in LAYERS.items() if _is_a(layer, *held))
    if call not in forward.__code__.co_names:
        found = f"{type(layer).__name__}, whose forward does not call {call}"
        raise ArgumentError("model", found, f"a layer that calls {call}, as fla's in 0.6", "install such a version, or report the new one")
    names = {name: value for name, value in forward.__globals__.items() if name != "__name__"}  # torch.compile would look in that module
    calls, dense = _our_calls()
    names |= {name: ours for name, ours in calls.items() if name in names}
    names |= {name: ours for name, ours in dense.items() if names.get(name, ours) is None}
    ours = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    ours.__kwdefaults__ = forward.__kwdefaults__
    return ours


def drops_cache(module: Any) -> bool:
    """Return whether a module is a model of fla that takes no `cache=`, the name of transformers 5.24."""
    known = any(_is_a(module, holder, name) for name, holder in MODELS.items())
    return known and "cache" not in inspect.signature(type(module).forward).parameters


def taking_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `forward` of a model of fla with the cache as `cache=`, too, which fla 0.6 drops without a word."""

    @functools.wraps(forward)
    def with_cache(self: Any, *args: Any, cache: Any = None, **kwargs: Any) -> Any:
        if cache is None:
            return forward(self, *args, **kwargs)
        if kwargs.get("past_key_values") is not None:
            raise ArgumentError("cache", "given with past_key_values", "one of them", "pass cache= alone")
        return forward(self, *args, **{**kwargs, "past_key_values": cache})

    return with_cache


def parallel_nsa(
    q: Tensor, k: Tensor, v: Tensor, g_cmp: Tensor | None = None, g_slc: Tensor | None = None,
    g_swa: Tensor | None = None, block_indices: Tensor | None = None, block_counts: Tensor | int = 16,
    block_size: int = 64, window_size: int = 0, scale: float | None = None,
    cu_seqlens: CuSeqlens | tuple[CuSeqlens, CuSeqlens] | None = None, *, block_aligned: bool = False,
) -> Tensor:  # fmt: skip
    """`parallel_nsa` of flash-linear-attention (fla.ops.nsa): o = g_cmp o_cmp + g_slc o_slc + g_swa o_swa,
    differentiable.

    Compressed keys are the means of whole blocks. Of the blocks that they choose, the first and the last two are always
    taken.

    Args:
        q: [B,TQ,HQ,K], the last TQ of T positions; dtypes as of `selection_attention`.
        k: [B,T,H,K].
        v: [B,T,H,V].
        g_cmp: [B,TQ,HQ] gate of the compressed branch, which chooses the blocks; None: there is none. Gates come from a
            sigmoid: in bfloat16 a negative one makes gradients NaN.
        g_slc: [B,TQ,HQ] gate of the selected branch, by default 1.
        g_swa: [B,TQ,HQ] gate of the window; ignored without a window, as in the original.
        block_indices: [B,TQ,H,S] blocks of block_size keys in any order, instead of chosen ones; negative and future
            ones select nothing.
        block_counts: how many blocks are chosen, at least 3. With block_indices a tensor [B,TQ,H], how many of a row's
            first entries count, or a number, which has no effect, as in the original.
        block_size: keys of a block.
        window_size: keys that a row sees in the window, its own among them; 0: there is none.
        scale: factor of the logits, by default 1/sqrt(K).
        cu_seqlens: [N+1] bounds of packed sequences, with B = 1; a tuple is one for queries and one for keys. If these
            differ, and other branches than the selected one are wanted, sequences run one by one, and the host reads
            the bounds.
        block_aligned: of the selected branch alone, as of `selection_attention_varlen`.

    Returns:
        o [B,TQ,HQ,V].

    Raises:
        ArgumentError: bad input.
        BackendError: as `selection_attention`.
    """
    if g_cmp is None and block_indices is None:
        raise ArgumentError(
            "block_indices", None, "a tensor [B,TQ,H,S] where g_cmp is None", "pass g_cmp, whose branch chooses blocks, or block_indices"
        )
    if not isinstance(block_counts, Tensor | int) or isinstance(block_counts, bool):
        raise ArgumentError("block_counts", shown(block_counts), "a number, or a tensor [B,TQ,H]", "leave it out: 16 blocks are chosen")
    if block_indices is None and isinstance(block_counts, Tensor):
        raise ArgumentError(
            "block_counts", "a tensor", "a number where blocks are chosen", "pass one number for all rows, or block_indices"
        )
    if block_indices is None and block_counts < FIRST + LOCAL:
        allowed = f"at least {FIRST + LOCAL} where blocks are chosen"
        raise ArgumentError("block_counts", block_counts, allowed, "raise it: the first block and the last two are always taken")
    if not is_whole(window_size) or window_size < 0:
        raise ArgumentError("window_size", shown(window_size), "a whole number of keys, or 0", "pass 0 for no window")
    if window_size and g_swa is None:
        raise ArgumentError("g_swa", None, "a tensor [B,TQ,HQ] with a window", "pass the window's gate, or window_size=0")
    rows = by_group(q, k, 4, "[B,TQ,HQ,K]", "[B,T,H,K]")
    g_cmp, g_slc, g_swa = (
        None if gate is None else by_group_gate(name, gate, rows) for name, gate in (("g_cmp", g_cmp), ("g_slc", g_slc), ("g_swa", g_swa))
    )
    n = block_counts if isinstance(block_counts, int) else FIRST + LOCAL
    counts = block_counts if isinstance(block_counts, Tensor) else None
    options = _Options(n, block_size, window_size, scale, block_aligned)
    one = _Rows(rows, g_cmp, g_slc, g_swa if window_size else None, block_indices, counts)
    if cu_seqlens is None:
        return _attend(one, k, v, options, None, None).flatten(2, 3)
    if q.shape[0] != 1:
        raise ArgumentError("q", f"of {q.shape[0]} batch entries", "1 with cu_seqlens", "pack the sequences into one entry")
    pair = isinstance(cu_seqlens, tuple) and not all(isinstance(bound, int) for bound in cu_seqlens)
    cu_q, cu_k = cast(tuple[CuSeqlens, CuSeqlens | None], cu_seqlens if pair else (cu_seqlens, None))
    cu_k = None if cu_k is cu_q else cu_k
    if cu_k is None or (g_cmp is None and not window_size):
        return _attend(one, k, v, options, cu_q, cu_k).flatten(2, 3)
    return _one_by_one(one, k, v, options, cu_q, cu_k).flatten(2, 3)


def parallel_moba(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: CuSeqlens, max_seqlen: int | None, chunk_size: int, topk: int
) -> Tensor:  # fmt: skip
    """`parallel_moba` of flash-linear-attention (fla.ops.moba): attention of each head to the row's own block and to
    the topk - 1 earlier ones of its sequence whose mean key has the largest product with the query; differentiable.

    Where two blocks score the same, the lower one is chosen. The host reads cu_seqlens, as in the original.

    Args:
        q: [1,T,HQ,K], packed sequences; dtypes as of `selection_attention`.
        k: [1,T,H,K]; the original needs H = HQ.
        v: [1,T,H,V].
        cu_seqlens: [N+1] bounds of the sequences.
        max_seqlen: not read.
        chunk_size: keys of a block; blocks begin with their sequence.
        topk: blocks of a row, its own among them. 1 or less: all keys up to the row's position, as in the original.

    Returns:
        o [1,T,HQ,V].

    Raises:
        ArgumentError: bad input.
        BackendError: as `selection_attention`.
    """
    rows = by_group(q, k, 4, "[1,T,HQ,K]", "[1,T,H,K]")
    if q.shape[0] != 1:
        raise ArgumentError("q", f"of {q.shape[0]} batch entries", "1 with cu_seqlens", "pack the sequences into one entry")
    check_positive("chunk_size", chunk_size)
    if not is_whole(topk):
        raise ArgumentError("topk", shown(topk), "a whole number of blocks", "pass how many blocks a row attends to, its own among them")
    T = q.shape[1]
    cu = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    numbers = Bounds.of("cu_seqlens", cu, T, q).numbers or (0,)
    if topk <= 1:
        return sliding_window_attention(rows[0], k[0], v[0], max(1, T), cu_seqlens=cu).flatten(1, 2).unsqueeze(0)
    of_sequences = [(a, b) for a, b in itertools.pairwise(numbers) if a < b]
    if not of_sequences:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    if len({b - a for a, b in of_sequences}) == 1 and numbers[-1] == T:  # a batch
        rows, k, v = (torch.unflatten(x[0], 0, (len(of_sequences), -1)) for x in (rows, k, v))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        selection = moba_selection(rows, k, block_size=chunk_size, n=topk)
        o: Tensor = selection_attention(rows.flatten(2, 3).unsqueeze(3), k, v, selection)
        return o.squeeze(3).flatten(0, 1).unsqueeze(0)
    chosen = [moba_selection(rows[:, a:b], k[:, a:b].transpose(1, 2), block_size=chunk_size, n=topk).ranges for a, b in of_sequences]
    ranges = torch.nn.functional.pad(torch.cat(chosen, 1), (*[0] * 7, T - numbers[-1]))
    selection = Selection.from_ranges(ranges, chunk_size, disjoint=True)
    o = packed_attention(
        q[0].unsqueeze(2), k[0], v[0], selection, cu, None, scale=None, return_lse=False, backend=None, block_aligned=False, align=None
    )
    return o.squeeze(2).unsqueeze(0)


def _dense_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """`flash_attn_func` as fla's MoBA layer calls it: q [B,S,HQ,D], the last S rows of k and v [B,S_kv,H,D]."""
    assert causal
    rows = by_group(q, k, 4, "[B,S,HQ,D]", "[B,S_kv,H,D]")
    return sliding_window_attention(rows, k.transpose(1, 2), v.transpose(1, 2), max(1, k.shape[1])).flatten(2, 3)


def _dense_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, causal: bool
) -> Tensor:  # fmt: skip
    """`flash_attn_varlen_func` as fla's MoBA layer calls it: one query q [N,HQ,D] of every sequence, over its keys."""
    assert causal
    assert max_seqlen_q == 1
    rows = by_group(q, k, 3, "[N,HQ,D]", "[Tk,H,D]")
    every = torch.tensor([0, max_seqlen_k], device=q.device).expand(1, *rows.shape[:2], 1, 2)
    selection = Selection.from_ranges(every, max_length=max_seqlen_k, disjoint=True)
    o: Tensor = packed_attention(
        rows, k, v, selection, cu_seqlens_q, cu_seqlens_k, scale=None, return_lse=False, backend=None, block_aligned=False, align=None
    )
    return o.flatten(1, 2)


class _Rows(NamedTuple):
    """Inputs of each query row, [B,TQ,...]."""

    q: Tensor  # [B,TQ,H,h,K]
    g_cmp: Tensor | None  # [B,TQ,H,h]; gates of absent branches are None
    g_slc: Tensor | None
    g_swa: Tensor | None
    block_indices: Tensor | None
    block_counts: Tensor | None

    def part(self, first: int, end: int) -> _Rows:
        return _Rows(*(None if x is None else x[:, first:end] for x in self))  # type: ignore[arg-type]


class _Options(NamedTuple):
    n: int
    block_size: int
    window: int
    scale: float | None
    block_aligned: bool


def _attend(rows: _Rows, k: Tensor, v: Tensor, options: _Options, cu_q: CuSeqlens | None, cu_k: CuSeqlens | None) -> Tensor:
    """o [B,TQ,H,h,V] of k and v [B,T,H,...]; packed with cu_q, and with other keys than queries with cu_k."""
    q, g_cmp, g_slc, g_swa, blocks, counts = rows
    size, n, scale, T = options.block_size, options.n, options.scale, k.shape[1]
    S_kv = T if cu_q is None else None
    selection = None if blocks is None else Selection.from_blocks(blocks, size, counts)
    k_cmp, v_cmp = (BlockMean(size, size)(x if cu_q is None else x[0], cu_q) for x in (k, v)) if g_cmp is not None else (k, v)
    k, v = (x.transpose(1, 2) if cu_q is None else x[0] for x in (k, v))
    if cu_q is not None:  # packed calls have no batch dimension
        q, g_cmp, g_slc, g_swa = (None if x is None else x[0] for x in (q, g_cmp, g_slc, g_swa))  # type: ignore[assignment]
    if g_cmp is not None and g_swa is not None and selection is None:
        gates = torch.stack((g_cmp, torch.ones_like(g_cmp) if g_slc is None else g_slc, g_swa), -1)
        o = nsa_attention(
            q, k_cmp, v_cmp, k, v, k, v, gates, window=options.window, compress_block=size, compress_stride=size, block_size=size, n=n,
            first=FIRST, local=LOCAL, scale=scale, cu_seqlens=cu_q,
        )  # fmt: skip
        return o if cu_q is None else o.unsqueeze(0)
    parts: list[tuple[Tensor, Tensor | None]] = []
    if g_cmp is not None:
        o, chosen = compressed_attention(
            q, k_cmp, v_cmp, compress_block=size, compress_stride=size, block_size=size, n=n, first=FIRST, local=LOCAL, scale=scale,
            S_kv=S_kv, cu_seqlens=cu_q,
        )  # fmt: skip
        selection = chosen if selection is None else selection
        parts.append((o, g_cmp))
    assert selection is not None, "parallel_nsa checks it"
    if cu_q is None:
        o = selection_attention(q, k, v, selection, scale=scale, q_pos=None, return_lse=False, backend=None)
    else:
        o = packed_attention(
            q, k, v, selection, cu_q, cu_k, scale=scale, return_lse=False, backend=None, block_aligned=options.block_aligned, align=None
        )
    parts.append((o, g_slc))
    if g_swa is not None:
        parts.append((sliding_window_attention(q, k, v, options.window, scale=scale, cu_seqlens=cu_q), g_swa))
    if cu_q is not None:
        bounds = Bounds.of("cu_seqlens", cu_q, len(q), q)
        parts = [(o, None if gate is None else bounds.zero_padding(gate)) for o, gate in parts]
    o = functools.reduce(torch.add, (o if gate is None else o * gate.unsqueeze(-1) for o, gate in parts))
    return o if cu_q is None else o.unsqueeze(0)


def _one_by_one(rows: _Rows, k: Tensor, v: Tensor, options: _Options, cu_q: CuSeqlens, cu_k: CuSeqlens) -> Tensor:
    """`_attend` of packed sequences with other keys than queries (decoding): each as a batch of its own."""
    q = rows.q
    cu_q, cu_k = (x.tolist() if isinstance(x, Tensor) else x for x in (cu_q, cu_k))
    bounds_q, bounds_k = Bounds.of("cu_seqlens_q", cu_q, q.shape[1], q), Bounds.of("cu_seqlens_k", cu_k, k.shape[1], q)
    bounds_q.check_sequences(bounds_k)
    pairs = zip(itertools.pairwise(bounds_q.numbers or ()), itertools.pairwise(bounds_k.numbers or ()), strict=True)
    found = [
        _attend(rows.part(*of_q), k[:, slice(*of_k)], v[:, slice(*of_k)], options, None, None) for of_q, of_k in pairs if of_q[1] > of_q[0]
    ]
    if not found:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    o = torch.cat(found, 1)
    return torch.nn.functional.pad(o, (*[0] * 7, q.shape[1] - o.shape[1]))  # rows after the last sequence
