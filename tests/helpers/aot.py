"""Compile the kernels that the Triton backends would launch, for GPUs that are not here, and print a JSON line per kernel.

    python tests/helpers/aot.py 90 [SHAPE...]         # or several targets: 86,89
    python tests/helpers/aot.py 90 [SHAPE...] --shared SHAPE...         # of these, shared memory alone: a third of the time

The backends run as they are, on CPU tensors and with injected device facts; only the launch is replaced by compilation for the
target. Needs a process without TRITON_INTERPRET. Shared memory is in the kernel's metadata; registers and spills come from cuobjdump.
Decoding is compiled forward alone: nothing trains on it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia

from nsa_sel.backends.specs import SPECS
from nsa_sel.core import registry
from nsa_sel.core.call import Call
from nsa_sel.core.check import check_call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.quantize import STORED, Scales
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for

# Bytes of shared memory that one block may use (CUDA C++ programming guide, compute capabilities) and multiprocessors of a usual chip.
TARGETS = {80: (163, 108), 86: (99, 84), 89: (99, 128), 90: (227, 132), 100: (227, 148), 120: (99, 170)}
PTX_OF = {89: 86}  # Triton makes the same PTX for both, but for the line that names the target: it is assembled for each
SHAPES = {  # name: (B, S, S_kv, G, h, Dk, Dv, n, block_size, dtype)
    "h16": (1, 2048, 2048, 4, 16, 128, 128, 16, 64, torch.bfloat16),
    "h4-fp16": (1, 4096, 4096, 4, 4, 64, 64, 16, 64, torch.float16),
    "h64-192-128": (1, 2048, 2048, 1, 64, 192, 128, 16, 64, torch.bfloat16),
    "h3-256": (1, 2048, 2048, 4, 3, 256, 256, 8, 32, torch.bfloat16),
    "h12-256-small": (1, 2048, 2048, 2, 12, 256, 256, 512, 4, torch.bfloat16),  # blocks of fewer keys than a step
    "decode-small": (1, 1, 65536, 2, 12, 256, 256, 512, 4, torch.bfloat16),
    "h1-fp32": (1, 4096, 4096, 2, 1, 64, 64, 8, None, torch.float32),
    "decode-h16": (1, 1, 65536, 4, 16, 128, 128, 16, 64, torch.bfloat16),
    "h1-large": (1, 2048, 2048, 8, 1, 128, 128, 3, 512, torch.bfloat16),  # blocks that triton-block visits whole
    "positions-h4": (1, 4096, 4096, 4, 4, 128, 128, 16, 64, torch.bfloat16),
}
OF_CUDA = {  # likewise, for which cupy-cuda alone has kernels, or constants, of their own
    "h12": (1, 2048, 2048, 2, 12, 128, 128, 16, 64, torch.bfloat16),
    "h1": (1, 2048, 2048, 4, 1, 128, 128, 16, 64, torch.bfloat16),
    "h12-256": (1, 2048, 2048, 2, 12, 256, 256, 32, 64, torch.bfloat16),
    "h16-8": (1, 2048, 2048, 2, 16, 128, 128, 128, 8, torch.bfloat16),
    "h2-256-8": (1, 2048, 2048, 2, 2, 256, 256, 128, 8, torch.bfloat16),
    "h2-192-16": (1, 2048, 2048, 2, 2, 192, 128, 64, 16, torch.float16),
    "decode-B64-h16": (64, 1, 4096, 4, 16, 128, 128, 16, 64, torch.bfloat16),
    "decode-B16-h64": (16, 1, 4096, 4, 64, 128, 128, 16, 64, torch.bfloat16),
    "decode-B64-h64-64-128": (64, 1, 4096, 4, 64, 64, 128, 16, 64, torch.bfloat16),
    "decode-B64-h4-64": (64, 1, 4096, 4, 4, 64, 64, 16, 128, torch.float16),
}
PAGED = {  # name: (B, S, pages of a sequence, page size, G, h, D, n, block_size): forward alone, in bfloat16
    "paged-16-split": (1, 1, 4096, 16, 4, 16, 128, 16, 64),
    "paged-16": (256, 1, 1024, 16, 4, 16, 128, 16, 64),
    "paged-16-widest": (64, 4, 1024, 16, 1, 16, 256, 16, 64),
    "paged-256": (64, 4, 128, 256, 4, 16, 128, 16, 64),
    "paged-16-split-e4m3-page": (1, 1, 4096, 16, 4, 16, 128, 16, 64),  # quantized, and what has a scale of its own
    "paged-16-e4m3-head": (256, 1, 1024, 16, 4, 16, 128, 16, 64),
    "paged-256-e4m3-page": (64, 4, 128, 256, 4, 16, 128, 16, 64),
}
PAGED_OF_CUDA = {  # likewise
    "paged-64": (256, 1, 256, 64, 4, 16, 128, 16, 64),
    "paged-64-S8": (128, 8, 256, 64, 1, 16, 128, 16, 128),
    "paged-64-prefill": (1, 256, 128, 64, 4, 16, 128, 16, 128),
    "paged-64-e4m3-head": (256, 1, 256, 64, 4, 16, 128, 16, 64),
    "paged-64-S4-e4m3-page": (64, 4, 512, 64, 4, 16, 128, 16, 64),
    "paged-64-S4-h4-e4m3-page": (64, 4, 512, 64, 8, 4, 128, 16, 64),
    "paged-64-few-e4m3-page": (2, 1, 512, 64, 4, 3, 64, 16, 128),
}


class TargetDriver:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, target: int | str) -> None:
        """target: 10 x the compute capability of an NVIDIA GPU, or the name of an AMD architecture."""
        self.target = GPUTarget("hip", target, 64) if isinstance(target, str) else GPUTarget("cuda", target, 32)

    def get_current_device(self) -> int | str:
        return self.target.arch  # Triton remembers kernels, and their target, per device

    def get_current_stream(self, device: int | str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def target_call(shape: str, sm: int) -> Call:
    """A call of `shape` on a GPU of compute capability sm/10 that is not here: CPU tensors and injected device facts."""
    kilobytes, sms = TARGETS[sm]
    device = DeviceInfo(kind="cuda", name="target", sm=sm, sm_count=sms, shared_memory=kilobytes * 1024)
    B, S, S_kv, G, h, Dk, Dv, n, block, dtype = (SHAPES | OF_CUDA)[shape]
    q, k, v = torch.empty(B, S, G, h, Dk, dtype=dtype), torch.empty(B, G, S_kv, Dk, dtype=dtype), torch.empty(B, G, S_kv, Dv, dtype=dtype)
    selection = Selection.from_ranges(torch.zeros(B, S, G, n, 2, dtype=torch.int32), block_size=block)
    q_pos = torch.zeros(B, S, dtype=torch.int64) if shape.startswith("positions") else None
    checked = check_call(q, k, v, selection, None, q_pos)
    return Call(q, k, v, checked[3], q_pos, checked[4], settings_for(device), device)


def paged_call(shape: str, sm: int) -> Call:
    """A call over a pool of pages, likewise."""
    B, S, each, page_size, G, h, D, n, block = (PAGED | PAGED_OF_CUDA)[shape]
    kilobytes, sms = TARGETS[sm]
    device = DeviceInfo(kind="cuda", name="target", sm=sm, sm_count=sms, shared_memory=kilobytes * 1024)
    q, pages = torch.empty(B, S, G, h, D, dtype=torch.bfloat16), torch.empty(1, page_size, G, D, dtype=torch.bfloat16).transpose(1, 2)
    selection = Selection(torch.zeros(B, S, G, n, 2, dtype=torch.int32), block)
    lengths, table = torch.ones(B, dtype=torch.int32), torch.zeros(B, each, dtype=torch.int32)
    scales = None
    if "e4m3" in shape:
        scale = torch.ones(1, G)
        scales = Scales(scale, scale, page_size if shape.endswith("page") else 0, shape.rpartition("-")[2])
        pages = pages.to(STORED)
    return Call(q, pages, pages, selection, None, D**-0.5, settings_for(device), device, lengths, table, scales=scales)


class SharedMemoryIsKnown(Exception):
    """Raised in the middle of Triton's pipeline."""


def stop_at_shared_memory(backend: Any = None, stages: dict[str, Any] | None = None, *others: Any) -> tuple[str, str] | None:
    """Triton's hook for stages: compiling ends when shared memory has been allocated, before most of the work, which is LLVM's and the
    assembler's."""
    if stages is None:  # asked for what tells these kernels from whole ones in Triton's caches
        key = "shared memory alone " + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return key, key
    lower = stages["llir"]

    def measure(module: Any, metadata: dict[str, Any]) -> bytes:
        def stop(allocating: Any) -> None:  # where Triton would add the pass that comes next
            allocating.run(module, "make_llir")
            raise SharedMemoryIsKnown

        following = mock.patch.object(nvidia.nvidia.passes.ttnvgpuir, "add_allocate_tensor_memory", stop)
        with following, contextlib.suppress(SharedMemoryIsKnown):
            lower(module, metadata)
        metadata["shared"], text = module.get_int_attr("ttg.shared"), str(module)
        (metadata["name"],) = re.findall(r"tt.func public @(\w+)", text)
        return text.encode()

    del stages["llir"], stages["ptx"]
    stages["cubin"] = measure
    return None


@contextlib.contextmanager
def launches_compile(target: int | str, whole: bool = True) -> Iterator[list[Any]]:
    """Inside, launches compile for a GPU of this target (`TargetDriver`), and append the kernel to the list, instead of running it.
    whole: to machine code, not only until shared memory is known."""
    compiled: list[Any] = []
    triton.knobs.runtime.add_stages_inspection_hook = None if whole else stop_at_shared_memory
    triton.runtime.driver.set_active(TargetDriver(target if isinstance(target, str) else PTX_OF.get(target, target)))
    launch = triton.runtime.jit.KernelInterface.__getitem__
    triton.runtime.jit.KernelInterface.__getitem__ = lambda kernel, grid: (
        lambda *args, **options: compiled.append(kernel.run(*args, grid=grid, warmup=True, **options))
    )
    try:
        yield compiled
    finally:
        triton.runtime.jit.KernelInterface.__getitem__ = launch
        triton.knobs.runtime.add_stages_inspection_hook = None


def compile_backend(name: str, shape: str, sm: int, whole: bool = True) -> list[dict[str, Any]]:
    """Every kernel that forward and backward of `name` launch for `shape` on a GPU of compute capability sm/10."""
    call = (paged_call if shape in PAGED else target_call)(shape, sm)
    with launches_compile(sm, whole) as compiled:
        module = registry.load(name)
        o, lse = module.forward(call)
        if shape not in PAGED and call.q.shape[1] > 1:
            module.backward(call, o, lse, torch.empty_like(o), None)
    return [{"backend": name, "shape": shape, "sm": sm, "limit": call.device.shared_memory, **resources(kernel, sm)} for kernel in compiled]


@functools.cache  # backends share kernels, and Triton then gives the same object
def resources(kernel: Any, sm: int) -> dict[str, Any]:
    """Shared memory, registers and spilled bytes (stack frame, local memory) of a compiled kernel; if it is not whole, no registers."""
    about = kernel.metadata
    known = {"kernel": about.name, "warps": about.num_warps, "stages": about.num_stages, "shared": about.shared}
    if "ptx" not in kernel.asm:
        return {**known, "tma": b"ttng.async_tma" in kernel.asm["cubin"]}
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "ptx"), Path(folder, "cubin")
        if sm in PTX_OF:
            ptx.write_text(kernel.asm["ptx"])
            subprocess.run([tools / "ptxas", "-lineinfo", f"--gpu-name=sm_{sm}", ptx, "-o", cubin], check=True)
        else:
            cubin.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {
        **known, "registers": int(usage["REG"]), "spilled": int(usage["STACK"]) + int(usage["LOCAL"]),
        "wgmma": "wgmma" in kernel.asm["ptx"], "tma": "cp.async.bulk.tensor" in kernel.asm["ptx"],
    }  # fmt: skip


def main(targets: str, *asked: str) -> None:
    shapes = asked or (*SHAPES, *PAGED)
    measured = shapes.index("--shared") if "--shared" in shapes else len(shapes)
    for backend in (spec for spec in SPECS if spec.framework == "triton"):
        for number, shape in enumerate(shapes):
            if number == measured:
                continue
            if shape in PAGED:
                takes = backend.reads_caches
            else:
                block, limits = SHAPES[shape][8], backend.limits
                takes = not limits.block_aligned_only or (block is not None and limits.takes_block(block))
            if not takes:
                continue
            for target in map(int, targets.split(",")):
                if "e4m3" in shape and (target < 89 or target in PTX_OF):  # SM 8.6, whose PTX is taken, has no such type
                    continue
                for line in compile_backend(backend.name, shape, target, number < measured):
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
