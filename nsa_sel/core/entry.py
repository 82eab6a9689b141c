"""`selection_attention` for the public function and for every other caller."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa_sel.core import ops, prepare, repeat, run, shared_keys, transforms
from nsa_sel.core.arguments import check_flag, check_tensors
from nsa_sel.core.check import as_selection
from nsa_sel.selection import Selection


def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, scale: float | None, q_pos: Tensor | None, return_lse: bool,
    backend: str | None, workspace: Tensor | None = None,
) -> Any:  # fmt: skip
    """Check, decide, run; returns o, or (o, lse). Traced calls and calls of DTensors go through the ops."""
    check_flag("return_lse", return_lse)
    decided = repeat.repeated(q, k, v, selection, scale, q_pos, backend)
    if decided is None:
        plain = transforms.plain(q, k, v)
        if not plain:
            transforms.check_transforms(q, k, v)
        sharded = not plain and transforms.is_sharded(q)
        if not sharded and (r := shared_keys.ratio_of(q, k, selection)) > 1:
            decode, q = q.dim() == 4, q if q.dim() == 5 else q.unsqueeze(1)
            q, selection, q_pos = shared_keys.call_of_rows(q, as_selection(selection), q_pos, k.shape[2], r)
            found = selection_attention(
                q, k, v, selection, scale=scale, q_pos=q_pos, return_lse=True, backend=backend, workspace=workspace
            )  # fmt: skip
            o, lse = (shared_keys.from_rows(x, r) for x in found)
            if decode:
                o, lse = o.squeeze(1), lse.squeeze(1)
            return (o, lse) if return_lse else o
        if not plain and transforms.traces(q, k, v):
            transforms.refuse_workspace(workspace, "a call that torch.compile, a dispatch mode or DTensor traces")
            check_tensors(q=q, k=k, v=v)
            if sharded:
                from nsa_sel.core import sharding  # imports torch.distributed.tensor, which takes 0.5 s

                return sharding.sharded(q, k, v, selection, scale=scale, q_pos=q_pos, return_lse=return_lse, backend=backend)
            return ops.traced(q, k, v, selection, scale=scale, q_pos=q_pos, return_lse=return_lse, backend=backend)
        q, k, v = transforms.in_autocast_dtype(*transforms.materialized(q, k, v))  # before the checks, which want one dtype
        decided = repeat.begin_or_repeat(q, k, v, selection, scale, q_pos, transforms.needs_grad(q, k, v), backend)
    o, lse = run.attend(prepare.prepared(decided, backend), workspace, return_lse)
    if q.dim() == 4:
        o = o.squeeze(1)
        lse = lse.squeeze(1) if return_lse else lse
    return (o, lse) if return_lse else o
