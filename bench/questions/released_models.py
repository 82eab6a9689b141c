"""How long does a released model's attention layer take in transformers, and on nsa-sel after `patch_model`?

    python -m nsa_sel.bench.questions.released_models --out bench/results/h200/released_models.jsonl

One attention layer of MiniMax-M3 at its real size (hidden 6144, 64 heads over 4 KV heads of 128, 16 of the blocks of
128 keys), random
weights and hidden states, bf16: projections, rotary positions, the indexer, and attention. Ways:
    transformers       the model's own code, attn_implementation="sdpa"
    attention alone    attn_implementation="nsa_sel": the model's own indexer, attention on nsa-sel
    nsa-sel            after `patch_model`
Rows have the peak memory beyond weights and inputs, and the largest difference from transformers' output over its
largest value. A way that runs out of memory has a row with `error`. Needs transformers on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import echo, need_gpu, program
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, milliseconds
from nsa_sel.compat import patch_model, register_transformers

WAYS = ("transformers", "attention alone", "nsa-sel")


def minimax_m3(way: str) -> tuple[Any, Any, Any]:
    """Return a sparse attention layer, its rotary positions and its configuration, set up for a way."""
    from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl, modeling_minimax_m3_vl

    config = configuration_minimax_m3_vl.MiniMaxM3VLTextConfig(layer_types=["minimax_m3_sparse"], num_hidden_layers=1)
    config._attn_implementation = "nsa_sel" if way == "attention alone" else "sdpa"
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer = modeling_minimax_m3_vl.MiniMaxM3VLAttention(config, 0).to(torch.bfloat16)
        rotary = modeling_minimax_m3_vl.MiniMaxM3VLRotaryEmbedding(config)
    if way == "nsa-sel":
        patch_model(layer)
    return layer, rotary, config


def prefill(way: str, S: int, backward: bool) -> Callable[[], Tensor]:
    """Return a call of the layer on hidden states [1,S,hidden], forward or forward and backward."""
    layer, rotary, config = minimax_m3(way)
    x = torch.randn(1, S, config.hidden_size, dtype=torch.bfloat16, device="cuda", generator=torch.Generator("cuda").manual_seed(S))
    positions = torch.arange(S, device="cuda")[None]
    with torch.no_grad():
        embeddings = rotary(x, positions)

    def forward() -> Tensor:
        with torch.set_grad_enabled(backward):
            o: Tensor = layer(x, embeddings, None, position_ids=positions)[0]
        return o

    def both() -> Tensor:
        o = forward()
        torch.autograd.backward(o, torch.ones_like(o))
        layer.zero_grad(set_to_none=True)
        return o

    return both if backward else forward


def decode(way: str, B: int, S_kv: int) -> Callable[[], Tensor]:
    """Return a decoding step of the layer over a cache of B sequences of S_kv keys, which is cut back after each step."""
    from transformers import DynamicCache

    layer, rotary, config = minimax_m3(way)
    cache = DynamicCache(config=config)
    draw = torch.Generator("cuda").manual_seed(B)
    random: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "generator": draw}
    keys = [torch.randn(B, config.num_key_value_heads, S_kv, config.head_dim, **random) for _ in range(2)]
    cache.update(*keys, 0)
    cache.layers[0].update_index(torch.randn(B, 1, S_kv, config.index_head_dim, **random))
    held = {name: value for name, value in vars(cache.layers[0]).items() if isinstance(value, Tensor)}
    x, positions = torch.randn(B, 1, config.hidden_size, **random), torch.full((B, 1), S_kv, device="cuda")
    with torch.no_grad():
        embeddings = rotary(x, positions)

    def step() -> Tensor:
        vars(cache.layers[0]).update(held)
        with torch.no_grad():
            o: Tensor = layer(x, embeddings, None, past_key_values=cache, position_ids=positions)[0]
        return o

    return step


def measure(make: Callable[[str], Callable[[], Tensor]], ways: list[str], rep: float, facts: Row) -> list[Row]:
    """Return a row for each way: time, peak memory, and the difference from the first way's output."""
    rows, wanted = [], None
    for way in ways:
        row = {"model": "minimax-m3", "way": way, **facts}
        try:
            work = make(way)
            o = work()
            torch.cuda.synchronize()
            if wanted is None and way == WAYS[0]:
                wanted = o.detach().float()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            work()
            row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
            if wanted is not None:
                row["difference"] = float((o.detach().float() - wanted).abs().max() / wanted.abs().max())
            row |= milliseconds(work, Timing(rep=rep)).fields()
        except torch.cuda.OutOfMemoryError:
            row["error"] = "out of memory"
        rows.append(row)
        work = o = None  # type: ignore[assignment]
        torch.cuda.empty_cache()
    return rows


def table(rows: list[Row]) -> str:
    """Return times and peak memory, a line for each case, a column for each way."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["way"]] = row

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        return row.get("error") or f"{markdown.ms(row)} ms, {row['peak_gib']:.3g} GiB"

    lines = [(case, *(cell(of_way.get(way)) for way in WAYS)) for case, of_way in cases.items()]
    return markdown.table(["MiniMax-M3, one layer", *WAYS], lines, left=1)


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    lengths: Annotated[str, typer.Option(help="tokens of a prefill, comma-separated")] = "2048,8192,16384,32768,131072",
    batches: Annotated[str, typer.Option(help="sequences of a decoding step over 32k keys, comma-separated")] = "1,16,64",
    ways: Annotated[str, typer.Option(help="comma-separated")] = ",".join(WAYS),
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a way should fill")] = 100,
) -> None:
    """Time the layer in every way; append the rows, and print a table."""
    need_gpu("released_models")
    register_transformers()
    facts, rows = store.stamp(), list[Row]()
    chosen = ways.split(",")
    cases: list[tuple[str, str, Callable[[str], Callable[[], Tensor]]]] = []
    for S in map(int, filter(None, lengths.split(","))):
        cases.append((f"prefill of {S // 1024}k tokens", "fwd", lambda way, S=S: prefill(way, S, False)))  # type: ignore[misc]
        if S <= 32768:
            cases.append((f"prefill of {S // 1024}k tokens, forward + backward", "fwd+bwd", lambda way, S=S: prefill(way, S, True)))  # type: ignore[misc]
    for B in map(int, filter(None, batches.split(","))):
        cases.append((f"decoding step, {B} sequences of 32k keys", "decode", lambda way, B=B: decode(way, B, 32768)))  # type: ignore[misc]
    for case, direction, make in cases:
        found = measure(make, chosen, rep, {"case": case, "direction": direction, **facts})
        store.append(out, found)
        rows += found
    echo(table(rows))


if __name__ == "__main__":
    program(main)
