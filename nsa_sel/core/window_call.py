"""One call of sliding-window attention, as its kernels receive it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_sel.core.call import LOG2_E


class WindowCall(NamedTuple):
    """The checked arguments of a call with a positive scale.

    Args:
        q: [B,S,G,h,Dk]; k: [B,G,S_kv,Dk]; v: [B,G,S_kv,Dv], any strides with a contiguous last dimension; none is empty, S <= S_kv.
        window: keys that a row sees.
        scale: factor of the logits.
        bounds: of a packed batch: where each row's sequence begins and ends, [2,T] int32, contiguous; T and 0 in padding.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    window: int
    scale: float
    bounds: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None) -> WindowCall:
        """With -q for a negative scale: kernels track the maximum of q.k, which must be that of the logits."""
        return cls(q if scale >= 0 else -q, k, v, window, abs(scale), bounds)

    def scale_log2(self) -> float:
        """The factor from q.k to logits in base 2; never 0, which would turn a masked -inf into NaN."""
        return max(self.scale * LOG2_E, 1e-30)
