"""A thread-safe queue of requests for the scheduler, in order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from completions import Finished, Request

from nsa_sel.errors import ArgumentError


class Busy(Exception):
    """The request is refused for now: too many requests wait, or the server is stopping."""


class Limits(NamedTuple):
    """Limits of a server.

    context: most bytes of a prompt and its completion together; they must fit the cache.
    running: most sequences that hold pages.
    waiting: most requests that wait.
    chunk: most bytes that one step prefills, at least 2.
    prefixes: most sequences that are kept for texts with the same prefix.
    """

    context: int
    running: int = 16
    waiting: int = 64
    chunk: int = 512
    prefixes: int = 256


class RequestQueue:
    """Waiting and running requests.

    Args:
        limits: see `Limits`.

    Attributes:
        waiting: requests without pages, the next one first. Preempted requests come before new ones.
        running: requests with pages, which the scheduler moves here, the oldest first.
        closed: the reason why new requests are refused; empty while they are accepted.
        changed: the condition that guards the other attributes.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.closed = limits, ""
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.changed = threading.Condition()

    def submit(self, request: Request) -> None:
        """Enqueue a request. Raises ArgumentError if it is empty or too long, and Busy."""
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
        """Cancel a request before the next step. No effect if it has ended."""
        with self.changed:
            request.canceled = True
            self.changed.notify()

    def close(self, why: str) -> None:
        """Refuse new requests, and end those that never ran."""
        with self.changed:
            self.closed = self.closed or why
            for request in [request for request in self.waiting if not request.started]:
                self.waiting.remove(request)
                request.emit(Finished("error", why))
            self.changed.notify()

    def requeue(self, request: Request) -> None:
        """Put a preempted request at the head of the queue."""
        with self.changed:
            self.waiting.appendleft(request)

    def forget_canceled(self) -> None:
        """Drop canceled requests."""
        with self.changed:
            self.waiting = deque(request for request in self.waiting if not request.canceled)

    def wait(self) -> bool:
        """Block until there is a request. Return False once the queue is closed and empty."""
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.running or self.closed)
            return bool(self.waiting or self.running)
