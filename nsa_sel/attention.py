"""The public call, and `explain`, which shows its decision."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from nsa_sel.core import entry, shared_keys
from nsa_sel.core.arguments import check_tensors
from nsa_sel.core.call import device_info, request_of
from nsa_sel.core.check import as_selection, check_call
from nsa_sel.core.decide import select, with_count
from nsa_sel.core.decision import Decision
from nsa_sel.core.transforms import in_autocast_dtype, needs_grad
from nsa_sel.selection import Selection


@overload
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, scale: float | None = None, q_pos: Tensor | None = None,
    return_lse: Literal[False] = False, backend: str | None = None, workspace: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, scale: float | None = None, q_pos: Tensor | None = None,
    return_lse: Literal[True], backend: str | None = None, workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def selection_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | Tensor,
    *,
    scale: float | None = None,
    q_pos: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    workspace: Tensor | None = None,
) -> Any:
    """Attention of every query row to its selected keys (NSA, arXiv 2502.11089, Fig. 3 and Eq. 10-12), differentiable in q, k, v.

    A row at position t attends to the union of [max(start, 0), min(end, t + 1, S_kv)) over its ranges; no key beyond t is read. A row with
    nothing selected gives o = 0, lse = -inf and gradients 0. Under torch.autocast q, k and v are cast, and o has the dtype of autocast
    (float64 is left alone). DTensors on one mesh are supported, and give o sharded as q (docs/distributed.md).

    q and the selection may have r times the groups of k and v, so that each head, or a few, select for themselves: groups g*r to
    g*r + r - 1 of q then read KV group g. K and V are neither copied nor expanded for it (not for DTensors).

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for one query per sequence (decode): G KV groups of h heads. float16, bfloat16, float32 or float64;
            any strides with a contiguous last dimension; k and v likewise, of the same dtype and device.
        k: [B,G,S_kv,Dk].
        v: [B,G,S_kv,Dv].
        selection: a `Selection`, or its ranges [B,S,G,n,2] ([B,G,n,2] for decode), half-open, shared by the h heads of a group.
        scale: factor of the logits, by default 1/sqrt(Dk).
        q_pos: key positions of the rows, [S] or [B,S], by default S_kv - S + s.
        return_lse: also return the log-sum-exp.
        backend: the name of a backend to force; else `use_backend`, then NSA_SEL_BACKEND, then the policy decides.
        workspace: contiguous uint8 tensor on q's device that backends use for temporaries of this call and its backward pass; results are
            never in it. Calls one after another may share it, calls that run at once may not. `runtime.workspace_bytes` bounds most of what
            is needed. Not under torch.compile, nor with DTensors.

    Returns:
        o [B,S,G,h,Dv] ([B,G,h,Dv] for decode) in q's dtype. With return_lse=True (o, lse): lse [B,S,G,h] is the natural logarithm of the
        sum of exp of the scaled logits, float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: bad input, before any kernel runs; a workspace that is too small, with the size that is needed.
        BackendError: the forced backend, or every backend, refuses the call, with every reason; a function transform surrounds it.
    """
    return entry.selection_attention(
        q, k, v, selection, scale=scale, q_pos=q_pos, return_lse=return_lse, backend=backend, workspace=workspace
    )


def explain(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, q_pos: Tensor | None = None, backend: str | None = None
) -> Decision:
    """The decision of `selection_attention` for these arguments, without running attention; `nsa_sel.describe` prints it.

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
