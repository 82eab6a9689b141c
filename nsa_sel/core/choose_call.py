"""One call to choose blocks, as its backends receive it: attention over compressed keys, importance of blocks, top n."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core.arguments import Bounds, compressed_bounds, range_dtype, row_positions
from nsa_sel.core.call import LOG2_E
from nsa_sel.core.transforms import capturing
from nsa_sel.settings.schema import Settings

SCRATCH = 64 << 20  # bytes


class Rule(NamedTuple):
    """Sizes of compressed keys and of blocks, in keys, and numbers of selected blocks.

    Compressed key i covers the keys [i * compress_stride, i * compress_stride + compress_block). Sizes are multiples of compress_stride.
    """

    compress_block: int = 32
    compress_stride: int = 16
    block_size: int = 64
    n: int = 16
    first: int = 1  # first + local <= n
    local: int = 2

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
    """Compressed keys in pages: that of piece p of sequence b, which ends there, is key p % slots of page table[b, p // slots]."""

    table: Tensor  # [B, pages of a sequence] int32
    skipped: int  # pieces at the start of a sequence in which no compressed key ends

    def gathered(self, x: Tensor) -> Tensor:
        """Return [B,G,C,D] of pages x [pages,G,slots,D]."""
        pages = x.transpose(1, 2).index_select(0, self.table.flatten()).unflatten(0, self.table.shape)  # type: ignore[no-untyped-call]
        found: Tensor = pages.flatten(1, 2)[:, self.skipped :].transpose(1, 2)
        return found


class Pool(NamedTuple):
    """The definition of a block's score; by default NSA's importance (Eq. 8 to 10).

    Heads of a group are reduced first, for every index key, then the keys that touch the block. A sum over a block takes each key as often
    as it covers pieces of compress_stride keys there.
    """

    softmax: bool = True  # of the weights exp(logit - lse); else of the logits
    heads_max: bool = False  # the largest of a group's heads; else their sum
    block_max: bool = False  # the largest of a block's keys; else their sum

    def words(self) -> tuple[str, str, str]:
        """Return what is scored, and the reductions over heads and over a block, as a request names them."""
        return "weights" if self.softmax else "logits", "max" if self.heads_max else "sum", "max" if self.block_max else "sum"


NSA_POOL = Pool()


@dataclass(slots=True, eq=False)
class ChooseCall:
    """The checked arguments of one call.

    Attributes:
        q: [B,S,G,h,Dk] with a contiguous last dimension, k and v likewise.
        k: [B,G,C,Dk], compressed keys.
        v: [B,G,C,Dv].
        rule: sizes and counts.
        blocks: blocks of a sequence, of the longest one in a packed batch.
        start: the position of row 0 where q_pos is None; row s is at start + s. In a packed batch: its number among all rows.
        q_pos: [B,S] int32 or int64, positions of the rows, or None.
        scale: factor of the logits.
        scratch: bytes of temporaries; a bound on the largest in choose_torch, on scores and on partial sums in choose_triton.
        pool: what the score of a block is.
        settings: of the decision.
        sequences: of a packed batch, where B = 1 and q_pos is None; their compressed keys follow one another in k and v.
        pages: where k and v are pages [pages,G,slots,D]; then there is a q_pos. Backends without a function `paged` get them gathered.
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

    def others(self) -> tuple[Any, ...]:
        """Return the arguments that follow q, k and v: what a backward pass keeps outside of autograd's saved tensors."""
        return self.rule, self.blocks, self.start, self.scale, self.settings, self.q_pos, self.scratch, self.pool, self.sequences

    def read_again(self) -> tuple[Tensor | None, ...]:
        """Return the inputs besides q, k and v that the backward pass reads."""
        return self.q_pos, None if self.sequences is None else self.sequences.rows

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
        """Return the same call without pages."""
        return self if self.pages is None else replace(self, k=self.pages.gathered(self.k), v=self.pages.gathered(self.v), pages=None)

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> ChooseCall:
        """Return the call of other tensors of the same sizes, such as those that autograd saved."""
        return replace(self, q=q, k=k, v=v)

    def timed(self) -> bool:
        """Return True if NSA_DEBUG_TIMING times this call."""
        return self.settings.debug_timing and not capturing(self.q)

    def positions(self) -> Tensor:
        """Return [B,S] int64, of each row in its own sequence; -1 for padding."""
        B, S = self.q.shape[:2]
        if self.q_pos is not None:
            return self.q_pos.long()
        if self.sequences is not None:
            return row_positions(self.sequences.rows, self.start + S)[:, self.start :]
        return torch.arange(self.start, self.start + S, device=self.q.device).expand(B, S)

    def seen(self) -> Tensor:
        """Return the number of compressed keys that each row sees, [B,S] int64: always the first ones of its sequence."""
        past = self.positions() + 1 - self.rule.compress_block
        return torch.where(past >= 0, past // self.rule.compress_stride + 1, 0).clamp(max=self.k.shape[2])

    def most_seen(self) -> int:
        """Return a bound on `seen`, exact where positions are implied; does not wait for a GPU."""
        C = self.k.shape[2]
        if self.q_pos is not None:
            return C
        past = self.start + self.q.shape[1] - self.rule.compress_block
        return min(C, past // self.rule.compress_stride + 1) if past >= 0 else 0

    def visible_blocks(self) -> int:
        """Return a bound on the blocks that any row sees, exact where positions are implied; does not wait for a GPU."""
        if self.q_pos is not None:
            return self.blocks
        return max(0, min(self.blocks, (self.start + self.q.shape[1] - 1) // self.rule.block_size + 1))

    def part(self, batch: slice, rows: slice) -> ChooseCall:
        """Return the call for some rows of some sequences, on views."""
        q_pos = None if self.q_pos is None else self.q_pos[batch, rows]
        part = replace(self, q=self.q[batch, rows], start=self.start + (rows.start or 0), q_pos=q_pos)
        if self.pages is None:
            part.k, part.v = self.k[batch], self.v[batch]
        else:
            part.pages = self.pages._replace(table=self.pages.table[batch])
        return part

    def each_sequence(self) -> Iterator[tuple[slice, slice, ChooseCall]]:
        """Return the rows, the compressed keys and the call of every sequence of a packed batch. Waits for a GPU as `Sequences.numbers`."""
        assert self.sequences is not None
        numbers, first = self.sequences.numbers(), 0
        for begin, end in itertools.pairwise(numbers):
            rows, keys = slice(begin, end), slice(first, first + self.rule.compressed_keys(end - begin))
            first = keys.stop
            if end > begin:
                q, k, v = self.q[:, rows], self.k[:, :, keys], self.v[:, :, keys]
                yield rows, keys, replace(self, q=q, k=k, v=v, blocks=-(-(end - begin) // self.rule.block_size), sequences=None)

    def parts(self, row_bytes: int) -> Iterator[tuple[slice, slice]]:
        """Sequences and rows, in order, whose temporaries of row_bytes per row fit the scratch; one row at least."""
        B, S = self.q.shape[:2]
        fit = max(1, self.scratch // max(1, row_bytes))
        sequences, rows = max(1, fit // max(1, S)), max(1, min(S, fit))
        for b in range(0, B, sequences):
            for s in range(0, S, rows):
                yield slice(b, min(B, b + sequences)), slice(s, min(S, s + rows))

    def scale_log2(self) -> float:
        """Return the factor from q.k to logits in base 2; never 0, which would turn a masked -inf into NaN."""
        return max(self.scale * LOG2_E, 1e-30)

    def with_positive_scale(self) -> ChooseCall:
        """Return the same logits from -q and -scale: kernels track the maximum of q.k, which must be that of the logits."""
        return replace(self, q=-self.q, scale=-self.scale)
