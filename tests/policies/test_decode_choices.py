"""The names of caches that rows of decoding carry."""

from __future__ import annotations

import pytest

from nsa_sel.bench.core.cases import GROUPS_FIRST, Cache, split_cache, with_cache
from nsa_sel.bench.tune import cost_fit


@pytest.mark.parametrize(
    "cache", [None, Cache(None), Cache(16, GROUPS_FIRST), Cache(64, quantized="e4m3/head"), Cache(None, GROUPS_FIRST, "e4m3")], ids=str
)
def test_rows_name_the_cache_that_their_keys_are_in(cache: Cache | None) -> None:
    name = with_cache("cupy-cuda", cache)
    assert split_cache(name) == ("cupy-cuda", cache)
    row = {"backend": name, "direction": "decode", "S": 1}
    assert (cost_fit.backend_of(row), cost_fit.cache_of(row)) == ("cupy-cuda", cache)


@pytest.mark.parametrize("name", ["dense, causal", "triton-group, copied, twice", "fla, pages of 64, elsewhere"])
def test_other_names_name_no_cache(name: str) -> None:
    assert split_cache(name) == (name, None)
