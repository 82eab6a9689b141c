"""`MSAttention`: attention of MiniMax Sparse Attention (MSA, arXiv 2606.13392) as a layer of a model, with an indexer
that learns which blocks attention needs.

The layer is that of MiniMax-M3, and its parameters have the names of transformers' `MiniMaxM3VLAttention`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from nsa_sel.attention import selection_attention
from nsa_sel.choosing import choose_blocks
from nsa_sel.core.arguments import as_positions, check_flag, check_positive, check_tensors
from nsa_sel.core.transforms import check_transforms, in_autocast_dtype
from nsa_sel.errors import ArgumentError, renamed
from nsa_sel.index_loss import indexer_loss
from nsa_sel.rotary import Angles, angles_of, rotate_by
from nsa_sel.selection import Selection
from nsa_sel.window import sliding_window_attention


class MSAttention(nn.Module):
    """MiniMax Sparse Attention with its projections, norms, rotary positions and indexer.

    The indexer has one query head per KV group and one key head. A block's score is its largest logit; each group
    attends to the n best blocks, among them the current one. No gradient flows through the choice: the indexer learns
    by `indexer_loss`, the KL divergence of its softmax from attention's own probabilities, and only the indexer's
    parameters get a gradient from it.

    Train in two stages, as the paper does: first dense attention with the loss over all keys that a row sees
    (`layer.warm_up = True`), then sparse attention with the loss over the selected keys.

    Args:
        width: of hidden states.
        groups: G, KV groups.
        heads: h, query heads per group.
        head_dim: D of queries, keys and values.
        index_dim: of the indexer's queries and keys.
        block_size: keys of a block.
        n: blocks per row, the local ones among them.
        local: last visible blocks, the current one among them, that are always chosen.
        rotary_dim: leading dimensions of a head that rotate, by default all; an even number, 0 for none.
        rotary_base: base of the angles' geometric series.
        eps: of the norms.
        loss_weight: if not None, training adds this weight times the indexer's loss to whatever loss is differentiated
            through the layer's output: its gradient reaches the indexer in the output's backward pass, and no value has
            to be passed along. None: ask for the loss by `return_loss`.
        backend: the name of a backend to force for attention.
        device, dtype: of the parameters.

    Attributes:
        warm_up: attend to all visible keys, by dense attention, and take the loss over them. False at first.
        index_loss: the indexer's last loss, without gradient; None before the first.

    Raises:
        ArgumentError: sizes that do not fit together.
    """

    def __init__(
        self, width: int, groups: int, heads: int, head_dim: int, index_dim: int | None = None, *, block_size: int = 128, n: int = 16,
        local: int = 1, rotary_dim: int | None = None, rotary_base: float = 10000.0, eps: float = 1e-6, loss_weight: float | None = None,
        backend: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        index_dim = head_dim if index_dim is None else index_dim
        rotary_dim = min(head_dim, index_dim) if rotary_dim is None else rotary_dim
        sizes = {"width": width, "groups": groups, "heads": heads, "head_dim": head_dim, "index_dim": index_dim}
        for name, size in {**sizes, "block_size": block_size, "n": n}.items():
            check_positive(name, size)
        if not isinstance(rotary_dim, int) or rotary_dim % 2 or not 0 <= rotary_dim <= min(head_dim, index_dim):
            allowed = f"an even number from 0 to {min(head_dim, index_dim)}, the smaller head dim"
            raise ArgumentError("rotary_dim", rotary_dim, allowed, "pass one, or None to rotate all")
        self.width, self.groups, self.heads, self.head_dim = width, groups, heads, head_dim
        self.rotary_dim, self.rotary_base = rotary_dim, rotary_base
        self.loss_weight, self.backend, self.warm_up = loss_weight, backend, False
        self.index_loss: Tensor | None = None
        options: Any = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(width, groups * heads * head_dim, bias=False, **options)
        self.k_proj = nn.Linear(width, groups * head_dim, bias=False, **options)
        self.v_proj = nn.Linear(width, groups * head_dim, bias=False, **options)
        self.o_proj = nn.Linear(groups * heads * head_dim, width, bias=False, **options)
        self.q_norm, self.k_norm = (UnitOffsetNorm(head_dim, eps, **options) for _ in range(2))
        self.indexer = Indexer(width, groups, index_dim, block_size, n, local, eps, **options)

    @overload
    def forward(self, x: Tensor, positions: Tensor | None = None, *, return_loss: Literal[False] = False) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, positions: Tensor | None = None, *, return_loss: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, positions: Tensor | None = None, *, return_loss: bool = False) -> Any:
        """Attend causally from x to itself.

        Args:
            x: [B,S,width].
            positions: [S] or [B,S] int32 or int64 for the rotary positions, by default 0 to S - 1. They do not change
                which keys a row sees.
            return_loss: also return the indexer's loss.

        Returns:
            o [B,S,width], or (o, loss): the mean over rows and groups of the KL divergence, float32, in nats. Its
            gradient reaches the indexer's parameters alone.

        Raises:
            ArgumentError: bad input.
            BackendError: as `selection_attention`.
        """
        check_flag("return_loss", return_loss)
        check_tensors(x=x)
        check_transforms(x, name="MSAttention")
        if x.dim() != 3 or x.shape[2] != self.width:
            remedy = "a batch of one is x.unsqueeze(0); for another width make MSAttention(width, ...)"
            raise ArgumentError("x", f"of shape {tuple(x.shape)}", f"[B,S,width = {self.width}]", remedy)
        (x,) = in_autocast_dtype(x)  # once for all projections
        learns = return_loss or (self.training and self.loss_weight is not None and torch.is_grad_enabled())
        q, k, v, index_q, index_k = self.project(x, positions)
        selection = None if self.warm_up else self.indexer.choose(index_q, index_k)
        if selection is None:
            o, lse = sliding_window_attention(q, k, v, x.shape[1], return_lse=True)  # dense: a window of all keys
        else:
            o, lse = selection_attention(q, k, v, selection, return_lse=True, backend=self.backend)
        o = self.o_proj(o.flatten(2))
        if not learns:
            return o
        loss = indexer_loss(q, k, lse, index_q, index_k, selection)
        self.index_loss = loss.detach()
        return (o, loss) if return_loss else _WithLoss.apply(o, loss, self.loss_weight)  # type: ignore[no-untyped-call]

    def project(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what attention and the indexer take of x [B,S,width], with rotary positions.

        The indexer's parts are of x.detach(): the loss teaches the indexer, not the layers before it.

        Returns:
            q [B,S,G,h,D], k and v [B,G,S,D], index_q [B,S,G,Di], index_k [B,S,Di].
        """
        table = self._angles(x, positions)
        q = self._rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.heads, self.head_dim))), table)
        k = self._rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), table)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        index_q, index_k = (self._rotate(y, table) for y in self.indexer(x.detach()))
        return q, k.transpose(1, 2), v.transpose(1, 2), index_q, index_k

    def _angles(self, x: Tensor, positions: Tensor | None) -> Angles | None:
        """Return the angles of the rows' rotary positions, None without such positions."""
        B, S, _ = x.shape
        if positions is None:
            positions = torch.arange(S, device=x.device)
        else:
            try:
                as_positions(positions, B, S, x.device)
            except ArgumentError as error:
                raise renamed(error, q_pos="positions") from None
        return angles_of(positions, self.rotary_dim, x.dtype, self.rotary_base) if self.rotary_dim else None

    def _rotate(self, x: Tensor, table: Angles | None) -> Tensor:
        """Return x [B,S,...,D] with its first rotary_dim columns rotated."""
        if table is None:
            return x
        if self.rotary_dim == x.shape[-1]:
            return rotate_by(x, table)
        return torch.cat((rotate_by(x[..., : self.rotary_dim], table), x[..., self.rotary_dim :]), -1)

    def extra_repr(self) -> str:
        """Return the options that print(layer) shows."""
        names = ("width", "groups", "heads", "head_dim", "rotary_dim", "rotary_base", "loss_weight", "backend", "warm_up")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class Indexer(nn.Module):
    """MSA's indexer: index queries [B,S,G,D] and index keys [B,S,D], and the choice of blocks by them.

    Args: as of `MSAttention`.
    """

    def __init__(self, width: int, groups: int, dim: int, block_size: int, n: int, local: int, eps: float, **options: Any) -> None:
        super().__init__()
        self.dim, self.block_size, self.n, self.local = dim, block_size, n, local
        self.q_proj = nn.Linear(width, groups * dim, bias=False, **options)
        self.k_proj = nn.Linear(width, dim, bias=False, **options)
        self.q_norm, self.k_norm = (UnitOffsetNorm(dim, eps, **options) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return index queries [B,S,G,D] and index keys [B,S,D] of x [B,S,width], normed and not yet rotated."""
        return self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim))), self.k_norm(self.k_proj(x))

    def choose(self, q: Tensor, k: Tensor) -> Selection:
        """Return the blocks that rotated index queries choose. No gradient."""
        q, k = q.detach().unsqueeze(3), k.detach().unsqueeze(1)  # [B,S,G,1,D], [B,1,S,D]
        return choose_blocks(q, k, block_size=self.block_size, n=self.n, local=self.local)

    def extra_repr(self) -> str:
        """Return the options that print(layer) shows."""
        return f"block_size={self.block_size}, n={self.n}, local={self.local}"


class UnitOffsetNorm(nn.Module):
    """RMSNorm over the last dimension, in float32, scaled by 1 + weight.

    Args:
        dim: of the last dimension.
        eps: added to the mean square.
        options: device and dtype of the weight.
    """

    def __init__(self, dim: int, eps: float, **options: Any) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(dim, **options))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [...,dim], in x's dtype."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return nn.functional.rms_norm(x.to(wide), self.weight.shape, 1.0 + self.weight.to(wide), self.eps).to(x.dtype)


class _WithLoss(torch.autograd.Function):
    """Return o; backward, give the loss a gradient of `weight`, as if weight * loss were part of what is differentiated."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, (loss.dtype, loss.device)
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        dtype, device = ctx.like
        return do, torch.full((), ctx.weight, dtype=dtype, device=device), None
