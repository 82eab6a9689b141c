"""Layers and their caches for tests, NSA written from the paper's equations, and the layer's kernels against float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from nsa_sel import NSACache, NSAttention, rotary
from nsa_sel.backends import _gate_plain
from nsa_sel.backends._triton import elementwise
from nsa_sel.caching.pools import CacheScales
from nsa_sel.projection import Parts
from nsa_sel.quantize import STORED, as_bytes, stored
from tests.helpers.checks import new_memory_is_nan


def attention_of(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """o [h,Dv] and p [h,keys] of one row's heads q [h,Dk] over k [keys,Dk] and v [keys,Dv]; zeros over no keys."""
    if not len(k):
        return q.new_zeros(len(q), v.shape[1]), q.new_zeros(len(q), 0)
    p = torch.softmax(scale * q @ k.T, -1)
    return p @ v, p


def best_blocks(p: Tensor, t: int, l: int, d: int, block_size: int, n: int, first: int, local: int) -> list[int]:
    """The blocks of a row at position t, ascending, from p [keys] of its group's heads together (Eq. 9 and 10)."""
    current = t // block_size
    importance = [0.0] * (current + 1)
    for i, weight in enumerate(p.tolist()):
        for piece in range(i, i + l // d):  # of d keys each, of which compressed key i covers l / d
            importance[piece * d // block_size] += weight
    forced = [j for j in range(current + 1) if j < first or j > current - local]
    others = sorted((j for j in range(current + 1) if j not in forced), key=lambda j: (-importance[j], j))
    return sorted(forced + others[: n - len(forced)])


def nsa(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor, *, window: int,
    compress_block: int, compress_stride: int, block_size: int, n: int, first: int, local: int, scale: float | None = None,
    q_cmp: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """o [B,S,G,h,Dv] (Eq. 5), arguments as of `nsa_sel.nsa_attention`."""
    B, S, G, _, Dk = q.shape
    S_kv = k_slc.shape[2]
    scale = Dk**-0.5 if scale is None else scale
    q_cmp = q if q_cmp is None else q_cmp
    rows = []
    for b in range(B):
        for s in range(S):
            t = S_kv - S + s
            seen = len([i for i in range(k_cmp.shape[2]) if i * compress_stride + compress_block - 1 <= t])
            for g in range(G):
                compressed, p = attention_of(q_cmp[b, s, g], k_cmp[b, g, :seen], v_cmp[b, g, :seen], scale)
                rule = compress_block, compress_stride, block_size, n, first, local
                keys = [c for j in best_blocks(p.detach().sum(0), t, *rule) for c in range(j * block_size, (j + 1) * block_size) if c <= t]
                selected, _ = attention_of(q[b, s, g], k_slc[b, g, keys], v_slc[b, g, keys], scale)
                near = slice(max(0, t - window + 1), t + 1)
                last, _ = attention_of(q[b, s, g], k_win[b, g, near], v_win[b, g, near], scale)
                g_cmp, g_slc, g_win = gates[b, s, g].split(1, -1)  # [h,1] each
                rows.append(g_cmp * compressed + g_slc * selected + g_win * last)
    return torch.stack(rows).view(B, S, G, *rows[0].shape)


SMALL: dict[str, Any] = {"window": 6, "compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 4}
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"width": 10, "groups": 2, "heads": 2, "head_dim": 4},
    "mean": {
        "width": 6, "groups": 1, "heads": 3, "head_dim": 4, "value_dim": 6, "compression": "mean", "compress_block": 4, "window": 9
    },
    "no-positions": {
        "width": 6, "groups": 2, "heads": 1, "head_dim": 2, "value_dim": 4, "compress_stride": 2, "bias": True, "rotary": False
    },
    "single-keys": {
        "width": 6, "groups": 1, "heads": 2, "head_dim": 2, "compression": "mean", "compress_block": 1, "compress_stride": 1,
        "block_size": 1, "window": 1,
    },
}  # fmt: skip


def make_layer(name: str = "mlp", dtype: torch.dtype = torch.float64, **changed: Any) -> NSAttention:
    """A layer all of whose parameters are random; it takes no gradients."""
    torch.manual_seed(0)
    layer = NSAttention(**{**SMALL, **SIZES[name], **changed}, dtype=dtype)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.requires_grad_(False)


def with_stored_keys(layer: NSAttention, scales: CacheScales, dtype: torch.dtype | None = None) -> NSAttention:
    """A copy in `dtype` that attends, without a cache, to the keys and values which a cache with these scales [G] would hold in e4m3.

    What it attends to is projected by `layer` in any case, so that copies of other dtypes attend to the same numbers.
    """
    other = copy.deepcopy(layer).to(dtype)

    def parts(x: Tensor, positions: Tensor | None, many: bool) -> Parts:
        made = layer._parts(x.to(layer.q.weight.dtype), positions, many)
        for name, scale in zip(("k_slc", "v_slc", "k_win", "v_win"), scales, strict=True):
            made = made._replace(**{name: stored(getattr(made, name), scale[:, None]).double() * scale[:, None].double()})
        return Parts(*(y.to(other.q.weight.dtype) for y in made))

    other._parts = parts  # type: ignore[method-assign]
    return other


def short_numbers(layer: NSAttention) -> NSAttention:
    """The layer with projections of few bits: of such x, products with any number of rows have the same keys, with the same rounding."""
    for module in (layer.q, layer.kv):
        module.weight.copy_(few_bits(module.weight))
    return layer


def few_bits(x: Tensor) -> Tensor:
    return (x * 32).round() / 32


def poison(cache: NSACache) -> None:
    """NaN in every page and position that no sequence may read, in all layers. The page after the last one is among them."""
    pages = torch.zeros(cache.pools.k.shape[1:3], dtype=torch.bool)
    pieces = torch.zeros(cache.pools.k_cmp.shape[1:3], dtype=torch.bool)
    recent = torch.zeros(cache.pools.k_win.shape[1:3], dtype=torch.bool)
    for sequence in cache._sequences.values():
        stride, size = cache.sizes.compress_stride, cache.sizes.page_size
        _mark(pages, sequence.all.held(), 0, sequence.length)
        _mark(pieces, sequence.all.held(), 0, sequence.length // stride)
        start = sequence.recent.first * size
        first = max(0, max(sequence.min_length(), 1) + 1 - sequence.last_keys)  # for the shortest length to which the sequence may be cut
        _mark(recent, sequence.recent.held(), first - start, sequence.length - start)
    for x, mask in zip(cache.pools, (pages, pages, pieces, pieces, *[recent] * 4), strict=True):
        as_bytes(x).masked_fill_(~mask.to(x.device)[None, :, :, None, None], 0x7F if x.dtype == STORED else torch.nan)


def _mark(mask: Tensor, held: Any, first: int, end: int) -> None:
    """Positions [first, end) of a sequence with these pages."""
    size = mask.shape[1]
    position = torch.arange(max(first, 0), max(end, first, 0))
    mask[torch.from_numpy(held.astype("int64"))[position // size], position % size] = True


class Model:
    """Layers one after the other with residuals, over a cache that is poisoned before every step."""

    def __init__(self, layers: list[NSAttention], pages: int, page_size: int, **options: Any) -> None:
        self.layers = layers
        self.cache = NSACache.of(layers, pages, page_size, **options)
        scales = self.cache.scales
        self.plain = layers if scales is None else [with_stored_keys(x, scales.layer(i)) for i, x in enumerate(layers)]

    def prefill(self, x: Tensor) -> Tensor:
        """[B,S,width] without the cache."""
        for layer in self.plain:
            x = x + layer(x)
        return x

    def step(self, sequences: list[int], rows: list[Tensor], **options: Any) -> list[Tensor]:
        """Return the layers' output for new tokens [tokens,width] of each sequence. Rows without a token hold NaN and must give 0."""
        step = self.cache.step(sequences, [len(x) for x in rows], **options)
        poison(self.cache)
        x = torch.full((len(rows), max(map(len, rows), default=0), self.layers[0].width), torch.nan).to(self.layers[0].q.weight)
        for b, new in enumerate(rows):
            x[b, x.shape[1] - len(new) :] = new
        empty = ~step.is_token
        for i, layer in enumerate(self.layers):
            y = layer(x, cache=step[i])
            nothing = torch.zeros_like(y[empty]) if layer.out.bias is None else layer.out.bias.expand_as(y[empty])
            assert torch.equal(y[empty], nothing)
            x = x + y
        return [x[b, x.shape[1] - len(new) :] for b, new in enumerate(rows)]


def gated(dtype: torch.dtype, device: str = "cpu", Dv: int = 24) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Branches of different strides, gates in float32 (float64) that are no contiguous tensor either, and do."""
    generator = torch.Generator().manual_seed(0)
    a, b, c, do = (torch.randn(2, 37, 2, 3, Dv, generator=generator).to(device, dtype) for _ in range(4))
    c = c.permute(0, 3, 2, 1, 4).contiguous().permute(0, 3, 2, 1, 4)
    gates = torch.rand(2, 37, 3, 2, 3, generator=generator).to(device, torch.promote_types(dtype, torch.float32)).transpose(2, 3)
    return (a, b, c), gates, do


def by_autograd(branches: tuple[Tensor, ...], gates: Tensor, do: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.double().requires_grad_() for x in (*branches, gates)]
    o = leaves[0] * leaves[3][..., :1] + leaves[1] * leaves[3][..., 1:2] + leaves[2] * leaves[3][..., 2:]
    return o.detach(), *torch.autograd.grad(o, leaves, do.double())


def log_sums(gates: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lse of each branch [B,S,G,h]; -inf for rows without keys, whatever their gates."""
    wide = torch.promote_types(gates.dtype, torch.float32)
    made = 3 * torch.randn(3, *gates.shape[:4], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made[:, :, :3] = -torch.inf
    return made.to(gates.device, wide).unbind()  # type: ignore[return-value]


def by_module(module: Any, do: Tensor, branches: Any, gates: Tensor, lse: Any) -> list[Tensor]:
    """Return the gradients of the three branches by `module` (kernels or plain PyTorch), and dgates."""
    dgates = torch.full(gates.shape, torch.nan, dtype=gates.dtype, device=gates.device)
    given = module.backward(do, branches, gates, dgates, lse is None)
    assert lse is None or given == [None] * 3
    return [*(given if lse is None else module.raise_lse(lse, gates)), dgates]


def check_gate(dtype: torch.dtype, device: str, Dv: int) -> None:
    """Kernels and plain PyTorch equal autograd in float64 up to the last rounding; reruns are bit-equal. Gates include exactly 0 and 1,
    1e-6, and negative ones, for which lse is NaN."""
    branches, gates, do = gated(dtype, device, Dv)
    gates[:, 1], gates[:, 2], gates[:, 5], gates[:, 6] = 0.0, 1.0, 1e-6, -0.5
    lse = log_sums(gates)
    o, *scaled, dgates = by_autograd(branches, gates, do)
    for module in (elementwise, _gate_plain):
        runs = []
        for _ in range(2):
            with new_memory_is_nan():
                total = torch.full(do.shape, torch.nan, dtype=dtype, device=device)
                module.write_sum(branches, gates, total)
                runs.append([total, *by_module(module, do, branches, gates, None), *by_module(module, do, branches, gates, lse)])
        assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(*runs, strict=True))
        *found, first, second, third, last = runs[0]
        torch.testing.assert_close([*found, last], [o, *scaled, dgates, dgates], check_dtype=False, **tolerance(dtype))
        for c, x in enumerate((first, second, third)):
            wanted = (lse[c].double() - gates[..., c].double().log()).where(lse[c] > -torch.inf, lse[c].double())
            assert x.is_contiguous()
            torch.testing.assert_close(x, wanted.to(x.dtype), equal_nan=True, **tolerance(dtype))
            assert bool((x[:, 1] == torch.where(lse[c][:, 1] == -torch.inf, -torch.inf, torch.inf)).all())
            assert torch.equal(x[:, 2], lse[c][:, 2])


def check_deltas(dtype: torch.dtype, device: str) -> None:
    """Given branches' deltas become gradients of gates. Other branches' gradients are not written."""
    _, gates, do = gated(dtype, device)
    first, second, _ = log_sums(gates)
    second = second.transpose(1, 3).contiguous().transpose(1, 3)
    for module in (elementwise, _gate_plain):
        dgates = torch.full((3, *gates.shape[:4]), torch.nan, dtype=dtype, device=device).movedim(0, -1)
        module.write_deltas([first, None, second], dgates)
        assert torch.equal(dgates[..., 0], first.to(dtype))
        assert torch.equal(dgates[..., 2], second.to(dtype))
        assert bool(dgates[..., 1].isnan().all())


def check_gate_parts(dtype: torch.dtype, Dv: int) -> None:
    """The sum, and the gradients of one branch after the other, of each group alone, written into tensors of other strides, by the kernels
    on a GPU: bit-equal to those of all at once. Strides are multiples of 16: with others the compiler stores, and so adds, in another
    order."""
    branches, gates, do = gated(dtype, "cuda", Dv)
    whole = torch.empty_like(do)
    elementwise.write_sum(branches, gates, whole)
    for given in (None, log_sums(gates)):
        *outputs, dgates = by_module(elementwise, do, branches, gates, given)
        to = torch.full((*do.shape[:4], Dv + 16), torch.nan, dtype=dtype, device="cuda")[..., :Dv]
        to_gates = torch.full((3, *gates.shape[:4]), torch.nan, dtype=gates.dtype, device="cuda").movedim(0, -1)
        for g in range(do.shape[2]):
            of = slice(None), slice(None), slice(g, g + 1)
            elementwise.write_sum(tuple(x[of] for x in branches), gates[of], to[of])
            for c in range(3):
                alone: list[Any] = [None, None, None]
                alone[c] = branches[c][of]
                found = elementwise.backward(do[of], alone, gates[of], to_gates[of], given is None)
                if given is not None:
                    found = elementwise.raise_lse([x[of] if i == c else None for i, x in enumerate(given)], gates[of])
                assert [x is None for x in found] == [i != c for i in range(3)]
                assert torch.equal(found[c], outputs[c][of])
        assert torch.equal(to, whole)
        assert torch.equal(to_gates, dgates)


def check_rotation(dtype: torch.dtype, device: str, D: int) -> None:
    """Rotate strided keys by shared positions, and queries by positions per sequence of any strides, forward and back, with and without
    adding another tensor."""
    keys = torch.randn(2, 19, 3, D + 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)[..., 8:]
    queries = torch.randn(2, 19, 3, 2, D, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    each = torch.randint(0, 1000, (2, 19), generator=torch.Generator().manual_seed(2)).to(device)
    for x, positions in ((keys, each[0]), (queries, each), (queries, each.t().contiguous().t()), (keys[:, :, 0], each)):
        angles = rotary.angles(x, positions)
        for back, plus in ((False, None), (True, None), (True, x.flip(-1).transpose(0, 1).contiguous().transpose(0, 1))):
            with new_memory_is_nan():
                got = rotary._fused(x, plus, *angles, back)
            wanted = rotary._plain(x.double(), None if plus is None else plus.double(), *(y.double() for y in angles), back)
            torch.testing.assert_close(got, wanted.to(dtype), **tolerance(dtype))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """assert_close's own; tighter for float64."""
    return {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
