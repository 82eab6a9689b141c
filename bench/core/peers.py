"""Others' kernels on our inputs, in the library's layout.

FlexAttention, masked and dense SDPA of torch; where installed flash-linear-attention's NSA, cuDNN's NSA, FlashInfer and
FlashAttention-4; and functions that a user names: `nsa-sel bench --peer NAME=module:function` (docs/performance.md has
adapters). Masks, plans and layouts are made once per selection, outside the timed calls: `prepare_ms` of a row is their
cost, and its `selection` is "kept". Ours build their plans within the timed calls ("new").
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import util
from typing import Any

import torch
from torch import Tensor

from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.contenders import DENSE, Contender, Problem, Ready, dense, masked_sdpa, selected, token_mask
from nsa_sel.bench.core.store import first_line
from nsa_sel.core.registry import backends
from nsa_sel.errors import ArgumentError

FLA = "fla.ops.nsa"
FORM = re.compile(r"([\w.-]+)=([\w.]+:[\w.]+)")


def by_tokens(x: Tensor) -> Tensor:
    """Return k or v [B,G,S_kv,D] with the strides of [B,S_kv,G,D]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def peers() -> tuple[Contender, ...]:
    """Return all of them, whether they run here or not."""
    return (
        Contender("flex-attention", _flex, peer=True, selection="kept"),
        Contender("masked-sdpa", _masked, peer=True, selection="kept"),
        dense(peer=True),
        dense("dense-flash", "flash", peer=True),
        dense("dense-sdpa", "any", "cpu", peer=True),
        Contender("fa4", _fa4, lacks("flash_attn.cute", "flash-attn-4"), fa4_takes, peer=True, every_key=True, selection=None),
        Contender("fla-nsa", _fla, fla_lacks, fla_takes, peer=True),
        Contender("cudnn-nsa", _cudnn, lacks("cudnn", "nvidia-cudnn-frontend"), cudnn_takes, peer=True),
        Contender("flashinfer", _flashinfer, lacks("flashinfer", "flashinfer-python"), flashinfer_takes, peer=True, selection="kept"),
    )


def _masked(problem: Problem) -> Ready:
    mask = token_mask(problem.selection, problem.k.shape[2], dtype=problem.q.dtype)
    call = lambda q, k, v: masked_sdpa(q, k, v, *mask)  # noqa: E731
    return Ready(call, call)


def flex(sees: Callable[..., Tensor], batches: int | None, S: int, S_kv: int, device: str) -> Callable[..., Tensor]:
    """Return FlexAttention under a mask, compiled on a GPU: o [batches,heads,S,Dv] of q, k, v, whose heads share it.

    sees: of batch, head, row and key, returns whether the row sees the key. batches: None for a mask that all share.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()  # after eight other shapes it would not compile this one, but run it uncompiled
    on_gpu = device == "cuda"
    mask = create_block_mask(sees, batches, None, S, S_kv, device=device, _compile=on_gpu)  # S x S_kv is never in memory
    attend: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True) if on_gpu else flex_attention
    return lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] > k.shape[1])


def _flex(problem: Problem) -> Ready:
    """Prepare FlexAttention with a mask of what every row selects. Groups are batches, so heads share it."""
    selection, S_kv, device = problem.selection, problem.k.shape[2], problem.q.device
    B, S, G, h, _ = problem.q.shape
    unit = selection.block_size or 1  # rows select blocks, or keys where ranges are no blocks
    chosen = selected(selection, torch.arange(0, S_kv, unit, device=device)).transpose(1, 2).flatten(0, 1).contiguous()

    def sees(b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return chosen[b, row, key // unit] & (key <= row + S_kv - S)

    attend = flex(sees, B * G, S, S_kv, device.type)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = attend(q.permute(0, 2, 3, 1, 4).flatten(0, 1), k.flatten(0, 1).unsqueeze(1), v.flatten(0, 1).unsqueeze(1))
        return o.view(B, G, h, S, -1).permute(0, 3, 1, 2, 4)

    return Ready(call, call)


# Peers from other packages


def lacks(module: str, package: str) -> Callable[[str], str | None]:
    """Return a function of a device ("cpu", "cuda") that returns why a package can't be called there, or None."""

    def why(device: str) -> str | None:
        if util.find_spec(module.partition(".")[0]) is None:
            return f"not installed: pip install {package}"
        if device != "cuda":
            return "needs a GPU"
        try:
            importlib.import_module(module)
        except Exception as error:  # a package's import may raise anything
            return f"{module} can't be imported ({first_line(error)}): pip install -U {package}"
        return None

    return why


fla_lacks = lacks(FLA, "flash-linear-attention")


def takes(what: str, fits: Callable[[Case], bool]) -> Callable[[Case], str | None]:
    """Return a function of a case that returns what alone a kernel takes, or None if the case fits."""
    return lambda case: None if fits(case) else f"takes {what} alone"


HALVES = ("float16", "bfloat16")
# FlashAttention-4 splits no keys on SM 9.0: one row would show that alone.
fa4_takes = takes("several rows in 16 bits", lambda case: case.S > 1 and case.dtype in HALVES)
fla_takes = takes(
    "whole blocks, with 16, 32 ... heads per group", lambda case: case.block > 0 and case.h >= 16 and not case.h & (case.h - 1)
)
cudnn_takes = takes(
    "as many rows as keys, up to 16 heads per group, and blocks of 16 to 128 keys, in 16 bits",
    lambda case: case.S == case.S_kv and case.h <= 16 and case.block in (16, 32, 64, 128) and case.dtype in HALVES,
)
flashinfer_takes = takes(
    "whole blocks of keys that they divide, Dk = Dv, in 16 bits",
    lambda case: case.block > 0 and not case.S_kv % case.block and case.Dk == case.Dv and case.dtype in HALVES,
)


def _fa4(problem: Problem) -> Ready:
    """Prepare dense causal FlashAttention-4, whose causal mask ends at the last key."""
    attend = importlib.import_module("flash_attn.cute").flash_attn_func

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = attend(q.flatten(2, 3), k.transpose(1, 2), v.transpose(1, 2), causal=True)[0]
        return o.unflatten(2, q.shape[2:4])  # type: ignore[no-any-return]

    return Ready(call, call, layout=by_tokens)


def _fla(problem: Problem) -> Ready:
    """Prepare `parallel_nsa` of flash-linear-attention with the selection's blocks, without compression and window.

    Keys lie as [B,S_kv,G,D] before the call, which copies nothing. It averages keys and values over blocks in every
    call, for a compression that is not asked for: that is in its times.
    """
    attend = importlib.import_module(FLA).parallel_nsa
    indices = problem.selection.block_indices.long().contiguous()
    options = {"block_indices": indices, "block_counts": indices.shape[-1], "block_size": problem.selection.block_size}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = attend(q.flatten(2, 3).contiguous(), *(x.transpose(1, 2).contiguous() for x in (k, v)), **options)
        return o.unflatten(2, q.shape[2:4])  # type: ignore[no-any-return]

    return Ready(call, call, layout=by_tokens)


def _cudnn(problem: Problem) -> Ready:
    """Prepare the selection attention of cuDNN's frontend, forward alone, over rows of all sequences end to end."""
    attend = importlib.import_module("cudnn").NSA.selection_attention_wrapper
    B, S, G, h, Dk = problem.q.shape
    indices = problem.selection.block_indices.int().sort(-1, descending=True).values.flatten(0, 1)  # padding last
    bounds = torch.arange(B + 1, dtype=torch.int32, device=problem.q.device) * S
    options = {"block_size": problem.selection.block_size, "scale_softmax": Dk**-0.5, "max_s_q": S, "max_s_k": S, "is_causal": True}
    of_rows = indices.contiguous(), (indices >= 0).sum(-1, dtype=torch.int32), bounds, bounds

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys_and_values = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v))
        found = attend(q.flatten(2, 3).flatten(0, 1), *keys_and_values, *of_rows, **options)
        return found["o_tensor"].view(B, S, G, h, -1)  # type: ignore[no-any-return]

    return Ready(call, call, layout=by_tokens)


def _flashinfer(problem: Problem) -> Ready:
    """Prepare FlashInfer's paged decoding, forward alone: each row of a group is a sequence of one new token.

    The blocks that the row selects are the pages of its sequence, the last one only up to the row, so no mask is needed.
    """
    (B, S, G, h, Dk), S_kv, size = problem.q.shape, problem.k.shape[2], problem.selection.block_size or 1
    device, indices = problem.q.device, problem.selection.block_indices.long().sort(-1).values  # [B,S,G,n]
    seen = torch.arange(S_kv - S + 1, S_kv + 1, device=device).view(S, 1, 1)  # keys up to each row
    chosen = (indices >= 0) & (indices * size < seen)
    first = torch.arange(B * G, device=device).view(B, 1, G, 1) * (S_kv // size)  # page of each sequence and group
    ends = torch.nn.functional.pad(chosen.sum(-1).flatten().cumsum(0), (1, 0)).int()
    last = indices.where(chosen, -1).amax(-1)
    of_last = ((seen.squeeze(-1) - last * size).clamp(max=size) * (last >= 0)).flatten().int()
    wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 28, dtype=torch.uint8, device=device), use_tensor_cores=True
    )
    wrapper.plan(ends, (indices + first)[chosen].int(), of_last, h, 1, Dk, size, q_data_type=problem.q.dtype)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = tuple(x.view(-1, size, 1, Dk) for x in (k, v))
        return wrapper.run(q.flatten(0, 2), pages).view(q.shape)  # type: ignore[no-any-return]

    return Ready(call, call)


# Functions of the user


def given(values: Sequence[str], others: Iterable[Contender]) -> tuple[Contender, ...]:
    """Return a contender for each value of `--peer`.

    Args:
        values: as of `functions`. A function gets (q, k, v, block_indices, block_size, scale) and returns o. If it has an
            attribute `prepare`, that is called with (k, v, block_indices, block_size) outside of the timings, and the
            function gets what it returns as a seventh argument.
        others: contenders whose names are taken.

    Raises:
        ArgumentError: as `functions`.
    """
    taken = {*backends(), DENSE, *(other.name for other in others)}
    return tuple(_given(name, value, function) for name, (value, function) in functions(values, taken).items())


def functions(values: Sequence[str], taken: Iterable[str]) -> dict[str, tuple[str, Callable[..., Any]]]:
    """Return by name what each value of `--peer` names: the value and its function.

    Args:
        values: "NAME=module:function" each. Modules are looked for where Python does, and then in the current folder.
        taken: names that a peer may not have.

    Raises:
        ArgumentError: a value of another form, a name that is taken, or a function that cannot be imported.
    """
    if values and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    taken, found = set(taken), dict[str, tuple[str, Callable[..., Any]]]()
    for value in values:
        match = FORM.fullmatch(value)
        if match is None:
            allowed = "NAME=module:function, such as mine=my_peer:attend"
            raise ArgumentError("--peer", repr(value), allowed, "name the peer, its module and its function")
        name, path = match.groups()
        if name in taken:
            raise ArgumentError("--peer", repr(value), f"a name other than {', '.join(sorted(taken))}", "give the peer another name")
        taken.add(name)
        try:
            function = pkgutil.resolve_name(path)
        except Exception as error:  # a module's import may raise anything
            remedy = "install the module, or run in the folder that it is in"
            raise ArgumentError("--peer", f"{value!r} ({first_line(error)})", "a function that can be imported", remedy) from error
        if not callable(function):
            raise ArgumentError("--peer", f"{value!r}, a {type(function).__name__}", "a function", "name a function of that module")
        found[name] = value, function
    return found


def _given(name: str, value: str, function: Callable[..., Any]) -> Contender:
    make = getattr(function, "prepare", None)

    def prepare(problem: Problem) -> Ready:
        selection, shape = problem.selection, (*problem.q.shape[:-1], problem.v.shape[-1])
        indices, scale = selection.block_indices.long().contiguous(), problem.q.shape[-1] ** -0.5
        kept = () if make is None else (make(problem.k, problem.v, indices, selection.block_size),)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o = function(q, k, v, indices, selection.block_size, scale, *kept)
            if not isinstance(o, Tensor) or o.shape != shape or o.dtype != q.dtype:
                described = f"{list(o.shape)} {o.dtype}" if isinstance(o, Tensor) else f"a {type(o).__name__}"
                allowed = f"a function that returns o [B,S,G,h,Dv], here {list(shape)}, in q's dtype {q.dtype}"
                raise ArgumentError("--peer", f"{value!r}, which returned {described}", allowed, "reshape or convert what it returns")
            return o

        return Ready(call, call)

    whole = takes("whole blocks", lambda case: case.block > 0)
    return Contender(name, prepare, refuses=whole, peer=True, selection="new" if make is None else "kept")
