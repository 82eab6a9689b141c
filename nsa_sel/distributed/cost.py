"""What travels between ranks: the bytes of both ways, counted, the cheaper way, and a record of why."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Literal, NamedTuple

Way = Literal["gather", "blocks"]
KEPT_EXCHANGES = 1024
_done: collections.deque[Exchange] = collections.deque(maxlen=KEPT_EXCHANGES)


class Bytes(NamedTuple):
    """Sent or received by the busiest rank, whichever is more, in one pass each way; `backward` is 0 where no gradients are needed."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


class Exchange(NamedTuple):
    """One call's exchange of keys and values between ranks: the way that was taken, what both ways cost, and why this one."""

    way: Way
    ranks: int
    gather: Bytes
    blocks: Bytes | None  # None: blocks can't travel, `why` says what is in the way
    slots: int  # blocks of other ranks that the busiest rank keeps room for, a batch entry and group
    counted: bool  # whether the blocks were counted, which waits for the device, or bounded by static facts
    why: str

    def __str__(self) -> str:
        gather, blocks = (sum(cost or (0,)) / 1e6 for cost in (self.gather, self.blocks))
        of = "counted" if self.counted else "static bound"
        other = "can't travel" if self.blocks is None else f"{blocks:.4g} MB ({of}: {self.slots} a batch entry and group)"
        return f"{self.way}, {self.ranks} ranks: gathering {gather:.4g} MB, blocks {other}, to or from the busiest rank; {self.why}"


def exchanged_bytes(
    slots: Sequence[Sequence[int]], *, B: int, G: int, keys: int, Dk: int, Dv: int, element_size: int, block_size: int, needs_grad: bool
) -> tuple[Bytes, Bytes]:
    """Bytes of gathering, and of letting blocks travel, each rank holding k [B,G,keys,Dk] and v [B,G,keys,Dv].

    slots[r][p]: blocks of rank p that rank r keeps room for, a batch entry and group. Gathering sends every slice to every rank, and the
    gradients of all keys back to their owners. Blocks cost their keys and values one way, with an int32 index each that asks for
    them, and their gradients the other way.
    """
    ranks, a_key = len(slots), B * G * (Dk + Dv) * element_size
    gather = (ranks - 1) * keys * a_key
    received = [sum(row) for row in slots]
    sent = [sum(row[p] for row in slots) for p in range(ranks)]
    most = max(received + sent)
    blocks = most * block_size * a_key
    asked = most * B * G * 4
    return Bytes(gather, gather * needs_grad), Bytes(blocks + asked, blocks * needs_grad)


def cheaper(gather: Bytes, blocks: Bytes) -> tuple[Way, str]:
    """The way with fewer bytes, gathering where both are alike, and why in words."""
    way: Way = "blocks" if blocks.total < gather.total else "gather"
    return way, f"{'blocks are' if way == 'blocks' else 'gathering is'} no more bytes: {gather.total} gathered, {blocks.total} in blocks"


def note(exchange: Exchange) -> None:
    """Remember one call's exchange."""
    _done.append(exchange)


def exchanges() -> tuple[Exchange, ...]:
    """The exchanges of the last calls of this process, oldest first, at most `KEPT_EXCHANGES`; `print` one to read why."""
    return tuple(_done)


def static_slots(ranks: int, blocks: int, rows: int, chosen: int, past_only: bool) -> list[list[int]]:
    """Room for blocks without a look at the selection: `rows` rows of a rank choose `chosen` blocks each, of `blocks` that a rank holds.

    past_only: rows stand within their own rank's slice, so that they see nothing of the ranks behind it.
    """
    most = min(blocks, rows * chosen)
    return [[0 if p == r or (past_only and p > r) else most for p in range(ranks)] for r in range(ranks)]
