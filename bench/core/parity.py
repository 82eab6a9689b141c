"""Whether timed calls are correct: sampled rows against the float64 oracle, with uninitialized memory set to NaN."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.bench.core.cases import Case, make_inputs, make_selection
from nsa_sel.bench.core.store import first_line
from nsa_sel.errors import ArgumentError
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
FAR = 1e4  # added to the values of future keys: a row that gives them any weight shows it
SEEN = 1e-2  # by how much an output must change for that
# Mean error over mean magnitude: some times what rounding does, far below what a wrong key does. The tests hold every backend to less.
GROSS = {torch.float16: 0.05, torch.bfloat16: 0.05, torch.float32: 1e-3}


class WrongResult(RuntimeError):
    """A call's results are wrong, whatever the mean error."""


class WrongAnswer(ArgumentError):
    """A function that the user gave returns no o of this layout: the run ends."""


class Problem(NamedTuple):
    """The tensors of a case, on one device."""

    selection: Selection
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


class Sample(NamedTuple):
    """The exact results for a few rows, in float64. `do` is 0 in all other rows, so that dk and dv are exact, too."""

    rows: Tensor  # [r] numbers of query rows
    entries: int  # of the batch, the first ones
    do: Tensor  # [B,S,G,h,Dv] in the inputs' dtype
    o: Tensor  # [entries,r,G,h,Dv]
    gradients: tuple[Tensor, ...]  # dq [entries,r,G,h,Dk], dk, dv [entries,G,S_kv,D]; none when decoding


def make_problem(case: Case, device: torch.device | str) -> Problem:
    """The selection and inputs of a case."""
    return Problem(make_selection(case, device), *make_inputs(case, device, seed=1))


def sample(case: Case, problem: Problem, most: int, every_key: bool = False, backward: bool = True) -> Sample:
    """The oracle's o and gradients of `most` random rows of the first batch entries: it is slow.

    every_key: of dense causal attention instead, in which a row selects all keys up to its own. backward: whether gradients are wanted.
    """
    q, k, v = problem.q, problem.k, problem.v
    rows = torch.randperm(case.S, generator=torch.Generator().manual_seed(0))[:most].sort().values
    entries = min(case.B, 4)
    position, on_device = rows + case.S_kv - case.S, rows.to(q.device)
    few_q, ranges, few_do = (x[:entries, on_device] for x in (q, problem.selection.ranges, problem.do))
    if every_key:
        ranges = torch.tensor([0, case.S_kv]).expand(*ranges.shape[:3], 1, 2)
    do = torch.zeros_like(problem.do)
    do[:entries, on_device] = few_do
    few = few_q, k[:entries], v[:entries], ranges
    o, _ = oracle_forward(*few, q_pos=position)
    gradients = () if case.S == 1 or not backward else oracle_backward(*few, few_do, q_pos=position)
    return Sample(on_device, entries, do, o.to(q.device), tuple(x.to(q.device) for x in gradients))


def parity(call: Attend, problem: Problem, wanted: Sample, strict: bool = True) -> tuple[float, float | None]:
    """Mean absolute error of o, and the largest of those of dq, dk, dv (None when decoding); new memory is filled with NaN first.

    Errors of o and dq are over the sampled rows, those of dk and dv over the keys that these rows attend to. Everything else
    that was not written, or not to 0, raises WrongResult. strict: an operation of torch that is not deterministic raises too.
    """
    q, k, v = (x.detach() for x in problem[1:4])
    with new_memory_holds_nan(strict):
        if not wanted.gradients:
            o = call(q, k, v)
            if not bool(o.isfinite().all()):
                raise WrongResult("o has values that were not written, or are not finite")
            return checked_error("o", o[: wanted.entries, wanted.rows], wanted.o), None
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = call(*leaves)
        gradients = torch.autograd.grad(o, leaves, wanted.do)
    found = [checked_error("dq", gradients[0][: wanted.entries, wanted.rows], wanted.gradients[0])]
    for name, mine, exact in zip(("dk", "dv"), gradients[1:], wanted.gradients[1:], strict=True):
        read = (exact != 0).any(-1)
        if bool((mine[: wanted.entries][~read] != 0).any()):
            raise WrongResult(f"{name} is not 0 at keys that no row with a gradient attends to")
        found.append(checked_error(name, mine[: wanted.entries][read], exact[read]))
    for name, mine in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=True):
        if not bool(mine.isfinite().all()):
            raise WrongResult(f"{name} has values that were not written, or are not finite")
    return checked_error("o", o[: wanted.entries, wanted.rows], wanted.o), max(found)


def lacks_gradients(call: Attend, problem: Problem) -> str | None:
    """Why autograd does not go through a call to q, k and v, in one line; None where it does. Raises where memory or the answer is bad."""
    leaves = [x.detach().requires_grad_() for x in problem[1:4]]
    try:
        torch.autograd.grad(call(*leaves), leaves, problem.do)
    except (torch.OutOfMemoryError, MemoryError, ArgumentError):
        raise
    except Exception as error:
        return first_line(error)
    return None


def checked_error(name: str, mine: Tensor, exact: Tensor) -> float:
    """Mean absolute error; WrongResult where it is a larger part of the mean magnitude than `GROSS`."""
    error, size = float((mine.detach().double() - exact).abs().mean()), float(exact.abs().mean())
    if not error <= GROSS[mine.dtype] * size:  # NaN is wrong, too
        raise WrongResult(f"{name} is {error:.1e} off in the mean, and {size:.1e} large: it is not the attention of this selection")
    return error


@torch.no_grad()
def is_causal(call: Attend, problem: Problem) -> bool | None:
    """Whether the rows up to the middle one give the same when all keys and values after it are changed; None of a single row.

    With S a multiple of the block, the middle row is at a block's first key: a kernel without a mask in that block is found.
    """
    q, k, v = (x.detach() for x in problem[1:4])
    S, S_kv = q.shape[1], k.shape[2]
    if S == 1:
        return None
    row = S // 2
    future = row + S_kv - S + 1
    before = call(q, k, v)[:, : row + 1].clone()
    k, v = k.clone(), v.clone()
    k[:, :, future:] *= -3
    v[:, :, future:] += FAR
    return bool(((call(q, k, v)[:, : row + 1] - before).abs() <= SEEN).all())


@contextmanager
def new_memory_holds_nan(strict: bool) -> Iterator[None]:
    """Torch fills uninitialized memory with NaN. Unless strict, operations without a deterministic implementation still run."""
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
