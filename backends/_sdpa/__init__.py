"""Packed SDPA: one attention step, and the three ways through the rows of a call."""
