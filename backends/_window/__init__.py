"""Attention to the last keys of every row in plain PyTorch, for what no kernel of windows takes: CPUs, float64."""
