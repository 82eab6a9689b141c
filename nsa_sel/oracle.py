"""The float64 reference of attention, of the indexer's loss and of choosing, for tests: plain loops that share no code
with any backend. Slow.

Equations are those of NSA (arXiv 2502.11089).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run on one thread: the tensors of a row are small, and waking other threads costs up to milliseconds per row."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def oracle_mask(ranges: Tensor, S_kv: int, S: int, q_pos: Tensor | None = None) -> Tensor:
    """Which keys every row attends to: at position t, the union of [max(start,0), min(end,t+1,S_kv)) over its ranges.

    Args:
        ranges: [B,S,G,n,2], or [B,G,n,2] for decode; any integer dtype; half-open.
        S_kv: keys of a sequence.
        S: rows of a sequence.
        q_pos: [S] or [B,S], positions of the rows, by default S_kv - S + s.

    Returns:
        [B,S,G,S_kv] bool on the CPU.
    """
    ranges = ranges.unsqueeze(1) if ranges.dim() == 4 else ranges
    mask = torch.zeros(*ranges.shape[:3], S_kv, dtype=torch.bool, device="cpu")
    for b, s, g, keys in _rows(ranges, S_kv, S, q_pos):
        mask[b, s, g, keys] = True
    return mask


@_one_thread()
def oracle_forward(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float | None = None, q_pos: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The forward pass in float64. With a row's keys J (NSA, arXiv 2502.11089, Eq. 10, over selected keys only):

        s_j = scale q.k_j     lse = log sum_{j in J} exp(s_j)     p_j = exp(s_j - lse)     o = sum_{j in J} p_j v_j

    and o = 0, lse = -inf where J is empty. Keys and values outside J are not read. A key in two ranges counts once.

    Args:
        q: [B,S,G,h,Dk], or [B,G,h,Dk] for decode; any float dtype and device, k and v likewise. k and v may have G / r
            groups: groups g*r to g*r + r - 1 of q read KV group g.
        k: [B,G,S_kv,Dk].
        v: [B,G,S_kv,Dv].
        ranges: [B,S,G,n,2], or [B,S,1,n,2] for all groups; without S for decode; any integer dtype; half-open.
        scale: factor of the logits, by default 1/sqrt(Dk).
        q_pos: [S] or [B,S], positions of the rows, by default S_kv - S + s.

    Returns:
        o [B,S,G,h,Dv] and lse [B,S,G,h] (natural logarithm), without S for decode; float64 on the CPU.
    """
    if q.dim() == 4:
        o, lse = oracle_forward(q.unsqueeze(1), k, v, ranges, scale, q_pos)
        return o.squeeze(1), lse.squeeze(1)
    q, k, v = (tensor.detach().cpu() for tensor in (q, k, v))
    B, S, G, h, Dk = q.shape
    S_kv, Dv = v.shape[2:]
    scale = 1.0 / math.sqrt(Dk) if scale is None else scale
    o = torch.zeros(B, S, G, h, Dv, dtype=torch.float64, device="cpu")
    lse = torch.full((B, S, G, h), -math.inf, dtype=torch.float64, device="cpu")
    for b, s, g, keys in _rows(ranges, S_kv, S, q_pos, G):
        kv = g * k.shape[1] // G
        scores = scale * (q[b, s, g].double() @ k[b, kv, keys].double().T)
        lse[b, s, g] = scores.logsumexp(-1)
        p = torch.exp(scores - lse[b, s, g, :, None])
        o[b, s, g] = p @ v[b, kv, keys].double()
    return o, lse


@_one_thread()
def oracle_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    scale: float | None = None,
    q_pos: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of sum(o * do) + sum(lse * dlse) in float64, derived by hand; J, s, p, o, lse as in
    `oracle_forward`:

        dlse/ds_j = exp(s_j) / sum_i exp(s_i) = p_j
        dp_i/ds_j = p_i (delta_ij - p_j)                          since p_i = exp(s_i - lse)
        o = sum_i p_i v_i, so with g_i = do.v_i:   d(do.o)/ds_j = p_j (g_j - sum_i p_i g_i) = p_j (g_j - do.o)
        ds_j = p_j (g_j - do.o) + dlse p_j = p_j (g_j - D),  D = do.o - dlse
        dv_j += p_j do     dq = scale sum_j ds_j k_j     dk_j += scale ds_j q

    dk_j and dv_j sum over all rows and heads that attend to key j. An empty J contributes nothing.

    Args:
        do: [B,S,G,h,Dv], or [B,G,h,Dv] for decode: the gradient of o.
        dlse: [B,S,G,h], or [B,G,h] for decode: the gradient of lse, None for zeros.
        q, k, v, ranges, scale, q_pos: as of `oracle_forward`.

    Returns:
        dq, dk, dv with the shapes of q, k, v; float64 on the CPU.
    """
    if q.dim() == 4:
        dlse = dlse if dlse is None else dlse.unsqueeze(1)
        dq, dk, dv = oracle_backward(q.unsqueeze(1), k, v, ranges, do.unsqueeze(1), dlse, scale, q_pos)
        return dq.squeeze(1), dk, dv
    q, k, v, do = (tensor.detach().cpu() for tensor in (q, k, v, do))
    dlse = torch.zeros(do.shape[:-1], device="cpu") if dlse is None else dlse.detach().cpu()
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=torch.float64, device="cpu") for tensor in (q, k, v))
    for b, s, g, keys in _rows(ranges, k.shape[2], q.shape[1], q_pos, q.shape[2]):
        kv = g * k.shape[1] // q.shape[2]
        q_row, k_row, v_row, do_row = q[b, s, g].double(), k[b, kv, keys].double(), v[b, kv, keys].double(), do[b, s, g].double()
        p = torch.softmax(scale * (q_row @ k_row.T), -1)
        o_row = p @ v_row
        D = (do_row * o_row).sum(-1) - dlse[b, s, g].double()
        ds = p * (do_row @ v_row.T - D[:, None])
        dq[b, s, g] = scale * (ds @ k_row)
        dk[b, kv, keys] += scale * (ds.T @ q_row)  # keys are unique, so += loses nothing
        dv[b, kv, keys] += p.T @ do_row
    return dq, dk, dv


def _rows(ranges: Tensor, S_kv: int, S: int, q_pos: Tensor | None, G: int = -1) -> Iterator[tuple[int, int, int, Tensor]]:
    """b, s, g and the ascending keys of every row with at least one key. G: groups of the rows, by default of the ranges."""
    rows = (ranges.unsqueeze(1) if ranges.dim() == 4 else ranges).expand(-1, -1, G, -1, -1).tolist()
    for b, of_sequence in enumerate(rows):
        positions = range(S_kv - S, S_kv) if q_pos is None else (q_pos[b] if q_pos.dim() == 2 else q_pos).tolist()
        for s, of_query in enumerate(of_sequence):
            limit = min(positions[s] + 1, S_kv)
            for g, of_group in enumerate(of_query):
                selected = torch.zeros(max(limit, 0), dtype=torch.bool, device="cpu")
                for start, end in of_group:
                    selected[max(start, 0) : max(min(end, limit), 0)] = True
                keys = selected.nonzero().squeeze(-1)
                if len(keys):
                    yield b, s, g, keys


# The indexer's loss


class IndexLoss(NamedTuple):
    """The indexer's loss and its gradients; float64 on the CPU."""

    loss: Tensor  # [B,S,G], of every row and index head
    dq: Tensor  # [B,S,G,Di], gradients of sum(weights * loss)
    dk: Tensor  # of index_k's shape


@_one_thread()
def oracle_indexer_loss(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    ranges: Tensor | None = None,
    weights: Tensor | None = None,
    scale: float | None = None,
    index_scale: float | None = None,
    q_pos: Tensor | None = None,
) -> IndexLoss:
    """KL(P || pi) of every row, over its visible selected keys J (arXiv 2606.13392), and its gradients:

        P_j = 1/h sum over heads of exp(scale q.k_j - lse)     s_j = index_scale index_q.index_k_j
        log pi_j = s_j - log sum_{i in J} exp(s_i)             loss = sum_{j in J} P_j (log P_j - log pi_j)

    P has no gradient and sums to 1, since lse is that of the attention over J. With w the row's weight:

        dlog pi_i/ds_j = delta_ij - pi_j     dloss/ds_j = -sum_i P_i (delta_ij - pi_j) = pi_j - P_j
        dq = w index_scale sum_j (pi_j - P_j) index_k_j     dk_j += w index_scale (pi_j - P_j) index_q

    A row without keys has a loss of 0 and contributes nothing.

    Args:
        q: [B,S,G,h,Dk], any float dtype and device; k, index_q and index_k likewise.
        k: [B,G,S_kv,Dk].
        lse: [B,S,G,h], natural logarithm.
        index_q: [B,S,G,Di].
        index_k: [B,S_kv,Di] for all groups, or [B,G,S_kv,Di].
        ranges: [B,S,G,n,2], any integer dtype, half-open; None: all visible keys.
        weights: [B,S,G], the gradient of each loss, by default 1.
        scale, index_scale: factors of the logits, by default 1/sqrt(Dk) and 1/sqrt(Di).
        q_pos: [S] or [B,S], positions of the rows, by default S_kv - S + s.

    Returns:
        The loss and its gradients.
    """
    q, k, lse, index_q, index_k = (x.detach().cpu().double() for x in (q, k, lse, index_q, index_k))
    B, S, G, _, Dk = q.shape
    S_kv, Di = k.shape[2], index_q.shape[-1]
    scale = 1.0 / math.sqrt(Dk) if scale is None else scale
    index_scale = 1.0 / math.sqrt(Di) if index_scale is None else index_scale
    ranges = torch.tensor([0, S_kv]).expand(B, S, G, 1, 2) if ranges is None else ranges
    loss, dq, dk = torch.zeros(B, S, G, dtype=torch.float64), torch.zeros_like(index_q), torch.zeros_like(index_k)
    for b, s, g, keys in _rows(ranges, S_kv, S, q_pos, G):
        at = (b, keys) if index_k.dim() == 3 else (b, g, keys)
        P = torch.exp(scale * (q[b, s, g] @ k[b, g, keys].T) - lse[b, s, g, :, None]).mean(0)
        log_pi = torch.log_softmax(index_scale * (index_k[at] @ index_q[b, s, g]), 0)
        loss[b, s, g] = torch.where(P > 0, P * (P.log() - log_pi), 0.0).sum()
        ds = (log_pi.exp() - P) * (1.0 if weights is None else float(weights[b, s, g]))
        dq[b, s, g] = index_scale * (ds @ index_k[at])
        dk[at] += index_scale * ds[:, None] * index_q[b, s, g]
    return IndexLoss(loss, dq, dk)


# Choosing


class Chosen(NamedTuple):
    """Results of choosing; float64 on the CPU, blocks int32."""

    o: Tensor  # [B,S,G,h,Dv]
    lse: Tensor  # [B,S,G,h], natural logarithm
    importance: Tensor  # [B,S,G,blocks]
    blocks: Tensor  # [B,S,G,n], ascending, -1 for padding


def oracle_choose(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    S_kv: int,
    compress_block: int,
    compress_stride: int,
    block_size: int,
    n: int,
    first: int,
    local: int,
    scale: float | None = None,
    q_pos: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> Chosen:
    """Attention over the compressed keys that each row sees, and the blocks that it selects by their importance.

    Compressed key i covers the keys [i d, i d + l), l = compress_block, d = compress_stride. A row at position t sees
    it iff i d + l - 1 <= t. With J the keys that it sees (Eq. 8):

        s_i = scale q.k_i     lse = log sum_{i in J} exp(s_i)     p_i = exp(s_i - lse)     o = sum_{i in J} p_i v_i

    and o = 0, lse = -inf, p = 0 where J is empty. The importance of a block is the sum, over heads and over the pieces
    of d keys that lie in it, of p_i of the compressed keys that cover the piece (Eq. 9 and 10). The first blocks and
    the local last visible blocks come first, then the blocks by importance, the lower index first where it ties.

    Args:
        q: [B,S,G,h,Dk], any float dtype and device, k_cmp and v_cmp likewise.
        k_cmp: [B,G,C,Dk].
        v_cmp: [B,G,C,Dv].
        S_kv: keys of a sequence, in blocks of block_size.
        compress_block, compress_stride, block_size: in keys.
        n: blocks that a row selects.
        first, local: blocks that are always among them.
        scale: factor of the logits, by default 1/sqrt(Dk).
        q_pos: [S] or [B,S], positions of the rows, by default S_kv - S + s.
        cu_seqlens: of a packed batch, with B = 1 and without q_pos: sequence i has the rows [cu_seqlens[i],
            cu_seqlens[i+1]), and its compressed keys follow those of the sequences before it. J are keys of a row's own
            sequence; positions and blocks count from its beginning. Rows after the last sequence see nothing.

    Returns:
        o, lse, importance and blocks.
    """
    q, k_cmp, v_cmp = (x.detach().cpu() for x in (q, k_cmp, v_cmp))
    B, S, G, h, _ = q.shape
    o = torch.zeros(B, S, G, h, v_cmp.shape[-1], dtype=torch.float64)
    lse = torch.full((B, S, G, h), -math.inf, dtype=torch.float64)
    importance = torch.zeros(B, S, G, -(-S_kv // block_size), dtype=torch.float64)
    blocks = torch.full((B, S, G, n), -1, dtype=torch.int32)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b, s, g, t, seen in _choosing_rows(q, k_cmp, S_kv, compress_block, compress_stride, q_pos, cu_seqlens):
        if seen.stop > seen.start:
            logits = scale * (q[b, s, g].double() @ k_cmp[b, g, seen].double().T)
            lse[b, s, g] = logits.logsumexp(-1)
            p = torch.exp(logits - lse[b, s, g, :, None])
            o[b, s, g] = p @ v_cmp[b, g, seen].double()
            importance[b, s, g] = _importance(p.sum(0), compress_block // compress_stride, compress_stride, block_size, S_kv)
        best = _best(importance[b, s, g].tolist(), t // block_size, n, first, local)
        blocks[b, s, g, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return Chosen(o, lse, importance, blocks)


def oracle_choose_backward(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    S_kv: int,
    compress_block: int,
    compress_stride: int,
    scale: float | None = None,
    q_pos: Tensor | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of sum(o * do) + sum(lse * dlse), derived by hand; J, s, p, o, lse as in `oracle_choose`:

        dlse/ds_i = p_i     dp_j/ds_i = p_j (delta_ij - p_i)
        with g_i = do.v_i:   d(do.o)/ds_i = p_i (g_i - sum_j p_j g_j) = p_i (g_i - do.o)
        ds_i = p_i (g_i - do.o + dlse)     dq = scale sum_i ds_i k_i     dk_i += scale ds_i q     dv_i += p_i do

    A row that sees nothing contributes nothing. There is no gradient through the choice of blocks.

    Args:
        do: [B,S,G,h,Dv], the gradient of o.
        dlse: [B,S,G,h], the gradient of lse, None for zeros.
        q, k_cmp, v_cmp, S_kv, compress_block, compress_stride, scale, q_pos, cu_seqlens: as of `oracle_choose`.

    Returns:
        dq, dk_cmp, dv_cmp; float64 on the CPU.
    """
    q, k_cmp, v_cmp, do = (x.detach().cpu() for x in (q, k_cmp, v_cmp, do))
    dlse = torch.zeros(do.shape[:-1]) if dlse is None else dlse.detach().cpu()
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k_cmp, v_cmp))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    for b, s, g, _, seen in _choosing_rows(q, k_cmp, S_kv, compress_block, compress_stride, q_pos, cu_seqlens):
        if seen.stop == seen.start:
            continue
        q_row, do_row = (x[b, s, g].double() for x in (q, do))
        k_seen, v_seen = (x[b, g, seen].double() for x in (k_cmp, v_cmp))
        p = torch.softmax(scale * (q_row @ k_seen.T), -1)
        g_row = do_row @ v_seen.T
        ds = p * (g_row - (p * g_row).sum(-1, keepdim=True) + dlse[b, s, g].double()[:, None])
        dq[b, s, g] = scale * (ds @ k_seen)
        dk[b, g, seen] += scale * (ds.T @ q_row)
        dv[b, g, seen] += p.T @ do_row
    return dq, dk, dv


def _choosing_rows(
    q: Tensor, k_cmp: Tensor, S_kv: int, l: int, d: int, q_pos: Tensor | None, cu_seqlens: Sequence[int] | None
) -> Iterator[tuple[int, int, int, int, slice]]:  # fmt: skip
    """b, s, g, position t, and the compressed keys that the row sees: always the first ones, of its sequence."""
    B, S, G = q.shape[:3]
    for b in range(B):
        positions, firsts, counts = list(range(S_kv - S, S_kv)), [0] * S, [k_cmp.shape[2]] * S
        if q_pos is not None:
            positions = (q_pos[b] if q_pos.dim() == 2 else q_pos).tolist()
        if cu_seqlens is not None:
            positions, firsts, counts = _packed_rows(cu_seqlens, S, l, d)
        for s, t in enumerate(positions):
            seen = sum(i * d + l - 1 <= t for i in range(counts[s]))
            for g in range(G):
                yield b, s, g, t, slice(firsts[s], firsts[s] + seen)


def _packed_rows(cu_seqlens: Sequence[int], S: int, l: int, d: int) -> tuple[list[int], list[int], list[int]]:
    """Return each row's position (-1: padding), and its sequence's first compressed key and number of them."""
    positions, firsts, counts, first = [-1] * S, [0] * S, [0] * S, 0
    for begin, end in itertools.pairwise(cu_seqlens):
        count = sum(i * d + l <= end - begin for i in range(end - begin))
        for s in range(begin, end):
            positions[s], firsts[s], counts[s] = s - begin, first, count
        first += count
    return positions, firsts, counts


def _importance(p: Tensor, pieces: int, d: int, block_size: int, S_kv: int) -> Tensor:
    """[blocks] from p [compressed keys]: each of the `pieces` pieces of d keys that key i covers adds p_i to the block
    that holds it."""
    sums = [0.0] * -(-S_kv // block_size)
    for i, weight in enumerate(p.tolist()):
        for piece in range(i, i + pieces):
            if piece * d // block_size < len(sums):
                sums[piece * d // block_size] += weight
    return torch.tensor(sums, dtype=torch.float64)


def _best(importance: list[float], current: int, n: int, first: int, local: int) -> list[int]:
    """The ascending indices of the selected blocks among 0 .. current."""
    visible = range(min(current + 1, len(importance)))
    forced = [j for j in visible if j < first or j > current - local]
    others = [j for j in visible if j not in forced and not math.isnan(importance[j])]
    return sorted((forced + sorted(others, key=lambda j: (-importance[j], j)))[:n])
