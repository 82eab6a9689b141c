"""A decision in words: who won, who did not and why, and what would have to differ."""

from __future__ import annotations

from tabulate import tabulate

from nsa_sel.core.backend import Reason
from nsa_sel.core.decision import Decision
from nsa_sel.core.explain import counterfactuals
from nsa_sel.core.request import SHARING_TOKENS
from nsa_sel.errors import ArgumentError

REASON_WIDTH = 96  # characters


def describe(decision: Decision) -> str:
    """The decision as text for a terminal, with every reason of every backend. Raises ArgumentError for anything else."""
    if not isinstance(decision, Decision):
        raise ArgumentError("decision", f"a {type(decision).__name__}", "one Decision", "pass one of them, such as decisions()[-1]")
    request, device = decision.request, decision.device
    block = f", block {request.block_size}" if request.block_size else ""
    block += f", pages of {request.page_size} keys" if request.page_size else ""
    lines = [
        f"request   B={request.B} S={request.S} S_kv<={request.S_kv} G={request.G} h={request.h} Dk={request.Dk} Dv={request.Dv}"
        f" n={request.n}{block}, at most {request.max_length} keys a row (L), {request.dtype},"
        f" gradients {'needed' if request.needs_grad else 'not needed'}",
        f"device    {device.name}" + (f", SM {device.sm // 10}.{device.sm % 10}" if device.sm else ""),
        f"forward   {decision.forward or 'nothing may run it'}",
    ]
    if request.needs_grad:
        lines.append(f"backward  {decision.backward or 'nothing may run it'}")
    config_line = f"config    {decision.settings.profile}{_assumption(decision)}, fingerprint {decision.settings.fingerprint}"
    lines += [f"rule      {decision.rule}", config_line]
    lines += [f"launch    {launch}" for launch in _tuned_launches(decision)]
    headers = ["backend", "forward", "reasons"]
    rows = [[v.backend, _standing(decision, v.backend), _words(v.forward)] for v in decision.verdicts]
    if decision.predictions:
        lines.insert(lines.index(config_line), f"sharing   {_sharing(decision)}")
        directions = ("forward", "backward") if request.needs_grad else ("forward",)
        headers[2:2] = [f"{direction}, ms" for direction in directions]
        for row in rows:
            row[2:2] = [_predicted(decision, row[0], direction) for direction in directions]
    widths = [None] * (len(headers) - 1)
    table = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, maxcolwidths=[*widths, REASON_WIDTH])
    lines += ["", table]
    lines += [f"-> {sentence}" for sentence in counterfactuals(decision)]
    return "\n".join(lines)


def _standing(decision: Decision, backend: str) -> str:
    if backend == decision.forward:
        return "picked"
    verdict = next(v for v in decision.verdicts if v.backend == backend)
    kinds = {reason.kind for reason in verdict.forward}
    return "eligible" if not kinds else ("slower" if kinds == {"slower"} else "refused")


def _assumption(decision: Decision) -> str:
    """What the values were not measured for."""
    assumed = decision.settings.assumed
    if assumed is None:
        return ""
    of = "the built-in values" if assumed == "base.yaml" else f"values of {assumed}, measured on another device"
    return f", assumes {of}"


def _tuned_launches(decision: Decision) -> list[str]:
    """The launches of the chosen backends that the user's own tuning brought, each with its id and source."""
    settings, chosen = decision.settings, (decision.forward, decision.backward)
    return [
        f"{settings.kernels[kernel].config_id(kernel)} ({source})"
        for kernel, source in ((field.removeprefix("kernels."), source) for field, source in settings.sources.items())
        if kernel in settings.kernels and source.startswith("tuned: ") and kernel.split("/")[0] in chosen
    ]


def _predicted(decision: Decision, backend: str, direction: str) -> str:
    return next((f"{p.ms:.3g}" for p in decision.predictions if (p.backend, p.direction) == (backend, direction)), "-")


def _sharing(decision: Decision) -> str:
    """What the predictions take neighbours to have in common."""
    known = decision.request.sharing
    source = "measured" if known else f"not measured: prior of {decision.settings.sources.get('sharing_prior', 'base.yaml')}"
    ratios = ", ".join(f"{t}: {r}" for t, r in zip(SHARING_TOKENS, known or decision.settings.sharing_prior, strict=True))
    return f"blocks of so many adjacent tokens over those of one, {ratios} ({source})"


def _words(reasons: tuple[Reason, ...]) -> str:
    return "\n".join(f"{r.field} is {r.actual}, required {r.required}; {r.remedy}" for r in reasons)
