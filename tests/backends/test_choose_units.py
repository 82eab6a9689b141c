"""Attention to compressed keys through PyTorch's causal attention, against the float64 oracle: exact on a CPU, in 16 bits on a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa_sel.backends._choose import ChooseCall, Rule
from nsa_sel.backends.choose_units import attention_by_units, attention_by_units_backward, parts
from tests.helpers.choose_cases import SMALL, check_attention, check_gradients, make_choose_call

NSA = Rule()
CASES = {
    "h1": (1, 70, 70, 2, 1, 16, 16, SMALL),
    "h3-ragged": (2, 45, 45, 2, 3, 16, 16, SMALL),
    "h6-whole-units": (1, 47, 47, 1, 6, 24, 24, SMALL),
    "h16-nsa": (1, 150, 150, 1, 16, 16, 16, NSA),
    "h12-no-overlap": (1, 50, 50, 1, 12, 16, 16, SMALL._replace(compress_block=4)),
    "192-128": (1, 36, 36, 1, 2, 192, 128, SMALL),
    "no-key": (2, 7, 7, 1, 2, 16, 16, SMALL),
    "one-row-sees-one-key": (1, 8, 8, 1, 2, 16, 16, SMALL),
    "less-than-a-unit": (1, 10, 10, 1, 2, 16, 16, SMALL),
}


def forward(call: ChooseCall) -> tuple[Tensor, Tensor, Tensor]:
    rule = call.rule
    o, lse = attention_by_units(call.q, call.k, call.v, rule.compress_block, rule.compress_stride, call.scale)
    return o, lse, torch.empty(0)


def backward(call: ChooseCall, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    assert dlse is None
    rule = call.rule
    return attention_by_units_backward(call.q, call.k, call.v, o, lse, do, rule.compress_block, rule.compress_stride, call.scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", CASES)
def test_units_match_the_oracle(shape: str, dtype: torch.dtype) -> None:
    call = make_choose_call(CASES[shape], dtype)
    check_attention(forward(call)[:2], call)
    check_gradients(forward, backward, call, with_lse=False)


@pytest.mark.parametrize("S", [0, 31, 32, 46, 47, 48, 150, 8192])
def test_every_row_that_sees_a_key_is_in_one_unit(S: int) -> None:
    seen = torch.zeros(S, dtype=torch.int64)
    for part in parts(S, 32, 16):
        keys = torch.arange(1, part.rows + 1) if part.causal else torch.full((part.rows,), part.keys)
        assert part.keys == keys.max()
        part.view(seen[:, None, None]).add_(keys)
    t = torch.arange(S)
    assert torch.equal(seen, torch.where(t >= 31, (t - 31) // 16 + 1, 0))


def test_q_is_not_copied() -> None:
    q = torch.empty(200, 2, 4, 8)
    for part in parts(200, 32, 16):
        assert part.view(q).untyped_storage().data_ptr() == q.untyped_storage().data_ptr()


def test_rows_that_see_nothing_are_not_read() -> None:
    call = make_choose_call("h3")
    do = torch.ones(*call.q.shape[:-1], call.v.shape[-1])
    clean = forward(call)[:2]
    gradients = backward(call, *clean, do, None)
    empty = (call.seen() == 0)[:, :, None, None, None]
    call.q = call.q.masked_fill(empty, math.nan)
    found = forward(call)[:2]
    assert all(torch.equal(x, y) for x, y in zip(clean, found, strict=True))
    found_gradients = backward(call, *found, do.masked_fill(empty, math.nan), None)
    assert all(torch.equal(x, y) for x, y in zip(gradients, found_gradients, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*CASES, "h16-128"])
def test_units_match_the_oracle_on_a_gpu(shape: str, dtype: torch.dtype) -> None:
    call = make_choose_call({**CASES, "h16-128": (2, 300, 300, 2, 16, 128, 128, NSA)}[shape], dtype, "cuda")
    check_attention(forward(call)[:2], call)
    check_gradients(forward, backward, call, with_lse=False)
