"""Record the kernel launches of a forward or backward pass and replay them for later calls of the same class.

The package states what a backend must keep to. One of the first passes of a class is recorded: which kernels it
launches, with which scalars, and to which tensor each address belongs. Later passes allocate their results and one
buffer for all temporaries, fill in the addresses, and launch the kernels. A pass that builds plans of a new
selection is recorded with them: their kernels are launched by the same replay, and their tensors lie in one buffer,
which the selection keeps. A call whose selection has these plans already replays another recording, without them.

A recording holds no tensor and no address. A pass is never recorded if it compiles, runs a PyTorch operation that is
neither a view nor an allocation, or passes an address that belongs to none of its tensors or to several; it then always
runs as Python. So do all passes during a CUDA graph capture. Calls over caches are recorded whole, from the checked
arguments on (core/run.py, `Repeated`); plans are then temporaries like others.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import re
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # type: ignore[attr-defined]  # see core/transforms.py
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_sel.backends.launcher import cuda_driver
from nsa_sel.backends.launcher.batch import Batch, Step
from nsa_sel.backends.launcher.buffers import allocator, contiguous
from nsa_sel.backends.launcher.cuda_driver import MAP_ALIGNMENT, stream_of, thread
from nsa_sel.core.plans import DISJOINT, Part, Plan, PlanInBuffer, Plans, make_room, tensors_of
from nsa_sel.core.request import FEW_TOKENS
from nsa_sel.core.transforms import REPEATED
from nsa_sel.errors import BackendError

# nsa_sel.core.call.Call, not imported: it holds a selection, whose ranges a recorded kernel makes, which would be an
# import circle.
Call = Any
ALIGNMENT = 256  # bytes between tensors in one buffer: enough for TMA and 16-byte loads
_fills = torch._C._get_deterministic_algorithms  # if True, PyTorch fills new tensors
_address = Tensor.data_ptr
TRIES = 3  # failed recording attempts per class after its first pass: a pass that compiles cannot be recorded
LEAST_ADDRESS = 1 << 32  # arguments of at least this value are addresses
MOST_BYTES = 1 << 30  # most that a recorded pass allocates; larger passes are GPU-bound, so replay saves nothing
MOST_RECORDINGS, MOST_READY = 1024, 1024  # in the process; per thread, for each stream
MOST_BATCHES, NEW_ADDRESSES = 128, 8  # see `_Ready`
_numbers = itertools.count()
_recordings: deque[tuple[list[Recording], Recording]] = deque()  # every recording, with the list that holds it, oldest first
_aten = torch.ops.aten
_VIEWS = (  # operations that launch nothing
    _aten.slice.Tensor, _aten.view.default, _aten.view.dtype, _aten.transpose.int, _aten.unbind.int, _aten.squeeze.dim,
    _aten.detach.default,
)  # fmt: skip
_ALLOCATIONS = (_aten.empty.memory_format, _aten.new_empty.default)
_CODES = re.compile(r"(\d*)(\D)")  # count and code in a struct format
_INPUT, _OFFSET, _MAP, _CONSTANT = range(4)  # sections of the table of `_Ready.batch`


class Recording(NamedTuple):
    """The recorded launches of a pass, plans that it builds included. `entry` means an index in the table of `_Ready.batch`."""

    number: int  # unique id
    device: int
    make: Callable[..., Tensor]  # `allocator`
    outputs: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]  # sizes, strides and dtype of each result
    scratch: int  # bytes of temporaries
    kept: int  # bytes of the tensors of the plans that it builds
    given: tuple[tuple[Any, ...], ...]  # keys of the plans that the selection must have
    # Of the given plans, those that Python builds if the selection lacks them.
    by_python: dict[tuple[Any, ...], tuple[Callable[..., Any], tuple[Any, ...]]]
    built: dict[tuple[Any, ...], tuple[Any, ...]]  # plans that it must lack, by key: the facts of `PlanInBuffer`
    offsets: tuple[tuple[int, int], ...]  # entry, bytes
    maps: tuple[tuple[int, Callable[[int], bytes | None]], ...]  # entry, encoder of tensor maps
    constants: tuple[bytes, ...]
    cleared: tuple[tuple[int, int], ...]  # entry, bytes
    steps: tuple[Step, ...]  # launches
    arguments: struct.Struct  # packs the arguments of all launches
    values: Callable[[list[Any]], tuple[Any, ...]]  # takes these arguments from the table
    kernels: tuple[Any, ...]  # kernel objects, held so that their code stays loaded
    decided: tuple[tuple[Any, Any], ...] | None  # a whole call (core/run.py) keeps the decision and request of each of its passes


class Recordings:
    """The recordings of one class, one for each set of plans that selections already had, and the number of failed attempts."""

    __slots__ = ("failed", "made")

    def __init__(self) -> None:
        self.made: list[Recording] = []
        self.failed = 0

    def replay(self, addresses: list[int], stream: int, kept: Plans, call: Call = None) -> Any:
        """Return the results of a replay; None if nothing fits, or if the driver refuses a launch.

        Args:
            addresses: of the tensors that kernels read, 0 for None. Replays need multiples of 16 (`_Ready.batch`).
            stream: the current stream, 0 on a CPU.
            kept: the plans of the selection.
            call: the pass's call, with which Python builds plans that no replay can build.
        """
        if thread.recording is not None or _fills() or cuda_driver.hooked():
            return None  # the first: nested in a pass that is being recorded
        for recording in self.made:
            ready = thread.ready.get((recording.number, stream)) or _ready(recording, stream)
            given: list[Any] = [*map(kept.get, ready.given)]
            if kept.keys().isdisjoint(ready.built) and (None not in given or ready.build_given(kept, given, call)):
                try:
                    return ready.play(addresses, kept, given)
                except torch.OutOfMemoryError:  # a replay allocates all temporaries at once, the pass itself one after another
                    return None
        return None

    def run(self, addresses: list[int], stream: int, kept: Plans, work: Callable[[], Any], call: Call = None) -> Any:
        """Return `work()`, a pass, replayed or run, and recorded if it can be. Other arguments are those of `replay`."""
        result = self.replay(addresses, stream, kept, call)
        return self.record(addresses, work, call) if result is None else result

    def record(self, addresses: list[int], work: Callable[[], Any], call: Call = None, whole: bool = False) -> Any:
        """Return `work()`, recorded if it can be. whole: a call whose class tells how each address is aligned."""
        unaligned = functools.reduce(operator.or_, addresses) & 15 and not whole
        if unaligned or thread.recording is not None or _fills() or cuda_driver.hooked() or self.failed == TRIES:
            return work()
        recorder, result = Recorder(addresses, whole), None
        with contextlib.suppress(torch.OutOfMemoryError), recorder:
            result = work()
        if result is None:  # out of memory: a recording keeps what the pass would free
            recorder.made.clear()
            self.failed += 1
            return work()
        recording = recorder.finished(result)
        if recording is None or (recording.by_python and call is None):
            self.failed += 1
        else:
            self._keep(recording)
        return result

    def _keep(self, new: Recording) -> None:
        # No `remove`: another thread may have removed it. One with the plans of the new one was refused by the driver.
        self.made[:] = [*(x for x in self.made if (x.given, [*x.built]) != (new.given, [*new.built])), new]
        _recordings.append((self.made, new))
        if len(_recordings) > MOST_RECORDINGS:  # a growing cache makes a new class at every step
            made, oldest = _recordings.popleft()
            made[:] = [x for x in made if x is not oldest]


class Shortcut:
    """The replays of a class's forward or backward passes, for callers that look at nothing else.

    A thread of autograd runs Python with cold caches: every function that a backward pass enters there takes a
    microsecond.
    """

    __slots__ = ("guards", "recordings")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: of a recorded pass, of which others must agree; empty if callers have checked theirs."""
        self.guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None) if tensors else None
        # Of passes that read disjoint ranges; that make them from block indices; that read ranges which may repeat.
        self.recordings: list[Recordings | None] = [None, None, None]

    def __call__(self, selection: Any, *tensors: Tensor) -> Any:
        """Return the results of a pass, or None if it can't be replayed.

        tensors: q, k, v, and of a backward pass o, lse and do; dlse is None.
        """
        if self.guards is not None and not self.guards.check(*tensors):
            return None
        q, stream = tensors[0], 0
        on: tuple[Any, ...] = DISJOINT
        if q.is_cuda:
            device = q.get_device()
            if torch._C._cuda_isCurrentStreamCapturing() or device != torch._C._cuda_getDevice():
                return None
            stream = stream_of(device)
            on = (*DISJOINT, stream)
        addresses = [*map(_address, tensors)]
        indices, plans = None if selection.unsearched else selection.indices, Plans()
        if indices is not None:
            address = indices.data_ptr()
        else:
            snapshot = selection.current()
            if snapshot is None or snapshot.exact is not None:
                return None
            plans = snapshot.plans
            distinct = None if selection.unsearched else plans.get(on)
            if distinct is not None:
                address = distinct.addresses()[0]
            elif (selection.disjoint or selection.unsearched) and selection.ranges.is_contiguous():
                address = selection.ranges.data_ptr()
            else:
                return None
        addresses.insert(3, address)
        if len(addresses) > 4:
            addresses.append(0)
        recordings = self.recordings[_kind(selection, indices)]
        try:
            result = None if recordings is None else recordings.replay(addresses, stream, plans)
        except Exception:  # such as no memory: the pass runs in the usual manner, and raises its own error
            return None
        if on in plans and indices is not None and result is not None:  # few rows make no ranges
            selection.keep(plans[on], plans[on].buffer, stream, plans)  # type: ignore[union-attr]
        return result


def kept_plan(call: Call, key: tuple[object, ...], build: Callable[..., Any], *numbers: Any) -> Plan:
    """Return `build(call, *numbers)`, cached in the selection by key, numbers, S_kv, the groups that share a row of it,
    and positions or lengths (causal clamp).

    Everything in the plan except the values of its tensors must follow from these, because a recording accepts any plan
    with this key.

    During a CUDA graph capture the plan is built every time: a graph replay must follow ranges written since the
    capture, and a plan built in a capture holds no data until the graph is replayed. So it is in a whole call's recording.
    """
    recorder: Recorder | None = thread.recording
    if call.capturing() or (recorder is not None and recorder.decided is not None):
        return Plan(build(call, *numbers))
    # `()` or `(q_pos, lengths)`: part of the key, so that replays, which have neither, take no plan of other positions
    made_from = () if call.q_pos is None and call.lengths is None else (call.q_pos, call.lengths)
    key = (*key, *numbers, call.k.shape[2], call.groups_per_selection, bool(made_from))
    if recorder is None:
        return Plan(call.selection.plan(key, lambda: build(call, *numbers), *made_from))
    if key not in recorder.plans:  # the selection of an inference mode keeps nothing
        recorder.use(call, key, build, numbers, made_from)
    return recorder.plans[key]


def replayed(call: Call, work: Callable[..., Any], given: tuple[Tensor | None, ...] = ()) -> Any:
    """Return `work(call, *given)`, a pass, run or replayed.

    Its kernels read q, k, v, the tensors in `given`, and `Call.union_ranges`; in the forward pass of few rows (without
    `given`) `Call.listed`. A pass of few rows that reads the disjoint ranges is never recorded. A pass of more rows from
    block indices makes their ranges, too.
    """
    known, settings, selection = call.known, call.settings, call.selection
    if REPEATED not in known or call.workspace is not None or call.capturing():
        return work(call, *given)
    few_rows = call.q.shape[1] <= FEW_TOKENS
    few = few_rows and not given
    made_here = not (few_rows or settings.debug_triton or selection.unsearched or torch.is_inference_mode_enabled())
    indices = selection.indices if few or made_here else None
    snapshot = None if indices is not None else selection.current()
    kept, exact = ({}, None) if snapshot is None else (snapshot.plans, snapshot.exact)
    stream = stream_of(call.q.get_device()) if call.q.is_cuda else 0
    on = (*DISJOINT, stream) if call.q.is_cuda else DISJOINT
    listed = indices if indices is not None else call.listed()[0] if few else call.union_ranges()
    # `measure` may run between forward and backward; a row's longest range, its mean and sharing decide on sizes
    of_given = [None if x is None else (x.dtype, x.is_contiguous() or x.stride()) for x in given]
    key = (work, listed.dtype, listed.dim(), selection.unsearched, exact and exact[:3], *of_given)
    addresses = [call.q.data_ptr(), call.k.data_ptr(), call.v.data_ptr(), listed.data_ptr()]
    addresses += [0 if x is None else x.data_ptr() for x in given]
    if settings.debug_triton:
        return checked(known, key, addresses, work, lambda: work(call, *given))
    recordings = known.get(key)
    if recordings is None:
        if not settings.traced:  # do not record the first pass: most keys occur once
            known.setdefault(key, Recordings())
        return work(call, *given)
    if indices is None:
        result = recordings.run(addresses, stream, kept, lambda: work(call, *given), call)
    elif recordings.failed == TRIES:  # one of its plans can't be recorded
        selection.counted  # noqa: B018  # makes the ranges
        return replayed(call, work, given)
    else:
        result = recordings.run(addresses, stream, kept, lambda: work(call) if few else _with_ranges(call, work, given))
        if on in kept:
            selection.keep(kept[on], kept[on].buffer, stream, kept)
    if recordings.made and exact is None and not settings.debug_nvtx:
        _add_shortcut(call, recordings, given, len(result), _kind(selection, indices))
    return result


def _with_ranges(call: Call, work: Callable[..., Any], given: tuple[Tensor | None, ...]) -> Any:
    """Make the ranges of a call's block indices, and run a pass; its recording builds them as a plan."""
    call.selection.counted  # noqa: B018
    recorder: Recorder | None = thread.recording
    if recorder is not None:
        recorder.plans[DISJOINT] = call.selection._made.plan
        recorder.built.append(DISJOINT)
    return work(call, *given)


def _kind(selection: Any, indices: Tensor | None) -> int:
    """Return the kind of a pass in `Shortcut.recordings`."""
    return 2 if selection.unsearched else int(indices is not None)


def _add_shortcut(call: Call, recordings: Recordings, given: tuple[Tensor | None, ...], results: int, kind: int) -> None:
    """Add the `Shortcut` of a pass to the facts of its class, if it fits: a forward pass that reads many rows' ranges or
    makes them, or a backward pass without dlse, whose tensors all differ, and that returns dq, dk and dv alone."""
    if not given:
        if not call.may_repeat():
            call.known.setdefault("forward", Shortcut(())).recordings[kind] = recordings
    elif given[-1] is None and results == 3:
        tensors = [call.q, call.k, call.v, *(x for x in given if x is not None)]
        if "backward" not in call.known and len({id(x) for x in tensors}) == len(tensors) == 6:
            call.known["backward"] = Shortcut(tensors)
        shortcut = call.known.get("backward")
        if shortcut is not None and shortcut.guards.check(*tensors):  # do of other strides has recordings of its own
            shortcut.recordings[kind] = recordings


def checked(recordings: dict[Any, Any], key: Any, addresses: list[int], backend: Callable[..., Any], work: Callable[[], Any]) -> Any:
    """Return `work()`. Record it, and raise BackendError if its launches differ from the first recording of its class.

    Args:
        recordings: by key, for first recordings.
        key: of the class.
        addresses, work: those of `Recordings.run`.
        backend: the pass; the error names it.
    """
    if thread.recording is not None or _fills() or cuda_driver.hooked():
        return work()
    recorder = Recorder(addresses)
    with recorder:
        result = work()
    made = recorder.finished(result)
    if made is None:
        return result
    first = recordings.setdefault(("checked", key, made.given, *made.built), made)
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
        kernels, grids = tuple(step.function for step in recording.steps), tuple(step.grid for step in recording.steps)
        facts = recording.outputs, recording.scratch, recording.offsets, recording.constants, recording.cleared
        return cls(kernels, grids, *facts)


class _Ready:
    """A recording, ready for one thread and stream, with the arguments of its last passes.

    A caching allocator returns the same addresses again and again, other ones to each layer of a model: packed arguments
    are cached by addresses, in one batch more for every NEW_ADDRESSES passes that find none.
    """

    __slots__ = ("batches", "built", "given", "missed", "outputs", "recording", "stream")

    def __init__(self, recording: Recording, stream: int) -> None:
        on = () if recording.device < 0 else (stream,)
        self.recording, self.stream = recording, stream
        self.given = tuple([(*key, *on) for key in recording.given])  # keys of its plans on the stream
        self.built = {(*key, *on): facts for key, facts in recording.built.items()}
        self.outputs = tuple(zip(*recording.outputs, strict=True)) or ((), (), ())  # sizes, strides and dtypes
        self.batches: dict[tuple[int, ...], Batch] = {}  # by addresses
        self.missed = 0

    def build_given(self, kept: Plans, given: list[Any], call: Call) -> bool:
        """Build those of `Recording.by_python` that the selection lacks, if there is a call to build them; return True if
        `given` then has all plans that the recording takes."""
        by_python = self.recording.by_python
        lacking = [i for i, plan in enumerate(given) if plan is None]
        if call is None or any(self.recording.given[i] not in by_python for i in lacking):
            return False
        for i in lacking:
            key = self.recording.given[i]
            build, numbers = by_python[key]
            call.selection.plan(key, functools.partial(build, call, *numbers))
            given[i] = kept.get(self.given[i])
        return None not in given

    def play(self, inputs: Sequence[int], kept: Plans, given: Sequence[Plan | PlanInBuffer]) -> Any:
        """Replay a pass and return its result, or None if the driver refuses a launch.

        kept: the plans of its selection; given: those that the recording takes.
        """
        recording, scratch, plans = self.recording, None, None
        make = recording.make
        outputs = (*map(make, *self.outputs),)
        scratch_at = plans_at = 0
        if recording.scratch:
            scratch = make((recording.scratch,), (1,), torch.uint8)
            scratch_at = scratch.data_ptr()
        if recording.kept:
            plans = make((recording.kept // 4,), (1,), torch.int32)
            plans_at = plans.data_ptr()
        addresses = (*inputs, *map(_address, outputs), scratch_at, plans_at)
        for plan in given:
            addresses += plan.addresses()
        batch = self.batches.get(addresses) or self.batch(addresses)
        if batch is None or batch.start():
            return None
        if plans is not None:
            if kept:
                make_room(kept, len(self.built))
            for key, facts in self.built.items():
                kept[key] = PlanInBuffer(plans, plans_at, facts)
        return outputs

    def batch(self, addresses: tuple[int, ...]) -> Batch | None:
        """Return the launches with these addresses, or None if an address is not a multiple of 16 or the driver refuses a tensor map.

        Builds a table of argument values: addresses of inputs, outputs, temporaries and plans; addresses at an offset
        within these; tensor maps; packed constants.
        """
        recording, table = self.recording, list[Any](addresses)
        if recording.decided is None and functools.reduce(operator.or_, addresses) & 15:
            return None
        table += [table[entry] + offset for entry, offset in recording.offsets]
        maps = [encode(table[entry]) for entry, encode in recording.maps]
        if None in maps:
            return None
        table += maps
        table += recording.constants
        self.missed += 1
        if len(self.batches) < min(MOST_BATCHES, 1 + self.missed // NEW_ADDRESSES):
            batch = Batch(recording.device, self.stream, recording.steps, recording.arguments)
        else:
            batch = self.batches.pop(next(iter(self.batches)))  # the oldest
        batch.pack(recording.values(table), [(table[entry], size) for entry, size in recording.cleared])
        self.batches[addresses] = batch
        return batch


def _ready(recording: Recording, stream: int) -> _Ready:
    cache, key = thread.ready, (recording.number, stream)
    ready: _Ready | None = cache.get(key)
    if ready is None:
        if len(cache) >= MOST_READY:
            cache.clear()
        ready = cache[key] = _Ready(recording, stream)
    return ready


class _Span(NamedTuple):
    """Memory [begin, begin + size), which starts `offset` bytes after the address in a table entry."""

    begin: int
    size: int
    entry: int
    offset: int


class Recorder:
    """Record one pass of this thread inside a `with` block. `refused` becomes True if the pass cannot be replayed."""

    def __init__(self, inputs: list[int], whole: bool = False) -> None:
        self.inputs, self.refused = inputs, False
        self.decided: list[tuple[Any, Any]] | None = [] if whole else None  # see `Recording`
        self.made: list[Tensor] = []  # tensors that the pass allocated, held so that no other gets their addresses
        self.bytes = 0  # that these tensors take
        self.plans: dict[tuple[Any, ...], Plan] = {}  # by key
        self.built: list[tuple[Any, ...]] = []  # keys of the plans that the pass builds
        self.builders: dict[tuple[Any, ...], tuple[Callable[..., Any], tuple[Any, ...]]] = {}  # by key: what builds a plan, and its numbers
        self.by_python: set[tuple[Any, ...]] = set()  # keys of the plans whose building can't be recorded
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

    def hold(self, made: Tensor) -> None:
        """Record an allocation. A pass or call that allocates more than MOST_BYTES in all is not replayed."""
        self.bytes += made.nbytes
        self.made.append(made)
        if self.bytes > MOST_BYTES:
            self.made.clear()

    def use(
        self, call: Call, key: tuple[Any, ...], build: Callable[..., Any], numbers: tuple[Any, ...], made_from: tuple[Any, ...]
    ) -> None:
        """Record that the pass uses a plan, and building it if the selection lacks it.

        Where the building can't be recorded, because it runs a PyTorch operation, replays leave it to Python.
        """
        before, new = (self.refused, len(self.made), len(self.launches), len(self.cleared), len(self.built)), list[bool]()

        def built() -> Any:
            new.append(True)
            return build(call, *numbers)

        self.plans[key] = Plan(call.selection.plan(key, built, *made_from))
        self.builders[key] = build, numbers
        if new and self.refused and not before[0]:
            self.refused, made, launches, cleared, others = before
            del self.made[made:], self.launches[launches:], self.cleared[cleared:]
            self.by_python |= {key, *self.built[others:]}
            del self.built[others:]
        elif new:
            self.built.append(key)
        self.refused |= call.q.data_ptr() != self.inputs[0] or REPEATED not in call.known

    def launch(
        self, function: int, ctas: int, threads: int, shared: int, early: bool, pointers: Any, arguments: struct.Struct,
        values: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """Record a kernel launch: the arguments of `cuda_driver.start`, and the values that were packed."""
        self.launches.append((function, cuda_driver.grid(ctas, threads, shared), early, pointers, arguments, values))

    def finished(self, result: Any) -> Recording | None:
        """Return the recording of a pass that returned `result`, or None if it cannot be replayed."""
        outputs, built = tensors_of(result), [self.plans[key].value for key in self.built]
        kept = [x for value in built for x in tensors_of(value)]
        given = {key: plan for key, plan in self.plans.items() if key not in self.built}
        of_given = [x for plan in given.values() for x in tensors_of(plan.value)]
        sizes, results = {x.data_ptr(): x.nbytes for x in self.made}, {x.data_ptr() for x in outputs + kept}
        own = [x for x in self.made if x.data_ptr() not in results]
        if (
            self.refused
            or self.bytes > MOST_BYTES
            or not self.made
            or any(sizes.get(x.data_ptr()) != x.nbytes or not x.is_contiguous() for x in outputs)  # results may be views
            or not all(isinstance(value, tuple) and all(isinstance(x, Tensor | int | None) for x in value) for value in (result, *built))
            or len(outputs) != len(result)
            or len(own) + len(kept) + len(outputs) != len(self.made)
            or any(0 < x < LEAST_ADDRESS for x in (*self.inputs, *(x.data_ptr() for x in self.made + of_given)))
        ):
            return None
        first = len(self.inputs)
        spans = [_Span(x, 1, i, 0) for i, x in enumerate(self.inputs) if x]
        spans += [_Span(x.data_ptr(), x.nbytes, first + i, 0) for i, x in enumerate(outputs)]
        after = first + len(outputs)
        scratch, in_scratch = _packed(own, after)
        kept_bytes, in_kept = _packed(kept, after + 1)
        spans += in_scratch + in_kept
        spans += [_Span(x.data_ptr(), x.nbytes, after + 2 + i, 0) for i, x in enumerate(of_given)]
        table = _Table(spans, after + 2 + len(of_given), self.encoders)
        for function, grid, early, pointers, arguments, values in self.launches:
            table.add(function, grid, early, pointers, arguments, values)
        cleared = [(table.location(address), size) for address, size in self.cleared]
        if table.refused:
            return None
        return Recording(
            next(_numbers), self.made[0].get_device(), allocator(self.made[0]),
            tuple((tuple(x.shape), contiguous(tuple(x.shape)), x.dtype) for x in outputs), scratch, kept_bytes, tuple(given),
            {key: self.builders[key] for key in given if key in self.by_python},
            self._built(iter(in_kept)), tuple(table.offsets), tuple(table.maps), tuple(table.constants),
            tuple((table.entry(location), size) for location, size in cleared), tuple(table.steps),
            struct.Struct(table.codes), _getter([table.entry(location) for location in table.locations]), tuple(self.kernels),
            None if self.decided is None else tuple(self.decided),
        )  # fmt: skip

    def _built(self, spans: Iterator[_Span]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        """Return `Recording.built`. spans: of the tensors of all plans that the pass builds."""
        facts = {}
        for key in self.built:
            value = self.plans[key].value
            fields = tuple(
                Part(next(spans).offset, tuple(x.shape), contiguous(tuple(x.shape)), x.dtype) if isinstance(x, Tensor) else x for x in value
            )
            kind = getattr(type(value), "_make", tuple)  # `_make` for named tuples
            facts[key] = kind, fields, tuple(x.offset for x in fields if type(x) is Part)
        return facts


def _packed(tensors: list[Tensor], entry: int) -> tuple[int, list[_Span]]:
    """Return the size of a buffer (table entry `entry`) that holds these tensors one after another, and the span of
    each."""
    size, spans = 0, []
    for x in tensors:
        spans.append(_Span(x.data_ptr(), x.nbytes, entry, size))
        size += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    return size, spans


class _Table:
    """Builds the table of `_Ready.batch` from recorded values, and the struct that packs the arguments of all launches into one
    buffer. A location is (section of the table, index in the section)."""

    def __init__(self, spans: list[_Span], bases: int, encoders: dict[bytes, tuple[int, Callable[[int], bytes | None]]]) -> None:
        self.spans, self.bases, self.encoders, self.refused = spans, bases, encoders, False
        self.offsets: list[tuple[int, int]] = []
        self.maps: list[tuple[int, Callable[[int], bytes | None]]] = []
        self.constants: list[bytes] = []
        self.steps: list[Step] = []
        self.codes, self.locations = "<", list[tuple[int, int]]()  # struct format and sources of all launches' arguments

    def add(self, function: int, grid: bytes, early: bool, pointers: Any, arguments: struct.Struct, values: tuple[Any, ...]) -> None:
        """Add the arguments of a launch. Runs of adjacent scalars are packed once into a constant."""
        self.codes += f"{-struct.calcsize(self.codes) % MAP_ALIGNMENT}x"
        begin = struct.calcsize(self.codes)
        offsets = () if pointers is None else pointers.offsets
        self.steps.append(Step(function, grid, early, tuple(begin + offset for offset in offsets)))
        same, numbers, left = "", list[Any](), iter(values)  # codes and values of the current run of scalars
        for number, code in [*_CODES.findall(arguments.format[1:]), ("", "")]:
            for one in [number + code] if code in ("s", "") else int(number or 1) * [code]:
                value = next(left) if one and code != "x" else None
                address = value in self.encoders if type(value) is bytes else type(value) is int and value >= LEAST_ADDRESS
                if same and (address or not one):
                    together = struct.pack("<" + same, *numbers)
                    self.codes += f"{len(together)}s"
                    self.locations.append(self.location(together))
                    same, numbers = "", []
                if address:
                    self.codes += one
                    self.locations.append(self.location(value))
                else:
                    same += one
                    numbers += [] if code == "x" else [value]

    def location(self, value: Any) -> tuple[int, int]:
        if type(value) is bytes and value in self.encoders:
            address, encode = self.encoders[value]
            return _MAP, _index(self.maps, (self.entry(self.location(address)), encode))
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
        result = func(*args, **(kwargs or {}))
        if self.recorder is not None and thread.recording is self.recorder:
            if func in _ALLOCATIONS:
                self.recorder.hold(result)
            self.recorder.refused |= func not in (*_VIEWS, *_ALLOCATIONS)
        return result
