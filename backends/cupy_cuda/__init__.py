"""cupy-cuda: CUDA C++ kernels, compiled at run time by NVRTC through CuPy, on torch's stream and torch's memory.

forward.py  one block a query row (forward_rows.cu, combine.cu)
backward.py dq by rows (dq_rows.cu); dk and dv by KV tiles (entries.cu, dkdv_tiles.cu, sum_parts.cu)
compiler.py, launch.py  from a file to machine code to a launch; tensor_map.py for bulk copies
CuPy is imported when a kernel is first compiled or loaded.
"""

from __future__ import annotations

from nsa_sel.backends.cupy_cuda.backward import backward
from nsa_sel.backends.cupy_cuda.forward import forward

__all__ = ["backward", "forward"]
