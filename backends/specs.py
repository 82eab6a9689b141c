"""Declare what each built-in backend can run, as data. Imports no kernel framework, so that policies can read it
cheaply."""

from __future__ import annotations

import msgspec

from nsa_sel.core.backend import Backend, Library, Limits, Requirement, StepKernels, Switch, TileKernels, WindowKernels

WIDE, WIDEST = 256, 320  # columns of a key plus its value above which Triton kernels use another config

_TRITON = Requirement("triton", "3.4", "pip install 'triton>=3.4' (comes with torch's CUDA builds on Linux)")
# The interpreter computes bf16 dots wrongly, and fp64 exactly. GPUs run the 16-bit dtypes, and fp32 with IEEE dots.
_TRITON_LIMITS = Limits(
    dtypes={"cuda": ("float16", "bfloat16", "float32"), "interpreter": ("float16", "float32", "float64")},
    head_dim_multiple=8,
    head_dim_max=256,
    min_sm=80,
)
# Tiles of keys are powers of two that divide the block, and a tensor core needs at least 16 keys.
_BLOCK_LIMITS = msgspec.structs.replace(_TRITON_LIMITS, block_aligned_only=True, block_multiple=16)
_WITH_CUDA = "pip install 'nsa-sel[cuda13]' (nsa-sel[cuda12] for a driver of CUDA 12)"
_CUPY = Requirement("cupy", "14", _WITH_CUDA)
_CUDA = (
    Library("NVRTC", ("libnvrtc.so.13", "libnvrtc.so.12"), ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), _WITH_CUDA),
    Library("NVIDIA driver", ("libcuda.so.1",), (), "install the NVIDIA driver if this machine has a GPU"),
)

# Cost terms (settings/schema.py, COST_TERMS) of each strategy's kernels. A model has at most one "-wide" term, because
# few measured rows are wide.
_GATHERED = ("launch", "pairs", "read", "scores", "rows", "read-wide")
_TILES = ("launch", "union", "pairs", "tile", "rows", "tile-wide")
_BLOCKS = ("launch", "pairs", "exact", "rows", "exact-wide", "visited")  # "visited": blocks of VISITED_WHOLE keys or more
_DECODING = ("launch", "read", "gathered")
_CHOICE = {
    "choose": ("launch", "compressed", "rows", "compressed-wide"),
    "choose-backward": ("launch", "compressed", "rows", "compressed-wide"),
}

_WHOLE_STEPS = TileKernels(
    sm=90, block_multiple=64, blocks_max=16384, heads=(2, 64), key_dims=(64, 128, 192), value_dims=(64, 128), one_head=True
)  # fmt: skip
HOPPER_TILES = msgspec.structs.replace(_WHOLE_STEPS, gathered_blocks=(4, 8, 16, 32), wide_dims=(256,))
ARITHMETIC_TILES = msgspec.structs.replace(_WHOLE_STEPS, block_multiple=1, blocks_max=1 << 24, one_head=False)  # no plan
VISITED_WHOLE = 256  # block size from which triton-block and cuda-block visit a block whole (_triton/large_blocks.py)
E4M3_TILE_ROWS = 16  # largest number of tokens times heads per tile of forward_tokens.cu
# block_gradients.cu, which has no plan of tiles.
HOPPER_LISTS = msgspec.structs.replace(_WHOLE_STEPS, blocks_max=1 << 24, heads=(1, 64), key_dims=(64, 128))
VISITED_KEYS = (128, 64)  # keys per tile of block_partials.cu: the first that divides the block size
HOPPER_STEPS = StepKernels(sm=90, keys=64, dims=(64, 128), few_dims=(256,), few_heads=32, small_blocks=(4, 8, 16, 32))

SPECS = (
    Backend(
        name="sdpa-packed",
        path="nsa_sel.backends.sdpa_packed",
        framework="torch",
        limits=Limits(dtypes=dict.fromkeys(("cpu", "cuda"), ("float16", "bfloat16", "float32", "float64")), quantized={"e4m3": 0}),
        summary="rows bucketed by length, gathered, scaled_dot_product_attention; the fallback that always runs",
        switches=(Switch("use_sel_pack", "pack-off", "unset NSA_USE_SEL_PACK"),),
        fallback=True,
        slow=True,
        cost_terms={"forward": _GATHERED, "decode": _GATHERED, "backward": _GATHERED},
    ),
    Backend(
        name="numba",
        path="nsa_sel.backends.numba_cpu",
        framework="numba",
        limits=Limits(dtypes={"cpu": ("float16", "bfloat16", "float32", "float64")}),
        requires=(Requirement("numba", "0.60", "pip install 'nsa-sel[cpu]'"),),
        summary="parallel CPU loops: over rows forward, over KV positions backward",
    ),
    Backend(
        name="triton-token",
        path="nsa_sel.backends.triton_token",
        framework="triton",
        limits=_TRITON_LIMITS,
        requires=(_TRITON,),
        summary="one program per query row and head; no tensor cores, any h",
        slow=True,
        cost_terms={
            "forward": ("launch", "scores"),
            "decode": ("launch", "scores"),
            "backward": ("launch", "pairs", "scores", "exact"),
        },
    ),
    Backend(
        name="triton-group",
        path="nsa_sel.backends.triton_group",
        framework="triton",
        limits=msgspec.structs.replace(_TRITON_LIMITS, quantized={"e4m3": 89}),  # SM 8.9: first with a conversion
        requires=(_TRITON,),
        summary="one program per query row and KV group: K/V loaded once for all h heads",
        switches=(Switch("triton_group", "group-off", "unset NSA_SEL_TRITON_GROUP"),),
        sets_min_length=True,
        reads_caches=True,
        cost_terms={
            "forward": ("launch", "read", "rows", "read-wide"),
            "decode": (*_DECODING, "read-wide"),
            "tokens": _DECODING,
            "decode-e4m3": _DECODING,
            "tokens-e4m3": _DECODING,
            "backward": ("launch", "pairs", "read", "exact", "rows", "exact-wide"),
        },
    ),
    Backend(
        name="triton-tile",
        path="nsa_sel.backends.triton_tile",
        framework="triton",
        # The plan sorts a row's ranges in one program; one step gathers several small blocks.
        limits=msgspec.structs.replace(_BLOCK_LIMITS, ranges_max=2048, small_blocks=(4, 8)),
        requires=(_TRITON,),
        summary="one program per tile of adjacent rows: K/V loaded once for all of them, over the union of their blocks",
        decodes=False,
        shares="tiles",
        cost_terms={"forward": _TILES, "backward": ("launch", "union", "pairs", "tile", "exact", "rows", "exact-wide")},
    ),
    Backend(
        name="triton-block",
        path="nsa_sel.backends.triton_block",
        framework="triton",
        limits=_BLOCK_LIMITS,
        requires=(_TRITON,),
        summary="one visit per KV block with all rows that chose it; partial results joined in the order of the ranges",
        decodes=False,
        shares="blocks",
        cost_terms={"forward": _BLOCKS, "backward": _BLOCKS},
    ),
    Backend(
        name="cuda-block",
        path="nsa_sel.backends.cupy_cuda.cuda_block",
        framework="cupy",
        limits=msgspec.structs.replace(_BLOCK_LIMITS, dtypes={"cuda": ("float16", "bfloat16")}, min_sm=HOPPER_LISTS.sm),
        requires=(_CUPY, _TRITON),
        libraries=_CUDA,
        summary="triton-block with TMA and wgmma kernels for Hopper",
        switches=(  # plans and sums run in Triton
            Switch("use_triton_sel", "triton-off", "set NSA_USE_TRITON_SEL=1 or runtime.use_triton_sel"),
            Switch("triton_allow_grad", "grad-off", "unset NSA_SEL_TRITON_ALLOW_GRAD"),
        ),
        decodes=False,
        shares="blocks",
        tiles=HOPPER_LISTS,
        cost_terms={
            "forward": ("launch", "union", "pairs", "partials", "exact", "visited"),
            "backward": ("launch", "pairs", "exact", "rows", "visited"),
        },
    ),
    Backend(
        name="cupy-cuda",
        path="nsa_sel.backends.cupy_cuda",
        framework="cupy",
        limits=Limits(
            dtypes={"cuda": ("float16", "bfloat16")},
            head_dim_multiple=8,
            head_dim_max=256,
            min_sm=80,
            quantized={"e4m3": HOPPER_STEPS.sm},
        ),
        requires=(_CUPY,),
        libraries=_CUDA,
        summary="hand-written CUDA: tiles of adjacent rows on Hopper, else one CTA per query row and KV group; dk and dv by KV tiles",
        tiles=HOPPER_TILES,
        steps=HOPPER_STEPS,
        quantized_by=HOPPER_STEPS,
        reads_caches=True,
        cost_terms={
            "forward": _TILES,
            "decode": ("launch", "read", "rows-read", "read-wide"),
            "tokens": ("launch", "read"),  # its tiles take only pages of whole steps
            "decode-e4m3": ("launch", "read"),
            "tokens-e4m3": ("launch", "read"),
            "backward": ("launch", "pairs", "tile", "exact"),
        },
        same_price_if_wide=("backward",),
    ),
)

# Backends of kind "choose", in order of preference without costs.
CHOOSERS = (
    Backend(
        name="choose-cuda",
        path="nsa_sel.backends.choose_cuda",
        framework="cupy",
        kind="choose",
        limits=Limits(
            dtypes={"cuda": ("float16", "bfloat16")},
            head_dim_multiple=8,
            min_sm=90,
            tiles_only=True,
            choice_max=1 << 24,  # choose-triton's limit: its kernels select the blocks
        ),
        requires=(_CUPY, _TRITON),
        libraries=_CUDA,
        summary="choose-triton with TMA and wgmma kernels (cupy-cuda's tiles) for attention to compressed keys and its gradients",
        tiles=ARITHMETIC_TILES,
        cost_terms={**_CHOICE, "choose-backward": ("launch", "compressed", "rows")},
        same_price_if_wide=("choose-backward",),
    ),
    Backend(
        name="choose-triton",
        path="nsa_sel.backends.choose_triton",
        framework="triton",
        kind="choose",
        limits=msgspec.structs.replace(
            _TRITON_LIMITS,
            dtypes={"cuda": ("float16", "bfloat16", "float32"), "interpreter": ("float16", "float32")},
            choice_max=1 << 24,  # whose scores take 64 MiB a row
            quantized={"e4m3": 89},
        ),
        requires=(_TRITON,),
        summary="tiles of rows and heads over compressed keys; importance and top n in chunks of rows",
        cost_terms=_CHOICE,
    ),
    Backend(
        name="choose-torch",
        path="nsa_sel.backends.choose_torch",
        framework="torch",
        kind="choose",
        limits=Limits(dtypes=dict.fromkeys(("cpu", "cuda"), ("float16", "bfloat16", "float32", "float64")), quantized={"e4m3": 0}),
        summary="matrix products and a stable sort, in chunks of rows; the fallback that always runs",
        fallback=True,
        slow=True,
        cost_terms={
            "choose": ("launch", "scores", "rows", "compressed-wide"),
            "choose-backward": ("launch", "scores", "rows", "compressed-wide"),
        },
    ),
)

# Backends of kind "index_loss", in order of preference without costs.
LOSSES = (
    Backend(
        name="loss-triton",
        path="nsa_sel.backends.loss_triton",
        framework="triton",
        kind="index_loss",
        limits=_TRITON_LIMITS,
        requires=(_TRITON,),
        summary="the indexer's loss by KV tiles, with the rows that select each; its gradients in the same pass",
        cost_terms={"index-loss": ("launch", "pairs", "exact", "indexed")},
    ),
    Backend(
        name="loss-torch",
        path="nsa_sel.backends.loss_torch",
        framework="torch",
        kind="index_loss",
        limits=Limits(dtypes=dict.fromkeys(("cpu", "cuda"), ("float16", "bfloat16", "float32", "float64"))),
        summary="masked matrix products in chunks of rows; the fallback that always runs",
        fallback=True,
        slow=True,
        cost_terms={"index-loss": ("launch", "visible")},
    ),
)

# Kernels of sliding windows, in the order in which they are tried; chunks of rows run the rest (_window/).
WINDOWS = (
    WindowKernels(
        name="CUDA",
        path="nsa_sel.backends.window_cuda",
        then="the Triton kernels",
        dtypes=("float16", "bfloat16"),
        head_dim_max=256,
        only_sm=ARITHMETIC_TILES.sm,
        needs="cupy-cuda",
    ),
    WindowKernels(
        name="Triton",
        path="nsa_sel.backends.window_triton",
        then="chunks of rows",
        dtypes=("float16", "bfloat16", "float32"),
        head_dim_max=256,
        min_sm=80,
    ),
)


def tile_columns(Dk: int, Dv: int, size: int) -> tuple[int, int]:
    """Return the tile columns for a key and a value of `size`-byte elements: powers of two from 16 on, or 128 + 64 for
    a 16-bit key."""
    key, value = (max(16, 1 << (width - 1).bit_length()) for width in (Dk, Dv))
    return (192 if key == 256 and Dk <= 192 and size == 2 else key), value


def launch_class(columns: int, size: int) -> str:
    """Return the suffix of a kernel's name in configs/ for tiles of `columns` columns of `size`-byte elements."""
    return "-widest" if size > 2 or columns > WIDEST else "-wide" if columns > WIDE else ""
