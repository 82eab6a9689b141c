"""One checked call as backends receive it: `Call`, `ChooseCall` and `WindowCall`; the workspace, requests, calls over
paged caches."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from nsa_sel.core.arguments import Bounds, Requests, compressed_bounds, range_dtype, row_positions, whole_blocks
from nsa_sel.core.request import FEW_TOKENS, DeviceInfo, Request
from nsa_sel.core.transforms import REPEATED, capturing
from nsa_sel.errors import ArgumentError
from nsa_sel.quantize import Scales, as_bytes
from nsa_sel.selection import Selection
from nsa_sel.settings.schema import Settings

ALIGNMENT = 256  # bytes: enough for TMA and 16-byte loads


class Workspace:
    """Allocates the temporaries of a pass one after another in the buffer; the next pass starts over. Results are never
    in it."""

    __slots__ = ("buffer", "taken")

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.taken = 0  # bytes that this pass asked for, also beyond the buffer; set to 0 when a pass begins

    @classmethod
    def of(cls, buffer: object, device: torch.device) -> Workspace:
        """Return the argument `workspace` of a call on `device`; ArgumentError if it is not suitable."""
        allowed, remedy = (
            "a contiguous torch.uint8 tensor",
            f'pass torch.empty(size, dtype=torch.uint8, device="{device}"), or leave it out',
        )
        if not isinstance(buffer, Tensor):
            raise ArgumentError("workspace", f"a {type(buffer).__name__}", allowed, remedy)
        if buffer.dtype != torch.uint8:
            raise ArgumentError("workspace", f"of dtype {buffer.dtype}", allowed, remedy)
        if not buffer.is_contiguous():
            raise ArgumentError("workspace", f"of shape {tuple(buffer.shape)} and strides {buffer.stride()}", allowed, remedy)
        if buffer.device != device:
            raise ArgumentError("workspace", f"on {buffer.device}", f"q's device {device}", remedy)
        if buffer.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError("workspace", "made under torch.inference_mode()", "one made outside, for a call outside", remedy)
        return cls(buffer.view(-1))

    def take(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Uninitialized memory for a contiguous tensor until the pass ends; None if the buffer is too small, which
        `check` reports."""
        first = self.taken + -(self.buffer.data_ptr() + self.taken) % ALIGNMENT
        self.taken = first + math.prod(sizes) * dtype.itemsize
        if self.taken > self.buffer.numel():
            return None
        return self.buffer[first : self.taken].view(dtype).view(sizes)

    def check(self, backend: str, direction: str) -> None:
        """ArgumentError with the size that the pass needed, if it exceeds the buffer."""
        size = self.buffer.numel()
        if self.taken > size:
            raise ArgumentError(
                "workspace",
                f"of {size} bytes",
                f"at least {self.taken} bytes for the {direction} pass of {backend}",
                "pass a larger buffer, or leave it out",
            )


CPU = DeviceInfo(kind="cpu")
LOG2_E = math.log2(math.e)
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def positions(q: Tensor, S_kv: int, q_pos: Tensor | None, lengths: Tensor | None) -> Tensor:
    """`Call.positions` of a call's arguments."""
    B, S = q.shape[:2]
    if q_pos is not None:
        return q_pos.long()
    if lengths is not None:
        return lengths.long().unsqueeze(1) + torch.arange(-S, 0, device=q.device)
    return torch.arange(S_kv - S, S_kv, device=q.device).expand(B, S)


class _Logits:
    """The factor of the logits, and whether passes are timed, for calls of all kinds."""

    __slots__ = ()

    q: Tensor
    scale: float
    settings: Settings

    def timed(self) -> bool:
        """Return True if NSA_DEBUG_TIMING times this call."""
        return self.settings.debug_timing and not self.capturing()

    def capturing(self) -> bool:
        """Return True if a CUDA graph captures this call, so that nothing may wait for the device."""
        return capturing(self.q)

    def scale_log2(self) -> float:
        """Return the factor from q.k to logits in base 2; never 0, which would turn a masked -inf into NaN."""
        return max(self.scale * LOG2_E, 1e-30)

    def with_positive_scale(self) -> Self:
        """Return the same logits from -q and -scale: kernels track the maximum of q.k, which must be that of the
        logits."""
        return replace(self, q=-self.q, scale=-self.scale)  # type: ignore[type-var]


@dataclass(slots=True, eq=False)  # treated as immutable; frozen=True costs 1 us per construction
class Call(_Logits):
    """The checked arguments of one call, and the settings and device that its decision was made with.

    Attributes:
        q: [B,S,G,h,Dk]; float16, bfloat16, float32 or float64, with a contiguous last dimension; k and v likewise.
        k: [B,G,S_kv,Dk], or pages [pages,G,page_size,Dk]; of dtype float8_e4m3fn with `scales`, and v likewise.
        v: [B,G,S_kv,Dv], or pages [pages,G,page_size,Dv].
        selection: over the rows [B,S,G], or [B,S,1] for all groups.
        q_pos: [B,S] int32 or int64, positions of the rows; None for S_kv - S + s.
        scale: factor of the logits.
        settings: of the decision.
        device: of the decision.
        lengths: [B] int32 or int64, keys of each cached sequence (nsa_sel/serving.py): row s is at lengths - S + s.
        block_table: [B, pages of a sequence] int32, the pages of each sequence in a paged cache.
        workspace: memory for temporaries, if the user passed one.
        scales: of a quantized cache, None for k and v of q's dtype. Without gradients.
        table_rows: [B] int32, the row of the block table that each sequence has; None for its own. Sequences are then rows
            of a packed batch, S is 1, and lengths and table_rows are columns of one tensor (`core.packed.rows_of`).
        most_rows: with table_rows, the most rows of a request.
        out: o and lse to write, or None for new ones. Backends may ignore them.
        known: cache of facts that follow from shapes, strides, alignment and settings alone, shared by the calls of a
            class (core/attend.py). Not copied by `replace`.
    """

    function: ClassVar[str] = "selection_attention"  # the public function, for messages

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    q_pos: Tensor | None
    scale: float
    settings: Settings
    device: DeviceInfo = CPU
    lengths: Tensor | None = None
    block_table: Tensor | None = None
    workspace: Workspace | None = None
    scales: Scales | None = None
    table_rows: Tensor | None = None
    most_rows: int = 1
    out: tuple[Tensor | None, Tensor | None] = (None, None)
    known: dict[Any, Any] = field(default_factory=dict, init=False)
    _capturing: bool | None = field(default=None, init=False)
    _disjoint: Tensor | None = field(default=None, init=False)  # the disjoint ranges of a capture, or of inference mode
    _listed: Tensor | None = field(default=None, init=False)  # see `listed_ranges`
    problem: tuple[Any, Any] | None = field(default=None, init=False)  # of ranges: what a backend's kernels all take (cupy_cuda/launch.py)

    def others(self) -> tuple[Any, ...]:
        """Return the arguments that follow q, k and v: what a backward pass keeps outside of autograd's saved tensors."""
        return self.selection, self.q_pos, self.scale, self.settings, self.device, self.lengths, self.block_table, self.workspace

    def read_again(self) -> list[Tensor]:
        """Return the inputs besides q, k and v that the backward pass reads, if they have a version counter: autograd
        notices writes to them before backward."""
        return [x for x in (self.selection.ranges, self.q_pos) if x is not None and not x.is_inference()]  # checkpoint compares shapes

    def nothing(self) -> tuple[Tensor, Tensor]:
        """Return o and lse of a call that selects nothing."""
        shape, dtype = self.q.shape[:-1], torch.promote_types(self.q.dtype, torch.float32)
        return self.q.new_zeros(*shape, self.v.shape[-1]), torch.full(shape, float("-inf"), dtype=dtype, device=self.q.device)

    @property
    def S_kv(self) -> int:
        """Keys that a sequence has room for."""
        return self.k.shape[2] if self.block_table is None else self.block_table.shape[1] * self.k.shape[2]

    @property
    def groups_per_selection(self) -> int:
        """KV groups that share the ranges of a row: G for a selection of one group, else 1."""
        return self.q.shape[2] // self.selection.groups

    def positions(self) -> Tensor:
        """Return the position of every query row, [B,S] int64; negative where a cached sequence is shorter than S."""
        return positions(self.q, self.k.shape[2] if self.block_table is None else self.S_kv, self.q_pos, self.lengths)

    def capturing(self) -> bool:
        """Return True if a CUDA graph captures this call, so that nothing may wait for the device. Cached: asking takes
        2 us."""
        if self._capturing is None:
            self._capturing = self.q.is_cuda and torch.cuda.is_current_stream_capturing()
        return self._capturing

    def disjoint_ranges(self) -> Tensor:
        """`Selection.disjoint_ranges`, without asking again whether a graph captures the call; computed once
        where none is cached."""
        if not self.capturing() and not self.selection.ranges.is_inference():
            return self.selection.disjoint_ranges(False)
        if self._disjoint is None:
            self._disjoint = self.selection.disjoint_ranges(self._capturing)
        return self._disjoint

    def union_ranges(self) -> Tensor:
        """Return `Selection.union_ranges`."""
        if not self.selection.unsearched:
            return self.disjoint_ranges()
        if self._listed is None:
            self._listed = self.selection.union_ranges()
        return self._listed

    def listed_ranges(self) -> Tensor:
        """Return contiguous ranges [B,S,G,n,2] for kernels that skip a block that the row has named before: of few
        rows, blocks may repeat (`may_repeat`); other ranges are disjoint."""
        if self.selection.block_size is None or self.q.shape[1] > FEW_TOKENS:
            captured = self.capturing() or self.selection.ranges.is_inference()
            return self.disjoint_ranges() if captured else self.selection.disjoint_ranges(False)
        if self._listed is None:
            self._listed = self.selection.ranges.contiguous()
        return self._listed

    def listed(self) -> tuple[Tensor, int]:
        """Return `listed_ranges` and 0, or of few rows, if the selection holds block indices instead: these [B,S,G,n],
        contiguous, and their block size."""
        selection, indices = self.selection, None
        if self.q.shape[1] <= FEW_TOKENS:
            indices = selection.captured_indices if self.capturing() else selection.indices
        return (self.listed_ranges(), 0) if indices is None or selection.block_size is None else (indices, selection.block_size)

    def may_repeat(self) -> bool:
        """Return True if a row of `listed_ranges` may name a block twice."""
        return self.selection.block_size is not None and self.selection.n > 1 and self.q.shape[1] <= FEW_TOKENS

    def selects_nothing(self) -> bool:
        """Return True if there are no rows, keys or ranges."""
        if REPEATED in self.known:  # calls without are not remembered
            return False
        if self.selection.n == 0 or self.q.numel() == 0 or self.k.numel() == 0:
            return True
        return self.block_table is not None and self.S_kv == 0

    def reach(self, width: int) -> int:
        """Return the most tiles of `width` keys that one range can overlap."""
        block, S_kv = self.selection.block_size, self.k.shape[2]
        if block is not None and (width % block == 0 or block % width == 0):
            return max(1, block // width)  # blocks and tiles are aligned to each other
        return min(-(-S_kv // width), -(-self.selection.range_bound(S_kv) // width) + 1)

    def tiles_of_block(self, width: int) -> int:
        """Tiles of `width` keys that make a block; 1 where blocks are not made of whole tiles. A row sees all of a
        block's tiles whole but the last that it sees, so that one list of rows may serve all of them."""
        block = self.selection.block_size
        return block // width if block is not None and block % width == 0 else 1

    def clamped_ranges(self) -> tuple[Tensor, Tensor]:
        """Return start, end [B,S,G,n] int64 after the causal clamp to [max(start, 0), min(end, t + 1, S_kv)); end >=
        start. Groups that share ranges have a stride of 0."""
        start, end = self.disjoint_ranges().long().unbind(-1)
        start = start.clamp(min=0)
        limit = (self.positions() + 1).clamp(max=self.S_kv)[:, :, None, None]
        end = torch.maximum(torch.minimum(end, limit), start)
        return start.expand(-1, -1, self.q.shape[2], -1), end.expand(-1, -1, self.q.shape[2], -1)


def request_of(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, needs_grad: bool, block_table: Tensor | None = None,
    scales: Scales | None = None,
) -> Request:  # fmt: skip
    """Return the request of a checked call."""
    B, S, G, h, Dk = q.shape
    _, _, S_kv, Dv = v.shape
    page_size = None
    if block_table is not None:
        page_size, S_kv = S_kv, S_kv * block_table.shape[1]
    exact = selection.exact()
    return Request(
        B=B, S=S, S_kv=S_kv, G=G, h=h, Dk=Dk, Dv=Dv, n=selection.n, block_size=selection.block_size,
        max_length=selection.length_bound(S_kv), dtype=DTYPES[q.dtype], needs_grad=needs_grad,
        aligned=is_aligned(q, k, v),
        sharing=exact[1] if exact and S > 1 else None,  # one row has no neighbors
        page_size=page_size,
        quantized=None if scales is None else scales.quantized,
        mean_length=exact[2] if exact else None,
    )  # fmt: skip


def is_aligned(*tensors: Tensor) -> bool:
    """Return True if pointers and outer strides are multiples of 16 bytes."""
    bits = 0  # of all of them: a bitwise or is a multiple of 16 if each is
    for x in tensors:
        bits |= x.data_ptr()
        for stride in x.stride()[:-1]:
            bits |= stride * x.element_size()
    return bits % 16 == 0


@functools.lru_cache(maxsize=64)
def device_info(device: torch.device) -> DeviceInfo:
    """Return the facts of a torch device that policies use."""
    if device.type == "cpu":
        return DeviceInfo(kind="cpu", name="cpu", triton_interpret=os.environ.get("TRITON_INTERPRET") == "1")
    facts = torch.cuda.get_device_properties(device)
    shared = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)  # torch's stubs lack the first
    return DeviceInfo(
        kind="cuda", name=facts.name, sm=facts.major * 10 + facts.minor, sm_count=facts.multi_processor_count,
        shared_memory=shared,
    )  # fmt: skip


SCRATCH = 64 << 20  # bytes
LEAST_ROWS = 2048  # rows of a KV group that are scored at once, also where the scratch holds fewer: less would leave a GPU idle


class Rule(NamedTuple):
    """Sizes of compressed keys and of blocks, in keys, and numbers of selected blocks.

    Compressed key i covers the keys [i * compress_stride, i * compress_stride + compress_block). Sizes are multiples of
    compress_stride.
    """

    compress_block: int = 32
    compress_stride: int = 16
    block_size: int = 64
    n: int = 16
    first: int = 1  # first + local <= n
    local: int = 2

    def options(self) -> dict[str, Any]:
        """Return the fields by name. torch.compile of torch 2.8 cannot trace `_asdict`."""
        sizes = {"compress_block": self.compress_block, "compress_stride": self.compress_stride, "block_size": self.block_size}
        return {**sizes, "n": self.n, "first": self.first, "local": self.local}

    def of_keys(self) -> Rule:
        """Return the rule without counts: what kernels are compiled for."""
        return self._replace(n=0, first=0, local=0)

    def compressed_keys(self, S_kv: int) -> int:
        """Compressed keys of S_kv keys."""
        return max(0, (S_kv - self.compress_block) // self.compress_stride + 1)

    @property
    def pieces(self) -> int:
        """Pieces of compress_stride keys in a block; piece i begins where compressed key i does."""
        return self.block_size // self.compress_stride

    @property
    def reach(self) -> int:
        """Pieces that a compressed key covers."""
        return self.compress_block // self.compress_stride


class Sequences(NamedTuple):
    """The sequences of a packed batch, on q's device."""

    bounds: Bounds  # as the host knows them
    rows: Tensor  # [N+1] int64, the first row of each, which is also its first key; then the first row of padding
    keys: Tensor  # [N+1] int64, the first compressed key of each; then the first unused one

    @classmethod
    def of(cls, bounds: Bounds, rule: Rule, q: Tensor) -> Sequences:
        rows = bounds.on(q)
        return cls(bounds, rows, compressed_bounds(rows, rule.compress_block, rule.compress_stride))

    def numbers(self) -> tuple[int, ...]:
        """`rows` as the host's numbers; waits for a GPU whose bounds the host does not know."""
        return tuple(self.rows.tolist()) if self.bounds.numbers is None else self.bounds.numbers


class PagedKeys(NamedTuple):
    """Compressed keys in pages: that of piece p of sequence b, which ends there, is key p % slots of page table[b, p //
    slots]."""

    table: Tensor  # [B, pages of a sequence] int32
    skipped: int  # pieces at the start of a sequence in which no compressed key ends

    def gathered(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return [B,G,C,D] of pages x [pages,G,slots,D], without reading entries of the table past the keys seen [B]."""
        table = self.table
        if seen is not None:
            first = torch.arange(table.shape[1], device=x.device) * x.shape[2]
            table = table.where(first < (seen + self.skipped).unsqueeze(1), 0)
        if x.is_contiguous():  # each group's part of a page is contiguous: PyTorch copies such parts three times as fast
            group = torch.arange(x.shape[1], device=x.device).unsqueeze(1)
            parts = torch.add(group, table.unsqueeze(1), alpha=x.shape[1])  # [B,G,pages], int64
            return x.flatten(0, 1).index_select(0, parts.flatten()).view(*parts.shape[:2], -1, x.shape[3])[:, :, self.skipped :]
        pages = x.transpose(1, 2).index_select(0, table.flatten()).unflatten(0, table.shape)  # type: ignore[no-untyped-call]
        return pages.flatten(1, 2)[:, self.skipped :].transpose(1, 2)  # type: ignore[no-any-return]


class Pool(NamedTuple):
    """The definition of a block's score; by default NSA's importance (Eq. 8 to 10).

    Heads of a group are reduced first, for every index key, then the keys that touch the block. A sum over a block
    takes each key as often as it covers pieces of compress_stride keys there.
    """

    softmax: bool = True  # of the weights exp(logit - lse); else of the logits
    heads_max: bool = False  # the largest of a group's heads; else their sum
    block_max: bool = False  # the largest of a block's keys; else their sum
    relu: bool = False  # of max(logit, 0) of each head; never with softmax

    def words(self) -> tuple[str, str, str]:
        """Return what is scored, and the reductions over heads and over a block, as a request names them."""
        kind = "weights" if self.softmax else "relu(logits)" if self.relu else "logits"
        return kind, "max" if self.heads_max else "sum", "max" if self.block_max else "sum"


NSA_POOL = Pool()


@dataclass(slots=True, eq=False)
class ChooseCall(_Logits):
    """The checked arguments of one call.

    Attributes:
        q: [B,S,G,h,Dk] with a contiguous last dimension, k and v likewise.
        k: [B,G,C,Dk], compressed keys.
        v: [B,G,C,Dv].
        rule: sizes and counts.
        blocks: blocks of a sequence, of the longest one in a packed batch.
        start: the position of row 0 where q_pos is None; row s is at start + s. In a packed batch: its number among all
            rows.
        q_pos: [B,S] int32 or int64, positions of the rows, or None.
        scale: factor of the logits.
        scratch: bytes of temporaries; a bound on the largest in choose_torch, on scores and on partial sums in
            choose_triton.
        pool: what the score of a block is.
        settings: of the decision.
        sequences: of a packed batch, where B = 1 and q_pos is None; their compressed keys follow one another in k and
            v.
        pages: where k and v are pages [pages,G,slots,D]; then there is a q_pos, or there are lengths. Backends without a
            function `paged` get them gathered.
        lengths: [B] int32 or int64, keys of each sequence, in place of q_pos: row s is at lengths[b] + start + s.
        scales: of quantized index keys, else None.
        tail: whether a row's incomplete block is added to the n.
        requests: of packed rows, where B = 1 and `lengths`, and k or the block table, have an entry for each request.
            `start` is the first row of a part. Backends that do not take such calls get one per request.
    """

    function: ClassVar[str] = "compressed_attention"  # the public function, for messages
    workspace: ClassVar[None] = None
    known: ClassVar[None] = None

    q: Tensor
    k: Tensor
    v: Tensor
    rule: Rule
    blocks: int
    start: int
    scale: float
    settings: Settings
    q_pos: Tensor | None = None
    scratch: int = SCRATCH
    pool: Pool = NSA_POOL
    sequences: Sequences | None = None
    pages: PagedKeys | None = None
    lengths: Tensor | None = None
    scales: Scales | None = None
    tail: bool = False
    requests: Requests | None = None

    def others(self) -> tuple[Any, ...]:
        """Return the arguments that follow q, k and v: what a backward pass keeps outside of autograd's saved tensors."""
        return self.rule, self.blocks, self.start, self.scale, self.settings, self.q_pos, self.scratch, self.pool, self.sequences

    def read_again(self) -> list[Tensor]:
        """Return the inputs besides q, k and v that the backward pass reads, if they have a version counter."""
        rows = None if self.sequences is None else self.sequences.rows
        return [x for x in (self.q_pos, rows) if x is not None and not x.is_inference()]

    def selects_nothing(self) -> bool:
        """Return True if there are no rows. Without keys, blocks are chosen all the same."""
        return self.q.numel() == 0

    def nothing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return o, lse and ranges of a call without rows."""
        o = self.q.new_empty(*self.q.shape[:-1], self.v.shape[3])
        ranges = o.new_empty(*o.shape[:3], self.rule.n, 2, dtype=range_dtype(self.rule.block_size))
        return o, o.new_empty(o.shape[:-1], dtype=torch.promote_types(o.dtype, torch.float32)), ranges

    @property
    def C(self) -> int:
        """Compressed keys of a sequence."""
        return self.k.shape[2] if self.pages is None else max(0, self.pages.table.shape[1] * self.k.shape[2] - self.pages.skipped)

    def gathered(self) -> ChooseCall:
        """Return the same call without pages, lengths and scales: of contiguous keys, in float32 if they are quantized."""
        if self.pages is None and self.lengths is None and self.scales is None:
            return self
        k, v, q_pos = self._gathered(self.k), self._gathered(self.v), self.positions()
        if self.scales is None:
            return replace(self, k=k, v=v, q_pos=q_pos, pages=None, lengths=None)
        k = k.float()
        if self.scales.k is not None:
            scale = self.scales.k[:, :, None, None]  # [pages or 1,G,1,1]
            k *= self._gathered(scale.expand(-1, -1, self.k.shape[2], -1)) if self.scales.page_keys else scale
        return replace(self, q=self.q.float(), k=k, v=k, q_pos=q_pos, pages=None, lengths=None, scales=None)

    def _gathered(self, x: Tensor) -> Tensor:
        """Return x without pages. Entries of the table past what any row sees are not read."""
        return x if self.pages is None else self.pages.gathered(as_bytes(x), self.seen().amax(1)).view(x.dtype)

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> ChooseCall:
        """Return the call of other tensors of the same sizes, such as those that autograd saved."""
        return replace(self, q=q, k=k, v=v)

    def positions(self) -> Tensor:
        """Return [B,S] int64, of each row in its own sequence; -1 for padding."""
        B, S = self.q.shape[:2]
        if self.q_pos is not None:
            return self.q_pos.long()
        if self.lengths is not None:
            assert self.requests is None, "its backends compute the rows' positions"
            t = self.lengths.long().unsqueeze(1) + torch.arange(self.start, self.start + S, device=self.q.device)
            return t.clamp(max=self.blocks * self.rule.block_size - 1)
        if self.sequences is not None:
            return row_positions(self.sequences.rows, self.start + S)[:, self.start :]
        return torch.arange(self.start, self.start + S, device=self.q.device).expand(B, S)

    def seen(self) -> Tensor:
        """Return the number of compressed keys that each row sees, [B,S] int64: always the first ones of its sequence."""
        past = self.positions() + 1 - self.rule.compress_block
        return torch.where(past >= 0, past // self.rule.compress_stride + 1, 0).clamp(max=self.C)

    def most_seen(self) -> int:
        """Return a bound on `seen`, exact where positions are implied; does not wait for a GPU."""
        C = self.C
        if self.q_pos is not None or self.lengths is not None:
            return C
        past = self.start + self.q.shape[1] - self.rule.compress_block
        return min(C, past // self.rule.compress_stride + 1) if past >= 0 else 0

    def visible_blocks(self) -> int:
        """Return a bound on the blocks that any row sees, exact where positions are implied; does not wait for a GPU. With a
        tail, on those that it may choose: an incomplete block has no index key."""
        blocks = min(self.blocks, self.C) if self.tail else self.blocks
        if self.q_pos is not None or self.lengths is not None:
            return blocks
        return max(0, min(blocks, (self.start + self.q.shape[1] - 1) // self.rule.block_size + 1))

    def incomplete_blocks(self) -> Tensor:
        """Return the block [B,S,1,1] that each row sees in part, -1 for none."""
        t = self.positions()[:, :, None, None]
        return torch.where((t >= 0) & ((t + 1) % self.rule.block_size != 0), t // self.rule.block_size, -1)

    def store(self, out: Tensor, chosen: Tensor) -> None:
        """Write the chosen blocks [B,S,G,n], and with `tail` the incomplete ones, to indices [B,S,G,n] or ranges
        [B,S,G,n,2]."""
        if self.tail:
            chosen = torch.cat((chosen, self.incomplete_blocks().expand(-1, -1, chosen.shape[2], -1).to(chosen.dtype)), 3)
        out.copy_(chosen if out.dim() == 4 else whole_blocks(chosen, self.rule.block_size))

    def part(self, batch: slice, rows: slice) -> ChooseCall:
        """Return the call for some rows of some sequences, on views."""
        q_pos = None if self.q_pos is None else self.q_pos[batch, rows]
        part = replace(self, q=self.q[batch, rows], start=self.start + (rows.start or 0), q_pos=q_pos)
        return part if self.requests is not None else part.over_caches(batch)

    def over_caches(self, batch: slice) -> ChooseCall:
        """Return the call over the lengths, keys and block tables of some sequences."""
        part = replace(self, lengths=None if self.lengths is None else self.lengths[batch])
        if self.pages is None:
            part.k, part.v = self.k[batch], self.v[batch]
        else:
            part.pages = self.pages._replace(table=self.pages.table[batch])
        return part

    def each_sequence(self) -> Iterator[tuple[slice, slice, ChooseCall]]:
        """Return the rows, the compressed keys and the call of every sequence of a packed batch. Waits for a GPU as
        `Sequences.numbers`."""
        assert self.sequences is not None
        numbers, first = self.sequences.numbers(), 0
        for begin, end in itertools.pairwise(numbers):
            rows, keys = slice(begin, end), slice(first, first + self.rule.compressed_keys(end - begin))
            first = keys.stop
            if end > begin:
                q, k, v = self.q[:, rows], self.k[:, :, keys], self.v[:, :, keys]
                yield rows, keys, replace(self, q=q, k=k, v=v, blocks=-(-(end - begin) // self.rule.block_size), sequences=None)

    def each_request(self) -> Iterator[tuple[slice, ChooseCall]]:
        """Return the rows and the call of every request. Waits for a GPU as `Requests.spans`."""
        assert self.requests is not None
        for r, (begin, end) in enumerate(self.requests.spans()):
            if end > begin:
                rows = replace(self, q=self.q[:, begin:end], start=begin - end, requests=None)
                yield slice(begin, end), rows.over_caches(slice(r, r + 1))

    def parts(self, row_bytes: int) -> Iterator[tuple[slice, slice]]:
        """Sequences and rows, in order, whose temporaries of row_bytes per row fit the scratch; one row at least."""
        B, S = self.q.shape[:2]
        fit = max(1, self.scratch // max(1, row_bytes))
        sequences, rows = max(1, fit // max(1, S)), max(1, min(S, fit))
        for b in range(0, B, sequences):
            for s in range(0, S, rows):
                yield slice(b, min(B, b + sequences)), slice(s, min(S, s + rows))


@dataclass(slots=True, eq=False)
class IndexLossCall(_Logits):
    """The checked arguments of one call of `indexer_loss`.

    Attributes:
        q: [B,S,G,h,Dk] with a contiguous last dimension, k, index_q and index_k likewise.
        k: [B,G,S_kv,Dk].
        lse: [B,S,G,h], contiguous, of the main attention over the selected keys; float32, or float64 for float64 inputs.
        index_q: [B,S,G,Di].
        index_k: [B,G,S_kv,Di], or [B,1,S_kv,Di] for all groups.
        selection: over the rows [B,S,G]; None for all visible keys.
        q_pos: [B,S] int32 or int64, positions of the rows; None for S_kv - S + s.
        scale, index_scale: factors of the logits.
        settings, device: of the decision.
        bounds: of a packed batch without a selection, where B = 1 and row s is key s: where each row's sequence begins
            and ends, [2,S] int32, contiguous; S and 0 in padding.
    """

    function: ClassVar[str] = "indexer_loss"  # the public function, for messages
    known: ClassVar[None] = None
    workspace: ClassVar[None] = None

    q: Tensor
    k: Tensor
    lse: Tensor
    index_q: Tensor
    index_k: Tensor
    selection: Selection | None
    q_pos: Tensor | None
    scale: float
    index_scale: float
    settings: Settings
    device: DeviceInfo = CPU
    bounds: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the inputs that a backward pass reads."""
        ranges = None if self.selection is None else self.selection.ranges
        return self.q, self.k, self.lse, self.index_q, self.index_k, ranges, self.q_pos, self.bounds

    def selects_nothing(self) -> bool:
        """Return True if there are no rows, keys or ranges."""
        return self.q.numel() == 0 or self.k.numel() == 0 or (self.selection is not None and self.selection.n == 0)

    def nothing(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss and gradients of a call that selects nothing."""
        return self.lse.new_zeros(self.q.shape[:3]), torch.zeros_like(self.index_q), self.lse.new_zeros(self.index_k.shape)

    def main(self) -> Call:
        """Return the logits of the main attention as a call. Its values are not read; neither is the selection without
        one."""
        selection = self.selection or Selection(self.q.new_empty(*self.q.shape[:3], 0, 2, dtype=torch.int32))
        return Call(self.q, self.k, self.k, selection, self.q_pos, self.scale, self.settings, self.device)

    def index(self) -> Call:
        """Return the logits of the index branch, one head per group, likewise."""
        k = self.index_k.expand(-1, self.q.shape[2], -1, -1)
        return replace(self.main(), q=self.index_q.unsqueeze(3), k=k, v=k, scale=self.index_scale)


@dataclass(slots=True, eq=False)
class WindowCall(_Logits):
    """The checked arguments of a call with a positive scale.

    Attributes:
        q: [B,S,G,h,Dk]; k: [B,G,S_kv,Dk]; v: [B,G,S_kv,Dv], any strides with a contiguous last dimension; none is
            empty, S <= S_kv.
        window: keys that a row sees.
        scale: factor of the logits.
        bounds: of a packed batch: where each row's sequence begins and ends, [2,T] int32, contiguous; T and 0 in
            padding.
    """

    workspace: ClassVar[None] = None

    q: Tensor
    k: Tensor
    v: Tensor
    window: int
    scale: float
    bounds: Tensor | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, bounds: Tensor | None) -> WindowCall:
        """With -q for a negative scale: kernels track the maximum of q.k, which must be that of the logits."""
        return cls(q if scale >= 0 else -q, k, v, window, abs(scale), bounds)


def call_over_pool(call: Call, block_table: Tensor) -> Call:
    """Return the call of one sequence, q [1,B*S,G,h,Dk] over k, v [1,G,keys of all pages,D]; only ranges are copied.

    Ranges [1,B*S,G,n * pieces,2] int64 are the call's after the causal clamp, cut at the ends of pages. Of the block table
    only the entries that they reach are read.
    """
    (k, page_keys), (v, v_page_keys) = _pool("k_cache", call.k), _pool("v_cache", call.v)
    if page_keys != v_page_keys:
        raise _odd_pages("v_cache", call.v, f"{page_keys} keys apart, as those of k_cache")
    page_size, block = call.k.shape[2], call.selection.block_size
    start, end = (x.unsqueeze(-1) for x in call.clamped_ranges())
    if block is not None and page_size % block == 0:
        pieces = 1
    else:  # the most pages that a range can overlap
        pieces = min(block_table.shape[1], (min(block or call.S_kv, call.selection.length_bound(call.S_kv)) - 2) // page_size + 2)
    page = start // page_size + torch.arange(pieces, device=start.device)  # [B,S,G,n,pieces], in the sequence
    low, high = torch.maximum(start, page * page_size), torch.minimum(end, (page + 1) * page_size)
    filled = high > low
    sequence = torch.arange(len(block_table), device=start.device) if call.table_rows is None else call.table_rows
    pool_page = block_table[sequence.view(-1, 1, 1, 1, 1), torch.where(filled, page, 0)].long()
    low, high = (torch.where(filled, x + pool_page * page_keys - page * page_size, 0) for x in (low, high))
    ranges = torch.stack((low, high), -1).flatten(3, 4).flatten(0, 1).unsqueeze(0)
    rows = ranges.shape[1]
    last = torch.full((1, 1), k.shape[2] - 1, device=k.device).expand(1, rows)  # the ranges are clamped already
    selection = Selection(ranges, None, call.selection.length_bound(call.S_kv), disjoint=True)
    scales = call.scales
    if scales is not None and scales.page_keys:
        scales = scales._replace(page_keys=page_keys)
    q = call.q.flatten(0, 1).unsqueeze(0)
    return replace(
        call, q=q, k=k, v=v, selection=selection, q_pos=last, lengths=None, block_table=None, scales=scales, table_rows=None,
        out=(None, None),
    )  # fmt: skip


def _pool(name: str, x: Tensor) -> tuple[Tensor, int]:
    """Pages x [pages,G,page_size,D] as one sequence [1,G,keys,D], and the distance of pages in keys.

    Other data, such as the pages of V, may be between those of K; no range selects it.
    """
    pages, G, page_size, D = x.shape
    page, group, key, _ = x.stride()
    if pages == 1:
        return x, page_size
    if page % key:
        raise _odd_pages(name, x, "a whole number of keys apart")
    page_keys = page // key
    return x.as_strided((1, G, (pages - 1) * page_keys + page_size, D), (0, group, key, 1)), page_keys


def _odd_pages(name: str, x: Tensor, allowed: str) -> ArgumentError:
    return ArgumentError(
        name,
        f"pages {x.stride(0)} elements and keys {x.stride(2)} elements apart",
        f"pages {allowed}, for a backend that reads no block table",
        "use triton-group, or copy the cache",
    )
