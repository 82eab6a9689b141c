"""Checks of single arguments, which every public function makes."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError, shown

_MEANING = {
    "n": "the number of blocks that a row selects",
    "block_size": "the number of keys in a block",
    "compress_block": "the number of keys that a compressed key covers",
    "compress_stride": "the number of keys from one compressed key to the next",
    "window": "the number of keys that a row attends to",
    "max_length": "the most keys that a row selects, or leave it out",
}
_MOST = (1 << 31) - 1  # keys of a block, or of a row


def check_tensors(**tensors: object) -> None:
    """ArgumentError for the first argument that is not a dense tensor."""
    for name, value in tensors.items():
        as_tensor(name, value)


def as_tensor(argument: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ArgumentError(argument, f"a {type(value).__name__}", "a torch.Tensor", "wrap it in torch.as_tensor")
    check_dense(argument, value)
    return value


def check_dense(argument: str, value: Tensor) -> None:
    """ArgumentError for a nested or sparse tensor, which may not even have a shape."""
    if value.is_nested or value.layout is not torch.strided:
        kind, remedy = f"of layout {value.layout}", f"call {argument}.to_dense()"
        if value.is_nested:
            kind, remedy = "a nested tensor", "pass its values() and offsets() to selection_attention_varlen"
        raise ArgumentError(argument, kind, "a dense (strided) tensor", remedy)


def check_flag(name: str, value: object) -> None:
    """ArgumentError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(name, shown(value), "True or False", "pass a bool")


def is_whole(value: object) -> bool:
    """Whether a value is an int, or a symbol of one, which sizes are where torch.export traces dynamic shapes; not a bool."""
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def check_positive(argument: str, value: object, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        meaning = _MEANING.get(argument, "such a size")
        raise ArgumentError(argument, shown(value), "a whole number >= 1 and < 2^31, as an int", f"pass {meaning}")
