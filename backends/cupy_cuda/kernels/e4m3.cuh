// Keys and values in e4m3, which are converted in registers, as operands B of float16 products (hardware.cuh, mma).
//
// e4m3 is exact in float16. With stored numbers K, V and scales a, c of a key's head, or of its page and head:
//
//   s_j = a (q K_j^T),  o = sum_j p_j c V_j / l
//
// Scales never touch the numbers, nor p: p is at most 2^SLACK, far within float16, whatever the scales are. a is a factor of the logits in
// float32. A step lies in one page, and c is a factor of its product p V in float32, before that is added to acc; c of a head comes once,
// at the end. Either may be negative or zero, since the maximum is that of scaled logits.
//
// Order of numbers. A lane receives pairs of bytes where 16-bit numbers would be single ones:
//   K  `ldmatrix` gives lane t of a quad bytes 4 t ... 4 t + 3 of a key's 16: two pairs, which are b0 and b1. So contraction indices
//      2 t, 2 t + 1, 2 t + 8, 2 t + 9 stand for columns 4 t ... 4 t + 3. q is read in the same order.
//   V  `ldmatrix_trans` gives it columns 2 r and 2 r + 1 of keys 2 t and 2 t + 1, with r = lane / 4. Of 16 columns the even ones make one
//      product's operand, the odd ones another's: its accumulators hold columns 4 t ... 4 t + 3 of o, in turn.
//
//   PAGE_SCALES  1: each page and head has scales of its own
#pragma once
#include "mma.cuh"
#include "tma.cuh"

constexpr int BYTES = 1, K_BOX = DK, V_BOX = DV;  // of a stored number; columns of a TMA load
constexpr float Q_TOP = 32768.0f;  // what the largest power of two in a row of q becomes: the largest number stays below float16's 65504
constexpr float SMALLEST = 1.0e-30f;

// Scales [pages,G], or of heads where the stride of a page is 0; null: all are 1.
struct ScaleTensor {
    const float *data;
    i64 stride_page, stride_group;
    DEVICE const float *at(int page, i64 g) const { return data + page * stride_page + g * stride_group; }
    DEVICE float of_head(i64 g) const { return data ? *at(0, g) : 1.0f; }
    // PAGE_SCALES: into shared memory; it arrives at a barrier by itself, as keys do.
    DEVICE void load(float *to, u64 *full, int page, i64 g) const {
        cp_async_4(to, at(page, g), true);
        cp_async_mbarrier_arrive(full);
    }
};
struct KeyValueScales {
    ScaleTensor k, v;
};

// Where 16-byte chunk c of a row of D bytes lies in a tile that TMA has swizzled by D bytes (tensor_map.py).
template <int D>
DEVICE u32 swizzled_bytes(int row, int c) {
    static_assert(D == 128 || D == 64, "a row is as wide as a swizzle");
    return D == 128 ? swizzled(row, c) : row * 64 + (c ^ row / 2 % 4) * 16;
}

// Operand A: rows [m, m + 16) of a tile of q in the order of K.
template <int STEPS>
DEVICE void load_queries(u32 (&q)[STEPS][4], const u16 *tile, int m) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int k = 0; k < STEPS; ++k)
        UNROLL for (int r = 0; r < 2; ++r) {
            const uint2 numbers = *reinterpret_cast<const uint2 *>(tile + (m + lane / 4 + 8 * r) * KP + 16 * k + lane % 4 * 4);
            q[k][r] = numbers.x;
            q[k][r + 2] = numbers.y;
        }
}

// Rows of bfloat16 in a tile as float16, each times the power of two that brings its largest number to Q_TOP or above; rates[r]: its inverse.
// That is exact for all but numbers below 2^-32 of the largest. Each thread converts what it has copied (copy_heads), so no barrier is needed.
template <int ROWS, int THREADS>
DEVICE void convert_queries(u16 *tile, float *rates) {
#if BF16
    constexpr int CHUNKS = DK / 8;  // of a row: adjacent lanes have one each
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
        u32 *pairs = reinterpret_cast<u32 *>(tile + i / CHUNKS * KP + i % CHUNKS * 8);
        const uint4 loaded = *reinterpret_cast<const uint4 *>(pairs);
        const u32 x[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
        float low[4], high[4], top = 0.0f;
        UNROLL for (int n = 0; n < 4; ++n) {
            low[n] = to_float(static_cast<u16>(x[n]));
            high[n] = to_float(static_cast<u16>(x[n] >> 16));
            top = fmaxf(top, fmaxf(fabsf(low[n]), fabsf(high[n])));
        }
        UNROLL for (int far = 1; far < CHUNKS; far *= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, far));
        const float power = __int_as_float(__float_as_int(top) & 0x7f800000), inverse = (power > SMALLEST ? power : 1.0f) / Q_TOP;
        const float factor = 1.0f / inverse;
        *reinterpret_cast<uint4 *>(pairs) = make_uint4(
            pack_operand(low[0] * factor, high[0] * factor), pack_operand(low[1] * factor, high[1] * factor),
            pack_operand(low[2] * factor, high[2] * factor), pack_operand(low[3] * factor, high[3] * factor));
        if (i % CHUNKS == 0) rates[i / CHUNKS] = inverse;
    }
#endif
}

// s += q K^T for keys [first, first + 8 * N) of a tile.
template <int N>
DEVICE void add_q_kt(float (&s)[N][4], const u32 (&q)[DK / 16][4], const unsigned char *keys, int first) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int k = 0; k < DK / 16; k += 2)
        UNROLL for (int j = 0; j < N; j += 2) {
            u32 y[4];
            ldmatrix(y, reinterpret_cast<const u16 *>(keys + swizzled_bytes<DK>(first + 8 * j + lane % 16, k + lane / 16)));
            UNROLL for (int i = 0; i < 4; ++i) {
                u32 b0, b1;
                unpack_e4m3(y[i], b0, b1);
                mma(s[j + i % 2], q[k + i / 2], b0, b1);
            }
        }
}

// V as `ldmatrix_trans` gives it, of KEYS keys and 8 * N columns, from `first` on.
template <int KEYS, int N>
struct StoredValues {
    u32 pairs[N / 2][KEYS / 32][4];

    DEVICE StoredValues(const unsigned char *values, int first) {
        UNROLL for (int d = 0; d < N / 2; ++d)
            UNROLL for (int k = 0; k < KEYS / 32; ++k)
                ldmatrix_trans(
                    pairs[d][k], reinterpret_cast<const u16 *>(values + swizzled_bytes<DV>(32 * k + threadIdx.x % 32, first / 16 + d)));
    }

    // Zeros from key `keys` on.
    DEVICE void keep(int keys) {
        UNROLL for (int k = 0; k < KEYS / 32; ++k)
            UNROLL for (int i = 0; i < 4; ++i) {
                const int left = keys - (32 * k + 8 * i + threadIdx.x % 4 * 2);  // of the pair
                const u32 mask = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
                UNROLL for (int d = 0; d < N / 2; ++d) pairs[d][k][i] &= mask;
            }
    }
};

// acc += p V for rows [m, m + 16) of a tile of p, KEYS keys, and 8 * N columns of V; acc[2 i] has even columns of 16, acc[2 i + 1] odd ones.
// scale: of the step's page.
template <int PITCH, int KEYS, int N>
DEVICE void add_p_v(float (&acc)[N][4], const u16 *p_tile, int m, const StoredValues<KEYS, N> &values, float scale) {
    u32 p[KEYS / 16][4];
    UNROLL for (int k = 0; k < KEYS / 16; ++k) load_a<PITCH>(p[k], p_tile, m, 16 * k);
    UNROLL for (int d = 0; d < N; d += 2) {
        float sums[2][4] = {};
        UNROLL for (int k = 0; k < KEYS / 16; k += 2) {
            u32 even[4], odd[4];
            UNROLL for (int i = 0; i < 4; ++i) unpack_e4m3(__byte_perm(values.pairs[d / 2][k / 2][i], 0, 0x3120), even[i], odd[i]);
            UNROLL for (int i = 0; i < 4; i += 2) {
                mma(PAGE_SCALES ? sums[0] : acc[d], p[k + i / 2], even[i], even[i + 1]);
                mma(PAGE_SCALES ? sums[1] : acc[d + 1], p[k + i / 2], odd[i], odd[i + 1]);
            }
        }
        UNROLL for (int i = 0; PAGE_SCALES && i < 4; ++i) {
            acc[d][i] += sums[0][i] * scale;
            acc[d + 1][i] += sums[1][i] * scale;
        }
    }
}

// Four adjacent columns of row r: those of a lane among 16, of which acc[j] and acc[j + 1] have even and odd ones.
template <int N>
DEVICE float4 four_columns(const float (&acc)[N][4], int r, int j) {
    return make_float4(acc[j][2 * r], acc[j + 1][2 * r], acc[j][2 * r + 1], acc[j + 1][2 * r + 1]);
}

// Row r's columns, from `first` on, to the CTAs of a cluster (row_cluster.cuh).
template <int N, class Cluster>
DEVICE void send_row(Cluster &cluster, u32 rank, int head, int first, const float (&acc)[N][4], int r) {
    UNROLL for (int j = 0; j < N; j += 2) cluster.send_columns(rank, head, first + 8 * j + threadIdx.x % 4 * 4, four_columns(acc, r, j));
}

// Row r's columns, times `scale`, to o.
template <int N>
DEVICE void write_columns(u16 *to, const float (&acc)[N][4], int r, float scale, bool exists) {
    UNROLL for (int j = 0; j < N; j += 2) {
        const float4 x = four_columns(acc, r, j);
        const uint2 pairs = make_uint2(pack(x.x * scale, x.y * scale), pack(x.z * scale, x.w * scale));
        if (exists) *reinterpret_cast<uint2 *>(to + 8 * j + threadIdx.x % 4 * 4) = pairs;
    }
}
