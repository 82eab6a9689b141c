"""Hugging Face transformers on nsa-sel: dense models without training (register.py), and released models that select blocks."""

from nsa_sel.compat.transformers.register import Patched, attend, first_keys, patch_model, register_transformers

__all__ = ["Patched", "attend", "first_keys", "patch_model", "register_transformers"]
