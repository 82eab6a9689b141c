"""Tiles of tokens that selected alike: their order, the lists that follow it, and the kernels that do, emulated on the CPU."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.backends import cupy_cuda
from nsa_sel.backends.cupy_cuda import sm90, token_order
from nsa_sel.backends.specs import HOPPER_TILES
from nsa_sel.core.call import Call
from nsa_sel.oracle import oracle_backward
from nsa_sel.selection import Selection
from tests.helpers.cases import (
    assert_forward,
    assert_within_twice_baseline,
    gradient_terms,
    make_blocks,
    make_grads,
    make_qkv,
    plain_results,
    unused_keys,
)
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.cuda import BACKWARDS, EAGER, call_of, emulated, needs_compiler
from tests.helpers.gpus import noted

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_order, "LEAST_TOKENS", 1)
    monkeypatch.setattr(token_order, "LEAST_ROWS", 1)


def selected_blocks(call: Call, block: int) -> list[list[list[set[int]]]]:
    """By batch entry, token and group."""
    start, end = (x.tolist() for x in call.clamped_ranges())
    B, S, G = call.q.shape[:3]

    def of_row(b: int, s: int, g: int) -> set[int]:
        return {first // block for first, last in zip(start[b][s][g], end[b][s][g], strict=True) if last > first}

    return [[[of_row(b, s, g) for g in range(G)] for s in range(S)] for b in range(B)]


def greedy(blocks: list[set[int]], group: int) -> list[int]:
    """The order of a stretch whose tokens selected these blocks: what ordered_union.cu does, with sets."""
    times = {block: sum(block in of_token for of_token in blocks) for block in set().union(*blocks)}
    shared = [block for block in sorted(times) if 1 < times[block] < len(blocks)]
    bits = [{shared.index(block) % 64 for block in of_token if block in shared} for of_token in blocks]
    order, left, together = list[int](), set(range(len(blocks))), set(range(64))
    for place in range(len(blocks)):
        token = min(left, key=lambda t: (len(bits[t] - together), t))
        left.remove(token)
        together = together | bits[token] if place % group else bits[token]
        order.append(token)
    return order


@pytest.mark.parametrize(("h", "n", "S_kv"), [(16, 5, 700), (12, 8, 5000)])
@pytest.mark.parametrize("with_positions", [False, True])
def test_each_token_adds_the_fewest_blocks_to_its_group(
    monkeypatch: pytest.MonkeyPatch, h: int, n: int, S_kv: int, with_positions: bool
) -> None:
    """Of a last stretch that is not full, with rows that selected nothing; and of more shared blocks than bits. Unions become smaller."""
    emulated(monkeypatch, BACKWARDS)
    B, S, G, block, tokens = 2, 200, 2, 64, 64 // h
    q, k, v = make_qkv(B, S, G, h, 64, 64, S_kv=S_kv, dtype=torch.float16)
    q_pos = torch.randint(0, S_kv, (B, S), generator=torch.Generator().manual_seed(1)) if with_positions else None
    ranges = make_blocks(B, S, G, S_kv, n, block).ranges
    ranges[:, 20:23] = 0
    call = call_of(q, k, v, Selection(ranges, block), q_pos)
    stretch = token_order.stretch_of(call)
    assert stretch is not None
    order, selected = sm90.plan_of(call, HOPPER_TILES.tokens(h, 64), stretch).order, selected_blocks(call, block)
    assert order is not None
    before = after = 0
    for b in range(B):
        for g in range(G):
            for i, first in enumerate(range(0, S, stretch)):
                blocks = [selected[b][s][g] for s in range(first, min(first + stretch, S))]
                expected = greedy(blocks, tokens)
                assert order[b, g, i].tolist() == expected + [255] * (stretch - len(blocks))
                for at in range(0, len(blocks), tokens):
                    before += len(set().union(*blocks[at : at + tokens]))
                    after += len(set().union(*(blocks[t] for t in expected[at : at + tokens])))
    assert after < before


@pytest.mark.parametrize("backward", [False, True])
def test_lists_are_those_of_the_tokens_in_order(monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    emulated(monkeypatch)
    B, S, G, h, block, S_kv = 2, 150, 2, 16, 64, 700
    q, k, v = make_qkv(B, S, G, h, 64, 64, S_kv=S_kv, dtype=torch.float16)
    call = call_of(q, k, v, make_blocks(B, S, G, S_kv, 5, block))
    stretch, tokens = token_order.stretch_of(call), HOPPER_TILES.tokens(h, 64, backward)
    assert stretch is not None
    plan, selected = sm90.plan_of(call, tokens, stretch), selected_blocks(call, block)
    assert plan.order is not None
    order = plan.order.flatten(2)
    assert plan.tiles == -(-S // tokens)
    loaded = 0
    for number in range(B * G * plan.tiles):
        b, g, first = number // plan.tiles // G, number // plan.tiles % G, number % plan.tiles * tokens
        rows = [first // stretch * stretch + int(x) for x in order[b, g, first : first + tokens]]
        members: dict[int, int] = {}
        for r, s in enumerate(rows):
            for number_of_block in selected[b][s][g] if s < S else ():
                members[number_of_block] = members.get(number_of_block, 0) | 1 << r
        lowest = min(S_kv - S + s + 1 for s in rows if s < S)
        highest = {key: max(S_kv - S + s + 1 for r, s in enumerate(rows) if bits >> r & 1) for key, bits in members.items()}
        loaded += sum(min(block, highest[key] - key * block) for key in members)
        whole, count = plan.counts[number].tolist()
        found = slice(number * plan.capacity, number * plan.capacity + count)
        assert plan.blocks[found].tolist() == sorted(members)
        assert [bits % 2 ** (8 * plan.rows.itemsize) for bits in plan.rows[found].tolist()] == [members[key] for key in sorted(members)]
        assert whole == sum((key + 1) * block <= lowest for key in members)
    if not backward:
        assert sm90.loaded_keys(call) == loaded


def test_stretches_are_whole_tiles_of_both_passes() -> None:
    call_sizes = [(h, Dk) for h in range(4, 33) for Dk in (64, 128, 192, 256)]
    for h, Dk in call_sizes:
        q, k, v = make_qkv(1, 70, 1, h, Dk, 64, S_kv=70, dtype=torch.float16)
        stretch = token_order.stretch_of(call_of(q, k, v, make_blocks(1, 70, 1, 70, 1, 64)))
        assert stretch is not None
        assert 0 < stretch < 255
        assert all(stretch % HOPPER_TILES.tokens(h, Dk, backward) == 0 for backward in (False, True))


@pytest.mark.parametrize(
    ("S", "G", "h", "block", "stretch"),
    [
        *((8191, 9, 4, 64, None), (8192, 7, 4, 64, None), (8192, 11, 3, 64, None), (8192, 1, 33, 64, None), (8192, 8, 4, 16, None)),
        *((8192, 8, 4, 64, 192), (8192, 2, 16, 64, 96), (8192, 3, 12, 128, 90)),
    ],
)
def test_which_calls_have_an_order(monkeypatch: pytest.MonkeyPatch, S: int, G: int, h: int, block: int, stretch: int | None) -> None:
    """None where finding it takes longer than is saved, of few heads and of one token a warpgroup, and of blocks that steps gather."""
    monkeypatch.undo()
    q, k, v = make_qkv(1, S, G, h, 64, 64, S_kv=S, dtype=torch.float16)
    call = call_of(q, k, v, Selection(torch.zeros(1, S, G, 1, 2, dtype=torch.int32), block))
    assert token_order.stretch_of(call) == stretch


def test_no_order_of_more_blocks_than_shared_memory_holds() -> None:
    q, k, v = make_qkv(1, 70, 1, 4, 64, 64, S_kv=70, dtype=torch.float16)
    of_few, of_many = (Selection(torch.zeros(1, 70, 1, n, 2, dtype=torch.int32), 64) for n in (16, 1000))
    assert token_order.stretch_of(call_of(q, k, v, of_few)) == 192
    assert token_order.stretch_of(call_of(q, k, v, of_many)) is None


@pytest.mark.slow  # a compiler, and thousands of emulated products
@pytest.mark.parametrize("mode", [pytest.param(0, marks=pytest.mark.thorough), BACKWARDS | EAGER])
@pytest.mark.parametrize(
    ("h", "Dk", "Dv", "block"),
    [
        (5, 64, 128, 64),
        *(pytest.param(*sizes, marks=pytest.mark.thorough) for sizes in ((16, 128, 64, 64), (4, 192, 64, 128), (4, 256, 256, 64))),
    ],
)
def test_results(monkeypatch: pytest.MonkeyPatch, mode: int, h: int, Dk: int, Dv: int, block: int) -> None:
    """More tiles than CTAs, the last one with tokens that do not exist; rows without keys; keys that no row sees hold NaN."""
    emulated(monkeypatch, mode)
    started = noted(monkeypatch)
    S, S_kv = {16: 40}.get(h, 100), 260
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=Dk, Dv=Dv, S_kv=S_kv, dtype=torch.float16)
    ranges = make_blocks(1, S, 2, S_kv, 3 if block == 64 else 2, block).ranges
    ranges[:, 20:25] = 0
    ranges[:, -20:][ranges[:, -20:, ..., 0] >= 192] = 0  # nobody sees the end of what others before them see
    ranges[ranges[..., 0] == 128] = 0
    selection, (do, dlse) = Selection(ranges, block), make_grads(q, v)
    unused = unused_keys(q, k, ranges, None).unsqueeze(-1)
    assert unused[:, :, -1].all()
    with new_memory_is_nan():
        call = call_of(q, *(torch.where(unused, float("nan"), x) for x in (k, v)), selection)
        o, lse = cupy_cuda.forward(call)
        dlse = torch.where(lse == float("-inf"), 0.0, dlse)
        dq, delta = sm90.dq_tiles(call, o, lse, do, dlse)
    kernels = ("forward_gather.cu", "dq_gather.cu") if Dk == 256 else ("forward_tiles.cu", "dq_tiles.cu")
    one_plan = HOPPER_TILES.tokens(h, Dk) == HOPPER_TILES.tokens(h, Dk, backward=True)
    assert started == ["ordered_union.cu", kernels[0], *([] if one_plan else ["ordered_union.cu"]), kernels[1]]
    assert_forward((o, lse), q, k, v, ranges)
    dq_oracle, dq_plain = (of(q, k, v, ranges, do, dlse, None, None)[i] for of, i in ((oracle_backward, 0), (plain_results, 2)))
    assert_within_twice_baseline(dq, dq_oracle, dq_plain, "dq", gradient_terms(q, k, v, do, None)[0])
    torch.testing.assert_close(delta, (do.float() * o.float()).sum(-1) - dlse, atol=1e-4, rtol=1e-4)
