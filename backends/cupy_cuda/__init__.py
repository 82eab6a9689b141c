"""cupy-cuda: CUDA C++ kernels, compiled at run time by NVRTC through CuPy, on torch's stream and torch's memory.

rows.py      forward, one block a query row (forward_rows.cu, combine.cu)
gradients.py dq by rows (dq_rows.cu); dk and dv by the lists of KV tiles (dkdv_tiles.cu, sum_parts.cu)
lists.py     which rows chose a KV tile (rank.cu, place.cu)
blocks.py    Hopper's own forward of many rows that share no keys, as of a batch that decodes (forward_blocks.cu)
tiles.py     Hopper's own, too: forward and dq by tiles of adjacent tokens (union_of.cu, forward_tiles.cu, dq_tiles.cu), dk and dv by the
             lists (dkdv_groups.cu)
compiler.py, launch.py  from a file to machine code to a launch; tensor_map.py for bulk copies
CuPy is imported when a kernel is first compiled or loaded.
"""

from __future__ import annotations

from nsa_sel.backends.cupy_cuda.gradients import backward
from nsa_sel.backends.cupy_cuda.rows import forward, loaded_keys

__all__ = ["backward", "forward", "loaded_keys"]
