"""The plugin in vLLM 0.32, by `make test-vllm`: vLLM's own loader, builders and Triton kernels, beside the oracle."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from nsa_sel.engines import vllm as plugin
from tests.engines.steps import FORCED, INDEX_D, PAGE, STEPS, D, G, Step, h, make_step, n
from tests.engines.vllm_package import common_metadata, forward_context, import_model, make_config


@pytest.fixture(scope="module")
def m3() -> Any:
    """vLLM's modules, after its loader has loaded the plugin: MiniMax-M3 is imported for the first time here."""
    from vllm import plugins

    assert plugin.MODEL not in sys.modules
    found = plugins.load_plugins_by_group(plugins.DEFAULT_PLUGINS_GROUP)
    assert found["nsa_sel"] is plugin.register
    plugins.plugins_loaded = False
    plugins.load_general_plugins()
    return import_model()


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_ENGINES", "force")
    plugin.applies.cache_clear()


def chosen_by(m3: Any, dtype: str = "auto") -> tuple[type, type]:
    """Return the classes that vLLM's layer and indexer get from the names that they imported."""
    _, attention = m3.model.select_main_backend_and_impl_cls(topk_blocks=n, kv_cache_dtype=dtype, num_kv_heads=G)
    return attention, m3.indexer.select_indexer_impl_cls(topk_blocks=n, indexer_kv_dtype="bf16")


def test_both_selectors_are_replaced_where_vllm_would_run_triton(m3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attention, indexer = chosen_by(m3)
    assert issubclass(attention, (plugin.SparseAttention, m3.attention.MiniMaxM3SparseImpl))
    assert issubclass(indexer, (plugin.Indexer, m3.indexer.MiniMaxM3IndexerImpl))
    assert m3.attention.select_main_impl_cls(topk_blocks=n, kv_cache_dtype="fp8", num_kv_heads=G) is attention
    triton = m3.attention.MiniMaxM3SparseTritonImpl, m3.indexer.MiniMaxM3IndexerTritonImpl
    assert chosen_by(m3, "fp8_e5m2") == (triton[0], indexer)
    monkeypatch.setenv("NSA_SEL_ENGINES", "1")
    plugin.applies.cache_clear()
    assert chosen_by(m3) == triton  # a CPU is not of SM 9.0


def metadata_of(m3: Any, step: Step, speculative: int) -> dict[str, Any]:
    """Metadata of both layers, by vLLM's builders."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config, spec = make_config(speculative), FullAttentionSpec(PAGE, num_kv_heads=G, head_size=D, dtype=torch.float16)
    backends = {"attention": m3.attention.MiniMaxM3SparseBackend, "indexer.index_cache": m3.indexer.MiniMaxM3IndexerBackend}
    made = {name: backend.get_builder_cls()(spec, [name], config, torch.device("cpu")) for name, backend in backends.items()}
    return {name: builder.build(0, common_metadata(step)) for name, builder in made.items()}


def random_blocks(step: Step, made: torch.Generator) -> Tensor:
    """[tokens,G,n] int32: random blocks up to each token's position, and -1 where it has fewer."""
    indices = torch.full((sum(step.queries), G, n), -1, dtype=torch.int32)
    for length, rows in step.requests:
        for row, g in itertools.product(range(rows.start, rows.stop), range(G)):
            chosen = torch.randperm((length - rows.stop + row) // PAGE + 1, generator=made)[:n]
            indices[row, g, : len(chosen)] = chosen.int()
    return indices


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", STEPS)
def test_attention_is_within_twice_the_error_of_vllms_kernels(m3: Any, name: str, dtype: str) -> None:
    step, made = make_step(*STEPS[name]), torch.Generator().manual_seed(1)
    metadata = metadata_of(m3, step, 3 * (name == "verify"))
    assert metadata["attention"].num_decodes == {"mixed": 3, "decode": 4, "prefill": 0, "verify": 2}[name]
    query = torch.randn(sum(step.queries), G * h * D, generator=made).half()
    keys = [torch.randn(length, G, 2 * D, generator=made).half() for length in step.lengths]
    layer = SimpleNamespace(layer_name="attention", topk_indices_buffer=random_blocks(step, made))
    cache = step.paged(keys, torch.float16)
    if dtype == "fp8":
        layer._k_scale, layer._v_scale = torch.tensor(0.5), torch.tensor(2.0)
        scales = torch.tensor([0.5, 2.0]).repeat_interleave(D)
        keys = [(x / scales).to(torch.float8_e4m3fn).double() * scales for x in keys]
        cache = (cache / scales).to(torch.float8_e4m3fn).view(torch.uint8)
    expected, errors = step.attention(query, keys, layer.topk_indices_buffer), []
    for implementation in (m3.attention.MiniMaxM3SparseTritonImpl, chosen_by(m3, dtype)[0]):
        attention = implementation(G * h, D, D**-0.5, G, dtype, topk_blocks=n, sparse_block_size=PAGE)
        output = torch.full_like(query, torch.nan)
        with forward_context(metadata), torch.inference_mode():
            assert attention.forward(layer, query, cache.transpose(1, 2), output) is output
        errors.append((output.view(expected.shape) - expected).abs().max().item())
    vllms, ours = errors
    assert ours <= 2 * vllms < 0.01


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("forced", FORCED)
@pytest.mark.parametrize("name", STEPS)
def test_the_indexer_chooses_the_blocks_that_vllms_kernels_choose(m3: Any, name: str, forced: str, dtype: str) -> None:
    step, made = make_step(*STEPS[name]), torch.Generator().manual_seed(2)
    metadata, stored = metadata_of(m3, step, 3 * (name == "verify")), torch.float8_e4m3fn if dtype == "fp8" else torch.float16
    query = torch.randn(sum(step.queries), G * INDEX_D, generator=made).to(stored)
    keys = [torch.randn(length, INDEX_D, generator=made).to(stored) for length in step.lengths]
    expected, decodes = step.best_blocks(query, keys, *FORCED[forced]), metadata["attention"].num_decode_tokens
    for implementation in (m3.indexer.MiniMaxM3IndexerTritonImpl, chosen_by(m3)[1]):
        buffer = torch.full((len(query) + 5, G, n), 77, dtype=torch.int32)
        indexer = make_indexer(implementation, FORCED[forced], dtype, buffer)
        indexer.index_cache.bind_kv_cache(step.paged(keys, stored)[:, None])
        with forward_context(metadata), torch.inference_mode():
            parts = indexer(query)
        assert buffer[:-5].sort(-1).values.equal(expected)
        assert (buffer[-5:] == 77).all()
        for part, rows in zip(parts, (buffer[:decodes], buffer[decodes:-5]), strict=True):
            assert (part is None) == (len(rows) == 0)
            assert part is None or (part.transpose(0, 1)[: len(rows)].equal(rows) and part.data_ptr() == rows.data_ptr())


def make_indexer(implementation: type, forced: tuple[int, int], dtype: str, buffer: Tensor | None) -> Any:
    from vllm.config import set_current_vllm_config

    sizes = {"topk_blocks": n, "sparse_block_size": PAGE, "num_index_heads": G, "index_head_dim": INDEX_D}
    first, local = forced
    with set_current_vllm_config(make_config()):
        return implementation(
            num_kv_heads=G, scale=D**-0.5, prefix="indexer", init_blocks=first, local_blocks=local, indexer_kv_dtype=dtype,
            topk_indices_buffer=buffer, **sizes,
        )  # fmt: skip


def test_runs_that_measure_memory_have_no_caches(m3: Any) -> None:
    attention, indexer = chosen_by(m3)
    output = torch.zeros(3, G * h * D)
    with forward_context(None):
        made = attention(G * h, D, D**-0.5, G, topk_blocks=n, sparse_block_size=PAGE)
        assert made.forward(SimpleNamespace(layer_name="attention"), output, torch.empty(0), output) is output
        assert make_indexer(indexer, (0, 1), "bf16", None)(torch.zeros(3, G * INDEX_D)) == (None, None)
