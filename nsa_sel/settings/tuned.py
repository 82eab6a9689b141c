"""Tuning results of this machine (`nsa-sel tune`): kernel configs, thresholds and costs, and how calls use them.

There is one file per device and environment. Results of another GPU, driver, torch, triton or kernel source are not
used. A bad file is not fatal: it is reported once (`sel.tuned.ignored` and a RuntimeWarning), and the committed configs
are used. Files are read once per process; `forget` drops what was read.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import msgspec

from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.errors import ConfigError, first_time, forget_first, warn
from nsa_sel.settings import private
from nsa_sel.settings.config import by_direction, shipped_configs
from nsa_sel.settings.flags import CACHE_FLAG
from nsa_sel.settings.schema import Costs, Direction, KernelConfig, Settings, Threshold
from nsa_sel.telemetry import events
from nsa_sel.version import __version__

MAX_HEADS, MIN_LENGTH, MAX_LENGTH = 64, 64, 4096  # other sizes are clamped to these
RETUNE = "remove the file and run `nsa-sel tune` again"
KERNEL_SOURCES = re.compile(r"(triton_\w+|choose_triton)\.py")

Shape = tuple[int, int, int, int, str]  # Dk, Dv, class of h, bucket of L, dtype


class Stamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment of a measurement. `kernels` is a hash of the kernel sources and of the committed kernel configs."""

    device: str
    sm: int | None
    driver: str | None
    torch: str | None
    triton: str | None
    nsa_sel: str
    kernels: str

    def differences(self, other: Stamp) -> list[str]:
        """Return the fields in which `other` differs, with both values, as "torch was 2.8, is 2.9"."""
        pairs = ((field, getattr(other, field), getattr(self, field)) for field in self.__struct_fields__)
        return [f"{field} was {theirs}, is {mine}" for field, theirs, mine in pairs if theirs != mine]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"direction": "way"}):
    """The class of calls of a result. `h` and `L` are rounded by `class_of_heads` and `bucket_of_length`."""

    backend: str
    direction: Direction
    Dk: int
    Dv: int
    h: int
    L: int
    dtype: str

    @property
    def shape(self) -> Shape:
        """Return the key without backend and direction."""
        return self.Dk, self.Dv, self.h, self.L, self.dtype


class Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel config and the time of the whole pass with it: median, 20th and 80th percentile in ms."""

    config: KernelConfig
    ms_median: float
    ms_p20: float
    ms_p80: float


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of tuning one kernel on one problem.

    `winner` is the same for all problems of a kernel. It is None unless a config beat the committed one over all
    problems in two measurements (rule in nsa_sel/bench/tune).
    """

    key: Key
    kernel: str  # as configurations name it, "-wide" included
    problem: str  # of nsa_sel.bench.tune.search_space.PROBLEMS
    committed: Timed
    winner: KernelConfig | None
    verdict: str  # a sentence
    top: tuple[Timed, ...]  # the fastest configs, including the winner
    measured: int  # number of configs
    failed: int  # configs that did not compile, did not fit, or gave wrong results


class TunedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that `nsa-sel tune` writes."""

    stamp: Stamp
    commit: str | None
    results: tuple[Result, ...] = ()
    thresholds: dict[Direction, Threshold] = {}  # sel_triton_min_L of the measured directions
    costs: Costs | None = None  # of the completely measured directions


class TunedTable(NamedTuple):
    """The kernel configs of one file by shape, direction and kernel, with its thresholds and costs."""

    name: str  # of the file, without its folder
    fingerprint: str
    data: bytes
    kernels: dict[tuple[Shape, Direction], dict[str, KernelConfig]]
    min_length: dict[Direction, int]  # of the directions with a threshold
    costs: Costs | None


def class_of_heads(h: int) -> int:
    """Return h rounded up to a power of two, at most `MAX_HEADS`."""
    return min(MAX_HEADS, 1 << (h - 1).bit_length())


def bucket_of_length(L: int) -> int:
    """Return L rounded up to a power of two, clamped to `MIN_LENGTH` and `MAX_LENGTH`."""
    return min(MAX_LENGTH, max(MIN_LENGTH, 1 << (max(1, L) - 1).bit_length()))


def shape_of(request: Request) -> Shape:
    """Return the shape class of a request."""
    return request.Dk, request.Dv, class_of_heads(request.h), bucket_of_length(request.length), request.dtype


CACHE_FOLDERS = f"a folder for tuning results and compiled kernels: {CACHE_FLAG}, XDG_CACHE_HOME or a home directory"


def cache_folder() -> Path | None:
    """Return the cache folder: NSA_SEL_CACHE, else nsa-sel in XDG_CACHE_HOME, else ~/.cache/nsa-sel.

    Returns:
        The folder, or None with one warning if the user has no home directory.
    """
    own = os.environ.get(CACHE_FLAG)
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nsa-sel"
    except RuntimeError:  # neither HOME nor an entry in the user database
        if first_time("tuned", "no folder"):
            warn(f"nothing is cached on disk. It needs {CACHE_FOLDERS}; set {CACHE_FLAG}")
        return None


def file_of(stamp: Stamp) -> Path:
    """Return the path of the file for one environment.

    Raises:
        ConfigError: there is no cache folder.
    """
    folder = cache_folder()
    if folder is None:
        raise ConfigError("the cache folder", None, CACHE_FOLDERS, f"set {CACHE_FLAG}")
    return folder / "tuned" / f"{_file_prefix(stamp.device, stamp.sm)}-{hashlib.sha256(msgspec.json.encode(stamp)).hexdigest()[:12]}.json"


def _file_prefix(name: str, sm: int | None) -> str:
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}-sm{sm or 0}"


def stamp_of(device: DeviceInfo) -> Stamp:
    """Return the environment of this process on `device`."""
    return Stamp(
        device=device.name, sm=device.sm, driver=_driver() if device.kind == "cuda" else None, torch=version_of("torch"),
        triton=version_of("triton"), nsa_sel=__version__, kernels=_kernels(),
    )  # fmt: skip


@functools.cache
def _driver() -> str | None:
    try:
        match = re.search(r"Module\D*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        if match:
            return match[1]
    except OSError:
        pass  # a container may hide the file
    command = ("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _kernels() -> str:
    folder = resources.files("nsa_sel") / "backends"
    files = [file for file in folder.iterdir() if KERNEL_SOURCES.fullmatch(file.name)]
    files += [file for file in (folder / "_triton").iterdir() if file.name.endswith(".py")]
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(msgspec.json.encode({name: config.kernels for name, config in shipped_configs().items()}, order="deterministic"))
    return digest.hexdigest()[:16]


def parse(data: bytes, name: str) -> tuple[TunedFile, TunedTable]:
    """Parse and check the content of a file.

    Args:
        data: JSON.
        name: the file's name.

    Returns:
        The whole content, and the values that calls use.

    Raises:
        ConfigError: with the name of the bad field.
    """
    try:
        file = msgspec.json.decode(data, type=TunedFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(name, str(error), "a file written by `nsa-sel tune`", RETUNE) from error
    committed = shipped_configs()["base.yaml"].kernels
    kernels: dict[tuple[Shape, Direction], dict[str, KernelConfig]] = {}
    for result in file.results:
        if result.kernel not in committed:
            raise ConfigError(name, result.kernel, ", ".join(committed), RETUNE)
        if result.winner is not None:
            kernels.setdefault((result.key.shape, result.key.direction), {})[result.kernel] = result.winner
    min_length = {direction: threshold.value for direction, threshold in file.thresholds.items() if threshold.value is not None}
    return file, TunedTable(name, hashlib.sha256(data).hexdigest()[:12], data, kernels, min_length, file.costs)


_shared: dict[DeviceInfo, TunedTable | None] | None = None  # set by sync_tuning: the same on all ranks
generation = 0  # number of changes to what `in_force` returns; cached decisions depend on it
any_table = False  # True once a table was read; only then must a call check whether the job is distributed


def read(device: DeviceInfo) -> TunedTable | None:
    """Return this machine's table for `device` and this environment, cached. None if there is no such file."""
    if device.kind != "cuda" and not device.triton_interpret:
        return None
    folder = cache_folder()
    return None if folder is None else _read(device, folder / "tuned")


@functools.cache
def _read(device: DeviceInfo, folder: Path) -> TunedTable | None:
    global any_table
    file = folder
    try:
        files = list(folder.glob(f"{_file_prefix(device.name, device.sm)}-{'?' * 12}.json"))
        if not files:
            return None
        stamp = stamp_of(device)
        own = next((file for file in files if file.name == file_of(stamp).name), None)
        file = own or max(files, key=lambda file: file.lstat().st_mtime)
        content, table = parse(private.read(file), file.name)
        differing = stamp.differences(content.stamp)
        if not differing:
            events.emit(
                "sel.tuned.loaded", file=str(file), fingerprint=table.fingerprint, results=len(content.results),
                thresholds=table.min_length, costs=sorted(table.costs.models) if table.costs else [], stamp=content.stamp,
            )  # fmt: skip
            any_table = True
            return table
        _ignore(
            file, "environment", f"measured in another environment: {'; '.join(differing)}. Run `nsa-sel tune` here, or remove the file"
        )
    except ConfigError as error:
        _ignore(file, "corrupt", str(error))
    except private.Untrusted as error:
        _ignore(file, "unreadable", str(error.strerror))
    except OSError as error:
        _ignore(file, "unreadable", f"{error.strerror}: correct the file's permissions")
    return None


def _ignore(file: Path | str, why: str, words: str) -> None:
    """Report once per process that a file is ignored, with the reason and the remedy (`words`)."""
    if first_time("tuned", str(file), why):
        events.emit("sel.tuned.ignored", logging.WARNING, file=str(file), why=why, words=words)
        warn(f"{file} is ignored, the committed kernel configs are used: {words}")


def distributed() -> bool:
    """Return True if this process is one of several ranks. Does not import torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def in_force(device: DeviceInfo) -> TunedTable | None:
    """Return the table for calls on `device`. In a distributed job, only `nsa_sel.sync_tuning()` provides one.

    Sharing at the first call would hang a job in which some rank makes no call. Ranks with different kernel configs
    would differ in the last bits and in speed.
    """
    if not distributed():
        return read(device)
    if _shared is not None:
        return _shared.get(device)
    table = read(device)
    if table is not None:
        _ignore(
            table.name,
            "distributed",
            "all ranks must use the same configs: call nsa_sel.sync_tuning() on every rank to use those of rank 0",
        )
    return None


def share(device: DeviceInfo, table: TunedTable | None) -> None:
    """Use `table` on `device` in this distributed job. All ranks must pass the same table."""
    global _shared, generation, any_table
    _shared = {**(_shared or {}), device: table}
    generation += 1
    any_table = any_table or table is not None


def forget() -> None:
    """Drop tables, shared tables and the memory of reports, so that files are read again."""
    global _shared, generation, any_table
    _read.cache_clear()
    forget_first("tuned")
    _shared, any_table = None, False
    generation += 1


def apply(settings: Settings, request: Request, device: DeviceInfo) -> Settings:
    """Return the settings for calls like `request`, including the user's tuning results.

    Values of the file named by NSA_SEL_CONFIG and of flags take precedence over tuning results.

    Args:
        settings: the settings without tuning results.
        request: the call.
        device: its device.
    """
    table = None if settings.autotune == "off" else in_force(device)
    if table is None:
        return settings
    shape, origin = shape_of(request), f"tuned: {table.name} {table.fingerprint}"

    def may_override(field: str, *flags: str) -> bool:
        source = settings.sources.get(field)
        return source is None or source not in (settings.config_file, *flags)

    forward: Direction = "decode" if request.S == 1 else "forward"
    own = {**table.kernels.get((shape, forward), {}), **table.kernels.get((shape, "backward"), {})}
    own = {kernel: config for kernel, config in own.items() if may_override(f"kernels.{kernel}")}
    sources = {**settings.sources, **{f"kernels.{kernel}": origin for kernel in own}}
    min_length, costs = settings.sel_triton_min_L, settings.costs
    if table.min_length and may_override("sel_triton_min_L", "NSA_SEL_TRITON_MIN_L"):
        min_length, sources["sel_triton_min_L"] = by_direction(table.min_length, min_length), origin
    if table.costs is not None and may_override("costs"):
        # Predictions are compared within a phase (`Request.phase`), so all models of a phase must come from one
        # machine.
        before, costs, sources["costs"] = costs, table.costs, origin
        measured = {name.rpartition("/")[2] for name in costs.models}
        rest = {name: model for name, model in before.models.items() if name.rpartition("/")[2] not in measured} if before else {}
        if before is not None and rest:
            dtypes = tuple(dtype for dtype in costs.dtypes if dtype in before.dtypes)
            costs = msgspec.structs.replace(costs, dtypes=dtypes, models={**rest, **costs.models})
            others = ", ".join(sorted({name.rpartition("/")[2] for name in rest}))
            sources["costs"] += f"; {others}: {settings.sources.get('costs', 'built-in')}"
    return msgspec.structs.replace(
        settings, kernels={**settings.kernels, **own}, sel_triton_min_L=min_length, costs=costs, tuned=origin, sources=sources,
        fingerprint=hashlib.sha256(f"{settings.fingerprint} {table.fingerprint}".encode()).hexdigest()[:12],
    )  # fmt: skip
