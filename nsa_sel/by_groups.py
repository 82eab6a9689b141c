"""`nsa_attention` as one autograd function; a few KV groups at a time without gradients, or where the backward pass
recomputes.

Sequences and KV groups are independent of each other. A unit of some of them has temporaries of its own size alone, and
writes its part of the result and of the gradients. With recompute nothing is saved for backward but the inputs and the
chosen blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa_sel import gating, three_branches
from nsa_sel.compressed import compressed_attention
from nsa_sel.core import attend, transforms
from nsa_sel.core.call import device_info
from nsa_sel.core.decide import forced, use_backend, use_no_backend
from nsa_sel.settings.config import settings_for
from nsa_sel.three_branches import BRANCHES, COMPRESSED, SELECTED, WINDOW, Inputs, Needs, Options, Pass, Unit
from nsa_sel.window import sliding_window_attention

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
    sequences, groups = _even(B, max(1, fitting // G)), _even(G, fitting)
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
    records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if records and not recompute:
        o = _Saved.apply(options, *inputs)  # type: ignore[no-untyped-call]
        return o
    if not records:
        return _forward(inputs, options, (False, False, False))
    o = _Recomputed.apply(options, *inputs)  # type: ignore[no-untyped-call]
    return o


def _even(number: int, fitting: int) -> int:
    """Return the size of parts of at most `fitting`, as few and as even as possible."""
    return -(-number // -(-number // fitting)) if number else 1


def _composed(inputs: Inputs, options: Options) -> Tensor:
    rule, scale, S_kv = options.rule, options.scale, inputs.k_slc.shape[2]
    compressed, selection = compressed_attention(*inputs.branch(COMPRESSED), **rule._asdict(), scale=scale, S_kv=S_kv)
    given: Any = {"q_pos": None, "return_lse": False, "backend": options.backend}
    selected = attend.selection_attention(*inputs.branch(SELECTED), selection, scale=scale, **given)
    near = sliding_window_attention(*inputs.branch(WINDOW), options.window, scale=scale)
    return gating.gated_sum(compressed, selected, near, inputs.gates)


def _forward(inputs: Inputs, options: Options, needs: Needs, blocks: Tensor | None = None) -> Tensor:
    """Return o, unit by unit; blocks [B,S,G,n] is written, if it is given."""
    o = _empty_output(inputs)
    for b, g in units_of(inputs):
        _write_unit(inputs.of((b, g)), options, needs, o[b, :, g], None if blocks is None else blocks[b, :, g])
    return o


def _empty_output(inputs: Inputs) -> Tensor:
    o: Tensor = inputs.q.new_empty(*inputs.q.shape[:4], inputs.v_slc.shape[3])
    return o


def _write_unit(part: Inputs, options: Options, needs: Needs, o: Tensor, blocks: Tensor | None) -> None:
    """Write a unit's o and blocks; its temporaries end here."""
    passes, selection = three_branches.attend(part, options, needs)
    gating.write_sum([each.o for each in passes], part.gates, o)
    if blocks is not None:
        blocks.copy_(selection.block_indices)


class _Saved(torch.autograd.Function):
    """Saves the inputs, of branches without gradients none, and the output and lse of each branch."""

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Tensor | None) -> Tensor:
        inputs = Inputs(*tensors)
        needs = _needs(inputs, ctx.needs_input_grad[1:])
        passes, _ = three_branches.attend(inputs, options, needs)
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
        needs = _needs(inputs, wanted)
        found = Inputs(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) if y else None for x, y in zip(inputs, wanted, strict=True)))
        for b, g in units_of(inputs):
            part = inputs.of((b, g))

            def again(c: int, part: Inputs = part) -> Pass:
                with ctx.surroundings.again():
                    return three_branches.attend_again(c, part, ctx.options, needs)

            _unit_gradients(part, do[b, :, g], again, wanted, found.of((b, g)), IN_TURN)
        return None, *found


def _checked(do: Tensor) -> Tensor:
    """Return the gradient of o, as kernels take it; BackendError for what has none."""
    if torch.is_grad_enabled():
        transforms.refuse_second_derivative("nsa_attention")
    transforms.check_gradients(do, name="nsa_attention")
    do = do.resolve_neg()
    return do if do.stride(-1) == 1 else do.contiguous()


def _needs(inputs: Inputs, wanted: Sequence[bool]) -> Needs:
    """Which branches have a q, k or v whose gradient is wanted."""
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
    found: list[list[Tensor]] = [[] for _ in part]
    for branches in order:
        _add_branches(branches, part, do, run, wanted, to, dgates, found)
    gradients = Inputs(*(gating.add_up(parts) if parts else None for parts in found))
    return gradients._replace(gates=dgates if wanted[GATES] else None)


def _add_branches(
    branches: Sequence[int], part: Inputs, do: Tensor, run: Callable[[int], Pass], wanted: Sequence[bool], to: Inputs, dgates: Tensor,
    found: list[list[Tensor]],
) -> None:  # fmt: skip
    """Append what some branches add to each gradient. Their outputs end here; so does what is copied to `to`."""
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
                found[i].append(dx if found[i] or to[i] is None else to[i].copy_(dx))
    gating.write_dgates(do, o, part.gates, gated, deltas, dgates)


class Surroundings(NamedTuple):
    """The backend and autocast state of a forward pass, to run it again in the backward pass, maybe on another thread."""

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
