// Forward pass on Hopper like forward_tiles.cu, for head dims up to 256 and for blocks smaller than a step, which steps
// gather. Units, pipelines and bits: see gather_steps.cuh. Formulas, grid, tiles and masks: see
// token_tiles.cuh.
// A step's keys are released as soon as s is computed, because few stages of 256 columns fit.
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
    DEVICE void begin_products(const GatheredStep &step) {
        wgmma_fence();
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
    // Replace a step's logits s by p, release its keys, and compute alpha if a maximum rises. PENDING: wgmma groups
    // that may still be in flight.
    template <int PENDING, bool PARTIAL>
    DEVICE void probabilities(const GatheredStep &step) {
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

// Run a consumer through the steps of a tile. The first GEMM of one step and the second GEMM of the step before are in
// flight together. If a maximum rises meanwhile, acc is rescaled once the second GEMM is done.
DEVICE void attend_tile(GatherReader &steps, int partial_steps, Pipeline<1> &q, GatherAttention &math) {
    GatheredStep coming;
    auto find = [&](int limit) {
        const Found found = steps.find(coming, limit);
        if (found == END) {
            __syncwarp();  // all lanes have waited for q, even without steps, so the barrier may enter its next phase
            q.release(0);
        }
        return found;
    };
    Found found = find(NO_LIMIT);
    while (found == STEP) {
        GatheredStep held = coming;  // its second GEMM has not started
        math.begin_products(held);
        if (held.number < partial_steps) math.probabilities<0, true>(held);
        else math.probabilities<0, false>(held);
        math.update_operand();
        while ((found = find(held.number + VALUE_STAGES)) == STEP && coming.number >= partial_steps) {
            math.begin_products(coming);
            math.begin_sums(held);
            math.probabilities<1, false>(coming);
            math.finish_probabilities();
            wgmma_wait<0>();
            steps.release_values(held);
            math.update_operand();
            held = coming;
        }
        math.begin_sums(held);
        wgmma_wait<0>();
        steps.release_values(held);
        if (found == LIMIT) found = find(NO_LIMIT);
    }
}

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
        attend_tile(steps, steps_of(scheduler.counts.y - scheduler.counts.x), shared.q[consumer], attention);
        attention.write(x, p, tile, consumer);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_gather(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q of the consumers, the stages of K, those of V
    __shared__ GatherShared shared;
    unsigned char *keys = memory + CONSUMERS * Q_BYTES, *values = keys + STAGES * K_BYTES;
    const int warpgroup = threadIdx.x / 128, producer = threadIdx.x / 32 - 4 * CONSUMERS;
    if (threadIdx.x == 0) shared.init();
    wait_for_stream();
    __syncthreads();
    if (warpgroup < CONSUMERS) {
        reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(true);
        attend(x, keys, values, memory + warpgroup * Q_BYTES, shared, warpgroup);
        return;
    }
    reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS>(false);
    if (producer == 0) produce_keys(x.k, x.p, x.plan, keys, shared);
    else if (producer <= LOADERS)  // q is free when the first stage of values is
        produce_part<DV, false>(shared.values, producer - 1, x.v, x.p, x.plan, values, shared, [&](TileScheduler &scheduler, const TokenTile &tile) {
            if (producer > 1) return;
#pragma unroll 1
            for (int i = 0; i < CONSUMERS; ++i) produce_rows<DK>(shared.q[i], scheduler.at<1>(), memory + i * Q_BYTES, tile, i, x.q);
        });
    else if (COPIES && producer == 3)
        produce_part<DK, true>(shared.keys, 1, x.k, x.p, x.plan, keys, shared, [](TileScheduler &, const TokenTile &) {});
}
