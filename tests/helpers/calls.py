"""Small public calls on a CPU and their decisions, wrong calls and their messages, and counted events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nsa_sel import Decision, decisions, selection_attention, use_backend
from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.telemetry import events
from tests.helpers.cases import assert_forward, make_qkv, make_spans

PINNED = """
provenance: "the order of the tests, whatever the CPU profile says"
runtime:
  sel_triton_min_L: 4096
  prefer_forward: [sdpa-packed, numba, triton-group, triton-token]
  prefer_backward: [sdpa-packed, numba, triton-group, triton-token]
"""


def last() -> Decision:
    return decisions()[-1]


def check(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, **options: Any) -> None:
    """o and lse of the public call against the oracle."""
    assert_forward(selection_attention(q, k, v, ranges, return_lse=True, **options), q, k, v, ranges, **options)


def problem(**options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = make_qkv(2, 12, 2, 3, 16, 24, S_kv=40, **options)
    return q, k, v, make_spans("mixed", 2, 12, 2, 40, L=18)


def call_forced(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    if source == "NSA_SEL_BACKEND":
        monkeypatch.setenv(source, name)
        selection_attention(*problem())
    elif source == "use_backend":
        with use_backend(name):
            selection_attention(*problem())
    else:
        selection_attention(*problem(), backend=name)


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


def assert_refused(*cases: tuple[str, Callable[[], object]], error: type[Exception] = ArgumentError) -> None:
    """Check that every attempt raises the error, with a message that the regular expression before it matches."""
    for words, attempt in cases:
        with pytest.raises(error, match=words):
            attempt()


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[Any, ...]]:
    """Collect the positional arguments of every call of the function `name` of a module or class from here on."""
    calls, function = list[tuple[Any, ...]](), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **options: (calls.append(given), function(*given, **options))[1])
    return calls


def call(**changes: Any) -> Callable[[], object]:
    """`selection_attention` of good arguments with some replaced; a function is given the good argument."""

    def attempt() -> object:
        q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv)
        arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "selection": torch.tensor([[0, 5], [7, 9]]).expand(B, S, G, 2, 2)}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return selection_attention(**arguments)

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


@contextlib.contextmanager
def counted() -> Iterator[dict[tuple[str, ...], int]]:
    """Yield the increments of the counters inside the `with` block, filled when it ends."""
    grown: dict[tuple[str, ...], int] = {}
    before = events.tallies()
    yield grown
    grown.update({name: n - before.get(name, 0) for name, n in events.tallies().items() if n > before.get(name, 0)})
