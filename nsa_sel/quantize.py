"""Quantized KV caches: which formats there are, the scales of their keys and values, and checks of both."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from nsa_sel.core.arguments import as_tensor
from nsa_sel.core.request import Quantized
from nsa_sel.errors import ArgumentError, shown

STORED = torch.float8_e4m3fn
FORMAT = "e4m3"  # its name in requests and limits
LARGEST = torch.finfo(STORED).max  # 448
QUERIES = (torch.float16, torch.bfloat16, torch.float32)
E5M2 = "e5m2 has 2 bits of mantissa for the same bytes"


class Scales(NamedTuple):
    """Factors of stored keys and values: key = stored * k[page, group]. Views, whose strides may be 0.

    Attributes:
        k, v: [pages,G] float32, or [1,G] where all pages share them; both None for 1.
        page_keys: keys from the first of a page to the first of the next, where each page has scales of its own; else
            0.
        each: what has a scale of its own, None for scales of 1.
    """

    k: Tensor | None
    v: Tensor | None
    page_keys: int
    each: str | None

    @property
    def quantized(self) -> Quantized:
        """The format as in `Request.quantized`."""
        return FORMAT if self.each is None else f"{FORMAT}/{self.each}"  # type: ignore[return-value]


def stored(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in e4m3: to the nearest, ties to even; beyond 448 it saturates, and NaN stays NaN.

    One division makes the reciprocal, rounded to float32, so that kernels only multiply and give the same bits.
    """
    return (x.float() * scale.reciprocal()).clamp(-LARGEST, LARGEST).to(STORED)


def as_bytes(x: Tensor) -> Tensor:
    """Return a view of e4m3 numbers as bytes, for what PyTorch does not do to them everywhere; other tensors as they
    are."""
    return x.view(torch.uint8) if x.dtype == STORED else x


def scales_of(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, paged: bool
) -> Scales | None:  # fmt: skip
    """Return the scales of a quantized cache, None of another one; ArgumentError for dtypes or scales that do not fit.

    Args:
        q: [B,S_q,G,h,Dk].
        k_cache, v_cache: [B,S_max,G,D], or pages [pages,page_size,G,D].
        k_scale, v_scale: as of `selection_attention_with_kvcache`.
        paged: whether there is a block table.
    """
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.dtype == torch.float8_e5m2:
            raise ArgumentError(name, f"of dtype {x.dtype}", f"{STORED}, or q's dtype {q.dtype}: {E5M2}", f"quantize to {STORED}")
        if x.dtype == torch.uint8:
            raise ArgumentError(name, f"of dtype {x.dtype}", f"{STORED}, or q's dtype {q.dtype}", f"pass {name}.view({STORED})")
    if STORED not in (k_cache.dtype, v_cache.dtype):
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                raise ArgumentError(name, "given for an unquantized cache", f"a cache of {STORED}, or no scale", "leave it out")
        return None
    if k_cache.dtype != v_cache.dtype:
        raise ArgumentError("v_cache", f"of dtype {v_cache.dtype}", f"k_cache's dtype {k_cache.dtype}", "quantize both, or neither")
    if q.dtype not in QUERIES:
        raise ArgumentError(
            "q", f"of dtype {q.dtype}", f"{', '.join(map(str, QUERIES))} over a cache of {STORED}", "call q.to(torch.bfloat16)"
        )
    if k_scale is None and v_scale is None:
        return Scales(None, None, 0, None)
    for name, other, scale in (("k_scale", "v_scale", k_scale), ("v_scale", "k_scale", v_scale)):
        if scale is None:
            raise ArgumentError(
                name,
                None,
                f"a tensor, as {other} is",
                f"pass torch.ones(1, device=q.device) if that is its scale, or leave out {other}, too",
            )
    pages, page_size, G, _ = k_cache.shape
    kinds = [_kind(name, scale, q, G, pages if paged else None) for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))]
    each = max(kinds, key=("tensor", "head", "page").index)
    shape = (pages if each == "page" else 1, G)
    k, v = ((x.reshape(1, 1) if x.numel() == 1 else x).expand(shape) for x in (k_scale, v_scale) if x is not None)
    return Scales(k, v, page_size if each == "page" else 0, each)


def _kind(name: str, scale: object, q: Tensor, G: int, pages: int | None) -> str:
    """Return what has a scale of its own: "tensor", "head" or "page" (each head of each page)."""
    x = as_tensor(name, scale)
    shapes = "one number, [G]" + ("" if pages is None else " or [pages,G]") + f" for G = {G}"
    shapes += "" if pages is None else f", pages = {pages}"
    if x.dtype != torch.float32:
        raise ArgumentError(name, f"of dtype {x.dtype}", "torch.float32", f"call {name}.float() outside the decoding loop")
    if x.device != q.device:
        raise ArgumentError(name, f"on {x.device}", f"q's device {q.device}", f"call {name}.to(q.device) outside the decoding loop")
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(name, "a tensor that requires gradients", "none over a quantized cache", "call it under torch.no_grad()")
    if x.numel() == 1 and x.dim() < 3:
        return "tensor"
    if tuple(x.shape) == (G,):
        return "head"
    if pages is not None and tuple(x.shape) == (pages, G):
        return "page"
    raise ArgumentError(
        name,
        f"of shape {tuple(x.shape)}",
        shapes,
        "give each group one scale, which all keys of its cache share" if pages is None else "give each group, or each page's, one",
    )


Each = Literal["tensor", "head", "page"]
_SMALLEST = torch.finfo(torch.float32).tiny  # whose reciprocal is finite
_DIMS = {"tensor": (0, 1, 2, 3), "head": (0, 1, 3), "page": (1, 3)}  # of the numbers that share a scale


def quantize_e4m3(x: Tensor, each: Each = "head") -> tuple[Tensor, Tensor]:
    """Return a cache of keys, or of values, in float8_e4m3fn, and its scale: the largest magnitude over 448, e4m3's
    largest number.

    Numbers are within 1/16 of their own magnitude, or within scale / 1024 where they are small. Not differentiable.

    Args:
        x: [B,S_max,G,D], or pages [pages,page_size,G,D]; any float dtype. NaN and infinity count for no scale and
            become NaN.
        each: what gets a scale of its own: "tensor", "head" (each of the G groups), or "page" (each group of each page,
            of pages).

    Returns:
        stored in float8_e4m3fn, shaped as x, and scale in float32, [1], [G] or [pages,G], as
        `selection_attention_with_kvcache` takes them. x is about stored * scale. The scale of zeros is 1.

    Raises:
        ArgumentError: another shape, dtype or word.
    """
    x = as_tensor("x", x).detach()
    if x.dim() != 4 or not x.is_floating_point():
        raise ArgumentError(
            "x",
            f"{x.dtype} of shape {tuple(x.shape)}",
            "a cache [B,S_max,G,D] or pages [pages,page_size,G,D] of floats",
            "pass keys before the heads",
        )
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
