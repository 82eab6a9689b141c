"""choose-cuda: attention to compressed keys and its gradients with TMA and wgmma on Hopper (cupy_cuda/compressed.py).

Importance and top n use the Triton kernels of choose_triton.py. Calls with positions (q_pos), without compressed keys,
or with tensors that TMA cannot load use only Triton kernels. Triton's dq is faster with Dk = Dv = 64 (docs/kernels.md,
"Tried and dropped").
"""

from __future__ import annotations

from torch import Tensor

from nsa_sel.backends import choose_triton
from nsa_sel.backends._triton.arguments import NARROW
from nsa_sel.backends.cupy_cuda import arithmetic, compressed
from nsa_sel.core.call import ChooseCall, device_info


def attention(call: ChooseCall) -> tuple[Tensor, Tensor]:
    """Return o and lse only."""
    device = device_info(call.q.device)
    call = call if call.scale >= 0 else call.with_positive_scale()
    return arithmetic.forward(call, device) if compressed.supports(call, device) else choose_triton.attention(call)


def paged(call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
    """Do `forward` over compressed keys in pages, with positions, in Triton kernels."""
    return choose_triton.paged(call)


def forward(call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] in q's dtype, lse [B,S,G,h] in float32, and ranges [B,S,G,n,2] of the blocks."""
    o, lse = attention(call)
    return o, lse, choose_triton.best_blocks(call, lse)


def backward(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous dq, dk, dv in the dtypes of q, k, v. do has a contiguous last dimension."""
    return backward_and_delta(call, o, lse, do, dlse)[:3]


def backward_and_delta(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `backward` and delta [B,S,G,h]."""
    if call.scale < 0:
        dq, dk, dv, delta = backward_and_delta(call.with_positive_scale(), o, lse, do, dlse)
        return -dq, dk, dv, delta
    device = device_info(call.q.device)
    if not compressed.supports(call, device, do):
        return choose_triton.backward_and_delta(call, o, lse, do, dlse)
    o, lse = o.contiguous(), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    if call.q.shape[4] + call.v.shape[3] <= NARROW:
        dq, facts = choose_triton.dq(call, o, lse, do, dlse)
        delta = facts[:, :, 0].transpose(1, 2).contiguous()
    else:
        dq, delta = arithmetic.dq(call, device, o, lse, do, dlse)
    return dq, *compressed.dkdv(call, device, lse, do, delta), delta
