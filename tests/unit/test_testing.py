"""Check that `check_implementation` says of implementations what holds, and of wrong ones what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection
from nsa_sel.errors import ArgumentError
from nsa_sel.testing import BEHAVIORS, Shape, check_implementation, dense_attention


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


CHANGES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {  # of o and lse, by what then does not hold
    "": lambda o, lse: (o, lse),
    "lse": lambda o, lse: (o, lse / torch.log(torch.tensor(2.0))),
    "determinism": lambda o, lse: (o + torch.rand_like(o) * 1e-8, lse),
    "nothing outside future": lambda o, lse: (torch.where(lse.isinf().unsqueeze(-1), torch.empty_like(o), o), lse),  # left as memory was
    "positions": lambda o, lse: (o, lse),  # which are not passed on
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_hold_is_named(name: str) -> None:
    def attend(*given: Any, return_lse: bool = False, **more: Any) -> Any:
        if name == "positions":
            more.pop("q_pos", None)
        o, lse = CHANGES[name](*masked(*given, return_lse=True, **more))
        return (o, lse) if return_lse else o

    wrong = {"poison", *name.split()}
    report = check_implementation(attend, shapes=[Shape(2, 8, 8, None)])
    assert {finding.behavior for finding in report.findings if finding.holds is False} == wrong, str(report)
    assert not report.holds


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

    varied = check_implementation(refuses, claims=["positions", "scale", "layouts"])
    facts = {finding.behavior: finding.details.partition("float32, ")[2] for finding in varied.findings if finding.holds is False}
    assert {name: words.partition(" [")[0].partition(" (")[0] for name, words in facts.items()} == {
        "positions": "q_pos", "scale": "scale 0.0)", "layouts": "k with strides",
    }  # fmt: skip
    lines = str(check_implementation(refuses, claims=["blocks", "lse"])).splitlines()
    assert len(lines) == 1 + len(BEHAVIORS)
    assert lines[1].split(maxsplit=5)[:4] == ["blocks", "does", "not", "hold"]
    assert "ValueError: takes 16 heads alone and more (h3-16x24-ranges, float32)" in lines[1]
    assert lines[3].split() == ["gradients", "not", "claimed", *BEHAVIORS["gradients"].what.split()]


def test_an_unknown_claim_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"claims is \['speed'\]"):
        check_implementation(masked, claims=["blocks", "speed"])
