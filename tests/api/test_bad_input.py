"""Wrong calls, flags and files: each is refused before any kernel, and says what is wrong, its value, what is allowed and the remedy."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import nsa_sel
from nsa_sel import Selection
from nsa_sel.core import registry
from nsa_sel.core.check import check_call
from nsa_sel.core.facts import request_of
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ArgumentError, BackendError, ConfigError, NsaSelError
from tests.core.test_imports import modules
from tests.helpers.cases import make_qkv
from tests.helpers.policy_cases import H100, LONG

B, S, G, h, Dk, Dv, S_kv = 2, 4, 3, 2, 16, 8, 24


class Wrong(NamedTuple):
    """Something wrong, fragments that the error's message must hold in this order, and the error's class."""

    name: str
    attempt: Callable[[], object]
    fragments: tuple[str, ...] = ()
    error: type[NsaSelError] = ArgumentError


def call(**changes: Any) -> Callable[[], object]:
    """`selection_attention` of good arguments with some replaced; a function is given the good argument."""

    def attempt() -> object:
        q, k, v = make_qkv(B, S, G, h, Dk, Dv, S_kv=S_kv)
        arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "selection": torch.tensor([[0, 5], [7, 9]]).expand(B, S, G, 2, 2)}
        for name, change in changes.items():
            arguments[name] = change(arguments[name]) if callable(change) else change
        return nsa_sel.selection_attention(**arguments)

    return attempt


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
          ("'triton-group', forced by argument, refuses", "device.kind is cpu", "TRITON_INTERPRET=1"), BackendError),
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
    Wrong("local a float", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, local=1.5), ("first + local is 1 + 1.5",)),
    Wrong("scores of other blocks", lambda: Selection.from_scores(scores(1, 8, 1, 3), 4, 4),
          ("scores is [B,S,G,blocks] = (1, 8, 1, 3) over 3 blocks of 4", "2 blocks for S_kv = 8",
           "check block_size and the order of axes", "pass S_kv=")),
    Wrong("fewer keys than rows", lambda: Selection.from_scores(scores(1, 8, 1, 1), 4, 4, S_kv=4), ("S_kv is 4", "S = 8")),
    Wrong("positions of other rows", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, q_pos=torch.arange(7)),
          ("q_pos is of shape (7,)", "[S=8] or [B=1, S=8]")),
    Wrong("positions a list", lambda: Selection.from_scores(scores(1, 8, 1, 2), 4, 4, q_pos=[1]), ("q_pos is a list",)),
    Wrong("measured with text", lambda: Selection(ranges(1, 1, 1, 1, 2)).measure("64"), ("S_kv is '64'", "whole number", "k.shape[2]")),
    Wrong("several decisions described", lambda: nsa_sel.describe(()), ("decision is a tuple", "one Decision", "decisions()[-1]")),
    Wrong("blocks of ranges", lambda: Selection.from_ranges(ranges(1, 1, 1, 1, 2)).block_indices, ("block_size is None",)),
]  # fmt: skip

FLAGS = [  # flag, text, fragments
    ("NSA_USE_TRITON_SEL", "maybe", ("'maybe'", "0 or 1")),
    ("NSA_USE_TRITON_SEL", "", ("''", "0 or 1")),
    ("NSA_TRITON_SEL_FORCE", "2", ("'2'", "0 or 1")),
    ("NSA_SEL_TRITON_MIN_L", "4k", ("'4k'", "a whole number >= 0")),
    ("NSA_SEL_TRITON_MIN_L", "-1", ("'-1'", "a whole number >= 0")),
    ("NSA_SEL_TRITON_MIN_L", str(1 << 31), (f"'{1 << 31}'", "a whole number >= 0 and below 2^31")),
    ("NSA_SEL_TRITON_MIN_L", "9" * 5000, ("'9999", "a whole number >= 0 and below 2^31")),
    ("NSA_SEL_TRITON_BLOCK_L", str(1 << 31), (f"'{1 << 31}'", "a power of two from 16 to 512")),
    ("NSA_SEL_TRITON_BLOCK_D", "9" * 5000, ("'9999", "a power of two from 16 to 512")),
    ("NSA_SEL_TRITON_GROUP", "grouped", ("'grouped'", "0 or 1")),
    ("NSA_SEL_TRITON_ALLOW_GRAD", "none", ("'none'", "0 or 1")),
    ("NSA_SEL_TRITON_REQUIRE_ALIGN", "16", ("'16'", "0 or 1")),
    ("NSA_SEL_TRITON_FORCE_PATH", "fast", ("'fast'", "dense, varlen, auto")),
    ("NSA_SEL_TRITON_DB", "double", ("'double'", "0 or 1")),
    ("NSA_SEL_TRITON_BLOCK_L", "48", ("'48'", "a power of two from 16 to 512")),
    ("NSA_SEL_TRITON_BLOCK_D", "8", ("'8'", "a power of two from 16 to 512")),
    ("NSA_SEL_TRITON_BLOCK_DV", "1024", ("'1024'", "a power of two from 16 to 512")),
    ("NSA_USE_SEL_PACK", "packed", ("'packed'", "0 or 1")),
    ("NSA_FORCE_PARITY", "y", ("'y'", "0 or 1")),
    ("NSA_DEBUG_TRITON", "verbose", ("'verbose'", "0 or 1")),
    ("NSA_DEBUG_LOG", " ", ("' '", "0, 1, stderr or the name of a file")),
    *(
        (flag, "numb\udcff", (r"'numb\udcff'", "text in UTF-8"))
        for flag in ("NSA_SEL_BACKEND", "NSA_DEBUG_LOG", "NSA_SEL_CONFIG", "NSA_SEL_CACHE", "NSA_USE_TRITON_SEL", "NSA_SEL_AUTOTUNE")
    ),
    ("NSA_DEBUG_TIMING", "ms", ("'ms'", "0 or 1")),
    ("NSA_DEBUG_COMPARE", "mae", ("'mae'", "0 or 1")),
]

GOOD = "provenance: tests\n"
FILES = [  # content of the file that NSA_SEL_CONFIG names, fragments
    ("", ("ConfigFile", "base.yaml")),
    ("runtime: {}\n", ("provenance",)),
    (GOOD + "runtimes: {}\n", ("unknown field `runtimes`", "base.yaml")),
    (GOOD + "runtime: {use_triton: true}\n", ("unknown field `use_triton`", "$.runtime")),
    (GOOD + "runtime: {sel_triton_min_L: many}\n", ("Expected `int", "$.runtime.sel_triton_min_L")),
    (GOOD + "runtime: {sel_triton_min_L: {sideways: 64}}\n", ("Invalid enum value 'sideways'", "$.runtime.sel_triton_min_L")),
    (GOOD + "runtime: {sel_triton_min_L: {decode: -1}}\n", ("runtime.sel_triton_min_L", "-1", ">= 0")),
    (GOOD + "runtime: {sel_triton_min_L: -1}\n", ("runtime.sel_triton_min_L", "-1", ">= 0")),
    (GOOD + "runtime: {workspace_bytes: -5}\n", ("runtime.workspace_bytes", "-5", ">= 0")),
    (GOOD + "runtime: {block_l: 48}\n", ("runtime.block_l", "48", "a power of two from 16 to 512")),
    (GOOD + "runtime: {prefer_forward: triton-group}\n", ("Expected `array`", "$.runtime.prefer_forward")),
    (GOOD + "match: {kind: tpu}\n", ("tpu", "$.match.kind")),
    (GOOD + "triton_off: {rule: ADR}\n", ("evidence", "$.triton_off")),
    (GOOD + "kernels: {triton-group/forward: {block_l: 64}}\n", ("num_warps", "$.kernels[...]")),
    (GOOD + "kernels: {triton-group/forward: {block_l: 63, num_warps: 4, num_stages: 1}}\n",
     ("kernels.triton-group/forward", "powers of two")),
    (GOOD + "kernels: {triton-group/forward: {block_l: 64, num_warps: 4, num_stages: 0}}\n", ("kernels.triton-group/forward", ">= 1")),
    ("provenance: [unclosed\n", ("while parsing", "base.yaml")),
    ("provenance: 2001-13-45\n", ("month must be in 1..12", "base.yaml")),
    *((GOOD + f"assumes: {value}\n", ("a value that can't be read", words)) for value, words in (
        ("!!int foo", "ValueError: invalid literal"), ("!!bool foo", "KeyError: 'foo'"), ("!!timestamp foo", "AttributeError"),
        ("0x_", "ValueError: invalid literal"), (r'"\ud800"', "surrogates not allowed"))),
    (GOOD + "runtime: {workspace_bytes: " + "9" * 5000 + "}\n", ("a value that can't be read", "value has 5000 digits)")),
    (GOOD + f"runtime: {{workspace_bytes: {1 << 63}}}\n", ("runtime.workspace_bytes", ">= 0 and below 2^63")),
    (GOOD + f"runtime: {{sel_triton_min_L: {1 << 31}}}\n", ("runtime.sel_triton_min_L", ">= 0 and below 2^31")),
    (GOOD + f"runtime: {{block_l: {1 << 31}}}\n", ("runtime.block_l", "a power of two from 16 to 512")),
    (GOOD + f"kernels: {{triton-group/forward: {{block_l: {1 << 31}, num_warps: 4, num_stages: 1}}}}\n", ("powers of two", "up to 1024")),
    (GOOD + f"kernels: {{triton-group/forward: {{block_l: 64, num_warps: 4, num_stages: {1 << 31}}}}}\n", ("powers of two", "up to 1024")),
    (GOOD + "runtime: {sharing_prior: [1, 2, .nan, 4, 5, 6, 7]}\n", ("sharing_prior", "rising numbers")),
    (GOOD + "x: " + "[" * 5000 + "]" * 5000, ("nested too deeply", "base.yaml")),
    (GOOD + "# " + "x" * 70_000, ("longer than 65536 bytes",)),
    ("a: &a x\n" + GOOD + "assumes: *a\n", ("an alias (*name); write its value out", "line 3")),
    ("a0: &a0 {x: 1}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [{','.join([f'*a{i}'] * 10)}]}}\n" for i in range(8)) + GOOD,
     ("an alias (*name)", "line 2")),  # of ten million parts, if it were read
    (GOOD + "runtime: {prefer_forward: [nonsense]}\n", ("prefer_forward is 'nonsense'; allowed: ", "sdpa-packed", "install the package")),
    (GOOD + "runtime: {prefer_backward: [numba, triton_tile]}\n", ("prefer_backward is 'triton_tile'", "did you mean triton-tile?")),
    (GOOD + "costs: {provenance: x, dtypes: [float16], models: {triton-tilt/forward: {host: 1, terms: {}, rows: 1, median_error: 0,"
     " worst_error: 0}}}\n", ("costs is 'triton-tilt'", "did you mean triton-tile?")),
]  # fmt: skip


def message_of(wrong: Wrong) -> str:
    with pytest.raises(wrong.error) as caught:
        wrong.attempt()
    return str(caught.value)


def assert_in_order(message: str, fragments: tuple[str, ...]) -> None:
    at = 0
    for fragment in fragments:
        assert fragment in message[at:], f"{fragment!r} is missing in {message!r} from character {at}"
        at = message.index(fragment, at) + len(fragment)


@pytest.fixture(autouse=True)
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise AssertionError(f"{name} was loaded, although the call is wrong")

    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr("nsa_sel.core.begin.device_info", lambda device: DeviceInfo(kind="cpu"))  # no interpreter, whatever runs the tests


@pytest.mark.parametrize("wrong", CALLS + SELECTIONS, ids=lambda wrong: wrong.name)
def test_wrong_calls_name_argument_value_allowed_and_remedy(wrong: Wrong) -> None:
    message = message_of(wrong)
    assert_in_order(message, wrong.fragments)
    if wrong.error is ArgumentError:
        assert_in_order(message, (" is ", "; allowed: ", ". Remedy: "))


@pytest.mark.parametrize(("flag", "text", "fragments"), FLAGS)
def test_wrong_flags_are_named(monkeypatch: pytest.MonkeyPatch, flag: str, text: str, fragments: tuple[str, ...]) -> None:
    monkeypatch.setenv(flag, text)
    message = message_of(Wrong(flag, call(), error=ConfigError))
    assert_in_order(message, (f"{flag} is ", fragments[0], "; allowed: ", *fragments[1:], ". Remedy: unset it"))


@pytest.mark.parametrize(("content", "fragments"), FILES)
def test_wrong_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, fragments: tuple[str, ...]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    monkeypatch.setenv("NSA_SEL_CONFIG", str(file))
    message = message_of(Wrong("file", call(), error=ConfigError))
    assert message.startswith(str(file))
    assert all(fragment in message for fragment in (*fragments, "; allowed: ", "Remedy: ")), message


@pytest.mark.parametrize("name", ["missing.yaml", ".", "fifo", "link to a fifo", "/dev/zero"])
def test_unreadable_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening or reading it would wait for ever
    (tmp_path / "link to a fifo").symlink_to("fifo")
    monkeypatch.setenv("NSA_SEL_CONFIG", str(tmp_path / name))
    assert_in_order(
        message_of(Wrong("file", call(), error=ConfigError)),
        ("NSA_SEL_CONFIG is ", "; allowed: a readable YAML file; reading this one: ", "Remedy: mend the path"),
    )


def test_a_configuration_may_be_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD)
    (tmp_path / "link.yaml").symlink_to("mine.yaml")
    monkeypatch.setenv("NSA_SEL_CONFIG", str(tmp_path / "link.yaml"))
    assert nsa_sel.explain_request(LONG, H100).settings.provenance == "tests"


@pytest.mark.parametrize("name", ["no such folder/events.jsonl", "fifo", "."])
def test_unwritable_logs_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")  # that nobody reads: opening it would wait for ever
    monkeypatch.setenv("NSA_DEBUG_LOG", str(tmp_path / name))
    assert_in_order(message_of(Wrong("log", call(), error=ConfigError)), ("NSA_DEBUG_LOG is ", "; allowed: ", "Remedy: "))


def test_use_backend_needs_a_name() -> None:
    def attempt() -> None:
        with nsa_sel.use_backend(None):
            pass

    assert_in_order(message_of(Wrong("use_backend", attempt)), ("name is None", "; allowed: ", "Remedy: "))


def test_debugging_refuses_overlaps_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    overlapping = torch.tensor([[0, 5], [3, 9]]).expand(B, S, G, 2, 2)
    message = message_of(Wrong("overlap", call(selection=overlapping)))
    assert_in_order(message, ("selection row (b=0, s=0, g=0) is [[0, 5], [3, 9]]", "overlapping", "Remedy: call selection.merge()"))
    made_before = Selection(overlapping)
    assert "overlapping" in message_of(Wrong("overlap", call(selection=made_before)))


def test_wrong_calls_leave_no_decision() -> None:
    before = nsa_sel.decisions()
    for wrong in CALLS:
        message_of(wrong)
    assert nsa_sel.decisions() == before


# Errors between processes


def every_error() -> list[NsaSelError]:
    """One of each class, of those with a signature of their own also by keywords and with a decision."""
    words = ("x", 3, "y", "do")
    keywords: dict[str, Any] = dict(zip(("value", "allowed", "remedy"), words[1:], strict=True))
    decision = nsa_sel.explain_request(LONG, H100)
    made = [ArgumentError(argument="x", **keywords), ConfigError(source="x", **keywords), BackendError("no", decision), NsaSelError("no")]
    classes = [NsaSelError]
    for kind in classes:
        classes += kind.__subclasses__()
        made.append(kind(*words) if kind in (ArgumentError, ConfigError) else kind("no"))
    return made


@pytest.mark.parametrize("round_trip", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_survive_copies_and_pickles(round_trip: Callable[[NsaSelError], NsaSelError]) -> None:
    importlib.import_module("nsa_sel.bench.tune.runner")  # declares some
    errors = every_error()
    declared = {name for _, file in modules() for name in re.findall(r"^class (\w+)\(NsaSelError", file.read_text(), re.MULTILINE)}
    assert {type(error).__name__ for error in errors} == {"NsaSelError", *declared}
    for error in errors:
        again = round_trip(error)
        assert type(again) is type(error)
        assert (str(again), repr(again), again.args, again.__dict__) == (str(error), repr(error), error.args, error.__dict__)


def test_long_bad_values_are_cut() -> None:
    message = str(ConfigError("x", "9" * 100_000, "y", "do"))
    assert len(message) < 2000
    assert_in_order(message, ("x is '999", "... (100002 characters); allowed: y. Remedy: do."))


def test_the_table_is_long() -> None:
    rows = len(CALLS) + len(SELECTIONS) + len(FLAGS) + len(FILES)
    assert len(CALLS) >= 40
    assert rows >= 90
    assert len({wrong.name for wrong in CALLS + SELECTIONS}) == len(CALLS) + len(SELECTIONS)


@pytest.mark.parametrize(("start", "row", "aligned"), [(0, 16, True), (0, 20, True), (0, 18, False), (4, 16, True), (2, 16, False)])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_request_knows_the_alignment_of_all_tensors(which: int, start: int, row: int, aligned: bool) -> None:
    """Pointers and all strides but the last are multiples of 16 bytes, four float32."""
    q, k, v = (torch.randn(1, 4, 1, 2, 16), torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 16))
    tensors = [q, k, v]
    shape = tensors[which].shape
    wide = torch.randn(*shape[:-1], row).flatten()
    strides = torch.empty(*shape[:-1], row).stride()
    tensors[which] = torch.cat((wide, wide))[start:].as_strided(shape, strides)
    checked = check_call(*tensors, torch.zeros(1, 4, 1, 1, 2, dtype=torch.int32), None, None)
    assert request_of(*checked[:4], False).aligned == aligned
