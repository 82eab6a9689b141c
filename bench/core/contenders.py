"""Implementations that a bench compares: our backends and PyTorch's dense attention.

Each is made ready for a problem and then called as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import nsa_sel
from nsa_sel.bench.core.cases import Case, make_inputs, make_selection
from nsa_sel.core.registry import backends as registered
from nsa_sel.core.registry import fallback
from nsa_sel.errors import ArgumentError, closest
from nsa_sel.selection import Selection

DENSE = "dense-cudnn"  # full causal attention by cuDNN: no backend of ours
PACKED = fallback()  # what all others are compared with
PREFILL_ONLY = tuple(name for name, backend in registered().items() if not backend.decodes)
SLOW = tuple(name for name, backend in registered().items() if backend.slow)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
DenseKernel = Literal["cudnn", "flash", "any"]
_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Problem(NamedTuple):
    """The tensors of a case, on one device."""

    selection: Selection
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def make_problem(case: Case, device: torch.device | str) -> Problem:
    """Return the selection and inputs of a case."""
    return Problem(make_selection(case, device), *make_inputs(case, device, seed=1))


class Ready(NamedTuple):
    """A contender prepared for one problem.

    `call` is the whole forward, plans included. `trained` is the forward for timing the backward alone: `forget` drops
    its plans before each call, so that building them is timed. `layout` gives k and v [B,G,S_kv,D] the strides that the
    contender wants.
    """

    call: Attend
    trained: Attend
    forget: Callable[[], None] = lambda: None
    layout: Callable[[Tensor], Tensor] = lambda x: x


class Contender(NamedTuple):
    """One column of a comparison.

    `prepare` is not timed. `lacks` returns in one line why it can't run on a device ("cpu", "cuda"), `refuses` why not
    on a case; None if it can. `every_key`: it computes dense causal attention.
    """

    name: str
    prepare: Callable[[Problem], Ready]
    lacks: Callable[[str], str | None] = lambda device: None
    refuses: Callable[[Case], str | None] = lambda case: None
    every_key: bool = False
    checked: bool = True  # against the oracle
    peer: bool = False  # another project's, or torch's: a wrong result is a row, and it may have no backward pass
    # The selection of a timed call: "new", with plans built in the call; "kept", prepared before it; None: it has none.
    selection: str | None = "new"
    directions: tuple[str, ...] = ("fwd", "bwd", "fwd+bwd", "decode")


def ours(backend: str) -> Contender:
    """Return a backend of the registry. Every call makes a selection of block indices, without a promise, and plans.
    Each call of an unknown name fails."""
    entry = registered().get(backend)

    def prepare(problem: Problem) -> Ready:
        old = problem.selection
        if old.block_size is None:
            new: Callable[[], Selection] = partial(Selection, old.ranges, None, old.max_length, disjoint=True)
        else:
            new = partial(Selection.from_blocks, old.block_indices, old.block_size)  # a model has block indices
        attend, planned = partial(nsa_sel.selection_attention, backend=backend), new()
        return Ready(lambda q, k, v: attend(q, k, v, new()), lambda q, k, v: attend(q, k, v, planned), planned.forget_plans)

    def lacks(device: str) -> str | None:
        return None if entry is None or device in entry.limits.dtypes else f"needs a {'GPU' if device == 'cpu' else 'CPU'}"

    def refuses(case: Case) -> str | None:
        if entry and case.S == 1 and not entry.decodes:
            return "decodes nothing: it shares loads between rows"
        if entry and not entry.limits.takes_block(case.block):
            return f"takes no blocks of {case.block} keys"
        return "takes whole blocks alone" if entry and entry.limits.block_aligned_only and not case.block else None

    return Contender(backend, prepare, lacks, refuses)


def dense(name: str = DENSE, kernel: DenseKernel = "cudnn", device: str = "cuda", peer: bool = False) -> Contender:
    """Return full causal attention by one of torch's kernels. As a peer it is checked against the oracle."""

    def lacks(here: str) -> str | None:
        return None if here == device else f"needs a {'GPU' if device == 'cuda' else 'CPU: a GPU has kernels to choose from'}"

    def refuses(case: Case) -> str | None:
        masked = peer and device == "cuda" and case.S not in (1, case.S_kv)
        return "rows that begin behind the first key need a mask, not this kernel" if masked else None

    call = partial(dense_causal_sdpa, kernel=kernel)
    return Contender(name, lambda problem: Ready(call, call), lacks, refuses, every_key=True, checked=peer, peer=peer, selection=None)


def backends_on(device: str) -> list[str]:
    """Return the backends that run on a device ("cpu", "cuda"), in the order of the registry."""
    return [name for name, backend in registered().items() if device in backend.limits.dtypes]


def of_framework(framework: str) -> list[str]:
    """Return the backends made with a framework ("triton", "cupy", ...)."""
    return [name for name, backend in registered().items() if backend.framework == framework]


def named(backends: str) -> list[Contender]:
    """Return contenders by comma-separated names. Raises ArgumentError for a name that no backend has."""
    for name in backends.split(","):
        if name not in (*registered(), DENSE):
            close = closest(name, (*registered(), DENSE))
            value = f"{name!r} (did you mean {close}?)" if close else repr(name)
            raise ArgumentError("--backends", value, f"{', '.join(registered())}, {DENSE}, comma-separated", "pass some of these")
    return [dense() if name == DENSE else ours(name) for name in backends.split(",")]


# Dense attention by torch, in the library's layout


def selected(selection: Selection, keys: Tensor) -> Tensor:
    """Return whether each row selects each of the keys [K], whatever its position: [B,S,G,K] bool."""
    found = torch.zeros(*selection.ranges.shape[:3], len(keys), dtype=torch.bool, device=keys.device)
    # Range after range: all at once would take n times the memory.
    for start, end in zip(*(x.unsqueeze(-1).unbind(-2) for x in selection.ranges.unbind(-1)), strict=True):
        found |= (keys >= start) & (keys < end)
    return found


def token_mask(selection: Selection, S_kv: int, dtype: torch.dtype = torch.bool) -> tuple[Tensor, Tensor]:
    """Return a selection as the mask of dense SDPA, which benches make outside of their timings.

    Args:
        selection: of B, S, G rows.
        S_kv: number of keys.
        dtype: torch.bool, or a float dtype for an additive mask, which saves SDPA the conversion in every call.

    Returns:
        The mask [B,G,S,S_kv], in which rows without selected keys see every key (a softmax over nothing is NaN), and
        whether each row selects a key, [B,S,G] bool.
    """
    key = torch.arange(S_kv, device=selection.ranges.device)
    mask = selected(selection, key) & (key <= key[S_kv - selection.ranges.shape[1] :, None, None])
    filled = mask.any(-1)
    mask = (mask | ~filled.unsqueeze(-1)).transpose(1, 2).contiguous()
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask, filled


def masked_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, filled: Tensor) -> Tensor:
    """Return o [B,S,G,h,Dv] by dense SDPA under a mask and for rows of `token_mask`. Rows that select nothing give zeros."""
    B, S, G, h, _ = q.shape
    # Groups as batches, so that one mask serves all heads: SDPA broadcasts it.
    heads = q.permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, h, -1, -1) for x in (k, v))
    o = scaled_dot_product_attention(heads, k, v, attn_mask=mask.flatten(0, 1).unsqueeze(1))
    return torch.where(filled[..., None, None], o.view(B, G, h, S, -1).permute(0, 3, 1, 2, 4), 0)


def dense_causal_sdpa(q: Tensor, k: Tensor, v: Tensor, kernel: DenseKernel = "cudnn") -> Tensor:
    """Return o [B,S,G,h,Dv] by full causal attention, in which row s attends to the keys up to S_kv - S + s.

    Args:
        q, k, v: [B,S,G,h,Dk], [B,G,S_kv,Dk], [B,G,S_kv,Dv]. Several groups of q may share those of k and v.
        kernel: the GPU kernel that must run, cuDNN's or Flash ("any": torch chooses). With 1 < S < S_kv torch chooses,
            because the mask is explicit: is_causal=True would count rows from the first key.
    """
    B, S, G, h, _ = q.shape
    S_kv = k.shape[2]
    mask = torch.ones(S, S_kv, dtype=torch.bool, device=q.device).tril(S_kv - S) if 1 < S < S_kv else None
    forced = q.device.type == "cuda" and mask is None and kernel != "any"
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": S == S_kv and S > 1, "enable_gqa": G * h > k.shape[1]}
    with sdpa_kernel(_KERNELS[kernel]) if forced else contextlib.nullcontext():
        o = scaled_dot_product_attention(q.permute(0, 2, 3, 1, 4).flatten(1, 2), k, v, **options)
    return o.view(B, G, h, S, v.shape[3]).permute(0, 3, 1, 2, 4)
