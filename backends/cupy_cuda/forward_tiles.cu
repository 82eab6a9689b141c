// o and lse of tiles of adjacent tokens on Hopper (tiles.cuh).
//
// s = q k^T of one step and acc += p v of the step before are under way together, while the softmax of s is computed beside the latter.
// Running maxima are kept loosely: they follow once a logit passes one by more than 2^SLACK allows, so that most steps need no maximum over
// lanes and leave acc alone. p stays below 2^SLACK, and o = acc / l does not depend on m.
#include "tiles.cuh"

constexpr int ROW_BYTES = (DK > DV ? DK : DV) / 64 * PANEL;  // of a group: its q, and o in the same place
constexpr float SLACK = 8.0f;

struct Arguments {
    TensorMap q, o, k, v;
    Problem p;
    Plan plan;
    float *lse;  // [B,S,G,h]
};

struct Shared {
    Steps steps;
    u64 q_full[GROUPS], q_empty[GROUPS];
};

DEVICE void attend(const Arguments &x, unsigned char *stages, unsigned char *memory, Shared &shared, int group) {
    const Problem &p = x.p;
    const Plan &plan = x.plan;
    const int lane = threadIdx.x % 32;
    const float c = p.scale_log2, slack = SLACK / c;
    const u32 q_tile = uniform(shared_address(memory)), stage0 = uniform(shared_address(stages));
    int q_parity = 0;
    Way way(shared.steps, group);
    int2 coming = make_int2(0, 0);  // the next tile's counts
    if (blockIdx.x < plan.all) coming = plan.counts[Tile(blockIdx.x, plan.tiles, p.G).number];
    for (u32 turn = blockIdx.x; turn < plan.all; turn += gridDim.x, q_parity ^= 1) {
        Tile tile(turn, plan.tiles, p.G);
        Rows rows(p, tile, group);
        const int2 count = coming;
        const int cut = (count.y - count.x) * STEPS;
        way.begin_tile(count.y * STEPS);
        if (turn + gridDim.x < plan.all) coming = plan.counts[Tile(turn + gridDim.x, plan.tiles, p.G).number];
        float acc[DV / 2], s[KEYS / 2], m[2] = {LOWEST, LOWEST}, l[2] = {0.0f, 0.0f}, alpha[2] = {1.0f, 1.0f};
        u32 weights[KEYS / 16][4];  // p as operand
        bool rises = false;
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) acc[i] = 0.0f;

        auto begin_logits = [&] {
            begin_products<DK>(s, q_tile, uniform(stage0 + way.ring.stage * STAGE_BYTES));
            wgmma_end();
        };
        auto begin_values = [&] {
            begin_sum<DV>(acc, weights, uniform(stage0 + way.held_stage * STAGE_BYTES + K_BYTES));
            wgmma_end();
        };
        auto mask = [&] {
            const int key = plan.blocks[plan.place(tile.number, count, way.step / STEPS)] * BLOCK + way.step % STEPS * KEYS;
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i)
                if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows.limit[i / 2 % 2]) s[i] = -infinity();
        };
        auto softmax = [&] {
            float top[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float tops[4];  // several at once: one after the other would wait for each
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float logit = s[i / 2 * 4 + 2 * r + i % 2];
                    tops[i % 4] = i < 4 ? logit : fmaxf(tops[i % 4], logit);
                }
                top[r] = way.part & rows.bit[r] ? fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])) : LOWEST;
            }
            rises = __any_sync(ALL, top[0] > m[0] + slack || top[1] > m[1] + slack);
            if (rises) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    top[r] = fmaxf(top[r], __shfl_xor_sync(ALL, top[r], 1));
                    top[r] = fmaxf(fmaxf(top[r], __shfl_xor_sync(ALL, top[r], 2)), m[r]);
                    alpha[r] = exp2_fast((m[r] - top[r]) * c);
                    l[r] *= alpha[r];
                    m[r] = top[r];
                }
            }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float shift = way.part & rows.bit[r] ? m[r] * c : infinity();
                float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float &logit = s[i / 2 * 4 + 2 * r + i % 2];
                    logit = exp2_fast(logit * c - shift);
                    sums[i % 4] += logit;
                }
                l[r] += (sums[0] + sums[1]) + (sums[2] + sums[3]);
            }
        };
        // The step's p takes the place of the one before; acc follows the maxima.
        auto take_over = [&] {
            if (rises) {
#pragma unroll
                for (int i = 0; i < DV / 2; ++i) acc[i] *= alpha[i / 2 % 2];
            }
            round_step(weights, s);
            way.hold();
        };

        wait(&shared.q_full[group], q_parity);
        Found found = way.advance(false);
        while (found == TAKES_PART) {
            wgmma_begin();
            begin_logits();
            wgmma_wait<0>();
            if (way.step < cut) mask();
            softmax();
            take_over();
            while ((found = way.advance(true)) == TAKES_PART && way.step >= cut) {
                wgmma_begin();
                begin_logits();
                begin_values();
                wgmma_wait<1>();
                softmax();
                before_waiting(l[0], &shared.steps.raw);
                before_waiting(l[1], &shared.steps.raw);
                wgmma_wait<0>();
                way.give_back();
                take_over();
            }
            wgmma_begin();
            begin_values();
            wgmma_wait<0>();
            way.give_back();
            if (found == GIVE_BACK) found = way.advance(false);
        }
        way.end_tile();

        barrier<128>(group + 1);  // all have done with q: o takes its place
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] += __shfl_xor_sync(ALL, l[r], 1);
            l[r] += __shfl_xor_sync(ALL, l[r], 2);
            bool seen = !(l[r] == 0.0f);  // a row that saw no key gives 0 and -inf; NaN among its keys shows
            scale[r] = seen ? 1.0f / l[r] : 0.0f;
            if (rows.bit[r] && lane % 4 == 0) x.lse[rows.place(p, tile, group, r)] = seen ? (m[r] * c + log2f(l[r])) * LN_2 : -infinity();
        }
        store_rows<DV>(acc, scale, memory, x.o, tile, group);
        if (threadIdx.x % 128 == 0) {
            wait_for_stores();
            arrive(&shared.q_empty[group]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) forward_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q of the groups, the stages
    __shared__ Shared shared;
    unsigned char *stages = memory + GROUPS * ROW_BYTES;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 - 4 * GROUPS;
    if (threadIdx.x == 0) {
        shared.steps.init();
        for (int i = 0; i < GROUPS; ++i) {
            barrier_init(&shared.q_full[i], 1);
            barrier_init(&shared.q_empty[i], 1);
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (group == GROUPS) {
        share_registers<GROUPS, COMPUTING, COPYING>(false);
        if (warp == 0) copy_steps<false>(x.k, x.v, x.p, x.plan, stages, shared.steps);
        else if (warp <= GROUPS)
            copy_rows<DK, 0>(x.q, x.q, x.p, x.plan, memory + (warp - 1) * ROW_BYTES, &shared.q_full[warp - 1], &shared.q_empty[warp - 1], warp - 1);
    } else {
        share_registers<GROUPS, COMPUTING, COPYING>(true);
        attend(x, stages, memory + group * ROW_BYTES, shared, group);
    }
}
