"""What the counters grew by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nsa_sel.telemetry import events


@contextlib.contextmanager
def counted() -> Iterator[dict[tuple[str, ...], int]]:
    """What the counters grew by inside the `with` block; filled when it ends."""
    grown: dict[tuple[str, ...], int] = {}
    before = events.tallies()
    yield grown
    grown.update({name: n - before.get(name, 0) for name, n in events.tallies().items() if n > before.get(name, 0)})
