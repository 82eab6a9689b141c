"""The autotune sweep of a hot shape, with times that are given instead of measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_sel.bench.core import store
from nsa_sel.bench.questions import autotune_sweep
from nsa_sel.bench.questions.autotune_sweep import SHAPE, report, sweep, table
from nsa_sel.bench.tune.kernel_configs import Times
from nsa_sel.bench.tune.resume import ContextLost
from nsa_sel.bench.tune.search_space import Case, Job, committed_settings, jobs
from nsa_sel.settings.schema import KernelConfig
from tests.helpers.documents import table_lines
from tests.helpers.policy_cases import H200

FACTS = {"device": "a GPU", "driver": "1", "torch": "2", "triton": "3", "commit": "1102207", "command": "a command"}
SIZES = tuple(Case(128, 128, 8, L) for L in (128, 256, 512))
FOUND = [job for job in jobs(committed_settings(H200), 90, SIZES, "triton-group", None, quick=True) if job.key.way != "decode"]


def measured(job: Job, problem: str, config: KernelConfig) -> Times:
    """The committed config takes 1 ms, the others less by one more percent each; those of two warps fail."""
    if config.num_warps == 2:
        raise RuntimeError("no room\nmore")
    ms = 1 - 0.01 * (config in job.candidates and 1 + job.candidates.index(config))
    return ms, ms * 0.9, ms * 1.1


def test_every_config_of_the_hot_shape_has_a_row_and_the_fastest_are_listed_by_bucket(tmp_path: Path) -> None:
    file, told = tmp_path / "autotune.jsonl", list[str]()
    rows = sweep(FOUND, measured, file, FACTS, told.append, 60)
    assert store.read(file) == rows
    assert len(rows) == sum(1 + len(job.candidates) for job in FOUND)
    assert {row["kernel"] for row in rows} == {f"triton-group/{name}" for name in ("forward", "forward-blocks", "dq", "dq-blocks", "dkdv")}
    assert {(row["h"], row["Dk"], row["Dv"], row["L"], row["bucket"]) for row in rows} == {(8, 128, 128, L, L) for L in (128, 256, 512)}
    assert all(FACTS.items() <= row.items() for row in rows)
    assert {row["error"] for row in rows if "error" in row} == {"RuntimeError: no room"}
    shown = table_lines(table(rows, top=2))
    for job in FOUND:
        mine = [row for row in shown if (row["kernel"], row["L bucket"]) == (job.kernel, str(job.key.L))]
        ranked = [row for row in store.measured(rows) if (row["kernel"], row["L"]) == (job.kernel, job.case.L)]
        assert [float(row["ms"]) for row in mine[:2]] == sorted(row["ms_median"] for row in ranked)[:2]
        committed = job.config_id(job.committed) + " (committed)"
        assert [row["against committed"] for row in mine if row["config"] == committed] in ([], ["1.00x"])
    assert "commit 1102207, `a command`" in report(rows)


def test_a_sweep_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file, told, asked = tmp_path / "autotune.jsonl", list[str](), list[str]()

    def count(job: Job, problem: str, config: KernelConfig) -> Times:
        if len(asked) == 4:
            raise ContextLost("gone")
        asked.append(job.config_id(config))
        return 1.0, 1.0, 1.0

    assert sweep(FOUND[:2], count, file, FACTS, told.append, 0) == []
    assert told == ["time is up: run the command again to resume"]
    with pytest.raises(ContextLost):
        sweep(FOUND[:2], count, file, FACTS, told.append, 60)
    rows = sweep(FOUND[:2], measured, file, FACTS, told.append, 60)
    assert [row["config"] for row in rows[:4]] == asked
    assert [row["ms_median"] for row in rows[:4]] == [1.0] * 4
    assert len({tuple(row[field] for field in (*SHAPE, "config")) for row in rows}) == len(rows) == len(store.read(file))
    again = sweep(FOUND[:2], measured, file, FACTS | {"commit": "another"}, told.append, 60)
    assert len(store.read(file)) == 2 * len(again)


def test_a_sweep_without_a_gpu_or_a_triton_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(autotune_sweep.ArgumentError, match="without a usable GPU"):
        autotune_sweep.main()
    with pytest.raises(autotune_sweep.ArgumentError, match="--backend is 'numba'; allowed: triton-group"):
        autotune_sweep.main(backend="numba")
