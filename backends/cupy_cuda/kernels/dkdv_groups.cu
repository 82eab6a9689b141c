// dk and dv on Hopper, without atomics, over the rows that selected a tile of keys (key_to_rows.cuh).
//
//   p^T = 2^(c k q^T - lse),  ds^T = p^T * (v do^T - delta),  dv = sum p^T do,  dk = scale * sum ds^T q
//
// Grid: one CTA per segment of a list (segment_of), in the order of order_segments.cu. Two CTAs per multiprocessor, so
//   that one computes p and ds, starts or ends while the other multiplies; or one CTA with two consumers.
// Tiles: 64 keys by 64 rows (row_steps.cuh). Products are transposed: with keys as rows, p^T and ds^T are computed in
//   the registers from which dv += p^T do and dk += ds^T q read them.
// Warpgroups: one consumer, or two for wide keys (SplitSteps), and a producer.
// Compressed keys: a list is the last rows of the sequence, from the first that sees a key of the tile. Window: it
//   reaches to the end of the window after the tile's last key, in one segment. Both are computed, and q and do of a
//   step are one box, past whose end TMA loads zeros.
// Small blocks: a tile holds blocks at any positions; p and ds of blocks that a row did not select are replaced by 0.
// Masks: rows ascend, so only the first entries of a list can lie within the tile, and only the last ones can have a
//   window that begins inside the tile. Hidden k and v may be NaN, so p and ds are replaced by 0, not multiplied by 0.
#include "row_steps.cuh"

constexpr int NO_END = 0x7fffffff;
constexpr int CTAS = CONSUMERS == 1 ? 2 : 1;  // per multiprocessor
constexpr int CONSUMER_REGISTERS = CONSUMERS == 1 ? 224 : 232, PRODUCER_REGISTERS = CONSUMERS == 1 ? 32 : 40;  // a thread

struct BoxMaps {
    TensorMap q, d_o, k, v;  // q, d_o: boxes of a step's tokens
};
struct TokenMaps : BoxMaps {
    TensorMap q_token, d_o_token;
};
struct Arguments : If<ADJACENT, BoxMaps, TokenMaps> {
    Problem p;
    HeadsTensor d_out;         // do [B,S,G,h,DV]
    const float *lse, *delta;  // [rows, H], lse natural
    KeyToRows lists;
    KeyGradients to;
    const uint2 *order;  // [segments]: list and number (order_segments.cu); null if ADJACENT
    BlockTiles blocks;   // SMALL_BLOCK
};

// Return the CTA's segment; past the list's last segment if there is nothing to do. Compressed keys: CTAs take all
// tiles of `segment` rows, then the rows before, so that concurrent CTAs read the same rows from the L2 cache.
DEVICE SegmentId segment_of(const Arguments &x, u32 index) {
    if constexpr (COMPRESSED) {
        const u32 tiles = x.lists.tiles, length = x.lists.segment, slots = (static_cast<u32>(x.p.S) + length - 1) / length;
        const u32 tile = index % tiles, slot = slots - 1 - index / tiles % slots;
        return {index / tiles / slots * tiles + tile, slot - first_row(x.p, static_cast<i64>(tile) * KEYS) / length};
    } else if constexpr (WINDOW) {
        return {index, 0};
    } else {
        const uint2 at = x.order[index];
        return {at.x, at.y};
    }
}

struct ListSteps : Segment<KEYS> {
    const Arguments &x;
    const int steps;
    i64 row0 = 0;  // ADJACENT: row of `begin`
    DEVICE ListSteps(const Arguments &arguments, const WindowRows<KEYS, TQ> &window, i64 list)
        : Segment<KEYS>(arguments.lists, arguments.p.G, list, window.count), x(arguments), steps(window.steps), row0(window.first) {}
    DEVICE ListSteps(const Arguments &arguments, SegmentId id)
        : Segment<KEYS>(arguments.lists, arguments.p.G, id), x(arguments), steps(static_cast<int>((end - begin + TQ - 1) / TQ)) {
        if (COMPRESSED) row0 = x.p.S - (x.lists.begins[list + 1] - begin);
    }
    DEVICE int step_at(int i) const { return i; }  // the step at position `i`
    // Return the row of listed token i of a step, or S (past the last row) if there is none.
    DEVICE int row(int step, int i) const {
        const i64 at = begin + static_cast<i64>(step) * TQ + i;
        if (i >= TQ || at >= end) return static_cast<int>(x.p.S);
        if (ADJACENT) return static_cast<int>(row0 + at - begin);
        if (SMALL_BLOCK) return x.lists.entries[at];
        return static_cast<u32>(x.lists.entries[at]) / static_cast<u32>(x.p.n * x.lists.reach);
    }
    // SMALL_BLOCK: return the blocks of the tile that listed token i of a step (which must exist) selected.
    DEVICE u32 chosen(int step, int i) const { return x.blocks.chosen[begin + static_cast<i64>(step) * TQ + i]; }
    DEVICE void zero_other_tokens(int, unsigned char *) const {}
    // Return the steps [x, y) of the list in which every row sees all keys of the tile. With implied positions, only
    // the first KEYS entries of a list in memory can lie within the tile; with q_pos, any of its own entries.
    DEVICE int2 whole_steps() const {
        i64 masked;  // entries from `begin` on
        if constexpr (COMPRESSED) masked = first_row(x.p, min(first_key + static_cast<i64>(KEYS), x.p.S_kv) - 1) - row0;
        else masked = (x.p.q_pos ? x.lists.begins[list + 1] : x.lists.begins[list] + KEYS) - begin;
        return make_int2(static_cast<int>((masked + TQ - 1) / TQ), NO_END);
    }
};

// The steps of all rows that see a tile through a window.
struct WindowSteps : ListSteps {
    const WindowRows<KEYS, TQ> rows;
    DEVICE WindowSteps(const Arguments &x, SegmentId id) : WindowSteps(x, id, WindowRows<KEYS, TQ>(x.p, id.list % x.lists.tiles * KEYS)) {}
    DEVICE WindowSteps(const Arguments &x, SegmentId id, const WindowRows<KEYS, TQ> &window) : ListSteps(x, window, id.list), rows(window) {}
    DEVICE int step_at(int i) const { return rows.step_at(i); }
    DEVICE int row(int step, int i) const { return ListSteps::row(step_at(step), i); }
    // Consumers zero q and do of the tokens past the window in the box of its last step, because 0 * NaN is NaN.
    DEVICE void zero_other_tokens(int step, unsigned char *stage) const {
        if (step_at(step) + 1 != steps || end % TQ == 0) return;
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < STAGE_BYTES / 16; i += 128)
            if (i % (PANEL / 16) >= end % TQ * H * 8) *reinterpret_cast<uint4 *>(stage + i * 16) = make_uint4(0, 0, 0, 0);
        fence_async_proxy();
        named_barrier<128>(1 + threadIdx.x / 128);
    }
    DEVICE int2 whole_steps() const { return make_int2(rows.begun, rows.over); }
};
typedef If<WINDOW, WindowSteps, ListSteps> Steps;

// Two consumer warpgroups, for wide keys, compute two of the four products each:
//
//   ValueSums  p^T = 2^(c k q^T - lse),  dv = sum p^T do
//   KeySums    ds^T = p^T * (v do^T - delta),  dk = sum ds^T q
//
// ValueSums sends p to KeySums in float32 through shared memory: thread t reads what thread t wrote. Each keeps the
// tile's keys or values in registers, so that wgmma reads half as much shared memory, and the memory that held the tile
// becomes the last stage of q and do. The first product of a step and the sum of the step before are in flight
// together. Next to sums of 256 columns, registers hold only a part of the tile (TILE_STAYS), and two stages fit beside
// it; q and do are then released separately (APART), each as soon as both consumers have used it. q, which both need
// for longer, has a third stage (THIRD_Q).

// What both consumers know of a segment's steps; list: as of row_steps.cuh, and what dkdv_groups.cu adds to it.
template <class List> struct SplitSteps {
    const List &list;
    unsigned char *const stages;
    Shared &shared;
    Pipeline<1> &exchange;
    const u32 stage0 = uniform(operand(shared_address(stages)));  // an operand
    const int2 whole = list.whole_steps();
    DEVICE u32 q_tile(int step) const { return uniform(stage0 + q_offset(state_of(step).stage) / 16); }
    DEVICE u32 do_tile(int step) const { return uniform(stage0 + do_offset(step % STAGES) / 16); }
    DEVICE void wait(int step) const {
        const auto at = state_of(step);
        wait_for_rows(shared, at);
        list.zero_other_tokens(step, stages + q_offset(state_of(step).stage));
    }
    DEVICE void release(int step) const { shared.steps.release(state_of(step).stage); }
    // APART: of do.
    DEVICE void wait_do(int step) const {
        mbarrier_wait(&shared.d_outs.full[step % STAGES], step / STAGES % 2);
        if (!BY_TMA) fence_async_proxy();
    }
    DEVICE void release_do(int step) const { shared.d_outs.release(step % STAGES); }
    DEVICE void mask(float (&x)[ROWS / 2], int step) const {
        const int in_list = list.step_at(step);
        if (SMALL_BLOCK || in_list < whole.x || in_list >= whole.y) shared.visible[state_of(step).stage].mask(list.x.p, x);
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

// COLUMNS of the tile's keys or values as operand a: the LAST or the first 16 HELD in registers, the others in shared
// memory.
template <int COLUMNS, bool LAST> struct TileOperand {
    static constexpr int HELD = TILE_STAYS ? 6 : COLUMNS / 16, FIRST_HELD = LAST ? COLUMNS / 16 - HELD : 0;
    u32 held[HELD][4], others;

    // If their memory is the last stage, it is released.
    template <class List>
    DEVICE TileOperand(const SplitSteps<List> &steps, unsigned char *tile) : others(uniform(operand(shared_address(tile)))) {
        mbarrier_wait(&steps.shared.tile, 0);
        UNROLL for (int k = 0; k < HELD; ++k) load_operand(held[k], tile, FIRST_HELD + k);
        if (!RECYCLED) return;
        if (TQ * H < ROWS) {  // as zero_stages
            constexpr int BYTES = THIRD_Q ? PANEL : COLUMNS * KEYS * 2;
            uint4 *const stage = reinterpret_cast<uint4 *>(tile + (THIRD_Q && LAST ? COLUMNS * KEYS * 2 - PANEL : 0));
            named_barrier<128>(1 + threadIdx.x / 128);
            for (int i = threadIdx.x % 128; i < BYTES / 16; i += 128) stage[i] = make_uint4(0, 0, 0, 0);
            fence_async_proxy();
        }
        __syncwarp();
        steps.shared.steps.release(Q_STAGES - 1);
    }
    // d = a b^T
    DEVICE void multiply(float (&d)[ROWS / 2], u32 b) const {
        UNROLL for (int k = 0; k < COLUMNS / 16; ++k) {
            const u32 offset = (k / 4 * PANEL + k % 4 * 32) / 16;
            if (k >= FIRST_HELD && k < FIRST_HELD + HELD) wgmma_registers_bt(d, held[k - FIRST_HELD], descriptor(b + offset), k > 0);
            else wgmma_shared(d, descriptor(others + offset), descriptor(b + offset), k > 0);
        }
    }
};

template <class List> struct ValueSums {
    static constexpr bool SUM_FIRST = TILE_STAYS;  // of the step before, ahead of the product
    const SplitSteps<List> &steps;
    TileOperand<DK, THIRD_Q> keys;
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

template <class List> struct KeySums {
    static constexpr bool SUM_FIRST = TILE_STAYS && !(THIRD_Q && BY_TMA);
    const SplitSteps<List> &steps;
    TileOperand<DV, false> values;
    u32 ds[ROWS / 16][4];  // an operand, too
    float dk[DK / 2], dp[ROWS / 2];

    DEVICE KeySums(const SplitSteps<List> &steps, unsigned char *tile) : steps(steps), values(steps, tile + VALUES) {
        UNROLL for (int i = 0; i < DK / 2; ++i) dk[i] = 0.0f;
    }
    DEVICE void wait(int step) const { APART ? steps.wait_do(step) : steps.wait(step); }
    DEVICE void begin_product(int step) { values.multiply(dp, steps.do_tile(step)); }
    DEVICE void finish_product(int step) {
        if (APART) {
            steps.release_do(step);
            steps.wait(step);  // the statistics, and q
        }
        if (!TILE_STAYS) steps.mask(dp, step);
        steps.exchange.wait_full({0, step % 2});
        UNROLL for (int j = 0; j < ROWS / 8; ++j) {
            const float2 delta = *reinterpret_cast<const float2 *>(steps.shared.delta[state_of(step).stage] + 8 * j + threadIdx.x % 4 * 2);
            const float4 p = steps.place()[j * 128];
            const float weights[4] = {p.x, p.y, p.z, p.w};
            UNROLL for (int i = 0; i < 4; ++i) {  // TILE_STAYS: the weight tells which keys are hidden, in fewer instructions than a mask
                const float product = weights[i] * (dp[4 * j + i] - (i % 2 ? delta.y : delta.x));
                dp[4 * j + i] = TILE_STAYS && weights[i] == 0.0f ? 0.0f : product;
            }
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

template <class Sums, class List>
DEVICE void add_products(const List &list, unsigned char *tile, unsigned char *stages, Shared &shared, Pipeline<1> &exchange) {
    const SplitSteps<List> steps{list, stages, shared, exchange};
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
            if constexpr (Sums::SUM_FIRST) {
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

// Consumer warpgroup, if there is one: compute all four products.
DEVICE void accumulate(const Arguments &x, const Steps &list, unsigned char *k_tile, unsigned char *stages, Shared &shared) {
    const Problem &p = x.p;
    const u32 keys = uniform(operand(shared_address(k_tile))), values = keys + K_BYTES / 16;
    const u32 stage0 = uniform(operand(shared_address(stages)));
    const int2 whole = list.whole_steps();
    float dk[DK / 2], dv[DV / 2], s[ROWS / 2], dp[ROWS / 2];
    UNROLL for (int i = 0; i < DK / 2; ++i) dk[i] = 0.0f;
    UNROLL for (int i = 0; i < DV / 2; ++i) dv[i] = 0.0f;
    mbarrier_wait(&shared.tile, 0);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const u32 q_tile = uniform(stage0 + at.stage * (STAGE_BYTES / 16)), do_tile = q_tile + K_BYTES / 16;
        const int in_list = list.step_at(step);
        wait_for_rows(shared, at);
        list.zero_other_tokens(step, stages + at.stage * STAGE_BYTES);
        wgmma_fence();
        wgmma_a_bt<DK>(s, keys, q_tile);
        wgmma_commit();
        wgmma_a_bt<DV>(dp, values, do_tile);
        wgmma_commit();
        wgmma_wait<1>();  // compute p^T while dp^T is in flight
        exponentiate(s, shared.lse[at.stage], p.scale_log2);
        const bool masked = SMALL_BLOCK || in_list < whole.x || in_list >= whole.y;
        if (masked) shared.visible[at.stage].mask(p, s);
        wgmma_wait<0>();
        if (masked) shared.visible[at.stage].mask(p, dp);
        u32 weights[ROWS / 16][4], ds[ROWS / 16][4];
        begin_sums(dv, dk, weights, ds, s, dp, shared.delta[at.stage], do_tile, q_tile);
        wgmma_wait<0>();
        shared.steps.release(at.stage);
    }
    const GradientRows rows = gradient_rows(list);
    rows.write<DK>(dk, static_cast<float>(p.scale), 0, x.to.part_dk, x.to.dk);
    rows.write<DV>(dv, 1.0f, 0, x.to.part_dv, x.to.dv);
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), CTAS) dkdv_groups(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // tile of keys and values (if OWN_MEMORY), stages
    __shared__ Shared shared;
    __shared__ Pipeline<1> exchange;  // between two consumers
    if (!ADJACENT && cta_of_group() >= x.lists.segments[x.lists.lists]) return;
    const SegmentId id = segment_of(x, cta_of_group());
    if (COMPRESSED && (id.number < 0 || id.number >= x.lists.segments[id.list + 1] - x.lists.segments[id.list])) return;
    constexpr bool OWN_MEMORY = CONSUMERS == 1 || TILE_STAYS;  // the tile has its own memory
    unsigned char *stages = memory + (OWN_MEMORY ? VALUES + V_BYTES : 0);
    unsigned char *tile = memory + (OWN_MEMORY ? 0 : (STAGES - 1) * STAGE_BYTES);
    const int producer = threadIdx.x / 32 - 4 * CONSUMERS;
    const Steps list(x, id);
    if (threadIdx.x == 0) {
        exchange.init(4, 4);
        shared.init();
    }
    zero_stages(stages);
    __syncthreads();
    if (producer < 0) {
        reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, CTAS>(true);
        if constexpr (CONSUMERS == 1) accumulate(x, list, tile, stages, shared);
        else if (threadIdx.x < 128) add_products<ValueSums<Steps>>(list, tile, stages, shared, exchange);
        else add_products<KeySums<Steps>>(list, tile, stages, shared, exchange);
        return;
    }
    reallocate_registers<CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, CTAS>(false);
    if (producer == (THIRD_Q ? 3 : 0) && (SMALL_BLOCK || threadIdx.x % 32 == 0)) produce_tile(list, tile, &shared.tile);
    __syncwarp();
    produce_rows(list, stages, shared, producer);
}
