"""What a test starts: the CUDA kernels of cupy-cuda and cuda-block; and a process that remembers no launch of Triton's."""

from __future__ import annotations

import sys

import pytest

from nsa_sel.backends.cupy_cuda import launch


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of the CUDA kernels that are started from here on."""
    files, start = list[str](), launch.start
    monkeypatch.setattr(launch, "start", lambda source, *rest, **own: (files.append(source), start(source, *rest, **own)))
    return files


def forget_launches() -> None:
    """Of Triton's kernels, those that backends remember."""
    for name, module in list(sys.modules.items()):
        if name.startswith("nsa_sel.backends."):
            for remembering in [value for value in vars(module).values() if hasattr(value, "cache_clear")]:
                remembering.cache_clear()
