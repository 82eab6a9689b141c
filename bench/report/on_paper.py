"""GPUs on paper: what data sheets say, what the policy picks by prices calculated from them, and how that compares with rows.

Tables of docs/decisions.md. The last one calculates the H100, too, as if nobody had measured it, and compares that with its rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.markdown import table
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report.roofline import points
from nsa_sel.bench.tune import regret
from nsa_sel.bench.tune.committed_rows import H100_RESULTS, H200_ROWS, cost_rows, read_rows
from nsa_sel.bench.tune.cost_fit import BACKENDS, backend_of, case_of, is_time, phase_of, request_of, row_request, sharing_of
from nsa_sel.bench.tune.data_sheets import MEASURED, factors, least_tensor_ms, sheets
from nsa_sel.core.backend import Offer, PolicyInput
from nsa_sel.core.decision import Decision, load_policy, make_decision
from nsa_sel.core.request import DeviceInfo
from nsa_sel.policies.cost import predict
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.devices import GPUS
from nsa_sel.settings.prices import RESOURCES, carried_over
from nsa_sel.settings.schema import Settings

H100 = "h100"
MOST_DRAWN = 1 << 27  # rows times blocks
SHOWN = ("real-8k-h16", "real-8k-h1", "random-32k-h16", "random-32k-h1")


def sheets_table() -> str:
    """The figures of each GPU, and the price of a unit of work over the H200's, by resource."""
    lines = []
    for name, sheet in sheets().gpus.items():
        device = GPUS.get(name)
        found = factors(name)
        secondary = sum(figure.read == "secondary" for figure in sheet.figures)
        lines.append(
            (device.name.removeprefix("NVIDIA ") if device else name.upper(), device.sm if device else "-", f"{sheet.dram.value:,g}",
             f"{sheet.tensor.value:g}", f"{sheet.l2.value:g}", f"{sheet.sms.value:g} x {sheet.clock.value:,g}",
             f"{(device.shared_memory or 0) >> 10}" if device else "-", *(f"{found[each]:.2f}" for each in RESOURCES), secondary)
        )  # fmt: skip
    headers = ["GPU", "SM", "GB/s", "bf16 TFLOPS", "L2, MB", "SMs x MHz", "shared, KiB", *RESOURCES, "secondary"]
    return table(headers, lines, left=1)


def decided(case: Case, direction: str, device: DeviceInfo) -> Decision:
    """What the policy picks on a device where every package is installed; it knows the selection's sharing."""
    offers = [Offer(spec) for spec in BACKENDS.values() if spec.kind == "attend"]
    request = request_of(case, sharing_of(case), direction == "bwd")
    return make_decision(request, device, load_policy("default"), settings_for(device), offers)


def picks_table() -> str:
    """What is picked, and its predicted ms, forward and backward, on GPUs with a measured or a calculated profile."""
    by_name = {case.case: case for case in cases.performance_cases()}
    lines = []
    for device in GPUS.values():
        if settings_for(device).costs is None:
            continue
        cells = []
        for case, direction in ((case, direction) for direction in ("fwd", "bwd") for case in SHOWN):
            found = decided(by_name[case], direction, device)
            way, picked = ("backward", found.backward) if direction == "bwd" else ("forward", found.forward)
            ms = next(each.ms for each in found.predictions if (each.backend, each.direction) == (picked, way))
            cells.append(f"{str(picked).removeprefix('triton-')} {ms:.3g}")
        lines.append((device.name.removeprefix("NVIDIA "), *cells))
    headers = ["GPU", *(f"{case}, {direction}" for direction in ("fwd", "bwd") for case in SHOWN)]
    return table(headers, lines, left=1)


def efficiency_table() -> str:
    """How much of the H200's data sheet the measured kernels reach: the least time of the work that the result needs, over the time."""
    sheet = sheets().gpus[MEASURED]
    names = [case.case for case in (*cases.performance_cases(), *cases.decode_cases())]
    by_kind: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point in points(read_rows(H200_ROWS), names):
        tensor = point.work.operations / sheet.tensor.value / 1e9
        memory = point.work.least_bytes / sheet.dram.value / 1e6
        by_kind.setdefault((point.direction, point.backend), []).append((tensor / point.ms, memory / point.ms))
    lines = []
    for kind, found in sorted(by_kind.items(), key=lambda item: (("fwd", "bwd", "decode").index(item[0][0]), item[0][1])):
        reached = [max(both) for both in found]
        bound = "tensor" if statistics.median(both[0] for both in found) > statistics.median(both[1] for both in found) else "dram"
        ends = f"{min(reached):.0%} to {max(reached):.0%}"
        lines.append((*kind, str(len(found)), bound, f"{statistics.median(reached):.0%}", ends))
    return table(["direction", "backend", "cases", "nearer bound", "of it reached, median", "least to most"], lines, left=2)


def h100_rows() -> list[Row]:
    """The last row of each case and backend that was measured on an H100; none where no file is committed. Without those of so many rows
    of so many blocks that drawing their selection again, for what rows share, takes minutes."""
    rows = (row for found in cost_rows(is_time, H100_RESULTS).values() for row in found)
    return [row for row in rows if row["S"] * row["S_kv"] // row["block"] <= MOST_DRAWN]


def ways_to_predict() -> dict[str, Settings]:
    """The H100's settings: with its own costs; with those that data sheets make of the H200's; and with the H200's as they are."""
    fitted, costs = settings_for(GPUS[H100]), settings_for(GPUS[MEASURED]).costs
    assert costs is not None
    calculated = carried_over(costs, factors(H100), least_tensor_ms(H100), "calculated")
    return {"fitted": fitted} | {
        name: msgspec.structs.replace(fitted, costs=each) for name, each in (("calculated", calculated), ("copied", costs))
    }


def errors(rows: Sequence[Row], settings: Settings) -> dict[tuple[str, str], list[float]]:
    """By direction and backend: predicted over measured time, of the rows with a prediction."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        backward = row["direction"] == "bwd"
        request = row_request(row, sharing_of(case_of(row)))
        asked = PolicyInput(request, GPUS[H100], settings, "backward" if backward else "forward")
        ms = predict(asked, BACKENDS[backend_of(row)])
        if ms is not None:
            found.setdefault((str(phase_of(row)), backend_of(row)), []).append(ms / row["ms_median"])
    return found


def h100_table(rows: Sequence[Row] | None = None) -> str:
    """Predicted over measured time on an H100, by phase and backend, and the regret of what is picked, by `ways_to_predict`."""
    rows = h100_rows() if rows is None else rows
    ways = ways_to_predict()
    by_way = {name: errors(rows, settings) for name, settings in ways.items()}
    lines = []
    for kind, of_kind in by_way["fitted"].items():
        found = [by_way[name].get(kind) for name in ways]
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" if each else "-" for each in found]
        lines.append((*kind, str(len(of_kind)), *cells))
    made = table(["phase", "backend", "rows", *(f"predicted / measured, {name}" for name in ways)], lines, left=2)
    everywhere = set.intersection(*map(set, by_way.values()))  # choices are among backends that all ways predict
    rows = [row for row in rows if (phase_of(row), backend_of(row)) in everywhere]
    choices = {name: regret.choices(rows, settings, "counted", device=GPUS[H100]) for name, settings in ways.items()}
    said = [f"Choices by {name} prices: {regret.summary(found)}." for name, found in choices.items() if found]
    return "\n\n".join((made, *said))
