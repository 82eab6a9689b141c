"""Serve a trained byte-level model over HTTP: completions with continuous batching over an `nsa_sel.NSACache`.

    python examples/train_nsa_lm.py --out runs/tiny --tiny --steps 100   # first: a model, here one for a CPU
    python examples/serve_nsa_lm.py runs/tiny --port 8000
    curl http://127.0.0.1:8000/v1/completions -d '{"prompt": "The layer ", "max_tokens": 64, "temperature": 0, "stream":
    true}'

POST /v1/completions accepts OpenAI's prompt, max_tokens, temperature, stream, stop (one-byte characters) and seed. A
token is a byte. GET /v1/models lists the model, GET /metrics serves Prometheus, GET /health load balancers. On SIGTERM,
running completions finish within --grace seconds and other requests get 503. Clients that send or read nothing for
--patience seconds are disconnected. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import itertools
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import torch
import typer
from aiohttp import web
from batch_scheduler import Busy, Finished, Limits, Request, Scheduler
from common import Device, device_of, program
from decoding import Engine
from nsa_lm import nsa_checkpoint, trained_model

import nsa_sel
from nsa_sel.errors import ArgumentError

Pieces = AsyncGenerator[tuple[str, Finished | None]]  # text, and the end with the last piece
MODEL = "nsa-lm"
ANSWER_SECONDS = 5  # after the grace period, for the current step and its responses


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """JSON of a request, with OpenAI's names and defaults.

    `model` and `user` are ignored. The fields after them accept only their neutral value. Other fields are refused.
    """

    prompt: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 16
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0
    stream: bool = False
    stop: str | list[str] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | None = None
    model: str | None = None
    user: str | None = None
    n: Literal[1] = 1
    best_of: Literal[1] = 1
    top_p: Annotated[float, msgspec.Meta(ge=1, le=1)] = 1.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=0, le=0)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=0, le=0)] = 0.0
    logprobs: None = None
    suffix: None = None

    def stop_bytes(self) -> bytes:
        """Return the bytes that end a completion. Raises ArgumentError for a text that is not one byte."""
        texts = [self.stop] if isinstance(self.stop, str) else self.stop or []
        for text in texts:
            if len(text.encode()) != 1:
                raise ArgumentError("stop", repr(text), "characters of one byte", "leave it out, and cut the completion yourself")
        return "".join(texts).encode()


def error_json(message: str, kind: str) -> bytes:
    """Return an error in OpenAI's format."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})


def refused(status: int, message: str) -> web.Response:
    """Return an error response: below 500 for an invalid request, 503 for one that cannot be served now."""
    headers = {"Retry-After": "1"} if status == 503 else {}
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.Response(status=status, body=error_json(message, kind), content_type="application/json", headers=headers)


@web.middleware
async def errors_in_json(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Convert aiohttp's errors, such as an unknown path or an oversized body, to OpenAI's format."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return refused(error.status, f"{request.method} {request.path}: {error.text}")


NUMBERS = itertools.count(1)


def answer_of(request: Request) -> Callable[[str, str | None], bytes]:
    """Return a function that makes the JSON of one completion: some text, and at the end the finish reason and counts."""
    facts = {"id": f"cmpl-{next(NUMBERS)}", "object": "text_completion", "created": int(time.time()), "model": MODEL}

    def piece(text: str, finish: str | None) -> bytes:
        choice = {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}
        prompt, total = len(request.prompt), len(request.text)
        usage = {"prompt_tokens": prompt, "completion_tokens": total - prompt, "total_tokens": total}
        return msgspec.json.encode({**facts, "choices": [choice], **({"usage": usage} if finish else {})})

    return piece


class Server:
    """The HTTP side of a scheduler, whose thread begins and ends with the application.

    Args:
        scheduler: runs the requests.
        grace: seconds for running completions to finish after SIGTERM.
        patience: seconds for a client to send its request, and to receive each piece.
    """

    def __init__(self, scheduler: Scheduler, grace: float, patience: float) -> None:
        self.scheduler, self.grace, self.patience = scheduler, grace, patience
        self.outcomes, self.tokens = Counter[str](), Counter[str]()  # of requests, and bytes of prompts and completions
        self.thread = threading.Thread(target=scheduler.run, name="model steps", daemon=True)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[errors_in_json])
        app.add_routes([
            web.post("/v1/completions", self.complete), web.get("/v1/models", self.models), web.get("/metrics", self.scrape),
            web.get("/health", self.health),
        ])  # fmt: skip
        return app

    async def drain(self) -> None:
        """Let running completions finish within the grace period."""
        self.scheduler.close("the server is shutting down")
        await asyncio.to_thread(self.thread.join, self.grace)
        self.scheduler.stop("the server is shutting down")
        await asyncio.to_thread(self.thread.join, ANSWER_SECONDS)  # the current step

    async def health(self, request: web.Request) -> web.Response:
        if self.scheduler.closed:
            return refused(503, self.scheduler.closed)
        return web.json_response({"status": "ok", "limits": self.scheduler.limits._asdict()})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "nsa-sel"}]})

    async def scrape(self, request: web.Request) -> web.Response:
        """Return metrics in Prometheus' text format: the scheduler's state, totals, and `nsa_sel.counters()`."""
        it = self.scheduler
        state = {
            "requests_running": len(it.running), "requests_waiting": len(it.waiting), "cache_pages_free": it.cache.free_pages,
            "prefixes_kept": len(it.prefixes.kept), "preempted_total": it.preempted, "prefix_hits_total": it.prefixes.hits,
            "prefix_tokens_total": it.prefixes.saved, **{f"{kind}_tokens_total": count for kind, count in self.tokens.items()},
        }  # fmt: skip
        lines = [f"nsa_serve_{name} {value}" for name, value in state.items()]
        lines += [f'nsa_serve_requests_total{{outcome="{outcome}"}} {count}' for outcome, count in self.outcomes.items()]
        lines += [f'nsa_sel_counters_total{{name="{name}"}} {count}' for name, count in nsa_sel.counters().items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[int | Finished]()

        def emit(event: int | Finished) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            async with asyncio.timeout(self.patience):
                content = await request.read()
            body = msgspec.json.decode(content, type=Body)
            asked = Request(body.prompt.encode(), body.max_tokens, emit, body.temperature, body.seed, body.stop_bytes())
            self.scheduler.submit(asked)
        except (msgspec.MsgspecError, UnicodeError, ArgumentError) as error:
            self.outcomes["refused"] += 1
            return refused(400, str(error))
        except TimeoutError:
            self.outcomes["refused"] += 1
            return refused(408, f"the request did not come within {self.patience} seconds")
        except Busy as error:
            self.outcomes["busy"] += 1
            return refused(503, str(error))
        self.tokens["prompt"] += len(asked.prompt)
        async with contextlib.aclosing(self.texts(asked, events)) as pieces:
            return await (streamed(request, asked, pieces, self.patience) if body.stream else whole(asked, pieces))

    async def texts(self, asked: Request, events: asyncio.Queue[int | Finished]) -> Pieces:
        """Yield the text that each byte completes, possibly empty, and finally the rest with the end.

        Closing it early cancels.
        """
        decoder, outcome = codecs.getincrementaldecoder("utf-8")("replace"), "disconnected"
        try:
            while isinstance(event := await events.get(), int):
                self.tokens["generated"] += 1
                yield decoder.decode(bytes([event])), None
            outcome = event.reason
            yield decoder.decode(b"", final=True), event
        finally:
            self.scheduler.cancel(asked)
            self.outcomes[outcome] += 1


async def whole(asked: Request, pieces: Pieces) -> web.Response:
    """Return the completion as one JSON object."""
    texts, end = [], Finished("error")
    async for text, last in pieces:
        texts.append(text)
        end = last or end
    if end.reason == "error":
        return refused(503, end.message)
    return web.Response(body=answer_of(asked)("".join(texts), end.reason), content_type="application/json")


async def streamed(request: web.Request, asked: Request, pieces: Pieces, patience: float) -> web.StreamResponse:
    """Stream the completion as server-sent events, one per byte.

    Abort if the client receives nothing for `patience` seconds.
    """
    piece, response = answer_of(asked), web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    async for text, end in pieces:
        data = piece(text, end and end.reason)
        if end is not None and end.reason == "error":
            if not response.prepared:  # the status is not sent yet
                return refused(503, end.message)
            data = error_json(end.message, "server_error")
        if not response.prepared:
            await response.prepare(request)
        try:
            async with asyncio.timeout(patience):
                await response.write(b"data: " + data + b"\n\n")
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            return response
    await response.write(b"data: [DONE]\n\n")
    return response


async def answer(server: Server, listening: socket.socket) -> None:
    """Serve requests until SIGTERM or SIGINT, then drain. A second signal ends the process."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    runner = web.AppRunner(
        server.application(), handler_cancellation=True, shutdown_timeout=ANSWER_SECONDS, keepalive_timeout=server.patience
    )  # fmt: skip
    await runner.setup()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    server.thread.start()
    await web.SockSite(runner, listening).start()
    host, port = listening.getsockname()[:2]
    print(f"serving at http://{host}:{port}; Ctrl-C or SIGTERM ends it", flush=True)
    await stopping.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    await server.drain()
    await runner.cleanup()


def main(
    run: Annotated[Path, typer.Argument(help="folder of a run of train_nsa_lm.py")],
    host: Annotated[str, typer.Option(help="address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one, which is printed")] = 8000,
    pages: Annotated[int | None, typer.Option(min=1, help="of the cache, by default as many as all running sequences can need")] = None,
    page_size: Annotated[int, typer.Option(min=1, help="bytes of text per page")] = 64,
    running: Annotated[int, typer.Option(min=1, help="sequences that are decoded at once, at most")] = 16,
    waiting: Annotated[int, typer.Option(min=0, help="requests that wait beside them, at most; further ones get 503")] = 64,
    chunk: Annotated[int, typer.Option(min=2, help="bytes of prompts that are prefilled between two decoding steps")] = 512,
    prefixes: Annotated[int, typer.Option(min=0, help="most sequences kept for prompts with a common prefix; 0 for none")] = 256,
    grace: Annotated[float, typer.Option(min=0, help="seconds that running completions have after SIGTERM")] = 10,
    patience: Annotated[float, typer.Option(min=1, help="seconds in which a client must send its request, and take what it is sent")] = 30,
    fp8: Annotated[bool, typer.Option(help="keep K and V in e4m3 with scales of 1, in half the bytes of bfloat16")] = False,
    backend: Annotated[str | None, typer.Option(help="of the selected branch; by default the policy chooses")] = None,
    device: Device = "auto",
) -> None:
    """Serve a trained byte-level model over HTTP."""
    model, sizes = trained_model(nsa_checkpoint(run), backend)
    pages = pages or running * -(-sizes.context // page_size)
    engine = Engine(model, torch.device(device_of(device)), pages, page_size, torch.float8_e4m3fn if fp8 else None)
    limits = Limits(min(sizes.context, pages * page_size), running, waiting, chunk, prefixes)
    engine.warm_up(running, limits.context, min(chunk, limits.context))
    try:
        listening = socket.create_server((host, port))
    except OSError as error:
        value, allowed = f"{host}:{port} ({error.strerror})", "an address of this machine and a free port"
        raise ArgumentError("--host, --port", value, allowed, "pass --port 0 for any free one") from error
    with listening:
        asyncio.run(answer(Server(Scheduler(engine, limits), grace, patience), listening))


if __name__ == "__main__":
    program(main)
