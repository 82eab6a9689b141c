"""Calls that choose blocks, their baseline, plain references of every score, and checks against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core.arguments import Bounds
from nsa_sel.core.call import ChooseCall, PagedKeys, Rule, Sequences
from nsa_sel.core.request import DeviceInfo
from nsa_sel.oracle import Chosen, oracle_choose, oracle_choose_backward
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.cases import assert_within_twice_baseline, gradient_terms, make_grads, make_qkv
from tests.helpers.checks import new_memory_is_nan

Forward = Callable[[ChooseCall], tuple[Tensor, Tensor, Tensor]]
Backward = Callable[[ChooseCall, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]

SETTINGS = settings_for(DeviceInfo(kind="cpu"))
SMALL = Rule(compress_block=8, compress_stride=4, block_size=16, n=4, first=1, local=2)
# name: B, S, S_kv, G, h, Dk, Dv, rule
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, Rule]] = {
    "h1": (1, 40, 40, 1, 1, 16, 16, SMALL),
    "h3": (2, 21, 21, 2, 3, 16, 24, SMALL),
    "h6": (1, 43, 43, 1, 6, 24, 16, SMALL),
    "h12": (1, 29, 29, 1, 12, 16, 16, SMALL),
    "h16-nsa": (1, 20, 150, 1, 16, 16, 16, Rule(n=2, first=0, local=1)),
    "192-128": (1, 36, 36, 1, 2, 192, 128, SMALL),
    "shorter-than-a-compressed-block": (2, 7, 7, 1, 2, 16, 16, SMALL),
    "one-compressed-key": (1, 8, 8, 1, 2, 16, 16, SMALL),
    "chunked-prefill": (1, 19, 90, 2, 2, 16, 16, SMALL),
    "decode": (3, 1, 85, 1, 4, 16, 16, SMALL),
    "more-than-all-blocks": (1, 50, 50, 1, 2, 16, 16, SMALL._replace(n=9)),
    "no-overlap": (1, 50, 50, 1, 2, 16, 16, SMALL._replace(compress_block=4)),
    "covers-a-block": (1, 50, 50, 1, 2, 16, 16, SMALL._replace(compress_block=16)),
    "three-pieces": (1, 47, 47, 1, 2, 16, 16, SMALL._replace(block_size=12, n=3)),
}


def make_choose_call(
    shape: str | tuple[Any, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", *, seed: int = 0, **changed: Any
) -> ChooseCall:
    """The call of a shape in `SHAPES`, or of such a tuple; q is scaled so that some keys matter more than others."""
    B, S, S_kv, G, h, Dk, Dv, rule = SHAPES[shape] if isinstance(shape, str) else shape
    q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=rule.compressed_keys(S_kv), dtype=dtype, device=device, seed=seed)
    blocks, start = -(-S_kv // rule.block_size), S_kv - S
    return ChooseCall(
        **({"q": 2 * q, "k": k, "v": v, "rule": rule, "blocks": blocks, "start": start, "scale": Dk**-0.5} | changed), settings=SETTINGS
    )


def make_packed_call(
    lengths: Sequence[int], spare: int = 3, rule: Rule = SMALL, sizes: tuple[int, int, int, int] = (2, 3, 16, 24),
    dtype: torch.dtype = torch.float32, device: str = "cpu", **changed: Any,
) -> ChooseCall:  # fmt: skip
    """The call of a packed batch of sequences of these lengths and of `spare` rows of padding; sizes: G, h, Dk, Dv."""
    T = sum(lengths) + spare
    call = make_choose_call((1, T, T, *sizes, rule), dtype, device, **changed)
    bounds = Bounds.of("cu_seqlens", torch.tensor([0, *accumulate(lengths)]).to(device), T, call.q)
    call.sequences = Sequences.of(bounds, rule, call.q)
    return call


def oracle(call: ChooseCall) -> Chosen:
    rule = call.rule
    return oracle_choose(
        call.q, call.k, call.v, n=rule.n, first=rule.first, local=rule.local, block_size=rule.block_size, **_positions(call)
    )  # fmt: skip


def _positions(call: ChooseCall) -> dict[str, Any]:
    return {
        "S_kv": call.blocks * call.rule.block_size, "compress_block": call.rule.compress_block,
        "compress_stride": call.rule.compress_stride, "scale": call.scale,
        "q_pos": call.positions() if call.sequences is None else None,
        "cu_seqlens": None if call.sequences is None else call.sequences.rows.tolist(),
    }  # fmt: skip


def visible(call: ChooseCall) -> Tensor:
    """[B,S,C] bool: the compressed keys that each row sees."""
    C, device = call.k.shape[2], call.q.device
    if call.sequences is None:
        return torch.arange(C, device=device) < call.seen()[:, :, None]
    found, first, bounds = torch.zeros(1, call.q.shape[1], C, dtype=torch.bool), 0, call.sequences.rows.tolist()
    for begin, end in pairwise(bounds):
        for t in range(end - begin):
            found[0, begin + t, first : first + call.rule.compressed_keys(t + 1)] = True
        first += call.rule.compressed_keys(end - begin)
    return found.to(device)


def plain(q: Tensor, k: Tensor, v: Tensor, call: ChooseCall) -> tuple[Tensor, Tensor]:
    """o and lse in the inputs' own dtype, for autograd."""
    seen = visible(call)[:, :, None, None]
    logits = torch.einsum("bsghd,bgkd->bsghk", q * call.scale, k)
    some = seen.any(-1, keepdim=True)
    logits = torch.where(seen, logits, torch.where(some, -torch.inf, 0.0).to(logits.dtype))
    p = torch.where(some, torch.softmax(logits, -1), 0.0)
    lse = torch.where(some.squeeze(-1), torch.logsumexp(logits.to(torch.promote_types(q.dtype, torch.float32)), -1), -torch.inf)
    return torch.einsum("bsghk,bgkd->bsghd", p, v), lse


def in_pages(call: ChooseCall, slots: int) -> ChooseCall:
    """The same keys in pages of `slots`, in random order; NaN in all keys that no row of a sequence sees."""
    B, G, C, _ = call.k.shape
    skipped = call.rule.reach - 1
    each = -(-(C + skipped) // slots)
    assert each * slots >= C + skipped
    order = torch.randperm(B * each + 1, generator=torch.Generator().manual_seed(1))
    table = order[: B * each].view(B, each).int().to(call.k.device)
    seen = call.seen().amax(1).to(call.k.device).expand(B)
    b, c = (torch.arange(C, device=seen.device) < seen[:, None]).nonzero(as_tuple=True)
    page, slot = table[b, (c + skipped) // slots].long(), (c + skipped) % slots

    def paged(x: Tensor) -> Tensor:
        pages = torch.full((len(order), slots, G, x.shape[3]), torch.nan, dtype=x.dtype, device=x.device)
        pages[page, slot] = x[b, :, c]
        return pages.transpose(1, 2)

    return replace(call, k=paged(call.k), v=paged(call.v), pages=PagedKeys(table, skipped))


def check_forward(forward: Forward, call: ChooseCall, slack: float = 0.0) -> None:
    """Assert o and lse within twice the baseline's error, and the oracle's blocks within `slack` (see `assert_chosen`)."""
    o, lse, ranges = forward(call)
    exact = check_attention((o, lse), call)
    assert ranges.dtype == torch.int32
    blocks = Selection.from_ranges(ranges, call.rule.block_size, disjoint=True).validate().block_indices
    assert_chosen(blocks, exact.importance, exact.blocks, slack)


def check_attention(got: tuple[Tensor, Tensor], call: ChooseCall) -> Chosen:
    """o and lse within twice the baseline's error; returns what the oracle finds."""
    exact = oracle(call)
    for name, mine, right, baseline in zip(("o", "lse"), got, exact[:2], plain(call.q, call.k, call.v, call), strict=True):
        assert_within_twice_baseline(mine, right, baseline, name)
    assert got[0].dtype == call.q.dtype
    return exact


def check_gradients(forward: Forward, backward: Backward, call: ChooseCall, *, with_lse: bool = True) -> None:
    """dq, dk, dv within twice the baseline's error, and exact zeros where no row sees a key."""
    o, lse, _ = forward(call)
    do, dlse = make_grads(call.q, call.v)
    got = backward(call, o, lse, do, dlse if with_lse else None)
    exact_dlse = torch.where((call.seen() > 0)[:, :, None, None], dlse, 0.0)
    exact = oracle_choose_backward(call.q, call.k, call.v, do, exact_dlse if with_lse else None, **_positions(call))
    inputs = [x.detach().requires_grad_() for x in (call.q, call.k, call.v)]
    plain_o, plain_lse = plain(*inputs, call)
    plain_lse = plain_lse.masked_fill(plain_lse == -torch.inf, 0.0)
    outputs, grads = ((plain_o, plain_lse), (do, dlse)) if with_lse else ((plain_o,), (do,))
    baselines = torch.autograd.grad(outputs, inputs, grads)
    terms = gradient_terms(call.q, call.k, call.v, do, call.scale) if call.k.numel() else (0.0,) * 3
    for name, x, mine, right, baseline, term in zip(("dq", "dk", "dv"), inputs, got, exact, baselines, terms, strict=True):
        assert mine.dtype == x.dtype
        assert_within_twice_baseline(mine, right, baseline, name, term)
    unseen = ~visible(call).any(1)
    assert all(int(torch.count_nonzero(x.transpose(1, 2)[unseen])) == 0 for x in got[1:])


def check_both(backend: ModuleType, call: ChooseCall, slack: float = 0.0, *, with_lse: bool = True) -> None:
    check_forward(backend.forward, call, slack)
    check_gradients(backend.forward, backend.backward, call, with_lse=with_lse)


def poisoned(call: ChooseCall) -> ChooseCall:
    """The call with NaN in q of rows that see nothing and in keys and values that no row sees; both exist."""
    empty = (call.seen() == 0)[:, :, None, None, None]
    unseen = ~visible(call).any(1)[:, None, :, None]
    assert bool(empty.any())
    assert bool(unseen.any())
    q, k, v = (x.masked_fill(where, torch.nan) for x, where in ((call.q, empty), (call.k, unseen), (call.v, unseen)))
    return call.of(q, k, v)


def results(backend: ModuleType, call: ChooseCall, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, ...]:
    """o, lse, ranges, dq, dk, dv, in new memory that holds NaN."""
    with new_memory_is_nan():
        o, lse, ranges = backend.forward(call)
        return o, lse, ranges, *backend.backward(call, o, lse, do, dlse)


def check_unread(backend: ModuleType, call: ChooseCall, reruns: int = 1) -> tuple[Tensor, ...]:
    """The results: the same bits with NaN in q, do and dlse of rows that see nothing, and in keys and values that no row sees."""
    do, dlse = make_grads(call.q, call.v)
    clean = results(backend, call, do, dlse)
    empty = (call.seen() == 0)[:, :, None, None]
    spoilt = poisoned(call), do.masked_fill(empty[..., None], torch.nan), dlse.masked_fill(empty, torch.nan)
    assert not any(bool(x.isnan().any()) for x in clean)
    for _ in range(reruns):
        assert all(map(torch.equal, clean, results(backend, *spoilt)))
    return clean


def pooled_scores(
    q: Tensor, k: Tensor, positions: Tensor, *, S_kv: int, block_size: int, compress_block: int = 1, compress_stride: int = 1,
    reduce: str = "max", heads: str = "sum", softmax: bool = False, relu: bool = False, lse: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Score blocks as `choose_blocks` documents: index key i touches block j if [i d, i d + l) and [j m, (j + 1) m) overlap."""
    q, k = q.double().cpu(), k.double().cpu()
    B, S, G, _, D = q.shape
    scale, d, l, m, C = D**-0.5 if scale is None else scale, compress_stride, compress_block, block_size, k.shape[2]
    i, j = torch.arange(C)[:, None], torch.arange(-(-S_kv // m))
    pieces = ((i * d + l).minimum(j * m + m) - (i * d).maximum(j * m)).clamp(min=0).double() // d  # [C,blocks]
    found = torch.full((B, S, G, len(j)), -torch.inf, dtype=torch.float64)
    for b, s, g in torch.cartesian_prod(torch.arange(B), torch.arange(S), torch.arange(G)).tolist():
        t = int(positions[b, s])
        seen = sum(i * d + l - 1 <= t for i in range(C))
        x = scale * q[b, s, g] @ k[b, g, :seen].T
        x = x.relu() if relu else x
        if softmax:
            total = x.logsumexp(-1) if lse is None else lse[b, s, g].double().cpu()
            x = torch.exp(x - total[:, None]) if bool((total > -torch.inf).all()) else torch.zeros_like(x)
        x = (x.sum(0) if heads == "sum" else x.amax(0))[:, None]
        touching = pieces[:seen] > 0
        if seen:
            score = x.where(touching, -torch.inf).amax(0) if reduce == "max" else (x * pieces[:seen]).sum(0)
            found[b, s, g] = score.where(touching.any(0), -torch.inf)
        if softmax:
            found[b, s, g] = found[b, s, g].where(touching.any(0), 0.0)
        found[b, s, g, max(0, t // m + 1) :] = -torch.inf
    return found


def msa_scores(q: Tensor, k: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """MiniMax Sparse Attention (arXiv 2606.13392): the largest logit of the block's visible tokens; one index head a group, q [B,S,G,1,D],
    and one index key for all of them, k [B,1,S_kv,D]."""
    q, k = q.double().cpu(), k.double().cpu()
    logits = torch.einsum("bsgd,bkd->bsgk", q[:, :, :, 0], k[:, 0])
    logits = logits.masked_fill(torch.arange(k.shape[2]) > positions[:, :, None, None], -torch.inf)
    padded = torch.nn.functional.pad(logits, (0, -k.shape[2] % block_size), value=-torch.inf)
    return padded.unflatten(-1, (-1, block_size)).amax(-1)


def moba_scores(q: Tensor, k: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """MoBA (arXiv 2502.13189, Eq. 5-6): q . mean(keys of the block) for blocks before the current one; [B,S,heads,blocks]."""
    B, S, G, h, _ = q.shape
    blocks = -(-k.shape[2] // block_size)
    found = torch.full((B, S, G * h, blocks), -torch.inf, dtype=torch.float64)
    for j in range(k.shape[2] // block_size):
        mean = k[:, :, j * block_size : (j + 1) * block_size].float().mean(2).to(k.dtype).double().cpu()  # in k's dtype, as the source
        affinity = torch.einsum("bsghd,bgd->bsgh", q.double().cpu(), mean).flatten(2)
        found[..., j] = affinity.masked_fill((positions // block_size <= j)[:, :, None], -torch.inf)
    return found


def infllm_scores(q: Tensor, k: Tensor, positions: Tensor, *, coarse: bool, block: int = 64, l: int = 32, d: int = 16) -> Tensor:
    """InfLLM-v2 (arXiv 2509.24663, 3.2 and 3.3): softmax over means of l keys every d, summed over a group's heads, max-pooled over windows
    of block / d + 1 means, block / d apart, that begin one mean before the block; the log-sum-exp of 4 times coarser means."""
    q = q.double().cpu()
    B, S, G, h, D = q.shape

    def logits(l: int, d: int) -> Tensor:
        means = k.unfold(2, l, d).float().mean(-1).to(k.dtype).double().cpu()
        x = torch.einsum("bsghd,bgcd->bsghc", q * D**-0.5, means)
        return x.masked_fill(torch.arange(means.shape[2]) * d + l - 1 > positions[:, :, None, None, None], -torch.inf)

    fine = logits(l, d)
    total = (logits(4 * l, 4 * d) if coarse else fine).logsumexp(-1, keepdim=True)
    p = torch.where(total > -torch.inf, torch.exp(fine - total), 0.0).sum(3)
    blocks = -(-k.shape[2] // block)
    p = torch.nn.functional.pad(p, (0, blocks * block // d + 1 - p.shape[-1]))
    pooled = torch.nn.functional.max_pool1d(p.flatten(0, 2).unsqueeze(1), block // d + 1, block // d, padding=1)
    scores = pooled[:, 0, :blocks].view(B, S, G, blocks)
    return scores.masked_fill(torch.arange(blocks) > (positions // block)[:, :, None, None], -torch.inf)


def best(scores: Tensor, positions: Tensor, block_size: int, n: int, first: int, local: int) -> Tensor:
    """[B,S,G,n] ascending, -1 last: forced blocks, then the highest scores, the lower block first where they tie."""
    chosen = torch.full((*scores.shape[:3], n), -1, dtype=torch.int32)
    for b, s, g in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        current = int(positions[b, s]) // block_size
        row = scores[b, s, g].tolist()
        forced = [j for j in range(min(current + 1, len(row))) if j < first or j > current - local]
        others = sorted((j for j, x in enumerate(row) if j <= current and j not in forced and x > -torch.inf), key=lambda j: (-row[j], j))
        picked = sorted((forced + others)[:n])
        chosen[b, s, g, : len(picked)] = torch.tensor(picked, dtype=torch.int32)
    return chosen


def assert_chosen(blocks: Tensor, scores: Tensor, expected: Tensor, slack: float = 0.0) -> None:
    """Check that the expected blocks were chosen, ascending, -1 last.

    With slack, others may be, whose scores together are lower by at most `slack` of the largest magnitude in the row.
    """
    blocks = blocks.cpu().int()
    if slack == 0.0:
        assert torch.equal(blocks, expected), (blocks != expected).any(-1).nonzero()[:4]
        return
    assert torch.equal((blocks >= 0).sum(-1), (expected >= 0).sum(-1))
    listed = blocks.where(blocks >= 0, 1 << 30)
    assert bool(((listed.diff(dim=-1) > 0) | (listed[..., 1:] == 1 << 30)).all())
    finite = scores.where(scores > -torch.inf, 0.0)
    totals = [finite.gather(-1, x.clamp(min=0).long()).where(x >= 0, 0.0).sum(-1) for x in (expected, blocks)]
    assert bool((totals[0] - totals[1] <= slack * finite.abs().amax(-1)).all())
