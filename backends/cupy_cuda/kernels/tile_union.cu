// Build the union of the blocks that a tile of TOKENS adjacent rows selected: one list per tile, with one bit per row
// for each block (token_tiles.cuh). Blocks that every row of the tile sees to their last key come first, in ascending
// order.
//
// Steps that gather several blocks (gather_steps.cuh), for two consumers: blocks that rows of both selected come first,
// then those of the first consumer alone, then those of the second. A consumer skips the steps of the other; of random
// selections that is a quarter of them.
//
// Grid: one CTA per (b, g, tile of rows). Shared memory holds TOKENS bits per block of keys.
//
//   TOKENS, TQ            rows of a tile, at most 64, and of one of its consumers
//   BLOCK, UNION_THREADS  keys of a block; threads of a CTA
#include "problem.cuh"

constexpr int THREADS = UNION_THREADS;
constexpr int UNITS = BLOCK < 64 ? 64 / BLOCK : 1;  // blocks of a step
constexpr bool BY_CONSUMER = UNITS > 1 && TOKENS == 2 * TQ;
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

// Classes of blocks: selected by rows of both consumers (or not BY_CONSUMER), of the first alone, of the second alone;
// not seen whole by every row.
enum Class { SHARED, FIRST, SECOND, PARTIAL, CLASSES };
constexpr int NEXT_CLASS = BY_CONSUMER ? 1 : PARTIAL;  // from one class in use to the next

DEVICE Class class_of(TokenBits rows, bool whole) {
    if (!whole) return PARTIAL;
    const TokenBits first = rows & ((TokenBits{1} << TQ % TOKENS) - 1);
    return !BY_CONSUMER || (first && first != rows) ? SHARED : first ? FIRST : SECOND;
}

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
    auto kind = [&](int block) { return class_of(rows[block], (block + 1) * static_cast<i64>(BLOCK) <= lowest); };
    int upto[CLASSES] = {}, own[CLASSES], total[CLASSES];
    for (int block = first + lane; block < end; block += 32)
        if (rows[block])
            UNROLL for (int c = 0; c < CLASSES; c += NEXT_CLASS) upto[c] += kind(block) == c;
    UNROLL for (int c = 0; c < CLASSES; ++c) own[c] = upto[c];
    block_prefix_sum<THREADS>(upto, total);
    i64 next[CLASSES], begin = blockIdx.x * x.capacity;
    UNROLL for (int c = 0; c < CLASSES; ++c) {
        next[c] = begin + __shfl_sync(ALL_LANES, upto[c] - own[c], 0);
        begin += total[c];
    }
    const int whole = total[SHARED] + total[FIRST] + total[SECOND];
    if (thread == 0) x.counts[blockIdx.x] = make_int2(whole, whole + total[PARTIAL]);
    for (int block = first + lane; block - lane < end; block += 32) {
        const int listed = block < end && rows[block] ? kind(block) : -1;
        UNROLL for (int c = 0; c < CLASSES; c += NEXT_CLASS) {
            const u32 all = __ballot_sync(ALL_LANES, listed == c);
            if (listed == c) {
                const i64 at = next[c] + __popc(all & ((1u << lane) - 1));
                x.blocks[at] = static_cast<u16>(block);
                x.rows[at] = static_cast<RowBits<TOKENS>>(rows[block]);
            }
            next[c] += __popc(all);
        }
    }
}
