"""What each built-in backend can run, as data. Imports no kernel framework: a policy reads this without loading one."""

from __future__ import annotations

import msgspec

from nsa_sel.core.decision import Backend, Library, Limits, Requirement

WIDE, WIDEST = 256, 320  # columns of a key and its value beyond which a Triton kernel has another launch

_TRITON = Requirement("triton", "3.4", "pip install 'triton>=3.4' (comes with torch's CUDA builds on Linux)")
# The interpreter computes bf16 dots wrongly and fp64 exactly; GPUs run the 16-bit types and fp32 with IEEE dots.
_TRITON_LIMITS = Limits(
    dtypes={"cuda": ("float16", "bfloat16", "float32"), "interpreter": ("float16", "float32", "float64")},
    head_dim_multiple=8,
    head_dim_max=256,
    min_sm=80,
)
# Tiles of keys are powers of two that divide the block; the matrix unit takes 16 keys at least.
_BLOCK_LIMITS = msgspec.structs.replace(_TRITON_LIMITS, block_aligned_only=True, block_multiple=16)
_CUPY = "pip install 'nsa-sel[cuda13]' (nsa-sel[cuda12] for a driver of CUDA 12)"

SPECS = (
    Backend(
        name="sdpa-packed",
        path="nsa_sel.backends.sdpa_packed",
        framework="torch",
        limits=Limits(dtypes=dict.fromkeys(("cpu", "cuda"), ("float16", "bfloat16", "float32", "float64"))),
        summary="rows bucketed by length, gathered, scaled_dot_product_attention; the fallback that always runs",
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
        summary="one program per query row and head; no matrix unit, any h",
    ),
    Backend(
        name="triton-group",
        path="nsa_sel.backends.triton_group",
        framework="triton",
        limits=_TRITON_LIMITS,
        requires=(_TRITON,),
        summary="one program per query row and KV group: K/V loaded once for all h heads",
    ),
    Backend(
        name="triton-tile",
        path="nsa_sel.backends.triton_tile",
        framework="triton",
        limits=msgspec.structs.replace(_BLOCK_LIMITS, ranges_max=2048),  # its plan sorts a row's ranges in one program
        requires=(_TRITON,),
        summary="one program per tile of adjacent rows: K/V loaded once for all of them, over the union of their blocks",
    ),
    Backend(
        name="triton-block",
        path="nsa_sel.backends.triton_block",
        framework="triton",
        limits=_BLOCK_LIMITS,
        requires=(_TRITON,),
        summary="one visit per KV block with all rows that chose it; partial results joined in the order of the ranges",
    ),
    Backend(
        name="cupy-cuda",
        path="nsa_sel.backends.cupy_cuda",
        framework="cupy",
        limits=Limits(dtypes={"cuda": ("float16", "bfloat16")}, head_dim_multiple=8, head_dim_max=256, min_sm=80),
        requires=(Requirement("cupy", "14", _CUPY),),
        libraries=(
            Library("NVRTC", ("libnvrtc.so.13", "libnvrtc.so.12"), ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"), _CUPY),
            Library("NVIDIA driver", ("libcuda.so.1",), (), "install the NVIDIA driver; a machine without a GPU has no use for it"),
        ),
        summary="hand-written CUDA: tiles of adjacent rows on Hopper, else one block per query row and KV group; dk and dv by KV tiles",
    ),
)


DQ_GROUPS = 2  # of warps that share a tile in its kernel of dq: logits and their gradients take the registers of a third


MOST_UNION_BLOCKS = 16384  # KV blocks of a cache in the plan of cupy-cuda's tiles: 8 bytes of shared memory each


def hopper_groups(h: int, Dk: int) -> int:
    """Groups of warps, of 64 // h tokens each, that share a tile in cupy-cuda's forward kernel for Hopper: three, two where a tile would
    have more than 64 tokens, or wide keys leave too little memory."""
    return 3 if Dk <= 128 and 3 * (64 // h) <= 64 else 2


def on_hopper_tiles(S: int, S_kv: int, h: int, Dk: int, Dv: int, block_size: int | None) -> bool:
    """Whether cupy-cuda computes such calls by its kernels for Hopper, on that chip: blocks of a multiple of 64 keys, as few as its plan
    has shared memory for, and enough tokens for a tile; dk and dv only up to Dk = 128."""
    if block_size is None or block_size % 64 or not (2 <= h <= 64 and Dk in (64, 128, 192) and Dv in (64, 128)):
        return False
    return hopper_groups(h, Dk) * (64 // h) <= S and S_kv <= MOST_UNION_BLOCKS * block_size


def tile_columns(Dk: int, Dv: int, size: int) -> tuple[int, int]:
    """Columns of the tiles that hold a key and a value of `size`-byte numbers: powers of two from 16 on, or 128 + 64 for a 16-bit key."""
    key, value = (max(16, 1 << (width - 1).bit_length()) for width in (Dk, Dv))
    return (192 if key == 256 and Dk <= 192 and size == 2 else key), value


def launch_class(columns: int, size: int) -> str:
    """What follows a kernel's name in configs/ for so many columns of `size`-byte numbers."""
    return "-widest" if size > 2 or columns > WIDEST else "-wide" if columns > WIDE else ""
