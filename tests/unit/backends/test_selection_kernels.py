"""Kernels that make a Selection, against PyTorch's operations: ranges of block indices, and the n best scores."""

from __future__ import annotations

import contextlib
import copy
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from nsa_sel import selection as selection_module
from nsa_sel.backends._triton import ranges as kernels
from nsa_sel.backends._triton import top_n as top_n_module
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.backends._triton.top_n import top_n
from nsa_sel.core import ranges as ranges_module
from nsa_sel.core.arguments import range_dtype, whole_blocks
from nsa_sel.core.plans import MOST_SEARCHED
from nsa_sel.core.ranges import disjoint, sorted_blocks
from nsa_sel.selection import Selection
from tests.helpers.calls import assert_refused, calls_of


def some_blocks(n: int, dtype: torch.dtype) -> Tensor:
    """Indices [2,5,2,n] with padding, duplicates, and one whose keys no integer holds."""
    indices = torch.randint(-2, 9, (2, 5, 2, n), generator=torch.Generator().manual_seed(n)).to(dtype)
    indices[0, 0, 0, 0] = torch.iinfo(dtype).max
    return indices


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has the kernel run on CPU tensors, too; collects the launches."""
    started, launch = list[Any](), Kernel.launch
    monkeypatch.setattr(Kernel, "launch", lambda self, *arguments: (started.append(self.function), launch(self, *arguments)))
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
        ranges, unique = kernels.block_ranges(indices, counts, size, expected.dtype, True)
        again = kernels.distinct_ranges(expected.transpose(1, 2), size)
        alone, none = kernels.block_ranges(indices.transpose(1, 2), None, size, expected.dtype, False)
        assert none is None
        wanted = expected, disjoint(expected), disjoint(expected.transpose(1, 2)), whole_blocks(indices.transpose(1, 2), size)
        assert all(map(torch.equal, (ranges, unique, again, alone), wanted))


def test_a_selection_of_blocks_is_one_launch(launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    indices = some_blocks(4, torch.int64).repeat(1, 4, 1, 1)
    selection = Selection.from_blocks(indices, 64)
    assert not launches
    found = selection.disjoint_ranges()
    assert launches == [kernels.block_ranges_kernel]
    expected = whole_blocks(indices, 64)
    assert all(map(torch.equal, (selection.ranges, found), (expected, disjoint(expected))))
    selection.ranges[..., 1] = selection.ranges[..., 0]  # nothing is selected any more
    assert not (selection.disjoint_ranges() != 0).any()

    promised = Selection.from_blocks(indices, 64, disjoint=True)
    assert promised.disjoint_ranges() is promised.ranges
    assert launches == [kernels.block_ranges_kernel] * 3
    with torch.inference_mode():  # no plan is kept, and none is computed ahead
        assert torch.equal(Selection.from_blocks(indices, 64).disjoint_ranges(), disjoint(expected))
        chosen = indices[0, :8].contiguous()  # [T,G,n]
        own = Selection.of_chosen(chosen, 64)
    few = Selection.from_blocks(indices[:, :8].contiguous(), 64)  # whose kernels find duplicates themselves
    assert len(launches) == 5
    assert own.indices is not None
    assert own.indices.data_ptr() == chosen.data_ptr()
    assert torch.equal(few.disjoint_ranges(), disjoint(expected[:, :8]))
    assert len(launches) == 7


@pytest.mark.parametrize("decode", [False, True])
def test_blocks_that_were_seen_before_are_not_checked_again(launches: list[Any], monkeypatch: pytest.MonkeyPatch, decode: bool) -> None:
    taken = calls_of(monkeypatch, ranges_module, "_takes")
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
    assert_refused(*(("block_size", lambda bad=bad: Selection.from_blocks(indices, bad)) for bad in (True, 0, 64.0)))  # type: ignore[misc]


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ranges_module, selection_module):
        monkeypatch.setattr(module, "capturing", lambda x: True)


def test_a_capture_makes_ranges_and_distinct_ones_in_one_launch(
    launches: list[Any], capturing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    indices = some_blocks(4, torch.int32).repeat(1, 4, 1, 1)
    expected = whole_blocks(indices, 64)
    selection = Selection.from_blocks(indices, 64)
    assert torch.equal(selection.disjoint_ranges(), disjoint(expected))
    assert selection.disjoint_ranges() is selection.disjoint_ranges()
    assert len(launches) == 1
    selection.ranges[..., 1] = selection.ranges[..., 0]  # nothing is selected any more
    assert not (selection.disjoint_ranges() != 0).any()
    other = Selection.from_ranges(expected, 64)  # a replay must follow writes since the capture
    assert other.disjoint_ranges() is not other.disjoint_ranges()
    assert len(launches) == 4
    monkeypatch.setattr(Kernel, "loaded", lambda *_: False)  # what would be loaded in the capture
    unloaded = Selection.from_blocks(indices, 64)
    assert torch.equal(unloaded.ranges, expected)
    assert torch.equal(unloaded.disjoint_ranges(), disjoint(expected))
    assert len(launches) == 4


def test_few_rows_in_a_capture_keep_their_block_indices(launches: list[Any], capturing: None) -> None:
    indices = some_blocks(4, torch.int32)
    selection = Selection.from_blocks(indices, 64)
    assert selection.indices is indices
    assert selection.listed is indices
    assert not launches
    copied = copy.deepcopy(selection)
    assert copied.indices is None
    assert torch.equal(copied.ranges, whole_blocks(indices, 64))
    assert selection.indices is None  # the ranges may be written
    counts = torch.ones(2, 5, 2, dtype=torch.int32)
    many, strided = indices.repeat(1, 2, 1, 1), indices.mT.contiguous().mT
    others = Selection.from_blocks(many, 64), Selection.from_blocks(indices, 64, counts), Selection.from_blocks(strided, 64)
    assert all(other.indices is None for other in (*others, Selection.from_ranges(copied.ranges, 64)))
    assert_refused(("selection.ranges", lambda: setattr(Selection.from_blocks(indices, 64), "ranges", copied.ranges)))
    with pytest.raises(AttributeError, match="rows"):
        selection.rows  # noqa: B018


@pytest.mark.parametrize("rows", [5, 20])
def test_a_capture_makes_no_ranges_for_a_selection_made_before(launches: list[Any], monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Kernels read ranges, also of few rows: they may be written between replays."""
    indices, asides = some_blocks(4, torch.int32).repeat(1, rows // 5, 1, 1), list[bool]()
    selection = Selection.from_blocks(indices, 64)
    for module in (ranges_module, selection_module):
        monkeypatch.setattr(module, "capturing", lambda x: True)
    monkeypatch.setattr(kernels, "outside_capture", lambda like, make: (asides.append(True), make())[1])
    assert selection.captured_indices is None
    assert torch.equal(selection.ranges, whole_blocks(indices, 64))
    assert selection.ranges is selection.ranges
    assert (len(launches), asides) == (1, [True])


def test_block_indices_that_were_written_are_refused(launches: list[Any], capturing: None) -> None:
    indices = some_blocks(4, torch.int32)
    selection, made = Selection.from_blocks(indices, 64), Selection.from_blocks(indices, 64)
    before = made.ranges.clone()
    indices[0] = 1
    assert torch.equal(made.ranges, before)
    assert_refused(("block_indices", lambda: selection.indices), ("block_indices", lambda: selection.ranges))
    with torch.inference_mode():  # no counter of writes
        inferred = Selection.from_blocks(indices.clone(), 64)
    assert torch.equal(inferred.ranges, whole_blocks(indices, 64))


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
    monkeypatch.setattr(kernels, "block_ranges", mock.Mock(side_effect=RuntimeError("no C compiler")))
    indices = some_blocks(4, torch.int32)
    selection = Selection.from_blocks(indices, 64)
    with pytest.warns(RuntimeWarning, match="no C compiler"):
        assert torch.equal(selection.ranges, whole_blocks(indices, 64))
    assert not launches
    assert torch.equal(Selection.from_blocks(indices, 64).ranges, selection.ranges)  # without a second warning


def test_traced_operations_stay_pytorch(launches: list[Any]) -> None:
    compiled = torch.compile(lambda x: Selection.from_blocks(x, 64).ranges, fullgraph=True, backend="eager")
    indices = some_blocks(4, torch.int32)
    assert torch.equal(compiled(indices), whole_blocks(indices, 64))
    assert not launches
    for _ in range(2):
        assert torch.equal(Selection.from_blocks(indices, 64).ranges, whole_blocks(indices, 64))
    assert len(launches) == 2
    attend = torch.compile(lambda selection: selection.ranges + 0, fullgraph=True, backend="eager")  # of a selection made outside
    for selection in (Selection.from_blocks(indices, 64), Selection.from_blocks(indices, 64).to("cpu")):
        assert torch.equal(attend(selection), whole_blocks(indices, 64))
    used = Selection.from_blocks(indices, 64)
    used.disjoint_ranges()
    assert torch.equal(attend(used), whole_blocks(indices, 64))
    launches.clear()
    traced = make_fx(lambda x: Selection.from_blocks(x, 64).ranges, tracing_mode="real")(indices)
    assert torch.equal(traced(indices + 1), whole_blocks(indices + 1, 64))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("n", [3, 16, 300])
def test_a_gpu_gives_the_ranges_in_one_launch(n: int) -> None:
    """On a thread that has launched nothing yet, too. Of many blocks, distinct ranges are made apart, where they are asked for."""
    indices, found = some_blocks(n, torch.int64).repeat(1, 2, 1, 1).cuda(), list[tuple[Tensor, Tensor]]()

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
    assert sum("block_ranges_kernel" in name for name in names) == (4 if n > MOST_SEARCHED else 2)
    assert [name for name in names if "elementwise" in name or "sort" in name.lower()] == []
    expected = whole_blocks(indices.cpu(), 64)
    assert len(found) == 3
    for ranges, distinct in found:
        assert torch.equal(ranges.cpu(), expected)
        assert torch.equal(distinct.cpu(), disjoint(expected))
    assert torch.equal(Selection.from_ranges(expected.cuda(), 64).disjoint_ranges().cpu(), disjoint(expected))


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check(
    scores: Tensor, n: int, block_size: int = 16, first: int = 1, local: int = 2, *, S_kv: int | None = None,
    q_pos: Tensor | None = None, **config: int,
) -> None:  # fmt: skip
    """Rows at the last positions of S_kv keys, or at q_pos."""
    B, S, G, blocks = scores.shape
    S_kv = blocks * block_size if S_kv is None else S_kv
    ranges = torch.full((B, S, G, n, 2), 77, dtype=range_dtype(block_size), device=scores.device)
    top_n(scores, ranges, block_size, first, local, S_kv - S, q_pos, **config)
    expected = whole_blocks(sorted_blocks(scores, n, block_size, first, local, None if q_pos is not None else S_kv, q_pos), block_size)
    assert torch.equal(ranges, expected), (ranges, expected)


def awkward(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Scores of few different values, so that most tie: zeros of both signs, infinities, NaN, the largest and the smallest numbers."""
    info = torch.finfo(dtype)
    ends = [torch.inf, -torch.inf, torch.nan, -torch.nan, info.max, info.min, info.smallest_normal, info.tiny / 4]
    values = [0.0, -0.0, 1.0, -1.0, *ends, 2.0]
    index = torch.randint(0, len(values), shape, generator=torch.Generator().manual_seed(0))
    return torch.tensor(values, dtype=torch.float64).to(dtype)[index].to(device)


def uniform(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 8, 20])
def test_ties_and_numbers_that_are_not_finite(n: int, dtype: torch.dtype) -> None:
    scores = awkward((2, 16, 1, 20), dtype)
    check(scores, n, first=0, local=0, rows=32)
    check(scores.abs(), n, 4, first=min(2, n - 1), local=1, rows=32)


@pytest.mark.parametrize(("blocks", "n"), [(1, 1), (1, 4), (5, 16), (33, 4), (64, 64), (130, 16)])
def test_numbers_of_blocks(blocks: int, n: int) -> None:
    scores = uniform((1, 10, 1, blocks))
    check(scores, n, 24, first=0, local=1, rows=32)
    check(scores - 0.5, n, 24, first=0, local=0)
    check(torch.zeros_like(scores), n, 24, first=0, local=0, rows=32)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 16 blocks are wide: chunks of 32, room for 16 candidates, or for twice as many as are chosen."""
    for name, value in (("WIDE", 16), ("FEW_WIDE", 0), ("CHUNK", 32), ("LEAST_KEPT", 16)):
        monkeypatch.setattr(top_n_module, name, value)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("n", [1, 5, 8, 20])
def test_wide_rows(n: int) -> None:
    """Few candidates, as many as there is room for (an arithmetic progression), and more: equal scores, and thresholds that many reach."""
    first, local = min(1, n - 1), min(2, n // 2)
    rising = torch.arange(150.0).expand(1, 4, 2, 150)
    same_group = torch.rand(1, 4, 2, 150, generator=torch.Generator().manual_seed(3)) + 9.0 * (torch.arange(150) % 32 < 3)
    positive = (uniform((1, 4, 2, 150)) * 20 - 15).relu()
    for scores in (uniform((1, 4, 2, 150)), torch.zeros(1, 4, 2, 150), rising, -rising, same_group, positive, rising * 1e37):
        check(scores, n, 4, first, local)
        check(scores, n, 4, 0, 0)
    for dtype in DTYPES:
        check(awkward((1, 6, 2, 100), dtype), n, 4, first, local)
        check(awkward((1, 6, 2, 100), dtype).abs(), n, 4, 0, 0)


def positions(rows: int) -> Tensor:
    """[2,rows], far before the first key and after the last one among them."""
    q_pos = torch.randint(-40, 400, (2, rows), generator=torch.Generator().manual_seed(2))
    q_pos[0, :4] = torch.tensor([-(1 << 40), 1 << 40, -1, 0])
    return q_pos


@pytest.mark.usefixtures("wide")
def test_wide_rows_at_given_positions_with_strides_and_forced_blocks() -> None:
    scores, q_pos = uniform((2, 100, 8, 2)).permute(0, 2, 3, 1), positions(8)  # [2, 8, 2, 100]
    check(scores, 5, 4, q_pos=q_pos)
    check(scores, 60, 4, first=33, local=27, q_pos=q_pos)
    check(scores.masked_fill(torch.arange(100) > q_pos[:, :, None, None] // 4, torch.nan), 7, 4, first=0, local=0, q_pos=q_pos)


HIDDEN = torch.arange(10) > torch.arange(40)[:, None, None] // 4  # [40,1,10]: blocks that no row sees


@pytest.mark.parametrize(
    ("scores", "n", "options"),
    [
        (uniform((1, 2, 1, 4096)), 16, {"block_size": 64}),
        (uniform((1, 2, 1, 5000)).mul(64).round(), 300, {"block_size": 64}),
        (uniform((2, 30, 2, 20)), 5, {"q_pos": positions(30), "rows": 32}),
        (uniform((2, 30, 2, 20)), 5, {"first": 0, "local": 4, "q_pos": positions(30).clamp(-9, 9999).int(), "rows": 32}),
        (uniform((2, 30, 2, 20)), 5, {"q_pos": positions(30)[:1].expand(2, 30), "rows": 32}),
        (uniform((3, 20, 2, 24)).permute(1, 3, 2, 0)[:2], 2, {"block_size": 8, "first": 0, "local": 1, "rows": 32}),
        (uniform((1, 40, 1, 10)).masked_fill(HIDDEN, torch.nan), 4, {"block_size": 4, "rows": 32}),
        (uniform((1, 40, 1, 10)).masked_fill(HIDDEN, torch.inf), 4, {"block_size": 4, "rows": 32}),
        (uniform((1, 0, 1, 1)), 4, {"S_kv": 1}),
        (uniform((1, 2, 1, 40)), 4, {"block_size": 1 << 27, "rows": 2}),
    ],
    ids=["many", "many equal", "positions", "int32", "shared", "strides", "hidden nan", "hidden inf", "no rows", "64 bits"],
)
def test_other_scores(scores: Tensor, n: int, options: dict[str, Any]) -> None:
    check(scores, n, **options)


def test_a_view_of_the_result_and_no_blocks() -> None:
    whole = torch.full((2, 24, 2, 4, 2), 77, dtype=torch.int32)
    wide = uniform((2, 24, 2, 5))
    top_n(wide[:, 3:9], whole[:, 3:9], 8, 1, 2, 19)
    assert torch.equal(whole[:, 3:9], whole_blocks(sorted_blocks(wide[:, 3:9], 4, 8, 1, 2, None, torch.arange(19, 25)), 8))
    assert bool((whole[:, :3] == 77).all())
    assert bool((whole[:, 9:] == 77).all())
    ranges = torch.full((1, 2, 1, 3, 2), 77, dtype=torch.int32)
    top_n(uniform((1, 2, 1, 0)), ranges, 16, 1, 2, 0)
    assert not bool(ranges.any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [1, 20, 64, 128, 500, 512, 1000, 2048, 4096, 5000, 16384, 40000])
def test_top_n_on_a_gpu(blocks: int, dtype: torch.dtype) -> None:
    for n in (1, 16, 64):
        local, first = min(2, n - 1), min(1, n // 4)
        for scores in (awkward((2, 61, 2, blocks), dtype, "cuda"), uniform((2, 61, 2, blocks), dtype, "cuda")):
            check(scores, n, 64, first, local)
            check(scores, n, 64, 0, 0)
    if blocks >= 4096:
        rising = torch.arange(blocks, device="cuda").to(dtype).expand(1, 9, 1, blocks)
        for n in (512, 2000):
            for scores in (awkward(rising.shape, dtype, "cuda"), uniform(rising.shape, dtype, "cuda"), rising, rising % 2048 // 256):
                check(scores, n, 4, 0, 0)
    q_pos = torch.randint(-40, 70 * blocks, (2, 61), generator=torch.Generator().manual_seed(2)).cuda()
    check(uniform((2, 61, 2, blocks), dtype, "cuda"), 16, 64, q_pos=q_pos)
    for rows, warps in ((1, 1), (8, 1), (4, 4), (16, 4)):  # rows of a warp, and rows across warps
        if rows * blocks < 16384 and blocks <= 4096:
            check(awkward((2, 61, 2, blocks), dtype, "cuda"), 16, 64, rows=rows, warps=warps)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of scores that the kernel got from `Selection.from_scores`."""
    shapes, real = list[torch.Size](), ranges_module._kernel(ranges_module.TOP_N)
    top_n = lambda scores, *arguments: (shapes.append(scores.shape), real.top_n(scores, *arguments))  # noqa: E731
    monkeypatch.setattr(ranges_module, "_kernel", lambda module: SimpleNamespace(top_n=top_n, chooses=lambda blocks, n: blocks <= 20))
    return shapes


def test_from_scores_uses_the_kernel_where_it_may(monkeypatch: pytest.MonkeyPatch, ran: list[torch.Size]) -> None:
    scores = torch.rand(2, 40, 2, 5)
    expected = Selection.from_scores(scores, 3, 8)
    assert ran == []
    monkeypatch.setattr(ranges_module, "_top_n_takes", lambda scores: True)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    for q_pos in (None, torch.arange(40)):
        assert torch.equal(Selection.from_scores(scores, 3, 8, q_pos=q_pos).ranges, expected.ranges)
    assert ran == [scores.shape] * 2
    Selection.from_scores(torch.rand(1, 168, 1, 21), 3, 8)
    assert len(ran) == 2, "more blocks than the kernel takes"


@pytest.mark.gpu
def test_from_scores_on_a_gpu(monkeypatch: pytest.MonkeyPatch, ran: list[torch.Size]) -> None:
    scores = torch.rand(1, 160, 4, 20, device="cuda")
    on_cpu = Selection.from_scores(scores.cpu(), 6, 8)
    assert torch.equal(Selection.from_scores(scores, 6, 8).ranges.cpu(), on_cpu.ranges)
    assert ran == [scores.shape]
    monkeypatch.setenv("NSA_USE_TRITON_SEL", "0")
    assert torch.equal(Selection.from_scores(scores, 6, 8).ranges.cpu(), on_cpu.ranges)
    monkeypatch.delenv("NSA_USE_TRITON_SEL")
    monkeypatch.setenv("NSA_FORCE_PARITY", "1")
    assert torch.equal(Selection.from_scores(scores.double(), 6, 8).ranges.cpu(), on_cpu.ranges)
    assert len(ran) == 1
    monkeypatch.undo()
    wide = torch.rand(1, 8192, 4, 128, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Selection.from_scores(wide, 16, 64)
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
