"""The contender that reads as a decoding call does, and computes nothing: emulated, without a GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.backends import cupy_cuda
from nsa_sel.backends.cupy_cuda import whole_blocks
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import Contender, Ready, as_it_is, named, ours
from nsa_sel.bench.core.parity import Problem, make_problem
from nsa_sel.bench.core.reading_alone import BACKEND, READING, readings
from nsa_sel.bench.core.session import Job, measured_rows, wanted
from nsa_sel.bench.questions.speed import SUITES, jobs
from nsa_sel.bench.tune.cost_fit import is_time
from nsa_sel.core import registry
from nsa_sel.core.call import Call
from nsa_sel.errors import NsaSelError
from nsa_sel.settings.config import settings_for
from tests.helpers.emulate import BACKWARDS, EAGER, GPU, emulated, needs_compiler

CASE = Case("decode-tiny", "random", 3, 1, 640, 2, 4, 64, 64, 5, 64, "float16")


def decoding(sm_count: int) -> Contender:
    """cupy-cuda's kernel of whole blocks on a GPU of so many multiprocessors."""

    def prepare(problem: Problem) -> Ready:
        gpu = msgspec.structs.replace(GPU, sm_count=sm_count)
        call = Call(problem.q, problem.k, problem.v, problem.selection, None, 0.125, settings_for(gpu), gpu)
        return as_it_is(lambda q, k, v: whole_blocks.forward(call)[0])

    return Contender(BACKEND, prepare)


def words(problem: Problem, cluster: int) -> Tensor:
    """The first words of the keys and values that a row's first CTA loads, combined by XOR, [B,S,G]."""
    found = torch.zeros(problem.selection.ranges.shape[:3], dtype=torch.int32)
    for x in (problem.k, problem.v):
        first = x.detach()[..., :2].contiguous().view(torch.int32)[..., 0]  # [B,G,S_kv]
        for start in problem.selection.ranges[..., ::cluster, 0].unbind(-1):
            found ^= first.gather(2, start.transpose(1, 2).long()).transpose(1, 2)
    return found


@needs_compiler
@pytest.mark.parametrize(("sm_count", "cluster"), [(2, 1), (6, 2)])
@pytest.mark.parametrize("number", range(len(READING)))
def test_every_step_of_a_row_is_loaded_and_waited_for(monkeypatch: pytest.MonkeyPatch, sm_count: int, cluster: int, number: int) -> None:
    problem = make_problem(CASE, "cpu")
    assert whole_blocks.cluster_size(6, CASE.n, 2 * sm_count) == cluster
    for mode in (0, BACKWARDS | EAGER):
        emulated(monkeypatch, mode)
        ready = readings(decoding(sm_count))[number].prepare(problem)
        lse = ready.call(problem.q, problem.k, problem.v)
        assert torch.equal(lse[..., 0].view(torch.int32), words(problem, cluster))


def test_it_is_no_backend_and_the_library_knows_no_such_kernel() -> None:
    assert not set(READING) & set(registry.backends())
    assert not any("reading" in file.name for file in (Path(cupy_cuda.__file__).parent / "kernels").iterdir())
    problem = make_problem(CASE, "cpu")
    for name in READING:
        with pytest.raises(NsaSelError, match=name):
            nsa_sel.selection_attention(problem.q, problem.k, problem.v, problem.selection, backend=name)
        with pytest.raises(NsaSelError, match=name):
            named(name)


def test_the_suite_of_ranks_measures_it_beside_its_backend_alone() -> None:
    suite = {"parallel": SUITES["parallel"]}
    (job,) = jobs(suite, named("triton-group,cupy-cuda"), "B64-32k-G1-h16-b128")
    assert [contender.name for contender in job.contenders] == ["triton-group", BACKEND, *READING]
    assert all(contender.directions == ("decode",) for contender in job.contenders)
    assert [contender.name for contender in jobs(suite, named("triton-group"), "B64-32k-G1-h16-b128")[0].contenders] == ["triton-group"]


@needs_compiler
@pytest.mark.usefixtures("instant")
def test_rows_say_that_nothing_is_computed_and_no_model_is_fitted_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    job = Job(CASE, tuple(readings(decoding(2))), ("decode",), 4)
    rows = list(measured_rows(job, wanted(job), {}, "cpu", pytest.fail))
    assert [(row["backend"], row["computes"], row["mae"]) for row in rows] == [(name, "nothing", None) for name in READING]
    assert not any(map(is_time, rows))


def test_other_kernels_are_refused() -> None:
    other = readings(ours("sdpa-packed")._replace(name=BACKEND))[0]
    with pytest.raises(NsaSelError, match=r"not forward_blocks\.cu alone"):
        other.prepare(make_problem(CASE, "cpu"))
