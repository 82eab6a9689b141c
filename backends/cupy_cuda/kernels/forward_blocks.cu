// o and lse of query rows of whole blocks on Hopper that share no keys with their neighbors, as when a batch decodes.
//
//   s = q k^T,  p = 2^(c (s - m)),  o = sum_j p_j v_j / l,  lse = c m + log2 l         (softmax.cuh)
//
// Grid: persistent CTAs, PER_SM a multiprocessor; each takes every gridDim.x-th (row, HEADS heads). Few rows: one cluster for each.
// Steps: a range has BLOCK / KEYS of them. The CTAs of a cluster take every CLUSTER-th step of all ranges, empty ones too, so that each
//   knows its own without reading other ranges. They combine their results at the end (row_cluster.cuh).
// Warps: a producer warp loads a row's K and V by TMA, KEYS keys a step, through a pipeline of STAGES stages, and goes on with the next row
//   while four consumer warps finish this one.
// Tiles: the consumers are HEAD_WARPS times SHARES. Warps of the same 16 heads split a step's keys for s = q k^T, and, once p is in shared
//   memory, the columns of v for acc += p v, so that no partial results are left to combine. All shares have one maximum, which is lazy, as
//   in forward_tiles.cu.
// Pages: of whole steps. Before the first key is asked for, a lane reads the range of its step and then its page: two loads that wait for
//   each other, for all steps at once.
// Masks: only the last step of a range may have fewer than KEYS keys. Past them logits become -inf and values zero, since p = 0 would not
//   cancel NaN.
// e4m3: half as many registers hold a step's values, so they are loaded before its softmax: only products are left once p is there.
//
//   STAGES      stages of the pipeline of steps
//   HEAD_WARPS  1, 2 or 4: warps of 16 heads each
//   PER_SM      CTAs per multiprocessor
//   BLOCK       keys of a range, a multiple of KEYS
//   CLUSTER     CTAs that share a row
//   NEXT_FIRST  1: the next kernel may start when all CTAs have begun, 0: when they have asked for their last keys
//   E4M3, PAGE_SCALES  of a quantized cache (e4m3.cuh)
#include "mma.cuh"
#include "row_cluster.cuh"
#include "softmax.cuh"
#include "tma.cuh"
#if E4M3
#include "e4m3.cuh"
#else
#include "step_tiles.cuh"
#define PAGE_SCALES 0
#endif
#include "step_shares.cuh"

struct Arguments {
    TensorMap k, v;
    Problem p;
    u16 *o;      // [rows, h, DV]
    float *lse;  // [rows, h]
    i64 head_tiles, all;  // of a row, of all rows
#if E4M3
    KeyValueScales scales;
#endif
};

constexpr int KEYS = 64, WARPS = 4, THREADS = 32 * WARPS;  // consumers
constexpr int SHARES = WARPS / HEAD_WARPS, SHARE = KEYS / SHARES, COLUMNS = DV / SHARES, HEADS = 16 * HEAD_WARPS;
constexpr int K_BYTES = KEYS * DK * BYTES, V_BYTES = KEYS * DV * BYTES, STAGE_BYTES = K_BYTES + V_BYTES;
constexpr int PP = KEYS + 8;  // the pitch of p
constexpr float SLACK = 8.0f;

constexpr u32 PER_RANGE = BLOCK / KEYS;  // steps
constexpr int LAST = 1 << 30;            // a flag beside a step's keys

// What a CTA computes at a time: heads [head0, head0 + HEADS) of a row.
struct RowHeads {
    Row row;
    int head0;
    DEVICE RowHeads(const Arguments &x, u32 number)
        : row(row_of(x.p, number / static_cast<u32>(x.head_tiles))), head0(number % static_cast<u32>(x.head_tiles) * HEADS) {}
    DEVICE int existing(const Arguments &x) const { return min(HEADS, static_cast<int>(x.p.h) - head0); }
    DEVICE i64 first(const Arguments &x) const { return row.index * x.p.h + head0; }  // of the heads of all rows
};

struct Shared {
#if CLUSTER > 1
    RowCluster<HEADS> cluster;
#endif
    Pipeline<STAGES> steps;  // of k; v arrives later
    u64 values[STAGES];
    int keys[STAGES];  // of a step; with LAST: the row has no more steps in this CTA
    float k_scales[STAGES], v_scales[STAGES];  // PAGE_SCALES: of a step's page
    float q_rates[HEADS];                      // E4M3: what a row's products are multiplied by
    float tops[SHARES][HEADS], sums[SHARES][HEADS];

    // By one thread.
    DEVICE void init(const Arguments &x, const RowHeads &heads) {
        steps.init(1 + PAGE_SCALES, WARPS);  // a lane of each warp
        for (u64 &bar : values) mbarrier_init(&bar, 1 + PAGE_SCALES);
#if CLUSTER > 1
        cluster.init(heads.existing(x));
#endif
        mbarrier_fence_init();
        tma_prefetch(&x.k);
        tma_prefetch(&x.v);
    }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "whole_blocks.py reserves less");

// Producer warp: K and V of every step of this CTA, and how many keys it has.
struct Producer {
    const Arguments &x;
    unsigned char *const stages;
    Shared &shared;
    const int lane = threadIdx.x % 32;
    const bool once;  // tokens of one sequence, and other heads of a row, may read the same keys
    PipelineState<STAGES> at;

    DEVICE Producer(const Arguments &x, unsigned char *stages, Shared &shared)
        : x(x), stages(stages), shared(shared), once(x.p.S == 1 && x.head_tiles == 1) {}

    template <int COLUMNS, int BOX>
    DEVICE void load(unsigned char *to, const TensorMap *map, u64 *full, int key, i64 g, int page) const {
        mbarrier_arrive_expect(full, KEYS * COLUMNS * BYTES);
        if (once) tma_load_key_tile<COLUMNS, true, BOX>(to, map, full, in_page(key), g, page);
        else tma_load_key_tile<COLUMNS, false, BOX>(to, map, full, in_page(key), g, page);
    }

    // By one lane: keys [key, key + keys) into the next stage.
    DEVICE void load_step(i64 g, int key, int page, int keys) {
        unsigned char *k_tile = stages + at.stage * STAGE_BYTES;
        shared.keys[at.stage] = keys;
        load<DK, K_BOX>(k_tile, &x.k, &shared.steps.full[at.stage], key, g, page);
        load<DV, V_BOX>(k_tile + K_BYTES, &x.v, &shared.values[at.stage], key, g, page);
#if PAGE_SCALES
        x.scales.k.load(&shared.k_scales[at.stage], &shared.steps.full[at.stage], page, g);
        x.scales.v.load(&shared.v_scales[at.stage], &shared.values[at.stage], page, g);
#endif
    }

    // A row without keys is a step without any.
    DEVICE void load_nothing() {
        shared.steps.wait_empty(at);
        __syncwarp();
        if (lane == 0) {
            shared.keys[at.stage] = LAST;
            for (int arrivals = 0; arrivals <= PAGE_SCALES; ++arrivals) {
                mbarrier_arrive(&shared.values[at.stage]);
                mbarrier_arrive(&shared.steps.full[at.stage]);
            }
        }
        at.next();
    }

    // Where this lane's range of a row's step `first` + lane * CLUSTER is.
    DEVICE const int *range_of(const Row &row, u32 first) const {
        return range_at(x.p, row.index * x.p.n + (first + lane * CLUSTER) / PER_RANGE);
    }

    // Ranges and the row's limit, which are at `range` and `position`, are asked for at once; a page is asked for when both are there.
    DEVICE void load_row(const Row &row, u32 rank, const int *range, const int *position) {
        const u32 steps = static_cast<u32>(x.p.n) * PER_RANGE;
        int limit = 0;
        for (u32 first = rank; first < steps || first == rank; first += 32 * CLUSTER, range = range_of(row, first)) {
            const u32 step = first + lane * CLUSTER;
            Range loaded;
            if (step < steps) loaded = Range(x.p, range);
            if (first == rank) limit = row_limit(x.p, row.s, position);
            int key, stop;
            loaded.clamp(x.p, limit, key, stop);
            key += step % PER_RANGE * KEYS;
            const bool exists = key < stop, more = first + 32 * CLUSTER < steps;
            const int page = exists ? page_of(x.p, row.b, key) : 0;
            u32 left = __ballot_sync(ALL_LANES, exists);
            if (!left && !more) load_nothing();
            for (; left; left &= left - 1, at.next()) {
                shared.steps.wait_empty(at);
                __syncwarp();  // all lanes have seen it: the next phase may pass
                if (lane == __ffs(left) - 1) load_step(row.g, key, page, min(stop - key, KEYS) | (more || left & (left - 1) ? 0 : LAST));
                __syncwarp();
            }
        }
    }
};

// A consumer warp: its heads and its share of keys and columns.
struct Consumer {
    Shared &shared;
    u16 *const q_tile, *const p_tile;
    const int lane, share, warp_head;
    const u32 rank;   // of this CTA in its cluster
    const int count;  // heads that exist
    const float slack;
    OnlineSoftmax softmax;
    u32 q[DK / 16][4];           // operand A
    float acc[COLUMNS / 8][4] = {};
    float k_rate[2] = {1.0f, 1.0f}, v_rate = 1.0f;  // E4M3: factors of a row's products, and of its o

    DEVICE Consumer(Shared &memory, u16 *q_memory, u16 *p_memory, u32 rank, int count, float c, float slack)
        : shared(memory), q_tile(q_memory), p_tile(p_memory), lane(threadIdx.x % 32), share(threadIdx.x / 32 / HEAD_WARPS),
          warp_head(threadIdx.x / 32 % HEAD_WARPS * 16), rank(rank), count(count), slack(slack), softmax(c) {}

    DEVICE int head(int r) const { return warp_head + lane / 4 + 8 * r; }  // of a lane's two rows

    DEVICE void load_q(const Problem &p, const RowHeads &heads) {
        copy_heads<DK, KP, HEADS, THREADS>(q_tile, p.q, heads.row, heads.head0, p.h);
        cp_async_commit();
        cp_async_wait<0>();
        convert_queries<HEADS, THREADS>(q_tile, shared.q_rates);
        named_barrier<THREADS>(1);  // q is there
        load_queries(q, q_tile, warp_head);
#pragma unroll
        for (int r = 0; E4M3 && BF16 && r < 2; ++r) k_rate[r] *= shared.q_rates[head(r)];
    }

#if E4M3
    // The scales of a row's heads; those of pages come with the steps.
    DEVICE void load_scales(const KeyValueScales &scales, i64 g) {
        if (PAGE_SCALES) return;
        k_rate[0] = k_rate[1] = scales.k.of_head(g);
        v_rate = scales.v.of_head(g);
    }
#endif

    // s = q k^T for this share of a step's keys, times their scales.
    DEVICE void add_logits(float (&s)[SHARE / 8][4], const unsigned char *keys, int stage) const {
        add_q_kt(s, q, keys, share * SHARE);
        const float scale = PAGE_SCALES ? shared.k_scales[stage] : 1.0f;
        if (E4M3) scale_rows(s, {k_rate[0] * scale, k_rate[1] * scale});
    }

    // The step of `keys` keys at a stage. The first step of a row raises its maxima from LOWEST; with the last one m and l are known before
    // acc is.
    DEVICE void step(unsigned char *stages, int keys, bool first, bool last, const PipelineState<STAGES> &at) {
        unsigned char *k_tile = stages + at.stage * STAGE_BYTES, *v_tile = k_tile + K_BYTES;
        float s[SHARE / 8][4] = {};
        add_logits(s, k_tile, at.stage);
#if E4M3
        mbarrier_wait(&shared.values[at.stage], at.parity);
        StoredValues<KEYS, COLUMNS / 8> values(v_tile, share * COLUMNS);
        if (keys < KEYS) values.keep(keys);
#endif
        if (keys < KEYS) mask_columns(s, share * SHARE, {keys, keys}, -infinity());
        const float top[2] = {row_max(s, 0), row_max(s, 1)};
        const bool rises = top[0] > softmax.m[0] + slack || top[1] > softmax.m[1] + slack;
        if (first || named_barrier_any<THREADS>(1, rises))  // all have read the p before, too
            raise_maxima<THREADS>(softmax, acc, top, shared.tops, share, head(0));
        softmax.exponentiate<2>(s);
#pragma unroll
        for (int j = 0; j < SHARE / 8; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                *reinterpret_cast<u32 *>(p_tile + head(r) * PP + share * SHARE + 8 * j + lane % 4 * 2) =
                    pack_operand(s[j][2 * r], s[j][2 * r + 1]);
        if (last) share_sums();
#if !E4M3
        mbarrier_wait(&shared.values[at.stage], at.parity);
        if (keys < KEYS) zero_values<SHARE>(v_tile, share * SHARE, keys);
#endif
        named_barrier<THREADS>(1);  // p is there, and no NaN among the values
#if CLUSTER > 1
        if (last) send_totals();
#endif
        const float scale = PAGE_SCALES ? shared.v_scales[at.stage] : 1.0f;
#if E4M3
        add_p_v<PP, KEYS>(acc, p_tile, warp_head, values, scale);
#else
        add_p_v<PP, KEYS>(acc, p_tile, warp_head, v_tile, share * COLUMNS, scale);
#endif
    }

    // All that a row without keys has.
    DEVICE void no_step() {
        share_sums();
        named_barrier<THREADS>(1);
#if CLUSTER > 1
        send_totals();
#endif
    }

    // The row's steps in this CTA.
    DEVICE void attend(unsigned char *stages, PipelineState<STAGES> &at) {
        int keys = 0;
        for (bool first = true; !(keys & LAST); first = false, at.next()) {
            shared.steps.wait_full(at);
            keys = shared.keys[at.stage];
            if (keys != LAST) step(stages, keys & ~LAST, first, keys & LAST, at);
            else no_step();
            __syncwarp();
            shared.steps.release(at.stage);
        }
    }

    // l of this share; after a barrier, which the last step has, total() is that of all.
    DEVICE void share_sums() {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float sum = quad_sum(softmax.l[r]);
            if (lane % 4 == 0) shared.sums[share][head(r)] = sum;
        }
    }
    DEVICE float total(int head) const {
        float sum = 0.0f;
#pragma unroll
        for (int other = 0; other < SHARES; ++other) sum += shared.sums[other][head];
        return sum;
    }

    DEVICE void write(const Arguments &x, const RowHeads &heads) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const RowTotals totals(softmax.c, softmax.m[r], total(head(r)));
            const bool exists = head(r) < count;
            const i64 out = heads.first(x) + head(r);
            if (exists && share == 0 && lane % 4 == 0) x.lse[out] = totals.lse * LN_2;
            const float rate = totals.scale == 0.0f ? 0.0f : totals.scale * v_rate;  // no keys: a scale of NaN must not matter
            write_columns(x.o + out * DV + share * COLUMNS, acc, r, rate, exists);
        }
    }

#if CLUSTER > 1
    // Send every CTA m and l, by the warps of a head in turn; before it share_sums() and a barrier.
    DEVICE void send_totals() {
        for (u32 to = share * 4 + lane % 4; to < CLUSTER; to += 4 * SHARES)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                if (head(r) < count) shared.cluster.send_totals(rank, head(r), to, softmax.m[r], total(head(r)));
    }

    DEVICE void send_columns() {
        const float rates[2] = {total(head(0)) == 0.0f ? 0.0f : v_rate, total(head(1)) == 0.0f ? 0.0f : v_rate};  // as in `write`
        if (E4M3) scale_rows(acc, rates);
#pragma unroll
        for (int r = 0; r < 2; ++r)
            if (head(r) < count) send_row(shared.cluster, rank, head(r), share * COLUMNS, acc, r);
    }
#endif

    // o and lse: a CTA's own, or its columns of what the whole cluster found.
    DEVICE void finish(const Arguments &x, const RowHeads &heads) {
#if CLUSTER > 1
        send_columns();
        shared.cluster.wait();
        shared.cluster.write<THREADS>(softmax.c, rank, count, x.o + heads.first(x) * DV, x.lse + heads.first(x));
#else
        write(x, heads);
#endif
    }
};

// A CTA's work. Its consumers may be others (bench/core/reading_alone.cu).
template <class Consumer>
DEVICE void attend_rows(const Arguments &x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the stages, q, p, Shared
    u16 *q_tile = reinterpret_cast<u16 *>(memory + STAGES * STAGE_BYTES), *p_tile = q_tile + HEADS * KP;
    Shared &shared = *reinterpret_cast<Shared *>(p_tile + HEADS * PP);
    const u32 rank = blockIdx.x % CLUSTER;
    RowHeads heads(x, blockIdx.x / CLUSTER);
    if (threadIdx.x == THREADS) shared.init(x, heads);
    __syncthreads();
#if CLUSTER > 1
    cluster_arrive();
#endif
    if (NEXT_FIRST) start_next_kernel();
    auto next_row = [&, number = blockIdx.x]() mutable {
        number += gridDim.x;
        if (CLUSTER > 1 || number >= x.all) return false;
        heads = RowHeads(x, number);
        return true;
    };
    if (threadIdx.x >= THREADS) {
        Producer producer(x, memory, shared);
        const int *range = producer.range_of(heads.row, rank), *position = position_at(x.p, heads.row.b, heads.row.s);
        wait_for_kernel_ahead();
        producer.load_row(heads.row, rank, range, position);
        while (next_row())
            producer.load_row(heads.row, rank, producer.range_of(heads.row, rank), position_at(x.p, heads.row.b, heads.row.s));
        if (!NEXT_FIRST) start_next_kernel();
#if CLUSTER > 1
        cluster_wait();
#endif
        return;
    }
    const float c = x.p.scale_log2, slack = SLACK / c;
    PipelineState<STAGES> at;
    wait_for_kernel_ahead();
    do {
        Consumer consumer(shared, q_tile, p_tile, rank, heads.existing(x), c, slack);
#if E4M3
        consumer.load_scales(x.scales, heads.row.g);
#endif
        consumer.load_q(x.p, heads);
#if CLUSTER > 1
        cluster_wait();  // all CTAs have begun
#endif
        consumer.attend(memory, at);
        consumer.finish(x, heads);
    } while (next_row());
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS + 32, PER_SM) forward_blocks(const __grid_constant__ Arguments x) {
    attend_rows<Consumer>(x);
}
