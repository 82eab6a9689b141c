// Gradients over the list of rows that selected a tile of keys: 64 keys by steps of 64 rows, TQ = 64 / H listed tokens
// times H heads. Loads of steps, and p and ds from products, for dkdv_groups.cu and block_gradients.cu;
// block_partials.cu uses the sizes and the load of the tile.
//
// A list is a struct with: x, the kernel's arguments (tensor maps, p, d_out, lse, delta are read); b, g, first_key,
// steps; and row(step, i), the row of listed token i of a step, or S (past the last row) if there is none.
//
//   H, STAGES  heads per group; stages of the pipeline of q and do
#pragma once
#include "key_to_rows.cuh"
#include "hopper_tiles.cuh"

constexpr int TQ = 64 / H, KEYS = 64, ROWS = 64;
constexpr bool ADJACENT = BY_ARITHMETIC;  // the tokens of a step are adjacent
constexpr bool BY_TMA = ADJACENT || H >= 8;
constexpr int COPY_WARPS = BY_TMA ? 1 : 3;
constexpr int CONSUMERS = DK > 128 || DV > 128 ? 2 : 1;  // one consumer lacks registers for wider sums
constexpr bool TILE_STAYS = DK + DV > 320;  // in shared memory: it does not fit two consumers' registers
constexpr bool APART = TILE_STAYS && !ADJACENT;  // separate pipelines for q and do
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL, STAGE_BYTES = K_BYTES + V_BYTES;  // also q, do

// The third stage of q takes the tile's last panel of keys, memory between keys and values, and the first panel of
// values. Registers hold both panels (TileOperand), so their memory is free.
constexpr bool THIRD_Q = APART && H % 2 == 0;  // rows 2 i and 2 i + 1 are then of one token
constexpr int Q_STAGES = STAGES + THIRD_Q, VALUES = K_BYTES + THIRD_Q * (K_BYTES - 2 * PANEL);  // VALUES: offset in the tile
constexpr bool RECYCLED = CONSUMERS == 2 && !TILE_STAYS || THIRD_Q;  // the last stage of q is memory of the tile

DEVICE PipelineState<Q_STAGES> state_of(int step) { return {step % Q_STAGES, step / Q_STAGES % 2}; }

// The keys of the tile that each row of a step sees: all before a limit, or (SMALL_BLOCK) those of its blocks. mask:
// zero the elements of all other keys.
struct KeyLimits {
    int limits[ROWS];  // one past the last key of the tile that the row sees; 0 if the list has no such row
    DEVICE void store(int row, int limit, uint2) { limits[row] = limit; }
    DEVICE void mask(const Problem &p, float (&x)[ROWS / 2]) const {
        const int lane = threadIdx.x % 32, key0 = threadIdx.x % 128 / 32 * 16 + lane / 4;
        UNROLL for (int j = 0; j < ROWS / 8; ++j)
            UNROLL for (int i = 0; i < 4; ++i)
                if (hidden(p, key0 + i / 2 * 8, limits[8 * j + lane % 4 * 2 + i % 2])) x[4 * j + i] = 0.0f;
    }
};
struct KeyBits {
    u16 seen[KEYS / 16][THIRD_Q ? ROWS / 2 : ROWS];  // one bit per key of a warp; THIRD_Q: of two rows
    DEVICE void store(int row, int, uint2 keys) {
        UNROLL for (int warp = 0; warp < KEYS / 16; ++warp)
            seen[warp][THIRD_Q ? row / 2 : row] = static_cast<u16>((warp < 2 ? keys.x : keys.y) >> warp % 2 * 16);
    }
    DEVICE void mask(const Problem &, float (&x)[ROWS / 2]) const {
        const int lane = threadIdx.x % 32;
        const u16 *bits = seen[threadIdx.x % 128 / 32] + lane % 4 * (THIRD_Q ? 1 : 2);
        UNROLL for (int j = 0; j < ROWS / 8; ++j) {
            const u32 two_rows = (THIRD_Q ? bits[4 * j] : *reinterpret_cast<const u32 *>(bits + 8 * j)) >> lane / 4;
            UNROLL for (int i = 0; i < 4; ++i)
                if (!(two_rows >> ((THIRD_Q ? 0 : i % 2 * 16) + i / 2 * 8) & 1)) x[4 * j + i] = 0.0f;
        }
    }
};

struct Shared {
    Pipeline<Q_STAGES> steps;             // q, do, lse, delta; APART: without do
    Pipeline<APART ? STAGES : 1> d_outs;  // APART: do
    u64 tile;
    float lse[Q_STAGES][ROWS], delta[Q_STAGES][ROWS];
    If<(SMALL_BLOCK > 0), KeyBits, KeyLimits> visible[Q_STAGES];

    DEVICE void init() {
        steps.init((BY_TMA ? 1 : 32 * COPY_WARPS) + 32 + 32, 4 * CONSUMERS);  // rows; statistics copied, and written; a lane of every consumer warp
        if (APART) d_outs.init(BY_TMA ? 1 : 32 * COPY_WARPS, 4 * CONSUMERS);
        mbarrier_init(&tile, 1);
        mbarrier_fence_init();
    }
    // Wait for an empty stage. Two consumers that hold the tile, or panels of it, in registers first release the last stage.
    DEVICE void wait_empty(const PipelineState<Q_STAGES> &at) {
        mbarrier_wait(&steps.empty[at.stage], at.parity ^ (RECYCLED && at.stage == Q_STAGES - 1 ? 0 : 1));
    }
};

// Return where q or do of a stage begins, in bytes after `stages`; the third stage of q lies before it, in the tile.
DEVICE int q_offset(int stage) { return THIRD_Q && stage == STAGES ? K_BYTES - PANEL - (VALUES + V_BYTES) : stage * STAGE_BYTES; }
DEVICE int do_offset(int stage) { return stage * STAGE_BYTES + K_BYTES; }

// What of a step arrives together: q and do, or (APART) one of them.
template <bool Q, bool DO> struct Part {
    static constexpr bool HAS_Q = Q, HAS_DO = DO;
    DEVICE static PipelineState<Q_STAGES> state(int step) { return HAS_Q ? state_of(step) : PipelineState<Q_STAGES>{step % STAGES, step / STAGES % 2}; }
    DEVICE static void wait_empty(Shared &shared, const PipelineState<Q_STAGES> &at) {
        if (HAS_Q) shared.wait_empty(at);
        else shared.d_outs.wait_empty({at.stage, at.parity});
    }
    DEVICE static u64 *full(Shared &shared, const PipelineState<Q_STAGES> &at) {
        return HAS_Q ? &shared.steps.full[at.stage] : &shared.d_outs.full[at.stage];
    }
};
typedef Part<true, true> QAndDo;
typedef Part<true, false> OnlyQ;
typedef Part<false, true> OnlyDo;

// Consumer: wait for a step. A fence then makes data that lanes copied visible to wgmma.
DEVICE void wait_for_rows(Shared &shared, const PipelineState<Q_STAGES> &at) {
    shared.steps.wait_full(at);
    if (!BY_TMA) fence_async_proxy();
}

// Load the tile's keys and values, by one lane; with SMALL_BLOCK by one warp, one block per lane.
template <class List> DEVICE void produce_tile(const List &list, unsigned char *k_tile, u64 *bar) {
    const int lane = SMALL_BLOCK ? threadIdx.x % 32 : 0, b = static_cast<int>(list.b), g = static_cast<int>(list.g);
    int key = list.first_key;
    if (lane == 0) mbarrier_arrive_expect(bar, K_BYTES + V_BYTES);
    if constexpr (SMALL_BLOCK) {
        __syncwarp();
        if (lane >= TILE_BLOCKS) return;
        key = static_cast<int>(list.x.blocks.position(list.list, lane * BLOCK_KEYS));
        k_tile += lane * BLOCK_KEYS * 128;
    }
    tma_load_key_tile<DK>(k_tile, &list.x.k, bar, key, g, b);
    tma_load_key_tile<DV>(k_tile + VALUES, &list.x.v, bar, key, g, b);
}

// The tokens of a step that a lane holds: numbers lane and lane + 32.
template <class List> struct StepTokens {
    static constexpr int HALVES = TQ > 32 ? 2 : 1;
    int rows[HALVES];
    DEVICE StepTokens(const List &list, int step) {
        UNROLL for (int i = 0; i < HALVES; ++i) rows[i] = list.row(step, threadIdx.x % 32 + 32 * i);
    }
    // Return whether the step's tokens are adjacent; a missing last token counts as S, past the last row.
    DEVICE bool adjacent() const {
        const int lane = threadIdx.x % 32, from = __shfl_sync(ALL_LANES, rows[0], 0);
        bool all = true;
        UNROLL for (int i = 0; i < HALVES; ++i) all &= lane + 32 * i >= TQ || rows[i] == from + lane + 32 * i;
        return __ballot_sync(ALL_LANES, !all) == 0;
    }
};

// Load q and do of a step of adjacent tokens, starting at this token, by one lane.
template <class Part, class List> DEVICE void load_step(const List &list, unsigned char *q_tile, unsigned char *do_tile, u64 *full, int first) {
    const int b = static_cast<int>(list.b), g = static_cast<int>(list.g);
    mbarrier_arrive_expect(full, TQ * H * 2 * (Part::HAS_Q * DK + Part::HAS_DO * DV));
    if (Part::HAS_Q) tma_load_row_tile<DK>(q_tile, &list.x.q, full, g, first, b);
    if (Part::HAS_DO) tma_load_row_tile<DV>(do_tile, &list.x.d_o, full, g, first, b);
}

// Load q and do of a step once its stage is empty, by one warp; one token per lane if they are not adjacent.
template <class Part, class List>
DEVICE void load_tokens(const List &list, unsigned char *stages, Shared &shared, int step, const StepTokens<List> &tokens, bool adjacent) {
    const int lane = threadIdx.x % 32, b = static_cast<int>(list.b), g = static_cast<int>(list.g);
    const auto at = Part::state(step);
    Part::wait_empty(shared, at);
    unsigned char *q_tile = stages + q_offset(at.stage), *do_tile = stages + do_offset(at.stage);
    u64 *full = Part::full(shared, at);
    __syncwarp();  // all lanes have passed the wait, so the barrier may enter its next phase
    if (adjacent) {
        if (lane == 0) load_step<Part>(list, q_tile, do_tile, full, tokens.rows[0]);
        return;
    }
    if (lane == 0) mbarrier_arrive_expect(full, TQ * H * 2 * (Part::HAS_Q * DK + Part::HAS_DO * DV));
    __syncwarp();
    if (lane >= TQ) return;
    if (Part::HAS_Q) tma_load_row_tile<DK>(q_tile + lane * H * 128, &list.x.q_token, full, g, tokens.rows[0], b);
    if (Part::HAS_DO) tma_load_row_tile<DV>(do_tile + lane * H * 128, &list.x.d_o_token, full, g, tokens.rows[0], b);
}

template <class Part, class List> DEVICE void produce_tokens(const List &list, unsigned char *stages, Shared &shared) {
    typedef StepTokens<List> Tokens;
    Tokens coming(list, 0);
    for (int step = 0; step < list.steps; ++step) {
        const Tokens tokens = coming;
        coming = Tokens(list, step + 1);  // one step ahead: addresses depend on it
        load_tokens<Part>(list, stages, shared, step, tokens, tokens.adjacent());
    }
}

// A copy warp, for tokens of few bytes: load its share of a step once the stage is empty. If its tokens are not
// adjacent, the warp copies four rows at once, eight lanes per row, of every COPY_WARPS-th group of four. Copies arrive
// at the barrier asynchronously and need the consumer's fence (wait_for_rows).
template <class Part, class List>
DEVICE void copy_step(const List &list, const u16 *q, const u16 *d_out, unsigned char *stages, Shared &shared, int copier,
                      const PipelineState<Q_STAGES> &at, const StepTokens<List> &tokens, bool adjacent) {
    const int lane = threadIdx.x % 32, column = lane % 8;
    Part::wait_empty(shared, at);
    __syncwarp();
    if (adjacent) {
        u64 *full = Part::full(shared, at);
        if (copier || lane) mbarrier_arrive(full);
        else load_step<Part>(list, stages + q_offset(at.stage), stages + do_offset(at.stage), full, tokens.rows[0]);
        return;
    }
#pragma unroll 1
    for (int four = copier; four < ROWS / 4; four += COPY_WARPS) {
        const int tile_row = 4 * four + lane / 8, head = tile_row % H;
        const int last = StepTokens<List>::HALVES - 1;
        const int row = __shfl_sync(ALL_LANES, 4 * four / H < 32 ? tokens.rows[0] : tokens.rows[last], tile_row / H % 32);
        const bool exists = row < list.x.p.S;
        const i64 s = exists ? row : 0;
        const u16 *q_row = q + s * list.x.p.q.stride_s + head * list.x.p.q.stride_h;
        const u16 *do_row = d_out + s * list.x.d_out.stride_s + head * list.x.d_out.stride_h;
        const int place = swizzled(tile_row, column);
        unsigned char *q_to = stages + q_offset(at.stage) + place, *do_to = stages + do_offset(at.stage) + place;
        UNROLL for (int c = 0; c < (Part::HAS_Q ? DK : 0); c += 64) cp_async_16(reinterpret_cast<u16 *>(q_to + c / 64 * PANEL), q_row + c, exists);
        UNROLL for (int c = 0; c < (Part::HAS_DO ? DV : 0); c += 64) cp_async_16(reinterpret_cast<u16 *>(do_to + c / 64 * PANEL), do_row + c, exists);
    }
    cp_async_mbarrier_arrive(Part::full(shared, at));
}

template <class List> DEVICE void copy_tokens(const List &list, unsigned char *stages, Shared &shared, int copier) {
    const int column = threadIdx.x % 8 * 8;
    const u16 *q = list.x.p.q.group(list.b, list.g) + column, *d_out = list.x.d_out.group(list.b, list.g) + column;
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const StepTokens<List> tokens(list, step);  // read before the stage is empty
        const bool adjacent = tokens.adjacent();
        if constexpr (APART) {
            copy_step<OnlyDo>(list, q, d_out, stages, shared, copier, OnlyDo::state(step), tokens, adjacent);
            copy_step<OnlyQ>(list, q, d_out, stages, shared, copier, at, tokens, adjacent);
        } else copy_step<QAndDo>(list, q, d_out, stages, shared, copier, at, tokens, adjacent);
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// SMALL_BLOCK: return one bit per key of the tile: listed token i of a step selected and sees it. starts: first keys of
// the tile's blocks, one per lane. All lanes must call this.
template <class List> DEVICE uint2 seen_keys(const List &list, int row, int step, int i, int starts) {
    const bool exists = row < list.x.p.S;
    const u32 chosen = exists ? list.chosen(step, i) : 0;
    const int limit = exists ? row_limit(list.x.p, list.b, row) : 0;
    u32 bits[2] = {0, 0};
    UNROLL for (int slot = 0; slot < TILE_BLOCKS; ++slot) {
        const int first = slot * BLOCK_KEYS, keys = min(limit - __shfl_sync(ALL_LANES, starts, slot), BLOCK_KEYS);  // causal clamp
        if (chosen >> slot & 1) bits[first / 32] |= (~0u >> (32 - keys)) << first % 32;
    }
    return make_uint2(bits[0], bits[1]);
}

// Load lse, delta and limits (or key bits) of a step, by one warp, two rows per lane, which are adjacent with THIRD_Q.
template <class List> DEVICE void copy_statistics(const List &list, Shared &shared) {
    constexpr int TOKENS = THIRD_Q ? 1 : 2;  // of a lane
    const int lane = threadIdx.x % 32, first = THIRD_Q ? 2 * lane : lane;
    constexpr int NEXT = THIRD_Q ? 1 : 32;  // from the lane's first row to the other
    int coming[TOKENS], starts = 0;
    if constexpr (SMALL_BLOCK) starts = static_cast<int>(list.x.blocks.position(list.list, lane % TILE_BLOCKS * BLOCK_KEYS));
    for (int i = 0; i < TOKENS; ++i) coming[i] = list.row(0, (first + NEXT * i) / H);
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        const int rows[2] = {coming[0], coming[TOKENS - 1]};
        for (int i = 0; i < TOKENS; ++i) coming[i] = list.row(step + 1, (first + NEXT * i) / H);
        uint2 seen[TOKENS];  // SMALL_BLOCK; computed before the stage is empty, to hide the latency
        for (int i = 0; i < TOKENS; ++i)
            if constexpr (SMALL_BLOCK) seen[i] = seen_keys(list, rows[i], step, (first + NEXT * i) / H, starts);
        shared.wait_empty(at);
        for (int i = 0; i < 2; ++i) {
            const int row = first + NEXT * i;
            const bool exists = rows[i] < list.x.p.S;
            const i64 index = exists ? ((list.b * list.x.p.S + rows[i]) * list.x.p.G + list.g) * H + row % H : 0;
            cp_async_4(&shared.lse[at.stage][row], list.x.lse + index, exists);
            cp_async_4(&shared.delta[at.stage][row], list.x.delta + index, exists);
            shared.visible[at.stage].store(row, SMALL_BLOCK || !exists ? 0 : row_limit(list.x.p, list.b, rows[i]) - list.first_key, seen[i % TOKENS]);
        }
        cp_async_mbarrier_arrive(&shared.steps.full[at.stage]);
        mbarrier_arrive(&shared.steps.full[at.stage]);
    }
}

// Load q and do of every step of adjacent tokens, by one lane.
template <class List> DEVICE void produce_boxes(const List &list, unsigned char *stages, Shared &shared) {
    for (int step = 0; step < list.steps; ++step) {
        const auto at = state_of(step);
        shared.wait_empty(at);
        load_step<QAndDo>(list, stages + q_offset(at.stage), stages + do_offset(at.stage), &shared.steps.full[at.stage], list.row(step, 0));
    }
}

// Warp `producer` of the producer warpgroup: load its share of the listed rows.
template <class List> DEVICE void produce_rows(const List &list, unsigned char *stages, Shared &shared, int producer) {
    if (producer == 1) copy_statistics(list, shared);
    else if constexpr (ADJACENT) {
        if (producer == 0 && threadIdx.x % 32 == 0) produce_boxes(list, stages, shared);
    } else if constexpr (!BY_TMA) copy_tokens(list, stages, shared, producer ? producer - 1 : 0);
    else if (producer == 0) produce_tokens<Part<true, !APART>>(list, stages, shared);
    else if (APART && producer == 2) produce_tokens<OnlyDo>(list, stages, shared);
}

// Zero the rows that no token fills, because p = 1 there and q and do must contribute 0.
DEVICE void zero_stages(unsigned char *stages) {
    if (TQ * H < ROWS)
        for (int i = THIRD_Q ? q_offset(STAGES) / 16 + threadIdx.x : threadIdx.x; i < STAGES * STAGE_BYTES / 16; i += 128 * (CONSUMERS + 1))
            *reinterpret_cast<uint4 *>(stages + i * 16) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
}

// Replace s^T by p^T.
DEVICE void exponentiate(float (&s)[ROWS / 2], const float *lses, float c) {
    UNROLL for (int j = 0; j < ROWS / 8; ++j) {
        const float2 lse = *reinterpret_cast<const float2 *>(lses + 8 * j + threadIdx.x % 4 * 2);
        UNROLL for (int i = 0; i < 4; ++i) s[4 * j + i] = exp2_fast(s[4 * j + i] * c - (i % 2 ? lse.y : lse.x) * LOG2_E);
    }
}

// Begin dv += p^T do and dk += ds^T q, ds^T = p^T * (dp^T - delta), by 16 rows of a step: the operands p and ds of some
// are computed while the products of those before are.
DEVICE void begin_sums(float (&dv)[DV / 2], float (&dk)[DK / 2], u32 (&p)[ROWS / 16][4], u32 (&ds)[ROWS / 16][4], const float (&s)[ROWS / 2],
                       const float (&dp)[ROWS / 2], const float *deltas, u32 do_tile, u32 q_tile) {
    UNROLL for (int k = 0; k < ROWS / 16; ++k) {
        UNROLL for (int j = 0; j < 4; ++j) {
            const int i = 8 * k + 2 * j;  // two rows of a key
            const float2 delta = *reinterpret_cast<const float2 *>(deltas + 16 * k + j / 2 * 8 + threadIdx.x % 4 * 2);
            p[k][j] = pack(s[i], s[i + 1]);
            ds[k][j] = pack(s[i] * (dp[i] - delta.x), s[i + 1] * (dp[i + 1] - delta.y));
        }
        wgmma_fence();
        wgmma_registers(dv, p[k], descriptor(do_tile + TRANSPOSED + k * 2048 / 16));
        wgmma_registers(dk, ds[k], descriptor(q_tile + TRANSPOSED + k * 2048 / 16));
    }
    wgmma_commit();
}

// Destination of a consumer warp's 16 keys.
template <class List> DEVICE GradientRows gradient_rows(const List &list) {
    const int key0 = threadIdx.x % 128 / 32 * 16;
    const i64 S_kv = list.x.p.S_kv;
    GradientRows rows(list, list.x.lists, S_kv, key0);
    if constexpr (SMALL_BLOCK) {
        rows.row = list.bg * S_kv;
        for (int r = 0; r < 2; ++r) {
            const i64 position = list.x.blocks.position(list.list, key0 + threadIdx.x % 32 / 4 + 8 * r);
            rows.keys[r] = position < S_kv ? static_cast<int>(position) : -1;
        }
    }
    return rows;
}

// A segment of a unit's list (key_to_rows.cuh), for block_partials.cu and block_gradients.cu.

// A CTA's work: the entries of a segment. A warp finds it, in shared memory.
struct UnitSegment {
    const int *listed;            // its entries, or a copy of them
    i64 list;
    i64 first_entry;              // where entry 0 of (b, g) is among [pairs, section, n * reach], those of all entries of the unit
    int entries, masked_entries;  // all, and those at the beginning whose rows may lie within the tile
    int each;                     // entries of a row
    int first_key, b, g;
    int part;  // its number among the segments of the unit

    // Whether the unit has a segment number `index`, in the order of the lists or that of order_segments.cu.
    template <int WIDTH = KEYS>
    DEVICE bool find(const UnitLists &lists, const Problem &p, const int *all_entries, i64 reach, u32 index, const uint2 *order = nullptr) {
        const i64 segment = lists.segments[lists.first_list] + index;
        entries = 0;
        if (segment >= lists.segments[lists.end_list]) return false;
        list = order ? order[segment].x : lists.list_of(segment);
        const i64 number = order ? order[segment].y : segment - lists.segments[list];
        part = static_cast<int>(lists.segments[list] - lists.segments[lists.first_list] + number);
        const UnitList unit(lists, list);
        const i64 begin = lists.begins[list] + number * lists.segment;
        listed = all_entries + begin;
        entries = static_cast<int>(min(lists.begins[list + 1] - begin, lists.segment));
        masked_entries = p.q_pos ? entries : static_cast<int>(lists.begins[list] + WIDTH - begin);
        each = static_cast<int>(p.n * reach);
        first_key = static_cast<int>(unit.tile) * WIDTH;
        b = static_cast<int>(unit.pair / p.G);
        g = static_cast<int>(unit.pair % p.G);
        first_entry = ((unit.pair - lists.first_pair) * lists.section - lists.first_row) * each;
        return true;
    }
};

// The steps of a segment. Its numbers stay in shared memory: the producers have few registers.
template <class Arguments, class Segment = UnitSegment> struct UnitSteps {
    const Arguments &x;
    const Segment &segment;
    const int first_key = segment.first_key, steps = (segment.entries + TQ - 1) / TQ;
    const i64 b = segment.b, g = segment.g;
    DEVICE int row_of(int entry) const { return static_cast<int>(static_cast<u32>(segment.listed[entry]) / static_cast<u32>(segment.each)); }
    DEVICE int row(int step, int i) const {
        const int entry = step * TQ + i;
        return i < TQ && entry < segment.entries ? row_of(entry) : static_cast<int>(x.p.S);
    }
    // The number in the segment of the entry that tile row i of a step belongs to; negative if there is none.
    DEVICE int number(int step, int i) const {
        const int at = step * TQ + i / H;
        return i < TQ * H && at < segment.entries ? at : -1;
    }
    DEVICE int entry(int step, int i) const {
        const int at = number(step, i);
        return at < 0 ? -1 : segment.listed[at];
    }
};

// One past the last key of the tile that any row of the segment sees; for all threads of the consumers.
template <int THREADS, class Steps> DEVICE int last_seen_key(const Steps &list) {
    __shared__ int limits[THREADS / 32];
    const Problem &p = list.x.p;
    int limit = 0;
    for (int entry = p.q_pos ? threadIdx.x : list.segment.entries - 1; entry < list.segment.entries; entry += THREADS)  // by default the last's
        limit = max(limit, row_limit(p, list.b, list.row_of(entry)) - list.first_key);
    for (int far = 16; far > 0; far /= 2) limit = max(limit, __shfl_xor_sync(ALL_LANES, limit, far));
    if (threadIdx.x % 32 == 0) limits[threadIdx.x / 32] = limit;
    named_barrier<THREADS>(1);
    int most = limits[0];
    UNROLL for (int warp = 1; warp < THREADS / 32; ++warp) most = max(most, limits[warp]);
    return most;
}
