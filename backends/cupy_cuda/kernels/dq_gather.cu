// Backward pass on Hopper like dq_tiles.cu, for head dims up to 256 and for blocks smaller than a step, which steps
// gather. Units, pipelines and bits: see gather_steps.cuh. Grid, tiles and masks: see token_tiles.cuh.
//
//   delta = sum(do * o) - dlse,  p = 2^(c q k^T - lse),  ds = p * (do v^T - delta),  dq = scale * sum_j ds_j k_j
//
// With 256 columns, shared memory holds two stages of K and one of V besides q and do. Values are released as soon as
// do v^T is computed. A consumer does not overlap its own work, because registers are scarce: while one consumer
// computes ds, the other runs its products.
#include "gather_steps.cuh"

constexpr int Q_BYTES = DK / 64 * PANEL, ROW_BYTES = Q_BYTES + DV / 64 * PANEL;  // of a consumer: q, and with do

struct Arguments {
    TensorMap q, d_o, k, v;
    Problem p;
    TilePlan plan;
    const u16 *o;             // [B,S,G,h,DV], contiguous
    const float *lse, *dlse;  // [B,S,G,h]; dlse may be null
    u16 *dq;                  // [B,S,G,h,DK]
    float *delta;             // [B,S,G,h]
};

// One consumer's dq over a tile.
struct QueryGradient {
    GatherReader &steps;
    const u32 q_tile;  // wgmma operand of q; do follows it
    const RowPair &rows;
    const float c;
    float delta[2], lse[2];  // lse in base 2; infinity for a row without keys
    float acc[DK / 2], s[KEYS / 2], dp[KEYS / 2];
    u32 ds[KEYS / 16][4];  // an operand

    DEVICE QueryGradient(GatherReader &reader, u32 q, const RowPair &pair, float scale_log2)
        : steps(reader), q_tile(q), rows(pair), c(scale_log2) {}
    // delta, which goes to memory, too. do_tile: do, which has arrived.
    DEVICE void begin_tile(const Arguments &x, const TokenTile &tile, int consumer, const unsigned char *do_tile) {
        float sum[2] = {0.0f, 0.0f};
        i64 row[2];
        UNROLL for (int r = 0; r < 2; ++r) row[r] = RowPair::index(x.p, tile, consumer, r);
        UNROLL for (int i = threadIdx.x % 4; i < DV / 8; i += 4)
            UNROLL for (int r = 0; r < 2; ++r) {
                if (!rows.bit[r]) continue;
                const uint4 a = *reinterpret_cast<const uint4 *>(do_tile + i / 8 * PANEL + swizzled(RowPair::row(r), i % 8));
                const uint4 b = *reinterpret_cast<const uint4 *>(x.o + row[r] * DV + i * 8);
                sum[r] = dot2(a.w, b.w, dot2(a.z, b.z, dot2(a.y, b.y, dot2(a.x, b.x, sum[r]))));
            }
        UNROLL for (int r = 0; r < 2; ++r) {
            delta[r] = quad_sum(sum[r]);
            if (x.dlse && rows.bit[r]) delta[r] -= x.dlse[row[r]];
            if (rows.bit[r] && threadIdx.x % 4 == 0) x.delta[row[r]] = delta[r];
        }
        UNROLL for (int i = 0; i < DK / 2; ++i) acc[i] = 0.0f;
    }
    DEVICE void begin_products(const GatheredStep &step) {
        wgmma_fence();
        wgmma_a_bt<DK, Layout<DK>::NEXT, Layout<DK>::GROUP>(s, uniform(q_tile), steps.keys_of(step));
        wgmma_commit();
        steps.shared.values.wait_full(step.values);
        if (COPIES) fence_async_proxy();
        wgmma_fence();
        wgmma_a_bt<DV, Layout<DV>::NEXT, Layout<DV>::GROUP>(dp, uniform(q_tile + Q_BYTES / 16), steps.values_of(step));
        wgmma_commit();
    }
    DEVICE void add_sums(const GatheredStep &step) {
        wgmma_fence();
        wgmma_add_a_b<DK, Layout<DK>::GROUP>(acc, ds, steps.keys_of(step) + (Layout<DK>::NEXT / 16 << 16));
        wgmma_commit();
        wgmma_wait<0>();
    }
    // ds from the products of a step, whose values are released.
    DEVICE void finish_products(const GatheredStep &step, bool partial) {
        wgmma_wait<0>();
        steps.release_values(step);
        float shift[2];
        UNROLL for (int r = 0; r < 2; ++r) shift[r] = UNITS > 1 || step.rows & rows.bit[r] ? lse[r] : infinity();
        logit_gradients(s, dp, c, shift, delta);
        u32 units[2];  // rows of no token, which are not stored, have those of the last one
        UNROLL for (int r = 0; r < 2; ++r) units[r] = steps.selected(step, min(RowPair::row(r) / H, TQ - 1));
        mask_units(s, units, 0.0f);
        if (partial) steps.mask_keys(s, step, rows, 0.0f);
        as_operand(ds, s);
    }
};

// A consumer's steps of a tile.
DEVICE void differentiate_tile(GatherReader &steps, int partial_steps, Pipeline<1> &q, QueryGradient &math) {
    GatheredStep step;
    while (steps.find(step, NO_LIMIT) == STEP) {
        math.begin_products(step);
        math.finish_products(step, step.number < partial_steps);
        math.add_sums(step);
        steps.release_keys(step);
    }
    __syncwarp();  // all lanes have seen q and do, of a tile without steps, too: the next phase may pass
    q.release(0);  // are not read any more
}

DEVICE void differentiate(const Arguments &x, unsigned char *keys, unsigned char *values, unsigned char *row_memory, GatherShared &shared,
                          int consumer) {
    const Problem &p = x.p;
    const u32 q_tile = uniform(operand(shared_address(row_memory)));
    GatherReader steps(shared, consumer, keys, values);
    TileScheduler scheduler(shared.tiles, x.plan);
    while (scheduler.next_tile()) {
        const TokenTile tile = scheduler.tile(p.G);
        const RowPair rows(p, tile, consumer);
        QueryGradient gradient(steps, q_tile, rows, p.scale_log2);
        steps.begin_tile(steps_of(scheduler.counts.y));
        UNROLL for (int r = 0; r < 2; ++r) {
            const float lse = rows.bit[r] ? x.lse[RowPair::index(p, tile, consumer, r)] : -infinity();
            gradient.lse[r] = lse == -infinity() ? infinity() : lse * LOG2_E;
        }
        shared.q[consumer].wait_full(scheduler.at<1>());
        gradient.begin_tile(x, tile, consumer, row_memory + Q_BYTES);
        differentiate_tile(steps, steps_of(scheduler.counts.y - scheduler.counts.x), shared.q[consumer], gradient);

        float scale[2];
        UNROLL for (int r = 0; r < 2; ++r) scale[r] = gradient.lse[r] == infinity() ? 0.0f : static_cast<float>(p.scale);
        write_rows<DK>(gradient.acc, scale, x.dq, p, tile, consumer);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq_gather(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q and do of the consumers, the stages of K, those of V
    __shared__ GatherShared shared;
    unsigned char *keys = memory + CONSUMERS * ROW_BYTES, *values = keys + STAGES * K_BYTES;
    const int warpgroup = threadIdx.x / 128, producer = threadIdx.x / 32 - 4 * CONSUMERS;
    if (threadIdx.x == 0) shared.init();
    wait_for_kernel_ahead();
    start_next_kernel();
    __syncthreads();
    if (warpgroup < CONSUMERS) {
        reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(true);
        differentiate(x, keys, values, memory + warpgroup * ROW_BYTES, shared, warpgroup);
        return;
    }
    reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(false);
    if (producer == 0) produce_keys(x.k, x.p, x.plan, keys, shared);
    else if (producer <= LOADERS)
        produce_part<DV, false>(shared.values, producer - 1, x.v, x.p, x.plan, values, shared, [&](TileScheduler &scheduler, const TokenTile &tile) {
            if (producer > 1) return;
#pragma unroll 1
            for (int i = 0; i < CONSUMERS; ++i) produce_rows<DK, DV>(shared.q[i], scheduler.at<1>(), memory + i * ROW_BYTES, tile, i, x.q, x.d_o);
        });
    else if (COPIES && producer == 3)
        produce_part<DK, true>(shared.keys, 1, x.k, x.p, x.plan, keys, shared, [](TileScheduler &, const TokenTile &) {});
}
