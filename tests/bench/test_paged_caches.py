"""The bench of caches: its rows, its parity check and its table, with calls made once and not timed."""

from __future__ import annotations

from pathlib import Path

from nsa_sel.bench.core.caches import GROUPS_FIRST, KEYS_FIRST, Cache
from nsa_sel.bench.core.command_line import stderr_console
from nsa_sel.bench.core.parity import make_problem
from nsa_sel.bench.core.session import Job, run
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.questions import paged_caches
from nsa_sel.bench.questions.paged_caches import Last, cached, compared


def test_the_bench_compares_pages_with_contiguous_caches(instant: list[Timing], tmp_path: Path) -> None:
    """Including its parity check, for one and four tokens per sequence."""
    last = Last()
    layouts = tuple(cached("sdpa-packed", Cache(size, layout), last) for layout in (KEYS_FIRST, GROUPS_FIRST) for size in (None, 64))
    jobs = [Job(paged_caches.QUICK._replace(S=S, case=f"S{S}"), layouts, ("decode",), 8) for S in (1, 4)]
    rows = run(jobs, tmp_path / "rows.jsonl", "cpu", stderr_console())
    assert [(row["case"], row["backend"]) for row in rows] == [
        (case, f"sdpa-packed, {name}, {layout}")
        for case in ("S1", "S4")
        for layout in (KEYS_FIRST, GROUPS_FIRST)
        for name in ("in one piece", "pages of 64")
    ]
    assert all(row["mae"] < 1e-6 for row in rows)
    *_, final = paged_caches.table(rows).splitlines()
    times = [f"{row['ms_median'] * 1e3:.2f}" for row in rows[-2:]]
    assert [part.strip("† ") for part in final.split("|")][1:-1] == ["S4", "sdpa-packed", GROUPS_FIRST, *times]


def test_the_bench_compares_quantized_caches_with_others(instant: list[Timing], tmp_path: Path) -> None:
    last = Last()
    caches = (Cache(64), Cache(None, quantized="e4m3/head"), Cache(64, quantized="e4m3/page"))
    jobs = [
        Job(paged_caches.QUICK._replace(dtype="bfloat16"), tuple(cached("sdpa-packed", cache, last) for cache in caches), ("decode",), 8)
    ]
    rows = run(jobs, tmp_path / "rows.jsonl", "cpu", stderr_console())
    assert [row["backend"].split(", ")[3:] for row in rows] == [[], ["e4m3/head"], ["e4m3/page"]]
    assert 2 * rows[0]["mae"] < rows[1]["mae"] < 0.02  # against the numbers before quantization
    head, _, line = ([part.strip() for part in line.split("|")[4:-1]] for line in paged_caches.table(rows).splitlines())
    assert head == ["in one piece: bfloat16 / e4m3/head / e4m3/page", "pages of 64"]
    assert [[time == "-" for time in cell.split(" / ")] for cell in line] == [[True, False, True], [False, True, False]]


def test_every_backend_is_measured_on_the_same_cache() -> None:
    names = [contender.name for contender in compared(paged_caches.READERS, "head")]
    assert len(set(names)) == len(names)
    for backend in paged_caches.READERS:
        own = [name for name in names if name.startswith(backend)]
        assert len([name for name in own if "e4m3" not in name]) == 1 + len(paged_caches.PAGE_SIZES)
    problem, last = make_problem(paged_caches.QUICK, "cpu"), Last()
    first = last.of(problem, Cache(64))
    assert last.of(problem, Cache(64)) is first
    assert last.of(problem, Cache(None)) is not first
    assert last.of(make_problem(paged_caches.QUICK, "cpu"), Cache(None)) is not last.of(problem, Cache(None))
