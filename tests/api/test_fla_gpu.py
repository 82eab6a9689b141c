"""flash-linear-attention's own kernels beside `patch_fla` on a GPU, in its layer: outputs, gradients, and what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel import decisions
from nsa_sel.compat import parallel_nsa, patch_fla

pytestmark = pytest.mark.gpu


@pytest.fixture
def layers() -> Any:
    """fla.layers.nsa, as it is."""
    return pytest.importorskip("fla.layers.nsa", reason="pip install flash-linear-attention")


def results(layer: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """o and the gradients of x and all weights, in float32."""
    weights = [x, *(weight for weight in layer.parameters() if weight.requires_grad)]
    o = layer(x)[0]
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    return [found.float() for found in (o, *torch.autograd.grad(o, weights, do))]


def test_flas_layer_gives_what_its_own_kernels_give(layers: Any) -> None:
    torch.manual_seed(0)
    sizes = {"num_heads": 32, "num_kv_heads": 2, "head_dim": 64, "block_size": 64, "block_counts": 16, "window_size": 0, "layer_idx": 0}
    layer = layers.NativeSparseAttention(256, **sizes).cuda().bfloat16()
    x = torch.randn(1, 1500, 256, device="cuda", dtype=torch.bfloat16).requires_grad_()
    own = results(layer, x)
    undo = patch_fla()
    try:
        before = len(decisions())
        mine = results(layer, x)
        ran = [str(decision.forward) for decision in list(decisions())[before:]]
    finally:
        undo()
    assert layers.parallel_nsa is not parallel_nsa
    assert len(ran) == 2
    assert ran[0].startswith("choose-")
    assert ran[0] != "choose-torch"
    assert ran[1] not in ("sdpa-packed", "numba")
    # A block whose score is level with another's up to rounding may be the other: few rows differ in a block.
    for name, got, wanted in zip(("o", "dx"), mine, own, strict=False):
        differ = (got - wanted).flatten(0, -2).norm(dim=-1) > 0.02 * wanted.flatten(0, -2).norm(dim=-1).mean()
        assert differ.float().mean() < 0.05, name
    for got, wanted in zip(mine[2:], own[2:], strict=True):
        assert (got - wanted).norm() < 0.05 * wanted.norm()
