"""Launches that go straight to a compiled Triton kernel: only where Triton would have compiled the same one, and with its arguments."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import struct
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.tools.tensor_descriptor import TensorDescriptor

import nsa_sel
from nsa_sel.backends._triton import combine, kernel, tiles
from nsa_sel.backends._triton import kernel as kernel_module
from nsa_sel.backends._triton.arguments import Strides
from nsa_sel.backends._triton.kernel import Kernel, number_kinds, tensor_kinds
from nsa_sel.backends._triton.tiles import CheckedDescriptor
from nsa_sel.backends.launcher import buffers, cuda_driver, packing, replay
from nsa_sel.backends.specs import SPECS
from nsa_sel.core import registry
from nsa_sel.core.call import Call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.core.transforms import REPEATED
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.aot import launches_compile
from tests.helpers.cases import make_blocks, make_qkv
from tests.helpers.files import ROOT
from tests.helpers.gpus import forget_launches

NUMBERS = (0, 1, 2, 15, 16, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), -(2**31) - 16, 2**40)


def tensors() -> list[torch.Tensor]:
    whole = [torch.zeros(64, 32, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64)]
    return [*whole, *(x.view(-1)[1:] for x in whole), whole[0][::2]]


def kinds(x: Any) -> object:
    """What tells arguments like x apart in the cache of compiled kernels."""
    return number_kinds((x,))[0] if isinstance(x, int | float | tuple) else tensor_kinds((x,))[0][0]


def test_arguments_of_one_kind_take_one_kernel() -> None:
    """Kinds are at least as fine as what the compiler looks at (its own function says what that is)."""
    makers = (TensorDescriptor, CheckedDescriptor)
    blocks = ([16, 32], [32, 32])
    descriptors = [make(x, [64, 32], [32, 1], block) for x in tensors()[:3] for block in blocks for make in makers]
    tuples = [(48, 1), (48, 2), (48, (1, 2**31)), (32, (1, 2**40)), Strides((1, 16), (3,), (), (0, 5)), Strides((1, 32), (5,), (), (16, 7))]
    arguments = [None, 0.5, 2.0, *NUMBERS, *tuples, *tensors(), *descriptors]
    seen = [(kinds(x), native_specialize_impl(CUDABackend, x, False, True, True)) for x in arguments]
    for (one, theirs), (other, their_other) in itertools.combinations(seen, 2):
        assert one != other or theirs == their_other
    assert len({str(theirs) for _, theirs in seen[-len(descriptors) :]}) == 6  # the compiler sees no difference between the makers


def test_checked_descriptors_pass_the_checks_they_leave_out() -> None:
    x = torch.zeros(2, 3, 64, 40, dtype=torch.bfloat16).transpose(1, 2)[..., :32]
    mine, own = tiles.descriptor(x, 16, 32), TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, 16, 32])
    assert (mine.base is own.base, [*mine.shape], [*mine.strides]) == (True, own.shape, own.strides)
    assert (mine.block_shape, mine.padding) == (own.block_shape, own.padding)


class Compiled:
    """Stands for a compiled kernel: remembers what it was run with."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


class Function:
    """Stands for a kernel of two arguments and one constant: every launch through Triton makes a new compiled kernel."""

    arg_names = ("x", "n", "D")

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return launch


@pytest.fixture
def function(monkeypatch: pytest.MonkeyPatch) -> Function:
    """With a driver whose current stream is number 5."""
    monkeypatch.setattr(kernel_module, "CompiledKernel", Compiled)
    driver = types.SimpleNamespace(get_current_stream=lambda device: 5)
    monkeypatch.setattr(kernel_module.triton.runtime, "driver", types.SimpleNamespace(active=driver))
    return Function()


def test_a_like_launch_skips_the_compiler(function: Function) -> None:
    x, y = torch.zeros(8), torch.ones(8)
    fill = Kernel(function, D=64, num_warps=4)
    fill.launch(3, (x,), (32,))
    fill.launch(5, (y,), (48,))
    assert len(function.made) == 1
    assert function.made[0].launches == [(5, 1, 1, 5, 7, (4, 1, 0), None, None, None, y.data_ptr(), 48, 64)]
    others: list[tuple[torch.Tensor | None, int]] = [(x, 33), (x, 1), (x, 2**31), (x[1:], 32), (x.double(), 32)]
    for tensor, number in others:
        fill.launch(3, (tensor,), (number,))
    assert len(function.made) == 1 + len(others)
    Kernel(function, D=128, num_warps=4).launch(3, (x,), (32,))
    assert len(function.made) == 2 + len(others)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_launches_are_served(function: Function, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A hook in the chain, or one that replaces the chain, gets its launches through Triton; None is no hook."""
    fill, x = Kernel(function, D=64), torch.zeros(8)
    chain = getattr(triton.knobs.runtime, name)
    assert not kernel_module.hooked()
    fill.launch(3, (x,), (32,))
    for hook in (None, lambda _: None):
        monkeypatch.setattr(triton.knobs.runtime, name, hook)
        fill.launch(3, (x,), (32,))
    assert len(function.made) == 2
    monkeypatch.setattr(triton.knobs.runtime, name, chain)
    hook = print
    chain.add(hook)
    try:
        fill.launch(3, (x,), (32,))
    finally:
        chain.remove(hook)
    assert len(function.made) == 3
    fill.launch(3, (x,), (32,))
    assert len(function.made) == 3


def test_what_launches_remember_is_bounded(function: Function) -> None:
    fill, x = Kernel(function, D=64), torch.zeros(8)
    for S_kv in range(3 * kernel_module.REMEMBERED):
        fill.launch(3, (x,), (S_kv,))
    assert len(function.made) == 3  # other numbers, 1, and multiples of 16
    assert fill._number_kinds.cache_info().currsize == kernel_module.REMEMBERED


@pytest.fixture
def no_launches() -> Iterator[None]:
    """None remembered by a backend, before and after."""
    forget_launches()
    yield
    forget_launches()


@pytest.mark.usefixtures("no_launches")
@pytest.mark.parametrize("name", [spec.name for spec in SPECS if spec.framework == "triton"])
@pytest.mark.parametrize("S", [1, 40])  # one row is split among programs
def test_later_calls_run_what_the_first_had_compiled(function: Function, monkeypatch: pytest.MonkeyPatch, name: str, S: int) -> None:
    """Arguments in their order, and nothing of the first call kept: forward and backward, with their plans, twice."""
    compiled: list[tuple[str, list[Any]]] = []
    run: list[tuple[str, list[Any]]] = []

    def launched(kernel: Any, grid: tuple[int]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Any:
            passed = [*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :])]
            compiled.append((kernel.__name__, [*grid, *passed]))
            made = Compiled()
            made.run = lambda *arguments: run.append((kernel.__name__, [arguments[0], *arguments[9:]]))  # type: ignore[method-assign]
            return made

        return launch

    module: Any = registry.load(name)
    monkeypatch.setattr(type(combine.combine_kernel), "__getitem__", launched)
    device = DeviceInfo(kind="cuda", sm=90, sm_count=132)
    q, k, do = torch.zeros(1, S, 2, 4, 64), torch.zeros(1, 2, 256, 64), torch.zeros(1, S, 2, 4, 64)
    selection = Selection.from_blocks(torch.arange(4).expand(1, S, 2, 4), 32)
    call = Call(q, k, k.clone(), selection, None, 0.125, settings_for(device), device)
    for _ in range(2):
        selection.forget_plans()
        module.backward(call, *module.forward(call), do, None)
    names = [name for name, _ in compiled]
    assert len(run) > 1
    assert [name for name, _ in run] == names[-len(run) :]
    for (_, first), (_, later) in zip(compiled[-len(run) :], run, strict=True):
        for mine, wanted in zip(later, first, strict=True):
            if isinstance(wanted, torch.Tensor):
                assert isinstance(mine, int)
                assert (mine == wanted.data_ptr()) >= any(wanted is x for x in (q, k, call.v, selection.ranges, do))
            elif isinstance(wanted, TensorDescriptor):
                assert (mine.base is wanted.base, mine.block_shape) == (True, wanted.block_shape)
            else:
                assert mine == wanted


@pytest.mark.parametrize("current", [None, 7])
def test_a_thread_without_a_context_takes_the_one_of_the_device(monkeypatch: pytest.MonkeyPatch, current: int | None) -> None:
    """Without an operation on the device, and once. A thread keeps the context that it has."""
    asked: list[Any] = []

    def ask(name: str, *values: Any) -> int:
        asked.append(name)
        if name in answers:
            values[0]._obj.value = answers[name]
        else:
            asked.append(values[0].value)
        return 0

    answers = {"cuCtxGetCurrent": current, "cuDeviceGet": 1, "cuDevicePrimaryCtxRetain": 5}
    names = (*answers, "cuCtxSetCurrent")
    driver = types.SimpleNamespace(**{name: functools.partial(ask, name) for name in names})
    monkeypatch.setattr(cuda_driver, "_library", lambda: driver)
    monkeypatch.setattr(cuda_driver.thread, "bound", set())
    cuda_driver.bind_context(3)
    assert asked == ([*names, 5] if current is None else ["cuCtxGetCurrent"])
    assert cuda_driver.thread.bound == {3}
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda _: 201)
    with pytest.raises(RuntimeError, match="device 4: error 201"):
        cuda_driver.bind_context(4)


BYTES = {"u8": 1, "b8": 1, "u16": 2, "u32": 4, "b32": 4, "f32": 4, "u64": 8, "b64": 8, "f64": 8}
MARK = bytes(range(128))  # of a tensor map


def parameters_of(ptx: str) -> list[tuple[int, int]]:
    """Offset and size of every parameter of the kernel in a PTX text."""
    (entry,) = re.findall(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    found, at = list[tuple[int, int]](), 0
    for line in entry.split(",\n"):
        aligned, kind, many = re.search(r"\.param (?:\.align (\d+) )?\.(\w+).*?(?:\[(\d+)\])?\s*$", line).groups()  # type: ignore[union-attr]
        size = BYTES[kind] * int(many or 1)
        at += -at % int(aligned or size)
        found.append((at, size))
        at += size
    return found


def passed(arguments: Any) -> Iterator[Any]:
    """What the kernel takes for its arguments: None and 1 are compiled in."""
    for x in packing.flattened(arguments):
        if isinstance(x, torch.Tensor):
            yield x.data_ptr()
        elif isinstance(x, TensorDescriptor):
            yield from (MARK, *x.shape, *x.strides)
        elif x is not None and x != 1:
            yield x


def read(data: bytes, offset: int, size: int, like: Any) -> Any:
    if isinstance(like, bytes):
        return data[offset : offset + size]
    code = {1: "b", 4: "i", 8: "q"}[size] if isinstance(like, int) else {4: "f", 8: "d"}[size]
    return struct.unpack_from("<" + code, data, offset)[0]


def without_machine_code(backend: Any = None, stages: dict[str, Any] | None = None, *others: Any) -> tuple[str, str] | None:
    """Triton's hook for stages: the PTX is not assembled, which takes about half of the time."""
    if stages is None:
        return "PTX alone", "PTX alone"
    stages["cubin"] = lambda ptx, metadata: b"none"
    return None


def call_of(h: int, S: int) -> Call:
    device = DeviceInfo(kind="cuda", sm=90, sm_count=132, shared_memory=227 * 1024)
    q, k, v = torch.zeros(1, S, 2, h, 64).bfloat16(), torch.zeros(1, 2, 256, 64).bfloat16(), torch.zeros(1, 2, 256, 64).bfloat16()
    selection = Selection(torch.zeros(1, S, 2, 4, 2, dtype=torch.int32), 64, disjoint=True)
    return Call(q, k, v, selection, None, 0.125, settings_for(device), device)


def pack_every_kernel(h: int, S: int) -> None:
    """Those of triton-tile, with tensor maps, nested tuples, constants among them, and floats."""
    launched: list[tuple[Any, Any]] = []
    call = call_of(h, S)
    q = call.q
    with launches_compile(90):
        triton.knobs.runtime.add_stages_inspection_hook = without_machine_code
        started = triton.runtime.jit.KernelInterface.__getitem__

        def launch(kernel: Any, grid: Any) -> Any:
            def run(*arguments: Any, **options: Any) -> None:
                started(kernel, grid)(*arguments, **options)
                launched.append((kernel.run(*arguments, grid=grid, warmup=True, **options), arguments))

            return run

        triton.runtime.jit.KernelInterface.__getitem__ = launch
        module: Any = registry.load("triton-tile")
        module.backward(call, *module.forward(call), q, None)
    assert len(launched) >= 6
    for compiled, arguments in launched:
        tensors = sum(x is None or isinstance(x, torch.Tensor | TensorDescriptor) for x in arguments)
        kinds = list(compiled.src.signature.values())
        parameters = parameters_of(compiled.asm["ptx"])
        maps = compiled.metadata.tensordesc_meta
        layout = packing._layout(1, 128, 0, parameters, kinds[:tensors], kinds[tensors:], maps)
        assert layout is not None
        values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments[:tensors] if x is not None]
        for i, encoded in layout.maps:
            values[i] = encoded(values[i].base.data_ptr(), values[i].shape, values[i].strides)
        data = layout.tensors.pack(*values, layout.packed_numbers(arguments[tensors:]))
        wanted = list(passed(arguments))
        assert len(data) == sum(parameters[-1])
        begin = ctypes.addressof(cuda_driver.thread.arguments)
        assert [at - begin for at in layout.pointers.list] == [offset for offset, _ in parameters]
        assert len(parameters) >= len(wanted)
        for (offset, size), value in zip(parameters, wanted, strict=False):
            assert read(data, offset, size, value) == (pytest.approx(value) if isinstance(value, float) else value)
        assert not any(data[offset] for offset, _ in parameters[len(wanted) :])  # scratch memory
        if compiled.metadata.name == "forward_kernel":
            assert len(layout.maps) == 2
        # What does not fit the signature has no layout.
        assert packing._layout(1, 128, 0, [*parameters[:-1], (parameters[-1][0], 4)], kinds[:tensors], kinds[tensors:], maps) is None
        assert packing._layout(1, 128, 0, parameters[: len(wanted) - 1], kinds[:tensors], kinds[tensors:], maps) is None


def ctas_of(config: int) -> int:
    return ctypes.c_uint32.from_address(config).value


def replay_every_kernel(h: int, S: int) -> None:
    """A replayed pass starts the same kernels with the same numbers; its addresses are those of other tensors, one for one."""
    handles: list[str] = []
    started: list[tuple[int, int, list[int]]] = []
    kept: list[torch.Tensor] = []  # so that no address belongs to two tensors
    make = buffers._empty_strided_cpu

    def layout_of(compiled: Any, tensors: int) -> Any:
        kinds, meta = list(compiled.src.signature.values()), compiled.metadata
        handles.append(compiled.asm["ptx"])
        parameters = parameters_of(compiled.asm["ptx"])
        return packing._layout(len(handles) - 1, 128, 0, parameters, kinds[:tensors], kinds[tensors:], meta.tensordesc_meta)

    def start(function: int, ctas: int, threads: int, shared: int, stream: int, pointers: Any, **_: Any) -> int:
        words = [read(cuda_driver.thread.arguments.raw, offset, size, 0) for offset, size in parameters_of(handles[function]) if size <= 8]
        maps = [read(cuda_driver.thread.arguments.raw, offset, 8, 0) for offset, size in parameters_of(handles[function]) if size > 8]
        started.append((function, ctas, words + maps))
        return 0

    def passes(known: dict[Any, Any]) -> list[tuple[int, int, list[int]]]:
        started.clear()
        call = call_of(h, S)
        call.known = known
        do = call.q.clone()
        kept.extend((do, call.q, call.k, call.v, call.selection.ranges))
        module.backward(call, *module.forward(call), do, None)
        return sorted(started)

    with launches_compile(90) as compiled:
        triton.knobs.runtime.add_stages_inspection_hook = without_machine_code  # as before, so that nothing is compiled again
        triton.runtime.jit.KernelInterface.__getitem__ = lambda kernel, grid: (
            lambda *arguments, **options: kernel.run(*arguments, grid=grid, warmup=True, **options)
        )
        kernel.start, kernel.stream_of, replay.stream_of = start, lambda device: 0, lambda device: 0
        cuda_driver._launch = lambda: lambda config, function, *_: start(function, ctas_of(config), 0, 0, 0, None)
        kernel.layout_of, kernel.CPU = layout_of, -2
        cuda_driver.encoded_map = lambda encode, kind, address, *how: (0, struct.pack("<q120x", address))  # type: ignore[assignment]
        buffers._empty_strided_cpu = lambda *facts: kept.append(make(*facts)) or kept[-1]
        Selection._on_gpu = True  # type: ignore[assignment, method-assign]
        module: Any = registry.load("triton-tile")
        known: dict[Any, Any] = {REPEATED: True}
        runs = [passes(known), passes(known), passes(known), passes(known), passes({})]
    assert not compiled
    recordings = [x for x in known.values() if isinstance(x, replay.Recording)]
    assert len(recordings) == 4  # forward, backward, the union, the lists
    assert sum(len(x.steps) for x in recordings) == len(runs[-1]) >= 6
    for run in runs[2:4]:
        pairs = set[tuple[int, int]]()
        for (function, ctas, words), (plain, plain_ctas, wanted) in zip(run, runs[-1], strict=True):
            assert (function, ctas, len(words)) == (plain, plain_ctas, len(wanted))
            assert all(one == other or min(one, other) >= 2**32 for one, other in zip(words, wanted, strict=True))
            pairs.update((one, other) for one, other in zip(words, wanted, strict=True) if one >= 2**32)
        assert len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(pairs) > 10


@pytest.mark.parametrize("h", [pytest.param(1, marks=pytest.mark.thorough), 4])
def test_arguments_are_where_the_compiled_kernel_reads_them(h: int) -> None:
    """Of one head, a 1 that is compiled in, and of several."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"from tests.unit.backends.test_triton_launches import main; main({h})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def main(h: int) -> None:
    """In a process without Triton's interpreter."""
    told = []

    def encode(encode: Any, *how: Any) -> tuple[int, bytes]:
        told.append(how)
        return 0, MARK

    cuda_driver.encode, cuda_driver.encoded_map = (lambda: None), encode  # type: ignore[assignment]
    pack_every_kernel(h, 40)
    replay_every_kernel(h, 40)
    kind, _, sizes, steps, box, swizzle, promotion = told[0]
    assert (kind, sizes, steps, promotion) == (9, (1, 2, 256, 64), (65536, 32768, 128), 2)  # bfloat16
    assert box[:2] == (1, 1)
    assert swizzle == 3  # 128 bytes


def test_flags_and_short_numbers_take_their_bytes() -> None:
    parameters = [(0, 8), (8, 1), (12, 4), (16, 2), (24, 8), (32, 4), (40, 8)]
    layout = packing._layout(1, 64, 0, parameters, ["*fp32", "constexpr"], ["u1", ("i32", "constexpr"), "i16", "i64", "fp32"], [])
    assert layout is not None
    data = layout.tensors.pack(2**40, layout.packed_numbers((True, (-5, 1), 7, -(2**40), 0.5)))
    assert data == struct.pack("<Qb3xih6xqf4xQ", 2**40, 1, -5, 7, -(2**40), 0.5, 0)
    assert packing._layout(1, 64, 0, parameters, ["*fp32"], ["u1", "i32", "i16", "i64", "bf16"], []) is None


def test_a_launch_that_needs_more_than_arguments_has_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"launch_cooperative_grid": False, "launch_pdl": False, "global_scratch_size": 0, "profile_scratch_size": 0}
    meta = {"num_ctas": 1, "num_warps": 4, "shared": 0, "tensordesc_meta": (), **plain}
    source = types.SimpleNamespace(signature={"x": "*fp32", "n": "i32"})

    def layout(**others: Any) -> Any:
        return packing.layout_of(
            types.SimpleNamespace(metadata=types.SimpleNamespace(**meta | others), src=source, function=7, run=None), 1
        )

    monkeypatch.setattr(cuda_driver, "parameters", lambda function: [(0, 8), (8, 4), (16, 8), (24, 8)])
    assert layout() is not None
    needs = {**dict.fromkeys(plain, 1), "num_ctas": 2, "shared": 10**6}
    assert not any(layout(**{name: value}) for name, value in needs.items())
    monkeypatch.setattr(cuda_driver, "parameters", lambda function: None)  # of an old driver
    assert layout() is None


BACKENDS = [spec.name for spec in SPECS if spec.framework == "triton"]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("S", [1, 100])
def test_every_launch_of_a_gpu_is_packed(monkeypatch: pytest.MonkeyPatch, backend: str, S: int) -> None:
    """Forward and backward, with the bits of launches through Triton."""
    layouts, started, runs = list[Any](), list[bool](), []
    real_layout, real_started = kernel_module.layout_of, kernel_module._started
    monkeypatch.setattr(kernel_module, "layout_of", lambda *of: layouts.append(real_layout(*of)) or layouts[-1])
    monkeypatch.setattr(kernel_module, "_started", lambda *how: started.append(real_started(*how)) or started[-1])
    q, k, v = make_qkv(1, S, 2, 4, 64, 64, S_kv=256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for packed in (True, False):
        if not packed:
            assert len(started) >= 3
            assert all(started)
            assert all(layout is not None for layout in layouts)
            monkeypatch.setattr(kernel_module, "layout_of", lambda *of: None)
        forget_launches()
        for _ in range(2):
            o, lse = nsa_sel.selection_attention(q, k, v, make_blocks(1, S, 2, 256, 4, 32, device="cuda"), backend=backend, return_lse=True)
            runs.append((o.detach(), lse.detach(), *torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.ones_like(lse)))))
    forget_launches()
    assert all(torch.equal(x, y) for run in runs for x, y in zip(runs[0], run, strict=True))
