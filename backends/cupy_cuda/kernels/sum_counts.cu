// Counting sort, second step: replace every count by the list's entries in earlier chunks, and compute where lists
// begin and how many segments come before each (sort.cuh). In torch this would take twenty small kernels, bound by host
// time.
//
// Grid: one CTA per 32 lists, one lane per list; the warps share the chunks. CTAs publish the sums of their lists, and
// add those of all earlier CTAs: these started earlier and never wait for later ones, so spinning is safe.
#include "sort.cuh"

constexpr int WARPS = 16, THREADS = 32 * WARPS, EACH = 8;  // counts that a thread loads together

struct Arguments {
    int *counts;  // [lists / tiles, chunks, tiles], then the CTAs' records (Published)
    i64 *begins;  // [lists + 1]: first entry of each list
    i64 lists, tiles, chunks;
    Segments segments[2];
};

// Sum the counts of chunks [first, end) onto `before`; return the total. kept: replace each count by the sum before it.
DEVICE int sum_chunks(int *counts, i64 tiles, u32 first, u32 end, int before, bool kept) {
    for (; first < end; first += EACH) {
        int own[EACH];
        UNROLL for (u32 i = 0; i < EACH; ++i) own[i] = first + i < end ? counts[(first + i) * tiles] : 0;
        UNROLL for (u32 i = 0; i < EACH; ++i) {
            if (kept && first + i < end) counts[(first + i) * tiles] = before;
            before += own[i];
        }
    }
    return before;
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_counts(const __grid_constant__ Arguments x) {
    __shared__ int shares[WARPS][32];
    __shared__ i64 others[3][WARPS];
    wait_for_stream();
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, list = blockIdx.x * 32 + lane, tiles = x.tiles, chunks = x.chunks;
    const u32 share = (chunks + WARPS - 1) / WARPS, first = min(warp * share, chunks), end = min(first + share, chunks);
    int *counts = x.counts + static_cast<i64>(list / tiles) * chunks * tiles + list % tiles;
    const bool exists = list < x.lists;
    shares[warp][lane] = exists ? sum_chunks(counts, tiles, first, end, 0, false) : 0;
    __syncthreads();
    int before = 0, upto[3];  // entries; inclusive sums of entries and of segments of both kinds
    for (u32 i = 0; i < warp; ++i) before += shares[i][lane];
    volatile Published *published = reinterpret_cast<volatile Published *>(x.counts + x.lists * chunks);
    if (warp == WARPS - 1) {
        const int entries = before + shares[warp][lane];
        for (int n = 0; n < 3; ++n) {
            upto[n] = warp_prefix_sum(n ? x.segments[n - 1].of(entries) : entries);
            if (lane == 31) published[blockIdx.x].sums[n] = upto[n];
        }
        __threadfence();
        if (lane == 31) published[blockIdx.x].ready = 1;
    }
    if (exists) sum_chunks(counts, tiles, first, end, before, true);
    i64 sums[3] = {0, 0, 0};
    for (u32 cta = threadIdx.x; cta < blockIdx.x; cta += THREADS) {
        while (!published[cta].ready) {}
        __threadfence();
        for (int n = 0; n < 3; ++n) sums[n] += published[cta].sums[n];
    }
    for (int n = 0; n < 3; ++n) {
        for (int far = 16; far > 0; far /= 2) sums[n] += __shfl_xor_sync(ALL_LANES, sums[n], far);
        others[n][warp] = sums[n];
    }
    __syncthreads();
    if (warp != WARPS - 1) return;
    for (int n = 0; n < 3; ++n) {
        i64 *to = n ? x.segments[n - 1].before : x.begins, sum = upto[n];
        for (int i = 0; i < WARPS; ++i) sum += others[n][i];
        if (exists) to[list + 1] = sum;
        if (list == 0) to[0] = 0;
    }
}
