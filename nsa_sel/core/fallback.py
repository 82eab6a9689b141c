"""Run one pass by the decided backend, and by the fallback if an automatically chosen one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa_sel.core import launch, registry
from nsa_sel.core.call import Call
from nsa_sel.core.choose_call import ChooseCall
from nsa_sel.core.decide import after_failure, forget_decisions
from nsa_sel.core.decision import Decision
from nsa_sel.errors import ArgumentError, warn
from nsa_sel.telemetry import events

T = TypeVar("T")


def run(call: Call | ChooseCall, decision: Decision, direction: str, work: Callable[[str], T]) -> tuple[T, Decision]:
    """What `work(backend)` returns, and the decision of the backend that ran.

    Args:
        call: the call.
        decision: its decision.
        direction: "forward" or "backward".
        work: runs one pass by the backend of this name.
    """
    name = decision.forward if direction == "forward" else decision.backward
    assert name is not None, "decide() refuses before any kernel"
    if decision.override is None and registry.is_broken(name, decision.request):  # it broke after autograd recorded the call
        events.count("fallbacks", name, "failed-before")
        return run(call, after_failure(decision, name), direction, work)
    try:
        return launch.on_device(call, name, direction, work), decision
    except ArgumentError:  # the workspace is too small
        raise
    except torch.OutOfMemoryError as error:
        error.add_note(
            f"{name}, {direction} pass: beside its results it may take up to {call.settings.workspace_bytes} bytes"
            " (runtime.workspace_bytes). Remedy: lower that bound, or pass fewer rows at once."
        )
        raise
    except Exception as error:
        events.count("failed", name)
        events.emit("sel.backend.failed", logging.ERROR, backend=name, direction=direction, error=repr(error), request=decision.request)
        fallback = registry.fallback(decision.request.kind)
        if decision.override is not None or name == fallback or registry.is_sticky(error):
            raise
        # A warning is visible without logging; once per request class, which is not tried again.
        remedy = f"backend={name!r} raises the error with its traceback, nsa_sel.reset() lets {name} try again"
        warn(f"{name} failed, {fallback} runs calls of this class from now on: {error!r}. Remedy: {remedy}")
        registry.mark_broken(name, decision.request, error)
        forget_decisions()
        again = after_failure(decision, name)
        events.count("fallbacks", name, type(error).__name__)
        return run(call, again, direction, work)


def with_delta(load: Callable[[str], Any], call: Call | ChooseCall, *given: Tensor | None) -> Callable[[str], tuple[Any, ...]]:
    """The backward pass of a backend, for `run`: dq, dk, dv and delta, None where the backend does not give it.

    Args:
        load: the module of a backend, by its name.
        call: the call.
        given: o, lse, do and dlse.
    """

    def work(name: str) -> tuple[Any, ...]:
        module = load(name)
        if hasattr(module, "backward_and_delta"):
            return tuple(module.backward_and_delta(call, *given))
        return *module.backward(call, *given), None

    return work
