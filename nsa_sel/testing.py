"""Check any implementation of block-selecting attention against the contract of `selection_attention`.

    print(check_implementation(attend, shapes=[Shape(16, 128, 128, 64)], dtypes=[torch.bfloat16], device="cuda"))

The contract (docs/contract.md) is data here: behaviors, and the problems that show them. Results are held to the float64
oracle, their errors to those of dense attention by PyTorch in the same precision. No kernel of nsa-sel runs in it; the
tests of its own backends use the same rows, baseline and bounds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError
from nsa_sel.oracle import oracle_backward, oracle_forward, oracle_mask
from nsa_sel.selection import Selection

Row = list[tuple[int, int]]  # the ranges of a row

RESULTS = ("o", "lse", "dq", "dk", "dv")
SPAN = 8  # keys of a "block" where ranges have any length
MOST_RANGES = 4  # ranges per row of `edge_rows`
LATER = ("outside", "future", "ranges", "far ranges")  # behaviors of ranges that begin after a row's position
TWICE = ("duplicates", "overlaps")  # behaviors of keys in two ranges


class Shape(NamedTuple):
    """Heads of a group, columns of a key and of a value, and keys of a block; None: ranges of any length."""

    h: int
    Dk: int
    Dv: int
    block: int | None

    @property
    def name(self) -> str:
        return f"h{self.h}-{self.Dk}x{self.Dv}-{self.block or 'ranges'}"


class Problem(NamedTuple):
    """One call: q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv], and the other arguments, None for the defaults."""

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    q_pos: Tensor | None = None
    scale: float | None = None

    @property
    def do(self) -> Tensor:
        """Return a random gradient of o [B,S,G,h,Dv], the same on every device."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(*self.q.shape[:-1], self.v.shape[-1], generator=generator).to(self.q)


class Setting(NamedTuple):
    """The facts that all problems of a run share."""

    shape: Shape
    dtype: torch.dtype
    device: str

    @property
    def width(self) -> int:
        """Return the keys of a block."""
        return self.shape.block or SPAN

    def problem(self, ranges: Tensor, S_kv: int, kv_groups: int | None = None) -> Problem:
        """Return a problem of ranges [B,S,G,n,2] with random inputs, the same on every device."""
        (B, S, G), (h, Dk, Dv, block), generator = ranges.shape[:3], self.shape, torch.Generator().manual_seed(0)
        sizes = (B, S, G, h, Dk), (B, kv_groups or G, S_kv, Dk), (B, kv_groups or G, S_kv, Dv)
        q, k, v = (torch.randn(size, generator=generator).to(self.device, self.dtype) for size in sizes)
        return Problem(q, k, v, Selection(ranges.to(self.device), block))

    def blocks(self, B: int = 1, S: int | None = None, G: int = 1, kv_groups: int | None = None) -> Problem:
        """Return S rows (by default as many as keys) over 4 blocks, of which each row selects the first, its own and another."""
        S_kv = 4 * self.width
        scores = torch.rand(B, S or S_kv, G, 4, generator=torch.Generator().manual_seed(1))
        selection = Selection.from_scores(scores, 3, self.width, first=1, local=1, S_kv=S_kv)
        return self.problem(selection.ranges, S_kv, kv_groups)


# Problems


def edge_rows(t: int, end: int, w: int) -> dict[str, list[Row]]:
    """Return rows that are easily mistreated, by behavior: of a query at position t, over `end` keys, in blocks of w."""
    own = t // w * w
    return {
        "blocks": [[(0, w), (2 * w, 3 * w)], [(own, own + w)]],
        "nothing": [[]],
        "padding": [[(2 * w, 3 * w), (0, 0), (0, w), (w, 2 * w)], [(0, 0), (0, 0), (0, 0), (own, own + w)]],
        "duplicates": [[(0, w), (w, 2 * w), (0, w), (0, w)], [(own, own + w), (own, own + w)]],
        "outside": [[(-w, 0), (w, 2 * w)], [(end // w * w, end // w * w + w), (0, w)]],
        "future": [[(own, own + w), (own + w, own + 2 * w)], [(own + w, own + 2 * w)]],
    }


def span_rows(t: int, end: int) -> dict[str, list[Row]]:
    """Return rows of ranges of any length, as `edge_rows` does."""
    far = 2**63 - 1
    return {
        "ranges": [[(12, 14), (0, 2), (6, 9)], [(0, 4), (4, 8), (8, 9)], [(t, t + 1)], [(t + 1, t + 2), (0, 2)]],
        "far ranges": [
            *([(-far, 3), (5, 6)], [(-7, -4), (1, 3)], [(9, 4), (1, 3), (end, 0)]),
            *([(3, far)], [(-far, far)], [(end + 200, end + 300), (0, 1)]),
        ],
        "overlaps": [[(0, 9), (3, 5), (-4, 12)]],
    }


def edge_ranges(block: int | None, S: int, S_kv: int, behaviors: Iterable[str] | None = None, *, disjoint: bool = False) -> Tensor:
    """Return ranges [1,S,1,4,2] int64 of the last S of S_kv positions, in turn from the rows of behaviors.

    By default of all behaviors; of some, without blocks in the future where these are not what a behavior is about.
    disjoint: only rows without a key in two ranges.
    """
    rows: list[Row] = []
    for t in range(S_kv - S, S_kv):
        named = edge_rows(t, S_kv, block or SPAN) | ({} if block else span_rows(t, S_kv))
        some = [(name, row) for name, options in named.items() if behaviors is None or name in behaviors for row in options]
        seen = [row for name, row in some if behaviors is None or name in LATER or all(start <= t for start, _ in row)]
        options = [row for row in seen if not disjoint or not _overlaps(row)]
        chosen = options[len(rows) % len(options)]
        rows.append(chosen + [(0, 0)] * (MOST_RANGES - len(chosen)))
    return torch.tensor(rows)[None, :, None]


def _overlaps(row: Row) -> bool:
    filled = sorted(some for some in row if some[1] > some[0])
    return any(one[1] > other[0] for one, other in itertools.pairwise(filled))


def _edges(name: str, setting: Setting) -> Iterator[Problem]:
    """Yield rows of one behavior between others, over 4 blocks of keys, or 3.5 if some are outside."""
    S = 4 * setting.width - (setting.width // 2 if name == "outside" else 0)
    ranges = edge_ranges(setting.shape.block, S, S, ("blocks", name), disjoint=name not in TWICE)
    yield setting.problem(ranges if name == "far ranges" else ranges.int(), S)


def _spans(name: str, setting: Setting) -> Iterable[Problem]:
    return () if setting.shape.block else _edges(name, setting)


def _order(setting: Setting) -> Iterator[Problem]:
    problem = setting.blocks()
    ranges = problem.selection.ranges  # descending, empty ones last
    order = ranges[..., 1].argsort(-1, descending=True).unsqueeze(-1).expand_as(ranges)
    yield problem._replace(selection=Selection(ranges.gather(-2, order), setting.shape.block))


def _poison(setting: Setting) -> Iterator[Problem]:
    """Yield NaN in the queries of rows that select nothing, and in keys and values that no row selects."""
    w = setting.width
    problem = setting.problem(edge_ranges(setting.shape.block, 4 * w, 4 * w, ("nothing",)).int(), 4 * w)
    problem.selection.ranges[:, w:, :, 1] = torch.tensor([w, 2 * w])
    q, k, v = (x.clone() for x in problem[:3])
    q[:, :w] = torch.nan
    for x in (k, v):
        x[:, :, :w] = x[:, :, 2 * w :] = torch.nan
    yield problem._replace(q=q, k=k, v=v)


def _positions(setting: Setting) -> Iterator[Problem]:
    problem = setting.blocks()
    order = torch.randperm(problem.q.shape[1], generator=torch.Generator().manual_seed(2))
    yield problem._replace(q_pos=order.to(setting.device))


def _layouts(setting: Setting) -> Iterator[Problem]:
    problem = setting.blocks(B=2, G=2)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (problem.k, problem.v))
    yield problem._replace(k=k, v=v)
    wide = [torch.cat((x, x), -1)[..., : x.shape[-1]] for x in problem[:3]]
    yield problem._replace(q=wide[0], k=wide[1], v=wide[2])


def _int64(setting: Setting) -> Iterator[Problem]:
    problem = setting.blocks()
    yield problem._replace(selection=Selection(problem.selection.ranges.long(), setting.shape.block))


# Comparisons


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, scale: float | None = None, q_pos: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h] of dense masked attention in the inputs' own dtype: the baseline of errors.

    Shares no code with the oracle, so that each checks the other. Reads all keys: unselected NaN would spoil gradients.
    """
    if q.dim() == 4:
        o, lse = dense_attention(q.unsqueeze(1), k, v, ranges.unsqueeze(1), scale, q_pos)
        return o.squeeze(1), lse.squeeze(1)
    B, S = q.shape[:2]
    S_kv = k.shape[2]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in (k, v))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    key = torch.arange(S_kv, device=q.device)
    position = torch.arange(S_kv - S, S_kv, device=q.device) if q_pos is None else q_pos
    position = position.expand(B, S)[:, :, None, None]
    within = (key >= ranges[..., :1]) & (key < ranges[..., 1:])  # [B,S,G,n,S_kv]
    mask = (within.any(-2) & (key <= position)).unsqueeze(-2)  # [B,S,G,1,S_kv]
    filled = mask.any(-1, keepdim=True)
    scores = torch.einsum("bsghd,bgkd->bsghk", q * scale, k)
    scores = torch.where(mask, scores, torch.where(filled, -math.inf, 0.0).to(scores.dtype))
    p = torch.softmax(scores, -1) * filled
    lse = torch.where(filled.squeeze(-1), torch.logsumexp(scores.to(torch.promote_types(q.dtype, torch.float32)), -1), -math.inf)
    return torch.einsum("bsghk,bgkd->bsghd", p, v), lse


def unused_keys(q: Tensor, k: Tensor, ranges: Tensor, q_pos: Tensor | None = None) -> Tensor:
    """Return which keys [B,G,S_kv] no row reads; several groups of q may share those of k."""
    used = oracle_mask(ranges, k.shape[2], q.shape[1] if q.dim() == 5 else 1, q_pos).any(1)
    used = used.expand(-1, q.shape[-3], -1)  # of a selection of one group for all
    return ~used.reshape(len(used), k.shape[1], -1, used.shape[-1]).any(2).to(k.device)


def gradient_terms(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float | None) -> tuple[float, float, float]:
    """Return how large the terms are that cancel in dq, dk, dv.

    With one key ds = p (do.v - D) is zero, but only to the rounding of do.v.
    """
    q, k, v, do = (tensor.detach().abs().double() for tensor in (q, k, v, do))
    q, do = (tensor if tensor.dim() == 5 else tensor.unsqueeze(1) for tensor in (q, do))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[1], 1) for x in (k, v))
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else abs(scale)
    dp = torch.einsum("bsghd,bgkd->bsghk", do, v).max()
    score = scale * torch.einsum("bsghd,bgkd->bsghk", q, k).max()
    return float(scale * dp * k.max()), float(scale * dp * q.max()), float(score * do.max())


def error_of(got: Tensor, oracle: Tensor, baseline: Tensor, what: str = "result", terms: float = 0.0) -> tuple[float, str]:
    """Return the largest error, and in words what is wrong with a result, "" if nothing is.

    The error against the float64 oracle, largest and mean, may be twice the baseline's plus one rounding of the result.
    -inf (lse of empty rows) must be at the same places; NaN is never right. After flash-attention's tests.

    Args:
        got, oracle, baseline: the three results.
        what: their name.
        terms: the largest term of sums that cancel; one rounding of it, in the dtype of accumulation, is allowed too.
    """
    got, baseline, oracle = got.detach().cpu(), baseline.detach().cpu(), oracle.detach().cpu()
    if not got.shape == oracle.shape == baseline.shape:
        return math.inf, f"{what}: shapes {tuple(got.shape)}, {tuple(oracle.shape)}, {tuple(baseline.shape)}"
    eps = torch.finfo(got.dtype).eps
    floor = terms * torch.finfo(torch.promote_types(got.dtype, torch.float32)).eps
    empty = oracle == -math.inf
    if not torch.equal(got == -math.inf, empty):
        return math.inf, f"{what}: -inf at the wrong places"
    got, oracle, baseline = (torch.where(empty, 0.0, tensor.double()) for tensor in (got, oracle, baseline))
    if not bool(got.isfinite().all()):
        return math.inf, f"{what}: {int((~got.isfinite()).sum())} values are not finite"
    if got.numel() == 0:
        return 0.0, ""
    error, allowed, size = (got - oracle).abs(), (baseline - oracle).abs(), oracle.abs()
    for name, of in (("max", torch.max), ("mean", torch.mean)):
        limit = 2 * of(allowed) + eps * of(size) + floor
        if not of(error) <= limit:
            return float(error.max()), f"{what}: {name} error {of(error):.3e}, allowed {limit:.3e} (baseline {of(allowed):.3e})"
    return float(error.max()), ""


@contextlib.contextmanager
def new_memory_is_nan(strict: bool = False) -> Iterator[None]:
    """Let PyTorch fill new tensors with NaN, those of integers with their largest: results that no kernel wrote show.

    Unless strict, operations without a deterministic implementation still run.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what has no deterministic implementation, and NumPy on NaN in Triton's interpreter
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


Compared = tuple[float, str, tuple[str, ...]]  # the largest error, what is wrong in words, and the results compared


def run(attend: Callable[..., Any], problem: Problem, able: set[str]) -> dict[str, Tensor]:
    """Return o of a call, its lse and the gradients of o if `able` has them."""
    q, k, v = (x.detach().requires_grad_("gradients" in able) for x in problem[:3])
    options: dict[str, Any] = {name: x for name in ("q_pos", "scale") if (x := getattr(problem, name)) is not None}
    with new_memory_is_nan():
        if "lse" in able:
            results = attend(q, k, v, problem.selection, return_lse=True, **options)
        else:
            results = (attend(q, k, v, problem.selection, **options),)
        gradients = torch.autograd.grad(results[0], (q, k, v), problem.do) if "gradients" in able else ()
    names = (*RESULTS[: len(results)], *RESULTS[2 : 2 + len(gradients)])
    return {name: x.detach() for name, x in zip(names, (*results, *gradients), strict=True)}


def expected(problem: Problem, gradients: bool) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return by result the oracle's, the baseline's, and how large the terms are that cancel in it."""
    q, k, v, selection, q_pos, scale = problem
    clean = [x.nan_to_num().requires_grad_() for x in (q, k, v)]
    baseline: tuple[Tensor, ...] = dense_attention(clean[0], clean[1], clean[2], selection.ranges, scale, q_pos)
    exact: tuple[Tensor, ...] = oracle_forward(q, k, v, selection.ranges, scale, q_pos)
    terms: tuple[float, ...] = (0.0, 0.0)
    if gradients:
        exact += oracle_backward(q, k, v, selection.ranges, problem.do, None, scale, q_pos)
        baseline += torch.autograd.grad(baseline[0], clean, problem.do)
        terms += gradient_terms(clean[0], clean[1], clean[2], problem.do, scale)
    return dict(zip(RESULTS, zip(exact, baseline, terms, strict=True), strict=False))


def compare(attend: Callable[..., Any], problem: Problem, able: set[str]) -> Compared:
    """Compare a call with the oracle: o, and lse and gradients if `able` has them. Keys of no row must get zeros."""
    found, wanted = run(attend, problem, able), expected(problem, "gradients" in able)
    errors = [error_of(x, wanted[name][0], wanted[name][1], name, wanted[name][2]) for name, x in found.items()]
    unused = unused_keys(problem.q, problem.k, problem.selection.ranges, problem.q_pos)
    wrong = [words for _, words in errors if words]
    wrong += [f"{name}: not 0 at keys that no row selects" for name in ("dk", "dv") if name in found and bool(found[name][unused].any())]
    wrong += [f"{name}: {x.dtype}, not {wanted[name][1].dtype}" for name, x in found.items() if x.dtype != wanted[name][1].dtype]
    return max(error for error, _ in errors), "; ".join(wrong), tuple(found)


def rerun(attend: Callable[..., Any], problem: Problem, able: set[str]) -> Compared:
    """Compare ten calls with each other: they must be bit-equal."""
    first, *others = (run(attend, problem, able) for _ in range(10))
    errors = {name: max(float((x.double() - other[name].double()).abs().max()) for other in others) for name, x in first.items()}
    wrong = ", ".join(name for name, error in errors.items() if error != 0)
    return max(errors.values()), f"{wrong}: other bits in a rerun" if wrong else "", tuple(first)


# The report


class Behavior(NamedTuple):
    """One behavior: what an implementation must do, the problems that test it, and how results are compared."""

    what: str
    problems: Callable[[Setting], Iterable[Problem]]
    check: Callable[[Callable[..., Any], Problem, set[str]], Compared] = compare


def _usual(setting: Setting) -> list[Problem]:
    return [setting.blocks()]


# Each needs those before it that it compares: lse and gradients are compared everywhere once they hold.
BEHAVIORS = {
    "blocks": Behavior("the keys of the selected blocks up to the row's own position", _usual),
    "lse": Behavior("natural logarithm, float32", _usual),
    "gradients": Behavior("of q, k and v; zeros for keys that no row selects", _usual),
    "nothing": Behavior("rows that select nothing: o = 0, lse = -inf, gradients 0, no NaN", partial(_edges, "nothing")),
    "order": Behavior("blocks in any order", _order),
    "padding": Behavior("-1 (an empty range) in any position", partial(_edges, "padding")),
    "duplicates": Behavior("a block that is selected twice counts once", partial(_edges, "duplicates")),
    "outside": Behavior("blocks before the first key and after the last, a last block in part", partial(_edges, "outside")),
    "future": Behavior("blocks that begin after the row's position", partial(_edges, "future")),
    "ranges": Behavior("ranges of any length", partial(_spans, "ranges")),
    "far ranges": Behavior("inverted ranges, and int64 ends far outside", partial(_spans, "far ranges")),
    "overlaps": Behavior("a key in two ranges counts once", partial(_spans, "overlaps")),
    "batch": Behavior("several sequences, groups that select for themselves", lambda s: [s.blocks(B=2, G=2)]),
    "shared keys": Behavior("groups of q that share a group of k and v", lambda s: [s.blocks(G=4, kv_groups=2)]),
    "chunk": Behavior("fewer rows than keys: the last positions", lambda s: [s.blocks(S=s.width + 3)]),
    "one row": Behavior("decoding: one row of each sequence", lambda s: [s.blocks(B=3, S=1, G=2)]),
    "positions": Behavior("q_pos: rows at any positions", _positions),
    "scale": Behavior("any scale: 0, negative", lambda s: [s.blocks()._replace(scale=scale) for scale in (0.0, -0.3, 0.6)]),
    "int64": Behavior("selections in int64", _int64),
    "layouts": Behavior("k and v as views of [B,S_kv,G,D], rows of wider tensors", _layouts),
    "poison": Behavior("NaN in what no row reads changes nothing", _poison),
    "determinism": Behavior("ten calls are bit-equal", lambda s: [s.blocks(B=2, G=2)], rerun),
}


class Finding(NamedTuple):
    """The result for one behavior. `holds` is None if it was not claimed, or if no shape has problems for it."""

    behavior: str
    holds: bool | None
    error: float
    details: str


class Report(NamedTuple):
    """The findings of `check_implementation`, one a behavior. Printed, it is a table."""

    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        """Return True if everything that was claimed holds."""
        return all(finding.holds is not False for finding in self.findings)

    def __str__(self) -> str:
        words = {True: "holds", False: "does not hold", None: "not claimed"}
        lines = (f"{x.behavior:12} {words[x.holds]:14} {'' if x.holds is None else f'{x.error:.1e}':8} {x.details}" for x in self.findings)
        return "\n".join((f"{'behavior':12} {'':14} {'error':8} compared, or the first mismatch", *lines))


def check_implementation(
    attend: Callable[..., Any],
    *,
    claims: Iterable[str] = tuple(BEHAVIORS),
    shapes: Sequence[Shape] = (Shape(3, 16, 24, None), Shape(3, 16, 24, 16)),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: str = "cpu",
) -> Report:
    """Run the contract's behaviors on an implementation and report which of them hold.

    Args:
        attend: called as `selection_attention`: (q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv], selection), with
            `return_lse=True` if lse is claimed, and with `q_pos` and `scale` where a problem has them; returns o
            [B,S,G,h,Dv], or (o, lse). `selection.block_indices` are block indices [B,S,G,n], -1 for padding.
        claims: names of `BEHAVIORS`, by default all. Others are not run.
        shapes: heads, head dims and block sizes that are run.
        dtypes: that are run with each shape.
        device: where tensors are.

    Returns:
        A `Report`. An exception that `attend` raises is in its behavior's details.

    Raises:
        ArgumentError: a claim that does not name a behavior.
    """
    claimed, able, findings = set(claims), set[str](), list[Finding]()
    if unknown := claimed - set(BEHAVIORS):
        raise ArgumentError("claims", sorted(unknown), f"names among {', '.join(BEHAVIORS)}", "leave the others out")
    settings = [Setting(shape, dtype, device) for shape in shapes for dtype in dtypes]
    for name, behavior in BEHAVIORS.items():
        asked = able | ({name} & {"lse", "gradients"})
        compared = [one for x in settings if name in claimed for one in _checked(attend, behavior, x, asked)]
        wrong = [words for _, words, _ in compared if words]
        results = ", ".join(dict.fromkeys(x for *_, some in compared for x in some))
        details = behavior.what + (f" ({results}; calls: {len(compared)})" if compared else " (by no shape)" * (name in claimed))
        error = max((error for error, *_ in compared), default=0.0)
        findings.append(Finding(name, not wrong if compared else None, error, wrong[0] if wrong else details))
        able = asked if findings[-1].holds else able
    return Report(tuple(findings))


def _varied(problem: Problem) -> str:
    """Return in words the arguments in which problems of one behavior differ."""
    words = "" if problem.scale is None else f", scale {problem.scale}"
    words += "" if problem.q_pos is None else f", q_pos {problem.q_pos[:4].tolist()}..."
    return words + ("" if problem.k.is_contiguous() else f", k with strides {problem.k.stride()}")


def _checked(attend: Callable[..., Any], behavior: Behavior, setting: Setting, able: set[str]) -> Iterator[Compared]:
    """Yield the comparisons of a setting's problems; an exception counts as wrong."""
    for problem in behavior.problems(setting):
        where = f" ({setting.shape.name}, {str(setting.dtype).removeprefix('torch.')}{_varied(problem)})"
        try:
            error, wrong, results = behavior.check(attend, problem, able)
        except Exception as raised:  # an implementation may raise anything
            error, wrong, results = math.inf, f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}", ()
        yield error, wrong + where if wrong else "", results
