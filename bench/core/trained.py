"""What a trained model chose: the blocks of several layers over one long text, as questions/save_selections.py saved them in bench/data/.

A file trained_CONTEXT.npz holds, for each of its layers, one bit for every group, block and row: whether the row chose the block and the
row before it did not, or the other way round. Neighboring rows choose much the same blocks, so that these bits compress well. Its text
`provenance`, JSON, has the sizes and where they come from. Only a checkout has these files.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
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
    """`count` of the numbers 0 to total - 1, evenly spread."""
    return [total * (2 * i + 1) // (2 * count) for i in range(count)]


# Writing


def flips(blocks: np.ndarray, count: int) -> np.ndarray:
    """Where rows differ from the row before: indices [S,G,n] below `count`, -1 for padding, to bits [G,count,ceil(S/8)] uint8."""
    S, G, _ = blocks.shape
    chosen = np.zeros((S, G, count + 1), bool)
    np.put_along_axis(chosen, blocks.astype(np.int64) % (count + 1), True, 2)  # -1 becomes an extra last column, dropped again
    by_block = chosen[..., :count].transpose(1, 2, 0)
    before = np.pad(by_block[..., :-1], ((0, 0), (0, 0), (1, 0)))
    return np.packbits(by_block ^ before, axis=-1)


def contents(by_layer: Mapping[int, Tensor], block_size: int, facts: Mapping[str, Any]) -> bytes:
    """The bytes of a file.

    Args:
        by_layer: of each layer the chosen blocks [S,G,n], ascending, -1 last where a row has fewer than n.
        block_size: keys of a block.
        facts: where they come from, for the provenance.

    Raises:
        ArgumentError: indices that would not come back as they are.
    """
    (S, G, n), *others = {tuple(blocks.shape) for blocks in by_layer.values()}
    count = -(-S // block_size)
    sizes = {"context": S, "groups": G, "n": n, "block_size": block_size, "blocks": count, "layers": list(by_layer)}
    arrays: dict[str, Any] = {}
    for layer, tensor in by_layer.items():
        blocks = tensor.numpy().astype("<i2")
        arrays[_name(layer)] = flips(blocks, count)
        if others or not np.array_equal(indices(arrays[_name(layer)], S, n), blocks):
            allowed = f"[S,G,n] of one shape, ascending indices of {count} blocks, then -1"
            raise ArgumentError(f"the blocks of layer {layer}", f"others, of shape {tuple(tensor.shape)}", allowed, "sort each row")
    provenance = json.dumps({**facts, **sizes}, sort_keys=True)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays, provenance=np.array(provenance))
    return file.getvalue()


def fitting(by_layer: Mapping[int, Tensor], block_size: int, facts: Mapping[str, Any], most: int) -> bytes:
    """`contents` of as many layers, evenly spread, as at most `most` bytes hold. Raises ArgumentError for fewer than a case needs."""
    layers = list(by_layer)
    least = -(-GROUPS // by_layer[layers[0]].shape[1])
    size = 0
    for count in range(len(layers), least - 1, -1):
        made = contents({layers[i]: by_layer[layers[i]] for i in spread(len(layers), count)}, block_size, facts)
        size = len(made)
        if size <= most:
            return made
    value = f"{most} bytes for {len(layers)} layers"
    raise ArgumentError(
        "--most-bytes", value, f"at least {size} bytes, for {least} layers", "allow more bytes, or train a model of more layers"
    )


# Reading


def indices(bits: np.ndarray, S: int, n: int) -> np.ndarray:
    """The indices [S,G,n] int16 that `flips` was given, ascending in each row, -1 last."""
    G, count, _ = bits.shape
    chosen = np.bitwise_xor.accumulate(np.unpackbits(bits, axis=-1, count=S), axis=-1)
    line, row = np.divmod(np.flatnonzero(chosen.view(bool)), S)  # a line for each group and block
    group, block = np.divmod(line, count)
    number = row * G + group
    order = np.argsort(number, kind="stable")  # blocks stay ascending
    each = np.bincount(number, minlength=S * G)
    place = np.arange(len(number)) - np.repeat(each.cumsum() - each, each)  # within its row
    fits = place < n  # all do, unless the bits are damaged
    found = np.full((S * G, n), -1, "<i2")
    found[number[order][fits], place[fits]] = block[order][fits]
    return found.reshape(S, G, n)


def file_of(context: int) -> Path:
    """Where the selections of a model with this context are, if they are there."""
    return FOLDER / f"trained_{context}.npz"


def contexts() -> list[int]:
    """The contexts that there are files of, ascending."""
    found = (file.stem.removeprefix("trained_") for file in FOLDER.glob("trained_*.npz"))
    return sorted(int(context) for context in found if context.isdecimal())


def provenance(context: int) -> dict[str, Any]:
    """What a file says of itself. Raises NsaSelError where it is missing or damaged."""
    return dict(json.loads(str(_array(context, "provenance"))))


def trained_selection(S: int, device: torch.device | str, layers: Sequence[int] = ()) -> Selection:
    """What a trained model's rows chose: the first S rows of the shortest file that has as many.

    Blocks are chosen causally, so that the first S rows are what the model selects in a text of S tokens.

    Args:
        S: rows, and keys.
        device: of the selection.
        layers: those whose groups stand side by side, in this order; by default `GROUPS` of all (layer, group) maps, evenly spread.

    Returns:
        A Selection of whole blocks [1,S,G,n,2], G the groups of all these layers together, or `GROUPS`.

    Raises:
        ArgumentError: a layer that the file lacks.
        NsaSelError: no file has as many rows, or it is damaged.
    """
    long_enough = [context for context in contexts() if context >= S]
    if not long_enough:
        raise NsaSelError(f"bench/data has no selections of a trained model over {S} tokens. Remedy: {CAPTURE}.")
    facts = provenance(long_enough[0])
    file, kept, G = file_of(long_enough[0]), facts["layers"], facts["groups"]
    if not set(layers) <= set(kept):
        raise ArgumentError("layers", list(layers), f"some of {kept}, the layers in {file.name}", "pass some of these")
    maps = [divmod(i, G) for i in spread(len(kept) * G, GROUPS)]
    chosen = [(layer, group) for layer in layers for group in range(G)] or [(kept[i], group) for i, group in maps]
    blocks = torch.stack([_blocks(file, layer)[:S, group] for layer, group in chosen], 1)
    return Selection.from_blocks(blocks[None].to(device), facts["block_size"], disjoint=True)


@lru_cache(LOADED)
def _blocks(file: Path, layer: int) -> Tensor:
    """Return the blocks of a layer, [S,G,n] int16."""
    context = int(file.stem.removeprefix("trained_"))
    facts = provenance(context)
    return torch.from_numpy(indices(_array(context, _name(layer)), facts["context"], facts["n"]))


def _array(context: int, name: str) -> np.ndarray:
    """An array of a file."""
    file = file_of(context)
    try:
        with file.open("rb") as opened, np.load(opened) as arrays:
            found: np.ndarray = arrays[name]
            return found
    except FileNotFoundError as error:
        raise NsaSelError(f"bench/data has no {file.name}. Remedy: {CAPTURE}.") from error
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise NsaSelError(f"{file.name} is damaged: {name} can't be read: {error}. Remedy: git restore bench/data/{file.name}.") from error


def _name(layer: int) -> str:
    return f"layer{layer:02}"
