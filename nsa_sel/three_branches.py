"""The three branches of NSA's attention, forward without autograd, and the gradients of their gated sum.

Each runs as its public function does: the same decisions, fallbacks and events.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core import choose, packed, run, window
from nsa_sel.core.arguments import Bounds
from nsa_sel.core.attend import checked
from nsa_sel.core.call import Call, Rule
from nsa_sel.core.decide import Decided
from nsa_sel.core.decision import Decision
from nsa_sel.core.request import Request
from nsa_sel.core.warm import prepared
from nsa_sel.core.window import SlidingCall
from nsa_sel.gating import Gated
from nsa_sel.selection import Selection

COMPRESSED, SELECTED, WINDOW = BRANCHES = range(3)  # in the order of the gates


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
    blocks: Any = None  # [B,S,G,n], what the selected branch attends to; None: what the compressed branch chooses

    def of(self, unit: Unit) -> Inputs:
        """Views of a unit's part."""
        b, g = unit
        rows = {"q", "gates", "q_cmp", "blocks"}
        parts = (None if x is None else x[b, :, g] if name in rows else x[b, g] for name, x in self._asdict().items())
        return Inputs(*parts)

    def fields_of(self, c: int) -> tuple[int, int, int]:
        """Where q, k and v of branch c are."""
        own = c == COMPRESSED and self.q_cmp is not None
        return self._fields.index("q_cmp" if own else "q"), 1 + 2 * c, 2 + 2 * c

    def for_gradients(self, needs: Needs) -> Inputs:
        """Return the inputs that the gradients of those branches and of the gates read; None for the rest."""
        kept = {"gates", *(("q", "q_cmp") if any(needs) else ())}
        kept.update(name for c in BRANCHES if needs[c] for name in self._fields[1 + 2 * c : 3 + 2 * c])
        return Inputs(*(x if name in kept else None for name, x in self._asdict().items()))

    def branch(self, c: int) -> tuple[Any, Any, Any]:
        """Return q, k and v of branch c."""
        q, k, v = self.fields_of(c)
        return self[q], self[k], self[v]


Unit = tuple[slice, slice]  # sequences and groups
Needs = tuple[bool, bool, bool]  # whether a gradient of a branch's q, k or v is wanted


class Options(NamedTuple):
    """Checked options of `nsa_attention`."""

    window: int
    rule: Rule
    scale: float
    backend: str | None
    bounds: Bounds | None = None  # of a packed batch, where B = 1


# Of q, k, v, o and a Gated: dq, dk, dv, and delta if the kernels give it.
Gradients = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


class Pass(NamedTuple):
    """A branch's forward pass. The `gradients` closure captures only the selection, so it keeps no activations alive."""

    o: Tensor
    lse: Tensor | None
    gradients: Gradients
    copies: tuple[Tensor, Tensor] | None = None  # of k and v, which gradients take in their stead


def attend(part: Inputs, options: Options, needs: Needs) -> tuple[tuple[Pass, Pass, Pass], Selection]:
    """All branches, and the blocks that the selected one took."""
    first, selection = _compressed(part, options, needs[COMPRESSED])
    if part.blocks is not None:
        selection = _given(part, options)
    return (first, _selected(part, options, needs[SELECTED], selection), _window(part, options)), selection


def attend_again(c: int, part: Inputs, options: Options, needs: Needs) -> Pass:
    """Branch c alone, with the blocks that were chosen."""
    if c == COMPRESSED:
        return _compressed_again(part, options, needs[c])
    return _window(part, options) if c == WINDOW else _selected(part, options, needs[c], _given(part, options))


def _given(part: Inputs, options: Options) -> Selection:
    return Selection.from_blocks(part.blocks, options.rule.block_size, disjoint=True)


def _begin_compressed(part: Inputs, options: Options, needs: bool) -> Decided:
    rule, scale, S_kv = options.rule, options.scale, part.k_slc.shape[2]
    return choose.decide_choice(*part.branch(COMPRESSED), rule, S_kv, scale, None, needs, None, options.bounds)


def _compressed(part: Inputs, options: Options, needs: bool) -> tuple[Pass, Selection]:
    decided = _begin_compressed(part, options, needs)
    o, lse, ranges, decision = run.run_forward(decided)
    return _pass(options, decided, decision, o, lse), Selection.from_ranges(ranges, options.rule.block_size, disjoint=True)


def _compressed_again(part: Inputs, options: Options, needs: bool) -> Pass:
    decided = _begin_compressed(part, options, needs)
    o, lse, decision = choose.attend_again(decided)
    return _pass(options, decided, decision, o, lse)


def _pass(options: Options, decided: Decided, decision: Decision, o: Tensor, lse: Tensor) -> Pass:
    return Pass(o, lse, functools.partial(_compressed_gradients, options, decision, decided.request))


def _compressed_gradients(
    options: Options, decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor, o: Tensor, gated: Gated
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    call = choose.decided_choice(q, k, v, options.rule, options.scale, None, decision, request, options.bounds).call
    return run.gradients_and_delta(call, decision, o, gated.lse, gated.do, None)


def _selected(part: Inputs, options: Options, needs: bool, selection: Selection) -> Pass:
    q, k, v = part.branch(SELECTED)
    q_pos = where = None
    if options.bounds is not None:
        bounds = options.bounds._replace(most=None)  # max_seqlen bounds the choice alone
        batch = packed.arrange(q, k, v, selection, bounds, None, options.scale, needs, options.backend)
        k, v, selection, q_pos, where = batch
    decided = checked(q, k, v, selection, options.scale, q_pos, needs, options.backend)
    decided = prepared(decided, options.backend)
    o, lse, decision = run.run_forward(decided)
    return Pass(o, lse, functools.partial(_selected_gradients, decided.call.others(), decision, where), None if where is None else (k, v))


def _selected_gradients(
    others: tuple[Any, ...], decision: Decision, where: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, gated: Gated
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    dq, dk, dv, delta = run.gradients_and_delta(Call(q, k, v, *others), decision, o, gated.lse, gated.do, None)
    return (dq, dk, dv, delta) if where is None else (dq, dk.index_select(2, where), dv.index_select(2, where), delta)


def _window(part: Inputs, options: Options) -> Pass:
    o, lse = window.attend(SlidingCall(*part.branch(WINDOW), options.window, options.scale, options.bounds), False)
    return Pass(o, lse, functools.partial(_window_gradients, options))


def _window_gradients(
    options: Options, q: Tensor, k: Tensor, v: Tensor, o: Tensor, gated: Gated
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """By the kernels, or by autograd through another forward pass, which gives no delta."""
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None
    call = SlidingCall(q, k, v, options.window, options.scale, options.bounds)
    if gated.lse is not None:
        results = call.by_kernels("backward", o, gated.lse, gated.do, None)
        if results is not None:
            return results  # type: ignore[return-value]
    dq, dk, dv = call.chunk_gradients(False, gated.whole_do(), None)
    return dq, dk, dv, None
