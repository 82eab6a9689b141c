// The products of dkdv_groups.cu by two consumer warpgroups, for keys whose sums one has no registers for. Each has two of the four:
//
//   ValueSums  p^T = 2^(c k q^T - lse),  dv = sum p^T do
//   KeySums    ds^T = p^T * (v do^T - delta),  dk = sum ds^T q
//
// p goes from one to the other in float32 through shared memory, where thread t of one writes what thread t of the other reads.
// Each keeps its operand of the first product, the tile's keys or values, in registers: wgmma then reads half as much shared memory for it,
// and the memory that the tile came to becomes the last stage of q and do. The first product of a step and the sum of the step before are
// in flight together.
// Beside sums of 256 columns there are registers for a part of it (TILE_STAYS), and two stages beside the tile. There, q and do are released
// apart, each as soon as both consumers are done with it: while one consumer computes p or ds, the other multiplies.
#pragma once
#include "row_steps.cuh"

// What both consumers know of a segment's steps; list: as of row_steps.cuh, and what dkdv_groups.cu adds to it.
template <class List>
struct SplitSteps {
    const List &list;
    unsigned char *stages;
    const u32 stage0;  // an operand
    Shared &shared;
    Pipeline<1> &exchange;
    const int2 whole;
    DEVICE SplitSteps(const List &list, unsigned char *stages, Shared &shared, Pipeline<1> &exchange)
        : list(list), stages(stages), stage0(uniform(operand(shared_address(stages)))), shared(shared), exchange(exchange),
          whole(list.whole_steps()) {}
    DEVICE u32 q_tile(int step) const { return uniform(stage0 + state_of(step).stage * (STAGE_BYTES / 16)); }
    DEVICE u32 do_tile(int step) const { return q_tile(step) + K_BYTES / 16; }
    DEVICE void wait(int step) const {
        const auto at = state_of(step);
        wait_for_rows(shared, at);
        list.zero_other_tokens(step, stages + at.stage * STAGE_BYTES);
    }
    DEVICE void release(int step) const { shared.steps.release(state_of(step).stage); }
    // APART: of do.
    DEVICE void wait_do(int step) const {
        mbarrier_wait(&shared.d_outs.full[step % STAGES], step / STAGES % 2);
        if (!BY_TMA) fence_async_proxy();
    }
    DEVICE void release_do(int step) const { shared.d_outs.release(step % STAGES); }
    DEVICE void mask(float (&x)[ROWS / 2], int step) const {
#if SMALL_BLOCK
        mask_keys(x, shared.seen[state_of(step).stage]);
#else
        const int in_list = list.step_at(step);
        if (in_list < whole.x || in_list >= whole.y) mask_keys(list.x.p, x, shared.limit[state_of(step).stage]);
#endif
    }
    // A thread's part of p^T of a step, 16 bytes at a time.
    DEVICE float4 *place() const { return reinterpret_cast<float4 *>(stages + STAGES * STAGE_BYTES) + threadIdx.x % 128; }
    DEVICE void send(const float (&p)[ROWS / 2], int step) const {
        exchange.wait_empty({0, step % 2});
        UNROLL for (int j = 0; j < ROWS / 8; ++j) place()[j * 128] = make_float4(p[4 * j], p[4 * j + 1], p[4 * j + 2], p[4 * j + 3]);
        __syncwarp();
        exchange.announce(0);
    }
};

// COLUMNS of the tile's keys or values as operand a: the first HELD in registers, the others in shared memory.
template <int COLUMNS>
struct TileOperand {
    static constexpr int HELD = TILE_STAYS ? 64 : COLUMNS;
    u32 held[HELD / 16][4], others;

    // If all are in registers, the last stage is released.
    template <class List>
    DEVICE TileOperand(const SplitSteps<List> &steps, unsigned char *tile) : others(uniform(operand(shared_address(tile)))) {
        mbarrier_wait(&steps.shared.tile, 0);
        UNROLL for (int k = 0; k < HELD / 16; ++k) load_operand(held[k], tile, k);
        if (TILE_STAYS) return;
        if (TQ * H < ROWS) {  // as zero_stages
            named_barrier<128>(1 + threadIdx.x / 128);
            for (int i = threadIdx.x % 128; i < COLUMNS * KEYS / 8; i += 128) reinterpret_cast<uint4 *>(tile)[i] = make_uint4(0, 0, 0, 0);
            fence_async_proxy();
        }
        __syncwarp();
        steps.shared.steps.release(STAGES - 1);
    }
    // d = a b^T
    DEVICE void multiply(float (&d)[ROWS / 2], u32 b) const {
        UNROLL for (int k = 0; k < COLUMNS / 16; ++k) {
            const u32 offset = (k / 4 * PANEL + k % 4 * 32) / 16;
            if (k < HELD / 16) wgmma_registers_bt(d, held[k], descriptor(b + offset), k > 0);
            else wgmma_shared(d, descriptor(others + offset), descriptor(b + offset), k > 0);
        }
    }
};

template <class List>
struct ValueSums {
    const SplitSteps<List> &steps;
    TileOperand<DK> keys;
    u32 p[ROWS / 16][4];  // an operand, too
    float dv[DV / 2], s[ROWS / 2];

    DEVICE ValueSums(const SplitSteps<List> &steps, unsigned char *tile) : steps(steps), keys(steps, tile) {
        UNROLL for (int i = 0; i < DV / 2; ++i) dv[i] = 0.0f;
    }
    DEVICE void wait(int step) const { steps.wait(step); }  // for what the product takes
    DEVICE void begin_product(int step) { keys.multiply(s, steps.q_tile(step)); }
    DEVICE void finish_product(int step) {
        exponentiate(s, steps.shared.lse[state_of(step).stage], steps.list.x.p.scale_log2);
        steps.mask(s, step);
        steps.send(s, step);
        if (APART) steps.release(step);
    }
    DEVICE void update_operand() { as_operand(p, s); }
    DEVICE void begin_sum(int step) {
        if (APART) steps.wait_do(step);
        wgmma_add_a_b<DV>(dv, p, steps.do_tile(step) + TRANSPOSED);
    }
    DEVICE void release_sum(int step) const { APART ? steps.release_do(step) : steps.release(step); }
    DEVICE void write(const GradientRows &rows, const KeyGradients &to) { rows.write<DV>(dv, 1.0f, 0, to.part_dv, to.dv); }
};

template <class List>
struct KeySums {
    const SplitSteps<List> &steps;
    TileOperand<DV> values;
    u32 ds[ROWS / 16][4];  // an operand, too
    float dk[DK / 2], dp[ROWS / 2];

    DEVICE KeySums(const SplitSteps<List> &steps, unsigned char *tile) : steps(steps), values(steps, tile + K_BYTES) {
        UNROLL for (int i = 0; i < DK / 2; ++i) dk[i] = 0.0f;
    }
    DEVICE void wait(int step) const { APART ? steps.wait_do(step) : steps.wait(step); }
    DEVICE void begin_product(int step) { values.multiply(dp, steps.do_tile(step)); }
    DEVICE void finish_product(int step) {
        if (APART) {
            steps.release_do(step);
            steps.wait(step);  // the statistics, and q
        }
        steps.mask(dp, step);
        steps.exchange.wait_full({0, step % 2});
        UNROLL for (int j = 0; j < ROWS / 8; ++j) {
            const float2 delta = *reinterpret_cast<const float2 *>(steps.shared.delta[state_of(step).stage] + 8 * j + threadIdx.x % 4 * 2);
            const float4 p = steps.place()[j * 128];
            dp[4 * j] = p.x * (dp[4 * j] - delta.x);
            dp[4 * j + 1] = p.y * (dp[4 * j + 1] - delta.y);
            dp[4 * j + 2] = p.z * (dp[4 * j + 2] - delta.x);
            dp[4 * j + 3] = p.w * (dp[4 * j + 3] - delta.y);
        }
        __syncwarp();
        steps.exchange.release(0);
    }
    DEVICE void update_operand() { as_operand(ds, dp); }
    DEVICE void begin_sum(int step) { wgmma_add_a_b<DK>(dk, ds, steps.q_tile(step) + TRANSPOSED); }
    DEVICE void release_sum(int step) const { steps.release(step); }
    DEVICE void write(const GradientRows &rows, const KeyGradients &to) {
        rows.write<DK>(dk, static_cast<float>(steps.list.x.p.scale), 0, to.part_dk, to.dk);
    }
};

// One of both consumers.
template <class Sums, class List>
DEVICE void add_products(const List &list, unsigned char *tile, unsigned char *stages, Shared &shared, Pipeline<1> &exchange) {
    const SplitSteps<List> steps(list, stages, shared, exchange);
    Sums sums(steps, tile);
    if (list.steps > 0) {
        sums.wait(0);
        wgmma_fence();
        sums.begin_product(0);
        wgmma_commit();
        wgmma_wait<0>();
        sums.finish_product(0);
        sums.update_operand();
        for (int step = 1; step < list.steps; ++step) {
            if constexpr (TILE_STAYS) {
                wgmma_fence();
                sums.begin_sum(step - 1);
                wgmma_commit();
                sums.wait(step);
                sums.begin_product(step);
                wgmma_commit();
                wgmma_wait<1>();
                sums.release_sum(step - 1);
                wgmma_wait<0>();
                sums.finish_product(step);
            } else {
                sums.wait(step);
                wgmma_fence();
                sums.begin_product(step);
                wgmma_commit();
                sums.begin_sum(step - 1);
                wgmma_commit();
                wgmma_wait<1>();
                sums.finish_product(step);
                wgmma_wait<0>();
                sums.release_sum(step - 1);
            }
            sums.update_operand();
        }
        wgmma_fence();
        sums.begin_sum(list.steps - 1);
        wgmma_commit();
        wgmma_wait<0>();
    }
    sums.write(gradient_rows(list), list.x.to);
}
