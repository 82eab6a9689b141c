// dq of tiles of adjacent tokens on Hopper (tiles.cuh), and delta = sum(do * o) - dlse for dk and dv.
//
// s = q k^T and do v^T of one step and dq += ds k of the step before are under way together, while ds of the former is computed.
#include "token_tiles.cuh"

constexpr int Q_BYTES = DK / 64 * PANEL, DO_BYTES = DV / 64 * PANEL, ROW_BYTES = Q_BYTES + DO_BYTES;  // of a group

struct Arguments {
    TensorMap q, d_o, k, v;
    Problem p;
    Plan plan;
    u16 *dq;                    // [B,S,G,h,DK]
    const u16 *o, *d_out;       // [B,S,G,h,DV] contiguous; of any strides
    const float *lse, *dlse;    // [B,S,G,h]; dlse may be null
    float *delta;               // [B,S,G,h]
    i64 stride_dob, stride_dos, stride_dog, stride_doh;
};

struct Shared {
    Steps steps;
    Turns turns;
    u64 full[GROUPS], empty[GROUPS];
};

// delta of the group's rows, by two threads a row, to memory and to both of a row's threads here.
DEVICE void row_sums(const Arguments &x, const Tile &tile, int group, float *sums) {
    const int row = threadIdx.x % 128 / 2, half = threadIdx.x % 2, token = row / H;
    const i64 s = static_cast<i64>(tile.i) * TOKENS + group * TQ + token;
    float sum = 0.0f;
    i64 out = ((tile.b * x.p.S + s) * x.p.G + tile.g) * H + row % H;
    const bool exists = token < TQ && s < x.p.S;
    if (exists) {
        const u16 *o = x.o + out * DV + half * (DV / 2);
        const u16 *d_out = x.d_out + tile.b * x.stride_dob + s * x.stride_dos + tile.g * x.stride_dog + row % H * x.stride_doh + half * (DV / 2);
#pragma unroll 4
        for (int i = 0; i < DV / 2; i += 8) {
            uint4 a = *reinterpret_cast<const uint4 *>(o + i), b = *reinterpret_cast<const uint4 *>(d_out + i);
            const u16 *as = reinterpret_cast<const u16 *>(&a), *bs = reinterpret_cast<const u16 *>(&b);
#pragma unroll
            for (int j = 0; j < 8; ++j) sum += to_float(as[j]) * to_float(bs[j]);
        }
    }
    sum += __shfl_xor_sync(ALL, sum, 1);
    if (exists && x.dlse) sum -= x.dlse[out];
    if (half == 0) {
        sums[row] = sum;
        if (exists) x.delta[out] = sum;
    }
}

DEVICE void differentiate(const Arguments &x, unsigned char *stages, unsigned char *memory, float *sums, Shared &shared, int group) {
    const Problem &p = x.p;
    const Plan &plan = x.plan;
    const int lane = threadIdx.x % 32, row0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float c = p.scale_log2;
    const u32 q_tile = uniform(operand(shared_address(memory))), do_tile = q_tile + Q_BYTES / 16;
    Way way(shared.steps, group, stages);
    Turn turn(shared.turns);
    while (turn.take(plan)) {
        Tile tile(turn.turn, plan, p.G);
        Rows rows(p, tile, group);
        const int cut = (turn.counts.y - turn.counts.x) * STEPS;
        way.begin_tile(turn.counts.y * STEPS);
        row_sums(x, tile, group, sums);
        barrier<128>(group + 1);
        float delta[2], lse2[2];  // a row that saw nothing has p = 0, too
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            delta[r] = sums[row0 + 8 * r];
            float lse = rows.bit[r] ? x.lse[rows.place(p, tile, group, r)] : -infinity();
            lse2[r] = lse == -infinity() ? infinity() : lse * LOG2_E;
        }
        float acc[DK / 2], s[KEYS / 2], dp[KEYS / 2];
        u32 weights[KEYS / 16][4];  // ds as operand
#pragma unroll
        for (int i = 0; i < DK / 2; ++i) acc[i] = 0.0f;

        auto begin_logits = [&](const Step &step) {
            const u32 keys = way.keys(step);
            begin_products<DK>(s, q_tile, keys);
            begin_products<DV>(dp, do_tile, keys + K_BYTES / 16);
            wgmma_end();
        };
        auto begin_keys = [&](const Step &step) {
            begin_sum<DK>(acc, weights, way.keys(step) + ACROSS);
            wgmma_end();
        };
        auto gradient = [&](u32 part) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float shift = part & rows.bit[r] ? lse2[r] : infinity();
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    const int at = i / 2 * 4 + 2 * r + i % 2;
                    s[at] = exp2_fast(s[at] * c - shift) * (dp[at] - delta[r]);
                }
            }
        };
        auto mask = [&](int step) {
            const int key = plan.blocks[tile.number * plan.capacity + (way.total - cut + step) / STEPS] * BLOCK + step % STEPS * KEYS;
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i)
                if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows.limit[i / 2 % 2]) s[i] = 0.0f;
        };

        Step coming;
        // The next step; after the last one q and do are not read any more, and the next tile's may come.
        auto find = [&](int end) {
            Found found = way.find(coming, end);
            if (found == END && lane == 0) arrive(&shared.empty[group]);
            return found;
        };

        wait(&shared.full[group], turn.odd());
        Found found = find(NO_END);
        while (found == TAKES_PART) {
            Step held = coming;  // its keys are still to be added
            wgmma_begin();
            begin_logits(held);
            wgmma_wait<0>();
            gradient(held.part);
            if (held.number < cut) mask(held.number);
            round_step(weights, s);
            while ((found = find(held.number + STAGES)) == TAKES_PART && coming.number >= cut) {
                wgmma_begin();
                begin_logits(coming);
                begin_keys(held);
                wgmma_wait<1>();
                gradient(coming.part);
                wgmma_wait<0>();
                way.give_back(held);
                round_step(weights, s);
                held = coming;
            }
            wgmma_begin();
            begin_keys(held);
            wgmma_wait<0>();
            way.give_back(held);
            if (found == GIVE_BACK) found = find(NO_END);
        }

        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) scale[r] = lse2[r] == infinity() ? 0.0f : static_cast<float>(p.scale);
        write_rows<DK>(acc, scale, x.dq, p, tile, group);
        barrier<128>(group + 1);  // all have read their sums
    }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) dq_tiles(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // q and do of the groups, the stages
    __shared__ Shared shared;
    __shared__ float sums[GROUPS][64];
    unsigned char *stages = memory + GROUPS * ROW_BYTES;
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32 - 4 * GROUPS;
    if (threadIdx.x == 0) {
        shared.steps.init();
        shared.turns.init();
        for (int i = 0; i < GROUPS; ++i) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], 4);  // a lane of every warp
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (group == GROUPS) {
        share_registers<GROUPS, COMPUTING, COPYING>(false);
        if (warp == 0) copy_steps(x.k, x.v, x.p, x.plan, stages, shared.steps, shared.turns);
        else if (warp <= GROUPS)
            copy_rows<DK, DV>(x.q, x.d_o, x.p, x.plan, memory + (warp - 1) * ROW_BYTES, &shared.full[warp - 1], &shared.empty[warp - 1], warp - 1,
                              shared.turns);
    } else {
        share_registers<GROUPS, COMPUTING, COPYING>(true);
        differentiate(x, stages, memory + group * ROW_BYTES, sums[group], shared, group);
    }
}
