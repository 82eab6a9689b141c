"""`nsa-sel demo`: attention of a language model on every backend that runs here, checked against float64, timed and
drawn."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import msgspec
import safetensors
import torch
from torch import Tensor

from nsa_sel.attention import selection_attention
from nsa_sel.bench.core import cases, contenders, timing
from nsa_sel.cli import demo_model
from nsa_sel.cli.output import terminal_columns
from nsa_sel.core.call import device_info, request_of
from nsa_sel.core.decide import decide, explain_request
from nsa_sel.core.decision import Decision, refusal
from nsa_sel.errors import BackendError
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events
from nsa_sel.telemetry.describe import describe, table

matplotlib.use("Agg")  # needs no display

from matplotlib import pyplot

MASKED = "masked SDPA"
DENSE = "dense causal SDPA"
GRADIENTS = ("dq", "dk", "dv")
OUTPUTS = ("o", "lse", *GRADIENTS)
# Largest allowed mean absolute error of o and lse, by device kind and dtype.
BOUNDS = {("cpu", "float32"): 1e-6, ("cuda", "float32"): 1e-4, ("cuda", "float16"): 1e-3, ("cuda", "bfloat16"): 1e-3}
CHECKED_ROWS = 1024  # maximum: the float64 oracle is a plain loop and takes milliseconds per row
TRACE = Path(str(resources.files("nsa_sel"))) / "bench" / "data" / "smollm2_trace.safetensors"  # in a checkout
COPIES_ON_GPU = 16  # batch size on a GPU: a single copy would be bound by the host
ROUNDS = {"cpu": 9, "cuda": 51}
TIMING_SECONDS = {"cpu": 12.0, "cuda": 25.0}  # in equal shares; each kind of work runs at least once within twice that time

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
Advance = Callable[[str, float], None]


class Row(msgspec.Struct, kw_only=True):
    """The result of one backend or baseline."""

    name: str
    policy_choice: bool = False
    errors: dict[str, dict[str, float]] = {}  # of o, lse and gradients: mae, max, and the bound of mae
    forward: dict[str, float] | None = None  # median, p20 and p80 in ms, and repeats; None: failed or not timed
    forward_backward: dict[str, float] | None = None
    decision: Decision | None = None  # None: a baseline
    passed: bool | None = None  # None: computes another function
    verdict: str = "other function"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one demo, as written to demo.json."""

    facts: dict[str, Any]
    device: str
    dtype: str
    bound: float  # of the mean absolute error of o and lse
    checked_rows: int  # of each sequence, compared with the oracle
    torch: str
    threads: int
    decision: Decision
    rows: tuple[Row, ...]
    refused: dict[str, str]
    passed: bool
    model: demo_model.Compared | str | None = None  # the demo's second part, or why it did not run; None: before it


class Problem(NamedTuple):
    """q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv], the selection, and facts to print."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    facts: dict[str, Any]


class Setting(NamedTuple):
    """The problem on its device, the policy's decision, and the query rows [R] of each sequence that the oracle checks,
    ascending."""

    problem: Problem
    decision: Decision
    rows: Tensor

    @property
    def device(self) -> str:
        """Name of the device."""
        device = self.decision.device
        return f"CPU ({torch.get_num_threads()} threads)" if device.kind == "cpu" else device.name


def prepare() -> Setting:
    """Load the problem: on the first CUDA device in bfloat16, as a batch of `COPIES_ON_GPU`, or on the CPU in float32.

    Raises:
        BackendError: no backend can run it.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    q, k, v, selection, facts = read_trace(TRACE) if TRACE.is_file() else synthetic_problem()
    if device.type == "cuda":
        ranges = selection.ranges.repeat(COPIES_ON_GPU, 1, 1, 1, 1)
        q, k, v = (x.repeat(COPIES_ON_GPU, *[1] * (x.dim() - 1)) for x in (q, k, v))
        selection, facts = Selection(ranges, selection.block_size, selection.max_length), {**facts, "copies": COPIES_ON_GPU}
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    q, k, v, selection = *(x.to(device, dtype) for x in (q, k, v)), selection.to(device)
    decision = decide(request_of(q, k, v, selection, True), device_info(device))
    S, count = q.shape[1], max(1, CHECKED_ROWS // q.shape[0])
    rows = torch.arange(S)
    if count < S:  # the first, the last and random rows, the same in every run
        between = 1 + torch.randperm(S - 2, generator=torch.Generator().manual_seed(0))[: max(0, count - 2)]
        rows = torch.cat([torch.tensor([0, S - 1]), between]).sort().values
    return Setting(Problem(q, k, v, selection, facts), decision, rows)


def read_trace(path: Path) -> Problem:
    """Read q, k and v of a model, the blocks that it selects, and their provenance."""
    with safetensors.safe_open(path, framework="pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["provenance"])
        q, k, v, blocks = (file.get_tensor(name) for name in ("q", "k", "v", "block_indices"))
    return Problem(q, k, v, Selection.from_blocks(blocks, facts["block_size"]), {**facts, "rounded to": _name(q.dtype)})


def synthetic_problem() -> Problem:
    """Return random q, k, v with blocks that a model selects, for an installed package, which has no trace."""
    generator, selection = torch.Generator().manual_seed(0), cases.real_selection(1, "cpu")
    S = selection.ranges.shape[1]
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((1, S, 1, 3, 64), (1, 1, S, 64), (1, 1, S, 64)))
    return Problem(q, k, v, selection, {"synthetic": True, "first": 1, "local": 2})


def run(setting: Setting, advance: Advance = lambda what, done: None) -> Result:
    """Check every backend and baseline against the oracle, then time all of them in turns.

    Args:
        setting: from `prepare`.
        advance: called with the current step and the share of the work that is done.
    """
    problem, decision, checked = setting
    q, k, v, selection, facts = problem
    do = torch.randn(*q.shape[:-1], v.shape[-1], generator=torch.Generator().manual_seed(0)).to(q)
    mask = contenders.token_mask(selection, k.shape[2])

    def by(backend: str | None) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            # A new selection has no plans yet, as in a model's next layer.
            fresh = Selection(selection.ranges, selection.block_size, selection.max_length, disjoint=True)
            return selection_attention(q, k, v, fresh, return_lse=True, backend=backend)

        return attend

    chosen = str(decision.forward) if decision.forward == decision.backward else f"{decision.forward} + {decision.backward}"
    candidates: list[tuple[Row, Attend]] = [
        (Row(name=MASKED), lambda q, k, v: (contenders.masked_sdpa(q, k, v, mask), None)),  # first: others are compared with its gradients
        (Row(name=chosen, policy_choice=True), by(None)),
        (Row(name=DENSE), lambda q, k, v: (contenders.dense_causal_sdpa(q, k, v, kernel="any"), None)),
    ]
    refused = {}
    for name in (verdict.backend for verdict in decision.verdicts if verdict.backend != chosen):
        forced = explain_request(request_of(q, k, v, selection, True), decision.device, name)
        if refusal(forced) is None:
            candidates.append((Row(name=name), by(name)))
        else:
            reasons = next(verdict.forward + verdict.backward for verdict in forced.verdicts if verdict.backend == name)
            refused[name] = " ".join(dict.fromkeys(reason.words for reason in reasons if reason.kind != "slower"))

    advance("float64 oracle", 0.0)
    position = torch.arange(k.shape[2] - q.shape[1], k.shape[2]).expand(q.shape[:2])
    few_q, few_do, ranges, position = (x.cpu()[:, checked] for x in (q, do, selection.ranges, position))
    o, lse = oracle_forward(few_q, k, v, ranges, None, position)
    exact = dict(zip(OUTPUTS, (o, lse, *oracle_backward(few_q, k, v, ranges, few_do, None, None, position)), strict=True))
    bound, masked = BOUNDS[q.device.type, _name(q.dtype)], candidates[0][0].errors
    for i, (row, attend) in enumerate(candidates):
        advance(f"checking {row.name}", 0.1 + 0.3 * i / len(candidates))
        try:
            _check(row, attend, setting, do, exact, bound, masked)
        except Exception as error:  # a kernel's exception is this row's result
            row.passed, row.verdict = False, f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    _time([(row, attend) for row, attend in candidates if not row.verdict.startswith("FAILED")], problem, do, advance)
    rows = tuple(row for row, _ in (*candidates[1:], candidates[0]))
    return Result(
        facts=facts, device=setting.device, dtype=_name(q.dtype), bound=bound, checked_rows=len(checked), torch=str(torch.__version__),
        threads=torch.get_num_threads(), decision=decision, rows=rows, refused=refused, passed=all(row.passed is not False for row in rows),
    )  # fmt: skip


def _check(
    row: Row, attend: Attend, setting: Setting, do: Tensor, exact: dict[str, Tensor], bound: float, masked: dict[str, dict[str, float]]
) -> None:  # fmt: skip
    """Run one candidate forward and backward, and fill in errors, decision and verdict.

    The gradients are those of a loss over the checked rows alone. Gradients may have twice the error of masked SDPA.
    """
    inputs, rows = tuple(x.detach().requires_grad_() for x in setting.problem[:3]), setting.rows.to(do.device)
    o, lse = attend(*inputs)
    dq, dk, dv = torch.autograd.grad(o, inputs, torch.zeros_like(do).index_copy_(1, rows, do[:, rows]))
    if row.name == DENSE:
        return
    if row.name != MASKED:  # results do not prove which backend ran, but the recorded decision does
        row.decision, wanted = events.decisions()[-1], setting.decision
        ran, names = ((x.forward, x.backward) for x in (row.decision, wanted))
        names = names if row.policy_choice else (row.name, row.name)
        if ran != names:
            raise BackendError(f"the recorded decision names {' and '.join(map(str, ran))}, not {' and '.join(map(str, names))}")
    for name, value in zip(OUTPUTS, (o[:, rows], None if lse is None else lse[:, rows], dq[:, rows], dk, dv), strict=True):
        if value is not None:
            value = value.detach().cpu().double()
            difference = torch.where(value == exact[name], 0.0, (value - exact[name]).abs())  # lse of empty rows is -inf in both
            mae = float(difference.mean())
            reference = mae if row.name == MASKED else masked.get(name, {}).get("mae", 0.0)
            allowed = max(bound, 2 * reference) if name in GRADIENTS and math.isfinite(reference) else bound
            row.errors[name] = {"mae": mae, "max": float(difference.max()), "bound": allowed}
    wrong = [f"{name} off by {e['mae']:.1e}, allowed {e['bound']:.1e}" for name, e in row.errors.items() if not e["mae"] <= e["bound"]]
    row.passed, row.verdict = not wrong, f"WRONG: mean {'; '.join(wrong)}" if wrong else "ok"


def _time(candidates: list[tuple[Row, Attend]], problem: Problem, do: Tensor, advance: Advance) -> None:
    """Time forward, and forward with backward, of every candidate: one call of each in turn, so that all see the same
    noise.

    Work that has used its share of the time stops. On a busy machine everything stops after twice the time.
    """
    inputs, device = tuple(x.detach().requires_grad_() for x in problem[:3]), problem.q.device.type
    work: list[tuple[Row, str, Callable[[], object], list[float]]] = []
    for row, attend in candidates:
        work.append((row, "forward", lambda attend=attend: attend(*inputs), []))  # type: ignore[misc]
        work.append((row, "forward_backward", lambda attend=attend: torch.autograd.grad(attend(*inputs)[0], inputs, do), []))  # type: ignore[misc]
    share, began = TIMING_SECONDS[device] / max(1, len(work)) * 1e3, time.perf_counter()
    for done in range(ROUNDS[device]):
        advance("timing", 0.4 + 0.6 * done / ROUNDS[device])
        for _, _, call, times in work:
            if sum(times) < share and time.perf_counter() - began < 2 * TIMING_SECONDS[device]:
                times.append(timing.call_times(call, 1, device)[0])
    for row, field, _, times in work:
        if times:
            spread = timing.spread(times)
            setattr(row, field, {"median": spread[0], "p20": spread[1], "p80": spread[2], "repeats": len(times)})


def introduction(setting: Setting) -> str:
    """Describe the problem and the policy's choice, before the demo runs."""
    q, k, _, selection, facts = setting.problem
    (B, S, G, h), S_kv = q.shape[:4], k.shape[2]
    ranges = f"blocks of {selection.block_size}" if selection.block_size else "ranges"
    lines = [f"NSA's selection branch: B={B}, {S} query rows, {S_kv} keys, G={G}, h={h}; a row attends to at most {selection.n} {ranges}."]
    if "model" in facts:
        shown = {"layer": "layer {}", "head": "KV head {}", "rounded to": "rounded to {} in the file"}
        lines.append(f"Model: {facts['model']}, {', '.join(words.format(facts[x]) for x, words in shown.items() if x in facts)}.")
    if facts.get("synthetic"):
        lines.append(
            "q, k and v are random numbers, because an installed package does not carry the model's. The blocks are those that"
            " SmolLM2-135M selects. In a checkout, `make demo` runs on the model's own."
        )
    if "copies" in facts:
        lines.append(f"The batch holds {B} copies: a GPU computes a single one faster than the host can launch it.")
    checked = "all" if len(setting.rows) == S else str(len(setting.rows))
    lines.append(f"Runs on {setting.device} in {_name(q.dtype)}. A float64 oracle checks {checked} of {S} rows of each sequence.")
    return "\n".join([*lines, "", "The policy's choice:", describe(setting.decision, terminal_columns()), ""])


def text(result: Result) -> str:
    """Format the results as a table, with the refusals and how to read the numbers."""
    cells, dense = [], next(row for row in result.rows if row.name == DENSE)
    for row in result.rows:
        errors = [f"{row.errors[name]['max']:.1e}" if name in row.errors else "-" for name in OUTPUTS]
        pairs = ((row.forward, dense.forward), (row.forward_backward, dense.forward_backward))
        speeds = " / ".join(f"{base['median'] / own['median']:.3g}x" if own and base else "-" for own, base in pairs)
        name = row.name + (" (policy)" if row.policy_choice else "")
        cells.append([name, _median(row.forward), _median(row.forward_backward), speeds, *errors, row.verdict])
    headers = ["backend", "fwd ms", "fwd+bwd ms", "speed vs dense", "max err o", *OUTPUTS[1:], "verdict"]
    lines = [table(headers, cells, right=range(1, len(headers) - 1), columns=terminal_columns()), ""]
    lines += [f"{name} does not run here: {why}" for name, why in result.refused.items()]
    for field in ("forward", "forward_backward"):
        timed = [(spread["median"], row.name) for row in result.rows if row.passed and (spread := getattr(row, field))]
        if timed:
            lines.append(f"Fastest {field.replace('_', ' + ')}: {min(timed)[1]}, {min(timed)[0]:.3g} ms.")
    lines.append(f"{DENSE} computes another function: every row attends to all keys up to its position.")
    lines.append("Times are medians. Each call has a new selection, whose plans are part of the time. On a GPU the L2 cache is flushed.")
    lines.append(f"Bounds of the mean error: {result.bound:g} for o and lse; for gradients that, or twice the error of {MASKED}.")
    wrong = [row.name for row in result.rows if row.passed is False]
    lines.append(f"WRONG: {', '.join(wrong)}." if wrong else "Every result agrees with the oracle.")
    if result.model is not None:
        lines += ["", result.model if isinstance(result.model, str) else demo_model.text(result.model)]
    return "\n".join(lines)


def draw(problem: Problem, result: Result, path: Path) -> None:
    """Write a PNG: the key blocks that the first KV head selects, and the time of each backend."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 7), layout="constrained")
    start, end = (bound[0, :, 0, :, None] for bound in problem.selection.ranges.cpu().unbind(-1))  # [S, n, 1]
    S_kv, size = problem.k.shape[2], problem.selection.block_size or 1
    first_key = torch.arange(0, S_kv, size)
    selected = torch.zeros(len(start), len(first_key), dtype=torch.bool)
    for i in range(start.shape[1]):  # one range at a time: [S, n, blocks] would be large
        selected |= (start[:, i] < first_key + size) & (end[:, i] > first_key) & (end[:, i] > start[:, i])
    left.imshow(selected.numpy(), cmap="Blues", aspect="auto", interpolation="nearest", extent=(0, S_kv, len(start), 0))
    left.set(xlabel=f"key position, in blocks of {size}", ylabel="query row", title="key blocks that a row of KV head 0 selects")
    rows = [row for row in result.rows if row.forward is not None]
    for field, offset in (("forward", -0.2), ("forward_backward", 0.2)):
        spreads = [getattr(row, field) or dict.fromkeys(("median", "p20", "p80"), 0.0) for row in rows]
        whiskers = [[s["median"] - s["p20"] for s in spreads], [s["p80"] - s["median"] for s in spreads]]
        bars = right.barh(
            [i + offset for i in range(len(rows))], [s["median"] for s in spreads], 0.38, xerr=whiskers, label=field.replace("_", " + ")
        )
        right.bar_label(bars, [f"{_median(s)} ms" for s in spreads], padding=3)
    right.set_xscale("log")
    right.set_xlim(right=2 * right.get_xlim()[1])  # room for the label of the longest bar
    right.set_yticks(range(len(rows)), [row.name + ("\n(policy)" if row.policy_choice else "") for row in rows])
    right.invert_yaxis()
    right.set(xlabel="milliseconds per call: median, 20% and 80% quantiles", title=f"{result.device}, {result.dtype}")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _median(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.3g}" if spread["median"] < 999.5 else f"{spread['median']:.0f}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
