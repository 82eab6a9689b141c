"""Merge YAML files and environment flags into one validated `Settings`. Later sources win; each value records its source.

Order: configs/base.yaml < the GPU's profile in configs/devices/ < the file named by NSA_SEL_CONFIG < environment flags.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nsa_sel.core.request import SHARING_TOKENS, DeviceInfo
from nsa_sel.errors import ConfigError
from nsa_sel.settings import flags, private
from nsa_sel.settings.schema import COST_TERMS, WAYS, ConfigFile, Costs, KernelConfig, Runtime, Settings, Way

MAX_FILE_BYTES = 1 << 16  # of a configuration file; the shipped ones have a tenth of that
MIN_KERNEL_SM = 80  # oldest compute capability that the kernels run on; unmeasured GPUs from here on use a measured GPU's values
ONE_SM_ONLY = ("cupy-cuda/", "cuda-block/", "choose-cuda/")  # cost models of backends whose kernels depend on the compute capability
BASE = "base.yaml"


# Files


def parse_config(text: bytes, source: str, shipped: bool = False) -> ConfigFile:
    """Parse and check a configuration file.

    Args:
        text: YAML.
        source: the file's name, for messages.
        shipped: parse with libyaml, 8x faster. User files may be nested deeper than libyaml accepts.

    Returns:
        The file's fields.

    Raises:
        ConfigError: for unknown fields, wrong types and numbers out of range, with the field's path.
    """
    config = _from_yaml(text, source, shipped)
    runtime = config.runtime
    for field, bits in (("sel_triton_min_L", 31), ("workspace_bytes", 63)):
        number = getattr(runtime, field)
        numbers = number.values() if isinstance(number, dict) else () if number is msgspec.UNSET else (number,)
        if not all(0 <= value < 1 << bits for value in numbers):
            raise ConfigError(f"{source}: runtime.{field}", number, f"a whole number >= 0 and below 2^{bits}", "use an allowed value")
    for field in ("block_l", "block_d", "block_dv"):
        tile = getattr(runtime, field)
        if isinstance(tile, int) and not flags.is_tile(tile):
            raise ConfigError(f"{source}: runtime.{field}", tile, flags.ALLOWED["tile"], "use an allowed value, or null")
    prior = runtime.sharing_prior
    if prior is not msgspec.UNSET:
        rising = prior == sorted(prior) and all(1 <= number < 1e6 for number in prior)
        if not rising or len(prior) != len(SHARING_TOKENS):
            allowed = f"{len(SHARING_TOKENS)} rising numbers from 1 on, for tiles of {SHARING_TOKENS} tokens"
            raise ConfigError(f"{source}: runtime.sharing_prior", prior, allowed, "see configs/base.yaml")
    interval = runtime.count_sharing
    if interval is True or (type(interval) is int and not flags.is_count_interval(interval)):  # YAML reads on and off as true and false
        raise ConfigError(f"{source}: runtime.count_sharing", interval, flags.ALLOWED["counting"], "use an allowed value")
    if config.costs:
        check_costs(source, config.costs)
    for name, kernel in config.kernels.items():
        check_kernel(source, name, kernel)
    return config


def _from_yaml(text: bytes, source: str, shipped: bool) -> ConfigFile:
    """Return the fields of a file. Long files and YAML aliases are refused before parsing: aliases can expand exponentially."""
    import yaml  # imported here because Decision.replay needs no YAML

    allowed, remedy = "the fields of nsa_sel.settings.schema.ConfigFile", "correct the field; configs/base.yaml shows every field"
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(source, f"longer than {MAX_FILE_BYTES} bytes", allowed, "remove everything that is not configuration")

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="an alias (*name); write its value out", problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
            return super().compose_node(parent, index)

    try:
        config = msgspec.convert(yaml.load(text, getattr(yaml, "CSafeLoader", Loader) if shipped else Loader), ConfigFile)
        msgspec.json.encode(config)  # fingerprints and logs encode it later
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise ConfigError(source, str(error), allowed, remedy) from error
    except RecursionError as error:
        raise ConfigError(source, "nested too deeply", allowed, remedy) from error
    except Exception as error:  # PyYAML does not wrap Python's errors for bad numbers, dates and tags
        message = str(error).partition(";")[0]  # for long numbers Python appends advice about its own limits
        raise ConfigError(source, f"with a value that can't be read ({type(error).__name__}: {message})", allowed, remedy) from error
    return config


def check_kernel(source: str, name: str, kernel: KernelConfig, remedy: str = "correct the numbers") -> None:
    """Raise ConfigError for a kernel config that no kernel accepts."""
    power = all(0 < x <= 1024 and x & (x - 1) == 0 for x in (kernel.block_l, kernel.num_warps, kernel.rows))
    if not power or not 1 <= kernel.num_stages <= 1024:
        allowed = "powers of two for block_l, rows, num_warps and num_stages >= 1, all up to 1024"
        raise ConfigError(f"{source}: kernels.{name}", msgspec.to_builtins(kernel), allowed, remedy)


def check_costs(source: str, costs: Costs, remedy: str = "correct it") -> None:
    """Raise ConfigError for a cost model with an unknown term or a negative price."""
    for name, model in costs.models.items():
        unknown = sorted(set(model.terms) - set(COST_TERMS))
        if unknown:
            raise ConfigError(f"{source}: costs.models.{name}", ", ".join(unknown), ", ".join(COST_TERMS), remedy)
        if not all(math.isfinite(number) and number >= 0 for number in (model.host, *model.terms.values())):
            raise ConfigError(f"{source}: costs.models.{name}", msgspec.to_builtins(model), "numbers >= 0", remedy)


@functools.cache
def shipped_configs() -> dict[str, ConfigFile]:
    """Return base.yaml and every device profile of configs/, by file name."""
    folder = resources.files("nsa_sel") / "configs"
    files = [folder / BASE, *sorted((folder / "devices").iterdir(), key=lambda entry: entry.name)]
    return {file.name: parse_config(file.read_bytes(), file.name, shipped=True) for file in files if file.name.endswith(".yaml")}


# Profiles


class Profile(NamedTuple):
    """The profile of configs/devices/ for a device."""

    name: str
    assumed: str | None  # the profile whose values are used although they were measured on another device
    layers: tuple[tuple[str, ConfigFile], ...]  # applied over base.yaml; later ones win


def profile_for(device: DeviceInfo) -> Profile | None:
    """Return the profile that names `device` or its compute capability, or the nearest measured one from SM 8.0 on, marked as assumed.

    Returns:
        The profile, or None if only the built-in values apply.
    """
    shipped = shipped_configs()
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
    names = [layer for layer in dict.fromkeys((assumed, name) if assumed else (name,)) if layer != BASE]
    return Profile(name, assumed, tuple((layer, _for(device, shipped[layer])) for layer in names))


def nearest_measured(sm: int) -> str:
    """Return the name of the measured profile with the closest compute capability. Ties: the newest, then the one with the most rows."""
    measured = {name: config for name, config in shipped_configs().items() if config.match and config.evidence}

    def order(name: str) -> tuple[int, int, int]:
        match, costs = measured[name].match, measured[name].costs
        measured_sm = match.sm or 0 if match else 0
        return abs(measured_sm - sm), -measured_sm, -sum(model.rows for model in costs.models.values()) if costs else 0

    return min(measured, key=order)


def _for(device: DeviceInfo, config: ConfigFile) -> ConfigFile:
    """Return a profile without the parts that depend on the compute capability if `device` has another one."""
    if config.match is None or config.match.sm == device.sm:
        return config
    costs = config.costs
    if costs:
        models = {name: model for name, model in costs.models.items() if not name.startswith(ONE_SM_ONLY)}
        costs = msgspec.structs.replace(costs, models=models)
    return msgspec.structs.replace(config, kernels={}, costs=costs)


# Effective settings


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


def by_way(value: int | dict[Way, int], before: int | dict[Way, int] | None) -> int | dict[Way, int]:
    """Return `value` with missing directions filled in from `before`; one number if all directions agree."""
    if isinstance(value, int):
        return value
    old = before if isinstance(before, dict) else dict.fromkeys(WAYS, before or 0)
    merged = {way: value.get(way, old[way]) for way in WAYS}
    return merged["forward"] if len(set(merged.values())) == 1 else merged


@functools.lru_cache(maxsize=64)
def _resolve(device: DeviceInfo, _environment: tuple[str | None, ...]) -> Settings:
    for name in flags.NAMES:
        raw = os.environ.get(name, "")
        if raw.encode(errors="ignore").decode() != raw:  # logs and fingerprints are UTF-8
            raise ConfigError(name, raw, "text in UTF-8", "unset it, or give a file or folder another name")
    profile, user_file = profile_for(device), os.environ.get(flags.CONFIG_FLAG) or None
    assumed = profile.assumed if profile else None
    base = shipped_configs()[BASE]
    values: dict[str, Any] = {**_values(BASE, base, {}), "profile": "built-in", "config_file": user_file, "assumed": assumed}
    sources: dict[str, str] = {}
    layers = [*(profile.layers if profile else ()), *([(user_file, _read_user_file(user_file))] if user_file else [])]
    for name, layer in layers:
        new = _values(name, layer, values)
        source = f"{name} (assumed)" if name == assumed else name
        sources |= {field: source for field in new if field in Runtime.__struct_fields__ or field == "costs"}
        sources |= {f"kernels.{kernel}": source for kernel in layer.kernels}
        values |= {**new, "profile": name}
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


def _read_user_file(name: str) -> ConfigFile:
    try:
        return parse_config(private.read_regular(Path(name), MAX_FILE_BYTES + 1), name)
    except OSError as error:
        allowed = f"a readable YAML file; reading this one: {error.strerror}"
        raise ConfigError(flags.CONFIG_FLAG, name, allowed, "correct the path, or unset it") from error


def _values(name: str, layer: ConfigFile, before: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Settings that a file sets, over the values of the files before it."""
    allowed = before["kernels"] if before else layer.kernels
    unknown = sorted(set(layer.kernels) - set(allowed))
    if unknown:
        raise ConfigError(f"{name}: kernels", ", ".join(unknown), ", ".join(allowed), "correct the name")
    values = {field: getattr(layer.runtime, field) for field in Runtime.__struct_fields__}
    values = {field: tuple(value) if isinstance(value, list) else value for field, value in values.items() if value is not msgspec.UNSET}
    if "sel_triton_min_L" in values:
        values["sel_triton_min_L"] = by_way(values["sel_triton_min_L"], before.get("sel_triton_min_L"))
    if isinstance(values.get("autotune"), bool):
        values["autotune"] = "on" if values["autotune"] else "off"
    if values.get("count_sharing") is False:
        values["count_sharing"] = "off"
    values |= {field: value for field in ("triton_off", "costs") if (value := getattr(layer, field))}
    return {**values, "kernels": {**before.get("kernels", {}), **layer.kernels}, "provenance": layer.provenance}
