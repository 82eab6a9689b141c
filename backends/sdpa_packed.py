"""Packed SDPA: rows bucketed by length, their keys gathered, torch's SDPA kernels on the result; the fallback that runs everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nsa_sel.telemetry import events
from nsa_sel.telemetry.passes import keys_read

if TYPE_CHECKING:
    from nsa_sel.core.call import Call

# A step's keys should stay in a CPU's caches, but not be so few that Python shows: 2, 4, 8, 16, 32, 64 MiB gave a gathering
# forward pass of 328, 244, 237, 208, 282, 332 ms (one thread of a busy EPYC 7003; S 2048, G 2, h 4, D 64, 8 blocks of 64).
_CPU_CHUNK_BYTES = 16 << 20
_SMALLEST_BUCKET = 16  # keys
_STEP_ROWS = 32768  # a CUDA grid takes less than 65536 sequences
_INDEX_BYTES = 48  # per key: its position, its places in K and V, and what makes them
_SORT_NUMBERS = 16  # per key: what index_put_ sorts with
_OVERFLOWS = 1e15  # squared, and summed over a head dimension, this is still far below the largest float32
_DENSE_TILE, _DENSE_TILE_GPU = 64, 1024  # query positions of one dense step: few of them look at few keys, many launch few kernels
# What is faster than gathering each row's keys, by the keys looked at for one selected (S 2048, h 1 and 4, D 64): dense steps
# at 2.0 (24 against 36 ms); tiles of keys at 1.04 (134 against 169 ms), but not at 1.5 (192 against 162 ms).
# On an H200 dense steps take 0.03 to 0.59 of the time of gathers up to 32, and 0.63 to 1.08 from 72 on (bench/results/h200/dense.jsonl).
_DENSE_WASTE = 2.0
_DENSE_WASTE_GPU = 32.0
_KEY_WASTE = 1.3
_ROWS_BY_KEY = 16  # rows that a tile of keys must meet on average


def path(call: Call) -> Literal["dense", "varlen"]:
    """How `forward` goes through the rows of this call.

    dense: tiles of adjacent rows attend to one slice of keys under a mask. Taken for one range a row (n = 1) when the slices
    hold few keys that their rows did not select, on a CPU by a look at the ranges, on a GPU by static facts: a slice is then all that
    its rows may see, and few is against `Selection.measure(S_kv)`, or as if every row selected as many keys as it may.
    varlen: everything else. There, rows are bucketed by length and their keys gathered; on a CPU, where it pays, tiles of keys meet
    the rows that selected them instead. NSA_SEL_TRITON_FORCE_PATH=dense takes n = 1 densely however many keys that looks at,
    varlen takes nothing densely.

    What gathers nothing would spread a value that is not finite to rows that did not select it. A CPU looks at K and V first, and
    gathers where it finds one; on a GPU the dense path works on copies of K and V without such keys, and the rows that did select one
    give NaN. Where copies, or a step's masks, do not fit runtime.workspace_bytes the keys are gathered.
    """
    return "varlen" if _dense_tiles(call, *call.clamped_ranges()) is None else "dense"


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32 (float64 for float64 inputs). Never waits for a GPU."""
    B, S, G, h, _ = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    o = call.q.new_zeros(B, S, G, h, Dv)
    lse = torch.full((B, S, G, h), float("-inf"), dtype=_accumulate(call.q.dtype), device=call.q.device)
    if o.numel() == 0 or S_kv == 0 or call.selection.n == 0:
        return o, lse
    with torch.autocast(call.q.device.type, enabled=False):
        start, end = call.clamped_ranges()
        tiles = _dense_tiles(call, start, end)
        if call.settings.debug_triton:
            events.emit("sel.path", backend="sdpa-packed", path="varlen" if tiles is None else "dense")
        if tiles is not None:
            _forward_dense(call, tiles, start, end, o, lse)
        elif _pays_by_key(call, start, end):
            _forward_by_key(call, start, end, o, lse)
        else:
            _forward_by_row(call, start, end, o, lse)
    return o, lse


def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, in the dtypes of q, k, v; p is recomputed from lse. Bit-equal from run to run on every
    device, on a CPU at the same number of threads: torch's matrix products may add in another order with another number.

    With p = exp(scale q.k - lse) and delta = rowsum(do * o) - dlse: ds = p (do.v - delta), dq = scale ds k, dk = scale ds^T q,
    dv = p^T do. On a CPU, tiles of keys meet the rows that selected any of their keys. On a GPU such lists would have to be
    read: there each row's share of its gathered keys is computed, and then added by key in a fixed order.
    """
    dtype = _accumulate(call.q.dtype)
    if call.q.numel() == 0 or call.k.shape[2] == 0 or call.selection.n == 0:
        return call.q.new_zeros(call.q.shape), call.k.new_zeros(call.k.shape), call.v.new_zeros(call.v.shape)
    with torch.autocast(call.q.device.type, enabled=False):
        delta = _row_products(do, o, dtype, _budget(call) // 8)
        if dlse is not None:
            delta -= dlse
        work = _backward_by_key if _may_read(call) else _backward_by_row
        dq, dk, dv = work(call, lse, do, delta)
        return dq.to(call.q.dtype), dk.to(call.k.dtype), dv.to(call.v.dtype)


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Keys that the forward loads from K and V: of dense tiles, and of tiles of keys, once a tile; else each row's, gathered, padded to
    the length of its bucket. Not counted, at least what the rows select."""
    if not count or call.selection.n == 0:
        return selected
    (B, _, S_kv, _), G = call.k.shape, call.q.shape[2]
    start, end = call.clamped_ranges()
    tiles = _dense_tiles(call, start, end)
    if tiles is not None:
        return B * G * sum(tile.hi - tile.lo for tile in tiles)
    if _pays_by_key(call, start, end):
        width, lists = _key_tile(call), _rows_by_tile(call, start, end)
        return sum(min(width, S_kv - tile * width) for of_pair in lists for tile, rows in enumerate(of_pair) if len(rows))
    return sum(len(ids) * L for ids, L in _buckets(call, start.flatten(0, 2), end.flatten(0, 2)))


def _row_products(do: Tensor, o: Tensor, dtype: torch.dtype, budget: int) -> Tensor:
    """rowsum(do * o) [B,S,G,h] in `dtype`, some rows at a time: both in float32 at once would take more than all gathers."""
    a, b = do.reshape(-1, o.shape[-1]), o.reshape(-1, o.shape[-1])
    step = max(1, budget // (2 * o.shape[-1] * dtype.itemsize))
    sums = [(a[i : i + step].to(dtype) * b[i : i + step]).sum(-1) for i in range(0, len(a), step)]
    return torch.cat(sums).view(o.shape[:-1])


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _budget(call: Call) -> int:
    """Bytes of temporaries that one step may take."""
    budget = call.settings.workspace_bytes
    return min(budget, _CPU_CHUNK_BYTES) if call.q.device.type == "cpu" else budget


def _may_read(call: Call) -> bool:
    """Whether a look at the ranges, and at K and V, waits for nobody."""
    return call.q.device.type == "cpu"


class _Tile(NamedTuple):
    """Query positions [s0, s1) of all sequences and groups, and the keys [lo, hi) that hold their ranges."""

    s0: int
    s1: int
    lo: int
    hi: int


def _dense_tiles(call: Call, start: Tensor, end: Tensor) -> list[_Tile] | None:
    """The tiles of the dense path, None where the call does not take it."""
    B, S, G, h, Dk = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    forced = call.settings.triton_force_path
    if call.selection.n != 1 or forced == "varlen" or start.numel() == 0 or S_kv == 0:
        return None
    on_cpu, wide = _may_read(call), _accumulate(call.q.dtype).itemsize
    if not on_cpu and B * G > _STEP_ROWS:
        return None
    # A position and a key take booleans and the bias; where no fused kernel takes the head dims, each of its heads the scores too.
    pair_bytes = 4 + wide + (0 if _fused(call.q, Dk, Dv) else 3 * h * wide)
    copied = 0 if on_cpu else (call.k.numel() + call.v.numel()) * call.q.element_size()
    height = min(_DENSE_TILE if on_cpu else _DENSE_TILE_GPU, (call.settings.workspace_bytes - copied) // (B * G * S_kv * pair_bytes))
    if height <= 0:
        return None
    slices, selected = _seen_slices(call, start, end, height) if on_cpu else _static_slices(call, height)
    tiles = [tile for tile in slices if tile.hi > tile.lo]
    looked_at = B * G * sum((tile.s1 - tile.s0) * (tile.hi - tile.lo) for tile in tiles)
    if not tiles or (forced != "dense" and looked_at > (_DENSE_WASTE if on_cpu else _DENSE_WASTE_GPU) * selected):
        return None
    finite = not on_cpu or _finite(call, min(tile.lo for tile in tiles), max(tile.hi for tile in tiles))
    return tiles if finite else None


def _seen_slices(call: Call, start: Tensor, end: Tensor, height: int) -> tuple[list[_Tile], int]:
    """Tiles of `height` positions by a look at their ranges, and the keys that all rows select."""
    S, S_kv = call.q.shape[1], call.k.shape[2]
    start, end = start.transpose(0, 1).reshape(S, -1), end.transpose(0, 1).reshape(S, -1)
    lo = torch.where(end > start, start, S_kv).amin(1)
    hi = torch.where(end > start, end, 0).amax(1)
    tiles = [_Tile(s0, min(s0 + height, S), int(lo[s0 : s0 + height].min()), int(hi[s0 : s0 + height].max())) for s0 in range(0, S, height)]
    return tiles, int((end - start).sum())


def _static_slices(call: Call, height: int) -> tuple[list[_Tile], int]:
    """Tiles of all keys that their rows may see, and as many keys as all rows select at most, or exactly where that was measured."""
    S, S_kv = call.q.shape[1], call.k.shape[2]
    bounds = [(s0, min(s0 + height, S)) for s0 in range(0, S, height)]
    tiles = [_Tile(s0, s1, 0, S_kv if call.q_pos is not None else S_kv - S + s1) for s0, s1 in bounds]
    return tiles, keys_read(call, count=False)[0]


def _finite(call: Call, lo: int, hi: int) -> bool:
    """Whether the queries, and the keys and values [lo, hi), are finite and so small that no product overflows. Reads them, on a CPU."""
    tensors = (call.q, call.k[:, :, lo:hi], call.v[:, :, lo:hi])
    extremes = torch.stack([extreme for x in tensors for extreme in torch.aminmax(x)])
    return bool(extremes.abs().max() < _OVERFLOWS)  # False for NaN


def _forward_dense(call: Call, tiles: list[_Tile], start: Tensor, end: Tensor, o: Tensor, lse: Tensor) -> None:
    B, _, G, h, Dk = call.q.shape
    start, end = start.squeeze(3).transpose(1, 2), end.squeeze(3).transpose(1, 2)  # [B,G,S]
    k, v, spoilt = (call.k, call.v, None) if _may_read(call) else _without_overflows(call, start, end)
    k, v = k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1)
    for s0, s1, lo, hi in tiles:
        key = torch.arange(lo, hi, device=k.device)
        first, last = (x[:, :, s0:s1].reshape(B * G, 1, s1 - s0, 1) for x in (start, end))
        q = call.q[:, s0:s1].permute(0, 2, 3, 1, 4).reshape(B * G, h, s1 - s0, Dk)
        o_tile, lse_tile = _attend(q, k[:, :, lo:hi], v[:, :, lo:hi], (key >= first) & (key < last), call.scale)
        filled = last > first
        o_tile, lse_tile = torch.where(filled, o_tile, 0), torch.where(filled, lse_tile.unsqueeze(3), float("-inf"))
        o[:, s0:s1] = o_tile.view(B, G, h, s1 - s0, -1).permute(0, 3, 1, 2, 4)
        lse[:, s0:s1] = lse_tile.view(B, G, h, s1 - s0).permute(0, 3, 1, 2)
    if spoilt is not None:
        o.masked_fill_(spoilt[..., None, None], float("nan"))
        lse.masked_fill_(spoilt[..., None], float("nan"))


def _without_overflows(call: Call, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of k and v with zeros for keys that are not finite, or so large that a product may overflow; and which rows [B,S,G], of
    ranges start, end [B,G,S], selected any of these."""
    fine = [torch.linalg.vector_norm(x, float("inf"), dim=-1) < _OVERFLOWS for x in (call.k, call.v)]  # False for NaN
    fine_key = fine[0] & fine[1]
    k, v = (torch.where(fine_key.unsqueeze(3), x, 0) for x in (call.k, call.v))
    before = pad((~fine_key).cumsum(2), (1, 0))
    last, first = (before.gather(2, x.clamp(max=call.k.shape[2])) for x in (end, start))
    return k, v, (last > first).transpose(1, 2)


def _forward_by_row(call: Call, start: Tensor, end: Tensor, o: Tensor, lse: Tensor) -> None:
    h, Dk = call.q.shape[3:]
    q, o, lse = call.q.reshape(-1, h, Dk), o.view(-1, h, o.shape[4]), lse.view(-1, h)
    for rows, steps in _packed(call, start, end, 3 * h, "forward"):
        q_rows, keep = q[rows.ids].unsqueeze(1), rows.keep[:, None, None]
        parts = []
        for step in steps:
            k, v = rows.gather(step)
            parts.append(_attend(q_rows[step], k.unsqueeze(1), v.unsqueeze(1), keep[step], call.scale))
        o_rows, lse_rows = (torch.cat(part).squeeze(1) for part in zip(*parts, strict=True))
        filled = rows.filled.unsqueeze(1)
        o.index_copy_(0, rows.ids, torch.where(filled.unsqueeze(2), o_rows, 0))
        lse.index_copy_(0, rows.ids, torch.where(filled, lse_rows, float("-inf")))


def _pays_by_key(call: Call, start: Tensor, end: Tensor) -> bool:
    """Whether tiles of keys meet enough rows, hold few keys that these did not select, and all of them are finite."""
    if not _may_read(call) or call.q.shape[1] < _ROWS_BY_KEY:
        return False
    lists = list(itertools.chain.from_iterable(_rows_by_tile(call, start, end)))
    pairs, tiles = sum(map(len, lists)), sum(len(rows) > 0 for rows in lists)
    few = pairs < _ROWS_BY_KEY * tiles or pairs * _key_tile(call) > _KEY_WASTE * int((end - start).sum())
    return not few and _finite(call, 0, call.k.shape[2])


def _forward_by_key(call: Call, start: Tensor, end: Tensor, o: Tensor, lse: Tensor) -> None:
    """Fills o and lse on a CPU: SDPA of each tile of keys with its rows, merged by lse. Nothing is gathered but rows of q."""
    _, S, _, h, Dk = call.q.shape
    for (b, g), steps in _by_key(call, start, end):
        q = call.q[b, :, g].to(lse.dtype).reshape(S, -1).contiguous()
        k, v = call.k[b, g].to(lse.dtype), call.v[b, g].to(lse.dtype)
        o_sum, lse_sum = lse.new_zeros(S, h, v.shape[1]), lse.new_full((S, h), float("-inf"))
        for lo, hi, ids, keep in steps:
            q_rows = q.index_select(0, ids).view(1, 1, -1, Dk)
            mask = None if keep is None else keep.repeat_interleave(h, 0)[None, None]
            o_part, lse_part = _attend(q_rows, k[None, None, lo:hi], v[None, None, lo:hi], mask, call.scale)
            lse_part, before = lse_part.view(-1, h), lse_sum.index_select(0, ids)
            after = torch.logaddexp(before, lse_part)
            o_rows = o_sum.index_select(0, ids).mul_((before - after).exp_().unsqueeze(2))
            o_rows.addcmul_(o_part.view_as(o_rows), (lse_part - after).exp_().unsqueeze(2))
            o_sum.index_copy_(0, ids, o_rows)
            lse_sum.index_copy_(0, ids, after)
        o[b, :, g] = o_sum
        lse[b, :, g] = lse_sum


def _fused(q: Tensor, Dk: int, Dv: int) -> bool:
    """Whether one of torch's kernels gives o and lse for such head dims, without loss of digits (float32 on a GPU)."""
    if q.device.type == "cpu":
        return Dk == Dv
    return q.device.type == "cuda" and q.element_size() == 2 and Dk % 8 == 0 and Dv % 8 == 0


def _attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """o [N,H,M,Dv] in q's dtype and lse [N,H,M] of q [N,H,M,Dk], k [N,1,L,Dk], v [N,1,L,Dv] where keep [N,1,M or 1,L]
    (None: everywhere); a row that keeps none gets anything. There is no causal flag: keep is all there is to know.

    `scaled_dot_product_attention` computes lse and drops it. So its kernels are called by their own names, and where it
    would take none of them the same is written out.
    """
    N, H, M, Dk = q.shape
    L, Dv = v.shape[2:]
    if _fused(q, Dk, Dv):
        bias = None
        if keep is not None:
            room = -(-L // 16) * 16  # the GPU's kernel reads a bias by 16 numbers, from multiples of 16 on
            bias = torch.zeros(*keep.shape[:3], room, dtype=q.dtype, device=q.device)[..., :L].masked_fill_(~keep, float("-inf"))
        if q.is_cuda:
            q, k, v = map(_aligned, (q, k, v))
        k, v = k.expand(-1, H, -1, -1), v.expand(-1, H, -1, -1)
        if q.device.type == "cpu":
            o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
            return o, lse
        bias = None if bias is None else bias.expand(N, H, M, L)
        o, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, scale=scale)
        return o, lse[..., :M]  # the kernel pads its rows
    dtype = _accumulate(q.dtype)
    scores = ((q.to(dtype) * scale).reshape(N, 1, H * M, Dk) @ k.to(dtype).transpose(-1, -2)).view(N, H, M, L)
    if keep is not None:
        scores.masked_fill_(~keep, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = scores.sub_(lse.unsqueeze(-1)).exp_()
    return (p.view(N, 1, H * M, L) @ v.to(dtype)).view(N, H, M, Dv).to(q.dtype), lse


def _aligned(x: Tensor) -> Tensor:
    """x, copied unless all of its rows begin at multiples of 16 bytes, which torch's fused kernel on a GPU wants."""
    bits = x.data_ptr()
    for stride in x.stride()[:-1]:
        bits |= stride * x.element_size()
    return x if bits % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


class _Rows(NamedTuple):
    """Rows of about one length and where their keys are."""

    ids: Tensor  # [r], (b * S + s) * G + g
    keep: Tensor  # [r,L], False where padding repeats the first key (key 0 if there is none)
    filled: Tensor  # [r], whether the row selects anything
    position: Tensor  # [r,L]
    tables: list[Tensor]  # K and V as rows [N,D]
    places: list[Tensor]  # [r,L], where in each table a key is
    buffers: list[Tensor]  # [steps' rows * L,D]: memory made anew for every step costs a CPU as much time as the gather

    def gather(self, step: slice) -> list[Tensor]:
        """k [r,L,Dk] and v [r,L,Dv] of some of the rows, until the next gather."""
        gathered = []
        for table, place, buffer in zip(self.tables, self.places, self.buffers, strict=True):
            at = place[step]
            out = buffer[: at.numel()]
            gathered.append(torch.index_select(table, 0, at.reshape(-1), out=out).view(*at.shape, -1))
        return gathered


def _packed(call: Call, start: Tensor, end: Tensor, per_key: int, direction: str) -> Iterator[tuple[_Rows, list[slice]]]:
    """All rows that may select anything, in chunks, each with the steps in which to gather its keys.

    A chunk's indices take half of the budget and a step's keys and `per_key` numbers for each of them the other half: indices
    are small, and with steps alone a CPU would spend its time on their many short calls. A bucket's time is from the first chunk
    being made to the last one's being done with.
    """
    S, G = call.q.shape[1:3]
    n = call.selection.n
    start, end = start.reshape(-1, n), end.reshape(-1, n)
    (k_table, k_strides), (v_table, v_strides) = _table(call.k), _table(call.v)
    wide = _accumulate(call.q.dtype)
    copies = call.q.element_size() + (wide.itemsize if call.q.dtype != wide else 0)
    key_bytes = (call.k.shape[3] + call.v.shape[3]) * copies + per_key * wide.itemsize
    half = _budget(call) // 2
    timed, device = call.timed(), call.q.device.type
    buckets = [(ids, L, min(max(1, half // (L * key_bytes)), _STEP_ROWS, len(ids))) for ids, L in _buckets(call, start, end)]
    most = max((step * L for _, L, step in buckets), default=0)
    buffers = [_buffer(call, table, most) for table in (k_table, v_table)]
    for ids_of_bucket, L, step in buckets:
        started = events.now(device) if timed else 0.0
        for chunk in _slices(len(ids_of_bucket), max(step, half // (L * _INDEX_BYTES))):
            ids = ids_of_bucket[chunk]
            position, keep, filled = _positions(start[ids], end[ids], L)
            b, g = (ids // (S * G)).unsqueeze(1), (ids % G).unsqueeze(1)
            place = {steps: position * steps[2] + (b * steps[0] + g * steps[1]) for steps in {k_strides, v_strides}}
            places = [place[k_strides], place[v_strides]]
            yield _Rows(ids, keep, filled, position, [k_table, v_table], places, buffers), _slices(len(ids), step)
        if timed:
            ms = (events.now(device) - started) * 1e3
            events.emit("sel.timing.bucket", backend="sdpa-packed", direction=direction, length=L, rows=len(ids_of_bucket), ms=ms)


def _buffer(call: Call, table: Tensor, rows: int) -> Tensor:
    """Unwritten [rows,D], from the call's workspace where it has one."""
    taken = None if call.workspace is None else call.workspace.take((rows, table.shape[1]), table.dtype)
    return table.new_empty(rows, table.shape[1]) if taken is None else taken


def _slices(count: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


def _table(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """x [B,G,S_kv,D] as a table [N,D] of its rows, with the steps from one b, g, position to the next. Copies only odd strides."""
    D = x.shape[3]
    strides = [stride if size > 1 else 0 for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True)]
    if any(stride % D for stride in strides):
        x = x.contiguous()
        strides = list(x.stride()[:3])
    steps = (strides[0] // D, strides[1] // D, strides[2] // D)
    rows = 1 + sum((size - 1) * step for size, step in zip(x.shape[:3], steps, strict=True))
    return x.as_strided((rows, D), (D, 1)), steps


def _buckets(call: Call, start: Tensor, end: Tensor) -> list[tuple[Tensor, int]]:
    """(ids [r], L): each row in the bucket of the next power of two; by its length on a CPU, by a static bound on a GPU."""
    if _may_read(call):
        total = (end - start).sum(1)
        longest = int(total.max())
        powers = _powers(longest)
        level = torch.bucketize(total, total.new_tensor(powers))
        ids = [((level == i) & (total > 0)).nonzero().squeeze(1) for i in range(len(powers))]
        return [(rows, min(L, longest)) for rows, L in zip(ids, powers, strict=True) if len(rows)]
    return _static_buckets(call)


def _static_buckets(call: Call) -> list[tuple[Tensor, int]]:
    """Row s selects at most min(length_bound, t + 1) keys, where t is known without a look at the device."""
    B, S, G = call.q.shape[:3]
    S_kv = call.k.shape[2]
    bound = call.selection.length_bound(S_kv)
    device = call.q.device
    sequence = torch.arange(B, device=device).unsqueeze(1) * (S * G)
    buckets = []
    s0 = 0
    for L in _powers(bound):
        s1 = S if L >= bound else s0 if call.q_pos is not None else min(S, max(s0, L - (S_kv - S)))
        if s1 > s0 and bound > 0:  # where it is known that no row selects anything, there is nothing to gather
            ids = (sequence + torch.arange(s0 * G, s1 * G, device=device)).view(-1)
            buckets.append((ids, min(L, -(-bound // 16) * 16)))
        s0 = s1
    return buckets


def _powers(longest: int) -> list[int]:
    powers = [_SMALLEST_BUCKET]
    while powers[-1] < longest:
        powers.append(2 * powers[-1])
    return powers


def _positions(start: Tensor, end: Tensor, L: int) -> tuple[Tensor, Tensor, Tensor]:
    """position [r,L], keep [r,L], filled [r] of `_Rows` from clamped ranges start, end [r,n]."""
    # Clamped to L, a row that breaks a promised max_length loses keys, and nothing is written out of bounds.
    reach = (end - start).cumsum(1).clamp_(max=L)
    before = pad(reach[:, :-1], (1, 0))
    total = reach[:, -1:]
    # A range's keys are its places in the row, shifted; one more range, of padding, makes every row L long.
    shift = pad(start - before, (0, 1))
    repeats = torch.cat((reach - before, L - total), 1)
    place = torch.arange(L, device=start.device)
    position = torch.repeat_interleave(shift.view(-1), repeats.view(-1), output_size=len(start) * L).view(-1, L) + place
    keep = place < total
    return torch.where(keep, position, position[:, :1]), keep, total.squeeze(1) > 0


def _backward_by_row(call: Call, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq in q's dtype, dk, dv in the accumulating one, on any device; nothing is read back. Shares are added by key after a stable sort."""
    B, S, G, h, Dk = call.q.shape
    S_kv, Dv = call.v.shape[2:]
    q, do, lse, delta = call.q.reshape(-1, h, Dk), do.reshape(-1, h, Dv), lse.reshape(-1, h, 1), delta.reshape(-1, h, 1)
    dq = torch.zeros_like(q)  # a row's dq is complete in one step
    # Padding is added behind the keys, spread over as many places as a row has: no key gets it, no place gets all of it.
    keys = B * G * S_kv
    places = keys + _powers(call.selection.length_bound(S_kv))[-1]
    dk, dv = lse.new_zeros(places, Dk), lse.new_zeros(places, Dv)
    for rows, steps in _packed(call, *call.clamped_ranges(), 4 * h + 2 * (Dk + Dv) + _SORT_NUMBERS, "backward"):
        group = rows.ids // (S * G) * G + rows.ids % G
        spare = keys + torch.arange(rows.keep.shape[1], device=q.device)
        place = torch.where(rows.keep, group.unsqueeze(1) * S_kv + rows.position, spare)
        for step in steps:
            ids, drop = rows.ids[step], ~rows.keep[step].unsqueeze(1)
            q_rows, do_rows = q[ids].to(lse.dtype), do[ids].to(lse.dtype)
            k, v = (x.to(lse.dtype) for x in rows.gather(step))
            p = torch.exp(call.scale * (q_rows @ k.transpose(1, 2)) - lse[ids]).masked_fill_(drop, 0)
            ds = (do_rows @ v.transpose(1, 2)).sub_(delta[ids]).mul_(p).mul_(call.scale)
            dq.index_copy_(0, ids, torch.where(rows.filled[step, None, None], ds @ k, 0).to(dq.dtype))
            # index_put_, not index_add_: on a GPU that one adds by atomics, in any order.
            at = (place[step].reshape(-1),)
            dk.index_put_(at, (ds.transpose(1, 2) @ q_rows).view(-1, Dk), accumulate=True)
            dv.index_put_(at, (p.transpose(1, 2) @ do_rows).view(-1, Dv), accumulate=True)
    return dq.view(call.q.shape), dk[:keys].view(call.k.shape), dv[:keys].view(call.v.shape)


def _backward_by_key(call: Call, lse: Tensor, do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the accumulating dtype, on a CPU: tile after tile of keys, its rows in a fixed order."""
    S, h, Dk = call.q.shape[1], *call.q.shape[3:]
    Dv = call.v.shape[3]
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype, memory_format=torch.contiguous_format) for x in (call.q, call.k, call.v))
    for (b, g), steps in _by_key(call, *call.clamped_ranges()):
        q, do_bg, lse_bg, delta_bg = (x[b, :, g].to(lse.dtype).reshape(S, -1).contiguous() for x in (call.q, do, lse, delta))
        k_bg, v_bg = call.k[b, g].to(lse.dtype), call.v[b, g].to(lse.dtype)
        dq_bg = torch.zeros_like(q)
        for lo, hi, ids, keep in steps:
            k, v = k_bg[lo:hi], v_bg[lo:hi]
            q_rows, do_rows = q.index_select(0, ids).view(-1, Dk), do_bg.index_select(0, ids).view(-1, Dv)
            p = torch.addmm(lse_bg[ids].view(-1, 1), q_rows, k.T, beta=-1, alpha=call.scale).exp_()
            ds = torch.addmm(delta_bg[ids].view(-1, 1), do_rows, v.T, beta=-1).mul_(p)
            if keep is not None:
                drop = (~keep).repeat_interleave(h, 0)
                p.masked_fill_(drop, 0)
                ds.masked_fill_(drop, 0)
                # A key that only other rows selected meets ds = 0 in dq: it must be finite to give 0.
                k = torch.nan_to_num(k, 0, 0, 0)
            dk[b, g, lo:hi].addmm_(ds.T, q_rows, alpha=call.scale)
            dv[b, g, lo:hi].addmm_(p.T, do_rows)
            dq_bg.index_add_(0, ids, (ds @ k).view(-1, h * Dk))
        dq[b, :, g] = dq_bg.mul_(call.scale).view(S, h, Dk)
    return dq, dk, dv


class _Step(NamedTuple):
    """Rows of one sequence and group that selected all keys [lo, hi) of a tile (keep None) or some of them."""

    lo: int
    hi: int
    ids: Tensor  # [r], positions s of the rows
    keep: Tensor | None  # [r,hi - lo]


def _by_key(call: Call, start: Tensor, end: Tensor) -> Iterator[tuple[tuple[int, int], Iterator[_Step]]]:
    """Each (b, g) with its steps, tile after tile of keys: a tile and its rows, within the budget."""
    B, G = call.k.shape[:2]
    for (b, g), lists in zip(itertools.product(range(B), range(G)), _rows_by_tile(call, start, end), strict=True):
        yield (b, g), _steps(call, start[b, :, g], end[b, :, g], lists)


def _steps(call: Call, start: Tensor, end: Tensor, lists: Sequence[Tensor]) -> Iterator[_Step]:
    h, Dk = call.q.shape[3:]
    S_kv, Dv = call.v.shape[2:]
    width = _key_tile(call)
    size = max(1, _budget(call) // (h * (2 * Dk + 2 * Dv + 3 * width) * _accumulate(call.q.dtype).itemsize))
    for tile, rows in enumerate(lists):
        lo, hi = tile * width, min((tile + 1) * width, S_kv)
        first, last = (x.index_select(0, rows).clamp_(lo, hi).sub_(lo) for x in (start, end))
        whole = (last - first).sum(1) == hi - lo
        for masked in (False, True):
            chosen = (whole != masked).nonzero().squeeze(1)
            for step in _slices(len(chosen), size):
                some = chosen[step]
                yield _Step(lo, hi, rows[some], _inside(first[some], last[some], hi - lo) if masked else None)


def _key_tile(call: Call) -> int:
    """Keys of a tile: one block, so that rows take it whole, within what matrix products like."""
    return 64 if call.selection.block_size is None else min(max(call.selection.block_size, 32), 128)


def _rows_by_tile(call: Call, start: Tensor, end: Tensor) -> list[Sequence[Tensor]]:
    """For each (b, g) and each tile of keys the ascending rows whose ranges start, end [B,S,G,n] touch it."""
    S_kv, width = call.k.shape[2], _key_tile(call)

    def build() -> list[Sequence[Tensor]]:
        groups = zip(start.transpose(1, 2).flatten(0, 1), end.transpose(1, 2).flatten(0, 1), strict=True)
        return [_touching(*group, S_kv, width) for group in groups]

    # Forward, backward and other layers meet the same rows, unless their positions differ.
    return call.selection.plan(("sdpa-packed", S_kv, width), build, call.q_pos)  # type: ignore[no-any-return]


def _touching(start: Tensor, end: Tensor, S_kv: int, width: int) -> Sequence[Tensor]:
    tiles = -(-S_kv // width)
    filled = (end > start).int()
    # +1 in the tile where a range begins, -1 behind its last one: the running sum counts the ranges in a tile.
    count = start.new_zeros(len(start), tiles + 1, dtype=torch.int32)
    count.scatter_add_(1, start.clamp(max=S_kv - 1) // width, filled)
    count.scatter_add_(1, (end.clamp(max=S_kv) - 1).clamp_(min=0) // width + 1, -filled)
    touched = (count.cumsum(1, dtype=torch.int32)[:, :tiles] > 0).T
    return torch.split_with_sizes(touched.nonzero()[:, 1], touched.sum(1).tolist())


def _inside(start: Tensor, end: Tensor, width: int) -> Tensor:
    """[r,width] bool: which of `width` places the ranges start, end [r,n] hold."""
    count = start.new_zeros(len(start), width + 1, dtype=torch.int32)
    one = torch.ones_like(start, dtype=torch.int32)
    count.scatter_add_(1, start, one).scatter_add_(1, end, -one)
    return count[:, :width].cumsum(1, dtype=torch.int32) > 0
