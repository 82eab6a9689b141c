"""A choice of blocks without attention: queries and index keys in, blocks out. A request of the kind "choose" with a pool, no gradient."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from nsa_sel.core import fallback, registry
from nsa_sel.core.arguments import range_dtype
from nsa_sel.core.backend import ChooserModule
from nsa_sel.core.call import device_info
from nsa_sel.core.check import Index
from nsa_sel.core.choose import request_of
from nsa_sel.core.choose_call import NSA_POOL, SCRATCH, ChooseCall, Pool, Rule
from nsa_sel.core.decide import decide
from nsa_sel.telemetry import events, target

LSE = ("lse",)  # the pool of a request for the log-sum-exp alone


def best_blocks(index: Index, rule: Rule, pool: Pool, backend: str | None) -> Tensor:
    """ranges [B,S,G,n,2], ascending, [0, 0) last. A pool with softmax and no lse takes that of the index keys themselves."""
    if index.q.numel() == 0:
        return index.q.new_empty(*index.q.shape[:3], rule.n, 2, dtype=range_dtype(rule.block_size))

    def work(module: ChooserModule, call: ChooseCall) -> Tensor:
        lse = _log_sum_exp(module, call) if pool.softmax and index.lse is None else index.lse
        return module.best_blocks(call, lse)

    return _run(index, rule, pool, pool.words(), backend, work)


def log_sum_exp(index: Index, rule: Rule, backend: str | None) -> Tensor:
    """lse [B,S,G,h], natural logarithm, float32 (float64 for float64 inputs), -inf for rows that see no index key."""
    if index.q.numel() == 0:
        return index.q.new_empty(index.q.shape[:-1], dtype=torch.promote_types(index.q.dtype, torch.float32))
    return _run(index, rule, NSA_POOL, LSE, backend, _log_sum_exp)


def _run(
    index: Index, rule: Rule, pool: Pool, words: tuple[str, ...], backend: str | None, work: Callable[[ChooserModule, ChooseCall], Tensor]
) -> Tensor:
    """Decide, run by the decided backend or the fallback, record."""
    q, k, _, S_kv, scale, q_pos = index
    request = msgspec.structs.replace(request_of(q, k, k, rule, S_kv, False), Dv=0, pool=words)
    decision = decide(request, device_info(q.device), backend)
    target.follow(decision.settings)
    scratch = min(SCRATCH, decision.settings.workspace_bytes)
    blocks, start = -(-S_kv // rule.block_size), S_kv - q.shape[1]
    call = ChooseCall(q, k, k, rule, blocks, start, scale, q_pos, scratch, pool, settings=decision.settings)
    found, decision = fallback.run(call, decision, "forward", lambda name: work(registry.load_chooser(name), call))
    events.record(decision, request)
    return found


def _log_sum_exp(module: ChooserModule, call: ChooseCall) -> Tensor:
    """Keys that all groups share are one group of all heads."""
    q, k = call.q, call.k
    if k.stride(1) or q.shape[2] == 1:
        return module.log_sum_exp(call)
    lse = module.log_sum_exp(call.of(q.flatten(2, 3).unsqueeze(2), k[:, :1], k[:, :1]))
    return lse.view(q.shape[:-1])
