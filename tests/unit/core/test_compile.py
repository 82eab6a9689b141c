"""Check compiled calls (bit-equal to eager ones, one graph for all lengths, refusals with remedies) and PyTorch features around calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from nsa_sel import (
    NSAttention,
    Selection,
    choose_blocks_with_kvcache,
    compressed_attention,
    decisions,
    selection_attention,
    selection_attention_with_kvcache,
    sliding_window_attention,
    use_backend,
)
from nsa_sel.backends import numba_cpu
from nsa_sel.core import attend as attend_module
from nsa_sel.core import window as window_calls
from nsa_sel.errors import BackendError, NsaSelError
from tests.contract.lanes import lanes
from tests.helpers.calls import assert_refused
from tests.helpers.cases import make_blocks, make_grads, make_qkv

OPS = torch.ops.nsa_sel
on_devices = pytest.mark.parametrize(
    ("backend", "device"), [pytest.param(lane.name, lane.device, marks=lane.marks()) for lane in lanes("cpu", "cuda")]
)
ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CPU = ("numba", "sdpa-packed")
BLOCK = 16
PLAIN_LOOPS = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}  # of inductor, compiled in half the time


@pytest.fixture(autouse=True, scope="module")
def shared_graphs() -> Iterator[None]:
    """Share graphs between tests of a function; PyTorch stops compiling at 8 graphs per function."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


pytestmark = pytest.mark.usefixtures("packed_sdpa")


def attend(q: Tensor, k: Tensor, v: Tensor, selection: Any, **options: Any) -> Any:
    return selection_attention(q, k, v, selection, **options)


def from_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **options: Any) -> Any:
    return selection_attention(q, k, v, Selection.from_blocks(blocks, BLOCK), **options)


def by_name(q: Tensor, k: Tensor, v: Tensor, selection: Selection) -> Tensor:
    """Return o of the op."""
    return OPS.selection_forward(q, k, v, selection.ranges, None, BLOCK, None, False, None, None, True)[0]  # type: ignore[no-any-return]


def compiled(work: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    return torch.compile(work, fullgraph=True, dynamic=True, backend=backend)


def problem(
    S: int, G: int = 2, h: int = 3, *, B: int = 2, S_kv: int | None = None, Dv: int = 16, n: int = 3
) -> tuple[Tensor, Tensor, Tensor, Selection]:
    """q, k, v that require gradients, and n blocks per row."""
    q, k, v = make_qkv(B, S, G, h, 16, Dv, S_kv=S_kv, seed=S, requires_grad=True)
    return q, k, v, make_blocks(B, S, G, k.shape[2], n, BLOCK, seed=S)


def problem_on(device: str, S: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Selection]:
    """Return q, k, v of bfloat16 on a GPU, of float32 on a CPU, and 3 blocks per row."""
    h, D, dtype = (3, 16, torch.float32) if device == "cpu" else (4, 64, torch.bfloat16)
    q, k, v = make_qkv(S=S, G=2, h=h, Dk=D, dtype=dtype, device=device, seed=seed, requires_grad=True)
    return q, k, v, make_blocks(1, S, 2, S, 3, BLOCK, seed=seed, device=device)


def results(work: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv with random gradients of both o and lse."""
    o, lse = work(q, k, v, *others, return_lse=True, **options)
    filled = lse > float("-inf")
    grads = make_grads(q, v)
    return o, lse, *torch.autograd.grad((o, lse), (q, k, v), (grads[0], grads[1] * filled))


def assert_equal(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Equal bits, dtypes and strides."""
    for mine, other in zip(got, wanted, strict=True):
        assert mine.dtype == other.dtype
        assert mine.stride() == other.stride()
        assert torch.equal(mine, other)


# Compiled calls


def counting() -> tuple[Any, Counter[str]]:
    """A backend of torch.compile that runs graphs unchanged, and counts them."""
    graphs: Counter[str] = Counter()

    def taken(direction: str) -> Callable[..., Any]:
        def compiler(graph: Any, _: Any) -> Any:
            graphs[direction] += 1
            return make_boxed_func(graph.forward)

        return compiler

    return aot_autograd(fw_compiler=taken("forward"), bw_compiler=taken("backward")), graphs


@on_devices
@pytest.mark.parametrize("groups", [2, 1], ids=["of-each-group", "of-all-groups"])
def test_one_graph_serves_every_length(backend: str, device: str, groups: int) -> None:
    counter, graphs = counting()
    fast = compiled(from_blocks, counter)
    for S in (80, 128, 96):  # none is a head dim: PyTorch treats sizes that are equal in the first call as one
        q, k, v, selection = problem_on(device, S)
        selection = Selection(selection.ranges[:, :, :groups].contiguous(), BLOCK)
        got = results(fast, q, k, v, selection.block_indices, backend=backend)
        decision = decisions()[-1]
        assert (decision.forward, decision.backward, decision.request.S) == (backend, backend, S)
        assert_equal(got, results(attend, q, k, v, selection, backend=backend))
    assert graphs == {"forward": 1, "backward": 1}


def test_inductor_is_bit_equal_to_eager() -> None:
    def work(q: Tensor, k: Tensor, v: Tensor, selection: Selection, **options: Any) -> Any:
        return selection_attention(q * 2, k, v, selection, **options)

    fast = compiled(work, "inductor")
    with torch._inductor.config.patch(PLAIN_LOOPS):
        for S in (64, 96):
            q, k, v, selection = problem(S, Dv=24)
            assert_equal(results(fast, q, k, v, selection), results(work, q, k, v, selection))


def windows(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, return_lse: bool) -> tuple[Tensor, ...]:
    """(o, lse) or (o,) of windows, with bounds those of a packed batch."""
    if bounds is not None:
        q, k, v = q[0], k[0].transpose(0, 1), v[0].transpose(0, 1)
    o = sliding_window_attention(q * 2, k, v, 20, cu_seqlens=bounds, return_lse=return_lse)  # type: ignore[call-overload]
    return o if return_lse else (o,)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_one_graph_of_windows_serves_every_length(packed: bool, return_lse: bool) -> None:
    counter, graphs = counting()
    for S in (70, 150, 97):
        q, k, v, _ = problem(S, B=1 if packed else 2)
        bounds = torch.tensor([0, S // 3, S - 1]) if packed else None  # the last row is padding
        both = [work(q, k, v, bounds, return_lse) for work in (compiled(windows, counter), windows)]
        do = [torch.randn_like(x) for x in both[0]]
        assert all(map(torch.equal, *((*outputs, *torch.autograd.grad(outputs, (q, k, v), do)) for outputs in both)))
    assert graphs == {"forward": 1, "backward": 1}


def test_a_layer_trains_at_every_length_with_two_graphs() -> None:
    backend, graphs = counting()
    layer = NSAttention(16, 1, 2, 8, n=4, block_size=32, window=64)
    fast = torch.compile(layer, fullgraph=True, backend=backend)  # the first length is static, the second makes it a symbol
    for S in (256, 200, 300):
        x = torch.randn(2, S, 16, requires_grad=True)
        inputs = (x, *layer.parameters())
        got, wanted = fast(x), layer(x)
        do = torch.randn_like(wanted)
        torch.testing.assert_close(*((o, *torch.autograd.grad(o, inputs, do)) for o in (got, wanted)), rtol=1e-4, atol=1e-5)
    assert graphs == {"forward": 2, "backward": 2}


def test_export_of_a_layer_takes_any_length() -> None:
    layer = NSAttention(16, 1, 2, 8, n=4, block_size=32, window=64).requires_grad_(False)
    program = torch.export.export(layer, (torch.randn(2, 256, 16),), dynamic_shapes={"x": {1: torch.export.Dim.DYNAMIC}})
    x = torch.randn(2, 300, 16)
    torch.testing.assert_close(program.module()(x), layer(x))


def test_every_form_of_the_call_compiles_into_one_graph() -> None:
    """Positions and scale, ranges, scores, decode, only o."""
    q, k, v, selection = problem(64)
    q_pos, scores = torch.arange(64) // 2, torch.randn(2, 64, 2, 4)

    def work(q: Tensor, k: Tensor, v: Tensor, selection: Selection, row: Tensor, of_row: Tensor) -> list[Tensor]:
        return [
            *selection_attention(q, k, v, selection, scale=0.3, q_pos=q_pos, return_lse=True),
            *selection_attention(q, k, v, selection.ranges, return_lse=True),
            *selection_attention(q, k, v, Selection.from_scores(scores, 3, BLOCK), return_lse=True),
            *selection_attention(row, k, v, Selection.from_ranges(of_row), return_lse=True),
            selection_attention(q, k, v, selection),
        ]

    inputs = (q, k, v, selection, q[:, -1].detach().requires_grad_(), selection.ranges[:, -1])
    wanted, got = work(*inputs), compiled(work)(*inputs)
    assert_equal(tuple(got), tuple(wanted))
    losses = (torch.stack([x[x.isfinite()].square().sum() for x in outputs]).sum() for outputs in (got, wanted))
    assert_equal(*(torch.autograd.grad(loss, (q, k, v, inputs[4])) for loss in losses))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_calls_over_a_cache_run_between_graphs(device: str) -> None:
    """They are no ops. PyTorch 2.11 could not trace their checks and decisions, and raised an internal error."""
    k, v, lengths = torch.randn(2, 40, 1, 8, device=device), torch.randn(2, 40, 1, 8, device=device), torch.tensor([40, 17], device=device)

    def work(q: Tensor) -> Tensor:
        q = q * 2
        selection = choose_blocks_with_kvcache(q, k, lengths, block_size=16, n=2)
        return selection_attention_with_kvcache(q, k, v, selection, lengths) + 1  # type: ignore[no-any-return]

    counter, q = CompileCounter(), torch.randn(2, 1, 1, 4, 8, device=device)
    assert torch.equal(torch.compile(work, backend=counter)(q), work(q))
    assert counter.frame_count == counter.op_count == 2


def test_a_write_to_block_indices_changes_no_selection_made_before() -> None:
    q, k, v = make_qkv(S=4, S_kv=64)

    def step(indices: Tensor) -> Any:
        selection = Selection.from_blocks(indices, BLOCK)
        indices.fill_(2)
        return attend(q, k, v, selection)

    indices = torch.tensor([0, 1], dtype=torch.int32).repeat(*q.shape[:3], 1)
    wanted = attend(q, k, v, Selection.from_blocks(indices.clone(), BLOCK))
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(indices), wanted)


def test_flags_are_read_when_the_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, graphs = counting()
    work = compiled(attend, counter)
    q, k, v, selection = problem(64)
    for name in CPU:
        monkeypatch.setenv("NSA_SEL_BACKEND", name)
        assert_equal(results(work, q, k, v, selection), results(attend, q, k, v, selection))
        assert decisions()[-2].forward == decisions()[-1].forward == name
    assert graphs == {"forward": 1, "backward": 1}


def test_eager_calls_skip_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attend_module, "_traced", None)
    results(attend, *problem(64), backend="sdpa-packed")
    assert decisions()[-1].forward == "sdpa-packed"


def test_compiled_calls_fall_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSA_SEL_BACKEND")
    given = problem(64)
    wanted = results(attend, *given, backend="sdpa-packed")
    for direction in ("forward", "backward"):
        monkeypatch.setattr(numba_cpu, direction, mock.Mock(side_effect=RuntimeError("out of order")))
    with pytest.warns(RuntimeWarning, match="sdpa-packed runs calls"):
        assert_equal(results(compiled(attend), *given), wanted)


def test_export_of_choices_takes_any_length() -> None:
    """S_kv is then a symbol of PyTorch's, which is no int."""
    sizes = {"compress_block": 4, "compress_stride": 2, "block_size": 8, "n": 2, "local": 1}

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, k_cmp: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
            o, chosen = compressed_attention(q, k_cmp, k_cmp, S_kv=k.shape[2], **sizes)
            best = Selection.from_scores(scores, 2, 8, 1, 1, S_kv=k.shape[2])
            return o, *(selection_attention(q, k, k, selection) for selection in (chosen, best))

    def arguments(S: int) -> tuple[Tensor, ...]:
        return torch.randn(1, S, 2, 2, 8), torch.randn(1, 2, S, 8), torch.randn(1, 2, S // 2 - 1, 8), torch.randn(1, S, 2, -(-S // 8))

    dynamic = [dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for dims in ((1,), (2,), (2,), (1, 3))]
    program = torch.export.export(Model(), arguments(32), dynamic_shapes=dynamic)
    for S in (32, 58):
        given = arguments(S)
        assert_equal(program.module()(*given), Model()(*given))


# The ops themselves


def check_ops(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: Selection, checks: Sequence[str], with_lse: bool = True) -> None:
    """torch.library.opcheck of both ops; q, k, v want gradients."""
    facts = (selection.ranges, None, BLOCK, None, selection.disjoint, 0.25, backend)
    torch.library.opcheck(OPS.selection_forward.default, (q, k, v, *facts, True), test_utils=checks)
    q, k, v = (x.detach() for x in (q, k, v))
    o, lse = OPS.selection_forward(q, k, v, *facts, False)
    do, dlse = make_grads(q, v)
    torch.library.opcheck(OPS.selection_backward.default, (do, dlse if with_lse else None, q, k, v, o, lse, *facts), test_utils=checks)


@on_devices
def test_the_ops_pass_opcheck(backend: str, device: str) -> None:
    given = problem(2, 1, 1, B=1, S_kv=32, n=1) if device == "cpu" else problem_on(device, 64)
    check_ops(backend, *(x.detach().half().requires_grad_() for x in given[:3]), given[3], ALL_CHECKS)
    q, k, v, selection = problem_on(device, 32)
    check_ops(backend, q, k, v, Selection(selection.ranges[:, :, :1].contiguous(), BLOCK), ALL_CHECKS[:3])


@pytest.mark.parametrize("triton", [False, True])
def test_the_ops_of_windows_pass_opcheck(monkeypatch: pytest.MonkeyPatch, triton: bool) -> None:
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: triton and kernels.name == "Triton")
    q, k, v, _ = problem(9, 1, 1, B=1)
    do, dlse = make_grads(q, v)
    for with_lse, bounds in ((True, None), (False, torch.tensor([0, 3, 8]))):
        inputs = (q, k, v, bounds, 4, 0.25, with_lse, True)
        torch.library.opcheck(OPS.window_forward.default, inputs, test_utils=ALL_CHECKS)
        o, lse = OPS.window_forward(*(x.detach() for x in (q, k, v)), *inputs[3:])
        inputs = (do, dlse if with_lse else None, q.detach(), k.detach(), v.detach(), o, lse, *inputs[3:-1])
        torch.library.opcheck(OPS.window_backward.default, inputs, test_utils=ALL_CHECKS)


# Refusals

traced_errors = pytest.mark.skipif(torch.__version__ < "2.9", reason="torch 2.8 raises an error of its own, without the message of ours")


@traced_errors
def test_bad_input_is_refused_while_tracing() -> None:
    """With fullgraph=True PyTorch raises its own error, which contains ours."""
    q, k, v, selection = problem(64)
    other = Selection.from_ranges(selection.ranges[:, :32], BLOCK)
    assert_refused(
        ("selection is over rows.*Remedy: one set of ranges per query row", lambda: compiled(attend)(q, k, v, other)),
        ("k is of head dimension.*Remedy: project q and k to the same size", lambda: compiled(attend)(q, k[..., :8], v, selection)),
        ("k is of strides.*Remedy: call k.contiguous", lambda: compiled(attend)(q, k.mT.contiguous().mT, v, selection)),
        ("k is of dtype torch.float64.*Remedy", lambda: compiled(attend)(q, k.double(), v, selection)),
        ("selection.*a int.*make one with Selection.from_ranges", lambda: compiled(attend)(q, k, v, 3)),
        ("q.*a int.*wrap it in torch.as_tensor", lambda: compiled(attend)(3, k, v, selection)),
        ("scale.*'x'.*pass a Python float", lambda: compiled(attend)(q, k, v, selection, scale="x")),
        error=RuntimeError,
    )


def test_bad_input_is_refused_when_the_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of values and of this machine's backends raise our own errors."""
    q, k, v, selection = problem(64)
    work, twice = compiled(attend, "eager"), torch.ones(2, 64, 2, 2, dtype=torch.int32)
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    assert_refused(
        ("q_pos is from 9 to 72; allowed", lambda: work(q, k, v, selection, q_pos=torch.arange(64) + 9)),
        ("did you mean 'numba'", lambda: work(q, k, v, selection, backend="nmba")),
        ("has a block twice", lambda: compiled(from_blocks, "eager")(q, k, v, twice)),
        error=NsaSelError,
    )


@traced_errors
def test_use_backend_is_refused_around_compiled_calls_with_gradients() -> None:
    """The backward pass would not see it: backward runs later, perhaps outside of the block."""
    q, k, v, selection = problem(64)

    def inside(q: Tensor) -> Any:
        with use_backend("numba"):
            return selection_attention(q, k, v, selection)

    with pytest.raises(RuntimeError, match="Remedy: pass backend="):
        compiled(inside)(q)
    work = compiled(attend)
    with use_backend("sdpa-packed"):
        with pytest.raises(BackendError, match="Remedy: pass backend=, or set NSA_SEL_BACKEND"):
            work(q, k, v, selection)
        with torch.no_grad():
            assert torch.equal(work(q, k, v, selection), attend(q, k, v, selection))
        assert (decisions()[-2].forward, decisions()[-2].request.needs_grad) == ("sdpa-packed", False)
        work(q, k, v, selection, backend="numba")
    assert decisions()[-1].forward == "numba"


def test_second_derivatives_are_refused() -> None:
    q, k, v, selection = problem(64)
    with pytest.raises(BackendError, match=r"no second derivative.*Remedy"):
        torch.autograd.grad(attend(q, k, v, selection).sum(), q, create_graph=True)
    (dq,) = torch.autograd.grad(by_name(q, k, v, selection).sum(), q, create_graph=True)
    with pytest.raises(BackendError, match=r"no second derivative.*Remedy"):
        dq.sum().backward()


@traced_errors
def test_torch_func_is_refused() -> None:
    q, k, v, selection = problem(64)
    q, k, v = (x.detach() for x in (q, k, v))

    total = lambda q: selection_attention(q, k, v, selection).sum()  # noqa: E731
    mapped = lambda q: torch.func.vmap(total)(q[None])  # noqa: E731
    of_op = lambda q: by_name(q, k, v, selection).sum()  # noqa: E731
    for work in (
        mapped, torch.func.grad(total), torch.func.jacrev(total), lambda q: torch.func.jvp(total, (q,), (q,)), compiled(mapped),
        torch.func.grad(of_op), lambda q: torch.func.vmap(of_op)(q[None]),
    ):  # fmt: skip
        with pytest.raises((BackendError, RuntimeError), match="make its dimension part of the batch B"):
            work(q)


# PyTorch features


def test_checkpointing_is_bit_equal() -> None:
    def work(q: Tensor, k: Tensor, v: Tensor, selection: Selection, **options: Any) -> Any:
        return checkpoint(attend, q, k, v, selection, use_reentrant=False, **options)

    q, k, v, selection = problem(64)
    wanted = results(attend, q, k, v, selection)
    assert_equal(results(work, q, k, v, selection), wanted)
    assert_equal(results(compiled(work), q, k, v, selection), wanted)
    checkpoint(attend, q, k, v, selection, use_reentrant=True).square().sum().backward()
    got = (q.grad, k.grad, v.grad)
    assert_equal(got, torch.autograd.grad(attend(q, k, v, selection).square().sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs_and_gradients(dtype: torch.dtype) -> None:
    """Inputs are cast, gradients have the inputs' dtypes, for the op, too. float64 stays."""
    q, k, v, selection = problem(64)
    k_wide, do = k.detach().to(torch.bfloat16).requires_grad_(), make_grads(q, v)[0].to(dtype)
    cast = [x.detach().to(dtype).requires_grad_() for x in (q, k_wide, v)]
    plain = attend(*cast, selection)
    wanted = plain, *(x.to(y.dtype) for x, y in zip(torch.autograd.grad(plain, cast, do), (q, k_wide, v), strict=True))

    works = (attend, by_name, compiled(attend)) if dtype == torch.bfloat16 else (attend, by_name)  # the dtype is all that differs
    for work in works:
        with torch.autocast("cpu", dtype=dtype):
            o = work(q, k_wide, v, selection)
        assert_equal((o, *torch.autograd.grad(o, (q, k_wide, v), do)), wanted)
    with torch.autocast("cpu", dtype=dtype):
        assert attend(q.double(), k.double(), v.double(), selection).dtype == torch.float64


@pytest.mark.parametrize("backend", [pytest.param(lane.name, marks=lane.marks()) for lane in lanes("cuda")])
def test_cuda_graphs_of_pytorch_are_bit_equal(backend: str) -> None:
    """PyTorch captures forward and backward, and replays them for new tensors and another selection."""
    torch._dynamo.reset()
    work = torch.compile(attend, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        given = problem_on("cuda", 96, seed=seed)
        torch.compiler.cudagraph_mark_step_begin()
        got = tuple(x.clone() for x in results(work, *given, backend=backend))
        assert_equal(got, results(attend, *given, backend=backend))
