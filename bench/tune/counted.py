"""What the policy counts by itself at the first call on a case, as `nsa_sel.core.decide` does, without a GPU."""

from __future__ import annotations

from functools import cache

import torch

from nsa_sel.bench.core.cases import Case, make_selection, random_rows
from nsa_sel.core.ranges import sample_rows, sampled_sharing


def counted_sharing(case: Case) -> tuple[float, ...]:
    """The sharing of the rows that a first call samples, to two digits. Random rows are drawn anew."""
    if case.distribution == "random":
        return _of_random(case._replace(case="", h=1, Dk=0, Dv=0, dtype=""))
    return _of_case(case._replace(case=case.case.replace(f"-h{case.h}", "-h1"), h=1))  # the heads of a group share their selection


@cache
def _of_case(case: Case) -> tuple[float, ...]:
    rows = sample_rows(case.B, case.S, case.G, case.n, "cpu")
    ranges = make_selection(case, "cpu").ranges[rows.b, rows.s, rows.g]
    return sampled_sharing(ranges, case.S_kv - case.S + rows.s + 1, case.block)


@cache
def _of_random(case: Case) -> tuple[float, ...]:
    rows = sample_rows(case.B, case.S, case.G, case.n, "cpu")
    positions = case.S_kv - case.S + rows.s
    ranges = random_rows(case._replace(B=1, G=1), positions.flatten(), torch.Generator().manual_seed(0))
    return sampled_sharing(ranges.view(*rows.s.shape, case.n, 2), positions + 1, case.block)
