"""Map the rows of a packed batch over caches to their requests and positions, in one launch.

Grid: one program per ROWS rows, which compares them with the bounds of all requests, BOUNDS at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_sel.backends._triton.kernel import Kernel

ROWS, BOUNDS = 64, 64


@triton.jit
def packed_rows_kernel(cu_seqlens, lengths, rows, stride_cu, stride_lengths, T, R, S_kv, ROWS: tl.constexpr, BOUNDS: tl.constexpr):
    """Store (keys that row i sees, its request) to rows [T,2]; (0, 0) for rows behind the last request."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    r = tl.zeros([ROWS], tl.int32)  # requests that end at or before row i
    for first in range(0, R, BOUNDS):
        bound = first + tl.arange(0, BOUNDS)  # [BOUNDS]
        end = tl.load(cu_seqlens + (bound + 1) * stride_cu, mask=bound < R, other=2**31 - 1)
        r += tl.sum((end[None, :] <= i[:, None]).to(tl.int32), 1)
    exists = (i < T) & (r < R)
    request = tl.where(exists, r, 0)
    end = tl.load(cu_seqlens + (request + 1) * stride_cu, mask=exists, other=0).to(tl.int64)
    length = tl.load(lengths + request * stride_lengths, mask=exists, other=0).to(tl.int64)
    keys = tl.minimum(tl.maximum(length - end + i + 1, 0), S_kv)  # position + 1
    tl.store(rows + 2 * i, tl.where(exists, keys, 0).to(tl.int32), mask=i < T)
    tl.store(rows + 2 * i + 1, request, mask=i < T)


_kernel = Kernel(packed_rows_kernel, ROWS=ROWS, BOUNDS=BOUNDS, num_warps=4)


def packed_rows(cu_seqlens: Tensor, lengths: Tensor, rows: Tensor, S_kv: int) -> None:
    """Fill rows [T,2] int32, contiguous, from cu_seqlens [R+1] and lengths [R]; S_kv: most keys of a request."""
    T, R = len(rows), len(lengths)
    _kernel.launch(-(-T // ROWS), (cu_seqlens, lengths, rows), (cu_seqlens.stride(0), lengths.stride(0), T, R, S_kv))
