"""Whether the library does the right thing with a case: `check(case)` raises for what it should not do, and says which kernels ran."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import json
import math
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import safetensors.torch
import torch
import yaml
from torch import Tensor
from torch.nn.functional import pad
from typer.testing import CliRunner

import nsa_sel
from nsa_sel.cli.app import app
from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo, example_request
from nsa_sel.errors import BackendError, ConfigError, NsaSelError
from nsa_sel.oracle import oracle_backward, oracle_forward, oracle_mask
from nsa_sel.selection import Selection
from nsa_sel.settings import config
from nsa_sel.settings.devices import GPUS
from nsa_sel.settings.flags import CONFIG_FLAG, FLAGS
from nsa_sel.settings.schema import ConfigFile
from tests import conftest
from tests.api.test_serving import gathered, make_cache, positions
from tests.fuzz.generators import ODD_TENSORS, Case, Facts, case, digest
from tests.helpers.cases import assert_within_twice_baseline, make_qkv, plain_torch
from tests.helpers.paths import DATA, ROOT
from tests.helpers.varlen_cases import Packed, bounds, seen_keys

CPU_SECONDS = 120  # of processor time, which does not grow under load, that one case may take; compiling is the most of it
FAR = 2**40  # beyond every key and every int32
Ran = Counter[str]
Results = dict[str, Tensor]


def prepare() -> None:
    """One thread and a fast interpreter, as the tests have them."""
    faulthandler.enable()
    torch.set_num_threads(1)
    for fixture in (conftest.fast_sorts_in_the_interpreter, conftest.fast_calls_in_the_interpreter):
        contextlib.contextmanager(fixture.__wrapped__)().__enter__()  # for as long as the process lives


def run(first: int, count: int, device: str) -> dict[str, Any]:
    """A row of the ledger: the cases of these seeds, checked."""
    begun, kinds, ran, failed = time.perf_counter(), Counter[str](), Counter[str](), []
    cases = [case(seed, device) for seed in range(first, first + count)]
    of_cases = digest(cases)  # before they are checked, which may write into one
    for one in cases:
        kinds[one.kind] += 1
        try:
            ran += check(one)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            failed.append([one.seed, one.kind, f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {str(error)[:300]}"])
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "first": first, "count": count, "device": device, "digest": of_cases, "failed": failed, "kinds": dict(sorted(kinds.items())),
        "ran": dict(sorted(ran.items())), "seconds": seconds,
    }  # fmt: skip


def check(case: Case) -> Ran:
    """How often which backend ran which way, and how often something was refused. Raises for anything that is wrong."""
    with _limited(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="nsa-sel: .* failed")  # packed SDPA would hide what failed
        registry.forget_broken()
        return CHECKS[case.kind](case, case.facts)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """TimeoutError instead of a hang."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {CPU_SECONDS} s of processor time")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# Selections


def _tensor(numbers: Any, shape: tuple[int, ...], dtype: str) -> Tensor:
    return torch.tensor(numbers, dtype=getattr(torch, dtype)).reshape(shape)


def _q_pos(f: Facts) -> Tensor | None:
    if f.get("q_pos") is None:
        return None
    shared = bool(f["q_pos"]) and not isinstance(f["q_pos"][0], list)
    return _tensor(f["q_pos"], (f["S"],) if shared else (f["B"], f["S"]), f["q_pos_dtype"])


def _copies(made: Selection) -> dict[str, Callable[[], Selection]]:
    return {
        "copy": lambda: copy.copy(made),
        "deepcopy": lambda: copy.deepcopy(made),
        "pickle": lambda: pickle.loads(pickle.dumps(made)),
        "to": lambda: made.to(made.ranges.device),
    }


def make_selection(f: Facts, device: str) -> Selection | Tensor:
    """The selection as the case asks for it."""
    s, rows = f["selection"], (f["B"], f["S"], f["G"])
    squeezed = (lambda x: x.squeeze(1).to(device)) if f.get("decode") else (lambda x: x.to(device))
    if s["how"] == "ranges":
        ranges = squeezed(_tensor(s["ranges"], (*rows, s["n"], 2), s["dtype"]))
        if s["bare"]:
            return ranges
        spans = ranges.long().clamp(min=0).diff(dim=-1).clamp(min=0).sum((-1, -2))
        made = Selection.from_ranges(ranges, None, max(1, int(spans.max())) if s["bounded"] and spans.numel() else None)
    elif s["how"] == "blocks":
        counts = None if s["counts"] is None else squeezed(_tensor(s["counts"], rows, "int64"))
        made = Selection.from_blocks(squeezed(_tensor(s["blocks"], (*rows, s["n"]), s["dtype"])), s["block"], counts)
    else:
        scores, q_pos = _tensor(s["scores"], (*rows, -(-f["S_kv"] // s["block"])), s["dtype"]).to(device), _q_pos(f)
        there: Facts = {"S_kv": f["S_kv"]} if q_pos is None else {"q_pos": q_pos.to(device)}
        made = Selection.from_scores(scores, s["n"], s["block"], s["first"], s["local"], **there)
    if s["then"] == "measure":
        made.measure(f["S_kv"])
    return {"merge": made.merge, **_copies(made)}.get(s["then"], lambda: made)()


def expected_ranges(f: Facts) -> Tensor:
    """[B,S,G,n+1,2] int64, the last one empty: what each row selects by the words of the contract, without the library's code."""
    s, B, S, G = f["selection"], f["B"], f["S"], f["G"]
    if s["how"] == "ranges":
        return pad(_tensor(s["ranges"], (B, S, G, s["n"], 2), "int64"), (0, 0, 0, 1))
    given, block = _q_pos(f), s["block"]
    current = (torch.arange(f["S_kv"] - S, f["S_kv"]) if given is None else given).expand(B, S) // block

    def row(b: int, at: int, g: int) -> list[list[int]]:
        if s["how"] == "scores":
            named = best_blocks(s["scores"][b][at][g], s["n"], s["first"], s["local"], int(current[b, at]))
        else:
            named = s["blocks"][b][at][g][: None if s["counts"] is None else max(0, s["counts"][b][at][g])]
        spans = [[min(j * block, FAR), min((j + 1) * block, FAR)] for j in named if j >= 0]
        return spans + [[0, 0]] * (s["n"] + 1 - len(spans))

    made = [[[row(b, at, g) for g in range(G)] for at in range(S)] for b in range(B)]
    return _tensor(made, (B, S, G, s["n"] + 1, 2), "int64")


def best_blocks(scores: list[float], n: int, first: int, local: int, current: int) -> list[int]:
    """What `Selection.from_scores` promises of one row: forced blocks, then by falling score, ties to the lower index."""
    seen = range(min(len(scores), current + 1))
    forced = [j for j in seen if j < first or j > current - local]
    free = [j for j in seen if j not in forced and scores[j] > -math.inf]  # no NaN either
    return [*forced, *sorted(free, key=lambda j: (-scores[j], j))][:n]


# Calls


class Truth(NamedTuple):
    """o, lse, dq, dk, dv by the oracle and by the baseline, and how large the terms are whose rounding counts."""

    exact: tuple[Tensor, ...]
    plain: tuple[Tensor, ...]
    terms: tuple[float, ...]

    @classmethod
    def of(cls, inputs: list[Tensor], ranges: Tensor, do: Tensor, dlse: Tensor, scale: float | None = None, q_pos: Any = None) -> Truth:
        """For q, k, v in the prefill form, on the CPU."""
        q, k, v = problem = [x.detach().requires_grad_() for x in inputs]
        exact = (*oracle_forward(q, k, v, ranges, scale, q_pos), *oracle_backward(q, k, v, ranges, do, dlse, scale, q_pos))
        o, lse = plain_torch(q, k, v, ranges, scale, q_pos)
        grads = torch.autograd.grad((o, lse.masked_fill(lse == -math.inf, 0.0)), problem, (do, dlse))
        q, k, v, do, dlse = (x.abs().double() for x in (*inputs, do, dlse))
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
        # A logit is off by some roundings of itself, and p, o and the gradients by as much relative to their terms.
        off = float(4 * (1 + scale * torch.einsum("bsghd,bgkd->bsghk", q, k).max()))
        ds = off * scale * (torch.einsum("bsghd,bgkd->bsghk", do, v).max() + dlse.max())
        # do.o is computed from the o that autograd keeps, which is rounded to q's dtype; this is in roundings of float32.
        narrow = torch.finfo(inputs[0].dtype).eps / torch.finfo(torch.promote_types(inputs[0].dtype, torch.float32)).eps
        ds += narrow / 2 * scale * float((do * exact[0].abs()).sum(-1).max())
        of_lse = off + (1000 if inputs[0].element_size() == 2 else 0)  # PyTorch's exp for 16-bit types on a CPU is off by 5e-5
        return cls(exact, (o, lse, *grads), tuple(map(float, (off * v.max(), of_lse, ds * k.max(), ds * q.max(), off * do.max()))))

    def hold(self, got: Results) -> None:
        """AssertionError where a result is farther from the oracle than twice the baseline and roundings allow."""
        for name, exact, plain, terms in zip(("o", "lse", "dq", "dk", "dv"), self.exact, self.plain, self.terms, strict=True):
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


def _dtypes(f: Facts) -> tuple[torch.dtype, torch.dtype]:
    """Of q, k, v, and of lse."""
    dtype = getattr(torch, f["dtype"])
    return dtype, torch.promote_types(dtype, torch.float32)


def _run(
    ran: Ran, backend: str | None, selected: bool, call: Callable[[], Any], inputs: list[Tensor], do: Tensor | None, dlse: Tensor | None,
    decode: bool = False,
) -> Results | None:  # fmt: skip
    """o, lse and the gradients of those inputs that require them, as in the prefill form; None where the backend refuses.

    The last decision must name the backend that was asked for; it counts as having run where any row selects anything.
    """
    try:
        o, lse = call()
    except BackendError:
        if backend is None or not backend.startswith(("triton", "cupy")):  # without limits
            raise
        ran["refused"] += 1
        return None
    decision = nsa_sel.decisions()[-1]
    assert backend in (None, decision.forward), f"{decision.forward} ran instead of {backend}"
    names = {name: x for name, x in zip(("dq", "dk", "dv"), inputs, strict=True) if x.requires_grad}
    used = [(x, (w.squeeze(1) if decode else w).to(x.device)) for x, w in ((o, do), (lse, dlse)) if w is not None]
    grads = torch.autograd.grad([x for x, _ in used], list(names.values()), [w for _, w in used]) if names else ()
    ran[f"{decision.forward} forward"] += selected
    ran[f"{decision.backward} backward"] += bool(selected and names)
    found = {"o": o.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}
    return {name: x.unsqueeze(1) if decode and name in ("o", "lse", "dq") else x for name, x in found.items()}


def check_call(case: Case, f: Facts) -> Ran:
    """Outputs and gradients on each backend, with what must not matter poisoned; unselected keys get exact zeros."""
    B, S, G, h, S_kv, decode = f["B"], f["S"], f["G"], f["h"], f["S_kv"], f["decode"]
    dtype, wide = _dtypes(f)
    q, k, v, do, dlse = _drawn(
        case, (B, S, G, h, f["Dk"]), (B, G, S_kv, f["Dk"]), (B, G, S_kv, f["Dv"]), (B, S, G, h, f["Dv"]), (B, S, G, h)
    )
    q, k, v = (x[:1].expand_as(x) if how == "expanded" else x for x, how in zip((q * f["size"], k, v), f["layouts"], strict=True))
    q, k, v, do, dlse = *(x.to(dtype).clone() for x in (q, k, v, do if f["do"] == "random" else torch.ones_like(do))), dlse.to(wide)
    ranges, q_pos, ran = expected_ranges(f), _q_pos(f), Counter[str]()
    seen = oracle_mask(ranges, S_kv, S, q_pos)  # [B,S,G,S_kv]
    truth = Truth.of([q, k, v], ranges, do * (f["uses"] != "lse"), dlse * (f["uses"] != "o"), f["scale"], q_pos) if B else None
    if f["poison"]:
        nothing, unseen, bad = ~seen.any(-1)[..., None, None], ~seen.any(1)[..., None], torch.tensor(float(f["poison"])).to(dtype)
        q, do, dlse = q.masked_fill(nothing, bad), do.masked_fill(nothing, bad), dlse.masked_fill(nothing[..., 0], bad)
        k, v = k.masked_fill(unseen, math.nan), v.masked_fill(unseen, math.nan)
    selection, place = make_selection(f, case.device), None if q_pos is None else q_pos.to(case.device)
    weights = (do if f["uses"] != "lse" else None), (dlse if f["uses"] != "o" else None)
    for backend in f["backends"]:
        results: list[Results] = []
        for _ in range(1 + f["again"]):
            inputs = [lay(x.to(case.device), how) for x, how in zip((q.squeeze(1) if decode else q, k, v), f["layouts"], strict=True)]
            inputs = [x.detach().requires_grad_(name in f["grads"]) for name, x in zip("qkv", inputs, strict=True)]
            with patch.dict(os.environ, {"NSA_SEL_BACKEND": backend} if backend and f["flag"] else {}):
                how = {"scale": f["scale"], "q_pos": place, "return_lse": True, "backend": None if f["flag"] else backend}
                call = lambda: nsa_sel.selection_attention(*inputs, selection, **how)  # noqa: B023, E731
                got = _run(ran, backend, bool(seen.any()), call, inputs, *weights, decode)
            results += (
                [] if got is None else [{name: x.squeeze(1) if decode and name == "dq" and x.dim() > 5 else x for name, x in got.items()}]
            )
        for got in results:
            if truth is not None:
                truth.hold(got)
            for name in {"dk", "dv"} & got.keys():
                assert int(torch.count_nonzero(got[name].cpu()[~seen.any(1)])) == 0, f"{name} of unselected keys"
            assert all(torch.equal(results[0][name], x) for name, x in got.items()), "a repeat changes bits"
    return ran


def check_varlen(case: Case, f: Facts) -> Ran:
    """Sequences of one batch, each as it would be alone; keys that nobody sees and padding rows are poisoned."""
    T, Tk, G, h, Dk, Dv = f["S"], sum(f["keys"]) + f["spare"], f["G"], f["h"], f["Dk"], f["Dv"]
    dtype, wide = _dtypes(f)
    q, k, v, do, dlse = _drawn(case, (T, G, h, Dk), (Tk, G, Dk), (Tk, G, Dv), (T, G, h, Dv), (T, G, h))
    q, k, v, do, dlse = *(x.to(dtype) for x in (q, k, v, do)), dlse.to(wide)
    packed = Packed(q, k, v, Selection(expected_ranges(f)), bounds(f["rows"]), bounds(f["keys"]))
    seen, alone, truths = seen_keys(packed), torch.ones(T, dtype=torch.bool), []
    for rows, keys in packed.each():
        if rows.stop > rows.start and keys.stop > keys.start:
            own = [q[rows][None].clone(), *(x[keys].transpose(0, 1)[None].clone() for x in (k, v))]
            truths.append(((rows, keys), Truth.of(own, packed.ranges()[rows][None], do[rows][None], dlse[rows][None])))
            alone[rows] = False
    if f["poison"]:
        q[packed.cu_q[-1] :] = k[~seen] = v[~seen] = math.nan
    selection, ran, make = make_selection(f, case.device), Counter[str](), {"int32": torch.int32, "int64": torch.int64}.get(f["bounds"])
    place = "cpu" if f["bounds"] == "on cpu" else case.device
    cu_q, cu_k = (x if f["bounds"] == "list" else torch.tensor(x, dtype=make, device=place) for x in (packed.cu_q, packed.cu_k))
    align = f["align"] if isinstance(selection, Selection) and selection.block_size else None
    how = {"align": align, "cu_seqlens_k": None if packed.cu_q == packed.cu_k and T == Tk else cu_k, "return_lse": True}
    for backend in f["backends"]:
        inputs = [x.to(case.device).requires_grad_() for x in (q, k, v)]
        call = lambda: nsa_sel.selection_attention_varlen(*inputs, selection, cu_q, backend=backend, **how)  # noqa: B023, E731
        got = _run(ran, backend, bool(seen.any()), call, inputs, do, dlse)
        if got is None:
            continue
        got = {name: x.cpu() for name, x in got.items()}
        for rows, truth in truths:
            part = {"o": rows[0], "lse": rows[0], "dq": rows[0], "dk": rows[1], "dv": rows[1]}
            mine = {name: got[name][at][None] for name, at in part.items()}
            truth.hold({name: x.transpose(1, 2) if name in ("dk", "dv") else x for name, x in mine.items()})
        for name, x in got.items():  # what is no sequence's, or of one without keys
            rest, nothing = (~seen if name in ("dk", "dv") else alone), -math.inf if name == "lse" else 0
            assert bool((x[rest] == nothing).all()), f"{name} of what nobody selects"
    return ran


def check_cache(case: Case, f: Facts) -> Ran:
    """The new tokens of sequences in a cache; NaN stands where no sequence has a key. Gradients without pages."""
    sizes = {name: f[name] for name in ("G", "h", "Dk", "Dv")}
    dtype, wide = _dtypes(f)
    cache = make_cache(tuple(f["lengths"]), f["page_size"], S_q=f["S"], block=1, n=1, room=f["S_kv"], dtype=dtype, seed=case.seed, **sizes)
    (k, v), ranges, place, ran = gathered(cache), expected_ranges(f), positions(cache), Counter[str]()
    do, dlse = _drawn(case, (*cache.q.shape[:-1], f["Dv"]), cache.q.shape[:-1])
    do, dlse, selected = do.to(dtype), dlse.to(wide), bool(oracle_mask(ranges, k.shape[2], f["S"], place).any())
    truth = Truth.of([cache.q, k, v], ranges, do, dlse, None, place)
    selection, index = make_selection(f, case.device), [x if x is None else x.to(case.device) for x in cache[4:]]
    for backend in f["backends"]:
        q, *caches = inputs = [x.to(case.device).requires_grad_(f["grads"] and f["page_size"] is None) for x in cache[:3]]
        arguments = q.squeeze(1) if f["decode"] else q, *caches, selection, *index
        call = lambda: nsa_sel.selection_attention_with_kvcache(*arguments, return_lse=True, backend=backend)  # noqa: B023, E731
        got = _run(ran, backend, selected, call, inputs, do, dlse, f["decode"])
        if got is not None:
            if "dq" in got:  # as q was before it lost an axis
                got |= {"dq": got["dq"].reshape(q.shape), "dk": got["dk"].transpose(1, 2), "dv": got["dv"].transpose(1, 2)}
            truth.hold(got)
    return ran


def check_write(case: Case, f: Facts) -> Ran:
    """What was made from ranges or positions before they were written is not used afterwards, or autograd says that it would be."""
    B, S, G, S_kv, block, how = f["B"], f["S"], f["G"], f["S_kv"], f["block"], f["write"]
    qkv = list(make_qkv(B, S, G, f["h"], f["Dk"], f["Dv"], S_kv=S_kv, dtype=_dtypes(f)[0], seed=case.seed))
    old, new = (_tensor(f[name], (B, S, G, 2, 1), "int32") * block + torch.tensor([0, block]).int() for name in ("old", "new"))
    do, dlse = torch.ones(*qkv[0].shape[:-1], f["Dv"]).to(qkv[0]), torch.zeros(qkv[0].shape[:-1], dtype=_dtypes(f)[1])
    before, after, ran = Truth.of(qkv, old, do, dlse), Truth.of(qkv, new, do, dlse), Counter[str]()
    for backend in f["backends"]:
        selection, changed = Selection.from_ranges(old.clone().to(case.device), block if f["whole"] else None), new.to(case.device)
        if f["measured"]:
            selection.measure(S_kv)
        inputs = [x.to(case.device).requires_grad_() for x in qkv]
        q_pos = torch.arange(S_kv - S, S_kv, device=case.device) if "q_pos" in how else None

        def write(to: Selection, changed: Tensor = changed, q_pos: Tensor | None = q_pos) -> None:
            if how.startswith("replaced"):
                to.ranges = changed.clone()
            elif how == "unseen":  # by PyTorch's version counter
                to.ranges.data.copy_(changed)
                if changed.is_cuda:
                    to.invalidate()
            else:
                (to.ranges.copy_(changed) if q_pos is None else q_pos.zero_())

        def hold(truth: Truth, made: Selection, then: Any = None, backend: Any = backend, inputs: Any = inputs, q_pos: Any = q_pos) -> None:
            def call() -> Any:
                found = nsa_sel.selection_attention(*inputs, made, q_pos=q_pos, return_lse=True, backend=backend)
                return found if then is None else (then(made), found)[1]

            truth.hold(_run(ran, backend, True, call, inputs, do, None) or {})

        if how.endswith("backward"):
            # Autograd or the selection says so; else the gradients are those of what the forward pass saw.
            with contextlib.suppress(RuntimeError, NsaSelError):
                hold(before, selection, write)
            continue
        hold(before, selection)
        written = kept = selection
        if " a copy" in how:
            other = _copies(selection)[f["copy"]]()
            written, kept = (other, selection) if how == "of a copy" else (selection, other)
        try:
            write(written)
        except NsaSelError as error:
            ran.update(_clear(error))
            continue
        hold(after, written)
        hold(after if written.ranges.data_ptr() == kept.ranges.data_ptr() else before, kept)
    return ran


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


def _clear(error: NsaSelError) -> Ran:
    assert 20 < len(str(error)) < 10_000, str(error)[:200]
    return Counter(refused=1)


def check_bad(case: Case, f: Facts) -> Ran:
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
        return _clear(error)
    if door == "from_blocks":  # no number wrapped around: every block is where Python's own numbers say
        blocks, counts, size, limit = given["block_indices"], given["block_counts"], given["block_size"], 100
        blocks = blocks.unsqueeze(1) if blocks.dim() == 3 else blocks
        used = torch.full(blocks.shape[:-1], 99) if counts is None else counts.reshape(blocks.shape[:-1])
        for row, count, ranges in zip(
            blocks.flatten(0, -2).tolist(), used.flatten().tolist(), result.ranges.flatten(0, 2).tolist(), strict=True
        ):
            named = [j for j in row[: max(0, int(count))] if j >= 0]
            wanted = {key for key in range(limit) if key // size in named}
            assert {key for a, b in ranges for key in range(max(0, a), min(b, limit))} == wanted, f"{ranges} for blocks {named} of {size}"
    elif door == "selection_attention":
        dense = [x.resolve_neg() for x in (given["q"], given["k"], given["v"])]
        scale = None if given["scale"] is None else float(given["scale"])
        o, _ = oracle_forward(*dense, getattr(given["selection"], "ranges", given["selection"]), scale, given["q_pos"])
        result = result[0] if isinstance(result, tuple) else result
        torch.testing.assert_close(result.detach().cpu().double(), o, atol=0.02, rtol=0.02)
    elif isinstance(result, Tensor):
        assert bool(result.isfinite().all())
    return Counter(accepted=1)


# Texts and files


def edit_text(text: str, edits: list[Any]) -> str:
    for share, op, length, new in edits:
        at = int(share * (len(text) + 1))
        if op == "cut":
            text = text[:at]
        elif op == "repeat":
            text = text[:at] + text[at : at + length] * 3 + text[at + length :]
        else:
            text = text[:at] + (new if op != "delete" else "") + text[at + (0 if op == "insert" else length) :]
    return text


def edit_tree(tree: Any, edits: list[Any]) -> Any:
    """The nested lists and dictionaries with some of their entries changed."""
    for share, op, value in edits:
        places: list[tuple[Any, Any]] = []
        pending = [tree]
        for inner in pending:
            entries = list(inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ())
            places += [(inner, key) for key, _ in entries]
            pending += [entry for _, entry in entries]
        if not places or op == "add":
            tree = {**tree, str(value)[:99]: value} if isinstance(tree, dict) else tree
            continue
        inner, key = places[int(share * len(places))]
        old = inner.pop(key)
        if op in ("set", "nest"):
            new = copy.deepcopy(value) if op == "set" else [old]
            inner.insert(key, new) if isinstance(inner, list) else inner.__setitem__(key, new)
        elif op == "rename" and isinstance(inner, dict):
            inner[str(value)[:99]] = old
    return tree


def check_config(case: Case, f: Facts) -> Ran:
    """A configuration file, or texts of flags: an error, or settings that decide on every known device."""
    names = [*(flag.name for flag in FLAGS), CONFIG_FLAG]
    flags = {names[int(share * len(names))]: text.replace("\0", "").replace("\ud800", "\udcff") for share, text in f["flags"]}
    ran = Counter[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if not flags:
            shipped = sorted((ROOT / "configs").rglob("*.yaml"))
            tree = edit_tree(yaml.safe_load(shipped[int(f["file"] * len(shipped))].read_text()), f["tree"])
            text = edit_text(yaml.safe_dump(tree, sort_keys=False), f["text"]).encode("utf-8", "surrogatepass")
            flags = {CONFIG_FLAG: f"{folder}/fuzz.yaml"}
            Path(flags[CONFIG_FLAG]).write_bytes(text)
            with contextlib.suppress(ConfigError):
                assert isinstance(config.parse_config(text, "fuzz.yaml"), ConfigFile)
        stack.enter_context(patch.dict(os.environ, flags))
        stack.callback(conftest.forget)
        for device in (DeviceInfo(kind="cpu"), *GPUS.values()):
            try:
                nsa_sel.describe(nsa_sel.explain_request(example_request(needs_grad=True), device))
                ran["accepted"] += 1
            except NsaSelError as error:
                ran += _clear(error)
    return ran


def _command(*arguments: str) -> Ran:
    """A command that ends by itself, with 0, 1 or a clear error, and writes no control characters."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    raw = sorted({hex(ord(c)) for c in result.output if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160})
    assert result.exit_code in (0, 1, 2)
    assert not raw, f"control characters {raw} in the output of {arguments[0]}"
    return Counter({"refused" if result.exit_code == 2 else "accepted": 1})


def check_log(case: Case, f: Facts) -> Ran:
    """A log in which anything may stand: summarised and replayed, or refused by the line."""
    whole = (DATA / f["log"]).read_text().splitlines()
    lines = [edit_text(json.dumps(edit_tree(json.loads(whole[int(share * len(whole))]), tree)), text) for share, tree, text in f["lines"]]
    shared = [line for line in whole if '"sel.settings"' in line]  # decisions name them
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        log.write_bytes("\n".join([*shared, *lines]).encode("utf-8", "surrogatepass"))
        return _command("decisions", str(log)) + _command("replay", str(log))


def check_file(case: Case, f: Facts) -> Ran:
    """A file of tensors: computed, or refused."""
    q, k, v = make_qkv(1, 3, 1, 2, 8, S_kv=12, seed=case.seed)
    blocks = torch.tensor([0, 2]).expand(1, 3, 1, 2)
    tensors = {"q": q, "k": k, "v": v, **({"q_pos": torch.tensor([2, 5, 11])} if f["q_pos"] else {})}
    tensors |= {"block_indices": blocks} if f["blocks"] else {"ranges": Selection.from_blocks(blocks, 4).ranges}
    for name, op in f["tensors"].items():
        x = tensors.pop(name, torch.zeros(2))
        if op in (*ODD_TENSORS, "rename"):
            changed = _mangled(x, op)
            plain = (
                isinstance(changed, Tensor) and changed.layout == torch.strided and not changed.is_nested and changed.device.type == "cpu"
            )
            tensors[name.upper() if op == "rename" else name] = changed.detach().contiguous() if plain else x
    tensors = {name: x.resolve_neg().clone().contiguous() for name, x in tensors.items()}
    data = safetensors.torch.save(tensors, None if f["metadata"] is None else {"block_size": f["metadata"]})
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(edit_tree(json.loads(data[8:size]), f["header"])).encode()
    changed_data = bytearray(len(header).to_bytes(8, "little") + header + data[size:])
    for share, op in f["bytes"]:
        at = int(share * len(changed_data))
        if op == "flip" and changed_data:
            changed_data[at] ^= 1 << case.seed % 8
        else:
            changed_data[at:] = b"" if op == "cut" else b"{}" + changed_data[at:]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "problem.safetensors").write_bytes(changed_data)
        return _command("run", f"{folder}/problem.safetensors", "--device", "cpu", "--out", f"{folder}/out.safetensors")


CHECKS: dict[str, Callable[[Case, Facts], Ran]] = {
    "call": check_call, "varlen": check_varlen, "cache": check_cache, "bad": check_bad, "write": check_write, "config": check_config,
    "log": check_log, "file": check_file,
}  # fmt: skip
