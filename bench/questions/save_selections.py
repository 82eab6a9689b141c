"""Save the blocks that a trained model's layers choose in held-out text: the long texts of the benches
(bench/data/README.md).

    python examples/train_nsa_lm.py --out runs/32k --context 32768   # first
    python -m nsa_sel.bench.questions.save_selections runs/32k       # writes bench/data/trained_32768.npz

The model runs once, without gradients, over one context of the text that it was not trained on: the first one of the
batch of the run's `held_out_loss`. The file keeps as many layers as --most-bytes allow, evenly spread.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy

from nsa_sel import three_branches
from nsa_sel.bench.core import store, trained
from nsa_sel.bench.core.command_line import Device, device_of, program
from nsa_sel.errors import ArgumentError

MOST_BYTES = 3_000_000


def contents(by_layer: Mapping[int, Tensor], block_size: int, facts: Mapping[str, Any]) -> bytes:
    """Return the bytes of a file.

    Args:
        by_layer: for each layer the chosen blocks [S,G,n], ascending, -1 last where a row has fewer than n.
        block_size: keys per block.
        facts: the origin, for the provenance.

    Raises:
        ArgumentError: indices that would not be read back as they are.
    """
    (S, G, n), *others = {tuple(blocks.shape) for blocks in by_layer.values()}
    count = -(-S // block_size)
    sizes = {"context": S, "groups": G, "n": n, "block_size": block_size, "blocks": count, "layers": list(by_layer)}
    arrays: dict[str, Any] = {}
    for layer, tensor in by_layer.items():
        blocks = tensor.numpy().astype("<i2")
        chosen = np.zeros((S, G, count + 1), bool)
        np.put_along_axis(chosen, blocks.astype(np.int64) % (count + 1), True, 2)  # -1 becomes an extra last column, dropped again
        by_block = chosen[..., :count].transpose(1, 2, 0)
        bits = np.packbits(by_block ^ np.pad(by_block[..., :-1], ((0, 0), (0, 0), (1, 0))), axis=-1)
        arrays[trained.name_of(layer)] = bits
        if others or not np.array_equal(trained.indices(bits, S, n), blocks):
            allowed = f"[S,G,n] of one shape, ascending indices of {count} blocks, then -1"
            raise ArgumentError(f"the blocks of layer {layer}", f"others, of shape {tuple(tensor.shape)}", allowed, "sort each row")
    file = io.BytesIO()
    np.savez_compressed(file, **arrays, provenance=np.array(json.dumps({**facts, **sizes}, sort_keys=True)))
    return file.getvalue()


def fitting(by_layer: Mapping[int, Tensor], block_size: int, facts: Mapping[str, Any], most: int) -> bytes:
    """Return `contents` of as many layers, evenly spread, as fit in `most` bytes.

    Raises ArgumentError for fewer than a case needs.
    """
    layers, size = list(by_layer), 0
    least = -(-trained.GROUPS // by_layer[layers[0]].shape[1])
    for count in range(len(layers), least - 1, -1):
        made = contents({layers[i]: by_layer[layers[i]] for i in trained.spread(len(layers), count)}, block_size, facts)
        size = len(made)
        if size <= most:
            return made
    allowed = f"at least {size} bytes, for {least} layers"
    raise ArgumentError("--most-bytes", f"{most} bytes for {len(layers)} layers", allowed, "allow more bytes, or train more layers")


@torch.no_grad()
def chosen_blocks(model: Any, data: Tensor, device: torch.device) -> tuple[list[Tensor], float]:
    """Return the blocks [S,G,n] int16 that every layer chooses over data [1,S+1], and the mean loss."""
    blocks: list[Tensor] = []
    attend, data = three_branches.run_branches, data.to(device)

    def recording(*arguments: Any) -> Any:
        passes, selection = attend(*arguments)
        blocks.append(selection.block_indices[0].to("cpu", torch.int16))
        return passes, selection

    autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
    with mock.patch.object(three_branches, "run_branches", recording), autocast:
        logits = model(data[:, :-1])
    return blocks, float(cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten()))


def saved(run: Path, device: torch.device, most: int, backend: str | None = None) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of the file and their origin.

    Args:
        run: a folder of train_nsa_lm.py.
        device: to run the model on.
        most: bytes.
        backend: of the selected branch.
    """
    program, models = store.example("train_nsa_lm"), store.example("nsa_lm")
    state = models.nsa_checkpoint(run, "text.bin", "losses.jsonl")
    model, sizes = models.trained_model(state, backend)
    text = program.load_text(None, run / "text.bin", sizes.context)
    model.to(device)
    data = program.batch_at(text, 0, sizes, held_out=True)[:1]
    blocks, loss = chosen_blocks(model, data, device)
    if len(blocks) != sizes.layers:
        raise RuntimeError(f"{len(blocks)} calls of nsa_sel.three_branches.run_branches in {sizes.layers} layers")
    log = store.read(run / "losses.jsonl")
    held_out = [row["held_out_loss"] for row in log if "held_out_loss" in row]
    facts = {
        "model": "examples/train_nsa_lm.py", "sizes": asdict(sizes), "step": state["step"], "training_loss": log[-1]["loss"],
        "training": {name: log[-1].get(name) for name in ("device", "torch", "triton", "commit", "command", "seconds")},
        "held_out_loss": held_out[-1] if held_out else None, "text_bytes": len(text),
        "text_sha256": hashlib.sha256(text.to(torch.uint8).numpy().tobytes()).hexdigest(),
        "passage_sha256": hashlib.sha256(data.to(torch.uint8).numpy().tobytes()).hexdigest(), "passage_loss": loss,
        "python": platform.python_version(), **store.stamp(device.type),
    }  # fmt: skip
    return fitting(dict(enumerate(blocks)), sizes.block, facts, most), facts


def main(
    run: Annotated[Path, typer.Argument(help="folder of a run of train_nsa_lm.py")],
    out: Annotated[Path | None, typer.Option(help="the file, by default trained_CONTEXT.npz in bench/data")] = None,
    most_bytes: Annotated[int, typer.Option(help="size of the file; layers are left out until it fits")] = MOST_BYTES,
    device: Device = "auto",
) -> None:
    """Run a trained model over held-out text, and save which blocks its layers choose."""
    content, facts = saved(run, torch.device(device_of(device)), most_bytes)
    file = out or trained.file_of(facts["sizes"]["context"])
    file.write_bytes(content)
    print(f"{file.name}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    print(f"step {facts['step']}, loss {facts['passage_loss']:.4f} on this text; {facts['held_out_loss']} of the run's held-out batch")


if __name__ == "__main__":
    program(main)
