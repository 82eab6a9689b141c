// Counting sort, second step: how many entries each list has of the chunks before each, in place of its count; where lists begin; and how
// many segments come before every list. In torch this is twenty small kernels, most of whose time is the host's.
//
// Grid: one CTA per 32 lists, a list a lane, whose warps take a share of the chunks each. The CTA that finishes last adds up all lists.
#include "sort.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, EACH = 8, LISTS = 4;  // counts of a thread, lists of a thread, that are loaded together

struct Segments {
    i64 *before;           // [lists + 1]: how many the lists before have
    i64 longest, several;  // entries; 1: those of lists that have one do not count

    DEVICE int of(int entries) const {
        const u32 most = longest;
        const int segments = static_cast<int>((static_cast<u32>(entries) + most - 1) / most);
        return segments > several ? segments : 0;
    }
};

struct Arguments {
    int *counts;  // [lists / tiles, chunks, tiles], then how many CTAs have finished
    i64 *begins;  // [lists + 1]: where a list begins among the entries
    i64 lists, tiles, chunks;
    Segments segments[2];
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

// Prefix sums over all lists: of their entries, whose numbers `begins` holds, and of their segments. By one CTA, whose warps take 32 * LISTS
// adjacent lists each.
DEVICE void sum_lists(const Arguments &x) {
    __shared__ int warps[3][WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    volatile i64 *begins = x.begins;                            // written by other CTAs
    i64 *to[3] = {x.begins, x.segments[0].before, x.segments[1].before}, before[3] = {0, 0, 0};
    if (threadIdx.x == 0) to[0][0] = to[1][0] = to[2][0] = 0;
    for (i64 first = 0; first < x.lists; first += THREADS * LISTS) {
        const i64 at = first + warp * (32 * LISTS) + lane + 1;
        int own[LISTS], upto[3][LISTS], sum[3] = {0, 0, 0};
#pragma unroll
        for (int i = 0; i < LISTS; ++i) own[i] = at + 32 * i <= x.lists ? static_cast<int>(begins[at + 32 * i]) : 0;
#pragma unroll
        for (int i = 0; i < LISTS; ++i)
#pragma unroll
            for (int n = 0; n < 3; ++n) {
                upto[n][i] = sum[n] + warp_prefix_sum(n ? x.segments[n - 1].of(own[i]) : own[i]);
                sum[n] = __shfl_sync(ALL_LANES, upto[n][i], 31);
            }
        for (int n = 0; n < 3; ++n) warps[n][warp] = sum[n];
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 3; ++n) {
            i64 start = before[n];
            for (int i = 0; i < WARPS; ++i) {
                if (i < warp) start += warps[n][i];
                before[n] += warps[n][i];
            }
#pragma unroll
            for (int i = 0; i < LISTS; ++i)
                if (at + 32 * i <= x.lists) to[n][at + 32 * i] = start + upto[n][i];
        }
        __syncthreads();  // all have read the warps' sums
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
    if (threadIdx.x == 0) last = atomicAdd(x.counts + x.lists * x.chunks, 1) == static_cast<int>(gridDim.x) - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum_lists(x);
}
