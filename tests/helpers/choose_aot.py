"""Compile the kernels that choosing would launch for a GPU that is not here, and print a JSON line per kernel.

    python tests/helpers/choose_aot.py 90 SHAPE...

As tests/helpers/aot.py: a process without TRITON_INTERPRET, CPU tensors, the launch replaced by compilation.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton

from nsa_sel.backends import choose_triton
from nsa_sel.core.choose_call import NSA_POOL, Pool, Rule
from tests.helpers.aot import TARGETS, TargetDriver, resources
from tests.helpers.choose_cases import make_choose_call

SHAPES = {  # name: B, S, S_kv, G, h, Dk, Dv, rule, dtype
    "h16": (1, 8192, 8192, 4, 16, 128, 128, Rule(), torch.bfloat16),
    "h6-192-128": (1, 4096, 4096, 2, 6, 192, 128, Rule(), torch.bfloat16),
    "h3-fp32": (1, 2048, 2048, 2, 3, 64, 64, Rule(block_size=48), torch.float32),
    "h12-256": (1, 1024, 4096, 2, 12, 256, 256, Rule(), torch.bfloat16),
    "positions": (2, 1024, 4096, 4, 4, 64, 64, Rule(), torch.float16),
}

POOLS = {  # choices without attention; name: shape as above, pool
    "msa": ((1, 8192, 8192, 4, 1, 128, 128, Rule(1, 1, 128), torch.bfloat16), Pool(False, False, True)),
    "moba": ((1, 8192, 8192, 16, 1, 128, 128, Rule(512, 512, 512), torch.bfloat16), Pool(False, False, True)),
    "infllm": ((1, 8192, 8192, 2, 16, 128, 128, Rule(), torch.bfloat16), Pool(True, False, True)),
    "max-256": ((1, 1024, 4096, 2, 12, 256, 256, Rule(), torch.float16), Pool(False, True, True)),
    "sums-fp32": ((1, 1024, 4096, 2, 3, 64, 64, Rule(1, 1, 48), torch.float32), Pool(False, False, False)),
}


def compile_shape(name: str, sm: int) -> list[dict[str, Any]]:
    (*shape, dtype), pool = POOLS[name] if name in POOLS else (SHAPES[name], NSA_POOL)
    call = make_choose_call(tuple(shape), dtype, pool=pool)
    call.q_pos = torch.zeros(call.q.shape[:2], dtype=torch.int64) if name == "positions" else None
    compiled: list[Any] = []
    triton.runtime.driver.set_active(TargetDriver(sm))
    launch = triton.runtime.jit.KernelInterface.__getitem__
    triton.runtime.jit.KernelInterface.__getitem__ = lambda kernel, grid: (
        lambda *args, **options: compiled.append(kernel.run(*args, grid=grid, warmup=True, **options))
    )
    try:
        if name in POOLS:
            choose_triton.best_blocks(call, choose_triton.log_sum_exp(call) if pool.softmax else None)
        else:
            o, lse, _ = choose_triton.forward(call)
            choose_triton.backward(call, o, lse, torch.empty_like(o), None)
    finally:
        triton.runtime.jit.KernelInterface.__getitem__ = launch
    return [{"shape": name, "sm": sm, "limit": TARGETS[sm][0] * 1024, **resources(kernel, sm)} for kernel in compiled]


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    for shape_name in names:
        for line in compile_shape(shape_name, int(target)):
            print(json.dumps(line), flush=True)
