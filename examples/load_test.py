"""Send completions to a server on this machine, several at once, and print its speed.

    python examples/serve_nsa_lm.py runs/nsa --port 8000                                             # first
    python examples/load_test.py --url http://127.0.0.1:8000 --requests 64 --at-once 16

Prompts are pieces of this repository's documentation, of mixed lengths; they and their lengths depend on --seed alone. Only loopback
addresses are accepted: servers of other people are not to be tested like this.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec
import typer
from yarl import URL

from nsa_sel.bench.core.command_line import echo, program
from nsa_sel.errors import ArgumentError

DOCS = Path(__file__).parents[1] / "docs"


@dataclass
class Completion:
    """When the bytes of a completion came, in seconds from its request, and how it ended."""

    times: list[float] = field(default_factory=list)
    outcome: str = "no answer"
    seconds: float = 0.0


def completions_at(url: str) -> URL:
    """The address of the endpoint, or ArgumentError for another machine's."""
    try:
        base = URL(url)
        local = base.scheme == "http" and ipaddress.ip_address(base.host or "").is_loopback
    except ValueError:  # a name: it may lead anywhere
        local = False
    if not local:
        raise ArgumentError("--url", url, "http://127.0.0.1:PORT or http://[::1]:PORT", "run this on the server's machine")
    return base.with_path("/v1/completions")


def prompts(number: int, most: int, seed: int) -> list[str]:
    """Pieces of the documentation of a quarter of `most` to `most` bytes."""
    text = "".join(file.read_text() for file in sorted(DOCS.glob("*.md"))).encode("ascii", "replace").decode()
    chosen = random.Random(seed)
    sizes = [chosen.randint(max(1, most // 4), most) for _ in range(number)]
    return [text[start : start + size] for size in sizes for start in [chosen.randrange(len(text) - size)]]


async def complete(session: aiohttp.ClientSession, url: URL, prompt: str, max_tokens: int) -> Completion:
    """One streamed completion; an error is its outcome."""
    found, began = Completion(), time.perf_counter()
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    try:
        async with session.post(url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                found.outcome = f"status {response.status}"
                return found
            async for line in response.content:
                if line.startswith(b"data: {"):
                    read(found, msgspec.json.decode(line[6:]), time.perf_counter() - began)
    except aiohttp.ClientError as error:
        found.outcome = type(error).__name__
    finally:
        found.seconds = time.perf_counter() - began
    return found


def read(found: Completion, event: dict[str, list[dict[str, object]]], now: float) -> None:
    """Note one event: a byte, the end, or an error."""
    if "error" in event:
        found.outcome = "error"
    elif event["choices"][0]["finish_reason"]:
        found.outcome = str(event["choices"][0]["finish_reason"])
    else:
        found.times.append(now)


async def load(url: URL, texts: list[str], at_once: int, max_tokens: int, seconds: float) -> tuple[list[Completion], float]:
    """All completions, `at_once` at a time, and the seconds they took together; TimeoutError after so many."""
    gate, began = asyncio.Semaphore(at_once), time.perf_counter()

    async def one(text: str) -> Completion:
        async with gate:
            return await complete(session, url, text, max_tokens)

    connector = aiohttp.TCPConnector(limit=at_once)
    async with asyncio.timeout(seconds), aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        found = await asyncio.gather(*(one(text) for text in texts))
    return found, time.perf_counter() - began


def milliseconds(name: str, seconds: list[float]) -> str:
    """Median and 95th percentile."""
    if len(seconds) < 2:
        return f"{name}: too few"
    percentiles = statistics.quantiles(seconds, n=20, method="inclusive")
    return f"{name}: median {percentiles[9] * 1e3:.1f} ms, 95% {percentiles[18] * 1e3:.1f} ms"


def report(found: list[Completion], seconds: float) -> str:
    """What a load test prints."""
    outcomes = [completion.outcome for completion in found]
    between = [later - earlier for completion in found for earlier, later in zip(completion.times, completion.times[1:], strict=False)]
    tokens = sum(len(completion.times) for completion in found)
    lines = [
        f"{len(found)} requests in {seconds:.2f} s: " + ", ".join(f"{outcomes.count(name)} {name}" for name in sorted(set(outcomes))),
        f"{len(found) / seconds:.2f} requests/s, {tokens / seconds:.1f} tokens/s",
        milliseconds("time to first token", [completion.times[0] for completion in found if completion.times]),
        milliseconds("time between tokens", between),
        milliseconds("time of a request", [completion.seconds for completion in found if completion.times]),
    ]
    return "\n".join(lines)


def main(
    url: Annotated[str, typer.Option(help="of the server, by a loopback address")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(min=1, max=10_000)] = 64,
    at_once: Annotated[int, typer.Option(min=1, max=256)] = 16,
    prompt: Annotated[int, typer.Option(min=1, max=65_536, help="most bytes of a prompt")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=65_536, help="bytes of a completion")] = 32,
    seconds: Annotated[float, typer.Option(help="to wait for all of it, at most")] = 300,
    seed: Annotated[int, typer.Option(help="of the prompts")] = 0,
) -> None:
    """Measure a server on this machine."""
    try:
        found, took = asyncio.run(load(completions_at(url), prompts(requests, prompt, seed), at_once, max_tokens, seconds))
    except TimeoutError:
        echo(f"not done in {seconds} s")
        raise typer.Exit(1) from None
    echo(report(found, took))
    if any(not completion.times for completion in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    program(main)
