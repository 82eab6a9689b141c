"""A row attends to the union of its ranges, by every backend, forward and backward."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

import pytest
import torch

from nsa_sel import Selection, selection_attention, selection_attention_varlen, selection_attention_with_kvcache
from nsa_sel.core.registry import backends
from tests.helpers.cases import assert_forward, make_qkv
from tests.helpers.parity import attend, check_both

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
S, S_KV, BLOCK = 2, 64, 16


def on_devices(names: list[str]) -> Any:
    """Parametrizes device and backend: what runs on a CPU, and on a GPU."""
    on_cpu = [("cpu", name) for name in names if name in ("sdpa-packed", "numba") or (name.startswith("triton") and INTERPRETED)]
    on_gpu = [pytest.param("cuda", name, marks=pytest.mark.gpu) for name in names if name != "numba"]
    return pytest.mark.parametrize(("device", "backend"), [*on_cpu, *on_gpu])


RANGES = {
    "twice": [[0, 16], [0, 16]],
    "overlap": [[3, 20], [10, 30], [12, 14]],
    "unsorted": [[40, 50], [0, 9], [5, 45]],
    "touching and empty": [[8, 16], [9, 9], [16, 20], [0, 8]],
    "past the end": [[60, 99], [50, 63], [-5, 3]],
}
BLOCKS = {"twice": [1, 1], "thrice, apart": [2, 0, 2, -1, 2], "all the same": [3, 3, 3, 3], "own block": [3, 0, 3]}


def tensors(device: str, backend: str) -> tuple[torch.Tensor, ...]:
    """Of 32 bits, but for backends that take 16 alone, on tensor cores."""
    wide, dtype = (16, torch.float32) if "float32" in chain(*backends()[backend].limits.dtypes.values()) else (64, torch.float16)
    return make_qkv(1, S, 1, 3, wide, S_kv=S_KV, dtype=dtype, device=device)


@pytest.mark.parametrize("name", RANGES)
@on_devices([name for name, backend in backends().items() if not backend.limits.block_aligned_only])
def test_ranges_that_overlap_are_their_union(device: str, backend: str, name: str) -> None:
    ranges = torch.tensor(RANGES[name], device=device).expand(1, S, 1, -1, 2).clone()
    check_both(backend, *tensors(device, backend), Selection.from_ranges(ranges))


@pytest.mark.parametrize("name", BLOCKS)
@on_devices(list(backends()))
def test_duplicate_blocks_count_once(device: str, backend: str, name: str) -> None:
    indices = torch.tensor(BLOCKS[name], device=device).expand(1, S, 1, -1).clone()
    check_both(backend, *tensors(device, backend), Selection.from_blocks(indices, BLOCK))


@pytest.mark.parametrize("backend", ["sdpa-packed", "numba"])
def test_packed_cached_and_compiled_calls_use_the_union(backend: str) -> None:
    q, k, v = tensors("cpu", backend)
    selection = Selection.from_blocks(torch.tensor([3, 1, 3]).expand(1, S, 1, 3), BLOCK)
    o, lse = attend(backend, q, k, v, selection)
    assert_forward((o, lse), q, k, v, selection.ranges)
    packed = selection_attention_varlen(q[0], k[0].transpose(0, 1), v[0].transpose(0, 1), selection, [0, S], [0, S_KV], backend=backend)
    torch.testing.assert_close(packed, o[0])
    caches = [x.transpose(1, 2) for x in (k, v)]
    cached = selection_attention_with_kvcache(q, *caches, selection, torch.tensor([S_KV]), backend=backend)
    torch.testing.assert_close(cached, o)
    table = torch.arange(2, dtype=torch.int32).view(1, 2)
    pages = [x.reshape(2, 32, 1, -1) for x in caches]
    paged = selection_attention_with_kvcache(q, *pages, selection, torch.tensor([S_KV]), table, backend=backend)
    torch.testing.assert_close(paged, o)
    compiled = torch.compile(lambda q, k, v, s: selection_attention(q, k, v, s, backend=backend), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, selection), o)
