"""Where events go: the target of NSA_DEBUG_LOG, or the user's own `log_to`."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from nsa_sel.core import forks
from nsa_sel.errors import ArgumentError, ConfigError, shown
from nsa_sel.settings.flags import LOG_FLAG
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry.events import LOGGER, listening
from nsa_sel.telemetry.log import JsonLines

_lock = forks.lock()
_handler: logging.Handler | None = None
_level = logging.NOTSET  # the logger's level before `_handler` was added
_followed: str | None = None  # the target in the settings of the last call
_following = False  # whether `_handler` was added because of these settings


class LogFile(logging.FileHandler):
    """Appends to a file. It never waits: opening a FIFO that nobody reads is an error."""

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_opener)


def _opener(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    if os.fstat(descriptor).st_size:  # a process that crashed may have left its last line without an end
        os.write(descriptor, b"\n")
    return descriptor


def log_to(target: str | None) -> None:
    """Write events as JSON lines.

    Args:
        target: "stderr", or a file, to which lines are appended. None stops writing.

    Raises:
        ArgumentError: for what is no name.
        ConfigError: for a file that can't be written.
    """
    if not isinstance(target, str | os.PathLike | None):
        raise ArgumentError("target", shown(target), '"stderr", the name of a file, or None', "pass one of these")
    _write_to(target, "target")


def _write_to(target: str | None, source: str) -> None:
    """`log_to`, of a target that the flag or argument `source` names. Where opening it fails, the previous target stays."""
    global _handler, _level, _following
    with _lock:
        try:
            handler: logging.Handler | None = None
            if target is not None:
                handler = logging.StreamHandler(sys.stderr) if target == "stderr" else LogFile(target)
        except OSError as error:
            allowed = f"stderr or a file that can be written; writing this one: {error.strerror}"
            raise ConfigError(source, target, allowed, "mend the path") from error
        if _handler is not None:
            LOGGER.removeHandler(_handler)
            LOGGER.setLevel(_level)
            _handler.close()
        _handler, _following = handler, False
        if handler is not None:
            handler.setFormatter(JsonLines())
            LOGGER.addHandler(handler)
            _level = LOGGER.level
            LOGGER.setLevel(logging.INFO)


def follow(settings: Settings) -> None:
    """Write events to the target of NSA_DEBUG_LOG, where it differs from the last call's; the user's own `log_to` is left alone.

    Where the flag is unset and another flag asks for events, they go to stderr, unless a handler takes them already.
    """
    global _followed, _following
    target = settings.debug_log
    if target == _followed:
        return
    implied = target is None or settings.sources.get("debug_log") != LOG_FLAG
    if not implied or _following or (target is not None and not _has_handler()):
        _write_to(target, LOG_FLAG)  # may raise: then the next call tries again
        _following = target is not None
    _followed = target


def _has_handler() -> bool:
    handlers = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
    return listening() and not all(isinstance(handler, logging.NullHandler) for handler in handlers)
