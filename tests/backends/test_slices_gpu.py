"""Gradients of K and V by slices of rows on a GPU, where a small workspace asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa_sel.backends._triton import dkdv, slices
from nsa_sel.backends._triton.slices import Slices
from nsa_sel.core.warm import reset
from nsa_sel.selection import Selection
from tests.helpers.cases import make_grads, make_qkv
from tests.helpers.parity import attend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton-group", "triton-tile"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_slices_give_the_gradients_of_one_plan(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path], backend: str, dtype: torch.dtype, most: float
) -> None:
    S, G, n = 8190, 2, 64
    q, k, v = make_qkv(S=S, G=G, h=3, Dk=64, S_kv=8190, dtype=dtype, device="cuda", requires_grad=True)
    do, _ = make_grads(q, v)
    scores = torch.rand(1, S, G, -(-S // 4), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    ranges = Selection.from_scores(scores, n, 4, S_kv=S).ranges
    cuts: list[Slices | None] = []
    monkeypatch.setattr(dkdv, "slices_of", lambda call, width: cuts.append(slices.slices_of(call, width)) or cuts[-1])

    def gradients() -> tuple[Tensor, ...]:
        o, _ = attend(backend, q, k, v, Selection(ranges, 4, disjoint=True))
        return torch.autograd.grad(o, (q, k, v), do)

    whole = gradients()
    configure("provenance: a test\nruntime: {workspace_bytes: 16777216}\n")
    reset()
    first, second = gradients(), gradients()
    assert [cut and cut.rows for cut in cuts] == [None, 1024, 1024]
    for x, a, b in zip(whole, first, second, strict=True):
        assert (x.float() - a.float()).abs().max() <= most * x.float().abs().max()
        assert torch.equal(a, b)
