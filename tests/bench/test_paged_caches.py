"""The bench of paged caches: its rows, its parity check and its table, with calls made once and not timed."""

from __future__ import annotations

from pathlib import Path

from nsa_sel.bench.core.command_line import stderr_console
from nsa_sel.bench.core.session import Job, run
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.questions import paged_caches
from nsa_sel.bench.questions.paged_caches import GROUPS_FIRST, KEYS_FIRST, cached


def test_the_bench_compares_pages_with_contiguous_caches(instant: list[Timing], tmp_path: Path) -> None:
    """Including its parity check, for one and four tokens per sequence."""
    layouts = tuple(cached("sdpa-packed", size, layout) for layout in (KEYS_FIRST, GROUPS_FIRST) for size in (None, 64))
    jobs = [Job(paged_caches.QUICK._replace(S=S, case=f"S{S}"), layouts, ("decode",), 8) for S in (1, 4)]
    rows = run(jobs, tmp_path / "rows.jsonl", "cpu", stderr_console())
    assert [(row["case"], row["backend"]) for row in rows] == [
        (case, f"sdpa-packed, {name}, {layout}")
        for case in ("S1", "S4")
        for layout in (KEYS_FIRST, GROUPS_FIRST)
        for name in ("in one piece", "pages of 64")
    ]
    assert all(row["mae"] < 1e-6 for row in rows)
    *_, last = paged_caches.table(rows).splitlines()
    assert [part.strip() for part in last.split("|")][1:5] == ["S4", "sdpa-packed", GROUPS_FIRST, "float32"]
    whole, paged = (row["ms_median"] for row in rows[-2:])
    assert f"({paged / whole:.3f})" in last
    assert {(case.B, case.S_kv, case.S) for case in paged_caches.serving_cases()} == {
        (B, S_kv, S) for B, S_kv in ((1, 65536), (64, 32768), (256, 16384)) for S in (1, 4)
    }


def test_the_bench_compares_quantized_caches_with_others(instant: list[Timing], tmp_path: Path) -> None:
    layouts = (
        cached("sdpa-packed", 64, KEYS_FIRST),
        cached("sdpa-packed", None, KEYS_FIRST, "head"),
        cached("sdpa-packed", 64, KEYS_FIRST, "page"),
    )
    jobs = [Job(paged_caches.QUICK._replace(dtype="bfloat16"), layouts, ("decode",), 8)]
    rows = run(jobs, tmp_path / "rows.jsonl", "cpu", stderr_console())
    assert [row["backend"].split(", ")[3:] for row in rows] == [[], ["e4m3/head"], ["e4m3/page"]]
    assert 2 * rows[0]["mae"] < rows[1]["mae"] < 0.02  # against the numbers before quantization
    lines = [[part.strip() for part in line.split("|")] for line in paged_caches.table(rows).splitlines()[2:]]
    assert [line[4] for line in lines] == ["bfloat16", "e4m3/head", "e4m3/page"]
    assert [line[5] == "-" for line in lines] == [True, False, True]
