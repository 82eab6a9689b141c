"""The contract of `indexer_loss`, by every backend on every device: values and gradients against the float64 oracle."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
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
SCALES: Any = {"scale": 0.3, "index_scale": -0.3}
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
    index: str = "random"  # equal: h = 1, and both distributions are the same; flat: all index logits are 0


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
    **{f"flat-{block}": Shape(h=1, Di=16, block=block, shared=False, index="flat") for block in (16, 0)},
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

    def ranges(self) -> Tensor:
        """Return the ranges [B,S,G,n,2] on the CPU: of all keys without a selection."""
        B, S, G, *_ = self.q.shape
        every = torch.tensor([0, self.k.shape[2]]).expand(B, S, G, 1, 2)
        return every if self.selection is None else self.selection.ranges.cpu()

    def oracle(self, weights: Tensor | None = None) -> IndexLoss:
        return oracle_indexer_loss(*self[:5], self.ranges(), weights, *SCALES.values(), None if self.q_pos is None else self.q_pos.cpu())


def inputs_of(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    """Random inputs: duplicates, padding, and blocks and ranges beyond the row and the sequence among the selected ones."""
    B, S, S_kv, G, h, Dk, Di, n, block, shared, given, index = shape
    generator = torch.Generator().manual_seed(0)
    q, k, iq, ik = (
        torch.randn(*sizes, generator=generator).to(dtype)
        for sizes in ((B, S, G, h, Dk), (B, G, S_kv, Dk), (B, S, G, Di), (B, S_kv, Di) if shared else (B, G, S_kv, Di))
    )
    if index != "random":
        iq, ik = q.squeeze(3), -k if index == "equal" else torch.zeros_like(k)
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
    of = Inputs(q, k, q.new_zeros(B, S, G, h), iq, ik, selection, q_pos)
    lse = oracle_forward(q, k, k, of.ranges(), 0.3, q_pos)[1].to(torch.promote_types(dtype, torch.float32))
    return Inputs(*(None if x is None else x.to(device) for x in of._replace(lse=lse)))  # type: ignore[arg-type]


def results(lane: Lane, of: Inputs, weights: Tensor | None = None) -> IndexLoss:
    """Loss of every row, and gradients: of the sum, which the forward pass computes, or of weighted rows."""
    iq, ik = (x.detach().requires_grad_() for x in (of.index_q, of.index_k))
    call = partial(indexer_loss, of.q, of.k, of.lse, iq, ik, of.selection, q_pos=of.q_pos, backend=lane.name, **SCALES)
    with new_memory_is_nan():
        with torch.set_grad_enabled(weights is not None):
            rows = call(reduction="none")
        assert decisions()[-1].forward == lane.name
        loss = call(reduction="sum") if weights is None else (rows * weights).sum()
        return IndexLoss(rows.detach(), *torch.autograd.grad(loss, (iq, ik)))


def assert_near(found: IndexLoss, exact: IndexLoss, dtype: torch.dtype) -> None:
    loss, gradient = ERRORS[dtype]
    for name, x, y, error in zip(found._fields, found, exact, (loss, gradient, gradient), strict=True):
        assert x.shape == y.shape
        worst = float((x.double().cpu() - y).abs().max()) / max(float(y.abs().max()), 1e-3)
        assert worst <= error, f"{name}: {worst}"


def recorded(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[IndexLossCall]:
    """Return a list to which calls are appended as they are made, with other settings."""
    calls: list[IndexLossCall] = []

    def make(*given: Any) -> IndexLossCall:
        calls.append(IndexLossCall(*given[:9], replace(given[9], **settings), *given[10:]))
        return calls[-1]

    monkeypatch.setattr(index_loss, "IndexLossCall", make)
    return calls


def each(*whats: Any, on_gpus: Any = ()) -> Any:
    """Parametrize a test by lane and `what`: `whats`, or what a function of the lane returns, and more on GPUs."""
    of = whats[0] if whats and callable(whats[0]) else lambda lane: whats
    cells = [(lane, what) for lane in LANES for what in (*of(lane), *(on_gpus if lane.device == "cuda" else ()))]
    return pytest.mark.parametrize(("lane", "what"), parameters(cells))


@each(
    lambda lane: [*SMALL, *((name, dtype) for dtype in lane.dtypes if dtype != lane.dtype for name in ("blocks", "all-keys"))],
    on_gpus=LARGE,
)
def test_index_loss_is_that_of_the_oracle(lane: Lane, what: Any) -> None:
    """Values and gradients of sums, and of weighted rows."""
    name, dtype = (what, lane.dtype) if isinstance(what, str) else what
    of = inputs_of((SMALL | LARGE)[name], dtype, lane.place)
    assert_near(results(lane, of), of.oracle(), dtype)
    weights = torch.randn(of.lse.shape[:-1], generator=torch.Generator().manual_seed(1)).to(of.lse)
    assert_near(results(lane, of, weights), of.oracle(weights), dtype)


@each(16, 0)
def test_index_loss_of_equal_distributions_is_zero(lane: Lane, what: int) -> None:
    found = results(lane, inputs_of(Shape(h=1, Di=16, block=what, shared=False, index="equal"), lane.dtype, lane.place))
    assert float(found.loss.abs().max()) < ERRORS[lane.dtype][0]


def one_selection(of: Inputs) -> tuple[Inputs, Inputs]:
    """Return inputs with one selection for all groups, and the same selection for each group."""
    assert of.selection is not None
    of = of._replace(lse=of.lse.nan_to_num(neginf=0.0))  # any: it is that of the other selection
    one, block, G = of.selection.ranges[:, :, :1].contiguous(), of.selection.block_size, of.q.shape[2]
    return of._replace(selection=Selection(one, block)), of._replace(selection=Selection(one.expand(-1, -1, G, -1, -1).contiguous(), block))


def poisoned(of: Inputs) -> tuple[Inputs, Inputs]:
    """Return inputs, and these with NaN in keys that no row sees and in rows without keys."""
    visible = oracle_mask(of.ranges(), of.k.shape[2], of.q.shape[1], None if of.q_pos is None else of.q_pos.cpu()).to(of.q.device)
    rows, keys = ~visible.any(-1), ~visible.any(1)  # [B,S,G] and [B,G,S_kv]
    q, lse, iq = (x.masked_fill(rows.view(*rows.shape, *[1] * (x.dim() - 3)), torch.nan) for x in (of.q, of.lse, of.index_q))
    ik = of.index_k.masked_fill((keys.all(1) if of.index_k.dim() == 3 else keys).unsqueeze(-1), torch.nan)
    return of, of._replace(q=q, k=of.k.masked_fill(keys.unsqueeze(-1), torch.nan), lse=lse, index_q=iq, index_k=ik)


def strided(of: Inputs) -> tuple[Inputs, Inputs]:
    q = of.q.permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4)
    return of, of._replace(q=q, k=of.k.transpose(1, 2).contiguous().transpose(1, 2))


def again(of: Inputs) -> tuple[Inputs, Inputs]:
    return of, of


SAME = {f"{pair.__name__}-{name}": (pair, name) for pair, names in (
    (one_selection, ("blocks", "ranges", "small-blocks")), (poisoned, ("blocks", "ranges", "small-blocks", "all-keys", "positions")),
    (strided, ("blocks", "all-keys")), (again, ("blocks", "all-keys", "m3")),
) for name in names}  # fmt: skip


@each(lambda lane: [name for name, (_, shape) in SAME.items() if shape in SMALL or lane.device == "cuda"])
def test_index_loss_is_bit_equal_for(lane: Lane, what: str) -> None:
    """Reruns: 50 on a GPU."""
    pair, name = SAME[what]
    first, second = pair(inputs_of((SMALL | LARGE)[name], lane.dtype, lane.place))
    for weights in (None, torch.ones_like(first.lse[..., 0]))[: 1 + (pair is poisoned)]:
        expected = results(lane, first, weights)
        for _ in range(50 if pair is again and lane.device == "cuda" else 1):
            assert all(map(torch.equal, expected, results(lane, second, weights)))


@each("mean", "sum")
def test_index_loss_reduces_rows(lane: Lane, what: Any) -> None:
    """A float16 gradient does not vanish by the factor of the mean before the loss is scaled."""
    of = inputs_of(SMALL["blocks"], torch.float16, lane.place)
    exact, count = of.oracle(), of.lse[..., 0].numel() if what == "mean" else 1
    iq, ik = of.index_q.clone().requires_grad_(), of.index_k.clone().requires_grad_()
    loss = indexer_loss(*of[:3], iq, ik, of.selection, reduction=what, backend=lane.name, **SCALES)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    torch.testing.assert_close(loss.detach().cpu().double(), exact.loss.sum() / count, rtol=1e-3, atol=0)
    scaled = torch.autograd.grad(loss * 1024, (iq, ik))
    assert_near(exact._replace(dq=scaled[0], dk=scaled[1]), IndexLoss(exact.loss, *(x * 1024 / count for x in exact[1:])), torch.float16)


@each("blocks", "all-keys")
def test_index_loss_in_parts(lane: Lane, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows at once, in other units, slices and sections, give the same loss, and gradients up to the order of sums."""
    of = inputs_of(SMALL[what]._replace(B=1, S=36, S_kv=40), lane.dtype, lane.place)
    whole = results(lane, of)
    if lane.name == "loss-triton":
        from nsa_sel.backends import loss_triton
        from nsa_sel.backends._triton import index_loss_dense

        monkeypatch.setattr(loss_triton, "LEAST_ROWS", 16)
        monkeypatch.setattr(loss_triton, "room", lambda call: 1 << 10)
        monkeypatch.setattr(index_loss_dense, "CHUNK", 16)
    recorded(monkeypatch, workspace_bytes=1 << 10)
    chunks = mock.Mock(wraps=loss_torch._mask)
    monkeypatch.setattr(loss_torch, "_mask", chunks)
    found = results(lane, of)
    assert chunks.call_count == (2 * 36 if lane.name == "loss-torch" else 0)  # of one row each
    torch.testing.assert_close(found.loss, whole.loss, rtol=1e-5, atol=1e-6)
    near = {"rtol": 2e-2, "atol": 2e-2} if lane.device == "cuda" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found[1:], whole[1:], **near)


@each(on_gpus=["m3", "m3-all-keys"])
def test_index_loss_stays_within_the_workspace(lane: Lane, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporaries beyond the results take at most runtime.workspace_bytes, and what 1,024 rows or one pair need."""
    of, bound = inputs_of(LARGE[what]._replace(S=2048, S_kv=2048), lane.dtype, lane.place), 16 << 20
    calls = recorded(monkeypatch, workspace_bytes=bound)
    results(lane, of)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    kept = index_loss.registry.load_loss(lane.name).forward(calls[-1], True)
    assert len(kept) == 3
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() <= 2 * bound


@each("blocks", "all-keys")
def test_index_loss_is_bit_equal_in_a_graph_and_under_autocast(lane: Lane, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = recorded(monkeypatch)
    expected = results(lane, inputs_of(SMALL[what], lane.dtype, lane.place))
    forward = partial(index_loss.registry.load_loss(lane.name).forward, calls[-1], True)
    loss, dq, dk = replayed(*captured(forward, lane.place))
    assert torch.equal(loss, expected.loss)
    assert torch.equal(dq, expected.dq)
    assert torch.equal(dk.to(dq.dtype).view_as(expected.dk), expected.dk)
    with torch.autocast(lane.place, torch.float16):
        assert torch.equal(forward()[0], expected.loss)


@each("blocks", "aligned", "ranges", "all-keys")
def test_index_loss_of_a_packed_batch_is_that_of_each_sequence(lane: Lane, what: str) -> None:
    """Lengths of 0 and 1, and padding after the last sequence, which holds NaN."""
    lengths = (32, 16, 0, 20) if what == "aligned" else (5, 0, 1, 18, 8)
    T, cu = sum(lengths) + 3, torch.tensor([0, *lengths]).cumsum(0)
    shape = Shape(S=T, S_kv=T, block={"ranges": None, "all-keys": 0}.get(what, 16), shared=what != "ranges")
    of = inputs_of(shape, lane.dtype, lane.place)
    of = of._replace(lse=of.lse.nan_to_num(neginf=0.0))  # any: it is that of other keys

    def alone(at: slice) -> IndexLoss:
        selection = None if of.selection is None else Selection(of.selection.ranges[:, at].contiguous(), of.selection.block_size)
        own = of.q[:, at], of.k[:, :, at], of.lse[:, at].contiguous(), of.index_q[:, at], of.index_k[..., at, :]
        return results(lane, Inputs(*own, selection, None))

    parts = [alone(slice(begin, end)) for begin, end in pairwise(cu.tolist())]
    by_token = lambda x: x[0] if shape.shared else x[0].transpose(0, 1)  # noqa: E731
    packed = of.q[0], of.k[0].transpose(0, 1), of.lse[0], of.index_q[0], by_token(of.index_k)
    expected = IndexLoss(*(torch.cat(x).double().cpu() for x in zip(*((p.loss[0], p.dq[0], by_token(p.dk)) for p in parts), strict=True)))
    for x in packed:
        x[cu[-1] :] = torch.nan
    iq, ik = (x.clone().requires_grad_() for x in packed[3:])
    for bounds in (cu.to(lane.place), cu.tolist()):
        call = partial(indexer_loss, *packed[:3], iq, ik, of.selection, cu_seqlens=bounds, backend=lane.name, **SCALES)
        rows, *gradients = call(reduction="none").detach(), *torch.autograd.grad(call(reduction="sum"), (iq, ik))
        assert not any(x[cu[-1] :].any() for x in (rows, *gradients))
        assert_near(IndexLoss(*(x[: cu[-1]] for x in (rows, *gradients))), expected, lane.dtype)


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


@each(lambda lane: [torch.float64] if torch.float64 in lane.dtypes and lane.device != "cuda" else [])
def test_index_loss_gradients_are_those_of_finite_differences(lane: Lane, what: torch.dtype) -> None:
    of = inputs_of(Shape(S=5, S_kv=9, G=1, h=2, Dk=8, Di=8, block=4), what, lane.place)
    inputs = of.index_q.requires_grad_(), of.index_k.requires_grad_()
    for reduction in ("mean", "none"):
        call = partial(indexer_loss, *of[:3], selection=of.selection, reduction=reduction, backend=lane.name, **SCALES)
        assert torch.autograd.gradcheck(lambda iq, ik, call=call: call(index_q=iq, index_k=ik), inputs, fast_mode=lane.slow)


@each(Shape(S=0), Shape(S=0, S_kv=0, block=0), Shape(n=0))
def test_index_loss_without_rows_keys_or_ranges_is_zero(lane: Lane, what: Shape) -> None:
    q, k, lse, iq, ik, selection, _ = inputs_of(what, lane.dtype, lane.place)
    iq, ik = iq.requires_grad_(), ik.requires_grad_()
    for reduction in ("mean", "none"):
        loss = indexer_loss(q, k, lse.fill_(-torch.inf), iq, ik, selection, reduction=reduction, backend=lane.name)  # type: ignore[arg-type]
        assert float(loss.detach().sum()) == 0.0
        assert not any(x.any() for x in torch.autograd.grad(loss.sum(), (iq, ik)))


def test_index_loss_is_an_op() -> None:
    """opcheck, torch.compile in one graph with both reductions, and no second derivative."""
    of = inputs_of(SMALL["blocks"], torch.float32, "cpu")
    iq, ik = of.index_q.requires_grad_(), of.index_k.requires_grad_()
    assert of.selection is not None
    for uniform in (True, False):
        facts = (None, None, of.selection.ranges, 16, None, False, *SCALES.values(), None, True, uniform)
        torch.library.opcheck(torch.ops.nsa_sel.indexer_loss, (*of[:3], iq, ik.unsqueeze(1), *facts))
    exact = of.oracle()
    for reduction in ("sum", "none"):
        function = torch.compile(partial(indexer_loss, reduction=reduction, **SCALES), fullgraph=True, backend="aot_eager")
        loss = function(*of[:3], iq, ik, of.selection.ranges)
        found = torch.autograd.grad(loss.sum(), (iq, ik))
        assert_near(IndexLoss(loss.detach() if reduction == "none" else exact.loss, *found), exact, torch.float32)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(indexer_loss(*of[:3], iq, ik, of.selection), iq, create_graph=True)


@pytest.mark.parametrize("block", [16, None, 0])
def test_index_loss_compiles_for_packed_batches(block: int | None) -> None:
    of, cu = inputs_of(Shape(S=40, block=block), torch.float32, "cpu"), torch.tensor([0, 18, 18, 37])
    given = of.q[0], of.k[0].transpose(0, 1), of.lse[0].zero_(), of.index_q[0].requires_grad_(), of.index_k[0]
    ranges = None if of.selection is None else of.selection.ranges
    function = torch.compile(partial(indexer_loss, cu_seqlens=cu), fullgraph=True, backend="aot_eager")
    whole, compiled = (loss(*given, ranges) for loss in (partial(indexer_loss, cu_seqlens=cu), function))
    torch.testing.assert_close(compiled, whole)
    torch.testing.assert_close(*(torch.autograd.grad(x, given[3]) for x in (compiled, whole)))


BAD = [
    ("reduction", "max"), ("q", torch.zeros(1, 2, 3, 16)), ("lse", torch.zeros(1, 40, 2, 4)), ("lse", torch.zeros(2, 40, 2, 3).double()),
    ("index_q", torch.zeros(2, 40, 1, 24)), ("index_q", torch.zeros(2, 40, 2, 24).double()), ("index_k", torch.zeros(2, 59, 24)),
    ("index_k", torch.zeros(2, 60, 16)), ("index_k", torch.zeros(2, 3, 60, 24)), ("index_scale", torch.nan), ("q_pos", torch.zeros(3)),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "value"), BAD)
def test_index_loss_names_a_bad_argument(argument: str, value: Any) -> None:
    given = {**inputs_of(SMALL["blocks"], torch.float32, "cpu")._asdict(), **SCALES, argument: value}
    with pytest.raises(ArgumentError) as error:
        indexer_loss(**given)
    assert error.value.argument == argument or argument in ("index_q", "index_scale")


def test_index_loss_backends_are_forced_and_replaced_as_those_of_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that fails forward is replaced in the backward pass, too."""
    of = inputs_of(SMALL["blocks"], torch.float32, "cpu")
    iq = of.index_q.requires_grad_()

    def overridden(**options: Any) -> Override | None:
        indexer_loss(*of[:3], iq, of.index_k, of.selection, reduction="none", **options).sum().backward()
        decision = decisions()[-1]
        assert (decision.forward, decision.backward) == ("loss-torch", "loss-torch")
        assert not decision.replay()
        return decision.override

    assert overridden() is None
    for name, expected in (("loss-torch", Override("loss-torch", "use_backend")), ("choose-torch", None)):  # the second is of another kind
        with use_backend(name):
            assert overridden() == expected
    with monkeypatch.context() as patch:
        patch.setenv("NSA_SEL_BACKEND", "loss-torch")
        assert overridden() == Override("loss-torch", "NSA_SEL_BACKEND")
    with pytest.raises(BackendError, match="is unknown to indexer_loss"):
        overridden(backend="sdpa-packed")
    failing = mock.Mock(side_effect=RuntimeError("no such kernel"))
    monkeypatch.setattr(index_loss.registry.load_loss("loss-triton"), "forward", failing)
    with pytest.raises(RuntimeError, match="no such kernel"):
        overridden(backend="loss-triton")
    checks = tuple(check for check in POLICY.checks if check is not rules.no_triton_on_cpu)
    monkeypatch.setattr("nsa_sel.policies.default.POLICY", POLICY._replace(checks=checks))
    monkeypatch.setattr(index_loss.registry, "broken", {})
    forget_decisions()
    with pytest.warns(RuntimeWarning, match="loss-triton failed, loss-torch runs calls of this class from now on"):
        overridden()
    forget_decisions()
