"""Call one backend: on q's device, within the workspace, under the passes that flags ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from nsa_sel.core import forward
from nsa_sel.core.call import Call
from nsa_sel.core.choose_call import ChooseCall
from nsa_sel.telemetry import passes

T = TypeVar("T")


def on_device(call: Call | ChooseCall, name: str, direction: str, work: Callable[[str], T]) -> T:
    """What `work(name)` returns, called with q's device current: backends launch and allocate there."""
    if call.q.is_cuda and call.q.get_device() != torch._C._cuda_getDevice():  # CUDA is initialized: q is there
        with torch.cuda.device(call.q.device):
            return on_device(call, name, direction, work)
    settings, workspace = call.settings, call.workspace if isinstance(call, Call) else None
    if workspace is not None:
        workspace.begin()
    if settings.traced or settings.debug_nvtx:
        loads = forward.loaded_keys(name, call) if isinstance(call, Call) else None
        result = passes.recorded(call, name, direction, loads, lambda: work(name))
    else:
        result = work(name)
    if workspace is not None:
        workspace.check(name, direction)
    return result
