"""Check that all ranks of a group decide from equal facts: versions, settings, tuning results, device and arguments.

Ranks compare a digest of these facts at the first call of a group, and at every call with NSA_DEBUG_TRITON=1. After
that each rank decides for itself. Ranks that wait for one that has died or makes other calls get torch.distributed's
own errors and timeouts.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel.core.call import device_info
from nsa_sel.core.decide import forced_name, may_wait
from nsa_sel.core.decision import changes
from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.settings import tuned
from nsa_sel.settings.config import settings_for

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the older name, deprecated since torch 2.13
MAY_DIFFER = ("debug_log", "fingerprint", "sources")  # settings that ranks need not share: their logs, and where values come from
_PACKAGES = ("torch", "triton", "numba", "cupy-cuda13x", "cupy-cuda12x")
_compared: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups whose ranks have compared a call


def group_of(group: Any, caller: str) -> dist.ProcessGroup:
    """Return the process group that the argument `group` of `caller` names; None is all ranks.

    Raises:
        NsaSelError: there is no distributed job.
        ArgumentError: `group` is neither a ProcessGroup nor a DeviceMesh of one dimension, or this rank is not in it.
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
    return group  # type: ignore[no-any-return]


def check_ranks(group: Any = None, device: torch.device | None = None) -> None:
    """Compare versions, settings, tuning results and devices of all ranks of `group`. A collective: every rank calls
    it.

    Call it once after init_process_group when ranks attend to shards or DTensors. Those calls compare nothing: each
    rank decides for its own shard.

    Args:
        group: ProcessGroup or DeviceMesh of one dimension, by default all ranks.
        device: the device to compare, by default the current GPU, else the CPU.

    Raises:
        NsaSelError: ranks differ (raised on all of them, naming rank and field), or there is no distributed job.
        ArgumentError: `group` is no group with this rank.
    """
    group = group_of(group, "check_ranks")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    _compare(group, device, {"call": "check_ranks"})


def compare_call(group: dist.ProcessGroup, q: Tensor, name: str, facts: Callable[[], dict[str, Any]]) -> None:
    """Compare a call with those of the other ranks, if it is the group's first one or NSA_DEBUG_TRITON=1 is set.

    Calls are not compared where the host may not wait for the device: while a CUDA graph is captured, or if PyTorch's
    sync debug mode forbids it.

    Args:
        group: the ranks that make the call.
        q: queries of this rank, on the device of the call.
        name: the called function.
        facts: returns the sizes and arguments that must be equal on all ranks.

    Raises:
        NsaSelError: on all ranks, naming rank and field, where something differs.
    """
    if (group in _compared and not settings_for(device_info(q.device)).debug_triton) or not may_wait(q):
        return
    _compare(group, q.device, {"call": name, **facts(), "use_backend": forced_name.get()})
    _compared.add(group)


def _compare(group: dist.ProcessGroup, device: torch.device, call: dict[str, Any]) -> None:
    """Compare a digest of this rank's facts with all ranks' in one all_gather; if they differ, gather the facts and
    raise."""
    info = device_info(device)
    settings, table = msgspec.to_builtins(settings_for(info)), tuned.in_force(info)
    facts = {
        "versions": {**msgspec.to_builtins(tuned.stamp_of(info)), **{name: tuned.version_of(name) for name in _PACKAGES}},
        "device": msgspec.to_builtins(info),
        "settings": {name: value for name, value in settings.items() if name not in MAY_DIFFER},
        "tuning": table and f"{table.name} {table.fingerprint}",
        **msgspec.to_builtins(call),
    }
    digest = hashlib.sha256(msgspec.json.encode(facts, order="deterministic")).digest()[:8]
    # If the group has a CPU backend, compare there: ranks whose tensors are on different kinds of devices must get the
    # error, too.
    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    elif device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor([int.from_bytes(digest, "big", signed=True)], device=device)
    digests = mine.new_empty(group.size())
    all_gather(digests, mine, group=group)
    if len(set(digests.tolist())) == 1:
        return
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, facts, group=group)
    for rank, other in enumerate(ranks):
        if differing := changes("", ranks[0], other):
            words = "; ".join(f"{change.field} is {change.replayed!r} there, {change.recorded!r} on rank 0" for change in differing)
            raise NsaSelError(
                f"rank {rank} would not run what rank 0 runs: {words}. Remedy: make the same calls in the same order on all ranks of the"
                " group, with the same sizes, flags, files and packages."
            )
