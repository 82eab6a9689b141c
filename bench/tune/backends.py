"""What tuning reads from the backends' entries."""

from __future__ import annotations

from nsa_sel.backends.specs import SPECS
from nsa_sel.bench.tune.search_space import SPACES

TERMS = {f"{backend.name}/{direction}": terms for backend in SPECS for direction, terms in backend.cost_terms.items()}
TUNED = tuple(dict.fromkeys(space.backend for space in SPACES))  # have kernel configs
MODELED = tuple(backend.name for backend in SPECS if backend.cost_terms)
