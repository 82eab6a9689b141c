"""Packed SDPA: parity with the oracle, no leaks, a bounded workspace, bit-equal repeats."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nsa_sel.backends import sdpa_packed
from nsa_sel.backends._sdpa import gathered, key_tiles
from nsa_sel.core.call import Call
from nsa_sel.oracle import oracle_backward, oracle_mask
from nsa_sel.selection import Selection
from tests.helpers.cases import (
    RESULTS,
    assert_all_close,
    assert_within_twice_baseline,
    edge_selections,
    lse_dtype,
    make_blocks,
    make_call,
    make_grads,
    make_qkv,
    make_spans,
    oracle_results,
    plain_results,
)

EDGES = list(edge_selections(1, 16, 1, 16))


def run(call: Call) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv with random gradients of both o and lse."""
    o, lse = sdpa_packed.forward(call)
    return o, lse, *sdpa_packed.backward(call, o, lse, *make_grads(call.q, call.v))


def all_results(call: Call) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv, and dq, dk, dv once more by the path of a GPU."""
    o, lse, *grads = run(call)
    do, dlse = make_grads(call.q, call.v)
    return o, lse, *grads, *gathered.backward(call, lse, do, (do * o).sum(-1) - dlse)


def forced(forward: Callable[..., None], call: Call) -> tuple[Tensor, Tensor]:
    """o and lse by one of the paths of `forward`."""
    o = call.q.new_zeros(*call.q.shape[:-1], call.v.shape[3])
    lse = torch.full(call.q.shape[:-1], -math.inf, dtype=lse_dtype(call.q))
    forward(call, *call.clamped_ranges(), o, lse)
    return o, lse


def check(call: Call) -> None:
    """o, lse, dq, dk, dv against float64, by every path of forward and backward; the allowed MAE is 1e-6 in float32."""
    q, k, v = call.q, call.k, call.v
    exact = oracle_results(q, k, v, call.selection.ranges, *make_grads(q, v), call.scale, call.q_pos)
    got = all_results(call)
    assert [x.dtype for x in got[:5]] == [q.dtype, lse_dtype(q), q.dtype, q.dtype, q.dtype]
    assert all(x.is_contiguous() for x in got[:5])
    limit = 1e-14 if q.dtype == torch.float64 else 1e-6
    pairs = list(zip(got, exact + exact[2:], strict=True))
    for forward in gathered.forward, key_tiles.forward:
        pairs += zip(forced(forward, call), exact[:2], strict=True)
    for x, y in pairs:
        assert x.shape == y.shape
        assert torch.equal(x == -math.inf, y == -math.inf)
        error = torch.where(y == -math.inf, 0, x.double() - y).abs()
        size = torch.where(y == -math.inf, 0, y).abs()
        assert error.numel() == 0 or error.mean() <= limit * max(1.0, float(size.mean()))


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


@pytest.mark.parametrize(("B", "S", "n"), [(0, 4, 2), (2, 0, 2), (1, 4, 0)])
def test_no_rows_or_no_ranges(B: int, S: int, n: int) -> None:
    q, k, v = torch.randn(B, S, 2, 3, 8), torch.randn(B, 2, 10, 8), torch.randn(B, 2, 10, 8)
    o, lse, *grads = run(make_call(q, k, v, torch.zeros(B, S, 2, n, 2, dtype=torch.int64)))
    assert [x.shape for x in (o, lse, *grads)] == [q.shape, q.shape[:-1], q.shape, k.shape, v.shape]
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
        return key_tiles.rows_by_tile(call, *call.clamped_ranges())

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
        monkeypatch.setattr(gathered, "buckets", lambda call, *_: gathered.static_buckets(call))
    q, k, v = make_qkv(2, 30, 1, 2, 16, Dv, S_kv=100)
    ranges = torch.tensor([[3, 9], [60, 500]][-n:], dtype=torch.int32).repeat(2, 30, 1, 1, 1)
    ranges[:, ::4] = 0
    q_pos = torch.arange(40, 70)
    expected = all_results(make_call(q, k, v, ranges, q_pos=q_pos))
    hidden = ~oracle_mask(ranges, 100, 30, q_pos).any(1)
    k[hidden], v[hidden] = bad, bad
    got = all_results(make_call(q, k, v, ranges, q_pos=q_pos))
    assert hidden.any()
    assert_all_close(got, expected)
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


@pytest.mark.parametrize("Dv", [16, 8])
@pytest.mark.parametrize("workspace_bytes", [0, 1, 20_000, 200_000])
def test_any_workspace_gives_the_same(workspace_bytes: int, Dv: int) -> None:
    q, k, v = make_qkv(2, 12, 1, 3, 16, Dv, S_kv=90)
    for ranges in (make_spans("mixed", 2, 12, 1, 90, 60), edge_selections(2, 12, 1, 90)["one_contiguous"]):
        expected = all_results(make_call(q, k, v, ranges))
        assert_all_close(all_results(make_call(q, k, v, ranges, workspace_bytes=workspace_bytes)), expected, atol=2e-6, rtol=1e-5)


def test_workspace_bounds_the_gathered_keys() -> None:
    q, k, v = make_qkv(1, 64, 1, 2, 16, S_kv=512)
    call = make_call(q, k, v, make_spans("mixed", 1, 64, 1, 512, 256), workspace_bytes=1_000_000)
    count = 0
    for rows, steps in gathered.packed(call, *call.clamped_ranges(), 6, "forward"):
        held = sum(buffer.nbytes for buffer in rows.buffers)
        assert held + sum(x.nbytes for x in (rows.keep, rows.position, rows.indices[0])) <= 1_000_000
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
        call, given = make_call(q, k, v, selection), (q, k, v, selection.ranges, *make_grads(q, v))
        oracle, baseline = oracle_results(*given), plain_results(*given)
        found = list(zip((*RESULTS, *RESULTS[2:]), all_results(call), strict=True))
        found += zip(RESULTS, forced(key_tiles.forward, call), strict=False)
        for name, x in found:
            i = RESULTS.index(name)
            assert_within_twice_baseline(x.to(baseline[i].dtype), oracle[i], baseline[i], name)


def test_gradients_without_dlse() -> None:
    q, k, v = make_qkv(1, 20, 2, 2, 8, dtype=torch.float64)
    call = make_call(q, k, v, make_spans("mixed", 1, 20, 2, 20, 12))
    o, lse = sdpa_packed.forward(call)
    do, _ = make_grads(q, v)
    assert_all_close(sdpa_packed.backward(call, o, lse, do, None), oracle_backward(q, k, v, call.selection.ranges, do))


def test_autocast_keeps_out() -> None:
    """The matrix products written out here stay in float32 under the caller's autocast."""
    q, k, v = make_qkv(1, 20, 2, 2, 16, 8)
    call = make_call(q, k, v, make_spans("mixed", 1, 20, 2, 20, 12))
    expected = run(call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(call)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


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
    buckets = gathered.static_buckets(call)
    assert torch.cat([ids for ids, _ in buckets]).sort().values.tolist() == list(range(2 * 120 * 2))
    for ids, L in buckets:
        assert total[ids].max() <= L
        assert L % 16 == 0
    expected = all_results(call)
    monkeypatch.setattr(gathered, "buckets", lambda call, *_: gathered.static_buckets(call))
    assert_all_close(all_results(call), expected)


def test_a_broken_max_length_drops_keys_and_writes_nowhere_else() -> None:
    position, keep, filled = gathered.positions(torch.tensor([[3, 20], [1, 9]]), torch.tensor([[13, 40], [5, 9]]), 16)
    assert position[0].tolist() == [*range(3, 13), *range(20, 26)]
    assert position[1].tolist() == [1, 2, 3, 4] + [1] * 12
    assert keep.sum(1).tolist() == [16, 4]
    assert filled.all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("Dk", "Dv"), [(64, 64), (48, 32), (12, 12)])
def test_gpu_matches_the_oracle_and_repeats(dtype: torch.dtype, Dk: int, Dv: int) -> None:
    q, k, v = make_qkv(2, 70, 2, 3, Dk, Dv, S_kv=200, dtype=dtype, device="cuda")
    spans = [make_spans("mixed", 2, 70, 2, 200, 90, device="cuda"), *edge_selections(2, 70, 2, 200, device="cuda").values()]
    for selection in (make_blocks(2, 70, 2, 200, 4, 16, device="cuda"), *map(Selection.from_ranges, spans)):
        got = run(make_call(q, k, v, selection))
        assert all(torch.equal(x, y) for x, y in zip(got, run(make_call(q, k, v, selection)), strict=True))
        given = q, k, v, selection.ranges, *make_grads(q, v)
        for name, x, exact, plain in zip(RESULTS, got, oracle_results(*given), plain_results(*given), strict=True):
            if dtype in (torch.float16, torch.bfloat16):
                assert_within_twice_baseline(x.to(plain.dtype), exact, plain, name)
            else:
                error = torch.where(exact == -math.inf, 0, x.cpu().double() - exact).abs()
                assert error.mean() <= (1e-4 if dtype == torch.float32 else 1e-13), name
