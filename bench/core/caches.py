"""How the keys of a measured call lie in memory: as a plain call passes them, or as a KV cache. A row names it after its backend:

cupy-cuda                                        a plain call, which knows no lengths
cupy-cuda, in one piece, keys first              a contiguous cache
cupy-cuda, pages of 64, groups first, e4m3/head  pages of 64 keys, the keys of a group together, in e4m3 with a scale for each head
"""

from __future__ import annotations

from typing import NamedTuple, cast, get_args

from nsa_sel.core.request import Quantized

IN_ONE_PIECE, PAGES = "in one piece", "pages of "
KEYS_FIRST, GROUPS_FIRST = "keys first", "groups first"  # [.., key, group, D], or [.., group, key, D]
LAYOUTS = (KEYS_FIRST, GROUPS_FIRST)


class Cache(NamedTuple):
    """A KV cache: keys of a page, None for one in one piece; the order of its numbers; their format, None for q's dtype."""

    page_size: int | None
    layout: str = KEYS_FIRST
    quantized: Quantized | None = None

    def __str__(self) -> str:
        where = IN_ONE_PIECE if self.page_size is None else f"{PAGES}{self.page_size}"
        return ", ".join((where, self.layout, *([self.quantized] if self.quantized else ())))


def named(backend: str, cache: Cache | None) -> str:
    """What a row calls a backend over a cache."""
    return backend if cache is None else f"{backend}, {cache}"


def parsed(name: str) -> tuple[str, Cache | None]:
    """The backend and the cache that `named` has put together; all of it and None where it names none."""
    backend, *words = name.split(", ")
    if not 2 <= len(words) <= 3 or words[1] not in LAYOUTS or not (words[0] == IN_ONE_PIECE or words[0].startswith(PAGES)):
        return name, None
    page_size = None if words[0] == IN_ONE_PIECE else int(words[0].removeprefix(PAGES))
    quantized = cast(Quantized, words[2]) if len(words) > 2 else None
    assert quantized is None or quantized in get_args(Quantized), name
    return backend, Cache(page_size, words[1], quantized)
