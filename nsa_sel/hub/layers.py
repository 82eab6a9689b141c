"""Layers for `use_kernel_forward_from_hub` of Hugging Face `kernels`: the module `layers` of the kernel that kernel.py builds."""

from __future__ import annotations

from torch import nn

from nsa_sel import layer


class NSASelection(nn.Module):
    """The forward of `nsa_sel.NSASelection` for a layer of yours with the same arguments, which has its attributes: n, block_size, first,
    local, scale, backend. `kernels` wants a class with no constructor and no other members."""

    has_backward = True
    can_torch_compile = True
    forward = layer.NSASelection.forward
