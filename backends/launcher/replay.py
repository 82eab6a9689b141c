"""Record the kernel launches of a forward or backward pass and replay them for later calls of the same class.

The package states what a backend must keep to. One of the first passes of a class is recorded: which kernels it
launches, with which scalars, and to which tensor each address belongs. Later passes allocate their results and one
buffer for all temporaries, fill in the addresses, and launch the kernels. Plans of selections are recorded separately;
all tensors of a plan lie in one buffer, which the selection keeps.

A recording holds no tensor and no address. A pass is never recorded if it compiles, runs a PyTorch operation, or passes
an address that belongs to none of its tensors or to several; it then always runs as Python. So do all passes during a
CUDA graph capture.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.backends.launcher.buffers import allocator, contiguous
from nsa_sel.backends.launcher.cuda_driver import clear, ready, start_all, stream_of, thread
from nsa_sel.core.transforms import REPEATED
from nsa_sel.errors import BackendError

# nsa_sel.core.call.Call, not imported: it holds a selection, whose ranges a recorded kernel makes, which would be an
# import circle.
Call = Any
ALIGNMENT = 256  # bytes between tensors in one buffer: enough for TMA and 16-byte loads
_fills = torch._C._get_deterministic_algorithms  # if True, PyTorch fills new tensors
TRIES = 3  # recording attempts per class after its first pass: a pass that compiles cannot be recorded
LEAST_ADDRESS = 1 << 32  # arguments of at least this value are addresses
MOST_BYTES = 1 << 30  # largest buffer of temporaries; calls that need more are GPU-bound, so replay saves nothing
MOST_KEPT = 1 << 20  # bytes of temporaries that may stay in a plan's buffer, because a separate allocation takes time
MOST_RECORDINGS = 1024
_numbers = itertools.count()
_recordings: deque[tuple[dict[Any, Any], Any]] = deque()  # (dict, key) of every recording, oldest first
# Operations that launch nothing.
_VIEWS = (torch.ops.aten.slice.Tensor, torch.ops.aten.view.default, torch.ops.aten.view.dtype)
_CODES = re.compile(r"(\d*)(\D)")  # count and code in a struct format
_INPUT, _OFFSET, _MAP, _CONSTANT = range(4)  # sections of the address table of `_play`


class Recording(NamedTuple):
    """The recorded launches of a pass or of building a plan. `entry` means an index in the address table of `_play`."""

    number: int  # unique id
    device: int
    make: Callable[..., Tensor]  # `allocator`
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # sizes, strides and dtype of each result
    scratch: int  # bytes of temporaries
    plans: tuple[tuple[Any, ...], ...]  # per plan: its key, its recording's key in `Call.known`, build, numbers
    offsets: tuple[tuple[int, int], ...]  # entry, bytes
    maps: tuple[tuple[int, Callable[[int], bytes | None]], ...]  # entry, encoder of tensor maps
    constants: tuple[bytes, ...]
    cleared: tuple[tuple[int, int], ...]  # entry, bytes
    steps: tuple[Any, ...]  # launches, see `cuda_driver.ready`
    kernels: tuple[Any, ...]  # kernel objects, held so that their code stays loaded
    plan: tuple[Any, ...] | None  # for a plan: type, fields (tensors as `_Part` of the buffer), offsets


class _Part(NamedTuple):
    offset: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class KeptPlan:
    """A plan cached in a selection: its value, or the type, fields and buffer from which `value` makes it on demand."""

    __slots__ = ("_buffer", "_fields", "_kind", "_value", "addresses")

    def __init__(
        self, value: Any, kind: Any = None, fields: tuple[Any, ...] = (), offsets: Sequence[int] = (), buffer: Tensor | None = None
    ) -> None:
        self._value, self._kind, self._fields, self._buffer = value, kind, fields, buffer
        begin = 0 if buffer is None else buffer.data_ptr()
        self.addresses = [x.data_ptr() for x in _tensors(value)] if buffer is None else [begin + offset for offset in offsets]

    @property
    def value(self) -> Any:
        """Return the plan, a tuple of tensors and numbers."""
        if self._value is None and self._kind is not None:
            outer, thread.recording = thread.recording, None  # views launch nothing: do not refuse the recording
            try:
                self._value = self._kind(self._view(x) if type(x) is _Part else x for x in self._fields)
            finally:
                thread.recording = outer
        return self._value

    def _view(self, part: _Part) -> Tensor:
        assert self._buffer is not None, "who has fields has a buffer"
        end = part.offset + math.prod(part.sizes) * part.dtype.itemsize
        return self._buffer[part.offset : end].view(part.dtype).view(part.sizes)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in value if isinstance(x, Tensor)] if isinstance(value, tuple) else []


def kept_plan(call: Call, key: tuple[object, ...], build: Callable[..., Any], *numbers: Any) -> KeptPlan:
    """Return `build(call, *numbers)`, cached in the selection by key, numbers, S_kv, and positions or lengths (causal
    clamp).

    Everything in the plan except the values of its tensors must follow from these, because a recording accepts any plan
    with this key.

    During a CUDA graph capture the plan is built every time: a graph replay must follow ranges written since the
    capture, and a plan built in a capture holds no data until the graph is replayed.
    """
    if call.capturing():
        return KeptPlan(build(call, *numbers))
    made_from = () if call.q_pos is None and call.lengths is None else (call.q_pos, call.lengths)
    key = (*key, *numbers, call.k.shape[2])
    plan: KeptPlan = call.selection.plan(key, lambda: _built(call, build, numbers), *made_from)
    if thread.recording is not None:
        thread.recording.use(call, plan, (key, _kind(call, build, call.disjoint_ranges(), numbers), build, numbers))
    return plan


def _plan_again(
    call: Call, inputs: list[int], on: tuple[Any, ...], key: tuple[Any, ...], kind: Any, build: Callable[..., Any], numbers: tuple[Any, ...]
) -> KeptPlan:  # fmt: skip
    """Build a plan for a pass that is being replayed with these inputs. on: see `Selection.keep`."""
    recording = call.known.get(kind)
    plan: KeptPlan | None = _play(recording, inputs[:4], call) if type(recording) is Recording else None
    if plan is None:
        return call.selection.plan(key, lambda: _built(call, build, numbers))  # type: ignore[no-any-return]
    call.selection.keep(on, plan)
    return plan


def _kind(call: Call, work: Callable[..., Any], ranges: Tensor, numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the key of a recording in `Call.known`. It has `exact()`, because `measure` may run between forward and
    backward."""
    return work, ranges.dtype, call.selection.exact(), *numbers


def _built(call: Call, build: Callable[..., Any], numbers: tuple[Any, ...]) -> KeptPlan:
    outer, thread.recording = thread.recording, None
    try:
        built = replayed(call, build, (), numbers, plan=True)
    finally:
        thread.recording = outer
    return built if type(built) is KeptPlan else KeptPlan(built)


def replayed(
    call: Call, work: Callable[..., Any], given: tuple[Tensor | None, ...] = (), numbers: tuple[Any, ...] = (), plan: bool = False
) -> Any:
    """Return `work(call, *given, *numbers)` (a pass, or building a plan), run or replayed.

    Its kernels read q, k, v, the tensors in `given`, and the disjoint ranges; in the forward pass of few rows (without
    `given`) `Call.listed_ranges`. A pass of few rows that reads the disjoint ranges is never recorded.
    """
    recordings, settings = call.known, call.settings
    if REPEATED not in recordings or call.workspace is not None or (settings.traced and not settings.debug_triton) or call.capturing():
        return work(call, *given, *numbers)
    ranges = call.disjoint_ranges() if plan or given else call.listed_ranges()
    key = _kind(call, work, ranges, numbers)
    if given:
        key += tuple([None if x is None else (x.dtype, x.stride()) for x in given])
    inputs = (call.q, call.k, call.v, ranges, *given)
    if settings.debug_triton:
        return checked(recordings, key, inputs, work, lambda: work(call, *given, *numbers), plan)
    return recorded(recordings, key, inputs, lambda: work(call, *given, *numbers), call, plan)


def checked(
    recordings: dict[Any, Any], key: Any, inputs: Sequence[Tensor | None], backend: Callable[..., Any], work: Callable[[], Any], plan: bool
) -> Any:  # fmt: skip
    """Return `work()`. Record it, and raise BackendError if its launches differ from the first recording of its class.

    Args:
        recordings, key, inputs, work, plan: those of `recorded`.
        backend: the pass, or what builds the plan; the error names it.
    """
    if thread.recording is not None or _fills() or cuda_driver.hooked():
        return work()
    recorder = Recorder([0 if x is None else x.data_ptr() for x in inputs])
    with recorder:
        result = work()
    made = recorder.finished(result, plan)
    if made is None:
        return result
    first = recordings.setdefault(("checked", key), made)
    for field, was, now in zip(_Launches._fields, _Launches.of(first), _Launches.of(made), strict=True):
        if was != now:
            raise BackendError(
                f"{backend.__module__}.{backend.__qualname__}: a pass of one class of calls had {field} {now}, an earlier one {was};"
                " allowed: the same, because passes are replayed. Remedy: see the rule in nsa_sel/backends/launcher/__init__.py."
            )
    return result


class _Launches(NamedTuple):
    """The facts of a recording that all passes of a class share."""

    kernels: tuple[int, ...]  # functions
    grids: tuple[bytes, ...]
    outputs: tuple[Any, ...]
    scratch: int
    offsets: tuple[Any, ...]
    constants: tuple[bytes, ...]
    cleared: tuple[Any, ...]

    @classmethod
    def of(cls, recording: Recording) -> _Launches:
        kernels, grids = (tuple(step[i] for step in recording.steps) for i in (0, 1))
        facts = recording.outputs, recording.scratch, recording.offsets, recording.constants, recording.cleared
        return cls(kernels, grids, *facts)


def recorded(
    recordings: dict[Any, Any], key: Any, inputs: Sequence[Tensor | None], work: Callable[[], Any], call: Call = None, plan: bool = False
) -> Any:
    """Return `work()`, run or replayed.

    Args:
        recordings: the recordings of a class of calls, by key.
        key: everything that determines the launches of `work`, including the device, except for addresses. Replays need
            all addresses to be multiples of 16.
        inputs: the tensors that kernels read.
        work: a pass, or building a plan.
        call: the pass's call, whose plans it uses.
        plan: whether `work` builds a plan.
    """
    if thread.recording is not None:  # nested in a pass that is being recorded
        return work()
    recording = recordings.get(key)
    addresses = [0 if x is None else x.data_ptr() for x in inputs]
    if functools.reduce(operator.or_, addresses) & 15 or _fills() or cuda_driver.hooked():
        return work()
    if type(recording) is Recording:
        result = _play(recording, addresses, call)
        if result is not None:
            return result
        recording = 0  # the driver refused a launch: run the pass, which raises its own error
    if recording is None or recording == TRIES:  # do not record the first pass: most keys occur once
        recordings.setdefault(key, 0)
        return work()
    recorder = Recorder(addresses)
    with recorder:
        result = work()
    made = recorder.finished(result, plan)
    recordings[key] = made or recording + 1
    if made:
        _recordings.append((recordings, key))
        if len(_recordings) > MOST_RECORDINGS:  # a growing cache makes a new class at every step
            old, its_key = _recordings.popleft()
            old.pop(its_key, None)
    return result


def _play(recording: Recording, inputs: list[int], call: Call) -> Any:
    """Replay a pass and return its result, or None if the driver refuses a launch.

    Builds a table of argument values: addresses of inputs, outputs, temporaries and tensors of plans; addresses at an
    offset within these; tensor maps; packed constants.
    """
    number, device, make, outputs_of, scratch_bytes, plans_of, offsets, maps_of, constants, cleared, steps, _, plan_of = recording
    stream = stream_of(device)
    steps = ready(number, device, steps, stream)
    outputs = tuple([make(*facts) for facts in outputs_of])
    table: list[Any] = inputs + [y.data_ptr() for y in outputs]
    scratch = make((scratch_bytes,), (1,), torch.uint8) if scratch_bytes else None
    table.append(0 if scratch is None else scratch.data_ptr())
    plans = []  # hold references until all kernels are queued: in inference mode nothing else does
    for key, kind, build, numbers in plans_of:
        assert call is not None, "a pass that uses plans has a call"
        on = key if device < 0 else (*key, stream)
        plan = call.selection.kept(on)
        if plan is None:
            plan = _plan_again(call, inputs, on, key, kind, build, numbers)
        plans.append(plan)
        table += plan.addresses
    if offsets:
        table += [table[entry] + offset for entry, offset in offsets]
    if maps_of:
        maps = [encode(table[entry]) for entry, encode in maps_of]
        if None in maps:
            return None
        table += maps
    table += constants
    for entry, size in cleared:
        if clear(table[entry], size, stream):
            return None
    if start_all(steps, table):
        return None
    if plan_of is None:
        return outputs
    kind, fields, locations = plan_of
    return KeptPlan(None, kind, fields, locations, outputs[0])


class _Span(NamedTuple):
    """Memory [begin, begin + size), which starts `offset` bytes after the address in a table entry."""

    begin: int
    size: int
    entry: int
    offset: int


class Recorder:
    """Record one pass of this thread inside a `with` block. `refused` becomes True if the pass cannot be replayed."""

    def __init__(self, inputs: list[int]) -> None:
        self.inputs, self.refused = inputs, False
        self.made: list[Tensor] = []  # tensors that `unwritten` allocated
        self.plans: list[tuple[Any, ...]] = []
        self.plan_tensors: list[Tensor] = []
        self.encoders: dict[bytes, tuple[int, Callable[[int], bytes | None]]] = {}  # tensor map -> address, encoder
        self.cleared: list[tuple[int, int]] = []
        self.kernels: list[Any] = []  # objects that keep kernel code loaded
        self.launches: list[tuple[Any, ...]] = []  # arguments of `launch`

    def __enter__(self) -> None:
        python = torch._C.DispatchKey.Python
        self.refused |= torch._C._dispatch_tls_is_dispatch_key_excluded(python)  # `_RefuseOperations` would then see no operation
        self._mode = _RefuseOperations()  # type: ignore[no-untyped-call]
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        thread.recording = self._mode.recorder = self

    def __exit__(self, *error: Any) -> None:
        thread.recording = self._mode.recorder = None  # break the reference cycle, which would keep tensors alive
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]

    def use(self, call: Call, plan: KeptPlan, arguments: tuple[Any, ...]) -> None:
        """Record that the pass uses a plan."""
        q = call.q.data_ptr()
        self.refused |= q != self.inputs[0] or REPEATED not in call.known
        if arguments not in self.plans:
            self.plans.append(arguments)
            self.plan_tensors += _tensors(plan.value)

    def launch(
        self, function: int, ctas: int, threads: int, shared: int, early: bool, pointers: Any, arguments: struct.Struct,
        values: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Record a kernel launch: the arguments of `cuda_driver.start`, and the values that were packed."""
        self.launches.append((function, cuda_driver.grid(ctas, threads, shared), early, pointers, arguments, values))

    def finished(self, result: Any, plan: bool) -> Recording | None:
        """Return the recording of a pass (or plan) that returned `result`, or None if it cannot be replayed."""
        outputs = _tensors(result)
        own = [x for x in self.made if not any(x is y for y in outputs)]
        simple = isinstance(result, tuple) and all(isinstance(x, Tensor | int | None) for x in result)
        low = any(0 < x < LEAST_ADDRESS for x in (*self.inputs, *(x.data_ptr() for x in self.made + self.plan_tensors)))
        large = sum(x.nbytes for x in (self.made if plan else own)) > MOST_BYTES
        if (
            self.refused
            or not outputs
            or low
            or large
            or not simple
            or len(own) + len(outputs) != len(self.made)
            or (not plan and len(outputs) != len(result))
        ):
            return None
        first, spans = len(self.inputs), [_Span(x, 1, i, 0) for i, x in enumerate(self.inputs) if x]
        facts = [(tuple(x.shape), contiguous(tuple(x.shape)), x.dtype) for x in outputs]
        if plan:
            apart = sum(x.nbytes for x in own) > MOST_KEPT
            size, parts = _packed(outputs if apart else outputs + own, first)
            spans += parts
            facts = [((size,), (1,), torch.uint8)]
            locations = [_Part(part.offset, tuple(x.shape), x.dtype) for part, x in zip(parts, outputs, strict=False)]
            fields = iter(locations)
            kind = getattr(type(result), "_make", tuple)  # `_make` for named tuples
            described = kind, tuple(next(fields) if isinstance(x, Tensor) else x for x in result), tuple(x.offset for x in locations)
            own = own if apart else []
        else:
            spans += [_Span(x.data_ptr(), x.nbytes, first + i, 0) for i, x in enumerate(outputs)]
        scratch, parts = _packed(own, first + len(facts))
        spans += parts
        after = first + len(facts) + 1
        spans += [_Span(x.data_ptr(), x.nbytes, after + i, 0) for i, x in enumerate(self.plan_tensors)]
        table = _Table(spans, after + len(self.plan_tensors), self.encoders)
        steps = [(*step, *table.packed(arguments, values)) for *step, arguments, values in self.launches]
        cleared = [(table.location(address), size) for address, size in self.cleared]
        if table.refused:
            return None
        return Recording(
            next(_numbers), outputs[0].get_device(), allocator(outputs[0]), tuple(facts), scratch, tuple(self.plans),
            tuple(table.offsets), tuple(table.maps), tuple(table.constants),
            tuple((table.entry(location), size) for location, size in cleared),
            tuple((*step, _getter([table.entry(location) for location in locations])) for *step, locations in steps), tuple(self.kernels),
            described if plan else None,
        )  # fmt: skip


def _packed(tensors: list[Tensor], entry: int) -> tuple[int, list[_Span]]:
    """Return the size of a buffer (table entry `entry`) that holds these tensors one after another, and the span of
    each."""
    size, spans = 0, []
    for x in tensors:
        spans.append(_Span(x.data_ptr(), x.nbytes, entry, size))
        size += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    return size, spans


class _Table:
    """Builds the table of `_play` from recorded values. A location is (section of the table, index in the section)."""

    def __init__(self, spans: list[_Span], bases: int, encoders: dict[bytes, tuple[int, Callable[[int], bytes | None]]]) -> None:
        self.spans, self.bases, self.encoders, self.refused = spans, bases, encoders, False
        self.offsets: list[tuple[int, int]] = []
        self.maps: list[tuple[int, Callable[[int], bytes | None]]] = []
        self.constants: list[bytes] = []

    def packed(self, arguments: struct.Struct, values: tuple[Any, ...]) -> tuple[struct.Struct, list[tuple[int, int]]]:
        """Return the struct with which a replay packs a kernel's arguments, and the locations of its values.

        Runs of adjacent scalars are packed once into a constant.
        """
        codes, locations, left = "<", list[tuple[int, int]](), iter(values)
        same, numbers = "", list[Any]()  # codes and values of the current run of scalars
        for number, code in [*_CODES.findall(arguments.format[1:]), ("", "")]:
            for one in [number + code] if code in ("s", "") else int(number or 1) * [code]:
                value = next(left) if one and code != "x" else None
                address = value in self.encoders if type(value) is bytes else type(value) is int and value >= LEAST_ADDRESS
                if same and (address or not one):
                    together = struct.pack("<" + same, *numbers)
                    codes += f"{len(together)}s"
                    locations.append(self.location(together))
                    same, numbers = "", []
                if address:
                    codes += one
                    locations.append(self.location(value))
                else:
                    same += one
                    numbers += [] if code == "x" else [value]
        return struct.Struct(codes), locations

    def location(self, value: Any) -> tuple[int, int]:
        if type(value) is bytes and value in self.encoders:
            address, encode = self.encoders[value]
            location = self.location(address)
            self.refused |= location[0] != _INPUT  # maps must point to the start of a tensor
            return _MAP, _index(self.maps, (location[1], encode))
        if type(value) is bytes:
            return _CONSTANT, _index(self.constants, value)
        spans = [x for x in self.spans if x.begin <= value < x.begin + x.size]
        self.refused |= len(spans) != 1
        if self.refused:
            return _INPUT, 0
        (span,) = spans
        offset = span.offset + value - span.begin
        return (_OFFSET, _index(self.offsets, (span.entry, offset))) if offset else (_INPUT, span.entry)

    def entry(self, location: tuple[int, int]) -> int:
        part, number = location
        return sum((self.bases, len(self.offsets), len(self.maps))[:part]) + number


def _getter(entries: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return a function that takes these entries from a table."""
    return operator.itemgetter(*entries) if len(entries) > 1 else lambda table: tuple([table[entry] for entry in entries])


def _index(values: list[Any], x: Any) -> int:
    """Return the index of x in the list, appending it if it is new."""
    if x not in values:
        values.append(x)
    return values.index(x)


class _RefuseOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse the recording if PyTorch dispatches an operation during the pass."""

    recorder: Recorder | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import dynamo, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder is not None and thread.recording is self.recorder and func not in _VIEWS:
            self.recorder.refused = True
        return func(*args, **(kwargs or {}))
