"""Checks of several ranks, as a program: DEVICE FOLDER WORD ...

`torchrun --standalone --nproc-per-node 2 -m tests.helpers.distributed_checks cuda` runs all checks through NCCL, `cpu` through gloo, on 2
or 4 ranks. Without torchrun it forks the ranks of job after job, which share the imports and meet in files of FOLDER. The first failure
ends a rank, since others wait for it. FOLDER gets each job's and rank's results. WORDs: "all" checks; "three" ranks; "four" ranks with
all; "share1" to "share7", parts of all that may run at once; else a part of checks' names.
"""

from __future__ import annotations

import datetime
import json
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from nsa_sel import Selection, decisions, explain, log_to, reset, selection_attention
from nsa_sel.core import decide, registry
from nsa_sel.distributed import agreement, check_ranks, context, context_parallel_attention, exchanges
from nsa_sel.errors import BackendError, NsaSelError
from nsa_sel.settings import tuned
from tests.helpers import distributed_layer as layers
from tests.helpers.calls import assert_refused
from tests.helpers.cases import assert_forward, assert_gradients, make_grads, make_spans
from tests.helpers.files import ROOT
from tests.helpers.ranks import ANY_RANGES, BACKENDS, BLOCK, DEVICE, DTYPE, EQUAL, ROWS, D, all_of, mine, my_turn, problem, rank, ranks


def whole_and_split(
    q: Tensor, k: Tensor, v: Tensor, selection: Selection, backend: str, *, order: Tensor | None = None, **how: Any
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return o, lse, dq, dk, dv of this rank's part, from one call of all ranks and from one call on this rank alone.

    The oracle checks the call of all ranks. order: the rows in the order in which ranks hold them.
    """
    rows = torch.arange(q.shape[1], device=q.device) if order is None else order
    first = k.shape[2] - q.shape[1]
    do, dlse = make_grads(q, v)
    whole = selection_attention(q, k, v, selection, return_lse=True, backend=backend)
    wanted = [x.detach() for x in (*whole, *torch.autograd.grad(whole, (q, k, v), (do, dlse)))]
    slices = mine(q[:, rows], 1), mine(k, 2), mine(v, 2)
    ranges = mine(selection.ranges[:, rows], 1)
    q_pos = None if order is None else mine(first + rows, 0)
    got = context_parallel_attention(*slices, Selection(ranges, selection.block_size), q_pos=q_pos, return_lse=True, backend=backend, **how)
    assert decisions()[-1].forward == backend
    grads = torch.autograd.grad(got, slices, (mine(do[:, rows], 1), mine(dlse[:, rows], 1)))
    back = rows.argsort()
    o, lse, dq = (all_of(x.detach(), 1)[:, back] for x in (*got, grads[0]))
    dk, dv = (all_of(x, 2) for x in grads[1:])
    if my_turn():
        assert_forward((o, lse), q, k, v, selection.ranges)
        assert_gradients((dq, dk, dv), q, k, v, selection.ranges, do, dlse)
    return tuple(x.detach() for x in (*got, *grads)), tuple(mine(x[:, rows], 1) for x in wanted[:3]) + tuple(mine(x, 2) for x in wanted[3:])


def assert_bits(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], backend: str) -> None:
    """Check that the first `EQUAL[backend]` of o, lse, dq are bit-equal; dk and dv are summed in another order."""
    for name, a, b in list(zip(("o", "lse", "dq"), got, wanted, strict=False))[: EQUAL[backend]]:
        assert torch.equal(a, b), f"{name}: {float((a.float() - b.float()).abs().max())} off"


def gathering_is_bit_equal() -> None:
    for backend in BACKENDS:
        for given in (problem(), problem(ROWS, 2 * ROWS)):
            assert_bits(*whole_and_split(*given, backend, exchange="gather"), backend)
            assert exchanges()[-1].kind == "gather"
    spans = Selection(make_spans("mixed", 2, ROWS, 2, ROWS, 40, device=DEVICE))
    ragged = "triton-group" if DEVICE == "cuda" else "numba"  # packed SDPA's sums depend on the other rows of a bucket
    assert_bits(*whole_and_split(*problem()[:3], spans, ragged), ragged)
    assert exchanges()[-1].why.endswith("; the selection is not of whole blocks")


def exchanged_blocks_are_within_the_bound() -> None:
    for backend in BACKENDS:
        for count in (False, True):
            got, wanted = whole_and_split(*problem(), backend, exchange="blocks", count_blocks=count)
            assert (exchanges()[-1].kind, exchanges()[-1].counted) == ("blocks", count)
            if backend == "numba":  # a row's keys come in the same order, and numba sums them one by one
                assert_bits(got, wanted, backend)
    for count in (False, True):  # rows after their slice attend to the beginning of a block only
        whole_and_split(*problem(32, 64), "sdpa-packed", exchange="blocks", count_blocks=count)
        assert decisions()[-1].request.block_size is None, "decided for ranges"


def one_selection_for_all_groups_is_within_the_bound() -> None:
    q, k, v, selection = problem()
    one = Selection(selection.ranges[:, :, :1].contiguous(), BLOCK)
    for how in ({"exchange": "gather"}, {"exchange": "rows"}, {"exchange": "blocks"}, {"exchange": "blocks", "count_blocks": True}):
        whole_and_split(q, k, v, one, BACKENDS[0], **how)
    few = problem(3 * ranks(), 6 * BLOCK * ranks())
    for exchange in ("rows", "blocks"):
        whole_and_split(*few[:3], Selection(few[3].ranges[:, :, :1].contiguous(), BLOCK), BACKENDS[0], exchange=exchange)


def rows_visit_slices_within_the_bound() -> None:
    """A prefill, few rows over long slices, blocks across slices, spans, empty rows; reruns are bit-equal."""
    few = problem(3 * ranks(), 6 * BLOCK * ranks())
    few[3].ranges[0, 1] = 0  # a row that chooses nothing
    across = problem((3 * BLOCK + 8) * ranks())
    spans = Selection(make_spans("mixed", 2, ROWS, 2, 2 * ROWS, 40, device=DEVICE))
    q, k, v, selection = few
    for backend in BACKENDS:
        ragged = (across, (*problem(ROWS, 2 * ROWS)[:3], spans)) if backend in ANY_RANGES else ()
        for given in (problem(), *ragged, few):
            first, _ = whole_and_split(*given, backend, exchange="rows")
            assert (exchanges()[-1].kind, decisions()[-1].request.S) == ("rows", given[0].shape[1])
            assert decisions()[-1].request.S_kv < given[1].shape[2], "a slice of the keys"
        again, _ = whole_and_split(*few, backend, exchange="rows")
        assert all(map(torch.equal, again, first))
    with torch.no_grad():
        slices = mine(q, 1), mine(k, 2), mine(v, 2), Selection(mine(selection.ranges, 1), BLOCK)
        got = context_parallel_attention(*slices, return_lse=True, backend=backend)
        assert exchanges()[-1].kind == "rows", "auto takes the fewest bytes"
        assert all(map(torch.equal, got, first)), "the same with and without gradients"
        crooked = [torch.nn.functional.pad(x, (1, 7))[..., 1:-7] for x in slices[1:3]]
        assert all(map(torch.equal, context_parallel_attention(slices[0], *crooked, slices[3], return_lse=True, backend=backend), got))
        nothing = Selection(mine(selection.ranges, 1)[..., :0, :].contiguous(), BLOCK)
        o, lse = context_parallel_attention(*slices[:3], nothing, return_lse=True, exchange="rows")
        assert not o.any()
        assert (lse == float("-inf")).all()
        no_rows = Selection(slices[3].ranges[:, :0], BLOCK)
        assert context_parallel_attention(slices[0][:, :0], *slices[1:3], no_rows, exchange="rows").numel() == 0


def only_selected_blocks_of_a_long_slice_are_kept() -> None:
    """The last rows see parts of the last block."""
    S, blocks = 3 * ranks(), 8 * ranks()
    q, k, v, _ = problem(S, blocks * BLOCK)
    others = torch.arange(2 * S * 2, device=DEVICE).view(2, S, 2) * 5 % (blocks - 1)
    chosen = torch.stack((torch.where(others == 2, 0, others), torch.full_like(others, blocks - 1)), -1)
    selection = Selection.from_blocks(chosen, BLOCK)
    for backend in ANY_RANGES:
        for count in (False, True):
            whole_and_split(q, k, v, selection, backend, exchange="blocks", count_blocks=count)


def sums_of_16_bit_gradients_are_within_the_bound() -> None:
    for exchange in ("gather", "blocks", "rows"):
        whole_and_split(*problem(dtype=torch.bfloat16), BACKENDS[1], exchange=exchange)


def ranks_may_hold_rows_of_both_ends() -> None:
    """Each rank has rows of the beginning and of the end, which balances dense attention."""
    parts = torch.arange(ROWS, device=DEVICE).chunk(2 * ranks())
    order = torch.cat([torch.cat((parts[r], parts[2 * ranks() - 1 - r])) for r in range(ranks())])
    for exchange in ("gather", "blocks", "rows"):
        whole_and_split(*problem(), "sdpa-packed", order=order, exchange=exchange)


def auto_takes_the_fewest_bytes() -> None:
    """Sends rows for one token per rank over a long cache, gathers for a prefill, and sends blocks if counting finds few."""
    q, k, v, selection = problem(ranks(), 64 * BLOCK * ranks(), n=3)
    whole_and_split(q, k, v, selection, "sdpa-packed")
    few, others = exchanges()[-1], ranks() - 1
    assert (few.kind, few.counted, few.slots) == ("rows", False, 3 * others)
    a_block = 2 * 2 * BLOCK * 2 * D * DTYPE.itemsize  # B, G, keys, Dk and Dv
    assert few.blocks.forward == few.slots * (a_block + 2 * 2 * 4)
    assert few.blocks.backward == few.slots * a_block
    assert few.gather == (64 * others * a_block,) * 2
    a_row, lse, ranges = 2 * 2 * D * DTYPE.itemsize, 2 * 2 * 4, 2 * 3 * 2 * 4  # of a batch entry: G and h; G, n and two ends
    assert few.rows == (2 * others * (2 * a_row + lse + ranges), 2 * others * (3 * a_row + 2 * lse))
    assert "rows are no more bytes" in str(few)
    whole_and_split(*problem(), "sdpa-packed")
    assert (exchanges()[-1].kind, exchanges()[-1].why.split(":")[0]) == ("gather", "gathering is no more bytes")
    nearby = problem()[:3], torch.arange(ROWS, device=DEVICE)[None, :, None, None].expand(2, -1, 2, 1) // BLOCK  # none of other ranks
    whole_and_split(*nearby[0], Selection.from_blocks(nearby[1].contiguous(), BLOCK), "sdpa-packed", count_blocks=True)
    assert (exchanges()[-1].kind, exchanges()[-1].blocks) == ("blocks", (0, 0))


def rank_0_counts_what_neighbors_share() -> None:
    """It counts its own rows at the first call of a kind. All ranks decide from its count."""
    q, k, v, selection = problem()
    slices = mine(q, 1), mine(k, 2), mine(v, 2), Selection(mine(selection.ranges, 1), BLOCK)
    own, count = ROWS // ranks(), mock.Mock(wraps=decide.count_rows)
    with mock.patch.object(decide, "count_rows", count), mock.patch.object(context, "_sharing", {}):
        for _ in range(2):
            context_parallel_attention(*slices, exchange="gather", scale=0.7)
    assert count.call_count == (rank() == 0)
    found, first = decisions()[-1].request, torch.arange(own, device=DEVICE).expand(len(q), own)
    assert found.counted
    assert found.sharing == decide.count_rows(found, q[:, :own], Selection(selection.ranges[:, :own], BLOCK), first, None)


def decode_sends_rows() -> None:
    q, k, v, selection = problem(ranks(), 8 * BLOCK * ranks())
    token = mine(q, 1)[:, 0], mine(k, 2), mine(v, 2), mine(selection.ranges, 1)[:, 0]
    o, lse = context_parallel_attention(*token, return_lse=True)
    assert o.dim() == 4
    assert exchanges()[-1].kind == "rows"
    assert_forward((all_of(o.detach()[:, None], 1), all_of(lse.detach()[:, None], 1)), q, k, v, selection.ranges)


def nan_in_unselected_keys_changes_nothing() -> None:
    """Even in unused slots that are sent."""
    q, k, v, selection = problem()
    first = Selection(selection.ranges.clone(), BLOCK)
    first.ranges[first.ranges[..., 0] // BLOCK == 2] = 0  # no row selects block 2
    results = []
    for bad in (0.0, float("nan")):
        slices = []
        for x in (k, v):
            spoilt = x.detach().clone()
            spoilt[:, :, 2 * BLOCK : 3 * BLOCK] += bad
            slices.append(mine(spoilt.requires_grad_(), 2))
        for exchange in ("gather", "blocks", "rows"):
            rows = mine(q, 1)
            o = context_parallel_attention(rows, *slices, Selection(mine(first.ranges, 1), BLOCK), exchange=exchange)
            results.append((o.detach(), *torch.autograd.grad(o, (rows, *slices), mine(make_grads(q, v)[0], 1))))
    assert all(map(torch.equal, sum(results[:3], ()), sum(results[3:], ())))


def another_default_device_changes_nothing() -> None:
    q, k, v, selection = problem()
    slices, ranges = (mine(q, 1), mine(k, 2), mine(v, 2)), mine(selection.ranges, 1)
    for exchange, count in (("gather", False), ("blocks", False), ("blocks", True), ("rows", False)):
        results = []
        for default in (None, "meta"):
            torch.set_default_device(default)
            o = context_parallel_attention(*slices, Selection(ranges, BLOCK), exchange=exchange, count_blocks=count)
            results.append((o.detach(), *torch.autograd.grad(o.sum(), slices)))
            torch.set_default_device(None)
        assert all(map(torch.equal, *results))


def bad_arguments() -> None:
    q, k, v, selection = problem(64)
    slices, own = (mine(q, 1), mine(k, 2), mine(v, 2)), mine(selection.ranges, 1)
    blocks = Selection.from_blocks(torch.zeros(2, 64 // ranks(), 2, 1, dtype=torch.int32, device=DEVICE), 64)
    alone = dist.new_group([0])
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("exchange is 'all'; allowed: auto, gather, blocks, rows", own, {"exchange": "all"}),
        ("'blocks', but the selection is not of whole blocks", own, {"exchange": "blocks"}),
        ("no multiple of the block size 64", blocks, {"exchange": "blocks"}),
        ("selection is over rows", selection, {}),
        ("group is a str", own, {"group": "dp"}),
        *[("group is one without this rank", own, {"group": alone})] * (rank() > 0),
    ]
    assert_refused(*((words, partial(context_parallel_attention, *slices, given, **how)) for words, given, how in wrong))


# Ranks compare what their decisions depend on


@contextmanager
def only_rank(number: int, name: str, value: str) -> Iterator[None]:
    """Set a flag on one rank alone."""
    if rank() == number:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def assert_raises_on_all(work: Callable[[], object], words: str) -> None:
    """Check the error, and that it survives pickling."""
    with pytest.raises(NsaSelError) as raised:
        work()
    assert words in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def small_call(S: int = 32, D: int = 16, n: int = 1, dtype: torch.dtype = torch.float32, grad: bool = False, **how: Any) -> Tensor:
    """Return o of S rows of this rank, with different values on each rank."""
    torch.manual_seed(rank())
    sizes = (1, S, 1, 2, D), (1, 1, S, D), (1, 1, S, D)
    q, k, v = (torch.randn(size, dtype=dtype, device=DEVICE, requires_grad=grad) for size in sizes)
    blocks = torch.arange(n, dtype=torch.int32, device=DEVICE).expand(1, S, 1, n).contiguous()
    return context_parallel_attention(q, k, v, Selection.from_blocks(blocks, how.pop("block", 16)), **how)


DIFFERENT_CALLS: dict[str, dict[str, Any]] = {  # what the error says -> arguments of all ranks but the first
    "keys is 16 there, 32 on rank 0": {"S": 16, "D": 32},
    "Dv is 32 there, 16 on rank 0": {"D": 32},
    "n is 2 there, 1 on rank 0": {"n": 2},
    "block_size is 8 there, 16 on rank 0": {"block": 8},
    "dtype is 'torch.float64' there, 'torch.float32' on rank 0": {"dtype": torch.float64},
    "needs_grad is True there, False on rank 0": {"grad": True},
    "scale is 0.5 there, 0.25 on rank 0": {"scale": 0.5},
    "has_pos is True there, False on rank 0": {"q_pos": torch.arange(32)},
    "exchange is 'rows' there, 'auto' on rank 0": {"exchange": "rows"},
    "backend is 'sdpa-packed' there, None on rank 0": {"backend": "sdpa-packed"},
}


def first_calls_that_differ_raise_on_all_ranks() -> None:
    """Ranks compare again until their calls are equal, and then no more."""
    group = dist.new_group()
    for words, how in DIFFERENT_CALLS.items():
        how = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in how.items()}
        assert_raises_on_all(lambda how=how: small_call(group=group, **(how if rank() else {})), words)
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        assert_raises_on_all(lambda: small_call(group=group), "settings.sel_triton_min_L is 77 there")
    assert_raises_on_all(
        lambda: check_ranks(group) if rank() else small_call(group=group),
        "call is 'check_ranks' there, 'context_parallel_attention' on rank 0",
    )
    with only_rank(1, "NSA_DEBUG_LOG", os.devnull):  # a log for each rank is fine
        small_call(group=group)
    log_to(None)
    with mock.patch.object(agreement, "_compare") as compare:
        small_call(group=group)
    compare.assert_not_called()


def every_call_is_compared_while_debugging() -> None:
    small_call()
    with only_rank(rank(), "NSA_DEBUG_TRITON", "1"):
        assert_raises_on_all(lambda: small_call(scale=0.5 if rank() else None), "scale is 0.5 there, 0.25 on rank 0")
        small_call()


def check_ranks_compares_versions_settings_and_tuning() -> None:
    check_ranks()
    with only_rank(1, "NSA_SEL_TRITON_MIN_L", "77"):
        assert_raises_on_all(check_ranks, "settings.sel_triton_min_L is 77 there")
    with mock.patch.object(tuned, "version_of", lambda package: f"{package}-{rank()}"):
        assert_raises_on_all(check_ranks, "versions.numba is 'numba-1' there, 'numba-0' on rank 0")
    small_call()
    if rank() == 1:  # as where one of them has not called sync_tuning()
        tuned.share(decisions()[-1].device, tuned.TunedTable("mine.json", "abc", b"", {}, {}, None))
    assert_raises_on_all(check_ranks, "tuning is 'mine.json abc' there, None on rank 0")
    tuned.forget()
    check_ranks()


def unknown_backends_are_refused_on_all_ranks() -> None:
    with pytest.raises(BackendError, match="nothing-such"):
        small_call(backend="nothing-such")


# Documents


def the_document_runs() -> None:
    """Run the code of docs/distributed.md, as tests/unit/test_documents.py does on one rank."""
    text = (ROOT / "docs" / "distributed.md").read_text()
    namespace: dict[str, Any] = {"__name__": "document"}
    for number, part in enumerate(text.split("```python\n")[1:], 1):
        exec(compile(part.split("```")[0], f"docs/distributed.md, python block {number}", "exec"), namespace)


CHECKS: tuple[Callable[[], None], ...] = (
    gathering_is_bit_equal,
    exchanged_blocks_are_within_the_bound,
    one_selection_for_all_groups_is_within_the_bound,
    rows_visit_slices_within_the_bound,
    only_selected_blocks_of_a_long_slice_are_kept,
    sums_of_16_bit_gradients_are_within_the_bound,
    ranks_may_hold_rows_of_both_ends,
    auto_takes_the_fewest_bytes,
    rank_0_counts_what_neighbors_share,
    decode_sends_rows,
    nan_in_unselected_keys_changes_nothing,
    first_calls_that_differ_raise_on_all_ranks,
    every_call_is_compared_while_debugging,
    check_ranks_compares_versions_settings_and_tuning,
    unknown_backends_are_refused_on_all_ranks,
    another_default_device_changes_nothing,
    bad_arguments,
    layers.dtensors_need_no_communication,
    layers.dtensors_of_uneven_parts_and_of_two_dimensions,
    layers.dtensors_are_redistributed_where_needed,
    layers.the_example_trains_as_one_rank,
    *layers.ANY_RANKS,
    the_document_runs,
)


Checks = tuple[Callable[[], None], ...]
SHARES = 7
LONGEST = datetime.timedelta(seconds=1200)  # ranks may wait long on a busy machine


def jobs(words: list[str], number: int = 2) -> dict[str, tuple[int, Checks]]:
    """Return the number of ranks and the checks of each job, by name. number: of ranks, unless the word says it."""
    chosen: dict[str, tuple[int, Checks]] = {}
    for word in words:
        if word == "three":
            chosen[word] = 3, layers.THREE_RANKS
        elif word.startswith("share"):
            chosen[word] = number, CHECKS[int(word[5:]) - 1 :: SHARES]
        elif word == "four":
            chosen[word] = 4, CHECKS
        else:
            named = tuple(check for check in CHECKS if word in check.__name__)
            chosen[word] = number, CHECKS if word == "all" else named
    return chosen


def compile_once() -> None:
    """Compile Numba's kernels on rank 0. The others load them from its cache on disk."""
    for turn in (True, False):
        if (rank() == 0) == turn:
            q, k, v, selection = problem()
            selection_attention(q, k, v, selection, backend="numba").sum().backward()
        dist.barrier()


def run_checks(checks: Checks, folder: Path) -> None:
    """Run every check on this rank of an initialized job, and write the results; a failure ends the process."""
    results: dict[str, str] = {}
    for check in checks:
        began = time.monotonic()
        try:
            check()
            results[check.__name__] = "passed"
        except BaseException:
            results[check.__name__] = traceback.format_exc()
            break
        finally:
            print(f"rank {rank()}: {check.__name__}, {time.monotonic() - began:.1f} s", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank()}.json").write_text(json.dumps(results))
    failed = [text for text in results.values() if text != "passed"]
    if failed:
        print(failed[0], file=sys.stderr, flush=True)
        os._exit(1)  # the others may never finish


def fork_ranks(name: str, number: int, checks: Checks, folder: Path) -> None:
    """Run a job in `number` forks of this process."""
    for one in range(number):
        if os.fork() == 0:
            os.environ["RANK"] = str(one)  # the code of docs/distributed.md asks for it
            how = {"init_method": f"file://{folder}/{name}.store", "rank": one, "world_size": number, "timeout": LONGEST}
            dist.init_process_group("gloo", **how)
            if checks is CHECKS:
                compile_once()
            run_checks(checks, folder / name)
            sys.stdout.flush()
            os._exit(0)  # ending the interpreter takes seconds
    for _ in range(number):
        os.wait()


def main() -> None:
    """Join torchrun's job, or fork the ranks of each job."""
    folder, words = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp()), sys.argv[3:] or ["all"]
    if DEVICE == "cpu":
        torch.set_num_threads(1)
    if "RANK" not in os.environ:
        folder.mkdir(parents=True, exist_ok=True)
        explain(*problem())  # what a decision needs is read once for all ranks
        reset()
        for backend in BACKENDS:
            registry.load(backend)
        for name, (number, checks) in jobs(words).items():
            fork_ranks(name, number, checks, folder)
        return
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", timeout=LONGEST)
    for name, (_, checks) in jobs(words).items():
        run_checks(checks, folder / name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
