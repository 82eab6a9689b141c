"""Parts of sliding windows: what Hopper's kernels launch fits, their plans have every key and row once, and Triton's two ways to load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from nsa_sel import sliding_window_attention
from nsa_sel.backends import window_cuda, window_triton
from nsa_sel.backends.cupy_cuda import arithmetic, compiler, launch, window
from nsa_sel.core import window as window_calls
from nsa_sel.core.call import WindowCall
from nsa_sel.errors import BackendError
from tests.helpers import cuda as emulate
from tests.helpers.aot import TARGETS
from tests.helpers.cases import make_qkv
from tests.helpers.cuda import compiled, needs_nvrtc
from tests.helpers.policy_cases import H200

ALL = {"forward_tiles.cu", "dq_tiles.cu", "dkdv_groups.cu"}
FITTING = {  # B, S, S_kv, G, h, Dk, Dv
    "h16": (1, 8192, 8192, 4, 16, 128, 128),
    "h8-64": (4, 8192, 8192, 2, 8, 64, 64),
    "h3": (1, 2000, 4000, 2, 3, 64, 128),
    "h48-192": (1, 500, 1100, 1, 48, 192, 128),
}
OF_TRITON = {"h8-64": {"dq_tiles.cu"}}


@needs_nvrtc
@pytest.mark.slow  # a compiler at work
@pytest.mark.parametrize("shape", ["h16", *(pytest.param(shape, marks=pytest.mark.thorough) for shape in FITTING if shape != "h16")])
def test_kernels_of_windows_fit(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    B, S, S_kv, G, h, Dk, Dv = FITTING[shape]
    q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=torch.bfloat16)
    monkeypatch.setattr(window_cuda, "device_info", lambda device: H200)
    monkeypatch.setattr(window_triton, "backward", lambda *_: None)
    monkeypatch.setattr(window_triton, "dq", lambda call, o, lse, *_: (o, lse, lse))

    def run() -> None:
        o, lse = window_cuda.forward(q, k, v, 512, 0.1)
        window_cuda.backward(q, k, v, o, lse, torch.empty_like(o), None, 512, 0.1)

    kernels = compiled(monkeypatch, 90, run)
    assert {kernel["kernel"] for kernel in kernels} == ALL - OF_TRITON.get(shape, set())
    for kernel in kernels:
        assert kernel["shared"] <= TARGETS[90][0] * 1024, kernel
        assert kernel["registers"] * kernel["threads"] <= 65536, kernel
        assert kernel["spilled"] == kernel["serialized"] == 0, kernel


def plan_of(monkeypatch: pytest.MonkeyPatch, S: int, S_kv: int, size: int, h: int, consumers: int) -> tuple[Tensor, Tensor]:
    """The steps of tiles of tokens, and the rows of tiles of keys, as window_plan.cu writes them."""
    source = (Path(emulate.__file__).parent / "emulation" / "window_plan.cu").read_text()
    headers = compiler.sources("forward_tiles.cu") | compiler.sources("dkdv_groups.cu")
    monkeypatch.setattr(compiler, "sources", lambda name: {**headers, name: source})
    emulate.emulated(monkeypatch)
    q, k, v = make_qkv(1, S, 1, h, 8, 8, S_kv=S_kv)
    call = WindowCall(q, k, v, size, 1.0)
    tiles, key_tiles, capacity = -(-S // (consumers * (64 // h))), -(-S_kv // window.BLOCK), S + S_kv
    steps = torch.zeros(tiles, 2 + capacity, dtype=torch.int32)
    rows = torch.zeros(key_tiles, 4 + capacity, dtype=torch.int32)
    sees = window.keys_of(call)
    macros = launch.macros(call, H=h, CONSUMERS=consumers, BLOCK=window.BLOCK, **sees.macros)
    values = (0, 0, 0, tiles, capacity, tiles, 1, 0, key_tiles, *launch.pointers(steps, rows))
    launch.start("window_plan.cu", macros, 0, max(tiles, key_tiles), 32, 0, *values, problem=arithmetic.problem(call, sees))
    monkeypatch.undo()
    return steps, rows


SIZES = [(200, 200, 70), (200, 200, 512), (333, 400, 128), (90, 700, 300), (150, 150, 1), (77, 501, 17), (40, 1000, 640)]  # S, S_kv, window


@emulate.needs_compiler
@pytest.mark.parametrize(("h", "consumers"), [(16, 3), (3, 2)])
def test_steps_are_the_keys_that_a_tile_sees(monkeypatch: pytest.MonkeyPatch, h: int, consumers: int) -> None:
    """From the first key that a token of the tile sees on, each key once; the whole ones, which take no mask, are seen by all tokens."""
    tokens = consumers * (64 // h)
    for S, S_kv, size in SIZES:
        position, key = torch.arange(S_kv - S, S_kv)[:, None], torch.arange(S_kv + 64)
        seen = (key <= position) & (position - key < size)
        steps, _ = plan_of(monkeypatch, S, S_kv, size, h, consumers)
        for tile, of_tile in enumerate(steps):
            rows = seen[tile * tokens : (tile + 1) * tokens]
            whole, count = of_tile[:2].tolist()
            keys = of_tile[2 : 2 + count]
            some = rows.any(0).nonzero().flatten()
            expected = torch.arange(int(some[0]), int(some[-1]) + 1, window.BLOCK)
            assert keys.sort().values.tolist() == expected.tolist()
            blocks = [bool(rows[:, x : x + window.BLOCK].all()) for x in keys.tolist()]
            assert blocks == [False] * (count - whole) + [True] * whole


@emulate.needs_compiler
@pytest.mark.parametrize(("h", "consumers"), [(16, 3), (3, 2)])
def test_rows_of_a_tile_of_keys(monkeypatch: pytest.MonkeyPatch, h: int, consumers: int) -> None:
    """All that see one of its keys; steps without a mask see all of them, and each step comes once."""
    tokens = 64 // h
    for S, S_kv, size in SIZES:
        position, key = torch.arange(S_kv - S, S_kv)[:, None], torch.arange(S_kv)
        seen = (key <= position) & (position - key < size)
        _, rows = plan_of(monkeypatch, S, S_kv, size, h, consumers)
        for tile, (first, count, begun, over, *places) in enumerate(rows.tolist()):
            keys = seen[:, tile * window.BLOCK : (tile + 1) * window.BLOCK]
            assert keys.any(1).nonzero().flatten().tolist() == list(range(first, first + count))
            steps = -(-count // tokens)
            assert sorted(places[:steps]) == list(range(steps))
            for step in range(min(steps, (S - first) // tokens)):  # TMA loads zeros for rows past the last
                assert (begun <= step < over) == bool(keys[first + step * tokens : first + (step + 1) * tokens].all())


def small_inputs() -> tuple[torch.Tensor, ...]:
    return make_qkv(1, 11, 1, 16, 16, 16, S_kv=30, requires_grad=True)


def test_triton_loads_by_pointers_what_it_does_by_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    config_of, runs = window_triton.config_of, []
    for loads in ("tma", "pointer"):
        own = lambda call, kernel, loads=loads: replace(config_of(call, kernel), block_l=16, rows=32, loads=loads)  # noqa: E731
        monkeypatch.setattr(window_triton, "config_of", own)
        inputs = small_inputs()
        o = sliding_window_attention(*inputs, 20)
        runs.append((o.detach(), *torch.autograd.grad(o.sum(), inputs)))
    for one, other in zip(*runs, strict=True):
        torch.testing.assert_close(one, other)


def test_the_op_of_windows_passes_opcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_qkv(1, 5, 1, 2, 16, S_kv=7, requires_grad=True)
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    torch.library.opcheck(torch.ops.nsa_sel.window_forward.default, (*inputs, None, 3, 0.25, True, True))


def test_kernels_of_windows_have_no_second_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_calls, "takes", lambda q, v, kernels: kernels.name == "Triton")
    inputs = small_inputs()
    with pytest.raises(BackendError, match="sliding_window_attention has no second derivative"):
        torch.autograd.grad(sliding_window_attention(*inputs, 20).sum(), inputs, create_graph=True)
