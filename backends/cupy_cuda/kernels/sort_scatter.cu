// Counting sort, last step: scatter every entry to its list.
//
// Grid: one CTA per chunk (sort.cuh), which sorts BLOCK entries at a time in shared memory, so that those of a list are written together.
// A warp has 32 * EACH adjacent entries and ranks 32 of them at a time: a mask for each tile says which lanes have it.
#include "sort.cuh"

constexpr int EACH = 16, WARPS = 8, THREADS = 32 * WARPS, BLOCK = EACH * THREADS, TABLE = 2 * THREADS;  // tiles at once

struct Arguments {
    Sort sort;
    const int *tiles;   // of sort_count.cu
    int *counts;        // of sum_counts.cu
    const i64 *begins;  // [lists + 1]
    int *entries;       // e, list after list
};

struct Shared {
    u32 masks[WARPS][TABLE];  // zeros between steps
    u16 ranks[WARPS][TABLE];  // entries of the warp so far, of each tile; then where the first of them goes in `sorted`
    u32 sorted[BLOCK];        // number of the tile, number of the entry
    int to[TABLE];            // where entry 0 of `sorted` would go among all, if it belonged to the list of this tile
};

constexpr u32 ELSEWHERE = ~0u;  // of an entry whose tile is not in the table

// A thread's entries: numbers of their tiles in the table become (number, rank among those that the warp has of the same tile).
DEVICE void rank_entries(Shared &shared, u32 (&x)[EACH]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 0; step < EACH; ++step) {
        const bool listed = x[step] != ELSEWHERE;
        u32 *mask = shared.masks[warp] + x[step];
        u16 *rank = shared.ranks[warp] + x[step];
        if (listed) atomicOr(mask, 1u << lane);
        __syncwarp();
        const u32 same = listed ? *mask : 0, before = listed ? *rank : 0;
        __syncwarp();  // all have read both
        if (listed) x[step] = x[step] << 16 | before + __popc(same & ((1u << lane) - 1));
        if (same >> lane == 1) {
            *mask = 0;
            *rank = static_cast<u16>(before + __popc(same));
        }
        __syncwarp();
    }
}

// Counts of the warps become places in `sorted`, of two tiles a thread; how many entries there are. counts: of the chunk, from the table's
// first tile on. begins: of its list. more: blocks of the chunk come.
DEVICE int place_lists(Shared &shared, int *counts, const i64 *begins, int tiles, bool more) {
    u32 *ranks = reinterpret_cast<u32 *>(shared.ranks[0]) + threadIdx.x, own[WARPS], total = 0;  // pairs of 16-bit numbers
    const int tile = 2 * threadIdx.x;
    int to[2];
    for (int i = 0; i < 2; ++i) to[i] = tile + i < tiles ? static_cast<int>(begins[tile + i]) + counts[tile + i] : 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        own[warp] = ranks[warp * (TABLE / 2)];
        total += own[warp];
    }
    const int low = total & 0xffff, high = total >> 16;
    int sum[1] = {low + high}, all[1];
    block_prefix_sum<THREADS>(sum, all);
    const int place[2] = {sum[0] - low - high, sum[0] - high};
    u32 places = place[0] | place[1] << 16;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        ranks[warp * (TABLE / 2)] = places;
        places += own[warp];
    }
    for (int i = 0; i < 2; ++i) {
        shared.to[tile + i] = to[i] - place[i];
        if (more && tile + i < tiles) counts[tile + i] += i ? high : low;
    }
    return all[0];
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) sort_scatter(const __grid_constant__ Arguments x) {
    __shared__ Shared shared;
    wait_for_stream();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = x.sort.tiles;
    const Chunk chunk(x.sort, blockIdx.x);
    const int *all_tiles = x.tiles + chunk.bg * x.sort.entries_per_bg;
    for (int i = threadIdx.x; i < WARPS * TABLE; i += THREADS) shared.masks[0][i] = 0;
    for (u32 first = chunk.first; first < chunk.end; first += BLOCK)
        for (u32 tile0 = 0; tile0 < tiles; tile0 += TABLE) {
            const u32 number = warp * (32 * EACH) + lane;  // of the thread's first entry in the block
            u32 own[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const u32 e = first + number + 32 * i, tile = e < chunk.end ? all_tiles[e] - tile0 : ELSEWHERE;
                own[i] = tile < TABLE ? tile : ELSEWHERE;
            }
            for (int i = threadIdx.x; i < WARPS * TABLE / 2; i += THREADS) reinterpret_cast<u32 *>(shared.ranks)[i] = 0;
            __syncthreads();
            rank_entries(shared, own);
            __syncthreads();
            const int listed = place_lists(
                shared, x.counts + chunk.counts + tile0, x.begins + chunk.list + tile0, tiles - tile0, first + BLOCK < chunk.end
            );
            __syncthreads();
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (own[i] != ELSEWHERE)
                    shared.sorted[shared.ranks[warp][own[i] >> 16] + (own[i] & 0xffff)] = own[i] & 0xffff0000 | (number + 32 * i);
            __syncthreads();
            for (int i = threadIdx.x; i < listed; i += THREADS) {
                const u32 entry = shared.sorted[i];
                x.entries[shared.to[entry >> 16] + i] = static_cast<int>(first + (entry & 0xffff));
            }
        }
}
