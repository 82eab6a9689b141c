"""What tables make of rows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import layers_of
from nsa_sel.bench.core.contenders import DENSE, PACKED
from nsa_sel.bench.report import summary
from tests.helpers.documents import table_lines


def row(case: str, direction: str, backend: str, ms: float, workspace: int = 0) -> dict[str, Any]:
    return {"case": case, "direction": direction, "backend": backend, "ms_median": ms, "workspace_bytes": workspace}


def test_ours_is_the_fastest_of_our_backends() -> None:
    found = {b: row("c", "fwd", b, ms) for b, ms in (("triton-tile", 2.0), ("triton-group", 3.0), (DENSE, 5.0), (PACKED, 1.0))}
    assert summary.ours(found) is found["triton-tile"]
    assert summary.speed_up(found) == 2.5
    assert summary.ours({DENSE: found[DENSE]}) is None
    assert summary.speed_up({"triton-tile": found["triton-tile"]}) is None


def test_break_even_is_exact_for_powers() -> None:
    lengths = [1024, 2048, 4096, 8192]
    gains = [(1e-6 * S**2) / (3e-3 * S) for S in lengths]  # dense quadratic, ours linear: equal at 3000
    assert summary.break_even(lengths, gains) == pytest.approx(3000)
    assert summary.break_even(lengths, [1.0, 2, 4, 8]) == 0
    assert summary.break_even(lengths, [0.1, 0.2, 0.4, 0.8]) == math.inf
    assert summary.break_even(lengths, [2, 0.5, 2, 4]) == pytest.approx(2048 * 2**0.5)  # from there on it always wins
    assert summary.break_even(lengths[:2], [0.5, 1]) == pytest.approx(2048)


def test_tables_of_synthetic_rows() -> None:
    rows = []
    for case in (*cases.scaling_cases(), *cases.breakeven_cases()):
        for direction, factor in (("fwd", 1), ("bwd", 2), ("fwd+bwd", 3)):
            rows.append(row(case.case, direction, "triton-block", factor * 3e-4 * case.S))
            rows.append(row(case.case, direction, DENSE, factor * 1e-7 * case.S**2))
    rows += [row(case.case, "fwd", "triton-tile", 1 + layers_of(case.case)[0]) for case in cases.layer_cases()]
    rows += [row(case.case, "fwd", DENSE, 15.5) for case in cases.layer_cases()]

    scaling = {(line["direction"], line["h"]): line for line in table_lines(summary.scaling_table(rows))}
    assert len(scaling) == 6
    assert scaling["bwd", "4"]["last"] == f"{2 * 3e-4 * 1024:.3g}"
    assert (scaling["fwd", "1"]["last / first"], scaling["fwd", "1"]["dense: last / first"]) == ("1.00", "16.00")

    even = {(line["direction"], line["selection"], line["h"]): line for line in table_lines(summary.breakeven_table(rows))}
    assert len(even) == 3 * 2 * 3
    assert even["fwd+bwd", "real", "16"]["faster from S"] == "2.9k"  # 3000 / 1024
    assert even["fwd", "random", "1"]["faster from S"] == "below 8k"

    layers = {(line["B"], line["h"]): line for line in table_lines(summary.layers_table(rows))}
    assert len(layers) == 6
    line = layers["1", "16"]
    assert [line[x] for x in ("cases", "min", "median", "max", "slowest layer", "faster", "which")] == [
        *("30", "1", "15.5", "30", "29", "15", "tile")
    ]
    assert (layers["4", "1"]["cases"], layers["4", "1"]["slowest layer"]) == ("8", "28-29-0-1")


def test_workspaces_are_held_to_a_gibibyte() -> None:
    (space,) = table_lines(summary.workspace_table([row("one", "fwd", "triton-tile", 1.0, 3 << 30)]))
    assert (space["most, MiB"], space["1 GiB"]) == ("3072", "over by 200%")


@pytest.mark.parametrize("name", [name for name in dir(summary) if name.endswith("_table")])
def test_tables_need_no_rows_and_later_rows_count(name: str) -> None:
    table = getattr(summary, name)
    assert len(table([]).splitlines()) == 2
    old, new = (
        [row(c, d, "triton-group", ms) for ms in (t,) for c in ("real-8k-h16", "random-8k-h16", "random-32k-h16") for d in ("fwd", "bwd")]
        for t in (1.0, 2.0)
    )
    gone = [
        {key: value for key, value in row.items() if key not in ("ms_median", "workspace_bytes")} | {"error": "out of memory"}
        for row in new
    ]
    assert table([*new, *gone]) == table(new)
    if name != "workspace_table":
        assert table([*old, *new]) == table(new)
