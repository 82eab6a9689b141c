// Forward pass row by row, on any GPU from sm_80: o and lse of one query row. K and V are loaded once for up to 64
// heads of a group.
//
//   s = q k^T,  p = 2^(c (s - m)),  o = sum_j p_j v_j / l,  lse = c m + log2 l         (softmax.cuh)
//
// Grid: one CTA per (row, HEADS heads, split). With few rows, each is split over several CTAs to fill the GPU: those of
//   a cluster (sm_90) merge their results through shared memory; others store partial results, which combine.cu merges.
// Tiles: 16 heads by TILE gathered keys per warp and step; teams of warps share the tiles (key_tiles.cuh).
// Fast because each team has STAGES - 1 tiles in flight while it multiplies one, and waits for no other team.
// Shapes: q [HEADS][KP], a tile's keys [TILE][KP] and values [TILE][VP], rows padded against bank conflicts (mma.cuh);
//   sums of 16 heads by DVP columns, DV rounded up to 16, in a warp's registers.
// Loads: cp.async; no TMA, because ranges may begin at any key.
// Masks: only the last tile of every 32 ranges has fewer than TILE keys; the rest is zeros, whose logits become -inf.
//
//   SPLIT    1: o and lse are partial results, float32 [rows, h, splits, DV] and [rows, h, splits], lse in base 2
//   CLUSTER  CTAs of a cluster; 1: no clusters
#include "key_tiles.cuh"

struct Arguments {
    Problem p;
    void *o;     // [rows, h, DV] in 16 bits, or partial results in float32
    float *lse;  // [rows, h], natural, or partial results
    i64 splits, head_tiles;
};

constexpr int MERGE = DVP + 8;  // floats of a head's row in shared memory, padded against bank conflicts

// Results of the teams in shared memory. In a cluster, the CTA's merged acc replaces the first team's.
struct TeamResults {
    float *acc, *m, *l;    // [TEAMS][HEADS][MERGE], [TEAMS][HEADS]
    float *cta_m, *cta_l;  // [HEADS]
    DEVICE explicit TeamResults(u16 *memory)
        : acc(reinterpret_cast<float *>(memory)), m(acc + TEAMS * HEADS * MERGE), l(m + TEAMS * HEADS), cta_m(l + TEAMS * HEADS),
          cta_l(cta_m + HEADS) {}

    DEVICE void store(const RowHeads &heads, const OnlineSoftmax &softmax, const float (&sums)[DVP / 8][4]) {
        const int lane = threadIdx.x % 32, slot = heads.team * HEADS + heads.warp_head;  // of [TEAMS][HEADS]
        UNROLL for (int r = 0; r < 2; ++r) {
            const float total = quad_sum(softmax.l[r]);
            if (lane % 4 == 0) {
                m[slot + lane / 4 + 8 * r] = softmax.m[r];
                l[slot + lane / 4 + 8 * r] = total;
            }
        }
        store_rows<MERGE>(acc + slot * MERGE, sums);
    }

    // Merge two columns of a head over the teams, in order.
    DEVICE PartialSums combine_teams(float c, int head, int column) const {
        return combine_partials<TEAMS>(c, [&](int team) {
            const int at = team * HEADS + head;
            return PartialSums{m[at], l[at], acc[at * MERGE + column], acc[at * MERGE + column + 1]};
        });
    }

    DEVICE void store_cta(float c) {
        for (int i = threadIdx.x; i < HEADS * (DV / 2); i += THREADS) {
            const int head = i / (DV / 2), column = i % (DV / 2) * 2;
            const PartialSums sum = combine_teams(c, head, column);
            *reinterpret_cast<float2 *>(acc + head * MERGE + column) = make_float2(sum.low, sum.high);
            if (column == 0) {
                cta_m[head] = sum.m;
                cta_l[head] = sum.l;
            }
        }
    }

    // The same over the CTAs of the cluster, in order.
    DEVICE PartialSums combine_cluster(float c, int head, int column) const {
        const float *at = acc + head * MERGE + column;
        return combine_partials<CLUSTER>(c, [&](int cta) {
            auto load = [&](const float *mine) { return load_from_cta(mine, cta); };
            return PartialSums{load(cta_m + head), load(cta_l + head), load(at), load(at + 1)};
        });
    }
};

DEVICE void write_output(const Arguments &x, i64 out, int split, float c, int column, const PartialSums &sum) {
    const RowTotals totals(c, sum.m, sum.l);
    const float low = sum.low * totals.scale, high = sum.high * totals.scale;
    if constexpr (SPLIT) {
        out = out * static_cast<u32>(x.splits) + split;
        *reinterpret_cast<float2 *>(static_cast<float *>(x.o) + out * DV + column) = make_float2(low, high);
    } else *reinterpret_cast<u32 *>(static_cast<u16 *>(x.o) + out * DV + column) = pack(low, high);
    if (column == 0) x.lse[out] = SPLIT ? totals.lse : totals.lse * LN_2;
}

DEVICE void attend(const u16 *q_tile, const RowHeads &heads, KeyPipeline &keys, OnlineSoftmax &softmax, float (&acc)[DVP / 8][4]) {
    const HeadsOperand<KP> q(q_tile, heads.warp_head);
    for (int count = keys.next_tile(); count; count = keys.next_tile()) {
        float s[TILE / 8][4] = {}, top[2];
        q.add_products(s, keys.k());
        if (count < TILE) mask_columns(s, 0, {count, count}, -infinity());
        UNROLL for (int r = 0; r < 2; ++r) top[r] = quad_max(row_max(s, r));
        if (__any_sync(ALL_LANES, top[0] > softmax.m[0] || top[1] > softmax.m[1])) {
            const float alpha[2] = {softmax.raise(0, top[0]), softmax.raise(1, top[1])};
            scale_rows(acc, alpha);
        }
        softmax.exponentiate<1>(s);
        add_s_b<VP, DVP>(acc, s, keys.v(), 0);
    }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS) forward_rows(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];  // q, then the teams' buffers; later the teams' results
    const Problem &p = x.p;
    const u32 splits = x.splits;
    const int split = blockIdx.x % splits;
    const RowHeads heads(p, blockIdx.x / splits, x.head_tiles);
    OnlineSoftmax softmax(p.scale_log2);
    float acc[DVP / 8][4] = {};

    wait_for_stream();
    copy_heads<DK, KP, HEADS, THREADS>(memory, p.q, heads.row, heads.head0, p.h);
    cp_async_commit();
    const KeyIterator tiles(p, heads.row, split * TEAMS + heads.team, splits * TEAMS);
    KeyPipeline keys(tiles, memory + HEADS * KP + heads.team * STAGES * STAGE, heads.row);
    cp_async_wait<STAGES - 1>();  // q's group is the oldest of 1 + (STAGES - 1)
    __syncthreads();              // q is loaded
    attend(memory, heads, keys, softmax, acc);

    cp_async_wait<0>();
    __syncthreads();  // all have read their last tile
    TeamResults results(memory);
    results.store(heads, softmax, acc);
    __syncthreads();
    int first = threadIdx.x, step = THREADS;
    if constexpr (CLUSTER > 1) {
        results.store_cta(softmax.c);
        cluster_sync();
        first += split * THREADS, step *= CLUSTER;  // each CTA stores a share of the columns
    }
    for (int i = first; i < HEADS * (DV / 2); i += step) {
        const int head = i / (DV / 2), column = i % (DV / 2) * 2;
        if (heads.head0 + head >= p.h) continue;
        const PartialSums sum =
            CLUSTER > 1 ? results.combine_cluster(softmax.c, head, column) : results.combine_teams(softmax.c, head, column);
        write_output(x, heads.index(p, head), split, softmax.c, column, sum);
    }
    if (CLUSTER > 1) cluster_sync();  // keep shared memory alive until all CTAs have read it
}
