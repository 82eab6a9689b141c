"""The functions of OpenBMB's package infllm_v2 (github.com/OpenBMB/infllmv2_cuda_impl, main branch) that the remote code
of MiniCPM4 and MiniCPM-SALA imports, on nsa-sel and PyTorch: nothing to compile, on GPUs and CPUs.

`patch_infllm_v2` makes `import infllm_v2` find this module. Names, argument order, defaults and results are the
package's; choosing is stage 1, pooling, and PyTorch's top-k in the model's code, attention runs on nsa-sel's backends.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_sel import forks
from nsa_sel.compat.packed import by_group
from nsa_sel.core.arguments import Bounds, CuSeqlens, check_flag, is_whole
from nsa_sel.core.attend import selection_attention
from nsa_sel.core.check import check_scale
from nsa_sel.core.packed import packed_attention
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.selection import Selection

NAME = "infllm_v2"
BLOCK = 64  # keys of a block of topk_idx
FINE, COARSE = 16, 64  # tokens from one mean of keys to the next, as stage 1 masks them
_MOST_LOGITS = 1 << 25  # that stage 1 holds at a time

# The only value of each argument that is not supported, and what to do instead.
_FIXED: dict[str, tuple[object, str]] = {
    "dropout_p": (0.0, "pass 0.0: attention to selected blocks has no dropout"),
    "window_size": ((-1, -1), "leave it out, and list the window's blocks in topk_idx, as max_pooling_1d_varlen does with local_blocks"),
    "softcap": (0.0, "leave it out: logits are not capped"),
    "alibi_slopes": (None, "leave it out: logits have no bias"),
    "block_table": (None, "call nsa_sel.selection_attention_with_kvcache, which takes pages"),
    "return_attn_probs": (False, "call nsa_sel.selection_attention_varlen with return_lse=True for the log-sum-exp"),
    "rotary_cos": (None, "rotate q and k before the call"),
    "rotary_sin": (None, "rotate q and k before the call"),
    "cache_batch_idx": (None, "pass the caches of these sequences, in the order of q"),
    "cache_leftpad": (None, "pass caches whose sequences begin at slot 0"),
}

_lock = forks.lock()
_patches: set[object] = set()  # one token per patch that is not undone


def patch_infllm_v2() -> Callable[[], None]:
    """Make `import infllm_v2` and `from infllm_v2 import ...` find this module, in this process.

    Call it before the remote code of the model is imported (`from_pretrained`), which otherwise continues without the
    package. That code also needs flash-attn, for its dense layers and for padding.

    Returns:
        A function that undoes this patch. Once every patch is undone, in any order, imports no longer find this module;
        code that has imported its functions keeps them.

    Raises:
        ImportError: another infllm_v2 is installed.
    """
    module, patch = sys.modules[__name__], object()
    with _lock:
        other = sys.modules.get(NAME) or importlib.util.find_spec(NAME)
        if other is not None and other is not module:
            raise ImportError(
                f"patch_infllm_v2: infllm_v2 is {shown(other)}; allowed: no installed package of this name, which models would use."
                " Remedy: pip uninstall infllm_v2, or leave patch_infllm_v2() out."
            )
        sys.modules[NAME] = module
        _patches.add(patch)

    def undo() -> None:
        with _lock:
            if patch in _patches:
                _patches.remove(patch)
                if not _patches and sys.modules.get(NAME) is module:
                    del sys.modules[NAME]

    return undo


def infllmv2_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: None = None, topk_idx: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend to the listed blocks of 64 keys of packed sequences, up to each row's own position; differentiable in q, k
    and v.

    The rows of a sequence are the last of its keys' positions. A row without a visible key gives 0, and a block that is
    listed twice counts once.

    Args:
        q: [total_q,nheads,D]; dtypes as of `selection_attention`.
        k: [total_k,nheads_k,D].
        v: [total_k,nheads_k,Dv].
        cu_seqlens_q: [N+1] bounds of the rows of each sequence.
        cu_seqlens_k: [N+1] bounds of its keys.
        max_seqlen_q: rows of the longest sequence.
        max_seqlen_k: keys of the longest sequence.
        softmax_scale: factor of the logits, by default 1/sqrt(D).
        causal: True; False only with max_seqlen_q = 1, where both are the same.
        deterministic: not read: gradients are bit-equal from run to run.
        topk_idx: [nheads_k,total_q,n] int32, blocks of the row's own sequence in any order, -1 for padding. None: all.
        dropout_p, window_size, softcap, alibi_slopes, return_attn_probs, block_table: only the defaults.

    Returns:
        o [total_q,nheads,Dv]. The original needs 16 heads of q per head of k with topk_idx, here any number works.

    Raises:
        ArgumentError, BackendError: as `selection_attention_varlen`.
    """
    _check_fixed(
        dropout_p=dropout_p, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs,
        block_table=block_table,
    )  # fmt: skip
    _check_causal(causal, max_seqlen_q)
    rows = by_group(q, k, 3, "[total_q,nheads,D]", "[total_k,nheads_k,D]")
    H, T = k.shape[1], q.shape[0]
    selection = _selected(topk_idx, (H, T), "[nheads_k, total_q, n]", max_seqlen_k, q.device)
    o: Tensor = packed_attention(
        rows, k, v, selection, cu_seqlens_q, cu_seqlens_k, scale=softmax_scale, return_lse=False, backend=None, block_aligned=False,
        align=None,
    )  # fmt: skip
    return o.flatten(1, 2)


def infllmv2_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None, rotary_cos: None = None,
    rotary_sin: None = None, cache_seqlens: int | Tensor | None = None, cache_batch_idx: None = None, cache_leftpad: None = None,
    block_table: None = None, softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, topk_idx: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Write the new tokens' k and v into the caches, in place, and attend to the listed blocks of 64 keys.

    Row s of S_q is at position length - S_q + s of its sequence, and sees keys up to it. A row without a visible key
    gives 0 and a log-sum-exp of -inf.

    Args:
        q: [B,S_q,nheads,D]; dtypes as of `selection_attention`.
        k_cache: [B,S_max,nheads_k,D], with room for the new keys. Without room on a GPU, behavior is undefined.
        v_cache: [B,S_max,nheads_k,Dv].
        k: [B,S_new,nheads_k,D] new keys, written from slot cache_seqlens on; None: the cache already has all.
        v: [B,S_new,nheads_k,Dv].
        cache_seqlens: keys of each sequence before the new ones: [B] int32 or int64, or a number for all; None without
            k and v: S_max.
        softmax_scale: factor of the logits, by default 1/sqrt(D).
        causal: True; False only with S_q = 1, where both are the same.
        rotary_interleaved, num_splits: not read.
        return_softmax_lse: also return the log-sum-exp.
        topk_idx: [B,nheads_k,S_q,n] int32 blocks in any order, -1 for padding. None: all. The original supports it only
            for S_q = 1 and 16 heads of q per head of k, and with B > 1 only for nheads_k = 2.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, window_size, softcap, alibi_slopes: only the
            defaults.

    Returns:
        o [B,S_q,nheads,Dv], or (o, lse) with lse [B,nheads,S_q], the natural logarithm.

    Raises:
        ArgumentError, BackendError: as `selection_attention`.
    """
    _check_fixed(
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    check_flag("return_softmax_lse", return_softmax_lse)
    rows = by_group(q, k_cache, 4, "[B,S_q,nheads,D]", "[B,S_max,nheads_k,D]")
    B, S, H = rows.shape[:3]
    if k_cache.shape[0] != B or not isinstance(v_cache, Tensor) or v_cache.shape[:3] != k_cache.shape[:3]:
        shapes = f"of shapes {tuple(k_cache.shape)} and {tuple(getattr(v_cache, 'shape', ()))}"
        raise ArgumentError("k_cache, v_cache", shapes, f"[B={B}, S_max, nheads_k, D]", "pass the caches of these sequences")
    _check_causal(causal, S)
    selection = _selected(topk_idx, (B, H, S), "[B, nheads_k, S_q, n]", k_cache.shape[1], q.device)
    lengths = _appended(k_cache, v_cache, k, v, cache_seqlens)
    position = lengths.unsqueeze(1) + torch.arange(-S, 0, device=q.device)
    k_all, v_all = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    o, lse = selection_attention(rows, k_all, v_all, selection, scale=softmax_scale, q_pos=position.clamp(min=0), return_lse=True)
    before = (position < 0)[:, :, None, None]  # rows before their first key
    o, lse = o.masked_fill(before.unsqueeze(-1), 0).flatten(2, 3), lse.masked_fill(before, -torch.inf)
    return (o, lse.flatten(2, 3).transpose(1, 2)) if return_softmax_lse else o


def infllmv2_attn_stage1(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens, cu_seqlens_v: CuSeqlens,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: None = None, deterministic: bool = False,
    return_attn_probs: bool = True, block_table: None = None,
) -> Tensor:  # fmt: skip
    """Score the means of keys: the sum over a KV head's query heads of exp(scale q.k - lse), where lse is the log-sum-exp
    over the coarse means v. No gradient.

    With `causal`, a row sees the means whose last key is at or before it, where k has the means of 32 keys every 16
    tokens, and v those of 128 every 64 (of a sequence with as many of v as of k: the same means). Row i of L sees the
    first (i + 1) // d - 1 + M - max(0, L - d + 1) // d of M means, d = 16 or 64: as in the original, one mean less in a
    sequence with (L + 1) % d = 0. A row that sees no coarse mean scores 0, where the original gives 0 or inf.

    Args:
        q: [total_q,nheads,D]; any float dtype.
        k: [total_k,nheads_k,D] means of keys.
        v: [total_v,nheads_k,D] coarse means of keys.
        cu_seqlens_q, cu_seqlens_k, cu_seqlens_v: [N+1] bounds of each sequence in q, k and v. The host reads them.
        max_seqlen_q: not read.
        max_seqlen_k: means of the longest sequence.
        softmax_scale: factor of the logits, by default 1/sqrt(D).
        causal: False: every row sees all means of its sequence.
        deterministic, return_attn_probs: not read, as in the original.
        dropout_p, window_size, softcap, alibi_slopes, block_table: only the defaults.

    Returns:
        [nheads_k,total_q,max_seqlen_k] in q's dtype, 0 for means that a row does not see; computed in float32 (float64
        for float64). The original needs 16 heads of q per head of k, here any number works.

    Raises:
        ArgumentError: bad input.
    """
    _check_fixed(dropout_p=dropout_p, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table)
    check_flag("causal", causal)
    rows = by_group(q, k, 3, "[total_q,nheads,D]", "[total_k,nheads_k,D]")
    T, H, h, D = rows.shape
    if k.shape[2] != D or not isinstance(v, Tensor) or v.shape[1:] != k.shape[1:]:
        shapes = f"of shapes {tuple(k.shape)} and {tuple(getattr(v, 'shape', ()))}"
        raise ArgumentError("k, v", shapes, f"[total, nheads_k={H}, D={D}]", "pass means of keys as k, and coarse ones as v")
    scale = check_scale(softmax_scale, D)
    given = {"cu_seqlens_q": (cu_seqlens_q, q), "cu_seqlens_k": (cu_seqlens_k, k), "cu_seqlens_v": (cu_seqlens_v, v)}
    bounds = [_numbers(name, cu, len(x), q) for name, (cu, x) in given.items()]
    if len({len(numbers) for numbers in bounds}) > 1:
        value = f"of {', '.join(str(len(numbers) - 1) for numbers in bounds)} sequences"
        raise ArgumentError("cu_seqlens_q, cu_seqlens_k, cu_seqlens_v", value, "as many each", "pass bounds of the same sequences")
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = q.new_zeros(H, T, max_seqlen_k)
    for (first, end), (k_first, k_end), (v_first, v_end) in zip(*map(itertools.pairwise, bounds), strict=True):
        L, K, V = end - first, k_end - k_first, v_end - v_first
        if K > max_seqlen_k:
            raise ArgumentError("max_seqlen_k", max_seqlen_k, f"at least {K}, the means of a sequence", "pass the most of a sequence")
        if not K or not V:
            continue
        fine, coarse = k[k_first:k_end].to(dtype), v[v_first:v_end].to(dtype)
        step = max(1, _MOST_LOGITS // (H * h * max(K, V)))
        for begin in range(first, end, step):
            part = rows[begin : min(begin + step, end)].to(dtype)
            at = torch.arange(begin - first, begin - first + len(part), device=q.device) if causal else None
            with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
                scores[:, begin : begin + len(part), :K] = _weights(part, fine, coarse, scale, at, L)
    return scores


def max_pooling_1d(
    input: Tensor, cache_len: int, local_blocks: int, init_blocks: int, block_size: int = 64, stride: int = 16
) -> Tensor:  # fmt: skip
    """Return the score of each block: the largest of the means that touch it; inf for the first init_blocks, the row's
    own block and the local_blocks before it; -inf where no mean touches it.

    Args:
        input: [nheads_k,S,C] scores of C means of keys, one every `stride` tokens; any float dtype.
        cache_len: position of the first row.
        local_blocks: blocks before the row's own that are forced.
        init_blocks: first blocks that are forced.
        block_size: keys of a block, a multiple of stride.
        stride: tokens from one mean to the next.

    Returns:
        [nheads_k,S,ceil((S + cache_len) / block_size)] in input's dtype. Blocks after the row's own have scores, too.

    Raises:
        ArgumentError: bad input.
    """
    _check_scores(input, block_size, stride)
    if not is_whole(cache_len) or cache_len < 0:
        raise ArgumentError("cache_len", shown(cache_len), "a whole number >= 0", "pass lengths of a batch to max_pooling_1d_varlen")
    position = torch.arange(cache_len, cache_len + input.shape[1], device=input.device)
    keys = torch.full_like(position, input.shape[2])
    return _pooled(input, position, keys, cache_len + input.shape[1], local_blocks, init_blocks, block_size, stride)


def max_pooling_1d_varlen(
    input: Tensor, cu_seqlens_q: CuSeqlens, cu_seqlens_k: CuSeqlens, cache_lens: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    local_blocks: int, init_blocks: int, block_size: int = 64, stride: int = 16,
) -> Tensor:  # fmt: skip
    """Return `max_pooling_1d` of packed sequences. The host reads the bounds and cache_lens.

    Args:
        input: [nheads_k,total_q,max_seqlen_k]; any float dtype.
        cu_seqlens_q: [N+1] bounds of the rows of each sequence, which end at total_q.
        cu_seqlens_k: [N+1] bounds of its means; the row's further columns are not read.
        cache_lens: [N], position of each sequence's first row.
        max_seqlen_q: rows of the longest sequence.
        max_seqlen_k: means of the longest sequence.
        local_blocks, init_blocks, block_size, stride: as of `max_pooling_1d`.

    Returns:
        [nheads_k,total_q,ceil((max_seqlen_q + max(cache_lens)) / block_size)] in input's dtype.

    Raises:
        ArgumentError: bad input.
    """
    _check_scores(input, block_size, stride)
    T, C = input.shape[1:]
    if max_seqlen_k != C:
        raise ArgumentError("max_seqlen_k", shown(max_seqlen_k), f"input's last dimension {C}", "pass the scores of stage 1 as they are")
    rows, keys = _numbers("cu_seqlens_q", cu_seqlens_q, T, input), _numbers("cu_seqlens_k", cu_seqlens_k, None, input)
    cached = cache_lens.tolist() if isinstance(cache_lens, Tensor) else None
    if rows[-1] != T or not isinstance(cached, list) or not len(cached) == len(rows) - 1 == len(keys) - 1:
        value = f"{len(rows) - 1} of {rows[-1]} rows, {len(keys) - 1} of means, cache_lens {shown(cached)}"
        raise ArgumentError("sequences", value, f"as many each, of {T} rows in all", "pass bounds and cache_lens of the same sequences")
    lengths = torch.tensor(rows).diff()
    of_row = [torch.tensor(x).repeat_interleave(lengths) for x in (rows[:-1], cached, [b - a for a, b in itertools.pairwise(keys)])]
    start, before, means = (x.to(input.device) for x in of_row)
    position = torch.arange(T, device=input.device) - start + before
    return _pooled(input, position, means, max_seqlen_q + max(cached), local_blocks, init_blocks, block_size, stride)


def topk_to_uint64(
    topk_idx: Tensor, max_seqlen_k: int, block_size: int, memory_buffer: Tensor | None = None
) -> tuple[Tensor, int]:  # fmt: skip
    """Pack lists of blocks [..,n] into bits: block j is bit j % 64 of word j // 64. Negative blocks are padding.

    Args:
        topk_idx: [..,n] int32, [nheads_k,total_q,n] or with a batch dimension before it.
        max_seqlen_k: keys of the longest sequence.
        block_size: keys of a block.
        memory_buffer: not read, as in the original.

    Returns:
        [..,words] int64, and the number of blocks, ceil(max_seqlen_k / block_size); words = ceil(blocks / 64).
    """
    blocks = -(-max_seqlen_k // block_size)
    bits = -(-blocks // 64) * 64
    inside = (topk_idx >= 0) & (topk_idx < bits)
    mask = torch.zeros(*topk_idx.shape[:-1], bits + 1, dtype=torch.bool, device=topk_idx.device)  # the last one is thrown away
    mask.scatter_(-1, topk_idx.long().where(inside, bits), True)
    return blockmask_to_uint64(mask[..., :bits])[0], blocks


def blockmask_to_uint64(blockmask: Tensor) -> tuple[Tensor, int]:
    """Pack a bool mask [..,n] into bits as `topk_to_uint64` does: return [..,ceil(n / 64)] int64, and n."""
    n = blockmask.shape[-1]
    bits = torch.unflatten(torch.nn.functional.pad(blockmask.to(torch.uint8), (0, -n % 64)), -1, (-1, 8))
    octets = (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int64), n


def uint64_to_bool(uint64_array: Tensor, last_dim_size: int) -> Tensor:
    """Return the bool mask [..,last_dim_size] that `blockmask_to_uint64` packed into [..,words] int64."""
    if last_dim_size > 64 * uint64_array.shape[-1]:
        most = 64 * uint64_array.shape[-1]
        raise ArgumentError("last_dim_size", last_dim_size, f"at most {most}, the bits of a row", "pass the size of the packed mask")
    octets = uint64_array.contiguous().view(torch.uint8).unsqueeze(-1)
    return ((octets >> torch.arange(8, dtype=torch.uint8, device=octets.device)) & 1).flatten(-2).bool()[..., :last_dim_size]


def _check_fixed(**given: object) -> None:
    """Raise ArgumentError for the first argument with another value than the only one that is supported."""
    for name, value in given.items():
        allowed, remedy = _FIXED[name]
        same = value is None if allowed is None else not isinstance(value, Tensor) and value == allowed
        if not same and not (name == "window_size" and value == [-1, -1]):
            raise ArgumentError(name, shown(value), shown(allowed), remedy)


def _check_causal(causal: bool, rows: int) -> None:
    check_flag("causal", causal)
    if not causal and rows > 1:
        allowed = f"True where a sequence has {rows} rows"
        raise ArgumentError("causal", False, allowed, "pass causal=True: rows then see no key after their own position")


def _selected(topk_idx: Tensor | None, shape: tuple[int, ...], layout: str, keys: int, device: torch.device) -> Selection:
    """Return the selection of topk_idx, [H,T,n] as [1,T,H,n] or [B,H,S,n] as [B,S,H,n]; None: of all keys."""
    if topk_idx is None:
        end = torch.tensor([0, max(1, keys)], device=device)
        rows = (1, *shape[::-1]) if len(shape) == 2 else (shape[0], shape[2], shape[1])
        return Selection.from_ranges(end.expand(*rows, 1, 2), max_length=max(1, keys), disjoint=True)
    if not isinstance(topk_idx, Tensor) or topk_idx.shape[:-1] != shape or topk_idx.dtype not in (torch.int32, torch.int64):
        kind = f"{topk_idx.dtype} of shape {tuple(topk_idx.shape)}" if isinstance(topk_idx, Tensor) else f"a {type(topk_idx).__name__}"
        raise ArgumentError("topk_idx", kind, f"int32 {layout} = {(*shape, 'n')}", "pass blocks of 64 keys, one list per row and head of k")
    blocks = topk_idx.transpose(-3, -2)
    return Selection.from_blocks(blocks.unsqueeze(0) if blocks.dim() == 3 else blocks, BLOCK)


def _appended(k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, cache_seqlens: int | Tensor | None) -> Tensor:
    """Write the new keys and values into the caches and return how many keys each sequence then has, [B] int64."""
    if (k is None) != (v is None) or (k is not None and cache_seqlens is None):
        given = ", ".join(name for name, x in (("k", k), ("v", v), ("cache_seqlens", cache_seqlens)) if x is not None)
        allowed = "k and v, and with them cache_seqlens"
        raise ArgumentError("k, v, cache_seqlens", f"given: {given}", allowed, "pass all of them, or neither k nor v")
    B, room, new = *k_cache.shape[:2], 0 if k is None else k.shape[1]
    lengths = cache_seqlens if isinstance(cache_seqlens, Tensor) else torch.full((B,), room if cache_seqlens is None else cache_seqlens)
    if lengths.shape != (B,) or lengths.dtype not in (torch.int32, torch.int64):
        value = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
        raise ArgumentError("cache_seqlens", value, f"torch.int32 or torch.int64 [B={B}], or a number", "pass one length per sequence")
    if lengths.is_cpu and B and not 0 <= int(lengths.min()) <= int(lengths.max()) + new <= room:
        value = f"from {int(lengths.min())} to {int(lengths.max())}, before {new} new keys"
        raise ArgumentError("cache_seqlens", value, f"at most {room} keys with the new ones, the room of the cache", "pass a larger cache")
    lengths = lengths.to(k_cache.device, torch.int64)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is not None and (x.shape != (B, new, *cache.shape[2:]) or x.dtype != cache.dtype):
            value, allowed = f"{x.dtype} of shape {tuple(x.shape)}", f"{cache.dtype} {(B, new, *cache.shape[2:])}"
            raise ArgumentError(name, value, allowed, f"pass the new tokens' {name} as {name}_cache holds them")
    slots = lengths.unsqueeze(1) + torch.arange(new, device=lengths.device)
    for x, cache in ((k, k_cache), (v, v_cache)):
        if x is not None:
            cache[torch.arange(B, device=cache.device).unsqueeze(1), slots] = x
    return lengths + new


def _numbers(name: str, cu_seqlens: CuSeqlens, total: int | None, like: Tensor) -> tuple[int, ...]:
    """Return checked bounds as ints, read from the device."""
    listed = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    numbers = Bounds.of(name, listed, total, like).numbers
    assert numbers is not None
    return numbers


def _weights(q: Tensor, fine: Tensor, coarse: Tensor, scale: float, position: Tensor | None, L: int) -> Tensor:
    """Return stage 1's scores [H,rows,K] of rows q [rows,H,h,D] at `position` of a sequence of L rows; None: they see
    all means, fine [K,H,D] and coarse [V,H,D]."""

    def logits(means: Tensor, stride: int) -> Tensor:
        found = torch.einsum("lghd,cgd->ghlc", q, means).mul_(scale)
        if position is not None:
            seen = (position + 1) // stride - 1 + len(means) - max(0, L - stride + 1) // stride
            found.masked_fill_(torch.arange(len(means), device=q.device) >= seen.unsqueeze(1), -torch.inf)
        return found

    lse = logits(coarse, COARSE if len(fine) != len(coarse) else FINE).logsumexp(-1, keepdim=True)
    lse.masked_fill_(lse == -torch.inf, torch.inf)  # rows that see no coarse mean have weights of 0
    return (logits(fine, FINE) - lse).exp_().sum(1)


def _check_scores(scores: Tensor, block_size: int, stride: int) -> None:
    if not isinstance(scores, Tensor) or scores.dim() != 3 or not scores.is_floating_point():
        kind = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise ArgumentError("input", kind, "a float tensor [nheads_k, rows, means]", "pass the scores of infllmv2_attn_stage1")
    if not is_whole(block_size) or not is_whole(stride) or stride < 1 or block_size < stride or block_size % stride:
        allowed = "whole numbers, block_size a multiple of stride"
        raise ArgumentError("block_size, stride", f"{shown(block_size)}, {shown(stride)}", allowed, "pass 64 and 16, as MiniCPM4 does")


def _pooled(
    scores: Tensor, position: Tensor, means: Tensor, length: int, local_blocks: int, init_blocks: int, block_size: int, stride: int
) -> Tensor:  # fmt: skip
    """Return [H,rows,ceil(length / block_size)] of scores [H,rows,C] of rows at `position` [rows], with `means` [rows]
    means each. Block b takes the means b * s - 1 to b * s + s - 1, s = block_size / stride."""
    C, blocks, s = scores.shape[2], -(-length // block_size), block_size // stride
    absent = torch.arange(C, device=scores.device) >= means.unsqueeze(1)
    padded = torch.nn.functional.pad(scores.masked_fill(absent, -torch.inf), (1, max(0, max(1, blocks) * s - C)), value=-torch.inf)
    pooled = padded.unfold(-1, s + 1, s)[..., :blocks, :].amax(-1)
    block, own = torch.arange(blocks, device=scores.device), (position // block_size).unsqueeze(1)
    return pooled.masked_fill((block < init_blocks) | ((block <= own) & (own <= block + local_blocks)), torch.inf)
