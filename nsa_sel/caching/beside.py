"""Work of a step beside the rest of it: in a branch of its own where a CUDA graph is captured, elsewhere at once.

Eager steps of few tokens are bound by the host, to whom a second stream would only give more to do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from nsa_sel.core.transforms import capturing


class Beside:
    """A branch of the graph that the current stream is captured into, if it is.

    Args:
        like: a tensor of the step.
    """

    def __init__(self, like: Tensor) -> None:
        self._main = torch.cuda.current_stream(like.device) if capturing(like) else None

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """What `work` returns. After `join` it may be used; what `work` reads must exist until then."""
        if self._main is None:
            return work()
        side = _second_stream(self._main.device)
        side.wait_stream(self._main)
        with torch.cuda.stream(side):
            found = work()
        found.record_stream(self._main)
        return found

    def join(self) -> None:
        """Have the current stream wait for the branch."""
        if self._main is not None:
            self._main.wait_stream(_second_stream(self._main.device))


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return]
