"""vLLM's plugin: MiniMax-M3's sparse attention and indexer on nsa-sel where vLLM would run its Triton kernels on Hopper.
Pages, metadata, buffers and CUDA graphs stay vLLM's; no other model is touched."""

from __future__ import annotations

import functools
import importlib.abc
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nsa_sel.engines.switch import engines_switch
from nsa_sel.quantize import STORED
from nsa_sel.selection import Selection
from nsa_sel.serving import choose_blocks_with_kvcache, selection_attention_with_kvcache

MODEL = "vllm.models.minimax_m3"
VERSIONS = ("0.32", "0.33")
PAGE = 128  # keys of a page and of a block
ATTENTION, INDEXER = f"{MODEL}.common.sparse_attention", f"{MODEL}.common.indexer"
SELECTORS = {  # module: its function that picks the implementation, and that function's arguments
    ATTENTION: ("select_main_backend_and_impl_cls", {"topk_blocks", "kv_cache_dtype", "num_kv_heads", "emits_sparse_block_table"}),
    INDEXER: ("select_indexer_impl_cls", {"topk_blocks", "indexer_kv_dtype"}),
}

log = logging.getLogger("vllm.nsa_sel")  # vLLM shows loggers below "vllm"


def register() -> None:
    """Arrange that MiniMax-M3, when vLLM imports it, runs on nsa-sel: the entry point in `vllm.general_plugins`.

    Imports nothing of vLLM, because every process of every model calls it. May be called again."""
    if engines_switch() == "0":
        return
    if MODEL in sys.modules:
        replace_selectors()
    elif not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls `replace_selectors` when MiniMax-M3's package has been imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != MODEL:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                replace_selectors()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def replace_selectors() -> None:
    """Wrap both functions by which vLLM picks implementations, in all modules of the model that imported them."""
    from vllm import __version__ as version

    originals: dict[str, Callable[..., Any]] = {}
    for module, (name, arguments) in SELECTORS.items():
        original = getattr(sys.modules.get(module), name, None)
        if original is None or set(inspect.signature(original).parameters) != arguments or ".".join(version.split(".")[:2]) not in VERSIONS:
            message = "nsa-sel leaves MiniMax-M3 to vLLM %s, whose %s.%s it has not been tested with; it takes vLLM %s"
            return log.warning(message, version, module, name, " and ".join(VERSIONS))
        originals[name] = original
    for name, original in originals.items():
        wrapped = WRAPPERS[name](original)
        for loaded in [loaded for key, loaded in sys.modules.items() if key.startswith(f"{MODEL}.")]:
            if vars(loaded).get(name) is original:
                setattr(loaded, name, wrapped)


def wrap_attention_selector(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `select_main_backend_and_impl_cls` that picks `SparseAttention` where vLLM picks Triton."""

    @functools.wraps(original)
    def select(**options: Any) -> tuple[Any, Any]:
        backend, chosen = original(**options)
        module = sys.modules[ATTENTION]
        if applies("sparse attention", options["kv_cache_dtype"], chosen, module.MiniMaxM3SparseTritonImpl):
            return backend, combined(SparseAttention, module.MiniMaxM3SparseImpl)
        return backend, chosen

    return select


def wrap_indexer_selector(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `select_indexer_impl_cls` that picks `Indexer` where vLLM picks Triton."""

    @functools.wraps(original)
    def select(**options: Any) -> Any:
        chosen, module = original(**options), sys.modules[INDEXER]
        if applies("indexer", options.get("indexer_kv_dtype", "bf16"), chosen, module.MiniMaxM3IndexerTritonImpl):
            return combined(Indexer, module.MiniMaxM3IndexerImpl)
        return chosen

    return select


WRAPPERS = {"select_main_backend_and_impl_cls": wrap_attention_selector, "select_indexer_impl_cls": wrap_indexer_selector}


@functools.cache  # the layers of a model share one class, and one line of the log
def applies(part: str, cache_dtype: str, chosen: Any, triton: Any) -> bool:
    """Return True if nsa-sel takes this part of the model, for which vLLM chose a class, on this device; log which it is."""
    from vllm.platforms import current_platform

    if chosen is not triton:
        log.info("nsa-sel leaves MiniMax-M3's %s to vLLM, which picks %s, not its Triton kernels", part, chosen)
        return False
    if "e5m2" in cache_dtype:
        log.warning("nsa-sel leaves MiniMax-M3's %s to vLLM: its cache is %s, not bf16, fp16 or e4m3", part, cache_dtype)
        return False
    if engines_switch() != "force" and not (current_platform.is_cuda() and current_platform.is_device_capability((9, 0))):
        log.info("nsa-sel leaves MiniMax-M3's %s to vLLM: the device is not of SM 9.0; NSA_SEL_ENGINES=force takes any", part)
        return False
    log.info("MiniMax-M3's %s runs on nsa-sel (cache %s); NSA_SEL_ENGINES=0 leaves it to vLLM", part, cache_dtype)
    return True


@functools.cache
def combined(ours: type, base: type) -> type:
    """Return a class with our `forward` and the rest of vLLM's base class."""
    return type(f"NsaSel{ours.__name__}", (ours, base), {})


class SparseAttention:
    """The forward of a `MiniMaxM3SparseImpl`: attention over the blocks in the layer's buffer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    scale: float
    use_fp8_kv: bool

    def forward(self, layer: Any, query: Tensor, kv_cache: Tensor, output: Tensor, *, query_fp8: Tensor | None = None) -> Tensor:
        """Write the attention of a step's tokens into `output`, and return it.

        Args:
            layer: vLLM's layer, with `topk_indices_buffer` [tokens,G,n] int32 and scales of an fp8 cache.
            query: [tokens, heads * D].
            kv_cache: pages [pages,G,128,2*D], K before V.
            output: as query.
            query_fp8: of vLLM's kernels for SM 10.0; not used.
        """
        step = step_of(layer.layer_name)
        if step is None:
            return output
        G, D = self.num_kv_heads, self.head_size
        scales: dict[str, Any] = {}
        if self.use_fp8_kv:
            kv_cache, scales = kv_cache.view(STORED), {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        k, v = (x.transpose(1, 2) for x in (kv_cache[..., :D], kv_cache[..., D:]))  # [pages,128,G,D]
        rows = (x[: step.num_actual_tokens].view(-1, G, self.num_heads // G, D) for x in (query, output))  # [tokens,G,h,D]
        for lengths, table, packed, (q, o, indices) in parts_of(step, *rows, layer.topk_indices_buffer):
            selection = Selection.from_blocks(indices, self.block_size, disjoint=True)
            selection_attention_with_kvcache(q, k, v, selection, lengths, table, scale=self.scale, out=o, **packed, **scales)
        return output


class Indexer:
    """The forward of a `MiniMaxM3IndexerImpl`: the best blocks of a step's tokens by the largest product of a block."""

    num_index_heads: int
    index_head_dim: int
    block_size: int
    topk_blocks: int
    init_blocks: int
    local_blocks: int
    topk_indices_buffer: Tensor | None
    index_cache: Any

    def forward(self, index_query: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Write block indices into the shared buffer, and return it for decoded and for prefilled tokens, [G,tokens,n].

        Args:
            index_query: [tokens, G * D], of the index cache's dtype. One index head per KV group.
        """
        step = step_of(self.index_cache.prefix)
        if step is None:
            return None, None
        tokens, G, n = step.num_actual_tokens, self.num_index_heads, self.topk_blocks
        out = self.topk_indices_buffer
        if out is None:
            out = torch.empty(tokens, G, n, dtype=torch.int32, device=index_query.device)
        rows = index_query[:tokens].view(-1, G, 1, self.index_head_dim)
        rows = rows.bfloat16() if rows.dtype == STORED else rows  # exact; keys stay in e4m3
        keys = self.index_cache.kv_cache.unsqueeze(2)  # [pages,128,1,D]
        rule: dict[str, Any] = {"block_size": self.block_size, "n": n, "first": self.init_blocks, "local": self.local_blocks, "scale": 1.0}
        for lengths, table, packed, (q, chosen) in parts_of(step, rows, out):
            choose_blocks_with_kvcache(q, keys, lengths, table, out=chosen, **rule, **packed)
        decoded, prefilled = out[:tokens].transpose(0, 1).tensor_split((step.num_decode_tokens,), 1)
        return (decoded if step.num_decodes else None), (prefilled if step.num_prefills else None)


def step_of(layer: str) -> Any:
    """Return vLLM's metadata of a layer for this step; None in a run that only measures memory, whose caches are unbound."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    return metadata[layer] if isinstance(metadata, dict) else None


def parts_of(step: Any, *tensors: Tensor) -> Iterator[tuple[Tensor, Tensor, dict[str, Any], list[Tensor]]]:
    """Yield the parts of a step: lengths and block table, the arguments of packed rows, and each tensor's rows.

    Decoded tokens come first, as many per request: [requests, tokens of each, ...]. Prefilled ones follow, packed. The
    block table, as wide as the longest text that vLLM serves, is cut to a power of two of pages: few shapes. Prefilled
    requests have no more pages than all of them together, which the attention's metadata count."""
    decoded, pages = step.num_decode_tokens, 1 << ((step.max_seq_len - 1) // PAGE).bit_length()
    if step.num_decodes:
        part, shape = step.decode, (step.num_decodes, step.decode.decode_query_len)
        yield part.seq_lens, part.block_table[:, :pages], {}, [x[:decoded].view(*shape, *x.shape[1:]) for x in tensors]
    if step.num_prefills:
        part = step.prefill
        pages = min(pages, 1 << (getattr(part, "total_kv_blocks", pages) - 1).bit_length())
        packed = {"cu_seqlens_q": part.cu_seqlens_q, "max_seqlen_q": part.max_query_len}
        yield part.seq_lens, part.block_table[:, :pages], packed, [x[decoded : step.num_actual_tokens] for x in tensors]
