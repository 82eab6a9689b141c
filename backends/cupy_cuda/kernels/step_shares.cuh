// A step's keys, shared by the warps of the same heads: each has SHARE of them for q k^T, and a share of the columns of v for p v.
// After step_tiles.cuh or e4m3.cuh, whose tiles these are.
#pragma once
#include "softmax.cuh"

// Raise the maxima of a lane's rows, `row` and `row + 8`, to those of all shares; acc follows. By all THREADS threads.
template <int THREADS, int SHARES, int ROWS, int N>
DEVICE void raise_maxima(OnlineSoftmax &softmax, float (&acc)[N][4], const float (&top)[2], float (&tops)[SHARES][ROWS], int share, int row) {
    UNROLL for (int r = 0; r < 2; ++r) {
        const float highest = quad_max(top[r]);
        if (threadIdx.x % 4 == 0) tops[share][row + 8 * r] = highest;
    }
    named_barrier<THREADS>(1);
    float alpha[2];
    UNROLL for (int r = 0; r < 2; ++r) {
        float highest = softmax.m[r];
        UNROLL for (int other = 0; other < SHARES; ++other) highest = fmaxf(highest, tops[other][row + 8 * r]);
        alpha[r] = softmax.raise(r, highest);
    }
    scale_rows(acc, alpha);
}

// Zero the values of keys [first, first + SHARE) from key `keys` on, by a warp. Whole rows: the swizzle within them does not matter.
template <int SHARE>
DEVICE void zero_values(unsigned char *values, int first, int keys) {
    constexpr int CHUNKS = V_BOX * BYTES / 16;  // of a row of a box
    UNROLL for (int panel = 0; panel < DV / V_BOX; ++panel)
        for (int i = max(first, keys) * CHUNKS + threadIdx.x % 32; i < (first + SHARE) * CHUNKS; i += 32)
            *reinterpret_cast<uint4 *>(values + panel * PANEL + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();  // before the next TMA load to this stage
}
