"""Send concurrent completions to a server on this machine, and print its speed.

    python examples/serve_nsa_lm.py runs/nsa --port 8000                                             # first
    python examples/load_test.py --url http://127.0.0.1:8000 --requests 64 --at-once 16
    python examples/load_test.py --at-once 16,64 --prompt 1024,16384 --least 1 --out rows.jsonl      # a row for each of four loads

Prompts are excerpts of asyncio's source, of mixed lengths, determined by --seed and the Python version. Only loopback addresses are
accepted, to keep it from loading other people's servers. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import aiohttp
import msgspec
import records
import typer
from options import Device, device_of, program
from yarl import URL

from nsa_sel.errors import ArgumentError


@dataclass
class Completion:
    """Arrival times of a completion's bytes, in seconds since its request, and its outcome."""

    times: list[float] = field(default_factory=list)
    outcome: str = "no answer"
    seconds: float = 0.0


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


class Load(NamedTuple):
    """The requests of a load test.

    requests: total number.
    at_once: maximum number of concurrent requests.
    least, most: range of the prompts' lengths in bytes.
    max_tokens: bytes of a completion.
    seed: of the prompts.
    """

    requests: int
    at_once: int
    least: int
    most: int
    max_tokens: int
    seed: int = 0


def prompts(asked: Load) -> list[str]:
    """Return excerpts of asyncio's source, which every Python has."""
    text = "".join(file.read_text() for file in sorted(Path(asyncio.__file__).parent.glob("*.py"))).encode("ascii", "replace").decode()
    chosen = random.Random(asked.seed)
    sizes = [chosen.randint(asked.least, asked.most) for _ in range(asked.requests)]
    return [text[start : start + size] for size in sizes for start in [chosen.randrange(len(text) - size)]]


async def complete(session: aiohttp.ClientSession, url: URL, prompt: str, max_tokens: int) -> Completion:
    """Run one streamed completion. An error becomes its outcome."""
    completion, began = Completion(), time.perf_counter()
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    try:
        async with session.post(url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                completion.outcome = f"status {response.status}"
                return completion
            async for line in response.content:
                if line.startswith(b"data: {"):
                    read(completion, msgspec.json.decode(line[6:]), time.perf_counter() - began)
    except aiohttp.ClientError as error:
        completion.outcome = type(error).__name__
    finally:
        completion.seconds = time.perf_counter() - began
    return completion


def read(completion: Completion, event: dict[str, list[dict[str, object]]], now: float) -> None:
    """Record one event: a byte, the end, or an error."""
    if "error" in event:
        completion.outcome = "error"
    elif event["choices"][0]["finish_reason"]:
        completion.outcome = str(event["choices"][0]["finish_reason"])
    else:
        completion.times.append(now)


async def load(url: URL, texts: list[str], asked: Load, seconds: float) -> tuple[list[Completion], float]:
    """Return the completions of all texts and the total seconds. Raises TimeoutError after `seconds`."""
    gate, began = asyncio.Semaphore(asked.at_once), time.perf_counter()

    async def one(text: str) -> Completion:
        async with gate:
            return await complete(session, url, text, asked.max_tokens)

    connector = aiohttp.TCPConnector(limit=asked.at_once)
    async with asyncio.timeout(seconds), aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout()) as session:
        completions = await asyncio.gather(*(one(text) for text in texts))
    return completions, time.perf_counter() - began


async def limits_of(url: URL) -> dict[str, int]:
    """Return the server's limits, from /health."""
    async with aiohttp.ClientSession() as session, session.get(url.with_path("/health")) as response:
        limits: dict[str, int] = (await response.json())["limits"]
        return limits


def figures(completions: list[Completion], seconds: float) -> records.Row:
    """Return outcomes, rates, and times in ms (median and 95th percentile; None for fewer than two)."""
    outcomes = [completion.outcome for completion in completions]
    served = [completion for completion in completions if completion.times]
    times = {
        "first": [completion.times[0] for completion in served],
        "between": [later - earlier for one in served for earlier, later in zip(one.times, one.times[1:], strict=False)],
        "request": [completion.seconds for completion in served],
    }
    tokens = sum(len(completion.times) for completion in completions)
    rates = {"seconds": seconds, "requests_per_second": len(completions) / seconds, "tokens_per_second": tokens / seconds}
    spreads = {f"{name}_ms_{which}": ms for name, values in times.items() for which, ms in spread(values).items()}
    return {"outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))}, **rates, **spreads}


def spread(seconds: list[float]) -> dict[str, float | None]:
    """Return median and 95th percentile in ms."""
    if len(seconds) < 2:
        return {"median": None, "p95": None}
    percentiles = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"median": percentiles[9] * 1e3, "p95": percentiles[18] * 1e3}


def report(row: records.Row) -> str:
    """Format the figures of a load test."""

    def milliseconds(name: str) -> str:
        median, p95 = row[f"{name}_ms_median"], row[f"{name}_ms_p95"]
        return "too few" if median is None else f"median {median:.1f} ms, 95% {p95:.1f} ms"

    outcomes = row["outcomes"]
    lines = [
        f"{sum(outcomes.values())} requests in {row['seconds']:.2f} s: " + ", ".join(f"{count} {name}" for name, count in outcomes.items()),
        f"{row['requests_per_second']:.2f} requests/s, {row['tokens_per_second']:.1f} tokens/s",
        f"time to first token: {milliseconds('first')}",
        f"time between tokens: {milliseconds('between')}",
        f"time of a request: {milliseconds('request')}",
    ]
    return "\n".join(lines)


def main(
    url: Annotated[str, typer.Option(help="of the server, by a loopback address")] = "http://127.0.0.1:8000",
    requests: Annotated[int | None, typer.Option(min=1, max=10_000, help="of a load; by default as many as at once")] = None,
    at_once: Annotated[str, typer.Option(help="requests, up to 256, comma-separated")] = "16",
    prompt: Annotated[str, typer.Option(help="most bytes of a prompt, up to 65536, comma-separated")] = "64",
    least: Annotated[float, typer.Option(min=0, max=1, help="part of them that every prompt has")] = 0.25,
    max_tokens: Annotated[int, typer.Option(min=1, max=65_536, help="bytes of a completion")] = 32,
    seconds: Annotated[float, typer.Option(help="to wait for a load, at most")] = 300,
    seed: Annotated[int, typer.Option(help="of the prompts of the first load; the next has the next one")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON-lines file that a row of each load is appended to")] = None,
    device: Device = "auto",
) -> None:
    """Measure a server on this machine, under every load in turn."""
    address, unserved = completions_at(url), 0
    facts = records.facts(device_of(device)) if out else {}
    loads = itertools.product(numbers("--prompt", prompt, 65_536), numbers("--at-once", at_once, 256))
    for number, (most, together) in enumerate(loads, seed):  # new prompts for each load: a server would share the pages of equal ones
        asked = Load(requests or together, together, max(1, int(least * most)), most, max_tokens, number)
        try:
            completions, took = asyncio.run(load(address, prompts(asked), asked, seconds))
        except TimeoutError:
            print(f"not done in {seconds} s")
            raise typer.Exit(1) from None
        row = figures(completions, took)
        print(report(row))
        if out:
            records.append(out, [{**asked._asdict(), **row, "server": asyncio.run(limits_of(address)), **facts}])
        unserved += sum(not completion.times for completion in completions)
    if unserved:
        raise typer.Exit(1)


def numbers(option: str, text: str, most: int) -> list[int]:
    """Parse comma-separated whole numbers from 1 to `most`. Raises ArgumentError."""
    parsed = [int(number) if number.isdecimal() else 0 for number in text.split(",")]
    if not all(1 <= number <= most for number in parsed):
        raise ArgumentError(option, repr(text), f"whole numbers from 1 to {most}, comma-separated", "pass such numbers")
    return parsed


if __name__ == "__main__":
    program(main)
