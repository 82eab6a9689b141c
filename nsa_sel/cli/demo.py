"""`nsa-sel demo`: attention of a language model on every backend that runs here, checked against float64, timed and
drawn."""

from __future__ import annotations

import json
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
from nsa_sel.bench.core import cases, contenders, session, timing
from nsa_sel.bench.core.contenders import Attend, Problem
from nsa_sel.bench.core.store import first_line
from nsa_sel.bench.core.timing import WrongResult
from nsa_sel.cli import demo_model
from nsa_sel.cli.output import terminal_columns
from nsa_sel.core.call import DTYPES, device_info, request_of
from nsa_sel.core.decide import decide, explain_request
from nsa_sel.core.decision import Decision, refusal
from nsa_sel.errors import BackendError
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events
from nsa_sel.telemetry.describe import describe, table

matplotlib.use("Agg")  # needs no display

from matplotlib import pyplot

MASKED = "masked SDPA"
DENSE = "dense causal SDPA"
BOUNDS = {"float32": {"cpu": 1e-6, "cuda": 1e-4}, "bfloat16": {"cuda": 1e-3}}  # largest allowed mean absolute error of o
CHECKED_ROWS = 1024  # maximum: the float64 oracle is a plain loop and takes milliseconds per row
TRACE = Path(str(resources.files("nsa_sel"))) / "bench" / "data" / "smollm2_trace.safetensors"  # in a checkout
COPIES = {"cpu": 1, "cuda": 16}  # batch size: a GPU computes a single copy faster than the host can launch it
ROUNDS = {"cpu": 9, "cuda": 51}
TIMING_SECONDS = {"cpu": 12.0, "cuda": 25.0}  # in equal shares; each kind of work runs at least once within twice that time

Advance = Callable[[str, float], None]


class Row(msgspec.Struct, kw_only=True):
    """The result of one backend or baseline."""

    name: str
    policy_choice: bool = False
    errors: dict[str, float] = {}  # mean absolute errors: of o, and the largest of dq, dk and dv
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
    bound: float  # largest allowed mean absolute error of o
    checked_rows: int  # of each sequence, compared with the oracle
    torch: str
    threads: int
    decision: Decision
    rows: tuple[Row, ...]
    refused: dict[str, str]
    passed: bool
    model: demo_model.Compared | str | None = None  # the demo's second part, or why it did not run; None: before it


class Setting(NamedTuple):
    """The problem on its device, facts to print, the policy's decision, and the query rows of a sequence that are checked."""

    problem: Problem
    facts: dict[str, Any]
    decision: Decision
    checked_rows: int


def prepare() -> Setting:
    """Load the problem: on the first CUDA device in bfloat16, as a batch of copies, or on the CPU in float32.

    Raises:
        BackendError: no backend can run it.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype, copies = torch.float32 if device.type == "cpu" else torch.bfloat16, COPIES[device.type]
    *tensors, selection, facts = read_trace(TRACE) if TRACE.is_file() else synthetic_problem()
    q, k, v = (x.to(device, dtype).repeat(copies, *[1] * (x.dim() - 1)) for x in tensors)
    ranges = selection.ranges.to(device).repeat(copies, 1, 1, 1, 1)
    do = torch.randn(*q.shape[:-1], v.shape[-1], generator=torch.Generator().manual_seed(0)).to(q)
    problem = Problem(Selection(ranges, selection.block_size, selection.max_length), q, k, v, do)
    decision = decide(request_of(q, k, v, problem.selection, True), device_info(device))
    return Setting(problem, facts, decision, min(q.shape[1], max(1, CHECKED_ROWS // copies)))


def read_trace(path: Path) -> tuple[Tensor, Tensor, Tensor, Selection, dict[str, Any]]:
    """Read q [B,S,G,h,D], k and v [B,G,S_kv,D] of a model, the blocks that it selects, and their provenance."""
    with safetensors.safe_open(path, framework="pt") as file:
        facts: dict[str, Any] = json.loads(file.metadata()["provenance"])
        q, k, v, blocks = (file.get_tensor(name) for name in ("q", "k", "v", "block_indices"))
    return q, k, v, Selection.from_blocks(blocks, facts["block_size"]), facts


def synthetic_problem() -> tuple[Tensor, Tensor, Tensor, Selection, dict[str, Any]]:
    """Return random q, k, v with blocks that a model selects, for an installed package, which has no trace."""
    generator, selection = torch.Generator().manual_seed(0), cases.real_selection(1, "cpu")
    S = selection.ranges.shape[1]
    q, k, v = (torch.randn(shape, generator=generator) for shape in ((1, S, 1, 3, 64), (1, 1, S, 64), (1, 1, S, 64)))
    return q, k, v, selection, {"synthetic": True}


def run(setting: Setting, advance: Advance = lambda what, done: None) -> Result:
    """Check every backend and baseline against the oracle, then time all of them in turns.

    Args:
        setting: from `prepare`.
        advance: called with the current step and the share of the work that is done.
    """
    problem, facts, decision, checked = setting
    selection, q, k, v, _ = problem
    mask = contenders.token_mask(selection, k.shape[2])

    def by(backend: str | None) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # A new selection has no plans yet, as in a model's next layer.
            fresh = Selection(selection.ranges, selection.block_size, selection.max_length, disjoint=True)
            return selection_attention(q, k, v, fresh, backend=backend)

        return attend

    chosen = str(decision.forward) if decision.forward == decision.backward else f"{decision.forward} + {decision.backward}"
    candidates: list[tuple[Row, Attend]] = [
        (Row(name=MASKED), lambda q, k, v: contenders.masked_sdpa(q, k, v, *mask)),  # first: others are compared with its gradients
        (Row(name=chosen, policy_choice=True), by(None)),
        (Row(name=DENSE), lambda q, k, v: contenders.dense_causal_sdpa(q, k, v, kernel="any")),
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
    (B, S, G, h, Dk), dtype = q.shape, DTYPES[q.dtype]
    case = cases.Case("demo", "real", B, S, k.shape[2], G, h, Dk, v.shape[3], selection.n, selection.block_size or 0, dtype)
    exact, bound = session.sample(case, problem, checked), BOUNDS[dtype][q.device.type]
    for i, (row, attend) in enumerate(candidates):
        advance(f"checking {row.name}", 0.1 + 0.3 * i / len(candidates))
        try:
            if row.name != DENSE:
                _check(row, attend, setting, exact, bound, candidates[0][0].errors)
        except Exception as error:  # a kernel's exception is this row's result
            row.passed, row.verdict = False, f"WRONG: {error}" if isinstance(error, WrongResult) else f"FAILED: {first_line(error)}"
    _time([(row, attend) for row, attend in candidates if not row.verdict.startswith("FAILED")], problem, advance)
    rows = tuple(row for row, _ in (*candidates[1:], candidates[0]))
    device = f"CPU ({torch.get_num_threads()} threads)" if q.is_cpu else decision.device.name
    return Result(
        facts=facts, device=device, dtype=dtype, bound=bound, checked_rows=checked, torch=str(torch.__version__),
        threads=torch.get_num_threads(), decision=decision, rows=rows, refused=refused, passed=all(row.passed is not False for row in rows),
    )  # fmt: skip


def _check(row: Row, attend: Attend, setting: Setting, exact: session.Sample, bound: float, masked: dict[str, float]) -> None:
    """Run one candidate forward and backward, and fill in errors, decision and verdict. Gradients may have twice the error
    of masked SDPA.

    Raises:
        WrongResult: errors beyond the bounds, or values that were not written.
        BackendError: another backend ran.
    """
    mae, of_gradients = session.parity(attend, setting.problem, exact, strict=row.name != MASKED)
    row.errors = {"o": mae, "gradients": of_gradients or 0.0}
    if row.name != MASKED:  # results do not prove which backend ran, but the recorded decision does
        row.decision, wanted = events.decisions()[-1], setting.decision
        ran, names = ((x.forward, x.backward) for x in (row.decision, wanted))
        names = names if row.policy_choice else (row.name, row.name)
        if ran != names:
            raise BackendError(f"the recorded decision names {' and '.join(map(str, ran))}, not {' and '.join(map(str, names))}")
    bounds = {"o": bound, "gradients": max(bound, 2 * masked.get("gradients", 0.0))}
    if wrong := [f"{name} off by {row.errors[name]:.1e}, allowed {bounds[name]:.1e}" for name in bounds if row.errors[name] > bounds[name]]:
        raise WrongResult(f"in the mean {'; '.join(wrong)}")
    row.passed, row.verdict = True, "ok"


def _time(candidates: list[tuple[Row, Attend]], problem: Problem, advance: Advance) -> None:
    """Time forward, and forward with backward, of every candidate: one call of each in turn, so that all see the same
    noise.

    Work that has used its share of the time stops. On a busy machine everything stops after twice the time.
    """
    inputs, device = tuple(x.detach().requires_grad_() for x in problem[1:4]), problem.q.device.type
    work: list[tuple[Row, str, Callable[[], object], list[float]]] = []
    for row, attend in candidates:
        work.append((row, "forward", lambda attend=attend: attend(*inputs), []))  # type: ignore[misc]
        work.append((row, "forward_backward", lambda attend=attend: torch.autograd.grad(attend(*inputs), inputs, problem.do), []))  # type: ignore[misc]
    share, began = TIMING_SECONDS[device] / max(1, len(work)) * 1e3, time.perf_counter()
    for done in range(ROUNDS[device]):
        advance("timing", 0.4 + 0.6 * done / ROUNDS[device])
        for _, _, call, times in work:
            if sum(times) < share and time.perf_counter() - began < 2 * TIMING_SECONDS[device]:
                times.append(timing.call_times(call, 1, device)[0])
    for row, field, _, times in work:
        if times:
            spread = timing.spread(times)
            setattr(row, field, {"median": spread.median, "p20": spread.p20, "p80": spread.p80, "repeats": len(times)})


def introduction(setting: Setting) -> str:
    """Describe the problem and the policy's choice, before the demo runs."""
    (selection, q, k, _, _), facts = setting.problem, setting.facts
    (B, S, G, h), S_kv, device = q.shape[:4], k.shape[2], setting.decision.device
    origin = (
        f"Model: {facts['model']}, layer {facts['layer']}; q, k and v are rounded to 8 bits."
        if "model" in facts
        else "q, k and v are random numbers, because an installed package does not carry the model's. The blocks are those that"
        " SmolLM2-135M selects. In a checkout, `make demo` runs on the model's own."
    )
    return "\n".join((
        f"NSA's selection branch: B={B}, {S} query rows, {S_kv} keys, G={G}, h={h}; a row attends to at most {selection.n} blocks of"
        f" {selection.block_size}.", origin,
        f"Runs on {device.name} in {DTYPES[q.dtype]}. A float64 oracle checks {setting.checked_rows} of {S} rows of a sequence.",
        "", "The policy's choice:", describe(setting.decision, terminal_columns()), "",
    ))  # fmt: skip


def text(result: Result) -> str:
    """Format the results as a table, with the refusals and how to read the numbers."""
    cells, dense = [], next(row for row in result.rows if row.name == DENSE)
    for row in result.rows:
        pairs = ((row.forward, dense.forward), (row.forward_backward, dense.forward_backward))
        speeds = " / ".join(f"{base['median'] / own['median']:.3g}x" if own and base else "-" for own, base in pairs)
        errors = [f"{row.errors[name]:.1e}" if name in row.errors else "-" for name in ("o", "gradients")]
        cells.append(
            [row.name + " (policy)" * row.policy_choice, _median(row.forward), _median(row.forward_backward), speeds, *errors, row.verdict]
        )
    headers = ["backend", "fwd ms", "fwd+bwd ms", "speed vs dense", "mean err o", "gradients", "verdict"]
    lines = [table(headers, cells, right=range(1, len(headers) - 1), columns=terminal_columns()), ""]
    lines += [f"{name} does not run here: {why}" for name, why in result.refused.items()]
    lines.append(f"{DENSE} computes another function: every row attends to all keys up to its position.")
    lines.append("Times are medians. Each call has a new selection, whose plans are part of the time. On a GPU the L2 cache is flushed.")
    lines.append(f"Bounds of the mean error: {result.bound:g} for o; for gradients that, or twice the error of {MASKED}.")
    wrong = [row.name for row in result.rows if row.passed is False]
    lines.append(f"WRONG: {', '.join(wrong)}." if wrong else "Every result agrees with the oracle.")
    if result.model is not None:
        lines += ["", result.model if isinstance(result.model, str) else demo_model.text(result.model)]
    return "\n".join(lines)


def draw(problem: Problem, result: Result, path: Path) -> None:
    """Write a PNG: the key blocks that the first KV head selects, and the time of each backend."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(15, 7), layout="constrained")
    S_kv, size = problem.k.shape[2], problem.selection.block_size or 1
    selected = contenders.selected(problem.selection, torch.arange(0, S_kv, size, device=problem.k.device))[0, :, 0].cpu()  # [S,blocks]
    left.imshow(selected.numpy(), cmap="Blues", aspect="auto", interpolation="nearest", extent=(0, S_kv, len(selected), 0))
    left.set(xlabel=f"key position, in blocks of {size}", ylabel="query row", title="key blocks that a row of KV head 0 selects")
    rows = [row for row in result.rows if row.forward and row.forward_backward]
    for field, offset in (("forward", -0.2), ("forward_backward", 0.2)):
        spreads = [getattr(row, field) for row in rows]
        whiskers = [[s["median"] - s["p20"] for s in spreads], [s["p80"] - s["median"] for s in spreads]]
        bars = right.barh(
            [i + offset for i in range(len(rows))], [s["median"] for s in spreads], 0.38, xerr=whiskers, label=field.replace("_", " + ")
        )
        right.bar_label(bars, [f"{_median(s)} ms" for s in spreads], padding=3)
    right.set_xscale("log")
    right.set_xlim(right=2 * right.get_xlim()[1])  # room for the label of the longest bar
    right.set_yticks(range(len(rows)), [row.name + "\n(policy)" * row.policy_choice for row in rows])
    right.invert_yaxis()
    right.set(xlabel="milliseconds per call: median, 20% and 80% quantiles", title=f"{result.device}, {result.dtype}")
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _median(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.3g}" if spread["median"] < 999.5 else f"{spread['median']:.0f}"
