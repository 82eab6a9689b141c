"""The demo's second part: an attention layer of MiniMax-M3 in transformers, and the same layer after `patch_model`."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
import torch

from nsa_sel.bench.core import timing
from nsa_sel.compat.transformers import minimax_m3
from nsa_sel.errors import ArgumentError
from nsa_sel.telemetry.describe import table

WAYS = {"transformers": "transformers, sdpa", "nsa-sel": "the same, after patch_model"}
SMALL = {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "index_n_heads": 2, "index_head_dim": 64,
    "index_block_size": 64, "index_topk_blocks": 8,
}  # fmt: skip
TOKENS = {"cpu": (4096,), "cuda": (16384, 8192, 4096, 2048)}  # the first whose masks fit the memory
GIB_16K = 120  # of memory that transformers takes at 16k tokens; it grows with their square
DIFFERENCE = {"cpu": 1e-4, "cuda": 1e-2}  # largest, over the largest output: float32, bf16
CALLS = {"cpu": 3, "cuda": 10}


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Both layers' times, and how far their outputs are apart."""

    layer: str
    tokens: int
    ms: dict[str, float]  # medians, by way
    peak_gib: dict[str, float]  # beyond weights and inputs; empty on a CPU
    difference: float  # largest, over the largest output
    passed: bool


def run(device: str) -> Compared | str:
    """Run the layer in both ways on "cuda" in bf16, at its real size, or on "cpu" in float32, a small one; return why
    not where transformers is not installed or is older than 5.17."""
    try:
        import transformers.models.minimax_m3_vl  # noqa: F401

        from nsa_sel.bench.questions.released_models import prefill

        minimax_m3.check_transformers()
    except ImportError as error:
        return f"No layer of MiniMax-M3 was run: {error}. Remedy: pip install 'transformers>=5.17'."
    except ArgumentError as error:
        return f"No layer of MiniMax-M3 was run: {error}"

    sizes: dict[str, Any] = SMALL if device == "cpu" else {}
    free = torch.cuda.mem_get_info()[0] / 2**30 if device == "cuda" else 0.0
    fitting = [S for S in TOKENS[device] if device == "cpu" or GIB_16K * (S / 16384) ** 2 < free]
    S, ms, peak, outputs = (fitting or TOKENS[device][-1:])[0], dict[str, float](), dict[str, float](), []
    for way in WAYS:
        work = prefill("minimax-m3", way, S, False, device, **sizes)
        outputs.append(work().float().cpu())
        if device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            work()
            peak[way] = (torch.cuda.max_memory_allocated() - before) / 2**30
        ms[way] = statistics.median(timing.call_times(work, CALLS[device], device))
        del work
        if device == "cuda":
            torch.cuda.empty_cache()
    difference = float((outputs[1] - outputs[0]).abs().max() / outputs[0].abs().max())
    layer = (
        "a small one: 8 heads over 2 KV heads of 64, 8 blocks of 64 keys"
        if sizes
        else "64 heads over 4 KV heads of 128, 16 blocks of 128 keys"
    )
    return Compared(layer=layer, tokens=S, ms=ms, peak_gib=peak, difference=difference, passed=difference <= DIFFERENCE[device])


def text(compared: Compared) -> str:
    """Return both times and peaks as a table, and the difference."""
    own = compared.ms["transformers"]
    cells = [
        [name, f"{compared.ms[way]:.3g}", f"{own / compared.ms[way]:.3g}x", f"{compared.peak_gib[way]:.3g}" if compared.peak_gib else "-"]
        for way, name in WAYS.items()
    ]
    verdict = "" if compared.passed else "WRONG: "
    return "\n".join(
        (
            f"A MiniMax-M3 attention layer of transformers ({compared.layer}), prefill of {compared.tokens:,} tokens, random weights:",
            table(["", "ms", "speed", "peak GiB"], cells, right=range(1, 4)),
            f"{verdict}outputs differ by at most {compared.difference:.1e} of the largest.",
        )
    )
