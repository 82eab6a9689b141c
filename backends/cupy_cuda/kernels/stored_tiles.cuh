// A step's keys and values as operands B of mma.sync, and its work shared by the warps of the same heads. `Stored` is
// the policy for the type of keys and values in memory: SixteenBit (that of q), or E4m3, converted in registers.
//
// e4m3 is exact in float16. With stored numbers K, V and scales a, c of a key's head, or of its page and head:
//
//   s_j = a (q K_j^T),  o = sum_j p_j c V_j / l
//
// Scales multiply float32 numbers only: a the logits, c of a page the step's product p V (a step lies in one page), c
// of a head the result. They may be negative or zero, since the maximum is that of scaled logits.
//
// Order of e4m3 numbers: a lane receives a pair of bytes where it would receive one 16-bit number.
//   K  `ldmatrix` gives lane t of a quad bytes 4 t ... 4 t + 3 of a key's 16: two pairs, b0 and b1. Contraction
//      indices 2 t, 2 t + 1, 2 t + 8, 2 t + 9 stand for columns 4 t ... 4 t + 3; q is read in the same order.
//   V  `ldmatrix_trans` gives it columns 2 r and 2 r + 1 of keys 2 t and 2 t + 1, with r = lane / 4. Even columns of 16
//      are one product's operand, odd ones another's: o's columns 4 t ... 4 t + 3 alternate between two accumulators.
//
//   E4M3         1: keys and values are e4m3
//   PAGE_SCALES  1: each page and head has its own scales; 0: each head has
#pragma once
#include "mma.cuh"
#include "softmax.cuh"
#include "hopper_tiles.cuh"

constexpr int BYTES = E4M3 ? 1 : 2;                                 // per stored number
constexpr int K_BOX = E4M3 ? DK : 64, V_BOX = E4M3 ? DV : 64;       // columns per TMA box
constexpr float Q_TOP = 32768.0f, SMALLEST = 1.0e-30f;              // convert_queries
constexpr float SLACK = 8.0f;                                       // the lazy maximum rises if c (s - m) exceeds it

// Scales [pages,G], or [1,G] of heads (stride_page is 0); null: all are 1.
struct ScaleTensor {
    const float *data;
    i64 stride_page, stride_group;
    DEVICE const float *at(int page, i64 g) const { return data + page * stride_page + g * stride_group; }
    DEVICE float of_head(i64 g) const { return data ? *at(0, g) : 1.0f; }
    // PAGE_SCALES: copy to shared memory; the copy arrives at the barrier when it is complete, as keys do.
    DEVICE void load(float *to, u64 *full, int page, i64 g) const {
        cp_async_4(to, at(page, g), true);
        cp_async_mbarrier_arrive(full);
    }
};
struct KeyValueScales {
    ScaleTensor k, v;
};

struct SixteenBit {
    // q needs no conversion.
    template <int ROWS, int THREADS> DEVICE static void convert_queries(u16 *, float *) {}

    // Load operand A: rows [m, m + 16) of a tile of q.
    template <int STEPS> DEVICE static void load_queries(u32 (&q)[STEPS][4], const u16 *tile, int m) {
        UNROLL for (int k = 0; k < STEPS; ++k) load_a<KP>(q[k], tile, m, 16 * k);
    }

    // s += q K^T for keys [first, first + 8 * N) of a tile.
    template <int N>
    DEVICE static void add_q_kt(float (&s)[N][4], const u32 (&q)[DK / 16][4], const unsigned char *keys, int first) {
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

    // Columns [first, first + 8 * N) of KEYS values, left in shared memory.
    template <int KEYS, int N> struct Values {
        const unsigned char *tile;
        int first;
        DEVICE Values(const unsigned char *values, int column) : tile(values), first(column) {}
        DEVICE void keep(int) {}
    };
    // acc += p V for rows [m, m + 16) of a tile of p.
    template <int PITCH, int KEYS, int N>
    DEVICE static void add_p_v(float (&acc)[N][4], const u16 *p_tile, int m, const Values<KEYS, N> &values, float) {
        const int lane = threadIdx.x % 32;
        UNROLL for (int k = 0; k < KEYS; k += 16) {
            u32 a[4];
            load_a<PITCH>(a, p_tile, m, k);
            UNROLL for (int d = 0; d < N; d += 2) {
                const int column = values.first + 8 * d;
                u32 y[4];
                const u32 at = column / 64 * PANEL + swizzled(k + lane % 16, column % 64 / 8 + lane / 16);
                ldmatrix_trans(y, reinterpret_cast<const u16 *>(values.tile + at));
                mma(acc[d], a, y[0], y[1]);
                mma(acc[d + 1], a, y[2], y[3]);
            }
        }
    }

    // Send row r's columns, from `first` on, to the CTAs of a cluster.
    template <int N, class Cluster>
    DEVICE static void send_row(Cluster &cluster, u32 rank, int head, int first, const float (&acc)[N][4], int r) {
        UNROLL for (int j = 0; j < N; ++j)
            cluster.send_columns(rank, head, first + 8 * j + threadIdx.x % 4 * 2, acc[j][2 * r], acc[j][2 * r + 1]);
    }

    // Store row r's columns, times `scale`, to o.
    template <int N>
    DEVICE static void write_columns(u16 *to, const float (&acc)[N][4], int r, float scale, bool exists) {
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
};

// Return the offset of 16-byte chunk c of a row of D bytes in a tile that TMA has swizzled by D bytes (tensor_map.py).
template <int D> DEVICE u32 swizzled_bytes(int row, int c) {
    static_assert(!E4M3 || D == 128 || D == 64, "a row is as wide as a swizzle");
    return D == 128 ? swizzled(row, c) : row * 64 + (c ^ row / 2 % 4) * 16;
}

// The same functions for e4m3.
struct E4m3 {
    // Convert bfloat16 rows to float16, each times the power of two that brings its largest number to [Q_TOP, 2 Q_TOP);
    // rates[r]: the inverse factor. Exact except for numbers below 2^-32 of the largest. Each thread converts what it
    // has copied (copy_heads), so no barrier is needed.
    template <int ROWS, int THREADS> DEVICE static void convert_queries(u16 *tile, float *rates) {
        if (!BF16) return;
        constexpr int CHUNKS = DK / 8;  // per row, one for each of CHUNKS adjacent lanes
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
    }

    template <int STEPS> DEVICE static void load_queries(u32 (&q)[STEPS][4], const u16 *tile, int m) {
        const int lane = threadIdx.x % 32;
        UNROLL for (int k = 0; k < STEPS; ++k)
            UNROLL for (int r = 0; r < 2; ++r) {
                const uint2 numbers = *reinterpret_cast<const uint2 *>(tile + (m + lane / 4 + 8 * r) * KP + 16 * k + lane % 4 * 4);
                q[k][r] = numbers.x;
                q[k][r + 2] = numbers.y;
            }
    }

    template <int N>
    DEVICE static void add_q_kt(float (&s)[N][4], const u32 (&q)[DK / 16][4], const unsigned char *keys, int first) {
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

    // Columns [first, first + 8 * N) of KEYS values, as `ldmatrix_trans` returns them.
    template <int KEYS, int N> struct Values {
        u32 pairs[N / 2][KEYS / 32][4];
        DEVICE Values(const unsigned char *values, int first) {
            UNROLL for (int d = 0; d < N / 2; ++d)
                UNROLL for (int k = 0; k < KEYS / 32; ++k)
                    ldmatrix_trans(pairs[d][k],
                                   reinterpret_cast<const u16 *>(values + swizzled_bytes<DV>(32 * k + threadIdx.x % 32, first / 16 + d)));
        }
        // Zero the values from key `keys` on.
        DEVICE void keep(int keys) {
            UNROLL for (int k = 0; k < KEYS / 32; ++k)
                UNROLL for (int i = 0; i < 4; ++i) {
                    const int left = keys - (32 * k + 8 * i + threadIdx.x % 4 * 2);  // of the pair
                    const u32 mask = left >= 2 ? 0xffffffffu : left == 1 ? 0xffffu : 0u;
                    UNROLL for (int d = 0; d < N / 2; ++d) pairs[d][k][i] &= mask;
                }
        }
    };
    // acc[2 i] holds the even columns of 16, acc[2 i + 1] the odd ones. scale: of the step's page.
    template <int PITCH, int KEYS, int N>
    DEVICE static void add_p_v(float (&acc)[N][4], const u16 *p_tile, int m, const Values<KEYS, N> &values, float scale) {
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

    // Return a lane's four adjacent columns of row r among 16.
    template <int N> DEVICE static float4 four_columns(const float (&acc)[N][4], int r, int j) {
        return make_float4(acc[j][2 * r], acc[j + 1][2 * r], acc[j][2 * r + 1], acc[j + 1][2 * r + 1]);
    }
    template <int N, class Cluster>
    DEVICE static void send_row(Cluster &cluster, u32 rank, int head, int first, const float (&acc)[N][4], int r) {
        UNROLL for (int j = 0; j < N; j += 2)
            cluster.send_columns(rank, head, first + 8 * j + threadIdx.x % 4 * 4, four_columns(acc, r, j));
    }
    template <int N>
    DEVICE static void write_columns(u16 *to, const float (&acc)[N][4], int r, float scale, bool exists) {
        UNROLL for (int j = 0; j < N; j += 2) {
            const float4 x = four_columns(acc, r, j);
            const uint2 pairs = make_uint2(pack(x.x * scale, x.y * scale), pack(x.z * scale, x.w * scale));
            if (exists) *reinterpret_cast<uint2 *>(to + 8 * j + threadIdx.x % 4 * 4) = pairs;
        }
    }
};

typedef If<E4M3, E4m3, SixteenBit> Stored;

// Warps of the same heads each compute s = q k^T for SHARE keys of a step and, once p is in shared memory, acc += p v
// for a share of the columns of v. A lane has rows `row` and `row + 8`.

// Raise the maxima of a lane's rows to those of all shares, and rescale acc. Called by all THREADS threads.
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

// Turn a share's logits into p and store them to a tile of p. first: the share's first key.
template <int PITCH, int N>
DEVICE void store_p(OnlineSoftmax &softmax, float (&s)[N][4], u16 *p_tile, int row, int first) {
    const int lane = threadIdx.x % 32;
    softmax.exponentiate<2>(s);
    UNROLL for (int j = 0; j < N; ++j)
        UNROLL for (int r = 0; r < 2; ++r)
            *reinterpret_cast<u32 *>(p_tile + (row + 8 * r) * PITCH + first + 8 * j + lane % 4 * 2) =
                pack_operand(s[j][2 * r], s[j][2 * r + 1]);
}

// Store a share's l. After a barrier, sum_of returns the sum of a row over all shares.
template <int SHARES, int ROWS>
DEVICE void store_sums(const OnlineSoftmax &softmax, float (&sums)[SHARES][ROWS], int share, int row) {
    const int lane = threadIdx.x % 32;
    UNROLL for (int r = 0; r < 2; ++r) {
        const float sum = quad_sum(softmax.l[r]);
        if (lane % 4 == 0) sums[share][row + 8 * r] = sum;
    }
}
template <int SHARES, int ROWS> DEVICE float sum_of(const float (&sums)[SHARES][ROWS], int row) {
    float sum = 0.0f;
    UNROLL for (int other = 0; other < SHARES; ++other) sum += sums[other][row];
    return sum;
}

// Zero the values of keys [first, first + SHARE) from key `keys` on, in whole rows, by a warp.
template <int SHARE> DEVICE void zero_values(unsigned char *values, int first, int keys) {
    constexpr int CHUNKS = V_BOX * BYTES / 16;  // per row of a box
    UNROLL for (int panel = 0; panel < DV / V_BOX; ++panel)
        for (int i = max(first, keys) * CHUNKS + threadIdx.x % 32; i < (first + SHARE) * CHUNKS; i += 32)
            *reinterpret_cast<uint4 *>(values + panel * PANEL + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();  // before the next TMA load to this stage
}
