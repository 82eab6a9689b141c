"""What a backend is: what it can run, what it needs, what it is made for. Policies, entry points, benches and documents read this data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import msgspec

from nsa_sel.core.request import DeviceInfo, Request

if TYPE_CHECKING:
    from torch import Tensor

    from nsa_sel.core.call import Call

ReasonKind = Literal["unavailable", "unsupported", "disabled", "slower"]
REFUSING_KINDS: tuple[ReasonKind, ...] = ("unavailable", "unsupported", "disabled")  # also for a forced backend


class Reason(msgspec.Struct, frozen=True):
    """One reason why a backend is not taken.

    unavailable: it can't run on this machine; unsupported: not for this call; disabled: a rule or flag forbids it;
    slower: it could run, but evidence says that another is faster (forcing it is then allowed).
    """

    code: str  # stable, kebab-case: "head-dim-multiple"
    kind: ReasonKind
    field: str  # the fact looked at: "request.Dk"
    actual: str | int | bool | None
    required: str | int | bool | None
    remedy: str
    satisfied_by: int | None = None  # a value of the field that would lift this reason, where one number does

    def __str__(self) -> str:
        return f"{self.code} ({self.kind}): {self.field} is {self.actual}, required {self.required}; {self.remedy}"


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a backend can run. One guard interprets it (policies/guards.py); tests and benches generate their cases from it."""

    dtypes: Mapping[str, tuple[str, ...]]  # device kind ("cpu", "cuda", "interpreter") -> dtype names
    head_dim_multiple: Annotated[int, msgspec.Meta(ge=1)] = 1
    head_dim_max: int = 1 << 30
    min_sm: int = 0
    backward: bool = True
    deterministic: bool = True
    block_aligned_only: bool = False
    ranges_max: int = 1 << 30  # ranges a row
    block_multiple: Annotated[int, msgspec.Meta(ge=1)] = 1  # of the block size, where the selection is of whole blocks


class TileKernels(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that a backend serves with kernels that share K and V among a tile of adjacent tokens; other calls take its row kernels."""

    sm: int  # the one compute capability they are for
    block_multiple: int
    blocks_max: int  # KV blocks of a sequence: the plan of a tile holds them in shared memory
    heads: tuple[int, int]  # least and most heads a group
    key_dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    backward_key_dim_max: int
    warpgroup_rows: int = 64  # rows (tokens x heads) of one consumer warpgroup

    def warpgroups(self, h: int, Dk: int, backward: bool = False) -> int:
        """Consumer warpgroups that share a tile: 3, or 2 where a tile would pass 64 tokens, keys are wide, or dq needs the registers."""
        return 3 if not backward and Dk <= 128 and 3 * (self.warpgroup_rows // h) <= 64 else 2

    def tokens(self, h: int, Dk: int, backward: bool = False) -> int:
        """Adjacent tokens of one tile."""
        return self.warpgroups(h, Dk, backward) * (self.warpgroup_rows // h)

    def fits(self, S: int, S_kv: int, h: int, Dk: int, Dv: int, block_size: int | None) -> bool:
        """Whether a call of these sizes runs on tiles, forward."""
        if block_size is None or block_size % self.block_multiple or not self.heads[0] <= h <= self.heads[1]:
            return False
        if Dk not in self.key_dims or Dv not in self.value_dims:
            return False
        return self.tokens(h, Dk) <= S and S_kv <= self.blocks_max * block_size

    def take(self, request: Request) -> bool:
        """`fits`, for an aligned request."""
        return request.aligned and self.fits(request.S, request.S_kv, request.h, request.Dk, request.Dv, request.block_size)


class Requirement(msgspec.Struct, frozen=True):
    """A Python package that a backend needs, looked up without importing it."""

    package: str  # import name
    version: str  # the oldest that works
    remedy: str


class Library(msgspec.Struct, frozen=True):
    """A shared library that a backend needs: found by the loader as one of `files`, or brought by a Python distribution."""

    name: str
    files: tuple[str, ...]  # one of them
    distributions: tuple[str, ...]  # one of them will do
    remedy: str


class Switch(msgspec.Struct, frozen=True):
    """A boolean setting that keeps a backend out while it is false."""

    setting: str  # field of Settings
    code: str  # of the reason
    remedy: str


class Backend(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A backend as data; its functions are loaded from `path` when it first runs (nsa_sel/core/registry.py)."""

    name: str
    path: str  # dotted path of the module, see BackendModule
    framework: str  # "torch", "numba", "triton", "cupy", or the name of another
    limits: Limits
    requires: tuple[Requirement, ...] = ()
    libraries: tuple[Library, ...] = ()
    switches: tuple[Switch, ...] = ()
    summary: str = ""
    fallback: bool = False  # serves a call whose chosen backend failed; exactly one backend does
    decodes: bool = True  # worth a try for one query a sequence
    reads_caches: bool = False  # its forward reads `Call.lengths` and `Call.block_table` itself
    shares: Literal["rows", "tiles", "blocks"] = "rows"  # who shares loads of K and V: the heads of a row, a tile of tokens, a KV block
    tiles: TileKernels | None = None
    cost_terms: Mapping[str, tuple[str, ...]] = {}  # "forward", "backward", "decode" -> the terms of its cost model

    def prefers_blocks(self, request: Request, device: DeviceInfo) -> bool:
        """Whether it takes whole blocks alone, or has faster kernels for them on this device."""
        if self.limits.block_aligned_only:
            return True
        return self.tiles is not None and self.tiles.sm == device.sm and self.tiles.take(request)


class Offer(msgspec.Struct, frozen=True):
    """A backend as this machine offers it: its data, and what is missing or broken here."""

    backend: Backend
    missing: tuple[Reason, ...] = ()


class BackendModule(Protocol):
    """The functions in a backend's module. Both get a checked call whose tensors are on the current device, and may rely on the contract.

    Only a backend with `reads_caches` is given `Call.lengths` and `Call.block_table`; for others core/pages.py turns them into positions
    and ranges. A module may also have `loaded_keys(call, selected, count)`: for events, the number of keys that its forward loads of those
    that the rows select; counted on the device with `count`, else from static facts.
    """

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32 (float64 for float64 inputs)."""
        ...

    def backward(self, call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv, contiguous, with the shapes and dtypes of q, k, v; dlse is None when lse is unused."""
        ...
