"""Sentences about a decision: why no backend may run a call, and what would make another backend win."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import NamedTuple, get_args

import msgspec

from nsa_sel.core import registry
from nsa_sel.core.backend import REFUSING_KINDS, Offer, Reason
from nsa_sel.core.decision import Decision, load_policy, make_decision
from nsa_sel.core.request import Kind
from nsa_sel.errors import ConfigError
from nsa_sel.settings.schema import Settings


def check_names(settings: Settings) -> None:
    """ConfigError for a backend's name in the user's configuration file that is not installed.

    A missing backend of a committed profile is no error, but a step of the decision. Costs may be of both kinds, whatever is decided.
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
        close = difflib.get_close_matches(name, names, n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        remedy = f"correct the name{meant}, or install the package that brings this backend"
        raise ConfigError(f"{settings.config_file}: {field}", name, ", ".join(names), remedy)


def refusal(decision: Decision) -> str | None:
    """Why no backend may run the call, with every reason of every candidate; None when one may."""
    if decision.forward is not None and (decision.backward is not None or not decision.request.needs_grad):
        return None
    names = [verdict.backend for verdict in decision.verdicts]
    if decision.override is not None and decision.override.backend not in names:
        call = {"attend": "selection_attention", "choose": "compressed_attention and choose_blocks"}[decision.request.kind]
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
    """The names of the backends of all kinds."""
    return [name for kind in get_args(Kind) for name in registry.backends(kind)]


def unknown_backend(name: str, source: str, call: str, names: Sequence[str]) -> str:
    """The message about a backend's name that is none of `names`, with the closest of them."""
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"backend {name!r} ({source}) is unknown to {call}{hint} Allowed: {', '.join(names)}. Remedy: use one of these names."


def missed(decision: Decision) -> Missed | None:
    """The package that keeps the best backend for this decision from running; None where there is no such package, or one is forced."""
    if decision.override is not None or decision.forward is None:
        return None
    lacking = {offer.backend.name: offer.missing[0] for offer in decision.offers if _installable(offer)}
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
    """A package that is not installed: the reason, how many times as long calls take without it (None: not predicted), the message."""

    reason: Reason
    factor: float | None
    words: str


def _installable(offer: Offer) -> bool:
    """Whether pip can bring all that the backend lacks."""
    of_pip = {f"package {need.package}" for need in offer.backend.requires}
    of_pip |= {f"library {library.name}" for library in offer.backend.libraries if library.distributions}
    return bool(offer.missing) and all(reason.field in of_pip for reason in offer.missing)


def _winners(decision: Decision) -> str:
    return " and ".join(dict.fromkeys(name for name in (decision.forward, decision.backward) if name is not None))


def _predicted(decision: Decision) -> float | None:
    """Milliseconds of the chosen backends, forward and, where gradients are needed, backward; None without a prediction of each."""
    wanted = {("forward", decision.forward), *([("backward", decision.backward)] if decision.request.needs_grad else [])}
    times = [found.ms for found in decision.predictions if (found.direction, found.backend) in wanted]
    return sum(times) if len(times) == len(wanted) else None


def counterfactuals(decision: Decision) -> tuple[str, ...]:
    """What would make another backend win; each sentence is checked by deciding again."""
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
    found = missed(decision)
    return (*sentences, *([found.words] if found else []))
