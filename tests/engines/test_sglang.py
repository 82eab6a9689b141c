"""The plugin in SGLang 0.5.23, by `make test-vllm`: SGLang's own loader, hooks and Triton kernels, beside the oracle."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs SGLang's wheel: make test-vllm", allow_module_level=True)

from nsa_sel.engines import sglang as plugin
from tests.engines.sglang_package import import_model
from tests.engines.steps import FORCED, INDEX_D, PAGE, STEPS, D, G, Step, h, make_step, n


@pytest.fixture(scope="module")
def m3() -> Any:
    """SGLang's modules, after its loader has run the plugin and applied its hooks."""
    found = import_model()
    names = {f"{plugin.MODULE}.minimax_sparse_{part}" for part in ("prefill", "decode")}
    assert names == found.registry.HookRegistry._patched
    return found


@pytest.fixture(autouse=True)
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_ENGINES", "force")


def slots_of(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's table of slots, [requests of the pool, keys], and the requests' rows in it."""
    rows = torch.arange(len(step.queries)).flip(0) + 1
    table = torch.full((len(rows) + 2, 2048), 2**30, dtype=torch.int32)
    pages = step.table.clamp(max=step.pages - 1)
    table[rows, : pages.shape[1] * PAGE] = (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1).int()
    return table, rows


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
@pytest.mark.parametrize("forced_blocks", ["local", "first"])
@pytest.mark.parametrize("name", ["mixed", "decode", "prefill"])
def test_functions_are_within_twice_the_error_of_sglangs(m3: Any, name: str, forced_blocks: str, dtype: str) -> None:
    step, made = make_step(*STEPS[name]), torch.Generator().manual_seed(3)
    table, slots = slots_of(step)
    stored, scales = (torch.float8_e4m3fn, (0.5, 2.0)) if dtype == "fp8" else (torch.float16, (1.0, 1.0))
    each = torch.tensor(scales).repeat_interleave(D)
    q, index_q = (torch.randn(sum(step.queries), G * width, generator=made).half() for width in (h * D, INDEX_D))
    keys = [(torch.randn(length, G, 2 * D, generator=made) / each).to(stored).float() for length in step.lengths]
    index_keys = [torch.randn(length, 1, INDEX_D, generator=made).half() for length in step.lengths]
    pools = step.paged(keys, stored).flatten(0, 1).split(D, -1)
    expected_blocks = step.best_blocks(index_q, [x[:, 0] for x in index_keys], *FORCED[forced_blocks])
    expected = step.attention(q, [x * each for x in keys], expected_blocks)
    rows, lengths = (q.view(-1, G * h, D), index_q.view(-1, G, INDEX_D)), torch.tensor(step.lengths, dtype=torch.int32)
    index_pool = step.paged(index_keys, torch.float16).nan_to_num(0).flatten(0, 1)
    caches, rule = (*pools, rows[1], index_pool), (PAGE, n, *FORCED[forced_blocks])
    options: dict[str, Any] = {"disable_index_value": True, "page_size": PAGE, "k_scale": scales[0], "v_scale": scales[1]}
    if name == "decode":
        function = m3.kernels.minimax_sparse_decode
        call: tuple[Any, ...] = (rows[0], None, *caches[:3], None, caches[3], None, table, slots, lengths, 2048, 1, *rule)
    else:
        function, most = m3.kernels.minimax_sparse_prefill, max(step.queries)
        cu = torch.tensor([0, *step.queries]).cumsum(0).int()
        call = (rows[0], *caches[:2], None, *caches[2:], None, None, table, slots, cu, lengths, lengths - cu.diff(), most, 2048, 1, *rule)
    errors = []
    for each_function in (function.__wrapped__, function):
        index_values, o = each_function(*call, **options)
        assert index_values is None
        errors.append((o.view(expected.shape) - expected).abs().max().item())
    sglangs, ours = errors
    assert ours <= 2 * sglangs < 0.01
