"""What flags ask for between the decision and the run: where events go, the warm-up, and validation of the selection."""

from __future__ import annotations

from nsa_sel.core import warm
from nsa_sel.core.begin import Decided
from nsa_sel.telemetry import target


def prepared(decided: Decided, backend: str | None) -> Decided:
    """`decided`, decided again where a warm-up may have changed the choice; ArgumentError for a selection that breaks its promises."""
    settings = decided.call.settings
    target.follow(settings)
    if settings.autotune in ("warmup", "warmup-tune"):
        decided = warm.before_first_call(decided, backend)
    if settings.debug_triton and not decided.call.capturing():
        decided.call.selection.validate()
    return decided
