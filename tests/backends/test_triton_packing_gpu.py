"""Launches with packed arguments give the bits that Triton's launcher gives, in graphs and on new threads, too."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import nsa_sel
from nsa_sel.backends._triton import kernel as kernel_module
from nsa_sel.backends.specs import SPECS
from nsa_sel.selection import Selection
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.graphs import captured, replayed
from tests.helpers.launches import forget_launches

pytestmark = pytest.mark.gpu
BACKENDS = [spec.name for spec in SPECS if spec.framework == "triton"]
SIZES = {"prefill": (1, 100, 2, 4, 256, 64), "few": (3, 1, 2, 16, 512, 128), "wide": (1, 40, 1, 3, 192, 192), "one": (1, 17, 1, 1, 64, 64)}


def results(backend: str, sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    """o, lse, dq, dk, dv: twice, whose second launches find all compiled; with another number of keys, and keys at odd addresses."""
    B, S, G, h, S_kv, D = sizes
    found = list[torch.Tensor]()
    for keys, skipped in ((S_kv, 0), (S_kv, 0), (S_kv + 24, 0), (S_kv, 1)):
        torch.manual_seed(seed)
        q, k, v = make_qkv(B, S, G, h, D, D, S_kv=keys, dtype=dtype, device="cuda")
        if skipped:
            k = torch.cat((torch.zeros_like(k[..., :1]), k), -1)[..., 1:]
        selection = make_blocks(B, S, G, keys, 4, 32, device="cuda")
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = nsa_sel.selection_attention(*inputs, selection, backend=backend, return_lse=True)
        do = torch.ones_like(o) * torch.linspace(-1, 1, D, device="cuda").to(dtype)
        found += [o.detach(), lse.detach(), *torch.autograd.grad((o, lse), inputs, (do, torch.full_like(lse, 0.25)))]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_launches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, backend: str, size: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and SIZES[size][-1] > 128:
        pytest.skip("more shared memory than there is")
    layouts: list[Any] = []
    started: list[bool] = []
    real_layout, real_started = kernel_module.layout_of, kernel_module._started

    def layout_of(*of: Any) -> Any:
        layouts.append(real_layout(*of))
        return layouts[-1]

    def was_started(*how: Any) -> bool:
        started.append(real_started(*how))
        return started[-1]

    monkeypatch.setattr(kernel_module, "layout_of", layout_of)
    monkeypatch.setattr(kernel_module, "_started", was_started)
    forget_launches()
    packed = results(backend, SIZES[size], dtype)
    assert layouts
    assert None not in layouts
    assert len(started) >= 3
    assert all(started)
    monkeypatch.setattr(kernel_module, "layout_of", lambda *of: None)
    forget_launches()
    launched = len(started)
    plain = results(backend, SIZES[size], dtype)
    assert len(started) == launched
    forget_launches()
    for a, b in zip(packed, plain, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_and_new_threads_take_packed_launches(backend: str) -> None:
    q, k, v = make_qkv(1, 64, 2, 4, 64, 64, S_kv=256, dtype=torch.bfloat16, device="cuda")
    indices = torch.arange(4, device="cuda").expand(1, 64, 2, 4)

    def forward(kept: Selection | None = None) -> torch.Tensor:
        selection = Selection.from_blocks(indices, 64) if kept is None else kept
        return nsa_sel.selection_attention(q, k, v, selection, backend=backend)  # type: ignore[no-any-return]

    kept = Selection.from_blocks(indices, 64)
    wanted = forward(kept)
    found: list[torch.Tensor] = []
    for given in (None, kept):  # the first kernel of the thread is that of ranges, or one of attention
        thread = threading.Thread(target=lambda given=given: found.append(forward(given)))  # type: ignore[misc]
        thread.start()
        thread.join()
    assert len(found) == 2
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted)
    graph = captured(lambda: (forward(),))
    v.zero_()
    assert not replayed(*graph)[0].any()
