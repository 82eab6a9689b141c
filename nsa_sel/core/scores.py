"""The n best blocks of every row by their scores: by a Triton kernel on a GPU, else by a stable sort; the same blocks either way."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core.arguments import as_positions, as_tensor, check_forced, check_positive, is_whole, range_dtype, whole_blocks
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.settings.flags import FLAGS, parse_flag

KERNEL = "nsa_sel.backends._triton.top_n"  # module with top_n, loaded by name like backends
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def best_blocks(scores: Tensor, n: int, block_size: int, first: int, local: int, S_kv: int | None, q_pos: Tensor | None) -> Tensor:
    """Ranges [B,S,G,n,2] of the best blocks, ascending, padded with [0, 0), from the arguments of `Selection.from_scores`."""
    scores = as_tensor("scores", scores)
    S_kv = _check(scores, n, block_size, first, local, S_kv, q_pos)
    B, S, G, blocks = scores.shape
    if q_pos is not None:
        q_pos = as_positions(q_pos, B, S, scores.device)
    kernel = _kernel() if _takes(scores) else None
    if kernel is None or blocks > kernel.MOST_BLOCKS:
        return whole_blocks(sorted_blocks(scores, n, block_size, first, local, S_kv, q_pos), block_size)
    ranges = torch.empty(B, S, G, n, 2, dtype=range_dtype(block_size), device=scores.device)
    with torch.cuda.device(scores.device):
        kernel.top_n(scores.detach(), ranges, block_size, first, local, 0 if q_pos is not None else S_kv - S, q_pos)
    return ranges


def sorted_blocks(scores: Tensor, n: int, block_size: int, first: int, local: int, S_kv: int, q_pos: Tensor | None) -> Tensor:
    """Ascending indices [B,S,G,n] int32 of the best blocks, padded with -1, by a stable sort, on any device. Arguments are checked."""
    _, S, _, blocks = scores.shape
    positions = torch.arange(S_kv - S, S_kv, device=scores.device) if q_pos is None else q_pos
    current = positions.expand(scores.shape[:2])[:, :, None, None] // block_size
    block = torch.arange(blocks, device=scores.device)
    forced = (block < first) | (block > current - local)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    # Only forced blocks get infinity.
    key = torch.nan_to_num(wide, nan=float("-inf"), posinf=torch.finfo(wide.dtype).max, neginf=float("-inf"))
    key = key.masked_fill(forced, float("inf")).masked_fill(block > current, float("-inf"))
    # A stable sort: topk does not define the order of ties.
    key, order = (x[..., :n] for x in torch.sort(key, dim=-1, descending=True, stable=True))
    chosen = torch.where(key > float("-inf"), order, blocks)
    chosen = torch.sort(chosen, dim=-1).values
    if blocks < n:
        chosen = torch.nn.functional.pad(chosen, (0, n - blocks), value=blocks)
    return torch.where(chosen < blocks, chosen, -1).int()


def _check(scores: Tensor, n: int, block_size: int, first: int, local: int, S_kv: int | None, q_pos: Tensor | None) -> int:
    """S_kv of good arguments, or 0 where q_pos gives the positions; else ArgumentError."""
    shape = f"{scores.dtype} of shape {tuple(scores.shape)}"
    if not scores.is_floating_point():
        raise ArgumentError("scores", shape, "floating point [B,S,G,blocks]", "call .float() on it")
    if scores.dim() != 4:
        remedy = "add the missing axes" if scores.dim() < 4 else "sum over the heads of a group, which share one score (NSA Eq. 10)"
        raise ArgumentError("scores", shape, "floating point [B,S,G,blocks]", remedy)
    for name, number in (("n", n), ("block_size", block_size)):
        check_positive(name, number)
    check_forced(first, local, n)
    if q_pos is not None:
        return 0
    _, S, _, blocks = scores.shape
    S_kv = S if S_kv is None else S_kv
    if not is_whole(S_kv) or not S <= S_kv < 1 << 62:
        raise ArgumentError("S_kv", shown(S_kv), f"a whole number >= S = {S}", "pass q_pos= when rows outnumber keys")
    if -(-S_kv // block_size) != blocks:
        raise ArgumentError(
            "scores", f"[B,S,G,blocks] = {tuple(scores.shape)} over {blocks} blocks of {block_size}",
            f"{-(-S_kv // block_size)} blocks for S_kv = {S_kv}",
            "check block_size and the order of axes; where S_kv is not S, pass S_kv= (the number of keys) or q_pos=",
        )  # fmt: skip
    return S_kv


def _takes(scores: Tensor) -> bool:
    """Whether the kernel may run: on plain GPU tensors of its dtypes, unless flags keep Triton out or ask for the reference."""
    if not scores.is_cuda or scores.dtype not in KERNEL_DTYPES or type(scores) is not Tensor or torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch.cuda.get_device_capability(scores.device) < (8, 0):
        return False
    return _flag("NSA_USE_TRITON_SEL") is not False and not _flag("NSA_FORCE_PARITY")


def _flag(name: str) -> Any:
    text = os.environ.get(name)
    return None if text is None else parse_flag(next(flag for flag in FLAGS if flag.name == name), text)


@functools.cache
def _kernel() -> Any:
    """The kernel's module; None without Triton."""
    return importlib.import_module(KERNEL) if importlib.util.find_spec("triton") else None
