// o and lse of query rows whose ranges are whole blocks, on Hopper, where rows are many: decoding a batch. A block of threads stays and takes
// row after row.
//
// One warp copies a row's keys and values, KEYS at a time, by bulk tensor copies through a ring of STAGES stages, and goes on with the next
// row while the four others finish this one. These are HEAD_WARPS times SHARES: warps of the same 16 heads have a share of a step's keys
// each for s = q k^T, and, once their p stand in shared memory, a share of the columns for acc += p v, so that nothing is left to be joined.
// Maxima are one for all shares and kept loosely, as in forward_tiles.cu: they follow once a logit passes one by more than 2^SLACK allows.
//
//   STAGES      steps under way
//   HEAD_WARPS  1, 2 or 4: warps of 16 heads each
//   PER_SM      blocks of threads a multiprocessor
#include "common.cuh"
#include "tma.cuh"

struct Arguments {
    TensorMap k, v;
    Problem p;
    u16 *o;      // [rows, h, DV]
    float *lse;  // [rows, h]
    i64 head_tiles, all;  // of a row, of all rows
};

constexpr int KEYS = 64, WARPS = 4, THREADS = 32 * WARPS;  // of those that compute
constexpr int SHARES = WARPS / HEAD_WARPS, SHARE = KEYS / SHARES, COLUMNS = DV / SHARES, HEADS = 16 * HEAD_WARPS;
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int PP = KEYS + 8;  // the pitch of p
constexpr float SLACK = 8.0f;

struct Shared {
    u64 full[STAGES], empty[STAGES];
    int keys[STAGES];  // that exist of the step, 64 or more: all; 0: there is no step
    float tops[SHARES][HEADS], sums[SHARES][HEADS];
};

// What a block of threads computes at a time: a row, and which of its heads.
struct Part {
    Row row;
    int head0;
    DEVICE Part(const Arguments &x, u32 number) : row(row_of(x.p, number / static_cast<u32>(x.head_tiles))), head0(number % static_cast<u32>(x.head_tiles) * HEADS) {}
};

// One warp: the keys and values of every step, and how many keys it has; at a row's end a step of none.
DEVICE void copy_steps(const Arguments &x, unsigned char *stages, Shared &shared) {
    const Problem &p = x.p;
    const int lane = threadIdx.x % 32;
    const bool once = p.S == 1 && x.head_tiles == 1;  // tokens of one sequence, and other heads of a row, may read the same keys
    Ring<STAGES> ring;
    auto next_stage = [&] {
        wait(&shared.empty[ring.stage], ring.parity ^ 1);
        __syncwarp();  // all lanes have seen it: the next phase may pass
    };
    if (lane == 0) {
        prefetch_map(&x.k);
        prefetch_map(&x.v);
    }
    for (u32 number = blockIdx.x; number < x.all; number += gridDim.x) {
        const Row row = Part(x, number).row;
        const int limit = row_limit(p, row.b, row.s);
        for (i64 first = 0; first < p.n; first += 32) {
            int start = 0, end = 0;
            if (first + lane < p.n) clamped_range(p, row.number * p.n + first + lane, limit, start, end);
            for (u32 left = __ballot_sync(ALL, end > start); left; left &= left - 1) {
                const int which = __ffs(left) - 1, stop = __shfl_sync(ALL, end, which);
                for (int key = __shfl_sync(ALL, start, which); key < stop; key += KEYS, ring.next()) {
                    next_stage();
                    if (lane) continue;
                    u64 *full = &shared.full[ring.stage];
                    unsigned char *k_tile = stages + ring.stage * STAGE_BYTES, *v_tile = k_tile + K_BYTES;
                    shared.keys[ring.stage] = stop - key;
                    arrive_expecting(full, STAGE_BYTES);
                    auto copy = [&](unsigned char *to, const TensorMap *map, int column) {
                        if (once) copy_keys_box_once(to, map, full, column, key, row.g, row.b);
                        else copy_keys_box(to, map, full, column, key, row.g, row.b);
                    };
#pragma unroll
                    for (int column = 0; column < DK; column += 64) copy(k_tile + column / 64 * PANEL, &x.k, column);
#pragma unroll
                    for (int column = 0; column < DV; column += 64) copy(v_tile + column / 64 * PANEL, &x.v, column);
                }
            }
        }
        next_stage();
        if (lane == 0) {
            shared.keys[ring.stage] = 0;
            arrive(&shared.full[ring.stage]);
        }
        ring.next();
    }
}

// s = q k^T for SHARE keys from `first` on of a step, whose keys stand in panels.
DEVICE void add_logits(float (&s)[SHARE / 8][4], const u32 (&q)[DK / 16][4], const unsigned char *keys, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < DK / 16; ++k)
#pragma unroll
        for (int j = 0; j < SHARE / 8; j += 2) {
            u32 y[4];
            const u32 at = swizzled(first + 8 * j + lane / 16 * 8 + lane % 8, k % 4 * 2 + lane / 8 % 2);
            load_matrices(y, reinterpret_cast<const u16 *>(keys + k / 4 * PANEL + at));
            multiply_add(s[j], q[k], y[0], y[1]);
            multiply_add(s[j + 1], q[k], y[2], y[3]);
        }
}

// acc += p v for all keys of a step and COLUMNS columns of their values from `first` on.
DEVICE void add_values(float (&acc)[COLUMNS / 8][4], const u16 *p, int head, const unsigned char *values, int first) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < KEYS; k += 16) {
        u32 a[4];
        load_a<PP>(a, p, head, k);
#pragma unroll
        for (int d = 0; d < COLUMNS / 8; d += 2) {
            const int column = first + 8 * d;
            u32 y[4];
            load_transposed(y, reinterpret_cast<const u16 *>(values + column / 64 * PANEL + swizzled(k + lane % 16, column % 64 / 8 + lane / 16)));
            multiply_add(acc[d], a, y[0], y[1]);
            multiply_add(acc[d + 1], a, y[2], y[3]);
        }
    }
}

// Values of a share of a step are made zero from key `keys` on, since p = 0 would not cancel NaN.
DEVICE void mend_values(unsigned char *values, int first, int keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int panel = 0; panel < DV / 64; ++panel)
        for (int i = max(first, keys) * 8 + lane; i < (first + SHARE) * 8; i += 32)  // rows are whole: where their pieces stand does not matter
            *reinterpret_cast<uint4 *>(values + panel * PANEL + i * 16) = make_uint4(0, 0, 0, 0);
    publish_writes();  // before the next copy to this stage
}

DEVICE void attend(const Arguments &x, unsigned char *stages, u16 *q_tile, u16 *p_tile, Shared &shared) {
    const Problem &p = x.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, share = warp / HEAD_WARPS, warp_head = warp % HEAD_WARPS * 16;
    const float c = p.scale_log2, slack = SLACK / c;
    Ring<STAGES> ring;
    for (u32 number = blockIdx.x; number < x.all; number += gridDim.x) {
        const Part part(x, number);
        const Row &row = part.row;
        const u16 *q_row = p.q + row.b * p.stride_qb + row.s * p.stride_qs + row.g * p.stride_qg;
        copy_heads<DK, KP, HEADS, THREADS>(q_tile, q_row, p.stride_qh, part.head0, p.h);
        commit_copies();
        wait_copies<0>();
        barrier<THREADS>(1);  // q is there
        u32 q[DK / 16][4];
#pragma unroll
        for (int k = 0; k < DK / 16; ++k) load_a<KP>(q[k], q_tile, warp_head, 16 * k);

        // Of its 16 heads a lane has two rows, lane / 4 and that + 8; of l only what its own keys brought.
        float acc[COLUMNS / 8][4] = {}, m[2] = {LOWEST, LOWEST}, l[2] = {0.0f, 0.0f};
        for (int keys = 1; keys; ring.next()) {
            wait(&shared.full[ring.stage], ring.parity);
            keys = shared.keys[ring.stage];
            if (keys) {
                unsigned char *k_tile = stages + ring.stage * STAGE_BYTES, *v_tile = k_tile + K_BYTES;
                const int first = share * SHARE;
                float s[SHARE / 8][4] = {}, top[2] = {LOWEST, LOWEST};
                add_logits(s, q, k_tile, first);
                if (keys < KEYS) {
#pragma unroll
                    for (int j = 0; j < SHARE / 8; ++j)
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            if (first + 8 * j + lane % 4 * 2 + i % 2 >= keys) s[j][i] = -infinity();
                    mend_values(v_tile, first, keys);
                }
#pragma unroll
                for (int j = 0; j < SHARE / 8; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) top[i / 2] = fmaxf(top[i / 2], s[j][i]);
                if (barrier_any<THREADS>(1, top[0] > m[0] + slack || top[1] > m[1] + slack)) {  // all have read the p before, too
#pragma unroll
                    for (int i = 0; i < 2; ++i) {  // the four lanes of a row
                        top[i] = fmaxf(top[i], __shfl_xor_sync(ALL, top[i], 1));
                        top[i] = fmaxf(top[i], __shfl_xor_sync(ALL, top[i], 2));
                        if (lane % 4 == 0) shared.tops[share][warp_head + lane / 4 + 8 * i] = top[i];
                    }
                    barrier<THREADS>(1);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        float highest = m[i];
#pragma unroll
                        for (int other = 0; other < SHARES; ++other) highest = fmaxf(highest, shared.tops[other][warp_head + lane / 4 + 8 * i]);
                        const float alpha = exp2_fast((m[i] - highest) * c);
                        l[i] *= alpha;
                        m[i] = highest;
#pragma unroll
                        for (int j = 0; j < COLUMNS / 8; ++j) {
                            acc[j][2 * i] *= alpha;
                            acc[j][2 * i + 1] *= alpha;
                        }
                    }
                }
                const float shift[2] = {m[0] * c, m[1] * c};
#pragma unroll
                for (int j = 0; j < SHARE / 8; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const float left = exp2_fast(s[j][2 * i] * c - shift[i]), right = exp2_fast(s[j][2 * i + 1] * c - shift[i]);
                        l[i] += left + right;
                        u16 *to = p_tile + (warp_head + lane / 4 + 8 * i) * PP + first + 8 * j + lane % 4 * 2;
                        *reinterpret_cast<u32 *>(to) = pack(left, right);
                    }
                barrier<THREADS>(1);  // p is there, and no NaN among the values
                add_values(acc, p_tile, warp_head, v_tile, share * COLUMNS);
            }
            __syncwarp();
            if (lane == 0) arrive(&shared.empty[ring.stage]);
        }

#pragma unroll
        for (int i = 0; i < 2; ++i) {
            l[i] += __shfl_xor_sync(ALL, l[i], 1);
            l[i] += __shfl_xor_sync(ALL, l[i], 2);
            if (lane % 4 == 0) shared.sums[share][warp_head + lane / 4 + 8 * i] = l[i];
        }
        barrier<THREADS>(1);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = warp_head + lane / 4 + 8 * i;
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < SHARES; ++other) sum += shared.sums[other][head];
            const bool exists = part.head0 + head < p.h, seen = !(sum == 0.0f);  // a row that saw no key gives 0 and -inf; NaN among its keys shows
            const float scale = seen ? 1.0f / sum : 0.0f;
            const i64 out = row.number * p.h + part.head0 + head;
            if (exists && share == 0 && lane % 4 == 0) x.lse[out] = seen ? (m[i] * c + log2f(sum)) * LN_2 : -infinity();
            u16 *to = x.o + out * DV + share * COLUMNS;
#pragma unroll
            for (int j = 0; j < COLUMNS / 8; j += 4) {
                u32 y[4];
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    if (j + n < COLUMNS / 8) y[n] = pack(acc[j + n][2 * i] * scale, acc[j + n][2 * i + 1] * scale);
                if (COLUMNS % 32 == 0) {
                    transpose(y);
                    if (exists) *reinterpret_cast<uint4 *>(to + 8 * j + lane % 4 * 8) = make_uint4(y[0], y[1], y[2], y[3]);
                } else if (exists) {
#pragma unroll
                    for (int n = 0; n < 2; ++n) *reinterpret_cast<u32 *>(to + 8 * (j + n) + lane % 4 * 2) = y[n];
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, PER_SM) forward_blocks(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the stages, q, p
    __shared__ Shared shared;
    u16 *q_tile = reinterpret_cast<u16 *>(memory + STAGES * STAGE_BYTES), *p_tile = q_tile + HEADS * KP;
    if (threadIdx.x == THREADS) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], WARPS);  // a lane of each
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (threadIdx.x < THREADS) attend(x, memory, q_tile, p_tile, shared);
    else copy_steps(x, memory, shared);
}
