"""Helpers of the tuning tests: facts of an absent GPU, jobs, times that need no GPU, and files as `nsa-sel tune` writes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import msgspec
import pytest
import torch

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune import calls, command, kernel_configs, tuned_file
from nsa_sel.bench.tune.cost_fit import BACKENDS, TERMS, case_of, model_of, phase_of, request_of, sharing_of
from nsa_sel.bench.tune.kernel_configs import Times
from nsa_sel.bench.tune.search_space import Case, Job, jobs
from nsa_sel.core.request import DeviceInfo
from nsa_sel.policies.cost import work_of
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for, shipped_configs
from nsa_sel.settings.schema import KernelConfig
from nsa_sel.settings.tuned import Key, Result, Stamp, Timed, TunedFile
from tests.helpers.policy_cases import H200

CASE = Case(128, 128, 16, 1024)
SLOW = (10.0, 9.9, 10.1)
FORWARD = "triton-group/forward-blocks"
OTHER = KernelConfig(32, 2, 3, loads="tma")


def some_jobs() -> list[Job]:
    """Quick jobs of triton-group for the H200, which is not here."""
    return jobs(settings_for(H200), 90, (CASE,), "triton-group", None, True)


def one_problem_job() -> Job:
    job = some_jobs()[0]
    return job._replace(problems=job.problems[:1])


def ms(median: float, spread: float = 0.01) -> Times:
    """A median with its 20th and 80th percentile."""
    return median, (1 - spread) * median, (1 + spread) * median


def times(job: Job, problem: str, config: KernelConfig) -> Times:
    """The same for a config whenever it is asked for: 10 ms for the committed one, 5 to 15 for the others."""
    if config == job.committed:
        return SLOW
    return ms(5 + int(hashlib.sha256(job.config_id(config).encode()).hexdigest()[:4], 16) % 1000 / 100)


def fastest(job: Job) -> KernelConfig:
    """The candidate with the least of `times`."""
    return min(job.candidates, key=lambda config: times(job, "real-blocks", config)[0])


def timed(median: float) -> Row:
    """The same as fields of a row."""
    return dict(zip(("ms_median", "ms_p20", "ms_p80"), ms(median), strict=True))


def sides(row: Row) -> Row:
    """Triton is always twice as fast as packed SDPA."""
    return timed(1.0 if row["backend"] == "triton-group" else 2.0)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, device: DeviceInfo) -> None:
    """`nsa-sel tune` finds this GPU, and measures times of this file on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(command, "device_info", lambda where: device)
    monkeypatch.setattr(kernel_configs, "Runner", lambda where, settings, rep: times)
    monkeypatch.setattr(calls, "Runner", lambda rep=0.0: lambda row: (sides if row["case"].startswith("threshold") else priced)(row))


def json_lines(path: Path) -> list[Row]:
    """The JSON objects of a file, without lines that are none."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def content(stamp: Stamp) -> tuple[TunedFile, tuned.TunedTable]:
    """The user's file, which must be readable."""
    return tuned.parse(tuned.file_of(stamp).read_bytes(), "file")


def key(way: str = "forward", **changes: object) -> Key:
    fields: dict[str, object] = {"backend": "triton-group", "Dk": 128, "Dv": 128, "h": 16, "L": 1024, "dtype": "bfloat16", **changes}
    return Key(direction=way, **fields)  # type: ignore[arg-type]


def result(kernel: str = FORWARD, winner: KernelConfig | None = OTHER, of: Key | None = None) -> Result:
    """One that says that `winner` is twice as fast."""
    committed = settings_for(H200).kernels[kernel]
    top = (Timed(winner, 5.0, 4.9, 5.1),) if winner else ()
    return Result(
        key=of or key(), kernel=kernel, problem="blocks", committed=Timed(committed, *SLOW), winner=winner, verdict="of a test", top=top,
        measured=2, failed=0,
    )  # fmt: skip


def write(*results: Result, device: DeviceInfo = H200, **stamped: object) -> None:
    """The user's file for `device`; `stamped` changes what it says of its environment."""
    stamp = tuned.stamp_of(device)
    path = tuned.file_of(stamp if "kernels" not in stamped else msgspec.structs.replace(stamp, **stamped))
    path.parent.mkdir(parents=True, exist_ok=True)
    tuned_file.write(path, TunedFile(stamp=msgspec.structs.replace(stamp, **stamped), commit=None, results=results))


CHOOSERS = {"choose-cuda": 1.0, "choose-triton": 1.5, "choose-torch": 10.0}  # how slow they are, invented
PRICES = {"launch": 0.02, "compressed": 2.0, "compressed-wide": 3.0, "rows": 0.3, "scores": 0.5}


def priced(row: Row, factor: float = 1.0) -> Row:
    """Return the times that the H200's models predict, `factor` times as long; of choosing what `PRICES` say."""
    if row["distribution"] == cases.CHOICE:
        backward = row["direction"] == "bwd"
        counted = work_of(BACKENDS[row["backend"]], request_of(case_of(row), None, backward), backward, ())
        total = sum(PRICES[term] * counted.get(term, 0.0) for term in TERMS[model_of(row)])
        return timed(factor * CHOOSERS[row["backend"]] * total)
    profile, case, way = shipped_configs()["sm90_h200.yaml"].costs, case_of(row), phase_of(row)
    model, sharing = profile.models[model_of(row)], sharing_of(case)
    amounts = work_of(BACKENDS[row["backend"]], request_of(case, sharing, way == "backward"), way == "backward", sharing)
    return timed(factor * max(model.host, sum(price * amounts.get(term, 0.0) for term, price in model.terms.items())))
