"""SGLang's MiniMax-M3 without an engine: its hook registry, its loader, and the two functions that the plugin hooks, from
its wheel. Of the rest, only names: importing it needs SGLang's own torch and a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.engines.steps import take_one_config

FOLDERS = (
    "", ".srt", ".srt.layers", ".srt.layers.attention", ".srt.layers.attention.minimax_sparse_ops", ".kernels", ".kernels.ops",
    ".kernels.ops.attention",
)  # fmt: skip


class Switches:
    """SGLang's environment variables: all unset."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=lambda: None)


def import_model() -> SimpleNamespace:
    """Import SGLang's loader of plugins, and run it."""
    root = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang")))
    for name in FOLDERS:
        folder = ModuleType(f"sglang{name}")
        folder.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[folder.__name__] = folder
    names = {
        "sglang.srt.environ": {"envs": Switches()},
        "sglang.srt.runtime_context": {"get_platform": lambda: SimpleNamespace(is_sm90=False)},
        "sglang.srt.utils": {name: lambda: False for name in ("is_gfx95_supported", "is_hip", "is_xpu")},
    }
    for name, members in names.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    plugins = importlib.import_module("sglang.srt.plugins")
    plugins.load_plugins()
    kernels = importlib.import_module("sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse")
    take_one_config(*(module for name, module in list(sys.modules.items()) if name.startswith("sglang.kernels.ops.attention.")))
    return SimpleNamespace(plugins=plugins, registry=importlib.import_module("sglang.srt.plugins.hook_registry"), kernels=kernels)
