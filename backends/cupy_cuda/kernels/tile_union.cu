// Which blocks a tile of TOKENS adjacent rows chose between them, and which of its rows chose each: one list a tile, ascending by block.
//
// A thread block keeps, for every block of keys, a bit for each token that chose it; what has a bit goes into the list. Those that every
// row of the tile sees to their last key come first: the lowest blocks, since all are seen up to the lowest row's limit.
//
//   TOKENS   rows of a tile, at most 64
//   BLOCK    keys of a block
#include "common.cuh"

typedef unsigned long long u64;

constexpr int THREADS = 128, WARPS = THREADS / 32;

struct Arguments {
    Problem p;
    int *blocks;   // [tiles of all * capacity]
    u64 *members;  // likewise; bit r: token r of the tile
    int2 *counts;  // whole blocks, all blocks
    i64 tiles, capacity;
};

extern "C" __global__ void __launch_bounds__(THREADS) tile_union(const __grid_constant__ Arguments x) {
    extern __shared__ __align__(16) u16 memory[];
    u64 *chosen = reinterpret_cast<u64 *>(memory);  // [blocks of keys]: the tokens, a bit each
    __shared__ int lowest, sums[WARPS], wholes[WARPS];
    const Problem &p = x.p;
    const int thread = threadIdx.x, all_blocks = (static_cast<int>(p.S_kv) + BLOCK - 1) / BLOCK;
    const u32 n = p.n, tiles = x.tiles, G = p.G, i = blockIdx.x % tiles, bg = blockIdx.x / tiles, b = bg / G, g = bg % G;  // 64-bit divisions are slow
    const i64 first_row = static_cast<i64>(i) * TOKENS;

    for (int block = thread; block < all_blocks; block += THREADS) chosen[block] = 0;
    if (thread < 32) {
        int least = static_cast<int>(p.S_kv);
        for (int r = thread; r < TOKENS && first_row + r < p.S; r += 32) least = min(least, row_limit(p, b, first_row + r));
        least = __reduce_min_sync(ALL, least);
        if (thread == 0) lowest = least;
    }
    __syncthreads();
    for (u32 e = thread; e < TOKENS * n; e += THREADS) {
        const u32 r = e / n;
        const i64 s = first_row + r;
        if (s >= p.S) break;
        int start, end;
        clamped_range(p, ((b * p.S + s) * p.G + g) * p.n + e % n, row_limit(p, b, s), start, end);
        if (end > start) atomicOr(&chosen[start / BLOCK], 1ull << r);
    }
    __syncthreads();

    // A thread has some blocks in a row: it counts those that were chosen, then it knows where its own stand in the list.
    const int each = (all_blocks + THREADS - 1) / THREADS, first = thread * each, end = min(first + each, all_blocks);
    int own = 0, whole = 0;
    for (int block = first; block < end; ++block) {
        if (!chosen[block]) continue;
        ++own;
        whole += (block + 1) * static_cast<i64>(BLOCK) <= lowest;
    }
    int before = own;
    for (int gap = 1; gap < 32; gap *= 2) {
        int sum = __shfl_up_sync(ALL, before, gap);
        if (thread % 32 >= gap) before += sum;
    }
    whole = __reduce_add_sync(ALL, whole);
    if (thread % 32 == 31) {
        sums[thread / 32] = before;
        wholes[thread / 32] = whole;
    }
    __syncthreads();
    int all = 0;
    whole = 0;
    before -= own;
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp < thread / 32) before += sums[warp];
        all += sums[warp];
        whole += wholes[warp];
    }
    if (thread == 0) x.counts[blockIdx.x] = make_int2(whole, all);
    i64 at = blockIdx.x * x.capacity + before;
    for (int block = first; block < end; ++block) {
        if (!chosen[block]) continue;
        x.blocks[at] = block;
        x.members[at++] = chosen[block];
    }
}
