"""The decision: which backend runs a class of calls, why not the others, and from which facts. Serializes to JSON.

`make_decision(request, device, ...)` is pure: it needs no tensors, torch or GPU. Calls, `explain` and replay all use
it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from nsa_sel.core import registry
from nsa_sel.core.backend import REFUSING_KINDS, Offer, Policy, PolicyInput, Reason
from nsa_sel.core.request import DeviceInfo, Kind, Request
from nsa_sel.errors import ArgumentError, NsaSelError, closest
from nsa_sel.settings.schema import Settings


class Override(msgspec.Struct, frozen=True):
    """A backend forced by name; source: "argument", "use_backend", "NSA_SEL_BACKEND" or "NSA_FORCE_PARITY"."""

    backend: str
    source: str


class Verdict(msgspec.Struct, frozen=True):
    """The reasons against one backend, forward and (when gradients are needed) backward."""

    backend: str
    forward: tuple[Reason, ...] = ()
    backward: tuple[Reason, ...] = ()


class Prediction(msgspec.Struct, frozen=True):
    """The predicted time of one backend that no check refused."""

    backend: str
    direction: Literal["forward", "backward"]
    ms: float


class FieldChange(msgspec.Struct, frozen=True):
    """A field in which a replayed decision differs from the recorded one."""

    field: str
    recorded: Any
    replayed: Any


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Which backend runs one class of calls, with the whole reasoning. Logging only serializes it."""

    request: Request
    device: DeviceInfo
    policy: str  # name of the policy that decided
    settings: Settings  # the effective values with their sources
    offers: tuple[Offer, ...]
    override: Override | None
    verdicts: tuple[Verdict, ...]  # in the order of the forward pass
    rule: str  # the rule that decided, in words
    steps: tuple[str, ...]  # backends preferred to the choice that a check refused, each with its reasons
    forward: str | None  # None: no backend may run it, see `verdicts`
    backward: str | None  # None when no gradients are needed
    predictions: tuple[Prediction, ...] = ()  # fastest first, forward before backward; empty where the profile has no costs
    runner_up: str | None = None  # what would run forward without the choice; None when forced
    runner_up_backward: str | None = None

    def __str__(self) -> str:
        """Return one screen: the backends, why, the predicted times and the other candidates. `nsa_sel.describe` has more."""
        request = self.request
        times = {f"{each.direction} {each.backend}": f", {each.ms:.3g} ms predicted" for each in self.predictions}
        lines = [f"{request.kind} on {self.device.name}: B={request.B} S={request.S} S_kv<={request.S_kv} G={request.G} h={request.h}"]
        for direction, name in (("forward", self.forward), *([("backward", self.backward)] if request.needs_grad else [])):
            lines.append(f"{direction}: {name or 'no backend can run it'}{times.get(f'{direction} {name}', '')}")
        lines += [f"rule: {self.rule}", "others:"]
        for verdict in self.verdicts:
            reasons = ", ".join(dict.fromkeys(reason.code for reason in (*verdict.forward, *verdict.backward)))
            if verdict.backend not in (self.forward, self.backward):
                lines.append(f"  {verdict.backend}: {reasons or 'possible'}{times.get(f'forward {verdict.backend}', '')}")
        return "\n".join(lines)

    @property
    def sharing_source(self) -> str:
        """The source of the sharing that predictions assume: "measured", "counted at the first call", or the prior's
        file."""
        if self.request.sharing is None:
            return f"prior of {self.settings.sources.get('sharing_prior', 'base.yaml')}"
        return "counted at the first call" if self.request.counted else "measured"

    def to_json(self) -> str:
        """One line of JSON with every field."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> Decision:
        """Return the decision that `to_json` wrote.

        Args:
            line: its JSON.

        Returns:
            An equal decision.

        Raises:
            NsaSelError: naming a field that does not fit.
        """
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.DecodeError as error:
            raise NsaSelError(f"not a decision record: {error}. Remedy: pass a line that Decision.to_json wrote.") from error

    def replay(self) -> tuple[FieldChange, ...]:
        """Decide again from the recorded facts with the current policy, without tensors or GPU.

        Returns:
            Every field that differs from the record, by its path.
        """
        again = make_decision(self.request, self.device, load_policy(self.policy), self.settings, self.offers, self.override)
        return tuple(changes("", msgspec.to_builtins(self), msgspec.to_builtins(again)))


POLICIES = {"default": "nsa_sel.policies.default"}  # name -> module with POLICY; decisions record the name


def load_policy(name: str) -> Policy:
    """Return the policy of this name; ArgumentError for an unknown one."""
    if name not in POLICIES:
        raise ArgumentError("policy", repr(name), ", ".join(POLICIES), "record the decision with a policy of POLICIES")
    return importlib.import_module(POLICIES[name]).POLICY  # type: ignore[no-any-return]


def make_decision(
    request: Request,
    device: DeviceInfo,
    policy: Policy,
    settings: Settings,
    offers: Sequence[Offer],
    override: Override | None = None,
) -> Decision:
    """Judge every offered backend; pick one for forward and, when gradients are needed, one for backward.

    A forced backend is taken even if it is slower, and refused (`forward` is None) for any other reason. Never raises:
    callers turn a decision without a winner into an error (`refusal`).

    Args:
        request: the call; pass the class (`Request.request_class`) for a decision that calls may share.
        device: its device.
        policy: checks, preference and predictions.
        settings: the effective settings for the device.
        offers: the backends.
        override: a forced backend.

    Returns:
        The decision.
    """
    names = [offer.backend.name for offer in offers]
    forward = _choose(PolicyInput(request, device, settings, "forward"), policy, offers, override)
    backward = _choose(PolicyInput(request, device, settings, "backward"), policy, offers, override) if request.needs_grad else None
    verdicts = tuple(Verdict(name, forward.reasons[name], backward.reasons[name] if backward else ()) for name in forward.order)
    steps: tuple[str, ...] = ()
    if override is not None:
        failed = override.source.startswith("failure of ")
        rule = f"fallback after {override.source}" if failed else f"forced by {override.source}"
        if override.backend not in names:
            rule += f", but no backend is called {override.backend!r}"
    else:
        preferred = policy.preference(PolicyInput(request, device, settings, "forward"))
        steps = tuple(f"{name}: no backend of that name" for name in preferred if name not in names)
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
    """The choice for one direction."""

    order: tuple[str, ...]  # all backends as considered
    reasons: dict[str, tuple[Reason, ...]]
    predictions: tuple[Prediction, ...]
    by_time: bool  # whether predictions decided
    rule: str
    stepped_over: tuple[str, ...]
    winner: str | None
    runner_up: str | None


def _choose(case: PolicyInput, policy: Policy, offers: Sequence[Offer], override: Override | None) -> _Choice:
    offered = {offer.backend.name: offer.backend for offer in offers}
    reasons: dict[str, tuple[Reason, ...]] = {}
    for offer in offers:
        against = tuple(reason for check in policy.checks for reason in check(case, offer))
        if any(reason.kind in ("unavailable", "unsupported") for reason in against):  # how fast it is does not matter
            against = tuple(reason for reason in against if reason.kind != "slower")
        reasons[offer.backend.name] = against
    ordered = policy.preference(case)
    preferred = [name for name in ordered if name in reasons]
    preferred += [name for name in reasons if name not in preferred]
    predicted = {name: ms for name in preferred if not reasons[name] and (ms := policy.predict(case, offered[name])) is not None}
    predictions = sorted((Prediction(name, case.direction, ms) for name, ms in predicted.items()), key=lambda prediction: prediction.ms)
    source = case.settings.sources.get(f"prefer_{case.direction}") if ordered else None
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
        sources = case.settings.sources.get("costs", "built-in"), *(["sharing counted at the first call"] if case.request.counted else [])
        rule = f"least predicted time: {', runner-up '.join(shown)} ({'; '.join(sources)})"
    else:
        least_L = case.settings.sources.get("sel_triton_min_L", "")
        origin = (source or "built-in") + (f"; least L: {least_L}" if least_L.endswith("(assumed)") else "")
        origin += f"; no prediction for {beyond}" if (beyond := policy.unpredicted(case)) else ""
        rule = "first of the preference" + (" that no check refused" if stepped_over else "") + f" ({origin})"
        rule += ", which goes before predicted times" if own and predicted else ""
    return _Choice(tuple(order), reasons, tuple(predictions), by_time, rule, tuple(stepped_over), winner, runner_up)


def changes(path: str, old: Any, new: Any) -> list[FieldChange]:
    """Return the leaves in which two nested values of dicts, lists and scalars differ, by path."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [c for key in keys for c in changes(f"{path}.{key}".lstrip("."), old.get(key), new.get(key))]
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        return [c for i, (a, b) in enumerate(zip(old, new, strict=True)) for c in changes(f"{path}[{i}]", a, b)]
    return [] if old == new else [FieldChange(path, old, new)]


_FUNCTIONS = {"attend": "selection_attention", "choose": "compressed_attention and choose_blocks", "index_loss": "indexer_loss"}


def refusal(decision: Decision) -> str | None:
    """Return why no backend may run the call, with every reason of every candidate; None if one may."""
    if decision.forward is not None and (decision.backward is not None or not decision.request.needs_grad):
        return None
    names = [verdict.backend for verdict in decision.verdicts]
    if decision.override is not None and decision.override.backend not in names:
        call = _FUNCTIONS[decision.request.kind]
        if decision.override.source != "argument":  # the others name a backend of any kind
            names += [name for name in every_name() if name not in names]
        return unknown_backend(decision.override.backend, decision.override.source, call, names)
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


def every_name() -> list[str]:
    """Return the names of the backends of all kinds."""
    return [name for kind in get_args(Kind) for name in registry.backends(kind)]


def unknown_backend(name: str, source: str, call: str, names: Sequence[str]) -> str:
    """Return the message about a backend's name that is none of `names`, with the closest of them."""
    close = closest(name, names)
    hint = f"; did you mean {close!r}?" if close else "."
    return f"backend {name!r} ({source}) is unknown to {call}{hint} Allowed: {', '.join(names)}. Remedy: use one of these names."


def missed(decision: Decision) -> Missed | None:
    """Return the missing package that keeps the best backend from running; None without one, or if a backend is forced."""
    if decision.override is not None or decision.forward is None:
        return None
    lacking: dict[str, Reason] = {}  # the backends for which pip can bring all that is missing
    for offer in decision.offers:
        of_pip = {f"package {need.package}" for need in offer.backend.requires}
        of_pip |= {f"library {library.name}" for library in offer.backend.libraries if library.distributions}
        if offer.missing and all(reason.field in of_pip for reason in offer.missing):
            lacking[offer.backend.name] = offer.missing[0]
    if not lacking:
        return None
    offers = [msgspec.structs.replace(offer, missing=()) if offer.backend.name in lacking else offer for offer in decision.offers]
    again = make_decision(decision.request, decision.device, load_policy(decision.policy), decision.settings, offers)
    best = next((name for name in (again.forward, again.backward) if name in lacking), None)
    if best is None:
        return None
    reason, now, then = lacking[best], _predicted(decision), _predicted(again)
    words = f"{reason.fact}, so calls like this run on {_winners(decision)} instead of {_winners(again)}"
    if now and then:
        words += f", and take {now / then:.2f} times as long ({now:.3g} ms instead of {then:.3g} ms, predicted)"
    return Missed(reason, now / then if now and then else None, f"{words}. Remedy: {reason.remedy}")


class Missed(NamedTuple):
    """A package that is not installed: the reason, how many times as long calls take without it (None: not predicted),
    the message."""

    reason: Reason
    factor: float | None
    words: str


def _winners(decision: Decision) -> str:
    return " and ".join(dict.fromkeys(name for name in (decision.forward, decision.backward) if name is not None))


def _predicted(decision: Decision) -> float | None:
    """Return the milliseconds of the chosen backends, forward and, where gradients are needed, backward; None without a
    prediction of each."""
    wanted = {("forward", decision.forward), *([("backward", decision.backward)] if decision.request.needs_grad else [])}
    times = [prediction.ms for prediction in decision.predictions if (prediction.direction, prediction.backend) in wanted]
    return sum(times) if len(times) == len(wanted) else None


def counterfactuals(decision: Decision) -> tuple[str, ...]:
    """Return sentences that say what would make another backend win. Each is checked by deciding again."""
    sentences = []
    for verdict in decision.verdicts:
        fixes = [reason for reason in verdict.forward if reason.satisfied_by is not None]
        if verdict.backend == decision.forward or not verdict.forward or len(fixes) < len(verdict.forward):
            continue
        lifted = {reason.field.removeprefix("request."): reason.satisfied_by for reason in fixes}
        changed = msgspec.structs.replace(decision.request, **lifted)
        again = make_decision(changed, decision.device, load_policy(decision.policy), decision.settings, decision.offers)
        if again.forward == verdict.backend:
            names = {"max_length": "L", "mean_length": "mean L"}
            terms = [f"{names.get(field, field)} >= {value}" for field, value in lifted.items()]
            here = [f"{names.get(field, field)} = {getattr(decision.request, field)}" for field in lifted]
            sentences.append(f"{verdict.backend} would be picked from {' and '.join(terms)}; here {', '.join(here)}")
    package = missed(decision)
    return (*sentences, *([package.words] if package else []))
