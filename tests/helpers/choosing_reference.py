"""Plain references of the ways to choose blocks, written from their sources' definitions; float64 on the CPU, one line a step.

Scores [B,S,G,blocks] are -inf where a row may not choose a block by its score. They share no code with any backend.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def pooled_scores(
    q: Tensor, k: Tensor, positions: Tensor, *, S_kv: int, block_size: int, compress_block: int = 1, compress_stride: int = 1,
    reduce: str = "max", heads: str = "sum", softmax: bool = False, lse: Tensor | None = None, scale: float | None = None,
) -> Tensor:  # fmt: skip
    """What `choose_blocks` says of itself: index key i touches block j where [i d, i d + l) and [j m, (j + 1) m) overlap."""
    q, k = q.double().cpu(), k.double().cpu()
    B, S, G, _, D = q.shape
    scale, d, l, m, C = D**-0.5 if scale is None else scale, compress_stride, compress_block, block_size, k.shape[2]
    i, j = torch.arange(C)[:, None], torch.arange(-(-S_kv // m))
    pieces = ((i * d + l).minimum(j * m + m) - (i * d).maximum(j * m)).clamp(min=0).double() // d  # [C,blocks]
    found = torch.full((B, S, G, len(j)), -math.inf, dtype=torch.float64)
    for b, s, g in torch.cartesian_prod(torch.arange(B), torch.arange(S), torch.arange(G)).tolist():
        t = int(positions[b, s])
        seen = sum(i * d + l - 1 <= t for i in range(C))
        x = scale * q[b, s, g] @ k[b, g, :seen].T
        if softmax:
            total = x.logsumexp(-1) if lse is None else lse[b, s, g].double().cpu()
            x = torch.exp(x - total[:, None]) if bool((total > -math.inf).all()) else torch.zeros_like(x)
        x = (x.sum(0) if heads == "sum" else x.amax(0))[:, None]
        touching = pieces[:seen] > 0
        if seen:
            score = x.where(touching, -math.inf).amax(0) if reduce == "max" else (x * pieces[:seen]).sum(0)
            found[b, s, g] = score.where(touching.any(0), -math.inf)
        if softmax:
            found[b, s, g] = found[b, s, g].where(touching.any(0), 0.0)
        found[b, s, g, max(0, t // m + 1) :] = -math.inf
    return found


def msa_scores(q: Tensor, k: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """MiniMax Sparse Attention (arXiv 2606.13392): the largest logit of the block's visible tokens; one index head a group, q [B,S,G,1,D],
    and one index key for all of them, k [B,1,S_kv,D]."""
    q, k = q.double().cpu(), k.double().cpu()
    logits = torch.einsum("bsgd,bkd->bsgk", q[:, :, :, 0], k[:, 0])
    logits = logits.masked_fill(torch.arange(k.shape[2]) > positions[:, :, None, None], -math.inf)
    padded = torch.nn.functional.pad(logits, (0, -k.shape[2] % block_size), value=-math.inf)
    return padded.unflatten(-1, (-1, block_size)).amax(-1)


def moba_scores(q: Tensor, k: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """MoBA (arXiv 2502.13189, Eq. 5-6): q . mean(keys of the block) for blocks before the current one; [B,S,heads,blocks]."""
    B, S, G, h, _ = q.shape
    blocks = -(-k.shape[2] // block_size)
    found = torch.full((B, S, G * h, blocks), -math.inf, dtype=torch.float64)
    for j in range(k.shape[2] // block_size):
        mean = k[:, :, j * block_size : (j + 1) * block_size].float().mean(2).to(k.dtype).double().cpu()  # in k's dtype, as the source
        affinity = torch.einsum("bsghd,bgd->bsgh", q.double().cpu(), mean).flatten(2)
        found[..., j] = affinity.masked_fill((positions // block_size <= j)[:, :, None], -math.inf)
    return found


def infllm_scores(q: Tensor, k: Tensor, positions: Tensor, *, coarse: bool, block: int = 64, l: int = 32, d: int = 16) -> Tensor:
    """InfLLM-v2 (arXiv 2509.24663, 3.2 and 3.3): softmax over means of l keys every d, summed over a group's heads, max-pooled over windows
    of block / d + 1 means, block / d apart, that begin one mean before the block; the log-sum-exp of 4 times coarser means."""
    q = q.double().cpu()
    B, S, G, h, D = q.shape

    def logits(l: int, d: int) -> Tensor:
        means = k.unfold(2, l, d).float().mean(-1).to(k.dtype).double().cpu()
        x = torch.einsum("bsghd,bgcd->bsghc", q * D**-0.5, means)
        return x.masked_fill(torch.arange(means.shape[2]) * d + l - 1 > positions[:, :, None, None, None], -math.inf)

    fine = logits(l, d)
    total = (logits(4 * l, 4 * d) if coarse else fine).logsumexp(-1, keepdim=True)
    p = torch.where(total > -math.inf, torch.exp(fine - total), 0.0).sum(3)
    blocks = -(-k.shape[2] // block)
    p = torch.nn.functional.pad(p, (0, blocks * block // d + 1 - p.shape[-1]))
    pooled = torch.nn.functional.max_pool1d(p.flatten(0, 2).unsqueeze(1), block // d + 1, block // d, padding=1)
    scores = pooled[:, 0, :blocks].view(B, S, G, blocks)
    return scores.masked_fill(torch.arange(blocks) > (positions // block)[:, :, None, None], -math.inf)


def best(scores: Tensor, positions: Tensor, block_size: int, n: int, first: int, local: int) -> Tensor:
    """[B,S,G,n] ascending, -1 last: forced blocks, then the highest scores, the lower block first where they tie."""
    chosen = torch.full((*scores.shape[:3], n), -1, dtype=torch.int32)
    for b, s, g in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        current = int(positions[b, s]) // block_size
        row = scores[b, s, g].tolist()
        forced = [j for j in range(min(current + 1, len(row))) if j < first or j > current - local]
        others = sorted((j for j, x in enumerate(row) if j <= current and j not in forced and x > -math.inf), key=lambda j: (-row[j], j))
        picked = sorted((forced + others)[:n])
        chosen[b, s, g, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    return chosen


def assert_chosen(blocks: Tensor, scores: Tensor, expected: Tensor, slack: float = 0.0) -> None:
    """The expected blocks; with slack others, whose scores together are lower by at most `slack` of the row's largest one, in magnitude."""
    blocks = blocks.cpu().int()
    if slack == 0.0:
        assert torch.equal(blocks, expected), (blocks != expected).any(-1).nonzero()[:4]
        return
    assert torch.equal((blocks >= 0).sum(-1), (expected >= 0).sum(-1))
    finite = scores.where(scores > -math.inf, 0.0)
    totals = [finite.gather(-1, x.clamp(min=0).long()).where(x >= 0, 0.0).sum(-1) for x in (expected, blocks)]
    assert bool((totals[0] - totals[1] <= slack * finite.abs().amax(-1)).all())
    same = [{*a.tolist()} == {*b.tolist()} for a, b in zip(blocks.flatten(0, 2), expected.flatten(0, 2), strict=True)]
    assert sum(same) >= 0.9 * len(same)  # near ties are few
