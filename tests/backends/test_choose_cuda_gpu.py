"""Choosing by Hopper's kernels on a GPU: parity with the oracle, masks, segments, reruns, graphs, and long sequences."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from nsa_sel.backends import choose_cuda
from nsa_sel.backends.cupy_cuda import compressed
from nsa_sel.core.call import device_info
from nsa_sel.core.choose_call import Rule
from tests.helpers.cases import make_grads
from tests.helpers.choose_cases import check_both, check_gradients, check_unread, make_choose_call, results
from tests.helpers.gpus import needs, needs_hopper
from tests.helpers.graphs import captured, replayed

pytestmark = [pytest.mark.gpu, needs("choose-cuda"), needs_hopper]
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_matches_the_oracle(shape: str, dtype: torch.dtype) -> None:
    call = make_choose_call(SHAPES[shape], dtype, "cuda")
    assert compressed.supports(call, device_info(call.q.device))
    check_both(choose_cuda, call, 1e-4, with_lse=shape != "h64")


def test_cuda_takes_a_negative_scale_and_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_choose_call(SHAPES["h4-batch"], torch.bfloat16, "cuda", scale=-0.1)
    for per_sm in (1, 64):
        monkeypatch.setattr(compressed, "CTAS_PER_SM", per_sm)
        monkeypatch.setattr(compressed, "SHORTEST", 1)
        check_gradients(choose_cuda.forward, choose_cuda.backward, call)
        check_gradients(choose_cuda.forward, choose_cuda.backward, dataclasses.replace(call, scratch=1 << 18))


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


@pytest.mark.parametrize(("h", "D"), [(16, 128), (3, 64)])
def test_keys_and_rows_that_count_for_nothing_are_not_read(h: int, D: int) -> None:
    call = make_choose_call((2, 1333, 1333, 2, h, D, D, Rule()), torch.bfloat16, "cuda", start=-100)
    assert compressed.supports(call, device_info(call.q.device))
    check_unread(choose_cuda, call, reruns=20)


def test_later_keys_do_not_reach_earlier_rows() -> None:
    """NaN in the last keys, which some rows see, but none of the same tile."""
    call = make_choose_call(SHAPES["h16"], torch.bfloat16, "cuda")
    do, dlse = make_grads(call.q, call.v)
    clean = results(choose_cuda, call, do, dlse)
    call.k[:, :, 40:], call.v[:, :, 40:] = math.nan, math.nan
    rows = (call.seen() <= 40 - 64 // call.rule.compress_stride)[0]
    for x, y in zip(clean[:2] + clean[3:4], (*(found := results(choose_cuda, call, do, dlse))[:2], found[3]), strict=True):
        assert torch.equal(x[:, rows], y[:, rows])


def test_a_cuda_graph_replays_it() -> None:
    call = make_choose_call(SHAPES["h16"], torch.bfloat16, "cuda")
    do, dlse = make_grads(call.q, call.v)
    expected = results(choose_cuda, call, do, dlse)
    graph = captured(lambda: results(choose_cuda, call, do, dlse))
    compressed._build.cache_clear()
    assert all(map(torch.equal, expected, replayed(*graph)))


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
