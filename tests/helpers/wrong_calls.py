"""Calls with something wrong, and what the message of the error must hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import nsa_sel
from nsa_sel.errors import ArgumentError, NsaSelError
from tests.helpers.cases import make_qkv

B, S, G, h, Dk, Dv, S_kv = 2, 4, 3, 2, 16, 8, 24


class Wrong(NamedTuple):
    """Something wrong, fragments that the error's message must hold in this order, and the error's class."""

    name: str
    attempt: Callable[[], object]
    fragments: tuple[str, ...] = ()
    error: type[NsaSelError] = ArgumentError


Changed = tuple[dict[str, Any], tuple[str, ...]]  # what is changed of good arguments, and fragments of the message


def each_of(cases: Sequence[Changed]) -> pytest.MarkDecorator:
    """A test of every case, as `changes` and `fragments`."""
    return pytest.mark.parametrize(("changes", "fragments"), cases, ids=[f"{next(iter(x))} {i}" for i, (x, _) in enumerate(cases)])


def refused(function: Callable[..., object], arguments: dict[str, Any], changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    """ArgumentError for good arguments with changes: values, or functions of the good argument."""
    changed = {name: change(arguments[name]) if callable(change) else change for name, change in changes.items()}
    assert_in_order(message_of(Wrong("", lambda: function(**arguments | changed))), fragments)


def call(**changes: Any) -> Callable[[], object]:
    """`selection_attention` of good arguments with some replaced; a function is given the good argument."""

    def attempt() -> object:
        q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv)
        arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "selection": torch.tensor([[0, 5], [7, 9]]).expand(B, S, G, 2, 2)}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return nsa_sel.selection_attention(**arguments)

    return attempt


def message_of(wrong: Wrong) -> str:
    with pytest.raises(wrong.error) as caught:
        wrong.attempt()
    return str(caught.value)


def assert_in_order(message: str, fragments: tuple[str, ...]) -> None:
    at = 0
    for fragment in fragments:
        assert fragment in message[at:], f"{fragment!r} is missing in {message!r} from character {at}"
        at = message.index(fragment, at) + len(fragment)
