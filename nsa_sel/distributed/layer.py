"""NSA's whole layer on several GPUs: context parallelism splits the sequence, tensor parallelism the KV groups.

Context parallelism: each rank holds slices of the sequence, their rows and the keys of all branches.

For the compressed branch and the window, a slice's rows are the last ones of a sequence that ends with the slice. The
rank receives the compressed keys of all slices before its own, and the window's keys before each slice. The selected
branch runs as in `context_parallel_attention`, for all rows of a rank.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from nsa_sel.attention_layer import NSAttention
from nsa_sel.branches import check_branches
from nsa_sel.choosing import compressed_attention
from nsa_sel.compression import BlockMLP
from nsa_sel.core import transforms
from nsa_sel.core.arguments import check_flag, check_tensors
from nsa_sel.core.call import Rule
from nsa_sel.core.check import check_choose
from nsa_sel.distributed import cost
from nsa_sel.distributed.agreement import compare_call, group_of
from nsa_sel.distributed.context import check_exchange, selected_branch
from nsa_sel.distributed.slices import Cut, Ranges, Reach, Route, rank_rows, with_neighbors
from nsa_sel.errors import ArgumentError
from nsa_sel.gating import gated_sum
from nsa_sel.msa_layer import MSAttention
from nsa_sel.selection import Selection
from nsa_sel.window import sliding_window_attention

_NAME = "context_parallel_nsa_attention"


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

    All ranks of `group` call it, and run its backward pass, in the same order. Rank r of R holds the rows and keys
    [r*S, (r+1)*S) of the sequence, and the compressed keys that begin among them: S / compress_stride, but at the end
    of the sequence only those whose compress_block keys are within it. S is equal on all ranks. torch.compile is not
    supported.

    Args:
        q, gates, q_cmp: as of `nsa_attention`: this rank's rows.
        k_cmp, v_cmp: [B,G,C,Dk] and [B,G,C,Dv], this rank's compressed keys and values.
        k_slc, v_slc, k_win, v_win: [B,G,S,Dk] and [B,G,S,Dv], this rank's keys and values of the selected branch and of
            the window.
        group: process group or DeviceMesh of one dimension, by default all ranks.
        window: keys that a row sees in the window; they may be on several ranks.
        compress_block, compress_stride, block_size, n, first, local, scale, backend: as of `nsa_attention`. A slice is
            a multiple of compress_stride.
        exchange: of the selected branch, as of `context_parallel_attention`.
        both_ends: rank r holds slice r and slice 2R - 1 - r of 2R slices of S / 2 rows (`rank_rows`), and their keys in
            the same order, so that all ranks have equal work. Without it the last rank works longest.

    Returns:
        o [B,S,G,h,Dv] of this rank's rows in q's dtype (under torch.autocast in its dtype).

    Raises:
        ArgumentError: bad input.
        BackendError: no backend may run the call; something traces it.
        NsaSelError: as `context_parallel_attention`.
    """
    options = _Options(Rule(compress_block, compress_stride, block_size, n, first, local), window, scale, backend, exchange, both_ends)
    given = _Tensors(q, q if q_cmp is None else q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates)
    return _attend(_begin(given, options, group, compressed=True))


def context_parallel(model: nn.Module, group: Any = None, exchange: cost.Choice = "auto", both_ends: bool = False) -> nn.Module:
    """Make every `NSAttention` and `MSAttention` of a model take one slice of the sequence per rank, or two.

    Rank r of R then calls the model with the tokens [r*S, (r+1)*S) of each sequence, or with both_ends with those of
    `rank_rows`; targets are of the same rows. A slice is a multiple of compress_stride, and S is equal on all ranks.
    Default positions are those in the whole sequence. Parameters are replicas, or sharded by FSDP: a rank's gradients
    are those of its own rows' loss, to be added over ranks.

    An `MSAttention` sends every rank the keys, values and index keys of all slices before its own; it takes no exchange
    but "auto". Its loss is the mean over the rank's own rows.

    Args:
        model: changed in place; its parameters and their names stay.
        group: process group or DeviceMesh of one dimension, by default all ranks.
        exchange: of the selected branch, as of `context_parallel_attention`.
        both_ends: as of `context_parallel_nsa_attention`.

    Returns:
        model.

    Raises:
        ArgumentError: the model has no such layer, or one that recomputes or does not take these options, the group is
            none, or no such exchange exists.
        NsaSelError: there is no distributed job.
    """
    check_exchange(exchange)
    check_flag("both_ends", both_ends)
    msa = [module for module in model.modules() if isinstance(module, MSAttention)]
    if msa and exchange != "auto":
        raise ArgumentError("exchange", exchange, "auto with MSAttention layers, which receive all earlier keys", "leave it out")
    layers = [module for module in model.modules() if isinstance(module, NSAttention)] if msa else layers_of(model)
    if any(layer.recompute for layer in layers):
        raise ArgumentError(
            "model",
            "with an NSAttention(recompute=True)",
            "layers that keep their branches' outputs",
            "leave recompute out and wrap the layer in torch.utils.checkpoint",
        )
    context = ContextOfLayer(group_of(group, "context_parallel"), exchange, both_ends)
    for layer in (*layers, *msa):
        layer.context = context  # type: ignore[assignment]
    return model


class ContextOfLayer:
    """Attention of an `NSAttention` or `MSAttention` layer whose sequence is split over ranks."""

    def __init__(self, group: dist.ProcessGroup, exchange: cost.Choice, both_ends: bool) -> None:
        self.group, self.exchange, self.both_ends = group, exchange, both_ends

    def positions(self, S: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's rows in the sequence, int64 [S]."""
        return rank_rows(dist.get_world_size(self.group) * S, self.group, both_ends=self.both_ends, device=device)

    def slices(self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor) -> list[tuple[Tensor, ...]]:
        """Return what `MSAttention.project` returns for each slice of this rank: its rows, and the keys of all slices up to
        it."""
        S, parts = k.shape[2], 1 + self.both_ends
        if S % parts:
            raise ArgumentError("x", f"of S = {S} rows", "an even number with both_ends", "pad the sequence")
        cut, rank = Cut(S // parts, self.group.size(), self.both_ends), self.group.rank()
        route = _route_of_all_before(cut, rank)
        ((k, v),) = with_neighbors([k], [v], route, self.group)
        ((every, _),) = with_neighbors([index_k.unsqueeze(1)], [index_k[:, None, :, :0]], route, self.group)
        index_k = every.squeeze(1)
        rows = zip(torch.split(q, cut.size, 1), torch.split(index_q, cut.size, 1), cut.held(rank), strict=True)
        return [(x, k[:, :, : own.stop], v[:, :, : own.stop], index_x, index_k[:, : own.stop]) for x, index_x, own in rows]

    def attend(self, layer: NSAttention, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *others: Tensor, q_cmp: Tensor) -> Tensor:
        """Run the layer's `nsa_attention`; k_cmp [B,S,G,Dk] and v_cmp [B,S,G,Dv] are still to be compressed."""
        options = _Options(layer.rule, layer.window, None, layer.backend, self.exchange, self.both_ends)
        given = _Tensors(q, q_cmp, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), *others)
        of = _begin(given, options, self.group, compressed=False)
        route = _route_before_compression(of.cut, of.group.rank(), layer.rule)
        near = with_neighbors([of.tensors.k_cmp], [of.tensors.v_cmp], route, of.group)
        k_cmp = _joined([layer.compress_k(k.transpose(1, 2)) for k, _ in near], 2)
        v_cmp = _joined([layer.compress_v(v.transpose(1, 2)) for _, v in near], 2)
        return _attend(of._replace(tensors=of.tensors._replace(k_cmp=k_cmp, v_cmp=v_cmp)))


class _Tensors(NamedTuple):
    """This rank's rows q [B,S,G,h,Dk], keys [B,G,S,Dk] and values [B,G,S,Dv] of the branches, and gates [B,S,G,h,3]."""

    q: Tensor
    q_cmp: Tensor
    k_cmp: Tensor  # [B,G,C,Dk], or all S of them before compression
    v_cmp: Tensor
    k_slc: Tensor
    v_slc: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor


class _Options(NamedTuple):
    """Options of a call, equal on all ranks."""

    rule: Rule
    window: int
    scale: float | None
    backend: str | None
    exchange: cost.Choice
    both_ends: bool


class _Slice(NamedTuple):
    """A checked call."""

    tensors: _Tensors
    options: _Options
    cut: Cut
    group: dist.ProcessGroup


def _begin(given: _Tensors, options: _Options, group: Any, *, compressed: bool) -> _Slice:
    """Check this rank's arguments, and compare them with the other ranks' where `compare_call` does.

    Args:
        given: dense tensors of any sizes.
        options: a scale of None becomes the default one.
        group: process group or DeviceMesh of one dimension, None: all ranks.
        compressed: True if k_cmp and v_cmp are compressed keys and values; False if they are still to be compressed.

    Raises:
        ArgumentError, BackendError, NsaSelError: as `context_parallel_nsa_attention`.
    """
    check_tensors(**given._asdict())
    transforms.check_traced(_NAME, *given, compiles=False)
    group = group_of(group, _NAME)
    check_exchange(options.exchange)
    cast = _Tensors._make((*transforms.in_autocast_dtype(*given[:8]), given.gates))
    given = cast._replace(q_cmp=cast.q) if given.q_cmp is given.q else cast
    q, q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = given
    check_branches(q, q_cmp, (v_cmp, v_slc, v_win), (k_slc, k_win), gates, options.window)
    S, ranks = q.shape[1], group.size()
    check_flag("both_ends", options.both_ends)
    if k_slc.shape[2] != S:
        raise ArgumentError(
            "k_slc", f"of {k_slc.shape[2]} positions", f"q's {S} rows", "pass rows and keys of the same slices of the sequence"
        )
    stride = options.rule.compress_stride
    if not S or S % (stride * (1 + options.both_ends)):
        raise ArgumentError(
            "q",
            f"of S = {S} rows",
            f"a multiple of {'2 * ' * options.both_ends}compress_stride = {stride} on each rank",
            "pad the sequence, so that all ranks' slices are of one such length",
        )
    cut = Cut(S // (1 + options.both_ends), ranks, options.both_ends)
    own = sum(map(len, own_compressed_keys(options.rule, cut, group.rank()))) if compressed else S
    if k_cmp.dim() == 4 and k_cmp.shape[2] != own:
        raise ArgumentError(
            "k_cmp",
            f"of {k_cmp.shape[2]} compressed keys",
            f"{own}: those that begin in this rank's {S} keys, and end in the sequence",
            "compress them with the first keys of the next slice",
        )
    k_all, v_all = (_of_all_ranks(x, options.rule.compressed_keys(ranks * S)) for x in (k_cmp, v_cmp))
    _, _, scale, _ = check_choose(q_cmp, k_all, v_all, options.rule, options.scale, None, ranks * S, fake=False)
    options = options._replace(scale=scale)
    compare_call(group, q, _NAME, lambda: {
        **{**options._asdict(), "rule": options.rule.options()}, "compressed": compressed, "dtype": str(q.dtype),
        "sizes": {name: x.shape for name, x in given._asdict().items() if name not in ("k_cmp", "v_cmp")},
        "grads": [name for name, x in given._asdict().items() if x.requires_grad and torch.is_grad_enabled()],
    })  # fmt: skip
    return _Slice(given, options, cut, group)


def own_compressed_keys(rule: Rule, cut: Cut, rank: int) -> Ranges:
    """Return the compressed keys that begin in each slice of a rank and end in the sequence; a slice is a multiple of
    the stride."""
    each, end = cut.size // rule.compress_stride, rule.compressed_keys(cut.number * cut.size)
    return tuple(range(i * each, max(i * each, min((i + 1) * each, end))) for i in cut.of(rank))


def _of_all_ranks(x: Tensor, keys: int) -> Tensor:
    """Return a view as large as all ranks' compressed keys, to check sizes; anything but a 4-d tensor is returned as it
    is."""
    return x if x.dim() != 4 else x.new_empty(1, 1, 1, x.shape[3]).expand(*x.shape[:2], keys, -1)


def _attend(of: _Slice) -> Tensor:
    """Return the gated sum of the three branches of a checked call."""
    q, q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = of.tensors
    rule, window, scale, backend, exchange, both_ends = of.options
    cut, size = of.cut, of.cut.size
    assert scale is not None, "_begin() sets it"

    # Receive the compressed keys up to the end of the rank's last slice, the window's keys of each slice and, if slices
    # are from both ends, the selected branch's keys of one contiguous slice, which its exchange takes.
    keys, values = [k_cmp, k_win], [v_cmp, v_win]
    if both_ends:
        keys, values = [*keys, k_slc], [*values, v_slc]
    route = _route_of_branches(cut, of.group.rank(), rule, window - 1)
    (k_cmp, v_cmp), *near = with_neighbors(keys, values, route, of.group)
    q_pos = None
    if both_ends:
        k_slc, v_slc = near.pop()
        q_pos = cut.positions(of.group.rank(), q.device)

    # The compressed branch of each slice, and the selected branch of all rows.
    rows = torch.split(q, size, 1)
    compressed, ranges = [], []
    for held, x in zip(cut.held(of.group.rank()), rows if q_cmp is q else torch.split(q_cmp, size, 1), strict=True):
        seen = rule.compressed_keys(held.stop)
        k, v = k_cmp[:, :, :seen], v_cmp[:, :, :seen]
        o, selection = compressed_attention(x, k, v, scale=scale, S_kv=held.stop, **rule.options())
        compressed.append(o)
        ranges.append(selection.ranges)
    if both_ends:
        selection = Selection.from_ranges(torch.cat(ranges, 1), rule.block_size, disjoint=True)
    selected = selected_branch(q, k_slc, v_slc, selection, q_pos, scale, of.group, backend, exchange)

    # The window of each slice, and the sum.
    slices = zip(compressed, torch.split(selected, size, 1), rows, near, torch.split(gates, size, 1), strict=True)
    return _joined(
        [gated_sum(o, o_slc, sliding_window_attention(x, k, v, window, scale=scale), gate) for o, o_slc, x, (k, v), gate in slices], 1
    )


@functools.lru_cache(maxsize=256)
def _route_before_compression(cut: Cut, rank: int, rule: Rule) -> Route:
    """Return the route of keys to be compressed: a block that begins in a slice may end in the next ones."""
    after = rule.compress_block - rule.compress_stride
    return Route.of([Reach.of(cut.ranks, cut.held, lambda each: cut.near(each, after=after))], rank)


@functools.lru_cache(maxsize=256)
def _route_of_all_before(cut: Cut, rank: int) -> Route:
    """Return the route of the keys of all slices up to each rank's last one."""
    return Route.of([Reach.of(cut.ranks, cut.held, lambda each: (range(cut.held(each)[-1].stop),))], rank)


@functools.lru_cache(maxsize=256)
def _route_of_branches(cut: Cut, rank: int, rule: Rule, before: int) -> Route:
    """Return the route of the keys that `_attend` receives; before: keys that a row sees before itself."""
    reaches = [
        Reach.of(
            cut.ranks,
            lambda rank: own_compressed_keys(rule, cut, rank),
            lambda rank: (range(rule.compressed_keys(cut.held(rank)[-1].stop)),),
        ),
        Reach.of(cut.ranks, cut.held, lambda rank: cut.near(rank, before=before)),
    ]
    if cut.both_ends:
        reaches.append(Reach.of(cut.ranks, cut.held, cut.in_turn().held))
    return Route.of(reaches, rank)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# Tensor parallelism


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Split every `NSAttention` of a model by KV groups over the ranks of a mesh.

    `q`, `kv` and `gate` are split by rows, which are ordered by groups first (ColwiseParallel), `out` by columns
    (RowwiseParallel). Each layer takes equal hidden states on all ranks, and returns equal ones. There is one
    all-reduce forward, and one for dx backward. Every rank holds the compression MLP in full and applies it to its own
    groups; the backward pass adds its gradients over ranks. All parameters become DTensors. FSDP2 may follow.

    Args:
        model: changed in place; the names of parameters stay.
        mesh: DeviceMesh of one dimension; its size divides the number of groups.

    Returns:
        model.

    Raises:
        ArgumentError: the model has no `NSAttention`, or one whose groups the ranks do not divide.
    """
    layers = layers_of(model)
    for layer in layers:
        if layer.groups % mesh.size():
            raise ArgumentError(
                "mesh",
                f"of {mesh.size()} ranks",
                f"a divisor of groups = {layer.groups}",
                "use fewer ranks, and split the batch or the sequence over the rest",
            )
    from torch.distributed.tensor import distribute_module  # its import takes 0.5 s
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in layers:
        layer.register_forward_pre_hook(functools.partial(_shared_input, mesh))
        by_groups = {name: ColwiseParallel() for name in ("q", "kv", "gate")}
        parallelize_module(layer, mesh, {**by_groups, "out": RowwiseParallel()})
        for compress in (layer.compress_k, layer.compress_v):
            if isinstance(compress, BlockMLP):
                distribute_module(compress, mesh)  # a replica on each rank
                compress.of_rank = _replica
    return model


def layers_of(model: nn.Module) -> list[NSAttention]:
    """Return the NSAttention layers of a model, itself included. Raises ArgumentError if there is none."""
    layers = [module for module in model.modules() if isinstance(module, NSAttention)]
    if not layers:
        raise ArgumentError("model", f"a {type(model).__name__}", "one with NSAttention layers", "pass a model that has them, or a layer")
    return layers


def _shared_input(mesh: Any, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wrap x in one DTensor for `q`, `kv` and `gate`, so that its gradient is added over ranks once instead of three
    times."""
    from torch.distributed.tensor import DTensor, Replicate

    plain = inputs and isinstance(inputs[0], Tensor) and not isinstance(inputs[0], DTensor)
    return (DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False), *inputs[1:]) if plain else inputs


def _replica(parameter: Any) -> Tensor:
    """Return the plain tensor of a replicated DTensor. Its gradient is a partial sum, which is added over ranks."""
    from torch.distributed.tensor import Partial, Replicate

    return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])  # type: ignore[no-any-return]
