"""Compile the kernels of the gated sum for a GPU that is not here, and print a JSON line per kernel; as tests/helpers/aot.py.

python tests/helpers/gate_aot.py 90 [SM...]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from nsa_sel.backends._triton import elementwise
from tests.helpers.aot import TARGETS, launches_compile, resources


def compile_kernels(sm: int, Dv: int = 128, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """The sum; what all branches get and give with lse, and with gate * do, and one branch alone."""
    elementwise.INTERPRETED_TILE = elementwise.TILE
    do, gates = torch.empty(1, 4096, 4, 16, Dv, dtype=dtype), torch.empty(1, 4096, 4, 16, 3, dtype=dtype)
    lse = torch.empty(do.shape[:4])
    with launches_compile(sm) as compiled:
        elementwise.write_sum([do] * 3, gates, do)
        elementwise.raise_lse([lse] * 3, gates)
        elementwise.write_deltas([lse] * 3, gates)
        elementwise.backward(do, [do] * 3, gates, gates, True)
        elementwise.backward(do, [None, do, None], gates, gates, False)
    return [{"Dv": Dv, "sm": sm, "limit": TARGETS[sm][0] * 1024, **resources(kernel, sm)} for kernel in compiled]


if __name__ == "__main__":
    for target in map(int, sys.argv[1:]):
        for line in compile_kernels(target):
            print(json.dumps(line), flush=True)
