"""NSA's selected branch as a module, and block scores from its compressed branch (arXiv 2502.11089, Eq. 8-12)."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor, nn

from nsa_sel.core.arguments import check_positive, check_tensors
from nsa_sel.core.attend import selection_attention
from nsa_sel.core.check import check_compression
from nsa_sel.errors import ArgumentError
from nsa_sel.selection import Selection


def block_scores(p: Tensor, block_size: int, compress_block: int, compress_stride: int, S_kv: int) -> Tensor:
    """Scores of selection blocks from the compressed branch's attention (Eq. 9, 10). Not differentiable.

    Compressed key i covers the keys [i * compress_stride, i * compress_stride + compress_block). Each of its chunks of
    compress_stride keys adds p, summed over the h heads of a group, to the block that contains the chunk.

    Args:
        p: [B,S,G,h,C], floating point: the softmax weights of the compressed branch, C = (S_kv - compress_block) //
            compress_stride + 1, or 0 for shorter sequences.
        block_size: keys of a selection block, a multiple of compress_stride.
        compress_block: keys that a compressed key covers, a multiple of compress_stride.
        compress_stride: keys from one compressed key to the next.
        S_kv: keys of the sequence.

    Returns:
        [B,S,G,blocks] in p's dtype, blocks = ceil(S_kv / block_size): scores for `Selection.from_scores`.

    Raises:
        ArgumentError: p of another shape, or sizes that are no multiples of compress_stride.
    """
    check_tensors(p=p)
    check_positive("block_size", block_size)
    check_compression(compress_block, compress_stride, block_size)
    check_positive("S_kv", S_kv)
    C = max(0, (S_kv - compress_block) // compress_stride + 1)
    if p.dim() != 5 or p.shape[4] != C:
        raise ArgumentError(
            "p",
            f"of shape {tuple(p.shape)}",
            f"[B,S,G,h,{C}], the compressed keys of S_kv = {S_kv}",
            "split the heads into G groups of h; pass the sequence's length",
        )
    blocks, step = -(-S_kv // block_size), block_size // compress_stride
    summed = p.detach().sum(3)
    short = blocks * step - summed.shape[-1]  # chunks at which no compressed key starts
    chunks = nn.functional.pad(summed, (0, short))
    for n in range(1, compress_block // compress_stride):
        chunks = chunks + nn.functional.pad(summed, (n, short - n))
    return chunks.view(*chunks.shape[:-1], blocks, step).sum(-1)


class NSASelection(nn.Module):
    """Attention of every query row to its n best blocks: `Selection.from_scores`, then `selection_attention`. It has no
    parameters.

    Args:
        n: blocks per row.
        block_size: keys of a block.
        first: blocks at the start of the sequence that are always among the n.
        local: last visible blocks that are always among the n.
        scale, backend: as of `selection_attention`.
    """

    def __init__(
        self, n: int = 16, block_size: int = 64, first: int = 1, local: int = 2, *, scale: float | None = None, backend: str | None = None
    ) -> None:
        super().__init__()
        self.n, self.block_size, self.first, self.local, self.scale, self.backend = n, block_size, first, local, scale, backend

    @overload
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None = None, *, block_indices: Tensor | None = None,
        q_pos: Tensor | None = None, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None = None, *, block_indices: Tensor | None = None,
        q_pos: Tensor | None = None, return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
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
        """Select blocks by their scores, or take them as given, and attend to them.

        Args:
            q: [B,S,G,h,Dk], projected; dtypes as of `selection_attention`, k and v likewise.
            k: [B,G,S_kv,Dk].
            v: [B,G,S_kv,Dv].
            scores: [B,S,G,blocks] floating point, for example from `block_scores`; or block_indices.
            block_indices: [B,S,G,n] integers, -1 for padding; no first or local blocks are added.
            q_pos: [S] or [B,S], positions of the rows, by default S_kv - S + s.
            return_lse: also return the log-sum-exp.

        Returns:
            o [B,S,G,h,Dv], or (o, lse) with lse [B,S,G,h].

        Raises:
            ArgumentError: bad input, or not exactly one of scores and block_indices.
            BackendError: as `selection_attention`.
        """
        if (scores is None) == (block_indices is None):
            given = "neither" if scores is None else "both"
            raise ArgumentError("scores, block_indices", f"{given} given", "one of them", "pass scores, or selected blocks")
        if scores is not None:
            sizes = self.n, self.block_size, self.first, self.local
            check_tensors(k=k)
            selection = Selection.from_scores(scores, *sizes, S_kv=k.shape[2], q_pos=q_pos)
        elif block_indices is not None:
            selection = Selection.from_blocks(block_indices, self.block_size)
        return selection_attention(q, k, v, selection, scale=self.scale, q_pos=q_pos, return_lse=return_lse, backend=self.backend)

    def extra_repr(self) -> str:
        return f"n={self.n}, block_size={self.block_size}, first={self.first}, local={self.local}, backend={self.backend}"
