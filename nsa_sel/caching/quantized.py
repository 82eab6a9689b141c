"""Scales of a cache in e4m3, and what its stored numbers stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.core import registry
from nsa_sel.core.arguments import as_tensor
from nsa_sel.core.call import device_info
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.quantize import E5M2, FORMAT, LARGEST, QUERIES, STORED

_LEAST, _MOST = 1e-30, 1e30  # of a scale: kernels divide by it


class Scales(NamedTuple):
    """Of the pools of these names in e4m3: key = stored * scale. float32, [layers,G] of a cache or [G] of one of its layers."""

    k: Tensor
    v: Tensor
    k_win: Tensor
    v_win: Tensor

    def layer(self, i: int) -> Scales:
        """Views of one layer's."""
        return Scales(*(x[i] for x in self))


def scales_of(
    kv_dtype: torch.dtype | None, kv_scales: Mapping[str, Tensor | float] | None, dtype: torch.dtype, layers: int, G: int,
    device: torch.device,
) -> Scales | None:  # fmt: skip
    """Scales of a cache of layers of `dtype`, None where its keys and values are not quantized; ArgumentError for what does not fit.

    Args:
        kv_dtype, kv_scales: as of `NSACache`.
        dtype, layers, G, device: the cache's.
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
        raise ArgumentError("kv_scales", f"a {type(kv_scales).__name__}", f"a mapping from {', '.join(Scales._fields)}", "name the pools")
    given = {} if kv_scales is None else dict(kv_scales)
    unknown = [name for name in given if name not in Scales._fields]
    if unknown:
        raise ArgumentError("kv_scales", f"of {shown(unknown[0])}", f"of {', '.join(Scales._fields)}", "name pools of the cache")
    with torch.inference_mode(False):
        return Scales(*(_scale(name, given.get(name, 1.0), layers, G, dtype).to(device) for name in Scales._fields))


def dequantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored keys x [B,G,N,D] times scale [G] in `dtype`, rounded once: the product is one of float32. `dtype` holds it (`scales_of`)."""
    return x.to(dtype).mul_(scale[:, None, None])


def _scale(name: str, scale: Tensor | float, layers: int, G: int, dtype: torch.dtype) -> Tensor:
    """[layers,G] of one number, [layers] or [layers,G]. Waits for a GPU where it lies on one."""
    most = min(_MOST, torch.finfo(dtype).max / LARGEST)  # a prefill converts stored numbers to dtype, whose keys need no more
    name = f"kv_scales[{name!r}]"
    x = torch.tensor(float(scale)) if isinstance(scale, int | float) else as_tensor(name, scale).detach()
    if x.dtype != torch.float32:
        raise ArgumentError(name, f"of dtype {x.dtype}", "torch.float32", "call float() on it")
    if x.numel() != 1 and x.shape not in ((layers,), (layers, G)):
        allowed = f"one number, [layers] or [layers,G] for layers = {layers}, G = {G}"
        raise ArgumentError(name, f"of shape {tuple(x.shape)}", allowed, "give each layer, or each group of each layer, one")
    if not bool(((x >= _LEAST) & (x <= most)).all()):
        low, high = float(x.min()), float(x.max())
        allowed = f"numbers from {_LEAST:g} to {most:g} for keys and values of {dtype}"
        raise ArgumentError(name, f"from {low:g} to {high:g}", allowed, "see nsa_sel.quantize_e4m3")
    x = x.reshape(1, 1) if x.numel() == 1 else x.reshape(layers, -1)
    return x.expand(layers, G).clone()


def _check_device(device: torch.device) -> None:
    """ArgumentError for a GPU on which no kernel reads e4m3: packed SDPA alone, which gathers keys, is no way to decode."""
    facts = device_info(device)
    least = min(x.limits.quantized[FORMAT] for x in registry.backends().values() if FORMAT in x.limits.quantized and not x.fallback)
    if facts.kind == "cuda" and (facts.sm or 0) < least:
        value, allowed = f"{STORED} on {facts.name} of SM {(facts.sm or 0) / 10}", f"GPUs of SM {least / 10} and newer, or a CPU"
        raise ArgumentError("kv_dtype", value, f"{allowed}: older ones cannot convert e4m3", "leave kv_dtype out, or use a newer GPU")
