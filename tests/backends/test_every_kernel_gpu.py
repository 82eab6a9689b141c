"""The short GPU lane: every Triton and CUDA kernel runs once and is checked against the oracle (`make gpu-test`, under three minutes)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nsa_sel
from nsa_sel.backends import choose_cuda, choose_triton, cupy_cuda
from nsa_sel.backends.cupy_cuda import compressed, token_order
from nsa_sel.core import registry
from nsa_sel.core.call import device_info
from nsa_sel.core.choose_call import Rule
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.cache_cases import LENGTHS
from tests.helpers.cases import assert_forward, make_blocks, make_qkv, make_spans
from tests.helpers.choose_cases import check_both as check_choice
from tests.helpers.choose_cases import make_choose_call, make_packed_call
from tests.helpers.choosing_reference import assert_chosen, best, infllm_scores, moba_scores, msa_scores
from tests.helpers.gpus import HOPPER, needs_hopper
from tests.helpers.layer_kernels import check_deltas, check_gate, check_gate_parts, check_rotation
from tests.helpers.parity import check_both, check_forward
from tests.helpers.quantized_cases import check_quantized, make_quantized

pytestmark = pytest.mark.gpu

WIDTHS = {"": (64, 64, torch.bfloat16), "-wide": (192, 128, torch.bfloat16), "-widest": (128, 128, torch.float32)}  # class of kernel config
SIZES = (  # B, S, S_kv: prefill of few rows and of many, decoding with few rows and with many
    (1, 20, 150),
    (4, 160, 192),
    (1, 1, 2048),
    (150, 1, 256),
)
BLOCK, N = 64, 4
HOPPERS = {
    "forward_tiles.cu", "forward_gather.cu", "dq_tiles.cu", "dq_gather.cu", "dkdv_groups.cu", "tile_union.cu", "forward_blocks.cu",
    "forward_tokens.cu", "ordered_union.cu", "block_gradients.cu", "sum_sections.cu", "order_segments.cu",
}  # fmt: skip


def run_all(backend: str, dtype: torch.dtype, Dk: int, Dv: int, h: int) -> None:
    """Ranges and blocks, prefill and decoding, contiguous and paged, forward and backward."""
    for B, S, S_kv in SIZES:
        q, k, v = make_qkv(B, S, 2, h, Dk, Dv, S_kv=S_kv, dtype=dtype, device="cuda")
        selections = [Selection.from_ranges(make_spans("mixed", B, S, 2, S_kv, 77, device="cuda"))]
        selections.append(make_blocks(B, S, 2, S_kv, N, BLOCK, device="cuda"))
        for selection in selections[registry.backends()[backend].limits.block_aligned_only :]:
            if B > 1:
                check_forward(backend, q, k, v, selection)
            else:
                check_both(backend, q, k, v, selection)
        if S == 1 and registry.backends()[backend].reads_caches:
            for page_size in (BLOCK, 16):
                check_paged(backend, q, k, v, selections[1], page_size)


def check_paged(backend: str, q: Any, k: Any, v: Any, selection: Selection, page_size: int) -> None:
    """Forward parity with the oracle over a paged cache, whose kernel may be another one than the contiguous cache's."""
    B, G, S_kv, _ = k.shape
    pages = [x.transpose(1, 2).reshape(B * S_kv // page_size, page_size, G, x.shape[3]) for x in (k, v)]
    table = torch.arange(B * S_kv // page_size, dtype=torch.int32, device="cuda").view(B, -1)
    lengths = torch.full((B,), S_kv, dtype=torch.int32, device="cuda")
    got = nsa_sel.selection_attention_with_kvcache(q, *pages, selection, lengths, table, backend=backend, return_lse=True)
    assert_forward(got, q, k, v, selection.ranges)
    assert nsa_sel.decisions()[-1].forward == backend


@pytest.mark.parametrize("width", WIDTHS)
def test_every_triton_kernel(width: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    caplog.set_level("INFO", logger="nsa_sel")
    for backend in registry.backends().values():
        if backend.framework == "triton":
            run_all(backend.name, dtype, Dk, Dv, 4)
    ran = {record.nsa_sel["config"].partition(":")[0] for record in caplog.records if record.getMessage() == "sel.triton.kernel"}  # type: ignore[attr-defined]
    suffixes = tuple(suffix for suffix in WIDTHS if suffix)
    kernels = settings_for(device_info(torch.device("cuda"))).kernels
    wanted = {name for name in kernels if (name.endswith(width) if width else not name.endswith(suffixes))}
    assert wanted <= ran, f"never ran: {sorted(wanted - ran)}"


@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_choosing(width: str) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    for B, S, S_kv in ((1, 200, 200), (2, 40, 1200), (3, 1, 700)):
        call = make_choose_call((B, S, S_kv, 2, 4, Dk, Dv, Rule(n=4)), dtype, "cuda")
        check_choice(choose_triton, call, 1e-4)
    packed = make_packed_call((150, 0, 1, 31, 333), 9, Rule(n=4), (2, 4, Dk, Dv), dtype, "cuda")
    check_choice(choose_triton, packed, 1e-4)


@needs_hopper
def test_every_cuda_kernel_of_choosing() -> None:
    """Those of tiles, compiled for compressed keys; tile by tile, and in several segments of rows."""
    for B, S, S_kv, h in ((2, 333, 1200, 16), (1, 2500, 2500, 4)):
        call = make_choose_call((B, S, S_kv, 2, h, 128, 128, Rule(n=4)), torch.bfloat16, "cuda")
        assert compressed.supports(call, device_info(call.q.device))
        check_choice(choose_cuda, call, 1e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_choosing_without_attention(width: str) -> None:
    """A MiniMax indexer with one key for all groups, MoBA, InfLLM-v2. Float32 sums agree to 5 digits; a mean may round to another 16-bit
    number, which moves a score by less than a thousandth of the largest."""
    Dk, _, dtype = WIDTHS[width]
    S, S_kv = 40, 1200
    q, k, _ = make_qkv(2, S, 2, 4, Dk, Dk, S_kv=S_kv, dtype=dtype, device="cuda")
    t = torch.arange(S_kv - S, S_kv).expand(2, S)
    slack = 1e-5 if dtype == torch.float32 else 1e-3
    minimax = nsa_sel.choose_blocks(q[:, :, :, :1], k[:, :1], block_size=64, n=4)
    scores = msa_scores(q[:, :, :, :1], k[:, :1], t, 64)
    assert_chosen(minimax.block_indices, scores, best(scores, t, 64, 4, 0, 1), 1e-5)
    scores = moba_scores(q, k, t, 64)
    assert_chosen(nsa_sel.moba_selection(q, k, block_size=64, n=4).block_indices, scores, best(scores, t, 64, 4, 0, 1), slack)
    scores = infllm_scores(q, k, t, coarse=True)
    assert_chosen(nsa_sel.infllm_selection(q, k, n=4, local=2).block_indices, scores, best(scores, t, 64, 4, 1, 2), slack)
    assert {decision.forward for decision in nsa_sel.decisions()[-4:]} == {"choose-triton"}


@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_the_layer(width: str) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    check_gate(dtype, "cuda", Dv)
    check_deltas(dtype, "cuda")
    check_gate_parts(dtype, "cuda", Dv)
    check_rotation(dtype, "cuda", Dk)


def test_every_cuda_kernel(monkeypatch: pytest.MonkeyPatch, started: list[str]) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for Dk, Dv, h in ((128, 128, 16), (192, 128, 4), (40, 24, 1), (128, 128, 1)):
            run_all("cupy-cuda", dtype, Dk, Dv, h)
    q, k, v = make_qkv(1, 1, 1, 16, 128, 128, S_kv=65536, dtype=torch.bfloat16, device="cuda")  # more splits than a cluster has CTAs
    check_forward("cupy-cuda", q, k, v, Selection.from_ranges(torch.tensor([[[[[0, 65536]]]]], dtype=torch.int32, device="cuda")))
    files = {file.name for file in Path(str(cupy_cuda.__file__)).parent.rglob("*.cu")}
    if not HOPPER:
        files -= HOPPERS
    else:
        sizes = {"lengths": LENGTHS * 20, "page_size": 64, "S_q": 4, "h": 4, "Dk": 128, "Dv": 128, "block": 64}
        check_quantized(make_quantized("page", **sizes, dtype=torch.bfloat16, device="cuda"), "cupy-cuda")  # few new tokens over e4m3 keys
        q, k, v = make_qkv(1, 40, 2, 12, 256, 256, S_kv=150, dtype=torch.bfloat16, device="cuda")
        check_both("cupy-cuda", q, k, v, make_blocks(1, 40, 2, 150, N, 4, device="cuda"))
        monkeypatch.setattr(token_order, "LEAST_TOKENS", 300)
        monkeypatch.setattr(token_order, "LEAST_ROWS", 1)
        q, k, v = make_qkv(1, 300, 2, 16, 128, 128, S_kv=400, dtype=torch.bfloat16, device="cuda")
        check_both("cupy-cuda", q, k, v, make_blocks(1, 300, 2, 400, N, BLOCK, device="cuda"))
        check_both("cuda-block", q, k, v, make_blocks(1, 300, 2, 400, N, BLOCK, device="cuda"))
    ran = {Path(name).name for name in started}
    assert files <= ran, f"never ran: {sorted(files - ran)}"
