"""A decision as text: which backend runs, why the others do not, and what would have to differ."""

from __future__ import annotations

from nsa_sel.core.backend import Reason
from nsa_sel.core.decision import Decision
from nsa_sel.core.explain import counterfactuals
from nsa_sel.core.request import SHARING_TOKENS
from nsa_sel.errors import ArgumentError
from nsa_sel.telemetry.table import table


def describe(decision: Decision, columns: int = 0) -> str:
    """A decision as text for a terminal, with every reason of every backend.

    Args:
        decision: from `explain`, `explain_request` or `decisions`.
        columns: of the terminal, which the table is made to fit; 0 for any number.

    Returns:
        Lines of text.

    Raises:
        ArgumentError: for anything but a Decision.
    """
    if not isinstance(decision, Decision):
        raise ArgumentError("decision", f"a {type(decision).__name__}", "one Decision", "pass one of them, such as decisions()[-1]")
    request, device = decision.request, decision.device
    block = f", block {request.block_size}" if request.block_size else ""
    block += f", pages of {request.page_size} keys" if request.page_size else ""
    block += f", quantized KV cache ({request.quantized})" if request.quantized else ""
    mean = "" if request.mean_length is None else f", {request.mean_length} on average"
    lines = [
        f"request   B={request.B} S={request.S} S_kv<={request.S_kv} G={request.G} h={request.h} Dk={request.Dk} Dv={request.Dv}"
        f" n={request.n}{block}, at most {request.max_length} keys a row (L){mean}, {request.dtype},"
        f" gradients {'needed' if request.needs_grad else 'not needed'}",
        f"device    {device.name}" + (f", SM {device.sm // 10}.{device.sm % 10}" if device.sm else ""),
        f"forward   {decision.forward or 'nothing may run it'}",
    ]
    if request.needs_grad:
        lines.append(f"backward  {decision.backward or 'nothing may run it'}")
    if request.pool is not None:
        lines.append(f"scores    {_pool(request.pool)}")
    lines.append(f"rule      {decision.rule}")
    if decision.predictions and request.kind == "attend":
        lines.append(f"sharing   {_sharing(decision)}")
    lines.append(f"config    {decision.settings.profile}{_assumption(decision)}, fingerprint {decision.settings.fingerprint}")
    lines += [f"kernel    {config}" for config in _tuned_configs(decision)]
    timed = [direction for direction in ("forward", "backward") if any(p.direction == direction for p in decision.predictions)]
    rows = [
        [v.backend, _status(decision, v.backend), *(_predicted(decision, v.backend, direction) for direction in timed), _words(v.forward)]
        for v in decision.verdicts
    ]
    lines += ["", table(["backend", "forward", *(f"{direction}, ms" for direction in timed), "reasons"], rows, columns=columns)]
    lines += [f"-> {sentence}" for sentence in counterfactuals(decision)]
    return "\n".join(lines)


def _pool(pool: tuple[str, ...]) -> str:
    """What scores blocks."""
    if len(pool) != 3:
        return "none: the log-sum-exp alone"
    kind, heads, reduce = pool
    return f"{reduce} over a block, {heads} over heads, of {kind}"


def _status(decision: Decision, backend: str) -> str:
    if backend == decision.forward:
        return "picked"
    verdict = next(v for v in decision.verdicts if v.backend == backend)
    kinds = {reason.kind for reason in verdict.forward}
    return "eligible" if not kinds else ("slower" if kinds == {"slower"} else "refused")


def _assumption(decision: Decision) -> str:
    """The other device whose values the settings use."""
    assumed = decision.settings.assumed
    if assumed is None:
        return ""
    of = "the built-in values" if assumed == "base.yaml" else f"values of {assumed}, measured on another device"
    return f", assumes {of}"


def _tuned_configs(decision: Decision) -> list[str]:
    """The kernel configs of the chosen backends that come from the user's own tuning, each with its id and source."""
    settings, chosen = decision.settings, (decision.forward, decision.backward)
    return [
        f"{settings.kernels[kernel].config_id(kernel)} ({source})"
        for kernel, source in ((field.removeprefix("kernels."), source) for field, source in settings.sources.items())
        if kernel in settings.kernels and source.startswith("tuned: ") and kernel.split("/")[0] in chosen
    ]


def _predicted(decision: Decision, backend: str, direction: str) -> str:
    return next((f"{p.ms:.3g}" for p in decision.predictions if (p.backend, p.direction) == (backend, direction)), "-")


def _sharing(decision: Decision) -> str:
    """How many blocks adjacent tokens share, as the predictions assume."""
    known = decision.request.sharing
    source = decision.sharing_source if known else f"not measured: {decision.sharing_source}"
    ratios = ", ".join(f"{t}: {r}" for t, r in zip(SHARING_TOKENS, known or decision.settings.sharing_prior, strict=True))
    return f"blocks that adjacent tokens select together, over those of one, by tokens: {ratios} ({source})"


def _words(reasons: tuple[Reason, ...]) -> str:
    return "\n".join(reason.words for reason in reasons)
