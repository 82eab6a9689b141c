// 64 rows of a unit, TQ adjacent tokens times H heads, and what belongs to the entries of their selection: tiles of keys that all of the
// tokens selected (shared_tiles.cu), and partials of all other entries. join_partials.cu and join_shares.cu compute the former and add the
// latter: one multiplies while other CTAs of the multiprocessor read, at memory speed.
//
// Partials: each warp has 16 rows, and brings a partial of each of its tokens to one of RING stages by bulk loads, which do not take registers.
//   What the products needed is their memory. Accumulators are exchanged between the lanes of a quad once, so that a lane has eight adjacent
//   columns of every 32, which it reads at once.
// Arguments of a kernel have p, reach, the masks shared and listed [B,S,G], and the fields of `UnitRows` (units.py).
//
//   H, EACH  heads of a group, which divide 64; entries of a row, n * reach, at most 64
//   PER_SM   CTAs per multiprocessor
//   RING     stages of a warp
#pragma once
#include "shared_tiles.cuh"
#include "hopper_tiles.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int K_BYTES = DK / 64 * PANEL, V_BYTES = DV / 64 * PANEL;  // of keys and values, and of 64 rows of q and do
constexpr int RUN = H < 16 ? H : 16;                                 // rows of a token in a warp

// A thread's two rows, 8 apart, of the 64.
DEVICE int row_of_tile(int r) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r; }

// TQ tokens of a pair.
struct Tokens {
    u32 pair, within;            // the pair, and the first token, of the unit
    u32 b, g;                    // of the pair
    i64 s;                       // the first token
    int count, lowest, highest;  // tokens that exist, the least and the largest of their limits
    template <class Arguments>
    DEVICE Tokens(const Arguments &x) {
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
    DEVICE i64 index(const Problem &p, int token) const { return (b * p.S + s + token) * p.G + g; }  // among B*S*G
    // Replace what belongs to keys, of a tile from `key` on, that this thread's rows do not see.
    DEVICE void mask(const Problem &p, float (&s_tile)[KEYS / 2], int key, float value) const {
        if (lowest >= key + KEYS) return;
        int limits[2];
        UNROLL for (int r = 0; r < 2; ++r) limits[r] = row_limit(p, b, s + min(row_of_tile(r) / H, count - 1)) - key;
        mask_columns(s_tile, 0, limits, value);
    }
    // Zero the keys or values that no row sees of a tile from `key` on: 0 * NaN would reach sums.
    DEVICE void zero_unseen(unsigned char *tile, int bytes, int key) const {
        if (highest >= key + KEYS) return;
        for (int panel = 0; panel < bytes; panel += PANEL)
            for (int i = (highest - key) * 8 + threadIdx.x; i < KEYS * 8; i += THREADS)
                *reinterpret_cast<uint4 *>(tile + panel + i * 16) = make_uint4(0, 0, 0, 0);
        fence_async_proxy();
        __syncthreads();
    }
};

// The tiles that all of the tokens selected, in the order of the first token's entries.
struct SharedTiles {
    const Problem &p;
    const int reach, limit;
    const i64 leader;
    u64 left;
    template <class Arguments>
    DEVICE SharedTiles(const Arguments &x, const Tokens &tokens)
        : p(x.p), reach(static_cast<int>(x.reach)), limit(row_limit(x.p, tokens.b, tokens.s)), leader(tokens.index(x.p, 0)),
          left(x.shared[leader]) {}
    // The first key of the next tile, if any is left.
    DEVICE int next_key() {
        if (!left) return 0;
        const int entry = __ffsll(left) - 1;
        left &= left - 1;
        return tile_of(p, reach, leader, limit, entry) * KEYS;
    }
};

// Of q (and do), of a tile's keys and values, and of the warps' stages.
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

// A lane's share of the columns: of every 32, eight adjacent ones in place of two adjacent ones of every eight. As floats of wgmma.
template <int N>
DEVICE void adjacent_columns(float (&acc)[N]) {
    UNROLL for (int j = 0; j < N; j += 16)
        UNROLL for (int i = 0; i < 4; ++i) {
            u32 x[4];
            UNROLL for (int n = 0; n < 4; ++n) x[n] = static_cast<u32>(__float_as_int(acc[j + 4 * n + i]));
            quad_transpose(x);
            UNROLL for (int n = 0; n < 4; ++n) acc[j + 4 * n + i] = __int_as_float(static_cast<int>(x[n]));
        }
}

// Where the partial of entry 0 is of a row of the tile, among rows of its columns; of a token that exists.
template <class Arguments>
DEVICE i64 first_partial(const Arguments &x, const Tokens &tokens, int row) {
    const i64 token = tokens.pair * x.section + tokens.within + min(row / H, tokens.count - 1);
    return token * EACH * H + row % H;
}
// The entries of that row's token that have partials.
template <class Arguments>
DEVICE u64 listed_entries(const Arguments &x, const Tokens &tokens, int row) {
    return row / H < tokens.count ? x.listed[tokens.index(x.p, row / H)] : 0;
}

// A warp's loads of partials of D columns: round i brings number i of each of its tokens to stage i % RING. A lane has a token.
template <int D>
struct PartialLoads {
    static constexpr int ROW_BYTES = D * 2, STAGE_BYTES = 16 * ROW_BYTES;
    const u16 *from;  // the partial of entry 0
    unsigned char *stages;
    u64 *full;
    u64 entries;  // that are still to be loaded
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
    // A round's row number r of this thread, once it has arrived.
    DEVICE const unsigned char *row(const PipelineState<RING> &at, int r) const {
        mbarrier_wait(&full[at.stage], at.parity);
        return stages + at.stage * STAGE_BYTES + (threadIdx.x % 32 / 4 + 8 * r) * ROW_BYTES;
    }
    // Once this lane has read its rows of the round.
    DEVICE void release(const PipelineState<RING> &at) {
        __syncwarp();  // all lanes have
        load(at.stage);
    }
};

// How many rounds a warp's rows take, given those of this thread's rows.
DEVICE int rounds_of(u64 entries, u64 other_entries) { return __reduce_max_sync(ALL_LANES, max(__popcll(entries), __popcll(other_entries))); }

// acc += weight * x for row r of a partial, this lane's columns.
template <int N>
DEVICE void add_partial(float (&acc)[N], int r, float weight, const unsigned char *row) {
    UNROLL for (int j = 0; j < N / 16; ++j) {
        const uint4 x = *reinterpret_cast<const uint4 *>(row + threadIdx.x % 4 * 16 + j * 64);
        const u32 pairs[4] = {x.x, x.y, x.z, x.w};
        UNROLL for (int n = 0; n < 4; ++n) {
            acc[16 * j + 4 * n + 2 * r] += weight * to_float(static_cast<u16>(pairs[n]));
            acc[16 * j + 4 * n + 2 * r + 1] += weight * to_float(static_cast<u16>(pairs[n] >> 16));
        }
    }
}

// Row r of acc * scale, this lane's columns.
template <int N>
DEVICE void write_row(u16 *to, const float (&acc)[N], int r, float scale) {
    UNROLL for (int j = 0; j < N / 16; ++j) {
        u32 y[4];
        UNROLL for (int n = 0; n < 4; ++n) y[n] = pack(acc[16 * j + 4 * n + 2 * r] * scale, acc[16 * j + 4 * n + 2 * r + 1] * scale);
        *reinterpret_cast<uint4 *>(to + 32 * j + threadIdx.x % 4 * 8) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}
