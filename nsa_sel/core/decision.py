"""The decision as a frozen value: which backend, why not the others, from which facts; to and from JSON; replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.errors import NsaSelError
from nsa_sel.settings.schema import Settings

ReasonKind = Literal["unavailable", "unsupported", "disabled", "slower"]
REFUSING_KINDS: tuple[ReasonKind, ...] = ("unavailable", "unsupported", "disabled")  # even a forced backend heeds these


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


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend can run, as data: one guard interprets it, tests and benches generate their cases from it."""

    dtypes: Mapping[str, tuple[str, ...]]  # place ("cpu", "cuda", "interpreter") -> dtype names
    head_dim_multiple: Annotated[int, msgspec.Meta(ge=1)] = 1
    head_dim_max: int = 1 << 30
    min_sm: int = 0
    backward: bool = True
    deterministic: bool = True
    block_aligned_only: bool = False
    ranges_max: int = 1 << 30  # ranges a row
    block_multiple: Annotated[int, msgspec.Meta(ge=1)] = 1  # of the block size, where the selection is of whole blocks


class Requirement(msgspec.Struct, frozen=True):
    """A Python package that a backend needs, looked up without importing it."""

    package: str  # import name
    version: str  # the oldest that works
    remedy: str


class Library(msgspec.Struct, frozen=True):
    """A shared library that a backend needs: as the loader finds one of its files, or as a distribution of Python brings it."""

    name: str
    files: tuple[str, ...]  # one of them
    distributions: tuple[str, ...]  # one of them will do
    remedy: str


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """A backend as data; its two functions are loaded from `path` when it is first run (see nsa_sel.core.registry)."""

    name: str
    path: str  # dotted path of the module with forward(...) and backward(...)
    framework: str  # "torch", "numba", "triton", "cupy", or the name of another
    limits: Limits
    requires: tuple[Requirement, ...] = ()
    libraries: tuple[Library, ...] = ()
    summary: str = ""


class Offer(msgspec.Struct, frozen=True):
    """A backend as this machine offers it: its data, and what is missing or broken here."""

    backend: Backend
    missing: tuple[Reason, ...] = ()


class Override(msgspec.Struct, frozen=True):
    """A backend asked for by name, and by what: "argument", "use_backend", "NSA_SEL_BACKEND" or "NSA_FORCE_PARITY"."""

    backend: str
    source: str


class Verdict(msgspec.Struct, frozen=True):
    """What the policy found about one backend, for forward and (when gradients are needed) for backward."""

    backend: str
    forward: tuple[Reason, ...] = ()
    backward: tuple[Reason, ...] = ()


class Prediction(msgspec.Struct, frozen=True):
    """What the profile's costs say about one backend that no check turned away."""

    backend: str
    direction: Literal["forward", "backward"]
    ms: float


class FieldChange(msgspec.Struct, frozen=True):
    """One field in which a replayed decision differs from the recorded one."""

    field: str
    recorded: Any
    replayed: Any


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Which backend runs one class of calls, and the whole reasoning. Logging only serialises it."""

    request: Request
    device: DeviceInfo
    policy: str  # name of the policy that judged
    settings: Settings  # the effective values with their sources
    offers: tuple[Offer, ...]
    override: Override | None
    verdicts: tuple[Verdict, ...]  # in the order in which the forward considers them
    rule: str  # the rule that decided, in words
    steps: tuple[str, ...]  # what the preference puts before the choice and a check turned away, each with its reasons
    forward: str | None  # None: nothing may run it, see `verdicts`
    backward: str | None  # None when no gradients are needed
    predictions: tuple[Prediction, ...] = ()  # least first, forward before backward; empty where the profile has no costs
    runner_up: str | None = None  # what would run forward if the choice could not; None when forced
    runner_up_backward: str | None = None

    def to_json(self) -> str:
        """One line of JSON with every field."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> Decision:
        """The decision that `to_json` wrote. Raises NsaSelError naming the field that does not fit."""
        try:
            return msgspec.json.decode(line, type=cls)
        except msgspec.DecodeError as error:
            raise NsaSelError(f"not a decision record: {error}. Remedy: pass a line that Decision.to_json wrote.") from error

    def replay(self) -> tuple[FieldChange, ...]:
        """Select again from the recorded facts with today's policy, without tensors or GPU: the fields that differ."""
        from nsa_sel.core.dispatch import replay  # dispatch stands a floor above

        return replay(self)
