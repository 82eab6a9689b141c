"""Check cases of the fuzzer by seed: `python -m tests.fuzz --first 100 --count 1000 --device cuda`."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

import torch

from nsa_sel.settings.flags import CACHE_FLAG
from tests import conftest
from tests.fuzz.cases import case
from tests.fuzz.checks import check
from tests.fuzz.steps import check_step


def main() -> int:
    """Return 1 if a case failed. As in tests, there are no flags, nothing is tuned, and a CPU interprets kernels of Triton."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds; one case is printed too")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kind", choices=("calls", "steps"), default="calls", help="steps: of several requests over caches")
    options = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("NSA_")]:
        del os.environ[name]
    os.environ |= {CACHE_FLAG: os.devnull + "/nothing", **({"TRITON_INTERPRET": "1"} if options.device == "cpu" else {})}
    torch.set_num_threads(1)
    failed = 0
    with contextlib.contextmanager(conftest.interpreter_of_tests.__wrapped__)():
        for seed in range(options.first, options.first + options.count):
            one = case(seed, options.device) if options.kind == "calls" else None
            if options.count == 1:
                print(one)
            try:
                check_step(seed, options.device) if one is None else check(one)
            except Exception as error:
                failed += 1
                kind = options.kind if one is None else one.kind
                print(f"FAILED {seed} {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{options.count} cases, {failed} failed", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
