"""How a compiled Triton kernel takes its arguments, so that a launch can pack them without Triton's launcher.

The driver tells the offset and the size of every parameter; the signature that Triton compiled tells their kinds. Where the two do not
agree, or a launch needs more than arguments (scratch memory, a cluster, an attribute), there is no layout, and Triton launches.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from nsa_sel.backends import _driver

MOST_SHARED = 228 * 1024  # bytes of shared memory beyond which a launch needs an attribute
PROMOTE_TO_128_BYTES = 2  # CUtensorMapL2promotion, as Triton has it
_HOST_KINDS = {8: 10, 9: 8, 10: 9}  # CUtensorMapDataType of what Triton numbers otherwise in kernels
_NUMBERS = {1: "b", 2: "h", 4: "i", 8: "q"}  # by bytes; flags are bytes
_FLOATS = {"fp32": "f", "f32": "f", "fp64": "d"}


class Layout(NamedTuple):
    """Of the arguments of one compiled kernel: tensors and descriptors first, then numbers, then what stays zero."""

    function: int
    threads: int
    shared: int
    pointers: _driver.Pointers
    tensors: struct.Struct  # with the bytes of all numbers as its last value
    maps: tuple[tuple[int, Any], ...]  # which of the tensors are descriptors, and a function of their address, shape and strides
    numbers: struct.Struct
    constant: tuple[bool, ...]  # which of the numbers, laid end to end, were compiled in
    compiled: Any = None  # the kernel, whose code is unloaded with it

    def packed_numbers(self, numbers: tuple[Any, ...]) -> bytes:
        flat = zip(flattened(numbers), self.constant, strict=False)  # constexpr parameters follow
        return self.numbers.pack(*(x for x, constant in flat if not constant))


def flattened(values: Any) -> Iterator[Any]:
    """The elements of nested tuples, in their order."""
    for x in values:
        if isinstance(x, tuple | list):
            yield from flattened(x)
        else:
            yield x


def layout_of(compiled: Any, tensors: int) -> Layout | None:
    """The layout of a kernel that was launched, whose first `tensors` arguments are tensors, descriptors or None."""
    meta = compiled.metadata
    plain = meta.num_ctas == 1 and meta.shared <= MOST_SHARED and not getattr(compiled.run, "gsan_enabled", False)
    for name in ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"):
        plain = plain and not getattr(meta, name, 0)
    parameters = _driver.parameters(compiled.function) if plain else None
    if not parameters or sum(parameters[-1]) > _driver.MOST_BYTES:
        return None
    types = list(compiled.src.signature.values())
    descriptions = getattr(meta, "tensordesc_meta", None) or []
    layout = _layout(compiled.function, 32 * meta.num_warps, meta.shared, parameters, types[:tensors], types[tensors:], descriptions)
    return layout and layout._replace(compiled=compiled)


def _layout(
    function: int, threads: int, shared: int, parameters: list[tuple[int, int]], tensors: list[Any], numbers: list[Any],
    descriptions: list[dict[str, Any]],
) -> Layout | None:  # fmt: skip
    """See `layout_of`; None where the driver's parameters are not those of the signature."""
    head, maps, left = _Format(0), list[tuple[int, Any]](), list(parameters)
    for place, kind in enumerate(x for x in tensors if x != "constexpr"):
        if str(kind).startswith("tensordesc"):
            described = descriptions[len(maps)] if len(maps) < len(descriptions) else None
            rank = len(described["block_size"]) if described else 0
            own, left = left[: 1 + 2 * rank], left[1 + 2 * rank :]
            if not described or not _is_map(own, rank) or described.get("fp4_padded") or described.get("is_im2col"):
                return None
            maps.append((place, _map_of(described, own)))
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
    pointers = _driver.Pointers(tuple(offset for offset, _ in parameters))
    return Layout(function, threads, shared, pointers, head.struct(), tuple(maps), tail.struct(), constant)


class _Format:
    """A struct's format, made value by value at offsets that ascend."""

    def __init__(self, begin: int) -> None:
        self.text, self.size, self.begin = "<", 0, begin

    def add(self, offset: int, code: str) -> None:
        pad = offset - self.begin - self.size
        self.text += pad * "x" + code
        self.size += pad + struct.calcsize("<" + code)

    def struct(self) -> struct.Struct:
        return struct.Struct(self.text)


def _is_map(parameters: list[tuple[int, int]], rank: int) -> bool:
    """Whether they are a tensor map, its sizes in 32 bits and its strides in 64."""
    return [size for _, size in parameters] == [_driver.MAP_BYTES, *rank * [4], *rank * [8]]


@functools.lru_cache(256)
def encoder(encoded: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """`encoded` of a descriptor, as a function of its address alone."""
    return functools.lru_cache(64)(lambda address: encoded(address, shape, strides))


def _map_of(described: dict[str, Any], parameters: list[tuple[int, int]]) -> Any:
    """The function (address, shape, strides) -> bytes of a descriptor's parameters; None if the driver refuses the map."""
    form = _Format(parameters[0][0])
    for i, (offset, size) in enumerate(parameters):
        form.add(offset, {4: "i", 8: "q"}[size] if i else f"{size}s")
    packed, number_bytes = form.struct(), described["elem_size"]
    kind = _HOST_KINDS.get(described["elem_type"], described["elem_type"])
    box, swizzle = tuple(described["block_size"]), described["swizzle"]

    @functools.lru_cache(256)
    def encoded(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes | None:
        steps = tuple(number_bytes * step for step in strides[:-1])
        status, found = _driver.encoded_map(_driver.encode(), kind, address, tuple(shape), steps, box, swizzle, PROMOTE_TO_128_BYTES)
        return None if status else packed.pack(found, *shape, *strides)

    return encoded
