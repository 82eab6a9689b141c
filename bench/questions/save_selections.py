"""Save the blocks that a trained model's layers choose in held-out text: the long texts of the benches (bench/data/README.md).

    python examples/train_nsa_lm.py --out runs/32k --context 32768   # first
    python -m nsa_sel.bench.questions.save_selections runs/32k       # writes bench/data/trained_32768.npz

The model runs once, without gradients, over one context of the part of the text that was never trained on: the first one of the batch
that the run's `held_out_loss` is of. The file keeps as many layers as --most-bytes allow, evenly spread.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import Tensor
from torch.nn.functional import cross_entropy

from nsa_sel import three_branches
from nsa_sel.bench.core import environment, store, trained
from nsa_sel.bench.core.command_line import Device, device_of, program
from nsa_sel.errors import ArgumentError

MOST_BYTES = 3_000_000


def fingerprint(data: Tensor) -> str:
    """SHA-256 of bytes."""
    return hashlib.sha256(data.to(torch.uint8).numpy().tobytes()).hexdigest()


def checkpoint_of(run: Path) -> tuple[dict[str, Any], Tensor]:
    """A run's checkpoint and its text, or ArgumentError."""
    state = environment.example("nsa_lm").nsa_checkpoint(run, "text.bin", "losses.jsonl")
    text = environment.example("byte_text").load_text(None, run / "text.bin", state["sizes"]["context"])
    if not fingerprint(text).startswith(state["text"]):
        raise ArgumentError("text.bin", "of another text than the checkpoint's", state["text"], "restore the run's own text.bin")
    return state, text


@torch.no_grad()
def losses(model: Any, data: Tensor, device: torch.device) -> Tensor:
    """Nats of every byte but the first of data [1,S+1], in the precision of training: [S]."""
    data = data.to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(data[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten(), reduction="none")


def chosen_blocks(model: Any, data: Tensor, device: torch.device) -> tuple[list[Tensor], float]:
    """The blocks [S,G,n] int16 that every layer chooses over data [1,S+1], and the mean loss."""
    blocks: list[Tensor] = []
    attend = three_branches.attend

    def recording(*arguments: Any) -> Any:
        passes, selection = attend(*arguments)
        blocks.append(selection.block_indices[0].to("cpu", torch.int16))
        return passes, selection

    with mock.patch.object(three_branches, "attend", recording):
        loss = losses(model, data, device).mean()
    return blocks, float(loss)


def saved(run: Path, device: torch.device, most: int, backend: str | None = None) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the file, and where they come from.

    Args:
        run: a folder of train_nsa_lm.py.
        device: to run the model on.
        most: bytes.
        backend: of the selected branch.
    """
    state, text = checkpoint_of(run)
    model, sizes = environment.example("nsa_lm").trained_model(state, backend)
    model.to(device)
    data = environment.example("train_nsa_lm").batch_at(text, 0, sizes, held_out=True)[:1]
    blocks, loss = chosen_blocks(model, data, device)
    if len(blocks) != sizes.layers:
        raise RuntimeError(f"{len(blocks)} calls of nsa_sel.three_branches.attend in {sizes.layers} layers")
    rows = store.read(run / "losses.jsonl")
    trained_on = {name: rows[-1].get(name) for name in ("device", "torch", "triton", "commit", "command", "seconds")}
    held_out = [row["held_out_loss"] for row in rows if "held_out_loss" in row]
    facts = {
        "model": "examples/train_nsa_lm.py", "sizes": asdict(sizes), "step": state["step"], "training": trained_on,
        "training_loss": rows[-1]["loss"], "held_out_loss": held_out[-1] if held_out else None,
        "text_bytes": len(text), "text_sha256": fingerprint(text), "passage_sha256": fingerprint(data), "passage_loss": loss,
        "python": platform.python_version(), **environment.stamp(device.type),
    }  # fmt: skip
    return trained.fitting(dict(enumerate(blocks)), sizes.block, facts, most), facts


def main(
    run: Annotated[Path, typer.Argument(help="folder of a run of train_nsa_lm.py")],
    out: Annotated[Path | None, typer.Option(help="the file, by default trained_CONTEXT.npz in bench/data")] = None,
    most_bytes: Annotated[int, typer.Option(help="size of the file; layers are left out until it fits")] = MOST_BYTES,
    device: Device = "auto",
) -> None:
    """Run a trained model over held-out text, and save which blocks its layers choose."""
    content, facts = saved(run, torch.device(device_of(device)), most_bytes)
    file = out or trained.file_of(facts["sizes"]["context"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    print(f"{file.name}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")
    print(f"step {facts['step']}, loss {facts['passage_loss']:.4f} on this text; {facts['held_out_loss']} of the run's held-out batch")


if __name__ == "__main__":
    program(main)
