"""What the policy picks when a batch decodes, over the committed rows: calls, contiguous and paged caches, one token a sequence or few."""

from __future__ import annotations

import pytest

from nsa_sel.bench.core import caches
from nsa_sel.bench.core.caches import GROUPS_FIRST, Cache
from nsa_sel.bench.report import decoding
from nsa_sel.bench.tune import cost_fit, regret


def test_choices_of_decoding_are_within_5_percent_of_the_best_in_95_percent_of_the_rows() -> None:
    found = decoding.choices()
    asked = [choice.asked for choice in found]
    assert {case.S > 1 for case, _, _ in asked} == {True, False}
    assert {cache and cache.page_size for _, _, cache in asked} >= {None, 16, 64, 256}
    close = sum(choice.regret <= decoding.CLOSE for choice in found)
    assert close >= 0.95 * len(found), f"{regret.summary(found, decoding.CLOSE)}\n{regret.misses(found)}"


@pytest.mark.parametrize(
    "cache", [None, Cache(None), Cache(16, GROUPS_FIRST), Cache(64, quantized="e4m3/head"), Cache(None, GROUPS_FIRST, "e4m3")], ids=str
)
def test_rows_name_the_cache_that_their_keys_are_in(cache: Cache | None) -> None:
    name = caches.named("cupy-cuda", cache)
    assert caches.parsed(name) == ("cupy-cuda", cache)
    row = {"backend": name, "direction": "decode", "S": 1}
    assert (cost_fit.backend_of(row), cost_fit.cache_of(row)) == ("cupy-cuda", cache)


@pytest.mark.parametrize("name", ["dense, causal", "triton-group, copied, twice", "fla, pages of 64, elsewhere"])
def test_other_names_name_no_cache(name: str) -> None:
    assert caches.parsed(name) == (name, None)
