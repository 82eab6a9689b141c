"""Which GPU, and which packages, a test needs."""

from __future__ import annotations

import pytest
import torch

from nsa_sel.core import registry

SM = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1] if torch.cuda.is_available() else 0
HOPPER = SM == 90
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of SM 9.0")


def needs(backend: str) -> pytest.MarkDecorator:
    """Skips a test where this machine lacks something for a backend, for the registry's reasons."""
    lacking = "; ".join(map(str, registry.missing(backend)))
    return pytest.mark.skipif(bool(lacking), reason=lacking)
