"""The bench of FlashInfer's decoding: what it asks of FlashInfer, and its check."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nsa_sel.bench.core import store
from nsa_sel.bench.core.parity import WrongResult
from nsa_sel.bench.questions import decoding_peers
from tests.helpers.paths import ROOT

ROWS = store.read(ROOT / "bench" / "results" / "h200" / "profiles" / "decoding_peers.jsonl")
B, PAGES, PAGE, G, H, D = 2, 3, 4, 2, 3, 8


@pytest.mark.parametrize("at_once", [PAGES * PAGE, B * PAGES * PAGE])
def test_an_output_is_held_to_sdpa_over_the_pages_in_order(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_peers, "KEYS_CHECKED_AT_ONCE", at_once)
    torch.manual_seed(0)
    q, k, v = torch.randn(B, G * H, D), *torch.randn(2, B * PAGES, PAGE, G, D)
    block_table = torch.randperm(B * PAGES).view(B, PAGES).int()
    expected = torch.empty_like(q)
    for b in range(B):
        for head in range(G * H):
            keys, values = (torch.cat([x[page, :, head // H] for page in block_table[b]]) for x in (k, v))
            expected[b, head] = (q[b, head] @ keys.T / D**0.5).softmax(-1) @ values
    assert decoding_peers.beside_sdpa(expected, q, (k, v), block_table) < 1e-6
    with pytest.raises(WrongResult, match="o is"):
        decoding_peers.beside_sdpa(expected, q, (k, v), block_table.flip(0))


def test_flashinfer_is_planned_for_one_token_after_full_pages() -> None:
    """By its documented arguments: page numbers in a row, where each sequence's begin, and how full its last page is."""
    plans: list[tuple[object, ...]] = []

    class Wrapper:
        def __init__(self, *_: object, **options: object) -> None:
            assert options["use_cuda_graph"] is options["use_tensor_cores"] is True

        def plan(self, *sizes: object, **dtypes: object) -> None:
            assert set(dtypes.values()) == {torch.bfloat16}
            plans.append(sizes)

    block_table = torch.tensor([[4, 0, 2], [1, 5, 3]], dtype=torch.int32)
    decoding_peers.planned(SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper), block_table, PAGE, G * H, G, D)
    ((indptr, pages, last, *sizes),) = plans
    assert [x.tolist() for x in (indptr, pages, last)] == [[0, 3, 6], [4, 0, 2, 1, 5, 3], [PAGE, PAGE]]
    assert sizes == [G * H, G, D, PAGE]


def test_the_table_puts_whole_steps_in_bf16_beside_them() -> None:
    peers = [{"B": 1, "S_kv": 16384, "ms_median": ms, "floor_ms": 0.008} for ms in (0.9, 0.02)] + [
        {"B": 64, "S_kv": 65536, "ms_median": 2.0, "floor_ms": 1.9}
    ]
    steps = [
        {"B": 1, "S_kv": 16384, "part": part, "kv": kv, "ms_median": ms}
        for part, kv, ms in (("dense", "bf16", 0.014), ("whole", "bf16", 0.04), ("whole", "fp8", 0.03), ("choose", "bf16", 0.01))
    ]
    lines = decoding_peers.table(peers, steps).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert cells == [["1", "16k", "20.0 (8.0)", "14.0", "40.0", "0.50x"], ["64", "64k", "2000.0 (1900.0)", "-", "-", "-"]]


def test_committed_rows_were_right_and_read_at_the_bandwidth_of_a_copy() -> None:
    rows = {(row["B"], row["S_kv"]): row for row in ROWS}
    assert set(rows) == {(B, 1024 * k) for B in (1, 16, 64, 256) for k in (16, 32, 64, 128)}
    for (batch, _), row in rows.items():
        assert row["mae"] < 1e-4
        assert row["ms_median"] < row["floor_ms"] * (1.1 if batch > 1 else 2)
