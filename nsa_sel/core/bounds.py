"""cu_seqlens of packed batches: checked bounds, and the positions of their rows and keys."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.core.arguments import check_dense
from nsa_sel.errors import ArgumentError, shown

CuSeqlens = Tensor | list[int] | tuple[int, ...]  # as users pass them
_DTYPES = (torch.int32, torch.int64)


class Bounds(NamedTuple):
    """Checked cu_seqlens: their numbers where the host may read them, else the tensor, and what the caller promised of it."""

    numbers: tuple[int, ...] | None
    tensor: Tensor | None
    most: int | None = None  # rows or keys of a sequence

    @classmethod
    def of(cls, name: str, bounds: CuSeqlens, total: int | None, like: Tensor, max_seqlen: int | None = None) -> Bounds:
        """Bounds from the argument `name` over `total` rows or keys (None: any number), none longer than max_seqlen, on like's device."""
        if isinstance(bounds, Tensor):
            check_dense(name, bounds)
            if bounds.dtype not in _DTYPES or bounds.dim() != 1:
                value = f"{bounds.dtype} of shape {tuple(bounds.shape)}"
                raise ArgumentError(name, value, "torch.int32 or torch.int64 [N+1]", "pass cumulative lengths that start at 0")
            if bounds.device != like.device and not bounds.is_cpu:
                raise ArgumentError(name, f"on {bounds.device}", f"q's device {like.device} or cpu", f"call {name}.to(q.device)")
            if bounds.numel() < 2:
                raise ArgumentError(name, f"of {bounds.numel()} entries", "N + 1 of them for N >= 1 sequences", "pass [0, T] for one")
            if not _readable(bounds):
                return cls(None, bounds, max_seqlen)
            numbers = tuple(bounds.tolist())
        elif isinstance(bounds, list | tuple) and len(bounds) > 1 and all(type(bound) is int for bound in bounds):
            numbers = tuple(bounds)
        else:
            value = shown(bounds) if isinstance(bounds, list | tuple) else f"a {type(bounds).__name__}"
            raise ArgumentError(name, value, "a tensor [N+1], or a list of N + 1 ints, N >= 1", "pass cumulative lengths that start at 0")
        drops = [i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1]]
        if numbers[0] != 0 or drops:
            value = f"{numbers[0]} first" if numbers[0] else f"{numbers[drops[0] - 1]}, then {numbers[drops[0]]} at {drops[0]}"
            raise ArgumentError(name, value, "0 first, then numbers that never decrease", "pass cumulative lengths that start at 0")
        if total is not None and numbers[-1] > total:
            of = "the keys" if name == "cu_seqlens_k" else "q's rows"
            raise ArgumentError(name, f"{numbers[-1]} last", f"at most {total}, the number of {of}", "pass the bounds of this batch")
        if max_seqlen is not None and _longest(numbers) > max_seqlen:
            remedy = "pass its rows, or leave it out: these bounds say it themselves"
            raise ArgumentError("max_seqlen", max_seqlen, f"at least {_longest(numbers)}, the longest sequence of {name}", remedy)
        return cls(numbers, None)

    @property
    def number(self) -> int:
        """N, the number of sequences."""
        return (len(self.numbers) if self.numbers is not None else self.tensor.numel()) - 1  # type: ignore[union-attr]

    def check_sequences(self, keys: Bounds) -> None:
        """ArgumentError unless these bounds of rows and those of keys are of as many sequences."""
        if keys.number != self.number:
            value = f"of {keys.number} sequences"
            raise ArgumentError("cu_seqlens_k", value, f"cu_seqlens_q's {self.number} sequences", "pass bounds of the same sequences")

    def as_tensor(self) -> Tensor:
        """[N+1], as given, or on the CPU."""
        return torch.tensor(self.numbers, device="cpu") if self.tensor is None else self.tensor

    def on(self, like: Tensor) -> Tensor:
        """[N+1] int64 on like's device, without waiting for it."""
        return self.as_tensor().to(like.device, torch.int64, non_blocking=True)

    def padding(self, like: Tensor, T: int) -> Tensor | None:
        """[T] bool on like's device, True for rows after the last sequence; None where the host knows that there are none."""
        if self.numbers is not None and self.numbers[-1] == T:
            return None
        return torch.arange(T, device=like.device) >= (self.on(like) if self.numbers is None else self.numbers)[-1]

    def zero_padding(self, x: Tensor) -> Tensor:
        """x [T,...] with zeros after the last sequence, where it may hold NaN."""
        padding = self.padding(x, len(x))
        return x if padding is None else x.masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), 0.0)

    def longest(self, total: int) -> int:
        """An upper bound on the keys of a sequence, rounded up to a power of two so that batches share decisions."""
        most = self.most if self.numbers is None else _longest(self.numbers)
        return total if most is None else min(total, 1 << max(0, most - 1).bit_length())


def _longest(numbers: tuple[int, ...]) -> int:
    return max(end - start for start, end in pairwise(numbers))


def _readable(bounds: Tensor) -> bool:
    """Whether the host may read the numbers: on a CPU, not fake, and not while torch.compile traces."""
    return bounds.is_cpu and type(bounds) is Tensor and not torch.compiler.is_compiling()


def whole_blocks(keys: int, block: int) -> int:
    """`keys` rounded up to a multiple of `block`."""
    return -(-keys // block) * block


def positions_in_sequences(cu_q: Tensor, cu_k: Tensor, T: int, begin: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """first, limit [1,T] int64: the first key of each row's sequence, and how many of that sequence's keys the row may see.

    begin [N or N+1]: the first key of each sequence, of `room` keys in all. Padding rows get first = room and limit = 0. Invalid bounds
    give keys that do not exist, which no backend reads.
    """
    row = torch.arange(T, device=cu_q.device)
    after = torch.searchsorted(cu_q, row, right=True)  # one past the row's sequence; skips empty ones
    padding = after == len(cu_q)
    after = after.clamp(1, len(cu_q) - 1)
    limit = (cu_k[after] - cu_k[after - 1] - (cu_q[after] - row) + 1).clamp(min=0).masked_fill(padding, 0)
    return begin[after - 1].masked_fill(padding, room).unsqueeze(0), limit.unsqueeze(0)


def row_positions(cu: Tensor, T: int) -> Tensor:
    """[1,T] int64: the position of each row in its own sequence, where rows are keys; -1 for padding."""
    return positions_in_sequences(cu, cu, T, cu, 0)[1] - 1


def compressed_bounds(cu: Tensor, compress_block: int, compress_stride: int) -> Tensor:
    """[N+1] int64: the first compressed key of each sequence, and their number. Sequences are compressed apart, one after the other."""
    keys = ((cu.diff() - compress_block) // compress_stride + 1).clamp(min=0)
    return torch.nn.functional.pad(keys.cumsum(0), (1, 0))


def begin_with_blocks(cu_k: Tensor, Tk: int, block: int, room: int) -> tuple[Tensor, Tensor]:
    """begin [N+1], index [Tk] int64: the first key of each sequence once all begin with a block, then that of the padding; and the new
    index of each key. Invalid bounds give indices below `room`, too."""
    begin = torch.nn.functional.pad((-(-cu_k.diff() // block) * block).cumsum(0), (1, 0)).clamp(0, room)
    key = torch.arange(Tk, device=cu_k.device)
    own = torch.searchsorted(cu_k, key, right=True).clamp(min=1) - 1
    return begin, (begin[own] + key - cu_k[own]).clamp(0, room - 1)


def starts_with_blocks(bounds: Bounds, block_size: int | None, promised: bool) -> bool:
    """Whether every non-empty sequence begins at a multiple of block_size, as read on the host or as promised."""
    if block_size is None or bounds.numbers is None:
        return block_size is not None and (promised or bounds.number == 1)
    unaligned = [start for start, end in zip(bounds.numbers, bounds.numbers[1:], strict=False) if end > start and start % block_size]
    if unaligned and promised:
        raise ArgumentError(
            "block_aligned", f"True, but a sequence's first key is {unaligned[0]}", f"multiples of block_size = {block_size}",
            "pad sequences to whole blocks, or leave block_aligned out",
        )  # fmt: skip
    return not unaligned
