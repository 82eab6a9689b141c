"""Continuous batching by itself, over an NSACache's bookkeeping, with a "model" whose next byte is a checksum of the whole text."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import NSACache
from nsa_sel.errors import ArgumentError
from tests.helpers.examples import load

scheduling, queueing, completions = (load(name) for name in ("batch_scheduler", "request_queue", "completions"))


PAGE_SIZE = 4


class TextCache(NSACache):
    """An NSACache's bookkeeping, without its tensors, that knows what sequences have read.

    `steps` has the number of sequences of every step, and the most bytes of one.
    """

    def __init__(self, pages: int) -> None:
        super().__init__(1, pages, PAGE_SIZE, 1, 1, compress_block=4, compress_stride=4, window=4, device="cpu")
        self.texts: dict[int, bytes] = {}
        self.steps: list[tuple[int, int]] = []

    def open(self) -> int:
        sequence = super().open()
        self.texts[sequence] = b""
        return sequence

    def fork(self, sequence: int) -> int:
        other = super().fork(sequence)
        self.texts[other] = self.texts[sequence]
        return other

    def free(self, sequence: int) -> None:
        super().free(sequence)
        del self.texts[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        super().truncate(sequence, length)
        self.texts[sequence] = self.texts[sequence][:length]

    def read(self, sequences: list[int], texts: list[bytes]) -> None:
        self._grow(self._distinct(sequences), [len(text) for text in texts])
        self.steps.append((len(texts), max(map(len, texts))))
        for sequence, text in zip(sequences, texts, strict=True):
            self.texts[sequence] += text
            assert len(self.texts[sequence]) == self.length(sequence)


class Checksums:
    """An engine, whose next byte is a checksum of the whole text."""

    page_size = PAGE_SIZE

    def __init__(self, pages: int) -> None:
        self.cache = TextCache(pages)

    def logits(self, sequences: list[int], texts: list[bytes]) -> Tensor:
        self.cache.read(sequences, texts)
        return torch.eye(256)[[zlib.crc32(self.cache.texts[sequence]) % 256 for sequence in sequences]]


def completion(prompt: bytes, number: int) -> list[int]:
    """What the checksums give without any scheduler."""
    text = bytearray(prompt)
    for _ in range(number):
        text.append(zlib.crc32(text) % 256)
    return list(text[len(prompt) :])


def scheduler(pages: int = 8, **limits: int) -> Any:
    """Of sequences that share nothing, unless `prefixes` is given."""
    small = {"context": pages * PAGE_SIZE, "running": 4, "waiting": 8, "chunk": 6, "prefixes": 0}
    return scheduling.Scheduler(Checksums(pages), queueing.Limits(**small | limits))


def finish(them: Any) -> None:
    while them.running or them.queue.waiting:
        them.step()


def asked(prompt: bytes = b"prompt", max_tokens: int = 3, **options: Any) -> tuple[Any, list[Any]]:
    """A request, and the list of what it emits."""
    events: list[Any] = []
    return completions.Request(prompt, max_tokens, events.append, **options), events


def done(reason: str = "length") -> Any:
    return completions.Finished(reason)


def test_a_prompt_is_prefilled_in_chunks_beside_the_decoding_of_others() -> None:
    them = scheduler(pages=32)
    (short, first), (long, second) = asked(b"ab", 9), asked(b"x" * 20, 2)
    them.queue.submit(short)
    them.step()  # both bytes in one chunk
    them.queue.submit(long)
    for _ in range(8):
        them.step()
    assert first == [*completion(b"ab", 9), done()]
    assert second == [*completion(b"x" * 20, 2), done()]
    assert them.cache.steps == [(1, 2), (1, 1), (1, 6), (1, 1), (1, 6), (1, 1), (1, 6), (1, 1), (1, 2), (2, 1), *[(1, 1)] * 3]
    assert (them.running, them.cache.free_pages) == ([], 32)


def test_pages_that_run_out_are_taken_from_the_youngest_and_nothing_is_lost() -> None:
    them = scheduler(pages=5)
    requests = [asked(prompt, 8) for prompt in (b"old.", b"mid.", b"new.")]
    for request, _ in requests:
        them.queue.submit(request)
    order = []
    while them.running or them.queue.waiting:
        them.step()
        order += [request.prompt for request, events in requests if done() in events and request.prompt not in order]
    assert them.preempted >= 2
    assert order == [b"old.", b"mid.", b"new."]
    assert [events for _, events in requests] == [[*completion(request.prompt, 8), done()] for request, _ in requests]


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_and_cancellations_lose_nothing(seed: int) -> None:
    """Of texts that begin alike, with pages for few of them; half of the runs share what they have read."""
    chance = random.Random(seed)
    limits = {"running": chance.randint(1, 9), "chunk": chance.randint(2, 20), "prefixes": seed % 2 * chance.randint(1, 20)}
    them = scheduler(pages=chance.randint(6, 20), waiting=1000, **limits)
    beginnings, requests, canceled = [chance.randbytes(12) for _ in range(2)], [], set()
    for _ in range(200):
        if chance.random() < 0.3:
            prompt = chance.choice(beginnings)[: chance.randint(0, 12)] + chance.randbytes(chance.randint(1, 4))
            request, events = asked(prompt, chance.randint(1, 12 - max(0, len(prompt) - 12)))
            requests.append((request, events))
            them.queue.submit(request)
        if requests and chance.random() < 0.1:
            number = chance.randrange(len(requests))
            canceled.add(number)
            them.queue.cancel(requests[number][0])
        before = len(them.cache.steps)
        them.step()
        steps = them.cache.steps[before:]
        chunk = them.limits.chunk
        captured = (
            (them.limits.running, 1),
            (1, chunk),
            (scheduling.PREFILL_BATCH, chunk // scheduling.PREFILL_BATCH),
        )  # sizes of an engine's graphs
        assert all(any(batch <= most and size <= rows for most, rows in captured) for batch, size in steps)
        assert sum(size > 1 for _, size in steps) <= 1
    finish(them)
    assert (them.prefixes.hits > 3) == (seed % 2 == 1)
    them.prefixes.clear()
    assert them.cache.free_pages == them.cache.sizes.pages
    assert them.cache.texts == {}
    for number, (request, events) in enumerate(requests):
        whole = [*completion(request.prompt, request.max_tokens), done()]
        assert events == whole[: len(events)]
        assert events == whole or number in canceled


@pytest.mark.parametrize(
    ("first", "later", "saved"),
    [
        (b"the same prompt", b"the same prompt", 14),  # the last byte is read again, for what comes after it
        (b"the same prompt", b"the same prompt and more", 15),
        (b"the same prompt", b"the same beginning", 9),  # within a chunk
        (b"the same prompt", b"the", 0),  # less than a page
        (b"the same prompt", b"another prompt", 0),
    ],
)
def test_a_prompt_that_begins_as_another_is_prefilled_from_there(first: bytes, later: bytes, saved: int) -> None:
    """Whether that one still runs or has ended, and once more as often as it comes."""
    for ended in (False, True):
        them = scheduler(pages=64, prefixes=99)
        (old, _), *others = (asked(prompt, 4) for prompt in (first, later, later))
        them.queue.submit(old)
        for _ in range(9 if ended else 4):
            them.step()
        assert (them.running == []) == ended
        for number, (request, events) in enumerate(others):
            them.queue.submit(request)
            finish(them)
            assert events == [*completion(later, 4), done()]
            assert (them.prefixes.hits, them.prefixes.saved) == (saved > 0, saved) if not number else them.prefixes.saved >= 2 * saved


def test_pages_of_kept_sequences_are_free_for_requests_that_need_them() -> None:
    them = scheduler(pages=8, prefixes=99)
    for prompt in (b"x" * 12, b"y" * 28):
        request, events = asked(prompt, 4)
        them.queue.submit(request)
        finish(them)
        assert events == [*completion(prompt, 4), done()]
    assert them.preempted == 0
    assert all(text.startswith(b"y") for text in them.prefixes.kept)


def test_a_stop_byte_ends_a_completion_and_is_left_out() -> None:
    expected = completion(b"prompt", 5)
    request, events = asked(max_tokens=9, stop=bytes(expected[4:]))
    them = scheduler()
    them.queue.submit(request)
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
    assert asked(temperature=5e-324, seed=1)[0].sample(logits) == 255  # a failed step would end all requests
    request, _ = asked(temperature=1.0, seed=0)
    counts = torch.bincount(torch.tensor([request.sample(torch.tensor([0.0, 1.0])) for _ in range(400)])) / 400
    torch.testing.assert_close(counts, torch.tensor([0.0, 1.0]).softmax(0), atol=0.05, rtol=0)


def test_what_does_not_fit_is_refused_with_length_and_limit() -> None:
    them = scheduler(pages=8, running=1, waiting=1)
    with pytest.raises(ArgumentError, match=r"^prompt is of 30 bytes, with max_tokens = 3; allowed: with max_tokens 32 bytes in all"):
        them.queue.submit(asked(b"x" * 30, 3)[0])
    with pytest.raises(ArgumentError, match="prompt is empty"):
        them.queue.submit(asked(b"")[0])
    for _ in range(2):
        them.queue.submit(asked(b"x" * 29, 3)[0])
    with pytest.raises(queueing.Busy, match="0 requests run and 2 wait"):
        them.queue.submit(asked()[0])


def test_closing_ends_those_that_never_ran_and_finishes_the_others() -> None:
    them = scheduler(running=1)
    (first, events), (second, refused) = asked(max_tokens=4), asked()
    for request in (first, second):
        them.queue.submit(request)
    them.step()
    them.queue.close("going down")
    assert refused == [completions.Finished("error", "going down")]
    with pytest.raises(queueing.Busy, match="going down"):
        them.queue.submit(asked()[0])
    them.run()
    assert events == [*completion(b"prompt", 4), done()]


@pytest.mark.parametrize("context", [32, 99])
def test_a_failing_step_ends_all_with_its_error(context: int, caplog: pytest.LogCaptureFixture) -> None:
    """By the model, or by a context that the cache cannot hold."""
    them = scheduler(pages=8, context=context)
    if context == 32:
        them.engine.logits = lambda *_: 1 // 0
    requests = [asked(b"x", 40 if context == 99 else 3) for _ in range(2)]
    for request, _ in requests:
        them.queue.submit(request)
    them.run()
    error = "integer division" if context == 32 else "more pages than are free"
    assert all(events[-1].reason == "error" and error in events[-1].message for _, events in requests)
    assert error in them.queue.closed
    assert "a step of the model failed" in caplog.text
