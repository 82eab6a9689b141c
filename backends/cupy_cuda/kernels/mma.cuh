// Tensor-core products of a warp (mma.sync) with operands in shared memory, and cp.async copies of these operands.
//
// A tile in shared memory is row-major, its columns padded to a multiple of 16, and its rows to an odd number of
// 16-byte units, so that the eight rows that `ldmatrix` reads at once lie in different banks.
#pragma once
#include "problem.cuh"

constexpr int DKP = (DK + 15) / 16 * 16, DVP = (DV + 15) / 16 * 16;  // padded columns
constexpr int KP = DKP + 8, VP = DVP + 8;                            // pitch of rows

// Where a row to copy begins in global memory, in numbers from a base; if not `exists`, zeros are written.
struct RowSource {
    i64 offset;
    bool exists;
};

// Copy ROWS rows of D columns to a tile, with the first THREADS threads of the CTA; source(r): row r as a RowSource.
template <int D, int PITCH, int ROWS, int THREADS, class Source>
DEVICE void copy_rows(u16 *tile, const u16 *base, Source source) {
    constexpr int CHUNKS = (PITCH - 8) / 8;  // of 16 bytes
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        const int r = i / CHUNKS, column = i % CHUNKS * 8;
        const RowSource row = source(r);
        const bool exists = row.exists && column < D;
        cp_async_16(tile + r * PITCH + column, exists ? base + row.offset + column : base, exists);
    }
}

// Copy heads [head0, head0 + HEADS) of a query row; zeros from head h on.
template <int D, int PITCH, int HEADS, int THREADS>
DEVICE void copy_heads(u16 *tile, const HeadsTensor &x, const Row &row, int head0, i64 h) {
    copy_rows<D, PITCH, HEADS, THREADS>(tile, x.heads(row.b, row.s, row.g), [&](int r) {
        return RowSource{(head0 + r) * x.stride_h, head0 + r < h};
    });
}

// Operand A: rows [m, m + 16) and columns [k, k + 16) of a tile.
template <int PITCH> DEVICE void load_a(u32 (&a)[4], const u16 *tile, int m, int k) {
    const int lane = threadIdx.x % 32;
    ldmatrix(a, tile + (m + lane % 16) * PITCH + k + lane / 16 * 8);
}

// Two adjacent accumulator tiles, rounded to 16 bits: operand A.
DEVICE void as_operand(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack(left[0], left[1]);
    a[1] = pack(left[2], left[3]);
    a[2] = pack(right[0], right[1]);
    a[3] = pack(right[2], right[3]);
}

// s += a b^T for 16 rows of a, in registers, and 8 * N rows of b; STEPS times 16 columns.
template <int PITCH, int STEPS, int N> DEVICE void add_a_bt(float (&s)[N][4], const u32 (&a)[STEPS][4], const u16 *b) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int k = 0; k < STEPS; ++k)
        UNROLL for (int j = 0; j < N; j += 2) {
            u32 y[4];
            ldmatrix(y, b + (8 * j + lane / 16 * 8 + lane % 8) * PITCH + 16 * k + lane / 8 % 2 * 8);  // operands B of rows 8 j to 8 j + 15
            mma(s[j], a[k], y[0], y[1]);
            mma(s[j + 1], a[k], y[2], y[3]);
        }
}

// The same for rows [m, m + 16) of a in shared memory.
template <int PITCH, int STEPS, int N> DEVICE void add_a_bt(float (&s)[N][4], const u16 *a, int m, const u16 *b) {
    UNROLL for (int k = 0; k < STEPS; ++k) {
        u32 x[1][4];
        load_a<PITCH>(x[0], a, m, 16 * k);
        add_a_bt<PITCH, 1>(s, x, b + 16 * k);
    }
}

// acc += s b for s rounded to 16 bits, and columns [first, first + 8 * M) of b, of which COLUMNS exist.
template <int PITCH, int COLUMNS, int N, int M>
DEVICE void add_s_b(float (&acc)[M][4], const float (&s)[N][4], const u16 *b, int first) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int j = 0; j < N; j += 2) {
        u32 a[4];
        as_operand(a, s[j], s[j + 1]);
        UNROLL for (int d = 0; d < M; d += 2) {
            if (COLUMNS % (8 * M) && first + 8 * d >= COLUMNS) continue;
            u32 y[4];
            ldmatrix_trans(y, b + (8 * j + lane / 8 % 2 * 8 + lane % 8) * PITCH + first + 8 * d + lane / 16 * 8);
            mma(acc[d], a, y[0], y[1]);
            mma(acc[d + 1], a, y[2], y[3]);
        }
    }
}

// A warp's 16 rows of an accumulator, as floats, to a matrix in shared memory.
template <int PITCH, int N> DEVICE void store_rows(float *matrix, const float (&acc)[N][4]) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int r = 0; r < 2; ++r) {
        float *row = matrix + (lane / 4 + 8 * r) * PITCH + lane % 4 * 2;
        UNROLL for (int j = 0; j < N; ++j) *reinterpret_cast<float2 *>(row + 8 * j) = make_float2(acc[j][2 * r], acc[j][2 * r + 1]);
    }
}
