"""The cases that the benches measure: sizes, and selections that are random or a language model's own."""

from __future__ import annotations

from importlib import resources
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nsa_sel.selection import Selection

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Case(NamedTuple):
    """Sizes of one case; `distribution`: random (scores from a normal distribution) or real (SmolLM2's selections)."""

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


def performance_cases() -> list[Case]:
    """The prefill cases of the performance table: real 8k, random 8k and 32k, h 16, 4, 1, and the paper's 192/128 head dims."""
    cases = [
        Case(f"{kind}-{S // 1024}k-h{h}", kind, 1, S, S, 4, h, 128, 128, 16, 64, "bfloat16")
        for kind, S in (("real", 8192), ("random", 8192), ("random", 32768))
        for h in (16, 4, 1)
    ]
    return [*cases, Case("random-32k-h16-192", "random", 1, 32768, 32768, 4, 16, 192, 128, 16, 64, "bfloat16")]


def decode_cases() -> list[Case]:
    """One query a sequence over a long cache: one stream, a batch, a large batch, and small groups."""
    sizes = ((1, 65536, 4, 16), (64, 32768, 4, 16), (256, 16384, 4, 16), (64, 32768, 8, 4))
    return [Case(f"decode-B{B}-{S // 1024}k-h{h}", "random", B, 1, S, G, h, 128, 128, 16, 64, "bfloat16") for B, S, G, h in sizes]


def threshold_cases() -> list[Case]:
    """Rows that select L keys, for the L from which Triton pays: 1024 rows of a prefill, and 64 decoded sequences."""
    sizes = [
        (kind, B, S, D, L) for kind, B, S in (("prefill", 1, 1024), ("decode", 64, 1)) for D in (64, 128) for L in (64, 256, 1024, 4096)
    ]
    return [Case(f"threshold-{kind}-D{D}-L{L}", "random", B, S, 8192, 2, 4, D, D, L // 64, 64, "bfloat16") for kind, B, S, D, L in sizes]


def real_selection(G: int, device: torch.device | str) -> Selection:
    """8192 rows, 16 blocks of 64 keys, as SmolLM2-135M's queries and keys choose: G of the 90 (layer, KV head) maps, evenly spread."""
    file = resources.files("nsa_sel") / "bench" / "data" / "smollm2_selections.npz"
    with file.open("rb") as opened, np.load(opened) as arrays:
        maps = arrays["block_indices"]  # [layers, 8192, KV heads, 16] uint8, 255 is padding
    maps = maps.transpose(0, 2, 1, 3).reshape(-1, *maps.shape[1::2])
    chosen = [len(maps) * (2 * g + 1) // (2 * G) for g in range(G)]
    indices = torch.from_numpy(np.stack([maps[c] for c in chosen], axis=1)[None].view(np.int8).copy())
    return Selection.from_blocks(indices.to(device), 64)


def make_selection(case: Case, device: torch.device | str, seed: int = 0) -> Selection:
    """The selection of a case; the first, the previous and the current block are always among the n of a random one."""
    if case.distribution == "real":
        return real_selection(case.G, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks = -(-case.S_kv // case.block)
    scores = torch.randn(case.B, case.S, case.G, blocks, device=device, generator=generator)
    return Selection.from_scores(scores, case.n, case.block, first=int(case.n > 1), local=min(2, max(1, case.n - 1)), S_kv=case.S_kv)


def make_inputs(case: Case, device: torch.device | str, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standard normal q [B,S,G,h,Dk], k [B,G,S_kv,Dk], v [B,G,S_kv,Dv] and the gradient do of o, in the case's dtype."""
    generator = torch.Generator(device=device).manual_seed(seed)
    B, S, S_kv, G, h, Dk, Dv = case[2:9]
    sizes = (B, S, G, h, Dk), (B, G, S_kv, Dk), (B, G, S_kv, Dv), (B, S, G, h, Dv)
    q, k, v, do = (torch.randn(size, device=device, generator=generator, dtype=DTYPES[case.dtype]) for size in sizes)
    return q, k, v, do
