"""The oracle of choosing against autograd, and the reference in torch against the oracle."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_sel.backends import choose_torch
from nsa_sel.core.call import Rule
from nsa_sel.layer import block_scores
from nsa_sel.oracle_choose import oracle_choose_backward
from nsa_sel.selection import Selection
from tests.helpers.cases import make_grads
from tests.helpers.choose_cases import SMALL, check_forward, make_choose_call, oracle, plain


@pytest.mark.parametrize("shape", ["h3", "decode", "shorter-than-a-compressed-block"])
def test_oracle_gradients_are_those_of_autograd(shape: str) -> None:
    call = make_choose_call(shape, torch.float64)
    do, dlse = make_grads(call.q, call.v)
    dlse = dlse.where((call.seen() > 0)[:, :, None, None], 0.0)
    inputs = [x.requires_grad_() for x in (call.q, call.k, call.v)]
    o, lse = plain(*inputs, call)
    expected = torch.autograd.grad((o, lse.masked_fill(lse == -math.inf, 0.0)), inputs, (do, dlse))
    rule = call.rule
    got = oracle_choose_backward(
        *(x.detach() for x in inputs), do, dlse, S_kv=call.start + call.q.shape[1], compress_block=rule.compress_block,
        compress_stride=rule.compress_stride,
    )  # fmt: skip
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    torch.testing.assert_close(oracle(call).lse, lse.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", ["h3", "h16-nsa", "no-overlap", "covers-a-block"])
def test_oracle_importance_is_block_scores_of_p(shape: str) -> None:
    call = make_choose_call(shape, torch.float64)
    p = torch.einsum("bsghd,bgkd->bsghk", call.q * call.scale, call.k)
    p = p.masked_fill(torch.arange(call.k.shape[2]) >= call.seen()[:, :, None, None, None], -math.inf).softmax(-1).nan_to_num(0.0)
    exact, rule = oracle(call), call.rule
    S_kv = call.start + call.q.shape[1]
    scores = block_scores(p, rule.block_size, rule.compress_block, rule.compress_stride, S_kv)
    torch.testing.assert_close(exact.importance, scores, rtol=0, atol=1e-12)
    selection = Selection.from_scores(exact.importance, rule.n, rule.block_size, rule.first, rule.local, S_kv=S_kv)
    starts = torch.where(exact.blocks < 0, 0, exact.blocks * rule.block_size)
    assert torch.equal(selection.ranges[..., 0], starts)


def test_torch_takes_a_compressed_block_longer_than_a_block() -> None:
    call = make_choose_call((1, 60, 60, 1, 2, 16, 16, Rule(24, 4, 8, 4, 1, 1)), torch.float64)
    check_forward(choose_torch.forward, call)


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(made):
            if isinstance(x, torch.Tensor) and x._base is None and not function.is_view:
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return made


@pytest.mark.parametrize("positions", ["implied", "given"])
def test_torch_chunks_give_the_same_and_bound_temporaries(positions: str) -> None:
    call = make_choose_call((2, 700, 700, 1, 4, 16, 16, SMALL))
    if positions == "given":
        call.q_pos = call.positions().flip(0)
    whole = choose_torch.forward(call)
    grads = make_grads(call.q, call.v)
    gradients = choose_torch.backward(call, *whole[:2], *grads)
    few = dataclasses.replace(call, scratch=400_000)
    with LargestTensor() as largest:
        chunked = choose_torch.forward(few)
        chunked_gradients = choose_torch.backward(few, *chunked[:2], *grads)
    assert largest.bytes <= max(few.scratch, call.q.numel() * 4)
    assert torch.equal(chunked[2], whole[2])
    for x, y in zip((*chunked[:2], *chunked_gradients), (*whole[:2], *gradients), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_keeps_out(dtype: torch.dtype) -> None:
    """Matrix products stay in float32 under the caller's autocast, forward and backward."""
    call = make_choose_call("h3", dtype)
    do, dlse = make_grads(call.q, call.v)

    def run() -> tuple[torch.Tensor, ...]:
        o, lse, ranges = choose_torch.forward(call)
        alone = choose_torch.log_sum_exp(call)
        return o, lse, ranges, alone, choose_torch.best_blocks(call, lse), *choose_torch.backward(call, o, lse, do, dlse)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        got = run()
    assert all(map(torch.equal, got, expected))
