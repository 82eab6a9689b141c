"""Edge cases of the Triton backends in the interpreter: the contract's cells of edges and poison, and what flags and scales change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_sel.selection import Selection
from tests.contract.attend import EDGES, cells, run
from tests.contract.lanes import Lane
from tests.helpers.cases import assert_forward, edge_selections, make_blocks, make_call, make_qkv
from tests.helpers.parity import attend, check_both, check_forward
from tests.helpers.poison import put, selected

pytestmark = pytest.mark.slow  # in all: the interpreter knows no threads
BACKENDS = ("triton-group", "triton-token")
BLOCKS = ("triton-tile", "triton-block")  # of whole blocks alone
TRITON = (*BACKENDS, *BLOCKS)
ALL_BACKENDS = ("sdpa-packed", "numba", *TRITON)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("S", [1, 3])
def test_one_range_a_row_takes_the_path_that_the_flag_names(
    backend: str, S: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nsa_sel.backends._triton import arguments

    q, k, v = make_qkv(S=S, G=1, h=2, Dk=8, Dv=16, S_kv=20)
    one = Selection.from_ranges(edge_selections(1, S, 1, 20)["one_contiguous"])
    walks, width = [], arguments.walk_width
    monkeypatch.setattr(arguments, "walk_width", lambda call: walks.append(width(call)) or walks[-1])
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    caplog.set_level("INFO", "nsa_sel")
    for flag, path, walk in (("dense", "dense", 1), ("auto", "dense", 1), ("varlen", "varlen", 2)):
        monkeypatch.setenv("NSA_SEL_TRITON_FORCE_PATH", flag)
        check_both(backend, q, k, v, one)
        events = [record.nsa_sel for record in caplog.records if record.getMessage() == "sel.triton.kernel"]
        assert {event["path"] for event in events if not event["kernel"].endswith("/dkdv")} == {path}
        assert {event["path"] for event in events if event["kernel"].endswith("/dkdv")} == {"varlen"}
        assert set(walks) == {walk}
        caplog.clear()
        walks.clear()


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_rows_without_keys_have_no_gradient_whatever_comes_in(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(S=4, G=1, h=2, Dk=16, S_kv=40))
    indices = torch.tensor([[0, 1], [-1, -1], [1, 0], [-1, -1]]).int()
    o, lse = attend(backend, q, k, v, Selection.from_blocks(indices[None, :, None], 16))
    dlse = torch.zeros_like(lse)
    dlse[:, 1::2] = float("nan")  # as from logsumexp over branches that are all -inf
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), dlse))
    assert int(torch.count_nonzero(dq[:, 1::2])) == 0
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))


def test_blocks_that_straddle_kv_tiles_take_little_room() -> None:
    q, k, v = make_qkv(S=4, G=1, h=1, Dk=16, S_kv=3000)
    assert make_call(q, k, v, make_blocks(1, 4, 1, 3000, 64, 24)).reach(64) == 2


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_block_of_hugely_negative_logits_counts_for_nothing(backend: str) -> None:
    q, k, v = make_qkv(S=2, G=1, h=2, Dk=16, S_kv=48)
    k[:, :, :16], k[:, :, 16:32] = k[:, :, :16].abs(), -k[:, :, 16:32].abs()
    q = q.abs() * 1e32
    selection = Selection.from_blocks(torch.tensor([0, 1]).int().expand(1, 2, 1, 2), 16)
    check_forward(backend, q, k, v, selection)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("scale", [0.0, -0.5, 1e4, 1e9])
def test_poison_matrix_rows_that_see_nothing_of_the_first_block(backend: str, scale: float) -> None:
    """Rows of one tile: of the first block that some of them select, others see nothing, and one sees nothing at all."""
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=16, S_kv=40)
    selection = Selection.from_blocks(torch.tensor([[0, 1], [1, -1], [2, -1], [2, 0]]).int()[None, :, None], 16)
    q_pos = torch.tensor([3, 20, 39, 33])
    mask = selected(selection, q, k, q_pos)
    q[:, 2] = float("nan")
    q_pos[2] = 15
    mask[:, 2] = False
    o, lse = attend(backend, q, k, v, selection, q_pos=q_pos, scale=scale)
    clean = put(q, ~mask.any(-1), 0.0)
    assert_forward((o, lse), clean, k, v, selection.ranges, scale, q_pos)


@cells("interpreter", only=EDGES)
def test_triton_sel_edge_cases(behavior: str, lane: Lane, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(behavior, lane, what, monkeypatch)
