"""Detect, and refuse, what PyTorch does around a call: tracing, function transforms, autocast, lazy negation, graph
capture, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # type: ignore[attr-defined]  # what guards the graphs of torch.compile
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook

from nsa_sel.errors import BackendError

transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active  # inside torch.func's vmap, grad, jvp ...
_len_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_NO_DISPATCH = Tensor.__torch_dispatch__
PLAIN = (Tensor, torch.nn.Parameter)
_tracing: Callable[[], Any] = torch._C._get_tracing_state  # by torch.jit.trace
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # for any device; faster than asking for one by name


def needs_grad(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if autograd records a call with these inputs."""
    return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()


def versioned(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that have a version counter: if they are saved, autograd notices writes to them before
    backward."""
    return [x for x in tensors if x is not None and not x.is_inference()]


def casts(q: Any) -> bool:
    """Return True if torch.autocast casts q, and tensors of its dtype."""
    dtype = _autocast_dtype(q)
    return dtype is not None and getattr(q, "dtype", None) != dtype


def plain(*tensors: Any) -> bool:
    """Return True for plain tensors (no subclass) of a call that nothing traces or transforms.

    Then only autocast, lazy negation and gradients are left to handle.
    """
    for x in tensors:
        if type(x) not in PLAIN:
            return False
    return untransformed()


def capturing(x: Tensor) -> bool:
    """Return True if a CUDA graph captures operations on x; its replays may see other values, and nothing may wait for
    the device."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def untransformed() -> bool:
    """Return True if nothing traces or transforms the operations of this thread."""
    return not (is_compiling() or _len_modes() or transformed() or forward_ad._current_level >= 0 or _tracing() is not None)


def traces(*tensors: Any) -> bool:
    """Return True if operations are traced: by torch.compile, a dispatch mode (make_fx, FakeTensorMode), or a tensor
    subclass.

    True for arguments that are not tensors, too.

    A call then goes through the ops, because backends work below the dispatcher.
    """
    if is_compiling() or _len_modes():
        return True
    return any(type(x) not in PLAIN and getattr(x, "__torch_dispatch__", None) is not _NO_DISPATCH for x in tensors)


def check_traced(name: str, *tensors: Any, compiles: bool = True) -> None:
    """Raise BackendError when make_fx or FakeTensorMode traces `name`, which is not an op, or torch.compile unless
    `compiles`."""
    if not compiles and is_compiling():
        raise BackendError(
            f"{name} is called in a function that torch.compile traces; allowed: eager calls. Remedy: call it in a function under"
            " torch.compiler.disable, and compile the rest."
        )
    check_transforms(*tensors, name=name)
    modes = torch._C._TorchDispatchModeKey.__members__.values()
    faked = not _len_modes() and traces(*(x for x in tensors if isinstance(x, Tensor)))
    if faked or any(torch._C._get_dispatch_mode(mode) is not None for mode in modes):
        raise BackendError(
            f"{name} is called while PyTorch traces or fakes operations (torch.compile, make_fx, FakeTensorMode); allowed: eager calls of"
            " plain tensors. Remedy: trace selection_attention, which is an op, or keep the call out of the traced code, for example in a"
            " function under torch.compiler.disable."
        )


def check_transforms(*inputs: Any, name: str = "selection_attention") -> None:
    """Raise BackendError under transforms that no backend supports."""
    if transformed():
        refuse_transforms("a transform of torch.func (vmap, grad, vjp, jvp, jacrev or the like)", name)
    duals = [forward_ad.unpack_dual(x) for x in inputs if isinstance(x, Tensor)] if forward_ad._current_level >= 0 else []  # type: ignore[no-untyped-call]
    if any(dual.tangent is not None for dual in duals):
        refuse_transforms("torch.autograd.forward_ad, with dual numbers", name)
    if _tracing() is not None:
        raise BackendError(
            f"{name} is called inside torch.jit.trace, which would record one call's kernels as constants; allowed: eager,"
            " torch.compile and torch.export. Remedy: export the model by torch.export."
        )


def check_gradients(*gradients: Tensor | None, name: str = "selection_attention") -> None:
    """Raise BackendError for batched gradients."""
    for x in gradients:
        if x is not None and (is_batchedtensor(x) or is_legacy_batchedtensor(x) or transformed()):
            refuse_transforms("a backward pass of batched gradients (is_grads_batched=True, vectorize=True or vmap)", name)


def refuse_transforms(what: str, name: str = "selection_attention") -> NoReturn:
    """BackendError: backends need plain tensors."""
    raise BackendError(
        f"{name} is called inside {what}; allowed: plain tensors. Remedy: torch.autograd.grad or .backward() for gradients, one output"
        " gradient at a time (no is_grads_batched, no vectorize); for vmap, make its dimension part of the batch B of all tensors."
    )


def refuse_second_derivative(name: str = "selection_attention") -> NoReturn:
    """BackendError: the backends' backward passes are not differentiable."""
    raise BackendError(
        f"{name} has no second derivative, but the backward pass needs one (create_graph=True);"
        " allowed: create_graph=False. Remedy: detach, or compute that term with plain PyTorch attention."
    )


def materialized(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors without PyTorch's lazy negation, which kernels do not see in memory."""
    if q.is_neg() or k.is_neg() or v.is_neg():
        return q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    return q, k, v


def in_autocast_dtype(*tensors: Any) -> tuple[Any, ...]:
    """Tensors, unchecked, cast by torch.autocast as scaled_dot_product_attention does; float64 is left alone."""
    dtype = _autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def _autocast_dtype(x: Any) -> torch.dtype | None:
    """Return the dtype to which torch.autocast casts on the device of x."""
    if not any_autocast():
        return None
    kind = "cuda" if getattr(x, "is_cuda", False) else "cpu"
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


MOST_CLASSES = 8  # guarded classes per key
REPEATED = "repeated"  # a key of `Call.known` once a second call of the class shares it
Classes = tuple[tuple[Any, Any], ...]  # guards of tensors, and the value that is cached for them


def find_class(classes: Classes, *tensors: Any) -> Any:
    """Return the value that is cached for tensors of this class, or None.

    Two sets of tensors are of one class if they have the same Python types, dtypes, devices, shapes, strides,
    requires_grad and dispatch keys (lazy negation, inference mode, sparse layouts): PyTorch's guards check this in C++.
    The number of tensors must be the same, and no tensor may be passed twice. Guards do not notice every tracer
    (make_fx), so check `untransformed()` first. Read each tensor's shape first, too: PyTorch aborts the process if it
    checks a nested tensor.
    """
    for guards, value in classes:
        if guards.check(*tensors):
            return value
    return None


def with_class(classes: Iterable[tuple[Any, Any]], value: Any, *tensors: Tensor) -> Classes:
    """Return the classes with this value cached for the class of these tensors; it replaces an older value of that
    class."""
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    others = [x for x in classes if not x[0].check(*tensors)]
    return (*others[1 - MOST_CLASSES :], (guards, value))


def hooked(module: Any) -> bool:
    """Return True if calling an nn.Module runs more than the forward of its class: hooks, a replaced forward, a
    compiler."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
    return replaced or any(hooks) or bool(_has_any_global_hook())  # type: ignore[no-untyped-call]
