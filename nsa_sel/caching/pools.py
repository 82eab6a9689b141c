"""Device memory of a cache: keys and values of every layer in pages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_sel.caching.sequences import Copies
from nsa_sel.caching.step_tensors import StepSizes
from nsa_sel.quantize import as_bytes


class Pools(NamedTuple):
    """Pages of a cache [layers, pages + 1, ...], or of one layer [pages + 1, ...]. The extra page at the end is never read.

    Attributes:
        k, v: [pages + 1,page_size,G,D], selected branch, with rotary positions. May be e4m3, like k_win and v_win.
        k_cmp, v_cmp: [pages + 1,page_size / compress_stride,G,D], compressed keys, stored at the piece of compress_stride keys in which
            they end. A page then depends only on its own and earlier tokens, so sequences with the same prefix can share it.
        k_win, v_win: [window_pages + 1,page_size,G,D], window, with rotary positions.
        k_raw, v_raw: [window_pages + 1,page_size,G,D], compressed branch, before compression.
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
        cls, layers: int, sizes: StepSizes, G: int, dims: tuple[int, int], dtype: torch.dtype, attended: torch.dtype, device: torch.device
    ) -> Pools:  # fmt: skip
        """Allocate zeros. dims: Dk and Dv. dtype: of k_cmp, v_cmp, k_raw, v_raw. attended: dtype of k, v, k_win, v_win."""
        full, recent = (sizes.pages, sizes.page_size), (sizes.recent_pages, sizes.page_size)
        shapes = (full, attended), ((sizes.pages, sizes.pieces_per_page), dtype), (recent, attended), (recent, dtype)
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of inference mode
            return cls(*(torch.zeros(layers, n + 1, size, G, D, dtype=x, device=device) for (n, size), x in shapes for D in dims))

    def layer(self, i: int) -> Pools:
        """Return views of layer i."""
        return Pools(*(x[i] for x in self))

    def copy(self, pages: Copies, window_pages: Copies) -> None:
        """Copy pages in all layers. All sources are read before anything is written."""
        for copies, pools in ((pages, self[:4]), (window_pages, self[4:])):
            if copies:
                indices = torch.tensor(copies)
                if self.k.is_cuda:
                    indices = indices.pin_memory().to(self.k.device, non_blocking=True)  # without waiting for the GPU
                source, to = indices.unbind(1)
                for x in map(as_bytes, pools):
                    x.index_copy_(1, to, x.index_select(1, source))
