"""Choosing by Hopper's kernels, without a GPU: what they would launch fits, and their arithmetic lists are right."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from nsa_sel.backends import choose_cuda, choose_triton
from nsa_sel.backends._triton import choose_dkdv
from nsa_sel.backends.cupy_cuda import compressed
from nsa_sel.core.call import ChooseCall, Rule, device_info
from tests.helpers.aot import TARGETS
from tests.helpers.cases import make_grads
from tests.helpers.choose_cases import SMALL, check_both, check_gradients, make_choose_call, results
from tests.helpers.cuda_aot import compiled, needs_nvrtc
from tests.helpers.emulate import emulated, needs_compiler
from tests.helpers.gpus import needs, needs_hopper
from tests.helpers.graphs import captured, replayed
from tests.helpers.policy_cases import H200

KERNELS = {"forward_tiles.cu", "dq_tiles.cu", "dkdv_groups.cu", "sum_counts.cu", "sum_parts.cu"}
FITTING: dict[str, tuple[int, int, int, int, int, int, int, Rule]] = {  # B, S, S_kv, G, h, Dk, Dv
    "h16": (1, 8192, 8192, 4, 16, 128, 128, Rule()),
    "h48-192": (1, 500, 1100, 1, 48, 192, 128, Rule()),
    "h3-64": (2, 2048, 4000, 2, 3, 64, 64, Rule(compress_block=24, compress_stride=12, block_size=48)),
}
OF_TRITON = {"h3-64": {"dq_tiles.cu"}}


def run(call: ChooseCall) -> None:
    o, lse, _ = choose_cuda.forward(call)
    choose_cuda.backward(call, o, lse, torch.empty_like(o), None)


@pytest.fixture
def on_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of CPU tensors are an H200's; what Triton computes is left out."""
    monkeypatch.setattr(choose_cuda, "device_info", lambda device: H200)
    monkeypatch.setattr(choose_triton, "best_blocks", lambda call, lse: None)
    monkeypatch.setattr(choose_triton, "dq", lambda call, o, lse, *_: (call.q, lse.movedim(1, 2).unsqueeze(2)))
    monkeypatch.setattr(choose_dkdv, "dkdv", lambda *_: (None, None))


@needs_nvrtc
@pytest.mark.slow  # a compiler at work
@pytest.mark.usefixtures("on_target")
@pytest.mark.parametrize("shape", [pytest.param(shape, marks=[pytest.mark.thorough] * (shape != "h16")) for shape in FITTING])
def test_kernels_of_compressed_keys_fit(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    call = make_choose_call(FITTING[shape], torch.bfloat16)
    kernels = compiled(monkeypatch, 90, lambda: run(call))
    assert {kernel["kernel"] for kernel in kernels} == KERNELS - OF_TRITON.get(shape, set())
    for kernel in kernels:
        assert kernel["shared"] <= TARGETS[90][0] * 1024, kernel
        assert kernel["registers"] * kernel["threads"] <= 65536, kernel
        assert kernel["spilled"] == kernel["serialized"] == 0, kernel


@pytest.mark.parametrize(
    ("S", "S_kv", "rule"),
    [(200, 200, Rule()), (300, 2999, Rule()), (4000, 4000, Rule()), (150, 70, Rule()), (700, 900, SMALL), (90, 20, Rule())],
)
def test_rows_of_a_tile_are_those_that_see_one_of_its_keys(S: int, S_kv: int, rule: Rule) -> None:
    call = make_choose_call((1, S, S_kv, 1, 1, 8, 8, rule))
    seen = call.seen()[0]
    expected = tuple(int((seen > key).sum()) for key in range(0, call.k.shape[2], compressed.BLOCK))
    assert compressed.rows_of_tiles(call) == expected
    assert all(bool((seen[S - rows :] > 64 * tile).all()) for tile, rows in enumerate(expected))


@pytest.mark.parametrize("h", [2, 3, 12, 16, 64])
@pytest.mark.parametrize("scratch", [1 << 16, 1 << 22, 64 << 20])
def test_segments_are_whole_steps_whose_parts_fit(h: int, scratch: int) -> None:
    call = make_choose_call((2, 3000, 3000, 2, h, 64, 64, Rule()), scratch=scratch)
    lengths = compressed.rows_of_tiles(call)
    segment = compressed.segment_length(call, lengths, 132)
    assert segment % (64 // h) == 0
    segments = [x for x in compressed.segments_of(lengths, segment) if x > 1]
    assert 4 * sum(segments) * 4 * 64 * 128 <= compressed.PARTS * scratch
    assert sum(-(-rows // segment) for rows in lengths) == sum(compressed.segments_of(lengths, segment))


def test_segments_of_8k_rows_occupy_the_multiprocessors_evenly() -> None:
    call = make_choose_call((1, 8192, 8192, 4, 16, 8, 8, Rule()), scratch=64 << 20)
    lengths = compressed.rows_of_tiles(call)
    segment = compressed.segment_length(call, lengths, 132)
    waves = 4 * sum(compressed.segments_of(lengths, segment)) / (2 * 132)
    assert waves / math.ceil(waves) > 0.95


@needs_compiler
def test_lists_on_the_device_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sum_counts.cu, compiled for the CPU."""
    emulated(monkeypatch)
    call = make_choose_call((2, 1500, 1400, 2, 4, 8, 8, Rule()))
    lengths = compressed.rows_of_tiles(call)
    lists = compressed._build.__wrapped__(call.q.device, 0, 4, lengths, 96, call.rule, 1500, call.start)
    begins, segments, parts = (x.diff().tolist() for x in lists[1:4])
    assert tuple(begins) == 4 * lengths
    assert tuple(segments) == 4 * compressed.segments_of(lengths, 96)
    assert parts == [x if x > 1 else 0 for x in segments]


SHAPES: dict[str, tuple[int, int, int, int, int, int, int, Rule]] = {  # B, S, S_kv, G, h, Dk, Dv
    "h16": (1, 1500, 1500, 2, 16, 128, 128, Rule()),
    "h4-batch": (3, 777, 777, 2, 4, 128, 128, Rule()),
    "chunked-prefill": (1, 301, 2999, 2, 16, 128, 128, Rule()),
    "few-keys": (2, 200, 200, 1, 8, 128, 128, Rule()),
    "one-key": (1, 40, 40, 1, 12, 64, 64, Rule()),
    "h2": (1, 1111, 1111, 1, 2, 64, 128, Rule()),
    "h3-other-rule": (1, 1111, 1111, 2, 3, 64, 64, Rule(compress_block=24, compress_stride=12, block_size=48)),
    "h12-every-key": (1, 333, 333, 2, 12, 128, 64, Rule(compress_block=4, compress_stride=4, block_size=64)),
    "h64": (1, 700, 1900, 1, 64, 128, 128, Rule()),
    "h48-192": (1, 500, 1100, 1, 48, 192, 128, Rule()),
}  # fmt: skip


@pytest.mark.gpu
@needs("choose-cuda")
@needs_hopper
def test_cuda_takes_a_negative_scale_and_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_choose_call(SHAPES["h4-batch"], torch.bfloat16, "cuda", scale=-0.1)
    for per_sm in (1, 64):
        monkeypatch.setattr(compressed, "CTAS_PER_SM", per_sm)
        monkeypatch.setattr(compressed, "SHORTEST", 1)
        check_gradients(choose_cuda.forward, choose_cuda.backward, call)
        check_gradients(choose_cuda.forward, choose_cuda.backward, dataclasses.replace(call, scratch=1 << 18))


@pytest.mark.gpu
@needs("choose-cuda")
@needs_hopper
def test_calls_beyond_the_tiles_take_triton() -> None:
    """No compressed key, given positions, and rows that TMA cannot read."""
    nothing = make_choose_call((1, 20, 20, 1, 16, 128, 128, Rule()), torch.bfloat16, "cuda")
    given = make_choose_call(SHAPES["few-keys"], torch.bfloat16, "cuda")
    given.q_pos = given.positions()
    wide = make_choose_call(SHAPES["few-keys"], torch.bfloat16, "cuda")
    wide.k = torch.nn.functional.pad(wide.k, (0, 1))[..., :-1]
    for call in (nothing, given, wide):
        assert not compressed.supports(call, device_info(call.q.device))
        check_both(choose_cuda, call, 1e-4)


@pytest.mark.gpu
@needs("choose-cuda")
@needs_hopper
def test_later_keys_do_not_reach_earlier_rows() -> None:
    """NaN in the last keys, which some rows see, but none of the same tile."""
    call = make_choose_call(SHAPES["h16"], torch.bfloat16, "cuda")
    do, dlse = make_grads(call.q, call.v)
    clean = results(choose_cuda, call, do, dlse)
    call.k[:, :, 40:], call.v[:, :, 40:] = math.nan, math.nan
    rows = (call.seen() <= 40 - 64 // call.rule.compress_stride)[0]
    for x, y in zip(clean[:2] + clean[3:4], (*(found := results(choose_cuda, call, do, dlse))[:2], found[3]), strict=True):
        assert torch.equal(x[:, rows], y[:, rows])


@pytest.mark.gpu
@needs("choose-cuda")
@needs_hopper
def test_a_cuda_graph_replays_it() -> None:
    call = make_choose_call(SHAPES["h16"], torch.bfloat16, "cuda")
    do, dlse = make_grads(call.q, call.v)
    expected = results(choose_cuda, call, do, dlse)
    graph = captured(lambda: results(choose_cuda, call, do, dlse))
    compressed._build.cache_clear()
    assert all(map(torch.equal, expected, replayed(*graph)))


@pytest.mark.gpu
@needs("choose-cuda")
@needs_hopper
def test_rows_beyond_32_bits_are_those_of_each_group_alone() -> None:
    """q, do, o and dq have more than 2^31 elements."""
    S, G, h = 131_072, 4, 34
    few = make_choose_call((1, 64, S, G, h, 128, 128, Rule()), torch.bfloat16, "cuda")
    q, do = (torch.randn(1, S, G, h, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert q.numel() > 1 << 31
    whole = dataclasses.replace(few, q=q, start=0)
    device = device_info(q.device)
    o, lse = compressed.forward(whole, device)
    dq, dk, dv = choose_cuda.backward(whole, o, lse, do, None)
    one = slice(G - 1, G)
    last = whole.of(q[:, :, one].contiguous(), whole.k[:, one], whole.v[:, one])
    expected = compressed.forward(last, device)
    assert torch.equal(expected[0], o[:, :, one])
    assert torch.equal(expected[1], lse[:, :, one])
    found = choose_cuda.backward(last, *expected, do[:, :, one], None)
    assert torch.equal(found[0], dq[:, :, one])
    for x, y in ((found[1], dk[:, one]), (found[2], dv[:, one])):  # other segments
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
