"""Calls with the signatures of other libraries: a model moves over by changing one import line, or by none.

    from nsa_sel.compat import patch_fla                     # fla's NSA and MoBA layers and models run on nsa-sel, unchanged
    from nsa_sel.compat import parallel_nsa                  # for fla.ops.nsa (flash-linear-attention)
    from nsa_sel.compat import parallel_moba                 # for fla.ops.moba
    from nsa_sel.compat import compressed_attention          # for native_sparse_attention.ops (native-sparse-attention-triton)
    from nsa_sel.compat import topk_sparse_attention         # for native_sparse_attention.ops
    from nsa_sel.compat import flash_nsa                     # for HFNSACore (Scalable-Flash-Native-Sparse-Attention)
    from nsa_sel.compat import FSA_topk_sparse_attention     # for fsa.ops (Flash-Sparse-Attention)

    from nsa_sel.compat import patch_infllm_v2               # MiniCPM4's remote code finds nsa-sel as `infllm_v2`
    from nsa_sel.compat import patch_model                   # patch_model(model): MiniMax-M3, Qwen3.8, fla's NSA and MoBA, dense models
    from nsa_sel.compat import register_transformers         # attn_implementation="nsa_sel" of Hugging Face transformers

They are differentiable, and choose a backend as `selection_attention` does. They do not copy q, k or v; with
cu_seqlens, k and v may be copied as described in `selection_attention_varlen`. docs/compat.md lists where results
differ from the originals' on purpose.
"""

from nsa_sel.compat.fla import parallel_moba, parallel_nsa, patch_fla
from nsa_sel.compat.infllm_v2 import patch_infllm_v2
from nsa_sel.compat.packed import FSA_topk_sparse_attention, compressed_attention, flash_nsa, topk_sparse_attention
from nsa_sel.compat.transformers import Patched, patch_model, register_transformers

__all__ = [
    "FSA_topk_sparse_attention",
    "Patched",
    "compressed_attention",
    "flash_nsa",
    "parallel_moba",
    "parallel_nsa",
    "patch_fla",
    "patch_infllm_v2",
    "patch_model",
    "register_transformers",
    "topk_sparse_attention",
]
