"""Time the indexer and the sparse attention of a MiniMax-M3 layer in a step of vLLM, on vLLM's kernels and on the plugin.

    python -m nsa_sel.bench.questions.engines --out bench/results/h200/profiles/engines.jsonl

Needs vLLM 0.32 or 0.33: its classes, metadata, pages and buffer. 4 KV groups of 16 heads, D 128, 16 of the blocks of 128
keys, random numbers in bf16, K and V in bf16 or e4m3. Steps of at most 4,096 tokens are timed by graph replay; those with
prefilled tokens, which vLLM runs outside of its graphs, call by call. Both classes attend to the blocks that vLLM's
indexer chose. `same_blocks` is the share of tokens and groups for which both indexers choose the same set; `difference` is
the largest one of the outputs, relative to the largest output.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer

from nsa_sel.bench.core import markdown, store
from nsa_sel.bench.core.command_line import Out, echo, need_gpu, program
from nsa_sel.bench.core.store import Row
from nsa_sel.bench.core.timing import Timing, milliseconds, replayed_milliseconds
from nsa_sel.engines import vllm as plugin
from nsa_sel.quantize import STORED

G, h, D, n, PAGE = 4, 16, 128, 16, 128
CASES: dict[str, tuple[int, list[tuple[int, int]]]] = {  # requests that decode over 32k keys; new and cached tokens of others
    "decode-64": (64, []),
    "decode-64, chunk of 2k": (64, [(2048, 6144)]),
    "prefill-16k": (0, [(16384, 0)]),
    "prefill-32k": (0, [(32768, 0)]),
    "chunk of 2k after 30k": (0, [(2048, 30720)]),
    "decode-64, 4 chunks of 512": (64, [(512, 1024)] * 4),
    "decode-1": (1, []),
}
KEYS, MOST_REPLAYED = 32768, 4096
SIZES = {"topk_blocks": n, "sparse_block_size": PAGE}


def metadata(decodes: int, prefills: list[tuple[int, int]]) -> tuple[Any, Any, int]:
    """Return a step's metadata for the attention and for the indexer, and its number of pages."""
    from vllm.models.minimax_m3.common import indexer, sparse_attention

    new, lengths = [tokens for tokens, _ in prefills], [KEYS] * decodes + [sum(request) for request in prefills]
    pages = [-(-length // PAGE) for length in lengths]
    table = torch.full((len(lengths), max(pages)), 2**30, dtype=torch.int32, device="cuda")  # garbage past a request's pages
    shuffled = torch.randperm(sum(pages), dtype=torch.int32, device="cuda")
    for row, count, end in zip(table, pages, itertools.accumulate(pages), strict=True):
        row[:count] = shuffled[end - count : end]
    keys, starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (lengths, [0, *itertools.accumulate(new)]))
    counts = (keys, max(lengths), keys, decodes + sum(new), decodes, decodes, len(new), sum(new))
    cached, found = keys[decodes:] - starts.diff(), []
    for kind, name in ((sparse_attention, "Sparse"), (indexer, "Indexer")):
        decode = prefill = None
        if decodes:
            longest = {} if name == "Sparse" else {"max_seq_len": KEYS, "max_decode_query_len": 1}
            one = getattr(kind, f"MiniMaxM3{name}DecodeMetadata")
            decode = one(seq_lens=keys[:decodes], block_table=table[:decodes], decode_query_len=1, **longest)
        if new:
            more = {"cu_seqlens_k": starts, "total_kv_blocks": sum(pages[decodes:])} if name == "Sparse" else {}
            several = getattr(kind, f"MiniMaxM3{name}PrefillMetadata")
            prefill = several(
                cu_seqlens_q=starts, seq_lens=keys[decodes:], context_lens=cached, block_table=table[decodes:], max_query_len=max(new),
                max_seq_len=max(lengths), **more,
            )  # fmt: skip
        found.append(getattr(kind, f"MiniMaxM3{name}Metadata")(*counts, prefill=prefill, decode=decode))
    return *found, sum(pages)


def classes() -> dict[str, tuple[type, type]]:
    """Return the attention and the indexer by contender."""
    from vllm.models.minimax_m3.common import indexer, sparse_attention

    bases = ("SparseAttention", sparse_attention.MiniMaxM3SparseImpl), ("Indexer", indexer.MiniMaxM3IndexerImpl)
    ours = tuple(plugin.combined(getattr(plugin, name), base) for name, base in bases)
    return {"vllm": (sparse_attention.MiniMaxM3SparseTritonImpl, indexer.MiniMaxM3IndexerTritonImpl), "nsa-sel": ours}  # type: ignore[dict-item]


def measured(case: str, kv: str, rep: float) -> Iterator[Row]:
    """Yield rows of both parts and both contenders."""
    from vllm import forward_context
    from vllm.config import VllmConfig, set_current_vllm_config

    decodes, prefills = CASES[case]
    attention_step, indexer_step, pages = metadata(decodes, prefills)
    forward_context._forward_context = SimpleNamespace(attn_metadata={"layer": attention_step, "layer.index_cache": indexer_step})
    tokens, random = attention_step.num_actual_tokens, partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    buffer = torch.full((tokens, G, n), -1, dtype=torch.int32, device="cuda")
    one = torch.ones((), device="cuda")
    layer = SimpleNamespace(layer_name="layer", topk_indices_buffer=buffer, _k_scale=one, _v_scale=one)
    cache = random(pages, G, PAGE, 2 * D)
    cache = cache.to(STORED).view(torch.uint8) if kv == "fp8" else cache
    index_cache = random(pages, 1, PAGE, D)
    query, index_query = random(tokens, G * h * D), random(tokens, G * D)
    parts, chosen, outputs = {}, {}, {}
    for name, (attention_class, indexer_class) in classes().items():
        attention = attention_class(G * h, D, D**-0.5, G, "fp8" if kv == "fp8" else "auto", **SIZES)
        with set_current_vllm_config(VllmConfig()):
            indexer = indexer_class(
                num_kv_heads=G, scale=D**-0.5, num_index_heads=G, index_head_dim=D, prefix="layer", local_blocks=1,
                topk_indices_buffer=buffer, **SIZES,
            )  # fmt: skip
        indexer.index_cache.bind_kv_cache(index_cache)
        indexer(index_query)
        chosen[name], outputs[name] = buffer.sort(-1).values, torch.full_like(query, torch.nan)
        parts[name] = {
            "indexer": partial(indexer, index_query),
            "attention": partial(attention.forward, layer, query, cache, outputs[name]),
        }
    parts["vllm"]["indexer"]()  # the blocks that both attend to
    for of_contender in parts.values():
        of_contender["attention"]()
    vllms, ours = outputs.values()
    facts = {"same_blocks": (chosen["vllm"] == chosen["nsa-sel"]).all(-1).float().mean().item()}
    facts["difference"] = ((vllms.float() - ours.float()).abs().max() / vllms.abs().max()).item()
    timers: dict[str, Any] = {"calls": milliseconds} if prefills else {}
    if tokens <= MOST_REPLAYED:
        timers["replay"] = replayed_milliseconds
    for part, name, timed in itertools.product(("attention", "indexer"), parts, timers):
        row = {"case": case, "part": part, "contender": name, "kv": kv, "timed": timed, "tokens": tokens, "pages": pages, **facts}
        yield {**row, **timers[timed](parts[name][part], Timing(rep)).fields()}


def table(rows: list[Row]) -> str:
    """Return milliseconds of both parts, vLLM's over ours, by case, format of K and V, and timing."""
    found: dict[tuple[str, str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        found.setdefault((row["case"], row["kv"], row["timed"]), {})[row["part"], row["contender"]] = row
    lines = []
    for case, times in found.items():
        cells = []
        for part in ("attention", "indexer"):
            vllm, ours = times[part, "vllm"], times.get((part, "nsa-sel"))
            gain = "" if ours is None else f" ({vllm['ms_median'] / ours['ms_median']:.2f}x)"
            both = ["-" if row is None else f"{row['ms_median']:.3f}{markdown.MARK * markdown.scatters(row)}" for row in (vllm, ours)]
            cells.append(" / ".join(both) + gain)
        lines.append((*case, *cells))
    return markdown.table(["step", "K and V", "timed", "attention: vLLM / nsa-sel, ms", "indexer: vLLM / nsa-sel, ms"], lines, left=3)


def main(
    out: Out,
    only: Annotated[str, typer.Option(help=f"cases, separated by semicolons: {'; '.join(CASES)}")] = ";".join(CASES),
    formats: Annotated[str, typer.Option(help="of K and V, comma-separated: bf16, fp8")] = "bf16,fp8",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a part should fill")] = 30,
) -> None:
    """Time both parts of every step; append the rows, and print a table."""
    need_gpu("engines")
    torch.manual_seed(0)
    with torch.inference_mode():
        each = (measured(case, kv, rep) for kv, case in itertools.product(formats.split(","), only.split(";")))
        echo(table(store.kept(out, itertools.chain.from_iterable(each), store.stamp())))


if __name__ == "__main__":
    program(main)
