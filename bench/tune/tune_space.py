"""What `nsa-sel tune` tries: launches for every Triton kernel of configs/base.yaml, the problems they are tried on, the cases. Data.

Dk and Dv are each held in one tile (BLOCK_D, BLOCK_DV: the power of two that holds them), so that they are part of the key, not of
the space. `keys` bounds the keys a warp handles of a step, `rows_a_warp` the query rows: fewer leave a warp idle, more spill.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.policies.cost import BYTES
from nsa_sel.settings.schema import KernelConfig, Settings, Way
from nsa_sel.settings.tuned import Key, bucket_of_length, class_of_heads

BLOCK = 64  # keys a block of the problems' selections
REAL_LENGTH = 16 * BLOCK  # keys a row of the language model's committed selections
BULK_COPIES_FROM = 90  # SM: older GPUs have no tensor memory accelerator
Loads = Literal["pointer", "tma"]


class Problem(NamedTuple):
    """Sizes beside the key's; `blocks`: a selection of whole blocks, else the same one as raw ranges; `real`: the language model's; `page`:
    keys of a page, 0 for keys in one piece."""

    B: int
    S: int
    S_kv: int
    G: int
    blocks: bool
    real: bool = False
    page: int = 0


# A kernel of many rows is judged on two: neighbouring rows of text select alike, those of random scores do not, and what is fast on one
# may lose on the other. Where blocks are shared by tiles, at 32k rows: they share less the more there are.
PROBLEMS = {
    "real-blocks": Problem(1, 8192, 8192, 4, blocks=True, real=True),
    "random-blocks": Problem(1, 32768, 32768, 4, blocks=True),
    "real-ranges": Problem(1, 8192, 8192, 4, blocks=False, real=True),
    "random-ranges": Problem(1, 8192, 8192, 4, blocks=False),
    "one-stream": Problem(1, 1, 32768, 4, blocks=False),  # few rows: each is split over programs
    "batch": Problem(128, 1, 8192, 4, blocks=True),
    "few-pages": Problem(48, 1, 8192, 4, blocks=True, page=16),  # one or two programs a multiprocessor, of about 100 to 190
    "batch-pages": Problem(128, 1, 8192, 4, blocks=True, page=16),
    "batch-ranges": Problem(128, 1, 8192, 4, blocks=False),
}


class Space(NamedTuple):
    """The launches of one kernel, and the problems that they are judged on."""

    kernel: str
    way: Way
    problems: tuple[str, ...]
    block_l: tuple[int, ...]
    warps: tuple[int, ...]
    stages: tuple[int, ...]
    rows: tuple[int, ...] = ()  # (): as committed, the kernel does not look at them
    loads: tuple[Loads, ...] = ("pointer",)
    keys: tuple[int, int] = (16, 64)
    rows_a_warp: tuple[int, int] = (16, 32)


BLOCKS, RANGES = ("real-blocks", "random-blocks"), ("real-ranges", "random-ranges")
STEPS, IN_BLOCKS = (16, 32, 64, 128, 256), (16, 32, 64)


def on_the_matrix_unit(kernel: str, way: Way, loads: tuple[Loads, ...] = ("pointer",)) -> Space:
    """A kernel that takes many rows a step, whole blocks of keys."""
    return Space(kernel, way, BLOCKS, (32, 64), (2, 4, 8), (1, 2, 3), (32, 64, 128), loads)


SPACES = (
    Space("triton-group/forward-blocks", "forward", BLOCKS, IN_BLOCKS, (1, 2, 4), (1, 2, 3), loads=("tma",)),
    Space("triton-group/forward", "forward", RANGES, STEPS, (1, 2, 4, 8), (1, 2, 3)),
    Space("triton-group/decode", "decode", ("one-stream",), STEPS, (1, 2, 4, 8), (1, 2, 3)),
    Space("triton-group/decode-blocks", "decode", ("batch",), IN_BLOCKS, (1, 2, 4), (1, 2, 3), loads=("tma",)),
    Space("triton-group/decode-pages", "decode", ("few-pages", "batch-pages"), IN_BLOCKS, (1, 2, 4, 8), (1, 2, 3)),
    Space("triton-group/decode-ranges", "decode", ("batch-ranges",), STEPS, (1, 2, 4, 8), (1, 2, 3)),
    Space("triton-group/dq-blocks", "backward", BLOCKS, IN_BLOCKS, (1, 2, 4), (1, 2, 3), loads=("tma",)),
    Space("triton-group/dq", "backward", RANGES, STEPS, (1, 2, 4, 8), (1, 2, 3)),
    on_the_matrix_unit("triton-group/dkdv", "backward"),
    on_the_matrix_unit("triton-tile/forward", "forward", ("tma", "pointer")),
    on_the_matrix_unit("triton-tile/dq", "backward", ("tma", "pointer")),
    on_the_matrix_unit("triton-tile/dkdv", "backward"),
    on_the_matrix_unit("triton-block/forward", "forward"),
    on_the_matrix_unit("triton-block/backward", "backward"),
    Space("triton-token/forward", "forward", RANGES, STEPS[:4], (1, 2, 4), (1, 2)),
    Space("triton-token/decode", "decode", ("one-stream",), STEPS[:4], (1, 2, 4), (1, 2)),
    Space("triton-token/dq", "backward", RANGES, STEPS[:4], (1, 2, 4), (1, 2)),
    Space("triton-token/dkdv", "backward", RANGES, (32, 64, 128), (4, 8), (1, 2, 3), (32, 64, 128)),
)


class Case(NamedTuple):
    """Sizes that are tuned for."""

    Dk: int
    Dv: int
    h: int
    L: int
    dtype: str = "bfloat16"


# In the order of their use: what a time limit cuts off is measured by the next run.
CASES = (
    Case(128, 128, 16, 1024), Case(128, 128, 4, 1024), Case(64, 64, 4, 1024), Case(192, 128, 16, 1024), Case(128, 128, 1, 1024),
    Case(128, 128, 16, 256), Case(128, 128, 16, 4096), Case(128, 128, 16, 1024, "float16"),
)  # fmt: skip


class Job(NamedTuple):
    """One kernel to tune for one case."""

    key: Key
    kernel: str  # as configurations name it
    case: Case
    problems: tuple[str, ...]
    committed: KernelConfig
    candidates: tuple[KernelConfig, ...]

    @property
    def most(self) -> int:
        """Measurements, if no launch is given up after the first problem, without the second round."""
        return (1 + len(self.candidates)) * len(self.problems)

    def launch_id(self, config: KernelConfig) -> str:
        """The name of one launch."""
        return config.config_id(self.kernel)


def launches(space: Space, committed: KernelConfig, sm: int | None) -> Iterator[KernelConfig]:
    """The launches of a space that a GPU of compute capability sm/10 takes (None: any), without the committed one."""
    choices = (space.block_l, space.warps, space.stages, space.rows or (committed.rows,), space.loads)
    for block_l, warps, stages, rows, loads in itertools.product(*choices):
        each, bounds = (rows // warps, space.rows_a_warp) if space.rows else (block_l // warps, space.keys)
        config = KernelConfig(block_l, warps, stages, rows, loads)
        bulk = loads == "pointer" or sm is None or sm >= BULK_COPIES_FROM
        if bounds[0] <= each <= bounds[1] and bulk and config != committed:
            yield config


def near(config: KernelConfig, committed: KernelConfig) -> bool:
    """Whether one choice alone differs, by one step."""
    pairs = ((config.block_l, committed.block_l), (config.num_warps, committed.num_warps), (config.rows, committed.rows))
    steps = [max(a, b) // min(a, b) for a, b in pairs if a != b] + [1 + abs(config.num_stages - committed.num_stages)]
    changed = [step for step in steps if step > 1] + [2] * (config.loads != committed.loads)
    return changed == [2]


def jobs(
    settings: Settings, sm: int | None, cases: tuple[Case, ...], backend: str | None = None, way: Way | None = None, quick: bool = False
) -> list[Job]:
    """What to measure, case by case; `settings` hold the committed launches, and `quick` keeps to those next to them."""
    found = []
    for case in cases:
        for space in SPACES:
            name = space.kernel.split("/")[0]
            unreached = sm is not None and sm < BULK_COPIES_FROM and space.loads == ("tma",)
            if backend not in (None, name) or way not in (None, space.way) or unreached:
                continue
            size = BYTES[case.dtype]
            kernel = space.kernel + launch_class(sum(tile_columns(case.Dk, case.Dv, size)), size)
            committed = settings.kernels[kernel]
            candidates = tuple(c for c in launches(space, committed, sm) if not quick or near(c, committed))
            key = Key(
                backend=name, way=space.way, Dk=case.Dk, Dv=case.Dv, h=class_of_heads(case.h), L=bucket_of_length(case.L), dtype=case.dtype
            )
            problems = tuple(name for name in space.problems if case.L == REAL_LENGTH or not PROBLEMS[name].real)
            found.append(Job(key, kernel, case, problems, committed, candidates))
    return found
