"""Parts of a tensor whose gradients are one tensor, and copies by words of eight bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_sel.projection import copy_wide, fits_wide, split_columns
from tests.helpers.checks import new_memory_is_nan


def test_gradients_of_parts_are_one_tensor() -> None:
    """A part that nothing depends on has zeros there; others come with any strides."""
    x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    assert all(map(torch.equal, split_columns(x, [2, 4, 1]), x.split([2, 4, 1], -1)))

    def work(y: Tensor) -> Tensor:
        a, _, b = split_columns(y, [2, 4, 1])
        return a.transpose(0, 2).contiguous().sin().sum() + b.square().sum()

    with new_memory_is_nan():
        assert torch.autograd.gradcheck(work, (x,))
    assert torch.autograd.gradgradcheck(work, (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("first", "size", "room"), [(4, 8, 16), (4, 8, 15), (3, 8, 16), (4, 7, 16), (0, 16, 16)])
def test_wide_copies_are_copies(dtype: torch.dtype, first: int, size: int, room: int) -> None:
    """Of rows that begin at words or do not; only what is asked for is written."""
    source, to = torch.randn(3, 2, 5, room).to(dtype), torch.full((2, 5, 3, room), 7.0, dtype=dtype)
    part, x = to[..., first : first + size], source.permute(1, 2, 0, 3)[..., first : first + size]
    assert fits_wide(x) == (dtype == torch.float64 or (room, first % 4, size) in ((16, 0, 8), (16, 0, 16)))
    copy_wide(part, x)
    assert torch.equal(part, x)
    assert to.ne(7).sum() <= part.numel()
    assert not fits_wide(x.transpose(-1, 0))
