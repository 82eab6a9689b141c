"""One rank's part of a layer's call: its tensors and options, checked, and agreed on with the other ranks before anything is exchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.graph import Node

from nsa_sel.branches import check_branches
from nsa_sel.core import transforms
from nsa_sel.core.arguments import check_flag, check_tensors
from nsa_sel.core.call import device_info, is_aligned
from nsa_sel.core.check import check_choose
from nsa_sel.core.choose import request_of
from nsa_sel.core.choose_call import Rule
from nsa_sel.core.decide import forced
from nsa_sel.distributed import cost
from nsa_sel.distributed.agreement import Agreed, agree, begin_call, group_of
from nsa_sel.distributed.context import check_exchange
from nsa_sel.distributed.cut import Cut, Ranges
from nsa_sel.errors import ArgumentError

NAME = "context_parallel_nsa_attention"


class Tensors(NamedTuple):
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


class Options(NamedTuple):
    """The same on all ranks."""

    rule: Rule
    window: int
    scale: float | None
    backend: str | None
    exchange: cost.Choice
    both_ends: bool


class Slice(NamedTuple):
    """A checked call."""

    tensors: Tensors
    options: Options
    cut: Cut
    agreed: Agreed

    @property
    def group(self) -> dist.ProcessGroup:
        return self.agreed.group

    @property
    def exchanges(self) -> dict[str, Node | None]:
        """That the call has made, as of `Agreed`."""
        assert self.agreed.exchanges is not None
        return self.agreed.exchanges

    @property
    def rank(self) -> int:
        return self.group.rank()


def begin(given: Tensors, options: Options, group: Any, *, compressed: bool) -> Slice:
    """Check this rank's arguments, and agree with the other ranks.

    Args:
        given: dense tensors of any sizes.
        options: a scale of None becomes the default one.
        group: process group or DeviceMesh of one dimension, None: all ranks.
        compressed: whether k_cmp and v_cmp are.

    Raises:
        ArgumentError, BackendError, NsaSelError: as `context_parallel_nsa_attention`.
    """
    check_tensors(**given._asdict())
    transforms.check_eager(NAME, *given)
    group = group_of(group, NAME)
    begin_call(group)
    check_exchange(options.exchange)
    cast = Tensors._make((*transforms.in_autocast_dtype(*given[:8]), given.gates))
    given = cast._replace(q_cmp=cast.q) if given.q_cmp is given.q else cast
    q, q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = given
    check_branches(q, q_cmp, (v_cmp, v_slc, v_win), (k_slc, k_win), gates, options.window)
    S, ranks = q.shape[1], group.size()
    check_flag("both_ends", options.both_ends)
    _check_sizes(S, k_slc.shape[2], options)
    cut = Cut(S // (1 + options.both_ends), ranks, options.both_ends)
    own = sum(map(len, own_compressed_keys(options.rule, cut, group.rank()))) if compressed else S
    if k_cmp.dim() == 4 and k_cmp.shape[2] != own:
        allowed = f"{own}: those that begin in this rank's {S} keys, and end in the sequence"
        raise ArgumentError("k_cmp", f"of {k_cmp.shape[2]} compressed keys", allowed, "compress them with the first keys of the next slice")
    k_all, v_all = (_of_all_ranks(x, options.rule.compressed_keys(ranks * S)) for x in (k_cmp, v_cmp))
    _, S_kv, scale, _ = check_choose(q_cmp, k_all, v_all, options.rule, options.scale, None, ranks * S, fake=False)
    options = options._replace(scale=scale)
    grads = [name for name, x in given._asdict().items() if x.requires_grad and torch.is_grad_enabled()]
    request = msgspec.structs.replace(request_of(q_cmp, k_all, v_all, options.rule, S_kv, bool(grads)), aligned=True)
    facts = dict[str, Any](
        window=options.window, scale=scale, exchange=options.exchange, compressed=compressed, grads=", ".join(grads),
        first=options.rule.first, local=options.rule.local, both_ends=options.both_ends,
        # With these, all facts of the selected branch, which does not compare its own:
        selected_backend=options.backend, use_backend=forced(), q_aligned=is_aligned(q.resolve_neg()),
    )  # fmt: skip
    return Slice(given, options, cut, agree(request, device_info(q.device), group, None, q.device, **facts))


def own_compressed_keys(rule: Rule, cut: Cut, rank: int) -> Ranges:
    """Compressed keys that begin in each slice of a rank, and end in the sequence; a slice is a multiple of the stride."""
    each, end = cut.size // rule.compress_stride, rule.compressed_keys(cut.number * cut.size)
    return tuple(range(i * each, max(i * each, min((i + 1) * each, end))) for i in cut.of(rank))


def _check_sizes(S: int, keys: int, options: Options) -> None:
    if keys != S:
        raise ArgumentError("k_slc", f"of {keys} positions", f"q's {S} rows", "pass rows and keys of the same slices of the sequence")
    stride = options.rule.compress_stride
    if not S or S % (stride * (1 + options.both_ends)):
        allowed = f"a multiple of {'2 * ' * options.both_ends}compress_stride = {stride} on each rank"
        raise ArgumentError("q", f"of S = {S} rows", allowed, "pad the sequence, so that all ranks' slices are of one such length")


def _of_all_ranks(x: Tensor, keys: int) -> Tensor:
    """A view as large as all ranks' compressed keys, to check sizes; anything but a 4-d tensor is returned as it is."""
    return x if x.dim() != 4 else x.new_empty(1, 1, 1, x.shape[3]).expand(*x.shape[:2], keys, -1)
