"""Packed SDPA: parity with the oracle, no leaks, a bounded workspace, bit-equal repeats; and the dense baselines."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.backends import sdpa_packed
from nsa_sel.bench.core.baselines import dense_causal_sdpa, masked_sdpa, token_mask
from nsa_sel.core.call import Call, device_info
from nsa_sel.core.check import check_call
from nsa_sel.oracle import oracle_backward, oracle_forward, oracle_mask
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.cases import assert_within_twice_baseline, edge_selections, make_blocks, make_grads, make_qkv, make_spans, plain_torch
from tests.helpers.parity import check_both, check_poison

EDGES = list(edge_selections(1, 16, 1, 16))


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Selection | Tensor,
    *,
    scale: float | None = None,
    q_pos: Tensor | None = None,
    workspace_bytes: int | None = None,
    path: str = "auto",
) -> Call:
    q, k, v, selection, scale, q_pos = check_call(q, k, v, selection, scale, q_pos)
    settings = settings_for(device_info(q.device))
    settings = msgspec.structs.replace(settings, triton_force_path=path)
    if workspace_bytes is not None:
        settings = msgspec.structs.replace(settings, workspace_bytes=workspace_bytes)
    return Call(q, k, v, selection, q_pos, scale, settings)


def run(call: Call, seed: int = 1) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv with random gradients of both o and lse."""
    o, lse = sdpa_packed.forward(call)
    do, dlse = make_grads(call.q, call.v, seed)
    return o, lse, *sdpa_packed.backward(call, o, lse, do, dlse)


def check(call: Call) -> None:
    """o, lse, dq, dk, dv against float64, by every way through forward and backward; the allowed MAE is 1e-6 in float32."""
    q, k, v, ranges = call.q, call.k, call.v, call.selection.ranges
    do, dlse = make_grads(q, v)
    exact = *oracle_forward(q, k, v, ranges, call.scale, call.q_pos), *oracle_backward(q, k, v, ranges, do, dlse, call.scale, call.q_pos)
    got = all_results(call)
    assert [x.dtype for x in got[:5]] == [q.dtype, lse_dtype(q), q.dtype, q.dtype, q.dtype]
    assert all(x.is_contiguous() for x in got[:5])
    limit = 1e-14 if q.dtype == torch.float64 else 1e-6
    pairs = list(zip(got, exact + exact[2:], strict=True))
    for way in sdpa_packed._forward_by_row, sdpa_packed._forward_by_key:
        pairs += zip(forced(way, call), exact, strict=False)
    for x, y in pairs:
        assert x.shape == y.shape
        assert torch.equal(x == -math.inf, y == -math.inf)
        error = torch.where(y == -math.inf, 0, x.double() - y).abs()
        size = torch.where(y == -math.inf, 0, y).abs()
        assert error.numel() == 0 or error.mean() <= limit * max(1.0, float(size.mean()))


def forced(way: Callable[..., None], call: Call) -> tuple[Tensor, Tensor]:
    """o and lse by one of the ways of `forward`."""
    B, S, G, h, _ = call.q.shape
    o, lse = call.q.new_zeros(B, S, G, h, call.v.shape[3]), torch.full((B, S, G, h), -math.inf, dtype=lse_dtype(call.q))
    way(call, *call.clamped_ranges(), o, lse)
    return o, lse


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", EDGES)
def test_edges_match_the_oracle(name: str, dtype: torch.dtype) -> None:
    q, k, v = make_qkv(3, 9, 2, 3, 16, 8, S_kv=37, dtype=dtype)
    check(make_call(q, k, v, edge_selections(3, 9, 2, 37)[name]))


@pytest.mark.parametrize("h", [1, 3, 4])
@pytest.mark.parametrize("kind", ["few", "many", "mixed"])
def test_spans_match_the_oracle(kind: str, h: int) -> None:
    q, k, v = make_qkv(2, 40, 2, h, 16, S_kv=150)
    check(make_call(q, k, v, make_spans(kind, 2, 40, 2, 150, 70)))


@pytest.mark.parametrize("block_size", [5, 16, 64])
def test_blocks_match_the_oracle(block_size: int) -> None:
    q, k, v = make_qkv(1, 70, 2, 2, 8, 24, S_kv=131)
    check(make_call(q, k, v, make_blocks(1, 70, 2, 131, 3, block_size)))


@pytest.mark.parametrize("scale", [0.3, -0.7, 0.0])
def test_any_finite_scale(scale: float) -> None:
    q, k, v = make_qkv(1, 12, 1, 2, 8)
    check(make_call(q, k, v, make_spans("mixed", 1, 12, 1, 12, 9), scale=scale))


@pytest.mark.parametrize("h", [1, 4])
def test_decode_attends_to_all_it_selects(h: int) -> None:
    """With is_causal=True on gathered keys, S = 1 would see the first of them alone."""
    q, k, v = make_qkv(3, 1, 2, h, 16, S_kv=200)
    check(make_call(q, k, v, make_blocks(3, 1, 2, 200, 4, 32)))
    check(make_call(q, k, v, torch.tensor([150, 200], dtype=torch.int32).expand(3, 1, 2, 1, 2)))


@pytest.mark.parametrize("shape", [(0, 4, 2), (2, 0, 2)])
def test_no_rows(shape: tuple[int, int, int]) -> None:
    B, S, G = shape
    q, k, v = torch.randn(B, S, G, 3, 8), torch.randn(B, G, 10, 8), torch.randn(B, G, 10, 8)
    got = run(make_call(q, k, v, torch.zeros(B, S, G, 2, 2, dtype=torch.int32)))
    assert [x.shape for x in got] == [q.shape, q.shape[:-1], q.shape, k.shape, v.shape]
    assert not got[3].any()


def test_no_ranges() -> None:
    q, k, v = make_qkv(1, 4, 1, 2, 8)
    o, lse, *grads = run(make_call(q, k, v, torch.zeros(1, 4, 1, 0, 2, dtype=torch.int64)))
    assert (lse == -math.inf).all()
    assert not any(x.any() for x in (o, *grads))


@pytest.mark.parametrize("positions", ["one a row", "one a row and sequence"])
def test_positions(positions: str) -> None:
    q, k, v = make_qkv(2, 6, 2, 3, 16, S_kv=90)
    q_pos = torch.tensor([3, 89, 0, 40, 41, 7])
    if positions != "one a row":
        q_pos = torch.stack((q_pos, q_pos.flip(0)))
    check(make_call(q, k, v, make_spans("mixed", 2, 6, 2, 90, 50), q_pos=q_pos))
    check(make_call(q, k, v, edge_selections(2, 6, 2, 90)["one_contiguous"], q_pos=q_pos.int()))


def test_the_rows_of_a_tile_of_keys_are_kept_for_their_positions() -> None:
    selection, positions = make_blocks(1, 6, 1, 40, 2, 16), torch.tensor([3, 39, 0, 17, 17, 30])

    def lists(q_pos: Tensor | None) -> object:
        call = make_call(*make_qkv(S=6, S_kv=40), selection, q_pos=q_pos)
        return sdpa_packed._rows_by_tile(call, *call.clamped_ranges())

    first = lists(positions)
    assert lists(positions) is first
    positions[0] = 39
    assert lists(positions) is not first
    assert lists(None) is lists(None)


def test_strides() -> None:
    """A [B,S_kv,G,D] cache, a slice of a wider one (steps that are no multiple of D), q and do as views."""
    q, k, v = make_qkv(2, 6, 3, 2, 16, S_kv=50)
    ranges = make_spans("mixed", 2, 6, 3, 50, 30)
    expected = run(make_call(q, k, v, ranges))
    wide = torch.randn(2, 50, 3, 40)
    wide[..., :16] = v.transpose(1, 2)
    k_view, v_view = k.transpose(1, 2).contiguous().transpose(1, 2), wide[..., :16].transpose(1, 2)
    q_view = q.transpose(1, 2).contiguous().transpose(1, 2)
    for got, wanted in zip(run(make_call(q_view, k_view, v_view, ranges)), expected, strict=True):
        assert torch.equal(got, wanted)
        assert got.is_contiguous()


def test_a_head_shared_by_all_groups() -> None:
    """K and V expanded over G: a step of 0 between groups."""
    q, k, v = make_qkv(2, 6, 1, 3, 16, S_kv=50)
    q, k, v = q.repeat(1, 1, 2, 1, 1), k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1)
    check(make_call(q, k, v, make_spans("many", 2, 6, 2, 50, 20)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(("n", "Dv"), [(2, 16), (2, 8), (1, 16)])
@pytest.mark.parametrize("buckets", ["by length", "static"])
def test_what_no_row_selects_may_be_anything(n: int, Dv: int, bad: float, buckets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys between the ranges, and keys beyond t; rows that select nothing look at none either (a GPU can't leave them out)."""
    if buckets == "static":
        monkeypatch.setattr(sdpa_packed, "_buckets", lambda call, *_: sdpa_packed._static_buckets(call))
    q, k, v = make_qkv(2, 30, 1, 2, 16, Dv, S_kv=100)
    ranges = torch.tensor([[3, 9], [60, 500]][-n:], dtype=torch.int32).repeat(2, 30, 1, 1, 1)
    ranges[:, ::4] = 0
    q_pos = torch.arange(40, 70)
    expected = all_results(make_call(q, k, v, ranges, q_pos=q_pos))
    hidden = ~oracle_mask(ranges, 100, 30, q_pos).any(1)
    k[hidden], v[hidden] = bad, bad
    got = all_results(make_call(q, k, v, ranges, q_pos=q_pos))
    assert hidden.any()
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)
    for i in (3, 4, 6, 7):
        assert not got[i][hidden].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n", [1, 2])
def test_what_one_row_selects_stays_with_it(n: int, bad: float) -> None:
    """The last row selects a bad key from the midst of the others' tile: the other rows and keys never see it."""
    q, k, v = make_qkv(1, 30, 1, 2, 16, S_kv=100)
    ranges = torch.tensor([[0, 10], [11, 64]][-n:], dtype=torch.int32).repeat(1, 30, 1, 1, 1)
    ranges[:, -1] = torch.tensor([10, 11]) * torch.eye(n, dtype=torch.int32)[:, :1]
    expected = all_results(make_call(q, k, v, ranges, q_pos=torch.full((30,), 99)))
    k[:, :, 10] = v[:, :, 10] = bad
    got = all_results(make_call(q, k, v, ranges, q_pos=torch.full((30,), 99)))
    assert got[0][:, -1].isnan().all() or bad == math.inf
    keys = torch.arange(100) != 10
    for i, (x, y) in enumerate(zip(got, expected, strict=True)):
        x, y = (x[:, :, keys], y[:, :, keys]) if i in (3, 4, 6, 7) else (x[:, :-1], y[:, :-1])
        torch.testing.assert_close(x, y)


def all_results(call: Call) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv, and dq, dk, dv once more by the GPU's way."""
    o, lse, *grads = run(call)
    do, dlse = make_grads(call.q, call.v)
    return o, lse, *grads, *sdpa_packed._backward_by_row(call, lse, do, (do * o).sum(-1) - dlse)


@pytest.mark.parametrize("Dv", [16, 8])
@pytest.mark.parametrize("workspace_bytes", [0, 1, 20_000, 200_000])
def test_any_workspace_gives_the_same(workspace_bytes: int, Dv: int) -> None:
    q, k, v = make_qkv(2, 12, 1, 3, 16, Dv, S_kv=90)
    for ranges in (make_spans("mixed", 2, 12, 1, 90, 60), edge_selections(2, 12, 1, 90)["one_contiguous"]):
        expected = all_results(make_call(q, k, v, ranges))
        for x, y in zip(all_results(make_call(q, k, v, ranges, workspace_bytes=workspace_bytes)), expected, strict=True):
            torch.testing.assert_close(x, y, atol=2e-6, rtol=1e-5)


def test_workspace_bounds_the_gathered_keys() -> None:
    q, k, v = make_qkv(1, 64, 1, 2, 16, S_kv=512)
    call = make_call(q, k, v, make_spans("mixed", 1, 64, 1, 512, 256), workspace_bytes=1_000_000)
    start, end = call.clamped_ranges()
    count = 0
    for rows, steps in sdpa_packed._packed(call, start, end, 6, "forward"):
        held = sum(buffer.nbytes for buffer in rows.buffers)
        assert held + sum(x.nbytes for x in (rows.keep, rows.position, rows.places[0])) <= 1_000_000
        count += len(steps)
    assert count > 1


@pytest.mark.parametrize("count", [1, 2])
def test_repeats_at_the_same_number_of_threads_change_no_bit(count: int) -> None:
    """With another number of threads torch's matrix products may add in another order, as they do on CPUs with AMX."""
    threads = torch.get_num_threads()
    cases = [
        (make_qkv(1, 200, 1, 4, 64), make_blocks(1, 200, 1, 200, 4, 32)),
        (make_qkv(1, 100, 1, 3, 24, 16, S_kv=200), Selection.from_ranges(make_spans("many", 1, 100, 1, 200, 90))),
        (make_qkv(1, 90, 1, 4, 32), Selection.from_ranges(edge_selections(1, 90, 1, 90)["one_contiguous"])),
    ]
    try:
        torch.set_num_threads(count)
        for qkv, selection in cases:
            first = run(make_call(*qkv, selection))
            for _ in range(3):
                assert all(torch.equal(x, y) for x, y in zip(run(make_call(*qkv, selection)), first, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("Dv", [32, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_errors_are_at_most_twice_plain_torch(dtype: torch.dtype, Dv: int) -> None:
    q, k, v = make_qkv(2, 48, 2, 4, 32, Dv, S_kv=160, dtype=dtype)
    for selection in (make_blocks(2, 48, 2, 160, 4, 16), Selection.from_ranges(edge_selections(2, 48, 2, 160)["one_contiguous"])):
        got = all_results(make_call(q, k, v, selection))
        do, dlse = make_grads(q, v)
        oracle = *oracle_forward(q, k, v, selection.ranges), *oracle_backward(q, k, v, selection.ranges, do, dlse)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = plain_torch(*leaves, selection.ranges)
        baseline = o, lse, *torch.autograd.grad((o, lse), leaves, (do, dlse.to(lse.dtype)))
        by_key = forced(sdpa_packed._forward_by_key, make_call(q, k, v, selection))
        for i, name in enumerate(("o", "lse")):
            assert_within_twice_baseline(by_key[i].to(baseline[i].dtype), oracle[i], baseline[i], f"{name} by key")
        for name, i, j in (("o", 0, 0), ("lse", 1, 1), ("dq", 2, 2), ("dk", 3, 3), ("dv", 4, 4), ("dq", 5, 2), ("dk", 6, 3), ("dv", 7, 4)):
            assert_within_twice_baseline(got[i].to(baseline[j].dtype), oracle[j], baseline[j], name)


def test_gradients_without_dlse() -> None:
    q, k, v = make_qkv(1, 20, 2, 2, 8, dtype=torch.float64)
    call = make_call(q, k, v, make_spans("mixed", 1, 20, 2, 20, 12))
    o, lse = sdpa_packed.forward(call)
    do, _ = make_grads(q, v)
    for x, y in zip(sdpa_packed.backward(call, o, lse, do, None), oracle_backward(q, k, v, call.selection.ranges, do), strict=True):
        torch.testing.assert_close(x, y)


def test_autocast_keeps_out() -> None:
    """The matrix products written out here stay in float32 under the caller's autocast."""
    q, k, v = make_qkv(1, 20, 2, 2, 16, 8)
    call = make_call(q, k, v, make_spans("mixed", 1, 20, 2, 20, 12))
    expected = run(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(call)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


class TestPath:
    def path(self, ranges: Tensor, workspace_bytes: int | None = None) -> str:
        B, S, G = ranges.shape[:3]
        calls = [make_call(*make_qkv(B, S, G, 2, 16, Dv, S_kv=256), ranges, workspace_bytes=workspace_bytes) for Dv in (16, 8)]
        for call in calls:
            check(call)
        return sdpa_packed.path(calls[0])

    def windows(self, start: Tensor, end: Tensor) -> Tensor:
        return torch.stack((start, end), -1).int()[None, :, None, None].expand(2, -1, 1, 1, 2)

    def test_one_shared_range_is_dense(self) -> None:
        assert self.path(self.windows(torch.zeros(40), torch.arange(40) + 217)) == "dense"

    def test_a_sliding_window_is_dense(self) -> None:
        assert self.path(self.windows(torch.arange(40) + 117, torch.arange(40) + 217)) == "dense"

    def test_rows_without_keys_are_dense_too(self) -> None:
        assert self.path(self.windows(torch.where(torch.arange(40) % 3 == 0, 300, 0), torch.full((40,), 256))) == "dense"

    def test_ranges_that_lie_apart_are_gathered(self) -> None:
        start = torch.arange(40) * 37 % 200
        assert self.path(self.windows(start, start + 7)) == "varlen"

    def test_two_ranges_are_gathered(self) -> None:
        ranges = self.windows(torch.zeros(40), torch.full((40,), 256))
        assert self.path(torch.cat((ranges, ranges * 0), 3)) == "varlen"

    def test_a_dense_step_beyond_the_workspace_is_gathered(self) -> None:
        assert self.path(self.windows(torch.zeros(40), torch.full((40,), 256)), workspace_bytes=1000) == "varlen"

    def test_tiles_of_keys_are_taken_when_they_pay(self) -> None:
        q, k, v = make_qkv(1, 128, 1, 2, 16)
        blocks, spans = make_blocks(1, 128, 1, 128, 3, 32), make_spans("many", 1, 128, 1, 128, 40)
        for call, pays in (
            (make_call(q, k, v, blocks), True),
            (make_call(q, k, v, spans), False),
            (make_call(q[:, -9:], k, v, Selection.from_ranges(blocks.ranges[:, -9:], 32)), False),
            (make_call(q, k, v / 0, blocks), False),
        ):
            assert sdpa_packed.path(call) == "varlen"
            assert sdpa_packed._pays_by_key(call, *call.clamped_ranges()) == pays

    def test_ranges_written_in_place_are_met_anew(self) -> None:
        q, k, v = make_qkv(1, 64, 1, 2, 16)
        selection = make_blocks(1, 64, 1, 64, 2, 16)
        run(make_call(q, k, v, selection))
        selection.ranges.copy_(make_blocks(1, 64, 1, 64, 2, 16, seed=5).ranges)
        check(make_call(q, k, v, selection))

    def test_rows_whose_first_keys_are_all_masked(self) -> None:
        """The kernel walks over keys in pieces: a row may have nothing in the first ones."""
        B, S, S_kv = 1, 8, 1500
        q, k, v = make_qkv(B, S, 1, 2, 16, S_kv=S_kv)
        start = torch.tensor([0, 0, 0, 1200, 0, 1300, 0, 0])
        call = make_call(q, k, v, torch.stack((start, torch.full((S,), 1400)), -1).int()[None, :, None, None])
        assert sdpa_packed.path(call) == "dense"
        check(call)


class TestPathOfAGpu:
    """The dense path by static facts, as a GPU takes it, run on a CPU."""

    @pytest.fixture(autouse=True)
    def unread(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sdpa_packed, "_may_read", lambda call: False)
        monkeypatch.setattr(sdpa_packed, "_DENSE_TILE_GPU", 16)  # several, the last one short

    def call(self, start: int | Tensor, length: int | Tensor, *, S: int = 40, S_kv: int = 256, **how: Any) -> Call:
        begin = torch.as_tensor(start).expand(S)
        ranges = torch.stack((begin, begin + length), -1).int()[None, :, None, None].expand(2, -1, 1, 1, 2)
        max_length = how.pop("max_length", None)
        return make_call(*make_qkv(2, S, 1, 2, 16, S_kv=S_kv), Selection(ranges, None, max_length), **how)

    @pytest.mark.parametrize("Dv", [16, 8])
    @pytest.mark.parametrize("edge", ["one_contiguous", "one_key", "own_key", "future_only"])
    def test_edges(self, edge: str, Dv: int) -> None:
        for positions in (None, torch.randint(0, 40, (2, 30))):
            call = make_call(*make_qkv(2, 30, 2, 3, 16, Dv, S_kv=40), edge_selections(2, 30, 2, 40)[edge], q_pos=positions)
            assert sdpa_packed.path(call) == "dense"
            check(call)

    def test_ranges_outside_of_the_keys(self) -> None:
        for start, length in ((-5, 3), (-5, 30), (250, 100), (300, 9), (9, -4)):
            call = self.call(start, length)
            assert sdpa_packed.path(call) == "dense"
            check(call)

    def test_a_measured_selection_in_which_no_row_selects_anything(self) -> None:
        """The decoding step of sequences that are done; finding that out left packed SDPA with buckets of no keys."""
        for n in (1, 3):
            call = make_call(*make_qkv(2, 30, 2, 3, 16, S_kv=40), Selection.from_blocks(torch.full((2, 30, 2, n), -1), 16))
            call.selection.measure(40)
            o, lse = sdpa_packed.forward(call)
            assert bool((o == 0).all())
            assert bool((lse == float("-inf")).all())
            for gradient in sdpa_packed._backward_by_row(call, lse, torch.randn_like(o), torch.zeros_like(lse)):
                assert bool((gradient == 0).all())

    def test_static_facts_say_where_rows_select_too_little(self) -> None:
        """Slices are all that rows may see: dense up to so many times what they may select."""
        waste = int(sdpa_packed._DENSE_WASTE_GPU)
        assert sdpa_packed.path(self.call(0, 256 // waste, max_length=256 // waste + 1)) == "dense"
        assert sdpa_packed.path(self.call(0, 256 // waste // 2, max_length=256 // waste // 2)) == "varlen"

    def test_what_was_measured_counts(self) -> None:
        call = self.call(0, 4)
        assert sdpa_packed.path(call) == "dense"  # for all that is known, each row selects all keys
        call.selection.measure(S_kv=256)
        assert sdpa_packed.path(call) == "varlen"

    def test_the_flag_decides(self) -> None:
        assert sdpa_packed.path(self.call(torch.arange(40) * 5, 7, max_length=7, path="dense")) == "dense"
        check(self.call(torch.arange(40) * 5, 7, max_length=7, path="dense"))
        assert sdpa_packed.path(self.call(0, 256, path="varlen")) == "varlen"
        two = make_call(*make_qkv(1, 8, 1, 2, 16), make_spans("many", 1, 8, 1, 8, 8), path="dense")
        assert sdpa_packed.path(two) == "varlen"  # the fallback runs everything

    def test_copies_and_masks_stay_within_the_workspace(self) -> None:
        copies = 2 * 2 * 256 * 16 * 4
        assert sdpa_packed.path(self.call(0, 256, workspace_bytes=copies)) == "varlen"
        assert sdpa_packed.path(self.call(0, 256, workspace_bytes=copies + 2 * 256 * 8)) == "dense"

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
    def test_what_is_not_finite_stays_with_its_rows(self, bad: float) -> None:
        clean = self.call(torch.arange(40), 100)
        poisoned = dataclasses.replace(clean, k=clean.k.clone(), v=clean.v.clone())
        poisoned.k[:, :, 20], poisoned.v[:, :, 110] = bad, bad
        assert sdpa_packed.path(poisoned) == "dense"
        met = (torch.arange(40) <= 20) | (torch.arange(40) + 100 > 110)
        for x, y in zip(sdpa_packed.forward(poisoned), sdpa_packed.forward(clean), strict=True):
            assert x[:, met].isnan().all()
            assert torch.equal(x[:, ~met], y[:, ~met])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("path", ["auto", "dense"])
def test_the_dense_path_on_a_gpu(dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of keys, which the kernel's bias must not be laid out by, rows in several tiles, positions, and NaN beside the ranges."""
    monkeypatch.setenv("NSA_SEL_TRITON_FORCE_PATH", path)
    monkeypatch.setattr(sdpa_packed, "_DENSE_TILE_GPU", 64)
    for S, h, Dv, start, end in ((1, 4, 64, 0, 250), (150, 4, 32, 0, 401), (150, 1, 64, 37, 301)):
        q, k, v = (x.to("cuda", dtype) for x in make_qkv(2, S, 2, h, 64, Dv, S_kv=401))
        ranges = torch.tensor([start, end], dtype=torch.int32, device="cuda").expand(2, S, 2, 1, 2)
        selection = Selection.from_ranges(ranges)
        positions = torch.randint(0, 401, (2, S), device="cuda")
        assert sdpa_packed.path(make_call(q, k, v, selection, path=path)) == "dense"
        for q_pos in (None, positions):
            check_both("sdpa-packed", q, k, v, selection, q_pos=q_pos)
        if end < 401:
            check_poison("sdpa-packed", q, k, v, selection)


def test_the_event_tells_the_path(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = make_qkv(1, 8, 1, 2, 16)
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    with caplog.at_level("INFO", "nsa_sel"):
        for path in ("dense", "varlen"):
            monkeypatch.setenv("NSA_SEL_TRITON_FORCE_PATH", path)
            nsa_sel.selection_attention(q, k, v, edge_selections(1, 8, 1, 16)["one_contiguous"], backend="sdpa-packed")
            (event,) = [record.nsa_sel for record in caplog.records if record.getMessage() == "sel.path"]
            assert event == {"backend": "sdpa-packed", "path": path}
            caplog.clear()


def test_a_gpu_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data raise wherever a value is asked for; no device but a CPU may be read."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # knows no meta device
    q, k, v = make_qkv(2, 60, 2, 3, 16, S_kv=400)
    for selection in (make_blocks(2, 60, 2, 400, 4, 32), Selection.from_ranges(edge_selections(2, 60, 2, 400)["one_contiguous"])):
        call = make_call(q, k, v, selection)
        meta = dataclasses.replace(call, q=q.to("meta"), k=k.to("meta"), v=v.to("meta"), selection=selection.to("meta"))
        assert sdpa_packed.path(meta) == ("dense" if selection.n == 1 else "varlen")
        assert [x.shape for x in run_meta(meta)] == [x.shape for x in run(call)]
        positions = dataclasses.replace(meta, q_pos=torch.zeros(2, 60, dtype=torch.int64, device="meta"))
        assert [x.shape for x in run_meta(positions)] == [x.shape for x in run(call)]


def run_meta(call: Call) -> tuple[Tensor, ...]:
    o, lse = sdpa_packed.forward(call)
    return o, lse, *sdpa_packed.backward(call, o, lse, torch.empty_like(o), torch.empty_like(lse))


@pytest.mark.parametrize("facts", ["block_size", "max_length", "measured", "none"])
def test_static_buckets_hold_every_row_and_its_keys(facts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU uses, run on a CPU: each row once, in a bucket that its keys fit, and the same results."""
    q, k, v = make_qkv(2, 120, 2, 2, 16, S_kv=150)
    selection = make_blocks(2, 120, 2, 150, 3, 16)
    if facts != "block_size":
        selection = Selection.from_ranges(selection.ranges, max_length=48 if facts == "max_length" else None)
    if facts == "measured":
        selection.measure()
    call = make_call(q, k, v, selection)
    start, end = call.clamped_ranges()
    total = (end - start).sum(-1).view(-1)
    buckets = sdpa_packed._static_buckets(call)
    assert torch.cat([ids for ids, _ in buckets]).sort().values.tolist() == list(range(2 * 120 * 2))
    for ids, L in buckets:
        assert total[ids].max() <= L
        assert L % 16 == 0
    expected = all_results(call)
    monkeypatch.setattr(sdpa_packed, "_buckets", lambda call, *_: sdpa_packed._static_buckets(call))
    for x, y in zip(all_results(call), expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_broken_max_length_drops_keys_and_writes_nowhere_else() -> None:
    position, keep, filled = sdpa_packed._positions(torch.tensor([[3, 20], [1, 9]]), torch.tensor([[13, 40], [5, 9]]), 16)
    assert position[0].tolist() == [*range(3, 13), *range(20, 26)]
    assert position[1].tolist() == [1, 2, 3, 4] + [1] * 12
    assert keep.sum(1).tolist() == [16, 4]
    assert filled.all()


class TestBaselines:
    @pytest.mark.parametrize("form", [torch.bool, torch.float64])
    def test_masked_sdpa(self, form: torch.dtype) -> None:
        q, k, v = make_qkv(2, 9, 2, 3, 16, 8, S_kv=37, dtype=torch.float64, requires_grad=True)
        for ranges in edge_selections(2, 9, 2, 37).values():
            selection = Selection.from_ranges(ranges)
            do, _ = make_grads(q, v)
            o = masked_sdpa(q, k, v, selection if form == torch.bool else token_mask(selection, 37, dtype=form), scale=0.2)
            torch.testing.assert_close(o, oracle_forward(q, k, v, ranges, 0.2)[0])
            for x, y in zip(torch.autograd.grad(o, (q, k, v), do), oracle_backward(q, k, v, ranges, do, scale=0.2), strict=True):
                torch.testing.assert_close(x, y)

    def test_token_mask_at_positions(self) -> None:
        q, k, v = make_qkv(2, 5, 1, 2, 8, S_kv=30)
        ranges = make_spans("mixed", 2, 5, 1, 30, 20)
        q_pos = torch.tensor([29, 3, 11, 0, 15])
        o = masked_sdpa(q, k, v, token_mask(Selection.from_ranges(ranges), 30, q_pos))
        torch.testing.assert_close(o.double(), oracle_forward(q, k, v, ranges, q_pos=q_pos)[0], atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize(("S", "S_kv"), [(20, 20), (7, 20), (1, 20), (1, 1)])
    @pytest.mark.parametrize("h", [1, 3])
    def test_dense_causal_sdpa_counts_rows_from_the_last_key(self, S: int, S_kv: int, h: int) -> None:
        q, k, v = make_qkv(2, S, 2, h, 8, S_kv=S_kv, dtype=torch.float64, requires_grad=True)
        everything = torch.tensor([0, S_kv]).expand(2, S, 2, 1, 2)
        do, _ = make_grads(q, v)
        o = dense_causal_sdpa(q, k, v)
        torch.testing.assert_close(o, oracle_forward(q, k, v, everything)[0])
        for x, y in zip(torch.autograd.grad(o, (q, k, v), do), oracle_backward(q, k, v, everything, do), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("Dk", "Dv"), [(64, 64), (48, 32), (12, 12)])
def test_gpu_matches_the_oracle_and_repeats(dtype: torch.dtype, Dk: int, Dv: int) -> None:
    q, k, v = make_qkv(2, 70, 2, 3, Dk, Dv, S_kv=200, dtype=dtype, device="cuda")
    selections = [
        make_blocks(2, 70, 2, 200, 4, 16, device="cuda"),
        Selection.from_ranges(make_spans("mixed", 2, 70, 2, 200, 90, device="cuda")),
    ]
    selections += [Selection.from_ranges(ranges) for ranges in edge_selections(2, 70, 2, 200, device="cuda").values()]
    do, dlse = make_grads(q, v)
    for selection in selections:
        ranges = selection.ranges
        got = run(make_call(q, k, v, selection))
        assert all(torch.equal(x, y) for x, y in zip(got, run(make_call(q, k, v, selection)), strict=True))
        oracle = *oracle_forward(q, k, v, ranges.cpu()), *oracle_backward(q, k, v, ranges.cpu(), do, dlse)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = plain_torch(*leaves, ranges)
        baseline = o, lse, *torch.autograd.grad((o, lse), leaves, (do, dlse.to(lse.dtype)))
        for name, x, exact, plain in zip(("o", "lse", "dq", "dk", "dv"), got, oracle, baseline, strict=True):
            if dtype in (torch.float16, torch.bfloat16):
                assert_within_twice_baseline(x.to(plain.dtype), exact, plain, name)
            else:
                error = torch.where(exact == -math.inf, 0, x.cpu().double() - exact).abs()
                assert error.mean() <= (1e-4 if dtype == torch.float32 else 1e-13), name
