"""Wrong flags and files: each is refused before any kernel, and says what is wrong, its value, what is allowed and the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import nsa_sel
from nsa_sel.core.decide import forget_decisions
from nsa_sel.core.request import Request, example_choice, example_request
from nsa_sel.errors import ConfigError
from tests.helpers.calls import Wrong, assert_in_order, call, message_of
from tests.helpers.policy_cases import H100, LONG

pytestmark = pytest.mark.usefixtures("no_kernel")


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
    *(
        ("NSA_SEL_COUNT_SHARING", text, (f"'{text}'", "off, first, or a whole number of calls >= 2"))
        for text in ("1", "on", "often", "-3", str(1 << 31))
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
    *((GOOD + f"runtime: {{count_sharing: {value}}}\n", ("runtime.count_sharing", "off, first, or a whole number"))
      for value in ("1", "0", "on", str(1 << 31))),
    (GOOD + "runtime: {count_sharing: often}\n", ("Invalid enum value 'often'", "$.runtime.count_sharing")),
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


@pytest.mark.parametrize(("flag", "text", "fragments"), FLAGS)
def test_wrong_flags_are_named(monkeypatch: pytest.MonkeyPatch, flag: str, text: str, fragments: tuple[str, ...]) -> None:
    monkeypatch.setenv(flag, text)
    message = message_of(Wrong(flag, call(), error=ConfigError))
    assert_in_order(message, (f"{flag} is ", fragments[0], "; allowed: ", *fragments[1:], ". Remedy: unset it"))


@pytest.mark.parametrize(("content", "fragments"), FILES)
def test_wrong_files_are_named(configure: Callable[[str], Path], content: str, fragments: tuple[str, ...]) -> None:
    file = configure(content)
    message = message_of(Wrong("file", call(), error=ConfigError))
    assert message.startswith(str(file))
    assert all(fragment in message for fragment in (*fragments, "; allowed: ", "Remedy: ")), message


@pytest.mark.parametrize("request_of", [example_request, example_choice])
def test_a_preference_refuses_no_call_of_either_kind(configure: Callable[[str], Path], request_of: Callable[[], Request]) -> None:
    """It names backends that attend, whatever the call; a wrong name is refused by both."""
    configure(GOOD + "runtime: {prefer_forward: [sdpa-packed]}\n")
    assert nsa_sel.explain_request(request_of(), H100).forward is not None
    configure(GOOD + "runtime: {prefer_forward: [choose-torch]}\n")
    forget_decisions()
    with pytest.raises(ConfigError, match="prefer_forward is 'choose-torch'"):
        nsa_sel.explain_request(request_of(), H100)


@pytest.mark.parametrize("name", ["missing.yaml", ".", "fifo", "link to a fifo", "/dev/zero"])
def test_unreadable_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening or reading it would wait for ever
    (tmp_path / "link to a fifo").symlink_to("fifo")
    monkeypatch.setenv("NSA_SEL_CONFIG", str(tmp_path / name))
    assert_in_order(
        message_of(Wrong("file", call(), error=ConfigError)),
        ("NSA_SEL_CONFIG is ", "; allowed: a readable YAML file; reading this one: ", "Remedy: correct the path"),
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
    wrong = Wrong("log", call(), error=ConfigError)
    for _ in range(2):  # a caught error is no reason to run without a log
        assert_in_order(message_of(wrong), ("NSA_DEBUG_LOG is ", "; allowed: ", "Remedy: "))


def test_log_to_names_its_own_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^target is .*; allowed: stderr or a file that can be written"):
        nsa_sel.log_to(str(tmp_path / "missing" / "log.jsonl"))
