"""The cases that benches measure, and their selections."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.bench.core import cases
from nsa_sel.bench.core.cases import Case, layers_of, make_selection, random_selection
from nsa_sel.bench.questions.speed import SUITES, Suite
from nsa_sel.selection import Selection


def test_a_name_stands_for_one_case_and_the_first_suite_looks_most_closely() -> None:
    seen: dict[str, tuple[Case, Suite]] = {}
    for suite in SUITES.values():
        for case in suite.cases():
            known, by = seen.setdefault(case.case, (case, suite))
            assert known == case
            assert (by.packed, by.whole, by.rep, by.rows) >= (suite.packed, suite.whole, suite.rep, suite.rows)
            assert by.whole >= suite.whole
    assert {case.S for case, _ in seen.values() if case.distribution == "random"} >= {S * 1024 for S in (8, 16, 32, 64, 128)}


def test_parallel_cases_have_every_pair_of_sizes() -> None:
    found = cases.parallel_cases()
    for one, other in (("G", "h"), ("G", "block"), ("h", "block"), ("B", "G"), ("B", "h"), ("B", "block")):
        pairs = {(getattr(case, one), getattr(case, other)) for case in found}
        assert len(pairs) == len({pair[0] for pair in pairs}) * len({pair[1] for pair in pairs})


def test_layers_are_all_covered_alone_and_in_batches() -> None:
    found = cases.layer_cases()
    for h in (16, 4, 1):
        alone = [layers_of(case.case) for case in found if case.h == h and case.B == 1]
        batches = [layers_of(case.case) for case in found if case.h == h and case.B == 4]
        assert alone == [[layer] for layer in range(30)]
        assert len(batches) == 8
        assert all(len(set(batch)) == 4 for batch in batches)
        assert {layer for batch in batches for layer in batch} == set(range(30))
    assert {case.case for case in found} >= {"real-8k-layer07-h16", "real-8k-layers28-29-00-01-h1"}
    assert all(layers_of(case.case) == [] for case in (*cases.performance_cases(), *cases.breakeven_cases()))


def test_stacked_layers_are_the_single_ones() -> None:
    by_name = {case.case: case for case in cases.layer_cases()}
    batch = make_selection(by_name["real-8k-layers28-29-00-01-h1"], "cpu").validate()
    assert batch.ranges.shape == (4, 8192, 3, 16, 2)
    for entry, layer in zip(batch.ranges, (28, 29, 0, 1), strict=True):
        assert torch.equal(entry, make_selection(by_name[f"real-8k-layer{layer:02}-h1"], "cpu").ranges[0])
    assert all(not torch.equal(batch.ranges[a], batch.ranges[b]) for a in range(4) for b in range(a))


@pytest.mark.parametrize("S", [1024, 4096])
def test_the_first_rows_of_real_selections_are_selections(S: int) -> None:
    (case,) = (case for case in cases.breakeven_cases() if (case.S, case.h) == (S, 1))
    selection = make_selection(case, "cpu").validate()
    assert torch.equal(selection.ranges, cases.real_selection(4, "cpu").ranges[:, :S])
    start, end = selection.ranges.unbind(-1)
    row = torch.arange(S)[:, None, None]
    assert bool(((start <= row) | (end <= start)).all())  # nothing of the text after these rows
    assert int(end.max()) == S


def test_a_selection_drawn_in_pieces_is_that_of_all_scores_together() -> None:
    case = Case("", "random", 2, 100, 130, 2, 1, 16, 16, 3, 16, "float32")
    blocks, rows = 9, 24
    found = random_selection(case, "cpu", seed=5, at_once=rows * 2 * 2 * blocks).validate()
    generator = torch.Generator().manual_seed(5)
    scores = torch.cat([torch.randn(2, min(rows, 100 - first), 2, blocks, generator=generator) for first in range(0, 100, rows)], 1)
    assert torch.equal(found.ranges, Selection.from_scores(scores, 3, 16, S_kv=130).ranges)


def test_one_draw_serves_up_to_32k_rows() -> None:
    """Selections of committed rows were drawn at once: they stay what they were."""
    for case in (*cases.performance_cases(), *cases.decode_cases(), *cases.threshold_cases()):
        assert case.B * case.S * case.G * -(-case.S_kv // case.block) <= cases.SCORES_AT_ONCE


@pytest.mark.parametrize("alike", [False, True])
def test_heads_that_select_by_themselves_force_their_own_block_alone(alike: bool) -> None:
    """MoBA's rule. With the first and the previous block forced, three blocks would leave nothing to choose, and all heads would agree."""
    case = next(case for case in cases.model_cases() if case.case == "models-moba-16k")
    kind = cases.PER_HEAD_ALIKE if alike else cases.PER_HEAD
    case = case._replace(distribution=kind, S=256, S_kv=2048, G=8, block=128, dtype="float32")
    blocks = make_selection(case, "cpu").validate().block_indices[0]
    assert (blocks.max(-1).values == torch.arange(2048 - 256, 2048)[:, None] // 128).all()
    assert (blocks[:, 0] != blocks[:, 1]).any()
    assert (blocks[:, :, 0] != 0).any()
    same = (blocks[1:128] == blocks[:127]).all(-1).float().mean()  # of random ones, 1 in 105 or 91
    assert (same > 0.2) == alike
    q, k, v, _ = cases.make_inputs(case, "cpu")
    assert q.shape[2] == cases.HEADS_PER_KV * k.shape[1] == cases.HEADS_PER_KV * v.shape[1]
