"""vLLM's MiniMax-M3 on a CPU: what its CPU wheel lacks, and batches, metadata and layers as its runner makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language
from torch import Tensor

PAGE = 128
SPARSE = {"sparse_num_index_heads": 2, "sparse_index_dim": 64, "sparse_topk_blocks": 3, "sparse_block_size": PAGE}


def import_model() -> SimpleNamespace:
    """Import M3's modules, whose Triton kernels run in Triton's interpreter.

    The CPU wheel replaces Triton by a stand-in, and torchvision's wheel on PyPI needs CUDA's libraries."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import vllm.triton_utils as utils

    utils.triton, utils.tl, utils.HAS_TRITON = triton, triton.language, True
    import vllm.models.minimax_m3.nvidia.model as model
    from vllm.models.minimax_m3.common import indexer, sparse_attention
    from vllm.models.minimax_m3.common.ops import index_topk

    for kernel in (index_topk._topk_index_kernel.fn, index_topk._topk_index_partial_kernel.fn):
        kernel.configs = kernel.configs[-1:]  # the interpreter takes one
    indexer.get_tensor_model_parallel_world_size = lambda: 1
    return SimpleNamespace(model=model, indexer=indexer, attention=sparse_attention)


class Step(NamedTuple):
    """A batch of a step: the common metadata that vLLM's builders take, and what it was made from."""

    common: Any
    queries: list[int]  # new tokens of each request
    lengths: list[int]  # keys of each request, the new ones among them
    table: Tensor  # [requests, pages of a request]; entries past the length are not pages
    pages: int


def make_step(queries: Sequence[int], contexts: Sequence[int], *, speculative: int = 0, seed: int = 0) -> Step:
    """Return a step, as vLLM's runner orders it: requests that decode come first."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
    used = [-(-length // PAGE) for length in lengths]
    table = torch.full((len(queries), max(used) + 2), 2**30, dtype=torch.int32)
    shuffled = torch.randperm(sum(used) + 3, generator=torch.Generator().manual_seed(seed)).int()
    for row, count in enumerate(used):
        table[row, :count], shuffled = shuffled[:count], shuffled[count:]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(queries), num_actual_tokens=sum(queries), max_query_len=max(queries), max_seq_len=max(lengths),
        block_table_tensor=table, slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
    )  # fmt: skip
    return Step(common, list(queries), lengths, table, sum(used) + 3)


def make_config(speculative: int = 0) -> Any:
    """Return what vLLM's builders and layers read of a VllmConfig."""
    text = SimpleNamespace(sparse_attention_config=SPARSE)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(text_config=text)),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=1024),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, data_parallel_rank=0),
        speculative_config=SimpleNamespace(num_speculative_tokens=speculative, parallel_drafting=False) if speculative else None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(block_size=PAGE),
    )


@contextlib.contextmanager
def forward_context(metadata: object) -> Iterator[None]:
    """Run a step with this metadata by layer."""
    from vllm import forward_context as module

    before, module._forward_context = module._forward_context, SimpleNamespace(attn_metadata=metadata)
    try:
        yield
    finally:
        module._forward_context = before
