"""Cached sequences and the pages that hold their keys: free pages, the number of holders of each, page tables, lengths.

Host bookkeeping; touches no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from nsa_sel.errors import CacheFull

Copies = list[tuple[int, int]]  # (source, destination) of pages to copy


class Pages:
    """Reference counts of `number` pages. A page without holders is free.

    Args:
        name: the pool's name, for errors.
        number: number of pages.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self._free = list(range(number - 1, -1, -1))  # `take` pops the last one
        self.holders = [0] * number
        self._journal: list[tuple[int, bool]] | None = None  # pages taken (True) and released (False) inside `all_or_nothing`

    @property
    def free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def take(self) -> int:
        """Take a free page, with one holder. Raises CacheFull if none is left."""
        if not self._free:
            raise CacheFull(self.name, self.number)
        page = self._free.pop()
        self.holders[page] = 1
        if self._journal is not None:
            self._journal.append((page, True))
        return page

    def share(self, page: int) -> None:
        """Add a holder."""
        self.holders[page] += 1

    def release(self, page: int) -> None:
        """Remove a holder. A page without holders becomes free."""
        self.holders[page] -= 1
        if not self.holders[page]:
            self._free.append(page)
        if self._journal is not None:
            self._journal.append((page, False))

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo all `take` and `release` calls inside the `with` block, in reverse order, if it raises."""
        self._journal = []
        try:
            yield
        except BaseException:
            for page, taken in reversed(self._journal):
                if taken:
                    self.holders[page] = 0
                    self._free.append(page)
                else:
                    if not self.holders[page]:
                        self._free.pop()
                    self.holders[page] += 1
            raise
        finally:
            self._journal = None


class PageTable:
    """The pages of one sequence in one pool. Entry i is the page of keys [i * page_size, (i + 1) * page_size).

    The sequence holds the entries from `first` up to `end`.
    """

    def __init__(self, pool: Pages, page_size: int) -> None:
        self.pool, self.page_size = pool, page_size
        self.first = self.end = 0
        self._entries: npt.NDArray[np.int32] = np.zeros(8, np.int32)

    def held(self) -> npt.NDArray[np.int32]:
        """Return the held pages in order."""
        return self._entries[self.first : self.end]

    def snapshot(self) -> tuple[int, int, int]:
        """Return first, end, and the page of entry end - 1, for `restore`."""
        return self.first, self.end, int(self._entries[max(0, self.end - 1)])

    def restore(self, first: int, end: int, last: int) -> None:
        """Undo `release_before` and `grow`. The pool undoes its own changes."""
        self.first, self.end = first, end
        self._entries[max(0, end - 1)] = last

    def release_before(self, position: int) -> None:
        """Release the pages whose keys are all before `position`."""
        until = min(max(position, 0) // self.page_size, self.end)
        for page in self._entries[self.first : until].tolist():
            self.pool.release(page)
        self.first = max(self.first, until)

    def grow(self, length: int, tokens: int) -> Copies:
        """Take pages for `tokens` more keys after `length`. Return the copies to make: a shared page is copied before
        it is written."""
        copies: Copies = []
        if tokens and length % self.page_size:
            last = int(self._entries[self.end - 1])
            if self.pool.holders[last] > 1:
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

    def truncate(self, length: int) -> None:
        """Release the pages whose keys are all at `length` or after."""
        end = -(-length // self.page_size)
        for page in self._entries[max(end, self.first) : self.end].tolist():
            self.pool.release(page)
        self.end = min(self.end, end)
        self.first = min(self.first, self.end)

    def fork(self) -> PageTable:
        """Return a table that holds the same pages."""
        other = PageTable(self.pool, self.page_size)
        other.first, other.end, other._entries = self.first, self.end, self._entries.copy()
        for page in self.held().tolist():
            self.pool.share(page)
        return other


class CachedSequence:
    """The length and pages of a sequence: the pages of all keys, and separate pages of the most recent keys.

    Args:
        pool, recent_pool: pages of all keys, and of the recent keys.
        page_size: keys per page, in both pools.
        last_keys: number of recent keys that the next key may need, including itself.
    """

    def __init__(self, pool: Pages, recent_pool: Pages, page_size: int, last_keys: int) -> None:
        self.length, self.last_keys = 0, last_keys
        self.all, self.recent = PageTable(pool, page_size), PageTable(recent_pool, page_size)

    def min_length(self) -> int:
        """Return the smallest nonzero length that this sequence can be truncated to: the recent keys before it are
        still held."""
        first = self.recent.first * self.recent.page_size
        return first + self.last_keys - 1 if first else 0

    def release_unneeded(self, tokens: int) -> None:
        """Release recent pages that the next rows do not need. Without new tokens nothing is released: rows may still
        be truncated."""
        if tokens:
            self.recent.release_before(self.length + 1 - self.last_keys)

    def truncate(self, length: int) -> None:
        """Drop the keys from `length` on."""
        self.length = length
        self.all.truncate(length)
        self.recent.truncate(length)

    def fork(self) -> CachedSequence:
        """Return a sequence with the same keys in the same pages."""
        other = CachedSequence(self.all.pool, self.recent.pool, self.all.page_size, self.last_keys)
        other.length, other.all, other.recent = self.length, self.all.fork(), self.recent.fork()
        return other
