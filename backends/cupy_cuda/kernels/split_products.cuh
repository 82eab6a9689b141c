
// Two consumers: one computes p and dv, the other ds and dk. Each has the registers for its sums, and for the tile's keys or values as the
// operand of every step. p goes from one to the other in float32 through shared memory.
constexpr bool IN_REGISTERS = DK <= 192 && DV <= 128;
constexpr int SPLIT_CONSUMER = ADJACENT ? 232 : 224, SPLIT_PRODUCER = ADJACENT ? 40 : 56;  // registers a thread
constexpr int HANDOVERS = 1;
constexpr int HANDOVER_BYTES = 128 * ROWS / 2 * 4;

struct SplitBarriers {
    Pipeline<1> tile;  // the tile's keys and values
    Pipeline<HANDOVERS> handover;  // p^T of a step
};

// The tile's keys or values, of which every step is multiplied. In registers, wgmma reads half as much shared memory.
template <int COLUMNS>
struct TileOperand {
    u32 tile, a[COLUMNS / 16][4];
    DEVICE TileOperand(const unsigned char *memory) : tile(uniform(operand(shared_address(memory)))) {
        if (!IN_REGISTERS) return;
#pragma unroll
        for (int k = 0; k < COLUMNS / 16; ++k) load_operand(a[k], memory, k);
    }
    // d = tile b^T, asynchronous
    DEVICE void multiply(float (&d)[ROWS / 2], u32 b) const {
        if constexpr (IN_REGISTERS) wgmma_a_bt<COLUMNS>(d, a, b);
        else wgmma_a_bt<COLUMNS>(d, tile, b);
    }
};

// Where thread t of a consumer and thread t of the other have p^T of a step.
DEVICE float4 *handover_place(unsigned char *memory, int stage) {
    return reinterpret_cast<float4 *>(memory + K_BYTES + V_BYTES + STAGES * STAGE_BYTES + stage * HANDOVER_BYTES) + threadIdx.x % 128;
}

DEVICE PipelineState<HANDOVERS> handover_of(int step) { return {step % HANDOVERS, step / HANDOVERS % 2}; }

struct SplitSteps {
    const ListSteps &list;
    unsigned char *stages;
    const u32 stage0;
    Shared &shared;
    const int2 whole;
    DEVICE SplitSteps(const ListSteps &list, unsigned char *stages, Shared &shared)
        : list(list), stages(stages), stage0(uniform(operand(shared_address(stages)))), shared(shared), whole(list.whole_steps()) {}
    DEVICE PipelineState<STAGES> state(int step) const { return state_of(list.begun + step); }
    DEVICE u32 q_tile(int step) const { return uniform(stage0 + state(step).stage * (STAGE_BYTES / 16)); }
    DEVICE u32 do_tile(int step) const { return q_tile(step) + K_BYTES / 16; }
    DEVICE bool masked(int step) const {
        const int in_list = list.step_at(step);
        return in_list < whole.x || in_list >= whole.y;
    }
    DEVICE void wait(int step) {
        const auto at = state(step);
        wait_for_rows(shared, at);
#ifdef WINDOW
        if (list.step_at(step) + 1 == list.steps && list.end % TQ)
            zero_tokens(stages + at.stage * STAGE_BYTES, static_cast<int>(list.end % TQ));
#endif
    }
    DEVICE void release(int step) { shared.steps.release(state(step).stage); }
};

// p and dv.
struct ValueSums {
    const Arguments &x;
    SplitSteps &steps;
    unsigned char *memory;
    Pipeline<HANDOVERS> &handover;
    const TileOperand<DK> keys;
    float dv[DV / 2], s[ROWS / 2];
    u32 p[ROWS / 16][4];

    DEVICE ValueSums(const Arguments &x, SplitSteps &steps, unsigned char *memory, Pipeline<HANDOVERS> &handover)
        : x(x), steps(steps), memory(memory), handover(handover), keys(memory) {
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) dv[i] = 0.0f;
    }
    DEVICE void begin_product(int step) { keys.multiply(s, steps.q_tile(step)); }
    DEVICE void finish_product(int step) {
        const int stage = steps.state(step).stage;
        const auto to = handover_of(steps.list.begun + step);
        exponentiate(s, steps.shared.lse[stage], x.p.scale_log2);
        if (steps.masked(step)) mask_keys(x.p, s, steps.shared.limit[stage]);
        handover.wait_empty(to);
        float4 *place = handover_place(memory, to.stage);
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
    unsigned char *memory;
    Pipeline<HANDOVERS> &handover;
    const TileOperand<DV> values;
    float dk[DK / 2], dp[ROWS / 2];
    u32 ds[ROWS / 16][4];

    DEVICE KeySums(const Arguments &x, SplitSteps &steps, unsigned char *memory, Pipeline<HANDOVERS> &handover)
        : x(x), steps(steps), memory(memory), handover(handover), values(memory + K_BYTES) {
#pragma unroll
        for (int i = 0; i < DK / 2; ++i) dk[i] = 0.0f;
    }
    DEVICE void begin_product(int step) { values.multiply(dp, steps.do_tile(step)); }
    DEVICE void finish_product(int step) {
        const int stage = steps.state(step).stage;
        const auto from = handover_of(steps.list.begun + step);
        if (steps.masked(step)) mask_keys(x.p, dp, steps.shared.limit[stage]);
        handover.wait_full(from);
        const float4 *place = handover_place(memory, from.stage);
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
DEVICE void accumulate_split(const Arguments &x, const ListSteps &list, int visit, unsigned char *memory, unsigned char *stages, Shared &shared,
                             SplitBarriers &barriers) {
    SplitSteps steps(list, stages, shared);
    const PipelineState<1> tile = {0, visit % 2};
    barriers.tile.wait_full(tile);
    Sums sums(x, steps, memory, barriers.handover);
    if (IN_REGISTERS) {
        __syncwarp();
        barriers.tile.release(0);
    }
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
        steps.release(list.steps - 1);
    }
    if (!IN_REGISTERS) barriers.tile.release(0);
    sums.write(GradientRows(list, x.lists, x.p.S_kv, static_cast<int>(threadIdx.x) % 128 / 32 * 16));
}

// A CTA's segments, each with how many there were before it, and their steps.
template <class Visit>
DEVICE void for_segments(const Arguments &x, Visit visit) {
    const u32 segments = segments_of(x);
    int number = 0, begun = 0;
    for (u32 index = blockIdx.x; index < segments; index += gridDim.x) {
        const SegmentId id = segment_of(x, index);
        if (!exists(x, id)) continue;
        const ListSteps list(x, id, begun);
        visit(list, number++);
        begun += list.steps;
    }
}

// Two consumers: a CTA for each multiprocessor, whose producers are a segment ahead.
DEVICE void visit_segments(const Arguments &x, unsigned char *memory, unsigned char *stages, Shared &shared) {
    __shared__ SplitBarriers barriers;
    const int producer = threadIdx.x / 32 - 8;
    if (threadIdx.x == 0) {
        barriers.tile.init(1, 8);
        barriers.handover.init(4, 4);
        shared.init();
    }
    zero_stages(stages);
    __syncthreads();
    if (producer < 0) {
        reallocate_registers<2, SPLIT_CONSUMER, SPLIT_PRODUCER>(true);
        if (threadIdx.x < 128)
            for_segments(x, [&](const ListSteps &list, int number) { accumulate_split<ValueSums>(x, list, number, memory, stages, shared, barriers); });
        else
            for_segments(x, [&](const ListSteps &list, int number) { accumulate_split<KeySums>(x, list, number, memory, stages, shared, barriers); });
        return;
    }
    reallocate_registers<2, SPLIT_CONSUMER, SPLIT_PRODUCER>(false);
    for_segments(x, [&](const ListSteps &list, int number) {
        if (producer == 0 && threadIdx.x % 32 == 0) {
            const PipelineState<1> tile = {0, number % 2};
            barriers.tile.wait_empty(tile);
            produce_tile(list, memory, &barriers.tile.full[0]);
        }
        __syncwarp();
        produce_rows(list, stages, shared, producer);
        __syncwarp();
    });
}
