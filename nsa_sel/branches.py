"""NSA's attention as one call: compressed keys choose blocks, the blocks and a sliding window are attended to, gates
add the three."""

from __future__ import annotations

from torch import Tensor

from nsa_sel import three_branches
from nsa_sel.choosing import compressed_attention
from nsa_sel.core import transforms
from nsa_sel.core.arguments import Bounds, CuSeqlens, check_flag, check_positive, check_tensors
from nsa_sel.core.call import Rule
from nsa_sel.core.check import check_choose, check_scale, check_sizes
from nsa_sel.core.packed import as_batch, check_longest, check_packed_choose, check_packed_sizes, check_rows_are_keys, packed_attention
from nsa_sel.errors import ArgumentError, renamed
from nsa_sel.gating import gated_sum
from nsa_sel.three_branches import Inputs, Options
from nsa_sel.window import sliding_window_attention

Pair = tuple[Tensor, Tensor]  # keys and values of a branch


def nsa_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_slc: Tensor, v_slc: Tensor, k_win: Tensor, v_win: Tensor,
    gates: Tensor, *, window: int = 512, compress_block: int = 32, compress_stride: int = 16, block_size: int = 64,
    n: int = 16, first: int = 1, local: int = 2, scale: float | None = None, q_cmp: Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None, max_seqlen: int | None = None, backend: str | None = None,
    recompute: bool = False,
) -> Tensor:  # fmt: skip
    """Native Sparse Attention (arXiv 2502.11089, Eq. 5): o = g_cmp o_cmp + g_slc o_slc + g_win o_win.

    The compressed branch attends to compressed keys and chooses n blocks per row (`compressed_attention`), the selected
    branch attends to these blocks in full (`selection_attention`), the window to the last keys. Row s is at position
    S_kv - S + s, and no branch reads a key beyond it; with S < S_kv the rows are the last of the sequence (chunked
    prefill).

    Differentiable in all tensors; there is no gradient through the choice of blocks. Bit-equal from run to run. The
    gated sum is one fused pass on a GPU, and saves nothing but the three outputs and the gates.

    Args:
        q: [B,S,G,h,Dk]: G KV groups of h heads. float16, bfloat16, float32 or float64; keys and values likewise, of the
            same dtype and device; any strides with a contiguous last dimension.
        k_cmp: [B,G,C,Dk], compressed keys of all S_kv keys: C = (S_kv - compress_block) // compress_stride + 1, or 0.
        v_cmp: [B,G,C,Dv].
        k_slc: [B,G,S_kv,Dk], keys of the selected branch.
        v_slc: [B,G,S_kv,Dv].
        k_win: [B,G,S_kv,Dk], keys of the window.
        v_win: [B,G,S_kv,Dv].
        gates: [B,S,G,h,3] in [0, 1] (after the sigmoid) for the compressed, the selected and the window branch; any
            floating dtype. In bfloat16 a negative gate makes gradients NaN.
        window: keys that a row sees in the window, its own among them.
        compress_block, compress_stride, block_size, n, first, local, max_seqlen: as of `compressed_attention`.
        scale: factor of the logits of all branches, by default 1/sqrt(Dk).
        q_cmp: [B,S,G,h,Dk], queries of the compressed branch where they differ from q, for example without rotary
            positions.
        cu_seqlens: for a packed batch (docs/varlen.md): [N+1] int32 or int64 on the CPU or on q's device, or a list;
            sequence i has the rows, which are also its keys, [cu_seqlens[i], cu_seqlens[i+1]). q and q_cmp are then
            [T,G,h,Dk], gates [T,G,h,3], keys and values of the selected branch and of the window [T,G,D], k_cmp and
            v_cmp [C,G,D]. Bounds on a GPU are not checked.
        backend: the name of a backend to force for the selected branch; `use_backend` forces one for the compressed
            branch.
        recompute: save the inputs alone for the backward pass, which computes the branches again, a few groups at a
            time: less memory for the time of another forward pass (docs/layer.md "Memory"). The result and the
            gradients are the same.

    Returns:
        o [B,S,G,h,Dv] in q's dtype (under torch.autocast in its dtype); of a packed batch [T,G,h,Dv], 0 after the last
        sequence.

    Raises:
        ArgumentError: bad input, before any kernel runs.
        BackendError: as `compressed_attention` and `selection_attention`.
    """
    check_flag("recompute", recompute)
    q_cmp = q if q_cmp is None else q_cmp
    check_tensors(q=q, k_cmp=k_cmp, v_cmp=v_cmp, k_slc=k_slc, v_slc=v_slc, k_win=k_win, v_win=v_win, gates=gates, q_cmp=q_cmp)
    check_longest(max_seqlen, cu_seqlens)
    if cu_seqlens is not None:
        if recompute:
            raise ArgumentError("recompute", "True with cu_seqlens", "False there", "wrap the call in torch.utils.checkpoint")
        check_packed_sizes(q=q, k_slc=k_slc, v_slc=v_slc)
        check_packed_sizes(q=q, k_win=k_win, v_win=v_win)
        check_packed_sizes(q_cmp=q_cmp, k_cmp=k_cmp, v_cmp=v_cmp)
        check_rows_are_keys(q, "k_slc", k_slc)
    own = q_cmp is q
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = transforms.in_autocast_dtype(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    q_cmp = q if own else transforms.in_autocast_dtype(q_cmp)[0]
    rule = Rule(compress_block, compress_stride, block_size, n, first, local)
    if cu_seqlens is None:
        check_branches(q, q_cmp, (v_cmp, v_slc, v_win), (k_slc, k_win), gates, window)
        scale = check_scale(scale, q.shape[4])
        check_choose(q_cmp, k_cmp, v_cmp, rule, scale, None, k_slc.shape[2], fake=True)
        inputs = Inputs(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, None if own else q_cmp)
        return three_branches.attention(inputs, Options(window, rule, scale, backend), recompute)
    pairs = (k_cmp, v_cmp), (k_slc, v_slc), (k_win, v_win)
    return _attend_packed(q, None if own else q_cmp, *pairs, gates, window, scale, rule, backend, cu_seqlens, max_seqlen)


def _attend_packed(
    q: Tensor, q_cmp: Tensor | None, cmp: Pair, slc: Pair, win: Pair, gates: Tensor, window: int, scale: float | None, rule: Rule,
    backend: str | None, cu_seqlens: CuSeqlens, max_seqlen: int | None,
) -> Tensor:  # fmt: skip
    own = q if q_cmp is None else q_cmp
    rows, v_cmp, k_slc, v_slc, k_win, v_win = as_batch(q, cmp[1], *slc, *win)
    check_branches(rows, own.unsqueeze(0), (v_cmp, v_slc, v_win), (k_slc, k_win), gates, window, packed=True)
    if not transforms.traces(q, own, *cmp, *slc, *win, gates):
        of_cmp, k_cmp, v_cmp, scale, bounds = check_packed_choose(own, *cmp, rule, scale, None, None, cu_seqlens, max_seqlen)
        q_cmp, gates = None if q_cmp is None else of_cmp, bounds.zero_padding(gates).unsqueeze(0)
        inputs = Inputs(rows, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, q_cmp)
        return three_branches.attention(inputs, Options(window, rule, scale, backend, bounds)).squeeze(0)
    scale = check_scale(scale, q.shape[3])
    compressed, selection = compressed_attention(own, *cmp, **rule.options(), scale=scale, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    selected = packed_attention(
        q, *slc, selection, cu_seqlens, None, scale=scale, return_lse=False, backend=backend, block_aligned=False, align=None
    )  # fmt: skip
    near = sliding_window_attention(q, *win, window, scale=scale, cu_seqlens=cu_seqlens)
    gates = Bounds.of("cu_seqlens", cu_seqlens, len(q), q).zero_padding(gates)
    compressed, selected, near, gates = (x.unsqueeze(0) for x in (compressed, selected, near, gates))
    return gated_sum(compressed, selected, near, gates).squeeze(0)


def check_branches(
    q: Tensor, q_cmp: Tensor, values: tuple[Tensor, Tensor, Tensor], keys: tuple[Tensor, Tensor], gates: Tensor, window: int,
    packed: bool = False,
) -> None:  # fmt: skip
    """Check the arguments of the selected branch, the window and the gates, and q_cmp against q."""
    if q.dim() != 5:
        raise ArgumentError(
            "q",
            f"of shape {tuple(q.shape)}",
            "[B,S,G,h,Dk]; decode has S = 1",
            "split the heads into G groups of h; for decode call q.unsqueeze(1)",
        )
    v_cmp, v_slc, v_win = values
    for name, k, v in (("slc", keys[0], v_slc), ("win", keys[1], v_win)):
        try:
            check_sizes(q, k, v)
        except ArgumentError as error:
            raise renamed(error, k=f"k_{name}", v=f"v_{name}") from None
    if q_cmp.shape != q.shape or q_cmp.dtype != q.dtype:
        raise ArgumentError(
            "q_cmp",
            f"{q_cmp.dtype} of shape {tuple(q_cmp.shape)}",
            f"{q.dtype} of q's shape {tuple(q.shape)}",
            "project both from the same tokens, or leave it out",
        )
    S, S_kv = q.shape[1], keys[0].shape[2]
    if keys[1].shape[2] != S_kv:
        raise ArgumentError("k_win", f"of {keys[1].shape[2]} positions", f"k_slc's {S_kv} positions", "pass all keys of the sequence")
    if S > S_kv:
        raise ArgumentError("q", f"of S = {S} rows", f"at most S_kv = {S_kv} rows", "pass the keys of all rows, and of those before them")
    for name, v in (("v_cmp", v_cmp), ("v_win", v_win)):
        if v.shape[-1:] != v_slc.shape[-1:]:
            raise ArgumentError(
                name,
                f"of head dimension {v.shape[-1]}" if v.dim() else "a single number",
                f"v_slc's head dimension {v_slc.shape[-1]}",
                "project the values of all branches to the same size: the gates add them",
            )
    rows = "T" if packed else "B,S"
    wanted = (*q.shape[packed:4], 3)
    if gates.shape != wanted:
        raise ArgumentError(
            "gates",
            f"of shape {tuple(gates.shape)}",
            f"[{rows},G,h,3] = {wanted}",
            "pass one gate per head for the compressed, the selected and the window branch, in this order",
        )
    if not gates.is_floating_point():
        raise ArgumentError("gates", f"of dtype {gates.dtype}", "a floating dtype", "pass the sigmoid of a projection")
    if gates.device != q.device:
        raise ArgumentError("gates", f"on {gates.device}", f"q's device {q.device}", f"call gates.to({q.device.type!r})")
    check_positive("window", window)
