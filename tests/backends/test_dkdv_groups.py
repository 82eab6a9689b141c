"""dkdv_groups.cu and the order of its segments without a GPU: emulated on the CPU, against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.backends.cupy_cuda import block_tiles, compressed, key_to_rows, sm80, sm90, window
from nsa_sel.core.call import Call, Rule, WindowCall
from nsa_sel.core.check import check_call
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.cases import assert_gradients, make_blocks, make_grads, make_qkv, unused_keys
from tests.helpers.choose_cases import make_choose_call
from tests.helpers.emulate import BACKWARDS, EAGER, GPU, emulated, needs_compiler
from tests.helpers.poison import new_memory_is_nan

pytestmark = [needs_compiler, pytest.mark.slow]  # a compiler, and thousands of emulated products


def call_of(q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> Call:
    return Call(*check_call(q, k, v, selection, None, None)[:4], None, q.shape[-1] ** -0.5, settings_for(GPU), GPU)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few entries."""
    monkeypatch.setattr(key_to_rows, "SHORTEST", 8)
    for module in (key_to_rows, block_tiles):
        monkeypatch.setattr(module, "SEGMENTS_PER_SM", 64)


@pytest.mark.parametrize("mode", [pytest.param(0, marks=pytest.mark.thorough), BACKWARDS | EAGER])
@pytest.mark.parametrize(
    ("h", "S", "G", "Dk", "Dv"),
    [
        *((2, 150, 1, 64, 64), (3, 70, 2, 64, 128), (16, 30, 1, 192, 128), (12, 26, 1, 256, 256)),
        *(pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in ((4, 90, 2, 64, 64), (16, 20, 1, 128, 64), (3, 60, 1, 192, 64))),
    ],
)
def test_gradients(monkeypatch: pytest.MonkeyPatch, short: None, mode: int, h: int, S: int, G: int, Dk: int, Dv: int) -> None:
    """Lists of one segment and of several; steps whose tokens follow each other, and others; tiles that no row selects."""
    emulated(monkeypatch, mode)
    q, k, v = make_qkv(S=S, G=G, h=h, Dk=Dk, Dv=Dv, S_kv=S + 210, dtype=torch.float16)
    chosen = make_blocks(1, S, G, S + 210, 3, 64)
    ranges = torch.where(torch.arange(S)[:, None, None, None] % 23 == 5, 0, chosen.ranges)  # rows without keys part the runs
    ranges[..., 1:, :] = torch.where(ranges[..., 1:, :1] // 64 == 2, 0, ranges[..., 1:, :])
    call = call_of(q, k, v, Selection(ranges, 64))
    own, lse = oracle_forward(q, k, v, ranges)
    do, dlse = make_grads(q, v)
    dlse = torch.where(lse == float("-inf"), 0.0, dlse).float()
    delta = (do.double() * own).sum(-1) - dlse
    with new_memory_is_nan():
        found = sm90.dkdv_groups(call, call.disjoint_ranges(), lse.float(), do, delta.float())
    dq = oracle_backward(q, k, v, ranges, do, dlse)[0].to(q.dtype)  # another kernel's
    assert_gradients((dq, *found), q, k, v, ranges, do, dlse)
    assert key_to_rows.lists_of(call, 64).segments[-1] > key_to_rows.lists_of(call, 64).lists > 1


@pytest.mark.parametrize(("h", "S", "dkdv"), [(1, 150, sm90.dkdv_groups), (16, 40, sm90.dkdv_groups), (4, 90, sm80.dkdv_tiles)])
def test_gradients_of_blocks_of_several_tiles(
    monkeypatch: pytest.MonkeyPatch, short: None, h: int, S: int, dkdv: Callable[..., tuple[Tensor, Tensor]]
) -> None:  # fmt: skip
    """One list for the tiles of a block gives the bits of one for each tile, but for positions of any order: sums have another order then.
    NaN in keys that no row sees."""
    emulated(monkeypatch)
    S_kv, D = S + 210, 64
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=D, Dv=D, S_kv=S_kv, dtype=torch.float16)
    ranges = make_blocks(1, S, 2, S_kv, 2, 128).ranges
    ranges = torch.where(torch.arange(S)[:, None, None, None] % 23 == 5, 0, ranges)
    q_pos = torch.randint(0, S_kv, (1, S), generator=torch.Generator().manual_seed(1))
    for positions in (None, q_pos):
        unused = unused_keys(q, k, ranges, positions).unsqueeze(-1)
        checked = check_call(q, *(torch.where(unused, float("nan"), x) for x in (k, v)), Selection(ranges, 128), None, positions)[:4]
        found = []

        def run(lse: Tensor, do: Tensor, delta: Tensor, checked: Any = checked, positions: Any = positions, found: Any = found) -> Any:
            call = Call(*checked, positions, D**-0.5, settings_for(GPU), GPU)
            found.append(dkdv(call, call.disjoint_ranges(), lse, do, delta))
            return found[-1]

        check(q, k, v, ranges, positions, run)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Call, "tiles_of_block", lambda *_: 1)
            check(q, k, v, ranges, positions, run)
        assert positions is not None or all(map(torch.equal, *found))


@pytest.mark.parametrize("mode", [pytest.param(0, marks=pytest.mark.thorough), BACKWARDS | EAGER])
@pytest.mark.parametrize(
    ("h", "S", "G", "D", "block"),
    [
        *((12, 40, 1, 256, 4), (3, 60, 1, 64, 16)),
        *(pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in ((2, 90, 1, 64, 4), (16, 30, 1, 64, 8), (8, 40, 1, 64, 32))),
    ],
)
def test_gradients_of_small_blocks(
    monkeypatch: pytest.MonkeyPatch, short: None, mode: int, h: int, S: int, G: int, D: int, block: int
) -> None:  # fmt: skip
    """Several blocks of a tile, cut by causality or by the end of the keys; tiles that no row selects; NaN in keys that no row sees."""
    emulated(monkeypatch, mode)
    S_kv = S + 133
    q, k, v = make_qkv(S=S, G=G, h=h, Dk=D, Dv=D, S_kv=S_kv, dtype=torch.float16)
    ranges = make_blocks(1, S, G, S_kv, 6, block).ranges.clone()
    ranges[:, torch.arange(S) % 23 == 5] = 0
    ranges[..., 0, 0] = torch.arange(S_kv - S, S_kv)[None, :, None] // block * block  # the row's own
    ranges[..., 0, 1] = ranges[..., 0, 0] + block
    ranges[..., 1:, :] = torch.where(ranges[..., 1:, :1] >= 100, 0, ranges[..., 1:, :])
    seen = torch.zeros(S_kv, dtype=torch.bool)
    for start, end in ranges.flatten(0, -2).tolist():
        seen[start:end] = True
    poisoned = [torch.where(seen[:, None], x, float("nan")) for x in (k, v)]
    call = call_of(q, *poisoned, Selection(ranges, block))
    check(q, k, v, ranges, None, lambda lse, do, delta: sm90.dkdv_groups(call, call.disjoint_ranges(), lse, do, delta))
    lists = block_tiles.block_lists_of(call)
    assert lists.parts[-1] > 0  # a list of several segments


def test_gradients_of_pairs_whose_lists_do_not_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch entry and group has lists of its own then; positions of any order."""
    emulated(monkeypatch)
    B, S, G, S_kv, block = 2, 20, 2, 90, 16
    q, k, v = make_qkv(B=B, S=S, G=G, h=16, Dk=64, Dv=64, S_kv=S_kv, dtype=torch.float16)
    selection = make_blocks(B, S, G, S_kv, 3, block)
    positions = torch.randint(0, S_kv, (B, S), generator=torch.Generator().manual_seed(1))
    call = Call(*check_call(q, k, v, selection, None, positions)[:4], positions, 64**-0.5, settings_for(GPU), GPU)
    monkeypatch.setattr(block_tiles, "ENTRY_BYTES", call.settings.workspace_bytes // (2 * S * 2))
    assert not block_tiles.list_bytes(call)[1]
    check(q, k, v, selection.ranges, positions, lambda lse, do, delta: sm90.dkdv_groups(call, call.disjoint_ranges(), lse, do, delta))


@pytest.mark.parametrize(("h", "S", "S_kv"), [(16, 40, 110), (3, 70, 150)])
def test_gradients_of_a_window_of_wide_keys(monkeypatch: pytest.MonkeyPatch, h: int, S: int, S_kv: int) -> None:
    """Boxes that reach past the window, and tiles that no row sees."""
    emulated(monkeypatch)
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=192, Dv=128, S_kv=S_kv, dtype=torch.float16)
    last = torch.arange(S_kv - S, S_kv) + 1
    ranges = torch.stack((last - 30, last), -1)[None, :, None, None].expand(1, S, 2, 1, 2)
    call = WindowCall(q, k, v, 30, 192**-0.5)
    check(q, k, v, ranges, None, lambda lse, do, delta: window.dkdv(call, GPU, lse, do, delta))


@pytest.mark.parametrize(("h", "S", "S_kv"), [(16, 30, 200), pytest.param(4, 300, 900, marks=pytest.mark.thorough)])
def test_gradients_of_wide_compressed_keys(monkeypatch: pytest.MonkeyPatch, h: int, S: int, S_kv: int) -> None:
    emulated(monkeypatch)
    call = make_choose_call((1, S, S_kv, 2, h, 192, 128, Rule(compress_block=8, compress_stride=4)), torch.float16)
    seen = call.seen()  # [B,S]
    ranges = torch.stack((torch.zeros_like(seen), seen), -1)[:, :, None, None].expand(1, S, 2, 1, 2)
    check(call.q, call.k, call.v, ranges, seen - 1, lambda lse, do, delta: compressed.dkdv(call, GPU, lse, do, delta))


def check(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, q_pos: Tensor | None, dkdv: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """dk and dv from lse, do and delta, against the oracle."""
    own, lse = oracle_forward(q, k, v, ranges, q_pos=q_pos)
    do, dlse = make_grads(q, v)
    own, lse = own.to(q.device), lse.to(q.device)
    dlse = torch.where(lse == float("-inf"), 0.0, dlse).float()
    delta = (do.double() * own).sum(-1) - dlse
    with new_memory_is_nan():
        found = dkdv(lse.float(), do, delta.float())
    dq = oracle_backward(q, k, v, ranges, do, dlse, q_pos=q_pos)[0].to(q.dtype)  # another kernel's
    assert_gradients((dq, *found), q, k, v, ranges, do, dlse, q_pos=q_pos)


@pytest.mark.parametrize("rows", [16, 64, 1 << 20])
def test_order_of_segments(monkeypatch: pytest.MonkeyPatch, short: None, rows: int) -> None:
    """Every segment once; by stretches of rows, where a segment begins, and in each the long ones first."""
    emulated(monkeypatch)
    q, k, v = make_qkv(B=2, S=60, G=2, h=2, Dk=64, S_kv=400, dtype=torch.float16)
    call = call_of(q, k, v, make_blocks(2, 60, 2, 400, 4, 64))
    lists, _, order = sm90._lists(call, rows)
    assert lists.entries is not None
    count = int(lists.segments[-1])
    assert len(order) >= count > lists.lists
    keys, seen = [], set()
    for index, number in order[:count].tolist():
        begin = int(lists.begins[index]) + number * lists.segment
        length = min(int(lists.begins[index + 1]) - begin, lists.segment)
        assert length > 0
        keys.append(((index // lists.tiles * 60 + int(lists.entries[begin]) // 4) // rows, -length))
        seen.add((index, number))
    assert len(seen) == count
    assert keys == sorted(keys)


@pytest.mark.parametrize(("pairs", "stretch"), [(5, 5), (5, 2), (2, 1), (3, 3)])
def test_order_of_units(monkeypatch: pytest.MonkeyPatch, pairs: int, stretch: int) -> None:
    """Each unit of several sections by itself; more segments than threads look up at once; lists without entries."""
    emulated(monkeypatch)
    sections, pairs_all, tiles, segment = 3, 5, 40, 16
    count = sections * pairs_all * tiles
    lengths = torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(1)) * (torch.arange(count) % 7 > 0)
    lengths[3] = 5000 * segment
    begins = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    per_list = -(-lengths // segment)
    segments = torch.cat((torch.zeros(1, dtype=torch.int64), per_list.cumsum(0)))
    lists = key_to_rows.KeyToRows(None, begins, segments, segments, count, tiles, 1, segment)
    call = call_of(*make_qkv(S=4, h=2, Dk=64, S_kv=70, dtype=torch.float16), make_blocks(1, 4, 1, 70, 1, 64))
    units = sections * -(-pairs_all // pairs)
    order = sm90.order_segments(call, lists, int(segments[-1]), units, pairs_all, pairs, 0, 0, stretch, BY_UNITS=1)
    keys = []
    for index, number in order.tolist():
        pair, left = index // tiles, int(lengths[index]) - number * segment
        unit = pair // pairs_all * -(-pairs_all // pairs) + pair % pairs_all // pairs
        keys.append((unit, pair % pairs_all % pairs // stretch, -min(left, segment)))
    assert len({tuple(x) for x in order.tolist()}) == int(segments[-1])
    assert keys == sorted(keys)
