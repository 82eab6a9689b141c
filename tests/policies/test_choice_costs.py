"""Costs of choosing blocks: counted work, the choice by predicted time, and the fixed order where nothing was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_sel.backends.specs import CHOOSERS
from nsa_sel.bench.tune.cost_fit import TERMS
from nsa_sel.core.backend import Offer, PolicyInput
from nsa_sel.core.decide import explain_request, forget_decisions
from nsa_sel.core.decision import Decision, Override, load_policy, make_decision
from nsa_sel.core.registry import backends
from nsa_sel.core.request import Request, example_choice
from nsa_sel.errors import ConfigError
from nsa_sel.policies.cost import predict, work
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.flags import CONFIG_FLAG
from nsa_sel.settings.schema import CostModel, Costs
from nsa_sel.telemetry.describe import describe
from tests.helpers.policy_cases import A100, CPU, H200, replace, settings

CUDA, TRITON, TORCH = (backend.name for backend in CHOOSERS)
OFFERS = tuple(map(Offer, CHOOSERS))
CHOICE = example_choice()


def model(**terms: float) -> CostModel:
    priced = {term.replace("_", "-"): price for term, price in terms.items()}
    return CostModel(host=0.01, terms=priced, rows=9, median_error=0.01, worst_error=0.1)


MODELS = {
    f"{CUDA}/choose": model(launch=0.2, compressed=1.0),
    f"{TRITON}/choose": model(launch=0.1, compressed=2.0),
    f"{TORCH}/choose": model(launch=0.5, scores=20.0),
    f"{CUDA}/choose-backward": model(compressed=3.0),
    f"{TRITON}/choose-backward": model(compressed=2.0),
}


def ask(request: Request = CHOICE, models: dict[str, CostModel] | None = None, override: Override | None = None, **facts: Any) -> Decision:
    """The default policy's decision on an H200 by `models`; None: without costs."""
    costs = Costs(provenance="invented", dtypes=("bfloat16",), models=models) if models is not None else None
    return make_decision(replace(request, **facts), H200, load_policy("default"), settings(costs=costs), OFFERS, override)


def test_the_chooser_with_the_least_predicted_time_wins() -> None:
    decision = ask(models=MODELS)
    times = {p.backend: p.ms for p in decision.predictions}
    assert list(times) == [CUDA, TRITON, TORCH]
    assert (decision.forward, decision.runner_up, decision.backward) == (CUDA, TRITON, None)
    assert decision.rule == f"least predicted time: {CUDA} {times[CUDA]:.3g} ms, runner-up {TRITON} {times[TRITON]:.3g} ms (built-in)"
    short = ask(models=MODELS, S=1024, S_kv=1024, max_length=1024)
    assert (short.forward, short.runner_up) == (TRITON, CUDA), "its calls take less before any key"
    text = describe(decision)
    assert "forward, ms" in text
    assert "sharing" not in text, "what adjacent rows share takes no part in choosing"


def test_each_direction_is_predicted() -> None:
    decision = ask(models=MODELS, needs_grad=True)
    assert (decision.forward, decision.backward, decision.runner_up_backward) == (CUDA, TRITON, CUDA)
    assert f"; backward: least predicted time: {TRITON} " in decision.rule


def test_without_measurements_the_fixed_order_decides() -> None:
    decode, pooled = {"S": 1, "S_kv": 65536, "max_length": 65536}, {"Dv": 0, "pool": ("logits", "sum", "max")}
    unmeasured: tuple[dict[str, Any], ...] = decode, pooled, {"dtype": "float16"}, {"Dk": 192}
    for decision in (ask(), *(ask(models=MODELS, **facts) for facts in unmeasured)):
        assert decision.predictions == ()
        assert decision.forward == next(verdict.backend for verdict in decision.verdicts if not verdict.forward)
        assert decision.rule.startswith("first of the preference")
        assert [verdict.backend for verdict in decision.verdicts] == [CUDA, TRITON, TORCH]


def test_decisions_replay_and_an_override_goes_before_times() -> None:
    decision = ask(models=MODELS, needs_grad=True)
    again = Decision.from_json(decision.to_json())
    assert again == decision
    assert again.replay() == ()
    forced = ask(models=MODELS, override=Override(TORCH, "use_backend"))
    assert (forced.forward, forced.runner_up, forced.rule) == (TORCH, None, "forced by use_backend")
    assert [p.backend for p in forced.predictions] == [CUDA, TRITON, TORCH]


def test_models_of_attending_say_nothing_of_choosing() -> None:
    attending = settings_for(H200).costs
    assert attending is not None
    only = {name: found for name, found in attending.models.items() if not name.startswith("choose")}
    assert ask(models=only).rule.startswith("first of the preference")


def test_a_file_of_the_users_may_name_backends_of_both_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A preference is of backends that attend, and refuses no call that chooses; nor do costs of the other kind."""
    file, priced = tmp_path / "mine.yaml", "{host: 0.5, terms: {launch: 1.0}, rows: 9, median_error: 0.1, worst_error: 0.2}"
    monkeypatch.setenv(CONFIG_FLAG, str(file))
    costs = f"costs: {{provenance: mine, dtypes: [bfloat16], models: {{{TRITON}/choose: {priced}, triton-tile/forward: {priced}}}}}\n"
    file.write_text(f"provenance: mine\nruntime: {{prefer_forward: [sdpa-packed]}}\n{costs}")
    forget_decisions()
    for request in (CHOICE, replace(CHOICE, kind="attend", compress=None)):
        assert explain_request(request, CPU).forward is not None
    on_gpu = make_decision(CHOICE, A100, load_policy("default"), settings_for(A100), OFFERS)
    assert on_gpu.forward == TRITON
    assert on_gpu.rule == f"least predicted time: {TRITON} 1 ms, runner-up {TORCH} (no prediction) ({file})"
    file.write_text(f"provenance: mine\n{costs.replace(TRITON, 'choose-tritn')}")
    for request in (CHOICE, replace(CHOICE, kind="attend", compress=None)):
        forget_decisions()
        with pytest.raises(ConfigError, match=r"costs is 'choose-tritn'.*did you mean choose-triton"):
            explain_request(request, CPU)
    forget_decisions()


# Counting


@given(S=st.integers(1, 60), more=st.integers(0, 60), pieces=st.integers(1, 3), stride=st.sampled_from([1, 4]))
def test_compressed_keys_and_blocks_are_counted_exactly(S: int, more: int, pieces: int, stride: int) -> None:
    block = 3 * stride
    request = replace(CHOICE, B=2, G=3, h=5, S=S, S_kv=S + more, block_size=block, max_length=S + more, compress=(pieces * stride, stride))
    seen = sum(max(0, (t + 1 - pieces * stride) // stride + 1) for t in range(more, S + more))
    counted = work(request, False, ())
    assert counted["scores"] == pytest.approx(6 * 5 * seen / 1e9)
    assert counted["compressed"] == pytest.approx(6 * 5 * seen * 2 * 3 * 128 / 1e12)
    backward = work(request, True, ())
    assert backward["compressed"] == pytest.approx(counted["compressed"] * 7 / 3)


@given(
    B=st.integers(1, 4), G=st.integers(1, 4), h=st.integers(2, 64), tiles=st.integers(1, 64), backward=st.booleans(),
    grown=st.sampled_from(["B", "G", "h", "tiles"]), by=st.integers(1, 3),
)  # fmt: skip
def test_more_work_is_never_predicted_cheaper(B: int, G: int, h: int, tiles: int, backward: bool, grown: str, by: int) -> None:
    every = {name: model(**{term.replace("-", "_"): 1.0 for term in terms}) for name, terms in TERMS.items() if "choose" in name}
    costs = Costs(provenance="invented", dtypes=("bfloat16",), models=every)

    def asked(B: int, G: int, h: int, tiles: int) -> PolicyInput:
        S = 256 * tiles
        request = replace(CHOICE, B=B, S=S, S_kv=S, max_length=S, G=G, h=h)
        return PolicyInput(request, H200, settings(costs=costs), "backward" if backward else "forward")

    facts = {"B": B, "G": G, "h": h, "tiles": tiles}
    less, more = asked(**facts), asked(**{**facts, grown: facts[grown] + by})
    for name, backend in backends("choose").items():
        before, after = predict(less, backend), predict(more, backend)
        assert (before is None) == (after is None) or name == CUDA, "only its tiles, which shapes join and leave, are predicted"
        assert before is None or after is None or before <= after * (1 + 1e-3), name
