"""The contract of choosing blocks, by every backend on every device: attention to compressed keys, the blocks, gradients, pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nsa_sel import Selection, choose_blocks, decisions
from nsa_sel.backends import choose_torch, choose_triton
from nsa_sel.backends._triton import choose_dkdv, choose_logits, choose_pages, choose_scores, top_n
from nsa_sel.core import registry
from nsa_sel.core.call import ChooseCall, Pool, Rule
from tests.contract.lanes import Lane, lanes, parameters
from tests.helpers.cases import make_grads
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.choose import (
    SHAPES,
    SMALL,
    assert_chosen,
    best,
    check_both,
    check_forward,
    check_unread,
    in_pages,
    make_choose_call,
    make_packed_call,
    pooled_scores,
    results,
)
from tests.helpers.gpus import RERUNS, captured, one_at_a_time, replayed

HOPPER = {
    "h16": (1, 1500, 1500, 2, 16, 128, 128, Rule()),
    "h4-batch": (3, 777, 777, 2, 4, 128, 128, Rule()),
    "chunked-prefill": (1, 301, 2999, 2, 16, 128, 128, Rule()),
    "few-keys": (2, 200, 200, 1, 8, 128, 128, Rule()),
    "one-key": (1, 40, 40, 1, 12, 64, 64, Rule()),
    "h2": (1, 1111, 1111, 1, 2, 64, 128, Rule()),
    "h3-other-rule": (1, 1111, 1111, 2, 3, 64, 64, Rule(compress_block=24, compress_stride=12, block_size=48)),
    "h12-every-key": (1, 333, 333, 2, 12, 128, 64, Rule(compress_block=4, compress_stride=4, block_size=64)),
    "h48-192": (1, 500, 1100, 1, 48, 192, 128, Rule()),
    "h64": (1, 700, 1900, 1, 64, 128, 128, Rule()),
}
GPU = {"h16-128": (1, 700, 1500, 2, 16, 128, 128, Rule()), "h6-192-128": (2, 333, 333, 1, 6, 192, 128, Rule())}
LANES = lanes("cpu", "interpreter", "cuda", kind="choose")
EDGES = {
    "no-local": SMALL._replace(local=0), "nothing-forced": SMALL._replace(first=0, local=0), "all-forced": SMALL._replace(first=2),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: short sequences take several steps, parts and sections."""
    if not torch.cuda.is_available():
        small = {name: replace(config, block_l=16) for name, config in choose_triton.CONFIGS.items()}
        monkeypatch.setattr(choose_triton, "config_of", lambda call, kernel: small[kernel])
        for module, name, value in (
            (choose_pages, "LEAST_KEYS", 4),
            (choose_pages, "SHARES", 64),
            (choose_dkdv, "SHORTEST", 8),
            (choose_scores, "LEAST_STEPS", 1),
            (choose_logits, "LEAST_KEYS", 16),
        ):
            monkeypatch.setattr(module, name, value)


def slack(lane: Lane) -> float:
    """Sums of float32 on a GPU may choose another block of nearly the same importance."""
    return 1e-4 if lane.device == "cuda" else 0.0


def near(lane: Lane) -> dict[str, float]:
    """Tolerances of sums in another order."""
    return {"rtol": 2e-2, "atol": 2e-2} if lane.device == "cuda" else {"rtol": 1e-4, "atol": 1e-5}


def each(whats: Any) -> Any:
    return pytest.mark.parametrize(("lane", "what"), parameters([(lane, what) for lane in LANES for what in whats(lane)]))


def of_any_keys(*whats: Any) -> Any:
    """Return the mark for lanes that take any sizes, pages, positions and packed batches, and for each of `whats`."""
    return each(lambda lane: [] if lane.limits.tiles_only else whats)


def of_all(*whats: Any) -> Any:
    return each(lambda lane: whats)


def middle(lane: Lane, **options: Any) -> ChooseCall:
    """A call of a batch that every test may take."""
    return make_choose_call(HOPPER["h4-batch"] if lane.limits.tiles_only else "h3", lane.dtype, lane.place, **options)


@each(lambda lane: list(HOPPER) if lane.limits.tiles_only else [*SHAPES, *(GPU if lane.device == "cuda" else ())])
def test_choose_shapes(lane: Lane, what: str) -> None:
    call = make_choose_call(HOPPER[what] if lane.limits.tiles_only else GPU.get(what, what), lane.dtype, lane.place)
    check_both(registry.load_chooser(lane.name), call, slack(lane), with_lse=what not in ("h6", "h64"))


@each(lambda lane: [dtype for dtype in lane.dtypes if not (lane.device == "cpu" and dtype == torch.bfloat16)])
def test_choose_dtypes_with_a_negative_scale(lane: Lane, what: torch.dtype) -> None:
    call = make_choose_call(HOPPER["h4-batch"] if lane.limits.tiles_only else "h3", what, lane.place, scale=-0.3)
    check_both(registry.load_chooser(lane.name), call, slack(lane))


@of_all(*EDGES)
def test_choose_what_is_forced(lane: Lane, what: str) -> None:
    """The public call names the backend; contiguous keys and, where a backend reads them, keys in pages."""
    rule = EDGES[what]
    sizes = (2, 21, 90, 2, 16, 64, 64, rule) if lane.limits.tiles_only else (2, 3, 90, 2, 3, 16, 24, rule)
    q_pos = None if lane.limits.tiles_only else torch.tensor([[89, 41, 5], [0, 88, 50]]).to(lane.place)
    call = make_choose_call(sizes, lane.dtype, lane.place, q_pos=q_pos)
    check_forward(registry.load_chooser(lane.name).forward, call, slack(lane))
    if not lane.limits.tiles_only:
        check_pages(lane, call, 4)
        q, k = torch.randn(1, 70, 1, 2, 64, device=lane.place).to(lane.dtype), torch.randn(1, 1, 70, 64, device=lane.place).to(lane.dtype)
        choose_blocks(q, k, block_size=16, n=3, first=min(1, rule.first), local=rule.local, backend=lane.name)
        assert decisions()[-1].forward == lane.name


@of_all("implied", "given")
def test_choose_reads_nothing_that_counts_for_nothing(lane: Lane, what: str) -> None:
    """NaN in rows that see nothing and in keys that no row sees; reruns are bit-equal."""
    sizes = (2, 333, 333, 2, 16, 64, 64, Rule()) if lane.limits.tiles_only else (2, 33, 33, 1, 3, 16, 24, SMALL)
    call = make_choose_call(sizes, lane.dtype, lane.place, start=-100 if lane.limits.tiles_only else -10)
    call.q_pos = call.positions() if what == "given" and not lane.limits.tiles_only else None
    check_unread(registry.load_chooser(lane.name), call, reruns=10 if lane.device == "cuda" else 2)


@of_all("implied", "given")
def test_choose_in_parts_of_rows(lane: Lane, what: str) -> None:
    """Scores, sums and sections of a few rows at once give the same blocks, and gradients up to the order of sums."""
    backend = registry.load_chooser(lane.name)
    sizes = (2, 37, 100, 1, 4, 16, 24, SMALL) if not lane.limits.tiles_only else HOPPER["h4-batch"]
    call = make_choose_call(sizes, lane.dtype, lane.place)
    call.q_pos = call.positions() if what == "given" and not lane.limits.tiles_only else None
    do, dlse = make_grads(call.q, call.v)
    whole = results(backend, call, do, dlse)
    for scratch in (1, 1 << 12, 1 << 18):
        found = results(backend, changed(call, scratch=scratch), do, dlse)
        assert torch.equal(found[2], whole[2])
        torch.testing.assert_close(found, whole, **near(lane))


@of_all("q-heads-first", "keys-first")
def test_choose_strides(lane: Lane, what: str) -> None:
    call, backend = middle(lane), registry.load_chooser(lane.name)
    do, _ = make_grads(call.q, call.v)
    expected = results(backend, call, do, None)
    if what == "keys-first":
        call.k, call.v = (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (call.k, call.v))
    else:
        call.q, do = (x.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4) for x in (call.q, do))
    torch.testing.assert_close(results(backend, call, do, None), expected)


@of_all(None)
def test_choose_graphs_and_autocast(lane: Lane, what: None) -> None:
    """A replay gives the bits of a call; the caller's autocast changes none."""
    call, backend = middle(lane), registry.load_chooser(lane.name)
    do, dlse = make_grads(call.q, call.v)
    expected = results(backend, call, do, dlse)
    graph = captured(lambda: results(backend, call, do, dlse), lane.place)
    assert all(map(torch.equal, expected, replayed(*graph, RERUNS)))
    with torch.autocast(lane.place, torch.float16):
        assert all(map(torch.equal, expected, results(backend, call, do, dlse)))


# Packed batches

MIXED = (5, 0, 1, 18, 8, 11)  # shorter than a compressed block of 8, empty, one row, one compressed key, and more; not multiples
PACKED: dict[str, Callable[..., ChooseCall]] = {
    "mixed": lambda **how: make_packed_call(MIXED, sizes=(1, 3, 16, 24), **how),
    "one-sequence": lambda **how: make_packed_call((18,), spare=0, sizes=(1, 4, 16, 16), **how),
    "more-sequences-than-one-search-step": lambda **how: make_packed_call((1, 0) * 24, sizes=(1, 2, 16, 16), **how),
    "nothing-but-padding": lambda **how: make_packed_call((0, 0), spare=9, sizes=(1, 2, 16, 16), **how),
    "fewer-pieces-than-a-block": lambda **how: make_packed_call(
        (13, 9), rule=SMALL._replace(block_size=12, n=3), sizes=(1, 6, 16, 16), **how
    ),
}


@of_any_keys(*PACKED)
def test_choose_packed_batches(lane: Lane, what: str) -> None:
    check_both(registry.load_chooser(lane.name), PACKED[what](dtype=lane.dtype, device=lane.place), slack(lane))


@of_any_keys({"reduce": "max"}, {"reduce": "sum", "first": 1}, {"heads": "max", "activation": "relu"}, {"reduce": "sum", "softmax": True})
def test_choose_blocks_of_packed_batches_as_each_sequence_alone(lane: Lane, what: dict[str, Any]) -> None:
    """By index keys of one group or of all; NaN in padding."""
    bounds, T, options = [0, *accumulate(MIXED)], sum(MIXED) + 3, {"block_size": 4, "n": 3, "backend": lane.name, **what}
    q, k = torch.randn(T, 2, 3, 16, device=lane.place).to(lane.dtype), torch.randn(T, 2, 16, device=lane.place).to(lane.dtype)
    q[bounds[-1] :], k[bounds[-1] :] = torch.nan, torch.nan
    for keys, cu in ((k, bounds), (k[:, :1], torch.tensor(bounds).to(lane.place))):
        chosen = choose_blocks(q, keys, cu_seqlens=cu, max_seqlen=20, **options)  # type: ignore[arg-type]
        assert (chosen.ranges.shape, chosen.block_size, chosen.disjoint) == ((1, T, 2, 3, 2), 4, True)
        assert decisions()[-1].forward == lane.name
        for begin, end in pairwise(bounds):
            alone = choose_blocks(q[None, begin:end], keys[begin:end].transpose(0, 1).unsqueeze(0), **options)  # type: ignore[arg-type]
            assert torch.equal(chosen.block_indices[:, begin:end], alone.block_indices)
        assert not chosen.ranges[:, bounds[-1] :].any()


@of_any_keys(None)
def test_choose_packed_batches_as_each_sequence_alone(lane: Lane, what: None) -> None:
    """Results are bit-equal except dk and dv, whose sections differ. NaN in every second sequence stays there."""
    backend = registry.load_chooser(lane.name)
    call = make_packed_call((5, 0, 19, 10), sizes=(1, 3, 16, 24), dtype=lane.dtype, device=lane.place)
    do, dlse = make_grads(call.q, call.v)
    clean, (q, k, v) = check_unread(backend, call), (call.q.clone(), call.k.clone(), call.v.clone())
    every = list(call.each_sequence())
    for number, (rows, keys, sequence) in enumerate(every):
        alone = results(backend, sequence, do[:, rows], dlse[:, rows])
        if lane.device != "cuda":  # where other tiles may add in another order
            assert all(torch.equal(x[:, rows], y) for x, y in zip(clean[:4], alone, strict=False))
        torch.testing.assert_close([x[:, :, keys] for x in clean[4:]], [*alone[4:]], **near(lane))
        if number % 2 == 0:
            q[:, rows], k[:, :, keys], v[:, :, keys] = torch.nan, torch.nan, torch.nan
    found = results(backend, call.of(q, k, v), do, dlse)
    for rows, keys, _ in every[1::2]:
        assert all(torch.equal(x[:, rows], y[:, rows]) for x, y in zip(clean[:4], found, strict=False))
        assert all(torch.equal(x[:, :, keys], y[:, :, keys]) for x, y in zip(clean[4:], found[4:], strict=True))


# Compressed keys in pages

PAGES: dict[str, tuple[tuple[Any, ...], list[int]]] = {  # B, S, S_kv, G, h, Dk, Dv, rule; lengths
    "decode": ((3, 1, 96, 2, 4, 16, 16, SMALL), [96, 41, 5]),
    "drafts": ((2, 3, 80, 1, 3, 24, 16, SMALL), [80, 33]),
    "empty": ((3, 2, 64, 1, 2, 16, 24, SMALL), [0, 1, 64]),
    "nsa": ((1, 1, 512, 1, 16, 16, 16, Rule(n=4)), [500]),
    "192-128": ((1, 2, 48, 1, 2, 192, 128, SMALL), [47]),
    "three-pieces": ((2, 1, 60, 1, 2, 16, 16, SMALL._replace(block_size=12, n=3)), [60, 31]),
    "covers-a-block": ((2, 2, 64, 1, 2, 16, 16, SMALL._replace(compress_block=16)), [64, 19]),
    "many-rows": ((2, 13, 48, 1, 6, 16, 16, SMALL), [26, 48]),  # which do not fit a tile, and are gathered
}
PAGES_OF_A_GPU = {
    "split": ((3, 1, 1536, 1, 16, 128, 128, Rule()), [0, 700, 1499]),
    "split-drafts": ((2, 4, 1536, 1, 16, 64, 64, Rule()), [3, 1200]),
    "many-sequences": ((150, 1, 1536, 1, 16, 128, 128, Rule()), [*range(0, 1500, 10)]),
}


def check_pages(lane: Lane, call: ChooseCall, slots: int, **settings: int) -> None:
    """Within the error that the oracle allows, twice with the same bits."""
    pages, backend = in_pages(call, slots), registry.load_chooser(lane.name)
    pages.settings = replace(pages.settings, **settings)
    with new_memory_is_nan():
        runs = [backend.paged(pages) if hasattr(backend, "paged") else backend.forward(pages.gathered()) for _ in range(2)]
    check_forward(lambda _: runs[0], call, slack(lane))
    assert all(map(torch.equal, *runs))


def pages_of(lane: Lane) -> list[tuple[str, int]]:
    """Return names of sequences, and compressed keys of a page."""
    names = [] if lane.limits.tiles_only else [*PAGES, *(PAGES_OF_A_GPU if lane.device == "cuda" else ())]
    return [(name, slots) for name in names for slots in ((4, 1) if name == "drafts" else (4,))]


@each(pages_of)
def test_choose_over_pages(lane: Lane, what: tuple[str, int]) -> None:
    """New tokens are the last ones of sequences of different lengths; rows before the first token see nothing."""
    name, slots = what
    shape, lengths = (PAGES | PAGES_OF_A_GPU)[name]
    q_pos = (torch.tensor(lengths)[:, None] + torch.arange(-shape[1], 0)).clamp(min=-1).to(lane.place)
    call = make_choose_call(shape, lane.dtype, lane.place, q_pos=q_pos)
    check_pages(lane, call, slots)
    if name == "decode":
        check_pages(lane, call, slots, workspace_bytes=1 << 9)  # sequence by sequence
        other = torch.float16 if lane.slow else torch.float32
        check_pages(lane, make_choose_call(shape, other, lane.place, q_pos=q_pos, scale=-0.3), slots)


@of_any_keys(2048)
def test_choose_many_blocks(lane: Lane, what: int) -> None:
    """n of 2,048 and as many blocks as that, with a rest."""
    rule = Rule(compress_block=1, compress_stride=1, block_size=1, n=what, first=1, local=1)
    call = make_choose_call((1, 2, what + 3, 1, 1, 8, 8, rule), lane.dtype, lane.place)
    check_forward(registry.load_chooser(lane.name).forward, call, slack(lane))


@each(lambda lane: [131_072] if lane.limits.tiles_only else [])
def test_choose_beyond_32_bits(lane: Lane, what: int) -> None:
    """q, do, o and dq have more than 2^31 elements: the last group's are those of a call of it alone."""
    backend, G, h = registry.load_chooser(lane.name), 4, 34
    with one_at_a_time():
        few = make_choose_call((1, 64, what, G, h, 128, 128, Rule()), torch.bfloat16, "cuda")
        q, do = (torch.randn(1, what, G, h, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        assert q.numel() > 1 << 31
        whole, one = changed(few, q=q, start=0), slice(G - 1, G)
        last = whole.of(q[:, :, one].contiguous(), whole.k[:, one], whole.v[:, one])
        o, lse = backend.attention(whole) if hasattr(backend, "attention") else backend.forward(whole)[:2]
        own = backend.attention(last) if hasattr(backend, "attention") else backend.forward(last)[:2]
        assert all(torch.equal(x, y[:, :, one]) for x, y in zip(own, (o, lse), strict=True))
        dq, dk, dv = backend.backward(whole, o, lse, do, None)[:3]
        found = backend.backward(last, *own, do[:, :, one], None)[:3]
        assert torch.equal(found[0], dq[:, :, one])
        torch.testing.assert_close(found[1:], (dk[:, one], dv[:, one]), rtol=2e-2, atol=2e-2)  # other segments


# Other scores than NSA's, without attention

LOGITS, WEIGHTS, RELU = Pool(False, False, True), Pool(True, False, True), Pool(False, False, True, True)
POOLS: dict[str, tuple[tuple[int, ...], Rule, Pool]] = {  # B, S, S_kv, G, h, Dk; rule; pool
    "index-keys": ((2, 5, 45, 2, 1, 16), Rule(1, 1, 16, 2, 0, 1), LOGITS),
    "index-keys-of-short-blocks": ((1, 20, 70, 1, 2, 16), Rule(1, 1, 4, 3, 0, 1), LOGITS),
    "index-keys-of-long-blocks": ((1, 9, 130, 1, 1, 16), Rule(1, 1, 64, 2, 0, 1), LOGITS),
    "long-blocks-of-odd-size": ((1, 10, 100, 1, 3, 16), Rule(2, 1, 40, 2, 0, 1), Pool(False, False, False)),
    "one-key-a-block": ((1, 20, 50, 2, 1, 24), Rule(12, 12, 12, 3, 0, 1), LOGITS),
    "heads-max": ((1, 20, 40, 1, 3, 16), Rule(1, 1, 16, 2, 0, 1), Pool(False, True, True)),
    "heads-max-blocks-sum": ((1, 20, 40, 1, 6, 16), Rule(8, 4, 16, 2, 1, 1), Pool(False, True, False)),
    "weights-max": ((1, 14, 70, 2, 4, 16), Rule(8, 4, 16, 3, 1, 1), WEIGHTS),
    "weights-max-no-overlap": ((1, 33, 50, 1, 2, 16), Rule(4, 4, 16, 3, 0, 1), WEIGHTS),
    "weights-max-three-pieces": ((1, 20, 40, 1, 2, 16), Rule(8, 4, 12, 3, 0, 1), WEIGHTS),
    "weights-largest-head": ((1, 20, 40, 1, 3, 16), Rule(8, 4, 16, 3, 0, 1), Pool(True, True, False)),
    "sums-of-weights-of-keys": ((1, 10, 60, 1, 2, 16), Rule(1, 1, 24, 2, 0, 1), Pool()),
    "two-tiles-of-Dk": ((1, 9, 40, 1, 2, 192), Rule(1, 1, 16, 2, 0, 1), LOGITS),
    "no-index-keys": ((2, 5, 7, 1, 2, 16), Rule(8, 4, 16, 2, 0, 1), WEIGHTS),
    "decode": ((3, 1, 85, 2, 2, 16), Rule(1, 1, 16, 3, 1, 1), LOGITS),
    "relu-of-complete-blocks": ((2, 9, 155, 1, 4, 16), Rule(4, 4, 4, 3, 0, 0), RELU),
    "relu-heads-max": ((1, 20, 40, 1, 3, 16), Rule(1, 1, 16, 2, 0, 1), Pool(False, True, True, True)),
    "relu-sums": ((1, 20, 40, 2, 3, 16), Rule(8, 4, 16, 2, 0, 1), Pool(False, False, False, True)),
}
POOLS_OF_A_GPU: dict[str, tuple[tuple[int, ...], Rule, Pool]] = {
    "msa-chunk": ((2, 130, 1500, 2, 1, 128), Rule(1, 1, 128, 4, 0, 1), LOGITS),
    "moba-Dk64": ((1, 600, 600, 4, 1, 64), Rule(64, 64, 64, 3, 0, 1), LOGITS),
    "infllm-h16": ((1, 500, 500, 2, 16, 128), Rule(32, 16, 64, 4, 1, 1), WEIGHTS),
    "Dk256-h12": ((1, 70, 500, 1, 12, 256), Rule(32, 16, 64, 3, 0, 1), Pool(False, True, True)),
    "qsa": ((2, 130, 1500, 1, 4, 128), Rule(4, 4, 4, 64, 0, 0), RELU),
    "Dk192-h3-sums": ((1, 70, 300, 1, 3, 192), Rule(1, 1, 96, 2, 0, 1), Pool(False, False, False)),
}


def pooled(lane: Lane, name: str, dtype: torch.dtype | None = None, **options: Any) -> ChooseCall:
    (B, S, S_kv, G, h, Dk), rule, pool = (POOLS | POOLS_OF_A_GPU)[name]
    return make_choose_call((B, S, S_kv, G, h, Dk, Dk, rule), dtype or lane.dtype, lane.place, **{"pool": pool, **options})


def chosen(lane: Lane, call: ChooseCall) -> Tensor:
    """In new memory that holds NaN."""
    module: Any = registry.load_chooser(lane.name)
    with new_memory_is_nan():
        ranges = module.best_blocks(call, module.log_sum_exp(call) if call.pool.softmax else None)
        return Selection.from_ranges(ranges, call.rule.block_size, disjoint=True).validate().block_indices


def scores_of(call: ChooseCall, lse: Tensor | None = None) -> Tensor:
    """[B,S,G,blocks] of the plain reference, in float64."""
    rule, (kind, heads, reduce) = call.rule, call.pool.words()
    return pooled_scores(
        call.q, call.k, call.positions().cpu(), S_kv=call.blocks * rule.block_size, block_size=rule.block_size, scale=call.scale, lse=lse,
        compress_block=rule.compress_block, compress_stride=rule.compress_stride, reduce=reduce, heads=heads, softmax=kind == "weights",
        relu=call.pool.relu,
    )  # fmt: skip


def check_pooled(lane: Lane, call: ChooseCall) -> None:
    """Products are exact and sums in float32 in every dtype: scores of blocks that differ from the reference's tie to five digits."""
    rule, positions, scores = call.rule, call.positions().cpu(), scores_of(call)
    assert_chosen(chosen(lane, call), scores, best(scores, positions, rule.block_size, rule.n, rule.first, rule.local), slack(lane))


@each(lambda lane: [] if lane.limits.tiles_only else [*POOLS, *(POOLS_OF_A_GPU if lane.device == "cuda" else ())])
def test_choose_by_other_scores(lane: Lane, what: str) -> None:
    """Also by the scores themselves, with a log-sum-exp of other keys: rows of -inf have weights of 0. Reruns are bit-equal."""
    check_pooled(lane, pooled(lane, what))
    if what in ("index-keys", "weights-max", "relu-of-complete-blocks"):
        (B, S, S_kv, *_), _, _ = POOLS[what]
        q_pos = torch.randint(-3, S_kv, (B, S), generator=torch.Generator().manual_seed(0)).to(lane.place)
        check_pooled(lane, pooled(lane, what, torch.float16, q_pos=q_pos, scale=-0.3))
    call, generator = pooled(lane, what), torch.Generator().manual_seed(3)
    if lane.device == "cuda":
        assert all(torch.equal(chosen(lane, call), x) for x in [chosen(lane, call)] for _ in range(RERUNS))
        return
    lse = torch.randn(call.q.shape[:-1], generator=generator) if call.pool.softmax else None
    if lse is not None:
        lse = lse.where(torch.randn(*call.q.shape[:3], 1, generator=generator) > -1, -torch.inf)
    exact = scores_of(call, lse)
    if lane.slow:  # the kernel writes the scores of visible blocks alone
        scores = torch.full((*call.q.shape[:3], call.blocks), torch.nan)
        choose_triton.score(call, lse, scores)
    else:
        scores = choose_torch.block_scores(call, lse).transpose(1, 2)
    visible = (torch.arange(call.blocks) <= call.positions()[:, :, None, None] // call.rule.block_size).expand_as(exact)
    torch.testing.assert_close(scores[visible].double(), exact[visible], rtol=1e-5, atol=1e-5)


@of_any_keys(5, 6)
def test_choose_among_more_blocks_than_a_program_takes(lane: Lane, what: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of 40 blocks, 16 at a time; six are more than a program keeps."""
    for name, value in (("WIDE", 8), ("FEW_WIDE", 0), ("MOST_CHOSEN", 5), ("CHUNK", 16), ("LEAST_KEPT", 16)):
        monkeypatch.setattr(top_n, name, value)
    for first, local in ((0, 0), (1, 2)):
        rule, q_pos = Rule(1, 1, 2, what, first, local), torch.tensor([[79, 0, 3, 33, 34], [65, 31, 32, 63, 50]]).to(lane.place)
        call = make_choose_call((2, 5, 80, 2, 1, 16, 16, rule), lane.dtype, lane.place, pool=LOGITS)
        for k in (call.k, torch.zeros_like(call.k)):
            check_pooled(lane, changed(call, k=k))
            check_pooled(lane, changed(call, k=k, q_pos=q_pos))


@of_any_keys("index-keys", "weights-max-no-overlap", "relu-of-complete-blocks")
def test_choose_ties_go_to_the_lower_block(lane: Lane, what: str) -> None:
    call = pooled(lane, what)
    call.k = torch.zeros_like(call.k)
    check_pooled(lane, call)
    rule, scores = call.rule, torch.zeros(*call.q.shape[:3], call.blocks)
    if not call.pool.softmax:
        assert torch.equal(chosen(lane, call).cpu(), best(scores, call.positions().cpu(), rule.block_size, rule.n, rule.first, rule.local))


@of_any_keys("index-keys", "weights-max", "long-blocks-of-odd-size", "relu-of-complete-blocks")
def test_choose_by_other_scores_whatever_holds_them(lane: Lane, what: str) -> None:
    """NaN in keys that no row sees; few rows at once, keys that groups share, given positions and strides."""
    call = pooled(lane, what, start=-10)
    unseen = torch.arange(call.k.shape[2], device=lane.place) >= call.seen().amax(1, keepdim=True).to(lane.place)
    assert bool(unseen.any())
    assert torch.equal(chosen(lane, changed(call, k=call.k.masked_fill(unseen[:, None, :, None], torch.nan))), chosen(lane, call))
    call = pooled(lane, what)
    call.k = call.k[:, :1].contiguous().expand_as(call.k)
    whole = chosen(lane, call)
    q = call.q.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4)
    for other in ({"k": call.k.contiguous()}, {"scratch": 800}, {"q": q, "q_pos": call.positions()}):
        assert torch.equal(whole, chosen(lane, changed(call, **other)))
