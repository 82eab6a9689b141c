"""Buffers made past PyTorch's dispatcher are what `new_empty` would have made."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.backends._buffers import unwritten


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 1, 5), (7,), (2, 0, 3), (0,)])
def test_a_buffer_is_a_new_plain_tensor(device: str, inference: bool, sizes: tuple[int, ...]) -> None:
    like = torch.zeros(1, dtype=torch.bfloat16, device=device)
    with torch.inference_mode(inference):
        for dtype in (None, torch.float32):
            made, expected = unwritten(like, *sizes, dtype=dtype), like.new_empty(sizes, dtype=dtype)
            for fact in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
                assert getattr(made, fact) == getattr(expected, fact)
            assert (type(made), made.stride(), made.is_inference()) == (torch.Tensor, expected.stride(), inference)
            assert inference or made._version == 0
    if made.numel() and not inference:
        weight = torch.ones(sizes, dtype=made.dtype, device=device, requires_grad=True)
        (weight * made.fill_(3)).sum().backward()
        assert torch.equal(weight.grad, made)  # autograd may save it, and take it for a result
        assert made._version == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_deterministic_algorithms_fill_it_with_nan(device: str) -> None:
    """Benches and tuning see by that what a kernel left unwritten."""
    torch.use_deterministic_algorithms(True)
    try:
        made = unwritten(torch.zeros(1, device=device), 3, 5, dtype=torch.bfloat16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert made.isnan().all()
