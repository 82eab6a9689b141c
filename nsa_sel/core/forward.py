"""Forward by one backend, which gets a plain call where it reads neither lengths nor a block table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from nsa_sel.core import registry
from nsa_sel.core.call import Call, over_the_pool


def forward(name: str, call: Call) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] and lse [B,S,G,h] by the backend `name`, which gets a plain call where it reads no caches."""
    backend = registry.load(name)
    if _as_it_is(name, call):
        return backend.forward(call)
    return _plain_forward(call, backend.forward)


def loaded_keys(name: str, call: Call) -> Any:
    """The backend's `loaded_keys`, or None if it has none, or gets another call than this one."""
    return getattr(registry.load(name), "loaded_keys", None) if _as_it_is(name, call) else None


def _as_it_is(name: str, call: Call) -> bool:
    return call.lengths is None or registry.backends()[name].reads_caches


def _plain_forward(call: Call, forward: Callable[[Call], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """o and lse of a call with lengths, by a `forward` that does not read them."""
    B, S = call.q.shape[:2]
    if call.block_table is None:
        # One operation for one new token each: the forward pass takes only a few microseconds.
        positions = call.lengths.unsqueeze(1) - 1 if S == 1 and call.lengths is not None else call.positions().clamp_(min=-1)
        return forward(replace(call, q_pos=positions, lengths=None))
    o, lse = forward(over_the_pool(call, call.block_table))
    return o.view(B, S, *o.shape[2:]), lse.view(B, S, *lse.shape[2:])
