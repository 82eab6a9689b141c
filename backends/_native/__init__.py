"""NSA_SEL_NATIVE=1: calls with gradients whose passes are recorded run by a node in C++ (node.cpp), without Python's part of autograd.

The first calls of a class run as without the flag. Once a pass of theirs is replayed from a recording (_replay.py), the class learns it:
from the next call on, that recording is played in C++. A pass is learned where what was replayed is all that it did, which the addresses of
its inputs and results tell.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from nsa_sel.backends._driver import thread
from nsa_sel.backends._native import extension
from nsa_sel.core.call import REPEATED, Call
from nsa_sel.core.native import NATIVE


class Passes:
    """The passes of a class of calls: one forward pass, and one backward pass for each layout of the output gradients."""

    __slots__ = ("backward", "exact", "forward", "numbers")

    def __init__(self, forward: Any, exact: Any) -> None:
        self.forward, self.backward = forward, list[Any]()
        self.exact = exact  # `Selection.exact` of the class
        self.numbers = set[int]()  # of the recordings in `backward`

    def attend(self, call: Call, decision: Any, run_backward: Callable[..., Any], with_lse: bool) -> Any:
        """o, or (o, lse), recorded by autograd; None if Python has to run the call. run_backward: as in core/run.py, for a backward pass
        that is not replayed."""
        if call.workspace is not None or call.selection.ranges.is_inference() or _compiles_autograd():
            return None
        again = functools.partial(run_backward, others=call.others(), known=call.known, decision=decision)
        return extension.loaded().attend(
            self.forward, self.backward, call.q, call.k, call.v, call.selection, again, decision.backward, with_lse
        )  # fmt: skip


def _compiles_autograd() -> bool:
    """Whether PyTorch's compiled autograd takes the node, which it can't hash."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.compiled_autograd_enabled)


def watch() -> None:
    """A pass begins that may be learned."""
    extension.loaded()  # built before the first call is done, and not in the midst of a later one
    thread.played = None


def learn_forward(call: Call, o: Tensor, lse: Tensor) -> None:
    """What was replayed since `watch` is the forward pass of the call's class, if it made o and lse of q, k, v and the ranges."""
    if thread.played is not None and NATIVE not in call.known and _repeats(call):
        learned = _learned(call, (call.q, call.k, call.v, call.disjoint_ranges()), (o, lse))
        if learned is not None:
            call.known[NATIVE] = Passes(learned, call.selection.exact())


def learn_backward(call: Call, given: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> None:
    """As `learn_forward`; given: o, lse, do and dlse. What was measured since the forward pass makes another pass of it."""
    passes = call.known.get(NATIVE)
    if thread.played is None or passes is None or not _repeats(call) or passes.exact != call.selection.exact():
        return
    number = thread.played[0].number
    if number not in passes.numbers:
        learned = _learned(call, (call.q, call.k, call.v, call.disjoint_ranges(), *given), gradients)
        if learned is not None:
            passes.numbers.add(number)
            passes.backward.append(learned)


def _repeats(call: Call) -> bool:
    """Whether nothing is asked of the calls of this class that Python alone does."""
    settings = call.settings
    return REPEATED in call.known and call.workspace is None and not (settings.traced or settings.debug_nvtx)


def _learned(call: Call, inputs: Sequence[Tensor | None], results: Sequence[Tensor]) -> Any:
    """The pass that made these results of these inputs; None if it is not all that was replayed last."""
    recording, table = thread.played
    addresses = [0 if x is None else x.data_ptr() for x in (*inputs, *results)]
    if table[: len(addresses)] != addresses or len(recording.outputs) != len(results):
        return None
    return extension.converted(recording, inputs, call.known)


def counts() -> tuple[int, int]:
    """Forward and backward passes of this process that ran in C++."""
    found: tuple[int, int] = extension.loaded().counts()
    return found
