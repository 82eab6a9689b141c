"""How tuning runs one kernel config: in the interpreter, on small problems."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.bench.tune.kernel_configs import Times
from nsa_sel.bench.tune.runner import Runner, WrongResult, check_agreement
from nsa_sel.bench.tune.search_space import PROBLEMS, Case, Job, Problem, jobs
from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings.config import settings_for
from tests.helpers.policy_cases import H200


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, problem in PROBLEMS.items():
        monkeypatch.setitem(PROBLEMS, name, Problem(1, min(problem.S, 9), 128, 1, problem.blocks, False, problem.page))


def runner(timed: list[str] | None = None) -> Runner:
    def time(work: Any, way: str) -> Times:
        assert all(isinstance(x, torch.Tensor) for x in work())
        if timed is not None:
            timed.append(way)
        return 1.0, 0.9, 1.1

    return Runner(torch.device("cpu"), settings_for(DeviceInfo(kind="cpu", triton_interpret=True)), time)


SMALL = Case(16, 16, 2, 128, "float32")


def small_jobs(backend: str, way: str) -> list[Job]:
    return jobs(settings_for(H200), 90, (SMALL,), backend, way, quick=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("backend", "way"), [("triton-group", "forward"), ("triton-tile", "forward"), ("triton-tile", "backward"), ("triton-token", "decode")]
)
def test_configs_run_and_are_compared(backend: str, way: str) -> None:
    timed: list[str] = []
    measure = runner(timed)
    for job in small_jobs(backend, way)[: 1 if way == "backward" else 2]:
        for config in (job.committed, job.candidates[0]):
            assert measure(job, job.problems[0], config) == (1.0, 0.9, 1.1)
    assert set(timed) == {way}


@pytest.mark.usefixtures("small")
def test_a_config_that_gives_other_results_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    job = small_jobs("triton-tile", "forward")[0]
    module, wrong = registry.load("triton-tile"), job.candidates[0]
    real = module.forward

    def broken(call: Any) -> Any:
        o, lse = real(call)
        return (o * 1.01 if call.settings.kernels[job.kernel] == wrong else o), lse

    monkeypatch.setattr(module, "forward", broken)
    measure = runner()
    with pytest.raises(WrongResult, match=r"result 0 differs from the committed config's: most .*, allowed"):
        measure(job, job.problems[0], wrong)
    assert measure(job, job.problems[0], job.candidates[1])


def test_agreement_is_to_roundings() -> None:
    expected = torch.randn(100, 8).bfloat16()
    lse = torch.where(torch.arange(100) == 3, -torch.inf, torch.randn(100))
    check_agreement((expected, lse), (expected, lse))
    check_agreement((expected * (1 + 2**-8), lse), (expected, lse))
    for bad in (expected * 1.1, torch.where(torch.arange(8) == 1, 0.0, expected), expected + torch.nan):
        with pytest.raises(WrongResult, match="result 0"):
            check_agreement((bad, lse), (expected, lse))
    with pytest.raises(WrongResult, match="result 1 is -inf at other places"):
        check_agreement((expected, lse.roll(1)), (expected, lse))


def test_flags_that_override_configs_do_not_reach_the_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_L", "16")
    monkeypatch.setenv("NSA_SEL_TRITON_DB", "0")
    here = runner().settings
    assert here.kernel("triton-tile/forward") == settings_for(H200).kernels["triton-tile/forward"]
