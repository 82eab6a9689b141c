"""A small matrix of forced calls, forward and backward, for compute-sanitizer:

compute-sanitizer --tool memcheck --error-exitcode 86 python tests/helpers/sanitize.py cupy-cuda 32 64

The numbers are block sizes. Blocks of 64 run Hopper's kernels, whose TMA loads only memcheck supports.
"""

from __future__ import annotations

import sys

import torch

import nsa_sel
from nsa_sel.selection import Selection
from tests.helpers.cases import make_blocks, make_grads, make_qkv, make_spans

SIZES = (  # B, S, G, h, Dk, Dv, S_kv
    (2, 40, 2, 3, 16, 24, 150),
    (1, 40, 1, 16, 128, 128, 300),
    (1, 20, 1, 40, 64, 64, 150),
    (1, 10, 1, 4, 256, 192, 150),
    (1, 1, 2, 16, 128, 128, 600),
    (150, 1, 2, 16, 128, 128, 200),  # more rows than CTAs: each has several
)


def run(backend: str, blocks: list[int]) -> int:
    """How many calls ran, forward and backward."""
    calls = 0
    for dtype in (torch.float16, torch.bfloat16):
        for B, S, G, h, Dk, Dv, S_kv in SIZES:
            q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=dtype, device="cuda", requires_grad=True)
            spans = make_spans("mixed", B, S, G, S_kv, 77, device="cuda")
            cached = k.transpose(1, 2).contiguous().transpose(1, 2)
            whole = [(k, make_blocks(B, S, G, S_kv, min(3, S_kv // block), block, device="cuda")) for block in blocks]
            for keys, selection in (*whole, (cached, Selection.from_ranges(spans))):
                o, lse = nsa_sel.selection_attention(q, keys, v, selection, return_lse=True, backend=backend)
                torch.autograd.grad((o, lse), (q, k, v), make_grads(q, v))
                calls += 1
    torch.cuda.synchronize()
    return calls


if __name__ == "__main__":
    print(run(sys.argv[1], list(map(int, sys.argv[2:]))), "calls")
