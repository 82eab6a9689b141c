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

from nsa_sel import observe
from nsa_sel.attention import decide, explain_request, selection_attention
from nsa_sel.bench.baselines import dense_causal_sdpa, masked_sdpa, token_mask
from nsa_sel.call import check_call, device_info, request_of
from nsa_sel.decision import REFUSING_KINDS, Decision
from nsa_sel.dispatch import refusal
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.request import DeviceInfo, Request
from nsa_sel.selection import Selection
from nsa_sel.show import describe
from nsa_sel.tensor_file import Problem, read_problem

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
ROUNDS = {"cpu": 11, "cuda": 51}
TIMING_SECONDS = 25.0  # no new round of timings after this; one round is always finished

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
    """Read the trace (by default the shipped one) onto the first CUDA device in its own dtype, or the CPU in float32.

    Raises ArgumentError for a file that does not hold a problem, BackendError when no backend may run it.
    """
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda", 0), None) if cuda else (torch.device("cpu"), torch.float32)
    if trace is None:
        with resources.as_file(resources.files("nsa_sel") / "bench" / "data" / "smollm2_trace.safetensors") as path:
            problem = read_problem(path)
    else:
        problem = read_problem(trace)
    problem = problem.to(device, dtype)
    q, k, v, selection, _, q_pos = check_call(*problem[:4], None, problem.q_pos)
    problem = Problem(q, k, v, selection, q_pos, problem.facts)
    if (device.type, _name(q.dtype)) not in BOUNDS:
        raise ArgumentError("q", f"of dtype {q.dtype}", "float16, bfloat16 or float32", "save the trace in one of these")
    training, inference = (decide(_request(problem, grad), device_info(device)) for grad in (True, False))
    return Setting(problem, training, inference)


def introduction(setting: Setting) -> str:
    """What is going to be computed, from which model and text, and the policy's decision with its reasons."""
    q, k, v, selection, _, facts = setting.problem
    S_kv, ranges = k.shape[2], f"blocks of {selection.block_size}" if selection.block_size else "ranges"
    lines = [
        f"NSA's selection branch: {q.shape[1]} query rows x {q.shape[2]} KV heads of {q.shape[3]} query heads each;"
        f" a row attends to at most {selection.n} {ranges} of the {S_kv} keys."
    ]
    if "model" in facts:
        lines.append(f"Model: {facts['model']}, layer {facts.get('layer', '?')}, q and k after RoPE.")
    if "text" in facts:
        lines.append(f"Text: {facts['text']} (its first {S_kv} tokens).")
    if "first" in facts and "local" in facts:
        top = selection.n - int(facts["first"]) - int(facts["local"])
        lines.append(f"Blocks of a row: {facts['first']} first, {facts['local']} local, {top} by score (NSA Eq. 7-12).")
    where = f"{_device_name(setting.decision.device)} in {_name(q.dtype)}"
    lines.append(f"Computed on {where}, forward and backward; every result is compared with a float64 oracle.")
    return "\n".join([*lines, "", "The policy's choice:", describe(setting.decision), ""])


def run(setting: Setting, advance: Advance = lambda what, done: None) -> Result:
    """Check every candidate against the oracle, then time all of them in turns. `advance(what, share done)` follows the work."""
    problem = setting.problem
    q, k, v, selection, q_pos, facts = problem
    generator = torch.Generator().manual_seed(0)
    do = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q)
    candidates, refused = _candidates(setting)

    advance("float64 oracle", 0.0)
    o, lse = oracle_forward(q, k, v, selection.ranges, None, q_pos)
    exact = {"o": o, "lse": lse, **dict(zip(GRADIENTS, oracle_backward(q, k, v, selection.ranges, do, None, None, q_pos), strict=True))}
    outcomes = {}
    for i, candidate in enumerate(candidates):
        advance(f"checking {candidate.name}", 0.1 + 0.3 * i / len(candidates))
        outcomes[candidate.name] = _check(candidate, problem, do, exact)
    sound = [candidate for candidate in candidates if not outcomes[candidate.name].failure]
    times = _time(sound, problem, do, advance)

    bound = BOUNDS[q.device.type, _name(q.dtype)]
    rows = tuple(_row(candidate, outcomes[candidate.name], times, bound, outcomes[MASKED]) for candidate in candidates)
    return Result(
        facts=facts, device=_device_name(setting.decision.device), dtype=_name(q.dtype), bound=bound,
        torch=str(torch.__version__), threads=torch.get_num_threads(), decision=setting.decision, rows=rows, refused=refused,
        passed=all(row.passed is not False for row in rows),
    )  # fmt: skip


def text(result: Result) -> str:
    """The table of results, who refused and why, and who is fastest."""
    packed = next((row for row in result.rows if row.name == PACKED), None)
    table = []
    for row in result.rows:
        ratios = [_ratio(getattr(packed, field, None), getattr(row, field)) for field in ("forward", "forward_backward")]
        errors = [f"{row.errors[name].max:.1e}" if name in row.errors else "-" for name in FIGURES]
        name = row.name + (" (policy)" if row.policy_choice else "")
        table.append([name, milliseconds(row.forward), milliseconds(row.forward_backward), " / ".join(ratios), *errors, row.verdict])
    headers = ["backend", "fwd ms", "fwd+bwd ms", "speed vs packed", "max err o", *FIGURES[1:], "verdict"]
    align = ["left", *["right"] * (len(headers) - 2), "left"]
    lines = [tabulate(table, headers=headers, tablefmt="simple", colalign=align, disable_numparse=True), ""]
    lines += [f"{name} does not run here: {why}" for name, why in result.refused.items()]
    shaky = [row.name for row in result.rows if any(_shaky(spread) for spread in (row.forward, row.forward_backward))]
    if shaky:
        lines.append(f"Times of {', '.join(shaky)} are few or scatter widely, as on a busy machine: read the ratios with care.")
    lines += [_fastest(result.rows, "forward", "forward"), _fastest(result.rows, "forward_backward", "forward + backward")]
    lines.append(f"{DENSE} computes something else: every row attends to all keys up to its position. It is here for scale alone.")
    lines.append("Times are medians of calls that take turns and start from a new selection, so plans and masks are built in the time.")
    if result.decision.device.kind == "cuda":
        lines.append("They are of whole calls, from the host's side on: at sizes as small as this, launching kernels is a large part.")
    lines.append(f"Bounds of the mean error: {result.bound:g} for o and lse; for gradients that, or twice the error of {MASKED}.")
    wrong = [row.name for row in result.rows if row.passed is False]
    lines.append(f"WRONG: {', '.join(wrong)}." if wrong else "Every result agrees with the oracle.")
    return "\n".join(lines)


def milliseconds(spread: Spread | None) -> str:
    """The median to three digits, or a dash where there is none."""
    if spread is None:
        return "-"
    return f"{spread.median:.3g}" if spread.median < 999.5 else f"{spread.median:.0f}"


def _request(problem: Problem, needs_grad: bool) -> Request:
    return request_of(problem.q, problem.k, problem.v, problem.selection, needs_grad)


def _candidates(setting: Setting) -> tuple[list[Candidate], dict[str, str]]:
    """The policy's choice, every other backend that can be forced, and the baselines; and why the others refuse."""
    problem, decision = setting.problem, setting.decision
    chosen = (setting.inference.forward, decision.forward, decision.backward)
    one = chosen[0] if len(set(chosen)) == 1 else None
    own = one or f"{chosen[0]}, training {chosen[1]} + {chosen[2]}"
    candidates, refused = [Candidate(own, _selected(problem, None), chosen, policy_choice=True)], {}
    for name in (verdict.backend for verdict in decision.verdicts if verdict.backend != one):
        training, inference = (explain_request(_request(problem, grad), decision.device, name) for grad in (True, False))
        if refusal(inference) is not None:
            reasons = next(v.forward for v in inference.verdicts if v.backend == name)
            refused[name] = "; ".join(f"{r.field} is {r.actual}, required {r.required}" for r in reasons if r.kind in REFUSING_KINDS)
            continue
        gradients = refusal(training) is None
        names = (name, name, name) if gradients else (name, None, None)
        candidates.append(Candidate(name, _selected(problem, name), names, gradients=gradients))
    S_kv, selection, q_pos = problem.k.shape[2], problem.selection, problem.q_pos
    candidates.append(Candidate(MASKED, lambda q, k, v: (masked_sdpa(q, k, v, token_mask(selection, S_kv, q_pos)), None)))
    candidates.append(Candidate(DENSE, lambda q, k, v: (dense_causal_sdpa(q, k, v, kernel="any"), None), checked=False))
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


def _check(candidate: Candidate, problem: Problem, do: Tensor, exact: dict[str, Tensor]) -> _Outcome:
    """One inference and one training call: the decisions name the right backends, and how far the results are from the oracle."""
    inputs = tuple(tensor.detach().requires_grad_(candidate.gradients) for tensor in problem[:3])
    decision = None
    try:
        with torch.no_grad():
            o, lse = candidate.run(*inputs)
        if candidate.names is not None:
            _expect(candidate.names[0], observe.decisions()[-1].forward)
        got = {"o": o} if lse is None else {"o": o, "lse": lse}
        if candidate.gradients:
            o, lse = candidate.run(*inputs)
            got |= {"o": o} if lse is None else {"o": o, "lse": lse}
            got |= zip(GRADIENTS, torch.autograd.grad(o, inputs, do), strict=True)
        if candidate.names is not None:
            decision = observe.decisions()[-1]
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
    """Times by candidate and kind of work, "forward" or "forward_backward"; one call of each in turns, so that all see the same noise."""
    inputs = tuple(tensor.detach().requires_grad_() for tensor in problem[:3])
    work: dict[tuple[str, str], Callable[[], object]] = {}
    for candidate in candidates:
        work[candidate.name, "forward"] = functools.partial(_forward, candidate, inputs)
        if candidate.gradients:
            work[candidate.name, "forward_backward"] = functools.partial(_forward_backward, candidate, inputs, do)
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    device = problem.q.device.type
    began = time.perf_counter()
    for done in range(ROUNDS[device]):
        spent = (time.perf_counter() - began) / TIMING_SECONDS
        if spent > 1:
            break
        advance("timing", 0.4 + 0.6 * max(done / ROUNDS[device], spent))
        for key, call in work.items():
            samples[key].append(_time_once(call, device))
    return {key: _spread(values) for key, values in samples.items()}


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
    timed = [(spread, row.name) for row in rows if row.passed and (spread := getattr(row, field))]
    timed.sort(key=lambda pair: pair[0].median)
    if not timed:
        return f"Fastest {what}: nothing to compare."
    (best, name), others = timed[0], timed[1:]
    ties = [other for spread, other in others if spread.p20 <= best.p80]
    tie = f", no clear lead over {' and '.join(ties)}" if ties else ""
    packed = next((spread for spread, other in timed if other == PACKED), None)
    speed = f", {_ratio(packed, best)} the speed of {PACKED}" if packed and name != PACKED else ""
    return f"Fastest {what}: {name}, {milliseconds(best)} ms{speed}{tie}."


def _shaky(spread: Spread | None) -> bool:
    return spread is not None and (spread.repeats < 3 or spread.p80 > 1.5 * spread.p20)


def _ratio(packed: Spread | None, spread: Spread | None) -> str:
    return f"{packed.median / spread.median:.3g}x" if packed and spread else "-"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: DeviceInfo) -> str:
    return f"CPU ({torch.get_num_threads()} threads)" if device.kind == "cpu" else device.name
