"""Argument layout of a compiled Triton kernel, so that a launch can pack its arguments without Triton's launcher.

The driver reports the offset and size of every parameter, and the signature that Triton compiled gives their types. If
the two disagree, or a launch needs more than arguments (scratch memory, a cluster, an attribute), there is no layout,
and Triton launches the kernel.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from nsa_sel.backends.launcher import cuda_driver

MOST_SHARED = 228 * 1024  # bytes of shared memory above which a launch needs an attribute
PROMOTE_TO_128_BYTES = 2  # CUtensorMapL2promotion, the same as Triton's
_HOST_KINDS = {8: 10, 9: 8, 10: 9}  # Triton's device-side element types -> CUtensorMapDataType, where they differ
_NUMBERS = {1: "b", 2: "h", 4: "i", 8: "q"}  # struct code by bytes; flags are one byte
_FLOATS = {"fp32": "f", "f32": "f", "fp64": "d"}


class Layout(NamedTuple):
    """Layout of the arguments of one compiled kernel: tensors and descriptors, then numbers, then scratch addresses
    (zero)."""

    function: int
    threads: int
    shared: int
    pointers: cuda_driver.Pointers
    tensors: struct.Struct  # the last value is the bytes of all numbers
    maps: tuple[tuple[int, Any], ...]  # per descriptor: index among the tensors, encoder
    numbers: struct.Struct
    constant: tuple[bool, ...]  # which of the flattened numbers were compiled in as constants
    early: bool = False  # programmatic dependent launch
    compiled: Any = None  # the kernel object, held because its code is unloaded with it

    def packed_numbers(self, numbers: tuple[Any, ...]) -> bytes:
        flat = zip(flattened(numbers), self.constant, strict=False)  # constexpr parameters follow
        return self.numbers.pack(*(x for x, constant in flat if not constant))


def flattened(values: Any) -> Iterator[Any]:
    """Yield the elements of nested tuples in order."""
    for x in values:
        if isinstance(x, tuple | list):
            yield from flattened(x)
        else:
            yield x


def layout_of(compiled: Any, tensors: int) -> Layout | None:
    """Return the layout of a kernel that was launched once, whose first `tensors` arguments are tensors, descriptors or
    None."""
    meta = compiled.metadata
    plain = meta.num_ctas == 1 and meta.shared <= MOST_SHARED and not getattr(compiled.run, "gsan_enabled", False)
    for name in ("launch_cooperative_grid", "global_scratch_size", "profile_scratch_size"):
        plain = plain and not getattr(meta, name, 0)
    parameters = cuda_driver.parameters(compiled.function) if plain else None
    if not parameters or sum(parameters[-1]) > cuda_driver.MOST_BYTES:
        return None
    types = list(compiled.src.signature.values())
    descriptions = getattr(meta, "tensordesc_meta", None) or []
    layout = _layout(compiled.function, 32 * meta.num_warps, meta.shared, parameters, types[:tensors], types[tensors:], descriptions)
    return layout and layout._replace(compiled=compiled, early=bool(getattr(meta, "launch_pdl", False)))


def _layout(
    function: int, threads: int, shared: int, parameters: list[tuple[int, int]], tensors: list[Any], numbers: list[Any],
    descriptions: list[dict[str, Any]],
) -> Layout | None:  # fmt: skip
    """Return the layout of `layout_of`, or None if the driver's parameters do not match the signature."""
    head, maps, left = _Format(0), list[tuple[int, Any]](), list(parameters)
    for index, kind in enumerate(x for x in tensors if x != "constexpr"):
        if str(kind).startswith("tensordesc"):
            described = descriptions[len(maps)] if len(maps) < len(descriptions) else None
            rank = len(described["block_size"]) if described else 0
            own, left = left[: 1 + 2 * rank], left[1 + 2 * rank :]
            sizes = [cuda_driver.MAP_BYTES, *rank * [4], *rank * [8]]  # a tensor map, 32-bit sizes and 64-bit strides
            if not described or [size for _, size in own] != sizes or described.get("fp4_padded") or described.get("is_im2col"):
                return None
            maps.append((index, _map_of(described, own)))
            head.add(own[0][0], f"{sum(own[-1]) - own[0][0]}s")
        elif isinstance(kind, str) and kind[0] == "*" and left and left[0][1] == 8:
            head.add(left.pop(0)[0], "Q")
        else:
            return None
    flat = list(flattened(numbers))
    kinds = [kind for kind in flat if kind != "constexpr"]
    own, rest = left[: len(kinds)], left[len(kinds) :]
    if len(own) < len(kinds) or any(size != 8 for _, size in rest):  # the rest: addresses of scratch memory
        return None
    begin, size = left[0][0] if left else head.size, sum(parameters[-1])
    tail = _Format(begin)
    for kind, (offset, bytes_) in zip(kinds, own, strict=True):
        code = _FLOATS.get(kind) or (_NUMBERS.get(bytes_) if kind[0] in "iu" and kind[1:].isdigit() else None)
        if code is None or struct.calcsize("<" + code) != bytes_:
            return None
        tail.add(offset, code.upper() if kind[0] == "u" else code)
    tail.add(size, "")
    head.add(begin, f"{size - begin}s")
    constant = tuple(kind == "constexpr" for kind in flat)
    pointers = cuda_driver.Pointers(tuple(offset for offset, _ in parameters))
    return Layout(function, threads, shared, pointers, head.struct(), tuple(maps), tail.struct(), constant)


class _Format:
    """Builder of a struct format, value by value at ascending offsets."""

    def __init__(self, begin: int) -> None:
        self.text, self.size, self.begin = "<", 0, begin

    def add(self, offset: int, code: str) -> None:
        pad = offset - self.begin - self.size
        self.text += pad * "x" + code
        self.size += pad + struct.calcsize("<" + code)

    def struct(self) -> struct.Struct:
        return struct.Struct(self.text)


@functools.lru_cache(256)
def encoder(encoded: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return `encoded` with fixed shape and strides, as a cached function of the address."""
    return functools.lru_cache(64)(lambda address: encoded(address, shape, strides))


def _map_of(described: dict[str, Any], parameters: list[tuple[int, int]]) -> Any:
    """Return the function (address, shape, strides) -> packed bytes of a descriptor's parameters, or None if the driver
    fails."""
    form = _Format(parameters[0][0])
    for i, (offset, size) in enumerate(parameters):
        form.add(offset, {4: "i", 8: "q"}[size] if i else f"{size}s")
    packed, number_bytes = form.struct(), described["elem_size"]
    kind = _HOST_KINDS.get(described["elem_type"], described["elem_type"])
    box, swizzle = tuple(described["block_size"]), described["swizzle"]

    @functools.lru_cache(256)
    def encoded(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes | None:
        steps = tuple(number_bytes * step for step in strides[:-1])
        status, data = cuda_driver.encoded_map(cuda_driver.encode(), kind, address, tuple(shape), steps, box, swizzle, PROMOTE_TO_128_BYTES)
        return None if status else packed.pack(data, *shape, *strides)

    return encoded
