"""How much adjacent tokens share: measured, expected, and in requests."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.bench.core.cases import prefill, random_selection
from nsa_sel.bench.tune import cost_fit
from nsa_sel.core import decide
from nsa_sel.core.call import request_of
from nsa_sel.core.check import check_call
from nsa_sel.core.request import SHARING_TOKENS
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.tuned import shape_of
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.policy_cases import H200, SHORT, UNKNOWN, replace

SIMILAR = (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6)
DIFFERENT = (1.0, 1.9, 3.5, 5.0, 6.0, 6.5, 7.0)


def brute_force_sharing(selection: Selection, S_kv: int, tokens: int) -> float:
    """Distinct visible blocks of tiles over those of rows, with Python's sets."""
    B, S, G, n = selection.ranges.shape[:4]
    ranges = selection.ranges.tolist()

    def chosen(b: int, s: int, g: int) -> set[int]:
        return {start for start, end in ranges[b][s][g] if start < min(end, S_kv - S + s + 1)}

    pairs = [(b, g) for b in range(B) for g in range(G)]
    rows = [len(chosen(b, s, g)) for b, g in pairs for s in range(S)]
    stretches = [range(first, min(first + tokens, S)) for first in range(0, S, tokens)]
    tiles = [len(set().union(*(chosen(b, s, g) for s in stretch))) for b, g in pairs for stretch in stretches]
    return (sum(tiles) / len(tiles)) / (sum(rows) / len(rows))


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


def test_equal_sharing_shares_a_decision() -> None:
    decide.forget_decisions()
    first = decide.select(replace(SHORT, sharing=DIFFERENT), H200)
    assert decide.select(replace(SHORT, sharing=tuple(DIFFERENT[:])), H200) is first
    assert decide.select(SHORT, H200) is not first


def test_the_class_of_a_full_prefill_keeps_its_length() -> None:
    """With S_kv rounded up, early rows would seem to see more keys."""
    whole = replace(SHORT, S=5000, S_kv=5000)
    assert whole.request_class().S_kv == 5000
    assert replace(whole, S=5).request_class().S_kv == 8192
    for request in (whole, replace(whole, S=5), replace(SHORT, S=1, S_kv=1)):
        assert request.request_class().request_class() == request.request_class()


def test_the_prior_equals_the_committed_maps() -> None:
    assert cost_fit.prior() == settings_for(UNKNOWN).sharing_prior


@pytest.mark.parametrize("n", [1, 2, 16])
def test_expected_sharing_equals_that_of_random_selections(n: int) -> None:
    case = prefill("random", 2048, 16)._replace(n=n)
    measured = random_selection(case, "cpu", seed=0).measure(case.S_kv).sharing
    assert cost_fit.sharing_of(case) == pytest.approx(measured, rel=0.02)


def test_a_measured_selection_counts_by_its_mean_length() -> None:
    """In the min-L gate and the tuner's key. Without measure() ranges count as all keys."""
    q, k, v = make_qkv(S=2, G=1, h=1, Dk=8, S_kv=4000)
    selection = Selection.from_ranges(torch.tensor([[[[[0, 6]]], [[[0, 3010]]]]]).int().view(1, 2, 1, 1, 2))
    assert (request_of(q, k, v, selection, False).length, shape_of(request_of(q, k, v, selection, False))[3]) == (4000, 4096)
    selection.measure(4000)
    found = request_of(q, k, v, selection, False)
    assert (found.max_length, found.mean_length, found.length, shape_of(found)[3]) == (3010, 1500, 1500, 2048)
