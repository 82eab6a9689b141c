// o and lse of query rows of whole blocks on Hopper, if there are many that share no keys with their neighbors, as when a batch decodes.
//
//   s = q k^T,  p = 2^(c (s - m)),  o = sum_j p_j v_j / l,  lse = c m + log2 l         (softmax.cuh)
//
// Grid: persistent CTAs, PER_SM a multiprocessor; each takes every gridDim.x-th (row, HEADS heads).
// Warps: a producer warp loads a row's K and V by TMA, KEYS keys a step, through a pipeline of STAGES stages, and goes on with the next row
//   while four consumer warps finish this one.
// Tiles: the consumers are HEAD_WARPS times SHARES. Warps of the same 16 heads split a step's keys for s = q k^T, and, once p is in shared
//   memory, the columns of v for acc += p v, so that no partial results are left to combine. All shares have one maximum, which is lazy, as
//   in forward_tiles.cu.
// Pages: of whole steps; the producer reads the page of a range with the range, and that of a range's later pages as it gets there.
// Masks: only the last step of a range may have fewer than KEYS keys. Past them logits become -inf and values zero, since p = 0 would not
//   cancel NaN.
//
//   STAGES      stages of the pipeline of steps
//   HEAD_WARPS  1, 2 or 4: warps of 16 heads each
//   PER_SM      CTAs per multiprocessor
#include "mma.cuh"
#include "softmax.cuh"
#include "tma.cuh"

struct Arguments {
    TensorMap k, v;
    Problem p;
    u16 *o;      // [rows, h, DV]
    float *lse;  // [rows, h]
    i64 head_tiles, all;  // of a row, of all rows
};

constexpr int KEYS = 64, WARPS = 4, THREADS = 32 * WARPS;  // consumers
constexpr int SHARES = WARPS / HEAD_WARPS, SHARE = KEYS / SHARES, COLUMNS = DV / SHARES, HEADS = 16 * HEAD_WARPS;
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int PP = KEYS + 8;  // the pitch of p
constexpr float SLACK = 8.0f;

struct Shared {
    Pipeline<STAGES> steps;
    int keys[STAGES];  // of the step and later ones of its range; 0: the row has no more steps
    float tops[SHARES][HEADS], sums[SHARES][HEADS];
};

// What a CTA computes at a time: heads [head0, head0 + HEADS) of a row.
struct RowHeads {
    Row row;
    int head0;
    DEVICE RowHeads(const Arguments &x, u32 number)
        : row(row_of(x.p, number / static_cast<u32>(x.head_tiles))), head0(number % static_cast<u32>(x.head_tiles) * HEADS) {}
};

// Producer warp: K and V of every step, and how many keys it has; at a row's end a step of none.
DEVICE void produce_steps(const Arguments &x, unsigned char *stages, Shared &shared) {
    const Problem &p = x.p;
    const int lane = threadIdx.x % 32;
    const bool once = p.S == 1 && x.head_tiles == 1;  // tokens of one sequence, and other heads of a row, may read the same keys
    PipelineState<STAGES> at;
    auto next_stage = [&] {
        shared.steps.wait_empty(at);
        __syncwarp();  // all lanes have seen it: the next phase may pass
    };
    for (u32 number = blockIdx.x; number < x.all; number += gridDim.x) {
        const Row row = RowHeads(x, number).row;
        const int limit = row_limit(p, row.b, row.s);
        for (i64 first = 0; first < p.n; first += 32) {
            int start = 0, end = 0;
            if (first + lane < p.n) clamped_range(p, row.index * p.n + first + lane, limit, start, end);
            const int first_page = end > start ? page_of(p, row.b, start) : 0;
            for (u32 left = __ballot_sync(ALL_LANES, end > start); left; left &= left - 1) {
                const int which = __ffs(left) - 1, stop = __shfl_sync(ALL_LANES, end, which);
                const int begin = __shfl_sync(ALL_LANES, start, which);
                int page = __shfl_sync(ALL_LANES, first_page, which);
                for (int key = begin; key < stop; key += KEYS, at.next()) {
                    next_stage();
                    if (lane) continue;
                    if (key > begin && in_page(key) == 0) page = page_of(p, row.b, key);
                    u64 *full = &shared.steps.full[at.stage];
                    unsigned char *k_tile = stages + at.stage * STAGE_BYTES, *v_tile = k_tile + K_BYTES;
                    shared.keys[at.stage] = stop - key;
                    mbarrier_arrive_expect(full, STAGE_BYTES);
                    auto load = [&](unsigned char *to, const TensorMap *map, int column) {
                        if (once) tma_load_keys_once(to, map, full, column, in_page(key), row.g, page);
                        else tma_load_keys(to, map, full, column, in_page(key), row.g, page);
                    };
#pragma unroll
                    for (int column = 0; column < DK; column += 64) load(k_tile + column / 64 * PANEL, &x.k, column);
#pragma unroll
                    for (int column = 0; column < DV; column += 64) load(v_tile + column / 64 * PANEL, &x.v, column);
                }
            }
        }
        next_stage();
        if (lane == 0) {
            shared.keys[at.stage] = 0;
            mbarrier_arrive(&shared.steps.full[at.stage]);
        }
        at.next();
    }
}

// A consumer warp: its heads and its share of keys and columns.
struct Consumer {
    Shared &shared;
    u16 *const q_tile, *const p_tile;
    const int lane, share, warp_head;
    const float slack;
    OnlineSoftmax softmax;
    u32 q[DK / 16][4];           // operand A
    float acc[COLUMNS / 8][4] = {};

    DEVICE Consumer(Shared &memory, u16 *q_memory, u16 *p_memory, float c, float slack)
        : shared(memory), q_tile(q_memory), p_tile(p_memory), lane(threadIdx.x % 32), share(threadIdx.x / 32 / HEAD_WARPS),
          warp_head(threadIdx.x / 32 % HEAD_WARPS * 16), slack(slack), softmax(c) {}

    DEVICE int head(int r) const { return warp_head + lane / 4 + 8 * r; }  // of a lane's two rows

    DEVICE void load_q(const Problem &p, const RowHeads &heads) {
        copy_heads<DK, KP, HEADS, THREADS>(q_tile, p.q, heads.row, heads.head0, p.h);
        cp_async_commit();
        cp_async_wait<0>();
        named_barrier<THREADS>(1);  // q is there
#pragma unroll
        for (int k = 0; k < DK / 16; ++k) load_a<KP>(q[k], q_tile, warp_head, 16 * k);
    }

    // s = q k^T for this share of a step's keys.
    DEVICE void add_logits(float (&s)[SHARE / 8][4], const unsigned char *keys) const {
#pragma unroll
        for (int k = 0; k < DK / 16; ++k)
#pragma unroll
            for (int j = 0; j < SHARE / 8; j += 2) {
                u32 y[4];
                const u32 at = swizzled(share * SHARE + 8 * j + lane / 16 * 8 + lane % 8, k % 4 * 2 + lane / 8 % 2);
                ldmatrix(y, reinterpret_cast<const u16 *>(keys + k / 4 * PANEL + at));
                mma(s[j], q[k], y[0], y[1]);
                mma(s[j + 1], q[k], y[2], y[3]);
            }
    }

    // acc += p v for all keys of a step and this share of columns.
    DEVICE void add_values(const unsigned char *values) {
#pragma unroll
        for (int k = 0; k < KEYS; k += 16) {
            u32 a[4];
            load_a<PP>(a, p_tile, warp_head, k);
#pragma unroll
            for (int d = 0; d < COLUMNS / 8; d += 2) {
                const int column = share * COLUMNS + 8 * d;
                u32 y[4];
                const u32 at = column / 64 * PANEL + swizzled(k + lane % 16, column % 64 / 8 + lane / 16);
                ldmatrix_trans(y, reinterpret_cast<const u16 *>(values + at));
                mma(acc[d], a, y[0], y[1]);
                mma(acc[d + 1], a, y[2], y[3]);
            }
        }
    }

    // Zero this share's values from key `keys` on. Whole rows: the swizzle within them does not matter.
    DEVICE void zero_values(unsigned char *values, int keys) const {
        const int first = share * SHARE;
#pragma unroll
        for (int panel = 0; panel < DV / 64; ++panel)
            for (int i = max(first, keys) * 8 + lane; i < (first + SHARE) * 8; i += 32)
                *reinterpret_cast<uint4 *>(values + panel * PANEL + i * 16) = make_uint4(0, 0, 0, 0);
        fence_async_proxy();  // before the next TMA load to this stage
    }

    // Raise the maxima to those of all shares.
    DEVICE void raise(const float (&top)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float highest = quad_max(top[r]);
            if (lane % 4 == 0) shared.tops[share][head(r)] = highest;
        }
        named_barrier<THREADS>(1);
        float alpha[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float highest = softmax.m[r];
#pragma unroll
            for (int other = 0; other < SHARES; ++other) highest = fmaxf(highest, shared.tops[other][head(r)]);
            alpha[r] = softmax.raise(r, highest);
        }
        scale_rows(acc, alpha);
    }

    DEVICE void step(unsigned char *k_tile, int keys) {
        unsigned char *v_tile = k_tile + K_BYTES;
        float s[SHARE / 8][4] = {};
        add_logits(s, k_tile);
        if (keys < KEYS) {
            mask_columns(s, share * SHARE, {keys, keys}, -infinity());
            zero_values(v_tile, keys);
        }
        const float top[2] = {row_max(s, 0), row_max(s, 1)};
        const bool rises = top[0] > softmax.m[0] + slack || top[1] > softmax.m[1] + slack;
        if (named_barrier_any<THREADS>(1, rises)) raise(top);  // all have read the p before, too
        softmax.exponentiate<2>(s);
#pragma unroll
        for (int j = 0; j < SHARE / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<u32 *>(p_tile + head(r) * PP + share * SHARE + 8 * j + lane % 4 * 2) = pack(s[j][2 * r], s[j][2 * r + 1]);
        named_barrier<THREADS>(1);  // p is there, and no NaN among the values
        add_values(v_tile);
    }

    DEVICE void write(const Arguments &x, const RowHeads &heads) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(softmax.l[r]);
            if (lane % 4 == 0) shared.sums[share][head(r)] = sum;
        }
        named_barrier<THREADS>(1);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = 0.0f;
#pragma unroll
            for (int other = 0; other < SHARES; ++other) sum += shared.sums[other][head(r)];
            const RowTotals totals(softmax.c, softmax.m[r], sum);
            const bool exists = heads.head0 + head(r) < x.p.h;
            const i64 out = heads.row.index * x.p.h + heads.head0 + head(r);
            if (exists && share == 0 && lane % 4 == 0) x.lse[out] = totals.lse * LN_2;
            write_columns(x.o + out * DV + share * COLUMNS, r, totals.scale, exists);
        }
    }

    DEVICE void write_columns(u16 *to, int r, float scale, bool exists) const {
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j += 4) {
            u32 y[4];
#pragma unroll
            for (int n = 0; n < 4; ++n)
                if (j + n < COLUMNS / 8) y[n] = pack(acc[j + n][2 * r] * scale, acc[j + n][2 * r + 1] * scale);
            if (COLUMNS % 32 == 0) {
                quad_transpose(y);
                if (exists) *reinterpret_cast<uint4 *>(to + 8 * j + lane % 4 * 8) = make_uint4(y[0], y[1], y[2], y[3]);
            } else if (exists) {
#pragma unroll
                for (int n = 0; n < 2; ++n) *reinterpret_cast<u32 *>(to + 8 * (j + n) + lane % 4 * 2) = y[n];
            }
        }
    }
};

DEVICE void attend(const Arguments &x, unsigned char *stages, u16 *q_tile, u16 *p_tile, Shared &shared) {
    PipelineState<STAGES> at;
    const float c = x.p.scale_log2, slack = SLACK / c;
    for (u32 number = blockIdx.x; number < x.all; number += gridDim.x) {
        const RowHeads heads(x, number);
        Consumer consumer(shared, q_tile, p_tile, c, slack);
        consumer.load_q(x.p, heads);
        for (int keys = 1; keys; at.next()) {
            shared.steps.wait_full(at);
            keys = shared.keys[at.stage];
            if (keys) consumer.step(stages + at.stage * STAGE_BYTES, keys);
            __syncwarp();
            shared.steps.release(at.stage);
        }
        consumer.write(x, heads);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, PER_SM) forward_blocks(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the stages, q, p
    __shared__ Shared shared;
    u16 *q_tile = reinterpret_cast<u16 *>(memory + STAGES * STAGE_BYTES), *p_tile = q_tile + HEADS * KP;
    if (threadIdx.x == THREADS) {
        shared.steps.init(1, WARPS);  // a lane of each
        mbarrier_fence_init();
        tma_prefetch(&x.k);
        tma_prefetch(&x.v);
    }
    __syncthreads();
    wait_for_stream();
    if (threadIdx.x < THREADS) attend(x, memory, q_tile, p_tile, shared);
    else produce_steps(x, memory, shared);
}
