"""Operations and bytes on the roofline, counted once more by hand from small cases."""

from __future__ import annotations

import pytest

from nsa_sel.bench.core.cases import Case, make_selection, prefill
from nsa_sel.bench.report.roofline import Peaks, Point, Work, counted, points
from nsa_sel.bench.tune.cost_fit import sharing_of

# Every row chooses all the blocks that it may see: unions, and what tiles load, are known without any model.
FULL = Case("full", "random", 1, 256, 256, 2, 4, 64, 32, 4, 64, "bfloat16")
PAIRS = 2 * 64 * (1 + 2 + 3 + 4)  # (row, block), over 2 groups
A_BLOCK = 64 * (64 + 32) * 2  # bytes of K and V
Q, O = 256 * 2 * 4 * 64 * 2, 256 * 2 * 4 * 32 * 2
ALL_BLOCKS = 2 * 4 * A_BLOCK


def test_operations_are_those_that_the_result_needs() -> None:
    for backend in ("triton-group", "triton-tile", "triton-block"):
        assert counted(FULL, backend, False).operations == PAIRS * 64 * 4 * 2 * (64 + 32)
        assert counted(FULL, backend, True).operations == PAIRS * 64 * 4 * 2 * (3 * 64 + 2 * 32)


@pytest.mark.parametrize(
    ("backend", "forward", "backward"),
    [
        ("triton-group", PAIRS * A_BLOCK, PAIRS * A_BLOCK + ALL_BLOCKS + PAIRS * 4 * (64 + 32) * 2),
        ("triton-tile", PAIRS // 16 * A_BLOCK, PAIRS // 16 * A_BLOCK + ALL_BLOCKS + PAIRS * 4 * (64 + 32) * 2),
        ("triton-block", ALL_BLOCKS + PAIRS * 4 * (64 + 2 * 32) * 2, ALL_BLOCKS + PAIRS * 4 * (64 + 32 + 2 * 64) * 2),
    ],
)
def test_bytes_are_counted_by_strategy(backend: str, forward: int, backward: int) -> None:
    """Rows or tiles of 16 tokens load K and V; block gathers q (and do) and moves partials. dk and dv are written once."""
    assert counted(FULL, backend, False).moved_bytes == pytest.approx(Q + O + forward)
    assert counted(FULL, backend, False).least_bytes == pytest.approx(Q + O + ALL_BLOCKS)
    assert counted(FULL, backend, True).moved_bytes == pytest.approx(2 * (Q + O) + backward + ALL_BLOCKS)
    assert counted(FULL, backend, True).least_bytes == pytest.approx(2 * (Q + O) + 2 * ALL_BLOCKS)


def test_groups_of_warps_share_what_cupy_cuda_loads() -> None:
    """On Hopper three groups of 4 tokens forward, two for dq; elsewhere, and decoding, rows load for themselves."""
    wide = FULL._replace(h=16, Dv=64)
    rows, a_block = 2 * 256 * 16 * (64 + 64) * 2, 64 * (64 + 64) * 2
    assert counted(wide, "cupy-cuda", False).moved_bytes == pytest.approx(rows + PAIRS / 12 * a_block)
    backward = PAIRS / 8 * a_block + 2 * 2 * 4 * a_block + PAIRS * 16 * (64 + 64) * 2
    assert counted(wide, "cupy-cuda", True).moved_bytes == pytest.approx(2 * rows + backward)
    assert counted(FULL, "cupy-cuda", False) == counted(FULL, "triton-group", False)


def test_decoding_reads_chosen_blocks_once() -> None:
    case = Case("decode", "random", 8, 1, 4096, 2, 4, 128, 128, 16, 64, "bfloat16")
    found = counted(case, "triton-group", False)
    keys = 8 * 2 * 16 * 64 * 256 * 2
    assert found.least_bytes == found.moved_bytes == pytest.approx(keys + 8 * 2 * 4 * 256 * 2)


def test_text_shares_what_random_rows_do_not() -> None:
    """A tile of text loads what its rows' union holds: measured on the selections themselves."""
    text, random = (counted(prefill(kind, 8192, 16), "triton-tile", False).moved_bytes for kind in ("real", "random"))
    assert text < 0.7 * random
    sharing = make_selection(prefill("real", 8192, 1), "cpu").measure(8192).sharing
    assert sharing is not None
    assert sharing_of(prefill("real", 8192, 16)) == tuple(round(ratio, 2) for ratio in sharing)


def test_the_roof_is_the_slower_of_both_peaks() -> None:
    peaks = Peaks(copy_tbs=4.0, matmul_tflops=800, source="a test")
    point = Point("case", "fwd", "triton-tile", 4, ms=2.0, work=Work(operations=8e11, least_bytes=1e9, moved_bytes=1e10))
    assert point.least_ms(peaks) == pytest.approx(1.0)  # 0.8 TFLOP; the bytes take 0.25 ms
    assert (point.intensity, point.tflops, point.moved_tbs) == pytest.approx((80.0, 400.0, 5.0))
    assert point._replace(work=Work(8e10, 8e9, 8e9)).least_ms(peaks) == pytest.approx(2.0)


def test_the_last_row_counts_and_other_backends_are_left_out() -> None:
    def row(backend: str, direction: str, ms: float) -> dict[str, object]:
        return {**FULL._asdict(), "direction": direction, "backend": backend, "ms_median": ms}

    rows = [
        row("triton-tile", "fwd", 1.0),
        row("sdpa-packed", "fwd", 1.0),
        row("triton-tile", "fwd+bwd", 1.0),
        row("triton-tile", "fwd", 2.0),
    ]
    assert [(point.direction, point.ms) for point in points(rows, ["full"])] == [("fwd", 2.0)]
    assert points(rows, ["another"]) == []
