"""Every GPU backend on a GPU: the contract's cells (tests/contract/attend.py), sizes past 2^31, routing, failures. `make gpu-test-full`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_sel import Selection, decisions, explain, selection_attention
from tests.contract.attend import cells, run
from tests.contract.lanes import Lane
from tests.helpers.cases import assert_forward, make_blocks, make_qkv, make_spans
from tests.helpers.checks import attend, new_memory_is_nan
from tests.helpers.gpus import needs

# From the backends' own declarations: what the registry says runs on a GPU must run here, unless a package of it is missing.


def unless_missing(cases: list[tuple[str, str]]) -> list[Any]:
    """The cases, with those of backends that this machine lacks something for skipped for the registry's reasons."""
    return [pytest.param(name, dtype, marks=needs(name)) for name, dtype in cases]


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def gpu_qkv(dtype: str, **sizes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_qkv(dtype=DTYPES[dtype], device="cuda", **sizes)  # type: ignore[arg-type]


@pytest.mark.gpu
@cells("cuda")
def test_contract(behavior: str, lane: Lane, what: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(behavior, lane, what, monkeypatch)


@pytest.mark.gpu
def test_the_policy_routes_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "128")
    q, k, v = gpu_qkv("bfloat16", S=200, G=1, h=4, Dk=64)
    for n, framework in ((4, "triton"), (3, "sdpa")):
        selection_attention(q, k, v, make_blocks(1, 200, 1, 200, n, 32, device="cuda"))
        decision = decisions()[-1]
        if decision.settings.triton_off is not None:
            framework = "sdpa"  # the device rule (ADR) stands
        assert str(decision.forward).startswith(framework)
        assert decision.replay() == ()


@pytest.mark.gpu
def test_bulk_copies_are_taken_from_hopper_on(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    q, k, v = gpu_qkv("bfloat16", S=300, G=1, h=4, Dk=64)
    for backend in ("triton-group", "triton-tile"):
        attend(backend, q, k, v, make_blocks(1, 300, 1, 300, 3, 32, device="cuda"))
    configs = [event["config"] for event in logged("sel.triton.kernel")]
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    for kernel in ("triton-group/forward-blocks:tma", "triton-tile/forward:tma"):
        assert any(config.startswith(kernel) for config in configs) == hopper, configs


@pytest.mark.gpu
def test_a_kernel_that_fails_is_replaced_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory that no GPU has: the automatic choice steps down to packed SDPA, a forced one raises."""
    import msgspec

    from nsa_sel.settings import config, schema

    settings_for = config.settings_for

    def impossible(device: object) -> schema.Settings:
        settings = settings_for(device)  # type: ignore[arg-type]
        huge = {"block_l": 2048, "num_warps": 8, "num_stages": 1}
        kernels = {name: msgspec.structs.replace(kernel, **huge) for name, kernel in settings.kernels.items()}
        return msgspec.structs.replace(settings, kernels=kernels, sel_triton_min_L=1, triton_off=None)

    monkeypatch.setattr("nsa_sel.core.decide.settings_for", impossible)
    q, k, v = gpu_qkv("float16", S=200, G=1, h=4, Dk=128, S_kv=5000)  # a tile of 2048 keys takes 512 KiB
    selection = Selection.from_ranges(make_spans("few", 1, 200, 1, 5000, 4500, device="cuda"))
    o = selection_attention(q, k, v, selection)
    decision = decisions()[-1]
    assert decision.forward == "sdpa-packed"
    assert "failure of triton-group" in decision.override.source
    assert bool(o.isfinite().all())
    again = explain(q, k, v, selection)
    assert any(reason.code == "failed-before" for verdict in again.verdicts for reason in verdict.forward)
    with pytest.raises(Exception, match=r"(?i)shared memory|resource|failed"):
        selection_attention(q, k, v, selection, backend="triton-group")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype"), unless_missing([(name, "bfloat16") for name in ("triton-group", "triton-tile", "cupy-cuda")])
)
def test_the_first_call_of_a_thread(backend: str, dtype: str) -> None:
    """A thread in which nothing has bound the device's context: as autograd's, when a checkpointed forward is computed again."""
    q, k, v = gpu_qkv(dtype, S=130, G=1, h=4, Dk=64)
    selection = make_blocks(1, 130, 1, 130, 2, 64, device="cuda")
    expected = attend(backend, q, k, v, selection)
    found = []
    thread = threading.Thread(target=lambda: found.append(attend(backend, q, k, v, selection)))
    thread.start()
    thread.join()
    assert [torch.equal(a, b) for a, b in zip(found[0], expected, strict=True)] == [True, True]


# S, S_kv, groups of q, of k, h, Dk, Dv, n, block. Row counts that fill no tile; S_kv ends within a block.
MODELS = {
    "qsa": (45, 1030, 2, 2, 12, 256, 256, 100, 4),
    "qsa-8": (45, 1030, 2, 2, 12, 256, 256, 50, 8),
    "256": (45, 1030, 2, 2, 12, 256, 256, 6, 64),
    "nsa": (40, 1000, 4, 4, 16, 192, 128, 6, 64),
    "minimax-m3": (40, 1500, 4, 4, 16, 128, 128, 6, 128),
    "minicpm4": (40, 2000, 2, 2, 16, 128, 128, 20, 64),
    "moba": (45, 1600, 8, 2, 1, 128, 128, 3, 512),
}


def inputs(model: str, B: int = 1, S: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    rows, S_kv, groups, kv_groups, h, Dk, Dv, _, _ = MODELS[model]
    size: dict[str, Any] = {"B": B, "S": S or rows, "h": h, "Dk": Dk, "Dv": Dv, "S_kv": S_kv, "dtype": torch.bfloat16, "device": "cuda"}
    return make_qkv(G=groups, **size)[0], *make_qkv(G=kv_groups, seed=1, **size)[1:]


def selection_of(model: str, B: int = 1, S: int | None = None, n: int | None = None) -> Selection:
    rows, S_kv, groups, _, _, _, _, most, block = MODELS[model]
    return make_blocks(B, S or rows, groups, S_kv, n or most, block, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("B", [2, 80])
def test_decoding_by_the_policys_choice(model: str, B: int) -> None:
    q, k, v = inputs(model, B, 1)
    selection = selection_of(model, B, 1)
    with new_memory_is_nan():
        runs = [selection_attention(q, k, v, selection, return_lse=True) for _ in range(50)]
    assert decisions()[-1].forward not in (None, "sdpa-packed")
    assert_forward(runs[0], q, k, v, selection.ranges)
    assert all(torch.equal(x, y) for run in runs for x, y in zip(runs[0], run, strict=True))


@pytest.mark.gpu
def test_heads_that_select_for_themselves_copy_no_keys() -> None:
    """Beside o and what is rearranged (q and o), the peak stays far below a repeated K and V."""
    S, G, r, D = 4096, 2, 16, 128
    q = torch.randn(1, S, G * r, 1, D, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(1, G, 65536, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    selection = make_blocks(1, S, G * r, 65536, 2, 4096, device="cuda")
    selection_attention(q, k, v, selection, backend="triton-tile")  # compiles, and caches the selection's rows
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    selection_attention(q, k, v, selection, backend="triton-tile")
    repeated = 2 * r * k.numel() * k.element_size()
    assert torch.cuda.max_memory_allocated() - before < repeated / 4
