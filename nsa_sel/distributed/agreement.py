"""Ranks agree: once per class of calls they compare what they decide by and take rank 0's decision; every call is held to it.

Ranks meet in the store that the job was set up with: a rank that nobody joins gets an error that says whom it waited for. In front of every
exchange, forward and backward, they compare 8 bytes per rank: a digest of what was agreed on, with the number of the call.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import time
import weakref
from typing import Any, NamedTuple

import msgspec
import torch
from torch import distributed as dist

from nsa_sel.core import decide
from nsa_sel.core.backend import REFUSING_KINDS
from nsa_sel.core.call import device_info
from nsa_sel.core.decision import Decision, changes
from nsa_sel.core.explain import refusal
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.distributed.exchange_all import all_gather
from nsa_sel.errors import ArgumentError, BackendError, NsaSelError
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.schema import Settings

SECONDS = 300.0  # that a rank waits for the others: a first call may compile for minutes
MAY_DIFFER = ("debug_log", "fingerprint", "sources")  # of the settings: a log for each rank, and what only says where values are from
_PACKAGES = ("torch", "triton", "numba", "cupy-cuda13x", "cupy-cuda12x")
_CLASSES = 1024  # that a group remembers: decoding over slices that grow makes one a step
_MEETS = 0  # in place of a digest: this rank has not agreed on the class


class _Said(msgspec.Struct, frozen=True):
    """What a rank puts into the store: what must be alike, why its backends refuse, its decision, and how many calls it has begun."""

    facts: dict[str, Any]
    refusals: dict[str, str]
    decision: Decision | None
    calls: int


class _Group:
    """What a process group has agreed on: a decision and a digest per class, how often it met, how many calls this rank has begun."""

    def __init__(self) -> None:
        self.meetings = 0
        self.calls = 0
        self.known: dict[Any, tuple[Decision, int]] = {}
        self.last: dict[str, Any] | None = None


_groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()


def _state(group: dist.ProcessGroup) -> _Group:
    return _groups.setdefault(group, _Group())


def group_of(group: Any, caller: str) -> dist.ProcessGroup:
    """The process group of `group`: a ProcessGroup, a DeviceMesh of one dimension, or None for all ranks.

    Raises:
        NsaSelError: outside of a distributed job.
        ArgumentError: `group` is something else, or this rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise NsaSelError(
            f"{caller} is called outside a distributed job; allowed: after torch.distributed.init_process_group."
            " Remedy: launch it with torchrun and initialize, or call selection_attention."
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("group", "one without this rank", "one with it", f"call {caller} on the ranks of the group alone")
    if hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ArgumentError("group", f"a mesh of {group.ndim} dimensions", "one dimension", "pass mesh['name of the dimension']")
        return group.get_group()  # type: ignore[no-any-return]
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group", f"a {type(group).__name__}", "a ProcessGroup or a DeviceMesh", "leave it out for all ranks")
    return group


def check_ranks(group: Any = None, device: torch.device | None = None) -> None:
    """Compare versions, settings and device profiles of all ranks of `group`; every one of them calls it.

    For calls without an exchange, those of DTensors and of shards that are plain tensors: each rank decides for its own shard, by facts
    that this finds to be alike. It also brings ranks together again after a call that failed on some of them alone.

    Args:
        group: ProcessGroup or DeviceMesh of one dimension, by default all ranks.
        device: by default the current GPU, else the CPU.

    Raises:
        NsaSelError: on all ranks, naming rank and field, where they differ; after `SECONDS` where a rank does not come; outside of a
            distributed job.
    """
    group = group_of(group, "check_ranks")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    info = device_info(device)
    _meet(group, _Said(_facts(info, settings_for(info)), {}, None, _state(group).calls))


def begin_call(group: dist.ProcessGroup) -> None:
    """Count a call, before anything of it can fail: a rank that fails alone and goes on is then one call ahead, and is told so."""
    _state(group).calls += 1


class Agreed(NamedTuple):
    """What the ranks of a group agreed on for one call; each of them decided `mine` and runs `decision`."""

    decision: Decision
    group: dist.ProcessGroup
    call: int
    digest: int
    mine: Decision
    device: DeviceInfo
    arguments: dict[str, Any]

    def before_backward(self, device: torch.device) -> None:
        """Hold the backward passes of all ranks to one call, in front of their exchange. Raises NsaSelError where they differ."""
        if not _same(self.group, self.digest + 2 * self.call + 1, device, f"call {self.call}, backward"):
            facts = _call_facts(self.call, "backward", self.device, self.mine, self.arguments)
            _meet(self.group, _Said(facts, {}, None, _state(self.group).calls))


def agree(
    request: Request, device: DeviceInfo, group: dist.ProcessGroup, backend: str | None, at: torch.device, **arguments: Any
) -> Agreed:
    """Rank 0's decision for a call that all ranks of `group` make on devices `at`, each with its own `request`, which must be alike.

    Ranks meet in the store once per class, and again when a flag changes or, with NSA_DEBUG_TRITON=1, at every call. Before that each tells
    the others what it knows (`_same`), so that on a CPU all of them meet where one makes another call than the rest. Only before they have
    agreed on anything they meet at once: their tensors may not even be on devices of one kind.

    Raises:
        NsaSelError: on all ranks, naming rank and field, where something differs; after `SECONDS` where a rank does not come.
        BackendError: on all ranks, where nothing may run the call.
    """
    mine = decide.select(request, device, backend)
    state = _state(group)
    key = (mine.request, device, _digest(mine.settings), mine.override, *sorted(arguments.items()))
    decision, digest = (None, _MEETS) if mine.settings.debug_triton else state.known.get(key, (None, _MEETS))
    told = _MEETS if decision is None else digest + 2 * state.calls
    alike = not state.known or _same(group, told, at, f"call {state.calls}, forward")
    if decision is None or not alike:
        refusals = {
            verdict.backend: "; ".join(str(reason) for reason in reasons)
            for verdict in mine.verdicts
            if (reasons := [reason for reason in (*verdict.forward, *verdict.backward) if reason.kind in REFUSING_KINDS])
        }
        facts = _call_facts(state.calls, "forward", device, mine, arguments)
        said = _meet(group, _Said(facts, refusals, mine if dist.get_rank(group) == 0 else None, state.calls))
        decision = _used(said)
        first = msgspec.json.encode(said[0].facts, order="deterministic")  # of rank 0 on every rank
        digest = int.from_bytes(hashlib.sha256(first).digest()[:8], "big") >> 2  # the number of a call is added
        if len(state.known) >= _CLASSES:
            state.known.clear()
        state.known[key] = decision, digest
    return Agreed(decision, group, state.calls, digest, mine, device, arguments)


def _same(group: dist.ProcessGroup, told: int, device: torch.device, where: str) -> bool:
    """Whether all ranks tell the same, in front of an exchange: one collective of 8 bytes per rank.

    A CPU reads the answer at once. A GPU's host does not wait for it: the GPU compares, in four launches of a few bytes each, and where
    ranks differ a device-side assert ends its CUDA context before the exchange begins. That is so on every rank that agreed on its call;
    one that has yet to meet the others in the store gets its error there.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if ranks == 1:
        return True
    mine = torch.full((1,), told, dtype=torch.int64, device=device)
    every = mine.new_empty(ranks)
    try:
        all_gather(every, mine, group=group)
    except RuntimeError as error:
        if device.type != "cpu":  # its host has waited for nobody: the error is about something else
            raise
        raise NsaSelError(
            f"rank {rank} could not compare its call with those of the other ranks ({where}): {error}. Remedy: look for the first error of"
            " another rank, make the same calls on all ranks, and start the job anew."
        ) from error
    alike = (every == mine).all()
    if device.type == "cpu":
        return bool(alike)
    if told != _MEETS:
        torch._assert_async(alike, _trapped(rank, where))
    return True


def _trapped(rank: int, where: str) -> str:
    """What the device-side assert prints; it takes less than 255 characters."""
    return (
        f"nsa-sel: ranks make different calls of context_parallel_attention (rank {rank}, {where}). Remedy: make the same calls in the same"
        " order; with NSA_DEBUG_TRITON=1 ranks name what differs."
    )


def _used(said: list[_Said]) -> Decision:
    """Rank 0's decision, unless it can't run anywhere or not on one of the others."""
    decision = said[0].decision
    assert decision is not None, "rank 0 sends its decision"
    message = refusal(decision)
    if message is not None:
        raise BackendError(message, decision)
    for rank, other in enumerate(said):
        for name in dict.fromkeys((decision.forward, decision.backward)):
            if name in other.refusals and name not in said[0].refusals:
                raise NsaSelError(
                    f"backend {name} is rank 0's choice, and rank {rank} refuses it: {other.refusals[name]}. Remedy: install the same"
                    " packages on all ranks, or force a backend that all have."
                )
    return decision


_digests: dict[str, str] = {}


def _digest(settings: Settings) -> str:
    """A fingerprint of the settings that must be alike: a log of one rank's own makes no other class of its calls."""
    if settings.fingerprint not in _digests:
        values = msgspec.json.encode(_alike(settings), order="deterministic")
        _digests[settings.fingerprint] = hashlib.sha256(values).hexdigest()
    return _digests[settings.fingerprint]


def _alike(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(settings).items() if name not in MAY_DIFFER}


def _facts(device: DeviceInfo, settings: Settings) -> dict[str, Any]:
    versions = {**msgspec.to_builtins(tuned.stamp_of(device)), **{name: _version(name) for name in _PACKAGES}}
    return {"versions": versions, "device": msgspec.to_builtins(device), "settings": _alike(settings)}


def _call_facts(call: int, direction: str, device: DeviceInfo, mine: Decision, arguments: dict[str, Any]) -> dict[str, Any]:
    request, override = msgspec.to_builtins(mine.request), msgspec.to_builtins(mine.override)
    return {"call": call, "direction": direction, **_facts(device, mine.settings), "request": request, "override": override, **arguments}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _meet(group: dist.ProcessGroup, mine: _Said) -> list[_Said]:
    """What every rank says, in order; NsaSelError where one does not come, or says something else than rank 0."""
    state = _state(group)
    rank, ranks, store = dist.get_rank(group), dist.get_world_size(group), group.get_group_store()
    names = [f"nsa_sel/meeting{state.meetings}/rank{each}" for each in range(ranks)]
    store.set(names[rank], msgspec.json.encode(mine).decode())
    began = time.monotonic()
    for each, name in enumerate(names):
        left = max(0.001, SECONDS - (time.monotonic() - began))
        try:
            store.wait([name], datetime.timedelta(seconds=left))
        except RuntimeError as error:  # what a store raises depends on its kind
            store.delete_key(names[rank])  # it is not what this rank says when the others come
            raise NsaSelError(_alone(rank, each, mine, state)) from error
    said = [msgspec.json.decode(store.get(name), type=_Said) for name in names]
    done = f"nsa_sel/meeting{state.meetings}/done"
    if store.add(done, 1) == ranks:  # a store may outlive its process group: the next one is to find nothing of this
        for name in (*names, done):
            store.delete_key(name)
    state.meetings += 1
    state.calls = max(other.calls for other in said)  # all raise now, or none does: they go on together
    for each, other in enumerate(said):
        differing = changes("", said[0].facts, other.facts)
        if differing:
            found = "; ".join(f"{change.field} is {change.replayed!r} there, {change.recorded!r} on rank 0" for change in differing)
            raise NsaSelError(
                f"rank {each} would not run what rank 0 runs: {found}. Remedy: make the same calls in the same order on all ranks of the"
                " group, with the same sizes, flags, files and packages."
            )
    state.last = mine.facts
    return said


def _alone(rank: int, missing: int, mine: _Said, state: _Group) -> str:
    """The error of a rank that waited for one that has agreed before, for another call than this, or is gone."""
    facts, last = msgspec.json.decode(msgspec.json.encode(mine.facts)), state.last or {}
    common = [name for name in facts if name in last and name not in ("call", "direction")]
    changed = [change for name in common for change in changes(name, last[name], facts[name])]
    since = "; ".join(f"{change.field} was {change.recorded!r}, is {change.replayed!r}" for change in changed)
    return (
        f"rank {rank} waited {SECONDS:g} seconds for rank {missing} to agree. It makes a call that the ranks agreed on before, or it has"
        f" failed. Here, since they last agreed: {since or 'nothing has changed'}. Remedy: make the same calls on all ranks, with the same"
        " flags; with NSA_DEBUG_TRITON=1 ranks meet at every call, and name the field."
    )
