"""Check the benches' questions on a CPU or by made-up rows: host time, claims of the README, parts of a layer, texts of trained models."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nsa_sel import choose_blocks, use_backend
from nsa_sel.bench import headline
from nsa_sel.bench.core import contenders, store, variants
from nsa_sel.bench.core.cases import Case, make_selection, prefill, split_cache, text_case
from nsa_sel.bench.core.contenders import DENSE
from nsa_sel.bench.core.session import wanted
from nsa_sel.bench.questions import choosing_steps, host_time, indexer_loss, layer_parts, speed
from nsa_sel.bench.questions.host_time import CHOSEN, COMPILED, NOTHING, STEP
from nsa_sel.cli.app import app
from nsa_sel.errors import NsaSelError
from tests.helpers.files import table_lines

# Host time


def test_host_time_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda work, fullgraph: work)  # takes a minute
    out, names = tmp_path / "overhead.jsonl", (NOTHING, CHOSEN, "numba")
    threads, every = torch.get_num_threads(), (*names, host_time.DENSE)
    host_time.main(out, rounds=2, calls=2, device="cpu", backends=",".join(every), S=70, layers=2)
    torch.set_num_threads(threads)
    rows = store.read(out)
    assert {(row["backend"], row["direction"]) for row in rows} == {(name, way) for name in every for way in ("fwd", "fwd+bwd")}
    steps = {(row["backend"], row["part"]) for row in rows if row["part"] in (STEP, COMPILED)}
    assert steps == {(name, part) for name in (CHOSEN, host_time.DENSE) for part in (STEP, COMPILED)}
    assert all(row["device"] and row["threads"] == 1 and row["command"] and row["S"] == 70 for row in rows)
    assert "beyond the backend" in capsys.readouterr().out
    assert {(name, "further call, new") for name in names} <= {(row["backend"], row["part"]) for row in rows}


# The README's claims


def times(ms: float) -> dict[str, float]:
    return {"ms_median": ms, "ms_p20": 0.9 * ms, "ms_p80": 1.1 * ms}


def test_every_claim_is_measured_beside_what_it_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a GPU where everything else takes 100 ms and 10 GiB, layers 10 ms and 1 GiB and the calls 200 ms, and where Qwen3.8
    fails.
    """

    def released(model: str, make: Any, ways: list[str], rep: float, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for way in ways:
            row = {**times(10), "peak_gib": 1.0} if way == "nsa-sel" else {**times(100), "peak_gib": 10.0}
            failed = {"error": "out of memory"} if way == "transformers" and "128k" in facts["case"] else row
            if model == "qwen3.8":
                raise RuntimeError("no such layer")
            yield {"model": model, "way": way, **facts, **failed}

    def layer(name: str, rep: float, directions: tuple[str, ...]) -> list[dict[str, Any]]:
        return [{"direction": direction, **times(100 if name == "dense" else 10)} for direction in directions]

    def calls(job: Any, rows: list[dict[str, Any]], device: str, tell: Any) -> Iterator[dict[str, Any]]:
        yield from ({**row, **times(100 if row["backend"] == DENSE else 200)} for row in rows)

    monkeypatch.setattr(headline.released_models, "measure", released)
    monkeypatch.setattr(headline.layer_parts, "parts", lambda S, h: {name: lambda name=name: name for name in ("layer", "dense")})
    monkeypatch.setattr(headline.layer_parts, "measure", layer)
    monkeypatch.setattr(headline, "measured_rows", calls)
    monkeypatch.setattr(headline, "need_gpu", lambda program: None)
    monkeypatch.setattr(headline.store, "stamp", lambda: {"device": "NVIDIA Test"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
    told = io.StringIO()
    text = headline.headline(tmp_path / "rows", Console(file=told, soft_wrap=True))
    assert "README: NVIDIA H200; here: NVIDIA Test" in text
    lines = {row["claim"]: row for row in table_lines(text.split("\n\n")[1])}
    nsa = lines["NSA layer, 8k tokens, forward + backward: dense attention"]
    assert (nsa["here"], nsa["20th to 80th"], nsa["verdict"]) == ("10.00x", "8.18 to 12.22", "PASS")
    assert lines["MiniMax-M3 layer, prefill of 128k tokens: dense attention"]["here"] == "10.00x"
    assert lines["MiniMax-M3 layer, prefill of 16k tokens, memory: its library"]["here"] == "10.00x"
    decoding = "MiniMax-M3's selected blocks alone, decoding, 64 sequences of 32k keys"
    call = lines[f"{decoding}: dense attention"]
    assert (call["here"], call["verdict"]) == ("0.50x", "-97%")
    unmeasured = {what for what, line in lines.items() if line["verdict"] == "not measured"}
    qwen = {f"Qwen3.8 layer, prefill of 16k tokens{kind}: its library" for kind in ("", ", memory")}
    assert (
        unmeasured
        == {f"{what}: its library" for what in (decoding, *(f"NSA layer, {k}k tokens, forward + backward" for k in (8, 32)))} | qwen
    )
    # Rows and verdicts come as they are measured
    said = [line.partition(" s  ")[2] for line in told.getvalue().splitlines()]
    assert said[:3] == [
        f"MiniMax-M3, prefill of 16k tokens, {way}: {ms} ms" for way, ms in (("transformers", 100), ("dense", 100), ("nsa-sel", 10))
    ]
    assert said[3:5] == [
        "-22%: MiniMax-M3 layer, prefill of 16k tokens: its library",
        "-89%: MiniMax-M3 layer, prefill of 16k tokens, memory: its library",
    ]
    assert "MiniMax-M3, prefill of 128k tokens, transformers: out of memory" in said
    assert "released_models was left out: RuntimeError: no such layer" in said
    assert [len(store.read(tmp_path / "rows" / f"{part}.jsonl")) for part in headline.PARTS] == [9, 4, 3]


def test_headline_refuses_other_flags_and_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for flags, words in (([], "is on a machine without a usable GPU"), (["--N", "8"], "--N is given; allowed: left out with --headline.")):
        refused = CliRunner().invoke(app, ["bench", "--headline", "--out", str(tmp_path / "rows"), *flags])
        assert refused.exit_code == 2
        assert words in " ".join(refused.output.split())


# Parts of a layer


def test_parts_make_their_own_inputs() -> None:
    parts = layer_parts.parts(256, 2, "cpu", torch.float32)
    with use_backend("sdpa-packed"):
        for name in ("choose", "from_scores", "select", "window", "gate", "layer", "select of text", "layer of text", "dense"):
            call, inputs = parts[name]()
            assert call().shape[:2] == (1, 256)
            assert all(x.requires_grad for x in inputs)


# The loss of an indexer


def test_the_loss_of_an_indexer_is_timed_beside_attention() -> None:
    case = Case("models-minimax-m3-random-0k", "random", 1, 48, 48, 2, 2, 16, 16, 2, 16, "float32")
    rows = list(indexer_loss.measure(case, list(indexer_loss.TITLES), 1, "cpu"))
    assert [(row["part"], row["direction"]) for row in rows] == [
        ("sparse", "fwd+bwd"), ("selected", "bwd"), ("warm-up", "fwd+bwd"), ("dense", "bwd"),
    ]  # fmt: skip
    assert [row["backend"] for row in rows[::2]] == 2 * ["loss-torch"]
    assert all(row["error_loss"] < 1e-5 and row["error_dq"] < 1e-5 for row in rows[::2])
    assert indexer_loss.table(rows).count("|") == 3 * 7


# Texts of trained models


@pytest.mark.parametrize(("kind", "S"), [("trained", 100), ("trained", 32768), ("indexer", 8192), ("indexer", 32768)])
def test_a_trained_models_rows_choose_the_first_and_the_nearest_blocks(kind: str, S: int) -> None:
    """Bits that are read in another order give other blocks: each row has all blocks that it sees, or 16, its own among them."""
    selection = make_selection(prefill(kind, S, 1), "cpu")
    assert (selection.validate().block_size, selection.ranges.shape) == (64, (1, S, 4, 16, 2))
    blocks, own = selection.block_indices[0], torch.arange(S)[:, None] // 64
    assert torch.equal((blocks >= 0).sum(-1), (own + 1).clamp(max=16).expand(S, 4))
    for chosen in (own, torch.zeros_like(own), (own - 1).clamp(min=0))[: 3 if kind == "trained" else 1]:
        assert bool((blocks == chosen[..., None]).any(-1).all())
    assert text_case(65536, 16) == prefill("trained", 65536, 16)
    assert text_case(65537, 16) is None
    with pytest.raises(NsaSelError, match="no selections of a trained model over 65537 tokens"):
        make_selection(prefill("trained", 65537, 1), "cpu")


# Choosing for one new token


def test_steps_are_measured_over_caches_in_all_orders_of_memory() -> None:
    (job,) = speed.jobs({"steps": speed.SUITES["steps"]}, (contenders.ours("cupy-cuda"), contenders.ours("sdpa-packed")), "m3-decode-B1-")
    found = {row["backend"] for row in wanted(job)}
    assert {split_cache(x) for x in found} == {("cupy-cuda", cache) for cache in (None, *variants.LAYOUTS)}


@pytest.mark.parametrize("page", [8, 64])
def test_pages_of_index_keys_hold_the_keys_of_their_sequences(page: int) -> None:
    k = torch.randn(3, 128, 1, choosing_steps.D)
    pages, block_table = choosing_steps.in_pages(k, page)
    assert torch.equal(pages[block_table.long()].flatten(1, 2), k)


@pytest.mark.parametrize(("name", "S"), [("m3", 3000), ("qsa", 4099)])
def test_choices_are_checked_against_scores_in_float64(name: str, S: int) -> None:
    model = choosing_steps.MODELS[name]
    q, k = torch.randn(1, S, model.G, model.h, choosing_steps.D), torch.randn(1, 1, S // model.stride, choosing_steps.D)
    chosen = choose_blocks(q, k, S_kv=S, backend="choose-torch", **model.options).block_indices
    rows = torch.tensor([0, 5, 127, 128, S - 2, S - 1])
    keys = torch.nn.functional.pad(k[0], (0, 0, 0, -k.shape[2] % (model.options["block_size"] // model.stride)))
    assert torch.equal(choosing_steps.best_blocks(model, q[0, rows], keys, rows), chosen[0, rows].long().sort(-1).values)
