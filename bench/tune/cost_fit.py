"""Fit cost models to measured rows.

policies/cost.py counts the work. Here each kind of work gets its price, by least squares of the relative error. Prices
are never negative, so more work is never predicted to be cheaper. The exception: decoding batches with more rows than
the GPU has multiprocessors have prices of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product

import msgspec
import numpy as np

from nsa_sel.backends.specs import CHOOSERS, LOSSES, SPECS
from nsa_sel.bench.core.cases import CHOICE, LAYERS, Cache, Case, layer_selection, make_selection, split_cache
from nsa_sel.bench.core.store import ROOT, WAYS, Row, digest, read_rows
from nsa_sel.core.call import Rule
from nsa_sel.core.request import SHARING_TOKENS, Request, phase_of_format
from nsa_sel.policies.cost import gathers, modelled, work_of
from nsa_sel.selection import Selection
from nsa_sel.settings.schema import CostModel, Costs

BACKENDS = {backend.name: backend for backend in (*SPECS, *CHOOSERS, *LOSSES)}
TERMS = {f"{backend.name}/{phase}": terms for backend in BACKENDS.values() for phase, terms in backend.cost_terms.items()}
OF_CACHES = {"gathered", "rows-read"}  # terms that no plain call has
LOSS_PARTS = ("sparse", "warm-up")  # rows of bench/questions/indexer_loss.py: over selected keys, over all visible keys
PHASES: Mapping[object, Mapping[str, str]] = {  # by part or distribution; `WAYS` are those of others
    CHOICE: {"fwd": "choose", "bwd": "choose-backward"}, **{part: {"fwd+bwd": "index-loss"} for part in LOSS_PARTS},
}  # fmt: skip
DTYPES = {"bfloat16": ("bfloat16", "float16")}  # dtype of rows -> dtypes that the model holds for: same size, same tensor cores
SCATTER = 0.1  # spread of a row's percentiles over its median that halves its weight
HOST_SPREAD = 2.0  # host-bound calls take at most this many times as long as the fastest call


# Rows


def backend_of(row: Row) -> str:
    """Return the backend that a row measured, without the cache that it read."""
    return split_cache(str(row.get("backend")))[0]


def cache_of(row: Row) -> Cache | None:
    """Return the KV cache that a row's call read; None for a plain call."""
    return split_cache(str(row.get("backend")))[1]


def case_of(row: Row) -> Case:
    """Return the case that a row measured. The distribution of a loss is its part: how rows share does not change it."""
    case = Case(*(row[field] for field in Case._fields))
    return case._replace(distribution=row["part"]) if row.get("part") in LOSS_PARTS else case


def phase_of(row: Row) -> str | None:
    """Return `Request.phase` of what the row measured; None for both directions in one."""
    phase = PHASES.get(row.get("part", row.get("distribution")), WAYS).get(str(row.get("direction")))
    if phase != "decode":
        return phase
    cache = cache_of(row)
    return phase_of_format("decode" if row.get("S") == 1 else "tokens", cache and cache.quantized)


def model_of(row: Row) -> str:
    """Return the name of the model for such rows, a key of TERMS if there is one."""
    return f"{backend_of(row)}/{phase_of(row)}"


def is_time(row: Row) -> bool:
    """Return True if the row is the time of a backend of TERMS on a selection of whole blocks: the policy's choices are
    compared with it.
    """
    if row.get("ms_median") is None or not row.get("block") or row.get("streams", 1) != 1 or "ranks" in row:
        return False
    if row.get("distribution") == "packed" or not all(field in row for field in Case._fields):
        return False
    return model_of(row) in TERMS


def is_cost_row(row: Row) -> bool:
    """Return True if a model is fitted to the row: `is_time`, of a call that its backend's model covers."""
    return is_time(row) and modelled(BACKENDS[backend_of(row)], row_request(row, None), row.get("direction") == "bwd")


def committed_rows(wanted: Callable[[Row], bool], folder: str) -> dict[str, list[Row]]:
    """Return by file the last row of each case, direction and backend among those wanted.

    Args:
        wanted: `is_cost_row` for the rows that models are fitted to, `is_time` for all times.
        folder: of JSON-lines files, relative to the repository's root.
    """
    last: dict[tuple[Case, str, str], tuple[str, Row]] = {}
    for file in sorted((ROOT / folder).glob("*.jsonl")):
        name = file.relative_to(ROOT).as_posix()
        for row in filter(wanted, read_rows(name)):
            last[case_of(row), row["direction"], row["backend"]] = (name, row)
    found: dict[str, list[Row]] = {}
    for name, row in last.values():
        found.setdefault(name, []).append(row)
    return found


# Requests


def sharing_of(case: Case) -> tuple[float, ...]:
    """Return the sharing of a case's selection, to two decimals: measured on the committed maps, or the mean over
    random selections.
    """
    if case.distribution in (CHOICE, *LOSS_PARTS):
        return (1.0,) * len(SHARING_TOKENS)  # not used
    if case.distribution == "random":
        exact = _random_sharing(case.S, case.S_kv, case.n, case.block)
    else:  # whatever h: the heads of a group share their selection
        exact = _real_sharing(case._replace(case=case.case.replace(f"-h{case.h}", "-h1"), h=1))
    return tuple(round(ratio, 2) for ratio in exact)


@cache
def _real_sharing(case: Case) -> tuple[float, ...]:
    sharing = make_selection(case, "cpu").measure(case.S_kv).sharing
    assert sharing is not None, "real selections are of whole blocks"
    return sharing


@cache
def _random_sharing(S: int, S_kv: int, n: int, block: int) -> tuple[float, ...]:
    """Return the mean of `Selection.measure` over all draws of `random_selection` (bench/core/cases.py).

    Of the v blocks that a row sees, f are forced. Each row selects each of the others independently, with probability
    p = (n - f) / (v - f), so a tile of t rows misses a block with probability (1 - p)^t.
    """
    first, local = int(n > 1), min(2, max(1, n - 1))
    current = np.arange(S_kv - S, S_kv) // block
    seen = current + 1.0
    forced = np.minimum(seen, first + local)
    left_out = 1 - (np.minimum(seen, n) - forced) / np.maximum(1, seen - forced)
    means = []
    for tokens in SHARING_TOKENS:
        starts = slice(None, None, tokens)
        chosen = forced[starts] + (seen - forced)[starts] * (1 - left_out[starts] ** min(tokens, S))
        means.append(float(chosen.mean()))
    return tuple(mean / means[0] for mean in means)


def request_of(case: Case, sharing: tuple[float, ...] | None, needs_grad: bool, cache: Cache | None = None) -> Request:
    """Return the request class of a case, as the policy gets it. cache: of the keys."""
    exact = Request(
        B=case.B, S=case.S, S_kv=case.S_kv, G=case.G, h=case.h, Dk=case.Dk, Dv=case.Dv, n=case.n, block_size=case.block,
        max_length=min(case.n * case.block, case.S_kv), dtype=case.dtype, needs_grad=needs_grad, sharing=sharing if case.S > 1 else None,
        page_size=cache and cache.page_size, quantized=cache and cache.quantized,
    )  # fmt: skip
    if case.distribution == CHOICE:
        compress = Rule().compress_block, Rule().compress_stride
        exact = msgspec.structs.replace(exact, kind="choose", compress=compress, max_length=case.S_kv, sharing=None)
    if case.distribution in LOSS_PARTS:
        exact = msgspec.structs.replace(exact, kind="index_loss", needs_grad=True, sharing=None)
    if case.distribution == "warm-up":
        exact = msgspec.structs.replace(exact, n=1, block_size=None, max_length=case.S_kv)
    return exact.request_class()


def row_request(row: Row, sharing: tuple[float, ...] | None) -> Request:
    """Return `request_of` what a row measured."""
    return request_of(case_of(row), sharing, row.get("direction") == "bwd", cache_of(row))


def prior() -> tuple[float, ...]:
    """Return `runtime.sharing_prior` of configs/base.yaml: the mean over all (layer, KV head) maps, to two digits."""
    found = []
    for layer in range(LAYERS):
        maps = layer_selection([layer], "cpu")
        for g in range(maps.ranges.shape[2]):
            alone = Selection(maps.ranges[:, :, g : g + 1], maps.block_size, disjoint=True)
            found.append(alone.measure(alone.ranges.shape[1]).sharing)
    return tuple(round(float(ratio), 2) for ratio in np.mean(np.array(found), axis=0))


# The fit


def costs(rows: Sequence[Row], sources: Sequence[str]) -> Costs:
    """Return the `costs:` part of a profile: the model of every backend and direction in the rows.

    Args:
        rows: all pass `is_cost_row`.
        sources: where the rows come from, in words.
    """
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(model_of(row), []).append(row)
    models = {name: fit(name, by_model[name]) for name in TERMS if name in by_model}
    errors = sorted(model.median_error for model in models.values())
    finding = (
        f"ms = max(host, sum of price x work), non-negative least squares of the relative error over {len(rows)} rows of {len(models)}"
        f" models; median errors {errors[0]:.1%} to {errors[-1]:.1%}, worst {max(model.worst_error for model in models.values()):.1%}"
    )
    dtypes = sorted({dtype for row in rows for dtype in DTYPES.get(row["dtype"], (row["dtype"],))})
    return Costs(provenance="; ".join((finding, *sources)), dtypes=tuple(dtypes), models=models)


def source(name: str, rows: Sequence[Row]) -> str:
    """Return a committed file of rows with its hash and row count."""
    return f"{name} (sha256 {digest(name)}, {len(rows)} rows)"


def fit(name: str, rows: Sequence[Row]) -> CostModel:
    """Return the model with the least weighted sum of squared relative errors over the rows of one backend and
    direction.

    Rows of the same sizes share a weight of 1, but those whose keys are gathered from small pages have one of their
    own: thirty layers do not outweigh the other lengths, nor caches in many forms a plain call. Noisy times weigh less.
    The rows do not say which calls are host-bound: for each k, the k fastest are assumed to be, and the best k is kept.

    Args:
        name: a key of TERMS.
        rows: whose `model_of` is this name.
    """

    def work(row: Row) -> dict[str, float]:
        sharing = sharing_of(case_of(row))
        return work_of(BACKENDS[backend_of(row)], row_request(row, sharing), name.endswith("backward"), sharing)

    def digits(number: float) -> float:
        return float(f"{number:.4g}")

    rows = sorted(rows, key=lambda row: float(row["ms_median"]))
    ms = np.array([row["ms_median"] for row in rows])
    amounts = np.array([[counted.get(term, 0.0) for term in TERMS[name]] for counted in map(work, rows)])
    sizes = [(case_of(row)[1:], gathers(row_request(row, None))) for row in rows]
    alike = Counter(sizes)
    scatter = np.array([(row["ms_p80"] - row["ms_p20"]) / row["ms_median"] for row in rows])
    votes = np.array([1 / alike[size] for size in sizes]) / (1 + (scatter / SCATTER) ** 2)
    used = [i for i in range(amounts.shape[1]) if amounts[:, i].any()]
    most = max(0, min(len(rows) - len(used), int((ms <= HOST_SPREAD * ms[0]).sum())))
    candidates = []
    for k in range(most + 1):
        host = float(np.exp(np.average(np.log(ms[:k]), weights=votes[:k]))) if k else 0.0
        prices = least_squares(amounts[k:, used] / ms[k:, None], votes[k:])
        loss = float(votes @ (np.maximum(host, amounts[:, used] @ prices) / ms - 1) ** 2)
        candidates.append((loss, k, host, prices))
    _, _, host, prices = min(candidates, key=lambda found: found[:2])
    host, terms = digits(host), {TERMS[name][i]: digits(price) for i, price in zip(used, prices, strict=True)}
    errors = np.abs(np.maximum(host, amounts[:, used] @ np.array(list(terms.values()))) / ms - 1)
    return CostModel(
        host=host, terms=terms, rows=len(rows), median_error=round(float(np.median(errors)), 3), worst_error=round(float(errors.max()), 3)
    )


def least_squares(factors: np.ndarray, votes: np.ndarray) -> np.ndarray:
    """Return the x >= 0 [terms] that minimizes the sum of votes * (factors @ x - 1)^2, exactly: all subsets of the few
    terms are tried.
    """
    scale = np.abs(factors).max(axis=0, initial=0)
    scale = np.where(scale > 0, scale, 1)
    root = np.sqrt(votes)[:, None]
    # R of the QR decomposition has the same residuals in a few rows.
    small = np.linalg.qr(np.hstack((factors / scale * root, root)))[1]
    subsets = np.array(sorted(product((True, False), repeat=factors.shape[1]), key=sum))
    some = small[:, :-1] * subsets[:, None]  # [subsets,rows,terms], 0 for terms that are left out
    prices = np.where(subsets, np.linalg.pinv(some) @ small[:, -1], 0.0)
    losses = ((some @ prices[:, :, None] - small[:, -1:]) ** 2).sum((1, 2))
    losses[(prices < 0).any(1)] = np.inf
    found: np.ndarray = prices[np.argmax(losses < losses.min() + 1e-9)] / scale  # of equal ones the first of the smallest
    return found
