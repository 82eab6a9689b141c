"""The device side of a cache: keys and values in pages, of every layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.caching.numbers import Sizes
from nsa_sel.caching.sequences import Copies
from nsa_sel.quantize import as_bytes


class Pools(NamedTuple):
    """Of a cache [layers, pages + 1, ...], or of one of its layers [pages + 1, ...]; the last page takes what nobody sees.

    Attributes:
        k, v: [pages + 1,page_size,G,D], of the selected branch, with rotary positions; like k_win and v_win they may be in e4m3.
        k_cmp, v_cmp: [pages + 1,page_size / compress_stride,G,D], compressed keys, at the piece of compress_stride keys in which they end:
            what a page holds depends on its own and earlier tokens alone, so that sequences with the same beginning may share it.
        k_win, v_win: [window_pages + 1,page_size,G,D], of the window, with rotary positions.
        k_raw, v_raw: likewise, of the compressed branch, before they are compressed.
    """

    k: Tensor
    v: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_win: Tensor
    v_win: Tensor
    k_raw: Tensor
    v_raw: Tensor

    @classmethod
    def make(
        cls, layers: int, sizes: Sizes, G: int, dims: tuple[int, int], dtype: torch.dtype, attended: torch.dtype, device: torch.device
    ) -> Pools:  # fmt: skip
        """Of zeros; dims of keys and of values; `attended` is the dtype of k, v, k_win and v_win."""
        every, recent = (sizes.pages, sizes.page_size), (sizes.recent_pages, sizes.page_size)
        shapes = (every, attended), ((sizes.pages, sizes.page_pieces), dtype), (recent, attended), (recent, dtype)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of it
            return cls(*(torch.zeros(layers, n + 1, size, G, D, dtype=x, device=device) for (n, size), x in shapes for D in dims))

    def layer(self, i: int) -> Pools:
        """Views of one layer's."""
        return Pools(*(x[i] for x in self))

    def copy(self, pages: Copies, window_pages: Copies) -> None:
        """Copy pages of all layers; all sources are read before anything is written."""
        for copies, pools in ((pages, self[:4]), (window_pages, self[4:])):
            if copies:
                source, to = sent(torch.tensor(copies), self.k.device).unbind(1)
                for x in map(as_bytes, pools):
                    x.index_copy_(1, to, x.index_select(1, source))


def sent(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
