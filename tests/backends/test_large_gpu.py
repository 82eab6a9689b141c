"""Tensors of more than 2^31 elements: the last rows' results and gradients are those of a call of these rows alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import nsa_sel
from nsa_sel import Selection, compressed_attention, decisions, selection_attention, sliding_window_attention
from nsa_sel.bench.core.cases import make_inputs, make_selection, performance_cases
from nsa_sel.core.call import device_info
from nsa_sel.settings.config import settings_for
from tests.helpers.gpus import HOPPER, needs

G, h, D, LAST = 4, 16, 128, 64
S = 2**31 // (G * h * D) + LAST  # rows of q
COMPRESSED = (S - 32) // 16 + 1
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def choose(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    o, selection, lse = compressed_attention(q, k, v, S_kv=S, return_lse=True)
    assert decisions()[-1].forward != "choose-torch"
    return o, lse, selection.block_indices


def select(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> tuple[Tensor, ...]:
    """Of the first and the last blocks."""
    rows = torch.arange(S - q.shape[1], S, device=q.device, dtype=torch.int32)
    blocks = torch.stack((torch.zeros_like(rows), rows // 64 - 1, rows // 64), -1).clamp(min=0)
    selection = Selection.from_blocks(blocks[None, :, None].expand(1, -1, G, 3), 64)
    return selection_attention(q, k, v, selection, return_lse=True, backend=backend)


def select_by_blocks(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """By many units, on two streams."""
    if not HOPPER:
        pytest.skip("kernels of SM 9.0 alone")
    return select(q, k, v, "cuda-block")


def window(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    return sliding_window_attention(q, k, v, 512, return_lse=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("attend", "keys"), [(choose, COMPRESSED), (select, S), (select_by_blocks, S), (window, S)])
def test_the_last_rows(attend: Attend, keys: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(1, S, G, h, D, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, G, keys, D, device="cuda", dtype=torch.bfloat16)
    do = torch.zeros_like(q)  # but of the last rows: k and v then have these rows' gradients alone
    do[:, -LAST:].normal_()
    found = run(attend, q, k, v, do)
    wanted = run(attend, q[:, -LAST:].clone(), k, v, do[:, -LAST:].clone())
    for mine, other in zip(found, wanted, strict=True):
        mine, other = mine.double(), other.double()  # of another tile, or section of rows: bf16 may round to its neighbor
        assert float((mine - other).detach().norm() / other.detach().norm()) < 1e-2


@pytest.mark.gpu
def test_the_last_rows_of_small_blocks_and_wide_keys() -> None:
    """By gathered steps and tiles of blocks, of the last of two sequences."""
    if not HOPPER:
        pytest.skip("kernels of SM 9.0 alone")
    size, wide, rows = 4, 256, 70_000

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        at = torch.arange(rows - q.shape[1], rows, device=q.device, dtype=torch.int32) // size
        blocks = torch.stack((torch.zeros_like(at), at - 1, at), -1).clamp(min=0)
        selection = Selection.from_blocks(blocks[None, :, None].expand(q.shape[0], -1, G, 3), size)
        return selection_attention(q, k, v, selection, return_lse=True, backend="cupy-cuda")

    torch.manual_seed(0)
    q = torch.randn(2, rows, G, h, wide, device="cuda", dtype=torch.bfloat16)
    assert q.numel() > 2**31
    k, v = torch.randn(2, 2, G, rows, wide, device="cuda", dtype=torch.bfloat16)
    do = torch.zeros_like(q)
    do[1, -LAST:].normal_()
    found = (x[1:] for x in run(attend, q, k, v, do))
    wanted = run(attend, q[1:, -LAST:].clone(), k[1:].clone(), v[1:].clone(), do[1:, -LAST:].clone())
    for mine, other in zip(found, wanted, strict=True):
        mine, other = mine.double(), other.double()
        assert float((mine - other).detach().norm() / other.detach().norm()) < 1e-2


def run(attend: Attend, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    """What is found for the last rows, and gradients of q there, of k and of v."""
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    results = attend(*inputs)
    dq, dk, dv = torch.autograd.grad(results[0], inputs, do)
    return *(x[:, -LAST:] for x in (*results, dq)), dk, dv


NAMES = [pytest.param(name, marks=needs(name)) for name in ("triton-group", "triton-tile", "triton-block", "cuda-block", "cupy-cuda")]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", NAMES)
def test_a_training_step_takes_what_it_must(backend: str) -> None:
    """Within 5% of inputs, outputs and the bound on workspace together; the selection's measured facts are not at hand."""
    case = next(case for case in performance_cases() if case.case == "random-32k-h16")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    selection = make_selection(case, "cuda")
    q, k, v, do = make_inputs(case, "cuda")
    inputs = torch.cuda.memory_allocated() - before
    for x in (q, k, v):
        x.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    o, lse = nsa_sel.selection_attention(q, k, v, selection, return_lse=True, backend=backend)
    gradients = torch.autograd.grad(o, (q, k, v), do)
    peak = torch.cuda.max_memory_allocated() - before
    outputs = sum(x.numel() * x.element_size() for x in (o, lse, *gradients))
    bound = settings_for(device_info(q.device)).workspace_bytes
    assert nsa_sel.decisions()[-1].backward == backend
    assert peak <= 1.05 * (inputs + outputs + bound), f"{peak} bytes for {inputs} of inputs, {outputs} of outputs, {bound} of workspace"
