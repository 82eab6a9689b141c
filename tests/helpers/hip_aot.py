"""Compile Triton kernels for AMD GPUs that are not here, and print a JSON line per kernel.

    python tests/helpers/hip_aot.py gfx942 triton-group paged-16 [BACKEND SHAPE...]

As tests/helpers/aot.py, forward alone. The device facts are those of SM 8.0, whose kernel configs load by pointer: AMD has no TMA.
"""

from __future__ import annotations

import json
import sys

from nsa_sel.core import registry
from tests.helpers.aot import PAGED, launches_compile, paged_call, target_call

LIKE = 80
LDS = {"gfx942": 64 << 10, "gfx950": 160 << 10}  # bytes of shared memory per workgroup (AMD's CDNA 3 and CDNA 4 ISA documents)


def main(arch: str, *asked: str) -> None:
    for backend, shape in zip(asked[::2], asked[1::2], strict=True):
        call = (paged_call if shape in PAGED else target_call)(shape, LIKE)
        with launches_compile(arch) as compiled:
            registry.load(backend).forward(call)
        for kernel in compiled:
            found = {"kernel": kernel.metadata.name, "shared": kernel.metadata.shared, "limit": LDS[arch]}
            print(json.dumps({"backend": backend, "shape": shape, **found, "hsaco": len(kernel.asm["hsaco"])}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
