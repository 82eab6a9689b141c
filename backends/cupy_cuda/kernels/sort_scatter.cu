// Counting sort, last step: scatter every entry to its list. Grid: one thread per entry.
#include "key_to_rows.cuh"

struct Arguments {
    Problem p;
    Sort sort;
    const int *ranks;  // [number], of sort_rank.cu
    const i64 *ends;   // [lists, chunks]: the inclusive prefix sum of its counts
    i64 *entries;      // [number]: bg * entries_per_bg + e, list after list
    i64 number;        // B*G * entries_per_bg
};

extern "C" __global__ void __launch_bounds__(256) sort_scatter(const __grid_constant__ Arguments x) {
    const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= x.number) return;
    const u32 bg = i / x.sort.entries_per_bg, e = i % x.sort.entries_per_bg;
    const int tile = x.sort.tile_of(x.p, bg, e);
    if (tile < 0) return;
    const i64 at = x.sort.count_index(bg, tile, e / static_cast<u32>(x.p.n * x.sort.reach) / static_cast<u32>(x.sort.chunk_rows));
    x.entries[(at ? x.ends[at - 1] : 0) + x.ranks[i]] = i;
}
