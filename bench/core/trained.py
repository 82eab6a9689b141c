"""The blocks that a model trained with NSA chose over one long text, from bench/data (questions/save_selections.py
writes the files).

A file trained_CONTEXT.npz holds, for each layer, one bit per group, block and row: 1 where the row and the row before
it differ in choosing the block. Neighboring rows choose nearly the same blocks, so the bits compress well. Its text
`provenance` is JSON with the sizes and the origin. Only a checkout has these files.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.selection import Selection

FOLDER = Path(__file__).resolve().parents[1] / "data"
GROUPS = 4  # of a case that names no layers: maps of one (layer, group) each
LOADED = 12  # layers that are kept in memory: 2 MB each for 32k rows, 2 groups and 16 blocks
CAPTURE = "train a model at this context, then run nsa_sel.bench.questions.save_selections (bench/data/README.md)"


def spread(total: int, count: int) -> list[int]:
    """Return `count` of the numbers 0 to total - 1, evenly spread."""
    return [total * (2 * i + 1) // (2 * count) for i in range(count)]


def indices(bits: np.ndarray, S: int, n: int) -> np.ndarray:
    """Decode the bits [G,blocks,ceil(S/8)] of a layer.

    Returns:
        Block indices [S,G,n] int16, ascending in each row, -1 last.
    """
    G, count, _ = bits.shape
    chosen = np.bitwise_xor.accumulate(np.unpackbits(bits, axis=-1, count=S), axis=-1)
    line, row = np.divmod(np.flatnonzero(chosen.view(bool)), S)  # a line for each group and block
    group, block = np.divmod(line, count)
    number = row * G + group
    order = np.argsort(number, kind="stable")  # blocks stay ascending
    each = np.bincount(number, minlength=S * G)
    column = np.arange(len(number)) - np.repeat(each.cumsum() - each, each)  # within its row
    fits = column < n  # always, unless the bits are damaged
    found = np.full((S * G, n), -1, "<i2")
    found[number[order][fits], column[fits]] = block[order][fits]
    return found.reshape(S, G, n)


def file_of(context: int) -> Path:
    """Return the path of the selections of a model with this context. It may not exist."""
    return FOLDER / f"trained_{context}.npz"


def contexts() -> list[int]:
    """Return the contexts with a file, ascending."""
    found = (file.stem.removeprefix("trained_") for file in FOLDER.glob("trained_*.npz"))
    return sorted(int(context) for context in found if context.isdecimal())


def provenance(context: int) -> dict[str, Any]:
    """Return the sizes and the origin of a file. Raises NsaSelError if it is missing or damaged."""
    return dict(json.loads(str(_array(context, "provenance"))))


def trained_selection(S: int, device: torch.device | str, layers: Sequence[int] = ()) -> Selection:
    """Return what a trained model's rows chose: the first S rows of the shortest file that has as many.

    Blocks are chosen causally, so the first S rows are what the model selects in a text of S tokens.

    Args:
        S: number of rows and keys.
        device: of the selection.
        layers: the layers whose groups are concatenated; by default `GROUPS` of all (layer, group) maps, evenly spread.

    Returns:
        A Selection of whole blocks [1,S,G,n,2].

    Raises:
        ArgumentError: a layer that the file lacks.
        NsaSelError: no file has as many rows, or it is damaged.
    """
    long_enough = [context for context in contexts() if context >= S]
    if not long_enough:
        raise NsaSelError(f"bench/data has no selections of a trained model over {S} tokens. Remedy: {CAPTURE}.")
    facts = provenance(long_enough[0])
    kept, G = facts["layers"], facts["groups"]
    if not set(layers) <= set(kept):
        raise ArgumentError("layers", list(layers), f"some of {kept}, those of {file_of(long_enough[0]).name}", "pass some of these")
    maps = [divmod(i, G) for i in spread(len(kept) * G, GROUPS)]
    chosen = [(layer, group) for layer in layers for group in range(G)] or [(kept[i], group) for i, group in maps]
    blocks = torch.stack([_blocks(FOLDER, long_enough[0], layer)[:S, group] for layer, group in chosen], 1)
    return Selection.from_blocks(blocks[None].to(device), facts["block_size"], disjoint=True)


@lru_cache(LOADED)
def _blocks(folder: Path, context: int, layer: int) -> Tensor:
    """Return the blocks of a layer, [S,G,n] int16."""
    facts = provenance(context)
    return torch.from_numpy(indices(_array(context, name_of(layer)), facts["context"], facts["n"]))


def _array(context: int, name: str) -> np.ndarray:
    file = file_of(context)
    try:
        with file.open("rb") as opened, np.load(opened) as arrays:
            found: np.ndarray = arrays[name]
            return found
    except FileNotFoundError as error:
        raise NsaSelError(f"bench/data has no {file.name}. Remedy: {CAPTURE}.") from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise NsaSelError(f"{file.name} is damaged: {name} can't be read: {error}. Remedy: git restore bench/data/{file.name}.") from error


def name_of(layer: int) -> str:
    """Return the name of a layer's array."""
    return f"layer{layer:02}"
