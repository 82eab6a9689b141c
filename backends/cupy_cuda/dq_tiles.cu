// dq of tiles of adjacent tokens on Hopper (tiles.cuh), and delta = sum(do * o) - dlse for dk and dv.
//
// s = q k^T and do v^T of one step and dq += ds k of the step before are under way together, while ds of the former is computed.
#include "tiles.cuh"

constexpr int Q_BYTES = DK / 64 * PANEL, DO_BYTES = DV / 64 * PANEL, ROW_BYTES = Q_BYTES + DO_BYTES;  // of a group

struct Arguments {
    TensorMap q, d_o, dq, k, v;
    Problem p;
    Plan plan;
    const u16 *o, *d_out;       // [B,S,G,h,DV] contiguous; of any strides
    const float *lse, *dlse;    // [B,S,G,h]; dlse may be null
    float *delta;               // [B,S,G,h]
    i64 stride_dob, stride_dos, stride_dog, stride_doh;
};

struct Shared {
    Steps steps;
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
    const u32 q_tile = uniform(shared_address(memory)), do_tile = uniform(shared_address(memory + Q_BYTES)), stage0 = uniform(shared_address(stages));
    int parity = 0;
    Way way(shared.steps, group);
    int2 coming = make_int2(0, 0);  // the next tile's counts
    if (blockIdx.x < plan.all) coming = plan.counts[Tile(blockIdx.x, plan.tiles, p.G).number];
    for (u32 turn = blockIdx.x; turn < plan.all; turn += gridDim.x, parity ^= 1) {
        Tile tile(turn, plan.tiles, p.G);
        Rows rows(p, tile, group);
        const int2 count = coming;
        const int cut = (count.y - count.x) * STEPS;
        way.begin_tile(count.y * STEPS);
        if (turn + gridDim.x < plan.all) coming = plan.counts[Tile(turn + gridDim.x, plan.tiles, p.G).number];
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

        auto begin_logits = [&] {
            const u32 stage = uniform(stage0 + way.ring.stage * STAGE_BYTES);
            begin_products<DK>(s, q_tile, stage);
            begin_products<DV>(dp, do_tile, stage + K_BYTES);
            wgmma_end();
        };
        auto begin_keys = [&] {
            begin_sum<DK>(acc, weights, uniform(stage0 + way.held_stage * STAGE_BYTES));
            wgmma_end();
        };
        auto gradient = [&] {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float shift = way.part & rows.bit[r] ? lse2[r] : infinity();
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    const int at = i / 2 * 4 + 2 * r + i % 2;
                    s[at] = exp2_fast(s[at] * c - shift) * (dp[at] - delta[r]);
                }
            }
        };
        auto mask = [&] {
            const int key = plan.blocks[plan.place(tile.number, count, way.step / STEPS)] * BLOCK + way.step % STEPS * KEYS;
#pragma unroll
            for (int i = 0; i < KEYS / 2; ++i)
                if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 >= rows.limit[i / 2 % 2]) s[i] = 0.0f;
        };

        wait(&shared.full[group], parity);
        Found found = way.advance(false);
        while (found == TAKES_PART) {
            wgmma_begin();
            begin_logits();
            wgmma_wait<0>();
            gradient();
            if (way.step < cut) mask();
            round_step(weights, s);
            way.hold();
            while ((found = way.advance(true)) == TAKES_PART && way.step >= cut) {
                wgmma_begin();
                begin_logits();
                begin_keys();
                wgmma_wait<1>();
                gradient();
                wgmma_wait<0>();
                way.give_back();
                round_step(weights, s);
                way.hold();
            }
            wgmma_begin();
            begin_keys();
            wgmma_wait<0>();
            way.give_back();
            if (found == GIVE_BACK) found = way.advance(false);
        }
        way.end_tile();

        barrier<128>(group + 1);  // all have done with q: dq takes its place
        const float scale[2] = {static_cast<float>(p.scale), static_cast<float>(p.scale)};
        store_rows<DK>(acc, scale, memory, x.dq, tile, group);
        if (threadIdx.x % 128 == 0) {
            wait_for_stores();
            arrive(&shared.empty[group]);
        }
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
        for (int i = 0; i < GROUPS; ++i) {
            barrier_init(&shared.full[i], 1);
            barrier_init(&shared.empty[i], 1);
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (group == GROUPS) {
        share_registers<GROUPS, COMPUTING, COPYING>(false);
        if (warp == 0) copy_steps<true>(x.k, x.v, x.p, x.plan, stages, shared.steps);
        else if (warp <= GROUPS)
            copy_rows<DK, DV>(x.q, x.d_o, x.p, x.plan, memory + (warp - 1) * ROW_BYTES, &shared.full[warp - 1], &shared.empty[warp - 1], warp - 1);
    } else {
        share_registers<GROUPS, COMPUTING, COPYING>(true);
        differentiate(x, stages, memory + group * ROW_BYTES, sums[group], shared, group);
    }
}
