"""cupy-cuda: CUDA C++ kernels, compiled at run time by NVRTC through CuPy, on torch's stream and torch's memory.

rows.py      forward, one block a query row (forward_rows.cu, combine.cu)
tiles.py     forward on Hopper, tiles of adjacent tokens (union_of.cu, forward_tiles.cu)
gradients.py dq by rows (dq_rows.cu); dk and dv by KV tiles (entries.cu, dkdv_tiles.cu, sum_parts.cu)
compiler.py, launch.py  from a file to machine code to a launch; tensor_map.py for bulk copies
CuPy is imported when a kernel is first compiled or loaded.
"""

from __future__ import annotations

from nsa_sel.backends.cupy_cuda.gradients import backward
from nsa_sel.backends.cupy_cuda.rows import forward

__all__ = ["backward", "forward"]
