"""A step of a cache: some new tokens of some sequences, as every layer of a model attends to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from nsa_sel.caching import prefill
from nsa_sel.caching.beside import Beside
from nsa_sel.caching.extend import Compress, append, compress
from nsa_sel.caching.numbers import Numbers, Sizes
from nsa_sel.caching.pools import Pools
from nsa_sel.caching.quantized import Scales
from nsa_sel.core import transforms
from nsa_sel.core.choose import over_pages
from nsa_sel.core.choose_call import PagedKeys, Rule
from nsa_sel.core.gating import gated_sum, sum_of_tokens
from nsa_sel.errors import ArgumentError
from nsa_sel.projection import Parts
from nsa_sel.selection import Selection
from nsa_sel.serving import selection_attention_with_kvcache


class CacheStep:
    """New tokens of some sequences of an `NSACache`, made by `NSACache.step`. step[i] goes to layer i: `layer(x, cache=step[i])`.

    Every layer runs once with it, in any order, before the cache's next step. The new tokens of a sequence are the last rows of its row of
    x: with 3 tokens of 4 rows, row 0 has none. Rows without a token may hold anything and give 0 (or the output's bias).

    Attributes:
        positions: [B,S] int64 on the device, of each row in its sequence; 0 for rows without a token.
        is_token: [B,S] bool on the device, which rows have one.
        lengths: [B] int32 on the device, keys of each sequence, with the new ones.
        sizes, pools, numbers, memory, alike, scales: what layers and the cache take.
    """

    def __init__(
        self, sizes: Sizes, pools: Pools, numbers: Numbers, memory: Tensor, alike: prefill.Lengths | None, scales: Scales | None
    ) -> None:  # fmt: skip
        self.sizes, self.pools, self.numbers, self.scales = sizes, pools, numbers, scales
        self.memory = memory  # of the numbers
        self.alike = alike  # as of LayerStep

    @property
    def positions(self) -> Tensor:
        position: Tensor = self.numbers.position
        return position

    @property
    def is_token(self) -> Tensor:
        is_token: Tensor = self.numbers.is_token
        return is_token

    @property
    def lengths(self) -> Tensor:
        lengths: Tensor = self.numbers.lengths
        return lengths

    def __len__(self) -> int:
        """Layers of the cache."""
        return len(self.pools.k)

    def __iter__(self) -> Iterator[LayerStep]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, layer: int) -> LayerStep:
        """What layer `layer` takes as its `cache`."""
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < len(self):
            raise ArgumentError("layer", repr(layer), f"0 to {len(self) - 1}, the layers of the cache", "make the cache with more layers")
        scales = None if self.scales is None else self.scales.layer(layer)
        return LayerStep(self.sizes, self.pools.layer(layer), self.numbers, self.alike, scales)


class LayerStep(NamedTuple):
    """A `CacheStep` for one layer."""

    sizes: Sizes
    pools: Pools
    at: Numbers
    alike: prefill.Lengths | None  # of all sequences, if many new tokens are to be attended to as in a prefill
    scales: Scales | None  # of pages in e4m3

    def check(self, x: Tensor, rule: Rule, window: int, packed: bool, context: bool) -> None:
        """ArgumentError unless the step fits hidden states x [B,S,width] and a layer with these sizes."""
        transforms.check_eager("NSAttention with a cache", x)
        for name, given in (("cu_seqlens", packed), ("context parallelism", context)):
            if given:
                remedy = "pass the rows [B,S] of the step; sequences of other lengths have rows without a token"
                raise ArgumentError("cache", f"given with {name}", f"no {name} there", remedy)
        rows = self.at.position.shape
        if x.shape[:2] != rows:
            remedy = "pass one row per token of the step, the last rows of each sequence"
            raise ArgumentError(
                "x", f"of shape {tuple(x.shape)}", f"[B={rows[0]}, S={rows[1]}, width], the rows of the cache's step", remedy
            )
        sizes = self.sizes
        for name, mine, theirs in (
            ("compress_block", rule.compress_block, sizes.compress_block),
            ("compress_stride", rule.compress_stride, sizes.compress_stride),
            ("window", window, sizes.window),
        ):
            if mine != theirs:
                raise ArgumentError("cache", f"of {name} = {theirs}", f"the layer's {name} = {mine}", "make it by NSACache.of(layers, ...)")

    def attend(self, new: Parts, by: tuple[Compress, Compress], rule: Rule, backend: str | None) -> Tensor:
        """Append the keys and values of the new tokens, extend the compressed keys, and attend: [B,S,G,h,Dv], 0 for rows without a token.

        Args:
            new: projected new tokens.
            by: the layer's compression of keys and of values.
            rule, backend: the layer's.

        Raises:
            ArgumentError: sizes, dtypes or devices other than the cache's; gradients.
        """
        self._check(new)
        if self.alike is not None:
            self.extend(new, by)
            branches = prefill.branches(new.q, new.q_cmp, self.pools, self.at, self.sizes, self.alike, rule, backend, self.scales)
            return gated_sum(*branches, new.gates)
        beside = Beside(new.q)
        window = beside.run(lambda: self._append_and_attend(new))
        self._compress(new, by, beside.join)
        compressed, blocks = self.choose(new.q_cmp, rule)
        beside.join()
        return sum_of_tokens((compressed, self.select(new.q, blocks, backend), window), new.gates, self.at.is_token)

    def extend(self, new: Parts, by: tuple[Compress, Compress]) -> None:
        """Append keys and values, and compress those whose last key is new."""
        append(self.pools, self.at, new.keys(), self.scales)
        self._compress(new, by, lambda: None)

    def _compress(self, new: Parts, by: tuple[Compress, Compress], appended: Callable[[], None]) -> None:
        compress(self.pools, self.at, (new.k_cmp, new.v_cmp), by, self.sizes.compress_stride, appended)

    def _append_and_attend(self, new: Parts) -> Tensor:
        """The window, over the new tokens, too: neither the choice of blocks nor what is compressed has to wait for it."""
        append(self.pools, self.at, new.keys(), self.scales)
        return self.near(new.q)

    def choose(self, q: Tensor, rule: Rule) -> tuple[Tensor, Selection]:
        """The compressed branch of q [B,S,G,h,Dk], and the blocks that it chooses."""
        pages = PagedKeys(self.at.table, self.sizes.reach - 1)
        k, v = (x.transpose(1, 2) for x in self.pools[2:4])
        o, _, ranges = over_pages(q, k, v, pages, rule, self.sizes.room * self.sizes.page_size, self.at.position)
        return o, Selection.from_ranges(ranges, rule.block_size, disjoint=True)

    def select(self, q: Tensor, blocks: Selection, backend: str | None) -> Tensor:
        """The selected branch."""
        k_scale, v_scale = (None, None) if self.scales is None else self.scales[:2]
        return selection_attention_with_kvcache(
            q, self.pools.k, self.pools.v, blocks, self.at.lengths, self.at.table, k_scale=k_scale, v_scale=v_scale, backend=backend
        )

    def near(self, q: Tensor) -> Tensor:
        """The window: one range of the last keys for each row."""
        ranges = self.at.near[:, :, None, None].expand(-1, -1, q.shape[2], -1, -1)
        selection = Selection(ranges, None, self.sizes.window, disjoint=True)
        k_scale, v_scale = (None, None) if self.scales is None else self.scales[2:]
        return selection_attention_with_kvcache(
            q, self.pools.k_win, self.pools.v_win, selection, self.at.recent_lengths, self.at.recent_table, k_scale=k_scale,
            v_scale=v_scale,
        )  # fmt: skip

    def _check(self, new: Parts) -> None:
        if any(x.requires_grad for x in new):
            remedy = "call the model under torch.no_grad() or torch.inference_mode()"
            raise ArgumentError("x", "a tensor that requires gradients, or of a layer that does", "none with a cache", remedy)
        for name, mine, cached in (("keys", new.k_cmp, self.pools.k_raw), ("values", new.v_cmp, self.pools.v_raw)):
            if mine.dtype != cached.dtype:
                remedy = (
                    f"make it with dtype={mine.dtype}: by default NSACache has bfloat16, NSACache.of the dtype of the layers' parameters"
                )
                raise ArgumentError("cache", f"of {cached.dtype}", f"{mine.dtype}, the dtype of the layer's {name}", remedy)
            here, there = ((x.device, *x.shape[-2:]) for x in (mine, cached))
            if here != there:
                value, allowed = (f"of {G} groups of {name} of {D} numbers on {device}" for device, G, D in (there, here))
                raise ArgumentError("cache", value, f"as the layer: {allowed}", "make it by NSACache.of(layers, ...)")
