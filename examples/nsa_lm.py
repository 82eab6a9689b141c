"""A small byte-level language model whose attention is `nsa_sel.NSAttention` or `nsa_sel.MSAttention`: trained by
train_nsa_lm.py, served by serve_nsa_lm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nsa_sel import MSAttention, NSAttention
from nsa_sel.errors import ArgumentError
from nsa_sel.rotary import angles, rotate_by


@dataclass(frozen=True)
class Sizes:
    """The model and its training.

    Names of NSA's sizes as in the paper: l, d compress, l' = block, n blocks, w = window.
    """

    context: int = 8192
    batch: int = 4
    layers: int = 6
    width: int = 512
    groups: int = 2
    heads: int = 8  # per group
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
    dense_steps: int = 300  # first steps of msa, whose attention is dense while the indexer learns
    index_loss: float = 1.0  # weight of the indexer's loss, with msa
    block_score: str = "max"  # of MSAttention


TINY = Sizes(
    context=128, batch=2, layers=2, width=32, groups=2, heads=2, head_dim=16, compress_block=16, compress_stride=8, block=16, n=4,
    window=32, warmup=5, dense_steps=6,
)  # fmt: skip


class DenseAttention(nn.Module):
    """Dense causal attention with the same heads, for comparison."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim, heads = sizes.head_dim, sizes.groups * sizes.heads
        self.q = nn.Linear(sizes.width, heads * sizes.head_dim, bias=False)
        self.kv = nn.Linear(sizes.width, 2 * sizes.groups * sizes.head_dim, bias=False)
        self.out = nn.Linear(heads * sizes.head_dim, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [B,S,width] for x [B,S,width]."""
        B, S, _ = x.shape
        if torch.is_autocast_enabled(x.device.type):  # cast once for both projections, as NSAttention does
            x = x.to(torch.get_autocast_dtype(x.device.type))
        q, (k, v) = self.q(x).view(B, S, -1, self.head_dim), self.kv(x).view(B, S, 2, -1, self.head_dim).unbind(2)
        table = angles(q, torch.arange(S, device=x.device))
        q, k, v = (y.transpose(1, 2) for y in (rotate_by(q, table), rotate_by(k, table), v))
        o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def attention_of(sizes: Sizes, backend: str | None) -> DenseAttention | NSAttention | MSAttention:
    """Return a layer of attention."""
    heads = sizes.width, sizes.groups, sizes.heads, sizes.head_dim
    if sizes.attention == "dense":
        return DenseAttention(sizes)
    if sizes.attention == "msa":
        options: Any = {"block_score": sizes.block_score, "loss_weight": sizes.index_loss}
        return MSAttention(*heads, block_size=sizes.block, n=sizes.n, backend=backend, **options)
    return NSAttention(
        *heads, compress_block=sizes.compress_block, compress_stride=sizes.compress_stride, block_size=sizes.block, n=sizes.n,
        window=sizes.window, backend=backend,
    )  # fmt: skip


class Block(nn.Module):
    """A transformer block: pre-norm attention and MLP with residuals."""

    def __init__(self, sizes: Sizes, backend: str | None) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)])
        self.attention = attention_of(sizes, backend)
        self.mlp = nn.Sequential(nn.Linear(sizes.width, 4 * sizes.width), nn.GELU(), nn.Linear(4 * sizes.width, sizes.width))

    def forward(self, x: Tensor, **cache: Any) -> Tensor:
        """Return [B,S,width] for x [B,S,width]. `cache=` is passed to the attention."""
        x = x + self.attention(self.norms[0](x), **cache)
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """A language model with logits [B,S,256] for bytes [B,S]."""

    def __init__(self, sizes: Sizes, backend: str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes, backend) for _ in range(sizes.layers)))
        self.norm, self.head = nn.RMSNorm(sizes.width), nn.Linear(sizes.width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor, step: Any = None) -> Tensor:
        """Return logits for a whole text, or, with a `step` of an NSACache, for the bytes after those in the cache."""
        x = self.embed(text)
        for i, block in enumerate(self.blocks):
            x = block(x) if step is None else block(x, cache=step[i])
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@torch.no_grad()
def attention_mass(layer: MSAttention, x: Tensor, rows: int = 64) -> tuple[float, float]:
    """Return how much of the attention mass the indexer's blocks hold, and how much the n best blocks would.

    Args:
        layer: an MSA layer.
        x: [B,S,width], its input.
        rows: that are compared, evenly spread over those that see more blocks than they choose.

    Returns:
        Two means over rows and groups, between 0 and 1. Probabilities are those of dense attention, averaged over the
        heads of a group.
    """
    q, k, _, index_q, index_k = layer.project(x)
    size, n, S = layer.indexer.block_size, layer.indexer.n, x.shape[1]
    at = torch.linspace(min(n * size, S - 1), S - 1, rows, device=x.device).long()
    logits = torch.einsum("brghd,bgkd->brghk", q[:, at].float(), k.float()) * q.shape[-1] ** -0.5
    future = torch.arange(S, device=x.device) > at[:, None, None, None]
    p = logits.masked_fill(future, -torch.inf).softmax(-1).mean(3)  # [B,rows,G,S]
    blocks = torch.nn.functional.pad(p, (0, -S % size)).unflatten(-1, (-1, size)).sum(-1)
    chosen = layer.indexer.choose(index_q, index_k).block_indices[:, at].long()  # [B,rows,G,n], -1 where there is none
    held = blocks.gather(-1, chosen.clamp(min=0)).where(chosen >= 0, 0.0).sum(-1)
    return held.mean().item(), blocks.topk(min(n, blocks.shape[-1])).values.sum(-1).mean().item()


def nsa_checkpoint(run: Path, *others: str) -> dict[str, Any]:
    """Load the checkpoint of a run with NSA or MSA.

    Args:
        run: a folder written by train_nsa_lm.py.
        others: names of other required files.

    Raises:
        ArgumentError: a file is missing, or the run has dense attention.
    """
    for name in ("checkpoint.pt", *others):
        if not (run / name).exists():
            raise ArgumentError("the run", f"{run} without {name}", "a folder that train_nsa_lm.py wrote", "train there first")
    state: dict[str, Any] = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    if state["sizes"]["attention"] == "dense":
        raise ArgumentError("the run", f"{run}, of dense attention", "one of nsa or msa", "train with --attention nsa")
    return state


def trained_model(state: dict[str, Any], backend: str | None) -> tuple[LanguageModel, Sizes]:
    """Return the model of a checkpoint, on the CPU, and its sizes."""
    sizes = Sizes(**state["sizes"])
    model = LanguageModel(sizes, backend)
    model.load_state_dict(state["model"])
    return model, sizes
