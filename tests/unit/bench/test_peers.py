"""Check `nsa-sel bench --peer NAME=module:function` by stand-ins, and the peers that PyTorch provides, on a CPU."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from nsa_sel import Selection
from nsa_sel.bench import command
from nsa_sel.bench.core import session, store
from nsa_sel.bench.core.cases import Case, span_case
from nsa_sel.bench.core.contenders import dense_causal_sdpa, make_problem
from nsa_sel.bench.core.peers import lacks, peers
from nsa_sel.bench.core.session import able, lacks_gradients, parity, sample
from nsa_sel.bench.questions import speed
from nsa_sel.cli.app import app
from nsa_sel.testing import dense_attention
from tests.helpers.files import ROOT

OTHERS = """
from my_peer import attend

NUMBER = 3

def forward(*args):
    return attend(*args).detach()

def sees_the_future(q, k, v, *rest):
    return attend(q, k, v, *rest) + v.mean(2)[:, None, :, None]

def flat(*args):
    return attend(*args).flatten(2, 3)

def refuses(*args):
    raise ValueError("takes 16 heads alone")

def prepared(q, k, v, indices, size, scale, mask):
    return attend(q, k, v, indices, size, scale) * mask

prepared.prepare = lambda k, v, indices, size: (indices >= 0).any(-1)[..., None, None]
"""


@pytest.fixture
def adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write docs/performance.md's adapter and others to the current folder; quick runs have two tiny cases and no usual
    peers.
    """
    (documented,) = re.findall(
        r"^```python\n(# my_peer\.py\n.*?)^```$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (tmp_path / "my_peer.py").write_text(documented)
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("my_peer", "others"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    cases = [
        Case("tiny", "random", 1, 64, 64, 2, 2, 16, 8, 2, 16, "bfloat16"),
        Case("one", "random", 2, 1, 64, 2, 2, 16, 16, 2, 16, "bfloat16"),
    ]
    monkeypatch.setattr(speed, "QUICK", speed.QUICK._replace(cases=cases))
    monkeypatch.setattr(command, "every_peer", tuple)
    return tmp_path


def bench(*peers: str) -> Any:
    flags = [part for peer in peers for part in ("--peer", peer)]
    return CliRunner().invoke(app, ["bench", "--quick", "--backends", "sdpa-packed", "--out", "out", *flags])


@pytest.mark.usefixtures("instant")
def test_the_documented_adapter_is_held_to_the_reference_and_timed_in_every_direction(adapters: Path) -> None:
    result = bench("mine=my_peer:attend")
    assert result.exit_code == 0, result.output
    found = {(row["backend"], row["direction"]): row for row in store.read(adapters / "out" / "peers.jsonl")}
    assert set(found) == {(name, way) for name in ("sdpa-packed", "mine") for way in ("fwd", "bwd", "fwd+bwd", "decode")}
    assert all(row["mae"] < 1e-6 and row["selection"] == "new" for row in found.values())
    mine = [row for (name, _), row in found.items() if name == "mine"]
    assert all("wrong" not in row and row["computes"] == "selection" and row["prepare_ms"] >= 0 for row in mine)


@pytest.mark.usefixtures("instant")
def test_given_peers_without_gradients_wrong_ones_and_those_that_refuse(adapters: Path) -> None:
    result = bench("forward=others:forward", "future=others:sees_the_future", "flat=others:flat", "picky=others:refuses")
    assert result.exit_code == 0, result.output
    found = {(row["backend"], row["direction"]): row for row in store.read(adapters / "out" / "peers.jsonl")}
    assert {way for name, way in found if name == "forward"} == {"fwd", "decode"}
    assert found["forward", "fwd"]["mae"] < 1e-6
    assert "tiny forward: its forward alone is measured: RuntimeError: element 0 of tensors does not require grad" in result.stderr
    assert "dv is not 0 at keys that no row with a gradient attends to" in found["future", "fwd"]["wrong"]
    assert "it is not the attention of this selection" in found["future", "decode"]["wrong"]
    assert not any(name in ("flat", "picky") for name, _ in found)
    assert "tiny flat: ArgumentError: --peer is 'flat=others:flat', which returned [1, 64, 4, 8]" in result.stderr
    assert "one picky: ValueError: takes 16 heads alone" in result.stderr


@pytest.mark.parametrize(
    ("peers", "words"),
    [
        (["mine=my_peer.attend"], "--peer is 'mine=my_peer.attend'; allowed: NAME=module:function"),
        (["numba=my_peer:attend"], "--peer is 'numba=my_peer:attend'; allowed: a name other than"),
        (["mine=no_such_peer:attend"], "(ModuleNotFoundError: No module named 'no_such_peer'); allowed: a function that can be imported"),
        (["mine=others:NUMBER"], "--peer is 'mine=others:NUMBER', a int; allowed: a function."),
    ],
)
def test_a_bad_flag_is_refused_before_the_first_measurement(
    adapters: Path, monkeypatch: pytest.MonkeyPatch, peers: list[str], words: str
) -> None:
    monkeypatch.setattr(session, "measured_rows", None)  # nothing is measured
    refused = bench(*peers)
    assert refused.exit_code == 2, refused.output
    said = " ".join(refused.output.split())
    assert words in said
    assert said.count("Remedy: ") == 1
    assert not (adapters / "out").exists()


# Peers in PyTorch


@pytest.mark.parametrize(
    "case",
    [
        Case("blocks", "random", 2, 48, 96, 2, 3, 16, 8, 3, 16, "float32"),
        Case("decode", "random", 2, 1, 96, 2, 3, 16, 8, 3, 16, "float32"),
        span_case("mixed", 9, 2, 16, 8, 40, "float32"),
    ],
    ids=lambda case: case.case,
)
@pytest.mark.parametrize("name", ["flex-attention", "masked-sdpa", "dense-sdpa"])
def test_peers_compute_what_they_say(case: Case, name: str) -> None:
    (peer,) = able([peer for peer in peers() if peer.name == name], "cpu", lambda _: None)
    problem = make_problem(case, "cpu")
    exact, call = sample(case, problem, 8, peer.every_key), peer.prepare(problem).call
    forward_only = lacks_gradients(call, problem)
    assert (forward_only is not None) == (name == "flex-attention")
    mae, of_gradients = parity(call, problem, exact._replace(gradients=()) if forward_only else exact)
    assert mae < 1e-6
    assert of_gradients is None or of_gradients < 1e-5


# Peers from other packages, as stand-ins with the same arguments


def select(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor, starts: Tensor, *_: Any, block_size: int, **more: Any) -> Any:
    """Stand in for cuDNN's NSA: rows [T,heads,D] of sequences end to end, the first `counts` of each row's indices."""
    assert more["is_causal"]
    B, G = len(starts) - 1, k.shape[1]
    kept = torch.where(torch.arange(indices.shape[-1]) < counts.unsqueeze(-1), indices, -1).unflatten(0, (B, -1))
    q, k, v = (x.unflatten(0, (B, -1)) for x in (q.unflatten(1, (G, -1)), k, v))
    ranges = Selection.from_blocks(kept, block_size).ranges
    o, _ = dense_attention(q, k.transpose(1, 2), v.transpose(1, 2), ranges, more["scale_softmax"])
    return {"o_tensor": o.flatten(0, 1).flatten(1, 2)}


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, None]:
    """Stand in for FlashAttention-4: [B,S,heads,D], a causal mask that ends at the last key."""
    assert causal
    return dense_causal_sdpa(q.unflatten(2, (k.shape[2], -1)), k.transpose(1, 2), v.transpose(1, 2)).flatten(2, 3), None


class Decode:
    """Stand in for FlashInfer's paged decoding: a sequence of one token for each row, over pages [pages,size,1,D]."""

    def __init__(self, workspace: Tensor, use_tensor_cores: bool) -> None:
        assert use_tensor_cores

    def plan(self, ends: Tensor, pages: Tensor, of_last: Tensor, heads: int, groups: int, D: int, size: int, q_data_type: Any) -> None:
        keys = (pages.unsqueeze(1) * size + torch.arange(size)).split(ends.diff().tolist())
        self.keys = [of_row.flatten()[: (len(of_row) - 1) * size + last] for of_row, last in zip(keys, of_last, strict=True)]

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        k, v = (x.flatten(0, 2) for x in cache)
        return torch.stack([(x @ k[keys].T * x.shape[-1] ** -0.5).softmax(-1) @ v[keys] for x, keys in zip(q, self.keys, strict=True)])


STAND_INS = {
    "flashinfer": ("flashinfer", {"BatchDecodeWithPagedKVCacheWrapper": Decode}),
    "cudnn-nsa": ("cudnn", {"NSA": SimpleNamespace(selection_attention_wrapper=select)}),
    "fa4": ("flash_attn.cute", {"flash_attn_func": dense}),
}


def paged(q: Tensor, cache: Tensor, indices: Tensor, table: Tensor, lengths: Tensor, G: int, scale: float, o: Tensor) -> None:
    """Stand in for vLLM's kernels, over pages [pages,G,128,2*D]: rows [tokens,heads,D], indices [G,tokens,n]."""
    B, S_kv = len(table), int(lengths[0])
    k, v = cache[table.long()].transpose(1, 2).flatten(2, 3)[:, :, :S_kv].chunk(2, -1)  # [B,G,S_kv,D]
    ranges = Selection.from_blocks(indices.permute(1, 2, 0).unflatten(0, (B, -1)).transpose(2, 3), cache.shape[2]).ranges
    o.copy_(dense_attention(q.unflatten(1, (G, -1)).unflatten(0, (B, -1)), k, v, ranges, scale)[0].flatten(2, 3).flatten(0, 1))


def test_the_adapter_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def prefill(
        q: Tensor, cache: Tensor, indices: Tensor, table: Tensor, starts: Tensor, lengths: Tensor, prefixes: Tensor, most: int,
        *rest: Any,
    ) -> None:  # fmt: skip
        assert starts.diff().tolist() == [most, most]
        assert (lengths - prefixes).tolist() == [most, most]
        paged(q, cache, indices, table, lengths, *rest)

    kernels = {"minimax_m3_sparse_attn": prefill, "minimax_m3_sparse_attn_decode": lambda *given: paged(*given[:-1])}
    name = "vllm.models.minimax_m3.common.ops.sparse_attn"
    for length in range(1, 7):
        monkeypatch.setitem(sys.modules, ".".join(name.split(".")[:length]), SimpleNamespace(**kernels))
    attend = store.example("engine_kernels").vllm
    for S in (1, 40):
        problem = make_problem(Case("m3", "random", 2, S, 512, 2, 3, 16, 16, 3, 128, "float32"), "cpu")
        indices = problem.selection.block_indices
        o = attend(*problem[1:4], indices, 128, 0.25, attend.prepare(problem.k, problem.v, indices, 128))
        torch.testing.assert_close(o, dense_attention(*problem[1:4], problem.selection.ranges, 0.25)[0])


@pytest.mark.parametrize("name", STAND_INS)
def test_peers_of_other_packages_get_what_the_case_selects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, members = STAND_INS[name]
    for parent in {module.partition(".")[0], module}:
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(**members))
    (peer,) = [peer for peer in peers() if peer.name == name]
    case = Case("blocks", "random", 2, 96, 96, 2, 3, 16, 16, 3, 16, "float32")
    problem = make_problem(case, "cpu")
    exact = sample(case, problem, 8, peer.every_key)
    assert parity(peer.prepare(problem).call, problem, exact, strict=False)[0] < 1e-6
    assert peer.refuses(Case("spans", "few", 1, 1, 64, 1, 20, 96, 64, 1, 0)) is not None


def test_a_peer_says_how_to_install_it() -> None:
    assert lacks("no_such_module", "some-package")("cuda") == "not installed: pip install some-package"
    assert lacks("json", "some-package")("cpu") == "needs a GPU"
    assert "(ModuleNotFoundError: No module named 'json.nothing'): pip install -U p" in str(lacks("json.nothing", "p")("cuda"))
    assert lacks("json.decoder", "some-package")("cuda") is None


@pytest.mark.usefixtures("instant")
def test_named_peers_alone_are_measured(adapters: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "every_peer", peers)
    names = ["sdpa-packed", "masked-sdpa", "mine"]
    flags = ["--peers", "--peer", "mine=others:prepared", "--backends", ",".join(names), "--only", "tiny"]
    result = CliRunner().invoke(app, ["bench", "--quick", "--out", "out", *flags])
    assert result.exit_code == 0, result.output
    rows = store.read(adapters / "out" / "peers.jsonl")
    assert list(dict.fromkeys(row["backend"] for row in rows)) == names
    assert {row["selection"] for row in rows if row["backend"] == "mine"} == {"kept"}
