"""cupy-cuda without a GPU: its kernels emulated on the CPU, forward and backward, against the oracle."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel.backends import cupy_cuda
from nsa_sel.backends.cupy_cuda import key_to_rows, launch, sm80, sm90
from nsa_sel.errors import BackendError
from nsa_sel.oracle import oracle_backward
from nsa_sel.selection import Selection
from tests.helpers.cases import (
    assert_forward,
    assert_gradients,
    assert_within_twice_baseline,
    gradient_terms,
    make_blocks,
    make_grads,
    make_qkv,
    make_spans,
    plain_results,
    unused_keys,
)
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.cuda import BACKWARDS, EAGER, GPU, LATE_WARP, call_of, emulated, needs_compiler
from tests.helpers.gpus import noted

pytestmark = needs_compiler


def check(q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None = None, scale: float | None = None) -> list[Tensor]:
    """Forward and backward are as close to the oracle as everywhere; returns o, lse, dq, dk, dv."""
    call = call_of(q, k, v, selection, q_pos, scale)
    o, lse = cupy_cuda.forward(call)
    assert_forward((o, lse), q, k, v, selection.ranges, scale, q_pos)
    do, dlse = make_grads(q, v)
    dlse = torch.where(lse == float("-inf"), 0.0, dlse)
    gradients = cupy_cuda.backward(call, o, lse, do, dlse)
    assert_gradients(gradients, q, k, v, selection.ranges, do, dlse, scale, q_pos)
    return [o, lse, *gradients]


def rows(dtype: torch.dtype = torch.float16, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Small tensors, of sizes that most tests share: every other size is compiled anew."""
    return make_qkv(**{"B": 2, "S": 8, "G": 2, "h": 3, "Dk": 16, "Dv": 24, "S_kv": 70, **sizes}, dtype=dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [BACKWARDS, BACKWARDS | EAGER])
def test_segments_of_lists_whatever_runs_first(monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    """Every row chose block 0: its list has several segments of several steps. The same bits in every order of threads and copies."""
    monkeypatch.setattr(key_to_rows, "SHORTEST", 16)
    q, k, v = rows(B=1, S=36, G=1, h=9)
    selection = make_blocks(1, 36, 1, 70, 3, 32)
    emulated(monkeypatch)
    expected = check(q, k, v, selection)
    emulated(monkeypatch, mode)
    for one, other in zip(expected, check(q, k, v, Selection(selection.ranges, 32)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow  # a compiler, and thousands of emulated products
@pytest.mark.parametrize("mode", [pytest.param(0, marks=pytest.mark.thorough), BACKWARDS | EAGER])
@pytest.mark.parametrize(
    ("h", "Dk", "Dv", "block", "n"),
    [
        *((1, 64, 128, 64, 3), (2, 192, 64, 128, 3)),
        *((12, 256, 256, 4, 20), (3, 64, 128, 8, 9), (16, 256, 256, 64, 3)),  # gathered
        *(pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in ((4, 64, 64, 64, 3), (4, 64, 64, 16, 5), (5, 64, 64, 32, 3))),
    ],
)
def test_tiles_of_tokens(monkeypatch: pytest.MonkeyPatch, mode: int, h: int, Dk: int, Dv: int, block: int, n: int) -> None:
    check_tiles(monkeypatch, mode, h, Dk, Dv, block, n)


@pytest.mark.slow
@pytest.mark.parametrize("warp", [pytest.param(0, marks=pytest.mark.thorough), 12, pytest.param(13, marks=pytest.mark.thorough)])
def test_tiles_of_warps_whose_first_lane_is_ahead(monkeypatch: pytest.MonkeyPatch, warp: int) -> None:
    """A consumer's, the one that loads keys and values, and one that loads queries: a barrier's next phase may not pass unseen."""
    check_tiles(monkeypatch, LATE_WARP * (warp + 1), 4, 64, 64, 64, 3)


def check_tiles(monkeypatch: pytest.MonkeyPatch, mode: int, h: int, Dk: int, Dv: int, block: int, n: int) -> None:
    """More tiles than CTAs, the last one with tokens that do not exist; keys that no row sees hold NaN."""
    emulated(monkeypatch, mode)
    started = noted(monkeypatch)
    S, S_kv = {1: 150, 12: 45, 16: 45}.get(h, 100), 260
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=Dk, Dv=Dv, S_kv=S_kv, dtype=torch.float16)
    ranges = make_blocks(1, S, 2, S_kv, n, block).ranges
    ranges[:, 20:25] = 0
    ranges[:, -20:][ranges[:, -20:, ..., 0] >= 192] = 0  # nobody sees the end of what others before them see
    ranges[ranges[..., 0] == 128] = 0
    selection = Selection(ranges, block)
    unused = unused_keys(q, k, ranges, None).unsqueeze(-1)
    assert unused[:, :, 130].all()
    assert unused[:, :, -1].all()
    with new_memory_is_nan():
        got = cupy_cuda.forward(call_of(q, *(torch.where(unused, float("nan"), x) for x in (k, v)), selection))
    assert started == ["tile_union.cu", "forward_gather.cu" if block < 64 or Dk == 256 else "forward_tiles.cu"]
    assert_forward(got, q, k, v, selection.ranges)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(0, marks=pytest.mark.thorough), BACKWARDS | EAGER])
@pytest.mark.parametrize(
    ("h", "Dk", "Dv", "block", "n"),
    [
        (12, 256, 256, 4, 20),
        *(
            pytest.param(*sizes, marks=pytest.mark.thorough)
            for sizes in ((3, 64, 128, 8, 9), (4, 192, 64, 16, 5), (5, 64, 64, 32, 3), (16, 256, 256, 64, 3))
        ),
    ],
)
def test_dq_of_gathered_steps(monkeypatch: pytest.MonkeyPatch, mode: int, h: int, Dk: int, Dv: int, block: int, n: int) -> None:
    """More tiles than CTAs, the last one with tokens that do not exist; rows without keys; keys that no row sees hold NaN."""
    emulated(monkeypatch, mode)
    S, S_kv = {12: 24, 16: 20}.get(h, 70), 130
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=Dk, Dv=Dv, S_kv=S_kv, dtype=torch.float16)
    ranges = make_blocks(1, S, 2, S_kv, n, block).ranges
    ranges[:, 8:10] = 0
    ranges[:, -10:][ranges[:, -10:, ..., 0] >= 64] = 0  # nobody sees the end of what others before them see
    selection, (do, dlse) = Selection(ranges, block), make_grads(q, v)
    unused = unused_keys(q, k, ranges, None).unsqueeze(-1)
    assert unused.any()
    with new_memory_is_nan():
        call = call_of(q, *(torch.where(unused, float("nan"), x) for x in (k, v)), selection)
        o, lse = cupy_cuda.forward(call)
        dlse = torch.where(lse == float("-inf"), 0.0, dlse)
        assert sm90.supports_tiles(call, do)
        assert sm90.gathers(call)
        dq, delta = sm90.dq_tiles(call, o, lse, do, dlse)
    dq_oracle, dq_plain = (of(q, k, v, ranges, do, dlse, None, None)[i] for of, i in ((oracle_backward, 0), (plain_results, 2)))
    assert_within_twice_baseline(dq, dq_oracle, dq_plain, "dq", gradient_terms(q, k, v, do, None)[0])
    torch.testing.assert_close(delta, (do.float() * o.float()).sum(-1) - dlse, atol=1e-4, rtol=1e-4)


def test_rows_that_no_wide_copy_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(x: Tensor) -> Tensor:
        y = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        return y.copy_(x)

    emulated(monkeypatch)
    q, k, v = rows()
    selection = make_blocks(2, 8, 2, 70, 3, 16)
    expected = check(q, k, v, selection)
    cached = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    for others in (tuple(map(shifted, (q, k, v))), (q, *cached)):
        for one, other in zip(expected, check(*others, selection), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("strides", "first", "expected"),
    [
        ((64, 64, 16, 1), 0, True),
        ((64, 3, 16, 1), 0, True),  # a step along a dimension of one element is never taken
        ((64, 3, 20, 1), 0, False),
        ((68, 64, 16, 1), 0, False),
        ((64, 64, 16, 1), 4, False),
    ],
)
def test_rows_begin_at_multiples_of_16_bytes(strides: tuple[int, ...], first: int, expected: bool) -> None:
    whole, x = torch.zeros(2, 4, 2, 4, 16, dtype=torch.float16), torch.zeros(160, dtype=torch.float16)
    x = x.as_strided((2, 1, 4, 16), strides, first)
    assert launch.aligned(whole, x) == launch.aligned(x, whole) == expected


@pytest.mark.parametrize("mode", [0, BACKWARDS])
@pytest.mark.parametrize(("sm", "kernels"), [(86, ["forward_rows.cu", "combine.cu"]), (90, ["forward_rows.cu"])])
def test_decode_in_splits(monkeypatch: pytest.MonkeyPatch, sm: int, kernels: list[str], mode: int) -> None:
    """The CTAs of a cluster combine a row's splits; without clusters a second kernel does."""
    gpu = msgspec.structs.replace(GPU, sm=sm)
    q, k, v = rows(B=1, S=1, G=1, S_kv=400)
    emulated(monkeypatch, mode)
    started = noted(monkeypatch)
    assert sm80.row_plan(1, 3, 16, 24, 192, False, True, sm, gpu.sm_count, gpu.shared_memory).splits > 1
    lone = Selection.from_ranges(torch.tensor([[0, 3], [0, 0]]).expand(1, 1, 1, 2, 2), max_length=400)  # most splits see nothing
    nothing = Selection.from_ranges(torch.zeros(1, 1, 1, 2, 2, dtype=torch.long), max_length=400)
    for selection in (make_blocks(1, 1, 1, 400, 12, 16), lone, nothing):
        started.clear()
        results = cupy_cuda.forward(call_of(q, k, v, selection, device=gpu))
        assert started == kernels
        assert_forward(results, q, k, v, selection.ranges)


def test_a_list_of_rows_that_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    q, k, v = rows()
    call = call_of(q, k, v, Selection.from_ranges(make_spans("few", 2, 8, 2, 70, 30)))
    monkeypatch.setattr(key_to_rows, "BYTES", 1 << 30)
    with pytest.raises(BackendError, match=r"needs \d+ bytes.*allowed: \d+ .*Remedy"):
        cupy_cuda.backward(call, torch.zeros(2, 8, 2, 3, 24).half(), torch.zeros(2, 8, 2, 3), torch.zeros(2, 8, 2, 3, 24).half(), None)


@pytest.mark.parametrize(("tokens", "n", "block"), [(12, 5, 16), (48, 16, 16), (64, 3, 32)])
@pytest.mark.parametrize("with_positions", [False, True])
def test_the_union_of_a_tile(monkeypatch: pytest.MonkeyPatch, tokens: int, n: int, block: int, with_positions: bool) -> None:
    """Every block that a row of the tile may see once, those that all rows see whole first, with a bit for each row that chose it."""
    emulated(monkeypatch, BACKWARDS)
    B, S, G, S_kv = 2, 70, 2, 300
    q, k, v = make_qkv(B, S, G, 2, 16, 16, S_kv=S_kv, dtype=torch.float16)
    q_pos = torch.randint(0, S_kv, (B, S), generator=torch.Generator().manual_seed(1)) if with_positions else None
    selection = make_blocks(B, S, G, S_kv, n, block)
    call = call_of(q, k, v, selection, q_pos)
    plan = sm90.plan_of(call, tokens)
    start, end = (x.tolist() for x in call.clamped_ranges())
    limits = (call.positions() + 1).clamp(max=S_kv).tolist()
    assert plan.tiles == -(-S // tokens)
    assert plan.rows.itemsize == max(1, 1 << (tokens - 1).bit_length() - 3)
    for number in range(B * G * plan.tiles):
        b, g, first = number // plan.tiles // G, number // plan.tiles % G, number % plan.tiles * tokens
        members: dict[int, int] = {}
        for s in range(first, min(first + tokens, S)):
            for i in range(n):
                if end[b][s][g][i] > start[b][s][g][i]:
                    members[start[b][s][g][i] // block] = members.get(start[b][s][g][i] // block, 0) | 1 << s - first
        lowest = min(limits[b][first : first + tokens])
        whole, count = plan.counts[number].tolist()
        found = slice(number * plan.capacity, number * plan.capacity + count)
        assert plan.blocks[found].tolist() == sorted(members)
        assert [bits % 2 ** (8 * plan.rows.itemsize) for bits in plan.rows[found].tolist()] == [members[key] for key in sorted(members)]
        assert whole == sum((key + 1) * block <= lowest for key in members)


def test_a_plan_of_tiles_serves_more_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass leaves the counter of tiles as it found it."""
    emulated(monkeypatch)
    call = call_of(*make_qkv(S=100, G=2, h=4, Dk=64, Dv=64, S_kv=260, dtype=torch.float16), make_blocks(1, 100, 2, 260, 3, 64))
    o, lse = cupy_cuda.forward(call)
    counter = sm90.plan_of(call, 48).counter
    assert counter is not None
    assert counter.item() == 0
    assert all(map(torch.equal, cupy_cuda.forward(call), (o, lse)))
