"""Every test starts with fixed seeds, no NSA_* flags and empty caches. GPU tests: `-m gpu` or NSA_TEST_TRITON_SEL=1."""

from __future__ import annotations

import atexit
import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch

from nsa_sel import errors
from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo
from nsa_sel.core.warm import reset
from nsa_sel.settings import flags, tuned
from nsa_sel.telemetry import log
from tests.helpers.calls import PINNED
from tests.helpers.interpreter import patch_interpreter

USUAL = "not gpu and not thorough"  # of pyproject.toml

# The same examples in every run, and no folder of past ones.
hypothesis.settings.register_profile("nsa_sel", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("nsa_sel")


def pytest_configure(config: pytest.Config) -> None:
    """One torch thread, as waking threads takes longer than the work on small tensors; and what runs: see `mode`."""
    gc.disable()  # until all is imported
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
    if wanted and markers == USUAL:
        markers = "gpu" if gpu else "not thorough"
    return markers, not (gpu and (wanted or markers == "gpu"))


@pytest.fixture(autouse=True, scope="session")
def interpreter_of_tests() -> Iterator[pytest.MonkeyPatch]:
    """Makes Triton's interpreter faster, and its results those of every CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            patch_interpreter(patch)
        yield patch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which would take a fifth of the time."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # some libraries tell what outlives Python
    gc.set_threshold(10_000, 20, 20)  # there is little of the rest
    gc.enable()


def gpu_tests_wanted() -> bool:
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
    log.log_to(None)
    log.followed = None
    forget()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from tests.helpers.gpus import noted  # which asks for the GPU

    return noted(monkeypatch)


@pytest.fixture
def packed_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention runs on the backend that compiles nothing, unless a test names another."""
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")


@pytest.fixture
def cheapest_backend(request: pytest.FixtureRequest) -> None:
    """`packed_sdpa` on a machine without a GPU."""
    if not torch.cuda.is_available():
        request.getfixturevalue("packed_sdpa")


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for load in ("load", "load_chooser"):
        monkeypatch.setattr(registry, load, mock.Mock(side_effect=AssertionError("a backend was loaded, although the call is wrong")))
    monkeypatch.setattr("nsa_sel.core.decide.device_info", lambda device: DeviceInfo(kind="cpu"))  # no interpreter, whatever runs the tests


@pytest.fixture
def fresh_registry() -> Iterator[None]:
    """Backends and packages are looked for anew, and forgotten afterwards."""
    caches = registry.backends, registry._every, registry.missing
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


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
def tuned_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of `nsa-sel tune` in the test's own cache folder."""
    monkeypatch.setenv("NSA_SEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuned"


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path]) -> Path:
    """A CPU without Triton's interpreter, whatever this process was started with, and a pinned preference; the file that pins it."""
    for user in ("attention", "core.decide"):
        monkeypatch.setattr(f"nsa_sel.{user}.device_info", lambda device: DeviceInfo(kind="cpu"))
    return configure(PINNED)


def forget() -> None:
    flags.checked = -1
    errors.forget_first("flag")
    tuned.forget()
    reset()
