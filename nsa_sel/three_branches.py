"""The three branches of NSA's attention, forward without autograd, and the gradients of their gated sum.

Each runs as its public function does: the same decisions, fallbacks and events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_sel.core import choose, packed, run
from nsa_sel.core import window as sliding
from nsa_sel.core.arguments import Bounds
from nsa_sel.core.attend import checked
from nsa_sel.core.call import Call, Rule
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
    """Run all branches; return the blocks that the selected one took, too."""
    compressed, selection = _compressed(part, options, needs[COMPRESSED])
    if part.blocks is not None:
        selection = Selection.from_blocks(part.blocks, options.rule.block_size, disjoint=True)
    return (compressed, _selected(part, options, needs[SELECTED], selection), _window(part, options)), selection


def attend_again(c: int, part: Inputs, options: Options, needs: Needs) -> Pass:
    """Run branch c alone, with the blocks that were chosen."""
    if c == COMPRESSED:
        return _compressed(part, options, needs[c], again=True)[0]
    if c == WINDOW:
        return _window(part, options)
    return _selected(part, options, needs[c], Selection.from_blocks(part.blocks, options.rule.block_size, disjoint=True))


def _compressed(part: Inputs, options: Options, needs: bool, again: bool = False) -> tuple[Pass, Any]:
    """Run the compressed branch; return the selection, too, or None when it runs again: blocks are then not chosen
    where the backend can leave that out."""
    rule, scale, bounds, S_kv = options.rule, options.scale, options.bounds, part.k_slc.shape[2]
    decided = choose.decide_choice(*part.branch(COMPRESSED), rule, S_kv, scale, None, needs, None, bounds)
    request = decided.request
    o, lse, *ranges, decision = run.run_forward(decided, choose.attention_of if again else run.forward_of)

    def gradients(q: Tensor, k: Tensor, v: Tensor, o: Tensor, gated: Gated) -> Any:
        call = choose.decided_choice(q, k, v, rule, scale, None, decision, request, bounds).call
        return run.gradients_and_delta(call, decision, o, gated.lse, gated.do, None)

    return Pass(o, lse, gradients), None if again else Selection.from_ranges(ranges[0], rule.block_size, disjoint=True)


def _selected(part: Inputs, options: Options, needs: bool, selection: Selection) -> Pass:
    q, k, v = part.branch(SELECTED)
    q_pos = where = None
    if options.bounds is not None:
        bounds = options.bounds._replace(most=None)  # max_seqlen bounds the choice alone
        k, v, selection, q_pos, where = packed.arrange(q, k, v, selection, bounds, None, options.scale, needs, options.backend)
    decided = prepared(checked(q, k, v, selection, options.scale, q_pos, needs, options.backend), options.backend)
    others = decided.call.others()
    o, lse, decision = run.run_forward(decided)

    def gradients(q: Tensor, k: Tensor, v: Tensor, o: Tensor, gated: Gated) -> Any:
        dq, dk, dv, delta = run.gradients_and_delta(Call(q, k, v, *others), decision, o, gated.lse, gated.do, None)
        return dq, *((dk, dv) if where is None else (dk.index_select(2, where), dv.index_select(2, where))), delta

    return Pass(o, lse, gradients, None if where is None else (k, v))


def _window(part: Inputs, options: Options) -> Pass:
    window, scale, bounds = options.window, options.scale, options.bounds
    o, lse = sliding.attend(SlidingCall(*part.branch(WINDOW), window, scale, bounds), False)

    def gradients(q: Tensor, k: Tensor, v: Tensor, o: Tensor, gated: Gated) -> Any:
        """By the kernels, or by autograd through another forward pass, which gives no delta."""
        if q.numel() == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None
        call = SlidingCall(q, k, v, window, scale, bounds)
        results = None if gated.lse is None else call.by_kernels("backward", o, gated.lse, gated.do, None)
        return results or (*call.chunk_gradients(False, gated.whole_do(), None), None)

    return Pass(o, lse, gradients)
