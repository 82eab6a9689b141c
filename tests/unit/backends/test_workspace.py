"""Check memory of a call: buffers, a caller's workspace, and passes in parts and slices if plans of all rows do not fit."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, decisions, reset, selection_attention
from nsa_sel.backends import _slices, cupy_cuda, triton_tile
from nsa_sel.backends._triton import arguments, dkdv, key_to_rows, units
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.backends._triton.units import Slices
from nsa_sel.backends.cupy_cuda import launch, sm90, token_order
from nsa_sel.backends.launcher import buffers
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.core import registry
from nsa_sel.core.call import Call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.settings.config import settings_for
from tests.helpers.calls import assert_refused, calls_of
from tests.helpers.cases import assert_gradients, make_blocks, make_call, make_grads, make_qkv, make_spans
from tests.helpers.checks import Peak, attend, check_both, check_deterministic, check_poison, new_memory_is_nan
from tests.helpers.cuda import GPU, emulated, needs_compiler, order_few
from tests.helpers.gpus import HOPPER, needs, noted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = ("sdpa-packed", "triton-token", "triton-group", "triton-tile", "triton-block")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("sizes", [(2, 3, 1, 5), (7,), (2, 0, 3), (0,)])
def test_a_buffer_is_a_new_plain_tensor(device: str, inference: bool, sizes: tuple[int, ...]) -> None:
    like = torch.zeros(1, dtype=torch.bfloat16, device=device)
    with torch.inference_mode(inference):
        for dtype in (None, torch.float32):
            made, expected = unwritten(like, *sizes, dtype=dtype), like.new_empty(sizes, dtype=dtype)
            for fact in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
                assert getattr(made, fact) == getattr(expected, fact)
            assert (type(made), made.stride(), made.is_inference()) == (torch.Tensor, expected.stride(), inference)
            assert inference or made._version == 0
    if made.numel() and not inference:
        weight = torch.ones(sizes, dtype=made.dtype, device=device, requires_grad=True)
        (weight * made.fill_(3)).sum().backward()
        assert torch.equal(weight.grad, made)  # autograd may save it, and take it for a result
        assert made._version == 1


@pytest.mark.parametrize("device", DEVICES)
def test_deterministic_algorithms_fill_it_with_nan(device: str) -> None:
    """Benches and tuning rely on it to see what a kernel left unwritten."""
    with new_memory_is_nan():
        assert unwritten(torch.zeros(1, device=device), 3, 5, dtype=torch.bfloat16).isnan().all()


# The caller's workspace


def problem(device: str = "cpu", S: int = 2) -> tuple[Tensor, Tensor, Tensor, Selection]:
    """Few rows: the Triton backends split them, and packed SDPA gathers their keys."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (x.to(device, dtype).requires_grad_() for x in make_qkv(1, S, 1, 2, 16, S_kv=96))
    return q, k, v, make_blocks(1, S, 1, 96, 5, 16, device=device)


def results(backend: str, arguments: tuple[Any, ...], workspace: Tensor | None) -> tuple[Tensor, ...]:
    q, k, v, selection = arguments
    o, lse = selection_attention(q, k, v, selection, return_lse=True, backend=backend, workspace=workspace)
    return o, lse, *torch.autograd.grad((o, lse), (q, k, v), make_grads(q, v))


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("cupy-cuda", marks=pytest.mark.gpu)])
def test_a_pass_takes_its_temporaries_from_the_workspace(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = "cuda" if backend == "cupy-cuda" else "cpu"
    q, k, v, selection = problem(device)
    made = calls_of(monkeypatch, buffers, "unwritten")
    results(backend, (q, k, v, selection), torch.empty(1 << 20, dtype=torch.uint8, device=device))
    assert made == []
    results(backend, (q, k, v, selection), None)
    assert made != []


def refusal(backend: str, arguments: tuple[Any, ...], size: int) -> str | None:
    """The message for a workspace of `size` bytes; None where it is enough."""
    padded = torch.empty(size + 256, dtype=torch.uint8)  # the message assumes a start aligned to 256 bytes
    try:
        results(backend, arguments, padded[-padded.data_ptr() % 256 :][:size])
    except ArgumentError as error:
        return str(error)
    return None


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_small_a_workspace_says_how_large_it_should_be(backend: str) -> None:
    arguments, size, passes = problem(), 0, []
    while (message := refusal(backend, arguments, size)) is not None:
        found = re.search(rf"workspace.*of {size} bytes.*at least (\d+) bytes for the (\w+) pass of {backend}", message)
        assert found, message
        assert int(found[1]) > size
        size = int(found[1])
        passes.append(found[2])
    assert passes in (["forward"], ["backward"], ["forward", "backward"])
    assert not registry.is_broken(backend, decisions()[-1].request)


def test_an_invalid_workspace_is_refused() -> None:
    call = functools.partial(selection_attention, *problem())
    with torch.inference_mode():
        inner = torch.empty(64, dtype=torch.uint8)
    assert_refused(
        ("workspace.*a int", lambda: call(workspace=1 << 20)),
        ("workspace.*of dtype torch.float32", lambda: call(workspace=torch.empty(64))),
        (r"workspace.*strides \(2,\)", lambda: call(workspace=torch.empty(64, 2, dtype=torch.uint8)[:, 0])),
        ("workspace.*on meta", lambda: call(workspace=torch.empty(64, dtype=torch.uint8, device="meta"))),
        ("workspace.*inference_mode", lambda: call(workspace=inner)),
    )
    with pytest.raises(Exception, match=r"workspace.*torch.compile"):
        torch.compile(lambda x: call(workspace=x), backend="eager", fullgraph=True)(torch.empty(64, dtype=torch.uint8))


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[tuple[int, ...]]:
    """Collect batch entries and rows of every slice that `module` makes."""
    found, cut = list[tuple[int, ...]](), _slices.slices
    monkeypatch.setattr(module, "slices", lambda *of: ((found.append(tuple(part.q.shape[:2])), (part, at))[1] for part, at in cut(*of)))
    return found


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Cut calls to slices of 5 rows, with room for a few parts, and collect them."""
    monkeypatch.setattr(dkdv, "slices_of", lambda call, width: Slices(5, 1 << 14))
    return recorded(monkeypatch, dkdv)


@pytest.mark.slow
@pytest.mark.parametrize(("B", "positions"), [(2, False), (1, True)])
def test_slices_of_small_blocks_add_up(cut: list[tuple[int, ...]], B: int, positions: bool) -> None:
    q_pos = torch.arange(13, 50, 3)[None] if positions else None
    check_both("triton-tile", *make_qkv(B=B, S=13, G=2, h=3, Dk=16, Dv=8, S_kv=50), make_blocks(B, 13, 2, 50, 9, 4), q_pos=q_pos)
    assert [rows for _, rows in cut] == [5, 5, 3] * 2 * B


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ranges", "blocks"])
def test_slices_of_other_selections_add_up(cut: list[tuple[int, ...]], kind: str) -> None:
    selection = Selection.from_ranges(make_spans("few", 1, 12, 2, 70, 30)) if kind == "ranges" else make_blocks(1, 12, 2, 70, 4, 16)
    check_both("triton-group", *make_qkv(S=12, G=2, h=2, S_kv=70), selection)
    assert [rows for _, rows in cut] == [5, 5, 2] * 2


@pytest.mark.slow
def test_slices_are_deterministic_and_read_no_unselected_key(cut: list[tuple[int, ...]]) -> None:
    problem = *make_qkv(S=7, G=2, h=2, S_kv=80), make_blocks(1, 7, 2, 80, 3, 4)
    check_deterministic("triton-tile", *problem, reruns=2)
    check_poison("triton-tile", *problem)
    assert [rows for _, rows in cut] == [5, 2] * 8


@pytest.mark.slow
@pytest.mark.parametrize("block", [4, 16])
def test_a_pair_in_one_slice_gets_the_bits_of_one_plan(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """More pairs in one plan share pieces, so that their parts begin elsewhere."""
    q, k, v = make_qkv(S=10, G=1, h=3, S_kv=50, requires_grad=True)
    do, _ = make_grads(q, v)

    def gradients() -> tuple[Tensor, ...]:
        o, _ = attend("triton-tile", q, k, v, make_blocks(1, 10, 1, 50, 3, block))
        return torch.autograd.grad(o, (k, v), do)

    whole = gradients()
    monkeypatch.setattr(dkdv, "slices_of", lambda call, width: Slices(10, 1 << 62))
    assert all(map(torch.equal, whole, gradients()))


@pytest.mark.slow
def test_too_many_slices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (key_to_rows, units):
        monkeypatch.setattr(module, "room", lambda call: 800)
    q, k, v = make_qkv(S=12, G=2, h=2, S_kv=70, requires_grad=True)
    o, _ = attend("triton-tile", q, k, v, make_blocks(1, 12, 2, 70, 4, 16))
    with pytest.raises(BackendError, match=r"the list of rows of every KV tile needs .* Remedy: build the Selection from"):
        o.sum().backward()


def qsa_call(monkeypatch: pytest.MonkeyPatch, B: int, S: int, S_kv: int, n: int) -> Call:
    """Return a call of QSA's shape on an H100: two groups of 12 heads, D 256, n blocks of 4 keys. Tensors without memory, and no kernel."""
    G, h, D = 2, 12, 256
    gpu = DeviceInfo(kind="cuda", sm=90, name="NVIDIA H100", sm_count=132, shared_memory=227 << 10)
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)
    monkeypatch.setattr(Selection, "_on_gpu", True)  # no copy of ranges to compare with
    with torch.device("meta"):
        q, k, v = (torch.empty(B, *shape, dtype=torch.bfloat16) for shape in ((S, G, h, D), (G, S_kv, D), (G, S_kv, D)))
        selection = Selection(torch.empty(B, S, G, n, 2, dtype=torch.int32), 4, disjoint=True)
    return Call(q, k, v, selection, None, 1.0, settings_for(gpu), gpu)


@pytest.mark.slow
@pytest.mark.parametrize("S", [65536, 131072])
def test_gradients_of_qsa_fit_the_workspace(monkeypatch: pytest.MonkeyPatch, S: int) -> None:
    """With a last block that is not whole."""
    call = qsa_call(monkeypatch, 1, S, S - 1, 512)
    lse, delta = (torch.empty(call.q.shape[:4], device="meta") for _ in range(2))
    heads = arguments.heads(call)
    with Peak(call.q, call.k, call.v, lse, delta, call.selection.ranges) as peak:
        assert units.slices_of(call, 32) is not None
        dk, dv = dkdv.key_value_gradients(call, heads, lse, call.q, delta, "triton-tile/dkdv")
    assert dk.shape == dv.shape == call.k.shape
    results = 2 * dk.numel() * dk.itemsize
    assert results < peak.most <= results + call.settings.workspace_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton-group", "triton-tile"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_slices_give_the_gradients_of_one_plan(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path], backend: str, dtype: torch.dtype, most: float
) -> None:
    S, G, n = 8190, 2, 64
    q, k, v = make_qkv(S=S, G=G, h=3, Dk=64, S_kv=8190, dtype=dtype, device="cuda", requires_grad=True)
    do, _ = make_grads(q, v)
    scores = torch.rand(1, S, G, -(-S // 4), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    ranges = Selection.from_scores(scores, n, 4, S_kv=S).ranges
    cuts: list[Slices | None] = []
    monkeypatch.setattr(dkdv, "slices_of", lambda call, width: cuts.append(units.slices_of(call, width)) or cuts[-1])

    def gradients() -> tuple[Tensor, ...]:
        o, _ = attend(backend, q, k, v, Selection(ranges, 4, disjoint=True))
        return torch.autograd.grad(o, (q, k, v), do)

    whole = gradients()
    configure("provenance: a test\nruntime: {workspace_bytes: 16777216}\n")
    reset()
    first, second = gradients(), gradients()
    assert [cut and cut.rows for cut in cuts] == [None, 1024, 1024]
    for x, a, b in zip(whole, first, second, strict=True):
        assert (x.float() - a.float()).abs().max() <= most * x.float().abs().max()
        assert torch.equal(a, b)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let parts be of one tile, and collect them."""
    monkeypatch.setattr(_slices, "LEAST_ROWS", 1)
    return recorded(monkeypatch, _slices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("B", "tiles", "cut", "positions"),
    [(1, 2, [(1, 8), (1, 2)], True), (1, 1, [(1, 4), (1, 4), (1, 2)], False), (3, 6, [(2, 10), (1, 10)], False)],
)
def test_triton_tile(parts: list[tuple[int, ...]], B: int, tiles: int, cut: list[tuple[int, int]], positions: bool) -> None:
    """Three tiles of four rows for each batch entry, the last one not whole; 120 bytes of a plan each."""
    q, k, v = make_qkv(B=B, S=10, G=2, h=16, Dk=16, Dv=8, S_kv=50)
    ranges = make_blocks(B, 10, 2, 50, 3, 16).ranges
    q_pos = torch.randint(0, 50, (B, 10), generator=torch.Generator().manual_seed(0)) if positions else None
    do, dlse = make_grads(q, v)

    def results(**changed: int) -> list[Tensor]:
        call = make_call(q, k, v, Selection(ranges, 16), q_pos=q_pos, **changed)
        with new_memory_is_nan():
            o, lse = triton_tile.forward(call)
            own = torch.where(lse == float("-inf"), 0.0, dlse)
            found = triton_tile.backward(call, o, lse, do, own)
        assert_gradients(found, q, k, v, ranges, do, own, q_pos=q_pos)
        return [o, lse, found[0]]

    whole = results()
    assert not parts
    assert all(map(torch.equal, results(workspace_bytes=120 * tiles), whole))
    assert parts == cut * 2


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("ordered", [False, True])
def test_cupy_cuda(monkeypatch: pytest.MonkeyPatch, parts: list[tuple[int, ...]], ordered: bool) -> None:
    """Three tiles of 48 rows, each with 100 bytes of a plan; the last part has fewer rows than a tile. ordered: tiles hold tokens with
    similar selections. Parts are whole stretches, long enough to be ordered as the whole call is."""
    emulated(monkeypatch)
    if ordered:
        for name, value in (("LEAST_TOKENS", 100), ("LEAST_ROWS", 800), ("WARPGROUPS", 6)):
            monkeypatch.setattr(token_order, name, value)
    started = noted(monkeypatch)
    q, k, v = make_qkv(S=100, G=2, h=4, Dk=64, Dv=64, S_kv=260, dtype=torch.float16)
    ranges = make_blocks(1, 100, 2, 260, 3, 64).ranges

    def results(**changed: int) -> tuple[Tensor, ...]:
        settings = msgspec.structs.replace(settings_for(GPU), **changed)
        with new_memory_is_nan():
            return cupy_cuda.forward(Call(q, k, v, Selection(ranges, 64, disjoint=True), None, 0.125, settings, GPU))

    whole = results()
    assert all(map(torch.equal, results(workspace_bytes=200), whole))
    assert parts == [(1, 96), (1, 4)]
    assert started == ["ordered_union.cu" if ordered else "tile_union.cu", "forward_tiles.cu"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton-tile", "cupy-cuda"])
def test_plans_of_qsa_fit_the_workspace(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Three sequences of 128k rows."""
    monkeypatch.setattr(launch, "start", lambda *_, **own: None)
    monkeypatch.setattr(launch, "clear", lambda *_: None)
    for maps in ("tensor_map", "row_map", "key_group_map"):
        monkeypatch.setattr(sm90, maps, lambda *_: b"")
    call = qsa_call(monkeypatch, 3, 131072, 131072, 513)
    cuts = recorded(monkeypatch, _slices)
    with Peak(call.q, call.k, call.v, call.selection.ranges) as peak:
        o, lse = (triton_tile if backend == "triton-tile" else cupy_cuda).forward(call)
    results = o.numel() * o.itemsize + lse.numel() * lse.itemsize
    assert cuts
    assert results < peak.most <= results + call.settings.workspace_bytes


needs_cuda = needs("cupy-cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "h", "D", "block"),
    [
        pytest.param("cupy-cuda", 12, 256, 4, marks=needs_cuda),  # gathered
        pytest.param("cupy-cuda", 4, 128, 64, marks=needs_cuda),  # tokens with similar selections: parts are whole stretches
        ("triton-tile", 12, 128, 4),
        ("triton-tile", 4, 128, 64),
    ],
)
def test_parts_give_the_bits_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path], started: list[str], backend: str, h: int, D: int, block: int
) -> None:
    """Two parts or more of each pass that has a plan, forward and dq."""
    order_few(monkeypatch)
    S = 3090
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=D, S_kv=S, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    do, _ = make_grads(q, v)
    scores = torch.rand(1, S, 2, -(-S // block), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    ranges = Selection.from_scores(scores, 8, block, S_kv=S).ranges
    parts = recorded(monkeypatch, _slices)

    def results() -> list[Tensor]:
        with new_memory_is_nan():
            o, lse = attend(backend, q, k, v, Selection(ranges, block, disjoint=True))
            return [o, lse, torch.autograd.grad(o, q, do)[0]]

    whole = results()
    assert not parts
    configure("provenance: a test\nruntime: {workspace_bytes: 32768}\n")
    monkeypatch.setattr(_slices, "LEAST_ROWS", 256)
    reset()
    started.clear()
    again = results()
    assert sum(rows for _, rows in parts) == 2 * S
    assert len(parts) > 2
    assert all(map(torch.equal, whole, again))
    if backend == "cupy-cuda" and HOPPER:
        kernels = ("forward_gather.cu", "dq_gather.cu") if D == 256 else ("forward_tiles.cu", "dq_tiles.cu")
        counts = [started.count(name) for name in kernels]
        assert min(counts) > 1
        assert sum(counts) == len(parts)  # forward tiles may have more tokens than those of dq
