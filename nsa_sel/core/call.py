"""One checked call, as backends receive it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nsa_sel.core.request import DeviceInfo
from nsa_sel.core.transforms import capturing
from nsa_sel.core.workspace import Workspace
from nsa_sel.quantize import Scales
from nsa_sel.selection import Selection
from nsa_sel.settings.schema import Settings

CPU = DeviceInfo(kind="cpu")
LOG2_E = math.log2(math.e)
REPEATED = "repeated"  # a key of `Call.known` once a second call shares it
DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32", torch.float64: "float64"}


def positions(q: Tensor, S_kv: int, q_pos: Tensor | None, lengths: Tensor | None) -> Tensor:
    """`Call.positions` of a call's arguments."""
    B, S = q.shape[:2]
    if q_pos is not None:
        return q_pos.long()
    if lengths is not None:
        return lengths.long().unsqueeze(1) + torch.arange(-S, 0, device=q.device)
    return torch.arange(S_kv - S, S_kv, device=q.device).expand(B, S)


@dataclass(slots=True, eq=False)  # treated as immutable; frozen=True costs 1 us per construction
class Call:
    """The checked arguments of one call, and the settings and device that its decision was made with.

    Attributes:
        q: [B,S,G,h,Dk]; float16, bfloat16, float32 or float64, with a contiguous last dimension; k and v likewise.
        k: [B,G,S_kv,Dk], or pages [pages,G,page_size,Dk]; of dtype float8_e4m3fn with `scales`, and v likewise.
        v: [B,G,S_kv,Dv], or pages [pages,G,page_size,Dv].
        selection: over the rows [B,S,G].
        q_pos: [B,S] int32 or int64, positions of the rows; None for S_kv - S + s.
        scale: factor of the logits.
        settings: of the decision.
        device: of the decision.
        lengths: [B] int32 or int64, keys of each cached sequence (nsa_sel/serving.py): row s is at lengths - S + s.
        block_table: [B, pages of a sequence] int32, the pages of each sequence in a paged cache.
        workspace: memory for temporaries, if the user passed one.
        scales: of a quantized cache, None for k and v of q's dtype. Without gradients.
        known: what follows from the shapes, strides, alignment and settings alone, by whoever found it; calls in which they are the same
            share it (core/repeat.py). `replace` makes a call that knows nothing.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    selection: Selection
    q_pos: Tensor | None
    scale: float
    settings: Settings
    device: DeviceInfo = CPU
    lengths: Tensor | None = None
    block_table: Tensor | None = None
    workspace: Workspace | None = None
    scales: Scales | None = None
    known: dict[Any, Any] = field(default_factory=dict, init=False)
    _capturing: bool | None = field(default=None, init=False)
    _disjoint: Tensor | None = field(default=None, init=False)  # the disjoint ranges of a capture, or of inference mode
    problem: tuple[Any, Any] | None = field(default=None, init=False)  # of ranges: what a backend's kernels all take (cupy_cuda/launch.py)

    def others(self) -> tuple[Any, ...]:
        """The arguments that follow q, k and v: what a backward pass keeps outside of autograd's saved tensors."""
        return self.selection, self.q_pos, self.scale, self.settings, self.device, self.lengths, self.block_table, self.workspace

    @property
    def S_kv(self) -> int:
        """Keys that a sequence has room for."""
        return self.k.shape[2] if self.block_table is None else self.block_table.shape[1] * self.k.shape[2]

    def positions(self) -> Tensor:
        """The position of every query row, [B,S] int64; negative where a cached sequence is shorter than S."""
        return positions(self.q, self.S_kv, self.q_pos, self.lengths)

    def capturing(self) -> bool:
        """Whether a CUDA graph captures this call, so that nothing may wait for the device. Asked once: it takes 2 us."""
        if self._capturing is None:
            self._capturing = capturing(self.q)
        return self._capturing

    def disjoint_ranges(self) -> Tensor:
        """`Selection.disjoint_ranges`, which need not ask again whether a graph captures the call; found once where none is cached."""
        if not self.capturing() and not self.selection.ranges.is_inference():
            return self.selection.disjoint_ranges(False)
        if self._disjoint is None:
            self._disjoint = self.selection.disjoint_ranges(self._capturing)
        return self._disjoint

    def selects_nothing(self) -> bool:
        """Whether there are no rows, keys or ranges."""
        if REPEATED in self.known:  # calls without are not remembered
            return False
        if self.selection.n == 0 or self.q.numel() == 0 or self.k.numel() == 0:
            return True
        return self.block_table is not None and self.S_kv == 0

    def timed(self) -> bool:
        """Whether NSA_DEBUG_TIMING times this call."""
        return self.settings.debug_timing and not self.capturing()

    def scale_log2(self) -> float:
        """The factor from q.k to logits in base 2; never 0, which would turn a masked -inf into NaN."""
        return max(self.scale * LOG2_E, 1e-30)

    def with_positive_scale(self) -> Call:
        """The same logits from -q and -scale: kernels track the maximum of q.k, which must be that of the logits."""
        return replace(self, q=-self.q, scale=-self.scale)

    def reach(self, width: int) -> int:
        """The most tiles of `width` keys that one range can overlap."""
        block, S_kv = self.selection.block_size, self.k.shape[2]
        if block is not None and (width % block == 0 or block % width == 0):
            return max(1, block // width)  # blocks and tiles are aligned to each other
        return min(-(-S_kv // width), -(-self.selection.range_bound(S_kv) // width) + 1)

    def tiles_of_block(self, width: int) -> int:
        """Tiles of `width` keys that make a block; 1 where blocks are not made of whole tiles. A row sees all of a block's tiles whole but
        the last that it sees, so that one list of rows may serve all of them."""
        block = self.selection.block_size
        return block // width if block is not None and block % width == 0 else 1

    def clamped_ranges(self) -> tuple[Tensor, Tensor]:
        """start, end [B,S,G,n] int64 after the causal clamp to [max(start, 0), min(end, t + 1, S_kv)); end >= start."""
        start, end = self.disjoint_ranges().long().unbind(-1)
        start = start.clamp(min=0)
        limit = (self.positions() + 1).clamp(max=self.S_kv)[:, :, None, None]
        return start, torch.maximum(torch.minimum(end, limit), start)
