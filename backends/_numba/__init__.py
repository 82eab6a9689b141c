"""What the Numba backend is built from: SIMD vectors."""
