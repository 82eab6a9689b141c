"""Gradients of K and V by slices of rows, where the lists of all rows do not fit the workspace: results, and bytes at 128k rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_sel.backends import _slices
from nsa_sel.backends._triton import arguments, dkdv, key_to_rows, units
from nsa_sel.backends._triton.kernel import Kernel
from nsa_sel.backends._triton.units import Slices
from nsa_sel.core.call import Call
from nsa_sel.core.request import DeviceInfo
from nsa_sel.core.warm import reset
from nsa_sel.errors import BackendError
from nsa_sel.selection import Selection
from nsa_sel.settings.config import settings_for
from tests.helpers.cases import make_blocks, make_grads, make_qkv, make_spans
from tests.helpers.parity import attend, check_both, check_deterministic, check_poison


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls are cut to slices of 5 rows, with room for a few parts. The rows of every slice."""
    found: list[int] = []

    def recorded(*of: Any) -> Any:
        for part, at in _slices.slices(*of):
            found.append(part.q.shape[1])
            yield part, at

    monkeypatch.setattr(dkdv, "slices_of", lambda call, width: Slices(5, 1 << 14))
    monkeypatch.setattr(dkdv, "slices", recorded)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("B", "positions"), [(2, False), (1, True)])
def test_slices_of_small_blocks_add_up(cut: list[int], B: int, positions: bool) -> None:
    q_pos = torch.arange(13, 50, 3)[None] if positions else None
    check_both("triton-tile", *make_qkv(B=B, S=13, G=2, h=3, Dk=16, Dv=8, S_kv=50), make_blocks(B, 13, 2, 50, 9, 4), q_pos=q_pos)
    assert cut == [5, 5, 3] * 2 * B


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ranges", "blocks"])
def test_slices_of_other_selections_add_up(cut: list[int], kind: str) -> None:
    selection = Selection.from_ranges(make_spans("few", 1, 12, 2, 70, 30)) if kind == "ranges" else make_blocks(1, 12, 2, 70, 4, 16)
    check_both("triton-group", *make_qkv(S=12, G=2, h=2, S_kv=70), selection)
    assert cut == [5, 5, 2] * 2


@pytest.mark.slow
def test_slices_are_deterministic(cut: list[int]) -> None:
    check_deterministic("triton-tile", *make_qkv(S=7, G=2, h=2, S_kv=50), make_blocks(1, 7, 2, 50, 9, 4), reruns=2)
    assert cut == [5, 2] * 4


@pytest.mark.slow
def test_slices_read_no_unselected_key(cut: list[int]) -> None:
    check_poison("triton-tile", *make_qkv(S=7, G=2, h=2, S_kv=80), make_blocks(1, 7, 2, 80, 3, 4))
    assert cut == [5, 2] * 4


@pytest.mark.slow
@pytest.mark.parametrize("block", [4, 16])
def test_a_pair_in_one_slice_gets_the_bits_of_one_plan(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """More pairs in one plan share pieces, so that their parts begin elsewhere."""
    q, k, v = make_qkv(S=10, G=1, h=3, S_kv=50, requires_grad=True)
    do, _ = make_grads(q, v)

    def gradients() -> tuple[Tensor, ...]:
        o, _ = attend("triton-tile", q, k, v, make_blocks(1, 10, 1, 50, 3, block))
        return torch.autograd.grad(o, (k, v), do)

    whole = gradients()
    monkeypatch.setattr(dkdv, "slices_of", lambda call, width: Slices(10, 1 << 62))
    assert all(torch.equal(a, b) for a, b in zip(whole, gradients(), strict=True))


@pytest.mark.slow
def test_too_many_slices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (key_to_rows, units):
        monkeypatch.setattr(module, "room", lambda call: 800)
    q, k, v = make_qkv(S=12, G=2, h=2, S_kv=70, requires_grad=True)
    o, _ = attend("triton-tile", q, k, v, make_blocks(1, 12, 2, 70, 4, 16))
    with pytest.raises(BackendError, match=r"the list of rows of every KV tile needs .* Remedy: build the Selection from"):
        o.sum().backward()


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it hold at once; views of `given` hold none."""

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.held = {x.untyped_storage()._cdata: 1 for x in given}  # tensors of each storage
        self.bytes = self.most = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.count(storage._cdata, storage.nbytes(), 1)
                weakref.finalize(x, self.count, storage._cdata, storage.nbytes(), -1)
        return made

    def count(self, storage: int, size: int, change: int) -> None:
        before = self.held.get(storage, 0)
        self.held[storage] = before + change
        self.bytes += size * ((self.held[storage] > 0) - (before > 0))
        self.most = max(self.most, self.bytes)


@pytest.mark.slow
@pytest.mark.parametrize("S", [65536, 131072])
def test_gradients_of_qsa_fit_the_workspace(monkeypatch: pytest.MonkeyPatch, S: int) -> None:
    """Two groups of 12 heads, D 256, 512 blocks of 4 keys and a tail that is not whole: tensors without memory, and no kernel runs."""
    G, h, D, n, config = 2, 12, 256, 512, settings_for(DeviceInfo(kind="cuda", sm=90, name="NVIDIA H100"))
    monkeypatch.setattr(Kernel, "launch", lambda *_: None)
    monkeypatch.setattr(Selection, "_on_gpu", True)  # no copy of ranges to compare with
    with torch.device("meta"):
        q, k, v = (torch.empty(1, *shape, dtype=torch.bfloat16) for shape in ((S, G, h, D), (G, S - 1, D), (G, S - 1, D)))
        lse, delta = torch.empty(1, S, G, h), torch.empty(1, S, G, h)
        selection = Selection(torch.empty(1, S, G, n, 2, dtype=torch.int32), 4, disjoint=True)
    call = Call(q, k, v, selection, None, 1.0, config)
    heads = arguments.heads(call)
    with Peak(q, k, v, lse, delta, selection.ranges) as peak:
        assert units.slices_of(call, 32) is not None
        dk, dv = dkdv.key_value_gradients(call, heads, lse, q, delta, "triton-tile/dkdv")
    assert dk.shape == dv.shape == k.shape
    results = 2 * dk.numel() * dk.itemsize
    assert results < peak.most <= results + config.workspace_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton-group", "triton-tile"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_slices_give_the_gradients_of_one_plan(
    monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path], backend: str, dtype: torch.dtype, most: float
) -> None:
    S, G, n = 8190, 2, 64
    q, k, v = make_qkv(S=S, G=G, h=3, Dk=64, S_kv=8190, dtype=dtype, device="cuda", requires_grad=True)
    do, _ = make_grads(q, v)
    scores = torch.rand(1, S, G, -(-S // 4), generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    ranges = Selection.from_scores(scores, n, 4, S_kv=S).ranges
    cuts: list[Slices | None] = []
    monkeypatch.setattr(dkdv, "slices_of", lambda call, width: cuts.append(units.slices_of(call, width)) or cuts[-1])

    def gradients() -> tuple[Tensor, ...]:
        o, _ = attend(backend, q, k, v, Selection(ranges, 4, disjoint=True))
        return torch.autograd.grad(o, (q, k, v), do)

    whole = gradients()
    configure("provenance: a test\nruntime: {workspace_bytes: 16777216}\n")
    reset()
    first, second = gradients(), gradients()
    assert [cut and cut.rows for cut in cuts] == [None, 1024, 1024]
    for x, a, b in zip(whole, first, second, strict=True):
        assert (x.float() - a.float()).abs().max() <= most * x.float().abs().max()
        assert torch.equal(a, b)
