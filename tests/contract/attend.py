"""What every backend owes a call of `selection_attention`, as checks of one lane and shape. `cells` lists what is to be tested where.

Each check compares with the float64 oracle (at most twice the error of PyTorch in the same precision) and asserts that the decision names
the backend (tests/helpers/parity.py). Keys and values lie between NaN in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.selection import Selection
from tests.contract.lanes import Lane, Shape, lanes, parameters
from tests.helpers.cases import DISTRIBUTIONS, cut_spans, make_blocks, make_qkv, make_spans, oracle_forward
from tests.helpers.graphs import captured, replayed
from tests.helpers.pairwise import pairwise
from tests.helpers.parity import attend, check_both, check_deterministic, check_forward, results_of
from tests.helpers.poison import check_empty_rows, check_one_row, new_memory_is_nan, rows_with_holes, selected, through
from tests.helpers.varlen_cases import attend_varlen, check_varlen, pack, seen_keys

GUARD = 16  # keys of NaN before and after those of a call
FAR = -(2**62)  # a position that 32 bits do not hold


def guarded(x: Tensor) -> Tensor:
    """The same keys [B,G,S_kv,D] as a view of a larger tensor, with NaN before and after them."""
    return torch.nn.functional.pad(x.detach(), (0, 0, GUARD, GUARD), value=math.nan)[:, :, GUARD:-GUARD].requires_grad_(x.requires_grad)


def tensors(lane: Lane, shape: Shape, S: int, S_kv: int, **sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    sizes = {"B": 1, "G": 1, "dtype": lane.dtype, **sizes}
    q, k, v = make_qkv(S=S, h=shape.h, Dk=shape.Dk, Dv=shape.Dv, S_kv=S_kv, device=lane.place, **sizes)
    return q, guarded(k), guarded(v)


def rows_of_edges(shape: Shape, S: int, S_kv: int, promised: bool) -> Tensor:
    """Ranges [1,S,1,4,2] int64, a row after the other of those that are easily mistreated; promised: no two of a row overlap."""
    far, end, w = 2**63 - 1, S_kv, shape.block or 8

    def row(t: int) -> list[list[tuple[int, int]]]:
        own = t // w * w
        blocks = [
            [],
            [(0, w), (2 * w, 3 * w)],
            [(-w, 0), (w, 2 * w)],  # before the first key
            [(end // w * w, end // w * w + w), (0, w)],  # ends after the last key
            [(own, own + w), (own + w, own + 2 * w)],
            [(own + w, own + 2 * w)],  # the future
            [(2 * w, 3 * w), (0, 0), (0, w), (w, 2 * w)],
            [(0, 0), (0, 0), (0, 0), (own, own + w)],
        ]
        ranges = [
            [(-far, 3), (5, 6)],
            [(-7, -4), (1, 3)],
            [(9, 4), (1, 3), (end, 0)],
            [(12, 14), (0, 2), (6, 9)],
            [(0, 4), (4, 8), (8, 9)],
            [(3, far)],
            [(-far, far)],
            [(t, t + 1)],
            [(t + 1, t + 2), (0, 2)],
            [(end + 200, end + 300), (0, 1)],
        ]
        found = blocks if shape.block else blocks + ranges
        if not promised:
            found += [[(0, w), (w, 2 * w), (0, w), (0, w)]] + ([] if shape.block else [[(0, 9), (3, 5), (-4, 12)]])
        return found

    rows = []
    for s in range(S):
        t = S_kv - S + s
        options = row(t)
        chosen = options[s % len(options)]
        rows.append(chosen + [(0, 0)] * (4 - len(chosen)))
    return torch.tensor(rows)[None, :, None]


def check_edges(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Empty, inverted, padded, unsorted, overlapping, negative and far ranges; then rows that all select nothing."""
    S = lane.rows(shape) if lane.device != "interpreter" else 20
    S_kv = S + 3 * (shape.block or 8) + 6
    q, k, v = tensors(lane, shape, S, S_kv)
    ranges = rows_of_edges(shape, S, S_kv, promised=False).to(lane.place)
    check_both(lane.name, q, k, v, Selection(ranges, shape.block))
    nothing = Selection(torch.zeros_like(ranges[..., :2, :]).int(), shape.block)
    check_both(lane.name, q, k, v, nothing)


def check_promised(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Ranges that are promised to be disjoint are passed as they are: the kernels clamp them. And single ranges."""
    S = lane.rows(shape) if lane.device != "interpreter" else 18
    S_kv = S + 3 * (shape.block or 8) + 6
    q, k, v = tensors(lane, shape, S, S_kv)
    ranges = rows_of_edges(shape, S, S_kv, promised=True).to(lane.place)
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
    S = lane.rows(shape)
    S_kv = S + 2 * (shape.block or 8)
    q, k, v = tensors(lane, shape, S, S_kv)
    kept = selection_of(lane, shape, S, S_kv)
    early = torch.arange(S, device=lane.place)
    fewer = S_kv - (shape.block or 8)
    attend(lane.name, q, k[:, :, :fewer], v[:, :, :fewer], kept)
    _same(lane, (q, k, v), kept, None)
    for positions in (early,) if lane.slow else (early, early.flip(0), None):
        _same(lane, (q, k, v), kept, positions)
    if not lane.slow:
        _same(lane, (q[..., :1, :], k, v), kept, early)
    kept.ranges.copy_(selection_of(lane, shape, S, S_kv, seed=5).ranges)
    _same(lane, (q, k, v), kept, None)


def _same(lane: Lane, qkv: tuple[Tensor, ...], kept: Selection, q_pos: Tensor | None) -> None:
    fresh = Selection(kept.ranges.clone(), kept.block_size)
    runs = [results_of(lane.name, *qkv, selection, q_pos) for selection in (kept, fresh)]
    assert all(map(torch.equal, *runs))


def selection_of(lane: Lane, shape: Shape, S: int, S_kv: int, n: int = 3, **how: Any) -> Selection:
    if shape.block is None:
        return Selection.from_ranges(make_spans("few", 1, S, 1, S_kv, 10, device=lane.place, **how))
    return make_blocks(1, S, 1, S_kv, n, shape.block, device=lane.place, **how)


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
    spoilt[0][padding] = math.nan
    for x in spoilt[1:]:
        x[unseen] = math.nan
    results = []
    for given in (clean, spoilt):
        inputs = [x.detach().requires_grad_() for x in given]
        with new_memory_is_nan():
            o, lse = attend_varlen(lane.name, packed, *inputs)
            results.append((o.detach(), lse.detach(), *torch.autograd.grad(o[: packed.cu_q[-1]].sum(), inputs)))
    assert all(map(torch.equal, *results))


def check_graph(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """A replay follows what was written in place since the capture (on a CPU, where a rerun stands in for it, the checks themselves)."""
    S = lane.rows(shape)
    S_kv = S + 2 * (shape.block or 8)
    static = [x.clone() for x in tensors(lane, shape, S, S_kv)]
    do = torch.randn(*static[0].shape[:-1], shape.Dv).to(static[0])
    kept = selection_of(lane, shape, S, S_kv)
    graph, outputs = captured(lambda: _pass(lane, static, kept, do), lane.place)
    for seed in (1, 2):
        others, selection = tensors(lane, shape, S, S_kv, seed=seed), selection_of(lane, shape, S, S_kv, seed=seed)
        for old, new in zip((*static, kept.ranges), (*others, selection.ranges), strict=True):
            old.copy_(new)
        wanted = _pass(lane, others, selection, do)
        assert all(map(torch.equal, replayed(graph, outputs), wanted))


def _pass(lane: Lane, qkv: Any, selection: Selection, do: Tensor) -> tuple[Tensor, ...]:
    inputs = [x.detach().requires_grad_() for x in qkv]
    o, lse = attend(lane.name, *inputs, selection)
    return o, lse, *torch.autograd.grad(o, inputs, do)


def check_many_rows(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """More tiles, lists and units than multiprocessors, on a GPU; 20 reruns are bit-equal."""
    S, G = 1400, 8 if shape.h < 16 else 2
    q, k, v = make_qkv(1, S, G, shape.h, shape.Dk, shape.Dv, S_kv=S + 100, dtype=lane.dtype, device=lane.place)
    selection = make_blocks(1, S, G, S + 100, min(7, 1500 // (shape.block or 16)), shape.block or 16, device=lane.place)
    check_both(lane.name, q, k, v, selection)
    check_deterministic(lane.name, q, k, v, selection, 20)


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
    S = lane.rows(shape)
    S_kv = S + 2 * (shape.block or 8)
    qkv, selection = tensors(lane, shape, S, S_kv), selection_of(lane, shape, S, S_kv)
    workspace = torch.full((1 << (28 if lane.device == "cuda" else 23),), 0xFF, dtype=torch.uint8, device=lane.place)
    runs = []
    for buffer in (None, workspace):
        inputs = [x.detach().requires_grad_() for x in qkv]
        o, lse = nsa_sel.selection_attention(*inputs, selection, return_lse=True, backend=lane.name, workspace=buffer)
        assert nsa_sel.decisions()[-1].backward == lane.name
        runs.append((o.detach(), lse.detach(), *torch.autograd.grad(o.sum(), inputs)))
    workspace.fill_(0xFF)
    assert all(map(torch.equal, *runs))


SHAPED: dict[str, Callable[[Lane, Shape, pytest.MonkeyPatch], None]] = {
    "edges": check_edges,
    "promised": check_promised,
    "positions": check_positions,
    "reuse": check_reuse,
    "poison": check_poison,
    "packed": check_packed,
    "graph": check_graph,
    "many-keys": check_many_keys,
    "many-rows": check_many_rows,
    "workspace": check_workspace,
}

# Where every pass takes a second: what does not depend on the kernel family is tested with few.
FEW: dict[str, dict[str, int]] = {
    "emulated": {"graph": 0, "workspace": 1, "packed": 2, "reuse": 1, "many-rows": 0},
    "interpreter": {"graph": 0, "workspace": 1, "many-keys": 1, "many-rows": 0},
    "cpu": {"many-rows": 0},
    "key-tiles": {"poison": 0, "packed": 0},  # which packed SDPA takes where all keys are finite
}


def shapes_of(behavior: str, lane: Lane) -> list[Shape]:
    """Return the shapes of a lane, the last ones alone where a behavior takes few."""
    shapes = lane.shapes()
    if behavior == "many-keys" and lane.name == registry.fallback():  # it has no lists or steps that could end at the 32nd
        return []
    if behavior == "many-rows":  # of kernels that are persistent, or have units
        shapes = [shape for shape in shapes if shape.Dk >= 64 and (lane.backend.tiles or lane.backend.shares != "rows")]
    if lane.device == "emulated" and behavior in ("reuse", "poison", "many-keys"):
        shapes = [shape for shape in shapes if shape.h > 1 and (behavior != "many-keys" or shape.block in (None, 64))]
    return shapes[max(0, len(shapes) - FEW.get(lane.device, {}).get(behavior, len(shapes))) :]


# Of each lane alone.
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
    return [shape for size in sizes if size[0] <= few and lane.takes(shape := Shape(*size, block))]


def check_size(lane: Lane, shape: Shape, patch: pytest.MonkeyPatch) -> None:
    """Heads and head dims, over a batch of two, as a [B,S_kv,G,D] cache has them."""
    S = {"interpreter": 3, "emulated": 6}.get(lane.device, 140 if lane.kind == "cuda" else 30 if shape.h < 70 else 8)
    S_kv = S + 3 * (shape.block or 8) - 4
    q, k, v = make_qkv(2, S, 2, shape.h, shape.Dk, shape.Dv, S_kv=S_kv, dtype=lane.dtype, device=lane.place)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    check_both(lane.name, q, k, v, make_blocks(2, S, 2, S_kv, 3, shape.block or 8, device=lane.place))


def check_dtype(lane: Lane, dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Spans and blocks in each dtype that the limits name; products above the largest float16 number."""
    for shape in lane.shapes()[:2] if lane.slow else lane.shapes():
        S = lane.rows(shape)
        S_kv = S + 2 * (shape.block or 8) + 3
        q, k, v = tensors(lane, shape, S, S_kv, dtype=dtype)
        check_both(lane.name, q, k, v, selection_of(lane, shape, S, S_kv))
    o, lse = attend(lane.name, 300 * q, 300 * k, v, selection_of(lane, shape, S, S_kv))
    assert bool(o.isfinite().all())
    assert bool(lse.isfinite().all())


def check_scale(lane: Lane, scale: float, patch: pytest.MonkeyPatch) -> None:
    """0, negative ones and 1e9; rows that select nothing among others; heads with equal queries are equal."""
    shape = lane.shapes()[-1] if lane.device == "emulated" else lane.shapes()[0]
    S = min(20, lane.rows(shape))
    S_kv = S + 2 * (shape.block or 8) + 3
    q, k, v = tensors(lane, shape, S, S_kv, dtype=lane.dtype)
    ranges = selection_of(lane, shape, S, S_kv).ranges.clone()
    ranges[:, 1::3] = 0
    q = q[..., :1, :].expand_as(q).contiguous()
    selection = Selection(ranges, shape.block)
    o, lse = attend(lane.name, q, k, v, selection, scale=scale)
    exact = nsa_sel.oracle.oracle_forward(q, k, v, ranges, scale)
    tolerance = 2e-3 if lane.dtype.itemsize == 2 else 2e-6
    close = {"atol": tolerance, "rtol": tolerance * (1 if abs(scale) < 2 else 10)}
    if abs(scale) < 2:
        torch.testing.assert_close(o.cpu().double(), exact[0], **close)
    assert int(torch.count_nonzero(o[:, 1::3])) == 0
    assert bool((lse[:, 1::3] == -math.inf).all())
    if lane.device == "cuda" and abs(scale) > 1e4:  # past what 16-bit kernels resolve: docs/contract.md, "Large logits"
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
    """A call like an earlier one but for one fact gets a decision, and launches, of its own."""
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


def check_fallback(lane: Lane, direction: str, patch: pytest.MonkeyPatch) -> None:
    """A forced backend that fails raises."""

    shape = lane.shapes()[0]
    S = lane.rows(shape)
    S_kv = S + 2 * (shape.block or 8)
    q, k, v = (x.requires_grad_() for x in tensors(lane, shape, S, S_kv))

    def fails(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    patch.setattr(registry.load(lane.name), direction, fails)
    with pytest.raises(RuntimeError, match="no such kernel"):
        attend(lane.name, q, k, v, selection_of(lane, shape, S, S_kv))[0].sum().backward()


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


AXES = (DISTRIBUTIONS, (64, 128, 256, 512), (64, 128), (64, 128), (2, 8))
MATRIX = [Asked(*cell) for cell in itertools.product(*AXES)]
PAIRS = [Asked(*cell) for cell in pairwise(*AXES)]  # in which any two of the values of different axes meet


def check_matrix(lane: Lane, asked: Asked, patch: pytest.MonkeyPatch) -> None:
    """Forward (on a GPU backward, too) in each dtype, and a mean absolute error of at most 1e-3 in 16 bits, and in float32 of 1e-6 on a
    CPU and of 1e-4 on a GPU. Backends of whole blocks get blocks: 2, 8 of at least 16 keys, or of 32 keys."""
    kind, L, Dk, Dv, h = asked
    S, G, S_kv = (8, 2, L + 88) if lane.device == "cuda" else (2, 1, L + 88)
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
    "dtype": (check_dtype, lambda lane: lane.dtypes),
    "scale": (check_scale, lambda lane: [-0.3, 1e9] if lane.slow else [0.0, -0.3, 1e9] + [1e4] * (lane.device == "cuda")),
    "decode": (check_decode, lambda lane: [2] if lane.slow else [1, 3, 150] if lane.device == "cuda" else [3]),
    "most-ranges": (check_most_ranges, lambda lane: [] if lane.slow and lane.backend.shares == "blocks" else [2048]),
    "call-keys": (check_keys_of_calls, lambda lane: [] if lane.slow else ["q", "k", "v", "needs-grad"]),
    "failure": (check_fallback, lambda lane: ["forward", "backward"]),
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
    """Run a cell."""
    lane.open(patch)
    check = SHAPED[behavior] if behavior in SHAPED else PLAIN[behavior][0]
    check(lane, what, patch)
