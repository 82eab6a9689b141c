"""The committed sample log: events of every kind, as the library wrote them on a CPU; its decisions are replayed, and it is summarised.

`python -m tests.telemetry.test_sample_log` writes tests/data/sample_log.jsonl anew: run it when an event or the policy was changed on
purpose, and read the difference before committing it. Times in it are those of the machine that wrote it.
"""

from __future__ import annotations

import os

from nsa_sel.telemetry.log import read_log
from nsa_sel.telemetry.summary import EVENT_FIELDS, summarise
from tests.docs.test_documents import bare, table
from tests.helpers.paths import DATA

LOG = DATA / "sample_log.jsonl"


def test_it_holds_events_of_every_kind() -> None:
    assert {line.event for line in read_log(LOG).lines} == {bare(row["event"]) for row in table("event", "when")}
    assert LOG.stat().st_size < 200_000


def test_its_events_say_what_the_summary_asks_for() -> None:
    for line in read_log(LOG).lines:
        assert set(EVENT_FIELDS.get(line.event, ())) <= set(line.fields) or line.decision is not None, line


def test_its_decisions_replay() -> None:
    decisions = [line.decision for line in read_log(LOG).lines if line.decision is not None]
    assert {"numba", "sdpa-packed", "triton-group"} <= {decision.forward for decision in decisions}
    assert [changes for decision in decisions if (changes := decision.replay())] == []


def test_its_summary() -> None:
    """By hand: an automatic call, two forced ones, one that falls back, one after that, and that of the warm-up; all need gradients."""
    summary = summarise(LOG)
    won = [(w["forward"], w["backward"], w["override"], w["calls"]) for w in summary["won"]]
    assert sorted(won, key=str) == [
        ("numba", "numba", None, 2),
        ("sdpa-packed", "sdpa-packed", "argument", 1),
        ("sdpa-packed", "sdpa-packed", "failure of numba", 1),
        ("sdpa-packed", "sdpa-packed", None, 1),
        ("triton-group", "triton-group", "argument", 1),
    ]
    (failure,) = summary["failures"]
    assert (failure["backend"], failure["direction"], failure["times"]) == ("numba", "forward", 1)
    # The call that fell back records it too, but there numba comes after the backend that was then named.
    (before,) = [refusal for refusal in summary["refusals"] if refusal["code"] == "failed-before"]
    assert tuple(before.values()) == ("numba", "failed-before", "unavailable", 2, 1)
    assert {times["length"] for times in summary["buckets"]} == {16, 24, 32}
    medians = [times["median_ms"] for times in summary["buckets"]]
    assert medians == sorted(medians, reverse=True)
    assert len(summarise(LOG, top=1)["buckets"]) == 1
    assert all(kernel.startswith("triton-group/") for kernel in summary["kernels"])
    assert {traffic["source"] for traffic in summary["reads"]} == {"counted"}
    assert max(summary["worst_mae"].values()) < 1e-6
    assert summary["decisions"] == 6


def write() -> None:
    """Make the calls that the log is of. TRITON_INTERPRET is set: Triton's kernels run on CPU tensors."""
    import warnings

    import torch

    import nsa_sel
    from nsa_sel.backends import numba_cpu
    from nsa_sel.core.call import request_of
    from nsa_sel.core.decide import count_rows
    from nsa_sel.core.request import example_request
    from nsa_sel.settings import devices
    from tests.helpers.cases import make_blocks, make_qkv, make_spans

    torch.set_num_threads(1)
    q, k, v = make_qkv(1, 16, 2, 2, 16, S_kv=64, requires_grad=True)
    blocks = make_blocks(1, 16, 2, 64, 2, 16)
    flags = {"NSA_DEBUG_TRITON": "1", "NSA_DEBUG_TIMING": "1", "NSA_DEBUG_COMPARE": "1"}
    LOG.unlink(missing_ok=True)
    for backend in (None, "triton-group"):
        nsa_sel.selection_attention(q, k, v, blocks, backend=backend).sum().backward()  # compiles
    nsa_sel.log_to(str(LOG))
    os.environ.update(flags)
    for backend in (None, "triton-group"):
        nsa_sel.selection_attention(q, k, v, blocks, backend=backend).sum().backward()
    lengths = torch.tensor([12, 24])[torch.arange(16) % 2].view(1, 16, 1, 1).expand(1, 16, 2, 1)
    start = make_spans("few", 1, 16, 2, 16, 1)[..., :1, 0]
    nsa_sel.selection_attention(q, k, v, torch.stack((start, start + lengths), -1), backend="sdpa-packed").sum().backward()
    real, numba_cpu.forward = numba_cpu.forward, fail
    for _ in range(2):
        nsa_sel.selection_attention(q, k, v, blocks)
    numba_cpu.forward = real
    count_rows(request_of(q, k, v, blocks, True), q, blocks, None, None)  # no CPU has costs, which alone make a call count
    nsa_sel.reset()
    tuning_events()
    with warnings.catch_warnings(action="ignore"):
        devices.warn_if_assumed(nsa_sel.explain_request(example_request(), devices.GPUS["a100"]))
    nsa_sel.log_to(None)


def tuning_events() -> None:
    """A warm-up; a user's own launches, found and then of another environment."""
    import shutil
    import warnings

    import torch

    import nsa_sel
    from nsa_sel.core.call import device_info
    from nsa_sel.settings import tuned
    from tests.helpers.tune_cases import key, result, write

    shape = {"S": 16, "S_kv": 64, "G": 2, "h": 2, "Dk": 16, "Dv": 16, "n": 2, "block_size": 16, "dtype": "float32"}
    nsa_sel.warmup(requests=[shape])
    here = device_info(torch.device("cpu"))
    os.environ["NSA_SEL_CACHE"] = "sample-cache"
    try:
        for stamped in ({}, {"torch": "1.0"}):
            write(result(of=key(**{"Dk": 16, "Dv": 16, "h": 2, "L": 64, "dtype": "float32"})), device=here, **stamped)
            tuned.forget()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tuned.read(here)
    finally:
        shutil.rmtree("sample-cache")
        tuned.forget()


def fail(call: object) -> None:
    raise RuntimeError("made to fail for the sample log")


if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    write()
