"""Decoding beside reading its keys once, and beside the targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from nsa_sel.bench.core import store
from nsa_sel.bench.core.caches import Cache
from nsa_sel.bench.core.cases import decode_cases, few_token_cases, parallel_cases
from nsa_sel.bench.report import decode_times, decoding
from nsa_sel.bench.tune.regret import Asked, Choice

BATCH = next(case for case in decode_cases() if case.case == "decode-B64-32k-h16")
FOUR = next(case for case in few_token_cases() if (case.distribution, case.B, case.S, case.G) == ("alike", 16, 4, 4))


def test_the_floor_reads_every_selected_block_of_a_sequence_once() -> None:
    one = decode_times.floor(BATCH)
    assert one.bytes == 64 * 4 * 16 * 64 * (128 + 128) * 2
    assert one.us == pytest.approx(one.bytes / 4.28e6)
    assert decode_times.floor(BATCH, Cache(64)) == one
    assert decode_times.floor(BATCH, Cache(None, quantized="e4m3/head")).bytes == one.bytes / 2
    assert 1 < decode_times.floor(FOUR).bytes / decode_times.floor(FOUR._replace(S=1)).bytes < 3, "tokens share most of their blocks"


def test_targets_are_held_to_what_the_policy_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {None: 0.0351, Cache(None): 0.034, Cache(64): 0.036, Cache(None, quantized="e4m3/head"): 0.017}
    found = [Choice(Asked(BATCH, "decode", cache), "cupy-cuda", ms, "triton-group", ms / 2) for cache, ms in times.items()]
    monkeypatch.setattr(decoding, "choices", lambda gpu: found)
    monkeypatch.setattr(decoding, "measured_gpus", lambda: ["h200"])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in decode_times.targets_table().splitlines()[2:]]
    assert [line[2:] for line in lines] == [
        ["34 us", "35.1 us", "cupy-cuda", "missed by 3.2%"],
        ["1.03x", "1.059x", "cupy-cuda", "missed by 2.8%"],
        ["0.62x", "0.500x", "cupy-cuda", "met"],
    ]


def test_ratios_are_those_of_every_gpu_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Choice(Asked(BATCH, "decode", cache), "cupy-cuda", ms, "x", ms) for cache, ms in ((Cache(None), 1.0), (Cache(64), 1.02))]
    monkeypatch.setattr(decoding, "choices", lambda gpu: found)
    monkeypatch.setattr(decoding, "measured_gpus", lambda: ["h100", "h200"])
    first = [line.split("|")[1].strip() for line in decode_times.targets_table().splitlines()[2:]]
    assert first == ["pages of 64, NVIDIA H100 80GB HBM3", "pages of 64"]


def test_reading_is_compared_where_a_rank_has_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = next(case for case in parallel_cases() if case.B == 64)
    times = {"cupy-cuda": 0.0216, "triton-group": 0.03, "reading-alone": 0.018, "reading-with-results": 0.02}
    rows = [
        {**case._asdict(), "backend": name, "ms_median": ms, "device": "NVIDIA H200", "least_bytes": 4.28e7} for name, ms in times.items()
    ]
    store.append(tmp_path / decoding.RESULTS / "h200" / "parallel.jsonl", [*rows, {**rows[0], "case": "other"}])
    monkeypatch.setattr(decode_times, "ROOT", tmp_path)
    monkeypatch.setattr(decoding, "measured_gpus", lambda: ["h200"])
    (line,) = decode_times.reading_table().splitlines()[2:]
    shown = [cell.strip() for cell in line.split("|")[3:-1]]
    assert shown == ["10.0", "18.0", "20.0", "21.6", "1.200x", "1.080x", "missed by 11.1%"]
    lines = [[cell.strip() for cell in line.split("|")[2:-1]] for line in decode_times.held_table().splitlines()[2:]]
    assert lines == [["reading-alone", "0 of 1", "1.200x", case.case], ["reading-with-results", "1 of 1", "1.080x", case.case]]


def test_every_target_is_of_a_case_that_a_suite_has() -> None:
    names = {case.case for case in (*decode_cases(), *parallel_cases(), *few_token_cases())}
    assert {case for _, case, *_ in (*decode_times.TARGETS, *decode_times.RATIOS)} <= names
