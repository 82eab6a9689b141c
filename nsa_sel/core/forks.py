"""What a forked child must not inherit as it stood: a lock that another thread held, a pool whose threads stayed behind.

Nothing else of the package may hold a lock (tests/telemetry/test_events.py looks for them).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def lock() -> threading.RLock:
    """A lock that is free in every forked child: a fork waits until no other thread holds it, so that what it guards is whole there.

    Reentrant, for a fork in a signal handler that interrupted the holder.
    """
    made = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=made.acquire, after_in_parent=made.release, after_in_child=made.release)
    return made


def in_child(renew: Callable[[], object]) -> None:
    """Call `renew` in every forked child, before anything else runs there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)
