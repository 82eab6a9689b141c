"""A forced call, checked: the decision names the backend, results are within twice the baseline's error, and NaN stays where it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_sel import Selection, decisions, selection_attention
from nsa_sel.oracle import oracle_mask
from nsa_sel.testing import RESULTS, new_memory_is_nan
from tests.helpers.cases import assert_forward, assert_gradients, make_grads, unused_keys


def attend(
    backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse of `backend`, forced; numbers do not prove routing, so the recorded decision must name it too."""
    o, lse = selection_attention(q, k, v, selection, q_pos=q_pos, scale=scale, return_lse=True, backend=backend)
    decision = decisions()[-1]
    assert decision.forward == backend
    assert decision.backward == (backend if decision.request.needs_grad else None)
    return o, lse


def check_forward(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None) -> None:
    """Forward parity with the oracle."""
    got = attend(backend, q, k, v, selection, q_pos=q_pos)
    assert_forward(got, q, k, v, selection.ranges, q_pos=q_pos)


def check_both(
    backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None, with_lse: bool = True
) -> None:
    """Forward and backward parity with the oracle; unselected keys get exact zeros."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o, lse = attend(backend, q, k, v, selection, q_pos=q_pos)
    assert_forward((o, lse), q, k, v, selection.ranges, q_pos=q_pos)
    do, dlse = make_grads(q, v)
    dlse = torch.where(lse.detach() == float("-inf"), 0.0, dlse)  # the lse of an empty row is a constant
    outputs, grads = ((o, lse), (do, dlse)) if with_lse else ((o,), (do,))
    got = torch.autograd.grad(outputs, (q, k, v), grads)
    assert_gradients(got, q, k, v, selection.ranges, do, dlse if with_lse else None, q_pos=q_pos)


def check_poison(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, *, q_pos: Tensor | None = None) -> None:
    """NaN in every key and value that no row may read changes nothing; o and gradients stay finite and equal."""
    unused = unused_keys(q, k, selection.ranges, q_pos)
    assert bool(unused.any()), "the case must leave keys unselected"
    poison = torch.where(unused.unsqueeze(-1), float("nan"), 0.0).to(k.dtype)
    clean, poisoned = (results_of(backend, q, k + x, v + x, selection, q_pos) for x in (torch.zeros_like(poison), poison))
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def check_deterministic(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, reruns: int) -> None:
    """Reruns are bit-equal, forward and backward, with plans built anew."""
    runs = [results_of(backend, q, k, v, Selection(selection.ranges, selection.block_size)) for _ in range(reruns)]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(runs[0], run, strict=True))


def both_passes(work: Callable[..., tuple[Tensor, Tensor]], qkv: Iterable[Tensor], do: Tensor | None = None) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv of work(q, k, v) for a gradient of o alone, by default of ones."""
    inputs = [x.detach().requires_grad_() for x in qkv]
    o, lse = work(*inputs)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, inputs, torch.ones_like(o) if do is None else do)


def results_of(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, q_pos: Tensor | None = None) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv for a random gradient of o alone."""
    return both_passes(lambda *qkv: attend(backend, *qkv, selection, q_pos=q_pos), (q, k, v), make_grads(q, v)[0])


Run = Callable[..., tuple[Tensor, ...]]
POISONS = {"nan": float("nan"), "inf": float("inf"), "negative": float("-inf"), "huge": 1e38}  # huge: products overflow
EMPTY_PLACES = ("q", "do", "dlse", "keys", "all")
ALL_POISONS = {"nan": EMPTY_PLACES, **dict.fromkeys(("inf", "negative", "huge"), ("all",))}  # and where to put each


def through(backend: str, selection: Selection) -> Run:
    """A run of `backend`, forced, with the recorded decision asserted, and plans of its own."""

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with new_memory_is_nan():
            o, lse = attend(backend, *inputs, Selection(selection.ranges, selection.block_size))
            return o.detach(), lse.detach(), *torch.autograd.grad((o, lse), inputs, (do, dlse))

    return run


def rows_with_holes(B: int, S: int, G: int, S_kv: int, block: int, n: int, device: str = "cpu") -> tuple[Selection, int]:
    """Blocks, and the index of a row that alone selects the last block and shares the one before. The first two rows, every fourth and the
    last quarter but that row, as padding, select nothing; one block in the middle is not selected at all. S_kv >= n + 3 blocks, S >= 8."""
    blocks, rows = -(-S_kv // block), torch.arange(S)
    scores = torch.rand(B, S, G, blocks, generator=torch.Generator().manual_seed(3))
    scores[..., [blocks // 2, -2, -1]] = -1
    chosen = scores.topk(n, -1).indices.int()
    chosen[:, 2:4, :, 0] = blocks - 2
    chosen[:, (rows < 2) | (rows % 4 == 0) | (rows >= S - S // 4)] = -1
    chosen[:, S - 2, :, :2] = torch.tensor([blocks - 1, blocks - 2]).int()
    return Selection.from_blocks(chosen.to(device), block), S - 2


def selected(selection: Selection, q: Tensor, k: Tensor, q_pos: Tensor | None = None) -> Tensor:
    """[B,S,G,S_kv] bool on q's device: which keys every row selects."""
    return oracle_mask(selection.ranges.cpu(), k.shape[2], q.shape[1], q_pos).to(q.device)


def put(x: Tensor, where: Tensor, value: float) -> Tensor:
    """x with `value`, or the largest number of its dtype below it, where the mask of its leading dimensions says."""
    value = min(value, torch.finfo(x.dtype).max) if value < float("inf") else value
    mask = where.reshape(*where.shape, *[1] * (x.dim() - where.dim()))
    return torch.where(mask, torch.tensor(value, dtype=x.dtype, device=x.device), x)


def check_empty_rows(
    run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, poisons: Mapping[str, Sequence[str]] = ALL_POISONS
) -> None:  # fmt: skip
    """Rows that select nothing give o = 0, lse = -inf, dq = 0, and leave all else bit-equal, whatever they and keys of nobody hold."""
    empty, unused = ~mask.any(-1), ~mask.any(1)
    assert bool(empty.any())
    assert bool(unused.any())
    do, dlse = make_grads(q, v)
    dlse = put(dlse, empty, 0.0)
    clean = run(q, k, v, do, dlse)
    inputs = {"q": (q, empty), "k": (k, unused), "v": (v, unused), "do": (do, empty), "dlse": (dlse, empty)}
    for poison, place in ((poison, place) for poison, places in poisons.items() for place in places):
        at = {"keys": ("k", "v"), "all": inputs}.get(place, (place,))
        found = run(*(put(x, where, POISONS[poison]) if name in at else x for name, (x, where) in inputs.items()))
        o, lse, dq, dk, dv = found
        assert bool((lse[empty] == float("-inf")).all()), (poison, place)
        assert not any(bool(x.any()) for x in (o[empty], dq[empty], dk[unused], dv[unused])), (poison, place)
        for name, before, after in zip(RESULTS, clean, found, strict=True):
            assert not bool(before.isnan().any()), (poison, place, name)
            assert torch.equal(after, before), (poison, place, name)
    o, lse, dq, _, _ = run(q, k * float("nan"), v * float("nan"), do, dlse)  # of keys that others select
    assert int(torch.count_nonzero(o[empty])) == int(torch.count_nonzero(dq[empty])) == 0
    assert bool((lse[empty] == float("-inf")).all())


def check_one_row(
    run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, s: int, poisons: Sequence[str] = ("nan", "inf", "huge"), reach: int = 64
) -> None:
    """Row s, which selects something, may spoil its own o, lse and dq, and dk and dv of the tiles of `reach` keys in which it selects any:
    nothing else. A NaN in its q shows in all of its results."""
    do, dlse = make_grads(q, v)
    dlse = put(dlse, ~mask.any(-1), 0.0)
    row = torch.zeros_like(mask[..., 0])
    row[:, s] = True
    near = torch.nn.functional.max_pool1d(mask[:, s].float(), reach, ceil_mode=True).repeat_interleave(reach, -1)
    far = near[..., : mask.shape[-1]] == 0
    assert bool(mask[:, s].any(-1).all())
    assert bool((far & mask.any(1)).any())
    clean = run(q, k, v, do, dlse)
    tolerance = max(4 * torch.finfo(q.dtype).eps, 1e-5)  # a maximum that other rows follow may have been the poisoned row's
    for poison in poisons:
        bad_q, bad_do = put(q, row, POISONS[poison]), put(do, row, POISONS[poison])
        results = {"q": run(bad_q, k, v, do, dlse), "do": run(q, k, v, bad_do, dlse)}
        for place, found in results.items():
            for name, before, after in zip(RESULTS, clean, found, strict=True):
                others = far if name in ("dk", "dv") else ~row
                assert torch.allclose(after[others], before[others], rtol=tolerance, atol=tolerance), (poison, place, name)
        assert poison != "nan" or all(bool(x[row].isnan().all()) for x in results["q"][:3])


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it hold at once, and those of the largest; views of `given` hold none."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.held = {x.untyped_storage()._cdata: 1 for x in given}  # tensors of each storage
        self.bytes = self.most = self.largest = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.count(storage._cdata, storage.nbytes(), 1)
                weakref.finalize(x, self.count, storage._cdata, storage.nbytes(), -1)
        return made

    def count(self, storage: int, size: int, change: int) -> None:
        before = self.held.get(storage, 0)
        self.held[storage] = before + change
        self.bytes += size * ((self.held[storage] > 0) - (before > 0))
        self.most, self.largest = max(self.most, self.bytes), max(self.largest, size * (before == 0))
