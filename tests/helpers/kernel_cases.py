"""The calls that start every CUDA kernel at least once: on a GPU with results that are checked, or on a CPU as far as the launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import nsa_sel
from nsa_sel.backends import cupy_cuda
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.backends.cupy_cuda import few_tokens, launch, sm90, token_order, whole_blocks
from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo
from nsa_sel.selection import Selection
from tests.helpers import parity, quantized_cases
from tests.helpers.cache_cases import LENGTHS
from tests.helpers.cases import assert_forward, make_blocks, make_qkv, make_spans

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
                parity.check_forward(backend, q, k, v, selection)
            else:
                parity.check_both(backend, q, k, v, selection)
        if S == 1 and registry.backends()[backend].reads_caches:
            for page_size in (BLOCK, 16):
                check_paged(backend, q, k, v, selections[1], page_size)


def check_paged(backend: str, q: Any, k: Any, v: Any, selection: Selection, page_size: int) -> None:
    """Forward parity with the oracle over a paged cache, whose kernel may be another one than the contiguous cache's."""
    B, G, S_kv, _ = k.shape
    pages = [x.transpose(1, 2).reshape(B * S_kv // page_size, page_size, G, x.shape[3]) for x in (k, v)]
    table = torch.arange(B * S_kv // page_size, dtype=torch.int32, device=q.device).view(B, -1)
    lengths = torch.full((B,), S_kv, dtype=torch.int32, device=q.device)
    got = nsa_sel.selection_attention_with_kvcache(q, *pages, selection, lengths, table, backend=backend, return_lse=True)
    assert_forward(got, q, k, v, selection.ranges)
    assert nsa_sel.decisions()[-1].forward == backend


def of_heads(h: int, Dk: int, Dv: int) -> Callable[[str], None]:
    def run(device: str) -> None:
        for dtype in (torch.float16, torch.bfloat16):
            run_all("cupy-cuda", dtype, Dk, Dv, h, device)

    return run


def of_blocks(backend: str, S: int, S_kv: int, h: int, Dk: int, Dv: int, block: int) -> Callable[[str], None]:
    def run(device: str) -> None:
        q, k, v = make_qkv(1, S, 2, h, Dk, Dv, S_kv=S_kv, dtype=torch.bfloat16, device=device)
        parity.check_both(backend, q, k, v, make_blocks(1, S, 2, S_kv, N, block, device=device))

    return run


def _long_row(device: str) -> None:
    """More splits than a cluster has CTAs."""
    q, k, v = make_qkv(1, 1, 1, 16, 128, 128, S_kv=65536, dtype=torch.bfloat16, device=device)
    selection = Selection.from_ranges(torch.tensor([[[[[0, 65536]]]]], dtype=torch.int32, device=device))
    parity.check_forward("cupy-cuda", q, k, v, selection)


def _tokens_in_order(device: str) -> None:
    with mock.patch.multiple(token_order, LEAST_TOKENS=300, LEAST_ROWS=1):
        of_blocks("cupy-cuda", 300, 400, 16, 128, 128, BLOCK)(device)


def _few_tokens_of_e4m3(device: str) -> None:
    sizes = {"lengths": LENGTHS * 20, "page_size": 64, "S_q": 4, "h": 4, "Dk": 128, "Dv": 128, "block": 64}
    given = quantized_cases.make_quantized("page", **sizes, dtype=torch.bfloat16, device=device)
    quantized_cases.check_quantized(given, "cupy-cuda")


_LISTED = " sort_count sort_scatter sum_parts "
_ROWS = "forward_rows dq_rows dkdv_tiles" + _LISTED
_TILES = "tile_union forward_tiles dq_tiles order_segments dkdv_groups" + _LISTED
_SMALL = (
    "tile_union forward_gather dq_gather count_blocks order_blocks count_rows sum_counts list_rows order_segments dkdv_groups sum_parts"
)
_VISITED = "block_partials shared_tiles join_partials block_gradients join_shares sum_sections"
CUDA_CASES = {
    "h16-128": Case(of_heads(16, 128, 128), _TILES + _ROWS + "forward_blocks", _ROWS),
    "h4-192-128": Case(of_heads(4, 192, 128), _ROWS + "tile_union forward_tiles", _ROWS),
    "h1-40-24": Case(of_heads(1, 40, 24), _ROWS, _ROWS),
    "h1-128": Case(of_heads(1, 128, 128), _ROWS + "tile_union forward_tiles forward_blocks", _ROWS),
    # A block of several tiles of keys has one list of rows, which is cut into segments for each tile.
    "blocks-of-128": Case(of_blocks("cupy-cuda", 100, 600, 16, 128, 128, 128), _TILES + "cut_blocks", _ROWS + "cut_blocks"),
    # More tiles of 16 keys than sort_scatter.cu adds up itself (`key_to_rows.FEW_TILES`).
    "many-tiles": Case(of_blocks("cupy-cuda", 20, 8448, 1, 40, 24, 16), _ROWS + "sum_counts", _ROWS + "sum_counts"),
    "long-row": Case(_long_row, "forward_rows combine", "forward_rows combine"),
    "small-blocks": Case(of_blocks("cupy-cuda", 40, 150, 12, 256, 256, 4), _SMALL, ""),
    "tokens-in-order": Case(_tokens_in_order, "ordered_union", ""),
    "e4m3-tokens": Case(_few_tokens_of_e4m3, "forward_tokens", ""),
    "cuda-block": Case(of_blocks("cuda-block", 300, 400, 16, 128, 128, BLOCK), _VISITED, ""),
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
    for user, name in ((parity, "assert_forward"), (parity, "assert_gradients"), (sys.modules[__name__], "assert_forward")):
        monkeypatch.setattr(user, name, lambda *_, **__: None)
    monkeypatch.setattr(quantized_cases, "check_quantized", quantized_cases.called)
    case.run("cpu")
    return started
