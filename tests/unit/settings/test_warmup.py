"""Check warm-up calls, and that all ranks of a job use one table of kernel configs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import nsa_sel
import nsa_sel.settings.warmup as warming
from nsa_sel.bench.tune import kernel_configs, tuned_file
from nsa_sel.bench.tune.search_space import TUNED
from nsa_sel.core import warm as core_warm
from nsa_sel.core.request import example_request
from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.settings import tuned
from nsa_sel.settings.warmup import warmup
from tests.helpers.calls import assert_refused
from tests.helpers.cases import make_qkv, make_spans
from tests.helpers.files import ROOT
from tests.helpers.policy_cases import H200, SHORT, replace
from tests.helpers.tune_cases import times

SMALL = {"B": 1, "S": 6, "S_kv": 40, "G": 1, "h": 2, "Dk": 16, "Dv": 24, "n": 3, "block_size": 8, "dtype": "float32"}
CPU = torch.device("cpu")


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """As if a CUDA graph were being captured, until told otherwise."""
    state = {"capturing": True}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    return state


def call() -> torch.Tensor:
    q, k, v = make_qkv(S=4, S_kv=20)
    o: torch.Tensor = nsa_sel.selection_attention(q, k, v, make_spans("few", 1, 4, 1, 20, 10))
    return o


# warmup()


def test_each_request_runs_both_ways_and_its_time_is_logged(logged: Any) -> None:
    warmed = nsa_sel.warmup("cpu", [SMALL, {**SMALL, "S": 1, "needs_grad": False}])
    assert [(each.forward, each.backward) for each in warmed] == [("numba", "numba"), ("numba", None)]
    assert warmed[0].ms_forward > 0
    assert (warmed[0].ms_backward or 0) > 0
    assert warmed[1].ms_backward is None
    told = logged("sel.triton.warmup")
    assert [event["request"] for event in told] == [each.request for each in warmed]
    assert told[0]["ms_forward"] == warmed[0].ms_forward
    assert told[0]["fingerprint"] == nsa_sel.decisions()[-1].settings.fingerprint


def test_requests_are_requests_or_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    request = replace(example_request(), S=3, S_kv=128)
    assert warmup(CPU, [request])[0].request == request
    assert warmup("cpu", [{"S": 5}])[0].request == replace(example_request(needs_grad=True), S=5, S_kv=5, max_length=5)
    warm = mock.Mock()
    monkeypatch.setattr(warming, "warm", warm)
    warmup()
    request, device, tune = warm.call_args.args
    assert (device, tune, request.needs_grad, request.Dk) == (CPU, False, True, 128)


def test_bad_requests_and_tuning_on_a_cpu_are_refused() -> None:
    fields = r"requests is .*allowed: the fields of Request: B, S, S_kv"
    assert_refused(
        (fields, lambda: warmup("cpu", [{"rows": 3}])),
        (fields, lambda: warmup("cpu", [{"S": "many"}])),
        (fields, lambda: warmup("cpu", [{"dtype": 3}])),
        (r"tune is True; allowed: False on a CPU\. Remedy: Triton needs a GPU", lambda: warmup("cpu", [SMALL], tune=True)),
    )


@pytest.mark.usefixtures("capture")
@pytest.mark.parametrize("tune", [False, True])
def test_nothing_warms_up_or_tunes_within_a_capture(monkeypatch: pytest.MonkeyPatch, tune: bool) -> None:
    monkeypatch.setattr(warming, "warm", lambda *arguments: pytest.fail("warmed up"))
    with pytest.raises(ArgumentError, match="within a CUDA graph capture; allowed: outside of one"):
        warmup("cpu", [SMALL], tune=tune)


# NSA_SEL_AUTOTUNE=warmup


@pytest.mark.parametrize("flag", ["warmup", "warmup-tune"])
def test_the_first_call_on_a_device_warms_up(monkeypatch: pytest.MonkeyPatch, logged: Any, flag: str) -> None:
    call()
    assert logged("sel.triton.warmup") == []
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", flag)
    first, second = call(), call()
    assert torch.equal(first, second)
    (event,) = logged("sel.triton.warmup")
    assert event["request"].S == 4
    assert len(logged("sel.decision")) == 4  # three calls, and that of the warm-up
    nsa_sel.reset()
    call()
    assert len(logged("sel.triton.warmup")) == 2


def test_a_warmup_waits_for_the_end_of_a_capture(monkeypatch: pytest.MonkeyPatch, capture: dict[str, bool], logged: Any) -> None:
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "warmup-tune")
    call()
    assert logged("sel.triton.warmup") == []
    capture["capturing"] = False
    call()
    assert len(logged("sel.triton.warmup")) == 1


def test_a_warmup_that_fails_is_told_and_the_call_runs(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "warmup")
    monkeypatch.setattr(core_warm, "_tensors", mock.Mock(side_effect=torch.OutOfMemoryError("no room for a warm-up")))
    with pytest.warns(RuntimeWarning, match="the warm-up failed, kernels compile at their first call: .*no room"):
        assert call().isfinite().all()
    assert "no room" in logged("sel.triton.warmup")[0]["error"]
    call()
    assert len(logged("sel.triton.warmup")) == 1


@pytest.fixture
def fake_h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> torch.device:
    """A GPU on which the quick tuning finds times."""
    monkeypatch.setenv("NSA_SEL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernel_configs, "device_info", lambda device: H200)
    monkeypatch.setattr(kernel_configs, "Runner", lambda device, settings, rep: times)
    return torch.device("cuda", 0)


def test_a_quick_tuning_is_of_the_backends_that_would_run(fake_h200: torch.device) -> None:
    request, stamp = replace(SHORT, needs_grad=True), tuned.stamp_of(H200)
    decision = nsa_sel.explain_request(request, H200)
    kernel_configs.tune_for(request, fake_h200)
    found = tuned_file.written(stamp).results
    assert {result.key.backend for result in found} == {decision.forward, decision.backward} & set(TUNED) != set()
    assert {result.key.L for result in found} == {SHORT.max_length}
    assert tuned.in_force(H200) is not None
    with tuned_file.locked(stamp), pytest.raises(ArgumentError, match="running already"):
        kernel_configs.tune_for(request, fake_h200)


# Ranks


RANK = """
import json, os, sys, warnings
import torch.distributed as dist
import nsa_sel
import nsa_sel.settings.warmup as warming
from nsa_sel.core import warm as core_warm
from nsa_sel.core.decide import forget_decisions
from nsa_sel.settings import tuned
from nsa_sel.core.decide import explain_request
from nsa_sel.bench.tune import tuned_file
from nsa_sel.settings.schema import Costs, KernelConfig
from nsa_sel.settings.config import settings_for
from nsa_sel.errors import NsaSelError
from tests.helpers.policy_cases import H200, SHORT
from tests.helpers.tune_cases import FORWARD, OTHER, result, write

rank = int(sys.argv[1])
os.environ["NSA_SEL_CACHE"] = sys.argv[2] + f"/cache{rank}"
found = {}

def look(name):
    settings = explain_request(SHORT, H200).settings
    found[name] = [settings.kernels[FORWARD].block_l, settings.tuned and settings.tuned.split()[-1]]

def refused(name):
    try:
        found[name] = nsa_sel.sync_tuning(H200)
    except NsaSelError as error:
        found[name] = str(error)

write(result(winner=OTHER if rank == 0 else KernelConfig(16, 1, 1, loads="tma")))
if rank == 0:
    model = settings_for(H200).costs.models["triton-tile/forward"]
    costs = Costs(provenance="measured by rank 0", dtypes=("bfloat16",), models={"triton-tile/forward": model})
    tuned_file.rewrite(tuned.stamp_of(H200), costs=costs)
    tuned.forget()
look("alone")
dist.init_process_group("gloo", init_method="file://" + sys.argv[2] + "/meet", rank=rank, world_size=2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    look("unshared")
found["warned"] = [str(w.message) for w in caught]
found["agreed"] = nsa_sel.sync_tuning(H200)
look("shared")
found["costs"] = explain_request(SHORT, H200).settings.costs.provenance
if rank == 1:
    tuned._driver = lambda: "999.1"
refused("other driver")
look("still shared")
tuned._driver = lambda: None
if rank == 1:
    os.environ["NSA_SEL_AUTOTUNE"] = "off"
refused("off on one")
os.environ["NSA_SEL_AUTOTUNE"] = "off"
refused("off on all")
del os.environ["NSA_SEL_AUTOTUNE"]
tuned.forget()
if rank == 0:
    os.environ["NSA_SEL_CACHE"] += "-empty"
found["rank 0 has none"] = nsa_sel.sync_tuning(H200)
look("none")
found["built-in"] = settings_for(H200).kernels[FORWARD].block_l
dist.destroy_process_group()
print(json.dumps(found))
"""


def test_all_ranks_use_what_rank_0_tuned(tmp_path: Path) -> None:
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("NSA_", "TRITON_"))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=1200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    zero, one = (json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs)
    committed = zero["built-in"]
    assert (zero["alone"][0], one["alone"][0]) == (32, 16)
    assert zero["unshared"] == one["unshared"] == [committed, None]
    for rank in (zero, one):
        (words,) = rank["warned"]
        assert "ranks must use the same configs: call nsa_sel.sync_tuning() on every rank" in words
    assert zero["agreed"] == one["agreed"] == zero["alone"][1]
    assert zero["shared"] == one["shared"] == zero["still shared"] == one["still shared"] == zero["alone"]
    assert zero["costs"] == one["costs"] == "measured by rank 0"
    assert zero["other driver"] == one["other driver"]
    assert "are not for the environment of rank 1: driver was None, is 999.1" in one["other driver"]
    assert zero["off on one"] == one["off on one"]
    assert "rank 1 would use other kernel configs than rank 0: NSA_SEL_AUTOTUNE is off there" in one["off on one"]
    assert (zero["off on all"], one["off on all"], zero["rank 0 has none"], one["rank 0 has none"]) == (None,) * 4
    assert zero["none"] == one["none"] == [committed, None]


def test_sharing_outside_a_job_is_refused() -> None:
    with pytest.raises(NsaSelError, match="outside a distributed job"):
        nsa_sel.sync_tuning()
