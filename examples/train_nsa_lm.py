"""Train a small byte-level language model with Native Sparse Attention (arXiv 2502.11089): `nsa_sel.NSAttention` in every layer.

    python examples/train_nsa_lm.py --out runs/nsa                            # 8 minutes at 8k context on one H200; again: it resumes
    python examples/train_nsa_lm.py --out runs/32k --context 32768            # one sequence a step instead of four: as many tokens
    python examples/train_nsa_lm.py --out runs/packed --backend sdpa-packed   # the same run on another backend
    python examples/train_nsa_lm.py --out runs/dense --attention dense        # the same model with dense causal attention
    python examples/train_nsa_lm.py --out runs/tiny --tiny                    # a size for a CPU
    torchrun --standalone --nproc-per-node 2 examples/train_nsa_lm.py --out runs/sliced --parallel context    # several_ranks.py

The text is the machine's documentation, or the files of a folder (--text). The folder --out holds text.bin, checkpoint.pt, losses.jsonl
(one line per step) and losses.png. Start an interrupted or finished run again to resume it: losses are those of an uninterrupted run,
also on another number of ranks. `examples/compare_losses.py` compares runs. Needs the extra `cli`, and matplotlib (`report`) for the
picture.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import os
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import records
import torch
import typer
from byte_text import HELD_OUT, load_text
from graphed_step import GraphedStep
from loss_curves import Curve, draw
from nsa_lm import TINY, LanguageModel, Sizes
from options import Device, device_of, program
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy

from nsa_sel import decisions
from nsa_sel.errors import ArgumentError, NsaSelError

if TYPE_CHECKING:
    from several_ranks import Ranks

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def of_context(sizes: Sizes, context: int | None, batch: int | None) -> Sizes:
    """Return the sizes with another context, and with a batch of about as many bytes unless `batch` is given."""
    context = context or sizes.context
    return replace(sizes, context=context, batch=batch or max(1, sizes.batch * sizes.context // context))


def batch_at(text: Tensor, step: int, sizes: Sizes, held_out: bool = False) -> Tensor:
    """Return the bytes [batch, context + 1] int64 of one step. They depend only on the seed and the step."""
    border = len(text) - len(text) // HELD_OUT
    source = text[border:] if held_out else text[:border]
    generator = torch.Generator().manual_seed((sizes.seed << 32) + 2 * step + held_out)
    starts = torch.randint(len(source) - sizes.context, (sizes.batch,), generator=generator)
    return torch.stack([source[start : start + sizes.context + 1] for start in starts.tolist()]).long()


# The run


class Training:
    """A model, its optimizer and the next step: the contents of a checkpoint."""

    def __init__(
        self, sizes: Sizes, backend: str | None, device: torch.device, text: Tensor, graph: bool = True, ranks: Ranks | None = None
    ) -> None:
        torch.manual_seed(sizes.seed)
        self.sizes, self.device, self.text, self.step, self.ranks = sizes, device, text, 0, ranks
        self.model = LanguageModel(sizes, backend).to(device)
        parameters: Any = self.model.parameters() if ranks is None else ranks.spread(self.model)
        self.graph = GraphedStep(self.update, device) if graph and device.type == "cuda" else None
        self.rate = torch.zeros((), device=device)  # a tensor, so that a captured step reads the current value
        options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True, "capturable": self.graph is not None}
        self.optimizer = torch.optim.AdamW(parameters, self.rate, **options)
        fingerprint = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]
        self.identity = {"sizes": asdict(sizes), "text": fingerprint, "graph": self.graph is not None}

    def loss(self, data: Tensor) -> Tensor:
        """Return the loss of a batch, or of this rank's part of it."""
        given, following = (data[:, :-1], data[:, 1:]) if self.ranks is None else self.ranks.part_of(data)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(given)
        return cross_entropy(logits.flatten(0, 1).float(), following.flatten())

    def update(self, data: Tensor) -> Tensor:
        """Run forward, backward and the optimizer's step, and return the loss."""
        loss = self.loss(data)
        self.optimizer.zero_grad()
        loss.backward()
        clip = nn.utils.clip_grad_norm_ if self.ranks is None else several_ranks().clip
        clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()

    def advance(self) -> float:
        """Run one training step and return its loss."""
        step = self.step + 1
        self.rate.fill_(self.sizes.learning_rate * min(step / self.sizes.warmup, math.sqrt(self.sizes.warmup / step)))
        data = batch_at(self.text, self.step, self.sizes).to(self.device)
        loss = self.graph.run(data) if self.graph else self.update(data)
        self.step += 1
        return self.mean(loss)  # synchronizes, so that the measured time of a step covers its work

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss of one fixed batch of the held-out text."""
        return self.mean(self.loss(batch_at(self.text, 0, self.sizes, held_out=True).to(self.device)))

    def mean(self, loss: Tensor) -> float:
        """Return the mean loss of all ranks."""
        return loss.item() if self.ranks is None else several_ranks().mean(loss)

    def save(self, file: Path) -> None:
        """Replace the checkpoint atomically. It holds unsharded tensors, whatever the number of ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=WHOLE)
        if self.ranks is not None and self.ranks.rank:
            return
        state = {"model": model, "optimizer": optimizer, "step": self.step, **self.identity}
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        with unfinished.open("wb") as opened:
            torch.save(state, opened)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(file)

    def load(self, file: Path) -> None:
        """Resume from a checkpoint of the same run. Raises ArgumentError for another run."""
        state = torch.load(file, map_location=self.device, weights_only=True)
        for name, mine in self.identity.items():
            if state[name] != mine:
                raise ArgumentError("--out", f"a folder of a run with other {name}: {state[name]}", str(mine), "pass another folder")
        both = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **both, options=WHOLE)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.step = state["step"]


def train(
    out: Path, sizes: Sizes, backend: str | None, device: torch.device, text: Path | None, minutes: float, steps: int | None, every: int,
    graph: bool, ranks: Ranks | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train for `minutes` or until step `steps`, with a checkpoint after every `every` steps.

    Args:
        ranks: the ranks that train together. The first one writes the files.

    Returns:
        All rows of the run, including earlier ones.
    """
    out.mkdir(parents=True, exist_ok=True)
    checkpoint, log, writes = out / "checkpoint.pt", out / "losses.jsonl", ranks is None or ranks.rank == 0
    read = functools.partial(load_text, text, out / "text.bin", sizes.context)
    training = Training(sizes, backend, device, read() if ranks is None else several_ranks().first_before_others(read), graph, ranks)
    if checkpoint.exists():
        training.load(checkpoint)
    rows = [row for row in records.read(log) if row["step"] < training.step]  # steps after the checkpoint are trained again
    if writes:
        records.replace(log, rows)
    facts = records.facts(device.type)
    if ranks is not None:
        facts |= {"parallel": ranks.way, "ranks": ranks.mesh.size()}
    started, tokens = time.perf_counter(), sizes.batch * sizes.context
    trained = sum(row["ms"] for row in rows) / 1e3
    while (steps is None or training.step < steps) and in_time(started, minutes, ranks):
        step, began = training.step, time.perf_counter()
        loss = training.advance()
        ms = (time.perf_counter() - began) * 1e3
        trained += ms / 1e3
        row: dict[str, Any] = {
            "step": step, "loss": loss, "ms": round(ms, 3), "tokens_per_second": round(tokens / ms * 1e3),
            "seconds": round(trained, 3), "attention": sizes.attention, "backend": chosen(sizes), **facts,
        }  # fmt: skip
        if training.step % every == 0:
            row["held_out_loss"] = training.held_out_loss()
        rows.append(row)
        if writes:
            records.append(log, [row])
        if training.step % every == 0:
            training.save(checkpoint)
        if training.step % every == 0 and writes:
            print(f"step {training.step}: loss {loss:.4f}, held out {row['held_out_loss']:.4f}, {row['tokens_per_second']} tokens/s")
    training.save(checkpoint)
    held_out = Curve("held out", [(row["step"], row["held_out_loss"]) for row in rows if "held_out_loss" in row], "o-")
    if writes:
        try:
            draw(out / "losses.png", "loss, nats a byte", [Curve("training", [(row["step"], row["loss"]) for row in rows]), held_out])
        except NsaSelError as error:  # matplotlib is optional
            print(error)
    return rows


def in_time(started: float, minutes: float, ranks: Ranks | None) -> bool:
    """Return True if time is left, by the first rank's clock."""
    left = time.perf_counter() - started < minutes * 60
    return left if ranks is None else several_ranks().of_first(left)


def several_ranks() -> Any:
    """Import the module on demand: its imports take seconds that a single process does not need."""
    return importlib.import_module("several_ranks")


def chosen(sizes: Sizes) -> str | None:
    """Return the backends of the last selected branch, forward and backward; None for dense attention."""
    if sizes.attention == "dense":
        return None
    last = next(decision for decision in reversed(decisions()) if decision.request.kind == "attend")
    return str(last.forward) if last.backward in (None, last.forward) else f"{last.forward} / {last.backward}"


def main(
    out: Annotated[Path, typer.Option(help="folder of the run; an existing one is resumed")],
    minutes: Annotated[float, typer.Option(help="of training in this process; start it again for more")] = 8,
    steps: Annotated[int | None, typer.Option(help="the step to stop at, counted from the run's beginning")] = None,
    attention: Annotated[str, typer.Option(help="nsa, or dense: full causal attention in its place")] = "nsa",
    backend: Annotated[str | None, typer.Option(help="of the selected branch; by default the policy chooses")] = None,
    text: Annotated[Path | None, typer.Option(help="folder or file of text, such as a run's text.bin; by default the machine's")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="a size for a CPU")] = False,
    context: Annotated[int | None, typer.Option(help="bytes of a sequence, such as 8192, 32768 or 65536")] = None,
    batch: Annotated[int | None, typer.Option(help="sequences a step, by default as many as keep its bytes, at least one")] = None,
    seed: Annotated[int, typer.Option(help="of weights and batches")] = 0,
    every: Annotated[int, typer.Option(help="steps between checkpoints")] = 100,
    graph: Annotated[bool, typer.Option(help="capture a step as a CUDA graph, on a GPU")] = True,
    parallel: Annotated[str | None, typer.Option(help="under torchrun: data, context, or tensor (several_ranks.py)")] = None,
    device: Device = "auto",
) -> None:
    """Train, or resume training, a byte-level language model with NSA."""
    if attention not in ("nsa", "dense"):
        raise ArgumentError("--attention", repr(attention), "nsa, dense", "pass one of these")
    if attention == "dense" and backend is not None:
        raise ArgumentError("--backend", repr(backend), "none with --attention dense", "leave one of the two out")
    sizes = of_context(replace(TINY if tiny else Sizes(), attention=attention, seed=seed), context, batch)
    here, ranks = torch.device(device_of(device)), None
    if parallel is not None:
        ranks, here = several_ranks().join(parallel, sizes, here)
        graph = False
    rows = train(out, sizes, backend, here, text, minutes, steps, every, graph, ranks)
    if rows and (ranks is None or ranks.rank == 0):
        print(f"{len(rows)} steps, loss {rows[-1]['loss']:.4f}: {out}")


if __name__ == "__main__":
    program(main)
