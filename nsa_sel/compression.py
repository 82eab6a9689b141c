"""Compression of keys and values (Eq. 7): one for every block of compress_block of them, blocks compress_stride apart.

Blocks overlap. They are never unfolded: all is computed from pieces of compress_stride keys, of which a block has r = compress_block /
compress_stride, each piece once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear


def split(x: Tensor, stride: int) -> Tensor:
    """The whole pieces of x [B,S,G,D]: [B,pieces,stride,G,D]."""
    B, S, G, D = x.shape
    whole = S // stride
    return x[:, : whole * stride].reshape(B, whole, stride, G, D)


def blocks_of(pieces: int, r: int) -> int:
    """Blocks of r pieces among so many: (S - compress_block) // compress_stride + 1, or 0."""
    return max(0, pieces - r + 1)


class BlockMLP(nn.Module):
    """A two-layer MLP over the keys of a block, with learned positions inside the block; shared by all groups.

    Args:
        dim: D, of a key and of a compressed key.
        compress_block, compress_stride: keys of a block, a multiple of the second, and keys from one block to the next.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        dim: int,
        compress_block: int,
        compress_stride: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.stride, self.r = dim, compress_stride, compress_block // compress_stride
        self.inside = nn.Parameter(torch.zeros(compress_block, dim, device=device, dtype=dtype))
        self.first = nn.Linear(compress_block * dim, 2 * dim, device=device, dtype=dtype)
        self.second = nn.Linear(2 * dim, dim, device=device, dtype=dtype)
        self.of_rank: Callable[[Tensor], Tensor] | None = None  # of a parameter: set by nsa_sel.distributed.tensor_parallel

    def forward(self, x: Tensor) -> Tensor:
        """[B,G,C,D] of x [B,S,G,D].

        The first layer is linear: its matrix is r matrices side by side, W_0 ... W_(r-1), one for each piece of a block, so that block i
        gives sum_j W_j piece_(i+j). One product multiplies every piece by all r of them, for as many operations as blocks take, and sums
        of shifted views join the blocks. Positions inside the block add the same to all blocks: they go through the layer once.
        """
        pieces = split(x, self.stride).permute(0, 3, 1, 2, 4).flatten(3)  # [B,G,pieces,stride*D]
        C = blocks_of(pieces.shape[2], self.r)
        inside, *first, second, bias = self._weights()
        matrices = first[0].view(2 * self.dim * self.r, self.stride * self.dim)
        products = linear(pieces, matrices).view(*pieces.shape[:3], 2 * self.dim, self.r)
        hidden = linear(inside.flatten(), *first)
        for j in range(self.r):
            hidden = hidden + products[:, :, j : j + C, :, j]
        return linear(gelu(hidden), second, bias)

    def _weights(self) -> tuple[Tensor, ...]:
        weights = self.inside, self.first.weight, self.first.bias, self.second.weight, self.second.bias
        return weights if self.of_rank is None else tuple(map(self.of_rank, weights))

    def extra_repr(self) -> str:
        return f"compress_block={self.r * self.stride}, compress_stride={self.stride}"


class BlockMean(nn.Module):
    """The mean of a block's keys. It has no parameters."""

    def __init__(self, compress_block: int, compress_stride: int) -> None:
        super().__init__()
        self.stride, self.r = compress_stride, compress_block // compress_stride

    def forward(self, x: Tensor) -> Tensor:
        """[B,G,C,D] of x [B,S,G,D]; sums are in float32 (float64 for float64)."""
        means = split(x, self.stride).mean(2, dtype=torch.promote_types(x.dtype, torch.float32)).transpose(1, 2)  # [B,G,pieces,D]
        C = blocks_of(means.shape[2], self.r)
        total = means[:, :, :C]
        for j in range(1, self.r):
            total = total + means[:, :, j : j + C]
        mean: Tensor = (total / self.r).to(x.dtype)
        return mean

    def extra_repr(self) -> str:
        return f"compress_block={self.r * self.stride}, compress_stride={self.stride}"
