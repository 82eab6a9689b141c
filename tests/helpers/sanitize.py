"""A small matrix of forced calls, forward and backward, for compute-sanitizer:

compute-sanitizer --tool memcheck --error-exitcode 86 python -m tests.helpers.sanitize cupy-cuda 48 64

The numbers are block sizes. Blocks of 4 to 32 and of 64 run Hopper's kernels, whose TMA loads only memcheck supports. Calls that the
backend's limits refuse are left out. Without numbers the calls are over caches: one new token and more, few rows and many, pages and none,
e4m3. "layer" decodes with a layer over `NSACache`, "choosing" chooses among compressed keys in pages. "units" are calls of cuda-block in
several units; "lists" are the kernels of its plans and of cupy-cuda's, which have no TMA. "indices" reads block indices with duplicates,
of few rows and of many; "indexers" chooses for few tokens and for many, and computes the loss of an indexer. "packed" attends and chooses
for rows of several requests over pages.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import msgspec
import torch

from nsa_sel import NSACache, NSAttention, Selection, choose_blocks, choose_blocks_with_kvcache, explain, indexer_loss, selection_attention
from nsa_sel.backends import choose_triton
from nsa_sel.backends._triton import choose_pages
from nsa_sel.backends.cupy_cuda import cuda_block, launch, packed, sm90
from nsa_sel.core import registry
from nsa_sel.core.call import Rule
from nsa_sel.settings.config import settings_for
from tests.helpers.caches import LENGTHS, check, check_quantized, make_cache, make_quantized
from tests.helpers.cases import make_blocks, make_call, make_grads, make_qkv, make_spans
from tests.helpers.choose import check_forward, in_pages, make_choose_call
from tests.helpers.packed import make_step

SIZES = (  # B, S, G, h, Dk, Dv, S_kv
    (2, 40, 2, 3, 16, 24, 150),
    (1, 40, 1, 16, 128, 128, 300),
    (1, 20, 1, 40, 64, 64, 150),
    (1, 10, 1, 4, 256, 192, 150),
    (1, 40, 2, 12, 256, 256, 300),
    (1, 1, 2, 16, 128, 128, 600),
    (150, 1, 2, 16, 128, 128, 200),  # more rows than CTAs: each has several
)


def run(backend: str, blocks: list[int]) -> int:
    """Return the number of calls run, forward and backward."""
    calls = 0
    for dtype in (torch.float16, torch.bfloat16):
        for B, S, G, h, Dk, Dv, S_kv in SIZES:
            q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv, dtype=dtype, device="cuda", requires_grad=True)
            spans = make_spans("mixed", B, S, G, S_kv, 77, device="cuda")
            cached = k.transpose(1, 2).contiguous().transpose(1, 2)
            whole = [(k, make_blocks(B, S, G, S_kv, min(3, S_kv // block), block, device="cuda")) for block in blocks]
            for keys, selection in (*whole, (cached, Selection.from_ranges(spans))):
                if not refused(backend, q, keys, v, selection):
                    o, lse = selection_attention(q, keys, v, selection, return_lse=True, backend=backend)
                    torch.autograd.grad((o, lse), (q, k, v), make_grads(q, v))
                    calls += 1
    torch.cuda.synchronize()
    return calls


def refused(backend: str, *call: Any) -> bool:
    verdicts = explain(*call, backend=backend).verdicts
    against = [reason for verdict in verdicts if verdict.backend == backend for reason in (*verdict.forward, *verdict.backward)]
    return any(reason.kind == "unsupported" for reason in against)


def run_units() -> int:
    """Run cuda-block in several units, forward and backward, on two streams, and on one, where kernels start early. Adjacent rows share
    tiles. Return the number of calls."""
    masks, shapes, find = [], ((130, 4), (500, 1)), cuda_block._find_shared
    few = mock.patch(
        "nsa_sel.core.decide.settings_for", lambda device: msgspec.structs.replace(settings_for(device), workspace_bytes=8 << 20)
    )
    noted = mock.patch.object(cuda_block, "_find_shared", lambda *call: (masks.append(find(*call)), masks[-1])[1])
    with (
        few,
        noted,
        mock.patch.object(launch, "start", wraps=launch.start) as start,
        mock.patch.object(cuda_block, "_streams", wraps=cuda_block._streams) as streams,
    ):
        for S, G in shapes:
            q, k, v = make_qkv(1, S, G, 16, 128, 128, S_kv=S + 600, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            selection = make_blocks(1, S, G, S + 600, 4, 64, device="cuda")
            o, lse = selection_attention(q, k, v, selection, return_lse=True, backend="cuda-block")
            torch.autograd.grad((o, lse), (q, k, v), make_grads(q, v))
    kernels = [call.args[0] for call in start.call_args_list]
    assert [call.args[1] for call in streams.call_args_list] == [2, 1]
    assert kernels.count("join_partials.cu") == kernels.count("block_partials.cu") > len(shapes) + 2
    assert kernels.count("order_segments.cu") == len(shapes)
    assert all(bool(mask.any()) for found in masks for mask in found)
    return len(shapes)


def run_lists() -> int:
    """List selections, and rows that share tiles, for Hopper's kernels on any GPU. Return their number."""
    sizes = (  # B, S, G, h, S_kv, block
        (1, 300, 2, 16, 700, 64), (2, 150, 1, 4, 2000, 128), (1, 70, 1, 1, 270_000, 64), (2, 150, 2, 12, 700, 4), (1, 70, 1, 2, 70_000, 32),
    )  # fmt: skip
    for B, S, G, h, S_kv, block in sizes:
        q, k, v = make_qkv(B, S, G, h, 64, 64, S_kv=S_kv, dtype=torch.bfloat16, device="cuda")
        call = make_call(q, k, v, make_blocks(B, S, G, S_kv, 5, block, device="cuda"))
        sm90.plan_of(call, 5)
        sm90._lists(call, sm90._groups(call)[2])
        if block < sm90.KEYS:
            continue
        for width in {sm90.KEYS, cuda_block.tile_keys(call)}:
            cuda_block._find_shared(call, width, h)
        cuda_block._order(call, call.reach(sm90.KEYS), *cuda_block._sizes(call, sm90.KEYS))
    torch.cuda.synchronize()
    return len(sizes)


def run_caches(backend: str) -> int:
    """Check calls over caches against the oracle. Return their number."""
    quantized = registry.backends()[backend].limits.quantized
    calls = 0
    for page_size in (None, 16, 64):
        for S_q, copies in ((1, 1), (4, 1), (1, 40), (4, 20)):  # a row for many multiprocessors, and many rows for one
            sizes = {"lengths": LENGTHS * copies, "page_size": page_size, "S_q": S_q, "h": 16, "Dk": 128, "Dv": 128, "block": 64}
            check(make_cache(**sizes, dtype=torch.bfloat16, device="cuda"), backend)
            calls += 1
            if quantized and (page_size or 64) % 64 == 0:
                each = "head" if page_size is None else "page"
                check_quantized(make_quantized(each, **sizes, dtype=torch.bfloat16, device="cuda"), backend)
                calls += 1
    return calls


def run_layer() -> int:
    """Run a layer on two sequences over a cache: prefill chunks, tokens, drafts, and a fork. Return the number of steps."""
    layer = NSAttention(256, 2, 16, 64, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    cache = NSACache.of([layer], 64, 32)
    sequences = [cache.open(), cache.open()]
    counts: list[list[int]] = [[100, 40], [300, 0], [1, 1], [1, 1], [4, 2], [1, 1]]
    for number, tokens in enumerate(counts):
        if number == 4:
            sequences[1] = cache.fork(sequences[0])
        x = torch.randn(2, max(tokens), 256, device="cuda", dtype=torch.bfloat16)
        assert bool(layer(x, cache=cache.step(sequences, tokens)[0]).isfinite().all())
    return len(counts)


def run_choosing() -> int:
    """Check choosing over compressed keys in pages against the oracle: few sequences, split among programs, and many. Return the calls."""
    sizes = ((1, 1, 128), (3, 4, 64), (200, 1, 64))  # B, S, D
    for B, S, D in sizes:
        lengths = torch.randint(0, 4000, (B,), generator=torch.Generator().manual_seed(B)) + (B == 1) * 4000
        q_pos = (lengths[:, None] + torch.arange(-S, 0)).clamp(min=-1).cuda()
        call = make_choose_call((B, S, 8192, 1, 16, D, D, Rule()), torch.bfloat16, "cuda", q_pos=q_pos)
        pages = in_pages(call, 4)
        assert choose_pages.takes(pages)
        assert (choose_pages._parts(pages, B) > 1) == (B < 200)
        check_forward(lambda _: choose_triton.paged(pages), call, slack=1e-4)  # noqa: B023
    return len(sizes)


def run_indices(backend: str = "cupy-cuda") -> int:
    """Run calls from int32 and int64 block indices with duplicates, which must not change the results. Return the number of calls."""
    sizes = (  # B, S, G, h, D, S_kv, block, n
        (1, 1, 2, 12, 256, 2100, 4, 513), (150, 1, 2, 12, 256, 2100, 4, 129), (3, 4, 2, 16, 128, 2000, 64, 16),
        (1, 30, 2, 12, 256, 1100, 4, 140),
    )  # fmt: skip
    for B, S, G, h, D, S_kv, block, n in sizes:
        q, k, v = make_qkv(B, S, G, h, D, D, S_kv=S_kv, dtype=torch.bfloat16, device="cuda", requires_grad=S > 8)
        indices = torch.randint(-2, S_kv // block + 2, (B, S, G, n), device="cuda")
        indices[..., n // 2] = indices[..., 0]
        results = [selection_attention(q, k, v, Selection.from_blocks(x, block), backend=backend) for x in (indices, indices.int())]
        assert torch.equal(*results)
        if S > 8:
            torch.autograd.grad(results[0].float().sum(), (q, k, v))
    torch.cuda.synchronize()
    return 2 * len(sizes)


def run_indexers() -> int:
    """Run an indexer: choosing for 1, 4 and 70 tokens, best scores, and the loss, forward and backward. Return the calls."""
    k, index_k = torch.randn(2, 2, 3000, 64, device="cuda"), torch.randn(2, 1, 3000, 64, device="cuda")
    k, index_k = k.bfloat16(), index_k.bfloat16()
    for S in (1, 4, 70):
        q = torch.randn(2, S, 2, 4, 64, device="cuda", dtype=torch.bfloat16)
        chosen = choose_blocks(q, index_k, block_size=32, n=16)
        pooled = {"block_size": 4, "compress_block": 4, "compress_stride": 4, "local": 0, "activation": "relu", "tail": True}
        tail = choose_blocks(q, index_k[:, :, ::4].contiguous(), n=24, S_kv=3000, **pooled)
        for selection in (chosen, tail, Selection.from_scores(torch.randn(2, S, 2, 94, device="cuda"), 16, 32, S_kv=3000)):
            o, lse = selection_attention(q, k, k, selection, return_lse=True)
            index_q = q[:, :, :, 0].clone().requires_grad_()
            indexer_loss(q, k, lse, index_q, index_k[:, 0], selection).backward()
            assert bool(o.isfinite().all())
    torch.cuda.synchronize()
    return 3 * 3


def run_packed() -> int:
    """Run packed batches whose long requests attend to blocks of 64 and of 128 keys, and an indexer. Return the number of batches."""
    new, lengths = (150, 0, 70, 1, 8, 9, 2), (150, 33, 250, 256, 8, 128, 1)
    sizes: Any = {"G": 2, "h": 16, "Dk": 128, "Dv": 128, "n": 3, "room": 256, "spare": 3, "one_pool": True}
    for page, block, each in ((128, 128, None), (64, 128, None), (128, 64, None), (128, 128, "page")):
        step = make_step(new, lengths, page, **sizes, block=block, each=each, dtype=torch.bfloat16, device="cuda")
        with mock.patch.object(packed, "LEAST_ROWS", 1), mock.patch.object(launch, "start", wraps=launch.start) as start:
            step.check("cupy-cuda")
        assert {"block_partials.cu", "forward_blocks.cu"} <= {call.args[0] for call in start.call_args_list}
        q, k, table = step.cache.q[:, :, 0].unsqueeze(2), step.cache.k_cache[:, :, :1], step.cache.block_table
        choose_blocks_with_kvcache(q, k, step.cache.cache_seqlens, table, block_size=block, n=3, cu_seqlens_q=step.cu)
    torch.cuda.synchronize()
    return 2 * 4


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    functions = {
        "layer": run_layer, "choosing": run_choosing, "units": run_units, "lists": run_lists, "indices": run_indices,
        "indexers": run_indexers, "packed": run_packed,
    }  # fmt: skip
    of_name = functions.get(name)
    print(of_name() if of_name else run(name, list(map(int, numbers))) if numbers else run_caches(name), "calls")
