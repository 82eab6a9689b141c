"""Parts of bench/questions/layer_parts.py with the selection of a text: what a model chose there, in place of what random inputs choose."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nsa_sel import by_groups
from nsa_sel.attention import selection_attention
from nsa_sel.bench.core.cases import make_selection, text_case
from nsa_sel.core.call import Rule
from nsa_sel.core.check import check_scale
from nsa_sel.selection import Selection
from nsa_sel.three_branches import Inputs as Given
from nsa_sel.three_branches import Options

BLOCK, WINDOW = 64, 512
Part = tuple[Callable[[], Tensor], tuple[Tensor, ...]]  # what is timed, and the inputs that get gradients
Inputs = Callable[[], tuple[Tensor, ...]]


def text_parts(S: int, h: int, branch: Inputs, layer: Inputs) -> dict[str, Callable[[], Part]]:
    """ "select of text" and "layer of text" of S rows; none where bench/data has no text of this length.

    Args:
        S: rows.
        h: heads of a group.
        branch: makes q, k and v of one branch.
        layer: makes q, keys and values of the three branches, and the gates, as `nsa_attention` takes them.
    """
    case = text_case(S, h)
    if case is None:
        return {}

    def blocks(like: Tensor) -> Tensor:
        return make_selection(case, like.device).block_indices

    def select() -> Part:
        q, k, v = branch()
        chosen = blocks(q)
        return lambda: selection_attention(q, k, v, Selection.from_blocks(chosen, BLOCK, disjoint=True)), (q, k, v)

    def whole() -> Part:
        inputs = layer()
        chosen = blocks(inputs[0])
        return lambda: layer_with(chosen, *inputs), inputs

    return {"select of text": select, "layer of text": whole}


def layer_with(
    blocks: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor, gates: Tensor
) -> Tensor:
    """`nsa_attention`, which chooses blocks as ever, but attends to others.

    Args:
        blocks: [B,S,G,n] indices of blocks of `BLOCK` keys, -1 for padding, that the selected branch attends to.
        q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates: as of `nsa_attention`.

    Returns:
        [B,S,G,h,Dv].
    """
    inputs = Given(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, None, blocks)
    return by_groups.attention(inputs, Options(WINDOW, Rule(n=blocks.shape[-1]), check_scale(None, q.shape[4]), None))
