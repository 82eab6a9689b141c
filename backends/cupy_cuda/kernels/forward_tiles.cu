// o and lse of tiles of adjacent tokens on Hopper (tiles.cuh).
//
// s = q k^T of one step and acc += p v of the step before are under way together, while the softmax of s is computed beside the latter.
// Running maxima are kept loosely: they follow once a logit passes one by more than 2^SLACK allows, so that most steps need no maximum over
// lanes and leave acc alone. p stays below 2^SLACK, and o = acc / l does not depend on m.
#include "token_tiles.cuh"

constexpr int Q_BYTES = DK / 64 * PANEL;  // of a group
constexpr float SLACK = 8.0f;

struct Arguments {
    TensorMap q, k, v;
    Problem p;
    Plan plan;
    u16 *o;      // [B,S,G,h,DV]
    float *lse;  // [B,S,G,h]
};

struct Shared {
    Steps steps;
    Turns turns;
    u64 q_full[GROUPS], q_empty[GROUPS];
};

DEVICE void attend(const Arguments &x, unsigned char *stages, unsigned char *memory, Shared &shared, int group) {
    const Problem &p = x.p;
    const Plan &plan = x.plan;
    const int lane = threadIdx.x % 32;
    const float c = p.scale_log2, slack = SLACK / c;
    const u32 q_tile = uniform(operand(shared_address(memory)));
    Way way(shared.steps, group, stages);
    Turn turn(shared.turns);
    while (turn.take(plan)) {
        Tile tile(turn.turn, plan, p.G);
        Rows rows(p, tile, group);
        const int cut = (turn.counts.y - turn.counts.x) * STEPS;
        way.begin_tile(turn.counts.y * STEPS);
        float acc[DV / 2], s[KEYS / 2], m[2] = {LOWEST, LOWEST}, l[2] = {0.0f, 0.0f}, alpha[2] = {1.0f, 1.0f};
        u32 weights[KEYS / 16][4];  // p as operand
        bool rises = false;
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) acc[i] = 0.0f;

        auto begin_logits = [&](const Step &step) {
            begin_products<DK>(s, q_tile, way.keys(step));
            wgmma_end();
        };
        auto begin_values = [&](const Step &step) {
            begin_sum<DV>(acc, weights, way.keys(step) + VALUES);
            wgmma_end();
        };
        auto mask = [&](int step) {
            const int key = plan.blocks[tile.number * plan.capacity + (way.total - cut + step) / STEPS] * BLOCK + step % STEPS * KEYS;
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i)
                if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows.limit[i / 2 % 2]) s[i] = -infinity();
        };
        auto softmax = [&](u32 part) {
            float top[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float tops[4];  // several at once: one after the other would wait for each
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float logit = s[i / 2 * 4 + 2 * r + i % 2];
                    tops[i % 4] = i < 4 ? logit : fmaxf(tops[i % 4], logit);
                }
                top[r] = part & rows.bit[r] ? fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3])) : LOWEST;
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
                const float shift = part & rows.bit[r] ? m[r] * c : infinity();
                float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float &logit = s[i / 2 * 4 + 2 * r + i % 2];
                    logit = exp2_fast(logit * c - shift);
                    sums[i % 4] += logit;
                }
                if (part & rows.bit[r]) l[r] += (sums[0] + sums[1]) + (sums[2] + sums[3]);  // else zeros, or NaN where q is not finite
            }
        };
        // The step's p takes the place of the one before; acc follows the maxima.
        auto take_over = [&] {
            if (rises) {
#pragma unroll
                for (int i = 0; i < DV / 2; ++i) acc[i] *= alpha[i / 2 % 2];
            }
            round_step(weights, s);
        };

        Step coming;
        // The next step; after the last one q is not read any more, and the next tile's may come.
        auto find = [&](int end) {
            Found found = way.find(coming, end);
            if (found == END && lane == 0) arrive(&shared.q_empty[group]);
            return found;
        };

        wait(&shared.q_full[group], turn.odd());
        Found found = find(NO_END);
        while (found == TAKES_PART) {
            Step held = coming;  // its values are still to be added
            wgmma_begin();
            begin_logits(held);
            wgmma_wait<0>();
            if (held.number < cut) mask(held.number);
            softmax(held.part);
            take_over();
            while ((found = find(held.number + STAGES)) == TAKES_PART && coming.number >= cut) {
                wgmma_begin();
                begin_logits(coming);
                begin_values(held);
                wgmma_wait<1>();
                softmax(coming.part);
                before_waiting(l[0], &shared.steps.raw);
                before_waiting(l[1], &shared.steps.raw);
                wgmma_wait<0>();
                way.give_back(held);
                take_over();
                held = coming;
            }
            wgmma_begin();
            begin_values(held);
            wgmma_wait<0>();
            way.give_back(held);
            if (found == GIVE_BACK) found = find(NO_END);
        }

        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] += __shfl_xor_sync(ALL, l[r], 1);
            l[r] += __shfl_xor_sync(ALL, l[r], 2);
            bool seen = !(l[r] == 0.0f);  // a row that saw no key gives 0 and -inf; NaN among its keys shows
            scale[r] = seen ? 1.0f / l[r] : 0.0f;
            if (rows.bit[r] && lane % 4 == 0) x.lse[rows.place(p, tile, group, r)] = seen ? (m[r] * c + log2f(l[r])) * LN_2 : -infinity();
        }
        write_rows<DV>(acc, scale, x.o, p, tile, group);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) forward_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q of the groups, the stages
    __shared__ Shared shared;
    unsigned char *stages = memory + GROUPS * Q_BYTES;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 - 4 * GROUPS;
    if (threadIdx.x == 0) {
        shared.steps.init();
        shared.turns.init();
        for (int i = 0; i < GROUPS; ++i) {
            barrier_init(&shared.q_full[i], 1);
            barrier_init(&shared.q_empty[i], 4);  // a lane of every warp
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (group == GROUPS) {
        share_registers<GROUPS, COMPUTING, COPYING>(false);
        if (warp == 0) copy_steps(x.k, x.v, x.p, x.plan, stages, shared.steps, shared.turns);
        else if (warp <= GROUPS)
            copy_rows<DK, 0>(x.q, x.q, x.p, x.plan, memory + (warp - 1) * Q_BYTES, &shared.q_full[warp - 1], &shared.q_empty[warp - 1], warp - 1,
                               shared.turns);
    } else {
        share_registers<GROUPS, COMPUTING, COPYING>(true);
        attend(x, stages, memory + group * Q_BYTES, shared, group);
    }
}
