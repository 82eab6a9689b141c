"""Peers that a user gives, `nsa-sel bench --peer NAME=module:function`: any project's kernel behind an adapter of a few lines.

The function gets (q, k, v, block_indices, block_size, scale) in nsa-sel's layout and returns o; docs/performance.md has an adapter. It is
imported here, before anything is measured, and then treated as every other peer.
"""

from __future__ import annotations

import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import DENSE, Contender, Ready, as_it_is
from nsa_sel.bench.core.parity import Problem, WrongAnswer
from nsa_sel.bench.core.store import first_line
from nsa_sel.core.registry import backends
from nsa_sel.errors import ArgumentError

FLAG = "--peer"
FORM = re.compile(r"([\w.-]+)=([\w.]+:[\w.]+)")
ALLOWED = "NAME=module:function, such as mine=my_peer:attend"


def given(values: Sequence[str], others: Iterable[Contender]) -> tuple[Contender, ...]:
    """A contender for each value of `--peer`.

    Args:
        values: "NAME=module:function" each. Modules are looked for where Python does, and then in the current folder.
        others: contenders whose names are taken.

    Raises:
        ArgumentError: for a value of another form, a name that is taken, and a function that cannot be imported.
    """
    if values and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where an adapter lies; `nsa-sel` itself does not look there
    taken, found = {*backends(), DENSE, *(other.name for other in others)}, list[Contender]()
    for value in values:
        match = FORM.fullmatch(value)
        if match is None:
            raise ArgumentError(FLAG, repr(value), ALLOWED, "name the peer, its module and its function")
        name, path = match.groups()
        if name in taken:
            raise ArgumentError(FLAG, repr(value), f"a name other than {', '.join(sorted(taken))}", "give the peer another name")
        taken.add(name)
        found.append(_contender(name, value, _imported(value, path)))
    return tuple(found)


def _imported(value: str, path: str) -> Callable[..., Any]:
    try:
        function = pkgutil.resolve_name(path)
    except Exception as error:  # a module's import may raise anything
        remedy = "install the module, or run in the folder that it is in"
        raise ArgumentError(FLAG, f"{value!r} ({first_line(error)})", "a function that can be imported", remedy) from error
    if not callable(function):
        raise ArgumentError(FLAG, f"{value!r}, a {type(function).__name__}", "a function", "name a function of that module")
    return function  # type: ignore[no-any-return]


def _contender(name: str, value: str, function: Callable[..., Any]) -> Contender:
    def prepare(problem: Problem) -> Ready:
        selection, shape = problem.selection, (*problem.q.shape[:-1], problem.v.shape[-1])
        indices, scale = selection.block_indices.long().contiguous(), problem.q.shape[-1] ** -0.5

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = function(q, k, v, indices, selection.block_size, scale)
            if not isinstance(o, Tensor) or o.shape != shape or o.dtype != q.dtype:
                allowed = f"a function that returns o [B,S,G,h,Dv], here {list(shape)}, in q's dtype {q.dtype}"
                raise WrongAnswer(FLAG, f"{value!r}, which returned {_described(o)}", allowed, "reshape or convert what it returns")
            return o

        return as_it_is(call)

    return Contender(name, prepare, refuses=_refuses, peer=True, finds_gradients=True)


def _refuses(case: Case) -> str | None:
    return None if case.block else "takes whole blocks alone"


def _described(o: object) -> str:
    return f"{list(o.shape)} {o.dtype}" if isinstance(o, Tensor) else f"a {type(o).__name__}"
