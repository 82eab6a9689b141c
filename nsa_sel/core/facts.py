"""What policies see of tensors: the `Request` of a checked call, and the `DeviceInfo` of its device."""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from nsa_sel.core.call import DTYPES
from nsa_sel.core.quantized import Scales
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.selection import Selection


def request_of(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, needs_grad: bool, block_table: Tensor | None = None,
    scales: Scales | None = None,
) -> Request:  # fmt: skip
    """The request of a checked call."""
    B, S, G, h, Dk = q.shape
    _, _, S_kv, Dv = v.shape
    page_size = None
    if block_table is not None:
        page_size, S_kv = S_kv, S_kv * block_table.shape[1]
    exact = selection.exact()
    return Request(
        B=B, S=S, S_kv=S_kv, G=G, h=h, Dk=Dk, Dv=Dv, n=selection.n, block_size=selection.block_size,
        max_length=selection.length_bound(S_kv), dtype=DTYPES[q.dtype], needs_grad=needs_grad,
        aligned=is_aligned(q, k, v),
        sharing=exact[1] if exact and S > 1 else None,  # one row has no neighbors
        page_size=page_size,
        quantized=None if scales is None else scales.quantized,
        mean_length=exact[2] if exact else None,
    )  # fmt: skip


def is_aligned(*tensors: Tensor) -> bool:
    """Whether pointers and outer strides are multiples of 16 bytes."""
    bits = 0  # of all of them: a bitwise or is a multiple of 16 if each is
    for x in tensors:
        bits |= x.data_ptr()
        for stride in x.stride()[:-1]:
            bits |= stride * x.element_size()
    return bits % 16 == 0


@functools.lru_cache(maxsize=64)
def device_info(device: torch.device) -> DeviceInfo:
    """The facts of a torch device that policies use."""
    if device.type == "cpu":
        return DeviceInfo(kind="cpu", name="cpu", triton_interpret=os.environ.get("TRITON_INTERPRET") == "1")
    facts = torch.cuda.get_device_properties(device)
    shared = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)  # torch's stubs lack the first
    return DeviceInfo(
        kind="cuda", name=facts.name, sm=facts.major * 10 + facts.minor, sm_count=facts.multi_processor_count,
        shared_memory=shared,
    )  # fmt: skip
