"""Small calls of the public function on a CPU, and what was decided for them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import nsa_sel
from nsa_sel.core.decision import Decision
from tests.helpers.cases import assert_forward, make_qkv, make_spans

PINNED = """
provenance: "the order of the tests, whatever the CPU profile says"
runtime:
  sel_triton_min_L: 4096
  prefer_forward: [sdpa-packed, numba, triton-group, triton-token]
  prefer_backward: [sdpa-packed, numba, triton-group, triton-token]
"""


def last() -> Decision:
    return nsa_sel.decisions()[-1]


def check(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, **options: Any) -> None:
    """o and lse of the public call against the oracle."""
    assert_forward(nsa_sel.selection_attention(q, k, v, ranges, return_lse=True, **options), q, k, v, ranges, **options)


def problem(**options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = make_qkv(2, 12, 2, 3, 16, 24, S_kv=40, **options)
    return q, k, v, make_spans("mixed", 2, 12, 2, 40, L=18)


def call_forced(monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    if source == "NSA_SEL_BACKEND":
        monkeypatch.setenv(source, name)
        nsa_sel.selection_attention(*problem())
    elif source == "use_backend":
        with nsa_sel.use_backend(name):
            nsa_sel.selection_attention(*problem())
    else:
        nsa_sel.selection_attention(*problem(), backend=name)
