"""Every test starts with fixed seeds, no NSA_* flags and empty caches. GPU tests: `-m gpu` or NSA_TEST_TRITON_SEL=1."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo
from nsa_sel.core.reset import reset
from nsa_sel.settings import flags, tuned
from nsa_sel.telemetry import target
from tests.helpers.public_calls import PINNED

# The same examples in every run, and no folder of past ones.
hypothesis.settings.register_profile("nsa_sel", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("nsa_sel")


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread, as waking threads takes longer than the work on small tensors; and what runs: see `mode`."""
    torch.set_num_threads(1)
    config.option.markexpr, interpreted = mode(config.option.markexpr, gpu_tests_wanted(), torch.cuda.is_available())
    # Triton reads this once, when a test file first imports it: its kernels then run on CPU tensors.
    if interpreted:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def mode(markers: str, wanted: bool, gpu: bool) -> tuple[str, bool]:
    """The -m expression, and whether Triton interprets its kernels.

    On a GPU NSA_TEST_TRITON_SEL=1 means the GPU tests and no others, as -m gpu does: one process can't run kernels there and interpret
    them too. Without a GPU it adds the GPU tests to the others, each skipped for that reason. Any other -m expression stays as it is.
    """
    if wanted and markers == "not gpu":
        markers = "gpu" if gpu else ""
    return markers, not (gpu and (wanted or markers == "gpu"))


@pytest.fixture(autouse=True, scope="session")
def interpreter_of_tests() -> Iterator[None]:
    """Makes Triton's interpreter faster, and its results those of every CPU.

    Products of float32 are summed in float64 and rounded: what BLAS sums in float32 depends on the CPU and on a row's place in the tile.

    Scans and a sort's exclusive-or, which it computes by a Python call per element, go to NumPy: a plan sorts a thousand entries. Its
    search through all of `tl` for builtins, at every call of a device function, is done once.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import inspect

    import numpy as np
    from triton.language import standard
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    from nsa_sel.backends._triton.softmax import larger

    slow_scan, slow_reduce = interpreter.ScanOps.generic_scan, interpreter.ReduceOps.generic_reduce
    plain_dot = interpreter.InterpreterBuilder.create_dot
    names: dict[Any, list[str]] = {}

    def scan(self: Any, arguments: Any) -> Any:
        if self.combine_fn is not larger:
            return slow_scan(self, arguments)
        return [self.to_tensor(np.maximum.accumulate(x.handle.data, axis=self.axis), x.dtype) for x in arguments]

    def reduce(self: Any, arguments: Any) -> Any:
        if self.combine_fn is not standard._xor_combine or self.axis is None:
            return slow_reduce(self, arguments)
        return [self.to_tensor(np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype) for x in arguments]

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype.kind != "f":
            return plain_dot(self, a, b, d, *precision)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def patch_builtin(package: Any, *others: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):  # and not replaced by an outer call
                interpreter._patch_attr(package, name, member, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.ScanOps, "generic_scan", scan)
        patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        patch.setattr(interpreter, "_patch_builtin", patch_builtin)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def gpu_tests_wanted() -> bool:
    """What NSA_TEST_TRITON_SEL says."""
    text = os.environ.get(flags.TEST_FLAG, "0")
    if text not in ("0", "1"):
        raise pytest.UsageError(f"{flags.TEST_FLAG} is {text!r}; allowed: 0 or 1. Remedy: set it to 1 to run the GPU tests, or unset it.")
    return text == "1"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[dict[str, Any]]]:
    """logged(name) -> the fields of every event of that name; events are logged from the beginning of the test."""
    caplog.set_level("INFO", logger="nsa_sel")
    return lambda name: [record.__dict__["nsa_sel"] for record in caplog.records if record.getMessage() == name]


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seeds set, NSA_* flags unset, caches of settings, decisions and failures empty, tuned results of this machine out of sight."""
    for name in list(os.environ):
        if name.startswith("NSA_") and name != flags.TEST_FLAG:
            monkeypatch.delenv(name)
    monkeypatch.setenv(flags.CACHE_FLAG, os.devnull + "/nothing")
    random.seed(0)
    torch.manual_seed(0)
    forget()
    yield
    target.log_to(None)
    target._followed = None
    forget()


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise AssertionError(f"{name} was loaded, although the call is wrong")

    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr("nsa_sel.core.begin.device_info", lambda device: DeviceInfo(kind="cpu"))  # no interpreter, whatever runs the tests


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """configure(text) -> the file that NSA_SEL_CONFIG names, which holds the text."""

    def write(text: str) -> Path:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        monkeypatch.setenv("NSA_SEL_CONFIG", str(file))
        return file

    return write


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path]) -> Path:
    """A CPU without Triton's interpreter, whatever this process was started with, and a pinned preference; the file that pins it."""
    for user in ("attention", "core.begin"):
        monkeypatch.setattr(f"nsa_sel.{user}.device_info", lambda device: DeviceInfo(kind="cpu"))
    return configure(PINNED)


def forget() -> None:
    flags.forget_warnings()
    tuned.forget()
    reset()
