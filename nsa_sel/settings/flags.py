"""The environment flags: which there are, what they take, and their values in this process."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable
from typing import Any, Literal, get_args

import msgspec

from nsa_sel.errors import ConfigError, warn
from nsa_sel.settings.schema import Autotune, ForcePath

Kind = Literal["bool", "length", "tile", "path", "autotune", "counting", "text", "log"]
LOG_FLAG = "NSA_DEBUG_LOG"
CONFIG_FLAG = "NSA_SEL_CONFIG"
CACHE_FLAG = "NSA_SEL_CACHE"  # the folder of what nsa-sel tune found, and of compiled CUDA kernels
TEST_FLAG = "NSA_TEST_TRITON_SEL"  # read by the tests alone
COMMIT_FLAG = "NSA_SEL_COMMIT"  # read by the benches alone
MOST_LENGTH = (1 << 31) - 1


class Flag(msgspec.Struct, frozen=True):
    """One environment variable: the field of Settings that it sets, and the values it takes."""

    name: str
    field: str
    kind: Kind
    help: str


_SHOWN = "; events go to stderr where neither NSA_DEBUG_LOG nor logging says where to"
FLAGS = (
    Flag("NSA_SEL_BACKEND", "backend", "text", "name of the backend to use, or an error that says why it can't"),
    Flag("NSA_USE_TRITON_SEL", "use_triton_sel", "bool", "0 keeps Triton out, 1 lets the policy consider it"),
    Flag("NSA_SEL_TRITON_MIN_L", "sel_triton_min_L", "length", "Triton only from this many selected keys a row on"),
    Flag("NSA_TRITON_SEL_FORCE", "triton_force", "bool", "1 lifts the device rule that disables Triton (experiments)"),
    Flag("NSA_SEL_TRITON_GROUP", "triton_group", "bool", "0 keeps triton-group out, so that triton-token is the Triton choice"),
    Flag("NSA_SEL_TRITON_ALLOW_GRAD", "triton_allow_grad", "bool", "0: no Triton when gradients are needed"),
    Flag("NSA_SEL_TRITON_REQUIRE_ALIGN", "triton_require_align", "bool",
         "1: Triton only for 16-byte aligned tensors and head dims that are multiples of 16"),
    Flag("NSA_SEL_TRITON_FORCE_PATH", "triton_force_path", "path", "dense: by one range a row; varlen: by any number; auto: by what pays"),
    Flag("NSA_SEL_TRITON_DB", "triton_double_buffer", "bool", "1: at least two pipeline stages; 0: one"),
    Flag("NSA_SEL_TRITON_BLOCK_L", "block_l", "tile", "keys a kernel step takes"),
    Flag("NSA_SEL_TRITON_BLOCK_D", "block_d", "tile", "columns of the one tile that holds Dk in a Triton kernel; it can only widen it"),
    Flag("NSA_SEL_TRITON_BLOCK_DV", "block_dv", "tile", "columns of the one tile that holds Dv in a Triton kernel; it can only widen it"),
    Flag("NSA_SEL_AUTOTUNE", "autotune", "autotune",
         "off: ignore what nsa-sel tune found; on: use it; warmup: compile at the first call per device; warmup-tune: tune lightly too"),
    Flag("NSA_SEL_COUNT_SHARING", "count_sharing", "counting",
         "first: count how much neighbors share at the first call of a kind, which waits for the device once; a number: again after as"
         " many calls; off: assume the prior"),
    Flag("NSA_USE_SEL_PACK", "use_sel_pack", "bool", "0 keeps packed SDPA out"),
    Flag("NSA_FORCE_PARITY", "force_parity", "bool", "1: packed SDPA, the reference path, for every call"),
    Flag("NSA_DEBUG_TRITON", "debug_triton", "bool", f"1: checks every selection and counts the keys that events name{_SHOWN}"),
    Flag(LOG_FLAG, "debug_log", "log",
         "1 or stderr: events as JSON lines on stderr; a file (./1 for one named 1): appended to it; 0: no events"),
    Flag("NSA_DEBUG_TIMING", "debug_timing", "bool", f"1: events carry times (synchronises the device){_SHOWN}"),
    Flag("NSA_DEBUG_COMPARE", "debug_compare", "bool", f"1: every call is compared with packed SDPA; the MAE is logged{_SHOWN}"),
    Flag("NSA_DEBUG_NVTX", "debug_nvtx", "bool", "1: an NVTX range around each pass of a backend on a GPU, for its profilers"),
)  # fmt: skip
NAMES = (*(flag.name for flag in FLAGS), CONFIG_FLAG, CACHE_FLAG)
UNSET = (None,) * len(NAMES)
_BOOLS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def is_tile(number: int) -> bool:
    """Whether a kernel can have a tile of `number` columns."""
    return 16 <= number <= 512 and number & (number - 1) == 0


def _bool(text: str) -> bool | None:
    return _BOOLS.get(text.strip().lower())


def _number(text: str, fits: Callable[[int], bool]) -> int | None:
    if not text.strip().isdecimal() or len(text) >= 100:  # Python reads no number of 5000 digits
        return None
    return int(text) if fits(int(text)) else None


def _autotune(text: str) -> str | None:
    lowered, switch = text.strip().lower(), _bool(text)
    if lowered in get_args(Autotune):
        return lowered
    return None if switch is None else "on" if switch else "off"


def is_often(number: int) -> bool:
    """Whether sharing can be counted again after so many calls. After each is refused: 1 means "on" in other flags."""
    return 2 <= number <= MOST_LENGTH


def _counting(text: str) -> str | int | None:
    if text.strip().lower() == "first":
        return "first"
    return "off" if _bool(text) is False else _number(text, is_often)


ALLOWED: dict[Kind, str] = {
    "bool": "0 or 1",
    "length": "a whole number >= 0 and below 2^31",
    "tile": "a power of two from 16 to 512",
    "path": ", ".join(get_args(ForcePath)),
    "autotune": ", ".join(get_args(Autotune)),
    "counting": "off, first, or a whole number of calls >= 2 and below 2^31",
    "text": "a name",
    "log": "0, 1, stderr or the name of a file",
}
_PARSERS: dict[Kind, Callable[[str], Any]] = {  # None for a text that is not allowed
    "bool": _bool,
    "length": lambda text: _number(text, lambda number: number <= MOST_LENGTH),
    "tile": lambda text: _number(text, is_tile),
    "path": lambda text: text if text in get_args(ForcePath) else None,
    "autotune": _autotune,
    "counting": _counting,
    "text": lambda text: text.strip() or None,
    "log": lambda text: "stderr" if _bool(text) else text.strip() or None,
}


def parse_flag(flag: Flag, text: str) -> Any:
    """The value that `text` gives to `flag`.

    Raises:
        ConfigError: naming the flag, the text and what is allowed.
    """
    if flag.kind == "log" and _bool(text) is False:
        return None
    value = _PARSERS[flag.kind](text)
    if value is None:
        raise ConfigError(flag.name, text, ALLOWED[flag.kind], f"unset it, or set it to what it takes: {flag.help}")
    return value


def debugging() -> bool:
    """Whether NSA_DEBUG_TRITON asks for the checks that read the device."""
    data = getattr(os.environ, "_data", None)  # see `environment`
    if data is not None and _debug_name() not in data:
        return False
    text = os.environ.get("NSA_DEBUG_TRITON")
    return text is not None and bool(parse_flag(next(flag for flag in FLAGS if flag.name == "NSA_DEBUG_TRITON"), text))


@functools.cache
def _debug_name() -> Any:
    return os.environ.encodekey("NSA_DEBUG_TRITON")


# os.environ.get encodes and decodes each name, 9 us for 22 flags; the mapping underneath takes 1 us, and half of that where no flag is set.
variables: Any = getattr(os.environ, "_data", None)
encoded: tuple[Any, ...] = () if variables is None else tuple(os.environ.encodekey(name) for name in NAMES)
checked = -1  # number of environment variables when misspelled flags were last looked for


def environment() -> tuple[str | None, ...]:
    """The raw values of all flags: settings and memoized decisions hold for one such tuple."""
    global checked
    if variables is None:
        return tuple(os.environ.get(name) for name in NAMES)
    if len(variables) != checked:  # a variable was added or removed: it may be a misspelled flag
        checked = len(variables)
        for name, meant in unknown_variables().items():
            if name.startswith("NSA_SEL_"):  # other NSA_ variables may belong to other programs
                _warn_of_unknown(name, meant)
    return UNSET if variables.keys().isdisjoint(encoded) else tuple(map(variables.get, encoded))


def unknown_variables() -> dict[str, str | None]:
    """Variables named NSA_* that are no flags, each with the flag that may be meant."""
    flags = (*NAMES, TEST_FLAG, COMMIT_FLAG)
    names = sorted(name for name in os.environ if name.startswith("NSA_") and name not in flags)
    return {name: next(iter(difflib.get_close_matches(name, flags, n=1)), None) for name in names}


@functools.cache  # once per process
def _warn_of_unknown(name: str, meant: str | None) -> None:
    hint = f"; did you mean {meant}?" if meant else "; `nsa-sel doctor` shows the flags that are set, docs/decisions.md lists all"
    warn(f"the environment variable {name} is no flag and has no effect{hint}")


def forget_warnings() -> None:
    """Warn of misspelled flags anew."""
    global checked
    checked = -1
    _warn_of_unknown.cache_clear()
