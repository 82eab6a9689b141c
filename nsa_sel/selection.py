"""Selection: which keys each query row attends to, as half-open ranges, with static bounds and the plans that backends build from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core.indices import as_positions, as_rows, as_tensor, best_blocks, check_positive, ranges_of_blocks
from nsa_sel.core.ranges import check_ranges, disjoint, merged, sharing_of_blocks
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.settings.flags import debugging

_FACTS = frozenset(("ranges", "n", "block_size", "max_length", "disjoint"))  # never replaced
_MOST_PLANS = 16


class Measured(NamedTuple):
    """Exact statistics of a selection, over its rows (one row: one batch entry, query position and KV group)."""

    rows: int
    empty_rows: int
    max_length: int  # keys
    mean_length: float  # keys
    total_length: int  # keys, summed over rows
    # Blocks that 1, 2, 4 ... 64 adjacent rows (SHARING_TOKENS) choose between them over the blocks of one; None: not whole blocks.
    sharing: tuple[float, ...] | None = None


class Selection:
    """Half-open key ranges [B,S,G,n,2] of every query row, shared by the h heads of a KV group (NSA, arXiv 2502.11089, Eq. 10-12).

    ranges: int32 or int64, `[start, end)` in key positions; a range with end <= start is empty. `block_size` states that every
    non-empty range is one whole block [j*block_size, (j+1)*block_size); `max_length` bounds the keys of one row. Both are
    static: using a selection never reads the device. A row attends to the union of its ranges; `disjoint=True` promises that no
    key is in two of them, which saves finding the union on the device (under NSA_DEBUG_TRITON=1 ranges that overlap are refused).

    A Selection is bound to its ranges tensor: ranges, n, block_size, max_length and disjoint can't be replaced. What is derived from
    the ranges (plans of backends, `measure`'s statistics) is kept here, so that forward and backward, and layers that share a
    selection, build it once. Writing into the ranges through PyTorch drops it, and so does any write on a CPU. A write on a GPU
    that PyTorch's version counter does not see (a kernel of yours) must be followed by `invalidate()`; NSA_DEBUG_TRITON=1 checks.
    """

    def __init__(self, ranges: Tensor, block_size: int | None = None, max_length: int | None = None, *, disjoint: bool = False) -> None:
        self.ranges = ranges
        self.n: int = ranges.shape[-2]  # ranges a row, the empty ones included
        self.block_size = block_size
        self.max_length = max_length
        self.disjoint = disjoint or self.n < 2
        self.measured: Measured | None = None
        # What `measure` found: most keys of a row, sharing to two digits, and for the default positions among S_kv keys (S_kv, keys of
        # all rows).
        self._exact: _Exact | None = None
        self._cut_block: int | None = None  # where ranges were blocks before they were moved: their size; they stand in any order
        self._plans: dict[Any, _Plan] = {}
        self._version: int | None = None  # of the ranges that plans and `_exact` are of
        self._copy: Tensor | None = None  # of those ranges, where comparing costs little (CPU), or is asked for (debugging)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FACTS and name in self.__dict__:
            raise ArgumentError(
                f"selection.{name}", "replaced", "the value that the Selection was made with", "make a new Selection, or write into ranges"
            )
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: plans stay behind, since they belong to this tensor and its version."""
        exact = self._exact if self._is_current() else None
        return {**self.__dict__, "_exact": exact, "_plans": {}, "_version": None, "_copy": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._exact is not None:
            self._remember_version()

    @classmethod
    def from_ranges(
        cls, ranges: Tensor, block_size: int | None = None, max_length: int | None = None, *, disjoint: bool = False
    ) -> Selection:
        """A selection of key ranges, which shares the memory of `ranges`.

        Args:
            ranges: [B,S,G,n,2], or [B,G,n,2] for one query a sequence; int32 or int64; half-open [start, end).
            block_size: promises that every non-empty range is one whole block of so many keys.
            max_length: promises that no row selects more keys.
            disjoint: promises that no two ranges of a row share a key. By default the union is found at the first use.

        Raises:
            ArgumentError: another shape or dtype; under NSA_DEBUG_TRITON=1 also what `validate` finds.
        """
        selection = cls.unread(ranges, block_size, max_length, disjoint)
        if _reading(selection.ranges):
            selection.validate()
        return selection

    @classmethod
    def unread(cls, ranges: Tensor, block_size: int | None, max_length: int | None, disjoint: bool) -> Selection:
        """`from_ranges` without a look at what the ranges hold, whatever the flags say."""
        ranges = as_rows(as_tensor("ranges", ranges), "ranges", "[B,S,G,n,2] or [B,G,n,2]", 5)
        if ranges.shape[-1] != 2:
            remedy = "stack start and end; block indices go through Selection.from_blocks, scores through Selection.from_scores"
            raise ArgumentError("ranges", f"of shape {tuple(ranges.shape)}", "a last dimension of 2: start, end", remedy)
        check_positive("block_size", block_size, optional=True)
        check_positive("max_length", max_length, optional=True)
        return cls(ranges, block_size, max_length, disjoint=disjoint)

    @classmethod
    def from_blocks(
        cls, block_indices: Tensor, block_size: int, block_counts: Tensor | None = None, *, disjoint: bool = False
    ) -> Selection:
        """A selection of whole blocks: block j holds the keys [j * block_size, (j + 1) * block_size).

        Args:
            block_indices: [B,S,G,n], or [B,G,n] for one query a sequence; any integer dtype up to 64 bits; any order; negative
                entries are padding (uint8 has none: 255 is a block). A block that a row names twice counts once.
            block_size: keys of a block.
            block_counts: [B,S,G], or [B,G]: entry i of a row counts only if i < block_counts. By default all count.
            disjoint: promises that no row names a block twice, as top-k never does, which saves finding that out on the device.

        Raises:
            ArgumentError: a wrong shape or dtype; under NSA_DEBUG_TRITON=1 also a block that a row names twice.
        """
        selection = cls(ranges_of_blocks(block_indices, block_size, block_counts), block_size, disjoint=disjoint)
        if _reading(selection.ranges):
            selection.validate()
        return selection

    @classmethod
    def from_scores(
        cls,
        scores: Tensor,
        n: int,
        block_size: int,
        first: int = 1,
        local: int = 2,
        *,
        S_kv: int | None = None,
        q_pos: Tensor | None = None,
    ) -> Selection:
        """The n best blocks of every row by scores [B,S,G,blocks] (NSA Eq. 7-12): forced first and local ones, then by score.

        The row at position t sees the blocks that start at or before t. The `first` blocks of the sequence and the `local`
        last visible ones (the current block among them) are always taken, the others by falling score, ties to the lower
        index; a score of -inf or NaN excludes a block, +inf counts as the largest number. Positions are q_pos [S] or [B,S], by
        default S_kv - S + s; S_kv is by default S. Ascending block indices with -1 padding are kept in the result's ranges.
        Deterministic. Raises ArgumentError for shapes, dtypes or numbers that do not fit together.
        """
        return cls.from_blocks(best_blocks(scores, n, block_size, first, local, S_kv, q_pos), block_size, disjoint=True)

    @property
    def block_indices(self) -> Tensor:
        """[B,S,G,n] in the ranges' dtype, -1 where a range is empty. Raises ArgumentError when the ranges are not blocks."""
        if self.block_size is None:
            raise ArgumentError("block_size", None, "the size of the blocks", "build the selection from blocks, or pass block_size=")
        start, end = self.ranges.unbind(-1)
        return torch.where(end > start, start // self.block_size, -1)

    def length_bound(self, S_kv: int) -> int:
        """The most keys that one row may select among S_kv, at any positions: from the static facts and, once taken, `measure`."""
        exact = self.exact()
        bound = S_kv if exact is None else min(S_kv, exact[0])
        if self.max_length is not None:
            bound = min(bound, self.max_length)
        if self.block_size is not None:
            bound = min(bound, self.n * self.block_size)
        return bound

    def range_bound(self, S_kv: int) -> int:
        """The most keys of one range among S_kv."""
        size = self.block_size or self._cut_block
        return self.length_bound(S_kv) if size is None else min(size, S_kv)

    @property
    def sharing(self) -> tuple[float, ...] | None:
        """`Measured.sharing` to two digits while it holds: None before `measure`, and once the ranges were written since."""
        exact = self.exact()
        return None if exact is None else exact[1]

    def exact(self) -> tuple[int, tuple[float, ...] | None] | None:
        """The most keys of a row and `sharing`, as `measure` found them, while they hold."""
        return None if self._exact is None or not self._holds() else self._exact[:2]

    def total_length(self, S_kv: int) -> int | None:
        """Keys of all rows at the positions S_kv - S + s, as `measure(S_kv)` counted them while that holds; else None."""
        total = None if self._exact is None or not self._holds() else self._exact.total
        return total[1] if total is not None and total[0] == S_kv else None

    def disjoint_ranges(self) -> Tensor:
        """Ranges [B,S,G,n,2], contiguous, of the same keys, each key in one range of its row: the union that a row attends to.

        The ranges as they are where that was promised; else in order of their starts, each cut where the ones before it end. Kept
        like a plan, and found anew inside a CUDA graph, whose replays must follow ranges that were written since.
        """
        if self.disjoint:
            return self.ranges.contiguous()
        if _capturing(self.ranges):
            return disjoint(self.ranges)
        found: Tensor = self.plan(("disjoint",), lambda: disjoint(self.ranges))
        return found

    def plan(self, key: tuple[Any, ...], build: Callable[[], Any], *made_from: Any) -> Any:
        """What `build()` returned for `key` the last time; built anew when the ranges were written since, or when what else
        it is `made_from`, tensors or plain values, was written or is something else. The last `_MOST_PLANS` keys are kept.

        Tensors made under torch.inference_mode() do not tell whether they were written: plans of them are built every time.
        """
        states = [_state(x) for x in made_from]
        if self.ranges.is_inference() or _UNKNOWN in states:
            return build()
        if not self._is_current():
            self.invalidate()
            self._remember_version()
        kept = self._plans.get(key)
        if kept is None or kept.states != states:
            kept = _Plan(states, made_from, build())
            if len(self._plans) >= _MOST_PLANS:  # a cache that grows has new keys at every step
                self._plans.pop(next(iter(self._plans), None), None)
            self._plans[key] = kept
        return kept.value

    def _holds(self) -> bool:
        """Whether what was found in the ranges is true of them still, and will be of those that a captured call meets."""
        return not _capturing(self.ranges) and self._is_current()

    def _is_current(self) -> bool:
        """Whether the ranges were not written since `_remember_version`. Raises ArgumentError where debugging finds a write on a GPU
        that nothing else would have noticed."""
        ranges = self.ranges
        if ranges.is_inference() or self._version != ranges._version:
            return False
        if self._copy is None or torch.compiler.is_compiling() or torch.equal(self._copy, ranges):
            return True
        if self._on_gpu:
            raise ArgumentError(
                "selection.ranges", "written without PyTorch's knowledge", "writes through PyTorch, or followed by selection.invalidate()",
                "call selection.invalidate() after a kernel of yours has written the ranges",
            )  # fmt: skip
        return False

    def _remember_version(self) -> None:
        ranges = self.ranges
        if not ranges.is_inference():
            self._version = ranges._version
            self._copy = ranges.detach().clone() if not self._on_gpu or _reading(ranges) else None

    @property
    def _on_gpu(self) -> bool:
        return self.ranges.is_cuda

    def invalidate(self) -> None:
        """Forget what was derived from the ranges, plans and what `measure` found: call it after a write into them on a GPU that
        PyTorch does not see, such as a kernel of your own."""
        self.forget_plans()
        self._exact = self._version = self._copy = None

    def forget_plans(self) -> None:
        """Build plans anew when they are next needed: to measure them, or to free their memory."""
        self._plans.clear()

    def merge(self) -> Selection:
        """The same keys as sorted, disjoint ranges: overlapping and touching ranges of a row become one, empty ones go last."""
        far = torch.iinfo(self.ranges.dtype).max
        bound = self.length_bound(far)
        return Selection(merged(self.ranges), None, bound if bound < far else None, disjoint=True)

    def shifted(self, first: Tensor, limit: Tensor, S_kv: int, *, whole_blocks: bool, max_length: int) -> Selection:
        """Each row's keys below its `limit`, counted from key `first` on: a selection within a part of S_kv keys as one over all of them.

        first, limit: [B,S]. whole_blocks: every `first` is a multiple of block_size; a block is then kept whole where it begins below
        `limit`, and whoever uses the result must stop there. Else ranges are cut, and no longer blocks. max_length: a bound on the
        keys of a row, from elsewhere.
        """
        size = self.block_size if whole_blocks else None
        ranges = self.ranges if S_kv + (size or 0) < torch.iinfo(self.ranges.dtype).max else self.ranges.long()
        first, limit = (x.to(ranges.dtype)[:, :, None, None] for x in (first, limit))
        start, end = ranges.unbind(-1)
        start = start.clamp(min=0)
        end = torch.where(start < limit, end if size else end.minimum(limit), 0)
        ranges, bound = torch.stack((start.minimum(limit) + first, end + first), dim=-1), min(self.length_bound(S_kv), max_length)
        moved = Selection(ranges, size, bound, disjoint=self.disjoint)
        moved._cut_block = None if size else self.block_size
        if size and self._exact is not None and self._holds():
            moved._exact = self._exact._replace(total=None)
            moved._remember_version()
        return moved

    def part(self, ranges: Tensor, S_kv: int, whole_blocks: bool) -> Selection:
        """These static facts, without what was measured, of other rows' ranges, or of what was cut off from them, among S_kv keys.

        whole_blocks: no block was cut in two.
        """
        alike = Selection(ranges, self.block_size, self.max_length, disjoint=self.disjoint)
        if self.block_size is None or whole_blocks:
            return alike
        cut = Selection(ranges, None, alike.length_bound(S_kv), disjoint=self.disjoint)
        cut._cut_block = self.block_size
        return cut

    def validate(self) -> Selection:
        """Check what the static facts promise; reads the device. Returns self, raises ArgumentError naming the first bad row.

        Ranges of a row must not overlap; unless they are whole blocks they must also be sorted by start; blocks must be whole.
        """
        check_ranges(self.ranges, self.block_size, self.max_length, in_order=self._cut_block is None)
        return self

    def measure(self, S_kv: int | None = None, q_pos: Tensor | None = None) -> Measured:
        """Exact statistics, kept as `measured`. Reads the device: never on a hot path.

        With S_kv the lengths are those after the causal clamp at q_pos [S] or [B,S] (default S_kv - S + s). From then on
        `length_bound` knows the longest row before any clamp, since another call may stand at other positions, and `sharing`
        how alike neighbours choose; writing the ranges in place makes both forget, and ranges made under
        torch.inference_mode() are never trusted to be unwritten.
        """
        if S_kv is not None and (not isinstance(S_kv, int) or isinstance(S_kv, bool) or not 0 <= S_kv < 1 << 62):
            raise ArgumentError("S_kv", shown(S_kv), "a whole number >= 0, or None", "pass the number of keys, k.shape[2]")
        start, end = self.disjoint_ranges().long().unbind(-1)
        start = start.clamp(min=0)
        unclamped = (end - start).clamp(min=0).sum(-1)
        most = int(unclamped.max()) if unclamped.numel() else 0
        if S_kv is not None:
            B, S = start.shape[:2]
            position = torch.arange(S_kv - S, S_kv, device=start.device) if q_pos is None else q_pos
            position = as_positions(position, B, S, start.device)
            end = torch.minimum(end, (position + 1).clamp(max=S_kv)[:, :, None, None])
        lengths = (end - start).clamp(min=0).sum(-1)
        rows = lengths.numel()
        total = int(lengths.sum())
        longest = int(lengths.max()) if rows else 0
        sharing = None if self.block_size is None else sharing_of_blocks(torch.where(end > start, start // self.block_size, -1))
        self.measured = Measured(rows, int((lengths == 0).sum()), longest, total / max(1, rows), total, sharing)
        # Two digits: calls whose selections are as good as alike share one remembered decision.
        rounded = sharing and tuple(round(ratio, 2) for ratio in sharing)
        if not self._is_current():
            self.invalidate()
            self._remember_version()
        self._exact = _Exact(most, rounded, (S_kv, total) if S_kv is not None and q_pos is None else None)
        return self.measured

    def to(self, device: torch.device | str) -> Selection:
        """The same selection on another device, without its plans."""
        if not isinstance(device, torch.device | str | int):
            raise ArgumentError("device", shown(device), "a torch.device or its name", "pass q.device; ranges keep their dtype")
        moved = Selection(self.ranges.to(device), self.block_size, self.max_length, disjoint=self.disjoint)
        moved.measured = self.measured
        if self._exact is not None and self._is_current():
            moved._exact = self._exact
            moved._remember_version()
        return moved

    def __repr__(self) -> str:
        facts = f"block_size={self.block_size}, max_length={self.max_length}, disjoint={self.disjoint}, measured={self.measured}"
        return f"Selection(ranges={tuple(self.ranges.shape)} {self.ranges.dtype} on {self.ranges.device}, {facts})"


def _reading(ranges: Tensor) -> bool:
    """Whether what a selection holds is to be checked when it is made: not within a CUDA graph, where nothing can be read. What is
    compiled has it checked when it runs, with the call."""
    return not torch.compiler.is_compiling() and debugging() and not _capturing(ranges)


def _capturing(ranges: Tensor) -> bool:
    """Whether a CUDA graph is being captured, whose replays follow what is written into the ranges by then: nothing read now holds."""
    return ranges.is_cuda and torch.cuda.is_current_stream_capturing()


class _Exact(NamedTuple):
    """What `measure` found and calls may use."""

    longest: int
    sharing: tuple[float, ...] | None
    total: tuple[int, int] | None


class _Plan(NamedTuple):
    """A plan, and what tells whether it still holds."""

    states: list[Any]
    made_from: tuple[Any, ...]  # kept, so that no other tensor comes to lie where one of them lay
    value: Any


_UNKNOWN = "unknown"  # the state of a tensor that does not tell whether it was written


def _state(x: Any) -> Any:
    """What differs once x is another tensor or was written; plain values are compared themselves."""
    if not isinstance(x, Tensor):
        return x
    if x.is_cpu:  # by its values, which are few: a write through NumPy has no version
        return x.dtype, x.shape, x.detach().contiguous().numpy().tobytes()
    return _UNKNOWN if x.is_inference() else (x.data_ptr(), x.dtype, x.shape, x.stride(), x._version)
