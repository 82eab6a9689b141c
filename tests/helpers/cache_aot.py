"""Compile the kernels of a cache's new tokens for a GPU that is not here, and print a JSON line per kernel; as tests/helpers/aot.py.

python tests/helpers/cache_aot.py 90 SHAPE...
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from nsa_sel.backends._triton import cache
from tests.helpers.aot import TARGETS, launches_compile, resources

SHAPES = {  # name: sequences with a new token, D, dtype
    "one": (1, 128, torch.bfloat16),
    "many": (64, 128, torch.bfloat16),
    "many-fp32": (64, 128, torch.float32),
}
G, PAGE, BLOCK, STRIDE = 4, 64, 32, 16


def compile_shape(name: str, sm: int) -> list[dict[str, Any]]:
    """Appending, and both layers of the MLP."""
    B, D, dtype = SHAPES[name]
    raw, to = torch.empty(4, PAGE, G, D, dtype=dtype), torch.empty(4, PAGE // STRIDE, G, D, dtype=dtype)
    new = torch.empty(B, 1, G, 6 * D, dtype=dtype)[..., :D]
    weights = tuple(torch.empty(*size, dtype=dtype) for size in ((BLOCK, D), (2 * D, BLOCK * D), (2 * D,), (D, 2 * D), (D,)))
    slot, covered, fresh = (
        torch.zeros(B, 1, dtype=torch.int64),
        torch.zeros(B, BLOCK, dtype=torch.int64),
        torch.zeros(B, 2, dtype=torch.int32),
    )
    with launches_compile(sm) as compiled:
        cache.append((new,) * 6, (raw,) * 6, slot, slot)
        cache.compress((raw, raw), (new, new), covered, fresh, slot, (*weights[:4], None), weights, (to, to), STRIDE)
    limit = TARGETS[sm][0] * 1024
    return [{"shape": name, "limit": limit, **resources(kernel, sm)} for kernel in compiled]


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    for shape in names:
        for line in compile_shape(shape, int(target)):
            print(json.dumps(line), flush=True)
