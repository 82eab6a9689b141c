"""A backend of another package touches nothing but its module and its entry point: it is picked, tested, benched and listed.

The backend is the example of CONTRIBUTING.md, installed here as a package whose metadata declares the entry point.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from nsa_sel import Selection, decisions, selection_attention, selection_attention_with_kvcache
from nsa_sel.bench.core import contenders, session
from nsa_sel.bench.core.cases import Case
from nsa_sel.bench.core.timing import Timing
from nsa_sel.cli.app import app
from nsa_sel.core import registry, run
from nsa_sel.core.call import Call
from tests.contract import attend as contract
from tests.helpers.cases import make_qkv
from tests.helpers.files import ROOT

ENTRY_POINTS = '[project.entry-points."nsa_sel.backends"]\n'


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_registry: None) -> Iterator[None]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (tmp_path / "loop_backend.py").write_text(text.split("```python\n# loop_backend.py\n")[1].split("```")[0])
    entry = text.split(ENTRY_POINTS)[1].split("```")[0].replace('"', "")
    metadata = tmp_path / "loop_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: loop-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{registry.ENTRY_POINT_GROUP}]\n{entry}")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("loop_backend", None)


def test_the_policy_picks_a_preferred_backend_of_another_package(configure: Callable[[str], Path]) -> None:
    configure("provenance: x\nruntime: {prefer_forward: [loop], prefer_backward: [loop]}\n")
    q, k, v = make_qkv(S=4, S_kv=16, requires_grad=True)
    selection_attention(q, k, v, Selection(torch.tensor([0, 9]).expand(1, 4, 1, 1, 2))).sum().backward()
    decision = decisions()[-1]
    assert (decision.forward, decision.backward, decision.override) == ("loop", "loop", None)


@pytest.mark.parametrize("behavior", ["edges", "promised", "positions", "reuse", "poison", "packed", "dtype", "layouts"])
def test_it_keeps_the_contract(behavior: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = next(lane for lane in contract.lanes("cpu") if lane.name == "loop")
    whats = contract.shapes_of(behavior, lane) if behavior in contract.SHAPED else contract.PLAIN[behavior][1](lane)
    contract.run(behavior, lane, whats[0], monkeypatch)


def test_the_bench_writes_a_row_of_it_beside_ours(tmp_path: Path) -> None:
    case = Case("tiny", "random", 1, 32, 32, 1, 2, 16, 16, 2, 8, "float32")
    job = session.Job(case, tuple(contenders.named("loop,sdpa-packed")), ("fwd", "bwd"), rows=4, timing=Timing(calls=1, warmup=1))
    rows = session.run([job], tmp_path / "rows.jsonl", "cpu", Console(quiet=True))
    assert [(row["backend"], row["direction"]) for row in rows] == [(n, d) for n in ("loop", "sdpa-packed") for d in ("fwd", "bwd")]
    assert all(row["ms_median"] > 0 and row["mae"] < 1e-6 for row in rows)


def test_doctor_lists_it() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "loop" in result.output
    assert "rows one by one" in result.output


@pytest.mark.parametrize(("path", "workspace"), [("loop_backend", 1 << 30), ("nsa_sel.loop", 64)], ids=["others", "in parts"])
def test_its_launches_over_caches_are_not_replayed(
    path: str, workspace: int, configure: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No recorder sees them: a replay would return memory that nothing has written. Nor is a call of ours that needs more than
    the workspace at once."""
    configure(f"provenance: x\nruntime: {{workspace_bytes: {workspace}}}\n")
    monkeypatch.setitem(sys.modules, path, registry.load("loop"))
    monkeypatch.setattr(run, "_on_gpu", lambda x: True)
    monkeypatch.setattr(run, "_stream_outside_capture", lambda q: 0)
    registry._every()["loop"] = msgspec.structs.replace(registry.backends()["loop"], reads_caches=True, path=path)
    registry.backends.cache_clear()
    calls = []

    def forward(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(call)
        return torch.empty(call.q.shape, dtype=call.q.dtype), torch.empty(call.q.shape[:-1])

    monkeypatch.setattr(registry.load("loop"), "forward", forward)
    for _ in range(4):
        q, k, v = torch.ones(2, 1, 1, 16), torch.ones(2, 16, 1, 16), torch.ones(2, 16, 1, 16)
        selection = Selection.from_blocks(torch.zeros(2, 1, 1, 1, dtype=torch.int32), 16)
        selection_attention_with_kvcache(q, k, v, selection, torch.tensor([9, 16]), backend="loop")
    assert len(calls) == 4
