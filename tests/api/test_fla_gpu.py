"""`patch_fla` on a GPU: fla's layer in bfloat16 beside fla's plain functions in float32, and what runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from nsa_sel import decisions
from nsa_sel.compat import patch_fla
from tests.api.test_fla import reference

pytestmark = pytest.mark.gpu


def results(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """o and the gradients of x and all weights, in float32."""
    weights = [x, *(weight for weight in layer.parameters() if weight.requires_grad)]
    o = layer(x)[0]
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [found.float() for found in (o, *torch.autograd.grad(o, weights, do))]


def test_flas_layer_in_bfloat16_is_near_its_plain_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("fla.layers.nsa", reason="pip install flash-linear-attention")
    torch.manual_seed(0)
    sizes = {"num_heads": 32, "num_kv_heads": 2, "head_dim": 64, "block_size": 64, "block_counts": 4, "window_size": 100, "layer_idx": 0}
    exact = module.NativeSparseAttention(256, **sizes).cuda()
    layer = copy.deepcopy(exact).bfloat16()
    x = torch.randn(1, 700, 256, device="cuda").bfloat16()
    monkeypatch.setattr(module, "parallel_nsa", reference)
    wanted = results(exact, x.float().requires_grad_())
    undo = patch_fla()
    try:
        mine = results(layer, x.clone().requires_grad_())
        ran = [str(decision.forward) for decision in list(decisions())[-2:]]
    finally:
        undo()
    assert ran[0] in ("choose-cuda", "choose-triton")
    assert ran[1] not in ("sdpa-packed", "numba")
    # Where two blocks' scores are level up to rounding, rows may choose the other one: few do, and they differ in one block of four.
    rows = (mine[0] - wanted[0]).flatten(0, -2).norm(dim=-1) / wanted[0].flatten(0, -2).norm(dim=-1)
    assert float(rows.quantile(0.9)) < 0.02
    for got, exactly in zip(mine[1:], wanted[1:], strict=True):
        assert (got - exactly).norm() < 0.05 * exactly.norm()
