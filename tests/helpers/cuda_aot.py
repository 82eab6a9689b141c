"""Compile by NVRTC what cupy-cuda's kernels would be on a GPU that is not here: only the launch is replaced."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from nsa_sel.backends.cupy_cuda import arithmetic, compiler, few_tokens, launch, sm90, whole_blocks
from nsa_sel.backends.launcher import cuda_driver
from tests.helpers.emulate import packed
from tests.helpers.paths import ROOT

PTXAS = ("--ptxas-options=-v",)
KEPT = ROOT / "build" / "nvrtc"


def reason_to_skip() -> str | None:
    """Why nothing can be compiled here, with the remedy."""
    remedy = "pip install cupy-cuda13x nvidia-cuda-nvrtc"
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        return f"no NVRTC through CuPy: {error}; remedy: {remedy}"
    return None


WHY = reason_to_skip()
needs_nvrtc = pytest.mark.skipif(WHY is not None, reason=str(WHY))


def compiled(monkeypatch: pytest.MonkeyPatch, sm: int, work: Callable[[], object]) -> list[dict[str, Any]]:
    """Every kernel that `work()` launches, compiled for compute capability sm/10: its name, macros, threads, registers, shared memory,
    bytes that spill, and warnings that ptxas waits for every single wgmma."""
    found: dict[object, dict[str, Any]] = {}

    def start(source: str, macros: compiler.Constants, *grid_and_values: int, **others: Any) -> None:
        _, ctas, threads, shared, *values = grid_and_values
        others.pop("early", None)
        assert len(packed(*values, **others)) <= cuda_driver.MOST_BYTES
        assert 0 < ctas < 2**31
        if (source, macros) not in found:
            found[source, macros] = {
                "kernel": source, "macros": dict(macros), "threads": threads,
                **_resources(source, macros, compiler.architecture(sm, "maps" in others), shared),
            }  # fmt: skip

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(launch, "clear", lambda *_: None)
    for module in (sm90, whole_blocks, few_tokens, arithmetic):  # the driver makes tensor maps
        for name in ("tensor_map", "row_map", "key_group_map"):
            monkeypatch.setattr(module, name, lambda *_, **__: bytes(cuda_driver.MAP_BYTES), raising=False)
    work()
    return list(found.values())


def _resources(source: str, macros: compiler.Constants, arch: str, shared: int) -> dict[str, int]:
    log = _log(source, macros, arch)
    numbers = {name: re.search(rf"(\d+) bytes {name}", log) for name in ("spill stores", "stack frame", "smem")}
    spilled, stack, static = (int(match[1]) if match else 0 for match in numbers.values())
    registers = re.search(r"Used (\d+) registers", log)
    assert registers is not None, log
    serialized = log.count("instructions are serialized")
    return {"registers": int(registers[1]), "shared": shared + static, "spilled": spilled + stack, "serialized": serialized}


@functools.cache
def _log(source: str, macros: compiler.Constants, arch: str) -> str:
    """What ptxas says. Compiled once for all processes and runs: the name of the file is a digest of all that the compiler reads."""
    from cupy_backends.cuda.libs import nvrtc

    everything = (compiler.OPTIONS, PTXAS, compiler.definitions(macros), arch, nvrtc.getVersion(), sorted(compiler.sources(source).items()))
    kept = KEPT / f"{hashlib.sha256(repr(everything).encode()).hexdigest()}.log"
    if not kept.exists():
        _, log = compiler.compile_source(source, macros, arch, PTXAS)
        KEPT.mkdir(parents=True, exist_ok=True)
        made = kept.with_suffix(f".{os.getpid()}")
        made.write_text(log)
        made.replace(kept)
    return kept.read_text()
