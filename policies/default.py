"""The default policy: run guards, then rules, and pick the remaining backend with the least predicted time.

If the device's profile has no costs, or none for the request, the profile's order of preference decides.
"""

from __future__ import annotations

from nsa_sel.backends.specs import SPECS
from nsa_sel.core.backend import Policy, PolicyInput
from nsa_sel.core.request import FEW_TOKENS
from nsa_sel.policies import cost, guards, rules


def preference(case: PolicyInput) -> tuple[str, ...]:
    """Return the order of preference for this direction: measured if the device has a profile, else conservative.

    Empty for requests of other kinds than "attend", which use the registry's order. On a GPU, prefills outside the cost models use
    `prefer_tiles`, unless the user's file sets an order; backends whose tile kernels do not take the call are left out
    of it. Decoding steps outside the models prefer backends whose kernels over steps of keys take them.
    """
    settings, request = case.settings, case.request
    if request.kind != "attend":
        return ()
    own = settings.config_file is not None and settings.sources.get(f"prefer_{case.direction}") == settings.config_file
    backward = case.direction == "backward"
    usual = settings.prefer_backward if backward else settings.prefer_forward
    if own or case.device.kind != "cuda" or not cost.beyond_models(request):
        return usual
    if request.S > FEW_TOKENS:
        by_rows = {x.name for x in SPECS if x.tiles and not (case.device.sm == x.tiles.sm and x.tiles.take(request, backward))}
        return tuple(name for name in settings.prefer_tiles if name not in by_rows)
    by_steps = () if backward else tuple(x.name for x in SPECS if x.steps and case.device.sm == x.steps.sm and x.steps.take_few(request))
    return *by_steps, *(name for name in usual if name not in by_steps)


POLICY = Policy(
    name="default",
    checks=(
        guards.available,
        guards.within_limits,
        guards.forced_path,
        rules.device_rule,
        rules.triton_flags,
        rules.switches,
        rules.no_triton_on_cpu,
        rules.min_length,
    ),
    preference=preference,
    predict=cost.predict,
    unpredicted=lambda case: cost.beyond_models(case.request) if case.settings.costs else None,
)
