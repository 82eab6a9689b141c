"""Packed SDPA: one masked attention step (attend), and the three paths: dense, gathered, key_tiles."""
