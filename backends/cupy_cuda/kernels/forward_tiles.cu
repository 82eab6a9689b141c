// o and lse of tiles of adjacent tokens on Hopper (token_tiles.cuh: grid, tiles, TMA, masks).
//
//   s = q k^T,  p = 2^(c (s - m)),  o = sum_j p_j v_j / l,  lse = c m + log2 l         (softmax.cuh)
//
// Running maxima are lazy: they rise only if a logit passes one by more than 2^SLACK allows, so that most steps need no maximum over lanes
// and leave acc alone. p stays below 2^SLACK, and o = acc / l does not depend on m.
#include "token_tiles.cuh"

constexpr int Q_BYTES = DK / 64 * PANEL;  // of a consumer
constexpr float SLACK = 8.0f;

struct Arguments {
    TensorMap q, k, v;
    Problem p;
    TilePlan plan;
    u16 *o;      // [B,S,G,h,DV]
    float *lse;  // [B,S,G,h]
};

// What a consumer computes of a tile (consume_steps).
struct Attention {
#ifdef WINDOW  // of a multiple of KEYS: only the last step is brief, with fewer keys than the tile has tokens: those after its first token
    static constexpr int BRIEF = TOKENS <= 17 ? 16 : TOKENS <= 33 ? 32 : 0;
#else
    static constexpr int BRIEF = 0;
#endif
    StepReader &steps;
    const u32 q_tile;  // an operand
    const RowPair &rows;
    const float slack;
    OnlineSoftmax softmax;
    float acc[DV / 2], s[KEYS / 2], alpha[2] = {1.0f, 1.0f};
    u32 p[KEYS / 16][4];  // an operand
    bool rises = false;

    DEVICE Attention(StepReader &reader, u32 q, const RowPair &pair, float c, float slack)
        : steps(reader), q_tile(q), rows(pair), slack(slack), softmax(c) {
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) acc[i] = 0.0f;
    }
    DEVICE void begin_products(const Step &step) {
        wgmma_a_bt<DK>(s, q_tile, steps.keys(step));
        wgmma_commit();
    }
    DEVICE void begin_sums(const Step &step) {
        wgmma_add_a_b<DV>(acc, p, steps.keys(step) + K_BYTES / 16 + TRANSPOSED);
        wgmma_commit();
    }
    template <int PENDING>
    DEVICE void probabilities(const Step &step, int key) { exponentiate<PENDING>(s, step, key); }
    // p in place of the logits of a step's first keys, and alpha if a maximum rises.
    template <int PENDING, class Tile>
    DEVICE void exponentiate(Tile &s, const Step &step, int key) {
        wgmma_wait<PENDING>();
        if (key != NO_MASK) rows.mask(s, key, -infinity());
        float top[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) top[r] = step.rows & rows.bit[r] ? row_max(s, r) : LOWEST;
        rises = __any_sync(ALL_LANES, top[0] > softmax.m[0] + slack || top[1] > softmax.m[1] + slack);
        if (rises) {
#pragma unroll
            for (int r = 0; r < 2; ++r) alpha[r] = softmax.raise(r, quad_max(top[r]));
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) softmax.exponentiate(s, r, step.rows & rows.bit[r]);
    }
    template <int KEYS>
    DEVICE void brief_step(const Step &step, int key) {
        float few[KEYS / 2];
        u32 operand[KEYS / 16][4];
        wgmma_fence();
        wgmma_a_bt<DK>(few, q_tile, steps.keys(step));
        wgmma_commit();
        exponentiate<0>(few, step, key);
        if (rises) scale_rows(acc, alpha);
        as_operand(operand, few);
        wgmma_fence();
        wgmma_add_a_b<DV>(acc, operand, steps.keys(step) + K_BYTES / 16 + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
    }
    DEVICE void finish_probabilities() {
        compute_before_wait(softmax.l[0], &steps.pipeline.raw);
        compute_before_wait(softmax.l[1], &steps.pipeline.raw);
    }
    DEVICE void update_operand() {
        if (rises) scale_rows(acc, alpha);
        as_operand(p, s);
    }
};

DEVICE void attend(const Arguments &x, unsigned char *stages, unsigned char *q_memory, Shared &shared, int consumer) {
    const Problem &p = x.p;
    const u32 q_tile = uniform(operand(shared_address(q_memory)));
    const float c = p.scale_log2, slack = SLACK / c;
    StepReader steps(shared.steps, consumer, stages);
    TileScheduler scheduler(shared.tiles, x.plan);
    while (scheduler.next_tile()) {
        const TokenTile tile(scheduler.number, x.plan, p.G);
        const RowPair rows(p, tile, consumer);
        Attention attention(steps, q_tile, rows, c, slack);
        steps.begin_tile(scheduler.counts.y * STEPS);
        shared.q[consumer].wait_full(scheduler.at<1>());
        consume_steps(steps, scheduler.counts, shared.q[consumer], 0, attention);

        const OnlineSoftmax &softmax = attention.softmax;
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const RowTotals totals(softmax.c, softmax.m[r], quad_sum(softmax.l[r]));
            scale[r] = totals.scale;
            if (rows.bit[r] && threadIdx.x % 4 == 0) x.lse[RowPair::index(p, tile, consumer, r)] = totals.lse * LN_2;
        }
        write_rows<DV>(attention.acc, scale, x.o, p, tile, consumer);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) forward_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q of the consumers, the stages
    __shared__ Shared shared;
    unsigned char *stages = memory + CONSUMERS * Q_BYTES;
    const int warpgroup = threadIdx.x / 128, producer = threadIdx.x / 32 - 4 * CONSUMERS;
    if (threadIdx.x == 0) shared.init();
#ifdef FEW_TOKENS
    wait_for_stream();
    make_union<THREADS>(x.p, blockIdx.x / static_cast<u32>(x.p.G), blockIdx.x % static_cast<u32>(x.p.G), 0, x.p.S);
#endif
    __syncthreads();
    if (warpgroup < CONSUMERS) {
        reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PER_SM>(true);
        attend(x, stages, memory + warpgroup * Q_BYTES, shared, warpgroup);
        return;
    }
    reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, PER_SM>(false);
    if (producer == 0) produce_steps(x.k, x.v, x.p, x.plan, stages, shared);
    else if (producer <= CONSUMERS) {
        const int consumer = producer - 1;
        TileScheduler scheduler(shared.tiles, x.plan);
        while (scheduler.next_tile())
            produce_rows<DK>(shared.q[consumer], scheduler.at<1>(), memory + consumer * Q_BYTES,
                             TokenTile(scheduler.number, x.plan, x.p.G), consumer, x.q);
    }
}
