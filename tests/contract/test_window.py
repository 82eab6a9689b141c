"""The contract of `sliding_window_attention`, by everything that runs it on every device: chunks of SDPA, Triton's and CUDA's kernels.

A window is one range per row: the oracle and the baseline are those of selection attention.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nsa_sel import reset, sliding_window_attention
from nsa_sel.backends import window_cuda, window_triton
from nsa_sel.backends._window import chunks, packed, plain
from nsa_sel.backends.specs import ARITHMETIC_TILES, WINDOWS
from nsa_sel.core import registry
from nsa_sel.core import window as window_calls
from nsa_sel.core.call import WindowCall, device_info
from tests.helpers.cases import assert_forward, assert_gradients, make_grads, make_qkv
from tests.helpers.checks import new_memory_is_nan
from tests.helpers.gpus import captured, needs, needs_hopper, no_waiting, one_at_a_time, replayed
from tests.helpers.varlen_cases import hide_bounds

Shape = tuple[int, int, int, int, int, int, int, int]  # B, S, S_kv, G, h, Dk, Dv, window
SMALL: dict[str, Shape] = {
    "h1": (1, 70, 70, 1, 1, 16, 16, 37),
    "h3": (2, 21, 21, 1, 3, 16, 24, 9),
    "h12-cache": (1, 9, 30, 1, 12, 24, 16, 17),
    "h16": (1, 11, 40, 2, 16, 16, 16, 20),
    "192-128": (1, 20, 20, 1, 2, 192, 128, 18),
    "window-1": (1, 19, 19, 2, 2, 16, 16, 1),
    "window-over-S": (1, 35, 35, 1, 2, 16, 16, 1000),
    "few-keys-before": (1, 18, 25, 1, 4, 16, 16, 16),
    "decode": (3, 1, 45, 1, 4, 16, 16, 33),
    "one-key": (1, 1, 1, 1, 1, 8, 8, 4),
}
CHUNKED: dict[str, Shape] = {  # of more rows than one chunk has
    "chunks": (2, 131, 131, 2, 3, 16, 24, 37),
    "chunks-of-many-keys-before": (2, 45, 200, 2, 2, 16, 16, 50),
    "window-is-S": (1, 90, 90, 1, 2, 16, 16, 90),
}
LARGE: dict[str, Shape] = {
    "h16": (1, 500, 600, 2, 16, 128, 128, 160),
    "h1": (2, 300, 300, 2, 1, 64, 64, 101),
    "h2": (1, 400, 400, 1, 2, 64, 128, 64),
    "h3": (2, 331, 331, 2, 3, 64, 64, 100),
    "h12": (1, 333, 400, 1, 12, 128, 64, 77),
    "h48-192": (1, 200, 300, 1, 48, 192, 128, 70),
    "h64": (1, 150, 190, 1, 64, 128, 128, 65),
    "h96": (1, 70, 70, 1, 96, 64, 64, 40),
    "256": (1, 200, 200, 1, 4, 256, 256, 130),
    "320": (1, 140, 140, 1, 2, 320, 64, 33),
    "odd-head-dims": (1, 140, 140, 1, 2, 40, 24, 33),
    "window-1": (1, 200, 230, 1, 16, 128, 128, 1),
    "window-over-S": (2, 257, 300, 1, 16, 64, 64, 5000),
    "one-row": (3, 1, 500, 2, 16, 128, 128, 128),
}


class Kernels(NamedTuple):
    """Kernels that run windows, and their device. "interpreter" runs on a CPU."""

    name: str
    device: str

    @property
    def place(self) -> str:
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def shapes(self) -> dict[str, Shape]:
        if self.place == "cpu":
            return SMALL if self.name == "triton" else SMALL | CHUNKED
        return {name: shape for name, shape in LARGE.items() if self.takes(shape)}

    @property
    def dtypes(self) -> list[torch.dtype]:
        of_device = {"cpu": [torch.float16, torch.bfloat16, torch.float64], "interpreter": [torch.float16]}
        return of_device.get(self.device, [torch.bfloat16, torch.float16] + [torch.float32] * (self.name == "triton"))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def takes(self, shape: Shape) -> bool:
        _, S, S_kv, _, h, Dk, Dv, _ = shape
        if self.name == "cuda":
            return h > 1 and ARITHMETIC_TILES.fits(S, S_kv, h, Dk, Dv, 64)
        return self.name == "chunks" or max(Dk, Dv) <= 256

    def open(self, patch: pytest.MonkeyPatch) -> None:
        """Let these kernels run, and no others."""
        patch.setattr(registry, "broken", {})
        real = TAKES if self.device == "cuda" else lambda *_: True
        patch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name.lower() == self.name and real(q, v, kernels))
        if self.name == "cuda":
            for name in ("forward", "backward"):
                patch.setattr(window_triton, name, lambda *_: pytest.fail("Triton's kernels run"))
        elif self.device == "interpreter":  # few keys at once, so that short windows take several steps
            small = {name: replace(config, block_l=16, rows=32) for name, config in window_triton.CONFIGS.items()}
            patch.setattr(window_triton, "config_of", lambda call, kernel: small[kernel])

    def marks(self) -> list[pytest.MarkDecorator]:
        cuda = [needs("cupy-cuda"), needs_hopper] if self.name == "cuda" else []
        return [pytest.mark.gpu, *cuda] if self.device == "cuda" else [pytest.mark.slow] * (self.device == "interpreter")


TAKES = window_calls.takes  # of a GPU
LANES = [Kernels("chunks", "cpu"), Kernels("triton", "interpreter"), *(Kernels(name, "cuda") for name in ("chunks", "triton", "cuda"))]


def each(whats: Any = lambda lane: [None]) -> Any:
    found = [(lane, what) for lane in LANES for what in whats(lane)]
    parameters = [pytest.param(lane, what, marks=lane.marks(), id=f"{lane.name}-{lane.device}-{what}") for lane, what in found]
    return pytest.mark.parametrize(("lane", "what"), parameters)


@pytest.fixture(autouse=True)
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the kernels of the test's lane run."""
    lane = request.node.callspec.params.get("lane")
    if lane is not None:
        lane.open(monkeypatch)
    yield
    assert lane is None or not registry.broken


def inputs_of(lane: Kernels, shape: Shape, dtype: torch.dtype | None = None, seed: int = 0) -> tuple[tuple[Tensor, ...], int]:
    """q, k, v that require gradients, and the window."""
    B, S, S_kv, G, h, Dk, Dv, window = shape
    sizes = {"S_kv": S_kv, "dtype": dtype or lane.dtype, "device": lane.place, "seed": seed}
    return make_qkv(B, S, G, h, Dk, Dv, **sizes, requires_grad=True), window


def ranges_of(q: Tensor, S_kv: int, window: int) -> Tensor:
    """One range [B,S,G,1,2] per row."""
    end = torch.arange(S_kv - q.shape[1], S_kv) + 1
    return torch.stack((end - window, end), -1)[None, :, None, None].expand(*q.shape[:3], 1, 2)


def results(
    inputs: tuple[Tensor, ...], window: int, work: Any = sliding_window_attention, memory: Any = new_memory_is_nan, **options: Any
) -> tuple[Tensor, ...]:
    """o, lse, dq, dk, dv, in new memory that holds NaN."""
    with memory():
        outputs = work(*inputs, window, return_lse=True, **options)
        return *(x.detach() for x in outputs), *torch.autograd.grad(outputs, inputs, make_grads(inputs[0], inputs[2]))


def check(inputs: tuple[Tensor, ...], window: int, scale: float | None = None) -> tuple[Tensor, ...]:
    """Both outputs and all gradients within twice the error of plain PyTorch."""
    q, k, v = inputs
    ranges, found = ranges_of(q, k.shape[2], window), results(inputs, window, scale=scale)
    if q.dtype == torch.float64:  # as precise as the baseline
        wanted = results(tuple(x.detach().clone().requires_grad_() for x in inputs), window, scale=scale)
        assert all(map(torch.equal, found, wanted))
    assert_forward(found[:2], q, k, v, ranges.to(q.device), scale)
    assert_gradients(found[2:], q, k, v, ranges.to(q.device), *make_grads(q, v), scale)
    return found


@each(lambda lane: list(lane.shapes))
def test_window_shapes(lane: Kernels, what: str) -> None:
    """With o alone, which chunks compute otherwise, too."""
    inputs, window = inputs_of(lane, lane.shapes[what])
    if lane.device == "cuda":
        assert any(TAKES(inputs[0], inputs[2], kernels) for kernels in WINDOWS) == (what != "320")
    found, do = check(inputs, window), make_grads(inputs[0], inputs[2])[0]
    o, ranges = sliding_window_attention(*inputs, window), ranges_of(inputs[0], inputs[1].shape[2], window).to(lane.place)
    assert_forward((o, found[1]), *inputs, ranges)
    assert_gradients(torch.autograd.grad(o, inputs, do), *inputs, ranges, do)


@pytest.mark.parametrize("lane", LANES[:1], ids=["chunks"])
def test_window_of_many_heads_in_several_chunks(lane: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks shorter than the window, logits in several pieces, and K and V in a cache's layout."""
    monkeypatch.setattr(chunks, "_ROWS", 64)
    monkeypatch.setattr(plain, "_PIECE", 100_000)
    (q, k, v), window = inputs_of(lane, (2, 300, 310, 2, 2, 16, 16, 75))
    k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (k, v))
    check((q, k, v), window)


@each(lambda lane: [False, True] if lane.shapes.keys() & {"decode", "one-row"} else [])
def test_window_decode(lane: Kernels, what: bool) -> None:
    """A row without its dimension; with lse or without."""
    (q, k, v), window = inputs_of(lane, lane.shapes["one-row" if lane.device == "cuda" else "decode"])
    found = sliding_window_attention(q.squeeze(1), k, v, window, return_lse=what)
    whole = sliding_window_attention(q, k, v, window, return_lse=what)
    pairs = zip(found, whole, strict=True) if what else [(found, whole)]
    assert all(torch.equal(mine.unsqueeze(1), right) for mine, right in pairs)


@each(lambda lane: lane.dtypes)
def test_window_dtypes_and_a_negative_scale(lane: Kernels, what: torch.dtype) -> None:
    check(*inputs_of(lane, lane.shapes["h3"], what), scale=-0.3)


@each()
def test_window_strides(lane: Kernels, what: None) -> None:
    """A cache's layout [B,S_kv,G,D], heads that are not adjacent, and rows at odd addresses."""
    (q, k, v), window = inputs_of(lane, lane.shapes["h3"])
    wanted = results((q, k, v), window)
    q = q.detach().permute(3, 1, 0, 2, 4).contiguous().permute(2, 1, 3, 0, 4).requires_grad_()
    k, v = (x.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3).requires_grad_() for x in (k, v))
    torch.testing.assert_close(results((q, k, v), window), wanted)
    if lane.name != "cuda":  # its TMA does not load them
        padded = torch.nn.functional.pad(q.detach(), (1, 0))[..., 1:].requires_grad_()
        check((padded, k, v), window)


@each()
def test_window_reads_nothing_that_counts_for_nothing(lane: Kernels, what: None) -> None:
    """NaN in keys before all windows changes no bit, in a row's q it reaches no other row and no keys far away; reruns are bit-equal."""
    h, D, S = (3, 16, 80) if lane.place == "cpu" else (16, 128, 420)
    (q, k, v), window = inputs_of(lane, (1, S, S + 90, 1, h, D, D, 20))
    clean = results((q, k, v), window)
    for _ in range(2 if lane.place == "cpu" else 20):
        assert all(map(torch.equal, results((q, k, v), window), clean))
    unseen = (torch.arange(S + 90, device=lane.place) <= 90 - window)[:, None]
    spoilt = (x.detach().masked_fill(unseen, torch.nan).requires_grad_() for x in (k, v))
    assert all(map(torch.equal, results((q, *spoilt), window), clean))
    bad = q.detach().clone()
    bad[:, 50] = torch.nan  # sees the keys 121 to 140
    found = results((bad.requires_grad_(), k, v), window)
    rows, key = torch.arange(S) != 50, torch.arange(S + 90)
    far = (key < 64) | (key >= 192)
    if lane.name == "chunks":
        rows, far = torch.arange(S) < 0, key < 0  # which share matrix products over chunks
    assert all(torch.equal(x[:, rows], y[:, rows]) for x, y in zip(found[:3], clean[:3], strict=True))
    assert all(torch.equal(x[:, :, far], y[:, :, far]) for x, y in zip(found[3:], clean[3:], strict=True))


def packed_of(lane: Kernels) -> list[tuple[tuple[int, ...], int, bool]]:
    """Return bounds, the window, and if the host may not read the bounds, as on a GPU."""
    found = [(cu, 19, False) for cu in ((0, 21, 21, 22, 45, 60), (0, 3, 37), (0, 0, 5), (0, 64))] * (lane.name != "cuda")
    return found + [(found[0][0], window, hidden) for window in (1, 7, 100) for hidden in (False, True) if lane.name == "chunks"]


@each(packed_of)
def test_window_packed_batches(lane: Kernels, what: tuple[tuple[int, ...], int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence is as if it were alone; padding, which holds NaN, gets zeros, and lse = -inf."""
    cu, size, hidden = what
    if hidden:
        hide_bounds(monkeypatch)
        monkeypatch.setattr(packed, "_ROWS", 30)
    inputs, window = inputs_of(lane, (1, 64, 64, 1, 4, 16, 24, size))
    do, dlse = (x[0] for x in make_grads(inputs[0], inputs[2]))
    q, k, v = inputs[0].detach()[0], *(x.detach()[0].transpose(0, 1).contiguous() for x in inputs[1:])
    last = cu[-1]
    for x in (q, k, v, do, dlse):
        x[last:] = torch.nan
    given = tuple(x.requires_grad_() for x in (q, k, v))
    bounds = torch.tensor(cu, device=lane.place)
    with new_memory_is_nan():
        o, lse = sliding_window_attention(*given, window, cu_seqlens=bounds, return_lse=True)
        gradients = torch.autograd.grad((o, lse), given, (do, dlse))
    assert bool((lse[last:] == -torch.inf).all())
    assert all(int(torch.count_nonzero(x[last:])) == 0 for x in (o, *gradients))
    for begin, end in itertools.pairwise(cu):
        if begin < end:
            rows = slice(begin, end)
            own, grads = (
                (x[0][rows][None].detach(), *(y[rows].transpose(0, 1)[None].detach() for y in x[1:])) for x in ((q, k, v), gradients)
            )
            ranges = ranges_of(own[0], end - begin, window).to(lane.place)
            assert_forward((o[rows][None], lse[rows][None]), *own, ranges)
            assert_gradients(grads, *own, ranges, do[rows][None], dlse[rows][None])


@each()
def test_window_graphs_compile_and_autocast(lane: Kernels, what: None) -> None:
    """A replay follows what is written; a traced call gives an eager call's bits; float32 under autocast those of its dtype."""
    inputs, window = inputs_of(lane, lane.shapes["h3"])
    wanted = results(inputs, window)
    assert all(
        map(torch.equal, results(inputs, window, torch.compile(sliding_window_attention, backend="aot_eager", fullgraph=True)), wanted)
    )
    torch._dynamo.reset()  # later sizes would be traced as symbols, which takes long
    do = make_grads(inputs[0], inputs[2])[0]

    def step() -> tuple[Tensor, ...]:
        o = sliding_window_attention(*inputs, window)
        return o, *torch.autograd.grad(o, inputs, do)

    graph, outputs = captured(step, lane.place)
    for seed in (1, 2):
        with torch.no_grad():
            for x, new in zip(inputs, inputs_of(lane, lane.shapes["h3"], seed=seed)[0], strict=True):
                x.copy_(new)
        assert all(map(torch.equal, replayed(graph, outputs), step()))
    if lane.device == "cuda":
        with no_waiting():
            step()
    wide, dtype = tuple(x.detach().float().requires_grad_() for x in inputs), torch.float16
    with torch.autocast(lane.place, dtype):
        o = sliding_window_attention(*wide, window)
    assert o.dtype == dtype
    assert torch.equal(o, sliding_window_attention(*(x.to(dtype) for x in wide), window))
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(o.float().sum(), wide))


@each(lambda lane: ["o", "lse"])
def test_window_one_output_alone(lane: Kernels, what: str) -> None:
    inputs, window = inputs_of(lane, lane.shapes["h3"])
    grads = make_grads(inputs[0], inputs[2])
    both = sliding_window_attention(*inputs, window, return_lse=True)
    i = ("o", "lse").index(what)
    alone = torch.autograd.grad(both[i], inputs, grads[i], retain_graph=True)
    zeros = [grad if j == i else torch.zeros_like(grad) for j, grad in enumerate(grads)]
    torch.testing.assert_close(alone, torch.autograd.grad(both, inputs, zeros))


@pytest.mark.parametrize("broken", ["forward", "backward"])
@pytest.mark.parametrize("name", ["triton", "cuda"])
def test_window_after_a_failure(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next in line runs such heads, with one warning, until nsa_sel.reset()."""
    lane = Kernels("chunks" if name == "triton" else "triton", "interpreter")
    lane.open(monkeypatch)
    inputs, window = inputs_of(lane, SMALL["decode"])
    wanted, fail = results(inputs, window), mock.Mock(side_effect=RuntimeError("no such kernel"))
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: name == "cuda" or kernels.name == "Triton")
    if name == "cuda":
        monkeypatch.setattr(window_cuda, "forward", window_triton.forward)
        monkeypatch.setattr(window_cuda, "backward", window_triton.backward)
    monkeypatch.setattr(window_cuda if name == "cuda" else window_triton, broken, fail)
    for times in (1, 2):
        with pytest.warns(RuntimeWarning, match=r"kernels of sliding_window_attention failed, .*no such kernel"):
            torch.testing.assert_close(results(inputs, window, memory=contextlib.nullcontext), wanted)
        torch.testing.assert_close(results(inputs, window, memory=contextlib.nullcontext), wanted)
        assert fail.call_count == times
        reset()


@pytest.mark.gpu
@pytest.mark.parametrize("lane", LANES[-2:], ids=["triton", "cuda"])
def test_window_beyond_32_bits(lane: Kernels) -> None:
    """The last rows of q, whose offsets pass 2^31, equal those rows alone."""
    with one_at_a_time():
        (q, k, v), window = inputs_of(lane, (1, (1 << 20) + 192, (1 << 20) + 192, 1, 16, 128, 128, 64))
        few = tuple(x.detach().clone().requires_grad_() for x in (q[:, -256:], k[:, :, -512:], v[:, :, -512:]))
        do = torch.randn_like(q)
        wanted, found = sliding_window_attention(*few, window), sliding_window_attention(q, k, v, window)
        assert torch.equal(found[:, -256:], wanted)
        wanted, found = torch.autograd.grad(wanted, few, do[:, -256:]), torch.autograd.grad(found, (q, k, v), do)
        assert torch.equal(found[0][:, -256:], wanted[0])
        torch.testing.assert_close(*([x[:, :, -128:] for x in grads[1:]] for grads in (found, wanted)))


@pytest.mark.gpu
@pytest.mark.parametrize("lane", [pytest.param(LANES[-1], marks=LANES[-1].marks())], ids=["cuda"])
def test_window_calls_that_cuda_leaves_to_triton(lane: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, packed batches, rows that TMA cannot read, float32, and a single head."""
    (q, k, v), _ = inputs_of(lane, LARGE["h16"])
    bounds = window_calls.packed_bounds(torch.tensor([0, 100, 500], device="cuda"), 500)
    monkeypatch.setattr(window_triton, "forward", lambda *_: ("o", "lse"))
    for call in (
        WindowCall(q[:, :8], k, v, 512, 1.0),
        WindowCall(q, k, v, 512, 1.0, bounds),
        WindowCall(q, torch.nn.functional.pad(k, (0, 1))[..., :-1], v, 512, 1.0),
        WindowCall(*(x.float() for x in (q, k, v)), 512, 1.0),
        WindowCall(q[..., :1, :], k, v, 512, 1.0),
    ):
        assert not window_cuda.supports(call, device_info(q.device))
        assert window_cuda.forward(call.q, call.k, call.v, call.window, call.scale, call.bounds) == ("o", "lse")
