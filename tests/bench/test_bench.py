"""The benches' pieces, without a GPU: what is measured, on which selections, how rows are checked, and what tables make of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.bench.core import cases, environment, session, store, timing
from nsa_sel.bench.core.cases import Case, layers_of, make_selection, random_selection
from nsa_sel.bench.core.contenders import DENSE, PACKED, dense, named, ours
from nsa_sel.bench.core.parity import WrongResult, is_causal, make_problem, parity, sample
from nsa_sel.bench.core.session import Job, measured_rows, wanted
from nsa_sel.bench.core.timing import Spread
from nsa_sel.bench.questions import one_range, speed
from nsa_sel.bench.questions.speed import QUICK, SUITES, Suite, jobs, suites_of
from nsa_sel.bench.report import summary
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection

TINY = Case("tiny", "random", 1, 64, 64, 2, 2, 16, 8, 3, 16, "float32")
KEYS = {
    *("case", "distribution", "B", "S", "S_kv", "G", "h", "Dk", "Dv", "n", "block", "dtype", "direction", "backend"),
    *("ms_median", "ms_p20", "ms_p80", "mae", "workspace_bytes", "device", "driver", "torch", "triton", "commit", "command"),
    *("ms_ci_low", "ms_ci_high", "calls", "sm_mhz", "memory_mhz", "temperature_c"),
}


# Cases and their selections


def test_a_name_stands_for_one_case_and_the_first_suite_looks_most_closely() -> None:
    seen: dict[str, tuple[Case, Suite]] = {}
    for suite in SUITES.values():
        for case in suite.cases():
            known, by = seen.setdefault(case.case, (case, suite))
            assert known == case
            assert (by.packed, by.whole, by.rep, by.rows) >= (suite.packed, suite.whole, suite.rep, suite.rows)
            assert by.whole >= suite.whole
    assert {case.S for case, _ in seen.values() if case.distribution == "random"} >= {S * 1024 for S in (8, 16, 32, 64, 128)}


def test_layers_are_all_covered_alone_and_in_batches() -> None:
    found = cases.layer_cases()
    for h in (16, 4, 1):
        alone = [layers_of(case.case) for case in found if case.h == h and case.B == 1]
        batches = [layers_of(case.case) for case in found if case.h == h and case.B == 4]
        assert alone == [[layer] for layer in range(30)]
        assert len(batches) == 8
        assert all(len(set(batch)) == 4 for batch in batches)
        assert {layer for batch in batches for layer in batch} == set(range(30))
    assert {case.case for case in found} >= {"real-8k-layer07-h16", "real-8k-layers28-29-00-01-h1"}
    assert all(layers_of(case.case) == [] for case in (*cases.performance_cases(), *cases.breakeven_cases()))


def test_stacked_layers_are_the_single_ones() -> None:
    by_name = {case.case: case for case in cases.layer_cases()}
    batch = make_selection(by_name["real-8k-layers28-29-00-01-h1"], "cpu").validate()
    assert batch.ranges.shape == (4, 8192, 3, 16, 2)
    for entry, layer in zip(batch.ranges, (28, 29, 0, 1), strict=True):
        assert torch.equal(entry, make_selection(by_name[f"real-8k-layer{layer:02}-h1"], "cpu").ranges[0])
    assert all(not torch.equal(batch.ranges[a], batch.ranges[b]) for a in range(4) for b in range(a))


@pytest.mark.parametrize("S", [1024, 4096])
def test_the_first_rows_of_real_selections_are_selections(S: int) -> None:
    (case,) = (case for case in cases.breakeven_cases() if (case.S, case.h) == (S, 1))
    selection = make_selection(case, "cpu").validate()
    assert torch.equal(selection.ranges, cases.real_selection(4, "cpu").ranges[:, :S])
    start, end = selection.ranges.unbind(-1)
    row = torch.arange(S)[:, None, None]
    assert bool(((start <= row) | (end <= start)).all())  # nothing of the text after these rows
    assert int(end.max()) == S


def test_a_selection_drawn_in_pieces_is_that_of_all_scores_together() -> None:
    case = Case("", "random", 2, 100, 130, 2, 1, 16, 16, 3, 16, "float32")
    blocks, rows = 9, 24
    found = random_selection(case, "cpu", seed=5, at_once=rows * 2 * 2 * blocks).validate()
    generator = torch.Generator().manual_seed(5)
    scores = torch.cat([torch.randn(2, min(rows, 100 - first), 2, blocks, generator=generator) for first in range(0, 100, rows)], 1)
    assert torch.equal(found.ranges, Selection.from_scores(scores, 3, 16, S_kv=130).ranges)


def test_one_draw_serves_up_to_32k_rows() -> None:
    """Selections of committed rows were drawn at once: they stay what they were."""
    for case in (*cases.performance_cases(), *cases.decode_cases(), *cases.threshold_cases()):
        assert case.B * case.S * case.G * -(-case.S_kv // case.block) <= cases.SCORES_AT_ONCE


# What is measured


def test_jobs_follow_suites_backends_and_names() -> None:
    def backends_of(suites: str, backends: str, only: str = "") -> dict[str, list[str]]:
        found = jobs(suites_of(suites, False, "cuda"), named(backends), only)
        return {job.case.case: [contender.name for contender in job.contenders] for job in found}

    every = backends_of("all", ",".join(speed.usual_backends("cuda")))
    ours_on_gpu = ["triton-group", "triton-tile", "triton-block", "cupy-cuda"]
    assert every["real-8k-h16"] == [PACKED, *ours_on_gpu, DENSE]
    assert every["random-64k-h16"] == every["real-8k-layer07-h4"] == [*ours_on_gpu, DENSE]
    assert every["decode-B1-64k-h16"] == every["threshold-decode-D64-L64"] == [PACKED, "triton-group", "cupy-cuda", DENSE]
    assert backends_of("scaling,decode", f"{PACKED},triton-tile", "32k") == {
        **{f"decode-B64-32k-h{h}": [PACKED] for h in (16, 4)},
        **{f"random-32k-h{h}": ["triton-tile"] for h in (16, 4, 1)},
    }
    with pytest.raises(ArgumentError, match=r"--suite is speed; allowed: all, performance"):
        suites_of("speed", False, "cuda")
    with pytest.raises(ArgumentError, match=r"--backends is tritn-tile; allowed: .*triton-tile.*, dense-cudnn"):
        named("numba,tritn-tile")
    with pytest.raises(ArgumentError, match=r"--device is cpu; .*--quick"):
        suites_of("decode", False, "cpu")
    assert [job.case.dtype for job in jobs({"quick": QUICK}, [ours(PACKED)], "", "cpu")] == ["float32"] * 3


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that run the work and know its times and memory beforehand."""

    def milliseconds(work: Callable[[], Any], **_: Any) -> Spread:
        work()
        return Spread(2.0, 1.0, 3.0, 1.5, 2.5, 7)

    monkeypatch.setattr(timing, "milliseconds", milliseconds)
    monkeypatch.setattr(timing, "workspace_bytes", lambda work, device: len(work()))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("NSA_SEL_COMMIT", "abc1234")


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("contender", [ours(PACKED), dense()], ids=lambda contender: contender.name)
@pytest.mark.parametrize("S", [64, 1])
def test_rows_have_the_agreed_keys(contender: Any, S: int) -> None:
    case = TINY._replace(S=S)
    directions = ("fwd", "bwd", "fwd+bwd") if S > 1 else ("decode",)
    job = Job(case, (contender,), directions, 8)
    rows = list(measured_rows(job, wanted(job), environment.stamp(), "cpu", pytest.fail))
    assert [row["direction"] for row in rows] == list(directions)
    for row in rows:
        assert set(row) == KEYS
        assert (row["ms_median"], row["ms_p20"], row["ms_p80"], row["commit"]) == (2.0, 1.0, 3.0, "abc1234")
        assert (row["ms_ci_low"], row["ms_ci_high"], row["calls"]) == (1.5, 2.5, 7)
        assert (row["mae"] is None) == (contender.name == DENSE)
    some = list(measured_rows(job, wanted(job)[:1], {}, "cpu", pytest.fail))
    assert [row["direction"] for row in some] == [directions[0]]


@pytest.mark.usefixtures("untimed")
def test_what_fails_is_told_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    job = Job(TINY, (ours("unheard-of"), ours(PACKED)), ("fwd", "bwd"), 8)
    rows = list(measured_rows(job, wanted(job), {}, "cpu", told.append))
    assert [(row["backend"], row["direction"]) for row in rows] == [(PACKED, "fwd"), (PACKED, "bwd")]
    assert len(told) == 1
    assert told[0].startswith("tiny unheard-of: BackendError: ")

    def wrong(*_: Any, **__: Any) -> None:
        raise WrongResult("dk is not 0")

    monkeypatch.setattr(session, "parity", wrong)
    assert list(measured_rows(job._replace(contenders=(ours(PACKED),)), wanted(job), {}, "cpu", told.append)) == []
    assert told[1:] == ["tiny sdpa-packed: WrongResult: dk is not 0"]
    peer = ours(PACKED)._replace(peer=True)
    rows = list(measured_rows(job._replace(contenders=(peer,)), wanted(job), {}, "cpu", told.append))
    assert [(row["wrong"], row["mae"], row["causal"]) for row in rows] == [("dk is not 0", None, True)] * 2


# Parity


@pytest.mark.parametrize("B", [1, 5])
def test_right_results_pass(B: int) -> None:
    problem = make_problem(case := TINY._replace(B=B), "cpu")
    mae, of_gradients = parity(ours(PACKED).prepare(problem).call, problem, sample(case, problem, 8))
    assert mae < 1e-6
    assert of_gradients is not None
    assert of_gradients < 1e-5


class Wrong(torch.autograd.Function):
    """Spoils one of q's, k's and v's gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, which: int, how: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        ctx.spoil = which, how
        return q.clone(), k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        which, how = ctx.spoil
        return *(how(x) if i == which else x for i, x in enumerate(gradients)), None, None


@pytest.mark.parametrize("which", [0, 1, 2])
def test_wrong_gradients_are_found(which: int) -> None:
    problem = make_problem(TINY, "cpu")
    right, exact = ours(PACKED).prepare(problem).call, sample(TINY, problem, 8)

    def spoilt(how: Callable[[Tensor], Tensor]) -> tuple[float, float | None]:
        return parity(lambda q, k, v: right(*Wrong.apply(q, k, v, which, how)), problem, exact)

    with pytest.raises(WrongResult, match=rf"^{('dq', 'dk', 'dv')[which]} is .* off in the mean"):
        spoilt(lambda x: x * 1.5)
    assert 1e-5 < (spoilt(lambda x: x * 1.0005)[1] or 0) < 1e-3
    with pytest.raises(WrongResult, match=r"not written|is not 0"):
        spoilt(lambda x: torch.where(x == 0, math.nan, x))
    if which:
        with pytest.raises(WrongResult, match="is not 0"):
            spoilt(lambda x: x + 1)


def test_a_look_at_the_future_is_found() -> None:
    problem = make_problem(TINY, "cpu")
    right = ours(PACKED).prepare(problem).call
    assert is_causal(right, problem) is True
    assert is_causal(lambda q, k, v: right(q, k, v) + 1e-3 * v.mean(2)[:, None, :, None], problem) is False
    assert is_causal(right, problem._replace(q=problem.q[:, :1])) is None

    def within_the_block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What a kernel without a mask in the diagonal block gives: every row sees that block's end."""
        return right(q, k, v) + v.unflatten(2, (-1, 16)).mean(3).repeat_interleave(16, 2).transpose(1, 2).unsqueeze(3)

    assert is_causal(within_the_block, problem) is False


def test_unwritten_output_of_a_decoding_is_found() -> None:
    problem = make_problem(case := TINY._replace(S=1), "cpu")
    with pytest.raises(WrongResult, match="not written"):
        parity(lambda q, k, v: torch.empty(1, 1, 2, 2, 8), problem, sample(case, problem, 1))


def test_dense_attention_is_held_to_the_oracle_over_every_key() -> None:
    problem = make_problem(TINY, "cpu")
    call = dense().prepare(problem).call
    assert parity(call, problem, sample(TINY, problem, 8, every_key=True))[0] < 1e-6
    with pytest.raises(WrongResult, match=r"^dq is .* off in the mean"):
        parity(call, problem, sample(TINY, problem, 64))


# Tables


def row(case: str, direction: str, backend: str, ms: float, workspace: int = 0) -> dict[str, Any]:
    return {"case": case, "direction": direction, "backend": backend, "ms_median": ms, "workspace_bytes": workspace}


def lines(table: str) -> list[dict[str, str]]:
    """The rows of a Markdown table by header."""
    head, _, *rest = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [dict(zip(head, line, strict=True)) for line in rest]


def test_ours_is_the_fastest_of_our_backends() -> None:
    found = {b: row("c", "fwd", b, ms) for b, ms in (("triton-tile", 2.0), ("triton-group", 3.0), (DENSE, 5.0), (PACKED, 1.0))}
    assert summary.ours(found) is found["triton-tile"]
    assert summary.speed_up(found) == 2.5
    assert summary.ours({DENSE: found[DENSE]}) is None
    assert summary.speed_up({"triton-tile": found["triton-tile"]}) is None


def test_a_fit_finds_the_line() -> None:
    slope, intercept, r2 = summary.fit([8, 32, 64, 128], [0.25 * S + 3 for S in (8, 32, 64, 128)])
    assert (slope, intercept, r2) == pytest.approx((0.25, 3, 1))
    assert summary.fit([8, 32, 64, 128], [S**2 for S in (8, 32, 64, 128)]).r2 < 0.99
    assert summary.fit([8, 32], [1.0, 1.0]).r2 == 1


def test_break_even_is_exact_for_powers() -> None:
    lengths = [1024, 2048, 4096, 8192]
    gains = [(1e-6 * S**2) / (3e-3 * S) for S in lengths]  # dense quadratic, ours linear: equal at 3000
    assert summary.break_even(lengths, gains) == pytest.approx(3000)
    assert summary.break_even(lengths, [1.0, 2, 4, 8]) == 0
    assert summary.break_even(lengths, [0.1, 0.2, 0.4, 0.8]) == math.inf
    assert summary.break_even(lengths, [2, 0.5, 2, 4]) == pytest.approx(2048 * 2**0.5)  # from there on it always wins
    assert summary.break_even(lengths[:2], [0.5, 1]) == pytest.approx(2048)


def test_tables_of_synthetic_rows() -> None:
    rows = []
    for case in (*cases.scaling_cases(), *cases.breakeven_cases()):
        for direction, factor in (("fwd", 1), ("bwd", 2), ("fwd+bwd", 3)):
            rows.append(row(case.case, direction, "triton-block", factor * 3e-4 * case.S))
            rows.append(row(case.case, direction, DENSE, factor * 1e-7 * case.S**2))
    rows += [row(case.case, "fwd", "triton-tile", 1 + layers_of(case.case)[0]) for case in cases.layer_cases()]
    rows += [row(case.case, "fwd", DENSE, 15.5) for case in cases.layer_cases()]

    scaling = {(line["direction"], line["h"]): line for line in lines(summary.scaling_table(rows))}
    assert len(scaling) == 6
    assert scaling["bwd", "4"]["slope, ms a 1024 rows"] == f"{2 * 3e-4 * 1024:.3g}"
    assert (scaling["fwd", "1"]["last / first"], scaling["fwd", "1"]["dense: last / first"]) == ("1.00", "16.00")

    even = {(line["direction"], line["selection"], line["h"]): line for line in lines(summary.breakeven_table(rows))}
    assert len(even) == 3 * 2 * 3
    assert even["fwd+bwd", "real", "16"]["faster from S"] == "2.9k"  # 3000 / 1024
    assert even["fwd", "random", "1"]["faster from S"] == "below 8k"

    layers = {(line["B"], line["h"]): line for line in lines(summary.layers_table(rows))}
    assert len(layers) == 6
    line = layers["1", "16"]
    assert [line[x] for x in ("cases", "min", "median", "max", "slowest layer", "faster", "which")] == [
        *("30", "1", "15.5", "30", "29", "15", "tile")
    ]
    assert (layers["4", "1"]["cases"], layers["4", "1"]["slowest layer"]) == ("8", "28-29-0-1")


def test_targets_say_what_is_met() -> None:
    met, missed = summary.TARGETS[0], summary.TARGETS[1]
    rows = [row(met.case, "fwd", "triton-tile", met.target), row(missed.case, "fwd", "triton-tile", missed.target * 1.5, 3 << 30)]
    others = [
        row(met.case, "fwd", name, ms) | {"computes": computes, "causal": causal, **wrong}
        for name, ms, computes, causal, wrong in (
            ("right", 3.0, "selection", True, {}), ("slower", 4.0, "selection", True, {}), ("dense", 1.0, "every key", True, {}),
            ("sees the future", 1.0, "selection", False, {}), ("wrong", 1.0, "selection", True, {"wrong": "o is off"}),
        )
    ]  # fmt: skip
    table = lines(summary.targets_table(rows, others))
    assert [line["outcome"] for line in table] == ["met", "missed by 50.0%"]
    assert [line["best measured peer"] for line in table] == ["3", "-"]  # a figure has a row, or there is none
    (space,) = lines(summary.workspace_table(rows))
    assert (space["most, MiB"], space["1 GiB"]) == ("3072", "over by 200%")
    measured_cases = {case.case for case in (*cases.performance_cases(), *cases.decode_cases())}
    assert {target.case for target in summary.TARGETS} <= measured_cases


@pytest.mark.parametrize("name", [name for name in dir(summary) if name.endswith("_table")])
def test_tables_need_no_rows_and_later_rows_count(name: str) -> None:
    table = getattr(summary, name)
    assert len(table([]).splitlines()) == 2
    old, new = (
        [row(c, d, "triton-group", ms) for ms in (t,) for c in ("real-8k-h16", "random-8k-h16", "random-32k-h16") for d in ("fwd", "bwd")]
        for t in (1.0, 2.0)
    )
    gone = [
        {key: value for key, value in row.items() if key not in ("ms_median", "workspace_bytes")} | {"error": "out of memory"}
        for row in new
    ]
    assert table([*new, *gone]) == table(new)
    if name != "workspace_table":
        assert table([*old, *new]) == table(new)


def test_the_paths_through_one_range_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(timing, "SETTLE", 0)
    monkeypatch.setenv(one_range.FLAG, "auto")
    one_range.main(tmp_path / "dense.jsonl", "cpu", quick=True)
    assert os.environ[one_range.FLAG] == "auto"
    rows = store.read(tmp_path / "dense.jsonl")
    assert [row["backend"] for row in rows] == ["packed-dense", "packed-varlen"] * 2
    assert all(row["mae"] < 1e-6 and row["slices_over_selected"] >= 1 for row in rows)
    assert "prefix-N64-h4-L256" in capsys.readouterr().out
