// Backward pass on Hopper like dq_tiles.cu, for head dims up to 256 and for blocks smaller than a step, which steps
// gather (gather_steps.cuh).
//
// With 256 columns, shared memory holds two stages of K and one of V besides q and do. Values are released as soon as
// do v^T is computed. A consumer does not overlap its own work, because registers are scarce: while one consumer
// computes ds, the other runs its products.
#include "gather_steps.cuh"

constexpr int ROW_BYTES = Q_BYTES + DV / 64 * PANEL;  // of a consumer: q, do

struct Arguments {
    TensorMap q, d_o, k, v;
    Problem p;
    TilePlan plan;
    QueryGradients to;
};

struct GatherGradient : Gradient<GatherReader> {
    using Gradient::Gradient;
    // do_tile: do, which has arrived.
    DEVICE void begin_tile(const Arguments &x, const TokenTile &tile, int consumer, const unsigned char *do_tile) {
        float sum[2] = {0.0f, 0.0f};
        i64 row[2];
        UNROLL for (int r = 0; r < 2; ++r) row[r] = RowPair::index(x.p, tile, consumer, r);
        UNROLL for (int i = threadIdx.x % 4; i < DV / 8; i += 4)
            UNROLL for (int r = 0; r < 2; ++r) {
                if (!rows.bit[r]) continue;
                const uint4 a = *reinterpret_cast<const uint4 *>(do_tile + i / 8 * PANEL + swizzled(RowPair::row(r), i % 8));
                const uint4 b = *reinterpret_cast<const uint4 *>(x.to.o + row[r] * DV + i * 8);
                sum[r] = dot2(a.w, b.w, dot2(a.z, b.z, dot2(a.y, b.y, dot2(a.x, b.x, sum[r]))));
            }
        begin(x, tile, consumer, sum);
        to_base_2();
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
        steps.release(step);
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

DEVICE void differentiate(const Arguments &x, unsigned char *keys, unsigned char *values, unsigned char *row_memory, GatherShared &shared,
                          int consumer) {
    const Problem &p = x.p;
    const u32 q_tile = uniform(operand(shared_address(row_memory)));
    GatherReader steps{shared, consumer, uniform(operand(shared_address(keys))), uniform(operand(shared_address(values)))};
    TileScheduler scheduler{shared.tiles, x.plan};
    while (scheduler.next_tile()) {
        const TokenTile tile = scheduler.tile(p.G);
        const RowPair rows(p, tile, consumer);
        GatherGradient gradient(steps, q_tile, rows, p.scale_log2);
        steps.begin_tile(steps_of(scheduler.counts.y));
        const int whole_steps = steps.left - steps_of(scheduler.counts.y - scheduler.counts.x);
        gradient.load_lse(x, tile, consumer);
        shared.q[consumer].wait_full(scheduler.at<1>());
        gradient.begin_tile(x, tile, consumer, row_memory + Q_BYTES);
        for (GatheredStep step; steps.find(step); steps.release_keys(step)) {
            gradient.begin_products(step);
            gradient.finish_products(step, steps.left >= whole_steps);
            gradient.add_sums(step);
        }
        __syncwarp();  // all lanes have waited for q and do, even without steps, so the barrier may enter its next phase
        shared.q[consumer].release(0);
        gradient.write(x, tile, consumer);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) dq_gather(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q and do of the consumers, the stages of K, those of V
    __shared__ GatherShared shared;
    unsigned char *keys = memory + CONSUMERS * ROW_BYTES, *values = keys + STAGES * K_BYTES;
    if (threadIdx.x == 0) shared.init();
    wait_for_kernel_ahead();
    start_next_kernel();
    __syncthreads();
    run_warpgroups([&](int consumer) { differentiate(x, keys, values, memory + consumer * ROW_BYTES, shared, consumer); },
                   [&](int producer) {
                       produce_gathered(x, keys, values, shared, producer, [&](TileScheduler &scheduler, const TokenTile &tile, int i) {
                           produce_rows<DK, DV>(shared.q[i], scheduler.at<1>(), memory + i * ROW_BYTES, tile, i, x.q, x.d_o);
                       });
                   });
}
