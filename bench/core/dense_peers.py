"""Dense causal attention of other packages, where they are installed: FlashAttention 2 and FlashInfer's prefill of one sequence.

Both align their causal mask with the last key, as nsa-sel does. Keys and values lie as [B,S_kv,G,D], the layout that they are made for.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from importlib import util

from torch import Tensor

from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import Contender, Ready
from nsa_sel.bench.core.parity import Problem
from nsa_sel.bench.core.store import first_line

FLASH, FLASH_FUNCTION, INSTALL_FLASH = "flash_attn", "flash_attn_func", "pip install flash-attn"
INFER, INFER_FUNCTION, INSTALL_INFER = "flashinfer", "single_prefill_with_kv_cache", "pip install flashinfer-python"
HALVES = ("float16", "bfloat16")
INFER_DIMS = (64, 128, 256)


def dense_peers() -> tuple[Contender, ...]:
    """Both, whether they run here or not."""
    flash, infer = lacks(FLASH, FLASH, FLASH_FUNCTION, INSTALL_FLASH), lacks(INFER, INFER, INFER_FUNCTION, INSTALL_INFER)
    return (
        Contender("flash-attention", _flash, flash, _flash_refuses, every_key=True, peer=True, selection=None),
        Contender("flashinfer", _infer, infer, _infer_refuses, every_key=True, peer=True, selection=None, forward_only=("cuda",)),
    )


def by_tokens(x: Tensor) -> Tensor:
    """k or v [B,G,S_kv,D], which lies as [B,S_kv,G,D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def lacks(package: str, module: str, function: str, install: str, arguments: Iterable[str] = ()) -> Callable[[str], str | None]:
    """Why a function of another package can't be called with these arguments on a device ("cpu", "cuda")."""

    def why(device: str) -> str | None:
        if util.find_spec(module.partition(".")[0]) is None:
            return f"{package} is not installed: {install}"
        if device != "cuda":
            return "needs a GPU"
        try:
            found = getattr(importlib.import_module(module), function, None)
        except Exception as error:  # a package's import may raise anything
            return f"{module} can't be imported ({first_line(error)}): {install} -U"
        if found is None:
            return f"{module} has no {function}: {install} -U"
        known = inspect.signature(found).parameters if arguments else ()
        lacking = [name for name in arguments if name not in known]
        return f"{module}.{function} has no argument {', '.join(lacking)}: {install} -U" if lacking else None

    return why


def _flash_refuses(case: Case) -> str | None:
    fits = case.dtype in HALVES and case.Dk == case.Dv <= 256 and not case.Dk % 8
    return None if fits else f"takes {' and '.join(HALVES)} with Dk = Dv up to 256, multiples of 8, alone"


def _flash(problem: Problem) -> Ready:
    attend = getattr(importlib.import_module(FLASH), FLASH_FUNCTION)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = attend(q.flatten(2, 3), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        return o.view(q.shape)

    return Ready(call, call, layout=by_tokens)


def _infer_refuses(case: Case) -> str | None:
    if case.B > 1:
        return "takes one sequence alone"
    fits = case.dtype in HALVES and case.Dk == case.Dv in INFER_DIMS
    return None if fits else f"takes {' and '.join(HALVES)} with Dk = Dv of {', '.join(map(str, INFER_DIMS))} alone"


def _infer(problem: Problem) -> Ready:
    attend = getattr(importlib.import_module(INFER), INFER_FUNCTION)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o: Tensor = attend(q[0].flatten(1, 2), *(x[0].transpose(0, 1).contiguous() for x in (k, v)), causal=True)
        return o.view(q.shape)

    return Ready(call, call, layout=by_tokens)
