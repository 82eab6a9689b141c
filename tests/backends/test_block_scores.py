"""Choosing by other scores than NSA's: both backends against plain references, in the interpreter and on a GPU."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nsa_sel.backends import choose_torch, choose_triton
from nsa_sel.backends._triton.choose_scores import block_scores
from nsa_sel.core.call import ChooseCall, Pool, Rule
from nsa_sel.selection import Selection
from tests.helpers.choose_cases import make_choose_call
from tests.helpers.choosing_reference import assert_chosen, best, pooled_scores
from tests.helpers.poison import new_memory_is_nan

BACKENDS = {"choose-torch": choose_torch, "choose-triton": choose_triton}
LOGITS, WEIGHTS = Pool(False, False, True), Pool(True, False, True)
# name: sizes B, S, S_kv, G, h, Dk; rule; pool
CASES: dict[str, tuple[tuple[int, ...], Rule, Pool]] = {
    "index-keys": ((2, 5, 45, 2, 1, 16), Rule(1, 1, 16, 2, 0, 1), LOGITS),
    "index-keys-of-long-blocks": ((1, 9, 130, 1, 1, 16), Rule(1, 1, 64, 2, 0, 1), LOGITS),
    "long-blocks-of-odd-size": ((1, 10, 100, 1, 3, 16), Rule(2, 1, 40, 2, 0, 1), Pool(False, False, False)),
    "one-key-a-block": ((1, 20, 50, 2, 1, 24), Rule(12, 12, 12, 3, 0, 1), LOGITS),
    "heads-max": ((1, 20, 40, 1, 3, 16), Rule(1, 1, 16, 2, 0, 1), Pool(False, True, True)),
    "heads-max-blocks-sum": ((1, 20, 40, 1, 6, 16), Rule(8, 4, 16, 2, 1, 1), Pool(False, True, False)),
    "weights-max": ((1, 14, 70, 2, 4, 16), Rule(8, 4, 16, 3, 1, 1), WEIGHTS),
    "weights-max-no-overlap": ((1, 33, 50, 1, 2, 16), Rule(4, 4, 16, 3, 0, 1), WEIGHTS),
    "weights-max-three-pieces": ((1, 20, 40, 1, 2, 16), Rule(8, 4, 12, 3, 0, 1), WEIGHTS),
    "weights-largest-head": ((1, 20, 40, 1, 3, 16), Rule(8, 4, 16, 3, 0, 1), Pool(True, True, False)),
    "sums-of-weights-of-keys": ((1, 10, 60, 1, 2, 16), Rule(1, 1, 24, 2, 0, 1), Pool()),
    "two-tiles-of-Dk": ((1, 9, 40, 1, 2, 192), Rule(1, 1, 16, 2, 0, 1), LOGITS),
    "no-index-keys": ((2, 5, 7, 1, 2, 16), Rule(8, 4, 16, 2, 0, 1), WEIGHTS),
    "decode": ((3, 1, 85, 2, 2, 16), Rule(1, 1, 16, 3, 1, 1), LOGITS),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter few keys at once, so that short sequences take several steps."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(choose_triton, "config_of", lambda call, kernel: replace(choose_triton.CONFIGS[kernel], block_l=16, rows=64))


def make(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changed: Any) -> ChooseCall:
    (B, S, S_kv, G, h, Dk), rule, pool = CASES[name]
    return make_choose_call((B, S, S_kv, G, h, Dk, Dk, rule), dtype, device, **{"pool": pool, **changed})


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def chosen(backend: str, call: ChooseCall) -> Tensor:
    """In new memory that holds NaN."""
    module = BACKENDS[backend]
    with new_memory_is_nan():
        ranges = module.best_blocks(call, module.log_sum_exp(call) if call.pool.softmax else None)
        return Selection.from_ranges(ranges, call.rule.block_size, disjoint=True).validate().block_indices


def reference(call: ChooseCall, lse: Tensor | None = None) -> Tensor:
    """Scores [B,S,G,blocks] in float64."""
    rule, (kind, heads, reduce) = call.rule, call.pool.words()
    return pooled_scores(
        call.q, call.k, call.positions().cpu(), S_kv=call.blocks * rule.block_size, block_size=rule.block_size, scale=call.scale, lse=lse,
        compress_block=rule.compress_block, compress_stride=rule.compress_stride, reduce=reduce, heads=heads, softmax=kind == "weights",
    )  # fmt: skip


def check(backend: str, call: ChooseCall, slack: float = 0.0) -> None:
    rule, positions, scores = call.rule, call.positions().cpu(), reference(call)
    expected = best(scores, positions, rule.block_size, rule.n, rule.first, rule.local)
    blocks = chosen(backend, call)
    assert blocks.dtype == torch.int32
    assert_chosen(blocks, scores, expected, slack)


def scores_of(backend: str, call: ChooseCall, lse: Tensor | None) -> Tensor:
    """[B,S,G,blocks]; the kernel writes visible blocks alone."""
    if backend == "choose-torch":
        return choose_torch.block_scores(call, lse).transpose(1, 2)
    B, S, G = call.q.shape[:3]
    scores = torch.full((B, S, G, call.blocks), math.nan, device=call.q.device)
    block_scores(call, lse, scores, choose_triton.config_of(call, "choose/scores"))
    return scores


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_are_those_of_the_reference(backend: str, case: str) -> None:
    """Of all visible blocks, with a log-sum-exp of other keys: rows of -inf have weights of 0."""
    call = make(case)
    lse = randn(*call.q.shape[:-1]).where(randn(*call.q.shape[:3], 1) > -1, -math.inf) if call.pool.softmax else None
    exact = reference(call, lse)
    visible = (torch.arange(call.blocks) <= call.positions()[:, :, None, None] // call.rule.block_size).expand_as(exact)
    torch.testing.assert_close(scores_of(backend, call, lse)[visible].double(), exact[visible], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_are_those_of_the_reference(backend: str, case: str) -> None:
    check(backend, make(case))


@pytest.mark.parametrize("case", ["index-keys", "weights-max"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_float16_and_positions_and_a_negative_scale(backend: str, case: str) -> None:
    (B, S, S_kv, *_), _, _ = CASES[case]
    q_pos = torch.randint(-3, S_kv, (B, S), generator=torch.Generator().manual_seed(0))
    check(backend, make(case, torch.float16, q_pos=q_pos, scale=-0.3))


@pytest.mark.parametrize("pool", [LOGITS, Pool(False, False, False), WEIGHTS])
def test_ties_go_to_the_lower_block(pool: Pool) -> None:
    call = make("index-keys", pool=pool) if not pool.softmax else make("weights-max-no-overlap")
    call.k = torch.zeros_like(call.k)
    assert torch.equal(chosen("choose-triton", call), chosen("choose-torch", call))
    check("choose-torch", call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_of_rows_and_shared_keys_and_strides_change_nothing(backend: str) -> None:
    call = make("index-keys")
    call.k = call.k[:, :1].contiguous().expand(-1, 2, -1, -1)
    whole = chosen(backend, call)
    assert torch.equal(whole, chosen(backend, dataclasses.replace(call, k=call.k.contiguous())))
    assert torch.equal(whole, chosen(backend, dataclasses.replace(call, scratch=800)))
    q = call.q.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4)
    assert torch.equal(whole, chosen(backend, dataclasses.replace(call, q=q, q_pos=call.positions())))


@pytest.mark.parametrize("case", ["index-keys", "weights-max", "long-blocks-of-odd-size"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_that_no_row_sees_may_hold_nan(backend: str, case: str) -> None:
    call = make(case, start=-10)
    unseen = torch.arange(call.k.shape[2]) >= call.seen().amax(1, keepdim=True)
    assert bool(unseen.any())
    bad = dataclasses.replace(call, k=call.k.masked_fill(unseen[:, None, :, None], math.nan))
    assert torch.equal(chosen(backend, bad), chosen(backend, call))


GPU_CASES = {
    "msa-prefill": ((1, 700, 700, 4, 1, 128), Rule(1, 1, 128, 4, 0, 1), LOGITS),
    "msa-chunk": ((2, 130, 1500, 2, 1, 128), Rule(1, 1, 128, 4, 0, 1), LOGITS),
    "msa-decode": ((5, 1, 3000, 4, 1, 128), Rule(1, 1, 128, 8, 0, 1), LOGITS),
    "moba-Dk64": ((1, 600, 600, 4, 1, 64), Rule(64, 64, 64, 3, 0, 1), LOGITS),
    "infllm-h16": ((1, 500, 500, 2, 16, 128), Rule(32, 16, 64, 4, 1, 1), WEIGHTS),
    "Dk256-h12": ((1, 70, 500, 1, 12, 256), Rule(32, 16, 64, 3, 0, 1), Pool(False, True, True)),
    "Dk192-h3-sums": ((1, 70, 300, 1, 3, 192), Rule(1, 1, 96, 2, 0, 1), Pool(False, False, False)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", GPU_CASES)
def test_blocks_are_those_of_the_reference_on_a_gpu(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are exact and sums in float32 in every dtype: scores of blocks that differ from the reference's tie to five digits."""
    monkeypatch.setitem(CASES, case, GPU_CASES[case])
    for backend in BACKENDS:
        check(backend, make(case, dtype, "cuda"), slack=1e-5 if backend == "choose-triton" else 1e-4)
    call = make(case, dtype, "cuda")
    first = chosen("choose-triton", call)
    assert all(torch.equal(first, chosen("choose-triton", call)) for _ in range(10))
