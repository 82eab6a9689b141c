// The list that the CTAs of few tokens make, written to memory.
#include "few_tokens.cuh"

struct Arguments {
    Problem p;
    int *counts;   // [B * G, 2]: whole blocks, all blocks
    u32 *entries;  // [B * G, MOST_ENTRIES]
};

extern "C" __global__ void few_union(const Arguments x) {
    const u32 G = x.p.G;
    make_union<256>(x.p, blockIdx.x / G, blockIdx.x % G, 0, x.p.S);
    const int e = threadIdx.x;
    if (e == 0) x.counts[2 * blockIdx.x] = union_counts.x, x.counts[2 * blockIdx.x + 1] = union_counts.y;
    if (e < union_counts.y) x.entries[blockIdx.x * MOST_ENTRIES + e] = union_entries[e];
    __syncthreads();
}
