"""Masked attention of one step on torch's fused kernels if they fit, else written out; and limits that all steps
share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from nsa_sel.core.call import Call, is_aligned
from nsa_sel.telemetry import events

# A step's keys should fit a CPU's caches, but many small steps are bound by Python's overhead. Steps of 2, 4, 8, 16,
# 32, 64 MiB gave a gathering forward pass of 328, 244, 237, 208, 282, 332 ms (one thread of a busy EPYC 7003; S 2048, G
# 2, h 4, D 64, 8 blocks of 64).
_CPU_STEP_BYTES = 16 << 20
STEP_ROWS = 32768  # torch's CUDA kernels take fewer than 65536 sequences
OVERFLOW = 1e15  # squared and summed over a head dim, this is still far below the largest float32


def accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def budget(call: Call) -> int:
    """Return how many bytes of temporaries one step may take."""
    workspace = call.settings.workspace_bytes
    return min(workspace, _CPU_STEP_BYTES) if call.q.device.type == "cpu" else workspace


def may_read(call: Call) -> bool:
    """Return whether the host can read the ranges, K and V without a device synchronization (on a CPU)."""
    return call.q.device.type == "cpu"


def slices(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


@contextlib.contextmanager
def timed_bucket(call: Call, direction: str, length: int, rows: int) -> Iterator[None]:
    """Time the `with` block, which processes `rows` rows of `length` keys each; emit `sel.timing.bucket` if
    NSA_DEBUG_TIMING is set."""
    if not call.timed():
        yield
        return
    started = events.now(call.q.device.type)
    yield
    ms = (events.now(call.q.device.type) - started) * 1e3
    events.emit("sel.timing.bucket", backend="sdpa-packed", direction=direction, length=length, rows=rows, ms=ms)


def all_finite(call: Call, lo: int, hi: int) -> bool:
    """Return whether q and the keys and values [lo, hi) are finite and small enough that no product overflows. CPU
    only: reads them."""
    tensors = (call.q, call.k[:, :, lo:hi], call.v[:, :, lo:hi])
    extremes = torch.stack([extreme for x in tensors for extreme in torch.aminmax(x)])
    return bool(extremes.abs().max() < OVERFLOW)  # False for NaN


def has_fused_kernel(q: Tensor, Dk: int, Dv: int) -> bool:
    """Return whether one of torch's fused kernels computes o and lse for these head dims without losing precision.

    On a GPU, float32 does not qualify.
    """
    if q.device.type == "cpu":
        return Dk == Dv
    return q.device.type == "cuda" and q.element_size() == 2 and Dk % 8 == 0 and Dv % 8 == 0


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention of each sequence under a mask, with lse.

    `scaled_dot_product_attention` drops lse, so this calls its kernels directly, or computes the same in plain torch if
    none fits. No causal flag is used: the mask holds the causal clamp.

    Args:
        q: [N,H,M,Dk].
        k: [N,1,L,Dk].
        v: [N,1,L,Dv].
        keep: [N,1,M or 1,L] bool, or None to keep everything. The result of a row that keeps no key is undefined.
        scale: factor of the logits.

    Returns:
        o [N,H,M,Dv] in q's dtype and lse [N,H,M].
    """
    if not has_fused_kernel(q, q.shape[3], v.shape[3]):
        return _attend_unfused(q, k, v, keep, scale)
    (N, H, M, _), L = q.shape, k.shape[2]
    bias = None
    if keep is not None:
        padded = -(-L // 16) * 16  # the GPU kernel loads a bias in aligned groups of 16 elements
        bias = torch.zeros(*keep.shape[:3], padded, dtype=q.dtype, device=q.device)[..., :L].masked_fill_(~keep, float("-inf"))
    if q.is_cuda:
        q, k, v = (x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))  # as the kernel requires
    k, v = k.expand(-1, H, -1, -1), v.expand(-1, H, -1, -1)
    if q.device.type == "cpu":
        o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
        return o, lse
    bias = None if bias is None else bias.expand(N, H, M, L)
    o, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
    return o, lse[..., :M]  # the kernel pads the rows of lse


def _attend_unfused(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    N, H, M, Dk = q.shape
    L, Dv = v.shape[2:]
    dtype = accumulate(q.dtype)
    scores = ((q.to(dtype) * scale).reshape(N, 1, H * M, Dk) @ k.to(dtype).transpose(-1, -2)).view(N, H, M, L)
    if keep is not None:
        scores.masked_fill_(~keep, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = scores.sub_(lse.unsqueeze(-1)).exp_()
    return (p.view(N, 1, H * M, L) @ v.to(dtype)).view(N, H, M, Dv).to(q.dtype), lse
