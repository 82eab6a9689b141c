"""What several ranks check together: a program for torchrun; without it, it forks into two ranks that meet in the file RANKS_MEET_IN.

`torchrun --standalone --nproc-per-node 2 -m tests.distributed_checks cuda` runs all of it through NCCL, `cpu` through gloo. Each rank
runs every check; the first failure ends it, for the others would wait for it. With a folder as the second argument, each rank
writes there what became of each check.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import nsa_sel
from nsa_sel import Selection, attention, selection_attention
from nsa_sel.bench import bench_scaling
from nsa_sel.distributed import agreement, check_ranks, context_parallel_attention, exchanges
from nsa_sel.errors import ArgumentError, BackendError, NsaSelError
from tests.cases import assert_forward, assert_gradients, make_blocks, make_grads, make_qkv, make_spans

BLOCK = 16
DEVICE = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in ("cpu", "cuda") else "cpu"
BACKENDS = ("sdpa-packed", "triton-group", "triton-tile", "triton-block") if DEVICE == "cuda" else ("sdpa-packed", "numba")
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# How many of o, lse, dq are bit-equal to one device's when keys and values are gathered: packed SDPA's backward pass on a CPU is a product
# over all keys that are there, and on a GPU its rows share buckets.
EQUAL = {"numba": 3, "sdpa-packed": 2 if DEVICE == "cpu" else 0, "triton-group": 3, "triton-tile": 2, "triton-block": 2}
ROWS = 96 if DEVICE == "cuda" else 64  # with fewer a GPU's kernels split rows, which those of one rank then are in more parts
D = 64 if DEVICE == "cuda" else 16


def rank() -> int:
    return dist.get_rank()


def ranks() -> int:
    return dist.get_world_size()


def mine(x: Tensor, dim: int) -> Tensor:
    """This rank's slice."""
    return x.detach().chunk(ranks(), dim)[rank()].contiguous().requires_grad_(x.requires_grad)


def all_of(x: Tensor, dim: int) -> Tensor:
    """The slices of all ranks."""
    every = [torch.empty_like(x) for _ in range(ranks())]
    dist.all_gather(every, x.contiguous())
    return torch.cat(every, dim)


_turns = itertools.count()


def my_turn() -> bool:
    """Whether this rank is the one to compare with the oracle, which takes longer than what it checks: they take turns."""
    return next(_turns) % ranks() == rank()


def problem(
    S: int = ROWS, S_kv: int | None = None, B: int = 2, G: int = 2, n: int = 3, dtype: torch.dtype = DTYPE
) -> tuple[Tensor, Tensor, Tensor, Selection]:
    q, k, v = make_qkv(B, S, G, 2, D, S_kv=S_kv, dtype=dtype, device=DEVICE, requires_grad=True)
    return q, k, v, make_blocks(B, S, G, S_kv or S, n, BLOCK, device=DEVICE)


def both_ways(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, backend: str, *, order: Tensor | None = None, **how: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """o, lse, dq, dk, dv of this rank in a call of all ranks, held to the oracle, and in one of the whole.

    order: the rows as ranks are given them.
    """
    rows = torch.arange(q.shape[1], device=q.device) if order is None else order
    first = k.shape[2] - q.shape[1]
    do, dlse = make_grads(q, v)
    whole = selection_attention(q, k, v, selection, return_lse=True, backend=backend)
    wanted = [x.detach() for x in (*whole, *torch.autograd.grad(whole, (q, k, v), (do, dlse)))]
    slices = mine(q[:, rows], 1), mine(k, 2), mine(v, 2)
    ranges = mine(selection.ranges[:, rows], 1)
    q_pos = None if order is None else mine(first + rows, 0)
    got = context_parallel_attention(*slices, Selection(ranges, selection.block_size), q_pos=q_pos, return_lse=True, backend=backend, **how)
    assert nsa_sel.decisions()[-1].forward == backend
    grads = torch.autograd.grad(got, slices, (mine(do[:, rows], 1), mine(dlse[:, rows], 1)))
    back = rows.argsort()
    o, lse, dq = (all_of(x.detach(), 1)[:, back] for x in (*got, grads[0]))
    dk, dv = (all_of(x, 2) for x in grads[1:])
    if my_turn():
        assert_forward((o, lse), q, k, v, selection.ranges)
        assert_gradients((dq, dk, dv), q, k, v, selection.ranges, do, dlse)
    return tuple(x.detach() for x in (*got, *grads)), tuple(mine(x[:, rows], 1) for x in wanted[:3]) + tuple(mine(x, 2) for x in wanted[3:])


def assert_bits(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], backend: str) -> None:
    """Of o, lse and dq as many are bit-equal as the backend sums alike; dk and dv are sums in another order."""
    for name, a, b in list(zip(("o", "lse", "dq"), got, wanted, strict=False))[: EQUAL[backend]]:
        assert torch.equal(a, b), f"{name}: {float((a.float() - b.float()).abs().max())} off"


def gathering_is_bit_equal() -> None:
    for backend in BACKENDS:
        for given in (problem(), problem(ROWS, 2 * ROWS)):
            assert_bits(*both_ways(*given, backend, exchange="gather"), backend)
            assert exchanges()[-1].way == "gather"
    spans = Selection(make_spans("mixed", 2, ROWS, 2, ROWS, 40, device=DEVICE))
    ragged = (
        "triton-group" if DEVICE == "cuda" else "numba"
    )  # packed SDPA sums a row as the rows of its bucket are, which other rows decide
    assert_bits(*both_ways(*problem()[:3], spans, ragged), ragged)
    assert exchanges()[-1].why == "the selection is not of whole blocks"


def travelling_blocks_are_within_the_bound() -> None:
    for backend in BACKENDS:
        for count in (False, True):
            got, wanted = both_ways(*problem(), backend, exchange="blocks", count_blocks=count)
            assert (exchanges()[-1].way, exchanges()[-1].counted) == ("blocks", count)
            if backend == "numba":  # a row's keys come in the same order, and numba sums them one by one
                assert_bits(got, wanted, backend)
    for count in (False, True):  # rows that stand behind their slice: what they see of a block ends within it
        both_ways(*problem(32, 64), "sdpa-packed", exchange="blocks", count_blocks=count)
        assert nsa_sel.decisions()[-1].request.block_size is None, "decided for what is no longer of whole blocks"


def sums_of_16_bit_gradients_are_within_the_bound() -> None:
    for exchange in ("gather", "blocks"):
        both_ways(*problem(dtype=torch.bfloat16), BACKENDS[1], exchange=exchange)


def rows_of_both_ends() -> None:
    """A rank has rows of the beginning and of the end, as models that balance dense attention cut them."""
    parts = torch.arange(ROWS, device=DEVICE).chunk(2 * ranks())
    order = torch.cat([torch.cat((parts[r], parts[2 * ranks() - 1 - r])) for r in range(ranks())])
    for exchange in ("gather", "blocks"):
        both_ways(*problem(), "sdpa-packed", order=order, exchange=exchange)


def the_cheaper_way_is_taken() -> None:
    """A token a rank over a long cache: few blocks can be chosen; all rows of a prefill may choose all."""
    q, k, v, selection = problem(ranks(), 64 * BLOCK * ranks(), n=3)
    both_ways(q, k, v, selection, "sdpa-packed")
    few = exchanges()[-1]
    assert few.blocks is not None
    assert (few.way, few.counted, few.slots) == ("blocks", False, 3 * (ranks() - 1))
    a_block = 2 * 2 * BLOCK * 2 * D * DTYPE.itemsize  # B, G, keys, Dk and Dv
    assert few.blocks.forward == few.slots * (a_block + 2 * 2 * 4)
    assert few.blocks.backward == few.slots * a_block
    assert few.gather == (64 * (ranks() - 1) * a_block,) * 2
    assert "blocks are no more bytes" in str(few)
    both_ways(*problem(), "sdpa-packed")
    assert (exchanges()[-1].way, exchanges()[-1].why.split(":")[0]) == ("gather", "gathering is no more bytes")
    nearby = problem()[:3], torch.arange(ROWS, device=DEVICE)[None, :, None, None].expand(2, -1, 2, 1) // BLOCK  # nothing of others
    both_ways(*nearby[0], Selection.from_blocks(nearby[1].contiguous(), BLOCK), "sdpa-packed", count_blocks=True)
    assert (exchanges()[-1].way, exchanges()[-1].blocks) == ("blocks", (0, 0))


def decode_form() -> None:
    q, k, v, selection = problem(ranks(), 8 * BLOCK * ranks())
    token = mine(q, 1)[:, 0], mine(k, 2), mine(v, 2), mine(selection.ranges, 1)[:, 0]
    o, lse = context_parallel_attention(*token, return_lse=True)
    assert o.dim() == 4
    assert_forward((all_of(o.detach()[:, None], 1), all_of(lse.detach()[:, None], 1)), q, k, v, selection.ranges)


def poison_stays_home() -> None:
    """NaN in keys that no row may read, in slots that travel unasked too, reaches nothing."""
    q, k, v, selection = problem()
    first = Selection(selection.ranges.clone(), BLOCK)
    first.ranges[first.ranges[..., 0] // BLOCK == 2] = 0  # nobody reads block 2
    results = []
    for bad in (0.0, float("nan")):
        slices = []
        for x in (k, v):
            x = x.detach().clone()
            x[:, :, 2 * BLOCK : 3 * BLOCK] += bad
            slices.append(mine(x.requires_grad_(), 2))
        for exchange in ("gather", "blocks"):
            rows = mine(q, 1)
            o = context_parallel_attention(rows, *slices, Selection(mine(first.ranges, 1), BLOCK), exchange=exchange)
            results.append((o.detach(), *torch.autograd.grad(o, (rows, *slices), mine(make_grads(q, v)[0], 1))))
    for clean, poisoned in zip(results[:2], results[2:], strict=True):
        assert all(map(torch.equal, clean, poisoned))


@contextmanager
def only_rank(number: int, name: str, value: str) -> Iterator[None]:
    """A flag on one rank alone."""
    if rank() == number:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def call_of(S: int, **how: Any) -> Tensor:
    q, k, v, selection = problem(S)
    return context_parallel_attention(mine(q, 1), mine(k, 2), mine(v, 2), mine(selection.ranges, 1), **how)


def ranks_agree() -> None:
    meetings = agreement._groups[dist.group.WORLD].meetings
    call_of(64)
    call_of(64)
    assert agreement._groups[dist.group.WORLD].meetings == meetings + 1, "ranks meet once a class"
    dist.barrier()
    assert not dist.group.WORLD.get_group_store().check([f"nsa_sel/meeting{meetings}/rank0"]), "a new process group would find it"
    check_ranks()
    with only_rank(1, "NSA_DEBUG_LOG", os.devnull):  # a log for each rank is fine
        call_of(64)
    nsa_sel.log_to(None)
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        for work in (lambda: call_of(128), check_ranks):
            with pytest.raises(NsaSelError, match=r"rank 1 .*settings\.sel_triton_min_L is 77 there, \S+ on rank 0"):
                work()
    with pytest.raises(NsaSelError, match=r"rank 1 .*override is None there, \{'backend': 'sdpa-packed', 'source': 'argument'\} on rank 0"):
        call_of(128, backend=None if rank() else "sdpa-packed")
    with pytest.raises(NsaSelError, match=r"exchange is 'gather' there, 'auto' on rank 0"):
        call_of(128, exchange="gather" if rank() else "auto")
    with pytest.raises(NsaSelError, match=r"request\.S is \d+ there, \d+ on rank 0; keys is 96 there, 80 on rank 0"):
        call_of(160 + 32 * rank())
    real, agreement._version = agreement._version, lambda package: f"{package}-{rank()}"
    with pytest.raises(NsaSelError, match=r"versions\.numba is 'numba-1' there, 'numba-0' on rank 0"):
        check_ranks()
    agreement._version = real
    with pytest.raises(BackendError, match="nothing-such"):
        call_of(128, backend="nothing-such")
    call_of(128)


def rank_0_decides() -> None:
    """Other ranks would choose otherwise; they run what rank 0 chose."""
    q, k, v, selection = problem(32)
    slices = mine(q, 1), mine(k, 2), mine(v, 2), mine(selection.ranges, 1)
    real = attention.select

    def other(request: Any, device: Any, backend: str | None = None) -> Any:
        decision = real(request, device, BACKENDS[0 if rank() else 1])
        return nsa_sel.decision.msgspec.structs.replace(decision, override=None)

    attention.select = other
    first = other(nsa_sel.decisions()[-1].request, nsa_sel.decisions()[-1].device).forward
    context_parallel_attention(*slices)
    attention.select = real
    chosen = [None] * ranks()
    dist.all_gather_object(chosen, (first, nsa_sel.decisions()[-1].forward))
    assert chosen[0][0] != chosen[1][0]
    assert {ran for _, ran in chosen} == {chosen[0][0]}


def who_comes_alone_is_told() -> None:
    """A rank whose flag was changed makes a call that the others know already; it says what it was."""
    seconds, agreement.SECONDS = agreement.SECONDS, 0.5
    call_of(64)
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        began = time.monotonic()
        if rank() == 1:
            with pytest.raises(NsaSelError, match=r"rank 1 waited 0.5 seconds for rank 0 .*settings\.sel_triton_min_L was \S+, is 77"):
                call_of(64)
            assert time.monotonic() - began < 10
    agreement.SECONDS = seconds
    dist.barrier()
    check_ranks()
    meetings = agreement._groups[dist.group.WORLD].meetings
    with only_rank(rank(), "NSA_DEBUG_TRITON", "1"):  # every call is compared
        call_of(64)
        call_of(64)
    assert agreement._groups[dist.group.WORLD].meetings == meetings + 2


def bad_arguments() -> None:
    q, k, v, selection = problem(64)
    slices = mine(q, 1), mine(k, 2), mine(v, 2)
    with pytest.raises(ArgumentError, match="exchange is 'all'; allowed: auto, gather, blocks"):
        context_parallel_attention(*slices, mine(selection.ranges, 1), exchange="all")
    with pytest.raises(ArgumentError, match="'blocks', but the selection is not of whole blocks"):
        context_parallel_attention(*slices, mine(selection.ranges, 1), exchange="blocks")
    blocks = Selection.from_blocks(torch.zeros(2, 64 // ranks(), 2, 1, dtype=torch.int32, device=DEVICE), 64)
    with pytest.raises(ArgumentError, match="no multiple of the block size 64"):
        context_parallel_attention(*slices, blocks, exchange="blocks")
    with pytest.raises(ArgumentError, match="selection is over rows"):
        context_parallel_attention(*slices, selection)
    with pytest.raises(ArgumentError, match="group is a str"):
        context_parallel_attention(*slices, mine(selection.ranges, 1), group="dp")


# DTensors


CUTS = {"batch": (0, 0, 0), "groups": (2, 1, 2), "rows": (1, None, 1), "heads": (3, None, None)}  # q; k and v; ranges


def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (ranks(),))


def placed(x: Tensor, dim: int | None, on: DeviceMesh) -> DTensor:
    return distribute_tensor(x.detach(), on, [Replicate() if dim is None else Shard(dim)]).requires_grad_(x.requires_grad)


def dtensors_need_no_communication() -> None:
    q, k, v, selection = problem()
    do = make_grads(q, v)[0]
    on = mesh()
    for backend in BACKENDS:
        o, lse = selection_attention(q, k, v, selection, return_lse=True, backend=backend)
        wanted = o, *torch.autograd.grad(o, (q, k, v), do)
        for name, (rows, keys, index) in CUTS.items():
            parts = placed(q, rows, on), placed(k, keys, on), placed(v, keys, on)
            cut = Selection.from_ranges(placed(selection.ranges, index, on), BLOCK)
            do_cut = placed(do, rows, on)
            with CommDebugMode() as traffic:
                got = selection_attention(*parts, cut, backend=backend)
                grads = torch.autograd.grad(got, parts, do_cut)
            assert traffic.get_total_counts() == 0, f"{name}: {traffic.get_comm_counts()}"
            assert nsa_sel.decisions()[-1].forward == backend
            assert got.placements == (Shard(rows),), name
            assert grads[1].placements == ((Partial() if keys is None else Shard(keys)),), name
            full = [x.full_tensor() for x in (got, *grads)]
            if keys is not None and EQUAL[backend]:  # nothing is summed over ranks; how a GPU cuts the sums of dk, dv is not compared
                assert all(map(torch.equal, full[: 1 if DEVICE == "cuda" else 4], wanted)), name
            if my_turn():
                assert_forward((full[0], lse), q, k, v, selection.ranges)
                assert_gradients(tuple(full[1:]), q, k, v, selection.ranges, do)


def dtensors_of_uneven_parts_and_of_two_dimensions() -> None:
    """Three groups on two ranks, an odd number of rows, a mesh of batch entries by groups, and autocast."""
    q, k, v, selection = problem(ROWS - 1, ROWS, G=3)
    flat, deep = mesh(), init_device_mesh(DEVICE, (1, ranks()))
    for on, rows, keys in (
        (flat, [Shard(2)], [Shard(1)]),
        (flat, [Shard(1)], [Replicate()]),
        (deep, [Shard(0), Shard(2)], [Shard(0), Shard(1)]),
    ):
        parts = (distribute_tensor(x.detach(), on, how) for x, how in ((q, rows), (k, keys), (v, keys)))
        cut = Selection.from_ranges(distribute_tensor(selection.ranges, on, rows), BLOCK)
        got, got_lse = selection_attention(*parts, cut, return_lse=True)
        assert got.placements == got_lse.placements == tuple(rows)
        assert_forward((got.full_tensor(), got_lse.full_tensor()), q, k, v, selection.ranges)
    with torch.autocast(DEVICE, dtype=torch.float16):
        half = selection_attention(*(placed(x, dim, flat) for x, dim in ((q, 2), (k, 1), (v, 1))), placed(selection.ranges, 2, flat))
    assert (half.dtype, half.placements) == (torch.float16, (Shard(2),))


def dtensors_are_brought_together() -> None:
    """Keys that are cut along the sequence are gathered, and a selection that is whole is cut: by DTensor itself."""
    q, k, v, selection = problem()
    on = mesh()
    o = selection_attention(placed(q, 1, on), placed(k, 2, on), placed(v, 2, on), placed(selection.ranges, None, on))
    assert_forward((o.full_tensor(), selection_attention(q, k, v, selection, return_lse=True)[1]), q, k, v, selection.ranges)
    with pytest.raises(ArgumentError, match=r"selection is a Tensor; allowed: a DTensor on the mesh of q"):
        selection_attention(placed(q, 1, on), placed(k, 2, on), placed(v, 2, on), selection)
    with (
        nsa_sel.use_backend("sdpa-packed"),
        pytest.raises(BackendError, match="or one of DTensors, that needs gradients"),
    ):
        selection_attention(placed(q, 0, on), placed(k, 0, on), placed(v, 0, on), placed(selection.ranges, 0, on))


# Models


class Layer(nn.Module):
    """Selection attention between linear maps; `attend` is what runs it."""

    def __init__(self, G: int = 2, h: int = 2, D: int = 16, width: int = 32) -> None:
        super().__init__()
        self.G, self.h, self.D = G, h, D
        self.q, self.k, self.v = nn.Linear(width, G * h * D), nn.Linear(width, G * D), nn.Linear(width, G * D)
        self.o = nn.Linear(G * h * D, width)
        self.attend: Callable[..., Any] = selection_attention

    def forward(self, x: Tensor, selection: Selection) -> Tensor:
        B, S, _ = x.shape
        q = self.q(x).view(B, S, -1, self.h, self.D)  # of all groups, or of this rank's
        k, v = (y.view(B, S, -1, self.D).transpose(1, 2) for y in (self.k(x), self.v(x)))
        return x + self.o(self.attend(q, k, v, selection).flatten(2))


def trained(model: nn.Module, x: Tensor, selection: Selection, steps: int = 3) -> list[float]:
    """Losses of a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        loss = (model(x, selection) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def model_and_input() -> tuple[Layer, Tensor, Selection, list[float]]:
    """A layer, its input [2,64,32], and the losses that one rank alone trains to."""
    torch.manual_seed(0)
    x = torch.randn(2, 64, 32).to(DEVICE)
    selection = make_blocks(2, 64, 2, 64, 3, BLOCK, device=DEVICE)
    alone = Layer().to(DEVICE)
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    wanted = trained(alone, x, selection)
    assert wanted[-1] < 0.9 * wanted[0]
    model = Layer().to(DEVICE)
    model.load_state_dict(state)
    return model, x, selection, wanted


def mean_over_ranks(losses: list[float]) -> list[float]:
    every: list[Any] = [None] * ranks()
    dist.all_gather_object(every, losses)
    return [sum(step) / ranks() for step in zip(*every, strict=True)]


def close(got: list[float], wanted: list[float]) -> None:
    assert got == pytest.approx(wanted, rel=1e-4)


def fsdp_trains_alike() -> None:
    """Parameters sharded, batch entries split."""
    model, x, selection, wanted = model_and_input()
    fully_shard(model, mesh=mesh())
    close(mean_over_ranks(trained(model, mine(x, 0), Selection(mine(selection.ranges, 0), BLOCK))), wanted)


def fsdp_over_slices_of_the_sequence_trains_alike() -> None:
    """Parameters sharded over the ranks that also hold slices of one sequence."""
    for exchange in ("gather", "blocks"):
        model, x, selection, wanted = model_and_input()
        model.attend = lambda *tensors, exchange=exchange: context_parallel_attention(*tensors, exchange=exchange, group=mesh())
        fully_shard(model, mesh=mesh())
        close(mean_over_ranks(trained(model, mine(x, 1), Selection(mine(selection.ranges, 1), BLOCK))), wanted)


def tensor_parallel_trains_alike() -> None:
    """KV groups split by parallelize_module: what reaches the call is plain tensors, or DTensors."""
    for local in (True, False):
        model, x, selection, wanted = model_and_input()
        on = mesh()
        by_columns = {name: ColwiseParallel(use_local_output=local) for name in "qkv"}
        parallelize_module(model, on, {**by_columns, "o": RowwiseParallel()})
        ranges = mine(selection.ranges, 2) if local else placed(selection.ranges, 2, on)
        close(trained(model, x, Selection.from_ranges(ranges, BLOCK)), wanted)


# Documents and benches


def the_document_runs() -> None:
    """The code of docs/distributed.md, as tests/test_documents.py runs it on one rank."""
    text = (Path(__file__).parents[1] / "docs" / "distributed.md").read_text()
    namespace: dict[str, Any] = {"__name__": "document"}
    for number, part in enumerate(text.split("```python\n")[1:], 1):
        exec(compile(part.split("```")[0], f"docs/distributed.md, python block {number}", "exec"), namespace)


def scaling_is_measured() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.jsonl"
        bench_scaling.measure_here(out, DEVICE, quick=True, calls=3)
        rows = [json.loads(line) for line in out.read_text().splitlines()] if rank() == 0 else []
    for row in rows:
        assert row["ranks"] == ranks()
        assert row["S"] * ranks() == row["S_kv"]
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert row["way"] in ("gather", "blocks")
        assert row["bytes_forward"] > 0
        assert (row["bytes_backward"] > 0) == (row["direction"] == "fwd+bwd")
    assert len(rows) == (len(bench_scaling.cases(ranks(), quick=True)) * 2 if rank() == 0 else 0)


CHECKS: tuple[Callable[[], None], ...] = (
    gathering_is_bit_equal,
    travelling_blocks_are_within_the_bound,
    sums_of_16_bit_gradients_are_within_the_bound,
    rows_of_both_ends,
    the_cheaper_way_is_taken,
    decode_form,
    poison_stays_home,
    ranks_agree,
    rank_0_decides,
    who_comes_alone_is_told,
    bad_arguments,
    dtensors_need_no_communication,
    dtensors_of_uneven_parts_and_of_two_dimensions,
    dtensors_are_brought_together,
    fsdp_trains_alike,
    fsdp_over_slices_of_the_sequence_trains_alike,
    tensor_parallel_trains_alike,
    the_document_runs,
    scaling_is_measured,
)


def become_ranks(number: int) -> None:
    """Go on as so many processes, one a rank: they share what importing takes."""
    for one in range(1, number):
        if os.fork() == 0:
            os.environ["RANK"] = str(one)
            return
    os.environ["RANK"] = "0"


def main() -> None:
    """Join the job, run every check, write what became of them."""
    if "RANK" not in os.environ:
        become_ranks(2)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    how = {"timeout": datetime.timedelta(seconds=60)}
    store = os.environ.get("RANKS_MEET_IN")
    where = {"init_method": f"file://{store}", "rank": int(os.environ["RANK"]), "world_size": 2} if store else {}
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", **how, **where)
    results: dict[str, str] = {}
    for check in CHECKS:
        began = time.monotonic()
        if len(sys.argv) > 3 and sys.argv[3] not in check.__name__:
            continue
        try:
            check()
            results[check.__name__] = "passed"
        except BaseException:
            results[check.__name__] = traceback.format_exc()
            break
        finally:
            print(f"rank {rank()}: {check.__name__}, {time.monotonic() - began:.1f} s", flush=True)
    if len(sys.argv) > 2:
        (Path(sys.argv[2]) / f"rank{rank()}.json").write_text(json.dumps(results))
    failed = [text for text in results.values() if text != "passed"]
    if failed:
        print(failed[0], file=sys.stderr, flush=True)
        os._exit(1)  # the others may never come to a proper end
    dist.destroy_process_group()
    if os.environ["RANK"] == "0" and store:
        os.wait()


if __name__ == "__main__":
    main()
