"""Selection: which keys each query row attends to, as half-open ranges, with static bounds and cached plans that
backends build from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core.arguments import as_positions, as_rows, as_tensor, check_flag, check_positive
from nsa_sel.core.plans import DISJOINT, MOST_SEARCHED, Plan, PlanInBuffer, Plans, make_room, tensors_of
from nsa_sel.core.ranges import (
    Blocks,
    best_blocks,
    check_ranges,
    checked_blocks_of,
    distinct_ranges,
    merged,
    outside_capture,
    ranges_of_blocks,
    rounded,
    sharing_of_blocks,
)
from nsa_sel.core.transforms import capturing, traces
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.settings.flags import debugging

_FACTS = frozenset(("ranges", "n", "block_size", "max_length", "disjoint"))  # can't be replaced
_NOT_COPIED = dict.fromkeys(("_blocks", "_made", "_captured"))


class Measured(NamedTuple):
    """Exact statistics of a selection, over its rows (one row: one batch entry, query position and KV group)."""

    rows: int
    empty_rows: int
    max_length: int  # keys
    mean_length: float  # keys
    total_length: int  # keys, summed over rows
    # Distinct blocks of 1, 2, 4 ... 64 adjacent rows (SHARING_TOKENS) over those of one row; None: not whole blocks.
    sharing: tuple[float, ...] | None = None


class Exact(NamedTuple):
    """The statistics of `measure` that decisions use."""

    longest: int  # keys of the longest row, before the causal clamp
    sharing: tuple[float, ...] | None  # to two digits
    mean: int  # keys of a row on average, to two digits
    total: tuple[int, int] | None  # S_kv, and the keys of all rows at the default positions


class Snapshot(NamedTuple):
    """All that is cached for one version of the ranges. It is replaced as a whole, so that a thread sees an old one or
    a new one."""

    version: int  # of the ranges
    copy: Tensor | None  # of the ranges, where comparing is cheap (CPU) or asked for (debugging)
    exact: Exact | None
    plans: Plans


class Made(NamedTuple):
    """The ranges that were made from block indices."""

    plan: Plan | PlanInBuffer  # of (disjoint ranges, ranges) or of (ranges,)
    stream: int  # that made them
    waited: list[int]  # other streams that have waited for it


UNKNOWN = "unknown"  # the state of a tensor without a version counter


def state_of(x: Any) -> Any:
    """Return a value that changes when the tensor x is written or replaced; of a plain value the value itself."""
    if not isinstance(x, Tensor):
        return x
    if x.is_cpu:  # compare its few values: a write through NumPy bumps no version
        return x.dtype, x.shape, x.detach().contiguous().numpy().tobytes()
    return UNKNOWN if x.is_inference() else (x.data_ptr(), x.dtype, x.shape, x.stride(), x._version)


def validates(ranges: Tensor) -> bool:
    """Return True if a new selection is validated: under NSA_DEBUG_TRITON, but not in a CUDA graph or a trace, whose
    ranges can't be read. Compiled calls validate when they run."""
    return debugging() and not traces(ranges) and not capturing(ranges)


class Selection:
    """Half-open key ranges [B,S,G,n,2] of every query row, shared by the h heads of a KV group (NSA, arXiv 2502.11089,
    Eq. 10-12). A selection with G = 1 serves calls of any number of groups, which then share it.

    Make one with `from_blocks`, `from_scores` or `from_ranges`. A row attends to the union of its ranges. Using a
    selection never reads the device, but for the one count of a class that `NSA_SEL_COUNT_SHARING` describes
    (docs/decisions.md).

    The attributes below can't be replaced. Plans of backends, for each CUDA stream its own, and the statistics of
    `measure` are cached here, for forward, backward and layers that share a selection. Writing into the ranges through
    PyTorch, or in any way on a CPU, drops them. After a write on a GPU that PyTorch does not see (a kernel of your own)
    call `invalidate()`; NSA_DEBUG_TRITON=1 checks that.

    Thread safety: any number of threads may pass one selection to calls, and call any of its methods, at the same time.
    Writing into the ranges is the exception: no other thread may use the selection until the write, and `invalidate()`
    where it is needed, are done.

    Attributes:
        ranges: int32 or int64, `[start, end)` in key positions; a range with end <= start is empty.
        n: ranges per row, empty ones included.
        block_size: states that every non-empty range is one whole block [j*block_size, (j+1)*block_size).
        max_length: an upper bound on the keys of a row.
        disjoint: promises that no key is in two ranges of a row, which saves finding the union of ranges that are not
            blocks. Under NSA_DEBUG_TRITON=1 overlapping ranges are refused.
        measured: what `measure` returned last, else None.
    """

    ranges: Tensor  # of `_made` if the selection has `_blocks`
    n: int
    block_size: int | None
    max_length: int | None
    disjoint: bool
    listed: Tensor  # the block indices [B,S,G,n], or if there are none the ranges: for checks that need no ranges
    counted: Tensor  # shares the version counter of the ranges; of `_made` like them
    unsearched: bool  # `union_ranges` may have a block of a row twice
    _blocks: Blocks | None = None  # block indices in place of ranges, contiguous, without counts
    _version: int | None = None  # of the block indices when the selection was made; None: they have no version counter
    _made: Made | None = None
    measured: Measured | None = None
    _cut_block: int | None = None  # the block size of ranges that were blocks before they were cut; unsorted
    _captured: tuple[int, Tensor] | None = None  # version of the ranges, and distinct ones, both made in a CUDA graph
    _snapshot: Snapshot | None = None  # read once by each method: another thread may replace it meanwhile

    def __init__(self, ranges: Tensor, block_size: int | None = None, max_length: int | None = None, *, disjoint: bool = False) -> None:
        facts, n = self.__dict__, ranges.shape[-2]  # models make a selection for every call: `__setattr__` takes longer
        facts["ranges"] = facts["listed"] = facts["counted"] = ranges
        facts["n"] = n
        facts["block_size"] = block_size
        facts["max_length"] = max_length
        facts["disjoint"] = disjoint or n < 2
        facts["unsearched"] = n > MOST_SEARCHED and block_size is not None and not disjoint

    @classmethod
    def _of_indices(cls, blocks: Blocks, block_size: int, disjoint: bool) -> Selection:
        """Return a selection of contiguous block indices, whose ranges are made when they are first asked for."""
        selection, indices = cls.__new__(cls), blocks.indices
        facts, n = selection.__dict__, indices.shape[-1]
        facts["n"] = n
        facts["block_size"] = block_size
        facts["max_length"] = None
        facts["disjoint"] = disjoint or n < 2
        facts["unsearched"] = n > MOST_SEARCHED and not disjoint
        facts["listed"] = indices
        facts["_blocks"] = blocks
        facts["_version"] = None if torch.compiler.is_compiling() or indices.is_inference() else indices._version
        return selection

    if not TYPE_CHECKING:  # else every name would be an attribute

        def __getattr__(self, name: str) -> Tensor:
            """Return the ranges of block indices, or `counted`, which are made when they are first asked for."""
            if name not in ("ranges", "counted") or self._blocks is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            made = self._made
            if torch.compiler.is_compiling():  # in a graph, which keeps nothing
                return ranges_of_blocks(self._blocks._replace(facts=None), self.block_size)[0] if made is None else made.plan.value[-1]
            if made is None:
                ranges = self._make()
                return ranges if name == "ranges" else self.__dict__["counted"]
            stream = self._stream()
            if stream != made.stream and stream not in made.waited:
                made.waited.append(stream)
                if not capturing(self.listed):  # before a capture, PyTorch waits for all streams
                    device, maker = self.listed.device, made.stream
                    others = torch.cuda.ExternalStream(maker, device) if maker else torch.cuda.default_stream(device)
                    torch.cuda.current_stream(device).wait_stream(others)
                    for x in tensors_of(made.plan.value):  # their memory is that of the maker's stream
                        x.record_stream(torch.cuda.current_stream(device))
            return made.plan.value[-1]

    def _make(self, captured: bool = False) -> Tensor:
        """Make and keep the ranges of block indices. captured: in a CUDA graph, or while one is captured."""
        blocks, indices = self._blocks, self.indices
        assert blocks is not None
        assert self.block_size is not None
        if indices is None:  # another thread has made them
            return self.ranges
        if not captured and capturing(indices):
            if blocks.captured:
                captured = True
            else:  # ranges made by the graph would hold no data before its first replay, and ignore writes into them
                return outside_capture(indices, lambda: self._make(captured=True))
        with torch.inference_mode(False):  # else a later call could not record gradients
            ranges, unique = ranges_of_blocks(blocks._replace(captured=captured), self.block_size)
        disjoint = ranges if self.disjoint else unique
        plan = Plan((ranges,) if disjoint is None else (disjoint, ranges))
        self.keep(plan, ranges, self._stream(), {} if disjoint is None else {self._on_stream(DISJOINT): plan})
        return ranges

    def keep(self, plan: Plan | PlanInBuffer, counted: Tensor, stream: int, plans: Plans) -> None:
        """Keep the ranges of block indices, and the plans that were made with them."""
        facts = self.__dict__
        copy = None if counted.is_cuda or self._on_gpu else plan.value[-1].clone()
        facts["_snapshot"] = Snapshot(counted._version, copy, None, plans)
        facts["counted"] = counted
        facts["_made"] = Made(plan, stream, [])

    @property
    def indices(self) -> Tensor | None:
        """Return the block indices [B,S,G,n] that kernels may read instead of ranges; None once there are ranges, which
        may be written. Don't ask in a CUDA graph's capture (`captured_indices`)."""
        blocks = self._blocks
        if blocks is None or self._made is not None:
            return None
        indices, version = blocks.indices, self._version
        if version is not None and version != indices._version:
            raise ArgumentError(
                "block_indices", "written after Selection.from_blocks", "no write before the selection is used",
                "make the Selection after the write, or pass block_indices.clone()",
            )  # fmt: skip
        return indices

    @property
    def captured_indices(self) -> Tensor | None:
        """`indices` in a capture: None for a selection made before, whose ranges may be written between replays."""
        return self.indices if self._blocks is not None and self._blocks.captured else None

    def facts_of_listed(self) -> tuple[Any, ...] | None:
        """Return all that calls of blocks which are read as `listed` depend on besides it; None for other selections, and
        after `measure`."""
        snapshot = self._snapshot
        if self.block_size is None or self._made is not None or (snapshot is not None and snapshot.exact is not None):
            return None
        return self.block_size, self.max_length, self.disjoint

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FACTS and "n" in self.__dict__:
            raise ArgumentError(f"selection.{name}", "replaced", "the value it was made with", "make a new Selection, or write into ranges")
        object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: leaves out the plans, which belong to this tensor and its version."""
        ranges = dict.fromkeys(("ranges", "listed", "counted"), self.ranges)
        return {**self.__dict__, **ranges, **_NOT_COPIED, "_snapshot": self._valid_exact()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        exact = state.pop("_snapshot")
        self.__dict__.update(state)
        if exact is not None:
            self._remember(exact)

    @classmethod
    def from_ranges(
        cls, ranges: Tensor, block_size: int | None = None, max_length: int | None = None, *, disjoint: bool = False
    ) -> Selection:
        """Return a selection of key ranges.

        Args:
            ranges: [B,S,G,n,2], or [B,G,n,2] for one query per sequence; int32 or int64; half-open [start, end).
            block_size: promises that every non-empty range is one whole block of this many keys.
            max_length: promises that no row selects more keys.
            disjoint: promises that no two ranges of a row share a key. By default the union is computed at the first use.

        Returns:
            A Selection that shares the memory of `ranges`.

        Raises:
            ArgumentError: another shape or dtype; under NSA_DEBUG_TRITON=1 also what `validate` finds.
        """
        selection = cls.unread(ranges, block_size, max_length, disjoint)
        if validates(selection.ranges):
            selection.validate()
        return selection

    @classmethod
    def unread(cls, ranges: Tensor, block_size: int | None, max_length: int | None, disjoint: bool) -> Selection:
        """`from_ranges` that never validates the values of the ranges."""
        ranges = as_rows(as_tensor("ranges", ranges), "ranges", "[B,S,G,n,2] or [B,G,n,2]", 5)
        if ranges.shape[-1] != 2:
            raise ArgumentError(
                "ranges",
                f"of shape {tuple(ranges.shape)}",
                "a last dimension of 2: start, end",
                "stack start and end; block indices go through Selection.from_blocks, scores through Selection.from_scores",
            )
        check_positive("block_size", block_size, optional=True)
        check_positive("max_length", max_length, optional=True)
        check_flag("disjoint", disjoint)
        return cls(ranges, block_size, max_length, disjoint=disjoint)

    @classmethod
    def from_blocks(
        cls, block_indices: Tensor, block_size: int, block_counts: Tensor | None = None, *, disjoint: bool = False
    ) -> Selection:
        """Return a selection of whole blocks: block j holds the keys [j * block_size, (j + 1) * block_size).

        Args:
            block_indices: [B,S,G,n], [B,G,n] for one query per sequence, or [T,G,n] for calls with cu_seqlens_q; any
                integer dtype up to 64 bits; any order; negative entries are padding (uint8 has none: 255 is a block). A
                duplicate counts once.
            block_size: keys of a block.
            block_counts: [B,S,G], or [B,G]: entry i of a row counts only if i < block_counts. By default all count.
            disjoint: promises that no row has duplicates. Decoding never needs it; it saves a prefill the memory of a
                second copy of the ranges.

        Returns:
            A Selection with ranges [B,S,G,n,2]. On a CPU later writes into `block_indices` change nothing. On a GPU it
            reads them when it is used, not before: don't write to them while it is in use. PyTorch's writes are refused.

        Raises:
            ArgumentError: a wrong shape or dtype; under NSA_DEBUG_TRITON=1 also duplicates in a row.
        """
        return cls._of_blocks(checked_blocks_of(block_indices, block_size, block_counts, disjoint), block_size, disjoint)

    @classmethod
    def of_chosen(cls, chosen: Tensor, block_size: int) -> Selection:
        """Return the selection of distinct blocks that this package has chosen, and that nobody writes while it is in use."""
        return cls._of_blocks(checked_blocks_of(chosen, block_size, None, True, own=True), block_size, True)

    @classmethod
    def _of_blocks(cls, blocks: Blocks, block_size: int, disjoint: bool) -> Selection:
        debugs = debugging() and not torch.compiler.is_compiling()  # compiled calls validate when they run
        if blocks.kept() and not debugs:
            return cls._of_indices(blocks, block_size, disjoint)
        ranges, unique = ranges_of_blocks(blocks, block_size)
        selection, checked = cls(ranges, block_size, disjoint=disjoint), debugs and validates(ranges)
        if unique is not None and not ranges.is_inference():
            selection._keep_distinct(unique, checked, blocks.captured)
        if checked:
            selection.validate()
        return selection

    def _keep_distinct(self, unique: Tensor, checked: bool, captured: bool) -> None:
        """Cache the ranges of distinct blocks, which a kernel has just made with the ranges. checked: `validates`."""
        ranges = self.ranges
        if captured:
            self.__dict__["_captured"] = ranges._version, unique
            return
        copy = ranges.detach().clone() if checked or not self._on_gpu else None
        self.__dict__["_snapshot"] = Snapshot(ranges._version, copy, None, {self._on_stream(DISJOINT): Plan((unique,))})

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
        """Return the n best blocks of every row (NSA Eq. 7-12): the first and local ones, then by score. Deterministic.

        A row at position t sees the blocks that start at or before t.

        Args:
            scores: [B,S,G,blocks] floating point; gets no gradient. Higher is better, ties go to the lower index; -inf
                and NaN exclude a block, unless `first` or `local` forces it.
            n: blocks per row.
            block_size: keys of a block.
            first: blocks at the start of the sequence that are always selected.
            local: last visible blocks, the current one among them, that are always selected.
            S_kv: keys of the sequence, by default S.
            q_pos: [S] or [B,S] int32 or int64, positions of the rows, by default S_kv - S + s.

        Returns:
            A Selection with ranges [B,S,G,n,2] int32, ascending; empty ranges, where a row sees fewer than n blocks,
            come last.

        Raises:
            ArgumentError: shapes, dtypes or numbers that do not fit together.
        """
        return cls.from_ranges(best_blocks(scores, n, block_size, first, local, S_kv, q_pos), block_size, disjoint=True)

    @property
    def groups(self) -> int:
        """KV groups of the rows; with 1, calls of any number of groups share the selection."""
        return self.listed.shape[2]

    @property
    def block_indices(self) -> Tensor:
        """Block indices [B,S,G,n] in the ranges' dtype, -1 where a range is empty; ArgumentError without a block_size."""
        if self.block_size is None:
            raise ArgumentError("block_size", None, "the size of the blocks", "build the selection from blocks, or pass block_size=")
        start, end = self.ranges.unbind(-1)
        return torch.where(end > start, start // self.block_size, -1)

    def length_bound(self, S_kv: int) -> int:
        """Return an upper bound on the keys that a row selects among S_kv: from the static facts and, if it was called,
        `measure`."""
        snapshot = self._snapshot
        exact = None if snapshot is None or snapshot.exact is None else self.exact()
        bound = S_kv if exact is None else min(S_kv, exact[0])
        if self.max_length is not None:
            bound = min(bound, self.max_length)
        if self.block_size is not None:
            bound = min(bound, self.n * self.block_size)
        return bound

    def range_bound(self, S_kv: int) -> int:
        """Return an upper bound on the keys of one range among S_kv."""
        size = self.block_size or self._cut_block
        return self.length_bound(S_kv) if size is None else min(size, S_kv)

    @property
    def sharing(self) -> tuple[float, ...] | None:
        """`Measured.sharing` to two digits; None before `measure`, and after the ranges were written."""
        exact = self.exact()
        return None if exact is None else exact[1]

    def exact(self) -> tuple[int, tuple[float, ...] | None, int] | None:
        """Return the longest row in keys, `sharing`, and the mean row in keys to two digits, from `measure`.

        None before `measure`, and after the ranges were written.
        """
        exact = self._valid_exact()
        return None if exact is None else exact[:3]

    def total_length(self, S_kv: int) -> int | None:
        """Keys of all rows at the positions S_kv - S + s, from `measure(S_kv)`; None before it, and after the ranges
        were written."""
        exact = self._valid_exact()
        return exact.total[1] if exact is not None and exact.total is not None and exact.total[0] == S_kv else None

    def _valid_exact(self) -> Exact | None:
        """Return the statistics of `measure` if they are valid.

        They are if the ranges are unchanged, and no CUDA graph is captured, whose replays may see other ranges.
        """
        snapshot = self._snapshot
        if snapshot is None or snapshot.exact is None or capturing(self.listed) or not self._is_current(snapshot):
            return None
        return snapshot.exact

    def disjoint_ranges(self, captured: bool | None = None) -> Tensor:
        """Contiguous ranges [B,S,G,n,2] of the same keys, without overlaps in a row.

        The ranges themselves if `disjoint`; else sorted by start, each without the keys of the ones before it. Cached
        like a plan. A CUDA graph computes them, because its replays must follow writes into the ranges: once where it
        makes the ranges, too.

        Args:
            captured: whether a CUDA graph is captured, if the caller has asked.
        """
        ranges = self.ranges  # first: making them may cache the result
        if self.disjoint:
            return ranges.contiguous()
        if capturing(ranges) if captured is None else captured:
            if self._captured is not None and self._captured[0] == ranges._version:
                return self._captured[1]
            return distinct_ranges(ranges, self.block_size)
        return self.plan(DISJOINT, lambda: (distinct_ranges(self.ranges, self.block_size),))[0]  # type: ignore[no-any-return]

    def union_ranges(self, captured: bool | None = None) -> Tensor:
        """Return contiguous ranges [B,S,G,n,2] for kernels that count a block once however often a row names it: those of
        many blocks as they are, others `disjoint_ranges`."""
        return self.ranges.contiguous() if self.unsearched else self.disjoint_ranges(captured)

    def plan(self, key: tuple[Any, ...], build: Callable[[], Any], *made_from: Any) -> Any:
        """Return the cached result of `build()`, rebuilt after the ranges were written.

        Tensors made under torch.inference_mode() have no version counter: plans made from them are not cached.

        Args:
            key: of the cache, which holds `MOST_PLANS` plans.
            build: makes the plan.
            made_from: tensors and plain values that the plan depends on besides the ranges; a change rebuilds it, too.

        Returns:
            What `build` returned.
        """
        states = tuple([state_of(x) for x in made_from]) if made_from else ()
        snapshot = None if UNKNOWN in states else self.current()
        if snapshot is None:
            return build()
        on = self._on_stream(key)
        kept = snapshot.plans.get(on)
        if kept is None or kept.states != states:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False):  # a later call may record gradients
                    return self.plan(key, build, *made_from)
            kept = Plan(build(), states, made_from)
            make_room(snapshot.plans, 1)
            snapshot.plans[on] = kept
        return kept.value

    def current(self) -> Snapshot | None:
        """Return the snapshot of the ranges as they are, a new one if they were written; None for tensors that have no
        version."""
        counted = self.counted  # first: ranges that are made begin a snapshot
        snapshot = self._snapshot
        if snapshot is not None and snapshot.copy is None and snapshot.version == counted._version:
            return snapshot
        return snapshot if snapshot is not None and self._is_current(snapshot) else self._remember()

    def _on_stream(self, key: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the key of a plan on the current stream: another stream could read it too early, or after its memory
        is reused."""
        return (*key, self._stream()) if self.listed.is_cuda and not torch.compiler.is_compiling() else key

    def _stream(self) -> int:
        """Return the current stream's handle; 0 on a CPU."""
        listed = self.listed
        return torch._C._cuda_getCurrentRawStream(listed.get_device()) if listed.is_cuda else 0

    def _is_current(self, snapshot: Snapshot) -> bool:
        """Return True if the ranges are as they were; ArgumentError where debugging finds an unannounced GPU write."""
        if snapshot.version != self.counted._version:
            return False
        if snapshot.copy is None or torch.compiler.is_compiling() or torch.equal(snapshot.copy, self.ranges):
            return True
        if self._on_gpu:
            raise ArgumentError(
                "selection.ranges", "written unseen by PyTorch", "writes through PyTorch, or followed by selection.invalidate()",
                "call selection.invalidate() after a kernel of yours has written the ranges",
            )  # fmt: skip
        return False

    def _remember(self, exact: Exact | None = None) -> Snapshot | None:
        """Begin a new snapshot; None for tensors that have no version."""
        ranges = self.ranges
        if ranges.is_inference():
            return None
        copied = not self._on_gpu or validates(ranges)
        snapshot = Snapshot(ranges._version, ranges.detach().clone() if copied else None, exact, {})
        self.__dict__["_snapshot"] = snapshot  # as in `__init__`
        return snapshot

    @property
    def _on_gpu(self) -> bool:
        return self.listed.is_cuda

    def invalidate(self) -> None:
        """Drop plans and statistics: call it after a write into the ranges on a GPU that PyTorch does not see."""
        self._snapshot = None

    def forget_plans(self) -> None:
        """Drop the plans, to free their memory or to time building them."""
        snapshot = self._snapshot
        if snapshot is not None:
            snapshot.plans.clear()

    def merge(self) -> Selection:
        """Return the same keys as sorted, disjoint ranges: overlapping and adjacent ranges become one, empty ones come
        last."""
        far = torch.iinfo(self.ranges.dtype).max
        bound = self.length_bound(far)
        return Selection(merged(self.ranges), None, bound if bound < far else None, disjoint=True)

    def shifted(self, first: Tensor, limit: Tensor, S_kv: int, *, whole_blocks: bool, max_length: int) -> Selection:
        """Each row's ranges below its `limit`, moved by `first` keys: from positions in its sequence to positions in a
        whole batch.

        Args:
            first: [B,S], the first key of the row's sequence.
            limit: [B,S], the keys of that sequence that the row may see.
            S_kv: keys of the whole batch.
            whole_blocks: every `first` is a multiple of block_size. A block that begins below `limit` then stays whole,
                and the caller must stop at the limit. Otherwise ranges are cut there, and are no longer blocks.
            max_length: a further upper bound on the keys of a row.
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
        exact = self._valid_exact() if size else None
        if exact is not None:
            moved._remember(exact._replace(total=None))
        return moved

    def part(self, ranges: Tensor, S_kv: int, whole_blocks: bool) -> Selection:
        """Return a selection of `ranges`, other rows' or cut, with these static facts; whole_blocks: no block was cut."""
        like_this = Selection(ranges, self.block_size, self.max_length, disjoint=self.disjoint)
        if self.block_size is None or whole_blocks:
            return like_this
        cut = Selection(ranges, None, like_this.length_bound(S_kv), disjoint=self.disjoint)
        cut._cut_block = self.block_size
        return cut

    def validate(self) -> Selection:
        """Check the promises of the static facts. Reads the device.

        Ranges of a row must not overlap. With block_size each must be one block; without they must be sorted by start.

        Returns:
            self.

        Raises:
            ArgumentError: naming the first bad row.
        """
        check_ranges(self.ranges, self.block_size, self.max_length, in_order=self._cut_block is None)
        return self

    def measure(self, S_kv: int | None = None, q_pos: Tensor | None = None) -> Measured:
        """Exact statistics, which later decisions use. Reads the device: not for a hot path.

        They are kept as `measured`, and tighten `length_bound` (to the longest row before the causal clamp, since other
        calls may have other positions) until the ranges are written. Statistics of tensors made under
        torch.inference_mode() are not kept.

        Args:
            S_kv: keys of the sequence; lengths are then those after the causal clamp.
            q_pos: [S] or [B,S], positions of the rows, by default S_kv - S + s.

        Returns:
            The statistics.

        Raises:
            ArgumentError: S_kv or q_pos that do not fit.
        """
        if S_kv is not None and (not isinstance(S_kv, int) or isinstance(S_kv, bool) or not 0 <= S_kv < 1 << 62):
            raise ArgumentError("S_kv", shown(S_kv), "a whole number >= 0, or None", "pass the number of keys, k.shape[2]")
        start, end = self.disjoint_ranges().long().unbind(-1)
        start = start.clamp(min=0)
        unclamped = (torch.maximum(end, start) - start).sum(-1)
        most = int(unclamped.max()) if unclamped.numel() else 0
        if S_kv is not None:
            B, S = start.shape[:2]
            position = torch.arange(S_kv - S, S_kv, device=start.device) if q_pos is None else q_pos
            position = as_positions(position, B, S, start.device)
            end = torch.minimum(end, (position + 1).clamp(max=S_kv)[:, :, None, None])
        lengths = (torch.maximum(end, start) - start).sum(-1)
        rows, total = lengths.numel(), int(lengths.sum())
        longest = int(lengths.max()) if rows else 0
        sharing = None if self.block_size is None else sharing_of_blocks(torch.where(end > start, start // self.block_size, -1))
        self.measured = measured = Measured(rows, int((lengths == 0).sum()), longest, total / max(1, rows), total, sharing)
        snapshot = self.current()
        if snapshot is not None:
            of_keys = (S_kv, total) if S_kv is not None and q_pos is None else None
            exact = Exact(most, sharing and rounded(sharing), int(float(f"{measured.mean_length:.2g}")), of_keys)
            self._snapshot = snapshot._replace(exact=exact)
        return measured

    def to(self, device: torch.device | str) -> Selection:
        """Return the same selection on another device, without plans.

        Args:
            device: a torch.device, or its name; ArgumentError for anything else.
        """
        if not isinstance(device, torch.device | str | int):
            raise ArgumentError("device", shown(device), "a torch.device or its name", "pass q.device; ranges keep their dtype")
        moved = Selection(self.ranges.to(device), self.block_size, self.max_length, disjoint=self.disjoint)
        moved.measured = self.measured
        exact = self._valid_exact()
        if exact is not None:
            moved._remember(exact)
        return moved

    def __repr__(self) -> str:
        facts = f"block_size={self.block_size}, max_length={self.max_length}, disjoint={self.disjoint}, measured={self.measured}"
        return f"Selection(ranges={tuple(self.ranges.shape)} {self.ranges.dtype} on {self.ranges.device}, {facts})"
