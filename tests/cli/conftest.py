"""Fixtures of the command line's tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
from torch import Tensor


@pytest.fixture
def save(tmp_path: Path) -> Any:
    """Writes in.safetensors from tensors and metadata, and gives its path."""

    def write(held: dict[str, Tensor], **metadata: str) -> Path:
        path = tmp_path / "in.safetensors"
        safetensors.torch.save_file(held, path, metadata)
        return path

    return write
