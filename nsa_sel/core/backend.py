"""A backend as data: what it can run, needs and prefers; the interfaces of its module, and of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, Protocol

import msgspec

from nsa_sel.core.request import FEW_TOKENS, DeviceInfo, Kind, Request
from nsa_sel.settings.schema import Direction, Settings

if TYPE_CHECKING:
    from torch import Tensor

    from nsa_sel.core.call import Call, ChooseCall, IndexLossCall

ReasonKind = Literal["unavailable", "unsupported", "disabled", "slower"]
REFUSING_KINDS: tuple[ReasonKind, ...] = ("unavailable", "unsupported", "disabled")  # also for a forced backend


class Reason(msgspec.Struct, frozen=True):
    """One reason why a backend is not picked.

    unavailable: it can't run on this machine; unsupported: it can't run this call; disabled: a rule or flag forbids it;
    slower: it can run, but measurements say that another backend is faster (it may be forced).
    """

    code: str  # stable, kebab-case: "head-dim-multiple"
    kind: ReasonKind
    field: str  # the fact looked at: "request.Dk"
    actual: str | int | bool | None
    required: str | int | bool | None
    remedy: str
    satisfied_by: int | None = None  # a value of the field that removes this reason, if one number does

    def __str__(self) -> str:
        return f"{self.code} ({self.kind}): {self.words}"

    @property
    def fact(self) -> str:
        """Return the reason as a sentence without a period."""
        if self.code not in _FACTS:
            name = self.field.replace("request.", "").replace("settings.", "").replace("device.", "")
            return f"{name} is {self.actual}; it must be {self.required}"
        sm = f"SM {self.actual / 10}" if self.field == "device.sm" and isinstance(self.actual, int) else "this device"
        rule = str(self.required).removeprefix("another: ")
        return _FACTS[self.code].format(field=self.field, actual=self.actual, required=self.required, sm=sm, rule=rule)

    @property
    def words(self) -> str:
        """The fact and the remedy, as sentences."""
        remedy = f"run {self.remedy}" if self.remedy.startswith("pip ") else self.remedy
        return " ".join(f"{text[:1].upper()}{text[1:]}." for text in (self.fact, remedy) if text)


# Facts of reasons by code, where more is to be said than the field, its value, and the required one.
_FACTS = {
    "package-missing": "{field} is not installed",
    "package-old": "{field} is version {actual}; {required} is needed",
    "library-missing": "{field} ({required}) was not found",
    "failed-before": "the kernel failed before in this process: {actual}",
    "device-rule": "Triton is disabled on {sm} ({rule})",
    "device-kind": "the tensors are on {actual}, not on {required}",
    "dtype": "the dtype is {actual}, not {required}",
    "compute-capability": "the GPU has {sm}; the compute capability must be {required}",
    "block-aligned": "the selection is not made of whole blocks",
    "paged": "the backend does not read pages, and the cache has pages of {actual} keys",
    "quantized": "the backend does not read a cache of format {actual}",
    "quantized-sm": "quantized caches need a newer GPU than {sm}: {required}",
    "quantized-grad": "the call needs gradients, which a quantized cache does not have",
    "quantized-steps": "its kernels do not take {actual}; they take {required}",
    "tiles-only": "its kernels do not take {actual}; they take {required}",
    "not-deterministic": "the backend does not sum in a fixed order",
    "no-backward": "the call needs gradients, and the backend has no backward pass",
    "triton-off": "Triton is disabled for selected attention",
    "grad-off": "Triton is disabled for calls that need gradients",
    "align-pointers": "pointers or strides of q, k or v are not multiples of 16 bytes",
    "triton-on-cpu": "on a CPU Triton kernels are interpreted, which is slow",
    "path-dense": "NSA_SEL_TRITON_FORCE_PATH=dense takes 1 range per row, not {actual}",
    "path-dense-blocks": "NSA_SEL_TRITON_FORCE_PATH=dense excludes a backend that takes only whole blocks",
    "pack-off": "packed SDPA is disabled",
    "group-off": "the backend is disabled",
}


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of a backend. One guard interprets them (policies/guards.py); tests and benches generate their cases from
    it."""

    dtypes: Mapping[str, tuple[str, ...]]  # device kind ("cpu", "cuda", "interpreter") -> dtype names
    head_dim_multiple: Annotated[int, msgspec.Meta(ge=1)] = 1
    head_dim_max: int = 1 << 30
    min_sm: int = 0
    backward: bool = True
    deterministic: bool = True
    block_aligned_only: bool = False
    ranges_max: int = 1 << 30  # ranges per row
    block_multiple: Annotated[int, msgspec.Meta(ge=1)] = 1  # of the block size, for selections of whole blocks
    small_blocks: tuple[int, ...] = ()  # further block sizes that it takes
    choice_max: int = 1 << 30  # blocks of a sequence that it chooses from
    quantized: Mapping[str, int] = {}  # formats of quantized caches that it reads, and the SM from which it does on a GPU
    tiles_only: bool = False  # only the calls of its tile kernels, see `Backend.tiles`

    def takes_block(self, size: int) -> bool:
        """Return True if it runs blocks of `size` keys."""
        return size % self.block_multiple == 0 or size in self.small_blocks


class TileKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The calls that run on a backend's tile kernels, which share K and V loads between adjacent tokens; others run on
    its row kernels."""

    sm: int  # the compute capability they are compiled for
    block_multiple: int
    blocks_max: int  # KV blocks of a sequence, twice as many if a tile has at most 32 tokens: its plan keeps their bits in shared memory
    heads: tuple[int, int]  # fewest and most heads per group
    key_dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    one_head: bool = False  # the forward pass of many tokens takes one head per group, too
    # Also supported for many tokens, with separate pipelines for keys and values:
    gathered_blocks: tuple[int, ...] = ()  # blocks smaller than a step, which gathers them
    wide_dims: tuple[int, ...] = ()  # columns of keys and of values, which are equal
    warpgroup_rows: int = 64  # rows (tokens x heads) of one consumer warpgroup

    def warpgroups(self, h: int, Dk: int, backward: bool = False) -> int:
        """Consumer warpgroups per tile: 3, or 2 if 3 would exceed 64 tokens, keys are wide, or dq needs the registers."""
        return 3 if not backward and Dk <= 128 and 3 * (self.warpgroup_rows // h) <= 64 else 2

    def tokens(self, h: int, Dk: int, backward: bool = False) -> int:
        """Tokens per tile; with one head both warpgroups have the same ones."""
        return min(64, self.warpgroups(h, Dk, backward) * (self.warpgroup_rows // h))

    def fits(self, S: int, S_kv: int, h: int, Dk: int, Dv: int, block_size: int | None, backward: bool = False) -> bool:
        """Return True if a pass of these sizes runs on tiles."""
        heads = self.heads[0] if h == 1 and self.one_head and not backward else h
        if block_size is None or not (self.fits_few(heads, Dk, Dv, block_size) or self.gathers(h, Dk, Dv, block_size)):
            return False
        tokens = self.tokens(h, Dk)
        return tokens <= S and S_kv <= self.blocks_max * (2 if tokens <= 32 else 1) * block_size

    def gathers(self, h: int, Dk: int, Dv: int, block_size: int | None) -> bool:
        """Return True if passes of these sizes, and of many tokens, have pipelines of their own for keys and values."""
        if block_size is None or not self.heads[0] <= h <= self.heads[1]:
            return False
        wide = Dk == Dv and Dk in self.wide_dims
        if block_size in self.gathered_blocks:
            return wide or (Dk in self.key_dims and Dv in self.value_dims)
        return wide and block_size % self.block_multiple == 0

    def fits_few(self, h: int, Dk: int, Dv: int, block_size: int | None) -> bool:
        """Return True if a few new tokens of these sizes run on tiles, one for each sequence and group."""
        if block_size is None or block_size % self.block_multiple or not self.heads[0] <= h <= self.heads[1]:
            return False
        return Dk in self.key_dims and Dv in self.value_dims

    def wanted(self) -> str:
        """Describe the calls that `take` and `sm` accept."""
        fewest, most = self.heads
        return (
            f"SM {self.sm / 10}, {fewest} <= h <= {most}, Dk in {self.key_dims}, Dv in {self.value_dims}, a tile of rows, 16-byte alignment"
        )

    def take(self, request: Request, backward: bool = False) -> bool:
        """`fits`, for an aligned request, whose pages, if any, hold whole steps: TMA loads them."""
        loadable = request.aligned and (request.page_size or 0) % self.block_multiple == 0
        return loadable and self.fits(request.S, request.S_kv, request.h, request.Dk, request.Dv, request.block_size, backward)


class StepKernels(msgspec.Struct, frozen=True, kw_only=True):
    """The calls of kernels that load whole steps of keys by TMA, a step from one block and one page. Of few rows they
    also take wider keys, and gather small blocks."""

    sm: int  # the compute capability they are compiled for
    keys: int  # of a step
    dims: tuple[int, ...]  # columns of keys and of values
    few_dims: tuple[int, ...] = ()  # further head dims for calls of few rows with up to `few_heads` heads
    few_heads: int = 0
    small_blocks: tuple[int, ...] = ()  # block sizes below `keys` for calls of few rows

    def take(self, request: Request) -> bool:
        """Return True if the forward pass of these sizes loads whole steps."""
        whole = request.block_size is not None and request.block_size % self.keys == 0 and (request.page_size or 0) % self.keys == 0
        return whole and request.aligned and request.Dk in self.dims and request.Dv in self.dims

    def take_few(self, request: Request) -> bool:
        """Return True if the forward pass of these few rows runs on them."""
        sizes = request.S, request.h, request.Dk, request.Dv, request.block_size, request.page_size
        return request.aligned and request.S <= FEW_TOKENS and self.fit(*sizes, request.quantized is not None)

    def fit(self, S: int, h: int, Dk: int, Dv: int, block: int | None, page: int | None, quantized: bool) -> bool:
        """Return True if the sizes do: S rows per sequence of h heads; pages of `page` keys, None without pages."""
        few = S <= FEW_TOKENS and not quantized
        if block is None or not all(D in self.dims or (few and D in self.few_dims and h <= self.few_heads) for D in (Dk, Dv)):
            return False
        if block % self.keys == 0:
            return (page or 0) % self.keys == 0
        return few and block in self.small_blocks and (page or 0) % block == 0

    def wanted(self) -> str:
        """Describe the calls that `take` and `sm` accept."""
        return f"SM {self.sm / 10}, blocks and pages of a multiple of {self.keys} keys, Dk and Dv in {self.dims}, 16-byte alignment"


class Requirement(msgspec.Struct, frozen=True):
    """A Python package that a backend needs, looked up without importing it."""

    package: str  # import name
    version: str  # the oldest that works
    remedy: str


class Library(msgspec.Struct, frozen=True):
    """A shared library that a backend needs: one of `files` for the loader, or part of one of the Python
    `distributions`."""

    name: str
    files: tuple[str, ...]
    distributions: tuple[str, ...]
    remedy: str


class Switch(msgspec.Struct, frozen=True):
    """A boolean setting that disables a backend while it is false."""

    setting: str  # field of Settings
    code: str  # of the reason
    remedy: str


class Backend(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A backend as data; its functions are loaded from `path` when it first runs (nsa_sel/core/registry.py)."""

    name: str
    path: str  # dotted path of the module, see BackendModule
    framework: str  # "torch", "numba", "triton", "cupy", or another name
    limits: Limits
    kind: Kind = "attend"  # of the requests that it serves
    requires: tuple[Requirement, ...] = ()
    libraries: tuple[Library, ...] = ()
    switches: tuple[Switch, ...] = ()
    summary: str = ""
    fallback: bool = False  # serves calls whose backend failed; true for exactly one backend of a kind
    decodes: bool = True  # useful for one query per sequence
    slow: bool = False  # up to seconds per call on many rows: benches measure it on fewer
    sets_min_length: bool = False  # min-L is the length from which it is faster than the fallback; true for exactly one backend
    reads_caches: bool = False  # its forward reads `Call.lengths` and `Call.block_table`
    shares: Literal["rows", "tiles", "blocks"] = (
        "rows"  # what shares loads of K and V: the heads of a row, a tile of tokens, all rows of a KV block
    )
    tiles: TileKernels | None = None
    steps: StepKernels | None = None  # kernels of rows, without a plan
    quantized_by: StepKernels | None = None  # the kernels that alone read quantized caches; None: all do
    cost_terms: Mapping[str, tuple[str, ...]] = {}  # `Request.phase` -> the terms of its cost model
    same_price_if_wide: tuple[str, ...] = ()  # phases in which products of wide and of narrow keys take the same time

    def prefers_blocks(self, request: Request, device: DeviceInfo) -> bool:
        """Return True if it accepts only whole blocks, or has faster kernels for them on this device."""
        if self.limits.block_aligned_only:
            return True
        return self.tiles is not None and self.tiles.sm == device.sm and self.tiles.take(request)


class WindowKernels(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels of sliding windows as data: the calls that they run. Their module has `forward` and `backward`."""

    name: str
    path: str  # dotted path of the module, imported at the first call
    then: str  # what runs calls that they fail for, for the warning
    dtypes: tuple[str, ...]
    head_dim_max: int
    min_sm: int = 0
    only_sm: int | None = None
    needs: str | None = None  # a backend whose packages and libraries they need, too


class Offer(msgspec.Struct, frozen=True):
    """A backend on this machine: its data, and what is missing or broken here."""

    backend: Backend
    missing: tuple[Reason, ...] = ()


class PolicyInput(NamedTuple):
    """The input of a policy's checks and predictions: a request in one direction."""

    request: Request
    device: DeviceInfo
    settings: Settings
    direction: Literal["forward", "backward"]

    @property
    def phase(self) -> Direction:
        """The direction; "decode" for the forward pass of one query per sequence."""
        return "decode" if self.direction == "forward" and self.request.S == 1 else self.direction


Check = Callable[[PolicyInput, Offer], Iterable[Reason]]


class Policy(NamedTuple):
    """A policy: of the backends that no check refuses, the one with the least predicted time is picked.

    Without predictions, or where the user's own file sets the preference, it is the first of the preference. All
    reasons are kept, except `slower` for a backend that can't run.
    """

    name: str
    checks: tuple[Check, ...]
    preference: Callable[[PolicyInput], tuple[str, ...]]
    predict: Callable[[PolicyInput, Backend], float | None]  # milliseconds; None without measurements
    unpredicted: Callable[[PolicyInput], str | None] = lambda _: None  # what of a request no measurement is near to, in words


class ChooserModule(Protocol):
    """The functions in the module of a backend of the kind "choose". All get a checked call whose tensors are on the
    current device.

    A module may also have `attention(call)`: o and lse of `forward`, bit by bit, without choosing, for a backward pass
    that recomputes; and `backward_and_delta`, as a BackendModule.
    """

    def forward(self, call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
        """Return o [B,S,G,h,Dv], lse [B,S,G,h] in float32 (float64 for float64 inputs), the blocks' ranges [B,S,G,n,2],
        empty ones last."""

    def backward(self, call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv, contiguous, with the shapes and dtypes of q, k, v; dlse is None when lse is unused.

        p = exp(logits - lse) with the lse that is given, which is larger than that of `forward` where a gate is in it
        (nsa_sel/gating.py).
        """

    def log_sum_exp(self, call: ChooseCall) -> Tensor:
        """Return lse [B,S,G,h] of `forward` alone."""

    def best_blocks(self, call: ChooseCall, lse: Tensor | None, out: Tensor | None = None) -> Tensor:
        """Write the best blocks by the scores that `call.pool` defines to `out`, and return it; lse [B,S,G,h] for a pool
        with softmax. Values are not read.

        out: block indices [B,S,G,n], or ranges [B,S,G,n,2], which are made if it is None; n + 1 with `call.tail`.
        """


class LossModule(Protocol):
    """The functions in the module of a backend of the kind "index_loss". Both get a checked call whose tensors are on the
    current device."""

    def forward(self, call: IndexLossCall, with_gradients: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return loss [B,S,G] in lse's dtype and the gradients of its sum: dq [B,S,G,Di] in index_q's dtype, and dk in lse's
        dtype, of index_k's shape. Without with_gradients they are None."""

    def backward(self, call: IndexLossCall, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return dq and dk of sum(weights * loss); weights [B,S,G] are contiguous, in lse's dtype, at most 1."""


class BackendModule(Protocol):
    """The functions in a backend's module. Both get a checked call whose tensors are on the current device.

    Only a backend with `reads_caches` gets `Call.lengths` and `Call.block_table`; for others core/call.py turns them
    into positions and ranges. A module may also have `loaded_keys(call, selected, count)`, for events: how many of the
    selected keys its forward loads, counted on the device if `count`, else from static facts. And `backward_and_delta`:
    `backward`, and delta = sum(do * o) - dlse [B,S,G,h] in lse's dtype, of any strides: the gradient of a layer's gate
    (nsa_sel/gating.py).
    """

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32 (float64 for float64 inputs)."""

    def backward(self, call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return dq, dk, dv, contiguous, with the shapes and dtypes of q, k, v; dlse is None when lse is unused.

        p = exp(logits - lse) with the lse that is given, which is larger than that of `forward` where a gate is in it
        (nsa_sel/gating.py).
        """
