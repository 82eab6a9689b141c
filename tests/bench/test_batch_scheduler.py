"""Continuous batching by itself: a cache of plain bytes, and a "model" whose next byte is a checksum of the whole text."""

from __future__ import annotations

import random
import threading
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError, CacheFull
from tests.helpers.examples import load

scheduling, completions = load("batch_scheduler"), load("completions")


PAGE_SIZE = 4


class ByteCache:
    """The bookkeeping of an NSACache; each sequence holds its bytes."""

    def __init__(self, pages: int) -> None:
        self.pages, self.texts, self.opened = pages, {}, 0  # type: tuple[int, dict[int, bytes], int]

    @property
    def free_pages(self) -> int:
        return self.pages - sum(-(-len(text) // PAGE_SIZE) for text in self.texts.values())

    def open(self) -> int:
        self.opened += 1
        self.texts[self.opened] = b""
        return self.opened

    def free(self, sequence: int) -> None:
        del self.texts[sequence]

    def length(self, sequence: int) -> int:
        return len(self.texts[sequence])

    def append(self, sequences: list[int], texts: list[bytes]) -> None:
        before = dict(self.texts)
        self.texts |= {sequence: self.texts[sequence] + text for sequence, text in zip(sequences, texts, strict=True)}
        if self.free_pages < 0:
            self.texts = before
            raise CacheFull("pages", self.pages)


class Checksums:
    """An engine; `steps` has the number of sequences of every call, and the most bytes of one."""

    page_size = PAGE_SIZE

    def __init__(self, pages: int) -> None:
        self.cache, self.steps = ByteCache(pages), []  # type: tuple[ByteCache, list[tuple[int, int]]]

    def logits(self, sequences: list[int], texts: list[bytes]) -> Tensor:
        self.cache.append(sequences, texts)
        self.steps.append((len(texts), max(map(len, texts))))
        return torch.eye(256)[[zlib.crc32(self.cache.texts[sequence]) % 256 for sequence in sequences]]


def completion(prompt: bytes, number: int) -> list[int]:
    """What the checksums give without any scheduler."""
    text = bytearray(prompt)
    for _ in range(number):
        text.append(zlib.crc32(text) % 256)
    return list(text[len(prompt) :])


def scheduler(pages: int = 8, **limits: int) -> Any:
    return scheduling.Scheduler(
        Checksums(pages), scheduling.Limits(**{"context": pages * PAGE_SIZE, "running": 4, "waiting": 8, "chunk": 6} | limits)
    )


def asked(prompt: bytes = b"prompt", max_tokens: int = 3, **options: Any) -> tuple[Any, list[Any]]:
    """A request, and the list of what it emits."""
    events: list[Any] = []
    return completions.Request(prompt, max_tokens, events.append, **options), events


def done(reason: str = "length") -> Any:
    return completions.Finished(reason)


def test_a_prompt_is_prefilled_in_chunks_beside_the_decoding_of_others() -> None:
    them = scheduler(pages=32)
    (short, first), (long, second) = asked(b"ab", 9), asked(b"x" * 20, 2)
    them.submit(short)
    them.step()  # both bytes in one chunk
    them.submit(long)
    for _ in range(8):
        them.step()
    assert first == [*completion(b"ab", 9), done()]
    assert second == [*completion(b"x" * 20, 2), done()]
    assert them.engine.steps == [(1, 2), (1, 1), (1, 6), (1, 1), (1, 6), (1, 1), (1, 6), (1, 1), (1, 2), (2, 1), *[(1, 1)] * 3]
    assert (them.running, them.cache.free_pages) == ([], 32)


def test_short_prompts_are_prefilled_together() -> None:
    them = scheduler(chunk=16)
    requests = [asked(prompt, 2) for prompt in (b"four", b"two", b"3", b"third", b"1234567890")]
    for request, _ in requests[:4]:
        them.submit(request)
    them.step()  # the byte of "3" by itself, "four" and "two" together; "third" is longer than a fourth of 16
    assert them.engine.steps == [(1, 1), (2, 4)]
    them.submit(requests[4][0])
    while them.running or them.waiting:
        them.step()
    assert [events for _, events in requests] == [[*completion(request.prompt, 2), done()] for request, _ in requests]


def test_pages_that_run_out_are_taken_from_the_youngest_and_nothing_is_lost() -> None:
    them = scheduler(pages=5)
    requests = [asked(prompt, 8) for prompt in (b"old.", b"mid.", b"new.")]
    for request, _ in requests:
        them.submit(request)
    order = []
    while them.running or them.waiting:
        them.step()
        order += [request.prompt for request, events in requests if done() in events and request.prompt not in order]
    assert them.put_back >= 2
    assert order == [b"old.", b"mid.", b"new."]
    assert [events for _, events in requests] == [[*completion(request.prompt, 8), done()] for request, _ in requests]


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_and_cancellations_lose_nothing(seed: int) -> None:
    chance = random.Random(seed)
    them = scheduler(pages=chance.randint(6, 20), waiting=1000, running=chance.randint(1, 9), chunk=chance.randint(2, 20))
    requests, canceled = [], set()
    for _ in range(200):
        if chance.random() < 0.3:
            request, events = asked(chance.randbytes(chance.randint(1, 12)), chance.randint(1, 12))
            requests.append((request, events))
            them.submit(request)
        if requests and chance.random() < 0.1:
            number = chance.randrange(len(requests))
            canceled.add(number)
            them.cancel(requests[number][0])
        before = len(them.engine.steps)
        them.step()
        steps = them.engine.steps[before:]
        chunk = them.limits.chunk
        captured = (
            (them.limits.running, 1),
            (1, chunk),
            (scheduling.TOGETHER, chunk // scheduling.TOGETHER),
        )  # sizes of an engine's graphs
        assert all(any(batch <= most and size <= rows for most, rows in captured) for batch, size in steps)
        assert sum(size > 1 for _, size in steps) <= 1
    while them.running or them.waiting:
        them.step()
    assert them.cache.free_pages == them.cache.pages
    assert them.cache.texts == {}
    for number, (request, events) in enumerate(requests):
        whole = [*completion(request.prompt, request.max_tokens), done()]
        assert events == whole[: len(events)]
        assert events == whole or number in canceled


def test_a_stop_byte_ends_a_completion_and_is_left_out() -> None:
    expected = completion(b"prompt", 5)
    request, events = asked(max_tokens=9, stop=bytes(expected[4:]))
    them = scheduler()
    them.submit(request)
    for _ in range(5):
        them.step()
    assert events == [*expected[:4], done("stop")]
    assert them.running == []


def test_sampling_follows_the_seed_and_the_temperature() -> None:
    logits = torch.linspace(0, 3, 256)
    drawn = [[asked(temperature=t, seed=seed)[0].sample(logits) for _ in range(2)] for t, seed in ((0.0, 1), (1.0, 1), (1.0, 2))]
    assert drawn[0] == [255, 255]
    assert all(first == second for first, second in drawn)
    assert drawn[1] != drawn[2]
    request, _ = asked(temperature=1.0, seed=0)
    counts = torch.bincount(torch.tensor([request.sample(torch.tensor([0.0, 1.0])) for _ in range(400)])) / 400
    torch.testing.assert_close(counts, torch.tensor([0.0, 1.0]).softmax(0), atol=0.05, rtol=0)


def test_what_does_not_fit_is_refused_with_length_and_limit() -> None:
    them = scheduler(pages=8, waiting=2)
    with pytest.raises(ArgumentError, match=r"^prompt is of 30 bytes, with max_tokens = 3; allowed: at least one byte, and .* 32 in all"):
        them.submit(asked(b"x" * 30, 3)[0])
    with pytest.raises(ArgumentError, match="prompt is of 0 bytes"):
        them.submit(asked(b"")[0])
    for _ in range(2):
        them.submit(asked(b"x" * 29, 3)[0])
    with pytest.raises(scheduling.Busy, match="2 requests are waiting"):
        them.submit(asked()[0])


def test_closing_ends_those_that_never_ran_and_finishes_the_others() -> None:
    them = scheduler(running=1)
    (first, events), (second, refused) = asked(max_tokens=4), asked()
    for request in (first, second):
        them.submit(request)
    them.step()
    them.close("going down")
    assert refused == [completions.Finished("error", "going down")]
    with pytest.raises(scheduling.Busy, match="going down"):
        them.submit(asked()[0])
    them.run()
    assert events == [*completion(b"prompt", 4), done()]


def test_stopping_ends_all() -> None:
    them = scheduler(running=2)
    requests = [asked(max_tokens=9) for _ in range(3)]
    for request, _ in requests:
        them.submit(request)
    them.step()
    them.stop("time is up")
    them.run()
    assert [events[-1] for _, events in requests] == [completions.Finished("error", "time is up")] * 3
    assert them.cache.free_pages == 8


@pytest.mark.parametrize("context", [32, 99])
def test_a_failing_step_ends_all_with_its_error(context: int, caplog: pytest.LogCaptureFixture) -> None:
    """By the model, or by a context that the cache cannot hold."""
    them = scheduler(pages=8, context=context)
    if context == 32:
        them.engine.logits = lambda *_: 1 // 0
    requests = [asked(b"x", 40 if context == 99 else 3) for _ in range(2)]
    for request, _ in requests:
        them.submit(request)
    them.run()
    error = "integer division" if context == 32 else "more pages than are free"
    assert all(events[-1].reason == "error" and error in events[-1].message for _, events in requests)
    assert error in them.closed
    assert "a step of the model failed" in caplog.text


def test_the_thread_waits_for_requests_and_ends_when_closed() -> None:
    them, ended = scheduler(), threading.Event()
    thread = threading.Thread(target=them.run)
    thread.start()
    request, _ = asked()
    request.emit = lambda event: ended.set() if event == done() else None
    them.submit(request)
    assert ended.wait(10)
    them.close("done")
    thread.join(10)
    assert not thread.is_alive()
    assert bytes(request.text) == b"prompt" + bytes(completion(b"prompt", 3))
