"""Check guards, rules and recorded decisions without tensors; availability and numbers are injected.

`python -m tests.unit.policies.test_decisions` rewrites tests/data/decisions.jsonl: run it after an intended change of a policy, and read
the difference.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nsa_sel.core.backend import Backend, Limits, Offer, PolicyInput, Reason
from nsa_sel.core.decision import Decision, Override, counterfactuals, load_policy, make_decision, refusal
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.errors import NsaSelError
from nsa_sel.policies import guards
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry.describe import describe
from nsa_sel.telemetry.log import decision_events, read_decisions
from tests.helpers.calls import assert_in_order
from tests.helpers.files import DATA
from tests.helpers.policy_cases import (
    A100,
    CPU,
    H100,
    H200,
    INTERPRETER,
    LONG,
    NAMES,
    OFFERS,
    RTX4090,
    SHORT,
    UNKNOWN,
    codes,
    decide,
    replace,
    settings,
    toy,
)

LOG = DATA / "decisions.jsonl"


# Guards: can it run?


GUARDED = [  # offer, changes of the request, device, code, field, actual
    (toy(), {}, CPU, "device-kind", "device.kind", "cpu"),
    (toy(dtypes={"cpu": ("float32",)}), {}, H100, "device-kind", "device.kind", "cuda"),
    (toy(), {"dtype": "float32"}, H100, "dtype", "request.dtype", "float32"),
    (toy(dtypes={"cuda": ("float16",), "interpreter": ("float32",)}), {}, INTERPRETER, "dtype", "request.dtype", "bfloat16"),
    (toy(dtypes={"cuda": ("float16",), "interpreter": ("float32",)}), {"dtype": "float32"}, CPU, "device-kind", "device.kind", "cpu"),
    (toy(min_sm=90), {}, A100, "compute-capability", "device.sm", 80),
    (toy(head_dim_multiple=16), {"Dk": 72}, H100, "head-dim-multiple", "request.Dk", 72),
    (toy(head_dim_multiple=8), {"Dv": 12}, H100, "head-dim-multiple", "request.Dv", 12),
    (toy(head_dim_max=64), {"Dk": 192, "Dv": 64}, H100, "head-dim-max", "request.Dk", 192),
    (toy(head_dim_max=128), {"Dv": 256}, H100, "head-dim-max", "request.Dv", 256),
    (toy(block_aligned_only=True), {"block_size": None}, H100, "block-aligned", "request.block_size", None),
    (toy(block_multiple=16), {"block_size": 24}, H100, "block-multiple", "request.block_size", 24),
    (toy(block_aligned_only=True, block_multiple=16), {"block_size": None}, H100, "block-aligned", "request.block_size", None),
    (toy(block_aligned_only=True, block_multiple=64), {"block_size": 32}, H100, "block-multiple", "request.block_size", 32),
    (toy(backward=False), {"needs_grad": True}, H100, "no-backward", "request.needs_grad", True),
]


@pytest.mark.parametrize(("offer", "changes", "device", "code", "field", "actual"), GUARDED)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_limit_is_a_refusal_with_values(
    offer: Offer, changes: dict[str, Any], device: DeviceInfo, code: str, field: str, actual: object, direction: Any
) -> None:
    (reason,) = guards.within_limits(PolicyInput(replace(SHORT, **changes), device, settings(), direction), offer)
    assert (reason.code, reason.kind, reason.field, reason.actual) == (code, "unsupported", field, actual)
    assert reason.remedy
    assert reason.required != reason.actual
    forced = decide(replace(SHORT, **changes), device, (offer,), "toy")
    assert forced.forward is None
    assert f"toy: {code} (unsupported): {reason.words}" in str(refusal(forced))


@pytest.mark.parametrize(
    ("offer", "changes", "device"),
    [
        (toy(block_multiple=16), {"block_size": None}, H100),
        (toy(block_aligned_only=True, block_multiple=16), {"block_size": 48}, H100),
        (toy(min_sm=80, head_dim_multiple=8, head_dim_max=128, block_aligned_only=True), {}, A100),
        (toy(backward=False), {}, H100),
        (toy(dtypes={"interpreter": ("float32",)}), {"dtype": "float32"}, INTERPRETER),
        (toy(dtypes={"cpu": ("bfloat16",)}), {}, CPU),
        (toy(dtypes={"cpu": ("bfloat16",)}), {}, INTERPRETER),
    ],
)
def test_offers_within_their_limits_have_no_reasons(offer: Offer, changes: dict[str, Any], device: DeviceInfo) -> None:
    case = PolicyInput(replace(SHORT, **changes), device, settings(), "forward")
    assert not [*guards.within_limits(case, offer)]
    assert not [*guards.forced_path(case, offer)]


# Rules: should it?


@pytest.mark.parametrize("device", [H100, UNKNOWN], ids=lambda device: device.name)
@pytest.mark.parametrize(
    ("length", "expected"), [(0, "sdpa-packed"), (4095, "sdpa-packed"), (4096, "triton-group"), (8192, "triton-group")]
)
def test_min_length_gate_on_both_sides(device: DeviceInfo, length: int, expected: str) -> None:
    decision = decide(replace(LONG, max_length=length), device)
    assert decision.forward == expected
    assert codes(decision, "triton-group") == codes(decision, "triton-token") == ([] if length >= 4096 else ["min-length"])


def test_min_length_gate_takes_the_mean_where_it_was_measured() -> None:
    decision = decide(replace(LONG, max_length=8192, mean_length=1500), H100)
    (reason,) = (reason for verdict in decision.verdicts if verdict.backend == "triton-group" for reason in verdict.forward)
    assert (reason.code, reason.field, reason.actual, reason.satisfied_by) == ("min-length", "request.mean_length", 1500, 4096)
    assert counterfactuals(decision) == ("triton-group would be picked from mean L >= 4096; here mean L = 1500",)


def test_counterfactuals_are_true_sentences() -> None:
    """A longer row would also lift triton-token's reason, but triton-group would still win: no sentence."""
    (sentence,) = counterfactuals(decide(SHORT, H100))
    assert sentence == "triton-group would be picked from L >= 4096; here L = 1024"
    assert f"-> {sentence}" in describe(decide(SHORT, H100))
    assert counterfactuals(decide(SHORT, H100, use_triton_sel=False)) == ()
    assert counterfactuals(decide(LONG, H100)) == ()
    assert "NSA_SEL_TRITON_MIN_L" not in describe(decide(SHORT, CPU))


def test_a_printed_decision_is_one_screen_and_a_described_one_has_reasons_against_backward_alone() -> None:
    decision = decide(replace(LONG, needs_grad=True), H100, sel_triton_min_L={"forward": 1, "decode": 1, "backward": 1 << 20})
    lines = str(decision).splitlines()
    assert lines[1:3] == [f"forward: {decision.forward}", f"backward: {decision.backward}"]
    assert decision.forward == "triton-group" != decision.backward
    assert "  triton-token: min-length" in lines
    assert "  numba: device-kind" in lines
    assert len(lines) < 20
    assert "Backward: Max_length is 8192; it must be >= 1048576." in describe(decision)


@pytest.mark.parametrize(
    ("changes", "device", "options", "found"),
    [
        ({}, CPU, {}, ["device-kind"]),
        ({"dtype": "float32"}, INTERPRETER, {}, ["triton-on-cpu"]),
        ({"dtype": "float32"}, INTERPRETER, {"backend": "triton-group"}, ["triton-on-cpu"]),
        ({}, INTERPRETER, {}, ["dtype"]),  # bf16 dots are wrong there
        ({"dtype": "float64"}, H100, {"use_triton_sel": False}, ["dtype", "triton-off"]),
    ],
)
def test_a_backend_that_cannot_run_has_no_slower_reason(
    changes: dict[str, Any], device: DeviceInfo, options: dict[str, Any], found: list[str]
) -> None:
    for request in (SHORT, LONG):
        decision = decide(replace(request, **changes), device, **options)
        assert codes(decision, "triton-group") == found
        assert (decision.forward == "triton-group") == ("backend" in options)


def test_each_direction_has_its_own_backend() -> None:
    first = Offer(Backend(name="first", path="x", framework="cupy", limits=Limits(dtypes={"cuda": ("bfloat16",)}, backward=False)))
    offers = (first, *OFFERS)
    prefer = ("first", *NAMES)
    for needs_grad, winner in ((False, "first"), (True, "triton-group")):
        decision = decide(replace(LONG, needs_grad=needs_grad), H100, offers, prefer_forward=prefer, prefer_backward=prefer)
        assert (decision.forward, decision.backward) == (winner, "triton-group" if needs_grad else None)
    decision = decide(replace(LONG, needs_grad=True), H100, prefer_backward=("sdpa-packed", *NAMES))
    assert (decision.forward, decision.backward) == ("triton-group", "sdpa-packed")


def test_backends_outside_the_preference_come_last() -> None:
    decision = decide(LONG, H100, (toy(), *OFFERS), prefer_forward=("sdpa-packed",))
    assert decision.forward == "sdpa-packed"
    assert {verdict.backend for verdict in decision.verdicts} == {"toy", *(offer.backend.name for offer in OFFERS)}
    assert decide(LONG, H100, (toy(), *OFFERS), prefer_forward=()).forward == "toy"


def test_a_refusal_lists_every_backend() -> None:
    decision = decide(LONG, CPU, use_sel_pack=False, offers=tuple(offer for offer in OFFERS if offer.backend.name != "numba"))
    message = str(refusal(decision))
    assert decision.forward is None
    assert message.startswith("no backend may run this call:")
    assert_in_order(message, ("triton-group: device-kind", "triton-token: device-kind", "sdpa-packed: pack-off", "NSA_USE_SEL_PACK"))


# Records and replay


@pytest.mark.parametrize("device", [CPU, RTX4090, H100], ids=lambda device: device.name)
@pytest.mark.parametrize("backend", [None, "triton-group", "no-such-backend"])
def test_decisions_survive_json(device: DeviceInfo, backend: str | None) -> None:
    decision = decide(replace(LONG, needs_grad=True), device, backend=backend)
    line = decision.to_json()
    again = Decision.from_json(line)
    assert "\n" not in line
    assert (again, again.to_json(), again.replay(), decision.replay()) == (decision, line, (), ())


def test_replay_names_every_doctored_field() -> None:
    decision = decide(replace(SHORT, needs_grad=True), H100, sel_triton_min_L=0)
    first, *others = decide(SHORT, H100).verdicts
    other_reason = replace(first, forward=(replace(first.forward[0], required=">= 1"), *first.forward[1:]))
    doctored = [
        (replace(decision, forward="numba"), ("forward", "numba", "triton-group")),
        (replace(decision, backward=None), ("backward", None, "triton-group")),
        (replace(decision, rule="whim"), ("rule", "whim", decision.rule)),
        (replace(decide(SHORT, H100), verdicts=(other_reason, *others)), ("verdicts[0].forward[0].required", ">= 1", ">= 4096")),
    ]
    for record, expected in doctored:
        (change,) = Decision.from_json(record.to_json()).replay()
        assert (change.field, change.recorded, change.replayed) == expected
    without_reasons = replace(decision, verdicts=tuple(replace(verdict, forward=()) for verdict in decision.verdicts))
    fields = [change.field for change in without_reasons.replay()]
    assert fields
    assert all(field.startswith("verdicts[") and field.endswith("].forward") for field in fields)


def test_other_lines_and_unknown_policies_are_refused() -> None:
    for line in ("", "{}", "[1]", '{"request": 3}', "nonsense"):
        with pytest.raises(NsaSelError, match="not a decision record"):
            Decision.from_json(line)
    with pytest.raises(NsaSelError, match=r"'whim'.*default"):
        replace(decide(LONG, H100), policy="whim").replay()


def sample() -> list[Decision]:
    """Decisions under the shipped configuration that show changes of the policy."""
    policy = load_policy("default")
    lacking = Reason("package-missing", "unavailable", "package triton", None, ">= 3.4", "pip install triton")
    without_triton = tuple(replace(o, missing=(lacking,)) if o.backend.framework == "triton" else o for o in OFFERS)
    cases: list[tuple[Request, DeviceInfo, tuple[Offer, ...], str | None]] = [
        (replace(request, needs_grad=needs_grad), device, OFFERS, None)
        for device in (CPU, RTX4090, A100, H100, H200, UNKNOWN)
        for request in (SHORT, LONG)
        for needs_grad in (False, True)
    ]
    cases += [
        (replace(LONG, S=1, S_kv=65536), H100, OFFERS, None),
        (replace(LONG, Dk=192, dtype="float16"), H100, OFFERS, None),
        (replace(SHORT, needs_grad=True, sharing=(1.0, 1.7, 2.8, 3.7, 4.2, 4.4, 4.5)), H200, OFFERS, None),
        (replace(SHORT, S=1, S_kv=65536), H200, OFFERS, None),
        (replace(SHORT, block_size=None), H200, OFFERS, None),
        (replace(LONG, Dk=100, dtype="float64"), H100, OFFERS, None),
        (LONG, H100, without_triton, None),
        (LONG, RTX4090, OFFERS, "triton-group"),
        (SHORT, H100, OFFERS, "triton-token"),
        (replace(SHORT, dtype="float32"), INTERPRETER, OFFERS, "triton-group"),
        (SHORT, CPU, OFFERS, "no-such-backend"),
    ]
    return [
        make_decision(request, device, policy, settings_for(device), offers, None if backend is None else Override(backend, "argument"))
        for request, device, offers, backend in cases
    ]


def test_the_committed_log_replays() -> None:
    """A difference is a changed policy. If it is intended, see the head of this file."""
    decisions = read_decisions(LOG)
    assert len(decisions) >= 20
    assert {i: changes for i, decision in enumerate(decisions) if (changes := decision.replay())} == {}


if __name__ == "__main__":
    written: set[str] = set()
    events = [{"event": name, **fields} for decision in sample() for name, fields in decision_events(decision, written)]
    LOG.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
