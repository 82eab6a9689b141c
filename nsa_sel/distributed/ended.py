"""Whether the process of another rank has ended, asked by ranks that wait for it. A rank that compiles or loads data for minutes has not.

A connection tells: the operating system closes it with the process, and keeps it open whatever the process does. Groups with gloo have
connections; in others each rank listens at a port, and the rest connect to it when they first agree or wait. Nothing is ever sent.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from nsa_sel import forks

_TAG = 0x6E7361  # of messages that nobody receives
_MOST = 256  # processes that this one connects to, each by a file descriptor
_BACKLOG = 4096  # connections that the operating system accepts for a process, which never does itself
_links: dict[str, socket.socket] = {}  # this process's connections, by what other processes told of themselves


def name_process(group: dist.ProcessGroup) -> None:
    """Tell the other ranks of a group without gloo, through its store, where this rank's process listens."""
    if _has_gloo(group):
        return
    store = group.get_group_store()
    with contextlib.suppress(RuntimeError, OSError):  # a lost store is reported where ranks compare
        ip, port, *_ = _listener(_ip_towards(store)).getsockname()
        store.set(_key(dist.get_rank(group)), f"{_host()} {ip} {port}")
    connect(group)


def connect(group: dist.ProcessGroup) -> None:
    """Begin to connect to the ranks of a group without gloo that have named their processes. It does not wait for the network."""
    if not _has_gloo(group):
        with contextlib.suppress(RuntimeError):
            for rank in range(dist.get_world_size(group)):
                if rank != dist.get_rank(group):
                    has_ended(group, rank)


def has_ended(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether the process of the rank `rank` of `group` has ended for certain. Does not wait for that process.

    Without gloo it cannot tell of one that has not called `name_process`, nor of one on another host that had ended before this process
    connected to it: a firewall refuses connections, too.
    """
    return _connection_closed(group, rank) if _has_gloo(group) else _link_closed(group, rank)


def _has_gloo(group: dist.ProcessGroup) -> bool:
    return "cpu:gloo" in dist.get_backend_config(group)


def _connection_closed(group: dist.ProcessGroup, rank: int) -> bool:
    """gloo refuses to send through a closed connection. An open one keeps the message, and serves others as before."""
    try:
        group.send([torch.zeros(1, device="cpu")], rank, _TAG)
    except RuntimeError:
        return True
    return False


def _link_closed(group: dist.ProcessGroup, rank: int) -> bool:
    store, key = group.get_group_store(), _key(rank)
    if not store.check([key]):
        return False
    told = store.get(key).decode()
    host, ip, port = told.rsplit(" ", 2)
    if host != _host() and ipaddress.ip_address(ip).is_loopback:  # here it is another process's
        return False
    if told not in _links and len(_links) >= _MOST:
        return False
    try:
        if told not in _links:
            _links[told] = socket.socket(_family(ip))
            _links[told].setblocking(False)
            _links[told].connect_ex((ip, int(port)))
        _links[told].recv(1)  # nobody sends: it is closed
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    except OSError as error:  # a next question tries again
        if told in _links:
            _links.pop(told).close()
        return isinstance(error, ConnectionRefusedError) and host == _host()
    return True


@functools.cache
def _listener(ip: str) -> socket.socket:
    """The port of this process, at which the operating system accepts connections. Children of the process do not keep it open."""
    listener = socket.create_server((ip, 0), family=_family(ip), backlog=_BACKLOG)
    forks.in_child(listener.close)
    return listener


def _ip_towards(store: Any) -> str:
    """This host's IP address on the way to the store, which all ranks reach."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    for family, *_, address in socket.getaddrinfo(getattr(store, "host", "localhost"), 1, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as route:
            route.connect(address)  # sends nothing
            return str(route.getsockname()[0])
    raise OSError("no route to the store")


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _key(rank: int) -> str:
    return f"nsa_sel/process/rank{rank}"


def _host() -> str:
    """Equal in processes that share a loopback interface: of one network namespace, on one host, since it started."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"unknown, process {os.getpid()}"
