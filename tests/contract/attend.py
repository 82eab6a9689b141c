"""Checks of `selection_attention` that every backend must pass, each for one lane and shape. `cells` lists which run where.

Each check compares with the float64 oracle (at most twice the error of PyTorch in the same precision) and asserts that the decision names
the backend (tests/helpers/checks.py). Keys and values lie between NaN in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.bench.core.cases import PERFORMANCE, make_inputs, make_selection
from nsa_sel.core import registry
from nsa_sel.core.call import device_info
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.testing import Shape, check_implementation, edge_ranges, new_memory_is_nan
from tests.contract.lanes import Lane, lanes, parameters
from tests.helpers.cases import (
    DISTRIBUTIONS,
    assert_forward,
    assert_gradients,
    cut_spans,
    make_blocks,
    make_qkv,
    make_spans,
    oracle_forward,
)
from tests.helpers.checks import (
    attend,
    both_passes,
    check_both,
    check_deterministic,
    check_empty_rows,
    check_forward,
    check_one_row,
    results_of,
    rows_with_holes,
    selected,
    through,
)
from tests.helpers.gpus import RERUNS, captured, no_waiting, one_at_a_time, replayed
from tests.helpers.varlen_cases import attend_varlen, check_varlen, pack, seen_keys

GUARD = 16  # keys of NaN before and after those of a call
FAR = -(2**62)  # a position that 32 bits do not hold


def guarded(x: Tensor) -> Tensor:
    """The same keys [B,G,S_kv,D] as a view of a larger tensor, with NaN before and after them."""
    return torch.nn.functional.pad(x.detach(), (0, 0, GUARD, GUARD), value=torch.nan)[:, :, GUARD:-GUARD].requires_grad_(x.requires_grad)


def tensors(lane: Lane, shape: Shape, S: int, S_kv: int, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    sizes = {"B": 1, "G": 1, "dtype": lane.dtype, **sizes}
    q, k, v = make_qkv(S=S, h=shape.h, Dk=shape.Dk, Dv=shape.Dv, S_kv=S_kv, device=lane.place, **sizes)
    return q, guarded(k), guarded(v)


def check_edges(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Empty, inverted, padded, unsorted, overlapping, negative and far ranges; then rows that all select nothing."""
    S = lane.rows(shape) if lane.device != "interpreter" else 20
    S_kv = S + 3 * (shape.block or 8) + 6
    q, k, v = tensors(lane, shape, S, S_kv)
    ranges = edge_ranges(shape.block, S, S_kv).to(lane.place)
    check_both(lane.name, q, k, v, Selection(ranges, shape.block))
    nothing = Selection(torch.zeros_like(ranges[..., :2, :]).int(), shape.block)
    check_both(lane.name, q, k, v, nothing)


def check_contract(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Check the cell with `nsa_sel.testing`, as any other implementation."""
    report = check_implementation(
        partial(nsa_sel.selection_attention, backend=lane.name), shapes=[shape], dtypes=[lane.dtype], device=lane.place
    )
    assert report.holds, str(report)
    assert nsa_sel.decisions()[-1].backward == lane.name


def check_promised(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Ranges that are promised to be disjoint are passed as they are: the kernels clamp them. And single ranges."""
    S = lane.rows(shape) if lane.device != "interpreter" else 18
    S_kv = S + 3 * (shape.block or 8) + 6
    q, k, v = tensors(lane, shape, S, S_kv)
    ranges = edge_ranges(shape.block, S, S_kv, disjoint=True).to(lane.place)
    check_both(lane.name, q, k, v, Selection(ranges, shape.block, disjoint=True), with_lse=False)
    first = ranges[..., :1, :].contiguous()
    check_both(lane.name, q, k, v, Selection(first, shape.block))


def check_positions(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Any order, more rows in one list than a step or a key tile has, positions past the last key and far before the first."""
    many = {"interpreter": 8 if lane.backend.shares == "rows" else 150, "emulated": 30 if shape.Dk < 64 else 100}
    S, block = many.get(lane.device, 300), shape.block
    S_kv = 4 * (block or 16) + 5
    generator = torch.Generator().manual_seed(3)
    q_pos = torch.randint(0, S_kv, (1, S), generator=generator)
    far = 0
    if S > 128:  # the rows that see most are behind the first 128 of a long piece of a list
        far = 128
        q_pos[0, :far] = torch.randint(0, 8, (far,), generator=generator)
        q_pos[0, -1] = 2
        patch.setattr("nsa_sel.backends._triton.units.SHORTEST", 256)
    q_pos[0, far : far + 4] = torch.tensor([-1, FAR, 0, S_kv + 1000])  # the last one selects keys that do not exist
    patch.setattr("nsa_sel.core.check.check_positions", lambda q_pos, *others: q_pos)  # as on a GPU, which is not read
    h = 1 if S == 150 and block and not (lane.backend.tiles or block < 16) else shape.h  # the interpreter takes its time
    shape = shape._replace(h=h)
    q, k, v = tensors(lane, shape, S, S_kv)
    if block is None:
        ranges = make_spans("mixed", 1, S, 1, S_kv, 30, device=lane.place)
        ranges[:, far + 3, :, -1] = torch.tensor([S_kv - 3, S_kv + 40])
        selection = Selection.from_ranges(ranges)
    else:
        blocks = torch.stack((torch.zeros(S), torch.arange(S) % 4 + 1), -1)[None, :, None].int()
        selection = Selection.from_blocks(blocks.to(lane.place), block)
    check_both(lane.name, q, k, v, selection, q_pos=q_pos.to(lane.place))


def check_reuse(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """A selection that served other positions, heads and numbers of keys, or ranges that were written since, gives what a new one gives."""
    (q, k, v), kept = problem(lane, shape)
    S, S_kv = q.shape[1], k.shape[2]
    early = torch.arange(S, device=lane.place)
    fewer = S_kv - (shape.block or 8)
    attend(lane.name, q, k[:, :, :fewer], v[:, :, :fewer], kept)
    _same(lane, (q, k, v), kept, None)
    for positions in (early, early.flip(0)) if lane.slow else (early, early.flip(0), None):
        _same(lane, (q, k, v), kept, positions)
    if not lane.slow:
        _same(lane, (q[..., :1, :], k, v), kept, early)
    kept.ranges.copy_(selection_of(lane, shape, S, S_kv, seed=5).ranges)
    _same(lane, (q, k, v), kept, None)


def _same(lane: Lane, qkv: tuple[Tensor, ...], kept: Selection, q_pos: Tensor | None) -> None:
    fresh = Selection(kept.ranges.clone(), kept.block_size)
    runs = [results_of(lane.name, *qkv, selection, q_pos) for selection in (kept, fresh)]
    assert all(map(torch.equal, *runs))


def check_one_group(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """A selection of one group for all groups, one that served a single group before, gives the bits of its ranges for each of them."""
    (q, k, v), one = problem(lane, shape, G=3)
    each = Selection(one.ranges.expand(-1, -1, 3, -1, -1).contiguous(), one.block_size)
    if lane.device != "emulated":
        attend(lane.name, q[:, :, :1], k[:, :1], v[:, :1], one)
    assert all(map(torch.equal, results_of(lane.name, q, k, v, one), results_of(lane.name, q, k, v, each)))
    check_both(lane.name, q, k, v, one)
    last = Selection(one.ranges[:, -1:].contiguous(), one.block_size)
    check_forward(lane.name, q[:, -1:], k, v, last)


def selection_of(lane: Lane, shape: Shape, S: int, S_kv: int, n: int = 3, **how: Any) -> Selection:
    if shape.block is None:
        return Selection.from_ranges(make_spans("few", 1, S, 1, S_kv, 10, device=lane.place, **how))
    return make_blocks(1, S, 1, S_kv, n, shape.block, device=lane.place, **how)


def problem(lane: Lane, shape: Shape, S: int | None = None, more: int = 0, seed: int = 0, **sizes: Any) -> tuple[Any, Selection]:
    """Return q, k, v and a selection of the usual size: two blocks, and `more`, before the rows."""
    S = S or lane.rows(shape)
    S_kv = S + 2 * (shape.block or 8) + more
    return tensors(lane, shape, S, S_kv, seed=seed, **sizes), selection_of(lane, shape, S, S_kv, seed=seed)


def check_poison(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Rows that select nothing and keys that nobody sees may hold anything; a row that selects something spoils no other; and reruns in
    new memory are bit-equal."""
    S = max(8, lane.rows(shape))
    block = shape.block or 16
    S_kv = -(-max(6 * block, S, 140) // block) * block + 3 * block // 4
    q, k, v = tensors(lane, shape, S, S_kv)
    selection, row = rows_with_holes(1, S, 1, S_kv, block, 2, device=lane.place)
    selection = Selection(selection.ranges, shape.block)
    run, mask = through(lane.name, selection), selected(selection, q, k)
    few = {"interpreter": ("nan", "huge"), "emulated": ("nan",)}.get(lane.device, ("nan", "inf", "negative", "huge"))
    check_empty_rows(run, q, k, v, mask, dict.fromkeys(few, ("all",)))
    check_one_row(run, q, k, v, mask, row, few[:1] if lane.slow else ("nan", "inf", "huge"), reach=max(64, block))


def check_packed(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Sequences end to end, empty ones among them, other numbers of keys than of rows, and padding of NaN."""
    if not lane.slow:
        lengths = ((9, 0, 1, 70), None), ((5, 1, 30, 0), (40, 17, 30, 3))
    elif lane.device == "emulated":
        lengths = ((3, 0, 1, 55) if shape.Dk >= 64 else (3, 0, 1, 9), None), ((2, 1, 3), (21, 16, 9))
    else:
        lengths = ((3, 0, 1, 5), None), ((2, 1, 3), (21, 16, 9))
    for rows, keys in lengths:
        packed = pack(
            rows, keys, block_size=shape.block, n=2, h=shape.h, Dk=shape.Dk, Dv=shape.Dv, spare=2, dtype=lane.dtype, device=lane.place
        )  # fmt: skip
        check_varlen(lane.name, packed)
    unseen, padding = ~seen_keys(packed), torch.arange(len(packed.q)) >= packed.cu_q[-1]
    clean, spoilt = packed[:3], (packed.q.clone(), packed.k.clone(), packed.v.clone())
    spoilt[0][padding] = torch.nan
    for x in spoilt[1:]:
        x[unseen] = torch.nan
    do = (~padding).to(packed.q)[:, None, None, None].expand(*packed.q.shape[:3], shape.Dv)
    with new_memory_is_nan():
        results = [both_passes(lambda *qkv: attend_varlen(lane.name, packed, *qkv), given, do) for given in (clean, spoilt)]
    assert all(map(torch.equal, *results))


def check_graph(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """A replay follows what was written in place since the capture (on a CPU, where a rerun stands in for it, the checks themselves);
    reruns are bit-equal."""
    qkv, kept = problem(lane, shape)
    static, do = [x.clone() for x in qkv], torch.randn(*qkv[0].shape[:-1], shape.Dv).to(qkv[0])
    graph, outputs = captured(lambda: _pass(lane, static, kept, do), lane.place)
    for seed in (1, 2):
        others, selection = problem(lane, shape, seed=seed)
        for old, new in zip((*static, kept.ranges), (*others, selection.ranges), strict=True):
            old.copy_(new)
        wanted = _pass(lane, others, selection, do)
        assert all(map(torch.equal, replayed(graph, outputs, RERUNS), wanted))


def _pass(lane: Lane, qkv: Any, selection: Selection, do: Tensor) -> tuple[Tensor, ...]:
    return both_passes(lambda *qkv: attend(lane.name, *qkv, selection), qkv, do)


def check_many_rows(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """More tiles, lists and units than multiprocessors, on a GPU; reruns are bit-equal."""
    S, G = 1400, 8 if shape.h < 16 else 2
    q, k, v = make_qkv(1, S, G, shape.h, shape.Dk, shape.Dv, S_kv=S + 100, dtype=lane.dtype, device=lane.place)
    selection = make_blocks(1, S, G, S + 100, min(7, 1500 // (shape.block or 16)), shape.block or 16, device=lane.place)
    check_both(lane.name, q, k, v, selection)
    check_deterministic(lane.name, q, k, v, selection, RERUNS)


def check_many_keys(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """2,500 keys, of which a row selects more ranges than a warp has lanes; the union of a tile has more blocks, too."""
    tiles = lane.device == "emulated" and shape.Dk >= 64
    S, S_kv = lane.rows(shape) if tiles else 3 if lane.slow else 150, 2500
    block = shape.block or 16
    q, k, v = tensors(lane, shape, S, S_kv)
    selection = make_blocks(1, S, 1, S_kv, 5 if tiles else min(40, S_kv // block), block, device=lane.place)
    check_both(lane.name, q, k, v, Selection(selection.ranges, shape.block, disjoint=True))


def check_workspace(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """A caller's workspace, filled with NaN, changes no bit and holds no result."""
    qkv, selection = problem(lane, shape)
    workspace = torch.full((1 << (28 if lane.device == "cuda" else 23),), 0xFF, dtype=torch.uint8, device=lane.place)
    call = partial(nsa_sel.selection_attention, selection=selection, return_lse=True, backend=lane.name)
    runs = [both_passes(partial(call, workspace=buffer), qkv) for buffer in (None, workspace)]
    assert {decision.backward for decision in nsa_sel.decisions()[-2:]} == {lane.name}
    workspace.fill_(0xFF)
    assert all(map(torch.equal, *runs))


def check_autocast(lane: Lane, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Under autocast a call of float32 computes in its dtype, and gradients come back in float32."""
    shape = lane.shapes()[-1]
    qkv, kept = problem(lane, shape, min(40, lane.rows(shape)), dtype=torch.float32)
    results = []
    for cast in (True, False):
        inputs = [x.detach().requires_grad_() for x in qkv]
        given = inputs if cast else [x.to(dtype) for x in inputs]
        with torch.autocast(lane.place, dtype, enabled=cast):
            o, lse = attend(lane.name, *given, kept)
        assert (o.dtype, lse.dtype) == (dtype, torch.float32)
        results.append((o.detach(), lse.detach(), *torch.autograd.grad(o, inputs, torch.ones_like(o))))
    assert all(x.dtype == torch.float32 for x in results[0][2:])
    assert all(map(torch.equal, *results))


def check_growing(lane: Lane, h: int, patch: pytest.MonkeyPatch) -> None:
    """One graph serves all steps of a generation: token, position and selection are written in place. Later keys hold NaN."""
    shape = lane.shapes()[-1]._replace(h=h)
    block, first, steps = shape.block or 16, 100, 4
    room = -(-(first + steps) // block) * block
    q, new_k, new_v = make_qkv(1, room, 1, h, shape.Dk, shape.Dv, dtype=lane.dtype, device=lane.place)
    k, v, row = torch.full_like(new_k, torch.nan), torch.full_like(new_v, torch.nan), q[:, 0].clone()
    q_pos = torch.zeros(1, dtype=torch.int32, device=lane.place)
    kept = Selection.from_blocks(torch.full((1, 1, 1, 2), -1, dtype=torch.int32, device=lane.place), block)

    def step() -> tuple[Tensor, ...]:
        return attend(lane.name, row, k, v, kept, q_pos=q_pos)

    graph, outputs = captured(step, lane.place)
    for t in range(first, first + steps):
        k[:, :, : t + 1], v[:, :, : t + 1] = new_k[:, :, : t + 1], new_v[:, :, : t + 1]
        row.copy_(q[:, t])
        q_pos.fill_(t)
        kept.ranges.copy_(Selection.from_blocks(torch.tensor([0, t // block]).expand(1, 1, 1, 2), block).ranges)
        found = replayed(graph, outputs)
        assert all(map(torch.equal, found, step()))
        o, lse = (x.unsqueeze(1) for x in found)
        assert_forward((o, lse), row.unsqueeze(1), k[:, :, : t + 1], v[:, :, : t + 1], kept.ranges)


def check_host(lane: Lane, what: str, patch: pytest.MonkeyPatch) -> None:
    """A training step never waits for the GPU, nor does a capture with flags of debugging; replays allocate nothing."""
    shape = lane.shapes()[-1]
    qkv, kept = problem(lane, shape)
    do = torch.randn(*qkv[0].shape[:-1], shape.Dv).to(qkv[0])
    if what == "debug":
        for flag in ("NSA_DEBUG_TRITON", "NSA_DEBUG_COMPARE", "NSA_DEBUG_TIMING"):
            patch.setenv(flag, "1")
    wanted = _pass(lane, qkv, kept, do)
    if what == "eager":
        with no_waiting():
            again = _pass(lane, qkv, Selection(kept.ranges.clone(), shape.block), do)
        assert all(map(torch.equal, again, wanted))
        return
    graph, outputs = captured(lambda: _pass(lane, qkv, kept, do), lane.place)
    assert all(map(torch.equal, replayed(graph, outputs), wanted))
    if lane.device != "cuda":
        return
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for count in ("allocation.all.allocated", "allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries"):
        assert after[count] == before[count], count
    assert all(map(torch.equal, outputs, wanted))


def check_large(lane: Lane, what: str, patch: pytest.MonkeyPatch) -> None:
    """Offsets past 2^31 elements: the last rows of q, or all rows over the last keys, give what they give alone."""
    D, block = (256, 4) if what == "small-blocks" else (128, 64)
    B, G, h, S, first = (2 if what == "small-blocks" else 1), 4, 16, 64, 0
    S_kv = 2**31 // (B * G * h * D) + S
    if what == "keys":
        G, h, S, S_kv = 1, 4, 200, 2**31 // D + 8192
        first = S_kv // block * block - 4096
    with one_at_a_time():
        q = torch.randn(B, S if what == "keys" else S_kv, G, h, D, dtype=lane.dtype, device="cuda")
        k, v = (torch.randn(B, G, S_kv, D, dtype=lane.dtype, device="cuda") for _ in range(2))
        assert max(q.numel(), k.numel()) > 2**31
        own = torch.arange(S_kv - q.shape[1], S_kv, device="cuda", dtype=torch.int32) // block
        blocks = torch.stack((torch.full_like(own, first // block), own - 1, own), -1).clamp(min=0)[None, :, None].expand(B, -1, G, 3)
        do = torch.zeros_like(q)  # but of the last rows: k and v then have the gradients of these rows alone
        do[-1, -S:].normal_()

        def results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
            return both_passes(lambda *qkv: attend(lane.name, *qkv, Selection.from_blocks(blocks.contiguous(), block)), (q, k, v), do)

        rows, keys = slice(-S, None), slice(first, None)
        found = results(q, k, v, do, blocks)
        found = (*(x[-1:, rows] for x in found[:3]), *(x[-1:, :, keys] for x in found[3:]))
        alone = q[-1:, rows], k[-1:, :, keys], v[-1:, :, keys], do[-1:, rows], blocks[-1:, rows] - first // block
        for mine, other in zip(found, results(*(x.clone() for x in alone)), strict=True):
            mine, other = mine.double(), other.double()  # of another tile, or section of rows: bf16 may round to its neighbor
            assert float((mine - other).norm() / other.norm()) < 1e-2


def large_of(lane: Lane) -> list[str]:
    """Return the tensors that are to be large, on a GPU."""
    if lane.device != "cuda" or "bfloat16" not in lane.limits.dtypes["cuda"]:
        return []
    gathers = lane.backend.tiles is not None and bool(lane.backend.tiles.gathered_blocks)
    return ["keys", *["rows"] * (not lane.backend.slow), *["small-blocks"] * gathers]


def check_memory(lane: Lane, case: str, patch: pytest.MonkeyPatch) -> None:
    """A training step's peak is at most 5% above inputs, outputs and the bound on workspace together."""
    problem = next(x for x in PERFORMANCE if x.case == case)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    selection = make_selection(problem, "cuda")
    q, k, v, do = make_inputs(problem, "cuda")
    inputs = torch.cuda.memory_allocated() - before
    for x in (q, k, v):
        x.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    o, lse = attend(lane.name, q, k, v, selection)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    peak = torch.cuda.max_memory_allocated() - before
    outputs = sum(x.numel() * x.element_size() for x in (o, lse, *gradients))
    bound = settings_for(device_info(q.device)).workspace_bytes
    assert peak <= 1.05 * (inputs + outputs + bound), f"{peak} bytes for {inputs} of inputs, {outputs} of outputs, {bound} of workspace"


SHAPED: dict[str, Callable[[Lane, Shape, pytest.MonkeyPatch], None]] = {
    "contract": check_contract,
    "edges": check_edges,
    "promised": check_promised,
    "positions": check_positions,
    "reuse": check_reuse,
    "one-group": check_one_group,
    "poison": check_poison,
    "packed": check_packed,
    "graph": check_graph,
    "many-keys": check_many_keys,
    "many-rows": check_many_rows,
    "workspace": check_workspace,
}

# Where every pass takes a second: what does not depend on the kernel family is tested with few.
FEW: dict[str, dict[str, int]] = {
    "emulated": {"one-group": 2, "graph": 0, "workspace": 1, "packed": 2, "reuse": 1, "many-rows": 0},
    "interpreter": {"one-group": 2, "graph": 0, "workspace": 1, "many-keys": 1, "many-rows": 0},
    "cpu": {"many-rows": 0},
    "key-tiles": {"poison": 0, "packed": 0},  # which packed SDPA takes where all keys are finite
}


def shapes_of(behavior: str, lane: Lane) -> list[Shape]:
    """Return the shapes of a lane, the last ones alone where a behavior takes few."""
    shapes = lane.shapes()
    if behavior == "contract":
        return [] if lane.slow else shapes[:1]
    if behavior == "many-keys" and lane.name == registry.fallback():  # it has no lists or steps that could end at the 32nd
        return []
    if behavior == "many-rows":  # of kernels that are persistent, or have units
        shapes = [shape for shape in shapes if shape.Dk >= 64 and (lane.backend.tiles or lane.backend.shares != "rows")]
    if lane.device == "emulated" and behavior in ("reuse", "poison", "many-keys"):
        shapes = [shape for shape in shapes if shape.h > 1 and (behavior != "many-keys" or shape.block in (None, 64))]
    return shapes[max(0, len(shapes) - FEW.get(lane.device, {}).get(behavior, len(shapes))) :]


# Each lane tests these itself.
HEADS_AND_DIMS = ((1, 8, 16), (3, 24, 40), (6, 16, 8), (12, 192, 128), (16, 64, 64), (70, 8, 8), (2, 256, 256), (6, 7, 13))
EMULATED = ((1, 16, 24), (16, 16, 24), (70, 16, 24), (2, 192, 136))  # others are compiled anew


def sizes_of(lane: Lane) -> list[Shape]:
    """Return every number of heads, and head dims that the limits allow."""
    block = next(size for size in (16, 64) if lane.limits.takes_block(size))
    if lane.device == "emulated" and lane.limits.block_aligned_only:
        return [Shape(1, 64, 64, 64), Shape(8, 64, 64, 64), Shape(16, 128, 128, 128)]
    sizes = EMULATED if lane.device == "emulated" else HEADS_AND_DIMS
    # Heads that are programs of their own, or whose sums packed SDPA adds in another order than its baseline, in float32.
    few = 64 if (lane.backend.slow and lane.slow) or (lane.name == registry.fallback() and lane.kind == "cpu") else 1000
    found = [shape for size in sizes if size[0] <= few and lane.takes(shape := Shape(*size, block))]
    return [*found, Shape(12, 256, 256, 4), Shape(5, 192, 64, 64)] if lane.device == "emulated" else found  # gathered, and wide keys


def check_size(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Heads and head dims, over a batch of two, as a [B,S_kv,G,D] cache has them."""
    tiles = 24 if shape.block is not None and lane.kind == "cuda" and shape.Dk in (192, 256) and shape.h > 2 else 6
    S = {"interpreter": 3, "emulated": tiles}.get(lane.device, 140 if lane.kind == "cuda" else 30 if shape.h < 70 else 8)
    S_kv = S + 3 * (shape.block or 8) - 4
    q, k, v = make_qkv(2, S, 2, shape.h, shape.Dk, shape.Dv, S_kv=S_kv, dtype=lane.dtype, device=lane.place)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    check_both(lane.name, q, k, v, make_blocks(2, S, 2, S_kv, 3, shape.block or 8, device=lane.place))


LAYOUTS = ("wide", "shared-by-sequences", "shared-by-groups", "groups-that-select-for-themselves", "heads-first")


def check_layouts(lane: Lane, what: str, patch: pytest.MonkeyPatch) -> None:
    """Views of wider tensors, a cache's layout, keys that sequences or groups share, and expanded or transposed ranges and gradients."""
    shape = lane.shapes()[-1]
    S = 10 if lane.slow else 20
    S_kv, B, G, block = S + 4 * (shape.block or 8), 2, 2, shape.block or 8
    q, k, v = make_qkv(B, S, G, shape.h, shape.Dk, shape.Dv, S_kv=S_kv, dtype=lane.dtype, device=lane.place)
    selection = make_blocks(B, S, G, S_kv, 2, block, device=lane.place)
    do = torch.ones_like(v[:, :1, :1, None]).expand(B, S, G, shape.h, shape.Dv)
    if what == "wide":
        q, k, v = (torch.cat((x, x, x), -1)[..., x.shape[-1] : -x.shape[-1]] for x in (q, k, v))
        do = torch.ones((), dtype=lane.dtype, device=lane.place).expand_as(do)
    elif what == "shared-by-sequences":
        k, v = (x[:1].expand(B, -1, -1, -1) for x in (k, v))
    elif what == "shared-by-groups":
        k, v = (x[:, :1].expand(-1, G, -1, -1) for x in (k, v))
        q = q[:1].expand(B, -1, -1, -1, -1)
    elif what == "groups-that-select-for-themselves":
        k, v = k[:, :1], v[:, :1]
    else:
        q, do = (x.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4) for x in (q, do))
        selection = Selection(selection.ranges.transpose(0, 1).contiguous().transpose(0, 1), block)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = attend(lane.name, *inputs, selection)
    assert_forward((o, lse), *inputs, selection.ranges)
    assert_gradients(torch.autograd.grad(o, inputs, do), *inputs, selection.ranges, do)


def check_dtype(lane: Lane, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Spans and blocks in each dtype that the limits name; products above the largest float16 number."""
    for shape in lane.shapes()[:2] if lane.slow else lane.shapes():
        (q, k, v), selection = problem(lane, shape, more=3, dtype=dtype)
        check_both(lane.name, q, k, v, selection)
    o, lse = attend(lane.name, 300 * q, 300 * k, v, selection)
    assert bool(o.isfinite().all())
    assert bool(lse.isfinite().all())


def check_scale(lane: Lane, scale: float, patch: pytest.MonkeyPatch) -> None:
    """0, negative ones and 1e9; rows that select nothing among others; heads with equal queries are equal."""
    for dtype in (lane.dtype, torch.float16) if lane.device == "interpreter" and scale > 1e4 else (lane.dtype,):
        _check_scale(lane, scale, dtype)


def _check_scale(lane: Lane, scale: float, dtype: torch.dtype) -> None:
    shape = lane.shapes()[-1] if lane.device == "emulated" else lane.shapes()[0]
    (q, k, v), selection = problem(lane, shape, min(20, lane.rows(shape)), more=3, dtype=dtype)
    ranges, q = selection.ranges.clone(), q[..., :1, :].expand_as(q).contiguous()
    ranges[:, 1::3] = 0
    selection = Selection(ranges, shape.block)
    o, lse = attend(lane.name, q, k, v, selection, scale=scale)
    exact = nsa_sel.oracle.oracle_forward(q, k, v, ranges, scale)
    tolerance = 2e-3 if dtype.itemsize == 2 else 2e-6
    close = {"atol": tolerance, "rtol": tolerance * (1 if abs(scale) < 2 else 10)}
    if abs(scale) < 2:
        torch.testing.assert_close(o.cpu().double(), exact[0], **close)
    assert int(torch.count_nonzero(o[:, 1::3])) == 0
    assert bool((lse[:, 1::3] == -torch.inf).all())
    if lane.device != "emulated" and dtype.itemsize == 2 and abs(scale) > 1e4:  # docs/contract.md, "Large logits"
        return
    torch.testing.assert_close(lse.cpu().double(), exact[1].clamp(max=torch.finfo(torch.float32).max), **close)
    assert torch.equal(o, o[..., :1, :].expand_as(o))


def check_decode(lane: Lane, B: int, patch: pytest.MonkeyPatch) -> None:
    """One row of each sequence, as the last of a prefill: split rows, and NaN in what nobody reads."""
    for shape in lane.shapes()[:2] if lane.device == "emulated" else lane.shapes():
        S_kv = 200 if lane.slow else 1000
        q, k, v = tensors(lane, shape, 1, S_kv, B=B)
        block = shape.block or 16
        ranges = make_blocks(B, 1, 1, S_kv, min(9, S_kv // block), block, device=lane.place).ranges
        ranges[:1, :, :, 1:2] = 0
        selection = Selection(ranges, shape.block, disjoint=True)
        check_both(lane.name, q, k, v, selection)
        whole = attend(lane.name, q, k, v, selection)
        decoded = attend(lane.name, q[:, 0], k, v, Selection.from_ranges(ranges[:, 0], shape.block, disjoint=True))
        assert all(torch.equal(x, y[:, 0]) for x, y in zip(decoded, whole, strict=True))


def check_repeats(lane: Lane, S: int, patch: pytest.MonkeyPatch) -> None:
    """Block indices of few rows without a promise: unsorted, with duplicates, padding and blocks past the end in any position, of 32 and
    of 64 bits. A graph reads those that its replay has. Reruns give the same bits."""
    for shape in (shape for shape in lane.shapes() if shape.block):
        block = shape.block or 1
        for n, dtype in ((5, torch.int64), (34, torch.int32)) if not lane.slow or S == 1 else ((5, torch.int32),):
            q, k, v = tensors(lane, shape, S, n * block + 3, B=2)
            sets = [
                torch.randint(-2, n + 3, (2, S, 1, n), generator=torch.Generator().manual_seed(seed), dtype=dtype) for seed in (n, n + 1)
            ]
            for indices in sets:
                indices[0, 0, 0, 1] = torch.iinfo(torch.int32).max if dtype == torch.int32 else 1 << 62
                indices[..., n // 2], indices[..., n - 1] = indices[..., 0], indices[..., 2]
            given = sets[0].clone().to(lane.place)

            def step(given: Tensor = given, block: int = block, qkv: tuple[Tensor, ...] = (q, k, v)) -> tuple[Tensor, ...]:
                return attend(lane.name, *qkv, Selection.from_blocks(given, block))

            wanted = []
            for indices in sets:
                given.copy_(indices)
                wanted.append(step())
                assert_forward(wanted[-1], q, k, v, Selection.from_blocks(indices, block).ranges.to(lane.place))
            graph, outputs = captured(step, lane.place)
            for indices, right in zip(sets, wanted, strict=True):
                given.copy_(indices)
                assert all(map(torch.equal, replayed(graph, outputs, RERUNS), right))


def check_most_ranges(lane: Lane, n: int, patch: pytest.MonkeyPatch) -> None:
    """As many ranges of a row as the limits allow, or 2,048."""
    n = min(n, lane.limits.ranges_max)
    shape = next((shape for shape in lane.shapes() if shape.block in (4, 16, None)), lane.shapes()[0])
    block = shape.block or 1
    S = 1 if lane.slow else 2
    S_kv = n * block + 3
    q, k, v = make_qkv(1, S, 1, 1 if lane.slow else shape.h, 8, 8, S_kv=S_kv, dtype=lane.dtype, device=lane.place)
    every = torch.stack([torch.randperm(n, generator=torch.Generator().manual_seed(s)) for s in range(S)])[None, :, None].int()
    selection = Selection.from_blocks(every.to(lane.place), block)
    check_forward(lane.name, q, k, v, Selection(selection.ranges, shape.block))


def check_keys_of_calls(lane: Lane, what: str, patch: pytest.MonkeyPatch) -> None:
    """A call that differs from an earlier one in one fact gets its own decision and launches."""
    shape = lane.shapes()[0]
    S = lane.rows(shape)
    S_kv = S + 3 * (shape.block or 8)
    given = list(make_qkv(1, S, 1, shape.h, shape.Dk, shape.Dv, S_kv=S_kv, dtype=lane.dtype, device=lane.place))
    if what == "needs-grad":
        given = [x.requires_grad_() for x in given]
    for _ in range(3):
        with torch.no_grad():
            attend(lane.name, *given, selection_of(lane, shape, S, S_kv))
    before = nsa_sel.decisions()[-1].request
    if what != "needs-grad":
        i = "qkv".index(what)
        given[i] = torch.empty(given[i].numel() + 1).to(given[i])[1:].view_as(given[i]).copy_(given[i])
    o, _ = attend(lane.name, *given, selection_of(lane, shape, S, S_kv))
    request = nsa_sel.decisions()[-1].request
    assert o.requires_grad == (what == "needs-grad")
    assert (request.needs_grad, request.aligned) == (what == "needs-grad", what == "needs-grad")
    assert request != before
    check_both(lane.name, *given, selection_of(lane, shape, S, S_kv))


class Asked(NamedTuple):
    """A cell of the matrix that the requirements ask for: how L keys of a row are cut, head dims, and heads."""

    kind: str
    L: int
    Dk: int
    Dv: int
    h: int

    @property
    def name(self) -> str:
        return f"{self.kind}-L{self.L}-h{self.h}-{self.Dk}x{self.Dv}"


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few cases, one value of each axis, in which every two values of different axes meet at least once."""
    numbers = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = {pair for case in numbers for pair in _pairs(case)}
    chosen = []
    while missing:
        case = max(numbers, key=lambda case: len(missing.intersection(_pairs(case))))
        missing.difference_update(_pairs(case))
        chosen.append(tuple(axis[i] for axis, i in zip(axes, case, strict=True)))
    return chosen


def _pairs(case: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(case), 2))


AXES = (DISTRIBUTIONS, (64, 128, 256, 512), (64, 128), (64, 128), (2, 8))
MATRIX = [Asked(*cell) for cell in itertools.product(*AXES)]
PAIRS = [Asked(*cell) for cell in pairwise(*AXES)]  # in which any two of the values of different axes meet


def check_matrix(lane: Lane, asked: Asked, patch: pytest.MonkeyPatch) -> None:
    """Forward (on a GPU backward, too) in each dtype, and a mean absolute error of at most 1e-3 in 16 bits, and in float32 of 1e-6 on a
    CPU and of 1e-4 on a GPU. Backends of whole blocks get blocks: 2, 8 of at least 16 keys, or of 32 keys."""
    kind, L, Dk, Dv, h = asked
    S, G, S_kv = 8 if lane.device == "cuda" else 64, 2, L + 88  # largest errors of few rows are not comparable
    for dtype in lane.dtypes if lane.device == "cuda" else [torch.float32]:
        q, k, v = make_qkv(1, S, G, h, Dk, Dv, S_kv=S_kv, dtype=dtype, device=lane.place, seed=L + Dk + h)
        if lane.limits.block_aligned_only:
            block = {"few": L // 2, "many": max(16, L // 8), "mixed": 32}[kind]
            selection = make_blocks(1, S, G, S_kv, L // block, block, device=lane.place)
        else:
            selection = cut_spans(kind, 1, S, G, S_kv, L, device=lane.place)
        (check_both if lane.device == "cuda" else check_forward)(lane.name, q, k, v, selection)
        o, exact = attend(lane.name, q, k, v, selection)[0], oracle_forward(q, k, v, selection.ranges)[0]
        most = 1e-3 if dtype.itemsize == 2 else 1e-4 if lane.device == "cuda" else 1e-6
        assert float((o.detach().cpu().double() - exact).abs().mean()) <= most


def matrix_of(lane: Lane) -> list[Asked]:
    """Return the cells of a usual run; make test-thorough runs the others."""
    if lane.device == "cuda":
        return MATRIX
    if lane.device == "emulated" or (lane.kind != lane.device and lane.device != "interpreter"):
        return []
    return PAIRS[:2] if lane.slow and lane.backend.slow else PAIRS


PLAIN: dict[str, tuple[Callable[[Lane, Any, pytest.MonkeyPatch], None], Callable[[Lane], list[Any]]]] = {
    "matrix": (check_matrix, matrix_of),
    "size": (check_size, sizes_of),
    "layouts": (check_layouts, lambda lane: list(LAYOUTS)),
    "dtype": (check_dtype, lambda lane: lane.dtypes),
    "scale": (check_scale, lambda lane: [-0.3, 1e9] if lane.slow else [0.0, -0.3, 1e9] + [1e4] * (lane.device == "cuda")),
    "decode": (check_decode, lambda lane: [2] if lane.slow else [1, 3, 150] if lane.device == "cuda" else [3]),
    "repeats": (check_repeats, lambda lane: [1, 8] if lane.device == "cuda" else [1, 2]),
    "most-ranges": (check_most_ranges, lambda lane: [] if lane.slow and lane.backend.shares == "blocks" else [2048]),
    "call-keys": (check_keys_of_calls, lambda lane: [] if lane.slow else ["q", "k", "v", "needs-grad"]),
    "autocast": (check_autocast, lambda lane: [torch.float16] if lane.slow else [torch.float16, torch.bfloat16]),
    "growing": (check_growing, lambda lane: [] if lane.slow else [4]),
    "host": (check_host, lambda lane: ["eager", "debug"] if lane.device == "cuda" else [] if lane.slow else ["debug"]),
    "large": (check_large, large_of),
    "memory": (check_memory, lambda lane: ["random-32k-h16"] if lane.device == "cuda" and not lane.backend.slow else []),
}


EDGES = ("edges", "promised", "poison")  # of tests/test_triton_sel_edge_cases.py


def cells(*devices: str, only: tuple[str, ...] = (), leave_out: tuple[str, ...] = ()) -> Any:
    """Return the mark that runs a test `(behavior, lane, what)` for all cells of these devices, or of some behaviors."""
    found = []
    for lane in lanes(*devices):
        for behavior in only or (*SHAPED, *PLAIN):
            if behavior in leave_out:
                continue
            whats = shapes_of(behavior, lane) if behavior in SHAPED else PLAIN[behavior][1](lane)
            rest = [what for what in MATRIX if what not in whats] if behavior == "matrix" and whats else []
            for parameter in parameters([(lane, what) for what in (*whats, *rest)]):
                marks = [*parameter.marks, *[pytest.mark.thorough] * (parameter.values[1] in rest)]
                found.append(pytest.param(behavior, *parameter.values, marks=marks, id=f"{behavior}-{parameter.id}"))
    return pytest.mark.parametrize(("behavior", "lane", "what"), found)


def run(behavior: str, lane: Lane, what: Any, patch: pytest.MonkeyPatch) -> None:
    lane.open(patch)
    check = SHAPED[behavior] if behavior in SHAPED else PLAIN[behavior][0]
    check(lane, what, patch)
