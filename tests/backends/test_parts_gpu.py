"""Passes over tiles in parts of their rows on a GPU: the bits of one pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.backends import _slices
from nsa_sel.core import registry
from nsa_sel.core.reset import reset
from nsa_sel.selection import Selection
from tests.helpers.cases import make_grads, make_qkv
from tests.helpers.parity import attend
from tests.helpers.poison import new_memory_is_nan

pytestmark = pytest.mark.gpu

needs_cuda = pytest.mark.skipif(bool(registry.missing("cupy-cuda")), reason="; ".join(map(str, registry.missing("cupy-cuda"))))


@pytest.mark.parametrize(
    ("backend", "h", "D", "block"),
    [
        pytest.param("cupy-cuda", 12, 256, 4, marks=needs_cuda),  # gathered
        pytest.param("cupy-cuda", 4, 128, 64, marks=needs_cuda),
        ("triton-tile", 12, 128, 4),
        ("triton-tile", 4, 128, 64),
    ],
)
def test_parts_give_the_bits_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path], backend: str, h: int, D: int, block: int
) -> None:
    """Two parts or more of each pass that has a plan."""
    S = 3090
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=D, S_kv=S, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    do, _ = make_grads(q, v)
    scores = torch.rand(1, S, 2, -(-S // block), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    ranges = Selection.from_scores(scores, 8, block, S_kv=S).ranges
    parts: list[int] = []
    cut = _slices.slices

    def recorded(*of: Any) -> Any:
        for part, at in cut(*of):
            parts.append(part.q.shape[1])
            yield part, at

    monkeypatch.setattr(_slices, "slices", recorded)

    def results() -> list[Tensor]:
        with new_memory_is_nan():
            o, lse = attend(backend, q, k, v, Selection(ranges, block, disjoint=True))
            dq = torch.autograd.grad(o, q, do)[0]
        return [o, lse, dq]

    whole = results()
    assert not parts
    configure("provenance: a test\nruntime: {workspace_bytes: 32768}\n")
    monkeypatch.setattr(_slices, "LEAST_ROWS", 256)
    reset()
    again = results()
    passes, rest = divmod(sum(parts), S)
    assert 0 == rest < passes < len(parts)
    assert all(map(torch.equal, whole, again))
