"""The extension of node.cpp: built once by PyTorch's cpp_extension, kept on disk as compiled kernels are, and given what it calls."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import struct
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_sel.backends import _driver
from nsa_sel.backends._replay import KeptPlan, Recording
from nsa_sel.core import native
from nsa_sel.errors import BackendError
from nsa_sel.settings import private
from nsa_sel.settings.tuned import cache_folder
from nsa_sel.telemetry import events

_CODES = re.compile(r"\d*\D")  # of a struct's format


@functools.cache
def loaded() -> Any:
    """The module, ready to play passes.

    Raises:
        BackendError: it can't be built here.
    """
    module = _module()
    if isinstance(module, BackendError):
        raise module
    module.configure(*_driver.addresses(), _stream_of, _driver.bind_context, _blocked, events.count)
    return module


def _stream_of(device: int) -> int:
    return _driver.stream_of(device) if device >= 0 else 0


def _blocked() -> bool:
    """Whether passes have to run by Python, for launch hooks or a backend that failed."""
    return _driver.hooked() or native.any_failed()


@functools.cache
def _module() -> Any:
    """The module, or the error that is raised at every call: it is built once."""
    source = resources.files(__package__) / "node.cpp"
    of = repr((source.read_text(), torch.__version__, sys.implementation.cache_tag))
    name = f"nsa_sel_native_{hashlib.sha256(of.encode()).hexdigest()[:16]}"
    kept = cache_folder()
    folder = (Path(tempfile.mkdtemp()) if kept is None else kept) / "native" / name
    file = folder / f"{name}.so"
    try:
        if not file.exists():
            private.make_folder(folder)
            _build(name, str(source), folder)
            os.chmod(file, 0o755)
        os.close(private.opened(file, os.O_RDONLY))
    except Exception as error:
        found = BackendError(
            f"NSA_SEL_NATIVE=1 needs an extension that is not built here: {_first_error(error)}; allowed: a machine with a C++ compiler,"
            " ninja and Python's headers, or a cache folder (NSA_SEL_CACHE) that has it for this PyTorch. Remedy: install g++ and ninja, or"
            " unset NSA_SEL_NATIVE."
        )
        found.__cause__ = error
        return found
    loader = importlib.machinery.ExtensionFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None, "a loader is given"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _build(name: str, source: str, folder: Path) -> None:
    from torch.utils import cpp_extension  # imports setuptools

    cpp_extension.load(name, [source], extra_cflags=["-O2"], build_directory=str(folder), is_python_module=False)


def _first_error(error: Exception) -> str:
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if "error:" in line), lines[0])


class _Entries:
    """A table whose entries are their numbers."""

    def __getitem__(self, entry: int) -> int:
        return entry


def converted(recording: Recording, inputs: Sequence[Tensor | None], known: dict[Any, Any]) -> Any:
    """The recording as C++ plays it, for tensors like these; None where it uses a plan whose building is not recorded."""
    plans = []
    for key, kind, _, _ in recording.plans:
        plan = known.get(kind)
        built = converted(plan, inputs[:4], known) if type(plan) is Recording else None
        if built is None:
            return None
        plans.append((key, built, functools.partial(KeptPlan, None, *plan.plan)))  # type: ignore[union-attr]
    return loaded().Pass(
        recording.device, list(inputs), list(recording.outputs), recording.scratch, plans, list(recording.offsets), list(recording.maps),
        list(recording.constants), list(recording.cleared), [_step(*step) for step in recording.steps], recording,
    )  # fmt: skip


def _step(function: int, grid: bytes, early: bool, pointers: Any, arguments: struct.Struct, values: Any) -> tuple[Any, ...]:
    """A kernel's launch: its function, grid and block and shared memory, where its parameters begin, and what is packed where."""
    begin, packed, offset = ctypes.addressof(_driver.thread.arguments), [], 0
    for entry, code in zip(values(_Entries()), _CODES.findall(arguments.format[1:]), strict=True):
        size = struct.calcsize("<" + code)
        packed.append((entry, offset, size))
        offset += size
    return function, struct.unpack("<7I4x", grid), early, [x - begin for x in pointers.list], packed
