"""What a run of a bench measures, and the rows that it makes."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_sel.bench.core import environment, session
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import DENSE, PACKED, dense, named, ours
from nsa_sel.bench.core.parity import WrongResult
from nsa_sel.bench.core.session import Job, measured_rows, wanted
from nsa_sel.bench.questions import speed
from nsa_sel.bench.questions.speed import QUICK, jobs, suites_of
from nsa_sel.errors import ArgumentError

TINY = Case("tiny", "random", 1, 64, 64, 2, 2, 16, 8, 3, 16, "float32")
KEYS = {
    *("case", "distribution", "B", "S", "S_kv", "G", "h", "Dk", "Dv", "n", "block", "dtype", "direction", "backend"),
    *("ms_median", "ms_p20", "ms_p80", "mae", "workspace_bytes", "device", "driver", "torch", "triton", "commit", "command"),
    *("ms_ci_low", "ms_ci_high", "calls", "sm_mhz", "memory_mhz", "temperature_c", "numba", "threads"),
}


def test_jobs_follow_suites_backends_and_names() -> None:
    def backends_of(suites: str, backends: str, only: str = "") -> dict[str, list[str]]:
        found = jobs(suites_of(suites, False, "cuda"), named(backends), only)
        return {job.case.case: [contender.name for contender in job.contenders] for job in found}

    every = backends_of("all", ",".join(speed.usual_backends("cuda")))
    ours_on_gpu = ["triton-group", "triton-tile", "triton-block", "cuda-block", "cupy-cuda"]
    assert every["real-8k-h16"] == [PACKED, *ours_on_gpu, DENSE]
    assert every["random-64k-h16"] == every["real-8k-layer07-h4"] == [*ours_on_gpu, DENSE]
    assert every["decode-B1-64k-h16"] == every["threshold-decode-D64-L64"] == [PACKED, "triton-group", "cupy-cuda", DENSE]
    assert backends_of("scaling,decode", f"{PACKED},triton-tile", "32k") == {
        **{f"decode-B64-32k-h{h}": [PACKED] for h in (16, 4)},
        **{f"random-32k-h{h}": ["triton-tile"] for h in (16, 4, 1)},
    }
    with pytest.raises(ArgumentError, match=r"--suite is speed; allowed: all, performance"):
        suites_of("speed", False, "cuda")
    with pytest.raises(
        ArgumentError, match=r"--backends is 'tritn-tile' \(did you mean triton-tile\?\); allowed: .*triton-tile.*, dense-cudnn"
    ):
        named("numba,tritn-tile")
    with pytest.raises(ArgumentError, match=r"--device is cpu; .*--quick"):
        suites_of("decode", False, "cpu")
    (target,) = jobs(suites_of("cpu", False, "cpu"), named(f"numba,{PACKED}"), "", "cpu")
    assert ([contender.name for contender in target.contenders], target.directions) == (["numba", PACKED], ("fwd", "bwd", "fwd+bwd"))
    assert [job.case.dtype for job in jobs({"quick": QUICK}, [ours(PACKED)], "", "cpu")] == ["float32"] * 3


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("contender", [ours(PACKED), dense()], ids=lambda contender: contender.name)
@pytest.mark.parametrize("S", [64, 1])
def test_rows_have_the_agreed_keys(contender: Any, S: int) -> None:
    case = TINY._replace(S=S)
    directions = ("fwd", "bwd", "fwd+bwd") if S > 1 else ("decode",)
    job = Job(case, (contender,), directions, 8)
    rows = list(measured_rows(job, wanted(job), environment.stamp("cpu"), "cpu", pytest.fail))
    assert [row["direction"] for row in rows] == list(directions)
    for row in rows:
        assert set(row) == KEYS
        assert (row["ms_median"], row["ms_p20"], row["ms_p80"], row["commit"]) == (2.0, 1.0, 3.0, "abc1234")
        assert (row["ms_ci_low"], row["ms_ci_high"], row["calls"]) == (1.5, 2.5, 7)
        assert (row["mae"] is None) == (contender.name == DENSE)
    some = list(measured_rows(job, wanted(job)[:1], {}, "cpu", pytest.fail))
    assert [row["direction"] for row in some] == [directions[0]]


@pytest.mark.usefixtures("instant")
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
