"""choose-torch: choosing blocks in plain PyTorch. The reference, which runs everywhere in bounded memory, in chunks of
rows.

16-bit inputs are computed in float32, regardless of autocast. Gradients of k and v are added chunk by chunk, in row
order. The sequences of a packed batch run one after another; this synchronizes with a GPU if the host does not know the
bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from nsa_sel.core.arguments import range_dtype, whole_blocks
from nsa_sel.core.call import ChooseCall, Rule
from nsa_sel.core.ranges import sorted_blocks

Others = ParamSpec("Others")
Found = TypeVar("Found")


def _without_autocast(work: Callable[Concatenate[ChooseCall, Others], Found]) -> Callable[Concatenate[ChooseCall, Others], Found]:
    @functools.wraps(work)
    def run(call: ChooseCall, /, *args: Others.args, **kwargs: Others.kwargs) -> Found:
        with torch.autocast(call.q.device.type, enabled=False):
            return work(call, *args, **kwargs)

    return run


@_without_autocast
def forward(call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] in q's dtype, lse [B,S,G,h] in float32 (float64 for float64 inputs), ranges [B,S,G,n,2] of
    the blocks."""
    if call.sequences is not None:
        return _packed_forward(call)
    B, S, G, h, _ = call.q.shape
    o = call.q.new_empty(B, S, G, h, call.v.shape[3])
    lse = call.q.new_empty(B, S, G, h, dtype=_wide(call))
    ranges = call.q.new_empty(B, S, G, call.rule.n, 2, dtype=range_dtype(call.rule.block_size))
    for at in call.parts(_row_bytes(call)):
        part = call.part(*at)
        logits = _logits(part)
        part_lse = logits.logsumexp(-1)
        p = logits.softmax(-1).masked_fill_((part_lse == -torch.inf).unsqueeze(-1), 0.0)  # not exp(logits - lse): lse is rounded
        o[at] = _heads(p.flatten(2, 3) @ _visible(part, part.v), h)
        lse[at] = part_lse.transpose(1, 2)
        importance = _over_pieces(p.sum(3), call.rule, call.blocks).transpose(1, 2)
        _, _, size, n, first, local = call.rule
        ranges[at] = whole_blocks(sorted_blocks(importance, n, size, first, local, 0, part.positions()), size)
    return o, lse, ranges


@_without_autocast
def log_sum_exp(call: ChooseCall) -> Tensor:
    """Return lse [B,S,G,h] only."""
    lse = call.q.new_full(call.q.shape[:-1], -torch.inf, dtype=_wide(call))
    if call.sequences is not None:
        for rows, _, sequence in call.each_sequence():
            lse[:, rows] = log_sum_exp(sequence)
        return lse
    for at in call.parts(_row_bytes(call)):
        lse[at] = _logits(call.part(*at)).logsumexp(-1).transpose(1, 2)
    return lse


@_without_autocast
def best_blocks(call: ChooseCall, lse: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Write the best blocks by call.pool's scores to `out` and return it.

    lse: [B,S,G,h] if scores use softmax weights.
    out: ranges [B,S,G,n,2], also if it is None, or block indices [B,S,G,n]; n + 1 with call.tail.
    """
    call, rule = call.gathered(), call.rule
    if out is None:
        out = call.q.new_empty(*call.q.shape[:3], rule.n + call.tail, 2, dtype=range_dtype(rule.block_size))
    if call.sequences is not None:
        out.fill_(-1 if out.dim() == 4 else 0)  # rows of padding
        for rows, _, sequence in call.each_sequence():
            best_blocks(sequence, None if lse is None else lse[:, rows], out[:, rows])
        return out
    for at in call.parts(_row_bytes(call)):
        part = call.part(*at)
        scores = block_scores(part, None if lse is None else lse[at]).transpose(1, 2)
        part.store(out[at], sorted_blocks(scores, rule.n, rule.block_size, rule.first, rule.local, 0, part.positions()))
    return out


def block_scores(part: ChooseCall, lse: Tensor | None) -> Tensor:
    """Return scores [B,G,S,blocks]. Without softmax, a block has -inf if the row sees none of its index keys."""
    logits, pool = _logits(part), part.pool
    seen = torch.arange(logits.shape[-1], device=logits.device) < part.seen()[:, None, :, None]
    if lse is not None:
        logits = logits.sub_(lse.masked_fill(lse == -torch.inf, torch.inf).transpose(1, 2).unsqueeze(-1)).exp_()
    if pool.relu:  # apply it to visible keys only; hidden keys keep -inf
        logits = logits.relu_().masked_fill_(~seen.unsqueeze(3), -torch.inf)
    x = logits.amax(3) if pool.heads_max else logits.sum(3)
    if pool.block_max:
        return _over_pieces(x, part.rule, part.blocks, 0.0 if pool.softmax else -torch.inf)
    scores = _over_pieces(x.where(seen, 0.0), part.rule, part.blocks)
    return scores if pool.softmax else scores.where(_over_pieces(seen.float(), part.rule, part.blocks, 0.0) > 0, -torch.inf)


@_without_autocast
def backward(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in the dtypes of q, k, v. p is recomputed from lse.

    With p = exp(scale q.k - lse) and delta = rowsum(do * o) - dlse: ds = p (do.v - delta), dq = scale ds k, dk = scale
    ds^T q, dv = p^T do.
    """
    if call.sequences is not None:
        return _packed_backward(call, o, lse, do, dlse)
    dq, wide = call.q.new_empty(call.q.shape), _wide(call)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (call.k, call.v))
    for at in call.parts(_row_bytes(call)):
        part = call.part(*at)
        seeing = (part.seen() > 0)[:, :, None, None, None]
        q_rows, do_rows, o_rows = (_rows(x.where(seeing, 0.0).to(wide)) for x in (part.q, do[at], o[at]))
        k, v = _visible(part, part.k), _visible(part, part.v)
        part_lse = lse[at].masked_fill(lse[at] == -torch.inf, 0.0).transpose(1, 2).unsqueeze(-1)
        p = torch.exp(_logits(part) - part_lse).flatten(2, 3)
        delta = (do_rows * o_rows).sum(-1, keepdim=True)
        if dlse is not None:
            delta -= dlse[at].where(seeing[..., 0], 0.0).transpose(1, 2).flatten(2, 3).unsqueeze(-1)
        ds = p * (do_rows @ v.transpose(2, 3) - delta)
        dq[at] = _heads((ds @ k).mul_(call.scale), call.q.shape[3])
        seen = k.shape[2]
        dk[at[0], :, :seen] += (ds.transpose(2, 3) @ q_rows).mul_(call.scale)
        dv[at[0], :, :seen] += p.transpose(2, 3) @ do_rows
    return dq, dk.to(call.k.dtype), dv.to(call.v.dtype)


def _packed_forward(call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
    """Run `forward` for each sequence. Padding rows see nothing."""
    _, S, G, h, _ = call.q.shape
    o = call.q.new_zeros(1, S, G, h, call.v.shape[3])
    lse = call.q.new_full((1, S, G, h), -torch.inf, dtype=_wide(call))
    ranges = call.q.new_zeros(1, S, G, call.rule.n, 2, dtype=range_dtype(call.rule.block_size))
    for rows, _, sequence in call.each_sequence():
        o[:, rows], lse[:, rows], ranges[:, rows] = forward(sequence)
    return o, lse, ranges


def _packed_backward(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_zeros(x.shape) for x in (call.q, call.k, call.v))
    for rows, keys, sequence in call.each_sequence():
        own = backward(sequence, o[:, rows], lse[:, rows], do[:, rows], None if dlse is None else dlse[:, rows])
        dq[:, rows], dk[:, :, keys], dv[:, :, keys] = own
    return dq, dk, dv


def _over_pieces(x: Tensor, rule: Rule, blocks: int, least: float | None = None) -> Tensor:
    """Return the sum [..., blocks] of x [..., C] over the pieces of a block, to each of which compressed keys that cover
    it add (Eq. 9); with `least`, the maximum of the keys and `least`."""
    short = blocks * rule.pieces - x.shape[-1]
    pieces = [torch.nn.functional.pad(x, (shift, short - shift), value=least or 0.0) for shift in range(rule.reach)]
    each = functools.reduce(torch.add if least is None else torch.maximum, pieces).view(*x.shape[:-1], blocks, rule.pieces)
    return each.sum(-1) if least is None else each.amax(-1)


def _logits(part: ChooseCall) -> Tensor:
    """Return logits [B,G,S,h,C] of the keys that any row may see, -inf where a row does not see a key.

    Logits of rows that see nothing are undefined.
    """
    h = part.q.shape[3]
    seen = part.seen()[:, None, :, None, None]
    k = _visible(part, part.k)
    logits = _rows(part.q.to(_wide(part)) * part.scale) @ k.transpose(2, 3)
    logits = logits.view(*logits.shape[:2], logits.shape[2] // h, h, k.shape[2])
    return logits.masked_fill_(torch.arange(k.shape[2], device=k.device) >= seen, -torch.inf)


def _visible(part: ChooseCall, x: Tensor) -> Tensor:
    """Return the keys or values that any row may see. Those that no row sees are zeroed, because they may hold NaN."""
    x = x[:, :, : part.most_seen()].to(_wide(part))
    if part.q_pos is None:
        return x
    most = part.seen().amax(1)[:, None, None, None]
    return x.where(torch.arange(x.shape[2], device=x.device)[:, None] < most, 0.0)


def _rows(x: Tensor) -> Tensor:
    """Return x [B,S,G,h,D] as [B,G,S*h,D]."""
    return x.transpose(1, 2).flatten(2, 3)


def _heads(x: Tensor, h: int) -> Tensor:
    """Return x [B,G,S*h,D] as [B,S,G,h,D]."""
    return x.view(*x.shape[:2], x.shape[2] // h, h, x.shape[3]).transpose(1, 2)


def _wide(call: ChooseCall) -> torch.dtype:
    """Return the accumulation dtype."""
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def _row_bytes(call: ChooseCall) -> int:
    """Return the bytes per row of the largest temporary: p, a row of q or o, or the sort of block scores."""
    G, h, Dk = call.q.shape[2:]
    return max(G * h * max(call.k.shape[2], Dk, call.v.shape[3]) * _wide(call).itemsize, G * call.blocks * 8)
