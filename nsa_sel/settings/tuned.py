"""What `nsa-sel tune` found on this very machine, launches, thresholds and costs: where it stands, when it holds, what a call gets.

One file a device and environment: another GPU, driver, torch, triton or kernel source has a file of its own, which is explained and
left alone. Nothing here is fatal: what can't be used is told once (`sel.tuned.ignored` and a RuntimeWarning), and the committed
launches run. Read once a process: `forget` reads anew.
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
import warnings
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import msgspec

from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.errors import ConfigError
from nsa_sel.settings import private
from nsa_sel.settings.config import by_way, check_costs, check_kernel, shipped_configs
from nsa_sel.settings.flags import CACHE_FLAG
from nsa_sel.settings.schema import Costs, KernelConfig, Settings, Threshold, Way
from nsa_sel.telemetry import events
from nsa_sel.version import __version__

MOST_HEADS, LEAST_LENGTH, MOST_LENGTH = 64, 64, 4096  # classes below and above are the outermost ones
ANEW = "remove the file and run `nsa-sel tune` again"
KERNEL_SOURCES = re.compile(r"triton_\w+\.py")

Shape = tuple[int, int, int, int, str]  # Dk, Dv, class of h, bucket of L, dtype


class Stamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environment that times hold for. `kernels` is a hash of the kernels' sources and of the committed launches."""

    device: str
    sm: int | None
    driver: str | None
    torch: str | None
    triton: str | None
    nsa_sel: str
    kernels: str

    def digest(self) -> str:
        """What the file's name says of it."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:12]

    def differences(self, other: Stamp) -> list[str]:
        """The fields in which `other` differs, with both values."""
        pairs = ((field, getattr(other, field), getattr(self, field)) for field in self.__struct_fields__)
        return [f"{field} was {theirs}, is {mine}" for field, theirs, mine in pairs if theirs != mine]


class Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which calls a result speaks for; `h` and `L` are classes, `class_of_heads` and `bucket_of_length`."""

    backend: str
    way: Way
    Dk: int
    Dv: int
    h: int
    L: int
    dtype: str

    @property
    def shape(self) -> Shape:
        """The key without backend and way."""
        return self.Dk, self.Dv, self.h, self.L, self.dtype


class Timed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A launch and how long the whole direction took with it: median, 20th and 80th percentile in ms."""

    config: KernelConfig
    ms_median: float
    ms_p20: float
    ms_p80: float


class Result(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was found for one kernel on one problem. `winner` is the same for all its problems, None where no launch beat the committed
    one over all of them, twice (nsa_sel/bench/tune/kernel_configs.py has the rule)."""

    key: Key
    kernel: str  # as configurations name it, "-wide" included
    problem: str  # of nsa_sel.bench.tune.search_space.PROBLEMS
    committed: Timed
    winner: KernelConfig | None
    verdict: str  # in words
    top: tuple[Timed, ...]  # the fastest launches and the winner, the committed one among them or not
    measured: int  # launches
    failed: int  # that did not compile, did not fit, or gave other results


class TunedFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that `nsa-sel tune` writes."""

    stamp: Stamp
    commit: str | None
    results: tuple[Result, ...] = ()
    thresholds: dict[Way, Threshold] = {}  # sel_triton_min_L, where it was measured
    costs: Costs | None = None  # of the ways that were measured whole


class Table(NamedTuple):
    """The launches of one file, by shape, way and kernel, its thresholds and its costs."""

    name: str  # of the file, without its folder
    fingerprint: str
    data: bytes
    launches: dict[tuple[Shape, Way], dict[str, KernelConfig]]
    min_length: dict[Way, int]  # where it is decided
    costs: Costs | None


def class_of_heads(h: int) -> int:
    """The power of two that holds h, at most `MOST_HEADS`."""
    return min(MOST_HEADS, 1 << (h - 1).bit_length())


def bucket_of_length(L: int) -> int:
    """The power of two that holds L, from `LEAST_LENGTH` to `MOST_LENGTH`."""
    return min(MOST_LENGTH, max(LEAST_LENGTH, 1 << (max(1, L) - 1).bit_length()))


def shape_of(request: Request) -> Shape:
    """The classes of a request. Its L is the static bound of the longest row, in place of the average: that would take reading the
    device, and rows of whole blocks select alike."""
    return request.Dk, request.Dv, class_of_heads(request.h), bucket_of_length(request.max_length), request.dtype


NO_FOLDER = f"a folder to keep tuning and compiled kernels in, as {CACHE_FLAG}, XDG_CACHE_HOME or a home directory give one"


def cache_folder() -> Path | None:
    """Where tuning is kept: NSA_SEL_CACHE, else nsa-sel in XDG_CACHE_HOME, else ~/.cache/nsa-sel; None, told once, without a home."""
    own = os.environ.get(CACHE_FLAG)
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nsa-sel"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        if ("", "no folder") not in _told:
            _told.add(("", "no folder"))
            words = f"nsa-sel: nothing is kept on disk, for want of {NO_FOLDER}: set {CACHE_FLAG}"
            warnings.warn(words, RuntimeWarning, stacklevel=3)
        return None


def file_of(stamp: Stamp) -> Path:
    """The file of one environment. Raises ConfigError where there is no cache folder."""
    folder = cache_folder()
    if folder is None:
        raise ConfigError("the cache folder", None, NO_FOLDER, f"set {CACHE_FLAG}")
    return folder / "tuned" / f"{_stem(stamp.device, stamp.sm)}-{stamp.digest()}.json"


def _stem(name: str, sm: int | None) -> str:
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')}-sm{sm or 0}"


def stamp_of(device: DeviceInfo) -> Stamp:
    """The environment of this process on `device`."""
    return Stamp(
        device=device.name, sm=device.sm, driver=_driver() if device.kind == "cuda" else None, torch=_version("torch"),
        triton=_version("triton"), nsa_sel=__version__, kernels=_kernels(),
    )  # fmt: skip


@functools.cache
def _driver() -> str | None:
    try:
        found = re.search(r"Module\D*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        if found:
            return found[1]
    except OSError:
        pass  # a container may hide it
    command = ("nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def _version(package: str) -> str | None:
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


def parse(data: bytes, name: str) -> tuple[TunedFile, Table]:
    """A file's content, strictly. Raises ConfigError naming the field that does not fit."""
    try:
        file = msgspec.json.decode(data, type=TunedFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(name, str(error), "what `nsa-sel tune` wrote", ANEW) from error
    known = shipped_configs()["base.yaml"].kernels
    launches: dict[tuple[Shape, Way], dict[str, KernelConfig]] = {}
    for result in file.results:
        if result.kernel not in known:
            raise ConfigError(name, result.kernel, ", ".join(known), ANEW)
        if result.winner is not None:
            check_kernel(name, result.kernel, result.winner, ANEW)
            launches.setdefault((result.key.shape, result.key.way), {})[result.kernel] = result.winner
    min_length = {way: found.value for way, found in file.thresholds.items() if found.value is not None}
    if file.costs is not None:
        check_costs(name, file.costs, ANEW)
    return file, Table(name, hashlib.sha256(data).hexdigest()[:12], data, launches, min_length, file.costs)


_tables: dict[tuple[DeviceInfo, Path], Table | None] = {}
_shared: dict[DeviceInfo, Table | None] | None = None  # by sync_tuning: the same on all ranks
_told: set[tuple[str, str]] = set()
_generation = 0
_any = False  # whether a table was found: only then does a call ask whether the job is distributed


def read(device: DeviceInfo) -> Table | None:
    """This machine's table for `device`, remembered, whatever other ranks have; None where there is none that holds."""
    global _any
    if device.kind != "cuda" and not device.triton_interpret:
        return None
    folder = cache_folder()
    if folder is None:
        return None
    key = device, folder
    if key not in _tables:
        _tables[key] = _read(device, folder / "tuned")
        _any = _any or _tables[key] is not None
    return _tables[key]


def _read(device: DeviceInfo, folder: Path) -> Table | None:
    file = folder
    try:
        files = list(folder.glob(f"{_stem(device.name, device.sm)}-{'?' * 12}.json"))
        if not files:
            return None
        stamp = stamp_of(device)
        own = next((file for file in files if file.name == file_of(stamp).name), None)
        file = own or max(files, key=lambda file: file.lstat().st_mtime)
        content, table = parse(private.read(file), file.name)
    except ConfigError as error:
        _ignore(file, "corrupt", str(error))
        return None
    except private.Untrusted as error:
        _ignore(file, "unreadable", str(error.strerror))
        return None
    except OSError as error:
        _ignore(file, "unreadable", f"{error.strerror}: mend the file's permissions")
        return None
    differing = stamp.differences(content.stamp)
    if differing:
        _ignore(
            file, "environment", f"measured in another environment: {'; '.join(differing)}. Run `nsa-sel tune` here, or remove the file"
        )
        return None
    events.emit(
        "sel.tuned.loaded",
        file=str(file),
        fingerprint=table.fingerprint,
        results=len(content.results),
        thresholds=table.min_length,
        costs=sorted(table.costs.models) if table.costs else [],
        stamp=content.stamp,
    )
    return table


def _ignore(file: Path | str, why: str, words: str) -> None:
    """Tell once a process that the committed launches run, and why."""
    if (str(file), why) not in _told:
        _told.add((str(file), why))
        events.emit("sel.tuned.ignored", logging.WARNING, file=str(file), why=why, words=words)
        warnings.warn(f"nsa-sel: {file} is ignored, the committed launches run: {words}", RuntimeWarning, stacklevel=3)


def distributed() -> bool:
    """Whether this process is one of several ranks. Does not import torch."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def in_force(device: DeviceInfo) -> Table | None:
    """The table that calls on `device` use: in a distributed job what `nsa_sel.sync_tuning()` shared, and nothing before that.

    To share at the first call would hang a job whose ranks do not all make one; ranks with launches of their own would differ in
    the last digits, and in speed.
    """
    if not distributed():
        return read(device)
    if _shared is not None:
        return _shared.get(device)
    table = read(device)
    if table is not None:
        _ignore(table.name, "distributed", "ranks must launch alike; call nsa_sel.sync_tuning() on every rank to use that of rank 0")
    return None


def token() -> tuple[int, bool]:
    """What remembered decisions depend on here; costs no look at the disk."""
    return _generation, _any and distributed()


def share(device: DeviceInfo, table: Table | None) -> None:
    """Use `table` on `device` in this distributed job: what all ranks agreed on."""
    global _shared, _generation, _any
    _shared = {**(_shared or {}), device: table}
    _generation += 1
    _any = _any or table is not None


def forget() -> None:
    """Read files anew, and forget what was shared and told."""
    global _shared, _generation, _any
    _tables.clear()
    _told.clear()
    _shared, _any = None, False
    _generation += 1


def apply(settings: Settings, request: Request, device: DeviceInfo) -> Settings:
    """The settings for calls like `request`: where the user's own tuning is in force, with its thresholds and costs, and its launches
    for them.

    What the file that NSA_SEL_CONFIG names says stays, and so do overrides by flags (`Settings.kernel`).
    """
    table = None if settings.autotune == "off" else in_force(device)
    if table is None:
        return settings
    shape = shape_of(request)
    own: dict[str, KernelConfig] = {}
    for way in ("decode" if request.S == 1 else "forward", "backward"):
        own |= table.launches.get((shape, way), {})  # type: ignore[call-overload]
    held = settings.config_file
    own = {kernel: config for kernel, config in own.items() if held is None or settings.sources.get(f"kernels.{kernel}") != held}
    origin = f"tuned: {table.name} {table.fingerprint}"
    sources = {**settings.sources, **{f"kernels.{kernel}": origin for kernel in own}}
    min_length = settings.sel_triton_min_L
    if table.min_length and settings.sources.get("sel_triton_min_L") not in ("NSA_SEL_TRITON_MIN_L", held or ""):
        min_length, sources["sel_triton_min_L"] = by_way(table.min_length, min_length), origin
    costs = settings.costs
    if table.costs is not None and settings.sources.get("costs") != (held or ""):
        costs, others = _over(table.costs, costs)
        sources["costs"] = origin + (f"; {', '.join(others)}: {settings.sources.get('costs', 'built-in')}" if others else "")
    return msgspec.structs.replace(
        settings, kernels={**settings.kernels, **own}, sel_triton_min_L=min_length, costs=costs, tuned=origin, sources=sources,
        fingerprint=hashlib.sha256(f"{settings.fingerprint} {table.fingerprint}".encode()).hexdigest()[:12],
    )  # fmt: skip


def _over(own: Costs, before: Costs | None) -> tuple[Costs, list[str]]:
    """The user's costs, and those of a profile for the ways that the user's leave out, which are named.

    Predictions are compared within a way, so that all models of one are from one machine.
    """
    ways = {name.rpartition("/")[2] for name in own.models}
    rest = {name: model for name, model in before.models.items() if name.rpartition("/")[2] not in ways} if before else {}
    if before is None or not rest:
        return own, []
    merged = msgspec.structs.replace(
        own, dtypes=tuple(dtype for dtype in own.dtypes if dtype in before.dtypes), models={**rest, **own.models}
    )
    return merged, sorted({name.rpartition("/")[2] for name in rest})
