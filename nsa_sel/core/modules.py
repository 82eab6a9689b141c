"""Whether a module's forward is all that a call of it does."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import _has_any_global_hook


def hooked(module: Any) -> bool:
    """Whether a call of an nn.Module does more than the forward of its class: hooks, a forward of its own, a compiler."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    replaced = "forward" in vars(module) or module._compiled_call_impl is not None
    return replaced or any(hooks) or bool(_has_any_global_hook())  # type: ignore[no-untyped-call]
