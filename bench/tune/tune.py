"""Measure the launches of each job, keep every measurement, and write what won: `nsa-sel tune` without the GPU and the terminal.

A journal beside the file takes each measurement as soon as it is known, so that a run that is killed goes on where it stopped. A launch
is judged by its whole direction on all problems of its kernel, a real and a random one where it handles many rows. It wins when it is
faster than the committed one by the geometric mean of the ratios of medians, spreads apart (80th percentile below the other's 20th)
on one problem or more, and slower with spreads apart on none: what makes text faster must not cost those whose rows share little. Twice:
the second round measures both again, because the best of many noisy numbers is often luck.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from nsa_sel.attention import STICKY
from nsa_sel.bench.core import store
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune.tune_space import Job
from nsa_sel.errors import ArgumentError, ConfigError, NsaSelError
from nsa_sel.settings import private, tuned
from nsa_sel.settings.config import CACHE_FLAG, KernelConfig
from nsa_sel.settings.tuned import Key, Result, Stamp, Timed, TunedFile

TOP = 5  # launches that a result records
DEATHS = 3  # of the process while it measured one launch, after which the launch is passed over

Round = dict[KernelConfig, Timed]  # what was measured on one problem
Times = tuple[float, float, float]  # median, 20th and 80th percentile, ms
Measure = Callable[[Job, str, KernelConfig], Times]  # on a problem of the job; checks parity too; raises for what can't run or is wrong


class ContextLost(NsaSelError, RuntimeError):
    """A launch broke the CUDA context: this process can measure nothing more."""


@contextlib.contextmanager
def watched(what: str) -> Iterator[None]:
    """ContextLost in place of an error after which CUDA does nothing more in this process; `what` was being measured."""
    try:
        yield
    except RuntimeError as error:
        if any(text in str(error) for text in STICKY):
            raise ContextLost(f"{what} broke the CUDA context ({error}); run `nsa-sel tune` again to go on") from error
        raise


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the journal: a launch was begun, measured, failed, or left by the user (Ctrl-C)."""

    key: Key
    kernel: str
    problem: str
    rival: KernelConfig | None  # None: the first round; else the launch that this and the committed one are measured again for
    config: KernelConfig
    state: Literal["started", "measured", "failed", "left"]
    times: Times | None = None
    error: str | None = None


class Place(NamedTuple):
    """One launch in one round."""

    key: Key
    kernel: str
    problem: str
    rival: KernelConfig | None
    config: KernelConfig


class Measured(NamedTuple):
    """What is known of one launch in one round."""

    times: Times | None
    error: str | None


class Report(NamedTuple):
    """What a run did."""

    file: Path
    results: tuple[Result, ...]  # of the jobs that are done
    left: int  # jobs
    taken: int  # measurements of this run, failures included
    skipped: tuple[str, ...]  # jobs whose committed launch can't be measured, and why


def journal_of(stamp: Stamp) -> Path:
    """Beside the file, for the same environment."""
    return tuned.file_of(stamp).with_suffix(".jsonl")


@contextlib.contextmanager
def using_folder() -> Iterator[None]:
    """ConfigError in place of the OSError of a cache folder that can't be used: a full disk, or files of somebody else."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = f"{error.strerror}; {'make room, or ' if full else ''}set {CACHE_FLAG} to one"
        raise ConfigError("the cache folder", str(tuned.cache_folder()), "a folder of your own that can be written", remedy) from error


@contextlib.contextmanager
def locked(stamp: Stamp) -> Iterator[None]:
    """Held by one process at a time; ends with the process, however it ends. ConfigError where the cache folder can't be written."""
    path = tuned.file_of(stamp).with_suffix(".lock")
    with using_folder():
        private.make_folder(path.parent)
        descriptor = private.opened(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode() or "unknown"
            raise ArgumentError(
                "nsa-sel tune", f"running already for this GPU and environment, as process {holder}", "one at a time", "wait for it to end"
            ) from error
        except OSError as error:
            words = f"{error.strerror}: set {CACHE_FLAG} to a folder on a local disk"
            raise ConfigError("the cache folder", str(path.parent), "a file system with locks", words) from error
        with using_folder():
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
    finally:
        os.close(descriptor)


def kept(path: Path) -> bytes:
    """What `keep` wrote; nothing where there is no file. Raises ConfigError for one that is not the user's own."""
    with using_folder(), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return private.read(path)
    return b""


def keep(path: Path, row: Row) -> None:
    """Add a row to a file of the user's own, whole or not at all; it is on disk when this returns. Raises OSError."""
    descriptor = private.opened(path, os.O_RDWR | os.O_CREAT)
    try:
        before = os.fstat(descriptor).st_size
        try:
            store.append(path, [row])
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


class Journal:
    """The measurements so far. The process that holds the lock mends a torn last line; others only look."""

    def __init__(self, path: Path, mend: bool = True) -> None:
        self.path, self.mend = path, mend
        self.found: dict[Place, Measured] = {}
        self.begun: Counter[Place] = Counter()
        self.unreadable = 0
        self._read()

    def _read(self) -> None:
        data = kept(self.path)
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data) and self.mend:  # a process was killed, or the disk was full, within a line
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.unreadable += 1
                continue
            self._take(entry)

    def _take(self, entry: Entry) -> None:
        at = Place(entry.key, entry.kernel, entry.problem, entry.rival, entry.config)
        if entry.state in ("started", "left"):
            self.begun[at] += 1 if entry.state == "started" else -1
        else:
            self.found[at] = Measured(entry.times, entry.error)

    def _write(self, entry: Entry) -> None:
        keep(self.path, msgspec.to_builtins(entry))
        self._take(entry)

    def known(self, job: Job, problem: str, config: KernelConfig, rival: KernelConfig | None = None) -> Measured | None:
        """What was found before; a launch that the process died of is not tried for ever."""
        at = Place(job.key, job.kernel, problem, rival, config)
        if at not in self.found and self.begun[at] >= DEATHS:
            return Measured(None, f"the process died {self.begun[at]} times while it was measured")
        return self.found.get(at)

    def measure(self, job: Job, problem: str, config: KernelConfig, rival: KernelConfig | None, measure: Measure) -> Measured:
        """What is known, or is measured now and kept. What fails is kept too; ContextLost is passed on."""
        known = self.known(job, problem, config, rival)
        if known is not None:
            return known
        at = Place(job.key, job.kernel, problem, rival, config)._asdict()
        self._write(Entry(**at, state="started"))
        try:
            times = measure(job, problem, config)
        except Exception as error:
            words = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self._write(Entry(**at, state="failed", error=words))
            if isinstance(error, ContextLost):
                raise
            return Measured(None, words)
        except BaseException:
            self._write(Entry(**at, state="left"))
            raise
        self._write(Entry(**at, state="measured", times=times))
        return Measured(times, None)


def run(
    jobs: Sequence[Job],
    stamp: Stamp,
    measure: Measure,
    *,
    commit: str | None = None,
    tell: Callable[[str, float], None] = lambda what, done: None,
    seconds: float = float("inf"),
) -> Report:
    """Measure what is not known yet, and write the file after every job. `tell` is given what is going on and the share that is done.

    Stops after `seconds`, between two measurements. Raises ArgumentError where another process tunes, ConfigError where the cache folder
    can't be written, ContextLost where a launch broke the CUDA context; whatever was measured is kept.
    """
    deadline = time.monotonic() + seconds
    with locked(stamp):
        journal, path = Journal(journal_of(stamp)), tuned.file_of(stamp)
        results: dict[tuple[Key, str], list[Result]] = {}
        for result in written(stamp).results:
            results.setdefault((result.key, result.kernel), []).append(result)
        taken, skipped, done = 0, [], []
        total = sum(job.most for job in jobs) or 1
        begun = passed = 0

        def timed(job: Job, problem: str, config: KernelConfig, rival: KernelConfig | None) -> Measured | None:
            """None: no time is left."""
            nonlocal taken, passed
            if journal.known(job, problem, config, rival) is None:
                if time.monotonic() >= deadline:
                    return None
                taken += 1
                tell(job.launch_id(config), passed / total)
            passed += rival is None
            return journal.measure(job, problem, config, rival, measure)

        for job in jobs:
            outcome = _tune(job, timed)
            begun += job.most
            passed = begun
            if outcome is None:
                continue
            if isinstance(outcome, str):
                skipped.append(f"{job.launch_id(job.committed)}: {outcome}")
                continue
            done.append(outcome)
            results[job.key, job.kernel] = outcome
            rewrite(stamp, commit=commit, results=tuple(result for found in results.values() for result in found))
    found = tuple(result for outcome in done for result in outcome)
    return Report(path, found, len(jobs) - len(done) - len(skipped), taken, tuple(skipped))


def _tune(job: Job, timed: Callable[[Job, str, KernelConfig, KernelConfig | None], Measured | None]) -> list[Result] | str | None:
    """The result of each problem, with the one winner; why there is none; or None where time ran out.

    A problem that the committed launch can't be measured on, for want of memory, does not judge. A launch that fails or is slower on
    one, spreads apart, can't win: it is not measured on the next.
    """
    first: dict[str, Round] = {}
    lacking, failed, left = [], Counter[str](), list(job.candidates)
    for problem in job.problems:
        committed = timed(job, problem, job.committed, None)
        if committed is None:
            return None
        if committed.times is None:
            lacking.append(f"{problem}: {committed.error}")
            continue
        first[problem] = {job.committed: Timed(job.committed, *committed.times)}
        for config in left:
            found = timed(job, problem, config, None)
            if found is None:
                return None
            if found.times is None:
                failed[problem] += 1
            else:
                first[problem][config] = Timed(config, *found.times)
        left = [config for config in left if config in first[problem] and not _loses(first[problem], config, job.committed)]
    if not first:
        return "; ".join(lacking)
    ahead = [config for config in left if _ahead(first, config, job.committed)]
    winner, second = None, dict[str, Round]()
    verdict = "the committed launch stays: no other is faster with its spread"
    if ahead:
        best = max(ahead, key=lambda config: _gain(first, config, job.committed))
        for problem in reversed(first):
            again = {config: timed(job, problem, config, best) for config in (job.committed, best)}
            if None in again.values():
                return None
            second[problem] = {config: Timed(config, *found.times) for config, found in again.items() if found and found.times}
        verdict = f"the committed launch stays: {job.launch_id(best)} was faster in one of two rounds"
        if all(len(round_) == 2 for round_ in second.values()) and _ahead(second, best, job.committed):
            winner = best
    results = []
    for problem, timings in first.items():
        if winner:
            verdict = _victory([first, second], problem, winner, job.committed)
        fastest = sorted(timings.values(), key=lambda launch: launch.ms_median)
        top = [launch for place, launch in enumerate(fastest) if place < TOP or launch.config == winner]
        results.append(
            Result(
                key=job.key, kernel=job.kernel, problem=problem, committed=timings[job.committed], winner=winner,
                verdict="; ".join((verdict, *(f"not judged on {words}" for words in lacking))), top=tuple(top), measured=len(timings),
                failed=failed[problem],
            )
        )  # fmt: skip
    return results


def _victory(both: Sequence[dict[str, Round]], problem: str, winner: KernelConfig, committed: KernelConfig) -> str:
    """A winner's gains in both rounds, on one problem and over all of them."""
    each = " and ".join(f"{_gain({problem: found[problem]}, winner, committed):.3g}x" for found in both)
    if len(both[0]) == 1:
        return f"{each} faster, in two rounds"
    over = " and ".join(f"{_gain(found, winner, committed):.3g}x" for found in both)
    return f"{each} as fast, over {len(both[0])} problems {over} faster, in two rounds"


def _gain(rounds: dict[str, Round], config: KernelConfig, committed: KernelConfig) -> float:
    """How many times faster a launch is than the committed one: the geometric mean over the problems."""
    return math.prod(found[committed].ms_median / found[config].ms_median for found in rounds.values()) ** (1 / len(rounds))


def _loses(found: Round, config: KernelConfig, committed: KernelConfig) -> bool:
    return apart(found[committed], found[config])


def _ahead(rounds: dict[str, Round], config: KernelConfig, committed: KernelConfig) -> bool:
    """The rule of one round: faster by the mean, with its spread on a problem or more, and slower with its spread on none."""
    surely = any(apart(found[config], found[committed]) for found in rounds.values())
    return surely and _gain(rounds, config, committed) > 1 and not any(_loses(found, config, committed) for found in rounds.values())


def apart(fast: Timed, slow: Timed) -> bool:
    """Whether one is faster and the spreads do not overlap."""
    return fast.ms_p80 < slow.ms_p20


def written(stamp: Stamp) -> TunedFile:
    """What earlier runs wrote; a file that can't be read is made anew, from the journal."""
    path = tuned.file_of(stamp)
    try:
        return tuned.parse(private.read(path), path.name)[0]
    except (OSError, ConfigError):
        return TunedFile(stamp=stamp, commit=None)


def rewrite(stamp: Stamp, **changes: Any) -> None:
    """Replace some parts of the file; only for the process that holds the lock."""
    write(tuned.file_of(stamp), msgspec.structs.replace(written(stamp), **changes))


def write(path: Path, file: TunedFile) -> None:
    """Replace the file at once: readers see the old one or the new one, whenever the machine stops. Raises OSError."""
    private.write(path, json.dumps(msgspec.to_builtins(file), indent=1).encode() + b"\n")
