"""From a request to its decision: overrides, the policy, the memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.compiler import is_compiling

from nsa_sel.core import memory, registry
from nsa_sel.core.decision import Decision, Override, load_policy, make_decision
from nsa_sel.core.explain import check_names, every_name, missed, refusal, unknown_backend
from nsa_sel.core.facts import device_info
from nsa_sel.core.memory import forced_name
from nsa_sel.core.request import DeviceInfo, Kind, Request
from nsa_sel.errors import ArgumentError, BackendError, shown, warn
from nsa_sel.settings import devices, tuned
from nsa_sel.settings.config import forget_settings, settings_for
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry import events

WORTH_TELLING = 1.1  # how many times as long a call takes without a package, from which on the process is warned


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
    token = forced_name.set(name)
    try:
        yield
    finally:
        forced_name.reset(token)


@contextlib.contextmanager
def use_no_backend() -> Iterator[None]:
    """Ignore any surrounding `use_backend` inside the `with` block."""
    token = forced_name.set(None)
    try:
        yield
    finally:
        forced_name.reset(token)


def forced() -> str | None:
    """The name that `use_backend` forces on this thread or task."""
    return forced_name.get()


def explain_request(request: Request, device: DeviceInfo | None = None, backend: str | None = None) -> Decision:
    """The decision for a request, without tensors.

    Args:
        request: the sizes, dtype and flags of a call.
        device: any GPU's facts; by default this machine's first GPU, else its CPU.
        backend: a name to force.

    Returns:
        The decision, cached or new; `forward` is None when every backend refuses.
    """
    if device is None:
        device = device_info(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    return select(request, device, backend)


def select(request: Request, device: DeviceInfo, backend: str | None = None) -> Decision:
    """The cached or new decision for the request's class under the current flags; `forward` is None when all refuse."""
    if backend is not None:
        _check_name("backend", backend)
    facts = (request.request_class(), device, backend)
    decision: Decision | None = memory.recall(facts)
    if decision is None:
        settings = tuned.apply(settings_for(device), facts[0], device)
        offers = registry.offers(request)
        check_names(settings)
        override = _override(backend, settings, request.kind)
        decision = make_decision(facts[0], device, load_policy("default"), settings, offers, override)
        memory.remember(facts, decision)
        _warn_if_missed(decision)
    return decision


def decide(request: Request, device: DeviceInfo, backend: str | None = None) -> Decision:
    """`select`; BackendError with every reason when no backend may run the request."""
    decision = select(request, device, backend)
    message = refusal(decision)
    if message is not None:
        events.count("unserved")
        raise BackendError(message, decision)
    devices.warn_if_assumed(decision)
    return decision


_told: set[tuple[DeviceInfo, str]] = set()  # devices and packages


def _warn_if_missed(decision: Decision) -> None:
    """Warn, once per process, device and package, that calls on a GPU are slower because a package is not installed."""
    found = missed(decision) if decision.device.kind == "cuda" else None
    if found is None or (found.factor or 1) < WORTH_TELLING or (decision.device, found.reason.field) in _told:
        return
    _told.add((decision.device, found.reason.field))
    warn(f"{decision.device.name}: {found.words}")


def after_failure(decision: Decision, failed: str) -> Decision:
    """The decision after backend `failed` broke during a call: the fallback, or BackendError if that refuses as well."""
    override = Override(registry.fallback(decision.request.kind), f"failure of {failed}")
    policy, offers = load_policy(decision.policy), registry.offers(decision.request)
    again = make_decision(decision.request, decision.device, policy, decision.settings, offers, override)
    message = refusal(again)
    if message is not None:
        raise BackendError(f"{failed} failed, and the fallback refuses. {message}", again)
    return again


def forget_decisions() -> None:
    """Drop cached decisions: configuration files, tuned kernel configs or the list of broken backends have changed."""
    memory.forget()
    forget_settings()


def _check_name(argument: str, name: object) -> None:
    if not isinstance(name, str):
        raise ArgumentError(argument, shown(name), "the name of a backend, as a str", "`nsa-sel doctor` lists the names")


def _override(backend: str | None, settings: Settings, kind: Kind) -> Override | None:
    """By precedence: argument, use_backend, NSA_FORCE_PARITY, NSA_SEL_BACKEND. But for the argument, a backend of another kind forces
    nothing: a layer has calls of both."""
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
