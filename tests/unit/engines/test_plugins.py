"""The plugins in packages of the few names that they use: versions, the switch, and the arguments that calls get."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel.engines import sglang, vllm
from nsa_sel.errors import ConfigError

PACKAGE = {
    "vllm/__init__.py": "__version__ = '{version}'",
    "vllm/models/__init__.py": "",
    "vllm/platforms.py": "from types import SimpleNamespace\n"
    "current_platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda sm: sm == {sm})",
    "vllm/models/minimax_m3/__init__.py": "from .nvidia import model",
    "vllm/models/minimax_m3/nvidia/__init__.py": "",
    "vllm/models/minimax_m3/nvidia/model.py": "from vllm.models.minimax_m3.common import indexer\n"
    "from vllm.models.minimax_m3.common.sparse_attention import select_main_backend_and_impl_cls",
    "vllm/models/minimax_m3/common/__init__.py": "",
    "vllm/models/minimax_m3/common/sparse_attention.py": "class MiniMaxM3SparseImpl: pass\n"
    "class MiniMaxM3SparseTritonImpl(MiniMaxM3SparseImpl): pass\n"
    "def select_main_backend_and_impl_cls(*, topk_blocks, kv_cache_dtype, num_kv_heads{arguments}):\n"
    "    return 'backend', 'MSA' if kv_cache_dtype == 'nvfp4' else MiniMaxM3SparseTritonImpl",
    "vllm/models/minimax_m3/common/indexer.py": "class MiniMaxM3IndexerImpl: pass\n"
    "class MiniMaxM3IndexerTritonImpl(MiniMaxM3IndexerImpl): pass\n"
    "def select_indexer_impl_cls(*, topk_blocks, indexer_kv_dtype='bf16'):\n"
    "    return MiniMaxM3IndexerTritonImpl",
}
Model = Callable[..., Any]


@pytest.fixture
def import_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """Import MiniMax-M3 of a vLLM of this version, after its loader called `register` twice."""
    finders, modules = list(sys.meta_path), {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    for name in modules:
        del sys.modules[name]

    def import_package(version: str = "0.32.0", sm: tuple[int, int] = (9, 0), arguments: str = ", emits_sparse_block_table=False") -> Any:
        for name, text in PACKAGE.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text.format(version=version, sm=sm, arguments=arguments))
        monkeypatch.syspath_prepend(str(tmp_path))
        vllm.applies.cache_clear()
        vllm.register()
        vllm.register()
        assert not any(name.startswith("vllm") for name in sys.modules)
        return importlib.import_module("vllm.models.minimax_m3.nvidia.model")

    yield import_package
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(modules)


def picks(model: Any, dtype: str = "auto") -> tuple[str, str]:
    """Names of the classes that the model gets."""
    backend, attention = model.select_main_backend_and_impl_cls(topk_blocks=16, kv_cache_dtype=dtype, num_kv_heads=4)
    assert backend == "backend"
    name = attention if isinstance(attention, str) else attention.__name__
    return name, model.indexer.select_indexer_impl_cls(topk_blocks=16).__name__


OURS, VLLMS = ("NsaSelSparseAttention", "NsaSelIndexer"), ("MiniMaxM3SparseTritonImpl", "MiniMaxM3IndexerTritonImpl")


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cu130", "0.33.0"])
def test_vllm_gets_our_classes_where_it_picks_triton(import_model: Model, version: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.nsa_sel")
    model = import_model(version)
    assert picks(model) == picks(model, "fp8") == OURS
    assert picks(model, "nvfp4") == ("MSA", OURS[1])
    assert "leaves MiniMax-M3's sparse attention to vLLM, which picks MSA" in caplog.text
    assert picks(model, "fp8_e5m2") == (VLLMS[0], OURS[1])
    vllm.replace_selectors()
    assert picks(model) == OURS


@pytest.mark.parametrize(
    "options", [{"version": "0.31.2"}, {"version": "0.34.0"}, {"version": "0.3.2"}, {"arguments": ""}, {"arguments": ", more=1"}], ids=str
)
def test_untested_versions_of_vllm_are_left_alone(import_model: Model, options: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    assert picks(import_model(**options)) == VLLMS
    (record,) = caplog.records
    assert record.getMessage().startswith(f"nsa-sel leaves MiniMax-M3 to vLLM {options.get('version', '0.32.0')}, whose vllm.models.")
    assert record.getMessage().endswith("it takes vLLM 0.32 and 0.33")


@pytest.mark.parametrize(("switch", "sm", "expected"), [("0", (9, 0), VLLMS), ("1", (8, 9), VLLMS), ("force", (8, 9), OURS)])
def test_the_switch(import_model: Model, monkeypatch: pytest.MonkeyPatch, switch: str, sm: tuple[int, int], expected: object) -> None:
    monkeypatch.setenv("NSA_SEL_ENGINES", switch)
    assert picks(import_model(sm=sm)) == expected


def test_another_value_of_the_switch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_ENGINES", "yes")
    with pytest.raises(ConfigError, match="NSA_SEL_ENGINES is 'yes'; allowed: 0, 1 or force"):
        vllm.register()


def test_calls_get_decoded_and_prefilled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests decode two tokens each, and two others prefill five tokens: 11 rows of a buffer of 16."""
    G, h, D, n, calls = 2, 3, 8, 4, []
    lengths, table, cu = torch.tensor([9, 5, 7, 4, 8]), torch.zeros(5, 3, dtype=torch.int32), torch.tensor([0, 2, 5])
    step = SimpleNamespace(
        num_actual_tokens=11, max_seq_len=129, num_decodes=3, num_decode_tokens=6, num_prefills=2,
        decode=SimpleNamespace(seq_lens=lengths[:3], block_table=table[:3], decode_query_len=2),
        prefill=SimpleNamespace(seq_lens=lengths[3:], block_table=table[3:], cu_seqlens_q=cu, max_query_len=3),
    )  # fmt: skip
    context = ModuleType("vllm.forward_context")
    vars(context)["get_forward_context"] = lambda: SimpleNamespace(attn_metadata={"attention": step, "index": step})
    monkeypatch.setitem(sys.modules, "vllm.forward_context", context)
    for name in ("selection_attention_with_kvcache", "choose_blocks_with_kvcache"):
        monkeypatch.setattr(vllm, name, lambda *args, **options: calls.append((args, options)))
    buffer, cache = torch.arange(16 * G * n, dtype=torch.int32).view(16, G, n), torch.randn(6, G, 128, 2 * D)
    query, output = torch.randn(2, 16, G * h * D).unbind()
    scales = {"k_scale": torch.tensor(2.0), "v_scale": torch.tensor(3.0)}
    layer = SimpleNamespace(layer_name="attention", topk_indices_buffer=buffer, _k_scale=scales["k_scale"], _v_scale=scales["v_scale"])
    attention = vllm.SparseAttention()
    for name, value in {"num_heads": 6, "num_kv_heads": G, "head_size": D, "block_size": 128, "scale": 0.5, "use_fp8_kv": True}.items():
        setattr(attention, name, value)
    stored = cache.to(torch.float8_e4m3fn)
    assert attention.forward(layer, query, stored.view(torch.uint8), output) is output
    packed = {"cu_seqlens_q": cu, "max_seqlen_q": 3}
    parts = [(slice(0, 6), (3, 2), step.decode, {}), (slice(6, 11), (5,), step.prefill, packed)]
    for ((q, k, v, selection, *keys), options), (rows, shape, part, more) in zip(calls, parts, strict=True):
        assert q.equal(query[rows].view(*shape, G, h, D))
        assert as_floats(k, v).equal(as_floats(*stored.transpose(1, 2).split(D, -1)))
        assert selection.block_indices.flatten().equal(buffer[rows].flatten())
        assert keys[0] is part.seq_lens
        assert keys[1].equal(part.block_table[:, :2])
        assert options.pop("out").data_ptr() == output[rows].data_ptr()
        assert options == {"scale": 0.5, **scales, **more}
    calls.clear()
    indexer = vllm.Indexer()
    sizes = {"num_index_heads": G, "index_head_dim": D, "block_size": 128, "topk_blocks": n, "init_blocks": 1, "local_blocks": 2}
    index_cache = SimpleNamespace(prefix="index", kv_cache=stored[:, 0, :, :D])
    for name, value in {**sizes, "topk_indices_buffer": buffer, "index_cache": index_cache}.items():
        setattr(indexer, name, value)
    index_query = query[:, : G * D].to(torch.float8_e4m3fn)
    decoded, prefilled = indexer.forward(index_query)
    assert decoded is not None
    assert prefilled is not None
    assert torch.cat((decoded, prefilled), 1).transpose(0, 1).equal(buffer[:11])
    for ((q, k, *keys), options), (rows, shape, part, more) in zip(calls, parts, strict=True):
        assert q.equal(index_query[rows].view(*shape, G, 1, D).bfloat16())
        assert k.shape == (6, 128, 1, D)
        assert keys[0] is part.seq_lens
        assert keys[1].equal(part.block_table[:, :2])
        assert options.pop("out").data_ptr() == buffer[rows].data_ptr()
        assert options == {"block_size": 128, "n": n, "first": 1, "local": 2, "scale": 1.0, **more}


def as_floats(*stored: Tensor) -> Tensor:
    return torch.stack(stored).float()


def hooks_of(monkeypatch: pytest.MonkeyPatch, version: str) -> list[str]:
    """Return the names that `register` hooks in SGLang of this version."""
    found: list[str] = []
    names = {
        "sglang.version": {"__version__": version},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=lambda path, function, kind: found.append(path.rpartition(".")[2])),
            "HookType": SimpleNamespace(AROUND="around"),
        },
    }
    for name, members in names.items():
        for module in [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, module, SimpleNamespace(**members))
    sglang.register()
    return found


def test_sglang_is_hooked_in_tested_versions(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert hooks_of(monkeypatch, "0.5.23") == ["minimax_sparse_prefill", "minimax_sparse_decode"]
    assert hooks_of(monkeypatch, "0.5.24") == []
    assert "leaves MiniMax-M3 to SGLang 0.5.24" in caplog.text
    monkeypatch.setenv("NSA_SEL_ENGINES", "0")
    assert hooks_of(monkeypatch, "0.5.23") == []


def test_calls_with_anything_else_run_sglangs_code(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def original(
        q: Any, k_cache: Any, idx_q: Any, idx_k_cache: Any, sink: Any = None, disable_index_value: bool = True, score_type: str = "max",
        max_seqlen: int = 8, block_size_q: int = 1,
    ) -> str:  # fmt: skip
        return "SGLang's"

    q, index_q, keys, index_keys = (torch.zeros(4, heads, 16) for heads in (8, 2, 2, 1))
    refused: list[dict[str, Any]] = [
        {"sink": q}, {"disable_index_value": False}, {"score_type": "lse"}, {"idx_q": q}, {"k_cache": keys.double()},
        {"k_cache": keys.to(torch.float8_e5m2)}, {"idx_k_cache": index_keys.double()}, {"k_cache": keys[None]},
        {"block_size_q": 4}, {"idx_q": index_q.to(torch.float8_e4m3fn)},
    ]  # fmt: skip
    call = {"q": q, "k_cache": keys, "idx_q": index_q, "idx_k_cache": index_keys}
    monkeypatch.setattr(sglang, "attend", lambda *given: "ours")
    caplog.set_level(logging.INFO, "nsa_sel.engines.sglang")
    monkeypatch.setenv("NSA_SEL_ENGINES", "force")
    assert sglang.decode(original, **call) == (None, "ours")
    for options in refused:
        assert sglang.prefill(original, **(call | options)) == sglang.decode(original, **(call | options)) == "SGLang's"
    monkeypatch.setenv("NSA_SEL_ENGINES", "1")
    assert sglang.decode(original, **call) == "SGLang's"
    assert "the device is not of SM 9.0" in caplog.text
