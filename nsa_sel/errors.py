"""The errors that nsa-sel raises on purpose: what was wrong, its value, what is allowed, and the remedy."""

from __future__ import annotations

import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

_MOST_SHOWN = 500  # characters of a bad value


def shown(value: object) -> str:
    """The repr of a bad value for an error message, cut where it is long. Python prints no number of thousands of
    digits."""
    try:
        text = repr(value)
    except ValueError:
        return f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def closest(name: str, names: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the entry of `names` that an unknown `name` probably means, whatever its case; None if none is similar
    (`difflib`'s ratio)."""
    by_lower = {each.lower(): each for each in names}
    return next((by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)), None)


class NsaSelError(Exception):
    """Base of all errors raised by nsa-sel. Copies and pickles keep the message and the attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[NsaSelError], args: tuple[Any, ...], attributes: dict[str, Any]) -> NsaSelError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ArgumentError(NsaSelError, ValueError):
    """An argument of a public call is not what the contract asks for; no kernel has run."""

    # The message is made when it is asked for: torch.compile can't trace a text made of sizes, which are symbols there.
    def __init__(self, argument: str, value: object, allowed: str, remedy: str) -> None:
        self.argument, self.value, self.allowed, self.remedy = argument, value, allowed, remedy

    def __str__(self) -> str:
        return f"{self.argument} is {self.value}; allowed: {self.allowed}. Remedy: {self.remedy}."

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def renamed(error: ArgumentError, **names: str) -> ArgumentError:
    """The same error for a function whose arguments have other names."""
    name = names.get(error.argument, error.argument)
    return ArgumentError(name, error.value, error.allowed, error.remedy.replace(f"{error.argument}.", f"{name}."))


class ConfigError(NsaSelError, ValueError):
    """A flag of the environment or a field of a configuration file has a bad value."""

    def __init__(self, source: str, value: object, allowed: str, remedy: str) -> None:
        super().__init__(f"{source} is {shown(value)}; allowed: {allowed}. Remedy: {remedy}.")
        self.source, self.value, self.allowed, self.remedy = source, value, allowed, remedy


class BackendError(NsaSelError, RuntimeError):
    """No backend may run the call: a forced one is unknown or refuses, or none is left.

    Attributes:
        decision: the nsa_sel.Decision with every reason, or None where the call was refused before one was made.
    """

    def __init__(self, message: str, decision: Any = None) -> None:
        self.message, self.decision = message, decision

    def __str__(self) -> str:
        return self.message


class CacheFull(NsaSelError, RuntimeError):
    """A step of an `NSACache` needs more pages than are free. Nothing has changed: sequences are as they were before.

    Attributes:
        argument: of NSACache, that says how many pages there are: "pages" or "window_pages".
        pages: how many that are.
    """

    def __init__(self, argument: str, pages: int) -> None:
        self.argument, self.pages = argument, pages
        what = f"the step needs more pages than are free, of {argument} = {pages}; nothing has changed"
        super().__init__(f"{what}. Remedy: free or truncate a sequence, step fewer of them, or make the cache with more {argument}.")


@contextlib.contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Imports inside the `with` block are of packages that the extra `extra` installs.

    Args:
        what: the part of nsa-sel that needs them, for the message.

    Raises:
        NsaSelError: with the pip command, where one is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "nsa_sel"):
            raise
        raise NsaSelError(f"{what} needs the package {package}, which is not installed. Remedy: pip install 'nsa-sel[{extra}]'") from error


_given_before: set[tuple[Any, ...]] = set()


def first_time(kind: str, *facts: object) -> bool:
    """Return True at the first call with these arguments in this process: for warnings that are given once."""
    first = (kind, *facts) not in _given_before
    _given_before.add((kind, *facts))
    return first


def forget_first(kind: str) -> None:
    """Let `first_time` return True again for this kind."""
    _given_before.difference_update([facts for facts in _given_before if facts[0] == kind])


def warn(words: str) -> None:
    """Give a RuntimeWarning at the user's line: the innermost one that is neither nsa-sel's nor PyTorch's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("nsa_sel", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"nsa-sel: {words}", RuntimeWarning, stacklevel=level)
