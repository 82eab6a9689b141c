"""Merge YAML files and environment flags into one validated `Settings`. Later sources win; each value records its
source.

Order: configs/base.yaml < the GPU's profile in configs/devices/ < the file named by NSA_SEL_CONFIG < environment flags.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nsa_sel.core.decision import Decision
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ConfigError, first_time, warn
from nsa_sel.settings import flags, private
from nsa_sel.settings.schema import DIRECTIONS, ConfigFile, Direction, Settings
from nsa_sel.telemetry import events

MAX_FILE_BYTES = 1 << 16  # of a configuration file; the shipped ones have a tenth of that
MIN_KERNEL_SM = 80  # oldest compute capability that the kernels run on; unmeasured GPUs from here on use a measured GPU's values
ONE_SM_ONLY = ("cupy-cuda/", "cuda-block/", "choose-cuda/")  # cost models of backends whose kernels depend on the compute capability
BASE = "base.yaml"
SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes per block, by compute capability


GPUS = {  # by the names of `nsa-sel explain --device`
    short: DeviceInfo(kind="cuda", name=name, sm=sm, sm_count=sm_count, shared_memory=SHARED_MEMORY[sm])
    for short, name, sm, sm_count in (
        ("a100", "NVIDIA A100-SXM4-80GB", 80, 108),
        ("rtx3090", "NVIDIA GeForce RTX 3090", 86, 82),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 89, 128),
        ("l40s", "NVIDIA L40S", 89, 142),
        ("h100", "NVIDIA H100 80GB HBM3", 90, 132),
        ("h200", "NVIDIA H200", 90, 132),
        ("b200", "NVIDIA B200", 100, 148),
        ("rtx5090", "NVIDIA GeForce RTX 5090", 120, 170),
    )
}


_MIN_L = "a whole number >= 0 and below 2^31, or a mapping from forward, backward, decode to such numbers"
_TILE = "a power of two from 16 to 512, or null"
_KERNEL = "powers of two up to 1024 for block_l, rows and num_warps, and num_stages from 1 to 1024"
_ALLOWED = {  # what msgspec's messages do not say, by path
    "runtime.sel_triton_min_L": _MIN_L, "runtime.sel_triton_min_L[...]": _MIN_L,
    "runtime.workspace_bytes": "a whole number >= 0 and below 2^63",
    "runtime.block_l": _TILE, "runtime.block_d": _TILE, "runtime.block_dv": _TILE,
    "runtime.count_sharing": "off, first, or a whole number of calls >= 2 and below 2^31",
    **{f"kernels[...].{field}": _KERNEL for field in ("block_l", "rows", "num_warps", "num_stages")},
}  # fmt: skip


def parse_config(text: bytes, source: str, shipped: bool = False) -> ConfigFile:
    """Parse and check a configuration file. Long files and YAML aliases, which can expand exponentially, are refused
    before parsing.

    Args:
        text: YAML.
        source: the file's name, for messages.
        shipped: parse with libyaml, 8x faster. User files may be nested deeper than libyaml accepts.

    Returns:
        The file's fields.

    Raises:
        ConfigError: for unknown fields, wrong types and numbers out of range, with the field's path.
    """
    import yaml  # imported here because Decision.replay needs no YAML

    allowed, remedy = "the fields of nsa_sel.settings.schema.ConfigFile", "correct the field; configs/base.yaml shows every field"
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(source, f"longer than {MAX_FILE_BYTES} bytes", allowed, "remove everything that is not configuration")

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="an alias (*name); write its value out", problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
            return super().compose_node(parent, index)

    document: Any = None
    try:
        document = yaml.load(text, getattr(yaml, "CSafeLoader", Loader) if shipped else Loader)
        config = msgspec.convert(document, ConfigFile)
        msgspec.json.encode(config)  # fingerprints and logs encode it later
    except msgspec.ValidationError as error:
        path = str(error).rpartition("`$.")[2].rstrip("`")
        if path not in _ALLOWED:
            raise ConfigError(source, str(error), allowed, remedy) from error
        for name in path.partition("[...]")[0].split("."):
            document = document[name]
        raise ConfigError(f"{source}: {path}", document, _ALLOWED[path], remedy) from error
    except yaml.YAMLError as error:
        raise ConfigError(source, str(error), allowed, remedy) from error
    except RecursionError as error:
        raise ConfigError(source, "nested too deeply", allowed, remedy) from error
    except Exception as error:  # PyYAML does not wrap Python's errors for bad numbers, dates and tags
        message = str(error).partition(";")[0]  # for long numbers Python appends advice about its own limits
        raise ConfigError(source, f"with a value that can't be read ({type(error).__name__}: {message})", allowed, remedy) from error
    return config


@functools.cache
def shipped_configs() -> dict[str, ConfigFile]:
    """Return base.yaml and every device profile of configs/, by file name."""
    folder = resources.files("nsa_sel") / "configs"
    files = [folder / BASE, *sorted((folder / "devices").iterdir(), key=lambda entry: entry.name)]
    return {file.name: parse_config(file.read_bytes(), file.name, shipped=True) for file in files if file.name.endswith(".yaml")}


class Profile(NamedTuple):
    """The profile of configs/devices/ for a device."""

    name: str
    assumed: str | None  # the profile whose values are used although they were measured on another device
    layers: tuple[tuple[str, ConfigFile], ...]  # applied over base.yaml; later ones win


def profile_for(device: DeviceInfo) -> Profile | None:
    """Return the profile that names `device` or its compute capability, or the nearest measured one from SM 8.0 on,
    marked as assumed.

    Returns:
        The profile, or None if only the built-in values apply. A profile of another compute capability leaves out its
        kernel configs and the cost models that depend on it.
    """
    shipped, assumed = shipped_configs(), None
    own = [
        (len(config.match.name), name)
        for name, config in shipped.items()
        if config.match and (config.match.kind, config.match.sm) == (device.kind, device.sm) and config.match.name in device.name
    ]
    if own:
        name = max(own)[1]
        assumed = shipped[name].assumes
    elif device.kind == "cuda" and (device.sm or 0) >= MIN_KERNEL_SM:
        name = assumed = nearest_measured(device.sm or 0)
    else:
        return None
    layers = []
    for layer in dict.fromkeys((assumed or name, name)):
        config = shipped[layer]
        if config.match is not None and config.match.sm != device.sm:
            costs = config.costs
            if costs:
                models = {model: cost for model, cost in costs.models.items() if not model.startswith(ONE_SM_ONLY)}
                costs = msgspec.structs.replace(costs, models=models)
            config = msgspec.structs.replace(config, kernels={}, costs=costs)
        if layer != BASE:
            layers.append((layer, config))
    return Profile(name, assumed, tuple(layers))


def nearest_measured(sm: int) -> str:
    """Return the name of the measured profile with the closest compute capability. Ties: the newest, then the one with
    the most rows."""

    def order(measured: tuple[str, ConfigFile]) -> tuple[int, int, int]:
        config = measured[1]
        measured_sm = (config.match and config.match.sm) or 0
        return abs(measured_sm - sm), -measured_sm, -sum(model.rows for model in config.costs.models.values()) if config.costs else 0

    return min(((name, config) for name, config in shipped_configs().items() if config.match and config.evidence), key=order)[0]


def settings_for(device: DeviceInfo) -> Settings:
    """Return the effective settings on `device`, cached until a flag changes.

    Args:
        device: its facts.

    Raises:
        ConfigError: a flag or a file has a bad value.
    """
    return _resolve(device, flags.environment())


def forget_settings() -> None:
    """Drop cached settings, so that the file named by NSA_SEL_CONFIG is read again."""
    _resolve.cache_clear()


def by_direction(value: int | dict[Direction, int], before: int | dict[Direction, int] | None) -> int | dict[Direction, int]:
    """Return `value` with missing directions filled in from `before`; one number if all directions agree."""
    if isinstance(value, int):
        return value
    old = before if isinstance(before, dict) else dict.fromkeys(DIRECTIONS, before or 0)
    merged = {each: value.get(each, old[each]) for each in DIRECTIONS}
    return merged["forward"] if len(set(merged.values())) == 1 else merged


@functools.lru_cache(maxsize=64)
def _resolve(device: DeviceInfo, _environment: tuple[str | None, ...]) -> Settings:
    for name in flags.NAMES:
        raw = os.environ.get(name, "")
        if raw.encode(errors="ignore").decode() != raw:  # logs and fingerprints are UTF-8
            raise ConfigError(name, raw, "text in UTF-8", "unset it, or give a file or folder another name")
    profile, user_file = profile_for(device), os.environ.get(flags.CONFIG_FLAG) or None
    assumed = profile.assumed if profile else None
    kernels = shipped_configs()[BASE].kernels
    values: dict[str, Any] = {"config_file": user_file, "assumed": assumed, "kernels": kernels}
    sources: dict[str, str] = {}
    layers = [(BASE, shipped_configs()[BASE]), *(profile.layers if profile else ())]
    if user_file is not None:
        try:
            layers.append((user_file, parse_config(private.read_regular(Path(user_file), MAX_FILE_BYTES + 1), user_file)))
        except OSError as error:
            raise ConfigError(
                flags.CONFIG_FLAG, user_file, f"a readable YAML file; reading this one: {error.strerror}", "correct the path, or unset it"
            ) from error
    for name, layer in layers:
        unknown = sorted(set(layer.kernels) - set(kernels))
        if unknown:
            raise ConfigError(f"{name}: kernels", ", ".join(unknown), ", ".join(kernels), "correct the name")
        new = {field: value for field, value in msgspec.structs.asdict(layer.runtime).items() if value is not msgspec.UNSET}
        if "sel_triton_min_L" in new:
            new["sel_triton_min_L"] = by_direction(new["sel_triton_min_L"], values.get("sel_triton_min_L"))
        if isinstance(new.get("autotune"), bool):
            new["autotune"] = "on" if new["autotune"] else "off"
        if new.get("count_sharing") is False:
            new["count_sharing"] = "off"
        if layer.costs:
            new["costs"] = layer.costs
        if name != BASE:  # built-in values have no source
            source = f"{name} (assumed)" if name == assumed else name
            sources |= dict.fromkeys((*new, *(f"kernels.{kernel}" for kernel in layer.kernels)), source)
        values |= {**new, "kernels": {**values["kernels"], **layer.kernels}, "provenance": layer.provenance}
        values |= {"profile": "built-in" if name == BASE else name, **({"triton_off": layer.triton_off} if layer.triton_off else {})}
    for flag in flags.FLAGS:
        text = os.environ.get(flag.name)
        if text is not None:
            values[flag.field], sources[flag.field] = flags.parse_flag(flag, text), flag.name
    asked = [field for field in ("debug_triton", "debug_timing", "debug_compare") if values.get(field)]
    if asked and "debug_log" not in sources:  # a flag that asks for events also shows them
        values["debug_log"], sources["debug_log"] = "stderr", sources[asked[0]]
    if profile and assumed == profile.name and not user_file:
        values["provenance"] = f"assumed, no profile names this device; measured on another one: {values['provenance']}"
    digest = hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()[:12]
    return Settings(**values, sources=sources, fingerprint=digest)


def warn_if_assumed(decision: Decision) -> None:
    """Warn, once per process and device, that a policy used values that were not measured on the device, with the
    command to measure.

    Silent where a backend is forced, and where the user's own tuning or configuration file is in force.
    """
    settings, device = decision.settings, decision.device
    quiet = settings.assumed is None or settings.tuned is not None or settings.config_file is not None or decision.override is not None
    if quiet or not first_time("assumed", device):
        return
    off, command = settings.triton_off, "nsa-sel tune"
    if off is not None and not settings.triton_force:
        chosen, command = f"{off.rule} keeps Triton off on its compute capability and packed SDPA runs, which may be far slower", off.reopen
    elif settings.assumed == "base.yaml":
        chosen = "backends are chosen by the built-in values"
    else:
        chosen = f"backends are chosen by the values of {settings.assumed}, which were measured on another GPU"
    words = f"nobody has measured {device.name} (compute capability {(device.sm or 0) / 10}): {chosen}. Measure it with: {command}"
    events.emit(
        "sel.profile.assumed", logging.WARNING, device=device.name, sm=device.sm, profile=settings.profile, assumed=settings.assumed,
        rule=off.rule if off else None, command=command, words=words,
    )  # fmt: skip
    warn(words)
