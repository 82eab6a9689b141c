"""cuda-block: triton-block, whose backward visits every KV block by TMA and wgmma on Hopper (kernels/block_gradients.cu).

Units, lists, sums and the forward pass are triton-block's; so is the backward of calls that the kernel does not take (`takes`). Blocks are
visited as tiles of 64 keys. NaN as there.
"""

from __future__ import annotations

from torch import Tensor

from nsa_sel.backends import triton_block
from nsa_sel.backends._common import backward_of_any_scale, known
from nsa_sel.backends._triton.dkdv import Gradients
from nsa_sel.backends._triton.key_to_rows import KeyToRows
from nsa_sel.backends._triton.units import Unit
from nsa_sel.backends.cupy_cuda import launch, sm90
from nsa_sel.backends.cupy_cuda.compiler import Constants
from nsa_sel.backends.specs import HOPPER_LISTS
from nsa_sel.backends.triton_block import forward, loaded_keys
from nsa_sel.core.call import Call

__all__ = ["backward", "forward", "loaded_keys"]


@backward_of_any_scale
def backward(call: Call, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from one visit of every KV block, and a sum over each row's ranges."""
    if not takes(call):
        return triton_block.backward(call, o, lse, do, dlse)
    do = sm90.loadable(do)  # autograd expands a constant
    macros, shared = _constants(call)
    maps, ranges = sm90.listed_maps(*map(sm90.loadable, (call.q, do, call.k, call.v))), call.disjoint_ranges()

    def visit(plan: KeyToRows, unit: Unit, delta: Tensor, sums: Gradients, part_dq: Tensor) -> None:
        ctas = plan.pieces + unit.lists.end_list - unit.lists.first_list
        launch.start(
            "block_gradients.cu", macros, call.q.get_device(), ctas, 256, shared,
            *launch.strided(do), *launch.pointers(lse, delta, plan.entries, plan.ends), plan.ends.element_size(), plan.reach, sums.by_entry,
            *unit.lists, *launch.pointers(sums.part_dk, sums.part_dv, part_dq),
            maps=maps, problem=launch.problem(call, ranges),
        )  # fmt: skip

    return triton_block.backward_by_blocks(call, o, lse, do, dlse, sm90.KEYS, visit)


@known
def takes(call: Call) -> bool:
    """Whether block_gradients.cu computes this call."""
    (h, Dk), Dv = call.q.shape[3:], call.v.shape[3]
    fits = HOPPER_LISTS.fits_few(h, Dk, Dv, call.selection.block_size)
    return fits and call.device.sm == HOPPER_LISTS.sm and launch.aligned(call.q, call.k, call.v)


@known
def _constants(call: Call) -> tuple[Constants, int]:
    """Constants of block_gradients.cu, and its bytes of dynamic shared memory: that of dkdv_groups.cu, and a tile of ds."""
    Dk, Dv = call.q.shape[4], call.v.shape[3]
    stages, shared = sm90.group_stages(Dk, Dv, call.device, sm90.PANEL)
    return launch.macros(call, H=call.q.shape[3], STAGES=stages), shared
