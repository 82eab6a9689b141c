"""Check that wrong calls are refused before any kernel, and that errors survive copies, pickles and long values."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nsa_sel import Selection, describe, explain_request, log_to, use_backend
from nsa_sel.errors import ArgumentError, BackendError, CacheFull, ConfigError, NsaSelError
from tests.helpers.calls import B, Dk, Dv, G, S, S_kv, Wrong, assert_in_order, call, h, message_of
from tests.helpers.policy_cases import H100, LONG


def ranges(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def scores(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


CALLS = [
    Wrong("q is a list", call(q=[1.0]), ("q is a list", "torch.Tensor", "as_tensor")),
    Wrong("k is None", call(k=None), ("k is a NoneType", "torch.Tensor", "as_tensor")),
    Wrong("v is an array", call(v=lambda v: v.numpy()), ("v is a ndarray", "torch.Tensor", "as_tensor")),
    Wrong("q of 3 dims", call(q=lambda q: q[0, 0]), ("q is of shape (3, 2, 16)", "[B,S,G,h,Dk]", "split the heads")),
    Wrong("q of 6 dims", call(q=lambda q: q[None]), ("q is of shape (1, 2, 4, 3, 2, 16)", "[B,S,G,h,Dk]")),
    Wrong("k time-major", call(k=lambda k: k.transpose(1, 2)),
          ("k is of shape (2, 24, 3, 16)", "[B=2, G=3, S_kv, D]. Remedy: a [B,S_kv,G,D] cache is passed as k.transpose(1, 2).")),
    Wrong("v of 5 dims", call(v=lambda v: v[None]),
          ("v is of shape (1, 2, 3, 24, 8)", "[B=2, G=3, S_kv, D]. Remedy: pass the keys and values of")),
    Wrong("k of another batch", call(k=lambda k: k[:1]),
          ("k is of shape (1, 3, 24, 16)", "[B=2, G=3, S_kv, D]. Remedy: pass the keys and values of q's 2 sequences and 3 groups")),
    Wrong("v of other groups", call(v=lambda v: v[:, :2]), ("v is of shape (2, 2, 24, 8)", "Remedy: pass the keys and values of")),
    Wrong("q of flattened heads", call(q=lambda q: q.flatten(2, 3)),
          ("k is of shape (2, 3, 24, 16)", "[B=2, G=4, S_kv, D], since q of shape (2, 4, 6, 16) is decode [B,G,h,Dk]",
           "Remedy: a q [B,S,heads,D] is passed as q.unflatten(2, (G, h)).")),
    Wrong("q of flattened heads, as many rows as k has", call(q=torch.randn(2, 24, 6, 16)),
          ("k is of shape (2, 3, 24, 16)", "is decode [B,G,h,Dk]", "Remedy: a q [B,S,heads,D] is passed as q.unflatten(2, (G, h));")),
    Wrong("k time-major for decode", call(q=lambda q: q[:, -1], k=lambda k: k.transpose(1, 2)),
          ("k is of shape (2, 24, 3, 16)", "is decode [B,G,h,Dk]", "q.unflatten(2, (G, h)); a [B,S_kv,G,D] cache", "k.transpose(1, 2).")),
    Wrong("k of another head dim", call(k=lambda k: k[..., :8]), ("k is of head dimension 8", "q's head dimension 16")),
    Wrong("v of other positions", call(v=lambda v: v[:, :, 1:]), ("v is of 23 positions", "k's 24 positions")),
    Wrong("no heads", call(q=lambda q: q[:, :, :, :0]), ("q is of size 0 in h", "h >= 1")),
    Wrong("no groups", call(q=lambda q: q[:, :, :0], k=lambda k: k[:, :0], v=lambda v: v[:, :0]), ("q is of size 0 in G",)),
    Wrong("empty Dk", call(q=lambda q: q[..., :0], k=lambda k: k[..., :0]), ("q is of size 0 in Dk", "Dk >= 1")),
    Wrong("empty Dv", call(v=lambda v: v[..., :0]), ("v is of size 0 in Dv", "Dv >= 1")),
    Wrong("integer q", call(q=lambda q: q.int()), ("q is of dtype torch.int32", "bfloat16", "q.to(")),
    Wrong("complex k", call(k=lambda k: k.to(torch.complex64)), ("k is of dtype torch.complex64", "float16")),
    Wrong("float8 v", call(v=lambda v: v.to(torch.float8_e4m3fn)), ("v is of dtype torch.float8_e4m3fn", "bfloat16")),
    Wrong("k of another dtype", call(k=lambda k: k.half()), ("k is of dtype torch.float16", "torch.float32", "k.to(q.dtype)")),
    Wrong("v of another dtype", call(v=lambda v: v.double()), ("v is of dtype torch.float64", "torch.float32")),
    Wrong("v on another device", call(v=lambda v: v.to("meta")), ("v is on meta", "cpu", "v.to(q.device)")),
    Wrong("all on meta", call(q=lambda q: q.to("meta"), k=lambda k: k.to("meta"), v=lambda v: v.to("meta")),
          ("q is on meta", "cpu or cuda", "move")),
    Wrong("q transposed", call(q=lambda q: q.mT.contiguous().mT), ("q is of strides", "contiguous last", "q.contiguous()")),
    Wrong("k sliced by steps", call(k=lambda k: torch.cat((k, k), -1)[..., ::2]), ("k is of strides", "k.contiguous()")),
    Wrong("selection is None", call(selection=None), ("selection is a NoneType", "ranges [B,S,G,n,2]", "from_blocks")),
    Wrong("selection is a list", call(selection=[[0, 5]]), ("selection is a list", "a Selection", "torch.tensor", "from_blocks")),
    Wrong("selection is text", call(selection="all"), ("selection is a str", "a Selection", "Selection.from_ranges")),
    Wrong("ranges of floats", call(selection=lambda r: r.float()), ("ranges is of dtype torch.float32", "int32", ".int()")),
    Wrong("ranges of triples", call(selection=ranges(B, S, G, 2, 3)), ("ranges is of shape (2, 4, 3, 2, 3)", "start, end")),
    Wrong("ranges of 3 dims", call(selection=ranges(B, S, 2)), ("ranges is of shape", "[B,S,G,n,2]", "missing axes")),
    Wrong("ranges of other rows", call(selection=ranges(B, S + 1, G, 2, 2)), ("rows [B,S,G] = (2, 5, 3)", "(2, 4, 3)")),
    Wrong("ranges a head", call(selection=ranges(B, S, G * h, 2, 2)), ("rows [B,S,G] = (2, 4, 6)", "one set of ranges")),
    Wrong("ranges of some groups", call(selection=ranges(B, S, G - 1, 2, 2)),
          ("rows [B,S,G] = (2, 4, 2)", "(2, 4, 3), or (2, 4, 1) for all groups", "or per query row for all groups")),
    Wrong("decode ranges for prefill", call(selection=ranges(B, G, 2, 2)), ("rows [B,S,G] = (2, 1, 3)", "(2, 4, 3)")),
    Wrong("block indices for a selection", call(selection=ranges(B, S, G, 2)),
          ("selection is a tensor torch.int32 of shape (2, 4, 3, 2)", "looks like block indices", "Selection.from_blocks(")),
    Wrong("more block indices for a selection", call(selection=ranges(B, S, G, 16)), ("looks like block indices", "from_blocks(")),
    Wrong("scores for a selection", call(selection=scores(B, S, G, 2)), ("looks like scores", "Selection.from_scores(")),
    Wrong("decode's block indices", call(q=lambda q: q[:, -1], selection=ranges(B, G, 16)), ("ranges is of shape", "[B,G,n,2]")),
    Wrong("flash-attn's layout", call(q=torch.randn(B, 7, G * h, Dk), k=torch.randn(B, 7, G, Dk), v=torch.randn(B, 7, G, Dv),
                                      selection=ranges(B, 7, G, 1, 2)),
          ("over rows [B,S,G] = (2, 7, 3)", "flash-attn's layout", f"q.unflatten(2, (3, {h})), k.transpose(1, 2) and v.transpose(1, 2)")),
    Wrong("ranges on another device", call(selection=lambda r: r.to("meta")), ("selection is on meta", "selection.to(")),
    Wrong("scale is NaN", call(scale=float("nan")), ("scale is nan", "finite", "1/sqrt(Dk)")),
    Wrong("scale is infinite", call(scale=float("inf")), ("scale is inf", "finite")),
    Wrong("scale of thousands of digits", call(scale=10**5000), ("scale is a int of thousands of digits", "finite")),
    Wrong("return_lse is a tensor", call(return_lse=torch.ones(2)), ("return_lse is tensor(", "True or False")),
    Wrong("backend of thousands of digits", call(backend=10**5000), ("backend is a int of thousands of digits", "the name of a backend")),
    Wrong("scale is a tensor", call(scale=torch.tensor(0.1)), ("scale is tensor(", "Python float")),
    Wrong("scale is a bool", call(scale=True), ("scale is True", "finite")),
    Wrong("more rows than keys", call(k=lambda k: k[:, :, :3], v=lambda v: v[:, :, :3]),
          ("q is of S = 4 rows", "S_kv = 3", "pass q_pos")),
    Wrong("q_pos is a list", call(q_pos=[0, 1, 2, 3]), ("q_pos is a list", "[S] or [B,S]")),
    Wrong("q_pos of floats", call(q_pos=torch.zeros(S)), ("q_pos is of dtype torch.float32", "int64", ".int()")),
    Wrong("q_pos of another length", call(q_pos=torch.arange(S + 1)), ("q_pos is of shape (5,)", "[S=4] or [B=2, S=4]")),
    Wrong("q_pos on another device", call(q_pos=torch.arange(S, device="meta")), ("q_pos is on meta", "q_pos.to(")),
    Wrong("q_pos past the keys", call(q_pos=torch.arange(S_kv - S + 1, S_kv + 1)), ("q_pos is from 21 to 24", "S_kv = 24")),
    Wrong("q_pos negative", call(q_pos=torch.arange(-1, S - 1)), ("q_pos is from -1 to 2", "[0, S_kv = 24)")),
    Wrong("backend unknown", call(backend="sdpa_packed"),
          ("'sdpa_packed' (argument) is unknown", "did you mean 'sdpa-packed'?", "Allowed: ", "numba", "Remedy: "), BackendError),
    Wrong("backend in capitals", call(backend="NUMBA"), ("'NUMBA' (argument) is unknown", "did you mean 'numba'?"), BackendError),
    Wrong("backend a number", call(backend=3), ("backend is 3", "the name of a backend")),
    Wrong("backend a list", call(backend=["numba"]), ("backend is ['numba']", "the name of a backend")),
    Wrong("backend for GPUs", call(backend="triton-group"),
          ("'triton-group', forced by argument, refuses", "The tensors are on cpu", "TRITON_INTERPRET=1"), BackendError),
]  # fmt: skip
SELECTIONS = [
    Wrong("block_size 0", lambda: Selection.from_ranges(ranges(1, 1, 1, 1, 2), 0),
          ("block_size is 0", "whole number >= 1", "keys in a block")),
    Wrong("block_size of 2^31", lambda: Selection.from_blocks(ranges(1, 1, 1, 2), 1 << 31), ("block_size is 2147483648", "< 2^31")),
    Wrong("block_size of thousands of digits", lambda: Selection.from_blocks(ranges(1, 1, 1, 2), 10**5000),
          ("block_size is a int of thousands of digits", "< 2^31")),
    Wrong("S_kv of thousands of digits", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, S_kv=-(10**5000)), ("S_kv is a int of",)),
    Wrong("first of thousands of digits", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, first=10**5000), ("local is a int",)),
    Wrong("max_length negative", lambda: Selection.from_ranges(ranges(1, 1, 1, 1, 2), None, -4), ("max_length is -4", ">= 1")),
    Wrong("ranges not a tensor", lambda: Selection.from_ranges([[0, 1]]), ("ranges is a list", "torch.Tensor")),
    Wrong("blocks of floats", lambda: Selection.from_blocks(scores(1, 1, 1, 2), 16), ("block_indices is of dtype torch.float32",)),
    Wrong("blocks of 2 dims", lambda: Selection.from_blocks(ranges(1, 2), 16), ("block_indices is of shape (1, 2)", "[B,S,G,n]")),
    Wrong("block_size a float", lambda: Selection.from_blocks(ranges(1, 1, 1, 2), 16.0), ("block_size is 16.0", "whole number")),
    Wrong("counts a block", lambda: Selection.from_blocks(ranges(1, 1, 1, 2), 16, ranges(1, 1, 1, 2)),
          ("block_counts is of shape (1, 1, 1, 2)", "(1, 1, 1)", "one count per row")),
    Wrong("complex counts", lambda: Selection.from_blocks(ranges(1, 1, 1, 2), 16, torch.ones(1, 1, 1, dtype=torch.complex64)),
          ("block_counts is of dtype torch.complex64", "an integer dtype")),
    Wrong("S_kv past 64 bits", lambda: Selection.from_ranges(ranges(1, 1, 1, 1, 2)).measure(1 << 63), ("S_kv is 9223372036854775808",)),
    Wrong("a dtype for a device", lambda: Selection.from_ranges(ranges(1, 1, 1, 1, 2)).to(torch.int64), ("device is torch.int64",)),
    Wrong("sparse counts", lambda: Selection.from_blocks(ranges(1, 1, 1, 2), 16, ranges(1, 1, 1).to_sparse()),
          ("block_counts is of layout torch.sparse_coo", "to_dense")),
    Wrong("scores of integers", lambda: Selection.from_scores(ranges(1, 8, 1, 2), 4, 4),
          ("scores is torch.int32", "floating", "call .float()")),
    Wrong("scores of 3 dims", lambda: Selection.from_scores(scores(8, 1, 2), 4, 4),
          ("of shape (8, 1, 2)", "[B,S,G,blocks]", "missing axes")),
    Wrong("scores a head", lambda: Selection.from_scores(scores(1, 8, 1, 4, 2), 4, 4), ("of shape (1, 8, 1, 4, 2)", "sum over the heads")),
    Wrong("n 0", lambda: Selection.from_scores(scores(1, 8, 1, 2), 0, 4),
          ("n is 0", "whole number >= 1", "the number of blocks that a row")),
    Wrong("n a float", lambda: Selection.from_scores(scores(1, 8, 1, 2), 2.0, 4),
          ("n is 2.0", "as an int", "the number of blocks that a row")),
    Wrong("more forced than n", lambda: Selection.from_scores(scores(1, 8, 1, 2), 2, 4),
          ("first + local is 1 + 2", "n = 2", "the first and the local last blocks are always among the n")),
    Wrong("first negative", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, first=-1), ("first + local is -1 + 2",)),
    Wrong("first a bool", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, first=True), ("first + local is True + 2",)),
    Wrong("a promise in words", lambda: Selection.from_ranges(ranges(1, 1, 1, 1, 2), disjoint="no"), ("disjoint is 'no'", "True or False")),
    Wrong("a promise of blocks in words", lambda: Selection.from_blocks(ranges(1, 1, 1, 2), 16, disjoint="no"), ("disjoint is 'no'",)),
    Wrong("a number as a log", lambda: log_to(2), ("target is 2", "the name of a file")),  # type: ignore[arg-type]
    Wrong("local a float", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, local=1.5), ("first + local is 1 + 1.5",)),
    Wrong("scores of other blocks", lambda: Selection.from_scores(scores(1, 8, 1, 3), 4, 4),
          ("scores is [B,S,G,blocks] = (1, 8, 1, 3) over 3 blocks of 4", "2 blocks for S_kv = 8",
           "check block_size and the order of axes", "pass S_kv=")),
    Wrong("fewer keys than rows", lambda: Selection.from_scores(scores(1, 8, 1, 1), 4, 4, S_kv=4), ("S_kv is 4", "S = 8")),
    Wrong("positions of other rows", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, q_pos=torch.arange(7)),
          ("q_pos is of shape (7,)", "[S=8] or [B=1, S=8]")),
    Wrong("positions a list", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, q_pos=[1]), ("q_pos is a list",)),
    Wrong("measured with text", lambda: Selection(ranges(1, 1, 1, 1, 2)).measure("64"), ("S_kv is '64'", "whole number", "k.shape[2]")),
    Wrong("several decisions described", lambda: describe(()), ("decision is a tuple", "one Decision", "decisions()[-1]")),
    Wrong("blocks of ranges", lambda: Selection.from_ranges(ranges(1, 1, 1, 1, 2)).block_indices, ("block_size is None",)),
]  # fmt: skip


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("wrong", CALLS + SELECTIONS, ids=lambda wrong: wrong.name)
def test_wrong_calls_name_argument_value_allowed_and_remedy(wrong: Wrong) -> None:
    message = message_of(wrong)
    assert_in_order(message, wrong.fragments)
    if wrong.error is ArgumentError:
        assert_in_order(message, (" is ", "; allowed: ", ". Remedy: "))


@pytest.mark.usefixtures("no_kernel")
def test_use_backend_needs_a_name() -> None:
    def attempt() -> None:
        with use_backend(None):
            pass

    assert_in_order(message_of(Wrong("use_backend", attempt)), ("name is None", "; allowed: ", "Remedy: "))


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("name", "meant"), [("triton_tile", "triton-tile"), ("sdpa", "sdpa-packed"), ("chose-torch", "choose-torch")])
def test_use_backend_checks_the_name_on_entry(name: str, meant: str) -> None:
    with pytest.raises(BackendError) as caught, use_backend(name):
        pytest.fail("entered")
    assert_in_order(str(caught.value), (f"{name!r} (use_backend) is unknown", f"did you mean {meant!r}?", "Allowed: ", "Remedy: "))


def every_error() -> list[NsaSelError]:
    """One of each class, of those with a signature of their own also by keywords and with a decision."""
    words = ("x", 3, "y", "do")
    keywords: dict[str, Any] = dict(zip(("value", "allowed", "remedy"), words[1:], strict=True))
    decision = explain_request(LONG, H100)
    made = [ArgumentError(argument="x", **keywords), ConfigError(source="x", **keywords), BackendError("no", decision), NsaSelError("no")]
    classes, signatures = [NsaSelError], {ArgumentError: words, ConfigError: words, CacheFull: ("pages", 3)}
    for kind in classes:
        classes += kind.__subclasses__()
        made.append(kind(*next((signatures[base] for base in kind.__mro__ if base in signatures), ("no",))))
    return made


@pytest.mark.parametrize("round_trip", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_survive_copies_and_pickles(round_trip: Callable[[NsaSelError], NsaSelError]) -> None:
    errors = every_error()
    for error in errors:
        again = round_trip(error)
        assert type(again) is type(error)
        assert (str(again), repr(again), again.args, again.__dict__) == (str(error), repr(error), error.args, error.__dict__)


def test_long_bad_values_are_cut() -> None:
    message = str(ConfigError("x", "9" * 100_000, "y", "do"))
    assert len(message) < 2000
    assert_in_order(message, ("x is '999", "... (100002 characters); allowed: y. Remedy: do."))
