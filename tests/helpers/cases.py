"""Cases that the tests share: tensors, selections, the same-precision baseline, and the assertion against the oracle."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from nsa_sel import Selection
from nsa_sel import oracle as slow
from nsa_sel.bench.core.cases import span_lengths
from nsa_sel.core.call import Call, device_info
from nsa_sel.core.check import check_call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.settings.config import settings_for
from nsa_sel.testing import dense_attention, error_of, gradient_terms, unused_keys

DISTRIBUTIONS = ("few", "many", "mixed")
MOST_KEPT = 64


def remembered(oracle: Callable[..., Any]) -> Callable[..., Any]:
    """An oracle, which is slow, with its last results: backends are compared on the same tensors."""
    kept: dict[tuple[Any, ...], Any] = {}

    def contents(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().cpu().contiguous()
        return x.dtype, x.shape, hashlib.sha1(x.reshape(-1).view(torch.uint8).numpy()).digest()

    @functools.wraps(oracle)
    def results(*given: Any, **more: Any) -> Any:
        key = (*map(contents, given), *((name, contents(x)) for name, x in sorted(more.items())))
        if key not in kept:
            if len(kept) == MOST_KEPT:
                del kept[next(iter(kept))]
            kept[key] = oracle(*given, **more)
        return kept[key]

    return results


oracle_forward, oracle_backward, oracle_mask = map(remembered, (slow.oracle_forward, slow.oracle_backward, slow.oracle_mask))


def make_qkv(
    B: int = 1,
    S: int = 16,
    G: int = 1,
    h: int = 2,
    Dk: int = 16,
    Dv: int | None = None,
    *,
    S_kv: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv] from a standard normal, the same numbers on every device; Dv is Dk by default."""
    generator = torch.Generator().manual_seed(seed)
    S_kv = S if S_kv is None else S_kv
    shapes = (B, S, G, h, Dk), (B, G, S_kv, Dk), (B, G, S_kv, Dk if Dv is None else Dv)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_(requires_grad) for shape in shapes)
    return q, k, v


def make_grads(q: Tensor, v: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    """do [B,S,G,h,Dv] in q's dtype and dlse [B,S,G,h] in lse's, on q's device."""
    generator = torch.Generator().manual_seed(seed)
    do = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q.dtype).to(q.device)
    dlse = torch.randn(q.shape[:-1], generator=generator)
    return do, dlse.to(lse_dtype(q)).to(q.device)


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def make_call(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection | Tensor, *, scale: float | None = None, q_pos: Tensor | None = None,
    device: DeviceInfo | None = None, **changed: Any,
) -> Call:  # fmt: skip
    """Return a checked call, by default on the device of q, with its settings except `changed`."""
    q, k, v, selection, scale, q_pos = check_call(q, k, v, selection, scale, q_pos)
    device = device_info(q.device) if device is None else device
    return Call(q, k, v, selection, q_pos, scale, msgspec.structs.replace(settings_for(device), **changed), device)


def make_spans(kind: str, B: int, S: int, G: int, S_kv: int, L: int, *, seed: int = 0, device: str = "cpu") -> Tensor:
    """Disjoint sorted int32 ranges [B,S,G,n,2] of min(L, S_kv) keys a row, before the causal clamp.

    few: two long spans; many: spans of 4 keys; mixed: one span of half the keys and spans of 4.
    """
    L = min(L, S_kv)
    short, rest = divmod(L if kind == "many" else L - L // 2, 4)
    lengths = {
        "few": [L - L // 2, L // 2],
        "many": [4] * short + [rest],
        "mixed": [4] * (short // 2) + [L // 2] + [4] * (short - short // 2) + [rest],
    }[kind]
    lengths = torch.tensor([length for length in lengths if length])
    generator = torch.Generator().manual_seed(seed)
    gaps = torch.randint(0, S_kv - L + 1, (B, S, G, len(lengths)), generator=generator).sort(-1).values
    start = gaps + lengths.cumsum(0) - lengths
    return torch.stack((start, start + lengths), -1).int().to(device)


def cut_spans(kind: str, B: int, S: int, G: int, S_kv: int, L: int, *, device: str = "cpu") -> Selection:
    """Return a selection of L keys per row, cut as the parity matrix and bench_sel_triton are asked to, before the causal clamp.

    few: keys 0 to L. many: 8 equal spans. mixed: 2, 4 or 8 random spans. Spans of many and mixed have random positions.
    """
    generator = torch.Generator().manual_seed(L)
    lengths = span_lengths(kind, L, B * S * G, generator).view(B, S, G, -1)
    apart = 0 if kind == "few" else S_kv - L
    start = torch.randint(0, apart + 1, lengths.shape, generator=generator).sort(-1).values + lengths.cumsum(-1) - lengths
    return Selection.from_ranges(torch.stack((start, start + lengths), -1).int().to(device))


def make_blocks(B: int, S: int, G: int, S_kv: int, n: int, block_size: int, *, seed: int = 0, device: str = "cpu") -> Selection:
    """The blocks that a model with random scores would select: n a row, first and local ones forced, never a future one."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(B, S, G, -(-S_kv // block_size), generator=generator)
    return Selection.from_scores(scores, n, block_size, first=min(1, n), local=min(2, n - 1), S_kv=S_kv).to(device)


def every_key(B: int, S: int, G: int, S_kv: int) -> Tensor:
    """One range [B,S,G,1,2] a row, of all keys."""
    return torch.tensor([0, S_kv], dtype=torch.int32).expand(B, S, G, 1, 2).clone()


def oracle_results(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, do: Tensor, dlse: Tensor | None = None, scale: float | None = None,
    q_pos: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """o, lse, dq, dk, dv of the float64 oracle."""
    return *oracle_forward(q, k, v, ranges, scale, q_pos), *oracle_backward(q, k, v, ranges, do, dlse, scale, q_pos)


def plain_results(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, do: Tensor, dlse: Tensor | None, scale: float | None, q_pos: Tensor | None
) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv of the baseline."""
    inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    o, lse = dense_attention(*inputs, ranges, scale, q_pos)
    # The lse of an empty row is constant: its gradient counts for nothing.
    outputs = (o,) if dlse is None else (o, lse.masked_fill(lse == -math.inf, 0.0))
    return o.detach(), lse.detach(), *torch.autograd.grad(outputs, inputs, (do,) if dlse is None else (do, dlse))


def assert_forward(
    got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float | None = None, q_pos: Tensor | None = None
) -> None:
    """o and lse have the contract's dtypes and are as close to the oracle as `assert_within_twice_baseline` asks; o is exactly 0 where lse
    is -inf."""
    assert got[0].dtype == q.dtype
    assert got[1].dtype == lse_dtype(q)
    oracle, plain = oracle_forward(q, k, v, ranges, scale, q_pos), dense_attention(q, k, v, ranges, scale, q_pos)
    for name, mine, exact, baseline in zip(("o", "lse"), got, oracle, plain, strict=True):
        assert_within_twice_baseline(mine, exact, baseline, name)
    assert not got[0][got[1] == -torch.inf].any()


def assert_gradients(
    got: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, do: Tensor, dlse: Tensor | None = None,
    scale: float | None = None, q_pos: Tensor | None = None,
) -> None:  # fmt: skip
    """dq, dk, dv are as close to the oracle as `assert_within_twice_baseline` asks, and exact zeros for keys that no row selects."""
    oracle = oracle_backward(q, k, v, ranges, do, dlse, scale, q_pos)
    plain = plain_results(q, k, v, ranges, do, dlse, scale, q_pos)[2:]
    terms = gradient_terms(q.detach(), k.detach(), v.detach(), do, scale)
    for name, tensor, mine, exact, baseline, term in zip(("dq", "dk", "dv"), (q, k, v), got, oracle, plain, terms, strict=True):
        assert mine.dtype == tensor.dtype
        assert_within_twice_baseline(mine, exact, baseline, name, term)
    unused = unused_keys(q, k, ranges, q_pos)
    assert all(bool((x[unused] == 0).all()) for x in got[1:])


def assert_within_twice_baseline(got: Tensor, oracle: Tensor, baseline: Tensor, what: str = "result", terms: float = 0.0) -> None:
    """Nothing is wrong with a result, as `nsa_sel.testing.error_of` says."""
    _, wrong = error_of(got, oracle, baseline, what, terms)
    assert not wrong, wrong
