"""What is held to a target, and the products of a pass, counted once more from small cases."""

from __future__ import annotations

from typing import Any

import pytest

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import Case, make_selection, prefill
from nsa_sel.bench.core.contenders import DENSE
from nsa_sel.bench.report import targets
from nsa_sel.bench.tune.committed_rows import H200
from tests.helpers.documents import table_lines

# Every row selects all the blocks that it sees.
FULL = Case("full", "random", 1, 256, 256, 2, 4, 64, 32, 4, 64, "bfloat16")
PAIRS = 2 * 256 * 257 // 2
BLOCK_PAIRS = 2 * 64 * 64 * (1 + 2 + 3 + 4)  # of whole blocks


def row(case: Case, direction: str, backend: str, ms: float, **more: Any) -> dict[str, Any]:
    return {**case._asdict(), "direction": direction, "backend": backend, "ms_median": ms, **more}


def test_rows_are_held_to_a_target() -> None:
    """Each GPU's fastest; the fastest peer that was right."""
    case, target = prefill("random", 32768, 16), targets.TARGETS["fwd"]["random-32k-h16"]
    right = row(case, "fwd", "right", 3.0, computes="selection", causal=True)
    others = {"computes": "every key"}, {"causal": False}, {"wrong": "o is off"}
    peers = [right, *(right | {"backend": str(other), "ms_median": 1.0} | other for other in others)]
    h200 = [row(case, "fwd", "triton-tile", target), row(case, "fwd", DENSE, 30.0)]
    h100 = [row(case, "fwd", "triton-tile", 2 * target), row(case, "fwd", "cuda-block", 1.5 * target)]
    (line,) = table_lines(targets.targets_table(targets.lines(h200, h100, peers)))
    shown = [line[name] for name in ("best measured peer", "dense cuDNN", "H200", "H100")]
    assert shown == ["3", "30", "5 tile, met", "7.5 cuda-block, missed by 50.0%"]
    assert table_lines(targets.products_table(targets.lines([], h100, [])).partition("\n\n")[0])[0]["dense reaches"] == "-"
    assert {case for of in targets.TARGETS.values() for case in of} <= {case.case for case in cases.performance_cases()}


def test_pairs_are_those_of_the_selection() -> None:
    assert targets.selected_pairs(FULL) == targets.visible_pairs(FULL) == PAIRS
    for case in (FULL._replace(n=2), FULL._replace(B=3, S=100, n=3), FULL._replace(S_kv=290, n=3)):
        assert targets.selected_pairs(case) == make_selection(case, "cpu").measure(case.S_kv).total_length
    real = prefill("real", 1024, 1)
    assert targets.selected_pairs(real) == make_selection(real, "cpu").measure(1024).total_length


@pytest.mark.parametrize("backend", ["cupy-cuda", "triton-tile", "cuda-block"])
def test_products_of_kernels_that_waste_none_are_those_of_whole_blocks(backend: str) -> None:
    """Tiles compute logits and dp twice in a backward pass."""
    a_pair = 2 * 4 / 1e12
    assert targets.tflop_of(FULL, False, PAIRS) == pytest.approx(PAIRS * a_pair * (64 + 32))
    assert targets.tflop_of(FULL, True, PAIRS) == pytest.approx(PAIRS * a_pair * (3 * 64 + 2 * 32))
    again = 0 if backend == "cuda-block" else 64 + 32
    assert targets.kernel_tflop(FULL, False, backend) == pytest.approx(BLOCK_PAIRS * a_pair * (64 + 32))
    assert targets.kernel_tflop(FULL, True, backend) == pytest.approx(BLOCK_PAIRS * a_pair * (3 * 64 + 2 * 32 + again))


def test_rates_are_shares_of_the_matmul_rate() -> None:
    dense = {"ms_median": 2.0}
    line = targets.Line("c", "fwd", 1.0, None, dense, None, {}, 0.1, 0.157, 0.785)
    assert targets.PEAKS[H200].matmul_tflops == 785
    assert (line.needed, line.of_dense) == pytest.approx((0.2, 0.5))
