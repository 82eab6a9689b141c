"""The plans and statistics that a Selection caches, and when they are dropped."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import _MOST_PLANS, Selection
from tests.api.test_selection import row


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
    selection, errors, together = Selection.from_ranges(row((0, 4))), list[Exception](), threading.Barrier(8)

    def work(thread: int) -> None:
        together.wait()
        try:
            for number in range(4000):
                selection.plan((thread, number % 40), object)
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []


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


def test_the_number_of_plans_is_bounded() -> None:
    selection = Selection.from_ranges(row((0, 4)))
    for keys in range(100):
        assert selection.plan(("a", keys), lambda keys=keys: keys) == keys
    assert selection._snapshot is not None
    assert len(selection._snapshot.plans) == _MOST_PLANS


def test_plans_of_inference_mode_serve_calls_that_record_gradients() -> None:
    """Sequences are copied to where blocks begin, by indices that autograd saves."""
    q, k, v = (torch.randn(30, 1, *width, 16) for width in ((2,), (), ()))
    selection = Selection.from_blocks(torch.tensor([0, 1]).expand(30, 1, 2), 4)

    def attend(*inputs: Tensor) -> Tensor:
        return nsa_sel.selection_attention_varlen(*inputs, selection, [0, 7, 30], align=True)

    with torch.inference_mode():
        evaluated = attend(q, k, v)
    trained = attend(*(x.requires_grad_() for x in (q, k, v)))
    assert torch.equal(trained, evaluated)
    assert all(bool(x.any()) for x in torch.autograd.grad(trained.sum(), (q, k, v))[2:])
