"""Continuous batching over an NSACache: which sequences the next steps of the model advance, and which requests wait.

A step decodes a byte of every running sequence, then prefills a bounded number of bytes of texts that are not in the cache yet, oldest
first. Requests are admitted in order of arrival, when pages for their text are free. When pages run out, the youngest sequence gives its
own back and waits in front of the others: its text is kept, sent bytes included, and prefilled again.

One thread runs `Scheduler.run` and alone calls the model. Everything else is for any thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from typing import Any, NamedTuple

from completions import Finished, Request

from nsa_sel.errors import ArgumentError, CacheFull

TOGETHER = 4  # texts that one call prefills, each by at most a TOGETHER-th of a chunk: two sizes of steps, which can be captured
log = logging.getLogger("nsa_sel.examples.scheduler")


class Busy(Exception):
    """No request is taken now: too many wait, or the server is stopping."""


class Limits(NamedTuple):
    """What a server takes on.

    context: bytes of a prompt and its completion together; they must fit the cache.
    running: sequences that hold pages.
    waiting: requests beside them.
    chunk: bytes that one step prefills, at least 2.
    """

    context: int
    running: int = 16
    waiting: int = 64
    chunk: int = 512


class Scheduler:
    """Requests that wait and requests that run.

    Args:
        engine: has the `cache`, its `page_size`, and `logits(sequences, texts)`: [B,256] float32 on the CPU after the next bytes of B
            sequences; where pages are missing it raises CacheFull, and changes nothing.
        limits: see there.
    """

    def __init__(self, engine: Any, limits: Limits) -> None:
        self.engine, self.cache, self.limits = engine, engine.cache, limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.put_back = 0  # sequences that gave their pages to others
        self.closed = ""  # why no request is taken
        self.stopped = False
        self.changed = threading.Condition()

    def submit(self, request: Request) -> None:
        """Take a request. Raises ArgumentError for one that is too long, and Busy."""
        size, most = len(request.prompt) + request.max_tokens, self.limits.context
        if size > most or not request.prompt:
            value = f"of {len(request.prompt)} bytes, with max_tokens = {request.max_tokens}"
            allowed = f"at least one byte, and with max_tokens {most} in all"
            raise ArgumentError("prompt", value, allowed, "send a shorter prompt, or a smaller max_tokens")
        with self.changed:
            if self.closed:
                raise Busy(self.closed)
            if len(self.waiting) >= self.limits.waiting:
                raise Busy(f"{len(self.waiting)} requests are waiting, as many as may; try again later")
            self.waiting.append(request)
            self.changed.notify()

    def cancel(self, request: Request) -> None:
        """Forget a request before the next step, and free its pages; nothing where it has ended."""
        with self.changed:
            request.canceled = True
            self.changed.notify()

    def close(self, why: str) -> None:
        """Take no requests anymore, and end those that never ran. `run` returns when the others have ended."""
        with self.changed:
            self.closed = self.closed or why
            for request in [request for request in self.waiting if not request.started]:
                self.waiting.remove(request)
                request.emit(Finished("error", why))
            self.changed.notify()

    def stop(self, why: str) -> None:
        """End all requests after the step that is under way."""
        self.close(why)
        self.stopped = True

    def run(self) -> None:
        """Make steps while there are requests, until `close`."""
        try:
            while self._awaited() and not self.stopped:
                self.step()
        except Exception as error:
            log.exception("a step of the model failed")
            self.close(f"the model failed: {error}")
        for request in [*self.running, *self.waiting]:
            self._end(request, Finished("error", self.closed))
        self.waiting.clear()

    def _awaited(self) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.waiting or self.running or self.closed)
            return bool(self.waiting or self.running)

    def step(self) -> None:
        """A decoding step of the model, and the prefill of at most `chunk` bytes."""
        self._forget_canceled()
        self._admit()
        self._advance({request: 1 for request in self.running if self._missing(request) == 1})
        self._advance(self._shares())

    def _shares(self) -> dict[Request, int]:
        """How many bytes of which texts to prefill: a chunk of the oldest, or all of it and of others where all are short."""
        prefilling = {request: missing for request in self.running if (missing := self._missing(request)) > 1}
        short = {request: missing for request, missing in prefilling.items() if missing <= self.limits.chunk // TOGETHER}
        oldest = next(iter(prefilling), None)
        if oldest is None or oldest in short:
            return dict(itertools.islice(short.items(), TOGETHER))
        return {oldest: min(prefilling[oldest], self.limits.chunk)}

    def _missing(self, request: Request) -> int:
        """Bytes of the text that are not in the cache: 1 while decoding."""
        return len(request.text) - self.cache.length(request.sequence)

    def _forget_canceled(self) -> None:
        with self.changed:
            self.waiting = deque(request for request in self.waiting if not request.canceled)
        for request in [request for request in self.running if request.canceled]:
            self._release(request)

    def _admit(self) -> None:
        """Open sequences for the first of those that wait, as long as pages are free that no running one needs for its text."""
        free = self.cache.free_pages - sum(self._pages(len(r.text)) - self._pages(self.cache.length(r.sequence)) for r in self.running)
        with self.changed:
            while self.waiting and len(self.running) < self.limits.running and (need := self._pages(len(self.waiting[0].text))) <= free:
                request = self.waiting.popleft()
                request.sequence, request.started, free = self.cache.open(), True, free - need
                self.running.append(request)

    def _pages(self, length: int) -> int:
        return -(-length // self.engine.page_size)

    def _advance(self, shares: dict[Request, int]) -> None:
        """Put so many next bytes of each text into the cache, and sample after whole texts. Sequences may have to give pages for others."""
        while shares:
            starts = {request: self.cache.length(request.sequence) for request in shares}
            texts = [bytes(request.text[start : start + shares[request]]) for request, start in starts.items()]
            try:
                logits = self.engine.logits([request.sequence for request in shares], texts)
                break
            except CacheFull:
                if len(self.running) == 1:  # limits.context does not fit the cache
                    raise
                self._put_youngest_back()
                shares = {request: share for request, share in shares.items() if request.sequence is not None}
        for row, request in enumerate(shares):
            if not self._missing(request):
                self._take(request, request.sample(logits[row]))

    def _put_youngest_back(self) -> None:
        request = self.running[-1]
        self._release(request)
        self.put_back += 1
        with self.changed:
            self.waiting.appendleft(request)

    def _take(self, request: Request, byte: int) -> None:
        if byte in request.stop:
            return self._end(request, Finished("stop"))
        request.text.append(byte)
        request.emit(byte)
        if len(request.text) == len(request.prompt) + request.max_tokens:
            self._end(request, Finished("length"))

    def _end(self, request: Request, how: Finished) -> None:
        if request.sequence is not None:
            self._release(request)
        request.emit(how)

    def _release(self, request: Request) -> None:
        self.cache.free(request.sequence)
        request.sequence = None
        self.running.remove(request)
