"""max_seqlen of packed batches: the same results from fewer blocks of scores, where the host can't read the bounds."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import NSAttention, compressed_attention, nsa_attention
from nsa_sel.backends import choose_triton
from nsa_sel.core.arguments import Bounds
from nsa_sel.errors import ArgumentError
from tests.helpers.varlen_cases import hide_bounds

LENGTHS = (5, 0, 1, 14)
BOUNDS = torch.tensor([0, *accumulate(LENGTHS)])
T = int(BOUNDS[-1]) + 20
SIZES: dict[str, Any] = {"compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 3, "first": 1, "local": 1}
C = (T - 8) // 4 + 1


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def test_longest_sequences() -> None:
    like = torch.zeros(1)
    longest = [Bounds(None, BOUNDS, most).longest(T) for most in (None, 0, 1, 14, 16, 17, 1 << 20)]
    assert longest == [T, 1, 1, 16, 16, 32, T], "rounded up to powers of two, so that batches share decisions and kernels"
    assert Bounds.of("cu_seqlens", BOUNDS, T, like, 30).longest(T) == 16, "what the host reads is closer"
    assert Bounds.of("cu_seqlens", [0, 0], T, like, 0).longest(T) == 1


def test_the_search_is_as_wide_as_the_longest_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit the same results. Rows beyond a promise that does not hold choose among the first blocks, and no others change."""
    hide_bounds(monkeypatch)
    widths: list[int] = []
    top_n = choose_triton.ranges
    monkeypatch.setattr(choose_triton, "top_n", lambda scores, *rest: (widths.append(scores.shape[-1]), top_n(scores, *rest)))
    inputs = [x.detach() for x in random((T, 1, 2, 16), (C, 1, 16), (C, 1, 16))]

    def run(**more: Any) -> tuple[Tensor, ...]:
        o, selection, lse = compressed_attention(*inputs, **SIZES, cu_seqlens=BOUNDS, return_lse=True, backend="choose-triton", **more)
        return o, lse, selection.ranges[0]

    wanted, promised, (o, lse, cut) = run(), run(max_seqlen=14), run(max_seqlen=8)
    assert widths == [-(-T // 8), 16 // 8, 8 // 8]
    assert all(torch.equal(a, b) for a, b in zip(promised, wanted, strict=True))
    assert torch.equal(o, wanted[0])
    assert torch.equal(lse, wanted[1])
    position = torch.cat([torch.arange(length) for length in (*LENGTHS, T - int(BOUNDS[-1]))])
    assert torch.equal(cut[position < 8], wanted[2][position < 8])
    assert int(cut.max()) == 8 < int(wanted[2].max())


def test_the_layer_passes_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through nsa_attention and NSAttention; compiled in one graph for all lengths."""
    hide_bounds(monkeypatch)
    torch.manual_seed(0)
    seen: list[int | None] = []
    of = Bounds.of.__func__  # type: ignore[attr-defined]

    def noted(cls: type[Bounds], name: str, bounds: Any, total: int | None, like: Tensor, max_seqlen: int | None = None) -> Bounds:
        if not torch.compiler.is_compiling():
            seen.append(max_seqlen)
        return of(cls, name, bounds, total, like, max_seqlen)  # type: ignore[no-any-return]

    monkeypatch.setattr(Bounds, "of", classmethod(noted))
    layer = NSAttention(10, 1, 2, 4, window=6, **SIZES)
    x = torch.randn(1, T, 10)
    wanted = layer(x, cu_seqlens=BOUNDS)
    assert set(seen) == {None}
    assert torch.equal(layer(x, cu_seqlens=BOUNDS, max_seqlen=14), wanted)
    assert 14 in seen
    inputs = [x.detach() for x in random((T, 1, 2, 4), (C, 1, 4), (C, 1, 4))]
    compiled = torch.compile(compressed_attention, fullgraph=True, backend="eager")
    for most in (15, 17, 30):
        compiled(*inputs, **SIZES, cu_seqlens=BOUNDS, max_seqlen=most)
        assert most in seen
    for call in (lambda: layer(x, max_seqlen=3), lambda: nsa_attention(*random(*[(1, 9, 1, 2, 4)] * 8), max_seqlen=3)):
        with pytest.raises(ArgumentError, match="max_seqlen is 3; allowed: None without cu_seqlens"):
            call()
