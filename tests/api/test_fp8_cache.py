"""`NSACache` in e4m3: what its pages hold, what layers make of it, and which scales and devices it takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from nsa_sel import NSACache, quantize_e4m3
from nsa_sel.caching import prefill, quantized
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ArgumentError
from nsa_sel.quantize import STORED, stored
from tests.helpers.cases import assert_within_twice_baseline
from tests.helpers.layer import Model, few_bits, make_layer, short_numbers, with_stored_keys

SIZES: dict[str, Any] = {"layers": 3, "pages": 4, "page_size": 16, "groups": 2, "head_dim": 4, "kv_dtype": STORED}


@pytest.mark.parametrize("scale", [1.0, 2.0**-5, 0.3, 1e30, 1e-30])
def test_stored_numbers_are_the_nearest(scale: float) -> None:
    """Of all float16 numbers, ties to even; beyond 448 they saturate, and NaN stays NaN."""
    x = torch.arange(1 << 16).to(torch.uint16).view(torch.float16)
    found = stored(x, torch.tensor(scale)).double()
    assert torch.equal(found.isnan(), x.isnan())
    x, found = x[~x.isnan()], found[~x.isnan()]
    exact = (x.double() * float(1 / torch.tensor(scale))).float().double().clamp(-448, 448)
    every = torch.arange(127, dtype=torch.uint8).view(STORED).double()  # from 0 to 448
    upper = torch.searchsorted(every, exact.abs()).clamp(min=1)
    low, high = exact.abs() - every[upper - 1], every[upper] - exact.abs()
    nearest = every[torch.where((low < high) | ((low == high) & (upper % 2 == 1)), upper - 1, upper)]
    assert torch.equal(found, nearest.copysign(exact))


@pytest.mark.parametrize("name", ["mlp", "mean"])
def test_layers_attend_to_what_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, token by token, and as a prefill does: within twice the error of a float32 layer with the same numbers."""
    monkeypatch.setattr(prefill, "MIN_ROWS", 9)
    layer = short_numbers(make_layer(name, torch.float32))
    x = few_bits(torch.randn(2, 45, layer.width))
    heads = 1 + torch.arange(layer.groups)[None]
    scales = {"k": 0.03 * heads, "v": 0.02 * heads, "v_win": 0.004}  # the last saturates
    model = Model([layer], 24, 8, kv_dtype=STORED, kv_scales=scales)
    assert model.cache.scales is not None
    exact = with_stored_keys(layer, model.cache.scales.layer(0), torch.float64)(x.double())
    baseline = model.plain[0](x)
    assert float((layer(x) - baseline).abs().max()) > 0.01 * float(baseline.abs().max())
    for chunks in ([45], [1] * 5 + [3, 19, 1, 17], [7, 1, 8, 29]):
        sequences = [model.cache.open() for _ in x]
        found = torch.cat([torch.stack(model.step(sequences, list(part))) for part in x.split(chunks, 1)], 1) - x
        assert_within_twice_baseline(found, exact, baseline)
        for sequence in sequences:
            model.cache.free(sequence)


def test_pages_of_a_cache_calibrate_another() -> None:
    """As docs/serving.md does it: one scale for each group of each layer, by which nothing saturates."""
    layers = [make_layer("mlp", torch.float32), make_layer("mlp", torch.float32, window=64)]
    layers[0].window = 64
    x, wide = torch.randn(1, 50, layers[0].width), NSACache.of(layers, 8, 8)
    found = []
    step = wide.step([wide.open()], 50)
    for i, layer in enumerate(layers):
        found.append(layer(x, cache=step[i]))
    scales = {name: torch.stack([quantize_e4m3(y[:-1])[1] for y in getattr(wide.pools, name)]) for name in ("k", "v", "k_win", "v_win")}
    narrow = NSACache.of(layers, 8, 8, kv_dtype=STORED, kv_scales=scales)
    step = narrow.step([narrow.open()], 50)
    for i, layer in enumerate(layers):
        y = layer(x, cache=step[i])
        assert float((y - found[i]).abs().mean()) < 0.05 * float(found[i].abs().mean())
    assert narrow.scales is not None
    for name, scale in narrow.scales._asdict().items():
        whole, numbers = getattr(wide.pools, name)[:, :7], getattr(narrow.pools, name)[:, :7].float() * scale[:, None, None, :, None]
        assert bool(((whole - numbers).abs() <= torch.maximum(whole.abs() / 16, scale[:, None, None, :, None] / 512)).all())
    assert narrow.pools.k.nbytes * 4 == wide.pools.k.nbytes
    for name in ("k_cmp", "v_cmp", "k_raw", "v_raw"):  # what blocks are chosen by is not quantized
        assert torch.equal(getattr(narrow.pools, name)[:, :-1], getattr(wide.pools, name)[:, :-1])


def test_scales_of_any_shape_are_those_of_layers_and_groups() -> None:
    each = torch.rand(3, 2) + 0.1
    scales = NSACache(**SIZES, kv_scales={"k": each, "v": each[:, 0], "k_win": 0.5}).scales
    assert scales is not None
    for found, wanted in zip(scales, (each, each[:, :1].expand(3, 2), torch.full((3, 2), 0.5), torch.ones(3, 2)), strict=True):
        assert torch.equal(found, wanted)
    assert NSACache(**{**SIZES, "kv_dtype": torch.bfloat16}).scales is None


def test_float16_holds_what_its_caches_store() -> None:
    """With the largest scale, too: that of keys up to float16's largest number."""
    every = torch.cat((torch.arange(127), torch.arange(128, 255))).to(torch.uint8).view(STORED)
    scale = quantize_e4m3(torch.tensor([65504.0, -65504.0]).view(1, 1, 2, 1))[1]
    scales = NSACache(**{**SIZES, "dtype": torch.float16, "kv_scales": {"v": scale.expand(3, 2)}}).scales
    assert scales is not None
    found = quantized.dequantized(every.view(1, 1, -1, 1).expand(1, 2, -1, 1), scales.v[0], torch.float16)
    assert float(found.max()) == 65504.0
    assert torch.equal(found, (every.float() * scale[:, None]).half().view_as(found))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "e5m2": ({"kv_dtype": torch.float8_e5m2}, r"kv_dtype is torch.float8_e5m2; allowed: torch.float8_e4m3fn, .*: e5m2 has 2 bits"),
    "another": ({"kv_dtype": torch.float32}, r"kv_dtype is torch.float32; allowed: torch.float8_e4m3fn, or the cache's dtype torch.bf"),
    "float64": ({"dtype": torch.float64}, r"dtype is torch.float64; allowed: torch.float16, .* with kv_dtype"),
    "unquantized": ({"kv_dtype": None, "kv_scales": {"k": 1.0}}, "kv_scales is given for an unquantized cache"),
    "no such pool": ({"kv_scales": {"keys": 1.0}}, "kv_scales is of 'keys'; allowed: of k, v, k_win, v_win"),
    "zero": ({"kv_scales": {"v": 0.0}}, r"kv_scales\['v'\] is from 0 to 0; allowed: numbers from 1e-30 to 1e\+30"),
    "float16": (
        {"dtype": torch.float16, "kv_scales": {"k": torch.tensor([1.0, 1.0, 147.0])}},
        r"kv_scales\['k'\] is from 1 to 147; allowed: numbers from 1e-30 to 146\.214 for keys and values of torch\.float16",
    ),
    "negative": ({"kv_scales": {"v": torch.tensor([1.0, -2.0, 1.0])}}, r"kv_scales\['v'\] is from -2 to 1;"),
    "nan": ({"kv_scales": {"v": math.nan}}, r"kv_scales\['v'\] is from nan to nan;"),
    "of pages": ({"kv_scales": {"k_win": torch.ones(5, 2)}}, r"kv_scales\['k_win'\] is of shape \(5, 2\); .* layers = 3, G = 2"),
    "float64 scales": ({"kv_scales": {"k": torch.ones(3).double()}}, r"kv_scales\['k'\] is of dtype torch.float64"),
    "text": ({"kv_scales": {"k": "1"}}, r"kv_scales\['k'\] is a str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_cache(name: str) -> None:
    changed, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        NSACache(**{**SIZES, **changed})


@pytest.mark.parametrize(("sm", "refused"), [(86, True), (89, False), (90, False)])
def test_gpus_without_e4m3_are_refused(sm: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "device_info", lambda device: DeviceInfo(kind="cuda", name="a GPU", sm=sm))
    if not refused:
        assert NSACache(**SIZES).pools.k.dtype == STORED
        return
    with pytest.raises(ArgumentError, match=r"kv_dtype is .* on a GPU of SM 8\.6; allowed: GPUs of SM 8\.9 and newer.*leave kv_dtype out"):
        NSACache(**SIZES)
