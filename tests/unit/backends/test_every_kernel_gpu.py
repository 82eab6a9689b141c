"""The short GPU lane: every Triton and CUDA kernel runs once and is checked against the oracle (`make gpu-test`, under three minutes)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from nsa_sel import Selection, choose_blocks, decisions, infllm_selection, moba_selection, selection_attention_with_kvcache
from nsa_sel.backends import choose_cuda, choose_triton, cupy_cuda
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.backends.cupy_cuda import compressed, few_tokens, launch, sm90, token_order, whole_blocks
from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.core import registry
from nsa_sel.core.call import Rule, device_info
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings.config import settings_for
from tests.helpers import caches, checks
from tests.helpers.caches import LENGTHS
from tests.helpers.cases import assert_forward, make_blocks, make_qkv, make_spans
from tests.helpers.choose import assert_chosen, best, infllm_scores, make_choose_call, make_packed_call, moba_scores, msa_scores
from tests.helpers.choose import check_both as check_choice
from tests.helpers.gpus import needs_hopper
from tests.helpers.layer import check_deltas, check_gate, check_gate_parts, check_rotation
from tests.helpers.policy_cases import A100, B200, H200, RTX3090

CUDA_KERNELS = {file.stem for file in (Path(str(cupy_cuda.__file__)).parent / "kernels").glob("*.cu")}
SIZES = (  # B, S, S_kv: prefill of few rows and of many, decoding with few rows and with many
    (1, 20, 150),
    (4, 160, 192),
    (1, 1, 2048),
    (150, 1, 256),
)
BLOCK, N = 64, 4


class Case(NamedTuple):
    """A call or several, and the CUDA kernels that they start on any GPU of a kind, whatever its number of multiprocessors."""

    run: Callable[[str], None]  # on a device of this type
    hopper: str  # kernels that SM 9.0 starts
    others: str  # kernels that any other GPU starts; none if the case is Hopper's alone

    def kernels(self, sm: int | None) -> set[str]:
        return set((self.hopper if sm == sm90.SM else self.others).split())


def run_all(backend: str, dtype: torch.dtype, Dk: int, Dv: int, h: int, device: str = "cuda") -> None:
    """Ranges and blocks, prefill and decoding, contiguous and paged, forward and backward."""
    for B, S, S_kv in SIZES:
        q, k, v = make_qkv(B, S, 2, h, Dk, Dv, S_kv=S_kv, dtype=dtype, device=device)
        selections = [Selection.from_ranges(make_spans("mixed", B, S, 2, S_kv, 77, device=device))]
        selections.append(make_blocks(B, S, 2, S_kv, N, BLOCK, device=device))
        for selection in selections[registry.backends()[backend].limits.block_aligned_only :]:
            if B > 1:
                checks.check_forward(backend, q, k, v, selection)
            else:
                checks.check_both(backend, q, k, v, selection)
        if S == 1 and registry.backends()[backend].reads_caches:
            for page_size in (BLOCK, 16):
                check_paged(backend, q, k, v, selections[1], page_size)


def check_paged(backend: str, q: Any, k: Any, v: Any, selection: Selection, page_size: int) -> None:
    """Forward parity with the oracle over a paged cache, whose kernel may be another one than the contiguous cache's."""
    B, G, S_kv, _ = k.shape
    pages = [x.transpose(1, 2).reshape(B * S_kv // page_size, page_size, G, x.shape[3]) for x in (k, v)]
    table = torch.arange(B * S_kv // page_size, dtype=torch.int32, device=q.device).view(B, -1)
    lengths = torch.full((B,), S_kv, dtype=torch.int32, device=q.device)
    got = selection_attention_with_kvcache(q, *pages, selection, lengths, table, backend=backend, return_lse=True)
    assert_forward(got, q, k, v, selection.ranges)
    assert decisions()[-1].forward == backend


def _heads(h: int, Dk: int, Dv: int, device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        run_all("cupy-cuda", dtype, Dk, Dv, h, device)


def _blocks(backend: str, S: int, S_kv: int, h: int, Dk: int, Dv: int, block: int, device: str) -> None:
    q, k, v = make_qkv(1, S, 2, h, Dk, Dv, S_kv=S_kv, dtype=torch.bfloat16, device=device)
    checks.check_both(backend, q, k, v, make_blocks(1, S, 2, S_kv, N, block, device=device))


def _long_row(device: str) -> None:
    """More splits than a cluster has CTAs."""
    q, k, v = make_qkv(1, 1, 1, 16, 128, 128, S_kv=65536, dtype=torch.bfloat16, device=device)
    selection = Selection.from_ranges(torch.tensor([[[[[0, 65536]]]]], dtype=torch.int32, device=device))
    checks.check_forward("cupy-cuda", q, k, v, selection)


def _tokens_in_order(device: str) -> None:
    with mock.patch.multiple(token_order, LEAST_TOKENS=300, LEAST_ROWS=1):
        _blocks("cupy-cuda", 300, 400, 16, 128, 128, BLOCK, device)


def _few_tokens_of_e4m3(device: str) -> None:
    sizes = {"lengths": LENGTHS * 20, "page_size": 64, "S_q": 4, "h": 4, "Dk": 128, "Dv": 128, "block": 64}
    given = caches.make_quantized("page", **sizes, dtype=torch.bfloat16, device=device)
    caches.check_quantized(given, "cupy-cuda")


_LISTED = " sort_count sort_scatter sum_parts "
_ROWS = "forward_rows dq_rows dkdv_tiles" + _LISTED
_TILES = "tile_union forward_tiles dq_tiles order_segments dkdv_groups" + _LISTED
_SMALL = (
    "tile_union forward_gather dq_gather count_blocks order_blocks count_rows sum_counts list_rows order_segments dkdv_groups sum_parts"
)
_VISITED = "block_partials shared_tiles join_partials block_gradients join_shares sum_sections"
CUDA_CASES = {
    "h16-128": Case(partial(_heads, 16, 128, 128), _TILES + _ROWS + "forward_blocks", _ROWS),
    "h4-192-128": Case(partial(_heads, 4, 192, 128), _ROWS + "tile_union forward_tiles", _ROWS),
    "h1-40-24": Case(partial(_heads, 1, 40, 24), _ROWS, _ROWS),
    "h1-128": Case(partial(_heads, 1, 128, 128), _ROWS + "tile_union forward_tiles forward_blocks", _ROWS),
    # A block of several tiles of keys has one list of rows, which is cut into segments for each tile.
    "blocks-of-128": Case(partial(_blocks, "cupy-cuda", 100, 600, 16, 128, 128, 128), _TILES + "cut_blocks", _ROWS + "cut_blocks"),
    # More tiles of 16 keys than sort_scatter.cu adds up itself (`key_to_rows.FEW_TILES`).
    "many-tiles": Case(partial(_blocks, "cupy-cuda", 20, 8448, 1, 40, 24, 16), _ROWS + "sum_counts", _ROWS + "sum_counts"),
    "long-row": Case(_long_row, "forward_rows combine", "forward_rows combine"),
    "small-blocks": Case(partial(_blocks, "cupy-cuda", 40, 150, 12, 256, 256, 4), _SMALL, ""),
    "tokens-in-order": Case(_tokens_in_order, "ordered_union", ""),
    "e4m3-tokens": Case(_few_tokens_of_e4m3, "forward_tokens", ""),
    "cuda-block": Case(partial(_blocks, "cuda-block", 300, 400, 16, 128, 128, BLOCK), _VISITED, ""),
}


def launched(monkeypatch: pytest.MonkeyPatch, case: Case, gpu: DeviceInfo) -> set[str]:
    """The CUDA kernels that a case launches on `gpu`, which is not here: tensors are on the CPU, no kernel runs, no result is checked."""
    started = set[str]()
    monkeypatch.setattr("nsa_sel.core.decide.device_info", lambda device: gpu)
    monkeypatch.setattr(registry, "missing", lambda name: ())
    monkeypatch.setattr(launch, "start", lambda source, *rest, **own: started.add(Path(source).stem))
    monkeypatch.setattr(launch, "clear", lambda *_: None)
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)
    for module in (sm90, whole_blocks, few_tokens):  # the driver makes tensor maps
        for name in ("tensor_map", "row_map", "key_group_map"):
            monkeypatch.setattr(module, name, lambda *_, **__: bytes(cuda_driver.MAP_BYTES), raising=False)
    for user, name in ((checks, "assert_forward"), (checks, "assert_gradients"), (sys.modules[__name__], "assert_forward")):
        monkeypatch.setattr(user, name, lambda *_, **__: None)
    monkeypatch.setattr(caches, "check_quantized", caches.called)
    case.run("cpu")
    return started


gpu = pytest.mark.gpu

WIDTHS = {"": (64, 64, torch.bfloat16), "-wide": (192, 128, torch.bfloat16), "-widest": (128, 128, torch.float32)}  # class of kernel config


@gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("backend", [name for name, backend in registry.backends().items() if backend.framework == "triton"])
def test_every_triton_kernel(backend: str, width: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    caplog.set_level("INFO", logger="nsa_sel")
    run_all(backend, dtype, Dk, Dv, 4)
    ran = {record.nsa_sel["config"].partition(":")[0] for record in caplog.records if record.getMessage() == "sel.triton.kernel"}  # type: ignore[attr-defined]
    suffixes = tuple(suffix for suffix in WIDTHS if suffix)
    kernels = (name for name in settings_for(device_info(torch.device("cuda"))).kernels if name.startswith(f"{backend}/"))
    wanted = {name for name in kernels if (name.endswith(width) if width else not name.endswith(suffixes))}
    assert wanted, "no kernel of this backend has a config"
    assert wanted <= ran, f"never ran: {sorted(wanted - ran)}"


@gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_choosing(width: str) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    for B, S, S_kv in ((1, 200, 200), (2, 40, 1200), (3, 1, 700)):
        call = make_choose_call((B, S, S_kv, 2, 4, Dk, Dv, Rule(n=4)), dtype, "cuda")
        check_choice(choose_triton, call, 1e-4)
    packed = make_packed_call((150, 0, 1, 31, 333), 9, Rule(n=4), (2, 4, Dk, Dv), dtype, "cuda")
    check_choice(choose_triton, packed, 1e-4)


@gpu
@needs_hopper
def test_every_cuda_kernel_of_choosing() -> None:
    """Tile kernels are compiled for compressed keys and run tile by tile, and in several row segments."""
    for B, S, S_kv, h in ((2, 333, 1200, 16), (1, 2500, 2500, 4)):
        call = make_choose_call((B, S, S_kv, 2, h, 128, 128, Rule(n=4)), torch.bfloat16, "cuda")
        assert compressed.supports(call, device_info(call.q.device))
        check_choice(choose_cuda, call, 1e-4)


@gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_choosing_without_attention(width: str) -> None:
    """A MiniMax indexer with one key for all groups, MoBA, InfLLM-v2. Float32 sums agree to 5 digits; a mean may round to another 16-bit
    number, which moves a score by less than a thousandth of the largest."""
    Dk, _, dtype = WIDTHS[width]
    S, S_kv = 40, 1200
    q, k, _ = make_qkv(2, S, 2, 4, Dk, Dk, S_kv=S_kv, dtype=dtype, device="cuda")
    t = torch.arange(S_kv - S, S_kv).expand(2, S)
    slack = 1e-5 if dtype == torch.float32 else 1e-3
    minimax = choose_blocks(q[:, :, :, :1], k[:, :1], block_size=64, n=4)
    scores = msa_scores(q[:, :, :, :1], k[:, :1], t, 64)
    assert_chosen(minimax.block_indices, scores, best(scores, t, 64, 4, 0, 1), 1e-5)
    scores = moba_scores(q, k, t, 64)
    assert_chosen(moba_selection(q, k, block_size=64, n=4).block_indices, scores, best(scores, t, 64, 4, 0, 1), slack)
    scores = infllm_scores(q, k, t, coarse=True)
    assert_chosen(infllm_selection(q, k, n=4, local=2).block_indices, scores, best(scores, t, 64, 4, 1, 2), slack)
    assert {decision.forward for decision in decisions()[-4:]} == {"choose-triton"}


@gpu
@pytest.mark.parametrize("width", WIDTHS)
def test_every_kernel_of_the_layer(width: str) -> None:
    Dk, Dv, dtype = WIDTHS[width]
    check_gate(dtype, "cuda", Dv)
    check_deltas(dtype, "cuda")
    check_gate_parts(dtype, Dv)
    check_rotation(dtype, "cuda", Dk)


@gpu
@pytest.mark.parametrize("name", CUDA_CASES)
def test_every_cuda_kernel(name: str, started: list[str]) -> None:
    case, sm = CUDA_CASES[name], device_info(torch.device("cuda")).sm
    if not case.kernels(sm):
        pytest.skip("needs a GPU of SM 9.0")
    case.run("cuda")
    ran = {Path(source).stem for source in started}
    assert case.kernels(sm) <= ran, f"never ran: {sorted(case.kernels(sm) - ran)}"


@pytest.mark.parametrize("device", [A100, RTX3090, H200, B200], ids=lambda device: f"sm{device.sm}")
def test_the_table_of_cases_starts_every_cuda_kernel(monkeypatch: pytest.MonkeyPatch, device: DeviceInfo) -> None:
    """Without a GPU: launches are noted alone. On SM 9.0 all files run, and on others all that some other one has."""
    wanted = CUDA_KERNELS if device.sm == 90 else set().union(*(case.kernels(None) for case in CUDA_CASES.values()))
    assert set().union(*(case.kernels(device.sm) for case in CUDA_CASES.values())) == wanted
    for name, case in CUDA_CASES.items():
        if case.kernels(device.sm):
            never = case.kernels(device.sm) - launched(monkeypatch, case, device)
            assert not never, f"{name} never starts {sorted(never)}"
