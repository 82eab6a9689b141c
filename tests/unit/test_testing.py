"""Check that `check_implementation` says of implementations what holds, and of wrong ones what does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, selection_attention
from nsa_sel.errors import ArgumentError
from nsa_sel.testing import BEHAVIORS, Shape, check_implementation, dense_attention

Attend = Callable[..., Any]


def masked(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, q_pos: Tensor | None = None,
    return_lse: bool = False,
) -> Any:  # fmt: skip
    """Dense masked attention: everything holds but that NaN in unselected keys spoils the rows."""
    o, lse = dense_attention(q, k, v, selection.ranges, scale, q_pos)
    return (o, lse) if return_lse else o


def gathered(q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None) -> Tensor:
    """A plain kernel of blocks, which counts a block as often as it is selected, and gives NaN for rows that select nothing."""
    size, indices = selection.block_size or 1, selection.block_indices
    keys = (indices.unsqueeze(-1) * size + torch.arange(size)).flatten(-2)  # [B,S,G,n*size]
    seen = (keys >= 0) & (keys <= torch.arange(k.shape[2] - q.shape[1], k.shape[2]).view(-1, 1, 1))
    B, G = torch.arange(len(q)).view(-1, 1, 1, 1), torch.arange(k.shape[1]).view(1, 1, -1, 1)
    k, v = (x[B, G, keys.clamp(0, k.shape[2] - 1)] for x in (k, v))
    logits = torch.einsum("bsghd,bsgkd->bsghk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("bsghk,bsgkd->bsghd", logits.masked_fill(~seen.unsqueeze(3), -torch.inf).softmax(-1), v)


def in_base_2(*given: Any, return_lse: bool = False, **more: Any) -> Any:
    o, lse = masked(*given, return_lse=True, **more)
    return (o, lse / torch.log(torch.tensor(2.0))) if return_lse else o


def noisy(*given: Any, return_lse: bool = False, **more: Any) -> Any:
    o, lse = masked(*given, return_lse=True, **more)
    o = o + torch.rand_like(o) * 1e-8
    return (o, lse) if return_lse else o


def unwritten(*given: Any, return_lse: bool = False, **more: Any) -> Any:
    """Rows that select nothing are left as memory was."""
    o, lse = masked(*given, return_lse=True, **more)
    o = torch.where(lse.isinf().unsqueeze(-1), torch.empty_like(o), o)
    return (o, lse) if return_lse else o


def without_positions(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, scale: float | None = None, return_lse: bool = False
) -> Any:
    return masked(q, k, v, selection, scale=scale, return_lse=return_lse)


@pytest.mark.parametrize(
    ("attend", "wrong"),
    [
        (masked, {"poison"}),
        (in_base_2, {"poison", "lse"}),
        (noisy, {"poison", "determinism"}),
        (unwritten, {"poison", "nothing", "outside", "future"}),
        (without_positions, {"poison", "positions"}),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_named(attend: Attend, wrong: set[str]) -> None:
    report = check_implementation(attend, shapes=[Shape(2, 8, 8, None)])
    assert {finding.behavior for finding in report.findings if finding.holds is False} == wrong, str(report)
    assert not report.holds


def test_a_backend_of_ours_holds_all() -> None:
    report = check_implementation(partial(selection_attention, backend="sdpa-packed"))
    assert report.holds, str(report)
    assert all(finding.holds for finding in report.findings), str(report)


def test_a_kernel_of_blocks_that_claims_little() -> None:
    claims = set(BEHAVIORS) - {"lse", "positions", "shared keys"}
    report = check_implementation(gathered, claims=claims, shapes=[Shape(2, 8, 8, 16)])
    found = {finding.behavior: finding for finding in report.findings}
    assert all(found[name].holds for name in ("blocks", "order", "padding", "chunk", "batch", "one row", "scale", "int64", "layouts")), str(
        report
    )
    assert all(found[name].holds is False for name in ("nothing", "duplicates", "future", "poison")), str(report)
    assert all(found[name].holds is None for name in ("lse", "positions", "ranges", "overlaps"))
    assert "dq" in found["chunk"].details
    assert "lse" not in found["chunk"].details
    assert "(h2-8x8-16, float32)" in found["duplicates"].details


def test_a_report_prints_a_line_for_each_behavior_and_exceptions_in_words() -> None:
    def refuses(*given: Any, **more: Any) -> Any:
        raise ValueError("takes 16 heads alone\nand more")

    lines = str(check_implementation(refuses, claims=["blocks", "lse"])).splitlines()
    assert len(lines) == 1 + len(BEHAVIORS)
    assert lines[1].split(maxsplit=5)[:4] == ["blocks", "does", "not", "hold"]
    assert "ValueError: takes 16 heads alone (h3-16x24-ranges, float32)" in lines[1]
    assert lines[3].split() == ["gradients", "not", "claimed", *BEHAVIORS["gradients"].what.split()]


def test_an_unknown_claim_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"claims is \['speed'\]"):
        check_implementation(masked, claims=["blocks", "speed"])
