"""Ranks agree: what they decide by is compared once a class of calls, and all use the decision of rank 0.

They meet in the store that the job was set up with, not in a collective: a rank that nobody joins gets an error that says whom it
waited for, and no message of an agreement can be taken for one of a model.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import time
import weakref
from typing import Any, cast

import msgspec
import torch
from torch import distributed as dist

from nsa_sel import attention, dispatch, tuned
from nsa_sel.call import device_info
from nsa_sel.config import Settings, settings_for
from nsa_sel.decision import REFUSING_KINDS, Decision
from nsa_sel.errors import BackendError, NsaSelError
from nsa_sel.request import DeviceInfo, Request

SECONDS = 300.0  # that a rank waits for the others: a first call may compile for minutes
MAY_DIFFER = ("debug_log", "fingerprint", "sources")  # of the settings: a log for each rank, and what only says where values are from
_PACKAGES = ("torch", "triton", "numba", "cupy-cuda13x", "cupy-cuda12x")


class _Said(msgspec.Struct, frozen=True):
    """What a rank puts into the store: what must be alike, why its backends refuse, and its decision."""

    facts: dict[str, Any]
    refusals: dict[str, str]
    decision: Decision | None


class _Group:
    """What a process group has agreed on, and how often it met."""

    def __init__(self) -> None:
        self.meetings = 0
        self.decisions: dict[Any, Decision] = {}
        self.last: dict[str, Any] | None = None


_groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()


def check_ranks(group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
    """Compare versions, settings and device profiles of all ranks of `group` (by default of all); every one of them calls it.

    For calls that no agreement stands before, those of DTensors and of shards that are plain tensors: each rank decides for its own
    shard, by facts that this finds to be alike. Raises NsaSelError on all ranks, naming rank and field, where they are not, and
    after `SECONDS` where a rank does not come. device: by default the current GPU, else the CPU.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    info = device_info(device)
    _meet(group or cast(dist.ProcessGroup, dist.group.WORLD), _Said(_facts(info, settings_for(info), None), {}, None))


def agree(request: Request, device: DeviceInfo, group: dist.ProcessGroup, backend: str | None, **arguments: Any) -> Decision:
    """Rank 0's decision for a class of calls that all ranks of `group` make, each with its own `request`, which must be alike.

    Ranks meet once a class, and again when a flag changes or, with NSA_DEBUG_TRITON=1, at every call. Raises NsaSelError naming rank
    and field where something differs, BackendError where nothing may run the call, both on all ranks, and NsaSelError after
    `SECONDS` where a rank does not come.
    """
    mine = attention.select(request, device, backend)
    key = (mine.request, device, _digest(mine.settings), mine.override, *sorted(arguments.items()))
    known = _groups.setdefault(group, _Group()).decisions
    if key not in known or mine.settings.debug_triton:
        refusals = {
            verdict.backend: "; ".join(str(reason) for reason in reasons)
            for verdict in mine.verdicts
            if (reasons := [reason for reason in (*verdict.forward, *verdict.backward) if reason.kind in REFUSING_KINDS])
        }
        facts = _facts(device, mine.settings, mine.request, override=msgspec.to_builtins(mine.override), **arguments)
        known[key] = _used(_meet(group, _Said(facts, refusals, mine if dist.get_rank(group) == 0 else None)))
    return known[key]


def _used(said: list[_Said]) -> Decision:
    """Rank 0's decision, unless it can't run anywhere or not on one of the others."""
    decision = said[0].decision
    assert decision is not None, "rank 0 sends its decision"
    message = dispatch.refusal(decision)
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


def _facts(device: DeviceInfo, settings: Settings, request: Request | None, **arguments: Any) -> dict[str, Any]:
    versions = {**msgspec.to_builtins(tuned.stamp_of(device)), **{name: _version(name) for name in _PACKAGES}}
    return {
        "versions": versions,
        "device": msgspec.to_builtins(device),
        "settings": _alike(settings),
        "request": msgspec.to_builtins(request),
        **arguments,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _meet(group: dist.ProcessGroup, mine: _Said) -> list[_Said]:
    """What every rank says, in order; NsaSelError where one does not come, or says something else than rank 0."""
    state = _groups.setdefault(group, _Group())
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
    for each, other in enumerate(said):
        changes = dispatch.changes("", said[0].facts, other.facts)
        if changes:
            found = "; ".join(f"{change.field} is {change.replayed!r} there, {change.recorded!r} on rank 0" for change in changes)
            raise NsaSelError(
                f"rank {each} would not run what rank 0 runs: {found}. Remedy: give all ranks of the group the same sizes, flags,"
                " files and packages."
            )
    state.last = mine.facts
    return said


def _alone(rank: int, missing: int, mine: _Said, state: _Group) -> str:
    """The error of a rank that waited for one that has agreed before, for another call than this, or is gone."""
    changed = dispatch.changes("", state.last, msgspec.json.decode(msgspec.json.encode(mine.facts))) if state.last else []
    since = "; ".join(f"{change.field} was {change.recorded!r}, is {change.replayed!r}" for change in changed)
    return (
        f"rank {rank} waited {SECONDS:g} seconds for rank {missing} to agree on a call. It makes another one, whose class the ranks know"
        f" already, or it has failed. Here, since they last agreed: {since or 'nothing they agreed on'}. Remedy: make the same calls on all"
        " ranks, with the same flags; with NSA_DEBUG_TRITON=1 ranks compare every call, and name the field."
    )
