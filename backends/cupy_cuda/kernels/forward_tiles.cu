// Forward pass on Hopper: o and lse of tiles of tokens (token_tiles.cuh).
#include "token_tiles.cuh"

typedef ForwardArguments Arguments;

// The `math` of consume_steps.
struct TileAttention : Attention<StepReader> {
    // Windows of a multiple of KEYS: only the last step is brief, with the keys after the tile's first token.
    static constexpr int BRIEF = !WINDOW ? 0 : TOKENS <= 17 ? 16 : TOKENS <= 33 ? 32 : 0;
    static constexpr bool HOLDS_Q = IN_TURNS;  // q is an operand in registers
    static constexpr float MOST = 4096.0f;     // of a thread's sum of p in a step: p stays below 2^12
    u32 q[DK / 16][4];

    using Attention::Attention;
    DEVICE void load_q(const unsigned char *memory) {
        UNROLL for (int k = 0; k < DK / 16; ++k) load_operand(q[k], memory, k);
    }
    DEVICE void begin_products(const Step &step) {
        if (IN_TURNS) wgmma_a_bt<DK>(s, q, steps.keys(step));
        else wgmma_a_bt<DK>(s, uniform(q_tile), steps.keys(step));  // uniform() again: offsets in uniform registers
        wgmma_commit();
    }
    DEVICE void begin_sums(const Step &step) {
        wgmma_add_a_b<DV>(acc, p, steps.keys(step) + K_BYTES / 16 + TRANSPOSED);
        wgmma_commit();
    }
    template <int PENDING> DEVICE void probabilities(const Step &step, int key) {
        wgmma_wait<PENDING>();
        if (PENDING) keep_maximum(step);
        else raise_maximum(s, step, key);
    }
    // Replace the logits s by p for the maximum as it is. If a sum of the warpgroup is too large, the step is repeated
    // with `raise_maximum`: most steps need no look at all logits.
    DEVICE void keep_maximum(const Step &step) {
        float sums[2];
        UNROLL for (int r = 0; r < 2; ++r) {
            const bool takes_part = step.rows & rows.bit[r];
            const float sum = softmax.powers(s, r, takes_part);
            sums[r] = takes_part ? sum : 0.0f;
        }
        rises = named_barrier_any<128>(2 + threadIdx.x / 128, fmaxf(sums[0], sums[1]) > MOST);
        if (!rises) UNROLL for (int r = 0; r < 2; ++r) softmax.l[r] += sums[r];
    }
    DEVICE bool fails() const { return rises; }
    DEVICE void update_operand() { as_operand(p, s); }
    // Replace the logits s by p, and raise the maximum if need be. No sums are in flight.
    template <class Tile> DEVICE void raise_maximum(Tile &s, const Step &step, int key) {
        if (key != NO_MASK) rows.mask(s, key, -infinity());
        exponentiate(s, [&](int r) { return step.rows & rows.bit[r]; });
        if (rises) scale_rows(acc, alpha);
    }
    template <int KEYS> DEVICE void brief_step(const Step &step, int key) {
        float few[KEYS / 2];
        u32 operand[KEYS / 16][4];
        wgmma_fence();
        wgmma_a_bt<DK>(few, q_tile, steps.keys(step));
        wgmma_commit();
        wgmma_wait<0>();
        raise_maximum(few, step, key);
        as_operand(operand, few);
        wgmma_fence();
        wgmma_add_a_b<DV>(acc, operand, steps.keys(step) + K_BYTES / 16 + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
    }
    DEVICE void finish_probabilities() {}
};

// IN_TURNS: a row's result is the merge of both consumers' partial sums. Each consumer finishes half of the columns.
__shared__ float2 statistics[IN_TURNS ? 2 : 1][64];  // m and l of each consumer's rows

// Merge both consumers' partial results and store o and lse. exchange: the half of acc that the other one finishes.
DEVICE void join_and_write(TileAttention &mine, const Arguments &x, const TokenTile &tile, float4 *exchange, int consumer) {
    constexpr int HALF = DV / 4, BARRIER = 1;  // elements per thread; number of the named barrier
    const int thread = threadIdx.x % 128, other = 1 - consumer;
    OnlineSoftmax &softmax = mine.softmax;
    auto sum_at = [&](int half, int i) { return half ? mine.acc[HALF + i] : mine.acc[i]; };  // not indexed
    UNROLL for (int r = 0; r < 2; ++r) {
        softmax.l[r] = quad_sum(softmax.l[r]);
        if (thread % 4 == 0) statistics[consumer][RowPair::row(r)] = make_float2(softmax.m[r], softmax.l[r]);
    }
    float4 *to = exchange + consumer * (HALF / 4 * 128) + thread;
    UNROLL for (int i = 0; i < HALF; i += 4)
        to[i / 4 * 128] = make_float4(sum_at(other, i), sum_at(other, i + 1), sum_at(other, i + 2), sum_at(other, i + 3));
    named_barrier<256>(BARRIER);

    float weight[2], others_weight[2], scale[2];
    UNROLL for (int r = 0; r < 2; ++r) {
        const float2 others = statistics[other][RowPair::row(r)];  // m, l
        const float m = fmaxf(softmax.m[r], others.x);
        weight[r] = exp2_fast((softmax.m[r] - m) * softmax.c);
        others_weight[r] = exp2_fast((others.x - m) * softmax.c);
        const RowTotals totals(softmax.c, m, weight[r] * softmax.l[r] + others_weight[r] * others.y);
        scale[r] = totals.scale;
        if (consumer == 0 && mine.rows.bit[r] && thread % 4 == 0) x.lse[RowPair::index(x.p, tile, 0, r)] = totals.lse * LN_2;
    }
    const float4 *from = exchange + other * (HALF / 4 * 128) + thread;
    float sums[HALF];
    UNROLL for (int i = 0; i < HALF; i += 4) {
        const float4 theirs = from[i / 4 * 128];
        sums[i] = sum_at(consumer, i) * weight[0] + theirs.x * others_weight[0];
        sums[i + 1] = sum_at(consumer, i + 1) * weight[0] + theirs.y * others_weight[0];
        sums[i + 2] = sum_at(consumer, i + 2) * weight[1] + theirs.z * others_weight[1];
        sums[i + 3] = sum_at(consumer, i + 3) * weight[1] + theirs.w * others_weight[1];
    }
    named_barrier<256>(BARRIER);  // both consumers have read `exchange`
    write_rows<DV>(sums, scale, x.o, x.p, tile, consumer, consumer * (DV / 2));
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) forward_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q per consumer, `exchange`, stages of K and V
    __shared__ Shared shared;
    unsigned char *exchange = memory + CONSUMERS * Q_BYTES, *stages = exchange + (IN_TURNS ? 64 * DV * 4 : 0);
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
        attend_tiles<TileAttention>(x, steps, memory + consumer * Q_BYTES, shared, consumer, [&](TileAttention &attention, const TokenTile &tile) {
            if (IN_TURNS) join_and_write(attention, x, tile, reinterpret_cast<float4 *>(exchange), consumer);
            else attention.write(x, tile, consumer);
        });
    };
    run_warpgroups(attend, [&](int producer) {
        if (producer == 0) produce_steps(x, stages, shared);
        else if (producer <= CONSUMERS) produce_queries(producer - 1);
    });
}
