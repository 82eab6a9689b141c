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
    __shared__ int sums[THREADS], lowest;
    const Problem &p = x.p;
    const int thread = threadIdx.x;
    i64 number = blockIdx.x, bg = number / x.tiles, i = number % x.tiles, b = bg / p.G, g = bg % p.G;

    if (thread == 0) {
        lowest = static_cast<int>(p.S_kv);
        for (int r = 0; r < TOKENS && i * TOKENS + r < p.S; ++r) lowest = min(lowest, row_limit(p, b, i * TOKENS + r));
    }
    for (int e = thread; e < ENTRIES; e += THREADS) {
        int r = e / static_cast<int>(p.n);
        i64 s = i * TOKENS + r;
        u32 key = NOWHERE;
        if (r < TOKENS && s < p.S) {
            int start, end;
            clamped_range(p, ((b * p.S + s) * p.G + g) * p.n + e % static_cast<int>(p.n), row_limit(p, b, s), start, end);
            if (end > start) key = start / BLOCK * 64u + r;
        }
        keys[e] = key;
    }
    __syncthreads();
    for (int width = 2; width <= ENTRIES; width *= 2)  // a bitonic network
        for (int gap = width / 2; gap; gap /= 2) {
            for (int e = thread; e < ENTRIES; e += THREADS) {
                int other = e ^ gap;
                if (other > e && (keys[e] > keys[other]) == ((e & width) == 0)) {
                    u32 key = keys[e];
                    keys[e] = keys[other];
                    keys[other] = key;
                }
            }
            __syncthreads();
        }

    // A thread has EACH pairs in a row; the first pair of a block counts it.
    int first = thread * EACH, mine = 0;
    for (int e = first; e < first + EACH; ++e) mine += keys[e] != NOWHERE && (e == 0 || keys[e] / 64 != keys[e - 1] / 64);
    sums[thread] = mine;
    __syncthreads();
    for (int gap = 1; gap < THREADS; gap *= 2) {
        int before = thread >= gap ? sums[thread - gap] : 0;
        __syncthreads();
        sums[thread] += before;
        __syncthreads();
    }
    i64 at = number * x.capacity + sums[thread] - mine;
    int whole = 0;
    for (int e = first; e < first + EACH; ++e) {
        u32 block = keys[e] / 64;
        if (keys[e] == NOWHERE || (e && block == keys[e - 1] / 64)) continue;
        u64 members = 0;
        for (int other = e; other < ENTRIES && keys[other] != NOWHERE && keys[other] / 64 == block; ++other) members |= 1ull << keys[other] % 64;
        x.blocks[at] = block;
        x.members[at++] = members;
        whole += (block + 1) * static_cast<i64>(BLOCK) <= lowest;
    }
    __syncthreads();
    int all = sums[THREADS - 1];
    __syncthreads();
    sums[thread] = whole;
    __syncthreads();
    for (int gap = THREADS / 2; gap; gap /= 2) {
        if (thread < gap) sums[thread] += sums[thread + gap];
        __syncthreads();
    }
    if (thread == 0) x.counts[number] = make_int2(sums[0], all);
}
