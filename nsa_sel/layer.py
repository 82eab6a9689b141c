"""The selected branch of NSA as a module, and the scores that its compressed branch gives it (arXiv 2502.11089, Eq. 8-12)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from nsa_sel.core.entry import selection_attention
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection


def block_scores(p: Tensor, block_size: int, compress_block: int, compress_stride: int, S_kv: int) -> Tensor:
    """Scores [B,S,G,blocks] of blocks of `block_size` keys from the compressed branch's attention p [B,S,G,h,compressed] (Eq. 9, 10).

    Compressed key i stands for the keys [i * compress_stride, i * compress_stride + compress_block). Each of its pieces of
    compress_stride keys brings p to the block that it lies in, summed over the h heads of a group. blocks = ceil(S_kv / block_size).
    No gradient flows through: which blocks are best is no differentiable question. Raises ArgumentError for sizes that do not divide.
    """
    if p.dim() != 5:
        raise ArgumentError("p", f"of shape {tuple(p.shape)}", "[B,S,G,h,compressed keys]", "split the heads into G groups of h")
    for name, size in (("compress_block", compress_block), ("block_size", block_size)):
        if compress_stride < 1 or size < 1 or size % compress_stride:
            raise ArgumentError(name, size, f"a multiple of compress_stride = {compress_stride}", "choose sizes as in NSA's Eq. 9")
    blocks, step = -(-S_kv // block_size), block_size // compress_stride
    summed = p.detach().sum(3)
    short = blocks * step - summed.shape[-1]  # pieces of keys that no compressed key begins at
    pieces = nn.functional.pad(summed, (0, short))
    for n in range(1, compress_block // compress_stride):
        pieces = pieces + nn.functional.pad(summed, (n, short - n))
    return pieces.view(*pieces.shape[:-1], blocks, step).sum(-1)


class NSASelection(nn.Module):
    """Attention of every query to its n best blocks: `Selection.from_scores` and `selection_attention`, with their options kept.

    n: blocks a row; block_size: keys of a block; first, local: how many blocks of the beginning, and last visible ones, are always
    among the n (NSA takes 1 and 2). scale, backend: as of `selection_attention`. It has no parameters: q, k and v come projected,
    and the scores from the compressed branch, by `block_scores`.
    """

    def __init__(
        self, n: int = 16, block_size: int = 64, first: int = 1, local: int = 2, *, scale: float | None = None, backend: str | None = None
    ) -> None:
        super().__init__()
        self.n, self.block_size, self.first, self.local, self.scale, self.backend = n, block_size, first, local, scale, backend

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor | None = None,
        *,
        block_indices: Tensor | None = None,
        q_pos: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """o [B,S,G,h,Dv], or (o, lse), of q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv], and either scores [B,S,G,blocks] or
        block_indices [B,S,G,n] (-1 is padding, no forced blocks are added). q_pos: key positions [S] or [B,S], by default S_kv - S + s.
        """
        if (scores is None) == (block_indices is None):
            given = "neither" if scores is None else "both"
            raise ArgumentError("scores, block_indices", f"{given} given", "one of them", "pass scores, or blocks that were chosen already")
        if scores is not None:
            sizes = self.n, self.block_size, self.first, self.local
            selection = Selection.from_scores(scores, *sizes, S_kv=k.shape[2], q_pos=q_pos)
        elif block_indices is not None:
            selection = Selection.from_blocks(block_indices, self.block_size)
        return selection_attention(q, k, v, selection, scale=self.scale, q_pos=q_pos, return_lse=return_lse, backend=self.backend)

    def extra_repr(self) -> str:
        """The options, for print(module)."""
        return f"n={self.n}, block_size={self.block_size}, first={self.first}, local={self.local}, backend={self.backend}"
