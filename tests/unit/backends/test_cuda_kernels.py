"""CUDA kernels that run on the CPU, beyond the contract table: any order of threads, splits, clusters, shared lists, units, and e4m3."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel import selection as selection_module
from nsa_sel.backends import cupy_cuda, window_cuda
from nsa_sel.backends.cupy_cuda import (
    arithmetic,
    block_tiles,
    compressed,
    cuda_block,
    key_to_rows,
    launch,
    sm80,
    sm90,
    whole_blocks,
)
from nsa_sel.core import arguments
from nsa_sel.core.arguments import whole_blocks as ranges_of
from nsa_sel.core.call import Call, Rule, WindowCall
from nsa_sel.core.ranges import Blocks, disjoint
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection
from tests.contract.lanes import Lane, lanes
from tests.helpers.caches import QuantizedCache, gathered, make_cache, make_quantized, positions
from tests.helpers.calls import calls_of
from tests.helpers.cases import assert_forward, assert_gradients, make_blocks, make_grads, make_qkv, unused_keys
from tests.helpers.checks import check_both, check_poison, new_memory_is_nan
from tests.helpers.choose import make_choose_call
from tests.helpers.cuda import BACKWARDS, EAGER, GPU, LATE_WARP, cache_call, call_of, emulated, needs_compiler, order_few, row_map
from tests.helpers.gpus import noted

pytestmark = [needs_compiler, pytest.mark.slow]  # a compiler, and thousands of emulated products


def check(backend: Any, call: Call, do: Tensor | None = None) -> list[Tensor]:
    """o, lse, dq, dk, dv, in new memory that holds NaN; as close to the oracle as everywhere."""
    q, k, v, ranges, how = call.q, call.k, call.v, call.selection.ranges, (call.scale, call.q_pos)
    with new_memory_is_nan():
        o, lse = backend.forward(call)
        random_do, dlse = make_grads(q, v)
        do, dlse = random_do if do is None else do, torch.where(lse == -torch.inf, 0.0, dlse)
        gradients = backend.backward(call, o, lse, do, dlse)
    assert_forward((o, lse), q, k, v, ranges, *how)
    assert_gradients(gradients, q, k, v, ranges, do, dlse, *how)
    return [o, lse, *gradients]


# Any order of threads


@pytest.mark.parametrize(
    ("h", "S", "Dk", "Dv", "block", "modes"),
    [
        (9, 36, 16, 24, 32, (BACKWARDS, BACKWARDS | EAGER)),  # rows, and lists of several segments of several steps
        (4, 100, 64, 64, 64, (LATE_WARP * 13, BACKWARDS | EAGER)),  # tiles; the warp that loads keys and values is ahead
        pytest.param(4, 100, 64, 64, 64, (LATE_WARP, LATE_WARP * 14), marks=pytest.mark.thorough),  # a consumer, and the loader of queries
        pytest.param(12, 45, 256, 256, 4, (BACKWARDS | EAGER,), marks=pytest.mark.thorough),  # gathered
    ],
)
def test_any_order_of_threads_and_copies_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, h: int, S: int, Dk: int, Dv: int, block: int, modes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(key_to_rows, "SHORTEST", 16)
    q, k, v = make_qkv(1, S, 1, h, Dk, Dv, S_kv=260 if Dk > 16 else 70, dtype=torch.float16)
    runs = []
    for mode in (0, *modes):
        emulated(monkeypatch, mode)
        runs.append(check(cupy_cuda, call_of(q, k, v, make_blocks(1, S, 1, k.shape[2], 3, block))))
    assert all(torch.equal(x, y) for run in runs for x, y in zip(runs[0], run, strict=True))


def test_plans_count_a_block_once_however_often_rows_of_many_blocks_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for duplicates: plans have one bit for a row and a block."""
    emulated(monkeypatch)
    monkeypatch.setattr(selection_module, "MOST_SEARCHED", 4)
    monkeypatch.setattr(selection_module, "distinct_ranges", mock.Mock(side_effect=AssertionError))
    q, k, v = make_qkv(1, 24, 2, 12, 64, 64, S_kv=150, dtype=torch.float16)
    indices = torch.randint(-2, 40, (1, 24, 1, 9), generator=torch.Generator().manual_seed(0))  # for both groups
    indices[..., 5], indices[..., 8] = indices[..., 0], indices[..., 3]
    ranges = ranges_of(indices, 4)
    found = check(cupy_cuda, call_of(q, k, v, Selection(ranges, 4)))
    again = check(cupy_cuda, call_of(q, k, v, Selection(disjoint(ranges), 4, disjoint=True)))
    assert all(map(torch.equal, found[:3], again[:3]))  # dk and dv: duplicates count for which blocks share tiles


def row_of_cluster(page_size: int | None, cluster: int, **sizes: Any) -> tuple[Tensor, Tensor]:
    """o and lse of four rows, checked, on a GPU that runs four clusters of so many CTAs at once. NaN wherever no sequence has a key."""
    facts = {"lengths": (0, 1, 150, 640), "G": 1, "h": 3, "Dk": 64, "Dv": 64, "block": 64, "room": 640, "dtype": torch.float16}
    cache, empty = make_cache(page_size=page_size, **{**facts, **sizes}), sizes.get("n", 3) == 34
    if empty:
        holes = cache.selection.ranges.clone()
        holes[:, :, :, 1:30] = 0
        cache = cache._replace(selection=Selection(holes, 128))
    gpu = msgspec.structs.replace(GPU, sm_count=-(-5 * cluster // 2))
    assert whole_blocks.cluster_size(4, cache.selection.n, 2 * gpu.sm_count) == cluster
    call = cache_call(cache, gpu)
    assert whole_blocks.supports(call)
    with new_memory_is_nan():
        found = whole_blocks.forward(call)
    assert_forward(found, cache.q, *gathered(cache), cache.selection.ranges, q_pos=positions(cache))
    return found


@pytest.mark.parametrize(("cluster", "page_size"), [(1, None), (2, 64), (8, 64)])
def test_ctas_of_a_cluster_share_a_row_in_any_order(monkeypatch: pytest.MonkeyPatch, cluster: int, page_size: int | None) -> None:
    """Sequences without keys, and of fewer steps than a cluster has CTAs."""
    found = []
    for mode in (0, BACKWARDS | EAGER):
        emulated(monkeypatch, mode)
        found.append(row_of_cluster(page_size, cluster, n=max(3, cluster)))
    assert all(map(torch.equal, *found))


def test_a_cluster_takes_tokens_blocks_of_two_steps_and_many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """More steps than a warp looks at at once, and more heads than a warp has: 34 ranges of 128 keys over two CTAs."""
    emulated(monkeypatch, BACKWARDS)
    row_of_cluster(128, 2, lengths=(200, 4480), S_q=2, h=17, n=34, block=128, room=4480)


# Block indices


def repeated_blocks(n: int, blocks: int, dtype: torch.dtype) -> Tensor:
    """Block indices [2,1,2,n], unsorted: duplicates near and far, padding in any position, blocks past the end, values near the dtype's
    bounds."""
    indices = torch.randint(-2, blocks + 3, (2, 1, 2, n), generator=torch.Generator().manual_seed(n), dtype=dtype)
    indices[..., n // 2] = indices[..., 0]
    if n > 33:
        indices[..., 33], indices[..., n - 1] = indices[..., 1], indices[..., 2]
    indices[..., 1] = torch.iinfo(dtype).max if dtype == torch.int32 else 1 << 62
    if dtype == torch.int64:
        indices[..., 2] = -(1 << 62)
    return indices


def check_indices(
    forward: Callable[[Call], Any], block: int, indices: Tensor, indexed: bool, gpu: Any, S_kv: int, D: int = 64, h: int = 3
) -> None:
    """The kernel reads block indices, or ranges of the same blocks, without a promise: those of each group, or of all."""
    B, _, G, _ = indices.shape
    q, k, v = make_qkv(B, 1, G, h, D, D, S_kv=S_kv, dtype=torch.float16)
    for blocks in (indices, indices[:, :, :1].contiguous()):
        ranges = arguments.whole_blocks(blocks, block)
        selection = Selection._of_indices(Blocks(blocks, None, None), block, False) if indexed else Selection(ranges, block)
        with new_memory_is_nan():
            found = forward(call_of(q, k, v, selection, device=gpu))
        assert_forward(found, q, k, v, ranges)


INDICES = [
    *((3, 64, torch.int32, 1, True), (5, 128, torch.int64, 4, True), (16, 64, torch.int32, 8, True)),
    *((40, 64, torch.int32, 2, True), (40, 64, torch.int64, 2, False), (70, 64, torch.int64, 1, True)),
]


@pytest.mark.parametrize("mode", [0, BACKWARDS | EAGER])
@pytest.mark.parametrize(("n", "block", "dtype", "cluster", "indexed"), INDICES)
def test_whole_blocks_count_once(
    monkeypatch: pytest.MonkeyPatch, n: int, block: int, dtype: torch.dtype, cluster: int, indexed: bool, mode: int
) -> None:
    emulated(monkeypatch, mode)
    S_kv = 65 * n if n > 32 else 700
    indices = repeated_blocks(n, S_kv // block, dtype)
    gpu = msgspec.structs.replace(GPU, sm_count=-(-5 * cluster // 2))
    check_indices(whole_blocks.forward, block, indices, indexed, gpu, S_kv)


@pytest.mark.parametrize("mode", [0, BACKWARDS | EAGER])
@pytest.mark.parametrize(
    ("n", "block", "dtype", "cluster", "D", "indexed"),
    [
        (3, 16, torch.int32, 1, 64, True),
        (20, 32, torch.int64, 4, 64, True),
        (45, 8, torch.int32, 2, 128, False),
        (70, 4, torch.int64, 1, 256, True),
        (129, 4, torch.int32, 2, 256, True),
    ],
)
def test_small_blocks_count_once(
    monkeypatch: pytest.MonkeyPatch, n: int, block: int, dtype: torch.dtype, cluster: int, D: int, indexed: bool, mode: int
) -> None:
    emulated(monkeypatch, mode)
    S_kv = max(300, n * block // 2)
    gpu = msgspec.structs.replace(GPU, sm_count=-(-5 * cluster // (1 if D == 256 else 2)))
    check_indices(whole_blocks.forward, block, repeated_blocks(n, S_kv // block, dtype), indexed, gpu, S_kv, D)


@pytest.mark.parametrize("cluster", [1, 4])
def test_keys_of_256_columns(monkeypatch: pytest.MonkeyPatch, cluster: int) -> None:
    emulated(monkeypatch, BACKWARDS | EAGER)
    gpu = msgspec.structs.replace(GPU, sm_count=5 * cluster)
    check_indices(whole_blocks.forward, 64, repeated_blocks(5, 9, torch.int32), True, gpu, 600, 256, 20)


@pytest.mark.parametrize(("page_size", "S_q", "block", "sms"), [(None, 1, 4, 30), (8, 3, 8, 5), (48, 1, 16, 30), (12, 8, 4, 2)])
def test_small_blocks_of_caches(monkeypatch: pytest.MonkeyPatch, page_size: int | None, S_q: int, block: int, sms: int) -> None:
    """In pages of one block or several; sequences without keys, rows over a cluster, several rows of a CTA. NaN where nobody has a key."""
    emulated(monkeypatch, BACKWARDS | EAGER)
    facts = {"S_q": S_q, "G": 1, "h": 3, "Dk": 64, "Dv": 128, "block": block, "room": 640, "dtype": torch.float16, "n": 34}
    cache = make_cache((0, 1, 150, 640), page_size, **facts)  # type: ignore[arg-type]
    call = cache_call(cache, msgspec.structs.replace(GPU, sm_count=sms))
    assert whole_blocks.supports(call)
    with new_memory_is_nan():
        found = whole_blocks.forward(call)
    assert_forward(found, cache.q, *gathered(cache), cache.selection.ranges, q_pos=positions(cache))


@pytest.mark.parametrize("mode", [0, BACKWARDS])
@pytest.mark.parametrize(
    ("n", "block", "dtype", "sm", "indexed"),
    [
        (3, 16, torch.int32, 90, True),
        (5, 4, torch.int64, 86, True),
        (70, 4, torch.int32, 90, False),
        (129, 4, torch.int64, 90, True),
    ],
)
def test_blocks_of_gathered_rows_count_once(
    monkeypatch: pytest.MonkeyPatch, n: int, block: int, dtype: torch.dtype, sm: int, indexed: bool, mode: int
) -> None:
    emulated(monkeypatch, mode)
    S_kv = max(300, 7 * n)
    check_indices(sm80.forward_rows, block, repeated_blocks(n, S_kv // block, dtype), indexed, msgspec.structs.replace(GPU, sm=sm), S_kv)


# Rows


@pytest.mark.parametrize("mode", [0, BACKWARDS])
@pytest.mark.parametrize(("sm", "kernels"), [(86, ["forward_rows.cu", "combine.cu"]), (90, ["forward_rows.cu"])])
def test_decode_in_splits(monkeypatch: pytest.MonkeyPatch, sm: int, kernels: list[str], mode: int) -> None:
    """The CTAs of a cluster combine a row's splits; without clusters a second kernel does. In pages, too."""
    gpu = msgspec.structs.replace(GPU, sm=sm)
    q, k, v = make_qkv(1, 1, 1, 3, 16, 24, S_kv=400, dtype=torch.float16)
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
    cache = make_cache((190,), 16, h=3, Dv=24, G=1, n=12, dtype=torch.float16)
    with new_memory_is_nan():
        results = cupy_cuda.forward(cache_call(cache, gpu))
    assert_forward(results, cache.q, *gathered(cache), cache.selection.ranges, q_pos=positions(cache))
    long = cache._replace(cache_seqlens=cache.cache_seqlens + 1000, block_table=cache.block_table.clamp(min=0))
    full = cache._replace(cache_seqlens=cache.cache_seqlens * 0 + 192, block_table=long.block_table)
    clamped = ((x.nan_to_num(7) for x in cupy_cuda.forward(cache_call(given, gpu))) for given in (long, full))  # to the table
    assert all(map(torch.equal, *clamped))


def test_rows_that_no_wide_copy_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated(monkeypatch)
    q, k, v = make_qkv(2, 8, 2, 3, 16, 24, S_kv=70, dtype=torch.float16)
    shifted = (torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x) for x in (q, k, v))
    runs = [check(cupy_cuda, call_of(*given, make_blocks(2, 8, 2, 70, 3, 16))) for given in ((q, k, v), tuple(shifted))]
    assert all(map(torch.equal, *runs))


# Tiles of tokens with similar selections

EMULATED = next(lane for lane in lanes("emulated") if lane.name == "cupy-cuda")
ON_GPU = next(lane for lane in lanes("cuda") if lane.name == "cupy-cuda")
OF_A_GPU = ((16, 128, 128, 64), (4, 64, 64, 128), (12, 192, 128, 64), (32, 64, 128, 64), (8, 256, 256, 64))


@pytest.mark.parametrize(
    ("lane", "h", "Dk", "Dv", "block"),
    [
        (EMULATED, 5, 64, 128, 64),
        pytest.param(EMULATED, 4, 192, 64, 128, marks=pytest.mark.thorough),
        pytest.param(EMULATED, 4, 256, 256, 64, marks=pytest.mark.thorough),
        *(pytest.param(ON_GPU, *sizes, marks=ON_GPU.marks()) for sizes in OF_A_GPU),
    ],
)
def test_tiles_of_tokens_that_selected_alike(monkeypatch: pytest.MonkeyPatch, lane: Lane, h: int, Dk: int, Dv: int, block: int) -> None:
    """More tiles than CTAs, a last stretch that is not full, rows and blocks without each other, and positions of any order."""
    lane.open(monkeypatch)
    order_few(monkeypatch)
    started = noted(monkeypatch)
    S, G, S_kv = (100, 2, 260) if lane.slow else (1100, 3, 1300)
    q, k, v = make_qkv(1, S, G, h, Dk, Dv, S_kv=S_kv, dtype=lane.dtype, device=lane.place)
    ranges = make_blocks(1, S, G, S_kv, 3 if block == 64 else 2, block, device=lane.place).ranges
    ranges[:, 20:25] = 0
    ranges[ranges[..., 0] == 128] = 0
    check_both("cupy-cuda", q, k, v, Selection(ranges, block))
    assert "ordered_union.cu" in started
    check_poison("cupy-cuda", q, k, v, Selection(ranges, block))
    if not lane.slow:
        q_pos = torch.randint(0, S_kv, (1, S), generator=torch.Generator().manual_seed(2)).cuda()
        check_both("cupy-cuda", q, k, v, Selection(ranges, block), q_pos=q_pos)


@pytest.mark.parametrize("lane", [EMULATED, pytest.param(ON_GPU, marks=ON_GPU.marks())])
@pytest.mark.parametrize("h", [1, 4])
def test_weights_that_exceed_the_maximum_by_far(monkeypatch: pytest.MonkeyPatch, lane: Lane, h: int) -> None:
    """Tiles begin with the last blocks. Logits of some rows with earlier blocks, and of their warps alone, are larger by hundreds."""
    lane.open(monkeypatch)
    q, k, v = make_qkv(1, 70, 1, h, 64, 64, S_kv=700, dtype=lane.dtype, device=lane.place)
    k *= (10 - torch.arange(700, device=lane.place) // 64)[:, None]
    q[:, ::7] *= 20
    check_both("cupy-cuda", q, k, v, make_blocks(1, 70, 1, 700, 8, 64, device=lane.place))


# dk and dv by lists


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a few entries."""
    monkeypatch.setattr(key_to_rows, "SHORTEST", 8)
    for module in (key_to_rows, block_tiles):
        monkeypatch.setattr(module, "SEGMENTS_PER_SM", 64)


def check_lists(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, q_pos: Tensor | None, dkdv: Callable[..., Any]) -> Any:
    """dk and dv from lse, do and delta, against the oracle."""
    own, lse = oracle_forward(q, k, v, ranges, q_pos=q_pos)
    do, dlse = make_grads(q, v)
    dlse = torch.where(lse == -torch.inf, 0.0, dlse).float()
    delta = (do.double() * own).sum(-1) - dlse
    with new_memory_is_nan():
        found = dkdv(lse.float(), do, delta.float())
    dq = oracle_backward(q, k, v, ranges, do, dlse, q_pos=q_pos)[0].to(q.dtype)  # another kernel's
    assert_gradients((dq, *found), q, k, v, ranges, do, dlse, q_pos=q_pos)
    return found


def dkdv_tiles(call: Call, *row_tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sm80.dkdv_tiles(call, call.disjoint_ranges(), *row_tensors)


@pytest.mark.parametrize(("h", "S", "block", "dkdv"), [
    (1, 150, 128, sm90.dkdv_groups), (16, 40, 128, sm90.dkdv_groups), (4, 90, 128, dkdv_tiles), (3, 60, 16, sm90.dkdv_groups),
    (12, 60, 4, sm90.dkdv_groups),
])  # fmt: skip
def test_gradients_by_lists_of_a_block_or_of_its_tiles(
    monkeypatch: pytest.MonkeyPatch, short: None, h: int, S: int, block: int, dkdv: Callable[..., Any]
) -> None:
    """One list per block is bit-equal to one per tile, except for unordered positions, whose sums have another order. Lists have several
    segments, causality or the end of the keys cuts blocks, and keys that no row sees are NaN. 12 heads have 256 columns, and lists of more
    steps than stages."""
    emulated(monkeypatch, BACKWARDS | EAGER)
    S_kv, D = S + 210, 256 if h == 12 else 64
    if h == 12:
        monkeypatch.setattr(key_to_rows, "SHORTEST", 32)
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=D, Dv=D, S_kv=S_kv, dtype=torch.float16)
    ranges = make_blocks(1, S, 2, S_kv, 2 if block == 128 else 6, block).ranges
    ranges = torch.where(torch.arange(S)[:, None, None, None] % 23 == 5, 0, ranges)
    for q_pos in (None, torch.randint(0, S_kv, (1, S), generator=torch.Generator().manual_seed(1))):
        unused, found = unused_keys(q, k, ranges, q_pos).unsqueeze(-1), []
        spoilt = [torch.where(unused, torch.nan, x) for x in (k, v)]
        for alone in (False, True) if block == 128 else (False,):
            call = call_of(q, *spoilt, Selection(ranges, block), q_pos)
            run = lambda lse, do, delta, call=call: dkdv(call, lse, do, delta)  # noqa: E731
            with pytest.MonkeyPatch.context() as patched:
                if alone:
                    patched.setattr(Call, "tiles_of_block", lambda *_: 1)
                found.append(check_lists(q, k, v, ranges, q_pos, run))
        assert q_pos is not None or all(torch.equal(*pair) for pair in zip(found[0], found[-1], strict=True))


def test_gradients_of_pairs_whose_lists_do_not_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch entry and group has lists of its own then; positions of any order."""
    emulated(monkeypatch)
    B, S, G, S_kv, block = 2, 20, 2, 90, 16
    q, k, v = make_qkv(B=B, S=S, G=G, h=16, Dk=64, Dv=64, S_kv=S_kv, dtype=torch.float16)
    selection = make_blocks(B, S, G, S_kv, 3, block)
    positions = torch.randint(0, S_kv, (B, S), generator=torch.Generator().manual_seed(1))
    call = call_of(q, k, v, selection, positions)
    monkeypatch.setattr(block_tiles, "ENTRY_BYTES", call.settings.workspace_bytes // (2 * S * 2))
    assert not block_tiles.list_bytes(call)[1]
    check_lists(q, k, v, selection.ranges, positions, lambda lse, do, delta: sm90.dkdv_groups(call, lse, do, delta))


@pytest.mark.parametrize(("h", "S", "S_kv", "size"), [(16, 40, 110, 30), (3, 70, 150, 30), (16, 40, 300, 200)])
def test_windows_of_wide_keys(monkeypatch: pytest.MonkeyPatch, h: int, S: int, S_kv: int, size: int) -> None:
    """Boxes that reach past the window, tiles that no row sees, and blocks that all tokens of a tile see whole."""
    emulated(monkeypatch)
    monkeypatch.setattr(arithmetic, "row_map", row_map)
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=192, Dv=128, S_kv=S_kv, dtype=torch.float16)
    last = torch.arange(S_kv - S, S_kv) + 1
    ranges = torch.stack((last - size, last), -1)[None, :, None, None].expand(1, S, 2, 1, 2)
    call, (do, dlse) = WindowCall(q, k, v, size, 192**-0.5), make_grads(q, v)
    with new_memory_is_nan():
        o, lse = arithmetic.forward(call, GPU)
        dq, delta = arithmetic.dq(call, GPU, o, lse, do, dlse)
        gradients = dq, *window_cuda.dkdv(call, GPU, lse, do, delta)
    assert_forward((o, lse), q, k, v, ranges)
    assert_gradients(gradients, q, k, v, ranges, do, dlse)


@pytest.mark.parametrize(("h", "S", "S_kv"), [(16, 30, 200), pytest.param(4, 300, 900, marks=pytest.mark.thorough)])
def test_gradients_of_wide_compressed_keys(monkeypatch: pytest.MonkeyPatch, h: int, S: int, S_kv: int) -> None:
    emulated(monkeypatch)
    call = make_choose_call((1, S, S_kv, 2, h, 192, 128, Rule(compress_block=8, compress_stride=4)), torch.float16)
    seen = call.seen()  # [B,S]
    ranges = torch.stack((torch.zeros_like(seen), seen), -1)[:, :, None, None].expand(1, S, 2, 1, 2)
    check_lists(call.q, call.k, call.v, ranges, seen - 1, lambda lse, do, delta: compressed.dkdv(call, GPU, lse, do, delta))


# cuda-block

FORWARD = ["shared_tiles.cu", "block_partials.cu", "join_partials.cu"]
BACKWARD = ["block_gradients.cu", "join_shares.cu", "sum_sections.cu"]
WITHOUT_SHARES = [*FORWARD, "block_gradients.cu", "sum_sections.cu"]  # with less than 8 heads


def rows(**sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(**{"B": 1, "S": 80, "G": 2, "h": 4, "Dk": 64, "Dv": 64, "S_kv": 200, "dtype": torch.float16, **sizes})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran, but those that sort, which run once for a selection."""
    emulated(monkeypatch, BACKWARDS | EAGER)
    kernels, start = [], launch.start

    def recorded(source: str, *rest: Any, **own: Any) -> None:
        kernels.extend([source] * (source in (*FORWARD, *BACKWARD, "dkdv_groups.cu")))
        start(source, *rest, **own)

    monkeypatch.setattr(launch, "start", recorded)
    monkeypatch.setattr(cuda_block, "_streams", lambda _, count: [None] * count)
    return kernels


def test_large_blocks_are_visited_by_triton_and_dk_and_dv_are_sums_over_lists(started: list[str]) -> None:
    """Positions before, within and after a block; a row that selects nothing."""
    q, k, v = rows(S=40, G=1, h=3, S_kv=600)
    at = torch.randint(600, (40,), generator=torch.Generator().manual_seed(0))
    at[:3] = torch.tensor([3, 255, 256])
    ranges = make_blocks(1, 40, 1, 600, 2, 256).ranges
    ranges[:, 7] = 0
    check(cuda_block, call_of(q, k, v, Selection(ranges, 256), at))
    assert started == ["dkdv_groups.cu"]


def test_lists_of_large_blocks_that_do_not_fit_are_of_a_pair_each_or_of_triton(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the lists has 2 entries, one for each of its blocks."""
    q, k, v = rows(S=20, G=2, h=1, S_kv=300)
    for most, kernels in ((2 * 20 * 2, 1), (20 * 2, 2), (20 * 2 - 1, 0)):
        monkeypatch.setattr(key_to_rows, "fit", lambda _, entries, most=most: entries <= most)
        check(cuda_block, call_of(q, k, v, make_blocks(1, 20, 2, 300, 2, 256)))
        assert started == ["dkdv_groups.cu"] * kernels
        started.clear()


def test_a_selection_serves_calls_of_other_heads(started: list[str]) -> None:
    """Fewer heads, more tokens in 64 rows: other tiles are shared, or none."""
    selection = make_blocks(1, 20, 1, 600, 6, 64)
    for h in (16, 4):
        check(cuda_block, call_of(*rows(S=20, G=1, h=h, S_kv=600), selection))
    assert started == [*FORWARD, *BACKWARD, *WITHOUT_SHARES]


@pytest.mark.parametrize(("h", "Dk", "Dv"), [(16, 128, 64), (4, 64, 128), (3, 64, 64)])
def test_blocks_of_128_keys_are_visited_whole_forward(started: list[str], h: int, Dk: int, Dv: int) -> None:
    """Positions before, within and after each half of a block; a row that selects nothing; NaN in keys that no row sees."""
    q, k, v = rows(S=40, G=1, h=h, Dk=Dk, Dv=Dv, S_kv=600)
    at = torch.randint(600, (40,), generator=torch.Generator().manual_seed(0)).sort().values
    at[:8] = torch.tensor([3, 63, 64, 127, 128, 129, 190, 192])
    ranges = make_blocks(1, 40, 1, 600, 4, 128).ranges
    ranges[:, 7] = 0
    for q_pos in (at, None):
        results = check(cuda_block, call_of(q, k, v, Selection(ranges, 128), q_pos))[:2]
        nan = torch.where(unused_keys(q, k, ranges, q_pos).unsqueeze(-1), torch.nan, 0.0).half()
        poisoned = cuda_block.forward(call_of(q, k + nan, v + nan, Selection(ranges, 128), q_pos))
        assert all(map(torch.equal, poisoned, results))
    assert started.count("block_partials.cu") == 4
    assert started.count("join_partials.cu") == (0 if 64 % h else 4)


def test_sections_segments_and_lists_without_rows(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    """Sums over sections of rows, in registers where a list has one segment; segments of a few entries; tiles that nobody selects."""
    for module, name, value in ((key_to_rows, "SHORTEST", 4), (cuda_block, "SEGMENTS_PER_SM", 16), (cuda_block, "LEAST_HEADS", 4)):
        monkeypatch.setattr(module, name, value)
    plans = calls_of(monkeypatch, cuda_block, "_order")
    q, k, v = rows(S=40, G=2, h=4, S_kv=500)
    ranges = make_blocks(1, 40, 2, 500, 3, 64).ranges
    check(cuda_block, call_of(q, k, v, Selection(ranges, 64)))
    monkeypatch.setattr(cuda_block, "L2_BYTES", 20_000)
    check(cuda_block, call_of(q, k, v, Selection(ranges, 64)))
    few = torch.where(torch.arange(40)[:, None, None, None] < 22, 0, ranges)
    check(cuda_block, call_of(q, k, v, Selection(few, 64), workspace_bytes=300_000))
    assert [sizes[:3] for _, _, *sizes in plans] == [[40, 2, 8], [16, 2, 4], [16, 1, 16]]
    for kernel in ("block_partials.cu", "join_partials.cu"):
        assert started.count(kernel) == 1 + 6 + 6  # a pair at a time, where there are several units
    for kernel in BACKWARD:
        assert started.count(kernel) == 1 + 3 + 6


def test_rows_of_more_entries_than_a_mask_has_bits(started: list[str]) -> None:
    """Without a mask, whose shift by an entry's number ends the emulation."""
    q, k, v = rows(S=2, G=1, h=16, S_kv=66 * 64)
    selection = make_blocks(1, 2, 1, 66 * 64, 66, 64)
    assert_forward(cuda_block.forward(call_of(q, k, v, selection)), q, k, v, selection.ranges)
    assert started == ["block_partials.cu"]


def test_copies_of_expanded_rows_and_keys_stay_until_the_last_kernel(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    copies, loadable, start = [], sm90.loadable, launch.start
    by_tma = {"block_partials.cu", "join_partials.cu", "block_gradients.cu", "join_shares.cu"}

    def copied(x: Tensor) -> Tensor:
        copies.append(weakref.ref(found := loadable(x)))
        return found

    def asserted(source: str, *rest: Any, **own: Any) -> None:
        assert source not in by_tma or all(copy() is not None for copy in copies[-4:])
        start(source, *rest, **own)

    monkeypatch.setattr(sm90, "loadable", copied)
    monkeypatch.setattr(launch, "start", asserted)
    q, k, v = rows(B=2, S=10, G=2, S_kv=300)
    given = q[:1].expand(2, -1, -1, -1, -1), k[:, :1].expand(-1, 2, -1, -1), v[:1].expand(2, -1, -1, -1)
    check(cuda_block, call_of(*given, make_blocks(2, 10, 2, 300, 3, 64)))
    assert started == WITHOUT_SHARES
    assert len(copies) == 3 + 4


def test_a_launch_that_fails_waits_for_the_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may still write the partials, whose memory is free when the call ends."""
    monkeypatch.setattr(cuda_block, "L2_BYTES", 20_000)  # sections of 16 rows
    emulated(monkeypatch)
    start, stream, waited = launch.start, object(), []

    def fails(source: str, *rest: Any, **own: Any) -> None:
        if source == "join_partials.cu":
            raise RuntimeError("no such kernel")
        start(source, *rest, **own)

    class Current:
        wait_stream = waited.append

    monkeypatch.setattr(launch, "start", fails)
    monkeypatch.setattr(cuda_block, "_streams", lambda _, count: [None, stream])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Current)
    call = call_of(*rows(S=40, S_kv=200), make_blocks(1, 40, 2, 200, 3, 64))
    with pytest.raises(RuntimeError, match="no such kernel"):
        cuda_block.forward(call)
    assert waited == [stream]


# e4m3

OF_PAGES: dict[str, Any] = {"each": "page", "page_size": 64, "dtype": torch.bfloat16, "Dk": 128, "Dv": 64}
OF_MANY_HEADS = {**OF_PAGES, "G": 1, "h": 17, "n": 5, "room": 640, "lengths": (37, 640)}  # an odd number of keys in a step
OF_TOKENS = {"S_q": 4, "room": 640, "lengths": (2, 600)}  # each token has blocks that others have not
OF_HEADS: dict[str, Any] = {"each": "head", "page_size": None, "dtype": torch.float16, "Dk": 64, "Dv": 128}


def quantized(**sizes: Any) -> QuantizedCache:
    """NaN wherever no sequence has a key, as a number and as a page's scale."""
    return make_quantized(**{"h": 3, "block": 64, "lengths": (0, 1, 150), **sizes})


def of_quantized(given: QuantizedCache, sm_count: int) -> Call:
    """More multiprocessors than a row for each: a cluster shares a row, and each token has its own."""
    return cache_call(given.cache, msgspec.structs.replace(GPU, sm_count=sm_count), given.scales)


@pytest.mark.parametrize(
    ("sizes", "sm_count", "kernel"),
    [
        (OF_HEADS, 2, "forward_blocks.cu"),
        (OF_MANY_HEADS, 4, "forward_blocks.cu"),
        ({**OF_HEADS, **OF_TOKENS, "S_q": 5, "h": 8}, 2, "forward_tokens.cu"),
    ],
)
def test_e4m3_in_any_order_of_threads(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any], sm_count: int, kernel: str) -> None:
    given, found = quantized(**sizes), []
    for mode in (0, BACKWARDS | EAGER):
        emulated(monkeypatch, mode)
        started = noted(monkeypatch)
        with new_memory_is_nan():
            found.append(cupy_cuda.forward(of_quantized(given, sm_count)))
        assert started == [kernel]
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("sm_count", "kernel"), [(2, "forward_tokens.cu"), (16, "forward_blocks.cu"), (64, "forward_blocks.cu")])
@pytest.mark.parametrize("name", ["k_scale", "v_scale", "v_cache"])
def test_nan_never_reaches_rows_that_select_nothing(monkeypatch: pytest.MonkeyPatch, name: str, sm_count: int, kernel: str) -> None:
    """In a scale, or in a value that other tokens of the sequence select."""
    emulated(monkeypatch)
    started = noted(monkeypatch)
    given = quantized(**{**OF_HEADS, **OF_TOKENS, "G": 1, "lengths": (300, 600)})
    ranges = given.cache.selection.ranges.clone()
    ranges[0, 0] = 0
    given = given.replaced(selection=Selection.from_ranges(ranges, 64, disjoint=True))
    if name == "v_cache":
        given.cache.v_cache[0, :64, 0, 3] = torch.nan
    else:
        given.scales[name].fill_(torch.nan)
    o, lse = cupy_cuda.forward(of_quantized(given, sm_count))
    assert set(started) == {kernel}
    assert bool((o[0, 0] == 0).all())
    assert bool((lse[0, 0] == -torch.inf).all())
    assert bool(o[0, 1:].isnan().any())
