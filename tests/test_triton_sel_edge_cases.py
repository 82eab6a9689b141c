"""Edge cases of the Triton backends in the interpreter: empty, inverted, padded and poisoned inputs, short sequences, reruns."""

from __future__ import annotations

import json
import math

import pytest
import torch

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.core.call import device_info
from nsa_sel.oracle import oracle_forward
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.cases import assert_forward, edge_block_lists, edge_selections, make_blocks, make_call, make_grads, make_qkv
from tests.helpers.parity import attend, check_both, check_deterministic, check_forward, check_poison
from tests.helpers.poison import check_empty_rows, check_one_row, new_memory_is_nan, put, rows_with_holes, selected, through

pytestmark = pytest.mark.slow  # in all: the interpreter knows no threads
BACKENDS = ("triton-group", "triton-token")
BLOCKS = ("triton-tile", "triton-block")  # of whole blocks alone
TRITON = (*BACKENDS, *BLOCKS)
ALL_BACKENDS = ("sdpa-packed", "numba", *TRITON)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("edge", sorted(edge_selections(1, 2, 1, 16)))
def test_edges(backend: str, edge: str) -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=8, Dv=16, S_kv=20)
    check_both(backend, q, k, v, Selection.from_ranges(edge_selections(1, 4, 1, 20)[edge]))


@pytest.mark.parametrize("backend", BLOCKS)
@pytest.mark.parametrize("edge", sorted(edge_block_lists(1, 2, 1, 64, 16)))
def test_edges_of_block_lists(backend: str, edge: str) -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=8, Dv=16, S_kv=70)
    check_both(backend, q, k, v, Selection.from_blocks(edge_block_lists(1, 4, 1, 70, 16)[edge], 16))


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


def events_on(stderr: str) -> list[dict[str, str]]:
    return [line for line in map(json.loads, stderr.splitlines()) if line["event"].startswith("sel.triton.")]


@pytest.mark.parametrize("flags", [("NSA_DEBUG_LOG",), ("NSA_DEBUG_TIMING", "NSA_DEBUG_COMPARE")])
def test_any_flag_that_asks_for_events_shows_each_kernel(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=8, Dv=16, S_kv=20, requires_grad=True)
    for flag in flags:
        monkeypatch.setenv(flag, "1")
    nsa_sel.selection_attention(q, k, v, edge_selections(1, 3, 1, 20)["one_contiguous"], backend="triton-group").sum().backward()
    kernels = [("sel.triton.kernel", f"triton-group/{name}") for name in ("decode", "dq", "dkdv")]
    found = [(line["event"], line.get("kernel")) for line in events_on(capsys.readouterr().err)]
    assert found == [kernels[0], ("sel.triton.reads", None), *kernels[1:], ("sel.triton.bwd", None)]


def test_events_name_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All block sizes, what triton-group changes of the config (one step needs two stages, 80 heads are two tiles of 64), and flags."""
    q, k, v = (x.half() for x in make_qkv(S=1, G=1, h=80, Dk=24, Dv=8, S_kv=20))
    one = Selection.from_ranges(edge_selections(1, 1, 1, 20)["one_contiguous"])
    monkeypatch.setenv("NSA_DEBUG_LOG", "1")

    def event() -> dict[str, str]:
        nsa_sel.selection_attention(q, k, v, one, backend="triton-group")
        return events_on(capsys.readouterr().err)[0]

    committed = settings_for(device_info(torch.device("cpu"))).kernel("triton-group/decode")
    assert (committed.block_l, committed.rows, committed.num_stages) == (64, 16, 3)
    found = event()
    assert found["config"] == f"triton-group/decode:pointer-L64-R64-w{committed.num_warps}-s2-D32-DV16"
    assert (found["chosen"], found["source"]) == (committed.config_id("triton-group/decode"), "base.yaml")
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_DV", "64")
    found = event()
    assert (found["config"][-9:], found["source"]) == ("-D32-DV64", "environment")
    monkeypatch.delenv("NSA_SEL_TRITON_BLOCK_DV")
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_L", "32")
    monkeypatch.setenv("NSA_SEL_TRITON_DB", "0")
    found = event()
    assert (found["config"], found["source"]) == (f"triton-group/decode:pointer-L32-R64-w{committed.num_warps}-s1-D32-DV16", "environment")


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_narrower_than_head_dims_are_widened_with_one_warning(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_sel.backends._triton import arguments

    arguments.dims.cache_clear()
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=40, Dv=24, S_kv=20)
    one = Selection.from_ranges(edge_selections(1, 3, 1, 20)["one_contiguous"])
    wanted = nsa_sel.selection_attention(q, k, v, one, backend=backend)
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_D", "32")
    with pytest.warns(RuntimeWarning, match=r"BLOCK_D is 32, but .* Dk = 40 in one tile.*set it to 64 or more") as told:
        found = [nsa_sel.selection_attention(q, k, v, one, backend=backend) for _ in range(2)]
    assert all(torch.equal(o, wanted) for o in found)
    assert len(told) == 1


@pytest.mark.parametrize("backend", TRITON)
def test_fewer_keys_than_blocks(backend: str) -> None:
    q, k, v = make_qkv(S=5, G=1, h=2, Dk=16)
    check_both(backend, q, k, v, make_blocks(1, 5, 1, 5, 4, 16))


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_anywhere_in_a_block_list(backend: str) -> None:
    indices = torch.tensor([[-1, 2, -1, 0], [0, 1, 2, -1], [-1, -1, -1, -1], [2, -1, -1, 1]], dtype=torch.int32)
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=16, S_kv=44)
    check_both(backend, q, k, v, Selection.from_blocks(indices[None, :, None], 16))


@pytest.mark.parametrize("backend", TRITON)
def test_unselected_and_future_keys_are_never_used(backend: str) -> None:
    q, k, v = make_qkv(S=3, G=1, h=3, Dk=16, S_kv=90)
    check_poison(backend, q, k, v, Selection.from_blocks(torch.tensor([0, 4]).int().expand(1, 3, 1, 2), 16))
    # Row 1 alone selects its own block, and has a position in its midst: what follows in that block belongs to nobody.
    lone = torch.tensor([[0, -1], [5, 0], [0, 1]]).int()
    check_poison(backend, q, k, v, Selection.from_blocks(lone[None, :, None], 16))
    if backend in BACKENDS:
        check_poison(backend, q, k, v, Selection.from_ranges(torch.tensor([[1, 3], [40, 59]]).int().expand(1, 3, 1, 2, 2)))
    later = torch.cat((k, torch.full_like(k, float("nan"))), 2), torch.cat((v, torch.full_like(v, float("nan"))), 2)
    positions = torch.arange(87, 90)
    selection = make_blocks(1, 3, 1, 90, 3, 16)
    clean, _ = attend(backend, q, k, v, selection)
    assert torch.equal(clean, attend(backend, q, *later, selection, q_pos=positions)[0])


@pytest.mark.parametrize("backend", TRITON)
def test_keys_after_unordered_positions_are_never_used(backend: str) -> None:
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=16, S_kv=160)
    indices = torch.tensor([[0, 1], [2, 0], [1, 0]]).int()
    check_poison(backend, q, k, v, Selection.from_blocks(indices[None, :, None], 16), q_pos=torch.tensor([150, 36, 20]))


@pytest.mark.parametrize("backend", TRITON)
def test_a_position_far_below_the_first_key_sees_nothing(backend: str) -> None:
    """A GPU's positions are not checked, and 32 bits do not hold this one."""
    q, k, v = make_qkv(S=2, G=1, h=2, Dk=8, S_kv=20)
    call = make_call(q, k, v, make_blocks(1, 2, 1, 20, 2, 16), q_pos=torch.tensor([19, 0]))
    call.q_pos = torch.tensor([[19, -(2**62)]])
    o, lse = registry.load(backend).forward(call)
    assert not bool(o[:, 1].any())
    assert bool((lse[:, 1] == -math.inf).all())
    dq, _, dv = registry.load(backend).backward(call, o, lse, torch.ones_like(o), None)
    assert not bool(dq[:, 1].any())
    torch.testing.assert_close(dv.sum(), torch.tensor(2.0 * 8))  # weights of the other row's heads alone


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


@pytest.mark.parametrize("backend", TRITON)
def test_one_range_of_one_row_of_many_pairs(backend: str) -> None:
    """Programs hold far more lanes than there are entries: none of them may read past the plan."""
    q, k, v = make_qkv(B=2, S=1, G=2, h=1, Dk=16, S_kv=70)
    check_both(backend, q, k, v, make_blocks(2, 1, 2, 70, 1, 16))


def test_blocks_that_straddle_kv_tiles_take_little_room() -> None:
    q, k, v = make_qkv(S=4, G=1, h=1, Dk=16, S_kv=3000)
    assert make_call(q, k, v, make_blocks(1, 4, 1, 3000, 64, 24)).reach(64) == 2


@pytest.mark.parametrize("backend", TRITON)
def test_reruns_are_bit_equal(backend: str) -> None:
    q, k, v = make_qkv(S=5, G=1, h=2, Dk=16, S_kv=64)
    check_deterministic(backend, q, k, v, make_blocks(1, 5, 1, 64, 3, 16), reruns=2)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_a_block_of_hugely_negative_logits_counts_for_nothing(backend: str) -> None:
    q, k, v = make_qkv(S=2, G=1, h=2, Dk=16, S_kv=48)
    k[:, :, :16], k[:, :, 16:32] = k[:, :, :16].abs(), -k[:, :, 16:32].abs()
    q = q.abs() * 1e32
    selection = Selection.from_blocks(torch.tensor([0, 1]).int().expand(1, 2, 1, 2), 16)
    check_forward(backend, q, k, v, selection)


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_poison_matrix(backend: str) -> None:
    """Rows that select nothing, whatever they hold; a row that selects something spoils no other."""
    q, k, v = make_qkv(S=8, G=1, h=2, Dk=16, Dv=24, S_kv=90)
    selection, row = rows_with_holes(1, 8, 1, 90, 16, 2)
    run, mask = through(backend, selection), selected(selection, q, k)
    check_empty_rows(run, q, k, v, mask, dict.fromkeys(("nan", "inf", "huge"), ("all",)))
    check_one_row(run, q, k, v, mask, row, ("nan", "huge"))


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(backend, marks=[pytest.mark.thorough] * (backend == "triton-token"))  # to which ranges of any length are alike
        for backend in TRITON
        if registry.backends()[backend].limits.takes_block(4)
    ],
)
def test_poison_matrix_of_small_blocks(backend: str) -> None:
    """Several in a step and a tile. Two rows select a block that is in the future, of a tile of which they see some."""
    q, k, v = make_qkv(S=8, G=1, h=2, Dk=16, S_kv=106)
    selection, row = rows_with_holes(1, 8, 1, 106, 4, 2)
    selection.ranges[:, :2, :, 0] = torch.tensor([104, 108])
    run, mask = through(backend, selection), selected(selection, q, k)
    check_empty_rows(run, q, k, v, mask, dict.fromkeys(("nan", "inf", "huge"), ("all",)))
    check_one_row(run, q, k, v, mask, row, ("nan", "huge"))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_poison_matrix_padding_of_packed_sequences(backend: str) -> None:
    """Rows behind the last sequence, in the tile of its last rows: uninitialized memory."""
    q, k, v = (x[0].transpose(0, 1) if i else x[0] for i, x in enumerate(make_qkv(S=9, G=1, h=2, Dk=16)))
    do, _ = make_grads(q, v)
    do[7:] = float("nan")
    results = []
    for padding in (0.0, float("nan")):
        inputs = [torch.cat((x[:7], torch.full_like(x[7:], padding))).requires_grad_() for x in (q, k, v)]
        selection = Selection.from_blocks(torch.tensor([0, -1]).int().expand(9, 1, 2), 16)
        with new_memory_is_nan():
            o = nsa_sel.selection_attention_varlen(*inputs, selection, [0, 3, 7], backend=backend)
            results.append((o.detach(), *torch.autograd.grad(o, inputs, do)))
        assert nsa_sel.decisions()[-1].forward == nsa_sel.decisions()[-1].backward == backend
        assert all(int(torch.count_nonzero(x[7:])) == 0 for x in results[-1])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


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


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_products_above_the_largest_float16(backend: str) -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=16, S_kv=40, dtype=torch.float16)
    selection = make_blocks(1, 4, 1, 40, 2, 16)
    o, _ = attend(backend, 500 * q, 500 * k, v, selection)
    assert torch.allclose(o.double(), oracle_forward(500 * q, 500 * k, v, selection.ranges)[0], rtol=1e-2, atol=1e-2)
