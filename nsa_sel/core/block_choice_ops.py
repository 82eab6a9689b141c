"""The torch.library ops `nsa_sel::choose_blocks` and `nsa_sel::choose_lse`, for torch.compile, torch.export and dispatch modes.

Neither has a gradient: their callers detach.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_sel.core import block_choice
from nsa_sel.core.arguments import range_dtype
from nsa_sel.core.check import Index
from nsa_sel.core.choose_call import Pool, Rule


@torch.library.custom_op("nsa_sel::choose_blocks", mutates_args=())
def _blocks(
    q: Tensor, k: Tensor, lse: Tensor | None, S_kv: int, scale: float, q_pos: Tensor | None, rule: list[int], pool: list[bool],
    backend: str | None,
) -> Tensor:  # fmt: skip
    return block_choice.best_blocks(Index(q, k, lse, S_kv, scale, q_pos), Rule(*rule), Pool(*pool), backend)


@torch.library.custom_op("nsa_sel::choose_lse", mutates_args=())
def _lse(q: Tensor, k: Tensor, S_kv: int, scale: float, q_pos: Tensor | None, rule: list[int], backend: str | None) -> Tensor:
    return block_choice.log_sum_exp(Index(q, k, None, S_kv, scale, q_pos), Rule(*rule), backend)


@_blocks.register_fake
def _(q: Tensor, k: Tensor, lse: Tensor | None, S_kv: int, scale: float, q_pos: Tensor | None, rule: list[int], *_: Any) -> Tensor:
    own = Rule(*rule)
    return q.new_empty(*q.shape[:3], own.n, 2, dtype=range_dtype(own.block_size))


@_lse.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def best_blocks(index: Index, rule: Rule, pool: Pool, backend: str | None) -> Tensor:
    """`block_choice.best_blocks` through the op."""
    found: Tensor = torch.ops.nsa_sel.choose_blocks(*index, list(rule), list(pool), backend)
    return found


def log_sum_exp(index: Index, rule: Rule, backend: str | None) -> Tensor:
    """`block_choice.log_sum_exp` through the op."""
    q, k, _, *rest = index
    found: Tensor = torch.ops.nsa_sel.choose_lse(q, k, *rest, list(rule), backend)
    return found
