// Collectives of a quad, a warp and a CTA: maxima, sums, prefix sums, a 4 x 4 transpose.
#pragma once
#include "hardware.cuh"

constexpr u32 ALL_LANES = 0xffffffffu;

// Reductions over a quad: the four lanes that share rows of an accumulator (hardware.cuh, mma).
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

DEVICE float warp_max(float x) {
    for (int far = 16; far > 0; far /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, far));
    return x;
}
DEVICE float warp_sum(float x) {
    for (int far = 16; far > 0; far /= 2) x += __shfl_xor_sync(ALL_LANES, x, far);
    return x;
}

// Return the inclusive prefix sum over the lanes.
DEVICE int warp_prefix_sum(int x) {
    const int lane = threadIdx.x % 32;
    for (int gap = 1; gap < 32; gap *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, x, gap);
        if (lane >= gap) x += other;
    }
    return x;
}

// Inclusive prefix sums of N numbers over the threads of the CTA, in place; `total`: the sums over all threads.
template <int THREADS, int N> DEVICE void block_prefix_sum(int (&x)[N], int (&total)[N]) {
    __shared__ int sums[N][THREADS / 32];
    const int warp = threadIdx.x / 32;
    UNROLL for (int n = 0; n < N; ++n) {
        x[n] = warp_prefix_sum(x[n]);
        if (threadIdx.x % 32 == 31) sums[n][warp] = x[n];
    }
    __syncthreads();
    UNROLL for (int n = 0; n < N; ++n) {
        total[n] = 0;
        for (int i = 0; i < THREADS / 32; ++i) {
            if (i < warp) x[n] += sums[n][i];
            total[n] += sums[n][i];
        }
    }
    __syncthreads();  // all threads have read `sums`
}

// Transpose a 4 x 4 matrix over a quad: each lane holds a row and receives a column.
DEVICE void quad_transpose(u32 (&x)[4]) {
    UNROLL for (int far = 1; far <= 2; far *= 2) {
        const bool upper = threadIdx.x & far;
        UNROLL for (int i = 0; i < 4; ++i) {
            if (i & far) continue;
            const u32 theirs = __shfl_xor_sync(ALL_LANES, upper ? x[i] : x[i + far], far);
            if (upper) x[i] = theirs;
            else x[i + far] = theirs;
        }
    }
}
