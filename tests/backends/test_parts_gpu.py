"""Passes over tiles in parts of their rows on a GPU: the bits of one pass. dk and dv of one (batch entry, group) after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.backends import _slices
from nsa_sel.backends.cupy_cuda import sm90, token_order
from nsa_sel.core.warm import reset
from nsa_sel.selection import Selection
from tests.helpers.cases import make_grads, make_qkv
from tests.helpers.gpus import HOPPER, needs, needs_hopper
from tests.helpers.parity import attend
from tests.helpers.poison import new_memory_is_nan

pytestmark = pytest.mark.gpu
needs_cuda = needs("cupy-cuda")


@pytest.mark.parametrize(
    ("backend", "h", "D", "block"),
    [
        pytest.param("cupy-cuda", 12, 256, 4, marks=needs_cuda),  # gathered
        pytest.param("cupy-cuda", 4, 128, 64, marks=needs_cuda),  # tokens that selected alike: parts are whole stretches
        ("triton-tile", 12, 128, 4),
        ("triton-tile", 4, 128, 64),
    ],
)
def test_parts_give_the_bits_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path], started: list[str], backend: str, h: int, D: int, block: int
) -> None:
    """Two parts or more of each pass that has a plan, forward and dq."""
    monkeypatch.setattr(token_order, "LEAST_TOKENS", 1)
    monkeypatch.setattr(token_order, "LEAST_ROWS", 1)
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
    started.clear()
    again = results()
    assert sum(parts) == 2 * S
    assert len(parts) > 2
    assert all(map(torch.equal, whole, again))
    if backend == "cupy-cuda" and HOPPER:
        kernels = ("forward_gather.cu", "dq_gather.cu") if D == 256 else ("forward_tiles.cu", "dq_tiles.cu")
        counts = [started.count(name) for name in kernels]
        assert min(counts) > 1
        assert sum(counts) == len(parts)  # forward tiles may have more tokens than those of dq


@needs_cuda
@needs_hopper
def test_pairs_whose_lists_do_not_fit_together_have_the_bits_of_their_own_calls(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path]
) -> None:
    """QSA's shape: the lists of all four (batch entry, group) are of 1.6 MB, those of one of 0.4 MB."""
    configure("provenance: a test\nruntime: {workspace_bytes: 1048576}\n")
    reset()
    B, S, G, block = 2, 2048, 2, 4
    q, k, v = make_qkv(B=B, S=S, G=G, h=12, Dk=256, S_kv=S, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    do, _ = make_grads(q, v)
    scores = torch.rand(B, S, G, S // block, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    ranges = Selection.from_scores(scores, 60, block, S_kv=S).ranges
    pairs, by_pairs = [], sm90._by_pairs
    monkeypatch.setattr(sm90, "_by_pairs", lambda call, *rest: (pairs.append(call.q.shape[:3]), by_pairs(call, *rest))[1])

    def gradients(b: slice, g: slice) -> tuple[Tensor, ...]:
        own = q[b, :, g], k[b, g], v[b, g]
        with new_memory_is_nan():
            o, _ = attend("cupy-cuda", *own, Selection(ranges[b, :, g].contiguous(), block, disjoint=True))
            return torch.autograd.grad(o, own, do[b, :, g])

    found, again = (gradients(slice(B), slice(G)) for _ in range(2))
    assert pairs == [(B, S, G)] * 2
    assert all(map(torch.equal, found, again))
    for b, g in itertools.product(range(B), range(G)):
        at = slice(b, b + 1), slice(g, g + 1)
        dq, dk, dv = gradients(*at)
        assert torch.equal(dq, found[0][at[0], :, at[1]])
        assert torch.equal(dk, found[1][at])
        assert torch.equal(dv, found[2][at])
    assert len(pairs) == 2


@needs_cuda
@needs_hopper
def test_lists_of_large_blocks_fit_the_workspace(started: list[str], configure: Callable[[str], Path]) -> None:
    """MoBA's shape: lists of 0.6 MB, which for every 64 keys would be 4.7 MB."""
    S, G, block = 4096, 4, 512
    q, k, v = make_qkv(B=1, S=S, G=G, h=1, Dk=128, S_kv=S, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))
    do, _ = make_grads(q, v)
    scores = torch.rand(1, S, G, S // block, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    selection = Selection.from_scores(scores, 3, block, S_kv=S)

    def gradients() -> tuple[Tensor, ...]:
        reset()
        o, _ = attend("cuda-block", q, k, v, selection)
        return torch.autograd.grad(o, (q, k, v), do)

    expected = gradients()
    started.clear()
    configure("provenance: a test\nruntime: {workspace_bytes: 4194304}\n")
    with new_memory_is_nan():
        found = gradients()
    assert started.count("dkdv_groups.cu") == 1
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
