"""Check `with_sink` against a softmax that holds the logit of the sink, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.errors import ArgumentError
from nsa_sel.oracle import oracle_mask
from tests.helpers.cases import make_blocks, make_qkv


def softmax_with_sink(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, sink: Tensor) -> Tensor:
    """A softmax over the logits and one more, whose value is zero."""
    B, S, G, h, D = q.shape
    mask = oracle_mask(ranges, k.shape[2], S).unsqueeze(3)
    logits = torch.einsum("bsghd,bgkd->bsghk", q, k) * D**-0.5
    logits = torch.cat((logits.masked_fill(~mask, float("-inf")), sink.expand(B, S, G, h).unsqueeze(-1)), -1)
    return torch.einsum("bsghk,bgkd->bsghd", logits.softmax(-1)[..., :-1], v)


def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v = make_qkv(B=2, S=6, G=2, h=3, Dk=8, S_kv=40, dtype=dtype)
    return tuple(x.requires_grad_() for x in (q, k, v, torch.randn(2, 3, generator=torch.Generator().manual_seed(3)).to(dtype)))


def test_sink_and_its_gradients_are_those_of_a_softmax_with_one_more_logit() -> None:
    q, k, v, sink = inputs(torch.float64)
    selection = make_blocks(2, 6, 2, 40, 2, 8)
    selection.ranges[1, 2] = 0  # a row that selects nothing
    o, lse = nsa_sel.selection_attention(q, k, v, selection, return_lse=True)
    got, expected = nsa_sel.with_sink(o, lse, sink), softmax_with_sink(q, k, v, selection.ranges, sink)
    do = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(*((x, *torch.autograd.grad(x, (q, k, v, sink), do)) for x in (got, expected)))
    assert torch.equal(got[1, 2], torch.zeros_like(got[1, 2]))


def test_sink_of_bfloat16_is_within_four_roundings() -> None:
    q, k, v, sink = inputs(torch.float64)
    exact = softmax_with_sink(q, k, v, make_blocks(2, 6, 2, 40, 2, 8).ranges, sink)
    low = [x.detach().bfloat16() for x in (q, k, v)]
    o, lse = nsa_sel.selection_attention(*low, make_blocks(2, 6, 2, 40, 2, 8), return_lse=True)
    got = nsa_sel.with_sink(o, lse, sink.detach().bfloat16())
    assert got.dtype == torch.bfloat16
    assert (got.double() - exact).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


@pytest.mark.parametrize("logit", [0.0, float("-inf")])
def test_rows_of_nothing_give_no_nan(logit: float) -> None:
    given = [x.requires_grad_() for x in (torch.zeros(1, 2, 4), torch.full((1, 2), float("-inf")), torch.full((2,), logit))]
    out = nsa_sel.with_sink(*given)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in (out, *torch.autograd.grad(out.sum(), given)))


def test_a_sink_of_minus_infinity_is_none() -> None:
    o, lse = torch.randn(2, 3, 4), torch.randn(2, 3)
    assert torch.equal(nsa_sel.with_sink(o, lse, torch.full((3,), float("-inf"))), o)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lse": torch.zeros(2, 3)}, "lse is of shape"),
        ({"lse": None}, r"lse is None; .* Remedy: .*selection_attention\(\.\.\., return_lse=True\)"),
        ({"sink": torch.zeros(4)}, "sink is of shape"),
        ({"sink": torch.zeros(3, dtype=torch.int64)}, "sink is torch.int64"),
        ({"sink": 1.0}, "sink is a float"),
    ],
)
def test_bad_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    given = {"o": torch.zeros(2, 4, 3, 8), "lse": torch.zeros(2, 4, 3), "sink": torch.zeros(3)} | changed
    with pytest.raises(ArgumentError, match=message):
        nsa_sel.with_sink(**given)
