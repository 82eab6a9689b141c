"""The committed rows of the benches: which files, how rows name a direction, and which rows a cost model is compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from nsa_sel.bench.core import store
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.store import Row
from nsa_sel.settings.schema import Way

H200 = "NVIDIA H200"
H200_RESULTS = "bench/results/h200"
H100_RESULTS = "bench/results/h100"
RESULTS = {"h100": H100_RESULTS, "h200": H200_RESULTS}
H200_ROWS = f"{H200_RESULTS}/selection.jsonl"
H100_ROWS = f"{H100_RESULTS}/selection.jsonl"
CPU_ROWS = "bench/results/cpu/numba_vs_sdpa.jsonl"
RENAMED = {  # commands that rows of older commits record -> as they are run today
    "python -m nsa_sel.bench.bench_selection ": "python -m nsa_sel.bench.questions.speed ",
    "python bench/bench_cpu.py --repeats 15 --seed 0": "python -m nsa_sel.bench.questions.speed --device cpu --suite cpu --out cpu.jsonl",
}
DIRECTIONS: dict[Way, str] = {"forward": "fwd", "backward": "bwd", "decode": "decode"}  # as rows name them
WAYS: dict[str, Way] = {direction: way for way, direction in DIRECTIONS.items()}


def read_rows(name: str) -> list[Row]:
    """The rows with a time of a JSON-lines file under the repository's root."""
    return store.measured(store.read(ROOT / name))


def command_of(row: Row) -> str:
    """Return the command that measures such rows today."""
    command: str = row["command"]
    for old, new in RENAMED.items():
        command = command.replace(old, new)
    return command


def digest(name: str) -> str:
    """The first 16 hex digits of the SHA-256 of a file under the repository's root."""
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16]


def cost_rows(wanted: Callable[[Row], bool], folder: str = H200_RESULTS) -> dict[str, list[Row]]:
    """By file, the last row of each case, direction and backend among those wanted, in the order of the files' names.

    Args:
        wanted: `cost_fit.is_cost_row` for the rows that models are fitted to, `cost_fit.is_time` for all times.
        folder: of JSON-lines files, relative to the repository's root.
    """
    last: dict[tuple[str, str, str], tuple[str, Row]] = {}
    for file in sorted((ROOT / folder).glob("*.jsonl")):
        name = file.as_posix().removeprefix(f"{ROOT.as_posix()}/")
        for row in filter(wanted, read_rows(name)):
            last[row["case"], row["direction"], row["backend"]] = (name, row)
    found: dict[str, list[Row]] = {}
    for name, row in last.values():
        found.setdefault(name, []).append(row)
    return found
