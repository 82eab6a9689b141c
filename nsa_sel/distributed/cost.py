"""Count the bytes of each exchange, pick the cheapest one, and record the reason."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["gather", "blocks", "rows"]
Choice = Literal["auto", "gather", "blocks", "rows"]
ALIGNED = 16  # bytes: kernels load aligned rows, so the parts of a packet begin at multiples of it
KEPT_EXCHANGES = 1024
_done: collections.deque[Exchange] = collections.deque(maxlen=KEPT_EXCHANGES)


class Bytes(NamedTuple):
    """Bytes that the busiest rank sends or receives, whichever is more, per pass; `backward` is 0 where no gradients
    are needed."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


class Exchange(NamedTuple):
    """One call's exchange between ranks: its kind, the bytes of each kind, and why this one was taken."""

    kind: Kind
    ranks: int
    gather: Bytes
    blocks: Bytes | None  # None: blocks can't be sent, `why` says what prevents it
    rows: Bytes
    slots: int  # blocks of other ranks that the busiest rank has room for, per batch entry and group
    counted: bool  # whether the blocks were counted, which waits for the device, or bounded by static facts
    why: str

    def __str__(self) -> str:
        gather, blocks, rows = (sum(cost or (0,)) / 1e6 for cost in (self.gather, self.blocks, self.rows))
        of = "counted" if self.counted else "static bound"
        other = "can't be sent" if self.blocks is None else f"{blocks:.4g} MB ({of}: {self.slots} per batch entry and group)"
        return (
            f"{self.kind}, {self.ranks} ranks: gathering {gather:.4g} MB, blocks {other}, rows {rows:.4g} MB,"
            f" to or from the busiest rank; {self.why}"
        )


class Sizes(NamedTuple):
    """Sizes that costs depend on: q [B,S,G,h,Dk], k [B,G,keys,Dk] and v [B,G,keys,Dv] of each rank, n ranges per row."""

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
        """True if rows are at the positions of their own rank's keys, so that they attend to no key of later ranks."""
        return not self.has_pos and self.S == self.keys

    def first(self, rank: int) -> int:
        """Return the default position of a rank's first row."""
        return self.ranks * (self.keys - self.S) + rank * self.S


def exchanged_bytes(
    slots: Sequence[Sequence[int]], *, B: int, G: int, keys: int, Dk: int, Dv: int, element_size: int, block_size: int, needs_grad: bool
) -> tuple[Bytes, Bytes]:
    """Return the bytes of the exchanges "gather" and "blocks".

    "gather" sends every slice to every rank, and the gradients of all keys back to their owners. "blocks" sends an
    int32 index per requested block, its keys and values forward, and their gradients backward.

    Args:
        slots: slots[r][p] blocks of rank p that rank r has room for, per batch entry and group.
        B, G, keys, Dk, Dv: sizes of each rank's k [B,G,keys,Dk] and v [B,G,keys,Dv].
        element_size: bytes of an element of k and v.
        block_size: keys of a block.
        needs_grad: whether there is a backward pass.

    Returns:
        Bytes of "gather" and of "blocks", to or from the busiest rank.
    """
    ranks, key_bytes = len(slots), B * G * (Dk + Dv) * element_size
    gather = (ranks - 1) * keys * key_bytes
    received = [sum(row) for row in slots]
    sent = [sum(row[p] for row in slots) for p in range(ranks)]
    most = max(received + sent)
    blocks = most * block_size * key_bytes
    requests = most * B * G * 4
    return Bytes(gather, gather * needs_grad), Bytes(blocks + requests, blocks * needs_grad)


def rows_bytes(
    ranks: int, *, B: int, S: int, G: int, h: int, Dk: int, Dv: int, n: int, element_size: int, index_size: int, has_pos: bool,
    needs_grad: bool,
) -> Bytes:  # fmt: skip
    """Return the bytes of the exchange "rows".

    Each rank sends its queries, ranges and positions to every other rank, and receives partial o and lse. Backward it
    sends o, lse and their gradients, and receives partial dq. Tensors that share a packet are padded to 16 bytes.

    Args:
        ranks: number of ranks.
        B, S, G, h, Dk, Dv, n: sizes of each rank's q [B,S,G,h,Dk], v [B,G,keys,Dv] and ranges [B,S,G,n,2].
        element_size: bytes of an element of q.
        index_size: bytes of an element of the ranges.
        has_pos: True if int64 positions [B,S] are sent, too.
        needs_grad: True if there is a backward pass.

    Returns:
        Bytes to or from the busiest rank.
    """
    heads = S * G * h
    lse = heads * max(4, element_size)
    q, o = heads * Dk * element_size, heads * Dv * element_size
    forward = [q, S * G * n * 2 * index_size, *([S * 8] if has_pos else []), o, lse]
    backward = [o, o, lse, lse]
    others = (ranks - 1) * B
    return Bytes(others * sum(map(padded, forward)), others * (sum(map(padded, backward)) + q) * needs_grad)


def padded(size: int) -> int:
    """Return `size` bytes rounded up to a multiple of `ALIGNED`, at least one multiple, because a packet is never
    empty."""
    return max(1, -(-size // ALIGNED)) * ALIGNED


def obstacle(of: Sizes) -> str | None:
    """Return the reason why blocks cannot be sent; None if they can."""
    if of.block_size is None:
        return "the selection is not of whole blocks"
    if of.keys % of.block_size:
        return f"a rank's {of.keys} keys are no multiple of the block size {of.block_size}"
    return None


def cheapest_exchange(of: Sizes, asked: Choice, slots: list[list[int]] | None, counted: bool) -> Exchange:
    """Return the exchange that `asked` names, or for "auto" the one with the fewest bytes.

    slots: as in `exchanged_bytes`; None if blocks cannot be sent.
    """
    facts = of._asdict()
    needed = {name: facts[name] for name in ("B", "G", "Dk", "Dv", "element_size", "needs_grad")}
    room = slots or [[0] * of.ranks] * of.ranks
    gather, blocks = exchanged_bytes(room, keys=of.keys, block_size=of.block_size or 1, **needed)
    rows = rows_bytes(of.ranks, S=of.S, h=of.h, n=of.n, index_size=of.index_size, has_pos=of.has_pos, **needed)
    kind: Kind
    if asked != "auto":
        kind, why = asked, "asked for by exchange="
    else:  # the first of equals
        kinds: dict[Kind, Bytes] = {"gather": gather, **({} if slots is None else {"blocks": blocks}), "rows": rows}
        kind = min(kinds, key=lambda name: kinds[name].total)
        first = {"gather": "gathering is", "blocks": "blocks are", "rows": "rows are"}[kind]
        words = {"gather": "gathered", "blocks": "in blocks", "rows": "by rows"}
        why = f"{first} no more bytes: {', '.join(f'{cost.total} {words[name]}' for name, cost in kinds.items())}"
    if slots is None:
        why = f"{why}; {obstacle(of)}"
    return Exchange(kind, of.ranks, gather, None if slots is None else blocks, rows, max(map(sum, room)), counted, why)


@functools.lru_cache(maxsize=1024)
def planned(of: Sizes, asked: Choice) -> tuple[Exchange, list[list[int]] | None]:
    """Return `cheapest_exchange` from static facts only, and the slots."""
    slots = None
    if of.block_size is not None and obstacle(of) is None:
        # Blocks of each rank that suffice for any selection; rows `within` their rank's keys attend to none of later ranks.
        most, ranks = min(of.keys // of.block_size, of.S * of.n), range(of.ranks)
        slots = [[0 if p == r or (of.within and p > r) else most for p in ranks] for r in ranks]
    return cheapest_exchange(of, asked, slots, counted=False), slots


def note(exchange: Exchange) -> None:
    _done.append(exchange)


def exchanges() -> tuple[Exchange, ...]:
    """Return the exchanges of this process's last `KEPT_EXCHANGES` calls, oldest first; `print` one to read the reason."""
    return tuple(_done)
