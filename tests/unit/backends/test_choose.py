"""Check parts of choosing: its oracle, PyTorch's chunks, Triton's importance and sections, and segments of CUDA's lists."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import triton
import triton.language as tl
from msgspec.structs import replace

from nsa_sel.backends import choose_cuda, choose_torch, choose_triton
from nsa_sel.backends._triton import choose_dkdv, choose_few, choose_rows, choose_scores
from nsa_sel.backends.cupy_cuda import compressed
from nsa_sel.core.call import ChooseCall, Rule, device_info
from nsa_sel.layer import block_scores
from nsa_sel.oracle import oracle_choose_backward
from nsa_sel.selection import Selection
from nsa_sel.settings.schema import KernelConfig
from tests.helpers.cases import make_grads
from tests.helpers.checks import Peak, new_memory_is_nan
from tests.helpers.choose import (
    SMALL,
    check_both,
    check_forward,
    check_gradients,
    in_pages,
    make_choose_call,
    oracle,
    plain,
    results,
)
from tests.helpers.cuda import check_fit, compiled, needs_nvrtc
from tests.helpers.gpus import needs, needs_hopper
from tests.helpers.policy_cases import H200


@pytest.mark.parametrize("shape", ["h3", "decode", "shorter-than-a-compressed-block"])
def test_oracle_gradients_are_those_of_autograd(shape: str) -> None:
    call = make_choose_call(shape, torch.float64)
    do, dlse = make_grads(call.q, call.v)
    dlse = dlse.where((call.seen() > 0)[:, :, None, None], 0.0)
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    o, lse = plain(*inputs, call)
    expected = torch.autograd.grad((o, lse.masked_fill(lse == -torch.inf, 0.0)), inputs, (do, dlse))
    rule = call.rule
    got = oracle_choose_backward(
        *(x.detach() for x in inputs), do, dlse, S_kv=call.start + call.q.shape[1], compress_block=rule.compress_block,
        compress_stride=rule.compress_stride,
    )  # fmt: skip
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(oracle(call).lse, lse.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", ["h3", "h16-nsa", "no-overlap", "covers-a-block"])
def test_oracle_importance_is_block_scores_of_p(shape: str) -> None:
    call = make_choose_call(shape, torch.float64)
    p = torch.einsum("bsghd,bgkd->bsghk", call.q * call.scale, call.k)
    p = p.masked_fill(torch.arange(call.k.shape[2]) >= call.seen()[:, :, None, None, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    exact, rule = oracle(call), call.rule
    S_kv = call.start + call.q.shape[1]
    scores = block_scores(p, rule.block_size, rule.compress_block, rule.compress_stride, S_kv)
    torch.testing.assert_close(exact.importance, scores, rtol=0, atol=1e-12)
    selection = Selection.from_scores(exact.importance, rule.n, rule.block_size, rule.first, rule.local, S_kv=S_kv)
    starts = torch.where(exact.blocks < 0, 0, exact.blocks * rule.block_size)
    assert torch.equal(selection.ranges[..., 0], starts)


def test_torch_takes_a_compressed_block_longer_than_a_block() -> None:
    call = make_choose_call((1, 60, 60, 1, 2, 16, 16, Rule(24, 4, 8, 4, 1, 1)), torch.float64)
    check_forward(choose_torch.forward, call)


@pytest.mark.parametrize("positions", ["implied", "given"])
def test_chunks_of_torch_bound_its_temporaries(positions: str) -> None:
    call = make_choose_call((2, 700, 700, 1, 4, 16, 16, SMALL), scratch=400_000)
    if positions == "given":
        call.q_pos = call.positions().flip(0)
    grads = make_grads(call.q, call.v)
    with Peak(call.q, call.k, call.v) as held:
        o, lse, _ = choose_torch.forward(call)
        choose_torch.backward(call, o, lse, *grads)
    assert held.largest <= max(call.scratch, call.q.numel() * 4)


# Triton


@pytest.mark.parametrize("rule", [SMALL, SMALL._replace(block_size=12), SMALL._replace(compress_block=4), SMALL._replace(block_size=128)])
def test_importance_carries_spills_from_step_to_step(rule: Rule) -> None:
    """Steps of one block, and of several; scores of visible blocks alone are written for certain."""
    call = make_choose_call((1, 40, 140, 1, 3, 16, 16, rule))
    exact = oracle(call)
    visible = (torch.arange(call.blocks) <= call.positions()[:, :, None, None] // rule.block_size).expand_as(exact.importance)
    for block_l in (4, 32):
        scores = torch.full(exact.importance.shape, torch.nan)
        choose_scores.block_scores(call, exact.lse.float(), scores, KernelConfig(block_l=block_l, num_warps=4, num_stages=1, rows=128))
        torch.testing.assert_close(scores[visible].double(), exact.importance[visible], rtol=1e-5, atol=1e-6)


def test_scores_carry_over_programs_of_importance() -> None:
    """After 4096 keys of 16 heads. Nearly all weight is on the last compressed key before, which covers the next block, too."""
    call = make_choose_call((1, 1, 4480, 1, 16, 16, 16, Rule(n=5)), q_pos=torch.tensor([[4479]]))
    call.q.fill_(1)
    call.k.mul_(0.1)[:, :, 255] = 2
    with new_memory_is_nan():
        found = choose_triton.paged(in_pages(call, 4))
    check_forward(lambda _: found, call)
    assert (found[2][0, 0, 0, :, 0] // 64).tolist() == [0, 63, 64, 68, 69]


@pytest.mark.parametrize("positions", ["implied", "given"])
def test_sections_of_rows_add_up(monkeypatch: pytest.MonkeyPatch, positions: str) -> None:
    call = make_choose_call((2, 37, 100, 1, 4, 16, 24, SMALL))
    call.q_pos = call.positions() if positions == "given" else None
    monkeypatch.setattr(choose_dkdv, "SHORTEST", 4)
    monkeypatch.setattr(choose_dkdv, "PROGRAMS", 16)
    config = replace(choose_triton.CONFIGS["choose/dkdv"], block_l=16)
    monkeypatch.setattr(choose_triton, "config_of", lambda call, kernel: replace(choose_triton.CONFIGS[kernel], block_l=16))
    assert choose_dkdv.sections_of(call, config).total == 4
    assert choose_dkdv.sections_of(dataclasses.replace(call, scratch=1), config).total == 1
    check_gradients(choose_triton.forward, choose_triton.backward, call)


@triton.jit
def sequences_kernel(bounds, found, origin, most, N, TILE: tl.constexpr):
    number = tl.program_id(0)
    i = choose_rows.sequence_of(number, bounds, origin, most, N, TILE)
    begin, end = choose_rows.span_of(i, bounds, origin, most, N)
    tl.store(found + 3 * number, i)
    tl.store(found + 3 * number + 1, begin)
    tl.store(found + 3 * number + 2, end)


def test_wrong_bounds_give_tiles_within_the_tensors() -> None:
    for bounds in ([0, 40, 20, 30], [0, 90, 200, 50], [-7, -3, 5, 9], [2**40, 1, 0, -(2**40)]):
        found = torch.zeros(12, 3, dtype=torch.int32)
        sequences_kernel[(12,)](torch.tensor(bounds), found, 0, 30, 3, TILE=4)
        i, begin, end = found.unbind(1)
        assert bool(((i >= 0) & (i <= 3) & (begin >= 0) & (begin <= end) & (end <= 30)).all())


# CUDA, on Hopper


KERNELS = {"forward_tiles.cu", "dq_tiles.cu", "dkdv_groups.cu", "sum_counts.cu", "sum_parts.cu"}
FITTING: dict[str, tuple[int, int, int, int, int, int, int, Rule]] = {  # B, S, S_kv, G, h, Dk, Dv
    "h16": (1, 8192, 8192, 4, 16, 128, 128, Rule()),
    "h48-192": (1, 500, 1100, 1, 48, 192, 128, Rule()),
    "h3-64": (2, 2048, 4000, 2, 3, 64, 64, Rule(compress_block=24, compress_stride=12, block_size=48)),
}
OF_TRITON = {"h3-64": {"dq_tiles.cu"}}


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
    kernels = compiled(monkeypatch, 90, lambda: results(choose_cuda, call, call.q.new_empty(*call.q.shape[:-1], call.v.shape[-1]), None))
    assert check_fit(kernels, 90) == KERNELS - OF_TRITON.get(shape, set())


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


@pytest.mark.parametrize("steps", [1, 64, 256, 2048])
def test_parts_of_few_rows_end_together(steps: int) -> None:
    """On an H200. Of up to 256 programs the last round leaves a fifth of the multiprocessors idle at most, if there are steps enough."""
    for programs in range(1, 257):
        parts = choose_few.parts_of(programs, steps, 2 * 132)
        rounds = programs * parts / (2 * 132)
        assert 1 <= parts <= steps
        assert parts == steps or rounds / math.ceil(rounds) > 0.8, (programs, parts)
    assert choose_few.parts_of(5000, steps, 2 * 132) == 1


@pytest.fixture
def on_hopper() -> ChooseCall:
    return make_choose_call((1, 1500, 1500, 2, 16, 128, 128, Rule()), torch.bfloat16, "cuda")


@pytest.mark.gpu
@needs("choose-cuda")
@needs_hopper
@pytest.mark.parametrize("per_sm", [1, 64])
def test_gradients_of_few_and_of_many_segments(on_hopper: ChooseCall, per_sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed, "CTAS_PER_SM", per_sm)
    monkeypatch.setattr(compressed, "SHORTEST", 1)
    check_gradients(choose_cuda.forward, choose_cuda.backward, on_hopper)


@pytest.mark.gpu
@needs("choose-cuda")
@needs_hopper
def test_calls_beyond_the_tiles_take_triton() -> None:
    """No compressed key, given positions, and rows that TMA cannot read."""
    nothing = make_choose_call((1, 20, 20, 1, 16, 128, 128, Rule()), torch.bfloat16, "cuda")
    given, wide = (make_choose_call((2, 200, 200, 1, 8, 128, 128, Rule()), torch.bfloat16, "cuda") for _ in range(2))
    given.q_pos = given.positions()
    wide.k = torch.nn.functional.pad(wide.k, (0, 1))[..., :-1]
    for call in (nothing, given, wide):
        assert not compressed.supports(call, device_info(call.q.device))
        check_both(choose_cuda, call, 1e-4)


@pytest.mark.gpu
@needs("choose-cuda")
@needs_hopper
def test_later_keys_do_not_reach_earlier_rows(on_hopper: ChooseCall) -> None:
    """NaN in the last keys, which some rows see, but none of the same tile."""
    call, (do, dlse) = on_hopper, make_grads(on_hopper.q, on_hopper.v)
    clean = results(choose_cuda, call, do, dlse)
    call.k[:, :, 40:], call.v[:, :, 40:] = torch.nan, torch.nan
    rows, found = (call.seen() <= 40 - 64 // call.rule.compress_stride)[0], results(choose_cuda, call, do, dlse)
    assert all(torch.equal(clean[i][:, rows], found[i][:, rows]) for i in (0, 1, 3))
