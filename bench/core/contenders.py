"""What a bench compares: our backends and others', each made ready for a problem and then called as a whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

import nsa_sel
from nsa_sel.bench.core.baselines import DenseKernel, dense_causal_sdpa
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.parity import Attend, Problem
from nsa_sel.core.registry import backends as registered
from nsa_sel.core.registry import fallback
from nsa_sel.errors import ArgumentError, closest
from nsa_sel.selection import Selection

DENSE = "dense-cudnn"  # full causal attention by cuDNN: no backend of ours
PACKED = fallback()  # what all others are compared with
PREFILL_ONLY = tuple(name for name, backend in registered().items() if not backend.decodes)
SLOW = tuple(name for name, backend in registered().items() if backend.slow)


class Ready(NamedTuple):
    """A contender prepared for one problem.

    `call` is the whole forward, plans included. `trained` is the forward for timing the backward alone: `forget` drops its plans before
    each call, so that building them is timed. `layout` gives k and v [B,G,S_kv,D] the strides that it wants.
    """

    call: Attend
    trained: Attend
    forget: Callable[[], None] = lambda: None
    layout: Callable[[Tensor], Tensor] = lambda x: x


def as_it_is(call: Attend) -> Ready:
    """A function that plans nothing in a call."""
    return Ready(call, call)


class Contender(NamedTuple):
    """One column of a comparison.

    `prepare` is not timed. `lacks` says in one line why it can't run on a device ("cpu", "cuda"), `refuses` why not on a case; None: it
    does. `every_key`: it computes dense causal attention.
    """

    name: str
    prepare: Callable[[Problem], Ready]
    lacks: Callable[[str], str | None] = lambda device: None
    refuses: Callable[[Case], str | None] = lambda case: None
    every_key: bool = False
    checked: bool = True  # against the oracle
    peer: bool = False  # another project's, or torch's: a wrong result is a row too
    # What a timed call gets: "new", a selection that nothing was made of; "kept", what was made of it before; None: it has none.
    selection: str | None = "new"
    finds_gradients: bool = False  # whether it has a backward pass is not known before it is called
    forward_only: tuple[str, ...] = ()  # devices on which it has no backward pass
    directions: tuple[str, ...] = ("fwd", "bwd", "fwd+bwd", "decode")


def ours(backend: str) -> Contender:
    """A backend of the registry, with plans built anew in every call; of an unknown name each call fails."""
    entry = registered().get(backend)

    def prepare(problem: Problem) -> Ready:
        old = problem.selection
        planned = Selection(old.ranges, old.block_size, old.max_length, disjoint=True)

        def attend(q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> Tensor:
            o: Tensor = nsa_sel.selection_attention(q, k, v, selection, backend=backend)
            return o

        return Ready(
            call=lambda q, k, v: attend(q, k, v, Selection(old.ranges, old.block_size, old.max_length, disjoint=True)),
            trained=lambda q, k, v: attend(q, k, v, planned),
            forget=planned.forget_plans,
        )

    def lacks(device: str) -> str | None:
        return None if entry is None or device in entry.limits.dtypes else f"needs a {'GPU' if device == 'cpu' else 'CPU'}"

    def refuses(case: Case) -> str | None:
        if entry and case.S == 1 and not entry.decodes:
            return "decodes nothing: it shares loads between rows"
        if entry and not entry.limits.takes_block(case.block):
            return f"takes no blocks of {case.block} keys"
        return "takes whole blocks alone" if entry and entry.limits.block_aligned_only and not case.block else None

    return Contender(backend, prepare, lacks, refuses)


def dense(name: str = DENSE, kernel: DenseKernel = "cudnn", device: str = "cuda", peer: bool = False) -> Contender:
    """Full causal attention by one of torch's kernels: what a user has without selection. As a peer it is checked against the oracle."""

    def lacks(here: str) -> str | None:
        return None if here == device else f"needs a {'GPU' if device == 'cuda' else 'CPU: a GPU has kernels to choose from'}"

    def refuses(case: Case) -> str | None:
        masked = peer and device == "cuda" and case.S not in (1, case.S_kv)
        return "rows that begin behind the first key need a mask, not this kernel" if masked else None

    call = partial(dense_causal_sdpa, kernel=kernel)
    return Contender(name, lambda problem: as_it_is(call), lacks, refuses, every_key=True, checked=peer, peer=peer, selection=None)


def backends_on(device: str) -> list[str]:
    """The backends that run on a device ("cpu", "cuda"), in the order of the registry."""
    return [name for name, backend in registered().items() if device in backend.limits.dtypes]


def of_framework(framework: str) -> list[str]:
    """The backends made with a framework ("triton", "cupy", ...)."""
    return [name for name, backend in registered().items() if backend.framework == framework]


def named(backends: str) -> list[Contender]:
    """Contenders by comma-separated names. Raises ArgumentError for a name that no backend has."""
    for name in backends.split(","):
        if name not in (*registered(), DENSE):
            close = closest(name, (*registered(), DENSE))
            value = f"{name!r} (did you mean {close}?)" if close else repr(name)
            raise ArgumentError("--backends", value, f"{', '.join(registered())}, {DENSE}, comma-separated", "pass some of these")
    return [dense() if name == DENSE else ours(name) for name in backends.split(",")]
