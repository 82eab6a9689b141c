"""Pages of a pool: free pages, and the number of sequences that hold each page. Host bookkeeping; touches no tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nsa_sel.errors import CacheFull


class Pages:
    """Reference counts of `number` pages. A page without holders is free.

    Args:
        name: the pool's name, for errors.
        number: number of pages.
    """

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self._free = list(range(number - 1, -1, -1))  # `take` pops the last one
        self._holders = [0] * number
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
        self._holders[page] = 1
        if self._journal is not None:
            self._journal.append((page, True))
        return page

    def share(self, page: int) -> None:
        """Add a holder."""
        self._holders[page] += 1

    def is_shared(self, page: int) -> bool:
        return self._holders[page] > 1

    def release(self, page: int) -> None:
        """Remove a holder. A page without holders becomes free."""
        self._holders[page] -= 1
        if not self._holders[page]:
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
                    self._holders[page] = 0
                    self._free.append(page)
                else:
                    if not self._holders[page]:
                        self._free.pop()
                    self._holders[page] += 1
            raise
        finally:
            self._journal = None
