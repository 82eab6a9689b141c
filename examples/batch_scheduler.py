"""Continuous batching over an NSACache: which sequences the next steps of the model advance.

A step decodes a byte of every running sequence, then prefills a bounded number of bytes of texts that are not in the cache yet, oldest
first. Requests are admitted in order of arrival, when pages for their text are free; what it shares with another text is not prefilled
again (prefixes.py). When pages run out, those kept for later texts are given back first; then the youngest sequence gives its own back
and waits in front of the others: its text is kept, sent bytes included, and prefilled again.

One thread runs `Scheduler.run` and alone calls the model. Other threads use its `queue`, and `stop`.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

from completions import Finished, Request
from prefixes import Prefixes
from request_queue import Limits, RequestQueue

from nsa_sel.errors import CacheFull

TOGETHER = 4  # texts that one call prefills, each by at most a TOGETHER-th of a chunk: two sizes of steps, which can be captured
log = logging.getLogger("nsa_sel.examples.scheduler")


class Scheduler:
    """Requests that run, and those that wait for it.

    Args:
        engine: has the `cache`, its `page_size`, and `logits(sequences, texts)`: [B,256] float32 on the CPU after the next bytes of B
            sequences; where pages are missing it raises CacheFull, and changes nothing.
        limits: see there.
    """

    def __init__(self, engine: Any, limits: Limits) -> None:
        self.engine, self.cache, self.limits, self.queue = engine, engine.cache, limits, RequestQueue(limits)
        self.prefixes = Prefixes(engine.cache, engine.page_size, limits.prefixes)
        self.running = self.queue.running
        self.put_back = 0  # sequences that gave their pages to others
        self.stopped = False

    def stop(self, why: str) -> None:
        """End all requests after the step that is under way."""
        self.queue.close(why)
        self.stopped = True

    def run(self) -> None:
        """Make steps while there are requests, until the queue is closed."""
        try:
            while self.queue.wait() and not self.stopped:
                self.step()
        except Exception as error:
            log.exception("a step of the model failed")
            self.queue.close(f"the model failed: {error}")
        for request in [*self.running, *self.queue.waiting]:
            self._end(request, Finished("error", self.queue.closed))
        self.queue.waiting.clear()
        self.prefixes.clear()

    def step(self) -> None:
        """A decoding step of the model, and the prefill of at most `chunk` bytes."""
        self.queue.forget_canceled()
        for request in [request for request in self.running if request.canceled]:
            self._release(request)
        self._admit()
        self._advance({request: 1 for request in self.running if self._missing(request) == 1})
        self._advance(self._shares())

    def _admit(self) -> None:
        """Open sequences for the first of those that wait, as long as there are pages for their texts."""
        with self.queue.changed:
            while self.queue.waiting and len(self.running) < self.limits.running and self._opens(self.queue.waiting[0]):
                self.running.append(self.queue.waiting.popleft())

    def _opens(self, request: Request) -> bool:
        """Open its sequence, if pages for its text are free that no running one needs for its own; kept ones make room for it."""
        sequence = self.prefixes.open(bytes(request.text))
        saved = self.cache.length(sequence)
        needed = sum(self._pages(len(r.text)) - self._pages(self.cache.length(r.sequence)) for r in self.running)
        needed += self._pages(len(request.text)) - saved // self.engine.page_size  # a shared page that is not full is copied
        if not self.prefixes.make_room(needed, [sequence, *(r.sequence for r in self.running)]):
            self.cache.free(sequence)
            return False
        request.sequence, request.started = sequence, True
        self.prefixes.count(saved)
        return True

    def _pages(self, length: int) -> int:
        return -(-length // self.engine.page_size)

    def _missing(self, request: Request) -> int:
        """Bytes of the text that are not in the cache: 1 while decoding."""
        return len(request.text) - self.cache.length(request.sequence)

    def _shares(self) -> dict[Request, int]:
        """How many bytes of which texts to prefill: a chunk of the oldest, or all of it and of others where all are short."""
        prefilling = {request: missing for request in self.running if (missing := self._missing(request)) > 1}
        short = {request: missing for request, missing in prefilling.items() if missing <= self.limits.chunk // TOGETHER}
        oldest = next(iter(prefilling), None)
        if oldest is None or oldest in short:
            return dict(itertools.islice(short.items(), TOGETHER))
        return {oldest: min(prefilling[oldest], self.limits.chunk)}

    def _advance(self, shares: dict[Request, int]) -> None:
        """Put so many next bytes of each text into the cache, and sample after whole texts. Sequences may have to give pages for others."""
        while shares:
            starts = {request: self.cache.length(request.sequence) for request in shares}
            texts = [bytes(request.text[start : start + shares[request]]) for request, start in starts.items()]
            try:
                logits = self.engine.logits([request.sequence for request in shares], texts)
                break
            except CacheFull:
                if self.prefixes.give_back():
                    continue
                if len(self.running) == 1:  # limits.context does not fit the cache
                    raise
                self.put_back += 1
                self.queue.put_back(self._release(self.running[-1]))
                shares = {request: share for request, share in shares.items() if request.sequence is not None}
        for row, (request, share) in enumerate(shares.items()):
            if share > 1:
                self._keep(request, share)
            if not self._missing(request):
                self._take(request, request.sample(logits[row]))

    def _keep(self, request: Request, tokens: int) -> None:
        """Let later texts share what a sequence has read, `tokens` bytes of it in the last step."""
        self.prefixes.keep(bytes(request.text[: self.cache.length(request.sequence)]), tokens, request.sequence)

    def _take(self, request: Request, byte: int) -> None:
        stopped = byte in request.stop
        if not stopped:
            request.text.append(byte)
            request.emit(byte)
        if stopped or len(request.text) == len(request.prompt) + request.max_tokens:
            self._keep(request, 1)
            self._end(request, Finished("stop" if stopped else "length"))

    def _end(self, request: Request, how: Finished) -> None:
        if request.sequence is not None:
            self._release(request)
        request.emit(how)

    def _release(self, request: Request) -> Request:
        self.cache.free(request.sequence)
        request.sequence = None
        self.running.remove(request)
        return request
