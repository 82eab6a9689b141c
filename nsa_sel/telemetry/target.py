"""The destination of events: the target of NSA_DEBUG_LOG, or of the user's own `log_to`."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from nsa_sel import forks
from nsa_sel.errors import ArgumentError, ConfigError, shown
from nsa_sel.settings.flags import LOG_FLAG
from nsa_sel.settings.schema import Settings
from nsa_sel.telemetry.events import LOGGER, listening
from nsa_sel.telemetry.log import JsonLines

_lock = forks.lock()
_handler: logging.Handler | None = None
_handler_from_flag = False  # True if NSA_DEBUG_LOG or another flag added `_handler`, False if `log_to` did
_level_before = logging.NOTSET  # the logger's level before `_handler` was added
followed: str | None = None  # the target in the settings of the last call


class LogFile(logging.FileHandler):
    """Append to a file. Opening never blocks: a FIFO without a reader is an error."""

    def _open(self) -> Any:
        def opener(path: str, flags: int) -> int:
            descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
            os.set_blocking(descriptor, True)
            if os.fstat(descriptor).st_size:  # a crashed process may have left its last line without a newline
                os.write(descriptor, b"\n")
            return descriptor

        return open(self.baseFilename, "a", encoding="utf-8", opener=opener)


def log_to(target: str | None) -> None:
    """Write events as JSON lines.

    Args:
        target: "stderr", or the name of a file to append to. None stops writing.

    Raises:
        ArgumentError: `target` is not a name.
        ConfigError: the file cannot be written.
    """
    if not isinstance(target, str | os.PathLike | None):
        raise ArgumentError("target", shown(target), '"stderr", the name of a file, or None', "pass one of these")
    _write_to(target, "target")


def _write_to(target: str | None, source: str) -> None:
    """Replace the handler. source: the flag or argument that names the target. If opening fails, the previous handler
    stays."""
    global _handler, _level_before, _handler_from_flag
    with _lock:
        try:
            handler: logging.Handler | None = None
            if target is not None:
                handler = logging.StreamHandler(sys.stderr) if target == "stderr" else LogFile(target)
        except OSError as error:
            allowed = f"stderr or a file that can be written; writing this one: {error.strerror}"
            raise ConfigError(source, target, allowed, "correct the path") from error
        if _handler is not None:
            LOGGER.removeHandler(_handler)
            LOGGER.setLevel(_level_before)
            _handler.close()
        _handler, _handler_from_flag = handler, False
        if handler is not None:
            handler.setFormatter(JsonLines())
            LOGGER.addHandler(handler)
            _level_before = LOGGER.level
            LOGGER.setLevel(logging.INFO)


def follow(settings: Settings) -> None:
    """Write events to the target of NSA_DEBUG_LOG if it changed since the last call. A target set by `log_to` stays.

    If the flag is unset and another flag asks for events, they go to stderr, unless another handler already receives
    them.
    """
    global followed, _handler_from_flag
    target = settings.debug_log
    if target == followed:
        return
    implied = target is None or settings.sources.get("debug_log") != LOG_FLAG
    handlers = [*LOGGER.handlers, *(logging.getLogger().handlers if LOGGER.propagate else ())]
    handled = listening() and not all(isinstance(handler, logging.NullHandler) for handler in handlers)
    if not implied or _handler_from_flag or (target is not None and not handled):
        _write_to(target, LOG_FLAG)  # may raise; the next call then tries again
        _handler_from_flag = target is not None
    followed = target
