"""Check cases of the fuzzer: results on every backend against the float64 oracle, with what must not matter poisoned; wrong arguments."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.errors import BackendError, NsaSelError
from nsa_sel.oracle import oracle_forward, oracle_mask
from nsa_sel.selection import Selection
from nsa_sel.testing import RESULTS
from tests.fuzz.cases import Case, Facts
from tests.helpers.caches import gathered, make_cache, positions
from tests.helpers.cases import assert_within_twice_baseline, lse_dtype, make_qkv, oracle_results, plain_results
from tests.helpers.varlen_cases import Packed, bounds, seen_keys

CPU_SECONDS = 120  # of processor time, which does not grow under load, that one case may take; compiling takes most of it
FAR = 2**40  # beyond every key and every int32
Results = dict[str, Tensor]


def assert_clear(error: NsaSelError) -> None:
    """Check that the message of a refusal is of a sensible length."""
    assert 20 < len(str(error)) < 10_000, str(error)[:200]


# Selections


def _tensor(numbers: Any, shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)


def make_selection(f: Facts, device: str) -> Selection | Tensor:
    s, rows = f["selection"], (f["B"], f["S"], f["G"])

    def place(x: Tensor) -> Tensor:
        x = x[:, :, :1] if s["one"] else x
        return (x.squeeze(1) if f.get("decode") else x).to(device)

    if s["how"] == "ranges":
        ranges = place(_tensor(s["ranges"], (*rows, s["n"], 2), s["dtype"]))
        if s["bare"]:
            return ranges
        spans = ranges.long().clamp(min=0).diff(dim=-1).clamp(min=0).sum((-1, -2))
        made = Selection.from_ranges(ranges, None, max(1, int(spans.max())) if s["bounded"] and spans.numel() else None)
    else:
        counts = None if s["counts"] is None else place(_tensor(s["counts"], rows, "int64"))
        made = Selection.from_blocks(place(_tensor(s["blocks"], (*rows, s["n"]), s["dtype"])), s["block"], counts)
    if s["then"] == "measure":
        made.measure(f["S_kv"])
    ways: dict[str, Callable[[Selection], Selection]] = {
        "merge": Selection.merge, "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "to": lambda x: x.to(x.ranges.device),
    }  # fmt: skip
    return ways.get(s["then"], lambda x: x)(made)


def expected_ranges(f: Facts) -> Tensor:
    """[B,S,G,n+1,2] int64, the last one empty: what each row selects by the words of the contract, without the library's code."""
    s, B, S, G = f["selection"], f["B"], f["S"], f["G"]
    if s["how"] == "ranges":
        return pad(_tensor(s["ranges"], (B, S, G, s["n"], 2), "int64"), (0, 0, 0, 1))

    def row(b: int, at: int, g: int) -> list[list[int]]:
        named = s["blocks"][b][at][g][: None if s["counts"] is None else max(0, s["counts"][b][at][g])]
        spans = [[min(j * s["block"], FAR), min((j + 1) * s["block"], FAR)] for j in named if j >= 0]
        return spans + [[0, 0]] * (s["n"] + 1 - len(spans))

    made = [[[row(b, at, g) for g in range(G)] for at in range(S)] for b in range(B)]
    return _tensor(made, (B, S, G, s["n"] + 1, 2), "int64")


# Results


class Truth(NamedTuple):
    """o, lse, dq, dk, dv by the oracle and by the baseline, and how large the terms are whose rounding counts."""

    exact: tuple[Tensor, ...]
    plain: tuple[Tensor, ...]
    terms: tuple[float, ...]

    @classmethod
    def of(cls, inputs: list[Tensor], ranges: Tensor, do: Tensor, dlse: Tensor, scale: float | None = None, q_pos: Any = None) -> Truth:
        """For q, k, v in the prefill form, on the CPU."""
        exact, plain = (results(*inputs, ranges, do, dlse, scale, q_pos) for results in (oracle_results, plain_results))
        q, k, v, do, dlse = (x.abs().double() for x in (*inputs, do, dlse))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
        # A logit is off by some roundings of itself, and p, o and the gradients by as much relative to their terms.
        off = float(4 * (1 + scale * torch.einsum("bsghd,bgkd->bsghk", q, k).max()))
        ds = off * scale * (torch.einsum("bsghd,bgkd->bsghk", do, v).max() + dlse.max())
        # do.o is computed from the o that autograd keeps, which is rounded to q's dtype; this is in roundings of float32.
        narrow = torch.finfo(inputs[0].dtype).eps / torch.finfo(torch.promote_types(inputs[0].dtype, torch.float32)).eps
        ds += narrow / 2 * scale * float((do * exact[0].abs()).sum(-1).max())
        of_lse = off + (1000 if inputs[0].element_size() == 2 else 0)  # PyTorch's exp for 16-bit types on a CPU is off by 5e-5
        return cls(exact, plain, tuple(map(float, (off * v.max(), of_lse, ds * k.max(), ds * q.max(), off * do.max()))))

    def hold(self, got: Results) -> None:
        """AssertionError where a result is farther from the oracle than twice the baseline and roundings allow."""
        for name, exact, plain, terms in zip(RESULTS, self.exact, self.plain, self.terms, strict=True):
            if name in got:
                wanted = torch.promote_types(plain.dtype, torch.float32) if name == "lse" else plain.dtype
                assert got[name].dtype == wanted, f"{name} is {got[name].dtype}"
                assert_within_twice_baseline(got[name], exact, plain, name, terms)


def lay(x: Tensor, how: str) -> Tensor:
    """The same values under other strides."""
    if how == "keys first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "offset":
        return torch.cat((x.new_zeros(3), x.flatten()))[3:].view(x.shape)
    if how == "sliced":
        return torch.cat((x, x[..., :1], x), -1)[..., : x.shape[-1]]
    if how == "every other":
        return torch.stack((x, x), 2).flatten(1, 2)[:, ::2] if x.shape[0] else x
    return x[:1].expand_as(x) if how == "expanded" else x


def _drawn(case: Case, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(case.seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _leaves(tensors: Any, device: str, wanted: Any = (True, True, True)) -> list[Tensor]:
    return [x.detach().to(device).requires_grad_(bool(grad)) for x, grad in zip(tensors, wanted, strict=True)]


def _run(
    backend: str | None, call: Callable[[], Any], inputs: list[Tensor], do: Tensor | None, dlse: Tensor | None,
    decode: bool = False,
) -> Results | None:  # fmt: skip
    """o, lse and the gradients of those inputs that require them, as in the prefill form; None where the backend refuses.

    The last decision must name the backend that was asked for.
    """
    try:
        o, lse = call()
    except BackendError:
        if backend is None or not backend.startswith(("triton", "cu")):  # without limits
            raise
        return None
    decision = nsa_sel.decisions()[-1]
    assert backend in (None, decision.forward), f"{decision.forward} ran instead of {backend}"
    names = {name: x for name, x in zip(("dq", "dk", "dv"), inputs, strict=True) if x.requires_grad}
    used = [(x, (w.squeeze(1) if decode else w).to(x.device)) for x, w in ((o, do), (lse, dlse)) if w is not None]
    grads = torch.autograd.grad([x for x, _ in used], list(names.values()), [w for _, w in used]) if names else ()
    found = {"o": o.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}
    return {name: x.unsqueeze(1) if decode and name in ("o", "lse", "dq") else x for name, x in found.items()}


# Calls


def check_call(case: Case, f: Facts) -> None:
    """Outputs and gradients on each backend, with what must not matter poisoned; unselected keys get exact zeros."""
    B, S, G, h, S_kv, decode = f["B"], f["S"], f["G"], f["h"], f["S_kv"], f["decode"]
    dtype = getattr(torch, f["dtype"])
    q, k, v, do, dlse = _drawn(
        case, (B, S, G, h, f["Dk"]), (B, G, S_kv, f["Dk"]), (B, G, S_kv, f["Dv"]), (B, S, G, h, f["Dv"]), (B, S, G, h)
    )
    q, k, v = (x[:1].expand_as(x) if how == "expanded" else x for x, how in zip((q * f["size"], k, v), f["layouts"], strict=True))
    q, k, v, do = (x.to(dtype).clone() for x in (q, k, v, do if f["do"] == "random" else torch.ones_like(do)))
    dlse = dlse.to(lse_dtype(q))
    ranges, q_pos = expected_ranges(f), None
    if f["q_pos"] is not None:
        shared = bool(f["q_pos"]) and not isinstance(f["q_pos"][0], list)
        q_pos = _tensor(f["q_pos"], (S,) if shared else (B, S), f["q_pos_dtype"])
    seen = oracle_mask(ranges, S_kv, S, q_pos)  # [B,S,G,S_kv]
    truth = Truth.of([q, k, v], ranges, do * (f["uses"] != "lse"), dlse * (f["uses"] != "o"), f["scale"], q_pos) if B else None
    if f["poison"]:
        nothing, unseen, bad = ~seen.any(-1)[..., None, None], ~seen.any(1)[..., None], torch.tensor(float(f["poison"])).to(dtype)
        q, do, dlse = q.masked_fill(nothing, bad), do.masked_fill(nothing, bad), dlse.masked_fill(nothing[..., 0], bad)
        k, v = k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.nan)
    selection, place = make_selection(f, case.device), None if q_pos is None else q_pos.to(case.device)
    weights = (do if f["uses"] != "lse" else None), (dlse if f["uses"] != "o" else None)
    given = q.squeeze(1) if decode else q, k, v

    def results(backend: str | None) -> Results | None:
        laid = [lay(x.to(case.device), how) for x, how in zip(given, f["layouts"], strict=True)]
        inputs = _leaves(laid, case.device, [name in f["grads"] for name in "qkv"])
        how = {"scale": f["scale"], "q_pos": place, "return_lse": True, "backend": None if f["flag"] else backend}
        with patch.dict(os.environ, {"NSA_SEL_BACKEND": backend} if backend and f["flag"] else {}):
            attend = lambda: nsa_sel.selection_attention(*inputs, selection, **how)  # noqa: E731
            return _run(backend, attend, inputs, *weights, decode)

    for backend in f["backends"]:
        found = [got for _ in range(1 + f["again"]) if (got := results(backend)) is not None]
        for got in found:
            if truth is not None:
                truth.hold(got)
            for name in {"dk", "dv"} & got.keys():
                assert int(torch.count_nonzero(got[name].cpu()[~seen.any(1)])) == 0, f"{name} of unselected keys"
            assert all(torch.equal(found[0][name], x) for name, x in got.items()), "a repeat changes bits"


def check_varlen(case: Case, f: Facts) -> None:
    """Sequences of one batch, each as it would be alone; keys that no row sees and padding rows are poisoned."""
    T, Tk, G, h, Dk, Dv = f["S"], sum(f["keys"]) + f["spare"], f["G"], f["h"], f["Dk"], f["Dv"]
    q, k, v, do, dlse = _drawn(case, (T, G, h, Dk), (Tk, G, Dk), (Tk, G, Dv), (T, G, h, Dv), (T, G, h))
    q, k, v, do = (x.to(getattr(torch, f["dtype"])) for x in (q, k, v, do))
    dlse = dlse.to(lse_dtype(q))
    packed = Packed(q, k, v, Selection(expected_ranges(f)), bounds(f["rows"]), bounds(f["keys"]))
    seen, alone, truths = seen_keys(packed), torch.ones(T, dtype=torch.bool), []
    for rows, keys in packed.each():
        if rows.stop > rows.start and keys.stop > keys.start:
            own = [q[rows][None].clone(), *(x[keys].transpose(0, 1)[None].clone() for x in (k, v))]
            truths.append(((rows, keys), Truth.of(own, packed.ranges()[rows][None], do[rows][None], dlse[rows][None])))
            alone[rows] = False
    if f["poison"]:
        q[packed.cu_q[-1] :] = k[~seen] = v[~seen] = math.nan
    selection, dtype = make_selection(f, case.device), {"int32": torch.int32, "int64": torch.int64}.get(f["bounds"])
    place = "cpu" if f["bounds"] == "on cpu" else case.device
    cu_q, cu_k = (x if f["bounds"] == "list" else torch.tensor(x, dtype=dtype, device=place) for x in (packed.cu_q, packed.cu_k))
    align = f["align"] if isinstance(selection, Selection) and selection.block_size else None
    how = {"align": align, "cu_seqlens_k": None if packed.cu_q == packed.cu_k and T == Tk else cu_k, "return_lse": True}
    for backend in f["backends"]:
        inputs = _leaves((q, k, v), case.device)
        attend = lambda: nsa_sel.selection_attention_varlen(*inputs, selection, cu_q, backend=backend, **how)  # noqa: B023, E731
        found = _run(backend, attend, inputs, do, dlse)
        if found is None:
            continue
        got = {name: x.cpu() for name, x in found.items()}
        for (rows, keys), truth in truths:
            mine = {name: got[name][rows][None] for name in RESULTS[:3]}
            truth.hold(mine | {name: got[name][keys][None].transpose(1, 2) for name in RESULTS[3:]})
        for name, x in got.items():  # of no sequence, or of one without keys
            rest, nothing = (~seen if name in ("dk", "dv") else alone), -math.inf if name == "lse" else 0
            assert bool((x[rest] == nothing).all()), f"{name} of what nobody selects"


def check_cache(case: Case, f: Facts) -> None:
    """The new tokens of sequences in a cache, which is NaN where no sequence has a key. Gradients without pages."""
    sizes = {name: f[name] for name in ("G", "h", "Dk", "Dv")}
    dtype = getattr(torch, f["dtype"])
    cache = make_cache(tuple(f["lengths"]), f["page_size"], S_q=f["S"], block=1, n=1, room=f["S_kv"], dtype=dtype, seed=case.seed, **sizes)
    (k, v), ranges, place = gathered(cache), expected_ranges(f), positions(cache)
    do, dlse = _drawn(case, (*cache.q.shape[:-1], f["Dv"]), cache.q.shape[:-1])
    do, dlse = do.to(dtype), dlse.to(lse_dtype(cache.q))
    truth = Truth.of([cache.q, k, v], ranges, do, dlse, None, place)
    selection, index = make_selection(f, case.device), [x if x is None else x.to(case.device) for x in cache[4:]]
    given = cache.q.squeeze(1) if f["decode"] else cache.q, *cache[1:3]
    for backend in f["backends"]:
        inputs = _leaves(given, case.device, [f["grads"] and f["page_size"] is None] * 3)
        attend = lambda: nsa_sel.selection_attention_with_kvcache(*inputs, selection, *index, return_lse=True, backend=backend)  # noqa: B023, E731
        got = _run(backend, attend, inputs, do, dlse, f["decode"])
        if got is not None:
            truth.hold({name: x.transpose(1, 2) if name in ("dk", "dv") else x for name, x in got.items()})


# Wrong arguments


def _good_arguments(case: Case, door: str, block: int, backend: str | None) -> Facts:
    q, k, v = make_qkv(2, 4, 1, 2, 8, S_kv=12, seed=case.seed, device=case.device)
    blocks, rows = torch.tensor([0, 2], device=case.device).expand(2, 4, 1, 2).clone(), torch.arange(8, 12, device=case.device)
    selection, free = Selection.from_blocks(blocks, block), {"scale": None, "backend": backend}
    keys = {"q": q[0], "k": k[0].transpose(0, 1)[:4], "v": v[0].transpose(0, 1)[:4], "selection": selection.ranges[0]}
    caches = {"k_cache": k.transpose(1, 2), "v_cache": v.transpose(1, 2), "cache_seqlens": torch.tensor([12, 7], device=case.device)}
    return {
        "selection_attention": {"q": q, "k": k, "v": v, "selection": selection, "q_pos": rows, "return_lse": False, **free},
        "explain": {"q": q, "k": k, "v": v, "selection": selection, "q_pos": rows, "backend": backend},
        "selection_attention_varlen": {**keys, "cu_seqlens_q": [0, 1, 4], "cu_seqlens_k": [0, 1, 4], "align": None, **free},
        "selection_attention_with_kvcache": {"q": q, **caches, "selection": selection, "block_table": None, **free},
        "from_ranges": {"ranges": selection.ranges, "block_size": block, "max_length": None},
        "from_blocks": {"block_indices": blocks, "block_size": block, "block_counts": torch.full((2, 4, 1), 2, device=case.device)},
        "from_scores": {"scores": q[..., 0, :3], "n": 2, "block_size": 4, "first": 1, "local": 1, "S_kv": 12, "q_pos": None},
        "measure": {"S_kv": 12, "q_pos": torch.arange(4)},
    }[door]


def _mangled(x: Any, odd: str) -> Any:
    with contextlib.suppress(Exception):  # what can't be broken this way stays
        return eval(odd, {"x": x, "torch": torch, "np": np})
    return x


def check_bad(case: Case, f: Facts) -> None:
    """One or two arguments broken: an error of nsa_sel, or the right result for what they mean."""
    door, given = f["door"], _good_arguments(case, f["door"], f["block"], f["backend"])
    for share, odd in f["wrong"]:
        name = list(given)[int(share * len(given))]
        given[name] = _mangled(given[name], odd)
    if f["grads"] and isinstance(given.get("q"), Tensor) and given["q"].is_floating_point() and given["q"].is_leaf:
        given["q"].requires_grad_()
    of_rows = Selection(torch.zeros(1, 4, 1, 1, 2).int()) if door == "measure" else Selection
    try:
        result = getattr(nsa_sel if "q" in given else of_rows, door)(**given)
    except NsaSelError as error:
        return assert_clear(error)
    if door == "from_blocks":
        _check_blocks(given, result)
    elif door == "selection_attention":
        dense = [x.resolve_neg() for x in (given["q"], given["k"], given["v"])]
        scale = None if given["scale"] is None else float(given["scale"])
        o, _ = oracle_forward(*dense, getattr(given["selection"], "ranges", given["selection"]), scale, given["q_pos"])
        result = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(result.detach().cpu().double(), o, atol=0.02, rtol=0.02)
    elif isinstance(result, Tensor):
        assert bool(result.isfinite().all())


def _check_blocks(given: Facts, result: Selection) -> None:
    """No number wrapped around: every block is where Python's own numbers say."""
    blocks, counts, size, limit = given["block_indices"], given["block_counts"], given["block_size"], 100
    blocks = blocks.unsqueeze(1) if blocks.dim() == 3 else blocks
    used = torch.full(blocks.shape[:-1], 99) if counts is None else counts.reshape(blocks.shape[:-1])
    rows = zip(blocks.flatten(0, -2).tolist(), used.flatten().tolist(), result.ranges.flatten(0, 2).tolist(), strict=True)
    for row, count, ranges in rows:
        named = [j for j in row[: max(0, int(count))] if j >= 0]
        wanted = {key for key in range(limit) if key // size in named}
        assert {key for a, b in ranges for key in range(max(0, a), min(b, limit))} == wanted, f"{ranges} for blocks {named} of {size}"


CHECKS = {"call": check_call, "varlen": check_varlen, "cache": check_cache, "bad": check_bad}


def check(case: Case) -> None:
    """Check a case; raise for anything that is wrong, TimeoutError instead of a hang."""
    with _limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="nsa-sel: .* failed")  # packed SDPA would hide what failed
        registry.broken.clear()
        CHECKS[case.kind](case, case.facts)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"more than {CPU_SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
