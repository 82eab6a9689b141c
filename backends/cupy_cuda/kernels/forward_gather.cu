// Forward pass on Hopper like forward_tiles.cu, for head dims up to 256 and for blocks smaller than a step, which steps
// gather (gather_steps.cuh). A step's keys are released as soon as s is computed, for lack of room for stages.
#include "gather_steps.cuh"

constexpr int Q_BYTES = DK / 64 * PANEL;  // q tile of one consumer

struct Arguments {
    TensorMap q, k, v;
    Problem p;
    TilePlan plan;
    u16 *o;      // [B,S,G,h,DV]
    float *lse;  // [B,S,G,h]
};

struct GatherAttention : Attention {
    GatherReader &steps;
    const u32 q_tile;  // an operand
    DEVICE GatherAttention(GatherReader &reader, u32 q, const RowPair &pair, float c, float slack)
        : Attention(pair, c, slack), steps(reader), q_tile(q) {}
    static constexpr int BRIEF = 0;
    DEVICE void begin_products(const GatheredStep &step) {
        wgmma_a_bt<DK, Layout<DK>::NEXT, Layout<DK>::GROUP>(s, uniform(q_tile), steps.keys_of(step));
        wgmma_commit();
    }
    DEVICE void begin_sums(const GatheredStep &step) {
        steps.shared.values.wait_full(step.values);
        if (COPIES) fence_async_proxy();
        wgmma_fence();
        wgmma_add_a_b<DV, Layout<DV>::GROUP>(acc, p, steps.values_of(step) + (Layout<DV>::NEXT / 16 << 16));
        wgmma_commit();
    }
    template <int PENDING> DEVICE void probabilities(const GatheredStep &step, int key) {
        if (key != NO_MASK) finish_logits<PENDING, true>(step);
        else finish_logits<PENDING, false>(step);
    }
    // Replace a step's logits s by p, release its keys, and compute alpha if a maximum rises.
    template <int PENDING, bool PARTIAL> DEVICE void finish_logits(const GatheredStep &step) {
        u32 units[2];
        UNROLL for (int r = 0; r < 2; ++r) units[r] = rows.bit[r] ? steps.selected(step, RowPair::row(r) / H) : 0;
        wgmma_wait<PENDING>();
        if (PARTIAL) steps.mask_keys(s, step, rows, -infinity());
        __syncwarp();  // all lanes have read the data that comes with the keys
        steps.release_keys(step);
        mask_units(s, units, -infinity());
        exponentiate(s, [&](int r) { return units[r] != 0; });
    }
    DEVICE void finish_probabilities() { compute_sums_before_wait(&steps.shared.raw); }
};

DEVICE void attend(const Arguments &x, unsigned char *keys, unsigned char *values, unsigned char *q_memory, GatherShared &shared, int consumer) {
    const Problem &p = x.p;
    const u32 q_tile = uniform(operand(shared_address(q_memory)));
    const float c = p.scale_log2, slack = SLACK / c;
    GatherReader steps(shared, consumer, keys, values);
    TileScheduler scheduler(shared.tiles, x.plan);
    while (scheduler.next_tile()) {
        const TokenTile tile = scheduler.tile(p.G);
        const RowPair rows(p, tile, consumer);
        GatherAttention attention(steps, q_tile, rows, c, slack);
        steps.begin_tile(steps_of(scheduler.counts.y));
        shared.q[consumer].wait_full(scheduler.at<1>());
        consume_steps(steps, steps_of(scheduler.counts.y - scheduler.counts.x), shared.q[consumer], 0, attention);
        attention.write(x, p, tile, consumer);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_gather(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q of the consumers, the stages of K, those of V
    __shared__ GatherShared shared;
    unsigned char *keys = memory + CONSUMERS * Q_BYTES, *values = keys + STAGES * K_BYTES;
    if (threadIdx.x == 0) shared.init();
    wait_for_stream();
    __syncthreads();
    run_warpgroups([&](int consumer) { attend(x, keys, values, memory + consumer * Q_BYTES, shared, consumer); },
                   [&](int producer) {
                       produce_gathered(x, keys, values, shared, producer, [&](TileScheduler &scheduler, const TokenTile &tile, int i) {
                           produce_rows<DK>(shared.q[i], scheduler.at<1>(), memory + i * Q_BYTES, tile, i, x.q);
                       });
                   });
}
