"""The default policy: guards, then rules; of the backends that none of them refuses, the one with the least predicted time.

If the device's profile has no costs, or none for the request, the profile's order of preference decides.
"""

from __future__ import annotations

from nsa_sel.core.decision import Case, Policy
from nsa_sel.policies import cost, guards, rules


def preference(case: Case) -> tuple[str, ...]:
    """The order of backends for this direction: measured where a profile exists, else conservative. Of choosers, that of the registry."""
    if case.request.kind == "choose":
        return ()
    return case.settings.prefer_forward if case.direction == "forward" else case.settings.prefer_backward


POLICY = Policy(
    name="default",
    checks=(
        guards.available,
        guards.within_limits,
        guards.tile_overrides,
        rules.device_rule,
        rules.triton_flags,
        rules.switches,
        rules.no_triton_on_cpu,
        rules.min_length,
    ),
    preference=preference,
    predict=cost.predict,
)
