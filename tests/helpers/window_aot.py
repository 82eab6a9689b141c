"""Compile the kernels that sliding windows would launch for a GPU that is not here, and print a JSON line per kernel.

    python tests/helpers/window_aot.py 90 [SHAPE...]         # or several targets: 86,90

As tests/helpers/aot.py: a process without TRITON_INTERPRET, CPU tensors, the launch replaced by compilation.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import torch

from nsa_sel.backends import window_triton
from tests.helpers.aot import TARGETS, launches_compile, resources

SHAPES = {  # name: B, S, S_kv, G, h, Dk, Dv, dtype
    "h16": (1, 8192, 8192, 4, 16, 128, 128, torch.bfloat16),
    "h8-64": (4, 8192, 8192, 2, 8, 64, 64, torch.bfloat16),
    "h6": (1, 4096, 4096, 2, 6, 128, 128, torch.bfloat16),
    "h6-192-128": (1, 4096, 4096, 2, 6, 192, 128, torch.bfloat16),
    "h3-fp32": (1, 2048, 2048, 2, 3, 64, 64, torch.float32),
    "h12-256": (1, 1024, 4096, 2, 12, 256, 256, torch.bfloat16),
    "h1": (1, 4096, 4096, 8, 1, 128, 128, torch.float16),
    "packed": (1, 8192, 8192, 4, 16, 128, 128, torch.bfloat16),
}
WINDOW = 512


def compile_shape(name: str, sm: int) -> list[dict[str, Any]]:
    """Whole on Hopper; elsewhere as far as shared memory is known."""
    B, S, S_kv, G, h, Dk, Dv, dtype = SHAPES[name]
    q, k, v = torch.empty(B, S, G, h, Dk, dtype=dtype), torch.empty(B, G, S_kv, Dk, dtype=dtype), torch.empty(B, G, S_kv, Dv, dtype=dtype)
    bounds = torch.zeros(2, S, dtype=torch.int32) if name == "packed" else None
    with launches_compile(sm, whole=sm >= 90) as compiled:
        o, lse = window_triton.forward(q, k, v, WINDOW, 0.1, bounds)
        window_triton.backward(q, k, v, o, lse, torch.empty_like(o), None, WINDOW, 0.1, bounds)
    return [{"shape": name, "sm": sm, "limit": TARGETS[sm][0] * 1024, **resources(kernel, sm)} for kernel in compiled]


if __name__ == "__main__":
    targets, *names = sys.argv[1:]
    for target, shape_name in itertools.product(map(int, targets.split(",")), names or SHAPES):
        for line in compile_shape(shape_name, target):
            print(json.dumps(line), flush=True)
