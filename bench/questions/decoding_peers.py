"""What does dense decoding take with FlashInfer, over pages as engines have them? Beside the whole step of `decoding_steps`.

    python -m nsa_sel.bench.questions.decoding_peers --out bench/results/h200/profiles/decoding_peers.jsonl

Sizes and dtype of `decoding_steps`: one new token of each of B sequences of one length, times by graph replay. Pages lie in random order,
as in a cache that has served others. `BatchDecodeWithPagedKVCacheWrapper` on tensor cores, in the mode for CUDA graphs; its plan is made
on the host and not timed. Outputs are held to SDPA's over the same keys. Needs `pip install flashinfer-python`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib import util
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nsa_sel.bench.core import environment, markdown, store
from nsa_sel.bench.core.baselines import dense_causal_sdpa
from nsa_sel.bench.core.command_line import echo, need_gpu, program
from nsa_sel.bench.core.parity import WrongResult, checked_error
from nsa_sel.bench.core.timing import Timing, replayed_milliseconds
from nsa_sel.bench.questions.decoding_steps import PAGE, D, G, copy_tbs, h
from nsa_sel.errors import ArgumentError

PEER = "flashinfer"
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
KEYS_CHECKED_AT_ONCE = 4 << 20  # SDPA's copies take 8 GiB: beside 64 GiB of pages there is no room for all


def planned(flashinfer: Any, block_table: Tensor, page_size: int, heads: int, groups: int, head_dim: int) -> Any:
    """FlashInfer's wrapper, planned for one new token after full pages.

    Args:
        flashinfer: the package.
        block_table: [B, pages of a sequence] int32, on the GPU.
        page_size: keys of a page.
        heads: of the queries, G * h.
        groups: G.
        head_dim: D.
    """
    B, each = block_table.shape
    indptr, last = torch.arange(B + 1, dtype=torch.int32) * each, torch.full((B,), page_size, dtype=torch.int32)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=block_table.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr.to(block_table.device),
        paged_kv_indices_buffer=block_table.flatten().clone(), paged_kv_last_page_len_buffer=last.to(block_table.device),
    )  # fmt: skip
    wrapper.plan(
        indptr, block_table.flatten(), last, heads, groups, head_dim, page_size, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
    )
    return wrapper


def beside_sdpa(outputs: Tensor, queries: Tensor, pages: tuple[Tensor, Tensor], block_tables: Tensor) -> float:
    """Mean absolute difference of outputs [B,G*h,D] and SDPA's over the pages' keys in order; WrongResult for more than rounding."""
    at_once = max(1, KEYS_CHECKED_AT_ONCE // (block_tables.shape[1] * pages[0].shape[1]))
    errors = list[float]()
    for o, q, block_table in zip(*(torch.split(x, at_once) for x in (outputs, queries, block_tables)), strict=True):
        k, v = (x[block_table.long()].flatten(1, 2).transpose(1, 2) for x in pages)
        dense = dense_causal_sdpa(q.view(len(q), 1, k.shape[1], -1, q.shape[-1]), k, v, kernel="cudnn" if q.is_cuda else "any")
        errors.append(len(q) * checked_error("o", o.view(dense.shape), dense.double()))
    return sum(errors) / len(block_tables)


def measured(flashinfer: Any, B: int, length: int, bandwidth: float, rep: float) -> store.Row:
    """The row of one size, without its environment. A wrong result is a row without a time."""
    count = B * length // PAGE
    k, v = (torch.randn(count, PAGE, G, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q = torch.randn(B, G * h, D, dtype=torch.bfloat16, device="cuda")
    block_table = torch.randperm(count, device="cuda").view(B, -1).int()
    sizes = {"part": PEER, "B": B, "S": 1, "S_kv": length, "G": G, "h": h, "D": D, "page_size": PAGE, "direction": "decode"}
    wrapper = planned(flashinfer, block_table, PAGE, G * h, G, D)
    try:
        mae = beside_sdpa(wrapper.run(q, (k, v)), q, (k, v), block_table)
    except WrongResult as error:
        return {**sizes, "backend": PEER, "version": flashinfer.__version__, "error": str(error)}
    times = replayed_milliseconds(lambda: wrapper.run(q, (k, v)), Timing(rep))
    floor = {"floor_ms": 2 * k.nbytes / bandwidth / 1e9, "copy_tbs": bandwidth}
    return {**sizes, "backend": PEER, "version": flashinfer.__version__, **times.fields(), **floor, "mae": mae}


def table(rows: Iterable[store.Row], steps: Iterable[store.Row] = ()) -> str:
    """Microseconds of FlashInfer, and in brackets the floor, beside those of cuDNN and of whole steps in bf16, by B and length."""
    of_steps = {(row["B"], row["S_kv"], row["part"]): row["ms_median"] for row in steps if row.get("kv", "bf16") == "bf16"}

    def us(ms: float | None) -> str:
        return "-" if ms is None else f"{ms * 1e3:.1f}"

    lines = []
    for (B, S_kv), row in {(row["B"], row["S_kv"]): row for row in rows}.items():
        ms, (dense, whole) = row["ms_median"], (of_steps.get((B, S_kv, part)) for part in ("dense", "whole"))
        peer, ahead = f"{us(ms)} ({us(row['floor_ms'])})", markdown.factor(None if whole is None else ms / whole)
        lines.append((B, f"{S_kv // 1024}k", peer, us(dense), us(whole), ahead))
    return markdown.table(["B", "keys", "FlashInfer", "cuDNN", "whole step", "FlashInfer / whole step"], lines, left=0)


def main(
    out: Annotated[Path, typer.Option(help="JSON-lines file that rows are appended to")],
    batches: Annotated[str, typer.Option(help="sequences, comma-separated")] = "1,16,64,256",
    lengths: Annotated[str, typer.Option(help="keys of each sequence, comma-separated multiples of 64")] = "16384,32768,65536,131072",
    rep: Annotated[float, typer.Option(help="milliseconds that the timed calls of a size should fill")] = 50,
) -> None:
    """Time FlashInfer's dense decoding at every size; append the rows, and print a table."""
    need_gpu("decoding_peers")
    if util.find_spec(PEER) is None:
        raise ArgumentError(PEER, "not installed", "a version with BatchDecodeWithPagedKVCacheWrapper", "pip install flashinfer-python")
    torch.manual_seed(0)
    flashinfer, facts, bandwidth = importlib.import_module(PEER), environment.stamp(), copy_tbs()
    rows = list[store.Row]()
    with torch.inference_mode():
        for B in map(int, batches.split(",")):
            for length in map(int, lengths.split(",")):
                rows.append({**measured(flashinfer, B, length, bandwidth, rep), **facts})
                store.append(out, rows[-1:])
                torch.cuda.empty_cache()
    echo(table(store.measured(rows)))


if __name__ == "__main__":
    program(main)
