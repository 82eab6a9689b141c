"""Compile the Triton kernels that calls would launch, for GPUs that are not here, and print a JSON line per kernel.

    python tests/helpers/aot.py 90 [SHAPE...]         # a minute a shape; or several targets: 86,89
    python tests/helpers/aot.py 90 [SHAPE...] --shared SHAPE...         # of these, shared memory alone: a third of the time
    python tests/helpers/aot.py choose 90 SHAPE...         # or cache, gate, window, loss
    python tests/helpers/aot.py hip gfx942 triton-group paged-16 [BACKEND SHAPE...]         # an AMD GPU, forward alone

The backends run as they are, on CPU tensors and with injected device facts; only the launch is replaced by compilation for the
target. Needs a process without TRITON_INTERPRET. Shared memory is in the kernel's metadata; registers and spills come from cuobjdump.
Decoding is compiled forward alone: nothing trains on it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia

from nsa_sel.backends import choose_triton, loss_triton, window_triton
from nsa_sel.backends._triton import cache, choose_logits, elementwise, top_n
from nsa_sel.backends.specs import SPECS
from nsa_sel.core import registry
from nsa_sel.core.arguments import Bounds, Requests
from nsa_sel.core.call import NSA_POOL, Call, IndexLossCall, PagedKeys, Pool, Rule, Sequences
from nsa_sel.core.check import check_call
from nsa_sel.core.ranges import Blocks
from nsa_sel.core.request import DeviceInfo
from nsa_sel.quantize import STORED, Scales
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.choose import make_choose_call
from tests.helpers.files import ROOT

# Bytes of shared memory that one block may use (CUDA C++ programming guide, compute capabilities) and multiprocessors of a usual chip.
TARGETS = {80: (163, 108), 86: (99, 84), 89: (99, 128), 90: (227, 132), 100: (227, 148), 120: (99, 170)}
PTX_OF = {89: 86}  # Triton's PTX differs only in the line that names the target; it is assembled for each
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
ONE_GROUP, OF_REQUESTS = "one-group-", "-packed"
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
    "decode-B64-h12-small": (64, 1, 4096, 2, 12, 128, 128, 64, 4, torch.bfloat16),
    "decode-B64-h32-256": (64, 1, 4096, 4, 32, 256, 256, 16, 64, torch.bfloat16),
    "decode-B64-h32-256-small": (64, 1, 4096, 2, 32, 256, 256, 64, 16, torch.float16),
    "decode-B64-h4-64": (64, 1, 4096, 4, 4, 64, 64, 16, 128, torch.float16),
}
PAGED = {  # name: (B, S, pages of a sequence, page size, G, h, D, n, block_size): forward alone, in bfloat16
    "paged-16-split": (1, 1, 4096, 16, 4, 16, 128, 16, 64),
    "paged-16": (256, 1, 1024, 16, 4, 16, 128, 16, 64),
    "paged-128-packed": (256, 1, 256, 128, 4, 16, 128, 16, 128),
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
    "paged-128-packed-e4m3-page": (256, 1, 256, 128, 4, 16, 128, 16, 128),
}


def target_call(shape: str, sm: int) -> Call:
    """A call of `shape` on a GPU of compute capability sm/10 that is not here: CPU tensors and injected device facts.

    `ONE_GROUP` before the name of a shape: the selection has one group for all.
    """
    kilobytes, sms = TARGETS[sm]
    device = DeviceInfo(kind="cuda", name="target", sm=sm, sm_count=sms, shared_memory=kilobytes * 1024)
    B, S, S_kv, G, h, Dk, Dv, n, block, dtype = (SHAPES | OF_CUDA)[shape.removeprefix(ONE_GROUP)]
    q, k, v = torch.empty(B, S, G, h, Dk, dtype=dtype), torch.empty(B, G, S_kv, Dk, dtype=dtype), torch.empty(B, G, S_kv, Dv, dtype=dtype)
    groups = 1 if shape.startswith(ONE_GROUP) else G
    if S == 1 and block is not None:  # decoding reads block indices
        selection = Selection._of_indices(Blocks(torch.zeros(B, S, groups, n, dtype=torch.int32), None, None), block, False)
    else:
        selection = Selection.from_ranges(torch.zeros(B, S, groups, n, 2, dtype=torch.int32), block_size=block)
    q_pos = torch.zeros(B, S, dtype=torch.int64) if shape.startswith("positions") else None
    checked = check_call(q, k, v, selection, None, q_pos)
    return Call(q, k, v, checked[3], q_pos, checked[4], settings_for(device), device)


def paged_call(shape: str, sm: int) -> Call:
    """A call over a pool of pages, likewise; with `OF_REQUESTS` in the shape's name, of the rows of a packed batch."""
    B, S, each, page_size, G, h, D, n, block = (PAGED | PAGED_OF_CUDA)[shape]
    kilobytes, sms = TARGETS[sm]
    device = DeviceInfo(kind="cuda", name="target", sm=sm, sm_count=sms, shared_memory=kilobytes * 1024)
    q, pages = torch.empty(B, S, G, h, D, dtype=torch.bfloat16), torch.empty(1, page_size, G, D, dtype=torch.bfloat16).transpose(1, 2)
    selection = Selection(torch.zeros(B, S, G, n, 2, dtype=torch.int32), block)
    lengths, table = torch.ones(B, dtype=torch.int32), torch.zeros(B, each, dtype=torch.int32)
    scales, table_rows = None, None
    if OF_REQUESTS in shape:
        lengths, table_rows, *_ = torch.ones(B, 4, dtype=torch.int32).unbind(1)
    if "e4m3" in shape:
        scale = torch.ones(1, G)
        scales = Scales(scale, scale, page_size if shape.endswith("page") else 0, shape.rpartition("-")[2])
        pages = pages.to(STORED)
    return Call(
        q, pages, pages, selection, None, D**-0.5, settings_for(device), device, lengths, table, scales=scales, table_rows=table_rows
    )


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
    """Inside, launches compile for a GPU of this target (10 x the compute capability, or the name of an AMD architecture), and append the
    kernel to the list, instead of running it. whole: to machine code, not only until shared memory is known."""
    compiled: list[Any] = []
    gpu = GPUTarget("hip", target, 64) if isinstance(target, str) else GPUTarget("cuda", PTX_OF.get(target, target), 32)
    # Triton remembers kernels, and their target, per device.
    driver = {"get_current_device": lambda: gpu.arch, "get_current_stream": lambda device: 0, "get_current_target": lambda: gpu}
    triton.runtime.driver.set_active(types.SimpleNamespace(**driver))
    triton.knobs.runtime.add_stages_inspection_hook = None if whole else stop_at_shared_memory
    launch = lambda kernel, grid: lambda *args, **options: compiled.append(kernel.run(*args, grid=grid, warmup=True, **options))  # noqa: E731
    with mock.patch.object(triton.runtime.jit.KernelInterface, "__getitem__", launch):
        yield compiled


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


def attend_kernels(targets: str, *asked: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of attention for targets such as "86,89"."""
    shapes = asked or (*SHAPES, *PAGED)
    measured = shapes.index("--shared") if "--shared" in shapes else len(shapes)
    for backend in (spec for spec in SPECS if spec.framework == "triton"):
        for number, shape in enumerate(shapes):
            if number == measured:
                continue
            if shape in PAGED:
                takes = backend.reads_caches
            else:
                block, limits = SHAPES[shape.removeprefix(ONE_GROUP)][8], backend.limits
                takes = not limits.block_aligned_only or (block is not None and limits.takes_block(block))
            if not takes:
                continue
            for target in map(int, targets.split(",")):
                if "e4m3" in shape and (target < 89 or target in PTX_OF):  # SM 8.6, whose PTX is taken, has no such type
                    continue
                yield from compile_backend(backend.name, shape, target, number < measured)


CHOICES = {  # name: B, S, S_kv, G, h, Dk, Dv, rule, dtype
    "h16": (1, 8192, 8192, 4, 16, 128, 128, Rule(), torch.bfloat16),
    "h8-64": (1, 8192, 8192, 2, 8, 64, 64, Rule(), torch.bfloat16),
    "h6-192-128": (1, 4096, 4096, 2, 6, 192, 128, Rule(), torch.bfloat16),
    "h3-fp32": (1, 2048, 2048, 2, 3, 64, 64, Rule(block_size=48), torch.float32),
    "h12-256": (1, 1024, 4096, 2, 12, 256, 256, Rule(), torch.bfloat16),
    "positions": (2, 1024, 4096, 4, 4, 64, 64, Rule(), torch.float16),
    "packed": (1, 8192, 8192, 4, 16, 128, 128, Rule(), torch.bfloat16),
}

MOST_BLOCKS = "most-blocks"
POOLS = {  # choices without attention; name: shape as above, pool
    "msa": ((1, 8192, 8192, 4, 1, 128, 128, Rule(1, 1, 128), torch.bfloat16), Pool(False, False, True)),
    "moba": ((1, 8192, 8192, 16, 1, 128, 128, Rule(512, 512, 512), torch.bfloat16), Pool(False, False, True)),
    "infllm": ((1, 8192, 8192, 2, 16, 128, 128, Rule(), torch.bfloat16), Pool(True, False, True)),
    "max-256": ((1, 1024, 4096, 2, 12, 256, 256, Rule(), torch.float16), Pool(False, True, True)),
    "qsa": ((1, 8192, 8192, 1, 4, 128, 128, Rule(4, 4, 4, 512, 0, 0), torch.bfloat16), Pool(False, False, True, True)),
    "sums-fp32": ((1, 1024, 4096, 2, 3, 64, 64, Rule(1, 1, 48), torch.float32), Pool(False, False, False)),
}


FEW = {  # choices for a few new tokens over index keys; name: S, G, groups of keys, h, D, rule, pool, page size, e4m3
    "few-msa": (1, 4, 1, 1, 128, Rule(1, 1, 128, 16, 0, 1), Pool(False, False, True), 0, False),
    "few-msa-e4m3": (1, 4, 1, 1, 128, Rule(1, 1, 128, 16, 0, 1), Pool(False, False, True), 0, True),
    "few-msa-pages-e4m3": (1, 4, 1, 1, 128, Rule(1, 1, 128, 16, 0, 1), Pool(False, False, True), 64, True),
    "few-qsa": (1, 2, 1, 4, 128, Rule(4, 4, 4, 512, 0, 0), Pool(False, False, True, True), 0, False),
    "few-qsa-drafts-pages": (4, 2, 1, 4, 128, Rule(4, 4, 4, 512, 0, 0), Pool(False, False, True, True), 16, False),
    "few-nsa": (4, 2, 2, 16, 192, Rule(), NSA_POOL, 0, False),
}
PACKED = {  # likewise, of packed rows of requests
    "packed-msa": (4096, 4, 1, 1, 128, Rule(1, 1, 128, 16, 0, 1), Pool(False, False, True), 0, False),
    "packed-msa-pages": (4096, 4, 1, 1, 128, Rule(1, 1, 128, 16, 0, 1), Pool(False, False, True), 128, False),
    "packed-msa-pages-e4m3": (4096, 4, 1, 1, 128, Rule(1, 1, 128, 16, 0, 1), Pool(False, False, True), 128, True),
    "packed-qsa-pages": (4096, 2, 1, 4, 128, Rule(4, 4, 4, 512, 0, 0), Pool(False, False, True, True), 64, False),
    "packed-h8": (4096, 2, 1, 8, 128, Rule(1, 1, 64, 16, 0, 1), Pool(False, False, True), 64, False),
}


CHOICES_OF_PAGES = {  # new tokens over compressed keys in pages; name: S, keys, h, Dk, Dv, dtype
    "pages": (1, 4096, 16, 128, 128, torch.bfloat16),
    "pages-drafts": (4, 4096, 16, 128, 128, torch.bfloat16),
    "pages-256": (1, 4096, 12, 256, 256, torch.bfloat16),
}


def choose(name: str) -> None:
    """Launch what a choice does: of pages, four compressed keys a page, whose parts are joined, or of many blocks, in registers and not."""
    if name == MOST_BLOCKS:
        for blocks, n in ((top_n.WIDE_IF_FEW, 16), (32768, 512)):
            top_n.top_n(torch.zeros(1, 3, 2, blocks), torch.zeros(1, 3, 2, n, 2, dtype=torch.int32), 4, 0, 0, 0)
        return
    if name in CHOICES_OF_PAGES:
        S, keys, h, Dk, Dv, dtype = CHOICES_OF_PAGES[name]
        call = make_choose_call((1, S, 64, 1, h, Dk, Dv, Rule()), dtype, q_pos=torch.zeros(1, S, dtype=torch.int64))
        call.k, call.v = (torch.randn(64, 4, 1, D, dtype=dtype).transpose(1, 2) for D in (Dk, Dv))
        call.blocks, call.pages = keys // 64, PagedKeys(torch.zeros(1, keys // 64, dtype=torch.int32), 1)
        choose_triton.paged(call)
        return
    if name in FEW or name in PACKED:
        S, G, groups, h, D, rule, pool, page, stored = (FEW | PACKED)[name]
        call = make_choose_call((4, S, 4096, G, h, D, D, rule), torch.bfloat16, pool=pool, tail=rule.local == 0)
        C, dtype = call.k.shape[2], STORED if stored else torch.bfloat16
        keys = torch.zeros(*((4 * C // page, page) if page else (4, C)), groups, D, dtype=dtype).transpose(1, 2).expand(-1, G, -1, -1)
        call.k = call.v = keys
        call.lengths, call.start = torch.zeros(4, dtype=torch.int32), -S
        call.pages = PagedKeys(torch.zeros(4, C // page, dtype=torch.int32), 0) if page else None
        call.scales = Scales(torch.ones(1, groups), torch.ones(1, groups), 0, "head") if stored else None
        if name in PACKED:
            R = 1 if name == "packed-msa-pages" else 4
            call.requests, call.q, call.start = Requests(torch.zeros(R + 1, dtype=torch.int32), S, None), call.q[:1], 0
        out = torch.empty(len(call.q), S, G, rule.n + call.tail, dtype=torch.int32)
        choose_triton.best_blocks(call, torch.zeros(4, S, G, h) if pool.softmax else None, out)
        return
    (*shape, dtype), pool = POOLS[name] if name in POOLS else (CHOICES[name], NSA_POOL)
    call = make_choose_call(tuple(shape), dtype, pool=pool)
    call.q_pos = torch.zeros(call.q.shape[:2], dtype=torch.int64) if name == "positions" else None
    if name == "packed":
        call.sequences = Sequences.of(Bounds.of("cu_seqlens", [0, 5000, 8000], call.q.shape[1], call.q), call.rule, call.q)
    if name in POOLS:
        choose_triton.best_blocks(call, choose_triton.log_sum_exp(call) if pool.softmax else None)
    else:
        o, lse, _ = choose_triton.forward(call)
        choose_triton.backward(call, o, lse, torch.empty_like(o), None)


def spills_in_loops(kernel: Any) -> int:
    """Loads and stores of spilled registers between a backward branch and its target. Unconditional ones return from waits out of line."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    lines = text.splitlines()
    labels = {line.strip()[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line.strip())}
    assert any("HGMMA" in line or "STG" in line for line in lines), "no instructions"
    found = set()
    for number, line in enumerate(lines):
        if (branch := re.search(r"@!?U?P\d+ BRA.*\((\.L_x_\d+)\)", line)) and labels[branch[1]] < number:
            found |= {i for i in range(labels[branch[1]], number) if re.search(r"\b(LDL|STL)\b", lines[i])}
    return len(found)


def choose_kernels(*asked: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of choosing: of the shapes that follow each target."""
    sm = 0
    for word in asked:
        if word.isdigit():
            sm = int(word)
            continue
        device = DeviceInfo(kind="cuda", sm=sm, shared_memory=TARGETS[sm][0] * 1024)
        with launches_compile(sm) as compiled, mock.patch.object(choose_logits, "device_info", lambda _, device=device: device):
            choose(word)
        for kernel in compiled:
            used = resources(kernel, sm)
            looped = spills_in_loops(kernel) if used["spilled"] else 0  # disassembling takes as long as assembling
            yield {"shape": word, "sm": sm, "limit": TARGETS[sm][0] * 1024, **used, "looped": looped}


NEW_TOKENS = {"one": (1, 128, torch.bfloat16), "many": (64, 128, torch.bfloat16), "many-fp32": (64, 128, torch.float32)}  # sequences, D


def cache_kernels(target: str, *names: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of a cache's new tokens: appending, and both layers of the MLP."""
    sm, G, page, block, stride = int(target), 4, 64, 32, 16
    for name in names:
        B, D, dtype = NEW_TOKENS[name]
        raw, to = torch.empty(4, page, G, D, dtype=dtype), torch.empty(4, page // stride, G, D, dtype=dtype)
        new = torch.empty(B, 1, G, 6 * D, dtype=dtype)[..., :D]
        weights = tuple(torch.empty(*size, dtype=dtype) for size in ((block, D), (2 * D, block * D), (2 * D,), (D, 2 * D), (D,)))
        slot, covered = torch.zeros(B, 1, dtype=torch.int64), torch.zeros(B, block, dtype=torch.int64)
        fresh = torch.zeros(B, 2, dtype=torch.int32)
        with launches_compile(sm) as compiled:
            cache.append((new,) * 6, (raw,) * 6, slot, slot)
            cache.compress((raw, raw), (new, new), covered, fresh, slot, (*weights[:4], None), weights, (to, to), stride)
        yield from ({"shape": name, "limit": TARGETS[sm][0] * 1024, **resources(kernel, sm)} for kernel in compiled)


def gate_kernels(target: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of the gated sum, of what branches get and give with lse, and with gate * do, for all of them and for one."""
    sm, elementwise.INTERPRETED_TILE = int(target), elementwise.TILE
    do, gates = torch.empty(1, 4096, 4, 16, 128, dtype=torch.bfloat16), torch.empty(1, 4096, 4, 16, 3, dtype=torch.bfloat16)
    lse = torch.empty(do.shape[:4])
    with launches_compile(sm) as compiled:
        elementwise.write_sum([do] * 3, gates, do)
        elementwise.raise_lse([lse] * 3, gates)
        elementwise.write_deltas([lse] * 3, gates)
        elementwise.backward(do, [do] * 3, gates, gates, True)
        elementwise.backward(do, [None, do, None], gates, gates, False)
    yield from ({"sm": sm, "limit": TARGETS[sm][0] * 1024, **resources(kernel, sm)} for kernel in compiled)


WINDOWS = {  # name: B, S, S_kv, G, h, Dk, Dv, dtype
    "h16": (1, 8192, 8192, 4, 16, 128, 128, torch.bfloat16),
    "h6-192-128": (1, 4096, 4096, 2, 6, 192, 128, torch.bfloat16),
    "h12-256": (1, 1024, 4096, 2, 12, 256, 256, torch.bfloat16),
    "packed": (1, 8192, 8192, 4, 16, 128, 128, torch.bfloat16),
}


def window_kernels(targets: str, *names: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of sliding windows: whole on Hopper, elsewhere as far as shared memory is known."""
    for sm, name in itertools.product(map(int, targets.split(",")), names or WINDOWS):
        B, S, S_kv, G, h, Dk, Dv, dtype = WINDOWS[name]
        q = torch.empty(B, S, G, h, Dk, dtype=dtype)
        k, v = torch.empty(B, G, S_kv, Dk, dtype=dtype), torch.empty(B, G, S_kv, Dv, dtype=dtype)
        bounds = torch.zeros(2, S, dtype=torch.int32) if name == "packed" else None
        with launches_compile(sm, whole=sm >= 90) as compiled:
            o, lse = window_triton.forward(q, k, v, 512, 0.1, bounds)
            window_triton.backward(q, k, v, o, lse, torch.empty_like(o), None, 512, 0.1, bounds)
        yield from ({"shape": name, "sm": sm, "limit": TARGETS[sm][0] * 1024, **resources(kernel, sm)} for kernel in compiled)


LOSSES = {  # of an indexer; name: B, S, S_kv, G, h, Dk, Di, n, block, dtype; n = 0: over all visible keys
    "m3": (1, 2048, 2048, 4, 16, 128, 128, 16, 128, torch.bfloat16),
    "m3-warm-up": (1, 2048, 2048, 4, 16, 128, 128, 0, 0, torch.bfloat16),
    "ranges-of-many-tiles": (1, 4096, 8192, 2, 4, 64, 64, 2, None, torch.float16),
    "h12-256-small": (1, 2048, 2048, 2, 12, 256, 128, 512, 4, torch.bfloat16),
    "h3-192": (1, 2048, 2048, 2, 3, 192, 256, 8, 64, torch.bfloat16),
    "h1-256-fp32": (1, 2048, 2048, 2, 1, 256, 256, 8, 64, torch.float32),
}


def loss_kernels(targets: str, *names: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of an indexer's loss and its gradients."""
    for sm, name in itertools.product(map(int, targets.split(",")), names or LOSSES):
        B, S, S_kv, G, h, Dk, Di, n, block, dtype = LOSSES[name]
        device = DeviceInfo(kind="cuda", name="target", sm=sm, sm_count=TARGETS[sm][1], shared_memory=TARGETS[sm][0] * 1024)
        q, k = torch.empty(B, S, G, h, Dk, dtype=dtype), torch.empty(B, G, S_kv, Dk, dtype=dtype)
        iq, ik = torch.empty(B, S, G, Di, dtype=dtype), torch.empty(B, 1, S_kv, Di, dtype=dtype)
        selection = Selection(torch.zeros(B, S, G, n, 2, dtype=torch.int32), block) if n else None
        call = IndexLossCall(q, k, torch.empty(B, S, G, h), iq, ik, selection, None, 0.1, 0.1, settings_for(device), device)
        with launches_compile(sm) as compiled:
            loss_triton.forward(call, True)
        yield from ({"shape": name, "sm": sm, "limit": TARGETS[sm][0] * 1024, **resources(kernel, sm)} for kernel in compiled)


LIKE = 80  # AMD has no TMA: the kernel configs of SM 8.0 load by pointer
LDS = {"gfx942": 64 << 10, "gfx950": 160 << 10}  # bytes of shared memory per workgroup (AMD's CDNA 3 and CDNA 4 ISA documents)


def hip_kernels(arch: str, *asked: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of forward passes on an AMD GPU: backend, shape, backend, shape."""
    for backend, shape in zip(asked[::2], asked[1::2], strict=True):
        call = (paged_call if shape in PAGED else target_call)(shape, LIKE)
        with launches_compile(arch) as compiled:
            registry.load(backend).forward(call)
        for kernel in compiled:
            facts = {"kernel": kernel.metadata.name, "shared": kernel.metadata.shared, "limit": LDS[arch]}
            yield {"backend": backend, "shape": shape, **facts, "hsaco": len(kernel.asm["hsaco"])}


KINDS = {
    "choose": choose_kernels, "cache": cache_kernels, "gate": gate_kernels, "window": window_kernels, "loss": loss_kernels,
    "hip": hip_kernels,
}  # fmt: skip
# Targets and names that `__main__` takes; a shape may begin with ONE_GROUP.
WORDS = {
    *map(str, TARGETS), *KINDS, *SHAPES, *PAGED, *CHOICES, *POOLS, *FEW, *PACKED, *CHOICES_OF_PAGES, *NEW_TOKENS, *WINDOWS, *LOSSES,
    *LDS, MOST_BLOCKS, "--shared", *(spec.name for spec in SPECS),
}  # fmt: skip
# Line numbers cost time and change no instruction.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1", "TRITON_DISABLE_LINE_INFO": "1"}


def compiled_apart(*arguments: str) -> list[dict[str, Any]]:
    """Run this file in a process of its own, because the tests interpret Triton's kernels, and return the kernels that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | ENVIRONMENT
    run = subprocess.run([sys.executable, __file__, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


if __name__ == "__main__":
    unknown = {part.removeprefix(ONE_GROUP) for word in sys.argv[1:] for part in word.split(",")} - WORDS
    if unknown or len(sys.argv) == 1:
        sys.exit(f"{__doc__}\nunknown: {', '.join(sorted(unknown)) or 'no target'}; names of shapes: {', '.join(SHAPES | PAGED)}")
    kind, *words = sys.argv[1:]
    for line in KINDS[kind](*words) if kind in KINDS else attend_kernels(kind, *words):
        print(json.dumps(line), flush=True)
