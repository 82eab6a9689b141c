"""Draw cases of the fuzzer: `case(seed)` is plain data, equal on every machine; checks.py draws the values of tensors from the seed."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

Facts = dict[str, Any]

KINDS = {"call": 65, "varlen": 10, "cache": 10, "bad": 15}  # kind -> weight
TRITON = ("triton-token", "triton-group", "triton-tile", "triton-block")
ON_GPU = (*TRITON, "cupy-cuda", "cuda-block")
BY_BLOCKS = ("triton-tile", "triton-block", "cuda-block")  # take no other selections
GPU_STEP = 10  # seeds in a row that are of one size and backend, so that a test compiles few kernels
GPU_SIZES = (  # h, Dk, Dv, block size, dtype
    (16, 128, 128, 64, "bfloat16"), (16, 192, 128, 64, "float16"), (4, 64, 64, 64, "bfloat16"), (3, 64, 128, 16, "float16"),
    (1, 16, 8, 32, "float32"), (12, 40, 72, 16, "bfloat16"), (12, 256, 256, 4, "bfloat16"), (4, 64, 128, 8, "float16"),
)  # fmt: skip
TOPS = {"uint8": 255, "int8": 127, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}


class Case(NamedTuple):
    """One case: `python -m tests.fuzz --first SEED --device DEVICE` checks it."""

    seed: int
    device: str
    kind: str
    facts: Facts


def case(seed: int, device: str = "cpu") -> Case:
    rng = random.Random(f"{device} {seed}")
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    make = {"call": _call, "varlen": _varlen, "cache": _cache, "bad": _bad}[kind]
    facts = make(rng, _cpu_sizes(rng) if device == "cpu" else _gpu_sizes(rng, seed))
    return Case(seed, device, kind, copy.deepcopy(facts))  # a check may write into them, and they share what was to choose from


def _cpu_sizes(rng: random.Random) -> Facts:
    if rng.random() < 0.2:  # in Triton's interpreter, where a program takes 20 ms
        S = rng.choice((1, 1, 2, 3, 4))
        z: Facts = {"B": 1 if S > 2 else rng.choice((1, 2)), "S": S, "G": 1 if S > 1 else rng.choice((1, 2))}
        z["backends"] = [rng.choice(TRITON)]
        widths, dtypes = (8, 16, 16, 24, 40, 64, rng.choice((5, 8, 8, 8))), ("float16", "float32", "float32", "float64", "bfloat16")
        blocks, spare = (16, 16, 32, 48), (0, 1, 15, 30)
    else:
        z = {"B": rng.choice((0, 1, 1, 1, 2, 2, 3)), "S": rng.randint(1, 12), "G": rng.randint(1, 3)}
        z["S"] = min(z["S"], 40 // max(1, z["B"] * z["G"]))  # a row takes the oracle 0.3 ms
        z["backends"] = ["sdpa-packed", "numba", *rng.choice(([], [], [None]))]
        widths, dtypes = (1, 2, 3, 5, 7, 8, 13, 16, 24, 32, 40, 64, 128, 192), ("float16", "bfloat16", "float32", "float64")
        blocks, spare = (1, 2, 3, 4, 5, 8, 16, 32, 64), (0, 0, 1, 7, 30, 90)
    z |= {"h": rng.choice((1, 1, 2, 3, 6, 12, 16)), "Dk": rng.choice(widths), "Dv": rng.choice(widths), "dtype": rng.choice(dtypes)}
    return {**z, "S_kv": z["S"] + rng.choice(spare), "block": rng.choice(blocks)}


def _gpu_sizes(rng: random.Random, seed: int) -> Facts:
    h, Dk, Dv, block, dtype = GPU_SIZES[seed // GPU_STEP % len(GPU_SIZES)]
    S, backend = rng.choice((1, 5, 16, 64, 150)), ON_GPU[seed // (GPU_STEP * len(GPU_SIZES)) % len(ON_GPU)]
    z = {"B": 1 if S > 16 else rng.choice((1, 2)), "S": S, "G": 1 if S > 16 else rng.choice((1, 2)), "h": h, "Dk": Dk, "Dv": Dv}
    return {**z, "S_kv": S + rng.choice((0, 1, 64, 200)), "block": block, "dtype": dtype, "backends": [backend, "sdpa-packed"]}


def _each(z: Facts, row: Any, one: bool) -> list[Any]:
    """row() for every row of every group: [B][S][G]; one: for all groups of a row."""
    groups = (lambda: [row()] * z["G"]) if one else (lambda: [row() for _ in range(z["G"])])
    return [[groups() for _ in range(z["S"])] for _ in range(z["B"])]


def _spans(rng: random.Random, S_kv: int, n: int, how: str) -> list[list[int]]:
    """n ranges of one row: disjoint ("tidy"), some of them empty or reaching out of the keys ("odd"), or anything at all ("wild")."""
    if how == "wild":
        return [[rng.randint(-3, S_kv + 3), rng.randint(-3, S_kv + 9)] for _ in range(n)]
    full = n if how == "tidy" else rng.randint(0, n)
    cuts = sorted(rng.randint(0, S_kv) for _ in range(2 * full))
    row = [list(pair) for pair in zip(cuts[::2], cuts[1::2], strict=True)]
    if row and how != "tidy":
        row[0][0] -= rng.choice((0, 7)) if row[0][0] == 0 else 0
        row[-1][1] += rng.choice((0, 0, 9, 2**30))
    row += [rng.choice(([0, 0], [3, 3], [9, 4], [-4, -2], [S_kv + 5, S_kv + 9])) for _ in range(n - full)]
    return row if how == "tidy" else rng.sample(row, n)


def _blocks(rng: random.Random, z: Facts, n: int, dtype: str, twice: bool) -> list[int]:
    """n block indices of one row, in any order; -1 is padding, the last block may lie past the keys, and one as far as the dtype goes."""
    pool = [*range(-(-z["S_kv"] // z["block"]) + 1)]
    row = rng.choices(pool, k=n) if twice else rng.sample(pool, min(n, len(pool)))
    none = 255 if dtype == "uint8" else -1  # 255 is a block, far away
    row = [j if j < TOPS[dtype] and rng.random() < 0.9 else none for j in (*row, *[none] * (n - len(row)))]
    return [TOPS[dtype], *row[1:]] if row and TOPS[dtype] not in row and rng.random() < 0.05 else row


def selection(rng: random.Random, z: Facts) -> Facts:
    """A selection for sizes z: how it is made, from which numbers, and what is done to it before the call."""
    how = "blocks" if z["backends"][0] in BY_BLOCKS else rng.choice(("ranges", "blocks", "blocks"))
    n, empty = rng.choice((0, 1, 1, 2, 3, 4, 9)), rng.choice((0.0, 0.0, 0.3, 1.0))  # empty: the share of rows with nothing
    then = rng.choice(("", "", "measure", "merge", "to", "copy", "deepcopy", "pickle"))
    one = rng.random() < 0.2  # selection for all groups
    made: Facts = {"how": how, "n": n, "dtype": rng.choice(("int32", "int64")), "then": then, "block": z["block"], "one": one}
    if how == "ranges":
        kind = rng.choice(("tidy", "odd", "wild"))
        made["ranges"] = _each(z, lambda: [[0, 0]] * n if rng.random() < empty else _spans(rng, z["S_kv"], n, kind), one)
        made |= {"bare": rng.random() < 0.2, "bounded": rng.random() < 0.3}  # a tensor, no Selection; with max_length
    else:
        dtype, twice = rng.choice(list(TOPS)), rng.random() < 0.3
        none = [255 if dtype == "uint8" else -1] * n
        made |= {"dtype": dtype, "blocks": _each(z, lambda: none if rng.random() < empty else _blocks(rng, z, n, dtype, twice), one)}
        made["counts"] = _each(z, lambda: rng.randint(-1, n + 1), one) if rng.random() < 0.3 else None
    return made


def _call(rng: random.Random, z: Facts) -> Facts:
    q_pos: Any = None
    if rng.random() < 0.4:
        z = {**z, "S_kv": max(1, z["S_kv"] - rng.choice((0, 3)))}  # fewer keys than rows, too
        q_pos = [[rng.randrange(z["S_kv"]) for _ in range(z["S"])] for _ in range(z["B"])]
        q_pos = q_pos[0] if z["B"] and rng.random() < 0.5 else q_pos
    poison = rng.choice((None, None, "nan", "inf", "1e30"))
    layouts = ("plain", "plain", "keys first", "offset", "sliced", "every other", *([] if poison else ["expanded"]))
    return {
        **z, "q_pos": q_pos, "q_pos_dtype": rng.choice(("int32", "int64")), "decode": z["S"] == 1 and rng.random() < 0.6,
        "selection": selection(rng, z),
        "scale": rng.choice((None, None, None, 0.3, -0.5, 0.0, 1e-9, 20.0 if z["dtype"] == "float16" else 200.0)),
        "size": rng.choice((1.0, 1.0, 1e-3, 8.0)), "layouts": [rng.choice(layouts) for _ in "qkv"], "poison": poison,
        "grads": rng.choice(("", "qkv", "qkv", "qkv", "q", "kv", "k", "v")), "uses": rng.choice(("o", "both", "both", "lse")),
        "do": rng.choice(("random", "ones")), "flag": rng.random() < 0.3,
        "again": rng.choice((0, 0, 0, 1, 3)),
    }  # fmt: skip


def _varlen(rng: random.Random, z: Facts) -> Facts:
    """Sequences end to end. The selection is over B = 1 rows, in positions of the longest sequence's keys."""
    small = len(z["backends"]) == 1  # interpreted
    rows = [rng.choice((0, 1, 1, 2) if small else (0, 1, 2, 3, 7, 16)) for _ in range(rng.randint(1, 3 if small else 5))]
    keys = rows if rng.random() < 0.5 else [max(0, r + rng.choice((-1, 0, 5, 20, 40))) for r in rows]
    spare = rng.choice((0, 0, 1 if small else 5))
    if not sum(keys) + spare:
        rows, keys = [*rows, 1], [*keys, 1]
    z = {**z, "B": 1, "S": sum(rows) + spare, "S_kv": max(*keys, 1)}
    how = {"bounds": rng.choice(("list", "int32", "int64", "on cpu")), "align": rng.choice((None, None, True, False))}
    return {**z, **how, "rows": rows, "keys": keys, "spare": spare, "selection": selection(rng, z), "poison": rng.random() < 0.4}


def _cache(rng: random.Random, z: Facts) -> Facts:
    """A KV cache. The last sequence fills it, so it has a key."""
    S, page_size = min(z["S"], 4), rng.choice((None, 1, 8, 16, 24, 64))
    S_kv = max(z["S_kv"], S, 4)
    lengths = [rng.choice((0, 1, S, rng.randint(0, S_kv), S_kv)) for _ in range(max(0, z["B"] - 1))] + [S_kv]
    z = {**z, "B": len(lengths), "S": S, "S_kv": S_kv, "lengths": lengths, "page_size": page_size}
    return {**z, "decode": S == 1 and rng.random() < 0.5, "selection": selection(rng, z), "grads": rng.random() < 0.4}


DOORS = ("selection_attention", "explain", "selection_attention_varlen", "selection_attention_with_kvcache", "from_ranges", "from_blocks",
         "from_scores", "measure")  # fmt: skip
ODD_VALUES = (  # what an argument x becomes, as Python
    "None", "True", "0", "-1", "3", "2**31", "2**63", "10**5000", "1.5", "float('nan')", "float('inf')", "1j", "'numba'", "''", "b'x'",
    "[]", "[[0, 4]]", "(1,)", "{}", "object()", "np.zeros(3)", "np.float32(0.5)", "torch.tensor(0.5)", "torch.tensor([0, 2, 4])",
)  # fmt: skip
ODD_TENSORS = (
    "x.double()", "x.half()", "x.int()", "x.bool()", "x.to(torch.complex64)", "x.to(torch.float8_e4m3fn)", "x.to('meta')", "x[None]",
    "x[0]", "x[:0]", "x[..., :0]", "x[..., ::2]", "x[..., :1]", "x[:, :1]", "x.mT", "x.transpose(1, 2)", "x.flatten()", "x + 2**31", "-x",
    "x.to_sparse()", "x.tolist()", "x.numpy()", "torch.nested.nested_tensor(list(x))", "torch.nn.Parameter(x)", "torch._neg_view(-x)",
    "x.expand(2, *x.shape)", "torch.cat((x, x), 1)", "x.to_mkldnn()",
)  # fmt: skip


def _bad(rng: random.Random, z: Facts) -> Facts:
    """Arguments of a call, by the share of them before, and what they become."""
    door = rng.choice(["selection_attention", *DOORS])
    wrong = [[rng.random(), rng.choice(ODD_VALUES + ODD_TENSORS)] for _ in range(rng.choice((1, 1, 1, 2)))]
    return {"door": door, "wrong": wrong, "block": rng.choice((1, 4)), "grads": rng.random() < 0.3, "backend": z["backends"][0]}
