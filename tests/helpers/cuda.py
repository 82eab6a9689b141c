"""cupy-cuda's kernels without a GPU: compiled for the CPU and run there, or compiled by NVRTC for a GPU that is not here."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from torch import Tensor

from nsa_sel.backends.cupy_cuda import arithmetic, compiler, few_tokens, launch, sm90, token_order, whole_blocks
from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.core.call import Call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.quantize import STORED, scales_of
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.aot import TARGETS
from tests.helpers.caches import Cache
from tests.helpers.cases import make_call
from tests.helpers.files import ROOT

EMULATION = Path(__file__).parent / "emulation"
GPU = DeviceInfo(kind="cuda", name="emulated", sm=90, sm_count=2, shared_memory=227 << 10)
BACKWARDS, EAGER = 1, 2  # the last threads first; copies at once
LATE_WARP = 4  # times 1 + number of a warp, whose lanes, but the first, run when nothing else goes on
EXTERN = re.compile(r"extern __shared__ __align__\(\d+\) ([\w ]+) memory\[\];")
MAIN = """
static const Arguments *arguments;
extern "C" void run(unsigned blocks, unsigned threads, unsigned shared, int mode, const void *bytes) {{
    alignas(Arguments) static char aligned[sizeof(Arguments)];
    memcpy(aligned, bytes, sizeof(Arguments));
    arguments = reinterpret_cast<const Arguments *>(aligned);
    launch(blocks, threads, shared, mode, [] {{ {kernel}(*arguments); }});
}}
"""
# With -Og the kernels run longer, with -O2 they compile longer. Of the standard headers only C's: the wrappers of C++ around them take as
# long as the rest. Nothing of libstdc++ is linked, which takes longer than the kernel.
COMPILE = ["g++", "-std=c++17", "-nostdinc++", "-nostdlib", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing"]
# A shift by all bits or more gives 0 on a GPU, and on a CPU anything: here it ends the process (SIGILL).
CHECKED = ["-fsanitize=shift-exponent", "-fsanitize-undefined-trap-on-error"]
UNFORTIFIED = ["-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0"]  # threads are fibers, which jump between stacks
KEPT = ROOT / "build" / "nvrtc"  # what NVRTC says, and kernels that are compiled for the CPU
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++, which compiles the kernels for the CPU")


def emulated(monkeypatch: pytest.MonkeyPatch, mode: int = 0) -> None:
    """Until the end of the test, launches run on the CPU. mode: BACKWARDS runs the last threads first, EAGER copies at once; LATE_WARP
    times 1 + number of a warp runs that warp's first lane ahead of its others."""

    def start(source: str, macros: compiler.Constants, *grid_and_values: int, **others: Any) -> None:
        _, ctas, threads, shared, *values = grid_and_values
        others.pop("early", None)
        arguments = ctypes.create_string_buffer(packed(*values, **others), cuda_driver.MOST_BYTES)
        _library(source, macros).run(ctas, threads, shared, mode, arguments)

    def clear(pointer: int, size: int, device: int) -> None:
        ctypes.memset(pointer, 0, size)

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(launch, "clear", clear)
    for module in (sm90, whole_blocks, few_tokens):
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    for module in (sm90, few_tokens):
        monkeypatch.setattr(module, "row_map", row_map)
    monkeypatch.setattr(sm90, "key_group_map", lambda x: tensor_map(x, 8, 64))


def call_of(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None = None, scale: float | None = None, **changed: Any
) -> Call:
    """Return a checked call on the emulated GPU, with its settings except `changed`."""
    return make_call(q, k, v, selection, q_pos=q_pos, scale=scale, **{"device": GPU, **changed})


def cache_call(cache: Cache, gpu: DeviceInfo = GPU, scales: Mapping[str, Tensor] = MappingProxyType({})) -> Call:
    """The call of a step over a cache on the emulated GPU."""
    k, v = (x.transpose(1, 2) for x in (cache.k_cache, cache.v_cache))
    own = None
    if cache.k_cache.dtype == STORED:
        paged = cache.block_table is not None
        own = scales_of(cache.q, cache.k_cache, cache.v_cache, scales.get("k_scale"), scales.get("v_scale"), paged)
    facts = None, cache.q.shape[-1] ** -0.5, settings_for(gpu), gpu, cache.cache_seqlens, cache.block_table
    return Call(cache.q, k, v, cache.selection, *facts, scales=own)


def tensor_map(x: Tensor, box_rows: int, box_cols: int, promoted: bool = True) -> bytes:
    """`TensorMap` of emulation/hopper.cuh."""
    return map_of(x.data_ptr(), x.shape, x.stride(), box_rows, box_cols, x.element_size())


def map_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], box_rows: int, box_cols: int, element_size: int) -> bytes:
    return struct.pack("<12q32x", address, *shape, *strides, box_rows, box_cols, element_size)


def row_map(x: Tensor, tokens: int) -> bytes:
    """`RowMap` of emulation/hopper.cuh."""
    return row_map_of(x.data_ptr(), x.shape, x.stride(), tokens)


def row_map_of(address: int, shape: tuple[int, ...], strides: tuple[int, ...], tokens: int) -> bytes:
    return struct.pack("<12q32x", address, *shape, *strides, tokens)


def packed(*values: int, maps: tuple[bytes, ...] = (), problem: tuple[Any, ...] = ()) -> bytes:
    """A kernel's `Arguments`, as `launch.start` packs them."""
    return launch.layout(len(maps), bool(problem), len(values)).pack(*maps, *problem, *values)


def order_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of few tokens have an order, too."""
    monkeypatch.setattr(token_order, "LEAST_TOKENS", 1)
    monkeypatch.setattr(token_order, "LEAST_ROWS", 1)


@functools.cache
def _library(source: str, macros: compiler.Constants) -> ctypes.CDLL:
    """Compiled once for all processes and runs: the name of the file is a digest of all that the compiler reads."""
    memory = r"\1 *memory = reinterpret_cast<\1 *>(dynamic_memory);"
    files = {file: EXTERN.sub(memory, text) for file, text in compiler.sources(source).items()}
    files |= {name: (EMULATION / name).read_text() for name in ("hardware.cuh", "hopper.cuh")}
    files["main.cpp"] = f'#include "{Path(source).name}"\n' + MAIN.format(kernel=Path(source).stem)
    command = [*COMPILE, *CHECKED, *UNFORTIFIED, *compiler.definitions(macros)]
    digest = hashlib.sha256(repr((_version(), command, sorted(files.items()))).encode()).hexdigest()
    kept = KEPT / f"{digest}.so"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            for file, text in files.items():
                Path(folder, file).write_text(text)
            KEPT.mkdir(parents=True, exist_ok=True)
            made = kept.with_suffix(f".{os.getpid()}")
            command += ["-o", str(made), str(Path(folder, "main.cpp")), "-lm", "-lgcc"]
            built = subprocess.run(command, capture_output=True, text=True, check=False)
            assert built.returncode == 0, built.stderr[:3000]
            made.replace(kept)
    return ctypes.CDLL(str(kept))


@functools.cache
def _version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout


PTXAS = ("--ptxas-options=-v",)


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
    """Return the log of ptxas. Compile once for all processes and runs: the file's name is a digest of all compiler inputs."""
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


# Bytes. dkdv_tiles.cu: both accumulators of 128 columns take nearly all registers. dq_gather.cu: as do 256 columns, s and dp, and with some
# sizes a few words are spilled. forward_gather.cu: with three heads of 256 columns, by which no shift divides.
# With two heads and blocks of 8 keys dq_gather.cu spills 20 bytes with NVRTC 13.5, 52 with 13.0.
SPILLS = {
    (80, "dkdv_tiles.cu"): 8, (90, "dq_gather.cu"): 16, (90, "forward_gather.cu"): 16, (90, "dq_gather.cu", "h2-256-8"): 32,
    (90, "block_partials.cu", "paged-128-packed-e4m3-page"): 8,
}  # fmt: skip


def check_fit(kernels: list[dict[str, Any]], sm: int, shape: str = "") -> set[str]:
    """Check shared memory, registers and spills of compiled kernels, and return their names."""
    for kernel in kernels:
        file = kernel["kernel"]
        assert kernel["shared"] <= TARGETS[sm][0] * 1024, kernel
        assert kernel["registers"] * kernel["threads"] <= 65536, kernel
        assert kernel["spilled"] <= 2 * SPILLS.get((sm, file, shape), SPILLS.get((sm, file), 0) if shape else 0), kernel
        assert kernel["serialized"] == 0, kernel
    return {kernel["kernel"] for kernel in kernels}
