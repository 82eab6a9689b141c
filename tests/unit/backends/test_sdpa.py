"""Packed SDPA: which path it takes through the rows of a call, its dense path, a bounded workspace, and no reads of a GPU.

The contract table has its other paths, as lanes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, selection_attention
from nsa_sel.backends import sdpa_packed
from nsa_sel.backends._sdpa import attend, dense, gathered, key_tiles
from nsa_sel.core.call import Call
from tests.helpers.cases import (
    assert_forward,
    assert_gradients,
    every_key,
    make_blocks,
    make_call,
    make_grads,
    make_qkv,
    make_spans,
)
from tests.helpers.checks import check_both, check_poison


def run(call: Call) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv with random gradients of both o and lse."""
    o, lse = sdpa_packed.forward(call)
    return o, lse, *sdpa_packed.backward(call, o, lse, *make_grads(call.q, call.v))


def all_results(call: Call) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv, and dq, dk, dv once more by the path of a GPU."""
    o, lse, *grads = run(call)
    do, dlse = make_grads(call.q, call.v)
    return o, lse, *grads, *gathered.backward(call, lse, do, (do * o).sum(-1) - dlse)


def check(call: Call) -> None:
    """o, lse, dq, dk, dv are as close to the oracle as everywhere."""
    o, lse, *gradients = run(call)
    do, dlse = make_grads(call.q, call.v)
    given, how = (call.q, call.k, call.v, call.selection.ranges), (call.scale, call.q_pos)
    assert_forward((o, lse), *given, *how)
    assert_gradients(tuple(gradients), *given, do, torch.where(lse == float("-inf"), 0.0, dlse), *how)


@pytest.mark.parametrize("Dv", [16, 8])
@pytest.mark.parametrize("workspace_bytes", [0, 1, 20_000, 200_000])
def test_any_workspace_gives_the_same(workspace_bytes: int, Dv: int) -> None:
    q, k, v = make_qkv(2, 12, 1, 3, 16, Dv, S_kv=90)
    for ranges in (make_spans("mixed", 2, 12, 1, 90, 60), every_key(2, 12, 1, 90)):
        expected = all_results(make_call(q, k, v, ranges))
        found = all_results(make_call(q, k, v, ranges, workspace_bytes=workspace_bytes))
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


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
        (make_qkv(1, 90, 1, 4, 32), Selection.from_ranges(every_key(1, 90, 1, 90))),
    ]
    try:
        torch.set_num_threads(count)
        for qkv, selection in cases:
            first = run(make_call(*qkv, selection))
            for _ in range(3):
                assert all(map(torch.equal, run(make_call(*qkv, selection)), first))
    finally:
        torch.set_num_threads(threads)


def test_a_gpu_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data raise wherever a value is asked for; no device but a CPU may be read."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # knows no meta device
    q, k, v = make_qkv(2, 60, 2, 3, 16, S_kv=400)
    for selection in (make_blocks(2, 60, 2, 400, 4, 32), Selection.from_ranges(every_key(2, 60, 2, 400))):
        call = make_call(q, k, v, selection)
        meta = dataclasses.replace(call, q=q.to("meta"), k=k.to("meta"), v=v.to("meta"), selection=selection.to("meta"))
        assert sdpa_packed.path(meta) == ("dense" if selection.n == 1 else "varlen")
        positions = dataclasses.replace(meta, q_pos=torch.zeros(2, 60, dtype=torch.int64, device="meta"))
        for unread in (meta, positions):
            o, lse = sdpa_packed.forward(unread)
            grads = sdpa_packed.backward(unread, o, lse, torch.empty_like(o), torch.empty_like(lse))
            assert [x.shape for x in (o, lse, *grads)] == [x.shape for x in run(call)]


@pytest.mark.parametrize("facts", ["block_size", "max_length", "measured", "none"])
def test_static_buckets_hold_every_row_and_its_keys(facts: str) -> None:
    """Run the GPU's buckets on a CPU: each row is in one bucket that fits its keys, with the same results."""
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


def test_a_broken_max_length_drops_keys_and_writes_nowhere_else() -> None:
    position, keep, filled = gathered.positions(torch.tensor([[3, 20], [1, 9]]), torch.tensor([[13, 40], [5, 9]]), 16)
    assert position[0].tolist() == [*range(3, 13), *range(20, 26)]
    assert position[1].tolist() == [1, 2, 3, 4] + [1] * 12
    assert keep.sum(1).tolist() == [16, 4]
    assert filled.all()


def windows(start: Tensor, end: Tensor | int) -> Tensor:
    """Ranges [2,S,1,1,2]."""
    return torch.stack((start, torch.as_tensor(end).expand_as(start)), -1).int()[None, :, None, None].expand(2, -1, 1, 1, 2)


ROW = torch.arange(40)
ALL = windows(0 * ROW, 256)


class TestPath:
    @pytest.mark.parametrize(
        ("ranges", "path", "settings"),
        [
            pytest.param(windows(0 * ROW, ROW + 217), "dense", {}, id="one shared range"),
            pytest.param(windows(ROW + 117, ROW + 217), "dense", {}, id="a sliding window"),
            pytest.param(windows(torch.where(ROW % 3 == 0, 300, 0), 256), "dense", {}, id="some rows without keys"),
            pytest.param(windows(ROW * 37 % 200, ROW * 37 % 200 + 7), "varlen", {}, id="ranges that lie apart"),
            pytest.param(torch.cat((ALL, ALL * 0), 3), "varlen", {}, id="two ranges"),
            pytest.param(ALL, "varlen", {"workspace_bytes": 1000}, id="a dense step beyond the workspace"),
        ],
    )
    def test_path_of_a_cpu(self, ranges: Tensor, path: str, settings: dict[str, int]) -> None:
        for Dv in (8, 16):
            call = make_call(*make_qkv(2, 40, 1, 2, 16, Dv, S_kv=256), ranges, **settings)
            check(call)
        assert sdpa_packed.path(call) == path

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
            assert key_tiles.pays(call, *call.clamped_ranges()) == pays

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
        monkeypatch.setattr(attend, "may_read", lambda call: False)
        monkeypatch.setattr(dense, "_ROWS_GPU", 16)  # several, the last one short

    def call(self, start: int | Tensor, length: int | Tensor, *, S: int = 40, S_kv: int = 256, **how: Any) -> Call:
        begin = torch.as_tensor(start).expand(S)
        selection = Selection(windows(begin, begin + length), None, how.pop("max_length", None))
        return make_call(*make_qkv(2, S, 1, 2, 16, S_kv=S_kv), selection, **how)

    @pytest.mark.parametrize("Dv", [16, 8])
    @pytest.mark.parametrize("edge", [(0, 40), (0, 1), "own", "future"])
    def test_edges(self, edge: tuple[int, int] | str, Dv: int) -> None:
        own = torch.arange(10, 40) + (edge == "future")
        ranges = torch.stack((own, own + 1), -1) if isinstance(edge, str) else torch.tensor(edge).expand(30, 2)
        for positions in (None, torch.randint(0, 40, (2, 30))):
            call = make_call(*make_qkv(2, 30, 2, 3, 16, Dv, S_kv=40), ranges[None, :, None, None].expand(2, -1, 2, -1, -1), q_pos=positions)
            assert sdpa_packed.path(call) == "dense"
            check(call)

    def test_ranges_outside_of_the_keys(self) -> None:
        for start, length in ((-5, 3), (-5, 30), (250, 100), (300, 9), (9, -4)):
            call = self.call(start, length)
            assert sdpa_packed.path(call) == "dense"
            check(call)

    def test_a_measured_selection_in_which_no_row_selects_anything(self) -> None:
        """A decoding step whose sequences are done: the buckets must not be of no keys."""
        for n in (1, 3):
            call = make_call(*make_qkv(2, 30, 2, 3, 16, S_kv=40), Selection.from_blocks(torch.full((2, 30, 2, n), -1), 16))
            call.selection.measure(40)
            o, lse = sdpa_packed.forward(call)
            assert bool((lse == float("-inf")).all())
            assert not any(x.any() for x in (o, *gathered.backward(call, lse, torch.randn_like(o), torch.zeros_like(lse))))

    def test_facts_and_the_workspace_decide(self) -> None:
        """Slices are all that rows may see: dense up to so many times what they may select, if copies and masks fit the workspace."""
        fit, copies, measured = 256 // int(dense._WASTE_GPU), 2 * 2 * 256 * 16 * 4, self.call(0, 4)
        measured.selection.measure(S_kv=256)
        for call, path in (
            (self.call(0, fit, max_length=fit + 1), "dense"),
            (self.call(0, fit // 2, max_length=fit // 2), "varlen"),
            (self.call(0, 4), "dense"),  # from static facts alone, each row may select all keys
            (measured, "varlen"),
            (self.call(0, 256, workspace_bytes=copies), "varlen"),
            (self.call(0, 256, workspace_bytes=copies + 2 * 256 * 8), "dense"),
        ):
            assert sdpa_packed.path(call) == path

    def test_the_flag_decides(self) -> None:
        forced_call = self.call(ROW * 5, 7, max_length=7, triton_force_path="dense")
        assert sdpa_packed.path(forced_call) == "dense"
        check(forced_call)
        assert sdpa_packed.path(self.call(0, 256, triton_force_path="varlen")) == "varlen"
        two = make_call(*make_qkv(1, 8, 1, 2, 16), make_spans("many", 1, 8, 1, 8, 8), triton_force_path="dense")
        assert sdpa_packed.path(two) == "varlen"  # the fallback runs everything

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
    def test_what_is_not_finite_stays_with_its_rows(self, bad: float) -> None:
        clean = self.call(ROW, 100)
        poisoned = dataclasses.replace(clean, k=clean.k.clone(), v=clean.v.clone())
        poisoned.k[:, :, 20], poisoned.v[:, :, 110] = bad, bad
        assert sdpa_packed.path(poisoned) == "dense"
        met = (ROW <= 20) | (ROW + 100 > 110)
        for x, y in zip(sdpa_packed.forward(poisoned), sdpa_packed.forward(clean), strict=True):
            assert x[:, met].isnan().all()
            assert torch.equal(x[:, ~met], y[:, ~met])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("path", ["auto", "dense"])
def test_the_dense_path_on_a_gpu(dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd numbers of keys, which the kernel's bias must not be laid out by, rows in several tiles, positions, and NaN beside the ranges."""
    monkeypatch.setenv("NSA_SEL_TRITON_FORCE_PATH", path)
    monkeypatch.setattr(dense, "_ROWS_GPU", 64)
    for S, h, Dv, start, end in ((1, 4, 64, 0, 250), (150, 4, 32, 0, 401), (150, 1, 64, 37, 301)):
        q, k, v = (x.to("cuda", dtype) for x in make_qkv(2, S, 2, h, 64, Dv, S_kv=401))
        ranges = torch.tensor([start, end], dtype=torch.int32, device="cuda").expand(2, S, 2, 1, 2)
        selection = Selection.from_ranges(ranges)
        positions = torch.randint(0, 401, (2, S), device="cuda")
        assert sdpa_packed.path(make_call(q, k, v, selection, triton_force_path=path)) == "dense"
        for q_pos in (None, positions):
            check_both("sdpa-packed", q, k, v, selection, q_pos=q_pos)
        if end < 401:
            check_poison("sdpa-packed", q, k, v, selection)


def test_the_event_tells_the_path(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    q, k, v = make_qkv(1, 8, 1, 2, 16)
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    for path in ("dense", "varlen"):
        monkeypatch.setenv("NSA_SEL_TRITON_FORCE_PATH", path)
        selection_attention(q, k, v, every_key(1, 8, 1, 16), backend="sdpa-packed")
    assert logged("sel.path") == [{"backend": "sdpa-packed", "path": path} for path in ("dense", "varlen")]
