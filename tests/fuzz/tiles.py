"""Checks of large calls on a GPU: several tiles, long lists, repeats that are replayed. Dense float64 attention is the reference.

A tight baseline tells a key that is left out from rounding: scores in float32, and in 16 bits only what tensor cores take.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

import nsa_sel
from nsa_sel.backends import _slices, cuda_block
from nsa_sel.backends._triton import dkdv
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.backends.cupy_cuda import key_to_rows, launch, sm90
from nsa_sel.backends.launcher import replay
from nsa_sel.core.warm import reset
from nsa_sel.errors import BackendError
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.fuzz.calls import Ran, clear
from tests.fuzz.generators import TOPS, Case, Facts
from tests.helpers.cases import RESULTS, assert_within_twice_baseline

Results = dict[str, Tensor]
SHARES = ("triton-block", "cuda-block")  # round a share of o and dq for each block of a row
SMALL = 1 << 16  # bytes of a workspace that few plans fit
SAME_BITS = ("same", "memory", "stream", "threads", "twice", "graph")  # changes after which the same kernels run
WRITES = ("write", "graph write")  # after which the second selection counts


@contextlib.contextmanager
def counted(ran: Ran) -> Iterator[None]:
    """Adds how often each kernel was started as it is written, how many passes and plans were replayed, and how many parts of rows ran."""
    start, triton, play, cut = launch.start, Kernel.launch, replay._play, _slices.slices

    def started(source: str, *values: Any, **others: Any) -> None:
        ran[source] += 1
        start(source, *values, **others)

    def launched(self: Kernel, *values: Any) -> None:
        ran[f"triton {self.function.__name__}"] += 1
        triton(self, *values)

    def played(*values: Any) -> Any:
        found = play(*values)
        ran["replayed" if found is not None else "not replayed"] += 1
        return found

    def sliced(*values: Any) -> Iterator[Any]:
        for part in cut(*values):
            ran["part"] += 1
            yield part

    with contextlib.ExitStack() as stack:
        found = ((launch, "start", started), (Kernel, "launch", launched), (replay, "_play", played), (_slices, "slices", sliced))
        for module, name, counting in (*found, (sm90, "slices", sliced), (dkdv, "slices", sliced)):
            stack.enter_context(patch.object(module, name, counting))
        yield


# The call


def blocks_of(f: Facts, generator: torch.Generator) -> Tensor:
    """[B,S,r*G,n] int64: block indices by the recipe, -1 for padding."""
    rows, n, device = (f["B"], f["S"], f["r"] * f["G"]), f["n"], generator.device
    blocks = -(-f["S_kv"] // f["block"]) + 1  # the last one is past the keys
    weights = torch.rand(*rows, blocks, generator=generator, device=device)
    at = torch.arange(blocks, device=device)
    if f["how"] == "popular":
        weights = weights / (1 + at % 7 * 9)
    elif f["how"] == "near":
        own = torch.arange(f["S_kv"] - f["S"], f["S_kv"], device=device) // f["block"]
        weights = weights - (own[None, :, None, None] - at).abs() / 4
    elif f["how"] == "same":
        weights = weights[:, :1].expand(*rows, blocks)
    elif f["how"] == "mixed":
        weights = torch.where(at < 2, 2.0, weights)
    found = weights.topk(min(n, blocks), -1).indices
    found = torch.cat((found, found.new_full((*rows, n - found.shape[-1]), -1)), -1)
    found = found.gather(-1, torch.rand(*rows, n, generator=generator, device=device).argsort(-1))
    found = found.masked_fill(torch.rand(*rows, n, generator=generator, device=device) < f["holes"], -1)
    if f["twice"] and n > 1:
        found[..., -1] = found[..., 0]
    if f["far"]:
        found[:, ::3, :, 0] = TOPS[f["index"]]
    return found.masked_fill((torch.rand(rows, generator=generator, device=device) < f["empty"]).unsqueeze(-1), -1)


def mask_of(f: Facts, blocks: Tensor, position: Tensor) -> Tensor:
    """[B,S,r*G,S_kv] bool: which keys every row reads."""
    count = -(-f["S_kv"] // f["block"])
    chosen = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=blocks.device)
    chosen.scatter_(-1, torch.where((blocks < 0) | (blocks >= count), count, blocks), True)
    keys = chosen[..., :count].repeat_interleave(f["block"], -1)[..., : f["S_kv"]]
    return keys & (torch.arange(f["S_kv"], device=blocks.device) <= position[:, :, None, None])


def positions_of(f: Facts, generator: torch.Generator) -> Tensor | None:
    """q_pos [B,S], or [S] if it is shared."""
    B, S, S_kv, how, device = f["B"], f["S"], f["S_kv"], f["q_pos"], generator.device
    if how is None:
        return None
    if how == "zero":
        return torch.zeros(B, S, dtype=torch.int32, device=device)
    if how == "late":  # on a GPU nobody looks: they see all keys
        return torch.full((B, S), S_kv + 7, dtype=torch.int64, device=device)
    if how == "falling":
        return torch.arange(S_kv - 1, S_kv - 1 - S, -1, device=device).expand(B, S)
    found = torch.randint(0, S_kv, (B, S), generator=generator, device=device)
    return found[0].int() if how == "shared" else found


def lay(x: Tensor, how: str) -> Tensor:
    """The same values under other strides; "batch", "one row" and "ones": values that are the same all over."""
    if how == "keys first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how in ("padded", "odd"):  # rows that begin at multiples of 16 bytes, or that do not
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + (8 if how == "padded" else 3)), math.nan)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    if how == "batch":
        return x[:1].expand_as(x)
    if how == "one row":
        return x[:1, :1, :1, :1].expand_as(x)
    return x[(slice(1),) * x.dim()].expand_as(x) if how == "ones" else x


# The reference


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, do: Tensor, dlse: Tensor, scale: float, exact: bool) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv in float64; or with what a kernel rounds to 16 bits rounded, and all else in float32."""
    wide = torch.float64 if exact else torch.float32
    rounded = (lambda x: x) if exact else (lambda x: x.to(q.dtype).to(wide))
    narrow = torch.float64 if exact else q.dtype
    kinds, r = ("bsghd,bgkd->bsghk", "bsghk,bgkd->bsghd", "bsghk,bsghd->bgkd"), q.shape[2] // k.shape[1]
    q, k, v, do, dlse = (x.to(wide) for x in (q, k, v, do, dlse))
    k, v = (x.repeat_interleave(r, 1) for x in (k, v))
    unseen, nothing = ~mask.unsqueeze(-2), ~mask.any(-1)[..., None]
    s = (torch.einsum(kinds[0], q, k) * scale).masked_fill(unseen, -math.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(nothing, 0.0).unsqueeze(-1))
    o = torch.einsum(kinds[1], rounded(p), v).to(narrow)
    delta = (do * o.to(wide)).sum(-1) - dlse
    ds = rounded(p * (torch.einsum(kinds[0], do, v) - delta.unsqueeze(-1)))
    dq = torch.einsum(kinds[1], ds, k) * scale
    dk, dv = torch.einsum(kinds[2], ds, q) * scale, torch.einsum(kinds[2], rounded(p), do)
    dk, dv = (x.unflatten(1, (-1, r)).sum(2) for x in (dk, dv))
    return o, lse, dq.to(narrow), dk.to(narrow), dv.to(narrow)


class Truth:
    """o, lse, dq, dk, dv by both, and how large the terms are whose rounding counts."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, do: Tensor, dlse: Tensor, scale: float) -> None:
        self.mask, self.shared = mask, mask.unflatten(2, (k.shape[1], -1)).any(3)  # by what reads a KV group
        self.exact, self.plain = (dense(q, k, v, mask, do, dlse, scale, exact) for exact in (True, False))
        largest = lambda x: float(x.abs().max())  # noqa: E731
        of_rows = lambda x: float(x.float().norm(dim=-1).max())  # noqa: E731
        off = 4 * (1 + abs(scale) * of_rows(q) * of_rows(k))  # a logit is off by some roundings of itself
        ds = off * abs(scale) * (of_rows(do) * of_rows(v) + largest(dlse))
        self.terms = off * largest(v), off, ds * largest(k), ds * largest(q), off * largest(do)

    def hold(self, got: Results, more: float) -> None:
        """AssertionError where a result is farther from float64 than twice the baseline and roundings allow. more: a factor of that."""
        unread = ~self.shared.any(1)
        for name, exact, plain, terms in zip(RESULTS, self.exact, self.plain, self.terms, strict=True):
            if name in got:
                far = plain.double() + (more - 1) * (plain.double() - exact)
                assert_within_twice_baseline(got[name], exact, torch.where(plain == -math.inf, plain.double(), far), name, more * terms)
        for name in {"dk", "dv"} & got.keys():
            assert not bool(got[name][unread].any()), f"{name} of unselected keys"


# The check


class Problem:
    """A call, its values, and what it must not read."""

    def __init__(self, case: Case) -> None:
        f = self.f = case.facts
        g = self.generator = torch.Generator(case.device).manual_seed(case.seed)
        B, S, r, G, h, dtype = f["B"], f["S"], f["r"], f["G"], f["h"], getattr(torch, f["dtype"])
        shapes = (B, S, r * G, h, f["Dk"]), (B, G, f["S_kv"], f["Dk"]), (B, G, f["S_kv"], f["Dv"]), (B, S, r * G, h, f["Dv"])
        drawn = [torch.randn(shape, generator=g, device=case.device).to(dtype) for shape in shapes]
        self.layouts = [*f["layouts"], f["do"]]
        same = ("batch", "one row", "ones")  # their values are those of the reference, too
        self.q, self.k, self.v, self.do = (lay(x, how).clone() if how in same else x for x, how in zip(drawn, self.layouts, strict=True))
        self.dlse = torch.randn(shapes[0][:-1], generator=g, device=case.device)
        self.scale = f["Dk"] ** -0.5 if f["scale"] is None else f["scale"]
        self.q_pos = positions_of(f, g)
        at = torch.arange(f["S_kv"] - S, f["S_kv"], device=case.device) if self.q_pos is None else self.q_pos
        self.position = at.long().expand(B, S)
        self.blocks = [blocks_of(f, g) for _ in range(2)]  # before and after a write
        self.truths = [self.truth(x) for x in self.blocks[: 1 + any(change in WRITES for change in f["changes"])]]
        self.kept: Selection | None = None

    def truth(self, blocks: Tensor) -> Truth:
        do, dlse = self.do * (self.f["uses"] != "lse"), self.dlse * (self.f["uses"] != "o")
        mask = mask_of(self.f, blocks, self.position)
        dlse = dlse.masked_fill(~mask.any(-1, keepdim=True), 0.0)
        return Truth(self.q, self.k, self.v, mask, do, dlse, self.scale)

    def selection(self, number: int) -> Selection:
        return Selection.from_blocks(self.blocks[number].to(getattr(torch, self.f["index"])), self.f["block"])

    def tensors(self, mask: Tensor) -> list[Tensor]:
        """q, k, v, do, dlse in new memory, in their layouts; what no row of the mask reads is poisoned."""
        x = [self.q, self.k, self.v, self.do, self.dlse]
        if self.f["poison"]:
            bad, nothing = float(self.f["poison"]), ~mask.any(-1)
            unread = ~mask.unflatten(2, (self.k.shape[1], -1)).any(3).any(1)[..., None]
            expanded = [how in ("batch", "one row", "ones") for how in self.layouts]
            rows = nothing[..., None, None]
            where = [rows, unread, unread, rows]
            x[:4] = [y if e else y.masked_fill(w, bad) for y, w, e in zip(x, where, expanded, strict=False)]
            x[4] = x[4].masked_fill(nothing[..., None], bad)
        return [*(lay(y.clone(), how) for y, how in zip(x, self.layouts, strict=False)), x[4].clone()]

    def attend(self, ran: Ran, selection: Selection, tensors: list[Tensor], grads: str, twice: bool = False) -> Results:
        """Results of one call; after `twice` of a second backward pass."""
        *qkv, do, dlse = tensors
        inputs = [x.detach().requires_grad_(name in grads) for name, x in zip("qkv", qkv, strict=True)]
        backend = self.f["backend"]
        o, lse = nsa_sel.selection_attention(
            *inputs, selection, scale=self.f["scale"], q_pos=self.q_pos, return_lse=True, backend=backend
        )  # fmt: skip
        names = [f"d{name}" for name in "qkv" if name in grads]
        decision = nsa_sel.decisions()[-1]
        assert (decision.forward, decision.backward) == (backend, backend if names else None)
        found = {"o": o.detach(), "lse": lse.detach()}
        ran[f"{backend} forward"] += 1
        used = [(x, w) for x, w, name in ((o, do, "o"), (lse, dlse, "lse")) if self.f["uses"] in ("both", name)]
        for more in range(bool(names) + (twice and bool(names))):
            keep = twice and not more
            given = torch.autograd.grad(
                [x for x, _ in used], [x for x in inputs if x.requires_grad], [w for _, w in used], retain_graph=keep
            )
            found |= dict(zip(names, given, strict=True))
            ran[f"{backend} backward"] += 1
        return found


def check_tiles(case: Case, f: Facts) -> Ran:
    """Results of a call and of its repeats, each after a change."""
    ran = Ran()
    with fp32_products():
        reset()
        problem = Problem(case)
        more = 4.0 if f["backend"] in SHARES else 1.0
        found: list[tuple[int, Results]] = []
        tensors = problem.tensors(problem.truths[0].mask)
        for change in ["same", *f["changes"]]:
            number = int(change in WRITES)
            try:
                got = repeat(problem, ran, change, number, tensors)
            except BackendError as error:
                ran += clear(error)
                continue
            problem.truths[number].hold(got, more)
            if change in SAME_BITS:
                found.append((number, got))
                for name, x in got.items():
                    assert torch.equal(x, found[0][1][name]), f"{name} has other bits after {change}"
            ran[change] += 1
    return ran


@contextlib.contextmanager
def fp32_products() -> Iterator[None]:
    """Of the baseline, without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def repeat(problem: Problem, ran: Ran, change: str, number: int, tensors: list[Tensor]) -> Results:
    """Results of one call after a change of how it is made."""
    f, grads = problem.f, problem.f["grads"]
    if problem.kept is None or not f["kept"]:
        problem.kept = problem.selection(0)
    selection = problem.kept
    run: Callable[..., Results] = lambda **how: problem.attend(ran, selection, tensors, how.get("grads", grads), how.get("twice", False))  # noqa: E731
    if change == "memory":
        tensors = problem.tensors(problem.truths[0].mask)
        return run()
    if change == "stream":
        return on_other_stream(run)
    if change == "threads":
        return in_threads(run)
    if change in WRITES:
        before, after = selection.ranges.clone(), problem.selection(1).ranges
        poisoned = problem.tensors(problem.truths[1].mask)
        try:
            if change == "graph write":
                return in_graph(run, [(selection.ranges, after), *zip(tensors, poisoned, strict=True)])
            selection.ranges.copy_(after)
            tensors = poisoned
            return run()
        finally:
            selection.ranges.copy_(before)
    if change in ("no grad", "inference"):
        with torch.no_grad() if change == "no grad" else torch.inference_mode():
            return run(grads="")
    if change == "measure":
        selection = problem.selection(0)
        selection.measure()
    if change == "parts":
        return in_parts(run)
    if change == "graph":
        return in_graph(run)
    return run(twice=change == "twice")


def on_other_stream(run: Callable[..., Results]) -> Results:
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        found = run()
    main.wait_stream(side)
    return found


def in_threads(run: Callable[..., Results]) -> Results:
    """Of the first of three threads that run at once, each on a stream of its own; the others have found the same."""
    torch.cuda.synchronize()  # what they read is there
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: on_other_stream(run), range(3)))
    torch.cuda.synchronize()
    for other in found[1:]:
        for name, x in other.items():
            assert torch.equal(x, found[0][name]), f"{name} differs between threads"
    return found[0]


def in_parts(run: Callable[..., Results]) -> Results:
    """With little workspace, short segments and small sections, so that passes go through their rows in parts, or are refused."""
    settings = lambda device: msgspec.structs.replace(settings_for(device), workspace_bytes=SMALL)  # noqa: E731
    reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch("nsa_sel.core.decide.settings_for", settings))
        for module, name, value in ((_slices, "LEAST_ROWS", 64), (key_to_rows, "SHORTEST", 4), (cuda_block, "L2_BYTES", 1 << 18)):
            stack.enter_context(patch.object(module, name, value))
        stack.callback(reset)
        return run()


def in_graph(run: Callable[..., Results], writes: Sequence[tuple[Tensor, Tensor]] = ()) -> Results:
    """Of a graph that is replayed after these writes into what it reads, which are undone. What is expanded has the same values anyway."""
    on_other_stream(run)  # what compiles and loads must do so before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    writes = [(to, x, to.clone()) for to, x in writes if 0 not in to.stride()]
    for to, x, _ in writes:
        to.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    for to, _, before in writes:
        to.copy_(before)
    return {name: x.clone() for name, x in found.items()}
