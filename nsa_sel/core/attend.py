"""`selection_attention`, eager and traced: check the arguments and decide, or reuse what an earlier call of the same
class led to; run.

This is the path of every call: keep it short.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nsa_sel.core import run, shared_keys, transforms
from nsa_sel.core.arguments import check_flag, check_tensors
from nsa_sel.core.call import Call, Workspace
from nsa_sel.core.check import as_selection, check_call
from nsa_sel.core.decide import Decided, decide_call, forced_name, forcing, recall, remember
from nsa_sel.core.transforms import REPEATED
from nsa_sel.core.warm import prepared
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.selection import Selection
from nsa_sel.telemetry import log


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
@overload
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, scale: float | None = None, q_pos: Tensor | None = None,
    return_lse: bool, backend: str | None = None, workspace: Tensor | None = None,
) -> Any: ...  # fmt: skip
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, scale: float | None = None,
    q_pos: Tensor | None = None, return_lse: bool = False, backend: str | None = None,
    workspace: Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of every query row to its selected keys (NSA, arXiv 2502.11089, Fig. 3 and Eq. 10-12), differentiable
    in q, k, v.

    A row at position t attends to the union of [max(start, 0), min(end, t + 1, S_kv)) over its ranges; no key beyond t
    is read. A row with nothing selected gives o = 0, lse = -inf and gradients 0. Under torch.autocast q, k and v are
    cast, and o has the dtype of autocast (float64 is left alone). DTensors on one mesh are supported, and give o
    sharded as q (docs/distributed.md).

    q and the selection may have r times the groups of k and v, so that each head, or a few, select for themselves:
    groups g*r to g*r + r - 1 of q then read KV group g. K and V are neither copied nor expanded for it (not for
    DTensors).

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for one query per sequence (decode): G KV groups of h heads. float16, bfloat16,
            float32 or float64; any strides with a contiguous last dimension; k and v likewise, of the same dtype and
            device.
        k: [B,G,S_kv,Dk].
        v: [B,G,S_kv,Dv].
        selection: a `Selection`, or its ranges [B,S,G,n,2] ([B,G,n,2] for decode), half-open, shared by the h heads of
            a group. With 1 in place of G all groups share them, without a copy for each.
        scale: factor of the logits, by default 1/sqrt(Dk).
        q_pos: key positions of the rows, [S] or [B,S], by default S_kv - S + s.
        return_lse: also return the log-sum-exp.
        backend: the name of a backend to force; else `use_backend`, then NSA_SEL_BACKEND, then the policy decides.
        workspace: contiguous uint8 tensor on q's device that backends use for temporaries of this call and its backward
            pass; results are never in it. Calls one after another may share it, calls that run at once may not.
            `runtime.workspace_bytes` bounds most of what is needed. Not under torch.compile, nor with DTensors.

    Returns:
        o [B,S,G,h,Dv] ([B,G,h,Dv] for decode) in q's dtype. With return_lse=True (o, lse): lse [B,S,G,h] is the natural
        logarithm of the sum of exp of the scaled logits, float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: bad input, before any kernel runs; a workspace that is too small, with the size that is needed.
        BackendError: the forced backend, or every backend, refuses the call, with every reason; a function transform
            surrounds it.
    """
    if type(return_lse) is not bool:
        check_flag("return_lse", return_lse)
    recalls = transforms.untransformed() and not (transforms.any_autocast() and transforms.casts(q))
    decided = _recall(q, k, v, selection, scale, q_pos, None, backend) if recalls else None
    if decided is None:
        if not (plain := transforms.plain(q, k, v)):
            transforms.check_transforms(q, k, v)
        tensors = None if plain or is_compiling() else sys.modules.get("torch.distributed.tensor")  # not imported: no DTensors
        sharded = tensors is not None and isinstance(q, tensors.DTensor)
        if not sharded and (r := shared_keys.ratio_of(q, k, selection)) > 1:
            options = {"scale": scale, "backend": backend, "workspace": workspace}
            return _of_shared_keys(q, k, v, as_selection(selection), q_pos, r, return_lse, options)
        if not plain and transforms.traces(q, k, v):
            if workspace is not None:
                traced = "given to a call that torch.compile, a dispatch mode or DTensor traces"
                raise ArgumentError("workspace", traced, "None there", "leave it out; temporaries are then allocated")
            check_tensors(q=q, k=k, v=v)
            if sharded:
                from nsa_sel.core import sharding  # imports torch.distributed.tensor, which takes 0.5 s

                selection, q_pos = sharding.arguments(q, k, v, selection, q_pos)
            return _traced(q, k, v, selection, scale, q_pos, return_lse, backend)
        q, k, v = transforms.in_autocast_dtype(*transforms.materialized(q, k, v))  # before the checks, which want one dtype
        decided = checked(q, k, v, selection, scale, q_pos, transforms.needs_grad(q, k, v), backend)
    settings = decided.call.settings
    if settings.debug_log != log.followed or settings.debug_triton or settings.autotune not in ("on", "off"):
        decided = prepared(decided, backend)
    if workspace is not None:
        decided.call.workspace = Workspace.of(workspace, decided.call.q.device)
    if decided.request.needs_grad:
        o, lse = run.recorded(decided, return_lse)
    else:
        o, lse, _ = run.run_forward(decided)
    if q.dim() == 4:
        o, lse = o.squeeze(1), lse.squeeze(1) if return_lse else lse
    return (o, lse) if return_lse else o


def _of_shared_keys(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None, r: int, return_lse: bool, options: dict[str, Any]
) -> Any:
    """Run a call in which r groups of q share a KV group, as a call of r times as many rows."""
    rows, selection, q_pos = shared_keys.call_of_rows(q if q.dim() == 5 else q.unsqueeze(1), selection, q_pos, k.shape[2], r)
    results = selection_attention(rows, k, v, selection, q_pos=q_pos, return_lse=True, **options)
    o, lse = (shared_keys.from_rows(x, r) for x in results)
    if q.dim() == 4:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


# Cache of checked calls. A call whose shapes, dtypes, flags and selection facts match a cached one skips the checks and
# the decision.


def checked(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, scale: float | None, q_pos: Tensor | None, needs_grad: bool,
    backend: str | None, counts: bool = True,
) -> Decided:  # fmt: skip
    """Check the arguments of `selection_attention` and decide, unless the class of the call is cached.

    counts: False if this call may not count sharing; its decision is then not cached.
    """
    cached = _recall(q, k, v, selection, scale, q_pos, needs_grad, backend, counts)
    if cached is not None:
        return cached
    check_tensors(q=q, k=k, v=v)
    decided = decide_call(*check_call(q, k, v, selection, scale, q_pos), needs_grad, backend, counts=counts)
    key = _key(q, k, v, selection, scale, q_pos, needs_grad, backend) if counts else None
    if key is not None and not decided.call.selects_nothing():
        entry = decided.request, decided.decision, decided.call.scale, decided.sharing, decided.call.known
        remember(key, transforms.with_class(recall(key) or (), entry, *((q, k) if v is k else (q, k, v)), decided.call.selection.listed))
    return decided


def _recall(
    q: Any, k: Any, v: Any, selection: Any, scale: Any, q_pos: Any, needs_grad: bool | None, backend: Any, counts: bool = True
) -> Decided | None:
    """Return the cached decision of this call's class, for these tensors; None on a miss, or if its sharing count has
    expired.

    Nothing has to be checked. needs_grad: None to find out.
    """
    key = _key(q, k, v, selection, scale, q_pos, needs_grad, backend)
    classes = recall(key)
    if classes is None:
        return None
    tensors = (q, k, selection.listed) if v is k else (q, k, v, selection.listed)
    entry = None
    for guards, value in classes:  # `transforms.find_class`, inlined
        if guards.check(*tensors):
            entry = value
            break
    if entry is None:
        return None
    request, decision, checked_scale, sharing, known = entry
    if counts and sharing is not None and not sharing.use():
        return None
    call = Call(q.unsqueeze(1) if q.dim() == 4 else q, k, v, selection, None, checked_scale, decision.settings, decision.device)
    if not key[0]:
        call.known = known
        known[REPEATED] = True
    return Decided(call, decision, request)


def _key(q: Any, k: Any, v: Any, selection: Any, scale: Any, q_pos: Any, needs_grad: bool | None, backend: Any) -> Any:
    """Return the facts that `check_call`, `request_of` and `decide` read and that guards do not compare, and shapes,
    which keep classes few; None for a call that is not cached. The first entry is 0 if the addresses of q, k and v are
    multiples of 16.

    A lookup takes half the time of checking and deciding ("repeat" in docs/performance.md).
    """
    if type(selection) is not Selection or q_pos is not None or not (scale is None or type(scale) is float):
        return None
    snapshot = selection._snapshot
    exact = None if snapshot is None or snapshot.exact is None else selection.exact()
    try:
        if needs_grad is None:
            needs_grad = (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()
        return (
            (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15, q.shape, k.shape, None if v is k else v.shape, selection.block_size,
            selection.max_length, selection._cut_block, exact, scale, needs_grad, backend,
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # no tensor, or one without shape or memory
        return None


# The ops `nsa_sel::selection_forward` and `selection_backward`, through which traced calls go.


def _traced(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, scale: float | None, q_pos: Tensor | None, return_lse: bool,
    backend: str | None,
) -> Any:  # fmt: skip
    selection = as_selection(selection)
    if not (scale is None or isinstance(scale, (int, float))):
        raise ArgumentError("scale", repr(scale), "a finite number, or None for 1/sqrt(Dk)", "pass a Python float")
    decode = q.dim() == 4
    if decode:
        q = q.unsqueeze(1)
    needs_grad = transforms.needs_grad(q, k, v)
    o, lse = torch.ops.nsa_sel.selection_forward(
        q, k, v, selection.listed if selection._made is None else selection.ranges, q_pos, selection.block_size, selection.max_length,
        selection.disjoint, scale, backend, needs_grad,
    )  # fmt: skip
    if decode:
        o, lse = o.squeeze(1), lse.squeeze(1)
    return (o, lse) if return_lse else o


def _selection(listed: Tensor, block_size: int | None, max_length: int | None, disjoint: bool) -> Selection:
    """Return the selection of an op's argument `listed`: block indices [B,S,G,n], or ranges [B,S,G,n,2]."""
    if listed.dim() == 4 and block_size is not None:
        return Selection.from_blocks(listed, block_size, disjoint=disjoint)
    return Selection.unread(listed, block_size, max_length, disjoint)


def _op_forward(
    q: Tensor, k: Tensor, v: Tensor, listed: Tensor, q_pos: Tensor | None, block_size: int | None, max_length: int | None,
    disjoint: bool, scale: float | None, backend: str | None, needs_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if needs_grad and backend is None and (name := forced_name.get()) is not None:
        raise BackendError(
            f"use_backend({name!r}) is not supported for compiled calls, or calls of DTensors, that need gradients, because the backward"
            " pass may run outside of it; allowed: the argument backend= of selection_attention. Remedy: pass backend=, or set"
            " NSA_SEL_BACKEND."
        )
    selection = _selection(listed, block_size, max_length, disjoint)
    o, lse, _ = run.run_forward(prepared(checked(q, k, v, selection, scale, q_pos, needs_grad, backend), backend))
    return o.contiguous(), lse.contiguous()  # as `_fake_forward` promises, whatever a backend of another package returns


def _op_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, listed: Tensor,
    q_pos: Tensor | None, block_size: int | None, max_length: int | None, disjoint: bool, scale: float | None, backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    selection = _selection(listed, block_size, max_length, disjoint)
    with contextlib.nullcontext() if forced_name.get() is None else forcing(None):  # the forward pass had none
        # The forward pass has counted; where it could not (in a capture), both go by the prior.
        call, decision, *_ = prepared(checked(q, k, v, selection, scale, q_pos, True, backend, counts=False), backend)
    dq, dk, dv = run.gradients(call, decision, o, lse, do, dlse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, listed: Tensor, q_pos: Tensor | None, block_size: int | None, max_length: int | None,
    disjoint: bool, scale: float | None, *_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_call(q, k, v, _selection(listed, block_size, max_length, disjoint), scale, q_pos, fake=True)
    rows = q.shape[:-1]
    return q.new_empty(*rows, v.shape[-1]), q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32))


_OPTIONS = "Tensor listed, Tensor? q_pos, int? block_size, int? max_length, bool disjoint, float? scale, str? backend"
run.define("selection", _OPTIONS, 2, _op_forward, _op_backward, _fake_forward, function=Call.function)
