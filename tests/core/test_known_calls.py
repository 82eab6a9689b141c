"""What was found for a call is taken for another one only where checking and deciding anew would find the same, refusals included."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, attention, use_backend
from nsa_sel.core import known, ops, registry
from nsa_sel.errors import NsaSelError

B, S, S_KV, G, H, D, BLOCK, N = 2, 8, 64, 2, 2, 16, 16, 2
PLAIN: dict[str, Any] = {"block_size": BLOCK, "max_length": None, "scale": None, "backend": None, "needs_grad": False}


def ranges(rows: int = S, n: int = N, keys: int = BLOCK) -> Tensor:
    """The first n blocks of `keys` keys in every row, [B,S,G,n,2]."""
    start = torch.arange(n, dtype=torch.int32) * keys
    return torch.stack((start, start + keys), -1).expand(B, rows, G, n, 2).contiguous()


def shifted(x: Tensor) -> Tensor:
    """x, contiguous, at an address that is no multiple of 16 bytes."""
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)


def tensors(rows: int = S, keys: int = S_KV, Dv: int = D) -> dict[str, Any]:
    return {"q": torch.ones(B, rows, G, H, D), "k": torch.ones(B, G, keys, D), "v": torch.ones(B, G, keys, Dv), "ranges": ranges(rows)}


ONES = tensors()
q, k, v = ONES["q"], ONES["k"], ONES["v"]
WIDE = torch.ones(B, G, S_KV, D + 1)  # its rows are no multiples of 16 bytes

# Each differs from the first, or from another, in one fact alone.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rows": tensors(rows=4),
    "keys": tensors(keys=48),
    "fewer keys than rows": tensors(keys=4),
    "Dv": tensors(Dv=32),
    "fewer heads": {"q": q[:, :, :, :1]},
    "k cut": {"k": k[:, :, :48]},
    "v cut": {"v": v[:, :, :48]},
    "one row": {"q": q[:, :1].contiguous(), "ranges": ranges(1)},
    "decode": {"q": q[:, 0].contiguous(), "ranges": ranges(1)},
    "half": {"q": q.half(), "k": k.half(), "v": v.half()},
    "q of half": {"q": q.half()},
    "k of half": {"k": k.half()},
    "v of half": {"v": v.half()},
    "q shifted": {"q": shifted(q)},
    "k shifted": {"k": shifted(k)},
    "v shifted": {"v": shifted(v)},
    "wide k": {"k": WIDE[..., :D]},
    "wide v": {"v": WIDE[..., :D]},
    "wide q": {"q": torch.ones(B, S, G, H, D + 1)[..., :D]},
    "q transposed": {"q": q.transpose(3, 4).contiguous().transpose(3, 4)},
    "k transposed": {"k": k.transpose(2, 3).contiguous().transpose(2, 3)},
    "v transposed": {"v": v.transpose(2, 3).contiguous().transpose(2, 3)},
    "q elsewhere": {"q": q.to("meta")},
    "k elsewhere": {"k": k.to("meta")},
    "v elsewhere": {"v": v.to("meta")},
    "ranges elsewhere": {"ranges": ranges().to("meta")},
    "ranges of other rows": {"ranges": ranges(4)},
    "ranges of floats": {"ranges": ranges().float()},
    "ranges of one query": {"q": q[:, :1].contiguous(), "ranges": ranges(1)[:, 0]},
    "n": {"ranges": ranges(n=1)},
    "block": {"block_size": 2 * BLOCK, "ranges": ranges(keys=2 * BLOCK)},
    "half a block": {"block_size": BLOCK // 2},
    "no block": {"block_size": None},
    "block of 0": {"block_size": 0},
    "bounded": {"max_length": 20},
    "scale of 1": {"scale": 1.0},
    "scale of 2": {"scale": 2.0},
    "scale of True": {"scale": True},
    "scale of 1, whole": {"scale": 1},
    "scale of 0": {"scale": 0.0},
    "scale of -0": {"scale": -0.0},
    "infinite scale": {"scale": math.inf},
    "no scale": {"scale": "x"},
    "gradients": {"needs_grad": True},
    "numba": {"backend": "numba"},
    "unknown backend": {"backend": "numbat"},
    "no backend": {"backend": []},
    "no tensor": {"k": 3},
    "positions": {"q_pos": torch.arange(S)},
    "positions past the keys": {"q_pos": torch.arange(S) + S_KV},
    "in use_backend": {"around": "sdpa-packed"},
    "flag": {"flag": "sdpa-packed"},
}
OF_SELECTIONS = {"measured": {"measured": True}, "measured, alike": {"measured": True, "ranges": ranges() * 0}}


def eager(given: dict[str, Any], x: tuple[Tensor, Tensor, Tensor]) -> Any:
    selection = Selection(given["ranges"], given["block_size"], given["max_length"])
    if "measured" in given:
        selection.measure()
    return attention.begin(*x, selection, given["scale"], given.get("q_pos"), given["backend"])


def op(given: dict[str, Any], x: tuple[Tensor, Tensor, Tensor]) -> Any:
    block_size, max_length, *others = (given[name] for name in ("block_size", "max_length", "scale", "backend", "needs_grad"))
    return ops._begin(*x, given["ranges"], given.get("q_pos"), block_size, max_length, True, *others)


def found(begin: Callable[..., Any], name: str) -> Any:
    """Everything that a call is given by checking and deciding, or the words that refuse it."""
    given = ONES | PLAIN | (CALLS | OF_SELECTIONS)[name]
    x = tuple(t.detach().requires_grad_(given["needs_grad"]) if isinstance(t, Tensor) else t for t in (given["q"], given["k"], given["v"]))
    with pytest.MonkeyPatch.context() as patch:
        if "flag" in given:
            patch.setenv("NSA_SEL_BACKEND", given["flag"])
        try:
            if "around" in given:
                with use_backend(given["around"]):
                    call, decision, request = begin(given, x)
            else:
                call, decision, request = begin(given, x)
        except NsaSelError as error:
            return str(error)
    selection = call.selection
    facts = (repr(call.scale), call.q.shape, selection.ranges.shape, selection.n, selection.block_size, selection.max_length)
    return facts, call.settings, call.device, decision, request


# An op's schema lets nothing but tensors through.
@pytest.mark.parametrize(
    ("begin", "names"), [(eager, (*CALLS, *OF_SELECTIONS)), (op, tuple(name for name in CALLS if name != "no tensor"))], ids=["eager", "op"]
)
def test_one_call_never_answers_for_another(begin: Callable[..., Any], names: tuple[str, ...]) -> None:
    wanted = {}
    for name in names:
        attention.forget_decisions()
        wanted[name] = found(begin, name)
    assert len({repr(value) for value in wanted.values()}) > len(names) * 0.6, "calls that are all alike show nothing"
    for first, second in itertools.product(names, repeat=2):
        known._found.clear()
        found(begin, first)
        assert found(begin, second) == wanted[second], (first, second)


@pytest.mark.parametrize("begin", [eager, op])
@pytest.mark.parametrize("name", ["plain", "decode", "scale of 2", "gradients", "wide k", "numba", "in use_backend"])
def test_a_call_alike_is_not_checked_again(begin: Callable[..., Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = found(begin, name)
    assert found(begin, name) == first  # a decode call is remembered when it comes again
    for module in (attention, ops):
        monkeypatch.setattr(module, "check_call", None)
    assert found(begin, name) == first


def test_an_op_checks_what_eager_calls_were_trusted_with() -> None:
    """A Selection can be made past its checks; an op has to make its own."""
    assert not isinstance(found(eager, "ranges of floats"), str)
    assert "ranges is of dtype torch.float32" in found(op, "ranges of floats")


def test_what_measure_found_counts_until_the_ranges_are_written() -> None:
    selection = Selection(ranges(), None)
    fresh = attention.begin(q, k, v, selection, None, None, None)[2].max_length
    selection.measure()
    measured = attention.begin(q, k, v, selection, None, None, None)[2].max_length
    selection.ranges.zero_()
    written = attention.begin(q, k, v, selection, None, None, None)[2].max_length
    assert (fresh, measured, written) == (S_KV, N * BLOCK, S_KV)


def test_what_is_forgotten_is_found_anew() -> None:
    name = attention.begin(q, k, v, Selection(ranges(), BLOCK), None, None, None)[1].forward
    request = attention.begin(q, k, v, Selection(ranges(), BLOCK), None, None, None)[2]
    registry.mark_broken(str(name), request, RuntimeError("out of order"))
    attention.forget_decisions()
    assert attention.begin(q, k, v, Selection(ranges(), BLOCK), None, None, None)[1].forward != name


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "SIZE", 3)
    for rows in range(1, 9):
        attention.begin(torch.ones(B, rows, G, H, D), k, v, Selection(ranges(rows), BLOCK), None, None, None)
        assert len(known._found) <= 3


def test_a_cache_that_grows_is_not_remembered() -> None:
    for keys in range(16, 64):
        attention.begin(q[:, 0], k[:, :, :keys], v[:, :, :keys], Selection(ranges(1), BLOCK), None, None, None)
    assert not known._found


@pytest.mark.parametrize("change", ["forgotten", "tuned"])
def test_what_changes_while_a_call_is_decided_is_not_passed_over(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Another thread may find a backend broken, or a tuned file may be read, between the look and the decision."""
    prepare = attention.prepare

    def slow(*arguments: Any, **more: Any) -> Any:
        decided = prepare(*arguments, **more)
        if change == "forgotten":
            attention.forget_decisions()
        else:
            monkeypatch.setattr(known.tuned, "token", lambda: ("another file", 1))
        return decided

    monkeypatch.setattr(attention, "prepare", slow)
    attention.begin(q, k, v, Selection(ranges(), BLOCK), None, None, None)
    assert not known._found
