"""The environment flags: names, allowed values, and their values in this process."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Literal, get_args

import msgspec

from nsa_sel.errors import ConfigError, closest, first_time, warn
from nsa_sel.settings.schema import Autotune, CountSharing, ForcePath, Length, Tile

Kind = Literal["bool", "length", "tile", "path", "autotune", "counting", "text", "log"]
LOG_FLAG = "NSA_DEBUG_LOG"
CONFIG_FLAG = "NSA_SEL_CONFIG"
CACHE_FLAG = "NSA_SEL_CACHE"  # the folder of tuning results and compiled CUDA kernels
TEST_FLAG = "NSA_TEST_TRITON_SEL"  # read only by the tests
COMMIT_FLAG = "NSA_SEL_COMMIT"  # read only by the benches
ENGINES_FLAG = "NSA_SEL_ENGINES"  # read only by the plugins of vLLM and SGLang


class Flag(msgspec.Struct, frozen=True):
    """One environment variable: the field of Settings that it sets, and the values that it accepts."""

    name: str
    field: str
    kind: Kind
    help: str


_SHOWN = "; events go to stderr unless NSA_DEBUG_LOG or a logging handler takes them"
FLAGS = (
    Flag("NSA_SEL_BACKEND", "backend", "text", "name of the backend to use; an error with all reasons if it cannot run the call"),
    Flag("NSA_USE_TRITON_SEL", "use_triton_sel", "bool", "0 disables Triton, 1 lets the policy consider it"),
    Flag("NSA_SEL_TRITON_MIN_L", "sel_triton_min_L", "length", "Triton only for rows of at least this many selected keys"),
    Flag("NSA_TRITON_SEL_FORCE", "triton_force", "bool", "1 lifts the device rule that disables Triton (experiments)"),
    Flag("NSA_SEL_TRITON_GROUP", "triton_group", "bool", "0 disables triton-group, so that triton-token is the Triton choice"),
    Flag("NSA_SEL_TRITON_ALLOW_GRAD", "triton_allow_grad", "bool", "0: no Triton when gradients are needed"),
    Flag("NSA_SEL_TRITON_REQUIRE_ALIGN", "triton_require_align", "bool",
         "1: Triton only for 16-byte aligned tensors and head dims that are multiples of 16"),
    Flag("NSA_SEL_TRITON_FORCE_PATH", "triton_force_path", "path",
         "dense: one range per row; varlen: any number of ranges; auto: the faster one"),
    Flag("NSA_SEL_TRITON_DB", "triton_double_buffer", "bool", "1: at least two pipeline stages; 0: one"),
    Flag("NSA_SEL_TRITON_BLOCK_L", "block_l", "tile", "keys per kernel step"),
    Flag("NSA_SEL_TRITON_BLOCK_D", "block_d", "tile", "columns of the one tile that holds Dk in a Triton kernel; it can only widen it"),
    Flag("NSA_SEL_TRITON_BLOCK_DV", "block_dv", "tile", "columns of the one tile that holds Dv in a Triton kernel; it can only widen it"),
    Flag("NSA_SEL_AUTOTUNE", "autotune", "autotune",
         "off: ignore the results of nsa-sel tune; on: use them; warmup: also compile at the first call per device; warmup-tune: also"
         " tune briefly"),
    Flag("NSA_SEL_COUNT_SHARING", "count_sharing", "counting",
         "first: count at the first call of a kind how much neighbors share, with one synchronization; a number: count again after as"
         " many calls; off: assume the prior"),
    Flag("NSA_USE_SEL_PACK", "use_sel_pack", "bool", "0 disables packed SDPA"),
    Flag("NSA_FORCE_PARITY", "force_parity", "bool", "1: packed SDPA, the reference path, for every call"),
    Flag("NSA_DEBUG_TRITON", "debug_triton", "bool", f"1: checks every selection and counts the keys that events name{_SHOWN}"),
    Flag(LOG_FLAG, "debug_log", "log",
         "1 or stderr: events as JSON lines on stderr; a file (./1 for one named 1): appended to it; 0: no events"),
    Flag("NSA_DEBUG_TIMING", "debug_timing", "bool", f"1: events carry times (synchronizes the device){_SHOWN}"),
    Flag("NSA_DEBUG_COMPARE", "debug_compare", "bool", f"1: every call is compared with packed SDPA; the MAE is logged{_SHOWN}"),
    Flag("NSA_DEBUG_NVTX", "debug_nvtx", "bool", "1: an NVTX range around each pass of a backend on a GPU, for profilers"),
)  # fmt: skip
NAMES = (*(flag.name for flag in FLAGS), CONFIG_FLAG, CACHE_FLAG)
UNSET = (None,) * len(NAMES)
_BOOLS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


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
_TYPES: dict[Kind, Any] = {"length": Length, "tile": Tile, "path": ForcePath, "autotune": Autotune, "counting": CountSharing}


def parse_flag(flag: Flag, text: str) -> Any:
    """Return the value that `text` gives to `flag`.

    Args:
        flag: the flag.
        text: the value of its environment variable.

    Raises:
        ConfigError: with the flag, the text and the allowed values.
    """
    word, switch = text.strip(), _BOOLS.get(text.strip().lower())
    value: Any = None
    if flag.kind == "bool":
        value = switch
    elif flag.kind == "log":
        if switch is False:
            return None
        value = "stderr" if switch else word or None
    elif flag.kind == "text":
        value = word or None
    else:
        if flag.kind == "autotune" and switch is not None:
            word = "on" if switch else "off"
        elif flag.kind == "counting" and switch is False:
            word = "off"
        number = word.isdecimal() and len(word) < 100  # int() refuses thousands of digits
        with contextlib.suppress(msgspec.ValidationError):
            value = msgspec.convert(int(word) if number else word if flag.kind == "path" else word.lower(), _TYPES[flag.kind])
    if value is None:
        raise ConfigError(flag.name, text, ALLOWED[flag.kind], f"unset it, or use an allowed value: {flag.help}")
    return value


def debugging() -> bool:
    """Return True if NSA_DEBUG_TRITON asks for the checks that read the device."""
    if variables is not None and _DEBUG not in variables:
        return False
    return bool(value_of("NSA_DEBUG_TRITON"))


def value_of(name: str) -> Any:
    """Return the value of one flag; None where it is not set."""
    text = os.environ.get(name)
    return None if text is None else parse_flag(next(flag for flag in FLAGS if flag.name == name), text)


# os.environ.get encodes and decodes each name, 9 us for 22 flags; the mapping underneath takes 1 us, and half of that
# where no flag is set.
variables: Any = getattr(os.environ, "_data", None)
encoded: tuple[Any, ...] = () if variables is None else tuple(os.environ.encodekey(name) for name in NAMES)
_DEBUG: Any = None if variables is None else os.environ.encodekey("NSA_DEBUG_TRITON")
checked = -1  # number of environment variables when misspelled flags were last looked for


def environment() -> tuple[str | None, ...]:
    """Return the raw values of all flags, on which settings and cached decisions depend."""
    global checked
    if variables is None:
        return tuple(os.environ.get(name) for name in NAMES)
    if len(variables) != checked:  # a variable was added or removed: it may be a misspelled flag
        checked = len(variables)
        for name, meant in unknown_variables().items():
            if name.startswith("NSA_SEL_") and first_time("flag", name):  # other NSA_ variables may belong to other programs
                hint = f"; did you mean {meant}?" if meant else "; docs/decisions.md lists all flags, `nsa-sel doctor` those that are set"
                warn(f"the environment variable {name} is not a flag and has no effect{hint}")
    return UNSET if variables.keys().isdisjoint(encoded) else tuple(map(variables.get, encoded))


def unknown_variables() -> dict[str, str | None]:
    """Return the environment variables named NSA_* that are not flags, each with the flag of a similar name."""
    flags = (*NAMES, TEST_FLAG, COMMIT_FLAG, ENGINES_FLAG)
    names = sorted(name for name in os.environ if name.startswith("NSA_") and name not in flags)
    return {name: closest(name, flags, cutoff=0.6) for name in names}
