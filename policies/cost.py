"""Predict a backend's time for a call: amounts of work derived from the request, times prices fitted to measured rows.

    ms = max(host, sum of price x work)

The host queues kernels while the device works, so a call takes as long as the slower of both. Work counts what kernels
do (bytes of K and V loaded, tensor-core products, partial results moved); a profile holds the price per unit.
The prediction is pure arithmetic: no tensors, no clock, the same number on every machine.
"""

from __future__ import annotations

import math

from nsa_sel.backends.specs import E4M3_TILE_ROWS, HOPPER_STEPS, VISITED_KEYS, VISITED_WHOLE, WIDEST, launch_class, tile_columns
from nsa_sel.core.backend import Backend, PolicyInput
from nsa_sel.core.request import FEW_TOKENS, SHARING_TOKENS, Request

BYTES = {"e4m3": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
TILE_ROWS = 64  # tokens x heads per tile, or per step over a block's rows
STEP = 64  # keys that a kernel loads at once from a page with at least as many keys
OTHERWISE_LOADED = {"gathered", "rows-read"}  # terms of calls whose keys are not loaded in whole steps
OF_OTHER_KERNELS = {*OTHERWISE_LOADED, "visited"}  # models without them do not cover such calls
SMALLEST_BLOCK = 16  # keys: models are fitted to no smaller blocks
LOSS_COLUMNS = 128  # the loss of an indexer takes other kernel configs for wider heads


def ceil_sum(count: int, step: int) -> int:
    """Return the sum of ceil(x / step) over x = 1, ..., count."""
    whole, rest = divmod(count, step)
    return step * whole * (whole + 1) // 2 + rest * (whole + 1)


def blocks_of(request: Request) -> tuple[float, float]:
    """Return the number of (row, block) pairs, summed over the rows at positions S_kv - S, ..., S_kv - 1, and that of the
    blocks that these rows see. The first rows of a sequence see fewer than n blocks."""
    block = request.block_size or 1
    first, last = max(0, request.S_kv - request.S), request.S_kv

    def at_most(n: int, keys: int) -> int:
        full = min(keys, n * block)
        return ceil_sum(full, block) + n * (keys - full)

    n = -(-request.max_length // block)
    rows = request.B * request.G * request.S / max(1, last - first)
    return rows * (at_most(n, last) - at_most(n, first)), rows * (ceil_sum(last, block) - ceil_sum(first, block))


def sharing_at(sharing: tuple[float, ...], tokens: int) -> float:
    """Return the distinct blocks of `tokens` adjacent tokens relative to those of one token, interpolated in
    log2(tokens)."""
    at = math.log2(min(max(1, tokens), SHARING_TOKENS[-1]))
    low = min(int(at), len(sharing) - 2)
    return sharing[low] + (at - low) * (sharing[low + 1] - sharing[low])


def tile_blocks(request: Request, sharing: tuple[float, ...], tokens: int) -> float:
    """Return the number of (tile, block) pairs for tiles of `tokens` adjacent tokens. A union has at most all visible
    blocks."""
    pairs, visible = blocks_of(request)
    tokens = min(tokens, max(1, request.S))
    return min(pairs * sharing_at(sharing, tokens), visible) / tokens


def work(request: Request, backward: bool, sharing: tuple[float, ...]) -> dict[str, float]:
    """Return the amount of work per term of `nsa_sel.settings.schema.COST_TERMS`, in its unit, for selections of whole
    blocks."""
    if request.kind != "attend":
        return choice_work(request, backward) if request.kind == "choose" else loss_work(request)
    size, h, Dk, Dv = BYTES[request.dtype], request.h, request.Dk, request.Dv
    key_bytes = (Dk + Dv) * BYTES[request.quantized.partition("/")[0] if request.quantized else request.dtype]
    block = request.block_size or 1
    pairs = blocks_of(request)[0]
    keys = pairs * block
    rows = request.B * request.S * request.G
    tokens = max(1, TILE_ROWS // h)
    tile_rows = TILE_ROWS * -(-h // TILE_ROWS)
    wide_k, wide_v = tile_columns(Dk, Dv, size)  # padded for tensor cores; loads are not padded
    # Products per (row, key). Forward: logits, o. Backward of tiles: logits, dP, dQ; of blocks: logits, dP, dV, dK.
    tile_widths = 2 * wide_k + wide_v if backward else wide_k + wide_v
    exact_widths = 2 * wide_k + 2 * wide_v if backward else wide_k + wide_v
    read = keys * -(-h // TILE_ROWS) * key_bytes
    suffix = "-wide" if launch_class(wide_k + wide_v, size) else ""
    by_rows = not HOPPER_STEPS.take(request)
    visited = block if block >= VISITED_WHOLE else next((width for width in VISITED_KEYS if block % width == 0), block)
    return {
        "launch": 1.0,
        "rows-read": read / 1e9 if by_rows else 0.0,
        "union": tile_blocks(request, sharing, tokens) * block * tokens / max(1, rows) / 1e3,
        "pairs": pairs / 1e6,
        "partials": keys / visited * h * Dv * size / 1e9,
        "rows": rows * h * (Dk + Dv) * size * (2 if backward else 1) / 1e9,
        "read" + suffix: read / 1e9,
        "gathered": read / 1e9 if gathers(request) else 0.0,
        "tile" + suffix: tile_blocks(request, sharing, tokens) * block * tile_rows * 2 * tile_widths / 1e12,
        "exact" + suffix: keys / tokens * tile_rows * 2 * exact_widths / 1e12,
        "scores": keys * h / 1e9,
    }


def work_of(backend: Backend, request: Request, backward: bool, sharing: tuple[float, ...]) -> dict[str, float]:
    """Return `work` in the terms that the backend's models use."""
    amounts = work(request, backward, sharing)
    if backend.shares == "blocks" and (request.block_size or 0) >= VISITED_WHOLE:  # one term at all widths
        exact = sum(amounts.pop(term, 0.0) for term in ("exact", "exact-wide"))
        # On average, rows do not see half of the block that holds their own position.
        unseen = request.B * request.S * request.G / 2 / max(1.0, blocks_of(request)[0])
        return {**amounts, "visited": exact * (1 - unseen)}
    if request.phase(backward) in backend.same_price_if_wide:
        return {term.removesuffix("-wide"): amount for term, amount in amounts.items()}
    return amounts


def gathers(request: Request) -> bool:
    """Return whether keys are gathered because pages do not hold whole steps (of STEP keys, or one block if that is
    smaller)."""
    return request.page_size is not None and request.page_size % min(STEP, request.block_size or STEP) != 0


def choice_work(request: Request, backward: bool) -> dict[str, float]:
    """Return `work` of a "choose" request: attention to compressed keys and, forward, the selection of the best
    blocks."""
    size, h, Dk, Dv = BYTES[request.dtype], request.h, request.Dk, request.Dv
    wide_k, wide_v = tile_columns(Dk, Dv, size)
    # Products per (row, key). Forward: logits, o, and the logits again for importance. Backward: logits, dP, dQ; then
    # logits, dP, dV, dK.
    widths = 4 * wide_k + 3 * wide_v if backward else 2 * wide_k + wide_v
    rows, (block, stride) = request.B * request.S * request.G, request.compress or (1, 1)
    first, last = max(0, request.S_kv - request.S), request.S_kv
    seen_first, seen_last = (ceil_sum(max(0, keys - block + 1), stride) for keys in (first, last))
    seen = rows / max(1, last - first) * (seen_last - seen_first)  # (row, visible compressed key) pairs
    suffix = "-wide" if launch_class(wide_k + wide_v, size) else ""
    return {
        "launch": 1.0,
        "rows": rows * h * (Dk + Dv) * size * (2 if backward else 1) / 1e9,
        "compressed" + suffix: seen * h * 2 * widths / 1e12,
        "scores": seen * h / 1e9,
    }


def loss_work(request: Request) -> dict[str, float]:
    """Return `work` of an "index_loss" request with gradients: of blocks, or of all visible keys without a block size."""
    pairs, visible = blocks_of(request)
    block, h = request.block_size or 1, request.h
    wide, wide_index = tile_columns(request.Dk, request.Dv, BYTES[request.dtype])
    # Products per (row, key): logits of the h heads; index logits for their log-sum-exp, and again; diq, dik.
    return {
        "launch": 1.0,
        "pairs": pairs / 1e6 if request.block_size else 0.0,
        "exact": pairs * block * 2 * h * wide / 1e12,
        "indexed": pairs * block * 2 * 4 * wide_index / 1e12,
        "visible": visible * block * h / 1e9,
    }


def beyond_models(request: Request) -> str | None:
    """Return what puts the request outside all cost models, or None.

    Such requests are far from the rows that models are fitted to. For keys and values of 256 columns, models of fewer
    columns predicted 0.1x to 2x of the measured time (bench/results/h100/wide.jsonl).
    """
    if request.kind != "choose" and request.block_size is not None and request.block_size < SMALLEST_BLOCK:
        return f"blocks of less than {SMALLEST_BLOCK} keys"
    wide = BYTES[request.dtype] == 2 and sum(tile_columns(request.Dk, request.Dv, 2)) > WIDEST
    return f"keys and values of more than {WIDEST} columns" if wide else None


def modelled(backend: Backend, request: Request, backward: bool) -> bool:
    """Return whether the backend's cost model covers the request.

    Not covered: requests outside all models (`beyond_models`); calls that the backend's tile kernels do not take,
    because other kernels run; and calls that were not measured: paged caches that the backend does not read itself,
    prefills over small pages, choosing for one query per sequence or without attention, losses without gradients, over
    ranges, or of wide heads. Calls over quantized caches have their own models.
    """
    if beyond_models(request):
        return False
    if request.kind == "index_loss":
        counted = request.block_size is not None or (request.n, request.max_length) == (1, request.S_kv)
        return counted and request.needs_grad and max(request.Dk, request.Dv) <= LOSS_COLUMNS
    if request.block_size is None:
        return False
    if request.kind == "choose" and (request.S == 1 or request.pool is not None):
        return False
    if request.page_size is not None and not backend.reads_caches:
        return False
    if gathers(request) and not OTHERWISE_LOADED & set(backend.cost_terms.get(request.phase(backward), ())):
        return False
    if request.quantized and backend.quantized_by is not None and 1 < request.S <= FEW_TOKENS:
        return 2 * request.h > E4M3_TILE_ROWS  # with fewer heads another, unmeasured kernel runs
    if backend.tiles is None or request.S == 1:
        return True
    if request.kind == "attend" and request.S <= FEW_TOKENS and not backward:
        return request.aligned and backend.tiles.fits_few(request.h, request.Dk, request.Dv, request.block_size)
    return backend.tiles.take(request, backward)


def predict(case: PolicyInput, backend: Backend) -> float | None:
    """Return the predicted milliseconds, to four digits, or None if no model of the profile covers the request."""
    request, costs, backward = case.request, case.settings.costs, case.direction == "backward"
    model = costs and costs.models.get(f"{backend.name}/{request.phase(backward)}")
    if not costs or not model or request.dtype not in costs.dtypes:
        return None
    if not modelled(backend, request, backward):
        return None
    amounts = work_of(backend, request, backward, request.sharing or case.settings.sharing_prior)
    wide = any(term.endswith("-wide") for term in amounts)
    if wide and not any(term.endswith("-wide") for term in model.terms):
        return None
    for term in OF_OTHER_KERNELS & set(backend.cost_terms.get(request.phase(backward), ())):
        if amounts.get(term, 0.0) > 0 and term not in model.terms:
            return None
    ms = max(model.host, sum(ms_each * amounts.get(term, 0.0) for term, ms_each in model.terms.items()))
    return float(f"{ms:.4g}")
