"""vLLM's MiniMax-M3 on a CPU: what its CPU wheel lacks, and metadata as its runner makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language

from tests.engines.steps import INDEX_D, PAGE, G, Step, n, take_one_config

SPARSE = {"sparse_num_index_heads": G, "sparse_index_dim": INDEX_D, "sparse_topk_blocks": n, "sparse_block_size": PAGE}


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

    take_one_config(index_topk)
    indexer.get_tensor_model_parallel_world_size = lambda: 1
    return SimpleNamespace(model=model, indexer=indexer, attention=sparse_attention)


def common_metadata(step: Step) -> Any:
    """Return what vLLM's runner gives to builders of metadata."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts, lengths = torch.tensor([0, *step.queries]).cumsum(0).int(), torch.tensor(step.lengths, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(step.queries), num_actual_tokens=sum(step.queries), max_query_len=max(step.queries), max_seq_len=max(step.lengths),
        block_table_tensor=step.table, slot_mapping=torch.zeros(sum(step.queries), dtype=torch.int64),
    )  # fmt: skip


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
