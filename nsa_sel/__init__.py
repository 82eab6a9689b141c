"""Selection attention of Native Sparse Attention (arXiv 2502.11089): one call, several backends, and a decision anyone
can read.

Public names are imported when they are first used: `import nsa_sel` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from nsa_sel.version import __version__ as __version__

if TYPE_CHECKING:
    from nsa_sel.attention import explain, selection_attention, with_sink
    from nsa_sel.attention_layer import NSAttention
    from nsa_sel.branches import nsa_attention
    from nsa_sel.cache import NSACache
    from nsa_sel.choosing import choose_blocks, compressed_attention, infllm_selection, moba_selection
    from nsa_sel.core.decide import explain_request, use_backend
    from nsa_sel.core.decision import Decision
    from nsa_sel.core.warm import reset
    from nsa_sel.index_loss import indexer_loss
    from nsa_sel.layer import NSASelection, block_scores
    from nsa_sel.msa_layer import MSAttention
    from nsa_sel.quantize import quantize_e4m3
    from nsa_sel.selection import Selection
    from nsa_sel.serving import choose_blocks_with_kvcache, selection_attention_with_kvcache
    from nsa_sel.settings.warmup import sync_tuning, warmup
    from nsa_sel.telemetry.describe import describe
    from nsa_sel.telemetry.events import counters, decisions
    from nsa_sel.telemetry.log import log_to
    from nsa_sel.varlen import compressed_cu_seqlens, selection_attention_varlen, varlen_positions
    from nsa_sel.window import sliding_window_attention

__all__ = [
    "Decision",
    "MSAttention",
    "NSACache",
    "NSASelection",
    "NSAttention",
    "Selection",
    "block_scores",
    "choose_blocks",
    "choose_blocks_with_kvcache",
    "compressed_attention",
    "compressed_cu_seqlens",
    "counters",
    "decisions",
    "describe",
    "explain",
    "explain_request",
    "indexer_loss",
    "infllm_selection",
    "log_to",
    "moba_selection",
    "nsa_attention",
    "quantize_e4m3",
    "reset",
    "selection_attention",
    "selection_attention_varlen",
    "selection_attention_with_kvcache",
    "sliding_window_attention",
    "sync_tuning",
    "use_backend",
    "varlen_positions",
    "warmup",
    "with_sink",
]
_HOMES = {
    "Decision": "core.decision",
    "MSAttention": "msa_layer",
    "NSACache": "cache",
    "NSASelection": "layer",
    "NSAttention": "attention_layer",
    "Selection": "selection",
    "block_scores": "layer",
    "choose_blocks": "choosing",
    "choose_blocks_with_kvcache": "serving",
    "compressed_attention": "choosing",
    "compressed_cu_seqlens": "varlen",
    "counters": "telemetry.events",
    "decisions": "telemetry.events",
    "describe": "telemetry.describe",
    "explain": "attention",
    "explain_request": "core.decide",
    "indexer_loss": "index_loss",
    "infllm_selection": "choosing",
    "log_to": "telemetry.log",
    "moba_selection": "choosing",
    "nsa_attention": "branches",
    "quantize_e4m3": "quantize",
    "reset": "core.warm",
    "selection_attention": "attention",
    "selection_attention_varlen": "varlen",
    "selection_attention_with_kvcache": "serving",
    "sliding_window_attention": "window",
    "sync_tuning": "settings.warmup",
    "use_backend": "core.decide",
    "varlen_positions": "varlen",
    "warmup": "settings.warmup",
    "with_sink": "attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nsa_sel' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(f"nsa_sel.{_HOMES[name]}"), name)  # later uses find it there
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
