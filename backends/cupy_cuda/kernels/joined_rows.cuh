// Rows of join_partials.cu and join_shares.cu: 64 rows of a unit, TQ adjacent tokens times H heads. The kernels compute
// the tiles of keys that all of the tokens selected (shared_tiles.cu), and add the partials of all other entries: while
// one CTA multiplies, others on the multiprocessor read partials at memory speed.
//
// Partials: each warp owns 16 rows, and loads one partial per token and round into one of RING stages, by bulk loads.
// The stages reuse the memory of the products. Accumulators are exchanged within a quad once, so that a lane holds
// eight adjacent columns of every 32.
//
//   TILE          keys per shared tile: 64, or 128, which are two steps
//   H, EACH       heads per group, a divisor of 64; entries per row, n * reach, at most 64
//   PER_SM, RING  CTAs per multiprocessor; stages per warp
#pragma once
#include "key_to_rows.cuh"
#include "hopper_tiles.cuh"

constexpr int KEYS = 64, TQ = 64 / H;  // keys per step; adjacent tokens that may share a tile, with H heads each
constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL;  // of keys and values, and of 64 rows of q and do
constexpr int RUN = H < 16 ? H : 16;                                 // rows of a token in a warp

struct UnitArguments {
    Problem p;
    i64 reach;
    const u64 *shared, *listed;  // [B,S,G], of shared_tiles.cu
    i64 rows, first_pair, first_row, pairs, section;  // `UnitRows` of units.py
};

// Return row r (0 or 1) of a thread's two rows, 8 apart, of the 64.
DEVICE int row_of_tile(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

// The CTA's TQ tokens of a pair (b, g).
struct Tokens {
    u32 pair, within;            // index of the pair, and of the first token, in the unit
    u32 b, g;                    // of the pair
    i64 s;                       // the first token
    int count, lowest, highest;  // tokens that exist; smallest and largest row_limit
    template <class Arguments> DEVICE Tokens(const Arguments &x) {
        const u32 each = (static_cast<u32>(x.rows) + TQ - 1) / TQ, G = x.p.G;
        pair = blockIdx.x / each;
        within = blockIdx.x % each * TQ;
        b = (static_cast<u32>(x.first_pair) + pair) / G;
        g = (static_cast<u32>(x.first_pair) + pair) % G;
        s = x.first_row + within;
        count = static_cast<int>(min(x.rows - within, static_cast<i64>(TQ)));
        int least = 0x7fffffff, most = 0;
        for (int i = threadIdx.x % 32; i < count; i += 32) {
            const int limit = row_limit(x.p, b, s + i);
            least = min(least, limit);
            most = max(most, limit);
        }
        lowest = __reduce_min_sync(ALL_LANES, least);
        highest = __reduce_max_sync(ALL_LANES, most);
    }
    DEVICE i64 index(const Problem &p, int token) const { return (b * p.S + s + token) * p.G + g; }  // in [B,S,G]
    // Overwrite elements of keys that this thread's rows do not see. key: the tile's first key.
    DEVICE void mask(const Problem &p, float (&s_tile)[KEYS / 2], int key, float value) const {
        if (lowest >= key + KEYS) return;
        int limits[2];
        UNROLL for (int r = 0; r < 2; ++r) limits[r] = row_limit(p, b, s + min(row_of_tile(r) / H, count - 1)) - key;
        mask_columns(s_tile, 0, limits, value);
    }
    // Zero the keys or values of a tile from `key` on that no row sees, because 0 * NaN is NaN.
    DEVICE void zero_unseen(unsigned char *tile, int bytes, int key) const {
        if (highest >= key + KEYS) return;
        for (int panel = 0; panel < bytes; panel += PANEL)
            for (int i = (highest - key) * 8 + threadIdx.x; i < KEYS * 8; i += THREADS)
                *reinterpret_cast<uint4 *>(tile + panel + i * 16) = make_uint4(0, 0, 0, 0);
        fence_async_proxy();
        __syncthreads();
    }
};

// mbarriers of q (and do), of a tile's keys and values, and of the warps' stages.
struct Barriers {
    u64 rows, k, v, partials[WARPS][RING];
    DEVICE void init() {
        mbarrier_init(&rows, 1);
        mbarrier_init(&k, 1);
        mbarrier_init(&v, 1);
        for (int i = 0; i < WARPS * RING; ++i) mbarrier_init(&partials[0][i], 1);
        mbarrier_fence_init();
    }
};

// Iterator over the tiles that all of the tokens selected, in the order of the first token's entries.
template <class Arguments> struct SharedTiles {
    const Arguments &x;
    const int g, b, limit, last;
    const i64 leader;
    u64 left;
    int key = -1;  // of the step
    unsigned char *const k_tile, *const v_tile;
    Barriers &full;
    DEVICE SharedTiles(const Arguments &x, const Tokens &tokens, unsigned char *k_tile, unsigned char *v_tile, Barriers &full)
        : x(x), g(tokens.g), b(tokens.b), limit(row_limit(x.p, tokens.b, tokens.s)), last(tokens.highest), leader(tokens.index(x.p, 0)), left(x.shared[leader]),
          k_tile(k_tile), v_tile(v_tile), full(full) {}
    // Return the first key of the next step, negative if none is left.
    DEVICE int next_key() {
        key += KEYS;
        if (TILE > KEYS && key % TILE == KEYS && key < last) return key;
        if (!left) return key = -1;
        const int entry = __ffsll(left) - 1;
        left &= left - 1;
        return key = tile_of<TILE>(x.p, static_cast<int>(x.reach), leader, limit, entry) * TILE;
    }
    // Load the keys or values of the tile from `key` on, by one thread.
    DEVICE void load_keys(int key) const {
        mbarrier_arrive_expect(&full.k, K_BYTES);
        tma_load_key_tile<DK>(k_tile, &x.k, &full.k, in_page(key), g, page_of(x.p, b, key));
    }
    DEVICE void load_values(int key) const {
        mbarrier_arrive_expect(&full.v, V_BYTES);
        tma_load_key_tile<DV>(v_tile, &x.v, &full.v, in_page(key), g, page_of(x.p, b, key));
    }
};

// Exchange an accumulator within a quad: of every 32 columns, a lane then holds eight adjacent ones.
template <int N> DEVICE void adjacent_columns(float (&acc)[N]) {
    UNROLL for (int j = 0; j < N; j += 16)
        UNROLL for (int i = 0; i < 4; ++i) {
            u32 x[4];
            UNROLL for (int n = 0; n < 4; ++n) x[n] = static_cast<u32>(__float_as_int(acc[j + 4 * n + i]));
            quad_transpose(x);
            UNROLL for (int n = 0; n < 4; ++n) acc[j + 4 * n + i] = __int_as_float(static_cast<int>(x[n]));
        }
}

// Return the index of the partial of entry 0 of a row of the tile; of the last token for rows without one.
template <class Arguments> DEVICE i64 first_partial(const Arguments &x, const Tokens &tokens, int row) {
    const i64 token = tokens.pair * x.section + tokens.within + min(row / H, tokens.count - 1);
    return token * EACH * H + row % H;
}
// Return the entries of that row's token that have partials, as bits.
template <class Arguments> DEVICE u64 listed_entries(const Arguments &x, const Tokens &tokens, int row) {
    return row / H < tokens.count ? x.listed[tokens.index(x.p, row / H)] : 0;
}

// A warp's loads of partials of D columns: round i loads partial i of its tokens to stage i % RING, one lane per token.
template <int D> struct PartialLoads {
    static constexpr int ROW_BYTES = D * 2, STAGE_BYTES = 16 * ROW_BYTES;
    const u16 *from;  // the partial of entry 0
    unsigned char *stages;
    u64 *full;
    u64 entries;  // not loaded yet
    template <class Arguments>
    DEVICE PartialLoads(const Arguments &x, const Tokens &tokens, const u16 *partials, unsigned char *memory, Barriers &barriers)
        : stages(memory + threadIdx.x / 32 * RING * STAGE_BYTES), full(barriers.partials[threadIdx.x / 32]) {
        const int first = threadIdx.x % 32 * RUN, row = threadIdx.x / 32 * 16 + min(first, 15);
        from = partials + first_partial(x, tokens, row) * D;
        entries = first < 16 ? listed_entries(x, tokens, row) : 0;
        for (int i = 0; i < RING; ++i) load(i);
    }
    DEVICE void load(int stage) {
        const u32 loading = __ballot_sync(ALL_LANES, entries != 0);
        if (!loading) return;
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect(&full[stage], __popc(loading) * RUN * ROW_BYTES);
        __syncwarp();
        if (!entries) return;
        const i64 entry = __ffsll(entries) - 1;
        entries &= entries - 1;
        bulk_load_once(stages + stage * STAGE_BYTES + threadIdx.x % 32 * RUN * ROW_BYTES, from + entry * H * D, RUN * ROW_BYTES, &full[stage]);
    }
    // Wait for a round; return row r of this thread.
    DEVICE const unsigned char *row(const PipelineState<RING> &at, int r) const {
        mbarrier_wait(&full[at.stage], at.parity);
        return stages + at.stage * STAGE_BYTES + (threadIdx.x % 32 / 4 + 8 * r) * ROW_BYTES;
    }
    // Release a round's stage after this lane has read its rows.
    DEVICE void release(const PipelineState<RING> &at) {
        __syncwarp();  // all lanes have read theirs
        load(at.stage);
    }
};

// Return the rounds of the warp, given the entries of this thread's two rows.
DEVICE int rounds_of(u64 entries, u64 other_entries) { return __reduce_max_sync(ALL_LANES, max(__popcll(entries), __popcll(other_entries))); }

// acc += weight * x for this lane's columns of row r of a partial.
template <int N> DEVICE void add_partial(float (&acc)[N], int r, float weight, const unsigned char *row) {
    UNROLL for (int j = 0; j < N / 16; ++j) {
        const uint4 x = *reinterpret_cast<const uint4 *>(row + threadIdx.x % 4 * 16 + j * 64);
        const u32 pairs[4] = {x.x, x.y, x.z, x.w};
        UNROLL for (int n = 0; n < 4; ++n) {
            acc[16 * j + 4 * n + 2 * r] += weight * to_float(static_cast<u16>(pairs[n]));
            acc[16 * j + 4 * n + 2 * r + 1] += weight * to_float(static_cast<u16>(pairs[n] >> 16));
        }
    }
}
