// Forward pass on Hopper for rows of blocks that share no keys with their neighbors, as in batched decoding.
//
//   s = q k^T,  p = 2^(c (s - m)),  o = sum_j p_j v_j / l,  lse = c m + log2 l         (softmax.cuh)
//
// Grid: persistent CTAs, which take every gridDim.x-th (row, HEADS heads). Few rows: one cluster per row, whose
//   CTAs take every CLUSTER-th step of all blocks, including empty ones, and merge their results at the end (RowCluster).
// Duplicates: every CTA reads all blocks of its row, 32 at a time, one per lane. A block that an earlier lane holds, or
//   whose bit is set, is empty (named_blocks.cuh).
// Small blocks: four producer warps gather them instead, several per step (gathered_row.cuh).
// Warps: a producer warp loads K and V through TMA, KEYS keys per step; it continues with the next row while four
//   consumer warps finish this one. Those of the same 16 heads split a step's keys for s = q k^T and, once p is in
//   shared memory, the columns of v for acc += p v, with one lazy maximum, as in forward_tiles.cu.
// Pages: hold whole steps. Before the first load each lane reads a block, then the page of its step: two dependent
//   loads, for all steps at once.
// Masks: only the last step of a range may have fewer than KEYS keys. Past them, logits are -inf and values are zeroed,
//   because 0 * NaN is NaN.
//
//   STAGES, PER_SM     stages of K and V; CTAs per multiprocessor
//   HEAD_WARPS         1, 2 or 4: warps of 16 heads each
//   BLOCK              keys per block: a multiple of KEYS, or (SMALL) a divisor from 4 to 32
//   CLUSTER            CTAs of the cluster that shares a row; 1: no clusters
//   LISTED             1: take the rows of a packed batch that its last numbers list (_triton/packed_rows.py); PACKED
//   NEXT_FIRST         the next kernel may start once all CTAs have started, else after their last loads
//   E4M3, PAGE_SCALES  quantized cache (stored_tiles.cuh): a step's values are in registers before its softmax
#include "stored_tiles.cuh"
#include "gathered_row.cuh"

struct Arguments {
    TensorMap k, v;  // not SMALL
    Problem p;
    u16 *o;      // [rows, h, DV]
    float *lse;  // [rows, h]
    i64 head_tiles, all;  // tiles of heads per row, in total
    KeyValueScales scales;  // E4M3
};

constexpr int WARPS = 4, THREADS = 32 * WARPS;  // consumers
constexpr int SHARES = WARPS / HEAD_WARPS, SHARE = KEYS / SHARES, COLUMNS = DV / SHARES, HEADS = 16 * HEAD_WARPS;
constexpr int PP = KEYS + 8;  // row pitch of p

constexpr u32 PER_BLOCK = SMALL ? 1 : BLOCK / KEYS;  // steps
constexpr int LOADING = SMALL ? 32 * LOADERS : 32;    // threads of producer warps

// A CTA's current work: heads [head0, head0 + HEADS) of a row.
struct RowHeads {
    Row row;
    int head0;
    DEVICE RowHeads(const Arguments &x, u32 number)
        : row(row_of(x.p, number / static_cast<u32>(x.head_tiles))), head0(number % static_cast<u32>(x.head_tiles) * HEADS) {
        if (LISTED) row.b = listed(x, row.b), row.index = row.b * x.p.G + row.g;
    }
    // LISTED: the i-th row of the list; all of them, at the end.
    DEVICE static int listed(const Arguments &x, i64 i) { return *integer_at(x.p.q_pos, 4, i * x.p.stride_pb + 3); }
    // Return the number of (row, HEADS heads).
    DEVICE static u32 all(const Arguments &x) {
        const u32 rows = static_cast<u32>(x.all) / static_cast<u32>(x.head_tiles * x.p.G);
        return LISTED ? listed(x, rows) * static_cast<u32>(x.head_tiles * x.p.G) : x.all;
    }
    DEVICE int existing(const Arguments &x) const { return min(HEADS, static_cast<int>(x.p.h) - head0); }
    DEVICE i64 first(const Arguments &x) const { return row.index * x.p.h + head0; }  // index in [B,S,G,h]
};

// Merge the results of a cluster's CTAs through distributed shared memory: every CTA sends each other CTA the partial
// results for that CTA's columns, and waits for what all others sent to it. Sums run over the CTAs in order, so that
// results are bit-equal from run to run. `rank`: the CTA that sends.
template <int HEADS> struct RowCluster {
    static constexpr int OWN = DV / CLUSTER;  // columns that a CTA writes
    float parts[CLUSTER][HEADS][OWN];         // acc of every CTA
    float2 totals[CLUSTER][HEADS];            // m and l
    u64 received;

    // Expect what `heads` heads will send. Called by one thread.
    DEVICE void init(int heads) {
        mbarrier_init(&received, 1);
        mbarrier_arrive_expect(&received, heads * (DV * 4 + CLUSTER * 8));
    }

    DEVICE void send_columns(u32 rank, int head, int column, float low, float high) {
        store_async(&parts[rank][head][column % OWN], &received, column / OWN, low, high);
    }
    DEVICE void send_columns(u32 rank, int head, int column, float4 four) {
        store_async(&parts[rank][head][column % OWN], &received, column / OWN, four);
    }
    DEVICE void send_totals(u32 rank, int head, u32 to, float m, float l) {
        store_async(reinterpret_cast<float *>(&totals[rank][head]), &received, to, m, l);
    }

    // Compute the weight of every CTA's part in o; return lse in base 2.
    DEVICE float weigh(float c, int head, float (&weights)[CLUSTER]) const {
        float m = LOWEST, l = 0.0f;
        UNROLL for (int cta = 0; cta < CLUSTER; ++cta) m = fmaxf(m, totals[cta][head].x);
        UNROLL for (int cta = 0; cta < CLUSTER; ++cta) {
            weights[cta] = exp2_fast((totals[cta][head].x - m) * c);
            l += weights[cta] * totals[cta][head].y;
        }
        const RowTotals row(c, m, l);
        UNROLL for (int cta = 0; cta < CLUSTER; ++cta) weights[cta] *= row.scale;
        return row.lse;
    }

    // Write this CTA's columns of `count` heads, once all are received, by THREADS threads. o [HEADS, DV], lse [HEADS].
    template <int THREADS> DEVICE void write(float c, u32 rank, int count, u16 *o, float *lse) const {
        constexpr int LANES = THREADS / HEADS;  // of a head
        const int head = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        if (head >= count) return;
        float weights[CLUSTER];
        const float lse_2 = weigh(c, head, weights);
        if (rank == 0 && lane == 0) lse[head] = lse_2 * LN_2;
        for (int column = 2 * lane; column < OWN; column += 2 * LANES) {
            float2 sum = make_float2(0.0f, 0.0f);
            UNROLL for (int cta = 0; cta < CLUSTER; ++cta) {
                const float2 part = *reinterpret_cast<const float2 *>(&parts[cta][head][column]);
                sum.x += weights[cta] * part.x;
                sum.y += weights[cta] * part.y;
            }
            *reinterpret_cast<u32 *>(o + head * DV + rank * OWN + column) = pack(sum.x, sum.y);
        }
    }
};

struct NoCluster {};
struct Shared : If<(CLUSTER > 1), RowCluster<HEADS>, NoCluster> {
    Pipeline<STAGES> steps;  // stages of k; v arrives later
    u64 values[STAGES];
    int keys[STAGES];  // keys of a step (SMALL: KEYS, or 1 for fewer), plus LAST for the row's last step in this CTA
    float k_scales[STAGES], v_scales[STAGES];  // PAGE_SCALES: scales of a step's page
    float q_rates[HEADS];                      // E4M3: factors of a row's products
    float tops[SHARES][HEADS], sums[SHARES][HEADS];
    int unit_keys[STAGES][SMALL ? KEYS / BLOCK : 1];  // SMALL: keys of a step's blocks
    NamedBlocks named;  // last: behind it, if SMALL, the list of a row's blocks

    DEVICE RowCluster<HEADS> &cluster() { return *reinterpret_cast<RowCluster<HEADS> *>(this); }  // CLUSTER > 1

    // Called by one thread.
    DEVICE void init(const Arguments &x, const RowHeads &heads) {
        steps.init(SMALL ? 65 : 1 + PAGE_SCALES, WARPS);  // SMALL: lanes of two warps, and for `keys`; a lane of each consumer warp
        for (u64 &bar : values) mbarrier_init(&bar, SMALL ? 64 : 1 + PAGE_SCALES);
        if (CLUSTER > 1) cluster().init(heads.existing(x));
        mbarrier_fence_init();
        if (SMALL) return;
        tma_prefetch(&x.k);
        tma_prefetch(&x.v);
    }
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "whole_blocks.py reserves less");

// Producer warp: load K and V of every step of this CTA, and publish its number of keys.
struct Producer {
    const Arguments &x;
    unsigned char *const stages;
    Shared &shared;
    const int lane = threadIdx.x % 32;
    PipelineState<STAGES> at;

    template <int COLUMNS, int BOX>
    DEVICE void load(unsigned char *to, const TensorMap *map, u64 *full, int key, i64 g, int page) const {
        mbarrier_arrive_expect(full, KEYS * COLUMNS * BYTES);
        tma_load_key_tile<COLUMNS, false, BOX>(to, map, full, in_page(key), g, page);  // read once, but evict_first is slower
    }

    // Load keys [key, key + keys) into the next stage, by one lane.
    DEVICE void load_step(i64 g, int key, int page, int keys) {
        unsigned char *k_tile = stages + at.stage * STAGE_BYTES;
        shared.keys[at.stage] = keys;
        load<DK, K_BOX>(k_tile, &x.k, &shared.steps.full[at.stage], key, g, page);
        load<DV, V_BOX>(k_tile + K_BYTES, &x.v, &shared.values[at.stage], key, g, page);
        if (PAGE_SCALES) {
            x.scales.k.load(&shared.k_scales[at.stage], &shared.steps.full[at.stage], page, g);
            x.scales.v.load(&shared.v_scales[at.stage], &shared.values[at.stage], page, g);
        }
    }

    // A row without keys is one step of zero keys.
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

    // Return a pointer to this lane's block, number `first` + lane of a row.
    DEVICE const int *block_at(const Row &row, u32 first) const {
        return range_at(x.p, ranges_row(row.index) * x.p.n + first + lane);
    }

    // Load blocks and the row's position together; pages follow when both have arrived.
    DEVICE void load_row(const Row &row, u32 rank, const int *block, const int *position) {
        const u32 n = x.p.n;
        int limit = 0;
        for (u32 first = 0; first < n; first += 32, block = block_at(row, first)) {
            Range loaded;
            if (first + lane < n) loaded = Range(x.p, block);
            if (first == 0) limit = row_limit(x.p, row.s, position);
            int start, stop;
            loaded.clamp(x.p, limit, start, stop);
            if (first == 0) shared.named.clear(limit / BLOCK);
            if (!shared.named.add(start / BLOCK, stop > start)) stop = start;
            const u32 steps = min(n - first, 32u) * PER_BLOCK;
            for (u32 step = rank; step == rank || step < steps; step += 32 * CLUSTER)
                load_steps(row, step + lane * CLUSTER, start, stop, first + 32 < n || step + 32 * CLUSTER < steps);
        }
    }

    // Load one step per lane, of the 32 blocks [start, stop) that the lanes hold. more: the row may have further steps.
    DEVICE void load_steps(const Row &row, u32 step, int start, int stop, bool more) {
        const u32 holder = step / PER_BLOCK;
        const int key = __shfl_sync(ALL_LANES, start, holder % 32) + step % PER_BLOCK * KEYS;
        stop = __shfl_sync(ALL_LANES, stop, holder % 32);
        const bool exists = holder < 32 && key < stop;
        const int page = exists ? page_of(x.p, row.b, key) : 0;
        u32 left = __ballot_sync(ALL_LANES, exists);
        if (!left && !more) load_nothing();
        for (; left; left &= left - 1, at.next()) {
            shared.steps.wait_empty(at);
            __syncwarp();  // all lanes have passed the wait, so the barrier may enter its next phase
            if (lane == __ffs(left) - 1) load_step(row.g, key, page, min(stop - key, KEYS) | (more || left & (left - 1) ? 0 : LAST));
            __syncwarp();
        }
    }
};

// A consumer warp, with its 16 heads and its share of keys and columns.
struct Consumer {
    Shared &shared;
    u16 *const q_tile, *const p_tile;
    const int lane, share, warp_head;
    const u32 rank;   // rank of this CTA in its cluster
    const int count;  // heads that exist
    const float slack;
    OnlineSoftmax softmax;
    u32 q[DK / 16][4];           // operand A
    float acc[COLUMNS / 8][4] = {};
    float k_rate[2] = {1.0f, 1.0f}, v_rate = 1.0f;  // E4M3: factors of a row's products and of its o

    DEVICE Consumer(Shared &memory, u16 *q_memory, u16 *p_memory, u32 rank, int count, float c, float slack)
        : shared(memory), q_tile(q_memory), p_tile(p_memory), lane(threadIdx.x % 32), share(threadIdx.x / 32 / HEAD_WARPS),
          warp_head(threadIdx.x / 32 % HEAD_WARPS * 16), rank(rank), count(count), slack(slack), softmax(c) {}

    DEVICE int head(int r) const { return warp_head + lane / 4 + 8 * r; }  // of a lane's two rows

    DEVICE void load_q(const Problem &p, const RowHeads &heads) {
        copy_heads<DK, KP, HEADS, THREADS>(q_tile, p.q, heads.row, heads.head0, p.h);
        cp_async_commit();
        cp_async_wait<0>();
        Stored::convert_queries<HEADS, THREADS>(q_tile, shared.q_rates);
        named_barrier<THREADS>(1);  // q is loaded
        Stored::load_queries(q, q_tile, warp_head);
        UNROLL for (int r = 0; E4M3 && BF16 && r < 2; ++r) k_rate[r] *= shared.q_rates[head(r)];
    }

    // Load the scales of a row's heads; page scales are loaded with the steps.
    DEVICE void load_scales(const KeyValueScales &scales, i64 g) {
        if (!E4M3 || PAGE_SCALES) return;
        k_rate[0] = k_rate[1] = scales.k.of_head(g);
        v_rate = scales.v.of_head(g);
    }

    DEVICE void add_logits(float (&s)[SHARE / 8][4], const unsigned char *keys, int stage) const {
        Stored::add_q_kt(s, q, keys, share * SHARE);
        const float scale = PAGE_SCALES ? shared.k_scales[stage] : 1.0f;
        if (E4M3) scale_rows(s, {k_rate[0] * scale, k_rate[1] * scale});
    }

    // Overwrite logits of keys that a step's blocks do not have. Their values are zeros.
    DEVICE void mask_units(float (&s)[SHARE / 8][4], const int *unit_keys) const {
        UNROLL for (int i = 0; i < elements<float[SHARE / 8][4]>; ++i) {
            const int key = share * SHARE + column_of(i);
            if (key % BLOCK >= unit_keys[key / BLOCK]) UNROLL for (int r = 0; r < 2; ++r) element(s, r, i) = -infinity();
        }
    }

    // Compute a step. The first step of a row raises its maxima; in the last one m and l are final before acc.
    DEVICE void step(unsigned char *stages, int keys, bool first, bool last, const PipelineState<STAGES> &at) {
        unsigned char *k_tile = stages + at.stage * STAGE_BYTES, *v_tile = k_tile + K_BYTES;
        float s[SHARE / 8][4] = {};
        add_logits(s, k_tile, at.stage);
        if (E4M3) mbarrier_wait(&shared.values[at.stage], at.parity);
        Stored::Values<KEYS, COLUMNS / 8> values(v_tile, share * COLUMNS);
        if (keys < KEYS) {
            if constexpr (SMALL) mask_units(s, shared.unit_keys[at.stage]);
            else {
                values.keep(keys);
                mask_columns(s, share * SHARE, {keys, keys}, -infinity());
            }
        }
        const float top[2] = {row_max(s, 0), row_max(s, 1)};
        const bool rises = top[0] > softmax.m[0] + slack || top[1] > softmax.m[1] + slack;
        if (first || named_barrier_any<THREADS>(1, rises))  // also: all have read the previous p
            raise_maxima<THREADS>(softmax, acc, top, shared.tops, share, head(0));
        store_p<PP>(softmax, s, p_tile, head(0), share * SHARE);
        if (last) share_sums();
        if (!E4M3) {
            mbarrier_wait(&shared.values[at.stage], at.parity);
            if (!SMALL && keys < KEYS) zero_values<SHARE>(v_tile, share * SHARE, keys);
        }
        named_barrier<THREADS>(1);  // p is stored, and hidden values are zeroed
        if (CLUSTER > 1 && last) send_totals();
        Stored::add_p_v<PP, KEYS>(acc, p_tile, warp_head, values, PAGE_SCALES ? shared.v_scales[at.stage] : 1.0f);
    }

    // The result of a row without keys.
    DEVICE void no_step() {
        share_sums();
        named_barrier<THREADS>(1);
        if (CLUSTER > 1) send_totals();
    }

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

    DEVICE void share_sums() { store_sums(softmax, shared.sums, share, head(0)); }
    DEVICE float total(int head) const { return sum_of(shared.sums, head); }  // of all shares, after share_sums and a barrier

    DEVICE void write(const Arguments &x, const RowHeads &heads) {
        UNROLL for (int r = 0; r < 2; ++r) {
            const RowTotals totals(softmax.c, softmax.m[r], total(head(r)));
            const bool exists = head(r) < count;
            const i64 out = heads.first(x) + head(r);
            if (exists && share == 0 && lane % 4 == 0) x.lse[out] = totals.lse * LN_2;
            const float rate = totals.scale == 0.0f ? 0.0f : totals.scale * v_rate;  // no keys: the scale may be NaN
            Stored::write_columns(x.o + out * DV + share * COLUMNS, acc, r, rate, exists);
        }
    }

    // Send m and l to every CTA of the cluster; the warps of a head take turns. Call share_sums() and a barrier first.
    DEVICE void send_totals() {
        for (u32 to = share * 4 + lane % 4; to < CLUSTER; to += 4 * SHARES)
            UNROLL for (int r = 0; r < 2; ++r)
                if (head(r) < count) shared.cluster().send_totals(rank, head(r), to, softmax.m[r], total(head(r)));
    }

    DEVICE void send_columns() {
        const float rates[2] = {total(head(0)) == 0.0f ? 0.0f : v_rate, total(head(1)) == 0.0f ? 0.0f : v_rate};  // as in `write`
        if (E4M3) scale_rows(acc, rates);
        UNROLL for (int r = 0; r < 2; ++r)
            if (head(r) < count) Stored::send_row(shared.cluster(), rank, head(r), share * COLUMNS, acc, r);
    }

    // Store o and lse: the CTA's own, or its columns of the cluster's merged result.
    DEVICE void finish(const Arguments &x, const RowHeads &heads) {
        if constexpr (CLUSTER > 1) {
            send_columns();
            mbarrier_wait_cluster(&shared.cluster().received, 0);
            shared.cluster().write<THREADS>(softmax.c, rank, count, x.o + heads.first(x) * DV, x.lse + heads.first(x));
        } else write(x, heads);
    }
};

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS + LOADING, PER_SM) forward_blocks(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the stages, q, p, Shared
    u16 *q_tile = reinterpret_cast<u16 *>(memory + STAGES * STAGE_BYTES), *p_tile = q_tile + HEADS * KP;
    Shared &shared = *reinterpret_cast<Shared *>(p_tile + HEADS * PP);
    const u32 rank = blockIdx.x % CLUSTER, all = RowHeads::all(x);
    if (LISTED && blockIdx.x >= all) return;
    RowHeads heads(x, blockIdx.x / CLUSTER);
    if (threadIdx.x == THREADS) shared.init(x, heads);
    __syncthreads();
    if (CLUSTER > 1) cluster_arrive();
    if (NEXT_FIRST) start_next_kernel();
    auto next_row = [&, number = blockIdx.x]() mutable {
        number += gridDim.x;
        if (CLUSTER > 1 || number >= all) return false;
        heads = RowHeads(x, number);
        return true;
    };
    if constexpr (SMALL) {
        if (threadIdx.x >= THREADS) {
            GatheringProducer<Shared> producer{x.p, memory, shared, reinterpret_cast<int *>(&shared + 1), shared.named};
            wait_for_kernel_ahead();
            do producer.load_row(heads.row, rank, position_at(x.p, heads.row.b, heads.row.s));
            while (next_row());
            if (!NEXT_FIRST) start_next_kernel();
            if (CLUSTER > 1) cluster_wait();
            return;
        }
    } else if (threadIdx.x >= THREADS) {
        Producer producer{x, memory, shared};
        const int *block = producer.block_at(heads.row, 0), *position = position_at(x.p, heads.row.b, heads.row.s);
        wait_for_kernel_ahead();
        producer.load_row(heads.row, rank, block, position);
        while (next_row()) producer.load_row(heads.row, rank, producer.block_at(heads.row, 0), position_at(x.p, heads.row.b, heads.row.s));
        if (!NEXT_FIRST) start_next_kernel();
        if (CLUSTER > 1) cluster_wait();
        return;
    }
    const float c = x.p.scale_log2, slack = SLACK / c;
    PipelineState<STAGES> at;
    wait_for_kernel_ahead();
    do {
        Consumer consumer(shared, q_tile, p_tile, rank, heads.existing(x), c, slack);
        consumer.load_scales(x.scales, heads.row.g);
        consumer.load_q(x.p, heads);
        if (CLUSTER > 1) cluster_wait();  // all CTAs have started
        consumer.attend(memory, at);
        consumer.finish(x, heads);
    } while (next_row());
}
