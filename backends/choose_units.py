"""Attention to compressed keys by PyTorch's own causal attention, for a whole sequence at once (S = S_kv).

With l = compress_block and d = compress_stride, the d rows at l - 1 + d u, ..., l - 2 + d (u + 1) see exactly the keys 0 .. u: they are
unit u. The rows with the same offset in their units form a sequence that sees key u from row u on, which is square causal attention: a
batch of d such sequences, views of q, over the same keys. The rows of the last unit, where it is not full, see all keys; rows before
l - 1 see none.

Heads of a group share keys (GQA). There is no gradient of lse: PyTorch's backward passes take none. As in other fused kernels a NaN in
a key may reach rows that do not see it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

aten = torch.ops.aten


class Fused(NamedTuple):
    """A fused attention of PyTorch over [batch, heads, rows, D] and [batch, groups, keys, D]."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    one_width: bool  # keys and values have the same number of columns
    one_group: bool  # every head has keys of its own
    lse_dims: int


FUSED = {
    "cpu": Fused(
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        one_width=True, one_group=True, lse_dims=3,
    ),
    "flash": Fused(
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_backward.default,
        one_width=True, one_group=False, lse_dims=3,
    ),
    "cudnn": Fused(
        aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_cudnn_attention_backward.default,
        one_width=False, one_group=False, lse_dims=4,
    ),
}  # fmt: skip


class Part(NamedTuple):
    """Rows of one sequence that one call of a fused attention takes: `offsets` sequences of every offsets-th row from `first` on."""

    first: int
    offsets: int
    rows: int  # of each sequence
    keys: int
    causal: bool

    def view(self, x: Tensor) -> Tensor:
        """[offsets, G * h, rows, ...] of x [S, G, h, ...], a view."""
        x = x[self.first : self.first + self.offsets * self.rows]
        return x.reshape(self.rows, self.offsets, x.shape[1] * x.shape[2], *x.shape[3:]).movedim(0, 2)

    def keys_view(self, x: Tensor) -> Tensor:
        """[offsets, G, keys, D] of x [G, C, D]."""
        return x[:, : self.keys].expand(self.offsets, x.shape[0], self.keys, x.shape[2])


def parts(S: int, l: int, d: int) -> list[Part]:
    """All rows that see a key: full units, and the rows of the last one."""
    units, rest = divmod(max(0, S - l + 1), d)
    full = Part(l - 1, d, units, units, causal=True)
    tail = Part(l - 1 + d * units, 1, rest, units + 1, causal=False)
    return [part for part in (full, tail) if part.rows]


def attention_by_units(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, l: int, d: int, scale: float, kernel: str | None = None
) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,Dv] in q's dtype and lse [B,S,G,h] in float32 (float64 for float64 inputs); rows that see nothing give 0 and -inf.

    Args:
        q: [B,S,G,h,Dk]; on a GPU in float16 or bfloat16. Heads are adjacent: no copy is made.
        k_cmp: [B,G,C,Dk], C = (S - l) // d + 1, or 0.
        v_cmp: [B,G,C,Dv].
        l, d: keys that a compressed key covers, and from one to the next; l is a multiple of d.
        scale: factor of the logits, positive.
        kernel: "cudnn" (the default on a GPU), "flash", or "cpu".
    """
    B, S, G, h, _ = q.shape
    fused = _fused(q, kernel)
    o = q.new_empty(B, S, G, h, v_cmp.shape[3])
    lse = q.new_empty(B, S, G, h, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    o[:, : l - 1] = 0.0
    lse[:, : l - 1] = -torch.inf
    for b in range(B):
        for part in parts(S, l, d):
            rows = (part.view(q[b]), part.keys_view(k_cmp[b]), part.keys_view(v_cmp[b]))
            part_o, part_lse, *_ = _run_forward(fused, *_fitted(fused, *rows), part.causal, scale)
            part.view(o[b]).copy_(part_o[..., : o.shape[4]])
            part.view(lse[b]).copy_(part_lse.reshape(part_lse.shape[:3]))
    return o, lse


def attention_by_units_backward(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, o: Tensor, lse: Tensor, do: Tensor, l: int, d: int, scale: float, kernel: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk_cmp and dv_cmp for the gradient do of o; o and lse as of `attention_by_units`. dk and dv are summed over offsets in
    float32, in a fixed order."""
    fused = _fused(q, kernel)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dq[:, : l - 1] = 0.0
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k_cmp, v_cmp))
    for b in range(q.shape[0]):
        for part in parts(q.shape[1], l, d):
            rows = _fitted(fused, part.view(q[b]), part.keys_view(k_cmp[b]), part.keys_view(v_cmp[b]))
            part_lse = part.view(lse[b]).contiguous()
            part_lse = part_lse if fused.lse_dims == 3 else part_lse.unsqueeze(-1)
            part_do, part_o = (_widened(part.view(x[b]), rows[2].shape[3]) for x in (do, o))
            part_dq, part_dk, part_dv = _run_backward(fused, rows, part_do, part_o, part_lse, part.causal, scale)
            part.view(dq[b]).copy_(part_dq[..., : dq.shape[4]])
            for total, x in ((dk, part_dk), (dv, part_dv)):
                heads = x.reshape(part.offsets, total.shape[1], -1, *x.shape[2:])
                total[b, :, : part.keys] += heads.sum((0, 2), dtype=total.dtype)[..., : total.shape[3]]
    return dq, dk.to(k_cmp.dtype), dv.to(v_cmp.dtype)


def _fused(q: Tensor, kernel: str | None) -> Fused:
    return FUSED[kernel or ("cudnn" if q.is_cuda else "cpu")]


def _fitted(fused: Fused, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as the attention takes them: columns of zeros where widths must be equal, copies of keys for every head."""
    if fused.one_width:
        width = max(q.shape[3], v.shape[3])
        q, k, v = (_widened(x, width) for x in (q, k, v))
    if fused.one_group:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return q, k, v


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[3] == width else pad(x, (0, width - x.shape[3]))


def _run_forward(fused: Fused, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Any:
    if fused is FUSED["cudnn"]:
        return fused.forward(q, k, v, None, True, 0.0, causal, scale=scale)
    return fused.forward(q, k, v, 0.0, causal, scale=scale)


def _run_backward(
    fused: Fused, rows: tuple[Tensor, Tensor, Tensor], do: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = rows
    found: tuple[Tensor, Tensor, Tensor]
    if fused is FUSED["cpu"]:
        found = fused.backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)
        return found
    seed = torch.zeros(2, dtype=torch.int64, device=q.device).view(torch.uint64)  # of dropout, of which there is none
    lengths = None, None, q.shape[2], k.shape[2]
    if fused is FUSED["cudnn"]:
        found = fused.backward(do, q, k, v, o, lse, seed[0], seed[1], None, *lengths, 0.0, causal, scale=scale)
    else:
        found = fused.backward(do, q, k, v, o, lse, *lengths, 0.0, causal, seed, seed[:0], scale=scale)
    return found
