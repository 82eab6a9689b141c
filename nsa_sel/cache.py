"""`NSACache`: keys and values of many sequences in pages, for a model of `NSAttention` or `MSAttention` layers that
prefills and decodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from nsa_sel.attention_layer import NSAttention
from nsa_sel.caching import step_tensors
from nsa_sel.caching.pools import Pools, scales_of
from nsa_sel.caching.sequences import CachedSequence, Copies, Pages
from nsa_sel.caching.step import CacheStep, PrefillLengths
from nsa_sel.caching.step_tensors import ALL_KEYS, StepSizes, StepTensors
from nsa_sel.core.arguments import check_positive
from nsa_sel.core.call import DTYPES
from nsa_sel.core.check import check_compression
from nsa_sel.errors import ArgumentError, shown
from nsa_sel.msa_layer import MSAttention
from nsa_sel.quantize import STORED

KVScales = Mapping[str, torch.Tensor | float]
MIN_PREFILL_ROWS = 64  # rows of a sequence from which attending as a prefill is faster than over pages
_TABLE_SIZES = 8  # table sizes per power of two; with few sizes, calls repeat and are replayed


class NSACache:
    """The cache of a model's `NSAttention` or `MSAttention` layers. Prefill, chunked prefill, decoding and verifying draft
    tokens are one call:

        a = cache.open()
        step = cache.step([a, b], tokens=[3, 1])
        for i, layer in enumerate(layers):
            x = x + layer(norm(x), cache=step[i])  # [B,S,width]; the new tokens of a sequence are its last rows

    The pages of all keys hold the selected branch's K and V, and the compressed keys that end in them. Separate pages
    hold recent keys: those of the window, and those that a compressed key still needs. The next step of a sequence
    releases the recent pages that its rows do not need. For `MSAttention` a page holds K, V and index keys, and there are
    no recent keys. Sequences can share pages; a shared page is copied before it is written. Device work is
    stream-ordered, so all steps must run on one stream. Not thread-safe.

    Args:
        layers: number of layers of the model.
        pages: number of pages of page_size keys, for all sequences together, in every layer.
        page_size: a multiple of compress_stride.
        groups: G, KV groups; with tensor parallelism those of this rank.
        head_dim, value_dim: Dk and Dv; by default Dv = Dk.
        compress_block, compress_stride, window: as for the layers.
        index_dim: Di of `MSAttention` layers, which have no compression and no window: leave these out.
        window_pages: number of pages of recent keys of all sequences; by default `pages`, which is always enough. A
            sequence holds at most (max(window, compress_block) + S - 2) // page_size + 2 of them, with S rows in its
            longest step.
        dtype: float16, bfloat16, float32 or float64, the dtype of the layers' projections (under torch.autocast,
            autocast's dtype).
        kv_dtype: dtype of K and V of the selected branch and of the window: `dtype`, the default, or float8_e4m3fn,
            half the bytes of bfloat16. Layers attend to the quantized keys, in prefill as in decoding. Compressed keys,
            keys before compression, and index keys stay in `dtype`. float8_e4m3fn does not support float64, nor GPUs below SM 8.9.
        kv_scales: with float8_e4m3fn, scales by pool name, key = stored * scale: "k" and "v" for the selected branch,
            "k_win" and "v_win" for the window; 1 if left out. A positive number, or float32 with one element, [layers],
            or [layers,G]; with dtype float16 at most 65504 / 448. Values beyond 448 * scale are clamped; NaN stays NaN.
        device: by default the current one.

    Attributes:
        pools: device memory, `nsa_sel.caching.pools.Pools` [layers, ...].
        sizes: pages and compression, `nsa_sel.caching.step_tensors.StepSizes`.
        scales: of e4m3 pools, `nsa_sel.caching.pools.CacheScales` [layers,G]; else None.

    Raises:
        ArgumentError: sizes that do not fit together, an unsupported dtype or scale, or a GPU without e4m3.
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
        index_dim: int | None = None,
        window_pages: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        kv_scales: KVScales | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        if index_dim is not None:
            check_positive("index_dim", index_dim)
            if (compress_block, compress_stride, window, window_pages) != (32, 16, 512, None):
                raise ArgumentError("index_dim", index_dim, "None with compression or a window", "make one cache for each kind of layer")
            compress_block, compress_stride, window = 1, 1, ALL_KEYS  # a page holds one index key for each of its keys
        window_pages = pages if window_pages is None else window_pages
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "groups": groups, "head_dim": head_dim, "value_dim": value_dim}
        for name, size in {**sizes, "window_pages": window_pages}.items():
            check_positive(name, size)
        check_positive("window", window)
        check_compression(compress_block, compress_stride)
        if page_size % compress_stride:
            raise ArgumentError(
                "page_size",
                page_size,
                f"a multiple of compress_stride = {compress_stride}",
                "pass one: a page holds the compressed keys that end in it",
            )
        if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
            raise ArgumentError("dtype", shown(dtype), ", ".join(DTYPES.values()), "pass the dtype of the layers' projections")
        self.device = torch.empty(0, device=device).device
        self.sizes = StepSizes(0, 0, 0, pages, window_pages, page_size, compress_block, compress_stride, window)
        self._pages, self._window_pages = Pages("pages", pages), Pages("window_pages", window_pages)
        self.scales = scales_of(kv_dtype, kv_scales, dtype, layers, groups, self.device)
        attended = dtype if self.scales is None else STORED
        self.pools = Pools.make(layers, self.sizes, groups, (head_dim, value_dim), index_dim, dtype, attended, self.device)
        self._sequences: dict[int, CachedSequence] = {}
        self._opened = 0

    @classmethod
    def of(
        cls, model_layers: Iterable[NSAttention | MSAttention], pages: int, page_size: int, *, window_pages: int | None = None,
        dtype: torch.dtype | None = None, kv_dtype: torch.dtype | None = None, kv_scales: KVScales | None = None,
    ) -> NSACache:  # fmt: skip
        """Create a cache for these layers, in their order.

        Args:
            model_layers: layers of the same sizes on one device.
            pages, page_size, window_pages, kv_dtype, kv_scales: as for `NSACache`.
            dtype: by default the dtype of the layers' parameters. Pass autocast's dtype if the model runs under
                torch.autocast.

        Returns:
            The cache, on the layers' device.

        Raises:
            ArgumentError: no layers, or layers of different sizes.
        """
        try:
            layers = list(model_layers)
            kinds = {x.cached_sizes() for x in layers}
        except (TypeError, AttributeError) as error:  # checked by attributes, so that wrapped layers are accepted
            raise ArgumentError(
                "model_layers",
                f"a {type(model_layers).__name__} ({error})",
                "a list of NSAttention or MSAttention layers",
                "pass [block.attention for block in model.blocks], or the like",
            ) from error
        if len(kinds) != 1:
            raise ArgumentError(
                "model_layers",
                f"{len(layers)} layers of {len(kinds)} kinds",
                "layers of one class, number of groups, head dimensions, compression, window, dtype and device",
                "make one cache for each kind",
            )
        *heads, own, device, sizes = kinds.pop()
        dtype = own if dtype is None else dtype
        return cls(
            len(layers), pages, page_size, *heads, window_pages=window_pages, dtype=dtype, kv_dtype=kv_dtype, kv_scales=kv_scales,
            device=device, **dict(sizes),
        )  # fmt: skip

    @property
    def free_pages(self) -> int:
        """Number of `pages` that no sequence holds."""
        return self._pages.free

    @property
    def free_window_pages(self) -> int:
        """Number of `window_pages` that no sequence holds."""
        return self._window_pages.free

    def held_pages(self, sequences: Iterable[int]) -> int:
        """Return how many of `pages` these sequences hold together. A shared page counts once.

        Args:
            sequences: ids from `open` or `fork`.

        Returns:
            The number of pages.

        Raises:
            ArgumentError: not the id of an open sequence.
        """
        return len({page for sequence in sequences for page in self._of(sequence).all.held().tolist()})

    def open(self) -> int:
        """Create a sequence without keys.

        Returns:
            Its id, valid until `free`.
        """
        return self._add(CachedSequence(self._pages, self._window_pages, self.sizes.page_size, self.sizes.last_keys))

    def fork(self, sequence: int) -> int:
        """Create a sequence with the keys of another one. They share pages until one of them writes to a page.

        Args:
            sequence: id of the other sequence.

        Returns:
            The id of the new sequence.

        Raises:
            ArgumentError: not the id of an open sequence.
        """
        return self._add(self._of(sequence).fork())

    def free(self, sequence: int) -> None:
        """Release all pages of a sequence. Its id becomes invalid.

        Args:
            sequence: its id.

        Raises:
            ArgumentError: not the id of an open sequence.
        """
        self._of(sequence).truncate(0)
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        """Return the number of keys of a sequence.

        Args:
            sequence: its id.

        Returns:
            The number of keys.

        Raises:
            ArgumentError: not the id of an open sequence.
        """
        return self._of(sequence).length

    def truncate(self, sequence: int, length: int) -> None:
        """Drop the keys from `length` on, for example those of rejected draft tokens.

        Args:
            sequence: its id.
            length: 0, or at least the length before its last step. Smaller lengths work only while the window's earlier
                pages are held.

        Raises:
            ArgumentError: another length.
        """
        cached = self._of(sequence)
        least = cached.min_length()
        if not isinstance(length, int) or isinstance(length, bool) or (length and not least <= length <= cached.length) or length < 0:
            raise ArgumentError(
                "length",
                shown(length),
                f"0, or {least} to {cached.length}",
                "keep a fork of the shorter sequence, or prefill another one: the window's earlier keys were released",
            )
        cached.truncate(length)

    def step(
        self, sequences: Sequence[int], tokens: int | Sequence[int] = 1, *, room: int | None = None, into: CacheStep | None = None
    ) -> CacheStep:
        """Allocate pages for new tokens of some sequences. Every layer must then run with the step.

        Never synchronizes with the GPU. To replay a step whose device work was captured in a CUDA graph, pass it as
        `into`: its tensors are updated in place.

        Args:
            sequences: [B] ids, each once.
            tokens: number of new tokens of each sequence, or one number for all. x has S rows for every sequence, S
                being the largest of these numbers. New tokens are the last rows of a sequence; the rows before them
                have no token.
            room: number of keys per sequence that the block tables have entries for; by default the longest sequence's
                length, rounded up. Pass it for a CUDA graph: without it, a step of many tokens of sequences of one
                length runs as a prefill of exactly this length.
            into: an earlier step of at least this many sequences, rows and keys, to update in place. Its additional
                sequences get no tokens.

        Returns:
            A new step, or `into`.

        Raises:
            ArgumentError: invalid arguments.
            CacheFull: too few free pages. The cache is unchanged.
        """
        if not isinstance(sequences, Iterable):
            raise ArgumentError("sequences", shown(sequences), "numbers of sequences", "pass a list, also of one")
        sequences = list(sequences)
        cached = [self._of(sequence) for sequence in sequences]
        if len(set(sequences)) < len(cached):
            raise ArgumentError("sequences", shown(sequences), "each sequence once", "pass all its new tokens in one row")
        counts = list(tokens) if isinstance(tokens, Sequence) else [tokens] * len(cached)
        if len(counts) != len(cached) or not all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in counts):
            raise ArgumentError(
                "tokens",
                shown(tokens),
                f"a whole number >= 0, or one for each of {len(cached)} sequences",
                "say how many new tokens each sequence has",
            )
        sizes = self._sizes_of(cached, counts, room, into)
        pinned = self.device.type == "cuda"
        staged, host = step_tensors.allocate(sizes, torch.device("cpu"), pinned)  # allocated first: if this fails, the cache is unchanged
        memory, on_device = step_tensors.allocate(sizes, self.device) if into is None else (into.memory, into.tensors)
        self._grow(cached, counts)
        step_tensors.fill(StepTensors(*(x.numpy() for x in host)), sizes, cached, counts)
        if into is None:
            as_prefill = (
                room is None and sizes.S >= MIN_PREFILL_ROWS and len({(x.length, n) for x, n in zip(cached, counts, strict=True)}) == 1
            )
            first = cached[0].recent.first * self.sizes.page_size if cached else 0
            lengths = PrefillLengths(cached[0].length, cached[0].length - first) if as_prefill else None
            into = CacheStep(sizes, self.pools, on_device, memory, lengths, self.scales)
        into.memory.copy_(staged, non_blocking=True)
        return into

    def _add(self, sequence: CachedSequence) -> int:
        self._opened += 1
        self._sequences[self._opened] = sequence
        return self._opened

    def _of(self, sequence: int) -> CachedSequence:
        cached = self._sequences.get(sequence) if isinstance(sequence, int) and not isinstance(sequence, bool) else None
        if cached is None:
            raise ArgumentError("sequence", shown(sequence), "the number of an open sequence of this cache", "call open() or fork()")
        return cached

    def _sizes_of(self, sequences: list[CachedSequence], tokens: list[int], room: int | None, into: CacheStep | None) -> StepSizes:
        """Return the sizes of a step. Raises ArgumentError if `room` or `into` is too small for it."""
        B, S = len(sequences), max(tokens, default=0)
        longest = max((x.length + count for x, count in zip(sequences, tokens, strict=True)), default=0)
        if into is not None:
            sizes, most_keys = into.sizes, into.sizes.table_pages * self.sizes.page_size
            if into.prefill_lengths is not None:
                raise ArgumentError(
                    "into",
                    f"of sequences of {into.prefill_lengths.keys} keys",
                    "a step made with room=",
                    "make it with room=; without room= it runs as a prefill of exactly this length",
                )
            if room is not None or into.pools is not self.pools or B > sizes.B or S > sizes.S or longest > most_keys:
                raise ArgumentError(
                    "into",
                    f"of {sizes.B} sequences, {sizes.S} rows and room for {most_keys} keys",
                    f"a step of this cache of at least {B} sequences, {S} rows and room for {longest} keys, without room=",
                    "make it with more of them, then capture it again",
                )
            return sizes
        if room is None:
            pages = max(1, -(-longest // self.sizes.page_size))
            unit = max(1, (1 << (pages.bit_length() - 1)) // _TABLE_SIZES)
            pages = -(-pages // unit) * unit
        else:
            check_positive("room", room)
            if room < longest:
                raise ArgumentError("room", room, f"at least {longest}, the keys of the longest sequence", "pass more, or leave it out")
            pages = -(-room // self.sizes.page_size)
        return self.sizes._replace(B=B, S=S, table_pages=pages)

    def _grow(self, sequences: list[CachedSequence], tokens: list[int]) -> None:
        """Take pages for the new tokens, and copy shared ones. On CacheFull, or any other error, the cache is
        unchanged."""
        before = [(x.all.snapshot(), x.recent.snapshot()) for x in sequences]
        copies: tuple[Copies, Copies] = ([], [])
        try:
            with self._pages.all_or_nothing(), self._window_pages.all_or_nothing():
                for sequence, count in zip(sequences, tokens, strict=True):
                    sequence.release_unneeded(count)
                for sequence, count in zip(sequences, tokens, strict=True):
                    copies[0].extend(sequence.all.grow(sequence.length, count))
                    copies[1].extend(sequence.recent.grow(sequence.length, count))
                self.pools.copy(*copies)
        except BaseException:
            for sequence, (full, recent) in zip(sequences, before, strict=True):
                sequence.all.restore(*full)
                sequence.recent.restore(*recent)
            raise
        for sequence, count in zip(sequences, tokens, strict=True):
            sequence.length += count
