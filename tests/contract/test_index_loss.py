"""The contract of `indexer_loss`, by every backend on every device: values and gradients against the float64 oracle."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nsa_sel import Selection, decisions, indexer_loss, selection_attention, use_backend
from nsa_sel.backends import loss_torch
from nsa_sel.core import index_loss
from nsa_sel.core.call import IndexLossCall
from nsa_sel.core.decide import forget_decisions
from nsa_sel.core.decision import Override
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.oracle import IndexLoss, oracle_forward, oracle_indexer_loss, oracle_mask
from nsa_sel.policies import rules
from nsa_sel.policies.default import POLICY
from tests.contract.lanes import Lane, lanes, parameters
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.gpus import captured, one_at_a_time, replayed

LANES = lanes("cpu", "interpreter", "cuda", kind="index_loss")
# Largest error relative to the largest value: of a loss, and of a gradient. Triton passes factors of logits as float32.
ERRORS = {torch.float64: (1e-7, 1e-7), torch.float32: (2e-5, 2e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (1e-2, 2e-2)}


class Shape(NamedTuple):
    B: int = 1
    S: int = 40
    S_kv: int = 40
    G: int = 2
    h: int = 3
    Dk: int = 16
    Di: int = 24
    n: int = 2
    block: int | None = 16  # None: ranges; 0: all visible keys
    shared: bool = True  # one index key for all groups
    given: bool = False  # q_pos


SMALL = {
    "blocks": Shape(B=2, S_kv=60),
    "ranges": Shape(B=2, S=20, S_kv=50, n=3, block=None, shared=False),
    "small-blocks": Shape(S=30, n=5, block=4),
    "odd-blocks": Shape(S=30, S_kv=50, n=2, block=24),
    "one-block": Shape(S=20, S_kv=64, n=1, block=32, h=1),
    "all-blocks": Shape(S=33, S_kv=33, n=3, block=16, h=16, G=1),
    "all-keys": Shape(B=2, S=30, S_kv=45, block=0, shared=False),
    "positions": Shape(B=2, S=17, S_kv=50, given=True),
    "all-keys-positions": Shape(S=9, S_kv=40, block=0, given=True, h=2),
    "other-head-dims": Shape(S=20, S_kv=20, Dk=192, Di=16, h=2, G=1),
    "wide-index": Shape(S=20, S_kv=20, Dk=16, Di=192, h=5, G=1),
    "one-row": Shape(S=1, S_kv=33),
}
LARGE = {
    "m3": Shape(S=700, S_kv=1000, G=2, h=16, Dk=128, Di=128, n=4, block=128),
    "m3-all-keys": Shape(S=300, S_kv=300, G=2, h=16, Dk=128, Di=128, block=0),
    "blocks-of-64": Shape(B=2, S=300, S_kv=300, h=4, Dk=64, Di=64, n=3, block=64, shared=False),
    "blocks-of-256": Shape(S=600, S_kv=900, h=12, Dk=128, Di=64, n=2, block=256, given=True),
    "small-blocks-of-256": Shape(S=300, S_kv=300, G=1, h=12, Dk=256, Di=128, n=20, block=4),
    "h64-192": Shape(S=200, S_kv=300, G=1, h=64, Dk=192, Di=128, n=2, block=64),
    "h1-of-ranges": Shape(S=300, S_kv=500, h=1, Dk=64, Di=128, n=3, block=None),
}


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    lse: Tensor
    index_q: Tensor
    index_k: Tensor
    selection: Selection | None
    q_pos: Tensor | None

    def options(self) -> dict[str, Any]:
        return {"scale": 0.3, "index_scale": -0.4, "q_pos": self.q_pos}

    def oracle(self, weights: Tensor | None = None) -> IndexLoss:
        ranges = None if self.selection is None else self.selection.ranges
        return oracle_indexer_loss(*self[:5], ranges, weights, 0.3, -0.4, None if self.q_pos is None else self.q_pos.cpu())


def inputs_of(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    """Random inputs: duplicates, padding, and blocks and ranges beyond the row and the sequence among the selected ones."""
    B, S, S_kv, G, h, Dk, Di, n, block, shared, given = shape
    generator = torch.Generator().manual_seed(seed)
    q, k, iq, ik = (
        torch.randn(*sizes, generator=generator).to(dtype)
        for sizes in ((B, S, G, h, Dk), (B, G, S_kv, Dk), (B, S, G, Di), (B, S_kv, Di) if shared else (B, G, S_kv, Di))
    )
    selection = None
    if block:
        blocks = torch.randint(-1, S_kv // block + 2, (B, S, G, n), generator=generator)
        if n * block >= S_kv:
            blocks = torch.arange(n).expand_as(blocks)
        selection = Selection.from_blocks(blocks.int(), block)
    elif block is None:
        start = torch.randint(-5, S_kv, (B, S, G, n), generator=generator)
        selection = Selection.from_ranges(torch.stack((start, start + torch.randint(-2, 20, start.shape, generator=generator)), -1))
    q_pos = torch.randint(0, S_kv, (B, S), generator=generator) if given else None
    ranges = torch.tensor([0, S_kv]).expand(B, S, G, 1, 2) if selection is None else selection.ranges
    lse = oracle_forward(q, k, k, ranges, 0.3, q_pos)[1].to(torch.promote_types(dtype, torch.float32))
    moved = [x.to(device) for x in (q, k, lse, iq, ik)]
    return Inputs(*moved, None if selection is None else selection.to(device), None if q_pos is None else q_pos.to(device))


def results(lane: Lane, of: Inputs, weights: Tensor | None = None, **options: Any) -> IndexLoss:
    """Loss of every row, and gradients: of the sum, which the forward pass computes, or of weighted rows."""
    iq, ik = (x.detach().requires_grad_() for x in (of.index_q, of.index_k))
    with new_memory_is_nan():
        run = {**of.options(), "backend": lane.name, **options}
        rows = indexer_loss(of.q, of.k, of.lse, iq, ik, of.selection, reduction="none", **run)
        assert decisions()[-1].forward == lane.name
        if weights is not None:
            loss = (rows * weights).sum()
        else:
            loss = indexer_loss(of.q, of.k, of.lse, iq, ik, of.selection, reduction="sum", **run)
        return IndexLoss(rows.detach(), *torch.autograd.grad(loss, (iq, ik)))


def assert_near(found: IndexLoss, exact: IndexLoss, dtype: torch.dtype) -> None:
    loss, gradient = ERRORS[dtype]
    for name, x, y, error in zip(found._fields, found, exact, (loss, gradient, gradient), strict=True):
        assert x.shape == y.shape
        worst = float((x.double().cpu() - y).abs().max()) / max(float(y.abs().max()), 1e-3)
        assert worst <= error, f"{name}: {worst}"


def each(whats: Any) -> Any:
    return pytest.mark.parametrize(("lane", "what"), parameters([(lane, what) for lane in LANES for what in whats(lane)]))


def of_all(*whats: Any) -> Any:
    return each(lambda lane: whats)


def shape_of(name: str) -> Shape:
    return (SMALL | LARGE)[name]


@each(lambda lane: [*SMALL, *(LARGE if lane.device == "cuda" else ())])
def test_index_loss_shapes(lane: Lane, what: str) -> None:
    """Values and gradients of sums, and of weighted rows."""
    of = inputs_of(shape_of(what), lane.dtype, lane.place)
    assert_near(results(lane, of), of.oracle(), lane.dtype)
    weights = torch.randn(of.lse.shape[:-1], generator=torch.Generator().manual_seed(1)).to(of.lse)
    assert_near(results(lane, of, weights), of.oracle(weights), lane.dtype)


@of_all("blocks", "ranges", "small-blocks")
def test_index_loss_with_one_selection_for_all_groups(lane: Lane, what: str) -> None:
    of = inputs_of(SMALL[what], lane.dtype, lane.place)
    of = of._replace(lse=of.lse.nan_to_num(neginf=0.0))  # any: it is that of the other selection
    assert of.selection is not None
    one, block = of.selection.ranges[:, :, :1].contiguous(), of.selection.block_size
    every = Selection(one.expand(-1, -1, of.q.shape[2], -1, -1).contiguous(), block)
    shared, expanded = results(lane, of._replace(selection=Selection(one, block))), results(lane, of._replace(selection=every))
    assert all(map(torch.equal, shared, expanded))


@each(lambda lane: [dtype for dtype in lane.dtypes if dtype != lane.dtype])
def test_index_loss_dtypes(lane: Lane, what: torch.dtype) -> None:
    for name in ("blocks", "all-keys"):
        of = inputs_of(SMALL[name], what, lane.place)
        assert_near(results(lane, of), of.oracle(), what)


@of_all("mean", "sum")
def test_index_loss_reduces_rows(lane: Lane, what: str) -> None:
    """A float16 gradient does not vanish by the factor of the mean before the loss is scaled."""
    dtype = torch.float16
    of = inputs_of(SMALL["blocks"], dtype, lane.place)
    exact, count = of.oracle(), of.lse[..., 0].numel() if what == "mean" else 1
    iq, ik = of.index_q.clone().requires_grad_(), of.index_k.clone().requires_grad_()
    loss = indexer_loss(*of[:3], iq, ik, of.selection, reduction=what, backend=lane.name, **of.options())  # type: ignore[arg-type]
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach().cpu().double(), exact.loss.sum() / count, rtol=1e-3, atol=0)
    scaled = torch.autograd.grad(loss * 1024, (iq, ik))
    assert_near(IndexLoss(exact.loss, *scaled), IndexLoss(exact.loss, exact.dq * 1024 / count, exact.dk * 1024 / count), dtype)


@of_all("blocks", "ranges", "small-blocks", "all-keys", "positions")
def test_index_loss_reads_nothing_that_no_row_sees(lane: Lane, what: str) -> None:
    """NaN in keys that no row sees, and in rows without keys, changes no bit."""
    of = inputs_of(SMALL[what], lane.dtype, lane.place)
    weights = torch.ones_like(of.lse[..., 0])
    clean, weighted = results(lane, of), results(lane, of, weights)
    ranges = torch.tensor([0, of.k.shape[2]]).expand(*weights.shape, 1, 2) if of.selection is None else of.selection.ranges
    seen = oracle_mask(ranges.cpu(), of.k.shape[2], of.q.shape[1], None if of.q_pos is None else of.q_pos.cpu()).to(lane.place)
    rows, keys = ~seen.any(-1), ~seen.any(1)  # [B,S,G] and [B,G,S_kv]: without keys, and that no row sees
    q, lse, iq = (x.masked_fill(rows.view(*rows.shape, *[1] * (x.dim() - 3)), torch.nan) for x in (of.q, of.lse, of.index_q))
    k, index_keys = of.k.masked_fill(keys.unsqueeze(-1), torch.nan), keys.all(1) if of.index_k.dim() == 3 else keys
    ik = of.index_k.masked_fill(index_keys.unsqueeze(-1), torch.nan)
    other = of._replace(q=q, k=k, lse=lse, index_q=iq, index_k=ik)
    assert all(map(torch.equal, clean, results(lane, other)))
    assert all(map(torch.equal, weighted, results(lane, other, weights)))


@of_all("blocks", "all-keys", "ranges")
def test_index_loss_reruns_are_bit_equal(lane: Lane, what: str) -> None:
    of = inputs_of(LARGE["m3"] if lane.device == "cuda" and what == "blocks" else SMALL[what], lane.dtype, lane.place)
    first = results(lane, of)
    for _ in range(50 if lane.device == "cuda" else 2):
        assert all(map(torch.equal, first, results(lane, of)))


@of_all("blocks", "all-keys")
def test_index_loss_in_parts(lane: Lane, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows at once, which other units, slices and sections compute, give the same loss, and gradients but for the order of sums."""
    of = inputs_of(SMALL[what]._replace(B=1, S=36, S_kv=40), lane.dtype, lane.place)
    whole, make = results(lane, of), IndexLossCall
    if lane.name == "loss-triton":
        from nsa_sel.backends import loss_triton
        from nsa_sel.backends._triton import index_loss_dense

        monkeypatch.setattr(loss_triton, "LEAST_ROWS", 16)
        monkeypatch.setattr(loss_triton, "room", lambda call: 1 << 12)
        monkeypatch.setattr(index_loss_dense, "CHUNK", 16)
    few = lambda *given: make(*given[:9], replace(given[9], workspace_bytes=1 << 10), *given[10:])  # noqa: E731
    monkeypatch.setattr(index_loss, "IndexLossCall", few)
    found = results(lane, of)
    torch.testing.assert_close(found.loss, whole.loss, rtol=1e-5, atol=1e-6)
    near = {"rtol": 2e-2, "atol": 2e-2} if lane.device == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found[1:], whole[1:], **near)


@each(lambda lane: ["m3", "m3-all-keys"] if lane.device == "cuda" else [])
def test_index_loss_stays_within_the_workspace(lane: Lane, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries beyond the results take at most runtime.workspace_bytes, and what 1,024 rows or one pair need."""
    of, make, bound = inputs_of(LARGE[what]._replace(S=2048, S_kv=2048), lane.dtype, lane.place), IndexLossCall, 16 << 20
    made: list[IndexLossCall] = []

    def small(*given: Any) -> IndexLossCall:
        made.append(make(*given[:9], replace(given[9], workspace_bytes=bound), *given[10:]))
        return made[-1]

    monkeypatch.setattr(index_loss, "IndexLossCall", small)
    results(lane, of)
    module = index_loss.registry.load_loss(lane.name)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = module.forward(made[-1], True)
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert len(kept) == 3
    assert extra <= 2 * bound


@of_all("blocks", "all-keys")
def test_index_loss_of_equal_logits_is_the_entropy_that_is_left(lane: Lane, what: str) -> None:
    """Ties: index keys of 0 give a uniform pi; equal distributions a loss of 0."""
    of = inputs_of(SMALL[what], lane.dtype, lane.place)
    of = of._replace(index_k=torch.zeros_like(of.index_k))
    assert_near(results(lane, of), of.oracle(), lane.dtype)
    one = inputs_of(SMALL[what]._replace(h=1, Di=16, shared=False), lane.dtype, lane.place)
    found = results(lane, one._replace(index_q=one.q.squeeze(3), index_k=one.k), index_scale=0.3)
    assert float(found.loss.abs().max()) < ERRORS[lane.dtype][0]


MIXED = (5, 0, 1, 18, 8)


@of_all("blocks", "aligned", "ranges", "all-keys")
def test_index_loss_of_a_packed_batch_is_that_of_each_sequence(lane: Lane, what: str) -> None:
    """Lengths of 0 and 1, and padding after the last sequence, which holds NaN."""
    lengths = (32, 16, 0, 20) if what == "aligned" else MIXED
    T, cu = sum(lengths) + 3, torch.tensor([0, *lengths]).cumsum(0)
    shape = Shape(S=T, S_kv=T, block={"ranges": None, "all-keys": 0}.get(what, 16), shared=what != "ranges")
    of = inputs_of(shape, lane.dtype, lane.place)
    iq, ik = of.index_q[0].detach(), (of.index_k[0] if shape.shared else of.index_k[0].transpose(0, 1)).detach()
    expected = IndexLoss(torch.zeros(T, 2, dtype=torch.float64), torch.zeros(iq.shape).double(), torch.zeros(ik.shape).double())
    lse = of.lse.clone()
    for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        at, all_rows = slice(begin, end), slice(None)
        own_k = of.k[:, :, at]
        own = torch.tensor([0, end - begin]).expand(1, end - begin, 2, 1, 2) if of.selection is None else of.selection.ranges[:, at].cpu()
        own_lse = oracle_forward(of.q[:, at], own_k, own_k, own, 0.3)[1]
        lse[:, at] = own_lse.to(lse)
        part = oracle_indexer_loss(of.q[:, at], own_k, own_lse, of.index_q[:, at], of.index_k[..., at, all_rows], own, None, 0.3, -0.4)
        expected.loss[at], expected.dq[at] = part.loss[0], part.dq[0]
        expected.dk[at] = part.dk[0] if shape.shared else part.dk[0].transpose(0, 1)
    q, k, lse = of.q[0].clone(), of.k[0].transpose(0, 1).clone(), lse[0]
    for x in (q, k, lse, iq, ik):
        x[cu[-1] :] = torch.nan
    iq, ik = iq.requires_grad_(), ik.requires_grad_()
    for bounds in (cu.to(lane.place), cu.tolist()):
        options = {"cu_seqlens": bounds, "scale": 0.3, "index_scale": -0.4, "backend": lane.name}
        rows = indexer_loss(q, k, lse, iq, ik, of.selection, reduction="none", **options)  # type: ignore[arg-type]
        loss = indexer_loss(q, k, lse, iq, ik, of.selection, reduction="sum", **options)  # type: ignore[arg-type]
        assert_near(IndexLoss(rows.detach(), *torch.autograd.grad(loss, (iq, ik))), expected, lane.dtype)


@of_all("blocks", "all-keys")
def test_index_loss_graphs_autocast_and_strides(lane: Lane, what: str) -> None:
    """A replay gives the bits of a call, the caller's autocast and strides change none."""
    of = inputs_of(SMALL[what], lane.dtype, lane.place)
    module, made = index_loss.registry.load_loss(lane.name), []
    monkey = lambda *given: made.append(IndexLossCall(*given)) or made[-1]  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_loss, "IndexLossCall", monkey)
        expected = results(lane, of)
    call = made[-1]
    graph = captured(lambda: module.forward(call, True), lane.place)
    loss, dq, dk = replayed(*graph)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(dq, expected.dq)
    assert torch.equal(dk.to(dq.dtype).view_as(expected.dk), expected.dk)
    with torch.autocast(lane.place, torch.float16):
        assert torch.equal(module.forward(call, True)[0], expected.loss)
    q = of.q.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4)
    k = of.k.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(map(torch.equal, expected, results(lane, of._replace(q=q, k=k))))


@each(lambda lane: [131_072] if lane.device == "cuda" and not lane.backend.slow else [])
def test_index_loss_beyond_32_bits(lane: Lane, what: int) -> None:
    """q has more than 2^31 elements: the last group's loss and gradients are those of a call of it alone."""
    G, h, one = 4, 34, slice(3, 4)
    with one_at_a_time():
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        q, k = torch.randn(1, what, G, h, 128, **options), torch.randn(1, G, what, 128, **options)
        assert q.numel() > 1 << 31
        iq, ik = torch.randn(1, what, G, 64, **options).requires_grad_(), torch.randn(1, G, what, 64, **options).requires_grad_()
        selection = Selection.from_blocks((torch.arange(what, device="cuda") // 128)[None, :, None, None].expand(-1, -1, G, -1), 128)
        lse = selection_attention(q, k, k, selection, return_lse=True)[1]
        last = Selection(selection.ranges[:, :, one].contiguous(), 128)
        loss = indexer_loss(q, k, lse, iq, ik, selection, reduction="none", backend=lane.name)
        alone = indexer_loss(q[:, :, one], k[:, one], lse[:, :, one], iq[:, :, one], ik[:, one], last, reduction="none", backend=lane.name)
        assert torch.equal(loss[:, :, one], alone)
        found, own = (torch.autograd.grad(x[:, :, -1].sum(), (iq, ik)) for x in (loss, alone))
        assert torch.equal(found[0][:, :, one], own[0][:, :, one])
        torch.testing.assert_close(found[1][:, one], own[1][:, one], rtol=2e-2, atol=2e-2)  # other pieces


def call_of(of: Inputs, options: dict[str, Any], iq: Tensor, ik: Tensor) -> Tensor:
    return indexer_loss(*of[:3], iq, ik, of.selection, **options)


@each(lambda lane: [torch.float64] if torch.float64 in lane.dtypes and lane.device != "cuda" else [])
def test_index_loss_gradients_are_those_of_finite_differences(lane: Lane, what: torch.dtype) -> None:
    of = inputs_of(Shape(S=5, S_kv=9, G=1, h=2, Dk=8, Di=8, block=4), what, lane.place)
    inputs = of.index_q.clone().requires_grad_(), of.index_k.clone().requires_grad_()
    for reduction in ("mean", "none"):
        function = partial(call_of, of, {**of.options(), "reduction": reduction, "backend": lane.name})
        assert torch.autograd.gradcheck(function, inputs, fast_mode=lane.slow)


@of_all(None)
def test_index_loss_without_rows_keys_or_ranges_is_zero(lane: Lane, what: None) -> None:
    for shape in (Shape(S=0), Shape(S=0, S_kv=0, block=0), Shape(n=0)):
        B, S, S_kv, G, h, Dk, Di, n, block, *_ = shape
        q, k = torch.randn(B, S, G, h, Dk, device=lane.place), torch.randn(B, G, S_kv, Dk, device=lane.place)
        iq, ik = torch.randn(B, S, G, Di, device=lane.place), torch.randn(B, S_kv, Di, device=lane.place)
        inputs = [x.to(lane.dtype) for x in (q, k)]
        iq, ik = (x.to(lane.dtype).requires_grad_() for x in (iq, ik))
        selection = Selection.from_blocks(torch.zeros(B, S, G, n, dtype=torch.int32, device=lane.place), block) if block else None
        for reduction in ("mean", "none"):
            loss = indexer_loss(
                *inputs, torch.full((B, S, G, h), -torch.inf, device=lane.place), iq, ik, selection, reduction=reduction, backend=lane.name
            )
            assert float(loss.detach().sum()) == 0.0
            dq, dk = torch.autograd.grad(loss.sum(), (iq, ik))
            assert not dq.any()
            assert not dk.any()


def test_index_loss_is_an_op() -> None:
    """opcheck, and torch.compile in one graph, with both reductions."""
    of = inputs_of(SMALL["blocks"], torch.float32, "cpu")
    iq, ik = of.index_q.clone().requires_grad_(), of.index_k.clone().requires_grad_()
    assert of.selection is not None
    for uniform in (True, False):
        facts = (None, None, of.selection.ranges, 16, None, False, 0.3, -0.4, None, True, uniform)
        torch.library.opcheck(torch.ops.nsa_sel.indexer_loss, (*of[:3], iq, ik.unsqueeze(1), *facts))
    exact = of.oracle()
    for reduction in ("sum", "none"):
        function = torch.compile(
            partial(indexer_loss, reduction=reduction, scale=0.3, index_scale=-0.4), fullgraph=True, backend="aot_eager"
        )
        loss = function(*of[:3], iq, ik, of.selection.ranges)
        found = torch.autograd.grad(loss.sum(), (iq, ik))
        assert_near(IndexLoss(loss.detach() if reduction == "none" else exact.loss, *found), exact, torch.float32)


@pytest.mark.parametrize("block", [16, None, 0])
def test_index_loss_compiles_for_packed_batches(block: int | None) -> None:
    of, cu = inputs_of(Shape(S=40, block=block), torch.float32, "cpu"), torch.tensor([0, 18, 18, 37])
    given = of.q[0], of.k[0].transpose(0, 1), of.lse[0].zero_(), of.index_q[0].requires_grad_(), of.index_k[0]
    ranges = None if of.selection is None else of.selection.ranges
    function = torch.compile(partial(indexer_loss, cu_seqlens=cu), fullgraph=True, backend="aot_eager")
    whole, compiled = (loss(*given, ranges) for loss in (partial(indexer_loss, cu_seqlens=cu), function))
    torch.testing.assert_close(compiled, whole)
    torch.testing.assert_close(*(torch.autograd.grad(x, given[3]) for x in (compiled, whole)))


def test_index_loss_takes_what_attention_returns() -> None:
    """With the log-sum-exp of selection_attention P sums to 1, so that the loss is not negative."""
    of = inputs_of(SMALL["blocks"], torch.float32, "cpu")
    assert of.selection is not None
    _, lse = selection_attention(of.q, of.k, of.k, of.selection, return_lse=True)
    rows = indexer_loss(of.q, of.k, lse, of.index_q, of.index_k, of.selection, reduction="none")
    assert float(rows.min()) > -1e-5
    with torch.autocast("cpu", torch.bfloat16):
        assert float((indexer_loss(of.q, of.k, lse, of.index_q, of.index_k, of.selection, reduction="none") - rows).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("reduction", "max"),
        ("q", torch.randn(1, 2, 3, 16)),
        ("lse", torch.randn(1, 40, 2, 4)),
        ("lse", torch.randn(2, 40, 2, 3, dtype=torch.float64)),
        ("index_q", torch.randn(2, 40, 1, 24)),
        ("index_q", torch.randn(2, 40, 2, 24, dtype=torch.float64)),
        ("index_k", torch.randn(2, 59, 24)),
        ("index_k", torch.randn(2, 60, 16)),
        ("index_k", torch.randn(2, 3, 60, 24)),
        ("index_scale", float("nan")),
        ("q_pos", torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_index_loss_names_a_bad_argument(argument: str, value: Any) -> None:
    of = inputs_of(SMALL["blocks"], torch.float32, "cpu")
    given = {**of._asdict(), **of.options(), argument: value}
    with pytest.raises(ArgumentError) as error:
        indexer_loss(**given)
    assert error.value.argument == argument or argument in ("index_q", "index_scale")


def test_index_loss_has_no_second_derivative() -> None:
    of = inputs_of(SMALL["blocks"], torch.float32, "cpu")
    iq = of.index_q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(indexer_loss(*of[:3], iq, of.index_k, of.selection), iq, create_graph=True)


def test_index_loss_reference_stays_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    of = inputs_of(SMALL["all-keys"], torch.float32, "cpu")
    largest = []
    real = loss_torch._logit_gradients
    monkeypatch.setattr(loss_torch, "SCRATCH", 1 << 14)
    monkeypatch.setattr(loss_torch, "_logit_gradients", lambda *given: largest.append(given[1][1]) or real(*given))
    indexer_loss(*of[:5], of.selection)
    assert {at.stop - at.start for at in largest} == {(1 << 14) // (4 * 2 * 3 * 45 * 4)}


def loss_of(of: Inputs, **options: Any) -> Tensor:
    """Compute the loss with gradients, so that the backward pass runs, too."""
    iq = of.index_q.clone().requires_grad_()
    loss = indexer_loss(*of[:3], iq, of.index_k, of.selection, reduction="none", **options)
    loss.sum().backward()
    return loss.detach()


def test_index_loss_backends_are_forced_as_those_of_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    of = inputs_of(SMALL["blocks"], torch.float32, "cpu")
    loss_of(of)
    decision = decisions()[-1]
    assert (decision.forward, decision.backward, decision.override) == ("loss-torch", "loss-torch", None)
    assert not decision.replay()
    with use_backend("loss-torch"):
        loss_of(of)
    assert decisions()[-1].override == Override("loss-torch", "use_backend")
    with use_backend("choose-torch"):  # of another kind
        loss_of(of)
    assert decisions()[-1].override is None
    monkeypatch.setenv("NSA_SEL_BACKEND", "loss-torch")
    loss_of(of)
    assert decisions()[-1].override == Override("loss-torch", "NSA_SEL_BACKEND")
    with pytest.raises(BackendError, match="is unknown to indexer_loss"):
        loss_of(of, backend="sdpa-packed")


def test_index_loss_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that fails forward is replaced in the backward pass, too."""
    of = inputs_of(SMALL["blocks"], torch.float32, "cpu")
    whole = loss_of(of)
    failing = mock.Mock(side_effect=RuntimeError("no such kernel"))
    monkeypatch.setattr(index_loss.registry.load_loss("loss-triton"), "forward", failing)
    with pytest.raises(RuntimeError, match="no such kernel"):
        loss_of(of, backend="loss-triton")
    checks = tuple(check for check in POLICY.checks if check is not rules.no_triton_on_cpu)
    monkeypatch.setattr("nsa_sel.policies.default.POLICY", POLICY._replace(checks=checks))
    monkeypatch.setattr(index_loss.registry, "broken", {})
    forget_decisions()
    with pytest.warns(RuntimeWarning, match="loss-triton failed, loss-torch runs calls of this class from now on"):
        assert torch.equal(loss_of(of), whole)
    forget_decisions()
