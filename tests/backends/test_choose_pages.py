"""Choosing over compressed keys in pages, in Triton and gathered, against the float64 oracle."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nsa_sel.backends import choose_torch, choose_triton
from nsa_sel.backends._triton import choose_pages
from nsa_sel.core.call import ChooseCall, Rule
from tests.helpers.choose_cases import SMALL, check_forward, in_pages, make_choose_call
from tests.helpers.poison import new_memory_is_nan

NSA = Rule(n=4)
SHARES, CONFIGS = choose_pages.SHARES, choose_triton.CONFIGS  # as on a GPU
CASES: dict[str, tuple[tuple[Any, ...], list[int]]] = {  # B, S, S_kv, G, h, Dk, Dv, rule; lengths
    "decode": ((3, 1, 96, 2, 4, 16, 16, SMALL), [96, 41, 5]),
    "drafts": ((2, 3, 80, 1, 3, 24, 16, SMALL), [80, 33]),
    "empty": ((3, 2, 64, 1, 2, 16, 24, SMALL), [0, 1, 64]),
    "nsa": ((1, 1, 512, 1, 16, 16, 16, NSA), [500]),
    "192-128": ((1, 2, 48, 1, 2, 192, 128, SMALL), [47]),
    "three-pieces": ((2, 1, 60, 1, 2, 16, 16, SMALL._replace(block_size=12, n=3)), [60, 31]),
    "no-overlap": ((2, 1, 64, 1, 2, 16, 16, SMALL._replace(compress_block=4)), [64, 9]),
    "covers-a-block": ((2, 2, 64, 1, 2, 16, 16, SMALL._replace(compress_block=16)), [64, 19]),
}


@pytest.fixture(autouse=True)
def few_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: short sequences take several steps and parts."""
    if not torch.cuda.is_available():
        small = {name: msgspec.structs.replace(config, block_l=16) for name, config in choose_triton.CONFIGS.items()}
        monkeypatch.setattr(choose_triton, "CONFIGS", small)
        monkeypatch.setattr(choose_pages, "LEAST_KEYS", 4)
        monkeypatch.setattr(choose_pages, "SHARES", 64)


def contiguous(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **changed: Any) -> ChooseCall:
    """New tokens that are the last ones of sequences with these lengths; rows before the first token stand at -1 and see nothing."""
    shape, lengths = CASES[name]
    q_pos = torch.tensor(lengths)[:, None] + torch.arange(-shape[1], 0)
    return make_choose_call(shape, dtype, device, q_pos=q_pos.clamp(min=-1).to(device), **changed)


def run(backend: Any, call: ChooseCall) -> tuple[Tensor, ...]:
    with new_memory_is_nan():
        return backend.paged(call) if hasattr(backend, "paged") else backend.forward(call.gathered())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "slots"), [*((name, 4) for name in CASES), ("drafts", 1)])
def test_keys_in_pages_are_chosen_among_as_in_one_piece(name: str, slots: int) -> None:
    """Within the error that the oracle allows."""
    call = contiguous(name)
    pages = in_pages(call, slots)
    assert choose_pages.takes(pages)
    check_forward(lambda _: run(choose_triton, pages), call)  # type: ignore[arg-type, return-value]


def test_scores_carry_over_programs_of_importance(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 4096 keys of 16 heads. Nearly all weight is on the last compressed key before, which covers the next block, too."""
    monkeypatch.setattr(choose_pages, "SHARES", SHARES)
    monkeypatch.setattr(choose_triton, "CONFIGS", CONFIGS)
    call = make_choose_call((1, 1, 4480, 1, 16, 16, 16, Rule(n=5)), q_pos=torch.tensor([[4479]]))
    call.q.fill_(1)
    call.k.mul_(0.1)[:, :, 255] = 2
    found = run(choose_triton, in_pages(call, 4))
    check_forward(lambda _: found, call)  # type: ignore[arg-type, return-value]
    assert (found[2][0, 0, 0, :, 0] // 64).tolist() == [0, 63, 64, 68, 69]


def test_other_backends_gather() -> None:
    call = contiguous("drafts")
    pages = in_pages(call, 4)
    check_forward(lambda _: run(choose_torch, pages), call)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("changed", [{"dtype": torch.float16}, {"scale": -0.3}, {"many": True}, {"scratch": True}], ids=str)
def test_dtypes_scales_and_sizes(changed: dict[str, Any]) -> None:
    """Rows that do not fit a tile are gathered; shares that do not fit the workspace are made sequence by sequence."""
    options = {name: value for name, value in changed.items() if name in ("dtype", "scale")}
    call = contiguous("decode", **options)
    if "many" in changed:
        call = make_choose_call((2, 13, 48, 1, 6, 16, 16, SMALL), q_pos=torch.arange(26).view(2, 13))
    pages = in_pages(call, 4)
    assert choose_pages.takes(pages) == ("many" not in changed)
    if "scratch" in changed:
        pages.settings = msgspec.structs.replace(pages.settings, workspace_bytes=1 << 9)
    check_forward(lambda _: run(choose_triton, pages), call)  # type: ignore[arg-type, return-value]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_choosing_over_pages_on_a_gpu(dtype: torch.dtype) -> None:
    """Split among many programs and not; bit-equal from run to run."""
    for B, S, D in ((3, 1, 128), (2, 4, 64), (150, 1, 128)):
        lengths = torch.randint(0, 1500, (B,), generator=torch.Generator().manual_seed(B))
        q_pos = (lengths[:, None] + torch.arange(-S, 0)).clamp(min=-1).cuda()
        call = make_choose_call((B, S, 1536, 1, 16, D, D, Rule()), dtype, "cuda", q_pos=q_pos)
        pages = in_pages(call, 4)
        check_forward(lambda _: run(choose_triton, pages), call, slack=1e-4)  # type: ignore[arg-type, return-value]  # noqa: B023
        assert all(map(torch.equal, run(choose_triton, pages), run(choose_triton, pages)))
