"""Where calls find the compiled path (backends/_native), which NSA_SEL_NATIVE=1 asks for."""

from __future__ import annotations

import importlib
from typing import Any

from nsa_sel.core import registry
from nsa_sel.core.call import Call

NATIVE = "native"  # a key of `Call.known`: the passes of a class that run in C++


def learner(call: Call) -> Any:
    """The module that learns what calls of a class replay; None if no one asks for it, or the call is no GPU's."""
    if not call.settings.native or call.device.kind != "cuda":
        return None
    return importlib.import_module("nsa_sel.backends._native")


def any_failed() -> bool:
    """Whether a backend has failed, so that Python has to see which one may run a backward pass."""
    return registry.any_broken()
