"""Tables of docs/training.md, from runs of examples/train_nsa_lm.py below bench/results/h200/training/, a row a step.

speed-CONTEXT-ATTENTION.jsonl   some steps, for tokens per second; ATTENTION is dense or nsa
long-CONTEXT-ATTENTION.jsonl    training until text is learned, for held-out losses
band-BACKEND.jsonl              the same short run with one backend of choosing or of the selected branch forced
ranks-CONTEXT-WAY-RANKS.jsonl   for docs/distributed.md: some steps without a CUDA graph, on one rank (WAY alone) or spread over several
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from nsa_sel.bench.core import store
from nsa_sel.bench.core.environment import ROOT
from nsa_sel.bench.core.markdown import table
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.report import losses

FOLDER = ROOT / "bench/results/h200/training"
REFERENCE = "band-sdpa-packed"
WINDOW = 20  # steps that losses of a band are averaged over


class Pair(NamedTuple):
    """Runs of one context, with dense attention and with NSAttention."""

    context: int
    dense: list[Row]
    nsa: list[Row]


def pairs(kind: str, folder: Path = FOLDER) -> list[Pair]:
    """Of each context that was trained with both; kind: speed or long."""
    contexts = sorted(int(file.stem.split("-")[1]) for file in folder.glob(f"{kind}-*-nsa.jsonl"))
    return [Pair(S, *(store.read(folder / f"{kind}-{S}-{name}.jsonl") for name in ("dense", "nsa"))) for S in contexts]


def speed_table() -> str:
    """Tokens per second of whole training steps."""
    lines = []
    for context, dense, nsa in pairs("speed"):
        rates = losses.speed(dense), losses.speed(nsa)
        lines.append((f"{context // 1024}k", *(f"{rate / 1e3:.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}", nsa[-1]["backend"]))
    return table(["context", "dense, thousand tokens/s", "NSAttention", "times", "selected branch"], lines, left=1)


def ranks_table() -> str:
    """Tokens per second of one rank and of several, and the loss after the last step."""
    lines, alone = [], dict[str, float]()
    for file in sorted(FOLDER.glob("ranks-*.jsonl"), key=lambda file: (int(file.stem.split("-")[1]), file.stem)):
        (_, context, way, ranks), rows = file.stem.split("-"), store.read(file)
        rate = losses.speed(rows)
        alone.setdefault(context, rate)  # the first of its context
        shown = f"{rate / 1e3:.0f}", f"{rate / alone[context]:.2f}", f"{rows[-1]['loss']:.3f}"
        lines.append((f"{int(context) // 1024}k", way, ranks, *shown))
    return table(["context", "parallel", "ranks", "thousand tokens/s", "over one rank", f"loss after {len(rows)} steps"], lines, left=2)


def loss_table() -> str:
    """Held-out losses after as many steps, and the last of the longer run."""
    lines = []
    for context, *runs in pairs("long"):
        dense, nsa = ({row["step"] + 1: row["held_out_loss"] for row in run if "held_out_loss" in row} for run in runs)
        for step in sorted(dense.keys() | {max(nsa)}):
            one, other = dense.get(step), nsa[step]
            lines.append((f"{context // 1024}k", step, *("-" if x is None else f"{x:.3f}" for x in (one, other, one and other - one))))
    return table(["context", "steps", "dense, nats a byte", "NSAttention", "difference"], lines, left=1)


def band_table() -> str:
    """The largest distance of averaged losses from the run with packed SDPA."""
    runs = {file.stem: store.read(file) for file in sorted(FOLDER.glob("band-*.jsonl"))}
    lines = []
    for name, rows in runs.items():
        far = losses.furthest(rows, runs[REFERENCE], WINDOW)
        lines.append((name.removeprefix("band-"), rows[-1]["backend"], len(rows), f"{rows[-1]['loss']:.3f}", f"{far:.4f}"))
    return table(["forced", "selected branch", "steps", "last loss", "from packed SDPA"], lines, left=2)
