"""Autograd through every backend that runs on the CPU: gradcheck in float64, AMP, training, and what autograd must not keep."""

from __future__ import annotations

import pytest
import torch

import nsa_sel
from nsa_sel.selection import Selection
from tests.cases import make_blocks, make_qkv, make_spans
from tests.parity import attend

BACKENDS = ("sdpa-packed", "numba", "triton-group", "triton-token")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("blocks", [True, False])
def test_gradcheck(backend: str, blocks: bool) -> None:
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=8, Dv=16, S_kv=7, dtype=torch.float64, requires_grad=True)
    selection = make_blocks(1, 3, 1, 7, 2, 4) if blocks else Selection.from_ranges(make_spans("few", 1, 3, 1, 7, 4))
    assert torch.autograd.gradcheck(lambda *inputs: attend(backend, *inputs, selection), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("backend", ["sdpa-packed", "numba"])
def test_amp_training_stays_with_float32(backend: str) -> None:
    losses = {}
    for enabled in (False, True):
        torch.manual_seed(0)
        project = torch.nn.Linear(16, 3 * 16, bias=False)
        optimizer = torch.optim.SGD(project.parameters(), lr=0.5)
        x, target = torch.randn(1, 24, 1, 16), torch.randn(1, 24, 1, 1, 16)
        selection = make_blocks(1, 24, 1, 24, 2, 8)
        for _ in range(5):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                q, k, v = project(x).chunk(3, -1)
                o = nsa_sel.selection_attention(q.unsqueeze(3), k.transpose(1, 2), v.transpose(1, 2), selection, backend=backend)
            assert o.dtype == (torch.bfloat16 if enabled else torch.float32)
            loss = (o.float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[enabled] = float(loss.detach())
    assert losses[True] == pytest.approx(losses[False], rel=0.02)


def test_autocast_casts_float32_inputs() -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nsa_sel.selection_attention(q, k, v, make_blocks(1, 4, 1, 4, 1, 4)).dtype == torch.bfloat16


def test_backward_uses_the_backend_pinned_at_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=8, requires_grad=True)
    with nsa_sel.use_backend("numba"):
        o = nsa_sel.selection_attention(q, k, v, make_blocks(1, 4, 1, 4, 1, 4))
    assert nsa_sel.decisions()[-1].backward == "numba"
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")
    from nsa_sel.backends import sdpa_packed

    monkeypatch.setattr(sdpa_packed, "backward", lambda *_: pytest.fail("the decision of the forward pass names numba"))
    o.sum().backward()


def test_inputs_written_after_forward_are_noticed() -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=8, requires_grad=True)
    o = nsa_sel.selection_attention(q, k, v, make_blocks(1, 4, 1, 4, 1, 4))
    with torch.no_grad():
        k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_only_the_wanted_gradients() -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=8)
    v.requires_grad_()
    nsa_sel.selection_attention(q, k, v, make_blocks(1, 4, 1, 4, 1, 4)).sum().backward()
    assert q.grad is None
    assert v.grad is not None
