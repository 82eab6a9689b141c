"""Sliding windows of packed batches against a call for each sequence: by sequences, by chunks under masks, and by the Triton kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nsa_sel import sliding_window_attention, window_kernels
from nsa_sel.backends import window_triton
from nsa_sel.backends._window import packed
from nsa_sel.core.arguments import Bounds
from tests.api.test_layer_varlen import CU, SPARE, T, batch, random, rows
from tests.helpers.calls import each_of, refused
from tests.helpers.varlen_cases import hide_bounds


def each_window(q: Tensor, k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """o and lse by a call for each sequence; zeros and -inf for padding."""
    o, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), torch.full(q.shape[:3], -math.inf)
    for own in rows():
        if own.stop > own.start:
            found = sliding_window_attention(q[own][None], batch(k[own]), batch(v[own]), size, return_lse=True)
            o[own], lse[own] = (x[0] for x in found)
    return o, lse


def window_results(o: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    return o.detach(), *torch.autograd.grad(o, inputs, do)


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("how", ["list", "unreadable"])
def test_windows_end_where_their_sequence_begins(how: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sequences, and by chunks under masks; NaN in padding reaches nothing."""
    inputs = random((T, 2, 3, 16), (T, 2, 16), (T, 2, 24))
    expected, expected_lse = each_window(*inputs, size)
    wanted = window_results(expected, inputs)
    with torch.no_grad():
        for x in inputs:
            x[CU[-1] :] = math.nan
    bounds: Any = CU
    if how != "list":
        hide_bounds(monkeypatch)
        monkeypatch.setattr(packed, "_ROWS", 30)
        bounds = torch.tensor(CU)
    o, lse = sliding_window_attention(*inputs, size, cu_seqlens=bounds, return_lse=True)
    close = {"rtol": 0, "atol": 0} if how == "list" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(lse, expected_lse, **close)
    for mine, right in zip(window_results(o, inputs), wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    if how == "list":
        only_o = sliding_window_attention(*inputs, size, cu_seqlens=bounds)
        torch.testing.assert_close(only_o, expected, rtol=1e-5, atol=1e-5)


def test_a_window_over_nothing_but_padding() -> None:
    inputs = random((9, 1, 2, 16), (9, 1, 16), (9, 1, 16))
    for found in window_results(sliding_window_attention(*inputs, 4, cu_seqlens=[0, 0, 0]), inputs):
        assert not found.any()


def test_the_first_key_of_every_row() -> None:
    first = packed.first_keys(Bounds.of("cu_seqlens", CU, T, torch.zeros(1)), torch.zeros(1, T), 7)
    wanted = [max(own.start, row - 6) for own in rows() for row in range(own.start, own.stop)]
    assert first.tolist() == wanted + [T] * SPARE


@pytest.mark.parametrize(("size", "h"), [(1, 2), (6, 3), (100, 16)])
@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_packed_windows_by_kernels_are_those_of_chunks(size: int, h: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter; NaN in padding reaches nothing, gradients included."""
    inputs = random((T, 1, h, 16), (T, 1, 16), (T, 1, 24))
    small = {"block_l": 16, "rows": 32}
    monkeypatch.setattr(window_triton, "config_of", lambda call, kernel: replace(window_triton.CONFIGS[kernel], **small))
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(window_kernels, "takes", lambda q, v, kernels=kernels: kernels)
        o, lse = sliding_window_attention(*inputs, size, cu_seqlens=CU, return_lse=True)
        found.append((lse.detach(), *window_results(o, inputs)))
        with torch.no_grad():
            for x in inputs:
                x[CU[-1] :] = math.nan
    for mine, right in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


WRONG_WINDOWS = [
    ({"q": lambda q: q[None]}, ("q is of shape", "[T,G,h,Dk]", "q.squeeze(0)")),
    ({"k": lambda k: k[1:], "v": lambda v: v[1:]}, ("k is of 61 keys", "q's 62 rows")),
    ({"v": lambda v: v[:, :1]}, ("v is of shape", "[Tk=62, G=2, D]")),
    ({"k": lambda k: k.half()}, ("k is of dtype torch.float16", "call k.to(q.dtype)")),
    ({"cu_seqlens": [0, 63]}, ("cu_seqlens is 63 last", "at most 62")),
    ({"window": 0}, ("window is 0",)),
    ({"scale": math.inf}, ("scale is inf",)),
]  # fmt: skip


@each_of(WRONG_WINDOWS)
def test_wrong_windows(changes: dict[str, Any], fragments: tuple[str, ...]) -> None:
    q, k, v = random((T, 2, 3, 16), (T, 2, 16), (T, 2, 24))
    refused(sliding_window_attention, {"q": q, "k": k, "v": v, "window": 7, "cu_seqlens": CU}, changes, fragments)
