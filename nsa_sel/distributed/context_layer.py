"""Context parallelism of NSA's whole layer: each rank holds one slice of the sequence, its rows and the keys of all branches.

To each branch a rank's rows are the last ones of a sequence that ends with their slice. The rank receives the compressed keys of all
ranks before it and the window's last keys; the selected branch is `context_parallel_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from nsa_sel.attention_layer import NSAttention
from nsa_sel.compressed import compressed_attention
from nsa_sel.core.choose_call import Rule
from nsa_sel.core.gating import gated_sum
from nsa_sel.distributed import cost
from nsa_sel.distributed.agreement import group_of
from nsa_sel.distributed.context import check_exchange, context_parallel_attention
from nsa_sel.distributed.exchange_near import Reach, with_neighbors
from nsa_sel.distributed.layer_slice import Options, Slice, Tensors, begin
from nsa_sel.distributed.tensor import layers_of
from nsa_sel.errors import ArgumentError
from nsa_sel.window import sliding_window_attention


def context_parallel_nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    group: Any = None,
    window: int = 512,
    compress_block: int = 32,
    compress_stride: int = 16,
    block_size: int = 64,
    n: int = 16,
    first: int = 1,
    local: int = 2,
    scale: float | None = None,
    q_cmp: Tensor | None = None,
    backend: str | None = None,
    exchange: cost.Choice = "auto",
) -> Tensor:
    """`nsa_attention` of a sequence that is split into one slice per rank.

    All ranks of `group` call it, and run its backward pass, in the same order. Rank r of R holds the rows and keys [r*S, (r+1)*S) of the
    sequence, and the compressed keys that begin among them: S / compress_stride, but on the last ranks only those whose compress_block
    keys are within the sequence. S is equal on all ranks. torch.compile is not supported.

    Args:
        q, gates, q_cmp: as of `nsa_attention`: this rank's rows.
        k_cmp, v_cmp: [B,G,C,Dk] and [B,G,C,Dv], this rank's compressed keys and values.
        k_slc, v_slc, k_win, v_win: [B,G,S,Dk] and [B,G,S,Dv], this rank's keys and values of the selected branch and of the window.
        group: process group or DeviceMesh of one dimension, by default all ranks.
        window: keys that a row sees in the window; they may be on several ranks.
        compress_block, compress_stride, block_size, n, first, local, scale, backend: as of `nsa_attention`. S is a multiple of
            compress_stride.
        exchange: of the selected branch, as of `context_parallel_attention`.

    Returns:
        o [B,S,G,h,Dv] of this rank's rows in q's dtype (under torch.autocast in its dtype).

    Raises:
        ArgumentError: bad input.
        BackendError: no backend may run the call; something traces it.
        NsaSelError: as `context_parallel_attention`.
    """
    options = Options(Rule(compress_block, compress_stride, block_size, n, first, local), window, scale, backend, exchange)
    given = Tensors(q, q if q_cmp is None else q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates)
    return _attend(begin(given, options, group, compressed=True))


def context_parallel(model: nn.Module, group: Any = None, exchange: cost.Choice = "auto") -> nn.Module:
    """Make every `NSAttention` of a model take one slice of the sequence per rank.

    Rank r of R then calls the model with the tokens [r*S, (r+1)*S) of each sequence; S is a multiple of compress_stride and equal on all
    ranks. Default positions are those in the whole sequence. Parameters are replicas, or sharded by FSDP: a rank's gradients are those of
    its own rows' loss, to be added over ranks.

    Args:
        model: changed in place; its parameters and their names stay.
        group: process group or DeviceMesh of one dimension, by default all ranks.
        exchange: of the selected branch, as of `context_parallel_attention`.

    Returns:
        model.

    Raises:
        ArgumentError: the model has no `NSAttention`, or one that recomputes, the group is none, or no such exchange exists.
        NsaSelError: there is no distributed job.
    """
    check_exchange(exchange)
    layers = layers_of(model)
    if any(layer.recompute for layer in layers):
        remedy = "leave recompute out and wrap the layer in torch.utils.checkpoint"
        raise ArgumentError("model", "with an NSAttention(recompute=True)", "layers that keep their branches' outputs", remedy)
    for layer in layers:
        layer.context = ContextOfLayer(group_of(group, "context_parallel"), exchange)
    return model


class ContextOfLayer:
    """What an `NSAttention` does otherwise where ranks hold slices of the sequence."""

    def __init__(self, group: dist.ProcessGroup, exchange: cost.Choice) -> None:
        self.group, self.exchange = group, exchange

    def positions(self, S: int, device: torch.device) -> Tensor:
        """[S] int64, of this rank's rows in the sequence."""
        first = dist.get_rank(self.group) * S
        return torch.arange(first, first + S, device=device)

    def attend(self, layer: NSAttention, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *others: Tensor, q_cmp: Tensor) -> Tensor:
        """The layer's `nsa_attention`; k_cmp [B,S,G,Dk] and v_cmp [B,S,G,Dv] are still to be compressed."""
        options = Options(layer.rule, layer.window, None, layer.backend, self.exchange)
        given = Tensors(q, q_cmp, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), *others)
        of = begin(given, options, self.group, compressed=False)
        after = layer.rule.compress_block - layer.rule.compress_stride  # a block that begins in this slice may end in the next ones
        near = with_neighbors(of.tensors.k_cmp, of.tensors.v_cmp, Reach(of.S, of.ranks, after=after), of.agreed)
        k_cmp, v_cmp = (compress(x.transpose(1, 2)) for compress, x in zip((layer.compress_k, layer.compress_v), near, strict=True))
        return _attend(of._replace(tensors=of.tensors._replace(k_cmp=k_cmp, v_cmp=v_cmp)))


def _attend(of: Slice) -> Tensor:
    """The three branches of a checked call, and their gated sum."""
    q, q_cmp, _, _, k_slc, v_slc, k_win, v_win, gates = of.tensors
    rule, window, scale, backend, exchange = of.options
    k_cmp, v_cmp = _compressed_before(of)
    compressed, selection = compressed_attention(q_cmp, k_cmp, v_cmp, scale=scale, S_kv=(of.rank + 1) * of.S, **rule._asdict())
    k_win, v_win = with_neighbors(k_win, v_win, Reach(of.S, of.ranks, before=window - 1), of.agreed)
    sharing: Any = {"group": of.group, "exchange": exchange}
    selected = context_parallel_attention(q, k_slc, v_slc, selection, scale=scale, backend=backend, **sharing)
    return gated_sum(compressed, selected, sliding_window_attention(q, k_win, v_win, window, scale=scale), gates)


def _compressed_before(of: Slice) -> tuple[Tensor, Tensor]:
    """The compressed keys and values that this rank's rows see: those that end in its slice or before it."""
    rule, each = of.options.rule, of.S // of.options.rule.compress_stride
    own_k, own_v = (nn.functional.pad(x, (0, 0, 0, each - x.shape[2])) for x in (of.tensors.k_cmp, of.tensors.v_cmp))
    k, v = with_neighbors(own_k, own_v, Reach(each, of.ranks, before=of.ranks * each), of.agreed)
    seen = rule.compressed_keys((of.rank + 1) * of.S)
    return k[:, :, :seen], v[:, :, :seen]
