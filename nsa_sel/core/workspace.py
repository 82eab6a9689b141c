"""A user's buffer for the temporaries of a call, forward and backward, instead of an allocation per call."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError

ALIGNMENT = 256  # bytes: enough for TMA and 16-byte loads


class Workspace:
    """Allocates the temporaries of a pass one after another in the buffer; the next pass starts over. Results are never in it."""

    __slots__ = ("buffer", "taken")

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.taken = 0  # bytes that this pass asked for, also beyond the buffer

    @classmethod
    def of(cls, buffer: object, device: torch.device) -> Workspace:
        """The argument `workspace` of a call on `device`; ArgumentError if it is not suitable."""
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
        """Start a pass: all memory is free."""
        self.taken = 0

    def take(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Uninitialized memory for a contiguous tensor until the pass ends; None if the buffer is too small, which `check` reports."""
        first = self.taken + -(self.buffer.data_ptr() + self.taken) % ALIGNMENT
        self.taken = first + math.prod(sizes) * dtype.itemsize
        if self.taken > self.buffer.numel():
            return None
        return self.buffer[first : self.taken].view(dtype).view(sizes)

    def check(self, backend: str, direction: str) -> None:
        """ArgumentError with the size that the pass needed, if it exceeds the buffer."""
        size = self.buffer.numel()
        if self.taken > size:
            allowed = f"at least {self.taken} bytes for the {direction} pass of {backend}"
            raise ArgumentError("workspace", f"of {size} bytes", allowed, "pass a larger buffer, or leave it out")
