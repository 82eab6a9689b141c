"""Check single arguments: tensors, flags, sizes, block indices, positions of rows, and cu_seqlens of packed batches."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.errors import ArgumentError, renamed, shown

_MEANING = {
    "n": "the number of blocks that a row selects",
    "block_size": "the number of keys in a block",
    "compress_block": "the number of keys that a compressed key covers",
    "compress_stride": "the number of keys from one compressed key to the next",
    "window": "the number of keys that a row attends to",
    "max_length": "the most keys that a row selects, or leave it out",
    "max_seqlen_q": "the most rows of a request, or leave it out",
}
_MOST = (1 << 31) - 1  # keys of a block, or of a row


def check_tensors(**tensors: object) -> None:
    """Raise ArgumentError for the first argument that is not a dense tensor."""
    for name, value in tensors.items():
        as_tensor(name, value)


def as_tensor(argument: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise ArgumentError(argument, f"a {type(value).__name__}", "a torch.Tensor", "wrap it in torch.as_tensor")
    check_dense(argument, value)
    return value


def check_dense(argument: str, value: Tensor) -> None:
    """Raise ArgumentError for a nested or sparse tensor, which may not even have a shape."""
    if value.is_nested or value.layout is not torch.strided:
        kind, remedy = f"of layout {value.layout}", f"call {argument}.to_dense()"
        if value.is_nested:
            kind, remedy = "a nested tensor", "pass its values() and offsets() to selection_attention_varlen"
        raise ArgumentError(argument, kind, "a dense (strided) tensor", remedy)


def check_flag(name: str, value: object) -> None:
    """Raise ArgumentError unless `value` is a bool."""
    if not isinstance(value, bool):
        raise ArgumentError(name, shown(value), "True or False", "pass a bool")


def is_whole(value: object) -> bool:
    """Return True for an int or a torch.SymInt (a size under torch.export with dynamic shapes), and False for a bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_positive(argument: str, value: object, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        meaning = _MEANING.get(argument, "such a size")
        raise ArgumentError(argument, shown(value), "a whole number >= 1 and < 2^31, as an int", f"pass {meaning}")


INDEX_DTYPES = (torch.int32, torch.int64)
_WIDE_BLOCK = 1 << 16  # keys: positions of larger blocks are computed in 64 bits


def checked_blocks(block_indices: Tensor, block_size: int, block_counts: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Indices [B,S,G,n], int32 or int64, and counts [B,S,G] from the arguments of `Selection.from_blocks`."""
    indices = as_tensor("block_indices", block_indices)
    if indices.dtype not in INDEX_DTYPES:
        if indices.dtype not in (torch.uint8, torch.int8, torch.int16):
            raise ArgumentError("block_indices", f"of dtype {indices.dtype}", "an integer dtype", "call .int() on it")
        indices = indices.int()
    indices = as_rows(indices, "block_indices", "[B,S,G,n], [B,G,n], or [T,G,n] with cu_seqlens_q", 4)
    check_positive("block_size", block_size)
    if block_counts is None:
        return indices, None
    counts = as_tensor("block_counts", block_counts)
    if counts.is_floating_point() or counts.is_complex():
        raise ArgumentError("block_counts", f"of dtype {counts.dtype}", "an integer dtype", "call .int() on it")
    counts = counts.unsqueeze(1) if counts.dim() == 2 else counts
    if counts.shape != indices.shape[:-1] or counts.device != indices.device:
        raise ArgumentError(
            "block_counts",
            f"of shape {tuple(counts.shape)} on {counts.device}",
            f"{tuple(indices.shape[:-1])} on {indices.device}",
            "one count per row of block_indices",
        )
    return indices, counts


def padded(indices: Tensor, counts: Tensor | None) -> Tensor:
    """Indices with -1 in place of the entries from `counts` on."""
    if counts is None:
        return indices
    return torch.where(torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1), indices, -1)


def whole_blocks(indices: Tensor, block_size: int) -> Tensor:
    """Ranges [...,n,2] of checked block indices [...,n], int32 or int64. Negative indices are padding and become [0,
    0)."""
    if block_size > _WIDE_BLOCK:
        indices = indices.long()
    # Few operations: each takes a small call's host as long as a kernel. No product overflows to a valid block.
    block = indices.clamp(-1, torch.iinfo(indices.dtype).max // block_size - 1)
    return torch.stack((block.clamp(min=0), block + 1), dim=-1) * block_size


def range_dtype(block_size: int) -> torch.dtype:
    """Return the dtype in which `whole_blocks` of int32 indices come."""
    return torch.int64 if block_size > _WIDE_BLOCK else torch.int32


def check_forced(first: int, local: int, n: int) -> None:
    """Raise ArgumentError unless n blocks have room for the first and the local last ones, which are always among them."""
    whole = all(isinstance(number, int) and not isinstance(number, bool) for number in (first, local))
    if not whole or first < 0 or local < 0 or first + local > n:
        raise ArgumentError(
            "first + local", f"{shown(first)} + {shown(local)}", f"whole numbers >= 0 and together at most n = {n}",
            "raise n: the first and the local last blocks are always among the n; or pass a smaller first= or local=",
        )  # fmt: skip


def as_rows(value: Tensor, argument: str, shapes: str, dims: int) -> Tensor:
    if value.dtype not in INDEX_DTYPES:
        raise ArgumentError(argument, f"of dtype {value.dtype}", "torch.int32 or torch.int64", "call .int() on it")
    if value.dim() == dims - 1:
        value = value.unsqueeze(1)
    if value.dim() != dims:
        raise ArgumentError(argument, f"of shape {tuple(value.shape)}", shapes, "add the missing axes")
    return value


def as_positions(q_pos: Tensor, B: int, S: int, device: torch.device) -> Tensor:
    if not isinstance(q_pos, Tensor):
        raise ArgumentError("q_pos", f"a {type(q_pos).__name__}", "a torch.Tensor [S] or [B,S]", "wrap it in torch.as_tensor")
    check_dense("q_pos", q_pos)
    if q_pos.dtype not in INDEX_DTYPES:
        raise ArgumentError("q_pos", f"of dtype {q_pos.dtype}", "torch.int32 or torch.int64", "call .int() on it")
    if q_pos.shape not in ((S,), (B, S)):
        raise ArgumentError("q_pos", f"of shape {tuple(q_pos.shape)}", f"[S={S}] or [B={B}, S={S}]", "one position per query row")
    if q_pos.device != device:
        raise ArgumentError("q_pos", f"on {q_pos.device}", f"q's device {device}", f"call q_pos.to({device.type!r})")
    return q_pos.expand(B, S)


CuSeqlens = Tensor | list[int] | tuple[int, ...]  # as users pass them


class Bounds(NamedTuple):
    """Checked cu_seqlens: their numbers where the host may read them, else the tensor, and what the caller promised of
    it."""

    numbers: tuple[int, ...] | None
    tensor: Tensor | None
    most: int | None = None  # rows or keys of a sequence

    @classmethod
    def of(cls, name: str, bounds: CuSeqlens, total: int | None, like: Tensor, max_seqlen: int | None = None) -> Bounds:
        """Bounds from the argument `name` over `total` rows or keys (None: any number), none longer than max_seqlen, on
        like's device."""
        if isinstance(bounds, Tensor):
            check_dense(name, bounds)
            if bounds.dtype not in INDEX_DTYPES or bounds.dim() != 1:
                raise ArgumentError(
                    name,
                    f"{bounds.dtype} of shape {tuple(bounds.shape)}",
                    "torch.int32 or torch.int64 [N+1]",
                    "pass cumulative lengths that start at 0",
                )
            if bounds.device != like.device and not bounds.is_cpu:
                raise ArgumentError(name, f"on {bounds.device}", f"q's device {like.device} or cpu", f"call {name}.to(q.device)")
            if bounds.numel() < 2:
                raise ArgumentError(name, f"of {bounds.numel()} entries", "N + 1 of them for N >= 1 sequences", "pass [0, T] for one")
            if not _readable(bounds):
                return cls(None, bounds, max_seqlen)
            numbers = tuple(bounds.tolist())
        elif isinstance(bounds, (list, tuple)) and len(bounds) > 1 and all(type(bound) is int for bound in bounds):
            numbers = tuple(bounds)
        else:
            raise ArgumentError(
                name,
                shown(bounds) if isinstance(bounds, (list, tuple)) else f"a {type(bounds).__name__}",
                "a tensor [N+1], or a list of N + 1 ints, N >= 1",
                "pass cumulative lengths that start at 0",
            )
        drops = [i for i in range(1, len(numbers)) if numbers[i] < numbers[i - 1]]
        if numbers[0] != 0 or drops:
            raise ArgumentError(
                name,
                f"{numbers[0]} first" if numbers[0] else f"{numbers[drops[0] - 1]}, then {numbers[drops[0]]} at {drops[0]}",
                "0 first, then numbers that never decrease",
                "pass cumulative lengths that start at 0",
            )
        if total is not None and numbers[-1] > total:
            of = "the keys" if name == "cu_seqlens_k" else "q's rows"
            raise ArgumentError(name, f"{numbers[-1]} last", f"at most {total}, the number of {of}", "pass the bounds of this batch")
        if max_seqlen is not None and _longest(numbers) > max_seqlen:
            raise ArgumentError(
                "max_seqlen",
                max_seqlen,
                f"at least {_longest(numbers)}, the longest sequence of {name}",
                "pass its rows, or leave it out: these bounds say it themselves",
            )
        return cls(numbers, None)

    def number(self) -> int:
        """Return N, the number of sequences. No property: torch.compile of torch 2.8 traces none of a NamedTuple."""
        return (len(self.numbers) if self.numbers is not None else self.tensor.numel()) - 1  # type: ignore[union-attr]

    def check_sequences(self, keys: Bounds) -> None:
        """Raise ArgumentError unless these bounds of rows and those of keys are of as many sequences."""
        if keys.number() != self.number():
            raise ArgumentError(
                "cu_seqlens_k",
                f"of {keys.number()} sequences",
                f"cu_seqlens_q's {self.number()} sequences",
                "pass bounds of the same sequences",
            )

    def as_tensor(self) -> Tensor:
        """Return [N+1], as given, or on the CPU."""
        return torch.tensor(self.numbers, device="cpu") if self.tensor is None else self.tensor

    def on(self, like: Tensor) -> Tensor:
        """Return [N+1] int64 on like's device, without waiting for it."""
        return self.as_tensor().to(like.device, torch.int64, non_blocking=True)

    def padding(self, like: Tensor, T: int) -> Tensor | None:
        """Return [T] bool on like's device, True for rows after the last sequence; None where the host knows that there
        are none."""
        if self.numbers is not None and self.numbers[-1] == T:
            return None
        return torch.arange(T, device=like.device) >= (self.on(like) if self.numbers is None else self.numbers)[-1]

    def zero_padding(self, x: Tensor) -> Tensor:
        """Return x [T,...] with zeros after the last sequence, where it may hold NaN."""
        padding = self.padding(x, len(x))
        return x if padding is None else x.masked_fill(padding.view(-1, *[1] * (x.dim() - 1)), 0.0)

    def longest(self, total: int) -> int:
        """Return an upper bound on the keys of a sequence, rounded up to a power of two so that batches share
        decisions."""
        most = self.most if self.numbers is None else _longest(self.numbers)
        return total if most is None else min(total, 1 << max(0, most - 1).bit_length())


def _longest(numbers: tuple[int, ...]) -> int:
    return max(end - start for start, end in pairwise(numbers))


def _readable(bounds: Tensor) -> bool:
    """Return True if the host may read the numbers: on a CPU, not fake, and not while torch.compile traces."""
    return bounds.is_cpu and type(bounds) is Tensor and not torch.compiler.is_compiling()


class Requests(NamedTuple):
    """Requests whose rows follow one another: request r has the rows [cu[r], cu[r+1]), the last ones of its keys; later
    rows are padding."""

    cu: Tensor  # [R+1] int32, contiguous, on q's device
    most: int  # rows of a request
    numbers: tuple[int, ...] | None  # of cu, where the host may read them

    @classmethod
    def of(cls, q: Tensor, cu_seqlens_q: CuSeqlens, max_seqlen_q: int | None, cache_seqlens: Tensor) -> Requests:
        """Return the requests of q [T,...] over caches of cache_seqlens [R] keys. Never waits for a GPU.

        Raises:
            ArgumentError: bad arguments; numbers on a GPU are not checked.
        """
        check_positive("max_seqlen_q", max_seqlen_q, optional=True)
        try:
            bounds = Bounds.of("cu_seqlens_q", cu_seqlens_q, len(q), q, max_seqlen_q)
        except ArgumentError as error:
            raise renamed(error, max_seqlen="max_seqlen_q") from None
        if cache_seqlens.shape != (bounds.number(),):
            raise ArgumentError(
                "cu_seqlens_q",
                f"of {bounds.number()} requests",
                f"R + 1 entries for cache_seqlens [R] of shape {tuple(cache_seqlens.shape)}",
                "pass one length per request, and where its rows begin",
            )
        most = max_seqlen_q if bounds.numbers is None else _longest(bounds.numbers)
        cu = bounds.as_tensor().to(q.device, torch.int32, non_blocking=True).contiguous()
        return cls(cu, len(q) if most is None else min(most, len(q)), bounds.numbers)

    @property
    def number(self) -> int:
        """R, the number of requests."""
        return len(self.cu) - 1

    def rows(self, lengths: Tensor, T: int) -> tuple[Tensor, Tensor]:
        """Return request and position, [T] int64, of each of T rows over caches of lengths [R] keys: request 0 and
        position -1 for padding; a position is negative where a request has more rows than keys."""
        row, cu = torch.arange(T, device=self.cu.device), self.cu.long()
        request = torch.searchsorted(cu, row, right=True) - 1  # skips requests without rows
        padding = request == self.number
        request = request.masked_fill(padding, 0)
        return request, (lengths.long()[request] - cu[request + 1] + row).masked_fill(padding, -1)

    def spans(self) -> list[tuple[int, int]]:
        """Return the first row of each request, and the one after its last; waits for a GPU whose numbers the host does
        not know."""
        return list(pairwise(self.cu.tolist() if self.numbers is None else self.numbers))


def rounded_up(keys: int, block: int) -> int:
    """`keys` rounded up to a multiple of `block`."""
    return -(-keys // block) * block


def positions_in_sequences(cu_q: Tensor, cu_k: Tensor, T: int, begin: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return first, limit [1,T] int64: the first key of each row's sequence, and how many of that sequence's keys the
    row may see.

    begin [N or N+1]: the first key of each sequence, of `room` keys in all. Padding rows get first = room and limit =
    0. Invalid bounds give keys that do not exist, which no backend reads.
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
    """Return [N+1] int64: the first compressed key of each sequence, and their number.

    Each sequence is compressed on its own, and the compressed keys follow one another.
    """
    keys = ((cu.diff() - compress_block) // compress_stride + 1).clamp(min=0)
    return torch.nn.functional.pad(keys.cumsum(0), (1, 0))


def begin_with_blocks(cu_k: Tensor, Tk: int, block: int, room: int) -> tuple[Tensor, Tensor]:
    """Return begin [N+1] and index [Tk], int64, for a copy in which every sequence begins with a block.

    begin: the first key of each sequence, then that of the padding. index: the new index of each key; below `room` for
    invalid bounds, too.
    """
    begin = torch.nn.functional.pad((-(-cu_k.diff() // block) * block).cumsum(0), (1, 0)).clamp(0, room)
    key = torch.arange(Tk, device=cu_k.device)
    own = torch.searchsorted(cu_k, key, right=True).clamp(min=1) - 1
    return begin, (begin[own] + key - cu_k[own]).clamp(0, room - 1)


def starts_with_blocks(bounds: Bounds, block_size: int | None, promised: bool) -> bool:
    """Return True if every non-empty sequence begins at a multiple of block_size, as read on the host or as promised."""
    if block_size is None or bounds.numbers is None:
        return block_size is not None and (promised or bounds.number() == 1)
    unaligned = [start for start, end in zip(bounds.numbers, bounds.numbers[1:], strict=False) if end > start and start % block_size]
    if unaligned and promised:
        raise ArgumentError(
            "block_aligned", f"True, but a sequence's first key is {unaligned[0]}", f"multiples of block_size = {block_size}",
            "pad sequences to whole blocks, or leave block_aligned out",
        )  # fmt: skip
    return not unaligned
