// Forward pass on Hopper: o and lse of tiles of tokens (token_tiles.cuh).
#include "token_tiles.cuh"

typedef ForwardArguments Arguments;

// The `math` of consume_steps.
struct TileAttention : Attention<StepReader> {
    // Windows of a multiple of KEYS: only the last step is brief, with the keys after the tile's first token.
    static constexpr int BRIEF = !WINDOW ? 0 : TOKENS <= 17 ? 16 : TOKENS <= 33 ? 32 : 0;
    static constexpr bool HOLDS_Q = H == 1;  // q is an operand in registers, of which two consumers have enough
    u32 q[DK / 16][4];

    using Attention::Attention;
    DEVICE void load_q(const unsigned char *memory) {
        UNROLL for (int k = 0; k < DK / 16; ++k) load_operand(q[k], memory, k);
    }
    DEVICE void begin_products(const Step &step) {
        if (HOLDS_Q) wgmma_a_bt<DK>(s, q, steps.keys(step));
        else wgmma_a_bt<DK>(s, uniform(q_tile), steps.keys(step));  // uniform() again: offsets in uniform registers
        wgmma_commit();
    }
    DEVICE void begin_sums(const Step &step) {
        wgmma_add_a_b<DV>(acc, p, steps.keys(step) + K_BYTES / 16 + TRANSPOSED);
        wgmma_commit();
    }
    template <int PENDING>
    DEVICE void probabilities(const Step &step, int key) { finish_logits<PENDING>(s, step, key); }
    // Replace the logits s by p. PENDING: wgmma groups that may still be in flight.
    template <int PENDING, class Tile> DEVICE void finish_logits(Tile &s, const Step &step, int key) {
        wgmma_wait<PENDING>();
        if (key != NO_MASK) rows.mask(s, key, -infinity());
        exponentiate(s, [&](int r) { return step.rows & rows.bit[r]; });
    }
    template <int KEYS> DEVICE void brief_step(const Step &step, int key) {
        float few[KEYS / 2];
        u32 operand[KEYS / 16][4];
        wgmma_fence();
        wgmma_a_bt<DK>(few, q_tile, steps.keys(step));
        wgmma_commit();
        finish_logits<0>(few, step, key);
        if (rises) scale_rows(acc, alpha);
        as_operand(operand, few);
        wgmma_fence();
        wgmma_add_a_b<DV>(acc, operand, steps.keys(step) + K_BYTES / 16 + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
    }
    DEVICE void finish_probabilities() { compute_sums_before_wait(&steps.pipeline.raw); }
};

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) forward_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q per consumer, stages of K and V
    __shared__ Shared shared;
    unsigned char *stages = memory + CONSUMERS * Q_BYTES;
    if (threadIdx.x == 0) shared.init();
    wait_for_stream();
    if (FEW_TOKENS) make_union<THREADS>(x.p, blockIdx.x / static_cast<u32>(x.p.G), blockIdx.x % static_cast<u32>(x.p.G), 0, x.p.S);
    __syncthreads();
    auto produce_queries = [&](int consumer) {
        TileScheduler scheduler{shared.tiles, x.plan};
        while (scheduler.next_tile())
            produce_rows<DK>(shared.q[consumer], scheduler.at<1>(), memory + consumer * Q_BYTES, scheduler.tile(x.p.G), consumer, x.q);
    };
    auto attend = [&](int consumer) {
        const StepReader steps{shared.steps, consumer, uniform(operand(shared_address(stages)))};
        attend_tiles<TileAttention>(x, steps, memory + consumer * Q_BYTES, shared, consumer,
                                    [&](TileAttention &attention, const TokenTile &tile) { attention.write(x, tile, consumer); });
    };
    run_warpgroups(attend, [&](int producer) {
        if (producer == 0) produce_steps(x, stages, shared);
        else if (producer <= CONSUMERS) produce_queries(producer - 1);
    });
}
