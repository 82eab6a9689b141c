"""The registry: built-in backends, those of installed packages (entry points), what they lack here, and which ones
broke."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec

from nsa_sel.backends.specs import CHOOSERS, LOSSES, SPECS
from nsa_sel.core.backend import Backend, BackendModule, ChooserModule, Library, LossModule, Offer, Reason
from nsa_sel.core.request import Kind, Request
from nsa_sel.errors import BackendError, warn

ENTRY_POINT_GROUP = "nsa_sel.backends"
STICKY = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure", "illegal instruction")


@functools.cache
def backends(kind: Kind = "attend") -> dict[str, Backend]:
    """All backends of a kind by name. An entry point of the group `nsa_sel.backends` names a `Backend` object."""
    return {name: spec for name, spec in _every().items() if spec.kind == kind}


@functools.cache
def _every() -> dict[str, Backend]:
    every = {spec.name: spec for spec in (*SPECS, *CHOOSERS, *LOSSES)}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        try:
            spec = entry.load()
        except Exception as error:  # of another package: calls go on without it
            warn(
                f"entry point {entry.name!r} of {ENTRY_POINT_GROUP} cannot be loaded, and is left out: {error!r}. Remedy: correct or"
                " uninstall its package."
            )
            continue
        if not isinstance(spec, Backend):
            raise BackendError(
                f"entry point {entry.name!r} of {ENTRY_POINT_GROUP} gives a {type(spec).__name__}; allowed: an"
                " nsa_sel.core.backend.Backend. Remedy: correct or uninstall the package that declares it."
            )
        if spec.name in every:
            raise BackendError(
                f"entry point {entry.name!r} of {ENTRY_POINT_GROUP} takes the name {spec.name!r}, which is already a"
                " backend. Remedy: give it another name."
            )
        every[spec.name] = spec
    return every


@functools.cache
def fallback(kind: Kind = "attend") -> str:
    """Return the name of the backend that replaces one of this kind that failed."""
    return next(spec.name for spec in (*SPECS, *CHOOSERS, *LOSSES) if spec.fallback and spec.kind == kind)


def load(name: str) -> BackendModule:
    """Return the module of a backend; this is where a kernel framework is first imported."""
    return _module(backends()[name].path)


def load_chooser(name: str) -> ChooserModule:
    """`load`, of a backend of the kind "choose"."""
    return cast(ChooserModule, _module(backends("choose")[name].path))


def load_loss(name: str) -> LossModule:
    """`load`, of a backend of the kind "index_loss"."""
    return cast(LossModule, _module(backends("index_loss")[name].path))


def kind_of(name: str) -> Kind | None:
    """Return the kind of the backend of this name; None for an unknown one."""
    kinds: tuple[Kind, ...] = get_args(Kind)
    return next((kind for kind in kinds if name in backends(kind)), None)


@functools.cache  # faster than import_module
def _module(path: str) -> BackendModule:
    return cast(BackendModule, importlib.import_module(path))


@functools.cache
def missing(name: str) -> tuple[Reason, ...]:
    """Return what backend `name` lacks on this machine. It is not imported."""
    reasons, spec = [], backends(kind_of(name) or "attend")[name]
    for need in spec.requires:
        version = version_of(need.package)
        if version is None:
            reasons.append(Reason("package-missing", "unavailable", f"package {need.package}", None, f">= {need.version}", need.remedy))
        elif _numbers(version) < _numbers(need.version):
            reasons.append(Reason("package-old", "unavailable", f"package {need.package}", version, f">= {need.version}", need.remedy))
    for library in spec.libraries:
        if not _has_library(library):
            required = " or ".join(library.files)
            reasons.append(Reason("library-missing", "unavailable", f"library {library.name}", None, required, library.remedy))
    return tuple(reasons)


def _has_library(library: Library) -> bool:
    """Return True if a distribution contains the library, or the loader finds it."""
    attempts = [(importlib.metadata.version, name) for name in library.distributions] + [(ctypes.CDLL, file) for file in library.files]
    for attempt, name in attempts:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError):
            attempt(name)
            return True
    return False


def version_of(package: str) -> str | None:
    """Return the version of an installed import package, whose distribution may have another name (cupy: cupy-cuda13x)."""
    if importlib.util.find_spec(package) is None:
        return None
    distributions = _distributions().get(package, [package])
    try:
        return importlib.metadata.version(distributions[0])
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdecimal())


# Backends that failed, by name and request class, and kernels of sliding windows, by module and heads: not tried again in
# this process. Each access is one dict operation, so no lock is needed.
broken: dict[tuple[str, Any], Reason | None] = {}


def _kind(request: Request) -> Request:
    """Return the class of calls that run the same kernels: the measured sharing and mean length of a selection change
    none."""
    return msgspec.structs.replace(request.request_class(), sharing=None, mean_length=None)


def mark_broken(name: str, request: Request, error: BaseException) -> None:
    """Record that `name` failed to compile or launch for this class of requests."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    broken[name, _kind(request)] = Reason(
        "failed-before", "unavailable", "kernel", f"{type(error).__name__}: {first_line}", "a kernel that compiles and launches",
        "see the warning or the event sel.backend.failed; nsa_sel.reset() lets it try again",
    )  # fmt: skip


def is_sticky(error: BaseException) -> bool:
    """Return True if the error means that the CUDA context is lost, so that nothing else can run."""
    return any(text in str(error) for text in STICKY)


def is_broken(name: str, request: Request) -> bool:
    """Return True if `name` has failed for this class of requests in this process."""
    return any(failed == name for failed, _ in [*broken]) and (name, _kind(request)) in broken


def offers(request: Request) -> tuple[Offer, ...]:
    """Every backend, with what is missing or broken here for this class of requests."""
    key = _kind(request)
    return tuple(
        Offer(spec, missing(name) + ((reason,) if (reason := broken.get((name, key))) else ()))
        for name, spec in backends(request.kind).items()
    )
