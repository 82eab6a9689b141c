"""How much neighbors share, where `Selection.measure()` was not called: counted on the device at the first call of its kind.

Only where it changes which backend is picked. The host waits for the device once; later calls of that kind use the count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable

import msgspec
import torch
from torch import Tensor

from nsa_sel.core import memory
from nsa_sel.core.call import capturing, positions
from nsa_sel.core.decide import select
from nsa_sel.core.decision import Decision
from nsa_sel.core.memory import Count
from nsa_sel.core.ranges import sample_rows, sampled_sharing
from nsa_sel.core.request import FEW_TOKENS, SHARING_TOKENS, DeviceInfo, Request
from nsa_sel.selection import Selection
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry import events

APART = tuple(map(float, SHARING_TOKENS))  # no two tokens select the same block
ALIKE = (1.0,) * len(SHARING_TOKENS)  # all tokens select the same blocks
_ERROR = 2  # of torch.cuda.get_sync_debug_mode(): the user forbids to wait for the device


def with_count(
    request: Request, device: DeviceInfo, backend: str | None, q: Tensor, selection: Selection, q_pos: Tensor | None,
    lengths: Tensor | None = None, counts: bool = True,
) -> tuple[Request, Count | None]:  # fmt: skip
    """Return the request of a checked call with the sharing of its kind, counted now if it is the first.

    Ranks of a distributed job do not count, because their decisions must be equal; `context_parallel_attention` broadcasts a count.

    Args:
        request, device, backend: what the decision depends on.
        q, selection, q_pos, lengths: of the call.
        counts: whether this call may count; another one only uses what is known.

    Returns:
        The request, and the count that its sharing comes from. None where sharing was measured, may not be counted, or decides nothing.
    """
    if request.sharing is not None or not countable(request) or tuned.distributed():
        return request, None
    often = settings_for(device).count_sharing
    if often == "off":
        return request, None
    kind = kind_of(request, device)
    count = memory.count_of(kind)
    if counts and (count is None or not count.use()):
        if not _matters(request, device, backend):
            return request, None
        if not may_wait(q):
            count = count or Count(None, 0)  # of which no call is left: the next one asks again
        else:
            count = Count(count_rows(request, q, selection, q_pos, lengths), math.inf if often == "first" else often - 1)
            memory.keep_count(kind, count)
    if count is None or count.sharing is None:
        return request, count
    return msgspec.structs.replace(request, sharing=count.sharing, counted=True), count


def kind_of(request: Request, device: DeviceInfo) -> Hashable:
    """What calls that share a count have in common: blocks of a row, and lengths rounded up to powers of two.

    Not sequences, groups, heads, dtype or gradients: a forward pass that is computed again, in parts or not, has the first one's count.
    """
    S, S_kv = (1 << (length - 1).bit_length() for length in (request.S, request.S_kv))
    return S, S_kv, request.n, request.block_size, device


def decides(request: Request, decide: Callable[[Request], Decision]) -> bool:
    """Whether sharing changes which backend `decide` picks, in either direction: it is asked for both extremes."""
    apart, alike = (decide(msgspec.structs.replace(request, sharing=sharing)) for sharing in (APART, ALIKE))
    return (apart.forward, apart.backward) != (alike.forward, alike.backward)


def countable(request: Request) -> bool:
    """Whether rows have neighbors and blocks to share; a decoding step has too few tokens for it to matter."""
    sizes = request.B * request.G * request.S_kv * request.n
    return request.S > FEW_TOKENS and request.block_size is not None and request.kind == "attend" and sizes > 0


def _matters(request: Request, device: DeviceInfo, backend: str | None) -> bool:
    """`decides`, remembered: a call that is not repeated asks each time."""
    facts = ("decided by sharing", request.request_class(), device, backend)
    found: bool | None = memory.recall(facts)
    if found is None:
        found = decides(request, lambda asked: select(asked, device, backend))
        memory.remember(facts, found)
    return found


def may_wait(q: Tensor) -> bool:
    """Return whether the host may wait for the device: not in a CUDA graph's capture, nor if PyTorch's sync debug mode forbids it."""
    return not q.is_cuda or not (capturing(q) or torch.cuda.get_sync_debug_mode() == _ERROR)


def count_rows(request: Request, q: Tensor, selection: Selection, q_pos: Tensor | None, lengths: Tensor | None) -> tuple[float, ...]:
    """The sharing of a sample of the call's rows. Reads the device."""
    started = time.perf_counter()
    rows = sample_rows(request.B, request.S, request.G, request.n, q.device)
    limit = (positions(q, request.S_kv, q_pos, lengths)[rows.b, rows.s] + 1).clamp(max=request.S_kv)
    assert request.block_size is not None, "see countable"
    sharing = sampled_sharing(selection.ranges[rows.b, rows.s, rows.g], limit, request.block_size)
    ms = (time.perf_counter() - started) * 1e3  # of the host, waiting for the device included
    events.emit("sel.sharing", request=request, sharing=sharing, rows=rows.s.numel(), ms=ms)
    return sharing
