"""NSA's attention for a few KV groups at a time, for `nsa_attention`: without gradients, and with a backward pass that recomputes.

Sequences and KV groups are independent of each other. A unit of some of them has temporaries of its own size alone, and writes its part
of the result and of the gradients. Nothing is saved for backward but the inputs and the chosen blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils.checkpoint import checkpoint

from nsa_sel.compressed import compressed_attention
from nsa_sel.core import choose, entry, gating, transforms
from nsa_sel.core.check_choose import check_choose
from nsa_sel.core.choose_call import Rule
from nsa_sel.core.decide import forced, use_backend, use_no_backend
from nsa_sel.core.facts import device_info
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.window import sliding_window_attention

COMPRESSED, SELECTED, WINDOW = range(3)  # in the order of the gates
PullBack = Callable[[Tensor], Sequence[Tensor | None]]  # do of a branch -> its dq, dk, dv


class Inputs(NamedTuple):
    """Tensors as of `nsa_attention`, checked, or those of a unit; or their gradients, None where none is wanted."""

    q: Any
    k_cmp: Any
    v_cmp: Any
    k_slc: Any
    v_slc: Any
    k_win: Any
    v_win: Any
    gates: Any
    q_cmp: Any  # None: q

    def of(self, unit: Unit) -> Inputs:
        """Views of a unit's part."""
        b, g = unit
        rows = {"q", "gates", "q_cmp"}
        parts = (None if x is None else x[b, :, g] if name in rows else x[b, g] for name, x in self._asdict().items())
        return Inputs(*parts)

    def branch(self, c: int) -> tuple[Any, Any, Any]:
        """q, k and v of branch c."""
        q = self.q_cmp if c == COMPRESSED and self.q_cmp is not None else self.q
        return q, *self[1 + 2 * c : 3 + 2 * c]


class Options(NamedTuple):
    """As of `nsa_attention`, checked."""

    window: int
    rule: Rule
    scale: float
    backend: str | None


Unit = tuple[slice, slice]  # sequences and groups


def takes(inputs: Inputs, recompute: bool) -> bool:
    """Whether a call goes this way: where that was asked for, and where it costs nothing but saves memory."""
    if recompute or needs_grad(inputs):
        return recompute
    return not transforms.traces(*(x for x in inputs if x is not None)) and len(units_of(inputs)) > 1


def units_of(inputs: Inputs) -> list[Unit]:
    """Units of about one size, for each of which three tensors as large as its rows' outputs or queries fit `workspace_bytes`, unless
    those of one group of one sequence do not: forward that is each branch's output; backward a branch's output, its gradient and dq."""
    q = inputs.q
    B, S, G, h, Dk = q.shape
    row_bytes = h * max(Dk, inputs.v_slc.shape[3]) * q.element_size()
    fitting = max(1, settings_for(device_info(q.device)).workspace_bytes // max(1, 3 * S * row_bytes))
    sequences, groups = _even(B, max(1, fitting // G)), _even(G, fitting)
    return [(slice(b, b + sequences), slice(g, g + groups)) for b in range(0, B, sequences) for g in range(0, G, groups)]


def attention(inputs: Inputs, options: Options) -> Tensor:
    """o [B,S,G,h,Dv] of `nsa_attention`, unit by unit; where autograd records it, its backward pass computes the branches again.

    Where torch.compile traces, PyTorch's own checkpoint does that, for all groups at once.
    """
    if is_compiling():
        o: Tensor = checkpoint(lambda *given: _at_once(Inputs(*given), options), *inputs, use_reentrant=False, preserve_rng_state=False)
        return o
    check(inputs, options)
    inputs = Inputs(*(x if x is None else x.resolve_neg() for x in inputs))
    if not needs_grad(inputs):
        return _forward(inputs, options)
    o = _Recomputed.apply(options, *inputs)  # type: ignore[no-untyped-call]
    return o


def needs_grad(inputs: Inputs) -> bool:
    """Whether autograd records the call."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def check(inputs: Inputs, options: Options) -> None:
    """What the branches check, for the whole tensors: ArgumentError, BackendError."""
    transforms.check_traced("nsa_attention", *inputs)
    check_choose(*inputs.branch(COMPRESSED), options.rule, options.scale, None, inputs.k_slc.shape[2], fake=False)


def _even(number: int, fitting: int) -> int:
    """The size of parts of at most `fitting`, as few and as even as possible."""
    return -(-number // -(-number // fitting)) if number else 1


def _forward(inputs: Inputs, options: Options, blocks: Tensor | None = None) -> Tensor:
    """o; blocks [B,S,G,n] is written, if it is given."""
    q = inputs.q
    o: Tensor = q.new_empty(*q.shape[:4], inputs.v_slc.shape[3])
    for b, g in units_of(inputs):
        _write_unit(inputs.of((b, g)), options, o[b, :, g], None if blocks is None else blocks[b, :, g])
    return o


def _write_unit(part: Inputs, options: Options, o: Tensor, blocks: Tensor | None) -> None:
    """Write a unit's o and blocks; its temporaries end here."""
    branches, selection = _branches(part, options)
    with torch.no_grad():
        gating.write_sum(branches, part.gates, o)
        if blocks is not None:
            blocks.copy_(selection.block_indices)


def _at_once(inputs: Inputs, options: Options) -> Tensor:
    """o of all groups."""
    branches, _ = _branches(inputs, options)
    return gating.gated_sum(*branches, inputs.gates)


def _branches(part: Inputs, options: Options) -> tuple[tuple[Tensor, Tensor, Tensor], Selection]:
    """The outputs of the branches, and the chosen blocks."""
    S_kv = part.k_slc.shape[2]
    compressed, selection = compressed_attention(*part.branch(COMPRESSED), **options.rule._asdict(), scale=options.scale, S_kv=S_kv)
    selected = _selected(*part.branch(SELECTED), selection, options)
    return (compressed, selected, _window(*part.branch(WINDOW), options)), selection


def _selected(q: Tensor, k: Tensor, v: Tensor, selection: Selection, options: Options) -> Tensor:
    scale, backend = options.scale, options.backend
    o: Tensor = entry.selection_attention(q, k, v, selection, scale=scale, q_pos=None, return_lse=False, backend=backend)
    return o


def _window(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    o: Tensor = sliding_window_attention(q, k, v, options.window, scale=options.scale)
    return o


class _Recomputed(torch.autograd.Function):
    """Saves the inputs and the blocks. The branches run in forward as they do in backward, with gradients, so that both take the same
    kernels."""

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Tensor | None) -> Tensor:
        inputs = Inputs(*tensors)
        blocks = torch.empty(*inputs.q.shape[:3], options.rule.n, dtype=torch.int32, device=inputs.q.device)
        ctx.save_for_backward(*inputs, blocks)
        ctx.options, ctx.surroundings = options, Surroundings.now(inputs.q.device.type)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_forget, _forget):
            return _forward(Inputs(*map(_leaf, inputs, ctx.needs_input_grad[1:])), options, blocks)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            transforms.refuse_second_derivative("nsa_attention")
        transforms.check_gradients(do, name="nsa_attention")
        *tensors, blocks = ctx.saved_tensors
        inputs = Inputs(*tensors)
        needed = zip(inputs, ctx.needs_input_grad[1:], strict=True)
        found = Inputs(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) if needs else None for x, needs in needed))
        for b, g in units_of(inputs):
            part = inputs.of((b, g))
            sums = (None if x is None else _Sum(to) for x, to in zip(part, found.of((b, g)), strict=True))
            _add_unit(part, blocks[b, :, g], do[b, :, g], ctx.options, ctx.surroundings, Inputs(*sums))
        return None, *found


class Surroundings(NamedTuple):
    """Where a forward pass ran, for another one in the backward pass, which may be in another thread."""

    backend: str | None  # of `use_backend`
    device_type: str
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Surroundings:
        return cls(forced(), device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with (
            use_no_backend() if self.backend is None else use_backend(self.backend),
            torch.autocast(self.device_type, self.dtype, self.autocast),
        ):
            yield


class _Sum:
    """A unit's part of one gradient, to which branches add in turn; None if it is not wanted."""

    def __init__(self, to: Tensor | None) -> None:
        self.to, self.begun = to, False

    def add(self, x: Tensor | None) -> None:
        if self.to is None or x is None:
            return
        if self.begun:
            self.to.add_(x)
        else:
            self.to.copy_(x)
        self.begun = True

    def room(self, like: Tensor) -> Tensor:
        """Memory for the gradient of a branch's output `like`: that of dq, as long as nothing is in it."""
        columns = like.shape[-1]
        if self.to is None or self.begun or columns > self.to.shape[-1]:
            return torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self.to[..., :columns]


def _add_unit(part: Inputs, blocks: Tensor, do: Tensor, options: Options, surroundings: Surroundings, sums: Inputs) -> None:
    """The gradients of a unit, one branch after the other.

    Autograd adds the selected branch's dq to the window's, and then the compressed branch's: of the first two any order gives the same.
    """
    for c in (SELECTED, WINDOW, COMPRESSED):
        _add_branch(c, part, blocks, do, options, surroundings, sums)


def _add_branch(c: int, part: Inputs, blocks: Tensor, do: Tensor, options: Options, surroundings: Surroundings, sums: Inputs) -> None:
    """The gradients of one branch. Its output, the gradient of that, and its dq are the largest tensors, and all of them end here."""
    targets: tuple[_Sum, _Sum, _Sum] = sums.branch(c)
    wanted = [target.to is not None for target in targets]
    if not any(wanted) and sums.gates.to is None:
        return
    with surroundings.again():
        o, pull_back = _branch_again(c, part, blocks, options, wanted)
    room = targets[0].room(o)
    dgates = torch.empty_like(part.gates) if sums.gates.to is None else sums.gates.to
    gating.write_branch_gradient(do, o, part.gates, c, room, dgates)
    if any(wanted):
        for target, x in zip(targets, pull_back(room), strict=True):
            target.add(x)


def _branch_again(c: int, part: Inputs, blocks: Tensor, options: Options, wanted: list[bool]) -> tuple[Tensor, PullBack]:
    """A branch's output, and its gradients."""
    tensors = part.branch(c)
    if c == COMPRESSED:
        return _compressed_again(*tensors, part.k_slc.shape[2], options, any(wanted))
    with torch.enable_grad():
        q, k, v = leaves = [_leaf(*each) for each in zip(tensors, wanted, strict=True)]
        if c == WINDOW:
            o = _window(q, k, v, options)
        else:
            o = _selected(q, k, v, Selection.from_blocks(blocks, options.rule.block_size, disjoint=True), options)

    def pull_back(do: Tensor) -> list[Tensor | None]:
        found = iter(torch.autograd.grad(o, [x for x in leaves if x.requires_grad], do))
        return [next(found) if x.requires_grad else None for x in leaves]

    return o.detach(), pull_back


def _compressed_again(
    q: Tensor, k: Tensor, v: Tensor, S_kv: int, options: Options, needs: bool
) -> tuple[Tensor, PullBack]:  # fmt: skip
    """Without choosing again."""
    decided = choose.begin(q, k, v, options.rule, S_kv, options.scale, None, needs, None)
    o, lse, decision = choose.attend_again(decided)
    return o, lambda do: choose.gradients(decided.call, decision, o, lse, do, None)


def _forget(_: Any) -> Any:
    """What the branches' graphs of the forward pass save: no backward pass goes through them, and a user's hooks, such as those that move
    saved tensors to the host, need not see it."""


def _leaf(x: Tensor | None, requires_grad: bool) -> Any:
    """A leaf of a graph of its own."""
    return None if x is None else x.detach().requires_grad_(requires_grad)
