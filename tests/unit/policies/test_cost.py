"""Check the cost policy: counted work, fitted prices, choices by predicted time, and their regret on committed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_sel.backends.specs import CHOOSERS, LOSSES
from nsa_sel.core.backend import Backend, Limits, Offer, PolicyInput
from nsa_sel.core.decision import Decision, Override, load_policy, make_decision
from nsa_sel.core.registry import backends
from nsa_sel.core.request import SHARING_TOKENS, Request, example_choice, example_loss
from nsa_sel.errors import ConfigError
from nsa_sel.policies.cost import blocks_of, predict, sharing_at, work
from nsa_sel.settings.config import parse_config, settings_for
from nsa_sel.settings.schema import COST_TERMS, CostModel, Costs
from nsa_sel.telemetry.describe import describe
from tests.helpers.calls import Wrong, assert_in_order, message_of
from tests.helpers.policy_cases import A100, CPU, H100, H200, SHORT, UNKNOWN, replace, settings

GROUP, TILE, BLOCK, TOKEN = "triton-group", "triton-tile", "triton-block", "triton-token"
LIMITS = Limits(dtypes={"cuda": ("float16", "bfloat16", "float32")})
BLOCKS = replace(LIMITS, block_aligned_only=True, block_multiple=16)
OFFERS = tuple(
    Offer(Backend(name=name, path=name, framework="triton", limits=limits, switches=backends()[name].switches))
    for name, limits in ((TOKEN, LIMITS), (GROUP, LIMITS), (BLOCK, BLOCKS), (TILE, BLOCKS))
)
PREFERENCE = (GROUP, TOKEN)
SIMILAR = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)
DIFFERENT = (1.0, 1.9, 3.5, 5.0, 6.0, 6.5, 7.0)


def model(host: float = 0.0, **terms: float) -> CostModel:
    priced = {term.replace("_", "-"): price for term, price in terms.items()}
    return CostModel(host=host, terms=priced, rows=1, median_error=0.0, worst_error=0.0)


MODELS = {
    f"{GROUP}/forward": model(read=0.08, read_wide=0.15),
    f"{TILE}/forward": model(tile=2.0),
    f"{BLOCK}/forward": model(exact=9.375),
    f"{GROUP}/backward": model(exact=10.0),
    f"{TILE}/backward": model(tile=1.0, exact=3.0),
    f"{BLOCK}/backward": model(exact=2.0),
    f"{GROUP}/decode": model(host=0.01),
}


def ask(request: Request, models: dict[str, CostModel] = MODELS, override: Override | None = None, **changes: Any) -> Decision:
    """The default policy's decision by `models`, on a GPU whose preference is group, token."""
    costs = Costs(provenance="invented", dtypes=("bfloat16",), models=models)
    pinned = {"sel_triton_min_L": 0, "prefer_forward": PREFERENCE, "prefer_backward": PREFERENCE, "sharing_prior": SIMILAR, "costs": costs}
    return make_decision(request, UNKNOWN, load_policy("default"), settings(**{**pinned, **changes}), OFFERS, override)


# Choosing


def test_the_least_predicted_time_wins() -> None:
    decision = ask(SHORT)
    times = {p.backend: p.ms for p in decision.predictions}
    assert list(times.values()) == sorted(times.values())
    assert list(times) == [TILE, GROUP, BLOCK]
    assert (decision.forward, decision.runner_up, decision.backward) == (TILE, GROUP, None)
    assert [verdict.backend for verdict in decision.verdicts] == [TILE, GROUP, BLOCK, TOKEN]
    assert decision.rule == f"least predicted time: {TILE} {times[TILE]:.3g} ms, runner-up {GROUP} {times[GROUP]:.3g} ms (built-in)"
    assert decision.steps == ()


def test_measured_sharing_changes_the_choice() -> None:
    """If adjacent tokens select different blocks, a tile visits many; other strategies do not change."""
    similar, different = ask(SHORT), ask(replace(SHORT, sharing=DIFFERENT))
    assert (similar.forward, different.forward) == (TILE, GROUP)
    before, after = ({p.backend: p.ms for p in decision.predictions} for decision in (similar, different))
    assert after[TILE] == pytest.approx(before[TILE] * DIFFERENT[2] / SIMILAR[2], rel=1e-3)  # 4 tokens x 16 heads are a tile
    assert (after[GROUP], after[BLOCK]) == (before[GROUP], before[BLOCK])
    assert ask(replace(SHORT, sharing=SIMILAR)).predictions == similar.predictions


def test_decoding_has_its_own_models() -> None:
    decision = ask(replace(SHORT, S=1, S_kv=65536))
    assert [(p.backend, p.ms) for p in decision.predictions] == [(GROUP, 0.01)]
    assert (decision.forward, decision.runner_up) == (GROUP, TOKEN)
    assert f"runner-up {TOKEN} (no prediction)" in decision.rule


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float32"}, {"block_size": None}, {"Dk": 192}, {"Dv": 256}],
    ids=["dtype", "ranges", "wide Dk", "wide Dv"],
)
def test_requests_without_measured_rows_are_not_predicted(changes: dict[str, Any]) -> None:
    decision = ask(replace(SHORT, **changes))
    wide = "Dk" in changes
    assert [p.backend for p in decision.predictions] == ([GROUP] if wide else [])  # the one with a price for wide launches
    assert (decision.forward, decision.runner_up) == ((TILE, GROUP) if "Dv" in changes else (GROUP, TOKEN))
    assert decision.rule.startswith("least predicted time" if wide else "first of the preference")
    assert ("; no prediction for keys and values of more than 320 columns)" in decision.rule) == ("Dv" in changes)


@pytest.mark.parametrize(
    ("sizes", "beyond"),
    [
        ({"block_size": 4, "n": 512}, "blocks of less than 16 keys"),
        ({"Dk": 256, "Dv": 256}, "keys and values of more than 320 columns"),
    ],
)
def test_prefills_beyond_the_models_have_a_preference_of_their_own(
    configure: Callable[[str], Path], sizes: dict[str, int], beyond: str
) -> None:
    small = replace(SHORT, needs_grad=True, **sizes)
    policy, offers = load_policy("default"), tuple(Offer(backend) for backend in backends().values())
    for device in (H200, H100):
        decision = make_decision(small, device, policy, settings_for(device), offers)
        assert (decision.forward, decision.backward, decision.predictions) == ("cupy-cuda", "cupy-cuda", ())
        assert decision.rule.startswith("first of the preference (")
        assert f"; no prediction for {beyond})" in decision.rule
        for changes in ({"h": 1}, {"Dk": 80}, {"S_kv": sizes.get("block_size", 64) * 32768 + 1}):  # beyond its tile kernels
            decision = make_decision(replace(small, **changes), device, policy, settings_for(device), offers)
            assert (decision.forward, decision.backward) == (TILE, TILE)
        chunk = replace(small, needs_grad=False, page_size=16)  # TMA reads a step's keys from pages of whole steps
        assert make_decision(chunk, device, policy, settings_for(device), offers).forward == GROUP
        assert make_decision(replace(chunk, page_size=128), device, policy, settings_for(device), offers).forward == "cupy-cuda"
    assert make_decision(small, A100, policy, settings_for(A100), offers).forward == TILE
    row = replace(small, S=1, needs_grad=False)
    for device, forward in ((H200, "cupy-cuda"), (H100, "cupy-cuda"), (A100, GROUP)):  # over steps of keys on Hopper
        assert make_decision(row, device, policy, settings_for(device), offers).forward == forward
        for changes in ({"Dk": 80}, {"Dk": 256, "h": 33}, {"page_size": 2}):
            assert make_decision(replace(row, **changes), device, policy, settings_for(device), offers).forward == GROUP
    assert make_decision(small, CPU, policy, settings_for(CPU), offers).forward == "numba"
    configure(f"provenance: mine\nruntime: {{prefer_forward: [{TOKEN}]}}\n")
    mine = make_decision(small, H200, policy, settings_for(H200), offers)
    assert (mine.forward, mine.backward) == (TOKEN, "cupy-cuda")  # the file says nothing of backward


def test_ties_and_missing_predictions_keep_the_preference() -> None:
    same = {f"{name}/forward": model(host=1.0) for name in (TILE, BLOCK, TOKEN)}
    decision = ask(SHORT, same)
    assert [verdict.backend for verdict in decision.verdicts] == [TOKEN, BLOCK, TILE, GROUP]
    assert ask(SHORT, same, prefer_forward=(TILE,)).forward == TILE
    assert ask(SHORT, {}).forward == GROUP


def test_a_forced_backend_has_no_runner_up() -> None:
    decision = ask(SHORT, override=Override(BLOCK, "argument"))
    assert (decision.forward, decision.runner_up, decision.rule) == (BLOCK, None, "forced by argument")
    assert [p.backend for p in decision.predictions] == [TILE, GROUP, BLOCK]


def test_a_users_preference_precedes_predicted_times(configure: Callable[[str], Path]) -> None:
    by_time = make_decision(replace(SHORT, needs_grad=True), H200, load_policy("default"), settings_for(H200), OFFERS)
    assert by_time.predictions
    assert by_time.rule.startswith("least predicted time")
    file = configure(f"provenance: mine\nruntime: {{prefer_forward: [{TOKEN}]}}\n")
    mine = make_decision(replace(SHORT, needs_grad=True), H200, load_policy("default"), settings_for(H200), OFFERS)
    assert mine.forward == TOKEN
    assert mine.backward == by_time.backward  # of which the file says nothing
    assert mine.rule.startswith(f"first of the preference ({file}), which goes before predicted times; backward: least predicted time")
    assert mine.predictions == by_time.predictions


# Counting


sizes = st.integers(1, 40)


@given(S=sizes, more=st.integers(0, 60), n=st.integers(1, 6), block=st.sampled_from([1, 4, 16]))
def test_blocks_are_counted_exactly(S: int, more: int, n: int, block: int) -> None:
    request = replace(SHORT, B=2, G=3, S=S, S_kv=S + more, n=n, block_size=block, max_length=min(n * block, S + more))
    visible = [t // block + 1 for t in range(more, S + more)]
    assert blocks_of(request) == (6 * sum(min(n, blocks) for blocks in visible), 6 * sum(visible))


def test_work_of_the_example_equals_a_count_by_hand() -> None:
    """8192 rows of 4 groups, 16 blocks of 64 keys except for the first 15 blocks of rows, 256 bf16 elements per key."""
    pairs = 4 * 64 * (sum(range(1, 16)) + 113 * 16)
    forward = work(SHORT, False, SIMILAR)
    assert forward["pairs"] == pytest.approx(pairs / 1e6)
    assert forward["read"] == pytest.approx(pairs * 64 * 256 * 2 / 1e9)
    assert forward["exact"] == pytest.approx(pairs * 64 * 16 * 2 * 256 / 1e12)
    assert forward["partials"] == pytest.approx(pairs * 16 * 128 * 2 / 1e9)
    assert forward["tile"] == pytest.approx(pairs * SIMILAR[2] / 4 * 64 * 64 * 2 * 256 / 1e12)
    assert work(SHORT, True, SIMILAR)["exact"] == pytest.approx(2 * forward["exact"])
    odd = work(replace(SHORT, h=3), False, SIMILAR)  # 21 tokens x 3 heads are 63 of 64 rows
    assert odd["exact"] == pytest.approx(forward["exact"] * 3 / 16 * 64 / 63)


def test_sharing_is_interpolated_between_measured_sizes() -> None:
    assert [sharing_at(DIFFERENT, tokens) for tokens in SHARING_TOKENS] == list(DIFFERENT)
    assert sharing_at(DIFFERENT, 1000) == DIFFERENT[-1]
    assert sharing_at(DIFFERENT, 21) == pytest.approx(6.0 + 0.5 * math.log2(21 / 16))


# Small pages run on another kernel; a union shrinks as more heads fill a tile; blocks of 256 keys have fewer partials than of 192.
OF_A_REGIME = ("rows-read", "union", "partials")
EVERY = {f"{name}/{direction}": model(launch=1, **{t.replace("-", "_"): 1.0 for t in COST_TERMS if t not in ("launch", *OF_A_REGIME)})
         for name in (GROUP, TILE, BLOCK, TOKEN, "sdpa-packed") for direction in ("forward", "backward")}  # fmt: skip


@pytest.mark.parametrize("shipped", [False, True])
@given(
    B=st.integers(1, 4), G=st.integers(1, 4), h=st.integers(1, 128), n=st.integers(1, 32), tiles=st.integers(1, 64),
    direction=st.booleans(), grown=st.sampled_from(["B", "G", "h", "n", "tiles"]), by=st.integers(1, 3), different=st.booleans(),
)  # fmt: skip
def test_more_work_is_never_predicted_cheaper(
    shipped: bool, B: int, G: int, h: int, n: int, tiles: int, direction: bool, grown: str, by: int, different: bool
) -> None:
    costs = settings_for(H200).costs
    costs = costs if shipped else replace(costs, models=EVERY)

    def asked(B: int, G: int, h: int, n: int, tiles: int) -> PolicyInput:
        S = 64 * tiles
        request = replace(SHORT, B=B, S=S, S_kv=S, G=G, h=h, n=n, max_length=min(n * 64, S), sharing=DIFFERENT if different else SIMILAR)
        return PolicyInput(request, H200, settings(costs=costs), "backward" if direction else "forward")

    facts = {"B": B, "G": G, "h": h, "n": n, "tiles": tiles}
    less, more = asked(**facts), asked(**{**facts, grown: facts[grown] + by})
    for name in {name.split("/")[0] for name in costs.models} & set(backends()):
        before, after = predict(less, backends()[name]), predict(more, backends()[name])
        assert (before is None) == (after is None) or name == "cupy-cuda", "only its tiles, which shapes join and leave, are predicted"
        assert before is None or after is None or before <= after * (1 + 1e-3), name


TILES: tuple[tuple[bool, dict[str, object]], ...] = (  # whether cupy-cuda has a prediction for a forward pass
    (True, {}), (True, {"h": 4}), (True, {"h": 1}), (True, {"Dk": 192}), (True, {"block_size": 16}), (True, {"block_size": 128}),
    (True, {"block_size": 128, "page_size": 64}), (False, {"block_size": 128, "page_size": 16}), (False, {"page_size": 32}),
    (True, {"S": 1}), (True, {"S": 8}), (True, {"S": 8, "page_size": 64}), (False, {"S": 8, "page_size": 16}), (False, {"S": 9}),
    (False, {"S": 8, "h": 1}), (False, {"S": 8, "block_size": 32}), (False, {"h": 1, "S": 63}), (False, {"h": 65}),
    (False, {"block_size": 24}), (False, {"Dk": 96}), (False, {"aligned": False}), (False, {"Dk": 256, "Dv": 256}),
)  # fmt: skip


def test_cupy_cuda_is_predicted_only_for_its_tile_kernels() -> None:
    def asked(direction: str = "forward", **facts: object) -> float | None:
        return predict(PolicyInput(replace(SHORT, **facts), H200, settings_for(H200), direction), backends()["cupy-cuda"])

    assert [asked(**facts) is not None for _, facts in TILES] == [has for has, _ in TILES]
    assert asked(S=1, page_size=64) == asked(S=1) < asked(S=1, page_size=16)
    assert asked("backward", h=1) is asked("backward", Dk=256) is None
    wide, narrow = asked("backward", Dk=192), asked("backward")
    assert 1.25 <= wide / narrow <= 4 / 3, "five products: 640 columns in place of 512, and 512 in place of 384"


# Configuration


GOOD = "provenance: test\n"


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("runtime: {sharing_prior: [1.0, 1.1]}", ("sharing_prior needs 7 rising numbers", "$.runtime")),
        ("runtime: {sharing_prior: [1, 2, 3, 4, 5, 6, 5]}", ("sharing_prior needs 7 rising numbers", "$.runtime")),
        ("runtime: {sharing_prior: [0.5, 2, 3, 4, 5, 6, 7]}", (">= 1.0", "$.runtime.sharing_prior[0]")),
        ("costs: {provenance: x, dtypes: [], models: {a/forward: {host: 0, terms: {toll: 1}, rows: 1, median_error: 0, worst_error: 0}}}",
         ("toll", "visited", "$.costs.models[...]")),
        ("costs: {provenance: x, dtypes: [], models: {a/forward: {host: 0, terms: {tile: -1}, rows: 1, median_error: 0, worst_error: 0}}}",
         (">= 0.0", "$.costs.models[...].terms[...]")),
        ("costs: {provenance: x, dtypes: [], models: {a/forward: {host: .nan, terms: {}, rows: 1, median_error: 0, worst_error: 0}}}",
         (">= 0.0", "$.costs.models[...].host")),
    ],
)  # fmt: skip
def test_bad_costs_are_refused(text: str, fragments: tuple[str, ...]) -> None:
    assert_in_order(message_of(Wrong("", lambda: parse_config((GOOD + text).encode(), "mine.yaml"), error=ConfigError)), fragments)


# Choosing blocks


CUDA, TRITON, TORCH = (backend.name for backend in CHOOSERS)
CHOICE_OFFERS = tuple(map(Offer, CHOOSERS))
CHOICE = example_choice()


CHOICE_MODELS = {
    f"{CUDA}/choose": model(0.01, launch=0.2, compressed=1.0),
    f"{TRITON}/choose": model(0.01, launch=0.1, compressed=2.0),
    f"{TORCH}/choose": model(0.01, launch=0.5, scores=20.0),
    f"{CUDA}/choose-backward": model(0.01, compressed=3.0),
    f"{TRITON}/choose-backward": model(0.01, compressed=2.0),
}


def ask_choice(**facts: Any) -> Decision:
    """The default policy's decision on an H200 by `CHOICE_MODELS`."""
    costs = Costs(provenance="invented", dtypes=("bfloat16",), models=CHOICE_MODELS)
    return make_decision(replace(CHOICE, **facts), H200, load_policy("default"), settings(costs=costs), CHOICE_OFFERS)


def test_the_chooser_with_the_least_predicted_time_wins() -> None:
    decision = ask_choice()
    times = {p.backend: p.ms for p in decision.predictions}
    assert list(times) == [CUDA, TRITON, TORCH]
    assert (decision.forward, decision.runner_up, decision.backward) == (CUDA, TRITON, None)
    assert decision.rule == f"least predicted time: {CUDA} {times[CUDA]:.3g} ms, runner-up {TRITON} {times[TRITON]:.3g} ms (built-in)"
    short = ask_choice(S=1024, S_kv=1024, max_length=1024)
    assert (short.forward, short.runner_up) == (TRITON, CUDA), "its calls take less before any key"
    text = describe(decision)
    assert "forward, ms" in text
    assert "sharing" not in text, "what adjacent rows share takes no part in choosing"


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


# The loss of an indexer


@given(S=st.integers(1, 60), more=st.integers(0, 60))
def test_visible_keys_of_a_loss_are_counted_exactly(S: int, more: int) -> None:
    counted = work(replace(WARM_UP, B=2, G=3, h=5, S=S, S_kv=S + more, max_length=S + more), False, ())
    keys = 6 * sum(t + 1 for t in range(more, S + more))
    expected = {
        "launch": 1,
        "pairs": 0,
        "exact": 2 * 5 * 128 * keys / 1e12,
        "indexed": 2 * 4 * 128 * keys / 1e12,
        "visible": 5 * keys / 1e9,
    }
    assert counted == pytest.approx(expected)


LOSS = example_loss(needs_grad=True)
WARM_UP = replace(LOSS, n=1, block_size=None, max_length=LOSS.S_kv)


def test_a_loss_has_a_prediction_where_its_kernels_were_measured() -> None:
    costs = Costs(provenance="invented", dtypes=("bfloat16",), models={f"{LOSSES[0].name}/index-loss": model(0.01, exact=1.0)})
    case = lambda request: PolicyInput(request, H200, settings(costs=costs), "forward")  # noqa: E731
    assert all(predict(case(request), LOSSES[0]) for request in (LOSS, WARM_UP))
    for other in ({"needs_grad": False}, {"block_size": None}, {"block_size": 8}, {"Dk": 192}, {"dtype": "float32"}):
        assert predict(case(replace(LOSS, **other)), LOSSES[0]) is None
