"""Check `NSACache` against the prefill of the layer: chunks, mixed lengths, drafts, forks, graphs, e4m3, pages of NaN."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa_sel import NSACache, NSAttention, quantize_e4m3
from nsa_sel import cache as nsa_cache
from nsa_sel.caching import pools, step_tensors
from nsa_sel.caching.pools import Pools
from nsa_sel.caching.step import CacheStep, LayerStep
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ArgumentError, BackendError, CacheFull
from nsa_sel.quantize import STORED, stored
from tests.helpers.calls import assert_refused, calls_of
from tests.helpers.cases import assert_within_twice_baseline
from tests.helpers.gpus import captured, no_waiting, replayed
from tests.helpers.layer import SIZES, Model, few_bits, make_layer, poison, short_numbers, with_stored_keys

pytestmark = pytest.mark.usefixtures("cheapest_backend")


def hidden(model: Model, *shape: int) -> Tensor:
    x = torch.randn(*shape, model.layers[0].width, dtype=torch.float64).to(model.layers[0].q.weight)
    return x if model.cache.scales is None else few_bits(x)


def make_model(fp8: bool, **options: Any) -> Model:
    """One layer, in float64; with e4m3 in float32. 40 pages."""
    if not fp8:
        return Model([make_layer()], 40, 8, **options)
    scales = {"k": torch.tensor([[0.03, 0.002]]), "v": 0.01, "k_win": torch.tensor([0.05])}  # the second group's saturate
    return Model([short_numbers(make_layer("mlp", torch.float32))], 40, 8, kv_dtype=STORED, kv_scales=scales, **options)


def close(model: Model, got: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-9 if got.dtype == torch.float64 else 1e-5 * max(wanted.abs().flatten().tolist(), default=0.0)
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def in_chunks(model: Model, x: Tensor, chunks: list[int]) -> Tensor:
    """[B,S,width] of x, chunk by chunk, in new sequences."""
    sequences = [model.cache.open() for _ in x]
    return torch.cat([torch.stack(model.step(sequences, list(part))) for part in x.split(chunks, 1)], 1)


@pytest.mark.parametrize("page_size", [8, 24])
@pytest.mark.parametrize("name", SIZES)
def test_chunks_of_any_size_equal_the_prefill(name: str, page_size: int) -> None:
    model = Model([make_layer(name), make_layer(name)], 24, page_size)
    x = hidden(model, 2, 45)
    wanted = model.prefill(x)
    for chunks in ([45], [1] * 5 + [3, 19, 1, 17], [7, 1, 8, 29]):
        close(model, in_chunks(model, x, chunks), wanted)
        for sequence in (*model.cache._sequences,):
            model.cache.free(sequence)
        assert model.cache.free_pages == model.cache.free_window_pages == 24


@pytest.mark.parametrize("name", SIZES)
def test_long_chunks_run_as_a_prefill(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of one length, by the kernels of a prefill; of other lengths, or with room for a graph, over pages."""
    monkeypatch.setattr(nsa_cache, "MIN_PREFILL_ROWS", 5)
    model = Model([make_layer(name), make_layer(name)], 40, 8)
    x = hidden(model, 2, 60)
    wanted, cache, ran = model.prefill(x), model.cache, calls_of(monkeypatch, LayerStep, "prefill")
    close(model, in_chunks(model, x, [23, 5, 3, 29]), wanted)
    assert [args[5].keys for args in ran] == [23, 23, 28, 28, 60, 60]
    a, b = cache.open(), cache.open()
    first = [model.step([a], [x[0, :20]])[0], model.step([b], [x[1, :31]])[0]]
    rest = model.step([a, b], [x[0, 20:49], x[1, 31:]])
    close(model, torch.cat((first[0], rest[0])), wanted[0, :49])
    close(model, torch.cat((first[1], rest[1])), wanted[1])
    close(model, model.step([a], [x[0, 49:]], room=64)[0], wanted[0, 49:])
    assert [args[5].keys for args in ran[6:]] == [20, 20, 31, 31]


@pytest.mark.parametrize("fp8", [False, True])
def test_random_batches_drafts_and_forks(fp8: bool) -> None:
    """Every output of every sequence that lives is that of the prefill of its tokens."""
    model, chance = make_model(fp8, window_pages=24), random.Random(0)
    cache, tokens, found, full = model.cache, dict[int, Tensor](), dict[int, Tensor](), 0
    for _ in range(120):
        living, what = list(tokens), chance.random()
        if what < 0.15 or not living:
            a = cache.open()
            tokens[a] = found[a] = hidden(model, 0)
        elif what < 0.25:
            a = chance.choice(living)
            b = cache.fork(a)
            tokens[b], found[b] = tokens[a], found[a]
        elif what < 0.32:
            a = chance.choice(living)
            cache.free(a)
            close(model, found.pop(a), model.prefill(tokens.pop(a)[None])[0])
        elif what < 0.42:
            a = chance.choice(living)
            length = chance.randint(cache._of(a).min_length(), cache.length(a))
            cache.truncate(a, length)
            tokens[a], found[a] = tokens[a][:length], found[a][:length]
        else:
            batch = chance.sample(living, chance.randint(1, min(4, len(living))))
            rows = [hidden(model, chance.choice((0, 1, 1, 2, 3, 14))) for _ in batch]
            try:
                outputs = model.step(batch, rows)
            except CacheFull:
                full += 1
                continue
            for a, new, y in zip(batch, rows, outputs, strict=True):
                tokens[a], found[a] = torch.cat((tokens[a], new)), torch.cat((found[a], y))
        assert {a: cache.length(a) for a in tokens} == {a: len(x) for a, x in tokens.items()}
        assert cache.held_pages(tokens) == 40 - cache.free_pages
    assert full
    for a, x in tokens.items():
        close(model, found[a], model.prefill(x[None])[0])
        cache.free(a)
    assert (cache.free_pages, cache.free_window_pages) == (40, 24)


def test_a_cache_that_is_full_changes_nothing() -> None:
    model = Model([make_layer()], 4, 8)
    cache = model.cache
    a = cache.open()
    x = hidden(model, 1, 30)
    first = model.step([a], [x[0, :20]])[0]
    b = cache.fork(a)
    free = cache.free_pages, cache.free_window_pages
    with pytest.raises(CacheFull, match="pages = 4; nothing has changed"):
        cache.step([a, b], 5)
    assert (cache.free_pages, cache.free_window_pages) == free
    assert cache.length(a) == cache.length(b) == 20
    cache.free(b)
    close(model, torch.cat((first, model.step([a], [x[0, 20:]])[0]))[None], model.prefill(x))


@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_step_follows_other_sequences(fp8: bool) -> None:
    """Fewer of them, with fewer tokens and other lengths, than it was made for."""
    model = make_model(fp8)
    cache, layer = model.cache, model.layers[0]
    x = hidden(model, 3, 40)
    sequences = [cache.open() for _ in x]
    kept = cache.step(sequences, 2, room=64)
    rows = hidden(model, 3, 2)
    graph, outputs = captured(lambda: (layer(rows, cache=kept[0]),), "cpu")
    for sequence in sequences:
        cache.truncate(sequence, 0)
    wanted, found, at = model.plain[0](x), [[] for _ in x], [0, 0, 0]
    for counts in ([2, 1, 2], [2, 2, 0], [0, 1, 2], [2, 0, 0], [1, 2, 1]) * 4:
        chosen = [b for b in range(3) if counts[b]]
        assert cache.step([sequences[b] for b in chosen], [counts[b] for b in chosen], into=kept) is kept
        poison(cache)
        rows.fill_(float("nan"))
        for i, b in enumerate(chosen):
            rows[i, 2 - counts[b] :] = x[b, at[b] : at[b] + counts[b]]
            at[b] += counts[b]
        (y,) = replayed(graph, outputs)
        assert not y[~kept.is_token].any()
        for i, b in enumerate(chosen):
            found[b].append(y[i, 2 - counts[b] :])
    for b in range(3):
        close(model, torch.cat(found[b]), wanted[b, : at[b]])
    with pytest.raises(
        ArgumentError, match=r"into is of 3 sequences, 2 rows and room for 64 keys; allowed: .* at least 3 sequences, 30 rows"
    ):
        cache.step(sequences, 30, into=kept)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_autocast_and_modes(mode: Any) -> None:
    """The cache holds autocast's dtype; pools are made outside and inside of the mode."""
    layer = make_layer("mlp", torch.float32).requires_grad_(True)
    x = hidden(Model([layer], 1, 4), 1, 30)
    with mode(), torch.autocast("cpu", torch.bfloat16):
        cache = NSACache.of([layer], 16, 4, dtype=torch.bfloat16)
        wanted, a = layer(x), cache.open()
        first_step = cache.step([a], 17, room=64)
        first = layer(x[:, :17], cache=first_step[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        padded = torch.cat((x[:, :4], x[:, 17:]), 1)
        both = torch.cat((first, layer(padded, cache=cache.step([a], 13, into=first_step)[0])[:, 4:]), 1)
    assert both.dtype == torch.bfloat16
    assert float((both.float() - wanted.float()).square().mean().sqrt() / wanted.float().std()) < 0.02
    with pytest.raises(ArgumentError, match=r"cache is of torch.bfloat16; .* make it with dtype=torch.float32"), torch.no_grad():
        layer(x[:, :1], cache=cache.step([a])[0])
    own = NSACache.of([layer], 16, 4)  # of the parameters' dtype
    with (
        pytest.raises(ArgumentError, match=r"cache is of torch.float32; allowed: torch.bfloat16, .* make it with dtype=torch.bfloat16"),
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        layer(x[:, :1], cache=own.step([own.open()])[0])


def test_nothing_to_do() -> None:
    model = Model([make_layer()], 4, 8)
    assert model.step([], []) == []
    a = model.cache.open()
    assert model.step([a, model.cache.open()], [hidden(model, 0)] * 2)[0].shape == (0, 10)
    assert model.cache.length(a) == 0
    assert model.cache.free_pages == model.cache.free_window_pages == 4


WRONG_CALLS: dict[str, tuple[Callable[[NSACache, int], object], str]] = {
    "unknown": (lambda cache, a: cache.step([a, a + 1]), "sequence is 2; allowed: the number of an open sequence"),
    "unhashable": (lambda cache, a: cache.length([a]), r"sequence is \[1\]"),  # type: ignore[arg-type]
    "a bool": (lambda cache, a: cache.free(True), "sequence is True"),
    "freed": (lambda cache, a: (cache.free(a), cache.fork(a)), "sequence is 1"),
    "twice": (lambda cache, a: cache.step([a, a]), r"sequences is \[1, 1\]; allowed: each sequence once"),
    "other counts": (lambda cache, a: cache.step([a], [1, 2]), r"tokens is \[1, 2\]; allowed: .* each of 1 sequences"),
    "no list": (lambda cache, a: cache.step(a), "sequences is 1; allowed: numbers of sequences"),  # type: ignore[arg-type]
    "halves": (lambda cache, a: cache.step([a], 0.5), "tokens is 0.5"),  # type: ignore[arg-type]
    "negative": (lambda cache, a: cache.step([a], -1), "tokens is -1"),
    "flags": (lambda cache, a: cache.step([a], [True]), r"tokens is \[True\]"),
    "no room": (lambda cache, a: cache.step([a], room=20), "room is 20; allowed: at least 21"),
    "longer": (lambda cache, a: cache.truncate(a, 21), "length is 21; allowed: 0, or 19 to 20"),
    "given back": (lambda cache, a: cache.truncate(a, 12), "length is 12; allowed: 0, or 19 to 20"),
    "below zero": (lambda cache, a: cache.truncate(a, -1), "length is -1"),
    "no such layer": (lambda cache, a: cache.step([a])[1], "layer is 1; allowed: 0 to 0"),
    "a prefill as into": (
        lambda cache, a: cache.step([a], into=cache.step([cache.open()], nsa_cache.MIN_PREFILL_ROWS)),
        "into is of sequences of 64 keys; allowed: a step made with room=",
    ),
    "room and into": (lambda cache, a: cache.step([a], room=64, into=cache.step([a])), "into is of 1 sequences"),
}


@pytest.mark.parametrize(("name", "work", "message"), [(name, *case) for name, case in WRONG_CALLS.items()], ids=WRONG_CALLS)
def test_calls_that_are_wrong_change_nothing(name: str, work: Callable[[NSACache, int], object], message: str) -> None:
    cache = NSACache(1, 32, 4, 2, 4, window=6, compress_block=8, compress_stride=4, dtype=torch.float64)
    a = cache.open()
    for _ in range(20):
        cache.step([a])
    with pytest.raises(ArgumentError, match=message):
        work(cache, a)
    if name not in ("freed", "no such layer", "room and into", "a prefill as into"):
        assert (cache.length(a), cache.free_pages, cache.free_window_pages) == (20, 27, 30)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 5}, "cache is of window = 6; allowed: the layer's window = 5"),
        ({"compress_stride": 2}, "cache is of compress_stride = 4"),
        ({"dtype": torch.float32}, "cache is of torch.float64; allowed: torch.float32, .* make it with dtype=torch.float32"),
    ],
    ids=str,
)
def test_layers_of_another_kind_are_refused(changed: dict[str, Any], message: str) -> None:
    model, other = Model([make_layer()], 4, 8), make_layer(**changed)
    x = hidden(model, 1, 1).to(other.q.weight)
    assert_refused(
        (message, lambda: other(x, cache=model.cache.step([model.cache.open()])[0])),
        ("2 layers of 2 kinds", lambda: NSACache.of([*model.layers, other], 4, 8)),
    )


def test_what_is_no_step_and_no_layer_is_named() -> None:
    model, no_layers = Model([make_layer()], 4, 8), r"model_layers is a \w+ \(.*allowed: a list of NSAttention or MSAttention layers"
    step = model.cache.step([model.cache.open()])
    assert_refused(
        (r"cache is a CacheStep; .* Remedy: pass step\[i\]", lambda: model.layers[0](hidden(model, 1, 1), cache=step)),  # type: ignore[arg-type]
        (no_layers, lambda: NSACache.of(model.layers[0], 4, 8)),  # type: ignore[arg-type]
        (no_layers, lambda: NSACache.of([torch.nn.Linear(1, 1)], 4, 8)),  # type: ignore[list-item]
    )
    assert len(list(step)) == 1


@pytest.mark.parametrize("part", ["buffer", "copy"])
def test_a_step_out_of_memory_changes_nothing(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a retry would attend to keys that nobody wrote."""
    model = Model([make_layer()], 8, 8)
    cache, a = model.cache, model.cache.open()
    cache.step([a], 12)
    b = cache.fork(a)
    before = cache.free_pages, cache.free_window_pages, cache.held_pages([a]), cache.held_pages([b])
    monkeypatch.setattr(
        *((step_tensors, "allocate") if part == "buffer" else (Pools, "copy")), mock.Mock(side_effect=torch.OutOfMemoryError)
    )
    with pytest.raises(torch.OutOfMemoryError):
        cache.step([b], 9)
    assert (cache.length(b), (cache.free_pages, cache.free_window_pages, cache.held_pages([a]), cache.held_pages([b]))) == (12, before)


def test_layers_refuse_what_a_cache_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([make_layer()], 4, 8)
    layer, x = model.layers[0], hidden(model, 1, 3)
    of_step = model.cache.step([model.cache.open()], 3)[0]
    assert_refused(
        (r"x is of shape \(1, 2, 10\); allowed: \[B=1, S=3, width\]", lambda: layer(x[:, :2], cache=of_step)),
        ("cache is given with cu_seqlens", lambda: layer(x, cu_seqlens=[0, 3], cache=of_step)),
        ("x is a tensor that requires gradients", lambda: layer(x.clone().requires_grad_(), cache=of_step)),
    )
    close(model, layer(x, cache=of_step), layer(x))
    monkeypatch.setattr("nsa_sel.core.transforms.is_compiling", lambda: True)
    with pytest.raises(BackendError, match=r"a layer with a cache is called in a function that torch\.compile traces"):
        layer(x, cache=of_step)


LENGTHS = [700, 33, 5]


@pytest.fixture
def layer() -> NSAttention:
    torch.manual_seed(0)
    return NSAttention(256, 2, 16, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(False)


FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"kv_dtype": STORED, "kv_scales": {"k": torch.tensor([[0.01, 0.002]] * 2), "v": 0.007, "k_win": 0.005, "v_win": 0.02}},
}


@pytest.fixture(params=FORMATS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("quantized-sm: e4m3 needs SM 8.9")
    return FORMATS[request.param]


def as_stored(layer: NSAttention, options: dict[str, Any]) -> tuple[NSAttention, NSAttention]:
    """The layer, and in float32, on the keys that a cache holds: quantized or not."""
    exact = NSAttention(256, 2, 16, 64, device="cuda").requires_grad_(False)
    exact.load_state_dict(layer.state_dict())
    scales = NSACache.of([layer, layer], 1, 32, **options).scales
    return (layer, exact) if scales is None else (with_stored_keys(layer, scales.layer(0)), with_stored_keys(exact, scales.layer(0)))


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).square().mean().sqrt() / b.float().square().mean().sqrt())


def prefilled(layer: NSAttention, x: Tensor, lengths: list[int], options: dict[str, Any]) -> tuple[NSACache, list[int]]:
    """A cache of two layers, of which the first has the first tokens of every row of x, in chunks of up to 300, and the second zeros."""
    cache = NSACache.of([layer, layer], 128, 32, **options)
    sequences = [cache.open() for _ in lengths]
    for at in range(0, max(lengths), 300):
        counts = [max(0, min(300, length - at)) for length in lengths]
        step = cache.step(sequences, counts)
        poison(cache)
        rows = torch.zeros(len(counts), max(counts), layer.width, device="cuda", dtype=torch.bfloat16)
        for b, count in enumerate(counts):
            rows[b, max(counts) - count :] = x[b, at : at + count]
        assert bool(layer(rows, cache=step[0]).isfinite().all())
    for pool in cache.pools:
        pool[1].zero_()
    return cache, sequences


@pytest.mark.gpu
def test_decoding_equals_the_prefill(layer: NSAttention, options: dict[str, Any]) -> None:
    """Within twice the prefill's own distance from float32, which has other ties of blocks: the rounding of both is bfloat16's."""
    x = torch.randn(3, max(LENGTHS) + 40, 256, device="cuda", dtype=torch.bfloat16)
    cache, sequences = prefilled(layer, x, LENGTHS, options)
    found = []
    for i in range(20):  # drafts of two tokens; the second one is a wrong one first
        rows = torch.stack([x[b, n + 2 * i : n + 2 * i + 2] for b, n in enumerate(LENGTHS)])
        layer(torch.stack((rows[:, 0], -rows[:, 1]), 1), cache=cache.step(sequences, 2)[0])
        for b, sequence in enumerate(sequences):
            cache.truncate(sequence, LENGTHS[b] + 2 * i + 1)
        cache.truncate(sequences[0], LENGTHS[0] + 2 * i)
        step = cache.step(sequences, [2, 1, 1])
        poison(cache)
        found.append(layer(rows, cache=step[0]))
    own, exact = as_stored(layer, options)
    decoded = torch.stack(found, 1)
    for b, n in enumerate(LENGTHS):
        whole, plain = own(x[b : b + 1, : n + 40])[0, n:], exact(x[b : b + 1, : n + 40].float())[0, n:]
        rows = decoded[b].flatten(0, 1) if b == 0 else decoded[b, :, 1]
        whole, plain = (whole, plain) if b == 0 else (whole[1::2], plain[1::2])
        assert distance(rows, plain) <= 2 * distance(whole, plain)


@pytest.mark.gpu
def test_a_graph_replays_decoding(layer: NSAttention, options: dict[str, Any]) -> None:
    """Two layers, of other lengths and pages, and of fewer sequences than were captured. Bit-equal to eager steps; the host never waits."""

    def model(step: CacheStep) -> Tensor:
        return layer(layer(token, cache=step[0]), cache=step[1])  # type: ignore[no-any-return]

    x = torch.randn(3, max(LENGTHS) + 1, 256, device="cuda", dtype=torch.bfloat16)
    caches = [prefilled(layer, x, LENGTHS, options) for _ in range(2)]
    (cache, sequences), (eager, others) = caches
    token = x[:, -1:].clone()
    step, plain = (one.step(names, room=1024) for one, names in caches)
    graph, outputs = captured(lambda: (model(step),))
    for one, names in caches:
        for sequence, length in zip(names, LENGTHS, strict=True):
            one.truncate(sequence, length)
    for i in range(40):
        chosen = [0, 1, 2] if i % 3 else [2, 0]
        token.normal_()
        eager.step([others[b] for b in chosen], into=plain)
        wanted = model(plain)
        with no_waiting():
            cache.step([sequences[b] for b in chosen], into=step)
        poison(cache)
        found = replayed(graph, outputs)[0]
        assert torch.equal(found, wanted)
        assert not bool(found[len(chosen) :].any())


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device(layer: NSAttention, options: dict[str, Any]) -> None:
    """With copies of pages that are shared. The first step of a size may wait."""
    x = torch.randn(4, max(LENGTHS) + 1, 256, device="cuda", dtype=torch.bfloat16)
    cache, sequences = prefilled(layer, x, LENGTHS, options)
    for context in (contextlib.nullcontext, no_waiting):
        fork = cache.fork(sequences[0])
        with context():
            y = layer(x[:, -1:], cache=cache.step([*sequences, fork])[0])
        assert bool(y.isfinite().all())
        cache.free(fork)


@pytest.mark.gpu
def test_long_chunks_run_as_a_prefill_gpu(layer: NSAttention, options: dict[str, Any]) -> None:
    """The whole prompt at once, and its second part over pages: within twice the prefill's own distance from float32."""
    x = torch.randn(2, 700, 256, device="cuda", dtype=torch.bfloat16)
    own, exact = as_stored(layer, options)
    whole, plain = own(x), exact(x.float())
    for chunks in ([700], [400, 300]):
        cache = NSACache.of([layer, layer], 64, 32, **options)
        sequences = [cache.open(), cache.open()]
        parts = []
        for part in x.split(chunks, 1):
            step = cache.step(sequences, part.shape[1])
            poison(cache)
            parts.append(layer(part, cache=step[0]))
        assert distance(torch.cat(parts, 1), plain) <= 2 * distance(whole, plain)


FP8_SIZES: dict[str, Any] = {"layers": 3, "pages": 4, "page_size": 16, "groups": 2, "head_dim": 4, "kv_dtype": STORED}


@pytest.mark.parametrize("scale", [1.0, 2.0**-5, 0.3, 1e30, 1e-30])
def test_stored_numbers_are_the_nearest(scale: float) -> None:
    """All float16 numbers round to nearest even. Numbers beyond 448 saturate, and NaN stays NaN."""
    x = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    found = stored(x, torch.tensor(scale)).double()
    assert torch.equal(found.isnan(), x.isnan())
    x, found = x[~x.isnan()], found[~x.isnan()]
    exact = (x.double() * float(1 / torch.tensor(scale))).float().double().clamp(-448, 448)
    every = torch.arange(127, dtype=torch.uint8).view(STORED).double()  # from 0 to 448
    upper = torch.searchsorted(every, exact.abs()).clamp(min=1)
    low, high = exact.abs() - every[upper - 1], every[upper] - exact.abs()
    nearest = every[torch.where((low < high) | ((low == high) & (upper % 2 == 1)), upper - 1, upper)]
    assert torch.equal(found, nearest.copysign(exact))


@pytest.mark.parametrize("name", ["mlp", "mean"])
def test_layers_attend_to_what_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, token by token, and as a prefill does: within twice the error of a float32 layer with the same numbers."""
    monkeypatch.setattr(nsa_cache, "MIN_PREFILL_ROWS", 9)
    layer = short_numbers(make_layer(name, torch.float32))
    x = few_bits(torch.randn(2, 45, layer.width))
    heads = 1 + torch.arange(layer.groups)[None]
    scales = {"k": 0.03 * heads, "v": 0.02 * heads, "v_win": 0.004}  # the last saturates
    model = Model([layer], 24, 8, kv_dtype=STORED, kv_scales=scales)
    exact = with_stored_keys(layer, model.cache.scales.layer(0), torch.float64)(x.double())
    baseline = model.plain[0](x)
    assert float((layer(x) - baseline).abs().max()) > 0.01 * float(baseline.abs().max())
    for chunks in ([45], [1] * 5 + [3, 19, 1, 17], [7, 1, 8, 29]):
        assert_within_twice_baseline(in_chunks(model, x, chunks) - x, exact, baseline)
        for sequence in (*model.cache._sequences,):
            model.cache.free(sequence)


def test_scales_of_any_shape_are_those_of_layers_and_groups() -> None:
    each = torch.rand(3, 2) + 0.1
    scales = NSACache(**FP8_SIZES, kv_scales={"k": each, "v": each[:, 0], "k_win": 0.5}).scales
    assert all(map(torch.equal, scales, (each, each[:, :1].expand(3, 2), torch.full((3, 2), 0.5), torch.ones(3, 2))))
    assert NSACache(**{**FP8_SIZES, "kv_dtype": torch.bfloat16}).scales is None


def test_float16_holds_what_its_caches_store() -> None:
    """With the largest scale, too: that of keys up to float16's largest number."""
    every = torch.cat((torch.arange(127), torch.arange(128, 255))).to(torch.uint8).view(STORED)
    scale = quantize_e4m3(torch.tensor([65504.0, -65504.0]).view(1, 1, 2, 1))[1]
    scales = NSACache(**{**FP8_SIZES, "dtype": torch.float16, "kv_scales": {"v": scale.expand(3, 2)}}).scales
    found = pools.dequantized(every.view(1, 1, -1, 1).expand(1, 2, -1, 1), scales.v[0], torch.float16)
    assert float(found.max()) == 65504.0
    assert torch.equal(found, (every.float() * scale[:, None]).half().view_as(found))


WRONG_SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "no pages": ({"pages": 0}, "pages is 0; allowed: a whole number >= 1"),
    "pages as a float": ({"pages": 4.0}, "pages is 4.0"),
    "odd pages": ({"page_size": 24}, "page_size is 24; allowed: a multiple of compress_stride = 16"),
    "no window": ({"window": 0}, "window is 0"),
    "strides": ({"compress_block": 24}, "compress_block is 24; allowed: a multiple of compress_stride"),
    "float8": ({"kv_dtype": None, "dtype": STORED}, r"dtype is torch.float8_e4m3fn; allowed: float16"),
    "several dtypes": ({"kv_dtype": None, "dtype": [torch.float32]}, r"dtype is \[torch.float32\]; allowed: float16"),
    "window pages": ({"window_pages": -1}, "window_pages is -1"),
    "a list of scales": ({"kv_scales": [1.0]}, "kv_scales is a list; allowed: a mapping from k, v"),
    "e5m2": ({"kv_dtype": torch.float8_e5m2}, r"kv_dtype is torch.float8_e5m2; allowed: torch.float8_e4m3fn, .*: e5m2 has 2 bits"),
    "another": ({"kv_dtype": torch.float32}, r"kv_dtype is torch.float32; allowed: torch.float8_e4m3fn, or the cache's dtype torch.bf"),
    "float64": ({"dtype": torch.float64}, r"dtype is torch.float64; allowed: torch.float16, .* with kv_dtype"),
    "unquantized": ({"kv_dtype": None, "kv_scales": {"k": 1.0}}, "kv_scales is given for an unquantized cache"),
    "no such pool": ({"kv_scales": {"keys": 1.0}}, "kv_scales is of 'keys'; allowed: of k, v, k_win, v_win"),
    "zero": ({"kv_scales": {"v": 0.0}}, r"kv_scales\['v'\] is from 0 to 0; allowed: numbers from 1e-30 to 1e\+30"),
    "float16": (
        {"dtype": torch.float16, "kv_scales": {"k": torch.tensor([1.0, 1.0, 147.0])}},
        r"kv_scales\['k'\] is from 1 to 147; allowed: numbers from 1e-30 to 146\.214 for keys and values of torch\.float16",
    ),
    "negative": ({"kv_scales": {"v": torch.tensor([1.0, -2.0, 1.0])}}, r"kv_scales\['v'\] is from -2 to 1;"),
    "nan": ({"kv_scales": {"v": torch.nan}}, r"kv_scales\['v'\] is from nan to nan;"),
    "of pages": ({"kv_scales": {"k_win": torch.ones(5, 2)}}, r"kv_scales\['k_win'\] is of shape \(5, 2\); .* layers = 3, G = 2"),
    "float64 scales": ({"kv_scales": {"k": torch.ones(3).double()}}, r"kv_scales\['k'\] is of dtype torch.float64"),
    "text": ({"kv_scales": {"k": "1"}}, r"kv_scales\['k'\] is a str"),
}


@pytest.mark.parametrize(("changed", "message"), WRONG_SIZES.values(), ids=WRONG_SIZES)
def test_what_makes_no_cache(changed: dict[str, Any], message: str) -> None:
    assert_refused((message, lambda: NSACache(**{**FP8_SIZES, **changed})))


def test_gpus_without_e4m3_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = iter((89, 90, 86))
    monkeypatch.setattr(pools, "device_info", lambda device: DeviceInfo(kind="cuda", name="a GPU", sm=next(gpus)))
    assert NSACache(**FP8_SIZES).pools.k.dtype == NSACache(**FP8_SIZES).pools.k.dtype == STORED
    with pytest.raises(ArgumentError, match=r"kv_dtype is .* on a GPU of SM 8\.6; allowed: GPUs of SM 8\.9 and newer.*leave kv_dtype out"):
        NSACache(**FP8_SIZES)
