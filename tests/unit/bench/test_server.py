"""The example's server over HTTP, on a free port of the loopback address, with the tiny model on a CPU."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nsa_sel.bench.core import store
from nsa_sel.errors import ArgumentError
from tests.helpers.examples import load

aiohttp = pytest.importorskip("aiohttp", reason="pip install nsa-sel[serve]")
program, scheduling, queueing = (load(name) for name in ("serve_nsa_lm", "batch_scheduler", "request_queue"))
decoding, load_test = load("decoding"), load("load_test")
model_file = load("nsa_lm")
Client = Callable[[Any], Coroutine[Any, Any, Any]]
BOUND = 30  # seconds for any wait: a failing test ends
PROMPTS = ["a", "The layer is", "Selected blocks " * 3, "\u00e9" * 40]  # 1 to 80 bytes


@pytest.fixture(scope="module")
def model() -> Any:
    """Untrained, with large weights: every byte of a text matters to what follows."""
    torch.manual_seed(0)
    made = model_file.LanguageModel(model_file.TINY, "sdpa-packed")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(6)
    return made


def server_of(model: Any, pages: int = 32, grace: float = BOUND, patience: float = BOUND, **limits: int) -> Any:
    """A server with pages of 16 bytes and a context of 128."""
    engine = decoding.Engine(model, torch.device("cpu"), pages, 16)
    return program.Server(scheduling.Scheduler(engine, queueing.Limits(**{"context": 128} | limits)), grace, patience)


def terminate(server: Any) -> None:
    """Send SIGTERM once: a second one would end the server at once."""
    if not getattr(server, "terminated", False):
        server.terminated = True
        os.kill(os.getpid(), signal.SIGTERM)


def served(server: Any, client: Client) -> Any:
    """What `client(session)` returns, from a thread, while the server runs in this one; SIGTERM ends it."""

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
            program.serve(server, listening)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            assert not server.thread.is_alive()
            return found.result(BOUND)
    finally:
        signal.signal(signal.SIGTERM, before)


def body(prompt: str = "The layer", max_tokens: int = 12, **options: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}


async def post(session: Any, content: Any) -> tuple[int, Any]:
    """Status and JSON."""
    async with session.post("/v1/completions", json=content) as response:
        return response.status, await response.json()


async def events(response: Any) -> AsyncIterator[Any]:
    """The JSON of server-sent events, until [DONE]."""
    async for line in response.content:
        if line == b"data: [DONE]\n":
            return
        if line.strip():
            yield msgspec.json.decode(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended without [DONE]")


async def streamed(session: Any, content: Any) -> list[Any]:
    async with session.post("/v1/completions", json=content | {"stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        return [event async for event in events(response)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND):
        while not condition():
            await asyncio.sleep(0.005)


def likeliest(model: Any, text: bytes, number: int) -> bytes:
    """The model's own choice, without a cache, of each of the last bytes of a text after those before it."""
    with torch.no_grad():
        return bytes(model(torch.tensor([list(text[:-1])]))[0, -number:].argmax(-1).tolist())


class Gate:
    """An engine whose steps wait for permits, as on a slow device; it opens when the scheduler is stopped."""

    def __init__(self, server: Any) -> None:
        self.permits, self.scheduler, self.opened = threading.Semaphore(0), server.scheduler, False
        self.logits, server.scheduler.engine.logits = server.scheduler.engine.logits, self.wait

    def wait(self, *step: Any) -> Any:
        while not (self.permits.acquire(timeout=0.01) or self.opened or self.scheduler.stopped):
            pass
        return self.logits(*step)


# Completions


def test_greedy_completions_are_the_models_own(model: Any) -> None:
    """Of mixed lengths, all at once, streamed and in one piece, in so few pages that sequences give theirs to others."""
    server = server_of(model, pages=9, chunk=48)
    submit, asked = server.scheduler.queue.submit, []
    server.scheduler.queue.submit = lambda request: (submit(request), asked.append(request))

    async def client(session: Any) -> Any:
        streams = [streamed(session, body(prompt, 24)) for prompt in PROMPTS]
        return await asyncio.gather(*streams, *(post(session, body(prompt, 24)) for prompt in PROMPTS))

    found = served(server, client)
    completed = {bytes(request.prompt).decode(): bytes(request.text) for request in asked}
    assert len(asked) == 8
    assert all(bytes(request.text) == completed[bytes(request.prompt).decode()] for request in asked)
    for prompt, stream, (status, answer) in zip(PROMPTS, found[:4], found[4:], strict=True):
        size, text = len(prompt.encode()), completed[prompt]
        assert text[size:] == likeliest(model, text, 24)
        assert (status, len(text)) == (200, size + 24)
        written = text[size:].decode("utf-8", "replace")
        assert answer["choices"] == [{"text": written, "index": 0, "logprobs": None, "finish_reason": "length"}]
        assert "".join(event["choices"][0]["text"] for event in stream) == written
        assert [event["choices"][0]["finish_reason"] for event in stream] == [None] * 24 + ["length"]
        usage = {"prompt_tokens": size, "completion_tokens": 24, "total_tokens": size + 24}
        assert answer["usage"] == stream[-1]["usage"] == usage
    assert server.scheduler.preempted > 0
    assert server.scheduler.cache.free_pages == 9


def test_completions_over_shared_pages_are_the_models_own(model: Any) -> None:
    """Of the same prompt, one that departs from it within a page, one after a completion, and one that begins anew."""
    server = server_of(model, chunk=24)
    submit, asked = server.scheduler.queue.submit, []
    server.scheduler.queue.submit = lambda request: (submit(request), asked.append(request))

    async def client(session: Any) -> list[int]:
        first, found = "The layer selects blocks of keys by compressed ones.", []
        for prompt in (first, first, first[:37] + "?", None, "Another " + first):
            await post(session, body(prompt or bytes(asked[0].text).decode("latin-1"), 6))
            found.append(server.scheduler.prefixes.saved)
        return found

    saved = served(server, client)
    shared = [later - before for before, later in zip([0, *saved], saved, strict=False)]
    assert shared == [0, 51, 37, shared[3], 0]
    assert shared[3] >= 52  # a byte from 128 on is two in the next prompt's UTF-8
    for request in asked:
        assert bytes(request.text[len(request.prompt) :]) == likeliest(model, bytes(request.text), 6)


def test_what_cannot_be_served_is_refused_and_says_why(model: Any) -> None:
    wrong = {
        "prompt is of 100 bytes, with max_tokens = 29; allowed: with max_tokens 128 bytes in all": body("x" * 100, 29),
        "prompt is empty; allowed: at least one byte. Remedy: send the text": body(""),
        "unknown field `echo`": body(echo=True),
        "Expected `float` >= 1.0 - at `$.top_p`": body(top_p=0.9),
        "Expected `float` <= 2.0 - at `$.temperature`": body() | {"temperature": 3},
        "Expected `int` >= 1 - at `$.max_tokens`": body(max_tokens=0),
        "missing required field `prompt`": {},
        "Expected `str`, got `array` - at `$.prompt`": body() | {"prompt": ["a"]},
        "stop is 'ab'; allowed: characters of one byte": body(stop=["a", "ab"]),
    }

    async def client(session: Any) -> Any:
        found = [await post(session, content) for content in wrong.values()]
        async with session.post("/v1/completions", data=b"{") as response:
            found.append((response.status, await response.json()))
        return found

    refusals = served(server_of(model), client)
    assert [status for status, _ in refusals] == [400] * 10
    for message, (_, answer) in zip([*wrong, "truncated"], refusals, strict=True):
        assert message in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"


def test_requests_beyond_those_that_run_and_wait_are_refused(model: Any) -> None:
    """None may wait: an idle server takes one, with OpenAI's defaults said aloud, and refuses the next while that one runs."""
    server = server_of(model, running=1, waiting=0)
    gate = Gate(server)
    defaults = {"top_p": 1, "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": None, "suffix": None}

    async def client(session: Any) -> Any:
        first = asyncio.create_task(post(session, body(max_tokens=100, **defaults)))
        await until(lambda: bool(server.scheduler.queue.running))
        async with session.post("/v1/completions", json=body()) as response:
            busy = response.status, response.headers["Retry-After"], await response.json()
        gate.opened = True
        return (await first)[0], busy

    status, busy = served(server, client)
    assert status == 200
    assert busy[:2] == (503, "1")
    assert "1 requests run and 0 wait, as many as may" in busy[2]["error"]["message"]


def test_slow_clients_are_cut_off(model: Any) -> None:
    """Those that send nothing, part of the headers, or part of the body; and one that does not read what it is sent."""
    beginnings = {
        "nothing": b"", "headers": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n",
        "body": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
    }  # fmt: skip
    server = server_of(model, patience=0.2)

    async def client(session: Any) -> Any:
        found = {}
        for name, sent in beginnings.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", session._base_url.port)
            writer.write(sent)
            async with asyncio.timeout(BOUND):
                found[name] = await reader.read()
            writer.close()
        return found

    found = served(server, client)
    assert found["nothing"] == found["headers"] == b""
    assert found["body"].startswith(b"HTTP/1.1 408")
    assert b"did not come within 0.2 seconds" in found["body"]


def test_a_client_that_disconnects_frees_its_pages(model: Any) -> None:
    server = server_of(model)
    gate, scheduler = Gate(server), server.scheduler

    async def client(session: Any) -> Any:
        gate.permits.release(3)
        async with session.post("/v1/completions", json=body(max_tokens=100, stream=True)) as response:
            seen = [event async for _, event in azip(range(3), events(response))]
        (asked,) = scheduler.running
        await until(lambda: asked.canceled)
        gate.opened = True
        await until(lambda: scheduler.cache.free_pages == 32)
        return seen, asked, await (await session.get("/metrics")).text()

    seen, asked, metrics = served(server, client)
    assert len(seen) == 3
    assert len(asked.text) - len(asked.prompt) in (3, 4)  # if a step was under way, it ended
    assert 'nsa_serve_requests_total{outcome="disconnected"} 1.0' in metrics


async def azip(numbers: range, others: Any) -> AsyncIterator[tuple[int, Any]]:
    """The first of others, as many as numbers."""
    for number in numbers:
        yield number, await anext(others)


def test_metrics_count_and_time_what_was_served(model: Any) -> None:
    """Of one prompt that comes twice: the second time its bytes are prefilled no more, and the same ones follow."""

    async def client(session: Any) -> str:
        answers = [await post(session, body("x" * 40, 5)) for _ in range(2)]
        assert answers[0][1]["choices"] == answers[1][1]["choices"]
        await post(session, body("abc", 200))
        async with session.get("/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain")
            return str(await response.text())

    found = dict(re.findall(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", served(server_of(model), client), flags=re.MULTILINE))
    expected = {
        "nsa_serve_requests_running": 0, "nsa_serve_requests_waiting": 0, "nsa_serve_preempted_total": 0,
        "nsa_serve_cache_pages_free": 28, "nsa_serve_prefixes_kept": 2,  # 40 bytes in 3 pages, 44 in 2 of them and another
        "nsa_serve_prefix_hits_total": 1, "nsa_serve_prefix_tokens_total": 39,
        'nsa_serve_requests_total{outcome="length"}': 2, 'nsa_serve_requests_total{outcome="refused"}': 1,
        "nsa_serve_prompt_tokens_total": 80, "nsa_serve_generated_tokens_total": 10,
        "nsa_serve_time_to_first_token_seconds_count": 2, "nsa_serve_time_between_tokens_seconds_count": 8,
    }  # fmt: skip
    assert {name: float(found[name]) for name in expected} == expected
    assert 0 < float(found["nsa_serve_time_to_first_token_seconds_sum"]) < BOUND
    assert float(found['nsa_sel_counters_total{name="calls.sdpa-packed"}']) > 0


# The end


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
        await until(lambda: bool(scheduler.queue.waiting))
        terminate(server)
        refused = await waiting
        async with aiohttp.ClientSession(session._base_url) as late:  # a new connection
            drained = [await post(late, body()), (await late.get("/health")).status] if in_time else [refused, 503]
        gate.opened = in_time
        return await running, refused, drained

    stream, refused, drained = served(server, client)
    assert drained == [refused, 503]
    assert refused[0] == 503
    assert refused[1]["error"]["message"] == "the server is shutting down"
    if in_time:
        assert len(stream) == 21
        assert stream[-1]["choices"][0]["finish_reason"] == "length"
    else:
        assert stream[-1]["error"]["message"] == "the server is shutting down"
    assert scheduler.cache.free_pages == 32


def test_a_failed_model_is_seen_by_clients_and_health(model: Any) -> None:
    server = server_of(model)
    server.scheduler.engine.logits = lambda *_: 1 // 0

    async def client(session: Any) -> Any:
        first, second = await post(session, body()), await post(session, body(stream=True))
        async with session.get("/health") as response:
            return first, second, (response.status, await response.json())

    for status, answer in served(server, client):
        assert status == 503
        assert "the model failed" in answer["error"]["message"]


# The programs


def test_the_load_test_measures_a_served_run(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server's own command line, from a checkpoint."""
    torch.save({"model": model.state_dict(), "sizes": asdict(model_file.TINY)}, tmp_path / "checkpoint.pt")
    servers: list[Any] = []
    monkeypatch.setattr(program, "serve", lambda server, listening: servers.append(server))
    program.main(tmp_path, port=0, backend="sdpa-packed", device="cpu", pages=5)
    monkeypatch.undo()
    (server,) = servers
    assert server.scheduler.limits == (128, 16, 64, 512, 256)
    assert server.scheduler.cache.free_pages == 5
    asked = load_test.Load(6, 3, 10, 40, 8)
    texts = load_test.prompts(asked)
    assert texts == load_test.prompts(asked)
    assert all(10 <= len(text.encode()) <= 40 for text in texts)

    async def client(session: Any) -> Any:
        async with session.get("/health") as response:
            url = str(response.url.origin())
        options = {"requests": 4, "max_tokens": 3, "seconds": BOUND, "out": tmp_path / "rows.jsonl", "device": "cpu"}
        await asyncio.to_thread(load_test.main, url, at_once="1,2", prompt="40,64", least=1, **options)
        return await load_test.load(load_test.completions_at(url), [*texts, "x" * 200], asked, seconds=BOUND)

    figures = load_test.figures(*served(server, client))
    assert figures["outcomes"] == {"length": 6, "status 400": 1}
    lines = load_test.report(figures).splitlines()
    assert lines[0].endswith("s: 6 length, 1 status 400")
    assert re.fullmatch(r"[\d.]+ requests/s, [\d.]+ tokens/s", lines[1])
    assert all(re.fullmatch(r"time .*: median [\d.]+ ms, 95% [\d.]+ ms", line) for line in lines[2:])
    rows = store.read(tmp_path / "rows.jsonl")
    assert [[row[name] for name in ("requests", "least", "most", "at_once")] for row in rows] == [
        [4, most, most, at_once] for most in (40, 64) for at_once in (1, 2)
    ]
    for row in rows:
        assert row["outcomes"] == {"length": 4}
        assert row["tokens_per_second"] * row["seconds"] == pytest.approx(12)
        assert 0 < row["first_ms_median"] <= row["request_ms_p95"]
        assert row["server"] == server.scheduler.limits._asdict()
        assert row["torch"] == torch.__version__


@pytest.mark.parametrize("numbers", ["", "0", "1,257", "a", "1,,2"])
def test_the_load_test_refuses_other_loads(numbers: str) -> None:
    with pytest.raises(ArgumentError, match="whole numbers from 1 to 256"):
        load_test.numbers("--at-once", numbers, 256)
