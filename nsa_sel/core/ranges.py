"""Ranges [B,S,G,n,2] of keys, half-open [start, end): union, merging, checks, how much adjacent rows share; ranges of
blocks, and the best blocks by score.

On a GPU one kernel makes ranges from block indices and removes duplicates, and one finds the best blocks; plain PyTorch
does so elsewhere and where operations are traced. A CUDA graph captures kernels that calls before the capture have
loaded, else PyTorch's operations: loading a kernel during a capture breaks it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core import transforms
from nsa_sel.core.arguments import (
    as_positions,
    as_tensor,
    check_flag,
    check_forced,
    check_positive,
    checked_blocks,
    is_whole,
    padded,
    range_dtype,
    whole_blocks,
)
from nsa_sel.core.plans import MOST_SEARCHED
from nsa_sel.core.request import FEW_TOKENS, SHARING_TOKENS
from nsa_sel.core.transforms import capturing
from nsa_sel.errors import ArgumentError, shown, warn
from nsa_sel.settings.flags import value_of

_SORTED_AT_ONCE = 1 << 22  # blocks that `sharing_of_blocks` sorts at a time, to bound its memory
_SAMPLED = 1 << 17  # blocks that `sample_rows` takes: of 16 a row, 128 tiles


def disjoint(ranges: Tensor) -> Tensor:
    """Return the ranges of every row sorted by start, each without the keys of those before it; empty ones are [0, 0)."""
    start, end, before = _by_start(ranges)
    start = torch.maximum(start, before)
    return torch.where((end > start).unsqueeze(-1), torch.stack((start, end), dim=-1), 0)


def merged(ranges: Tensor) -> Tensor:
    """Sorted, disjoint ranges of the same keys: overlapping and adjacent ranges of a row become one, empty ones come
    last."""
    start, end, before = _by_start(ranges)
    slot = torch.cumsum((start > before).to(torch.int64), dim=-1) - 1
    merged_start = torch.full_like(start, torch.iinfo(start.dtype).max).scatter_reduce(-1, slot, start, "amin")
    merged_end = torch.zeros_like(end).scatter_reduce(-1, slot, end, "amax")
    return torch.stack((torch.where(merged_end > 0, merged_start, 0), merged_end), dim=-1)


def _by_start(ranges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return start and end of every range, sorted by start, with [largest number, 0) for empty ones, which come last; and the
    largest end before each, -1 for the first."""
    start, end = ranges.unbind(-1)
    start = start.clamp(min=0)
    filled = end > start
    start, order = torch.sort(torch.where(filled, start, torch.iinfo(start.dtype).max), dim=-1, stable=True)
    end = torch.where(filled, end, 0).gather(-1, order)
    return start, end, torch.nn.functional.pad(torch.cummax(end, dim=-1).values[..., :-1], (1, 0), value=-1)


def check_ranges(ranges: Tensor, block_size: int | None, max_length: int | None, in_order: bool) -> None:
    """Raise ArgumentError for the first row that breaks a promise of its Selection. Reads the device.

    in_order: whether ranges that are not whole blocks must be sorted by start.
    """
    start, end = ranges.unbind(-1)
    start, filled = start.clamp(min=0), end > start.clamp(min=0)
    if block_size is not None:
        bad = filled & ((start % block_size != 0) | (end - start != block_size))
        _refuse(ranges, bad.any(-1), f"has a range that is not one block of {block_size}", "pass block_size=None, or align the ranges")
    if not in_order:
        order = torch.argsort(torch.where(filled, start, torch.iinfo(start.dtype).max), dim=-1)
        start, end, filled = (x.gather(-1, order) for x in (start, end, filled))
    # Empty ranges are skipped: they inherit the largest end before them.
    reach = torch.cummax(torch.where(filled, end, 0), dim=-1).values
    before = torch.nn.functional.pad(reach[..., :-1], (1, 0), value=0)
    if block_size is None:
        _refuse(ranges, (filled & (start < before)).any(-1), "has overlapping or unsorted ranges", "call selection.merge()")
    else:
        far = torch.iinfo(start.dtype).max
        ordered = torch.sort(torch.where(filled, start, far), dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < far)
        _refuse(ranges, twice.any(-1), "has a block twice", "drop the duplicates, or call selection.merge()")
    if max_length is not None:
        longer = torch.where(filled, end - start, 0).sum(-1) > max_length
        _refuse(ranges, longer, f"selects more than max_length = {max_length} keys", "raise max_length, or leave it out")


def _refuse(ranges: Tensor, bad: Tensor, what: str, remedy: str) -> None:
    if bool(bad.any()):
        b, s, g = bad.nonzero()[0].tolist()
        row = ranges[b, s, g].tolist()
        raise ArgumentError(f"selection row (b={b}, s={s}, g={g})", f"{row}, which {what}", "disjoint ranges as Selection promises", remedy)


def distinct_blocks(blocks: Tensor) -> Tensor:
    """Distinct blocks of each size of `SHARING_TOKENS`, summed over tiles: [7] int64, from rows of whole tiles
    [tiles,64,n] (-1: none).

    One sort by (block, row) serves all sizes: without its last e bits a key names a block and a tile of 2^e rows.
    """
    row = torch.arange(SHARING_TOKENS[-1], device=blocks.device)[:, None]
    keys = torch.where(blocks >= 0, blocks.long() * SHARING_TOKENS[-1] + row, -1).flatten(1).sort(dim=1).values
    keys = torch.nn.functional.pad(keys, (1, 0), value=-1)
    changed = keys[:, 1:] ^ keys[:, :-1]
    return torch.stack([torch.count_nonzero(changed >> tokens.bit_length() - 1) for tokens in SHARING_TOKENS])


def sharing_of(distinct: Tensor, rows: int, tiles_of: int) -> tuple[float, ...]:
    """Mean number of distinct blocks of each tile size over that of one row. Reads the device.

    Args:
        distinct: sums over tiles, of `distinct_blocks`.
        rows: of each stretch of rows that was cut into tiles.
        tiles_of: stretches.
    """
    means = [count / max(1, tiles_of * -(-rows // tokens)) for count, tokens in zip(distinct.tolist(), SHARING_TOKENS, strict=True)]
    return tuple(mean / means[0] if means[0] else 1.0 for mean in means)


def sharing_of_blocks(blocks: Tensor) -> tuple[float, ...]:
    """Mean number of distinct blocks of each tile size over that of one row, from block indices [B,S,G,n] (-1: none)."""
    B, S, G, n = blocks.shape
    most = SHARING_TOKENS[-1]
    rows = torch.nn.functional.pad(blocks.transpose(1, 2).reshape(B * G, S, n), (0, 0, 0, -S % most), value=-1)
    distinct = torch.zeros(len(SHARING_TOKENS), dtype=torch.int64, device=blocks.device)
    for chunk in torch.split(rows.reshape(B * G * -(-S // most), most, n), max(1, _SORTED_AT_ONCE // max(1, most * n))):
        distinct += distinct_blocks(chunk)
    return sharing_of(distinct, S, B * G)


def sample_rows(B: int, S: int, G: int, n: int, device: torch.device | str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices b, s, g [tiles, rows of a tile] of a sample of rows, without reading the device.

    Tiles have 64 adjacent rows (S rows if there are fewer), and are evenly spread over sequences and groups: as many as
    have about `_SAMPLED` blocks.
    """
    most = SHARING_TOKENS[-1]
    each = max(1, S // most)  # of one sequence and group; rows behind the last whole tile are left out
    total = B * G * each
    count = min(total, max(1, _SAMPLED // (most * n)))
    tile = (2 * torch.arange(count, device=device) + 1) * total // (2 * count)
    group = tile // each
    s = (tile % each)[:, None] * most + torch.arange(min(S, most), device=device)
    return (group // G)[:, None].expand_as(s), s, (group % G)[:, None].expand_as(s)


def sampled_sharing(ranges: Tensor, limit: Tensor, block_size: int) -> tuple[float, ...]:
    """`sharing_of_blocks` of sampled rows, to two digits. Reads the device.

    Args:
        ranges: of the rows, [tiles, rows of a tile, n, 2] in whole blocks of block_size.
        limit: keys that each row sees, [tiles, rows of a tile].
    """
    start, end = ranges.unbind(-1)
    start = start.clamp(min=0)
    blocks = torch.where(end.minimum(limit.to(end.dtype).unsqueeze(-1)) > start, start // block_size, -1)
    tiles, rows = blocks.shape[:2]
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, SHARING_TOKENS[-1] - rows), value=-1)
    return rounded(sharing_of(distinct_blocks(blocks), rows, tiles))


def rounded(sharing: tuple[float, ...]) -> tuple[float, ...]:
    """Two digits after the point, so that similar selections share one cached decision."""
    return tuple(round(ratio, 2) for ratio in sharing)


KERNELS = "nsa_sel.backends._triton.ranges"  # imported with the first block indices on a GPU
TOP_N = "nsa_sel.backends._triton.top_n"  # with the first scores
_failed: list[bool] = []  # an entry once the kernel has failed: it is not tried again


class Blocks(NamedTuple):
    """The checked arguments of `Selection.from_blocks`, and the facts of their class if a kernel takes them."""

    indices: Tensor  # [B,S,G,n] int32 or int64
    counts: Tensor | None  # [B,S,G]
    facts: _Facts | None
    captured: bool = False  # by a CUDA graph

    def kept(self) -> bool:
        """Return True if a selection keeps the indices, and makes ranges only when they are asked for. In a CUDA graph,
        those of many rows are made at once: every call would make them again."""
        facts = self.facts
        return facts is not None and (facts.few if self.captured else facts.kept)


class _Facts(NamedTuple):
    """Facts of all block indices of a class that a kernel takes."""

    as_given: int  # 4: checks change nothing in indices [B,S,G,n]; 3: they add S to [B,G,n]; 0: they change more
    dtype: torch.dtype  # of the ranges
    few: bool  # attention kernels can read the indices themselves, and skip duplicates
    kept: bool  # outside of a capture, indices stand for ranges until these are needed
    find_unique: bool

    @classmethod
    def of(cls, indices: Tensor, counts: Tensor | None, as_given: int, block_size: int, disjoint: bool, own: bool) -> _Facts:
        dtype = torch.int64 if indices.dtype == torch.int64 else range_dtype(block_size)
        few, several = indices.shape[1] <= FEW_TOKENS, not disjoint and indices.shape[-1] > 1
        # A plan made in inference mode could not be kept: see `Selection.plan`.
        find_unique = several and not few and indices.shape[-1] <= MOST_SEARCHED and not torch.is_inference_mode_enabled()
        as_they_are = counts is None and indices.is_contiguous()
        # Without a version counter nobody would notice that indices were written before their first use.
        kept = as_they_are and (own or not indices.is_inference()) and (few or not torch.is_inference_mode_enabled())
        return cls(as_given, dtype, few and as_they_are, kept, find_unique)


_TRACED = _Facts(0, torch.int32, False, True, False)  # in a compiled graph the ops make the ranges


def checked_blocks_of(block_indices: Tensor, block_size: int, block_counts: Tensor | None, disjoint: bool, own: bool = False) -> Blocks:
    """Return the checked arguments of `Selection.from_blocks`; those of a class that passed before are not checked
    again. own: this package has made the indices, and writes them no more."""
    given = (block_indices,) if block_counts is None else (block_indices, block_counts)
    key = _key(block_indices, block_size, block_counts, disjoint, own)
    facts: _Facts | None = None if key is None else transforms.find_class(_classes.get(key, ()), *given)
    if facts is not None and facts.as_given:
        indices = block_indices if facts.as_given == 4 else block_indices.unsqueeze(1)
        return Blocks(indices, block_counts, facts, capturing(indices))
    check_flag("disjoint", disjoint)
    indices, counts = checked_blocks(block_indices, block_size, block_counts)
    if torch.compiler.is_compiling():
        # A copy, because a write to the indices must not change the selection; the compiler drops it if there is none.
        return Blocks(padded(indices, counts).clone(memory_format=torch.contiguous_format), None, _TRACED)
    if facts is None and _takes(indices):
        same = counts is block_counts and indices.dtype == block_indices.dtype
        facts = _Facts.of(indices, counts, block_indices.dim() if same else 0, block_size, disjoint, own)
        if key is not None:
            if len(_classes) >= _MOST:
                _classes.clear()
            _classes[key] = transforms.with_class(_classes.get(key, ()), facts, *given)
    return Blocks(indices, counts, facts, facts is not None and capturing(indices))


def ranges_of_blocks(blocks: Blocks, block_size: int) -> tuple[Tensor, Tensor | None]:
    """Return ranges [B,S,G,n,2], and those of distinct blocks (`ranges.disjoint`) if a kernel computed them."""
    indices, counts, facts, _ = blocks
    results: tuple[Tensor, Tensor | None] | None = None
    if facts is not None and not _failed:
        results = _run("block_ranges", indices, counts, block_size, facts.dtype, facts.find_unique, blocks.captured)
    return (whole_blocks(padded(indices, counts), block_size), None) if results is None else results


def outside_capture(indices: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return `make()`, finished, of block indices that a kernel takes; a capture of the current stream does not hold it."""
    made: Tensor = _kernel().outside_capture(indices, make)
    return made


_classes: dict[Any, transforms.Classes] = {}
_MOST = 1024  # shapes


def _key(block_indices: Any, block_size: Any, block_counts: Any, disjoint: Any, own: bool) -> tuple[Any, ...] | None:
    """Return the facts that guards do not compare, and shapes, which keep classes few; None if no kernel runs or guards
    can't be used."""
    plain = type(block_indices) in transforms.PLAIN and transforms.untransformed()
    if not plain or type(block_size) is not int or type(disjoint) is not bool:
        return None
    try:
        return block_indices.shape, block_size, None if block_counts is None else block_counts.shape, disjoint, own
    except (AttributeError, RuntimeError):  # no tensor, or a nested one
        return None


def distinct_ranges(ranges: Tensor, block_size: int | None) -> Tensor:
    """`ranges.disjoint`, of blocks on a GPU by one kernel."""
    by_kernel = block_size is not None and _takes(ranges)
    results: Tensor | None = _run("distinct_ranges", ranges, block_size, capturing(ranges)) if by_kernel else None
    return disjoint(ranges) if results is None else results


def _takes(x: Tensor) -> bool:
    """Return True if a kernel takes indices or ranges."""
    if not on_gpu(x) or not transforms.plain(x) or not x.numel():
        return False
    return not _failed and _kernel() is not None


def _run(name: str, x: Tensor, *others: Any) -> Any:
    """Run a function of the kernels' module on the device of x. Return None once one has failed."""
    try:
        if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():
            with torch.cuda.device(x.device):
                return getattr(_kernel(), name)(x, *others)
        return getattr(_kernel(), name)(x, *others)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        _failed.append(True)
        warn(f"the kernel of block indices failed, PyTorch's operations replace it from now on: {error!r}")
        return None


def on_gpu(indices: Tensor) -> bool:
    """Return True if the kernel may run."""
    return indices.is_cuda


@functools.cache
def _kernel(module: str = KERNELS) -> Any:
    """Return a module of kernels; None without Triton."""
    return importlib.import_module(module) if importlib.util.find_spec("triton") is not None else None


TOP_N_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def best_blocks(scores: Tensor, n: int, block_size: int, first: int, local: int, S_kv: int | None, q_pos: Tensor | None) -> Tensor:
    """Ranges [B,S,G,n,2] of the best blocks, ascending, padded with [0, 0), from the arguments of
    `Selection.from_scores`."""
    scores = as_tensor("scores", scores)
    S_kv = _check_scores(scores, n, block_size, first, local, S_kv, q_pos)
    B, S, G, blocks = scores.shape
    if q_pos is not None:
        q_pos = as_positions(q_pos, B, S, scores.device)
    kernel = _kernel(TOP_N) if _top_n_takes(scores) else None
    if kernel is None or not kernel.chooses(blocks, n):
        return whole_blocks(sorted_blocks(scores, n, block_size, first, local, S_kv, q_pos), block_size)
    ranges = torch.empty(B, S, G, n, 2, dtype=range_dtype(block_size), device=scores.device)
    with torch.cuda.device(scores.device):
        kernel.top_n(scores.detach(), ranges, block_size, first, local, 0 if q_pos is not None else S_kv - S, q_pos)
    return ranges


def sorted_blocks(scores: Tensor, n: int, block_size: int, first: int, local: int, S_kv: int, q_pos: Tensor | None) -> Tensor:
    """Ascending indices [B,S,G,n] int32 of the best blocks, padded with -1, by a stable sort, on any device. Arguments
    are checked."""
    _, S, _, blocks = scores.shape
    positions = torch.arange(S_kv - S, S_kv, device=scores.device) if q_pos is None else q_pos
    current = positions.expand(scores.shape[:2])[:, :, None, None] // block_size
    block = torch.arange(blocks, device=scores.device)
    forced = (block < first) | (block > current - local)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    # Only forced blocks get infinity.
    key = torch.nan_to_num(wide, nan=float("-inf"), posinf=torch.finfo(wide.dtype).max, neginf=float("-inf"))
    key = key.masked_fill(forced, float("inf")).masked_fill(block > current, float("-inf"))
    # A stable sort: topk does not define the order of ties.
    key, order = (x[..., :n] for x in torch.sort(key, dim=-1, descending=True, stable=True))
    chosen = torch.where(key > float("-inf"), order, blocks)
    chosen = torch.sort(chosen, dim=-1).values
    if blocks < n:
        chosen = torch.nn.functional.pad(chosen, (0, n - blocks), value=blocks)
    return torch.where(chosen < blocks, chosen, -1).int()


def _check_scores(scores: Tensor, n: int, block_size: int, first: int, local: int, S_kv: int | None, q_pos: Tensor | None) -> int:
    """Return S_kv of good arguments, or 0 where q_pos gives the positions; else ArgumentError."""
    shape = f"{scores.dtype} of shape {tuple(scores.shape)}"
    if not scores.is_floating_point():
        raise ArgumentError("scores", shape, "floating point [B,S,G,blocks]", "call .float() on it")
    if scores.dim() != 4:
        raise ArgumentError(
            "scores",
            shape,
            "floating point [B,S,G,blocks]",
            "add the missing axes" if scores.dim() < 4 else "sum over the heads of a group, which share one score (NSA Eq. 10)",
        )
    for name, number in (("n", n), ("block_size", block_size)):
        check_positive(name, number)
    check_forced(first, local, n)
    if q_pos is not None:
        return 0
    _, S, _, blocks = scores.shape
    S_kv = S if S_kv is None else S_kv
    if not is_whole(S_kv) or not S <= S_kv < 1 << 62:
        raise ArgumentError("S_kv", shown(S_kv), f"a whole number >= S = {S}", "pass q_pos= when rows outnumber keys")
    if -(-S_kv // block_size) != blocks:
        raise ArgumentError(
            "scores", f"[B,S,G,blocks] = {tuple(scores.shape)} over {blocks} blocks of {block_size}",
            f"{-(-S_kv // block_size)} blocks for S_kv = {S_kv}",
            "check block_size and the order of axes; where S_kv is not S, pass S_kv= (the number of keys) or q_pos=",
        )  # fmt: skip
    return S_kv


def _top_n_takes(scores: Tensor) -> bool:
    """Return True if the kernel may run: on plain GPU tensors of its dtypes, unless flags keep Triton out or ask for
    the reference."""
    if not scores.is_cuda or scores.dtype not in TOP_N_DTYPES or type(scores) is not Tensor or torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch.cuda.get_device_capability(scores.device) < (8, 0):
        return False
    return value_of("NSA_USE_TRITON_SEL") is not False and not value_of("NSA_FORCE_PARITY")
