"""The cases that the benches measure: their sizes, and selections that are random, of a text, or of a trained model."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from nsa_sel.core.request import FEW_TOKENS, Quantized
from nsa_sel.errors import NsaSelError
from nsa_sel.selection import Selection

LAYERS, REAL_ROWS = 30, 8192  # of the committed maps of SmolLM2
SCORES_AT_ONCE = 1 << 26  # of a random selection: 32k rows, 4 groups, 512 blocks. Sorting them takes 2 GB
SPANS = ("few", "many", "mixed")  # distributions of `span_lengths`
ALIKE = "alike"  # random, but the tokens of a sequence share most of their scores
ALIKE_SHARE = 4.0  # standard deviation of the shared part of a score over that of the rest
PER_HEAD, PER_HEAD_ALIKE = PER_HEADS = "per-head", "per-head-alike"  # as random and `ALIKE`, by MoBA's rule, for groups that share K and V
HEADS_PER_KV = 4  # such groups of q for each KV group
CHOICE = "choose"  # a call of compressed_attention with NSA's sizes, which chooses the n blocks
MANY, MIXED = 8, (2, 4, 8)  # spans of a row: of "many", and the numbers that "mixed" draws from
LEAST_BLOCK = 16  # keys: the smallest block that every backend takes
SPAN_KEYS = 8192  # keys that a row of a span case selects from
SHARES = (24, 16, 8, 4, 4, 2, 2, 1, 1, 1, 0.5, 0.5)  # of 64 parts: the sequences of a packed batch
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DATA = Path(__file__).resolve().parents[1] / "data"


class Case(NamedTuple):
    """The sizes of one case, which are the first keys of a measured row.

    distribution: random (scores from a normal distribution), `ALIKE`, real (SmolLM2's selections), trained (those of a
        model that was trained with NSA), indexer (of one with `MSAttention`), packed (random within each sequence of
        `packed_bounds`), one of `SPANS`, `PER_HEAD` or `PER_HEAD_ALIKE` (k and v have G / HEADS_PER_KV groups), or
        `CHOICE`.
    n: ranges per row, of `block` keys each, or of any length if block is 0.

    The layers of a real case, and the keys that a row of spans selects, are only in its name (`layers_of`,
    `length_of`).
    """

    case: str
    distribution: str
    B: int
    S: int
    S_kv: int
    G: int
    h: int
    Dk: int
    Dv: int
    n: int
    block: int
    dtype: str = "bfloat16"


ORDERS = "keys first", "groups first", "one pool"  # [.., key, group, D], [.., group, key, D], [.., group, key, Dk + Dv]


class Cache(NamedTuple):
    """A KV cache [.., key, group, D]: keys per page (None for one piece), its format (None for q's dtype), and the order of
    memory.

    A row names the cache after its backend: "cupy-cuda, pages of 64, keys first, e4m3/head".
    """

    page_size: int | None
    quantized: Quantized | None = None
    order: str = "keys first"

    @property
    def pages(self) -> str:
        """Return what holds the keys, in words."""
        return "in one piece" if self.page_size is None else f"pages of {self.page_size}"

    def __str__(self) -> str:
        return f"{self.pages}, {self.order}" + (f", {self.quantized}" if self.quantized else "")


def with_cache(backend: str, cache: Cache | None) -> str:
    """Return what a row calls a backend over a cache."""
    return backend if cache is None else f"{backend}, {cache}"


def split_cache(name: str) -> tuple[str, Cache | None]:
    """Return the backend and the cache of `with_cache`, or the whole name and None."""
    found = re.fullmatch(rf"(.*), (?:in one piece|pages of (\d+)), ({'|'.join(ORDERS)})(?:, (.*))?", name)
    if found is None:
        return name, None
    assert found[4] is None or found[4] in get_args(Quantized), name
    return found[1], Cache(int(found[2]) if found[2] else None, cast(Quantized | None, found[4]), found[3])


# Suites


def prefill(kind: str, S: int, h: int, Dk: int = 128) -> Case:
    """Return S rows over S keys, 4 groups of h heads, 16 blocks of 64 keys per row; named by distribution, thousands of
    rows and h.
    """
    other_dims = "" if Dk == 128 else f"-{Dk}"
    return Case(f"{kind}-{S // 1024}k-h{h}{other_dims}", kind, 1, S, S, 4, h, Dk, 128, 16, 64)


def decode(name: str, B: int, S_kv: int, G: int, h: int, D: int = 128, block: int = 64) -> Case:
    """Return one query for each of B sequences, which selects 16 random blocks."""
    return Case(name, "random", B, 1, S_kv, G, h, D, D, 16, block)


def prefills(*sizes: tuple[str, int]) -> list[Case]:
    """Return `prefill` of each kind and number of thousands of rows, with h 16, 4 and 1."""
    return [prefill(kind, thousands * 1024, h) for kind, thousands in sizes for h in (16, 4, 1)]


# Prefills of the performance table, with the paper's head dims 192/128 last.
PERFORMANCE = [*prefills(("real", 8), ("random", 8), ("random", 32)), prefill("random", 32768, 16, Dk=192)]
# One query per sequence over a long cache: one stream, a batch, a large batch, and small groups.
DECODE = [
    decode(f"decode-B{B}-{S_kv // 1024}k-h{h}", B, S_kv, G, h)
    for B, S_kv, G, h in ((1, 65536, 4, 16), (64, 32768, 4, 16), (256, 16384, 4, 16), (64, 32768, 8, 4))
]
# The same on a rank of tensor parallelism, with one or two groups. G 1, h 16, block 128 is MiniMax-M3 on four ranks.
PARALLEL = [
    decode(f"parallel-B{B}-32k-G{G}-h{h}-b{block}", B, 32768, G, h, block=block)
    for B in (1, 8, 64, 256)
    for G, h, block in ((1, 16, 128), (1, 8, 64), (2, 16, 64), (2, 8, 128))
]
# Several new tokens per sequence, as in speculative decoding.
FEW = [
    Case(f"tokens-{kind}-B{B}-S{S}-{S_kv // 1024}k-G{G}-h{h}-D{D}", kind, B, S, S_kv, G, h, D, D, 16, block)
    for kind, B, S, S_kv, G, h, D, block in (
        (ALIKE, 64, 4, 32768, 4, 16, 128, 64), (ALIKE, 64, 8, 32768, 1, 16, 128, 128), ("random", 64, 4, 32768, 4, 16, 128, 64),
        ("random", 1, 4, 65536, 4, 16, 128, 64), ("random", 16, 2, 32768, 2, 8, 128, 64),
        *((ALIKE, 64, S, 32768, 4, 16, 128, 64) for S in (2, 8)), (ALIKE, 64, 4, 32768, 1, 16, 128, 128),
        (ALIKE, 256, 4, 16384, 4, 16, 128, 64), (ALIKE, 16, 4, 32768, 4, 16, 128, 64), (ALIKE, 64, 4, 32768, 8, 4, 128, 64),
        (ALIKE, 64, 4, 32768, 4, 16, 64, 64), ("random", 64, 4, 32768, 1, 16, 128, 128),
    )
]  # fmt: skip
# Rows that select L keys, to find the L from which Triton pays: 1,024 rows of a prefill, and 64 decoded sequences.
THRESHOLD = [
    Case(f"threshold-{kind}-D{D}-L{L}", "random", B, S, 8192, 2, 4, D, D, L // 64, 64)
    for kind, B, S in (("prefill", 1, 1024), ("decode", 64, 1))
    for D in (64, 128)
    for L in (64, 256, 1024, 4096)
]
# Lengths at which selection overtakes dense attention, and random selections whose time should grow linearly.
BREAKEVEN = prefills(*(("real", S) for S in (1, 2, 4, 8)), *(("random", S) for S in (16, 32, 64)))
SCALING = prefills(*(("random", S) for S in (8, 32, 64, 128)))
# Every layer of the committed maps with its 3 KV heads, 8k rows: alone, and four different ones as a batch.
ALONE = [(layer,) for layer in range(LAYERS)]
FOURS = [tuple(layer % LAYERS for layer in range(first, first + 4)) for first in range(0, LAYERS, 4)]  # the last one wraps
OF_LAYERS = [
    Case(
        f"real-8k-layer{'s' * (len(some) > 1)}{'-'.join(f'{i:02}' for i in some)}-h{h}",
        "real",
        len(some),
        8192,
        8192,
        3,
        h,
        128,
        128,
        16,
        64,
    )
    for some in (*ALONE, *FOURS)
    for h in (16, 4, 1)
]
# Whole texts of the contexts that models were trained at, for each file that a checkout has: blocks by NSA, and by an
# indexer that learned.
TRAINED, INDEXED = (
    prefills(*((kind, S) for S in (8, 32, 64) if (DATA / f"{kind}_{S * 1024}.npz").exists())) for kind in ("trained", "indexer")
)
MODELS = {  # docs/choosing.md: G, h, Dk, Dv, n, block
    "nsa": (4, 16, 192, 128, 16, 64),
    "minimax-m3": (4, 16, 128, 128, 16, 128),
    "minicpm4": (2, 16, 128, 128, 96, 64),
    "qsa": (2, 12, 256, 256, 512, 4),
    "moba": (32, 1, 128, 128, 3, 512),  # G of q; k and v have 8
}


def model_case(model: str, size: str, S: int, kind: str = "") -> Case:
    """Return S rows over S keys in a shipped model's shape. Neighboring rows choose similar blocks unless `kind` differs."""
    return Case(f"models-{model}-{size}", kind or (PER_HEAD_ALIKE if model == "moba" else ALIKE), 1, S, S, *MODELS[model])


def model_decode(model: str, B: int = 64) -> Case:
    """Return one query for each of B sequences of 32k keys in a shipped model's shape."""
    return Case(f"models-{model}-decode-B{B}-32k", PER_HEAD if model == "moba" else "random", B, 1, 32768, *MODELS[model])


def with_tail(case: Case) -> Case:
    """Return a case of QSA whose rows select the incomplete last block too, beside the n that they choose."""
    return case._replace(n=case.n + 1)


# Shapes of shipped models, 16k rows and decoding; QSA's up to 128k rows and from 8 to 256 sequences, M3's and MoBA's up
# to 32k. "tail": with QSA's incomplete block.
OF_MODELS = [
    *(case for model in MODELS for case in (model_case(model, "16k", 16384), model_decode(model))),
    model_case("qsa", "random-16k", 16384, "random"), *(model_case("qsa", f"{S}k", S * 1024) for S in (32, 64, 128)),
    *(model_decode("qsa", B) for B in (8, 32, 256)),
    model_case("moba", "random-16k", 16384, PER_HEAD), model_case("moba", "32k", 32768),
    model_case("minimax-m3", "random-16k", 16384, "random"), model_case("minimax-m3", "32k", 32768),
    model_case("minimax-m3", "random-32k", 32768, "random"),
    *(with_tail(model_case("qsa", f"tail-{size}", 16384, kind)) for size, kind in (("16k", ""), ("random-16k", "random"))),
]  # fmt: skip
# A decoding step of one layer: one sequence and batches, in the shapes of NSA, MiniMax-M3, and QSA with its incomplete block.
STEPS = [
    *DECODE[:3], *(model_decode("minimax-m3", B) for B in (1, 64, 256)),
    *(with_tail(model_decode("qsa", B))._replace(case=f"models-qsa-tail-decode-B{B}-32k") for B in (1, 8, 64, 256)),
]  # fmt: skip
# Keys and values of 256 columns over blocks of 64 and of 16 keys.
WIDE = [
    *(
        prefill(kind, S * 1024, h, Dk=256)._replace(Dv=256)
        for kind, S, heads in (("real", 1, (16, 4, 1)), ("real", 8, (16, 4, 1)), ("random", 8, (4,)), ("random", 32, (16,)))
        for h in heads
    ),
    Case("random-8k-h16-256-b16", "random", 1, 8192, 8192, 4, 16, 256, 256, 64, 16),
    *(decode(f"decode-B{B}-32k-h16-256", B, 32768, 4, 16, 256) for B in (8, 64)),
]
# Blocks of 256 to 4,096 keys of rows whose neighbors differ, h 1 (by MoBA's rule), 4 and 16.
LARGE = [
    Case(f"large-{S >> 10}k-h{h}-b{block}", PER_HEAD if h == 1 else "random", 1, S, S, G, h, 128, 128, n, block)
    for S, G, h, n, block in (
        (16384, 4, 4, 6, 256), (32768, 16, 1, 6, 1024), (16384, 4, 16, 4, 512), (65536, 8, 1, 3, 4096), (8192, 8, 4, 3, 512),
    )
]  # fmt: skip
# Decoding over caches: one token per sequence (one stream, batches, a quarter of a model's groups per GPU), then four.
CACHES = [
    *DECODE[:3], *(case for case in PARALLEL if (case.B, case.G, case.h) == (64, 1, 16)),
    decode("decode-B16-32k-G2-h8", 16, 32768, 2, 8), FEW[3], FEW[0], FEW[7], FEW[8],
]  # fmt: skip
# 32k rows in 12 sequences of 256 to 12k, all of which start on a block of 64, or between blocks.
PACKED = [Case(f"packed-{kind}-32k-h{h}", "packed", 1, 32768, 32768, 4, h, 128, 128, 16, 64) for kind in ("whole", "odd") for h in (16, 4)]
QUICK = [
    *(Case(f"quick-{kind}-1k-h4", kind, 1, 1024, 1024, 2, 4, 64, 64, 16, 64) for kind in ("real", "random")),
    decode("quick-decode-B4-4k-h4", 4, 4096, 2, 4, 64),
]
# `nsa-sel tune` measures these with every backend for the cost models, in minutes: small calls for host time, real
# and random selections for what neighbors share, 64 to 4,096 keys per row, other head dims, large blocks, and decoding of
# fewer rows than multiprocessors and of more, one token per step or few.
COSTS = [
    *prefills(("real", 1), ("real", 8), ("random", 8), ("random", 32)), prefill("real", 8192, 4, Dk=64)._replace(Dv=64),
    prefill("real", 1024, 4, Dk=192), prefill("real", 8192, 16, Dk=192), prefill("random", 32768, 16, Dk=192),
    *(
        case._replace(case=case.case.replace("threshold", "cost"))
        for case in THRESHOLD
        if not case.case.endswith(("prefill-D64-L256", "decode-D64-L256", "decode-D64-L1024", "decode-D128-L256"))
    ),
    LARGE[0], LARGE[-1], *DECODE[:3], PARALLEL[7], PARALLEL[8],
    decode("decode-B16-32k-h16-192", 16, 32768, 4, 16)._replace(Dk=192), *FEW[:5],
]  # fmt: skip
# The same for choosing: prefills, other head dims, and a chunk of a longer prefill.
CHOICES = [
    *prefills((CHOICE, 1), (CHOICE, 8), (CHOICE, 32)), prefill(CHOICE, 8192, 4, Dk=64)._replace(Dv=64),
    prefill(CHOICE, 1024, 16)._replace(case="choose-1k-of-32k-h16", S_kv=32768),
    prefill(CHOICE, 8192, 16, Dk=192), prefill(CHOICE, 32768, 4, Dk=192),
]  # fmt: skip


def decodes(case: Case) -> bool:
    """Return True for a decoding step, of one token per sequence or of few. It is timed by graph replay."""
    return case.S <= FEW_TOKENS


def text_case(S: int, h: int) -> Case | None:
    """Return S rows of text: SmolLM2's up to 8k, beyond that a trained model's; None if no file has as many."""
    if S <= REAL_ROWS:
        return prefill("real", S, h)
    return prefill("trained", S, h) if any(case.S >= S for case in TRAINED) else None


def packed_bounds(case: Case) -> list[int]:
    """Return the cu_seqlens of a packed case."""
    bounds = [0]
    for share in SHARES:
        bounds.append(bounds[-1] + int(case.S * share / 64))
    return [0, *(bound - 5 for bound in bounds[1:-1]), case.S] if "-odd-" in case.case else bounds


def span_case(distribution: str, N: int, H: int, D: int, Dv: int, L: int, dtype: str = "bfloat16") -> Case:
    """Return N rows of one prefill after `SPAN_KEYS` keys, in one group of H heads, each selecting L keys in spans.

    Many equal spans are blocks if backends take blocks of their length; else block is 0, and `length_of` returns L.
    """
    n = {"few": 1, "many": MANY, "mixed": max(MIXED)}[distribution]
    block = L // MANY if distribution == "many" and L % (MANY * LEAST_BLOCK) == 0 else 0
    name = f"{distribution}-N{N}-H{H}-D{D}-Dv{Dv}-L{L}"
    return Case(name, distribution, 1, N, SPAN_KEYS + N, 1, H, D, Dv, n, block, dtype)


def length_of(case: str, n: int, block: int) -> int:
    """Return the keys that a row selects: the L of the case's name, or n whole blocks."""
    found = re.search(r"-L(\d+)$", case)
    return int(found[1]) if found else n * block


# Selections


def span_lengths(distribution: str, L: int, rows: int, generator: torch.Generator) -> Tensor:
    """Return the lengths [rows, n] of each row's spans. few: one. many: 8 equal ones. mixed: 2, 4 or 8 random ones,
    then empty ones.
    """
    if distribution == "few":
        return torch.full((rows, 1), L)
    if distribution == "many":
        return torch.full((rows, MANY), L // MANY)
    spans = torch.tensor(MIXED)[torch.randint(len(MIXED), (rows, 1), generator=generator)]
    cuts = 1 + torch.rand(rows, L - 1, generator=generator).argsort(-1)[:, : max(MIXED) - 1]
    cuts = torch.where(torch.arange(1, max(MIXED)) < spans, cuts, L).sort(-1).values
    return cuts.diff(prepend=cuts.new_zeros(rows, 1), append=cuts.new_full((rows, 1), L))


@cache
def _blocks(file: str, array: str) -> Tensor:
    """Return the blocks of 64 keys that SmolLM2-135M's queries and keys choose over 8,192 tokens, int8; -1 is padding."""
    path = resources.files("nsa_sel") / "bench" / "data" / file
    if not path.is_file():
        raise NsaSelError(f"{file} is not part of an installed package. Remedy: run this from a checkout, which has bench/data/{file}.")
    with path.open("rb") as opened, np.load(opened) as arrays:
        return torch.from_numpy(arrays[array].view(np.int8))


def real_selection(G: int, device: torch.device | str, S: int = REAL_ROWS) -> Selection:
    """Return the first S of 8,192 rows, 16 blocks of 64 keys: G (1, 2 or 4) of the 90 (layer, KV head) maps, evenly
    spread.

    Blocks are chosen causally, so the first S rows are what the model selects in a text of S tokens.
    """
    return Selection.from_blocks(_blocks("smollm2_maps.npz", f"G{G}")[None, :S].to(device), 64, disjoint=True)


def layers_of(case: str) -> list[int]:
    """Return the layers that a case's name lists; none if it lists none."""
    found = re.search(r"-layers?(\d\d(?:-\d\d)*)-", case)
    return [int(layer) for layer in found[1].split("-")] if found else []


def layer_selection(layers: list[int], device: torch.device | str) -> Selection:
    """Return 8,192 rows of whole layers, one per batch entry, with their 3 KV heads as groups. Needs a checkout."""
    return Selection.from_blocks(_blocks("smollm2_selections.npz", "block_indices")[layers].to(device), 64, disjoint=True)


def trained_selection(case: Case, device: torch.device | str) -> Selection:
    """Return the blocks that a trained model chose over one long text: the first S rows of the shortest file that has
    as many, for the groups of the layers in the case's name, or for G of all (layer, group) maps, evenly spread.

    A file trained_CONTEXT.npz or indexer_CONTEXT.npz (bench/data/README.md) holds, for each layer, one bit per group,
    block and row: 1 where the row and the row before it differ in choosing the block.
    """
    kind = case.distribution
    context = min((each.S for each in (*TRAINED, *INDEXED) if each.S >= case.S and each.distribution == kind), default=None)
    if context is None:
        raise NsaSelError(f"bench/data has no selections of a trained model over {case.S} tokens. Remedy: take fewer, in a checkout.")
    by_layer = _trained_layers(f"{kind}_{context}.npz", context).transpose(1, 2)  # [layers,groups,context,n]
    layers, maps = layers_of(case.case), by_layer.flatten(0, 1)
    chosen = by_layer[layers].flatten(0, 1) if layers else maps[[len(maps) * (2 * i + 1) // (2 * case.G) for i in range(case.G)]]
    return Selection.from_blocks(chosen[:, : case.S].transpose(0, 1)[None].to(device), 64, disjoint=True)


@lru_cache(1)
def _trained_layers(file: str, context: int) -> Tensor:
    """Return the block indices of every layer of a file, ascending in each row: [layers,context,groups,16] int16."""
    found = []
    with np.load(DATA / file) as arrays:
        for name in sorted(name for name in arrays.files if name.startswith("layer")):
            bits = np.unpackbits(arrays[name], axis=-1, count=context)  # [groups,blocks,context]
            chosen = np.bitwise_xor.accumulate(bits, axis=-1).view(bool)
            group, block, row = np.nonzero(chosen)
            number = row * len(chosen) + group  # index of the (row, group) pair
            order = np.argsort(number, kind="stable")  # blocks stay ascending
            each = np.bincount(number, minlength=context * len(chosen))
            column = np.arange(len(number)) - np.repeat(each.cumsum() - each, each)
            blocks = np.full((context, len(chosen), 16), -1, np.int16)
            blocks[row[order], group[order], column] = block[order]
            found.append(torch.from_numpy(blocks))
    return torch.stack(found)


def random_selection(case: Case, device: torch.device | str, seed: int) -> Selection:
    """Return the best blocks by normally distributed scores, drawn for as many rows at a time as
    `SCORES_AT_ONCE` scores allow.

    The first, the previous and the current block are always among the n; in a MoBA case only the current one. The draws
    depend on the device and on `SCORES_AT_ONCE`. In an "alike" case the rows of a sequence and group share a part of
    their scores.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks = -(-case.S_kv // case.block)
    rows = max(1, SCORES_AT_ONCE // (case.B * case.G * blocks))
    alike = case.distribution in (ALIKE, PER_HEAD_ALIKE)
    size = case.B, 1, case.G, blocks
    ranges, shared = [], ALIKE_SHARE * torch.randn(size, device=device, generator=generator) if alike else 0.0
    for start in range(case.S_kv - case.S, case.S_kv, rows):
        position = torch.arange(start, min(start + rows, case.S_kv), device=device)
        ranges.append(random_rows(case, position, generator, shared))
    return Selection(torch.cat(ranges, 1), case.block, disjoint=True)


def random_rows(case: Case, position: Tensor, generator: torch.Generator, shared: Tensor | float = 0.0) -> Tensor:
    """Return ranges [B,rows,G,n,2] of random rows at these positions [rows]. shared: the common part of their scores."""
    first, local = (0, 1) if case.distribution in PER_HEADS else (int(case.n > 1), min(2, max(1, case.n - 1)))
    size = case.B, len(position), case.G, -(-case.S_kv // case.block)
    scores = shared + torch.randn(size, device=generator.device, generator=generator)
    return Selection.from_scores(scores, case.n, case.block, first, local, S_kv=case.S_kv, q_pos=position).ranges


def span_selection(case: Case, device: torch.device | str, seed: int) -> Selection:
    """Return the ranges of a span case. few: keys 0 to L. many, mixed: disjoint spans at random positions, whole blocks
    if case.block.
    """
    L, generator = length_of(case.case, case.n, case.block), torch.Generator().manual_seed(seed)
    lengths, unit = span_lengths(case.distribution, L, case.S, generator), case.block or 1
    free = (SPAN_KEYS - L) // unit if case.distribution in ("many", "mixed") else 0  # keys, or blocks, between spans
    gaps = torch.randint(0, free + 1, lengths.shape, generator=generator).sort(-1).values * unit
    start = gaps + lengths.cumsum(-1) - lengths
    ranges = torch.stack((start, start + lengths), -1)[None, :, None]
    return Selection(ranges.int().to(device), case.block or None, L, disjoint=True)


def packed_selection(case: Case, device: torch.device | str, seed: int) -> Selection:
    """Return a random selection in each sequence of a packed case: whole blocks if the sequences begin with blocks."""
    bounds, ranges = packed_bounds(case), []
    for i, (start, end) in enumerate(pairwise(bounds)):
        chosen = random_selection(case._replace(S=end - start, S_kv=end - start), device, seed + i).ranges
        ranges.append(torch.where(chosen.diff(dim=-1) > 0, chosen + start, 0))
    whole = all(start % case.block == 0 for start in bounds[:-1])
    return Selection(torch.cat(ranges, 1), case.block if whole else None, case.n * case.block, disjoint=True)


def make_selection(case: Case, device: torch.device | str, seed: int = 0) -> Selection:
    """Return the selection of a case. A real or trained one is the same for every seed."""
    if case.distribution in SPANS:
        return span_selection(case, device, seed)
    if case.distribution in ("random", ALIKE, *PER_HEADS, "packed"):
        return (packed_selection if case.distribution == "packed" else random_selection)(case, device, seed)
    if case.distribution in ("trained", "indexer"):
        return trained_selection(case, device)
    layers = layers_of(case.case)
    return layer_selection(layers, device) if layers else real_selection(case.G, device, case.S)


def make_inputs(case: Case, device: torch.device | str, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return standard normal q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv] and the gradient do of o, in the case's
    dtype.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    B, S, S_kv, G, h, Dk, Dv = case[2:9]
    groups = G // HEADS_PER_KV if case.distribution in PER_HEADS else G
    sizes = (B, S, G, h, Dk), (B, groups, S_kv, Dk), (B, groups, S_kv, Dv), (B, S, G, h, Dv)
    q, k, v, do = (torch.randn(size, device=device, generator=generator, dtype=DTYPES[case.dtype]) for size in sizes)
    return q, k, v, do
