"""Device memory of a cache, and the scales of pools in e4m3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.caching.sequences import Copies
from nsa_sel.caching.step_tensors import StepSizes
from nsa_sel.core import registry
from nsa_sel.core.arguments import as_tensor
from nsa_sel.core.call import device_info
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.quantize import E5M2, FORMAT, LARGEST, QUERIES, STORED, as_bytes

_MIN_SCALE, _MAX_SCALE = 1e-30, 1e30  # kernels divide by a scale


class Pools(NamedTuple):
    """Pages of a cache [layers, pages + 1, ...], or of one layer [pages + 1, ...]. The extra page at the end is never
    read. k and v share memory [layers, pages + 1, G, page_size, Dk + Dv] (`joined`), which decoding reads fastest.

    Attributes:
        k, v: [pages + 1,page_size,G,D], selected branch, with rotary positions. May be e4m3, like k_win and v_win.
        k_cmp, v_cmp: [pages + 1,page_size / compress_stride,G,D], compressed keys, stored at the piece of
            compress_stride keys in which they end. A page then depends only on its own and earlier tokens, so sequences
            with the same prefix can share it. For `MSAttention` layers k_cmp has their index keys, one head of Di, and the
            tensors after it have no columns.
        k_win, v_win: [window_pages + 1,page_size,G,D], window, with rotary positions.
        k_raw, v_raw: [window_pages + 1,page_size,G,D], compressed branch, before compression.
    """

    k: Tensor
    v: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_win: Tensor
    v_win: Tensor
    k_raw: Tensor
    v_raw: Tensor

    @classmethod
    def make(
        cls, layers: int, sizes: StepSizes, G: int, dims: tuple[int, int], index_dim: int | None, dtype: torch.dtype,
        attended: torch.dtype, device: torch.device,
    ) -> Pools:  # fmt: skip
        """Allocate zeros. dims: Dk and Dv. index_dim: Di of index keys. dtype: of k_cmp, v_cmp, k_raw, v_raw. attended: dtype
        of k, v, k_win, v_win."""
        full, recent = (sizes.pages, sizes.page_size), (sizes.recent_pages, sizes.page_size)
        shapes, (Dk, Dv) = (((sizes.pages, sizes.pieces_per_page), dtype), (recent, attended), (recent, dtype)), dims
        heads = [(G, D) for D in dims] * 3 if index_dim is None else [(1, index_dim), *[(1, 0)] * 5]
        each = zip((shape for shape in shapes for _ in dims), heads, strict=True)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of inference mode
            both = torch.zeros(layers, full[0] + 1, G, full[1], Dk + Dv, dtype=attended, device=device).transpose(2, 3)
            others = (torch.zeros(layers, n + 1, size, *head, dtype=x, device=device) for ((n, size), x), head in each)
            return cls(both[..., :Dk], both[..., Dk:], *others)

    def layer(self, i: int) -> Pools:
        """Return views of layer i."""
        return Pools(*(x[i] for x in self))

    def copy(self, pages: Copies, window_pages: Copies) -> None:
        """Copy pages in all layers. All sources are read before anything is written."""
        for copies, pools in ((pages, (joined(self.k, self.v), *self[2:4])), (window_pages, self[4:])):
            if copies:
                indices = torch.tensor(copies)
                if self.k.is_cuda:
                    indices = indices.pin_memory().to(self.k.device, non_blocking=True)  # without waiting for the GPU
                source, to = indices.unbind(1)
                for x in map(as_bytes, pools):
                    x.index_copy_(1, to, x.index_select(1, source))


def joined(k: Tensor, v: Tensor) -> Tensor:
    """Return the rows of memory [..., Dk + Dv] that the pools k [..., Dk] and v [..., Dv] of a cache share."""
    return k.as_strided((*k.shape[:-1], k.shape[-1] + v.shape[-1]), k.stride())


class CacheScales(NamedTuple):
    """Scales of the e4m3 pools of these names: key = stored * scale. float32, [layers,G] of a cache or [G] of one
    layer."""

    k: Tensor
    v: Tensor
    k_win: Tensor
    v_win: Tensor

    def layer(self, i: int) -> CacheScales:
        """Return views of layer i."""
        return CacheScales(*(x[i] for x in self))


def scales_of(
    kv_dtype: torch.dtype | None, kv_scales: Mapping[str, Tensor | float] | None, dtype: torch.dtype, layers: int, G: int,
    device: torch.device,
) -> CacheScales | None:  # fmt: skip
    """Return the scales of a cache, or None if its keys and values are not quantized.

    Args:
        kv_dtype, kv_scales: as for `NSACache`.
        dtype, layers, G, device: of the cache.

    Raises:
        ArgumentError: an unsupported dtype, scale or device.
    """
    if kv_dtype is None or kv_dtype == dtype:
        if kv_scales is not None:
            raise ArgumentError("kv_scales", "given for an unquantized cache", f"kv_dtype = {STORED}, or no scales", "leave them out")
        return None
    if kv_dtype != STORED:
        why = f": {E5M2}" if kv_dtype == torch.float8_e5m2 else ""
        raise ArgumentError("kv_dtype", shown(kv_dtype), f"{STORED}, or the cache's dtype {dtype}{why}", f"pass {STORED}")
    if dtype not in QUERIES:
        raise ArgumentError("dtype", shown(dtype), f"{', '.join(map(str, QUERIES))} with kv_dtype = {STORED}", "leave kv_dtype out")
    _check_device(device)
    if not isinstance(kv_scales, Mapping | None):
        raise ArgumentError(
            "kv_scales", f"a {type(kv_scales).__name__}", f"a mapping from {', '.join(CacheScales._fields)}", "name the pools"
        )
    given = {} if kv_scales is None else dict(kv_scales)
    unknown = [name for name in given if name not in CacheScales._fields]
    if unknown:
        raise ArgumentError("kv_scales", f"of {shown(unknown[0])}", f"of {', '.join(CacheScales._fields)}", "name pools of the cache")
    with torch.inference_mode(False):
        return CacheScales(*(_scale(name, given.get(name, 1.0), layers, G, dtype).to(device) for name in CacheScales._fields))


def dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return stored keys x [B,G,N,D] times scale [G] in `dtype`. The product is rounded once and is in range
    (`scales_of` checks)."""
    return x.to(dtype).mul_(scale[:, None, None])


def _scale(name: str, scale: Tensor | float, layers: int, G: int, dtype: torch.dtype) -> Tensor:
    """Return a scale as float32 [layers,G], from one number, [layers] or [layers,G]. Synchronizes if `scale` is on a
    GPU."""
    most = min(_MAX_SCALE, torch.finfo(dtype).max / LARGEST)  # a prefill converts keys to dtype, where they must be in range
    name = f"kv_scales[{name!r}]"
    x = torch.tensor(float(scale)) if isinstance(scale, int | float) else as_tensor(name, scale).detach()
    if x.dtype != torch.float32:
        raise ArgumentError(name, f"of dtype {x.dtype}", "torch.float32", "call float() on it")
    if x.numel() != 1 and x.shape not in ((layers,), (layers, G)):
        raise ArgumentError(
            name,
            f"of shape {tuple(x.shape)}",
            f"one number, [layers] or [layers,G] for layers = {layers}, G = {G}",
            "give each layer, or each group of each layer, one",
        )
    if not bool(((x >= _MIN_SCALE) & (x <= most)).all()):
        low, high = float(x.min()), float(x.max())
        raise ArgumentError(
            name,
            f"from {low:g} to {high:g}",
            f"numbers from {_MIN_SCALE:g} to {most:g} for keys and values of {dtype}",
            "see nsa_sel.quantize_e4m3",
        )
    x = x.reshape(1, 1) if x.numel() == 1 else x.reshape(layers, -1)
    return x.expand(layers, G).clone()


def _check_device(device: torch.device) -> None:
    """Raise ArgumentError for a GPU without kernels that read e4m3. Packed SDPA gathers keys, which is too slow for
    decoding."""
    facts = device_info(device)
    least = min(x.limits.quantized[FORMAT] for x in registry.backends().values() if FORMAT in x.limits.quantized and not x.fallback)
    if facts.kind == "cuda" and (facts.sm or 0) < least:
        value, allowed = f"{STORED} on {facts.name} of SM {(facts.sm or 0) / 10}", f"GPUs of SM {least / 10} and newer, or a CPU"
        raise ArgumentError("kv_dtype", value, f"{allowed}: older ones cannot convert e4m3", "leave kv_dtype out, or use a newer GPU")
