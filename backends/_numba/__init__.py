"""Compiled loops of the numba backend and the SIMD vector type that they use."""
