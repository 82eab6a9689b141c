"""What was found for the last calls, so that one which is alike in all that checks and decision look at needs neither again.

Refusals are not kept: they are found, and said, anew.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nsa_sel.core.call import seen
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.settings import tuned
from nsa_sel.settings.flags import environment

Found = tuple[float, Request, Decision]  # a call's softmax scale, exact request and decision
SIZE = 4096  # calls
_found: dict[Any, Found] = {}
_decoded, _forgotten = [0], [0]  # keys of the last decode call; how often all was forgotten


def recall(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, facts: tuple[Any, ...],
    scale: float | None, needs_grad: bool, backend: str | None, forced: str | None,
) -> tuple[Any, Found | None]:  # fmt: skip
    """A key of all that the checks and the decision look at in a call without q_pos, and what was found for one of this key before.

    facts: what they look at in a selection besides its ranges. backend, forced: the names that the argument and `use_backend` give.
    The key is None where none can be made or it would hardly come again, and the call has to be checked.
    """
    if not (scale is None or (type(scale) is float and scale)):  # True equals 1.0, and -0.0 equals 0.0
        return None, None
    try:
        if (q.dim() == 4 or q.shape[1] == 1) and k.shape[2] != _decoded[0]:  # a cache that grows is of another length at each step
            _decoded[0] = k.shape[2]
            return None, None
        key = (seen(q, k, v, ranges), facts, scale, needs_grad, backend, forced, environment(), _era())
        return key, _found.get(key)
    except (RuntimeError, TypeError, IndexError):  # no strides, no memory, or nothing that a dict takes: the checks have words for it
        return None, None


def remember(key: Any, found: Found) -> None:
    """Keep what was found for a call, for the next one of the same key; unless what it was decided by has changed meanwhile."""
    if key is not None and key[-1] == _era():
        if len(_found) >= SIZE:
            _found.clear()
        _found[key] = found


def forget() -> None:
    """Keep nothing of what was found before now, nor of what is being decided."""
    _forgotten[0] += 1
    _found.clear()


def _era() -> tuple[Any, int]:
    """What decisions of one time have in common: the tuned launches that were read, and how often all was forgotten."""
    return tuned.token(), _forgotten[0]
