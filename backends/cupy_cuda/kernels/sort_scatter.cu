// Every entry to its place: where its list's share of its stretch begins, and its rank there (lists.cuh).
#include "key_to_rows.cuh"

struct Arguments {
    Problem p;
    Turned t;
    const int *ranks;  // [pairs * each]
    const i64 *ends;   // [lists, stretches]: entries up to the end of that share
    i64 *entries;      // [pairs * each]: bg * each + e, list after list
    i64 number;        // pairs * each
};

extern "C" __global__ void __launch_bounds__(256) sort_scatter(const __grid_constant__ Arguments x) {
    const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
    if (i >= x.number) return;
    const u32 bg = i / x.t.each, e = i % x.t.each;
    const int tile = tile_of(x.p, x.t, bg, e);
    if (tile < 0) return;
    const i64 share = share_of(x.t, bg, tile, e / static_cast<u32>(x.p.n * x.t.reach) / static_cast<u32>(x.t.stretch));
    x.entries[(share ? x.ends[share - 1] : 0) + x.ranks[i]] = i;
}
