"""The contract of choosing blocks, by every backend on every device: attention to compressed keys, the blocks, gradients, pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace

import nsa_sel
from nsa_sel.backends import choose_triton
from nsa_sel.backends._triton import choose_dkdv, choose_pages
from nsa_sel.core import registry
from nsa_sel.core.call import Rule
from tests.contract.lanes import Lane, lanes, parameters
from tests.helpers.choose_cases import SHAPES, SMALL, check_both, check_forward, check_unread, in_pages, make_choose_call, make_packed_call
from tests.helpers.poison import new_memory_is_nan

HOPPER = {
    "h16": (1, 1500, 1500, 2, 16, 128, 128, Rule()),
    "h4-batch": (3, 777, 777, 2, 4, 128, 128, Rule()),
    "chunked-prefill": (1, 301, 2999, 2, 16, 128, 128, Rule()),
    "one-key": (1, 40, 40, 1, 12, 64, 64, Rule()),
    "h3-other-rule": (1, 1111, 1111, 2, 3, 64, 64, Rule(compress_block=24, compress_stride=12, block_size=48)),
    "h48-192": (1, 500, 1100, 1, 48, 192, 128, Rule()),
    "h64": (1, 700, 1900, 1, 64, 128, 128, Rule()),
}
LANES = lanes("cpu", "interpreter", "cuda", kind="choose")
EDGES = {
    "no-local": SMALL._replace(local=0), "nothing-forced": SMALL._replace(first=0, local=0), "all-forced": SMALL._replace(first=2),
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: short sequences take several steps, parts and sections."""
    if not torch.cuda.is_available():
        small = {name: replace(config, block_l=16) for name, config in choose_triton.CONFIGS.items()}
        monkeypatch.setattr(choose_triton, "config_of", lambda call, kernel: small[kernel])
        for module, name, value in ((choose_pages, "LEAST_KEYS", 4), (choose_pages, "SHARES", 64), (choose_dkdv, "SHORTEST", 8)):
            monkeypatch.setattr(module, name, value)


def slack(lane: Lane) -> float:
    """Sums of float32 on a GPU may choose another block of nearly the same importance."""
    return 1e-4 if lane.device == "cuda" else 0.0


def each(whats: Any) -> Any:
    return pytest.mark.parametrize(("lane", "what"), parameters([(lane, what) for lane in LANES for what in whats(lane)]))


@each(lambda lane: list(HOPPER if lane.limits.tiles_only else SHAPES))
def test_choose_shapes(lane: Lane, what: str) -> None:
    call = make_choose_call(HOPPER[what] if lane.limits.tiles_only else what, lane.dtype, lane.place)
    check_both(registry.load_chooser(lane.name), call, slack(lane), with_lse=what not in ("h6", "h64"))


@each(lambda lane: [dtype for dtype in lane.dtypes if not (lane.device == "cpu" and dtype == torch.bfloat16)])
def test_choose_dtypes_with_a_negative_scale(lane: Lane, what: torch.dtype) -> None:
    call = make_choose_call(HOPPER["h4-batch"] if lane.limits.tiles_only else "h3", what, lane.place, scale=-0.3)
    check_both(registry.load_chooser(lane.name), call, slack(lane))


@each(lambda lane: list(EDGES))
def test_choose_what_is_forced(lane: Lane, what: str) -> None:
    """The public call names the backend; contiguous keys and, where a backend reads them, keys in pages."""
    rule = EDGES[what]
    sizes = (2, 21, 90, 2, 16, 64, 64, rule) if lane.limits.tiles_only else (2, 3, 90, 2, 3, 16, 24, rule)
    q_pos = None if lane.limits.tiles_only else torch.tensor([[89, 41, 5], [0, 88, 50]]).to(lane.place)
    call = make_choose_call(sizes, lane.dtype, lane.place, q_pos=q_pos)
    backend = registry.load_chooser(lane.name)
    check_forward(backend.forward, call, slack(lane))
    if not lane.limits.tiles_only:
        pages = in_pages(call, 4)
        with new_memory_is_nan():
            found = backend.paged(pages) if hasattr(backend, "paged") else backend.forward(pages.gathered())
        check_forward(lambda _: found, call, slack(lane))
    q, k = torch.randn(1, 70, 1, 16, 64, device=lane.place).to(lane.dtype), torch.randn(1, 1, 70, 64, device=lane.place).to(lane.dtype)
    if not lane.limits.tiles_only:
        nsa_sel.choose_blocks(q[..., :2, :], k, block_size=16, n=3, first=min(1, rule.first), local=rule.local, backend=lane.name)
        assert nsa_sel.decisions()[-1].forward == lane.name


@each(lambda lane: ["implied", "given"][: 1 + (not lane.limits.tiles_only)])
def test_choose_reads_nothing_that_counts_for_nothing(lane: Lane, what: str) -> None:
    """NaN in rows that see nothing and in keys that no row sees; reruns are bit-equal."""
    sizes = (2, 333, 333, 2, 16, 64, 64, Rule()) if lane.limits.tiles_only else (2, 33, 33, 1, 3, 16, 24, SMALL)
    call = make_choose_call(sizes, lane.dtype, lane.place, start=-100 if lane.limits.tiles_only else -10)
    call.q_pos = call.positions() if what == "given" else None
    check_unread(registry.load_chooser(lane.name), call, reruns=2)


@each(lambda lane: [] if lane.limits.tiles_only else [(5, 0, 1, 18, 8, 11), (0, 0)])
def test_choose_packed_batches(lane: Lane, what: tuple[int, ...]) -> None:
    call = make_packed_call(what, spare=9, sizes=(1, 3, 16, 24), dtype=lane.dtype, device=lane.place)
    check_both(registry.load_chooser(lane.name), call, slack(lane))


@each(lambda lane: [] if lane.limits.tiles_only else [2048])
def test_choose_many_blocks(lane: Lane, what: int) -> None:
    """n of 2,048 and as many blocks as that, with a rest."""
    rule = Rule(compress_block=1, compress_stride=1, block_size=1, n=what, first=1, local=1)
    call = make_choose_call((1, 2, what + 3, 1, 1, 8, 8, rule), lane.dtype, lane.place)
    check_forward(registry.load_chooser(lane.name).forward, call, slack(lane))
