"""A training step as a CUDA graph: one launch by the host instead of about a thousand, which small models wait for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_sel import reset


class GraphedStep:
    """A function of one tensor, of one shape, that is captured after its first calls and replayed from then on.

    Once more after `AGAIN` calls: a model that has learned nothing selects blocks almost at random, and the policy's choice of a backend
    for such rows is not the fastest for what it selects later.
    """

    EAGER = 3  # calls before a capture, in which kernels are compiled and the policy decides
    AGAIN = 300

    def __init__(self, step: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.step, self.stream, self.done = step, torch.cuda.Stream(device), 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = self.EAGER  # calls that are left

    def run(self, data: Tensor) -> Tensor:
        """The step's result for data; the next call overwrites it."""
        if self.done == self.AGAIN:
            reset()  # what the policy counted
            self.graph, self.eager = None, self.EAGER
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.eager:
                self.eager -= 1
                result = self.step(data)
            else:
                if self.graph is None:
                    self.graph, self.data = torch.cuda.CUDAGraph(), data.clone()
                    with torch.cuda.graph(self.graph, stream=self.stream):
                        self.result = self.step(self.data)
                self.data.copy_(data)
                self.graph.replay()
                result = self.result
        self.done += 1
        torch.cuda.current_stream().wait_stream(self.stream)
        return result
