"""Compile the kernels that choosing would launch for a GPU that is not here, and print a JSON line per kernel.

    python tests/helpers/choose_aot.py 90 SHAPE... [80 SHAPE...]

As tests/helpers/aot.py: a process without TRITON_INTERPRET, CPU tensors, the launch replaced by compilation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton

from nsa_sel.backends import choose_triton
from nsa_sel.backends._triton import ranges
from nsa_sel.core.arguments import Bounds
from nsa_sel.core.call import NSA_POOL, PagedKeys, Pool, Rule, Sequences
from tests.helpers.aot import TARGETS, launches_compile, resources
from tests.helpers.choose_cases import make_choose_call

SHAPES = {  # name: B, S, S_kv, G, h, Dk, Dv, rule, dtype
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
    "sums-fp32": ((1, 1024, 4096, 2, 3, 64, 64, Rule(1, 1, 48), torch.float32), Pool(False, False, False)),
}


PAGED = {  # new tokens over compressed keys in pages; name: S, keys, h, Dk, Dv, dtype
    "pages": (1, 4096, 16, 128, 128, torch.bfloat16),
    "pages-drafts": (4, 4096, 16, 128, 128, torch.bfloat16),
    "pages-256": (1, 4096, 12, 256, 256, torch.bfloat16),
}


def compile_shape(name: str, sm: int) -> list[dict[str, Any]]:
    if name == MOST_BLOCKS:
        return compile_top_n(sm)
    if name in PAGED:
        return compile_paged(name, sm)
    (*shape, dtype), pool = POOLS[name] if name in POOLS else (SHAPES[name], NSA_POOL)
    call = make_choose_call(tuple(shape), dtype, pool=pool)
    call.q_pos = torch.zeros(call.q.shape[:2], dtype=torch.int64) if name == "positions" else None
    if name == "packed":
        call.sequences = Sequences.of(Bounds.of("cu_seqlens", [0, 5000, 8000], call.q.shape[1], call.q), call.rule, call.q)
    with launches_compile(sm) as compiled:
        if name in POOLS:
            choose_triton.best_blocks(call, choose_triton.log_sum_exp(call) if pool.softmax else None)
        else:
            o, lse, _ = choose_triton.forward(call)
            choose_triton.backward(call, o, lse, torch.empty_like(o), None)
    return [facts(name, kernel, sm) for kernel in compiled]


def facts(name: str, kernel: Any, sm: int) -> dict[str, Any]:
    used = resources(kernel, sm)
    looped = spills_in_loops(kernel) if used["spilled"] else 0  # disassembling takes as long as assembling
    return {"shape": name, "sm": sm, "limit": TARGETS[sm][0] * 1024, **used, "looped": looped}


def compile_paged(name: str, sm: int) -> list[dict[str, Any]]:
    """Four compressed keys a page; parts are joined."""
    S, keys, h, Dk, Dv, dtype = PAGED[name]
    call = make_choose_call((1, S, 64, 1, h, Dk, Dv, Rule()), dtype, q_pos=torch.zeros(1, S, dtype=torch.int64))
    call.k, call.v = (torch.randn(64, 4, 1, D, dtype=dtype).transpose(1, 2) for D in (Dk, Dv))
    call.blocks, call.pages = keys // 64, PagedKeys(torch.zeros(1, keys // 64, dtype=torch.int32), 1)
    with launches_compile(sm) as compiled:
        choose_triton.paged(call)
    return [facts(name, kernel, sm) for kernel in compiled]


def compile_top_n(sm: int) -> list[dict[str, Any]]:
    """The kernel for as many blocks as it takes."""
    scores, best = torch.zeros(1, 3, 2, ranges.MOST_BLOCKS), torch.zeros(1, 3, 2, 16, 2, dtype=torch.int32)
    with launches_compile(sm) as compiled:
        ranges.top_n(scores, best, 64, 1, 2, 0)
    return [facts(MOST_BLOCKS, kernel, sm) for kernel in compiled]


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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name.isdigit():
            target = int(name)
            continue
        for line in compile_shape(name, target):
            print(json.dumps(line), flush=True)
