// Counting sort, second step: how many entries each list has of the chunks before each, in place of its count; and where lists begin.
//
// Grid: one CTA per 32 lists, a list a lane, whose warps take a share of the chunks each. The CTA that finishes last adds up all lists.
#include "sort.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, EACH = 8;  // numbers of a thread that are loaded together

struct Arguments {
    int *counts;    // [lists / tiles, chunks, tiles]
    i64 *begins;    // [lists + 1]
    int *finished;  // CTAs
    i64 lists, tiles, chunks;
};

// Counts of the chunks [first, end) become sums of those before, from `before` on, where `kept`; the sum with all of them.
DEVICE int sum_chunks(int *counts, i64 tiles, u32 first, u32 end, int before, bool kept) {
    for (; first < end; first += EACH) {
        int own[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) own[i] = first + i < end ? counts[(first + i) * tiles] : 0;
#pragma unroll
        for (u32 i = 0; i < EACH; ++i) {
            if (kept && first + i < end) counts[(first + i) * tiles] = before;
            before += own[i];
        }
    }
    return before;
}

// begins: of every list but the first one, the number of entries of the list before. By one CTA.
DEVICE void sum_lists(volatile i64 *begins, i64 lists) {
    i64 before = 0;
    if (threadIdx.x == 0) begins[0] = 0;
    for (i64 first = 0; first < lists; first += THREADS * EACH) {
        const i64 at = first + threadIdx.x * EACH + 1;
        int own[EACH], sum[1] = {0}, all[1];
#pragma unroll
        for (int i = 0; i < EACH; ++i) own[i] = at + i <= lists ? static_cast<int>(begins[at + i]) : 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) sum[0] += own[i];
        int end = -sum[0];
        block_prefix_sum<THREADS>(sum, all);
        end += sum[0];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            end += own[i];
            if (at + i <= lists) begins[at + i] = before + end;
        }
        before += all[0];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_counts(const __grid_constant__ Arguments x) {
    __shared__ int sums[WARPS][32];
    __shared__ bool last;
    wait_for_stream();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, list = blockIdx.x * 32 + lane, tiles = x.tiles, chunks = x.chunks;
    const u32 share = (chunks + WARPS - 1) / WARPS, first = min(warp * share, chunks), end = min(first + share, chunks);
    int *counts = x.counts + static_cast<i64>(list / tiles) * chunks * tiles + list % tiles;
    const bool exists = list < x.lists;
    sums[warp][lane] = exists ? sum_chunks(counts, tiles, first, end, 0, false) : 0;
    __syncthreads();
    int before = 0;
    for (u32 i = 0; i < warp; ++i) before += sums[i][lane];
    if (exists) {
        before = sum_chunks(counts, tiles, first, end, before, true);
        if (warp == WARPS - 1) x.begins[list + 1] = before;
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(x.finished, 1) == static_cast<int>(gridDim.x) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum_lists(x.begins, x.lists);
}
