"""The compiled loops of the Numba backend and their SIMD vectors."""
