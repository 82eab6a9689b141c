"""select(request, device, ...) -> Decision: pure, without tensors, torch or a GPU; explain and replay are the same function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from nsa_sel.config import Settings
from nsa_sel.decision import REFUSING_KINDS, Decision, FieldChange, Offer, Override, Reason, Verdict
from nsa_sel.errors import ArgumentError
from nsa_sel.request import DeviceInfo, Request


class Case(NamedTuple):
    """What a check of a policy looks at, for one direction."""

    request: Request
    device: DeviceInfo
    settings: Settings
    direction: Literal["forward", "backward"]


Check = Callable[[Case, Offer], tuple[Reason, ...]]


class Policy(NamedTuple):
    """A policy: every check's reasons are kept, and the first backend of the preference without any is picked."""

    name: str
    checks: tuple[Check, ...]
    preference: Callable[[Case], tuple[str, ...]]


POLICIES = {"default": "nsa_sel.policies.default"}  # name -> module with POLICY; recorded decisions name it


def load_policy(name: str) -> Policy:
    """The policy that a decision names. Raises ArgumentError for a name that is none."""
    if name not in POLICIES:
        raise ArgumentError("policy", repr(name), ", ".join(POLICIES), "record the decision with a policy of POLICIES")
    policy: Policy = importlib.import_module(POLICIES[name]).POLICY
    return policy


def select(
    request: Request,
    device: DeviceInfo,
    policy: Policy,
    settings: Settings,
    offers: Sequence[Offer],
    override: Override | None = None,
) -> Decision:
    """Judge every offered backend and pick one for forward and, when gradients are needed, one for backward.

    A forced backend is taken although it may be slower, and refused (`forward` is None) for any other reason. Never
    raises: the caller turns a decision without a winner into an error (`refusal`).
    """
    directions: tuple[Literal["forward", "backward"], ...] = ("forward", "backward") if request.needs_grad else ("forward",)
    by_name = {offer.backend.name: offer for offer in offers}
    reasons: dict[str, dict[str, tuple[Reason, ...]]] = {}
    winners: dict[str, str | None] = {}
    order: tuple[str, ...] = ()
    for direction in directions:
        case = Case(request, device, settings, direction)
        reasons[direction] = {
            name: tuple(reason for check in policy.checks for reason in check(case, offer)) for name, offer in by_name.items()
        }
        ranked = [name for name in policy.preference(case) if name in by_name]
        ranked += [name for name in by_name if name not in ranked]
        order = order or tuple(ranked)
        if override is not None:
            refusing = [r for r in reasons[direction].get(override.backend, ()) if r.kind in REFUSING_KINDS]
            winners[direction] = override.backend if override.backend in by_name and not refusing else None
        else:
            winners[direction] = next((name for name in ranked if not reasons[direction][name]), None)

    verdicts = tuple(Verdict(name, reasons["forward"][name], reasons.get("backward", {}).get(name, ())) for name in order)
    forward = winners["forward"]
    steps: tuple[str, ...] = ()
    if override is not None:
        rule = f"forced by {override.source}"
        if override.backend not in by_name:
            rule += f", but no backend is called {override.backend!r}"
    else:
        ahead = verdicts[: order.index(forward)] if forward else verdicts
        steps = tuple(f"{name}: no backend of that name" for name in settings.prefer_forward if name not in by_name)
        steps += tuple(f"{v.backend}: {', '.join(r.code for r in v.forward)}" for v in ahead)
        rule = "first of the preference" if not ahead else "first of the preference that no check turned away"
        rule += f" ({settings.sources.get('prefer_forward', 'built-in')})"
    return Decision(
        request=request, device=device, policy=policy.name, settings=settings, offers=tuple(offers), override=override,
        verdicts=verdicts, rule=rule, steps=steps, forward=forward, backward=winners.get("backward"),
    )  # fmt: skip


def refusal(decision: Decision) -> str | None:
    """Why nothing may run the call, with every reason of every candidate; None when something may."""
    if decision.forward is not None and (decision.backward is not None or not decision.request.needs_grad):
        return None
    names = [verdict.backend for verdict in decision.verdicts]
    if decision.override is not None and decision.override.backend not in names:
        import difflib

        close = difflib.get_close_matches(decision.override.backend, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        return (
            f"backend {decision.override.backend!r} ({decision.override.source}) is unknown{hint} Allowed:"
            f" {', '.join(names)}. Remedy: use one of these names."
        )
    if decision.override is not None:
        head = f"backend {decision.override.backend!r}, forced by {decision.override.source}, refuses this call:"
        shown = [verdict for verdict in decision.verdicts if verdict.backend == decision.override.backend]
    else:
        head, shown = "no backend may run this call:", list(decision.verdicts)
    lines = [head]
    for verdict in shown:
        for reason in dict.fromkeys((*verdict.forward, *verdict.backward)):
            if decision.override is None or reason.kind in REFUSING_KINDS:
                lines.append(f"  {verdict.backend}: {reason}")
    return "\n".join(lines)


def counterfactuals(decision: Decision) -> tuple[str, ...]:
    """What would have to differ for another backend to be picked; each sentence is checked by selecting again."""
    sentences = []
    for verdict in decision.verdicts:
        fixes = [reason for reason in verdict.forward if reason.satisfied_by is not None]
        if verdict.backend == decision.forward or not verdict.forward or len(fixes) < len(verdict.forward):
            continue
        changes = {reason.field.removeprefix("request."): reason.satisfied_by for reason in fixes}
        changed = msgspec.structs.replace(decision.request, **changes)
        again = select(changed, decision.device, load_policy(decision.policy), decision.settings, decision.offers)
        if again.forward == verdict.backend:
            names = {"max_length": "L"}
            terms = [f"{names.get(field, field)} >= {value}" for field, value in changes.items()]
            here = [f"{names.get(field, field)} = {getattr(decision.request, field)}" for field in changes]
            sentences.append(f"{verdict.backend} would be picked from {' and '.join(terms)}; here {', '.join(here)}")
    return tuple(sentences)


def replay(decision: Decision) -> tuple[FieldChange, ...]:
    """Run the recorded facts through today's policy; every field that differs from the record, by its path."""
    again = select(decision.request, decision.device, load_policy(decision.policy), decision.settings, decision.offers, decision.override)
    return tuple(_changes("", msgspec.to_builtins(decision), msgspec.to_builtins(again)))


def _changes(path: str, old: Any, new: Any) -> list[FieldChange]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [c for key in keys for c in _changes(f"{path}.{key}".lstrip("."), old.get(key), new.get(key))]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        return [c for i, (a, b) in enumerate(zip(old, new, strict=True)) for c in _changes(f"{path}[{i}]", a, b)]
    return [] if old == new else [FieldChange(path, old, new)]
