// dk and dv on Hopper, without atomics, over the rows that selected a tile of keys (key_to_rows.cuh).
//
//   p^T = 2^(c k q^T - lse),  ds^T = p^T * (v do^T - delta),  dv = sum p^T do,  dk = scale * sum ds^T q
//
// Grid: one CTA per segment (segment_of), two CTAs per multiprocessor: one computes p and ds, begins or ends while the other multiplies.
// Tiles: 64 keys by 64 rows, TQ = 64 / H listed tokens times H heads. The products are transposed: with keys as rows, p^T and ds^T come out
//   in the registers from which dv += p^T do and dk += ds^T q read them.
// Warpgroups: one consumer. In the producer warpgroup a warp loads lse and delta; q and do come by TMA, a token each, or, if those would be
//   small (H < 8), by three warps with cp.async. The tile's K and V come by TMA.
// Compressed keys: the rows of a list are the last ones of the sequence, from the first that sees a key of the tile. Its entries are
//   arithmetic, and q and do of a step one box, past which TMA writes zeros: a segment is whole steps.
// A window: the rows of a list are those from the tile's first key to the window's end after its last one, arithmetic as above. One segment
//   has them all, and nothing about the lists is in memory.
// Masks: rows are in order, so that only the first entries of a list can lie within the tile, and only the last ones see a window that the
//   tile reaches beyond. There, k and v of keys that no row sees may be NaN: p and ds are replaced, not multiplied, by 0.
//
//   H       heads of a group
//   STAGES  stages of the pipeline of steps
#include "key_to_rows.cuh"
#include "window_rows.cuh"
#include "wgmma.cuh"

constexpr int TQ = 64 / H, KEYS = 64, ROWS = 64;
#ifdef BY_ARITHMETIC
constexpr bool ADJACENT = true;  // the tokens of a step
#else
constexpr bool ADJACENT = false;
#endif
constexpr bool BY_TMA = ADJACENT || H >= 8;
constexpr int NO_END = 0x7fffffff;
constexpr int COPY_WARPS = BY_TMA ? 1 : 3;
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;  // of keys and values; of q and do
constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 32;  // a thread

struct Arguments {
    TensorMap q, d_o, k, v;
    Problem p;
    HeadsTensor d_out;         // do [B,S,G,h,DV]
    const float *lse, *delta;  // [rows, H], lse natural
    KeyToRows lists;
    KeyGradients to;
};

struct Shared {
    Pipeline<STAGES> steps;
    u64 tile;
    float lse[STAGES][ROWS], delta[STAGES][ROWS];
    int limit[STAGES][ROWS];  // one past the last key of the tile that the row sees; 0 if the list has no such row

    DEVICE void init() {
        steps.init(COPY_WARPS + 32 + 32, 4);  // rows; statistics copied, and written; a lane of every consumer warp
        mbarrier_init(&tile, 1);
        mbarrier_fence_init();
    }
};

DEVICE PipelineState<STAGES> state_of(int step) { return {step % STAGES, step / STAGES % 2}; }

// A CTA's segment; a number that the list does not have, if there is nothing to do.
// Compressed keys: `segment` rows of the sequence with all tiles of keys that they see, then the rows before. What runs at the same time
// reads the same rows, from the L2 cache: q and do of all rows would not fit it.
// A window: all rows of one tile after the other.
DEVICE SegmentId segment_of(const Arguments &x, u32 index) {
#ifdef COMPRESS_STRIDE
    const u32 tiles = x.lists.tiles, length = x.lists.segment, slots = (static_cast<u32>(x.p.S) + length - 1) / length;
    const u32 tile = index % tiles, slot = slots - 1 - index / tiles % slots;
    return {index / tiles / slots * tiles + tile, slot - first_row(x.p, static_cast<i64>(tile) * KEYS) / length};
#elif defined(WINDOW)
    return {index, 0};
#else
    return segment_at(x.lists, index);
#endif
}

// The steps of a segment.
struct ListSteps : Segment<KEYS> {
    const Arguments &x;
    const int steps;
    i64 row0 = 0;  // ADJACENT: the row of `begin`
#ifdef WINDOW
    const WindowRows<KEYS, TQ> rows;
    DEVICE ListSteps(const Arguments &arguments, SegmentId id)
        : ListSteps(arguments, id, WindowRows<KEYS, TQ>(arguments.p, id.list % arguments.lists.tiles * KEYS)) {}
    DEVICE ListSteps(const Arguments &arguments, SegmentId id, const WindowRows<KEYS, TQ> &window)
        : Segment<KEYS>(arguments.lists, arguments.p.G, id.list, window.count), x(arguments), steps(window.steps), row0(window.first),
          rows(window) {}
    DEVICE int step_at(int i) const { return rows.step_at(i); }  // which step of the list comes as number `i`
#else
    DEVICE ListSteps(const Arguments &arguments, SegmentId id)
        : Segment<KEYS>(arguments.lists, arguments.p.G, id), x(arguments), steps(static_cast<int>((end - begin + TQ - 1) / TQ)) {
        if (ADJACENT) row0 = x.p.S - (x.lists.begins[list + 1] - begin);
    }
    DEVICE int step_at(int i) const { return i; }
#endif
    // The row of listed token number i of a step; S, which is past the rows, if there is none.
    DEVICE int row(int step, int i) const {
        const i64 at = begin + static_cast<i64>(step_at(step)) * TQ + i;
        if (i >= TQ || at >= end) return static_cast<int>(x.p.S);
        if (ADJACENT) return static_cast<int>(row0 + at - begin);
        return static_cast<u32>(x.lists.entries[at] - bg * x.lists.entries_per_bg) / static_cast<u32>(x.p.n * x.lists.reach);
    }
    // The steps [x, y) of the list in which every row sees all keys of the tile.
    DEVICE int2 whole_steps() const {
#ifdef WINDOW
        return make_int2(rows.begun, rows.over);
#elif defined(COMPRESS_STRIDE)
        const i64 begun = first_row(x.p, min(first_key + static_cast<i64>(KEYS), x.p.S_kv) - 1) - row0;
        return make_int2(static_cast<int>((begun + TQ - 1) / TQ), NO_END);
#else
        // Of rows in order, only the first KEYS entries of a list can lie within the tile.
        return make_int2(x.p.q_pos ? steps : static_cast<int>((x.lists.begins[list] + KEYS - begin + TQ - 1) / TQ), NO_END);
#endif
    }
};

// A window ends within the box of its last step: the consumer zeroes the other tokens' q and do, since p = 0 would not cancel NaN.
DEVICE void zero_tokens(unsigned char *stage, int first) {
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < STAGE_BYTES / 16; i += 128)
        if (i % (PANEL / 16) >= first * H * 8) *reinterpret_cast<uint4 *>(stage + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    named_barrier<128>(1);
}

// One lane: the tile's keys and values.
DEVICE void produce_tile(const Arguments &x, const ListSteps &list, unsigned char *k_tile, Shared &shared) {
    const int b = static_cast<int>(list.b), g = static_cast<int>(list.g);
    mbarrier_arrive_expect(&shared.tile, K_BYTES + V_BYTES);
    tma_load_key_tile<DK>(k_tile, &x.k, &shared.tile, list.first_key, g, b);
    tma_load_key_tile<DV>(k_tile + K_BYTES, &x.v, &shared.tile, list.first_key, g, b);
}

// One lane: q and do of every step by TMA, all its tokens at once.
DEVICE void produce_boxes(const Arguments &x, const ListSteps &list, unsigned char *stages, Shared &shared) {
    const int b = static_cast<int>(list.b), g = static_cast<int>(list.g);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        unsigned char *q_tile = stages + at.stage * STAGE_BYTES;
        u64 *full = &shared.steps.full[at.stage];
        shared.steps.wait_empty(at);
        mbarrier_arrive_expect(full, TQ * H * 2 * (DK + DV));
        tma_load_row_tile<DK>(q_tile, &x.q, full, g, list.row(step, 0), b);
        tma_load_row_tile<DV>(q_tile + K_BYTES, &x.d_o, full, g, list.row(step, 0), b);
    }
}

// One warp: q and do of every step by TMA, one token per lane.
DEVICE void produce_tokens(const Arguments &x, const ListSteps &list, unsigned char *stages, Shared &shared) {
    const int lane = threadIdx.x % 32, b = static_cast<int>(list.b), g = static_cast<int>(list.g);
    int coming = list.row(0, lane);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const int s = coming;
        coming = list.row(step + 1, lane);  // read a step ahead: the rows' addresses depend on it
        shared.steps.wait_empty(at);
        unsigned char *q_tile = stages + at.stage * STAGE_BYTES + lane * H * 128;
        u64 *full = &shared.steps.full[at.stage];
        if (lane == 0) mbarrier_arrive_expect(full, TQ * H * 2 * (DK + DV));
        __syncwarp();
        if (lane >= TQ) continue;
        tma_load_row_tile<DK>(q_tile, &x.q, full, g, s, b);
        tma_load_row_tile<DV>(q_tile + K_BYTES, &x.d_o, full, g, s, b);
    }
}

// One of the copy warps: four heads of a token at once, eight lanes a row, of every COPY_WARPS-th four; zeros for tokens that do not exist.
// A step is announced once it is there and the next one's copies have begun.
DEVICE void copy_tokens(const Arguments &x, const ListSteps &list, unsigned char *stages, Shared &shared, int copier) {
    constexpr int FOURS = (H + 3) / 4;  // of a token
    const int lane = threadIdx.x % 32, column = lane % 8, head0 = lane / 8;
    const u16 *q = x.p.q.group(list.b, list.g) + head0 * x.p.q.stride_h + column * 8;
    const u16 *d_out = x.d_out.group(list.b, list.g) + head0 * x.d_out.stride_h + column * 8;
    auto announce = [&](int stage) {
        fence_async_proxy();
        __syncwarp();
        shared.steps.announce(stage);
    };
    int coming = list.row(0, lane);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const int row_of_lane = coming < x.p.S ? coming : -1;  // negative: no such token
        coming = list.row(step + 1, lane);
        shared.steps.wait_empty(at);
        __syncwarp();
#pragma unroll 1
        for (int four = copier; four < TQ * FOURS; four += COPY_WARPS) {
            const int token = four / FOURS, head = four % FOURS * 4 + head0;
            const int row = __shfl_sync(ALL_LANES, row_of_lane, token);
            if (H % 4 && head >= H) continue;
            const bool exists = row >= 0;
            const i64 s = max(row, 0);
            const u16 *q_row = q + s * x.p.q.stride_s + four % FOURS * 4 * x.p.q.stride_h;
            const u16 *do_row = d_out + s * x.d_out.stride_s + four % FOURS * 4 * x.d_out.stride_h;
            unsigned char *to = stages + at.stage * STAGE_BYTES + swizzled(token * H + head, column);
#pragma unroll
            for (int c = 0; c < DK; c += 64) cp_async_16(reinterpret_cast<u16 *>(to + c / 64 * PANEL), q_row + c, exists);
#pragma unroll
            for (int c = 0; c < DV; c += 64) cp_async_16(reinterpret_cast<u16 *>(to + K_BYTES + c / 64 * PANEL), do_row + c, exists);
        }
        cp_async_commit();
        if (step) {
            cp_async_wait<1>();
            announce((step - 1) % STAGES);
        }
    }
    cp_async_wait<0>();
    announce((list.steps - 1) % STAGES);
}

// One warp: lse, delta and limit of two rows per lane.
DEVICE void copy_statistics(const Arguments &x, const ListSteps &list, Shared &shared) {
    const int lane = threadIdx.x % 32;
    int coming[2];
    for (int i = 0; i < 2; ++i) coming[i] = list.row(0, (lane + 32 * i) / H);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const int rows[2] = {coming[0], coming[1]};
        for (int i = 0; i < 2; ++i) coming[i] = list.row(step + 1, (lane + 32 * i) / H);
        shared.steps.wait_empty(at);
        for (int i = 0; i < 2; ++i) {
            const int row = lane + 32 * i;
            const bool exists = rows[i] < x.p.S;
            const i64 index = exists ? ((list.b * x.p.S + rows[i]) * x.p.G + list.g) * H + row % H : 0;
            cp_async_4(&shared.lse[at.stage][row], x.lse + index, exists);
            cp_async_4(&shared.delta[at.stage][row], x.delta + index, exists);
            shared.limit[at.stage][row] = exists ? row_limit(x.p, list.b, rows[i]) - list.first_key : 0;
        }
        cp_async_mbarrier_arrive(&shared.steps.full[at.stage]);
        mbarrier_arrive(&shared.steps.full[at.stage]);
    }
}

// p^T in place of s^T.
DEVICE void exponentiate(float (&s)[ROWS / 2], const float *lses, float c) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const float2 lse = *reinterpret_cast<const float2 *>(lses + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) s[4 * j + i] = exp2_fast(s[4 * j + i] * c - (i % 2 ? lse.y : lse.x) * LOG2_E);
    }
}

// 0 in place of what belongs to keys that a row does not see.
DEVICE void mask_keys(const Problem &p, float (&x)[ROWS / 2], const int *limits) {
    const int lane = threadIdx.x % 32, key0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (hidden(p, key0 + i / 2 * 8, limits[8 * j + lane % 4 * 2 + i % 2])) x[4 * j + i] = 0.0f;
}

// p^T and ds^T = p^T * (dp^T - delta), rounded: operands.
DEVICE void as_operands(u32 (&p)[ROWS / 16][4], u32 (&ds)[ROWS / 16][4], const float (&s)[ROWS / 2], const float (&dp)[ROWS / 2],
                        const float *deltas) {
#pragma unroll
    for (int j = 0; j < ROWS / 8; ++j) {
        const float2 delta = *reinterpret_cast<const float2 *>(deltas + 8 * j + threadIdx.x % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const float low = s[4 * j + i], high = s[4 * j + i + 1];
            p[j / 2][j % 2 * 2 + i / 2] = pack(low, high);
            ds[j / 2][j % 2 * 2 + i / 2] = pack(low * (dp[4 * j + i] - delta.x), high * (dp[4 * j + i + 1] - delta.y));
        }
    }
}

DEVICE void accumulate(const Arguments &x, const ListSteps &list, unsigned char *k_tile, unsigned char *stages, Shared &shared) {
    const Problem &p = x.p;
    const u32 keys = uniform(operand(shared_address(k_tile))), values = keys + K_BYTES / 16;
    const u32 stage0 = uniform(operand(shared_address(stages)));
    const int2 whole = list.whole_steps();
    float dk[DK / 2], dv[DV / 2], s[ROWS / 2], dp[ROWS / 2];
#pragma unroll
    for (int i = 0; i < DK / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) dv[i] = 0.0f;
    mbarrier_wait(&shared.tile, 0);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const u32 q_tile = uniform(stage0 + at.stage * (STAGE_BYTES / 16)), do_tile = q_tile + K_BYTES / 16;
        const int in_list = list.step_at(step);
        shared.steps.wait_full(at);
#ifdef WINDOW
        if (in_list + 1 == list.steps && list.end % TQ) zero_tokens(stages + at.stage * STAGE_BYTES, static_cast<int>(list.end % TQ));
#endif
        wgmma_fence();
        wgmma_a_bt<DK>(s, keys, q_tile);
        wgmma_commit();
        wgmma_a_bt<DV>(dp, values, do_tile);
        wgmma_commit();
        wgmma_wait<1>();  // p^T while dp^T is computed
        exponentiate(s, shared.lse[at.stage], p.scale_log2);
        const bool masked = in_list < whole.x || in_list >= whole.y;
        if (masked) mask_keys(p, s, shared.limit[at.stage]);
        wgmma_wait<0>();
        if (masked) mask_keys(p, dp, shared.limit[at.stage]);
        u32 weights[ROWS / 16][4], ds[ROWS / 16][4];
        as_operands(weights, ds, s, dp, shared.delta[at.stage]);
        wgmma_fence();
        wgmma_add_a_b<DV>(dv, weights, do_tile + TRANSPOSED);
        wgmma_add_a_b<DK>(dk, ds, q_tile + TRANSPOSED);
        wgmma_commit();
        wgmma_wait<0>();
        shared.steps.release(at.stage);
    }
    const GradientRows rows(list, x.lists, p.S_kv, static_cast<int>(threadIdx.x) / 32 * 16);
    rows.write<DK>(dk, static_cast<float>(p.scale), 0, x.to.part_dk, x.to.dk);
    rows.write<DV>(dv, 1.0f, 0, x.to.part_dv, x.to.dv);
}

extern "C" __global__ void __launch_bounds__(256, 2) dkdv_groups(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(1024) unsigned char memory[];  // the tile's keys and values, the stages
    __shared__ Shared shared;
    if (!ADJACENT && blockIdx.x >= x.lists.segments[x.lists.lists]) return;
    const SegmentId id = segment_of(x, blockIdx.x);
#ifdef COMPRESS_STRIDE
    if (id.number < 0 || id.number >= x.lists.segments[id.list + 1] - x.lists.segments[id.list]) return;
#endif
    unsigned char *stages = memory + K_BYTES + V_BYTES;
    const int producer = threadIdx.x / 32 - 4;
    const ListSteps list(x, id);
    if (threadIdx.x == 0) shared.init();
    if (TQ * H < ROWS)  // rows that no token fills stay zero: p = 1 there, which 0 * NaN would not cancel
        for (int i = threadIdx.x; i < STAGES * STAGE_BYTES / 16; i += blockDim.x)
            *reinterpret_cast<uint4 *>(stages + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    __syncthreads();
    if (producer < 0) {
        reallocate_registers<1, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 2>(true);
        accumulate(x, list, memory, stages, shared);
        return;
    }
    reallocate_registers<1, CONSUMER_REGISTERS, PRODUCER_REGISTERS, 2>(false);
    if (threadIdx.x == 128) produce_tile(x, list, memory, shared);
    __syncwarp();
    if (producer == 1) copy_statistics(x, list, shared);
    else if (ADJACENT) {
        if (threadIdx.x == 128) produce_boxes(x, list, stages, shared);
    }
    else if (!BY_TMA) copy_tokens(x, list, stages, shared, producer ? producer - 1 : 0);
    else if (producer == 0) produce_tokens(x, list, stages, shared);
}
