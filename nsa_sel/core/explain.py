"""Sentences about a decision: why no backend may run a call, and what would make another backend win."""

from __future__ import annotations

import difflib
from typing import get_args

import msgspec

from nsa_sel.core import registry
from nsa_sel.core.backend import REFUSING_KINDS
from nsa_sel.core.decision import Decision, load_policy, make_decision
from nsa_sel.core.request import Kind
from nsa_sel.errors import ConfigError
from nsa_sel.settings.schema import Settings


def check_names(settings: Settings) -> None:
    """ConfigError for a backend's name in the user's configuration file that is not installed.

    A missing backend of a committed profile is no error, but a step of the decision. Costs may be of both kinds, whatever is decided.
    """
    attending, every = list(registry.backends()), [name for kind in get_args(Kind) for name in registry.backends(kind)]
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
        close = difflib.get_close_matches(decision.override.backend.lower(), names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        call = {"attend": "selection_attention", "choose": "compressed_attention and choose_blocks"}[decision.request.kind]
        return (
            f"backend {decision.override.backend!r} ({decision.override.source}) is unknown to {call}{hint} Allowed:"
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
    return tuple(sentences)
