"""Fitting prices of work to measured rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from nsa_sel.bench.core.cases import Cache, prefill, serving_cases, with_cache
from nsa_sel.bench.tune import cost_fit
from nsa_sel.policies.cost import work

TILE = "triton-tile"


def test_least_squares_gives_no_negative_prices() -> None:
    random = np.random.default_rng(0)
    factors = random.random((30, 4))
    votes = np.ones(30)
    planted = np.array([0.5, 0.0, 2.0, 0.25])
    scaled = factors / (factors @ planted)[:, None]
    assert cost_fit.least_squares(scaled, votes) == pytest.approx(planted, abs=1e-6)
    against = np.hstack((scaled[:, :2], -scaled[:, 2:3], scaled[:, 3:]))  # whose best price would be -2
    found = cost_fit.least_squares(against, votes)
    assert (found >= 0).all()
    assert found[2] == 0


def planted_rows(host: float, terms: dict[str, float]) -> list[dict[str, Any]]:
    cases = [prefill(kind, S * 1024, h) for kind, S in (("real", 1), ("real", 8), ("random", 8), ("random", 32)) for h in (16, 4, 1)]
    rows = []
    for case in cases:
        sharing = cost_fit.sharing_of(case)
        amounts = work(cost_fit.request_of(case, sharing, False), False, sharing)
        ms = max(host, sum(price * amounts[term] for term, price in terms.items()))
        rows.append({**case._asdict(), "direction": "fwd", "backend": TILE, "ms_median": ms, "ms_p20": ms, "ms_p80": ms})
    return rows


def test_fitting_recovers_a_planted_model() -> None:
    terms = {"launch": 0.02, "tile": 2.0, "rows": 0.3}
    fitted = cost_fit.fit(f"{TILE}/forward", planted_rows(0.15, terms))
    assert fitted.host == pytest.approx(0.15, rel=1e-3)
    assert {term: price for term, price in fitted.terms.items() if price > 1e-3} == pytest.approx(terms, rel=1e-2)
    assert fitted.worst_error < 0.01
    assert "tile-wide" not in fitted.terms  # of which there is no row


def test_rows_of_one_size_share_one_vote() -> None:
    rows = planted_rows(0.0, {"tile": 2.0})
    odd = [{**rows[0], "case": f"again {i}", "ms_median": rows[0]["ms_median"] * 3} for i in range(50)]
    assert cost_fit.fit(f"{TILE}/forward", rows + odd).median_error > 0.5  # by far the most rows, and not followed
    assert cost_fit.fit(f"{TILE}/forward", rows[1:] + odd[:1]).terms["tile"] == pytest.approx(2.0, rel=0.2)


def test_noisy_times_have_less_weight() -> None:
    rows = planted_rows(0.0, {"tile": 2.0})
    wrong = {**rows[0], "case": "again", "ms_median": rows[0]["ms_median"] * 3}
    scattered = {**wrong, "ms_p20": wrong["ms_median"] / 3, "ms_p80": wrong["ms_median"] * 2}
    surely, hardly = (
        abs(cost_fit.fit(f"{TILE}/forward", [*rows[1:], row]).terms["tile"] - 2.0)
        for row in ({**wrong, "ms_p20": wrong["ms_median"], "ms_p80": wrong["ms_median"]}, scattered)
    )
    assert hardly < surely / 10


def test_rows_of_other_contenders_are_skipped() -> None:
    row = planted_rows(0.0, {"tile": 2.0})[0]
    assert cost_fit.is_cost_row(row)
    for field, value in (("backend", "dense-cudnn"), ("direction", "fwd+bwd")):
        assert not cost_fit.is_cost_row({**row, field: value})
    assert not cost_fit.is_cost_row({"kernel": "tile", "bytes": 1})
    assert not cost_fit.is_cost_row({**row, "distribution": "packed"})


def test_quantized_caches_have_models_of_their_own() -> None:
    """Of half the bytes a key, and of gathering from small pages."""
    backend, planted, rows = "triton-group", {"launch": 0.004, "read": 0.25, "gathered": 0.1}, []
    caches = (Cache(None), Cache(None, quantized="e4m3/head"), Cache(64, quantized="e4m3/page"), Cache(16, quantized="e4m3/head"))
    for case, cache in product(serving_cases(), caches):
        amounts, plain = (work(cost_fit.request_of(case, None, False, given), False, (1.0, 1.5, 2.0)) for given in (cache, None))
        assert amounts["read"] == plain["read"] / (2 if cache.quantized else 1)
        ms = sum(price * amounts[term] for term, price in planted.items()) * (1 if cache.quantized else 3)
        times = dict.fromkeys(("ms_median", "ms_p20", "ms_p80"), ms)
        rows.append({**case._asdict(), "direction": "decode", "backend": with_cache(backend, cache), **times})
    models = cost_fit.models(rows)
    assert set(models) == {f"{backend}/{phase}" for phase in ("decode", "decode-e4m3", "tokens", "tokens-e4m3")}
    few, many = models[f"{backend}/decode-e4m3"], models[f"{backend}/tokens-e4m3"]
    by_rows = {"launch": 0.004, "read": 0.25, "gathered": 0.1}
    assert {term: price for term, price in few.terms.items() if price > 1e-4} == pytest.approx(by_rows, rel=1e-2)
    assert {term: price for term, price in many.terms.items() if price > 1e-4} == pytest.approx(planted, rel=1e-2)
    assert models[f"{backend}/decode"].terms["read"] == pytest.approx(0.75, rel=1e-2)
