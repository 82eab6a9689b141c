"""The environment variable NSA_SEL_ENGINES, which both plugins read."""

from __future__ import annotations

import os
from typing import Literal

from nsa_sel.errors import ConfigError
from nsa_sel.settings.flags import ENGINES_FLAG

Switch = Literal["0", "1", "force"]


def engines_switch() -> Switch:
    """Return NSA_SEL_ENGINES: 0 leaves engines alone, 1 (unset) changes them on GPUs of SM 9.0, force on any device.

    Raises:
        ConfigError: another value.
    """
    text = os.environ.get(ENGINES_FLAG, "1").strip().lower()
    if text not in ("0", "1", "force"):
        raise ConfigError(ENGINES_FLAG, text, "0, 1 or force", "unset it for 1: engines run on nsa-sel on GPUs of SM 9.0")
    return text  # type: ignore[return-value]
