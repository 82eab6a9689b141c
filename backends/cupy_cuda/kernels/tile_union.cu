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

// Set, for every block, the bits of the rows that selected it. limits: `row_limit` of each row. `width` threads take a
// row, because a division per range would take longer than all else.
DEVICE void mark_rows(const Problem &p, i64 b, i64 g, i64 first_row, const int *limits, TokenBits *rows) {
    constexpr int AT_ONCE = 4;
    const int n = static_cast<int>(p.n), width = min((n + 31) / 32 * 32, THREADS), step = THREADS / width;
    const int row = static_cast<int>(threadIdx.x) / width, count = static_cast<int>(min(static_cast<i64>(TOKENS), p.S - first_row));
    if (row >= step) return;
    const i64 pitch = p.G * n, begin = ((b * p.S + first_row) * p.G + g) * n;
    for (int i = static_cast<int>(threadIdx.x) % width; i < n; i += width)
        for (int first = row; first < count; first += step * AT_ONCE) {
            Range loaded[AT_ONCE];
            UNROLL for (int j = 0; j < AT_ONCE; ++j)
                if (first + j * step < count) loaded[j] = Range(p, range_at(p, begin + (first + j * step) * pitch + i));
            UNROLL for (int j = 0; j < AT_ONCE; ++j) {
                const int r = first + j * step;
                if (r >= count) break;
                int start, end;
                loaded[j].clamp(p, limits[r], start, end);
                // In halves: an operation on 64 bits would be a loop.
                if (end > start) atomicOr(reinterpret_cast<u32 *>(&rows[start / BLOCK]) + r / 32, 1u << r % 32);
            }
        }
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

extern "C" __global__ void __launch_bounds__(THREADS, THREADS == 512 ? 3 : 1) tile_union(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];
    TokenBits *rows = reinterpret_cast<TokenBits *>(memory);  // [blocks of keys]
    constexpr int WARPS = THREADS / 32;
    __shared__ int limits[TOKENS], counts[CLASSES][WARPS];  // row_limit of each row; blocks of each class and warp
    const Problem &p = x.p;
    const int thread = threadIdx.x, all_blocks = (static_cast<int>(p.S_kv) + BLOCK - 1) / BLOCK;
    const u32 tiles = x.tiles, G = p.G, bg = blockIdx.x / tiles, b = bg / G, g = bg % G;  // 64-bit divisions are slow
    const i64 first_row = static_cast<i64>(blockIdx.x % tiles) * TOKENS;
    start_next_kernel();
    if (blockIdx.x == 0 && thread == 0) *x.counter = 0;

    for (int block = thread; block < all_blocks; block += THREADS) rows[block] = 0;
    if (thread < TOKENS) limits[thread] = first_row + thread < p.S ? row_limit(p, b, first_row + thread) : static_cast<int>(p.S_kv);
    __syncthreads();
    mark_rows(p, b, g, first_row, limits, rows);
    __syncthreads();

    // Each warp numbers some adjacent blocks; those of earlier warps come before its own of the same class.
    const int lane = thread % 32, warp = thread / 32, share = (all_blocks + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int first = warp * share, end = min(first + share, all_blocks);
    int lowest = limits[lane % TOKENS];
    if (TOKENS > 32) lowest = min(lowest, limits[(lane + 32) % TOKENS]);
    const int seen_whole = __reduce_min_sync(ALL_LANES, lowest) / BLOCK;
    auto kind = [&](int block) { return block < end && rows[block] ? class_of(rows[block], block < seen_whole) : CLASSES; };
    int own[CLASSES] = {}, next[CLASSES], total[CLASSES];
    for (int block = first + lane; block - lane < end; block += 32) {
        const Class listed = kind(block);
        UNROLL for (int c = 0; c < CLASSES; c += NEXT_CLASS) own[c] += __popc(__ballot_sync(ALL_LANES, listed == c));
    }
    UNROLL for (int c = 0; c < CLASSES; ++c)
        if (lane == 0) counts[c][warp] = own[c];
    __syncthreads();
    UNROLL for (int c = 0; c < CLASSES; ++c) {
        const int of_warp = lane < WARPS ? counts[c][lane] : 0;
        next[c] = __reduce_add_sync(ALL_LANES, lane < warp ? of_warp : 0);
        total[c] = __reduce_add_sync(ALL_LANES, of_warp);
    }
    const int whole = total[SHARED] + total[FIRST] + total[SECOND];
    const i64 begin = blockIdx.x * x.capacity;
    const i64 begins[CLASSES] = {begin, begin + total[SHARED], begin + total[SHARED] + total[FIRST], begin + whole};
    if (thread == 0) x.counts[blockIdx.x] = make_int2(whole, whole + total[PARTIAL]);
    for (int block = first + lane; block - lane < end; block += 32) {
        const Class listed = kind(block);
        UNROLL for (int c = 0; c < CLASSES; c += NEXT_CLASS) {
            const u32 all = __ballot_sync(ALL_LANES, listed == c);
            if (listed == c) {
                const i64 at = begins[c] + next[c] + __popc(all & ((1u << lane) - 1));
                x.blocks[at] = static_cast<u16>(block);
                x.rows[at] = static_cast<RowBits<TOKENS>>(rows[block]);
            }
            next[c] += __popc(all);
        }
    }
}
