"""Time a released model's attention layer in transformers, and on nsa-sel after `patch_model`.

    python -m nsa_sel.bench.questions.released_models --out bench/results/h200/released_models.jsonl

One attention layer, random weights and hidden states, bf16: projections, norms, rotary positions, the indexer, attention.
    minimax-m3    hidden 6144, 64 heads over 4 KV heads of 128, 16 of the blocks of 128 keys
    qwen3.8       hidden 2048, 24 heads over 2 KV heads of 256, 512 of the complete blocks of 4 keys and the incomplete one
Ways:
    transformers       the model's own code, attn_implementation="sdpa"
    dense              MiniMax-M3: the same layer without selection (as the model's first layers), attn_implementation="sdpa"
    attention alone    MiniMax-M3: attn_implementation="nsa_sel": the model's own indexer, attention on nsa-sel
    nsa-sel            after `patch_model`
    compiled           after `patch_model` and torch.compile of the layer
    graph              MiniMax-M3, decoding, after `patch_model`: over a StaticCache, as a CUDA graph
Rows have the peak memory beyond weights and inputs, and the largest difference from transformers' output over its
largest value. A way that runs out of memory has a row with `error`; one that takes more than two seconds is timed by
one call. Needs transformers on a GPU.
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import Out, echo, need_gpu, program
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, captured, milliseconds
from nsa_sel.compat import patch_model, register_transformers
from nsa_sel.compat.transformers.qwen_qsa import KEPT

MODELS = {"minimax-m3": "MiniMax-M3", "qwen3.8": "Qwen3.8"}
WAYS = {  # by the title of a table's column
    "transformers": "transformers", "dense": "dense, SDPA", "attention alone": "attention alone", "nsa-sel": "patch_model",
    "compiled": "and torch.compile", "graph": "and a StaticCache in a CUDA graph",
}  # fmt: skip
M3_ONLY = ("dense", "attention alone", "graph")
COMPILED = 16384  # tokens from which compiled layers are timed: each length compiles for seconds
OWN_LOOP = 16384  # tokens up to which Qwen3.8's own indexer is timed, which loops over tokens in Python; an eighth with backward
SLOW = 2.0  # seconds from which one call is timed
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}


def layer_of(model: str, way: str, device: str = "cuda", **sizes: Any) -> tuple[Any, Any, Any]:
    """Return a layer that selects blocks, its rotary positions and its configuration, set up for a way.

    Args:
        model, way: of `MODELS` and `WAYS`.
        device: in bf16 on "cuda", in float32 on "cpu".
        sizes: of the model's configuration, instead of its own.
    """
    torch.manual_seed(0)
    if model == "minimax-m3":
        from transformers.models.minimax_m3_vl import configuration_minimax_m3_vl as m3
        from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

        kind = "full_attention" if way == "dense" else "minimax_m3_sparse"
        config = m3.MiniMaxM3VLTextConfig(layer_types=[kind], num_hidden_layers=1, **sizes)
        make, positions = modeling.MiniMaxM3VLAttention, modeling.MiniMaxM3VLRotaryEmbedding
    else:
        from transformers.models.qwen4_exp import configuration_qwen4_exp as qsa
        from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

        indexer = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128}
        indexer |= {"indexer_budget": 2048, "indexer_compress_ratio": 4}
        rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
        heads = {"num_attention_heads": 24, "rope_parameters": rope}
        config = qsa.Qwen4ExpTextConfig(layer_types=["indexed_attention"], num_hidden_layers=1, **{**indexer, **heads, **sizes})
        make, positions = modeling.Qwen4ExpTextAttention, modeling.Qwen4ExpTextRotaryEmbedding
    config._attn_implementation = "nsa_sel" if way == "attention alone" else "sdpa"
    with torch.device(device):
        layer, rotary = make(config, 0).to(torch.bfloat16 if device == "cuda" else torch.float32), positions(config)
    if way in ("nsa-sel", "compiled"):
        patch_model(layer)
    if way == "compiled":
        layer.compile(dynamic=False)
    return layer, rotary, config


def mask_of(model: str, way: str, B: int, S: int, S_kv: int) -> Tensor | None:
    """Return the mask that Qwen3.8's own indexer reads, None for what needs no mask."""
    if model == "minimax-m3" or way != "transformers":
        return None
    return torch.ones(S, S_kv, dtype=torch.bool, device="cuda").tril(S_kv - S).expand(B, 1, S, S_kv)


def prefill(model: str, way: str, S: int, backward: bool, device: str = "cuda", **sizes: Any) -> Callable[[], Tensor]:
    """Return a call of the layer on hidden states [1,S,hidden], forward or forward and backward; the rest as of `layer_of`."""
    layer, rotary, config = layer_of(model, way, device, **sizes)
    x = torch.randn(1, S, config.hidden_size, generator=torch.Generator(device).manual_seed(S), device=device)
    x = x.to(next(layer.parameters()).dtype)
    positions, mask = torch.arange(S, device=device)[None], mask_of(model, way, 1, S, S)
    with torch.no_grad():
        embeddings = rotary(x, positions)

    def forward() -> Tensor:
        with torch.set_grad_enabled(backward):
            o: Tensor = layer(x, embeddings, mask, position_ids=positions)[0]
        return o

    def both() -> Tensor:
        o = forward()
        torch.autograd.backward(o, torch.ones_like(o))
        layer.zero_grad(set_to_none=True)
        return o

    return both if backward else forward


def decode(model: str, way: str, B: int, S_kv: int) -> Callable[[], Tensor]:
    """Return a decoding step of the layer over a cache of B sequences of S_kv keys, which is cut back after each step.

    What the first step made beside the cache stays. Way "graph": a StaticCache, the step replayed as a CUDA graph.
    """
    from transformers import DynamicCache, StaticCache

    layer, rotary, config = layer_of(model, "nsa-sel" if way == "graph" else way)
    graph, draw = way == "graph", torch.Generator("cuda").manual_seed(B)
    cache = StaticCache(config=config, max_cache_len=S_kv + 128) if graph else DynamicCache(config=config)
    keys = [torch.randn(B, config.num_key_value_heads, S_kv, config.head_dim, generator=draw, **BF16) for _ in range(2)]
    cache.update(*keys, 0)
    if way == "dense":
        pass
    elif model == "minimax-m3":
        cache.layers[0].update_index(torch.randn(B, 1, S_kv, config.index_head_dim, generator=draw, **BF16))
    else:
        cache.update_indexer(torch.randn(B, S_kv, config.indexer_head_dim, generator=draw, **BF16), 0)
    x = torch.randn(B, 1, config.hidden_size, generator=draw, **BF16)
    positions, mask = torch.full((B, 1), S_kv, device="cuda"), mask_of(model, way, B, 1, S_kv + 1)
    with torch.no_grad():
        known = positions if model == "minimax-m3" else torch.arange(S_kv + 1, device="cuda").expand(B, -1)
        embeddings = rotary(x, known)
    held = {name: value for name, value in vars(cache.layers[0]).items() if isinstance(value, Tensor)}
    lengths = [value for name, value in held.items() if "cumulative_length" in name] if graph else []
    pooled: dict[str, Any] = {}

    def step() -> Tensor:
        if graph:
            for length in lengths:
                length.fill_(S_kv)
        else:
            vars(cache.layers[0]).update(held | pooled)
        with torch.no_grad():
            o: Tensor = layer(x, embeddings, positions.view(1, B) if graph else mask, past_key_values=cache, position_ids=positions)[0]
        if KEPT in vars(cache.layers[0]) and not pooled:
            raw, begins, index_keys = getattr(cache.layers[0], KEPT)
            pooled[KEPT] = held["indexer_keys"], begins, index_keys[:, : S_kv // config.indexer_compress_ratio]
        return o

    if not graph:
        return step
    made, o = captured(step)

    def replay() -> Tensor:
        made.replay()
        return o  # type: ignore[no-any-return]

    return replay


def measure(model: str, make: Callable[[str], Callable[[], Tensor]], ways: list[str], rep: float, facts: Row) -> Iterator[Row]:
    """Yield a row for each way: time, peak memory, and the difference from the first way's output."""
    wanted = None
    for way in ways:
        row = {"model": model, "way": way, **facts}
        try:
            work = make(way)
            o = work()
            torch.cuda.synchronize()
            if wanted is None and way == "transformers":
                wanted = o.detach().float()
            before, began = torch.cuda.memory_allocated(), time.perf_counter()
            torch.cuda.reset_peak_memory_stats()
            work()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            row["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
            if wanted is not None and way != "dense":
                row["difference"] = float((o.detach().float() - wanted).abs().max() / wanted.abs().max())
            slow = {"ms_median": seconds * 1e3, "calls": 1}
            row |= slow if seconds > SLOW else milliseconds(work, Timing(rep=rep)).fields()
        except torch.cuda.OutOfMemoryError:
            row["error"] = "out of memory"
        work = o = None  # type: ignore[assignment]
        torch.cuda.empty_cache()
        yield row


def table(rows: list[Row], model: str) -> str:
    """Return a model's times and peak memory, a line for each case, a column for each way."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["model"] == model:
            cases.setdefault(row["case"], {})[row["way"]] = row
    ways = [way for way in WAYS if any(way in of_way for of_way in cases.values())]

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        mark = markdown.MARK if not row.get("error") and markdown.scatters(row) else ""
        return row.get("error") or f"{number(row['ms_median'])}{mark} ms, {row['peak_gib']:.3g} GiB"

    lines = [(case, *(cell(of_way.get(way)) for way in ways)) for case, of_way in cases.items()]
    return markdown.table([f"{MODELS[model]}, one layer", *(WAYS[way] for way in ways)], lines, left=1)


def number(x: float) -> str:
    """Return a number with three digits, or whole."""
    return f"{x:.3g}" if x < 999.5 else f"{x:,.0f}"


def main(
    out: Out,
    models: Annotated[str, typer.Option(help="comma-separated")] = ",".join(MODELS),
    lengths: Annotated[str, typer.Option(help="tokens of a prefill, comma-separated")] = "2048,8192,16384,32768,131072",
    batches: Annotated[str, typer.Option(help="sequences of a decoding step over 32k keys, comma-separated")] = "1,16,64",
    ways: Annotated[str, typer.Option(help="comma-separated")] = ",".join(WAYS),
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a way should fill")] = 100,
) -> None:
    """Time the layers in every way; append the rows, and print a table of each."""
    need_gpu("released_models")
    register_transformers()
    facts = {**store.stamp(), "transformers": importlib.metadata.version("transformers")}
    for model in models.split(","):
        known = [way for way in ways.split(",") if model == "minimax-m3" or way not in M3_ONLY]
        cases = list[tuple[str, str, Callable[[str], Callable[[], Tensor]], list[str]]]()
        for S in map(int, filter(None, lengths.split(","))):
            for backward in (False, True) if S <= 32768 else (False,):
                own = model == "minimax-m3" or S <= (OWN_LOOP // 8 if backward else OWN_LOOP)
                chosen = [way for way in known if {"transformers": own, "compiled": S >= COMPILED, "graph": False}.get(way, True)]
                case = f"prefill of {S // 1024}k tokens{', forward + backward' if backward else ''}"
                call = partial(prefill, model, S=S, backward=backward)
                cases.append((case, "fwd+bwd" if backward else "fwd", call, chosen))
        for B in map(int, filter(None, batches.split(","))):
            chosen = [way for way in known if way != "compiled"]
            cases.append((f"decoding step, {B} sequences of 32k keys", "decode", partial(decode, model, B=B, S_kv=32768), chosen))
        each = (measure(model, make, chosen, rep, {"case": case, "direction": direction}) for case, direction, make, chosen in cases)
        echo(table(store.kept(out, chain.from_iterable(each), facts), model))


if __name__ == "__main__":
    program(main)
