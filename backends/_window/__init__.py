"""Sliding-window attention in plain PyTorch, for calls that no window kernel takes: CPUs, float64."""
