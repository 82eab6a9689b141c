"""The contract of choosing blocks for new tokens by cached index keys: contiguous or in pages, in q's dtype or in e4m3."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nsa_sel import choose_blocks_with_kvcache, decisions, selection_attention_with_kvcache
from nsa_sel.backends import choose_triton
from nsa_sel.backends._triton import choose_few, choose_logits
from nsa_sel.core import choose as core_choose
from nsa_sel.core.call import Rule
from nsa_sel.quantize import STORED
from nsa_sel.selection import Selection
from tests.contract.lanes import Lane, lanes, parameters
from tests.helpers.choose import assert_chosen, best, pooled_scores
from tests.helpers.gpus import RERUNS, SM, captured, no_waiting, replayed

LENGTHS = {"cpu": (0, 1, 9, 150), "interpreter": (0, 1, 9, 150), "cuda": (0, 1, 9, 150, 1500) * 7}
ROOM = {"cpu": 192, "interpreter": 192, "cuda": 1536}  # keys of a sequence
MSA, QSA = Rule(1, 1, 16, 3, 0, 1), Rule(4, 4, 4, 5, 0, 0)


class Index(NamedTuple):
    """New tokens, KV groups, groups of index keys, heads, columns; the rule, keys of a page, and what has a scale of its own in e4m3."""

    S_q: int = 1
    G: int = 2
    groups: int = 1
    h: int = 1
    D: int = 16
    rule: Rule = MSA
    page: int | None = None
    each: str | None = None
    pool: dict[str, Any] = {}  # noqa: RUF012 - options of the call

    @property
    def name(self) -> str:
        words = [f"S{self.S_q}-G{self.G}of{self.groups}-h{self.h}-D{self.D}", "-".join(map(str, self.rule)), *map(str, self.pool)]
        return "-".join([*words, *([] if self.page is None else [f"pages{self.page}"]), *([] if self.each is None else [self.each])])


RELU, WEIGHTS = {"activation": "relu", "tail": True}, {"softmax": True}
CASES = (
    Index(), Index(page=16), Index(3, page=24, G=4), Index(8, 4, 4, 2, page=64), Index(2, page=8, rule=MSA._replace(block_size=12)),
    Index(h=4, rule=QSA, pool=RELU), Index(2, h=3, rule=QSA, pool=RELU, page=16), Index(9, h=2, rule=QSA, pool=RELU),
    Index(12, 2, 2, 2, page=16),
    Index(2, 2, 2, 3, rule=Rule(8, 4, 16, 4, 1, 2), pool=WEIGHTS), Index(1, 1, 1, 2, rule=Rule(8, 4, 12, 3, 0, 1), pool=WEIGHTS, page=8),
    Index(h=3, rule=Rule(8, 4, 16, 3, 0, 1), pool={"reduce": "sum"}), Index(h=3, D=192, pool={"heads": "max", "reduce": "sum"}, page=48),
    Index(2, h=3, pool={"heads": "max"}, page=16),
)  # fmt: skip
STORED_CASES = (
    Index(each="none"), Index(2, 2, 2, 2, page=16, each="head"), Index(h=4, rule=QSA, pool=RELU, page=16, each="page"),
    Index(page=64, each="tensor"), Index(3, 4, 4, page=16, each="page"), Index(9, h=2, page=16, each="page"),
)  # fmt: skip


class Cache(NamedTuple):
    q: Tensor
    k_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None
    k_scale: Tensor | None
    keys: Tensor  # [B,groups,C,D] of every sequence in float64, 0 where it has none


def make_cache(lane: Lane, case: Index, dtype: torch.dtype, seed: int = 0) -> Cache:
    """Sequences of LENGTHS keys.

    NaN in all index keys, and in scales of pages, that no token sees; pages that do not exist in the table after the last one.
    """
    generator, lengths, rule = torch.Generator().manual_seed(seed), torch.tensor(LENGTHS[lane.device]), case.rule
    B, C, D = len(lengths), rule.compressed_keys(ROOM[lane.device]), case.D
    page = case.page or C
    each = -(-C // page)
    q = torch.randn(B, case.S_q, case.G, case.h, D, generator=generator).to(dtype)
    whole = torch.randn(B, each * page, case.groups, D, generator=generator).unflatten(1, (each, page))  # pages of every sequence
    scale = torch.ones(B, each, 1, case.groups, 1)
    if case.each is not None and case.each != "none":
        sizes = {"tensor": (1, 1, 1), "head": (1, 1, case.groups), "page": (B, each, case.groups)}[case.each]
        scale = (0.5 + torch.rand(sizes, generator=generator))[:, :, None, :, None].expand_as(scale)
    kept = (whole / scale).to(dtype if case.each is None else STORED).float()
    seen = torch.tensor([rule.compressed_keys(int(length)) for length in lengths])
    there = (torch.arange(each * page) < seen[:, None]).view(B, each, page, 1, 1)
    keys = (kept.double() * scale.double()).where(there, 0.0).flatten(1, 2).transpose(1, 2)
    kept, scale = kept.where(there, torch.nan), scale.where(there.any(2, keepdim=True), torch.nan)
    table = None
    scales = {"tensor": scale[-1:, 0, 0, 0, 0], "head": scale[-1, 0, 0, :, 0], "page": scale[:, :, 0, :, 0]}
    k_scale = scales.get(case.each or "none")
    if case.page is None:
        kept = kept.flatten(1, 2)
    else:
        order = torch.randperm(B * each + 1, generator=generator)[: B * each]
        pool = torch.full((B * each + 1, page, case.groups, D), torch.nan)
        pool[order] = kept.flatten(0, 1)
        kept, table = pool, order.view(B, each).int().where(there[:, :, 0, 0, 0], 2**30)
        if case.each == "page":
            k_scale = torch.full((B * each + 1, case.groups), torch.nan)
            k_scale[order] = scales["page"].flatten(0, 1)
    tensors = (q, kept.to(dtype if case.each is None else STORED), lengths.int(), table, k_scale)
    return Cache(*(None if x is None else x.to(lane.place) for x in tensors), keys)  # type: ignore[arg-type]


def chosen(lane: Lane, case: Index, cache: Cache, **options: Any) -> Selection:
    return choose_blocks_with_kvcache(
        *cache[:4], k_scale=cache.k_scale, backend=lane.name, **case.rule._asdict(), **case.pool, **options
    )  # fmt: skip


def check(lane: Lane, case: Index, cache: Cache, blocks: Tensor) -> None:
    """Check blocks [B,S_q,G,n] against the plain reference."""
    rule, pool = case.rule, {"reduce": "max", **case.pool}
    relu, tail = pool.pop("activation", None) == "relu", pool.pop("tail", False)
    positions = (cache.cache_seqlens.long()[:, None] + torch.arange(-case.S_q, 0, device=lane.place)).cpu()
    sizes = {"block_size": rule.block_size, "compress_block": rule.compress_block, "compress_stride": rule.compress_stride}
    keys = cache.keys.expand(-1, case.G, -1, -1)
    scores = pooled_scores(cache.q, keys, positions, S_kv=ROOM[lane.device], relu=relu, **sizes, **pool)
    expected = best(scores, positions, rule.block_size, rule.n, rule.first, rule.local)
    if tail:
        t = positions[:, :, None, None].expand(-1, -1, case.G, 1)
        last = torch.where((t >= 0) & ((t + 1) % rule.block_size != 0), t // rule.block_size, -1)
        assert torch.equal(blocks[..., -1:].cpu().long(), last)
        blocks = blocks[..., :-1]
    assert_chosen(blocks, scores, expected, 1e-4 if lane.device == "cuda" else 0.0)


def of(cases: tuple[Index, ...], quantized: bool = False) -> Any:
    takes = lambda lane: not lane.limits.tiles_only and (not quantized or "e4m3" in lane.limits.quantized)  # noqa: E731
    found = [(lane, case) for lane in lanes("cpu", "interpreter", "cuda", kind="choose") if takes(lane) for case in cases]
    return pytest.mark.parametrize(("lane", "case"), parameters(found))


@pytest.fixture(autouse=True)
def few_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: short sequences take several steps and parts."""
    if not torch.cuda.is_available():
        small = {name: replace(config, block_l=16, rows=16) for name, config in choose_triton.CONFIGS.items()}
        monkeypatch.setattr(choose_triton, "config_of", lambda call, kernel: small[kernel])
        monkeypatch.setattr(choose_few, "parts_of", lambda programs, steps, together: min(3, steps))
        monkeypatch.setattr(choose_logits, "LEAST_KEYS", 64)


@of((*CASES, *(Index(S, 4, 1, 1, 128, Rule(1, 1, 128, 4, 0, 1), page=page) for S, page in ((1, None), (1, 64), (4, 128)))))
def test_choose_over_caches(lane: Lane, case: Index) -> None:
    check_case(lane, case, lane.dtype)


@of(STORED_CASES, quantized=True)
def test_choose_over_quantized_caches(lane: Lane, case: Index) -> None:
    if lane.device == "cuda" and SM < 89:
        pytest.skip("quantized-sm")
    for dtype in (torch.float32, torch.float16) if lane.device != "cuda" else (torch.bfloat16, torch.float16):
        check_case(lane, case, dtype)


def check_case(lane: Lane, case: Index, dtype: torch.dtype) -> None:
    """Twice with the same bits, into a buffer of the caller's and into a new one; on a GPU without waiting, and in a graph."""
    cache = make_cache(lane, case, dtype)
    B, n = len(cache.q), case.rule.n + bool(case.pool.get("tail"))
    out = torch.full((B, case.S_q, case.G, n), -7, dtype=torch.int64, device=lane.place)
    selection = chosen(lane, case, cache, out=out)
    request = decisions()[-1].request
    assert decisions()[-1].forward == lane.name
    assert (request.page_size, request.quantized is None) == (case.page, case.each is None)
    check(lane, case, cache, out)
    assert torch.equal(selection.block_indices, out)
    if lane.device == "cuda":
        with no_waiting():
            again = chosen(lane, case, cache)
        other = make_cache(lane, case, dtype, seed=1)
        graph, outputs = captured(lambda: (chosen(lane, case, cache, out=out).block_indices,))
        for mine, new in zip(cache[:5], other[:5], strict=True):
            if mine is not None and new is not None:
                mine.copy_(new)
        replayed(graph, outputs, RERUNS)
        check(lane, case, other, out)
        return
    again = chosen(lane, case, cache)
    assert torch.equal(again.block_indices, out)


@of((Index(), Index(3, page=16), Index(h=2, rule=QSA, pool=RELU, page=16)))
def test_choose_ties_over_caches_go_to_the_lower_block(lane: Lane, case: Index) -> None:
    cache = make_cache(lane, case, lane.dtype)
    cache = cache._replace(k_cache=cache.k_cache.where(cache.k_cache.isnan(), 0), keys=torch.zeros_like(cache.keys))
    check(lane, case, cache, chosen(lane, case, cache).block_indices)


@of((Index(S_q=2, page=16),))
def test_one_token_of_each_sequence_without_its_dimension(lane: Lane, case: Index) -> None:
    """q [B,G,h,D] and out [B,G,n]; strides of heads before keys; the selection is what attention over the cache takes."""
    cache = make_cache(lane, case._replace(S_q=1), lane.dtype)
    out = torch.empty(len(cache.q), case.G, case.rule.n, dtype=torch.int32, device=lane.place)
    k_cache = cache.k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    selection = chosen(lane, case, cache._replace(q=cache.q[:, 0], k_cache=k_cache), out=out)
    check(lane, case._replace(S_q=1), cache, out[:, None])
    values = cache.k_cache.expand(-1, -1, case.G, -1)
    o = selection_attention_with_kvcache(cache.q[:, 0], values, values, selection, *cache[2:4])
    assert bool(o.isfinite().all())


@of((Index(page=16),))
def test_sequences_of_no_batch_choose_nothing(lane: Lane, case: Index) -> None:
    cache = make_cache(lane, case, lane.dtype)
    none = Cache(cache.q[:0], cache.k_cache, cache.cache_seqlens[:0], cache.block_table[:0], None, cache.keys)  # type: ignore[index]
    assert chosen(lane, case, none).block_indices.shape == (0, 1, case.G, case.rule.n)


ROWS = (  # of each request: none, more than it has keys, new tokens, and a prefill with and without a prefix
    (0, 3, 2, 40), (2, 0, 9, 1), (0, 0, 1, 150), (1, 1, 8, 8),
)  # fmt: skip
PACKED = (
    Index(), Index(page=16), Index(page=24, G=4), Index(G=4, groups=4, h=2, page=64, rule=MSA._replace(block_size=32)),
    Index(h=4, rule=QSA, pool=RELU, page=16), Index(h=5, page=16), Index(2, h=3, pool={"heads": "max"}, page=32),
    Index(h=3, rule=Rule(8, 4, 16, 3, 0, 1), pool={"reduce": "sum"}), Index(1, 1, 1, 2, rule=Rule(8, 4, 12, 3, 0, 1), pool=WEIGHTS, page=8),
)  # fmt: skip
PACKED_STORED = (
    Index(each="none"), Index(G=2, groups=2, h=2, page=16, each="head"), Index(h=4, rule=QSA, pool=RELU, page=16, each="page"),
    Index(page=24, each="page"), Index(page=64, each="tensor"),
)  # fmt: skip


class Packed(NamedTuple):
    """Rows of requests over a cache whose q is [T,G,h,D], NaN in the last rows, which are of no request; and the same rows as sequences
    of one token each."""

    cache: Cache
    cu: Tensor
    rows: Cache


def make_packed(lane: Lane, case: Index, dtype: torch.dtype, new: tuple[int, ...]) -> Packed:
    """`new` rows of each request, in turn."""
    cache, lengths = make_cache(lane, case, dtype), LENGTHS[lane.device]
    counts, seen = torch.tensor(new).repeat(-(-len(lengths) // len(new)))[: len(lengths)], torch.tensor(lengths)
    cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    T, padding = int(cu[-1]), 3
    q = torch.randn(T, case.G, case.h, case.D, generator=torch.Generator().manual_seed(0)).to(dtype)
    q = torch.cat((q, q.new_full((padding, *q.shape[1:]), torch.nan)))
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    seen = (seen[request] - cu[request + 1] + torch.arange(T) + 1).clamp(min=0)  # keys up to each row's own
    rows = cache._replace(q=q[:T, None].to(lane.place), cache_seqlens=seen.int().to(lane.place), keys=cache.keys[request])
    return Packed(cache._replace(q=q.to(lane.place)), cu.int().to(lane.place), rows)


def check_packed(lane: Lane, case: Index, packed: Packed, blocks: Tensor) -> None:
    T = len(packed.rows.q)
    check(lane, case._replace(S_q=1), packed.rows, blocks[:T].unsqueeze(1))
    assert bool((blocks[T:] == -1).all())


@pytest.mark.parametrize("number", range(len(ROWS)))
@of(PACKED)
def test_choose_for_packed_requests(lane: Lane, case: Index, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mix of prefill, decoding and requests without rows, also in parts that cut requests, and into rows of a larger buffer."""
    packed = make_packed(lane, case, lane.dtype, ROWS[number])
    T, n = len(packed.cache.q), case.rule.n + bool(case.pool.get("tail"))
    selection = chosen(lane, case, packed.cache, cu_seqlens_q=packed.cu)
    assert decisions()[-1].forward == lane.name
    check_packed(lane, case, packed, selection.block_indices.squeeze(1))
    most = int(packed.cu.diff().max())
    buffer = torch.full((T + 2, case.G + 1, n + 1), -7, dtype=torch.int32, device=lane.place)
    monkeypatch.setattr(core_choose, "SCRATCH", 1 << 12)
    monkeypatch.setattr(core_choose, "LEAST_ROWS", 1)
    chosen(lane, case, packed.cache, cu_seqlens_q=packed.cu, max_seqlen_q=most, out=buffer[:, 1:, :n])
    assert torch.equal(buffer[:T, 1:, :n], selection.block_indices.squeeze(1).int())
    buffer[:T, 1:, :n] = -7
    assert bool((buffer == -7).all())


@of(PACKED_STORED, quantized=True)
def test_choose_for_packed_requests_by_quantized_keys(lane: Lane, case: Index) -> None:
    if lane.device == "cuda" and SM < 89:
        pytest.skip("quantized-sm")
    packed = make_packed(lane, case, lane.dtype, ROWS[0])
    check_packed(lane, case, packed, chosen(lane, case, packed.cache, cu_seqlens_q=packed.cu).block_indices.squeeze(1))


@of((Index(page=16), Index(h=4, rule=QSA, pool=RELU)))
def test_packed_ties_go_to_the_lower_block(lane: Lane, case: Index) -> None:
    packed = make_packed(lane, case, lane.dtype, ROWS[0])
    k_cache, keys = packed.cache.k_cache, torch.zeros_like(packed.rows.keys)
    packed = packed._replace(cache=packed.cache._replace(k_cache=k_cache.where(k_cache.isnan(), 0)), rows=packed.rows._replace(keys=keys))
    check_packed(lane, case, packed, chosen(lane, case, packed.cache, cu_seqlens_q=packed.cu).block_indices.squeeze(1))
