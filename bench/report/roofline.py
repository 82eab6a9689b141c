"""Operations and bytes of a measured case, counted from its sizes: how near a kernel comes to what the device could do.

Operations are those that the result needs: whole blocks that rows chose, two for a product and a sum; what kernels pad or compute
again does not count. Bytes are counted twice: the least, each tensor moved once; and what the kernel's CTAs load and store, most of
which the L2 cache serves, so that it may exceed the memory's bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.tune.cost_fit import case_of, request_of, sharing_of
from nsa_sel.core import registry
from nsa_sel.policies.cost import BYTES, TILE_ROWS, blocks_of, tile_blocks, work
from nsa_sel.settings.devices import GPUS

DIRECTIONS = ("fwd", "bwd", "decode")
# The backends whose bytes are counted, by what shares a load of keys: tiles of rows, rows that chose a block, single rows; CUDA has both.
COUNTED = BY_TILES, BY_BLOCKS, BY_ROWS, CUDA = ("triton-tile", "triton-block", "triton-group", "cupy-cuda")


class Peaks(NamedTuple):
    """What a device was measured to reach, and the source of that."""

    copy_tbs: float  # TB/s of a copy in device memory, reads and writes counted
    matmul_tflops: float  # of a large bf16 matrix product
    source: str


# Measured in the runs behind the project's performance notes, 2026-11-21, torch 2.11, as the targets of targets.py.
PEAKS = {"NVIDIA H200": Peaks(4.28, 785, "the project's performance notes, 2026-11-21")}
# TB/s of a copy, as in Peaks. The H100's was measured in the run behind bench/results/h100/parallel.jsonl: 2 GiB, torch 2.11, 2026-11-25.
COPY_TBS = {name: peaks.copy_tbs for name, peaks in PEAKS.items()} | {"NVIDIA H100 80GB HBM3": 3.03}


class Work(NamedTuple):
    """What one call of a kernel does."""

    operations: float
    least_bytes: float  # each tensor once
    moved_bytes: float  # loaded and stored by the kernel's programs


class Point(NamedTuple):
    """One row on the roofline."""

    case: str
    direction: str
    backend: str
    h: int
    ms: float
    work: Work

    @property
    def intensity(self) -> float:
        """Operations per byte that the kernel moves."""
        return self.work.operations / self.work.moved_bytes

    @property
    def tflops(self) -> float:
        return self.work.operations / self.ms / 1e9

    @property
    def moved_tbs(self) -> float:
        """TB/s that the kernel moves."""
        return self.work.moved_bytes / self.ms / 1e9

    def least_ms(self, peaks: Peaks) -> float:
        """The time that the operations, or the least bytes, take at the device's peaks: whichever is longer."""
        return max(self.work.operations / peaks.matmul_tflops, self.work.least_bytes / peaks.copy_tbs) / 1e9


def counted(case: Case, backend: str, backward: bool) -> Work:
    """The work of one forward (or decoding) or backward call of a backend of `COUNTED`.

    Plans, log-sum-exps and float32 parts of dk and dv are left out: they are small beside the rest.
    """
    request, sharing = request_of(case, None, backward), sharing_of(case)
    pairs = blocks_of(request).chosen
    keys, width, h = pairs * case.block, case.Dk + case.Dv, case.h
    terms = {name.removesuffix("-wide"): amount for name, amount in work(request, backward, sharing, GPUS["h200"].sm_count).items()}
    # Forward: logits and o. Backward: logits again, dp, dv, dq and dk.
    operations = 2 * keys * h * (3 * case.Dk + 2 * case.Dv if backward else width)
    rows = terms["rows"] * 1e9  # q and o; backward do and dq too
    a_key = width * BYTES[case.dtype]
    once = min(keys, case.B * case.G * case.S_kv) * a_key
    spec = registry.backends()[backend]
    if spec.shares == "tiles":
        moved = tile_blocks(request, sharing, max(1, TILE_ROWS // h)) * case.block * a_key * -(-h // TILE_ROWS)
    elif spec.tiles is not None and spec.tiles.take(request):
        moved = tile_blocks(request, sharing, spec.tiles.tokens(h, case.Dk, backward)) * case.block * a_key
    elif spec.shares == "rows":
        moved = terms["read"] * 1e9
    else:
        moved = once + terms["partials"] * 1e9
    if backward and spec.shares != "blocks":  # dk and dv: each block once, with q and do of every row that chose it
        moved += once + pairs * h * a_key
    return Work(operations, rows + once * (1 + backward), rows + moved + backward * once)


def points(rows: Iterable[Row], names: Iterable[str]) -> list[Point]:
    """The counted kernels' rows of the named cases, each as a point; of several rows of a case, direction and backend the last."""
    wanted = set(names)
    found = {
        (row["case"], row["direction"], row["backend"]): row
        for row in rows
        if row["case"] in wanted and row["direction"] in DIRECTIONS and row["backend"] in COUNTED
    }
    return [
        Point(*key, row["h"], row["ms_median"], counted(case_of(row), row["backend"], row["direction"] == "bwd"))
        for key, row in found.items()
    ]
