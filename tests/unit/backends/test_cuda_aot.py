"""Compile cupy-cuda's kernels with NVRTC for absent GPUs: registers and shared memory fit, nothing spills.

The backend's forward and backward run for real, on CPU tensors and with injected device facts; only the launch is replaced.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import os
import resource
import stat
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import nsa_sel
from nsa_sel.backends import cupy_cuda
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.backends.cupy_cuda import compiler, cuda_block, key_to_rows, launch, packed, sm80, sm90, token_order
from nsa_sel.core import registry
from nsa_sel.core.call import Call
from nsa_sel.core.check import check_call
from nsa_sel.errors import BackendError
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.flags import CACHE_FLAG
from tests.helpers.aot import OF_CUDA, ONE_GROUP, TARGETS, paged_call, target_call
from tests.helpers.calls import calls_of
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.cuda import check_fit, compiled, needs_nvrtc, order_few
from tests.helpers.files import OF_THE_FILE, OF_THE_FOLDER
from tests.helpers.policy_cases import H200

pytestmark = pytest.mark.slow  # in all: a compiler at work


HOPPERS = {
    "forward_blocks.cu",
    "forward_tokens.cu",
    "forward_tiles.cu",
    "forward_gather.cu",
    "dq_tiles.cu",
    "dq_gather.cu",
    "dkdv_groups.cu",
    "tile_union.cu",
    "ordered_union.cu",
    "order_segments.cu",
}
OF_CUDA_USUAL = ("decode-B64-h16", "decode-B16-h64", "decode-small")
OF_LISTS = {"sort_count.cu", "sort_scatter.cu"}  # of few counts; of more also sum_counts.cu
OF_JOIN = {"shared_tiles.cu", "join_partials.cu", "join_shares.cu"}
OF_CUDA_BLOCK = {"block_partials.cu", "block_gradients.cu", "sum_sections.cu"}
OF_SMALL_BLOCKS = {"count_blocks.cu", "order_blocks.cu", "count_rows.cu", "list_rows.cu"}
APART = OF_CUDA_BLOCK | OF_JOIN | OF_SMALL_BLOCKS | {"cut_blocks.cu"}
ALL_KERNELS = {file.name for file in (Path(cupy_cuda.__file__).parent / "kernels").glob("*.cu")} - APART


def run(shape: str, sm: int) -> None:
    """Forward and backward of `shape` on a GPU of compute capability sm/10."""
    call = target_call(shape, sm)
    o, lse = cupy_cuda.forward(call)
    if call.q.shape[1] > 1:
        cupy_cuda.backward(call, o, lse, torch.empty_like(o), None)


@needs_nvrtc
@pytest.mark.parametrize(
    ("sm", "shape"),
    [
        *((sm, "h16") for sm in (80, 90)),
        (86, "h3-256"),
        (90, "h64-192-128"),
        (90, "h12-256-small"),
        (86, "decode-h16"),
        *((90, shape) for shape in OF_CUDA_USUAL),
        *(pytest.param(sm, "decode-h16", marks=pytest.mark.thorough) for sm in (89, 90, 100)),  # else 8.9 has the constants of 8.6
        *(pytest.param(sm, "h16", marks=pytest.mark.thorough) for sm in (86, 100, 120)),  # the kernels of 8.0, with constants of their own
        *(pytest.param(90, f"{ONE_GROUP}{shape}", marks=pytest.mark.thorough) for shape in ("h16", "h12-256-small")),
        *(pytest.param(86, shape, marks=pytest.mark.thorough) for shape in ("h64-192-128", "decode-B64-h16")),
        # As h12-256-small, which has the most columns, rows of a step and lists, and as decode-B16-h64: mostly in fewer registers. Or, of
        # one head, as 8.0.
        *(pytest.param(90, shape, marks=pytest.mark.thorough) for shape in ("h3-256", *OF_CUDA) if shape not in OF_CUDA_USUAL),
    ],
)
def test_kernels_fit(monkeypatch: pytest.MonkeyPatch, sm: int, shape: str) -> None:
    if sm == sm90.SM:
        monkeypatch.setattr(key_to_rows, "FEW_COUNTS", 0)
    names = check_fit(compiled(monkeypatch, sm, lambda: run(shape, sm)), sm, shape)
    if shape.startswith("decode"):
        joined = shape == "decode-h16" and sm not in sm80.WITH_CLUSTERS
        assert names == ({"forward_blocks.cu"} if sm == sm90.SM else {"forward_rows.cu", "combine.cu"} if joined else {"forward_rows.cu"})
    elif sm == sm90.SM and sm90.gathers(target_call(shape, sm)):
        block = target_call(shape, sm).selection.block_size
        lists = OF_LISTS if block % sm90.KEYS == 0 else OF_SMALL_BLOCKS
        gathered = {"tile_union.cu", "forward_gather.cu", "dq_gather.cu"}
        assert names == gathered | lists | {"sum_counts.cu", "order_segments.cu", "dkdv_groups.cu", "sum_parts.cu"}
    elif sm == sm90.SM:
        assert names == ALL_KERNELS - {
            "combine.cu",
            "forward_rows.cu",
            "forward_blocks.cu",
            "forward_gather.cu",
            "dq_gather.cu",
            "forward_tokens.cu",
            "ordered_union.cu",
            "dq_tiles.cu" if shape == "h1" else "dq_rows.cu",
            *({"dkdv_groups.cu", "order_segments.cu"} if shape == "h1" else {"dkdv_tiles.cu"}),
        }
    else:
        assert names | {"sum_counts.cu"} == ALL_KERNELS - {"combine.cu", *HOPPERS}  # narrow tiles have more counts


@needs_nvrtc
@pytest.mark.parametrize("shape", ["h16", *(pytest.param(shape, marks=pytest.mark.thorough) for shape in ("h4-fp16", "h12", "h12-256"))])
def test_kernels_of_tokens_in_order_fit(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    order_few(monkeypatch)
    call = target_call(shape, 90)

    def tiles() -> None:
        o, lse = sm90.forward_tiles(call)
        sm90.dq_tiles(call, o, lse, torch.empty_like(o), None)

    kernels = compiled(monkeypatch, 90, tiles)
    assert check_fit(kernels, 90, shape) == {
        "ordered_union.cu",
        *(("forward_gather.cu", "dq_gather.cu") if sm90.gathers(call) else ("forward_tiles.cu", "dq_tiles.cu")),
    }
    assert {kernel["macros"]["ORDER_TOKENS"] for kernel in kernels} == {token_order.stretch_of(call)}


@needs_nvrtc
@pytest.mark.parametrize(
    ("sm", "shape", "names"),
    [
        (86, "paged-16", {"forward_rows.cu"}),
        (90, "paged-16-split", {"forward_rows.cu"}),
        (90, "paged-64", {"forward_blocks.cu"}),
        (90, "paged-128-packed", {"forward_blocks.cu"}),
        (86, "paged-128-packed", {"forward_rows.cu"}),
        (90, "paged-256", {"forward_tiles.cu"}),
        pytest.param(90, "paged-64-S8", {"forward_tiles.cu"}, marks=pytest.mark.thorough),  # as of paged-256 and of the prefill
        (90, "paged-64-prefill", {"tile_union.cu", "forward_tiles.cu"}),
        (90, "paged-64-e4m3-head", {"forward_blocks.cu"}),
        (90, "paged-64-S4-e4m3-page", {"forward_blocks.cu"}),
        (90, "paged-64-S4-h4-e4m3-page", {"forward_tokens.cu"}),
        pytest.param(90, "paged-64-few-e4m3-page", {"forward_blocks.cu"}, marks=pytest.mark.thorough),  # narrower than S4
    ],
)
def test_kernels_of_pages_fit(monkeypatch: pytest.MonkeyPatch, sm: int, shape: str, names: set[str]) -> None:
    assert check_fit(compiled(monkeypatch, sm, lambda: cupy_cuda.forward(paged_call(shape, sm))), sm) == names


@needs_nvrtc
@pytest.mark.parametrize("shape", ["paged-128-packed", "paged-128-packed-e4m3-page"])
def test_kernels_of_packed_batches_fit(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    for name in ("join_rows", "widen_pages"):
        monkeypatch.setattr(packed, name, lambda *_: None)  # Triton kernels
    monkeypatch.setattr(packed.launch, "clear", lambda *_: None)
    call = dataclasses.replace(paged_call(shape, 90), most_rows=256)
    lists = {"sort_count.cu", "sum_counts.cu", "sort_scatter.cu", "shared_tiles.cu"}
    names = lists | {"block_partials.cu", "join_partials.cu", "forward_blocks.cu"}
    assert check_fit(compiled(monkeypatch, 90, lambda: cupy_cuda.forward(call)), 90, shape) == names


@needs_nvrtc
@pytest.mark.parametrize(
    ("h", "Dk", "Dv", "block", "dtype"),
    [
        (16, 128, 128, 64, torch.bfloat16),
        pytest.param(4, 128, 128, 64, torch.bfloat16, marks=pytest.mark.thorough),  # between 16 and 1
        pytest.param(1, 128, 128, 128, torch.float16, marks=pytest.mark.thorough),  # as 16, without shares
        pytest.param(3, 64, 128, 64, torch.float16, marks=pytest.mark.thorough),  # without joins
        (16, 128, 128, 128, torch.bfloat16),  # tiles of 128 keys forward
        (1, 128, 128, 512, torch.bfloat16),  # visited by Triton
    ],
)
def test_kernels_of_cuda_block_fit(monkeypatch: pytest.MonkeyPatch, h: int, Dk: int, Dv: int, block: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)  # Triton's kernels around it
    q, k, v = make_qkv(S=300, h=h, Dk=Dk, Dv=Dv, dtype=dtype)
    call = Call(*check_call(q, k, v, make_blocks(1, 300, 1, 300, 3, block), None, None)[:4], None, 0.1, settings_for(H200), H200)
    do = q.new_empty(*q.shape[:4], Dv)
    kernels = compiled(monkeypatch, 90, lambda: cuda_block.backward(call, *cuda_block.forward(call), do, None))
    joins = OF_JOIN if h == 16 else set() if 64 % h else OF_JOIN - {"join_shares.cu"}
    expected = {"cut_blocks.cu", "dkdv_groups.cu", "sum_parts.cu"} if block == 512 else OF_CUDA_BLOCK | joins
    assert {kernel["kernel"] for kernel in kernels} == {"order_segments.cu"} | OF_LISTS | expected
    per_sm_of = {
        "block_partials.cu": cuda_block.PER_SM,
        "join_partials.cu": cuda_block.JOIN_PER_SM,
        "block_gradients.cu": 2,
        "join_shares.cu": cuda_block.SHARES_PER_SM,
    }
    for kernel in kernels:
        per_sm = {**per_sm_of, "sort_scatter.cu": 3}.get(kernel["kernel"], 1)  # CTAs
        assert per_sm * (kernel["shared"] + launch.SYSTEM) <= TARGETS[90][0] * 1024 + launch.SYSTEM, kernel
        assert per_sm * kernel["registers"] * kernel["threads"] <= 65536, kernel
        assert kernel["spilled"] == kernel["serialized"] == 0, kernel


COMBINE = sm80.combine_macros(bf16=True, Dv=64)


@needs_nvrtc
def test_compiled_code_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_FLAG, str(tmp_path))
    code = compiler.cubin("combine.cu", COMBINE, "sm_80")
    assert code[:4] == b"\x7fELF"
    (kept,) = (tmp_path / "cubins").iterdir()
    times = calls_of(monkeypatch, compiler, "compile_source")
    assert compiler.cubin("combine.cu", COMBINE, "sm_80") == code
    assert times == []
    for broken in (kept.read_bytes()[:-1], b"", kept.read_bytes()[:32], b"\0" * 100):  # as a crash or a full disk leave it
        kept.write_bytes(broken)
        assert compiler.cubin("combine.cu", COMBINE, "sm_80")[:4] == b"\x7fELF"
        assert len(kept.read_bytes()) > 1000
    assert len(times) == 4
    # Another source, of whichever file, is another key.
    files = dict(compiler.sources("combine.cu"))
    files["hardware.cuh"] += "\n// changed\n"
    monkeypatch.setattr(compiler, "sources", lambda source: files)
    compiler.cubin("combine.cu", COMBINE, "sm_80")
    assert len(times) == 5
    assert len(list((tmp_path / "cubins").iterdir())) == 2


@needs_nvrtc
def test_a_folder_that_cannot_be_written_costs_compiling_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_FLAG, str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="can't be written, every process compiles"):
        code = compiler.cubin("combine.cu", COMBINE, "sm_80")
    assert code[:4] == b"\x7fELF"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that holds machine code, in a folder of its own."""
    monkeypatch.setattr(compiler, "_warned", set())
    file = tmp_path / "nsa-sel" / "cubins" / "k.cubin"
    before = os.umask(0)
    try:
        compiler._write(file, b"honest code")
    finally:
        os.umask(before)
    return file


def test_kept_code_is_the_users_alone(kept: Path) -> None:
    assert compiler._read(kept) == b"honest code"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (kept.parent.parent, kept.parent, kept)] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize(
    ("damage", "words", "mended"),
    [*((*how, True) for how in OF_THE_FILE), *((*how, False) for how in OF_THE_FOLDER)],
)
def test_code_that_others_may_have_written_is_not_loaded(kept: Path, damage: Any, words: str, mended: bool) -> None:
    damage(kept)

    def look_compile_and_keep() -> None:  # as `cubin` does
        if compiler._read(kept) is None:
            compiler._write(kept, b"compiled anew")

    with pytest.warns(RuntimeWarning, match=f"not used, but compiled anew: .*{words}") as told:
        look_compile_and_keep()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look_compile_and_keep()
    assert (compiler._read(kept) == b"compiled anew") == mended


def test_what_fails_leaves_no_part_of_a_file(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full disk: a part is written
    try:
        with pytest.warns(RuntimeWarning, match="can't be written, every process compiles its CUDA kernels again: File too large"):
            compiler._write(kept, b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(kept.parent.iterdir()) == [kept]
    assert compiler._read(kept) == b"honest code"

    monkeypatch.setattr(os, "replace", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compiler._write(kept, b"new")
    assert list(kept.parent.iterdir()) == [kept]


@needs_nvrtc
def test_without_a_home_every_process_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/unit/settings/test_tuned.py checks that it warns once."""
    monkeypatch.setattr(compiler, "cache_folder", lambda: None)
    monkeypatch.setattr(compiler, "compile_source", lambda *arguments: (b"code", ""))
    assert compiler.cubin("combine.cu", COMBINE, "sm_80") == b"code"


def test_what_is_missing_is_a_refusal(monkeypatch: pytest.MonkeyPatch, fresh_registry: None) -> None:
    """No CuPy, no NVRTC, no driver: three reasons with their remedies, and no ImportError."""
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError("cannot open shared object file")))
    monkeypatch.setattr(importlib.metadata, "version", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError))
    found = registry.missing("cupy-cuda")
    assert [(reason.code, reason.field) for reason in found] == [
        ("package-missing", "package cupy"), ("library-missing", "library NVRTC"), ("library-missing", "library NVIDIA driver"),
    ]  # fmt: skip
    assert all("nsa-sel[cuda13]" in reason.remedy for reason in found[:2])
    q, k, v = make_qkv(S=8, dtype=torch.float16)
    with pytest.raises(BackendError, match=r"(?s)Package cupy.*Library NVRTC.*Library NVIDIA driver"):
        nsa_sel.selection_attention(q, k, v, make_blocks(1, 8, 1, 8, 1, 8), backend="cupy-cuda")
