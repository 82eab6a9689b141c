"""Packed batches for tests, and a reference that runs each sequence by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, decisions, selection_attention_varlen
from nsa_sel.oracle import oracle_backward, oracle_forward, oracle_mask
from nsa_sel.testing import dense_attention
from tests.helpers.cases import assert_within_twice_baseline, gradient_terms, make_blocks, make_spans


class Packed(NamedTuple):
    """Concatenated sequences, and padding after the last."""

    q: Tensor  # [rows,G,h,Dk]
    k: Tensor  # [keys,G,Dk]
    v: Tensor  # [keys,G,Dv]
    selection: Selection
    cu_q: list[int]
    cu_k: list[int]

    def each(self) -> list[tuple[slice, slice]]:
        """The rows and the keys of every sequence."""
        return [
            (slice(*self.cu_q[i : i + 2]), slice(*self.cu_k[i : i + 2]))  # type: ignore[misc]
            for i in range(len(self.cu_q) - 1)
        ]

    def ranges(self) -> Tensor:
        """[rows,G,n,2]"""
        return self.selection.ranges.reshape(-1, *self.selection.ranges.shape[2:])


def tensors(packed: Packed) -> dict[str, Any]:
    cu_q, cu_k = torch.tensor(packed.cu_q), torch.tensor(packed.cu_k, dtype=torch.int32)
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": None if packed.cu_q == packed.cu_k else cu_k}


def hide_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may not read tensors of bounds, as on a GPU."""
    monkeypatch.setattr("nsa_sel.core.arguments._readable", lambda bounds: False)


def bounds(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def pack(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    block_size: int | None = 16,
    n: int = 3,
    G: int = 1,
    h: int = 2,
    Dk: int = 16,
    Dv: int = 24,
    spare: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Packed:
    """Sequences of these lengths and `spare` rows and keys of padding. Every row selects blocks as a model would, or, for block_size None,
    spans, which may end after its sequence."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    generator = torch.Generator().manual_seed(seed)
    T, Tk = sum(lengths_q) + spare, sum(lengths_k) + spare
    shapes = (T, G, h, Dk), (Tk, G, Dk), (Tk, G, Dv)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)
    ranges = []
    for i, (rows, keys) in enumerate(zip((*lengths_q, spare), (*lengths_k, spare), strict=True)):
        keys = max(rows, keys, 4 * (block_size or 1))
        if block_size is None:
            ranges.append(make_spans("few", 1, rows, G, keys, keys // 2, seed=seed + i).flatten(0, 1))
        else:
            ranges.append(make_blocks(1, rows, G, keys, n, block_size, seed=seed + i).ranges.flatten(0, 1))
    selection = Selection(torch.cat(ranges)[None].to(device), block_size)
    return Packed(q, k, v, selection, bounds(lengths_q), bounds(lengths_k))


def attend_varlen(backend: str, packed: Packed, *inputs: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """o and lse of `backend`, forced, for inputs q, k, v instead of packed's own; the recorded decision must name it."""
    q, k, v = inputs or packed[:3]
    cu_k = None if packed.cu_k == packed.cu_q and len(q) == len(k) else packed.cu_k
    options = {"cu_seqlens_q": packed.cu_q, "cu_seqlens_k": cu_k, **options}
    o, lse = selection_attention_varlen(q, k, v, packed.selection, return_lse=True, backend=backend, **options)  # type: ignore[arg-type]
    decision = decisions()[-1]
    assert decision.forward == backend
    assert decision.backward == (backend if decision.request.needs_grad else None)
    return o, lse


def check_varlen(backend: str, packed: Packed, **options: object) -> None:
    """Forward and backward of every sequence match the oracle; padding gets zeros."""
    q, k, v = (x.detach().requires_grad_() for x in packed[:3])
    o, lse = attend_varlen(backend, packed, q, k, v, **options)
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, generator=generator).to(o.dtype).to(o.device)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.dtype).to(o.device).masked_fill(lse.detach() == -torch.inf, 0.0)
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    check_sequences(packed, (o.detach(), lse.detach()), (dq, dk, dv), do, dlse)


def check_sequences(packed: Packed, outputs: tuple[Tensor, Tensor], gradients: tuple[Tensor, ...], do: Tensor, dlse: Tensor) -> None:
    """Compare o, lse [rows,...] and dq, dk, dv with the oracle and the baseline of each sequence."""
    (o, lse), ranges = outputs, packed.ranges()
    assert (o.dtype, lse.dtype) == (packed.q.dtype, torch.float32)
    exact = [torch.zeros(x.shape, dtype=torch.float64) for x in (o, *gradients)]
    plain = [torch.zeros_like(x) for x in (o, *gradients)]
    exact.append(torch.full(lse.shape, -torch.inf, dtype=torch.float64))
    plain.append(torch.full_like(lse, -torch.inf))
    terms = [0.0] * 3
    for rows, keys in packed.each():
        if rows.stop == rows.start or keys.stop == keys.start:
            continue
        q = packed.q[rows][None].detach().requires_grad_()
        k, v = (x[keys].transpose(0, 1)[None].detach().requires_grad_() for x in packed[1:3])
        of_rows, own, grads = ranges[rows][None], (q, k, v), (do[rows][None], dlse[rows][None])
        found = [oracle_forward(*own, of_rows), oracle_backward(*own, of_rows, *grads)]
        o_, lse_ = dense_attention(*own, of_rows)
        found += [(o_, lse_), torch.autograd.grad((o_, lse_.masked_fill(lse_ == -torch.inf, 0.0)), own, grads)]
        for into, (forward, backward) in ((exact, found[:2]), (plain, found[2:])):
            into[0][rows], into[4][rows], into[1][rows] = forward[0][0].detach(), forward[1][0].detach(), backward[0][0]
            into[2][keys], into[3][keys] = (x[0].transpose(0, 1) for x in backward[1:])
        terms = [max(pair) for pair in zip(terms, gradient_terms(*(x.detach() for x in own), grads[0], None), strict=True)]
    got, allowed = (o, *gradients, lse), (0.0, *terms, 0.0)
    for name, mine, true, baseline, term in zip(("o", "dq", "dk", "dv", "lse"), got, exact, plain, allowed, strict=True):
        assert_within_twice_baseline(mine, true, baseline, name, term)
    unseen, row = ~seen_keys(packed), packed.cu_q[-1]
    for x in (o[row:], gradients[0][row:], gradients[1][unseen], gradients[2][unseen]):
        assert int(torch.count_nonzero(x)) == 0


def seen_keys(packed: Packed) -> Tensor:
    """[keys,G] bool: whether any row of the key's own sequence attends to it."""
    seen = torch.zeros(packed.k.shape[:2], dtype=torch.bool)
    for rows, keys in packed.each():
        mask = oracle_mask(packed.ranges()[rows][None].cpu(), keys.stop - keys.start, rows.stop - rows.start)
        seen[keys] = mask[0].any(0).T
    return seen.to(packed.k.device)
