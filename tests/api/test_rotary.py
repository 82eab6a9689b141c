"""Rotary positions: gradients, which callables share a table of angles, and the kernel against float64."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from nsa_sel import rotary
from nsa_sel.backends._triton import rotate as rotate_kernel
from nsa_sel.rotary import rotate
from tests.helpers.layer import check_rotation


def test_gradients_of_rotary_positions() -> None:
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda y: rotate(y, torch.tensor([0, 3, 1, 8, 2])), (x,))
    half = x.detach().half()
    assert rotate(half, torch.arange(5)).dtype == torch.float16
    torch.testing.assert_close(rotate(half, torch.arange(5)), rotate(half.double(), torch.arange(5)).half())


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
def test_gradients_of_queries_with_and_without_positions(used: tuple[bool, bool]) -> None:
    """Autograd's sum of both, in float64, from a float32 pass that rounds once."""
    x, positions = torch.randn(2, 5, 3, 4, requires_grad=True), torch.tensor([[0, 3, 1, 8, 2], [700, 9, 4, 4, 4]])
    weights = torch.randn(2, *x.shape)
    kept, rotated = rotary.kept_and_rotated(x, rotary.angles(x, positions))
    assert torch.equal(kept, x)
    assert torch.equal(rotated, rotate(x, positions))
    outputs, given = ([y for y, use in zip(pair, used, strict=True) if use] for pair in ((kept, rotated), weights))
    (mine,) = torch.autograd.grad(outputs, x, given)
    wide = x.detach().double().requires_grad_()
    both = (wide * weights[0] * used[0] + rotate(wide, positions) * weights[1] * used[1]).sum()
    torch.testing.assert_close(mine, torch.autograd.grad(both, wide)[0].float())


@pytest.mark.parametrize("rotary_of", [functools.partial(rotate, torch.zeros(1)), functools.partial(torch.add, alpha=2), torch.add])
def test_only_rotate_and_its_bases_share_a_table(rotary_of: Any) -> None:
    assert rotary.base_of(rotary_of) is None
    assert [rotary.base_of(f) for f in (rotate, functools.partial(rotate), functools.partial(rotate, base=5.0))] == [1e4, 1e4, 5.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_the_rotary_kernel_is_exact(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotate_kernel, "INTERPRETED_TILE", 1 << 10)  # several programs, and the last one has rows to spare
    check_rotation(dtype, "cpu", 12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("D", [2, 24, 64, 128, 192, 256])
def test_the_rotary_kernel_is_exact_on_a_gpu(dtype: torch.dtype, D: int) -> None:
    check_rotation(dtype, "cuda", D)
