"""Texts that begin alike share pages: sequences of an NSACache are kept as they were after a prefill, or after a completion.

`NSACache.truncate` goes back to what a sequence was before its last step, or to any length after it. So a fork that is kept at the end
of each chunk of a prompt serves all beginnings of that prompt, wherever another text departs from it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from nsa_sel import NSACache


class Kept(NamedTuple):
    """A fork, and how many bytes it had read before its last step: the least that it can be cut to."""

    least: int
    sequence: int


class Prefixes:
    """Forks of sequences by the texts that they have read.

    Args:
        cache: of the sequences.
        page_size: of the cache. Shorter beginnings are not shared.
        most: forks that are kept; 0 for none.

    Attributes:
        kept: the least recently used first.
        hits, saved: texts that began as a kept one, and their bytes that were not prefilled.
    """

    def __init__(self, cache: NSACache, page_size: int, most: int) -> None:
        self.cache, self.page_size, self.most = cache, page_size, most
        self.kept: dict[bytes, Kept] = {}
        self.hits = self.saved = 0

    def keep(self, text: bytes, tokens: int, sequence: int) -> None:
        """Keep a fork of a sequence that has read a text, the last `tokens` bytes of it in its last step."""
        if text in self.kept:
            self.kept[text] = self.kept.pop(text)
        elif self.most and len(text) >= self.page_size:
            self.kept[text] = Kept(len(text) - tokens, self.cache.fork(sequence))
            if len(self.kept) > self.most:
                self.give_back()

    def open(self, text: bytes) -> int:
        """A new sequence that has read as much of a text as is kept, but for its last byte, after which a byte is sampled."""
        length, known = max(((self._shared(text[:-1], known), known) for known in self.kept), default=(0, b""))
        if length < self.page_size:
            return self.cache.open()
        self.kept[known] = self.kept.pop(known)
        sequence = self.cache.fork(self.kept[known].sequence)
        self.cache.truncate(sequence, length)
        return sequence

    def count(self, saved: int) -> None:
        """Count a sequence of `open` that runs, and has read so many bytes."""
        self.hits += saved > 0
        self.saved += saved

    def give_back(self) -> bool:
        """Free the least recently used fork; False where none is left. Pages that others hold, too, stay theirs."""
        if not self.kept:
            return False
        self.cache.free(self.kept.pop(next(iter(self.kept))).sequence)
        return True

    def make_room(self, pages: int, others: list[int]) -> bool:
        """Free as many forks as it takes for so many free pages, the least recently used first. False where all of them are not enough:
        none is freed then. others: the sequences that are no forks."""
        held = [*others, *(kept.sequence for kept in self.kept.values())]
        if pages > self.cache.free_pages + self.cache.held_pages(held) - self.cache.held_pages(others):
            return False
        while pages > self.cache.free_pages and self.give_back():
            pass
        return True

    def clear(self) -> None:
        """Free all of them."""
        while self.give_back():
            pass

    def _shared(self, text: bytes, known: bytes) -> int:
        """How many bytes both texts begin with; 0 where the fork cannot be cut to so few."""
        least = self.kept[known].least
        if not text.startswith(known[:least]):
            return 0
        return least + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text[least:], known[least:], strict=False)))
