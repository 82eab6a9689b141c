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

from nsa_sel.core.request import SHARING_TOKENS, DeviceInfo
from nsa_sel.errors import ConfigError
from nsa_sel.settings import private

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
    tuned: str | None = None  # the user's own tuning that is in force: file and fingerprint (nsa_sel/settings/tuned.py)
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
    kind: Literal["bool", "length", "tile", "path", "autotune", "text", "log"]
    help: str


_SHOWN = "; events go to stderr where neither NSA_DEBUG_LOG nor logging says where to"
FLAGS = (
    Flag("NSA_SEL_BACKEND", "backend", "text", "name of the backend to use, or an error that says why it can't"),
    Flag("NSA_USE_TRITON_SEL", "use_triton_sel", "bool", "0 keeps Triton out, 1 lets the policy consider it"),
    Flag("NSA_SEL_TRITON_MIN_L", "sel_triton_min_L", "length", "Triton only from this many selected keys a row on"),
    Flag("NSA_TRITON_SEL_FORCE", "triton_force", "bool", "1 lifts the device rule that turns Triton off (experiments)"),
    Flag("NSA_SEL_TRITON_GROUP", "triton_group", "bool", "0 keeps triton-group out, so that triton-token is the Triton choice"),
    Flag("NSA_SEL_TRITON_ALLOW_GRAD", "triton_allow_grad", "bool", "0: no Triton when gradients are needed"),
    Flag("NSA_SEL_TRITON_REQUIRE_ALIGN", "triton_require_align", "bool",
         "1: Triton only for 16-byte aligned tensors and head dims that are multiples of 16"),
    Flag("NSA_SEL_TRITON_FORCE_PATH", "triton_force_path", "path", "dense: by one range a row; varlen: by any number; auto: by what pays"),
    Flag("NSA_SEL_TRITON_DB", "triton_double_buffer", "bool", "1: at least two pipeline stages; 0: one"),
    Flag("NSA_SEL_TRITON_BLOCK_L", "block_l", "tile", "keys a kernel step takes"),
    Flag("NSA_SEL_TRITON_BLOCK_D", "block_d", "tile", "columns of the one tile that holds Dk in a Triton kernel; it may only be widened"),
    Flag("NSA_SEL_TRITON_BLOCK_DV", "block_dv", "tile", "columns of the one tile that holds Dv in a Triton kernel; it may only be widened"),
    Flag("NSA_SEL_AUTOTUNE", "autotune", "autotune",
         "off: ignore what nsa-sel tune found; on: use it; warmup: compile at the first call per device; warmup-tune: tune lightly too"),
    Flag("NSA_USE_SEL_PACK", "use_sel_pack", "bool", "0 keeps packed SDPA out"),
    Flag("NSA_FORCE_PARITY", "force_parity", "bool", "1: packed SDPA, the reference path, for every call"),
    Flag("NSA_DEBUG_TRITON", "debug_triton", "bool", f"1: sel.triton.* events for every launch; checks selections{_SHOWN}"),
    Flag("NSA_DEBUG_LOG", "debug_log", "log",
         "1 or stderr: events as JSON lines on stderr; a file (./1 for one named 1): appended to it; 0: no events"),
    Flag("NSA_DEBUG_TIMING", "debug_timing", "bool", f"1: events carry times (synchronises the device){_SHOWN}"),
    Flag("NSA_DEBUG_COMPARE", "debug_compare", "bool", f"1: every call is compared with packed SDPA; the MAE is logged{_SHOWN}"),
    Flag("NSA_DEBUG_NVTX", "debug_nvtx", "bool", "1: an NVTX range around each pass of a backend on a GPU, for its profilers"),
)  # fmt: skip
LOG_FLAG = "NSA_DEBUG_LOG"
CONFIG_FLAG = "NSA_SEL_CONFIG"
CACHE_FLAG = "NSA_SEL_CACHE"  # the folder of what nsa-sel tune found, and of compiled CUDA kernels
TEST_FLAG = "NSA_TEST_TRITON_SEL"  # read by the tests alone
COMMIT_FLAG = "NSA_SEL_COMMIT"  # read by the benches alone
_FLAG_NAMES = (*(flag.name for flag in FLAGS), CONFIG_FLAG, CACHE_FLAG)
_NO_FLAGS = (None,) * len(_FLAG_NAMES)
_variables = [-1]  # how many the environment had when misspelt flags were last looked for
MOST_LENGTH = (1 << 31) - 1
MOST_BYTES = 1 << 16  # of a configuration file; ours have a tenth
_BOOLS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
_ALLOWED = {
    "bool": "0 or 1",
    "length": "a whole number >= 0 and below 2^31",
    "tile": "a power of two from 16 to 512",
    "path": ", ".join(get_args(ForcePath)),
    "autotune": ", ".join(get_args(Autotune)),
    "text": "a name",
    "log": "0, 1, stderr or the name of a file",
}


def parse_flag(flag: Flag, text: str) -> Any:
    """The value that `text` gives to `flag`. Raises ConfigError naming the flag, the text and what is allowed."""
    value: Any = None
    known = _BOOLS.get(text.strip().lower())
    if flag.kind == "bool":
        value = known
    elif flag.kind in ("length", "tile") and text.strip().isdecimal() and len(text) < 100:  # Python reads no number of 5000 digits
        number = int(text)
        if number <= MOST_LENGTH if flag.kind == "length" else _is_tile(number):
            value = number
    elif flag.kind == "path":
        value = text if text in get_args(ForcePath) else None
    elif flag.kind == "autotune":
        lowered = text.strip().lower()
        value = lowered if lowered in get_args(Autotune) else known if known is None else ("on" if known else "off")
    elif flag.kind == "log" and known is not None:
        return "stderr" if known else None
    elif flag.kind in ("text", "log"):
        value = text.strip() or None
    if value is None:
        raise ConfigError(flag.name, text, _ALLOWED[flag.kind], f"unset it, or set it to what it takes: {flag.help}")
    return value


def parse_config(text: bytes, source: str) -> ConfigFile:
    """A configuration file from YAML, strictly: unknown fields and wrong types are refused with the field's path."""
    config = _from_yaml(text, source)
    for field, bits in (("sel_triton_min_L", 31), ("workspace_bytes", 63)):
        number = getattr(config.runtime, field)
        numbers = number.values() if isinstance(number, dict) else () if number is msgspec.UNSET else (number,)
        if not all(0 <= each < 1 << bits for each in numbers):
            raise ConfigError(f"{source}: runtime.{field}", number, f"a whole number >= 0 and below 2^{bits}", "write what is allowed")
    for field in ("block_l", "block_d", "block_dv"):
        tile = getattr(config.runtime, field)
        if isinstance(tile, int) and not _is_tile(tile):
            raise ConfigError(f"{source}: runtime.{field}", tile, _ALLOWED["tile"], "write what is allowed, or null")
    prior = config.runtime.sharing_prior
    rising = prior is msgspec.UNSET or (prior == sorted(prior) and all(1 <= number < 1e6 for number in prior))
    if prior is not msgspec.UNSET and not (rising and len(prior) == len(SHARING_TOKENS)):
        allowed = f"{len(SHARING_TOKENS)} rising numbers from 1 on, for tiles of {SHARING_TOKENS} tokens"
        raise ConfigError(f"{source}: runtime.sharing_prior", prior, allowed, "see configs/base.yaml")
    if config.costs:
        check_costs(source, config.costs)
    for name, kernel in config.kernels.items():
        check_kernel(source, name, kernel)
    return config


def _from_yaml(text: bytes, source: str) -> ConfigFile:
    """The file as its YAML says, or ConfigError, soon: aliases, which can make much of little, and long files are refused unread."""
    import yaml  # only here: the decision path of a call never reads YAML twice

    allowed, remedy = "the fields of nsa_sel.settings.config.ConfigFile", "mend the field; configs/base.yaml shows every field"
    if len(text) > MOST_BYTES:
        raise ConfigError(source, f"longer than {MOST_BYTES} bytes", allowed, "drop what is no configuration")

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.MarkedYAMLError(problem="an alias (*name); write its value out", problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
            return super().compose_node(parent, index)

    try:
        config = msgspec.convert(yaml.load(text, Loader), ConfigFile)
        msgspec.json.encode(config)  # as fingerprints and logs will
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise ConfigError(source, str(error), allowed, remedy) from error
    except RecursionError as error:
        raise ConfigError(source, "nested too deeply", allowed, remedy) from error
    except Exception as error:  # PyYAML's constructors let through whatever Python says of a bad number, date or tag
        words = str(error).partition(";")[0]  # of a long number Python goes on with what to set in itself
        raise ConfigError(source, f"with a value that can't be read ({type(error).__name__}: {words})", allowed, remedy) from error
    return config


def _is_tile(number: int) -> bool:
    return 16 <= number <= 512 and number & (number - 1) == 0


def check_kernel(source: str, name: str, kernel: KernelConfig, remedy: str = "mend the numbers") -> None:
    """ConfigError for a launch that no kernel takes."""
    power = all(0 < x <= 1024 and x & (x - 1) == 0 for x in (kernel.block_l, kernel.num_warps, kernel.rows))
    if not power or not 1 <= kernel.num_stages <= 1024:
        allowed = "powers of two for block_l, rows, num_warps and num_stages >= 1, all up to 1024"
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


LEAST_ASSUMING_SM = 80  # the compute capability from which on the kernels run, and an unmeasured GPU takes over another one's values
OF_ONE_CHIP = ("cupy-cuda/",)  # the cost models of backends that run other kernels on another compute capability than the measured one


class Profile(NamedTuple):
    """What configs/devices/ says about a device."""

    name: str
    assumed: str | None  # the profile whose values hold although no measurement on this device stands behind them
    layers: tuple[tuple[str, ConfigFile], ...]  # over base.yaml, later ones win


def profile_for(device: DeviceInfo) -> Profile | None:
    """The profile that names `device` or its whole compute capability; else, from SM 8.0 on, the nearest measured one, as assumed.

    None: the built-in values alone.
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
    elif device.kind == "cuda" and (device.sm or 0) >= LEAST_ASSUMING_SM:
        name = assumed = nearest_measured(device.sm or 0)
    else:
        return None
    names = dict.fromkeys((assumed, name) if assumed else (name,))
    return Profile(name, assumed, tuple((layer, _for(device, shipped[layer])) for layer in names if layer != "base.yaml"))


def nearest_measured(sm: int) -> str:
    """The GPU profile with measured values whose compute capability is closest to `sm`, of two as close the newer one's."""
    measured = {name: config.match.sm or 0 for name, config in shipped_configs().items() if config.match and config.evidence}
    return min(measured, key=lambda name: (abs(measured[name] - sm), -measured[name], name))


def _for(device: DeviceInfo, config: ConfigFile) -> ConfigFile:
    """A profile as it holds on `device`: on another compute capability its launches may not fit, and not every cost model speaks."""
    if config.match is None or config.match.sm == device.sm:
        return config
    costs = config.costs
    if costs:
        models = {name: model for name, model in costs.models.items() if not name.startswith(OF_ONE_CHIP)}
        costs = msgspec.structs.replace(costs, models=models)
    return msgspec.structs.replace(config, kernels={}, costs=costs)


def environment() -> tuple[str | None, ...]:
    """The raw values of all flags: settings and remembered decisions hold for one such tuple."""
    # os.environ.get encodes and decodes every name: 22 flags cost 9 us a call, the mapping underneath 1 us, and one look
    # whether it has any of them, which it usually has not, half of that.
    data = getattr(os.environ, "_data", None)
    encode = getattr(os.environ, "encodekey", None)
    if data is None or encode is None:
        return tuple(os.environ.get(name) for name in _FLAG_NAMES)
    if len(data) != _variables[0]:  # one was added or dropped: it may be a misspelt flag
        _variables[0] = len(data)
        _warn_of_unknown_variables()
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


def _warn_of_unknown_variables() -> None:
    for name, meant in unknown_variables().items():
        if name.startswith("NSA_SEL_"):  # others may be somebody else's
            _warn_of_unknown(name, meant)


def debugging() -> bool:
    """Whether NSA_DEBUG_TRITON asks for the checks that read the device."""
    text = os.environ.get("NSA_DEBUG_TRITON")
    return text is not None and bool(parse_flag(next(flag for flag in FLAGS if flag.name == "NSA_DEBUG_TRITON"), text))


def forget_settings() -> None:
    """Read the file that NSA_SEL_CONFIG names anew: it may have changed on disk."""
    _resolve.cache_clear()


def by_way(value: int | dict[Way, int], before: int | dict[Way, int] | None) -> int | dict[Way, int]:
    """A threshold over the one that held before; one number where all ways agree."""
    if isinstance(value, int):
        return value
    known = before if isinstance(before, dict) else dict.fromkeys(WAYS, before or 0)
    merged = {way: value.get(way, known[way]) for way in WAYS}
    return merged["forward"] if len(set(merged.values())) == 1 else merged


@functools.lru_cache(maxsize=64)
def _resolve(device: DeviceInfo, _environment: tuple[str | None, ...]) -> Settings:
    for name in _FLAG_NAMES:
        raw = os.environ.get(name, "")
        if raw.encode(errors="ignore").decode() != raw:  # neither logs nor fingerprints could hold it
            raise ConfigError(name, raw, "text in UTF-8", "unset it, or give a file or folder another name")
    profile = profile_for(device)
    assumed = profile.assumed if profile else None
    layers = [("base.yaml", shipped_configs()["base.yaml"]), *(profile.layers if profile else ())]
    user_file = os.environ.get(CONFIG_FLAG)
    if user_file:
        try:
            layers.append((user_file, parse_config(private.read_regular(Path(user_file), MOST_BYTES + 1), user_file)))
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
    for flag in FLAGS:
        text = os.environ.get(flag.name)
        if text is not None:
            values[flag.field] = parse_flag(flag, text)
            sources[flag.field] = flag.name
    asked = [field for field in ("debug_triton", "debug_timing", "debug_compare") if values.get(field)]
    if asked and "debug_log" not in sources:  # what asks for events wants them shown
        values["debug_log"], sources["debug_log"] = "stderr", sources[asked[0]]
    if profile and assumed == profile.name and not user_file:
        values["provenance"] = f"assumed, no profile names this device; measured on another one: {values['provenance']}"
    digest = hashlib.sha256(msgspec.json.encode(values, order="deterministic")).hexdigest()[:12]
    return Settings(**values, sources=sources, fingerprint=digest)
