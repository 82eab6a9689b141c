"""cupy-cuda: CUDA C++ kernels compiled at run time by NVRTC through CuPy, on torch's stream and torch's memory.

This file picks the kernel of a call. sm80.py launches the kernels for all GPUs; sm90.py, whole_blocks.py and
few_tokens.py launch those for Hopper; packed.py launches them for packed batches; cuda_block.py is the backend
cuda-block; key_to_rows.py builds the lists of rows for dk and dv. compiler.py compiles kernels/*.cu, launch.py launches
them, tensor_map.py encodes TMA tensor maps. CuPy is imported when a kernel is first compiled or loaded.
"""

from __future__ import annotations

from torch import Tensor

from nsa_sel.backends._loads import union_keys
from nsa_sel.backends.cupy_cuda import few_tokens, packed, sm80, sm90, whole_blocks
from nsa_sel.backends.launcher.passes import backward_of_any_scale, forward_of_any_scale
from nsa_sel.core.call import Call

__all__ = ["backward", "backward_and_delta", "forward", "loaded_keys"]


@forward_of_any_scale
def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return o [B,S,G,h,Dv] and lse [B,S,G,h], on Hopper by tiles of tokens or by whole blocks if the call allows, else
    row by row.

    All kernels read a cache's lengths and block table. Row kernels gather from pages of any size; tile and block
    kernels need pages of whole steps.
    """
    if packed.supports(call):
        return packed.forward(call)
    if call.scales is not None:
        return few_tokens.forward_e4m3(call) if few_tokens.supports_e4m3(call) else whole_blocks.forward(call)
    if sm90.supports_tiles(call):
        return sm90.forward_tiles(call)
    if few_tokens.supports(call):
        return few_tokens.forward(call)
    if whole_blocks.supports(call):
        return whole_blocks.forward(call)
    return sm80.forward_rows(call)


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv with the shapes and dtypes of q, k, v."""
    dq, dk, dv, _ = _backward(call, o, lse, do, dlse)
    return dq, dk, dv


@backward_of_any_scale
def backward_and_delta(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `backward` and delta [B,S,G,h]. delta may be workspace memory, valid until the call's next
    pass."""
    return _backward(call, o, lse, do, dlse)


def _backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, lse = o.contiguous(), lse.contiguous()
    if sm90.supports_tiles(call, do):
        dq, delta = sm90.dq_tiles(call, o, lse, do, dlse)
        return dq, *sm90.dkdv_groups(call, lse, do, delta), delta
    ranges = call.disjoint_ranges()
    dq, delta = sm80.dq_rows(call, ranges, o, lse, do, dlse)
    return dq, *sm80.dkdv_tiles(call, ranges, lse, do, delta), delta


def loaded_keys(call: Call, selected: int, count: bool) -> int:
    """Return how many keys the forward loads: the union of each tile's rows, or each row's keys once for up to 64
    heads.

    Without `count`, return an upper bound.
    """
    if count and few_tokens.supports_e4m3(call):
        return union_keys(call, few_tokens.tile_tokens(call.q.shape[1], call.q.shape[3]))
    count = count and call.scales is None
    if count and sm90.supports_tiles(call):
        return sm90.loaded_keys(call)
    if count and few_tokens.supports(call):
        return union_keys(call, call.q.shape[1])
    return selected * -(-call.q.shape[3] // 64)
