"""Packed arguments of Triton's kernels (launcher/packing.py), read back at the offsets of the parameters that the PTX declares."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

import nsa_sel
from nsa_sel.backends._triton import kernel
from nsa_sel.backends._triton import kernel as kernel_module
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
from tests.helpers.graphs import captured, replayed
from tests.helpers.launches import forget_launches
from tests.helpers.paths import ROOT

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
    code = f"from tests.backends.test_triton_packing import main; main({h})"
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
SIZES = {"prefill": (1, 100, 2, 4, 256, 64), "few": (3, 1, 2, 16, 512, 128), "wide": (1, 40, 1, 3, 192, 192), "one": (1, 17, 1, 1, 64, 64)}


def results(backend: str, sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
    """o, lse, dq, dk, dv: twice, whose second launches find all compiled; with another number of keys, and keys at odd addresses."""
    B, S, G, h, S_kv, D = sizes
    found = list[torch.Tensor]()
    for keys, skipped in ((S_kv, 0), (S_kv, 0), (S_kv + 24, 0), (S_kv, 1)):
        torch.manual_seed(seed)
        q, k, v = make_qkv(B, S, G, h, D, D, S_kv=keys, dtype=dtype, device="cuda")
        if skipped:
            k = torch.cat((torch.zeros_like(k[..., :1]), k), -1)[..., 1:]
        selection = make_blocks(B, S, G, keys, 4, 32, device="cuda")
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = nsa_sel.selection_attention(*inputs, selection, backend=backend, return_lse=True)
        do = torch.ones_like(o) * torch.linspace(-1, 1, D, device="cuda").to(dtype)
        found += [o.detach(), lse.detach(), *torch.autograd.grad((o, lse), inputs, (do, torch.full_like(lse, 0.25)))]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_launches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, backend: str, size: str, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and SIZES[size][-1] > 128:
        pytest.skip("more shared memory than there is")
    layouts: list[Any] = []
    started: list[bool] = []
    real_layout, real_started = kernel_module.layout_of, kernel_module._started

    def layout_of(*of: Any) -> Any:
        layouts.append(real_layout(*of))
        return layouts[-1]

    def was_started(*how: Any) -> bool:
        started.append(real_started(*how))
        return started[-1]

    monkeypatch.setattr(kernel_module, "layout_of", layout_of)
    monkeypatch.setattr(kernel_module, "_started", was_started)
    forget_launches()
    packed = results(backend, SIZES[size], dtype)
    assert layouts
    assert None not in layouts
    assert len(started) >= 3
    assert all(started)
    monkeypatch.setattr(kernel_module, "layout_of", lambda *of: None)
    forget_launches()
    launched = len(started)
    plain = results(backend, SIZES[size], dtype)
    assert len(started) == launched
    forget_launches()
    for a, b in zip(packed, plain, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_and_new_threads_take_packed_launches(backend: str) -> None:
    q, k, v = make_qkv(1, 64, 2, 4, 64, 64, S_kv=256, dtype=torch.bfloat16, device="cuda")
    indices = torch.arange(4, device="cuda").expand(1, 64, 2, 4)

    def forward(kept: Selection | None = None) -> torch.Tensor:
        selection = Selection.from_blocks(indices, 64) if kept is None else kept
        return nsa_sel.selection_attention(q, k, v, selection, backend=backend)  # type: ignore[no-any-return]

    kept = Selection.from_blocks(indices, 64)
    wanted = forward(kept)
    found: list[torch.Tensor] = []
    for given in (None, kept):  # the first kernel of the thread is that of ranges, or one of attention
        thread = threading.Thread(target=lambda given=given: found.append(forward(given)))  # type: ignore[misc]
        thread.start()
        thread.join()
    assert len(found) == 2
    assert torch.equal(found[0], wanted)
    assert torch.equal(found[1], wanted)
    graph = captured(lambda: (forward(),))
    v.zero_()
    assert not replayed(*graph)[0].any()
