"""Launch Triton's and CUDA's kernels with little host time: allocate, record, replay, pack and start.

A pass (`forward` or `backward` of a backend) runs as Python the first time. A later pass of the same class is recorded,
and passes after that are replayed: their launches start without the backend's Python.

    buffers       uninitialized tensors: `unwritten` for results, `temporary` for the rest
    passes        decorators of a backend's passes, and values cached per class of calls
    replay        `replayed` records and replays passes, with the plans that they build; `kept_plan` caches plans
    batch         the launches of a replay with packed arguments: one by one, or as one CUDA graph
    packing       where a compiled Triton kernel expects its arguments
    cuda_driver   launches and TMA descriptors through the CUDA driver

**The rule for backends.** Calls of one class agree in shapes, strides, dtypes, alignment, settings and the static facts
of the selection. For all of them a pass must launch the same kernels, in the same order, on the same grids, with the
same scalars; only addresses may differ. Hence a pass

- allocates by `unwritten` and `temporary` only, and passes kernels addresses of these, of its inputs and of its plans;
- reads no value of a tensor, and keeps no state from one call to the next besides `cached_by_class` and `kept_plan`;
- returns a tuple of tensors, each of which it allocated.

A pass that runs a PyTorch operation, compiles, or passes an unknown address is never replayed: it is slower, not wrong.
A pass whose launches depend on anything else would be wrong when it is replayed. With NSA_DEBUG_TRITON=1 every pass of
a class is recorded instead of replayed, and compared with the class's first recording: a `BackendError` names the pass
that breaks the rule, and what differs.
"""
