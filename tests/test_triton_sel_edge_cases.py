"""Edge cases of the Triton backends in the interpreter: empty, inverted, padded and poisoned inputs, short sequences, reruns."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.selection import Selection
from tests.cases import edge_selections, make_blocks, make_qkv
from tests.parity import attend, check_both, check_deterministic, check_poison

pytestmark = pytest.mark.slow  # in all: the interpreter knows no threads
BACKENDS = ("triton-group", "triton-token")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edge", sorted(edge_selections(1, 2, 1, 16)))
def test_edges(backend: str, edge: str) -> None:
    q, k, v = make_qkv(B=1, S=6, G=2, h=2, Dk=8, Dv=16, S_kv=20)
    check_both(backend, q, k, v, Selection.from_ranges(edge_selections(1, 6, 2, 20)[edge]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_keys_than_blocks(backend: str) -> None:
    q, k, v = make_qkv(S=5, G=1, h=2, Dk=16)
    check_both(backend, q, k, v, make_blocks(1, 5, 1, 5, 4, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_anywhere_in_a_block_list(backend: str) -> None:
    indices = torch.tensor([[-1, 2, -1, 0], [0, 1, 2, -1], [-1, -1, -1, -1], [2, -1, -1, 1]], dtype=torch.int32)
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=16, S_kv=44)
    check_both(backend, q, k, v, Selection.from_blocks(indices[None, :, None], 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unselected_and_future_keys_are_never_used(backend: str) -> None:
    q, k, v = make_qkv(S=6, G=1, h=3, Dk=16, S_kv=90)
    check_poison(backend, q, k, v, Selection.from_blocks(torch.tensor([0, 4]).int().expand(1, 6, 1, 2), 16))
    check_poison(backend, q, k, v, Selection.from_ranges(torch.tensor([[1, 3], [40, 59]]).int().expand(1, 6, 1, 2, 2)))
    later = torch.cat((k, torch.full_like(k, float("nan"))), 2), torch.cat((v, torch.full_like(v, float("nan"))), 2)
    positions = torch.arange(84, 90)
    selection = make_blocks(1, 6, 1, 90, 3, 16)
    clean, _ = attend(backend, q, k, v, selection)
    assert torch.equal(clean, attend(backend, q, *later, selection, q_pos=positions)[0])


@pytest.mark.parametrize("backend", [*BACKENDS, "triton-tile", "triton-block"])
def test_keys_after_unordered_positions_are_never_used(backend: str) -> None:
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=16, S_kv=160)
    indices = torch.tensor([[0, 1], [2, 0], [1, 0]]).int()
    check_poison(backend, q, k, v, Selection.from_blocks(indices[None, :, None], 16), q_pos=torch.tensor([150, 36, 20]))


@pytest.mark.parametrize("backend", ["sdpa-packed", "numba", *BACKENDS, "triton-tile", "triton-block"])
def test_rows_without_keys_have_no_gradient_whatever_comes_in(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in make_qkv(S=4, G=1, h=2, Dk=16, S_kv=40))
    indices = torch.tensor([[0, 1], [-1, -1], [1, 0], [-1, -1]]).int()
    o, lse = attend(backend, q, k, v, Selection.from_blocks(indices[None, :, None], 16))
    dlse = torch.zeros_like(lse)
    dlse[:, 1::2] = float("nan")  # as from logsumexp over branches that are all -inf
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), dlse))
    assert int(torch.count_nonzero(dq[:, 1::2])) == 0
    assert all(bool(x.isfinite().all()) for x in (dq, dk, dv))


@pytest.mark.parametrize("backend", [*BACKENDS, "triton-tile", "triton-block"])
def test_one_range_of_one_row_of_many_pairs(backend: str) -> None:
    """Programs hold far more lanes than there are entries: none of them may read past the plan."""
    q, k, v = make_qkv(B=3, S=1, G=3, h=1, Dk=16, S_kv=70)
    check_both(backend, q, k, v, make_blocks(3, 1, 3, 70, 1, 16))


def test_blocks_that_straddle_kv_tiles_take_little_room() -> None:
    from nsa_sel.call import Call, check_call, device_info
    from nsa_sel.config import settings_for

    q, k, v = make_qkv(S=4, G=1, h=1, Dk=16, S_kv=3000)
    checked, device = check_call(q, k, v, make_blocks(1, 4, 1, 3000, 64, 24), None, None), device_info(q.device)
    call = Call(*checked[:4], checked[5], checked[4], settings_for(device), device)
    assert call.reach(64) == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_reruns_are_bit_equal(backend: str) -> None:
    q, k, v = make_qkv(S=8, G=1, h=2, Dk=16, S_kv=64)
    check_deterministic(backend, q, k, v, make_blocks(1, 8, 1, 64, 3, 16), reruns=3)


def test_sums_of_split_blocks_do_not_depend_on_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """dK and dV one (batch, group) pair at a time: the partials are many, the sums the same."""
    import msgspec

    from nsa_sel import attention, config

    q, k, v = make_qkv(B=2, S=8, G=2, h=2, Dk=16, S_kv=48)
    selection = make_blocks(2, 8, 2, 48, 3, 16)
    settings_for = config.settings_for
    monkeypatch.setattr(attention, "settings_for", lambda device: msgspec.structs.replace(settings_for(device), workspace_bytes=400_000))
    check_both("triton-group", q, k, v, selection)
