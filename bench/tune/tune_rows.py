"""Rows that `nsa-sel tune` measures one after another into a file of the cache folder: a kill at any moment loses no finished one.

A row stands for one case, direction, backend and, where they matter, the launches that ran. What fails has a row with `error` and is not
tried again; what the process dies of is tried `DEATHS` times.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nsa_sel.bench.core import environment, store
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune.tune import DEATHS, ContextLost, keep, kept
from nsa_sel.settings import private
from nsa_sel.settings.config import COMMIT_FLAG
from nsa_sel.settings.tuned import Stamp

IDENTITY = (*Case._fields, "direction", "backend", "launches")

Key = tuple[Any, ...]


def key(row: Row) -> Key:
    """What was measured: equal for two rows of which one would do."""
    return tuple(row.get(field) for field in IDENTITY)


def facts(stamp: Stamp) -> Row:
    """What every row says of its environment."""
    named = {field: getattr(stamp, field) for field in ("device", "driver", "torch", "triton", "nsa_sel", "kernels")}
    return {**named, "commit": os.environ.get(COMMIT_FLAG), "command": environment.command()}


def read(path: Path) -> dict[Key, Row]:
    """The rows so far, failures included; of two of the same thing the later one. A line that is no row is passed over."""
    return {key(row): row for row in map(store.parsed, kept(path).splitlines()) if row is not None}


def collect(
    path: Path,
    wanted: Sequence[Row],
    measure_one: Callable[[Row], Row],
    more: Row,
    tell: Callable[[str, float], None] = lambda what, done: None,
    seconds: float = float("inf"),
) -> list[Row]:
    """Measure what `path` does not hold yet of the wanted rows, which hold their identity; all that is known of them afterwards.

    Only for the process that holds the lock. Stops after `seconds`, between two rows. ContextLost is passed on.
    """
    deadline = time.monotonic() + seconds
    known = read(path)
    store.mend(path, lambda words: None)
    for number, row in enumerate(wanted):
        if key(row) in known:
            continue
        if time.monotonic() >= deadline:
            break
        tell(f"{row['case']} {row['direction']} {row['backend']}", number / len(wanted))
        found = {**_measured(path.with_suffix(".begun"), row, measure_one), **more}
        keep(path, found)
        known[key(row)] = found
    return [known[key(row)] for row in wanted if key(row) in known]


def _measured(begun: Path, row: Row, measure_one: Callable[[Row], Row]) -> Row:
    """The row with its times, or its error. The file `begun` outlives a process that dies meanwhile, and counts how often."""
    deaths = _deaths(begun, row)
    if deaths >= DEATHS:
        return {**row, "error": f"the process died {deaths} times while it was measured"}
    private.write(begun, json.dumps({"of": key(row), "deaths": deaths + 1}).encode())
    try:
        return {**row, **measure_one(row)}
    except ContextLost:
        raise
    except Exception as error:
        return {**row, "error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    except BaseException:  # left by the user: no death
        begun.unlink(missing_ok=True)
        raise


def _deaths(begun: Path, row: Row) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(private.read(begun))
        if tuple(found["of"]) == key(row):
            return int(found["deaths"])
    return 0
