"""Passes over tiles in parts of their rows, where a plan of all rows does not fit the workspace: results, and bytes at 128k rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel.backends import _slices, cupy_cuda, triton_tile
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.backends.cupy_cuda import launch, sm90, token_order
from nsa_sel.core.call import Call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.core.warm import reset
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.backends.test_slices import Peak
from tests.helpers.cases import assert_gradients, make_blocks, make_call, make_grads, make_qkv
from tests.helpers.checks import attend, new_memory_is_nan
from tests.helpers.cuda import GPU, emulated, needs_compiler
from tests.helpers.gpus import HOPPER, needs, needs_hopper, noted


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Parts may be of one tile. Batch entries and rows of every part."""
    found: list[tuple[int, ...]] = []
    cut = _slices.slices

    def recorded(*of: Any) -> Any:
        for part, at in cut(*of):
            found.append(tuple(part.q.shape[:2]))
            yield part, at

    monkeypatch.setattr(_slices, "LEAST_ROWS", 1)
    monkeypatch.setattr(_slices, "slices", recorded)
    return found


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
    """Three tiles of 48 rows, of 100 bytes of a plan each; the last part has fewer rows than a tile. ordered: tiles are of tokens that
    selected alike, as parts are made of whole stretches, and are not too short for an order of which the whole call has one."""
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
    """Three sequences of 128k rows: two groups of 12 heads, D 256, 513 blocks of 4 keys. Tensors without memory, and no kernel."""
    B, S, G, h, D, n = 3, 131072, 2, 12, 256, 513
    gpu = DeviceInfo(kind="cuda", sm=90, name="NVIDIA H100", sm_count=132, shared_memory=227 << 10)
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)
    monkeypatch.setattr(launch, "start", lambda *_, **own: None)
    monkeypatch.setattr(launch, "clear", lambda *_: None)
    for maps in ("tensor_map", "row_map", "key_group_map"):
        monkeypatch.setattr(sm90, maps, lambda *_: b"")
    monkeypatch.setattr(Selection, "_on_gpu", True)  # no copy of ranges to compare with
    with torch.device("meta"):
        q, k, v = (torch.empty(B, *shape, dtype=torch.bfloat16) for shape in ((S, G, h, D), (G, S, D), (G, S, D)))
        selection = Selection(torch.empty(B, S, G, n, 2, dtype=torch.int32), 4, disjoint=True)
    call = Call(q, k, v, selection, None, 1.0, settings_for(gpu), gpu)
    cuts, cut = [], _slices.slices
    monkeypatch.setattr(_slices, "slices", lambda *of: cuts.append(of) or cut(*of))
    with Peak(q, k, v, selection.ranges) as peak:
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
        pytest.param("cupy-cuda", 4, 128, 64, marks=needs_cuda),  # tokens that selected alike: parts are whole stretches
        ("triton-tile", 12, 128, 4),
        ("triton-tile", 4, 128, 64),
    ],
)
def test_parts_give_the_bits_of_one_pass(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path], started: list[str], backend: str, h: int, D: int, block: int
) -> None:
    """Two parts or more of each pass that has a plan, forward and dq."""
    monkeypatch.setattr(token_order, "LEAST_TOKENS", 1)
    monkeypatch.setattr(token_order, "LEAST_ROWS", 1)
    S = 3090
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=D, S_kv=S, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    do, _ = make_grads(q, v)
    scores = torch.rand(1, S, 2, -(-S // block), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    ranges = Selection.from_scores(scores, 8, block, S_kv=S).ranges
    parts: list[int] = []
    cut = _slices.slices

    def recorded(*of: Any) -> Any:
        for part, at in cut(*of):
            parts.append(part.q.shape[1])
            yield part, at

    monkeypatch.setattr(_slices, "slices", recorded)

    def results() -> list[Tensor]:
        with new_memory_is_nan():
            o, lse = attend(backend, q, k, v, Selection(ranges, block, disjoint=True))
            dq = torch.autograd.grad(o, q, do)[0]
        return [o, lse, dq]

    whole = results()
    assert not parts
    configure("provenance: a test\nruntime: {workspace_bytes: 32768}\n")
    monkeypatch.setattr(_slices, "LEAST_ROWS", 256)
    reset()
    started.clear()
    again = results()
    assert sum(parts) == 2 * S
    assert len(parts) > 2
    assert all(map(torch.equal, whole, again))
    if backend == "cupy-cuda" and HOPPER:
        kernels = ("forward_gather.cu", "dq_gather.cu") if D == 256 else ("forward_tiles.cu", "dq_tiles.cu")
        counts = [started.count(name) for name in kernels]
        assert min(counts) > 1
        assert sum(counts) == len(parts)  # forward tiles may have more tokens than those of dq


@pytest.mark.gpu
@needs_cuda
@needs_hopper
def test_pairs_whose_lists_do_not_fit_together_have_the_bits_of_their_own_calls(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path]
) -> None:
    """QSA's shape: the lists of all four (batch entry, group) are of 1.6 MB, those of one of 0.4 MB."""
    configure("provenance: a test\nruntime: {workspace_bytes: 1048576}\n")
    reset()
    B, S, G, block = 2, 2048, 2, 4
    q, k, v = make_qkv(B=B, S=S, G=G, h=12, Dk=256, S_kv=S, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    do, _ = make_grads(q, v)
    scores = torch.rand(B, S, G, S // block, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    ranges = Selection.from_scores(scores, 60, block, S_kv=S).ranges
    pairs, by_pairs = [], sm90._by_pairs
    monkeypatch.setattr(sm90, "_by_pairs", lambda call, *rest: (pairs.append(call.q.shape[:3]), by_pairs(call, *rest))[1])

    def gradients(b: slice, g: slice) -> tuple[Tensor, ...]:
        own = q[b, :, g], k[b, g], v[b, g]
        with new_memory_is_nan():
            o, _ = attend("cupy-cuda", *own, Selection(ranges[b, :, g].contiguous(), block, disjoint=True))
            return torch.autograd.grad(o, own, do[b, :, g])

    found, again = (gradients(slice(B), slice(G)) for _ in range(2))
    assert pairs == [(B, S, G)] * 2
    assert all(map(torch.equal, found, again))
    for b, g in itertools.product(range(B), range(G)):
        at = slice(b, b + 1), slice(g, g + 1)
        dq, dk, dv = gradients(*at)
        assert torch.equal(dq, found[0][at[0], :, at[1]])
        assert torch.equal(dk, found[1][at])
        assert torch.equal(dv, found[2][at])
    assert len(pairs) == 2


@pytest.mark.gpu
@needs_cuda
@needs_hopper
def test_lists_of_large_blocks_fit_the_workspace(started: list[str], configure: Callable[[str], Path]) -> None:
    """MoBA's shape: lists of 0.6 MB, which for every 64 keys would be 4.7 MB."""
    S, G, block = 4096, 4, 512
    q, k, v = make_qkv(B=1, S=S, G=G, h=1, Dk=128, S_kv=S, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    k, v = (x[:, :2].detach().requires_grad_() for x in (k, v))
    do, _ = make_grads(q, v)
    scores = torch.rand(1, S, G, S // block, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    selection = Selection.from_scores(scores, 3, block, S_kv=S)

    def gradients() -> tuple[Tensor, ...]:
        reset()
        o, _ = attend("cuda-block", q, k, v, selection)
        return torch.autograd.grad(o, (q, k, v), do)

    expected = gradients()
    started.clear()
    configure("provenance: a test\nruntime: {workspace_bytes: 4194304}\n")
    with new_memory_is_nan():
        found = gradients()
    assert started.count("dkdv_groups.cu") == 1
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
