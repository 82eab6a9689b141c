"""The data types of settings: the fields of configs/*.yaml and the effective values that a decision records. Reads no
files."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from nsa_sel.core.request import SHARING_TOKENS

ForcePath = Literal["dense", "varlen", "auto"]
Direction = Literal["forward", "backward", "decode"]  # decode: the forward pass with one query per sequence
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
Autotune = Literal["on", "off", "warmup", "warmup-tune"]

Length = Annotated[int, Meta(ge=0, lt=1 << 31)]
Tile = Literal[16, 32, 64, 128, 256, 512]  # columns
PowerOfTwo = Literal[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
Price = Annotated[float, Meta(ge=0, le=1e300)]  # neither NaN nor infinity
# int: count again after so many calls of a kind. 1 is refused because it means "on" in other flags.
CountSharing = Literal["off", "first"] | Annotated[int, Meta(ge=2, lt=1 << 31)]
COST_TERMS = {  # the work that a cost model may charge for; policies/cost.py counts it
    "launch": "1 per call",
    "union": "thousands of keys that the program of one tile of adjacent tokens visits in sequence",
    "pairs": "millions of (row, block) pairs",
    "partials": "GB of partial o that cuda-block writes: one per (row, tile of keys)",
    "rows": "GB of q and o, and of their gradients in the backward pass",
    "read": "GB of K and V loaded by one program per row, for all its heads",
    "read-wide": "the same where a key and its value have more than 256 16-bit numbers: other kernel configs, other speed",
    "gathered": "GB of K and V loaded by one program per row from pages whose size is not a multiple of 64 keys",
    "rows-read": "the same in calls that kernels of whole steps (`StepKernels`) do not support: small pages, other blocks or head dims",
    "tile": "TFLOP of tiles of adjacent tokens over the union of their blocks",
    "tile-wide": "the same where a key and its value have more than 256 16-bit numbers",
    "exact": "TFLOP of blocks over the rows that select them",
    "exact-wide": "the same where a key and its value have more than 256 16-bit numbers",
    "visited": "TFLOP of blocks of 256 keys and more over the rows that select them, where blocks are visited whole",
    "scores": "billions of (row, head, key) triples; for choosing, of compressed keys visible to the row",
    "indexed": "TFLOP of an indexer over a row's keys",
    "visible": "billions of (row, head, key) triples of all visible keys, which loss-torch computes and masks",
    "compressed": "TFLOP of choosing: rows and heads over their visible compressed keys",
    "compressed-wide": "the same where a key and its value have more than 256 16-bit numbers",
}


class KernelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The config of one kernel. `block_l`: keys per step; `rows`: query rows (tokens x heads) per step, where that
    applies."""

    block_l: PowerOfTwo
    num_warps: PowerOfTwo
    num_stages: Annotated[int, Meta(ge=1, le=1024)]
    rows: PowerOfTwo = 16
    loads: Literal["pointer", "tma"] = "pointer"

    def config_id(self, kernel: str) -> str:
        """Return the config's name in events and decisions, such as "triton-group/forward:tma-L64-R16-w1-s2"."""
        return f"{kernel}:{self.loads}-L{self.block_l}-R{self.rows}-w{self.num_warps}-s{self.num_stages}"


class Runtime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `runtime:` part of a configuration file. A profile may leave out any field."""

    use_triton_sel: bool | UnsetType = UNSET
    sel_triton_min_L: Length | dict[Direction, Length] | UnsetType = UNSET  # a mapping changes only the directions it names
    workspace_bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | UnsetType = UNSET
    prefer_forward: tuple[str, ...] | UnsetType = UNSET
    prefer_backward: tuple[str, ...] | UnsetType = UNSET
    prefer_tiles: tuple[str, ...] | UnsetType = UNSET
    sharing_prior: tuple[Annotated[float, Meta(ge=1, lt=1e6)], ...] | UnsetType = UNSET
    count_sharing: CountSharing | bool | UnsetType = UNSET
    autotune: Autotune | bool | UnsetType = UNSET  # YAML reads on and off as true and false
    block_l: Tile | UnsetType | None = UNSET
    block_d: Tile | UnsetType | None = UNSET
    block_dv: Tile | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        prior = self.sharing_prior
        if prior is not UNSET and (list(prior) != sorted(prior) or len(prior) != len(SHARING_TOKENS)):
            raise ValueError(f"sharing_prior needs {len(SHARING_TOKENS)} rising numbers, for tiles of {SHARING_TOKENS} tokens")
        if self.count_sharing is True:
            raise ValueError("count_sharing needs off, first, or a whole number of calls >= 2, not on")


class Match(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The devices of a profile: `kind`, and for GPUs the compute capability and a substring of the name ("": any name)."""

    kind: Literal["cpu", "cuda"]
    sm: int | None = None
    name: str = ""


class TritonOff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A device rule that disables Triton, its evidence, and the command that measures again."""

    rule: str
    evidence: str
    reopen: str


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The predicted time of one backend in one direction: max(`host`, sum of price x counted work)
    (policies/cost.py)."""

    host: Price  # ms of host time to launch the call, a lower bound however small the work
    terms: dict[str, Price]  # a term of COST_TERMS -> ms per unit
    rows: int  # number of measured rows that it was fitted to
    median_error: float  # of the predictions for these rows, relative to the measured time
    worst_error: float

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.terms) - set(COST_TERMS)):
            raise ValueError(f"unknown terms: {', '.join(unknown)}; allowed: {', '.join(COST_TERMS)}")


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `costs:` part of a profile: predicted times for selections of whole blocks in the dtypes that were measured."""

    provenance: str
    dtypes: tuple[str, ...]
    models: dict[str, CostModel]  # by backend and `Request.phase`: "triton-tile/decode", "choose-triton/choose-backward"


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measured time: median, 20th and 80th percentile in ms."""

    backend: str
    ms_median: float
    ms_p20: float
    ms_p80: float


class Threshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The evidence for `sel_triton_min_L` in one direction: the closest of the compared cases at that L, both sides."""

    verdict: Literal["measured", "undecided"]  # undecided: spreads overlap or the margin is missed, so the previous value stays
    value: int | None
    margin: float  # factor by which Triton must be faster, with disjoint spreads, in every case from `value` on
    cases: int  # number of cases with both sides measured
    closest: str  # the case of the two times; for an undecided threshold, the case that prevents it
    triton: Side
    packed: Side


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of committed rows behind a profile, and the environment of its first row."""

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
    sel_triton_min_L: dict[Direction, Threshold]


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One YAML file of configs/. `assumes` names the profile of another device whose values are used unmeasured."""

    match: Match | None = None
    provenance: str
    assumes: str | None = None  # "base.yaml": the built-in values
    evidence: Evidence | None = None
    runtime: Runtime = Runtime()
    triton_off: TritonOff | None = None
    costs: Costs | None = None
    kernels: dict[str, KernelConfig] = {}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The effective values on one device, as a decision records them."""

    backend: str | None = None
    use_triton_sel: bool
    sel_triton_min_L: int | dict[Direction, int]  # a mapping has every direction
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
    prefer_tiles: tuple[str, ...] = ()
    sharing_prior: tuple[float, ...] = (1.0,) * len(SHARING_TOKENS)
    count_sharing: CountSharing = "off"  # records of older versions have no such field
    triton_off: TritonOff | None = None
    costs: Costs | None = None
    kernels: dict[str, KernelConfig]
    tuned: str | None = None  # file and fingerprint of the user's own tuning (nsa_sel/settings/tuned.py)
    config_file: str | None = None  # the file named by NSA_SEL_CONFIG, whose preference overrides predicted times
    profile: str  # file name of the profile, or "built-in"
    provenance: str
    assumed: str | None = None  # the other device's profile whose values are used unmeasured; base.yaml: built-in values
    sources: dict[str, str]  # field -> source of its value; built-in values are left out
    fingerprint: str  # of all the values above but `sources`

    @property
    def traced(self) -> bool:
        """True if a flag asks for the events of each pass: its kernels, their path, the keys it reads, its estimated
        work."""
        return self.debug_log is not None or self.debug_triton or self.debug_timing or self.debug_compare

    def min_length(self, direction: Direction) -> int:
        """Return the L from which Triton may run in one direction."""
        return self.sel_triton_min_L if isinstance(self.sel_triton_min_L, int) else self.sel_triton_min_L[direction]

    def kernel(self, name: str) -> KernelConfig:
        """Return the config of one kernel, with the overrides of block size and double buffering applied."""
        config = self.kernels[name]
        if self.block_l is not None:
            config = msgspec.structs.replace(config, block_l=self.block_l)
        if self.triton_double_buffer is not None:
            stages = max(2, config.num_stages) if self.triton_double_buffer else 1
            config = msgspec.structs.replace(config, num_stages=stages)
        return config

    def kernel_source(self, name: str) -> str:
        """Return the source of one kernel's config: "environment" or a file."""
        overrides = [
            self.sources.get(field, "base.yaml")
            for field in ("block_l", "block_d", "block_dv", "triton_double_buffer")
            if getattr(self, field) is not None
        ]
        if any(source.startswith("NSA_") for source in overrides):
            return "environment"
        return overrides[0] if overrides else self.sources.get(f"kernels.{name}", "base.yaml")
