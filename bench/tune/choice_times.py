"""What choosing blocks takes with each backend of that kind: rows of `compressed_attention` for the cost models (bench/tune/costs.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.bench.core import cases, environment, timing
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.parity import WrongResult, checked_error, new_memory_holds_nan
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing
from nsa_sel.bench.tune import cost_fit
from nsa_sel.bench.tune.committed_rows import DIRECTIONS
from nsa_sel.compressed import compressed_attention
from nsa_sel.core import registry
from nsa_sel.core.backend import Offer, PolicyInput
from nsa_sel.core.call import Rule
from nsa_sel.core.request import DeviceInfo
from nsa_sel.policies.cost import modelled
from nsa_sel.policies.guards import within_limits
from nsa_sel.settings.schema import Settings, Way

MAX_ROWS = 8192  # of a case that slow backends are measured on
FEWEST_SAME = 0.99  # of the chosen blocks: scores that agree to five digits may change places


def wanted(device: DeviceInfo, settings: Settings, way: Way) -> list[Row]:
    """The rows to measure: every case with every backend that is installed, takes it, and has a model of such calls."""
    rows = []
    for case in cases.choice_cases() if way != "decode" else ():
        request = cost_fit.request_of(case, None, way == "backward")
        asked = PolicyInput(request, device, settings, "backward" if way == "backward" else "forward")
        for name, backend in registry.backends("choose").items():
            runs = not registry.missing(name) and not within_limits(asked, Offer(backend))
            covered = backend.cost_terms and modelled(backend, request, way == "backward")
            if runs and covered and not (backend.slow and case.S > MAX_ROWS):
                rows.append({**case._asdict(), "direction": DIRECTIONS[way], "backend": name, "launches": ""})
    return rows


class Problem(NamedTuple):
    """Inputs of one case, and what the fallback made of them."""

    inputs: tuple[Tensor, Tensor, Tensor]  # q [B,S,G,h,Dk], k_cmp [B,G,C,Dk], v_cmp [B,G,C,Dv]; leaves
    do: Tensor
    expected: tuple[Tensor, ...]  # o, dq, dk, dv
    blocks: Tensor  # [B,S,G,n]


class Runner:
    """Times one backend on one case, checked against the fallback in float32; keeps the last case's tensors.

    Args:
        device: "cuda" or "cpu".
        timing: of a row.
        most: mean absolute error of o. Gradients sum over thousands of rows, so that theirs is held to their magnitude (`checked_error`).
    """

    def __init__(self, device: str, timing: Timing, most: float) -> None:
        self.device, self.timing, self.most = device, timing, most
        self.prepared: tuple[Case, Problem] | None = None

    def __call__(self, row: Row) -> Row:
        """The row with its times; WrongResult where another backend chooses other blocks, or o or a gradient is wrong."""
        case, direction, backend = cost_fit.case_of(row), row["direction"], row["backend"]
        if self.prepared is None or self.prepared[0] != case:
            self.prepared = None  # frees their memory first
            self.prepared = case, problem_of(case, self.device)
        problem = self.prepared[1]
        with new_memory_holds_nan(strict=False):
            *found, blocks = results(problem.inputs, problem.do if direction == "bwd" else None, case, backend)
        same = float((blocks == problem.blocks).float().mean())
        names = ("o", "dq", "dk", "dv")
        error, *_ = [checked_error(*each) for each in zip(names, found, problem.expected, strict=False)]
        if not (same >= FEWEST_SAME and error <= self.most):
            raise WrongResult(f"{same:.1%} of the blocks are the same, the mean absolute error of o is {error:.3g}, allowed {self.most}")

        with torch.set_grad_enabled(direction == "bwd"):
            o = choose(problem.inputs, case, backend)[0] if direction == "bwd" else None

            def work() -> Any:
                if o is None:
                    return choose(problem.inputs, case, backend)
                return torch.autograd.grad(o, problem.inputs, problem.do, retain_graph=True)

            space = timing.workspace_bytes(work, self.device)
            times = timing.milliseconds(work, self.timing, self.device)
        more = {"mae": error, "same_blocks": same, "workspace_bytes": space, **environment.gpu_state(self.device)}
        return {**row, **timing.row(case, direction, backend, times, **more)}


def problem_of(case: Case, device: str) -> Problem:
    """A case with its results."""
    keys = Rule(block_size=case.block, n=case.n).compressed_keys(case.S_kv)
    q, k, v, do = cases.make_inputs(case._replace(S_kv=keys), device)
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    *expected, blocks = results(inputs, do, case, registry.fallback("choose"))
    return Problem(inputs, do, tuple(expected), blocks)


def choose(inputs: tuple[Tensor, Tensor, Tensor], case: Case, backend: str) -> tuple[Tensor, Tensor]:
    """o and ranges of a call."""
    o, selection = compressed_attention(*inputs, block_size=case.block, n=case.n, S_kv=case.S_kv, backend=backend)
    return o, selection.ranges


def results(inputs: tuple[Tensor, Tensor, Tensor], do: Tensor | None, case: Case, backend: str) -> tuple[Tensor, ...]:
    """o, with do the gradients, and the first key of each chosen block [B,S,G,n]."""
    with torch.set_grad_enabled(do is not None):
        o, ranges = choose(inputs, case, backend)
    gradients = () if do is None else torch.autograd.grad(o, inputs, do)
    return o.detach(), *gradients, ranges[..., 0]
