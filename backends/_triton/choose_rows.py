"""Which compressed keys a row sees, and arguments that all kernels over compressed keys take.

`rule` is `nsa_sel.core.call.Rule`. A row sees the first compressed keys, up to a limit that follows from its
position.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_sel.backends._triton.arguments import Dims, Heads, Strides, split_dims
from nsa_sel.backends._triton.rows import row_position
from nsa_sel.backends._triton.tma import aligned, descriptor
from nsa_sel.core.call import ChooseCall
from nsa_sel.settings.schema import KernelConfig


class Sizes(NamedTuple):
    """As kernels take them."""

    S: int
    C: int
    G: int
    start: int  # position of row 0 if q_pos is None
    tiles: int  # tiles of rows
    sequences: int  # sequences of a packed batch, else 0


@triton.jit
def seen_keys(q_pos, stride_pos, b, s, sizes, rule: tl.constexpr):
    """Return how many compressed keys the rows s see (int32)."""
    past = row_position(q_pos, stride_pos, b, s, sizes.start) + 1 - rule.compress_block
    return tl.where(past >= 0, tl.minimum(past // rule.compress_stride + 1, sizes.C), 0).to(tl.int32)


def heads_of(call: ChooseCall) -> Heads:
    _, _, _, h, Dk = call.q.shape
    return Heads(call.q.dtype, h, Dk, call.v.shape[3], 0, 0)


def dims_of(call: ChooseCall) -> Dims:
    return split_dims(heads_of(call))


def strides_of(call: ChooseCall) -> Strides:
    pos = (0, 0) if call.q_pos is None else call.q_pos.stride()
    return Strides(call.q.stride()[:4], call.k.stride()[:3], call.v.stride()[:3], pos)


def sizes_of(call: ChooseCall, tokens: int) -> Sizes:
    """Return `Sizes` for tiles of `tokens` rows."""
    _, S, G = call.q.shape[:3]
    return Sizes(S, call.k.shape[2], G, call.start, tiles_of(call, S, tokens), sequences_of(call))


def sequences_of(call: ChooseCall) -> int:
    """Return the number of sequences of a packed batch, else 0."""
    return 0 if call.sequences is None else len(call.sequences.rows) - 1


def bounds_of(call: ChooseCall) -> tuple[Tensor | None, Tensor | None]:
    """Return where the sequences of a packed batch begin, in rows and in compressed keys, or (None, None)."""
    return (None, None) if call.sequences is None else (call.sequences.rows, call.sequences.keys)


def tiles_of(call: ChooseCall, total: int, size: int) -> int:
    """Return the tiles of `total` rows or keys; for a packed batch (tiles within one sequence, with padding) an upper
    bound."""
    return -(-total // size) if call.sequences is None else total // size + sequences_of(call) + 1


def tile_tokens(h: int, rows: int) -> int:
    """Return the tokens whose h heads fill a tile of `rows` rows."""
    return max(1, rows // h)


def programs_of(call: ChooseCall, rows: int) -> int:
    """Return the programs for all tiles of all sequences and groups; more than `rows` heads take several programs."""
    B, S, G, h, _ = call.q.shape
    return B * G * tiles_of(call, S, tile_tokens(h, rows)) * -(-h // rows)


def key_descriptors(call: ChooseCall, dims: Dims, block_k: int) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Return TMA descriptors of k and k's second column tile for block_k keys; the second is None if one tile holds
    k."""
    return descriptor(call.k, block_k, dims.BLOCK_D), descriptor(call.k, block_k, dims.BLOCK_REST) if dims.BLOCK_REST else None


def value_descriptor(call: ChooseCall, dims: Dims, block_k: int) -> TensorDescriptor:
    return descriptor(call.v, block_k, dims.BLOCK_DV)


def by_tma(call: ChooseCall, config: KernelConfig) -> bool:
    """Return whether the config asks for TMA and TMA can load k and v."""
    return config.loads == "tma" and aligned(call.k) and aligned(call.v)
