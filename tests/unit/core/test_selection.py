"""Check how selections are made, merged, validated, measured and copied, and when their cached plans are dropped."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Measured, Selection
from tests.helpers.calls import assert_refused
from tests.helpers.cases import make_blocks

FAR = torch.iinfo(torch.int32).max


def row(*ranges: tuple[int, int]) -> Tensor:
    """Ranges [1,1,1,n,2] of one row."""
    return torch.tensor(ranges, dtype=torch.int32).reshape(1, 1, 1, -1, 2)


def keys_of(ranges: Tensor) -> set[int]:
    return {key for start, end in ranges.reshape(-1, 2).tolist() for key in range(max(start, 0), end)}


# from_blocks


BLOCKS: list[tuple[torch.dtype, list[int], int, list[list[int]]]] = [  # indices of blocks of so many keys, and their ranges
    (torch.int32, [3, -1, 0], 16, [[48, 64], [0, 0], [0, 16]]),
    (torch.uint8, [255, 1], 64, [[255 * 64, 256 * 64], [64, 128]]),
    (torch.int8, [127, 1], 64, [[127 * 64, 128 * 64], [64, 128]]),
    (torch.int16, [2**15 - 1, 1], 64, [[(2**15 - 1) * 64, 2**21], [64, 128]]),
    (torch.int32, [FAR, 2**26, 2], 64, [[FAR - 127, FAR - 63], [FAR - 127, FAR - 63], [128, 192]]),  # does not wrap around
    *((torch.int32, [0, 1, 2], size, [[j * size, (j + 1) * size] for j in range(3)]) for size in (1 << 20, 1 << 30, FAR)),
]


@pytest.mark.parametrize(("dtype", "blocks", "size", "ranges"), BLOCKS)
def test_from_blocks_turns_indices_into_ranges(dtype: torch.dtype, blocks: list[int], size: int, ranges: list[list[int]]) -> None:
    selection = Selection.from_blocks(torch.tensor(blocks, dtype=dtype).reshape(1, 1, 1, -1), size)
    assert selection.ranges.reshape(-1, 2).tolist() == ranges
    assert selection.block_indices.flatten().tolist() == [start // size if end else -1 for start, end in ranges]
    assert selection.ranges.dtype == (torch.int32 if size < 1 << 20 else torch.int64)


def test_from_blocks_heeds_counts() -> None:
    indices = torch.arange(12, dtype=torch.int64).reshape(1, 4, 1, 3)
    counts = torch.tensor([0, 1, 3, 9]).reshape(1, 4, 1)
    got = Selection.from_blocks(indices, 8, counts).block_indices.reshape(4, 3).tolist()
    assert got == [[-1, -1, -1], [3, -1, -1], [6, 7, 8], [9, 10, 11]]
    decode = Selection.from_blocks(indices[:, 1], 8, counts[:, 1])
    assert decode.block_indices.tolist() == [[[[3, -1, -1]]]]


def test_debugging_validates_new_selections(monkeypatch: pytest.MonkeyPatch) -> None:
    overlapping, twice = row((0, 5), (3, 8)), torch.tensor([2, 0, 2]).reshape(1, 1, 1, 3)
    Selection.from_ranges(overlapping)
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    assert_refused(
        (r"merge\(\)", lambda: Selection.from_ranges(overlapping)), ("has a block twice", lambda: Selection.from_blocks(twice, 16))
    )
    Selection.from_ranges(row((0, 5), (5, 8)))
    Selection.from_blocks(torch.tensor([-1, 0, -1]).reshape(1, 1, 1, 3), 16)


# from_scores


def reference_blocks(scores: list[float], t: int, n: int, block_size: int, first: int, local: int) -> list[int]:
    """NSA Eq. 7-12 for one row at position t in plain Python: ascending blocks."""
    current = t // block_size
    visible = [block for block in range(len(scores)) if block <= current]
    forced = [block for block in visible if block < first or block > current - local]
    scored = [block for block in visible if block not in forced and scores[block] > -torch.inf]
    scored.sort(key=lambda block: (-scores[block], block))
    return sorted(forced + scored[: n - len(forced)])


# Few distinct values make ties likely.
score = st.sampled_from([0.0, 0.25, -0.25, 1.0, -1.0, 3.0, -torch.inf, torch.inf, torch.nan, 1e-30, 1.0 + 1e-7])


@st.composite
def scored_rows(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.integers(1, 5))
    S_kv = draw(st.integers(1, 24))
    blocks = -(-S_kv // block_size)
    n = draw(st.integers(1, 8))
    first = draw(st.integers(0, n))
    rows = draw(st.integers(1, 3))
    return {
        "scores": draw(st.lists(st.lists(score, min_size=blocks, max_size=blocks), min_size=rows, max_size=rows)),
        "q_pos": draw(st.lists(st.integers(0, S_kv - 1), min_size=rows, max_size=rows)),
        "n": n,
        "block_size": block_size,
        "first": first,
        "local": draw(st.integers(0, n - first)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=150)
@given(case=scored_rows())
def test_from_scores_equals_plain_python(dtype: torch.dtype, case: dict[str, Any]) -> None:
    scores = torch.tensor(case["scores"], dtype=dtype)
    q_pos = torch.tensor(case["q_pos"])
    selection = Selection.from_scores(scores[None, :, None], case["n"], case["block_size"], case["first"], case["local"], q_pos=q_pos)
    selection.validate()
    assert selection.n == case["n"]
    for got, of_row, t in zip(selection.block_indices[0, :, 0].tolist(), scores.tolist(), case["q_pos"], strict=True):
        expected = reference_blocks(of_row, t, case["n"], case["block_size"], case["first"], case["local"])
        assert got == expected + [-1] * (case["n"] - len(expected))
        assert all(block * case["block_size"] <= t for block in got)


def test_from_scores_takes_keys_before_the_queries_and_positions() -> None:
    scores = torch.rand(2, 3, 2, 7)
    default = Selection.from_scores(scores, 4, 8, S_kv=50)
    for q_pos in (torch.tensor([47, 48, 49]), torch.tensor([[47, 48, 49]] * 2, dtype=torch.int32)):
        assert torch.equal(Selection.from_scores(scores, 4, 8, q_pos=q_pos).ranges, default.ranges)


# merge


@st.composite
def wild_rows(draw: st.DrawFn) -> Tensor:
    """Ranges [1,S,1,n,2] that overlap, touch, are inverted, negative or unsorted."""
    n = draw(st.integers(1, 7))
    pair = st.tuples(st.integers(-6, 24), st.integers(-6, 24))
    rows = draw(st.lists(st.lists(pair, min_size=n, max_size=n), min_size=1, max_size=3))
    return torch.tensor(rows, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).unsqueeze(0).unsqueeze(2)


@settings(max_examples=300)
@given(ranges=wild_rows())
def test_merge_gives_sorted_disjoint_ranges_of_the_same_keys(ranges: Tensor) -> None:
    merged = Selection.from_ranges(ranges).merge()
    assert (merged.ranges.shape, merged.ranges.dtype) == (ranges.shape, ranges.dtype)
    merged.validate()
    for before, after in zip(ranges[0, :, 0], merged.ranges[0, :, 0], strict=True):
        assert keys_of(after) == keys_of(before)
        filled = [(start, end) for start, end in after.tolist() if end > start]
        assert all(a_end < b_start for (_, a_end), (b_start, _) in itertools.pairwise(filled))
        assert after.tolist() == [*map(list, filled)] + [[0, 0]] * (len(after) - len(filled))
    assert torch.equal(merged.merge().ranges, merged.ranges)


def test_merge_at_the_edge_of_int32() -> None:
    merged = Selection.from_ranges(row((FAR - 1, FAR), (-FAR - 1, 2), (1, FAR - 1))).merge()
    assert merged.ranges.reshape(-1, 2).tolist() == [[0, FAR], [0, 0], [0, 0]]
    assert merged.max_length is None


@pytest.mark.parametrize("shape", [(1, 2, 1, 0, 2), (1, 0, 1, 3, 2), (0, 2, 1, 3, 2)])
def test_selections_of_nothing(shape: tuple[int, ...]) -> None:
    selection = Selection.from_ranges(torch.zeros(shape, dtype=torch.int32)).merge().validate()
    assert selection.ranges.shape == shape
    assert selection.measure().total_length == 0


# validate


@pytest.mark.parametrize(
    "ranges",
    [
        row((0, 3), (3, 5), (7, 9)),
        row((0, 3), (9, 2), (3, 5)),
        row((0, 0), (5, 5), (0, 3)),
        row((-4, 2), (2, 3)),
        row((0, 3), (-5, -2), (3, 4)),
        row((2, 8), (0, 0), (8, FAR)),
    ],
)
def test_validate_accepts_disjoint_sorted_ranges(ranges: Tensor) -> None:
    Selection.from_ranges(ranges).validate()


@pytest.mark.parametrize(
    ("selection", "fragment"),
    [
        (Selection.from_ranges(row((0, 3), (2, 5))), "overlapping or unsorted"),
        (Selection.from_ranges(row((4, 6), (0, 2))), "overlapping or unsorted"),
        (Selection.from_ranges(row((0, 9), (3, 3), (5, 6))), "overlapping or unsorted"),
        (Selection.from_ranges(row((-4, 3), (-1, 2))), "overlapping or unsorted"),
        (Selection.from_ranges(row((0, 16), (16, 31)), block_size=16), "not one block of 16"),
        (Selection.from_ranges(row((8, 24),), block_size=16), "not one block of 16"),
        (Selection.from_ranges(row((16, 32), (0, 16), (16, 32)), block_size=16), "has a block twice"),
        (Selection.from_ranges(row((0, 4), (6, 9)), max_length=6), "more than max_length = 6"),
    ],
)  # fmt: skip
def test_validate_names_the_row_and_the_remedy(selection: Selection, fragment: str) -> None:
    with pytest.raises(ArgumentError, match=fragment) as caught:
        selection.validate()
    assert str(caught.value).startswith("selection row (b=0, s=0, g=0) is [[")
    assert "Remedy: " in str(caught.value)


def test_cut_blocks_stay_short_and_in_any_order() -> None:
    """Moving a selection to keys 5 to 44 of a batch cuts its blocks, which need not be sorted."""
    blocks = Selection.from_blocks(torch.tensor([2, 0]).reshape(1, 1, 1, 2), 16)
    cut = blocks.shifted(torch.tensor([[5]]), torch.tensor([[40]]), 64, whole_blocks=False, max_length=64).validate()
    assert cut.ranges.reshape(-1, 2).tolist() == [[37, 45], [5, 21]]
    assert (cut.block_size, cut.range_bound(64)) == (None, 16)


# bounds and measure


def test_bounds_are_static_facts() -> None:
    blocks = make_blocks(1, 64, 1, 64, n=3, block_size=8)
    assert [blocks.length_bound(S_kv) for S_kv in (64, 20)] == [24, 20]
    assert Selection.from_ranges(row((0, 4), (6, 9))).length_bound(100) == 100
    assert Selection.from_ranges(row((0, 4), (6, 9)), max_length=7).validate().length_bound(100) == 7


def test_measure_counts_exactly() -> None:
    ranges = torch.tensor([[[0, 4], [6, 9]], [[2, 2], [5, 1]], [[-3, 2], [9, 30]]], dtype=torch.int32).reshape(1, 3, 1, 2, 2)
    selection = Selection.from_ranges(ranges)
    assert selection.measure() == Measured(rows=3, empty_rows=1, max_length=23, mean_length=10.0, total_length=30)
    assert selection.measure(S_kv=12) == Measured(3, 1, 7, 4.0, 12)  # rows at 9, 10, 11
    assert selection.measure(S_kv=12, q_pos=torch.tensor([6, 0, 1])) == Measured(3, 1, 5, 7 / 3, 7)
    assert selection.measured == selection.measure(S_kv=12, q_pos=torch.tensor([[6, 0, 1]]))


def test_measure_does_not_overflow() -> None:
    selection = Selection.from_ranges(row((5, -FAR - 1), (-FAR - 1, FAR), (7, FAR)))
    assert selection.measure().total_length == FAR  # the second range holds the third
    rows = Selection.from_ranges(torch.cat((row((0, FAR)), row((7, FAR))), dim=1))
    assert rows.measure().total_length == 2 * FAR - 7
    assert Selection.from_ranges(row((5, -FAR - 1))).measure(S_kv=9).max_length == 0


def test_the_measured_bound_holds_at_other_positions_until_the_ranges_are_written() -> None:
    selection = Selection.from_ranges(row((0, 4), (6, 9)))
    assert selection.measure(S_kv=12, q_pos=torch.tensor([2])).max_length == 3
    assert selection.length_bound(12) == 7
    selection.ranges[..., 1] += 5
    assert selection.length_bound(12) == 12


# disjoint_ranges


@settings(max_examples=300)
@given(ranges=wild_rows())
def test_disjoint_ranges_have_each_key_of_the_union_once(ranges: Tensor) -> None:
    selection = Selection.from_ranges(ranges)
    found = selection.disjoint_ranges()
    assert (found.shape, found.dtype, found.is_contiguous()) == (ranges.shape, ranges.dtype, True)
    assert selection.n < 2 or selection.disjoint_ranges() is found
    for before, after in zip(ranges[0, :, 0], found[0, :, 0], strict=True):
        covered = [key for start, end in after.tolist() for key in range(max(start, 0), end)]
        assert sorted(covered) == sorted(keys_of(before))


def test_plans_are_built_once_until_the_ranges_are_written() -> None:
    selection = Selection.from_ranges(row((0, 4)))
    built: list[str] = []

    def build(name: str) -> str:
        built.append(name)
        return f"{name}{len(built)}"

    assert [selection.plan((key,), lambda key=key: build(key)) for key in "aabab"] == ["a1", "a1", "b2", "a1", "b2"]
    selection.ranges[..., 1] = 3
    assert selection.plan(("a",), lambda: build("a")) == "a3"
    assert selection.plan(("a",), lambda: build("a")) == "a3"


def test_threads_may_make_plans_of_one_selection() -> None:
    """By chance: a third of the runs failed while the oldest plan was looked for in the dict itself."""
    selection, together = Selection.from_ranges(row((0, 4))), threading.Barrier(8)

    def work(thread: int) -> None:
        together.wait()
        for number in range(4000):
            selection.plan((thread, number % 40), object)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(8))) == [None] * 8
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("where", ["nsa_sel.selection.capturing", "torch.compiler.is_compiling"])
def test_another_thread_may_invalidate_while_a_method_runs(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """As one that runs whenever a method looks whether what is cached is valid."""
    selection, wanted = Selection.from_ranges(row((2, 4), (3, 9))), row((2, 4), (4, 9))
    monkeypatch.setattr(where, lambda *_: bool(selection.invalidate()))
    for _ in range(2):
        selection.measure(S_kv=40)
        assert selection.exact() in ((7, None, 7), None)
        selection.measure(S_kv=40)
        assert selection.total_length(40) in (7, None)
        selection.measure(S_kv=40)
        assert copy.copy(selection).length_bound(40) in (7, 40)
        assert torch.equal(selection.disjoint_ranges(), wanted)
        assert selection.plan(("a",), lambda: "built") == "built"


def test_plans_are_rebuilt_when_their_other_inputs_change() -> None:
    selection, made_from, built = Selection.from_ranges(row((0, 4))), torch.tensor([3, 5]), []

    def plan(*others: object) -> int:
        return selection.plan(("a",), lambda: built.append(1) or len(built), *others)  # type: ignore[no-any-return]

    assert [plan(made_from), plan(made_from), plan(made_from.expand(1, 2)), plan(made_from.expand(1, 2))] == [1, 1, 2, 2]
    made_from[0] = 4
    assert [plan(made_from.expand(1, 2)), plan(made_from.expand(1, 2))] == [3, 3]  # another view of the same memory tells too
    assert [plan(made_from.clone().expand(1, 2)), plan(None), plan(None), plan(7), plan(8), plan(8)] == [3, 4, 4, 5, 6, 6]
    positions = np.array([1])
    assert [plan(torch.from_numpy(positions)), plan(torch.from_numpy(positions))] == [7, 7]
    positions[0] = 2  # PyTorch does not see this write
    assert plan(torch.from_numpy(positions)) == 8


def test_plans_are_rebuilt_after_a_cpu_write_unseen_by_pytorch() -> None:
    buffer = np.array([[[[[0, 4]]]]])
    selection = Selection.from_ranges(torch.from_numpy(buffer))
    selection.measure()
    assert (selection.plan(("a",), lambda: 1), selection.length_bound(100)) == (1, 4)
    buffer[..., 1] = 9
    assert (selection.plan(("a",), lambda: 2), selection.length_bound(100)) == (2, 100)


def test_debugging_finds_a_gpu_write_unseen_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU tensor treated like a GPU's, whose contents are only compared under NSA_DEBUG_TRITON=1."""
    buffer = np.array([[[[[0, 4]]]]])
    selection = Selection.from_ranges(torch.from_numpy(buffer))
    monkeypatch.setattr(Selection, "_on_gpu", property(lambda self: True))
    selection.plan(("a",), lambda: 1)
    buffer[..., 1] = 9
    assert selection.plan(("a",), lambda: 2) == 1  # not compared
    selection.invalidate()
    assert selection.plan(("a",), lambda: 2) == 2
    selection.ranges[..., 1] = 8
    assert selection.plan(("a",), lambda: 3) == 3  # PyTorch counts this write
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    selection.invalidate()
    selection.plan(("a",), lambda: 1)
    buffer[..., 1] = 7
    with pytest.raises(ArgumentError, match=r"invalidate\(\)"):
        selection.plan(("a",), lambda: 2)


@pytest.mark.parametrize("fact", ["ranges", "n", "block_size", "max_length", "disjoint"])
def test_facts_are_not_replaced(fact: str) -> None:
    selection = Selection.from_ranges(row((0, 4)))
    with pytest.raises(ArgumentError, match=f"selection.{fact} is replaced"):
        setattr(selection, fact, getattr(selection, fact))


def saved_and_loaded(selection: Selection) -> Selection:
    file = io.BytesIO()
    torch.save(selection, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), saved_and_loaded, lambda s: s.to("cpu")]
)
def test_copies_keep_facts_until_written_and_drop_plans(clone: Callable[[Selection], Selection]) -> None:
    ranges = row((0, 4), (6, 9))
    ranges.copy_(ranges.clone())  # version 1; copies start at 0
    selection = Selection.from_ranges(ranges, max_length=50, disjoint=True)
    selection.measure()
    selection.plan(("a",), lambda: 1)
    found = clone(selection)
    assert torch.equal(found.ranges, ranges)
    assert (found.max_length, found.disjoint, found.measured, found.length_bound(100)) == (50, True, selection.measured, 7)
    assert found.plan(("a",), lambda: 2) == 2
    found.ranges.copy_(row((0, 4), (6, 30)))
    assert (found.length_bound(100), found.plan(("a",), lambda: 3)) == (50, 3)
    selection.ranges.copy_(row((0, 4), (6, 30)))
    assert clone(selection).length_bound(100) == 50
