"""How long a backend would take: work counted from the request, weighed by coefficients that a profile fitted to measured rows.

    ms = max(host, sum of coefficient x work)

The host queues kernels while the device works, so that the slower of both is what a call takes. Every kind of work is something
that a kernel provably does (bytes of K and V loaded, products on tensor cores, partial results moved); what one unit of it costs is
measured, never assumed. Pure arithmetic: no tensors, no clock, and the same number on every machine.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.core.backend import Backend
from nsa_sel.core.decision import Case
from nsa_sel.core.request import SHARING_TOKENS, Request

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
TILE_ROWS = 64  # tokens x heads that a tile, or a step of a block's rows, holds
MOST_PARTS = 64  # a row of a small batch is split among at most so many programs, about one for each multiprocessor


class Blocks(NamedTuple):
    """(row, block) pairs, summed over all rows of a request."""

    chosen: float
    visible: float  # if every row chose all the blocks that it may see


def blocks_of(request: Request) -> Blocks:
    """The blocks of rows at the positions S_kv - S ... S_kv - 1: the first rows of a text see fewer than n."""
    block = request.block_size or 1
    first, last = max(0, request.S_kv - request.S), request.S_kv

    def started(keys: int) -> int:
        """Sum of ceil(x / block) over x = 1 ... keys: the blocks that begin at or before each of so many positions."""
        whole, rest = divmod(keys, block)
        return block * whole * (whole + 1) // 2 + rest * (whole + 1)

    def at_most(n: int, keys: int) -> int:
        full = min(keys, n * block)
        return started(full) + n * (keys - full)

    n = -(-request.max_length // block)
    rows = request.B * request.G * request.S / max(1, last - first)
    return Blocks(rows * (at_most(n, last) - at_most(n, first)), rows * (started(last) - started(first)))


def sharing_at(sharing: tuple[float, ...], tokens: int) -> float:
    """The blocks of so many adjacent tokens over those of one; between the sizes that are known, a line over the logarithm."""
    place = math.log2(min(max(1, tokens), SHARING_TOKENS[-1]))
    low = min(int(place), len(sharing) - 2)
    return sharing[low] + (place - low) * (sharing[low + 1] - sharing[low])


def tile_blocks(request: Request, sharing: tuple[float, ...], tokens: int) -> float:
    """(tile, block) pairs of tiles of so many adjacent tokens; no union passes what may be seen."""
    pairs, visible = blocks_of(request)
    tokens = min(tokens, max(1, request.S))
    return min(pairs * sharing_at(sharing, tokens), visible) / tokens


def work(request: Request, backward: bool, sharing: tuple[float, ...], sm_count: int) -> dict[str, float]:
    """The amount of every kind of work in `nsa_sel.settings.schema.COST_TERMS`, in its unit, for selections of whole blocks.

    sm_count: multiprocessors of the GPU.
    """
    size, h, Dk, Dv = BYTES[request.dtype], request.h, request.Dk, request.Dv
    block = request.block_size or 1
    pairs = blocks_of(request).chosen
    keys = pairs * block
    rows = request.B * request.S * request.G
    tokens = max(1, TILE_ROWS // h)
    tile_rows = TILE_ROWS * -(-h // TILE_ROWS)
    wide_k, wide_v = tile_columns(Dk, Dv, size)  # on tensor cores; loads leave the padding out
    # Products with one (row, key): logits and o; tiles then recompute logits and take dP and dQ; blocks logits, dP, dV and dK.
    tile_widths = 2 * wide_k + wide_v if backward else wide_k + wide_v
    exact_widths = 2 * wide_k + 2 * wide_v if backward else wide_k + wide_v
    # What a pair moves through memory: q in and a partial o out and in; q and do in and a partial dq out and in.
    partial_widths = Dk + Dv + 2 * Dk if backward else Dk + 2 * Dv
    walk = keys / max(1, rows) / 1e3
    parts = max(1, min(MOST_PARTS, sm_count // max(1, rows)))
    read = keys * -(-h // TILE_ROWS) * (Dk + Dv) * size
    suffix = "-wide" if launch_class(wide_k + wide_v, size) else ""
    return {
        "launch": 1.0,
        "walk": walk,
        "split-walk": walk / parts if rows <= sm_count else 0.0,
        "union": tile_blocks(request, sharing, tokens) * block * tokens / max(1, rows) / 1e3,
        "pairs": pairs / 1e6,
        "rows": rows * h * (Dk + Dv) * size * (2 if backward else 1) / 1e9,
        "read" + suffix: read / 1e9,
        "reread" + suffix: keys * h * (Dk + Dv) * size / 1e9,
        "distinct": tile_blocks(request, sharing, 64) * block * (Dk + Dv) * size / 1e9,
        "tile" + suffix: tile_blocks(request, sharing, tokens) * block * tile_rows * 2 * tile_widths / 1e12,
        "exact" + suffix: keys / tokens * tile_rows * 2 * exact_widths / 1e12,
        "partials": pairs * h * partial_widths * size / 1e9,
        "scores": keys * h / 1e9,
    }


def modelled(backend: Backend, request: Request, backward: bool) -> bool:
    """Whether the backend's cost model covers such calls.

    Paged caches: only a backend that reads the pages itself; for others the cost of gathering ranges was not measured.
    Tile kernels: the model counts their work, and calls that they do not take run on other kernels.
    """
    if request.page_size is not None:
        return backend.reads_caches
    if backend.tiles is None or request.S == 1:
        return True
    return backend.tiles.take(request) and not (backward and request.Dk > backend.tiles.backward_key_dim_max)


def predict(case: Case, backend: Backend) -> float | None:
    """Milliseconds to four digits; None where the profile's rows do not speak for such a request."""
    request, costs = case.request, case.settings.costs
    model = costs and costs.models.get(f"{backend.name}/{case.way}")
    if not costs or not model or request.dtype not in costs.dtypes or request.block_size is None:
        return None
    if not modelled(backend, request, case.direction == "backward"):
        return None
    amounts = work(request, case.direction == "backward", request.sharing or case.settings.sharing_prior, case.device.sm_count)
    wide = any(term.endswith("-wide") for term in amounts)
    if wide and not any(term.endswith("-wide") for term in model.terms):
        return None
    ms = max(model.host, sum(ms_each * amounts.get(term, 0.0) for term, ms_each in model.terms.items()))
    return float(f"{ms:.4g}")
