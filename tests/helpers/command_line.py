"""Runs nsa-sel's commands in this process, and what they are given."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from typer.testing import CliRunner

from nsa_sel.cli.app import app
from nsa_sel.core.request import DeviceInfo

S, G, D, S_KV, BLOCK = 5, 2, 16, 32, 8
SM89 = DeviceInfo(kind="cuda", name="NVIDIA GeForce RTX 4090", sm=89)


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ask(*arguments: object, exit_code: int = 0) -> Any:
    """The JSON document that a command prints; anything else on stdout fails to parse."""
    result = invoke(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def refused(*arguments: object) -> str:
    """The message of a command that ends with exit code 2 and no traceback."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    return result.output


def tensors() -> dict[str, Tensor]:
    q, k, v = torch.randn(1, S, G, 3, D), torch.randn(1, G, S_KV, D), torch.randn(1, G, S_KV, D)
    return {"q": q, "k": k, "v": v, "block_indices": torch.tensor([0, 3, -1], dtype=torch.int8).expand(1, S, G, 3).contiguous()}


def ranges_of(blocks: Tensor) -> Tensor:
    start = blocks.int().clamp(min=0) * BLOCK
    return torch.stack((start, torch.where(blocks < 0, start, start + BLOCK)), -1)
