"""The kernels of a cache's new tokens against plain PyTorch: appended keys, quantized ones, and compressed ones.

Triton's interpreter rounds to e4m3 in its own way, and makes 384 of NaN: there, only numbers that e4m3 has are quantized.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import NSACache, gating
from nsa_sel.backends._triton import cache as cache_kernels
from nsa_sel.backends._triton import elementwise
from nsa_sel.caching.pools import joined
from nsa_sel.caching.step import _weights as weights_of
from nsa_sel.caching.step import append, covered, put
from nsa_sel.compression import BlockMLP
from nsa_sel.quantize import STORED, stored
from tests.helpers.cases import assert_within_twice_baseline
from tests.helpers.layer import poison

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def new_tokens(device: str, dtype: torch.dtype, tokens: list[int]) -> tuple[NSACache, Any, tuple[Tensor, ...]]:
    """A cache whose last keys are random and all else is NaN, its step, and keys and values as a projection gives them: strided."""
    sizes: dict[str, Any] = {"compress_block": 8, "compress_stride": 4, "window": 6, "dtype": dtype, "device": device}
    cache = NSACache(1, 24, 8, 3, 24, 16, **sizes)
    sequences = [cache.open() for _ in tokens]
    for x in cache.pools:
        x.normal_()
    cache.step(sequences, [7, 12, 0, 3])
    step = cache.step(sequences, tokens)[0]
    poison(cache)
    rows = torch.randn(len(tokens), max(tokens), 3, 120, device=device, dtype=dtype)
    return cache, step, rows.split([24, 16] * 3, -1)


def modules(device: str, dtype: torch.dtype) -> tuple[BlockMLP, BlockMLP]:
    torch.manual_seed(0)
    found = BlockMLP(24, 8, 4, bias=False, device=device, dtype=dtype), BlockMLP(16, 8, 4, device=device, dtype=dtype)
    for module in found:
        torch.nn.init.normal_(module.inside)
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_append_writes_every_key_to_its_page(device: str) -> None:
    cache, step, keys = new_tokens(device, torch.float16, [1, 3, 2, 0])
    assert joined(*step.pools[:2]).transpose(1, 2).is_contiguous(), "a group's keys and values are adjacent"
    wanted = [x.clone() for x in step.pools]
    slots = (step.tensors.recent_slot,) * 2 + (step.tensors.slot,) * 2 + (step.tensors.recent_slot,) * 2
    for i, slot, y in zip((6, 7, 0, 1, 4, 5), slots, keys, strict=True):
        put(wanted[i], slot, y)
    to = step.pools
    cache_kernels.append(keys, (to.k_raw, to.v_raw, to.k, to.v, to.k_win, to.v_win), step.tensors.slot, step.tensors.recent_slot)
    own, right = ([x[:-1] for x in pools] for pools in (to, wanted))  # nobody reads the last page
    torch.testing.assert_close(own, right, rtol=0, atol=0, equal_nan=True)


def appended(keys: list[Tensor], scales: tuple[Tensor, ...]) -> list[Tensor]:
    """Append keys [N,G,D] to four e4m3 pools in reverse slot order, and return them. Two more pools store keys[0] unchanged."""
    x = keys[0]
    N, G, D = x.shape
    pools = [torch.zeros(1, N, G, D, dtype=dtype, device=x.device) for dtype in (x.dtype, x.dtype, *[STORED] * 4)]
    slots = torch.arange(N - 1, -1, -1, device=x.device)[None]
    cache_kernels.append(tuple(y[None] for y in (x, x, *keys)), tuple(pools), slots, slots, scales)
    found = [pool[0].flip(0) for pool in pools]
    assert all(torch.equal(y.nan_to_num(), x.nan_to_num()) for y in found[:2])
    return found[2:]


@pytest.mark.parametrize("device", DEVICES)
def test_append_quantizes_numbers_that_e4m3_has(device: str) -> None:
    """Exactly, by powers of two as scales, another one for each group of each pool; beyond 448 they saturate."""
    scales = tuple(2.0 ** torch.arange(-6, 6, device=device).view(4, 3))
    every = torch.cat((torch.arange(127), torch.arange(128, 255))).to(torch.uint8).view(STORED).float().to(device)
    numbers = torch.cat((every, every.new_tensor([449, -500, 1e30, float("inf"), -float("inf")])))
    for y in appended([numbers.expand(1, 3, -1) * scale[:, None] for scale in scales], scales):
        assert torch.equal(y.float(), numbers.clamp(-448, 448).expand_as(y))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_append_quantizes_with_the_bits_of_a_cpu(dtype: torch.dtype) -> None:
    """All numbers of 16 bits, and as many of 32."""
    bits = torch.arange(1 << 16).to(torch.uint16) if dtype.itemsize == 2 else torch.randint(-(1 << 31), 1 << 31, (1 << 16,)).int()
    x = bits.view(dtype).view(-1, 1, 64).expand(-1, 4, -1)
    scales = tuple(10 ** (torch.rand(4) * 6 - 4) for _ in range(4))
    for y, scale in zip(appended([x.cuda()] * 4, tuple(scale.cuda() for scale in scales)), scales, strict=True):
        wanted = stored(x, scale[:, None])
        assert torch.equal(y.cpu().isnan(), wanted.isnan())
        assert torch.equal(y.cpu().view(torch.uint8)[~wanted.isnan()], wanted.view(torch.uint8)[~wanted.isnan()])


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), *(pytest.param("cuda", x, marks=pytest.mark.gpu) for x in (
    torch.float32, torch.bfloat16, torch.float16))])  # fmt: skip
@pytest.mark.parametrize("tokens", [[1, 4, 1, 0], [9, 2, 13, 1]])
def test_compressed_keys_are_those_of_the_mlp(device: str, dtype: torch.dtype, tokens: list[int]) -> None:
    """Within twice the error of the module in the same precision, from float64; nothing else is written. New keys are not in pages yet."""
    cache, step, keys = new_tokens(device, dtype, tokens)
    append(step.pools, step.tensors, [torch.full_like(x, torch.nan) for x in keys])
    before = [x.clone() for x in step.pools]
    placed = step.tensors.compressed_slot < 24 * 2
    assert bool(placed.any())
    assert not bool(placed.all())
    both = modules(device, dtype)
    of_k, of_v = (tuple(x if x is None else x.detach() for x in module.weights()) for module in both)
    raw, to = step.pools[6:], step.pools[2:4]
    cache_kernels.compress(raw, keys[:2], step.tensors.covered, step.tensors.first_new, step.tensors.compressed_slot, of_k, of_v, to, 4)
    append(step.pools, step.tensors, keys)
    slots = step.tensors.compressed_slot[placed]
    rest = torch.ones(len(to[0].flatten(0, 1)), dtype=torch.bool, device=device).index_fill_(0, slots, False)
    for y, mine, clean, module in zip(raw, to, before[2:4], both, strict=True):
        plain = module(covered(y, step.tensors)).transpose(1, 2)[placed].detach()
        exact = module.double()(covered(y, step.tensors).double()).transpose(1, 2)[placed].detach()
        assert_within_twice_baseline(mine.flatten(0, 1)[slots], exact, plain)
        torch.testing.assert_close(mine.flatten(0, 1)[rest], clean.flatten(0, 1)[rest], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_a_token_give_zero(device: str) -> None:
    """Whatever the branches and gates hold there; the others give the gated sum, bit for bit."""
    branches, gates = torch.randn(3, 2, 3, 2, 5, 24, device=device), torch.rand(2, 3, 2, 5, 3, device=device)
    is_token = torch.tensor([[False, True, True], [False, False, True]], device=device)
    wanted, found = torch.empty_like(branches[0]), torch.full_like(branches[0], torch.nan)
    elementwise.write_sum(tuple(branches), gates, wanted)
    for x in (*branches, gates):
        x[~is_token] = torch.nan
    elementwise.write_sum(tuple(branches), gates, found, is_token)
    assert torch.equal(found, wanted * is_token[:, :, None, None, None])
    plain = gating.sum_of_tokens(tuple(branches.cpu()), gates.cpu(), is_token.cpu())
    torch.testing.assert_close(plain, found.cpu())


def test_what_the_kernels_take() -> None:
    """A plain MLP of the cache's dtype; all else is called as it is."""
    (of_keys, module), x = modules("cpu", torch.float32), torch.zeros(1)
    assert [y if y is None else tuple(y.shape) for y in weights_of(of_keys, x) or ()] == [(8, 24), (48, 192), (48,), (24, 48), None]
    assert [y if y is None else tuple(y.shape) for y in weights_of(module, x) or ()] == [(8, 16), (32, 128), (32,), (16, 32), (16,)]
    assert weights_of(module, x.bfloat16()) is None
    assert weights_of(module.forward, x) is None
    handle = module.second.register_forward_hook(lambda *_: None)
    assert weights_of(module, x) is None
    handle.remove()
    assert weights_of(module.double(), x.double()) is None
