// Counting sort, last step: scatter every entry to its list.
//
// Grid: one CTA per chunk (sort.cuh), which sorts BLOCK entries at a time in shared memory, so that those of a list are written together.
// A warp has 32 * EACH adjacent entries, and counts those of each tile 32 at a time. Lanes that count the same tile at once do so in any
// order: it is put right when the entries are written.
//
//   EACH  entries of a thread in a block
#include "sort.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, BLOCK = EACH * THREADS, TABLE = 2 * THREADS;  // tiles at once

struct Arguments {
    Sort sort;
    const int *tiles;   // of sort_count.cu
    int *counts;        // of sum_counts.cu
    const i64 *begins;  // [lists + 1]
    int *entries;       // e, list after list
};

struct Shared {
    u32 counts[WARPS][TABLE];  // the warp's entries of each tile so far; then where the first of them goes in `sorted`
    u32 sorted[BLOCK + 2];     // between ends: number of the tile in the table, number of the entry in the block
    int to[TABLE];             // where entry 0 of `sorted` would go among all, if it belonged to the list of this tile
};

// Counts become places in `sorted`, of two tiles a thread, whose entries of this block go to `to` and after; how many entries there are.
// counts: of the chunk, from these tiles on. more: blocks of the chunk come.
DEVICE int place_lists(Shared &shared, const int (&to)[2], int *counts, int tiles, bool more) {
    const int tile = 2 * threadIdx.x;
    int own[2] = {0, 0};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        uint2 *at = reinterpret_cast<uint2 *>(shared.counts[warp] + tile);
        const uint2 count = *at;
        *at = uint2{static_cast<u32>(own[0]), static_cast<u32>(own[1])};
        own[0] += count.x;
        own[1] += count.y;
    }
    int sum[1] = {own[0] + own[1]}, all[1];
    block_prefix_sum<THREADS>(sum, all);
    const int place[2] = {sum[0] - own[0] - own[1], sum[0] - own[1]};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        uint2 *at = reinterpret_cast<uint2 *>(shared.counts[warp] + tile);
        const uint2 before = *at;
        *at = uint2{before.x + place[0], before.y + place[1]};
    }
    for (int i = 0; i < 2; ++i) {
        shared.to[tile + i] = to[i] - place[i];
        if (more && tile + i < tiles) counts[i] += own[i];
    }
    return all[0];
}

// Where number i of `sorted` belongs among those of its tile that were counted at once.
DEVICE int ordered_place(const u32 *sorted, int i, u32 own) {
    int place = i;
    for (int j = i - 1; (sorted[j] ^ own) < 32; --j) place -= sorted[j] > own;
    for (int j = i + 1; (sorted[j] ^ own) < 32; ++j) place += sorted[j] < own;
    return place;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) sort_scatter(const __grid_constant__ Arguments x) {
    __shared__ Shared shared;
    wait_for_stream();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = x.sort.tiles;
    const Chunk chunk(x.sort, blockIdx.x);
    u32 *sorted = shared.sorted + 1;
    const int *all_tiles = x.tiles + chunk.bg * x.sort.entries_per_bg;
    for (u32 first = chunk.first; first < chunk.end; first += BLOCK)
        for (u32 tile0 = 0; tile0 < tiles; tile0 += TABLE) {
            const u32 number = warp * (32 * EACH) + lane;  // of the thread's first entry in the block
            u32 own[EACH], ranks[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const u32 e = first + number + 32 * i;
                own[i] = e < chunk.end ? all_tiles[e] - tile0 : ~0u;
            }
            const i64 tile = tile0 + 2 * threadIdx.x;
            int *counts = x.counts + chunk.counts + tile, to[2];
            for (int i = 0; i < 2; ++i) to[i] = tile + i < tiles ? static_cast<int>(x.begins[chunk.list + tile + i]) + counts[i] : 0;
            for (int i = threadIdx.x; i < WARPS * TABLE / 4; i += THREADS) reinterpret_cast<uint4 *>(shared.counts)[i] = uint4{0, 0, 0, 0};
            __syncthreads();
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (own[i] < TABLE) ranks[i] = atomicAdd(&shared.counts[warp][own[i]], 1u);
                __syncwarp();
            }
            __syncthreads();
            const int listed = place_lists(shared, to, counts, tiles - tile0, first + BLOCK < chunk.end);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (own[i] < TABLE) sorted[shared.counts[warp][own[i]] + ranks[i]] = own[i] << 16 | (number + 32 * i);
            if (threadIdx.x == 0) sorted[-1] = sorted[listed] = ~0u;
            __syncthreads();
            for (int i = threadIdx.x; i < listed; i += THREADS) {
                const u32 entry = sorted[i];
                x.entries[shared.to[entry >> 16] + ordered_place(sorted, i, entry)] = static_cast<int>(first + (entry & 0xffff));
            }
        }
}
