"""Train a small byte-level language model with Native Sparse Attention (arXiv 2502.11089): `nsa_sel.NSAttention` in
every layer.

    python examples/train_nsa_lm.py --out runs/nsa                                # 8 minutes at 8k context on one H200
    python examples/train_nsa_lm.py --out runs/32k --context 32768                # one sequence a step instead of four
    python examples/train_nsa_lm.py --out runs/packed --backend sdpa-packed       # the same run on another backend
    python examples/train_nsa_lm.py --out runs/dense --attention dense            # the same model with dense attention
    python examples/train_nsa_lm.py --out runs/msa --attention msa                # MSA: dense first, while the indexer learns
    python examples/train_nsa_lm.py --out runs/tiny --tiny                        # a size for a CPU
    torchrun --standalone --nproc-per-node 2 examples/train_nsa_lm.py --out runs/sliced --parallel context

The text is the machine's documentation, or the files of a folder (--text). The folder --out holds text.bin,
checkpoint.pt and losses.jsonl (one line per step). Start an interrupted or finished run again to resume it: losses are
those of an uninterrupted run, also on another number of ranks (several_ranks.py). Needs the extra `cli`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from common import Device, Row, device_of, facts, program, read_rows, write_rows
from nsa_lm import TINY, LanguageModel, Sizes, attention_mass
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy

from nsa_sel import MSAttention, decisions
from nsa_sel.errors import ArgumentError

if TYPE_CHECKING:
    from several_ranks import Ranks

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
TEXT_ENDINGS = (".rst", ".txt", ".md")
MAX_BYTES = 64 << 20  # of text
MIN_FILE_BYTES = 200  # shorter texts are left out
HELD_OUT = 32  # 1 / HELD_OUT of the text is for validation


# The text


def documentation(folders: list[Path], most: int) -> Iterator[bytes]:
    """Yield texts below the folders, sorted by path: .rst, .txt and .md files first, then docstrings of Python files."""
    files = [file for folder in folders for file in sorted(folder.rglob("*")) if file.suffix in (*TEXT_ENDINGS, ".py")]
    digests: set[bytes] = set()
    for file in sorted(files, key=lambda file: file.suffix == ".py"):
        text = file.read_bytes() if most > 0 and file.is_file() and os.access(file, os.R_OK) else b""
        if file.suffix == ".py":
            text = b"\n\n".join(re.findall(rb'"""(.*?)"""', text, re.DOTALL))
        digest = hashlib.sha256(text).digest()
        if len(text) > MIN_FILE_BYTES and digest not in digests:  # packages share licenses
            digests.add(digest)
            most -= len(text)
            yield text


def load_text(source: Path | None, cache: Path, context: int) -> Tensor:
    """Return the training text as uint8. It is stored in `cache`, so that a resumed run uses the same text."""
    if not cache.exists():
        paths = sysconfig.get_paths()
        candidates = [Path("/usr/share/doc"), Path("/usr/lib/python3"), Path(paths["stdlib"]), Path(paths["purelib"])]
        folders = [source] if source else [folder for folder in candidates if folder.is_dir()]
        joined = source.read_bytes() if source and source.is_file() else b"\n\n".join(documentation(folders, MAX_BYTES))[:MAX_BYTES]
        least = 2 * HELD_OUT * context
        if len(joined) < least:
            where, allowed = ", ".join(map(str, folders)), f"at least {least} in .rst, .txt, .md files and docstrings of .py files"
            remedy = "pass --text with a folder of more text, or install some, such as `apt-get install python3-doc`"
            raise ArgumentError("--text", f"{len(joined)} bytes below {where}", allowed, remedy)
        cache.write_bytes(joined)
    return torch.frombuffer(bytearray(cache.read_bytes()), dtype=torch.uint8)


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


class GraphedStep:
    """Capture a function of one tensor of a fixed shape as a CUDA graph after its first calls, and replay it from then
    on.

    One launch replaces about a thousand, which would bound small models.
    """

    EAGER = 3  # calls before the capture, in which kernels compile and the policy decides

    def __init__(self, step: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.step, self.stream, self.graph, self.done = step, torch.cuda.Stream(device), torch.cuda.CUDAGraph(), 0

    def run(self, data: Tensor) -> Tensor:
        """Return the result of the step for `data`. The next call overwrites it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.done < self.EAGER:
                result = self.step(data)
            else:
                if self.done == self.EAGER:
                    self.data = data.clone()
                    with torch.cuda.graph(self.graph, stream=self.stream):
                        self.result = self.step(self.data)
                self.data.copy_(data)
                self.graph.replay()
                result = self.result
        self.done += 1
        torch.cuda.current_stream().wait_stream(self.stream)
        return result


class Training:
    """A model, its optimizer and the next step: the contents of a checkpoint."""

    def __init__(
        self, sizes: Sizes, backend: str | None, device: torch.device, text: Tensor, graph: bool = True, ranks: Ranks | None = None
    ) -> None:
        torch.manual_seed(sizes.seed)
        self.sizes, self.device, self.text, self.step, self.ranks = sizes, device, text, 0, ranks
        self.model = LanguageModel(sizes, backend).to(device)
        self.msa = [layer for layer in self.model.modules() if isinstance(layer, MSAttention)]
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
        """Run one training step and return its loss. Layers of MSA are dense in the first steps."""
        step, dense = self.step + 1, self.step < self.sizes.dense_steps
        if any(layer.warm_up != dense for layer in self.msa):
            for layer in self.msa:
                layer.warm_up = dense
            self.graph = None if self.graph is None else GraphedStep(self.update, self.device)
        self.rate.fill_(self.sizes.learning_rate * min(step / self.sizes.warmup, math.sqrt(self.sizes.warmup / step)))
        data = batch_at(self.text, self.step, self.sizes).to(self.device)
        loss = self.graph.run(data) if self.graph else self.update(data)
        self.step += 1
        return self.mean(loss)  # synchronizes, so that the measured time of a step covers its work

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return the loss of one fixed batch of the held-out text."""
        return self.mean(self.loss(batch_at(self.text, 0, self.sizes, held_out=True).to(self.device)))

    def indexer_facts(self) -> Row:
        """Return the mean loss of the indexers in the last step; none without MSA."""
        return {"index_loss": self.mean(torch.stack([layer.index_loss for layer in self.msa]).mean())} if self.msa else {}  # type: ignore[misc]

    @torch.no_grad()
    def mass_facts(self) -> Row:
        """Return the share of attention mass that chosen and best blocks hold in held-out text, by layer; none without
        MSA, and on several ranks."""
        if self.ranks is not None:
            return {}
        inputs: list[Tensor] = []
        hooks = [layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0])) for layer in self.msa]
        self.held_out_loss()
        for hook in hooks:
            hook.remove()
        masses = [attention_mass(layer, x[:1]) for layer, x in zip(self.msa, inputs, strict=True)]
        return {"mass": [held for held, _ in masses], "best_mass": [best for _, best in masses]} if masses else {}

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
) -> list[Row]:  # fmt: skip
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

    def earlier() -> list[Row]:  # steps after the checkpoint are trained again
        rows = [row for row in read_rows(log) if row["step"] < training.step]
        if writes:
            write_rows(log, rows, "w")
        return rows

    rows = earlier() if ranks is None else several_ranks().first_before_others(earlier)
    origin = facts(device.type) | ({} if ranks is None else {"parallel": ranks.way, "ranks": ranks.mesh.size()})
    started, tokens, trained = time.perf_counter(), sizes.batch * sizes.context, sum(row["ms"] for row in rows) / 1e3

    def in_time() -> bool:  # by the first rank's clock
        left = time.perf_counter() - started < minutes * 60
        return left if ranks is None else bool(several_ranks().of_first(left))

    while (steps is None or training.step < steps) and in_time():
        step, began = training.step, time.perf_counter()
        loss = training.advance()
        ms = (time.perf_counter() - began) * 1e3
        trained += ms / 1e3
        row: Row = {
            "step": step, "loss": loss, "ms": round(ms, 3), "tokens_per_second": round(tokens / ms * 1e3),
            "seconds": round(trained, 3), "attention": sizes.attention, "backend": chosen(sizes, step), **training.indexer_facts(),
            **origin,
        }  # fmt: skip
        if training.step % every == 0:
            row |= {"held_out_loss": training.held_out_loss(), **training.mass_facts()}
        rows.append(row)
        if writes:
            write_rows(log, [row])
        if training.step % every == 0:
            training.save(checkpoint)
            if writes:
                print(f"step {training.step}: loss {loss:.4f}, held out {row['held_out_loss']:.4f}, {row['tokens_per_second']} tokens/s")
    training.save(checkpoint)
    return rows


def several_ranks() -> Any:
    """Import the module on demand: its imports take seconds that a single process does not need."""
    return importlib.import_module("several_ranks")


def chosen(sizes: Sizes, step: int) -> str | None:
    """Return the backends of the last selected branch, forward and backward; None for a step of dense attention."""
    if sizes.attention == "dense" or (sizes.attention == "msa" and step < sizes.dense_steps):
        return None
    last = next(decision for decision in reversed(decisions()) if decision.request.kind == "attend")
    return str(last.forward) if last.backward in (None, last.forward) else f"{last.forward} / {last.backward}"


def main(
    out: Annotated[Path, typer.Option(help="folder of the run; an existing one is resumed")],
    minutes: Annotated[float, typer.Option(help="of training in this process; start it again for more")] = 8,
    steps: Annotated[int | None, typer.Option(help="the step to stop at, counted from the run's beginning")] = None,
    attention: Annotated[str, typer.Option(help="nsa, msa, or dense: full causal attention in its place")] = "nsa",
    backend: Annotated[str | None, typer.Option(help="of the selected branch; by default the policy chooses")] = None,
    text: Annotated[Path | None, typer.Option(help="folder or file of text, such as a run's text.bin; by default the machine's")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="a size for a CPU")] = False,
    context: Annotated[int | None, typer.Option(help="bytes of a sequence, such as 8192, 32768 or 65536")] = None,
    batch: Annotated[int | None, typer.Option(help="sequences a step, by default as many as keep its bytes, at least one")] = None,
    seed: Annotated[int, typer.Option(help="of weights and batches")] = 0,
    dense_steps: Annotated[int | None, typer.Option(help="of msa: first steps, whose attention is dense while the indexer learns")] = None,
    block_score: Annotated[str, typer.Option(help="of msa: max, as MiniMax-M3, or sum (docs/indexer.md)")] = "max",
    every: Annotated[int, typer.Option(help="steps between checkpoints")] = 100,
    graph: Annotated[bool, typer.Option(help="capture a step as a CUDA graph, on a GPU")] = True,
    parallel: Annotated[str | None, typer.Option(help="under torchrun: data, context, or tensor (several_ranks.py)")] = None,
    device: Device = "auto",
) -> None:
    """Train, or resume training, a byte-level language model with NSA."""
    if attention not in ("nsa", "msa", "dense"):
        raise ArgumentError("--attention", repr(attention), "nsa, msa, dense", "pass one of these")
    if attention == "dense" and backend is not None:
        raise ArgumentError("--backend", repr(backend), "none with --attention dense", "leave one of the two out")
    sizes = of_context(replace(TINY if tiny else Sizes(), attention=attention, seed=seed), context, batch)
    sizes = replace(sizes, block_score=block_score, dense_steps=sizes.dense_steps if dense_steps is None else dense_steps)
    here, ranks = torch.device(device_of(device)), None
    if parallel is not None:
        ranks, here = several_ranks().join(parallel, sizes, here)
        graph = False
    rows = train(out, sizes, backend, here, text, minutes, steps, every, graph, ranks)
    if rows and (ranks is None or ranks.rank == 0):
        print(f"{len(rows)} steps, loss {rows[-1]['loss']:.4f}: {out}")


if __name__ == "__main__":
    program(main)
