"""Run part of a decode step on a side stream during graph capture, and inline otherwise.

Eager steps of few tokens are bound by host launch time, which a second stream would only increase.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_sel.core.transforms import capturing


class SideStream:
    """A parallel branch of the CUDA graph that is being captured, if there is one.

    Args:
        like: a tensor of the step.
    """

    def __init__(self, like: Tensor) -> None:
        self._main = torch.cuda.current_stream(like.device) if capturing(like) else None

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Return the result of `work`. Do not use it before `join`, and keep the inputs of `work` alive until then."""
        if self._main is None:
            return work()
        side = _side_stream(self._main.device)
        side.wait_stream(self._main)
        with torch.cuda.stream(side):
            result = work()
        result.record_stream(self._main)
        return result

    def join(self) -> None:
        """Make the current stream wait for the branch."""
        if self._main is not None:
            self._main.wait_stream(_side_stream(self._main.device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return]
