"""The lanes of the contract table: every backend on every device of the tests, from what the backend declares (backends/specs.py).

A device is one of
    cpu
    gathered, buckets, key-tiles  the paths of packed SDPA on a CPU; buckets is that of a GPU
    interpreter                   Triton's kernels on CPU tensors
    emulated                      CUDA kernels that are compiled for a CPU; calls are told of a GPU of SM 9.0
    cuda
What a backend does not take (ranges, blocks, head dims, dtypes, caches) is data in its `Limits` and `TileKernels`: a lane has no shape of
that kind. There are no other exceptions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from nsa_sel.core import registry
from nsa_sel.core.backend import Backend, Limits
from nsa_sel.testing import Shape
from tests.helpers.cuda import BACKWARDS, EAGER, GPU, emulated, needs_compiler
from tests.helpers.gpus import HOPPER, SM, needs

SLOW = ("interpreter", "emulated")
DEFAULT_DTYPE = {"emulated": "float16", "cuda": "bfloat16"}  # of others float32
PATHS = ("gathered", "buckets", "key-tiles")


class Lane(NamedTuple):
    """A backend on a device."""

    backend: Backend
    device: str

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def limits(self) -> Limits:
        return self.backend.limits

    @property
    def slow(self) -> bool:
        return self.device in SLOW

    @property
    def kind(self) -> str:
        """The device of its limits."""
        return "cuda" if self.device == "emulated" else "cpu" if self.device in PATHS else self.device

    @property
    def place(self) -> str:
        """The torch device of its tensors."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in self.limits.dtypes[self.kind]]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, DEFAULT_DTYPE.get(self.device, "float32"))  # type: ignore[no-any-return]

    def takes(self, shape: Shape) -> bool:
        limits = self.limits
        if (shape.block is None and limits.block_aligned_only) or (shape.block is not None and not limits.takes_block(shape.block)):
            return False
        return all(D % limits.head_dim_multiple == 0 and D <= limits.head_dim_max for D in (shape.Dk, shape.Dv))

    def shapes(self) -> list[Shape]:
        """Return shapes that reach each family of the backend's kernels: rows, tiles, and gathered small blocks."""
        tiles, found = self.backend.tiles, [Shape(3, 16, 24, None), Shape(3, 16, 24, 16), Shape(2, 16, 8, 4)]
        if self.device == "emulated" or (self.slow and self.backend.slow):  # other sizes are compiled anew, or take long and change nothing
            found = [Shape(3, 16, 24, None)]
        if tiles is not None and self.kind != "cpu":
            found += [Shape(3, 64, 128, 8)] * bool(tiles.gathered_blocks) + [Shape(1, 64, 64, 64)] * tiles.one_head
            found += [Shape(4, 64, 64, 64), Shape(4, 64, 64, 128)]
        if self.device == "cuda":
            found += [Shape(12, 256, 256, 4), Shape(16, 192, 128, 64), Shape(16, 128, 128, 128), Shape(1, 128, 128, 512)]
        return [shape for shape in dict.fromkeys(found) if self.takes(shape)]

    def rows(self, shape: Shape) -> int:
        """Return enough rows for several tiles, lists or units, and few where each row is a program of the interpreter."""
        if self.device == "cuda":
            return 150
        if self.kind == "cpu":
            return 40
        if self.device == "emulated":
            return 18 if shape.Dk < 64 else 150 if shape.h == 1 else 60
        return 8 if self.backend.shares == "rows" else 20

    def open(self, patch: pytest.MonkeyPatch) -> None:
        """Prepare the process: emulated kernels, with the last threads first and copies at once, on a GPU that calls are told of."""
        if self.device in PATHS:
            self._take_path(patch)
        if self.device != "emulated":
            return
        from nsa_sel.backends.cupy_cuda import cuda_block
        from nsa_sel.backends.launcher import replay

        emulated(patch, BACKWARDS | EAGER)
        for module in ("attention", "core.packed", "core.decide"):
            patch.setattr(f"nsa_sel.{module}.device_info", lambda device: GPU)
        patch.setattr(registry, "missing", lambda name: ())
        patch.setattr(replay, "TRIES", 0)  # nothing is replayed: tests/unit/backends/test_launcher.py emulates the driver for that
        patch.setattr(cuda_block, "_streams", lambda like, count: [None] * count)

    def _take_path(self, patch: pytest.MonkeyPatch) -> None:
        from nsa_sel.backends._sdpa import attend, dense, gathered, key_tiles

        patch.setattr(dense, "tiles_of", lambda call, start, end: None)
        if self.device == "buckets":
            patch.setattr(attend, "may_read", lambda call: False)
            patch.setattr(gathered, "buckets", lambda call, *_: gathered.static_buckets(call))
        finite = lambda call, *_: self.device == "key-tiles" and all(bool(x.isfinite().all()) for x in (call.k, call.v))  # noqa: E731
        patch.setattr(key_tiles, "pays", finite)

    def marks(self) -> list[pytest.MarkDecorator]:
        found = [pytest.mark.slow] if self.slow else []
        if self.device == "cuda":
            older = SM < self.limits.min_sm or (self.limits.tiles_only and not HOPPER)
            found += [pytest.mark.gpu, needs(self.name), pytest.mark.skipif(older, reason="compute-capability: no kernels for this GPU")]
        return [*found, needs_compiler] if self.device == "emulated" else found


def lanes(*devices: str, kind: Any = "attend") -> list[Lane]:
    found = []
    for device in devices:
        for backend in registry.backends(kind).values():
            if device == "emulated" or device in PATHS:
                if backend.framework == "cupy" if device == "emulated" else backend.fallback:
                    found.append(Lane(backend, device))
            elif device in backend.limits.dtypes:
                found.append(Lane(backend, device))
    return found


def parameters(cells: list[tuple[Lane, Any]]) -> list[Any]:
    """Return pytest's parameters of (lane, rest) cells, with the marks of the lane and ids such as triton-tile-interpreter-h3-16x24-16."""
    return [
        pytest.param(lane, what, marks=lane.marks(), id=f"{lane.name}-{lane.device}-{getattr(what, 'name', what)}") for lane, what in cells
    ]
