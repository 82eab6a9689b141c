"""The Triton kernels with their committed configs, compiled for GPUs that are not here: shared memory fits, nothing spills."""

from __future__ import annotations

import itertools

import pytest
import triton

from tests.helpers.aot import PAGED, SHAPES, TARGETS, compiled_apart, target_call

# One for each class of kernel configs in base.yaml: plain, wide, widest (also with small blocks), decoding, pages. The other shapes run
# the same configs for other numbers of heads and types: on one target.
SOME = ("h16", "h64-192-128", "h3-256", "h12-256-small", "decode-h16", "paged-16")
REST = tuple(shape for shape in (*SHAPES, *PAGED) if shape not in SOME)


def some_but(*shapes: str) -> tuple[str, ...]:
    return tuple(shape for shape in SOME if shape not in shapes)


# Targets, shapes that are compiled to machine code, and shapes of which only shared memory is asked, in a third of the time. Triton makes
# other code for 8.x, 9.0, 10.0 and 12.0, which at times LLVM or the assembler does not take. Usually only Hopper, where the kernels run,
# which is whole but for decoding, that has the same kernels and their joins; and of 12.0, which has the least shared memory and copies by
# TMA, the widest, which needs most.
CASES = [("90", ("h16",), ("decode-h16", "paged-16")), ("120", (), ("h3-256",))]
# On Hopper most are whole, on 10.0 a shape that has every kernel; shared memory is asked of each class of configs on each kind of GPU.
THOROUGH = [
    ("100", ("h4-fp16",), ()),
    ("80", ("positions-h4",), ()),
    ("86,89", ("paged-16", "h3-256"), some_but("h3-256", "paged-16")),
    ("90", some_but("h16"), ()),
    ("90", tuple(shape for shape in REST if shape not in ("h4-fp16", "positions-h4")), ("h4-fp16", "positions-h4")),
    ("100", ("decode-h16",), ("h16", "h64-192-128")),  # as much shared memory as Hopper, where all classes are whole
    ("120", ("decode-h16", "h64-192-128"), ("h16", "h12-256-small")),  # decoding and pages need least, and fit 8.6's as much
]
# Bytes that a thread may spill with Triton 3.9's assembler. Most configs were chosen so that nothing spills; dK and dV hold two
# accumulators and two operands in registers, and measure faster with a pipeline and spills than without either (docs/kernels.md).
# For dq_blocks_kernel with head dims of 256 the assembler takes 168 registers and spills 8 bytes, or 178 and none; also 168 for
# triton-token's forward_kernel.
# Triton 3.7's assembler spills up to 440 bytes in a few of the others.
OLDER = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
SPILLS = {
    "forward_kernel": 32,
    "forward_ranges_kernel": 16,
    "forward_small_blocks_kernel": 16,
    "visit_kernel": 64,
    "dq_blocks_kernel": 16,
    "partial_dkdv_kernel": 640,
    "partial_kernel": 160,
    "rank_kernel": 16,
    "scatter_kernel": 16,
    "sum_parts_kernel": 16,
}
WIDE_TILE, TILE = 448, 64  # triton-tile with head dims of 256, or of 192 on sm_120, and with others
LARGE = {"visit_kernel"}  # of triton-block, over large blocks
SHARED = {"rank_kernel", "scatter_kernel", "partial_dkdv_kernel", "sum_parts_kernel"}
GROUP = {"forward_ranges_kernel", "forward_blocks_kernel", "dq_kernel", "dq_blocks_kernel"}
KERNELS = {
    "triton-group": SHARED | GROUP,
    "triton-token": SHARED | {"forward_kernel", "dq_kernel"},
    "triton-tile": SHARED | {"union_kernel", "forward_kernel", "dq_kernel"},
    "triton-block": SHARED | {"partial_kernel", "join_kernel", "delta_kernel", "sum_dq_kernel"},
}


def spills_allowed(kernel: dict[str, object]) -> int:
    """float32 runs without tensor cores, for parity: it may spill a few bytes."""
    name, shape = str(kernel["kernel"]), str(kernel["shape"])
    if shape.endswith("fp32"):
        return 512
    if name == "partial_dkdv_kernel" and shape == "h64-192-128":  # accumulators of 320 columns
        return 832 * (2 if OLDER else 1)
    tile = kernel["backend"] == "triton-tile" and name in ("forward_kernel", "dq_kernel")
    wide = shape in ("h3-256", "h12-256-small") or (shape == "h64-192-128" and kernel["sm"] == 120)
    allowed = (WIDE_TILE if wide else TILE) if tile else SPILLS.get(name, 0)
    return max(allowed, 512) if OLDER and name != "partial_dkdv_kernel" else allowed * (2 if OLDER else 1)


@pytest.mark.slow
@pytest.mark.parametrize(("targets", "whole", "shared"), [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)])
def test_kernels_fit(targets: str, whole: tuple[str, ...], shared: tuple[str, ...]) -> None:
    found = compiled_apart(targets, *whole, "--shared", *shared)
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["shape"] in shared or kernel["spilled"] <= spills_allowed(kernel), kernel
    assert {kernel["shape"] for kernel in found} == {*whole, *shared}
    for sm, (backend, kernels) in itertools.product(map(int, targets.split(",")), KERNELS.items()):
        blocks = {"forward_blocks_kernel", "dq_blocks_kernel"} if sm >= 90 else set()
        names = {kernel["kernel"] for kernel in found if (kernel["backend"], kernel["sm"]) == (backend, sm)}
        by_tma = {kernel["kernel"] for kernel in found if (kernel["backend"], kernel["sm"]) == (backend, sm) and kernel["tma"]}
        assert names | GROUP >= kernels, backend  # the target decides which of the group's kernels run
        small = {"merge_kernel", "forward_small_blocks_kernel", "dq_small_blocks_kernel"}
        assert names <= kernels | {"combine_kernel", "ends_kernel"} | small | LARGE, backend  # few parts, small tables
        expected = {"triton-group": blocks, "triton-tile": {"forward_kernel", "dq_kernel"}, "triton-block": LARGE & names}
        assert by_tma == (expected.get(backend, set()) if sm >= 90 else set()), backend


@pytest.mark.slow
def test_what_fits_sm_86_fits_sm_80() -> None:
    """The kernels of 8.x have the same configs, and so the same shared memory, of which 8.0 has more."""
    configs = {sm: target_call("h16", sm).settings.kernels for sm in (80, 86, 89)}
    assert configs[80] == configs[86] == configs[89]
    assert TARGETS[80] > TARGETS[86]


@pytest.mark.slow
def test_append_and_compression_fit() -> None:
    found = compiled_apart("cache", "90", "many")
    assert [kernel["kernel"] for kernel in found] == ["append_kernel", "hidden_kernel", "out_kernel"]
    for kernel in found:
        assert kernel["shared"] <= 99 << 10, kernel  # of SM 8.6 and 8.9
        assert kernel["spilled"] == 0, kernel


KERNELS_CHOOSE = {"forward_kernel", "block_scores_kernel", "top_n_kernel", "dq_kernel", "dkdv_kernel", "sum_sections_kernel"}
TENSOR_CORES = {"forward_kernel", "block_scores_kernel", "dq_kernel", "dkdv_kernel"}


# Bytes that choosing may spill per thread: a row of few blocks keeps its masks in memory. Triton 3.6 spills nothing in
# packed_logits_kernel, 3.9 within its loop for Qwen3.8's indexer.
SPILLED = {"top_n_kernel": 8, "packed_logits_kernel": 72}

# Attention and its choice; a choice without attention; few rows over pages. The others have the same kernels of other sizes and bounds, or
# for 8.0.
SOME_CHOOSE = ("h16", "msa", "pages", "few-msa-pages-e4m3", "packed-msa-pages")
PACKED = ("packed-msa", "packed-msa-pages-e4m3", "packed-qsa-pages", "packed-h8")
OTHERS = ("h8-64", "most-blocks", "packed", "pages-drafts", "few-msa-e4m3", "few-qsa-drafts-pages", "few-nsa", "80", "moba", "few-msa")


@pytest.mark.slow
@pytest.mark.parametrize("asked", [SOME_CHOOSE, pytest.param((*PACKED, *OTHERS), marks=pytest.mark.thorough)])
def test_choosing_fits(asked: tuple[str, ...]) -> None:
    """In one process."""
    found = compiled_apart("choose", "90", *asked)
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["spilled"] <= SPILLED.get(kernel["kernel"], 0), kernel
        assert kernel["looped"] == 0 or kernel["kernel"] == "packed_logits_kernel", kernel
    of = {shape: [kernel for kernel in found if kernel["shape"] == shape] for shape in asked if not shape.isdigit()}
    assert len(found) == sum(map(len, of.values()))
    for shape, kernels in of.items():
        if shape in ("msa", "moba"):  # without attention
            sm, scoring = (80, "block_scores_kernel") if shape == "moba" else (90, "block_logits_kernel")
            assert {(kernel["kernel"], kernel["sm"]) for kernel in kernels} == {(scoring, sm), ("top_n_kernel", sm)}
            for kernel in kernels:
                assert kernel["wgmma"] == kernel["tma"] == (kernel["kernel"] == "block_logits_kernel"), kernel
        elif shape == "most-blocks":
            assert [(kernel["kernel"], kernel["spilled"]) for kernel in kernels] == [("top_n_kernel", 0), ("wide_rows_kernel", 0)]
        elif shape.startswith("few"):
            assert [kernel["kernel"] for kernel in kernels] == ["few_scores_kernel", "top_n_kernel"]
            assert kernels[0]["spilled"] == 0, kernels
        elif shape.startswith("packed-"):
            tiles = [] if shape == "packed-h8" else ["tile_starts_kernel", "packed_logits_kernel"]
            assert [kernel["kernel"] for kernel in kernels] == ["few_scores_kernel", *tiles, "top_n_kernel"]
        elif shape.startswith("pages"):
            assert [kernel["kernel"] for kernel in kernels] == ["attention_kernel", "importance_kernel", "top_n_kernel"]
            for kernel in kernels:
                assert kernel["spilled"] == 0, kernel
                assert kernel["shared"] <= 99 << 10, kernel  # on SM 8.6 and 8.9, too
        else:
            assert {kernel["kernel"] for kernel in kernels} == KERNELS_CHOOSE
            assert all(kernel["wgmma"] == (kernel["kernel"] in TENSOR_CORES) for kernel in kernels), kernels


@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, pytest.param(80, marks=pytest.mark.thorough)])
def test_gates_compile(sm: int) -> None:
    found = compiled_apart("gate", str(sm))
    each = ["gate_kernel", "raise_kernel", "delta_kernel", *["gate_backward_kernel"] * 2]
    assert [(kernel["sm"], kernel["kernel"]) for kernel in found] == [(sm, name) for name in each]
    assert all(kernel["spilled"] == 0 for kernel in found), found


@pytest.mark.slow
@pytest.mark.parametrize("sm", [pytest.param(86, marks=pytest.mark.thorough), 90])
def test_windows_fit(sm: int) -> None:
    """8.6 has the least shared memory, 9.0 has TMA and WGMMA."""
    found = compiled_apart("window", str(sm), "h16")
    assert {(kernel["sm"], kernel["kernel"]) for kernel in found} == {(sm, f"{name}_kernel") for name in ("forward", "dq", "dkdv")}
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert sm < 90 or (kernel["spilled"] == 0 and kernel["wgmma"] and kernel["tma"]), kernel


LOSS_PASSES = {"lse_kernel", "join_lse_kernel", "loss_kernel", "sum_rows_kernel", "sum_keys_kernel"}
DENSE_PASSES = {"dense_lse_kernel", "dense_loss_kernel", "dense_sum_rows_kernel", "dense_sum_keys_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "shapes"),
    [
        (90, ("m3", "m3-warm-up", "ranges-of-many-tiles")),
        pytest.param(86, ("m3", "m3-warm-up", "h12-256-small", "h3-192", "h1-256-fp32"), marks=pytest.mark.thorough),
    ],
)
def test_the_loss_of_an_indexer_fits(sm: int, shapes: tuple[str, ...]) -> None:
    """8.6 has the least shared memory."""
    found = compiled_apart("loss", str(sm), *shapes)
    for shape in shapes:
        names = {kernel["kernel"] for kernel in found if kernel["shape"] == shape}
        assert names >= (DENSE_PASSES if shape == "m3-warm-up" else LOSS_PASSES), shape
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert sm < 90 or kernel["wgmma"] == (kernel["kernel"] in ("lse_kernel", "loss_kernel", "dense_lse_kernel", "dense_loss_kernel")), (
            kernel
        )


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx950", marks=pytest.mark.thorough)])
def test_the_kernels_of_decoding_compile_for_amd_and_fit(arch: str) -> None:
    found = compiled_apart("hip", arch, "triton-token", "decode-h16", "triton-group", "paged-16")
    assert [kernel["kernel"] for kernel in found] == ["forward_kernel", "combine_kernel", "forward_blocks_kernel"]
    for kernel in found:
        assert kernel["shared"] <= kernel["limit"], kernel
        assert kernel["hsaco"] > 0, kernel
