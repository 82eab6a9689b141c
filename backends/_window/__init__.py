"""Attention to the last keys of every row in plain PyTorch, for what the Triton kernels of window_triton.py do not take: CPUs, float64."""
