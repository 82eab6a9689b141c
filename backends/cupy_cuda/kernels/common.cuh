// What the kernels share: the arguments of a call, the clamped ranges, and operands of the matrix unit in shared memory.
//
// Written without the toolkit's headers: NVRTC then needs no include folder. The compiler is given these constants:
//   BF16        1: bfloat16, 0: float16
//   DK, DV      columns of a key and of a value, multiples of 8
//   ALIGNED     1: rows of q, k, v (and do) begin at multiples of 16 bytes and are copied 16 bytes at a time; 0: element by element
//
// The mathematics, with logits s = scale * q k^T over a row's selected keys, L = log sum exp s, p = exp(s - L):
//   forward    o = sum_j p_j v_j, kept as (acc, l, m): o = acc / l, with everything relative to the running maximum m
//   backward   delta = sum(do * o) - dL,  ds = p * (do v^T - delta),  dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T do
// Kernels work in base 2, with c = scale * log2 e, because exp2 is one instruction; lse leaves them as a natural logarithm.
#pragma once
#include "hardware.cuh"

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float LOWEST = -1.0e30f;  // below any logit, yet finite: exp2(-inf - LOWEST) is 0 where exp2(-inf - -inf) would be NaN
constexpr u32 ALL = 0xffffffffu;    // lanes

// Columns padded to what one matrix step takes, and the pitch of their rows in shared memory: 16 bytes more make the pitch an odd number
// of 16-byte units, so that the eight rows that `ldmatrix` reads at once lie in different banks.
constexpr int DKP = (DK + 15) / 16 * 16, DVP = (DV + 15) / 16 * 16;
constexpr int KP = DKP + 8, VP = DVP + 8;

DEVICE float infinity() { return __int_as_float(0x7f800000); }

// What a launch is told of the call. All fields have 8 bytes, so that packing them needs no thought of alignment (launch.py).
struct Problem {
    const u16 *q, *k, *v;  // q [B,S,G,h,DK], k [B,G,S_kv,DK], v [B,G,S_kv,DV]
    const char *ranges;    // [B,S,G,n,2], contiguous
    const char *q_pos;     // [B,S], or null: positions are S_kv - S + s
    i64 stride_qb, stride_qs, stride_qg, stride_qh, stride_kb, stride_kg, stride_kn, stride_vb, stride_vg, stride_vn, stride_pb, stride_ps;
    i64 range_bytes, pos_bytes;  // of one number: 4 or 8
    i64 S, S_kv, G, h, n;
    double scale, scale_log2;
};

// Number i of an array of 4- or 8-byte integers.
DEVICE i64 integer(const char *array, i64 bytes, i64 i) {
    return bytes == 8 ? reinterpret_cast<const i64 *>(array)[i] : reinterpret_cast<const int *>(array)[i];
}

// One past the last key that row s may see: min(t + 1, S_kv).
DEVICE int row_limit(const Problem &p, i64 b, i64 s) {
    i64 t = p.q_pos ? integer(p.q_pos, p.pos_bytes, b * p.stride_pb + s * p.stride_ps) : p.S_kv - p.S + s;
    return static_cast<int>(max(0ll, min(t, p.S_kv - 1) + 1));
}

// Range `at` of all ranges as [max(start, 0), min(end, limit)), end >= start; clamped before the cast: int64 may hold any bound.
DEVICE void clamped_range(const Problem &p, i64 at, int limit, int &start, int &end) {
    i64 begin = integer(p.ranges, p.range_bytes, 2 * at), stop = integer(p.ranges, p.range_bytes, 2 * at + 1);
    start = static_cast<int>(min(max(begin, 0ll), static_cast<i64>(limit)));
    end = max(start, static_cast<int>(max(min(stop, static_cast<i64>(limit)), 0ll)));
}

// The row of batch entry b, position s and group g among B*S*G, for program number pid of B*G*S: neighbours share a group, and often keys.
struct Row {
    i64 b, s, g, number;
};

DEVICE Row row_of(const Problem &p, u32 pid) {  // 32 bits: a grid has fewer than 2^31 blocks, and 64-bit divisions are slow
    u32 S = p.S, G = p.G;
    Row row;
    row.s = pid % S;
    row.b = pid / S / G;
    row.g = pid / S % G;
    row.number = (row.b * p.S + row.s) * p.G + row.g;
    return row;
}

// Copy rows of heads head0 .. head0 + HEADS of one query row, with the first THREADS threads of the block; zeros for heads from h on.
template <int D, int PITCH, int HEADS, int THREADS>
DEVICE void copy_heads(u16 *tile, const u16 *base, i64 stride, int head0, i64 h) {
    constexpr int PIECES = (PITCH - 8) / 8;
    for (int i = threadIdx.x; i < HEADS * PIECES; i += THREADS) {
        int r = i / PIECES, column = i % PIECES * 8;
        bool exists = head0 + r < h && column < D;
        copy_eight(tile + r * PITCH + column, exists ? base + (head0 + r) * stride + column : base, exists);
    }
}

// Operand A from rows [m, m + 16) and columns [k, k + 16) of a row-major matrix.
template <int PITCH>
DEVICE void load_a(u32 (&a)[4], const u16 *matrix, int m, int k) {
    int lane = threadIdx.x % 32;
    load_matrices(a, matrix + (m + lane % 16) * PITCH + k + lane / 16 * 8);
}

// Two operands B of a b^T, for rows [n, n + 8) and [n + 8, n + 16) of the row-major b: b[0], b[1] and b[2], b[3].
template <int PITCH>
DEVICE void load_b_rows(u32 (&b)[4], const u16 *matrix, int n, int k) {
    int lane = threadIdx.x % 32;
    load_matrices(b, matrix + (n + lane / 16 * 8 + lane % 8) * PITCH + k + lane / 8 % 2 * 8);
}

// Two operands B of a b, for columns [n, n + 8) and [n + 8, n + 16) of the row-major b.
template <int PITCH>
DEVICE void load_b_columns(u32 (&b)[4], const u16 *matrix, int k, int n) {
    int lane = threadIdx.x % 32;
    load_transposed(b, matrix + (k + lane / 8 % 2 * 8 + lane % 8) * PITCH + n + lane / 16 * 8);
}

// Rounded to 16 bits, results [2j] and [2j + 1] of a row of 16 x 8 results: operand A with their 16 columns.
DEVICE void as_operand(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack(left[0], left[1]);
    a[1] = pack(left[2], left[3]);
    a[2] = pack(right[0], right[1]);
    a[3] = pack(right[2], right[3]);
}

// s += a b^T for the 16 rows of a and 8 * N rows of b, 16 columns a step; a in registers, or rows [m, m + 16) in shared memory.
template <int PITCH, int STEPS, int N>
DEVICE void add_products(float (&s)[N][4], const u32 (&a)[STEPS][4], const u16 *b) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            u32 y[4];
            load_b_rows<PITCH>(y, b, 8 * j, 16 * k);
            multiply_add(s[j], a[k], y[0], y[1]);
            multiply_add(s[j + 1], a[k], y[2], y[3]);
        }
}

template <int PITCH, int STEPS, int N>
DEVICE void add_products(float (&s)[N][4], const u16 *a, int m, const u16 *b) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        u32 x[1][4];
        load_a<PITCH>(x[0], a, m, 16 * k);
        add_products<PITCH, 1>(s, x, b + 16 * k);
    }
}

// acc += s b for 8 * N columns of s, rounded, as many rows of b, and columns [first, first + 8 * M) of b of which `COLUMNS` exist.
template <int PITCH, int COLUMNS, int N, int M>
DEVICE void add_sums(float (&acc)[M][4], const float (&s)[N][4], const u16 *b, int first) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        u32 a[4];
        as_operand(a, s[j], s[j + 1]);
#pragma unroll
        for (int d = 0; d < M; d += 2) {
            if (COLUMNS % (8 * M) && first + 8 * d >= COLUMNS) continue;
            u32 y[4];
            load_b_columns<PITCH>(y, b, 8 * j, first + 8 * d);
            multiply_add(acc[d], a, y[0], y[1]);
            multiply_add(acc[d + 1], a, y[2], y[3]);
        }
    }
}

// Of four lanes each has a row of a 4 x 4 matrix; then each has a column.
DEVICE void transpose(u32 (&x)[4]) {
#pragma unroll
    for (int far = 1; far <= 2; far *= 2) {
        const bool upper = threadIdx.x & far;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & far) continue;
            const u32 theirs = __shfl_xor_sync(ALL, upper ? x[i] : x[i + far], far);
            if (upper) x[i] = theirs;
            else x[i + far] = theirs;
        }
    }
}
