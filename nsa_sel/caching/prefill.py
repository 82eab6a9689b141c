"""The branches of many new tokens, by the kernels of a prefill: keys are gathered from their pages into one piece first.

The kernels that read pages take each row by itself, which suits a few new tokens. Those of a prefill share loads between rows, and want
sequences of one length.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_sel.attention import selection_attention
from nsa_sel.caching.numbers import Numbers, Sizes
from nsa_sel.caching.pools import Pools
from nsa_sel.caching.quantized import Scales, dequantized
from nsa_sel.compressed import compressed_attention
from nsa_sel.core.choose_call import PagedKeys, Rule
from nsa_sel.quantize import as_bytes
from nsa_sel.window import sliding_window_attention

LEAST_ROWS = 64  # of a sequence, from which on gathering pays


class Lengths(NamedTuple):
    """Of sequences that all have as many keys, and as many pages of the last ones."""

    keys: int
    last: int  # keys in the pages of the last ones


def branches(
    q: Tensor, q_cmp: Tensor, pools: Pools, at: Numbers, sizes: Sizes, lengths: Lengths, rule: Rule, backend: str | None,
    scales: Scales | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The compressed, the selected and the window branch [B,S,G,h,Dv] of the last rows of sequences of one length.

    Args:
        q, q_cmp: [B,S,G,h,Dk], queries with rotary positions and without.
        pools, at, sizes: a layer's pages, to which the new keys are written, and the step.
        lengths: of every sequence.
        rule, backend: the layer's.
        scales: of quantized pages. Their keys are converted to q's dtype: rows attend to what is stored, whatever the chunks.
    """
    k, v = (_gathered(x, at.table, sizes.reach - 1, rule.compressed_keys(lengths.keys)) for x in pools[2:4])
    o_cmp, blocks = compressed_attention(q_cmp, k, v, **rule._asdict(), S_kv=lengths.keys)
    of_all, of_last = (None, None) if scales is None else (scales[:2], scales[2:])
    k, v = _dequantized(pools[:2], of_all, at.table, lengths.keys, q)
    o_slc = selection_attention(q, k, v, blocks, backend=backend)
    k, v = _dequantized(pools[4:6], of_last, at.recent_table, lengths.last, q)
    return o_cmp, o_slc, sliding_window_attention(q, k, v, sizes.window)


def _dequantized(pools: tuple[Tensor, ...], scales: tuple[Tensor, ...] | None, table: Tensor, count: int, q: Tensor) -> list[Tensor]:
    """The first `count` keys and values of pools that may be quantized, in q's dtype."""
    found = [_gathered(as_bytes(x), table, 0, count).view(x.dtype) for x in pools]
    return found if scales is None else [dequantized(x, scale, q.dtype) for x, scale in zip(found, scales, strict=True)]


def _gathered(x: Tensor, table: Tensor, skipped: int, count: int) -> Tensor:
    """`count` keys [B,G,count,D] of pages x [pages,slots,G,D]."""
    return PagedKeys(table, skipped).gathered(x.transpose(1, 2))[:, :, :count]
