"""Whether the process of another rank has ended, asked by ranks that wait for it. A rank that compiles or loads data for minutes has not.

Nothing runs in between: gloo's connections close with a process, and without gloo the operating system knows the processes of this host.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from torch import distributed as dist

_TAG = 0x6E7361  # of messages that nobody receives


def name_process(group: dist.ProcessGroup) -> None:
    """Tell the other ranks of a group without gloo, through its store, which process this rank is."""
    if not _has_gloo(group):
        with contextlib.suppress(RuntimeError):  # a lost store is reported where ranks compare
            group.get_group_store().set(_key(dist.get_rank(group)), f"{_host()} {os.getpid()}")


def has_ended(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether the process of the rank `rank` of `group`, not this one, has ended for certain. Does not wait for that process.

    Without gloo it may be unable to tell: of a rank on another host, and of one that has not called `name_process`.
    """
    return _connection_closed(group, rank) if _has_gloo(group) else _process_gone(group, rank)


def _has_gloo(group: dist.ProcessGroup) -> bool:
    return "cpu:gloo" in dist.get_backend_config(group)


def _connection_closed(group: dist.ProcessGroup, rank: int) -> bool:
    """gloo refuses to send through a closed connection. An open one keeps the message, and serves others as before."""
    try:
        group.send([torch.zeros(1, device="cpu")], rank, _TAG)
    except RuntimeError:
        return True
    return False


def _process_gone(group: dist.ProcessGroup, rank: int) -> bool:
    store, key = group.get_group_store(), _key(rank)
    if not store.check([key]):
        return False
    host, _, number = store.get(key).decode().rpartition(" ")
    if host != _host():
        return False
    try:
        os.kill(int(number), 0)  # no signal
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or no /proc
        return False
    return state in "ZX"  # ended, and its parent has not asked for its status


def _key(rank: int) -> str:
    return f"nsa_sel/process/rank{rank}"


def _host() -> str:
    """Equal in processes whose numbers may be compared: of one container, on one host, since it started."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown, process {os.getpid()}"
