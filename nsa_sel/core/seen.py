"""Classes of tensors: one check in C++ of all that PyTorch knows of them, and what those of a class led to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # type: ignore[attr-defined]  # what guards the graphs of torch.compile

MOST = 8  # classes that are told apart by guards alone
Classes = tuple[tuple[Any, Any], ...]  # guards of tensors, and what those led to


def find(classes: Classes, *tensors: Any) -> Any:
    """What is stored for tensors like these, of the same number; None if nothing.

    Alike are the Python type, dtype, device, shape and strides of each, whether autograd records it, and its dispatch keys: lazy negation,
    inference mode, sparse layouts. Those of the thread do not tell every tracer (make_fx): ask `transforms.untransformed` first. A tensor
    that is given twice is like none. Read the shape of each tensor before: PyTorch ends the process where it checks a nested one.
    """
    for guards, found in classes:
        if guards.check(*tensors):
            return found
    return None


def added(classes: Iterable[tuple[Any, Any]], found: Any, *tensors: Tensor) -> Classes:
    """The classes with what these tensors led to, in place of what is stored for tensors like them."""
    guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    others = [x for x in classes if not x[0].check(*tensors)]
    return (*others[1 - MOST :], (guards, found))
