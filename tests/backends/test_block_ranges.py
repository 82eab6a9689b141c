"""Ranges from block indices by one kernel: the same numbers as PyTorch's operations, in the interpreter and on a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from nsa_sel import Selection
from nsa_sel.backends._triton import ranges as kernels
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.core import ranges as ranges_module
from nsa_sel.core.arguments import whole_blocks
from nsa_sel.core.ranges import disjoint
from nsa_sel.errors import ArgumentError


def some_blocks(n: int, dtype: torch.dtype) -> Tensor:
    """Indices [2,5,2,n] with padding, duplicates, and one whose keys no integer holds."""
    indices = torch.randint(-2, 9, (2, 5, 2, n), generator=torch.Generator().manual_seed(n)).to(dtype)
    indices[0, 0, 0, 0] = torch.iinfo(dtype).max
    return indices


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has the kernel run on CPU tensors, too; collects the launches."""
    started: list[Any] = []
    launch = Kernel.launch

    def counted(self: Kernel, *arguments: Any) -> None:
        started.append(self.function)
        launch(self, *arguments)

    monkeypatch.setattr(Kernel, "launch", counted)
    monkeypatch.setattr(ranges_module, "on_gpu", lambda indices: True)
    monkeypatch.setattr(ranges_module, "_failed", [])
    monkeypatch.setattr(ranges_module, "_classes", {})
    return started


@pytest.mark.parametrize(("dtype", "size"), [(torch.int32, 64), (torch.int32, 3), (torch.int32, 1 << 17), (torch.int64, 4)])
@pytest.mark.parametrize("n", [1, 3, 8, 48])
def test_one_kernel_gives_the_ranges_and_the_distinct_ones(n: int, dtype: torch.dtype, size: int) -> None:
    indices = some_blocks(n, dtype)
    for counts in (None, torch.arange(20).reshape(2, 5, 2) % (n + 1)):
        used = indices if counts is None else torch.where(torch.arange(n) < counts[..., None], indices, -1)
        expected = whole_blocks(used, size)
        ranges, unique = kernels.block_ranges(indices, counts, size, expected.dtype, True, {})
        assert unique is not None
        assert torch.equal(ranges, expected)
        assert torch.equal(unique, disjoint(expected))
        again = kernels.distinct_ranges(expected.transpose(1, 2), size)
        assert again is not None
        assert torch.equal(again, disjoint(expected.transpose(1, 2)))
        alone, none = kernels.block_ranges(indices.transpose(1, 2), None, size, expected.dtype, False, {})
        assert none is None
        assert torch.equal(alone, whole_blocks(indices.transpose(1, 2), size))


def test_a_selection_of_blocks_is_one_launch(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    indices = some_blocks(4, torch.int64)
    selection = Selection.from_blocks(indices, 64)
    found = selection.disjoint_ranges()
    assert launches == [kernels.block_ranges_kernel]
    expected = whole_blocks(indices, 64)
    assert torch.equal(selection.ranges, expected)
    assert torch.equal(found, disjoint(expected))
    selection.ranges[..., 1] = selection.ranges[..., 0]  # nothing is selected any more
    assert not (selection.disjoint_ranges() != 0).any()

    promised = Selection.from_blocks(indices, 64, disjoint=True)
    assert launches == [kernels.block_ranges_kernel, kernels.distinct_ranges_kernel, kernels.block_ranges_kernel]
    assert promised.disjoint_ranges() is promised.ranges
    with torch.inference_mode():  # no plan is kept, and none is computed ahead
        assert torch.equal(Selection.from_blocks(indices, 64).disjoint_ranges(), disjoint(expected))


@pytest.mark.parametrize("decode", [False, True])
def test_blocks_that_were_seen_before_are_not_checked_again(launches: list[Any], monkeypatch: pytest.MonkeyPatch, decode: bool) -> None:
    taken: list[Any] = []
    real = ranges_module._takes
    monkeypatch.setattr(ranges_module, "_takes", lambda x: taken.append(x) or real(x))
    counts = torch.arange(20).reshape(2, 5, 2) % 5
    for seed in range(3):
        indices = some_blocks(4, torch.int32) + seed
        if decode:
            indices, counts = indices[:, 0].clone(), counts[:, :1].squeeze(1).clone()
        for block_counts in (None, counts):
            found = Selection.from_blocks(indices, 64, block_counts)
            used = indices if block_counts is None else torch.where(torch.arange(4) < counts[..., None], indices, -1)
            assert torch.equal(found.ranges, whole_blocks(used.unsqueeze(1) if decode else used, 64))
        counts = torch.arange(20).reshape(2, 5, 2) % 5
    assert len(taken) == 2
    assert len(launches) == 6
    others = (indices.long(), 64, {}), (indices, 32, {}), (indices, 64, {"disjoint": True}), (indices.mT.contiguous().mT, 64, {})
    for x, size, options in others:
        assert torch.equal(Selection.from_blocks(x, size, **options).block_indices.reshape(x.shape), x.clamp(min=-1, max=2**31 // size - 2))
    assert len(taken) == 6
    with torch.autocast("cpu", torch.bfloat16):
        Selection.from_blocks(indices, 64)
        Selection.from_blocks(indices, 64)
    assert len(taken) == 7
    for bad in (True, 0, 64.0):
        with pytest.raises(ArgumentError, match="block_size"):
            Selection.from_blocks(indices, bad)  # type: ignore[arg-type]
    launched = len(launches)
    monkeypatch.setattr(ranges_module, "capturing", lambda x: True)
    assert torch.equal(Selection.from_blocks(indices, 64).ranges, whole_blocks(indices.unsqueeze(1) if decode else indices, 64))
    assert len(launches) == launched


def test_ranges_that_are_no_blocks_are_found_by_pytorch(launches: list[Any]) -> None:
    ranges = torch.tensor([[0, 10], [-3, 4], [8, 20], [7, 7]]).expand(1, 2, 1, 4, 2)
    assert torch.equal(Selection.from_ranges(ranges).disjoint_ranges(), disjoint(ranges))
    assert not launches
    blocks = torch.tensor([[8, 16], [-8, 0], [8, 16], [0, 8]]).expand(1, 2, 1, 4, 2)
    assert Selection.from_ranges(blocks, 8).disjoint_ranges()[0, 0, 0].tolist() == [[0, 8], [8, 16], [0, 0], [0, 0]]
    assert torch.equal(Selection.from_ranges(blocks, 8).disjoint_ranges(), disjoint(blocks))
    assert len(launches) == 2
    many = torch.zeros(1, 1, 1, kernels.MOST_SORTED + 1, 2, dtype=torch.int32)
    assert torch.equal(Selection.from_ranges(many, 8).disjoint_ranges(), many)


def test_pytorch_replaces_a_kernel_that_fails(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(kernels, "block_ranges", fails)
    indices = some_blocks(4, torch.int32)
    with pytest.warns(RuntimeWarning, match="no C compiler"):
        selection = Selection.from_blocks(indices, 64)
    assert torch.equal(selection.ranges, whole_blocks(indices, 64))
    assert not launches
    assert torch.equal(Selection.from_blocks(indices, 64).ranges, selection.ranges)  # without a second warning


def test_traced_operations_stay_pytorch(launches: list[Any]) -> None:
    compiled = torch.compile(lambda x: Selection.from_blocks(x, 64).ranges, fullgraph=True, backend="eager")
    indices = some_blocks(4, torch.int32)
    assert torch.equal(compiled(indices), whole_blocks(indices, 64))
    assert not launches
    for _ in range(2):
        Selection.from_blocks(indices, 64)
    assert len(launches) == 2
    traced = make_fx(lambda x: Selection.from_blocks(x, 64).ranges, tracing_mode="real")(indices)
    assert torch.equal(traced(indices + 1), whole_blocks(indices + 1, 64))
    assert len(launches) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 16, 300])
def test_a_gpu_gives_the_ranges_in_one_launch(n: int) -> None:
    """On a thread that has launched nothing yet, too."""
    indices, found = some_blocks(n, torch.int64).cuda(), list[tuple[Tensor, Tensor]]()

    def select() -> None:
        selection = Selection.from_blocks(indices, 64)
        found.append((selection.ranges, selection.disjoint_ranges()))

    select()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        select()
        thread = threading.Thread(target=select)
        thread.start()
        thread.join()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() or []]
    assert sum("block_ranges_kernel" in name for name in names) == 2
    assert [name for name in names if "elementwise" in name or "sort" in name.lower()] == []
    expected = whole_blocks(indices.cpu(), 64)
    assert len(found) == 3
    for ranges, distinct in found:
        assert torch.equal(ranges.cpu(), expected)
        assert torch.equal(distinct.cpu(), disjoint(expected))
    assert torch.equal(Selection.from_ranges(expected.cuda(), 64).disjoint_ranges().cpu(), disjoint(expected))
