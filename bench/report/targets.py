"""Targets of whole calls on an H200, what they are held to, and what they ask of the tensor cores.

Products are those of (row, key) pairs, of Dk or Dv columns each: two forward, five backward. A tile of 64 / h adjacent tokens computes
those of the union of their blocks: two forward, and three for dq. Four for dk and dv, two of them again, are of the rows that selected a
block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from nsa_sel.bench.core.cases import Case, make_selection
from nsa_sel.bench.core.contenders import DENSE
from nsa_sel.bench.core.markdown import ms, table
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report.roofline import BY_BLOCKS, PEAKS, counted
from nsa_sel.bench.report.summary import Table, indexed, ours, short
from nsa_sel.bench.tune.committed_rows import H200
from nsa_sel.bench.tune.cost_fit import case_of, request_of, sharing_of
from nsa_sel.core.registry import backends
from nsa_sel.policies.cost import work
from nsa_sel.settings.devices import GPUS

TARGETS = {  # ms, plans included
    "fwd": {
        "real-8k-h16": 0.50, "real-8k-h4": 0.17, "real-8k-h1": 0.09,
        "random-32k-h16": 5.0, "random-32k-h4": 1.6, "random-32k-h1": 0.5,
    },
    "bwd": {
        "real-8k-h16": 1.5, "real-8k-h4": 0.55, "real-8k-h1": 0.25,
        "random-32k-h16": 9.0, "random-32k-h4": 2.8, "random-32k-h1": 0.8,
    },
}  # fmt: skip
HEADERS = "case", "direction", "best measured peer", "dense cuDNN", "target", "H200", "H100"
PRODUCTS = "case", "direction", "TFLOP, least", "of its kernel", "target needs", "dense reaches"


class Line(NamedTuple):
    """A target, the rows that it is held to, and TFLOP of the pass: of selected pairs, of the H100's fastest kernel, of all keys."""

    case: str
    direction: str
    target: float
    peer: Row | None
    dense: Row | None
    of_h200: Row | None
    of_h100: Row
    least: float
    kernel: float
    all_keys: float

    @property
    def needed(self) -> float:
        """The share of the measured matmul rate at which the kernel would meet the target."""
        return self.kernel / self.target / PEAKS[H200].matmul_tflops * 1e3

    @property
    def of_dense(self) -> float | None:
        """The share that dense attention reaches."""
        return None if self.dense is None else self.all_keys / self.dense["ms_median"] / PEAKS[H200].matmul_tflops * 1e3


def lines(of_h200: Iterable[Row], of_h100: Iterable[Row], of_peers: Iterable[Row]) -> list[Line]:
    """Of every target that the H100 has rows of."""
    h200, h100, peers = indexed(of_h200), indexed(of_h100), indexed(of_peers)
    found = []
    for direction, name, target in ((direction, *one) for direction, targets in TARGETS.items() for one in targets.items()):
        best, rows = ours(h100.get((name, direction), {})), h200.get((name, direction), {})
        if best is not None:
            case, backward = case_of(best), direction == "bwd"
            least, all_keys = (tflop_of(case, backward, pairs) for pairs in (selected_pairs(case), visible_pairs(case)))
            others = best_peer(peers, name, direction), rows.get(DENSE), ours(rows)
            found.append(Line(name, direction, target, *others, best, least, kernel_tflop(case, backward, best["backend"]), all_keys))
    return found


def best_peer(peers: Table, case: str, direction: str) -> Row | None:
    """Of others' backends that compute the selection and were right, the fastest; None where none was measured."""
    found = peers.get((case, direction), {}).values()
    right = (row for row in found if row.get("computes") == "selection" and "wrong" not in row and row["causal"] is not False)
    return min(right, key=lambda row: row["ms_median"], default=None)


def selected_pairs(case: Case) -> int:
    """(Row, key) pairs of a case's selection, of whatever draw: random rows have n of the blocks that they see, their own among them."""
    if case.distribution != "random":
        return make_selection(case, "cpu").measure(case.S_kv).total_length
    position = torch.arange(case.S_kv - case.S, case.S_kv)
    blocks = (position // case.block).clamp(max=case.n - 1)  # before its own
    return case.B * case.G * int((blocks * case.block + position % case.block + 1).sum())


def visible_pairs(case: Case) -> int:
    """Those of dense causal attention."""
    return case.B * case.G * case.S * (2 * case.S_kv - case.S + 1) // 2


def tflop_of(case: Case, backward: bool, pairs: int) -> float:
    """Of the logits and o; or of the logits, dp, dv, dq and dk."""
    return 2 * pairs * case.h * (3 * case.Dk + 2 * case.Dv if backward else case.Dk + case.Dv) / 1e12


def kernel_tflop(case: Case, backward: bool, backend: str) -> float:
    """Of the pass of a backend that tiles tokens, or visits blocks: of whole blocks."""
    if backends()[backend].shares == "blocks":
        return counted(case, BY_BLOCKS, backward).operations / 1e12
    amounts = work(request_of(case, None, backward), backward, sharing_of(case), GPUS["h200"].sm_count)
    return sum(amounts.get(term + suffix, 0.0) for term in ("tile", "exact")[: 1 + backward] for suffix in ("", "-wide"))


def targets_table(found: list[Line]) -> str:
    """Every target, and what reached it."""
    cells = [
        (
            line.case, line.direction, ms(line.peer), ms(line.dense), f"{line.target:.3g}", _outcome(line.of_h200, line.target),
            _outcome(line.of_h100, line.target),
        )
        for line in found
    ]  # fmt: skip
    return table(HEADERS, cells, left=2)


def products_table(found: list[Line]) -> str:
    """The products of every target; then the targets that ask for a higher rate than dense attention reaches."""
    cells = [
        (line.case, line.direction, f"{line.least:.3g}", f"{line.kernel:.3g}", _percent(line.needed), _percent(line.of_dense))
        for line in found
    ]
    beyond = [line for line in found if line.of_dense is not None and line.needed > line.of_dense]
    named = ", ".join(f"{line.case} {line.direction} ({_percent(line.needed)}, dense {_percent(line.of_dense)})" for line in beyond)
    return table(PRODUCTS, cells, left=2) + f"\n\nTargets that need a higher rate than dense attention reaches: {named or 'none'}."


def _outcome(row: Row | None, target: float) -> str:
    if row is None:
        return "-"
    over = row["ms_median"] / target - 1
    return f"{ms(row)} {short(row)}, {'met' if over <= 0 else f'missed by {over:.1%}'}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
