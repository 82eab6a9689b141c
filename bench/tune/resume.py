"""Measurements that a killed `nsa-sel tune` resumes: each one is on disk before the next one starts.

What fails is kept with its `error` and not tried again. What kills the process is tried `DEATHS` times.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from nsa_sel.bench.core import environment
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.store import Row, RowFile, first_line
from nsa_sel.bench.tune.tuned_file import beside, usable_folder
from nsa_sel.core.registry import is_sticky
from nsa_sel.errors import NsaSelError
from nsa_sel.settings import private
from nsa_sel.settings.flags import COMMIT_FLAG
from nsa_sel.settings.tuned import Stamp

DEATHS = 3
IDENTITY = (*Case._fields, "direction", "backend", "launches")  # of a row of thresholds or costs

Tell = Callable[[str, float], None]  # what is being measured, and the share that is done


class Run(NamedTuple):
    """One run of `nsa-sel tune`."""

    stamp: Stamp  # the environment, which names the files
    tell: Tell = lambda what, done: None
    deadline: float = math.inf  # of time.monotonic(), looked at between two measurements

    def is_over(self) -> bool:
        """Whether the rest is for the next run."""
        return time.monotonic() >= self.deadline


class ContextLost(NsaSelError, RuntimeError):
    """A kernel broke the CUDA context: this process can measure nothing more."""


@contextlib.contextmanager
def context_loss(what: str) -> Iterator[None]:
    """Raise ContextLost for errors after which CUDA does nothing more in this process; `what` was being measured."""
    try:
        yield
    except RuntimeError as error:
        if is_sticky(error):
            raise ContextLost(f"{what} broke the CUDA context ({error}); run `nsa-sel tune` again to go on") from error
        raise


class Measurements(RowFile):
    """The measurements of one file of the cache folder. Only the process that holds the lock may measure; others only look.

    Args:
        path: JSON lines.
        fields: what identifies a row.

    Raises:
        ConfigError: the file or its folder is not the user's own.
    """

    def __init__(self, path: Path, fields: Sequence[str] = IDENTITY) -> None:
        with usable_folder():
            super().__init__(path, lambda row: json.dumps([row.get(field) for field in fields]), strict=False, owner_only=True)
        self.begun = path.with_suffix(".begun")  # outlives a process that dies, and counts how often

    def measure(self, row: Row, measure_one: Callable[[Row], Row]) -> Row:
        """The row with what `measure_one` returns, or with its `error`: from the file, or measured now and kept.

        Raises:
            ContextLost: counts as a death of the process.
        """
        if row in self:
            return self[row]
        deaths = self._deaths(row)
        if deaths >= DEATHS:
            return self.add({**row, "error": f"the process died {deaths} times while it was measured"})
        self._begin(row, deaths)
        try:
            found = measure_one(row)
        except ContextLost:
            raise
        except Exception as error:
            found = {"error": first_line(error)}
        except BaseException:  # Ctrl-C is no death
            self.begun.unlink(missing_ok=True)
            raise
        return self.add({**row, **found})

    def _begin(self, row: Row, deaths: int) -> None:
        with open(private.opened(self.begun, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.truncate()
            file.write(json.dumps({"of": self.key(row), "deaths": deaths + 1}).encode())
            file.flush()
            os.fsync(file.fileno())

    def _deaths(self, row: Row) -> int:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(private.read(self.begun))
            if found["of"] == self.key(row):
                return int(found["deaths"])
        return 0


def collect(run: Run, suffix: str, wanted: Sequence[Row], measure_one: Callable[[Row], Row]) -> list[Row]:
    """Measure the rows that are missing, until the run is over; all wanted rows that are in the file then.

    Args:
        run: the caller holds the lock.
        suffix: of the file of rows.
        wanted: rows with the fields of IDENTITY.
        measure_one: what it returns is added to the row.

    Raises:
        ContextLost: a kernel broke the CUDA context.
    """
    named = {field: getattr(run.stamp, field) for field in ("device", "driver", "torch", "triton", "nsa_sel", "kernels")}
    facts = {**named, "commit": os.environ.get(COMMIT_FLAG), "command": environment.command()}
    rows = Measurements(beside(run.stamp, suffix))
    rows.mend()
    for number, row in enumerate(wanted):
        if row in rows:
            continue
        if run.is_over():
            break
        run.tell(f"{row['case']} {row['direction']} {row['backend']}", number / len(wanted))
        rows.measure({**row, **facts}, measure_one)
    return rows.of(wanted)
