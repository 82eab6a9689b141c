"""Autograd through every backend that runs on the CPU: gradcheck in float64, AMP, training, and what autograd must not keep."""

from __future__ import annotations

import pytest
import torch

from nsa_sel import Selection, decisions, selection_attention, use_backend
from tests.helpers.cases import make_blocks, make_qkv, make_spans
from tests.helpers.checks import attend

BACKENDS = ("sdpa-packed", "numba", "triton-group", "triton-token")
WHOLE_BLOCKS = ("triton-tile", "triton-block")


@pytest.mark.parametrize("backend", [*BACKENDS[:3], *WHOLE_BLOCKS, pytest.param("triton-token", marks=pytest.mark.thorough)])  # the slowest
def test_gradcheck_of_each_derivative(backend: str) -> None:
    """Without fast_mode: two rows share a block, of which one sees another up to itself; one row selects nothing. Of each head one column,
    and of the keys those where the blocks meet, since the interpreter takes a tenth of a second for every call."""
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=8, Dv=16, S_kv=18, dtype=torch.float64)
    selection = Selection.from_blocks(torch.tensor([[0, -1], [-1, -1], [0, 1]]).int()[None, :, None], 16)
    keys = torch.tensor([15, 16])

    def outputs(q_part: torch.Tensor, k_part: torch.Tensor, v_part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = q.clone(), k.clone(), v.clone()
        inputs[0][..., :1] = q_part
        inputs[1][:, :, keys, :1] = k_part
        inputs[2][:, :, keys, :1] = v_part
        o, lse = attend(backend, *inputs, selection)
        return o[..., :1], lse[:, ::2]  # of the row that selects nothing it is -inf, a constant

    parts = q[..., :1], k[:, :, keys, :1], v[:, :, keys, :1]
    assert torch.autograd.gradcheck(outputs, tuple(part.clone().requires_grad_() for part in parts), check_undefined_grad=False)


@pytest.mark.parametrize(
    "backend", [*BACKENDS[:2], *(pytest.param(name, marks=pytest.mark.thorough) for name in (*BACKENDS[2:], *WHOLE_BLOCKS))]
)
def test_gradcheck_of_all_derivatives(backend: str) -> None:
    """Without fast_mode, by every number of q, k and v."""
    blocks = Selection.from_blocks(torch.tensor([[0, -1], [0, 1]]).int()[None, :, None], 16)
    spans = Selection.from_ranges(make_spans("few", 1, 2, 1, 5, 3))
    S_kv, selection = (17, blocks) if backend in WHOLE_BLOCKS else (5, spans)
    inputs = make_qkv(S=2, G=1, h=2, Dk=8, Dv=8, S_kv=S_kv, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *inputs: attend(backend, *inputs, selection), inputs)


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
                o = selection_attention(q.unsqueeze(3), k.transpose(1, 2), v.transpose(1, 2), selection, backend=backend)
            assert o.dtype == (torch.bfloat16 if enabled else torch.float32)
            loss = (o.float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[enabled] = float(loss.detach())
    assert losses[True] == pytest.approx(losses[False], rel=0.02)


def test_backward_uses_the_backend_pinned_at_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=8, requires_grad=True)
    with use_backend("numba"):
        o = selection_attention(q, k, v, make_blocks(1, 4, 1, 4, 1, 4))
    assert decisions()[-1].backward == "numba"
    monkeypatch.setenv("NSA_SEL_BACKEND", "sdpa-packed")
    from nsa_sel.backends import sdpa_packed

    monkeypatch.setattr(sdpa_packed, "backward", lambda *_: pytest.fail("the decision of the forward pass names numba"))
    o.sum().backward()


@pytest.mark.parametrize("backend", ["sdpa-packed", "numba"])
@pytest.mark.parametrize("what", ["k", "ranges", "q_pos"])
def test_what_is_written_after_forward_is_noticed(backend: str, what: str) -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=8, S_kv=9, requires_grad=True)
    selection, q_pos, k = make_blocks(1, 4, 1, 9, 2, 4), torch.arange(5, 9), k * 1.0
    o = selection_attention(q, k, v, selection, q_pos=q_pos, backend=backend)
    with torch.no_grad():
        {"k": k, "ranges": selection.ranges, "q_pos": q_pos}[what].fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
