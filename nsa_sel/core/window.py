"""Calls of the kind "window", eager and traced: attention to the last keys before every row.

A window has no decision to record: its kernels have one order for all calls (`WINDOWS` in backends/specs.py), and
chunks of rows in plain PyTorch run what no kernel takes. Chunks are differentiable operations that autograd records one
by one; kernels run as calls of other kinds do (run.py).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nsa_sel.backends._window import chunks, packed
from nsa_sel.backends.specs import WINDOWS
from nsa_sel.core import registry, run, transforms
from nsa_sel.core.arguments import Bounds
from nsa_sel.core.backend import WindowKernels
from nsa_sel.core.call import DTYPES, device_info
from nsa_sel.core.decide import Decided
from nsa_sel.errors import warn


@dataclass(slots=True, eq=False)
class SlidingCall:
    """The checked arguments of one call.

    Attributes:
        q: [B,S,G,h,Dk] with a contiguous last dimension, k and v likewise.
        k: [B,G,S_kv,Dk], S_kv >= S.
        v: [B,G,S_kv,Dv].
        window: keys that a row sees.
        scale: factor of the logits.
        bounds: of a packed batch, where B = 1.
        rows: `packed_bounds` of the bounds.
    """

    function: ClassVar[str] = "sliding_window_attention"  # the public function, for messages
    known: ClassVar[None] = None

    q: Tensor
    k: Tensor
    v: Tensor
    window: int
    scale: float
    bounds: Bounds | None = None
    rows: Tensor | None = None

    def others(self) -> tuple[Any, ...]:
        """Return the arguments that follow q, k and v: what a backward pass keeps outside of autograd's saved tensors."""
        return self.window, self.scale, self.bounds, self.rows

    def read_again(self) -> list[Tensor]:
        """Return the inputs besides q, k and v that the backward pass reads, if they have a version counter."""
        tensor = None if self.bounds is None else self.bounds.tensor
        return [] if tensor is None or tensor.is_inference() else [tensor]

    def selects_nothing(self) -> bool:
        """Return False: calls without rows get no further than `attend`."""
        return False

    def run(self, direction: str, *given: Tensor | None) -> tuple[Tensor, ...]:
        """Run a pass: by the first kernels that take the call and have not failed, else by chunks.

        Args:
            direction: "forward" or "backward".
            given: o, lse, do and dlse of a backward pass.

        Returns:
            o and lse, or dq, dk, dv and, if a kernel computes it, delta.
        """
        results = self.by_kernels(direction, *given)
        if results is not None:
            return results
        if direction == "forward":
            return self.by_chunks(True)  # type: ignore[return-value]
        return self.chunk_gradients(True, *given[2:])

    def by_kernels(self, direction: str, *given: Tensor | None) -> tuple[Tensor, ...] | None:
        """Run a pass by the first kernels that take the call; None if there are none, or all have failed for such
        heads."""
        if self.q.is_cuda and self.q.get_device() != torch._C._cuda_getDevice():  # kernels launch and allocate on the current device
            with torch.cuda.device(self.q.device):
                return self.by_kernels(direction, *given)
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (self.q, self.k, self.v))
        if given and given[3] is not None:
            given = *given[:3], given[3].contiguous()
        if self.bounds is not None and self.rows is None:
            self.rows = packed_bounds(self.bounds.on(q), q.shape[1])
        for kernels in usable(q, v):
            try:
                run_pass = getattr(importlib.import_module(kernels.path), direction)
                return run_pass(q, k, v, *given, self.window, self.scale, self.rows)  # type: ignore[no-any-return]
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError) or registry.is_sticky(error):
                    raise  # the next kernels would not survive it either
                warn(
                    f"The {kernels.name} kernels of sliding_window_attention failed, {kernels.then} run such heads from now on: {error!r}."
                    " Remedy: nsa_sel.reset() lets them try again"
                )
                registry.broken[kernels.path, _heads(q, v)] = None
        return None

    def by_chunks(self, with_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Return o and, with_lse, lse; autograd records the operations."""
        if self.bounds is not None:
            return packed.attend(self.q, self.k, self.v, self.window, self.scale, with_lse, self.bounds)
        return chunks.attend_seen(self.q, self.k, self.v, self.window, self.scale, with_lse)

    def chunk_gradients(self, with_lse: bool, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
        """Return dq, dk, dv by autograd through another forward pass. with_lse: the first one computed lse."""
        q, k, v = inputs = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        with torch.enable_grad(), torch.autocast(self.q.device.type, enabled=False):  # of who calls backward; forward cast already
            results = SlidingCall(q, k, v, self.window, self.scale, self.bounds).by_chunks(with_lse)
        used = [(x, dx) for x, dx in zip(results, (do, dlse), strict=True) if x is not None and dx is not None]
        return torch.autograd.grad([x for x, _ in used], inputs, [dx for _, dx in used])


def takes(q: Tensor, v: Tensor, kernels: WindowKernels) -> bool:
    """Return True if these kernels run such tensors, on this machine."""
    if not q.is_cuda or DTYPES[q.dtype] not in kernels.dtypes or max(q.shape[-1], v.shape[-1]) > kernels.head_dim_max:
        return False
    sm = device_info(q.device).sm or 0
    if sm < kernels.min_sm or (kernels.only_sm is not None and sm != kernels.only_sm):
        return False
    return kernels.needs is None or not registry.missing(kernels.needs)


def usable(q: Tensor, v: Tensor) -> list[WindowKernels]:
    """Return the kernels that take such tensors and have not failed for such heads in this process, in their order."""
    heads = _heads(q, v) if registry.broken else None
    return [kernels for kernels in WINDOWS if takes(q, v, kernels) and (kernels.path, heads) not in registry.broken]


def _heads(q: Tensor, v: Tensor) -> tuple[Any, ...]:
    return q.device, q.dtype, *q.shape[3:], v.shape[-1]


def packed_bounds(cu_seqlens: Tensor, T: int) -> Tensor:
    """Return where the sequence of each of T packed rows begins and ends, [2,T] int32, from cu_seqlens [N+1] on their
    device.

    T and 0 for rows after the last sequence, which see nothing.
    """
    row = torch.arange(T, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    after = torch.searchsorted(cu_seqlens, row, right=True)  # the first bound beyond the row
    last = cu_seqlens.shape[0] - 1
    begin, end = cu_seqlens[after - 1], cu_seqlens[after.clamp(max=last)]
    return torch.stack((torch.where(after > last, T, begin), torch.where(after > last, 0, end))).int()


def attend(call: SlidingCall, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h] of a call, recorded by autograd; without with_lse, lse may be None."""
    q, k, v = call.q, call.k, call.v
    if q.numel() == 0:  # empty results, which autograd connects with all inputs
        o = q[..., :1].expand(*q.shape[:-1], v.shape[-1]) + (k.sum() + v.sum())
        return o, o.sum(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    if is_compiling():
        cu_seqlens = None if call.bounds is None else call.bounds.as_tensor()
        needs_grad = transforms.needs_grad(q, k, v)
        o, lse = torch.ops.nsa_sel.window_forward(q, k, v, cu_seqlens, call.window, call.scale, with_lse, needs_grad)
        return o, lse if lse.dim() == 4 else None  # the op returns an empty lse for none
    if not usable(q, v):
        return call.by_chunks(with_lse)
    if transforms.needs_grad(q, k, v):
        return run.recorded(Decided(call, None, None))  # type: ignore[arg-type, no-any-return]
    o, lse = call.run("forward")
    return o, lse


# The ops `nsa_sel::window_forward` and `window_backward`, through which traced calls go. Traced, the chunks would be a
# graph for each length, which takes minutes to compile: how many there are depends on the length.


def _has_lse(q: Tensor, v: Tensor, with_lse: bool) -> bool:
    """Return True if the op returns an lse [B,S,G,h], which kernels do in any case; else it is empty."""
    return with_lse or any(takes(q, v, kernels) for kernels in WINDOWS)


def _op_call(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int, scale: float) -> SlidingCall:
    bounds = None if cu_seqlens is None else Bounds.of("cu_seqlens", cu_seqlens, q.shape[1], q)
    return SlidingCall(q, k, v, window, scale, bounds)


def _op_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int, scale: float, with_lse: bool, needs_grad: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = _op_call(q, k, v, cu_seqlens, window, scale)
    with torch.autocast(q.device.type, enabled=False):
        o, lse = call.run("forward") if _has_lse(q, v, False) else call.by_chunks(with_lse)
    return o.contiguous(), lse.contiguous() if _has_lse(q, v, with_lse) and lse is not None else q.new_empty(0)


def _op_backward(
    do: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_seqlens: Tensor | None,
    window: int, scale: float, with_lse: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = _op_call(q, k, v, cu_seqlens, window, scale)
    if _has_lse(q, v, False):
        return run.gradients(call, None, o, lse, do, dlse)
    # An op runs with the dispatch keys of autograd excluded.
    keys, excluded = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with excluded(keys.AutogradFunctionality, False), excluded(keys.ADInplaceOrView, False):
        return tuple(x.contiguous() for x in call.chunk_gradients(with_lse, do, dlse if with_lse else None))


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int, scale: float, with_lse: bool, needs_grad: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = q.shape[:-1]
    lse = q.new_empty(rows, dtype=torch.promote_types(q.dtype, torch.float32)) if _has_lse(q, v, with_lse) else q.new_empty(0)
    return q.new_empty(*rows, v.shape[-1]), lse


run.define(
    "window", "Tensor? cu_seqlens, SymInt window, float scale, bool with_lse", 1, _op_forward, _op_backward, _fake_forward,
    function=SlidingCall.function,
)  # fmt: skip
