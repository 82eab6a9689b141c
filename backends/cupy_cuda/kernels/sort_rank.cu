// The rank of every entry within its stretch of rows and its list, and how many of each list a stretch has (lists.cuh).
#include "key_to_rows.cuh"

constexpr int THREADS = 256;

struct Arguments {
    Problem p;
    Turned t;
    int *ranks;   // [pairs * each]
    int *counts;  // [lists, stretches], zeros
};

extern "C" __global__ void __launch_bounds__(THREADS) sort_rank(const __grid_constant__ Arguments x) {
    __shared__ int4 fours[THREADS / 4];
    int *tiles = reinterpret_cast<int *>(fours);
    const int thread = threadIdx.x, lane = thread % 32;
    const u32 stretches = x.t.stretches, bg = blockIdx.x / stretches, stretch = blockIdx.x % stretches, row = x.p.n * x.t.reach;
    const u32 end = min((stretch + 1ll) * x.t.stretch * row, x.t.each);
    for (u32 first = stretch * static_cast<u32>(x.t.stretch) * row; first < end; first += THREADS) {
        const u32 e = first + thread;
        const int tile = e < end ? tile_of(x.p, x.t, bg, e) : -1;
        tiles[thread] = tile;
        __syncthreads();
        int before = __popc(__match_any_sync(ALL, tile) & ((1u << lane) - 1));
        for (int other = 0; other < thread - lane; other += 4) {
            const int4 four = *reinterpret_cast<const int4 *>(tiles + other);
            before += (four.x == tile) + (four.y == tile) + (four.z == tile) + (four.w == tile);
        }
        int *count = x.counts + share_of(x.t, bg, max(tile, 0), stretch);
        int rank = tile < 0 ? 0 : *count + before;
        __syncthreads();  // all have read the count of their list before it grows
        if (tile >= 0) {
            x.ranks[bg * x.t.each + e] = rank;
            atomicMax(count, rank + 1);
        }
        __syncthreads();
    }
}
