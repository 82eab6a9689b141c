"""The demo: attention of a real language model on every backend that runs here, checked against float64 and timed."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from tabulate import tabulate
from torch import Tensor

from nsa_sel.attention import selection_attention
from nsa_sel.bench.core.baselines import dense_causal_sdpa, masked_sdpa, token_mask
from nsa_sel.cli.tensor_file import Problem, read_problem
from nsa_sel.core.backend import REFUSING_KINDS
from nsa_sel.core.call import device_info, request_of
from nsa_sel.core.check import check_call
from nsa_sel.core.decide import decide, explain_request
from nsa_sel.core.decision import Decision
from nsa_sel.core.explain import refusal
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events
from nsa_sel.telemetry.describe import describe

PACKED = "sdpa-packed"
MASKED = "masked SDPA"
DENSE = "dense causal SDPA"
GRADIENTS = ("dq", "dk", "dv")
FIGURES = ("o", "lse", *GRADIENTS)
# Largest mean absolute error of o and lse, by device kind and dtype.
BOUNDS = {
    ("cpu", "float32"): 1e-6,
    ("cuda", "float32"): 1e-4,
    ("cuda", "float16"): 1e-3,
    ("cuda", "bfloat16"): 1e-3,
}
CHECKED_ROWS = 1024  # of all, at most: the oracle is written to be read, and takes milliseconds a row
COPIES_ON_GPU = 16  # of the shipped text, as a batch: of a single one a GPU would mostly wait for the host
ROUNDS = {"cpu": 9, "cuda": 51}
TIMING_SECONDS = {"cpu": 12.0, "cuda": 25.0}  # of all timings, in equal shares; each kind of work has one turn, unless twice that is up

Advance = Callable[[str, float], None]


class Spread(msgspec.Struct, frozen=True):
    """Times of one kind of work in milliseconds."""

    median: float
    p20: float
    p80: float
    repeats: int


class Error(msgspec.Struct, frozen=True):
    """Mean and largest absolute difference from the float64 oracle, and the bound that the mean has to keep."""

    mae: float
    max: float
    bound: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one backend or baseline did. `forward` and `forward_backward` are None where it can't, or failed."""

    name: str
    baseline: bool
    policy_choice: bool
    forward: Spread | None
    forward_backward: Spread | None
    errors: dict[str, Error]
    decision: Decision | None
    passed: bool | None  # None: computes another function, nothing to check
    verdict: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one demo; demo.json is this."""

    facts: dict[str, Any]
    device: str
    dtype: str
    bound: float  # of the mean absolute error of o and lse
    checked_rows: int  # of each sequence, against the oracle
    torch: str
    threads: int
    decision: Decision
    rows: tuple[Row, ...]
    refused: dict[str, str]
    passed: bool


class Setting(NamedTuple):
    """The problem where and how it will be computed, and what the policy chooses for training and for inference."""

    problem: Problem
    decision: Decision
    inference: Decision
    rows: Tensor  # [rows] the query rows of each sequence that the oracle checks, ascending, on the CPU


class Candidate(NamedTuple):
    """One way to compute the problem, and the backends that its recorded decisions must name: inference, forward, backward."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
    names: tuple[str | None, str | None, str | None] | None = None
    policy_choice: bool = False
    gradients: bool = True
    checked: bool = True


class _Outcome(NamedTuple):
    differences: dict[str, tuple[float, float]]  # mean and largest absolute difference by figure
    decision: Decision | None = None
    failure: str = ""


def prepare(trace: Path | None = None) -> Setting:
    """Read the trace (by default the shipped one) onto the first CUDA device in its own dtype, bfloat16 for 8-bit numbers, or onto the
    CPU in float32. On a GPU the shipped text stands `COPIES_ON_GPU` times in a batch.

    Raises ArgumentError for a file that does not hold a problem, BackendError when no backend may run it.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    with resources.as_file(resources.files("nsa_sel") / "bench" / "data" / "smollm2_trace.safetensors") as shipped:
        problem = read_problem(shipped if trace is None else trace)
    if trace is None and cuda:
        problem = _copied(problem, COPIES_ON_GPU)
    if problem.q.dtype.itemsize == 1:
        problem.facts["rounded to"] = _name(problem.q.dtype)
    problem = problem.to(device, _dtype(problem.q) if cuda else torch.float32)
    q, k, v, selection, _, q_pos = check_call(*problem[:4], None, problem.q_pos)
    problem = Problem(q, k, v, selection, q_pos, problem.facts)
    if (device.type, _name(q.dtype)) not in BOUNDS:
        raise ArgumentError("q", f"of dtype {q.dtype}", "float16, bfloat16 or float32", "save the trace in one of these")
    training, inference = (decide(_request(problem, grad), device_info(device)) for grad in (True, False))
    return Setting(problem, training, inference, _sample(q.shape[1], max(1, CHECKED_ROWS // q.shape[0])))


def _dtype(q: Tensor) -> torch.dtype:
    """What a GPU computes the trace in."""
    return torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype


def _copied(problem: Problem, copies: int) -> Problem:
    """The same sequences several times, as one batch."""
    q, k, v, old = (problem.q, problem.k, problem.v, problem.selection)
    ranges = old.ranges.repeat(copies, 1, 1, 1, 1)
    q, k, v = (tensor.repeat(copies, *[1] * (tensor.dim() - 1)) for tensor in (q, k, v))
    return Problem(q, k, v, Selection(ranges, old.block_size, old.max_length), problem.q_pos, {**problem.facts, "copies": copies})


def _sample(S: int, count: int) -> Tensor:
    """Rows for the oracle: `count` of S, the first and the last among them, the same ones in every run."""
    if count >= S:
        return torch.arange(S)
    between = 1 + torch.randperm(S - 2, generator=torch.Generator().manual_seed(0))[: max(0, count - 2)]
    return torch.cat([torch.tensor([0, S - 1]), between]).sort().values


def introduction(setting: Setting) -> str:
    """What is going to be computed, from which model and text, and the policy's decision with its reasons."""
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
    if "copies" in facts:
        lines.append(f"The text stands {B} times in one batch: a single copy would take a GPU less time than the host takes to call it.")
    if "text" in facts:
        lines.append(f"Text: {facts['text']} (its first {S_kv} tokens).")
    if "first" in facts and "local" in facts:
        top = selection.n - int(facts["first"]) - int(facts["local"])
        lines.append(f"Blocks of a row: {facts['first']} first, {facts['local']} local, {top} by score (NSA Eq. 7-12).")
    where = f"{_device_name(setting.decision.device)} in {_name(q.dtype)}"
    lines.append(f"Computed on {where}, forward and backward; every result is compared with a float64 oracle on {_of_rows(setting)}.")
    return "\n".join([*lines, "", "The policy's choice:", describe(setting.decision), ""])


def _of_rows(setting: Setting) -> str:
    rows, S = len(setting.rows), setting.problem.q.shape[1]
    return "all rows" if rows == S else f"{rows} of {S} rows" + (" of each copy" if "copies" in setting.problem.facts else "")


def run(setting: Setting, advance: Advance = lambda what, done: None) -> Result:
    """Check every candidate against the oracle, then time all of them in turns. `advance(what, share done)` follows the work."""
    problem = setting.problem
    q, v, facts = problem.q, problem.v, problem.facts
    generator = torch.Generator().manual_seed(0)
    do = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q)
    candidates, refused = _candidates(setting)

    advance("float64 oracle", 0.0)
    exact = _exact(setting, do)
    outcomes = {}
    for i, candidate in enumerate(candidates):
        advance(f"checking {candidate.name}", 0.1 + 0.3 * i / len(candidates))
        outcomes[candidate.name] = _check(candidate, setting, do, exact)
    sound = [candidate for candidate in candidates if not outcomes[candidate.name].failure]
    times = _time(sound, problem, do, advance)

    bound = BOUNDS[q.device.type, _name(q.dtype)]
    rows = tuple(_row(candidate, outcomes[candidate.name], times, bound, outcomes[MASKED]) for candidate in candidates)
    return Result(
        facts=facts, device=_device_name(setting.decision.device), dtype=_name(q.dtype), bound=bound,
        checked_rows=len(setting.rows), torch=str(torch.__version__), threads=torch.get_num_threads(), decision=setting.decision,
        rows=rows, refused=refused,
        passed=all(row.passed is not False for row in rows),
    )  # fmt: skip


def text(result: Result) -> str:
    """The table of results, who refused and why, and who is fastest."""
    table = []
    for row in result.rows:
        ratios = [times_of_dense(result.rows, row, field) for field in ("forward", "forward_backward")]
        errors = [f"{row.errors[name].max:.1e}" if name in row.errors else "-" for name in FIGURES]
        name = row.name + (" (policy)" if row.policy_choice else "")
        table.append([name, milliseconds(row.forward), milliseconds(row.forward_backward), " / ".join(ratios), *errors, row.verdict])
    headers = ["backend", "fwd ms", "fwd+bwd ms", "speed vs dense", "max err o", *FIGURES[1:], "verdict"]
    align = ["left", *["right"] * (len(headers) - 2), "left"]
    lines = [tabulate(table, headers=headers, tablefmt="simple", colalign=align, disable_numparse=True), ""]
    lines += [f"{name} does not run here: {why}" for name, why in result.refused.items()]
    shaky = [row.name for row in result.rows if any(_shaky(spread) for spread in (row.forward, row.forward_backward))]
    if shaky:
        lines.append(f"Times of {', '.join(shaky)} are few (slow calls are) or scatter widely: read the ratios with care.")
    untimed = [row.name for row in result.rows if row.passed is not False and row.forward_backward is None]
    if untimed:
        lines.append(f"Not timed, or not with backward: {', '.join(untimed)}; it has no backward, or the time was up.")
    lines += [_fastest(result.rows, "forward", "forward"), _fastest(result.rows, "forward_backward", "forward + backward")]
    lines.append(f"{DENSE} computes something else: every row attends to all keys up to its position. It is what selection saves.")
    lines.append(
        "Times are medians of calls that take turns. Each starts from a new selection, so plans are built in the time; masks are not."
    )
    if result.decision.device.kind == "cuda":
        lines.append("They are of whole calls, from the host's side on.")
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
    """The speed of a row as a multiple of dense attention's, "forward" or "forward_backward"; a dash where one of them was not timed."""
    dense = next((getattr(other, field) for other in rows if other.name == DENSE), None)
    spread = getattr(row, field)
    return f"{dense.median / spread.median:.3g}x" if dense and spread else "-"


def _request(problem: Problem, needs_grad: bool) -> Request:
    return request_of(problem.q, problem.k, problem.v, problem.selection, needs_grad)


def _candidates(setting: Setting) -> tuple[list[Candidate], dict[str, str]]:
    """The policy's choice, every other backend that can be forced, and the baselines; and why the others refuse."""
    problem, decision = setting.problem, setting.decision
    chosen = (setting.inference.forward, decision.forward, decision.backward)
    one = chosen[0] if len(set(chosen)) == 1 else None
    own = one or f"{chosen[0]}, training {chosen[1]} + {chosen[2]}"
    candidates, refused = [Candidate(own, _selected(problem, None), chosen, policy_choice=True)], {}
    candidates.append(Candidate(DENSE, lambda q, k, v: (dense_causal_sdpa(q, k, v, kernel="any"), None), checked=False))
    for name in (verdict.backend for verdict in decision.verdicts if verdict.backend != one):
        training, inference = (explain_request(_request(problem, grad), decision.device, name) for grad in (True, False))
        if refusal(inference) is not None:
            reasons = next(v.forward for v in inference.verdicts if v.backend == name)
            refused[name] = "; ".join(f"{r.field} is {r.actual}, required {r.required}" for r in reasons if r.kind in REFUSING_KINDS)
            continue
        gradients = refusal(training) is None
        names = (name, name, name) if gradients else (name, None, None)
        candidates.append(Candidate(name, _selected(problem, name), names, gradients=gradients))
    mask = token_mask(problem.selection, problem.k.shape[2], problem.q_pos)  # once: it takes longer than the attention
    candidates.append(Candidate(MASKED, lambda q, k, v: (masked_sdpa(q, k, v, mask), None)))
    return candidates, refused


def _selected(problem: Problem, backend: str | None) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    old = problem.selection

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        selection = Selection(
            old.ranges, old.block_size, old.max_length, disjoint=True
        )  # a new one has no plans yet, as in a model's next layer
        o, lse = selection_attention(q, k, v, selection, q_pos=problem.q_pos, return_lse=True, backend=backend)
        return o, lse

    return run


def _exact(setting: Setting, do: Tensor) -> dict[str, Tensor]:
    """What the oracle says of the setting's rows: o, lse and dq of these, dk and dv as if the others had no part in the loss."""
    q, k, v, selection, q_pos, _ = setting.problem
    rows, S_kv = setting.rows, k.shape[2]
    position = torch.arange(S_kv - q.shape[1], S_kv).expand(q.shape[:2]) if q_pos is None else q_pos.cpu()
    few_q, few_do, ranges, position = (x.cpu()[:, rows] for x in (q, do, selection.ranges, position))
    forward = oracle_forward(few_q, k, v, ranges, None, position)
    gradients = oracle_backward(few_q, k, v, ranges, few_do, None, None, position)
    return dict(zip(FIGURES, (*forward, *gradients), strict=True))


def _check(candidate: Candidate, setting: Setting, do: Tensor, exact: dict[str, Tensor]) -> _Outcome:
    """One inference and one training call on all rows: the decisions name the right backends, and how far the results are from the
    oracle's rows. Gradients are of a loss in which these rows alone count; without them there is but the inference."""
    inputs = tuple(tensor.detach().requires_grad_(candidate.gradients) for tensor in setting.problem[:3])
    rows = setting.rows.to(do.device)
    of_rows = torch.zeros_like(do).index_copy_(1, rows, do[:, rows])
    decision = None
    try:
        with torch.no_grad():
            o, lse = candidate.run(*inputs)
        if candidate.names is not None:
            _expect(candidate.names[0], events.decisions()[-1].forward)
        got = {"o": o[:, rows]} if lse is None else {"o": o[:, rows], "lse": lse[:, rows]}
        if candidate.gradients:
            o, lse = candidate.run(*inputs)
            got |= {"o": o[:, rows]} if lse is None else {"o": o[:, rows], "lse": lse[:, rows]}
            dq, dk, dv = torch.autograd.grad(o, inputs, of_rows)
            got |= {"dq": dq[:, rows], "dk": dk, "dv": dv}
        if candidate.names is not None:
            decision = events.decisions()[-1]
            if candidate.gradients:
                _expect(candidate.names[1], decision.forward)
                _expect(candidate.names[2], decision.backward)
    except Exception as error:  # whatever a kernel throws is this row's result; the others are still worth seeing
        return _Outcome({}, decision, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    return _Outcome({name: _difference(got[name], exact[name]) for name in got} if candidate.checked else {}, decision)


def _expect(wanted: str | None, recorded: str | None) -> None:
    if wanted != recorded:
        raise BackendError(f"the recorded decision names {recorded}, not {wanted}")


def _difference(got: Tensor, exact: Tensor) -> tuple[float, float]:
    got = got.detach().cpu().double()
    difference = torch.where(got == exact, 0.0, (got - exact).abs())  # equal first: lse of an empty row is -inf in both
    return float(difference.mean()), float(difference.max())


def _time(candidates: list[Candidate], problem: Problem, do: Tensor, advance: Advance) -> dict[tuple[str, str], Spread]:
    """Times by candidate and kind of work, "forward" or "forward_backward"; one call of each in turns, so that all see the same noise.

    What has used up its share of the time takes no further turns; on a machine so busy that twice the time is up, nothing does.
    """
    inputs = tuple(tensor.detach().requires_grad_() for tensor in problem[:3])
    work: dict[tuple[str, str], Callable[[], object]] = {}
    for candidate in candidates:
        work[candidate.name, "forward"] = functools.partial(_forward, candidate, inputs)
        if candidate.gradients:
            work[candidate.name, "forward_backward"] = functools.partial(_forward_backward, candidate, inputs, do)
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    device = problem.q.device.type
    share, began = TIMING_SECONDS[device] / max(1, len(work)) * 1e3, time.perf_counter()
    for done in range(ROUNDS[device]):
        advance("timing", 0.4 + 0.6 * done / ROUNDS[device])
        for key, call in work.items():
            if sum(samples[key]) < share and time.perf_counter() - began < 2 * TIMING_SECONDS[device]:
                samples[key].append(_time_once(call, device))
    return {key: _spread(values) for key, values in samples.items() if values}


@torch.no_grad()
def _forward(candidate: Candidate, inputs: tuple[Tensor, ...]) -> None:
    candidate.run(*inputs)


def _forward_backward(candidate: Candidate, inputs: tuple[Tensor, ...], do: Tensor) -> None:
    torch.autograd.grad(candidate.run(*inputs)[0], inputs, do)


def _time_once(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def _spread(samples: list[float]) -> Spread:
    p20, median, p80 = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return Spread(median, p20, p80, len(samples))


def _row(candidate: Candidate, outcome: _Outcome, times: dict[tuple[str, str], Spread], bound: float, masked: _Outcome) -> Row:
    errors = {}
    for name, (mae, largest) in outcome.differences.items():
        # Gradients have no bound of their own: twice what torch's dense kernels reach in the same precision is fair.
        twice = 2 * masked.differences[name][0] if name in GRADIENTS and name in masked.differences else 0.0
        errors[name] = Error(mae, largest, max(bound, twice) if math.isfinite(twice) else bound)
    wrong = [f"{name} off by {error.mae:.1e}, allowed {error.bound:.1e}" for name, error in errors.items() if not error.mae <= error.bound]
    if outcome.failure:
        verdict, passed = f"FAILED: {outcome.failure}", False
    elif not candidate.checked:
        verdict, passed = "other function", None
    else:
        verdict, passed = (f"WRONG: mean {'; '.join(wrong)}", False) if wrong else ("ok", True)
    return Row(
        name=candidate.name, baseline=candidate.names is None, policy_choice=candidate.policy_choice,
        forward=times.get((candidate.name, "forward")), forward_backward=times.get((candidate.name, "forward_backward")),
        errors=errors, decision=outcome.decision, passed=passed, verdict=verdict,
    )  # fmt: skip


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: DeviceInfo) -> str:
    return f"CPU ({torch.get_num_threads()} threads)" if device.kind == "cpu" else device.name
