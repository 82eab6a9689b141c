"""What `nsa-sel tune` does: which jobs, on which device, and its report in words."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import msgspec
import torch
from tabulate import tabulate

from nsa_sel.attention import forget_decisions
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune import tune_costs, tune_rows, tune_thresholds
from nsa_sel.bench.tune.tune import Journal, Report, journal_of, run, using_folder
from nsa_sel.bench.tune.tune_space import CASES, SPACES, Case, Job, jobs
from nsa_sel.core import registry
from nsa_sel.core.call import device_info
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ArgumentError, ConfigError
from nsa_sel.settings import tuned
from nsa_sel.settings.config import COMMIT_FLAG, WAYS, Costs, Settings, Threshold, Way, profile_for, settings_for, shipped_configs
from nsa_sel.settings.tuned import Stamp

COSTS_SHARE, COSTS_MINUTES = 1 / 3, 20.0
REP, QUICK_REP = 20.0, 10.0  # ms of timed calls a launch
QUICK_MINUTES = 5.0  # of a backend's light tuning at a warm-up
TUNED = tuple(dict.fromkeys(space.kernel.split("/")[0] for space in SPACES))
ANY_GPU = DeviceInfo(kind="cuda", name="any GPU")  # of a dry run without one: the built-in launches, all of the space


class Sizes(NamedTuple):
    """What the command line asks for; nothing at all: the cases of bench/tune/tune_space.py."""

    L: list[int] | None = None
    h: int | None = None
    Dk: int | None = None
    Dv: int | None = None
    dtype: str | None = None


class Done(NamedTuple):
    """What a run found. `page`: the report, or why there is none."""

    report: Report
    thresholds: dict[Way, Threshold]
    costs: Costs | None = None
    costs_left: int = 0  # of their rows
    page: Path | str | None = None

    def document(self) -> dict[str, Any]:
        """For --json."""
        rest = {"thresholds": self.thresholds, "costs": self.costs, "costs_left": self.costs_left, "page": self.page and str(self.page)}
        return {**self.report._asdict(), "file": str(self.report.file), **rest}


class Plan(NamedTuple):
    """The jobs for a device; `known` measurements are in the journal already."""

    device: DeviceInfo
    settings: Settings
    jobs: list[Job]
    known: int
    ways: tuple[Way, ...] = ()  # whose thresholds are measured: where neither backend nor sizes are asked for
    costs: tuple[Row, ...] = ()  # rows to measure for them, as launches are now; not with --quick
    costs_known: int = 0

    @property
    def launches(self) -> int:
        """To measure, the committed ones included."""
        return sum(1 + len(job.candidates) for job in self.jobs)

    @property
    def most(self) -> int:
        """Measurements of launches, at most: those that lose on the first problem are not measured on the second."""
        return sum(job.most for job in self.jobs)

    @property
    def note(self) -> str | None:
        """What keeps the launches from being used."""
        off, mode = self.settings.triton_off, self.settings.autotune
        if off is not None and not self.settings.triton_force:
            return f"{off.rule} keeps Triton off on this device: what is found serves calls with NSA_TRITON_SEL_FORCE=1 alone"
        return "what is found is ignored: NSA_SEL_AUTOTUNE or runtime.autotune is off" if mode == "off" else None

    def document(self) -> dict[str, Any]:
        """For --json."""
        listed = [
            {"key": job.key, "kernel": job.kernel, "problems": job.problems, "launches": 1 + len(job.candidates)} for job in self.jobs
        ]
        costs = [{name: row[name] for name in ("case", "direction", "backend")} for row in self.costs]
        rest = {"thresholds": self.ways, "costs": costs, "costs_known": self.costs_known}
        counted = {"launches": self.launches, "most": self.most, "known": self.known}
        return {"device": self.device, "jobs": listed, **counted, **rest}

    def text(self) -> str:
        """For a terminal."""
        rows = [(*_key_cells(job), job.launch_id(job.committed), 1 + len(job.candidates)) for job in self.jobs]
        table = tabulate(rows, headers=[*KEY_HEADERS, "committed launch", "launches"], tablefmt="simple", disable_numparse=True)
        first = f"first the least L of Triton, for {', '.join(self.ways)}; then " if self.ways else ""
        launches = (
            f"{self.launches} launches to measure on {self.device.name}, on a real and a random problem where a kernel takes many rows: at"
            f" most {self.most} measurements, {self.known} of them known from earlier runs"
        )
        lines = [table, "", first + launches]
        if self.costs:
            backends, of = dict.fromkeys(row["backend"] for row in self.costs), {row["case"] for row in self.costs}
            lines.append(
                f"then, with the launches that won, {len(self.costs)} times of {', '.join(backends)} on {len(of)} cases, for the costs by"
                f" which backends are chosen, {self.costs_known} of them known; then the report"
            )
        return "\n".join(lines)


KEY_HEADERS = ("Dk/Dv", "h", "L", "dtype", "direction")


def _key_cells(job: Job) -> tuple[str, ...]:
    key = job.key
    return f"{key.Dk}/{key.Dv}", f"<={key.h}", f"<={key.L}", key.dtype, key.way


def plan(backend: str | None, way: Way | None, sizes: Sizes, *, quick: bool, dry_run: bool) -> Plan:
    """The jobs on this machine's current GPU; a dry run without one lists those of any. Raises ArgumentError for a bad option, and
    where there is no GPU to measure on."""
    if backend is not None and backend not in TUNED:
        raise ArgumentError("--backend", repr(backend), ", ".join(TUNED), "name a Triton backend: the others have no launches")
    here = torch.cuda.is_available()
    if not here and not dry_run:
        raise ArgumentError(
            "nsa-sel tune", "on a machine without a usable GPU", "a CUDA device", "Triton needs a GPU; --dry-run lists the work"
        )
    lacking = registry.missing(backend or TUNED[0])
    if lacking and not dry_run:
        raise ArgumentError(lacking[0].field, lacking[0].actual, str(lacking[0].required), lacking[0].remedy)
    device = device_info(torch.device("cuda", torch.cuda.current_device())) if here else ANY_GPU
    settings = committed_settings(device)
    found = jobs(settings, device.sm, _cases(sizes, quick), backend, way, quick)
    if not found:
        raise ArgumentError("--direction", repr(way), "one that the backend has launches for", "see `nsa-sel tune --dry-run`")
    ways = () if backend or any(sizes) else WAYS if way is None else (way,)
    costs = () if quick else tuple(tune_costs.wanted(device, ways))
    known = (_known(device, found), _costs_known(device, costs)) if here else (0, 0)
    return Plan(device, settings, found, known[0], ways, costs, known[1])


def committed_settings(device: DeviceInfo) -> Settings:
    """The settings with the committed launches, whatever the file of NSA_SEL_CONFIG says of them: winners must beat these."""
    profile = profile_for(device)
    layers = [shipped_configs()["base.yaml"], *(config for _, config in (profile.layers if profile else ()))]
    kernels = {name: config for layer in layers for name, config in layer.kernels.items()}
    return msgspec.structs.replace(settings_for(device), kernels=kernels)


def _cases(sizes: Sizes, quick: bool) -> tuple[Case, ...]:
    if not any(sizes):
        return CASES[:1] if quick else CASES
    if sizes.dtype == "float64":
        raise ArgumentError("--dtype", sizes.dtype, "float16, bfloat16, float32", "Triton backends take no float64 on a GPU")
    first = CASES[0]
    return tuple(
        Case(sizes.Dk or first.Dk, sizes.Dv or first.Dv, sizes.h or first.h, L, sizes.dtype or first.dtype) for L in sizes.L or [first.L]
    )


def _known(device: DeviceInfo, found: list[Job]) -> int:
    journal = Journal(journal_of(tuned.stamp_of(device)), mend=False)
    launches = ((job, problem, config) for job in found for problem in job.problems for config in (job.committed, *job.candidates))
    return sum(journal.known(*launch) is not None for launch in launches)


def _costs_known(device: DeviceInfo, costs: Sequence[Row]) -> int:
    known = tune_rows.read(tune_costs.rows_of(tuned.stamp_of(device)))
    return sum(tune_rows.key(row) in known for row in costs)


def measure(chosen: Plan, minutes: float, quick: bool, tell: Callable[[str, float], None]) -> Done:
    """Run the plan on this GPU; later calls of this process use what was found.

    Thresholds come first: they are few, and let Triton run at all. Costs come last, because the launches that win are what they
    measure; a third of the time, at most `COSTS_MINUTES`, is kept for them. What time cuts off is measured by the next run.
    """
    from nsa_sel.bench.tune.tune_runner import Runner, timer  # loads Triton when it is first used

    deadline = monotonic() + 60 * minutes
    device, stamp = torch.device("cuda", torch.cuda.current_device()), tuned.stamp_of(chosen.device)
    time, commit = timer(QUICK_REP if quick else REP), os.environ.get(COMMIT_FLAG)
    try:
        thresholds = {}
        if chosen.ways:
            sides = tune_thresholds.Runner(device, chosen.settings, time)
            thresholds = tune_thresholds.run(stamp, sides, chosen.ways, tell, deadline - monotonic())
        runner, left = Runner(device, chosen.settings, time), deadline - monotonic()
        kept = min(left * COSTS_SHARE, 60 * COSTS_MINUTES) if chosen.costs else 0.0
        report = run(chosen.jobs, stamp, runner, commit=commit, tell=tell, seconds=left - kept)
        costs, costs_left = None, 0
        if chosen.costs:
            costs = tune_costs.run(stamp, chosen.device, tune_costs.Runner(), chosen.ways, tell, deadline - monotonic())
            again = tune_costs.wanted(chosen.device, chosen.ways)
            costs_left = len(again) - _costs_known(chosen.device, again)
        return Done(report, thresholds, costs, costs_left, _page(stamp, tell) if chosen.ways else None)
    finally:
        tuned.forget()
        forget_decisions()


def _page(stamp: Stamp, tell: Callable[[str, float], None]) -> Path | str:
    """Write what `nsa-sel report` makes of the user's rows, in a folder beside the file; its path, or why there is none."""
    from nsa_sel.bench.report import report as reporting  # loads matplotlib

    tell("the report", 1.0)
    tuned.forget()  # it shows what the policy picks now
    forget_decisions()
    folder = tuned.file_of(stamp).with_suffix(".report")
    files = [file for file in (tune_costs.rows_of(stamp), tune_thresholds.rows_of(stamp)) if file.exists()]
    try:
        with using_folder():
            reporting.write(files, folder)
    except (ArgumentError, ConfigError) as error:
        return str(error)
    return folder / reporting.DOCUMENT


def tune_quickly(device: torch.device, facts: DeviceInfo, case: Case, backend: str) -> Done:
    """The light tuning of a warm-up: launches next to the committed ones, for one case and backend."""
    settings = committed_settings(facts)
    found = jobs(settings, facts.sm, (case,), backend, None, quick=True)
    with torch.cuda.device(device):
        return measure(Plan(facts, settings, found, 0), QUICK_MINUTES, True, lambda what, done: None)


def text(done: Done) -> str:
    """What was done, for a terminal."""
    report, rows = done.report, []
    for result in report.results:
        key = result.key
        launch = result.winner.config_id(result.kernel) if result.winner else result.committed.config.config_id(result.kernel)
        rows.append((f"{key.Dk}/{key.Dv}", f"<={key.h}", f"<={key.L}", key.dtype, key.way, launch, result.problem, result.verdict))
    table = tabulate(rows, headers=[*KEY_HEADERS, "launch", "problem", "verdict"], tablefmt="simple", disable_numparse=True)
    kernels = {(result.key, result.kernel): result.winner for result in report.results}
    won = sum(winner is not None for winner in kernels.values())
    lines = [f"{way}: {_words(found)}" for way, found in done.thresholds.items()]
    lines += [
        "",
        table,
        "",
        f"{report.taken} measurements taken; {won} of {len(kernels)} kernels have a launch of their own: {report.file}",
    ]
    lines += [f"passed over: {skipped}" for skipped in report.skipped]
    if done.costs:
        lines += ["", _costs_table(done.costs), "", f"costs: {done.costs.provenance}"]
    if report.left or done.costs_left:
        left = [(report.left, "kernels"), (done.costs_left, "times for the costs")]
        words = " and ".join(f"{count} {what}" for count, what in left if count)
        lines.append(f"time is up, {words} are left: run the command again to go on")
    if done.page is not None:
        lines.append(f"report: {done.page}" if isinstance(done.page, Path) else f"no report: {done.page}")
    return "\n".join(lines)


def _costs_table(costs: Costs) -> str:
    rows = [(name, model.rows, f"{model.median_error:.1%}", f"{model.worst_error:.1%}") for name, model in costs.models.items()]
    return tabulate(rows, headers=["cost model", "rows", "median error", "worst"], tablefmt="simple", disable_numparse=True)


def _words(found: Threshold) -> str:
    sides = [f"{side.backend} {side.ms_median:.3g} ms ({side.ms_p20:.3g} to {side.ms_p80:.3g})" for side in (found.triton, found.packed)]
    least = "undecided, the least L of Triton stays" if found.value is None else f"Triton from L = {found.value} on"
    return f"{least}; closest, {found.closest}: {' against '.join(sides)}"
