"""Reset what a process caches about calls."""

from __future__ import annotations

from nsa_sel.core import memory, registry, warm
from nsa_sel.core.decide import forget_decisions


def reset() -> None:
    """Drop cached decisions, counts of sharing, configuration files, failed backends and warm-ups; counters and logs are kept.

    For use after a configuration file, an installed package or a driver has changed.
    """
    forget_decisions()
    memory.forget_counts()
    registry.forget_broken()
    warm.forget_warmups()
