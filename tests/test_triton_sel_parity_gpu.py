"""Every GPU backend on a GPU: parity matrices, poison, edges, sizes past 2^31, reruns. `make gpu-test-full`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import nsa_sel
from nsa_sel.core import registry
from nsa_sel.oracle import oracle_backward, oracle_forward
from nsa_sel.selection import Selection
from tests.helpers.cases import cut_spans, edge_block_lists, edge_selections, make_blocks, make_grads, make_qkv, make_spans
from tests.helpers.gpus import needs
from tests.helpers.parity import attend, check_both, check_deterministic, check_forward, check_poison
from tests.helpers.poison import check_empty_rows, check_one_row, rows_with_holes, selected, through

pytestmark = pytest.mark.gpu

# From the backends' own declarations: what the registry says runs on a GPU must run here, unless a package of it is missing.
CASES = [
    (name, dtype) for name, backend in registry.backends().items() for dtype in backend.limits.dtypes.get("cuda", ()) if dtype != "float64"
]


def unless_missing(cases: list[tuple[str, str]]) -> list[Any]:
    """The cases, with those of backends that this machine lacks something for skipped for the registry's reasons."""
    return [pytest.param(name, dtype, marks=needs(name)) for name, dtype in cases]


MAE = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 1e-3}
on_gpu = pytest.mark.parametrize(("backend", "dtype"), unless_missing(CASES))
on_ranges = pytest.mark.parametrize(
    ("backend", "dtype"), unless_missing([case for case in CASES if not registry.backends()[case[0]].limits.block_aligned_only])
)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def rows_of(backend: str, kind: str, S: int, G: int, S_kv: int, L: int) -> Selection:
    """A selection of L keys a row: spans, or for a backend of whole blocks as many keys in blocks (few: 2; many: 8, of at least 16)."""
    if not registry.backends()[backend].limits.block_aligned_only:
        return cut_spans(kind, 1, S, G, S_kv, L, device="cuda")
    block_size = {"few": L // 2, "many": max(16, L // 8), "mixed": 32}[kind]
    return make_blocks(1, S, G, S_kv, L // block_size, block_size, device="cuda")


def gpu_qkv(dtype: str, **sizes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_qkv(dtype=DTYPES[dtype], device="cuda", **sizes)  # type: ignore[arg-type]


@on_gpu
@pytest.mark.parametrize("h", [2, 8])
@pytest.mark.parametrize(("Dk", "Dv"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_forward_matrix(backend: str, dtype: str, Dk: int, Dv: int, h: int) -> None:
    for L in (64, 128, 256, 512):
        for kind in ("few", "many", "mixed"):
            q, k, v = gpu_qkv(dtype, S=8, G=2, h=h, Dk=Dk, Dv=Dv, S_kv=L + 88, seed=L + Dk + h)
            selection = rows_of(backend, kind, 8, 2, L + 88, L)
            check_forward(backend, q, k, v, selection)
            o, _ = attend(backend, q, k, v, selection)
            exact, _ = oracle_forward(q, k, v, selection.ranges)
            assert float((o.cpu().double() - exact).abs().mean()) < MAE[dtype]


@on_gpu
@pytest.mark.parametrize("h", [2, 8])
@pytest.mark.parametrize(("Dk", "Dv"), [(64, 64), (64, 128), (128, 64), (128, 128)])
def test_backward_matrix(backend: str, dtype: str, Dk: int, Dv: int, h: int) -> None:
    for L, kind in ((64, "few"), (128, "many"), (256, "mixed"), (512, "few")):
        q, k, v = gpu_qkv(dtype, S=8, G=2, h=h, Dk=Dk, Dv=Dv, S_kv=L + 88, seed=L + Dk + h)
        check_both(backend, q, k, v, rows_of(backend, kind, 8, 2, L + 88, L))


@on_gpu
@pytest.mark.parametrize("h", [1, 3, 6, 12, 16, 64])
def test_any_number_of_heads(backend: str, dtype: str, h: int) -> None:
    q, k, v = gpu_qkv(dtype, S=150, G=1, h=h, Dk=64, Dv=64, seed=h)
    check_both(backend, q, k, v, make_blocks(1, 150, 1, 150, 3, 32, device="cuda"))


@on_gpu
@pytest.mark.parametrize(("Dk", "Dv"), [(8, 8), (16, 16), (8, 24), (96, 80), (192, 128), (256, 256)])
def test_any_head_dim(backend: str, dtype: str, Dk: int, Dv: int) -> None:
    q, k, v = gpu_qkv(dtype, S=140, G=1, h=4, Dk=Dk, Dv=Dv, seed=Dk)
    check_both(backend, q, k, v, make_blocks(1, 140, 1, 140, 3, 32, device="cuda"))
    if not registry.backends()[backend].limits.block_aligned_only:
        check_both(backend, q[:, -6:], k, v, Selection.from_ranges(make_spans("many", 1, 6, 1, 140, 50, device="cuda")))


@on_gpu
def test_batch_of_three_from_a_cache(backend: str, dtype: str) -> None:
    q, k, v = gpu_qkv(dtype, B=3, S=50, G=2, h=4, Dk=64, Dv=32, S_kv=130)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    check_both(backend, q, k, v, make_blocks(3, 50, 2, 130, 3, 32, device="cuda"))


@on_gpu
@pytest.mark.parametrize("edge", sorted(edge_block_lists(1, 2, 1, 64, 16)))
def test_edges_of_blocks(backend: str, dtype: str, edge: str) -> None:
    q, k, v = gpu_qkv(dtype, B=2, S=8, G=2, h=3, Dk=16, Dv=32, S_kv=70)
    check_both(backend, q, k, v, Selection.from_blocks(edge_block_lists(2, 8, 2, 70, 16, device="cuda")[edge], 16))


@on_ranges
@pytest.mark.parametrize("edge", sorted(edge_selections(1, 2, 1, 16)))
def test_edges(backend: str, dtype: str, edge: str) -> None:
    q, k, v = gpu_qkv(dtype, B=2, S=8, G=2, h=3, Dk=16, Dv=32, S_kv=40)
    check_both(backend, q, k, v, Selection.from_ranges(edge_selections(2, 8, 2, 40, device="cuda")[edge]))


@on_gpu
def test_fewer_keys_than_blocks(backend: str, dtype: str) -> None:
    q, k, v = gpu_qkv(dtype, S=5, G=1, h=2, Dk=16)
    check_both(backend, q, k, v, make_blocks(1, 5, 1, 5, 4, 16, device="cuda"))


@on_gpu
def test_unselected_keys_are_never_used(backend: str, dtype: str) -> None:
    blocks = Selection.from_blocks(torch.tensor([0, 4], device="cuda").int().expand(1, 300, 1, 2), 16)
    q, k, v = gpu_qkv(dtype, S=300, G=1, h=4, Dk=32, S_kv=400)
    check_poison(backend, q, k, v, blocks)
    check_poison(backend, q[:, -1:], k, v, Selection(blocks.ranges[:, :1], 16))
    # Row 1 alone chose its own block, and stands in its midst: what follows in that block belongs to nobody.
    lone = torch.tensor([[0, -1], [24, 0], [0, -1], [0, 1], [1, -1], [0, -1]], device="cuda").int()
    check_poison(backend, q[:, -6:], k[:, :, :396], v[:, :, :396], Selection.from_blocks(lone[None, :, None], 16))
    if not registry.backends()[backend].limits.block_aligned_only:
        spans = torch.tensor([[1, 3], [40, 59]], device="cuda").int().expand(1, 6, 1, 2, 2)
        check_poison(backend, q[:, -6:], k, v, Selection.from_ranges(spans))
        check_poison(backend, q[:, -1:], k, v, Selection.from_ranges(spans[:, :1]))


POISONED = [(name, dtype) for name, dtype in CASES if dtype == "bfloat16" or name == "triton-tile"]


@pytest.mark.parametrize(("backend", "dtype"), unless_missing(POISONED))
@pytest.mark.parametrize("h", [3, 16])
def test_poison_matrix(backend: str, dtype: str, h: int) -> None:
    """Rows that select nothing, whole tiles of padding among them, whatever they hold; a row that selects something spoils no other."""
    q, k, v = gpu_qkv(dtype, B=2, S=150, G=2, h=h, Dk=64, Dv=128, S_kv=700)
    selection, row = rows_with_holes(2, 150, 2, 700, 64, 3, device="cuda")
    run, mask = through(backend, selection), selected(selection, q, k)
    check_empty_rows(run, q, k, v, mask)
    check_one_row(run, q, k, v, mask, row)


SMALL = [case for case in POISONED if case[1] == "bfloat16" and registry.backends()[case[0]].limits.takes_block(4)]


@pytest.mark.parametrize(("backend", "dtype"), unless_missing(SMALL))
def test_poison_matrix_of_small_blocks(backend: str, dtype: str) -> None:
    """The first two rows select a block that is in the future, of a tile of which they see some."""
    q, k, v = gpu_qkv(dtype, B=2, S=150, G=2, h=4, Dk=64, Dv=128, S_kv=700)
    selection, row = rows_with_holes(2, 150, 2, 700, 4, 9, device="cuda")
    selection.ranges[:, :2, :, 0] = torch.tensor([552, 556], device="cuda")
    run, mask = through(backend, selection), selected(selection, q, k)
    check_empty_rows(run, q, k, v, mask)
    check_one_row(run, q, k, v, mask, row)


@pytest.mark.parametrize(("backend", "dtype"), unless_missing([case for case in POISONED if case[1] != "float32"]))
def test_poison_matrix_of_padding_that_decodes(backend: str, dtype: str) -> None:
    """Sequences of length 0 in a batch of one token each, and rows that are split among programs."""
    for B in (1, 2, 150):
        q, k, v = gpu_qkv(dtype, B=B, S=1, G=2, h=4, Dk=64, Dv=128, S_kv=1000)
        selection = make_blocks(B, 1, 2, 1000, 4, 64, device="cuda")
        lengths = torch.randint(300, 1000, (B, 1), generator=torch.Generator().manual_seed(1))
        lengths[::2] = 0
        q_pos = lengths.cuda() - 1
        run, mask = through(backend, selection, q_pos=q_pos), selected(selection, q, k, q_pos.cpu())
        check_empty_rows(run, q, k, v, mask, {"nan": ("all",), "huge": ("all",)})


@on_gpu
@pytest.mark.parametrize("S", [1, 200])
def test_fifty_reruns_are_bit_equal(backend: str, dtype: str, S: int) -> None:
    q, k, v = gpu_qkv(dtype, S=S, G=2, h=4, Dk=64, S_kv=512)
    check_deterministic(backend, q, k, v, make_blocks(1, S, 2, 512, 4, 32, device="cuda"), reruns=50)


@on_gpu
@pytest.mark.parametrize("B", [1, 3, 200])
def test_decode(backend: str, dtype: str, B: int) -> None:
    q, k, v = gpu_qkv(dtype, B=B, S=1, G=2, h=4, Dk=64, S_kv=1024)
    selection = make_blocks(B, 1, 2, 1024, 8, 32, device="cuda")
    check_both(backend, q, k, v, selection)
    decoded, _ = attend(backend, q[:, 0], k, v, Selection.from_ranges(selection.ranges[:, 0], 32))
    assert torch.equal(decoded, attend(backend, q, k, v, selection)[0][:, 0])


def test_keys_past_two_to_the_31_elements() -> None:
    """Offsets know no dtype. One backend after another: several workers at once would not find the memory."""
    for backend in [backend for backend, dtype in CASES if dtype == "bfloat16" and not registry.missing(backend)]:
        check_keys_past_two_to_the_31_elements(backend)
        torch.cuda.empty_cache()


def check_keys_past_two_to_the_31_elements(backend: str) -> None:
    """The last keys of a tensor that 32-bit offsets can't reach, against the oracle on these keys alone."""
    D, last = 128, 4096
    S_kv = 2**31 // D + 3 * last
    k = torch.empty(1, 1, S_kv, D, dtype=torch.bfloat16, device="cuda")
    v = torch.empty_like(k)
    generator = torch.Generator(device="cuda").manual_seed(0)
    k.normal_(generator=generator)
    v.normal_(generator=generator)
    assert k.numel() > 2**31
    q, _, _ = gpu_qkv("bfloat16", S=200, G=1, h=4, Dk=D, S_kv=1)
    near = make_blocks(1, 200, 1, last, 4, 64, device="cuda")
    far = Selection(torch.where(near.ranges.diff(dim=-1) > 0, near.ranges + (S_kv - last), 0), near.block_size)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o, lse = attend(backend, *inputs, far)
    exact, exact_lse = oracle_forward(q, k[:, :, -last:], v[:, :, -last:], near.ranges)
    assert float((o.detach().cpu().double() - exact).abs().max()) < 2e-2
    assert float((lse.detach().cpu().double() - exact_lse).abs().max()) < 2e-2
    do, _ = make_grads(q, v)
    grads = torch.autograd.grad(o, inputs, do)
    expected = oracle_backward(q, k[:, :, -last:], v[:, :, -last:], near.ranges, do)
    for got, want in zip((grads[0], grads[1][:, :, -last:], grads[2][:, :, -last:]), expected, strict=True):
        assert float((got.cpu().double() - want).norm() / want.norm()) < 1e-2
    assert int(torch.count_nonzero(grads[1][:, :, : -2 * last])) == 0


def test_the_policy_routes_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "128")
    q, k, v = gpu_qkv("bfloat16", S=200, G=1, h=4, Dk=64)
    for n, framework in ((4, "triton"), (3, "sdpa")):
        nsa_sel.selection_attention(q, k, v, make_blocks(1, 200, 1, 200, n, 32, device="cuda"))
        decision = nsa_sel.decisions()[-1]
        if decision.settings.triton_off is not None:
            framework = "sdpa"  # the device rule (ADR) stands
        assert str(decision.forward).startswith(framework)
        assert decision.replay() == ()


def test_bulk_copies_are_taken_from_hopper_on(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    q, k, v = gpu_qkv("bfloat16", S=300, G=1, h=4, Dk=64)
    for backend in ("triton-group", "triton-tile"):
        attend(backend, q, k, v, make_blocks(1, 300, 1, 300, 3, 32, device="cuda"))
    configs = [event["config"] for event in logged("sel.triton.kernel")]
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    for kernel in ("triton-group/forward-blocks:tma", "triton-tile/forward:tma"):
        assert any(config.startswith(kernel) for config in configs) == hopper, configs


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
    o = nsa_sel.selection_attention(q, k, v, selection)
    decision = nsa_sel.decisions()[-1]
    assert decision.forward == "sdpa-packed"
    assert decision.override is not None
    assert "failure of triton-group" in decision.override.source
    assert bool(o.isfinite().all())
    again = nsa_sel.explain(q, k, v, selection)
    assert any(reason.code == "failed-before" for verdict in again.verdicts for reason in verdict.forward)
    with pytest.raises(Exception, match=r"(?i)shared memory|resource|failed"):
        nsa_sel.selection_attention(q, k, v, selection, backend="triton-group")


def test_amp_training_with_a_grad_scaler() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        project = torch.nn.Linear(32, 96, bias=False, device="cuda")
        optimizer = torch.optim.SGD(project.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
        x, target = torch.randn(1, 200, 1, 32, device="cuda"), torch.randn(1, 200, 1, 1, 32, device="cuda")
        selection, losses = make_blocks(1, 200, 1, 200, 3, 16, device="cuda"), []
        for _ in range(5):
            with torch.autocast("cuda", dtype=dtype):
                q, k, v = project(x).chunk(3, -1)
                o = nsa_sel.selection_attention(q.unsqueeze(3), k.transpose(1, 2), v.transpose(1, 2), selection, backend="triton-group")
            assert o.dtype == dtype
            loss = (o.float() - target).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
        assert all(torch.isfinite(torch.tensor(losses)))
        assert losses[-1] <= losses[0]


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
