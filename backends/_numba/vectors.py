"""SIMD vectors for Numba kernels: one LLVM vector type and the operations of matrix products and reductions.

Plain Numba loops take 1.5 to 1.9 times as long (bench/results/cpu/numba_vectors.jsonl), because LLVM does not keep the
sums of a product in registers. A vector holds 32 bytes of float32 or float64; LLVM splits it on CPUs with narrower
registers. Operations run in the order in which they are written, so results do not depend on the optimizer.

After a change here, empty NUMBA_CACHE_DIR (or __pycache__): Numba's cache does not track that kernels.py depends on
this file.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

_BYTES = 32


class Vector(types.Type):  # type: ignore[misc]
    """The Numba type of a vector of float32 or float64."""

    def __init__(self, element: types.Float) -> None:
        self.element = element
        self.lanes = _BYTES * 8 // element.bitwidth
        super().__init__(name=f"vector({element}, {self.lanes})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(manager.lookup(vector.element).get_value_type(), vector.lanes))


def _address(context: Any, builder: Any, array_type: Any, array: Any, i: Any, of: Any) -> Any:
    """Return a pointer to array[i], typed as a pointer to the Numba type `of`."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [i]), context.get_value_type(of).as_pointer())


def _splat(builder: Any, vector: Any, x: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), x, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count))


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine all lanes in a fixed order, halves first."""
    lanes, numbers = vector.type.count, ir.VectorType(ir.IntType(32), vector.type.count)
    while lanes > 1:
        lanes //= 2
        upper = ir.Constant(numbers, [(i + lanes) % numbers.count for i in range(numbers.count)])
        vector = combine(vector, builder.shuffle_vector(vector, vector, upper))
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def lanes(typing: Any, array: Any) -> Any:
    """Return how many elements of `array` one vector holds, a compile-time constant."""
    return types.intp(array), lambda context, builder, sig, args: ir.Constant(ir.IntType(64), Vector(array.dtype).lanes)


@intrinsic
def load(typing: Any, array: Any, i: Any) -> Any:
    """Load array[i:i + lanes] as a vector; array is one-dimensional and contiguous."""
    return Vector(array.dtype)(array, types.intp), lambda context, builder, sig, args: builder.load(
        _address(context, builder, array, args[0], args[1], sig.return_type), align=array.dtype.bitwidth // 8
    )


@intrinsic
def broadcast(typing: Any, array: Any, i: Any) -> Any:
    """Return a vector with array[i] in every lane; i is not negative."""
    return Vector(array.dtype)(array, types.intp), lambda context, builder, sig, args: _splat(
        builder, context.get_value_type(sig.return_type), builder.load(_address(context, builder, array, args[0], args[1], array.dtype))
    )


@intrinsic
def store(typing: Any, array: Any, i: Any, vector: Any) -> Any:
    """Store the vector to array[i:i + lanes]."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[2], _address(context, builder, array, args[0], args[1], vector), align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), code


@intrinsic
def splat(typing: Any, x: Any) -> Any:
    """Return a vector with x in every lane."""
    return Vector(x)(x), lambda context, builder, sig, args: _splat(builder, context.get_value_type(sig.return_type), args[0])


@intrinsic
def multiply_add(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c with one rounding on every CPU (slow on CPUs without an FMA instruction).

    Leaving the fusion to LLVM is not reproducible: it fused different operations in fresh code than in code from
    Numba's disk cache.
    """

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = args[0].type
        name = f"llvm.fma.v{kind.count}f{sig.return_type.element.bitwidth}"
        fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, (kind, kind, kind)), name)
        return builder.call(fused, args)

    return a(a, b, c), code


@intrinsic
def add(typing: Any, a: Any, b: Any) -> Any:
    """Return a + b."""
    return a(a, b), lambda context, builder, sig, args: builder.fadd(*args)


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """Return a where a > b, else b, lane by lane. A NaN in a gives b."""
    return a(a, b), lambda context, builder, sig, args: _larger(builder, *args)


@intrinsic
def total(typing: Any, a: Any) -> Any:
    """Return the sum of the lanes."""
    return a.element(a), lambda context, builder, sig, args: _fold(builder, args[0], builder.fadd)


@intrinsic
def largest(typing: Any, a: Any) -> Any:
    """Return the largest lane."""
    return a.element(a), lambda context, builder, sig, args: _fold(builder, args[0], lambda x, y: _larger(builder, x, y))
