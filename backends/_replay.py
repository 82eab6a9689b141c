"""Passes replayed from a recording: what a pass launches follows from the facts of its call, all but the addresses.

The first passes of a class run as they are written, and one of them is recorded: which kernels it starts, with which numbers, and to which
tensor each address belongs. Later ones allocate their results and one buffer for all temporaries, fill in the addresses, and start the
kernels. Plans of selections are recorded each on their own; all tensors of one are in one buffer, which the selection keeps.

A recording holds no tensor and no address. None is made of a pass that compiles, runs an operation of PyTorch, or passes an address that
belongs to none of its tensors or to two: such a pass always runs as it is written. So do all passes in a CUDA graph's capture.
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

from nsa_sel.backends import _driver
from nsa_sel.backends._buffers import allocator, contiguous
from nsa_sel.backends._driver import clear, ready, start_all, stream_of, thread
from nsa_sel.core.transforms import REPEATED

Call = Any  # nsa_sel.core.call.Call, which holds a selection, whose ranges are made by a recorded kernel: importing it would be a circle
ALIGNMENT = 256  # bytes between tensors in one buffer: enough for TMA and 16-byte loads
_fills = torch._C._get_deterministic_algorithms  # PyTorch then fills new tensors
TRIES = 3  # passes of a class, after its first, that may be recorded: more may compile
LEAST_ADDRESS = 1 << 32  # of memory; larger numbers are addresses
MOST_BYTES = 1 << 30  # of what a pass allocates beside its results, in one piece: the GPU bounds calls that need more
MOST_KEPT = 1 << 20  # bytes of temporaries that stay with a plan: allocating them apart takes longer than they are worth
MOST_RECORDINGS = 1024
_numbers = itertools.count()
_recordings: deque[tuple[dict[Any, Any], Any]] = deque()  # where they are, oldest first
_VIEWS = (torch.ops.aten.slice.Tensor, torch.ops.aten.view.default, torch.ops.aten.view.dtype)  # operations that launch nothing
_CODES = re.compile(r"(\d*)(\D)")  # of a struct's format: number and code
_INPUT, _OFFSET, _MAP, _CONSTANT = range(4)  # the parts of a table of `_play`


class Recording(NamedTuple):
    """What a pass, or the building of a plan, does. Entries are those of the table of `_play`."""

    number: int  # no other's
    device: int
    make: Callable[..., Tensor]  # `allocator`
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # sizes, strides and dtype of what it returns
    scratch: int  # bytes of temporaries
    plans: tuple[tuple[Any, ...], ...]  # of each its key in the selection, that of its recording in `Call.known`, and how it is built
    offsets: tuple[tuple[int, int], ...]  # entry, bytes
    maps: tuple[tuple[int, Callable[[int], bytes | None]], ...]  # entry, encoder of tensor maps
    constants: tuple[bytes, ...]
    cleared: tuple[tuple[int, int], ...]  # entry, bytes
    steps: tuple[Any, ...]  # of `_driver.ready`
    kernels: tuple[Any, ...]  # held, so that they stay loaded
    plan: tuple[Any, ...] | None  # of a plan: what makes it, its fields with a `_Part` of the one output for a tensor, and their offsets


class _Part(NamedTuple):
    offset: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class KeptPlan:
    """A plan as a selection keeps it: its value, or what makes it of its fields, and the buffer that holds its tensors."""

    __slots__ = ("_buffer", "_fields", "_kind", "_value", "addresses")

    def __init__(
        self, value: Any, kind: Any = None, fields: tuple[Any, ...] = (), offsets: Sequence[int] = (), buffer: Tensor | None = None
    ) -> None:
        self._value, self._kind, self._fields, self._buffer = value, kind, fields, buffer
        begin = 0 if buffer is None else buffer.data_ptr()
        self.addresses = [x.data_ptr() for x in _tensors(value)] if buffer is None else [begin + offset for offset in offsets]

    @property
    def value(self) -> Any:
        """The tuple of tensors and numbers."""
        if self._value is None and self._kind is not None:
            outer, thread.recording = thread.recording, None  # these views launch nothing, whatever operations PyTorch makes of them
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
    """`build(call, *numbers)`, kept in the selection for this key, number of keys, and positions or lengths: the causal clamp depends on
    them.

    Whatever the plan has beside the values of its tensors must follow from these: a recording takes any plan with this key.

    In a CUDA graph it is built every time: a replay must follow ranges that were written since the capture, and a plan that a capture
    builds holds nothing until the graph is replayed.
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
    """Builds a plan for a pass that is replayed with these inputs. on: see `Selection.keep`."""
    recording = call.known.get(kind)
    plan: KeptPlan | None = _play(recording, inputs[:4], call) if type(recording) is Recording else None
    if plan is None:
        return call.selection.plan(key, lambda: _built(call, build, numbers))  # type: ignore[no-any-return]
    call.selection.keep(on, plan)
    return plan


def _kind(call: Call, work: Callable[..., Any], ranges: Tensor, numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells recordings of calls that share `Call.known` apart: `measure` may be called between a forward and its backward pass."""
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
    """`work(call, *given, *numbers)`, one pass, or the building of a plan: its kernels read q, k, v, the disjoint ranges, and what is
    `given`."""
    known = call.known
    if REPEATED not in known or call.workspace is not None or call.settings.traced or call.capturing():
        return work(call, *given, *numbers)
    ranges = call.disjoint_ranges()
    key = _kind(call, work, ranges, numbers)
    if given:
        key += tuple([None if x is None else (x.dtype, x.stride()) for x in given])
    return recorded(known, key, (call.q, call.k, call.v, ranges, *given), lambda: work(call, *given, *numbers), call, plan)


def recorded(
    known: dict[Any, Any], key: Any, inputs: Sequence[Tensor | None], work: Callable[[], Any], call: Call = None, plan: bool = False
) -> Any:
    """`work()`, or a replay.

    Args:
        known: recordings, with their keys.
        key: what the launches of `work` follow from, the device included, but for the addresses, where all are multiples of 16.
        inputs: the tensors that kernels read.
        work: a pass, or the building of a plan.
        call: of the pass, whose plans it uses.
        plan: whether `work` builds one.
    """
    if thread.recording is not None:  # a part of what is recorded
        return work()
    recording = known.get(key)
    addresses = [0 if x is None else x.data_ptr() for x in inputs]
    if functools.reduce(operator.or_, addresses) & 15 or _fills() or _driver.hooked():
        return work()
    if type(recording) is Recording:
        found = _play(recording, addresses, call)
        if found is not None:
            return found
        recording = 0  # the driver refuses a launch: the pass fails in words of its own
    if recording is None or recording == TRIES:  # most keys are seen once
        known.setdefault(key, 0)
        return work()
    recorder = Recorder(addresses)
    with recorder:
        result = work()
    made = recorder.finished(result, plan)
    known[key] = made or recording + 1
    if made:
        _recordings.append((known, key))
        if len(_recordings) > MOST_RECORDINGS:  # keys and values that grow make new classes at every step
            old, its_key = _recordings.popleft()
            old.pop(its_key, None)
    return result


def _play(recording: Recording, inputs: list[int], call: Call) -> Any:
    """What the recorded pass returns; None if the driver refuses a launch.

    The table of what kernels take: addresses of the inputs, outputs, temporaries, and tensors of plans; addresses within these; tensor
    maps; what is the same in every pass, packed.
    """
    number, device, make, outputs_of, scratch_bytes, plans_of, offsets, maps_of, constants, cleared, steps, _, plan_of = recording
    stream = stream_of(device)
    steps = ready(number, device, steps, stream)
    outputs = tuple([make(*facts) for facts in outputs_of])
    table: list[Any] = inputs + [y.data_ptr() for y in outputs]
    scratch = make((scratch_bytes,), (1,), torch.uint8) if scratch_bytes else None
    table.append(0 if scratch is None else scratch.data_ptr())
    plans = []  # held until all kernels are queued: in inference mode nobody else does
    for key, kind, build, numbers in plans_of:
        assert call is not None, "who uses plans has one"
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
    kind, fields, places = plan_of
    return KeptPlan(None, kind, fields, places, outputs[0])


class _Span(NamedTuple):
    """Memory [begin, begin + size) that is `offset` bytes behind what an entry of the table points to."""

    begin: int
    size: int
    entry: int
    offset: int


class Recorder:
    """Records one pass of this thread, inside `with`. `refused` once the pass can't be replayed."""

    def __init__(self, inputs: list[int]) -> None:
        self.inputs, self.refused = inputs, False
        self.made: list[Tensor] = []  # by `unwritten`
        self.plans: list[tuple[Any, ...]] = []
        self.plan_tensors: list[Tensor] = []
        self.encoders: dict[bytes, tuple[int, Callable[[int], bytes | None]]] = {}  # of tensor maps: address and encoder
        self.cleared: list[tuple[int, int]] = []
        self.kernels: list[Any] = []  # what a kernel's code goes with
        self.launches: list[tuple[Any, ...]] = []  # arguments of `launch`

    def __enter__(self) -> None:
        python = torch._C.DispatchKey.Python
        self.refused |= torch._C._dispatch_tls_is_dispatch_key_excluded(python)  # then the watch sees nothing
        self._watch = _Watch()  # type: ignore[no-untyped-call]
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        thread.recording = self._watch.recorder = self

    def __exit__(self, *error: Any) -> None:
        thread.recording = self._watch.recorder = None  # no cycle, which would keep tensors
        self._watch.__exit__(*error)  # type: ignore[no-untyped-call]

    def use(self, call: Call, plan: KeptPlan, arguments: tuple[Any, ...]) -> None:
        """The pass uses a plan."""
        q = call.q.data_ptr()
        self.refused |= q != self.inputs[0] or REPEATED not in call.known
        if arguments not in self.plans:
            self.plans.append(arguments)
            self.plan_tensors += _tensors(plan.value)

    def launch(
        self, function: int, ctas: int, threads: int, shared: int, early: bool, pointers: Any, arguments: struct.Struct,
        values: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """The pass starts a kernel: see `_driver.start`, and the values that are packed."""
        self.launches.append((function, _driver.grid(ctas, threads, shared), early, pointers, arguments, values))

    def finished(self, result: Any, plan: bool) -> Recording | None:
        """The recording of a pass, or of a plan, that has returned `result`."""
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
            places = [_Part(part.offset, tuple(x.shape), x.dtype) for part, x in zip(parts, outputs, strict=False)]
            fields = iter(places)
            kind = getattr(type(result), "_make", tuple)  # of named tuples
            described = kind, tuple(next(fields) if isinstance(x, Tensor) else x for x in result), tuple(x.offset for x in places)
            own = own if apart else []
        else:
            spans += [_Span(x.data_ptr(), x.nbytes, first + i, 0) for i, x in enumerate(outputs)]
        scratch, parts = _packed(own, first + len(facts))
        spans += parts
        after = first + len(facts) + 1
        spans += [_Span(x.data_ptr(), x.nbytes, after + i, 0) for i, x in enumerate(self.plan_tensors)]
        table = _Table(spans, after + len(self.plan_tensors), self.encoders)
        steps = [(*step, *table.packed(arguments, values)) for *step, arguments, values in self.launches]
        cleared = [(table.place(address), size) for address, size in self.cleared]
        if table.refused:
            return None
        return Recording(
            next(_numbers), outputs[0].get_device(), allocator(outputs[0]), tuple(facts), scratch, tuple(self.plans),
            tuple(table.offsets), tuple(table.maps), tuple(table.constants),
            tuple((table.entry(place), size) for place, size in cleared),
            tuple((*step, _getter([table.entry(place) for place in places])) for *step, places in steps), tuple(self.kernels),
            described if plan else None,
        )  # fmt: skip


def _packed(tensors: list[Tensor], entry: int) -> tuple[int, list[_Span]]:
    """The size of a buffer for these tensors one after another, which is `entry` of the table, and where each is."""
    size, spans = 0, []
    for x in tensors:
        spans.append(_Span(x.data_ptr(), x.nbytes, entry, size))
        size += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    return size, spans


class _Table:
    """Makes the table of `_play` from recorded values. A place is a part of the table and a number in it."""

    def __init__(self, spans: list[_Span], bases: int, encoders: dict[bytes, tuple[int, Callable[[int], bytes | None]]]) -> None:
        self.spans, self.bases, self.encoders, self.refused = spans, bases, encoders, False
        self.offsets: list[tuple[int, int]] = []
        self.maps: list[tuple[int, Callable[[int], bytes | None]]] = []
        self.constants: list[bytes] = []

    def packed(self, arguments: struct.Struct, values: tuple[Any, ...]) -> tuple[struct.Struct, list[tuple[int, int]]]:
        """How a replay packs a kernel's arguments, and the places of what it packs: numbers side by side are packed already."""
        codes, places, left = "<", list[tuple[int, int]](), iter(values)
        same, numbers = "", list[Any]()  # codes and values of numbers side by side
        for number, code in [*_CODES.findall(arguments.format[1:]), ("", "")]:
            for one in [number + code] if code in ("s", "") else int(number or 1) * [code]:
                value = next(left) if one and code != "x" else None
                address = value in self.encoders if type(value) is bytes else type(value) is int and value >= LEAST_ADDRESS
                if same and (address or not one):
                    together = struct.pack("<" + same, *numbers)
                    codes += f"{len(together)}s"
                    places.append(self.place(together))
                    same, numbers = "", []
                if address:
                    codes += one
                    places.append(self.place(value))
                else:
                    same += one
                    numbers += [] if code == "x" else [value]
        return struct.Struct(codes), places

    def place(self, value: Any) -> tuple[int, int]:
        if type(value) is bytes and value in self.encoders:
            address, encode = self.encoders[value]
            place = self.place(address)
            self.refused |= place[0] != _INPUT  # of a tensor's beginning
            return _MAP, _index(self.maps, (place[1], encode))
        if type(value) is bytes:
            return _CONSTANT, _index(self.constants, value)
        found = [x for x in self.spans if x.begin <= value < x.begin + x.size]
        self.refused |= len(found) != 1
        if self.refused:
            return _INPUT, 0
        (span,) = found
        offset = span.offset + value - span.begin
        return (_OFFSET, _index(self.offsets, (span.entry, offset))) if offset else (_INPUT, span.entry)

    def entry(self, place: tuple[int, int]) -> int:
        part, number = place
        return sum((self.bases, len(self.offsets), len(self.maps))[:part]) + number


def _getter(entries: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What takes these entries of a table."""
    return operator.itemgetter(*entries) if len(entries) > 1 else lambda table: tuple([table[entry] for entry in entries])


def _index(found: list[Any], x: Any) -> int:
    """The place of x in the list, to which it is added if it is new."""
    if x not in found:
        found.append(x)
    return found.index(x)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses a recording in which PyTorch runs an operation."""

    recorder: Recorder | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping imports dynamo, which takes two seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder is not None and thread.recording is self.recorder and func not in _VIEWS:
            self.recorder.refused = True
        return func(*args, **(kwargs or {}))
