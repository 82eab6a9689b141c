"""SGLang's plugin: MiniMax-M3's sparse attention and indexer on nsa-sel where SGLang would run its Triton kernels on
Hopper. Caches, metadata and CUDA graphs stay SGLang's; a call with anything that is not listed here runs SGLang's code."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_sel.engines.switch import engines_switch
from nsa_sel.quantize import STORED
from nsa_sel.serving import choose_blocks_with_kvcache, selection_attention_with_kvcache

MODULE = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
VERSIONS = ("0.5.23",)
NEITHER = ("sink", "idx_sink", "idx_v_cache", "loc_mapping", "cached_topk_idx", "topk_out", "hisparse_swap_in_fn", "indexer_cp", "q_scale")

log = logging.getLogger("nsa_sel.engines.sglang")


def register() -> None:
    """Hook SGLang's two functions of MiniMax-M3's sparse layers: the entry point in `sglang.srt.plugins`."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.version import __version__ as version

    if engines_switch() == "0":
        return
    if version not in VERSIONS:
        log.warning("nsa-sel leaves MiniMax-M3 to SGLang %s, which it has not been tested with; it takes %s", version, ", ".join(VERSIONS))
        return
    HookRegistry.register(f"{MODULE}.minimax_sparse_prefill", prefill, HookType.AROUND)
    HookRegistry.register(f"{MODULE}.minimax_sparse_decode", decode, HookType.AROUND)


def prefill(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run `minimax_sparse_prefill`: packed rows, of which each request may have a cached prefix."""
    call = arguments_of(original, *args, **options)
    if refusal(call["q"], call) is not None:
        return original(*args, **options)
    return None, attend(call, call["max_seqlen_k"], {"cu_seqlens_q": call["cu_seqlens"], "max_seqlen_q": call["max_seqlen_q"]})


def decode(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run `minimax_sparse_decode`: one row per sequence."""
    call = arguments_of(original, *args, **options)
    if refusal(call["q"], call) is not None:
        return original(*args, **options)
    return None, attend(call, call["max_seqlen"], {})


def arguments_of(original: Callable[..., Any], *args: Any, **options: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, with the defaults of those that it leaves out."""
    bound = signature_of(original).bind(*args, **options)
    bound.apply_defaults()
    return bound.arguments


signature_of = functools.cache(inspect.signature)


def refusal(q: Tensor, call: dict[str, Any]) -> str | None:
    """Return why SGLang's own code runs a call, logged once for each reason; None if nsa-sel runs it."""
    given = [name for name in NEITHER if call.get(name) is not None] + ["block_size_q"] * (call["block_size_q"] != 1)
    heads, groups, keys = call["idx_q"].shape[1], call["k_cache"].shape[1], call["k_cache"]
    reason = None
    if engines_switch() != "force" and not (q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)):
        reason = "the device is not of SM 9.0; NSA_SEL_ENGINES=force takes any"
    elif given or call.get("return_topk_idx") or not call["disable_index_value"] or call["score_type"] != "max":
        reason = f"the call has {', '.join(given) or 'index values, another score, or returns its blocks'}"
    elif heads != groups or keys.dim() != 3 or keys.dtype not in (q.dtype, STORED) or STORED in (q.dtype, call["idx_q"].dtype):
        reason = f"{heads} index heads for {groups} groups, keys {keys.dtype} of {keys.dim()} dimensions, queries {q.dtype} or e4m3"
    elif call["idx_k_cache"].dtype not in (q.dtype, STORED) or call["idx_k_cache"].dim() != 3:
        reason = f"index keys {call['idx_k_cache'].dtype} of {call['idx_k_cache'].dim()} dimensions"
    if reason is not None:
        log_once("nsa-sel leaves MiniMax-M3's sparse attention to SGLang: %s", reason)
    else:
        log_once("MiniMax-M3's sparse attention and indexer run on nsa-sel (%s); NSA_SEL_ENGINES=0 leaves them to SGLang", str(keys.dtype))
    return reason


log_once = functools.cache(log.info)


def attend(call: dict[str, Any], longest: int, packed: dict[str, Any]) -> Tensor:
    """Return o [tokens, G * h, D] of the index queries' best blocks.

    Args:
        call: arguments of SGLang's functions: q [tokens, G * h, D], idx_q [tokens,G,D], caches of slots [slots,G,D] and
            [slots,1,D], req_to_token [requests, keys] int32: the slot of each key. Slots of a page are consecutive.
        longest: most keys of a sequence.
        packed: arguments of packed rows.
    """
    q, G, page = call["q"], call["k_cache"].shape[1], call["page_size"]
    k, v, index_keys = (call[name].unflatten(0, (-1, page)) for name in ("k_cache", "v_cache", "idx_k_cache"))
    table = call["req_to_token"][call["slot_ids"], :longest:page] // page  # [requests, pages of one]
    selection = choose_blocks_with_kvcache(
        call["idx_q"].unsqueeze(2), index_keys, call["seq_lens"], table, block_size=call["block_size_k"], n=call["topk"],
        first=call["init_blocks"], local=call["local_blocks"], scale=1.0, **packed,
    )  # fmt: skip
    scales: dict[str, Any] = {}
    if k.dtype == STORED:
        scales = {name: torch.full((1,), call[name] or 1.0, device=q.device) for name in ("k_scale", "v_scale")}
    o = torch.empty_like(q)
    rows, out = (x.view(len(x), G, -1, x.shape[2]) for x in (q, o))  # [tokens,G,h,D]
    selection_attention_with_kvcache(rows, k, v, selection, call["seq_lens"], table, scale=call["sm_scale"], out=out, **packed, **scales)
    return o
