"""`NSAttention`: NSA's attention as a layer of a model, from hidden states to hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nsa_sel.branches import nsa_attention
from nsa_sel.caching.step import LayerStep, check_step
from nsa_sel.compression import BlockMean, BlockMLP
from nsa_sel.core.arguments import CuSeqlens, check_flag, check_positive
from nsa_sel.core.call import Rule
from nsa_sel.core.check import check_rule
from nsa_sel.core.packed import checked_hidden, hidden_positions
from nsa_sel.core.transforms import in_autocast_dtype
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.projection import Heads, Parts, check_dtype, joins, project, split_columns
from nsa_sel.rotary import angles, angles_of, base_of, kept_and_rotated, rotate, rotate_by

Rotary = Callable[[Tensor, Tensor], Tensor]


class NSAttention(nn.Module):
    """Native Sparse Attention (arXiv 2502.11089, Fig. 2) with its projections, compression, rotary positions and gates.

    One projection makes the queries of all branches; keys and values are projected for each branch apart (`kv`). The
    gates are the sigmoid of a projection of x. All of them are ordered by groups first, so that tensor parallelism cuts
    their rows by groups.

    Rotary positions rotate q and the keys of the selected branch and of the window. The compressed branch takes q and
    keys without them: a compressed key stands for compress_block positions at once, so no one angle is right for it,
    and blocks are then chosen by content, whatever their distance. `BlockMLP` learns the order inside a block.

    Args:
        width: of hidden states.
        groups: G, KV groups.
        heads: h, query heads of a group.
        head_dim: Dk of queries and keys.
        value_dim: Dv of values, by default head_dim.
        compress_block, compress_stride, block_size, n, first, local: as of `compressed_attention`.
        window: keys that a row sees in the sliding window, its own among them.
        compression: "mlp" (Eq. 7: `nsa_sel.compression.BlockMLP`) or "mean", which has no parameters.
        rotary: True for `nsa_sel.rotary.rotate`, False for no positions, or a callable (x [B,S,...,Dk], positions [S]
            or [B,S]) -> as x.
        bias: whether the projections of queries, keys, values and the output have one; the gates' always has.
        backend: the name of a backend to force for the selected branch.
        recompute: as of `nsa_attention`.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: sizes that do not fit together.
    """

    def __init__(
        self,
        width: int,
        groups: int,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        compress_block: int = 32,
        compress_stride: int = 16,
        block_size: int = 64,
        n: int = 16,
        first: int = 1,
        local: int = 2,
        window: int = 512,
        compression: Literal["mlp", "mean"] = "mlp",
        rotary: bool | Rotary = True,
        bias: bool = False,
        backend: str | None = None,
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"width": width, "groups": groups, "heads": heads, "head_dim": head_dim, "value_dim": value_dim, "window": window}
        for name, size in sizes.items():
            check_positive(name, size)
        self.rule = Rule(compress_block, compress_stride, block_size, n, first, local)
        check_rule(self.rule)
        check_flag("bias", bias)
        check_flag("recompute", recompute)
        if not (rotary is None or isinstance(rotary, bool) or callable(rotary)):
            raise ArgumentError(
                "rotary", shown(rotary), "True, False or a callable", "pass functools.partial(nsa_sel.rotary.rotate, base=...)"
            )
        if rotary is True and head_dim % 2:
            raise ArgumentError("head_dim", head_dim, "an even number with rotary positions", "pass an even one, or rotary=False")
        self.width, self.groups, self.heads, self.head_dim, self.value_dim = width, groups, heads, head_dim, value_dim
        self.window, self.compression, self.backend, self.recompute = window, compression, backend, recompute
        self.context: Any = None  # where ranks hold slices of the sequence: set by nsa_sel.distributed.context_parallel
        self.rotary: Rotary | None = rotate if rotary is True else rotary or None
        options: Any = {"device": device, "dtype": dtype}
        self.q = nn.Linear(width, groups * heads * head_dim, bias, **options)
        self.kv = nn.Linear(width, groups * 3 * (head_dim + value_dim), bias, **options)  # of a group: k, v of each branch in turn
        self.gate = nn.Linear(width, groups * heads * 3, **options)
        self.compress_k, self.compress_v = self._compression(head_dim, False, options), self._compression(value_dim, True, options)
        self.out = nn.Linear(groups * heads * value_dim, width, bias, **options)

    def _compression(self, dim: int, bias: bool, options: Any) -> BlockMLP | BlockMean:
        if self.compression == "mlp":
            return BlockMLP(dim, self.rule.compress_block, self.rule.compress_stride, bias=bias, **options)
        if self.compression == "mean":
            return BlockMean(self.rule.compress_block, self.rule.compress_stride)
        raise ArgumentError("compression", shown(self.compression), "'mlp', 'mean'", "pass one of these, or call nsa_attention yourself")

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cu_seqlens: CuSeqlens | None = None,
        max_seqlen: int | None = None,
        *,
        cache: LayerStep | None = None,
    ) -> Tensor:
        """Causal attention of x to itself.

        Args:
            x: [B,S,width].
            positions: [S] or [B,S] int32 or int64 for the rotary positions, by default 0 to S - 1, with context
                parallelism those in the whole sequence, in a packed batch from 0 on in each sequence. They do not
                change who sees whom.
            cu_seqlens: for a packed batch (docs/varlen.md), x [1,T,width]: [N+1] int32 or int64 on the CPU or on x's
                device, or a list; sequence i is x[0, cu_seqlens[i]:cu_seqlens[i+1]]. Bounds on a GPU are not checked.
                Not with context parallelism, nor with recompute=True.
            max_seqlen: with cu_seqlens, as of `compressed_attention`: no sequence has more rows.
            cache: step[i] of an `NSACache` for the model's layer i, where x holds new tokens of cached sequences.
                Positions then are those in the sequences. Without gradients, and not with cu_seqlens or context
                parallelism.

        Returns:
            [B,S,width]; 0 (or the output's bias) after the last sequence of a packed batch, and for rows of a cache
            without a token.

        Raises:
            ArgumentError: bad input.
            BackendError: as `nsa_attention`.
        """
        x, bounds = checked_hidden("NSAttention", x, self.width, cu_seqlens, max_seqlen, self.context is not None)
        if cache is not None:
            check_step(cache, x, self.rule[:2], self.window, cu_seqlens=cu_seqlens is not None, context_parallel=self.context is not None)
            positions = cache.tensors.position if positions is None else positions
        (x,) = in_autocast_dtype(x)  # once for all three projections
        check_dtype(x, self.q)
        if self.rotary is not None or positions is not None:
            positions = hidden_positions(x, positions, bounds, self.context)
        parts = self._parts(x, positions, cache is None)
        if cache is not None:
            o = cache.attend(parts, (self.compress_k, self.compress_v), self.rule, self.backend)
            return self.out(o.flatten(2))  # type: ignore[no-any-return]
        q_cmp, q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = parts
        options: Any = {"window": self.window, "backend": self.backend, "recompute": self.recompute, **self.rule.options()}
        if cu_seqlens is not None:
            compressed = self.compress_k(k_cmp[0], cu_seqlens), self.compress_v(v_cmp[0], cu_seqlens)
            o = nsa_attention(
                q[0], *compressed, k_slc[0], v_slc[0], k_win[0], v_win[0], gates[0], q_cmp=q_cmp[0], cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen, **options,
            ).unsqueeze(0)  # fmt: skip
            return self.out(o.flatten(2))  # type: ignore[no-any-return]
        others = *(y.transpose(1, 2) for y in (k_slc, v_slc, k_win, v_win)), gates
        if self.context is None:
            o = nsa_attention(q, self.compress_k(k_cmp), self.compress_v(v_cmp), *others, q_cmp=q_cmp, **options)
        else:
            o = self.context.attend(self, q, k_cmp, v_cmp, *others, q_cmp=q_cmp)
        return self.out(o.flatten(2))  # type: ignore[no-any-return]

    def _parts(self, x: Tensor, positions: Tensor | None, many: bool) -> Parts:
        """Return the branches' inputs. q and the keys of the selected branch and the window are rotated.

        many: whether x has rows enough that copying the weights into one takes little of the time.
        """
        base = None if self.rotary is None else base_of(self.rotary)
        layers, heads = (self.q, self.kv, self.gate), Heads(self.heads, self.head_dim, self.value_dim)
        if positions is not None and base is not None and many and joins(x, layers):
            return project(x, angles_of(positions, self.head_dim, x.dtype, base), layers, heads)
        q = self.q(x).unflatten(-1, (-1, self.heads, self.head_dim))
        columns = heads.columns()
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = split_columns(self.kv(x).unflatten(-1, (-1, sum(columns))), columns)
        gates = self.gate(x).sigmoid().unflatten(-1, (-1, self.heads, 3))
        q_cmp = q
        if self.rotary is not None and positions is not None and base is None:
            q, k_slc, k_win = (self.rotary(x, positions) for x in (q, k_slc, k_win))
        elif positions is not None and base is not None:
            table = angles(q, positions, base)
            q_cmp, q = kept_and_rotated(q, table)
            k_slc, k_win = rotate_by(k_slc, table), rotate_by(k_win, table)
        return Parts(q_cmp, q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates)

    def cached_sizes(self) -> tuple[Any, ...]:
        """Return G, Dk, Dv, dtype and device, and options by name: what an `NSACache` of the layer depends on."""
        block, stride, *_ = self.rule
        weight, options = self.kv.weight, (("compress_block", block), ("compress_stride", stride), ("window", self.window))
        return self.groups, self.head_dim, self.value_dim, weight.dtype, weight.device, options

    def extra_repr(self) -> str:
        names = ("width", "groups", "heads", "head_dim", "value_dim", "window", "compression", "backend", "recompute")
        options = {**{name: getattr(self, name) for name in names}, **self.rule.options()}
        options["rotary"] = True if self.rotary is rotate else self.rotary or False
        return ", ".join(f"{name}={value!r}" for name, value in options.items())
