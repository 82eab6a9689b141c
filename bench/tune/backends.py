"""Which backends tuning measures: the one list of their names in bench/tune."""

from __future__ import annotations

from nsa_sel.bench.tune.cost_fit import TERMS
from nsa_sel.bench.tune.search_space import SPACES

TUNED = tuple(dict.fromkeys(space.backend for space in SPACES))  # have kernel configs
MODELED = tuple(dict.fromkeys(name.partition("/")[0] for name in TERMS))  # have a cost model
THRESHOLD_SIDES = ("triton-group", "sdpa-packed")  # the threshold is the L from which on the first one is ahead
SLOW = ("triton-token", "sdpa-packed")  # up to seconds per call on many rows: their cost models are fitted to fewer
