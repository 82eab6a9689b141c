"""Check every flag, configuration file and override from the environment to the decision, and that wrong ones are named with a remedy."""

from __future__ import annotations

import importlib.metadata
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nsa_sel
import nsa_sel.core.decide
from nsa_sel.core import registry
from nsa_sel.core.backend import Requirement
from nsa_sel.core.decide import forget_decisions
from nsa_sel.core.request import DeviceInfo, Request, example_choice, example_request
from nsa_sel.errors import BackendError, ConfigError
from nsa_sel.settings.config import settings_for
from nsa_sel.settings.flags import FLAGS
from tests.helpers.calls import Wrong, assert_in_order, call, message_of
from tests.helpers.cases import make_qkv
from tests.helpers.policy_cases import A100, CPU, H100, LONG, OFFERS, RTX4090, SHORT, UNKNOWN, codes, replace, toy

PINNED = """
provenance: "numbers of the tests, whatever the profiles say"
runtime:
  use_triton_sel: true
  sel_triton_min_L: 4096
  prefer_forward: [triton-group, triton-token, sdpa-packed, numba]
  prefer_backward: [triton-group, triton-token, sdpa-packed, numba]
"""


# Flags: each changes the decision or the settings.


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, configure: Callable[[str], Path]) -> Path:
    monkeypatch.setattr(registry, "offers", lambda request: OFFERS)
    return configure(PINNED)


DECIDING = [  # flag, text, request, device, forward without the flag, forward with it, a reason then
    ("NSA_SEL_BACKEND", "triton-token", LONG, H100, "triton-group", "triton-token", None),
    ("NSA_SEL_BACKEND", "sdpa-packed", LONG, H100, "triton-group", "sdpa-packed", None),
    ("NSA_USE_TRITON_SEL", "0", LONG, H100, "triton-group", "sdpa-packed", "triton-off"),
    ("NSA_SEL_TRITON_MIN_L", "1024", SHORT, H100, "sdpa-packed", "triton-group", None),
    ("NSA_SEL_TRITON_MIN_L", "8193", LONG, H100, "triton-group", "sdpa-packed", "min-length"),
    ("NSA_TRITON_SEL_FORCE", "1", LONG, RTX4090, "sdpa-packed", "triton-group", None),
    ("NSA_TRITON_SEL_FORCE", "0", LONG, RTX4090, "sdpa-packed", "sdpa-packed", "device-rule"),
    ("NSA_SEL_TRITON_GROUP", "0", LONG, H100, "triton-group", "triton-token", "group-off"),
    ("NSA_SEL_TRITON_ALLOW_GRAD", "0", replace(LONG, needs_grad=True), H100, "triton-group", "sdpa-packed", "grad-off"),
    ("NSA_SEL_TRITON_ALLOW_GRAD", "0", LONG, H100, "triton-group", "triton-group", None),
    ("NSA_SEL_TRITON_REQUIRE_ALIGN", "1", replace(LONG, Dk=24), H100, "triton-group", "sdpa-packed", "align-dims"),
    ("NSA_SEL_TRITON_REQUIRE_ALIGN", "1", replace(LONG, aligned=False), H100, "triton-group", "sdpa-packed", "align-pointers"),
    ("NSA_SEL_TRITON_REQUIRE_ALIGN", "1", LONG, H100, "triton-group", "triton-group", None),
    ("NSA_SEL_TRITON_FORCE_PATH", "dense", LONG, H100, "triton-group", "sdpa-packed", "path-dense"),
    ("NSA_SEL_TRITON_FORCE_PATH", "varlen", LONG, H100, "triton-group", "triton-group", None),
    ("NSA_SEL_TRITON_BLOCK_D", "32", LONG, H100, "triton-group", "triton-group", None),
    ("NSA_SEL_TRITON_BLOCK_DV", "64", LONG, H100, "triton-group", "triton-group", None),
    ("NSA_USE_SEL_PACK", "0", SHORT, CPU, "sdpa-packed", "numba", "pack-off"),
    ("NSA_FORCE_PARITY", "1", LONG, H100, "triton-group", "sdpa-packed", None),
]
VALUES = {  # what any flag sets: text -> value
    "NSA_SEL_BACKEND": ("numba", "numba"),
    "NSA_USE_TRITON_SEL": ("off", False),
    "NSA_SEL_TRITON_MIN_L": ("123", 123),
    "NSA_TRITON_SEL_FORCE": ("1", True),
    "NSA_SEL_TRITON_GROUP": ("no", False),
    "NSA_SEL_TRITON_ALLOW_GRAD": ("false", False),
    "NSA_SEL_TRITON_REQUIRE_ALIGN": ("True", True),
    "NSA_SEL_TRITON_FORCE_PATH": ("dense", "dense"),
    "NSA_SEL_TRITON_DB": ("1", True),
    "NSA_SEL_TRITON_BLOCK_L": ("128", 128),
    "NSA_SEL_TRITON_BLOCK_D": ("256", 256),
    "NSA_SEL_TRITON_BLOCK_DV": ("64", 64),
    "NSA_SEL_AUTOTUNE": ("no", "off"),
    "NSA_SEL_COUNT_SHARING": ("64", 64),
    "NSA_USE_SEL_PACK": ("0", False),
    "NSA_FORCE_PARITY": ("yes", True),
    "NSA_DEBUG_TRITON": ("1", True),
    "NSA_DEBUG_LOG": ("stderr", "stderr"),
    "NSA_DEBUG_TIMING": ("on", True),
    "NSA_DEBUG_COMPARE": ("1", True),
    "NSA_DEBUG_NVTX": ("1", True),
}


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize(("flag", "text", "request_", "device", "before", "after", "code"), DECIDING)
def test_flags_decide(
    monkeypatch: pytest.MonkeyPatch, flag: str, text: str, request_: Request, device: DeviceInfo, before: str, after: str, code: str | None
) -> None:
    assert nsa_sel.explain_request(request_, device).forward == before
    monkeypatch.setenv(flag, text)
    decision = nsa_sel.explain_request(request_, device)
    assert decision.forward == after
    assert decision.backward == (after if request_.needs_grad else None)
    field = next(known.field for known in FLAGS if known.name == flag)
    assert decision.settings.sources[field] == flag
    assert codes(decision, after) == []
    assert code is None or code in [found for verdict in decision.verdicts for found in codes(decision, verdict.backend)]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_sets_its_field(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, flag: Any) -> None:
    before = settings_for(H100)
    text, value = VALUES[flag.name]
    monkeypatch.setenv(flag.name, text)
    after = settings_for(H100)
    assert getattr(before, flag.field) != value
    assert getattr(after, flag.field) == value
    assert after.sources[flag.field] == flag.name
    assert after.fingerprint != before.fingerprint
    monkeypatch.delenv(flag.name)
    assert settings_for(H100) == before
    assert not recwarn.list


@pytest.mark.parametrize(
    ("name", "hint"), [("NSA_SEL_BAKEND", "did you mean NSA_SEL_BACKEND"), ("NSA_SEL_XYZZY_PLUGH", "docs/decisions.md")]
)
def test_unknown_flags_are_named_once(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, name: str, hint: str) -> None:
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NSA_OF_SOMEBODY_ELSE", "1")
    monkeypatch.setenv("NSA_SEL_COMMIT", "abc1234")
    settings_for(H100)
    settings_for(UNKNOWN)
    monkeypatch.setenv("NSA_SEL_BACKEND", "numba")
    settings_for(H100)
    (warning,) = recwarn.list
    assert warning.category is RuntimeWarning
    assert f"{name} is not a flag and has no effect; " in str(warning.message)
    assert hint in str(warning.message)


def test_a_misspelled_flag_warns_in_a_call_after_others_too(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make_qkv(1, 4, 1, 2, 16, S_kv=32)
    selection = nsa_sel.Selection.from_blocks(torch.zeros(1, 4, 1, 1, dtype=torch.int32), 8)
    nsa_sel.selection_attention(q, k, v, selection)
    monkeypatch.setenv("NSA_SEL_BACKEN", "numba")
    with pytest.warns(RuntimeWarning, match="NSA_SEL_BACKEN is not a flag and has no effect; did you mean NSA_SEL_BACKEND") as told:
        nsa_sel.selection_attention(q, k, v, selection)
    assert len(told) == 1


@pytest.mark.parametrize(("text", "target"), [("1", "stderr"), ("yes", "stderr"), ("0", None), ("off", None), ("./1", "./1")])
def test_a_log_may_be_asked_for_as_any_other_flag(monkeypatch: pytest.MonkeyPatch, text: str, target: str | None) -> None:
    monkeypatch.setenv("NSA_DEBUG_TRITON", "1")
    assert (settings_for(H100).debug_log, settings_for(H100).sources["debug_log"]) == ("stderr", "NSA_DEBUG_TRITON")
    monkeypatch.setenv("NSA_DEBUG_LOG", text)
    assert (settings_for(H100).debug_log, settings_for(H100).sources["debug_log"]) == (target, "NSA_DEBUG_LOG")


def test_launch_flags_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    built_in = settings_for(UNKNOWN)
    assert built_in.kernels
    monkeypatch.setenv("NSA_SEL_TRITON_BLOCK_L", "256")
    monkeypatch.setenv("NSA_SEL_TRITON_DB", "1")
    for name, config in built_in.kernels.items():
        double = settings_for(UNKNOWN).kernel(name)
        assert (double.block_l, double.num_stages, double.num_warps) == (256, max(2, config.num_stages), config.num_warps)
    monkeypatch.setenv("NSA_SEL_TRITON_DB", "0")
    assert {settings_for(UNKNOWN).kernel(name).num_stages for name in built_in.kernels} == {1}


@pytest.mark.usefixtures("pinned")
def test_environment_beats_the_file_and_the_file_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    from_file = settings_for(RTX4090)
    assert from_file.sources["sel_triton_min_L"] == from_file.profile == os.environ["NSA_SEL_CONFIG"]
    assert from_file.triton_off is not None  # a file that says nothing about it does not lift the device rule
    monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "7")
    assert settings_for(RTX4090).sel_triton_min_L == 7
    assert settings_for(RTX4090).sources["sel_triton_min_L"] == "NSA_SEL_TRITON_MIN_L"


# Overrides


@pytest.mark.usefixtures("pinned")
def test_override_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(backend: str | None = None) -> tuple[str | None, str | None]:
        decision = nsa_sel.explain_request(LONG, H100, backend)
        return decision.forward, decision.override and decision.override.source

    assert chosen() == ("triton-group", None)
    monkeypatch.setenv("NSA_SEL_BACKEND", "triton-group")
    assert chosen() == ("triton-group", "NSA_SEL_BACKEND")
    monkeypatch.setenv("NSA_FORCE_PARITY", "1")
    assert chosen() == ("sdpa-packed", "NSA_FORCE_PARITY")
    with nsa_sel.use_backend("triton-token"):
        assert chosen() == ("triton-token", "use_backend")
        with nsa_sel.use_backend("triton-group"):
            assert chosen() == ("triton-group", "use_backend")
            assert chosen("sdpa-packed") == ("sdpa-packed", "argument")
        assert chosen() == ("triton-token", "use_backend")
    assert chosen() == ("sdpa-packed", "NSA_FORCE_PARITY")
    monkeypatch.setenv("NSA_FORCE_PARITY", "0")
    assert chosen() == ("triton-group", "NSA_SEL_BACKEND")


# The memo


@pytest.mark.usefixtures("pinned")
def test_decisions_are_remembered_until_a_flag_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = nsa_sel.explain_request(LONG, H100)
    assert nsa_sel.explain_request(LONG, H100) is first
    assert nsa_sel.explain_request(LONG, A100) is not first
    monkeypatch.setenv("NSA_USE_TRITON_SEL", "0")
    assert nsa_sel.explain_request(LONG, H100).forward == "sdpa-packed"
    monkeypatch.delenv("NSA_USE_TRITON_SEL")
    assert nsa_sel.explain_request(LONG, H100) is first
    nsa_sel.reset()
    again = nsa_sel.explain_request(LONG, H100)
    assert again is not first
    assert again == first


def test_an_edited_file_is_read_anew_once_decisions_are_forgotten(pinned: Path) -> None:
    assert settings_for(H100).sel_triton_min_L == 4096
    pinned.write_text(PINNED.replace("4096", "8193"))
    assert nsa_sel.explain_request(LONG, H100).forward == "triton-group"
    nsa_sel.reset()
    decision = nsa_sel.explain_request(LONG, H100)
    assert (decision.forward, decision.settings.sel_triton_min_L) == ("sdpa-packed", 8193)


# The registry: installed packages, entry points, failures


def entry_point(monkeypatch: pytest.MonkeyPatch, loaded: object) -> None:
    entry = types.SimpleNamespace(name="mine", load=lambda: loaded)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] if group == registry.ENTRY_POINT_GROUP else [])


@pytest.mark.usefixtures("fresh_registry")
def test_packages_add_backends_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(monkeypatch, toy().backend)
    assert "toy" in registry.backends()
    assert "toy" in [offer.backend.name for offer in registry.offers(LONG)]


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize(
    ("loaded", "text"), [(object(), "gives a object; allowed: an"), (OFFERS[0].backend, f"takes the name {OFFERS[0].backend.name!r}")]
)
def test_bad_entry_points_are_named(monkeypatch: pytest.MonkeyPatch, loaded: object, text: str) -> None:
    entry_point(monkeypatch, loaded)
    with pytest.raises(BackendError, match=text) as caught:
        registry.backends()
    assert "Remedy: " in str(caught.value)


@pytest.mark.usefixtures("fresh_registry")
def test_an_entry_point_that_cannot_be_loaded_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("mine", "no_such_module_of_nsa_sel:SPEC", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    with pytest.warns(RuntimeWarning, match="'mine' of nsa_sel.backends cannot be loaded, and is left out: ModuleNotFound") as warned:
        kinds = [registry.backends(), registry.backends("choose")]
    assert len(warned) == 1
    assert all(kinds)


@pytest.mark.usefixtures("fresh_registry")
@pytest.mark.parametrize(
    ("package", "version", "code"),
    [("no-such-package-of-nsa-sel", "1.0", "package-missing"), ("pytest", "9999.0", "package-old"), ("pytest", "1.0", None)],
)
def test_packages_are_looked_up_without_import(monkeypatch: pytest.MonkeyPatch, package: str, version: str, code: str | None) -> None:
    needy = replace(toy().backend, requires=(Requirement(package, version, "pip install it"),))
    entry_point(monkeypatch, needy)
    found = registry.missing("toy")
    assert [reason.code for reason in found] == ([code] if code else [])
    assert all(reason.kind == "unavailable" and reason.remedy == "pip install it" for reason in found)


WRONG_FLAGS = [  # flag, text, fragments
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
    *(
        ("NSA_SEL_COUNT_SHARING", text, (f"'{text}'", "off, first, or a whole number of calls >= 2"))
        for text in ("1", "on", "often", "-3", str(1 << 31))
    ),
    ("NSA_DEBUG_TIMING", "ms", ("'ms'", "0 or 1")),
    ("NSA_DEBUG_COMPARE", "mae", ("'mae'", "0 or 1")),
]
GOOD = "provenance: tests\n"
WRONG_FILES = [  # content of the file that NSA_SEL_CONFIG names, fragments
    ("", ("ConfigFile", "base.yaml")),
    ("runtime: {}\n", ("provenance",)),
    (GOOD + "runtimes: {}\n", ("unknown field `runtimes`", "base.yaml")),
    (GOOD + "runtime: {use_triton: true}\n", ("unknown field `use_triton`", "$.runtime")),
    (GOOD + "runtime: {sel_triton_min_L: many}\n", ("runtime.sel_triton_min_L is 'many'", ">= 0")),
    (GOOD + "runtime: {sel_triton_min_L: {sideways: 64}}\n", ("runtime.sel_triton_min_L is {'sideways': 64}", "forward, backward, decode")),
    (GOOD + "runtime: {sel_triton_min_L: {decode: -1}}\n", ("runtime.sel_triton_min_L", "-1", ">= 0")),
    (GOOD + "runtime: {sel_triton_min_L: -1}\n", ("runtime.sel_triton_min_L", "-1", ">= 0")),
    (GOOD + "runtime: {workspace_bytes: -5}\n", ("runtime.workspace_bytes", "-5", ">= 0")),
    (GOOD + "runtime: {block_l: 48}\n", ("runtime.block_l", "48", "a power of two from 16 to 512")),
    (GOOD + "runtime: {prefer_forward: triton-group}\n", ("Expected `array`", "$.runtime.prefer_forward")),
    (GOOD + "match: {kind: tpu}\n", ("tpu", "$.match.kind")),
    (GOOD + "triton_off: {rule: ADR}\n", ("evidence", "$.triton_off")),
    (GOOD + "kernels: {triton-group/forward: {block_l: 64}}\n", ("num_warps", "$.kernels[...]")),
    (GOOD + "kernels: {triton-group/forward: {block_l: 63, num_warps: 4, num_stages: 1}}\n",
     ("kernels[...].block_l", "triton-group/forward", "powers of two")),
    (GOOD + "kernels: {triton-group/forward: {block_l: 64, num_warps: 4, num_stages: 0}}\n",
     ("kernels[...].num_stages", "triton-group/forward", "from 1 to 1024")),
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
    (GOOD + "runtime: {sharing_prior: [1, 2, .nan, 4, 5, 6, 7]}\n", ("$.runtime.sharing_prior[2]", ">= 1.0")),
    *((GOOD + f"runtime: {{count_sharing: {value}}}\n", ("runtime.count_sharing", "off, first, or a whole number"))
      for value in ("1", "0", "often", str(1 << 31))),
    (GOOD + "runtime: {count_sharing: on}\n", ("count_sharing needs off, first, or a whole number", "$.runtime")),
    (GOOD + "runtime: {sharing_prior: [1, 2, 3, 5, 4, 6, 7]}\n", ("sharing_prior needs 7 rising numbers", "$.runtime")),
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


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("flag", "text", "fragments"), WRONG_FLAGS)
def test_wrong_flags_are_named(monkeypatch: pytest.MonkeyPatch, flag: str, text: str, fragments: tuple[str, ...]) -> None:
    monkeypatch.setenv(flag, text)
    message = message_of(Wrong(flag, call(), error=ConfigError))
    assert_in_order(message, (f"{flag} is ", fragments[0], "; allowed: ", *fragments[1:], ". Remedy: unset it"))


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(("content", "fragments"), WRONG_FILES)
def test_wrong_files_are_named(configure: Callable[[str], Path], content: str, fragments: tuple[str, ...]) -> None:
    file = configure(content)
    message = message_of(Wrong("file", call(), error=ConfigError))
    assert message.startswith(str(file))
    assert all(fragment in message for fragment in (*fragments, "; allowed: ", "Remedy: ")), message


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("request_of", [example_request, example_choice])
def test_a_preference_refuses_no_call_of_either_kind(configure: Callable[[str], Path], request_of: Callable[[], Request]) -> None:
    """It names backends that attend, whatever the call; a wrong name is refused by both."""
    configure(GOOD + "runtime: {prefer_forward: [sdpa-packed]}\n")
    assert nsa_sel.explain_request(request_of(), H100).forward is not None
    configure(GOOD + "runtime: {prefer_forward: [choose-torch]}\n")
    forget_decisions()
    with pytest.raises(ConfigError, match="prefer_forward is 'choose-torch'"):
        nsa_sel.explain_request(request_of(), H100)


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("name", ["missing.yaml", ".", "fifo", "link to a fifo", "/dev/zero"])
def test_unreadable_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening or reading it would wait for ever
    (tmp_path / "link to a fifo").symlink_to("fifo")
    monkeypatch.setenv("NSA_SEL_CONFIG", str(tmp_path / name))
    assert_in_order(
        message_of(Wrong("file", call(), error=ConfigError)),
        ("NSA_SEL_CONFIG is ", "; allowed: a readable YAML file; reading this one: ", "Remedy: correct the path"),
    )


@pytest.mark.usefixtures("no_kernel")
def test_a_configuration_may_be_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GOOD)
    (tmp_path / "link.yaml").symlink_to("mine.yaml")
    monkeypatch.setenv("NSA_SEL_CONFIG", str(tmp_path / "link.yaml"))
    assert nsa_sel.explain_request(LONG, H100).settings.provenance == "tests"


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize("name", ["no such folder/events.jsonl", "fifo", "."])
def test_unwritable_logs_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")  # that nobody reads: opening it would wait for ever
    monkeypatch.setenv("NSA_DEBUG_LOG", str(tmp_path / name))
    wrong = Wrong("log", call(), error=ConfigError)
    for _ in range(2):  # a caught error is no reason to run without a log
        assert_in_order(message_of(wrong), ("NSA_DEBUG_LOG is ", "; allowed: ", "Remedy: "))


@pytest.mark.usefixtures("no_kernel")
def test_log_to_names_its_own_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^target is .*; allowed: stderr or a file that can be written"):
        nsa_sel.log_to(str(tmp_path / "missing" / "log.jsonl"))
