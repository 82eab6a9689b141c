// Two consumers of dkdv_groups.cu, for the sums of wide keys: one computes p and dv, the other ds and dk. Each keeps the tile's keys or values
// in registers, as operand a of every step's first product: wgmma then reads half as much shared memory, and the tile's memory becomes
// the last stage. p goes from one to the other in float32 through shared memory.
#pragma once

constexpr int HANDOVER_BYTES = 4 * KEYS * ROWS;

// The tile's keys (0) or values (1), COLUMNS of them.
template <int COLUMNS>
struct TileOperand {
    u32 a[COLUMNS / 16][4];
    DEVICE void load(unsigned char *memory, Shared &shared) {
        mbarrier_wait(&shared.tile, 0);
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; ++k) load_operand(a[k], memory, k);
        if (TQ * H < ROWS) {  // rows that no token fills: see zero_stages
            named_barrier<128>(1 + threadIdx.x / 128);
            for (int i = threadIdx.x % 128; i < COLUMNS * KEYS / 8; i += 128) reinterpret_cast<uint4 *>(memory)[i] = make_uint4(0, 0, 0, 0);
            fence_async_proxy();
        }
        __syncwarp();
        shared.steps.release(STAGES - 1);
    }
};

DEVICE PipelineState<1> handover_state(int step) { return {0, step % 2}; }

struct SplitSteps {
    const ListSteps &list;
    unsigned char *stages;
    const u32 stage0;
    Shared &shared;
    const int2 whole;
    DEVICE SplitSteps(const ListSteps &list, unsigned char *stages, Shared &shared)
        : list(list), stages(stages), stage0(uniform(operand(shared_address(stages)))), shared(shared), whole(list.whole_steps()) {}
    DEVICE u32 q_tile(int step) const { return uniform(stage0 + state_of(step).stage * (STAGE_BYTES / 16)); }
    DEVICE u32 do_tile(int step) const { return q_tile(step) + K_BYTES / 16; }
    DEVICE bool masked(int step) const {
        const int in_list = list.step_at(step);
        return in_list < whole.x || in_list >= whole.y;
    }
    DEVICE void wait(int step) {
        const auto at = state_of(step);
        wait_for_rows(shared, at);
#ifdef WINDOW
        if (list.step_at(step) + 1 == list.steps && list.end % TQ)
            zero_tokens(stages + at.stage * STAGE_BYTES, static_cast<int>(list.end % TQ));
#endif
    }
    // Where p^T of thread t of one consumer is for thread t of the other.
    DEVICE float4 *handover_place() const { return reinterpret_cast<float4 *>(stages + STAGES * STAGE_BYTES) + threadIdx.x % 128; }
    DEVICE void release(int step) { shared.steps.release(state_of(step).stage); }
};

// p and dv.
struct ValueSums {
    const Arguments &x;
    SplitSteps &steps;
    Pipeline<1> &handover;
    TileOperand<DK> keys;
    float dv[DV / 2], s[ROWS / 2];
    u32 p[ROWS / 16][4];

    DEVICE ValueSums(const Arguments &x, SplitSteps &steps, unsigned char *tile, Pipeline<1> &handover)
        : x(x), steps(steps), handover(handover) {
        keys.load(tile, steps.shared);
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) dv[i] = 0.0f;
    }
    DEVICE void begin_product(int step) { wgmma_a_bt<DK>(s, keys.a, steps.q_tile(step)); }
    DEVICE void finish_product(int step) {
        const int stage = state_of(step).stage;
        const auto to = handover_state(step);
        exponentiate(s, steps.shared.lse[stage], x.p.scale_log2);
        if (steps.masked(step)) mask_keys(x.p, s, steps.shared.limit[stage]);
        handover.wait_empty(to);
        float4 *place = steps.handover_place();
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) place[j * 128] = make_float4(s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]);
        __syncwarp();
        handover.announce(to.stage);
    }
    DEVICE void update_operand() { as_operand(p, s); }
    DEVICE void begin_sums(int step) { wgmma_add_a_b<DV>(dv, p, steps.do_tile(step) + TRANSPOSED); }
    DEVICE void write(const GradientRows &rows) { rows.write<DV>(dv, 1.0f, 0, x.to.part_dv, x.to.dv); }
};

// ds and dk.
struct KeySums {
    const Arguments &x;
    SplitSteps &steps;
    Pipeline<1> &handover;
    TileOperand<DV> values;
    float dk[DK / 2], dp[ROWS / 2];
    u32 ds[ROWS / 16][4];

    DEVICE KeySums(const Arguments &x, SplitSteps &steps, unsigned char *tile, Pipeline<1> &handover)
        : x(x), steps(steps), handover(handover) {
        values.load(tile + K_BYTES, steps.shared);
#pragma unroll
        for (int i = 0; i < DK / 2; ++i) dk[i] = 0.0f;
    }
    DEVICE void begin_product(int step) { wgmma_a_bt<DV>(dp, values.a, steps.do_tile(step)); }
    DEVICE void finish_product(int step) {
        const int stage = state_of(step).stage;
        const auto from = handover_state(step);
        if (steps.masked(step)) mask_keys(x.p, dp, steps.shared.limit[stage]);
        handover.wait_full(from);
        const float4 *place = steps.handover_place();
#pragma unroll
        for (int j = 0; j < ROWS / 8; ++j) {
            const float2 delta = *reinterpret_cast<const float2 *>(steps.shared.delta[stage] + 8 * j + threadIdx.x % 4 * 2);
            const float4 p = place[j * 128];
            dp[4 * j] = p.x * (dp[4 * j] - delta.x);
            dp[4 * j + 1] = p.y * (dp[4 * j + 1] - delta.y);
            dp[4 * j + 2] = p.z * (dp[4 * j + 2] - delta.x);
            dp[4 * j + 3] = p.w * (dp[4 * j + 3] - delta.y);
        }
        __syncwarp();
        handover.release(from.stage);
    }
    DEVICE void update_operand() { as_operand(ds, dp); }
    DEVICE void begin_sums(int step) { wgmma_add_a_b<DK>(dk, ds, steps.q_tile(step) + TRANSPOSED); }
    DEVICE void write(const GradientRows &rows) { rows.write<DK>(dk, static_cast<float>(x.p.scale), 0, x.to.part_dk, x.to.dk); }
};

template <class Sums>
DEVICE void accumulate_split(const Arguments &x, const ListSteps &list, unsigned char *tile, unsigned char *stages, Shared &shared,
                             Pipeline<1> &handover) {
    SplitSteps steps(list, stages, shared);
    Sums sums(x, steps, tile, handover);
    if (list.steps > 0) {
        steps.wait(0);
        wgmma_fence();
        sums.begin_product(0);
        wgmma_commit();
        wgmma_wait<0>();
        sums.finish_product(0);
        sums.update_operand();
        for (int step = 1; step < list.steps; ++step) {
            steps.wait(step);
            wgmma_fence();
            sums.begin_product(step);
            wgmma_commit();
            sums.begin_sums(step - 1);
            wgmma_commit();
            wgmma_wait<1>();
            sums.finish_product(step);
            wgmma_wait<0>();
            steps.release(step - 1);
            sums.update_operand();
        }
        wgmma_fence();
        sums.begin_sums(list.steps - 1);
        wgmma_commit();
        wgmma_wait<0>();
    }
    sums.write(GradientRows(list, x.lists, x.p.S_kv, static_cast<int>(threadIdx.x) % 128 / 32 * 16));
}
