"""Calls of the kind "choose", eager and traced: attention over compressed keys with the blocks that it chooses
(`compressed_attention`), and choices of blocks without attention (`choose_blocks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from nsa_sel.core import registry, run, transforms
from nsa_sel.core.arguments import Bounds, Requests, check_tensors, range_dtype
from nsa_sel.core.backend import ChooserModule
from nsa_sel.core.call import DTYPES, LEAST_ROWS, NSA_POOL, SCRATCH, ChooseCall, PagedKeys, Pool, Rule, Sequences, device_info, is_aligned
from nsa_sel.core.check import Index, check_choose, check_scale
from nsa_sel.core.decide import Decided, decide, recall, remember
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.quantize import Scales
from nsa_sel.telemetry import log

LSE = ("lse",)  # the pool of a request for the log-sum-exp alone


# From arguments to a decided call


def checked(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int | None, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None,
) -> Decided:  # fmt: skip
    """Check the arguments of `compressed_attention` and decide, unless the class of the call is cached."""
    key = _key(q, k, v, rule, S_kv, scale, q_pos, needs_grad, backend)
    classes = recall(key) or ()
    entry = transforms.find_class(classes, q, k, v)
    if entry is None:
        check_tensors(q=q, k_cmp=k, v_cmp=v)
        rows, S_kv, scale, q_pos = check_choose(q, k, v, rule, scale, q_pos, S_kv, fake=False)
        decided = decide_choice(rows, k, v, rule, S_kv, scale, q_pos, needs_grad, backend)
        if key is not None:
            remember(key, transforms.with_class(classes, (decided.decision, decided.request, scale), q, k, v))
        return decided
    decision, request, checked_scale = entry
    return decided_choice(q.unsqueeze(1) if q.dim() == 4 else q, k, v, rule, checked_scale, None, decision, request)


def _key(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int | None, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return the facts that `check_choose`, `request_of` and `decide` read and that guards do not compare, and shapes,
    which keep classes few; None for a call that is not cached."""
    whole = {type(number) for number in rule} == {int}  # True and 1.0 equal 1, and are refused
    if q_pos is not None or not whole or not (scale is None or type(scale) is float) or not (S_kv is None or type(S_kv) is int):
        return None
    try:
        low_bits = (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        return low_bits, q.shape, k.shape, v.shape, rule, S_kv, scale, needs_grad, backend
    except (AttributeError, RuntimeError):  # no tensor, or one without shape or memory
        return None


def request_of(q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int, needs_grad: bool) -> Request:
    """Return the request of a checked call."""
    B, S, G, h, Dk = q.shape
    return Request(
        B=B, S=S, S_kv=S_kv, G=G, h=h, Dk=Dk, Dv=v.shape[3], n=rule.n, block_size=rule.block_size, max_length=S_kv, dtype=DTYPES[q.dtype],
        needs_grad=needs_grad, aligned=is_aligned(q, k, v),
        kind="choose", compress=(rule.compress_block, rule.compress_stride),
    )  # fmt: skip


def decide_choice(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int, scale: float, q_pos: Tensor | None, needs_grad: bool, backend: str | None,
    bounds: Bounds | None = None,
) -> Decided:  # fmt: skip
    """Decide on checked arguments; `bounds` of the sequences of a packed batch."""
    request = request_of(q, k, v, rule, S_kv, needs_grad)
    return decided_choice(q, k, v, rule, scale, q_pos, decide(request, device_info(q.device), backend), request, bounds)


def decided_choice(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, scale: float, q_pos: Tensor | None, decision: Decision, request: Request,
    bounds: Bounds | None = None, pool: Pool = NSA_POOL,
) -> Decided:  # fmt: skip
    """Return the call of checked arguments with this decision and this exact request."""
    settings, S_kv = decision.settings, request.S_kv
    if settings.debug_log != log.followed:
        log.follow(settings)
    longest = S_kv if bounds is None else bounds.longest(S_kv)
    blocks = -(-longest // rule.block_size)
    least = min(LEAST_ROWS * 4 * blocks, settings.workspace_bytes // 4)  # choose_triton's partial sums take four times as much
    scratch = min(max(SCRATCH, least), settings.workspace_bytes)
    call = ChooseCall(q, k, v, rule, blocks, S_kv - q.shape[1], scale, settings, q_pos, scratch, pool)
    call.sequences = None if bounds is None else Sequences.of(bounds, rule, q)
    return Decided(call, decision, request)


# Runs other than `run.attend` of a decided call


def over_pages(
    q: Tensor, k: Tensor, v: Tensor, pages: PagedKeys, rule: Rule, S_kv: int, q_pos: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o [B,S,G,h,Dv], lse [B,S,G,h] and ranges [B,S,G,n,2] of checked rows at q_pos [B,S], without gradients.

    k and v are as of `ChooseCall.pages`, with room for S_kv keys of a sequence.
    """
    decided = decide_choice(q, k, v, rule, S_kv, check_scale(None, q.shape[4]), q_pos, False, None)
    decided.call.pages = pages
    o, lse, ranges, _ = run.run_forward(decided)
    return o, lse, ranges


def attention_of(name: str, _: Any) -> Callable[..., Any]:
    """Return the function of backend `name` that attends without choosing blocks, or `forward` if there is none."""
    module = registry.load_chooser(name)
    return getattr(module, "attention", module.forward)


class IndexCache(NamedTuple):
    """The cache of index keys that a checked call chooses from."""

    lengths: Tensor  # [B] int32 or int64, keys of each sequence; [R] with requests
    pages: PagedKeys | None
    scales: Scales | None
    requests: Requests | None = None


def best_blocks(
    index: Index, rule: Rule, pool: Pool | None, backend: str | None, tail: bool = False, indices: bool = False,
    cache: IndexCache | None = None, out: Tensor | None = None, bounds: Bounds | None = None,
) -> Tensor:  # fmt: skip
    """Choose blocks by the scores of index keys, or return the log-sum-exp of their logits alone.

    Args:
        index: checked arguments.
        rule: sizes and counts.
        pool: the definition of a block's score; with softmax and no index.lse, weights are those of the index keys
            themselves. None: the log-sum-exp alone.
        backend: the name of a backend to force.
        tail: also take the block that a row sees in part.
        indices: return block indices.
        cache: where index.k are the keys of a cache, or pages.
        out: [B,S,G,n] int32 or int64 (n + 1 with tail), to write the block indices to.
        bounds: of the sequences of a packed batch.

    Returns:
        Ranges [B,S,G,n,2], ascending, [0, 0) last; or block indices [B,S,G,n] int32, -1 last; with tail, n + 1. For a
        pool of None lse [B,S,G,h], natural logarithm, float32 (float64 for float64 inputs), -inf for rows that see no
        index key.
    """
    if transforms.traces(index.q, index.k):
        packed = (None, None) if bounds is None else (bounds.as_tensor(), bounds.most)
        return torch.ops.nsa_sel.choose_blocks(*index, list(rule), None if pool is None else list(pool), backend, tail, indices, *packed)  # type: ignore[no-any-return]
    return untraced_best_blocks(index, rule, pool, backend, tail, indices, cache, out, bounds)


def untraced_best_blocks(
    index: Index, rule: Rule, pool: Pool | None, backend: str | None, tail: bool, indices: bool, cache: IndexCache | None = None,
    out: Tensor | None = None, bounds: Bounds | None = None,
) -> Tensor:  # fmt: skip
    q, k, lse, S_kv, scale, q_pos = index
    made = _result(q, rule, tail, indices, pool is None) if out is None else out
    if q.numel() == 0:
        return made

    def function_of(name: str, _: Any) -> Callable[[ChooseCall], tuple[Tensor]]:
        module = registry.load_chooser(name)

        def choose(call: ChooseCall, out: Tensor) -> tuple[Tensor]:
            own = _log_sum_exp(module, call) if pool is None or (pool.softmax and lse is None) else lse
            if pool is None:
                return (own,)  # type: ignore[return-value]
            module.best_blocks(call, own, out)
            return (out,)

        def function(call: ChooseCall) -> tuple[Tensor]:
            if call.requests is None or (hasattr(module, "takes_requests") and module.takes_requests(call)):
                return choose(call, made)
            made.fill_(-1)
            for rows, request in call.each_request():
                choose(request, made[:, rows])
            return (made,)

        return function

    request = msgspec.structs.replace(
        request_of(q, k, k, rule, S_kv, False), Dv=0, pool=LSE if pool is None else pool.words(),
        page_size=None if cache is None or cache.pages is None else k.shape[2],
        quantized=None if cache is None or cache.scales is None else cache.scales.quantized,
    )  # fmt: skip
    decision = decide(request, device_info(q.device), backend)
    decided = decided_choice(q, k, k, rule, scale, q_pos, decision, request, bounds, NSA_POOL if pool is None else pool)
    decided.call.tail = tail
    if cache is not None:
        decided.call.lengths, decided.call.pages, decided.call.scales, decided.call.requests = cache
        decided.call.start = -q.shape[1] if cache.requests is None else 0
    return run.run_forward(decided, function_of)[0]  # type: ignore[no-any-return]


def _result(q: Tensor, rule: Rule, tail: bool, indices: bool, lse: bool) -> Tensor:
    """Return the uninitialized result of `best_blocks`."""
    if lse:
        return q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    blocks = rule.n + int(tail)  # not + tail: torch 2.8 adds no bool to a symbolic size
    if indices:
        return q.new_empty(*q.shape[:3], blocks, dtype=torch.int32)
    return q.new_empty(*q.shape[:3], blocks, 2, dtype=range_dtype(rule.block_size))


def _log_sum_exp(module: ChooserModule, call: ChooseCall) -> Tensor:
    """Return lse. Keys that all groups share are treated as one group of all heads."""
    call = call.gathered()
    q, k = call.q, call.k
    if k.stride(1) or q.shape[2] == 1:
        return module.log_sum_exp(call)
    lse = module.log_sum_exp(call.of(q.flatten(2, 3).unsqueeze(2), k[:, :1], k[:, :1]))
    return lse.view(q.shape[:-1])


# The ops `nsa_sel::choose_forward`, `choose_backward` and `choose_blocks`, through which traced calls go. The last one has
# no gradient: its callers detach.


def attend(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int, scale: float, q_pos: Tensor | None, needs_grad: bool, backend: str | None,
    bounds: Bounds | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return o, lse and ranges of checked arguments, through the op where operations are traced."""
    if not transforms.traces(q, k, v):
        o, lse, ranges = run.attend(decide_choice(q, k, v, rule, S_kv, scale, q_pos, needs_grad, backend, bounds))
        return o, lse, ranges
    cu_seqlens, most = (None, None) if bounds is None else (bounds.as_tensor(), bounds.most)
    o, lse, ranges = torch.ops.nsa_sel.choose_forward(q, k, v, q_pos, cu_seqlens, list(rule), S_kv, scale, backend, most, needs_grad)
    return o, lse, ranges


def _op_forward(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor | None, cu_seqlens: Tensor | None, rule: list[int], S_kv: int, scale: float,
    backend: str | None, max_seqlen: int | None, needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    bounds = None if cu_seqlens is None else Bounds.of("cu_seqlens", cu_seqlens, q.shape[1], q, max_seqlen)
    o, lse, ranges, _ = run.run_forward(decide_choice(q, k, v, Rule(*rule), S_kv, scale, q_pos, needs_grad, backend, bounds))
    return o, lse, ranges


def _op_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, q_pos: Tensor | None,
    cu_seqlens: Tensor | None, rule: list[int], S_kv: int, scale: float, backend: str | None, _: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Which sequence is the longest changes no gradient."""
    bounds = None if cu_seqlens is None else Bounds.of("cu_seqlens", cu_seqlens, q.shape[1], q)
    decided = decide_choice(q, k, v, Rule(*rule), S_kv, scale, q_pos, True, backend, bounds)
    return run.gradients(decided.call, decided.decision, o, lse, do, dlse)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor | None, cu_seqlens: Tensor | None, rule: list[int], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    rows, sizes = q.shape[:-1], Rule(*rule)
    lse = q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*rows, v.shape[-1]), lse, q.new_empty(*rows[:3], sizes.n, 2, dtype=range_dtype(sizes.block_size))


run.define(
    "choose", "Tensor? q_pos, Tensor? cu_seqlens, int[] rule, SymInt S_kv, float scale, str? backend, SymInt? max_seqlen", 2, _op_forward,
    _op_backward, _fake_forward, function=ChooseCall.function, chooses=True,
)  # fmt: skip


@torch.library.custom_op("nsa_sel::choose_blocks", mutates_args=())
def _blocks(
    q: Tensor, k: Tensor, lse: Tensor | None, S_kv: int, scale: float, q_pos: Tensor | None, rule: list[int], pool: list[bool] | None,
    backend: str | None, tail: bool, indices: bool, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    index = Index(q, k, lse, S_kv, scale, q_pos)
    bounds = None if cu_seqlens is None else Bounds.of("cu_seqlens", cu_seqlens, q.shape[1], q, max_seqlen)
    return untraced_best_blocks(index, Rule(*rule), None if pool is None else Pool(*pool), backend, tail, indices, bounds=bounds)


@_blocks.register_fake
def _(
    q: Tensor, k: Tensor, lse: Tensor | None, S_kv: int, scale: float, q_pos: Tensor | None, rule: list[int], pool: list[bool] | None,
    backend: str | None, tail: bool, indices: bool, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    return _result(q, Rule(*rule), tail, indices, pool is None)
