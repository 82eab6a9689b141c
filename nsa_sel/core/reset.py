"""Forget what a process remembers of calls."""

from __future__ import annotations

from nsa_sel.core import registry, warm
from nsa_sel.core.decide import forget_decisions


def reset() -> None:
    """Start anew: decide again, read configuration files again, try backends that failed again, warm up again at the next first call.

    For use after a configuration file, an installed package or a driver has changed. Counters and logs are kept.
    """
    forget_decisions()
    registry.forget_broken()
    warm.forget_warmups()
