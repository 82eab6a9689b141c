"""What the demo prints: the problem and the policy's choice before it runs, and the table of results after."""

from __future__ import annotations

from nsa_sel.cli.demo import DENSE, FIGURES, MASKED, Result, Row, Setting, Spread, device_name, dtype_name
from nsa_sel.cli.output import terminal_columns
from nsa_sel.telemetry.describe import describe
from nsa_sel.telemetry.table import table


def introduction(setting: Setting) -> str:
    """What will be computed, from which model and text, and the policy's decision with its reasons."""
    q, k, v, selection, _, facts = setting.problem
    S_kv, ranges = k.shape[2], f"blocks of {selection.block_size}" if selection.block_size else "ranges"
    (B, S, G, h), heads = q.shape[:4], "KV head" if q.shape[2] == 1 else "KV heads"
    lines = [
        f"NSA's selection branch: {S} query rows x {G} {heads} of {h} query heads each;"
        f" a row attends to at most {selection.n} {ranges} of the {S_kv} keys."
    ]
    if "model" in facts:
        head = f", KV head {facts['head']}" if "head" in facts else ""
        rounded = f", rounded to {facts['rounded to']} in the file" if "rounded to" in facts else ""
        lines.append(f"Model: {facts['model']}, layer {facts.get('layer', '?')}{head}, q and k after RoPE{rounded}.")
    if facts.get("synthetic"):
        lines.append(
            "q, k and v are seeded random numbers, the blocks those that SmolLM2-135M selects: an installed package does not carry the"
            " model's own q, k and v. From a checkout: nsa-sel demo --trace bench/data/smollm2_trace.safetensors"
        )
    if "copies" in facts:
        lines.append(f"The batch holds {B} copies: a GPU computes a single one faster than the host can launch it.")
    if "text" in facts:
        lines.append(f"Text: {facts['text']} (its first {S_kv} tokens).")
    if "first" in facts and "local" in facts:
        top = selection.n - int(facts["first"]) - int(facts["local"])
        lines.append(f"Blocks of a row: {facts['first']} first, {facts['local']} local, {top} by score (NSA Eq. 7-12).")
    where = f"{device_name(setting.decision.device)} in {dtype_name(q.dtype)}"
    lines.append(f"Computed on {where}, forward and backward; every result is compared with a float64 oracle on {_of_rows(setting)}.")
    return "\n".join([*lines, "", "The policy's choice:", describe(setting.decision, terminal_columns()), ""])


def _of_rows(setting: Setting) -> str:
    rows, S = len(setting.rows), setting.problem.q.shape[1]
    return "all rows" if rows == S else f"{rows} of {S} rows" + (" of each copy" if "copies" in setting.problem.facts else "")


def text(result: Result) -> str:
    """The table of results, who refused and why, and who is fastest."""
    cells = []
    for row in result.rows:
        ratios = [times_of_dense(result.rows, row, field) for field in ("forward", "forward_backward")]
        errors = [f"{row.errors[name].max:.1e}" if name in row.errors else "-" for name in FIGURES]
        name = row.name + (" (policy)" if row.policy_choice else "")
        cells.append([name, milliseconds(row.forward), milliseconds(row.forward_backward), " / ".join(ratios), *errors, row.verdict])
    headers = ["backend", "fwd ms", "fwd+bwd ms", "speed vs dense", "max err o", *FIGURES[1:], "verdict"]
    lines = [table(headers, cells, right=range(1, len(headers) - 1), columns=terminal_columns()), ""]
    lines += [f"{name} does not run here: {why}" for name, why in result.refused.items()]
    shaky = [row.name for row in result.rows if any(_shaky(spread) for spread in (row.forward, row.forward_backward))]
    if shaky:
        lines.append(f"Times of {', '.join(shaky)} are few (slow calls are) or scatter widely: read the ratios with care.")
    untimed = [row.name for row in result.rows if row.passed is not False and row.forward_backward is None]
    if untimed:
        lines.append(f"Not timed, or not with backward: {', '.join(untimed)}; it has no backward, or the time was up.")
    lines += [_fastest(result.rows, "forward", "forward"), _fastest(result.rows, "forward_backward", "forward + backward")]
    lines.append(f"{DENSE} computes something else: every row attends to all keys up to its position. It is what selection saves.")
    lines.append("Times are medians; backends take turns. Each call has a new selection: its plans are part of the time, masks are not.")
    if result.decision.device.kind == "cuda":
        lines.append("The GPU's L2 cache is flushed before each call.")
    lines.append(f"Compared with the oracle: {result.checked_rows} rows of each sequence, and dk and dv of a loss over these.")
    lines.append(f"Bounds of the mean error: {result.bound:g} for o and lse; for gradients that, or twice the error of {MASKED}.")
    wrong = [row.name for row in result.rows if row.passed is False]
    lines.append(f"WRONG: {', '.join(wrong)}." if wrong else "Every result agrees with the oracle.")
    return "\n".join(lines)


def milliseconds(spread: Spread | None) -> str:
    """The median to three digits, or a dash where there is none."""
    if spread is None:
        return "-"
    return f"{spread.median:.3g}" if spread.median < 999.5 else f"{spread.median:.0f}"


def times_of_dense(rows: tuple[Row, ...], row: Row, field: str) -> str:
    """The speed of a row relative to dense attention, "forward" or "forward_backward"; a dash where one of them was not timed."""
    dense = next((getattr(other, field) for other in rows if other.name == DENSE), None)
    spread = getattr(row, field)
    return f"{dense.median / spread.median:.3g}x" if dense and spread else "-"


def _fastest(rows: tuple[Row, ...], field: str, what: str) -> str:
    timed = sorted(((getattr(row, field), row) for row in rows if row.passed and getattr(row, field)), key=lambda pair: pair[0].median)
    if not timed:
        return f"Fastest {what}: nothing to compare."
    (best, row), others = timed[0], timed[1:]
    ties = [other.name for spread, other in others if spread.p20 <= best.p80]
    tie = f", no clear lead over {' and '.join(ties)}" if ties else ""
    dense = next((getattr(other, field) for other in rows if other.name == DENSE), None)
    speed = f", {times_of_dense(rows, row, field)} the speed of {DENSE} ({milliseconds(dense)} ms)" if dense else ""
    return f"Fastest {what}: {row.name}, {milliseconds(best)} ms{speed}{tie}."


def _shaky(spread: Spread | None) -> bool:
    return spread is not None and (spread.repeats < 3 or spread.p80 > 1.5 * spread.p20)
