"""A step of a cache: new tokens of some sequences, passed to every layer of a model.

Each `NSAttention` layer appends the keys and values of the new tokens to its pages, compresses the pieces that they
complete (with few kernels on a GPU, in plain PyTorch elsewhere) and attends. A few new tokens attend by the kernels
that read pages, one row at a time. Many new tokens of sequences of one length attend by the prefill kernels, which
share loads between rows, after the keys were gathered from their pages into contiguous tensors.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa_sel.attention import selection_attention
from nsa_sel.caching.pools import CacheScales, Pools, dequantized, joined
from nsa_sel.caching.step_tensors import StepSizes, StepTensors
from nsa_sel.choosing import choose_blocks, compressed_attention
from nsa_sel.compression import BlockMLP
from nsa_sel.core import transforms
from nsa_sel.core.call import PagedKeys, Rule
from nsa_sel.core.choose import over_pages
from nsa_sel.core.transforms import hooked
from nsa_sel.errors import ArgumentError
from nsa_sel.gating import gated_sum, sum_of_tokens
from nsa_sel.projection import Parts
from nsa_sel.quantize import STORED, as_bytes, stored
from nsa_sel.selection import Selection
from nsa_sel.serving import choose_blocks_with_kvcache, selection_attention_with_kvcache
from nsa_sel.window import sliding_window_attention

CACHE_KERNELS = "nsa_sel.backends._triton.cache"  # imported at the first step on a GPU
MAX_COMPRESSED = 4  # most new compressed keys per sequence for which the kernels run; each reads its own keys
MAX_SLOTS = 1 << 16  # most new compressed keys of a step for the kernels, which index in 32 bits

Compress = Callable[[Tensor], Tensor]


class PrefillLengths(NamedTuple):
    """The common lengths of sequences of one length."""

    keys: int
    recent_keys: int  # keys in the pages of recent keys


class CacheStep:
    """New tokens of some sequences of an `NSACache`, made by `NSACache.step`. Pass step[i] to layer i: `layer(x,
    cache=step[i])`.

    Every layer must run once with the step, in any order, before the cache's next step. The new tokens of a sequence
    are the last of its S rows of x: with 3 tokens in 4 rows, row 0 has no token. Rows without a token may hold
    anything; their output is 0 (or the output projection's bias).

    Attributes:
        positions: [B,S] int64 on the device, position of each row in its sequence. 0 for rows without a token.
        is_token: [B,S] bool on the device, False for rows without a token.
        lengths: [B] int32 on the device, keys of each sequence, including the new ones.
        sizes, pools, tensors, memory, prefill_lengths, scales: internal; read by the layers and the cache.
    """

    def __init__(
        self, sizes: StepSizes, pools: Pools, tensors: StepTensors, memory: Tensor,
        prefill_lengths: PrefillLengths | None, scales: CacheScales | None,
    ) -> None:  # fmt: skip
        self.sizes, self.pools, self.tensors, self.scales = sizes, pools, tensors, scales
        self.memory = memory  # the buffer of `tensors`
        self.prefill_lengths = prefill_lengths
        self.positions: Tensor = tensors.position
        self.is_token: Tensor = tensors.is_token
        self.lengths: Tensor = tensors.lengths

    def __len__(self) -> int:
        """Return the number of layers of the cache."""
        return len(self.pools.k)

    def __iter__(self) -> Iterator[LayerStep]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, layer: int) -> LayerStep:
        """Return the step for one layer, its argument `cache`."""
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(self):
            raise ArgumentError("layer", repr(layer), f"0 to {len(self) - 1}, the layers of the cache", "make the cache with more layers")
        scales = None if self.scales is None else self.scales.layer(layer)
        return LayerStep(self.sizes, self.pools.layer(layer), self.tensors, self.prefill_lengths, scales)


class LayerStep(NamedTuple):
    """A `CacheStep` for one layer."""

    sizes: StepSizes
    pools: Pools
    tensors: StepTensors
    prefill_lengths: PrefillLengths | None  # None: decode kernels; else attend as a prefill of sequences of one length
    scales: CacheScales | None  # of e4m3 pages

    def attend(self, new: Parts, by: tuple[Compress, Compress], rule: Rule, backend: str | None) -> Tensor:
        """Append the keys and values of the new tokens, extend the compressed keys, and attend.

        Args:
            new: projections of the new tokens.
            by: the layer's compression of keys and of values.
            rule, backend: the layer's.

        Returns:
            o [B,S,G,h,Dv], 0 for rows without a token.

        Raises:
            ArgumentError: sizes, dtypes or devices differ from the cache's, or gradients are needed.
        """
        self._check(new, (("keys", new.k_cmp, self.pools.k_raw), ("values", new.v_cmp, self.pools.v_raw)))
        if self.prefill_lengths is not None:
            self.extend(new, by)
            return gated_sum(*self.prefill(new.q, new.q_cmp, rule, backend, self.prefill_lengths), new.gates)

        def append_and_attend_window() -> Tensor:
            append(self.pools, self.tensors, new.keys(), self.scales)
            return self.attend_window(new.q)

        side = SideStream(new.q)  # neither compressing nor choosing depends on the window
        window = side.run(append_and_attend_window)
        self._compress(new, by, side.join)
        compressed, blocks = self.choose(new.q_cmp, rule)
        side.join()
        return sum_of_tokens((compressed, self.attend_selected(new.q, blocks, backend), window), new.gates, self.tensors.is_token)

    def attend_indexed(
        self, q: Tensor, k: Tensor, v: Tensor, index_q: Tensor, index_k: Tensor, rule: dict[str, Any], backend: str | None
    ) -> Tensor:
        """Append the keys of the new tokens of an `MSAttention` layer, choose blocks by their index keys, and attend.

        Args:
            q, index_q: [B,S,G,h,D] and [B,S,G,1,Di].
            k, v, index_k: [B,S,G,D] and [B,S,1,Di], of the new tokens.
            rule: options of `choose_blocks`.
            backend: the layer's.

        Returns:
            o [B,S,G,h,D], 0 for rows without a token.

        Raises:
            ArgumentError: as `attend`.
        """
        pools, tensors = self.pools[:3], self.tensors
        self._check((q, k, v), zip(("keys", "values", "index keys"), (k, v, index_k), pools, strict=True))
        append(self.pools, tensors, (index_k, None, k, v, None, None), self.scales)
        if self.prefill_lengths is None:
            blocks = choose_blocks_with_kvcache(index_q, pools[2], tensors.lengths, tensors.table, **rule)
            o = self.attend_selected(q, blocks, backend)
            return o.masked_fill_(~tensors.is_token[..., None, None, None], 0)
        pages, S_kv = PagedKeys(tensors.table, 0), self.prefill_lengths.keys
        (index_keys,) = gathered(pools[2:], None, pages, S_kv, q.dtype)
        k, v = self.gathered_rows(S_kv, q.dtype)
        return selection_attention(q, k, v, choose_blocks(index_q, index_keys, **rule), backend=backend)

    def extend(self, new: Parts, by: tuple[Compress, Compress]) -> None:
        """Append keys and values, and write the compressed keys whose last key is new."""
        append(self.pools, self.tensors, new.keys(), self.scales)
        self._compress(new, by, lambda: None)

    def _compress(self, new: Parts, by: tuple[Compress, Compress], appended: Callable[[], None]) -> None:
        compress(self.pools, self.tensors, (new.k_cmp, new.v_cmp), by, self.sizes.compress_stride, appended)

    def prefill(
        self, q: Tensor, q_cmp: Tensor, rule: Rule, backend: str | None, lengths: PrefillLengths
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the compressed, selected and window branches [B,S,G,h,Dv] of the last rows of sequences of one length.

        q and q_cmp [B,S,G,h,Dk] are the queries with and without rotary positions. Keys of quantized pages are converted
        to q's dtype, so results do not depend on how a prompt is chunked.
        """

        tensors, scales, S_kv = self.tensors, self.scales, lengths.keys
        pieces = PagedKeys(tensors.table, self.sizes.covered_pieces - 1)
        k, v = gathered(self.pools[2:4], None, pieces, rule.compressed_keys(S_kv), q.dtype)
        o_cmp, blocks = compressed_attention(q_cmp, k, v, **rule.options(), S_kv=S_kv)
        k, v = self.gathered_rows(S_kv, q.dtype)
        o_slc = selection_attention(q, k, v, blocks, backend=backend)
        k, v = gathered(self.pools[4:6], scales and scales[2:], PagedKeys(tensors.recent_table, 0), lengths.recent_keys, q.dtype)
        return o_cmp, o_slc, sliding_window_attention(q, k, v, self.sizes.window)

    def gathered_rows(self, S_kv: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the first S_kv keys [B,G,S_kv,Dk] and values [B,G,S_kv,Dv] of the selected branch in `dtype`."""
        k, v = self.pools[:2]
        (rows,) = gathered((joined(k, v),), None, PagedKeys(self.tensors.table, 0), S_kv, dtype)
        keys = rows[..., : k.shape[3]], rows[..., k.shape[3] :]
        return [*keys] if self.scales is None else [dequantized(x, scale, dtype) for x, scale in zip(keys, self.scales[:2], strict=True)]

    def choose(self, q: Tensor, rule: Rule) -> tuple[Tensor, Selection]:
        """Return the compressed branch [B,S,G,h,Dv] of q [B,S,G,h,Dk], and the blocks that it chooses."""
        pages = PagedKeys(self.tensors.table, self.sizes.covered_pieces - 1)
        k, v = (x.transpose(1, 2) for x in self.pools[2:4])
        o, _, ranges = over_pages(q, k, v, pages, rule, self.sizes.table_pages * self.sizes.page_size, self.tensors.position)
        return o, Selection.from_ranges(ranges, rule.block_size, disjoint=True)

    def attend_selected(self, q: Tensor, blocks: Selection, backend: str | None) -> Tensor:
        """Return the selected branch [B,S,G,h,Dv]."""
        k_scale, v_scale = (None, None) if self.scales is None else self.scales[:2]
        return selection_attention_with_kvcache(
            q, self.pools.k, self.pools.v, blocks, self.tensors.lengths, self.tensors.table, k_scale=k_scale, v_scale=v_scale,
            backend=backend,
        )  # fmt: skip

    def attend_window(self, q: Tensor) -> Tensor:
        """Return the window branch [B,S,G,h,Dv]: each row attends to one range of the recent keys."""
        selection = Selection(self.tensors.window_ranges[:, :, None, None], None, self.sizes.window, disjoint=True)
        k_scale, v_scale = (None, None) if self.scales is None else self.scales[2:]
        return selection_attention_with_kvcache(
            q, self.pools.k_win, self.pools.v_win, selection, self.tensors.recent_lengths, self.tensors.recent_table, k_scale=k_scale,
            v_scale=v_scale,
        )  # fmt: skip

    def _check(self, new: Iterable[Tensor], pairs: Iterable[tuple[str, Tensor, Tensor]]) -> None:
        """Raise ArgumentError if one of the projections needs gradients, or one of the pairs of name, new keys and their pool
        does not fit together."""
        if any(x.requires_grad for x in new):
            raise ArgumentError(
                "x",
                "a tensor that requires gradients, or of a layer that does",
                "none with a cache",
                "call the model under torch.no_grad() or torch.inference_mode()",
            )
        for name, mine, cached in pairs:
            if cached.dtype not in (mine.dtype, STORED):
                raise ArgumentError(
                    "cache",
                    f"of {cached.dtype}",
                    f"{mine.dtype}, the dtype of the layer's {name}",
                    f"make it with dtype={mine.dtype}: by default NSACache has bfloat16, NSACache.of the dtype of the layers' parameters",
                )
            layer_sizes, cache_sizes = ((x.device, *x.shape[-2:]) for x in (mine, cached))
            if layer_sizes != cache_sizes:
                value, allowed = (f"of {G} groups of {name} of {D} numbers on {device}" for device, G, D in (cache_sizes, layer_sizes))
                raise ArgumentError("cache", value, f"as the layer: {allowed}", "make it by NSACache.of(layers, ...)")


def check_step(step: object, x: Tensor, compression: tuple[int, int], window: int, **given: bool) -> None:
    """Raise ArgumentError unless `step` is a `LayerStep` that fits hidden states x [B,S,width] and a layer with these sizes.

    compression: compress_block and compress_stride; given: other arguments by name, none of which may be given.
    """
    if not isinstance(step, LayerStep):
        remedy = "pass step[i] of step = cache.step(...), i being the layer's number in the model"
        raise ArgumentError("cache", f"a {type(step).__name__}", "a step of an NSACache, for this layer", remedy)
    transforms.check_traced("a layer with a cache", x, compiles=False)
    for name in (name for name, is_given in given.items() if is_given):
        remedy = f"go without {name}: x has the rows [B,S] of the step, where shorter sequences have rows without a token"
        raise ArgumentError("cache", f"given with {name}", f"no {name} with a cache", remedy)
    rows = step.tensors.position.shape
    if x.shape[:2] != rows:
        raise ArgumentError(
            "x",
            f"of shape {tuple(x.shape)}",
            f"[B={rows[0]}, S={rows[1]}, width], the rows of the cache's step",
            "pass one row per token of the step, the last rows of each sequence",
        )
    sizes = step.sizes
    for name, mine, theirs in (
        ("compress_block", compression[0], sizes.compress_block),
        ("compress_stride", compression[1], sizes.compress_stride),
        ("window", window, sizes.window),
    ):
        if mine != theirs:
            raise ArgumentError("cache", f"of {name} = {theirs}", f"the layer's {name} = {mine}", "make it by NSACache.of(layers, ...)")


class SideStream:
    """A parallel branch of the CUDA graph that is being captured; without a capture, work runs inline.

    Eager steps of few tokens are bound by host launch time, which a second stream would only increase.

    Args:
        like: a tensor of the step.
    """

    def __init__(self, like: Tensor) -> None:
        self._main = torch.cuda.current_stream(like.device) if transforms.capturing(like) else None

    def run(self, work: Callable[[], Tensor]) -> Tensor:
        """Return the result of `work`. Do not use it before `join`, and keep the inputs of `work` alive until then."""
        if self._main is None:
            return work()
        side = _side_stream(self._main.device)
        side.wait_stream(self._main)
        with torch.cuda.stream(side):
            result = work()
        result.record_stream(self._main)
        return result

    def join(self) -> None:
        """Make the current stream wait for the branch."""
        if self._main is not None:
            self._main.wait_stream(_side_stream(self._main.device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call, no-any-return]


def gathered(
    pools: tuple[Tensor, ...], scales: tuple[Tensor, ...] | None, pages: PagedKeys, count: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return the first `count` keys [B,G,count,D] of each pool in pages; with scales those of e4m3 pools in `dtype`."""
    keys = [pages.gathered(as_bytes(x).transpose(1, 2))[:, :, :count].view(x.dtype) for x in pools]
    return keys if scales is None else [dequantized(x, scale, dtype) for x, scale in zip(keys, scales, strict=True)]


def append(pools: Pools, tensors: StepTensors, keys: tuple[Tensor | None, ...], scales: CacheScales | None = None) -> None:
    """Write the keys and values of new tokens to a layer's pages.

    Args:
        pools: the layer's pages.
        tensors: of the step.
        keys: k_cmp, v_cmp (not yet compressed), k_slc, v_slc, k_win, v_win, each [B,S,G,D]; of an `MSAttention` layer index
            keys, None, k, v, None, None.
        scales: with scales, the last four are quantized to e4m3.
    """
    first, last_slot = (pools.k_raw, tensors.recent_slot) if keys[1] is not None else (pools.k_cmp, tensors.slot)
    to = first, pools.v_raw, pools.k, pools.v, pools.k_win, pools.v_win
    if pools.k.is_cuda:
        importlib.import_module(CACHE_KERNELS).append(keys, to, tensors.slot, last_slot, scales)
        return
    slots, of_keys = (last_slot,) * 2 + (tensors.slot,) * 2 + (last_slot,) * 2, (None, None, *(scales or (None,) * 4))
    for x, slot, y, scale in zip(to, slots, keys, of_keys, strict=True):
        if y is not None:
            put(x, slot, y if scale is None else stored(y, scale[:, None]))


def compress(
    pools: Pools, tensors: StepTensors, new: tuple[Tensor, Tensor], by: tuple[Compress, Compress], stride: int, appended: Callable[[], None]
) -> None:  # fmt: skip
    """Write the compressed keys and values whose last key is new.

    Args:
        pools, tensors: a layer's pages, and the tensors of the step.
        new: k_cmp and v_cmp [B,S,G,D] of new tokens, not compressed.
        by: the layer's compression of keys and of values.
        stride: compress_stride.
        appended: waits until the new tokens are in their pages. The kernels read `new` instead and do not call it.
    """
    raws, to = (pools.k_raw, pools.v_raw), (pools.k_cmp, pools.v_cmp)
    k_weights, v_weights = (_weights(work, raws[0]) for work in by)
    few = tensors.compressed_slot.shape[1] <= MAX_COMPRESSED and tensors.compressed_slot.numel() <= MAX_SLOTS
    if raws[0].is_cuda and few and k_weights is not None and v_weights is not None:
        importlib.import_module(CACHE_KERNELS).compress(
            raws, new, tensors.covered, tensors.first_new, tensors.compressed_slot, k_weights, v_weights, to, stride
        )
        return
    appended()
    for raw, x, work in zip(raws, to, by, strict=True):
        put(x, tensors.compressed_slot, work(covered(raw, tensors)).transpose(1, 2))


def covered(raw: Tensor, tensors: StepTensors) -> Tensor:
    """Return the keys or values [B,N,G,D] from which new compressed ones are made, N as of `StepTensors.covered`."""
    return raw.flatten(0, 1).index_select(0, tensors.covered.flatten()).view(*tensors.covered.shape, *raw.shape[2:])


def put(x: Tensor, slots: Tensor, y: Tensor) -> None:
    """Write y [B,N,G,D] to slots [B,N] of pages x [pages,page_size,G,D]."""
    if x.is_contiguous():
        as_bytes(x).flatten(0, 1).index_copy_(0, slots.flatten(), as_bytes(y).flatten(0, 1))
    else:  # k and v
        as_bytes(x)[slots // x.shape[1], slots % x.shape[1]] = as_bytes(y)


def _weights(work: Compress, raw: Tensor) -> tuple[Any, ...] | None:
    """Return the weights of a compression for the kernels, or None if they do not support its module, hooks, dtype or
    tensor types."""
    if type(work) is not BlockMLP or hooked(work) or not work.is_plain():
        return None
    weights = work.weights()
    supported = all(x is None or (type(x) in (Tensor, nn.Parameter) and x.dtype == raw.dtype and x.is_contiguous()) for x in weights)
    return weights if supported and raw.dtype != torch.float64 else None
