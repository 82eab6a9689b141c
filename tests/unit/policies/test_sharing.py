"""Check how much neighboring rows share: counted at the first call of a class where that decides, measured, or assumed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from nsa_sel import Decision, Selection, decisions, describe, explain, reset, selection_attention
from nsa_sel.bench.core.cases import make_inputs, make_selection, prefill, real_selection
from nsa_sel.bench.tune import cost_fit
from nsa_sel.core import decide
from nsa_sel.core.call import request_of
from nsa_sel.core.check import check_call
from nsa_sel.core.ranges import sample_rows, sampled_sharing
from nsa_sel.core.request import SHARING_TOKENS
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.tuned import shape_of
from tests.helpers.calls import counted
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.gpus import captured, no_waiting, replayed
from tests.helpers.policy_cases import SHORT, UNKNOWN, replace

MODEL = "{{host: 0, terms: {{{term}: {price}, {term}-wide: {price}}}, rows: 1, median_error: 0, worst_error: 0}}"
TILE, EXACT = MODEL.format(term="tile", price=1.0), MODEL.format(term="exact", price=2.0)
PRICED = f"""
provenance: tests
costs:
  provenance: tests
  dtypes: [float32, float64, bfloat16]
  models:
    numba/forward: {TILE}
    numba/backward: {TILE}
    sdpa-packed/forward: {EXACT}
    sdpa-packed/backward: {EXACT}
"""
S, S_KV, BLOCK, N = 128, 512, 16, 4
Events = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(autouse=True)
def priced(request: pytest.FixtureRequest, configure: Callable[[str], Any]) -> None:
    if request.node.get_closest_marker("gpu") is None:  # tests on a GPU have its own prices
        configure(PRICED)


def same_blocks() -> Selection:
    """Every row selects the first blocks: one token's are those of 64."""
    return Selection.from_blocks(torch.arange(N).expand(1, S, 1, N), BLOCK, disjoint=True)


def apart(rows: int = S) -> Selection:
    return make_blocks(1, rows, 1, S_KV, N, BLOCK)


def tensors(rows: int = S, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(1, rows, 1, 1, 16, 16, S_kv=S_KV, **options)


def called(selection: Selection, rows: int = S, **options: Any) -> Decision:
    selection_attention(*tensors(rows), selection, **options)
    return decisions()[-1]


# Counting


@pytest.mark.parametrize(("B", "rows", "G"), [(1, 64, 1), (2, 128, 3), (2, 37, 2), (3, 9, 1)])
def test_a_sample_of_all_rows_is_exact(B: int, rows: int, G: int) -> None:
    selection = Selection.from_blocks(torch.rand(B, rows, G, 20).argsort(-1)[..., :5].int(), 8)  # future blocks among them
    b, s, g = sample_rows(B, rows, G, 5, "cpu")
    found = sampled_sharing(selection.ranges[b, s, g], 160 - rows + s + 1, 8)
    selection.measure(160)
    assert found == selection.sharing


def test_a_sample_is_bounded_and_close(monkeypatch: pytest.MonkeyPatch) -> None:
    selection = real_selection(4, "cpu")
    b, s, g = sample_rows(1, 8192, 4, 16, "cpu")
    assert s.shape == (128, 64), "of 512 tiles"
    assert {int(group) for group in g.unique()} == {0, 1, 2, 3}
    found = sampled_sharing(selection.ranges[b, s, g], s + 1, 64)
    exact = selection.measure(8192).sharing
    assert found == pytest.approx(exact, rel=0.02)
    assert sample_rows(1, 1 << 20, 1, 512, "cpu")[1].numel() * 512 == 1 << 17


# Deciding


def test_the_first_call_counts_and_the_count_decides(logged: Events) -> None:
    decision = called(apart())
    assert (decision.forward, decision.request.counted, decision.sharing_source) == ("sdpa-packed", True, "counted at the first call")
    exact = apart()
    exact.measure(S_KV)
    assert decision.request.sharing == exact.sharing
    assert "; sharing counted at the first call)" in decision.rule
    assert "(counted at the first call)" in describe(decision)
    assert Decision.from_json(decision.to_json()).replay() == ()
    again = called(apart())
    assert again is decision
    (event,) = logged("sel.sharing")
    assert (event["sharing"], event["rows"]) == (exact.sharing, S)
    reset()
    assert called(same_blocks()).forward == "numba"
    assert called(same_blocks()).request.sharing == (1.0,) * 7
    assert len(logged("sel.sharing")) == 2


def test_measure_goes_before_a_count(logged: Events) -> None:
    measured = same_blocks()
    measured.measure(S_KV)
    decision = called(measured)
    assert (decision.forward, decision.sharing_source, logged("sel.sharing")) == ("numba", "measured", [])
    assert called(apart()).forward == "sdpa-packed"
    assert called(measured).forward == "numba"


def test_a_kind_of_call_has_one_count(logged: Events) -> None:
    assert called(apart()).forward == "sdpa-packed"
    assert called(apart(100), 100).forward == "sdpa-packed", "as long, up to a power of two"
    assert called(apart(), q_pos=torch.arange(S_KV - S, S_KV)).forward == "sdpa-packed"
    assert len(logged("sel.sharing")) == 1
    assert called(apart(40), 40).forward == "sdpa-packed"
    assert len(logged("sel.sharing")) == 2


@pytest.mark.parametrize("case", ["forced", "ranges", "no costs", "off", "ranks", "no rows", "a step", "eight steps"])
def test_what_sharing_does_not_decide_is_not_counted(case: str, logged: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"no rows": 0, "a step": 1, "eight steps": 8}.get(case, S)
    selection = apart(rows)
    if case == "no costs":
        monkeypatch.delenv("NSA_SEL_CONFIG")
    if case == "off":
        monkeypatch.setenv("NSA_SEL_COUNT_SHARING", "off")
    if case == "ranks":
        monkeypatch.setattr(tuned, "distributed", lambda: True)
    if case == "ranges":
        selection = Selection.from_ranges(selection.ranges, disjoint=True)
    decision = called(selection, rows, **({"backend": "sdpa-packed"} if case == "forced" else {}))
    assert logged("sel.sharing") == []
    assert decision.request.sharing is None
    if case in ("off", "ranks"):
        assert (decision.forward, decision.sharing_source) == ("numba", "prior of base.yaml")


@pytest.mark.parametrize("repeated", [False, True])
def test_counts_again_after_so_many_calls(repeated: bool, logged: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_COUNT_SHARING", "3")
    options = {} if repeated else {"q_pos": torch.arange(S_KV - S, S_KV)}  # with positions every call is checked
    picked = [
        called(selection, **options).forward
        for selection in (apart(), same_blocks(), same_blocks(), same_blocks(), apart(), apart(), apart())
    ]
    assert picked == ["sdpa-packed"] * 3 + ["numba"] * 3 + ["sdpa-packed"]
    assert len(logged("sel.sharing")) == 3


def test_a_capture_goes_by_the_prior_and_the_next_call_counts(logged: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for wait in (False, False, True, False):
        monkeypatch.setattr(decide, "may_wait", lambda q, wait=wait: wait)
        found.append((called(apart()).forward, len(logged("sel.sharing"))))
    assert found == [("numba", 0)] * 2 + [("sdpa-packed", 1)] * 2, "a later capture uses the count"


def test_explain_says_what_a_call_will_do(logged: Events) -> None:
    decision = explain(*tensors(), apart())
    assert decision.forward == "sdpa-packed"
    assert called(apart()) is decision
    assert len(logged("sel.sharing")) == 1


# PyTorch's features


def test_compiled_calls_count_when_they_run(logged: Events) -> None:
    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Any:
        return selection_attention(q, k, v, Selection.from_blocks(blocks, BLOCK))

    work = torch.compile(attend, backend=backend)
    q, k, v = tensors(requires_grad=True)
    with counted() as grown:
        work(q, k, v, apart().block_indices).sum().backward()
    assert grown["backward", "sdpa-packed"] == 1
    assert (decisions()[-1].forward, decisions()[-1].backward) == ("sdpa-packed", "sdpa-packed")
    assert len(logged("sel.sharing")) == 1


# Measuring


def brute_force_sharing(selection: Selection, S_kv: int, tokens: int) -> float:
    """Distinct visible blocks of tiles over those of rows, with Python's sets."""
    B, S, G, n = selection.ranges.shape[:4]
    ranges = selection.ranges.tolist()

    def blocks_of_tiles(tokens: int) -> float:
        """Return the mean number."""
        counts = []
        for b, g, first in itertools.product(range(B), range(G), range(0, S, tokens)):
            rows = range(first, min(first + tokens, S))
            counts.append(len({start for s in rows for start, end in ranges[b][s][g] if start < min(end, S_kv - S + s + 1)}))
        return sum(counts) / len(counts)

    return blocks_of_tiles(tokens) / blocks_of_tiles(1)


@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize("S", [1, 37, 64, 150])
def test_measured_sharing_is_exact(monkeypatch: pytest.MonkeyPatch, S: int, at_once: int) -> None:
    monkeypatch.setattr("nsa_sel.core.ranges._SORTED_AT_ONCE", at_once)
    selection = make_blocks(2, S, 3, 160, n=5, block_size=8)
    found = selection.measure(S_kv=160).sharing
    assert found == pytest.approx([brute_force_sharing(selection, 160, tokens) for tokens in SHARING_TOKENS])
    assert selection.sharing == pytest.approx(found, abs=0.0051)


def test_sharing_needs_blocks() -> None:
    assert Selection.from_ranges(torch.tensor([[[[[0, 4]]]]])).measure(8).sharing is None
    nothing = Selection.from_blocks(torch.full((1, 4, 1, 2), -1), 8)
    assert nothing.measure(8).sharing == (1.0,) * 7


def test_the_request_has_the_measured_sharing() -> None:
    q, k, v = make_qkv(1, 48, 2, 3, 16, 16, S_kv=48)
    selection = make_blocks(1, 48, 2, 48, n=3, block_size=8)
    sharing = lambda: request_of(*check_call(q, k, v, selection, None, None)[:4], False).sharing  # noqa: E731
    assert sharing() is None
    selection.measure(48)
    assert sharing() == selection.sharing == selection.to("cpu").sharing
    assert sharing() is not None
    selection.ranges[..., 1] += 0
    assert sharing() is None  # written since
    one = make_blocks(1, 1, 2, 48, n=3, block_size=8)
    one.measure(48)
    assert request_of(*check_call(q[:, :1], k, v, one, None, None)[:4], False).sharing is None


def test_the_class_of_a_full_prefill_keeps_its_length() -> None:
    """With S_kv rounded up, early rows would seem to see more keys."""
    whole = replace(SHORT, S=5000, S_kv=5000)
    assert whole.request_class().S_kv == 5000
    assert replace(whole, S=5).request_class().S_kv == 8192
    for request in (whole, replace(whole, S=5), replace(SHORT, S=1, S_kv=1)):
        assert request.request_class().request_class() == request.request_class()


def test_decoding_steps_of_any_length_share_a_class() -> None:
    """If only the keys bound a row, that bound is rounded up with S_kv."""
    steps = {replace(SHORT, S=1, S_kv=keys, max_length=keys).request_class() for keys in (5000, 5001, 8192)}
    assert {(step.S_kv, step.max_length) for step in steps} == {(8192, 8192)}
    assert len(steps) == 1
    assert replace(SHORT, S=1, S_kv=5000).request_class().max_length == SHORT.max_length


def test_the_prior_equals_the_committed_maps() -> None:
    assert cost_fit.prior() == settings_for(UNKNOWN).sharing_prior


def test_a_measured_selection_counts_by_its_mean_length() -> None:
    """In the min-L gate and the tuner's key. Without measure() ranges count as all keys."""
    q, k, v = make_qkv(S=2, G=1, h=1, Dk=8, S_kv=4000)
    selection = Selection.from_ranges(torch.tensor([[[[[0, 6]]], [[[0, 3010]]]]]).int().view(1, 2, 1, 1, 2))
    assert (request_of(q, k, v, selection, False).length, shape_of(request_of(q, k, v, selection, False))[3]) == (4000, 4096)
    selection.measure(4000)
    found = request_of(q, k, v, selection, False)
    assert (found.max_length, found.mean_length, found.length, shape_of(found)[3]) == (3010, 1500, 1500, 2048)


def fresh() -> tuple[tuple[Tensor, ...], Selection]:
    case = prefill("random", 32768, 1)
    return make_inputs(case, "cuda")[:3], make_selection(case, "cuda")


@pytest.mark.gpu
def test_only_the_first_call_of_a_kind_waits(logged: Events) -> None:
    (q, k, v), selection = fresh()
    selection_attention(q, k, v, selection)
    assert len(logged("sel.sharing")) == 1
    other = Selection(selection.ranges.clone(), 64, disjoint=True)
    with no_waiting():
        selection_attention(q, k, v, other)
    assert len(logged("sel.sharing")) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True])
def test_a_capture_never_counts(warm: bool, logged: Events) -> None:
    (q, k, v), selection = fresh()
    expected = selection_attention(q, k, v, selection)
    for name in ("triton-tile", "triton-group", "cupy-cuda"):  # one of which the prior picks: it is compiled
        if explain(q, k, v, selection, backend=name).forward:
            selection_attention(q, k, v, selection, backend=name)
    reset()
    if warm:
        graph, outputs = captured(lambda: (selection_attention(q, k, v, selection),))
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = (selection_attention(q, k, v, selection),)
    source = decisions()[-1].sharing_source
    assert source == ("counted at the first call" if warm else "prior of base.yaml")
    torch.testing.assert_close(replayed(graph, outputs)[0], expected, rtol=2e-2, atol=2e-2)
    selection_attention(q, k, v, selection)
    assert decisions()[-1].sharing_source == "counted at the first call"
    assert len(logged("sel.sharing")) == 2
