"""The cases that the benches measure: their sizes, and selections that are random or a language model's own."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from nsa_sel.bench.core import trained
from nsa_sel.core.request import FEW_TOKENS, Quantized
from nsa_sel.errors import NsaSelError
from nsa_sel.selection import Selection

LAYERS, REAL_ROWS = 30, 8192  # of the committed maps of SmolLM2
MAPS = (1, 2, 4)  # numbers of groups of the selections that a wheel contains
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
DECODE_KEYS = 4096  # keys of each sequence in the decode matrix
SHARES = (24, 16, 8, 4, 4, 2, 2, 1, 1, 1, 0.5, 0.5)  # of 64 parts: the sequences of a packed batch
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Case(NamedTuple):
    """The sizes of one case, which are the first keys of a measured row.

    distribution: random (scores from a normal distribution), `ALIKE`, real (SmolLM2's selections), trained (those of a
        model that was trained with NSA), packed (random within each sequence of `packed_bounds`), one of `SPANS`,
        `PER_HEAD` or `PER_HEAD_ALIKE` (k and v have G / HEADS_PER_KV groups), or `CHOICE`.
    n: ranges per row, of `block` keys each, or of any length if block is 0.

    The layers of a real or trained case, and the keys that a row of spans selects, are only in its name (`layers_of`,
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
    dtype: str


# Caches. A row names the cache after its backend: "cupy-cuda, pages of 64, groups first, e4m3/head"; a plain call has
# the name alone.

IN_ONE_PIECE, PAGES = "in one piece", "pages of "
KEYS_FIRST, GROUPS_FIRST = "keys first", "groups first"  # [.., key, group, D], or [.., group, key, D]


class Cache(NamedTuple):
    """A KV cache: keys per page (None for one piece), the order of its elements, and their format (None for q's dtype)."""

    page_size: int | None
    layout: str = KEYS_FIRST
    quantized: Quantized | None = None

    def __str__(self) -> str:
        where = IN_ONE_PIECE if self.page_size is None else f"{PAGES}{self.page_size}"
        return ", ".join((where, self.layout, *([self.quantized] if self.quantized else ())))


def with_cache(backend: str, cache: Cache | None) -> str:
    """Return what a row calls a backend over a cache."""
    return backend if cache is None else f"{backend}, {cache}"


def split_cache(name: str) -> tuple[str, Cache | None]:
    """Return the backend and the cache of `with_cache`, or the whole name and None."""
    backend, *words = name.split(", ")
    if not 2 <= len(words) <= 3 or words[1] not in (KEYS_FIRST, GROUPS_FIRST) or not words[0].startswith((IN_ONE_PIECE, PAGES)):
        return name, None
    page_size = None if words[0] == IN_ONE_PIECE else int(words[0].removeprefix(PAGES))
    quantized = cast(Quantized, words[2]) if len(words) > 2 else None
    assert quantized is None or quantized in get_args(Quantized), name
    return backend, Cache(page_size, words[1], quantized)


# Suites


def prefill(kind: str, S: int, h: int, Dk: int = 128) -> Case:
    """Return S rows over S keys, 4 groups of h heads, 16 blocks of 64 keys per row, bf16; named by distribution,
    thousands of rows and h.
    """
    other_dims = "" if Dk == 128 else f"-{Dk}"
    return Case(f"{kind}-{S // 1024}k-h{h}{other_dims}", kind, 1, S, S, 4, h, Dk, 128, 16, 64, "bfloat16")


def performance_cases() -> list[Case]:
    """Return the prefills of the performance table: real 8k, random 8k and 32k, h 16, 4, 1, and the paper's head dims
    192/128.
    """
    sizes = [(kind, S, h) for kind, S in (("real", 8192), ("random", 8192), ("random", 32768)) for h in (16, 4, 1)]
    return [*(prefill(*size) for size in sizes), prefill("random", 32768, 16, Dk=192)]


def decode_cases() -> list[Case]:
    """Return one query per sequence over a long cache: one stream, a batch, a large batch, and small groups."""
    sizes = ((1, 65536, 4, 16), (64, 32768, 4, 16), (256, 16384, 4, 16), (64, 32768, 8, 4))
    return [Case(f"decode-B{B}-{S // 1024}k-h{h}", "random", B, 1, S, G, h, 128, 128, 16, 64, "bfloat16") for B, S, G, h in sizes]


def parallel_cases() -> list[Case]:
    """Return one query per sequence on a rank of tensor parallelism, with one or two groups: every pair of G, h and
    block, B from 1 to 256.

    G 1, h 16, block 128 is MiniMax-M3 on four ranks.
    """
    sizes = ((1, 16, 128), (1, 8, 64), (2, 16, 64), (2, 8, 128))
    return [
        Case(f"parallel-B{B}-32k-G{G}-h{h}-b{block}", "random", B, 1, 32768, G, h, 128, 128, 16, block, "bfloat16")
        for B in (1, 8, 64, 256)
        for G, h, block in sizes
    ]


def few_token_cases() -> list[Case]:
    """Return several new tokens per sequence, as in speculative decoding: one stream to a large batch, and one group of
    128-key blocks.
    """
    sizes = (  # B, S, S_kv, G, h, D, block
        (ALIKE, 64, 4, 32768, 4, 16, 128, 64), (ALIKE, 64, 8, 32768, 1, 16, 128, 128), ("random", 64, 4, 32768, 4, 16, 128, 64),
        ("random", 1, 4, 65536, 4, 16, 128, 64), ("random", 16, 2, 32768, 2, 8, 128, 64),
        *((ALIKE, 64, S, 32768, 4, 16, 128, 64) for S in (2, 8)), (ALIKE, 64, 4, 32768, 1, 16, 128, 128),
        (ALIKE, 256, 4, 16384, 4, 16, 128, 64), (ALIKE, 16, 4, 32768, 4, 16, 128, 64), (ALIKE, 64, 4, 32768, 8, 4, 128, 64),
        (ALIKE, 64, 4, 32768, 4, 16, 64, 64), ("random", 64, 4, 32768, 1, 16, 128, 128),
    )  # fmt: skip
    return [
        Case(f"tokens-{kind}-B{B}-S{S}-{S_kv // 1024}k-G{G}-h{h}-D{D}", kind, B, S, S_kv, G, h, D, D, 16, block, "bfloat16")
        for kind, B, S, S_kv, G, h, D, block in sizes
    ]


def decodes(case: Case) -> bool:
    """Return True for a decoding step, of one token per sequence or of few. It is timed by graph replay."""
    return case.S <= FEW_TOKENS


def threshold_cases() -> list[Case]:
    """Return rows that select L keys, to find the L from which Triton pays: 1,024 rows of a prefill, and 64 decoded
    sequences.
    """
    sizes = [
        (kind, B, S, D, L) for kind, B, S in (("prefill", 1, 1024), ("decode", 64, 1)) for D in (64, 128) for L in (64, 256, 1024, 4096)
    ]
    return [Case(f"threshold-{kind}-D{D}-L{L}", "random", B, S, 8192, 2, 4, D, D, L // 64, 64, "bfloat16") for kind, B, S, D, L in sizes]


def layer_cases() -> list[Case]:
    """Return every layer of the committed maps with its 3 KV heads, 8k rows: alone, and four different ones as a batch;
    h 16, 4, 1.

    The last of the 8 batches wraps to the first layers.
    """
    alone = [(layer,) for layer in range(LAYERS)]
    batches = [tuple(layer % LAYERS for layer in range(first, first + 4)) for first in range(0, LAYERS, 4)]
    return [
        Case(f"real-8k-{layer_name(layers)}-h{h}", "real", len(layers), 8192, 8192, 3, h, 128, 128, 16, 64, "bfloat16")
        for layers in (*alone, *batches)
        for h in (16, 4, 1)
    ]


def scaling_cases() -> list[Case]:
    """Return random selections from 8k to 128k rows, h 16, 4, 1: does the time grow linearly?"""
    return [prefill("random", S * 1024, h) for S in (8, 32, 64, 128) for h in (16, 4, 1)]


def breakeven_cases() -> list[Case]:
    """Return the lengths at which selection overtakes dense attention: 1k to 8k rows of text, 16k to 64k random ones, h
    16, 4, 1.
    """
    lengths = [("real", S) for S in (1, 2, 4, 8)] + [("random", S) for S in (16, 32, 64)]
    return [prefill(kind, S * 1024, h) for kind, S in lengths for h in (16, 4, 1)]


def cost_cases() -> list[Case]:
    """Return what `nsa-sel tune` measures with every backend for the cost models, in minutes.

    Small calls for the host's share, real and random selections for what neighbors share, 64 to 4,096 keys per row, h
    16, 4 and 1, head dims 64, 128 and 192 with 128, large blocks, and decoding of fewer rows than multiprocessors and
    of more, one token per step or few.
    """
    found = [prefill(kind, S * 1024, h) for kind, S in (("real", 1), ("real", 8), ("random", 8), ("random", 32)) for h in (16, 4, 1)]
    wide = [prefill("real", 1024, 4, Dk=192), prefill("real", 8192, 16, Dk=192), prefill("random", 32768, 16, Dk=192)]
    narrow = prefill("real", 8192, 4, Dk=64)._replace(Dv=64)
    between = ("prefill-D64-L256", "decode-D64-L256", "decode-D64-L1024", "decode-D128-L256")
    lengths = [case for case in threshold_cases() if not case.case.endswith(between)]
    by_length = [case._replace(case=case.case.replace("threshold", "cost")) for case in lengths]
    one, batch, large = decode_cases()[:3]
    ranks = [case for case in parallel_cases() if (case.B, case.G, case.block) in ((8, 2, 128), (64, 1, 128))]
    decoding = [one, batch, large, *ranks, batch._replace(case="decode-B16-32k-h16-192", B=16, Dk=192), *few_token_cases()[:5]]
    return [*found, narrow, *wide, *by_length, large_cases()[0], large_cases()[-1], *decoding]


def choice_cases() -> list[Case]:
    """Return the same for choosing: prefills of 1k to 32k rows with h 16, 4, 1, head dims 64 and 192, and a chunk of a
    longer prefill.
    """
    found = [prefill(CHOICE, S * 1024, h) for S in (1, 8, 32) for h in (16, 4, 1)]
    narrow = prefill(CHOICE, 8192, 4, Dk=64)._replace(Dv=64)
    chunk = prefill(CHOICE, 1024, 16)._replace(case="choose-1k-of-32k-h16", S_kv=32768)
    return [*found, narrow, chunk, prefill(CHOICE, 8192, 16, Dk=192), prefill(CHOICE, 32768, 4, Dk=192)]


def trained_cases() -> list[Case]:
    """Return whole texts of the contexts that models were trained at, 4 of their (layer, group) maps, h 16, 4, 1; none
    without files.
    """
    found = []
    for S in trained.contexts():
        if S % 1024 == 0:  # not those of tests
            facts = trained.provenance(S)
            found += [prefill("trained", S, h)._replace(G=trained.GROUPS, n=facts["n"], block=facts["block_size"]) for h in (16, 4, 1)]
    return found


def text_case(S: int, h: int) -> Case | None:
    """Return S rows of text: SmolLM2's up to 8k, beyond that a trained model's; None if no file has as many."""
    if S <= REAL_ROWS:
        return prefill("real", S, h)
    return prefill("trained", S, h) if S <= max(trained.contexts(), default=0) else None


MODELS = {  # docs/choosing.md: G, h, Dk, Dv, n, block
    "nsa": (4, 16, 192, 128, 16, 64),
    "minimax-m3": (4, 16, 128, 128, 16, 128),
    "minicpm4": (2, 16, 128, 128, 96, 64),
    "qsa": (2, 12, 256, 256, 512, 4),
    "moba": (32, 1, 128, 128, 3, 512),  # G of q; k and v have 8
}


def model_cases() -> list[Case]:
    """Return the shapes of shipped models: 16k rows whose neighbors are alike (QSA's and MoBA's also random; QSA's up
    to 128k, MoBA's 32k), and decoding for 64 sequences of 32k keys (QSA's for 8 to 256)."""
    found = []
    for name, (G, h, Dk, Dv, n, block) in MODELS.items():
        kind, decoded = (PER_HEAD_ALIKE, PER_HEAD) if name == "moba" else (ALIKE, "random")
        found.append(Case(f"models-{name}-16k", kind, 1, 16384, 16384, G, h, Dk, Dv, n, block, "bfloat16"))
        found.append(Case(f"models-{name}-decode-B64-32k", decoded, 64, 1, 32768, G, h, Dk, Dv, n, block, "bfloat16"))
    by_name = {case.case: case for case in found}
    qsa, decoding, moba = (by_name[f"models-{name}"] for name in ("qsa-16k", "qsa-decode-B64-32k", "moba-16k"))
    return [
        *found, qsa._replace(case="models-qsa-random-16k", distribution="random"),
        *(qsa._replace(case=f"models-qsa-{rows >> 10}k", S=rows, S_kv=rows) for rows in (32768, 65536, 131072)),
        *(decoding._replace(case=f"models-qsa-decode-B{B}-32k", B=B) for B in (8, 32, 256)),
        moba._replace(case="models-moba-random-16k", distribution=PER_HEAD),
        moba._replace(case="models-moba-32k", S=32768, S_kv=32768),
    ]  # fmt: skip


def wide_cases() -> list[Case]:
    """Return keys and values of 256 columns over blocks of 64 and of 16 keys: real and random prefills, h 16, 4, 1, and
    decoding.
    """
    sizes = [("real", S, h) for S in (1024, 8192) for h in (16, 4, 1)] + [("random", 8192, 4), ("random", 32768, 16)]
    found = [prefill(*size, Dk=256)._replace(Dv=256) for size in sizes]
    small = prefill("random", 8192, 16, Dk=256)._replace(case="random-8k-h16-256-b16", Dv=256, n=64, block=16)
    decoding = [Case(f"decode-B{B}-32k-h16-256", "random", B, 1, 32768, 4, 16, 256, 256, 16, 64, "bfloat16") for B in (8, 64)]
    return [*found, small, *decoding]


def large_cases() -> list[Case]:
    """Return blocks of 256 to 4,096 keys of rows whose neighbors differ, h 1 (by MoBA's rule), 4 and 16."""
    sizes = (  # S, G, h, n, block
        (16384, 4, 4, 6, 256), (32768, 16, 1, 6, 1024), (16384, 4, 16, 4, 512), (65536, 8, 1, 3, 4096), (8192, 8, 4, 3, 512),
    )  # fmt: skip
    return [
        Case(f"large-{S >> 10}k-h{h}-b{block}", PER_HEAD if h == 1 else "random", 1, S, S, G, h, 128, 128, n, block, "bfloat16")
        for S, G, h, n, block in sizes
    ]


def serving_cases() -> list[Case]:
    """Return decoding over caches: one token per sequence (one stream, batches, a quarter of a model's groups per GPU),
    then four tokens.
    """
    one, four = [case for case in decode_cases() if (case.G, case.h) == (4, 16)], {case.case: case for case in few_token_cases()}
    of_ranks = [case for case in parallel_cases() if (case.B, case.G, case.h) == (64, 1, 16)]
    small = Case("decode-B16-32k-G2-h8", "random", 16, 1, 32768, 2, 8, 128, 128, 16, 64, "bfloat16")
    sizes = ("random-B1-S4-64k-G4", "alike-B64-S4-32k-G4", "alike-B64-S4-32k-G1", "alike-B256-S4-16k-G4")
    return [*one, *of_ranks, small, *(four[f"tokens-{size}-h16-D128"] for size in sizes)]


def quick_cases() -> list[Case]:
    """Return small cases of each kind: a real and a random prefill, and decoding."""
    return [
        *(Case(f"quick-{kind}-1k-h4", kind, 1, 1024, 1024, 2, 4, 64, 64, 16, 64, "bfloat16") for kind in ("real", "random")),
        Case("quick-decode-B4-4k-h4", "random", 4, 1, 4096, 2, 4, 64, 64, 16, 64, "bfloat16"),
    ]


def packed_cases() -> list[Case]:
    """Return 32k rows in 12 sequences of 256 to 12k, h 16 and 4: all starting on a block of 64, or between blocks."""
    return [
        Case(f"packed-{kind}-32k-h{h}", "packed", 1, 32768, 32768, 4, h, 128, 128, 16, 64, "bfloat16")
        for kind in ("whole", "odd")
        for h in (16, 4)
    ]


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


def block_decode_case(N: int, H: int, D: int, Dv: int, l_sel: int, n_sel: int, dtype: str = "bfloat16") -> Case:
    """Return one query of each of N sequences over `DECODE_KEYS` keys, in one group of H heads: n_sel random blocks of
    l_sel keys.
    """
    name = f"decode-N{N}-H{H}-D{D}-Dv{Dv}-l{l_sel}-n{n_sel}"
    return Case(name, "random", N, 1, DECODE_KEYS, 1, H, D, Dv, n_sel, l_sel, dtype)


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


def layer_name(layers: tuple[int, ...]) -> str:
    """Return "layer07", or "layers04-05-06-07"."""
    return f"layer{'s' * (len(layers) > 1)}" + "-".join(f"{layer:02}" for layer in layers)


def layers_of(case: str) -> list[int]:
    """Return the layers that `layer_name` wrote into a case's name; none if there are none."""
    found = re.search(r"-layers?(\d\d(?:-\d\d)*)-", case)
    return [int(layer) for layer in found[1].split("-")] if found else []


def spread_maps(blocks: np.ndarray, G: int) -> np.ndarray:
    """Return G of the (layer, KV head) maps in blocks [layers, rows, KV heads, n], evenly spread: [rows, G, n]."""
    maps = blocks.transpose(0, 2, 1, 3).reshape(-1, blocks.shape[1], blocks.shape[3])
    return np.stack([maps[i] for i in trained.spread(len(maps), G)], axis=1)


@cache
def _blocks(file: str, array: str) -> Tensor:
    """Return the blocks of 64 keys that SmolLM2-135M's queries and keys choose over 8,192 tokens, int8; -1 is padding."""
    path = resources.files("nsa_sel") / "bench" / "data" / file
    if not path.is_file():
        raise NsaSelError(f"{file} is not part of an installed package. Remedy: run this from a checkout, which has bench/data/{file}.")
    with path.open("rb") as opened, np.load(opened) as arrays:
        return torch.from_numpy(arrays[array].view(np.int8))


def real_selection(G: int, device: torch.device | str, S: int = REAL_ROWS) -> Selection:
    """Return the first S of 8,192 rows, 16 blocks of 64 keys: G of the 90 (layer, KV head) maps, evenly spread; G is
    one of `MAPS`.

    Blocks are chosen causally, so the first S rows are what the model selects in a text of S tokens.
    """
    return Selection.from_blocks(_blocks("smollm2_maps.npz", f"G{G}")[None, :S].to(device), 64, disjoint=True)


def layer_selection(layers: list[int], device: torch.device | str) -> Selection:
    """Return 8,192 rows of whole layers, one per batch entry, with their 3 KV heads as groups. Needs a checkout."""
    return Selection.from_blocks(_blocks("smollm2_selections.npz", "block_indices")[layers].to(device), 64, disjoint=True)


def random_selection(case: Case, device: torch.device | str, seed: int, at_once: int = SCORES_AT_ONCE) -> Selection:
    """Return the best blocks by normally distributed scores, drawn for as many rows at a time as `at_once` scores
    allow.

    The first, the previous and the current block are always among the n; in a MoBA case only the current one. The draws
    depend on the device and on `at_once`. Where neighbors are alike, the rows of a sequence and group share a part of
    their scores.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks = -(-case.S_kv // case.block)
    rows = max(1, at_once // (case.B * case.G * blocks))
    alike = case.distribution in (ALIKE, PER_HEAD_ALIKE)
    ranges, shared = [], ALIKE_SHARE * _normal(case.B, 1, case.G, blocks, generator) if alike else 0.0
    for start in range(case.S_kv - case.S, case.S_kv, rows):
        position = torch.arange(start, min(start + rows, case.S_kv), device=device)
        ranges.append(random_rows(case, position, generator, shared))
    return Selection(torch.cat(ranges, 1), case.block, disjoint=True)


def random_rows(case: Case, position: Tensor, generator: torch.Generator, shared: Tensor | float = 0.0) -> Tensor:
    """Return ranges [B,rows,G,n,2] of random rows at these positions [rows]. shared: the common part of their scores."""
    first, local = (0, 1) if case.distribution in PER_HEADS else (int(case.n > 1), min(2, max(1, case.n - 1)))
    scores = shared + _normal(case.B, len(position), case.G, -(-case.S_kv // case.block), generator)
    return Selection.from_scores(scores, case.n, case.block, first, local, S_kv=case.S_kv, q_pos=position).ranges


def _normal(B: int, S: int, G: int, blocks: int, generator: torch.Generator) -> Tensor:
    return torch.randn(B, S, G, blocks, device=generator.device, generator=generator)


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
    layers = layers_of(case.case)
    if case.distribution == "trained":
        return trained.trained_selection(case.S, device, layers)
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
