"""Train a small byte-level language model with Native Sparse Attention (arXiv 2502.11089), its selected branch through nsa-sel.

    python examples/train_nsa_lm.py --out runs/nsa                            # 8 minutes at 8k context on one H200; again: it resumes
    python examples/train_nsa_lm.py --out runs/packed --backend sdpa-packed   # the same run on another backend
    python examples/train_nsa_lm.py --out runs/dense --attention dense        # the same model with dense causal attention
    python examples/train_nsa_lm.py --out runs/tiny --tiny                    # a size for a CPU

The text is documentation that is found on the machine, or a folder's (--text). The folder --out holds text.bin, checkpoint.pt,
losses.jsonl (a line a step) and losses.png. A run that is interrupted, or that had its --minutes, resumes when it is started
again, with the same losses as one that never stopped. `examples/compare_losses.py` compares runs.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import typer
from byte_text import HELD_OUT, load_text
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from nsa_sel import NSASelection, block_scores
from nsa_sel.bench.core import environment, store
from nsa_sel.bench.core.command_line import Device, device_of, program
from nsa_sel.errors import ArgumentError

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclass(frozen=True)
class Sizes:
    """The model and its training. Names of NSA's sizes as in the paper: l, d compress, l' = block, n blocks, w = window."""

    context: int = 8192
    batch: int = 4
    layers: int = 6
    width: int = 512
    groups: int = 2
    heads: int = 8  # a group
    head_dim: int = 64
    compress_block: int = 32
    compress_stride: int = 16
    block: int = 64
    n: int = 16
    window: int = 512
    learning_rate: float = 1e-3
    warmup: int = 100  # steps
    seed: int = 0
    attention: str = "nsa"


TINY = Sizes(
    context=128, batch=2, layers=2, width=32, groups=2, heads=2, head_dim=16, compress_block=16, compress_stride=8, block=16, n=4,
    window=32, warmup=5,
)  # fmt: skip


def batch_at(text: Tensor, step: int, sizes: Sizes, held_out: bool = False) -> Tensor:
    """Bytes [batch, context + 1] int64 of one step, which depend on the seed and the step alone."""
    border = len(text) - len(text) // HELD_OUT
    part = text[border:] if held_out else text[:border]
    generator = torch.Generator().manual_seed((sizes.seed << 32) + 2 * step + held_out)
    starts = torch.randint(len(part) - sizes.context, (sizes.batch,), generator=generator)
    return torch.stack([part[start : start + sizes.context + 1] for start in starts.tolist()]).long()


# The model


def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, compiled where its first tensor is on a GPU: each step of it would read and write all of its tensors there."""
    compiled = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(x: Tensor, *others: Tensor) -> Tensor:
        return (compiled if x.is_cuda else function)(x, *others)

    return call


@fused
def rotated(x: Tensor) -> Tensor:
    """x [B,S,...,D] with rotary positions, 0 for the first of S."""
    S, half = x.shape[1], x.shape[-1] // 2
    angle = torch.arange(S, device=x.device)[:, None] / 10000 ** (torch.arange(half, device=x.device) / half)
    angle = angle.view(1, S, *[1] * (x.dim() - 3), half)
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).to(x.dtype)


class Compression(nn.Module):
    """Blocks of l keys (or values), d apart, as one each (Eq. 7): an MLP over the block, with positions inside it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.length, self.stride, D = sizes.compress_block, sizes.compress_stride, sizes.head_dim
        self.inside = nn.Parameter(torch.zeros(D, self.length))
        self.mlp = nn.Sequential(nn.Linear(D * self.length, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        """[B,G,compressed,D] of x [B,S,G,D]."""
        windows = x.unfold(1, self.length, self.stride) + self.inside.to(x.dtype)  # [B,compressed,G,D,l]
        found: Tensor = self.mlp(windows.flatten(-2)).transpose(1, 2)
        return found


@fused
def attention_paid(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """p [B,S,G,1,keys], summed over the heads of a group, of q [B,S,G,h,D] over the keys k [B,G,keys,D] that rows have seen [S,keys]."""
    logits = torch.einsum("bsghd,bgcd->bsghc", q, k).float() / math.sqrt(q.shape[-1])
    p = torch.softmax(logits.masked_fill(~seen[:, None, None], -1e30), -1) * seen[:, None, None]
    return p.sum(3, keepdim=True)


def compressed_attention(q: Tensor, k: Tensor, v: Tensor, length: int, stride: int) -> tuple[Tensor, Tensor]:
    """o [B,S,G,h,D] of q [B,S,G,h,D] over compressed k, v [B,G,compressed,D], of which one is seen once all its keys are; and, without a
    gradient, what a group's heads pay attention to together: p [B,S,G,1,compressed]."""
    last = torch.arange(k.shape[2], device=q.device) * stride + length - 1
    seen = last <= torch.arange(q.shape[1], device=q.device)[:, None]
    some = seen.any(1, keepdim=True)  # the first rows see nothing: o = 0
    k_all, v_all = (x.repeat_interleave(q.shape[3], 1) for x in (k, v))
    o = scaled_dot_product_attention(q.flatten(2, 3).transpose(1, 2), k_all, v_all, attn_mask=seen | ~some) * some
    with torch.no_grad():
        p = attention_paid(q, k, seen)
    return o.transpose(1, 2).unflatten(2, q.shape[2:4]), p


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """o [B,S,G,h,D] over the last `window` keys: the chunks of as many queries see their own keys and those of the chunk before."""
    B, S, G, h, D = q.shape
    chunks = -(-S // window)
    q = pad(q.flatten(2, 3), (0, 0, 0, 0, 0, chunks * window - S)).view(B * chunks, window, G * h, D).transpose(1, 2)
    k, v = (pad(x, (0, 0, 0, 0, window, chunks * window - S)).unfold(1, 2 * window, window) for x in (k, v))  # [B,chunks,G,D,2w]
    k, v = (x.flatten(0, 1).transpose(-1, -2).repeat_interleave(h, 1) for x in (k, v))
    row, key = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    near = (key > row) & (key <= row + window)
    first = torch.arange(len(q), device=q.device) % chunks == 0  # before it there is only padding
    mask = near & ~(first[:, None, None] & (key < window))
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))
    return o.transpose(1, 2).reshape(B, chunks * window, G, h, D)[:, :S]


@fused
def gated(gate: Tensor, compressed: Tensor, selected: Tensor, near: Tensor) -> Tensor:
    """The branches [B,S,G,h,D], each times the sigmoid of its gate [B,S,G,h,3], added (Eq. 5)."""
    weights = torch.sigmoid(gate).unsqueeze(-2)
    return compressed * weights[..., 0] + selected * weights[..., 1] + near * weights[..., 2]


class Attention(nn.Module):
    """Three branches with keys and values of their own, joined by a gate for each head (Eq. 5); or dense causal attention."""

    def __init__(self, sizes: Sizes, backend: str | None) -> None:
        super().__init__()
        self.sizes, self.dense = sizes, sizes.attention == "dense"
        heads, branches = sizes.groups * sizes.heads, 1 if self.dense else 3
        self.q = nn.Linear(sizes.width, heads * sizes.head_dim, bias=False)
        self.kv = nn.Linear(sizes.width, 2 * branches * sizes.groups * sizes.head_dim, bias=False)
        self.out = nn.Linear(heads * sizes.head_dim, sizes.width, bias=False)
        if not self.dense:
            self.compress_k, self.compress_v = Compression(sizes), Compression(sizes)
            self.select = NSASelection(sizes.n, sizes.block, backend=backend)
            self.gate = nn.Linear(sizes.width, 3 * heads)

    def forward(self, x: Tensor) -> Tensor:
        """[B,S,width] of x [B,S,width]."""
        sizes, (B, S, _) = self.sizes, x.shape
        q = self.q(x).view(B, S, sizes.groups, sizes.heads, sizes.head_dim)
        keys = self.kv(x).view(B, S, -1, sizes.groups, sizes.head_dim).unbind(2)
        rotated_q = rotated(q)
        if self.dense:
            k, v = rotated(keys[0]).transpose(1, 2), keys[1].transpose(1, 2)
            o = scaled_dot_product_attention(rotated_q.flatten(2, 3).transpose(1, 2), k, v, is_causal=True, enable_gqa=True)
            return self.out(o.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
        l, d = sizes.compress_block, sizes.compress_stride
        compressed, p = compressed_attention(q, self.compress_k(keys[0]), self.compress_v(keys[1]), l, d)
        scores = block_scores(p, sizes.block, l, d, S)
        selected = self.select(rotated_q, rotated(keys[2]).transpose(1, 2), keys[3].transpose(1, 2), scores)
        near = window_attention(rotated_q, rotated(keys[4]), keys[5], sizes.window)
        gate = self.gate(x).view(B, S, sizes.groups, sizes.heads, 3)
        return self.out(gated(gate, compressed, selected, near).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and an MLP, each behind a norm, each added."""

    def __init__(self, sizes: Sizes, backend: str | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)])
        self.attention = Attention(sizes, backend)
        self.mlp = nn.Sequential(nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width))

    def forward(self, x: Tensor) -> Tensor:
        """[B,S,width] of x [B,S,width]."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """Logits [B,S,256] of bytes [B,S]."""

    def __init__(self, sizes: Sizes, backend: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes, backend) for _ in range(sizes.layers)))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(text))))  # type: ignore[no-any-return]


# The run


class Training:
    """A model, its optimizer and the next step: all that a checkpoint holds."""

    def __init__(self, sizes: Sizes, backend: str | None, device: torch.device, text: Tensor) -> None:
        torch.manual_seed(sizes.seed)
        self.sizes, self.device, self.text, self.step = sizes, device, text, 0
        self.model = LanguageModel(sizes, backend).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.fingerprint = hashlib.sha256(text.numpy().tobytes()).hexdigest()[:16]

    def loss(self, data: Tensor) -> Tensor:
        data = data.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(data[:, :-1])
        return cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())

    def advance(self) -> float:
        """One step; its loss."""
        rate = self.sizes.learning_rate * min((self.step + 1) / self.sizes.warmup, math.sqrt(self.sizes.warmup / (self.step + 1)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(batch_at(self.text, self.step, self.sizes))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()  # waits for the device: the time of a step is that of its work

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Of one fixed batch of the part that is never trained on."""
        return float(self.loss(batch_at(self.text, 0, self.sizes, held_out=True)))

    def save(self, file: Path) -> None:
        """Replace the checkpoint at once: a kill leaves the old one or the new one."""
        state = {
            "model": self.model.state_dict(), "optimiser": self.optimizer.state_dict(), "step": self.step,
            "sizes": asdict(self.sizes), "text": self.fingerprint, "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
        }  # fmt: skip
        unfinished = file.with_name(f".{file.name}.{os.getpid()}")
        with unfinished.open("wb") as opened:
            torch.save(state, opened)
            opened.flush()
            os.fsync(opened.fileno())
        unfinished.replace(file)

    def load(self, file: Path) -> None:
        """Resume from a checkpoint of the same run, or raise ArgumentError."""
        state = torch.load(file, map_location=self.device, weights_only=True)
        for name, mine in (("sizes", asdict(self.sizes)), ("text", self.fingerprint)):
            if state[name] != mine:
                raise ArgumentError("--out", f"a folder with a run of other {name}: {state[name]}", str(mine), "pass another folder")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimiser"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"].cpu())
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"].cpu())


def train(
    out: Path, sizes: Sizes, backend: str | None, device: torch.device, text: Path | None, minutes: float, steps: int | None, every: int
) -> list[dict[str, Any]]:
    """Train until `minutes` are over or step `steps` is done, a checkpoint every so many steps; all rows of the run so far."""
    out.mkdir(parents=True, exist_ok=True)
    checkpoint, log = out / "checkpoint.pt", out / "losses.jsonl"
    training = Training(sizes, backend, device, load_text(text, out / "text.bin", sizes.context))
    if checkpoint.exists():
        training.load(checkpoint)
    before = store.read(log) if log.exists() else []
    rows = [row for row in before if row["step"] < training.step]  # steps after the checkpoint are trained again
    store.write_whole(log, store.as_lines(rows))
    facts = environment.stamp(device.type)  # device, versions, commit, command
    started, tokens = time.perf_counter(), sizes.batch * sizes.context
    trained = sum(row["ms"] for row in rows) / 1e3
    while (steps is None or training.step < steps) and time.perf_counter() - started < minutes * 60:
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
        store.append(log, [row])
        if training.step % every == 0:
            training.save(checkpoint)
            print(f"step {training.step}: loss {loss:.4f}, held out {row['held_out_loss']:.4f}, {row['tokens_per_second']} tokens/s")
    training.save(checkpoint)
    draw(rows, out / "losses.png")
    return rows


def chosen(sizes: Sizes) -> str | None:
    """Who ran the last selection, forward and backward; None of dense attention."""
    import nsa_sel

    if sizes.attention == "dense":
        return None
    last = nsa_sel.decisions()[-1]
    return str(last.forward) if last.backward in (None, last.forward) else f"{last.forward} / {last.backward}"


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """The losses as a picture."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], linewidth=0.8, label="training")
    held_out = [row for row in rows if "held_out_loss" in row]
    axes.plot([row["step"] for row in held_out], [row["held_out_loss"] for row in held_out], "o-", markersize=3, label="held out")
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend()
    unfinished = file.with_name(f".{os.getpid()}.{file.name}")  # savefig goes by the ending
    figure.savefig(unfinished, dpi=120)
    plt.close(figure)
    unfinished.replace(file)


def main(
    out: Annotated[Path, typer.Option(help="folder of the run; an existing one is resumed")],
    minutes: Annotated[float, typer.Option(help="of training in this process; start it again for more")] = 8,
    steps: Annotated[int | None, typer.Option(help="the step to stop at, counted from the run's beginning")] = None,
    attention: Annotated[str, typer.Option(help="nsa, or dense: full causal attention in its place")] = "nsa",
    backend: Annotated[str | None, typer.Option(help="of the selected branch; by default the policy chooses")] = None,
    text: Annotated[
        Path | None, typer.Option(help="folder with text, or a file, such as text.bin of another run; by default what is on the machine")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="a size for a CPU")] = False,
    batch: Annotated[int | None, typer.Option(help="sequences a step")] = None,
    context: Annotated[int | None, typer.Option(help="bytes of a sequence")] = None,
    seed: Annotated[int, typer.Option(help="of weights and batches")] = 0,
    every: Annotated[int, typer.Option(help="steps between checkpoints")] = 100,
    device: Device = "auto",
) -> None:
    """Train, or resume training, a byte-level language model with NSA."""
    if attention not in ("nsa", "dense"):
        raise ArgumentError("--attention", repr(attention), "nsa, dense", "pass one of these")
    if attention == "dense" and backend is not None:
        raise ArgumentError("--backend", repr(backend), "none with --attention dense", "leave one of the two out")
    sizes = replace(TINY if tiny else Sizes(), attention=attention, seed=seed)
    sizes = replace(sizes, batch=batch or sizes.batch, context=context or sizes.context)
    rows = train(out, sizes, backend, torch.device(device_of(device)), text, minutes, steps, every)
    if rows:
        print(f"{len(rows)} steps, loss {rows[-1]['loss']:.4f}: {out / 'losses.png'}")


if __name__ == "__main__":
    program(main)
