"""Check when tuned kernel configs apply, what of them reaches decisions and kernels, and what is said when they do not."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from nsa_sel import Decision, Selection, decisions, describe, explain_request, reset, selection_attention
from nsa_sel.bench.tune import kernel_configs
from nsa_sel.bench.tune.tuned_file import Run
from nsa_sel.core.call import device_info
from nsa_sel.core.request import DeviceInfo
from nsa_sel.errors import ConfigError
from nsa_sel.settings import tuned
from nsa_sel.settings.config import forget_settings, settings_for
from nsa_sel.settings.schema import Direction, KernelConfig
from nsa_sel.settings.tuned import stamp_of
from tests.helpers.cases import make_qkv, make_spans
from tests.helpers.files import OF_THE_FILE, OF_THE_FOLDER
from tests.helpers.policy_cases import H100, H200, SHORT, replace
from tests.helpers.tune_cases import FORWARD, OTHER, key, one_problem_job, result, times, write

pytestmark = pytest.mark.usefixtures("tuned_folder")
COMMITTED = settings_for(H200).kernels[FORWARD]


def launch(request: Any = SHORT, device: DeviceInfo = H200, kernel: str = FORWARD) -> KernelConfig:
    return explain_request(request, device).settings.kernel(kernel)


# Tuned results in decisions


def test_a_tuned_launch_is_used_and_the_decision_names_it() -> None:
    before = explain_request(SHORT, H200)
    write(result(), result("triton-group/dkdv", KernelConfig(32, 8, 1, 64), key("backward")), result("triton-tile/forward", None))
    tuned.forget()
    assert launch() == OTHER  # the decision from before is not remembered
    decision = explain_request(replace(SHORT, needs_grad=True), H200, "triton-group")
    assert decision.settings.kernels[FORWARD] == OTHER
    assert decision.settings.kernels["triton-group/dkdv"].num_warps == 8
    unchanged = {name: config for name, config in before.settings.kernels.items() if name not in (FORWARD, "triton-group/dkdv")}
    assert unchanged.items() <= decision.settings.kernels.items()
    source = decision.settings.sources[f"kernels.{FORWARD}"]
    assert source == decision.settings.tuned
    assert source.startswith("tuned: NVIDIA-H200-sm90-")
    assert decision.settings.fingerprint != before.settings.fingerprint
    assert f"kernel    {FORWARD}:tma-L32-R16-w2-s3 ({source})" in describe(decision)
    assert "triton-tile" not in "".join(line for line in describe(decision).splitlines() if line.startswith("kernel"))
    assert Decision.from_json(decision.to_json()).replay() == ()
    assert str(Path.home()) not in decision.to_json()


@pytest.mark.parametrize(
    ("changes", "way", "holds"),
    [
        *(({field: size}, "forward", True) for field, size in (("h", 9), ("max_length", 513), ("B", 3), ("G", 7), ("n", 5))),
        *(({field: size}, "forward", False) for field, size in (("h", 8), ("h", 17), ("max_length", 512), ("Dk", 64), ("Dv", 64))),
        ({"dtype": "float16"}, "forward", False), ({"S": 1}, "forward", False), ({"S": 1}, "decode", True), ({}, "decode", False),
    ],
)  # fmt: skip
def test_a_kernel_config_holds_for_its_key_alone(changes: dict[str, Any], way: Direction, holds: bool) -> None:
    write(result(of=key(way)))
    assert launch(replace(SHORT, **changes)) == (OTHER if holds else COMMITTED)


@pytest.mark.parametrize("off", ["environment", "file"])
def test_tuning_can_be_ignored(monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path], off: str) -> None:
    write(result())
    assert launch() == OTHER
    if off == "environment":
        monkeypatch.setenv("NSA_SEL_AUTOTUNE", "off")
    else:
        configure("provenance: mine\nruntime: {autotune: off}\n")
    assert launch() == COMMITTED
    assert explain_request(SHORT, H200).settings.tuned is None


def test_environment_and_configuration_override_tuning(monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path]) -> None:
    write(result(), result("triton-group/dkdv", KernelConfig(32, 8, 1, 64), key("backward")))
    configure(f"provenance: mine\nkernels:\n  {FORWARD}: {{loads: tma, block_l: 16, num_warps: 1, num_stages: 1}}\n")
    assert launch().block_l == 16
    assert launch(kernel="triton-group/dkdv").num_warps == 8
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_L", "128")
    monkeypatch.setenv("NSA_SEL_TRITON_DB", "1")
    assert (launch(kernel="triton-group/dkdv").block_l, launch(kernel="triton-group/dkdv").num_stages) == (128, 2)


def test_the_launch_reaches_the_kernel(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    here = device_info(torch.device("cpu"))
    assert here.triton_interpret
    small = {"Dk": 16, "Dv": 16, "h": 2, "L": 64, "dtype": "float32"}
    winner = KernelConfig(64, 4, 3)
    write(result("triton-group/forward-widest", winner, key("forward", **small)), device=here)
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    q, k, v = make_qkv(S=9, h=2, S_kv=40)
    selection_attention(q, k, v, Selection.from_ranges(make_spans("few", 1, 9, 1, 40, 20)), backend="triton-group")
    (used,) = logged("sel.triton.kernel")
    assert used["chosen"] == winner.config_id("triton-group/forward-widest")
    assert used["source"] == decisions()[-1].settings.tuned
    (loaded,) = logged("sel.tuned.loaded")
    assert loaded["fingerprint"] in used["source"]
    monkeypatch.setenv("NSA_SEL_AUTOTUNE", "off")
    selection_attention(q, k, v, Selection.from_ranges(make_spans("few", 1, 9, 1, 40, 20)), backend="triton-group")
    assert logged("sel.triton.kernel")[1]["chosen"] == COMMITTED_SMALL
    assert logged("sel.triton.kernel")[1]["source"] == "base.yaml"


COMMITTED_SMALL = settings_for(H200).kernels["triton-group/forward-widest"].config_id("triton-group/forward-widest")


# Results that are not used


def test_another_environment_is_explained_once(logged: Any) -> None:
    write(result(), kernels="0" * 16, torch="2.0", driver="1.0")
    with pytest.warns(RuntimeWarning, match=r"torch was 2\.0, is .*; kernels was 0000000000000000, is \w{16}") as caught:
        assert launch() == COMMITTED
    assert "driver was 1.0, is None" in str(caught[0].message)
    assert "Run `nsa-sel tune` here" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launch(replace(SHORT, h=4)) == COMMITTED
    (ignored,) = logged("sel.tuned.ignored")
    assert ignored["why"] == "environment"
    assert "nsa_sel was" not in ignored["words"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text[: len(text) // 2], "truncated"),
        (lambda text: "", "truncated"),
        (lambda text: "\0" * len(text), "malformed"),
        (lambda text: text.replace('"num_warps": 2', '"num_warps": "two"'), "Expected `int`, got `str`"),
        (lambda text: text.replace('"num_warps": 2', '"num_warps": 3'), "Invalid enum value 3"),
        (lambda text: text.replace('"verdict"', '"verdikt"'), "verdikt"),
        (lambda text: text.replace(f'"kernel": "{FORWARD}"', '"kernel": "triton-group/sideways"'), "triton-group/sideways"),
    ],
)
def test_a_corrupt_file_is_reported_once_and_ignored(tuned_folder: Path, logged: Any, damage: Any, words: str) -> None:
    write(result())
    (file,) = tuned_folder.glob("*.json")
    damaged = damage(file.read_text())
    assert damaged != file.read_text()
    file.write_text(damaged)
    with pytest.warns(RuntimeWarning, match="is ignored, the committed kernel configs are used"):
        assert launch() == COMMITTED
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forget_settings()
        reset()
        assert launch() == COMMITTED
    (ignored,) = logged("sel.tuned.ignored")
    assert (ignored["why"], words in ignored["words"]) == ("corrupt", True)
    assert "remove the file and run `nsa-sel tune` again" in ignored["words"]


to_nothing = lambda file: (file.unlink(), file.symlink_to("nowhere"))  # noqa: E731


@pytest.mark.parametrize(("damage", "words"), [*OF_THE_FILE, *OF_THE_FOLDER, (to_nothing, "is a symbolic link: remove it")])
def test_a_file_that_is_not_the_users_alone_is_not_used(tuned_folder: Path, logged: Any, damage: Any, words: str) -> None:
    write(result())
    (file,) = tuned_folder.glob("*.json")
    assert launch() == OTHER
    damage(file)
    tuned.forget()
    reset()
    with pytest.warns(RuntimeWarning, match=f"is ignored, the committed kernel configs are used: .*{words}"):
        assert launch() == COMMITTED
    assert [event["why"] for event in logged("sel.tuned.ignored")] == ["unreadable"]


@pytest.mark.parametrize("umask", [0, 0o22])
def test_what_is_written_is_the_users_alone(tuned_folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        kernel_configs.tune(Run(stamp_of(H200)), [one_problem_job()], times)
    finally:
        os.umask(before)
    modes = {
        path.name.split(".")[-1]: stat.S_IMODE(path.stat().st_mode) for path in (tuned_folder.parent, tuned_folder, *tuned_folder.iterdir())
    }
    assert modes == {"cache": 0o700, "tuned": 0o700, "json": 0o600, "jsonl": 0o600, "lock": 0o600}


# Where and for what


@pytest.fixture
def homeless(tuned_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No home, as for a user id that is on no list."""
    for name in ("NSA_SEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", mock.Mock(side_effect=RuntimeError("Could not determine home directory.")))


@pytest.mark.usefixtures("homeless")
def test_without_a_home_nothing_is_kept_and_that_is_said_once() -> None:
    with pytest.warns(RuntimeWarning, match="nothing is cached on disk. .*; set NSA_SEL_CACHE") as told:
        assert [launch(request, device) for request in (SHORT, replace(SHORT, S_kv=4096)) for device in (H200, H100)] == 4 * [COMMITTED]
    assert len(told) == 1
    with pytest.raises(ConfigError, match=r"the cache folder is None; allowed: a folder for tuning results .* Remedy: set NSA_SEL_CACHE"):
        kernel_configs.tune(Run(stamp_of(H200)), [one_problem_job()], times)


def test_the_stamp_follows_the_kernels_and_the_committed_kernel_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    def stamp() -> str:
        tuned._kernels.cache_clear()
        return tuned._kernels()

    first, read, shipped = stamp(), Path.read_bytes, tuned.shipped_configs()
    base = shipped["base.yaml"]
    changed = {**shipped, "base.yaml": msgspec.structs.replace(base, kernels={**base.kernels, FORWARD: OTHER})}
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "shipped_configs", lambda: changed)
        assert stamp() != first
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: read(self) + (b"#" if self.name == "softmax.py" else b""))
        assert stamp() != first
    assert stamp() == first
