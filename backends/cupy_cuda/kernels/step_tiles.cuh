// Keys and values of 16 bits, in tiles that TMA has swizzled (tma.cuh), as operands B. e4m3.cuh has the same functions for numbers of 8 bits.
#pragma once
#include "mma.cuh"
#include "tma.cuh"

constexpr int BYTES = 2, K_BOX = 64, V_BOX = 64;  // of a stored number; columns of a TMA load

// q is an operand as it is.
template <int ROWS, int THREADS>
DEVICE void convert_queries(u16 *, float *) {}

// Operand A: rows [m, m + 16) of a tile of q.
template <int STEPS>
DEVICE void load_queries(u32 (&q)[STEPS][4], const u16 *tile, int m) {
    UNROLL for (int k = 0; k < STEPS; ++k) load_a<KP>(q[k], tile, m, 16 * k);
}

// s += q K^T for keys [first, first + 8 * N) of a tile.
template <int N>
DEVICE void add_q_kt(float (&s)[N][4], const u32 (&q)[DK / 16][4], const unsigned char *keys, int first) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int k = 0; k < DK / 16; ++k)
        UNROLL for (int j = 0; j < N; j += 2) {
            u32 y[4];
            const u32 at = swizzled(first + 8 * j + lane / 16 * 8 + lane % 8, k % 4 * 2 + lane / 8 % 2);
            ldmatrix(y, reinterpret_cast<const u16 *>(keys + k / 4 * PANEL + at));
            mma(s[j], q[k], y[0], y[1]);
            mma(s[j + 1], q[k], y[2], y[3]);
        }
}

// acc += p V for rows [m, m + 16) of a tile of p, KEYS keys, and 8 * N columns of V, from `first` on.
template <int PITCH, int KEYS, int N>
DEVICE void add_p_v(float (&acc)[N][4], const u16 *p_tile, int m, const unsigned char *values, int first, float) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int k = 0; k < KEYS; k += 16) {
        u32 a[4];
        load_a<PITCH>(a, p_tile, m, k);
        UNROLL for (int d = 0; d < N; d += 2) {
            const int column = first + 8 * d;
            u32 y[4];
            const u32 at = column / 64 * PANEL + swizzled(k + lane % 16, column % 64 / 8 + lane / 16);
            ldmatrix_trans(y, reinterpret_cast<const u16 *>(values + at));
            mma(acc[d], a, y[0], y[1]);
            mma(acc[d + 1], a, y[2], y[3]);
        }
    }
}

// Row r's columns, from `first` on, to the CTAs of a cluster (row_cluster.cuh).
template <int N, class Cluster>
DEVICE void send_row(Cluster &cluster, u32 rank, int head, int first, const float (&acc)[N][4], int r) {
    UNROLL for (int j = 0; j < N; ++j) cluster.send_columns(rank, head, first + 8 * j + threadIdx.x % 4 * 2, acc[j][2 * r], acc[j][2 * r + 1]);
}

// Row r's columns, times `scale`, to o.
template <int N>
DEVICE void write_columns(u16 *to, const float (&acc)[N][4], int r, float scale, bool exists) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int j = 0; j < N; j += 4) {
        u32 y[4];
        UNROLL for (int n = 0; n < 4; ++n)
            if (j + n < N) y[n] = pack(acc[j + n][2 * r] * scale, acc[j + n][2 * r + 1] * scale);
        if (N % 4 == 0) {
            quad_transpose(y);
            if (exists) *reinterpret_cast<uint4 *>(to + 8 * j + lane % 4 * 8) = make_uint4(y[0], y[1], y[2], y[3]);
        } else if (exists) {
            UNROLL for (int n = 0; n < 2; ++n) *reinterpret_cast<u32 *>(to + 8 * (j + n) + lane % 4 * 2) = y[n];
        }
    }
}
