"""How many blocks neighboring rows choose together, and how far back: text of two models beside random selections."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.bench.core import trained
from nsa_sel.bench.core.cases import make_selection, prefill
from nsa_sel.bench.core.markdown import table
from nsa_sel.bench.tune.cost_fit import sharing_of
from nsa_sel.core.request import SHARING_TOKENS
from nsa_sel.selection import Selection

FIRST, LOCAL = 1, 2  # blocks that every row has
TILES = (4, 8, 16, 32, 64)  # tokens
REAL = 8192  # tokens of SmolLM2's maps
TRAINED_LENGTHS = (8192, 32768, 65536)  # as far as there are files
RANDOM_LENGTHS = (8192, 32768, 65536)
HEADERS = ["selections", "tokens", "1 token", *(f"{tokens} tokens" for tokens in TILES), "far"]


class Shared(NamedTuple):
    """Of one group: blocks of one row and of tiles of `TILES` rows, and the share of free blocks that are far."""

    alone: float
    together: tuple[float, ...]
    far: float


def far_share(blocks: Tensor, block_size: int) -> list[float]:
    """Share of the freely chosen blocks that a sliding window of n blocks would not hold, per group of indices [S,G,n].

    Over the rows with at least 2n blocks behind them; NaN without any. Near 0, the selection is merely local.
    """
    n = blocks.shape[2]
    late = 2 * n * block_size
    row = torch.arange(late, max(late, len(blocks)))[:, None, None]
    far = (blocks[late:] >= FIRST) & (blocks[late:] <= row // block_size - n)
    shares: list[float] = (far.sum(-1).double().mean(0) / (n - FIRST - LOCAL)).tolist()
    return shares


def shared(selection: Selection) -> list[Shared]:
    """Of every group of a selection [1,S,G,n,2] of whole blocks, each row at its own key."""
    return [_of_group(Selection(one, selection.block_size, disjoint=True)) for one in selection.ranges.unsqueeze(3).unbind(2)]


def _of_group(selection: Selection) -> Shared:
    sharing = selection.measure(selection.ranges.shape[1]).sharing
    assert sharing is not None, "selections of whole blocks"
    blocks = selection.block_indices[0].cpu()
    alone = float((blocks >= 0).sum(-1).double().mean())
    together = tuple(alone * sharing[SHARING_TOKENS.index(tokens)] for tokens in TILES)
    return Shared(alone, together, far_share(blocks, int(selection.block_size or 0))[0])


def of_random(S: int) -> Shared:
    """What random selections of 16 blocks of 64 keys share on average."""
    case = prefill("random", S, 1)
    sharing, seen = sharing_of(case), torch.arange(S) // case.block + 1
    alone = float(seen.clamp(max=case.n).double().mean())
    late = seen[2 * case.n * case.block :].double()
    far = (late - FIRST - case.n) / (late - FIRST - LOCAL)  # of the blocks that are not forced, those outside of the window
    return Shared(alone, tuple(alone * sharing[SHARING_TOKENS.index(tokens)] for tokens in TILES), float(far.mean()))


def origin(context: int) -> str:
    """Which layers of which model a file of trained selections has, and whether that model uses what is far."""
    facts = trained.provenance(context)
    reach = facts["reach"]
    ends = f"{reach['after_all']:.3f} nats a byte after all that precedes them, {reach['after_as_many']:.3f} after the last as many"
    layers = f"layers {', '.join(map(str, facts['layers']))} of {facts['sizes']['layers']}"
    trained_for = f"after {facts['step']:,} steps, {facts['passage_loss']:.3f} nats a byte on this text"
    made = f"{layers}, at a context of {context:,} bytes, {trained_for}; {facts['device']}, commit {facts['commit']}."
    return f"{made} The last {reach['bytes']:,} bytes of held-out contexts: {ends}."


def line(name: str, S: int, found: Sequence[Shared]) -> tuple[str, ...]:
    """Means, with the least and the most of several."""

    def cell(values: Sequence[float], form: str) -> str:
        ends = [format(value, form) for value in (min(values), max(values))]
        return format(fmean(values), form) + (f" ({ends[0]} to {ends[1]})" if len(values) > 1 else "")

    tiles = [cell([one.together[i] for one in found], ".1f") for i in range(len(TILES))]
    return name, f"{S // 1024}k", f"{fmean(one.alone for one in found):.1f}", *tiles, cell([one.far for one in found], ".2f")


def sharing_table() -> str:
    """Blocks that one row and tiles of rows choose: of SmolLM2's maps and trained models' as the benches take them, and of random rows."""
    kinds = [("text, SmolLM2-135M", "real", REAL)]
    kinds += [("text, trained with NSA", "trained", S) for S in TRAINED_LENGTHS if S <= max(trained.contexts(), default=0)]
    lines = [line(name, S, shared(make_selection(prefill(kind, S, 1), "cpu"))) for name, kind, S in kinds]
    return table(HEADERS, [*lines, *(line("random", S, [of_random(S)]) for S in RANDOM_LENGTHS)], left=1)
