"""The public call; `explain`, which shows its decision; and `with_sink`, which adds attention sinks to its output."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_sel.core import shared_keys
from nsa_sel.core.arguments import check_tensors
from nsa_sel.core.attend import selection_attention as selection_attention
from nsa_sel.core.call import device_info, request_of
from nsa_sel.core.check import as_selection, check_call
from nsa_sel.core.decide import select, with_count
from nsa_sel.core.decision import Decision
from nsa_sel.core.transforms import in_autocast_dtype, needs_grad
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection


def explain(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, q_pos: Tensor | None = None, backend: str | None = None
) -> Decision:
    """The decision of `selection_attention` for these arguments, without running attention; `nsa_sel.describe` prints
    it.

    It counts how much neighbors share where the call would.

    Args:
        q, k, v, selection, q_pos, backend: as of `selection_attention`.

    Returns:
        The decision; `forward` is None when every backend refuses.

    Raises:
        ArgumentError: bad input.
    """
    check_tensors(q=q, k=k, v=v)
    q, k, v = in_autocast_dtype(q, k, v)  # before the checks, which want one dtype
    if (r := shared_keys.ratio_of(q, k, selection)) > 1:
        rows = q if q.dim() == 5 else q.unsqueeze(1)
        q, selection, q_pos = shared_keys.call_of_rows(rows, as_selection(selection), q_pos, k.shape[2], r)
    q, k, v, selection, _, q_pos = check_call(q, k, v, selection, None, q_pos)
    device = device_info(q.device)
    request, _ = with_count(request_of(q, k, v, selection, needs_grad(q, k, v)), device, backend, q, selection, q_pos)
    return select(request, device, backend)


def with_sink(o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the output of attention with a sink, from the output and log-sum-exp of attention without one. A sink is a
    learned logit per head that takes part in the softmax and has no value (gpt-oss, and layers like it). Differentiable
    in all three.

    A sink adds exp(sink) to every row's denominator, and nothing to its sum of values:

        o_sink = sum_j exp(s_j) v_j / (exp(lse) + exp(sink)) = o * exp(lse) / (exp(lse) + exp(sink)) = o * sigmoid(lse -
        sink)

    So no kernel needs to know of it, and it is exact for every selection. A row that selects nothing (lse = -inf) stays
    0 and gives the sink no gradient.

    Args:
        o: [...,h,Dv], for example [B,S,G,h,Dv] of `selection_attention(..., return_lse=True)`; any floating dtype.
        lse: [...,h], natural logarithm, float32 (float64 for float64 inputs).
        sink: logits, of a shape that broadcasts to lse: [G,h] for a logit per head; any floating dtype; -inf is no
            sink. Not multiplied by `scale`.

    Returns:
        [...,h,Dv] in o's dtype; the factor is computed in lse's.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit together.

    Example:
        >>> o, lse = selection_attention(q, k, v, selection, return_lse=True)
        >>> o = with_sink(o, lse, sink)  # sink: nn.Parameter [G,h]
    """
    if lse is None:
        raise ArgumentError("lse", None, "the log-sum-exp of o's rows", "get both from one call: selection_attention(..., return_lse=True)")
    check_tensors(o=o, lse=lse, sink=sink)
    if lse.shape != o.shape[:-1]:
        raise ArgumentError("lse", f"of shape {tuple(lse.shape)}", f"o's {tuple(o.shape[:-1])}", "pass the lse that return_lse=True gives")
    for name, x in (("o", o), ("lse", lse), ("sink", sink)):
        if not x.is_floating_point() or x.device != o.device:
            raise ArgumentError(name, f"{x.dtype} on {x.device}", f"a floating dtype on {o.device}", f"call {name}.to(...)")
    if sink.dim() > lse.dim() or any(n not in (1, m) for n, m in zip(reversed(sink.shape), reversed(lse.shape), strict=False)):
        raise ArgumentError(
            "sink",
            f"of shape {tuple(sink.shape)}",
            f"a shape that broadcasts to lse's {tuple(lse.shape)}",
            "pass one logit per head: [G,h] for heads in G groups of h",
        )
    logits = sink.to(lse.dtype).clamp(min=torch.finfo(lse.dtype).min)  # -inf, for no sink, less an lse of -inf would be NaN
    return (o * torch.sigmoid(lse - logits).unsqueeze(-1)).to(o.dtype)
