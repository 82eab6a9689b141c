"""`nsa_attention(recompute=True)`, and calls in units of a few groups: what the plain layer gives, for less memory."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import nsa_sel
from nsa_sel import NSAttention, by_groups, nsa_attention
from nsa_sel.backends import choose_triton
from nsa_sel.core import choose, run
from nsa_sel.core.call import device_info
from nsa_sel.core.choose_call import Rule
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.settings.config import settings_for
from nsa_sel.telemetry.events import tallies
from nsa_sel.three_branches import Inputs
from tests.api.test_nsa_attention import NAMES, SHAPES, WRONG, gradients, make
from tests.helpers.calls import each_of, refused
from tests.helpers.gpus import captured, replayed


def both_ways(tensors: dict[str, Tensor], options: dict[str, Any], *others: str) -> list[tuple[Tensor, ...]]:
    """o and gradients, plain and recomputed."""
    results = []
    for recompute in (False, True):
        o = nsa_attention(**tensors, **options, recompute=recompute)
        results.append((o, *gradients(o, tensors)))
    return results


def assert_equal(mine: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for i, (x, right) in enumerate(zip(mine, wanted, strict=True)):
        assert x.dtype == right.dtype
        assert torch.equal(x, right), ("o", *NAMES)[i]


def one_pair_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of one group of one sequence."""
    monkeypatch.setattr(by_groups, "settings_for", lambda device: types.SimpleNamespace(workspace_bytes=1))


@pytest.mark.usefixtures("cheapest_backend")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("own_q", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_and_gradients_are_bit_equal(shape: str, own_q: bool, dtype: torch.dtype) -> None:
    tensors, options = make(shape, dtype)
    if own_q:
        del tensors["q_cmp"]
    plain, recomputed = both_ways(tensors, options)
    assert_equal(recomputed, plain)


@pytest.mark.usefixtures("cheapest_backend")
@pytest.mark.parametrize("own_q", [False, True])
def test_units_of_one_group(own_q: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, options = make("two-groups")
    if own_q:
        del tensors["q_cmp"]
    wanted, _ = both_ways(tensors, options)
    one_pair_each(monkeypatch)
    o = nsa_attention(**tensors, **options, recompute=True)
    for mine, right in zip((o, *gradients(o, tensors)), wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(nsa_attention(**tensors, **options), wanted[0], rtol=1e-12, atol=1e-12)
    assert [(d.request.kind, d.request.B, d.request.G) for d in nsa_sel.decisions()[-8:]] == 4 * [("choose", 1, 1), ("attend", 1, 1)]


@pytest.mark.usefixtures("cheapest_backend")
@pytest.mark.parametrize(
    ("B", "G", "fitting", "sizes"),
    [
        (1, 4, 0, (1, 1)),
        (1, 4, 3, (1, 2)),
        (1, 5, 3, (1, 3)),
        (3, 4, 4, (1, 4)),
        (3, 4, 8, (2, 4)),
        (3, 4, 7, (1, 4)),
        (2, 3, 100, (2, 3)),
    ],
)
def test_units_fit_the_workspace(B: int, G: int, fitting: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are even, and cover every group once."""
    bound = fitting * 3 * 7 * 2 * 6 * 4
    monkeypatch.setattr(by_groups, "settings_for", lambda device: types.SimpleNamespace(workspace_bytes=bound))
    q, v = torch.zeros(B, 7, G, 2, 4), torch.zeros(B, G, 7, 6)
    units = by_groups.units_of(Inputs(q, None, None, None, v, None, None, None, None))
    assert {(b.stop - b.start, g.stop - g.start) for b, g in units} == {sizes}
    times = torch.zeros(B, G)
    for unit in units:
        times[unit] += 1
    assert bool((times == 1).all())


@pytest.mark.usefixtures("cheapest_backend")
@pytest.mark.parametrize("sizes", [(0, 3, 2), (1, 0, 2)])
def test_no_sequences_and_no_rows(sizes: tuple[int, int, int]) -> None:
    B, S, G = sizes
    tensors, options = make("two-groups", torch.float32)
    rows = {"q", "gates", "q_cmp"}
    cut = {name: x[:B, :S] if name in rows else x[:B, :, : 0 if name.endswith("cmp") else 5] for name, x in tensors.items()}
    leaves = {name: x.detach().requires_grad_() for name, x in cut.items()}
    o = nsa_attention(**leaves, **options, recompute=True)
    assert o.shape == (B, S, G, 2, 4)
    assert not any(x.any() for x in gradients(o, leaves))


@pytest.mark.usefixtures("cheapest_backend")
def test_inputs_and_blocks_are_all_that_is_saved() -> None:
    tensors, options = make("two-groups", torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        nsa_attention(**tensors, **options, recompute=True)
    *inputs, blocks = saved
    assert [x.data_ptr() for x in inputs] == [x.data_ptr() for x in tensors.values()]
    assert (blocks.dtype, blocks.shape) == (torch.int32, (2, 19, 2, 4))


@pytest.mark.usefixtures("cheapest_backend")
@pytest.mark.parametrize(
    ("wanted", "calls"),
    [
        (("k_win",), set()),
        (("v_slc", "v_win"), {"sdpa-packed"}),
        (("k_cmp", "q_cmp"), {"choose-torch"}),
        (("gates",), {"sdpa-packed", "choose-torch"}),
        (("q",), {"sdpa-packed"}),
        (("q_cmp", "gates"), {"sdpa-packed", "choose-torch"}),
    ],
)
def test_frozen_inputs_cost_nothing(wanted: tuple[str, ...], calls: set[str]) -> None:
    """The same gradients, and branches that no gradient needs are not computed again."""
    tensors, options = make("values-of-another-size", torch.float32)
    tensors = {name: x.detach().requires_grad_(name in wanted) for name, x in tensors.items()}
    leaves = [tensors[name] for name in wanted]
    plain = torch.autograd.grad(nsa_attention(**tensors, **options).sum(), leaves)
    o = nsa_attention(**tensors, **options, recompute=True)
    before = tallies()
    assert_equal(torch.autograd.grad(o.sum(), leaves), plain)
    assert {name[1] for name, number in tallies().items() if name[0] == "calls" and number > before.get(name, 0)} == calls


@pytest.mark.usefixtures("cheapest_backend")
def test_gradients_twice_checkpoints_and_no_second_derivative() -> None:
    tensors, options = make("two-groups", torch.float32)

    def work(*given: Tensor) -> Tensor:
        return nsa_attention(**dict(zip(NAMES, given, strict=True)), **options, recompute=True)

    plain, _ = both_ways(tensors, options)
    o, inputs = work(*tensors.values()), list(tensors.values())
    do = torch.ones_like(o)
    first, second = (torch.autograd.grad(o, inputs, do, retain_graph=True) for _ in range(2))
    assert_equal(first, second)
    assert_equal(first, torch.autograd.grad(o, inputs, do.sum().expand_as(do) / do.numel()))  # strides of 0
    checkpointed = checkpoint(work, *inputs, use_reentrant=False)
    assert_equal((checkpointed, *gradients(checkpointed, tensors)), plain)
    with pytest.raises(BackendError, match="nsa_attention has no second derivative"):
        torch.autograd.grad(work(*inputs).sum(), inputs, create_graph=True)
    with pytest.raises(BackendError, match="batched gradients"):
        torch.autograd.grad(work(*inputs), inputs, torch.ones(2, *o.shape), is_grads_batched=True)
    with pytest.raises(BackendError, match="nsa_attention is called inside a transform"):
        torch.func.vmap(lambda q: work(q, *inputs[1:]))(tensors["q"].unsqueeze(0))
    o = work(*inputs)
    with torch.no_grad():
        tensors["k_win"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.usefixtures("cheapest_backend")
@pytest.mark.parametrize("own_q", [False, True])
def test_autocast_is_that_of_the_forward_pass(own_q: bool) -> None:
    tensors, options = make("chunked-prefill", torch.float32)
    if own_q:
        del tensors["q_cmp"]
    results = []
    for recompute in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            o = nsa_attention(**tensors, **options, recompute=recompute)
        results.append((o, *gradients(o, tensors)))
    assert results[0][0].dtype == torch.bfloat16
    assert_equal(results[1], results[0])


@pytest.mark.usefixtures("cheapest_backend")
@pytest.mark.parametrize("recompute", [False, True])
def test_autocast_in_the_backward_pass_changes_nothing(recompute: bool) -> None:
    tensors, options = make("two-groups", torch.float32)
    o = nsa_attention(**tensors, **options, recompute=recompute)
    do = torch.ones_like(o)
    wanted = torch.autograd.grad(o, list(tensors.values()), do, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(o, list(tensors.values()), do)
    assert_equal((o, *found), (o, *wanted))


@pytest.mark.usefixtures("cheapest_backend")
def test_forced_backends_are_those_of_the_forward_pass() -> None:
    tensors, options = make("two-groups", torch.float32)
    with nsa_sel.use_backend("numba"):
        o = nsa_attention(**tensors, **options, recompute=True)
    named = nsa_attention(**tensors, **options, recompute=True, backend="numba")
    with nsa_sel.use_backend("sdpa-packed"):
        for each in (o, named):
            before = tallies()["calls", "numba"]
            gradients(each, tensors)
            assert tallies()["calls", "numba"] == before + 1


@pytest.mark.usefixtures("cheapest_backend")
def test_a_compiled_call_is_one_graph_that_saves_its_inputs() -> None:
    tensors, options = make("two-groups", torch.float32)
    del tensors["q_cmp"]
    plain, _ = both_ways(tensors, options)

    def work(*given: Tensor) -> Tensor:
        return nsa_attention(**dict(zip(tensors, given, strict=True)), **options, recompute=True)

    compiled: Any = torch.compile(work, fullgraph=True, backend="aot_eager")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = compiled(*tensors.values())
    own = {x.data_ptr() for x in tensors.values()}
    assert sum(x.numel() for x in saved if x.data_ptr() not in own and x.is_floating_point()) == 0
    assert_equal((o, *gradients(o, tensors)), plain)


@pytest.mark.usefixtures("cheapest_backend")
def test_a_layer_recomputes() -> None:
    """`NSAttention` under autocast, checkpointed and not, in training and without gradients."""
    sizes: dict[str, Any] = {"window": 6, "compress_block": 8, "compress_stride": 4, "block_size": 8, "n": 4}
    plain, recomputing = (nsa_sel.NSAttention(10, 2, 2, 4, **sizes, recompute=recompute) for recompute in (False, True))
    recomputing.load_state_dict(plain.state_dict())
    x = torch.randn(2, 21, 10, requires_grad=True)
    results = []
    for layer, checkpointed in ((plain, False), (recomputing, False), (recomputing, True)):
        with torch.autocast("cpu", torch.bfloat16):
            o = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        results.append((o, *torch.autograd.grad(o.sum(), (x, *layer.parameters()))))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
    with torch.no_grad():
        assert torch.equal(recomputing(x), plain(x))
    assert "recompute=True" in repr(recomputing)
    assert "recompute=False" in repr(plain)
    with pytest.raises(ArgumentError, match="recompute is None"):
        nsa_sel.NSAttention(10, 2, 2, 4, recompute=None)  # type: ignore[arg-type]


@pytest.mark.usefixtures("cheapest_backend")
@each_of(WRONG)
def test_wrong_calls_are_told_before_any_unit(changes: dict[str, Any], fragments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    one_pair_each(monkeypatch)
    tensors, options = make("two-groups", torch.float32)
    arguments = {**{name: x.detach() for name, x in tensors.items()}, **options, "recompute": True}
    refused(nsa_attention, arguments, changes, fragments)


@pytest.mark.usefixtures("cheapest_backend")
def test_keys_of_other_groups_and_a_flag_that_is_none() -> None:
    tensors, options = make("two-groups", torch.float32)
    with pytest.raises(ArgumentError, match="k_cmp is of shape"):
        nsa_attention(**{**tensors, "k_cmp": tensors["k_cmp"].repeat(1, 2, 1, 1)}, **options, recompute=True)
    with pytest.raises(ArgumentError, match="recompute is 1; allowed: True or False"):
        nsa_attention(**tensors, **options, recompute=1)  # type: ignore[arg-type]


@pytest.mark.usefixtures("cheapest_backend")
@pytest.mark.parametrize("backend", ["choose-torch", "choose-triton"])
def test_attention_again_is_that_of_the_choice(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit; the Triton backend does not choose again."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, *shape, 8, generator=generator) for shape in ((43, 1, 3), (1, 9), (1, 9)))
    decided = choose.decide_choice(q, k, v, Rule(8, 4, 8, 4, 1, 2), 43, 0.5, None, False, backend)
    o, lse, _, decision = run.run_forward(decided)
    monkeypatch.delattr(choose_triton, "best_blocks")
    again = choose.attend_again(decided)
    assert torch.equal(again[0], o)
    assert torch.equal(again[1], lse)
    assert again[2] == decision
    assert decision.forward == backend


def layer_inputs(S: int, G: int, h: int, D: int, seed: int = 0) -> list[Tensor]:
    """q, keys and values of the three branches, gates: bfloat16, at NSA's sizes, requiring gradients."""
    C = (S - 32) // 16 + 1
    torch.manual_seed(seed)
    shapes = [(1, S, G, h, D), *[(1, G, C, D)] * 2, *[(1, G, S, D)] * 4]
    tensors = [torch.randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    gates = torch.rand(1, S, G, h, 3, dtype=torch.bfloat16, device="cuda")
    return [x.requires_grad_() for x in (*tensors, gates)]


def beyond_inputs_and_outputs(work: Any) -> int:
    """Bytes of the peak."""
    work()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = work()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in outputs)


@pytest.mark.gpu
def test_a_recomputed_step_fits_the_workspace_and_its_kernels_temporaries() -> None:
    """At 32k: two of the four groups at once, where the plain layer holds the three outputs of all, and dq of all, one of which stays."""
    inputs = layer_inputs(32768, 4, 16, 128)
    do, bound = torch.randn_like(inputs[0]), settings_for(device_info(inputs[0].device)).workspace_bytes

    def step(recompute: bool) -> tuple[Tensor, ...]:
        o = nsa_attention(*inputs, recompute=recompute)
        return o, *torch.autograd.grad(o, inputs, do)

    recomputed, plain = (beyond_inputs_and_outputs(lambda way=way: step(way)) for way in (True, False))
    assert recomputed <= 1.5 * bound
    assert plain >= 5 * do.nbytes  # so that this test sees what it is about
    with torch.no_grad():
        assert beyond_inputs_and_outputs(lambda: (nsa_attention(*inputs),)) <= 1.25 * bound


@pytest.mark.gpu
def test_a_recomputed_step_is_bit_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a plain one, where all groups are one unit and so take the same kernels; and from run to run in units of one group."""
    inputs = layer_inputs(2100, 2, 4, 64)
    do = torch.randn_like(inputs[0])

    def step(recompute: bool) -> tuple[Tensor, ...]:
        o = nsa_attention(*inputs, recompute=recompute)
        return o, *torch.autograd.grad(o, inputs, do)

    plain = step(False)
    for _ in range(2):
        assert all(map(torch.equal, step(True), plain))
    monkeypatch.setattr(by_groups, "settings_for", lambda device: types.SimpleNamespace(workspace_bytes=1))
    first, second = step(True), step(True)
    assert all(map(torch.equal, first, second))
    for mine, right in zip(first, plain, strict=True):
        assert float((mine - right).norm() / right.norm()) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_a_graph_of_a_training_step_follows_its_inputs(recompute: bool) -> None:
    """Forward and backward of the whole layer, captured once and replayed with new inputs: what an eager step gives."""
    inputs = layer_inputs(2100, 2, 4, 64)
    do = torch.randn_like(inputs[0])

    def step() -> tuple[Tensor, ...]:
        o = nsa_attention(*inputs, recompute=recompute)
        return o, *torch.autograd.grad(o, inputs, do)

    graph, outputs = captured(step)
    for seed in (1, 2):
        with torch.no_grad():
            for old, new in zip(inputs, layer_inputs(2100, 2, 4, 64, seed), strict=True):
                old.copy_(new)
            do.normal_()
        assert all(map(torch.equal, replayed(graph, outputs), step()))


@pytest.mark.gpu
def test_a_graph_of_a_forward_pass_follows_its_input() -> None:
    layer = NSAttention(128, 2, 4, 32, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 1500, 128, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        graph, outputs = captured(lambda: (layer(x),))
        for _ in range(2):
            x.normal_()
            assert torch.equal(replayed(graph, outputs)[0], layer(x))


@pytest.mark.gpu
def test_checkpointed_layers_under_autocast_are_bit_equal() -> None:
    layers = [NSAttention(128, 2, 4, 32, device="cuda", recompute=recompute) for recompute in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(1, 1500, 128, device="cuda", requires_grad=True)
    results = []
    for layer in layers:
        for checkpointed in (False, True):
            with torch.autocast("cuda", torch.bfloat16):
                o = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            results.append((o, *torch.autograd.grad(o.float().sum(), (x, *layer.parameters()))))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))
