"""A cached sequence: its length, and which pages hold its keys. Host bookkeeping; no tensor is touched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nsa_sel.caching.pages import Pages

Numbers = npt.NDArray[np.int32]
Copies = list[tuple[int, int]]  # pages to copy: from, to


class Mark(NamedTuple):
    """What a `Table` was, so that it can be that again."""

    first: int
    end: int
    last: int  # the page of entry end - 1


class Table:
    """Pages of one sequence in one pool: entry i is the page of the keys from i * page_size on. Entries from `first` to `end` are held."""

    def __init__(self, pool: Pages, page_size: int) -> None:
        self.pool, self.page_size = pool, page_size
        self.first = self.end = 0
        self._entries: Numbers = np.zeros(8, np.int32)

    def held(self) -> Numbers:
        """The pages that are held, in order."""
        return self._entries[self.first : self.end]

    def mark(self) -> Mark:
        return Mark(self.first, self.end, int(self._entries[max(0, self.end - 1)]))

    def restore(self, mark: Mark) -> None:
        """Undo `forget` and `grow`; the pool undoes its own part."""
        self.first, self.end = mark.first, mark.end
        self._entries[max(0, self.end - 1)] = mark.last

    def forget(self, position: int) -> None:
        """Give back the pages all of whose keys are before `position`."""
        until = min(max(position, 0) // self.page_size, self.end)
        for page in self._entries[self.first : until].tolist():
            self.pool.release(page)
        self.first = max(self.first, until)

    def grow(self, length: int, tokens: int) -> Copies:
        """Hold pages of `tokens` more keys after `length`, all of which may be written: a shared page among them is replaced by a copy."""
        copies: Copies = []
        if tokens and length % self.page_size:
            last = int(self._entries[self.end - 1])
            if self.pool.is_shared(last):
                own = self.pool.take()
                self.pool.release(last)
                self._entries[self.end - 1] = own
                copies.append((last, own))
        end = -(-(length + tokens) // self.page_size)
        if end > len(self._entries):
            self._entries = np.resize(self._entries, 2 * end)
        while self.end < end:
            self._entries[self.end] = self.pool.take()
            self.end += 1
        return copies

    def cut(self, length: int) -> None:
        """Give back the pages all of whose keys are at `length` or after; of a table without keys nothing is left to hold."""
        end = -(-length // self.page_size)
        for page in self._entries[max(end, self.first) : self.end].tolist():
            self.pool.release(page)
        self.end = min(self.end, end)
        self.first = min(self.first, self.end)

    def fork(self) -> Table:
        """A table that holds the same pages."""
        other = Table(self.pool, self.page_size)
        other.first, other.end, other._entries = self.first, self.end, self._entries.copy()
        for page in self.held().tolist():
            self.pool.share(page)
        return other


class Sequence:
    """Length and pages of a sequence: those of all keys, and those of the last keys alone.

    Args:
        pool, recent_pool: pages of all keys, and of the last ones.
        page_size: keys of a page, in both.
        reach: keys before the next one, itself included, that it may need of the last ones.
    """

    def __init__(self, pool: Pages, recent_pool: Pages, page_size: int, reach: int) -> None:
        self.length, self.reach = 0, reach
        self.all, self.recent = Table(pool, page_size), Table(recent_pool, page_size)

    def needed_from(self, length: int) -> int:
        """The first of the last keys that a sequence of `length` keys still needs."""
        return max(0, length + 1 - self.reach)

    def shortest(self) -> int:
        """To how few keys the sequence can be cut, but for none at all: the last keys before them are still held."""
        first = self.recent.first * self.recent.page_size
        return first + self.reach - 1 if first else 0

    def begin(self, tokens: int) -> None:
        """Give back pages that rows from the next on do not see; rows of no tokens may still be cut off."""
        if tokens:
            self.recent.forget(self.needed_from(self.length))

    def cut(self, length: int) -> None:
        """Drop the keys from `length` on."""
        self.length = length
        self.all.cut(length)
        self.recent.cut(length)

    def fork(self) -> Sequence:
        """Another sequence with the same keys, in the same pages."""
        other = Sequence(self.all.pool, self.recent.pool, self.all.page_size, self.reach)
        other.length, other.all, other.recent = self.length, self.all.fork(), self.recent.fork()
        return other
