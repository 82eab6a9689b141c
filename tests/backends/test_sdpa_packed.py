"""Packed SDPA beyond test_cpu_backends.py: a bounded workspace, bit-equal repeats, and no reads of a GPU."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from torch import Tensor

from nsa_sel.backends import sdpa_packed
from nsa_sel.backends._sdpa import gathered, key_tiles
from nsa_sel.core.call import Call
from nsa_sel.selection import Selection
from tests.backends.test_cpu_backends import check_call
from tests.helpers.cases import (
    assert_all_close,
    edge_selections,
    make_blocks,
    make_call,
    make_grads,
    make_qkv,
    make_spans,
)


def run(call: Call) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv with random gradients of both o and lse."""
    o, lse = sdpa_packed.forward(call)
    return o, lse, *sdpa_packed.backward(call, o, lse, *make_grads(call.q, call.v))


def all_results(call: Call) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv, and dq, dk, dv once more by the path of a GPU."""
    o, lse, *grads = run(call)
    do, dlse = make_grads(call.q, call.v)
    return o, lse, *grads, *gathered.backward(call, lse, do, (do * o).sum(-1) - dlse)


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
def test_static_buckets_hold_every_row_and_its_keys(facts: str) -> None:
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
    check_call("static buckets", call)


def test_a_broken_max_length_drops_keys_and_writes_nowhere_else() -> None:
    position, keep, filled = gathered.positions(torch.tensor([[3, 20], [1, 9]]), torch.tensor([[13, 40], [5, 9]]), 16)
    assert position[0].tolist() == [*range(3, 13), *range(20, 26)]
    assert position[1].tolist() == [1, 2, 3, 4] + [1] * 12
    assert keep.sum(1).tolist() == [16, 4]
    assert filled.all()
