"""The search space of `nsa-sel tune`: configs for every Triton kernel of configs/base.yaml, the problems that time
them, and the cases.

A kernel keeps Dk and Dv in one tile each (BLOCK_D, BLOCK_DV: the next power of two), so they are part of the key, not
of the space.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from nsa_sel.backends.specs import launch_class, tile_columns
from nsa_sel.core.request import DeviceInfo
from nsa_sel.policies.cost import BYTES
from nsa_sel.settings.config import profile_for, settings_for, shipped_configs
from nsa_sel.settings.schema import Direction, KernelConfig, PowerOfTwo, Settings
from nsa_sel.settings.tuned import Key, bucket_of_length, class_of_heads

BLOCK = 64  # keys per block of the problems' selections
REAL_LENGTH = 16 * BLOCK  # keys per row of the language model's committed selections
TMA_MIN_SM = 90
Loads = Literal["pointer", "tma"]


class Problem(NamedTuple):
    """The sizes that the key does not have, and the kind of selection."""

    B: int
    S: int
    S_kv: int
    G: int
    blocks: bool  # whole blocks; else the same selection as raw ranges
    real: bool = False  # the language model's selection; else random
    page: int = 0  # keys of a page of the KV cache; 0: no pages


# A kernel of many rows is judged on two problems: adjacent rows of text select similar blocks, random ones do not, and
# a config that is fast on one may lose on the other. At 32k rows, the tokens of a tile share few random blocks.
PROBLEMS = {
    "real-blocks": Problem(1, 8192, 8192, 4, blocks=True, real=True),
    "random-blocks": Problem(1, 32768, 32768, 4, blocks=True),
    "real-ranges": Problem(1, 8192, 8192, 4, blocks=False, real=True),
    "random-ranges": Problem(1, 8192, 8192, 4, blocks=False),
    "one-stream": Problem(1, 1, 32768, 4, blocks=False),  # few rows: each is split over programs
    "batch": Problem(128, 1, 8192, 4, blocks=True),
    "few-pages": Problem(48, 1, 8192, 4, blocks=True, page=16),  # one or two programs per SM
    "batch-pages": Problem(128, 1, 8192, 4, blocks=True, page=16),
    "batch-ranges": Problem(128, 1, 8192, 4, blocks=False),
}


class Space(NamedTuple):
    """The configs of one kernel, and the problems that judge them."""

    kernel: str
    way: Direction
    problems: tuple[str, ...]
    block_l: tuple[PowerOfTwo, ...]
    warps: tuple[PowerOfTwo, ...]
    stages: tuple[int, ...]
    rows: tuple[PowerOfTwo, ...] = ()  # (): the committed value, which the kernel ignores
    loads: tuple[Loads, ...] = ("pointer",)
    keys_per_warp: tuple[int, int] = (16, 64)  # least and most of a step: fewer leave a warp idle, more spill registers
    rows_per_warp: tuple[int, int] = (16, 32)  # the same for query rows, which replace keys where `rows` is given

    @property
    def backend(self) -> str:
        return self.kernel.partition("/")[0]


BLOCKS, RANGES = ("real-blocks", "random-blocks"), ("real-ranges", "random-ranges")
STEPS: tuple[PowerOfTwo, ...] = (16, 32, 64, 128, 256)
IN_BLOCKS: tuple[PowerOfTwo, ...] = (16, 32, 64)


def _many_rows(kernel: str, way: Direction, loads: tuple[Loads, ...] = ("pointer",)) -> Space:
    """Return the space of a kernel with many query rows per step and whole blocks of keys."""
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
    _many_rows("triton-group/dkdv", "backward"),
    _many_rows("triton-tile/forward", "forward", ("tma", "pointer")),
    _many_rows("triton-tile/dq", "backward", ("tma", "pointer")),
    _many_rows("triton-tile/dkdv", "backward"),
    _many_rows("triton-block/forward", "forward"),
    _many_rows("triton-block/backward", "backward"),
    Space("triton-token/forward", "forward", RANGES, STEPS[:4], (1, 2, 4), (1, 2)),
    Space("triton-token/decode", "decode", ("one-stream",), STEPS[:4], (1, 2, 4), (1, 2)),
    Space("triton-token/dq", "backward", RANGES, STEPS[:4], (1, 2, 4), (1, 2)),
    Space("triton-token/dkdv", "backward", RANGES, (32, 64, 128), (4, 8), (1, 2, 3), (32, 64, 128)),
)


TUNED = tuple(dict.fromkeys(space.backend for space in SPACES))  # backends with kernel configs


class Case(NamedTuple):
    """The sizes that kernels are tuned for; L: keys per query row."""

    Dk: int
    Dv: int
    h: int
    L: int
    dtype: str = "bfloat16"


# Most used first: the next run measures what a time limit cuts off.
CASES = (
    Case(128, 128, 16, 1024), Case(128, 128, 4, 1024), Case(64, 64, 4, 1024), Case(192, 128, 16, 1024), Case(128, 128, 1, 1024),
    Case(128, 128, 16, 256), Case(128, 128, 16, 4096), Case(128, 128, 16, 1024, "float16"),
)  # fmt: skip


class Job(NamedTuple):
    """One kernel to tune for one case."""

    key: Key
    kernel: str  # its name in configs/
    case: Case
    problems: tuple[str, ...]
    committed: KernelConfig
    candidates: tuple[KernelConfig, ...]

    @property
    def most(self) -> int:
        """Measurements of the first round, if no config is dropped after the first problem."""
        return (1 + len(self.candidates)) * len(self.problems)

    def config_id(self, config: KernelConfig) -> str:
        """Return the name of one config in events and decisions."""
        return config.config_id(self.kernel)


def configs(space: Space, committed: KernelConfig, sm: int | None) -> Iterator[KernelConfig]:
    """Yield the configs of a space that a GPU of compute capability sm/10 takes (None: any), without the committed one."""
    choices = (space.block_l, space.warps, space.stages, space.rows or (committed.rows,), space.loads)
    for block_l, warps, stages, rows, loads in itertools.product(*choices):
        per_warp, (least, most) = (rows // warps, space.rows_per_warp) if space.rows else (block_l // warps, space.keys_per_warp)
        config = KernelConfig(block_l, warps, stages, rows, loads)
        can_load = loads == "pointer" or sm is None or sm >= TMA_MIN_SM
        if least <= per_warp <= most and can_load and config != committed:
            yield config


def is_near(config: KernelConfig, committed: KernelConfig) -> bool:
    """Return True if exactly one choice differs, by one step."""
    pairs = ((config.block_l, committed.block_l), (config.num_warps, committed.num_warps), (config.rows, committed.rows))
    steps = [max(a, b) // min(a, b) for a, b in pairs if a != b] + [1 + abs(config.num_stages - committed.num_stages)]
    changed = [step for step in steps if step > 1] + [2] * (config.loads != committed.loads)
    return changed == [2]


def jobs(
    settings: Settings, sm: int | None, cases: tuple[Case, ...], backend: str | None = None, way: Direction | None = None,
    quick: bool = False,
) -> list[Job]:  # fmt: skip
    """Return what to measure, case by case.

    Args:
        settings: with the committed configs.
        sm: compute capability times 10; None: any GPU.
        cases: sizes to tune for.
        backend: of this backend alone; None: all.
        way: of this direction alone; None: all.
        quick: only the configs that are near the committed one.
    """
    found = []
    spaces = [space for space in SPACES if backend in (None, space.backend) and way in (None, space.way)]
    for case, space in itertools.product(cases, spaces):
        if space.loads == ("tma",) and sm is not None and sm < TMA_MIN_SM:
            continue
        kernel = kernel_name(space, case.Dk, case.Dv, case.dtype)
        committed = settings.kernels[kernel]
        candidates = tuple(config for config in configs(space, committed, sm) if not quick or is_near(config, committed))
        key = Key(
            backend=space.backend, direction=space.way, Dk=case.Dk, Dv=case.Dv, h=class_of_heads(case.h), L=bucket_of_length(case.L),
            dtype=case.dtype,
        )  # fmt: skip
        problems = tuple(name for name in space.problems if case.L == REAL_LENGTH or not PROBLEMS[name].real)
        found.append(Job(key, kernel, case, problems, committed, candidates))
    return found


def kernel_name(space: Space, Dk: int, Dv: int, dtype: str) -> str:
    """Return the kernel's name in configs/ for these head dims: wide tiles have configs of their own."""
    size = BYTES[dtype]
    return space.kernel + launch_class(sum(tile_columns(Dk, Dv, size)), size)


def committed_settings(device: DeviceInfo) -> Settings:
    """Return the device's settings with the committed kernel configs, which winners must beat, whatever NSA_SEL_CONFIG
    names.
    """
    profile = profile_for(device)
    layers = [shipped_configs()["base.yaml"], *(config for _, config in (profile.layers if profile else ()))]
    kernels = {name: config for layer in layers for name, config in layer.kernels.items()}
    return msgspec.structs.replace(settings_for(device), kernels=kernels)
