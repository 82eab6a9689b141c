"""Check decoding over contiguous and paged KV caches, plain and in e4m3, against the oracle on the gathered keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nsa_sel import (
    Selection,
    choose_blocks_with_kvcache,
    decisions,
    describe,
    explain_request,
    quantize_e4m3,
    reset,
    selection_attention_with_kvcache,
    warmup,
)
from nsa_sel.core import registry
from nsa_sel.core.request import DeviceInfo, example_request
from nsa_sel.errors import ArgumentError, BackendError
from nsa_sel.oracle import oracle_forward
from nsa_sel.quantize import STORED
from nsa_sel.testing import dense_attention
from tests.helpers.caches import (
    EACH,
    LENGTHS,
    Cache,
    QuantizedCache,
    called,
    check,
    check_quantized,
    gathered,
    make_cache,
    make_quantized,
    positions,
)
from tests.helpers.calls import assert_refused, calls_of
from tests.helpers.cases import assert_gradients, assert_within_twice_baseline, make_grads
from tests.helpers.gpus import needs, needs_hopper
from tests.helpers.packed import make_step


@pytest.mark.parametrize("page_size", [16, 24, 64])
def test_only_pages_of_whole_steps_use_tma(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many rows none is split. TMA loads blocks if pages hold whole steps; pointers load the rest."""
    from nsa_sel.backends import triton_group

    ran = calls_of(monkeypatch, triton_group, "_forward_blocks")
    check(make_cache(page_size=page_size, S_q=2, block=32), "triton-group")
    assert [given[3].loads for given in ran] == ["tma" if page_size == 64 else "pointer"]


@pytest.mark.parametrize(("names", "block_l"), [(("pages", "pages-widest"), 32), (("blocks",), 16)], ids=["forced", "of other heads"])
def test_small_pages_never_use_tma(configure: Callable[[str], Path], names: tuple[str, ...], block_l: int) -> None:
    """Whatever a file says: a load of 32 keys (float32) would exceed a page of 16."""
    configs = [f"  triton-group/decode-{name}: {{loads: tma, block_l: {block_l}, num_warps: 1, num_stages: 1}}\n" for name in names]
    configure(f"provenance: a test\nkernels:\n{''.join(configs)}")
    check(make_cache(page_size=16, S_q=2, block=32), "triton-group")


@pytest.mark.parametrize(("lengths", "sizes"), [((9, 150), (16, 64)), (LENGTHS, (32, 64))], ids=["split", "tma"])
def test_pages_are_bit_equal_to_a_contiguous_cache(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    """With triton-group: rows are split equally, and TMA steps are equal where a page holds one."""
    G = 1 if len(lengths) == 2 else 2
    whole = check(make_cache(lengths, None, block=32, G=G), "triton-group")
    for page_size in sizes:
        assert all(map(torch.equal, check(make_cache(lengths, page_size, block=32, G=G), "triton-group"), whole))


def test_gradients_over_a_contiguous_cache() -> None:
    cache = make_cache((0, 2, 9, 130), page_size=None, S_q=4)
    q, k_cache, v_cache = (x.nan_to_num().requires_grad_() for x in cache[:3])
    cache = cache._replace(q=q, k_cache=k_cache, v_cache=v_cache)
    o, lse = selection_attention_with_kvcache(*cache, return_lse=True, backend="sdpa-packed")
    do, dlse = make_grads(q, v_cache)
    dlse = torch.where(lse.detach() == -torch.inf, 0.0, dlse)
    got = torch.autograd.grad((o, lse), (q, k_cache, v_cache), (do, dlse))
    wanted = oracle_forward(*(x.detach() for x in (q, *gathered(cache))), cache.selection.ranges, q_pos=positions(cache))
    baseline = dense_attention(q, *gathered(cache), cache.selection.ranges, q_pos=positions(cache))
    assert_within_twice_baseline(o, wanted[0], baseline[0], "o")
    k, v = (x.detach().transpose(1, 2) for x in (k_cache, v_cache))
    got = (got[0], got[1].transpose(1, 2), got[2].transpose(1, 2))
    assert_gradients(got, q.detach(), k, v, cache.selection.ranges, do, dlse, q_pos=positions(cache))


def test_pages_refuse_gradients() -> None:
    cache = make_cache()
    for name in ("q", "k_cache", "v_cache"):
        wanted = cache._replace(**{name: getattr(cache, name).clone().requires_grad_()})
        with pytest.raises(ArgumentError, match=rf"^{name} is .* requires gradients.*no_grad"):
            selection_attention_with_kvcache(*wanted)
        with torch.no_grad():
            selection_attention_with_kvcache(*wanted)


def test_backends_of_whole_blocks_refuse_pages() -> None:
    for backend in ("triton-tile", "triton-block"):
        with pytest.raises(BackendError, match="paged"):
            selection_attention_with_kvcache(*make_cache(), backend=backend)
        check(make_cache((9, 70), page_size=None, S_q=4, G=1), backend)


def test_events_count_logical_positions_and_compare_with_pages(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    monkeypatch.setenv("NSA_DEBUG_COMPARE", "1")
    cache = make_cache(n=12, block=16)  # everything
    check(cache, "triton-group")
    assert logged("sel.triton.reads")[-1]["tokens"] == sum(LENGTHS) * 2
    assert logged("sel.compare")[-1]["mae"] < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": [0, 2]}, r"^cu_seqlens_q is of 1 requests; allowed: R \+ 1 entries"),
        ({"cu_seqlens_q": [0, 3, 2, 3, 3]}, r"^cu_seqlens_q is 3, then 2 at 2"),
        ({"cu_seqlens_q": [0, 2, 2, 3, 9]}, r"^cu_seqlens_q is 9 last; allowed: at most 6"),
        ({"cu_seqlens_q": torch.zeros(5)}, r"^cu_seqlens_q is torch.float32"),
        ({"max_seqlen_q": 2}, r"^max_seqlen_q is 2; allowed: at least 3"),
        ({"max_seqlen_q": 0.5}, r"^max_seqlen_q is 0.5"),
        ({"cu_seqlens_q": None, "max_seqlen_q": 2}, r"^max_seqlen_q is 2; allowed: None without cu_seqlens_q"),
        ({"q": torch.zeros(2, 3, 2, 2, 16)}, r"^q is of shape .*; allowed: \[T,G,h,Dk\] with cu_seqlens_q"),
        ({"q": torch.zeros(6, 2, 2, 16, requires_grad=True)}, r"^q is a tensor that requires gradients; allowed: none over a packed batch"),
        ({"out": torch.zeros(6, 2, 2, 9)}, r"^out is torch.float32 of shape \(6, 2, 2, 9\)"),
        ({"out": torch.zeros(6, 2, 2, 8).half()}, r"^out is torch.float16 .* allowed: .*of torch.float32"),
        ({"lse_out": torch.zeros(6, 2)}, r"^lse_out is torch.float32 of shape"),
        ({"lse_out": torch.zeros(6, 2, 2, requires_grad=True)}, r"^lse_out is a tensor that requires gradients; allowed: none"),
        ({"backend": "triton-tile"}, r"triton-tile: paged"),
    ],
)
def test_bad_packed_batches_are_refused(changes: dict[str, Any], message: str) -> None:
    step = make_step((2, 0, 1, 3), (9, 0, 1, 150), 16, G=2, h=2, Dk=16, Dv=8, n=3, block=16)
    names = ("q", "k_cache", "v_cache", "selection", "cache_seqlens", "block_table")
    given = {**dict(zip(names, step.cache, strict=True)), "cu_seqlens_q": step.cu, **changes}
    with pytest.raises((ArgumentError, BackendError), match=message):
        selection_attention_with_kvcache(**given)


def test_results_of_any_strides_are_written() -> None:
    """The same for sequences as for packed rows; o and lse are the tensors that were given."""
    cache = make_cache(S_q=2)
    wanted = selection_attention_with_kvcache(*cache, return_lse=True)
    out, lse = torch.zeros(2, *cache.q.shape[:-1], 8), torch.zeros(*cache.q.shape[:-1], 2)
    for to in (out[0], out.transpose(0, 1)[:, 1]):
        o, found = selection_attention_with_kvcache(*cache, return_lse=True, out=out[1], lse_out=lse[..., 0])
        assert o.data_ptr() == out[1].data_ptr()
        assert torch.equal(out[1], wanted[0])
        assert torch.equal(found, wanted[1])
        assert torch.equal(selection_attention_with_kvcache(*cache, out=to), wanted[0])


def test_groups_of_q_may_share_keys_of_packed_rows() -> None:
    step = make_step((20, 1, 0, 3), (30, 100, 5, 3), 16, spare=1, G=4, h=2, Dk=16, Dv=8, n=3, block=16)
    step = step._replace(cache=step.cache._replace(k_cache=step.cache.k_cache[:, :, ::2], v_cache=step.cache.v_cache[:, :, ::2]))
    each = [x.repeat_interleave(2, 2) for x in step.cache[1:3]]
    same = step._replace(cache=step.cache._replace(k_cache=each[0], v_cache=each[1]))
    for x, y in zip(step.called(None), same.called(None), strict=True):
        torch.testing.assert_close(x, y)


def test_empty_caches_give_empty_results() -> None:
    cache = make_cache((0, 0))
    check(cache, None)
    empty = cache._replace(block_table=cache.block_table[:, :0], q=cache.q[:, :0], selection=Selection(cache.selection.ranges[:, :0]))
    assert selection_attention_with_kvcache(*empty).shape == (2, 0, 2, 2, 8)
    no_sequences = Cache(cache.q[:0], *cache[1:3], Selection(cache.selection.ranges[:0]), cache.cache_seqlens[:0], cache.block_table[:0])
    assert selection_attention_with_kvcache(*no_sequences).shape == (0, 1, 2, 2, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": 3}, r"^q is a int; allowed: a torch.Tensor"),
        ({"q": torch.zeros(2, 4)}, r"^q is of shape \(2, 4\); allowed: \[B,S_q,G,h,Dk\]"),
        ({"k_cache": torch.zeros(9, 2, 16, 16)}, r"^k_cache is of shape .* allowed: \[pages, page_size, G=2, D\]"),
        ({"v_cache": torch.zeros(9, 32, 2, 8)}, r"^v_cache is of shape"),
        ({"k_cache": torch.zeros(15, 16, 2, 16, dtype=torch.float64)}, r"^k_cache is of dtype .*call k_cache\.to\(q\.dtype\)"),
        ({"cache_seqlens": 5}, r"^cache_seqlens is a int"),
        ({"cache_seqlens": torch.zeros(4)}, r"^cache_seqlens is torch.float32 of shape \(4,\)"),
        ({"cache_seqlens": torch.tensor([0, 1, 2, 193])}, r"^cache_seqlens is from 0 to 193; allowed: lengths in \[0, 192\]"),
        ({"cache_seqlens": torch.tensor([0, 1, 2, -1])}, r"^cache_seqlens is from -1 to 2"),
        ({"cache_seqlens": torch.tensor([0, 1, 9, 161])}, r"^block_table\[3, 10\] is -1; allowed: pages in \[0, 15\) for all keys"),
        ({"block_table": None}, r"^k_cache is of shape \(15, .* allowed: \[B=4, S_max, G=2, D\].* pass block_table=, int32 \[B, pages"),
        ({"block_table": torch.zeros(4, 12)}, r"^block_table is torch.float32"),
        ({"block_table": torch.zeros(4, dtype=torch.int32)}, r"^block_table is torch.int32 of shape \(4,\)"),
        ({"block_table": torch.zeros(12, 4, dtype=torch.int32).t()}, r"^block_table is of strides"),
        ({"block_table": torch.zeros(4, 0, dtype=torch.int32)}, r"^q is of S_q = 1 tokens; allowed: at most the 0"),
        ({"selection": torch.zeros(4, 2, 2, 1, 2, dtype=torch.int32)}, r"^selection is over rows"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        selection_attention_with_kvcache(*make_cache()._replace(**changes))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page_size", "each"), [(16, None), (24, None), (64, None), (None, "head"), (24, "page"), (64, "head"), (64, "page")]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_many_rows_use_tma_where_pages_hold_whole_steps(
    page_size: int | None, each: str | None, dtype: torch.dtype, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough rows to fill the GPU are not split; TMA needs Hopper or newer."""
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    sizes: dict[str, Any] = {"lengths": LENGTHS * 64, "S_q": 2, "n": 2, "dtype": dtype, "device": "cuda", "Dk": 64, "Dv": 128}
    if each is None:  # n = 2: without duplicates, which debugging refuses
        check(make_cache(page_size=page_size, **sizes), "triton-group")
    else:
        check_quantized(make_quantized(each, page_size, **sizes, block=32), "triton-group")
    configs = [event["config"] for event in logged("sel.triton.kernel")]
    tma = torch.cuda.get_device_capability() >= (9, 0) and page_size != 24
    assert [config.split(":")[0].split("-wide")[0] for config in configs] == [f"triton-group/decode-{'blocks' if tma else 'pages'}"]


@pytest.mark.gpu
def test_pools_may_have_more_than_two_to_the_31_elements() -> None:
    """The last pages of a pool that 32-bit offsets can't reach."""
    D, page_size = 128, 64
    pages = 2**31 // (D * page_size) + 8
    pool = torch.empty(pages, page_size, 1, D, dtype=torch.bfloat16, device="cuda")
    small = make_cache((150,), page_size, G=1, Dk=D, Dv=D, dtype=torch.bfloat16, device="cuda")
    assert small.block_table is not None
    pool[-6:] = small.k_cache
    far = small._replace(
        k_cache=pool, v_cache=pool, block_table=torch.where(small.block_table < 0, -1, small.block_table + pages - 6).int()
    )
    near = small._replace(v_cache=small.k_cache)
    k, v = gathered(near)
    exact, baseline = (of(near.q, k, v, near.selection.ranges, q_pos=positions(near)) for of in (oracle_forward, dense_attention))
    with_cuda = ("cupy-cuda",) if not registry.missing("cupy-cuda") else ()
    for backend in ("triton-group", "sdpa-packed", *with_cuda):
        o = selection_attention_with_kvcache(*far, backend=backend)
        assert_within_twice_baseline(o, exact[0], baseline[0], backend)


READERS = ("sdpa-packed", "triton-group")


@pytest.mark.parametrize("backend", READERS)
def test_ranges_may_cross_pages(backend: str) -> None:
    given = make_quantized("page", 16, lengths=(64, 150), block=None, S_q=2, G=1)
    check_quantized(given, backend)
    longest = torch.tensor([15, 49]).expand(2, 2, 1, 1, 2)  # 34 keys on four pages, as many as 34 keys can touch
    check_quantized(given.replaced(selection=Selection(longest, None, 34)), backend)


@pytest.mark.parametrize("backend", READERS)
@pytest.mark.parametrize("factor", [1e-3, 100.0])
def test_weights_of_float16_keep_their_digits_beside_small_and_large_scales(backend: str, factor: float) -> None:
    """A weight times the scale of its page alone would be subnormal, or not exact beside weights of other pages."""
    check_quantized(make_quantized("page", 16, G=1, lengths=(40, 60), n=3, dtype=torch.float16).scaled(v=factor), backend)


@pytest.mark.parametrize("backend", READERS)
def test_one_scale_in_other_shapes_gives_equal_results(backend: str) -> None:
    given = make_quantized("tensor", 16, lengths=(40,))
    wanted = check_quantized(given, backend)
    for shape in ((), (1,), (2,)):
        scales = {name: scale.expand(shape) if shape else scale.squeeze() for name, scale in given.scales.items()}
        assert all(map(torch.equal, check_quantized(given._replace(scales=scales), backend), wanted))
    mixed = {**given.scales, "v_scale": given.scales["v_scale"].expand(len(given.cache.v_cache), 2)}
    check_quantized(given._replace(scales=mixed), backend)


def test_packed_sdpa_gathers_within_its_workspace(configure: Callable[[str], Path]) -> None:
    given = make_quantized("page", 16, S_q=4)
    wanted = check_quantized(given, "sdpa-packed")
    configure("provenance: a test\nruntime: {workspace_bytes: 65536}\n")
    assert all(map(torch.equal, check_quantized(given, "sdpa-packed"), wanted))


def test_quantized_caches_refuse_gradients() -> None:
    for page_size in (None, 16):
        given = make_quantized("head", page_size)
        wanted = given.cache._replace(q=given.cache.q.clone().requires_grad_())
        scales = {**given.scales, "k_scale": given.scales["k_scale"].clone().requires_grad_()}
        with torch.no_grad():
            selection_attention_with_kvcache(*wanted, **given.scales)
        with pytest.raises(ArgumentError, match=r"^q is .* requires gradients.*none over a quantized cache.*no_grad|^q is .*paged"):
            selection_attention_with_kvcache(*wanted, **given.scales)
        with pytest.raises(ArgumentError, match=r"^k_scale is a tensor that requires gradients"):
            selection_attention_with_kvcache(*given.cache, **scales)


def test_other_backends_refuse_quantized_caches() -> None:
    given = make_quantized("head", None)
    for backend in ("numba", "triton-token", "triton-tile", "triton-block"):
        with pytest.raises(BackendError, match="does not read a cache of format e4m3/head"):
            selection_attention_with_kvcache(*given.cache, **given.scales, backend=backend)
    check_quantized(given, None)


@pytest.mark.parametrize(("sm", "forward"), [(80, "sdpa-packed"), (89, "sdpa-packed"), (90, "triton-group"), (100, "triton-group")])
def test_gpus_without_e4m3_take_packed_sdpa(sm: int, forward: str) -> None:
    """SM 8.0 has no instruction for it; on SM 8.9 Triton is off by the device rule."""
    device = DeviceInfo(kind="cuda", name="a GPU", sm=sm, sm_count=100, shared_memory=99 << 10)
    request = msgspec.structs.replace(example_request(), S=1, page_size=64, quantized="e4m3/head")
    decision = explain_request(request, device)
    assert decision.forward == forward
    (verdict,) = (verdict for verdict in decision.verdicts if verdict.backend == "triton-group")
    assert ("quantized-sm" in {reason.code for reason in verdict.forward}) == (sm < 89)
    assert "quantized KV cache (e4m3/head)" in describe(decision)


@pytest.mark.parametrize(
    ("sm", "facts", "found"),
    [
        (90, {}, None),
        (90, {"page_size": None, "S": 4, "block_size": 128}, None),
        (80, {}, ("quantized-sm", 80, ">= 90 for e4m3")),
        (100, {}, ("quantized-steps", "e4m3/head, blocks of 64, Dk 128, Dv 128, SM 10.0, pages of 64", "SM 9.0")),
        (90, {"page_size": 16}, ("quantized-steps", "pages of 16", "blocks and pages of a multiple of 64 keys")),
        (90, {"block_size": 32}, ("quantized-steps", "blocks of 32", "blocks and pages of a multiple of 64 keys")),
        (90, {"block_size": None}, ("quantized-steps", "blocks of None", "blocks and pages of a multiple of 64 keys")),
        (90, {"Dk": 192}, ("quantized-steps", "Dk 192", r"Dk and Dv in \(64, 128\)")),
        (90, {"aligned": False}, ("quantized-steps", "not aligned", "16-byte alignment")),
    ],
)
def test_cupy_cuda_reads_whole_steps_of_e4m3_on_hopper(sm: int, facts: dict[str, Any], found: tuple[str, object, str] | None) -> None:
    device = DeviceInfo(kind="cuda", name="a GPU", sm=sm, sm_count=100, shared_memory=227 << 10)
    request = msgspec.structs.replace(example_request(), **{"S": 1, "page_size": 64, "quantized": "e4m3/head", **facts})
    (verdict,) = (verdict for verdict in explain_request(request, device).verdicts if verdict.backend == "cupy-cuda")
    reasons = [reason for reason in verdict.forward if reason.code.startswith("quantized")]
    assert [reason.code for reason in reasons] == ([] if found is None else [found[0]])
    if found is not None:
        assert str(found[1]) in str(reasons[0].actual)
        assert re.search(found[2], str(reasons[0].required))


@pytest.mark.parametrize(("page_size", "each"), [(None, None), (None, "head"), (16, "tensor"), (16, "page")])
def test_a_warmed_call_is_of_the_class_of_the_real_one(page_size: int | None, each: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `warmup`, and before the first call, which keeps its scales."""
    given = make_quantized(each, page_size)
    wanted = check_quantized(given, None)
    asked = decisions()[-1].request
    warmup("cpu", [asked])
    assert decisions()[-1].request == asked
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "warmup")
    reset()
    assert all(map(torch.equal, check_quantized(given, None), wanted))
    assert [decision.request for decision in decisions()[-3:]] == [asked] * 3  # the call's, the warm-up's, and the call's again


ONE, HEAD = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("cache", "scales", "message"),
    [
        (
            lambda c: {"k_cache": c.k_cache.to(torch.float8_e5m2)},
            {},
            r"^k_cache is of dtype torch.float8_e5m2; .*e5m2 has 2 bits.*quantize",
        ),
        (lambda c: {"v_cache": c.v_cache.to(torch.float8_e5m2)}, {}, r"^v_cache is of dtype torch.float8_e5m2"),
        (lambda c: {"k_cache": c.k_cache.view(torch.uint8)}, {}, r"^k_cache is of dtype torch.uint8.*k_cache\.view\(torch.float8_e4m3fn\)"),
        (lambda c: {"v_cache": c.v_cache.float()}, {}, r"^v_cache is of dtype torch.float32; allowed: k_cache's dtype torch.float8_e4m3fn"),
        (lambda c: {"k_cache": c.k_cache.float()}, {}, r"^v_cache is of dtype torch.float8_e4m3fn; allowed: k_cache's dtype torch.float32"),
        (lambda c: {"q": c.q.double()}, {}, r"^q is of dtype torch.float64; allowed: torch.float16, torch.bfloat16, torch.float32 over"),
        (lambda c: {"q": c.q.to(STORED)}, {}, r"^q is of dtype torch.float8_e4m3fn; allowed: torch.float16"),
        (lambda c: {"k_cache": c.k_cache.float(), "v_cache": c.v_cache.float()}, {"k_scale": ONE}, r"^k_scale is given for an unquantized"),
        (lambda c: {"k_cache": c.k_cache.float(), "v_cache": c.v_cache.float()}, {"v_scale": ONE}, r"^v_scale is given for an unquantized"),
        (lambda c: {}, {"k_scale": ONE}, r"^v_scale is None; allowed: a tensor, as k_scale is.*torch\.ones"),
        (lambda c: {}, {"v_scale": HEAD}, r"^k_scale is None; allowed: a tensor, as v_scale is"),
        (lambda c: {}, {"k_scale": 0.5, "v_scale": ONE}, r"^k_scale is a float; allowed: a torch.Tensor"),
        (
            lambda c: {},
            {"k_scale": ONE, "v_scale": ONE.double()},
            r"^v_scale is of dtype torch.float64; allowed: torch.float32.*v_scale\.float\(\)",
        ),
        (lambda c: {}, {"k_scale": ONE, "v_scale": ONE.half()}, r"^v_scale is of dtype torch.float16"),
        (lambda c: {}, {"k_scale": torch.ones(1, device="meta"), "v_scale": ONE}, r"^k_scale is on meta; allowed: q's device cpu"),
        (
            lambda c: {},
            {"k_scale": torch.ones(3), "v_scale": HEAD},
            r"^k_scale is of shape \(3,\); allowed: one number, \[G\] or \[pages,G\] for G = 2",
        ),
        (lambda c: {}, {"k_scale": HEAD, "v_scale": torch.ones(3, 2)}, r"^v_scale is of shape \(3, 2\); allowed: .*pages = 15"),
        (lambda c: {}, {"k_scale": HEAD, "v_scale": torch.ones(2, 15)}, r"^v_scale is of shape \(2, 15\)"),
        (
            lambda c: make_quantized(None, None).cache._asdict(),  # contiguous: no pages have scales
            {"k_scale": torch.ones(4, 2), "v_scale": torch.ones(4, 2)},
            r"^k_scale is of shape \(4, 2\); allowed: one number, \[G\] for G = 2\. .*each group one",
        ),
    ],
)
def test_bad_scales_are_refused(cache: Callable[[Cache], dict[str, Any]], scales: dict[str, Any], message: str) -> None:
    given = make_quantized(None).cache
    with pytest.raises(ArgumentError, match=message):
        selection_attention_with_kvcache(*given._replace(**cache(given)), **scales)


@pytest.mark.parametrize("each", ["tensor", "head", "page"])
def test_quantized_numbers_are_close_to_what_they_stand_for(each: str) -> None:
    x = torch.randn(3, 5, 2, 7, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1e3])[:, None]
    x[1] = 0
    stored, scale = quantize_e4m3(x, each)  # type: ignore[arg-type]
    assert (stored.dtype, stored.shape) == (STORED, x.shape)
    assert scale.shape == {"tensor": (1,), "head": (2,), "page": (3, 2)}[each]
    wide = scale.reshape(-1, 1, scale.shape[-1], 1)
    assert bool(((stored.float() * wide - x).abs() <= torch.maximum(x.abs() / 16, wide / 1024)).all())
    assert float(stored.float().abs().max()) == 448
    assert each != "page" or bool((scale[1] == 1).all())


def test_numbers_that_are_not_finite_count_for_no_scale() -> None:
    stored, scale = quantize_e4m3(torch.tensor([1, torch.nan, torch.inf, 1]).view(1, 4, 1, 1).expand(1, 4, 1, 8), "tensor")
    assert float(scale) == pytest.approx(1 / 448)
    assert stored.float()[0, :, 0, 0].isnan().tolist() == [False, True, True, False]


@pytest.mark.parametrize(("each", "shape"), [("tensor", (1,)), ("head", (2,)), ("page", (0, 2))])
def test_scales_of_an_empty_cache_have_its_shape(each: str, shape: tuple[int, ...]) -> None:
    stored, scale = quantize_e4m3(torch.empty(0, 3, 2, 4), each)  # type: ignore[arg-type]
    assert (stored.shape, scale.shape) == ((0, 3, 2, 4), shape)
    assert bool((scale == 1).all())


def test_scales_of_tiny_numbers_have_a_reciprocal() -> None:
    x = torch.tensor([0.0, 1e-42, -1e-40, 1e-38]).view(4, 1, 1, 1)
    stored, scale = quantize_e4m3(x, "page")
    assert scale.flatten().tolist() == [1, *[torch.finfo(torch.float32).tiny] * 3]
    assert bool(((stored.float() * scale.view(4, 1, 1, 1) - x).abs() <= torch.maximum(x.abs() / 16, scale.view(4, 1, 1, 1) / 1024)).all())


def test_what_cannot_be_quantized_is_refused() -> None:
    x = torch.ones(1, 1, 1, 1)
    assert_refused(
        ("^x is a int", lambda: quantize_e4m3(3)),  # type: ignore[arg-type]
        (r"^x is torch.float32 of shape \(1, 1\); allowed: a cache \[B,S_max,G,D\]", lambda: quantize_e4m3(x[0, 0])),
        ("^x is torch.int32", lambda: quantize_e4m3(x.int())),
        ("^each is 'row'; allowed: tensor, head, page", lambda: quantize_e4m3(x, "row")),  # type: ignore[arg-type]
    )


def gpu_pages(each: str | None, **sizes: Any) -> QuantizedCache:
    """A cache in pages of 64; garbage after a sequence's last page: a key there would be far outside of memory."""
    facts = {"dtype": torch.bfloat16, "device": "cuda", "h": 16, "Dk": 128, "Dv": 128, "block": 64, "room": 512}
    given = make_quantized(each, 64, **{**facts, **sizes})
    table = given.cache.block_table
    assert table is not None
    return given.replaced(block_table=torch.where(table < 0, 2**30, table))


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
@pytest.mark.parametrize("factor", [1e-30, 1e-3, 100.0, 1e30])
def test_scales_of_pages_may_have_any_size(factor: float) -> None:
    given = gpu_pages("page", lengths=(150, 300)).scaled(v=factor)
    assert all(map(torch.equal, check_quantized(given, "cupy-cuda"), called(given, "cupy-cuda")))


@pytest.mark.gpu
@needs("cupy-cuda")
@needs_hopper
@pytest.mark.parametrize("each", EACH)
def test_a_step_is_one_launch(each: str | None, started: list[str]) -> None:
    given = gpu_pages(each)
    called(given, "cupy-cuda")
    started.clear()
    called(given, "cupy-cuda")
    assert started == ["forward_blocks.cu"]


def index_cache(**changes: Any) -> dict[str, Any]:
    """Arguments of a choice over pages of 16 index keys: two sequences with room for 64 keys, two groups that share a key."""
    table = torch.tensor([[1, 3, -1, -1], [0, 2, 4, -1]], dtype=torch.int32)
    arguments = {"q": torch.randn(2, 1, 2, 1, 16), "k_cache": torch.randn(5, 16, 1, 16), "cache_seqlens": torch.tensor([20, 40])}
    return {**arguments, "block_table": table, "block_size": 16, "n": 2, **changes}


PACKED = {"q": torch.zeros(5, 2, 1, 16), "cu_seqlens_q": [0, 2, 5]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 16)}, r"^q is of shape \(2, 16\); allowed: \[B,S_q,G,h,Dk\]"),
        ({"k_cache": torch.zeros(5, 16, 3, 16)}, r"^k_cache is of shape .* allowed: \[pages, page_size, G=2, D\]"),
        ({"k_cache": torch.zeros(5, 16, 1, 8)}, r"^k_cache is of head dimension 8"),
        ({"k_cache": torch.zeros(5, 16, 1, 16).half()}, r"^k_cache is of dtype torch.float16"),
        ({"k_cache": torch.zeros(5, 16, 1, 16).to(torch.float8_e5m2)}, r"^k_cache is of dtype torch.float8_e5m2"),
        ({"k_scale": torch.ones(1)}, r"^k_scale is given for an unquantized cache"),
        ({"k_cache": torch.zeros(5, 16, 1, 16).to(STORED), "k_scale": torch.ones(3)}, r"^k_scale is of shape \(3,\)"),
        ({"cache_seqlens": torch.tensor([20, 65])}, r"^cache_seqlens is from 20 to 65; allowed: lengths in \[0, 64\]"),
        ({"cache_seqlens": torch.tensor([33, 40])}, r"^block_table\[0, 2\] is -1"),
        ({"cache_seqlens": torch.tensor([133, 40]), "compress_block": 4, "compress_stride": 4}, r"^block_table\[0, 2\] is -1"),
        ({"out": torch.zeros(2, 1, 2, 2)}, r"^out is torch.float32 of shape"),
        ({"out": torch.zeros(2, 1, 2, 3, dtype=torch.int32)}, r"^out is torch.int32 of shape .*allowed: contiguous \(2, 1, 2, 2\)"),
        ({"q": torch.zeros(2, 2, 1, 16), "out": torch.zeros(2, 1, 2, 2).int()}, r"^out is .*allowed: contiguous \(2, 2, 2\)"),
        ({"reduce": "mean"}, r"^reduce is 'mean'"),
        ({"tail": True}, r"^tail is True"),
        ({"softmax": True, "activation": "relu"}, r"^activation is 'relu'"),
        ({"n": 0}, r"^n is 0"),
        ({"local": 3}, r"^first \+ local is 3|^first"),
        ({"max_seqlen_q": 3}, r"^max_seqlen_q is 3; allowed: None without cu_seqlens_q"),
        ({"cu_seqlens_q": [0, 2, 5]}, r"^q is of shape \(2, 1, 2, 1, 16\); allowed: \[T,G,h,Dk\] with cu_seqlens_q"),
        ({**PACKED, "cu_seqlens_q": [0, 5]}, r"^cu_seqlens_q is of 1 requests"),
        ({**PACKED, "cu_seqlens_q": [0, 2, 6]}, r"^cu_seqlens_q is 6 last; allowed: at most 5"),
        ({**PACKED, "cu_seqlens_q": [0, 3, 2]}, r"^cu_seqlens_q is 3, then 2"),
        ({**PACKED, "cu_seqlens_q": torch.tensor([0.0, 2.0, 5.0])}, r"^cu_seqlens_q is torch.float32"),
        ({**PACKED, "max_seqlen_q": 2}, r"^max_seqlen_q is 2; allowed: at least 3"),
        ({**PACKED, "max_seqlen_q": 0}, r"^max_seqlen_q is 0"),
        ({**PACKED, "cache_seqlens": torch.tensor([20, 40, 3])}, r"^cu_seqlens_q is of 2 requests"),
        ({**PACKED, "cache_seqlens": torch.tensor([33, 40])}, r"^block_table\[0, 2\] is -1"),
        ({**PACKED, "k_cache": torch.zeros(5, 16, 3, 16)}, r"^k_cache is of shape .* allowed: \[pages, page_size, G=2, D\]"),
        ({**PACKED, "k_cache": torch.zeros(5, 16, 1, 8)}, r"^k_cache is of head dimension 8"),
        ({**PACKED, "out": torch.zeros(4, 2, 2).int()}, r"^out is .*allowed: a contiguous last dimension, \(5, 2, 2\)"),
        ({**PACKED, "out": torch.zeros(5, 2, 4).int()[..., ::2]}, r"^out is .* and strides \(8, 4, 2\)"),
    ],
)  # fmt: skip
def test_bad_arguments_of_a_choice_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        choose_blocks_with_kvcache(**index_cache(**changes))


def test_no_packed_rows_choose_nothing() -> None:
    none = index_cache(q=torch.zeros(0, 2, 1, 16), cu_seqlens_q=[0, 0, 0])
    assert choose_blocks_with_kvcache(**none).block_indices.shape == (0, 1, 2, 2)


def test_index_keys_of_blocks_need_pages_for_complete_blocks_alone() -> None:
    """131 keys have 32 index keys, of two pages; 132 have 33."""
    sizes = {"compress_block": 4, "compress_stride": 4, "cache_seqlens": torch.tensor([131, 40])}
    assert choose_blocks_with_kvcache(**index_cache(**sizes)).block_indices.shape == (2, 1, 2, 2)


def test_what_cannot_choose_over_a_cache_says_why() -> None:
    for name, codes in (("choose-cuda", "device-kind|tiles-only"), ("numba", "choose")):
        with pytest.raises((BackendError, ArgumentError), match=codes):
            choose_blocks_with_kvcache(**index_cache(), backend=name)
    stored = index_cache(k_cache=torch.zeros(5, 16, 1, 16).to(STORED))
    with pytest.raises(BackendError, match="quantized"):
        choose_blocks_with_kvcache(**stored, backend="choose-cuda")


@pytest.mark.gpu
def test_pools_of_index_keys_may_have_more_than_two_to_the_31_elements() -> None:
    """The last pages of a pool that 32-bit offsets can't reach, by TMA and by pointers."""
    for page_size in (64, 16):
        pages = 2**31 // (128 * page_size) + 8
        pool = torch.zeros(pages, page_size, 1, 128, dtype=torch.bfloat16, device="cuda")
        pool[-6:].normal_()
        q, lengths = torch.randn(1, 4, 1, 128, dtype=torch.bfloat16, device="cuda"), torch.tensor([5 * page_size], device="cuda")
        table = torch.arange(5, dtype=torch.int32, device="cuda")[None]
        options: dict[str, Any] = {"block_size": 16, "n": 2, "local": 0, "backend": "choose-triton"}
        far = choose_blocks_with_kvcache(q, pool, lengths, table + pages - 6, **options)
        near = choose_blocks_with_kvcache(q, pool[-6:].clone(), lengths, table, **options)
        assert torch.equal(far.block_indices, near.block_indices)
        assert int(near.block_indices.max()) > 1
