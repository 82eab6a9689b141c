"""Send concurrent completions to a server on this machine, and print its speed.

    python examples/serve_nsa_lm.py runs/nsa --port 8000                                             # first
    python examples/load_test.py --url http://127.0.0.1:8000 --requests 64 --at-once 16 --out rows.jsonl

Prompts are excerpts of asyncio's source, of mixed lengths, determined by --seed and the Python version. Only loopback
addresses are accepted, to keep it from loading other people's servers. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, NamedTuple

import aiohttp
import msgspec
import typer
from common import Device, Row, device_of, facts, program, write_rows
from yarl import URL

from nsa_sel.errors import ArgumentError


class Completion(NamedTuple):
    """The outcome of a completion, arrival times of its bytes, and its end, in seconds since the request."""

    outcome: str
    times: list[float]
    seconds: float


def completions_at(url: str) -> URL:
    """Return the address of the endpoint. Raises ArgumentError for another machine."""
    try:
        base = URL(url)
        local = base.scheme == "http" and ipaddress.ip_address(base.host or "").is_loopback
    except ValueError:  # a host name may resolve to any machine
        local = False
    if not local:
        raise ArgumentError("--url", url, "http://127.0.0.1:PORT or http://[::1]:PORT", "run this on the server's machine")
    return base.with_path("/v1/completions")


def prompts(count: int, least: int, most: int, seed: int) -> list[str]:
    """Return excerpts of asyncio's source, which every Python has, of `least` to `most` bytes."""
    text = "".join(file.read_text() for file in sorted(Path(asyncio.__file__).parent.glob("*.py"))).encode("ascii", "replace").decode()
    chosen = random.Random(seed)
    sizes = [chosen.randint(least, most) for _ in range(count)]
    return [text[start : start + size] for size in sizes for start in [chosen.randrange(len(text) - size)]]


async def complete(session: aiohttp.ClientSession, url: URL, prompt: str, max_tokens: int) -> Completion:
    """Run one streamed completion. An error becomes its outcome."""
    outcome, times, began = "no answer", list[float](), time.perf_counter()
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    try:
        async with session.post(url, json=body, allow_redirects=False) as response:
            outcome = outcome if response.status == 200 else f"status {response.status}"
            async for line in response.content:
                if response.status == 200 and line.startswith(b"data: {"):
                    event = msgspec.json.decode(line[6:])
                    finish = "error" if "error" in event else event["choices"][0]["finish_reason"]
                    if finish:
                        outcome = finish
                    else:
                        times.append(time.perf_counter() - began)
    except aiohttp.ClientError as error:
        outcome = type(error).__name__
    return Completion(outcome, times, time.perf_counter() - began)


async def load(url: URL, texts: list[str], at_once: int, max_tokens: int, seconds: float) -> tuple[list[Completion], float]:
    """Return the completions of all texts and the total seconds. Raises TimeoutError after `seconds`."""
    gate, began = asyncio.Semaphore(at_once), time.perf_counter()

    async def one(text: str) -> Completion:
        async with gate:
            return await complete(session, url, text, max_tokens)

    connector = aiohttp.TCPConnector(limit=at_once)
    async with asyncio.timeout(seconds), aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        completions = await asyncio.gather(*(one(text) for text in texts))
    return completions, time.perf_counter() - began


def figures(completions: list[Completion], seconds: float) -> Row:
    """Return outcomes, rates, and times in ms (median and 95th percentile; None for fewer than two)."""
    times = {
        "first": [one.times[0] for one in completions if one.times],
        "between": [later - earlier for one in completions for earlier, later in zip(one.times, one.times[1:], strict=False)],
        "request": [one.seconds for one in completions if one.times],
    }
    tokens = sum(len(one.times) for one in completions)
    row: Row = {"outcomes": dict(sorted(Counter(one.outcome for one in completions).items())), "seconds": seconds}
    row |= {"requests_per_second": len(completions) / seconds, "tokens_per_second": tokens / seconds}
    for name, values in times.items():
        percentiles = statistics.quantiles(values, n=20, method="inclusive") if len(values) > 1 else None
        row |= {f"{name}_ms_{which}": percentiles and percentiles[i] * 1e3 for which, i in (("median", 9), ("p95", 18))}
    return row


def main(
    url: Annotated[str, typer.Option(help="of the server, by a loopback address")] = "http://127.0.0.1:8000",
    requests: Annotated[int, typer.Option(min=1, max=10_000, help="in all")] = 16,
    at_once: Annotated[int, typer.Option(min=1, max=256, help="requests")] = 16,
    prompt: Annotated[int, typer.Option(min=1, max=65_536, help="most bytes of a prompt; the least are a quarter")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, max=65_536, help="bytes of a completion")] = 32,
    seconds: Annotated[float, typer.Option(help="to wait, at most")] = 300,
    seed: Annotated[int, typer.Option(help="of the prompts: a server shares the pages of equal ones")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON-lines file that a row is appended to")] = None,
    device: Device = "auto",
) -> None:
    """Measure a server on this machine under load."""
    texts = prompts(requests, max(1, prompt // 4), prompt, seed)
    try:
        completions, took = asyncio.run(load(completions_at(url), texts, at_once, max_tokens, seconds))
    except TimeoutError:
        print(f"not done in {seconds} s")
        raise typer.Exit(1) from None
    row = figures(completions, took)
    for name, value in row.items():
        print(f"{name}: {f'{value:.4g}' if isinstance(value, float) else value}")
    if out:
        asked = {"requests": requests, "at_once": at_once, "prompt": prompt, "max_tokens": max_tokens, "seed": seed}
        write_rows(out, [{**asked, **row, **facts(device_of(device))}])
    if not all(one.times for one in completions):
        raise typer.Exit(1)


if __name__ == "__main__":
    program(main)
