"""Check replayed passes, whose CUDA kernels run on the CPU in place of the driver, and on a GPU."""

from __future__ import annotations

import ctypes
import functools
import struct
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from nsa_sel import choose_blocks_with_kvcache, decisions, explain, reset, selection_attention, selection_attention_with_kvcache
from nsa_sel import selection as selection_module
from nsa_sel.backends import cupy_cuda
from nsa_sel.backends._triton import ranges as block_ranges
from nsa_sel.backends.cupy_cuda import block_tiles, launch, tensor_map
from nsa_sel.backends.launcher import batch, cuda_driver, replay
from nsa_sel.backends.launcher.buffers import unwritten
from nsa_sel.backends.launcher.passes import forward_of_any_scale, outputs
from nsa_sel.core import ranges as ranges_module
from nsa_sel.core import registry, run
from nsa_sel.core.arguments import whole_blocks
from nsa_sel.core.call import Call, Workspace
from nsa_sel.core.transforms import REPEATED
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.selection import Exact, Selection, Snapshot
from nsa_sel.settings.config import settings_for
from tests.helpers import cuda as emulate
from tests.helpers.cases import assert_forward, assert_gradients, make_blocks, make_grads, make_qkv
from tests.helpers.cuda import GPU, needs_compiler


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that the driver was asked to start, whose packed arguments the emulation takes."""
    kernels: list[tuple[str, Any]] = []
    started: list[str] = []

    def function(source: str, macros: Any, *_: Any) -> int:
        if (source, macros) not in kernels:
            kernels.append((source, macros))
        return kernels.index((source, macros))

    def start(handle: int, ctas: int, threads: int, shared: int, arguments: Any) -> int:
        source, macros = kernels[handle]
        started.append(source)
        emulate._library(source, macros).run(ctas, threads, shared, 0, arguments)
        return 0

    def launch_with(config: int, handle: int, parameters: int, _: None) -> int:
        """config: the address of a CUlaunchConfig; parameters: of an array of pointers to arguments."""
        ctas, threads, shared = struct.unpack("<I8xI8xI", ctypes.string_at(config, 28))
        return start(handle, ctas, threads, shared, ctypes.c_void_p.from_address(parameters))

    def clear(address: int, size: int, *_: int) -> int:
        ctypes.memset(address, 0, size)
        return 0

    def encoded(device: int, dtype: Any, shape: Any, strides: Any, box: Any, promoted: bool, address: int) -> bytes:
        if len(shape) == 5:
            return emulate.row_map_of(address, shape, strides, box[1])
        return emulate.map_of(address, shape, strides, box[2], box[3], dtype.itemsize)

    runtime = types.SimpleNamespace(setDevice=lambda device: None, memsetAsync=lambda address, value, size, stream: clear(address, size))
    own = cuda_driver.thread.arguments
    kernel = types.SimpleNamespace(launchKernel=lambda handle, ctas, y, z, threads, *others: start(handle, ctas, threads, others[2], own))
    monkeypatch.setattr(launch, "_interfaces", lambda: (kernel, runtime))
    monkeypatch.setattr(cuda_driver, "starts_early", lambda device: False)
    monkeypatch.setattr(launch, "function", function)
    monkeypatch.setattr(tensor_map, "_encoded", encoded)
    monkeypatch.setattr(cuda_driver, "stream_of", lambda device: 0)
    monkeypatch.setattr(cuda_driver, "launch_function", lambda: launch_with)
    monkeypatch.setattr(replay, "stream_of", lambda device: 0)
    monkeypatch.setattr(cuda_driver, "clear", clear)
    monkeypatch.setattr(Selection, "_on_gpu", True)  # else it compares ranges with a copy
    tensor_map._encoder.cache_clear()
    return started


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the number of launches of each replay."""
    found, play = list[int](), replay._Ready.play
    monkeypatch.setattr(replay._Ready, "play", lambda ready, *others: (found.append(len(ready.recording.steps)), play(ready, *others))[1])
    return found


def call_of(seed: int, known: dict[Any, Any] | None, S: int = 8, D: int = 16, block: int = 16) -> Call:
    """A call of new tensors; those with one `known` are of one class, and may be replayed."""
    q, k, v = make_qkv(2, S, 2, 3, D, 24 if D == 16 else D, S_kv=70, dtype=torch.float16, seed=seed)
    selection = Selection.from_ranges(make_blocks(2, S, 2, 70, 3, block, seed=seed).ranges, block)
    call = Call(q, k, v, selection, None, D**-0.5, settings_for(GPU), GPU)
    call.known = {} if known is None else known
    return call


def passes(call: Call, seed: int, with_dlse: bool = False) -> list[Tensor]:
    """o, lse, dq, dk, dv."""
    o, lse = cupy_cuda.forward(call)
    do, dlse = make_grads(call.q, call.v, seed)
    dlse = torch.where(lse == float("-inf"), 0.0, dlse)
    return [o, lse, *cupy_cuda.backward(call, o, lse, do, dlse if with_dlse else None)]


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
        assert not one.isnan().any()


@needs_compiler
@pytest.mark.parametrize("with_dlse", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_other_tensors_of_a_class_are_replayed(driver: list[str], played: list[int], with_dlse: bool) -> None:
    """The same bits as of a pass that runs as it is written, from the same kernels."""
    known: dict[Any, Any] = {REPEATED: True}
    for seed in range(5):
        wanted = passes(call_of(seed, None), seed, with_dlse)
        launched = sorted(driver)
        driver.clear()
        assert_equal(passes(call_of(seed, known), seed, with_dlse), wanted)
        assert sorted(driver) == launched
        driver.clear()
        if seed == 1:
            assert played == []
    assert len(played) == 6  # three times: forward, and backward with its lists
    assert sum(played[-2:]) == len(launched)


@needs_compiler
def test_tensor_maps_are_encoded_anew(driver: list[str], played: list[int]) -> None:
    known: dict[Any, Any] = {REPEATED: True}
    for seed in range(4):
        assert_equal(*(list(cupy_cuda.forward(call_of(seed, facts, S=1, D=64, block=64))) for facts in (known, None)))
    assert driver == 8 * ["forward_blocks.cu"]
    assert played == [1, 1]


@needs_compiler
def test_tensor_maps_may_point_into_temporaries(driver: list[str], played: list[int]) -> None:
    """The second kernel loads what the first one wrote, behind lse in the buffer of temporaries."""

    @forward_of_any_scale
    def twice(call: Call) -> tuple[Tensor, Tensor]:
        lse, o = unwritten(call.q, *call.q.shape[:-1], dtype=torch.float32), unwritten(call.q, *call.q.shape)
        keys = cupy_cuda.whole_blocks.forward(replace(call, out=(o, lse)))[0].squeeze(1)
        return cupy_cuda.whole_blocks.forward(replace(call, k=keys, v=keys))

    known: dict[Any, Any] = {REPEATED: True}
    for seed in range(4):
        assert_equal(*(list(twice(call_of(seed, facts, S=1, D=64, block=64))) for facts in (known, None)))
    assert played == [2, 2]


@pytest.fixture
def ranges_kernel(monkeypatch: pytest.MonkeyPatch, driver: list[str]) -> None:
    """Block indices on the CPU stay what a selection holds; the driver is asked to start the kernel that makes their ranges."""
    launch_others, arguments, handle = cuda_driver.launch_function(), struct.Struct("<8q"), 1 << 20

    def start(config: int, function: int, parameters: int, extra: None) -> int:
        if function != handle:
            return launch_others(config, function, parameters, extra)  # type: ignore[no-any-return]
        driver.append("ranges")
        values = arguments.unpack(ctypes.string_at(ctypes.c_void_p.from_address(parameters).value, arguments.size))
        made, indices, unique, B, S, G, n, block = values
        kind = ctypes.c_int32 * (B * S * G * n)
        with _disable_current_modes():  # a recording refuses operations
            ranges = whole_blocks(torch.frombuffer(kind.from_address(indices), dtype=torch.int32).view(B, S, G, n), block)
            for address, x in ((made, ranges), (unique, ranges_module.disjoint(ranges))):
                if address:
                    ctypes.memmove(address, x.contiguous().data_ptr(), x.nbytes)
        return 0

    def launch_ranges(shape: Any, ranges: Tensor, indices: Tensor, counts: None, unique: Tensor, block: int) -> None:
        values = (ranges.data_ptr(), indices.data_ptr(), 0 if unique is None else unique.data_ptr(), *shape, block)
        arguments.pack_into(cuda_driver.thread.arguments, 0, *values)
        if cuda_driver.thread.recording is not None:
            cuda_driver.thread.recording.launch(handle, 1, 1, 0, False, launch._one_struct, arguments, values)
        start(0, handle, launch._one_struct.address, None)

    monkeypatch.setattr(cuda_driver, "launch_function", lambda: start)
    monkeypatch.setattr(block_ranges, "_launch", launch_ranges)
    monkeypatch.setattr(block_ranges, "distinct_ranges", lambda ranges, *_: ranges_module.disjoint(ranges))
    monkeypatch.setattr(ranges_module, "on_gpu", lambda indices: True)
    monkeypatch.setattr(ranges_module, "_classes", {})


@needs_compiler
@pytest.mark.parametrize("S", [16, 4])
def test_a_pass_makes_the_ranges_of_new_block_indices(ranges_kernel: None, driver: list[str], played: list[int], S: int) -> None:
    """The forward pass of many rows, the backward pass of few; later passes read what it made."""
    known: dict[Any, Any] = {REPEATED: True}
    for seed in range(5):
        call, plain = call_of(seed, known, S=S), call_of(seed, None, S=S)
        blocks = torch.randint(-1, 5, (2, S, 2, 3), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
        call.selection = selection = Selection.from_blocks(blocks, 16)
        plain.selection = Selection(whole_blocks(blocks, 16), 16)
        wanted = passes(plain, seed)
        driver.clear()
        assert_equal(passes(call, seed), wanted)
        assert_equal(passes(call, seed), wanted)  # of ranges
        assert driver.count("ranges") == 1
        of_op = call_of(seed, known, S=S)  # as in a compiled call, whose backward pass has a selection of its own
        of_op.selection = Selection.from_blocks(blocks, 16)
        assert_equal(list(cupy_cuda.backward(of_op, *wanted[:2], make_grads(call.q, call.v, seed)[0], None)), wanted[2:])
        assert driver.count("ranges") == 2
        saved, also_saved = call.read_again(), plain.read_again()  # activation checkpoints compare them with those of a recorded pass
        assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in also_saved]
        blocks.fill_(0)
        assert torch.equal(selection.ranges, plain.selection.ranges)
        assert torch.equal(selection.disjoint_ranges(), plain.selection.disjoint_ranges())
    assert "backward" in known
    assert ("forward" in known) == (S == 16)
    assert played[-5:] == ([2, 5, 1, 3, 6] if S == 16 else [1, 5, 1, 3, 5])  # launches
    selection.ranges.zero_()  # a write drops what was made
    assert not cupy_cuda.forward(call)[0].any()


@needs_compiler
@pytest.mark.parametrize("D", [64, 16])
def test_passes_over_ranges_that_nobody_searched_are_replayed(
    driver: list[str], played: list[int], D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of tiles read the ranges as they are; those of rows disjoint ones, which PyTorch makes here."""
    monkeypatch.setattr(selection_module, "MOST_SEARCHED", 2)
    known: dict[Any, Any] = {REPEATED: True}
    for seed in range(5):
        call, plain = call_of(seed, known, S=16, D=D), call_of(seed, None, S=16, D=D)
        ranges = call.selection.ranges
        ranges[..., 2, :] = ranges[..., 0, :]
        call.selection, plain.selection = Selection(ranges, 16), Selection(ranges.clone(), 16)
        wanted = passes(plain, seed)
        for _ in range(2):
            assert_equal(passes(call, seed), wanted)
        promised = call_of(seed, known, S=16, D=D)  # of the same class
        promised.selection = Selection(ranges_module.disjoint(ranges), 16, disjoint=True)
        assert_equal(passes(promised, seed)[:3], wanted[:3])
    assert len(played) >= 6 or D == 16


@needs_compiler
def test_whole_calls_over_pages_are_replayed(monkeypatch: pytest.MonkeyPatch, driver: list[str], played: list[int]) -> None:
    """Replay only for other tensors of the class, also into a given o, not if a tensor is passed twice or nothing is launched."""
    monkeypatch.setattr(run, "_on_gpu", lambda x: True)
    monkeypatch.setattr(run, "_stream_outside_capture", lambda q: 0)

    def attend(to: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        q, k, v, indices, lengths, table = tensors
        selection = Selection._of_indices(ranges_module.Blocks(indices, None, None), 64, False)
        o, lse = cupy_cuda.forward(Call(q, k, v, selection, None, 0.125, settings_for(GPU), GPU, lengths, table, out=(to, None)))
        return (o.squeeze(1), lse) if to is None else (lse,)

    for seed in range(5):
        some = functools.partial(torch.randint, dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
        qkv = make_qkv(3, 1, 2, 4, 64, 64, S_kv=64, dtype=torch.float16, seed=seed)
        tensors = *qkv, some(-1, 3, (3, 1, 2, 2)), some(1, 192, (3,)), some(0, 3, (3, 3))
        wanted = attend(None, *tensors)
        for to in (None, torch.empty_like(qkv[0])):
            again = run.Repeated.of(("over pages",), *tensors, to)
            assert again is not None
            made = again.replay()
            assert (made is None) == (seed < 2)
            made = again.run(functools.partial(attend, to, *tensors)) if made is None else made
            assert_equal([made[0] if to is None else to.squeeze(1), made[-1]], list(wanted))
    assert len(played) == 6
    again = run.Repeated.of(("over pages",), *tensors, None)
    with monkeypatch.context() as patched:  # another thread drops the recording meanwhile
        patched.setattr(replay.Recordings, "replay", lambda recordings, *_: recordings.made.clear() or ())
        assert again is not None
        assert again.replay() == ()
    with monkeypatch.context() as patched:  # no memory for all temporaries at once
        patched.setattr(replay._Ready, "play", mock.Mock(side_effect=torch.OutOfMemoryError))
        assert again.replay() is None
    assert run.Repeated.of(("over pages",), *tensors, tensors[0]) is None
    assert run.Repeated.of(("nothing",), None) is None
    for _ in range(3):
        again = run.Repeated.of(("a sum",), *tensors)
        assert again is not None
        assert again.replay() is None
        assert torch.equal(again.run(lambda: (qkv[0] + 1,))[0], qkv[0] + 1)


def test_two_threads_may_keep_recordings_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_recordings", replay.deque())

    class Shared(list[Any]):
        def __iter__(self) -> Any:
            old = [*super().__iter__()]
            self.clear()  # by the other thread
            return iter(old)

    recordings, one = replay.Recordings(), types.SimpleNamespace(given=(), built={})
    recordings.made = Shared([one])
    recordings._keep(one)
    assert len(recordings.made) == 1


def test_a_failed_backend_ends_the_replays_of_its_calls_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "broken", {})
    of, forced = (explain(*make_qkv(), make_blocks(1, 16, 1, 16, 1, 16), backend=name) for name in (None, "sdpa-packed"))
    for decision, name, replayed in (
        (of, "another", True), (of, of.forward, False), (forced, "another", True), (forced, forced.forward, True),
    ):  # fmt: skip
        made = types.SimpleNamespace(decided=((decision, decision.request),))
        recordings: Any = types.SimpleNamespace(made=[made], replay=lambda *_: (torch.zeros(1),))
        registry.mark_broken(str(name), decision.request, RuntimeError())
        assert (run.Repeated((), [], [], 0, (), recordings).replay() is not None) == replayed


def test_a_pass_that_has_no_memory_for_its_recording_runs_without() -> None:
    x, recordings = torch.empty(1), replay.Recordings()

    def work() -> tuple[Tensor]:
        made = unwritten(x, 100)
        if cuda_driver.thread.recording is not None:
            raise torch.OutOfMemoryError
        return (made,)

    assert len(recordings.record([x.data_ptr()], work)) == 1
    assert not recordings.made


@pytest.mark.parametrize("whole", [False, True])
def test_a_recording_holds_little_memory(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """A pass in parts frees the temporaries of each: the recording would hold all of them."""
    monkeypatch.setattr(replay, "MOST_BYTES", 1000)
    x, held = torch.empty(1), list[int]()
    recorder = replay.Recorder([x.data_ptr()], whole)
    with recorder:
        for _ in range(10):
            unwritten(x, 100)
            torch.empty(10)
            held.append(sum(made.nbytes for made in recorder.made))
        result = unwritten(x, 8)
    assert max(held) <= 1000
    assert recorder.finished((result,)) is None


@needs_compiler
def test_plans_follow_writes_into_the_ranges(driver: list[str], played: list[int]) -> None:
    call = call_of(0, {REPEATED: True})
    for seed in range(5):
        call.selection.ranges.copy_(call_of(seed, None).selection.ranges)
        plain = replace(call)
        plain.selection = Selection(call.selection.ranges, 16)
        assert_equal(passes(call, seed), passes(plain, seed))
    assert len(played) == 6


@needs_compiler
def test_replayed_lists_of_small_blocks_are_those_that_were_built(driver: list[str], played: list[int]) -> None:
    """Their counts of blocks are zeroed again."""
    known: dict[Any, Any] = {REPEATED: True}

    def listed(call: Call, o: Tensor) -> tuple[Tensor]:
        block_tiles.block_lists_of(call)
        return (unwritten(call.q, 4),)

    def lists_of(call: Call) -> Any:
        replay.replayed(call, listed, (torch.zeros(64),))
        return block_tiles.block_lists_of(call)

    plans = [lists_of(call_of(0, facts)) for facts in (known, known, known, known, None)]
    whole = [[x.begins, x.segments, x.parts, x.slots, *(y[: int(x.begins[-1])] for y in (x.entries, x.chosen))] for x in plans]
    assert len(played) == 2
    assert all(all(map(torch.equal, plan, whole[0])) for plan in whole[1:])


@needs_compiler
def test_a_pass_has_recordings_with_and_without_its_plans(driver: list[str], played: list[int]) -> None:
    """Other passes use the plans that a replay builds, and do not build them again."""
    known: dict[Any, Any] = {REPEATED: True}
    for seed in range(4):
        call = call_of(seed, known)
        wanted = passes(call_of(seed, None), seed)
        driver.clear()
        played.clear()
        for _ in range(2):
            assert_equal(passes(call, seed), wanted)
        assert driver.count("sort_count.cu") == 1
    assert played == [1, 5, 1, 3]
    plain = replace(call)  # runs as it is written, with the lists that the replay has built
    plain.known = {}
    assert_equal(passes(plain, 3), wanted)
    assert driver.count("sort_count.cu") == 1


def test_plans_that_run_pytorch_operations_are_built_before_a_replay(driver: list[str], played: list[int]) -> None:
    known: dict[Any, Any] = {REPEATED: True}
    builds: list[int] = []

    def build(call: Call, number: int) -> tuple[Tensor]:
        builds.append(number)
        return (unwritten(call.q, 8).zero_(),)

    def work(call: Call) -> tuple[Tensor]:
        replay.kept_plan(call, ("zeros",), build, 7)
        return (unwritten(call.q, 4),)

    for seed in range(4):
        call = call_of(seed, known)
        for _ in range(2):
            replay.replayed(call, work)
    assert builds == [7] * 4
    assert len(played) == 5  # all after one that is run, one that is recorded with a plan, and one without


@needs_compiler
def test_shortcuts_replay_passes_of_their_class_alone(driver: list[str]) -> None:
    known: dict[Any, Any] = {REPEATED: True}
    for seed in range(2):
        passes(call_of(seed, known, S=12), seed)
    call = call_of(2, known, S=12)
    o, lse, *gradients = passes(call_of(2, None, S=12), 2)
    do, _ = make_grads(call.q, call.v, 2)
    tensors = call.q, call.k, call.v
    assert known["forward"](call.selection, *tensors) is None  # no disjoint ranges yet
    call.disjoint_ranges()
    assert_equal(list(known["forward"](call.selection, *tensors)), [o, lse])
    assert_equal(list(known["backward"](call.selection, *tensors, o, lse, do)), gradients)
    assert known["backward"](call.selection, *tensors, o, lse, do.transpose(1, 2).contiguous().transpose(1, 2)) is None
    assert known["backward"](call.selection, *tensors, o, lse, o) is None  # a tensor twice
    assert known["backward"](call.selection, *tensors, o, lse, None) is None
    strided = do.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(3):  # later passes of other strides leave the shortcut as it is
        assert_equal(list(cupy_cuda.backward(call, o, lse, strided, None)), gradients)
    call.selection.forget_plans()
    call.disjoint_ranges()
    assert_equal(list(known["backward"](call.selection, *tensors, o, lse, do)), gradients)
    call.selection.measure()
    assert known["forward"](call.selection, *tensors) is None


@needs_compiler
@pytest.mark.parametrize("n", [1, 3])
def test_few_rows_have_a_shortcut_forward_unless_blocks_may_repeat(ranges_kernel: None, played: list[int], n: int) -> None:
    """It makes no ranges."""
    known: dict[Any, Any] = {REPEATED: True}
    for seed in range(3):
        call = call_of(seed, known, S=4, D=64)
        call.selection = Selection.from_blocks(torch.full((2, 4, 2, n), seed, dtype=torch.int32), 16)
        wanted = cupy_cuda.forward(call)
        for shortcut in [known[key] for key in known if key == "forward"]:
            assert_equal(list(shortcut(call.selection, call.q, call.k, call.v)), list(wanted))
        assert call.selection.indices is not None
    assert played
    assert ("forward" in known) == (n == 1)


def test_launches_whose_arguments_repeat_become_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []  # stream and argument of each launch, or the stream of a graph

    def launch_with(config: int, function: int, parameters: int, _: None) -> int:
        (stream,) = struct.unpack_from("<Q", ctypes.string_at(config, 40), cuda_driver.STREAM_OFFSET)
        started.append((stream, ctypes.c_int64.from_address(ctypes.c_void_p.from_address(parameters).value or 0).value))
        return 0

    def captured(device: int, start: Callable[[int], int]) -> Any:
        assert start(77) == 0
        return types.SimpleNamespace(handle=9, start=lambda handle, stream: started.append(stream) or 0)

    monkeypatch.setattr(cuda_driver, "bind_context", lambda device: None)
    monkeypatch.setattr(cuda_driver, "launch_function", lambda: launch_with)
    monkeypatch.setattr(cuda_driver, "captured", captured)
    steps = tuple(batch.Step(1, cuda_driver.grid(1, 32, 0), False, (offset,)) for offset in (0, 8))
    launches = batch.Batch(0, 5, steps, struct.Struct("<qq"))
    for values in ((1, 2), (3, 4)):
        launches.pack(values, [])
        started.clear()
        for _ in range(batch.GRAPH_AFTER + 2):
            assert launches.start() == 0
        each = [(5, value) for value in values]
        assert started == [*each * (batch.GRAPH_AFTER - 1), *((77, value) for value in values), *each, 5, 5]


@needs_compiler
def test_packed_arguments_are_those_of_the_addresses(driver: list[str], played: list[int]) -> None:
    """Tensors that take turns get batches of their own; new ones take the oldest batch."""
    known: dict[Any, Any] = {REPEATED: True}
    calls = [call_of(seed, known) for seed in range(3)]
    wanted = [cupy_cuda.forward(call_of(seed, None)) for seed in range(3)]
    for number in range(40):
        turn = number % 3 if number < 30 else 0
        assert_equal(list(cupy_cuda.forward(calls[turn])), list(wanted[turn]))
    assert len(played) == 38


def moved(x: Tensor) -> Tensor:
    """x at an address that is no multiple of 16."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)


@needs_compiler
@pytest.mark.parametrize("what", ["unaligned", "k is v", "expanded do", "workspace", "negative scale", "a hook", "refused"])
def test_what_differs_runs_as_it_is_written(monkeypatch: pytest.MonkeyPatch, driver: list[str], played: list[int], what: str) -> None:
    known: dict[Any, Any] = {REPEATED: True}
    for _ in range(2):  # the next one would be replayed
        passes(call_of(0, known), 0)
    call, plain = call_of(1, known), call_of(1, None)
    if what == "unaligned":
        call.q = plain.q = moved(call.q)
    elif what == "k is v":
        known = call.known = {REPEATED: True}
        call.k = plain.k = call.v = plain.v = torch.randn(2, 2, 70, 16).half()
        call.q = plain.q = call.q.contiguous()
    elif what == "workspace":
        call.workspace = Workspace(torch.empty(1 << 20, dtype=torch.uint8))
    elif what == "negative scale":
        call.scale = plain.scale = -0.25
    elif what == "a hook":
        monkeypatch.setattr(cuda_driver, "hooked", lambda: True)
    elif what == "refused":
        monkeypatch.setattr(cuda_driver, "launch_function", lambda: lambda *_: 1)
    if what == "expanded do":
        o, lse = cupy_cuda.forward(call)
        do = torch.ones(o.shape[-1], dtype=o.dtype).expand(o.shape)
        assert_equal(list(cupy_cuda.backward(call, o, lse, do, None)), list(cupy_cuda.backward(plain, o, lse, do, None)))
        assert played == [1]  # the forward
        return
    wanted = passes(plain, 1)
    assert_equal(passes(call, 1), wanted)
    if what == "negative scale":
        assert_equal(list(cupy_cuda.backward_and_delta(call, *wanted[:2], make_grads(call.q, call.v, 1)[0], None)[:3]), wanted[2:])
    assert bool(played) == (what in ("unaligned", "refused"))  # neither started


def test_kernels_write_16_bytes_at_a_time_only_to_outputs_at_multiples_of_16() -> None:
    call = call_of(0, None)
    o, lse = torch.empty(*call.q.shape[:-1], 24).half(), torch.empty(call.q.shape[:-1])
    for to in (o, moved(o)):
        call.out = to, lse
        found = outputs(call)
        assert (found[0] is to, found[1] is lse, found[0].data_ptr() % 16) == (to is o, True, 0)


FOREIGN = torch.zeros(64)


@needs_compiler
@pytest.mark.parametrize(
    ("extra", "recorded"),
    [
        (lambda call: call.q.data_ptr(), True),
        (lambda call: call.q.data_ptr() + 2, False),  # within an input, of which only the beginning is known
        (lambda call: unwritten(call.q, 100).data_ptr() + 16, True),  # a part of what the pass made
        (lambda call: unwritten(call.q, 100)[8:].data_ptr(), True),
        (lambda call: FOREIGN.data_ptr(), False),
        (lambda call: torch.empty(100).data_ptr(), True),
        (lambda call: unwritten(call.q, 100).zero_().data_ptr(), False),
        (lambda call: 2**32 - 1, True),  # a number
        (lambda call: 2**40, False),  # an address of nothing
    ],
)
def test_a_recording_tells_what_each_address_is(extra: Any, recorded: bool) -> None:
    """The pass has one launch."""
    call, step = call_of(0, None), (0, 1, 32, 0, False, None, launch.layout(0, False, 3))
    recorder = replay.Recorder([x.data_ptr() for x in (call.q, call.k, call.v, call.selection.ranges)])
    with recorder:
        o, lse = unwritten(call.q, 4), unwritten(call.q, 4)
        cuda_driver.thread.recording.launch(*step, values=(o.data_ptr(), lse.data_ptr(), extra(call)))
    assert (recorder.finished((o, lse)) is not None) == recorded
    assert cuda_driver.thread.recording is None


@needs_compiler
def test_debug_triton_names_the_pass_whose_launches_depend_on_more_than_its_class() -> None:
    known: dict[Any, Any] = {REPEATED: True}
    constants = [0.5, 0.5, 0.25]

    def forward(call: Call) -> tuple[Tensor, ...]:
        o = unwritten(call.q, 4)
        step = (0, 1, 32, 0, False, None, struct.Struct("<Qd"))
        cuda_driver.thread.recording.launch(*step, values=(o.data_ptr(), constants.pop(0)))
        return (o,)

    calls = [call_of(seed, known) for seed in range(3)]
    for call in calls:
        call.settings = msgspec.structs.replace(call.settings, debug_triton=True)
    replay.replayed(calls[0], forward)
    replay.replayed(calls[1], forward)
    with pytest.raises(BackendError, match=r"test_launcher.*forward: a pass of one class of calls had constants .*launcher"):
        replay.replayed(calls[2], forward)


@needs_compiler
def test_what_was_measured_between_two_passes_is_another_class(driver: list[str], played: list[int]) -> None:
    """Measured selections have room for fewer tiles per range than those that were not, which are of the same class before the forward."""
    known: dict[Any, Any] = {REPEATED: True}

    def both(seed: int, length: int, facts: dict[Any, Any] | None, measured: bool) -> list[Tensor]:
        call = call_of(seed, facts)
        start = torch.arange(2 * 8 * 2).view(2, 8, 2, 1) % (70 - length)
        call.selection = Selection.from_ranges(torch.stack((start, start + length), -1).int())
        o, lse = cupy_cuda.forward(call)
        if measured:
            call.selection.measure()
        again = replace(call)
        again.known = call.known
        return [o, lse, *cupy_cuda.backward(again, o, lse, make_grads(call.q, call.v, seed)[0], None)]

    for seed in range(4):
        both(seed, 8, known, True)
    assert len(played) >= 3
    for seed in range(4):
        assert_equal(both(seed, 60, known, False), both(seed, 60, None, False))


@needs_compiler
def test_old_recordings_make_room(monkeypatch: pytest.MonkeyPatch, driver: list[str]) -> None:
    monkeypatch.setattr(replay, "MOST_RECORDINGS", 3)
    replay._recordings.clear()
    facts: list[dict[Any, Any]] = [{REPEATED: True} for _ in range(2)]
    for number in range(6):
        passes(call_of(0, facts[number // 3]), 0)
    assert [sum(len(x.made) for x in known.values() if isinstance(x, replay.Recordings)) for known in facts] == [1, 2]


BACKENDS = ("triton-token", "triton-group", "triton-tile", "triton-block", "cuda-block", "cupy-cuda")
on_every_backend = pytest.mark.parametrize(
    "backend", [pytest.param(x, marks=[pytest.mark.skip(reason="missing")] if registry.missing(x) else []) for x in BACKENDS]
)
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def inputs_of(seed: int, S: int = 100, block: int = 64, S_kv: int = 400) -> Inputs:
    """q, k, v, do and block indices."""
    q, k, v = make_qkv(2, S, 2, 4, 64, S_kv=S_kv, dtype=torch.bfloat16, device="cuda", seed=seed)
    return q, k, v, make_grads(q, v, seed)[0], make_blocks(2, S, 2, S_kv, 3, block, seed=seed, device="cuda").block_indices


def step(backend: str, inputs: Inputs, block: int = 64, run: Callable[..., Any] | None = None, loss_of_lse: bool = False) -> list[Tensor]:
    """o, lse, dq, dk, dv of a new selection."""
    *leaves, do, blocks = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]

    def call(*tensors: Tensor) -> Any:
        selection = Selection.from_blocks(blocks, block)
        return selection_attention(*tensors, selection, return_lse=True, backend=backend)

    o, lse = (run or (lambda work, *tensors: work(*tensors)))(call, *leaves)
    assert (decisions()[-1].forward, decisions()[-1].backward) == (backend, backend)
    outputs, gradients = ((o, lse), (do, torch.ones_like(lse))) if loss_of_lse else ((o,), (do,))
    return [o.detach(), lse.detach(), *torch.autograd.grad(outputs, leaves, gradients)]


def as_written(work: Callable[[], Any]) -> Any:
    """Return `work()` without recording."""
    reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "TRIES", 0)
        patch.setattr(ranges_module, "_classes", {})
        found = work()
    reset()
    return found


@pytest.mark.gpu
@on_every_backend
@pytest.mark.parametrize(("S", "block", "loss_of_lse"), [(100, 64, False), (100, 32, True), (1, 64, False), (1000, 16, False)])
def test_new_tensors_and_selections(backend: str, played: list[Any], S: int, block: int, loss_of_lse: bool) -> None:
    problems = [inputs_of(seed, S, block, max(S, 400)) for seed in range(6)]
    wanted = as_written(lambda: [step(backend, x, block, loss_of_lse=loss_of_lse) for x in problems])
    assert played == []
    for x, y in zip(problems, wanted, strict=True):
        played.clear()
        assert_equal(step(backend, x, block, loss_of_lse=loss_of_lse), y)
    # Forward, and backward with its lists; a forward pass of few rows that reads disjoint ranges is not recorded.
    assert len(played) >= (1 if S == 1 and backend in ("triton-tile", "triton-block", "cuda-block") else 2)
    if S > 100:
        return  # the oracle takes long
    q, k, v, do, blocks = problems[-1]
    selection = Selection.from_blocks(blocks, block)
    assert_forward((y[0], y[1]), q, k, v, selection.ranges)
    if not loss_of_lse:
        assert_gradients(tuple(y[2:]), q, k, v, selection.ranges, do, None)


def saved_on_cpu(work: Callable[..., Any], *tensors: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return work(*tensors)


def recomputed(work: Callable[..., Any], *tensors: Tensor) -> Any:
    return checkpoint(work, *tensors, use_reentrant=False)


def in_half(work: Callable[..., Any], *tensors: Tensor) -> Any:
    with torch.autocast("cuda", torch.float16):
        return work(*tensors)


@pytest.mark.gpu
@on_every_backend
@pytest.mark.parametrize("run", [saved_on_cpu, recomputed, in_half])
def test_what_autograd_does_around_a_call(backend: str, played: list[Any], run: Callable[..., Any]) -> None:
    problems = [inputs_of(seed) for seed in range(5)]
    if run is in_half:
        problems = [(*x[:3], x[3].half(), x[4]) for x in problems]
    wanted = as_written(lambda: [step(backend, x, run=run) for x in problems])
    for x, y in zip(problems, wanted, strict=True):
        assert_equal(step(backend, x, run=run), y)
    assert played


@pytest.mark.gpu
@on_every_backend
def test_threads_with_streams_of_their_own(backend: str, played: list[Any]) -> None:
    """Nothing that a replay packs or allocates is shared: the bits of each thread are those of one alone."""
    problems = [inputs_of(seed, 400) for seed in range(4)]
    wanted = as_written(lambda: [step(backend, x) for x in problems])
    for _ in range(5):
        step(backend, problems[0])
    torch.cuda.synchronize()
    played.clear()

    def work(number: int) -> list[list[Tensor]]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(number % 2 == 0):
            found = [step(backend, problems[(number + i) % 4]) for i in range(12)]
        stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(work, range(4))):
            for i, got in enumerate(found):
                assert_equal(got, wanted[(number + i) % 4])
    assert len(played) > 4 * 12


@pytest.mark.gpu
@on_every_backend
def test_streams_that_share_a_selection(backend: str, played: list[Any]) -> None:
    """Neither reads a plan that another has only queued. The first calls are written as they are, the last ones replayed."""
    q, k, v, do, blocks = inputs = inputs_of(0)
    wanted = step(backend, inputs)
    late, early = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(6):
        shared, found = Selection.from_blocks(blocks, 64), []
        torch.cuda.synchronize()
        for stream in (late, early):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000 * (stream is late))  # cycles
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                o, lse = selection_attention(*leaves, shared, return_lse=True, backend=backend)
                found.append([o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)])
        torch.cuda.synchronize()
        for got in found:
            assert_equal(got, wanted)
    assert played


@pytest.mark.gpu
@on_every_backend
@pytest.mark.parametrize("S", [100, 1])
def test_a_selection_that_a_capture_uses_first(backend: str, S: int) -> None:
    """The graph reads its ranges, which may be written between replays."""
    q, k, v, _, blocks = inputs_of(0, S)
    other = inputs_of(1, S)[4]
    for _ in range(3):
        wanted = [selection_attention(q, k, v, Selection.from_blocks(x, 64), backend=backend) for x in (blocks, other)]
    static, graph = Selection.from_blocks(blocks, 64), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = selection_attention(q, k, v, static, backend=backend)
    for x, expected in zip((blocks, other), wanted, strict=True):
        static.ranges.copy_(Selection.from_blocks(x, 64).ranges)
        graph.replay()
        assert torch.equal(o, expected)


@pytest.mark.gpu
def test_ranges_are_never_made_on_the_stream_of_a_capture() -> None:
    """PyTorch has 32 streams, which take turns."""
    q, k, v, _, blocks = inputs_of(0, 1)
    wanted = selection_attention(q, k, v, Selection.from_blocks(blocks, 64))
    for _ in range(33):
        static, graph = Selection.from_blocks(blocks, 64), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = selection_attention(q, k, v, static)
        graph.replay()
        assert torch.equal(o, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("most", [1, 600])
def test_packed_calls_are_replayed(played: list[Any], most: int, mode: Any) -> None:
    """Choosing and attention, with the same bits as of calls of no class that was there before."""
    lengths, bounds = torch.tensor([700, 90, 1000], dtype=torch.int32, device="cuda"), torch.tensor([0, 1, 2, 2 + most], device="cuda")
    table, bounds = torch.randperm(24, device="cuda").int().view(3, 8), bounds.int()
    packed: dict[str, Any] = {"cu_seqlens_q": bounds, "max_seqlen_q": most}

    def step(seed: int) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)
        made = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
        q, k, v = made(most + 2, 4, 16, 128), made(24, 128, 4, 128), made(24, 128, 4, 128)
        selection = choose_blocks_with_kvcache(q[:, :, :1], k[:, :, :1], lengths, table, n=4, **packed)
        results = selection_attention_with_kvcache(q, k, v, selection, lengths, table, return_lse=True, **packed)
        out = torch.empty_like(q)
        selection_attention_with_kvcache(q, k, v, selection, lengths, table, out=out, **packed)
        return [selection.listed, *results, out]

    with mode():
        wanted = []
        for seed in range(4):
            reset()
            wanted.append(step(seed))
        played.clear()
        for seed in (0, 1, 2, 3, 3):
            assert_equal(step(seed), wanted[seed])
            assert torch.equal(wanted[seed][1], wanted[seed][3])
    assert len(played) >= 12  # three calls of all steps but the first, which is recorded
    packed["cu_seqlens_q"] = bounds[:3]
    with pytest.raises(ArgumentError, match="cu_seqlens_q"):
        step(0)


@pytest.mark.gpu
@on_every_backend
def test_a_capture_after_replays(backend: str, played: list[Any]) -> None:
    """A CUDA graph holds a pass that runs as it is written, and follows what is written into its inputs."""
    problems = [inputs_of(seed) for seed in range(3)]
    wanted = as_written(lambda: [step(backend, x) for x in problems])
    static = tuple(x.clone() for x in problems[0])
    kept = Selection.from_blocks(static[4], 64)

    def call() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in static[:3]]
        o, lse = selection_attention(*leaves, kept, return_lse=True, backend=backend)
        return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, static[3])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            call()
    torch.cuda.current_stream().wait_stream(side)
    assert played
    number, graph = len(played), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = call()
    assert len(played) == number
    for x, y in zip(problems, wanted, strict=True):
        for old, new in zip(static, x, strict=True):
            old.copy_(new)
        kept.ranges.copy_(Selection.from_blocks(static[4], 64).ranges)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(outputs, y)
        assert_equal(call(), y)


# Tensor maps


def test_a_tensor_map_that_the_driver_refuses_is_an_error_with_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = pytest.importorskip("cupy_backends.cuda.api.runtime", reason="no CuPy; remedy: pip install cupy-cuda13x")
    monkeypatch.setattr(runtime, "setDevice", lambda device: None)
    monkeypatch.setattr(cuda_driver, "encode", lambda: lambda *_: 1)
    tensor_map._encoder.cache_clear()
    with pytest.raises(BackendError, match=r"error 1\).*\(1, 1, 10, 64\).*allowed: 16-byte.*Remedy"):
        tensor_map.tensor_map(torch.empty(1, 1, 10, 64).half(), 64, 64)


def test_nothing_measured_is_trusted_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        selection = Selection(torch.empty(1, 4, 1, 2, 2, dtype=torch.int32, device="cuda"), max_length=50)
    selection._snapshot = Snapshot(selection.ranges._version, None, Exact(7, (1.0,), 7, (100, 20)), {})
    found = {False: (7, (1.0,), 20), True: (50, None, None)}
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        assert (selection.length_bound(100), selection.sharing, selection.total_length(100)) == found[capturing]
