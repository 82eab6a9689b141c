"""What tests/helpers/interpreter.py changes in Triton's interpreter: its time, and no bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_sel.backends import choose_triton
from nsa_sel.selection import Selection
from tests.helpers.cases import make_blocks, make_grads, make_qkv, make_spans
from tests.helpers.checks import attend
from tests.helpers.choose import SMALL, make_choose_call
from tests.helpers.interpreter import patch_interpreter, reproducible_products


def attended(backend: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    q, k, v = make_qkv(S=2, G=1, h=3, Dk=24, Dv=16, S_kv=40, dtype=dtype, requires_grad=True)
    ranges = make_blocks(1, 2, 1, 40, 2, 16) if backend != "triton-group" else Selection.from_ranges(make_spans("few", 1, 2, 1, 40, 20))
    o, lse = attend(backend, q, k, v, ranges)
    return o, lse, *torch.autograd.grad(o, (q, k, v), make_grads(q, v)[0])


def chosen() -> tuple[Tensor, ...]:
    call = make_choose_call((1, 9, 40, 1, 3, 16, 24, SMALL))
    o, lse, ranges = choose_triton.forward(call)
    return o, lse, ranges, *choose_triton.backward(call, o, lse, make_grads(call.q, call.v)[0], None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "work",
    [lambda: attended("triton-group"), lambda: attended("triton-tile", torch.float16), lambda: attended("triton-block"), chosen],
    ids=["ranges", "tiles in float16", "sorted lists", "choices"],
)
def test_a_faster_interpreter_gives_the_same_bits(interpreter_of_tests: pytest.MonkeyPatch, work: Callable[[], tuple[Tensor, ...]]) -> None:
    """But for products of float32, which are summed in the same way in both."""
    from triton.runtime import interpreter

    fast = work()
    interpreter_of_tests.undo()
    try:
        with pytest.MonkeyPatch.context() as products:
            reproducible_products(products, interpreter)
            slow = work()
    finally:
        patch_interpreter(interpreter_of_tests)
    assert all(torch.equal(one, other) for one, other in zip(fast, slow, strict=True))


def test_numbers_wider_than_their_type_are_refused() -> None:
    """Also after others of the type have passed."""
    from triton.language import core
    from triton.runtime import interpreter

    for _ in range(2):
        assert interpreter.TensorHandle(np.zeros(2, np.float32), core.float32).data.size == 2
        with pytest.raises(ValueError, match="64 bits"):
            interpreter.TensorHandle(np.zeros(2), core.float32)
