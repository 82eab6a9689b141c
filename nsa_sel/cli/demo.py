"""The demo: attention of a language model on every backend that runs here, checked against float64 and timed."""

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
from torch import Tensor

from nsa_sel.attention import selection_attention
from nsa_sel.cli import bench_door
from nsa_sel.cli.tensor_file import Problem, read_problem
from nsa_sel.core.backend import REFUSING_KINDS
from nsa_sel.core.call import device_info, request_of
from nsa_sel.core.check import check_call
from nsa_sel.core.decide import decide, explain_request
from nsa_sel.core.decision import Decision, refusal
from nsa_sel.core.request import DeviceInfo, Request
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection
from nsa_sel.telemetry import events

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
CHECKED_ROWS = 1024  # at most: the float64 oracle is plain code, and takes milliseconds per row
COPIES_ON_GPU = 16  # of the default problem, as a batch: with a single one a GPU would mostly wait for the host
ROUNDS = {"cpu": 9, "cuda": 51}
TIMING_SECONDS = {"cpu": 12.0, "cuda": 25.0}  # in equal shares; each kind of work runs at least once, unless twice that time is up

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
    """The problem on the first CUDA device in its own dtype, bfloat16 for 8-bit numbers, or on the CPU in float32.

    Args:
        trace: by default the captured trace of SmolLM2-135M, which a checkout has, else a synthetic one; `COPIES_ON_GPU` of it on a GPU.

    Raises:
        ArgumentError: for a file that does not hold a problem.
        BackendError: where no backend may run it.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    problem = read_problem(trace) if trace is not None else _default_problem()
    if trace is None and cuda:
        problem = _copied(problem, COPIES_ON_GPU)
    if problem.q.dtype.itemsize == 1:
        problem.facts["rounded to"] = dtype_name(problem.q.dtype)
    problem = problem.to(device, _dtype(problem.q) if cuda else torch.float32)
    q, k, v, selection, _, q_pos = check_call(*problem[:4], None, problem.q_pos)
    problem = Problem(q, k, v, selection, q_pos, problem.facts)
    if (device.type, dtype_name(q.dtype)) not in BOUNDS:
        raise ArgumentError("q", f"of dtype {q.dtype}", "float16, bfloat16 or float32", "save the trace in one of these")
    training, inference = (decide(_request(problem, grad), device_info(device)) for grad in (True, False))
    return Setting(problem, training, inference, _sample(q.shape[1], max(1, CHECKED_ROWS // q.shape[0])))


def _default_problem() -> Problem:
    trace = resources.files("nsa_sel") / "bench" / "data" / "smollm2_trace.safetensors"
    if trace.is_file():
        with resources.as_file(trace) as file:
            return read_problem(file)
    generator, selection = torch.Generator().manual_seed(0), bench_door.real_selection(1)
    S = selection.ranges.shape[1]
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in ((1, S, 1, 3, 64), (1, 1, S, 64), (1, 1, S, 64)))
    return Problem(q, k, v, selection, None, {"synthetic": True, "first": 1, "local": 2})


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

    bound = BOUNDS[q.device.type, dtype_name(q.dtype)]
    rows = tuple(_row(candidate, outcomes[candidate.name], times, bound, outcomes[MASKED]) for candidate in candidates)
    return Result(
        facts=facts, device=device_name(setting.decision.device), dtype=dtype_name(q.dtype), bound=bound,
        checked_rows=len(setting.rows), torch=str(torch.__version__), threads=torch.get_num_threads(), decision=setting.decision,
        rows=rows, refused=refused,
        passed=all(row.passed is not False for row in rows),
    )  # fmt: skip


def _request(problem: Problem, needs_grad: bool) -> Request:
    return request_of(problem.q, problem.k, problem.v, problem.selection, needs_grad)


def _candidates(setting: Setting) -> tuple[list[Candidate], dict[str, str]]:
    """The policy's choice, every other backend that can be forced, and the baselines; and the reasons of those that refuse."""
    problem, decision = setting.problem, setting.decision
    chosen = (setting.inference.forward, decision.forward, decision.backward)
    one = chosen[0] if len(set(chosen)) == 1 else None
    own = one or f"{chosen[0]}, training {chosen[1]} + {chosen[2]}"
    candidates, refused = [Candidate(own, _selected(problem, None), chosen, policy_choice=True)], {}
    candidates.append(Candidate(DENSE, lambda q, k, v: (bench_door.dense_causal_sdpa(q, k, v), None), checked=False))
    for name in (verdict.backend for verdict in decision.verdicts if verdict.backend != one):
        training, inference = (explain_request(_request(problem, grad), decision.device, name) for grad in (True, False))
        if refusal(inference) is not None:
            reasons = next(v.forward for v in inference.verdicts if v.backend == name)
            refused[name] = "; ".join(f"{r.field} is {r.actual}, required {r.required}" for r in reasons if r.kind in REFUSING_KINDS)
            continue
        gradients = refusal(training) is None
        names = (name, name, name) if gradients else (name, None, None)
        candidates.append(Candidate(name, _selected(problem, name), names, gradients=gradients))
    masked = bench_door.masked_sdpa(problem.selection, problem.k.shape[2], problem.q_pos)
    candidates.append(Candidate(MASKED, lambda q, k, v: (masked(q, k, v), None)))
    return candidates, refused


def _selected(problem: Problem, backend: str | None) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    old = problem.selection

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        # A new selection has no plans yet, as in a model's next layer.
        selection = Selection(old.ranges, old.block_size, old.max_length, disjoint=True)
        o, lse = selection_attention(q, k, v, selection, q_pos=problem.q_pos, return_lse=True, backend=backend)
        return o, lse

    return run


def _exact(setting: Setting, do: Tensor) -> dict[str, Tensor]:
    """The oracle's o, lse and dq of the setting's rows, and its dk and dv of a loss over these rows alone."""
    q, k, v, selection, q_pos, _ = setting.problem
    rows, S_kv = setting.rows, k.shape[2]
    position = torch.arange(S_kv - q.shape[1], S_kv).expand(q.shape[:2]) if q_pos is None else q_pos.cpu()
    few_q, few_do, ranges, position = (x.cpu()[:, rows] for x in (q, do, selection.ranges, position))
    forward = oracle_forward(few_q, k, v, ranges, None, position)
    gradients = oracle_backward(few_q, k, v, ranges, few_do, None, None, position)
    return dict(zip(FIGURES, (*forward, *gradients), strict=True))


def _check(candidate: Candidate, setting: Setting, do: Tensor, exact: dict[str, Tensor]) -> _Outcome:
    """One inference and one training call on all rows: checks the backends that the decisions name, and compares the setting's rows with
    the oracle's. Gradients are of a loss over these rows alone; a candidate without gradients has the inference call only."""
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
    except Exception as error:  # a kernel's exception is this row's result
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
    """Times by candidate and kind of work, "forward" or "forward_backward"; one call of each in turn, so that all see the same noise.

    Work that has used up its share of the time runs no more; when twice the time is up, on a busy machine, nothing does.
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
                samples[key].append(bench_door.one_call(call, device))
    return {key: Spread(*bench_door.percentiles(times), len(times)) for key, times in samples.items() if times}


@torch.no_grad()
def _forward(candidate: Candidate, inputs: tuple[Tensor, ...]) -> None:
    candidate.run(*inputs)


def _forward_backward(candidate: Candidate, inputs: tuple[Tensor, ...], do: Tensor) -> None:
    torch.autograd.grad(candidate.run(*inputs)[0], inputs, do)


def _row(candidate: Candidate, outcome: _Outcome, times: dict[tuple[str, str], Spread], bound: float, masked: _Outcome) -> Row:
    errors = {}
    for name, (mae, largest) in outcome.differences.items():
        # Gradients may have twice the error of torch's dense kernels in the same precision.
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


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def device_name(device: DeviceInfo) -> str:
    """The device as the demo shows it."""
    return f"CPU ({torch.get_num_threads()} threads)" if device.kind == "cpu" else device.name
