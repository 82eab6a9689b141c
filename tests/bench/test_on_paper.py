"""GPUs on paper: data sheets with sources, prices calculated from them, and the comparison with rows of a real GPU."""

from __future__ import annotations

import re

import pytest

from nsa_sel.bench.core import cases
from nsa_sel.bench.report import on_paper
from nsa_sel.bench.report.roofline import counted
from nsa_sel.bench.tune import data_sheets
from nsa_sel.bench.tune.committed_rows import H200_ROWS, read_rows
from nsa_sel.bench.tune.cost_fit import is_time
from nsa_sel.settings.devices import GPUS
from nsa_sel.settings.prices import RESOURCES


def test_every_figure_of_a_data_sheet_has_a_source_and_every_source_a_figure() -> None:
    found = data_sheets.sheets()
    used = {figure.source for sheet in found.gpus.values() for figure in sheet.figures}
    assert used == set(found.sources)
    assert {figure.read for sheet in found.gpus.values() for figure in sheet.figures} == {"vendor", "copy", "secondary"}
    assert set(GPUS) <= set(found.gpus)
    assert all(found.gpus[name].sms.value == device.sm_count for name, device in GPUS.items())


def test_factors_are_ratios_of_rates_and_a_small_l2_cache_costs_what_memory_does() -> None:
    assert data_sheets.factors("h200") == dict.fromkeys(RESOURCES, 1.0)
    a100, rtx3090 = data_sheets.factors("a100"), data_sheets.factors("rtx3090")
    assert a100["dram"] == pytest.approx(4800 / 2039, rel=1e-3)
    assert a100["tensor"] == pytest.approx(989 / 312, rel=1e-3)
    assert a100["l2"] == a100["issue"] == pytest.approx(132 * 1980 / (108 * 1410), rel=1e-3)
    assert rtx3090["l2"] == rtx3090["dram"] > rtx3090["issue"]


def test_no_call_is_predicted_to_beat_the_tensor_cores_of_a_calculated_gpu() -> None:
    (case,) = (case for case in cases.performance_cases() if case.case == "real-8k-h16")
    device, sheet = GPUS["rtx5090"], data_sheets.sheets().gpus["rtx5090"]
    operations = counted(case, "triton-group", False).operations
    predictions = on_paper.decided(case, "fwd", device).predictions
    assert min(each.ms for each in predictions) >= 0.999 * operations / sheet.tensor.value / 1e9


def test_rows_of_an_h100_are_held_against_all_ways_to_predict() -> None:
    wanted = ("decode-B256-16k-h16", "decode-B64-32k-h16")
    rows = [row for row in read_rows(H200_ROWS) if row["case"] in wanted and is_time(row)]
    ways = on_paper.ways_to_predict()
    calculated, copied = (on_paper.errors(rows, ways[name]) for name in ("calculated", "copied"))
    assert calculated.keys() == copied.keys() >= {("decode", "triton-group"), ("decode", "cupy-cuda")}
    for kind in (("decode", "triton-group"), ("decode", "cupy-cuda")):  # rows of the H200: the calculated H100 is slower, the copy is not
        assert min(calculated[kind]) > max(copied[kind]), kind
    made = on_paper.h100_table(rows)
    assert len(re.findall(r"Choices by \w+ prices: 100.0% of 2 within 10%", made)) == 3, made
