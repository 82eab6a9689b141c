// Counting sort, first step: the rank of every entry among those of its list in the same chunk of rows, and how many those are.
//
// Grid: one CTA per (b, g, chunk of rows), which goes over its entries 256 at a time, in ascending order.
#include "key_to_rows.cuh"

constexpr int THREADS = 256;

struct Arguments {
    Problem p;
    Sort sort;
    int *ranks;   // [B*G * entries_per_bg]
    int *counts;  // [lists, chunks]
};

extern "C" __global__ void __launch_bounds__(THREADS) sort_rank(const __grid_constant__ Arguments x) {
    __shared__ int4 fours[THREADS / 4];
    int *tiles = reinterpret_cast<int *>(fours);
    const int thread = threadIdx.x, lane = thread % 32;
    const u32 chunks = x.sort.chunks, bg = blockIdx.x / chunks, chunk = blockIdx.x % chunks, row_entries = x.p.n * x.sort.reach;
    for (u32 tile = thread; tile < x.sort.tiles; tile += THREADS) x.counts[x.sort.count_index(bg, tile, chunk)] = 0;
    __syncthreads();
    const u32 end = min((chunk + 1ll) * x.sort.chunk_rows * row_entries, x.sort.entries_per_bg);
    for (u32 first = chunk * static_cast<u32>(x.sort.chunk_rows) * row_entries; first < end; first += THREADS) {
        const u32 e = first + thread;
        const int tile = e < end ? x.sort.tile_of(x.p, bg, e) : -1;
        tiles[thread] = tile;
        __syncthreads();
        int before = __popc(__match_any_sync(ALL_LANES, tile) & ((1u << lane) - 1));
        for (int other = 0; other < thread - lane; other += 4) {
            const int4 four = *reinterpret_cast<const int4 *>(tiles + other);
            before += (four.x == tile) + (four.y == tile) + (four.z == tile) + (four.w == tile);
        }
        int *count = x.counts + x.sort.count_index(bg, max(tile, 0), chunk);
        const int rank = tile < 0 ? 0 : *count + before;
        __syncthreads();  // all have read the count of their list before it grows
        if (tile >= 0) {
            x.ranks[bg * x.sort.entries_per_bg + e] = rank;
            atomicMax(count, rank + 1);
        }
        __syncthreads();
    }
}
