"""`python -m tests.fuzz --count 10000 --workers 16 --out tests/fuzz/ledger.jsonl` checks cases by seed and records them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from nsa_sel.bench.core import store
from nsa_sel.settings.flags import CACHE_FLAG
from tests.fuzz import checks
from tests.fuzz.generators import GPU_STEP, case

STEP = 100  # seeds of one row of the ledger
PACKAGES = ("torch", "triton", "numba", "numpy", "msgspec", "PyYAML", "safetensors", "typer")


def main() -> int:
    """The number of failed cases as an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds; one is printed too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kind", choices=checks.CHECKS, help="cases of this kind alone")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many seconds")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, help="the ledger to write")
    options = parser.parse_args()
    last = options.first + options.count
    step, until = STEP if options.device == "cpu" else GPU_STEP, time.time() + options.seconds
    parts = [(first, min(step, last - first), options.device, options.kind, until) for first in range(options.first, last, step)]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    made = {"commit": store.commit(), "python": platform.python_version(), "versions": versions}
    # What the workers find, as tests do: no flags, nothing tuned (but compiled kernels on a GPU), and on a CPU Triton's interpreter.
    cache = os.environ.get(CACHE_FLAG) if options.device == "cuda" else None
    for name in [name for name in os.environ if name.startswith("NSA_")]:
        del os.environ[name]
    os.environ |= {CACHE_FLAG: cache or os.devnull + "/nothing", **({"TRITON_INTERPRET": "1"} if options.device == "cpu" else {})}
    if options.count == 1:
        print(case(options.first, options.device, options.kind))
    failures = 0
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(options.out.open("w")) if options.out else None
        pool = stack.enter_context(ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"), checks.prepare))
        for row in pool.map(checks.run, *zip(*parts, strict=True)):
            failures += len(row["failed"])
            print(f"{row['first']} and {row['count']} more: {row['seconds']} s, {row['ran']}", file=sys.stderr)
            for seed, kind, error in row["failed"]:
                print(f"FAILED {seed} {kind}: {error}", flush=True)
            if out is not None:
                print(json.dumps({**row, **made}), file=out, flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
