"""Record one pass of a backend for the NSA_DEBUG_* flags: its time, the keys it reads, its estimated work, an NVTX
range."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch

from nsa_sel.core.call import Call, ChooseCall
from nsa_sel.telemetry import events

T = TypeVar("T")
LoadedKeys = Callable[[Call, int, bool], int]  # see BackendModule
Source = Literal["counted", "measured", "bound"]  # how keys were counted: by NSA_DEBUG_TRITON, by Selection.measure(), statically


def recorded(call: Call | ChooseCall, backend: str, direction: str, loads: LoadedKeys | None, work: Callable[[], T]) -> T:
    """Run one pass of a backend with the events, counters and NVTX range that the call's settings ask for.

    Args:
        call: the call. Its settings have `traced` or `debug_nvtx` set.
        backend: the backend's name.
        direction: "forward" or "backward".
        loads: the backend's `loaded_keys`.
        work: runs the pass.

    Returns:
        The result of `work`.
    """
    timed, device = call.timed(), call.q.device.type
    nvtx = call.settings.debug_nvtx and call.q.is_cuda
    started = events.now(device) if timed else 0.0
    with torch.cuda.nvtx.range(f"nsa_sel {backend} {direction}") if nvtx else contextlib.nullcontext():
        result = work()
    seconds = events.now(device) - started if timed else None
    if seconds is not None:
        events.emit("sel.timing", backend=backend, direction=direction, ms=seconds * 1e3)
    if not isinstance(call, Call) or not call.settings.traced:
        return result
    keys, source = keys_read(call, call.settings.debug_triton)
    (B, S, G, h, Dk), Dv, size = call.q.shape, call.v.shape[3], call.q.element_size()
    rows, group = B * S * G, "sel.triton" if backend.startswith("triton") else "sel"
    if direction == "forward":
        # FLOPs: two products for each (row, head, key). Bytes: K and V as this backend loads them, q and o once.
        loaded, key_bytes = keys if loads is None else loads(call, keys, source == "counted"), (Dk + Dv) * call.k.element_size()
        flops, moved = 2 * keys * h * (Dk + Dv), loaded * key_bytes + rows * h * (Dk + Dv) * size
        events.emit(
            f"{group}.reads", backend=backend, tokens=keys, bytes=keys * key_bytes, loaded_tokens=loaded, loaded_bytes=loaded * key_bytes,
            rows=rows, source=source,
        )  # fmt: skip
    else:
        # The least work, whatever the backend. FLOPs: five products for each (row, head, key): logits, do.v, dq, dk and
        # dv. Bytes: selected
        # K and V once per row and group; q, o, do and dq once; dk and dv once.
        flops = 2 * keys * h * (3 * Dk + 2 * Dv)
        moved = (keys * (Dk + Dv) + 2 * rows * h * (Dk + Dv) + call.k.numel() + call.v.numel()) * size
        rates: dict[str, Any] = (
            {} if seconds is None else {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12, "gbps": moved / seconds / 1e9}
        )
        events.emit(f"{group}.bwd", backend=backend, flops=flops, bytes=moved, source=source, **rates)
    events.count("bytes", backend, direction, by=moved)
    events.count("flops", backend, direction, by=flops)
    return result


def keys_read(call: Call, count: bool) -> tuple[int, Source]:
    """Return the number of keys that all rows [B,S,G] of a call select after the causal clamp, and the source of the
    number.

    Args:
        call: the call.
        count: read the ranges, which synchronizes the device. The result is cached with the selection.

    Returns:
        The sum over rows. The source is "counted" or "measured" (by `Selection.measure(S_kv)`) if the sum is exact, and
        "bound" if every row is assumed to select as many keys as its static limits allow.
    """
    selection, S_kv = call.selection, call.S_kv
    own_positions = call.q_pos is not None or call.lengths is not None  # rows are not at the default positions
    B, S, G = call.q.shape[:3]
    if count and not call.capturing():

        def total() -> int:
            start, end = call.clamped_ranges()
            return int((end - start).sum())

        return selection.plan(("keys read", S_kv, G), total, call.q_pos, call.lengths), "counted"
    measured = None if own_positions else selection.total_length(S_kv)
    if measured is not None:
        return measured * call.groups_per_selection, "measured"
    most = selection.length_bound(S_kv)
    if own_positions:
        return B * S * G * most, "bound"
    short = max(0, min(S, most - (S_kv - S)))  # rows that can select fewer keys than `most`: S_kv - S + 1, S_kv - S + 2, ...
    return B * G * (short * (S_kv - S) + short * (short + 1) // 2 + (S - short) * most), "bound"
