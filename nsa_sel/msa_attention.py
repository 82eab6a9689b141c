"""`MSAttention`: the attention of MiniMax Sparse Attention (arXiv 2606.13392) as a layer of a model that is trained.

For training from scratch, or further training of MiniMax-M3's layers. To run the released model, or to decode, patch
transformers' layers instead (docs/choosing.md).
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from nsa_sel.choosing import choose_blocks
from nsa_sel.core.arguments import as_positions, check_flag, check_forced, check_positive, check_tensors
from nsa_sel.core.attend import selection_attention
from nsa_sel.errors import ArgumentError, renamed, shown
from nsa_sel.index_loss import indexer_loss
from nsa_sel.rotary import Angles, angles_of, rotate_by
from nsa_sel.window import sliding_window_attention


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, in float32, in x's dtype."""

    def __init__(self, dim: int, eps: float, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [...,dim] normed."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)).to(x.dtype)


class Indexer(nn.Module):
    """Project, norm and rotate index queries, one head per group, and one index key per token."""

    def __init__(self, width: int, groups: int, dim: int, eps: float, **options: Any) -> None:
        super().__init__()
        self.dim = dim
        self.q_proj = nn.Linear(width, groups * dim, bias=False, **options)
        self.k_proj = nn.Linear(width, dim, bias=False, **options)
        self.q_norm, self.k_norm = RMSNorm(dim, eps, **options), RMSNorm(dim, eps, **options)

    def forward(self, x: Tensor, table: Angles) -> tuple[Tensor, Tensor]:
        """Return index queries [B,S,G,dim] and keys [B,S,dim] of hidden states [B,S,width]."""
        q, k = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), self.k_norm(self.k_proj(x))
        return partly_rotated(q, table), partly_rotated(k, table)


class MSAttention(nn.Module):
    """Attention whose blocks an indexer chooses (MiniMax Sparse Attention), with the loss that trains the indexer.

    Queries, keys, index queries and index keys are normed per head and rotated in their first columns. The indexer's
    parameters get their gradient from the loss alone, and the loss reaches no other parameter: its input is detached.
    Parameters have the names and shapes of transformers' MiniMaxM3VLAttention, whose `state_dict` fits.

    Args:
        width: of hidden states.
        groups: G, KV groups; each has an index head.
        heads: h, query heads of a group.
        head_dim: of queries, keys and values.
        index_dim: of index queries and keys, by default head_dim.
        block_size: keys of a block.
        n: blocks of a row.
        local: last visible blocks, the current one among them, that are always chosen.
        rotary_dim: columns that are rotated, by default half of head_dim (MiniMax-M3: 64 of 128); even, 0 for none.
        rotary_base: of the angles' geometric series.
        eps: of the norms.
        backend: the name of a backend to force for attention to the chosen blocks.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: sizes that do not fit together.
    """

    def __init__(
        self, width: int, groups: int, heads: int, head_dim: int = 128, *, index_dim: int | None = None, block_size: int = 128,
        n: int = 16, local: int = 1, rotary_dim: int | None = None, rotary_base: float = 5e6, eps: float = 1e-6,
        backend: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        index_dim = head_dim if index_dim is None else index_dim
        sizes = {"width": width, "groups": groups, "heads": heads, "head_dim": head_dim, "index_dim": index_dim}
        for name, size in {**sizes, "block_size": block_size, "n": n}.items():
            check_positive(name, size)
        check_forced(0, local, n)
        rotary_dim = head_dim // 2 if rotary_dim is None else rotary_dim
        if not isinstance(rotary_dim, int) or rotary_dim % 2 or not 0 <= rotary_dim <= min(head_dim, index_dim):
            allowed = f"an even number from 0 to {min(head_dim, index_dim)}"
            raise ArgumentError("rotary_dim", shown(rotary_dim), allowed, "pass the columns that are rotated")
        self.width, self.groups, self.heads, self.head_dim = width, groups, heads, head_dim
        self.block_size, self.n, self.local, self.backend = block_size, n, local, backend
        self.rotary_dim, self.rotary_base = rotary_dim, rotary_base
        options: Any = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(width, groups * heads * head_dim, bias=False, **options)
        self.k_proj = nn.Linear(width, groups * head_dim, bias=False, **options)
        self.v_proj = nn.Linear(width, groups * head_dim, bias=False, **options)
        self.o_proj = nn.Linear(groups * heads * head_dim, width, bias=False, **options)
        self.q_norm, self.k_norm = RMSNorm(head_dim, eps, **options), RMSNorm(head_dim, eps, **options)
        self.indexer = Indexer(width, groups, index_dim, eps, **options)

    @overload
    def forward(self, x: Tensor, positions: Tensor | None = None, *, sparse: bool = True, with_loss: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(
        self, x: Tensor, positions: Tensor | None = None, *, sparse: bool = True, with_loss: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def forward(self, x: Tensor, positions: Tensor | None = None, *, sparse: bool = True, with_loss: bool) -> Any: ...
    def forward(self, x: Tensor, positions: Tensor | None = None, *, sparse: bool = True, with_loss: bool = False) -> Any:
        """Causal attention of x to itself.

        Args:
            x: [B,S,width].
            positions: [S] or [B,S] int32 or int64 for the rotary positions, by default 0 to S - 1. They do not change
                who sees whom.
            sparse: attend to the chosen blocks; False: to all visible keys (warm-up).
            with_loss: also return the indexer's loss, over the keys that attention reads.

        Returns:
            [B,S,width], or with_loss ([B,S,width], a scalar in float32 (float64 for float64)).

        Raises:
            ArgumentError: bad input.
            BackendError: as `selection_attention`.
        """
        check_flag("sparse", sparse)
        check_flag("with_loss", with_loss)
        check_tensors(x=x)
        if x.dim() != 3 or x.shape[2] != self.width:
            raise ArgumentError("x", f"of shape {tuple(x.shape)}", f"[B,S,width = {self.width}]", "a batch of one is x.unsqueeze(0)")
        positions = self._positions(x, positions)
        q, k, v = (torch.unflatten(p(x), -1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))  # [B,S,heads,D]
        table = angles_of(positions, self.rotary_dim, q.dtype, self.rotary_base)
        q, k = partly_rotated(self.q_norm(q), table), partly_rotated(self.k_norm(k), table)
        q, k, v = torch.unflatten(q, 2, (self.groups, -1)), k.transpose(1, 2), v.transpose(1, 2)  # [B,S,G,h,D], [B,G,S,D] twice
        selection = index = None
        if sparse or with_loss:
            index = self.indexer(x.detach(), table)
        if sparse and index is not None:
            selection = choose_blocks(
                index[0].detach().unsqueeze(3), index[1].detach().unsqueeze(1), block_size=self.block_size, n=self.n, local=self.local
            )  # fmt: skip
            o, lse = selection_attention(q, k, v, selection, return_lse=True, backend=self.backend)
        else:
            o, lse = sliding_window_attention(q, k, v, x.shape[1], return_lse=True)  # dense
        o = self.o_proj(o.flatten(2))
        if not with_loss or index is None:
            return o
        index_q, index_k = index
        return o, indexer_loss(q, k, lse, index_q, index_k, selection)

    def _positions(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Return checked positions of the rows of x, or the default ones."""
        B, S = x.shape[:2]
        if positions is None:
            return torch.arange(S, device=x.device)
        try:
            as_positions(positions, B, S, x.device)
        except ArgumentError as error:
            raise renamed(error, q_pos="positions") from None
        return positions

    def extra_repr(self) -> str:
        """The options that print(layer) shows."""
        names = ("width", "groups", "heads", "head_dim", "block_size", "n", "local", "rotary_dim", "rotary_base", "backend")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def partly_rotated(x: Tensor, table: Angles) -> Tensor:
    """Return x [B,S,...,D] with its first columns rotated, twice as many as the table has."""
    columns = 2 * table.cos.shape[-1]
    if columns == 0:
        return x
    if columns == x.shape[-1]:
        return rotate_by(x, table)
    return torch.cat((rotate_by(x[..., :columns], table), x[..., columns:]), -1)
