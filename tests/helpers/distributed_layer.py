"""Checks of layers and models on several ranks: context and tensor parallelism, FSDP2, DTensors; see distributed_checks.py."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
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
from torch.utils.checkpoint import checkpoint

from nsa_sel import MSAttention, NSAttention, Selection, decisions, nsa_attention, selection_attention, use_backend
from nsa_sel.distributed import (
    context_parallel,
    context_parallel_nsa_attention,
    rank_rows,
    tensor_parallel,
)
from nsa_sel.errors import ArgumentError, BackendError, NsaSelError
from tests.helpers.calls import assert_refused
from tests.helpers.cases import assert_forward, assert_gradients, assert_within_twice_baseline, gradient_terms, make_grads
from tests.helpers.files import ROOT, load
from tests.helpers.ranks import BACKENDS, BLOCK, DEVICE, EQUAL, ROWS, both_ends, mine, my_turn, problem, rank, ranks

WIDTH, B = 12, 2
SMALL: dict[str, Any] = {"window": 12, "compress_block": 8, "compress_stride": 4, "block_size": 16, "n": 3}
SLICES: dict[int, dict[str, Any]] = {  # rows of a rank -> options
    32: SMALL,
    16: {**SMALL, "compression": "mean", "rotary": False},
    8: {**SMALL, "window": 20, "compress_block": 16},  # two ranks before a slice are in its windows, two after it in its compressed keys
    4: {**SMALL, "window": 11, "compress_block": 16},  # the last slices begin no compressed key
}
ROW_TENSORS = ("q", "q_cmp", "gates")
KEY_TENSORS = ("k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win")


def layer_of(options: dict[str, Any] = SMALL, dtype: torch.dtype = torch.float64, groups: int = 2) -> NSAttention:
    """The same random parameters on all ranks."""
    torch.manual_seed(0)
    layer = NSAttention(WIDTH, groups, 2, 4, 6, backend="sdpa-packed", dtype=dtype, **options).to(DEVICE)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


def hidden(S: int, batch: int = B, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, S, WIDTH, generator=torch.Generator().manual_seed(1), dtype=dtype).to(DEVICE).requires_grad_()


def weighted(o: Tensor) -> Tensor:
    """Return a loss of whole outputs whose gradients differ in every element."""
    return o * torch.randn(o.shape, generator=torch.Generator().manual_seed(2), dtype=o.dtype).to(o.device)


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    """Return the full gradients on every rank; zeros for a parameter that o does not depend on."""
    grads = {name: torch.zeros_like(y) if y.grad is None else y.grad for name, y in layer.named_parameters()}
    return {name: getattr(dy, "full_tensor", dy.clone)().detach() for name, dy in grads.items()}


assert_same = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


# Context parallelism


def sliced_layers_are_the_whole_layer() -> None:
    """Outputs, dx, and the sum over ranks of the parameters' gradients, in float64."""
    for S, options in SLICES.items():
        whole, x = layer_of(options), hidden(S * ranks())
        o = whole(x)
        weighted(o).sum().backward()
        hows: list[dict[str, Any]] = [{"exchange": exchange} for exchange in (("gather", "blocks", "rows") if S == 32 else ("auto",))]
        if S > SMALL["compress_stride"]:
            hows += [{**how, "both_ends": True} for how in hows]
        for how in hows:
            part, cut = context_parallel(layer_of(options), **how), both_ends if "both_ends" in how else mine
            own = cut(x, 1)
            got = part(own)
            cut(weighted(got.new_ones(o.shape)), 1).mul(got).sum().backward()
            assert_same((got, own.grad), (cut(o, 1), cut(x.grad, 1)))
            grads = gradients(part)
            for dx in grads.values():
                dist.all_reduce(dx)
            assert_same(grads, gradients(whole))


def call_of(S: int, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors for `nsa_attention` over S keys."""
    G, h, Dk, Dv, generator = 2, 2, 4, 6, torch.Generator().manual_seed(3)
    C = max(0, (S - options["compress_block"]) // options["compress_stride"] + 1)
    sizes: dict[str, tuple[int, ...]] = {"q": (B, S, G, h, Dk), "q_cmp": (B, S, G, h, Dk), "gates": (B, S, G, h, 3)}
    sizes |= {name: (B, G, C if name.endswith("cmp") else S, Dk if name[0] == "k" else Dv) for name in KEY_TENSORS}
    return {
        name: torch.randn(size, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_() for name, size in sizes.items()
    }


def sliced(tensors: dict[str, Tensor], S: int, stride: int, both: bool = False) -> dict[str, Tensor]:
    """Return this rank's slices, of S rows in all."""
    cut = {}
    for name, x in tensors.items():
        dim = 1 if name in ROW_TENSORS else 2
        rows = rank_rows(S * ranks(), both_ends=both, device=x.device)
        if name.endswith("cmp") and name in KEY_TENSORS:  # that begin among these rows
            rows = rows[::stride] // stride
            rows = rows[rows < x.shape[dim]]
        cut[name] = x.detach().index_select(dim, rows).requires_grad_()
    return cut


def with_gradients(attend: Callable[..., Tensor], tensors: dict[str, Tensor], weights: Tensor, **options: Any) -> dict[str, Tensor]:
    o = attend(**tensors, **options, backend="sdpa-packed")
    found = torch.autograd.grad(o, list(tensors.values()), weights.to(o.dtype), allow_unused=True)
    grads = {name: torch.zeros_like(x) if dx is None else dx for (name, x), dx in zip(tensors.items(), found, strict=True)}
    return {"o": o.detach(), **grads}


def terms_of(tensors: dict[str, Tensor], weights: Tensor) -> dict[str, float]:
    """Return the size of the terms that cancel in the selected branch's gradients."""
    do = weights * tensors["gates"][..., 1:2]
    names = "q", "k_slc", "v_slc"
    return dict(zip(names, gradient_terms(*(tensors[name].detach() for name in names), do.detach(), None), strict=True))


def sliced_calls_lose_no_more_than_whole_ones() -> None:
    """`context_parallel_nsa_attention` in float32, against float64, as `nsa_attention` of all rows; reruns are bit-equal."""
    for S, both in ((32, False), (32, True), (8, False), (8, True)):
        options = {name: size for name, size in SLICES[S].items() if name not in ("compression", "rotary")}
        weights = weighted(torch.ones(B, S * ranks(), 2, 2, 6, dtype=torch.float64, device=DEVICE))
        stride, cut = 4, both_ends if both else mine
        wanted = []
        for dtype in (torch.float64, torch.float32):
            of = with_gradients(nsa_attention, call_of(S * ranks(), dtype, options), weights, **options)
            wanted.append({"o": cut(of.pop("o"), 1), **sliced(of, S, stride, both)})
        whole = call_of(S * ranks(), torch.float32, options)
        given, terms = sliced(whole, S, stride, both), terms_of(whole, weights)
        for exchange in ("gather", "rows"):
            how = {**options, "exchange": exchange, "both_ends": both}
            first, again = (with_gradients(context_parallel_nsa_attention, given, cut(weights, 1), **how) for _ in range(2))
            assert all(torch.equal(first[name], again[name]) for name in first), "reruns differ"
            for name, got in first.items():
                assert_within_twice_baseline(got, wanted[0][name], wanted[1][name], name, terms.get(name, 0.0))


def sliced_layers_in_autocast_and_checkpoints() -> None:
    """The exchange is repeated in the backward pass, with equal bits; 16-bit keys are sent."""
    layer, results = context_parallel(layer_of(dtype=torch.float32), init_device_mesh(DEVICE, (ranks(),))), []
    for repeat in (False, True):
        x = mine(hidden(16 * ranks(), dtype=torch.float32), 1)
        with torch.autocast(DEVICE, torch.bfloat16):
            o = checkpoint(layer, x, use_reentrant=False) if repeat else layer(x)
        layer.zero_grad()
        o.float().square().sum().backward()
        assert o.dtype == torch.bfloat16
        results.append([o.detach(), x.grad, *gradients(layer).values()])
    assert all(map(torch.equal, *results))


def first_calls_of_layers_that_differ_raise_on_all_ranks() -> None:
    group = dist.new_group()
    layer = context_parallel(layer_of(), group)

    def assert_raises(words: str, layer: nn.Module, S: int = 16) -> None:
        with pytest.raises(NsaSelError, match=words):
            layer(hidden(S))

    assert_raises(r"sizes\.q\[1\] is 24 there, 16 on rank 0", layer, 24 if rank() else 16)
    assert_raises("window is 13 there, 12 on rank 0", context_parallel(layer_of({**SMALL, "window": 12 + bool(rank())}), group))
    assert_raises("both_ends is True there, False on rank 0", context_parallel(layer_of(), group, both_ends=bool(rank())))
    layer.backend = "numba" if rank() else "sdpa-packed"
    assert_raises("backend is 'numba' there, 'sdpa-packed' on rank 0", layer)
    layer.backend = None
    with use_backend("sdpa-packed" if rank() else "choose-torch"):
        assert_raises("use_backend is 'sdpa-packed' there, 'choose-torch' on rank 0", layer)
    with torch.set_grad_enabled(rank() > 0):
        assert_raises("grads.* there", layer)
    layer.backend = "sdpa-packed"
    layer(hidden(24)).sum().backward()


def layers_take_slices_of_part_of_the_ranks() -> None:
    """The last rank runs the layer alone meanwhile."""
    first = dist.new_group(list(range(ranks() - 1)))
    whole, x = layer_of(), hidden(16 * (ranks() - 1))
    if rank() == ranks() - 1:
        whole(x)
        return
    o = context_parallel(layer_of(), first)(x[:, 16 * rank() :][:, :16])
    assert_same(o, whole(x)[:, 16 * rank() :][:, :16])


def wrong_slices_are_refused() -> None:
    layer, options = context_parallel(layer_of()), {name: size for name, size in SMALL.items() if name != "n"}
    tensors = sliced(call_of(16 * ranks(), torch.float32, options), 16, 4)
    other_keys = {**tensors, "k_cmp": tensors["k_slc"][:, :, :8]}
    fewer_rows = {**tensors, **{name: tensors[name][:, :8] for name in ROW_TENSORS}}
    assert_refused(
        ("q is of S = 6 rows; allowed: a multiple of compress_stride = 4", lambda: layer(hidden(6))),
        ("q is of S = 0 rows", lambda: layer(hidden(0))),
        (
            r"q is of S = 4 rows; allowed: a multiple of 2 \* compress_stride = 4 on each rank",
            lambda: context_parallel(layer_of(), both_ends=True)(hidden(4)),
        ),
        ("both_ends is 'yes'; allowed: True or False", lambda: context_parallel(layer_of(), both_ends="yes")),  # type: ignore[arg-type]
        (
            f"S is {2 * ranks() + 1}; allowed: a multiple of {2 * ranks()}, the number of slices",
            lambda: rank_rows(2 * ranks() + 1, both_ends=True),
        ),
        (
            r"k_cmp is of \d compressed keys; allowed: \d: those that begin in this rank's 16 keys",
            lambda: context_parallel_nsa_attention(**other_keys, **options),
        ),
        ("k_slc is of 16 positions; allowed: q's 8 rows", lambda: context_parallel_nsa_attention(**fewer_rows, **options)),
        ("exchange is 'all'", lambda: context_parallel(layer_of(), exchange="all")),  # type: ignore[arg-type]
        ("model is a Linear; allowed: one with NSAttention layers", lambda: context_parallel(nn.Linear(2, 2))),
        (r"model is with an NSAttention\(recompute=True\)", lambda: context_parallel(layer_of({**SMALL, "recompute": True}))),
    )


# FSDP2 and tensor parallelism


def msa_layer(warm_up: bool = False) -> MSAttention:
    torch.manual_seed(0)
    made = MSAttention(WIDTH, 2, 2, 4, block_size=8, n=2, loss_weight=0.5, backend="sdpa-packed", dtype=torch.float64).to(DEVICE)
    made.warm_up = warm_up
    return made


def sharded_layers_are_the_whole_layer() -> None:
    """FSDP2 over ranks that hold sequences, or slices of them: gradients of the mean of their losses, and the indexer's loss."""
    makes: tuple[Callable[[], nn.Module], ...] = (layer_of, msa_layer, functools.partial(msa_layer, warm_up=True))
    for make, (by_slices, both) in itertools.product(makes, ((False, False), (True, False), (True, True))):
        whole, part, x, cut = make(), make(), hidden(16 * ranks(), batch=2 * ranks()), both_ends if both else mine
        part = context_parallel(part, both_ends=both) if by_slices else part
        part = fully_shard(part, mesh=init_device_mesh(DEVICE, (ranks(),)))
        o = whole(x)
        weighted(o).sum().div(ranks()).backward()
        own = cut(x, int(by_slices))
        got = part(own)
        cut(weighted(torch.ones_like(o)), int(by_slices)).mul(got).sum().backward()
        assert_same((got, own.grad), (cut(o, int(by_slices)), ranks() * cut(x.grad, int(by_slices))))
        assert_same(gradients(part), gradients(whole))
        if isinstance(whole, MSAttention):
            loss = part.index_loss.clone()
            dist.all_reduce(loss)
            assert_same(loss / ranks(), whole.index_loss)
    sliced = context_parallel(msa_layer(), both_ends=True)
    assert_refused(
        ("exchange is rows; allowed: auto with MSAttention", lambda: context_parallel(msa_layer(), exchange="rows")),
        ("x is of S = 3 rows; allowed: an even number with both_ends", lambda: sliced(hidden(3), torch.arange(3, device=DEVICE))),
    )


def split_layers_are_the_whole_layer() -> None:
    """Tensor parallelism by groups, alone and below FSDP2; an optimizer's steps keep the layer whole."""
    both = init_device_mesh(DEVICE, (1, ranks()), mesh_dim_names=("dp", "tp"))
    for options, sharded in ((SMALL, False), (SLICES[16], False), (SMALL, True)):
        whole, part, x = layer_of(options, groups=ranks()), layer_of(options, groups=ranks()), hidden(19)
        part = tensor_parallel(part, both["tp"])
        part = fully_shard(part, mesh=both["dp"]) if sharded else part
        optimizers = [torch.optim.AdamW(layer.parameters(), foreach=True, eps=1.0) for layer in (whole, part)]
        for _ in range(2):
            results = []
            for layer, optimizer in zip((whole, part), optimizers, strict=True):
                optimizer.zero_grad()
                own = x.detach().requires_grad_()
                with CommDebugMode() as sent:
                    o = layer(own)
                    weighted(o).sum().backward()
                nn.utils.clip_grad_norm_(layer.parameters(), 10.0)
                results.append({"o": o.detach(), "x": own.grad, **gradients(layer)})
                optimizer.step()
            assert_same(results[1], results[0])
            parameters = sum(name.startswith("compress") for name in whole.state_dict())
            assert sharded or sent.get_comm_counts() == {torch.ops.c10d_functional.all_reduce: 2 + parameters}, (
                "one forward, and one for dx"
            )
        assert part.kv.weight.to_local().shape[0] == whole.kv.weight.shape[0] // ranks()
        assert set(part.state_dict()) == set(whole.state_dict())


def groups_that_ranks_do_not_divide_are_refused() -> None:
    torch.manual_seed(0)
    layer = NSAttention(WIDTH, 3, 1, 4)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ArgumentError, match=rf"mesh is of {ranks()} ranks; allowed: a divisor of groups = 3"):
        tensor_parallel(layer, init_device_mesh(DEVICE, (ranks(),)))
    assert all(torch.equal(x, before[name]) for name, x in layer.state_dict().items())


SLICED = (
    sliced_layers_are_the_whole_layer,
    sliced_calls_lose_no_more_than_whole_ones,
    sliced_layers_in_autocast_and_checkpoints,
)
THREE_RANKS = (*SLICED, layers_take_slices_of_part_of_the_ranks)
ANY_RANKS = (
    *SLICED,
    wrong_slices_are_refused,
    sharded_layers_are_the_whole_layer,
    split_layers_are_the_whole_layer,
    groups_that_ranks_do_not_divide_are_refused,
    first_calls_of_layers_that_differ_raise_on_all_ranks,
)


example, several = load("train_nsa_lm"), load("several_ranks")  # here, for all ranks that are forked


# DTensors


# The size that is cut, into no fewer parts than there are ranks, and its dimension: of q; of k and v; of ranges.
CUTS = {"B": (0, 0, 0), "G": (2, 1, 2), "S": (1, None, 1), "h": (3, None, None)}


def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (ranks(),))


def placed(x: Tensor, dim: int | None, on: DeviceMesh) -> DTensor:
    return distribute_tensor(x.detach(), on, [Replicate() if dim is None else Shard(dim)]).requires_grad_(x.requires_grad)


def dtensors_need_no_communication() -> None:
    on = mesh()
    for name, (rows, keys, index) in CUTS.items():
        q, k, v, selection = problem(**{} if name == "S" else {name: ranks()})
        do = make_grads(q, v)[0]
        for backend in BACKENDS:
            o, lse = selection_attention(q, k, v, selection, return_lse=True, backend=backend)
            wanted = o, *torch.autograd.grad(o, (q, k, v), do)
            parts = placed(q, rows, on), placed(k, keys, on), placed(v, keys, on)
            cut = Selection.from_ranges(placed(selection.ranges, index, on), BLOCK)
            do_cut = placed(do, rows, on)
            with CommDebugMode() as traffic:
                got = selection_attention(*parts, cut, backend=backend)
                grads = torch.autograd.grad(got, parts, do_cut)
            assert traffic.get_total_counts() == 0, f"{name}: {traffic.get_comm_counts()}"
            assert decisions()[-1].forward == backend
            assert got.placements == (Shard(rows),), name
            assert grads[1].placements == ((Partial() if keys is None else Shard(keys)),), name
            full = [x.full_tensor() for x in (got, *grads)]
            if keys is not None and EQUAL[backend]:  # nothing is summed over ranks; how a GPU cuts the sums of dk, dv is not compared
                assert all(map(torch.equal, full[: 1 if DEVICE == "cuda" else 4], wanted)), name
            if my_turn():
                assert_forward((full[0], lse), q, k, v, selection.ranges)
                assert_gradients(tuple(full[1:]), q, k, v, selection.ranges, do)


def dtensors_of_uneven_parts_and_of_two_dimensions() -> None:
    """The last rank has a group and a row less than the others; one selection for all groups; a mesh of batch entries by groups;
    autocast."""
    q, k, v, selection = problem(ROWS - 1, ROWS, G=2 * ranks() - 1)
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
    one = selection.ranges[:, :, :1]
    parts = (distribute_tensor(x.detach(), flat, [Shard(dim)]) for x, dim in ((q, 2), (k, 1), (v, 1)))
    got = selection_attention(*parts, Selection.from_ranges(distribute_tensor(one, flat, [Replicate()]), BLOCK), return_lse=True)
    assert_forward(tuple(x.full_tensor() for x in got), q, k, v, one)
    with torch.autocast(DEVICE, dtype=torch.float16):
        half = selection_attention(*(placed(x, dim, flat) for x, dim in ((q, 2), (k, 1), (v, 1))), placed(selection.ranges, 2, flat))
    assert (half.dtype, half.placements) == (torch.float16, (Shard(2),))


def dtensors_are_redistributed_where_needed() -> None:
    """DTensor gathers keys that are sharded along the sequence, and shards a replicated selection."""
    q, k, v, selection = problem(B=ranks())
    on = mesh()
    o = selection_attention(placed(q, 1, on), placed(k, 2, on), placed(v, 2, on), placed(selection.ranges, None, on))
    assert_forward((o.full_tensor(), selection_attention(q, k, v, selection, return_lse=True)[1]), q, k, v, selection.ranges)
    with pytest.raises(ArgumentError, match=r"selection is a Tensor; allowed: a DTensor on the mesh of q"):
        selection_attention(placed(q, 1, on), placed(k, 2, on), placed(v, 2, on), selection)
    with (
        use_backend("sdpa-packed"),
        pytest.raises(BackendError, match="or calls of DTensors, that need gradients"),
    ):
        selection_attention(placed(q, 0, on), placed(k, 0, on), placed(v, 0, on), placed(selection.ranges, 0, on))


# Models


def the_example_trains_as_one_rank() -> None:
    """A run that goes on in another way after every step has the losses of one that one rank alone made."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        text, how, sizes = ROOT / "docs", {"minutes": 9, "every": 1, "graph": False}, replace(example.TINY, layers=1, batch=ranks())

        def losses(folder: str, sizes: Any, steps: int, parallel: Any = None) -> list[float]:
            rows = example.train(Path(folder), sizes, None, torch.device(DEVICE), text, steps=steps, ranks=parallel, **how)
            return [row[name] for row in rows for name in ("loss", "index_loss") if name in row]

        for attention, ways in {"nsa": several.WAYS, "msa": (several.CONTEXT, several.DATA)}.items():
            sizes = replace(sizes, attention=attention, dense_steps=1)
            alone = losses(f"{own}/{attention}", sizes, len(ways))
            for steps, way in enumerate(ways, 1):
                parallel, _ = several.join(way, sizes, torch.device(DEVICE))
                found = losses(f"{shared[0]}/{attention} together", sizes, steps, parallel)
                dist.barrier()  # the first rank wrote the checkpoint
            assert found == pytest.approx(alone, rel=1e-4 if DEVICE == "cpu" else 1e-3)  # bfloat16 on a GPU
        one, device = replace(sizes, batch=1), torch.device(DEVICE)
        assert_refused(
            (f"--batch is 1; .* multiple of {ranks()}, on {ranks()} ranks", lambda: several.join("data", one, device)),
            ("--parallel is 'pipeline'; allowed: data, context, tensor", lambda: several.join("pipeline", sizes, device)),
        )
        dist.barrier()
