"""The default policy: guards, then rules; the first backend of the measured preference that none of them turns away."""

from __future__ import annotations

from nsa_sel.dispatch import Case, Policy
from nsa_sel.policies import guards, rules


def preference(case: Case) -> tuple[str, ...]:
    """The profile's order for this direction: measured where a profile exists, else the conservative built-in."""
    return case.settings.prefer_forward if case.direction == "forward" else case.settings.prefer_backward


POLICY = Policy(
    name="default",
    checks=(
        guards.available,
        guards.within_limits,
        guards.tile_overrides,
        rules.device_rule,
        rules.triton_flags,
        rules.pack_flag,
        rules.no_triton_on_cpu,
        rules.min_length,
    ),
    preference=preference,
)
