"""The command `nsa-sel tune`: the plan of what to measure on a device, the measuring, and both in words."""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

import torch
from tabulate import tabulate

from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune import calls, kernel_configs
from nsa_sel.bench.tune.search_space import CASES, TUNED, Case, Job, committed_settings, jobs
from nsa_sel.bench.tune.tuned_file import Run
from nsa_sel.core import registry
from nsa_sel.core.call import device_info
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ArgumentError, closest
from nsa_sel.settings import tuned
from nsa_sel.settings.schema import DIRECTIONS, Costs, Direction, Settings, Threshold

COSTS_SHARE, COSTS_MINUTES = 1 / 3, 20.0  # of the time, kept for the costs
ANY_GPU = DeviceInfo(kind="cuda", name="any GPU")  # of a dry run without one: the built-in configs, all of the space
KEY_HEADERS = ("Dk/Dv", "h", "L", "dtype", "direction")


class Plan(NamedTuple):
    """Hold the measurements to run on a device."""

    device: DeviceInfo
    settings: Settings
    jobs: list[Job]
    ways: tuple[Direction, ...] = ()  # directions whose thresholds are measured; none if a backend or sizes are asked for
    costs: tuple[Row, ...] = ()  # rows to measure for the cost models, with the configs in force now; none with --quick

    @property
    def note(self) -> str | None:
        """Return why calls will not use the results, if so."""
        off, mode = self.settings.triton_off, self.settings.autotune
        if off is not None and not self.settings.triton_force:
            return f"{off.rule} keeps Triton off on this device: only calls with NSA_TRITON_SEL_FORCE=1 use the results"
        return "the results are ignored: NSA_SEL_AUTOTUNE or runtime.autotune is off" if mode == "off" else None

    def document(self) -> dict[str, Any]:
        """Return the plan for --json. launches: kernel configs to measure, the committed ones included."""
        jobs = [{"key": job.key, "kernel": job.kernel, "problems": job.problems, "launches": 1 + len(job.candidates)} for job in self.jobs]
        costs = [{name: row[name] for name in ("case", "direction", "backend")} for row in self.costs]
        launches, most = sum(1 + len(job.candidates) for job in self.jobs), sum(job.most for job in self.jobs)
        return {"device": self.device, "jobs": jobs, "launches": launches, "most": most, "thresholds": self.ways, "costs": costs}

    def text(self) -> str:
        """Return the plan for a terminal."""
        rows = [(*_key_cells(job.key), job.config_id(job.committed), 1 + len(job.candidates)) for job in self.jobs]
        document, lines = self.document(), [_table(rows, (*KEY_HEADERS, "committed config", "configs")), ""]
        if self.ways:
            lines.append(f"first the threshold of Triton, for {', '.join(self.ways)}")
        lines.append(
            f"{document['launches']} kernel configs to measure on {self.device.name}, on a real and a random problem if a kernel takes many"
            f" rows: at most {document['most']} measurements, less those of earlier runs"
        )
        if self.costs:
            backends, cases = dict.fromkeys(row["backend"] for row in self.costs), {row["case"] for row in self.costs}
            lines.append(f"then {len(self.costs)} times of {', '.join(backends)} on {len(cases)} cases, for the cost models")
        return "\n".join(lines)


class Done(NamedTuple):
    """The results of a run. `costs_left`: rows."""

    report: kernel_configs.Report
    thresholds: dict[Direction, Threshold]
    costs: Costs | None = None
    costs_left: int = 0

    def document(self) -> dict[str, Any]:
        """Return the results for --json."""
        rest = {"thresholds": self.thresholds, "costs": self.costs, "costs_left": self.costs_left}
        return {**self.report._asdict(), "file": str(self.report.file), **rest}

    def text(self) -> str:
        """Return the results for a terminal."""
        report, rows, lines = self.report, [], []
        for way, found in self.thresholds.items():
            least = "undecided, the earlier threshold stays" if found.value is None else f"Triton from L = {found.value} on"
            sides = (
                f"{side.backend} {side.ms_median:.3g} ms ({side.ms_p20:.3g} to {side.ms_p80:.3g})" for side in (found.triton, found.packed)
            )
            lines.append(f"{way}: {least}; closest, {found.closest}: {' against '.join(sides)}")
        for result in report.results:
            config = (result.winner or result.committed.config).config_id(result.kernel)
            rows.append((*_key_cells(result.key), config, result.problem, result.verdict))
        winners = {(result.key, result.kernel): result.winner for result in report.results}
        won = sum(winner is not None for winner in winners.values())
        lines += ["", _table(rows, (*KEY_HEADERS, "config", "problem", "verdict")), ""]
        lines.append(f"{report.taken} measurements taken; {won} of {len(winners)} kernels have a config of their own: {report.file}")
        lines += [f"passed over: {skipped}" for skipped in report.skipped]
        if self.costs:
            models = [
                (name, found.rows, f"{found.median_error:.1%}", f"{found.worst_error:.1%}") for name, found in self.costs.models.items()
            ]
            lines += ["", _table(models, ("cost model", "rows", "median error", "worst")), "", f"costs: {self.costs.provenance}"]
        left = [f"{count} {what}" for count, what in ((report.left, "kernels"), (self.costs_left, "times for the costs")) if count]
        if left:
            lines.append(f"time is up, {' and '.join(left)} are left: run the command again to continue")
        return "\n".join(lines)


def plan(backend: str | None, way: Direction | None, sizes: dict[str, Any], *, quick: bool, dry_run: bool) -> Plan:
    """Return what to measure on this machine's current GPU.

    Args:
        backend: only this backend; None: all.
        way: only this direction; None: all.
        sizes: to tune for, by the names of `Case`, L a list; None: that of the first default case. Without any, the default
            cases.
        quick: only configs near the committed ones, of one case, and no costs.
        dry_run: on a machine without a GPU, plan for any GPU.

    Raises:
        ArgumentError: a bad option, or no GPU to measure on.
    """
    if backend is not None and backend not in TUNED:
        close = closest(backend, TUNED)
        value = f"{backend!r} (did you mean {close}?)" if close else repr(backend)
        raise ArgumentError("--backend", value, ", ".join(TUNED), "name a Triton backend: the others have no kernel configs")
    if sizes["dtype"] == "float64":
        raise ArgumentError("--dtype", "float64", "float16, bfloat16, float32", "Triton backends take no float64 on a GPU")
    here = torch.cuda.is_available()
    if not dry_run:
        if not here:
            value = "on a machine without a usable GPU"
            raise ArgumentError("nsa-sel tune", value, "a CUDA device", "Triton needs a GPU; --dry-run lists the work")
        for reason in registry.missing(backend or TUNED[0]):
            raise ArgumentError(reason.field, reason.actual, str(reason.required), reason.remedy)
    cases: tuple[Case, ...] = CASES[:1] if quick else CASES
    given = {name: value for name, value in sizes.items() if value}
    if given:
        cases = tuple(Case(**{**CASES[0]._asdict(), **given, "L": L}) for L in given.get("L", [CASES[0].L]))
    device = device_info(torch.device("cuda", torch.cuda.current_device())) if here else ANY_GPU
    settings = committed_settings(device)
    found = jobs(settings, device.sm, cases, backend, way, quick)
    if not found:
        raise ArgumentError("--direction", repr(way), "one that the backend has kernel configs for", "see `nsa-sel tune --dry-run`")
    ways = () if backend or given else DIRECTIONS if way is None else (way,)
    return Plan(device, settings, found, ways, () if quick else tuple(calls.wanted(device, ways)))


def measure(chosen: Plan, minutes: float, quick: bool, tell: Any) -> Done:
    """Run the plan on this GPU; later calls of this process use the results.

    Thresholds come first: they are few, and let Triton run at all. Costs come last, because they are measured with the
    winning configs; a third of the time, at most `COSTS_MINUTES`, is kept for them. The next run measures what time
    cuts off.

    Args:
        chosen: the plan.
        minutes: the time limit.
        quick: time each config for `QUICK_REP` instead of `REP`.
        tell: called with what is measured and the share that is done.

    Raises:
        ArgumentError, ConfigError, ContextLost: as `kernel_configs.tune`.
    """
    device, rep = torch.device("cuda", torch.cuda.current_device()), kernel_configs.QUICK_REP if quick else kernel_configs.REP
    run = Run(tuned.stamp_of(chosen.device), tell, monotonic() + 60 * minutes)
    try:
        found = calls.measure_thresholds(run, calls.Runner(rep=rep), chosen.ways) if chosen.ways else {}
        kept = min((run.deadline - monotonic()) * COSTS_SHARE, 60 * COSTS_MINUTES) if chosen.costs else 0.0
        until_costs = run._replace(deadline=run.deadline - kept)
        report = kernel_configs.tune(until_costs, chosen.jobs, kernel_configs.Runner(device, chosen.settings, rep))
        costs, left = calls.measure_costs(run, chosen.device, calls.Runner(), chosen.ways) if chosen.costs else (None, 0)
        return Done(report, found, costs, left)
    finally:
        tuned.forget()


def _table(rows: list[tuple[Any, ...]], headers: tuple[str, ...]) -> str:
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)


def _key_cells(key: tuned.Key) -> tuple[str, ...]:
    return f"{key.Dk}/{key.Dv}", f"<={key.h}", f"<={key.L}", key.dtype, key.direction
