"""Decide which backend runs a request: overrides, the policy, the one cache of decisions, and the count of how much
rows share.

Where `Selection.measure()` was not called, and sharing between adjacent rows changes which backend is picked, it is
counted on the device at the first call of a class: the host waits for the device once, and later calls of that class
use the count.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.compiler import is_compiling

from nsa_sel.core import registry
from nsa_sel.core.backend import Offer
from nsa_sel.core.call import Call, device_info, positions, request_of
from nsa_sel.core.decision import Decision, Override, every_name, load_policy, make_decision, missed, refusal, unknown_backend
from nsa_sel.core.ranges import sample_rows, sampled_sharing
from nsa_sel.core.request import FEW_TOKENS, SHARING_TOKENS, DeviceInfo, Kind, Request
from nsa_sel.core.transforms import capturing
from nsa_sel.errors import ArgumentError, BackendError, ConfigError, closest, first_time, shown, warn
from nsa_sel.quantize import Scales
from nsa_sel.selection import Selection
from nsa_sel.settings import flags, tuned
from nsa_sel.settings.config import forget_settings, settings_for, warn_if_assumed
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry import events

WORTH_TELLING = 1.1  # how many times as long a call takes without a package, from which on the process is warned


class Count:
    """A sharing count of a class of calls, to the digits of `Request.sharing`, and how many more calls may use it."""

    __slots__ = ("left", "sharing")

    def __init__(self, sharing: tuple[float, ...] | None, left: float) -> None:
        self.sharing = sharing  # None: not counted yet, as in a CUDA graph's capture
        self.left = left

    def use(self) -> bool:
        """Use the count for one call. Return False if it has expired, and in a distributed job, whose ranks must decide
        equally."""
        self.left -= 1
        return self.left >= 0 and not tuned.distributed()


# An entry of `_memory` holds for one state: environment flags, loaded tuning results, and the backend that
# `use_backend` forces.
# Counts are facts of the data and hold in any state.
forced_name: ContextVar[str | None] = ContextVar("nsa_sel_backend", default=None)  # by `use_backend`
_memory: dict[Any, Any] = {}
_counts: dict[Any, Count] = {}
_MOST = 8192  # entries


def _state() -> tuple[Any, ...]:
    """Return what a cached entry depends on besides its facts. Every call comes here: `environment` is called only if a
    flag is set, or if the number of environment variables has changed."""
    unset = flags.variables is not None and len(flags.variables) == flags.checked and flags.variables.keys().isdisjoint(flags.encoded)
    raw = flags.UNSET if unset else flags.environment()
    return raw, tuned.generation, tuned.any_table and tuned.distributed(), forced_name.get()


def recall(facts: Hashable) -> Any:
    """Return the value that `remember` stored for these facts in the current state, or None; None if facts is None or
    not hashable."""
    try:
        return None if facts is None else _memory.get((facts, _state()))
    except TypeError:  # an argument that is not hashable, which the checks refuse
        return None


def remember(facts: Hashable, value: Any) -> None:
    """Store a value for facts that are not None, in the current state."""
    if len(_memory) >= _MOST:
        _memory.clear()
    _memory[facts, _state()] = value


def forget_decisions() -> None:
    """Drop cached decisions and settings, after configuration files, tuned kernel configs or the list of broken
    backends have changed."""
    _memory.clear()
    forget_settings()


def forget_counts() -> None:
    """Drop and expire all sharing counts."""
    for count in _counts.values():
        count.left = 0
    _counts.clear()


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend for the calls of this thread or task inside the `with` block.

    The argument `backend=` of a call has precedence.

    Args:
        name: a backend's name (`nsa-sel doctor` lists them).

    Raises:
        ArgumentError: `name` is not a str.
        BackendError: the backend is unknown; inside torch.compile; and at the call, if the backend refuses it.
    """
    if is_compiling():
        raise BackendError(
            "use_backend is not supported inside torch.compile; allowed: the argument backend= of selection_attention."
            " Remedy: pass backend=, or set NSA_SEL_BACKEND."
        )
    if name is None:
        raise ArgumentError("name", None, "the name of a backend", "leave out the `with` to let the policy decide")
    _check_name("name", name)
    if registry.kind_of(name) is None:
        raise BackendError(unknown_backend(name, "use_backend", "nsa-sel", every_name()))
    with forcing(name):
        yield


@contextlib.contextmanager
def forcing(name: str | None) -> Iterator[None]:
    """Force a backend as `use_backend` does, unchecked; None ignores a surrounding `use_backend`."""
    token = forced_name.set(name)
    try:
        yield
    finally:
        forced_name.reset(token)


def explain_request(
    request: Request, device: DeviceInfo | None = None, backend: str | None = None, *, all_installed: bool = False
) -> Decision:
    """Return the decision for a request, without tensors.

    Args:
        request: the sizes, dtype and flags of a call.
        device: any GPU's facts; by default this machine's first GPU, else its CPU.
        backend: a name to force.
        all_installed: decide as if no backend lacked a package or library here, for a GPU of another machine.

    Returns:
        The decision; `forward` is None when every backend refuses.
    """
    if device is None:
        device = device_info(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    if all_installed:
        return _new_decision(request.request_class(), device, backend, all_installed=True)
    return select(request, device, backend)


def select(request: Request, device: DeviceInfo, backend: str | None = None) -> Decision:
    """Return the cached or new decision for the request's class under the current flags; `forward` is None when all
    refuse."""
    facts = (request.request_class(), device, backend)
    decision: Decision | None = recall(facts)
    if decision is None:
        decision = _new_decision(facts[0], device, backend)
        remember(facts, decision)
        package = missed(decision) if device.kind == "cuda" else None
        if package is not None and (package.factor or 1) >= WORTH_TELLING and first_time("missed", device, package.reason.field):
            warn(f"{device.name}: {package.words}")
    return decision


def _new_decision(request: Request, device: DeviceInfo, backend: str | None, all_installed: bool = False) -> Decision:
    """Return what the default policy decides for a class of requests under the current flags."""
    if backend is not None:
        _check_name("backend", backend)
    settings = tuned.apply(settings_for(device), request, device)
    offers = registry.offers(request)
    if all_installed:
        offers = tuple(Offer(offer.backend) for offer in offers)
    _check_config_names(settings)
    override = _override(backend, settings, request.kind)
    return make_decision(request, device, load_policy("default"), settings, offers, override)


def decide(request: Request, device: DeviceInfo, backend: str | None = None) -> Decision:
    """`select`; BackendError with every reason when no backend may run the request."""
    decision = select(request, device, backend)
    message = refusal(decision)
    if message is not None:
        events.count("unserved")
        raise BackendError(message, decision)
    warn_if_assumed(decision)
    return decision


class Decided(NamedTuple):
    """A checked call, its decision, and its exact request."""

    call: Any  # a Call, a ChooseCall, or a SlidingCall, which has no decision and no request
    decision: Decision
    request: Request
    sharing: Count | None = None  # the count that the decision depends on


def decide_call(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, scale: float, q_pos: Tensor | None, needs_grad: bool, backend: str | None,
    lengths: Tensor | None = None, block_table: Tensor | None = None, scales: Scales | None = None, counts: bool = True,
    table_rows: Tensor | None = None, most_rows: int = 1, out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Decided:  # fmt: skip
    """Decide on arguments that `check_call` returned, and those of `Call`. counts: False if this call may not count
    sharing."""
    request, device = request_of(q, k, v, selection, needs_grad, block_table, scales), device_info(q.device)
    if table_rows is not None:  # a batch of another number of rows is no new class
        request = msgspec.structs.replace(request, B=1 << max(0, request.B - 1).bit_length())
    request, count = with_count(request, device, backend, q, selection, q_pos, lengths, counts)
    decision = decide(request, device, backend)
    call = Call(
        q, k, v, selection, q_pos, scale, decision.settings, decision.device, lengths, block_table, scales=scales, table_rows=table_rows,
        most_rows=most_rows, out=out,
    )  # fmt: skip
    return Decided(call, decision, request, count)


def after_failure(decision: Decision, failed: str) -> Decision:
    """Return the decision after backend `failed` broke during a call: the fallback, or BackendError if that refuses as
    well."""
    override = Override(registry.fallback(decision.request.kind), f"failure of {failed}")
    policy, offers = load_policy(decision.policy), registry.offers(decision.request)
    again = make_decision(decision.request, decision.device, policy, decision.settings, offers, override)
    message = refusal(again)
    if message is not None:
        raise BackendError(f"{failed} failed, and the fallback refuses. {message}", again)
    return again


def _check_name(argument: str, name: object) -> None:
    if not isinstance(name, str):
        raise ArgumentError(argument, shown(name), "the name of a backend, as a str", "`nsa-sel doctor` lists the names")


def _check_config_names(settings: Settings) -> None:
    """Raise ConfigError for a backend's name in the user's configuration file that is not installed.

    A missing backend of a committed profile is no error, but a step of the decision. Costs may be of both kinds,
    whatever is decided.
    """
    attending, every = list(registry.backends()), every_name()
    costs = [name.rpartition("/")[0] for name in settings.costs.models] if settings.costs else []
    written = {
        "prefer_forward": (settings.prefer_forward, attending),
        "prefer_backward": (settings.prefer_backward, attending),
        "prefer_tiles": (settings.prefer_tiles, attending),
        "costs": (costs, every),
    }
    own = [field for field in written if settings.sources.get(field, "") == settings.config_file]
    unknown = [(field, name) for field in own for name in written[field][0] if name not in written[field][1]]
    if unknown:
        field, name = unknown[0]
        names = written[field][1]
        close = closest(name, names)
        meant = f" (did you mean {close}?)" if close else ""
        raise ConfigError(
            f"{settings.config_file}: {field}",
            name,
            ", ".join(names),
            f"correct the name{meant}, or install the package that brings this backend",
        )


def _override(backend: str | None, settings: Settings, kind: Kind) -> Override | None:
    """Return the override by precedence: argument, use_backend, NSA_FORCE_PARITY, NSA_SEL_BACKEND.

    Except for the argument, a backend of another kind forces nothing: a layer has calls of both kinds.
    """
    if backend is not None:
        return Override(backend, "argument")
    surrounding = forced_name.get()
    if surrounding is not None and registry.kind_of(surrounding) in (kind, None):
        return Override(surrounding, "use_backend")
    if settings.force_parity:
        return Override(registry.fallback(kind), "NSA_FORCE_PARITY")
    if settings.backend is not None and registry.kind_of(settings.backend) in (kind, None):
        return Override(settings.backend, "NSA_SEL_BACKEND")
    return None


NONE_SHARED = tuple(map(float, SHARING_TOKENS))  # no two tokens select the same block
ALL_SHARED = (1.0,) * len(SHARING_TOKENS)  # all tokens select the same blocks
_ERROR = 2  # of torch.cuda.get_sync_debug_mode(): the user forbids to wait for the device


def with_count(
    request: Request, device: DeviceInfo, backend: str | None, q: Tensor, selection: Selection, q_pos: Tensor | None,
    lengths: Tensor | None = None, counts: bool = True,
) -> tuple[Request, Count | None]:  # fmt: skip
    """Return the request of a checked call with the sharing of its kind, counted now if it is the first.

    Ranks of a distributed job do not count, because their decisions must be equal; `context_parallel_attention`
    broadcasts a count.

    Args:
        request, device, backend: what the decision depends on.
        q, selection, q_pos, lengths: of the call.
        counts: whether this call may count; another one only uses an earlier count.

    Returns:
        The request, and the count that its sharing comes from. None where sharing was measured, may not be counted, or
        decides nothing.
    """
    if request.sharing is not None or not countable(request) or tuned.distributed():
        return request, None
    often = settings_for(device).count_sharing
    if often == "off":
        return request, None
    kind = kind_of(request, device)
    count = _counts.get(kind)
    if counts and (count is None or not count.use()):
        facts = ("decided by sharing", request.request_class(), device, backend)
        matters = recall(facts)
        if matters is None:  # remembered, because a call that is not repeated asks each time
            matters = decides(request, lambda asked: select(asked, device, backend))
            remember(facts, matters)
        if not matters:
            return request, None
        if not may_wait(q):
            count = count or Count(None, 0)  # of which no call is left: the next one asks again
        else:
            if count is not None:
                count.left = 0  # expired, so that cached calls recount
            if len(_counts) >= _MOST:
                _counts.clear()
            count = _counts[kind] = Count(count_rows(request, q, selection, q_pos, lengths), math.inf if often == "first" else often - 1)
    if count is None or count.sharing is None:
        return request, count
    return msgspec.structs.replace(request, sharing=count.sharing, counted=True), count


def kind_of(request: Request, device: DeviceInfo) -> Hashable:
    """Return the class of calls that share a count: blocks of a row, and lengths rounded up to powers of two.

    Not sequences, groups, heads, dtype or gradients: a forward pass that is computed again, in parts or not, has the
    first one's count.
    """
    S, S_kv = (1 << (length - 1).bit_length() for length in (request.S, request.S_kv))
    return S, S_kv, request.n, request.block_size, device


def decides(request: Request, decide: Callable[[Request], Decision]) -> bool:
    """Return True if sharing changes which backend `decide` picks, in either direction: it is asked for both extremes."""
    unshared, shared = (decide(msgspec.structs.replace(request, sharing=sharing)) for sharing in (NONE_SHARED, ALL_SHARED))
    return (unshared.forward, unshared.backward) != (shared.forward, shared.backward)


def countable(request: Request) -> bool:
    """Return True if rows have neighbors and blocks to share; a decoding step has too few tokens for it to matter."""
    sizes = request.B * request.G * request.S_kv * request.n
    return request.S > FEW_TOKENS and request.block_size is not None and request.kind == "attend" and sizes > 0


def may_wait(q: Tensor) -> bool:
    """Return True if the host may wait for the device: not in a CUDA graph's capture, nor if PyTorch's sync debug mode
    forbids it."""
    return not q.is_cuda or not (capturing(q) or torch.cuda.get_sync_debug_mode() == _ERROR)


def count_rows(request: Request, q: Tensor, selection: Selection, q_pos: Tensor | None, lengths: Tensor | None) -> tuple[float, ...]:
    """Return the sharing of a sample of the call's rows. Reads the device."""
    started = time.perf_counter()
    b, s, g = sample_rows(request.B, request.S, selection.groups, request.n, q.device)
    limit = (positions(q, request.S_kv, q_pos, lengths)[b, s] + 1).clamp(max=request.S_kv)
    assert request.block_size is not None, "see countable"
    sharing = sampled_sharing(selection.ranges[b, s, g], limit, request.block_size)
    ms = (time.perf_counter() - started) * 1e3  # of the host, waiting for the device included
    events.emit("sel.sharing", request=request, sharing=sharing, rows=s.numel(), ms=ms)
    return sharing
