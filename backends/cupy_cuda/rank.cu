// The rank of every entry within its stretch of rows and its list, and how many of each list a stretch has (lists.cuh).
#include "lists.cuh"

constexpr int THREADS = 256;

struct Arguments {
    Problem p;
    Turned t;
    int *ranks;   // [pairs * each]
    int *counts;  // [lists, stretches], zeros
};

extern "C" __global__ void __launch_bounds__(THREADS) rank(const __grid_constant__ Arguments x) {
    __shared__ int tiles[THREADS];
    const int thread = threadIdx.x;
    i64 bg = blockIdx.x / x.t.stretches, stretch = blockIdx.x % x.t.stretches, row = x.p.n * x.t.reach;
    i64 end = min((stretch + 1) * x.t.stretch * row, x.t.each);
    for (i64 first = stretch * x.t.stretch * row; first < end; first += THREADS) {
        i64 e = first + thread;
        int tile = e < end ? tile_of(x.p, x.t, bg, e) : -1;
        tiles[thread] = tile;
        __syncthreads();
        int before = 0, all = 0;
#pragma unroll 8
        for (int other = 0; other < THREADS; ++other) {
            bool same = tiles[other] == tile;
            all += same;
            before += same && other < thread;
        }
        int *count = x.counts + share_of(x.t, bg, max(tile, 0), stretch);
        int rank = tile < 0 ? 0 : *count + before;
        __syncthreads();  // all have read the count of their list before the last of them writes it
        if (tile >= 0) {
            x.ranks[bg * x.t.each + e] = rank;
            if (before == all - 1) *count = rank + 1;
        }
        __syncthreads();
    }
}
