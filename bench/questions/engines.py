"""Time the indexer and the sparse attention of a MiniMax-M3 layer in a step of an engine, on its kernels and on the plugin.

    python -m nsa_sel.bench.questions.engines --engine vllm --out bench/results/h200/profiles/engines.jsonl

Needs vLLM 0.32 or 0.33: its classes, metadata, pages and buffer; or SGLang 0.5.23: its functions, which choose and attend
(part "both"). 4 KV groups of 16 heads, or what a rank of tensor parallelism (TP) has of them, D 128, 16 of the blocks of
128 keys, random numbers in bf16, K and V in bf16 or e4m3. Steps of at most 4,096 tokens are timed by graph replay; those
with prefilled tokens, which engines run outside of their graphs, call by call. Both classes attend to the blocks that
vLLM's indexer chose. `same_blocks` is the share of tokens and groups for which both indexers choose the same set;
`difference` is the largest one of the outputs, relative to the largest output.
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
from nsa_sel.engines import sglang as sglang_plugin
from nsa_sel.engines import vllm as plugin
from nsa_sel.quantize import STORED

HEADS, GROUPS, D, n, PAGE = 64, 4, 128, 16, 128
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
Works = dict[str, dict[str, Any]]  # contender: part: function without arguments


def pages_of(lengths: list[int]) -> tuple[torch.Tensor, int]:
    """Return a table of shuffled pages, with garbage past those of a request, and the number of pages."""
    pages = [-(-length // PAGE) for length in lengths]
    table = torch.full((len(lengths), max(pages)), 2**30, dtype=torch.int32, device="cuda")
    shuffled = torch.randperm(sum(pages), dtype=torch.int32, device="cuda")
    for row, count, end in zip(table, pages, itertools.accumulate(pages), strict=True):
        row[:count] = shuffled[end - count : end]
    return table, sum(pages)


def metadata(decodes: int, prefills: list[tuple[int, int]]) -> tuple[Any, Any, int]:
    """Return a step's metadata for the attention and for the indexer, and its number of pages."""
    from vllm.models.minimax_m3.common import indexer, sparse_attention

    new, lengths = [tokens for tokens, _ in prefills], [KEYS] * decodes + [sum(request) for request in prefills]
    table, pages = pages_of(lengths)
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
            more = {"cu_seqlens_k": starts, "total_kv_blocks": sum(-(-length // PAGE) for length in lengths[decodes:])}
            more = more if name == "Sparse" else {}
            several = getattr(kind, f"MiniMaxM3{name}PrefillMetadata")
            prefill = several(
                cu_seqlens_q=starts, seq_lens=keys[decodes:], context_lens=cached, block_table=table[decodes:], max_query_len=max(new),
                max_seq_len=max(lengths), **more,
            )  # fmt: skip
        found.append(getattr(kind, f"MiniMaxM3{name}Metadata")(*counts, prefill=prefill, decode=decode))
    return *found, pages


def classes() -> dict[str, tuple[type, type]]:
    """Return the attention and the indexer by contender."""
    from vllm.models.minimax_m3.common import indexer, sparse_attention

    bases = ("SparseAttention", sparse_attention.MiniMaxM3SparseImpl), ("Indexer", indexer.MiniMaxM3IndexerImpl)
    ours = tuple(plugin.combined(getattr(plugin, name), base) for name, base in bases)
    return {"vllm": (sparse_attention.MiniMaxM3SparseTritonImpl, indexer.MiniMaxM3IndexerTritonImpl), "nsa-sel": ours}  # type: ignore[dict-item]


def vllm_works(decodes: int, prefills: list[tuple[int, int]], kv: str, G: int, h: int) -> tuple[Works, Row]:
    """Return both parts of a step of vLLM, and what a row says of it."""
    from vllm import forward_context
    from vllm.config import VllmConfig, set_current_vllm_config

    attention_step, indexer_step, pages = metadata(decodes, prefills)
    forward_context._forward_context = SimpleNamespace(attn_metadata={"layer": attention_step, "layer.index_cache": indexer_step})
    tokens, random = attention_step.num_actual_tokens, partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    buffer = torch.full((tokens, G, n), -1, dtype=torch.int32, device="cuda")
    k_scale, v_scale = (torch.ones((), device="cuda") for _ in range(2))  # replays take no tensor twice
    layer = SimpleNamespace(layer_name="layer", topk_indices_buffer=buffer, _k_scale=k_scale, _v_scale=v_scale)
    cache = random(pages, G, PAGE, 2 * D)
    cache = cache.to(STORED).view(torch.uint8) if kv == "fp8" else cache
    index_cache = random(pages, 1, PAGE, D)
    query, index_query = random(tokens, G * h * D), random(tokens, G * D)
    works: Works = {}
    chosen, outputs = {}, {}
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
        works[name] = {
            "indexer": partial(indexer, index_query),
            "attention": partial(attention.forward, layer, query, cache, outputs[name]),
        }
    works["vllm"]["indexer"]()  # the blocks that both attend to
    for of_contender in works.values():
        of_contender["attention"]()
    same = (chosen["vllm"] == chosen["nsa-sel"]).all(-1).float().mean().item()
    return works, {"tokens": tokens, "pages": pages, "same_blocks": same, "difference": difference(*outputs.values())}


def sglang_works(decodes: int, prefills: list[tuple[int, int]], kv: str, G: int, h: int) -> tuple[Works, Row]:
    """Return a step of SGLang, which decodes by a function of its own unless requests prefill, and what a row says of it."""
    from sglang.srt.layers.attention.minimax_sparse_ops import minimax_sparse

    new, cached = [1] * decodes + [tokens for tokens, _ in prefills], [KEYS - 1] * decodes + [keys for _, keys in prefills]
    lengths, tokens = [*map(sum, zip(new, cached, strict=True))], sum(new)
    random = partial(torch.randn, dtype=torch.bfloat16, device="cuda")
    table, pages = pages_of(lengths)
    slots = (table.clamp(max=pages - 1)[:, :, None] * PAGE + torch.arange(PAGE, dtype=torch.int32, device="cuda")).flatten(1)
    starts, keys, before = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, *itertools.accumulate(new)], lengths, cached)
    )  # fmt: skip
    k, v = (random(pages * PAGE, G, D).to(STORED if kv == "fp8" else torch.bfloat16) for _ in range(2))
    call = {
        "q": random(tokens, G * h, D), "k_cache": k, "v_cache": v, "sink": None, "idx_q": random(tokens, G, D), "idx_sink": None,
        "idx_k_cache": random(pages * PAGE, 1, D), "idx_v_cache": None, "req_to_token": slots, "seq_lens": keys,
        "slot_ids": torch.arange(len(new), device="cuda"), "block_size_q": 1, "block_size_k": PAGE, "topk": n, "init_blocks": 0,
        "local_blocks": 1, "sm_scale": D**-0.5, "disable_index_value": True, "page_size": PAGE, "k_scale": 1.0, "v_scale": 1.0,
    }  # fmt: skip
    function, ours = minimax_sparse.minimax_sparse_decode, sglang_plugin.decode
    if prefills:
        function, ours = minimax_sparse.minimax_sparse_prefill, sglang_plugin.prefill
        call |= {"cu_seqlens": starts, "prefix_lens": before, "max_seqlen_q": max(new), "max_seqlen_k": max(lengths)}
        call |= {"cu_seqblocks_q": starts, "max_seqblock_q": max(new), "all_seqblock_q": tokens}
    else:
        call["max_seqlen"] = max(lengths)
    works: Works = {"sglang": {"both": partial(function, **call)}, "nsa-sel": {"both": partial(ours, function, **call)}}
    return works, {"tokens": tokens, "pages": pages, "difference": difference(*(work["both"]()[1] for work in works.values()))}


def difference(theirs: torch.Tensor, ours: torch.Tensor) -> float:
    """Return the largest difference of two outputs, relative to the largest number of the first."""
    return ((theirs.float() - ours.float()).abs().max() / theirs.abs().max()).item()


ENGINES = {"vllm": (vllm_works, ("attention", "indexer")), "sglang": (sglang_works, ("both",))}


def measured(engine: str, case: str, kv: str, rep: float, ranks: int = 1) -> Iterator[Row]:
    """Yield rows of all parts and both contenders."""
    make, parts = ENGINES[engine]
    G = max(1, GROUPS // ranks)
    works, facts = make(*CASES[case], kv, G, HEADS // ranks // G)
    timers: dict[str, Any] = {"calls": milliseconds} if CASES[case][1] else {}
    if facts["tokens"] <= MOST_REPLAYED:
        timers["replay"] = replayed_milliseconds
    for part, name, timed in itertools.product(parts, works, timers):
        row = {"case": case + f", TP {ranks}" * (ranks > 1), "part": part, "contender": name, "kv": kv, "timed": timed, **facts}
        yield {**row, **timers[timed](works[name][part], Timing(rep)).fields()}


COLUMNS = {"attention": "vllm", "indexer": "vllm", "both": "sglang"}  # the part of a step, and the engine that it is compared with


def table(rows: list[Row]) -> str:
    """Return milliseconds of an engine and of ours, and theirs over ours, by case, format of K and V, and timing."""
    found: dict[tuple[str, str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        found.setdefault((row["case"], row["kv"], row["timed"]), {})[row["part"], row["contender"]] = row
    lines = []
    for case, times in found.items():
        cells = []
        for part, engine in COLUMNS.items():
            theirs, ours = times.get((part, engine)), times.get((part, "nsa-sel"))
            gain = "" if theirs is None or ours is None else f" ({theirs['ms_median'] / ours['ms_median']:.2f}x)"
            both = ["-" if row is None else f"{row['ms_median']:.3f}{markdown.MARK * markdown.scatters(row)}" for row in (theirs, ours)]
            cells.append("-" if both == ["-", "-"] else " / ".join(both) + gain)
        lines.append((*case, *cells))
    heads = ("attention: vLLM / nsa-sel", "indexer: vLLM / nsa-sel", "both: SGLang / nsa-sel")
    return markdown.table(["step", "K and V", "timed", *heads], lines, left=3)


def main(
    out: Out,
    engine: Annotated[str, typer.Option(help="vllm or sglang, which must be installed")] = "vllm",
    only: Annotated[str, typer.Option(help=f"cases, separated by semicolons: {'; '.join(CASES)}")] = ";".join(CASES),
    formats: Annotated[str, typer.Option(help="of K and V, comma-separated: bf16, fp8")] = "bf16,fp8",
    ranks: Annotated[int, typer.Option(help="of tensor parallelism, of which one is timed")] = 1,
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a part should fill")] = 30,
) -> None:
    """Time all parts of every step; append the rows, and print a table."""
    need_gpu("engines")
    torch.manual_seed(0)
    with torch.inference_mode():
        each = (measured(engine, case, kv, rep, ranks) for kv, case in itertools.product(formats.split(","), only.split(";")))
        echo(table(store.kept(out, itertools.chain.from_iterable(each), store.stamp())))


if __name__ == "__main__":
    program(main)
