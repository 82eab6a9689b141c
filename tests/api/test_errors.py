"""Errors between processes: copies and pickles; long values are cut."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import nsa_sel
from nsa_sel.errors import ArgumentError, BackendError, CacheFull, ConfigError, NsaSelError
from tests.core.test_imports import modules
from tests.helpers.policy_cases import H100, LONG
from tests.helpers.wrong_calls import assert_in_order


def every_error() -> list[NsaSelError]:
    """One of each class, of those with a signature of their own also by keywords and with a decision."""
    words = ("x", 3, "y", "do")
    keywords: dict[str, Any] = dict(zip(("value", "allowed", "remedy"), words[1:], strict=True))
    decision = nsa_sel.explain_request(LONG, H100)
    made = [ArgumentError(argument="x", **keywords), ConfigError(source="x", **keywords), BackendError("no", decision), NsaSelError("no")]
    classes, signatures = [NsaSelError], {ArgumentError: words, ConfigError: words, CacheFull: ("pages", 3)}
    for kind in classes:
        classes += kind.__subclasses__()
        made.append(kind(*next((signatures[base] for base in kind.__mro__ if base in signatures), ("no",))))
    return made


@pytest.mark.parametrize("round_trip", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_survive_copies_and_pickles(round_trip: Callable[[NsaSelError], NsaSelError]) -> None:
    for module in ("tune.kernel_configs", "core.peers"):  # declare some
        importlib.import_module(f"nsa_sel.bench.{module}")
    errors = every_error()
    declared = {
        name for _, file in modules() for name in re.findall(r"^class (\w+)\((?:NsaSelError|ArgumentError)", file.read_text(), re.MULTILINE)
    }
    assert {type(error).__name__ for error in errors} == {"NsaSelError", *declared}
    for error in errors:
        again = round_trip(error)
        assert type(again) is type(error)
        assert (str(again), repr(again), again.args, again.__dict__) == (str(error), repr(error), error.args, error.__dict__)


def test_long_bad_values_are_cut() -> None:
    message = str(ConfigError("x", "9" * 100_000, "y", "do"))
    assert len(message) < 2000
    assert_in_order(message, ("x is '999", "... (100002 characters); allowed: y. Remedy: do."))
