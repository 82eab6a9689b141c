"""Selection attention of Native Sparse Attention (arXiv 2502.11089): one call, several backends, and a decision anyone can read.

Names are loaded when first used: `import nsa_sel.dispatch` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_sel.attention import explain, explain_request, forget_decisions, selection_attention, use_backend
    from nsa_sel.decision import Decision
    from nsa_sel.module import NSASelection, block_scores
    from nsa_sel.observe import counters, decisions, log_to
    from nsa_sel.selection import Selection
    from nsa_sel.serving import selection_attention_with_kvcache
    from nsa_sel.show import describe
    from nsa_sel.syncing import sync_tuning
    from nsa_sel.varlen import selection_attention_varlen, varlen_positions
    from nsa_sel.warming import warmup

__version__ = "0.1.0"
__all__ = [
    "Decision",
    "NSASelection",
    "Selection",
    "block_scores",
    "counters",
    "decisions",
    "describe",
    "explain",
    "explain_request",
    "forget_decisions",
    "log_to",
    "selection_attention",
    "selection_attention_varlen",
    "selection_attention_with_kvcache",
    "sync_tuning",
    "use_backend",
    "varlen_positions",
    "warmup",
]
_HOMES = {
    "Decision": "decision",
    "NSASelection": "module",
    "Selection": "selection",
    "block_scores": "module",
    "counters": "observe",
    "decisions": "observe",
    "describe": "show",
    "explain": "attention",
    "explain_request": "attention",
    "forget_decisions": "attention",
    "log_to": "observe",
    "selection_attention": "attention",
    "selection_attention_varlen": "varlen",
    "selection_attention_with_kvcache": "serving",
    "sync_tuning": "syncing",
    "use_backend": "attention",
    "varlen_positions": "varlen",
    "warmup": "warming",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nsa_sel' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(f"nsa_sel.{_HOMES[name]}"), name)  # found without this from now on
    return value
