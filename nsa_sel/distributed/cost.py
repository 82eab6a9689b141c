"""What travels between ranks: the bytes of each way, counted, the cheapest way, and a record of why."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

Way = Literal["gather", "blocks", "rows"]
Choice = Literal["auto", "gather", "blocks", "rows"]
ALIGNED = 16  # bytes: kernels read rows that begin at multiples of it, so that parts of a packet do
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
    """One call's exchange between ranks: the way that was taken, what each way costs, and why this one."""

    way: Way
    ranks: int
    gather: Bytes
    blocks: Bytes | None  # None: blocks can't travel, `why` says what is in the way
    rows: Bytes
    slots: int  # blocks of other ranks that the busiest rank keeps room for, a batch entry and group
    counted: bool  # whether the blocks were counted, which waits for the device, or bounded by static facts
    why: str

    def __str__(self) -> str:
        gather, blocks, rows = (sum(cost or (0,)) / 1e6 for cost in (self.gather, self.blocks, self.rows))
        of = "counted" if self.counted else "static bound"
        other = "can't travel" if self.blocks is None else f"{blocks:.4g} MB ({of}: {self.slots} a batch entry and group)"
        return (
            f"{self.way}, {self.ranks} ranks: gathering {gather:.4g} MB, blocks {other}, rows {rows:.4g} MB,"
            f" to or from the busiest rank; {self.why}"
        )


class Sizes(NamedTuple):
    """What costs depend on: q [B,S,G,h,Dk], k [B,G,keys,Dk] and v [B,G,keys,Dv] of each rank, n ranges a row."""

    ranks: int
    B: int
    S: int
    G: int
    h: int
    keys: int
    Dk: int
    Dv: int
    n: int
    block_size: int | None
    element_size: int  # bytes of a number of q, k, v
    index_size: int  # bytes of a number of the ranges
    has_pos: bool
    needs_grad: bool

    @property
    def within(self) -> bool:
        """Whether rows stand within their own rank's slice, so that they see nothing of the ranks behind it."""
        return not self.has_pos and self.S == self.keys

    def first(self, rank: int) -> int:
        """Where the first row of a rank stands by default."""
        return self.ranks * (self.keys - self.S) + rank * self.S


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


def rows_bytes(
    ranks: int, *, B: int, S: int, G: int, h: int, Dk: int, Dv: int, n: int, element_size: int, index_size: int, has_pos: bool,
    needs_grad: bool,
) -> Bytes:  # fmt: skip
    """Bytes of letting rows travel to the keys, each rank holding q [B,S,G,h,Dk] and ranges [B,S,G,n,2] of numbers of index_size bytes.

    Each rank's rows, with int64 positions where has_pos, go to every other rank, and from there their part of o and lse. Backward o, lse
    and their gradients go, and the part of dq comes back. What travels together is filled up to 16 bytes.
    """
    heads = S * G * h
    lse = heads * max(4, element_size)
    q, o = heads * Dk * element_size, heads * Dv * element_size
    forward = [q, S * G * n * 2 * index_size, *([S * 8] if has_pos else []), o, lse]
    backward = [o, o, lse, lse]
    others = (ranks - 1) * B
    return Bytes(others * sum(map(padded, forward)), others * (sum(map(padded, backward)) + q) * needs_grad)


def padded(size: int) -> int:
    """Bytes up to the next multiple of `ALIGNED`, at least one: a packet is never empty."""
    return max(1, -(-size // ALIGNED)) * ALIGNED


def obstacle(of: Sizes) -> str | None:
    """Why blocks can't travel."""
    if of.block_size is None:
        return "the selection is not of whole blocks"
    if of.keys % of.block_size:
        return f"a rank's {of.keys} keys are no multiple of the block size {of.block_size}"
    return None


def cheapest_exchange(of: Sizes, asked: Choice, slots: list[list[int]] | None, counted: bool) -> Exchange:
    """The exchange to be done, `slots` as in `exchanged_bytes`, None where blocks can't travel; of "auto" the way with the fewest bytes."""
    facts = of._asdict()
    needed = {name: facts[name] for name in ("B", "G", "Dk", "Dv", "element_size", "needs_grad")}
    room = slots or [[0] * of.ranks] * of.ranks
    gather, blocks = exchanged_bytes(room, keys=of.keys, block_size=of.block_size or 1, **needed)
    rows = rows_bytes(of.ranks, S=of.S, h=of.h, n=of.n, index_size=of.index_size, has_pos=of.has_pos, **needed)
    way, why = cheapest(gather, None if slots is None else blocks, rows)
    if asked != "auto":
        way, why = asked, "asked for by exchange="
    if slots is None:
        why = f"{why}; {obstacle(of)}"
    return Exchange(way, of.ranks, gather, None if slots is None else blocks, rows, max(map(sum, room)), counted, why)


@functools.lru_cache(maxsize=1024)
def planned(of: Sizes, asked: Choice) -> tuple[Exchange, list[list[int]] | None]:
    """`cheapest_exchange` by static facts alone, and the slots."""
    slots = None
    if of.block_size is not None and obstacle(of) is None:
        slots = static_slots(of.ranks, of.keys // of.block_size, of.S, of.n, of.within)
    return cheapest_exchange(of, asked, slots, counted=False), slots


def cheapest(gather: Bytes, blocks: Bytes | None, rows: Bytes) -> tuple[Way, str]:
    """The way with the fewest bytes, the first named where they are alike, and why in words."""
    ways: dict[Way, Bytes] = {"gather": gather, **({} if blocks is None else {"blocks": blocks}), "rows": rows}
    way = min(ways, key=lambda name: ways[name].total)
    first = {"gather": "gathering is", "blocks": "blocks are", "rows": "rows are"}[way]
    told = {"gather": "gathered", "blocks": "in blocks", "rows": "by rows"}
    return way, f"{first} no more bytes: {', '.join(f'{cost.total} {told[name]}' for name, cost in ways.items())}"


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
