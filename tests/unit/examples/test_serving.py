"""The example's server: the scheduler over an NSACache's bookkeeping, decoding steps, and HTTP on the loopback address."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel import NSACache
from nsa_sel.errors import CacheFull
from tests.helpers.files import load

aiohttp = pytest.importorskip("aiohttp", reason="pip install nsa-sel[serve]")
program, scheduling, decoding, model_file = (load(name) for name in ("serve_nsa_lm", "batch_scheduler", "decoding", "nsa_lm"))
CPU = torch.device("cpu")


# The scheduler, with a "model" whose next byte is a checksum of the whole text

PAGE_SIZE = 4


class Checksums:
    """An engine whose next byte is a checksum of the whole text, which the cache's pages hold.

    `steps`: sequences and most bytes of every step.
    """

    page_size = PAGE_SIZE

    def __init__(self, pages: int) -> None:
        self.cache = NSACache(1, pages, PAGE_SIZE, 1, 1, compress_block=4, compress_stride=4, window=4, device="cpu")
        self.steps: list[tuple[int, int]] = []

    def logits(self, sequences: list[int], texts: list[bytes]) -> Tensor:
        step = self.cache.step(sequences, [len(text) for text in texts])
        self.steps.append((len(texts), max(map(len, texts))))
        held, tokens = step.pools.k[0], step.tensors
        held.view(-1)[tokens.slot[tokens.is_token]] = torch.tensor([*b"".join(texts)], dtype=held.dtype)
        each = zip(tokens.table.long(), tokens.lengths, strict=True)
        whole = [bytes(held[pages].flatten()[:length].int().tolist()) for pages, length in each]
        return torch.eye(256)[[zlib.crc32(text) % 256 for text in whole]]


def completion(prompt: bytes, number: int) -> list[int]:
    """Return what the checksums give without any scheduler."""
    text = bytearray(prompt)
    for _ in range(number):
        text.append(zlib.crc32(text) % 256)
    return list(text[len(prompt) :])


def scheduler(pages: int = 8, **limits: int) -> Any:
    """Return one whose sequences share nothing, unless `prefixes` is given."""
    small = {"context": pages * PAGE_SIZE, "running": 4, "waiting": 8, "chunk": 6, "prefixes": 0}
    return scheduling.Scheduler(Checksums(pages), scheduling.Limits(**small | limits))


def finish(them: Any) -> None:
    while them.running or them.waiting:
        them.step()


def asked(prompt: bytes = b"prompt", max_tokens: int = 3, **options: Any) -> tuple[Any, list[Any]]:
    """Return a request, and the list of what it emits."""
    events: list[Any] = []
    return scheduling.Request(prompt, max_tokens, events.append, **options), events


def done(reason: str = "length") -> Any:
    return scheduling.Finished(reason)


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_and_cancellations_lose_nothing(seed: int) -> None:
    """Texts have a common prefix and pages for few of them. Half of the runs share prefixes.

    Steps have the sizes of an engine's graphs.
    """
    chance = random.Random(seed)
    limits = {"running": chance.randint(1, 9), "chunk": chance.randint(2, 20), "prefixes": seed % 2 * chance.randint(1, 20)}
    them = scheduler(pages=chance.randint(6, 20), waiting=1000, **limits)
    beginnings, requests, canceled = [chance.randbytes(12) for _ in range(2)], [], set()
    for _ in range(200):
        if chance.random() < 0.3:
            prompt = chance.choice(beginnings)[: chance.randint(0, 12)] + chance.randbytes(chance.randint(1, 4))
            request, events = asked(prompt, chance.randint(1, 12 - max(0, len(prompt) - 12)))
            requests.append((request, events))
            them.submit(request)
        if requests and chance.random() < 0.1:
            number = chance.randrange(len(requests))
            canceled.add(number)
            them.cancel(requests[number][0])
        before, chunk = len(them.engine.steps), them.limits.chunk
        them.step()
        sizes = (them.limits.running, 1), (1, chunk), (scheduling.PREFILL_BATCH, chunk // scheduling.PREFILL_BATCH)
        assert all(any(batch <= most and size <= rows for most, rows in sizes) for batch, size in them.engine.steps[before:])
    finish(them)
    assert (them.prefixes.hits > 3) == (seed % 2 == 1)
    while them.prefixes.release_oldest():
        pass
    assert them.cache.free_pages == them.cache.sizes.pages
    for number, (request, events) in enumerate(requests):
        whole = [*completion(request.prompt, request.max_tokens), done()]
        assert events == whole[: len(events)]
        assert events == whole or number in canceled


@pytest.mark.parametrize(
    ("later", "saved"),
    [
        (b"the same prompt", 14),  # the last byte is read again, for the logits after it
        (b"the same prompt and more", 15),
        (b"the same beginning", 9),  # within a chunk
        (b"the", 0),  # less than a page
        (b"another prompt", 0),
    ],
)
def test_a_prompt_with_a_known_prefix_is_prefilled_from_there(later: bytes, saved: int) -> None:
    for ended in (False, True):
        them = scheduler(pages=64, prefixes=99)
        (old, _), (request, events) = asked(b"the same prompt", 4), asked(later, 4)
        them.submit(old)
        for _ in range(9 if ended else 4):
            them.step()
        assert (them.running == []) == ended
        them.submit(request)
        finish(them)
        assert events == [*completion(later, 4), done()]
        assert (them.prefixes.hits, them.prefixes.saved) == (saved > 0, saved)


def test_pages_that_run_out_are_taken_from_prefixes_then_from_the_youngest() -> None:
    them = scheduler(pages=5)
    requests = [asked(prompt, 8) for prompt in (b"old.", b"mid.", b"new.")]
    for request, _ in requests:
        them.submit(request)
    finish(them)
    assert them.preempted >= 2
    assert [events for _, events in requests] == [[*completion(request.prompt, 8), done()] for request, _ in requests]
    them = scheduler(pages=8, prefixes=99)
    for prompt in (b"x" * 12, b"y" * 28):
        them.submit(asked(prompt, 4)[0])
        finish(them)
    assert them.preempted == 0
    assert all(text.startswith(b"y") for text in them.prefixes.kept)


def test_stop_bytes_and_sampling() -> None:
    expected, them = completion(b"prompt", 5), scheduler()
    request, events = asked(max_tokens=9, stop=bytes(expected[4:]))
    them.submit(request)
    finish(them)
    assert events == [*expected[:4], done("stop")]
    logits = torch.linspace(0, 3, 256)
    drawn = [[asked(temperature=t, seed=seed)[0].sample(logits) for _ in range(2)] for t, seed in ((0.0, 1), (1.0, 1), (1.0, 2))]
    assert drawn[0] == [255, 255]
    assert all(first == second for first, second in drawn)
    assert drawn[1] != drawn[2]
    assert asked(temperature=5e-324, seed=1)[0].sample(logits) == 255  # a failed step would end all requests


@pytest.mark.parametrize("context", [32, 99])
def test_closing_and_failing_end_requests(context: int) -> None:
    """A step fails in the model, or by a context that the cache cannot hold."""
    them = scheduler(running=1)
    (first, events), (second, refused) = asked(max_tokens=4), asked()
    for request in (first, second):
        them.submit(request)
    them.step()
    them.close("going down")
    assert refused == [scheduling.Finished("error", "going down")]
    with pytest.raises(scheduling.Busy, match="going down"):
        them.submit(asked()[0])
    them.run()
    assert events == [*completion(b"prompt", 4), done()]
    failing = scheduler(pages=8, context=context)
    if context == 32:
        failing.engine.logits = lambda *_: 1 // 0
    request, events = asked(b"x", 40 if context == 99 else 3)
    failing.submit(request)
    failing.run()
    assert events[-1].reason == "error"
    assert ("integer division" if context == 32 else "more pages than are free") in events[-1].message


# Decoding


def model_of(scale: float = 6, **sizes: Any) -> Any:
    """Return an untrained model with large weights: every byte of a text matters to what follows."""
    torch.manual_seed(0)
    made = model_file.LanguageModel(replace(model_file.TINY, **sizes), None if "context" in sizes else "sdpa-packed")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(scale)
    return made


def alone(of: Any, text: bytes) -> Tensor:
    """Return logits [256] after a text, without a cache."""
    with torch.no_grad():
        return of(torch.tensor([list(text)], device=of.head.weight.device))[0, -1].cpu()  # type: ignore[no-any-return]


@pytest.mark.parametrize("attention", ["nsa", "msa"])
def test_steps_over_the_cache_give_the_models_own_logits(attention: str) -> None:
    """Chunks of mixed lengths, then single bytes; with an fp8 cache nearly."""
    of = model_of(attention=attention)
    engine = decoding.Engine(of, CPU, pages=16, page_size=16)
    engine.warm_up(4, 128, 20)
    assert (engine.cache.free_pages, engine.graphs) == (16, {})
    whole = [bytes(torch.randint(256, (length,)).tolist()) for length in (70, 33, 2)]
    sequences = [engine.cache.open() for _ in whole]
    for start, end in ((0, 40), (40, 69), (69, 70)):
        live = [(sequence, text[start:end]) for sequence, text in zip(sequences, whole, strict=True) if text[start:end]]
        found = engine.logits(*map(list, zip(*live, strict=True)))
        for row, (sequence, _) in enumerate(live):
            torch.testing.assert_close(found[row], alone(of, whole[sequences.index(sequence)][:end]), atol=1e-4, rtol=1e-4)
    with pytest.raises(CacheFull):
        engine.logits([engine.cache.open()], [bytes(16 * 16)])
    of = model_of(2, attention=attention)
    fp8, own = decoding.Engine(of, CPU, 16, 16, torch.float8_e4m3fn), alone(of, whole[0])
    assert 0 < float((fp8.logits([fp8.cache.open()], whole[:1])[0] - own).norm()) < 0.03 * float(own.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["nsa", "msa"])
def test_captured_steps_decode_as_plain_ones(attention: str) -> None:
    """Four sequences, and the first three of them in the same graph; over a page's end, too."""
    of = model_of(2, attention=attention, groups=2, heads=4, head_dim=64, block=64, window=64, context=256)
    engine = decoding.Engine(of, torch.device("cuda"), pages=16, page_size=64)
    engine.warm_up(6, 256, 120)
    assert list(engine.graphs) == [(1, 1), (2, 1), (4, 1), (6, 1), (4, 30), (1, 120)]
    prompts = [bytes(torch.randint(256, (length,)).tolist()) for length in (100, 30, 30, 2)]
    sequences = [engine.cache.open() for _ in prompts]

    def cut(some: list[int]) -> None:
        for sequence in some:
            engine.cache.truncate(sequence, engine.cache.length(sequence) - 1)

    logits = torch.cat([engine.logits(sequences[:1], prompts[:1]), engine.logits(sequences[1:], prompts[1:])])
    for row, text in zip(logits, prompts, strict=True):
        torch.testing.assert_close(row, alone(of, text).float(), atol=0.03, rtol=0.03)
    for _ in range(4):
        following = [bytes([int(row.argmax())]) for row in logits]
        first = engine.logits(sequences[:3], following[:3])
        cut(sequences[:3])
        step = engine.cache.step(sequences, 1, room=256)
        plain = engine.forward(torch.tensor([list(byte) for byte in following], device="cuda"), step).float().cpu()
        cut(sequences)
        logits = engine.logits(sequences, following)
        assert torch.equal(logits[:3], first)
        torch.testing.assert_close(logits, plain, atol=1e-2, rtol=1e-2)


# The server

Client = Callable[[Any], Coroutine[Any, Any, Any]]
BOUND = 30  # seconds for any wait: a failing test ends
PROMPTS = ["a", "The layer is", "Selected blocks " * 3, "\u00e9" * 40]  # 1 to 80 bytes


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of()


def server_of(model: Any, pages: int = 32, grace: float = BOUND, patience: float = BOUND, **limits: int) -> Any:
    """Return a server with pages of 16 bytes and a context of 128."""
    engine = decoding.Engine(model, CPU, pages, 16)
    return program.Server(scheduling.Scheduler(engine, scheduling.Limits(**{"context": 128} | limits)), grace, patience)


def terminate(server: Any) -> None:
    """Send SIGTERM once: a second one would end the server at once."""
    if not getattr(server, "terminated", False):
        server.terminated = True
        os.kill(os.getpid(), signal.SIGTERM)


def served(server: Any, client: Client) -> Any:
    """Return what `client(session)` returns, from a thread, while the server runs in this one; SIGTERM ends it."""

    async def connected() -> Any:
        async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(BOUND)) as session:
            async with session.get("/health") as response:  # the server now handles the signal
                assert response.status == 200
            return await client(session)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(1) as pool:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            found = pool.submit(asyncio.run, connected())
            found.add_done_callback(lambda _: terminate(server))
            asyncio.run(program.answer(server, listening))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            assert not server.thread.is_alive()
            return found.result(BOUND)
    finally:
        signal.signal(signal.SIGTERM, before)


def body(prompt: str = "The layer", max_tokens: int = 12, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}


async def post(session: Any, content: Any) -> tuple[int, Any]:
    """Return status and JSON."""
    async with session.post("/v1/completions", json=content) as response:
        return response.status, await response.json()


async def events_of(response: Any) -> AsyncIterator[Any]:
    """Yield the JSON of server-sent events, until [DONE]."""
    async for line in response.content:
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            yield msgspec.json.decode(line[6:])


async def streamed(session: Any, content: Any) -> list[Any]:
    async with session.post("/v1/completions", json=content | {"stream": True}) as response:
        return [event async for event in events_of(response)]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not holds():
            await asyncio.sleep(0.005)


class Gate:
    """An engine whose steps wait for permits, as on a slow device; it opens when the scheduler is stopped."""

    def __init__(self, server: Any) -> None:
        self.permits, self.scheduler, self.opened = threading.Semaphore(0), server.scheduler, False
        self.logits, server.scheduler.engine.logits = server.scheduler.engine.logits, self.wait

    def wait(self, *step: Any) -> Any:
        while not (self.permits.acquire(timeout=0.01) or self.opened or self.scheduler.stopped):
            pass
        return self.logits(*step)


def test_greedy_completions_are_the_models_own(model: Any) -> None:
    """Mixed lengths, all at once, streamed and whole, in so few pages that sequences are preempted; then metrics."""
    server = server_of(model, pages=9, chunk=48)
    submit, requests = server.scheduler.submit, []
    server.scheduler.submit = lambda request: (submit(request), requests.append(request))

    async def client(session: Any) -> Any:
        streams = [streamed(session, body(prompt, 24)) for prompt in PROMPTS]
        found = await asyncio.gather(*streams, *(post(session, body(prompt, 24)) for prompt in PROMPTS))
        return found, await (await session.get("/metrics")).text()

    found, metrics = served(server, client)
    completed = {bytes(request.prompt).decode(): bytes(request.text) for request in requests}
    assert len(requests) == 8
    assert all(bytes(request.text) == completed[bytes(request.prompt).decode()] for request in requests)
    for prompt, stream, (status, answer) in zip(PROMPTS, found[:4], found[4:], strict=True):
        size, text = len(prompt.encode()), completed[prompt]
        with torch.no_grad():
            assert list(text[size:]) == model(torch.tensor([list(text[:-1])]))[0, -24:].argmax(-1).tolist()
        assert (status, len(text)) == (200, size + 24)
        written = text[size:].decode("utf-8", "replace")
        assert answer["choices"] == [{"text": written, "index": 0, "logprobs": None, "finish_reason": "length"}]
        assert "".join(event["choices"][0]["text"] for event in stream) == written
        usage = {"prompt_tokens": size, "completion_tokens": 24, "total_tokens": size + 24}
        assert answer["usage"] == stream[-1]["usage"] == usage
    assert server.scheduler.preempted > 0
    assert server.scheduler.cache.free_pages == 9
    known = dict(re.findall(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", metrics, flags=re.MULTILINE))
    expected = {
        "nsa_serve_requests_running": 0, "nsa_serve_requests_waiting": 0, 'nsa_serve_requests_total{outcome="length"}': 8,
        "nsa_serve_prompt_tokens_total": 2 * sum(len(prompt.encode()) for prompt in PROMPTS), "nsa_serve_generated_tokens_total": 192,
        "nsa_serve_preempted_total": server.scheduler.preempted,
    }  # fmt: skip
    assert {name: float(known[name]) for name in expected} == expected
    assert float(known['nsa_sel_counters_total{name="calls.sdpa-packed"}']) > 0


def test_bad_requests_are_refused_and_say_why(model: Any) -> None:
    wrong = {
        "prompt is of 100 bytes, with max_tokens = 29; allowed: with max_tokens 128 bytes in all": body("x" * 100, 29),
        "unknown field `echo`": body(echo=True),
        "Expected `float` >= 1.0 - at `$.top_p`": body(top_p=0.9),
        "missing required field `prompt`": {},
        "stop is 'ab'; allowed: characters of one byte": body(stop=["a", "ab"]),
    }
    server = server_of(model, running=1, waiting=0)
    gate = Gate(server)

    async def client(session: Any) -> Any:
        found = [await post(session, content) for content in wrong.values()]
        first = asyncio.create_task(post(session, body(max_tokens=100, top_p=1, n=1, logprobs=None)))
        await until(lambda: bool(server.scheduler.running))
        async with session.post("/v1/completions", json=body()) as response:
            busy = response.status, response.headers["Retry-After"], await response.json()
        gate.opened = True
        return found, busy, (await first)[0]

    refusals, busy, status = served(server, client)
    for message, (refused, answer) in zip(wrong, refusals, strict=True):
        assert refused == 400
        assert message in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
    assert (status, busy[:2]) == (200, (503, "1"))
    assert "1 requests run and 0 wait, as many as may" in busy[2]["error"]["message"]


def test_slow_clients_are_cut_off_and_disconnected_ones_free_their_pages(model: Any) -> None:
    server = server_of(model, patience=0.5)
    gate, scheduler = Gate(server), server.scheduler

    async def client(session: Any) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", session._base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(BOUND):
            slow = await reader.read()
        writer.close()
        gate.permits.release(3)
        async with session.post("/v1/completions", json=body(max_tokens=100, stream=True)) as response:
            stream = events_of(response)
            for _ in range(3):
                await anext(stream)
        (request,) = scheduler.running
        await until(lambda: request.canceled)
        gate.opened = True
        await until(lambda: scheduler.cache.free_pages == 32)
        return slow

    assert served(server, client).startswith(b"HTTP/1.1 408")
    assert server.outcomes == {"refused": 1, "disconnected": 1}


@pytest.mark.parametrize("in_time", [True, False])
def test_sigterm_lets_running_completions_finish_within_the_bound(model: Any, in_time: bool) -> None:
    """One runs, one waits; the second gets an error, and so does the first if it takes too long."""
    server = server_of(model, grace=BOUND if in_time else 0.05, running=1)
    gate, scheduler = Gate(server), server.scheduler

    async def client(session: Any) -> Any:
        gate.permits.release(3)
        running = asyncio.create_task(streamed(session, body(max_tokens=20)))
        await until(lambda: bool(scheduler.running))
        waiting = asyncio.create_task(post(session, body()))
        await until(lambda: bool(scheduler.waiting))
        terminate(server)
        refused = await waiting
        gate.opened = in_time
        return await running, refused

    stream, refused = served(server, client)
    assert (refused[0], refused[1]["error"]["message"]) == (503, "the server is shutting down")
    if in_time:
        assert stream[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert stream[-1]["error"]["message"] == "the server is shutting down"
    assert scheduler.cache.free_pages == 32


def test_the_command_line_serves_a_checkpoint(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"model": model.state_dict(), "sizes": asdict(model_file.TINY)}, tmp_path / "checkpoint.pt")
    servers: list[Any] = []

    async def answer(server: Any, listening: Any) -> None:
        servers.append(server)

    with monkeypatch.context() as patch:
        patch.setattr(program, "answer", answer)
        program.main(tmp_path, port=0, backend="sdpa-packed", device="cpu", pages=5)
    (server,) = servers
    assert server.scheduler.limits == (128, 16, 64, 512, 256)
    status, completed = served(server, lambda session: post(session, body(max_tokens=3)))
    assert (status, completed["usage"]["completion_tokens"]) == (200, 3)
