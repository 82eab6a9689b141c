"""One rank's part of a layer's call: its tensors and options, checked before anything is exchanged."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.branches import check_branches
from nsa_sel.core import transforms
from nsa_sel.core.arguments import check_flag, check_tensors
from nsa_sel.core.check import check_choose
from nsa_sel.core.choose_call import Rule
from nsa_sel.distributed import cost
from nsa_sel.distributed.agreement import compare_call, group_of
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
    """Options of a call, equal on all ranks."""

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
    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()


def begin(given: Tensors, options: Options, group: Any, *, compressed: bool) -> Slice:
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
    transforms.check_eager(NAME, *given)
    group = group_of(group, NAME)
    check_exchange(options.exchange)
    cast = Tensors._make((*transforms.in_autocast_dtype(*given[:8]), given.gates))
    given = cast._replace(q_cmp=cast.q) if given.q_cmp is given.q else cast
    q, q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = given
    check_branches(q, q_cmp, (v_cmp, v_slc, v_win), (k_slc, k_win), gates, options.window)
    S, ranks = q.shape[1], group.size()
    check_flag("both_ends", options.both_ends)
    if k_slc.shape[2] != S:
        remedy = "pass rows and keys of the same slices of the sequence"
        raise ArgumentError("k_slc", f"of {k_slc.shape[2]} positions", f"q's {S} rows", remedy)
    stride = options.rule.compress_stride
    if not S or S % (stride * (1 + options.both_ends)):
        allowed = f"a multiple of {'2 * ' * options.both_ends}compress_stride = {stride} on each rank"
        raise ArgumentError("q", f"of S = {S} rows", allowed, "pad the sequence, so that all ranks' slices are of one such length")
    cut = Cut(S // (1 + options.both_ends), ranks, options.both_ends)
    own = sum(map(len, own_compressed_keys(options.rule, cut, group.rank()))) if compressed else S
    if k_cmp.dim() == 4 and k_cmp.shape[2] != own:
        allowed = f"{own}: those that begin in this rank's {S} keys, and end in the sequence"
        raise ArgumentError("k_cmp", f"of {k_cmp.shape[2]} compressed keys", allowed, "compress them with the first keys of the next slice")
    k_all, v_all = (_of_all_ranks(x, options.rule.compressed_keys(ranks * S)) for x in (k_cmp, v_cmp))
    _, _, scale, _ = check_choose(q_cmp, k_all, v_all, options.rule, options.scale, None, ranks * S, fake=False)
    options = options._replace(scale=scale)
    compare_call(group, q, NAME, lambda: {
        **{**options._asdict(), "rule": options.rule._asdict()}, "compressed": compressed, "dtype": str(q.dtype),
        "sizes": {name: x.shape for name, x in given._asdict().items() if name not in ("k_cmp", "v_cmp")},
        "grads": [name for name, x in given._asdict().items() if x.requires_grad and torch.is_grad_enabled()],
    })  # fmt: skip
    return Slice(given, options, cut, group)


def own_compressed_keys(rule: Rule, cut: Cut, rank: int) -> Ranges:
    """Return the compressed keys that begin in each slice of a rank and end in the sequence; a slice is a multiple of the stride."""
    each, end = cut.size // rule.compress_stride, rule.compressed_keys(cut.number * cut.size)
    return tuple(range(i * each, max(i * each, min((i + 1) * each, end))) for i in cut.of(rank))


def _of_all_ranks(x: Tensor, keys: int) -> Tensor:
    """Return a view as large as all ranks' compressed keys, to check sizes; anything but a 4-d tensor is returned as it is."""
    return x if x.dim() != 4 else x.new_empty(1, 1, 1, x.shape[3]).expand(*x.shape[:2], keys, -1)
