"""Compression of keys and values (Eq. 7): one for every block of compress_block of them, blocks compress_stride apart.

Blocks overlap. They are never unfolded: all is computed from pieces of compress_stride keys, of which a block has r =
compress_block / compress_stride, each piece once.

In a packed batch pieces and blocks lie within one sequence. Pieces are gathered in the order of the sequences, all of
them are compressed as those of one sequence, and what straddles a border is left out at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from nsa_sel.core.arguments import Bounds, CuSeqlens, compressed_bounds
from nsa_sel.core.packed import check_packed_keys
from nsa_sel.core.transforms import hooked


class PackedPieces(NamedTuple):
    """Hold the pieces and blocks of a packed batch. Sizes are those of one sequence of all T keys."""

    keys: Tensor  # [pieces,stride] int64, of every piece; some key where there is no piece
    exists: Tensor  # [pieces] bool
    blocks: Tensor  # [C] int64, the first piece of every block; some piece where there is no block
    used: Tensor  # [C] bool

    @classmethod
    def of(cls, cu: Tensor, T: int, stride: int, r: int) -> PackedPieces:
        """From cu [N+1] int64; never waits for a GPU."""
        bounds = compressed_bounds(cu, stride, stride)
        i, piece, exists = _owners(bounds, T // stride)
        first = cu[i] + piece * stride
        keys = first[:, None] + torch.arange(stride, device=cu.device)
        own, block, used = _owners(compressed_bounds(cu, r * stride, stride), blocks_of(T // stride, r))
        return cls(keys.clamp(0, max(0, T - 1)), exists, (bounds[own] + block).clamp(0, max(0, len(used) - 1)), used)

    def split(self, x: Tensor) -> Tensor:
        """The pieces [1,pieces,stride,G,D] of x [T,G,D]; zeros where there is none: padding may hold NaN."""
        return torch.where(self.exists[:, None, None, None], x[self.keys], 0.0).unsqueeze(0)

    def join(self, x: Tensor) -> Tensor:
        """[C,G,D] of blocks x [1,G,C,D] that begin at every piece; zeros where no block is."""
        return torch.where(self.used[:, None, None], x.squeeze(0).transpose(0, 1)[self.blocks], 0.0)


def _owners(bounds: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each index's sequence by `bounds` and its index there for `total` indices, and whether it exists."""
    number = torch.arange(total, device=bounds.device)
    i = torch.searchsorted(bounds, number, right=True).clamp(1, len(bounds) - 1) - 1
    return i, number - bounds[i], number < bounds[-1]


def blocks_of(pieces: int, r: int) -> int:
    """Blocks of r pieces among so many: (S - compress_block) // compress_stride + 1, or 0."""
    return max(0, pieces - r + 1)


class _Compression(nn.Module):
    """A module that compresses keys or values, by `_blocks` from pieces [B,pieces,stride,G,D] to [B,G,C,D]."""

    stride: int
    r: int

    def _blocks(self, pieces: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, cu_seqlens: CuSeqlens | None = None) -> Tensor:
        """Return [B,G,C,D] of x [B,S,G,D]; of a packed x [T,G,D] the k_cmp [C,G,D] of `compressed_attention`, zeros after
        the last sequence."""
        if cu_seqlens is None:
            whole = x.shape[1] // self.stride
            return self._blocks(torch.unflatten(x[:, : whole * self.stride], 1, (whole, self.stride)))
        check_packed_keys("x", x)
        packed = PackedPieces.of(Bounds.of("cu_seqlens", cu_seqlens, len(x), x).on(x), len(x), self.stride, self.r)
        return packed.join(self._blocks(packed.split(x)))

    def extra_repr(self) -> str:
        return f"compress_block={self.r * self.stride}, compress_stride={self.stride}"


class BlockMLP(_Compression):
    """A two-layer MLP over the keys of a block, with learned positions inside the block; shared by all groups.

    Args:
        dim: D, of a key and of a compressed key.
        compress_block, compress_stride: keys of a block, a multiple of the second, and keys from one block to the next.
        bias: whether the second layer has one. Keys need none: one number per query, added to all its logits, changes
            no weight.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        dim: int,
        compress_block: int,
        compress_stride: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.stride, self.r = dim, compress_stride, compress_block // compress_stride
        self.inside = nn.Parameter(torch.empty(compress_block, dim, device=device, dtype=dtype))
        self.first = nn.Linear(compress_block * dim, 2 * dim, device=device, dtype=dtype)
        self.second = nn.Linear(2 * dim, dim, bias, device=device, dtype=dtype)
        if not bias:
            self.register_load_state_dict_pre_hook(_drop_second_bias)  # type: ignore[no-untyped-call]
        self.of_rank: Callable[[Tensor], Tensor] | None = None  # of a parameter: set by nsa_sel.distributed.tensor_parallel
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the positions to 0, as FSDP and others do after `to_empty` of a model made on the meta device; both
        layers have their own."""
        nn.init.zeros_(self.inside)

    def _blocks(self, pieces: Tensor) -> Tensor:
        """Return [B,G,C,D] of pieces [B,pieces,stride,G,D].

        The first layer is linear: its matrix is r matrices side by side, W_0 ... W_(r-1), one for each piece of a
        block, so that block i gives sum_j W_j piece_(i+j). One product multiplies every piece by all r of them, for as
        many operations as blocks take, and sums of shifted views join the blocks. Positions inside the block add the
        same to all blocks: they go through the layer once.
        """
        C = blocks_of(pieces.shape[1], self.r)
        if not self.is_plain():
            blocks = torch.cat([pieces[:, j : j + C] for j in range(self.r)], 2) + self.inside[:, None]  # [B,C,compress_block,G,D]
            return self.second(gelu(self.first(blocks.permute(0, 3, 1, 2, 4).flatten(3))))  # type: ignore[no-any-return]
        pieces = pieces.permute(0, 3, 1, 2, 4).flatten(3)  # [B,G,pieces,stride*D]
        inside, *first, second, bias = self.weights()
        matrices = first[0].reshape(2 * self.dim * self.r, self.stride * self.dim)
        products = linear(pieces, matrices).view(*pieces.shape[:3], 2 * self.dim, self.r)
        hidden = linear(inside.flatten(), *first) + _Joined.apply(products, C)  # type: ignore[no-untyped-call]
        return linear(gelu(hidden), second, bias)

    def is_plain(self) -> bool:
        """Return True if the layers are plain nn.Linear: not hooked or replaced (LoRA, quantization)."""
        layers = self.first, self.second
        return self.of_rank is not None or all(type(layer) is nn.Linear and not hooked(layer) for layer in layers)

    def weights(self) -> tuple[Any, ...]:
        """Positions inside a block, then weight and bias of both layers, None for a bias left out; of DTensors this
        rank's replicas."""
        weights = self.inside, self.first.weight, self.first.bias, self.second.weight, self.second.bias
        return weights if self.of_rank is None else tuple(None if x is None else self.of_rank(x) for x in weights)


def _drop_second_bias(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    """Ignore the bias in weights of versions that had it for keys, too."""
    state_dict.pop(f"{prefix}second.bias", None)


class _Joined(torch.autograd.Function):
    """Sums over j of products [B,G,C + j,width,j]: [B,G,C,width]. The gradient is written into one tensor, where
    autograd would add one for each j."""

    @staticmethod
    def forward(ctx: Any, products: Tensor, C: int) -> Tensor:
        ctx.shape = products.shape
        total = products[:, :, :C, :, 0]
        for j in range(1, products.shape[-1]):
            total = total + products[:, :, j : j + C, :, j]
        return total

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        dproducts = do.new_zeros(ctx.shape)
        for j in range(ctx.shape[-1]):
            dproducts[:, :, j : j + do.shape[2], :, j] = do
        return dproducts, None


class BlockMean(_Compression):
    """The mean of a block's keys, summed in float32 (float64 for float64). It has no parameters."""

    def __init__(self, compress_block: int, compress_stride: int) -> None:
        super().__init__()
        self.stride, self.r = compress_stride, compress_block // compress_stride

    def _blocks(self, pieces: Tensor) -> Tensor:
        """[B,G,C,D] of pieces [B,pieces,stride,G,D]."""
        means = pieces.mean(2, dtype=torch.promote_types(pieces.dtype, torch.float32)).transpose(1, 2)  # [B,G,pieces,D]
        C = blocks_of(means.shape[2], self.r)
        total = means[:, :, :C]
        for j in range(1, self.r):
            total = total + means[:, :, j : j + C]
        return (total / self.r).to(pieces.dtype)  # type: ignore[no-any-return]
