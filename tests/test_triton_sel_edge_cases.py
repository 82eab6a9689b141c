"""Edge cases of the Triton backends in the interpreter: empty, inverted, padded and poisoned inputs, short sequences, reruns."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.selection import Selection
from tests.cases import edge_selections, make_blocks, make_qkv
from tests.parity import attend, check_both, check_deterministic, check_forward, check_poison
from tests.poison import POISONS, check_empty_rows, check_one_row, selected, through

pytestmark = pytest.mark.slow  # in all: the interpreter knows no threads
BACKENDS = ("triton-group", "triton-token")
ALL_BACKENDS = ("sdpa-packed", "numba", *BACKENDS, "triton-tile", "triton-block")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edge", sorted(edge_selections(1, 2, 1, 16)))
def test_edges(backend: str, edge: str) -> None:
    q, k, v = make_qkv(B=1, S=6, G=2, h=2, Dk=8, Dv=16, S_kv=20)
    check_both(backend, q, k, v, Selection.from_ranges(edge_selections(1, 6, 2, 20)[edge]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("S", [1, 6])
def test_one_range_a_row_takes_the_path_that_the_flag_names(
    backend: str, S: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nsa_sel.backends._triton import launch

    q, k, v = make_qkv(B=1, S=S, G=2, h=2, Dk=8, Dv=16, S_kv=20)
    one = Selection.from_ranges(edge_selections(1, S, 2, 20)["one_contiguous"])
    walks, width = [], launch.walk_width
    monkeypatch.setattr(launch, "walk_width", lambda call: walks.append(width(call)) or walks[-1])
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_block_of_hugely_negative_logits_counts_for_nothing(backend: str) -> None:
    q, k, v = make_qkv(S=2, G=1, h=2, Dk=16, S_kv=48)
    k[:, :, :16], k[:, :, 16:32] = k[:, :, :16].abs(), -k[:, :, 16:32].abs()
    q = q.abs() * 1e32
    selection = Selection.from_blocks(torch.tensor([0, 1]).int().expand(1, 2, 1, 2), 16)
    check_forward(backend, q, k, v, selection)


def poison_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Selection]:
    """Rows at 81 to 89 of 90 keys in blocks of 16: the first, one in between and the last, as padding, select nothing, and nobody selects
    blocks 2 and 3. Row 4 alone selects the block that the causal clamp cuts; it sees keys 80 to 85 of it."""
    blocks = torch.tensor([[-1, -1], [0, 1], [4, 0], [-1, -1], [5, -1], [1, 4], [0, 4], [1, -1], [-1, -1]])
    q, k, v = make_qkv(S=9, G=1, h=2, Dk=16, Dv=24, S_kv=90)
    return q, k, v, Selection.from_blocks(blocks[None, :, None].int(), 16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of the interpreter, for what NaN and infinity give
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize(("poison", "places"), [("nan", ("q", "do", "dlse", "keys")), ("inf", ("all",)), ("huge", ("all",))])
def test_poison_matrix_rows_without_selection(backend: str, poison: str, places: tuple[str, ...]) -> None:
    q, k, v, selection = poison_case()
    check_empty_rows(through(backend, selection), q, k, v, selected(selection, q, k), POISONS[poison], places)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("poison", ["nan", "huge"])
def test_poison_matrix_one_row_spoils_no_other(backend: str, poison: str) -> None:
    q, k, v, selection = poison_case()
    check_one_row(through(backend, selection), q, k, v, selected(selection, q, k), 4, POISONS[poison])
