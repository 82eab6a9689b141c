// Steps of KEYS keys gathered from blocks of any size, with separate pipelines for keys and values, for
// forward_gather.cu and dq_gather.cu.
//
// A unit is one load: a block, or KEYS keys of a larger block. Units of smaller blocks fill a step in the order of the
// tile's list, partial blocks first (token_tiles.cuh); missing units of the last step hold zeros. One bit per (token,
// unit) tells whether the token selected the unit; for blocks of KEYS keys or more, one bit per token.
//
// Producer warps: warp 0 loads K, warp 1 loads q and V. Units of 8 keys or more come through TMA: a box is eight keys
//   with all their columns, or KEYS keys by 64 columns. Boxes of four keys would take longer than the products, so
//   lanes copy such units with cp.async, half of them by warps 2 (V) and 3 (K).
//
//   BLOCK   keys per block: a divisor of KEYS from 4 on, or a multiple of KEYS
//   STAGES  stages of K; V has one less, because a step's first GEMM starts with the second GEMM of the step before
#pragma once
#include "token_tiles.cuh"

constexpr int UNIT = BLOCK < KEYS ? BLOCK : KEYS, UNITS = KEYS / UNIT, PARTS = BLOCK / UNIT;  // keys per unit; units per step; units per block
constexpr int VALUE_STAGES = STAGES - 1;
constexpr bool COPIES = UNIT < 8, GROUPED = UNIT >= 8 && UNIT < KEYS;
constexpr int LOADERS = COPIES ? 2 : 1;  // warps that load K; as many load V
constexpr int HALVES = TOKENS > 32 ? 2 : 1;  // a lane has the tokens lane and lane + 32
// Byte offsets in a tile of keys or values between 64-column panels, and between groups of eight rows.
template <int COLUMNS> struct Layout {
    static constexpr int NEXT = GROUPED ? 1024 : PANEL, GROUP = GROUPED ? COLUMNS * 16 : 1024;
};

typedef If<TOKENS <= 32, u32, u64> TileBits;  // one bit per token of a tile

struct GatherShared {
    Pipeline<STAGES> keys;
    Pipeline<VALUE_STAGES> values;
    TileQueue tiles;
    Pipeline<1> q[CONSUMERS];
    u64 raw[2];                     // mbarriers of K and V that must be partly zeroed before consumers read them
    u64 tokens[STAGES];             // bit r: token r of the tile selected some unit of the step
    u16 selected[STAGES][TOKENS];   // per token; bit u: it selected unit u
    int first_key[STAGES][UNITS];   // first key of each unit

    DEVICE void init() {
        keys.init(COPIES ? 32 * LOADERS + 1 : 1, 4 * CONSUMERS);  // all lanes' copies, and one arrival for the metadata
        values.init(COPIES ? 32 * LOADERS : 1, 4 * CONSUMERS);
        tiles.pipeline.init(1, 4 * CONSUMERS + 2 * LOADERS - 1);
        for (int i = 0; i < CONSUMERS; ++i) q[i].init(1, 4);
        mbarrier_init(&raw[0], 1);
        mbarrier_init(&raw[1], 1);
        mbarrier_fence_init();
    }
};

// 32 units of a tile, one per lane.
struct Units {
    // First key; its page, -1 if no row sees any key; upper bound on one past the last key that some row sees.
    int key, page, visible;
    TileBits rows;  // bit r: token r of the tile selected the block

    DEVICE Units(const Problem &p, const TilePlan &plan, const TokenTile &tile, int2 counts, int first) : key(0), rows(0) {
        const int lane = threadIdx.x % 32, e = first + lane, partial = (counts.y - counts.x) * PARTS;
        const bool exists = e < counts.y * PARTS;
        if (exists) {
            const int at = list_offset(counts, e / PARTS);
            key = Union::block_key(p, plan, tile, at) + e % PARTS * UNIT;
            rows = static_cast<TileBits>(Union::selected_by(p, plan, tile, at));
        }
        Union::prefetch(p, plan, tile, first / PARTS + 64);  // copies depend on the list
        visible = exists ? key + UNIT : key;
        for (int i = first; i < min(partial, first + 32); ++i) {
            const int last = last_visible(p, tile, __shfl_sync(ALL_LANES, rows, i - first));
            if (i == e) visible = last;
        }
        page = key < visible ? page_of(p, tile.b, key) : -1;
    }
    // Transpose bits of tokens per unit to bits of units, one per lane, that the lane's tokens selected.
    DEVICE void transpose(u32 (&units)[HALVES]) const {
        UNROLL for (int r = 0; r < TOKENS; ++r) {
            const u32 all = __ballot_sync(ALL_LANES, rows >> r & 1);
            if (r % 32 == threadIdx.x % 32) units[r / 32] = all;
        }
    }
    // Publish a step: lanes from `first` on. units: `transpose`.
    DEVICE void publish(GatherShared &shared, int stage, int first, const u32 (&units)[HALVES]) const {
        const int lane = threadIdx.x % 32;
        u64 tokens = UNITS == 1 ? static_cast<u64>(__shfl_sync(ALL_LANES, rows, first)) : 0;
        UNROLL for (int half = 0; half < (UNITS > 1 ? HALVES : 0); ++half) {
            const u32 own = 32 * half + lane < TOKENS ? units[half] >> first & ((1u << UNITS) - 1) : 0;
            if (32 * half + lane < TOKENS) shared.selected[stage][32 * half + lane] = static_cast<u16>(own);
            tokens |= static_cast<u64>(__ballot_sync(ALL_LANES, own != 0)) << 32 * half;
        }
        if (lane == 0) shared.tokens[stage] = tokens;
    }
    // Return whether no row sees some keys of the unit.
    DEVICE bool cut() const { return visible < key + UNIT; }
    // Zero the keys that no row sees in a step (lanes from `first` on), in whole rows: the swizzle does not matter.
    template <int COLUMNS> DEVICE void zero_unseen(unsigned char *stage, int first) const {
        for (int row = threadIdx.x % 32; row < KEYS; row += 32) {
            const int unit = first + row / UNIT;
            if (__shfl_sync(ALL_LANES, key, unit) + row % UNIT < __shfl_sync(ALL_LANES, visible, unit)) continue;
#pragma unroll 1
            for (int i = 0; i < COLUMNS / 8; ++i)
                *reinterpret_cast<uint4 *>(stage + i / 8 * Layout<COLUMNS>::NEXT + row / 8 * Layout<COLUMNS>::GROUP + row % 8 * 128 + i % 8 * 16) =
                    make_uint4(0, 0, 0, 0);
        }
        fence_async_proxy();
        __syncwarp();
    }
};

// A producer warp's loads of K or of V; if two warps share them, part 0 or 1 of each step's units.
template <int COLUMNS, bool OF_KEYS> struct StepProducer {
    static constexpr int N = OF_KEYS ? STAGES : VALUE_STAGES, BYTES = COLUMNS / 64 * PANEL;
    GatherShared &shared;
    Pipeline<N> &pipeline;
    const TensorMap &map;
    unsigned char *stages;
    const int part;
    PipelineState<N> at;
    int raw_parity = 0;

    // Copy the rows of a step's units with cp.async, 16 bytes per lane, in few instructions: they would be the kernel's bound.
    // CUT: zeros for keys that no row sees.
    template <bool CUT> DEVICE void copy(const KeysTensor &x, const Units &units, int first, const TokenTile &tile, unsigned char *stage) {
        constexpr int CHUNKS = COLUMNS / 8, AT_ONCE = 32 / CHUNKS;                // chunks per row; rows per copy
        constexpr int SHARE = UNITS / LOADERS, TOGETHER = COPIES ? 8 / UNIT : 1;  // units per warp; units in eight rows of the stage
        const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, lane_row = lane / CHUNKS;
        const bool copies = CHUNKS * AT_ONCE == 32 || lane_row < AT_ONCE;
        const u32 stride = static_cast<u32>(2 * x.stride_n);  // bytes; sm90.py refuses more
        const u16 *group = x.data + (PAGED ? 0 : tile.b * x.stride_b) + tile.g * x.stride_g;
        const char *from = reinterpret_cast<const char *>(group + lane_row * x.stride_n + chunk * 8);
        u32 to = shared_address(stage) + chunk / 8 * PANEL + part * SHARE * UNIT * 128 + swizzled(lane_row, chunk % 8);
        constexpr int UNROLLED = CUT ? 1 : 2;
#pragma unroll UNROLLED
        for (int u = 0; u < SHARE; u += TOGETHER, to += TOGETHER * UNIT * 128)
            UNROLL for (int i = 0; i < TOGETHER; ++i) {
                const int at = first + part * SHARE + u + i;
                const u32 key = __shfl_sync(ALL_LANES, units.key, at);
                const int seen = CUT ? __shfl_sync(ALL_LANES, units.visible, at) - static_cast<int>(key) - lane_row : UNIT;
                const char *row = from + static_cast<u64>(static_cast<u32>(in_page(key))) * stride;
                if (PAGED) row += max(__shfl_sync(ALL_LANES, units.page, at), 0) * 2 * x.stride_b;
                UNROLL for (int r = 0; r < UNIT; r += AT_ONCE) {
                    const u16 *chunks = reinterpret_cast<const u16 *>(row + static_cast<u64>(stride) * r);
                    if (copies) cp_async_16((to ^ (i * UNIT + r) * 16) + (i * UNIT + r) * 128, chunks, r < seen);
                }
            }
    }
    // Load a step: the units from lane `first` on.
    DEVICE void load(const Problem &p, const Units &units, int first, const TokenTile &tile, const u32 (&selected)[HALVES]) {
        const int g = static_cast<int>(tile.g), lane = threadIdx.x % 32, unit = lane - first;
        const bool own = unit >= 0 && unit < UNITS;
        unsigned char *stage = stages + at.stage * BYTES;
        if (COPIES) {
            const KeysTensor &x = OF_KEYS ? p.k : p.v;
            if (__any_sync(ALL_LANES, own && units.cut())) copy<true>(x, units, first, tile, stage);
            else copy<false>(x, units, first, tile, stage);
            cp_async_mbarrier_arrive(&pipeline.full[at.stage]);
            if (OF_KEYS && part == 0) {
                if (own) shared.first_key[at.stage][unit] = units.key;
                units.publish(shared, at.stage, first, selected);
                __syncwarp();
                pipeline.announce(at.stage);
            }
            at.next();
            return;
        }
        const bool zeroes = __any_sync(ALL_LANES, own && units.page >= 0 && units.cut());
        u64 *raw = &shared.raw[OF_KEYS ? 0 : 1], *landed = zeroes ? raw : &pipeline.full[at.stage];
        if (OF_KEYS) {
            if (own) shared.first_key[at.stage][unit] = units.key;
            units.publish(shared, at.stage, first, selected);
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive_expect(landed, BYTES);
        __syncwarp();
        if (own && GROUPED) {
            UNROLL for (int i = 0; i < UNIT; i += 8)
                tma_load_key_group(stage + (unit * UNIT + i) / 8 * Layout<COLUMNS>::GROUP, &map, landed, in_page(units.key) + i, g, units.page);
        } else if (own) {
            UNROLL for (int c = 0; c < COLUMNS / 64; ++c)
                tma_load_keys(stage + c * PANEL + unit * UNIT * 128, &map, landed, c * 64, in_page(units.key), g, units.page);
        }
        if (zeroes) {
            mbarrier_wait(raw, raw_parity);
            raw_parity ^= 1;
            units.template zero_unseen<COLUMNS>(stage, first);
            pipeline.announce(at.stage);
        }
        at.next();
    }
    // Load all steps of a tile; call `before(number)` before each.
    template <class Before>
    DEVICE void load_tile(const Problem &p, const TilePlan &plan, const TokenTile &tile, int2 counts, Before before) {
        const int all = counts.y * PARTS;
        for (int e = 0; e < all; e += 32) {
            const Units units(p, plan, tile, counts, e);
            u32 selected[HALVES] = {};
            if (OF_KEYS && UNITS > 1 && part == 0) units.transpose(selected);
            for (int i = 0; i < 32 && e + i < all; i += UNITS) {
                before((e + i) / UNITS);
                pipeline.wait_empty(at);
                load(p, units, i, tile, selected);
            }
        }
    }
};

DEVICE int steps_of(int blocks) { return (blocks * PARTS + UNITS - 1) / UNITS; }

// Producer warp: fetch the CTA's tiles and load K of their steps.
template <class Arguments> DEVICE void produce_keys(const Arguments &x, unsigned char *stages, GatherShared &shared) {
    StepProducer<DK, true> producer{shared, shared.keys, x.k, stages, 0};
    TileScheduler scheduler{shared.tiles, x.plan};
    for (u32 coming = blockIdx.x; scheduler.publish(coming, x.p);) {
        // Request the next tile late: this one delays it. Two steps hide the latency of the atomic counter.
        const int ask = max(steps_of(scheduler.counts.y) - 2, 0);
        u32 answer = 0;
        if (scheduler.counts.y == 0) answer = x.plan.ask_for_tile();
        producer.load_tile(x.p, x.plan, scheduler.tile(x.p.G), scheduler.counts, [&](int step) {
            if (step == ask) answer = x.plan.ask_for_tile();
        });
        coming = x.plan.tile_of(answer);
    }
}
// Other producer warps: for each tile that warp 0 publishes, call `before(tile)`, then load its steps.
template <int COLUMNS, bool OF_KEYS, int N, class Arguments, class Before>
DEVICE void produce_part(Pipeline<N> &pipeline, int part, const TensorMap &map, const Arguments &x, unsigned char *stages, GatherShared &shared,
                         Before before) {
    StepProducer<COLUMNS, OF_KEYS> producer{shared, pipeline, map, stages, part};
    TileScheduler scheduler{shared.tiles, x.plan};
    while (scheduler.next_tile()) {
        const TokenTile tile = scheduler.tile(x.p.G);
        before(scheduler, tile);
        producer.load_tile(x.p, x.plan, tile, scheduler.counts, [](int) {});
    }
}

// A step of a tile: the stages of its keys and values, and the consumer's tokens that selected some of its units.
struct GatheredStep {
    PipelineState<STAGES> keys;
    PipelineState<VALUE_STAGES> values;
    TokenBits rows;
};

// A consumer's position in the steps of its tile.
struct GatherReader {
    typedef GatheredStep Step;
    DEVICE static int steps_of(int blocks) { return ::steps_of(blocks); }
    GatherShared &shared;
    const int consumer;
    const u32 keys, values;  // wgmma operands of the first stages
    PipelineState<STAGES> keys_at = {};
    PipelineState<VALUE_STAGES> values_at = {};
    int left = 0;  // steps of the tile after the one found last

    DEVICE void begin_tile(int steps) { left = steps; }
    DEVICE int masked_key(const GatheredStep &, int whole) const { return left >= whole ? 0 : NO_MASK; }
    // Find the next step that a row of this consumer selected; release others, once their values have arrived. A
    // consumer that holds values in stage `held` must not wait for a step whose values need it.
    DEVICE bool find(GatheredStep &step, int held = NO_STAGE) {
        while (left > 0 && values_at.stage != held) {
            shared.keys.wait_full(keys_at);
            if (COPIES) fence_async_proxy();
            step = {keys_at, values_at, static_cast<TokenBits>(shared.tokens[keys_at.stage] >> consumer * TQ) & TOKEN_MASK};
            --left;
            keys_at.next();
            values_at.next();
            if (step.rows) return true;
            shared.values.wait_full(step.values);
            __syncwarp();  // all lanes have read the bits
            release_keys(step);
            release(step);
        }
        return false;
    }
    DEVICE static int last_stage(const GatheredStep &step) { return step.values.stage; }  // that a consumer releases
    // Return the units of a step that a token of the consumer selected.
    DEVICE u32 selected(const GatheredStep &step, int token) const {
        return UNITS == 1 ? step.rows >> token & 1 : shared.selected[step.keys.stage][consumer * TQ + token];
    }
    // Overwrite elements of keys that a row does not see with `value`.
    template <class Tile>
    DEVICE void mask_keys(Tile &s, const GatheredStep &step, const RowPair &rows, float value) const {
        constexpr int N = elements<Tile>;
        const int *first = shared.first_key[step.keys.stage];
        const int limits[2] = {rows.limit(0), rows.limit(1)};
        u32 unseen = 0;  // one bit per element; the loop is not unrolled, because registers are scarce
#pragma unroll 2
        for (int i = 0; i < N; ++i) {
            const int column = column_of(i), key = first[column / UNIT] + column % UNIT;
            UNROLL for (int r = 0; r < 2; ++r) unseen |= static_cast<u32>(hidden(rows.problem, key, limits[r])) << (N * r + i);
        }
        UNROLL for (int r = 0; r < 2; ++r)
            UNROLL for (int i = 0; i < N; ++i)
                if (unseen >> (N * r + i) & 1) element(s, r, i) = value;
    }
    DEVICE u32 keys_of(const GatheredStep &step) const { return uniform(keys + step.keys.stage * (K_BYTES / 16)); }  // an operand
    DEVICE u32 values_of(const GatheredStep &step) const { return uniform(values + step.values.stage * (V_BYTES / 16)); }
    DEVICE void release_keys(const GatheredStep &step) { shared.keys.release(step.keys.stage); }
    DEVICE void release(const GatheredStep &step) { shared.values.release(step.values.stage); }
};

// Overwrite elements of units that a row did not select with `value`; a step of one unit is left to the caller.
template <class Tile> DEVICE void mask_units(Tile &s, const u32 (&units)[2], float value) {
    if (UNITS == 1) return;
    const int shift = UNIT == 4 ? threadIdx.x % 4 / 2 : 0;  // a lane holds two of eight columns
    UNROLL for (int r = 0; r < 2; ++r)
        UNROLL for (int i = 0; i < elements<Tile>; ++i)
            if (!(units[r] >> shift >> i / 2 * 8 / UNIT & 1)) element(s, r, i) = value;
}

// A warp of the producer. rows(scheduler, tile, i) loads the rows of consumer i, by the warp that loads values.
template <class Arguments, class Rows>
DEVICE void produce_gathered(const Arguments &x, unsigned char *keys, unsigned char *values, GatherShared &shared, int producer, Rows rows) {
    if (producer == 0) produce_keys(x, keys, shared);
    else if (producer <= LOADERS)  // rows are free when the first stage of values is
        produce_part<DV, false>(shared.values, producer - 1, x.v, x, values, shared, [&](TileScheduler &scheduler, const TokenTile &tile) {
            if (producer > 1) return;
#pragma unroll 1
            for (int i = 0; i < CONSUMERS; ++i) rows(scheduler, tile, i);
        });
    else if (COPIES && producer == 3)
        produce_part<DK, true>(shared.keys, 1, x.k, x, keys, shared, [](TileScheduler &, const TokenTile &) {});
}
