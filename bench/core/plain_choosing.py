"""Ways to choose blocks as PyTorch alone has them, for benches: products in the inputs' dtype, scores in float32, torch.topk.

Rows in chunks of `SCORES`, as those of all rows may take too much memory; of each chunk only the keys that its last row sees. S = S_kv, a
multiple of the block. Results are block indices [B,S,groups,n] in no order, -1 where fewer are visible; ties go wherever topk takes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

SCORES = 1 << 28  # of rows, heads and index keys in a chunk: 1 GiB in float32


def minimax_blocks(q: Tensor, k: Tensor, block: int = 128, n: int = 16) -> Tensor:
    """By the largest logit of a block's visible keys (arXiv 2606.13392): q [B,S,G,1,D], k [B,1,S,D]; the current block is forced."""

    def scores(begin: int, end: int) -> Tensor:
        keys = -(-end // block) * block
        logits = torch.einsum("bsgd,bkd->bsgk", q[:, begin:end, :, 0], k[:, 0, :keys]).float()
        future = torch.arange(keys, device=q.device) > torch.arange(begin, end, device=q.device)[:, None, None]
        return logits.masked_fill_(future, -torch.inf).view(*logits.shape[:3], -1, block).amax(-1)

    return _by_chunk(q, scores, k.shape[2], block, n, 0, 1)


def moba_blocks(q: Tensor, k: Tensor, block: int = 512, n: int = 3) -> Tensor:
    """By the mean of an earlier block's keys (arXiv 2502.13189), for every head: q [B,S,G,h,D], k [B,G,S,D]; the current one is forced."""
    means = k.float().view(*k.shape[:2], -1, block, k.shape[3]).mean(3).to(k.dtype)

    def scores(begin: int, end: int) -> Tensor:
        found = torch.einsum("bsghd,bgcd->bsghc", q[:, begin:end], means).flatten(2, 3).float()
        current = torch.arange(begin, end, device=q.device) // block
        return found.masked_fill_(torch.arange(means.shape[2], device=q.device) >= current[:, None, None], -torch.inf)

    return _by_chunk(q, scores, means.shape[2], block, n, 0, 1)


def infllm_blocks(q: Tensor, k: Tensor, block: int = 64, n: int = 96, first: int = 1, local: int = 33, size: int = 32) -> Tensor:
    """By the largest softmax weight of the means that touch a block (arXiv 2509.24663): q [B,S,G,h,D], k [B,G,S,D].

    Means of `size` keys every size / 2, their log-sum-exp from means four times as coarse; weights are summed over a group's heads.
    """
    stride, scale = size // 2, q.shape[-1] ** -0.5
    fine, coarse = (k.float().unfold(2, length, length // 2).mean(-1).to(k.dtype) for length in (size, 4 * size))

    def logits(means: Tensor, length: int, begin: int, end: int) -> Tensor:
        x = torch.einsum("bsghd,bgcd->bsghc", q[:, begin:end], means[:, :, : end * 2 // length]).float().mul_(scale)
        last = torch.arange(x.shape[-1], device=q.device) * (length // 2) + length - 1
        return x.masked_fill_(last > torch.arange(begin, end, device=q.device)[:, None, None, None], -torch.inf)

    def scores(begin: int, end: int) -> Tensor:
        lse = logits(coarse, 4 * size, begin, end).logsumexp(-1, keepdim=True)
        weights = (logits(fine, size, begin, end) - lse.masked_fill(lse == -torch.inf, torch.inf)).exp_().sum(3)
        blocks, pieces = -(-end // block), block // stride
        weights = pad(weights, (0, blocks * pieces + 1 - weights.shape[-1]))
        pooled = max_pool1d(weights.flatten(0, 2).unsqueeze(1), pieces + 1, pieces, padding=1)
        return pooled[:, 0, :blocks].view(*weights.shape[:3], blocks)

    return _by_chunk(q, scores, fine.shape[2], block, n, first, local)


def _by_chunk(
    q: Tensor, scores: Callable[[int, int], Tensor], keys: int, block: int, n: int, first: int, local: int
) -> Tensor:  # fmt: skip
    """The best blocks of all rows; `scores` of the rows from begin to end: [B,rows,groups,blocks], from as many index keys at most."""
    parts, rows = [], max(1, SCORES // (q.shape[0] * q.shape[2] * q.shape[3] * max(1, keys)))
    for begin in range(0, q.shape[1], rows):
        end = min(begin + rows, q.shape[1])
        parts.append(_best(scores(begin, end), torch.arange(begin, end, device=q.device), block, n, first, local))
    return torch.cat(parts, 1)


def _best(scores: Tensor, position: Tensor, block: int, n: int, first: int, local: int) -> Tensor:
    """[B,S,groups,n] of scores [B,S,groups,blocks] of rows at position [S]."""
    index, current = torch.arange(scores.shape[-1], device=scores.device), (position // block)[:, None, None]
    forced = (index < first) | (index > current - local)
    scores = scores.masked_fill(forced, torch.inf).masked_fill_(index > current, -torch.inf)
    best = scores.topk(min(n, scores.shape[-1]), sorted=False)
    return pad(best.indices.masked_fill_(best.values == -torch.inf, -1), (0, max(0, n - scores.shape[-1])), value=-1)
