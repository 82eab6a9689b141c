"""Hugging Face transformers on nsa-sel: dense models without training (register.py), and released models that select
blocks (patch.py)."""

from nsa_sel.compat.transformers.patch import Patched, patch_model
from nsa_sel.compat.transformers.register import attend, first_keys, register_transformers

__all__ = ["Patched", "attend", "first_keys", "patch_model", "register_transformers"]
