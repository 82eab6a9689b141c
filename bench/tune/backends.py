"""What tuning knows of backends, as data: the one list of their names in bench/tune."""

from __future__ import annotations

from nsa_sel.bench.tune.search_space import SPACES

_GROUP = ("launch", "read", "distinct", "rows", "read-wide")
_PACKED = ("launch", "pairs", "read", "scores", "rows", "read-wide")
# What each backend's kernels spend their time on; see COST_TERMS in nsa_sel/settings. One wide term per model: few rows are wide.
TERMS = {
    "triton-group/forward": _GROUP,
    "triton-group/decode": ("launch", "walk", "split-walk", "read", "read-wide"),
    "triton-group/backward": ("launch", "pairs", "read", "exact", "rows", "exact-wide"),
    "triton-tile/forward": ("launch", "union", "pairs", "tile", "distinct", "rows", "tile-wide"),
    "triton-tile/backward": ("launch", "union", "pairs", "tile", "exact", "rows", "exact-wide"),
    "triton-block/forward": ("launch", "pairs", "exact", "partials", "rows", "exact-wide"),
    "triton-block/backward": ("launch", "pairs", "exact", "partials", "rows", "exact-wide"),
    "triton-token/forward": ("launch", "reread", "scores", "reread-wide"),
    "triton-token/decode": ("launch", "walk", "split-walk", "reread", "scores", "reread-wide"),
    "triton-token/backward": ("launch", "pairs", "reread", "scores", "exact", "reread-wide"),
    "cupy-cuda/forward": ("launch", "union", "pairs", "tile", "distinct", "rows", "tile-wide"),
    "cupy-cuda/decode": ("launch", "walk", "read", "read-wide"),
    "cupy-cuda/backward": ("launch", "pairs", "tile", "exact"),
    "sdpa-packed/forward": _PACKED,
    "sdpa-packed/decode": _PACKED,
    "sdpa-packed/backward": _PACKED,
}

TUNED = tuple(dict.fromkeys(space.backend for space in SPACES))  # have kernel configs
MODELED = tuple(dict.fromkeys(name.partition("/")[0] for name in TERMS))  # have a cost model
THRESHOLD_SIDES = ("triton-group", "sdpa-packed")  # the threshold is the L from which on the first one is ahead
SLOW = ("triton-token", "sdpa-packed")  # up to seconds per call on many rows: their cost models are fitted to fewer
