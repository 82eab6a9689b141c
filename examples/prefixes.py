"""A prefix cache: texts with the same prefix share pages of an NSACache.

Forks of sequences are kept after each prefill chunk and after a completion. `NSACache.truncate` cuts a fork to any length between those
before and after its last step, so forks at the end of each chunk of a prompt serve all prefixes of that prompt.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from nsa_sel import NSACache


class Kept(NamedTuple):
    """A fork, and its length before its last step, the smallest length that it can be truncated to."""

    least: int
    sequence: int


class Prefixes:
    """Forks of sequences, by text.

    Args:
        cache: the cache of the sequences.
        page_size: of the cache. Shorter prefixes are not shared.
        most: maximum number of forks; 0 for none.

    Attributes:
        kept: forks by text, the least recently used first.
        hits, saved: number of texts with a kept prefix, and the bytes that were not prefilled.
    """

    def __init__(self, cache: NSACache, page_size: int, most: int) -> None:
        self.cache, self.page_size, self.most = cache, page_size, most
        self.kept: dict[bytes, Kept] = {}
        self.hits = self.saved = 0

    def keep(self, text: bytes, tokens: int, sequence: int) -> None:
        """Keep a fork of the sequence of `text`, whose last step read `tokens` bytes."""
        if text in self.kept:
            self.kept[text] = self.kept.pop(text)
        elif self.most and len(text) >= self.page_size:
            self.kept[text] = Kept(len(text) - tokens, self.cache.fork(sequence))
            if len(self.kept) > self.most:
                self.release_oldest()

    def open(self, text: bytes) -> int:
        """Open a sequence with the longest kept prefix of a text, except its last byte, whose logits are needed."""
        length, prefix = max(((self._shared(text[:-1], kept), kept) for kept in self.kept), default=(0, b""))
        if length < self.page_size:
            return self.cache.open()
        self.kept[prefix] = self.kept.pop(prefix)
        sequence = self.cache.fork(self.kept[prefix].sequence)
        self.cache.truncate(sequence, length)
        return sequence

    def count(self, saved: int) -> None:
        """Count a started sequence that shared `saved` bytes."""
        self.hits += saved > 0
        self.saved += saved

    def release_oldest(self) -> bool:
        """Free the least recently used fork. Return False if there is none. Pages that other sequences share stay allocated."""
        if not self.kept:
            return False
        self.cache.free(self.kept.pop(next(iter(self.kept))).sequence)
        return True

    def make_room(self, pages: int, others: list[int]) -> bool:
        """Free forks, least recently used first, until `pages` pages are free. Return False, and free none, if all are not enough.

        others: the open sequences that are not forks of this cache.
        """
        held = [*others, *(kept.sequence for kept in self.kept.values())]
        if pages > self.cache.free_pages + self.cache.held_pages(held) - self.cache.held_pages(others):
            return False
        while pages > self.cache.free_pages and self.release_oldest():
            pass
        return True

    def clear(self) -> None:
        """Free all forks."""
        while self.release_oldest():
            pass

    def _shared(self, text: bytes, kept: bytes) -> int:
        """Return the length of the common prefix of a text and a kept one, or 0 if the fork cannot be truncated to it."""
        least = self.kept[kept].least
        if not text.startswith(kept[:least]):
            return 0
        return least + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text[least:], kept[least:], strict=False)))
