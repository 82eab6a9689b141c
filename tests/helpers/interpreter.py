"""Make Triton's interpreter several times faster in tests, with equal results on every CPU.

Its time is that of Python calls around small NumPy operations: objects for types and shapes, made anew for each of them. Nothing here
changes what a kernel computes, except sums of products of float32 (`dot`);
tests/unit/backends/test_triton.py compares with it as it is.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def patch_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone. Imports Triton, which must have been told to interpret. Old versions are not made faster."""
    from triton.runtime import interpreter

    reproducible_products(patch, interpreter)
    if not hasattr(interpreter.TensorHandle, "__post_init__"):  # Triton 3.4: its interpreter is made of other parts
        patch.setattr(interpreter.TensorDescHandle, "validate", lambda self: None)  # takes strides in elements for bytes
        return
    vectorized_scans(patch, interpreter)
    one_patch_a_launch(patch, interpreter)
    remembered_types(patch, interpreter)
    # Sums of int32 are computed in int64 a second time, and compared with its limits, for an assertion that is left out without `debug`.
    patch.setattr(interpreter.TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *arguments: None)


def reproducible_products(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Products of float32 are summed in float64 and rounded: what BLAS sums in float32 depends on the CPU, and on a row's place."""
    plain_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if d.data.dtype != np.float32 or a.data.dtype.kind != "f":
            return plain_dot(self, a, b, d, *precision)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def vectorized_scans(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """A scan for the largest and a sort's exclusive-or call a Python function per element: a plan sorts a thousand entries."""
    from triton.language import standard

    from nsa_sel.backends._triton.softmax import larger

    slow_scan, slow_reduce = interpreter.ScanOps.generic_scan, interpreter.ReduceOps.generic_reduce

    def scan(self: Any, arguments: Any) -> Any:
        if self.combine_fn is not larger:
            return slow_scan(self, arguments)
        return [self.to_tensor(np.maximum.accumulate(x.handle.data, axis=self.axis), x.dtype) for x in arguments]

    def reduce(self: Any, arguments: Any) -> Any:
        if self.combine_fn is not standard._xor_combine or self.axis is None:
            return slow_reduce(self, arguments)
        return [self.to_tensor(np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype) for x in arguments]

    patch.setattr(interpreter.ScanOps, "generic_scan", scan)
    patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)


def one_patch_a_launch(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """A launch replaces the functions of `tl` and `tl.core`, for device functions of every module; these do not do it once more."""
    patch_lang = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    names: dict[Any, list[str]] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)

    def patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]
        for name in names[package]:
            interpreter._patch_attr(package, name, getattr(package, name), builder, *scope)

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)  # without the check that it is called from a kernel

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope[0].set_attr(obj, name, called)

    patch.setattr(interpreter, "_patch_attr", patch_attr)
    patch.setattr(interpreter, "_patch_builtin", patch_builtin)
    patch.setattr(interpreter, "_patch_lang", lambda fn: patch_lang(everything))
    patch.setattr(interpreter.InterpretedFunction, "__call__", call)


def remembered_types(patch: pytest.MonkeyPatch, interpreter: Any) -> None:
    """Cache results per dtype and shape, and skip casts and broadcasts between operands of one dtype or shape."""
    from triton.language import core

    semantic, handle = interpreter.TritonSemantic, interpreter.TensorHandle
    plain = SimpleNamespace(
        block=core.block_type.__init__, tensor=core.tensor.__init__, equal=core.dtype.__eq__, np_dtype=interpreter._get_np_dtype,
        operands=semantic.binary_op_type_checking_impl, checked=handle.__post_init__,
    )  # fmt: skip
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    spread_types: dict[tuple[str, tuple[int, ...]], Any] = {}
    broadcast_sizes: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    np_dtypes: dict[str, Any] = {}
    widest: dict[str, int] = {}  # name of a dtype -> bytes of a number, which the interpreter has found to be no more than it has

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = str(element_ty), tuple([getattr(size, "value", size) for size in shape])
        if key not in blocks:
            plain.block(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        vars(self).update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensors:
            plain.tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[sizes]

    def np_dtype(tt_dtype: Any) -> Any:
        name = str(tt_dtype)
        if name not in np_dtypes:
            np_dtypes[name] = plain.np_dtype(tt_dtype)
        return np_dtypes[name]

    def checked(self: Any) -> None:
        name = self.dtype.name
        if self.data.itemsize > widest.get(name, 0):
            plain.checked(self)
            widest[name] = self.data.itemsize

    def operands(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> Any:
        alike = isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor) and lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr()
        if not alike or len(flags) > 3 or named.get("div_or_mod"):  # quotients of float16 are of float32
            return plain.operands(self, lhs, rhs, *flags, **named)
        return broadcast(self, lhs, rhs)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = [tuple(x.type.shape.values) if x.type.is_block() else () for x in (lhs, rhs)]
        if left == right:
            return lhs, rhs
        if (left, right) not in broadcast_sizes:
            broadcast_sizes[left, right] = np.broadcast_shapes(left, right)
        sizes = broadcast_sizes[left, right]
        return lhs if left == sizes else spread(self, lhs, sizes), rhs if right == sizes else spread(self, rhs, sizes)

    def spread(self: Any, x: Any, sizes: tuple[int, ...]) -> Any:
        scalar, data = x.type.scalar, np.empty(sizes, x.handle.data.dtype)  # in half the time of a view by np.broadcast_to
        data[...] = x.handle.data
        spread_type = spread_types.get((scalar.name, sizes))
        if spread_type is None or spread_type.element_ty is not scalar:
            spread_type = spread_types[scalar.name, sizes] = core.block_type(scalar, list(sizes))
        return self.tensor(handle(data, x.handle.dtype.scalar), spread_type)

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(core.dtype, "__eq__", lambda self, other: self is other or plain.equal(self, other))
    patch.setattr(interpreter, "_get_np_dtype", np_dtype)
    patch.setattr(handle, "__post_init__", checked)
    patch.setattr(semantic, "binary_op_type_checking_impl", operands)
    patch.setattr(semantic, "broadcast_impl_value", broadcast)
