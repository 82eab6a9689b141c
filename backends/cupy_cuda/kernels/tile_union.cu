// Build the union of the blocks that a tile of TOKENS adjacent rows selected: one list per tile, ascending by block,
// with one bit per row for each block (token_tiles.cuh). Blocks that every row of the tile sees to their last key come
// first.
//
// Grid: one CTA per (b, g, tile of rows). Shared memory holds TOKENS bits per block of keys.
//
//   TOKENS, BLOCK, UNION_THREADS  rows of a tile, at most 64; keys of a block; threads of a CTA
#include "problem.cuh"

constexpr int THREADS = UNION_THREADS;
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

    // Each warp numbers some adjacent blocks; the prefix sum is where its own begin in the list.
    constexpr int WARPS = THREADS / 32;
    const int lane = thread % 32, share = (all_blocks + 32 * WARPS - 1) / (32 * WARPS) * 32;
    const int first = thread / 32 * share, end = min(first + share, all_blocks);
    int upto[2] = {0, 0}, total[2];  // all blocks, whole blocks
    for (int block = first + lane; block < end; block += 32) {
        if (!rows[block]) continue;
        ++upto[0];
        upto[1] += (block + 1) * static_cast<i64>(BLOCK) <= lowest;
    }
    const int own = upto[0];
    block_prefix_sum<THREADS>(upto, total);
    if (thread == 0) x.counts[blockIdx.x] = make_int2(total[1], total[0]);
    i64 begin = blockIdx.x * x.capacity + __shfl_sync(ALL_LANES, upto[0] - own, 0);
    for (int block = first + lane; block - lane < end; block += 32) {
        const bool listed = block < end && rows[block];
        const u32 all = __ballot_sync(ALL_LANES, listed);
        const i64 at = begin + __popc(all & ((1u << lane) - 1));
        begin += __popc(all);
        if (!listed) continue;
        x.blocks[at] = static_cast<u16>(block);
        x.rows[at] = static_cast<RowBits<TOKENS>>(rows[block]);
    }
}
