"""Locks and thread pools that survive os.fork: a child must not inherit a held lock, or a pool without its threads.

All locks of the package are made here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def lock() -> threading.RLock:
    """A lock that is free in every forked child: a fork waits until no other thread holds it, so guarded data is
    consistent.

    Reentrant, for a fork in a signal handler that interrupted the holder.
    """
    made = threading.RLock()
    os.register_at_fork(before=made.acquire, after_in_parent=made.release, after_in_child=made.release)
    return made


def in_child(renew: Callable[[], object]) -> None:
    """Call `renew` first in every forked child."""
    os.register_at_fork(after_in_child=renew)
