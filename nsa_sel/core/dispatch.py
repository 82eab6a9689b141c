"""select(request, device, ...) -> Decision: pure, without tensors, torch or a GPU; explain and replay are the same function."""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from nsa_sel.core.decision import REFUSING_KINDS, Decision, FieldChange, Offer, Override, Prediction, Reason, Verdict
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.errors import ArgumentError, ConfigError
from nsa_sel.settings.schema import Settings, Way


class Case(NamedTuple):
    """What a check of a policy looks at, for one direction."""

    request: Request
    device: DeviceInfo
    settings: Settings
    direction: Literal["forward", "backward"]

    @property
    def way(self) -> Way:
        """The direction, with the forward of one query a sequence apart."""
        return "decode" if self.direction == "forward" and self.request.S == 1 else self.direction


Check = Callable[[Case, Offer], tuple[Reason, ...]]


class Policy(NamedTuple):
    """A policy: every check's reasons are kept; of the backends without any, the one with the least predicted time is picked.

    Of a backend that can't run no reason `slower` is kept. Without predictions, and where the user's own file says what to prefer,
    it is the first of the preference.
    """

    name: str
    checks: tuple[Check, ...]
    preference: Callable[[Case], tuple[str, ...]]
    predict: Callable[[Case, str], float | None]  # ms of a backend, None where no evidence speaks


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
    names = [offer.backend.name for offer in offers]
    forward = _choose(Case(request, device, settings, "forward"), policy, offers, override)
    backward = _choose(Case(request, device, settings, "backward"), policy, offers, override) if request.needs_grad else None
    verdicts = tuple(Verdict(name, forward.reasons[name], backward.reasons[name] if backward else ()) for name in forward.order)
    steps: tuple[str, ...] = ()
    if override is not None:
        rule = f"forced by {override.source}"
        if override.backend not in names:
            rule += f", but no backend is called {override.backend!r}"
    else:
        steps = tuple(f"{name}: no backend of that name" for name in settings.prefer_forward if name not in names)
        steps += tuple(f"{name}: {', '.join(r.code for r in forward.reasons[name])}" for name in forward.stepped_over)
        rule = forward.rule
        if backward and (forward.by_time or backward.by_time):
            rule += f"; backward: {backward.rule}"
    return Decision(
        request=request, device=device, policy=policy.name, settings=settings, offers=tuple(offers), override=override,
        verdicts=verdicts, rule=rule, steps=steps, forward=forward.winner, backward=backward and backward.winner,
        predictions=forward.predictions + (backward.predictions if backward else ()),
        runner_up=forward.runner_up, runner_up_backward=backward and backward.runner_up,
    )  # fmt: skip


class _Choice(NamedTuple):
    """What `select` finds for one direction."""

    order: tuple[str, ...]  # all backends as they were considered
    reasons: dict[str, tuple[Reason, ...]]
    predictions: tuple[Prediction, ...]
    by_time: bool  # whether predictions decided
    rule: str
    stepped_over: tuple[str, ...]
    winner: str | None
    runner_up: str | None


def _choose(case: Case, policy: Policy, offers: Sequence[Offer], override: Override | None) -> _Choice:
    reasons = {offer.backend.name: _reasons(case, offer, policy) for offer in offers}
    preferred = [name for name in policy.preference(case) if name in reasons]
    preferred += [name for name in reasons if name not in preferred]
    predicted = {name: ms for name in preferred if not reasons[name] and (ms := policy.predict(case, name)) is not None}
    predictions = sorted((Prediction(name, case.direction, ms) for name, ms in predicted.items()), key=lambda found: found.ms)
    field = f"prefer_{case.direction}"
    source = case.settings.sources.get(field)
    own = source is not None and source == case.settings.config_file
    by_time = bool(predicted) and not own and override is None
    # Sorting is stable: equal times, and backends without a time, keep the order of the preference.
    order = sorted(preferred, key=lambda name: predicted.get(name, math.inf)) if by_time else preferred
    eligible = [name for name in order if not reasons[name]]
    winner, runner_up = (*eligible, None, None)[:2]
    stepped_over = [name for name in preferred[: preferred.index(winner)] if reasons[name]] if winner else preferred
    if override is not None:
        refused = any(reason.kind in REFUSING_KINDS for reason in reasons.get(override.backend, ()))
        winner, runner_up = override.backend if override.backend in reasons and not refused else None, None
    if by_time:
        shown = [f"{name} {predicted[name]:.3g} ms" if name in predicted else f"{name} (no prediction)" for name in eligible[:2]]
        rule = f"least predicted time: {', runner-up '.join(shown)} ({case.settings.sources.get('costs', 'built-in')})"
    else:
        least_L = case.settings.sources.get("sel_triton_min_L", "")
        origin = (source or "built-in") + (f"; least L: {least_L}" if least_L.endswith("(assumed)") else "")
        rule = "first of the preference" + (" that no check turned away" if stepped_over else "") + f" ({origin})"
        rule += ", which goes before predicted times" if own and predicted else ""
    return _Choice(tuple(order), reasons, tuple(predictions), by_time, rule, tuple(stepped_over), winner, runner_up)


def _reasons(case: Case, offer: Offer, policy: Policy) -> tuple[Reason, ...]:
    """What every check says; what can't run is not slower besides."""
    found = tuple(reason for check in policy.checks for reason in check(case, offer))
    if any(reason.kind in ("unavailable", "unsupported") for reason in found):
        return tuple(reason for reason in found if reason.kind != "slower")
    return found


def check_names(settings: Settings, offers: Sequence[Offer]) -> None:
    """ConfigError for a name in the user's configuration file that no backend has; one of a package that is not installed is none.

    What a committed profile names, and is not there, is a step of the decision.
    """
    written = {
        "prefer_forward": settings.prefer_forward,
        "prefer_backward": settings.prefer_backward,
        "costs": [name.rpartition("/")[0] for name in settings.costs.models] if settings.costs else [],
    }
    known = [offer.backend.name for offer in offers]
    own = [field for field in written if settings.sources.get(field, "") == settings.config_file]
    unknown = [(field, name) for field in own for name in written[field] if name not in known]
    if unknown:
        field, name = unknown[0]
        close = difflib.get_close_matches(name, known, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        remedy = f"mend the name{meant}, or install the package that brings this backend"
        raise ConfigError(f"{settings.config_file}: {field}", name, ", ".join(known), remedy)


def refusal(decision: Decision) -> str | None:
    """Why nothing may run the call, with every reason of every candidate; None when something may."""
    if decision.forward is not None and (decision.backward is not None or not decision.request.needs_grad):
        return None
    names = [verdict.backend for verdict in decision.verdicts]
    if decision.override is not None and decision.override.backend not in names:
        close = difflib.get_close_matches(decision.override.backend.lower(), names, n=1)
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
        lifted = {reason.field.removeprefix("request."): reason.satisfied_by for reason in fixes}
        changed = msgspec.structs.replace(decision.request, **lifted)
        again = select(changed, decision.device, load_policy(decision.policy), decision.settings, decision.offers)
        if again.forward == verdict.backend:
            names = {"max_length": "L"}
            terms = [f"{names.get(field, field)} >= {value}" for field, value in lifted.items()]
            here = [f"{names.get(field, field)} = {getattr(decision.request, field)}" for field in lifted]
            sentences.append(f"{verdict.backend} would be picked from {' and '.join(terms)}; here {', '.join(here)}")
    return tuple(sentences)


def replay(decision: Decision) -> tuple[FieldChange, ...]:
    """Run the recorded facts through today's policy; every field that differs from the record, by its path."""
    again = select(decision.request, decision.device, load_policy(decision.policy), decision.settings, decision.offers, decision.override)
    return tuple(changes("", msgspec.to_builtins(decision), msgspec.to_builtins(again)))


def changes(path: str, old: Any, new: Any) -> list[FieldChange]:
    """The leaves in which two values of dicts, lists and scalars differ, by their paths below `path`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [c for key in keys for c in changes(f"{path}.{key}".lstrip("."), old.get(key), new.get(key))]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        return [c for i, (a, b) in enumerate(zip(old, new, strict=True)) for c in changes(f"{path}[{i}]", a, b)]
    return [] if old == new else [FieldChange(path, old, new)]
