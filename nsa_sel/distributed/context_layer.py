"""Context parallelism of NSA's whole layer: each rank holds slices of the sequence, their rows and the keys of all branches.

To the compressed branch and the window a slice's rows are the last ones of a sequence that ends with it. The rank receives the compressed
keys of all slices before its own and the window's last keys; the selected branch is `context_parallel_attention`, for all rows of a rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from nsa_sel.attention_layer import NSAttention
from nsa_sel.compressed import compressed_attention
from nsa_sel.core import transforms
from nsa_sel.core.arguments import check_flag
from nsa_sel.core.choose_call import Rule
from nsa_sel.distributed import cost
from nsa_sel.distributed.agreement import Agreed, between_exchanges, group_of
from nsa_sel.distributed.context import attend_within, check_exchange
from nsa_sel.distributed.cut import Cut, Ranges, rank_rows
from nsa_sel.distributed.exchange_near import Reach, Route, with_neighbors
from nsa_sel.distributed.layer_slice import NAME, Options, Slice, Tensors, begin, own_compressed_keys
from nsa_sel.distributed.tensor import layers_of
from nsa_sel.errors import ArgumentError
from nsa_sel.gating import gated_sum
from nsa_sel.selection import Selection
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
    both_ends: bool = False,
) -> Tensor:
    """`nsa_attention` of a sequence that is split into one slice per rank, or two.

    All ranks of `group` call it, and run its backward pass, in the same order. Rank r of R holds the rows and keys [r*S, (r+1)*S) of the
    sequence, and the compressed keys that begin among them: S / compress_stride, but at the end of the sequence only those whose
    compress_block keys are within it. S is equal on all ranks. torch.compile is not supported.

    Args:
        q, gates, q_cmp: as of `nsa_attention`: this rank's rows.
        k_cmp, v_cmp: [B,G,C,Dk] and [B,G,C,Dv], this rank's compressed keys and values.
        k_slc, v_slc, k_win, v_win: [B,G,S,Dk] and [B,G,S,Dv], this rank's keys and values of the selected branch and of the window.
        group: process group or DeviceMesh of one dimension, by default all ranks.
        window: keys that a row sees in the window; they may be on several ranks.
        compress_block, compress_stride, block_size, n, first, local, scale, backend: as of `nsa_attention`. A slice is a multiple of
            compress_stride.
        exchange: of the selected branch, as of `context_parallel_attention`.
        both_ends: rank r holds slice r and slice 2R - 1 - r of 2R slices of S / 2 rows (`rank_rows`), and their keys in the same order,
            so that all ranks have equal work. Without it the last rank works longest.

    Returns:
        o [B,S,G,h,Dv] of this rank's rows in q's dtype (under torch.autocast in its dtype).

    Raises:
        ArgumentError: bad input.
        BackendError: no backend may run the call; something traces it.
        NsaSelError: as `context_parallel_attention`.
    """
    options = Options(Rule(compress_block, compress_stride, block_size, n, first, local), window, scale, backend, exchange, both_ends)
    given = Tensors(q, q if q_cmp is None else q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates)
    return _attend(begin(given, options, group, compressed=True))


def context_parallel(model: nn.Module, group: Any = None, exchange: cost.Choice = "auto", both_ends: bool = False) -> nn.Module:
    """Make every `NSAttention` of a model take one slice of the sequence per rank, or two.

    Rank r of R then calls the model with the tokens [r*S, (r+1)*S) of each sequence, or with both_ends with those of `rank_rows`; targets
    are of the same rows. A slice is a multiple of compress_stride, and S is equal on all ranks. Default positions are those in the whole
    sequence. Parameters are replicas, or sharded by FSDP: a rank's gradients are those of its own rows' loss, to be added over ranks.

    Args:
        model: changed in place; its parameters and their names stay.
        group: process group or DeviceMesh of one dimension, by default all ranks.
        exchange: of the selected branch, as of `context_parallel_attention`.
        both_ends: as of `context_parallel_nsa_attention`.

    Returns:
        model.

    Raises:
        ArgumentError: the model has no `NSAttention`, or one that recomputes, the group is none, or no such exchange exists.
        NsaSelError: there is no distributed job.
    """
    check_exchange(exchange)
    check_flag("both_ends", both_ends)
    layers = layers_of(model)
    if any(layer.recompute for layer in layers):
        remedy = "leave recompute out and wrap the layer in torch.utils.checkpoint"
        raise ArgumentError("model", "with an NSAttention(recompute=True)", "layers that keep their branches' outputs", remedy)
    for layer in layers:
        layer.context = ContextOfLayer(group_of(group, "context_parallel"), exchange, both_ends)
    return model


class ContextOfLayer:
    """What an `NSAttention` does otherwise where ranks hold slices of the sequence."""

    def __init__(self, group: dist.ProcessGroup, exchange: cost.Choice, both_ends: bool) -> None:
        self.group, self.exchange, self.both_ends = group, exchange, both_ends

    def positions(self, S: int, device: torch.device) -> Tensor:
        """[S] int64, of this rank's rows in the sequence."""
        return rank_rows(dist.get_world_size(self.group) * S, self.group, both_ends=self.both_ends, device=device)

    def attend(self, layer: NSAttention, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *others: Tensor, q_cmp: Tensor) -> Tensor:
        """The layer's `nsa_attention`; k_cmp [B,S,G,Dk] and v_cmp [B,S,G,Dv] are still to be compressed."""
        options = Options(layer.rule, layer.window, None, layer.backend, self.exchange, self.both_ends)
        given = Tensors(q, q_cmp, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), *others)
        of = begin(given, options, self.group, compressed=False)
        route = _route_before_compression(of.cut, of.rank, layer.rule)
        with between_exchanges(of.group):
            near, of.exchanges["before compression"] = with_neighbors([of.tensors.k_cmp], [of.tensors.v_cmp], route, of.group)
            k_cmp = _joined([layer.compress_k(k.transpose(1, 2)) for k, _ in near], 2)
            v_cmp = _joined([layer.compress_v(v.transpose(1, 2)) for _, v in near], 2)
        return _attend(of._replace(tensors=of.tensors._replace(k_cmp=k_cmp, v_cmp=v_cmp)))


def _attend(of: Slice) -> Tensor:
    """The three branches of a checked call, and their gated sum."""
    window, scale, size = of.options.window, of.options.scale, of.cut.size
    rows = torch.split(of.tensors.q, size, 1)
    with between_exchanges(of.group):
        compressed, selected, near = _branches_with_exchanges(of, rows)
    parts = zip(compressed, torch.split(selected, size, 1), rows, near, torch.split(of.tensors.gates, size, 1), strict=True)
    sums = [gated_sum(each, own, sliding_window_attention(x, k, v, window, scale=scale), gate) for each, own, x, (k, v), gate in parts]
    o = _joined(sums, 1)
    if o.requires_grad:
        o.register_hook(functools.partial(_before_backward, of.agreed))  # type: ignore[no-untyped-call]
    return o


def _branches_with_exchanges(of: Slice, rows: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor, list[tuple[Tensor, Tensor]]]:
    """The compressed branch of each slice, the selected branch of all rows, and keys and values of each slice's window.

    rows: of each slice.
    """
    q, q_cmp, _, _, k_slc, v_slc, *_ = of.tensors
    rule, _, scale, backend, exchange, both_ends = of.options
    cut, q_pos = of.cut, None
    assert scale is not None, "begin() fills it in"
    (k_cmp, v_cmp), *near = _received(of)
    chosen = []
    for each, x in zip(cut.held(of.rank), rows if q_cmp is q else torch.split(q_cmp, cut.size, 1), strict=True):
        seen = rule.compressed_keys(each.stop)
        k, v = k_cmp[:, :, :seen], v_cmp[:, :, :seen]
        chosen.append(compressed_attention(x, k, v, scale=scale, S_kv=each.stop, **rule._asdict()))
    selection = chosen[0][1]
    if both_ends:
        k_slc, v_slc = near.pop()
        selection = Selection.from_ranges(torch.cat([each.ranges for _, each in chosen], 1), rule.block_size, disjoint=True)
        q_pos = cut.positions(of.rank, q.device)
    selected = attend_within(of.agreed, q, k_slc, v_slc, selection, q_pos, scale, backend, exchange)
    of.exchanges["selected branch"] = selected.grad_fn
    return [o for o, _ in chosen], selected, near


def _before_backward(agreed: Agreed, do: Tensor) -> None:
    """Before the first of its exchanges: all of them are behind o."""
    if torch.is_grad_enabled():
        transforms.refuse_second_derivative(NAME)
    agreed.before_backward(do.device)


def _received(of: Slice) -> list[tuple[Tensor, Tensor]]:
    """Keys and values: the compressed ones up to the end of the rank's last slice; the window's, of each slice; from both ends those of
    the selected branch, of one slice a rank, as its exchanges take them."""
    _, _, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, _ = of.tensors
    keys, values = [k_cmp, k_win], [v_cmp, v_win]
    if of.cut.both_ends:
        keys, values = [*keys, k_slc], [*values, v_slc]
    route = _route_of_branches(of.cut, of.rank, of.options.rule, of.options.window - 1)
    near, of.exchanges["keys of slices before"] = with_neighbors(keys, values, route, of.group)
    return near


@functools.lru_cache(maxsize=256)
def _route_before_compression(cut: Cut, rank: int, rule: Rule) -> Route:
    """A block that begins in a slice may end in the next ones."""
    after = rule.compress_block - rule.compress_stride
    return Route.of([Reach.of(cut.ranks, cut.held, lambda each: cut.near(each, after=after))], rank)


@functools.lru_cache(maxsize=256)
def _route_of_branches(cut: Cut, rank: int, rule: Rule, before: int) -> Route:
    """As `_received`; before: keys that a row sees before itself."""

    def compressed_before(rank: int) -> Ranges:
        return (range(rule.compressed_keys(cut.held(rank)[-1].stop)),)

    reaches = [
        Reach.of(cut.ranks, lambda rank: own_compressed_keys(rule, cut, rank), compressed_before),
        Reach.of(cut.ranks, cut.held, lambda rank: cut.near(rank, before=before)),
    ]
    if cut.both_ends:
        reaches.append(Reach.of(cut.ranks, cut.held, cut.in_turn().held))
    return Route.of(reaches, rank)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
