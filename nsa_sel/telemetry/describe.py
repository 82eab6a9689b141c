"""Format a decision, and tables, as text: which backend runs, why the others do not, and which changes would give
another choice."""

from __future__ import annotations

import itertools
import sys
import textwrap
from collections.abc import Iterable, Sequence

from nsa_sel.core.decision import Decision, counterfactuals
from nsa_sel.core.request import SHARING_TOKENS
from nsa_sel.errors import ArgumentError

MIN_WIDTH = 12  # characters of a cell, however narrow the terminal


def describe(decision: Decision, columns: int = 0) -> str:
    """Format a decision for a terminal, with every reason of every backend.

    Args:
        decision: from `explain`, `explain_request` or `decisions`.
        columns: width of the terminal, to which the table is wrapped. 0: unlimited.

    Returns:
        Lines of text.

    Raises:
        ArgumentError: `decision` is not a Decision.
    """
    if not isinstance(decision, Decision):
        raise ArgumentError("decision", f"a {type(decision).__name__}", "one Decision", "pass one of them, such as decisions()[-1]")
    request, device, settings = decision.request, decision.device, decision.settings
    options = f", block {request.block_size}" if request.block_size else ""
    options += f", pages of {request.page_size} keys" if request.page_size else ""
    options += f", quantized KV cache ({request.quantized})" if request.quantized else ""
    mean = "" if request.mean_length is None else f", {request.mean_length} on average"
    lines = [
        f"request   B={request.B} S={request.S} S_kv<={request.S_kv} G={request.G} h={request.h} Dk={request.Dk} Dv={request.Dv}"
        f" n={request.n}{options}, at most {request.max_length} keys a row (L){mean}, {request.dtype},"
        f" gradients {'needed' if request.needs_grad else 'not needed'}",
        f"device    {device.name}" + (f", SM {device.sm // 10}.{device.sm % 10}" if device.sm else ""),
        f"forward   {decision.forward or 'no backend can run it'}",
    ]
    if request.needs_grad:
        lines.append(f"backward  {decision.backward or 'no backend can run it'}")
    if request.pool is not None and len(request.pool) == 3:
        kind, heads, reduce = request.pool
        lines.append(f"scores    {reduce} over a block, {heads} over heads, of {kind}")
    elif request.pool is not None:
        lines.append("scores    none: the log-sum-exp alone")
    lines.append(f"rule      {decision.rule}")
    if decision.predictions and request.kind == "attend":
        source = decision.sharing_source if request.sharing else f"not measured: {decision.sharing_source}"
        ratios = ", ".join(f"{t}: {r}" for t, r in zip(SHARING_TOKENS, request.sharing or settings.sharing_prior, strict=True))
        lines.append(f"sharing   distinct blocks of adjacent tokens, relative to one: {ratios} ({source})")
    assumed = "" if settings.assumed is None else f", assumes values of {settings.assumed}, measured on another device"
    assumed = ", assumes the built-in values" if settings.assumed == "base.yaml" else assumed
    lines.append(f"config    {settings.profile}{assumed}, fingerprint {settings.fingerprint}")
    for field, source in settings.sources.items():
        kernel = field.removeprefix("kernels.")
        if kernel in settings.kernels and source.startswith("tuned: ") and kernel.split("/")[0] in (decision.forward, decision.backward):
            lines.append(f"kernel    {settings.kernels[kernel].config_id(kernel)} ({source})")
    timed = list(dict.fromkeys(p.direction for p in decision.predictions))
    predicted = {(p.backend, p.direction): f"{p.ms:.3g}" for p in decision.predictions}
    rows = []
    for verdict in decision.verdicts:
        kinds, codes = {reason.kind for reason in verdict.forward}, {reason.code for reason in verdict.forward}
        against = [reason.words for reason in verdict.forward]
        against += [f"Backward: {reason.words}" for reason in verdict.backward if reason.code not in codes]
        status = "eligible" if not kinds else "slower" if kinds == {"slower"} else "refused"
        rows.append([
            verdict.backend, "picked" if verdict.backend == decision.forward else status,
            *(predicted.get((verdict.backend, direction), "-") for direction in timed),
            "\n".join(against),
        ])  # fmt: skip
    headers = ["backend", "forward", *(f"{direction}, ms" for direction in timed), "reasons"]
    sentences = [f"-> {sentence}" for sentence in counterfactuals(decision)]
    return "\n".join([*lines, "", table(headers, rows, columns=columns), *sentences])


def table(headers: Sequence[str], rows: Iterable[Iterable[object]], width: int = 96, right: Sequence[int] = (), columns: int = 0) -> str:
    """Format a table for a terminal.

    Args:
        headers: titles of the columns.
        rows: cells, converted with `str`. A cell may have several lines.
        width: maximum characters of a cell; longer lines are wrapped.
        right: indices of right-aligned columns.
        columns: width of the terminal, to which cells are wrapped. 0: unlimited.

    Returns:
        The table's lines.
    """
    texts = [[str(cell).splitlines() for cell in row] for row in rows]
    longest = [max(map(len, itertools.chain([header], *(row[i] for row in texts)))) for i, header in enumerate(headers)]
    available = (columns or sys.maxsize) - 2 * (len(headers) - 1)
    width = next((cap for cap in range(width, MIN_WIDTH, -1) if sum(min(cap, size) for size in longest) <= available), MIN_WIDTH)
    cells = [[[piece for line in lines for piece in textwrap.wrap(line, width, break_on_hyphens=False)] for lines in row] for row in texts]
    cells.insert(0, [textwrap.wrap(header, width) for header in headers])
    widths = [max(len(piece) for cell in column for piece in cell or [""]) for column in zip(*cells, strict=True)]
    cells.insert(1, [["-" * size] for size in widths])
    lines = []
    for line in (line for row in cells for line in itertools.zip_longest(*row, fillvalue="")):
        aligned = [piece.rjust(widths[i]) if i in right else piece.ljust(widths[i]) for i, piece in enumerate(line)]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)
