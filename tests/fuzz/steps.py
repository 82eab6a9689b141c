"""Steps of an engine: random requests end to end, which choose blocks and attend to them.

Steps of a layout have tensors of the same shapes, whatever their requests, so that kernels compile once and calls are replayed.
"""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_sel import choose_blocks_with_kvcache
from nsa_sel.testing import new_memory_is_nan
from tests.helpers.caches import Pool
from tests.helpers.packed import Step, make_pool, make_step, poisoned

GARBAGE = (-1, 0, 2**30, -(2**31))  # in a block table, after a request's last page
INDEX_D = 64


class Layout(NamedTuple):
    """Facts that kernels are compiled for: a backend, arguments of `make_step`, numbers of rows and requests."""

    backend: str | None
    sizes: dict[str, Any]
    page: int | None
    T: int = 512
    R: int = 12
    rows: tuple[int, ...] = (0, 1, 1, 1, 2, 4, 8, 9, 30, 150, 300)


def layout(
    backend: str | None, dtype: torch.dtype, G: int, h: int, Dk: int, Dv: int, n: int, block: int | None, page: int | None,
    each: str | None = None, one_pool: bool = False, one: bool = False, room: int = 2048, **others: Any,
) -> Layout:  # fmt: skip
    sizes = {"dtype": dtype, "G": G, "h": h, "Dk": Dk, "Dv": Dv, "n": n, "block": block, "each": each, "one_pool": one_pool, "one": one}
    return Layout(backend, {**sizes, "room": room}, page, **others)


B16, F16 = torch.bfloat16, torch.float16
ON_GPU = (
    layout("cupy-cuda", B16, 4, 16, 128, 128, 16, 128, 128, one_pool=True, room=3072),
    layout("cupy-cuda", B16, 4, 16, 128, 128, 16, 128, 128, "page", one_pool=True, room=3072),
    layout("cupy-cuda", F16, 2, 4, 64, 64, 8, 64, 64),
    layout("cupy-cuda", F16, 2, 16, 128, 64, 8, 64, 128, "head"),
    layout("cupy-cuda", B16, 2, 8, 64, 128, 5, 128, None),
    layout("triton-group", B16, 2, 3, 64, 64, 5, 32, 16, "tensor", one=True),
    layout("cupy-cuda", B16, 2, 2, 64, 64, 4, None, 24),
    layout(None, F16, 4, 12, 128, 128, 3, 192, 64, one=True),
)
BACKENDS = ("sdpa-packed",) * 9 + ("numba",) * 10 + ("triton-group",)  # on a CPU, where Triton is interpreted


def layout_of(seed: int, device: str) -> Layout:
    """Return the layout of a seed: one of ON_GPU, or on a CPU any."""
    if device == "cuda":
        return ON_GPU[seed % len(ON_GPU)]
    rng, backend = random.Random(seed), BACKENDS[seed % len(BACKENDS)]
    page, plain = rng.choice((None, 1, 16, 24, 64)), rng.random() < 0.7 or backend == "numba"
    each = None if plain else rng.choice(("", "tensor", "head", *["page"] * (page is not None)))
    heads = rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4, 16)), rng.choice((8, 16, 24)), rng.choice((8, 16, 24))
    blocks = rng.choice((1, 3, 5)), rng.choice((None, 8, 16, 32, 64)), page, each, page is not None and rng.random() < 0.5
    few = {"room": 192, "T": 44, "R": 6, "rows": (0, 1, 1, 1, 2, 4, 9, 20)}
    return layout(backend, (torch.float32, F16)[seed % 2], *heads, *blocks, rng.random() < 0.2, **few)


@functools.cache
def pools_of(seed: int, device: str) -> tuple[Pool, ...]:
    """Return keys, values and index keys that the steps of a layout take; seed: its first."""
    found = layout_of(seed, device)
    page, each = found.page or found.sizes["room"], found.sizes["each"]
    pages, made = found.R * -(-found.sizes["room"] // page), torch.Generator(device).manual_seed(0)
    sizes = (found.sizes["G"], found.sizes["Dk"], each), (found.sizes["G"], found.sizes["Dv"], each), (1, INDEX_D, each and "tensor")
    return tuple(make_pool((pages, page, G, D), of, found.sizes["dtype"], made) for G, D, of in sizes)


def random_requests(found: Layout, rng: random.Random, pages: int, page: int) -> tuple[list[int], list[int], Tensor]:
    """Return rows, lengths and block table of chunks with and without a prefix, decoding, drafts, requests without rows or keys, and
    prefixes that two requests share."""
    new, room = list[int](), found.sizes["room"]
    for _ in range(found.R):
        rows = rng.choice(found.rows)
        new.append(rows if sum(new) + rows <= found.T else 0)
    lengths = [min(room, rng.choice((rows, rows + rng.randint(0, room), room, max(0, rows - 1), 0, 1))) for rows in new]
    order, table = iter(rng.sample(range(pages), pages)), [[rng.choice(GARBAGE) for _ in range(-(-room // page))] for _ in new]
    for r, length in enumerate(lengths):
        shared = min(length, lengths[r - 1]) // page if r and rng.random() < 0.3 else 0
        for i in range(-(-length // page)):
            table[r][i] = table[r - 1][i] if i < shared else next(order)
    return new, lengths, torch.tensor(table, dtype=torch.int32)


def check_step(seed: int, device: str) -> None:
    """Choose and attend in one random step, and check both; in every fourth new memory holds NaN, and nothing is replayed."""
    rng, found = random.Random(f"{device} {seed}"), layout_of(seed, device)
    keys, values, index_keys = pools_of(seed % len(ON_GPU) if device == "cuda" else seed, device)
    new, lengths, table = random_requests(found, rng, *keys.stored.shape[:2])
    options = {"spare": found.T - sum(new), "table": table, "pools": (keys, values), "seed": seed, "device": device}
    step = make_step(new, lengths, found.page, **found.sizes, **options)
    most: dict[str, Any] = {"max_seqlen_q": rng.choice((None, found.T, *[8] * (max(new) <= 8)))}
    with new_memory_is_nan() if rng.random() < 0.25 else contextlib.nullcontext():
        if found.sizes["block"] is not None and not found.sizes["one"] and rng.random() < 0.5:
            step = chosen(step, index_keys, found.sizes, **most)
        step.check(found.backend, **most)


def chosen(step: Step, index_keys: Pool, sizes: dict[str, Any], **most: Any) -> Step:
    """Return the step with blocks that random index queries choose, which are checked."""
    (T, G, *_), stored = step.cache.q.shape, poisoned(index_keys, step.unused)
    q = torch.randn(T, G, 1, INDEX_D, device=step.cu.device).to(sizes["dtype"])
    q[int(step.cu[-1]) :] = torch.nan
    out = torch.full((T, G, sizes["n"]), -7, dtype=torch.int32, device=q.device)
    rule: dict[str, Any] = {"block_size": sizes["block"], "n": sizes["n"], "local": 1, "scale": 1.0, "k_scale": stored.scale}
    where = step.cache.cache_seqlens, step.cache.block_table
    selection = choose_blocks_with_kvcache(q, stored.stored, *where, cu_seqlens_q=step.cu, out=out, **rule, **most)
    assert bool((out[int(step.cu[-1]) :] == -1).all())
    for rows, length, (k,) in step.requests(index_keys.exact):
        check_chosen(out[rows].long(), q[rows, :, 0].double(), k[:, 0], length, sizes["block"])
    return step._replace(cache=step.cache._replace(selection=selection))


def check_chosen(got: Tensor, q: Tensor, k: Tensor, length: int, block: int) -> None:
    """Check that rows' blocks [rows,G,n] are ascending, -1 last, their own among them, and that no other has a higher score."""
    (rows, G, n), named = got.shape, got >= 0
    position = torch.arange(length - rows, length, device=k.device)[:, None]
    seen = (position // block + 1).clamp(min=0).expand(-1, G)  # visible blocks
    assert torch.equal(named.sum(-1), seen.clamp(max=n))
    assert bool((((got[..., 1:] > got[..., :-1]) | ~named[..., 1:]) & (got < seen.unsqueeze(-1))[..., 1:]).all())
    if length == 0:
        return
    future = (torch.arange(length, device=k.device) > position)[:, None]
    logits = torch.einsum("tgd,jd->tgj", q, k).masked_fill(future, -torch.inf)
    scores = pad(logits, (0, -length % block), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)
    scores = scores.scatter(-1, (seen - 1).clamp(min=0).unsqueeze(-1), torch.inf)  # its own
    taken = pad(torch.zeros_like(scores), (1, 0)).scatter(-1, got + 1, 1.0)[..., 1:] > 0
    lowest, highest = scores.where(taken, torch.inf).amin(-1), scores.masked_fill(taken, -torch.inf).amax(-1)
    assert bool((lowest >= highest - 1e-5 * (q.abs() @ k.abs().T).amax()).all())
