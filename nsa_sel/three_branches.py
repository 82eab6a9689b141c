"""`nsa_attention` as one autograd function: the three branches forward without autograd, and the gradients of their gated
sum.

Each branch runs as its public function does: the same decisions, fallbacks and events. Sequences and KV groups are
independent of each other. Without gradients, and where the backward pass recomputes, a few KV groups run at a time: a
unit of them has temporaries of its own size alone, and writes its part of the result and of the gradients. With
recompute nothing is saved for backward but the inputs and the chosen blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_sel import gating
from nsa_sel.choosing import compressed_attention
from nsa_sel.core import choose, packed, run, transforms
from nsa_sel.core import window as sliding
from nsa_sel.core.arguments import Bounds
from nsa_sel.core.attend import checked, selection_attention
from nsa_sel.core.call import Call, Rule, device_info
from nsa_sel.core.decide import forced_name, forcing
from nsa_sel.core.warm import prepared
from nsa_sel.core.window import SlidingCall
from nsa_sel.gating import Gated
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from nsa_sel.window import sliding_window_attention

COMPRESSED, SELECTED, WINDOW = BRANCHES = range(3)  # in the order of the gates


class Inputs(NamedTuple):
    """Tensors as of `nsa_attention`, checked, or those of a unit; or their gradients, None where none is wanted.

    `fields_of` counts the fields: torch.compile of torch 2.8 cannot trace a look at their names.
    """

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
        """Return the field indices of branch c's q, k and v."""
        own = c == COMPRESSED and self.q_cmp is not None
        return 8 if own else 0, 1 + 2 * c, 2 + 2 * c

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


# (q, k, v, o, Gated) -> dq, dk, dv, and delta if the kernels compute it.
Gradients = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


class Pass(NamedTuple):
    """A branch's forward pass. The `gradients` closure captures only the selection, so it keeps no activations alive."""

    o: Tensor
    lse: Tensor | None
    gradients: Gradients
    copies: tuple[Tensor, Tensor] | None = None  # of k and v, which gradients use instead


def run_branches(part: Inputs, options: Options, needs: Needs) -> tuple[tuple[Pass, Pass, Pass], Selection]:
    """Run all branches; return the blocks that the selected one took, too."""
    compressed, selection = _compressed(part, options, needs[COMPRESSED])
    if part.blocks is not None:
        selection = Selection.from_blocks(part.blocks, options.rule.block_size, disjoint=True)
    return (compressed, _selected(part, options, needs[SELECTED], selection), _window(part, options)), selection


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


GATES = Inputs._fields.index("gates")
TOGETHER = ((SELECTED, WINDOW, COMPRESSED),)
IN_TURN = ((SELECTED,), (WINDOW,), (COMPRESSED,))


def units_of(inputs: Inputs) -> list[Unit]:
    """Units of about one size, for each of which three tensors as large as its rows' outputs or queries fit
    `workspace_bytes`, unless those of one group of one sequence do not: forward that is each branch's output; backward
    an output and dq of two branches."""
    q = inputs.q
    B, S, G, h, Dk = q.shape
    row_bytes = h * max(Dk, inputs.v_slc.shape[3]) * q.element_size()
    fitting = max(1, settings_for(device_info(q.device)).workspace_bytes // max(1, 3 * S * row_bytes))
    # As few parts as possible, of as even sizes as possible.
    sequences, groups = (-(-number // -(-number // most)) if number else 1 for number, most in ((B, max(1, fitting // G)), (G, fitting)))
    return [(slice(b, b + sequences), slice(g, g + groups)) for b in range(0, B, sequences) for g in range(0, G, groups)]


def attention(inputs: Inputs, options: Options, recompute: bool = False) -> Tensor:
    """Return o [B,S,G,h,Dv] of `nsa_attention`. Without gradients it goes unit by unit.

    Where operations are traced it is composed of the public parts, and PyTorch's own checkpoint recomputes, all groups
    at once.
    """
    tensors = [x for x in inputs if x is not None]
    plain = transforms.plain(*tensors)
    if not plain and not torch.compiler.is_compiling():
        transforms.check_traced("nsa_attention", *tensors)
    if not plain and transforms.traces(*tensors):
        if not recompute:
            return _composed(inputs, options)
        o: Tensor = checkpoint(lambda *given: _composed(Inputs(*given), options), *inputs, use_reentrant=False, preserve_rng_state=False)
        return o
    inputs = Inputs(*(x if x is None else x.resolve_neg() for x in inputs))
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return _forward(inputs, options, (False, False, False))
    return (_Recomputed if recompute else _Saved).apply(options, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def _composed(inputs: Inputs, options: Options) -> Tensor:
    rule, scale, S_kv = options.rule, options.scale, inputs.k_slc.shape[2]
    compressed, selection = compressed_attention(*inputs.branch(COMPRESSED), **rule.options(), scale=scale, S_kv=S_kv)
    given: Any = {"q_pos": None, "return_lse": False, "backend": options.backend}
    selected = selection_attention(*inputs.branch(SELECTED), selection, scale=scale, **given)
    near = sliding_window_attention(*inputs.branch(WINDOW), options.window, scale=scale)
    return gating.gated_sum(compressed, selected, near, inputs.gates)


def _forward(inputs: Inputs, options: Options, needs: Needs, blocks: Tensor | None = None) -> Tensor:
    """Return o, unit by unit; blocks [B,S,G,n] is written, if it is given."""
    o = _empty_output(inputs)
    for b, g in units_of(inputs):
        part = inputs.of((b, g))
        passes, selection = run_branches(part, options, needs)
        gating.write_sum([each.o for each in passes], part.gates, o[b, :, g])
        if blocks is not None:
            blocks[b, :, g].copy_(selection.block_indices)
        del passes, selection  # before the next unit allocates its own
    return o


def _empty_output(inputs: Inputs) -> Tensor:
    return inputs.q.new_empty(*inputs.q.shape[:4], inputs.v_slc.shape[3])  # type: ignore[no-any-return]


class _Saved(torch.autograd.Function):
    """Saves the inputs, of branches without gradients none, and the output and lse of each branch."""

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Tensor | None) -> Tensor:
        inputs = Inputs(*tensors)
        needs = _needs(inputs, ctx.needs_input_grad[1:])
        passes, _ = run_branches(inputs, options, needs)
        o = _empty_output(inputs)
        gating.write_sum([each.o for each in passes], inputs.gates, o)
        if (copies := passes[SELECTED].copies) is not None:
            inputs = inputs._replace(k_slc=copies[0], v_slc=copies[1])
        ctx.gradients = [each.gradients for each in passes]
        bounds = transforms.versioned(None if options.bounds is None else options.bounds.tensor)
        ctx.save_for_backward(*inputs.for_gradients(needs), *(each.o for each in passes), *(each.lse for each in passes), *bounds)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, count = ctx.saved_tensors, len(Inputs._fields)
        inputs, passes = Inputs(*saved[:count]), [*map(Pass, saved[count : count + 3], saved[count + 3 :], ctx.gradients)]
        new = Inputs(*(None for _ in inputs))
        return None, *_unit_gradients(inputs, _checked(do), passes.__getitem__, ctx.needs_input_grad[1:], new, TOGETHER)


class _Recomputed(torch.autograd.Function):
    """Saves the inputs and the blocks. The branches run in forward as they do in backward, with gradients, so that both
    take the same kernels."""

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Tensor | None) -> Tensor:
        inputs = Inputs(*tensors)
        blocks = torch.empty(*inputs.q.shape[:3], options.rule.n, dtype=torch.int32, device=inputs.q.device)
        ctx.save_for_backward(*inputs._replace(blocks=blocks))
        ctx.options, ctx.surroundings = options, Surroundings.now(inputs.q.device.type)
        return _forward(inputs, options, _needs(inputs, ctx.needs_input_grad[1:]), blocks)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        do, inputs, wanted = _checked(do), Inputs(*ctx.saved_tensors), ctx.needs_input_grad[1:]
        needs, rule = _needs(inputs, wanted), ctx.options.rule
        dx = Inputs(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) if y else None for x, y in zip(inputs, wanted, strict=True)))
        for b, g in units_of(inputs):
            part = inputs.of((b, g))

            def again(c: int, part: Inputs = part) -> Pass:
                with ctx.surroundings.again():
                    if c == COMPRESSED:
                        return _compressed(part, ctx.options, needs[c], again=True)[0]
                    if c == WINDOW:
                        return _window(part, ctx.options)
                    return _selected(part, ctx.options, needs[c], Selection.from_blocks(part.blocks, rule.block_size, disjoint=True))

            _unit_gradients(part, do[b, :, g], again, wanted, dx.of((b, g)), IN_TURN)
        return None, *dx


def _checked(do: Tensor) -> Tensor:
    """Return the gradient of o, as kernels take it; BackendError for what has none."""
    if torch.is_grad_enabled():
        transforms.refuse_second_derivative("nsa_attention")
    transforms.check_gradients(do, name="nsa_attention")
    do = do.resolve_neg()
    return do if do.stride(-1) == 1 else do.contiguous()


def _needs(inputs: Inputs, wanted: Sequence[bool]) -> Needs:
    """Return the branches that have a q, k or v whose gradient is wanted."""
    first, second, third = (any(wanted[i] for i in inputs.fields_of(c)) for c in BRANCHES)
    return first, second, third


def _unit_gradients(
    part: Inputs, do: Tensor, run: Callable[[int], Pass], wanted: Sequence[bool], to: Inputs, order: Sequence[Sequence[int]]
) -> Inputs:
    """Return the gradients of a unit, as far as they are wanted.

    Args:
        part: inputs.
        do: [B,S,G,h,Dv].
        run: the forward pass of a branch.
        wanted: of each input, whether its gradient is.
        to: where they are written; None: new tensors.
        order: branches, and which of them are in memory at once.
    """
    dgates = torch.empty_like(part.gates) if to.gates is None else to.gates
    sums: list[list[Tensor]] = [[] for _ in part]
    for branches in order:
        _add_branches(branches, part, do, run, wanted, to, dgates, sums)
    gradients = Inputs(*(gating.add_up(parts) if parts else None for parts in sums))
    return gradients._replace(gates=dgates if wanted[GATES] else None)


def _add_branches(
    branches: Sequence[int], part: Inputs, do: Tensor, run: Callable[[int], Pass], wanted: Sequence[bool], to: Inputs, dgates: Tensor,
    sums: list[list[Tensor]],
) -> None:  # fmt: skip
    """Append the share of some branches to each gradient. Their outputs are freed on return; so is what is copied to `to`."""
    needs = _needs(part, wanted)
    passes = [run(c) if c in branches and (needs[c] or wanted[GATES]) else None for c in BRANCHES]
    o, lse = [None if each is None else each.o for each in passes], [None if each is None else each.lse for each in passes]
    gated, deltas = gating.backward(do, o, part.gates, lse, dgates), list[Tensor | None]([None] * 3)
    for c in branches:
        each = passes[c]
        if each is None or not needs[c]:
            continue
        dq, dk, dv, deltas[c] = each.gradients(*part.branch(c), each.o, gated[c])
        for i, dx in zip(part.fields_of(c), (dq, dk, dv), strict=True):
            if wanted[i]:
                sums[i].append(dx if sums[i] or to[i] is None else to[i].copy_(dx))
    gating.write_dgates(do, o, part.gates, gated, deltas, dgates)


class Surroundings(NamedTuple):
    """The backend and autocast state of a forward pass, to run it again in the backward pass, maybe on another thread."""

    backend: str | None  # of `use_backend`
    device_type: str
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Surroundings:
        return cls(forced_name.get(), device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        with forcing(self.backend), torch.autocast(self.device_type, self.dtype, self.autocast):
            yield
