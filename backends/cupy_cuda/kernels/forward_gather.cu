// Forward pass on Hopper like forward_tiles.cu, for head dims up to 256 and for blocks smaller than a step, which steps
// gather (gather_steps.cuh). A step's keys are released as soon as s is computed, for lack of room for stages.
#include "gather_steps.cuh"

typedef ForwardArguments Arguments;

struct GatherAttention : Attention<GatherReader> {
    using Attention::Attention;
    static constexpr int BRIEF = 0;
    static constexpr bool HOLDS_Q = false;
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
    DEVICE bool fails() const { return false; }  // the keys are released
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_gather(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q of the consumers, the stages of K, those of V
    __shared__ GatherShared shared;
    unsigned char *keys = memory + CONSUMERS * Q_BYTES, *values = keys + STAGES * K_BYTES;
    if (threadIdx.x == 0) shared.init();
    wait_for_stream();
    __syncthreads();
    auto attend = [&](int consumer) {
        const GatherReader steps{shared, consumer, uniform(operand(shared_address(keys))), uniform(operand(shared_address(values)))};
        attend_tiles<GatherAttention>(x, steps, memory + consumer * Q_BYTES, shared, consumer,
                                      [&](GatherAttention &attention, const TokenTile &tile) { attention.write(x, tile, consumer); });
    };
    run_warpgroups(attend, [&](int producer) {
        produce_gathered(x, keys, values, shared, producer, [&](TileScheduler &scheduler, const TokenTile &tile, int i) {
            produce_rows<DK>(shared.q[i], scheduler.at<1>(), memory + i * Q_BYTES, tile, i, x.q);
        });
    });
}
