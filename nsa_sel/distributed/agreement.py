"""Agreement of ranks: once per class of calls they compare their facts, and all take rank 0's decision.

Facts are compared through the job's store; a rank that waits in vain, or for a process that has ended, raises and names the missing rank.
Before the first exchange of a call, forward and backward, ranks also compare 8 bytes each: a digest of what was agreed, plus the number of
the call. A rank that fails alone between two exchanges, where nothing is compared, makes no further call and runs no backward pass.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch import distributed as dist
from torch.autograd.graph import Node

from nsa_sel.core import decide
from nsa_sel.core.backend import REFUSING_KINDS
from nsa_sel.core.call import device_info
from nsa_sel.core.decision import Decision, changes, refusal
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.distributed.ended import connect, has_ended, name_process
from nsa_sel.distributed.exchange_all import all_gather
from nsa_sel.errors import ArgumentError, BackendError, NsaSelError
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.schema import Settings

SECONDS = 300.0  # a rank's wait for the others: a first call may compile for minutes
_ASK_EVERY = 1.0  # seconds of waiting, after which a rank asks whether those it waits for have ended
MAY_DIFFER = ("debug_log", "fingerprint", "sources")  # settings that ranks need not share: their logs, and where values come from
_PACKAGES = ("torch", "triton", "numba", "cupy-cuda13x", "cupy-cuda12x")
_CLASSES = 1024  # remembered per group: decoding over growing slices makes one per step
_UNAGREED = 0  # instead of a digest: this rank has not agreed on the class


class _Report(msgspec.Struct, frozen=True):
    """What a rank puts into the store."""

    facts: dict[str, Any]  # must be equal on all ranks
    refusals: dict[str, str]  # backend -> why this rank can't run it
    decision: Decision | None
    calls: int  # begun so far


class _Group:
    """What a process group has agreed on."""

    def __init__(self) -> None:
        self.rounds = 0  # of comparing reports
        self.calls = 0  # that this rank has begun
        self.owed = collections.Counter[int]()  # `_backward_pass` -> exchanges that this rank failed before, or has still to make in it
        self.agreed: dict[Any, tuple[Decision, int]] = {}  # class of calls -> decision, digest
        self.last_facts: dict[str, Any] = {}


_groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()


def _state(group: dist.ProcessGroup) -> _Group:
    if group not in _groups:
        _groups[group] = _Group()
        name_process(group)
    return _groups[group]


def group_of(group: Any, caller: str) -> dist.ProcessGroup:
    """The process group that the argument `group` of `caller` names; None is all ranks.

    Raises:
        NsaSelError: outside of a distributed job.
        ArgumentError: it is neither a ProcessGroup nor a DeviceMesh of one dimension, or this rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise NsaSelError(
            f"{caller} is called outside a distributed job; allowed: after torch.distributed.init_process_group."
            " Remedy: launch it with torchrun and initialize, or call selection_attention."
        )
    if group is None:
        group = dist.group.WORLD
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("group", "one without this rank", "one with it", f"call {caller} on the ranks of the group alone")
    elif hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ArgumentError("group", f"a mesh of {group.ndim} dimensions", "one dimension", "pass mesh['name of the dimension']")
        group = group.get_group()
    elif not isinstance(group, dist.ProcessGroup):
        raise ArgumentError("group", f"a {type(group).__name__}", "a ProcessGroup or a DeviceMesh", "leave it out for all ranks")
    _state(group)  # names this process, before it can fail
    return group  # type: ignore[no-any-return]


def check_ranks(group: Any = None, device: torch.device | None = None) -> None:
    """Compare versions, settings and device profiles of all ranks of `group`; each of them calls it.

    For calls on shards and DTensors, which have no exchange of ours: each rank decides for its own shard, from facts that this checks. It
    also lets ranks continue together after a call that failed on some of them.

    Args:
        group: ProcessGroup or DeviceMesh of one dimension, by default all ranks.
        device: whose facts to compare, by default the current GPU, else the CPU.

    Raises:
        NsaSelError: ranks differ (on all of them, naming rank and field); a rank has ended, or does not join within 300 s; there is no
            distributed job.
        ArgumentError: `group` is no group with this rank.
    """
    group = group_of(group, "check_ranks")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    info = device_info(device)
    _compare_reports(group, _Report(_facts(info, settings_for(info)), {}, None, _state(group).calls))
    _state(group).owed.clear()


def begin_call(group: dist.ProcessGroup) -> None:
    """Count a call before it can fail: a rank that fails alone and continues is then one call ahead, which the others notice.

    Raises:
        NsaSelError: as `_refuse_after_failure`.
    """
    _refuse_after_failure(group)
    _state(group).calls += 1


def _refuse_after_failure(group: dist.ProcessGroup) -> None:
    """NsaSelError where this rank failed between two exchanges of an earlier call or backward pass, in which the others may wait."""
    running = _backward_pass()
    if any(running < 0 or owing != running for owing in _state(group).owed):
        raise NsaSelError(
            f"rank {group.rank()} failed between two exchanges of an earlier call, and other ranks may wait in the next of them. Remedy:"
            " restart the job; where all ranks failed alike, call check_ranks() on all of them and continue."
        )


def _backward_pass() -> int:
    """The number of the backward pass that runs; -1 outside of one."""
    return torch._C._current_graph_task_id()


@contextlib.contextmanager
def between_exchanges(group: dist.ProcessGroup) -> Iterator[None]:
    """Where this rank fails now, and it is no error that all ranks raise, it makes no further call (`_refuse_after_failure`)."""
    try:
        yield
    except NsaSelError:
        raise
    except RuntimeError:
        _state(group).owed[_backward_pass()] += 1
        raise


def exchanged(group: dist.ProcessGroup) -> None:
    """One of the exchanges is made for which `Agreed.before_backward` compared once."""
    owed, running = _state(group).owed, _backward_pass()
    owed[running] -= 1
    if owed[running] <= 0:
        del owed[running]


class Agreed(NamedTuple):
    """What the ranks of a group agreed on for one call: this rank decided `mine`, and all run `decision`."""

    decision: Decision
    group: dist.ProcessGroup
    call: int
    digest: int
    mine: Decision
    device: DeviceInfo
    arguments: dict[str, Any]
    exchanges: dict[str, Node | None] | None  # of a call with several: their nodes of autograd, by name; None: as part of such a call

    def before_backward(self, device: torch.device) -> None:
        """NsaSelError unless all ranks run the backward pass of this call, with the same exchanges, or as `_refuse_after_failure`. Called
        before the first of them."""
        if self.exchanges is None:
            return
        runs = [node is not None and torch._C._will_engine_execute_node(node) for node in self.exchanges.values()]
        if runs and not any(runs):
            return
        _refuse_after_failure(self.group)
        which = sum(run << place for place, run in enumerate(runs)) << 40  # above the number of any call
        if not _digests_match(self.group, self.digest + 2 * self.call + 1 + which, device, f"call {self.call}, backward"):
            names = ", ".join(name for name, run in zip(self.exchanges, runs, strict=True) if run)
            facts = _call_facts(self.call, "backward", self.device, self.mine, {**self.arguments, "exchanges": names})
            _compare_reports(self.group, _Report(facts, {}, None, _state(self.group).calls))
        if runs:
            _state(self.group).owed[_backward_pass()] += sum(runs)

    def after_backward(self) -> None:
        """Called after its exchange."""
        if self.exchanges is None:
            exchanged(self.group)


def agree(
    request: Request,
    device: DeviceInfo,
    group: dist.ProcessGroup,
    backend: str | None,
    at: torch.device,
    count: Callable[[Request], Request] | None = None,
    within: Agreed | None = None,
    **arguments: Any,
) -> Agreed:
    """Rank 0's decision for a call that all ranks of `group` make with equal requests.

    Ranks compare reports once per class, again when a flag changes, and with NSA_DEBUG_TRITON=1 at every call. Before that they compare
    digests, so that on a CPU all of them compare reports as soon as one makes another call than the rest. The group's first call skips
    the digests: tensors may not even be on devices of one kind.

    Args:
        request: of this rank's call.
        device: its facts.
        group: the ranks.
        backend: a name to force.
        at: the device of this rank's tensors.
        count: adds to the request what only rank 0, which decides, counts of its own rows; once per class.
        within: a call that this one is part of, whose class says all of this one's facts: there is nothing left to compare but for a
            class that is new to all ranks.
        arguments: further values that must be equal.

    Raises:
        NsaSelError: on all ranks, naming rank and field, where something differs; where a rank has ended, and after `SECONDS` where one
            does not join.
        BackendError: on all ranks, where nothing may run the call.
    """
    mine = decide.select(request, device, backend)
    state = _state(group)
    key = (mine.request, device, _digest(mine.settings), mine.override, *sorted(arguments.items()))
    decision, digest = (None, _UNAGREED) if mine.settings.debug_triton else state.agreed.get(key, (None, _UNAGREED))
    sent = _UNAGREED if decision is None else digest + 2 * state.calls
    match = within is not None or not state.agreed or _digests_match(group, sent, at, f"call {state.calls}, forward")
    if decision is None or not match:
        refusals = {
            verdict.backend: "; ".join(str(reason) for reason in reasons)
            for verdict in mine.verdicts
            if (reasons := [reason for reason in (*verdict.forward, *verdict.backward) if reason.kind in REFUSING_KINDS])
        }
        facts = _call_facts(state.calls, "forward", device, mine, arguments)
        first = dist.get_rank(group) == 0
        decided = decide.select(count(request), device, backend) if first and count else mine
        reports = _compare_reports(group, _Report(facts, refusals, decided if first else None, state.calls))
        decision = _rank_0_decision(reports)
        rank_0_facts = msgspec.json.encode(reports[0].facts, order="deterministic")
        digest = int.from_bytes(hashlib.sha256(rank_0_facts).digest()[:8], "big") >> 2  # leaves room to add the number of a call
        if len(state.agreed) >= _CLASSES:
            state.agreed.clear()
        state.agreed[key] = decision, digest
    return Agreed(decision, group, state.calls, digest, mine, device, arguments, None if within else {})


def _digests_match(group: dist.ProcessGroup, digest: int, device: torch.device, where: str) -> bool:
    """Whether all ranks send the same digest: one collective of 8 bytes per rank.

    On a CPU the answer is read. On a GPU the host does not wait: the GPU compares, in four small kernels, and where digests differ a
    device-side assert ends the CUDA context before the exchange. A rank that has not agreed yet has no assert: it gets its error when
    reports are compared.
    """
    ranks, rank = group.size(), group.rank()
    if ranks == 1:
        return True
    mine = torch.full((1,), digest, dtype=torch.int64, device=device)
    every = mine.new_empty(ranks)
    try:
        all_gather(every, mine, group=group)
    except RuntimeError as error:
        if device.type != "cpu":  # its host does not wait: the error has another cause
            raise
        raise NsaSelError(
            f"rank {rank} could not compare its call with those of the other ranks ({where}): {error}. Remedy: look for the first error of"
            " another rank, make the same calls on all ranks, and restart the job."
        ) from error
    match = (every == digest).all()
    if device.type == "cpu":
        return bool(match)
    if digest != _UNAGREED:
        torch._assert_async(match, _assert_message(rank, where))
    return True


def _assert_message(rank: int, where: str) -> str:
    """The text of the device-side assert, which allows fewer than 255 characters."""
    return (
        f"nsa-sel: ranks make different calls of context_parallel_attention (rank {rank}, {where}). Remedy: make the same calls in the same"
        " order; with NSA_DEBUG_TRITON=1 ranks name what differs."
    )


def _rank_0_decision(reports: list[_Report]) -> Decision:
    """Rank 0's decision; an error where it has no backend, or one that another rank can't run."""
    decision = reports[0].decision
    assert decision is not None, "rank 0 sends its decision"
    message = refusal(decision)
    if message is not None:
        raise BackendError(message, decision)
    for rank, other in enumerate(reports):
        for name in dict.fromkeys((decision.forward, decision.backward)):
            if name in other.refusals and name not in reports[0].refusals:
                raise NsaSelError(
                    f"backend {name} is rank 0's choice, and rank {rank} refuses it: {other.refusals[name]}. Remedy: install the same"
                    " packages on all ranks, or force a backend that all have."
                )
    return decision


_digests: dict[str, str] = {}


def _digest(settings: Settings) -> str:
    """A fingerprint of the settings that ranks must share."""
    if settings.fingerprint not in _digests:
        values = msgspec.json.encode(_shared(settings), order="deterministic")
        _digests[settings.fingerprint] = hashlib.sha256(values).hexdigest()
    return _digests[settings.fingerprint]


def _shared(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(settings).items() if name not in MAY_DIFFER}


def _facts(device: DeviceInfo, settings: Settings) -> dict[str, Any]:
    versions = {**msgspec.to_builtins(tuned.stamp_of(device)), **{name: tuned.version_of(name) for name in _PACKAGES}}
    return {"versions": versions, "device": msgspec.to_builtins(device), "settings": _shared(settings)}


def _call_facts(call: int, direction: str, device: DeviceInfo, mine: Decision, arguments: dict[str, Any]) -> dict[str, Any]:
    request, override = msgspec.to_builtins(mine.request), msgspec.to_builtins(mine.override)
    return {"call": call, "direction": direction, **_facts(device, mine.settings), "request": request, "override": override, **arguments}


def _compare_reports(group: dist.ProcessGroup, mine: _Report) -> list[_Report]:
    """The reports of all ranks, in their order; NsaSelError where a rank does not join, or its facts differ from rank 0's."""
    state = _state(group)
    try:
        reports = _exchanged(group, mine, state)
    except RuntimeError as error:  # what a store raises depends on its kind
        raise NsaSelError(
            f"rank {dist.get_rank(group)} lost the store through which ranks compare their calls: {error}. The process that"
            " holds it, rank 0's or the launcher's, has ended. Remedy: look for its first error, and restart the job."
        ) from error
    state.rounds += 1
    state.calls = max(other.calls for other in reports)  # all ranks raise now or none does: they continue together
    for each, other in enumerate(reports):
        differing = changes("", reports[0].facts, other.facts)
        if differing:
            found = "; ".join(f"{change.field} is {change.replayed!r} there, {change.recorded!r} on rank 0" for change in differing)
            raise NsaSelError(
                f"rank {each} would not run what rank 0 runs: {found}. Remedy: make the same calls in the same order on all ranks of the"
                " group, with the same sizes, flags, files and packages."
            )
    state.last_facts = mine.facts
    return reports


def _exchanged(group: dist.ProcessGroup, mine: _Report, state: _Group) -> list[_Report]:
    rank, ranks, store = dist.get_rank(group), dist.get_world_size(group), group.get_group_store()
    names = [f"nsa_sel/round{state.rounds}/rank{each}" for each in range(ranks)]
    store.set(names[rank], msgspec.json.encode(mine).decode())
    began = asked = time.monotonic()
    while not store.check(names):
        now = time.monotonic()
        if now - asked >= min(_ASK_EVERY, SECONDS):
            asked, missing = now, _missing(group, names)
            if missing and now - began >= SECONDS:
                store.delete_key(names[rank])  # outdated when the others join later
                raise NsaSelError(_timeout_message(rank, missing[0], mine, state))
        time.sleep(min(0.1, 0.001 + (now - began) / 10))
    reports = [msgspec.json.decode(store.get(name), type=_Report) for name in names]
    done = f"nsa_sel/round{state.rounds}/done"
    if store.add(done, 1) == ranks:  # a store may outlive its process group, and serve the next one
        for name in (*names, done):
            store.delete_key(name)
    if state.rounds == 0:  # all have named their processes
        connect(group)
    return reports


def _missing(group: dist.ProcessGroup, names: list[str]) -> list[int]:
    """The ranks whose reports, `names`, are not there yet; NsaSelError where the process of one has ended."""
    store = group.get_group_store()
    missing = [each for each, name in enumerate(names) if not store.check([name])]
    for each in missing:
        if has_ended(group, each) and not store.check([names[each]]):  # it did not report in between
            raise NsaSelError(
                f"rank {dist.get_rank(group)} waits for rank {each} to agree, whose process has ended or lost its connection. Remedy: look"
                f" for the first error of rank {each}, and restart the job."
            )
    return missing


def _timeout_message(rank: int, missing: int, mine: _Report, state: _Group) -> str:
    """The error of a rank that waited in vain, with what has changed on it since ranks last agreed."""
    facts, last = msgspec.json.decode(msgspec.json.encode(mine.facts)), state.last_facts
    common = [name for name in facts if name in last and name not in ("call", "direction")]
    changed = [change for name in common for change in changes(name, last[name], facts[name])]
    since = "; ".join(f"{change.field} was {change.recorded!r}, is {change.replayed!r}" for change in changed)
    return (
        f"rank {rank} waited {SECONDS:g} seconds for rank {missing} to agree. It makes a call that the ranks agreed on before, or it has"
        f" failed. Here, since they last agreed: {since or 'nothing has changed'}. Remedy: make the same calls on all ranks, with the same"
        " flags; with NSA_DEBUG_TRITON=1 ranks compare at every call, and name the field."
    )
