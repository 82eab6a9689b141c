"""Keys and values as e4m3 numbers with float32 scales, for quantized KV caches."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from nsa_sel.core.arguments import as_tensor
from nsa_sel.core.quantized import LARGEST, stored
from nsa_sel.errors import ArgumentError, shown

Each = Literal["tensor", "head", "page"]
_SMALLEST = torch.finfo(torch.float32).tiny  # whose reciprocal is finite
_DIMS = {"tensor": (0, 1, 2, 3), "head": (0, 1, 3), "page": (1, 3)}  # of the numbers that share a scale


def quantize_e4m3(x: Tensor, each: Each = "head") -> tuple[Tensor, Tensor]:
    """A cache of keys, or of values, in float8_e4m3fn, and its scale: the largest magnitude over 448, e4m3's largest number.

    Numbers are within 1/16 of their own magnitude, or within scale / 1024 where they are small. Not differentiable.

    Args:
        x: [B,S_max,G,D], or pages [pages,page_size,G,D]; any float dtype. NaN and infinity count for no scale and become NaN.
        each: what gets a scale of its own: "tensor", "head" (each of the G groups), or "page" (each group of each page, of pages).

    Returns:
        stored in float8_e4m3fn, shaped as x, and scale in float32, [1], [G] or [pages,G], as `selection_attention_with_kvcache` takes
        them. x is about stored * scale. The scale of zeros is 1.

    Raises:
        ArgumentError: another shape, dtype or word.
    """
    x = as_tensor("x", x).detach()
    if x.dim() != 4 or not x.is_floating_point():
        value = f"{x.dtype} of shape {tuple(x.shape)}"
        raise ArgumentError("x", value, "a cache [B,S_max,G,D] or pages [pages,page_size,G,D] of floats", "pass keys before the heads")
    if each not in get_args(Each):
        raise ArgumentError("each", shown(each), ", ".join(get_args(Each)), "pass one of these words")
    wide = x.float()
    finite = wide.isfinite()
    if x.numel():
        largest = torch.where(finite, wide.abs(), 0).amax(_DIMS[each], keepdim=True)
    else:  # of no numbers there is no largest
        largest = wide.new_zeros([1 if dim in _DIMS[each] else size for dim, size in enumerate(x.shape)])
    scale = torch.where(largest > 0, (largest / LARGEST).clamp(min=_SMALLEST), 1.0)
    numbers = stored(torch.where(finite, wide, torch.nan), scale)
    return numbers, scale.reshape(x.shape[0], x.shape[2]) if each == "page" else scale.reshape(-1)
