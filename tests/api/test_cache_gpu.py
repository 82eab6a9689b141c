"""`NSACache` on a GPU in bfloat16 and e4m3: against the layer's own prefill, CUDA graphs of a decoding step, no waiting."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import NSACache, NSAttention
from nsa_sel.caching.step import CacheStep
from nsa_sel.quantize import STORED
from tests.helpers.graphs import captured, no_waiting, replayed
from tests.helpers.layer_cache import poison, with_stored_keys

pytestmark = pytest.mark.gpu

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


def test_long_chunks_run_as_a_prefill(layer: NSAttention, options: dict[str, Any]) -> None:
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
