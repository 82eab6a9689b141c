// Which blocks a tile of TOKENS adjacent rows chose between them, and which of its rows chose each: one list a tile, ascending by block.
//
// A thread block sorts the tile's (block, token) pairs in shared memory; a run of one block becomes one entry, with a bit for each token.
// Those that every row of the tile sees to their last key come first: the lowest blocks, since all are seen up to the lowest row's limit.
//
//   TOKENS   rows of a tile, at most 64
//   ENTRIES  pairs of a tile at most, a power of two from 256 on
//   BLOCK    keys of a block
#include "common.cuh"

typedef unsigned long long u64;

constexpr int THREADS = 256, EACH = ENTRIES / THREADS;
constexpr u32 NOWHERE = 0xffffffffu;

struct Arguments {
    Problem p;
    int *blocks;   // [tiles of all * capacity]
    u64 *members;  // likewise; bit r: token r of the tile
    int2 *counts;  // whole blocks, all blocks
    i64 tiles, capacity;
};

extern "C" __global__ void __launch_bounds__(THREADS) union_of(const __grid_constant__ Arguments x) {
    __shared__ u32 keys[ENTRIES];
    __shared__ int lowest, sums[THREADS / 32], wholes[THREADS / 32];
    const Problem &p = x.p;
    const int thread = threadIdx.x;
    const u32 n = p.n, tiles = x.tiles, G = p.G, i = blockIdx.x % tiles, bg = blockIdx.x / tiles, b = bg / G, g = bg % G;  // 64-bit divisions are slow
    const i64 first_row = static_cast<i64>(i) * TOKENS;

    if (thread < 32) {
        int least = static_cast<int>(p.S_kv);
        for (int r = thread; r < TOKENS && first_row + r < p.S; r += 32) least = min(least, row_limit(p, b, first_row + r));
        least = __reduce_min_sync(ALL, least);
        if (thread == 0) lowest = least;
    }
    u32 mine[EACH];
#pragma unroll
    for (int e = thread; e < ENTRIES; e += THREADS) {
        u32 r = e / n, key = NOWHERE;
        i64 s = first_row + r;
        if (r < TOKENS && s < p.S) {
            int start, end;
            clamped_range(p, ((b * p.S + s) * p.G + g) * p.n + e % n, row_limit(p, b, s), start, end);
            if (end > start) key = static_cast<u32>(start) / BLOCK * 64 + r;
        }
        mine[e / THREADS] = key;
    }
    // A bitonic network: a thread has keys number thread + 256 j; each takes the lesser or the greater of itself and the one `gap` away.
#pragma unroll
    for (int width = 2; width <= ENTRIES; width *= 2)
#pragma unroll
        for (int gap = width / 2; gap; gap /= 2) {
            if (gap >= 32 && gap < THREADS) {
                __syncthreads();  // all have read what stood there
#pragma unroll
                for (int j = 0; j < EACH; ++j) keys[thread + j * THREADS] = mine[j];
                __syncthreads();
            }
            u32 others[EACH];
#pragma unroll
            for (int j = 0; j < EACH; ++j)
                others[j] = gap >= THREADS ? mine[j ^ gap / THREADS] : gap >= 32 ? keys[(thread ^ gap) + j * THREADS] : __shfl_xor_sync(ALL, mine[j], gap);
#pragma unroll
            for (int j = 0; j < EACH; ++j) {
                const int e = thread + j * THREADS;
                mine[j] = ((e & width) == 0) == ((e & gap) == 0) ? min(mine[j], others[j]) : max(mine[j], others[j]);
            }
        }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; ++j) keys[thread + j * THREADS] = mine[j];
    __syncthreads();

    // A thread has EACH pairs in a row; the first pair of a block counts it.
    int first = thread * EACH, runs = 0, whole = 0;
    for (int e = first; e < first + EACH; ++e) {
        if (keys[e] == NOWHERE || (e && keys[e] / 64 == keys[e - 1] / 64)) continue;
        ++runs;
        whole += (keys[e] / 64 + 1) * static_cast<i64>(BLOCK) <= lowest;
    }
    int before = runs;
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
    before -= runs;
    for (int warp = 0; warp < THREADS / 32; ++warp) {
        if (warp < thread / 32) before += sums[warp];
        all += sums[warp];
        whole += wholes[warp];
    }
    if (thread == 0) x.counts[blockIdx.x] = make_int2(whole, all);
    i64 at = blockIdx.x * x.capacity + before;
    for (int e = first; e < first + EACH; ++e) {
        u32 block = keys[e] / 64;
        if (keys[e] == NOWHERE || (e && block == keys[e - 1] / 64)) continue;
        u64 members = 0;
        for (int other = e; other < ENTRIES && keys[other] != NOWHERE && keys[other] / 64 == block; ++other) members |= 1ull << keys[other] % 64;
        x.blocks[at] = block;
        x.members[at++] = members;
    }
}
