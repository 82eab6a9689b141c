"""Steps of an engine: requests with new tokens, their keys in pages, and what the oracle makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

from nsa_sel.oracle import oracle_forward
from tests.helpers.caches import SPARE, shuffled_pages

PAGE = 128
G, h, D, INDEX_D, n = 2, 4, 128, 64, 3
STEPS = {  # new tokens and cached tokens of each request, those that decode first
    "mixed": ([1, 1, 1, 7, 40, 3], [300, 0, 700, 130, 0, 640]),
    "decode": ([1, 1, 1, 1], [0, 127, 128, 900]),
    "prefill": ([33, 1, 150], [0, 511, 90]),
    "verify": ([4, 4, 5], [600, 13, 200]),
}
FORCED = {"first": (1, 0), "local": (0, 1), "none": (0, 0)}  # blocks that are always chosen


class Step(NamedTuple):
    """Requests of one step, and where their keys are."""

    queries: list[int]  # new tokens of each request
    lengths: list[int]  # keys of each request, the new ones among them
    table: Tensor  # [requests, pages of a request] int32; entries past a request's keys are not pages
    pages: int

    @property
    def requests(self) -> list[tuple[int, slice]]:
        """Length and rows of each request."""
        starts = itertools.accumulate(self.queries, initial=0)
        return [(length, slice(*rows)) for length, rows in zip(self.lengths, itertools.pairwise(starts), strict=True)]

    def paged(self, keys: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return pages [pages,128,...] of the requests' keys [keys,...]; NaN where no request has a key."""
        pages = torch.full((self.pages, PAGE, *keys[0].shape[1:]), torch.nan)
        for row, of_request in zip(self.table.tolist(), keys, strict=True):
            for page, piece in zip(row, of_request.float().split(PAGE), strict=False):
                pages[page, : len(piece)] = piece
        return pages.to(dtype)

    def attention(self, q: Tensor, keys: Sequence[Tensor], indices: Tensor) -> Tensor:
        """Return o [tokens,G,h,D] in float64, of q [tokens, G * h * D], keys [keys,G,2*D] and block indices [tokens,G,n]."""
        o = torch.empty(len(q), G, h, D, dtype=torch.float64)
        for (_, rows), of_request in zip(self.requests, keys, strict=True):
            start = PAGE * indices[rows][None].long()
            ranges = torch.stack((start, start + PAGE), -1) * (start >= 0)[..., None]
            k, v = of_request.transpose(0, 1)[None].split(D, -1)
            o[rows] = oracle_forward(q[rows].view(1, -1, G, h, D), k, v, ranges)[0][0]
        return o

    def best_blocks(self, q: Tensor, keys: Sequence[Tensor], first: int, local: int) -> Tensor:
        """Return the chosen blocks [tokens,G,n], ascending, -1 first, of index queries [tokens, G * D] and keys [keys,D]."""
        found = torch.full((len(q), G, n), -1, dtype=torch.int32)
        for (length, rows), of_request in zip(self.requests, keys, strict=True):
            scores = q[rows].view(-1, G, q.shape[1] // G).double() @ of_request.double().T  # [rows,G,keys]
            for row, g in itertools.product(range(len(scores)), range(G)):
                best = torch.tensor([x.max() for x in scores[row, g, : length - len(scores) + row + 1].split(PAGE)])
                best[:first], best[len(best) - local :] = torch.inf, torch.inf
                kept = best.topk(min(n, len(best))).indices.sort().values
                found[rows][row, g, n - len(kept) :] = kept.int()
        return found


def take_one_config(*modules: ModuleType) -> None:
    """Leave autotuned kernels one configuration: Triton's interpreter can't time several."""
    for kernel in (value for module in modules for value in vars(module).values()):
        while kernel is not None:
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[-1:]
            kernel = kernel.fn if isinstance(kernel, KernelInterface) and hasattr(kernel, "fn") else None


def make_step(queries: Sequence[int], contexts: Sequence[int]) -> Step:
    """Return a step whose pages are shuffled."""
    lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
    used = [-(-length // PAGE) for length in lengths]
    table = shuffled_pages(used, max(used) + 2, torch.Generator().manual_seed(0))
    return Step(list(queries), lengths, table.masked_fill(table < 0, 2**30), sum(used) + SPARE)
