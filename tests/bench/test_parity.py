"""Wrong results are found before they are timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import PACKED, dense, ours
from nsa_sel.bench.core.parity import WrongResult, is_causal, make_problem, parity, sample

TINY = Case("tiny", "random", 1, 64, 64, 2, 2, 16, 8, 3, 16, "float32")


@pytest.mark.parametrize("B", [1, 5])
def test_right_results_pass(B: int) -> None:
    problem = make_problem(case := TINY._replace(B=B), "cpu")
    mae, of_gradients = parity(ours(PACKED).prepare(problem).call, problem, sample(case, problem, 8))
    assert mae < 1e-6
    assert of_gradients is not None
    assert of_gradients < 1e-5


class Wrong(torch.autograd.Function):
    """Spoils one of q's, k's and v's gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, which: int, how: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        ctx.spoil = which, how
        return q.clone(), k.clone(), v.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        which, how = ctx.spoil
        return *(how(x) if i == which else x for i, x in enumerate(gradients)), None, None


@pytest.mark.parametrize("which", [0, 1, 2])
def test_wrong_gradients_are_found(which: int) -> None:
    problem = make_problem(TINY, "cpu")
    right, exact = ours(PACKED).prepare(problem).call, sample(TINY, problem, 8)

    def spoilt(how: Callable[[Tensor], Tensor]) -> tuple[float, float | None]:
        return parity(lambda q, k, v: right(*Wrong.apply(q, k, v, which, how)), problem, exact)

    with pytest.raises(WrongResult, match=rf"^{('dq', 'dk', 'dv')[which]} is .* off in the mean"):
        spoilt(lambda x: x * 1.5)
    assert 1e-5 < (spoilt(lambda x: x * 1.0005)[1] or 0) < 1e-3
    with pytest.raises(WrongResult, match=r"not written|is not 0"):
        spoilt(lambda x: torch.where(x == 0, math.nan, x))
    if which:
        with pytest.raises(WrongResult, match="is not 0"):
            spoilt(lambda x: x + 1)


def test_a_look_at_the_future_is_found() -> None:
    problem = make_problem(TINY, "cpu")
    right = ours(PACKED).prepare(problem).call
    assert is_causal(right, problem) is True
    assert is_causal(lambda q, k, v: right(q, k, v) + 1e-3 * v.mean(2)[:, None, :, None], problem) is False
    assert is_causal(right, problem._replace(q=problem.q[:, :1])) is None

    def within_the_block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What a kernel without a mask in the diagonal block gives: every row sees that block's end."""
        return right(q, k, v) + v.unflatten(2, (-1, 16)).mean(3).repeat_interleave(16, 2).transpose(1, 2).unsqueeze(3)

    assert is_causal(within_the_block, problem) is False


def test_unwritten_output_of_a_decoding_is_found() -> None:
    problem = make_problem(case := TINY._replace(S=1), "cpu")
    with pytest.raises(WrongResult, match="not written"):
        parity(lambda q, k, v: torch.empty(1, 1, 2, 2, 8), problem, sample(case, problem, 1))


def test_dense_attention_is_held_to_the_oracle_over_every_key() -> None:
    problem = make_problem(TINY, "cpu")
    call = dense().prepare(problem).call
    assert parity(call, problem, sample(TINY, problem, 8, every_key=True))[0] < 1e-6
    with pytest.raises(WrongResult, match=r"^dq is .* off in the mean"):
        parity(call, problem, sample(TINY, problem, 64))
