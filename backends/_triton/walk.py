"""Walk keys with a tile of query rows, and add each step to the rows' sums: the loops that every tiled kernel shares.

A tile holds M (row, head) pairs of one batch entry and group. Kernels decide which keys a tile walks; a step is the
same for all of them. Forward (`grad` is None) and dq (`grad` is given) use the same walk:

    forward    sums = (acc [M, BLOCK_DV], l [M], m [M])                      the online softmax (softmax.py)
    dq         sums = (acc [M, BLOCK_D], rest [M, BLOCK_REST]), dq / scale   acc += ds k
    dk, dv     the transposed step, for a tile of keys and rows [M]          dk += ds^T q, dv += p^T do

    q          (q [M, BLOCK_D], q_rest [M, BLOCK_REST]), two column tiles (tiles.load_split)
    grad       (do [M, BLOCK_DV], base-2 lse [M], delta [M]), or None
    kv         (k [BLOCK_L, BLOCK_D], k_rest [BLOCK_L, BLOCK_REST], v [BLOCK_L, BLOCK_DV])

A row sees the keys [low, high). Within a tile 0 * NaN is NaN: a NaN or infinity in a key or value that one row sees may
reach the tile's other rows. Keys that no row of the tile sees are not loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_sel.backends._triton.softmax import LOWEST, add_product, chosen_step, p_and_ds, split_products
from nsa_sel.backends._triton.tiles import load_columns, load_kv, load_split, load_whole, row_pointers, store_columns, store_split


@triton.jit
def empty_sums(M: tl.constexpr, WIDTH: tl.constexpr, dtype: tl.constexpr):
    """Return the sums of a forward tile that has seen no key."""
    acc = tl.zeros([M, WIDTH], dtype)
    l = tl.zeros([M], dtype)
    m = tl.full([M], LOWEST, dtype)
    return acc, l, m


@triton.jit
def empty_dq(M: tl.constexpr, dims: tl.constexpr, dtype: tl.constexpr):
    """Return the sums of a dq tile: zeros."""
    BLOCK_D: tl.constexpr = dims.BLOCK_D
    REST: tl.constexpr = dims.BLOCK_REST
    acc = tl.zeros([M, BLOCK_D], dtype)
    return acc, tl.zeros([M, REST], dtype) if REST > 0 else acc


@triton.jit
def add_step(sums, grad, logits, kv, c, REST: tl.constexpr, seen=None, chosen=None, STRICT: tl.constexpr = False):
    """Add one step of keys to the sums, from logits = q k^T [M, BLOCK_L].

    Args:
        c: scale * log2 e.
        seen: [M, BLOCK_L], which keys each row sees; None if all, or if the logits of the others are -inf.
        chosen: [M], or one bool, which rows take part in the step at all; None if all.
        STRICT: a NaN in a value does not reach the dq of rows that do not see it; costs a select per element.
    """
    k_tile, k_rest, v_tile = kv
    if grad is None:
        acc, l, m = sums
        if seen is not None:
            logits = tl.where(seen, logits, float("-inf"))
        return chosen_step(logits, True if chosen is None else chosen, v_tile, acc, l, m, c)
    else:
        acc, rest = sums
        do_tile, lse2, delta = grad
        if chosen is not None:  # p = 2^(logit - inf) = 0
            lse2 = tl.where(chosen, lse2, float("inf"))
        _, ds = p_and_ds(logits, do_tile, v_tile, lse2, delta, c, seen)  # [M, BLOCK_L]
        if STRICT:
            ds = tl.where(seen, ds, 0.0)
        ds = ds.to(k_tile.dtype)
        acc = add_product(acc, ds, k_tile)
        if REST > 0:
            rest = add_product(rest, ds, k_rest)
        return acc, rest


@triton.jit
def add_whole_steps(
    sums, q, grad, descs, k, v, strides, b, g, offset, first, stop, low, high, begun, c,
    dims: tl.constexpr, BLOCK_L: tl.constexpr, FROM_LOW: tl.constexpr,
):  # fmt: skip
    """Add the keys [first, stop), all of which exist, in whole steps of BLOCK_L.

    Args:
        descs: TMA descriptors of k, k_rest and v, each None for pointer loads.
        offset: index of key 0 in k and v.
        low, high, begun: if FROM_LOW, rows may see only a part of the steps that begin before key `begun`.
    """
    k_desc, k_rest_desc, v_desc = descs
    for at in range(first, stop, BLOCK_L):
        kv = load_whole(k_desc, k_rest_desc, v_desc, k, v, strides, b, g, offset + at, dims, BLOCK_L)
        logits = split_products(q[0], q[1], kv[0], kv[1], dims.BLOCK_REST)  # [M, BLOCK_L]
        if FROM_LOW:  # noqa: SIM102 - a constant, then a number
            if at < begun:
                logits = within(logits, low, high, at + tl.arange(0, BLOCK_L))
        sums = add_step(sums, grad, logits, kv, c, dims.BLOCK_REST)
    return sums


@triton.jit
def add_cut_steps(
    sums, q, grad, k, v, strides, b, g, offset, first, stop, low, high, c,
    dims: tl.constexpr, BLOCK_L: tl.constexpr, FROM_LOW: tl.constexpr, STRICT: tl.constexpr = False,
):  # fmt: skip
    """Add the keys [first, stop) in steps of BLOCK_L under a mask, through pointers; the last step may be shorter.

    A row sees the keys before `high` [M], and if FROM_LOW only those from `low` [M] on. STRICT: see `add_step`.
    """
    for at in range(first, stop, BLOCK_L):
        key = at + tl.arange(0, BLOCK_L)
        kv = load_kv(k, v, strides, b, g, offset + key, key < stop, dims)
        logits = split_products(q[0], q[1], kv[0], kv[1], dims.BLOCK_REST)  # [M, BLOCK_L]
        if FROM_LOW:
            sums = add_step(sums, grad, within(logits, low, high, key), kv, c, dims.BLOCK_REST)
        else:
            sums = add_step(sums, grad, logits, kv, c, dims.BLOCK_REST, key[None, :] < high[:, None], None, STRICT)
    return sums


@triton.jit
def within(logits, low, high, key):
    """Return logits [M, BLOCK_L] with -inf where a row does not see a key, because it is not in [low, high)."""
    return tl.where((key[None, :] >= low[:, None]) & (key[None, :] < high[:, None]), logits, float("-inf"))


@triton.jit
def store_dq(rows, sums, scale, has_keys, exists, dims: tl.constexpr):
    """Store dq = scale * sums at pointers `rows` [M].

    has_keys: [M], or None if all rows see a key. A row without keys has p = 0, but a NaN or infinity in its q, do or
    dlse turns 0 * NaN into NaN: it gets zeros.
    """
    acc, rest = sums[0] * scale, sums[1] * scale
    if has_keys is not None:
        acc, rest = tl.where(has_keys[:, None], acc, 0.0), tl.where(has_keys[:, None], rest, 0.0)
    store_split(rows, acc, rest, exists, dims.Dk, dims.BLOCK_REST)


@triton.jit
def empty_dkdv(L: tl.constexpr, dims: tl.constexpr, dtype: tl.constexpr):
    """Return the sums of a tile of L keys: dk / scale in two column tiles, and dv."""
    BLOCK_DV: tl.constexpr = dims.BLOCK_DV
    dk, dk_rest = empty_dq(L, dims, dtype)
    return dk, dk_rest, tl.zeros([L, BLOCK_DV], dtype)


@triton.jit
def load_rows(
    q_desc, do_desc, q, do, strides, stride_do, b, g, first, s, head, exists, dims: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return q (two column tiles) and do of ROWS (row, head) pairs.

    Uses TMA, which loads whole rows from `first` on with all their heads, or pointers if q_desc is None.
    """
    if q_desc is not None:
        at = [b.to(tl.int32), first, g.to(tl.int32), 0, 0]
        q_tile = q_desc.load(at).reshape(ROWS, dims.BLOCK_D)
        return q_tile, q_tile, do_desc.load(at).reshape(ROWS, dims.BLOCK_DV)
    else:
        q_tile, q_rest = load_split(row_pointers(q, strides.q, b, g, s, head), exists, dims.Dk, dims.BLOCK_D, dims.BLOCK_REST)
        return q_tile, q_rest, load_columns(row_pointers(do, stride_do, b, g, s, head), exists, 0, dims.Dv, dims.BLOCK_DV)


@triton.jit
def add_rows_step(sums, p, ds, q, do_tile, REST: tl.constexpr, ROWS_FIRST: tl.constexpr = False):
    """Add one step of rows to the sums of a tile of keys: dk / scale in two column tiles, and dv.

    p, ds: [BLOCK_L, M], or if ROWS_FIRST [M, BLOCK_L], in the dtypes of do [M, BLOCK_DV] and q.
    """
    dk, dk_rest, dv = sums
    dv = add_product(dv, p.T if ROWS_FIRST else p, do_tile)
    dk = add_product(dk, ds.T if ROWS_FIRST else ds, q[0])
    if REST > 0:
        dk_rest = add_product(dk_rest, ds.T if ROWS_FIRST else ds, q[1])
    return dk, dk_rest, dv


@triton.jit
def store_dkdv(dk, dv, sums, scale, exists, dims: tl.constexpr):
    """Store dk = scale * sums and dv of the keys that exist at pointers `dk` and `dv` [BLOCK_L]."""
    store_split(dk, sums[0] * scale, sums[1] * scale, exists, dims.Dk, dims.BLOCK_REST)
    store_columns(dv, sums[2], exists, 0, dims.Dv)
