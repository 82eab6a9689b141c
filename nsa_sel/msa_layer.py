"""`MSAttention`: attention of MiniMax Sparse Attention (MSA, arXiv 2606.13392) as a layer of a model, with an indexer
that learns which blocks attention needs.

The layer is that of MiniMax-M3, and its parameters have the names of transformers' `MiniMaxM3VLAttention`.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from nsa_sel.attention import selection_attention
from nsa_sel.caching.step import LayerStep, check_step
from nsa_sel.caching.step_tensors import ALL_KEYS
from nsa_sel.choosing import choose_blocks
from nsa_sel.core.arguments import Bounds, CuSeqlens, check_flag, check_positive
from nsa_sel.core.packed import checked_hidden, hidden_positions
from nsa_sel.core.transforms import in_autocast_dtype, traces
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.index_loss import indexer_loss
from nsa_sel.rotary import Angles, angles_of, normed_and_rotated, rotate_by
from nsa_sel.selection import Selection
from nsa_sel.varlen import selection_attention_varlen
from nsa_sel.window import sliding_window_attention


class MSAttention(nn.Module):
    """MiniMax Sparse Attention with its projections, norms, rotary positions and indexer.

    The indexer has one query head per KV group and one key head. A block's score is its largest logit (`block_score`);
    each group attends to the n best blocks, among them the current one. No gradient flows through the choice: the indexer learns
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
        block_score: "max", a block's largest index logit, as in MiniMax-M3; or "sum", the sum of its keys' probabilities
            by the indexer, which is closer to what the loss teaches: its blocks hold more of the attention mass
            (docs/indexer.md).
        rotary_dim: leading dimensions of a head that rotate, by default all; an even number, 0 for none.
        rotary_base: base of the angles' geometric series.
        eps: of the norms.
        loss_weight: if not None, training adds this weight times the indexer's loss to whatever loss is differentiated
            through the layer's output: its gradient reaches the indexer in the output's backward pass, and no value has
            to be passed along. None: ask for the loss by `return_loss`, which adds nothing by itself.
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
        local: int = 1, block_score: Literal["max", "sum"] = "max", rotary_dim: int | None = None, rotary_base: float = 10000.0,
        eps: float = 1e-6, loss_weight: float | None = None, backend: str | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
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
        self.context: Any = None  # where ranks hold slices of the sequence: set by nsa_sel.distributed.context_parallel
        options: Any = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(width, groups * heads * head_dim, bias=False, **options)
        self.k_proj = nn.Linear(width, groups * head_dim, bias=False, **options)
        self.v_proj = nn.Linear(width, groups * head_dim, bias=False, **options)
        self.o_proj = nn.Linear(groups * heads * head_dim, width, bias=False, **options)
        self.q_norm, self.k_norm = (UnitOffsetNorm(head_dim, eps, **options) for _ in range(2))
        self.indexer = Indexer(width, groups, index_dim, block_size, n, local, block_score, eps, **options)

    @overload
    def forward(
        self, x: Tensor, positions: Tensor | None = None, cu_seqlens: CuSeqlens | None = None, max_seqlen: int | None = None, *,
        cache: LayerStep | None = None, return_loss: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, x: Tensor, positions: Tensor | None = None, cu_seqlens: CuSeqlens | None = None, max_seqlen: int | None = None, *,
        cache: LayerStep | None = None, return_loss: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def forward(
        self, x: Tensor, positions: Tensor | None = None, cu_seqlens: CuSeqlens | None = None, max_seqlen: int | None = None, *,
        cache: LayerStep | None = None, return_loss: bool = False,
    ) -> Any:  # fmt: skip
        """Attend causally from x to itself, or with a cache to earlier tokens, too.

        Args:
            x: [B,S,width].
            positions: [S] or [B,S] int32 or int64 for the rotary positions, by default those in the sequence: from 0 on,
                with a cache from its lengths on. They do not change which keys a row sees.
            cu_seqlens: for a packed batch (docs/varlen.md), x [1,T,width]: [N+1] int32 or int64 on the CPU or on x's
                device, or a list; sequence i is x[0, cu_seqlens[i]:cu_seqlens[i+1]]. Bounds on a GPU are not checked.
            max_seqlen: with cu_seqlens, as of `choose_blocks`: no sequence has more rows.
            cache: step[i] of an `NSACache` for the model's layer i, where x holds new tokens of cached sequences. Without
                gradients, a loss, cu_seqlens or context parallelism.
            return_loss: also return the indexer's loss.

        Returns:
            o [B,S,width], or (o, loss): the mean over rows and groups of the KL divergence, float32, in nats. Its
            gradient reaches the indexer's parameters alone. Padding after the last sequence of a packed batch gets o =
            0, and counts in the mean as a loss of 0.

        Raises:
            ArgumentError: bad input.
            BackendError: as `selection_attention`.
        """
        check_flag("return_loss", return_loss)
        x, bounds = checked_hidden("MSAttention", x, self.width, cu_seqlens, max_seqlen, self.context is not None)
        if cache is not None:
            given = {"cu_seqlens": cu_seqlens is not None, "context_parallel": self.context is not None}
            check_step(cache, x, (1, 1), ALL_KEYS, return_loss=return_loss, warm_up=self.warm_up, **given)
            positions = cache.tensors.position if positions is None else positions
        (x,) = in_autocast_dtype(x)  # once for all projections
        q, k, v, index_q, index_k = self.project(x, positions, bounds)
        if cache is not None:
            of_keys = k.transpose(1, 2), v.transpose(1, 2), index_q.unsqueeze(3), index_k.unsqueeze(2)
            o = cache.attend_indexed(q, *of_keys, self.indexer.rule(), self.backend)
            return self.o_proj(o.flatten(2))
        learns = return_loss or (self.training and self.loss_weight is not None and torch.is_grad_enabled())
        if self.context is None:
            o, loss = self._attend(q, k, v, index_q, index_k, cu_seqlens, max_seqlen, learns=learns)
        else:
            slices = [self._attend(*each, learns=learns) for each in self.context.slices(q, k, v, index_q, index_k)]
            o, loss = torch.cat([o for o, _ in slices], 1), None
            if learns:
                loss = torch.stack([loss for _, loss in slices if loss is not None]).mean()  # slices are of as many rows
        o = o.flatten(2)
        if loss is None:
            return self.o_proj(o)
        self.index_loss = loss.detach()
        if return_loss:
            return self.o_proj(o), loss
        return self.o_proj(_WithLoss.apply(o, loss, self.loss_weight))  # type: ignore[no-untyped-call]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, cu_seqlens: CuSeqlens | None = None,
        max_seqlen: int | None = None, *, learns: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return o [B,S,G,h,D] of what `project` returns, and the indexer's loss if it learns."""
        options: Any = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        keys, selection = max(1, k.shape[2]), None
        if cu_seqlens is not None:
            q, k, v, index_q, index_k = q[0], k[0].transpose(0, 1), v[0].transpose(0, 1), index_q[0], index_k[0]
        if self.warm_up:
            o, lse = sliding_window_attention(q, k, v, keys, return_lse=True, **options)  # dense: a window of all keys
        else:
            selection = self.indexer.choose(index_q, index_k, max_seqlen=max_seqlen, **options)
            if cu_seqlens is None:
                o, lse = selection_attention(q, k, v, selection, return_lse=True, backend=self.backend)
            else:
                o, lse = selection_attention_varlen(q, k, v, selection, cu_seqlens, return_lse=True, backend=self.backend)
        loss = indexer_loss(q, k, lse, index_q, index_k, selection, **options) if learns else None
        return o if cu_seqlens is None else o.unsqueeze(0), loss

    def project(
        self, x: Tensor, positions: Tensor | None = None, bounds: Bounds | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what attention and the indexer take of x [B,S,width], with rotary positions; bounds: of a packed batch.

        The indexer's parts are of x.detach(): the loss teaches the indexer, not the layers before it.

        Returns:
            q [B,S,G,h,D], k and v [B,G,S,D], index_q [B,S,G,Di], index_k [B,S,Di].
        """
        positions = hidden_positions(x, positions, bounds, self.context)
        table = angles_of(positions, self.rotary_dim, x.dtype, self.rotary_base) if self.rotary_dim else None
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.heads, self.head_dim)), table)
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), table)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        index_q, index_k = self.indexer(x.detach(), table)
        return q, k.transpose(1, 2), v.transpose(1, 2), index_q, index_k

    def cached_sizes(self) -> tuple[Any, ...]:
        """Return G, Dk, Dv, dtype and device, and options by name: what an `NSACache` of the layer depends on."""
        weight = self.k_proj.weight
        return self.groups, self.head_dim, self.head_dim, weight.dtype, weight.device, (("index_dim", self.indexer.dim),)

    def extra_repr(self) -> str:
        names = ("width", "groups", "heads", "head_dim", "rotary_dim", "rotary_base", "loss_weight", "backend", "warm_up")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class Indexer(nn.Module):
    """MSA's indexer: index queries [B,S,G,D] and index keys [B,S,D], and the choice of blocks by them.

    Args: as of `MSAttention`.
    """

    def __init__(
        self, width: int, groups: int, dim: int, block_size: int, n: int, local: int, block_score: str, eps: float, **options: Any
    ) -> None:  # fmt: skip
        super().__init__()
        if block_score not in ("max", "sum"):
            raise ArgumentError("block_score", shown(block_score), "'max', 'sum'", "pass one of these")
        self.dim, self.block_size, self.n, self.local, self.block_score = dim, block_size, n, local, block_score
        self.q_proj = nn.Linear(width, groups * dim, bias=False, **options)
        self.k_proj = nn.Linear(width, dim, bias=False, **options)
        self.q_norm, self.k_norm = (UnitOffsetNorm(dim, eps, **options) for _ in range(2))

    def forward(self, x: Tensor, table: Angles | None) -> tuple[Tensor, Tensor]:
        """Return index queries [B,S,G,D] and index keys [B,S,D] of x [B,S,width], normed and rotated."""
        return self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.dim)), table), self.k_norm(self.k_proj(x), table)

    def choose(self, q: Tensor, k: Tensor, **packed: Any) -> Selection:
        """Return the blocks that rotated index queries choose. No gradient.

        Args:
            q: [B,S,G,D], or [T,G,D] of a packed batch.
            k: [B,S_kv,D], or [T,D].
            packed: cu_seqlens and max_seqlen of `choose_blocks`.
        """
        return choose_blocks(q.detach().unsqueeze(-2), k.detach().unsqueeze(1), **self.rule(), **packed)

    def rule(self) -> dict[str, Any]:
        """Return the options of `choose_blocks`."""
        score = {"reduce": self.block_score, "softmax": self.block_score == "sum"}
        return {"block_size": self.block_size, "n": self.n, "local": self.local, **score}

    def extra_repr(self) -> str:
        return f"block_size={self.block_size}, n={self.n}, local={self.local}, block_score={self.block_score!r}"


class UnitOffsetNorm(nn.Module):
    """RMSNorm over the last dimension, in float32, scaled by 1 + weight; then rotary positions. One pass on a GPU.

    Args:
        dim: of the last dimension.
        eps: added to the mean square.
        options: device and dtype of the weight.
    """

    def __init__(self, dim: int, eps: float, **options: Any) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(dim, **options))

    def forward(self, x: Tensor, table: Angles | None) -> Tensor:
        """Return the norm of x [B,S,...,dim] in x's dtype, its first columns rotated by the angles of a table, if given."""
        if x.is_cuda and table is not None and not traces(x, self.weight):
            return normed_and_rotated(x, self.weight, self.eps, table)
        wide = torch.promote_types(x.dtype, torch.float32)
        x = nn.functional.rms_norm(x.to(wide), self.weight.shape, 1.0 + self.weight.to(wide), self.eps).to(x.dtype)
        if table is None:
            return x
        rotary_dim = 2 * table.cos.shape[-1]
        rotated = rotate_by(x[..., :rotary_dim], table)
        return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), -1)


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
