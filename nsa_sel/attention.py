"""The public call, and `explain`, which shows its decision."""

from __future__ import annotations

from torch import Tensor

from nsa_sel.core import shared_keys
from nsa_sel.core.arguments import check_tensors
from nsa_sel.core.attend import selection_attention as selection_attention
from nsa_sel.core.call import device_info, request_of
from nsa_sel.core.check import as_selection, check_call
from nsa_sel.core.decide import select, with_count
from nsa_sel.core.decision import Decision
from nsa_sel.core.transforms import in_autocast_dtype, needs_grad
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
