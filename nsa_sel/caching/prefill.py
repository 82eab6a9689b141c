"""Attend many new tokens with the prefill kernels, after gathering the keys from their pages into contiguous tensors.

The kernels that read pages process each row separately, which suits a few new tokens. Prefill kernels share loads
between rows and require sequences of one length.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_sel.attention import selection_attention
from nsa_sel.caching.pools import CacheScales, Pools, dequantized
from nsa_sel.caching.step_tensors import StepSizes, StepTensors
from nsa_sel.compressed import compressed_attention
from nsa_sel.core.call import PagedKeys, Rule
from nsa_sel.quantize import as_bytes
from nsa_sel.window import sliding_window_attention

MIN_ROWS = 64  # per sequence, from which gathering is faster


class PrefillLengths(NamedTuple):
    """The common lengths of sequences of one length."""

    keys: int
    recent_keys: int  # keys in the pages of recent keys


def branches(
    q: Tensor, q_cmp: Tensor, pools: Pools, tensors: StepTensors, sizes: StepSizes, lengths: PrefillLengths, rule: Rule,
    backend: str | None, scales: CacheScales | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the compressed, selected and window branches [B,S,G,h,Dv] of the last rows of sequences of one length.

    Args:
        q, q_cmp: [B,S,G,h,Dk], queries with and without rotary positions.
        pools, tensors, sizes: a layer's pages, which hold the new keys already, and the step.
        lengths: of every sequence.
        rule, backend: the layer's.
        scales: of quantized pages. Their keys are converted to q's dtype, so results do not depend on how a prompt is
            chunked.
    """
    k, v = (_gathered(x, tensors.table, sizes.covered_pieces - 1, rule.compressed_keys(lengths.keys)) for x in pools[2:4])
    o_cmp, blocks = compressed_attention(q_cmp, k, v, **rule._asdict(), S_kv=lengths.keys)
    k_v_scales, window_scales = (None, None) if scales is None else (scales[:2], scales[2:])
    k, v = _dequantized(pools[:2], k_v_scales, tensors.table, lengths.keys, q)
    o_slc = selection_attention(q, k, v, blocks, backend=backend)
    k, v = _dequantized(pools[4:6], window_scales, tensors.recent_table, lengths.recent_keys, q)
    return o_cmp, o_slc, sliding_window_attention(q, k, v, sizes.window)


def _dequantized(pools: tuple[Tensor, ...], scales: tuple[Tensor, ...] | None, table: Tensor, count: int, q: Tensor) -> list[Tensor]:
    """Return the first `count` keys and values of pools that may be quantized, in q's dtype."""
    gathered = [_gathered(as_bytes(x), table, 0, count).view(x.dtype) for x in pools]
    return gathered if scales is None else [dequantized(x, scale, q.dtype) for x, scale in zip(gathered, scales, strict=True)]


def _gathered(x: Tensor, table: Tensor, skipped: int, count: int) -> Tensor:
    """Return `count` keys [B,G,count,D] of pages x [pages,page_size,G,D], after the first `skipped`."""
    return PagedKeys(table, skipped).gathered(x.transpose(1, 2))[:, :, :count]
