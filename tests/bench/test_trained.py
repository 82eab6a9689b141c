"""Selections of a trained model: their file, the cases that come from it, and capturing them from a run of the example."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nsa_sel import compressed_attention, nsa_attention, selection_attention, use_backend
from nsa_sel.bench.core import cases, trained
from nsa_sel.bench.core.cases import layers_of, make_selection
from nsa_sel.bench.questions import save_selections, speed
from nsa_sel.bench.questions.text_parts import layer_with, text_parts
from nsa_sel.bench.tune import cost_fit
from nsa_sel.errors import ArgumentError, NsaSelError
from nsa_sel.selection import Selection
from tests.helpers.files import ROOT, load

S, G, N, BLOCK = 1024, 2, 4, 16
FACTS = {"step": 300, "passage_loss": 1.25, "device": "a GPU", "commit": "abc1234", "sizes": {"layers": 3}}


def blocks(seed: int, S: int = S) -> Tensor:
    """[S,G,N] int16 as a layer chooses them, neighbors alike: scores that last for 16 rows."""
    scores = torch.rand(1, -(-S // 16), G, -(-S // BLOCK), generator=torch.Generator().manual_seed(seed)).repeat_interleave(16, 1)[:, :S]
    return Selection.from_scores(scores, N, BLOCK).block_indices[0].short()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of bench/data, without files of trained models."""
    monkeypatch.setattr(trained, "FOLDER", tmp_path)
    trained._blocks.cache_clear()
    return tmp_path


@pytest.fixture
def file(folder: Path) -> Path:
    """Three layers over 1024 rows."""
    file = trained.file_of(S)
    file.write_bytes(trained.contents({layer: blocks(layer) for layer in range(3)}, BLOCK, FACTS))
    return file


# The file


@pytest.mark.usefixtures("file")
def test_layers_come_back_as_they_were_side_by_side() -> None:
    found = trained.trained_selection(S, "cpu", [2, 0]).validate()
    assert (found.block_size, found.disjoint) == (BLOCK, True)
    assert torch.equal(found.block_indices[0].short(), torch.cat((blocks(2), blocks(0)), 1))
    maps = torch.stack([blocks(layer)[:, group] for layer, group in ((0, 0), (1, 0), (1, 1), (2, 1))], 1)
    assert torch.equal(trained.trained_selection(S, "cpu").block_indices[0].short(), maps)
    assert trained.provenance(S).items() >= FACTS.items()
    sizes = {"context": S, "groups": G, "n": N, "block_size": BLOCK, "blocks": S // BLOCK, "layers": [0, 1, 2]}
    assert trained.provenance(S).items() >= sizes.items()


@pytest.mark.usefixtures("file")
def test_the_first_rows_are_the_selection_of_a_shorter_text() -> None:
    short = trained.trained_selection(100, "cpu", [1])
    assert torch.equal(short.block_indices[0].short(), blocks(1)[:100])
    position = torch.arange(100)[:, None, None]
    assert bool((short.block_indices[0] * BLOCK <= position).all())


@pytest.mark.parametrize("S", [1, 15, 77])
def test_any_rows_are_kept_exactly(folder: Path, S: int) -> None:
    """Fewer blocks than n, a length that is no multiple of 8, and rows that have nothing in common with the row before."""
    rows = torch.full((S, G, N), -1, dtype=torch.int16)
    rows[1::2, 1, 0] = (S - 1) // BLOCK
    trained.file_of(S).write_bytes(trained.contents({3: blocks(0, S), 7: rows}, BLOCK, {}))
    found = trained.trained_selection(S, "cpu", [7, 3]).block_indices[0].short()
    assert torch.equal(found, torch.cat((rows, blocks(0, S)), 1))


def test_errors_say_what_to_do(file: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^layers is \[1, 5\]; allowed: some of \[0, 1, 2\], the layers in trained_1024.npz"):
        trained.trained_selection(S, "cpu", [1, 5])
    with pytest.raises(NsaSelError, match=r"no selections of a trained model over 1025 tokens. Remedy: train .*questions.save_selections"):
        trained.trained_selection(S + 1, "cpu")
    with pytest.raises(NsaSelError, match=r"^bench/data has no trained_2048.npz. Remedy: train"):
        trained.provenance(2048)


# Cases


@pytest.mark.usefixtures("folder")
def test_without_files_there_are_no_cases() -> None:
    assert trained.contexts() == cases.trained_cases() == cases.trained_layer_cases() == []
    assert cases.text_case(32768, 16) is None
    assert cases.text_case(8192, 16) == cases.prefill("real", 8192, 16)
    assert text_parts(32768, 16, tuple, tuple) == {}
    assert set(text_parts(8192, 16, tuple, tuple)) == {"select of text", "layer of text"}


@pytest.mark.usefixtures("file")
def test_cases_are_those_of_the_files(folder: Path) -> None:
    (folder / "trained_by_hand.npz").touch()
    trained.file_of(128).write_bytes(trained.contents({0: blocks(0, 128)}, BLOCK, FACTS))  # of a test: too short for a case
    assert trained.contexts() == [128, S]
    found = cases.trained_cases()
    assert [case.case for case in found] == ["trained-1k-h16", "trained-1k-h4", "trained-1k-h1"]
    alone = cases.trained_layer_cases()
    assert [layers_of(case.case) for case in alone] == [[layer] for layer in range(3) for _ in range(3)]
    for case in (*found, *alone):
        selection = make_selection(case, "cpu", seed=5)
        assert selection.ranges.shape == (case.B, case.S, case.G, case.n, 2)
        assert selection.block_size == case.block
        assert cost_fit.sharing_of(case) == tuple(round(ratio, 2) for ratio in selection.measure(S).sharing or ())
    suites = speed.suites_of("trained,trained-layers", False, "cuda")
    assert [job.case for job in speed.jobs(suites, speed.named("triton-tile,dense-cudnn"), "")] == [*found, *alone]


# The layer


def test_the_layer_of_text_is_the_layer_but_for_its_blocks() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    S, h, D = 512, 2, 16
    C = (S - 32) // 16 + 1
    keys = [random(1, G, count, D) for count in (C, C, S, S, S, S)]
    inputs = random(1, S, G, h, D), *keys, random(1, S, G, h, 3).sigmoid()
    own = compressed_attention(*inputs[:3], n=N)[1].block_indices
    do = torch.randn(1, S, G, h, D, generator=generator)
    leaves = [x for x in inputs if x.is_leaf]
    other = own.clamp(max=0)  # block 0 alone
    other[..., 1:] = -1
    with use_backend("sdpa-packed"):
        found, expected = layer_with(own, *inputs), nsa_attention(*inputs, window=512, n=N)
        assert not torch.equal(layer_with(other, *inputs), expected)
    assert torch.equal(found, expected)
    assert all(map(torch.equal, *(torch.autograd.grad(o, leaves, do, retain_graph=True) for o in (found, expected))))


def test_the_parts_of_text_attend_to_what_the_model_chose() -> None:
    """256 rows of SmolLM2's; the gates let the other branches through nowhere."""
    S, h, D = 256, 1, 16
    q, k, v = torch.randn(1, S, 4, h, D), torch.randn(1, 4, S, D), torch.randn(1, 4, S, D)
    gates = torch.tensor([0.0, 1.0, 0.0]).expand(1, S, 4, h, 3)
    C = (S - 32) // 16 + 1
    parts = text_parts(S, h, lambda: (q, k, v), lambda: (q, k[:, :, :C], v[:, :, :C], k, v, k, v, gates))
    with use_backend("sdpa-packed"):
        select, layer = (parts[name]()[0]() for name in ("select of text", "layer of text"))
        expected = selection_attention(q, k, v, cases.real_selection(4, "cpu", S))
    assert torch.equal(select, expected)
    assert torch.equal(layer, expected)


# Capturing


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the example of one step on a CPU, with two layers."""
    folder = tmp_path_factory.mktemp("run")
    example = load("train_nsa_lm")
    example.train(folder, example.TINY, "sdpa-packed", torch.device("cpu"), ROOT / "docs", 1, 1, 1, graph=False)
    return folder


def test_a_run_is_captured_with_its_provenance(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [save_selections.__file__, str(run)])
    content, facts = save_selections.saved(run, torch.device("cpu"), save_selections.MOST_BYTES, "sdpa-packed")
    trained.file_of(128).write_bytes(content)
    assert trained.provenance(128)["layers"] == [0, 1]
    found = trained.trained_selection(128, "cpu").validate()
    assert found.block_indices.shape == (1, 128, 4, 4)
    position = torch.arange(128)[:, None]
    for forced in (torch.zeros_like(position), position // 16, (position // 16 - 1).clamp(min=0)):
        assert bool((found.block_indices[0] == forced[:, None]).any(-1).all())
    log = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    known = {
        "step": 1, "training_loss": log[0]["loss"], "held_out_loss": log[0]["held_out_loss"], "model": "examples/train_nsa_lm.py",
        "command": f"python -m nsa_sel.bench.questions.save_selections {run.name}",
    }  # fmt: skip
    assert facts.items() >= known.items()
    assert all(facts[name] for name in ("device", "torch", "python", "text_sha256", "passage_sha256", "text_bytes"))
    assert facts["sizes"]["context"] == 128
    assert facts["training"]["device"] == log[0]["device"]
    assert 0 < facts["passage_loss"] < 6


def test_what_is_captured_is_what_the_layers_choose(run: Path) -> None:
    """A model whose one layer is asked by hand for its compressed branch."""
    example = load("train_nsa_lm")
    torch.manual_seed(0)
    model = example.LanguageModel(replace(example.TINY, layers=1), "sdpa-packed")
    data = torch.randint(256, (1, 129))
    (found,), _ = save_selections.chosen_blocks(model, data, torch.device("cpu"))
    (block,) = model.blocks
    layer, x = block.attention, block.norms[0](model.embed(data[:, :-1]))
    q = layer.q(x).unflatten(-1, (2, 2, 16))
    k = layer.kv(x).unflatten(-1, (2, 6 * 16))[..., :16]
    with torch.no_grad():
        _, selection = compressed_attention(q, layer.compress_k(k), layer.compress_k(k), **layer.rule._asdict())
    assert torch.equal(found, selection.block_indices[0].short())
