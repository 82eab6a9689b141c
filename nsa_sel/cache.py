"""`NSACache`: keys and values of many sequences in pages, for a model of `NSAttention` layers that prefills and decodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nsa_sel.attention_layer import NSAttention
from nsa_sel.caching import numbers, prefill, quantized
from nsa_sel.caching.numbers import Numbers, Sizes
from nsa_sel.caching.pages import Pages
from nsa_sel.caching.pools import Pools
from nsa_sel.caching.sequences import Copies
from nsa_sel.caching.sequences import Sequence as Cached
from nsa_sel.caching.step import CacheStep
from nsa_sel.core.arguments import check_positive
from nsa_sel.core.call import DTYPES
from nsa_sel.core.check import check_compression
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.quantize import STORED

KVScales = Mapping[str, torch.Tensor | float]
_ROOM_STEPS = 8  # sizes of tables per power of two: with few of them, calls repeat


class NSACache:
    """The cache of a model's `NSAttention` layers. Prefill, prefill in chunks, decoding and verifying drafted tokens are one call:

        a = cache.open()
        step = cache.step([a, b], tokens=[3, 1])
        for i, layer in enumerate(layers):
            x = x + layer(norm(x), cache=step[i])  # [B,S,width]; the new tokens of a sequence are its last rows

    Pages of all keys hold the selected branch's K and V, and the compressed keys that end in them. Other pages hold the last keys alone:
    the window's, and those that a compressed key still needs; the next step of a sequence gives back those that its rows do not see.
    Sequences may share pages: a shared page that would be written is copied first. Device work is stream-ordered, so that all steps must
    run on one stream. Not thread-safe.

    Args:
        layers: how many layers the model has.
        pages: of page_size keys each, for all sequences together, in every layer.
        page_size: a multiple of compress_stride.
        groups: G, KV groups; with tensor parallelism those of this rank.
        head_dim, value_dim: Dk and Dv; by default Dv = Dk.
        compress_block, compress_stride, window: the layers'.
        window_pages: pages for the last keys of all sequences; by default as many as `pages`, which never run out first. A sequence
            holds (max(window, compress_block) + S - 2) // page_size + 2 of them at most, with S rows in its longest step.
        dtype: float16, bfloat16, float32 or float64: that of the layers' projections (under torch.autocast its dtype).
        kv_dtype: of K and V of the selected branch and of the window: dtype, the default, or float8_e4m3fn, which has half the bytes of
            bfloat16. Layers then attend to what is stored, in prefill as in decoding. Compressed keys, and keys before they are
            compressed, stay in dtype. Not for float64, nor GPUs below SM 8.9.
        kv_scales: with float8_e4m3fn: factors of stored numbers, key = stored * scale, by the names of pools: "k" and "v" of the selected
            branch, "k_win" and "v_win" of the window; 1 for those left out. A positive number, or float32 of one element, [layers], or
            [layers,G]; with dtype float16 at most 65504 / 448. Numbers beyond 448 * scale are stored as that; NaN stays NaN.
        device: by default the current one.

    Attributes:
        pools: its memory on the device, `nsa_sel.caching.pools.Pools` [layers, ...].
        sizes: pages and compression, `nsa_sel.caching.numbers.Sizes`.
        scales: of pools in e4m3, `nsa_sel.caching.quantized.Scales` [layers,G]; else None.

    Raises:
        ArgumentError: sizes that do not fit together, other dtypes or scales, or a GPU that has no e4m3.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        groups: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        compress_block: int = 32,
        compress_stride: int = 16,
        window: int = 512,
        window_pages: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        kv_scales: KVScales | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        window_pages = pages if window_pages is None else window_pages
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "groups": groups, "head_dim": head_dim, "value_dim": value_dim}
        for name, size in {**sizes, "window_pages": window_pages}.items():
            check_positive(name, size)
        check_positive("window", window)
        check_compression(compress_block, compress_stride)
        if page_size % compress_stride:
            allowed = f"a multiple of compress_stride = {compress_stride}"
            raise ArgumentError("page_size", page_size, allowed, "pass one: a page holds the compressed keys that end in it")
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise ArgumentError("dtype", shown(dtype), ", ".join(DTYPES.values()), "pass the dtype of the layers' projections")
        self.device = torch.empty(0, device=device).device
        self.sizes = Sizes(0, 0, 0, pages, window_pages, page_size, compress_block, compress_stride, window)
        self._pages, self._window_pages = Pages("pages", pages), Pages("window_pages", window_pages)
        self.scales = quantized.scales_of(kv_dtype, kv_scales, dtype, layers, groups, self.device)
        attended = dtype if self.scales is None else STORED
        self.pools = Pools.make(layers, self.sizes, groups, (head_dim, value_dim), dtype, attended, self.device)
        self._sequences: dict[int, Cached] = {}
        self._opened = 0

    @classmethod
    def of(
        cls, model_layers: Iterable[NSAttention], pages: int, page_size: int, *, window_pages: int | None = None,
        dtype: torch.dtype | None = None, kv_dtype: torch.dtype | None = None, kv_scales: KVScales | None = None,
    ) -> NSACache:  # fmt: skip
        """A cache for these layers, in their order.

        Args:
            model_layers: layers of the same sizes on one device.
            pages, page_size, window_pages, kv_dtype, kv_scales: as of `NSACache`.
            dtype: by default that of the layers' parameters; pass autocast's if the model runs under torch.autocast.

        Returns:
            The cache, on the layers' device.

        Raises:
            ArgumentError: no layers, or layers of several sizes.
        """
        try:
            layers = list(model_layers)
            kinds = {(x.groups, x.head_dim, x.value_dim, *x.rule[:2], x.window, x.kv.weight.dtype, x.kv.weight.device) for x in layers}
        except (TypeError, AttributeError) as error:  # not by their type: wrappers of layers show what these have
            value, remedy = f"a {type(model_layers).__name__} ({error})", "pass [block.attention for block in model.blocks], or the like"
            raise ArgumentError("model_layers", value, "a list of NSAttention layers", remedy) from error
        if len(kinds) != 1:
            value = f"{len(layers)} layers of {len(kinds)} kinds"
            allowed = "layers of one number of groups, head dimensions, compression, window, dtype and device"
            raise ArgumentError("model_layers", value, allowed, "make one cache for each kind")
        groups, head_dim, value_dim, block, stride, window, own, device = kinds.pop()
        return cls(
            len(layers), pages, page_size, groups, head_dim, value_dim, compress_block=block, compress_stride=stride, window=window,
            window_pages=window_pages, dtype=own if dtype is None else dtype, kv_dtype=kv_dtype, kv_scales=kv_scales, device=device,
        )  # fmt: skip

    @property
    def free_pages(self) -> int:
        """How many of `pages` no sequence holds."""
        return self._pages.free

    @property
    def free_window_pages(self) -> int:
        """How many of `window_pages` no sequence holds."""
        return self._window_pages.free

    def held_pages(self, sequences: Iterable[int]) -> int:
        """How many of `pages` these sequences hold together; a page that some of them share counts once.

        Args:
            sequences: their numbers.

        Returns:
            The number of pages.

        Raises:
            ArgumentError: no number of an open sequence.
        """
        return len({page for sequence in sequences for page in self._of(sequence).all.held().tolist()})

    def open(self) -> int:
        """A new sequence without keys.

        Returns:
            Its number, which names it until it is freed.
        """
        return self._add(Cached(self._pages, self._window_pages, self.sizes.page_size, self.sizes.last_keys))

    def fork(self, sequence: int) -> int:
        """A new sequence with the keys of another, whose pages they share until one of them writes to one.

        Args:
            sequence: the other's number.

        Returns:
            The new one's number.

        Raises:
            ArgumentError: no number of an open sequence.
        """
        return self._add(self._of(sequence).fork())

    def free(self, sequence: int) -> None:
        """Give back all pages of a sequence; its number names nothing any more.

        Args:
            sequence: its number.

        Raises:
            ArgumentError: no number of an open sequence.
        """
        self._of(sequence).cut(0)
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        """How many keys a sequence has.

        Args:
            sequence: its number.

        Returns:
            The number of keys.

        Raises:
            ArgumentError: no number of an open sequence.
        """
        return self._of(sequence).length

    def truncate(self, sequence: int, length: int) -> None:
        """Drop the keys from `length` on, for example of drafted tokens that were not accepted.

        Args:
            sequence: its number.
            length: what it had before its last step, or more; less only while pages of the window before it are held, or 0.

        Raises:
            ArgumentError: another length.
        """
        found = self._of(sequence)
        least = found.shortest()
        if not isinstance(length, int) or isinstance(length, bool) or (length and not least <= length <= found.length) or length < 0:
            remedy = "keep a fork of the shorter sequence, or prefill another one: the window's keys before it are given back"
            raise ArgumentError("length", shown(length), f"0, or {least} to {found.length}", remedy)
        found.cut(length)

    def step(
        self, sequences: Sequence[int], tokens: int | Sequence[int] = 1, *, room: int | None = None, into: CacheStep | None = None
    ) -> CacheStep:
        """Make room for new tokens of some sequences, and say where their keys go. Every layer must then run with the step.

        Nothing waits for a GPU. A step whose device work was captured in a CUDA graph is passed as `into`: its tensors are written in
        place, and the graph is replayed with them.

        Args:
            sequences: [B] numbers, each once.
            tokens: new ones of each sequence, or one number for all. x has as many rows for every sequence as the most of them, S; new
                tokens are the last rows of a sequence, those before have none.
            room: keys for which tables have room, by default those of the longest sequence, rounded up. Pass it for a CUDA graph: a
                step without it that has many tokens of sequences of one length runs as a prefill of this very length does.
            into: an earlier step of at least this many sequences, rows and keys, to be written again. Further sequences of it get no
                tokens.

        Returns:
            A new step, or `into`.

        Raises:
            ArgumentError: bad input.
            CacheFull: too few free pages. Nothing has changed then.
        """
        found = self._distinct(sequences)
        counts = _counts(tokens, len(found))
        sizes = self._sizes_of(found, counts, room, into)
        pinned = self.device.type == "cuda"
        staged, host = numbers.buffer(sizes, torch.device("cpu"), pinned)  # allocated first: where that fails, nothing has changed
        memory, on_device = numbers.buffer(sizes, self.device) if into is None else (into.memory, into.numbers)
        self._grow(found, counts)
        numbers.write(Numbers(*(x.numpy() for x in host)), sizes, found, counts)
        if into is None:
            as_prefill = (
                room is None and sizes.S >= prefill.LEAST_ROWS and len({(x.length, n) for x, n in zip(found, counts, strict=True)}) == 1
            )
            into = CacheStep(sizes, self.pools, on_device, memory, self._lengths(found[0]) if as_prefill else None, self.scales)
        into.memory.copy_(staged, non_blocking=True)
        return into

    def _add(self, sequence: Cached) -> int:
        self._opened += 1
        self._sequences[self._opened] = sequence
        return self._opened

    def _of(self, sequence: int) -> Cached:
        found = self._sequences.get(sequence) if isinstance(sequence, int) and not isinstance(sequence, bool) else None
        if found is None:
            raise ArgumentError("sequence", shown(sequence), "the number of an open sequence of this cache", "call open() or fork()")
        return found

    def _distinct(self, sequences: Sequence[int]) -> list[Cached]:
        if not isinstance(sequences, Iterable):
            raise ArgumentError("sequences", shown(sequences), "numbers of sequences", "pass a list, also of one")
        sequences = list(sequences)
        found = [self._of(sequence) for sequence in sequences]
        if len(set(sequences)) < len(found):
            raise ArgumentError("sequences", shown(sequences), "each sequence once", "pass all its new tokens in one row")
        return found

    def _sizes_of(self, sequences: list[Cached], tokens: list[int], room: int | None, into: CacheStep | None) -> Sizes:
        """Sizes of a step; ArgumentError where `room` or `into` is too small for it."""
        B, S = len(sequences), max(tokens, default=0)
        longest = max((x.length + count for x, count in zip(sequences, tokens, strict=True)), default=0)
        if into is not None:
            self._check_into(into, B, S, longest, room)
            return into.sizes
        if room is None:
            pages = max(1, -(-longest // self.sizes.page_size))
            unit = max(1, (1 << (pages.bit_length() - 1)) // _ROOM_STEPS)
            pages = -(-pages // unit) * unit
        else:
            check_positive("room", room)
            if room < longest:
                raise ArgumentError("room", room, f"at least {longest}, the keys of the longest sequence", "pass more, or leave it out")
            pages = -(-room // self.sizes.page_size)
        return self.sizes._replace(B=B, S=S, room=pages)

    def _lengths(self, sequence: Cached) -> prefill.Lengths:
        return prefill.Lengths(sequence.length, sequence.length - sequence.recent.first * self.sizes.page_size)

    def _check_into(self, into: CacheStep, B: int, S: int, longest: int, room: int | None) -> None:
        sizes, held = into.sizes, into.sizes.room * self.sizes.page_size
        if into.alike is not None:
            remedy = "make it with room=: without, it runs as a prefill of that very length"
            raise ArgumentError("into", f"of sequences of {into.alike.keys} keys", "a step made with room=", remedy)
        if room is not None or into.pools is not self.pools or B > sizes.B or S > sizes.S or longest > held:
            value = f"of {sizes.B} sequences, {sizes.S} rows and room for {held} keys"
            allowed = f"a step of this cache of at least {B} sequences, {S} rows and room for {longest} keys, without room="
            raise ArgumentError("into", value, allowed, "make it with more of them, then capture it again")

    def _grow(self, sequences: list[Cached], tokens: list[int]) -> None:
        """Hold pages for the new tokens, and copy shared ones; CacheFull, like any other error, leaves all as it was."""
        before = [(x.all.mark(), x.recent.mark()) for x in sequences]
        copies: tuple[Copies, Copies] = ([], [])
        try:
            with self._pages.all_or_nothing(), self._window_pages.all_or_nothing():
                for sequence, count in zip(sequences, tokens, strict=True):
                    sequence.begin(count)
                for sequence, count in zip(sequences, tokens, strict=True):
                    copies[0].extend(sequence.all.grow(sequence.length, count))
                    copies[1].extend(sequence.recent.grow(sequence.length, count))
                self.pools.copy(*copies)
        except BaseException:
            for sequence, (every, recent) in zip(sequences, before, strict=True):
                sequence.all.restore(every)
                sequence.recent.restore(recent)
            raise
        for sequence, count in zip(sequences, tokens, strict=True):
            sequence.length += count


def _counts(tokens: int | Sequence[int], B: int) -> list[int]:
    counts = list(tokens) if isinstance(tokens, Sequence) else [tokens] * B
    whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in counts)
    if not whole or len(counts) != B:
        allowed = f"a whole number >= 0, or one for each of {B} sequences"
        raise ArgumentError("tokens", shown(tokens), allowed, "say how many new tokens each sequence has")
    return counts
