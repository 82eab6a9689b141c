"""The torch.library ops `nsa_sel::choose` and `nsa_sel::choose_backward`, for torch.compile, torch.export and dispatch modes.

As with the ops of core/ops.py, eager calls do not go through them, and an op decides when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import choose
from nsa_sel.core.arguments import Bounds, range_dtype
from nsa_sel.core.choose_call import Rule


@torch.library.custom_op("nsa_sel::choose", mutates_args=())
def _choose(
    q: Tensor, k: Tensor, v: Tensor, rule: list[int], S_kv: int, scale: float, q_pos: Tensor | None, backend: str | None, needs_grad: bool,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    bounds = _bounds(cu_seqlens, q, max_seqlen)
    o, lse, ranges, _ = choose.run_forward(choose.begin(q, k, v, Rule(*rule), S_kv, scale, q_pos, needs_grad, backend, bounds))
    return o, lse, ranges


@torch.library.custom_op("nsa_sel::choose_backward", mutates_args=())
def _choose_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, rule: list[int], S_kv: int,
    scale: float, q_pos: Tensor | None, backend: str | None, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    decided = choose.begin(q, k, v, Rule(*rule), S_kv, scale, q_pos, True, backend, _bounds(cu_seqlens, q))
    return choose.gradients(decided.call, decided.decision, o, lse, do, dlse)


def _bounds(cu_seqlens: Tensor | None, q: Tensor, max_seqlen: int | None = None) -> Bounds | None:
    return None if cu_seqlens is None else Bounds.of("cu_seqlens", cu_seqlens, q.shape[1], q, max_seqlen)


@_choose.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, rule: list[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = q.shape[:-1]
    lse = q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32))
    sizes = Rule(*rule)
    return q.new_empty(*rows, v.shape[-1]), lse, q.new_empty(*rows[:3], sizes.n, 2, dtype=range_dtype(sizes.block_size))


@_choose_backward.register_fake
def _(do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, rule, S_kv, scale, q_pos, backend, _, cu_seqlens, _ = inputs  # which sequence is the longest changes no gradient
    o, lse, ranges = output
    ctx.save_for_backward(q, k, v, o, lse, q_pos, cu_seqlens)
    ctx.facts = rule, S_kv, scale, backend
    ctx.mark_non_differentiable(ranges)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _ranges: None) -> tuple[Tensor | None, ...]:
    if do is None and dlse is None:
        return (None,) * 11
    q, k, v, o, lse, q_pos, cu_seqlens = ctx.saved_tensors
    rule, S_kv, scale, backend = ctx.facts
    gradients = torch.ops.nsa_sel.choose_backward(do, dlse, q, k, v, o, lse, rule, S_kv, scale, q_pos, backend, cu_seqlens)
    return *gradients, *(None,) * 8


_choose.register_autograd(_backward, setup_context=_save)


def traced(
    q: Tensor, k: Tensor, v: Tensor, rule: Rule, S_kv: int, scale: float, q_pos: Tensor | None, backend: str | None, needs_grad: bool,
    bounds: Bounds | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`choose.choose` through the op."""
    cu_seqlens, most = (None, None) if bounds is None else (bounds.as_tensor(), bounds.most)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.nsa_sel.choose(
        q, k, v, list(rule), S_kv, scale, q_pos, backend, needs_grad, cu_seqlens, most
    )
    return found
