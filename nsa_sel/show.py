"""A decision in words: who won, who did not and why, and what would have to differ."""

from __future__ import annotations

from tabulate import tabulate

from nsa_sel.decision import Decision, Reason
from nsa_sel.dispatch import counterfactuals

REASON_WIDTH = 96  # characters


def describe(decision: Decision) -> str:
    """The decision as text for a terminal, with every reason of every backend."""
    request, device = decision.request, decision.device
    block = f", block {request.block_size}" if request.block_size else ""
    lines = [
        f"request   B={request.B} S={request.S} S_kv<={request.S_kv} G={request.G} h={request.h} Dk={request.Dk} Dv={request.Dv}"
        f" n={request.n}{block}, L<={request.max_length}, {request.dtype}, gradients {'needed' if request.needs_grad else 'not needed'}",
        f"device    {device.name}" + (f", SM {device.sm // 10}.{device.sm % 10}" if device.sm else ""),
        f"forward   {decision.forward or 'nothing may run it'}",
    ]
    if request.needs_grad:
        lines.append(f"backward  {decision.backward or 'nothing may run it'}")
    lines += [
        f"rule      {decision.rule}",
        f"config    {decision.settings.profile}, fingerprint {decision.settings.fingerprint}",
    ]
    rows = [(v.backend, _standing(decision, v.backend), _words(v.forward)) for v in decision.verdicts]
    lines += ["", tabulate(rows, headers=["backend", "forward", "reasons"], tablefmt="simple", maxcolwidths=[None, None, REASON_WIDTH])]
    lines += [f"-> {sentence}" for sentence in counterfactuals(decision)]
    return "\n".join(lines)


def _standing(decision: Decision, backend: str) -> str:
    if backend == decision.forward:
        return "picked"
    verdict = next(v for v in decision.verdicts if v.backend == backend)
    kinds = {reason.kind for reason in verdict.forward}
    return "eligible" if not kinds else ("slower" if kinds == {"slower"} else "refused")


def _words(reasons: tuple[Reason, ...]) -> str:
    return "\n".join(f"{r.field} is {r.actual}, required {r.required}; {r.remedy}" for r in reasons)
