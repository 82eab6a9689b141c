"""Steps of an engine: random requests end to end, which choose blocks and attend to them, beside float64 over every request's keys.

Steps of a layout have tensors of the same shapes, whatever their requests, so that kernels compile once and calls are replayed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel import Selection, choose_blocks_with_kvcache, decisions, selection_attention_with_kvcache
from nsa_sel.quantize import STORED
from nsa_sel.testing import dense_attention, new_memory_is_nan
from tests.helpers.cases import assert_within_twice_baseline

GARBAGE = (-1, 2**30, -(2**31))  # in a block table, after a request's last page
INDEX_D = 64


class Layout(NamedTuple):
    """What kernels are compiled for: a backend, the sizes of a step's tensors, and where keys are."""

    backend: str | None
    dtype: torch.dtype
    G: int
    h: int
    Dk: int
    Dv: int
    n: int
    block: int | None  # None: ranges
    page: int | None  # None: a cache of each request
    each: str | None = None  # what has a scale of its own in e4m3; None: keys of q's dtype
    one_pool: bool = False  # keys and values of a page lie side by side
    one: bool = False  # one selection for all groups
    room: int = 2048  # keys of a request at most
    T: int = 512
    R: int = 12
    rows: tuple[int, ...] = (0, 1, 1, 1, 2, 4, 8, 9, 30, 150, 300)


B16, F16 = torch.bfloat16, torch.float16
ON_GPU = (
    Layout("cupy-cuda", B16, 4, 16, 128, 128, 16, 128, 128, one_pool=True, room=4096),
    Layout("cupy-cuda", B16, 4, 16, 128, 128, 16, 128, 128, "page", one_pool=True, room=4096),
    Layout("cupy-cuda", F16, 2, 4, 64, 64, 8, 64, 64),
    Layout("cupy-cuda", F16, 2, 16, 128, 64, 8, 64, 128, "head"),
    Layout("cupy-cuda", B16, 2, 8, 64, 128, 5, 128, None),
    Layout("triton-group", B16, 2, 3, 64, 64, 5, 32, 16, "tensor", one=True),
    Layout("cupy-cuda", B16, 2, 2, 64, 64, 4, None, 24),
    Layout(None, F16, 4, 12, 128, 128, 3, 192, 64, one=True),
)
BACKENDS = ("sdpa-packed",) * 9 + ("numba",) * 10 + ("triton-group",)  # on a CPU, where Triton is interpreted


def layout_of(seed: int, device: str) -> Layout:
    """Return the layout of a seed: one of ON_GPU, or on a CPU any."""
    if device == "cuda":
        return ON_GPU[seed % len(ON_GPU)]
    rng, backend = random.Random(seed), BACKENDS[seed % len(BACKENDS)]
    page, plain = rng.choice((None, 1, 16, 24, 64)), rng.random() < 0.7 or backend == "numba"
    each = None if plain else rng.choice(("tensor", "head", *["page"] * (page is not None)))
    small, sizes = (8, 16, 24), (rng.choice((1, 2, 4)), rng.choice((1, 2, 3, 4, 16)))
    return Layout(
        backend, (torch.float32, F16)[seed % 2], *sizes, rng.choice(small), rng.choice(small), rng.choice((1, 3, 5)),
        rng.choice((None, 8, 16, 32, 64)), page, each, page is not None and rng.random() < 0.5, rng.random() < 0.2, 192, 44, 6,
        (0, 1, 1, 1, 2, 4, 9, 20),
    )  # fmt: skip


class Requests(NamedTuple):
    """Rows and keys of each request, and its pages [R, pages of a request] int32, with garbage after the last."""

    new: list[int]
    lengths: list[int]
    table: Tensor


def random_requests(layout: Layout, rng: random.Random, pages: int, page: int) -> Requests:
    """Return chunks with and without a prefix, decoding, drafts, requests without rows or keys, and prefixes that two requests share."""
    new: list[int] = []
    for _ in range(layout.R):
        rows = rng.choice(layout.rows)
        new.append(rows if sum(new) + rows <= layout.T else 0)
    lengths = [
        min(layout.room, rng.choice((rows, rows + rng.randint(0, layout.room), layout.room, max(0, rows - 1), 0, 1))) for rows in new
    ]
    order, width = iter(rng.sample(range(pages), pages)), -(-layout.room // page)
    table = [[rng.choice((*GARBAGE, 0)) for _ in range(width)] for _ in new]
    for r, length in enumerate(lengths):
        shared = min(length, lengths[r - 1]) // page if r and rng.random() < 0.3 else 0
        for i in range(-(-length // page)):
            table[r][i] = table[r - 1][i] if i < shared else next(order)
    return Requests(new, lengths, torch.tensor(table, dtype=torch.int32))


class Numbers(NamedTuple):
    """Keys [pages,page,G,D], or index keys of one group: as stored, what e4m3 stands for, and scales."""

    stored: Tensor
    exact: Tensor
    scale: Tensor | None

    def poisoned(self, unused: Tensor) -> Numbers:
        """Return the keys as stored with NaN where unused [pages,page], and as the scales of pages without a key."""
        nan = self.stored.new_full((), torch.nan, dtype=torch.float32).to(self.stored.dtype)
        stored = torch.where(unused[:, :, None, None], nan, self.stored) if self.stored.dtype != STORED else self.stored.clone()
        if stored.dtype == STORED:
            stored.view(torch.uint8)[unused] = 0x7F
        scale = self.scale
        if scale is not None and len(scale) == len(unused) and scale.dim() == 2:
            scale = scale.masked_fill(unused.all(1)[:, None], torch.nan)
        return Numbers(stored, self.exact, scale)


@functools.cache
def numbers_of(layout: Layout, device: str) -> tuple[Numbers, ...]:
    """Return keys, values and index keys of a pool that all steps of a layout take."""
    page = layout.page or layout.room
    pages, made = layout.R * -(-layout.room // page), torch.Generator(device).manual_seed(0)
    found = []
    for G, D, each in ((layout.G, layout.Dk, layout.each), (layout.G, layout.Dv, layout.each), (1, INDEX_D, layout.each and "tensor")):
        x = torch.randn(pages, page, G, D, generator=made, device=device)
        if each is None:
            x = x.to(layout.dtype)
            found.append(Numbers(x, x.double(), None))
            continue
        scale = 10 ** (torch.rand({"tensor": (1,), "head": (G,), "page": (pages, G)}[each], generator=made, device=device) - 1.5)
        wide = scale.reshape(-1, 1, scale.shape[-1], 1)
        x = (x / wide).clamp(-448, 448).to(STORED)
        found.append(Numbers(x, x.double() * wide.double(), scale))
    return tuple(found)


def check_step(seed: int, device: str) -> None:
    """Choose and attend in one random step, and check both; in every fourth new memory holds NaN, and nothing is replayed."""
    rng = random.Random(f"{device} {seed}")
    with new_memory_is_nan() if rng.random() < 0.25 else contextlib.nullcontext():
        _check_step(seed, device, layout_of(seed, device), rng)


def _check_step(seed: int, device: str, layout: Layout, rng: random.Random) -> None:
    made = torch.Generator(device).manual_seed(seed)
    keys, values, index_keys = numbers_of(layout, device)
    (pages, page), (T, G, n) = keys.stored.shape[:2], (layout.T, layout.G, layout.n)
    requests = random_requests(layout, rng, pages, page)
    if layout.page is None:  # a request's cache is its own page
        requests = requests._replace(table=torch.arange(pages, dtype=torch.int32).unsqueeze(1))
    table, ends = requests.table.to(device), [0, *itertools.accumulate(requests.new)]
    cu, lengths = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, requests.lengths))
    unused = torch.ones(pages, page, dtype=torch.bool)
    for row, length in zip(requests.table.tolist(), requests.lengths, strict=True):
        for i, number in enumerate(row[: -(-length // page)]):
            unused[number, : length - i * page] = False
    unused = unused.to(device)
    most: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": rng.choice((None, T, *[8] * (max(requests.new) <= 8)))}
    q, index_q = (torch.randn(T, G, *of, generator=made, device=device).to(layout.dtype) for of in ((layout.h, layout.Dk), (1, INDEX_D)))
    q[ends[-1] :], index_q[ends[-1] :] = torch.nan, torch.nan
    where = table if layout.page is not None else None

    rows = (T, 1 if layout.one else G, n)
    if layout.block is None:
        start = torch.randint(-3, layout.room, rows, generator=made, device=device)
        width = torch.randint(0, 40, rows, generator=made, device=device)
        selection = Selection.from_ranges(torch.stack((start, start + width), -1))
    elif layout.one or rng.random() < 0.5:
        blocks = torch.randint(-1, layout.room // layout.block + 2, rows, generator=made, device=device)
        blocks[..., 0] *= torch.rand(rows[:2], generator=made, device=device) < 0.5
        selection = Selection.from_blocks(blocks.int(), layout.block)
    else:
        chosen = torch.full(rows, -7, dtype=torch.int32, device=device)
        stored = index_keys.poisoned(unused)
        selection = choose_blocks_with_kvcache(
            index_q, stored.stored, lengths, where, block_size=layout.block, n=n, local=1, scale=1.0, k_scale=stored.scale, out=chosen,
            **most,
        )  # fmt: skip
        check_chosen(layout, requests, chosen, index_q, index_keys.exact)
    check_attention(layout, requests, selection, q, (keys, values), unused, lengths, where, most)


def rows_and_keys(requests: Requests, *numbers: Tensor) -> Any:
    """Yield the rows of each request that has some, its length, and its keys [length,G,D] of each pool."""
    first = 0
    for rows, length, pages in zip(requests.new, requests.lengths, requests.table, strict=True):
        if rows:
            used = pages[: -(-length // numbers[0].shape[1])].long().to(numbers[0].device)
            yield slice(first, first + rows), length, [x[used].flatten(0, 1)[:length] for x in numbers]
        first += rows


def check_chosen(layout: Layout, requests: Requests, chosen: Tensor, index_q: Tensor, index_keys: Tensor) -> None:
    """Check that a row's chosen blocks are ascending, -1 last, its own among them, and that no other has a higher score."""
    block, total = layout.block or 1, sum(requests.new)
    assert bool((chosen[total:] == -1).all())
    for rows, length, (k,) in rows_and_keys(requests, index_keys):
        count, got = rows.stop - rows.start, chosen[rows].long()
        position = torch.arange(length - count, length, device=k.device)[:, None]
        logits = torch.einsum("tgd,jd->tgj", index_q[rows, :, 0].double(), k[:, 0])
        off = 1e-5 * torch.einsum("tgd,jd->tgj", index_q[rows, :, 0].double().abs(), k[:, 0].abs()).amax() if length else 0.0
        logits = logits.masked_fill((torch.arange(length, device=k.device) > position)[:, None], -torch.inf)
        scores = torch.nn.functional.pad(logits, (0, -length % block), value=-torch.inf).unflatten(-1, (-1, block)).amax(-1)
        seen = (position // block + 1).clamp(min=0).expand(-1, layout.G)  # visible blocks
        scores = scores.scatter(-1, (seen - 1).clamp(min=0).unsqueeze(-1), torch.inf) if length else scores
        named = got >= 0
        assert torch.equal(named.sum(-1), seen.clamp(max=layout.n))
        assert bool(((got[..., 1:] > got[..., :-1]) | ~named[..., 1:]).all())
        assert bool((got < seen.unsqueeze(-1)).all())
        if length:
            lowest = torch.where(named, scores.gather(-1, got.clamp(min=0)), torch.inf).amin(-1)
            taken = torch.nn.functional.pad(torch.zeros_like(scores), (1, 0)).scatter(-1, got + 1, 1.0)[..., 1:] > 0
            assert bool((lowest >= scores.masked_fill(taken, -torch.inf).amax(-1) - off).all())


def check_attention(
    layout: Layout, requests: Requests, selection: Selection, q: Tensor, numbers: tuple[Numbers, Numbers], unused: Tensor, lengths: Tensor,
    table: Tensor | None, most: dict[str, Any],
) -> None:  # fmt: skip
    """Check o and lse, which held NaN, within twice the error of a plain computation in q's precision."""
    k, v = (x.poisoned(unused) for x in numbers)
    caches, scales = [k.stored, v.stored], {} if k.scale is None else {"k_scale": k.scale, "v_scale": v.scale}
    if layout.one_pool:
        pool = torch.cat([x.view(torch.uint8) if x.dtype == STORED else x for x in caches], -1).transpose(1, 2).contiguous()
        caches = [x.transpose(1, 2) for x in pool.view(caches[0].dtype).split((layout.Dk, layout.Dv), -1)]
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.full((*q.shape[:3], layout.Dv), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full(q.shape[:3], torch.nan, dtype=wide, device=q.device)
    with torch.no_grad():
        selection_attention_with_kvcache(
            q, *caches, selection, lengths, table, **most, **scales, out=o, lse_out=lse, return_lse=True, backend=layout.backend
        )
    assert layout.backend in (None, decisions()[-1].forward)
    total = sum(requests.new)
    assert bool((o[total:] == 0).all())
    assert bool((lse[total:] == -torch.inf).all())
    precision, found = wide if scales else q.dtype, []
    off = 0.0
    ranges = selection.ranges.view(len(q), -1, *selection.ranges.shape[3:])
    for rows, length, pair in rows_and_keys(requests, *(x.exact for x in numbers)):
        position = torch.arange(length - rows.stop + rows.start, length, device=q.device)
        keys = [x.transpose(0, 1).unsqueeze(0) for x in pair]
        if not length:
            keys = [x.new_zeros(1, layout.G, 1, x.shape[3]) for x in keys]
        off = max(off, float(q[rows].abs().amax().double() * keys[0].abs().amax() * layout.Dk**0.5))
        given = ranges[rows].unsqueeze(0), None, position.unsqueeze(0)
        found.append(
            [x[0] for to in (torch.float64, precision) for x in dense_attention(*(y.to(to) for y in (q[rows][None], *keys)), *given)]
        )
    if not found:
        return
    exact_o, exact_lse, plain_o, plain_lse = (torch.cat(x) for x in zip(*found, strict=True))
    off = 4 * (1 + off)
    assert_within_twice_baseline(o[:total], exact_o, plain_o.to(o.dtype), "o", off * float(numbers[1].exact.abs().amax()))
    assert_within_twice_baseline(lse[:total], exact_lse, plain_lse, "lse", off)
