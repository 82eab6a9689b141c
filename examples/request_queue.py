"""Requests that wait for a scheduler, in order of arrival. For any thread."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from completions import Finished, Request

from nsa_sel.errors import ArgumentError


class Busy(Exception):
    """No request is taken now: too many wait, or the server is stopping."""


class Limits(NamedTuple):
    """What a server takes on.

    context: bytes of a prompt and its completion together; they must fit the cache.
    running: sequences that hold pages.
    waiting: requests beside as many as may run.
    chunk: bytes that one step prefills, at least 2.
    prefixes: sequences that are kept for texts that begin as theirs.
    """

    context: int
    running: int = 16
    waiting: int = 64
    chunk: int = 512
    prefixes: int = 256


class RequestQueue:
    """Requests without pages.

    Args:
        limits: see there.

    Attributes:
        waiting: the next one first. Those that gave their pages back come before those that never ran.
        running: those with pages, which the scheduler moves here; the oldest first.
        closed: why no request is taken; empty while they are.
        changed: held by whoever reads or writes the others.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.closed = limits, ""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.changed = threading.Condition()

    def submit(self, request: Request) -> None:
        """Take a request. Raises ArgumentError for one that is empty or too long, and Busy."""
        if not request.prompt:
            raise ArgumentError("prompt", "empty", "at least one byte", "send the text to complete, such as a newline")
        if len(request.prompt) + request.max_tokens > (most := self.limits.context):
            value = f"of {len(request.prompt)} bytes, with max_tokens = {request.max_tokens}"
            raise ArgumentError("prompt", value, f"with max_tokens {most} bytes in all", "send a shorter prompt, or a smaller max_tokens")
        with self.changed:
            if self.closed:
                raise Busy(self.closed)
            if len(self.running) + len(self.waiting) >= self.limits.running + self.limits.waiting:
                raise Busy(f"{len(self.running)} requests run and {len(self.waiting)} wait, as many as may; try again later")
            self.waiting.append(request)
            self.changed.notify()

    def cancel(self, request: Request) -> None:
        """Have a request forgotten before the next step; nothing where it has ended."""
        with self.changed:
            request.canceled = True
            self.changed.notify()

    def close(self, why: str) -> None:
        """Take no requests anymore, and end those that never ran."""
        with self.changed:
            self.closed = self.closed or why
            for request in [request for request in self.waiting if not request.started]:
                self.waiting.remove(request)
                request.emit(Finished("error", why))
            self.changed.notify()

    def put_back(self, request: Request) -> None:
        """Take one first that has run."""
        with self.changed:
            self.waiting.appendleft(request)

    def forget_canceled(self) -> None:
        """Drop those that nobody waits for."""
        with self.changed:
            self.waiting = deque(request for request in self.waiting if not request.canceled)

    def wait(self) -> bool:
        """Sleep until there is something to do. False once nothing runs or waits, and nothing will."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.running or self.closed)
            return bool(self.waiting or self.running)
