// Build the union of the blocks that a tile of TOKENS adjacent rows selected: one list per tile, with one bit per row
// for each block (token_tiles.cuh). Blocks that every row of the tile sees to their last key come first, in ascending
// order.
//
// Steps that gather several blocks (gather_steps.cuh), for two consumers: blocks that rows of both selected come first,
// then those of the first consumer alone, then those of the second. A consumer skips the steps of the other; of random
// selections that is a quarter of them. Of blocks of four keys, two that fill eight aligned keys are a pair, which one
// box loads: in the step they must be units 2 i and 2 i + 1. Pairs of a class come before its other blocks.
//
// Grid: one CTA per (b, g, tile of rows). Shared memory holds TOKENS bits per block of keys.
//
//   TOKENS, TQ            rows of a tile, at most 64, and of one of its consumers
//   BLOCK, UNION_THREADS  keys of a block; threads of a CTA
#include "problem.cuh"

constexpr int THREADS = UNION_THREADS;
constexpr int UNITS = BLOCK < 64 ? 64 / BLOCK : 1;  // blocks of a step
constexpr bool BY_CONSUMER = UNITS > 1 && TOKENS == 2 * TQ, PAIRS = BLOCK == 4;
typedef If<TOKENS <= 32, u32, u64> TokenBits;  // one bit per row

struct Arguments {
    Problem p;
    u16 *blocks;            // [tiles of all * capacity]
    RowBits<TOKENS> *rows;  // likewise; bit r: row r of the tile selected the block
    int2 *counts;           // whole blocks, all blocks
    u32 *counter;           // of tiles taken, zeroed
    i64 tiles, capacity;  // tiles per bg; largest list length
};

// Set, for every block, the bits of the rows that selected it.
DEVICE void mark_rows(const Problem &p, i64 b, i64 g, i64 first_row, TokenBits *rows) {
    const u32 n = p.n, all = static_cast<u32>(min(static_cast<i64>(TOKENS), p.S - first_row)) * n;
    for_ranges<THREADS, 2>(
        p, all, [&](u32 e) { return ((b * p.S + first_row + e / n) * p.G + g) * p.n + e % n; },
        [&](u32 e) { return row_limit(p, b, first_row + e / n); },
        [&](u32 e, int start, int end) {  // in halves: an operation on 64 bits would be a loop
            const u32 r = e / n;
            if (end > start) atomicOr(reinterpret_cast<u32 *>(&rows[start / BLOCK]) + r / 32, 1u << r % 32);
        });
}

// Classes of whole blocks: selected by rows of both consumers (or not BY_CONSUMER), of the first alone, of the second
// alone. With PAIRS a class is two kinds: pairs, whose two blocks are of the class together, and single blocks. The last
// kind is of blocks that some row does not see whole.
enum Class { SHARED, FIRST, SECOND, CLASSES };
constexpr int EACH = PAIRS ? 2 : 1, PARTIAL = EACH * CLASSES, KINDS = PARTIAL + 1;
constexpr int NEXT_CLASS = BY_CONSUMER ? 1 : int(CLASSES);  // from one class in use to the next

DEVICE int class_of(TokenBits rows) {
    const TokenBits first = rows & ((TokenBits{1} << TQ % TOKENS) - 1);
    return !BY_CONSUMER || (first && first != rows) ? SHARED : first ? FIRST : SECOND;
}
// Return the kind of a selected block; lowest: the keys that every row sees.
DEVICE int kind_of(const TokenBits *rows, int block, int all_blocks, int lowest) {
    auto whole = [&](int other) { return (other + 1) * static_cast<i64>(BLOCK) <= lowest; };
    if (!whole(block)) return PARTIAL;
    if (!PAIRS) return class_of(rows[block]);
    const bool paired = whole(block | 1) && (block ^ 1) < all_blocks && rows[block ^ 1];
    return 2 * class_of(paired ? rows[block] | rows[block ^ 1] : rows[block]) + !paired;
}

// Where the blocks of a kind are listed: number i is entry begin + i, from `lead` on with `gap` entries before it.
struct Places {
    i64 begin;
    int lead, gap;
    DEVICE i64 of(int i) const { return begin + i + (i < lead ? 0 : gap); }
};

extern "C" __global__ void __launch_bounds__(THREADS) tile_union(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];
    TokenBits *rows = reinterpret_cast<TokenBits *>(memory);  // [blocks of keys]
    __shared__ int lowest;  // row_limit of the tile
    const Problem &p = x.p;
    const int thread = threadIdx.x, all_blocks = (static_cast<int>(p.S_kv) + BLOCK - 1) / BLOCK;
    const u32 tiles = x.tiles, G = p.G, bg = blockIdx.x / tiles, b = bg / G, g = bg % G;  // 64-bit divisions are slow
    const i64 first_row = static_cast<i64>(blockIdx.x % tiles) * TOKENS;
    start_next_kernel();
    if (blockIdx.x == 0 && thread == 0) *x.counter = 0;

    for (int block = thread; block < all_blocks; block += THREADS) rows[block] = 0;
    if (thread < 32) {
        int limit = static_cast<int>(p.S_kv);
        for (int r = thread; r < TOKENS && first_row + r < p.S; r += 32) limit = min(limit, row_limit(p, b, first_row + r));
        limit = __reduce_min_sync(ALL_LANES, limit);
        if (thread == 0) lowest = limit;
    }
    __syncthreads();
    mark_rows(p, b, g, first_row, rows);
    __syncthreads();

    // Each warp numbers some adjacent blocks; the prefix sums are where its own begin among those of their class.
    constexpr int WARPS = THREADS / 32;
    const int lane = thread % 32, share = (all_blocks + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int first = thread / 32 * share, end = min(first + share, all_blocks);
    auto kind = [&](int block) { return kind_of(rows, block, all_blocks, lowest); };
    int upto[KINDS] = {}, own[KINDS], total[KINDS];
    for (int block = first + lane; block < end; block += 32)
        if (rows[block]) {
            const int its = kind(block);
            UNROLL for (int k = 0; k < KINDS; ++k) upto[k] += its == k;
        }
    UNROLL for (int k = 0; k < KINDS; ++k) own[k] = upto[k];
    block_prefix_sum<THREADS>(upto, total);
    int next[KINDS], whole = 0;  // number of the warp's next block of each kind; whole blocks
    UNROLL for (int k = 0; k < KINDS; ++k) next[k] = __shfl_sync(ALL_LANES, upto[k] - own[k], 0);
    Places places[KINDS];
    UNROLL for (int k = 0; k < PARTIAL; k += EACH) {
        const i64 begin = blockIdx.x * x.capacity + whole;
        // Steps begin with the partial blocks. A single block before pairs that would begin with an odd unit.
        const int lead = PAIRS ? (whole + total[PARTIAL]) % 2 & total[k + EACH - 1] > 0 : 0;
        places[k] = {begin + lead, 0, 0};
        if (PAIRS) places[k + 1] = {begin, lead, total[k]};
        UNROLL for (int i = 0; i < EACH; ++i) whole += total[k + i];
    }
    places[PARTIAL] = {blockIdx.x * x.capacity + whole, 0, 0};
    if (thread == 0) x.counts[blockIdx.x] = make_int2(whole, whole + total[PARTIAL]);
    for (int block = first + lane; block - lane < end; block += 32) {
        const int listed = block < end && rows[block] ? kind(block) : -1;
        UNROLL for (int k = 0; k < KINDS; ++k) {
            if (k % (EACH * NEXT_CLASS) >= EACH && k != PARTIAL) continue;
            const u32 all = __ballot_sync(ALL_LANES, listed == k);
            if (listed == k) {
                const i64 at = places[k].of(next[k] + __popc(all & ((1u << lane) - 1)));
                x.blocks[at] = static_cast<u16>(block);
                x.rows[at] = static_cast<RowBits<TOKENS>>(rows[block]);
            }
            next[k] += __popc(all);
        }
    }
}
