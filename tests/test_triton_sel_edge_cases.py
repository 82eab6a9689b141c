"""Edge cases of the Triton backends in the interpreter: the contract's cells of edges and poison, and what flags and scales change."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from nsa_sel import Selection, selection_attention
from nsa_sel.core.call import device_info
from nsa_sel.settings.config import settings_for
from tests.contract.attend import EDGES, cells, run
from tests.contract.lanes import Lane
from tests.helpers.cases import assert_forward, every_key, make_blocks, make_call, make_qkv
from tests.helpers.checks import attend, check_both, check_forward, put, results_of, selected

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
    one = Selection.from_ranges(every_key(1, S, 1, 20))
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


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_huge_value_in_a_block_of_256_keys_stays_with_the_rows_that_see_it() -> None:
    """Its product with do overflows; a row whose position is before it in the same block has the same o, lse and dq as without it."""
    q, k, v = make_qkv(S=2, G=1, h=2, Dk=16, S_kv=300)
    selection, q_pos = Selection.from_blocks(torch.zeros(1, 2, 1, 1).int(), 256), torch.tensor([3, 100])
    clean = results_of("triton-block", q, k, v, selection, q_pos)
    v[:, :, 50] = 3e38
    found = results_of("triton-block", q, k, v, selection, q_pos)
    assert all(torch.equal(x[:, 0], y[:, 0]) for x, y in zip(found[:3], clean[:3], strict=True))


def events_on(stderr: str) -> list[dict[str, str]]:
    return [line for line in map(json.loads, stderr.splitlines()) if line["event"].startswith("sel.triton.")]


@pytest.mark.parametrize("flags", [("NSA_DEBUG_LOG",), ("NSA_DEBUG_TIMING", "NSA_DEBUG_COMPARE")])
def test_any_flag_that_asks_for_events_shows_each_kernel(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    q, k, v = make_qkv(S=3, G=1, h=2, Dk=8, Dv=16, S_kv=20, requires_grad=True)
    for flag in flags:
        monkeypatch.setenv(flag, "1")
    selection_attention(q, k, v, every_key(1, 3, 1, 20), backend="triton-group").sum().backward()
    kernels = [("sel.triton.kernel", f"triton-group/{name}") for name in ("decode", "dq", "dkdv")]
    found = [(line["event"], line.get("kernel")) for line in events_on(capsys.readouterr().err)]
    assert found == [kernels[0], ("sel.triton.reads", None), *kernels[1:], ("sel.triton.bwd", None)]


def test_events_name_the_kernel_that_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All block sizes, what triton-group changes of the config (one step needs two stages, 80 heads are two tiles of 64), and flags."""
    q, k, v = (x.half() for x in make_qkv(S=1, G=1, h=80, Dk=24, Dv=8, S_kv=20))
    one = Selection.from_ranges(every_key(1, 1, 1, 20))
    monkeypatch.setenv("NSA_DEBUG_LOG", "1")

    def event() -> dict[str, str]:
        selection_attention(q, k, v, one, backend="triton-group")
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
    one = Selection.from_ranges(every_key(1, 3, 1, 20))
    wanted = selection_attention(q, k, v, one, backend=backend)
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_D", "32")
    with pytest.warns(RuntimeWarning, match=r"BLOCK_D is 32, but .* Dk = 40 in one tile.*set it to 64 or more") as told:
        found = [selection_attention(q, k, v, one, backend=backend) for _ in range(2)]
    assert all(torch.equal(o, wanted) for o in found)
    assert len(told) == 1


@cells("interpreter", only=EDGES)
def test_triton_sel_edge_cases(behavior: str, lane: Lane, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(behavior, lane, what, monkeypatch)
