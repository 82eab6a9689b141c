"""A caller's buffer for the temporaries of one call, forward and backward, so that these are allocated once and not a call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError

ALIGNMENT = 256  # bytes: what bulk copies and 16-byte loads want, and more


class Workspace:
    """The temporaries of a pass, end to end in the caller's buffer; the next pass begins anew. What a call returns is never there."""

    __slots__ = ("buffer", "taken")

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.taken = 0  # bytes of this pass, also those that were not there

    @classmethod
    def of(cls, buffer: object, device: torch.device) -> Workspace:
        """Of the argument `workspace` of a call on `device`; ArgumentError for what can't be one."""
        allowed, remedy = (
            "a contiguous torch.uint8 tensor",
            f'pass torch.empty(size, dtype=torch.uint8, device="{device}"), or leave it out',
        )
        if not isinstance(buffer, Tensor):
            raise ArgumentError("workspace", f"a {type(buffer).__name__}", allowed, remedy)
        if buffer.dtype != torch.uint8:
            raise ArgumentError("workspace", f"of dtype {buffer.dtype}", allowed, remedy)
        if not buffer.is_contiguous():
            raise ArgumentError("workspace", f"of shape {tuple(buffer.shape)} and strides {buffer.stride()}", allowed, remedy)
        if buffer.device != device:
            raise ArgumentError("workspace", f"on {buffer.device}", f"q's device {device}", remedy)
        if buffer.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError("workspace", "made under torch.inference_mode()", "one made outside, for a call outside", remedy)
        return cls(buffer.view(-1))

    def begin(self) -> None:
        """A pass begins: what was taken before is free."""
        self.taken = 0

    def take(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Unwritten memory for a contiguous tensor until the pass ends; None where the buffer is too small, which `check` tells."""
        first = self.taken + -(self.buffer.data_ptr() + self.taken) % ALIGNMENT
        self.taken = first + math.prod(sizes) * dtype.itemsize
        if self.taken > self.buffer.numel():
            return None
        return self.buffer[first : self.taken].view(dtype).view(sizes)

    def check(self, backend: str, direction: str) -> None:
        """ArgumentError with the size that the pass needed, where it was more than there is."""
        size = self.buffer.numel()
        if self.taken > size:
            allowed = f"at least {self.taken} bytes for the {direction} pass of {backend}"
            raise ArgumentError("workspace", f"of {size} bytes", allowed, "pass a larger buffer, or leave it out")
