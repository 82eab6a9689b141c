"""From YAML files and environment flags to one validated `Settings`; later sources win, and each value knows its source.

Order: configs/base.yaml < the GPU's profile in configs/devices/ < the file named by NSA_SEL_CONFIG < environment flags.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import math
import os
import warnings
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from nsa_sel.errors import ConfigError
from nsa_sel.request import SHARING_TOKENS, DeviceInfo

ForcePath = Literal["dense", "varlen", "auto"]
Way = Literal["forward", "backward", "decode"]  # decode: the forward of one query a sequence
WAYS: tuple[Way, ...] = get_args(Way)
Autotune = Literal["on", "off", "warmup", "warmup-tune"]


class KernelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one kernel is launched. `block_l`: keys a step; `rows`: query rows (tokens x heads) a step, where it applies."""

    block_l: int
    num_warps: int
    num_stages: int
    rows: int = 16
    loads: Literal["pointer", "tma"] = "pointer"

    def config_id(self, kernel: str) -> str:
        """The name under which events and decisions mention this launch: "triton-group/forward:tma-L64-R16-w1-s2"."""
        return f"{kernel}:{self.loads}-L{self.block_l}-R{self.rows}-w{self.num_warps}-s{self.num_stages}"


class Runtime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `runtime:` part of a configuration file; every field may be left out of a profile."""

    use_triton_sel: bool | msgspec.UnsetType = msgspec.UNSET
    sel_triton_min_L: int | dict[Way, int] | msgspec.UnsetType = msgspec.UNSET  # of the ways that a mapping leaves out, what held before
    workspace_bytes: int | msgspec.UnsetType = msgspec.UNSET
    prefer_forward: list[str] | msgspec.UnsetType = msgspec.UNSET
    prefer_backward: list[str] | msgspec.UnsetType = msgspec.UNSET
    sharing_prior: list[float] | msgspec.UnsetType = msgspec.UNSET
    autotune: Autotune | bool | msgspec.UnsetType = msgspec.UNSET  # YAML reads on and off as true and false
    block_l: int | msgspec.UnsetType | None = msgspec.UNSET
    block_d: int | msgspec.UnsetType | None = msgspec.UNSET
    block_dv: int | msgspec.UnsetType | None = msgspec.UNSET


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which devices a profile speaks for: `kind`, and for GPUs the compute capability and a part of the name ("": every name)."""

    kind: Literal["cpu", "cuda"]
    sm: int | None = None
    name: str = ""


class TritonOff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device rule that turns Triton off, with the record behind it and the command that would re-open it."""

    rule: str
    evidence: str
    reopen: str


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long one backend takes one way: the longer of `host` and the sum of coefficient x counted work (policies/cost.py)."""

    host: float  # ms that queueing the call takes, however little the device has to do
    terms: dict[str, float]  # a term of COST_TERMS -> ms a unit
    rows: int  # measured rows behind it
    median_error: float  # of the predictions for those rows, relative to the measured time
    worst_error: float


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `costs:` part of a profile: predicted times, for selections of whole blocks in the dtypes that the rows speak for."""

    provenance: str
    dtypes: tuple[str, ...]
    models: dict[str, CostModel]  # "triton-tile/forward", "triton-tile/backward", "triton-tile/decode" (S = 1)


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured time: median, 20th and 80th percentile in ms."""

    backend: str
    ms_median: float
    ms_p20: float
    ms_p80: float


class Threshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why `sel_triton_min_L` is what it is for one way: the closest of the compared cases at that L, both sides."""

    verdict: Literal["measured", "undecided"]  # undecided: spreads overlap, or the margin is missed; the value stays as it was
    value: int | None
    margin: float  # by which Triton must be faster, spreads apart, in every case from `value` on
    cases: int  # in which both sides were measured
    closest: str  # the case of the two times; of an undecided threshold the one that stands against it
    triton: Side
    packed: Side


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of committed rows that values come from, and what its first row was measured with."""

    file: str
    sha256: str
    rows: int
    device: str
    versions: dict[str, str]
    commit: str
    command: str


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `evidence:` part of a profile."""

    sources: tuple[Source, ...]
    sel_triton_min_L: dict[Way, Threshold]


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One YAML file of configs/. `assumes` names the profile of another device whose values hold here too, unmeasured; base.yaml: the
    built-in ones."""

    match: Match | None = None
    provenance: str
    assumes: str | None = None
    evidence: Evidence | None = None
    runtime: Runtime = Runtime()
    triton_off: TritonOff | None = None
    costs: Costs | None = None
    kernels: dict[str, KernelConfig] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The effective values for one device, as a decision records them."""

    backend: str | None = None
    use_triton_sel: bool
    sel_triton_min_L: int | dict[Way, int]  # all ways, where they differ
    triton_force: bool = False
    triton_group: bool = True
    triton_allow_grad: bool = True
    triton_require_align: bool = False
    triton_force_path: ForcePath = "auto"
    triton_double_buffer: bool | None = None
    autotune: Autotune = "on"
    block_l: int | None = None
    block_d: int | None = None
    block_dv: int | None = None
    use_sel_pack: bool = True
    force_parity: bool = False
    debug_triton: bool = False
    debug_log: str | None = None
    debug_timing: bool = False
    debug_compare: bool = False
    debug_nvtx: bool = False
    workspace_bytes: int
    prefer_forward: tuple[str, ...]
    prefer_backward: tuple[str, ...]
    sharing_prior: tuple[float, ...] = (1.0,) * len(SHARING_TOKENS)
    triton_off: TritonOff | None = None
    costs: Costs | None = None
    kernels: dict[str, KernelConfig]
    tuned: str | None = None  # the user's own tuning that is in force: file and fingerprint (nsa_sel/tuned.py)
    config_file: str | None = None  # the file that NSA_SEL_CONFIG names: its preference goes before predicted times
    profile: str  # file name of the profile, or "built-in"
    provenance: str
    assumed: str | None = None  # the profile of another device (base.yaml: of none) whose values are taken over unmeasured
    sources: dict[str, str]  # field -> where its value comes from, for the fields that are not built-in
    fingerprint: str  # of all the values above

    def min_length(self, way: Way) -> int:
        """The L from which Triton may run, one way."""
        return self.sel_triton_min_L if isinstance(self.sel_triton_min_L, int) else self.sel_triton_min_L[way]

    def kernel(self, name: str) -> KernelConfig:
        """The launch of one kernel with the overrides of block size and double buffering applied."""
        config = self.kernels[name]
        if self.block_l is not None:
            config = msgspec.structs.replace(config, block_l=self.block_l)
        if self.triton_double_buffer is not None:
            stages = max(2, config.num_stages) if self.triton_double_buffer else 1
            config = msgspec.structs.replace(config, num_stages=stages)
        return config


COST_TERMS = {  # what a cost model may weigh; policies/cost.py counts them
    "launch": "1 a call",
    "walk": "thousands of keys that the program of one row visits one after another",
    "split-walk": "the same of one part of a row, where rows are few and each is split among programs",
    "union": "thousands of keys that the program of one tile of adjacent tokens visits one after another",
    "pairs": "millions of (row, block) pairs",
    "rows": "GB of q and o, and of their gradients backward",
    "read": "GB of K and V that one program a row loads for all its heads",
    "read-wide": "the same where a key and its value are more than 256 numbers of a 16-bit type: other launches, other speed",
    "reread": "GB of K and V that one program a row and head loads",
    "reread-wide": "likewise",
    "distinct": "GB of K and V that 64 adjacent rows load when each block is counted once",
    "tile": "TFLOP of tiles of adjacent tokens over the union of their blocks",
    "tile-wide": "likewise",
    "exact": "TFLOP of blocks over the rows that chose them",
    "exact-wide": "likewise",
    "partials": "GB of queries gathered, and of partial outputs or dQ written and read, for each pair",
    "scores": "billions of (row, head, key) triples",
}


class Flag(msgspec.Struct, frozen=True):
    """One environment variable: the setting it sets and the values it takes."""

    name: str
    field: str
    kind: Literal["bool", "length", "tile", "path", "autotune", "text"]
    help: str


FLAGS = (
    Flag("NSA_SEL_BACKEND", "backend", "text", "name of the backend to use, or an error that says why it can't"),
    Flag("NSA_USE_TRITON_SEL", "use_triton_sel", "bool", "0 keeps Triton out, 1 lets the policy consider it"),
    Flag("NSA_SEL_TRITON_MIN_L", "sel_triton_min_L", "length", "Triton only from this many selected keys a row on"),
    Flag("NSA_TRITON_SEL_FORCE", "triton_force", "bool", "1 lifts the device rule that turns Triton off (experiments)"),
    Flag("NSA_SEL_TRITON_GROUP", "triton_group", "bool", "0 keeps triton-group out, so that triton-token is the Triton choice"),
    Flag("NSA_SEL_TRITON_ALLOW_GRAD", "triton_allow_grad", "bool", "0: no Triton when gradients are needed"),
    Flag("NSA_SEL_TRITON_REQUIRE_ALIGN", "triton_require_align", "bool",
         "1: Triton only for 16-byte aligned tensors and head dims that are multiples of 16"),
    Flag("NSA_SEL_TRITON_FORCE_PATH", "triton_force_path", "path", "dense: one range a row; varlen: any; auto"),
    Flag("NSA_SEL_TRITON_DB", "triton_double_buffer", "bool", "1: at least two pipeline stages; 0: one"),
    Flag("NSA_SEL_TRITON_BLOCK_L", "block_l", "tile", "keys a kernel step takes"),
    Flag("NSA_SEL_TRITON_BLOCK_D", "block_d", "tile", "tile width over Dk; a kernel holds Dk in one tile"),
    Flag("NSA_SEL_TRITON_BLOCK_DV", "block_dv", "tile", "tile width over Dv; a kernel holds Dv in one tile"),
    Flag("NSA_SEL_AUTOTUNE", "autotune", "autotune",
         "off: ignore what nsa-sel tune found; on: use it; warmup: compile at the first call per device; warmup-tune: tune lightly too"),
    Flag("NSA_USE_SEL_PACK", "use_sel_pack", "bool", "0 keeps packed SDPA out"),
    Flag("NSA_FORCE_PARITY", "force_parity", "bool", "1: packed SDPA, the reference path, for every call"),
    Flag("NSA_DEBUG_TRITON", "debug_triton", "bool", "1: sel.triton.* events for every launch; checks selections"),
    Flag("NSA_DEBUG_LOG", "debug_log", "text", "stderr or a file: events as JSON lines"),
    Flag("NSA_DEBUG_TIMING", "debug_timing", "bool", "1: events carry times (synchronises the device)"),
    Flag("NSA_DEBUG_COMPARE", "debug_compare", "bool", "1: every call is compared with packed SDPA; the MAE is logged"),
    Flag("NSA_DEBUG_NVTX", "debug_nvtx", "bool", "1: an NVTX range around each pass of a backend on a GPU, for its profilers"),
)  # fmt: skip
CONFIG_FLAG = "NSA_SEL_CONFIG"
CACHE_FLAG = "NSA_SEL_CACHE"  # the folder of what nsa-sel tune found, and of compiled CUDA kernels
TEST_FLAG = "NSA_TEST_TRITON_SEL"  # read by the tests alone
COMMIT_FLAG = "NSA_SEL_COMMIT"  # read by the benches alone
_FLAG_NAMES = (*(flag.name for flag in FLAGS), CONFIG_FLAG, CACHE_FLAG)
_NO_FLAGS = (None,) * len(_FLAG_NAMES)
_BOOLS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
_ALLOWED = {
    "bool": "0 or 1",
    "length": "a whole number >= 0",
    "tile": "a power of two from 16 to 512",
    "path": ", ".join(get_args(ForcePath)),
    "autotune": ", ".join(get_args(Autotune)),
    "text": "a name",
}


def parse_flag(flag: Flag, text: str) -> Any:
    """The value that `text` gives to `flag`. Raises ConfigError naming the flag, the text and what is allowed."""
    value: Any = None
    if flag.kind == "bool":
        value = _BOOLS.get(text.strip().lower())
    elif flag.kind in ("length", "tile") and text.strip().isdecimal():
        number = int(text)
        if flag.kind == "length" or (16 <= number <= 512 and number & (number - 1) == 0):
            value = number
    elif flag.kind == "path":
        value = text if text in get_args(ForcePath) else None
    elif flag.kind == "autotune":
        lowered = text.strip().lower()
        known = _BOOLS.get(lowered)
        value = lowered if lowered in get_args(Autotune) else known if known is None else ("on" if known else "off")
    elif flag.kind == "text":
        value = text.strip() or None
    if value is None:
        raise ConfigError(flag.name, text, _ALLOWED[flag.kind], f"unset it, or set it to what it takes: {flag.help}")
    return value


def parse_config(text: bytes, source: str) -> ConfigFile:
    """A configuration file from YAML, strictly: unknown fields and wrong types are refused with the field's path."""
    import yaml  # only here: the decision path of a call never reads YAML twice

    try:
        config = msgspec.convert(yaml.safe_load(text), ConfigFile)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        remedy = "mend the field; configs/base.yaml shows every field"
        raise ConfigError(source, str(error), "the fields of nsa_sel.config.ConfigFile", remedy) from error
    for field in ("sel_triton_min_L", "workspace_bytes"):
        number = getattr(config.runtime, field)
        if number is not msgspec.UNSET and any(each < 0 for each in (number.values() if isinstance(number, dict) else (number,))):
            raise ConfigError(f"{source}: runtime.{field}", number, "a whole number >= 0", "write what is allowed")
    for field in ("block_l", "block_d", "block_dv"):
        tile = getattr(config.runtime, field)
        if isinstance(tile, int) and not (16 <= tile <= 512 and tile & (tile - 1) == 0):
            raise ConfigError(f"{source}: runtime.{field}", tile, _ALLOWED["tile"], "write what is allowed, or null")
    prior = config.runtime.sharing_prior
    if prior is not msgspec.UNSET and (len(prior) != len(SHARING_TOKENS) or prior != sorted(prior) or not 1 <= prior[0] <= prior[-1] < 1e6):
        allowed = f"{len(SHARING_TOKENS)} rising numbers from 1 on, for tiles of {SHARING_TOKENS} tokens"
        raise ConfigError(f"{source}: runtime.sharing_prior", prior, allowed, "see configs/base.yaml")
    if config.costs:
        check_costs(source, config.costs)
    for name, kernel in config.kernels.items():
        check_kernel(source, name, kernel)
    return config


def check_kernel(source: str, name: str, kernel: KernelConfig, remedy: str = "mend the numbers") -> None:
    """ConfigError for a launch that no kernel takes."""
    power = all(x > 0 and x & (x - 1) == 0 for x in (kernel.block_l, kernel.num_warps, kernel.rows))
    if not power or kernel.num_stages < 1:
        allowed = "powers of two for block_l, rows, num_warps and num_stages >= 1"
        raise ConfigError(f"{source}: kernels.{name}", msgspec.to_builtins(kernel), allowed, remedy)


def check_costs(source: str, costs: Costs, remedy: str = "mend it") -> None:
    """ConfigError for a cost model with a term that nobody counts, or a price that is none."""
    for name, model in costs.models.items():
        unknown = sorted(set(model.terms) - set(COST_TERMS))
        if unknown:
            raise ConfigError(f"{source}: costs.models.{name}", ", ".join(unknown), ", ".join(COST_TERMS), remedy)
        if not all(math.isfinite(number) and number >= 0 for number in (model.host, *model.terms.values())):
            raise ConfigError(f"{source}: costs.models.{name}", msgspec.to_builtins(model), "numbers >= 0", remedy)


@functools.cache
def shipped_configs() -> dict[str, ConfigFile]:
    """base.yaml and every device profile of configs/, by file name."""
    folder = resources.files("nsa_sel") / "configs"
    files = [folder / "base.yaml", *sorted((folder / "devices").iterdir(), key=lambda entry: entry.name)]
    return {file.name: parse_config(file.read_bytes(), file.name) for file in files if file.name.endswith(".yaml")}


class Profile(NamedTuple):
    """A profile of configs/devices/ that holds on a device; `assumed`: the one whose values no measurement on it stands behind."""

    name: str
    config: ConfigFile
    assumed: str | None


def profile_for(device: DeviceInfo) -> Profile | None:
    """The profile that names `device`, else the one for every device of its compute capability, else another device's of the same
    compute capability, as assumed: a measured one before one that assumes itself. None: the built-in values alone."""
    alike = [
        (name, config)
        for name, config in shipped_configs().items()
        if config.match and (config.match.kind, config.match.sm) == (device.kind, device.sm)
    ]
    own = [(name, config) for name, config in alike if config.match and config.match.name in device.name]
    if own:
        name, config = max(own, key=lambda found: len(found[1].match.name) if found[1].match else 0)
        return Profile(name, config, config.assumes)
    for name, config in sorted(alike, key=lambda found: found[1].assumes is not None):
        return Profile(name, config, name)
    return None


def environment() -> tuple[str | None, ...]:
    """The raw values of all flags: settings and remembered decisions hold for one such tuple."""
    # os.environ.get encodes and decodes every name: 22 flags cost 9 us a call, the mapping underneath 1 us, and one look
    # whether it has any of them, which it usually has not, half of that.
    data = getattr(os.environ, "_data", None)
    encode = getattr(os.environ, "encodekey", None)
    if data is None or encode is None:
        return tuple(os.environ.get(name) for name in _FLAG_NAMES)
    names = _encoded_names(encode)
    return _NO_FLAGS if data.keys().isdisjoint(names) else tuple(map(data.get, names))


@functools.cache
def _encoded_names(encode: Any) -> tuple[Any, ...]:
    return tuple(encode(name) for name in _FLAG_NAMES)


def settings_for(device: DeviceInfo) -> Settings:
    """The effective settings on `device`, remembered until a flag changes. Raises ConfigError on a bad flag or file."""
    return _resolve(device, environment())


def unknown_variables() -> dict[str, str | None]:
    """Variables of the environment that look like a flag and are none, with the flag that may be meant."""
    known = (*_FLAG_NAMES, TEST_FLAG, COMMIT_FLAG)
    names = sorted(name for name in os.environ if name.startswith("NSA_") and name not in known)
    return {name: next(iter(difflib.get_close_matches(name, known, n=1)), None) for name in names}


@functools.cache  # once a process
def _warn_of_unknown(name: str, meant: str | None) -> None:
    hint = f"; did you mean {meant}?" if meant else "; `nsa-sel doctor` shows the flags that are set, PRD.md all there are"
    warnings.warn(f"nsa-sel: the environment variable {name} is no flag and has no effect{hint}", RuntimeWarning, stacklevel=2)


def debugging() -> bool:
    """Whether NSA_DEBUG_TRITON asks for the checks that read the device."""
    text = os.environ.get("NSA_DEBUG_TRITON")
    return text is not None and bool(parse_flag(next(flag for flag in FLAGS if flag.name == "NSA_DEBUG_TRITON"), text))


def forget_settings() -> None:
    """Read configuration files anew: they may have changed on disk."""
    shipped_configs.cache_clear()
    _resolve.cache_clear()
    _warn_of_unknown.cache_clear()


def by_way(value: int | dict[Way, int], before: int | dict[Way, int] | None) -> int | dict[Way, int]:
    """A threshold over the one that held before; one number where all ways agree."""
    if isinstance(value, int):
        return value
    known = before if isinstance(before, dict) else dict.fromkeys(WAYS, before or 0)
    merged = {way: value.get(way, known[way]) for way in WAYS}
    return merged["forward"] if len(set(merged.values())) == 1 else merged


@functools.lru_cache(maxsize=64)
def _resolve(device: DeviceInfo, _environment: tuple[str | None, ...]) -> Settings:
    layers = [("base.yaml", shipped_configs()["base.yaml"])]
    profile = profile_for(device)
    assumed = profile.assumed if profile else None
    if profile and assumed not in (None, "base.yaml", profile.name):
        layers.append((str(assumed), shipped_configs()[str(assumed)]))
    if profile:
        layers.append((profile.name, profile.config))
    user_file = os.environ.get(CONFIG_FLAG)
    if user_file:
        try:
            layers.append((user_file, parse_config(Path(user_file).read_bytes(), user_file)))
        except OSError as error:
            allowed = f"a readable YAML file; reading this one: {error.strerror}"
            raise ConfigError(CONFIG_FLAG, user_file, allowed, "mend the path, or unset it") from error

    values: dict[str, Any] = {"kernels": {}, "profile": "built-in", "config_file": user_file or None, "assumed": assumed}
    sources: dict[str, str] = {}
    for name, layer in layers:
        shown = f"{name} (assumed)" if name == assumed else name
        for field in Runtime.__struct_fields__:
            value = getattr(layer.runtime, field)
            if value is not msgspec.UNSET:
                if field == "sel_triton_min_L":
                    value = by_way(value, values.get(field))
                elif field == "autotune" and isinstance(value, bool):
                    value = "on" if value else "off"
                values[field] = tuple(value) if isinstance(value, list) else value
                if name != "base.yaml":
                    sources[field] = shown
        unknown = sorted(set(layer.kernels) - set(layers[0][1].kernels))
        if unknown:
            raise ConfigError(f"{name}: kernels", ", ".join(unknown), ", ".join(layers[0][1].kernels), "mend the name")
        values["kernels"] = {**values["kernels"], **layer.kernels}
        if name != "base.yaml":
            sources |= {f"kernels.{kernel}": shown for kernel in layer.kernels}
        values["provenance"] = layer.provenance
        if layer.triton_off:
            values["triton_off"] = layer.triton_off
        if layer.costs:
            values["costs"] = layer.costs
            sources["costs"] = shown
        if name != "base.yaml":
            values["profile"] = name
    for name, meant in unknown_variables().items():
        if name.startswith("NSA_SEL_"):  # others may be somebody else's
            _warn_of_unknown(name, meant)
    for flag in FLAGS:
        text = os.environ.get(flag.name)
        if text is not None:
            values[flag.field] = parse_flag(flag, text)
            sources[flag.field] = flag.name
    if profile and assumed == profile.name and not user_file:
        values["provenance"] = f"assumed, no profile names this device; measured on another one: {values['provenance']}"
    digest = hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()[:12]
    return Settings(**values, sources=sources, fingerprint=digest)
