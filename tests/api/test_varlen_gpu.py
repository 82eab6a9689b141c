"""Packed batches on a GPU: every backend against the oracle of each sequence, no waiting, CUDA graphs, reruns."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import nsa_sel
from nsa_sel import compat
from nsa_sel.core import packed as packed_batches
from nsa_sel.selection import Selection
from tests.contract.lanes import lanes
from tests.helpers.graphs import captured, no_waiting, replayed
from tests.helpers.varlen_cases import Packed, attend_varlen, check_varlen, pack

pytestmark = pytest.mark.gpu
on_gpu = pytest.mark.parametrize("backend", [pytest.param(lane.name, marks=lane.marks()) for lane in lanes("cuda")])
SIZES: dict[str, Any] = {"G": 2, "h": 4, "Dk": 64, "Dv": 128, "device": "cuda"}
MIXED = (70, 0, 1, 37, 16, 2)
ALIGNED = (64, 0, 96, 32, 0, 41)
FEW, MANY = (1, 3, 0, 40, 1, 7), (160, 32, 64, 32, 320, 90)  # rows, and the keys before and among them; the fourth has more rows


def on_device(packed: Packed) -> dict[str, Any]:
    """Bounds that only the GPU holds."""
    cu_q, cu_k = (torch.tensor(bounds, dtype=torch.int32, device="cuda") for bounds in (packed.cu_q, packed.cu_k))
    return {"cu_seqlens_q": cu_q, "cu_seqlens_k": None if packed.cu_q == packed.cu_k else cu_k}


@on_gpu
@pytest.mark.parametrize("lengths", [(ALIGNED, ALIGNED), (FEW, MANY)], ids=["the same", "more keys"])
def test_aligned_sequences_keep_whole_blocks(backend: str, lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for h, block_size in ((4, 32), (3, 16)):
        packed = pack(*lengths, block_size=block_size, spare=5, dtype=torch.bfloat16, **{**SIZES, "h": h})
        check_varlen(backend, packed, **{"block_aligned": True, **on_device(packed)} if h == 3 else {})
        assert nsa_sel.decisions()[-1].request.block_size == block_size


@on_gpu
@pytest.mark.parametrize("lengths", [(MIXED, MIXED), (FEW, (161, 33, 0, 30, 320, 90))], ids=["the same", "more keys"])
def test_unaligned_sequences_are_copied_to_whole_blocks(backend: str, lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    for h, block_size in ((4, 64), (3, 16)):
        packed = pack(*lengths, block_size=block_size, spare=5, dtype=torch.bfloat16, **{**SIZES, "h": h})
        check_varlen(backend, packed, align=True, **on_device(packed) if h == 3 else {})
        assert nsa_sel.decisions()[-1].request.block_size == block_size


def test_keys_are_copied_where_it_pays_unless_forbidden() -> None:
    """1k rows that may select 256 keys each: the decision for whole blocks says whether to copy."""
    packed = pack((500, 7, 517), block_size=64, n=4, G=2, h=16, Dk=128, Dv=128, dtype=torch.bfloat16, device="cuda")
    options = on_device(packed)
    nsa_sel.selection_attention_varlen(*packed[:4], **options, align=True)
    decision = nsa_sel.decisions()[-1]
    for_blocks = packed_batches._prefers_blocks(str(decision.forward), decision.request, decision.device)
    nsa_sel.selection_attention_varlen(*packed[:4], **options)
    assert nsa_sel.decisions()[-1].request.block_size == (64 if for_blocks else None)
    for align, backend in ((False, None), (None, "triton-group")):
        nsa_sel.selection_attention_varlen(*packed[:4], **options, align=align, backend=backend)
        assert nsa_sel.decisions()[-1].request.block_size is None
    with nsa_sel.use_backend("triton-tile"):
        nsa_sel.selection_attention_varlen(*packed[:4], **options)
    assert nsa_sel.decisions()[-1].request.block_size == 64


def step(backend: str, packed: Packed, **options: Any) -> tuple[torch.Tensor, ...]:
    """o, lse and all gradients."""
    inputs = [x.detach().requires_grad_() for x in packed[:3]]
    o, lse = attend_varlen(backend, packed, *inputs, **options)
    return o.detach(), lse.detach(), *torch.autograd.grad(o.sum() + lse.masked_fill(lse.detach() == -torch.inf, 0).sum(), inputs)


@on_gpu
@pytest.mark.parametrize("lengths", [(ALIGNED, ALIGNED), (FEW, MANY)], ids=["the same", "more keys"])
def test_calls_never_wait_for_the_device(backend: str, lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    packed = pack(*lengths, block_size=32, spare=5, dtype=torch.bfloat16, **SIZES)
    expected = step(backend, packed)  # compiles
    fresh = packed._replace(selection=Selection(packed.selection.ranges, 32))
    options = on_device(packed)
    with no_waiting():
        found = step(backend, fresh, block_aligned=True, **options)
        fresh.selection.forget_plans()
        listed = step(backend, fresh)
    for one, other, third in zip(expected, found, listed, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@on_gpu
def test_a_copy_never_waits_and_is_bit_equal_again(backend: str) -> None:
    packed = pack(MIXED, block_size=32, spare=5, dtype=torch.bfloat16, **SIZES)
    expected = step(backend, packed, align=True)  # compiles
    options = on_device(packed)
    with no_waiting():
        found = [step(backend, packed._replace(selection=Selection(packed.selection.ranges, 32)), align=True, **options) for _ in range(5)]
    for again in found:
        assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))


@on_gpu
@pytest.mark.parametrize("odd", [0, 7], ids=["whole", "copied"])
def test_a_graph_follows_writes_into_bounds_and_ranges(backend: str, odd: int) -> None:
    first, second = (
        pack(lengths, block_size=32, dtype=torch.bfloat16, seed=seed, **SIZES)
        for seed, lengths in enumerate(((128 - odd, 0, 96, 32 + odd), (64 + odd, 64, 0, 128 - odd)))
    )
    selection = Selection(first.selection.ranges.clone(), 32)
    given = first._replace(selection=selection)
    options: dict[str, Any] = {**on_device(first), "align" if odd else "block_aligned": True}
    graph, outputs = captured(lambda: step(backend, given, **options))
    for packed in (first, second):
        selection.ranges.copy_(packed.selection.ranges)
        options["cu_seqlens_q"].copy_(torch.tensor(packed.cu_q))
        now = Packed(*first[:3], Selection(packed.selection.ranges, 32), packed.cu_q, packed.cu_k)
        assert all(map(torch.equal, replayed(graph, outputs), step(backend, now, align=bool(odd))))


def test_calls_of_other_libraries_do_not_wait_for_the_device() -> None:
    """Forward and backward, bounds on the device, gradients of what they should be."""
    packed = pack(ALIGNED, block_size=32, dtype=torch.bfloat16, **SIZES)
    blocks = packed.selection.block_indices  # [1,T,G,n]
    cu = torch.tensor(packed.cu_q, dtype=torch.int32, device="cuda")
    expected = step("sdpa-packed", packed)
    calls = (
        lambda q, k, v: compat.topk_sparse_attention(q, k, v, blocks[0].transpose(0, 1), 32, cu, block_aligned=True),
        lambda q, k, v: compat.parallel_nsa(q[None], k[None], v[None], block_indices=blocks, block_size=32, cu_seqlens=cu)[0],
    )
    for call in calls:
        for mode in (contextlib.nullcontext(), no_waiting()):  # the first compiles
            inputs = [packed.q.flatten(1, 2).detach().requires_grad_(), *(x.detach().requires_grad_() for x in packed[1:3])]
            with mode:
                o = call(*inputs)
                gradients = torch.autograd.grad(o.sum(), inputs)
        torch.testing.assert_close(o, expected[0].flatten(1, 2), atol=2e-2, rtol=2e-2)
        assert [x.shape for x in gradients] == [x.shape for x in inputs]
        assert all(bool(x.isfinite().all()) for x in gradients)
