"""`nsa-sel doctor`: report packages, devices, settings with their sources, backends and flags of this machine."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.core.backend import REFUSING_KINDS
from nsa_sel.core.call import device_info
from nsa_sel.core.decide import explain_request
from nsa_sel.core.decision import missed, refusal
from nsa_sel.core.request import DeviceInfo, example_choice, example_loss, example_request
from nsa_sel.errors import NsaSelError
from nsa_sel.settings.flags import unknown_variables
from nsa_sel.telemetry.describe import table

PACKAGES = ("torch", "triton", "numba", "cupy", "numpy")
_SEPARATE_FIELDS = ("profile", "provenance", "assumed", "fingerprint", "sources", "kernels", "triton_off", "costs")


def examine() -> dict[str, Any]:
    """Examine this machine. Imports torch, but no kernel framework: versions come from package metadata.

    Returns:
        verdict: a sentence about the first GPU, or about the CPU without a GPU.
        nsa_sel, python, platform: versions.
        packages: import name -> version, None if not installed.
        devices: for each device its settings or the error of reading them, and its backends with the reasons why no
        call can use them. flags: the flags that are set.
        unknown_variables: NSA_* variables that are not flags, with the flag of a similar name.
        omp_wait_policy: the variable OMP_WAIT_POLICY where torch and Numba share the CPU (None: not set); "" without
        Numba.
    """
    packages = {name: registry.version_of(name) for name in PACKAGES}
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    unknown = unknown_variables()
    flags = sorted(name for name in os.environ if name.startswith("NSA_") and name not in unknown)
    return {
        "verdict": _verdict(device_info(devices[1] if len(devices) > 1 else devices[0])),
        "nsa_sel": nsa_sel.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "devices": [_examine_device(device_info(device)) for device in devices],
        "flags": {name: _utf8(os.environ[name]) for name in flags},
        "unknown_variables": [{"name": _utf8(name), "did_you_mean": meant} for name, meant in unknown.items()],
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY") if packages["numba"] else "",
    }


def text(report: dict[str, Any], columns: int = 0) -> str:
    """Format a report for a terminal of `columns` columns (0: unlimited)."""
    packages = [f"{name} {version or 'not installed'}" for name, version in report["packages"].items()]
    lines = [report["verdict"], "", f"nsa-sel {report['nsa_sel']}, Python {report['python']}, {report['platform']}", ", ".join(packages)]
    for entry in report["devices"]:
        device, settings = entry["device"], entry["settings"]
        facts = f", SM {device.sm // 10}.{device.sm % 10}, {device.sm_count} SMs, {device.shared_memory} bytes shared" if device.sm else ""
        lines += ["", f"device {device.name}{facts}"]
        if settings is None:
            lines.append(f"error: {entry['error']}")
            continue
        lines.append(f"profile {settings.profile}, fingerprint {settings.fingerprint}: {settings.provenance}")
        if settings.assumed:
            lines.append(f"assumed, not measured here: values of {settings.assumed}")
        if settings.triton_off:
            lines.append(f"rule {settings.triton_off.rule}: {settings.triton_off.evidence}; to re-open: {settings.triton_off.reopen}")
        rows = []
        for field in settings.__struct_fields__:
            value = getattr(settings, field)
            if field not in _SEPARATE_FIELDS:
                value = ", ".join(f"{key} {entry}" for key, entry in value.items()) if isinstance(value, dict) else value
                value = ", ".join(map(str, value)) if isinstance(value, tuple) else value
                rows.append((field, "-" if value is None else value, settings.sources.get(field, "built-in")))
        if settings.costs:
            rows.append(
                ("costs", f"{len(settings.costs.models)} models, see --json: {settings.costs.provenance}", settings.sources["costs"])
            )
        rows.append(("kernels", f"{len(settings.kernels)} kernel configs, see --json", settings.tuned or "base.yaml and profile"))
        status = [
            (b["name"], "\n".join(f"{r.kind}: {r.words}" for r in b["lacks"]) or "available", b["summary"]) for b in entry["backends"]
        ]
        lines += ["", table(["setting", "value", "source"], rows, columns=columns)]
        lines += ["", table(["backend", "here", "what it is"], status, width=70, columns=columns)]
    lines += ["", "flags set: " + (", ".join(f"{name}={value}" for name, value in report["flags"].items()) or "none")]
    policy = report["omp_wait_policy"]
    if policy is None or (policy and policy.upper() != "PASSIVE"):
        lines.append(
            f"OMP_WAIT_POLICY is {policy or 'not set'}: where other work shares the CPU's cores, torch's and Numba's threads may slow each"
            " other down 2 to 10 times; set OMP_WAIT_POLICY=PASSIVE before Python starts"
        )
    elif policy:
        lines.append(f"OMP_WAIT_POLICY is {policy}: torch's and Numba's threads share the CPU's cores")
    for unknown in report["unknown_variables"]:
        hint = f"; did you mean {unknown['did_you_mean']}?" if unknown["did_you_mean"] else ""
        lines.append(f"unknown variable {unknown['name']} has no effect{hint}")
    return "\n".join(lines)


def _verdict(device: DeviceInfo) -> str:
    """Say which backend runs the example request on the device, and why."""
    try:
        decision = explain_request(example_request(needs_grad=True), device)
        problem = refusal(decision)
    except NsaSelError as error:
        problem = str(error)
    if problem is not None:
        return f"nothing runs your calls on this machine ({device.name}): {problem}"
    backward = f", {decision.backward} their backward pass" if decision.backward != decision.forward else ""
    verb = {"least": "has the", "first": "is the"}.get(decision.rule.partition(" ")[0], "is")
    reason = missed(decision)
    return (
        f"{decision.forward} runs your calls on this machine ({device.name}){backward}, because it {verb} {decision.rule}"
        f"{f'. But {reason.words}' if reason else ''}"
    )


def _utf8(text: str) -> str:
    """Escape the bytes of an environment variable that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _examine_device(device: DeviceInfo) -> dict[str, Any]:
    try:
        examples = example_request, example_choice, example_loss
        decision, *others = (explain_request(example(needs_grad=True), device) for example in examples)
    except NsaSelError as error:
        return {"device": device, "settings": None, "error": str(error), "backends": []}
    backends = []
    specs = registry.backends() | registry.backends("choose") | registry.backends("index_loss")
    for verdict in (*decision.verdicts, *(verdict for other in others for verdict in other.verdicts)):
        # Leave out reasons that concern the example request, not the machine.
        reasons = dict.fromkeys((*verdict.forward, *verdict.backward))
        lacks = [reason for reason in reasons if reason.kind in REFUSING_KINDS and not reason.field.startswith("request.")]
        backends.append({"name": verdict.backend, "summary": specs[verdict.backend].summary, "lacks": lacks})
    return {"device": device, "settings": decision.settings, "error": None, "backends": backends}
