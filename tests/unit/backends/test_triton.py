"""Check parts of the Triton backends: TMA, units, refusals, small blocks, and when plans are kept."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nsa_sel import Selection, selection_attention
from nsa_sel.backends import triton_group
from nsa_sel.backends._triton import arguments, blocks, dkdv, units
from nsa_sel.backends._triton import key_to_rows as key_to_rows_module
from nsa_sel.backends._triton.blocks import block_union
from nsa_sel.backends._triton.key_to_rows import key_to_rows
from nsa_sel.backends.launcher.replay import kept_plan
from nsa_sel.core.call import Call, device_info
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import BackendError
from nsa_sel.settings.config import settings_for
from tests.helpers.calls import assert_refused, calls_of
from tests.helpers.cases import make_blocks, make_call, make_qkv, make_spans
from tests.helpers.checks import attend, check_both, check_deterministic, check_poison
from tests.helpers.files import ROOT

pytestmark = pytest.mark.slow  # in all: the interpreter knows no threads
BACKENDS = ("triton-tile", "triton-block")
both = pytest.mark.parametrize("backend", BACKENDS)


def change_settings(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    monkeypatch.setattr("nsa_sel.core.decide.settings_for", lambda device: msgspec.structs.replace(settings_for(device), **changed))


@both
@pytest.mark.parametrize("Dk", [136, 192])
def test_keys_in_two_tiles(backend: str, Dk: int) -> None:
    """16-bit keys of 129 to 192 columns take tiles of 128 and 64; S_kv % 16 leaves a cut block."""
    q, k, v = make_qkv(S=5, G=2, h=3, Dk=Dk, Dv=128, S_kv=50, dtype=torch.float16, seed=Dk)
    selection = make_blocks(1, 5, 2, 50, 3, 16)
    dims = arguments.split_dims(arguments.heads(make_call(q, k, v, selection)))
    assert (dims.BLOCK_D, dims.BLOCK_REST) == (128, 64)
    check_both(backend, q, k, v, selection)


@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_tiles_by_tma_and_by_pointers(monkeypatch: pytest.MonkeyPatch, logged: Any, loads: str) -> None:
    """GPUs before sm_90 take pointers: the same results, and the event tells which."""
    kernels = settings_for(device_info(torch.device("cpu"))).kernels
    loading = {name: msgspec.structs.replace(kernel, loads=loads) for name, kernel in kernels.items()}
    change_settings(monkeypatch, kernels=loading, debug_triton=True)
    check_both("triton-tile", *make_qkv(S=9, G=2, h=3, Dk=24, Dv=16, S_kv=100), make_blocks(1, 9, 2, 100, 3, 16))
    configs = [event["config"] for event in logged("sel.triton.kernel")]
    for kernel in ("forward", "dq"):
        taken = [name for name in configs if name.startswith(f"triton-tile/{kernel}")]
        assert taken
        assert all(f":{loads}" in name for name in taken)


@both
def test_ranges_and_odd_blocks_are_refused(backend: str) -> None:
    q, k, v = make_qkv(S=4, G=1, h=2, Dk=16, S_kv=40)
    sizes = "4 or 8 or a multiple of 16" if backend == "triton-tile" else "a multiple of 16"
    assert_refused(
        ("block-aligned .*whole blocks", lambda: attend(backend, q, k, v, Selection(make_spans("few", 1, 4, 1, 40, 8)))),
        (f"block-multiple .*{sizes}", lambda: attend(backend, q, k, v, make_blocks(1, 4, 1, 40, 2, 12))),
        (f"block-multiple .*{sizes}", lambda: attend(backend, q, k, v, make_blocks(1, 4, 1, 40, 2, 5))),
        error=BackendError,
    )


@pytest.mark.parametrize(
    ("backend", "workspace", "unit", "summed"),
    [("triton-group", 8_000, (6, 1), 0), ("triton-block", 8_000, (6, 1), 10**4), ("triton-block", 2_000, (2, 1), None)],
)
def test_units_of_rows_and_groups_give_the_same_results(
    monkeypatch: pytest.MonkeyPatch, backend: str, workspace: int, unit: tuple[int, int], summed: int | None
) -> None:
    """A workspace too small for the partials of all: units of so many rows and groups take turns, and dk and dv add up over them.

    summed: at most as many counts are added up by one program, others by PyTorch; None: every program adds up its few counts.
    """
    if summed is not None:
        monkeypatch.setattr(key_to_rows_module, "MOST_SUMMED", summed)
        monkeypatch.setattr(key_to_rows_module, "FEW_COUNTS", ())
    lists = calls_of(monkeypatch, units, "key_to_rows")
    change_settings(monkeypatch, workspace_bytes=workspace)
    check_both(backend, *make_qkv(S=6, G=2, h=2, Dk=16, S_kv=48), make_blocks(1, 6, 2, 48, 3, 16))
    assert unit in [sizes[2:4] for sizes in lists]


def _call(B: int, S: int, G: int, h: int, S_kv: int, selection: Selection) -> Call:
    return make_call(*make_qkv(B=B, S=S, G=G, h=h, Dk=16, S_kv=S_kv), selection)


@pytest.mark.parametrize("TQ", [4, 21, 64])
def test_the_block_union_names_each_block_once_with_its_rows(TQ: int) -> None:
    B, S, G, S_kv, block = 2, 70, 2, 100, 16
    selection = make_blocks(B, S, G, S_kv, 4, block)
    plan = block_union(_call(B, S, G, 1, S_kv, selection), TQ)
    for tile in range(B * G * plan.tiles):
        b, g, first = tile // plan.tiles // G, tile // plan.tiles % G, tile % plan.tiles * TQ
        chosen: dict[int, int] = {}
        for r in range(min(TQ, S - first)):
            for j in {*selection.block_indices[b, first + r, g].tolist()} - {-1}:
                chosen[j] = chosen.get(j, 0) | 1 << r
        whole, total = plan.counts[tile].tolist()
        start = tile * plan.capacity
        rows = [x % 2**64 for x in plan.rows[start : start + total].tolist()]
        assert dict(zip(plan.blocks[start : start + total].tolist(), rows, strict=True)) == chosen
        lowest = S_kv - S + first + 1
        assert [j for j in sorted(chosen) if (j + 1) * block <= lowest] == plan.blocks[start : start + whole].tolist()


@pytest.mark.parametrize(("S", "workspace", "pairs"), [(30, 1 << 20, 2), (30, 60_000, 1), (2, 1 << 20, 2)])
@pytest.mark.parametrize("positions", [False, True])
def test_gradients_of_tiles_that_share_a_list(
    monkeypatch: pytest.MonkeyPatch, S: int, workspace: int, pairs: int, positions: bool
) -> None:  # fmt: skip
    """Blocks of four tiles, the last one cut; pieces of a few entries, in units of all groups or of one; fewer entries than blocks; rows
    without keys; the same bits again, and NaN in keys that no row sees."""
    monkeypatch.setattr(units, "SHORTEST", 4)
    change_settings(monkeypatch, workspace_bytes=workspace)
    S_kv = 200
    q, k, v = make_qkv(S=S, G=2, h=2, Dk=16, Dv=8, S_kv=S_kv)
    ranges = make_blocks(1, S, 2, S_kv, 1, 128).ranges
    ranges = torch.where(torch.arange(S)[:, None, None, None] % 7 == 3, 0, ranges)
    q_pos = torch.randint(0, S_kv, (1, S), generator=torch.Generator().manual_seed(1)) if positions else None
    selection, lists = Selection(ranges, 128, disjoint=True), calls_of(monkeypatch, units, "key_to_rows")
    check_both("triton-tile", q, k, v, selection, q_pos=q_pos)
    check_poison("triton-tile", q, k, v, selection, q_pos=q_pos)
    if not positions:
        check_deterministic("triton-tile", q, k, v, selection, reruns=2)
    assert {(sizes[3], sizes[5]) for sizes in lists} == {(pairs, 4)}


def test_lists_follow_how_far_a_range_reaches() -> None:
    """`measure` bounds ranges of any length: a plan that was made before has room for more tiles of each."""
    selection = Selection.from_ranges(make_spans("few", 1, 20, 1, 64, 20))
    call = _call(1, 20, 1, 2, 64, selection)
    before = key_to_rows(call, 16, 20, 1, 16).reach
    selection.measure()
    assert key_to_rows(call, 16, 20, 1, 16).reach == call.reach(16) < before


def test_plans_are_shared_and_follow_the_ranges() -> None:
    selection = make_blocks(1, 20, 1, 64, 2, 16)
    call = _call(1, 20, 1, 2, 64, selection)
    assert block_union(call, 4) is block_union(call, 4)
    assert block_union(call, 4) is not block_union(call, 8)
    before = block_union(call, 4)
    selection.ranges.fill_(0)
    assert int(block_union(call, 4).counts.sum()) == 0
    assert before is not block_union(call, 4)
    assert kept_plan(call, ("x",), lambda call: 1).value == 1


@pytest.mark.parametrize(
    ("backend", "module", "builder"), [("triton-tile", blocks, "_union_plan"), ("triton-group", key_to_rows_module, "_build")]
)
def test_plans_are_kept_for_positions_too(monkeypatch: pytest.MonkeyPatch, backend: str, module: object, builder: str) -> None:
    """Forward, backward and the next layer share them, until the positions are others or written."""
    q, k, v = make_qkv(S=2, G=1, h=1, S_kv=32, requires_grad=True)
    selection, positions = make_blocks(1, 2, 1, 32, 1, 16), torch.tensor([3, 20])
    built = calls_of(monkeypatch, module, builder)

    def run() -> int:
        built.clear()
        selection_attention(q, k, v, selection, q_pos=positions, backend=backend).sum().backward()
        return len(built)

    first = run()
    assert first >= 1
    assert run() == 0
    positions[0] = 31
    assert run() == first
    o = selection_attention(q, k, v, selection, q_pos=positions, backend=backend)
    assert torch.equal(o, selection_attention(q, k, v, selection, q_pos=positions.clone(), backend=backend))
    positions = positions.clone()
    assert run() == 0  # the same positions, which a CPU tells by their values


@pytest.mark.parametrize(("B", "G", "D", "parts"), [(1, 2, 16, 5), (6, 1, 136, 2)])
def test_small_blocks_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch, B: int, G: int, D: int, parts: int) -> None:
    """Fewer rows than the interpreter's multiprocessors, and fewer than twice as many."""
    joined = calls_of(monkeypatch, triton_group, "combine")
    check_both("triton-group", *make_qkv(B=B, S=1, G=G, h=3, Dk=D, S_kv=250), make_blocks(B, 1, G, 250, 40, 4))
    assert [of[-1] for of in joined] == [parts]


@pytest.mark.parametrize(
    ("B", "D", "parts"), [(8, 256, 33), (64, 256, 4), (96, 256, 2), (132, 256, 2), (133, 256, 1), (64, 128, 1), (8, 128, 8)]
)
def test_few_warps_share_a_row_of_small_blocks_while_a_multiprocessor_has_room(B: int, D: int, parts: int) -> None:
    call = make_call(*make_qkv(B=1, S=1, G=2, h=12, Dk=D, S_kv=4096, dtype=torch.bfloat16), make_blocks(1, 1, 2, 4096, 512, 4))
    call.device = DeviceInfo(kind="cuda", sm=90, name="NVIDIA H100", sm_count=132, shared_memory=227 << 10)
    config = call.settings.kernel("triton-group/decode" + ("-widest" if D == 256 else ""))
    assert triton_group._count_splits(call, config, 2 * B) == parts


def test_gradients_of_small_blocks_list_a_row_once_for_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = calls_of(monkeypatch, dkdv, "plan_within")
    check_both("triton-group", *make_qkv(S=3, G=1, h=2, Dk=16, S_kv=63), make_blocks(1, 3, 1, 63, 6, 4))
    assert min(call.selection.block_size for call, *_ in plans) >= 16


@pytest.mark.parametrize("file", sorted(ROOT.glob("backends/**/*triton*/**/*.py")) + sorted(ROOT.glob("backends/triton_*.py")), ids=str)
def test_kernels_assign_to_no_nested_tuples(file: Path) -> None:
    """Triton 3.6 does not compile `(a, b), c = f()`, newer versions do."""
    functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    kernels = [function for function in functions if any("triton.jit" in ast.unparse(mark) for mark in function.decorator_list)]
    targets = [node.targets[0] for kernel in kernels for node in ast.walk(kernel) if isinstance(node, ast.Assign)]
    nested = [x.lineno for x in targets if isinstance(x, ast.Tuple) and any(isinstance(part, ast.Tuple) for part in x.elts)]
    assert nested == []
