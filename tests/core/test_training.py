"""Training with mixed precision follows float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nsa_sel import Selection, selection_attention
from tests.helpers.cases import make_blocks, plain_torch

CPU = ("numba", "sdpa-packed")
BLOCK = 16


class TinyModel(nn.Module):
    """A projection to q, k, v, selection attention, and a projection back: enough to learn something."""

    def __init__(self, width: int = 16, h: int = 2) -> None:
        super().__init__()
        self.h, self.width = h, width
        self.qkv = nn.Linear(width, (h + 2) * width)
        self.out = nn.Linear(h * width, width)

    def forward(self, x: Tensor, selection: Selection, backend: str | None) -> Tensor:
        B, S, _ = x.shape
        q, k, v = self.qkv(x).split((self.h * self.width, self.width, self.width), -1)
        q, k, v = q.view(B, S, 1, self.h, self.width), k.unsqueeze(1), v.unsqueeze(1)
        o = selection_attention(q, k, v, selection, backend=backend) if backend else plain_torch(q, k, v, selection.ranges)[0]
        return self.out(o.reshape(B, S, -1))  # type: ignore[no-any-return]


def losses(backend: str | None, dtype: torch.dtype | None, compile_it: bool = False) -> list[float]:
    """Losses of 12 training steps that learn to return the previous token. backend None: plain PyTorch; dtype None: float32."""
    torch.manual_seed(0)
    model, x = TinyModel(), torch.randn(2, 64, 16)
    selection = make_blocks(2, 64, 1, 64, 3, BLOCK)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=2.0**10)
    run = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager") if compile_it else model
    taken = []
    for _ in range(12):
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            y = run(x, selection, backend)
        loss = (y[:, 1:].float() - x[:, :-1]).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        taken.append(loss.item())
    assert scaler.get_scale() == (2.0**10 if dtype == torch.float16 else 1.0)  # no step was skipped
    return taken


def test_training_under_amp_follows_float32() -> None:
    wanted = losses(None, None)
    assert wanted[-1] < 0.95 * wanted[0]  # it learns
    for backend in CPU:
        for dtype, band in ((None, 1e-4), (torch.bfloat16, 0.02), (torch.float16, 0.005)):
            got = losses(backend, dtype)
            assert got == pytest.approx(wanted, rel=band), (backend, dtype)
    assert losses("numba", torch.float16, compile_it=True) == losses("numba", torch.float16)
